"""The parts `ops`, `sizes` and `gradients`: CUDA operations and gradients against their C twins."""

import re
import shutil
import sys

import gradient_comparison
from programs import ROOT
from tools import last_line

sys.path.append(str(ROOT / "dev/reference"))
from runner import Skip


def failures(text):
    """The failed cases of a test program, each with its first message."""
    found, said = [], ""
    for line in text.splitlines():
        if line.startswith("FAIL "):
            found.append(f"{line[5:100]}{': ' + said[:150] if said else ''}")
        said = "" if re.match("FAIL|ok |skip|storage", line) else said or line.strip()
    return found


def test_result(status, text, limit):
    """(whether a test program passed, a summary)"""
    found = re.search(r"^(\d+) passed, (\d+) failed(, \d+ skipped)?$", last_line(text))
    failing = failures(text)
    detail = f"stopped after {limit} s" if status is None else last_line(text)
    return status == 0 and found and int(found[1]) > 0 and found[2] == "0", detail + (
        ": " + "; ".join(failing[:5]) if failing else ""
    )


def ops(check, part):
    for build_name, program in (("bf16", "TEST_DIFFV2CU"), ("fp32", "TEST_DIFFV2CU_FP32")):
        if not part.pending(build_name):
            continue
        # the CPU runs every thread of every block: one operation is enough to test this part
        status, text = check.run([*check.commands[program], *(["rope"] if check.pretend else [])], 400)
        part.check(f"operations are equal to their C twins, {build_name}", *test_result(status, text, 400))
        part.end(build_name)


SIZES = [("1.4b", 8, 16, 2048), ("124m", 6, 64, 1024)]  # (preset, key/value heads, B, T)


def sizes(check, part):
    for case in [("tiny", 2, 2, 70)] if check.pretend else SIZES:
        name = " ".join(str(word) for word in case)
        if not part.pending(name):
            continue
        status, text = check.run([*check.commands["TEST_DIFFV2CU"], "--sizes", *case], 300)
        part.check(f"operations are correct at the shapes of {name}", *test_result(status, text, 300))
        part.end(name)


MODEL = "--layers 4 --hidden 256 --heads 8 --kv-heads 2 --head-dim 64 --ffn 704 --vocab 5003 --no-tie-embeddings"
TINY_MODEL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --ffn 48 --vocab 259 --no-tie-embeddings"
FP8_VARIANTS = ("diff_v2", "baseline", "experts, all active")
BATCH, TINY_BATCH = "--seq-len 256 --batch-size 4", "--seq-len 40 --batch-size 1"


def gradients(check, part):
    corpus = check.corpus()
    if not corpus:
        raise Skip("no corpus: specify --bundle, or run scripts/corpus.sh")
    from variants import VARIANTS  # dev/reference/variants.py; the other parts do not require it

    # diff_v2 first: it matters most when time is short
    variants = [*sorted(VARIANTS, key=lambda name: name != "diff_v2"), "diff_v2 --qk-norm"]
    for variant in variants[:2] if check.pretend else variants:
        if part.pending(variant):
            folder = check.work / f"gradients-{variant}"
            shutil.rmtree(folder, ignore_errors=True)
            model, batch = (TINY_MODEL, TINY_BATCH) if check.pretend else (MODEL, BATCH)
            compare_gradients(check, part, variant, f"--attention {variant} {model}", batch, corpus, folder)
            shutil.rmtree(folder, ignore_errors=True)
            part.end(variant)


def compare_gradients(check, part, variant, model, batch, corpus, folder):
    """The weights come from a short run in bf16, so that all three programs hold exactly the same numbers."""
    steps = 2 if check.pretend else 20
    words = f"{model} {batch} --steps {steps} --lr 1e-3".split()
    train = [*check.commands["TRAIN_DIFFV2CU"], *words, "--train-data", corpus, "--out", folder / "run"]
    status, text = check.run(train, 200)
    weights = folder / f"run/checkpoints/step_{steps:08d}"
    ok = status == 0 and weights.is_dir()
    part.check(f"{variant} trains for {steps} steps", ok, "" if status == 0 else last_line(text))
    if not ok:
        return
    programs = {"CPU": ["TRAIN_DIFFV2"], "fp32": ["TRAIN_DIFFV2CU_FP32"], "bf16": ["TRAIN_DIFFV2CU"]}
    why = check.why_no_fp8() if variant in FP8_VARIANTS else ""
    if why:
        part.fact(f"{variant}: no gradients in fp8", why)
    elif variant in FP8_VARIANTS:
        programs.update({f: [*programs[of], "--gemm", "fp8"] for f, of in (("CPU in fp8", "CPU"), ("fp8", "bf16"))})
    dumps = {build: folder / f"{build}.safetensors" for build in programs}
    words = ["--init", weights, "--train-data", corpus, *batch.split()]
    commands = [
        [*check.commands[program], *words, *gemm, "--dump-grads", dumps[build]]
        for build, (program, *gemm) in programs.items()
    ]
    for build, (status, text) in zip(programs, check.run_all(commands, 200)):
        if status != 0:
            part.check(f"{variant}: the {build} build computes gradients", False, last_line(text))
            ok = False
    for build in [b for b in programs if not b.startswith("CPU")] if ok else ():
        reference = "CPU in fp8" if build == "fp8" else "CPU"
        checks, record = gradient_comparison.compare(dumps[reference], dumps[build], variant, build)
        for c in checks:
            part.check(*c)
        if record:
            part.record(record)
