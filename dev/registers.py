#!/usr/bin/env python3
"""
Checks what ptxas said of each kernel (-v) against the table below: bytes of stack, to which registers spill; registers;
and static shared memory. A multiprocessor has 65,536 registers: a kernel of T threads that is to run B blocks at a time
may use 65536 / (T B), in steps of 8. The static shared memory of a block is at most 48 KiB.

Also counts atomics on device memory that return a result that nothing reads, in SASS: since sm_90 nvcc compiles
atomicAdd to them in a kernel that calls __threadfence(). If the toolkit has no cuobjdump, installs one in build.

Usage: dev/registers.py LOG...
  LOG    what `nvcc -Xptxas -v` printed; the Makefile writes it beside each object, NAME.cu.o.ptxas
Prints a line for each kernel that exceeds its limits, and a last line with the number of kernels, one for each
architecture. Exit status: 0 all kernels are within their limits, 1 not, 2 usage.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

REGISTERS, SHARED = 65536, 48 << 10
# Of sm_90: after setmaxnreg, of 128 and 256 threads. A block that starts with fewer waits for ever, without an error.
RAISED = 24 * 128 + 240 * 256
# A kernel, the threads of its blocks, blocks at a time, and the most bytes of stack on any architecture (spills).
# The first row that matches holds.
LIMITS = (
    ("attention_mma_forward_kernel<.*128>", 128, 2, 24),  # sm_120: three or six numbers that a tile reads
    ("attention_mma_forward_kernel", 128, 2, 0),
    ("attention_wgmma_(forward|backward)_kernel", 384, 1, 0),
    # places of the block, outside of products
    ("attention_backward_mma_kernel<.*128, 128, 1>", 256, 1, 56),
    ("attention_backward_mma_kernel", 256, 1, 0),
    ("attention_dkv_kernel<(4, false|2, true)>", 256, 1, 16),
    ("attention_dkv_kernel<1, false>", 256, 2, 24),
    ("attention_(forward|dq|dkv)_kernel<[48]", 256, 1, 24),
    ("attention_(forward|dq|dkv)_kernel", 256, 2, 0),
    ("sparse_select_kernel", 128, 6, 0),
    ("sparse_dkv_kernel<[48], 1>", 128, 6, 8),
    ("sparse_(forward|dq)_kernel<[48], 1>", 128, 8, 48),  # places of rows, outside of products
    ("sparse_(forward|dq|dkv)_kernel", 128, 2, 0),  # heads of up to 512 elements, or in packs of one
    ("attention_decode_mma_kernel<[24], 2>", 128, 2, 0),
    ("attention_decode_mma_kernel", 128, 3, 0),
    ("attention_decode_kernel<., 4>", 128, 3, 16),
    ("attention_decode_kernel", 128, 6, 32),
    ("expert_gemm_mma_kernel<false, false, .*[12]>", 128, 2, 104),  # FP8; on sm_90, where the fp32 build alone has it
    ("expert_gemm_mma_kernel", 128, 2, 0),
    ("expert_gemm_plain_kernel", 256, 2, 8),
    ("gemm_plain_kernel", 256, 2, 0),
    ("rmsnorm_backward_kernel", 1024, 1, 0),
    ("sum_of_squares_kernel", 512, 2, 0),
    # heads of up to 512 elements in packs of one element, for rows that are not aligned
    ("head_norm_backward_kernel<1, 16", 256, 1, 0),
    ("head_norm_backward_kernel", 256, 2, 0),
    ("head_norm_forward_kernel<1, 16", 128, 2, 0),
    ("(head_norm|diff_combine)_(forward|backward)_kernel", 128, 4, 0),
    ("attention_stats_kernel", 128, 4, 16),  # an array of A1 and A2
    ("", 256, 4, 0),
)


def cuobjdump():
    """The path of the toolkit's disassembler, else of a Python package's; None: it cannot be installed."""
    toolkit = f"{os.environ.get('CUDA') or '/usr/local/cuda'}/bin"
    if found := shutil.which("cuobjdump", path=f"{toolkit}:{os.environ['PATH']}"):
        return found
    try:
        python_environment.install("sass")
    except SystemExit as error:
        return print(f"{error}: atomics are not counted", file=sys.stderr)
    return next(python_environment.place_of("sass").glob("lib/*/site-packages/nvidia/*/bin/cuobjdump"))


def unread(lines):
    """{(name, architecture): atomics whose result nothing reads} of SASS. CAS and EXCH always return a result."""
    counts = {}
    for line in lines:
        if line.startswith("arch = sm_"):
            arch = int(re.sub(r"\D", "", line))
        elif "Function : " in line:
            counts[function := (line.split()[-1], arch)] = 0
        elif "ATOM" in line and re.search(r"\bATOMG?\.E\.(?!CAS|EXCH)\S+ \w+, RZ,", line):
            counts[function] += 1
    return counts


def unread_in(path, tool):
    with subprocess.Popen([tool, "-sass", path], stdout=subprocess.PIPE, text=True) as process:
        counts = unread(process.stdout)
    if process.returncode or not counts:
        sys.exit(f"registers.py: {tool} -sass finds no kernel in {path}")
    return counts


def kernels(path, tool):
    """(name, architecture, registers, bytes of stack and of static shared memory, atomics) of each kernel of a log."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    atomics = tool and unread_in(path.removesuffix(".ptxas"), tool)
    arch = function = stack = None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '\S+' for 'sm_(\d+)a?'", line):
            arch = int(found[1])
        elif found := re.search(r"Function properties for (\S+)", line):
            function = found[1]
        elif found := re.search(r"(\d+) bytes stack frame", line):
            stack = int(found[1])
        elif (found := re.search(r"Used (\d+) registers", line)) and function:
            shared = re.search(r"(\d+) bytes smem", line)
            yield (
                function,
                arch,
                int(found[1]),
                stack,
                int(shared[1]) if shared else 0,
                tool and atomics[function, arch],
            )
            function = None


def readable(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [name.removeprefix("void ").split("(float")[0] for name in done.stdout.splitlines()]


def problems(name, arch, registers, stack, shared, atomics):
    _, threads, blocks, spills = next(row for row in LIMITS if re.search(rf"\b{row[0]}", name))
    if "_wgmma_" in name and arch == 90 and registers * threads != RAISED:
        yield f"{registers} registers: setmaxnreg requires {RAISED // threads}"
    if registers > (most := REGISTERS // (threads * blocks) // 8 * 8):
        yield f"{registers} registers, at most {most} for {blocks} blocks of {threads} threads"
    if stack > spills:
        yield f"{stack} bytes of stack, at most {spills}: registers spill, or an array is local"
    if shared > SHARED:
        yield f"{shared} bytes of static shared memory, at most {SHARED}"
    if atomics:
        yield f"{atomics} atomics return a result that nothing reads: replace atomicAdd by red, in assembly"


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("registers.py: usage: dev/registers.py LOG...", file=sys.stderr)
        return 2
    tool = cuobjdump()
    try:
        found = [kernel for path in sys.argv[1:] for kernel in kernels(path, tool)]
    except OSError as error:
        sys.exit(f"registers.py: {error.filename}: {error.strerror}")
    wrong = {arch: 0 for _, arch, *_ in found}
    for name, (_, arch, *values) in zip(readable([kernel[0] for kernel in found]), found):
        for problem in problems(name, arch, *values):
            print(f"sm_{arch}: {name}: {problem}")
            wrong[arch] += 1
    if not found:
        sys.exit("registers.py: the logs name no kernel; they come from nvcc -Xptxas -v")
    for arch, count in wrong.items():
        print(f"sm_{arch}: {sum(kernel[1] == arch for kernel in found)} kernels, {count} above their limits")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
