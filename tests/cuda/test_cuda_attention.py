"""What computes attention on the device: the line and the warnings at the start, and errors."""

import re

import pytest
from device import DATA, EVEN, FP32, TRAIN_ODD, on_cpu, on_device
from gradients import compare
from program import DONE, FAILED, records

OWN = "the built-in kernel"
LOOPS = "loops in the place of cuDNN (the default, not measured on this GPU)"
IN_ORDER = "deterministic backward"
WINDOWS, DOCUMENTS = "--window 9 --full-every 2", "--doc-mask --separator 0"
HOPPER = "documents are only supported on Hopper and above"
H200, B200 = "CUDA_ON_CPU_NAME=H200", "CUDA_ON_CPU_NAME='NVIDIA B200' CUDA_ON_CPU_CUDNN_VERSION="
NO_WINDOW = "CUDA_ON_CPU_CUDNN_FAULT='window: no engine'"
# The environment, the options, and the line at the start.
LINES = [
    ("", "", f"{LOOPS}, {IN_ORDER}"),
    ("CUDA_ON_CPU_CUDNN=16,16", "--attention diff_v1", f"{LOOPS}, values in two parts, {IN_ORDER}"),
    ("CUDA_ON_CPU_CUDNN=32,16", "--attention diff_v1", f"{LOOPS}, values in two parts, {IN_ORDER}"),
    ("CUDA_ON_CPU_CUDNN=32,8", "--attention diff_v1", f"{LOOPS}; backward by {OWN} (heads are too wide)"),
    ("CUDA_ON_CPU_CUDNN=8,8", "--attention diff_v1", f"{OWN} (heads are too wide)"),
    ("", "--no-deterministic", f"{LOOPS}, nondeterministic backward"),
    ("", "--attention-kernel own", f"{OWN} (--attention-kernel own)"),
    ("", WINDOWS, f"{LOOPS}, {IN_ORDER}"),
    (NO_WINDOW, WINDOWS, f"{OWN} (no engine); layers without a window: {LOOPS}, {IN_ORDER}"),
    ("", DOCUMENTS, f"{LOOPS}, up to 3 documents per call; backward by {OWN} ({HOPPER})"),
    (H200, f"--attention diff_v1 {DOCUMENTS} {WINDOWS}", f"{LOOPS}, {IN_ORDER}, up to 3 documents per call"),
]


def expect_attention(directory, model, env, options, line):
    if FP32 and options != "--attention-kernel own":
        line = f"{OWN} (an fp32 build; cuDNN supports bf16)"
    out = on_device(directory, DATA, model, options, "--steps 1", env=env).done().out
    assert out.splitlines()[0] == f"attention: {line}", (env, options)
    if "diff_v1" in options:  # whose widths of keys and values differ
        compare(directory, "diff_v1", DATA, model, options, env=env)


@pytest.mark.full
def test_attention_line(even):
    """a run prints its implementation of attention, and all implementations agree"""
    for env, options, line in LINES:
        expect_attention(even, EVEN, env, options, line)
    # 65 log-sum-exps of the first key set, of 4 bytes each: those of the second begin on the next 16 bytes
    model = EVEN.replace("--heads 4 --kv-heads 4", "--heads 2 --kv-heads 2").replace("batch-size 2", "batch-size 1")
    for variant in ("diff_v1", "diff_scalar"):
        expect_attention(even, model, "", f"--attention {variant}", f"{LOOPS}, {IN_ORDER}")


def test_cudnn_required(odd):
    """--attention-kernel cudnn fails at shapes that cuDNN does not support, and on the CPU"""
    options = f"{TRAIN_ODD} --steps 1 --attention-kernel cudnn"
    on_device(odd, options).one_line(FAILED, "--attention-kernel cudnn: forward")
    on_cpu(odd, options).one_line(FAILED, "--attention-kernel cudnn requires a GPU")


TAIL = "CUDA_ON_CPU_CUDNN_FAULT='tail: on'"
WIDTH_12 = "--head-dim 12 --seq-len 9"
BACKWARD = "attention's backward is computed by the built-in kernel"
MULTIPLE = "choose --head-dim so that the width of every head is a multiple of 8"
# The environment, the options and the parts of the warning, if there is one. Without a shape: heads of 16, 9 positions.
WARNINGS = [
    ("", ""),
    ("", "--attention-kernel own"),
    ("", "--head-dim 16 --seq-len 1"),
    ("", WIDTH_12, "attention is computed by the built-in kernel", MULTIPLE),
    ("", f"{WIDTH_12} --dry-run", MULTIPLE),
    ("", "--window 4"),
    (NO_WINDOW, "--window 4", "slower: no engine; a newer cuDNN"),
    ("", DOCUMENTS, BACKWARD, "cuDNN computes it without --doc-mask, and on an H200 or B200 with"),
    (H200, f"{DOCUMENTS} --window 4"),
    (
        f"{H200} {TAIL}",
        f"--head-dim 16 --seq-len 65 {DOCUMENTS}",
        "gives NaN for documents, one of them of 64 positions, where T % 128 is 64; a newer cuDNN may",
    ),
    (f"{B200}91800", DOCUMENTS),
    ("", f"{DOCUMENTS} --attention-kernel own"),
    (
        "CUDA_ON_CPU_CUDNN=16,8",
        "",
        BACKWARD,
        "heads are too wide; a newer cuDNN may support it, or heads of another width",
    ),
    (f"{B200}91700", "", BACKWARD, "cuDNN computes it with --no-deterministic"),
    (f"{B200}91700", "--no-deterministic"),
    (f"{B200}91700", "--eval --init run/checkpoints/step_00000001 --val-data data.bin --val-steps 1"),
    (f"{B200}91800", ""),
    ("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0", "", "ATTN_DP_WORKSPACE_LIMIT is ignored"),
    ("CUDNN_RESCALE_THRESHOLD=1", "", "CUDNN_RESCALE_THRESHOLD is ignored"),
    (
        f"{H200} {TAIL}",
        "--head-dim 16 --seq-len 192",
        BACKWARD,
        "gives NaN at 192 positions, where T % 128 is 64; cuDNN computes it if --seq-len is a multiple of 128",
    ),
    (H200, "--head-dim 16 --seq-len 192"),
    (f"{H200} {TAIL}", "--head-dim 16 --seq-len 128"),
    (TAIL, "--head-dim 16 --seq-len 192"),
    ("CUDA_ON_CPU_CUDNN_VERSION=90800", "", "cuDNN 9.8.0 has known bugs in attention: 9.11 or newer"),
    ("CUDA_ON_CPU_CUDNN_VERSION=91000", "", "cuDNN 9.10.0 has known bugs"),
    ("CUDA_ON_CPU_CUDNN_VERSION=91001", "", "cuDNN 9.10.1 has known bugs"),
    ("CUDA_ON_CPU_CUDNN_VERSION=91002", ""),
    ("CUDA_ON_CPU_CUDNN_FAULT='open: it does not start'", "", "slower: it does not start; make"),
    ("CUDA_ON_CPU_CUDNN_FAULT='plan: no engine'", "", "slower: no engine; a newer cuDNN"),
]


@pytest.mark.full
def test_warnings(even):
    """a run warns once if attention falls back to the built-in kernel, and the suggested option works"""
    model = f"{DATA} --layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 32 --vocab 256 --batch-size 2 --steps 1"
    shape = "--head-dim 16 --seq-len 9"
    on_device(even, model, shape, "--out run").done()
    for env, options, *parts in WARNINGS:
        start = [] if "--eval" in options else [model] if "--head-dim" in options else [model, shape]
        result = on_device(even, *start, options, env=env)
        if FP32 and "CUDNN_FRONTEND" not in env and "THRESHOLD" not in env:
            parts = []
        assert result.status == DONE and result.err.count("\n") == bool(parts), (env, options, result)
        assert all(part in result.err for part in parts), (env, options, result)


@pytest.mark.bf16
@pytest.mark.full
def test_registers(even):
    """kernels of Hopper that would wait for registers for ever are replaced, with a warning for each"""
    env = "CUDA_ON_CPU_CAPABILITY=90a CUDA_ON_CPU_REGISTERS=160"
    model = EVEN.replace("--head-dim 16", "--head-dim 64").replace("--layers 2", "--layers 1")
    for attention, pairs in (("baseline", 1), ("diff_v2", 2)):
        options = f"{DATA} {model} --attention {attention} --attention-kernel own"
        compare(even, attention, options, env=env)
        result = on_device(even, options, "--steps 2", env=env)
        text = "diffv2: attention_wgmma_{}_kernel<{}> has 160 registers per thread and requires 168: a slower kernel "
        lines = [text.format("forward", f"{pairs}, 64, 64"), text.format("backward", f"64, 64, {pairs}")]
        assert result.status == DONE and len(result.err.splitlines()) == 2, result
        assert all(a.startswith(b) for a, b in zip(result.err.splitlines(), lines)), result.err


@pytest.mark.bf16
def test_cudnn_errors(even):
    """a run that requires cuDNN fails if cuDNN does not support its shapes"""
    heads = "--attention-kernel cudnn: forward of 8 heads of width 16 and 16"
    for env, options, error in [
        ("CUDA_ON_CPU_CUDNN_VERSION=91001", "--attention-kernel cudnn", f"{heads}: cuDNN 9.10.1 has known bugs"),
        ("CUDA_ON_CPU_CUDNN_FAULT='plan: no engine'", "--attention-kernel cudnn", "no engine; omit the option"),
        ("CUDA_ON_CPU_CUDNN_FAULT='run: no launch'", "", "no launch; --attention-kernel own avoids cuDNN"),
    ]:
        on_device(even, DATA, EVEN, "--steps 1", options, env=env).one_line(FAILED, error)


@pytest.mark.bf16
@pytest.mark.full
def test_validation_remainder(even):
    """cuDNN also computes the last, partial batch of a validation"""
    # Seven windows, one by one or as four and three: the same kernel gives the same losses. The built-in kernel and
    # cuDNN round differently.
    model = (
        f"{DATA} --val-data data.bin --val-steps 7 --layers 1 --hidden 32 --heads 2 --kv-heads 2 --head-dim 16 "
        "--ffn 32 --vocab 256 --seq-len 500 --total-batch 2000 --steps 1 --lr 0"
    )
    for batch in (1, 4):
        on_device(even, model, f"--batch-size {batch} --out run{batch}").done()
    losses = [records(even / f"run{batch}", "val")[0]["loss"] for batch in (1, 4)]
    assert abs(losses[0] - losses[1]) <= 1e-12 * losses[0], losses


@pytest.mark.bf16
def test_workspace(tmp_path):
    """the workspace of attention depends on the device memory"""
    # dS of 8 query heads, (1088, 1152) or (2112, 2176) in bf16, takes 20 or 74 MiB per sequence. The limit is half of
    # the device memory that the run leaves, at least 64 MiB, and 1 GiB without a device.
    model = "--dry-run --layers 1 --hidden 64 --heads 4 --kv-heads 4 --head-dim 16 --ffn 96 --vocab 256"
    small = "CUDA_ON_CPU_MEMORY=64"
    for env, options, end in [
        ("", "--seq-len 1030 --batch-size 16", IN_ORDER),
        ("CUDA_ON_CPU_DEVICES=0", "--seq-len 1030 --batch-size 16", IN_ORDER),
        (small, "--seq-len 1030 --batch-size 16", f"{IN_ORDER}, 2 sequences per call"),
        (small, "--seq-len 2100 --batch-size 1", f"{IN_ORDER}, 2 of 4 groups of heads per call"),
        (small, "--seq-len 2100 --batch-size 2", f"{IN_ORDER}, 1 sequence per call, 2 of 4 groups of heads per call"),
        (small, "--seq-len 2100 --batch-size 2 --no-deterministic", "nondeterministic backward"),
    ]:
        out = on_device(tmp_path, model, options, env=env).done().out
        assert re.match(rf"attention: .*{end}\n", out), (env, options, out)
