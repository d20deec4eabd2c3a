#!/usr/bin/env python3
"""rooms.py: checks the structure of the product: includes, headers, ends of the program, functions that nothing calls,
operations.

Usage: dev/rooms.py [--root DIRECTORY] [--counts]
Prints one line per offender. Exit status: 0 none, 1 some, 2 usage.
  --counts   prints a table instead: files, lines, casts to size_t and offenders of each room, then of larger parts

  layers    an include stays in its room or points to a room of a lower layer; the trainer includes nothing of
            dev/predict, which is above it
  product   llmc/ and the trainer include nothing of dev/ or tests/
  alone     each .h of llmc/ compiles as C without CUDA's headers, each .cuh as C++ with them (where they are installed)
  exit      only program_exit of llmc/base/common.h calls exit, and nothing registers a handler for it
  dead      each function of the product is called (py)
  tested    each operation of llmc/ops/ops.h and llmc/experts/operations.h is called in tests/*.h, and its CUDA version
            begins with OPERATION(); or calls others
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

LAYERS = [
    ["base"],
    ["data", "text", "cuda"],
    ["ops"],
    ["comm"],
    ["experts"],
    ["model"],
    ["checkpoint"],
    ["options", "log"],
    ["evaluate"],
    ["run"],
    ["predict"],
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
TRAINER = ["train_diffv2.c", "train_diffv2.cu", "dev/predict/predict_diffv2.c"]
NEWLINE, BINARY = b"\n", b"\0"  # a file that contains a zero byte is not text
COMPILE = ["-fopenmp", "-fsyntax-only", "-w"]
COMPILE_C = ["gcc", "-std=gnu11", "-Werror=implicit-function-declaration", *COMPILE]
COMPILE_CUDA = ["g++", "-DPRECISION_BF16", "-DUSE_CUDNN", "-DUSE_NCCL", *COMPILE]


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
    found = [p for p in (root / "llmc").rglob("*") if p.suffix in (".h", ".cuh", ".cpp")]
    mains = [p for name in ("predict", "train") for p in root.glob(f"{name}_diffv2.*") if p.suffix in (".c", ".cu")]
    return sorted(found + mains)


def includes(path, root):
    """What a file includes, as paths below the root."""
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.M):
        yield os.path.relpath(os.path.normpath(path.parent / name), root)


def wrong_includes(root):
    for path in product(root):
        own = path.relative_to(root).parts
        for target in includes(path, root):
            parts = pathlib.PurePath(target).parts
            if parts[0] in ("dev", "tests"):
                yield f"{'/'.join(own)} includes {target}: the product includes nothing of {parts[0]}/"
            elif own[0].startswith("train_diffv2.") and parts[:2] == ("llmc", "predict"):
                yield f"{own[0]} includes {target}: predict lies above the trainer"
            elif own[0] == "llmc" and (parts[0] != "llmc" or len(parts) != 3 or parts[1] not in LAYER):
                yield f"{'/'.join(own)} includes {target}, which is in no room of llmc/"
            elif own[0] == "llmc" and parts[1] != own[1] and LAYER[parts[1]] >= LAYER.get(own[1], -1):
                yield f"{'/'.join(own)} includes {target}: {own[1]} does not lie above {parts[1]}"


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
        if file.startswith(("llmc/", "data/", "predict_diffv2.", "train_diffv2.")):
            lines.append(f"{file}: nothing calls {name}")
    return lines


def all_code(paths):
    """Their text without comments."""
    return "\n".join(without_comments(path) for path in sorted(paths))


def untested_operations(root):
    """An operation is a function of a contract with a buffer among its arguments. Those that return statistics need no
    OPERATION();."""
    contracts = [path for path in (root / "llmc/ops/ops.h", root / "llmc/experts/operations.h") if path.exists()]
    declared = re.findall(r"static inline (\w+) (\w+)\(([^;{]*?)\);", all_code(contracts))
    cuda_twins = ("*.cuh", "*_apart.h")  # the latter: in CUDA and in predictions
    cuda = all_code(path for contract in contracts for twin in cuda_twins for path in contract.parent.glob(twin))
    tests = all_code((root / "tests").glob("*.h"))
    for result, name, arguments in declared:
        if not re.search(r"\b(floatX|grad_t|real|double) \*", arguments):
            continue
        if not re.search(rf"\b{name}\(", tests):
            yield f"no test calls {name} (tests/operations/catalogue.h)"
        bodies = re.findall(rf"\b{name}\([^;{{]*\) {{\s*(.*?)\n}}", cuda, re.S)
        calls = [other for _, other, _ in declared if other != name]
        begun = [b for b in bodies if b.startswith("OPERATION();") or any(f"{other}(" in b for other in calls)]
        if result == "void" and not begun:
            yield f"the CUDA version of {name} does not begin with OPERATION();"


def offenders(root):
    return [*wrong_includes(root), *hidden_exits(root), *not_alone(root), *dead(root), *untested_operations(root)]


def print_counts(root):
    rooms = {room: sorted((root / "llmc" / room).glob("*")) for room in LAYER}
    rooms["trainer"] = [root / name for name in TRAINER]
    lines = {"not alone": not_alone(root), "dead": dead(root)}
    print(f"{'room':12}{'files':>7}{'lines':>8}{'(size_t)':>10}" + "".join(f"{name:>11}" for name in lines))
    total = [0] * (3 + len(lines))
    for room, paths in rooms.items():
        text = "".join(p.read_text(encoding="utf-8") for p in paths)
        prefixes = tuple(str(p.relative_to(root)) for p in paths)
        row = [len(paths), text.count("\n"), len(re.findall(r"(?<!sizeof)\(size_t\)", text))]
        row += [sum(line.startswith(prefixes) for line in found) for found in lines.values()]
        total = [a + b for a, b in zip(total, row)]
        print(f"{room:12}{row[0]:7}{row[1]:8}{row[2]:10}" + "".join(f"{n:11}" for n in row[3:]))
    print(f"{'total':12}{total[0]:7}{total[1]:8}{total[2]:10}" + "".join(f"{n:11}" for n in total[3:]))
    for what, folders in (("product", "llmc scripts data"), ("tests, dev", "tests dev"), ("docs", "docs")):
        names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=root).stdout.split()
        names = [n for n in names if n.startswith(tuple(f"{folder}/" for folder in folders.split()))]
        if what == "product":
            names += ["Makefile", *TRAINER]
        texts = [(root / n).read_bytes() for n in names]
        print(f"{what:12}{len(names):7}{sum(t.count(NEWLINE) for t in texts if BINARY not in t):8}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--counts", action="store_true")
    args = parser.parse_args()
    if args.counts:
        print_counts(args.root.resolve())
        return 0
    found = offenders(args.root.resolve())
    good = "includes point downwards, headers compile alone, functions are called, operations are tested"
    print("\n".join(found) or good)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
