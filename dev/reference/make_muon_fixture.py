#!/usr/bin/env python3
"""
Writes dev/reference/muon.safetensors: three updates of a few matrices by Muon, by the algorithm of torch.optim.Muon
(PyTorch 2.15) with its defaults, except that it adjusts the rate to the root mean square of AdamW and iterates in fp32
instead of bf16. test_reference.py compares it with torch.optim.Muon itself, within the rounding of bf16.

  before.NAME, grad0.NAME, grad1.NAME, grad2.NAME, after.NAME    F32

Usage: make_muon_fixture.py
"""

import sys
from pathlib import Path

import torch

from fixtures import safetensors_bytes

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("usage: make_muon_fixture.py")
    FILE.write_bytes(safetensors_bytes(fixture(), {}))
