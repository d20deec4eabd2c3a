"""The part `attention`: a layer's attention by cuDNN and by the built-in kernels, in turns in one run.
--attention-kernel auto chooses by these rows: dev/gpu_check/attention_choice.py writes them into
llmc/ops/attention/attention_choice.h."""

from runner import StepServers

SHAPES = [("1.4b", 8, 2048), ("124m", 6, 1024), ("3b", 12, 4096), ("1.4b", 8, 16384)]  # preset, key/value heads, T
VARIANTS = ("diff_v2", "baseline")
TINY, TINY_BATCH = [("tiny", 2, 40)], 2
ROWS = 16384  # B T: 10 GiB of a layer's tensors at the widest shape, in two programs
KERNELS, ROUNDS = ("own", "cudnn"), 7
MODES = {"": [], ", not deterministic": ["--no-deterministic"]}


def attention(check):
    for shape in TINY if check.pretend else SHAPES:
        for mode in MODES:
            for variant in VARIANTS:
                yield f"{shape[0]} {variant} T {shape[2]}{mode}", compare, variant, mode, *shape


def compare(check, findings, variant, mode, preset, NKV, T):
    """Where cuDNN has no plan there is no choice."""
    B = TINY_BATCH if check.pretend else ROWS // T
    of, times = f"{preset} {variant}, B {B} T {T}{mode}", {}
    with StepServers(check) as servers:
        for kernel in KERNELS:
            words = [*MODES[mode], "--attention-kernel", kernel, "attention-turns", preset, variant, NKV, B, T]
            servers.start(*check.program("BENCH_CUDA"), *words)
        for what in ("forward", "backward"):
            times[what] = servers.turns(1 + (2 if check.pretend else ROUNDS), 60, what)
    if "--attention-kernel cudnn: " in servers.why:
        return findings.fact(f"{of}: no choice", servers.why)
    if servers.why:
        return findings.failed_step(f"{of}: attention by both kernels", servers.why)
    for what, ms in times.items():
        findings.rounds(f"attention {what}", of, ms[1:], "cuDNN", servers.abouts[0])
    return findings.check(f"{of}: attention by both kernels", True)
