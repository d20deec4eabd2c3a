"""Mistakes planted in the PTX of planted.cu and planted90a.cu are reported, or change the results.

Requires what `make build/ptx/sm_90/planted build/oncpu/planted build/ptx/sm_90a/planted90a` makes. Each mistake
replaces one text in one kernel. It is found by the translator, by the program that runs the kernel (with one line), or
by its results.
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
CUDA = pathlib.Path(os.environ.get("CUDA") or "/usr/local/cuda")
COMPILE = f"{os.environ.get('CXX', 'g++')} -std=c++17 -O0 -ffp-contract=off -DCUDA_ON_CPU -Idev -isystem {CUDA}/include"
WRONG = "wrong results"

# The sentence, the kernel, a regular expression, its replacement, and the report, a part of the line.
MISTAKES = [
    # found by the translator
    ("an opcode that the table does not have", "vectors", r"add\.f32", "add.rp.f32", "unknown form: add.rp.f32"),
    ("a rounding that the table does not have", "conversions", r"cvt\.rn\.bf16", "cvt.rz.bf16", "unknown form: cvt.rz"),
    ("a vector of three", "vectors", r"ld\.global\.v4\.f32", "ld.global.v3.f32", "unknown form: ld.global.v3.f32"),
    ("a vector of too few registers", "vectors", r"(ld\.global\.v4\.f32\s+\{%f1), %f2,", r"\1,", "of other types"),
    ("a register of another type", "vectors", r"(cvt\.rn\.f32\.s32\s+%f\d+), %r1", r"\1, %rd1", "of other types"),
    ("a register that is not declared", "vectors", r"(cvt\.rn\.f32\.s32\s+%f\d+), %r1", r"\1, %r99", "of other types"),
    ("an operand too many", "arrays", r"(bar\.sync\s+0)", r"\1, 64", "of other types"),
    ("an immediate beyond 32 bits", "exchanges", r"(mov\.u32\s+%r\d+), 31", r"\1, 4294967327", "of other types"),
    ("a parameter beyond its size", "vectors", r"(_param_2)\+12\]", r"\1+16]", "of other types"),
    ("an unknown symbol", "vectors", r"\[(_Z\w+_param_1)\]", r"[\g<1>0]", "of other types"),
    ("a directive that is not known", "vectors", r"\.loc", ".lock", "not understood: .lock"),
    ("a file that ends early", "conversions", r"ret;\s*\}", "ret", "not understood: ret"),
    # found when the kernel runs
    ("a misaligned load of 16 bytes", "vectors", r"(ld\.global\.v4\.f32[^[]*\[%rd\d+)\]", r"\1+4]",
     "misaligned access to global memory: 16 bytes at"),
    ("a misaligned store of 16 bytes to shared memory", "arrays", r"(st\.shared\.v4\.u32\s+\[%r\d+)\]", r"\1+8]",
     "misaligned access to shared memory: 16 bytes at"),
    ("a vector access to an array of floats", "arrays", r"st\.shared\.f32(\s+\[%r\d+\]), (%f\d+)",
     r"st.shared.v4.f32\1, {\2, \2, \2, \2}", "misaligned access to shared memory: 16 bytes at"),
    ("a store behind a shared array", "arrays", r"(st\.shared\.f32\s+\[%r\d+)\]", r"\1+4]",
     "out of bounds: 4 bytes at byte"),
    ("a load before a shared array", "arrays", r"(ld\.shared\.f32[^[]*\[%r\d+)\]", r"\1+-4]",
     "out of bounds: 4 bytes at byte"),
    ("a load behind an allocation", "vectors", r"(ld\.global\.v4\.f32[^[]*\[%rd\d+)\]", r"\1+16]",
     "out of bounds: 16 bytes at byte 1024 of 1024 of global memory"),
    ("a load from no memory", "vectors", r"(ld\.global\.v4\.f32[^[]*\[%rd\d+)\]", r"\1+68719476736]",
     "access to no memory of the device"),
    ("an asynchronous copy of another size", "copies", r"(cp\.async[^;]*\]), 16,", r"\1, 8,",
     "cp.async of 16 of 8 bytes"),
    ("an asynchronous copy to shared memory that is misaligned", "copies", r"(cp\.async[^[]*\[%r\d+)\]", r"\1+8]",
     "misaligned access to shared memory"),
    ("a segment of a shuffle", "exchanges", r"(mov\.u32\s+%r\d+), 31", r"\1, 30", "shfl.sync has 0x1e for its segment"),
    ("a mask of a shuffle that lacks a lane", "exchanges", r"(mov\.u32\s+%r\d+), -1", r"\1, -2", "wrong lane mask"),
    ("another barrier", "arrays", r"bar\.sync\s+0", "bar.sync 1", "bar.sync 1"),
    ("a parameter of another size", "vectors", r"\.b8 (\w+_param_2)\[16\]", r".b8 \1[24]", "bytes of parameters"),
    ("a launch bound below the launch", "vectors", r"(\n\)\s*\n)\{", r"\1.maxntid 32, 1, 1\n{", "launch bounds are 32"),
    # found by the results
    ("a distance of a shuffle", "exchanges", r"(mov\.u32\s+%r\d+), 16", r"\1, 8", WRONG),
    ("a wait for fewer groups of copies", "copies", r"cp\.async\.wait_group 0", "cp.async.wait_group 1", WRONG),
    ("a copy that is not committed", "copies", r"cp\.async\.commit_group;", "", WRONG),
    ("matrices that are not transposed", "products", r"x4\.trans", "x4", WRONG),
    ("registers of a product in another order", "products", r"\{%r1, %r2, (%r3, %r4\}, \{)", r"{%r2, %r1, \1", WRONG),
    ("numbers of a conversion in another order", "conversions", r"(e4m3x2\.f32 %rs\d+,) (%f\d+), (%f\d+)",
     r"\1 \3, \2", WRONG),
    ("another format of FP8", "conversions", r"e4m3x2", "e5m2x2", WRONG),
    ("a barrier that is missing", "arrays", r"bar\.sync\s+0;", "", WRONG),
]  # fmt: skip

UNDER_WAY, DESCRIPTOR = "while the bulk copy of", r"(or\.b64\s+%rd\d+, %rd\d+), "
CONSTANT = 1 << 62 | 64 << 32  # of a descriptor
LOAD, LAST = r"cp\.async\.bulk\.tensor\.3d", r"(?![\s\S]*wgmma\.(?:commit|wait))"
MISTAKES_90A = [
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


def plant(text, kernel, pattern, replacement):
    """The PTX of this kernel alone, with the first match replaced."""
    kernel = NAMES_90A.get(kernel, kernel)
    start = re.search(rf"\.entry _Z(?:L)?\d+{kernel}\w*\(", text).start()
    end = text.find(".entry", start + 1)
    changed, count = re.subn(pattern, replacement, text[start : end if end > 0 else len(text)], count=1)
    assert count == 1, f"{kernel} has no {pattern}"
    return text[: text.index(".entry")] + changed + "".join(re.findall(r"\.file\b[^\n]*\n", text))


NAMES_90A = {"product": "productILb0", "registers": "productILb1"}  # kernels of planted90a.cu, in its PTX


class Planted:
    def __init__(self, scratch, name):
        self.scratch, self.parts = scratch, BUILD / f"ptx/{name}_parts"
        self.ptx = (BUILD / f"ptx/{name}.ptx").read_text()
        layer = sorted(path for path in (BUILD / "oncpu").glob("*.o") if not path.name.endswith(".cu.o"))
        layer += [BUILD / "ptx/runtime.o", BUILD / "ptx/hopper.o", BUILD / "revision.o"]
        self.objects = " ".join(map(str, [self.parts / "host.o", *layer]))
        # planted90a, which g++ does not compile, compares its results itself
        self.right = run(BUILD / ("oncpu/planted" if name == "sm_90/planted" else f"ptx/{name}")).stdout

    def translated(self, text):
        """The error of the translator, or None."""
        (self.scratch / "planted.ptx").write_text(text)
        symbols = self.parts / "host_symbols"
        done = run(sys.executable, HERE / "translate.py", self.scratch / "planted.ptx", symbols, self.scratch, 1)
        return done.stderr if done.returncode else None

    def program(self):
        """Compiles and links the last translation."""
        program, part = self.scratch / "planted", self.scratch / "part_0.cpp"
        command = f"{COMPILE} -fopenmp -o {program} {part} {self.objects} -lpthread"
        done = run(*command.split())
        assert done.returncode == 0, done.stderr
        return program

    def report(self, text, kernel):
        """What the translator or the program prints about a PTX, `wrong results`, or nothing."""
        error = self.translated(text)
        if error is not None:
            return error
        done = run(self.program(), kernel)
        if done.returncode or done.stderr:
            return done.stderr
        right = next(line for line in self.right.splitlines() if line.startswith(kernel))
        return "" if done.stdout.strip() == right else WRONG


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Planted(tmp_path_factory.mktemp("plain"), "sm_90/planted")


@pytest.fixture(scope="module")
def of_90a(tmp_path_factory):
    return Planted(tmp_path_factory.mktemp("of_90a"), "sm_90a/planted90a")


@pytest.mark.parametrize("order", ("forward", "reverse", "shuffled:1", "shuffled:2"))
@pytest.mark.parametrize("copies", ("late", "early", "mixed"))
def test_products_of_sm_90a_are_right(copies, order):
    variables = f"CUDA_ON_CPU_COPIES={copies}", f"CUDA_ON_CPU_ORDER={order}"
    done = run("env", *variables, BUILD / "ptx/sm_90a/planted90a")
    assert done.stdout.count(" right\n") == 5 == done.stdout.count("\n") and not done.stderr


def test_the_results_are_those_of_the_source(plain):
    kernels = [line.split()[0] for line in plain.right.splitlines()]
    assert len(kernels) > 5 and not [kernel for kernel in kernels if plain.report(plain.ptx, kernel)]


def expect_report(planted, kernel, pattern, replacement, wanted):
    report = planted.report(plant(planted.ptx, kernel, pattern, replacement), kernel)
    assert wanted in report and report.count("\n") <= 1


@pytest.mark.parametrize("mistake", [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_reported(mistake, plain):
    expect_report(plain, *mistake)


@pytest.mark.parametrize("mistake", [row[1:] for row in MISTAKES_90A], ids=[row[0] for row in MISTAKES_90A])
def test_a_mistake_in_code_for_sm_90a_is_reported(mistake, of_90a):
    expect_report(of_90a, *mistake)
