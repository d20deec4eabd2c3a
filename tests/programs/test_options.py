"""The command line: values at the edges, the help, and the options of a checkpoint. tests/golden/usage.txt has the
messages about invalid options."""

import json
import re

import pytest
from program import ROOT, USAGE, checkpoint, read_json, run_trainer, train
from ranks import run_ranks


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--lr 0 --min-lr-ratio 0 --warmup 0 --grad-clip 0 --beta1 0 --beta2 0 --weight-decay 0",
        "--sample-every 1 --top-k 0",
        "--skip-loss-z 0 --skip-grad-z=1e9",
        "--steps 1e3 --total-batch 1.048576e6 --batch-size 4E0 --seq-len 256 --warmup 1e+2",
        "--min-lr-ratio 1 --steps 7 --warmup 7 --seed 18446744073709551615 --schedule wsd",
        "--lr=.5 --eps=1E-8 --rope-theta=+5e5 --sample-every=1 --temperature=0",
        "--batch-size 2 --seq-len 16 --total-batch 96 --threads 1",
        "--rollback 2:10 --keep 1e15 --checkpoint-every 9300 --out /dev/null",
        "--no-tie-embeddings --no-resume --no-eval --attention baseline",
        "--sample-every 1 --prompt=--lr",
        "--match-params --ffn 45 --attention diff_v2",  # 44 narrower
        "--window 16777216",
        "--window 1 --full-every 4",
        "--sparse-blocks 4 --full-every 2",
        "--window 1 --yoco --layers 2 --attention diff_v1",
        "--window 0 --full-every 0 --no-yoco",
        "--attention diff_grouped_4 --heads 8 --kv-heads 2 --qk-norm --window 8 --yoco",
        "--attention diff_grouped_4 --heads 4 --kv-heads 1 --no-qk-norm",
    ],
)
def test_accepted_edges(arguments):
    """values at the edges of their ranges are accepted"""
    assert run_trainer("--dry-run", arguments).done().err == ""


# ---- help


def help_names(*words):
    """The names of the options that --help lists, whose lines have at most 80 columns."""
    result = run_trainer(*words).done()
    assert result.err == "" and max(len(line) for line in result.out.splitlines()) <= 80
    return re.findall(r"^  --((?:\[no-\])?[a-z0-9-]{1,63})[ ,\n]", result.out, re.M)


def test_help(corpus, tmp_path):
    """--help has a line for each option of every day, on one screen, and --help all lists every option"""
    result = run_trainer("--help").done()
    assert all(run_trainer(arguments) == result for arguments in ("-h", "--help=", "--lr x --help"))
    assert "Usage" not in run_trainer("--dry-run --sample-every 1 --prompt -h").done().out
    assert len(help_names("--help")) == result.out.count("\n  ") <= 25 and result.out.count("\n") <= 36
    train(corpus, tmp_path / "run", "--steps 2").done()
    options = read_json(tmp_path / "run/run.json")["options"]
    named = [("[no-]" if isinstance(value, bool) else "") + name for name, value in options.items()]
    assert help_names("--help all") == [*named, "help", "version"]
    assert run_trainer("--version").done().out.count("\n") == 1


def test_options_document():
    """docs/options.md contains the text of the help"""
    assert run_trainer("--help all").out in (ROOT / "docs/options.md").read_text()


# ---- checkpoints


def test_errors_of_ranks(tmp_path):
    """errors that depend on the rank count or a checkpoint are reported together"""
    (tmp_path / "run.json").write_text('{"options": {}}')
    result = run_ranks(3, "--resume --total-batch=2048 --out", tmp_path, cwd=ROOT)
    assert result.status == USAGE and result.err.count("\n") == 2
    assert "training requires --train-data" in result.err
    assert "times 3 ranks; use --total-batch 2304" in result.err


CONTEXT = 64
MODELS = {
    "plain": "--layers 3",
    "windows": "--layers 3 --window 8 --full-every 3",
    "yoco": "--layers 4 --window 8 --yoco",
    "qk-norm": "--layers 3 --qk-norm",
}


@pytest.fixture(scope="module")
def models(corpus, tmp_path_factory):
    """Checkpoints of MODELS, by name. Tests do not write there."""
    directory = tmp_path_factory.mktemp("models")
    shape = f"--hidden 64 --heads 4 --kv-heads 2 --head-dim 16 --ffn 96 --vocab 1000 --seq-len {CONTEXT}"
    model = f"--attention baseline {shape} --rope-theta 500000 --no-tie-embeddings"
    for name, options in MODELS.items():
        data = ["--train-data", corpus / "train.bin", "--batch-size 1 --steps 1 --out", directory / name]
        run_trainer(model, options, *data).done()
        path = checkpoint(directory / name, 1)
        (path / "trainer_state.json").unlink()  # has a checksum of the file that changes
        config = read_json(path / "config.json")
        (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    return {name: checkpoint(directory / name, 1) for name in MODELS}


AGREEING = [  # model, options
    ("plain", ""),
    ("plain", "--seq-len=32"),
    ("plain", "--layers=3 --vocab=1000 --no-tie-embeddings --attention=baseline"),
    ("plain", "--match-params --ffn=96"),
    ("windows", ""),
    ("windows", "--window=8 --full-every=3 --no-yoco"),
    ("yoco", "--yoco --window=8"),
    ("qk-norm", "--qk-norm"),
]


@pytest.mark.parametrize(("model", "options"), AGREEING, ids=[f"{m} {o}".strip() for m, o in AGREEING])
def test_loaded_model(corpus, models, tmp_path, model, options):
    """a model is loaded with options that agree with it, and any sequence length; loaded.txt has contradictions"""
    data = ["--train-data", corpus / "train.bin", "--steps 1 --out", tmp_path / "run"]
    run_trainer("--init", models[model], *data, options).done()
    context = 32 if "--seq-len" in options else CONTEXT
    wanted = {**read_json(models[model] / "config.json"), "max_position_embeddings": context}
    assert read_json(checkpoint(tmp_path / "run", 1) / "config.json") == wanted
    assert read_json(tmp_path / "run/run.json")["options"]["total-batch"] == 1024 // context * context
