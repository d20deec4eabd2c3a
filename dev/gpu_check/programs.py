"""The programs of a check: from environment variables, from a bundle, or built on this machine.

    BUNDLE/bin/       the programs that dev/gpu_check/bundle.sh compiled, with their paths below build/
    BUNDLE/sources    the digest of their sources

A bundle's programs are used if the sources are the same and each of them computes. Otherwise all programs are built.
"""

import glob
import hashlib
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = {  # variable: (for a device, with dev/cuda_on_cpu)
    "TRAIN_DIFFV2CU": ("build/cuda_bf16/train_diffv2cu", "build/oncpu/test_trainer --trainer"),
    "TRAIN_DIFFV2CU_FP32": ("build/cuda_fp32/train_diffv2cu", "build/fp32/oncpu/test_trainer --trainer"),
    "TEST_DIFFV2CU": ("build/cuda_bf16/test_diffv2cu", "build/oncpu/test_diffv2"),
    "TEST_DIFFV2CU_FP32": ("build/cuda_fp32/test_diffv2cu", "build/fp32/oncpu/test_diffv2"),
    "BENCH_CUDA": ("build/cuda_bf16/bench_cuda", "build/oncpu/bench_cuda --tiny"),
    "TRAIN_DIFFV2": ("build/train_diffv2", "build/train_diffv2"),
}
PROBES = {  # how a program's name begins: (arguments, a pattern of its output)
    "TRAIN": ("--preset tiny --batch-size 1 --seq-len 16 --steps 2 --warmup 1 --train-data", r"^step 2/2 .*loss +\d"),
    "TEST": ("rope", r"^[1-9]\d* passed, 0 failed"),
    "BENCH": ("profile tiny diff_v2 2 1 16", r'"case": "step".*"measured": [\d.]+'),
}
SOURCES = ("Makefile", "*.c", "*.cu", "llmc/**/*", "tests/*", "dev/bench/*", "dev/cuda_on_cpu/*")


def sources_digest(root=ROOT):
    """The digest of all files that a program may be compiled from. Does not require git."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in SOURCES for p in root.glob(pattern) if p.is_file()}):
        digest.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def library_path(bundle):
    """LD_LIBRARY_PATH for programs that were linked on another machine."""
    script, environment = ROOT / "scripts/find_cuda.sh", {**os.environ, "DEPS": str(bundle), "MPI": "no"}
    done = subprocess.run([script, "-"], capture_output=True, text=True, env=environment) if script.exists() else None
    found = done.stdout if done else ""
    folders = [os.path.dirname(path) for path in re.findall(r"(?<![\w,])/\S+\.so\S*", found)]
    # without a toolkit, which find_cuda.sh requires: the libraries of its packages or of PyTorch's
    places = ["/usr/local/cuda*/lib64", *(f"{p}/nvidia/*/lib" for p in sys.path if p.endswith("-packages"))]
    folders += [path for place in places for path in sorted(glob.glob(place))]
    return ":".join(dict.fromkeys([str(bundle / "lib"), *folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]))


def what_is_wrong(name, words, corpus, environment):
    """Runs a program on a small case. Returns why it cannot be used, or ''."""
    kind = name.split("_")[0]
    words = [*words, *PROBES[kind][0].split(), *([str(corpus)] if kind == "TRAIN" else [])]
    where = {"cwd": str(ROOT), "env": environment, "stdin": subprocess.DEVNULL, "timeout": 60}
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **where)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    text = done.stdout.decode(errors="replace").strip()
    computes = done.returncode == 0 and re.search(PROBES[kind][1], text, re.MULTILINE)
    return "" if computes else f"{words[0]}: {(text or 'no output').splitlines()[-1][:300]}"


class Programs:
    def __init__(self, bundle, pretend):
        self.commands = {n: shlex.split(os.environ.get(n) or places[pretend]) for n, places in PLACES.items()}
        self.given = {n for n in PLACES if os.environ.get(n)}
        self.folder, self.environment, self.why = bundle and bundle / "bin", {}, ""
        if self.folder and self.folder.is_dir():
            self.use_bundle(bundle)

    def use_bundle(self, bundle):
        """Uses the bundle's programs, or sets `why` to the reason against it."""
        of = bundle / "sources"
        if not of.exists() or of.read_text().strip() != sources_digest():
            self.why = "compiled from other sources"
            return
        environment, taken = {"LD_LIBRARY_PATH": library_path(bundle)}, {}
        for name in PLACES.keys() - self.given:
            first, *rest = self.commands[name]
            taken[name] = [str(self.folder / Path(first).relative_to("build")), *rest]
        # LD_BIND_NOW resolves all symbols at the start, so that none is missing later
        variables = {**os.environ, **environment, "LD_BIND_NOW": "1"}
        with ThreadPoolExecutor() as pool:
            reasons = pool.map(lambda p: what_is_wrong(*p, bundle / "corpus", variables), taken.items())
            self.why = next(filter(None, reasons), "")
        if self.why:
            return
        self.commands.update(taken)
        self.given |= taken.keys()
        self.environment = environment

    def variables_of(self, words):
        """Additional environment variables of a command: the libraries of a bundle's program."""
        return self.environment if self.environment and any(w.startswith(f"{self.folder}/") for w in words) else {}

    def missing(self, names):
        return [n for n in names if not os.access(ROOT / self.commands[n][0], os.X_OK)]


if __name__ == "__main__":
    print(sources_digest(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
