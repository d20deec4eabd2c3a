"""The part `machine`: the programs, and the hardware, driver, compilers and libraries of this machine."""

import importlib.metadata
import os
import platform
import re
import shutil

from results import Refused
from runner import find_tool


def machine(check):
    yield "programs", choose_programs
    yield "machine", describe


def choose_programs(check, findings):
    check.programs.choose(check, findings)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.free", "--format=csv,noheader,nounits"]
    status, text = check.run(query, 30) if shutil.which(query[0]) else (1, "")
    smi = text.splitlines()[0].split(", ") if status == 0 and text.strip() else []
    if "BENCH_CUDA" not in check.programs.unusable:
        rows, ended = findings.bench(20, "facts")
        if not ended and "no CUDA device" in findings.rows[-1]["note"]:
            raise Refused(findings.rows[-1]["note"])
        findings.check("a program detects the device", ended and rows)
        facts = {r["case"]: r["note"] for r in rows}
        if facts:
            name, driver = facts["device"].split(":")[0], ", ".join([*smi[1:2], facts["driver"]])
            check.store.describe(name, driver, check.published.glob("gpu-*.json"))
            check.free_bytes = int(facts["memory"].split()[0])
    elif len(smi) == 3:
        check.store.describe(smi[0], smi[1], check.published.glob("gpu-*.json"))
        check.free_bytes = float(smi[2]) * 2**20


def describe(check, findings):
    fields = "name,driver_version,memory.total,compute_cap,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit"
    for words in (
        ["nvidia-smi", f"--query-gpu={fields},temperature.gpu,mig.mode.current", "--format=csv,noheader"],
        [find_tool("nvcc") or "nvcc", "--version"],
        ["g++", "--version"],
    ):
        status, text = check.run(words, 60) if shutil.which(words[0]) else (127, "none")
        findings.fact(words[0], " | ".join(text.splitlines())[:400])
    findings.fact("compute-sanitizer", find_tool("compute-sanitizer") or "none")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    software = f"glibc {platform.libc_ver()[1]}, {platform.platform()}, python {platform.python_version()}"
    findings.fact("machine", f"{os.cpu_count()} cores, {memory:.0f} GiB, {software}")
    packages = {d.metadata["Name"] or "": d.version for d in importlib.metadata.distributions()}
    wanted = [f"{n} {v}" for n, v in sorted(packages.items()) if re.match(r"torch$|triton$|numpy$|nvidia[-_]", n)]
    findings.fact("python packages", ", ".join(wanted) or "torch, triton, numpy, nvidia-*: none")
    for variable, value in check.programs.environment.items():
        findings.fact(variable, value[:1000])
    if check.bundle:
        findings.fact("bundle", " | ".join((check.bundle / "CONTENTS").read_text().splitlines()))
