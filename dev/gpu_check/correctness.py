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
    """Each failing case of a test program, with the first thing that it said."""
    found, said = [], ""
    for line in text.splitlines():
        if line.startswith("FAIL "):
            found.append(f"{line[5:100]}{': ' + said[:150] if said else ''}")
        said = "" if re.match("FAIL|ok |skip|storage", line) else said or line.strip()
    return found


def test_result(status, text, limit):
    """(whether a test program passed, what is said of it)"""
    found = re.search(r"^(\d+) passed, (\d+) failed$", last_line(text))
    failing = failures(text)
    detail = f"stopped after {limit} s" if status is None else last_line(text)
    return status == 0 and found and int(found[1]) > 0 and found[2] == "0", detail + (
        ": " + "; ".join(failing[:5]) if failing else ""
    )


def ops(check, part):
    for build_name, program in (("bf16", "TEST_DIFFV2CU"), ("fp32", "TEST_DIFFV2CU_FP32")):
        if not part.pending(build_name):
            continue
        # where one process runs every thread of every block, a few operations show that this part works
        status, text = check.run([*check.commands[program], *(["rope"] if check.pretend else [])], 400)
        part.check(f"operations against their C twins, {build_name}", *test_result(status, text, 400))
        part.end(build_name)


SIZES = [("1.4b", 8, 16, 2048), ("124m", 6, 64, 1024)]  # (preset, key/value heads, B, T)


def sizes(check, part):
    for case in [("tiny", 2, 2, 70)] if check.pretend else SIZES:
        name = " ".join(str(word) for word in case)
        if not part.pending(name):
            continue
        status, text = check.run([*check.commands["TEST_DIFFV2CU"], "--sizes", *case], 300)
        part.check(f"operations at the shapes of {name}", *test_result(status, text, 300))
        part.end(name)


GRADIENT_SHAPE = "--layers 4 --hidden 256 --heads 8 --kv-heads 4 --head-dim 64 --ffn 704 --vocab 5003 --seq-len 256 --batch-size 4 --no-tie-embeddings"
PRETEND_SHAPE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --ffn 48 --vocab 259 --seq-len 40 --batch-size 1 --no-tie-embeddings"


def gradients(check, part):
    """The weights are those of a short run in bf16, so that all three programs hold the very same numbers."""
    corpus = check.corpus()
    if not corpus:
        raise Skip("there is no corpus: --bundle, or scripts/corpus.sh")
    steps = 2 if check.pretend else 20
    shape = (PRETEND_SHAPE if check.pretend else GRADIENT_SHAPE).split()
    from variants import VARIANTS

    # diff_v2 first: it matters most when time is short
    variants = sorted(VARIANTS, key=lambda name: name != "diff_v2")
    for variant in variants[:2] if check.pretend else variants:
        if not part.pending(variant):
            continue
        folder = check.work / f"gradients-{variant}"
        shutil.rmtree(folder, ignore_errors=True)
        status, text = check.run(
            [
                *check.commands["TRAIN_DIFFV2CU"],
                "--attention",
                variant,
                *shape,
                "--train-data",
                corpus,
                "--steps",
                steps,
                "--lr",
                "1e-3",
                "--out",
                folder / "run",
            ],
            200,
        )
        weights = folder / f"run/checkpoints/step_{steps:08d}"
        part.check(
            f"{variant} trains for {steps} steps",
            status == 0 and weights.is_dir(),
            "" if status == 0 else last_line(text),
        )
        programs = {"CPU": "TRAIN_DIFFV2", "fp32": "TRAIN_DIFFV2CU_FP32", "bf16": "TRAIN_DIFFV2CU"}
        dumps, ok = {who: folder / f"{who}.safetensors" for who in programs}, weights.is_dir()
        rows = [shape[shape.index("--batch-size") + i] for i in range(2)] + [
            shape[shape.index("--seq-len") + i] for i in range(2)
        ]
        commands = [
            [*check.commands[program], "--init", weights, "--train-data", corpus, *rows, "--dump-grads", dumps[who]]
            for who, program in programs.items()
        ]
        for who, (status, text) in zip(programs, check.run_all(commands, 200) if ok else ()):
            if status != 0:
                part.check(f"{variant}: gradients of the {who} build", False, last_line(text))
                ok = False
        if ok:
            for build_name in ("fp32", "bf16"):
                checks, record = gradient_comparison.compare(dumps["CPU"], dumps[build_name], variant, build_name)
                for c in checks:
                    part.check(*c)
                if record:
                    part.record(record)
        shutil.rmtree(folder, ignore_errors=True)
        part.end(variant)
