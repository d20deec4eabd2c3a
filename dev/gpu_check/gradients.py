"""Cases of the part `correctness`: gradients of the whole model on the device and on the CPU, of every variant, and of
models with experts."""

import re
import sys

import gradient_comparison
from programs import ROOT
from runner import NO_CORPUS, last_line
from runs import Runs

sys.path.append(str(ROOT / "dev/reference"))

MODEL = "--layers 4 --hidden 256 --heads 8 --kv-heads 2 --head-dim 64 --ffn 704 --vocab 5003 --no-tie-embeddings"
TINY_MODEL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --ffn 48 --vocab 259 --no-tie-embeddings"
# The first has no selection, which bf16 may change (gradient_comparison.py). The last has more experts than a warp has
# lanes, a layer without experts, and biases in its routers.
EXPERTS = {
    "experts, all active": "--preset moe-tiny --experts-active 8",
    "experts, moe-tiny": "--preset moe-tiny",
    "experts, 40": "--preset moe-tiny --experts 40 --experts-active 4 --expert-ffn 64 --shared-experts 1 "
    "--dense-layers 1 --router-bias",
}
TINY_EXPERTS = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --experts 4 --expert-ffn 16"
FP8_VARIANTS = ("diff_v2", "baseline", "experts, all active")
BATCH, TINY_BATCH = "--seq-len 256 --batch-size 4", "--seq-len 40 --batch-size 1"


def gradients(check):
    if not check.corpus():
        yield "gradients", lambda check, findings: findings.fact("no gradients", NO_CORPUS)
        return
    from variants import VARIANTS  # dev/reference/variants.py; the other parts do not require it

    model, batch = (TINY_MODEL, TINY_BATCH) if check.pretend else (MODEL, BATCH)
    # diff_v2 first: it matters most when time is short
    variants = [*sorted(VARIANTS, key=lambda name: name != "diff_v2"), "diff_v2 --qk-norm"]
    models = {variant: f"--attention {variant} {model}" for variant in variants}
    models = {**{v: models[v] for v in variants[:2]}, **EXPERTS, **models}
    if check.pretend:
        tiny = f"--preset moe-tiny {TINY_EXPERTS} --experts-active 4"
        models = {"diff_v2": models["diff_v2"], "baseline": models["baseline"], "experts, all active": tiny}
    for variant, options in models.items():
        yield f"gradients {variant}", compare_gradients, variant, options, batch


def compare_gradients(check, findings, variant, model, batch):
    """The weights come from a short run in bf16, so that all three programs hold exactly the same numbers."""
    steps, data = 2 if check.pretend else 20, ["--train-data", check.corpus()]
    options = [*f"{model} {batch} --steps {steps} --lr 1e-3".split(), *data]
    runs = Runs(check, f"gradients-{re.sub('[^a-z0-9]+', '-', variant)}", options, steps)
    why = runs.train("weights")
    findings.check(f"{variant} trains for {steps} steps", not why, why)
    if why:
        return
    programs = {"CPU": ["TRAIN_DIFFV2"], "fp32": ["TRAIN_DIFFV2CU_FP32"], "bf16": ["TRAIN_DIFFV2CU"]}
    why = check.why_no_fp8() if variant in FP8_VARIANTS else ""
    if why:
        findings.fact(f"{variant}: no gradients in fp8", why)
    elif variant in FP8_VARIANTS:
        pairs = (("CPU in fp8", "CPU"), ("fp8", "bf16"))
        programs.update({f: [*programs[of], "--matmul-dtype", "fp8"] for f, of in pairs})
    for build in [b for b, (program, *_) in programs.items() if program in check.programs.unusable]:
        findings.fact(f"{variant}: no gradients of the {build} build", check.programs.unusable[programs.pop(build)[0]])
    dumps = {build: runs.path("weights") / f"{build}.safetensors" for build in programs}
    words = ["--init", runs.checkpoint("weights"), *data, *batch.split()]
    commands = [
        [*check.program(program), *words, *gemm, "--dump-grads", dumps[build]]
        for build, (program, *gemm) in programs.items()
    ]
    for build, (status, text) in zip(list(programs), check.run_all(commands, 200)):
        if status != 0:
            findings.check(f"{variant}: the {build} build computes gradients", False, last_line(text))
            programs.pop(build)
        elif build == "fp8" and "experts compute in bf16" in text:
            findings.fact(f"{variant}: no gradients in fp8", "experts compute in bf16 on this GPU, in fp8 on the CPU")
            programs.pop("fp8")
    for build in [b for b in programs if not b.startswith("CPU")]:
        reference = "CPU in fp8" if build == "fp8" else "CPU"
        if reference in programs:
            compare_with_cpu(findings, dumps[reference], dumps[build], variant, build)
    runs.remove("weights")


def compare_with_cpu(findings, reference, dump, variant, build):
    wrong, note, worst = gradient_comparison.compare(reference, dump, variant, build)
    findings.check(f"gradients of {variant}, {build} are equal to the CPU's within tolerance", not wrong, note)
    for kind, (name, error, limit) in worst.items():
        row = {"of": f"{variant}, {build}", "unit": "of its norm", "against": "tolerance", "note": name}
        findings.row(kind, measured=error, expected=limit, ratio=limit / error if error else None, **row)
