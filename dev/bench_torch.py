"""The model of train_diffv2.c in plain PyTorch, to compare speed with: baseline and diff_v2.

One optimizer step for each line on stdin, its milliseconds on stdout (see bench_peers.py).
usage: bench_torch.py PRESET ATTENTION KV_HEADS B T THREADS [--compile]
fp32, torch's scaled_dot_product_attention, cross_entropy and fused AdamW where there is one; random tokens.
"""
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

PRESETS = {  # layers, hidden, heads, key/value heads, head dim, MLP, vocabulary (llmc/presets.h)
    "tiny": (4, 128, 4, 2, 32, 352, 256),
    "small": (8, 256, 4, 2, 64, 704, 256),
    "124m": (12, 768, 12, 6, 64, 2048, 50257),
}


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, C, NH, NKV, D, width, diff):
        super().__init__()
        self.NH, self.NKV, self.D, self.diff = NH, NKV, D, diff
        self.NQ = 2 * NH if diff else NH
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.sizes = [self.NQ * D, NKV * D, NKV * D, NH if diff else 0]
        self.qkvl = nn.Linear(C, sum(self.sizes), bias=False)
        self.o = nn.Linear(NH * D, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * width, bias=False)
        self.down = nn.Linear(width, C, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v, l = self.qkvl(self.norm1(x)).split(self.sizes, -1)
        q = rotate(q.view(B, T, self.NQ, self.D).transpose(1, 2), cos, sin)
        k = rotate(k.view(B, T, self.NKV, self.D).transpose(1, 2), cos, sin)
        v = v.view(B, T, self.NKV, self.D).transpose(1, 2)
        group = self.NQ // self.NKV
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.diff:
            a = a.reshape(B, T, self.NH, 2, self.D)
            a = a[..., 0, :] - torch.sigmoid(l).unsqueeze(-1) * a[..., 1, :]
        x = x + self.o(a.reshape(B, T, -1))
        g, u = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


class Model(nn.Module):
    def __init__(self, preset, diff, kv_heads, T):
        super().__init__()
        L, C, NH, NKV, D, width, V = PRESETS[preset]
        self.embed = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block(C, NH, kv_heads or NKV, D, width, diff) for _ in range(L))
        self.norm = nn.RMSNorm(C, eps=1e-5)
        angle = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    preset, attention, kv_heads, B, T, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = Model(preset, attention == "diff_v2", kv_heads, T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(model) if "--compile" in sys.argv else model
    tokens = torch.randint(0, PRESETS[preset][-1], (B, T + 1))
    print(sum(p.numel() for p in model.parameters()), "parameters, torch", torch.__version__, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        step(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{1e3 * (time.perf_counter() - start):.3f}", flush=True)


main()
