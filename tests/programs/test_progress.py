"""Lines of progress on a terminal, in a file and under mpirun; failures before the first step."""

import errno
import json
import math
import os
import re
import shlex

import pytest
from program import FAILED, ROOT, SMALL, USAGE, program, records, run, run_trainer, trainer, words_of
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
    assert os.strerror(errno.ENOENT) not in result.err and "given:" not in result.out


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
    assert result.status in (FAILED, USAGE) and "given:" not in result.out
    assert not (tmp_path / "some").exists()


def paragraph(text, title):
    """The words after a title, with the lines that continue them."""
    return re.search(rf"^{title}:((?: .*\n)+)", text, re.M)[1].split()


def test_start_and_end(tmp_path):
    """the start prints given options and those that differ from the defaults, the end what comes next"""
    pages = sorted(ROOT.glob("docs/*.md"))
    run(*program("TEXT_TO_SHARDS", "./text_to_shards"), "--bpe 512 --out corpus", *pages, cwd=tmp_path).done()
    data = "--train-data corpus --val-data corpus --out 'a run'"
    result = run_trainer(data, SMALL, "--steps 5 --no-tie-embeddings --val-steps 9999", cwd=tmp_path).done()
    given = paragraph(result.out, "given")
    assert "--no-tie-embeddings" in given and "'a run'" in " ".join(given) and "--vocab" not in given
    assert paragraph(result.out, "not default") == ["--vocab", "512"]
    for line in (
        r"parameters: \d+, diff_v2, 2 layers, hidden 24, vocabulary 512, context 16",
        r"training from step 0 to 5: 320 tokens, 64 in a step \(1 micro-step of 4 x 16\)",
        r"memory: \d+ MiB of this process; .*",
        r"time: at least .*",
        r"curves: scripts/export/export_run.py 'a run' --follow --tensorboard DIR  # or --wandb PROJECT",
        r"loss: training \d.* \(mean of the last 5 steps\), validation \d.* nats per token, \d.* bits per byte",
        r"--- sample after step 5",
        r"checkpoint           a run/checkpoints/step_00000005",
        r"  .*train_diffv2 --out 'a run' --resume --interactive  # continues your text",
        r"  .*train_diffv2 --out 'a run' --resume --steps 10  # trains as long again",
    ):
        assert re.search(f"^{line}$", result.out, re.M), (line, result.out)
    # bits per byte, by the validation data as bytes of text
    corpus = json.loads((tmp_path / "corpus/corpus.json").read_text())
    loss, bits = map(float, re.search(r"validation (\S+) nats per token, (\S+) bits", result.out).groups())
    whole = loss / math.log(2) * corpus["val_tokens"] / corpus["val_text_bytes"]
    assert abs(bits / whole - 1) < 0.002
    assert records(tmp_path / "a run", "val")[-1]["bits_per_byte"] == pytest.approx(bits, abs=6e-4)
    # a resume shows what the checkpoint has, and the commands again, but not how to export the curves
    result = run_trainer("--out 'a run' --resume --steps 6", cwd=tmp_path).done()
    assert paragraph(result.out, "given") == ["--steps", "6", "--out", "'a", "run'", "--resume"]
    assert {"--layers", "--no-tie-embeddings", "--train-data"} <= set(paragraph(result.out, "not default"))
    assert "curves:" not in result.out and "--resume --steps 12" in result.out


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
