"""Mistakes planted in the PTX of planted90a.cu are reported, or change the results.

Requires what `make build/ptx/sm_90a/planted90a` makes. Each mistake replaces one text in one kernel. It is found by the
translator, by the program that runs the kernel (with one line), or by its results.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
BUILD = ROOT / "build"
PROGRAM = BUILD / "ptx/sm_90a/planted90a"
PARTS = PROGRAM.with_name("planted90a_parts")
CUDA = pathlib.Path(os.environ.get("CUDA") or "/usr/local/cuda")
COMPILE = f"{os.environ.get('CXX', 'g++')} -std=c++17 -O0 -ffp-contract=off -DCUDA_ON_CPU -Idev -isystem {CUDA}/include"
WRONG = "wrong results"

UNDER_WAY, DESCRIPTOR = "while the bulk copy of", r"(or\.b64\s+%rd\d+, %rd\d+), "
CONSTANT = 1 << 62 | 64 << 32  # of a descriptor
LOAD, LAST = r"cp\.async\.bulk\.tensor\.3d", r"(?![\s\S]*wgmma\.(?:commit|wait))"
# The sentence, the kernel, a regular expression, its replacement, and the report, a part of the line.
MISTAKES = [
    # found by the translator
    ("an opcode that the table does not have", "plain", r"add\.f32", "add.rp.f32", "unknown form: add.rp.f32"),
    ("a vector of three", "vectors", r"ld\.global\.v4\.f32", "ld.global.v3.f32", "unknown form: ld.global.v3.f32"),
    ("a vector of too few registers", "vectors", r"(ld\.global\.v4\.f32\s+\{%f\d+), %f\d+,", r"\1,", "of other types"),
    ("a register of another type", "plain", r"(add\.f32\s+%f\d+), %f\d+", r"\1, %r1", "of other types"),
    ("a register that is not declared", "plain", r"(add\.f32\s+%f\d+), %f\d+", r"\1, %f99", "of other types"),
    ("an operand too many", "plain", r"(bar\.sync\s+0)", r"\1, 64", "of other types"),
    ("an immediate beyond 32 bits", "plain", r"(mov\.u32\s+%r\d+), 1", r"\1, 4294967297", "of other types"),
    ("a parameter beyond its size", "vectors", r"(_param_1)\]", r"\1+8]", "of other types"),
    ("an unknown symbol", "vectors", r"\[(_Z\w+_param_1)\]", r"[\g<1>0]", "of other types"),
    ("a directive that is not known", "vectors", r"\.loc", ".lock", "not understood: .lock"),
    ("a file that ends early", "vectors", r"ret;\s*\}", "ret", "not understood: ret"),
    # found when the kernel runs
    ("a misaligned load of 16 bytes", "vectors", r"(ld\.global\.v4\.f32[^[]*\[%rd\d+)\]", r"\1+4]",
     "misaligned access to global memory: 16 bytes at"),
    ("a misaligned store to shared memory", "plain", r"(st\.shared\.u32\s+\[%r\d+)\]", r"\1+2]",
     "misaligned access to shared memory: 4 bytes at"),
    ("a store behind a shared array", "plain", r"(st\.shared\.u32\s+\[%r\d+)\]", r"\1+4]",
     "out of bounds: 4 bytes at byte"),
    ("a load before a shared array", "plain", r"(ld\.shared\.f32[^[]*\[%r\d+)\]", r"\1+-4]",
     "out of bounds: 4 bytes at byte"),
    ("a load behind an allocation", "vectors", r"(ld\.global\.v4\.f32[^[]*\[%rd\d+)\]", r"\1+15376]",
     "out of bounds: 16 bytes at byte 16384 of 16384 of global memory"),
    ("a load from no memory", "vectors", r"(ld\.global\.v4\.f32[^[]*\[%rd\d+)\]", r"\1+68719476736]",
     "access to no memory of the device"),
    ("another barrier", "plain", r"bar\.sync\s+0", "bar.sync 1", "bar.sync 1"),
    ("a parameter of another size", "product", r"(_param_0)\[128\]", r"\1[192]", "bytes of parameters"),
    ("a launch bound below the launch", "plain", r"(\n\)\s*\n)\{", r"\1.maxntid 32, 1, 1\n{", "launch bounds are 32"),
    # barriers and bulk copies
    ("a wait for the other parity", "product", r"(setmaxnreg\.inc[\s\S]*?done, \[%r\d+\]), %r\d+", r"\1, 1",
     UNDER_WAY),
    ("a stage that is filled before it is free", "product", r"(done, \[%r\d+\]), %r\d+(?=[\s\S]*setmaxnreg\.inc)",
     r"\1, 1", "an arrival at an mbarrier that lacks none"),
    ("a stage that is released before wgmma has read it", "product",
     r"(wgmma\.wait_group[^;]*;)([\s\S]*?mbarrier\.arrive[^;]*;)", r"\2\1", "while wgmma in"),
    ("a phase that lacks an arrival", "product", r"(mbarrier\.init[^;]*), 128", r"\1, 129",
     "lacks 1 arrivals and 0 bytes"),
    ("an mbarrier that is not initialized", "product", r"mbarrier\.init[^;]*;", "", "no mbarrier at byte"),
    ("a missing expect_tx", "product", r"\.expect_tx(\.shared::cta\.b64 _, \[%r\d+\]), %r\d+", r"\1", UNDER_WAY),
    ("expect_tx of too many bytes", "product", r"12288", "12304", "lacks 0 arrivals and 16 bytes"),
    ("expect_tx of too few bytes", "product", r"12288", "12272", "lacks 0 arrivals and -16 bytes"),
    ("mbarriers that are initialized without a fence", "product", r"fence\.mbarrier_init[^;]*;", "",
     "fence.proxy.async is missing"),
    ("numbers that are written without a fence", "plain", r"fence\.proxy\.async[^;]*;", "",
     "fence.proxy.async is missing"),
    ("a box at a multiple of 64", "product", rf"({LOAD}[^[]*\[%r\d+)\]", r"\1+64]", "is not a multiple of 128"),
    ("a copy with fewer coordinates", "product", rf"({LOAD}[^{{]*\{{%r\d+, %r\d+), %r\d+", r"\1",
     "2 coordinates of a tensor of 3 dimensions"),
    ("another coordinate", "product", rf"({LOAD}[^{{]*\{{%r\d+), %r\d+", r"\1, 1", WRONG),
    ("a plain copy of 1020 bytes", "plain", r"1024, \[", "1020, [", "multiples of 16 are required"),
    ("a plain copy behind its allocation", "plain", r"(bytes \[%r\d+\], \[%rd\d+)\]",
     r"\1+15872]", "out of bounds: 1024 bytes at byte 15872 of 16384 of global memory"),
    ("a plain copy behind a shared array", "plain", r"(bytes \[%r\d+)\]", r"\1+16]", "out of bounds"),
    ("a number that is read before its copy has landed", "plain", r"(done, \[%r\d+\]), %r\d+", r"\1, 1", UNDER_WAY),
    # wgmma
    ("no wgmma.fence", "product", r"wgmma\.fence\.sync\.aligned;", "", "wgmma.fence is missing"),
    ("no wgmma.fence after A was loaded", "registers", r"(ldmatrix[\s\S]*?)wgmma\.fence\.sync\.aligned;", r"\1",
     "wgmma.fence is missing"),
    ("no wait for wgmma", "product", rf"wgmma\.wait_group\.sync\.aligned 0;{LAST}", "",
     "wgmma.wait_group is missing"),
    ("a wait for fewer groups", "product", rf"(wgmma\.wait_group\.sync\.aligned) 0;{LAST}", r"\1 1;",
     "wgmma.wait_group is missing"),
    ("no commit", "product", r"wgmma\.commit_group\.sync\.aligned;(?![\s\S]*wgmma\.commit)", "",
     "wgmma.wait_group is missing"),
    ("a stride that the swizzle does not allow", "product", rf"{DESCRIPTOR}{CONSTANT}",
     rf"\1, {1 << 62 | 32 << 32 | 64 << 16}", "a stride of 512 bytes, which its swizzle"),
    ("another swizzle", "product", rf"{DESCRIPTOR}{CONSTANT}", rf"\1, {2 << 62 | 64 << 32}", "another swizzle"),
    ("a descriptor with an address beyond its field", "product", rf"{DESCRIPTOR}{CONSTANT}",
     rf"\1, {CONSTANT | 1 << 14}", "reserved bits"),
    ("a negated product", "registers", r"adds, 1, 1, 0;", "adds, 1, -1, 0;", WRONG),
    ("registers of A in another order", "registers", r"\}, \{(%r\d+), (%r\d+),", r"}, {\2, \1,", WRONG),
    ("a size that wgmma does not have", "product", r"m64n32k16", "m64n36k16", "unknown form"),
    # other instructions
    ("registers that are no multiple of 8", "product", r"(setmaxnreg\.inc[^;]*) 232", r"\1 236", "a multiple of 8"),
    ("registers of a kernel whose number ptxas does not know", "product", r"\.minnctapersm 1", "",
     "ptxas ignores it without"),
    ("four numbers that are added at a multiple of 4", "vectors", r"(red\.\S+ \[%rd\d+)\]", r"\1+4]",
     "misaligned access to global memory: 16 bytes"),
    ("a row of stmatrix at a multiple of 8", "product", r"(stmatrix[^[]*\[%r\d+)\]", r"\1+8]",
     "misaligned access to shared memory"),
]  # fmt: skip


NAMES = {"product": "productILb0", "registers": "productILb1"}  # of kernels, in the PTX


def plant(text, kernel, pattern, replacement):
    """The PTX of this kernel alone, with the first match replaced."""
    kernel = NAMES.get(kernel, kernel)
    start = re.search(rf"\.entry _Z(?:L)?\d+{kernel}\w*\(", text).start()
    end = text.find(".entry", start + 1)
    changed, count = re.subn(pattern, replacement, text[start : end if end > 0 else len(text)], count=1)
    assert count == 1, f"{kernel} has no {pattern}"
    return text[: text.index(".entry")] + changed + "".join(re.findall(r"\.file\b[^\n]*\n", text))


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)


def report(scratch, text, kernel):
    """What the translator or the program prints about a PTX, `wrong results`, or nothing."""
    ptx, part, program = (scratch / name for name in ("planted.ptx", "part_0.cpp", "planted"))
    ptx.write_text(text)
    done = run(sys.executable, HERE / "translate.py", ptx, PARTS / "host_symbols", scratch, 1)
    if done.returncode:
        return done.stderr
    layer = [path for path in (BUILD / "oncpu").glob("*.o") if not path.name.endswith(".cu.o")]
    layer += [BUILD / "ptx/runtime.o", BUILD / "ptx/hopper.o", BUILD / "revision.o"]
    done = run(*COMPILE.split(), "-fopenmp", "-o", program, part, PARTS / "host.o", *layer, "-lpthread")
    assert done.returncode == 0, done.stderr
    done = run(program, kernel)
    if done.returncode or done.stderr:
        return done.stderr
    return "" if done.stdout == f"{kernel} right\n" else WRONG


@pytest.mark.parametrize("order", ("forward", "reverse", "shuffled:1", "shuffled:2"))
@pytest.mark.parametrize("copies", ("late", "early", "mixed"))
def test_products_of_sm_90a_are_right(copies, order):
    variables = f"CUDA_ON_CPU_COPIES={copies}", f"CUDA_ON_CPU_ORDER={order}"
    done = run("env", *variables, PROGRAM)
    assert done.stdout.count(" right\n") == 5 == done.stdout.count("\n") and not done.stderr


@pytest.mark.parametrize("mistake", [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_reported(mistake, tmp_path):
    kernel, pattern, replacement, wanted = mistake
    text = PROGRAM.with_suffix(".ptx").read_text()
    found = report(tmp_path, plant(text, kernel, pattern, replacement), kernel)
    assert wanted in found and found.count("\n") <= 1
