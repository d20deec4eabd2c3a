"""What training, --eval and several ranks report of multiple-choice tasks."""

import pytest
from choices import Example, write_choices
from program import GRAMMAR, SMALL, read_json, records, run_trainer, same_numbers, write_random_choices
from ranks import SMALL_OF_RANKS, run_ranks


def write_grammar_choices(path):
    """Sentences of the grammar of train.bin: their ends, as they are and with their letters in reverse."""
    examples = []
    for e in range(24):
        word, label = GRAMMAR[3][e // 3].encode(), e % 2
        completions = [list(word if c == label else word[::-1]) for c in range(2)]
        examples.append(Example(list(GRAMMAR[2][e % 8].encode()), completions, label))
    write_choices(path, examples, 256)


@pytest.mark.full
def test_choices_of_training(corpus, tmp_path):
    """training logs its choices, a resumed run the same, and --eval the same"""
    # In bf16 the LM head has a rounded copy, which nothing but the tasks refreshes after an update.
    write_grammar_choices(tmp_path / "grammar.bin")
    write_random_choices(tmp_path / "random.bin", 12, 3, seed=5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["--train-data", corpus / "train.bin", SMALL, "--steps 60 --lr 1e-2 --matmul-dtype bf16 --val-every 20"]
    options += ["--eval-choices 'words=grammar.bin other=random.bin'"]
    result = run_trainer(*options, "--out", whole, cwd=tmp_path).done()
    assert "step 60: words: accuracy " in result.out
    words = records(whole, "choices", name="words")
    assert [r["step"] for r in words] == [0, 20, 40, 60]
    assert words[3]["examples"] == 24 and words[3]["chance"] == 0.5
    assert words[0]["accuracy"] < 0.8 and words[3]["accuracy"] > 0.9
    expect_choices_of_eval(corpus, whole, words[3])
    other = records(whole, "choices", name="other")
    assert len(other) == 4 and abs(other[3]["chance"] - 1 / 3) < 1e-8 and other[3]["bits_per_byte"] > 1
    run_trainer(*options, "--stop-after 20 --out", parts, cwd=tmp_path).done()
    run_trainer("--out", parts, "--resume --threads 2", cwd=tmp_path).done()
    assert records(parts, "choices", name="words") == words


def expect_choices_of_eval(corpus, run, record):
    """What --eval writes of the checkpoint of the last record equals that record, and run.json names the tasks."""
    evaluation = ["--eval --val-data", corpus / "val.bin", "--val-steps 2 --threads 2 --eval-out eval"]
    result = run_trainer("--out", run, "--resume", *evaluation, cwd=run.parent).done()
    assert "multiple choice\n  words: accuracy " in result.out
    tasks = read_json(run.parent / "eval")["choices"]
    assert len(tasks) == 2
    for key in "examples accuracy accuracy_se accuracy_norm bits_per_byte bits_per_byte_se chance".split():
        assert abs(tasks[0][key] - record[key]) < 1e-8, key
    assert tasks[0]["fingerprint"] == record["fingerprint"]
    assert [task["examples"] for task in read_json(run / "run.json")["data"]["choices"]] == [24, 12]


@pytest.mark.full
def test_choices_of_ranks(corpus, tmp_path):
    """choices do not depend on ranks or on the sizes of batches"""
    # Of three ranks one has none of the two examples.
    write_random_choices(tmp_path / "many.bin", 40, 3, seed=5, wide=True)
    write_random_choices(tmp_path / "two.bin", 2, 3, seed=6)
    options = ["--train-data", corpus / "train.bin", SMALL_OF_RANKS, "--steps 2"]
    options += ["--eval-choices 'many=many.bin two=two.bin'"]
    run_trainer(*options, "--batch-size 12 --out run0", cwd=tmp_path).done()
    for ranks in (1, 2, 3):
        run_ranks(ranks, *options, f"--batch-size {ranks} --out run{ranks}", cwd=tmp_path).done()
        for name in ("many", "two"):
            (wanted,) = records(tmp_path / "run0", "choices", name=name, step=0)
            (found,) = records(tmp_path / f"run{ranks}", "choices", name=name, step=0)
            same_numbers(wanted, found)
