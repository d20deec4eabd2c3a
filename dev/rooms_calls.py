"""rooms_calls.py: functions of the product that nothing calls, for rooms.py.

A compiler does not warn about them, since they are `static inline`. Each program is preprocessed, its functions are
found, and those that cannot be reached from main, from a table or from a .cpp file are dead. A function is reported
when it is dead in every program that has it. Helpers that count bytes or FLOPs may also serve the benchmarks.
"""

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[A-Za-z_]\w*|[{}();=<>]')
ATTRIBUTES = ("__attribute__", "__launch_bounds__", "alignas")


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


def programs(root):
    """(main file, compiler and flags, whether it is a benchmark) of each build; None: it cannot be built here."""
    c, cuda, libraries = ["gcc", "-std=gnu11"], cuda_flags(), ["-DUSE_CUDNN", "-DUSE_NCCL"]
    cuda = cuda and ["g++", *cuda]
    bf16 = cuda and [*cuda, "-DPRECISION_BF16"]
    all_programs = [
        ("train_diffv2.c", c, False),
        ("train_diffv2.c", [*c, *mpi_flags(), "-DONEDNN"], False),
        ("data/text_to_shards.c", c, False),
        ("train_diffv2.cu", bf16, False),
        ("train_diffv2.cu", bf16 and [*bf16, *libraries], False),
        ("train_diffv2.cu", cuda and [*cuda, *libraries, *mpi_flags()], False),
        ("dev/bench/bench.c", c, True),
        ("dev/bench/bench_cuda.cu", bf16 and [*bf16, *libraries], True),
    ]
    return [p for p in all_programs if (root / p[0]).exists()]


def preprocess(root, main, command):
    """(file, tokens) of each piece of a program that lies below the root; None where it does not compile here."""
    done = subprocess.run([*command, "-fopenmp", "-E", main], capture_output=True, text=True, check=False, cwd=root)
    if done.returncode != 0:
        return None
    pieces, kept = [], False
    for line in done.stdout.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            kept = not marker[1].startswith(("/", "<"))
            pieces.append((os.path.normpath(marker[1]), []))
        elif kept and not line.startswith("#"):
            pieces[-1][1].extend(t for t in TOKEN.findall(line) if t[0] not in "\"'")
    return pieces


def without_attributes(head):
    """The tokens of a declaration without its template parameters and attributes."""
    kept, depth, skipping = [], 0, None
    for token in head:
        if skipping is None and (token in ATTRIBUTES or (token == "template" and not kept)):
            skipping = "<>" if token == "template" else "()"
        elif skipping:
            depth += (token == skipping[0]) - (token == skipping[1])
            if depth == 0:
                skipping = None
        else:
            kept.append(token)
    return kept


def function_name(head):
    """The name of the function that these tokens declare; None: they declare something else."""
    head = without_attributes(head)
    if "(" not in head[1:] or "=" in head or "{" in head or head[0] == "typedef":
        return None
    name = head[head.index("(", 1) - 1]
    return name if name[0].isalpha() or name[0] == "_" else None


def functions(pieces):
    """{(file, name): names in its definition}, and the names that are used outside of functions."""
    found, used, head, body, depth = {}, set(), [], None, 0
    for file, tokens in pieces:
        for token in tokens:
            if token == "{" and depth == 0:
                if name := function_name(head):
                    body = found.setdefault((file, name), set())
                    body.update(t for t in head if t != name)
                elif head[:1] in (["extern"], ["namespace"]):
                    head = []
                    continue
            depth += (token == "{") - (token == "}")
            if body is not None:
                body.add(token)
                if depth == 0:
                    head, body = [], None
            elif token == ";" and depth == 0:
                if function_name(head) is None:
                    used.update(head)
                head = []
            elif depth < 0:  # the end of extern "C" or of a namespace
                depth, head = 0, []
            else:
                head.append(token)
    return found, used


def reached(found, used):
    """The (file, name) of functions that can be reached from the names in `used`."""
    of_name, seen, todo = {}, set(), list(used)
    for file, name in found:
        of_name.setdefault(name, []).append((file, name))
    while todo:
        for function in of_name.get(todo.pop(), []):
            if function not in seen:
                seen.add(function)
                todo.extend(found[function])
    return seen


def dead_functions(root):
    """The (file, name) of dead functions, and the programs that could not be examined here."""
    linked = set()  # .cpp files are compiled apart, by compilers and libraries that may be missing here
    for path in (root / "llmc").rglob("*.cpp"):
        linked.update(TOKEN.findall(without_comments(path)))
    known, alive, missing = set(), set(), []

    def examine(program):
        main, command, is_bench = program
        pieces = command and preprocess(root, main, command)
        if pieces is None:
            return main, None
        found, used = functions(pieces)
        if is_bench:
            used |= {name for file, name in found if file.startswith("dev/")}
        seen = reached(found, used | linked | {"main"})
        return None, (found, {f for f in seen if not is_bench or f[1].endswith(("_bytes", "_flops"))})

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lacking, result in pool.map(examine, programs(root)):
            if lacking:
                missing.append(lacking)
            else:
                known.update(result[0])
                alive.update(result[1])
    dead = [f for f in known - alive if f[0].startswith(("llmc/", "data/", "train_diffv2."))]
    return [f for f in sorted(dead) if f[1] != "train_diffv2_main"], missing
