"""The model in PyTorch with which dev/gpu_check.sh compares speed, on the CPU."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.nn.attention import SDPBackend

SCRIPT = Path(__file__).resolve().parent / "bench_torch.py"
sys.path.insert(0, str(SCRIPT.parent))
import bench_torch


@pytest.mark.parametrize(
    "preset, attention, steps", [("tiny", "diff_v2", 2), ("tiny", "baseline", 2), ("124m", "diff_v2", 0)]
)
@pytest.mark.slow(cases_from=1)
def test_lines(preset, attention, steps):
    """the first line has the number of parameters that the trainer reports; then one step runs for each line"""
    trainer = [os.environ.get("TRAIN_DIFFV2", "build/train_diffv2"), "--preset", preset, "--attention", attention]
    dry_run = subprocess.run([*trainer, "--dry-run"], stdout=subprocess.PIPE, text=True, check=True)
    command = [sys.executable, SCRIPT, preset, attention, "0", "1", "16"]
    done = subprocess.run(command, input="\n" * steps, stdout=subprocess.PIPE, text=True, check=True)
    about, *times = done.stdout.splitlines()
    total = re.search(r"^  total +(\d+)$", dry_run.stdout, re.M)[1]
    assert about == f"{total} parameters, torch {torch.__version__} eager"
    assert len(times) == steps and all(float(ms) > 0 for ms in times)


def test_padding():
    """the vocabulary has a multiple of 64 rows"""
    for preset, rows in ("tiny", 256), ("124m", 50304), ("1.4b", 100288):
        with torch.device("meta"):
            model = bench_torch.Model(preset, True, 0, 16, torch.float32)
        assert model.embed.weight.shape[0] == rows


@pytest.fixture
def graphs(monkeypatch):
    """Records the graphs of torch.compile, which run eagerly."""
    backend = AotEagerAndRecordGraphs()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield backend.fw_graphs
    torch.compiler.reset()


@pytest.mark.parametrize("diff", [False, True])
def test_one_graph(monkeypatch, graphs, diff):
    """all layers, more than Dynamo compiles for one function, share a graph, and the loss is the same without it"""
    monkeypatch.setitem(bench_torch.PRESETS, "deep", (12, 64, 4, 2, 16, 96, 250))
    torch.manual_seed(1)
    model = bench_torch.Model("deep", diff, 0, 32, torch.bfloat16)
    tokens, targets = torch.randint(0, 250, (2, 2, 32))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens, targets).item()
        model.compile_parts()
        for _ in range(2):
            loss = model(tokens, targets)
            loss.backward()
            assert loss.item() == pytest.approx(expected, rel=2**-8)  # of bf16
    assert len(graphs) == 2


def test_compiled_kernel(graphs):
    """the graph of the block has the kernel of attention that was chosen"""
    model = bench_torch.Model("tiny", True, 0, 32, torch.float32)
    model.compile_parts()
    tokens, targets = torch.randint(0, 256, (2, 1, 32))
    for kernel, operation in (SDPBackend.MATH, "_safe_softmax"), (SDPBackend.FLASH_ATTENTION, "flash_attention"):
        for block in model.blocks:
            block.kernel = kernel
        graphs.clear()
        model(tokens, targets).backward()
        assert any(operation in str(node.target) for node in graphs[0].graph.nodes)


def test_choice_of_kernel(monkeypatch):
    """attention uses the faster kernel after its first calls, and leaves out a kernel that fails"""
    model = bench_torch.Model("tiny", True, 0, 64, torch.float32)
    flash, math, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION
    seconds, used, clock, attend = {}, set(), [0.0], bench_torch.Block.attend

    def timed(block, *inputs):
        out = attend(block, *inputs)  # PyTorch refuses cuDNN on a CPU
        name = type(out.grad_fn).__name__
        assert ("Flash" in name) == (block.kernel == flash)
        clock[0] += seconds[block.kernel] + (0 if block.kernel in used else 60)
        used.add(block.kernel)
        return out

    monkeypatch.setattr(bench_torch.Block, "attend", timed)
    monkeypatch.setattr(bench_torch.time, "perf_counter", lambda: clock[0])

    def choose(kernels, **times):
        used.clear()
        seconds.update({kernels[name]: time for name, time in times.items()})
        words = bench_torch.choose_kernel(model, 2, 64, "cpu", torch.float32, kernels)
        assert len({block.kernel for block in model.blocks}) == 1
        return model.blocks[0].kernel, words

    two, without, none = {"math": math, "flash": flash}, {"cuDNN": cudnn, "flash": flash}, {"cuDNN": cudnn}
    assert choose(two, math=0.2, flash=0.1) == (flash, "attention by flash (ms a layer: math 200.00, flash 100.00)")
    assert choose(two, math=0.1, flash=0.2) == (math, "attention by math (ms a layer: math 100.00, flash 200.00)")
    assert choose(without, flash=0.2) == (flash, "attention by flash (ms a layer: cuDNN fails, flash 200.00)")
    assert choose(none) == (None, "attention by the kernel that PyTorch selects (ms a layer: cuDNN fails)")
