"""dev/gpu_check/gap.py: the loss gap over several periods of a rented GPU, on the CUDA trainer compiled for the CPU.

Requires build/oncpu/test_trainer and the program of TRAIN_DIFFV2, which makes the evaluations: they take the emulation
half a minute each."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GAP = ROOT / "dev/gpu_check/gap.py"
CPU = Path(os.environ.get("TRAIN_DIFFV2", "build/train_diffv2")).absolute()
PLAN = """title = Small
seeds = 1
tokens = 3K
total-batch = 512
lr = 4e-3
preset = tiny
layers = 2
train-data = corpus
val-data = corpus
batch-size = 4
seq-len = 128
warmup = 5
val-steps = 4
validations = 2
statistics = 2
checkpoints = 2
[arm baseline]
label = Transformer, NH heads
[arm diff_v2]
label = DIFF V2
attention = diff_v2
match = baseline
[arm baseline-2h]
label = Transformer, 2 NH heads
preset = {preset}-2h
match = baseline
"""
RUNS = [f"{arm}.lr0.004.seed1" for arm in ("baseline", "diff_v2", "baseline-2h")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """corpus.tar.xz of small texts."""
    place = tmp_path_factory.mktemp("prepared")
    (place / "text").mkdir()
    for i in range(60):
        text = "".join(f"Line {n} of document {i} has {n * i % 97} words. " for n in range(40))
        (place / f"text/{i}.txt").write_text(text)
    words = f"{place}/text --val-tokens 3000 --train-bpe 300 --workers 1 --out {place}/corpus".split()
    subprocess.run([sys.executable, ROOT / "data/prepare.py", *words], check=True)
    with tarfile.open(place / "corpus.tar.xz", "w:xz") as archive:
        for path in (place / "corpus").glob("[ctv]*"):  # corpus.json, tokenizer.*, train_*.bin, val_*.bin
            archive.add(path, path.name)
    return place / "corpus.tar.xz"


@pytest.fixture
def period(tmp_path, corpus):
    """Starts gap.py on a new machine."""
    trainer = tmp_path / "trainer"
    device = f"{ROOT}/build/oncpu/test_trainer --trainer"
    trainer.write_text(f'#!/bin/sh\ncase " $* " in *" --eval "*) exec {CPU} "$@" ;; esac\nexec {device} "$@"\n')
    trainer.chmod(0o755)

    plan = tmp_path / "small.plan"
    plan.write_text(PLAN)

    def start(name, minutes="1", state=None, packed=corpus):
        place = tmp_path / name
        place.mkdir()
        if packed:
            shutil.copy(packed, place)
        if state:
            shutil.copy(state, place / "state.tar.gz")
        variables = {**os.environ, "TRAIN_DIFFV2CU": f"sh {trainer}", "OUT": str(place / "out")}
        words = [os.path.realpath(sys.executable), "-S", GAP, place, minutes, plan]  # without packages
        return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def contents(state):
    with tarfile.open(state) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive}


def refused(process, text):
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and text in said and said.count("\n") == 1, (process.returncode, said)


@pytest.mark.slow
def test_a_period_continues_the_finished_runs_of_the_one_before(tmp_path, period):
    first, state = period("first", "10"), tmp_path / "first/out/state.tar.gz"
    deadline = time.time() + 120
    while not state.exists():
        assert time.time() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=120)
    assert first.returncode == 3, said
    kept = contents(state)
    done = [name for name in RUNS if f"{name}/run.json" in kept]
    assert 1 <= len(done) < 3 and done == RUNS[: len(done)], kept.keys()
    small = ("run.json", "log.jsonl", "eval.json", "checkpoints/step_00000006/trainer_state.json")
    wanted = {f"{name}/{file}" for name in done for file in small} | {f"{name}.out" for name in done}
    assert kept.keys() == wanted | {"lab.json"}, kept.keys()
    assert f"{len(done)} of 3 runs are finished" in (tmp_path / "first/out/gap.txt").read_text()

    second = period("second", "10", state)
    said = second.communicate(timeout=240)
    assert second.returncode == 0, said
    assert sorted(p.name for p in (tmp_path / "second/out").iterdir()) == ["gap.txt", "state.tar.gz"]
    after = contents(tmp_path / "second/out/state.tar.gz")
    assert all(after[name] == kept[name] for name in wanted), "a finished run was repeated"
    assert all(f"{name}/eval.json" in after for name in RUNS), after.keys()
    text = (tmp_path / "second/out/gap.txt").read_text()
    assert "3 of 3 runs are finished. Losses: evaluation" in text and text in said[0], text
    rows = re.findall(r"^(.{28}) +0.004 +1 +0 +\d\.\d{4}$", text, re.M)
    assert [row.strip() for row in rows] == ["Transformer, NH heads", "DIFF V2", "Transformer, 2 NH heads"], text
    gaps = re.findall(r"^(DIFF V2|Transformer, 2 NH heads) +mean [+-]0\.\d{4} at rates 0.004 and 0.004: .*", text, re.M)
    assert len(gaps) == 2, text
    for name, bytes in after.items():  # at home
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes)
    lab = [sys.executable, ROOT / "scripts/lab", "report", "home"]
    done = subprocess.run(lab, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "DIFF V2" in (tmp_path / "home/report/report.md").read_text(), done.stderr


def test_a_period_ends_at_its_limit_with_the_runs_that_are_finished(tmp_path, period):
    began, process = time.time(), period("short", "0.02")
    said = process.communicate(timeout=120)
    assert process.returncode == 3 and time.time() - began < 60, said
    assert (tmp_path / "short/out/gap.txt").exists(), said


def test_a_state_with_other_files_than_those_of_runs_is_refused(tmp_path, period):
    cases = {"../out": b"x", "/tmp/gap-test": b"x", "a/run.json/../../b": b"x", "a/model.safetensors": b"x"}
    links = {"lab.json": "/etc/passwd"}
    for i, name in enumerate([*cases, *links]):
        state = tmp_path / f"state{i}.tar.gz"
        with tarfile.open(state, "w:gz") as archive:
            good = tarfile.TarInfo("b.out")
            archive.addfile(good)
            bad = tarfile.TarInfo(name)
            if name in links:
                bad.type, bad.linkname = tarfile.SYMTYPE, links[name]
            else:
                bad.size = len(cases[name])
            archive.addfile(bad, io.BytesIO(cases.get(name, b"")))
        refused(period(f"{i}", state=state), f"it must not contain '{name}': remove the archive")
        assert sorted(p.name for p in (tmp_path / f"{i}").iterdir()) == [
            "corpus",
            "corpus.tar.xz",
            "out",
            "state.tar.gz",
        ]
    (tmp_path / "cut.tar.gz").write_bytes(state.read_bytes()[:60])
    refused(period("cut", state=tmp_path / "cut.tar.gz"), "remove the archive, or copy it again")
    with tarfile.open(tmp_path / "large.tar.gz", "w:gz") as archive:
        large = tarfile.TarInfo("a.out")
        large.size = 300 << 20
        archive.fileobj.write(large.tobuf())  # a header alone
    refused(period("large", state=tmp_path / "large.tar.gz"), "more than 256 MiB")


def test_without_a_corpus_or_variables_one_line_says_so(tmp_path, period):
    refused(period("empty", packed=None), "has no corpus.tar.xz: short.sh prepare-gap makes it")
    environment = {name: value for name, value in os.environ.items() if name not in ("OUT", "TRAIN_DIFFV2CU")}
    for words, text in (([tmp_path, "1"], "requires the variables"), ([tmp_path], "usage"), ([tmp_path, "0"], "usage")):
        done = subprocess.run([sys.executable, GAP, *words], capture_output=True, text=True, env=environment)
        assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1, done
