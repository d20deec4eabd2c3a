"""The model of train_diffv2.c in plain PyTorch, for comparisons of speed: baseline and diff_v2.

Prints a line about itself, then runs one optimizer step for each line on stdin and prints its milliseconds, for
dev/gpu_check.sh. It uses scaled_dot_product_attention, cross_entropy and fused AdamW of PyTorch, and random tokens. The
first step compiles. At the end it prints the peak of CUDA's memory to stderr.

Usage: bench_torch.py PRESET ATTENTION KV_HEADS B T [--device cpu | cuda] [--compile]
    KV_HEADS 0: the preset's
    cpu        fp32
    cuda       the usual mixed precision: fp32 weights, moments and gradients, autocast to bf16, residual stream in
               bf16; TF32 for the rest. Attention with grouped key/value heads by cuDNN or flash attention: the one
               that is faster for a layer of this shape
    --compile  compiles one block, which serves all layers, and the head with its loss. The next start with the same
               arguments finds them in Inductor's cache. A graph of the whole model could also fuse across blocks,
               which saves a read of the residual stream per layer, but its compilation takes longer with each layer

The vocabulary is padded to a multiple of 64 rows, as in nanoGPT: the loss includes their logits, no token has their
numbers, and the printed number of parameters excludes them. 1.4b diff_v2 with 8 key/value heads at B 4, T 2048 takes
about 46 GiB on CUDA (an estimate): 16 of weights and moments, 16 for the backward of blocks, logits, and reserves.
"""

import argparse
import contextlib
import math
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADER = Path(__file__).resolve().parents[2] / "llmc/model/presets.h"
PRESETS = {}  # layers, hidden, heads, key/value heads, head dim, MLP, vocabulary
for name, numbers in re.findall(r'SHAPES\("([\w.]+)", +\S+ +\d+,([ \d,]+)\)', HEADER.read_text()):
    L, C, NH, NKV, _, D, width, _, V = map(int, numbers.split(","))
    PRESETS[name] = (L, C, NH, NKV, D, width, V)

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}  # attention on CUDA


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Norm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    def __init__(self, C, NH, NKV, D, width, diff):
        super().__init__()
        self.NH, self.NKV, self.D, self.diff = NH, NKV, D, diff
        self.NQ = 2 * NH if diff else NH
        self.norm1, self.norm2 = Norm(C, eps=1e-5), Norm(C, eps=1e-5)
        self.sizes = [self.NQ * D, NKV * D, NKV * D, NH if diff else 0]
        self.qkvl = nn.Linear(C, sum(self.sizes), bias=False)
        self.o = nn.Linear(NH * D, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * width, bias=False)
        self.down = nn.Linear(width, C, bias=False)
        self.kernel = None  # of attention; None: PyTorch selects it

    def attend(self, q, k, v):
        grouped = self.NQ != self.NKV
        if not q.is_cuda:  # faster on the CPU
            k, v, grouped = *(x.repeat_interleave(self.NQ // self.NKV, 1) for x in (k, v)), False
        # inside the block, so that the kernel is a part of the compiled graph and of its key in the cache
        with sdpa_kernel(self.kernel) if self.kernel is not None else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v, l = self.qkvl(self.norm1(x)).split(self.sizes, -1)
        q = rotate(q.view(B, T, self.NQ, self.D), cos, sin)
        k = rotate(k.view(B, T, self.NKV, self.D), cos, sin)
        v = v.view(B, T, self.NKV, self.D)
        a = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        if self.diff:
            a = a.reshape(B, T, self.NH, 2, self.D)
            a = a[..., 0, :] - torch.sigmoid(l).unsqueeze(-1) * a[..., 1, :]
        x = x + self.o(a.reshape(B, T, -1))
        g, u = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


class Model(nn.Module):
    def __init__(self, preset, diff, kv_heads, T, stream):
        super().__init__()
        L, C, NH, NKV, D, width, V = PRESETS[preset]
        self.stream = stream  # type of the residual stream
        self.padding = -V % 64  # rows of the vocabulary
        self.embed = nn.Embedding(V + self.padding, C)
        self.blocks = nn.ModuleList(Block(C, NH, kv_heads or NKV, D, width, diff) for _ in range(L))
        self.norm = Norm(C, eps=1e-5)
        angle = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D)).unsqueeze(1)  # T, 1, D / 2
        self.register_buffer("cos", angle.cos().to(stream))
        self.register_buffer("sin", angle.sin().to(stream))
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens).to(self.stream)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x, targets):
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def compile_parts(self):
        # one graph for all blocks: their parameters are its inputs
        for block in self.blocks:
            block.compile()
        self.loss = torch.compile(self.loss)


def choose_kernel(model, B, T, device, dtype, kernels=KERNELS):
    """Sets the kernel of attention: the fastest of those that run, for one layer forward and backward; if none runs,
    PyTorch selects it. Returns words about it."""
    block, times, calls = model.blocks[0], {}, 10
    shapes = [(B, T, heads, block.D) for heads in (block.NQ, block.NKV, block.NKV)]
    inputs = [torch.randn(s, device=device, dtype=dtype, requires_grad=True).transpose(1, 2) for s in shapes]
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for turn in range(6):  # the minimum excludes the first turn, which makes plans
        for name in kernels if turn == 0 else times:
            block.kernel = kernels[name]
            with contextlib.suppress(RuntimeError):  # the kernel does not exist, or refuses these inputs
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    out = block.attend(*inputs)
                    torch.autograd.grad(out, inputs, out)
                synchronize()
                times[name] = min(times.get(name, math.inf), 1e3 * (time.perf_counter() - start) / calls)
    fastest = min(times, key=times.get, default=None)
    for block in model.blocks:
        block.kernel = kernels.get(fastest)
    each = ", ".join(f"{name} {times[name]:.2f}" if name in times else f"{name} fails" for name in kernels)
    return f"attention by {fastest or 'the kernel that PyTorch selects'} (ms a layer: {each})"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("attention", choices=["baseline", "diff_v2"])
    for name in ("kv_heads", "B", "T"):
        parser.add_argument(name, type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main():
    o = parse_arguments()
    cuda = o.device == "cuda"
    if cuda and not torch.cuda.is_available():
        sys.exit("bench_torch.py: PyTorch finds no GPU")
    torch.manual_seed(1)
    if cuda:
        torch.set_float32_matmul_precision("high")
    with torch.device(o.device):
        model = Model(o.preset, o.attention == "diff_v2", o.kv_heads, o.T, torch.bfloat16 if cuda else torch.float32)
        tokens = torch.randint(0, PRESETS[o.preset][-1], (o.B, o.T + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    parameters = sum(p.numel() for p in model.parameters()) - model.padding * model.embed.embedding_dim
    about = [f"{parameters} parameters, torch {torch.__version__} {'compiled' if o.compile else 'eager'}"]
    if cuda:
        about.append(choose_kernel(model, o.B, o.T, o.device, torch.bfloat16))
    if o.compile:
        model.compile_parts()
    print(", ".join(about), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(o.device, torch.bfloat16) if cuda else contextlib.nullcontext():
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        print(f"{1e3 * (time.perf_counter() - start):.3f}", flush=True)
    if cuda:
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", file=sys.stderr)


if __name__ == "__main__":
    main()
