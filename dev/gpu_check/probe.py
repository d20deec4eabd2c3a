"""The part `probe`: the hardware, driver, compilers and libraries of this machine."""

import importlib.metadata
import os
import platform
import re
import shutil

from programs import ROOT
from runner import find_tool, last_line


def probe(check, part):
    yield "probe", describe


def describe(check, part):
    fact = part.fact

    def query_gpu(what, fields):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        status, text = check.run(command, 60) if shutil.which("nvidia-smi") else (127, "")
        fact(
            what, " | ".join(text.split("\n")).strip(" |")[:400] if status == 0 else f"no nvidia-smi (status {status})"
        )

    query_gpu("nvidia-smi", "name,driver_version,memory.total,memory.used,compute_cap")
    query_gpu(
        "clocks and power", "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,mig.mode.current"
    )
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    status, text = check.run([nvcc, "--version"], 60)
    fact("nvcc", last_line(text) if status == 0 else f"none ({nvcc})")
    for tool in ("gcc", "g++", "make", "mpicc", "git"):
        status, text = check.run([tool, "--version"], 60) if shutil.which(tool) else (127, "none")
        fact(tool, text.splitlines()[0] if text else "none")
    for tool in ("ncu", "nsys", "compute-sanitizer"):
        fact(tool, find_tool(tool) or "none")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disk = shutil.disk_usage(check.work).free / 2**30
    software = f"glibc {platform.libc_ver()[1]}, {platform.platform()}"
    fact("machine", f"{os.cpu_count()} cores, {memory:.0f} GiB, {disk:.0f} GiB of disk free, {software}")
    fact("python", f"{platform.python_version()}")
    names = sorted(
        {d.metadata["Name"] for d in importlib.metadata.distributions() if d.metadata["Name"]}, key=str.lower
    )
    wanted = [n for n in names if re.match(r"torch$|triton$|numpy$|nvidia[-_]|mpi4py|scipy-openblas", n, re.I)]
    fact(
        "python packages",
        ", ".join(f"{n} {importlib.metadata.version(n)}" for n in wanted) or "torch, triton, numpy, nvidia-*: none",
    )
    script = ROOT / "scripts/find_cuda.sh"
    if script.exists():
        status, text = check.run(
            [script, check.work / "probe.mk"], 60, {"DEPS": str(check.bundle)} if check.bundle else None
        )
        fact("find_cuda.sh", " | ".join(text.split("\n")).strip(" |")[:1000] or "found everything")
        made = check.work / "probe.mk"
        for line in made.read_text().splitlines() if made.exists() else []:
            if line.startswith(("CUDA_LIBS", "CUDNN_LIBS", "NCCL_LIBS", "CUDA_ARCHS")):
                fact(*line.split(" ", 1)[0:1], line.split("=", 1)[-1].strip()[:400])
    if check.bundle:
        fact("bundle", " | ".join((check.bundle / "CONTENTS").read_text().splitlines()))
