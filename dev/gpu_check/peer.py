"""The part `peer`: training steps of this program and of PyTorch, alternating on the same machine."""

import os

from programs import ROOT
from runner import Skip, StepServers, last_line

# (preset, attention, key/value heads, B, T)
PEERS = [
    ("1.4b", "diff_v2", 8, 4, 2048),
    ("124m", "diff_v2", 6, 16, 1024),
    ("1.4b", "baseline", 8, 4, 2048),
    ("124m", "baseline", 6, 16, 1024),
]
ROUNDS = 12
TARGET = 1.10  # tokens/s, relative to PyTorch's


def peer(check, part):
    python = os.environ.get("TORCH_PYTHON") or "python3"
    probe = "import torch; assert torch.cuda.is_available() or %d; print(torch.__version__)" % check.pretend
    status, text = check.run([python, "-c", probe], 120)
    if status != 0:
        raise Skip(f"{python} has no torch with a GPU: {last_line(text)} (TORCH_PYTHON=PYTHON selects another)")
    for case in [("tiny", "diff_v2", 2, 1, 16)] if check.pretend else PEERS:
        yield " ".join(case[:2]), compare_with_torch, python, case


def compare_with_torch(check, part, python, case):
    """Alternates steps of both programs, so that both see the same load. PyTorch compiles before."""
    name = " ".join(case[:2])
    options = ["--device", "cpu"] if check.pretend else ["--device", "cuda", "--compile"]
    with StepServers(check) as servers:
        # PyTorch first: its allocator keeps the memory of its compiler, and this trainer plans with the free memory
        servers.start(python, ROOT / "dev/bench/bench_torch.py", *case, *options, first_step=420)
        servers.turns(2, 120)
        if servers.why:
            return part.check(f"PyTorch runs {name}", False, servers.why)
        servers.start(*check.commands["BENCH_CUDA"], "turns", *case, first_step=120)
        if servers.why:
            return part.check(f"bench_cuda runs {name} beside PyTorch", False, servers.why)
        times = servers.turns(2 if check.pretend else ROUNDS, 60)
    if servers.why:
        return part.check(f"alternating steps of {name}", False, servers.why)
    torch, about = servers.abouts
    parameters = [words.split()[0] for words in (about, torch)]
    differ = " and ".join(parameters) if parameters[0] != parameters[1] else ""
    part.check(f"{name}: both models have the same number of parameters", not differ, differ)
    of, times = "{} {}, {} key/value heads, B {} T {}".format(*case), [(ours, peer) for peer, ours in times]
    ratio = part.rounds("step", of, times, "PyTorch", f"{torch}; ours: {about}")
    if not check.pretend:
        part.target(f"{name}: tokens/s relative to PyTorch", ratio, TARGET)
    return None
