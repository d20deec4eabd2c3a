"""forms.py: every instruction form that translate.py knows, and the C++ that computes it.

A row gives the names of one or several opcodes, the operands and an expression. Operands are letters, those of nvcc's
inline assembly: h 16 bits, r 32 bits, l 64 bits, f fp32, d fp64, p predicate, n an immediate; moreover @ an address
in brackets, & the address of a symbol, s a special register, L a label, T a tensor map with coordinates, F and R the
registers of a wgmma as a list of their addresses. [...] is a vector, - is no operand, and = follows the destinations;
[rp] is also a pair like that of a shuffle, the value and whether it came from another lane. A source may be an
immediate in place of a register. In the expression a, b, ... are the sources, and S is the site of the instruction, for
messages. Vectors are of type V<type, count>. machine.h and hopper.h have the functions that rows call.
"""

TYPES = {"h": "u16", "r": "u32", "l": "u64", "f": "float", "d": "double", "p": "bool"}

ROWS = """
abs.f32 abs.f64                 f=f d=d         magnitude(a)
add.f32                         f=ff            a + b
add.f64 add.rn.f64              d=dd            a + b
add.rz.f32                      f=ff            add_toward_zero(a, b)
add.s32                         r=rr            a + b
add.s64 add.u64                 l=ll            a + b
and.b16                         h=hh            a & b
and.b32                         r=rr            a & b
and.b64                         l=ll            a & b
and.pred                        p=pp            a && b
bfe.u32                         r=rrr           bits_of(a, b, c)
bfi.b32                         r=rrrr          with_bits(a, b, c, d)
bfind.shiftamt.u32              r=r             a ? clz(a) : ~0u
brev.b32                        r=r             reversed(a)
copysign.f32 copysign.f64       f=ff d=dd       with_sign(b, a)
cvt.f32.bf16                    f=h             from_bf16(a)
cvt.f64.f32                     d=f             (double)a
cvt.rn.bf16.f32                 h=f             to_bf16(a)
cvt.rn.f32.f64                  f=d             (float)a
cvt.rn.f32.s32                  f=r             (float)(s32)a
cvt.rn.f64.s32                  d=r             (double)(s32)a
cvt.rn.f32.u16                  f=h             (float)a
cvt.rn.satfinite.e4m3x2.f32     h=ff            to_fp8_pair(a, b, __NV_E4M3)
cvt.rn.satfinite.e5m2x2.f32     h=ff            to_fp8_pair(a, b, __NV_E5M2)
cvt.rni.f32.f32                 f=f             __builtin_nearbyintf(a)
cvt.s64.s32                     l=r             (u64)(s64)(s32)a
cvt.s64.s32                     l=l             (u64)(s64)(s32)a
cvt.sat.f32.f32                 f=f             a > 0 ? (a < 1 ? a : 1.0f) : 0.0f
cvt.u16.u32                     h=r             (u16)a
cvt.u16.u64                     h=l             (u16)a
cvt.u32.u16                     r=h             a
cvt.u32.u64                     r=l             (u32)a
cvt.u64.u32                     l=r             a
cvt.u64.u16                     l=h             a
cvta.to.global.u64              l=l             a
div.approx.f32                  f=ff            divide_approximately(a, b)
div.rn.f32                      f=ff            a / b
div.rn.f64                      d=dd            a / b
div.s32                         r=rr            (u32)divide((s32)a, (s32)b)
div.s64                         l=ll            (u64)divide((s64)a, (s64)b)
div.u32                         r=rr            b ? a / b : ~0u
div.u64                         l=ll            b ? a / b : ~0ull
ex2.approx.f32                  f=f             approximate(exp2f(a), 2)
ex2.approx.ftz.f32              f=f             flushed(approximate(exp2f(flushed(a)), 2))
fma.rm.f32                      f=fff           fma_down(a, b, c)
fma.rn.f32                      f=fff           __builtin_fmaf(a, b, c)
fma.rn.f64                      d=ddd           __builtin_fma(a, b, c)
mad.lo.s32                      r=rrr           a * b + c
mad.lo.s64                      l=lll           a * b + c
max.f32 max.f64                 f=ff d=dd       largest(a, b)
max.s32                         r=rr            (s32)a > (s32)b ? a : b
max.u32                         r=rr            a > b ? a : b
max.u64                         l=ll            a > b ? a : b
min.f64                         d=dd            least(a, b)
min.s32                         r=rr            (s32)a < (s32)b ? a : b
min.u32                         r=rr            a < b ? a : b
min.u64                         l=ll            a < b ? a : b
mov.b32                         [hh]=r          halves<u16>(a)
mov.b32                         r=[hh]          joined<u32>(a)
mov.b32                         f=[hh]          same_bits<float>(joined<u32>(a))
mov.b32                         r=f             same_bits<u32>(a)
mov.b32                         f=r             same_bits<float>(a)
mov.b32                         r=r             a
mov.b32                         r=&             a
mov.b64                         l=&             a
mov.b64                         l=d             same_bits<u64>(a)
mov.b64                         l=l             a
mov.b64                         [rr]=d          halves<u32>(same_bits<u64>(a))
mov.b64                         d=[rr]          same_bits<double>(joined<u64>(a))
mov.b64                         d=l             same_bits<double>(a)
mov.f32                         f=f             a
mov.f64                         d=d             a
mov.pred                        p=p             a
mov.u16                         h=h             a
mov.u32                         r=r             a
mov.u32                         r=s             a
mov.u32                         r=&             a
mov.u64                         l=l             a
mov.u64                         l=&             a
mul.f32 mul.rn.f32              f=ff            a * b
mul.f64                         d=dd            a * b
mul.hi.s32                      r=rr            (u32)((s64)(s32)a * (s32)b >> 32)
mul.lo.s32                      r=rr            a * b
mul.lo.s64                      l=ll            a * b
mul.wide.s32                    l=rr            (u64)((s64)(s32)a * (s32)b)
mul.wide.u16                    r=hh            (u32)a * b
mul.wide.u32                    l=rr            (u64)a * b
neg.f32                         f=f             -a
neg.f64                         d=d             -a
neg.s16                         h=h             (u16)(0 - a)
neg.s32 neg.s64                 r=r l=l         0 - a
not.b32                         r=r             ~a
not.b64                         l=l             ~a
not.pred                        p=p             !a
or.b16                          h=hh            a | b
or.b32                          r=rr            a | b
or.b64                          l=ll            a | b
or.pred                         p=pp            a || b
popc.b32                        r=r             (u32)__builtin_popcount(a)
prmt.b32                        r=rrr           permuted(a, b, c)
rcp.approx.ftz.f32              f=f             flushed(approximate(1 / flushed(a), 1))
rcp.approx.ftz.f64              d=d             reciprocal_high(a)
rcp.rn.f32                      f=f             1 / a
rcp.rn.f64                      d=d             1 / a
rem.s32                         r=rr            (u32)modulo((s32)a, (s32)b)
rem.u32                         r=rr            b ? a % b : a
rem.u64                         l=ll            b ? a % b : a
selp.b32 selp.s32 selp.u32      r=rrp           c ? a : b
selp.b64 selp.s64 selp.u64      l=llp           c ? a : b
selp.u16                        h=hhp           c ? a : b
selp.f32                        f=ffp           c ? a : b
selp.f64                        d=ddp           c ? a : b
shl.b16                         h=hr            b < 16 ? (u16)(a << b) : (u16)0
shl.b32                         r=rr            b < 32 ? a << b : 0
shl.b64                         l=lr            b < 64 ? a << b : 0
shr.s32                         r=rr            (u32)((s32)a >> (b < 32 ? b : 31))
shr.s64                         l=lr            (u64)((s64)a >> (b < 64 ? b : 63))
shr.u16                         h=hr            b < 16 ? (u16)(a >> b) : (u16)0
shr.u32                         r=rr            b < 32 ? a >> b : 0
shr.u64                         l=lr            b < 64 ? a >> b : 0
sqrt.rn.f32                     f=f             __builtin_sqrtf(a)
sqrt.rn.f64                     d=d             __builtin_sqrt(a)
sub.f32                         f=ff            a - b
sub.f64                         d=dd            a - b
sub.s16                         h=hh            (u16)(a - b)
sub.s32                         r=rr            a - b
sub.s64                         l=ll            a - b
xor.b32                         r=rr            a ^ b
xor.pred                        p=pp            a != b

bra bra.uni                     L               goto a
ret                             -               return
trap                            -               trapped(S)

bar.sync                        n               block_barrier(a, S)
bar.warp.sync                   r               warp_barrier(a, S)
shfl.sync.bfly.b32              [rp]=rrrr       shuffle(WarpOp::shfl_xor, a, b, c, d, S)
shfl.sync.idx.b32               [rp]=rrrr       shuffle(WarpOp::shfl, a, b, c, d, S)
shfl.sync.up.b32                [rp]=rrrr       shuffle(WarpOp::shfl_up, a, b, c, d, S)
vote.sync.any.pred              p=pr            vote(WarpOp::any, a, b, S)
vote.sync.ballot.b32            r=pr            vote(WarpOp::ballot, a, b, S)
redux.sync.max.u32              r=rr            reduce(WarpOp::reduce_max, a, b, S)
atom.global.max.u32             r=@r            atomicMax((u32 *)global<4>(a, S), b)
atom.global.add.u32             r=@r            atomicAdd((u32 *)global<4>(a, S), b)
atom.global.add.f32             f=@f            atomicAdd((float *)global<4>(a, S), b)
red.relaxed.gpu.global.add.f32  @f              atomicAdd((float *)global<4>(a, S), b)
red.relaxed.gpu.global.add.u32  @r              atomicAdd((u32 *)global<4>(a, S), b)
red.relaxed.gpu.global.add.v4.f32               @[ffff]         add_vector(a, b, S)
membar.gl fence.acq_rel.gpu     -               __threadfence()
atom.shared.add.u32             r=@r            atomicAdd((u32 *)shared<4>(a, S), b)

ld.global.cg.f32                f=@             load_global<float, 1>(a, S).v[0]
ld.global.cg.v4.f32             [ffff]=@        load_global<float, 4>(a, S)
cp.async.cg.shared.global       @@nr            copy_async(a, b, c, d, S)
cp.async.commit_group           -               cuda_on_cpu::copy_commit()
cp.async.wait_group             n               cuda_on_cpu::copy_wait(a)
ldmatrix.sync.aligned.m8n8.x4.shared.b16                [rrrr]=@                load_matrices(a, false, S)
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16          [rrrr]=@                load_matrices(a, true, S)
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32     [ffff]=[rrrr][rr][ffff]  multiply_bf16(a, b, c)
mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32     [ffff]=[rrrr][rr][ffff]  multiply_fp8(a, b, c, true)
mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32     [ffff]=[rrrr][rr][ffff]  multiply_fp8(a, b, c, false)

cvta.param.u64                  l=l             a
fence.mbarrier_init.release.cluster             -               proxy_fence()
fence.proxy.async fence.proxy.async.shared      -               proxy_fence()
mbarrier.init.shared.b64        @r              barrier_init(a, b, S)
mbarrier.arrive.shared.b64      l=@             barrier_arrive(a, 0, S)
mbarrier.arrive.expect_tx.shared.b64            l=@r            barrier_arrive(a, b, S)
mbarrier.try_wait.parity.shared.b64             p=@r            barrier_wait(a, b, S)
cp.async.bulk.shared.global.mbarrier::complete_tx::bytes        @@r@            bulk_load(a, b, c, d, S)
cp.async.bulk.tensor.3d.shared.global.mbarrier::complete_tx::bytes              @T@             bulk_load(a, b, c, S)
setmaxnreg.inc.sync.aligned.u32                 n               set_registers(true, a, S)
setmaxnreg.dec.sync.aligned.u32                 n               set_registers(false, a, S)
stmatrix.sync.aligned.m8n8.x4.shared.b16        @[rrrr]         store_matrices(a, b, S)
wgmma.fence.sync.aligned        -               wgmma_fence(S)
wgmma.commit_group.sync.aligned                 -               wgmma_commit(S)
wgmma.wait_group.sync.aligned   n               wgmma_wait(a, S)
"""

# Comparisons: of integers, and of floating-point numbers, which are false for NaN unless the name ends in u.
INTEGER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ORDERED = {"eq": "a == b", "ne": "a < b || a > b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b",
           "num": "a == a && b == b", "nan": "a != a || b != b", "equ": "!(a < b || a > b)", "neu": "a != b",
           "ltu": "!(a >= b)", "leu": "!(a > b)", "gtu": "!(a <= b)", "geu": "!(a < b)"}  # fmt: skip
INTEGER_TYPES = {"s16": "h", "s32": "r", "s64": "l", "u32": "r", "u64": "l", "b32": "r"}

# Memory: the types in memory, with the letter of their registers where those are wider.
LOADS = {
    "global": "f32 f64 s32:l u16 u16:r u32 u32:l v2.f32 v2.u32 v4.f32 v4.u16 v4.u32",
    "shared": "f32 f64 u32 u64 v2.f32 v2.u32 v4.f32 v4.u32",
    "local": "f32 v2.f64 v4.f32",
    "param": "f32 s32:l s8:h u32 u32:l u64 u8:h v2.u32 v2.u8 v4.u32 v4.u8",
}
STORES = {
    "global": "f32 f64 u16 u32 u64 v2.f32 v2.u16 v2.u32 v4.f32 v4.u16 v4.u32",
    "shared": "f32 f64 u32 u64 u8 u8:r v2.f32 v2.u16 v2.u32 v4.f32 v4.u16 v4.u32",
    "local": "f32 f64 v2.f64 v4.f32",
}
LETTER = {"f32": "f", "f64": "d", "s8": "h", "u8": "h", "u16": "h", "u32": "r", "s32": "r", "u64": "l"}


def all_forms():
    """{opcode: [(destinations, sources, expression)]}, the operands as lists of letters or vectors of letters."""
    forms = {}

    def add(name, operands, expression):
        left, equals, right = operands.rpartition("=")
        if operands == "-":
            left = right = ""
        forms.setdefault(name, []).append((split_letters(left), split_letters(right), expression))

    for row in ROWS.splitlines():
        if not row:
            continue
        *names_and_operands, expression = (part for part in row.split("  ") if part)
        names, operands = (part.split() for part in names_and_operands)
        for i, name in enumerate(names):
            add(name, operands[min(i, len(operands) - 1)], expression.strip())
    for n in (32, 64, 128):
        name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
        add(name, "Fllpnnnn", f"wgmma({{{n}, false, b, c, d, e, f, g, h}}, a, {{}}, S)")
        add(name, "FRlpnnn", f"wgmma({{{n}, true, 0, c, d, e, f, 0, g}}, a, b, S)")
    for kind, letter in INTEGER_TYPES.items():
        for name, operator in INTEGER.items():
            cast = f"({kind})" if kind[0] == "s" else ""
            add(f"setp.{name}.{kind}", f"p={letter}{letter}", f"{cast}a {operator} {cast}b")
    for name, expression in ORDERED.items():
        add(f"setp.{name}.f32", "p=ff", expression)
        add(f"setp.{name}.f64", "p=dd", expression)
    for table, load in ((LOADS, True), (STORES, False)):
        for space, kinds in table.items():
            for kind in kinds.split():
                kind, _, letter = kind.partition(":")
                vector, _, element = kind.rpartition(".")
                count = int(vector[1:]) if vector else 1
                letter = letter or LETTER[element]
                element = {"f32": "float", "f64": "double"}.get(element, element)
                operand = f"[{letter * count}]" if vector else letter
                where = {"local": "a, depot, S", "param": "a, parameters, S"}.get(space, "a, S")
                if load:
                    value = "" if vector else ".v[0]"
                    add(f"ld.{space}.{kind}", f"{operand}=@", f"load_{space}<{element}, {count}>({where}){value}")
                else:
                    value = "b" if vector else f"V<{element}, 1>{{{{({element})b}}}}"
                    add(f"st.{space}.{kind}", f"@{operand}", f"store_{space}<{element}, {count}>({value}, {where})")
    return forms


def split_letters(text):
    letters = []
    while text:
        end = text.index("]") + 1 if text[0] == "[" else 1
        letters.append(text[:end])
        text = text[end:]
    return letters
