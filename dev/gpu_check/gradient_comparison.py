"""Compares the gradients of the whole model on the device with the CPU's: two files of --dump-grads.

    fp32    The error of a tensor is at most 2e-4 of its norm, plus 4 roundings (2^-23 each) of the largest norm. Sums
            in another order differ by about 1e-6 of their terms. A small difference of large sums keeps all of that
            error: lambda_q1 has the direction of k1, after cancellation. A wrong factor or a missing term gives errors
            far above this tolerance.
    bf16    Both sides start from the same weights, which bf16 holds exactly. The difference is the rounding of
            activations and of their gradients to 8 bits, 2^-9 each on average. Errors are relative to the largest norm
            of the same tensor in any layer, since a gradient that is small after cancellation may be mostly rounding:
            at most 5% (1.7% was measured), 20% for the lambda of DIFF V1 and diff_scalar, one number per layer.
            Matrices also have the same direction: a cosine of at least 0.98 (0.994 was measured).
    experts In bf16 a router selects another expert for a token at which two are nearly equal, and the gradients of both
            differ by all of that token. Errors of routers and experts are therefore at most 25% (4% was measured with
            dev/emulator at 1024 tokens) and their direction is not compared: an expert with few tokens may have
            others, or none. Other tensors: 10% (2.8% was measured). A model whose experts are all active has no
            selection, and the usual tolerances; so has fp32.
    fp8     --matmul-dtype fp8 on both sides. Numbers within the bf16 rounding error of a halfway point are rounded to
            different neighbours: a share 2^-6 of the numbers of E4M3 differ by 2^-3, 2^-7 of those of E5M2 by 2^-2,
            2^-5.5 on average or 15 times the error in bf16 (11 times was measured). 1.7% in bf16 become up to 25%: at
            most 40%, and a cosine of at least 0.93. A lambda is wrong by less than its size.

EXCEPTIONS gives a variant its own tolerances, and the reason.
"""

import array
import json
import math
import re
import struct

LEAST_COSINE = 0.98
LARGEST_ERROR, OF_LAMBDA = 0.05, 0.2
OF_EXPERTS, BESIDE_EXPERTS = 0.25, 0.1
SELECT, ALL_ACTIVE = "experts, ", "experts, all active"  # how names of variants with experts begin; one of them
FP8_COSINE, FP8_ERROR, FP8_LAMBDA = 0.93, 0.4, 1
RELATIVE = 2e-4
ROUNDINGS = 4 * 2.0**-23
EXCEPTIONS = {  # variant: (least cosine, largest error, why)
    "diff_v2_no_lambda": (
        0.93,
        0.4,
        "subtracts two maps that are nearly equal at first, which leaves their rounding errors",
    )
}


class Dump:
    """A safetensors file of F32 tensors."""

    def __init__(self, path):
        with open(path, "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(size))
            self.data = f.read()
        header.pop("__metadata__", None)
        self.tensors = header

    def values(self, name):
        t = self.tensors[name]
        begin, end = t["data_offsets"]
        if t["dtype"] != "F32":
            raise ValueError(f"{name} is {t['dtype']}: gradients are F32")
        return array.array("f", self.data[begin:end])


def compare_values(x, y):
    """(norm of x, norm of x - y relative to it, cosine). NaN in an input gives NaN."""
    try:
        import numpy

        a, b = numpy.asarray(x, dtype="f8"), numpy.asarray(y, dtype="f8")
        xx, yy, xy, dd = (float(v) for v in (a @ a, b @ b, a @ b, (a - b) @ (a - b)))
    except ImportError:
        xx = math.fsum(a * a for a in x)
        yy = math.fsum(b * b for b in y)
        xy = math.fsum(a * b for a, b in zip(x, y))
        dd = math.fsum((a - b) ** 2 for a, b in zip(x, y))
    norm = math.sqrt(xx) if xx >= 0 else math.nan
    if norm == 0:
        return 0.0, 0.0 if yy == 0 else math.inf, 1.0 if yy == 0 else 0.0
    return (
        norm,
        math.sqrt(dd) / norm if dd >= 0 else math.nan,
        xy / (norm * math.sqrt(yy)) if yy > 0 else 0.0 if yy == 0 else math.nan,
    )


def kind_of(name):
    """The name of a tensor without its layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def selected(name, variant):
    """Whether the tensor is of a router, or of experts, that receive a part of the tokens."""
    return variant.startswith(SELECT) and variant != ALL_ACTIVE and "block_sparse_moe" in name


def judge_rounded(name, matrix, error, cosine, variant, build):
    """(error, its limit, a message if the direction differs) of a tensor."""
    of_lambda, of_experts = "lambda" in name and not matrix, selected(name, variant)
    usual = BESIDE_EXPERTS if variant.startswith(SELECT) and variant != ALL_ACTIVE else LARGEST_ERROR
    usual = OF_LAMBDA if of_lambda else OF_EXPERTS if of_experts else usual
    least, limit, _ = EXCEPTIONS.get(variant, (LEAST_COSINE, usual, ""))
    if build == "fp8":
        least, limit = FP8_COSINE, FP8_LAMBDA if of_lambda else FP8_ERROR
    differs = matrix and not of_experts and not cosine >= least
    direction = f"{name}: cosine {cosine:.4f}, at least {least} required" if differs else ""
    return error, limit, direction


def compare(cpu_path, device_path, variant, build):
    """(messages, a note, {"worst matrix", "worst vector", "loss": (name, error, limit)}) of one variant."""
    cpu, device = Dump(cpu_path), Dump(device_path)
    if sorted(cpu.tensors) != sorted(device.tensors):
        odd = sorted(set(cpu.tensors) ^ set(device.tensors))
        wrong = [f"only one of the two files has {', '.join(odd[:4])}"]
        return wrong, wrong[0], {}
    worst, wrong, loss, rows, largest = {}, [], 0.0, [], {}
    for name, about in cpu.tensors.items():
        if about["shape"] != device.tensors[name]["shape"]:
            wrong.append(f"{name}: the shapes differ")
            continue
        norm, relative, cosine = compare_values(cpu.values(name), device.values(name))
        if name == "loss":
            loss = relative
            continue
        rows.append((name, len(about["shape"]) > 1, norm, relative, cosine))
        largest[kind_of(name)] = max(norm, largest.get(kind_of(name), 0))
    most = max(largest.values())
    for name, matrix, norm, relative, cosine in rows:
        of_kind, direction = largest[kind_of(name)], ""
        if norm == 0 and (build == "fp32" or of_kind == 0 or not selected(name, variant)):
            if relative != 0:
                wrong.append(f"{name}: zero on the CPU, but not on the device")
            continue
        if build == "fp32":
            error, limit = relative, RELATIVE + ROUNDINGS * most / norm
        else:
            difference = relative * norm if norm else compare_values(device.values(name), cpu.values(name))[0]
            error, limit, direction = judge_rounded(name, matrix, difference / of_kind, cosine, variant, build)
        kind = "worst matrix" if matrix else "worst vector"
        if kind not in worst or not error <= worst[kind][1]:
            worst[kind] = (name, error, limit)
        if not error <= limit:
            wrong.append(f"{name}: error {error:.3g}, at most {limit:.3g} allowed")
        elif direction:
            wrong.append(direction)
    loss_limit = 1e-5 if build == "fp32" else 0.01
    worst["loss"] = ("", loss, loss_limit)
    if not loss <= loss_limit:
        wrong.append(f"loss: error {loss:.3g}, at most {loss_limit:g} allowed")
    note = "; ".join(wrong[:6]) + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
    if not wrong and variant in EXCEPTIONS and build == "bf16":
        note = "tolerance: cosine {}, error {}, since the variant {}".format(*EXCEPTIONS[variant])
    return wrong, note, worst
