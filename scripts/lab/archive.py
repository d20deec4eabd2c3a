"""archive.py: the command `archive`: a comparison in one file, a few KB per run, which outlives logs and checkpoints.

    python3 scripts/lab archive runs/family-cpu [MORE...] --out family-cpu.jsonl

MORE are labs of other seeds, or archives: an old archive and a new lab make a larger archive. The commands report,
suggest and scoreboard read archives like labs. Runs that are not comparable are an error.

Version 1 of the format has a line of JSON for what is common to all runs, then one for each run that has ended:

    archive   1, the version             |  name
    study     PLAN-SIZE                  |  numbers  arm, rate, seed, state, and what claims are about
    lab       lab.json without the runs  |           (measurements.py): of all steps, seven digits
    ngrams    ngrams.py                  |
    numbers,  the keys that have one     |  options  at the first step
    options,  value in all runs          |  info     the rest of run.json: model, data, devices, host, revision, resumes
    info                                 |  log      {kind: records}: 31 steps, 6 statistics, all validations and tasks
                                         |  eval     eval.json, the loss by position as means (position_bins)
                                         |  probe    probe.json of the last checkpoint

Records are {"n": number of records, "columns": {key: list, or the value of all records}}, "" is a missing key.
An archive without options has numbers only, for the scoreboard (--numbers, 300 bytes per run).
Exit status: 0 done; 1 failed, or a file was left out; 2 usage, or the runs are not comparable.
"""

import json
import sys
from pathlib import Path

import python_environment

from . import cli, evaluations, measurements, metrics, ngrams, run_directory, schema, stats, study as studies

VERSION = 1
STEPS, STATISTICS = 31, 6  # so few steps that none of them is judged to be a spike (stats.SPIKE_LEAST)
SHARED = ("numbers", "options", "info")
JOINED = ("sweep-seeds", "looks", "registration")  # of all labs
MACHINE = ("command_line", "start_phases", "peak")  # of run.json and each of its starts; not kept
NUMBERS = {"arm": "text", "rate": "number", "seed": "64-bit integer", "state": "text", "*": "number or null"}
LOG = {f"{kind}?": [{"step": "non-negative integer", **shape}] for kind, shape in schema.RECORDS.items()}
ENTRY = {"name": "text", "numbers": NUMBERS, "info": schema.RUN, "log": LOG}
ENTRY |= {"eval": (schema.EVALUATION,), "probe": (schema.PROBE,)}
HEADER = {"archive": "positive integer", "study": "text", "lab?": schema.LAB, "ngrams?": schema.NGRAMS}


# ---- values


def pack(value):
    """A JSON value with lists of objects as columns, and seven digits."""
    if isinstance(value, dict):
        return {key: pack(x) for key, x in value.items()}
    if not isinstance(value, list):
        return float(f"{value:.7g}") if isinstance(value, float) else value
    if not value or not all(isinstance(x, dict) for x in value):
        return [pack(x) for x in value]
    columns = {}
    for key in dict.fromkeys(key for record in value for key in record):
        column = [pack(record.get(key, "")) for record in value]
        same = all(x == column[0] for x in column) and not isinstance(column[0], list)
        columns[key] = column[0] if same else column
    return {"n": len(value), "columns": columns}


def unpack(value):
    if isinstance(value, list):
        return [unpack(x) for x in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"n", "columns"}:
        return {key: unpack(x) for key, x in value.items()}
    at = lambda column, i: unpack(column[i] if isinstance(column, list) else column)
    records = [{key: at(column, i) for key, column in value["columns"].items()} for i in range(value["n"])]
    return [{key: x for key, x in record.items() if x != ""} for record in records]


def by_range(evaluation):
    """An evaluation with the mean losses of ranges of positions; by_position() undoes it."""
    losses = evaluation.get("loss_by_position") or []
    means = [stats.mean_or_none(losses[begin:end]) for begin, end in evaluations.position_bins(len(losses))]
    return evaluation | {"loss_by_position": [len(losses), means]} if losses else evaluation


def by_position(evaluation):
    if not evaluation.get("loss_by_position"):
        return evaluation
    n, means = evaluation["loss_by_position"]
    each = [[x] * (end - begin) for (begin, end), x in zip(evaluations.position_bins(n), means)]
    return evaluation | {"loss_by_position": sum(each, [])}


# ---- writing


def without(facts, *keys):
    return {key: x for key, x in facts.items() if key not in keys}


def thinned(run):
    """{kind: records} of a log."""
    steps, log = sorted(run.layers), {"val": []}
    for step, loss in run.val.items():
        read = ([read for at, read in run.read if at <= step] or [run.read[0][1]])[-1] or ()
        facts = {key: x for key, x in zip(("windows", "data_fingerprint"), read) if x is not None}
        log["val"].append({"kind": "val", "step": step, "loss": loss, **facts})
    log["train"] = [run.train[i] for i in stats.thin(run.train, STEPS)]
    log["stats"] = [r for i in stats.thin(steps, STATISTICS) for r in run.layers[steps[i]].values()]
    log["choices"] = [record for records in run.choices.values() for record in records.values()]
    return {kind: records for kind, records in log.items() if records}


def entry_of(run, by_eval):
    row = measurements.row_of("", run, by_eval)
    entry = {"name": run.name, "options": run.info["options"] | {"out": None}}
    row |= {f"{what}_judged": metrics.spikes(run, what)[1] for what in ("loss", "grad")}
    entry["numbers"] = pack({key: x for key, x in row.items() if x is not None and key != "study"})
    entry["info"] = without(run.info, "options", *MACHINE)
    if run.base:  # a path of the machine
        entry["options"]["init"] = run.base.name
        if "upcycled_from" in entry["info"]["model"]:
            entry["info"]["model"] = entry["info"]["model"] | {"upcycled_from": run.base.name}
    if "starts" in run.info:
        entry["info"]["starts"] = [without(start, *MACHINE) for start in run.info["starts"]]
    entry["log"] = pack(thinned(run))
    base = run.base.name if run.base else None
    more = {"base": base, "eval": run.eval and pack(by_range(run.eval)), "probe": pack(run.probes.get(run.steps))}
    return entry | {key: x for key, x in more.items() if x}


def text_of(header, entries):
    """The lines of an archive; moves what all entries share into its header."""
    header, entries = dict(header), [dict(entry) for entry in entries]
    for part in SHARED:
        if part not in entries[0]:
            continue
        first = entries[0][part]
        same = {key: x for key, x in first.items() if all(e[part].get(key, "") == x for e in entries)}
        header[part] = same
        for e in entries:
            e[part] = {key: x for key, x in e[part].items() if key not in same}
    compact = lambda line: json.dumps(line, separators=(",", ":"), ensure_ascii=False)
    return "".join(f"{compact(line)}\n" for line in [header, *entries])


# ---- reading


def read(path):
    """(header, entries) of an archive, each with all its values. Raises RunError with the first error."""
    try:
        lines = [json.loads(line, parse_constant=run_directory.no_constant) for line in open(path, "rb")]
    except OSError as error:
        raise run_directory.RunError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise run_directory.RunError(f"{path}: not an archive: {error}") from None
    header = lines[0] if lines else None
    wrong = schema.violation(header, HEADER)
    if not wrong and header["archive"] != VERSION:
        wrong = f"version {header['archive']} of the format, must be {VERSION}"
    if wrong:
        raise run_directory.RunError(f"{path}: not an archive of this lab: {wrong}")
    entries = []
    for number, entry in enumerate(lines[1:], 2):
        try:
            entries.append(whole(header, entry))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise run_directory.RunError(f"{path}:{number}: {error}") from None
    return header, entries


def whole(header, entry):
    """An entry with what its header has for all. ValueError if a value has the wrong type."""
    for part in SHARED:
        if part in header or part in entry:
            entry[part] = {**header.get(part, {}), **entry.get(part, {})}
    for part in ("log", "eval", "probe"):
        entry[part] = unpack(entry.get(part))
    if "options" in entry:
        entry["info"] = {**entry.get("info", {}), "options": entry["options"]}
        entry["eval"] = entry["eval"] and by_position(entry["eval"])
    wrong = schema.violation(entry, ENTRY if "options" in entry else {"numbers": NUMBERS})
    if wrong := wrong or ("options" in entry and run_directory.wrong_options(entry["info"])):
        raise ValueError(wrong)
    return entry


def by_directory(path, entries):
    """{where a run of an archive would be: its entry}"""
    if any("options" not in entry for entry in entries):
        raise run_directory.RunError(f"{path}: has numbers only, which the scoreboard reads")
    return {path / entry["name"]: entry for entry in entries}


def fill(run, entry):
    """Gives a Run that has its info what an entry has."""
    log = [record for records in entry["log"].values() for record in records]
    studies.absorb(run, log)
    run.read = studies.option_history.validations(run.info, log)
    run.numbers, run.state, run.eval = entry["numbers"], entry["numbers"]["state"], entry["eval"]
    run.probes = {run.steps: entry["probe"]} if entry["probe"] else {}


# ---- the command


def main(words):
    parser = cli.Parser(prog="lab archive", description="Writes the runs of a comparison into one file.")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="labs, directories of runs, or archives")
    parser.add_argument("--out", required=True, metavar="FILE.jsonl", help="file to write; RUNS may have it")
    parser.add_argument("--numbers", action="store_true", help="keep only what claims are about, for the scoreboard")
    a = parser.parse_args(words)
    python_environment.ensure("lab")
    fail = lambda message, status=1: cli.fail("lab archive", message, status)
    try:
        study = studies.load(a.runs)
        studies.check(study)
        for line in study.left_out:
            print(f"lab archive: {line}; left out", file=sys.stderr)
        if study.problems:
            fail(f"the runs are not comparable: {study.problems[0]}: specify an archive for each comparison", 2)
        ended = [run for run in study.runs if run.state in ("done", "diverged")]
        if not ended:
            fail("no run has ended")
        if lost := a.numbers and [key for key in ("sweep-seeds", "looks") if study.of_labs(key)]:
            fail(f"--numbers: the plan has {lost[0]}, without which verdicts would change: leave --numbers out", 2)
        header = {"archive": VERSION, "study": study.name or Path(a.out).stem}
        if study.labs:
            arms = {arm: keys for lab in study.labs[::-1] for arm, keys in lab["arms"].items()}
            joined = {key: [x for lab in study.labs for x in lab.get(key, [])] for key in JOINED}
            joined = {key: [x for i, x in enumerate(of) if x not in of[:i]] for key, of in joined.items()}
            header["lab"] = study.labs[0] | joined | {"arms": arms, "runs": []}
        ngrams.count(study)
        header |= {"ngrams": study.ngrams} if study.ngrams else {}
        by_eval = study.by_eval()
        entries = [entry_of(run, by_eval) for run in ended]
        if a.numbers:
            header, entries = without(header, "lab"), [{"numbers": entry["numbers"]} for entry in entries]
        run_directory.write_atomic(a.out, text_of(header, entries))
    except run_directory.RunError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or a.out}: {error.strerror}")
    print(f"{a.out}: {len(ended)} runs, {Path(a.out).stat().st_size // len(ended)} bytes each")
    return 1 if study.left_out else 0
