#!/usr/bin/env python3
"""rooms.py: checks the structure: includes and imports, headers, ends of the program, functions that nothing calls,
operations.

Usage: dev/rooms.py
Prints one line per offender. Exit status: 0 none, 1 some.

Ring 1 is the trainer and its rooms, llmc/; ring 2 includes it: data, scripts, dev, tests. Programs and tests of tests
(NAME_test.py, test_NAME) lie above everything, wherever they are.

  layers    an include of C, or an import of Python, stays in its room or points to a room of a lower layer, so that
            nothing of ring 1 includes ring 2. Two headers of CUDA include the emulator in the place of CUDA (SEAM)
  circles   no file includes or imports itself through others
  alone     each .h of llmc/ compiles as C without CUDA's headers, each .cuh as C++ with them (where they are installed)
  exit      only program_exit of llmc/base/common.h calls exit, and nothing registers a handler for it
  dead      each function of ring 1, data and dev/predict is called
  tested    each operation of a contract (llmc/ops/*/operations.h, llmc/experts/operations.h) is called in a header of
            tests/, and its CUDA version begins with OPERATION(); or calls others
"""

import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

TRAINER = "train_diffv2"
RING_1 = [  # layers of rooms, lower ones first
    ["llmc/base"],
    ["llmc/cuda", "llmc/data"],
    ["llmc/text", "llmc/comm"],
    ["llmc/ops"],
    ["llmc/ops/gates", "llmc/ops/linear", "llmc/ops/rows"],
    ["llmc/ops/attention"],
    ["llmc/ops/measure"],
    ["llmc/ops/optimizer"],
    ["llmc/experts"],
    ["llmc/model"],
    ["llmc/checkpoint"],
    ["llmc/options", "llmc/log"],
    ["llmc/evaluate"],
    ["llmc/run"],
    [TRAINER],
]
RING_2 = [
    ["scripts", "dev/predict"],
    ["data"],
    ["scripts/lab"],
    ["scripts/export"],
    ["dev/reference"],
    ["tests"],
    ["dev/bench", "dev/emulator", "dev/fuzz", "dev/gpu_check"],
    ["dev"],
]
TESTS = "programs and tests"
LAYERS = [*RING_1, *RING_2, [TESTS]]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
ROOMS = sorted(LAYER, key=len, reverse=True)
SEAM = {"llmc/cuda/gemm.cuh": "dev/emulator/gemm.h", "llmc/cuda/launch.cuh": "dev/emulator/device.h"}
MODULES = ["data", "dev/bench", "dev/gpu_check", "dev/reference", "dev", "scripts", "scripts/export", "tests/programs"]
COMPILE = ["-fopenmp", "-fsyntax-only"]
COMPILE_C = ["gcc", "-std=gnu11", "-Werror=implicit-function-declaration", *COMPILE]
COMPILE_CUDA = ["g++", "-DPRECISION_BF16", "-DUSE_CUDNN", "-DUSE_NCCL", "-w", *COMPILE]


def without_comments(path):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)


def mpi_flags():
    try:
        found = subprocess.run(["mpicc", "--showme:compile"], capture_output=True, text=True, check=True).stdout
        return ["-DUSE_MPI", *shlex.split(found)]
    except (OSError, subprocess.CalledProcessError):
        return []


def cuda_flags():
    """Flags that compile CUDA sources as C++; None where CUDA's headers are not installed."""
    for directory in (os.environ.get("CUDA", "") + "/include", "/usr/local/cuda/include"):
        if os.path.exists(f"{directory}/cuda_runtime.h"):
            return ["-isystem", directory, "-Idev", "-DCUDA_ON_CPU", "-DDEVICE_OPS", "-std=gnu++17", "-x", "c++"]
    return None


def product(root):
    """The C and CUDA sources of the programs that users run."""
    found = [p for folder in ("llmc", "dev/predict") for p in (root / folder).rglob("*")]
    found = [p for p in found if p.suffix in (".h", ".cuh", ".cpp", ".c")]
    return sorted(found + [p for p in root.glob(f"{TRAINER}.*") if p.suffix in (".c", ".cu")])


def room_of(path):
    """The room of a path below the root; None: it is in none."""
    if re.search(r"(^|/)(test_\w+|\w+_test|conftest|testing)\.\w+$", path):
        return TESTS
    if path.startswith(f"{TRAINER}."):
        return TRAINER
    return next((room for room in ROOMS if path.startswith(f"{room}/")), None)


def sources(root):
    """What includes or imports, as paths below the root, with what each includes."""
    kinds = (".c", ".h", ".cu", ".cuh", ".cpp", ".py")
    folders = [root / name for name in ("data", "dev", "llmc", "scripts", "tests")]
    paths = [p for p in (*root.glob("*"), *(p for folder in folders for p in folder.rglob("*"))) if p.suffix in kinds]
    return {p.relative_to(root).as_posix(): sorted(set(includes(p, root))) for p in sorted(paths)}


def includes(path, root):
    """What a file includes or imports, as paths below the root."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for package, names in imports(text):
            yield from modules(path, root, package, names)
        return
    for end, name in re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', text, re.M):
        if end == '"':
            yield os.path.relpath(os.path.normpath(path.parent / name), root)
        elif (root / "dev" / name).exists():
            yield f"dev/{name}"


def imports(text):
    """(package, names) of the import statements of Python, wherever they stand; without names: the package itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), [alias.name for alias in node.names]


def modules(path, root, package, names):
    """The files that an import of `path` reads, of this repository: beside the file, else in MODULES."""
    inside = package.lstrip(".").replace(".", "/")
    places = [path.parent] if package.startswith(".") else [path.parent, *(root / place for place in MODULES)]
    for place in places:
        found = [place / inside / f"{name}.py" for name in names if (place / inside / f"{name}.py").exists()]
        if not found and inside and (place / f"{inside}.py").exists():
            found = [place / f"{inside}.py"]
        if found:
            yield from (p.relative_to(root).as_posix() for p in found if p != path)
            return


def wrong_includes(root):
    for own, targets in sources(root).items():
        room = room_of(own)
        for target in targets:
            other = room_of(target)
            if room is None or other is None:
                yield f"{own} includes {target}: {'both are' if room == other else 'one is'} in no room"
            elif room != other and LAYER[other] >= LAYER[room] and SEAM.get(own) != target:
                yield f"{own} includes {target}: {room} does not lie above {other}"


def circles(root):
    graph, state = sources(root), {}

    def visit(path, way):
        state[path] = "open"
        for target in graph.get(path, []):
            if state.get(target) == "open":
                yield " includes ".join([*way[way.index(target) :], target]) + ": a circle"
            elif target not in state:
                yield from visit(target, [*way, target])
        state[path] = "done"

    for path in graph:
        if path not in state:
            yield from visit(path, [path])


def hidden_exits(root):
    for path in product(root):
        calls = re.findall(r"(?<![\w.>])(exit|atexit|on_exit|quick_exit)\s*\(", without_comments(path))
        if path.relative_to(root).as_posix() == "llmc/base/common.h" and calls == ["exit"]:
            continue
        if calls:
            yield f"{path.relative_to(root)} calls {calls[0]}: program_exit ends the program (llmc/base/common.h)"


def alone(path, root):
    """Why a header does not compile on its own; None: it does, or CUDA's headers are missing here."""
    if path.suffix == ".cuh":
        flags = cuda_flags()
        command = flags and [*COMPILE_CUDA, *flags]
    else:
        command = [*COMPILE_C, *mpi_flags(), "-x", "c"]
    if not command:
        return None
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, cwd=root)
    if done.returncode == 0:
        return None
    error = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr[:200])
    return f"{path.relative_to(root)} does not compile alone: {error}"


def not_alone(root):
    headers = [p for p in product(root) if p.suffix in (".h", ".cuh")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(filter(None, pool.map(lambda p: alone(p, root), headers)))


def programs(root):
    """(main file, compiler and flags, whether it is a benchmark) of each build; None: it cannot be built here."""
    c, cuda, libraries = ["gcc", "-std=gnu11", "-x", "c"], cuda_flags(), ["-DUSE_CUDNN", "-DUSE_NCCL"]
    cuda = cuda and ["g++", *cuda]
    bf16 = cuda and [*cuda, "-DPRECISION_BF16"]
    all_programs = [
        ("train_diffv2.c", c, False),
        ("train_diffv2.c", [*c, *mpi_flags(), "-DONEDNN"], False),
        ("dev/predict/predict_diffv2.c", c, False),
        ("data/text_to_shards.c", c, False),
        ("train_diffv2.cu", bf16, False),
        ("train_diffv2.cu", bf16 and [*bf16, *libraries], False),
        ("train_diffv2.cu", cuda and [*cuda, "-DPRECISION_FP32", *libraries, *mpi_flags()], False),
        ("dev/bench/bench.c", c, True),
        ("dev/bench/bench_cuda.cu", bf16 and [*bf16, *libraries], True),
    ]
    return [p for p in all_programs if (root / p[0]).exists()]


def unused_functions(root, program):
    """(text of a program, its functions that nothing calls as (file, name, line)); None where it does not compile here.

    No compiler warns about `static inline`, so that the word inline is taken out after the preprocessor, and so are
    pragmas, which turn the warning off."""
    main, command, _ = program
    if not command:
        return None
    command = [*command, "-fopenmp"]
    done = subprocess.run([*command, "-E", main], capture_output=True, text=True, check=False, cwd=root)
    text = re.sub(r"\bstatic +inline\b", "static", re.sub(r"^#pragma GCC diagnostic .*", "", done.stdout, flags=re.M))
    options = ["-fpreprocessed", "-O0", "-S", "-o", "/dev/null", "-Wunused-function", "-"]
    if done.returncode == 0:
        done = subprocess.run([*command, *options], input=text, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode != 0:
        return None
    warned = re.findall(
        r"^([^:\n]+):(\d+):.*warning: [‘'](?:.*?)(\w+)(?:\(.*\))?[’'] defined but not used", done.stderr, re.M
    )
    return text, {(os.path.normpath(file), name, line) for file, line, name in warned}


def dead(root):
    """Functions that no program calls. Helpers that count bytes or FLOPs may also serve the benchmarks. Templates are
    not examined. Where a program cannot be compiled, its functions might be used there: none."""
    listed = programs(root)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda program: unused_functions(root, program), listed))
    if None in found:
        print(
            f"rooms.py: dead functions are not reported: {listed[found.index(None)][0]} needs headers that are missing",
            file=sys.stderr,
        )
        return []
    linked = all_code((root / "llmc").rglob("*.cpp"))  # compiled apart
    lines = []
    for file, name, line in sorted(set().union(*(unused for _, unused in found))):
        serves = name.endswith(("_bytes", "_flops"))
        texts = [
            text
            for (text, unused), (_, _, bench) in zip(found, listed)
            if (file, name, line) not in unused and (serves or not bench)
        ]
        if any(re.search(rf"\b{name}\b", text) for text in [linked, *texts]) or name == "train_diffv2_main":
            continue
        if file.startswith(("llmc/", "data/", "dev/predict/", "train_diffv2.")):
            lines.append(f"{file}: nothing calls {name}")
    return lines


def all_code(paths):
    """Their text without comments."""
    return "\n".join(without_comments(path) for path in sorted(paths))


def untested_operations(root):
    """An operation is a function of a contract with a buffer among its arguments. Those that return statistics need no
    OPERATION();."""
    contracts = [*(root / "llmc/ops").glob("*/operations.h"), root / "llmc/experts/operations.h"]
    declared = re.findall(
        r"static inline (\w+) (\w+)\(([^;{]*?)\);", all_code(path for path in contracts if path.exists())
    )
    cuda_twins = ("*.cuh", "*_apart.h")  # the latter: in CUDA and in predictions
    folders = [root / "llmc/ops", root / "llmc/experts"]
    cuda = all_code(path for folder in folders for twin in cuda_twins for path in folder.rglob(twin))
    tests = all_code((root / "tests").rglob("*.h"))
    for result, name, arguments in declared:
        if not re.search(r"\b(floatX|grad_t|real|double) \*", arguments) or name.endswith("_table"):  # of the host
            continue
        if not re.search(rf"\b{name}\(", tests):
            yield f"no test calls {name} (tests/operations/catalogue.h)"
        bodies = re.findall(rf"\b{name}\([^;{{]*\) {{\s*(.*?)\n}}", cuda, re.S)
        calls = [other for _, other, _ in declared if other != name]
        begun = [b for b in bodies if b.startswith("OPERATION();") or any(f"{other}(" in b for other in calls)]
        if result == "void" and not begun:
            yield f"the CUDA version of {name} does not begin with OPERATION();"


def offenders(root):
    static = [*wrong_includes(root), *circles(root), *hidden_exits(root)]
    return [*static, *not_alone(root), *dead(root), *untested_operations(root)]


def main():
    found = offenders(pathlib.Path(__file__).resolve().parent.parent)
    good = "includes and imports point downwards, headers compile alone, functions are called, operations are tested"
    print("\n".join(found) or good)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
