"""Lines of progress on a terminal, in a file and under mpirun; failures before the first step."""

import errno
import json
import os
import re
import shlex

import pytest
from program import FAILED, ROOT, SMALL, USAGE, run, run_trainer, trainer, words_of
from ranks import OPENMPI, skip_without_mpi


def on_terminal(corpus, terminal, options):
    """What a program of a terminal of 80 columns writes to it."""
    words = words_of([*trainer(), "--train-data train.bin", SMALL, options])
    command = f"stty cols 80; TERM={terminal} {shlex.join(map(str, words))}"
    return run("script -qec", shlex.quote(command), "/dev/null", cwd=corpus).done().out


def expect_plain(out, steps):
    """Whole lines, without control sequences."""
    assert len(re.findall("^step .*left", out, re.M)) == steps and "\033" not in out


def test_terminal(corpus):
    """a terminal of 80 columns has no fragments of lines"""
    out = on_terminal(corpus, "xterm", "--steps 200")
    assert "\r\033[K" in out and "tok/s" in out
    # each rewriting of a line, or line
    steps = [line.removeprefix("\033[K") for line in re.split("[\r\n]", out) if line.startswith("\033[Kstep")]
    assert steps and [line for line in steps if len(line) >= 80 or "tok/s" not in line] == []


@pytest.mark.full
def test_file(corpus):
    """a file, and a terminal without control sequences, get whole lines"""
    data = ["--train-data", corpus / "train.bin"]
    expect_plain(run_trainer(*data, SMALL, "--steps 50").done().out, 50)
    expect_plain(on_terminal(corpus, "dumb", "--steps 50"), 50)


def test_mpirun(corpus):
    """a program under mpirun writes whole lines, with any terminal"""
    skip_without_mpi()
    data = ["--train-data", corpus / "train.bin"]
    result = run("mpirun -q -n 1", *trainer(), *data, SMALL, "--steps 50", env={**OPENMPI, "TERM": "xterm"})
    expect_plain(result.done().out, 50)


def test_nan(corpus):
    """a number is never printed as -nan"""
    data = ["--train-data", corpus / "train.bin", "--val-data", corpus / "train.bin"]
    result = run_trainer(*data, SMALL, "--steps 4 --lr 1e30")
    text = result.out + result.err
    assert "nan" in text and "-nan" not in text
    # both maps of a pair are 1 in the only row, and cancel
    text = run_trainer(*data, "--attention diff_v2_no_lambda --seq-len 1 --val-steps 2 --threads 1 --eval").done().out
    assert " nan " in text and "-nan" not in text


def test_directory_error(corpus):
    """a directory that cannot be created is reported with the reason of mkdir, before other output"""
    # not even root can create a directory in /sys; before mkdir, a stat of the path fails with ENOENT
    result = run_trainer("--train-data", corpus / "train.bin", SMALL, "--out /sys/diffv2_test/run")
    result.one_line(FAILED, "cannot create the directory /sys/diffv2_test: ")
    assert os.strerror(errno.ENOENT) not in result.err and "options (" not in result.out


@pytest.mark.parametrize(
    "options",
    [
        "--train-data none.bin",
        "--train-data train.bin --val-data none.bin",
        "--train-data train.bin --sample-every 1 --tokenizer none",
        "--train-data train.bin --init none",
        "--train-data train.bin --doc-mask --vocab 300",
        "--train-data train.bin --hidden 1000000",
    ],
)
def test_early_failure(corpus, tmp_path, options):
    """an early failure leaves no directory and prints no list of options"""
    result = run_trainer(options, "--steps 2 --out", tmp_path / "some/where", cwd=corpus)
    assert result.status in (FAILED, USAGE) and "options (" not in result.out
    assert not (tmp_path / "some").exists()


def test_plot_in_a_locale_with_commas(tmp_path):
    """the plot of the losses has the numbers of the log in a locale that writes them with a comma"""
    run("localedef -i de_DE -f UTF-8", tmp_path / "de_DE.UTF-8")
    if not (tmp_path / "de_DE.UTF-8").exists():
        pytest.skip("localedef has no sources of locales")
    losses = [1.4 + 0.1 * i for i in range(15)]
    records = [json.dumps({"kind": "train", "step": 15 - i, "loss": loss}) for i, loss in enumerate(losses)]
    (tmp_path / "log.jsonl").write_text("\n".join(records) + "\n")
    locale = {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8"}
    plot = run("awk -f", ROOT / "scripts/plot_loss.awk", tmp_path / "log.jsonl", env=locale).done().out
    labels = re.findall(r"^ +([\d.,]+) \|", plot, re.M)
    assert [label.replace(",", ".") for label in labels] == [f"{loss:.2f}" for loss in losses[::-2]]
