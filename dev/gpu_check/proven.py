"""The parts of a check that prove something: probe, build, operations, sizes, gradients."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import time
from pathlib import Path

import gradients as comparison
from programs import PLACES
from runner import Skip

VARIANTS = [
    "diff_v2",
    "baseline",
    "diff_v1",
    "diff_v2_cross_group",
    "diff_v2_no_lambda",
    "diff_v2_no_sigmoid",
    "diff_scalar",
    "off_by_one",
    "sink",
    "gated_head",
    "gated_elem",
]


def last_line(text, otherwise="it said nothing"):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else otherwise


def json_lines(text):
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found


# ---------------------------------------------------------------------------------------------------
# probe


def probe(check, part):
    def fact(what, value):
        part.record({"table": "facts", "what": what, "value": str(value)})

    def said(what, *command):
        status, text = check.run(command, 60) if shutil.which(command[0]) else (127, "")
        fact(
            what,
            " | ".join(text.split("\n")).strip(" |")[:400] if status == 0 else f"none ({command[0]}: status {status})",
        )
        return status == 0

    said(
        "nvidia-smi",
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,memory.used,compute_cap",
        "--format=csv,noheader",
    )
    said(
        "clocks and power",
        "nvidia-smi",
        "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,mig.mode.current",
        "--format=csv,noheader",
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
    fact(
        "machine",
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {shutil.disk_usage(check.work).free / 2**30:.0f} GiB of disk free, glibc {platform.libc_ver()[1]}, {platform.platform()}",
    )
    fact("python", f"{platform.python_version()}")
    names = sorted(
        {d.metadata["Name"] for d in importlib.metadata.distributions() if d.metadata["Name"]}, key=str.lower
    )
    wanted = [n for n in names if re.match(r"torch$|triton$|numpy$|nvidia[-_]|mpi4py|scipy-openblas", n, re.I)]
    fact(
        "python packages",
        ", ".join(f"{n} {importlib.metadata.version(n)}" for n in wanted) or "none of torch, triton, numpy, nvidia-*",
    )
    script = check.root / "scripts/find_cuda.sh"
    if script.exists():
        status, text = check.run(
            [script, check.work / "probe.mk"], 60, {"DEPS": str(check.bundle)} if check.bundle else None
        )
        fact("find_cuda.sh", " | ".join(text.split("\n")).strip(" |")[:1000] or "all found")
        made = check.work / "probe.mk"
        for line in made.read_text().splitlines() if made.exists() else []:
            if line.startswith(("CUDA_LIBS", "CUDNN_LIBS", "NCCL_LIBS", "CUDA_ARCHS")):
                fact(*line.split(" ", 1)[0:1], line.split("=", 1)[-1].strip()[:400])
    if check.bundle:
        fact("bundle", " | ".join((check.bundle / "CONTENTS").read_text().splitlines()))
    part.end("probe")


def find_tool(name):
    """A tool of CUDA, which is often not on the PATH."""
    places = [shutil.which(name)] + [
        str(p)
        for pattern in ("cuda*/bin", "cuda*/compute-sanitizer")
        for p in Path("/usr/local").glob(f"{pattern}/{name}")
    ]
    places += [str(p) for p in Path("/opt/nvidia").glob(f"nsight-*/*/{name}")]
    return next((p for p in places if p and os.access(p, os.X_OK)), None)


# ---------------------------------------------------------------------------------------------------
# build


def complaints(text):
    """What a compiler or linker has said is wrong, without the commands, which make prints too."""
    lines = [
        line
        for line in text.splitlines()
        if " -o " not in line and re.search(r"[Ee]rror|\*\*\*|undefined reference|cannot find", line)
    ]
    return " / ".join(lines[:4])[:600] or last_line(text)


def build(check, part):
    """All at once: compilers wait for one another only where there are fewer cores."""
    jobs = {  # name: (make arguments, the programs it makes)
        "bf16": (["PRECISION=bf16"], ["TRAIN_DIFFV2CU", "TEST_DIFFV2CU", "BENCH_CUDA"]),
        "fp32": (
            ["PRECISION=fp32"] + (["BUILD=build/fp32"] if check.pretend else []),
            ["TRAIN_DIFFV2CU_FP32", "TEST_DIFFV2CU_FP32"],
        ),
        "CPU": ([], ["TRAIN_DIFFV2"]),
    }
    started = time.monotonic()
    half_built = check.work / "building"
    if half_built.exists() and not check.pretend:  # a start that was killed while compilers wrote
        for folder in ("cuda_bf16", "cuda_fp32"):
            shutil.rmtree(check.root / "build" / folder, ignore_errors=True)
    if (
        check.bundle and not check.pretend and not (check.bundle / "lib/libopenblas.so").exists()
    ):  # links may not have travelled
        shutil.copy(check.bundle / "lib/libblas.so.3", check.bundle / "lib/libopenblas.so")
    common = ["MPI=no"] + ([f"DEPS={check.bundle}"] if check.bundle and not check.pretend else [])
    if not check.pretend and not shutil.which("nvidia-smi") and "ARCHS" not in os.environ:
        common.append("ARCHS=90")  # what this check is for; all architectures would take four times as long
    at_once = 1 if check.pretend else max(2, (os.cpu_count() or 2) // 2)
    names, commands = [], []
    for name, (arguments, programs) in jobs.items():
        goals = list(
            dict.fromkeys(PLACES[p][check.pretend].split()[0] for p in programs if p not in check.programs.given)
        )
        if goals:
            names.append(name)
            commands.append(["make", "-k", f"-j{at_once}", *common, *arguments, *goals])
    if check.programs.folder:
        part.record(
            {
                "table": "facts",
                "what": "programs of the bundle",
                "value": f"not used: {check.programs.why}" if check.programs.why else "used",
            }
        )
    half_built.touch()
    try:
        made = [check.run(c, 900) for c in commands] if check.pretend else check.run_all(commands, 900)
    finally:
        half_built.unlink()
    results = dict(zip(names, made))
    # a compiler that warns of more than others must not keep everything from being seen
    for name, command in zip(names, commands):
        status, text = results[name]
        if status and re.search(r"\[-Werror|being treated as errors|error #\d+-D|treated as error", text):
            part.check(f"build of {name} without warnings", False, complaints(text))
            status, text = check.run([*command, "STRICT=no"], 900)
        part.check(f"build of {name}", status == 0, "" if status == 0 else complaints(text))
    part.record({"table": "facts", "what": "build", "value": f"{time.monotonic() - started:.0f} s"})
    if not check.programs.missing(["BENCH_CUDA"]):
        status, text = check.run([*check.commands["BENCH_CUDA"], "facts"], 120)
        facts = json_lines(text)
        part.check(
            "a program of this build finds the device", status == 0 and facts, "" if status == 0 else last_line(text)
        )
        if facts:
            status, text = (
                check.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 60)
                if shutil.which("nvidia-smi")
                else (1, "")
            )
            check.store.all["device"] = facts[0]["device"]
            check.store.all["driver"] = (
                f"{text.splitlines()[0].strip()}, " if status == 0 and text.strip() else ""
            ) + facts[0]["driver"]
            part.records += [
                {"table": "facts", "what": k, "value": str(v)} for k, v in facts[0].items() if k != "table"
            ]
    part.end("build")


# ---------------------------------------------------------------------------------------------------
# ops


def failures(text):
    """Each failing case of a test program, with the first thing that it said."""
    found, said = [], ""
    for line in text.splitlines():
        if line.startswith("FAIL "):
            found.append(f"{line[5:100]}{': ' + said[:150] if said else ''}")
        said = "" if re.match("FAIL|ok |skip|storage", line) else said or line.strip()
    return found


def test_result(status, text, limit):
    """(whether a test program passed, what is said of it)"""
    found = re.search(r"^(\d+) passed, (\d+) failed$", last_line(text))
    failing = failures(text)
    detail = f"stopped after {limit} s" if status is None else last_line(text)
    return status == 0 and found and int(found[1]) > 0 and found[2] == "0", detail + (
        ": " + "; ".join(failing[:5]) if failing else ""
    )


def ops(check, part):
    for build_name, program in (("bf16", "TEST_DIFFV2CU"), ("fp32", "TEST_DIFFV2CU_FP32")):
        if not part.pending(build_name):
            continue
        # where one process runs every thread of every block, a few operations show that this part works
        status, text = check.run([*check.commands[program], *(["rope"] if check.pretend else [])], 400)
        part.check(f"operations against their C twins, {build_name}", *test_result(status, text, 400))
        part.end(build_name)


# ---------------------------------------------------------------------------------------------------
# sizes

SIZES = [("1.4b", 8, 16, 2048), ("124m", 6, 64, 1024)]  # (preset, key/value heads, B, T)


def sizes(check, part):
    for case in [("tiny", 2, 2, 70)] if check.pretend else SIZES:
        name = " ".join(str(word) for word in case)
        if not part.pending(name):
            continue
        status, text = check.run([*check.commands["TEST_DIFFV2CU"], "--sizes", *case], 300)
        part.check(f"operations at the shapes of {name}", *test_result(status, text, 300))
        part.end(name)


# ---------------------------------------------------------------------------------------------------
# gradients

GRADIENT_SHAPE = "--layers 4 --hidden 256 --heads 8 --kv-heads 4 --head-dim 64 --ffn 704 --vocab 5003 --seq-len 256 --batch-size 4 --no-tie-embeddings"
PRETEND_SHAPE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --ffn 48 --vocab 259 --seq-len 40 --batch-size 1 --no-tie-embeddings"


def gradients(check, part):
    """The weights are those of a short run in bf16, so that all three programs hold the very same numbers."""
    corpus = check.corpus()
    if not corpus:
        raise Skip("there is no corpus: --bundle, or scripts/corpus.sh")
    steps = 2 if check.pretend else 20
    shape = (PRETEND_SHAPE if check.pretend else GRADIENT_SHAPE).split()
    for variant in VARIANTS[:2] if check.pretend else VARIANTS:
        if not part.pending(variant):
            continue
        folder = check.work / f"gradients-{variant}"
        shutil.rmtree(folder, ignore_errors=True)
        status, text = check.run(
            [
                *check.commands["TRAIN_DIFFV2CU"],
                "--attention",
                variant,
                *shape,
                "--train-data",
                corpus,
                "--steps",
                steps,
                "--lr",
                "1e-3",
                "--out",
                folder / "run",
            ],
            200,
        )
        weights = folder / f"run/checkpoints/step_{steps:08d}"
        part.check(
            f"{variant} trains for {steps} steps",
            status == 0 and weights.is_dir(),
            "" if status == 0 else last_line(text),
        )
        programs = {"CPU": "TRAIN_DIFFV2", "fp32": "TRAIN_DIFFV2CU_FP32", "bf16": "TRAIN_DIFFV2CU"}
        dumps, ok = {who: folder / f"{who}.safetensors" for who in programs}, weights.is_dir()
        rows = [shape[shape.index("--batch-size") + i] for i in range(2)] + [
            shape[shape.index("--seq-len") + i] for i in range(2)
        ]
        commands = [
            [*check.commands[program], "--init", weights, "--train-data", corpus, *rows, "--dump-grads", dumps[who]]
            for who, program in programs.items()
        ]
        for who, (status, text) in zip(programs, check.run_all(commands, 200) if ok else ()):
            if status != 0:
                part.check(f"{variant}: gradients of the {who} build", False, last_line(text))
                ok = False
        if ok:
            for build_name in ("fp32", "bf16"):
                checks, record = comparison.compare(dumps["CPU"], dumps[build_name], variant, build_name)
                for c in checks:
                    part.check(*c)
                if record:
                    part.record(record)
        shutil.rmtree(folder, ignore_errors=True)
        part.end(variant)
