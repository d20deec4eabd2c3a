"""The part `build`: compiles the programs, or uses those of the bundle."""

import os
import re
import shutil
import time

from programs import PLACES, ROOT
from runner import last_line


def error_lines(text):
    """The error messages of compilers and linkers, without the commands that make prints."""
    lines = [
        line
        for line in text.splitlines()
        if " -o " not in line and re.search(r"[Ee]rror|\*\*\*|undefined reference|cannot find", line)
    ]
    return " / ".join(lines[:4])[:600] or last_line(text)


def build(check, part):
    yield "build", build_programs


def build_programs(check, part):
    """Builds all programs concurrently."""
    jobs = {  # name: (arguments of make, the programs that it builds)
        "bf16": (["PRECISION=bf16"], ["TRAIN_DIFFV2CU", "TEST_DIFFV2CU", "BENCH_CUDA"]),
        "fp32": (
            ["PRECISION=fp32"] + (["BUILD=build/fp32"] if check.pretend else []),
            ["TRAIN_DIFFV2CU_FP32", "TEST_DIFFV2CU_FP32"],
        ),
        "CPU": ([], ["TRAIN_DIFFV2"]),
    }
    started = time.monotonic()
    half_built = check.work / "building"
    if half_built.exists() and not check.pretend:  # a build that was killed while compilers wrote
        for folder in ("cuda_bf16", "cuda_fp32"):
            shutil.rmtree(ROOT / "build" / folder, ignore_errors=True)
    common = ["MPI=no"]
    if check.bundle and not check.pretend:
        common.append(f"DEPS={check.bundle}")
        library = check.bundle / "lib/libopenblas.so"
        if not library.exists():  # copying the bundle may have dropped links
            shutil.copy(check.bundle / "lib/libblas.so.3", library)
    if not check.pretend and not shutil.which("nvidia-smi") and "ARCHS" not in os.environ:
        common.append("ARCHS=90")  # the usual device; all architectures would take four times as long
    at_once = 1 if check.pretend else max(2, (os.cpu_count() or 2) // 2)
    commands = {}
    for name, (arguments, programs) in jobs.items():
        goals = [PLACES[p][check.pretend].split()[0] for p in programs if p not in check.programs.given]
        if goals:
            commands[name] = ["make", "-k", f"-j{at_once}", *common, *arguments, *dict.fromkeys(goals)]
    if check.programs.folder:
        part.fact("programs of the bundle", f"not used: {check.programs.why}" if check.programs.why else "used")
    half_built.touch()
    try:
        several = commands.values()
        made = [check.run(c, 900) for c in several] if check.pretend else check.run_all(several, 900)
    finally:
        half_built.unlink()
    # an unknown compiler may warn more; its warnings must not prevent the other parts
    for (name, command), (status, text) in zip(commands.items(), made):
        if status and re.search(r"\[-Werror|being treated as errors|error #\d+-D|treated as error", text):
            part.check(f"build of {name} without warnings", False, error_lines(text))
            status, text = check.run([*command, "STRICT=no"], 900)
        part.check(f"build of {name}", status == 0, "" if status == 0 else error_lines(text))
    part.fact("build", f"{time.monotonic() - started:.0f} s")
    if not check.programs.missing(["BENCH_CUDA"]):
        rows, ended = part.bench(120, "facts")
        part.check("a program of this build detects the device", ended and rows)
        facts = {r["case"]: r["note"] for r in rows}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        status, text = check.run(query, 60) if facts and shutil.which(query[0]) else (1, "")
        driver = [text.splitlines()[0].strip()] if status == 0 and text.strip() else []
        if facts:
            check.store.all["device"] = facts["device"]
            check.store.all["driver"] = ", ".join([*driver, facts["driver"]])
