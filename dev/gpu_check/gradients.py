"""The part `gradients`: those of the whole model on the device and on the CPU, of every variant."""

import sys

import gradient_comparison
from programs import ROOT
from runner import NO_CORPUS, Skip, last_line
from runs import Runs

sys.path.append(str(ROOT / "dev/reference"))

MODEL = "--layers 4 --hidden 256 --heads 8 --kv-heads 2 --head-dim 64 --ffn 704 --vocab 5003 --no-tie-embeddings"
TINY_MODEL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --ffn 48 --vocab 259 --no-tie-embeddings"
FP8_VARIANTS = ("diff_v2", "baseline", "experts, all active")
BATCH, TINY_BATCH = "--seq-len 256 --batch-size 4", "--seq-len 40 --batch-size 1"


def gradients(check, part):
    if not check.corpus():
        raise Skip(NO_CORPUS)
    from variants import VARIANTS  # dev/reference/variants.py; the other parts do not require it

    model, batch = (TINY_MODEL, TINY_BATCH) if check.pretend else (MODEL, BATCH)
    # diff_v2 first: it matters most when time is short
    variants = [*sorted(VARIANTS, key=lambda name: name != "diff_v2"), "diff_v2 --qk-norm"]
    for variant in variants[:2] if check.pretend else variants:
        yield variant, compare_gradients, variant, f"--attention {variant} {model}", batch


def compare_gradients(check, part, variant, model, batch):
    """The weights come from a short run in bf16, so that all three programs hold exactly the same numbers."""
    steps, data = 2 if check.pretend else 20, ["--train-data", check.corpus()]
    runs = Runs(check, "gradients", [*f"{model} {batch} --steps {steps} --lr 1e-3".split(), *data], steps)
    why = runs.train("weights")
    part.check(f"{variant} trains for {steps} steps", not why, why)
    if why:
        return
    programs = {"CPU": ["TRAIN_DIFFV2"], "fp32": ["TRAIN_DIFFV2CU_FP32"], "bf16": ["TRAIN_DIFFV2CU"]}
    why = check.why_no_fp8() if variant in FP8_VARIANTS else ""
    if why:
        part.fact(f"{variant}: no gradients in fp8", why)
    elif variant in FP8_VARIANTS:
        programs.update({f: [*programs[of], "--gemm", "fp8"] for f, of in (("CPU in fp8", "CPU"), ("fp8", "bf16"))})
    dumps = {build: runs.path("weights") / f"{build}.safetensors" for build in programs}
    words, ok = ["--init", runs.checkpoint("weights"), *data, *batch.split()], True
    commands = [
        [*check.commands[program], *words, *gemm, "--dump-grads", dumps[build]]
        for build, (program, *gemm) in programs.items()
    ]
    for build, (status, text) in zip(list(programs), check.run_all(commands, 200)):
        if status != 0:
            part.check(f"{variant}: the {build} build computes gradients", False, last_line(text))
            ok = False
        if build == "fp8" and "experts compute in bf16" in text:
            part.fact(f"{variant}: no gradients in fp8", "experts compute in bf16 on this GPU, in fp8 on the CPU")
            programs.pop("fp8")
    for build in [b for b in programs if not b.startswith("CPU")] if ok else ():
        reference = dumps["CPU in fp8" if build == "fp8" else "CPU"]
        wrong, note, worst = gradient_comparison.compare(reference, dumps[build], variant, build)
        part.check(f"gradients of {variant}, {build} are equal to the CPU's within tolerance", not wrong, note)
        for kind, (name, error, limit) in worst.items():
            row = {"of": f"{variant}, {build}", "unit": "of its norm", "against": "tolerance", "note": name}
            part.row(kind, measured=error, expected=limit, ratio=limit / error if error else None, **row)
    runs.remove("weights")
