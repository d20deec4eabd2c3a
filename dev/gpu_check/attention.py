"""The part `attention`: a layer's attention by cuDNN and by the built-in kernels, in turns in one run. --sdpa auto
chooses by these rows: dev/results/attention.py writes them into llmc/ops/attention_choice.h."""

from runner import StepServers

SHAPES = [("1.4b", 8, 2048), ("3b", 12, 4096), ("124m", 6, 1024), ("1.4b", 8, 16384)]  # preset, key/value heads, T
VARIANTS = ("diff_v2", "baseline")
TINY = [("tiny", 2, 40)]
BATCHES, TINY_BATCHES = (16, 8, 4, 2, 1), (2,)  # to try, of at most ROWS tokens
ROWS = 32768
KERNELS, ROUNDS = ("own", "cudnn"), 7
MODES = {"": [], ", not deterministic": ["--no-deterministic"]}


def attention(check, part):
    for mode in MODES:
        for shape in TINY if check.pretend else SHAPES:
            for variant in VARIANTS:
                yield f"{shape[0]} {variant} T {shape[2]}{mode}", compare, variant, mode, *shape


def compare(check, part, variant, mode, preset, NKV, T):
    """The largest batch size with which both kernels fit. Where cuDNN has no plan there is no choice."""
    for B in [B for B in (TINY_BATCHES if check.pretend else BATCHES) if B * T <= ROWS or B == 1]:
        of, times = f"{preset} {variant}, B {B} T {T}{mode}", {}
        with StepServers(check) as servers:
            for kernel in KERNELS:
                words = [*MODES[mode], "--sdpa", kernel, "attention-turns", preset, variant, NKV, B, T]
                servers.start(*check.commands["BENCH_CUDA"], *words)
            for what in ("forward", "backward"):
                times[what] = servers.turns(1 + (2 if check.pretend else ROUNDS), 60, what)
        if not servers.why:
            for what, ms in times.items():
                part.rounds(f"attention {what}", of, ms[1:], "cuDNN", servers.abouts[0])
            return part.check(f"{of}: attention by both kernels", True)
        if "--sdpa cudnn: " in servers.why:
            return part.fact(f"{of}: no choice", servers.why)
    return part.check(f"{preset} {variant} T {T}{mode}: attention by both kernels", False, servers.why)
