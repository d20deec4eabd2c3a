"""The programs of a check: from environment variables, from a bundle, or built on this machine.

BUNDLE/bin/       the programs that short.sh compiled, with their paths below build/
BUNDLE/sources    the digest of their sources
"""

import glob
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = {  # variable: (for a device, with dev/emulator)
    "TRAIN_DIFFV2CU": ("build/cuda_bf16/train_diffv2cu", "build/oncpu/test_trainer --trainer"),
    "TRAIN_DIFFV2CU_FP32": ("build/cuda_fp32/train_diffv2cu", "build/fp32/oncpu/test_trainer --trainer"),
    "TEST_DIFFV2CU": ("build/cuda_bf16/test_diffv2cu", "build/oncpu/test_diffv2"),
    "TEST_DIFFV2CU_FP32": ("build/cuda_fp32/test_diffv2cu", "build/fp32/oncpu/test_diffv2"),
    "BENCH_CUDA": ("build/cuda_bf16/bench_cuda", "build/oncpu/bench_cuda --tiny"),
    "TRAIN_DIFFV2": ("build/train_diffv2", "build/train_diffv2"),
    "PREDICT_DIFFV2": ("build/predict_diffv2", "build/predict_diffv2"),
}
SOURCES, SUFFIXES = ("*", "llmc/**/*", "tests/**/*", "dev/**/*"), (".c", ".h", ".cu", ".cuh", ".cpp", ".mk")
# What a check and a plan of the lab read
TRAVELLING = ("dev/gpu_check*", "dev/gpu_check/*", "dev/bench/bench_torch.py", "llmc/model/*.h")
TRAVELLING += ("dev/reference/variants.py", "scripts/**/*", "data/outputs.py", "results/gpu-*.json")
CANNOT_START = r"error while loading shared libraries|symbol lookup error|version `\S+' not found|xec format error"
START_SECONDS, BUILD_SECONDS = 10, 900


def sources_of(bundle):
    """The digest of all files that the programs may be compiled from. Does not require git."""
    if bundle:
        return (bundle / "sources").read_text().strip()
    digest = hashlib.sha256()
    found = [path for pattern in SOURCES for path in ROOT.glob(pattern)]
    for path in sorted(path for path in found if path.suffix in SUFFIXES or path == ROOT / "Makefile"):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
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


def why_it_cannot_start(words, environment):
    """The reason; '' if the program starts. Its output and exit status do not matter otherwise."""
    # LD_BIND_NOW resolves all symbols at the start, so that none is missing later
    where = {"cwd": ROOT, "env": {**os.environ, **environment, "LD_BIND_NOW": "1"}, "stdin": subprocess.DEVNULL}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": START_SECONDS}
    try:
        done = subprocess.run([*words, "--help"], **where, **streams)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot start: {getattr(error, 'strerror', None) or f'no answer in {START_SECONDS} s'}"
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode in range(127) and not re.search(CANNOT_START, text):
        return ""
    return f"cannot start: {(text or f'status {done.returncode}').splitlines()[-1][:300]}"


def error_lines(text):
    """The error messages of compilers and linkers, without the commands that make prints."""
    said = [line for line in text.splitlines() if line.strip() and " -o " not in line]
    errors = [line for line in said if re.search(r"[Ee]rror|\*\*\*|undefined reference|cannot find", line)]
    return " / ".join((errors or said[-1:])[:4])[:600]


class Programs:
    def __init__(self, bundle, pretend):
        self.bundle, self.pretend = bundle, pretend
        self.commands = {n: shlex.split(places[pretend]) for n, places in PLACES.items()}
        self.environment = {"LD_LIBRARY_PATH": library_path(bundle)} if bundle else {}
        for words in self.commands.values() if bundle else ():
            words[0] = str(bundle / "bin" / Path(words[0]).relative_to("build"))
        self.given = {n for n in PLACES if os.environ.get(n)}
        self.commands.update({n: shlex.split(os.environ[n]) for n in self.given})
        self.unusable = {}  # program: why

    def choose(self, check, findings):
        """Makes the programs, unless they are given. What cannot start prevents only the cases that require it."""
        # make decides which programs are old; the emulation's are those of the tests, with other options
        made = lambda name: self.pretend and (ROOT / self.commands[name][0]).exists()
        wanted = [n for n in sorted(PLACES.keys() - self.given) if not made(n)]
        if wanted and not self.bundle:
            self.build(check, findings, wanted)
        starts = lambda words: why_it_cannot_start(words, self.variables_of(words))
        with ThreadPoolExecutor() as pool:
            reasons = dict(zip(PLACES, pool.map(starts, (self.commands[name] for name in PLACES))))
        self.unusable = {name: why for name, why in reasons.items() if why}
        for name, why in reasons.items():
            findings.check(f"{name} starts", not why, why)

    def build(self, check, findings, names):
        common = [] if self.pretend else ["MPI=no"]
        if not self.pretend and not shutil.which("nvidia-smi") and "ARCHS" not in os.environ:
            common.append("ARCHS=90")  # the usual device; all architectures would take four times as long
        commands = []
        for precision in ("bf16", "fp32"):
            goals = [PLACES[n][self.pretend].split()[0] for n in names if n.endswith("_FP32") == (precision == "fp32")]
            folder = ["BUILD=build/fp32"] if self.pretend and precision == "fp32" else []
            jobs = f"-j{1 if self.pretend else max(2, (os.cpu_count() or 2) // 2)}"
            if goals:
                commands.append(["make", "-k", jobs, *common, f"PRECISION={precision}", *folder, *goals])
        for command, (status, text) in zip(commands, check.run_all(commands, BUILD_SECONDS)):
            # an unknown compiler may warn more, which must not prevent the check
            if status and re.search(r"\[-Werror|being treated as errors|error #\d+-D|treated as error", text):
                findings.fact("warnings", error_lines(text))
                status, text = check.run([*command, "STRICT=no"], BUILD_SECONDS)
            what = " ".join(command[3:])
            findings.check(f"make {what}", status == 0, "" if status == 0 else error_lines(text))

    def variables_of(self, words):
        """Additional environment variables of a command: the libraries of a bundle's program."""
        of_bundle = self.bundle and any(w.startswith(f"{self.bundle}/bin/") for w in words)
        return self.environment if of_bundle else {}


if __name__ == "__main__":
    if sys.argv[1:] == ["--patterns"]:
        print(*(f":(glob){pattern}" for pattern in TRAVELLING), sep="\n")
    else:
        print(sources_of(None))
