"""The part `peer`: training steps of this program and of PyTorch, alternating on the same machine."""

import os
import shlex

from programs import ROOT
from runner import Program, Skip, StepServers, Unfinished, last_line

# (preset, attention, key/value heads, T), batch sizes to try
PEERS = [
    (("1.4b", "diff_v2", 8, 2048), (8, 4, 2)),
    (("124m", "diff_v2", 6, 1024), (16, 8)),
    (("1.4b", "baseline", 8, 2048), (8, 4, 2)),
    (("124m", "baseline", 6, 1024), (16, 8)),
]
TINY = [(("tiny", "diff_v2", 2, 16), (1,))]
BESIDE = 2.2  # memory of both programs, relative to ours: 39.9 and about 46 GiB for 1.4b at B 4
MODES = {"": [], ", not deterministic": ["--no-deterministic"]}
ROUNDS = 12
TARGET = 1.10  # tokens/s, relative to PyTorch's


def peers(check):
    return TINY if check.pretend else PEERS


def command_of(check, case, B):
    preset, attention, NKV, T = case
    options = ["--device", "cpu"] if check.pretend else ["--device", "cuda", "--compile"]
    return [torch_python(), ROOT / "dev/bench/bench_torch.py", preset, attention, NKV, B, T, *options]


def torch_python():
    return os.environ.get("TORCH_PYTHON") or "python3"


def peer(check):
    probe = "import torch; assert torch.cuda.is_available() or %d; print(torch.__version__)" % check.pretend
    status, text = check.run([torch_python(), "-c", probe], 120)
    if status != 0:
        raise Skip(f"{torch_python()} has no torch with a GPU: {last_line(text)} (TORCH_PYTHON=PYTHON selects another)")
    for case, sizes in peers(check):
        yield " ".join(case[:2]), compare_with_torch, case, sizes


def compile_early(check):
    """Starts a program that compiles PyTorch's models while other parts use the cores: the compiler keeps its results.
    Returns None if that is not possible: the part `peer` reports what fails."""
    try:
        fitting = [(case, check.largest_batch(case, sizes, BESIDE)) for case, sizes in peers(check)]
    except (Unfinished, RuntimeError):
        return None
    commands = [f"echo | {shlex.join(map(str, command_of(check, case, B)))}" for case, B in fitting if B]
    return Program(check, ["sh", "-c", "; ".join(commands)])


def compare_with_torch(check, findings, case, sizes):
    """Alternates steps of both programs, so that both see the same load."""
    name, B = " ".join(case[:2]), check.largest_batch(case, sizes, BESIDE)
    if not B:
        return findings.fact(f"{name} beside PyTorch", f"does not fit at B {sizes[-1]}")
    preset, attention, NKV, T = case
    with StepServers(check) as torch:
        # PyTorch first: its allocator keeps the memory of its compiler, and this trainer plans with the free memory
        torch.start(*command_of(check, case, B), first_step=420)
        torch.turns(2, 120)
        if torch.why:
            return findings.failed_step(f"PyTorch runs {name}", torch.why)
        for mode, options in MODES.items():
            with StepServers(check) as ours:
                words = [*options, "turns", preset, attention, NKV, B, T]
                ours.start(*check.program("BENCH_CUDA"), *words, first_step=120)
                times = []
                while not ours.why and not torch.why and len(times) < (2 if check.pretend else ROUNDS):
                    times += zip(*ours.turns(1, 60), *torch.turns(1, 60))
            if ours.why or torch.why:
                findings.failed_step(f"alternating steps of {name}{mode}", ours.why or torch.why)
            else:
                compare(check, findings, f"{name}, {NKV} key/value heads, B {B} T {T}{mode}", times, ours, torch)
    return None


def compare(check, findings, of, times, ours, torch):
    about, other = ours.abouts[0], torch.abouts[0]
    differ = about.split()[0] != other.split()[0]
    findings.check(f"{of}: both models have the same number of parameters", not differ, f"{about}; {other}")
    ratio = findings.rounds("step", of, times, "PyTorch", f"{other}; ours: {about}")
    if not check.pretend:
        findings.target(f"{of}: tokens/s relative to PyTorch", ratio, TARGET)
