"""The command line: invalid options, their combinations, the help, and the options of a checkpoint."""

import json
import re
import shlex

import pytest
from program import DONE, FAILED, ROOT, USAGE, checkpoint, read_json, run_trainer, train
from ranks import run_ranks

QUANTIZED = "wNaM, wNaM:tensor, logitsN, or two of these joined by '+', with 2 to 8 bits, or 16 for"
INVALID_VALUES = [  # what these options accept; a mode; the options; values that they do not accept
    ("a whole number in [0, 16777216]", "--dry-run", "--window", "-1 16777217 1.5"),
    ("a whole number in [0, 65536]", "--dry-run --window 8", "--full-every", "65537"),
    ("a non-empty text", "--dry-run", "--out", "''"),
    ("a number in [0, inf)", "--dry-run", "--lr", "1e 0x10 '' ' 3' '3 ' nan inf 1,5 1e-3. -1e-3"),
    ("a number in [0, inf), 0 or of a magnitude from 2.3e-308 to 1.7e308", "--dry-run", "--lr", "1e999 1e-999"),
    ("a number in [0, inf)", "--dry-run", "--skip-loss-z --grad-clip --weight-decay --temperature", "-1"),
    ("a number in [0, inf)", "--dry-run", "--skip-grad-z", "inf"),
    ("a number in (0, inf)", "--dry-run", "--eps --rope-theta", "0"),
    ("a number in [0, 1]", "--dry-run", "--min-lr-ratio", "1.01"),
    ("a number in [0, 1)", "--dry-run", "--beta1", "1"),
    ("a number in [0, 1)", "--dry-run", "--beta2", "-0.1"),
    ("a whole number in [1, 1e15]", "--dry-run", "--steps", "1.5 1.5e0 1e16 1e-1 e3 1e 1. 0x10 ' 3' +3 '' 3k 0 -1"),
    # 2^63, 2^64 + 1, and 1 as a number of 32 bits
    ("a whole number in [1, 1e15]", "--dry-run", "--steps", "9223372036854775808 18446744073709551617"),
    ("a whole number in [1, ", "--dry-run", "--layers", "4294967297"),
    ("a whole number in [1, ", "--dry-run", "--layers --batch-size --threads --val-steps", "0"),
    ("a whole number in [1, 1e9]", "--train-data x", "--generate", "0"),
    ("a whole number in [8, 256]", "--dry-run", "--head-dim", "512"),
    ("a whole number in [0, 18446744073709551615]", "--dry-run", "--seed", "-1 18446744073709551616"),
    ("one of fp32, bf16, fp8", "--dry-run", "--gemm", "''"),
    ("one of baseline, diff_v2", "--dry-run", "--attention", "flash ''"),
    ("token IDs separated by commas", "--generate 3", "--prompt-tokens", "1,x 1,,2 1, -1 2147483648"),
    (QUANTIZED, "--eval --val-data x", "--quantize", "w1a8 w166a8 w8a8:channel logits logitsw8a8 w8a8+w4a4 w8a8+"),
    (QUANTIZED, "--eval --val-data x", "--quantize", "logits8+logits4"),
]
MISTAKES = {  # words of the error: arguments
    "unknown option --bogus: ": ["--bogus 1", "--bogus=1"],
    "--fp8-fast-accum requires --gemm fp8, not fp32": ["--dry-run --device H200 --fp8-fast-accum"],
    "--fp8-fast-accum requires a GPU: sums are fp32 on a CPU": ["--dry-run --gemm fp8 --fp8-fast-accum"],
    "unknown option --wd: did you mean --weight-decay?": ["--wd 0.1"],  # never -w 0
    "unknown option -wd: did you mean --weight-decay?": ["-wd 0.1"],
    "unknown option --learning-rate: did you mean --lr?": ["--learning-rate 0.1"],
    "unknown option --learning_rate: did you mean --lr?": ["--learning_rate=0.1"],
    "did you mean --batch-size?": ["--batch_size 4", "--batch 4"],
    "did you mean --steps?": ["--Steps 4", "--step 4"],
    "unknown option -l: ": ["-l 3"],
    "did you mean --warmup?": ["--warm-up=4"],
    "did you mean --train-data?": ["--trian-data 'x*'"],
    "did you mean --no-tie-embeddings?": ["--no-tie-embedings"],
    "unknown option --no-lr: ": ["--no-lr"],
    "unknown option --: ": ["--"],
    "unknown option --kept: ": ["--kept 3 --dry-run"],
    "unexpected argument '5'": ["--dry-run 5"],
    "unexpected argument 'shards.bin'": ["shards.bin --dry-run"],
    "unexpected argument ''": ["'' --dry-run"],
    "unexpected argument '-5'": ["-5 --dry-run"],
    "--dry-run takes no value, not 'yes'": ["--dry-run=yes"],
    "--dry-run takes no value, not '1'": ["--no-dry-run=1 --dump-grads x --train-data x"],
    "--lr requires a value: a number in [0, inf)": ["--lr --dry-run", "--dry-run --lr"],
    "--lr '' is not accepted": ["--dry-run --lr="],
    "--out requires a value": ["--dry-run --out --seed 1"],
    "--out '' is not accepted": ["--dry-run --out="],
    "--window 'all' is not accepted": ["--dry-run --window all --yoco"],  # not: YOCO requires a window
    "--full-every 2 requires --window W or --sparse-blocks K (--attention": ["--dry-run --full-every 2"],
    "--sparse-blocks 0 selects no block": ["--dry-run --sparse-blocks 0"],
    "5 sparse blocks are more than the 4 blocks of 256 positions": ["--dry-run --sparse-blocks 5"],
    "a sparse block size of 48 does not divide the sequence length, 256": [
        "--dry-run --sparse-blocks 1 --sparse-block-size 48"
    ],
    "a window of 63 is shorter than a sparse block, 64": ["--dry-run --sparse-blocks 1 --window 63"],
    "sparse score signal requires noise heads, which baseline does not have": [
        "--dry-run --attention baseline --sparse-blocks 1 --sparse-score signal"
    ],
    "sparse score apart requires noise heads, which sink does not have": [
        "--dry-run --attention sink --sparse-blocks 1 --sparse-score apart"
    ],
    "in diff_v2_cross_group some key/value groups have noise heads alone": [
        "--dry-run --attention diff_v2_cross_group --sparse-blocks 1 --sparse-score signal"
    ],
    "--sparse-score requires --sparse-blocks K": ["--dry-run --sparse-score apart"],
    "--quantize logitsN does not support --sparse-blocks": ["--eval --val-data x --sparse-blocks 1 --quantize logits8"],
    "--dump-qkv does not support --sparse-blocks": ["--eval --val-data x --sparse-blocks 1 --dump-qkv x"],
    "--full-every 1 leaves all layers full": ["--dry-run --window 8 --full-every 1"],
    "--full-every 5 is more than the 4 layers": ["--dry-run --window 8 --full-every 5"],
    "YOCO requires a window for the lower half of the layers (--attention": ["--dry-run --yoco"],
    "--yoco and --full-every are mutually exclusive": ["--dry-run --yoco --window 8 --full-every 2"],
    "YOCO requires an even number of layers, not 3": ["--dry-run --yoco --window 8 --layers 3"],
    "unexpected argument '8'": ["--dry-run --yoco 8 --window 8"],
    "--gemm 'fp4' is not accepted: did you mean fp8? It must be one of fp32, bf16, fp8": ["--dry-run --gemm fp4"],
    "did you mean fp8?": ["--dry-run --gemm FP8"],
    "--attention 'diff' is not accepted: did you mean diff_v2? --help lists all": ["--dry-run --attention diff"],
    "--attention 'diffv2' is not accepted: did you mean diff_v2?": ["--dry-run --attention diffv2"],
    "did you mean diff_v1?": ["--dry-run --attention DIFF_V1"],
    "'diff_grouped_3' is not accepted: did you mean diff_grouped_2? --help lists all": [
        "--dry-run --attention diff_grouped_3"
    ],
    "--preset '124M' is not accepted: did you mean 124m?": ["--dry-run --preset 124M"],
    "did you mean cosine? It must be one of cosine, linear, wsd, constant": ["--dry-run --schedule cos"],
    "--schedule 'a?b'": ["--dry-run --schedule 'a\nb'"],  # a line stays a line
    "--lr is specified more than once": ["--dry-run --lr 1 --lr 1", "--dry-run --lr=1 --seed 2 --lr 2"],
    "--tie-embeddings is specified more than once": ["--dry-run --tie-embeddings --no-tie-embeddings"],
    "training requires --train-data": ["", "--steps 10"],
    "--eval requires --val-data": ["--eval --train-data x"],
    "--dump-grads requires --train-data": ["--dump-grads x --val-data x"],
    "--prompt is not valid UTF-8 at byte 4: use UTF-8, or --prompt-tokens": ["--generate 3 --prompt 'aé\udcffx'"],
    "--resume requires --out": ["--resume"],
    "--init and --resume are mutually exclusive": ["--init a --resume --out b"],
    "--eval and --dry-run are mutually exclusive": ["--eval --dry-run --val-data x"],
    "--dump-grads and --generate and --eval and --dry-run are mutually exclusive": [
        "--eval --dump-grads y --generate 3 --dry-run --train-data x --val-data x"
    ],
    "--quantize requires --eval": ["--train-data x --quantize w8a8"],
    "--eval-needles was removed: data/synthetic_tasks.py needles writes these tasks as a file for --eval-choices": [
        "--train-data x --eval-needles 4:2"
    ],
    "--eval-shots was removed: data/synthetic_tasks.py shots": ["--train-data x --eval-shots=4"],
    "--tune-gemm takes no value, not 'y': the choices are part of --out, and a resumed run uses them": [
        "--train-data x --tune-gemm y"
    ],
    "--probe was removed: 'python3 scripts/lab probe' computes its numbers from a file of": ["--probe x --val-data y"],
    "--dump-qkv requires --eval": ["--train-data x --dump-qkv y"],
    "--quantize 'w9a8' is not accepted: it must be wNaM, wNaM:tensor": ["--eval --val-data x --quantize w8a8,w9a8"],
    "--quantize '' is not accepted": ["--eval --val-data x --quantize w8a8,"],
    "--quantize 'w16a16:tensor+logits16+logits": [
        "--eval --val-data x --quantize w16a16:tensor+logits16+logits16+logits16"
    ],
    "--warmup 11 is more than --steps 10": ["--dry-run --steps 10 --warmup 11"],
    "is not a multiple of --batch-size 3 times --seq-len 5 times 1 rank; use --total-batch 45": [
        "--dry-run --batch-size 3 --seq-len 5 --total-batch 44"
    ],
    "1 rank; use --batch-size 6 or --total-batch 128": ["--dry-run --batch-size 8 --seq-len 16 --total-batch 96"],
    "3 ranks; use --batch-size 2 or --total-batch 384": [
        "--dry-run --batch-size 8 --seq-len 16 --total-batch 96 --ranks 3"
    ],
    "1 rank; use --batch-size 7 or --total-batch 128": ["--dry-run --batch-size 8 --seq-len 16 --total-batch 112"],
    "is more than 2147483647 tokens": ["--dry-run --batch-size 1000000 --seq-len 1000000"],
    "3 heads are not a multiple of 2 key/value heads (--attention diff_v2 --layers 4 --heads": ["--dry-run --heads 3"],
    "--kv-heads 3": ["--dry-run --kv-heads 3", "--dry-run --match-params --kv-heads 3"],
    # a noise head has signal heads of one key/value group only
    "diff_grouped_4 needs a multiple of 4 heads for each key/value head, not 8 heads for 4": [
        "--dry-run --attention diff_grouped_4 --heads 8 --kv-heads 4"
    ],
    "diff_grouped_2 needs a multiple of 2 heads for each key/value head, not 6 heads for 2": [
        "--dry-run --attention diff_grouped_2 --heads 6 --kv-heads 2"
    ],
    "--qk-norm takes no value, not '1'": ["--dry-run --qk-norm=1"],
    "--qk-norm is specified more than once": ["--dry-run --qk-norm --no-qk-norm"],
    "did you mean --qk-norm?": ["--dry-run --qk_norm"],
    "--match-params: diff_v2 has more parameters than the baseline with --ffn 40": [
        "--dry-run --match-params --ffn 40"
    ],
    "--ffn '4x'": ["--dry-run --match-params --ffn 4x"],  # and no word of what the preset's would come to
    "--match-params takes no value": ["--dry-run --match-params=1"],
    "--match-params is specified more than once": ["--dry-run --match-params --no-match-params"],
}
WRONG = [(arguments, words) for words, wrong in MISTAKES.items() for arguments in wrong] + [
    (f"{mode} {option} {shlex.quote(value)}", f"{option} '{value}' is not accepted: it must be {accepted}")
    for accepted, mode, options, values in INVALID_VALUES
    for option in options.split()
    for value in shlex.split(values)
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_wrong_options(arguments, words):
    """every invalid option ends the program with status 2 and a line that states what is accepted"""
    result = run_trainer(arguments).one_line(USAGE, words)
    assert result.err.startswith("diffv2: ") and not result.out


WITHOUT_EFFECT = [  # arguments, words of the warning; "": none
    ("--dry-run --sdpa-linear", "--sdpa-linear has no effect on a CPU"),
    ("--dry-run --no-deterministic", "--no-deterministic has no effect on a CPU"),
    ("--dry-run --measure-peak", "--measure-peak has no effect on a CPU"),
    ("--dry-run --stop-after 9 --steps 3", "--stop-after 9 has no effect: the run ends after --steps 3"),
    ("--dry-run --val-every 2", "--val-every has no effect without --val-data"),
    ("--dry-run --muon-split head", "--muon-split has no effect with --optimizer adamw"),
    ("--dry-run --rollback 1:2", "--rollback has no effect without --out"),
    ("--train-data none --checkpoint-every 2", "--checkpoint-every has no effect without --out"),
    ("--dry-run --sdpa-linear --device H100", ""),
    ("--dry-run --deterministic --no-measure-peak --stop-after 3 --steps 3", ""),
    ("--dry-run --checkpoint-every 2 --keep 2", ""),
]


@pytest.mark.parametrize(("arguments", "words"), WITHOUT_EFFECT, ids=[arguments for arguments, _ in WITHOUT_EFFECT])
def test_options_without_effect(arguments, words):
    """an option that changes nothing is reported"""
    err = run_trainer(arguments).err
    assert words in err if words else not err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "--bogus 1 --lr 1e file --seed 1 --seed 2 --beta1=1 --init x --resume --out",
            [
                "unknown option --bogus",
                "--lr '1e'",
                "'file'",
                "--seed is specified more than once",
                "--beta1 '1'",
                "--init and --resume",
                "--out requires",
            ],
        ),
        # options against each other at once, when no checkpoint has a say
        ("--lr 1e --warmup 200 --steps 5 --heads 3 --batch-size 2 --total-batch 7", 5 * [""]),
        # a refused number brings no second error about the default in its place
        ("--dry-run --steps 1k --warmup 200 --heads 3x --kv-heads 3 --total-batch x", 3 * [""]),
    ],
    ids=["mistakes", "combinations", "refused numbers"],
)
def test_all_at_once(arguments, words):
    """all errors of a command line are reported together"""
    result = run_trainer(arguments)
    assert (result.status, result.err.count("\n")) == (USAGE, len(words))
    assert [text for text in words if text not in result.err] == []


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


CONTRADICTIONS = [  # model, options, number of contradictions, words of one
    ("plain", "", 0, ""),
    ("plain", "--seq-len=32", 0, ""),
    ("plain", "--layers=3 --vocab=1000 --no-tie-embeddings --attention=baseline", 0, ""),
    ("plain", "--layers=4", 1, "--layers 4 contradicts the loaded model, which has 3"),
    ("plain", "--vocab=256", 1, "--vocab 256 contradicts"),
    ("plain", "--attention=diff_v1", 1, "--attention diff_v1 has no exact start"),
    ("plain", "--rope-theta=10000", 1, "--rope-theta 10000 contradicts"),
    ("plain", "--window=8", 1, "--window 8 contradicts the loaded model, which has 0"),
    ("plain", "--yoco", 1, "--yoco contradicts the loaded model, which has --no-yoco"),
    ("windows", "", 0, ""),
    ("windows", "--window=8 --full-every=3 --no-yoco", 0, ""),
    ("windows", "--window=9", 1, "--window 9 contradicts the loaded model, which"),
    ("windows", "--full-every=0", 1, "--full-every 0 contradicts the loaded model, which has 3"),
    ("yoco", "", 0, ""),
    ("yoco", "--yoco --window=8", 0, ""),
    ("yoco", "--no-yoco", 1, "--no-yoco contradicts the loaded model, which has --yoco"),
    ("plain", "--qk-norm", 1, "--qk-norm contradicts the loaded model, which has --no-qk-norm"),
    ("qk-norm", "", 0, ""),
    ("qk-norm", "--qk-norm", 0, ""),
    ("qk-norm", "--no-qk-norm", 1, "--no-qk-norm contradicts the loaded model, which has --qk-norm"),
    ("plain", "--tie-embeddings", 1, "--tie-embeddings contradicts"),
    ("plain", "--heads=2 --ffn=95 --head-dim=8", 3, "--ffn 95 contradicts"),
    ("plain", "--match-params --ffn=96", 0, ""),
    ("plain", "--match-params --ffn=95", 1, "--ffn 95 requires an MLP width of 95; the loaded model has 96"),
    (
        "plain",
        "--match-params --preset=tiny --hidden=64 --layers=3 --head-dim=16 --vocab=1000",
        2,
        "--ffn 352 requires an MLP width of 352; the loaded",
    ),
    # tiny differs in layers, hidden, head-dim, ffn, vocab and tied; heads and key/value heads agree
    ("plain", "--preset=tiny", 6, "--preset tiny, with --layers 4, contradicts"),
    ("plain", "--preset=tiny --layers=3 --no-tie-embeddings", 4, "--hidden 128"),
]


@pytest.mark.parametrize(
    ("model", "options", "count", "words"), CONTRADICTIONS, ids=[f"{m} {o}".strip() for m, o, *_ in CONTRADICTIONS]
)
def test_contradictions(corpus, models, tmp_path, model, options, count, words):
    """architecture options that contradict a loaded model are rejected, a sequence length is not"""
    data = ["--train-data", corpus / "train.bin", "--steps 1 --out", tmp_path / "run"]
    result = run_trainer("--init", models[model], *data, options)
    assert (result.status, result.err.count("\n")) == (USAGE if count else DONE, count) and words in result.err
    if not count:
        context = 32 if "--seq-len" in options else CONTEXT
        wanted = {**read_json(models[model] / "config.json"), "max_position_embeddings": context}
        assert read_json(checkpoint(tmp_path / "run", 1) / "config.json") == wanted
        assert read_json(tmp_path / "run/run.json")["options"]["total-batch"] == 8 * context
