"""FP8 rounding and scales of llmc/ops/linear/fp8.h equal those of ml_dtypes (float8_e4m3fn, float8_e5m2) and numpy, bit
for bit. Requires build/round_fp8 (make build/round_fp8).

ml_dtypes converts fp32 to the nearest number of 8 bits, ties to even. It does not saturate: the reference clips first.
"""

import subprocess
from pathlib import Path

import ml_dtypes
import numpy
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy: overflow and NaN
ROUND_FP8 = Path(__file__).resolve().parent.parent / "build/round_fp8"
FORMATS = {  # name: (type, mantissa bits, exponent of the smallest normal number, largest number)
    "e4m3": (ml_dtypes.float8_e4m3fn, 3, -6, 448),
    "e5m2": (ml_dtypes.float8_e5m2, 2, -14, 57344),
}
FLOAT = numpy.float32
FUNCTIONS = "fp8_round", "fp8_round_matrix_wide", "fp8_round_matrix"
SCALES = "fp8_multiplier", "fp8_scale"


def call(name, what, values, columns):
    """The answer of the program: `columns` numbers for each value."""
    done = subprocess.run([ROUND_FP8, name, what], input=values.astype("<f4").tobytes(), stdout=subprocess.PIPE)
    out = numpy.frombuffer(done.stdout, "<f4")
    assert done.returncode == 0 and out.size == columns * values.size, (done.returncode, out.size, values.size)
    return out.reshape(values.size, columns)


def same(a, b):
    """Which numbers have equal bits; all NaNs are equal."""
    return (a.view(numpy.uint32) == b.view(numpy.uint32)) | (numpy.isnan(a) & numpy.isnan(b))


def saturated(values, name):
    kind, largest = FORMATS[name][0], FORMATS[name][3]
    return numpy.clip(values, -largest, largest).astype(kind).astype(FLOAT)  # clip keeps NaN


def codes(name):
    """All 256 codes as fp32, and the finite magnitudes in ascending order."""
    kind, _, _, largest = FORMATS[name]
    every = numpy.arange(256, dtype=numpy.uint8).view(kind).astype(FLOAT)
    magnitudes = numpy.unique(numpy.abs(every[numpy.isfinite(every)]))
    assert magnitudes[-1] == largest and magnitudes.size == {"e4m3": 127, "e5m2": 124}[name]
    return every, magnitudes


def around(values):
    """The values and their fp32 neighbours, with both signs."""
    near = numpy.concatenate(
        [numpy.nextafter(values, FLOAT(-numpy.inf)), values, numpy.nextafter(values, FLOAT(numpy.inf))]
    )
    return numpy.concatenate([near, -near])


def rounding_cases(name):
    """(what, values) for fp8_round with a multiplier of 1."""
    every, magnitudes = codes(name)
    smallest, largest = magnitudes[1], magnitudes[-1]
    beyond = FLOAT(
        [largest, 1.03 * largest, 1.04 * largest, 1.07 * largest, 2 * largest, 1e30, 3.4028235e38, numpy.inf]
    )
    tiny = FLOAT([0, 1e-45, 1e-40, 1.1754944e-38, smallest / 4, smallest / 2, 0.75 * smallest, smallest])
    random = numpy.random.default_rng(17)
    exponents = numpy.exp2(random.uniform(-24, 20, 1 << 20)) * random.choice([-1, 1], 1 << 20)
    bits = random.integers(0, 1 << 32, 1 << 21, dtype=numpy.uint32)
    nan = FLOAT([numpy.nan, -numpy.nan])
    payloads = numpy.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], numpy.uint32).view(FLOAT)
    return [
        ("each of the 256 codes is itself, and an infinity becomes the largest number", every),
        ("halfway between neighbours the even one is taken, and beside it the nearer one",
         around((magnitudes[1:] + magnitudes[:-1]) / 2)),
        ("beyond the largest number the result is that number, also for infinity", around(beyond)),
        ("below the smallest number the result is a multiple of it, with the sign of zero", around(tiny)),
        ("NaN stays NaN", numpy.concatenate([nan, payloads])),
        ("random numbers near and in the range are rounded to the nearest", exponents.astype(FLOAT)),
        ("random bits are rounded to the nearest", bits.view(FLOAT)),
    ]  # fmt: skip


def product_cases(name):
    """Values whose fp32 product with a multiplier is a tie although the exact product is not: a fused multiplication
    and addition would round differently. (multiplier, values)"""
    _, magnitudes = codes(name)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    for top in FLOAT([0.3, 1.7, 5.01, 1e-4]):
        multiplier = magnitudes[-1] / top
        near = ties / multiplier
        values = numpy.concatenate([near, numpy.nextafter(near, FLOAT(0)), numpy.nextafter(near, FLOAT(numpy.inf))])
        inexact = values.astype(float) * float(multiplier) != (values * multiplier).astype(float)
        chosen = values[inexact & numpy.isin(values * multiplier, ties)]
        assert chosen.size > 20, (name, top, chosen.size)
        yield multiplier, numpy.concatenate([chosen, -chosen])


def wrong(got, expected, values, names=FUNCTIONS):
    """The first difference as text, or None."""
    for column in range(got.shape[1]):
        bad = numpy.flatnonzero(~same(numpy.ascontiguousarray(got[:, column]), expected[column]))
        if bad.size:
            i = bad[0]
            found = f"{values[i]!r} gives {got[i, column]!r}, not {expected[column][i]!r}"
            return f"{names[column]}: {bad.size} of {values.size} are wrong: {found}"


ROUNDED = [(name, *case) for name in FORMATS for case in rounding_cases(name)]


@pytest.mark.parametrize(
    "name, values", [(n, v) for n, _, v in ROUNDED], ids=[f"{n}: {what}" for n, what, _ in ROUNDED]
)
def test_numbers_are_rounded_as_ml_dtypes_does(name, values):
    found = call(name, "1", values, 3)
    assert not wrong(found, [saturated(values, name)] * 3, values)


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_with_the_multiplier_is_rounded_to_fp32_first(name):
    for multiplier, values in product_cases(name):
        found = call(name, float(multiplier).hex(), values, 3)
        assert not wrong(found, [saturated(values * multiplier, name)] * 3, values)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_quotients_in_fp32(name):
    # below 2^-100 the maximum counts as 2^-100
    largest = FLOAT(FORMATS[name][3])
    random = numpy.random.default_rng(18)
    maxima = numpy.exp2(random.uniform(-126, 127, 1 << 16)).astype(FLOAT)
    special = FLOAT(
        [0, -0.0, 1e-45, 2**-126, 2**-101, 2**-100, -(2**-99), 3.4028235e38, numpy.inf, -numpy.inf, numpy.nan]
    )
    maxima = numpy.concatenate([special, maxima, -maxima])
    counted = numpy.abs(maxima)
    counted = numpy.where(counted < FLOAT(2**-100), FLOAT(2**-100), counted)
    got = call(name, "scales", maxima, 2)
    assert not wrong(got, [largest / counted, counted / largest], maxima, SCALES)
    finite = numpy.isfinite(counted)
    assert numpy.isfinite(got[finite]).all() and (got[finite] > 0).all()
    # an infinity times the multiplier 0 is NaN; so is 0 times the scale of an infinity
    assert (got[numpy.isinf(maxima)] == [0, numpy.inf]).all() and numpy.isnan(got[numpy.isnan(maxima)]).all()
