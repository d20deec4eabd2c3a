"""The model of train_diffv2.c in plain PyTorch, for comparisons of speed: baseline and diff_v2.

Runs one optimizer step for each line on stdin and prints its milliseconds (see dev/bench/bench_peers.py and
dev/gpu_check.sh). It uses scaled_dot_product_attention, cross_entropy and fused AdamW of PyTorch, and random tokens.

Usage: bench_torch.py PRESET ATTENTION KV_HEADS B T [--device cpu | cuda] [--threads N] [--compile] [--bf16]
    KV_HEADS 0: the preset's
    cpu     fp32; with --bf16 fp32 weights, moments and gradients, autocast to bf16
    cuda    the usual mixed precision: fp32 weights, moments and gradients, autocast to bf16, residual stream in bf16;
            SDPA with grouped key/value heads, by the kernel that PyTorch selects; TF32 for the rest
"""

import argparse
import contextlib
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HEADER = Path(__file__).resolve().parents[2] / "llmc/model/presets.h"
PRESETS = {}  # layers, hidden, heads, key/value heads, head dim, MLP, vocabulary
for name, numbers in re.findall(r'SHAPES\("([\w.]+)",([ \d,]+)\)', HEADER.read_text()):
    L, C, NH, NKV, _, D, width, _, V = map(int, numbers.split(","))
    PRESETS[name] = (L, C, NH, NKV, D, width, V)


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

    def attend(self, q, k, v):
        if q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.NQ != self.NKV)
        group = self.NQ // self.NKV  # faster on the CPU
        return F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v, l = self.qkvl(self.norm1(x)).split(self.sizes, -1)
        q = rotate(q.view(B, T, self.NQ, self.D).transpose(1, 2), cos, sin)
        k = rotate(k.view(B, T, self.NKV, self.D).transpose(1, 2), cos, sin)
        v = v.view(B, T, self.NKV, self.D).transpose(1, 2)
        a = self.attend(q, k, v).transpose(1, 2)
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
        self.embed = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block(C, NH, kv_heads or NKV, D, width, diff) for _ in range(L))
        self.norm = Norm(C, eps=1e-5)
        angle = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
        self.register_buffer("cos", angle.cos().to(stream))
        self.register_buffer("sin", angle.sin().to(stream))
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens).to(self.stream)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("attention", choices=["baseline", "diff_v2"])
    for name in ("kv_heads", "B", "T"):
        parser.add_argument(name, type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def main():
    o = parse_arguments()
    cuda = o.device == "cuda"
    if cuda and not torch.cuda.is_available():
        sys.exit("bench_torch.py: PyTorch finds no GPU")
    if o.threads:
        torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    if cuda:
        torch.set_float32_matmul_precision("high")
    with torch.device(o.device):
        model = Model(o.preset, o.attention == "diff_v2", o.kv_heads, o.T, torch.bfloat16 if cuda else torch.float32)
        tokens = torch.randint(0, PRESETS[o.preset][-1], (o.B, o.T + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(model) if o.compile else model
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    print(
        sum(p.numel() for p in model.parameters()),
        "parameters, torch",
        torch.__version__,
        "compiled" if o.compile else "eager",
        flush=True,
    )
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(o.device, torch.bfloat16) if cuda or o.bf16 else contextlib.nullcontext():
            loss = step(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        print(f"{1e3 * (time.perf_counter() - start):.3f}", flush=True)
    if cuda:
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", file=sys.stderr)


main()
