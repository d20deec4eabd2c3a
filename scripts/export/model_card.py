"""
README.md of an exported directory: what the files of the run state about the model. Numbers that no file states are
omitted; the license has a placeholder, since no file states one.
"""

import json
import shlex
from pathlib import Path

LICENSE = "to be stated by the publisher"
TRANSFORMERS = ("5.23.0", "5.24.0")  # tested versions: {previous,.}/requirements.in
MOMENTS = 1.96  # standard errors on both sides of an estimate: an interval of 95%


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def last_records(log, kind, step):
    """{name: record} of the last records of a kind until a step; validation has no name."""
    found = {}
    if log.exists():
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                known = line.startswith(f'{{"kind": "{kind}"') and line.endswith("\n")
                try:
                    record = json.loads(line) if known else {}
                except ValueError:  # a broken line, as of a machine that failed
                    continue
                if record.get("step", step + 1) <= step:
                    found[record.get("name", "")] = record
    return found


def names_of(corpora):
    return ", ".join(f"`{c['name'] or Path(c['path']).name}`" for c in corpora)


def data_rows(run):
    corpora = run["data"].get("train", [])
    for corpus in corpora:
        share = corpus["weight"] / sum(c["weight"] for c in corpora)
        weight = f", {share:.0%} of the training" if share < 1 else ""
        yield "training data", f"{names_of([corpus])}: {corpus['tokens']:,} tokens{weight}"
    name = corpora and read_json(Path(corpora[0]["path"]) / "corpus.json").get("tokenizer")
    if name:
        yield "tokenizer", f"`{Path(name).name}`"


def result_rows(run, log, step):
    for record in last_records(log, "val", step).values():
        if record["loss"] is not None:
            corpora = f" of {names_of(run['data']['val'])}" if run["data"].get("val") else ""
            windows = f"{record['windows']} windows{corpora}, step {record['step']}"
            yield "validation loss", f"{record['loss']:.4f} nats per token ({windows})"
    for name, record in last_records(log, "choices", step).items():
        value, error = record["accuracy"], record["accuracy_se"]
        if value is not None:
            interval = f" [{value - MOMENTS * error:.3f}, {value + MOMENTS * error:.3f}]" if error is not None else ""
            yield (
                name,
                f"accuracy {value:.3f}{interval} of {record['examples']} examples (chance {record['chance']:.3f})",
            )


def rows(checkpoint, config, separator):
    place, state = checkpoint.resolve().parent.parent, read_json(checkpoint / "trainer_state.json")
    run = read_json(place / "run.json") if state else {}
    if run:
        model = run["model"]
        active = f", {model['active_parameters']:,} for a token" if "active_parameters" in model else ""
        yield "parameters", f"{model['parameters']:,}{active}"
    yield "context", f"{config['max_position_embeddings']:,} tokens"
    yield "vocabulary", f"{config['vocab_size']:,} tokens" + ("" if separator is None else f", separator {separator}")
    if run:
        yield from data_rows(run)
    if state:
        yield "trained on", f"{state['tokens']:,} tokens in {state['step']:,} steps"
    if run:
        yield from result_rows(run, place / "log.jsonl", state["step"])
        yield "program", f"diffv2.c {run.get('version', '')}, revision {run['revision']}"
    yield "tested with", f"Transformers {', '.join(TRANSFORMERS)}"
    yield "license", LICENSE


def commands(checkpoint):
    """The command of each start before the checkpoint, for a shell, without the directories of absolute paths."""
    run, state = (
        read_json(p) for p in (checkpoint.resolve().parent.parent / "run.json", checkpoint / "trainer_state.json")
    )
    for start in run.get("starts", []) if state else []:
        if start["step"] < state["step"]:
            yield "    " + shlex.join(Path(a).name if a.startswith("/") else a for a in start["command_line"])


def model_card(checkpoint, config, separator, bos):
    """config: as exported; bos: whether the tokenizer has a text for the separator"""
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    attention = config.get("attention", config["model_type"])
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows(checkpoint, config, separator)]
    table = "\n".join(f"| {name} | {value} |" for name, value in cells)
    starts = "\n".join(commands(checkpoint))
    training = f"Training:\n\n{starts}\n\n" if starts else ""
    prompt = 'pipe.tokenizer.bos_token + "Once upon a time"' if bos else '"Once upon a time"'
    return f"""---
library_name: transformers
pipeline_tag: text-generation
license: other
license_name: {LICENSE.replace(" ", "-")}
tags: [diffv2.c, {attention}]
---
A language model (`{attention}`), trained by diffv2.c.

| | |
|---|---|
{table}

    import transformers
    pipe = transformers.pipeline("text-generation", "DIRECTORY"{code})
    print(pipe({prompt}, max_new_tokens=100)[0]["generated_text"])

{training}Limits: the model continues texts like those of its training data, and repeats what is wrong or harmful
in them. Nobody has tested its answers for facts, bias or safety unless this page says so. Texts longer than the context
are untested.
"""
