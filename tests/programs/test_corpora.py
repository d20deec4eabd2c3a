"""Corpus directories: their vocabulary and separator, and mixtures. tests/golden/data.txt has what is refused."""

import re
import shutil

import pytest
from program import DONE, FAILED, SHAPE, checkpoint, read_json, records, run_trainer, write_corpus, write_shard

MODEL = f"{SHAPE} --batch-size 4 --warmup 1 --threads 1"


def vocabulary_of(run, step):
    return read_json(checkpoint(run, step) / "config.json")["vocab_size"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Corpora with and without a vocabulary, and a run of one. Tests do not write there."""
    directory = tmp_path_factory.mktemp("sources")
    for name, described in {"a": {"vocab_size": 203}, "b": {"vocab_size": 204}, "plain": None}.items():
        write_corpus(directory / name, 1, 1, described)
    run_trainer(MODEL, "--train-data a --steps 1 --out run", cwd=directory).done()
    return directory


SOURCES = [  # options; words that are printed at the start, or of the error
    ("--train-data a", " vocabulary 203,"),
    ("--train-data a --preset 124m", " vocabulary 203,"),
    ("--train-data a --preset 124m --init run/checkpoints/step_00000001", " vocabulary 203,"),
    ("--train-data a --vocab 1000", " --vocab 1000"),
    ("--train-data 'x=a:1 y=b:1'", " vocabulary 204,"),
    ("--train-data a --val-data b", " vocabulary 204,"),
    ("--train-data 'plain/*.bin'", " vocabulary 256,"),
    ("--train-data plain/train_000001.bin --preset 124m", " vocabulary 50257,"),
    ("--train-data 'x=a:1 y=plain/*.bin:1'", " vocabulary 256,"),
    ("--train-data ' x=a:1  y=b:1 '", " vocabulary 204,"),
]
REFUSED_SOURCES = [
    ("--train-data b --init run/checkpoints/step_00000001", "go up to 203 and the model has a vocabulary of 203"),
    ("--train-data b --vocab 203", "--vocab 204"),
    ("--train-data a --val-data b --vocab 203", "--vocab 204"),
]


@pytest.mark.parametrize(
    ("options", "words", "status"),
    [(*case, DONE) for case in SOURCES] + [(*case, FAILED) for case in REFUSED_SOURCES],
    ids=[options for options, _ in SOURCES + REFUSED_SOURCES],
)
def test_vocabulary_sources(sources, options, words, status):
    """the vocabulary comes from the model, --vocab, the data or the preset, in this order"""
    result = run_trainer(MODEL, "--steps 1", options, cwd=sources)
    assert result.status == status, result
    assert words in (result.err if status else result.out.replace("\n", " "))


# ---- corpora with vocabularies and separators, and a mixture of two

SEPARATOR = {"token": 110, "place": "before"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Corpora, and two runs. Tests do not write there."""
    directory = tmp_path_factory.mktemp("corpora")
    write_corpus(directory / "a", 3, 1, {"vocab_size": 700, "separator": SEPARATOR})
    write_corpus(directory / "b", 2, 200, {"vocab_size": 800, "separator": None})
    run_trainer(MODEL, "--train-data a --val-data a --preset small --steps 2 --out run", cwd=directory).done()
    options = "--train-data 'x=a:1 y=b:3' --steps 4 --stop-after 2 --out mix"
    result = run_trainer(MODEL, options, cwd=directory).done()
    assert " 25.00% of the windows" in result.out
    return directory


def test_corpus_vocabulary_and_separator(corpora, tmp_path):
    """a run uses the vocabulary and separator of the corpus, and a resume its corpora"""
    assert vocabulary_of(corpora / "run", 2) == 700 and vocabulary_of(corpora / "mix", 2) == 800
    run_trainer(MODEL, "--train-data 'x=a:1 y=b:3' --steps 2 --dry-run --vocab 900", cwd=corpora).done()
    # 4 steps of 4 windows, a quarter of x and the rest of y
    y = read_json(corpora / "mix/run.json")["data"]["train"][1]
    assert [y[key] for key in ("name", "tokens", "windows", "weight", "epochs")] == ["y", 202, 12, 0.75, 1]
    shutil.copytree(corpora / "mix", tmp_path / "mix")
    run_trainer("--resume --out", tmp_path / "mix", cwd=corpora).done()


# ---- the order of a mixture


def write_pair(directory, a, b):
    """Two corpora of so many windows, and a mixture of equal weights."""
    for name, windows, step in (("a", a, 1), ("b", b, 3)):
        write_shard(directory / f"{name}.bin", [step * i * i % 251 for i in range(16 * windows + 1)])
    return "'a=a.bin:1 b=b.bin:1'"


def test_validation_of_a_mixture(tmp_path):
    """a validation of a whole mixture is the mean over its windows, each read once"""
    mixture, losses = write_pair(tmp_path, 10, 10), {}
    unequal = mixture.replace("a.bin:1", "a.bin:9")
    for data in ("a.bin", "b.bin", mixture, unequal):
        options = f"--eval {MODEL} --vocab 256 --val-steps 100 --eval-out eval.json --val-data {data}"
        run_trainer(options, cwd=tmp_path).done()
        losses[data] = read_json(tmp_path / "eval.json")["loss"]
    mean = (losses["a.bin"] + losses["b.bin"]) / 2
    assert losses[mixture] == pytest.approx(mean, abs=1e-6) and losses[unequal] == pytest.approx(mean, abs=1e-6)
    assert abs(losses["a.bin"] - mean) > 1e-5, "the test requires corpora of different losses"


def test_masks_of_documents(corpora, tmp_path):
    """--doc-mask changes the loss, but not that of data without a separator"""
    found = []
    for mask in ("", "--doc-mask", "--doc-mask --separator 110:after"):
        options = "--val-data a --init run/checkpoints/step_00000002 --eval --threads 1"
        result = run_trainer(options, mask, cwd=corpora).done()
        found.append(re.match(r"validation loss (\S+)", result.out)[1])
    assert found[0] == found[1], "validation has no separator, and the loss changes"
    options = "--train-data a --steps 6"
    run_trainer(MODEL, options, "--doc-mask --stats-every 1 --out", tmp_path / "masked", cwd=corpora).done()
    run_trainer(MODEL, options, "--out", tmp_path / "plain", cwd=corpora).done()
    masked, plain = ([r["loss"] for r in records(tmp_path / name, "train")] for name in ("masked", "plain"))
    assert len(masked) == len(plain) == 6 and masked != plain


# ---- directories


def test_accepted_directories(tmp_path):
    """a pattern may begin with NAME="""
    write_corpus(tmp_path / "lang=en", 1, 1)
    run_trainer(MODEL, "--train-data 'lang=en/*.bin' --steps 1", cwd=tmp_path).done()
    listed = [{"file": f"{name}.bin", "tokens": 101} for name in ("val_000000", "train_000001")]
    write_corpus(tmp_path / "listed", 1, 1, {"vocab_size": 203, "shards": listed})
    run_trainer(MODEL, "--train-data listed --val-data listed --steps 1", cwd=tmp_path).done()
