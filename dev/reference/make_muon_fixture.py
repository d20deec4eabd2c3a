#!/usr/bin/env python3
"""
Writes dev/reference/muon.safetensors: three updates of a few matrices by Muon, by the algorithm of torch.optim.Muon
(PyTorch 2.15) with its defaults, except that it adjusts the rate to the root mean square of AdamW and iterates in fp32
instead of bf16. --check compares the algorithm with torch.optim.Muon itself, within the rounding of bf16.

  before.NAME, grad0.NAME, grad1.NAME, grad2.NAME, after.NAME    F32

Usage: make_muon_fixture.py [--check]
Exit status: 0 done, 1 the file or torch.optim.Muon differs, 2 usage.
"""

import sys
from pathlib import Path

import torch

from fixtures import safetensors_bytes, safetensors_read

FILE = Path(__file__).resolve().parent / "muon.safetensors"
SHAPES = {"square": (16, 16), "wide": (12, 40), "tall": (40, 12), "row": (1, 24), "column": (24, 1)}
LR, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.95, 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(direction):
    a, b, c = COEFFICIENTS
    x = direction.T if direction.shape[0] > direction.shape[1] else direction
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if direction.shape[0] > direction.shape[1] else x


def updated(weight, grads):
    weight, momentum = weight.clone(), torch.zeros_like(weight)
    for grad in grads:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad
        direction = MOMENTUM * momentum + (1 - MOMENTUM) * grad
        rate = LR * 0.2 * max(weight.shape) ** 0.5
        weight = weight * (1 - LR * DECAY) - rate * orthogonalized(direction)
    return weight


def updated_by_torch(weight, grads):
    parameter = torch.nn.Parameter(weight.clone())
    muon = torch.optim.Muon([parameter], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for grad in grads:
        parameter.grad = grad.clone()
        muon.step()
    return parameter.detach()


def matrices():
    generator = torch.Generator().manual_seed(1)
    for name, shape in SHAPES.items():
        numbers = torch.rand((4, *shape), generator=generator) * 2 - 1
        yield name, numbers[0], numbers[1:]


def fixture():
    tensors = {}
    for name, weight, grads in matrices():
        values = {"before": weight, "after": updated(weight, grads)} | {f"grad{i}": g for i, g in enumerate(grads)}
        for kind, value in values.items():
            tensors[f"{kind}.{name}"] = ("F32", value.shape, value.contiguous().numpy().tobytes())
    return tensors


def problems():
    stored, _ = safetensors_read(FILE.read_bytes())
    for name, weight, grads in matrices():
        after = updated(weight, grads)
        kept = torch.frombuffer(bytearray(stored[f"after.{name}"][2]), dtype=torch.float32).reshape(after.shape)
        moved = (after - weight).norm()
        if (after - kept).norm() > 1e-5 * moved:
            yield f"{FILE}: after.{name} differs"
        if (after - updated_by_torch(weight, grads)).norm() > 0.05 * moved:
            yield f"torch.optim.Muon differs in {name}"


def main():
    if sys.argv[1:] == ["--check"]:
        found = list(problems())
        print("\n".join(found) or f"{FILE} is right")
        return 1 if found else 0
    if len(sys.argv) > 1:
        print("usage: make_muon_fixture.py [--check]", file=sys.stderr)
        return 2
    FILE.write_bytes(safetensors_bytes(fixture(), {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
