"""The command line: values at the edges, the help, and the options of a checkpoint. tests/golden/usage.txt has the
messages about invalid options."""

import json
import re

import pytest
from program import DONE, FAILED, ROOT, USAGE, checkpoint, read_json, run_trainer, train
from ranks import run_ranks


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--lr 0 --min-lr-ratio 0 --warmup 0 --grad-clip 0 --beta1 0 --beta2 0 --weight-decay 0 --top-k 0",
        "--skip-loss-z 0 --skip-grad-z=1e9",
        "--steps 1e3 --total-batch 1.048576e6 --batch-size 4E0 --seq-len 256 --warmup 1e+2",
        "--min-lr-ratio 1 --steps 7 --warmup 7 --seed 18446744073709551615 --schedule wsd",
        "--lr=.5 --eps=1E-8 --rope-theta=+5e5 --temperature=0",
        "--batch-size 2 --seq-len 16 --total-batch 96 --threads 1",
        "--no-tie-embeddings --no-resume --no-eval --attention baseline",
        "--prompt=--lr",
        "--match-params --ffn 45 --attention diff_v2",  # 44 narrower
        "--window 16777216",
        "--window 1 --full-every 4",
        "--sparse-blocks 4 --full-every 2 --sparse-score apart",
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


def test_help(corpus, tmp_path):
    """the help lists every option, in 100 columns, and is what the program prints"""
    result = run_trainer("--help").done()
    assert all(run_trainer(arguments) == result for arguments in ("-h", "--lr x --help"))
    assert result.err == "" and max(len(line) for line in result.out.splitlines()) <= 100
    train(corpus, tmp_path / "run", "--steps 2 --no-tune-gemm").done()  # without a value it would be null
    options = read_json(tmp_path / "run/run.json")["options"]
    listed = re.findall(r"^  --(\[no-\])?([a-z0-9-]{1,63})[ ,\n]", result.out, re.M)
    assert listed[-2:] == [("", "help"), ("", "version")]
    assert listed[:-2] == [("[no-]" if isinstance(value, bool) else "", name) for name, value in options.items()]
    assert run_trainer("--version").done().out.count("\n") == 1


def test_options_document():
    """docs/options.md contains the text of the help"""
    assert run_trainer("--help").out in (ROOT / "docs/options.md").read_text()


# ---- checkpoints

ADOPTED = [  # options of the checkpoint as JSON; those given; exit status; the notes, or words of the error
    ('{"lr":0.001}', "", DONE, ""),
    ('{"lr":0.001}', "--lr=1e-3", DONE, ""),  # the same number, written otherwise
    ('{"lr":0.001}', "--lr=0.002", DONE, "option --lr: 0.001 in the checkpoint, 0.002 now\n"),
    ('{"val-data":null}', "--val-data=x", DONE, "option --val-data: none in the checkpoint, x now\n"),
    ('{"threads":3,"out":"y","eval-out":"z"}', "--threads=2", DONE, ""),  # of this start alone
    ('{"later":null}', "", DONE, ""),
    ('{"seed":1}', "--seed=1", DONE, ""),
    ('{"seed":1}', "--seed=2", USAGE, "--seed: 1 in the checkpoint, 2 now"),
    ('{"seq-len":256}', "--seq-len=128", USAGE, "--seq-len: 256 in the checkpoint, 128 now"),
    ('{"layers":4,"seed":1}', "--layers=5 --seed=3", USAGE, "--layers: 4 in the checkpoint, 5 now"),
    ('{"layers":4,"seed":1}', "--layers=5 --seed=3", USAGE, "--seed: 1 in the checkpoint, 3 now"),
    ('{"attention":"diff_v2"}', "--attention=baseline", USAGE, "--attention: diff_v2 in the checkpoint"),
    ('{"window":8}', "--window=9", USAGE, "--window: 8 in the checkpoint, 9 now"),
    ('{"window":8}', "--window=8", DONE, ""),
    ('{"full-every":2}', "--full-every=3", USAGE, "--full-every: 2 in the checkpoint, 3 now"),
    ('{"yoco":true}', "--no-yoco", USAGE, "--yoco: yes in the checkpoint, no now"),
    ('{"qk-norm":false}', "--qk-norm", USAGE, "--qk-norm: no in the checkpoint, yes now"),
    ('{"qk-norm":true}', "--no-qk-norm", USAGE, "--qk-norm: yes in the checkpoint, no now"),
    ('{"qk-norm":true}', "--qk-norm", DONE, ""),
    ('{"tie-embeddings":true}', "--no-tie-embeddings", USAGE, "--tie-embeddings: yes in the checkpoint, no now"),
]
ADOPTED += [
    # the file that earlier versions wrote
    ('{"tune-gemm":"table.json"}', "--tune-gemm", FAILED, "--tune-gemm requires a GPU"),
    ('{"tune-gemm":"table.json"}', "--no-tune-gemm", DONE, "option --tune-gemm: yes in the checkpoint, no now\n"),
    ('{"tune-gemm":null}', "", DONE, ""),
    # what this program does not write
    ('{"tune-gemm":1}', "", FAILED, "value of --tune-gemm"),
    ("[]", "", FAILED, "not a JSON object"),
    ("null", "", FAILED, "not a JSON object"),
    ('{"later":1}', "", FAILED, "--later, which this version does not support"),
    ('{"help":true}', "", FAILED, "--help, which"),
    ('{"lr":1,"lr":2}', "", FAILED, "--lr twice"),
    ('{"":1}', "", FAILED, "does not support"),
    ('{"lr":{}}', "--lr=1", FAILED, "value of --lr"),  # even where the flag wins
]
INVALID = {  # JSON values of options of the checkpoint
    "lr": '"a"|-1|1e999|true|[1]',
    "steps": "1.5|1e300|0",
    "seed": '-1|18446744073709551615|9007199254740994|"1e3"',  # 2^64 - 1: no double holds it; 2^53 + 2: may be rounded
    "layers": "4294967297",
    "window": "-1",
    "yoco": "1",
    "schedule": '0|""',
    "tie-embeddings": '1|"yes"',
    "train-data": 'true|5|""',  # not the text "yes"
}
ADOPTED += [
    (f'{{"{name}":{value}}}', "", FAILED, f"value of --{name}: it must be ")
    for name, values in INVALID.items()
    for value in values.split("|")
]


@pytest.fixture
def stopped(tmp_path):
    """A function that writes a run without a checkpoint, with these options as JSON, and returns its directory."""

    def write(options):
        (tmp_path / "run.json").write_text(f'{{"options": {options}}}')
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("saved", "given", "status", "words"), ADOPTED, ids=[f"{saved} {given}".strip() for saved, given, *_ in ADOPTED]
)
def test_adopt(stopped, saved, given, status, words):
    """a resumed run adopts the checkpoint's options, reports changes and rejects damaged ones"""
    result = run_trainer("--resume --dry-run --out", stopped(saved), given)
    assert result.status == status, result
    assert "".join(re.findall("option --.*\n", result.out)) == ("" if result.err else words)
    assert (words in result.err) == (status != DONE) or words == result.err


def test_errors_of_ranks(stopped):
    """errors that depend on the rank count or a checkpoint are reported together"""
    result = run_ranks(3, "--resume --total-batch=2048 --out", stopped("{}"), cwd=ROOT)
    assert result.status == USAGE and result.err.count("\n") == 2
    assert "training requires --train-data" in result.err
    assert "times 3 ranks; use --total-batch 6144" in result.err


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
    assert read_json(tmp_path / "run/run.json")["options"]["total-batch"] == 8 * context
