"""Compares the speed of the CPU trainer with PyTorch and llm.c, in turns in one run: same shapes, same threads.

Usage: dev/bench/bench_peers.py [--rounds N] [--threads N] [--matmul-dtype TYPE] [--torch PYTHON] [--llmc DIRECTORY]
                                [CASE...]
       dev/bench/bench_peers.py --nanogpt DIRECTORY [--corpus DIR] [--minutes M] [--seeds N] [--own OPTIONS]
                                [--torch PYTHON] [SETTINGS...]
  --matmul-dtype
              fp32 (default) or bf16: our --matmul-dtype bf16 against PyTorch under autocast to bf16
  --torch     a Python with torch 2.5 or later (python3); none: without PyTorch
  --llmc      a checkout of karpathy/llm.c (default: without llm.c)
  CASE        PRESET,ATTENTION,KV_HEADS,B,T; KV_HEADS 0: the preset's (default: CASES below). llm.c runs the cases of a
              124m baseline with 12 key/value heads: its GPT-2 has the same products (an MLP of two matrices of 768 x
              3072 instead of three of 768 x 2048), and also biases, learned positions and LayerNorm.
  --nanogpt   a checkout of karpathy/nanoGPT: compares bits per byte after the same minutes of training (nanogpt.py).
              Requires ./train_diffv2, numpy and xxhash in this Python, and numpy and PyTorch in that of --torch
  --corpus    of text_to_shards or scripts/corpus.sh (corpus)
  --minutes, --seeds   of training, and runs of each (3, 3)
  --own       options of ./train_diffv2 (those of scripts/quickstart.sh, with --matmul-dtype bf16)
  SETTINGS    other options of nanoGPT's train.py, one argument each; those of its README for a CPU are always tried

Speed requires build/bench (make build/bench). Each program runs one step in its turn while the others wait. The ratio
is the median over the rounds of (its time / our time), with the smallest and the largest. PyTorch runs eagerly and
compiled. llm.c cannot run single steps: it is stopped with SIGSTOP between its turns, and an interrupted step is not
counted. It is compiled from a copy with other B and T, with its own flags, and starts from random weights and tokens.
"""

import argparse
import array
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile

CASES = [
    "124m,baseline,12,4,64",
    "124m,baseline,12,4,256",
    "124m,baseline,12,1,1024",
    "124m,diff_v2,0,4,256",
    "124m,diff_v2,0,1,1024",
    "small,diff_v2,0,16,256",
]


class StepServer:
    """A program that runs a step for each line on its stdin."""

    def __init__(self, name, command, env=None):
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.about = self.process.stdout.readline().strip()
        if not self.about:
            sys.exit(f"bench_peers.py: {name} did not start: {' '.join(command)}")

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench_peers.py: {self.name} ended early")
        return float(line)

    def close(self):
        self.process.kill()
        self.process.wait()


class Llmc(StepServer):
    """train_gpt2 of llm.c. It runs two steps at a time, of which the second is counted."""

    name = "llm.c"

    def __init__(self, directory, B, T, threads):
        self.scratch = tempfile.TemporaryDirectory(prefix="bench_llmc_")
        work = self.scratch.name
        with open(os.path.join(directory, "train_gpt2.c")) as f:
            source = f.read()
        for name, value in (("B", B), ("T", T)):
            source, found = re.subn(rf"\bint {name} = \d+;", f"int {name} = {value};", source)
            if found != 1:
                sys.exit(f"bench_peers.py: {directory}/train_gpt2.c does not set {name} as expected")
        source = (
            source.replace("step <= 40", "step <= 100000").replace("step % 10 == 0", "0").replace("step % 20 == 0", "0")
        )
        with open(os.path.join(work, "train.c"), "w") as f:
            f.write(source)
        flags = "-Ofast -Wno-unused-result -Wno-ignored-pragmas -Wno-unknown-attributes -march=native -fopenmp -DOMP"
        includes = ["-I", directory, "-I", os.path.join(directory, "llmc")]
        command = ["cc", *flags.split(), *includes, "-o", "train", "train.c", "-lm", "-lgomp"]
        subprocess.run(command, cwd=work, check=True)
        write_gpt2(os.path.join(work, "gpt2_124M.bin"))
        data = os.path.join(work, "dev/data/tinyshakespeare")
        os.makedirs(data)
        for split in "train", "val":
            write_shard(os.path.join(data, f"tiny_shakespeare_{split}.bin"), 200_000)
        env = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self.process = subprocess.Popen(
            ["stdbuf", "-oL", "./train"], cwd=work, stdout=subprocess.PIPE, text=True, env=env
        )
        self.about = "llm.c's GPT-2 124M"
        self.step()

    def step(self):
        for line in self.process.stdout:
            took = re.search(r"took ([0-9.]+) ms", line)
            if took:
                os.kill(self.process.pid, signal.SIGSTOP)
                return float(took[1])
        sys.exit("bench_peers.py: llm.c ended early")

    def turn(self):
        os.kill(self.process.pid, signal.SIGCONT)
        self.step()
        os.kill(self.process.pid, signal.SIGCONT)
        return self.step()

    def close(self):
        super().close()
        self.scratch.cleanup()


def write_gpt2(path):
    """Random weights in the format of llm.c (version 3, fp32, padded vocabulary)."""
    L, C, V, Vp, T = 12, 768, 50257, 50304, 1024
    header = array.array("i", [20240326, 3, T, V, L, 12, C, Vp] + [0] * 248)
    layer = 2 * C + 3 * C * C + 3 * C + C * C + C + 2 * C + 4 * C * C + 4 * C + 4 * C * C + C
    count = Vp * C + T * C + L * layer + 2 * C
    block = array.array("f", [0.02 * ((i * 2654435761 >> 8) % 2001 / 1000 - 1) for i in range(65536)])
    with open(path, "wb") as f:
        header.tofile(f)
        for begin in range(0, count, len(block)):
            block[: min(len(block), count - begin)].tofile(f)


def write_shard(path, count):
    with open(path, "wb") as f:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(f)
        array.array("H", [(i * 2654435761 >> 7) % 50257 for i in range(count)]).tofile(f)


def compare(case, options):
    preset, attention, kv, B, T = case.split(",")
    threads = str(options.threads)
    ours = ["build/bench", "--threads", threads, "--matmul-dtype", options.matmul_dtype, "--turns", case]
    players = [StepServer("diffv2.c", ours)]
    if options.torch != "none":
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench_torch.py")
        command = [options.torch, script, preset, attention, kv, B, T, "--threads", threads]
        command += ["--bf16"] if options.matmul_dtype == "bf16" else []
        players += [StepServer("PyTorch", command), StepServer("PyTorch compiled", command + ["--compile"])]
    if options.llmc and (preset, attention, kv) == ("124m", "baseline", "12"):
        players.append(Llmc(options.llmc, int(B), int(T), options.threads))
    times = {p.name: [] for p in players}
    for p in players:
        if not isinstance(p, Llmc):
            p.turn()  # the first step is not counted
    for _ in range(options.rounds):
        for p in players:
            times[p.name].append(p.turn())
    for p in players:
        p.close()
    print(f"{case}  ({threads} threads, {options.rounds} rounds)")
    for p in players:
        ms = statistics.median(times[p.name])
        ratios = [t / o for t, o in zip(times[p.name], times["diffv2.c"])]
        rate = 1e3 * int(B) * int(T) / ms
        ratio = f"{statistics.median(ratios):6.2f}x our time ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {p.name:18} {ms:10.1f} ms {rate:8.0f} tokens/s   {ratio}   {p.about}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--matmul-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--torch", default="python3")
    parser.add_argument("--llmc")
    parser.add_argument("--nanogpt")
    parser.add_argument("--corpus", default="corpus")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--own")
    parser.add_argument("cases", nargs="*", metavar="CASE or SETTINGS")
    options = parser.parse_args()
    if options.nanogpt:
        import nanogpt

        settings = [("README", nanogpt.README)] + [(f"{i}", s) for i, s in enumerate(options.cases, 1)]
        rest = (options.minutes, options.seeds, settings, options.own)
        nanogpt.compare(options.nanogpt, options.torch, options.corpus, *rest)
        return
    if not os.path.exists("build/bench"):
        sys.exit("bench_peers.py: build/bench is missing: run make build/bench in the root of the repository")
    for case in options.cases or CASES:
        compare(case, options)


main()
