"""The tokenizer of a corpus in a run, its checkpoints and its texts."""

import filecmp
import shutil

import pytest
import token_table
from program import FAILED, SHAPE, Random, checkpoint, run_trainer, write_corpus

MODEL = f"{SHAPE} --batch-size 4 --warmup 1 --threads 1"
MERGES = 60
END = 256 + MERGES
CLASSES = [(9, 13, 4), (32, 32, 4), (48, 57, 2), (65, 90, 1), (97, 122, 1), (0xE9, 0xE9, 1)]  # spaces, digits, letters


def toy_table(seed, reason=""):
    """256 bytes, then random merges of short tokens over a few letters, then "<|end|>"."""
    random, letters = Random(seed), list(b"abc ")
    tokens, merges = [bytes([byte]) for byte in range(256)], {}
    while len(merges) < MERGES:
        left, right = (letters[random.below(len(letters))] for _ in range(2))
        if (left, right) not in merges and len(tokens[left] + tokens[right]) <= 60:
            merges[left, right] = len(tokens)
            letters.append(len(tokens))
            tokens.append(tokens[left] + tokens[right])
    merges = [(*pair, token) for pair, token in merges.items()]
    table = {"kind": 1, "tokens": [*tokens, b"<|end|>"], "flags": 0, "merges": merges, "added": [END]}
    pattern = 0 if reason else token_table.PATTERNS[token_table.GPT2]
    return token_table.table_bytes({**table, "pattern": pattern, "reason": reason}, END)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Corpora with different tokenizers, a table that encodes no text, and a run. Tests do not write there."""
    directory = tmp_path_factory.mktemp("toy")
    separator = {"token": END, "place": "before"}
    write_corpus(directory / "a", 2, 1, {"vocab_size": END + 1, "separator": separator})
    write_corpus(directory / "b", 1, 1, {"vocab_size": END + 1})
    write_corpus(directory / "bytes", 1, 1, {"vocab_size": 256, "tokenizer": "bytes"})
    write_corpus(directory / "table", 1, 1, {"vocab_size": 256, "tokenizer": "bytes"})
    write_corpus(directory / "named", 1, 1, {"vocab_size": END + 1, "tokenizer": "gpt2"})
    write_corpus(directory / "plain", 1, 1)
    (directory / "a/tokenizer.json").write_text("{}\n")
    token_table.write_table("bytes", directory / "table/tokenizer.bin", 0)
    with pytest.MonkeyPatch.context() as patch:  # the classes of all characters require the tokenizers library
        patch.setattr(token_table, "class_ranges", lambda parts: CLASSES)
        (directory / "a/tokenizer.bin").write_bytes(toy_table(1))
        (directory / "b/tokenizer.bin").write_bytes(toy_table(2))
        (directory / "toy.bin").write_bytes(toy_table(1, "it is a toy"))
    options = "--train-data a --steps 2 --sample-every 1 --prompt 'ab é<|end|>' --checkpoint-every 1 --out run"
    result = run_trainer(MODEL, options, cwd=directory).done()
    assert "ab é\n\n" in result.out  # the separator is printed as the end of a paragraph
    run_trainer(MODEL, f"--vocab {END + 1} --train-data bytes --steps 1 --out of_bytes", cwd=directory).done()
    return directory


def test_tokenizer_of_run(toy):
    """a run and its checkpoints use the tokenizer of the corpus"""
    saved = checkpoint(toy / "run", 2)
    for name in ("tokenizer.bin", "tokenizer.json"):
        assert filecmp.cmp(toy / "a" / name, saved / name, shallow=False)
        assert name in (saved / "trainer_state.json").read_text()
    for options, text in [
        ("--generate 5 --prompt 'x y'", "x y"),
        ("--generate 3 --prompt-tokens 120,32,121", "x y"),
        ("--generate 1 --temperature 0", ""),
    ]:
        assert run_trainer("--init", saved, options).done().out.startswith(text)


REFUSED = [  # options, words of the error
    ("--init run/checkpoints/step_00000002 --generate 5 --prompt-tokens 1,317", "token 317"),
    ("--init run/checkpoints/step_00000002 --train-data b", "different tokenizers"),
    ("--init run/checkpoints/step_00000002 --generate 5 --tokenizer none", "none"),
    ("--init run/checkpoints/step_00000002 --generate 5 --tokenizer run/run.json", "not a token table"),
    ("--train-data 'x=a:1 y=b:1'", "different tokenizers"),
    ("--train-data a --val-data bytes", "a and bytes have different tokenizers"),
    (f"--vocab {END + 1} --train-data bytes --val-data a", "bytes and a have different tokenizers"),
    (f"--vocab {END + 1} --train-data named --val-data table", "table and named have different tokenizers"),
    ("--train-data 'x=a:1 y=bytes:1'", "different tokenizers"),
    ("--train-data 'x=a:1 y=table:1'", "different tokenizers"),
    ("--train-data 'x=bytes:1 y=named:1'", "different tokenizers"),
    ("--init run/checkpoints/step_00000002 --train-data bytes", "different tokenizers"),
    ("--init run/checkpoints/step_00000002 --eval --val-data bytes", "different tokenizers"),
    ("--init of_bytes/checkpoints/step_00000001 --train-data a", "different tokenizers"),
    ("--out run --resume --val-data bytes --steps 4", "different tokenizers"),
    ("--out of_bytes --resume --val-data a --steps 4", "different tokenizers"),
    ("--out run --resume --train-data b --steps 4", "different tokenizers"),
    ("--vocab 300 --generate 5 --tokenizer a", "317 tokens"),
    ("--vocab 300 --generate 5 --prompt a", "no tokenizer"),
    ("--vocab 317 --generate 2 --tokenizer toy.bin --prompt a", "it is a toy"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[options for options, _ in REFUSED])
def test_refused_tokenizers(toy, options, words):
    """tokenizers that differ, that do not fit or that encode no text are errors"""
    run_trainer("--threads 1 --seq-len 16", options, cwd=toy).one_line(FAILED, words)


@pytest.mark.parametrize("other", ["table", "plain/*.bin"])
def test_corpora_of_bytes(toy, other):
    """corpora of bytes have one tokenizer, with and without a table, and one of unknown tokens may be read with them"""
    options = f"--train-data bytes --val-data {other} --steps 1 --sample-every 1 --prompt ab"
    assert "\nab" in run_trainer(MODEL, options, "--vocab 300", cwd=toy).done().out
    run_trainer(MODEL, f"--train-data 'x=bytes:1 y={other}:1' --vocab 256 --steps 1", cwd=toy).done()
    run_trainer("--init of_bytes/checkpoints/step_00000001 --train-data", other, "--steps 1", cwd=toy).done()


def test_table_that_encodes_no_text(toy):
    """a table that encodes no text decodes tokens"""
    result = run_trainer(MODEL, "--vocab 317 --generate 2 --tokenizer toy.bin --prompt-tokens 97,98", cwd=toy).done()
    assert result.out.startswith("ab")


def test_damaged_tokenizers(toy, tmp_path):
    """a tokenizer that cannot be read is an error, and a changed one makes a resume take an earlier checkpoint"""
    shutil.copytree(toy, tmp_path / "toy")
    (tmp_path / "toy/a/tokenizer.json").unlink()
    (tmp_path / "toy/a/tokenizer.json").mkdir()  # there, and cannot be read
    run_trainer(MODEL, "--train-data a", cwd=tmp_path / "toy").one_line(FAILED, "a/tokenizer.json")
    with (checkpoint(tmp_path / "toy/run", 2) / "tokenizer.bin").open("a") as table:
        table.write("x\n")
    result = run_trainer("--out run --resume --steps 3", cwd=tmp_path / "toy").done()
    assert "tokenizer.bin has" in result.err
