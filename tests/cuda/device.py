"""Runs of the CUDA trainer, and its comparison with the CPU trainer ($TRAIN_DIFFV2) on the same data.

DEVICE_TRAINER is the command of the CUDA trainer (build/oncpu/test_trainer --trainer), whose precision is that of its
build.

The shapes are unaligned on purpose: rows that are no multiple of 8 or 16, widths that are no multiple of a 16-byte
pack, a vocabulary with V % 8 = 3 or of a few tokens, one row, and a sequence below the model's context.
"""

import functools
import os
import re

from program import Random, linked_with, program, records, run, trainer, without_times, write_shard
from variants import VARIANTS

os.environ["LOGIT_ROWS"] = "16"  # so that these models have several pieces of logits, the last of them partial
DEVICE = program("DEVICE_TRAINER", "build/oncpu/test_trainer --trainer")
SANITIZED = linked_with("libasan", DEVICE[0])
FP32 = "master weights" not in run(*DEVICE, "--dry-run").done().out
PRECISION = "fp32" if FP32 else "bf16"

DATA = "--train-data data.bin"
ODD_SHAPE = (
    "--hidden 20 --heads 6 --kv-heads 2 --head-dim 12 --ffn 27 --vocab 43 --seq-len 13 --batch-size 3 "
    "--no-tie-embeddings"
)
ODD = f"--layers 3 {ODD_SHAPE}"
TRAIN_ODD = f"{DATA} {ODD}"
EVEN = (
    "--layers 2 --hidden 64 --heads 4 --kv-heads 4 --head-dim 16 --ffn 96 --vocab 256 --seq-len 65 --batch-size 2 "
    "--tie-embeddings"
)
ONE_ROW = (
    "--layers 1 --hidden 16 --heads 2 --kv-heads 2 --head-dim 8 --ffn 12 --vocab 5 --seq-len 1 --batch-size 1 "
    "--tie-embeddings --z-loss 0.5"
)
# groups of 3 heads; packs of 16 bytes everywhere, one past a tile of rows; one row and five tokens, with a z-loss
SHAPES = [ODD, EVEN, ONE_ROW]
EXPERTS = {
    "three of five": "--experts 5 --experts-active 3 --expert-ffn 24 --optimizer normuon",
    "one of four": "--experts 4 --experts-active 1 --expert-ffn 12 --shared-experts 2 --dense-layers 1",
}


def value_of(option, options):
    return int(re.search(rf"{option} (\d+)", options)[1])


def with_variant(name, shape, time=0):
    """--attention and a shape, with as many more heads as the variant requires; every second time QK-norm."""
    signals, groups, heads = VARIANTS[name].signals, value_of("--kv-heads", shape), value_of("--heads", shape)
    while signals > 1 and heads // groups % signals:
        heads += groups
    norm = "--qk-norm" if (list(VARIANTS).index(name) + time) % 2 else ""
    return re.sub(r"--heads \d+", f"--attention {name} {norm} --heads {heads}", shape)


def with_experts(name):
    """A model with experts."""
    return f"{DATA} {with_variant('diff_v2', ODD_SHAPE)} {EXPERTS[name]}"


@functools.cache
def tokens_below(vocab):
    """One of six tokens is 0, which separates documents, so that most sequences have one.

    With this seed no row of a batch is so near zero that its norm before o_proj amplifies the rounding of bf16.
    """
    random, tokens = Random(12), []
    for _ in range(4000):
        token = min(random.below(vocab), random.below(vocab))  # small tokens are more likely
        tokens.append(0 if random.below(6) == 0 else token)
    return tokens


def write_data(directory, vocab):
    write_shard(directory / "data.bin", tokens_below(vocab))


# ---- runs


def on_device(directory, *options, env=""):
    """Runs the CUDA trainer in a directory. env: assignments of its environment, as in a shell."""
    return run("env", env, *DEVICE, "--threads 1", *options, cwd=directory)


def on_cpu(directory, *options):
    return run(*trainer(), "--threads 1", *options, cwd=directory)


def run_both(directory, *options):
    """Trains the run "cpu" on the CPU and "device" on the device."""
    on_cpu(directory, *options, "--out cpu").done()
    on_device(directory, *options, "--out device").done()


def compare_records(directory, kind, count, tolerance):
    """The records of run_both are equal except for times; numbers within `tolerance` of their size."""
    cpu, device = (without_times(records(directory / name, kind)) for name in ("cpu", "device"))
    assert len(cpu) == len(device) == count, (kind, cpu, device)
    for x, y in zip(cpu, device):
        for key in x:
            # in bf16, near ties of a few of 12 examples have another order
            slack = 0.35 if not FP32 and key.startswith("accuracy") else 1e-6
            if type(x[key]) in (int, float):
                assert abs(x[key] - y[key]) <= tolerance * abs(x[key]) + slack, (kind, key, x, y)
            else:
                assert x[key] == y[key], (kind, key, x, y)
