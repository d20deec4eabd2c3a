#!/usr/bin/env python3
"""
Compares --eval-choices with lm-evaluation-harness on tasks that are made here: the same records are read by
data/prepare_choices.py and by the harness's own task definitions, and scored by train_diffv2 and by the exported model.

  choices_agree.py [--out DIR] [--records N]

A BPE is trained on this repository's text, a small model on its tokens, and both programs score N records per task,
made of that text. Compared are the tokens of every request; the score of every completion, which train_diffv2 reports
as the bits per byte of a file with one completion; accuracy, normalized accuracy and their standard errors.

  tolerance  1e-4 per score, in nats. Accuracies may differ by the share of examples whose two best completions are
             closer than twice the largest difference of a score.
  requires   lm_eval 0.4.13 or later, PyTorch, transformers, and the packages of data/requirements.txt; train_diffv2 in
             the root of the repository, or TRAIN_DIFFV2
"""

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "data"))

import lm_eval
import torch
import transformers
from choices import Example, read_choices, write_choices
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing

PROGRAM = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "train_diffv2")).resolve()
TASKS = {  # name: the definition in lm_eval/tasks
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "lambada": "lambada/lambada_openai.yaml",
}
TOLERANCE = 1e-4
FILES = 60  # of one start of train_diffv2, which accepts 64
SEPARATOR = "<|endoftext|>"


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"choices_agree.py: {' '.join(map(str, command))[:200]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def sentences():
    """Of the documents of this repository, which must not change while this runs."""
    text = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    found = re.findall(r"[A-Z][A-Za-z0-9 ,'`-]{30,90}[.:]", re.sub(r"\s+", " ", text))
    return [line for line in dict.fromkeys(found) if line.count(" ") >= 5]


def parts(rng, source):
    """A sentence in two parts."""
    words = rng.choice(source).split(" ")
    at = rng.randrange(2, len(words) - 1)
    return " ".join(words[:at]), " ".join(words[at:])


def record(task, rng, source):
    """A record as on the Hub. Some texts have brackets, further spaces and other letters than ASCII."""
    pieces = [parts(rng, source) for _ in range(5)]
    (context, right), count = pieces[0], 5 if task.startswith("arc") and rng.random() < 0.2 else 4
    answers = [right, *(end for _, end in pieces[1:count])]
    odd = rng.random() < 0.3
    if task == "hellaswag":
        a, b = context.split(" ", 1)
        answers = [f"[step] {x}" if odd else x for x in answers]
        more = {"ctx_a": f"{a} [title] Größe" if odd else a, "ctx_b": b + (" [substeps]" if odd else "")}
        return {"activity_label": "Text", **more, "endings": answers, "label": str(rng.randrange(4))}
    if task == "piqa":
        return {
            "goal": context,
            "sol1": " " * odd + answers[0],
            "sol2": answers[1] + " " * odd,
            "label": rng.randrange(2),
        }
    if task == "winogrande":
        first, second = (end.split(" ")[0] for end in answers[:2])
        options = {"option1": first, "option2": f"{second} too", "answer": rng.choice("12")}
        return {"sentence": f"{context} _ {right}" if not odd else f"_ {right}", **options}
    if task == "lambada":
        return {"text": f"{context} {right}"}
    choices = {"text": answers, "label": list("ABCDE"[: len(answers)] if odd else "12345"[: len(answers)])}
    question = "question_stem" if task == "openbookqa" else "question"
    return {question: context + "  " * odd, "choices": choices, "answerKey": rng.choice(choices["label"])}


def train(out):
    """The corpus, and the checkpoint of a small model."""
    text = "".join(json.dumps({"text": path.read_text()}) + "\n" for path in sorted(ROOT.glob("docs/*.md")))
    (out / "text.jsonl").write_text(text)
    prepare = [sys.executable, ROOT / "data/prepare.py", out / "text.jsonl", "--out", out / "corpus"]
    run(*prepare, "--train-bpe", 1000, "--val-tokens", 4000)
    model = "--attention diff_v2 --layers 2 --hidden 64 --heads 4 --kv-heads 2 --head-dim 16 --ffn 128 --seq-len 256"
    more = "--batch-size 4 --steps 60 --lr 3e-3 --gemm fp32 --threads 2".split()
    data = ["--train-data", out / "corpus", "--val-data", out / "corpus"]
    run(PROGRAM, *model.split(), *more, *data, "--out", out / "run")
    return out / "run/checkpoints/step_00000060"


def open_harness(checkpoint, out):
    """The exported model, with a tokenizer that begins with the separator."""
    torch.set_num_threads(1)
    run(sys.executable, HERE / "export_hub.py", checkpoint, out / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "exported", trust_remote_code=True).eval()
    file = str(out / "corpus/tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, bos_token=SEPARATOR, pad_token=SEPARATOR)
    ids = [(SEPARATOR, tokenizer.bos_token_id)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=ids)
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, max_length=256)


def harness_results(harness, files, directory):
    """What lm-evaluation-harness finds for each task: metrics, and per record the arguments and scores."""
    directory.mkdir()
    for task, file in files.items():
        config = {"include": str(Path(lm_eval.__file__).parent / "tasks" / TASKS[task]), "task": f"made_{task}"}
        data = {"data_files": {split: str(file) for split in ("train", "validation", "test")}}
        config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": data, "tag": f"made_{task}s"}
        (directory / f"{task}.yaml").write_text(json.dumps(config))  # JSON is YAML
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    names = [f"made_{task}" for task in files]
    found = lm_eval.simple_evaluate(
        model=harness, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    return {task: (found["results"][name], found["samples"][name]) for task, name in zip(files, names)}


def evaluate(out, files):
    """The records of --eval-choices for {name: file}."""
    names, found = list(files), {}
    for i in range(0, len(names), FILES):
        given = " ".join(f"{name}={files[name]}" for name in names[i : i + FILES])
        report = out / "eval.json"
        common = [PROGRAM, "--out", out / "run", "--resume", "--eval", "--val-steps", 1, "--eval-out", report]
        run(*common, "--eval-choices", given, "--gemm", "fp32", "--threads", 2)
        found |= {row["name"]: row for row in json.loads(report.read_text())["choices"]}
    return found


def single_files(out, examples, vocab_size, name):
    """A file for each completion of the examples: {name: file}."""
    files = {}
    for i, example in enumerate(examples):
        for j, completion in enumerate(example.completions):
            key = f"{name}-{i}-{j}"
            files[key] = out / f"{key}.bin"
            write_choices(files[key], [Example(example.context, [completion], 0)], vocab_size)
    return files


def check(condition, text):
    if not condition:
        sys.exit(f"choices_agree.py: {text}")


def compare_requests(task, harness, examples, samples):
    """The tokens of the file are those that the harness sends."""
    for example, sample in zip(examples, samples, strict=True):
        sent = sample["arguments"]
        sent = [tuple(sent[f"gen_args_{i}"].values())[:2] for i in range(len(sent))] if isinstance(sent, dict) else sent
        for completion, (context, text) in zip(example.completions, sent, strict=True):
            if context:
                first, rest = harness._encode_pair(context, text)
            else:  # as its loglikelihood() does
                first, rest = [harness.prefix_token_id], harness.tok_encode(text, add_special_tokens=False)
            mine = example.context + completion.tokens
            check(mine == first + rest, f"{task}: tokens {mine}, the harness sends {first} and {rest}")
            check(len(example.context) + completion.unscored == len(first), f"{task}: the scored part of {text!r}")


def compare_scores(task, examples, samples, mine):
    """(largest difference of a score, examples whose best completion depends on differences of that size)"""
    worst, undecided, theirs = 0.0, 0, []
    for i, (example, sample) in enumerate(zip(examples, samples, strict=True)):
        theirs.append([float(r[0]) for r in sample["filtered_resps"]])
        for j, (completion, score) in enumerate(zip(example.completions, theirs[i], strict=True)):
            own = -mine[f"{task}-{i}-{j}"]["bits_per_byte"] * math.log(2) * completion.bytes
            worst = max(worst, abs(own - score))
    check(worst <= TOLERANCE, f"{task}: a score differs by {worst:.1e}")
    for example, scores in zip(examples, theirs):
        lengths = [c.characters for c in example.completions]
        for divided in (scores, [s / n for s, n in zip(scores, lengths)]):
            undecided += sum(x > max(divided) - 2 * worst for x in divided) > 1
    return worst, undecided


def compare_metrics(task, theirs, mine, undecided):
    room = undecided / mine["examples"] + TOLERANCE
    for key, own in (("acc", "accuracy"), ("acc_norm", "accuracy_norm")):
        for suffix, end in ((",none", ""), ("_stderr,none", "_se")):
            wanted, found = theirs.get(key + suffix), mine[own + end]
            if isinstance(wanted, float):
                check(abs(wanted - found) <= room, f"{task}: {own + end} {found}, the harness has {wanted}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", help="keep the files in this directory, which must not exist")
    parser.add_argument("--records", type=int, default=20, metavar="N")
    options = parser.parse_args()
    scratch = tempfile.TemporaryDirectory(prefix="diffv2_choices_")
    out = Path(options.out or Path(scratch.name) / "out")
    out.mkdir(parents=True)
    source, files, tokens, singles = sentences(), {}, {}, {}
    checkpoint = train(out)
    for task in TASKS:
        rng = random.Random(task)
        files[task] = out / f"{task}.jsonl"
        rows = [record(task, rng, source) for _ in range(options.records)]
        files[task].write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokens[task] = out / f"{task}.bin"
        prepare = [sys.executable, ROOT / "data/prepare_choices.py", task, "--local", files[task]]
        run(*prepare, "--tokenizer", out / "corpus", "--out", tokens[task])
        singles |= single_files(out, read_choices(tokens[task])[1], 1000, task)
    harness = open_harness(checkpoint, out)
    theirs = harness_results(harness, files, out / "tasks")
    mine = evaluate(out, tokens | singles)
    for task in TASKS:
        examples, (metrics, samples) = read_choices(tokens[task])[1], theirs[task]
        samples = sorted(samples, key=lambda sample: sample["doc_id"])
        compare_requests(task, harness, examples, samples)
        worst, undecided = compare_scores(task, examples, samples, mine)
        compare_metrics(task, metrics, mine[task], undecided)
        found = f"accuracy {mine[task]['accuracy']:.3f}, {undecided} undecided"
        print(f"{task}: {len(examples)} examples, {found}; scores differ by {worst:.1e} nats")


if __name__ == "__main__":
    main()
