"""--generate, --prompts, --interactive and samples during training: what they depend on and print."""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time

import fixtures
import pytest
from program import DONE, FAILED, FIXTURE, SECONDS, USAGE, checkpoint, records, run_trainer, train, trainer, words_of

MODEL = "--vocab 256 --seq-len 16"


def lines_of(result, count):
    """The lines of stdout as JSON: each is printable UTF-8 and has all keys."""
    result.out.encode()  # fails if a byte is not UTF-8
    lines = result.out.split("\n")
    assert lines.pop() == "" and len(lines) == count, result
    found = [json.loads(line) for line in lines]
    for line, json_line in zip(lines, found):
        assert min(line) >= " " and set(json_line) == {"prompt", "tokens", "text", "stopped"}, line
        assert isinstance(json_line["tokens"], list) and isinstance(json_line["stopped"], str), line
    return found


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run of 30 steps. Tests do not write there."""
    run = tmp_path_factory.mktemp("trained") / "run"
    model = "--layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 64 --batch-size 4"
    run_trainer("--train-data", corpus / "train.bin", model, "--steps 30 --lr 0.03 --out", run).done()
    return run


@pytest.mark.full
def test_results_of_prompts(trained, tmp_path):
    """--prompts prints JSON lines in the order of the file, for every --batch-size"""
    prompts = ["The ", "every king", "a", "some poet sees ", "a", 'x"\\\t\u00e9']
    tokens, path = 40, tmp_path / "prompts"
    path.write_text("".join(p + "\n" for p in prompts))
    sampling = f"--temperature 0.7 --generate {tokens}"
    common = ["--init", checkpoint(trained, 30), sampling]
    result = run_trainer(*common, "--prompts", path, "--batch-size 1").done()
    assert result.err.count("\n") == 2, result.err
    assert result.err.startswith("keys and values: 0.0 MiB for 1 sequence of up to 64 positions\n")
    assert "6 prompts, up to 1 at a time: prefill of 43 tokens in" in result.err
    for i, (prompt, line) in enumerate(zip(prompts, lines_of(result, len(prompts)))):
        text = line["text"].encode()
        assert line["prompt"] == prompt and line["stopped"] == "length" and len(line["tokens"]) == tokens
        assert len(text) != tokens or list(text) == line["tokens"]
        single = run_trainer(*common, "--prompt", shlex.quote(prompt))
        assert (single.out == f"{prompt}{line['text']}\n") == (i == 0), (prompt, line, single)
    for batch_size in (2, 5, 8):
        with path.open("rb") as file:
            other = run_trainer(*common, f"--prompts - --batch-size {batch_size}", stdin=file).done()
        assert other.out == result.out, batch_size
    # notes of a resume are not on stdout; updates of 4 sequences do not restrict generation
    resume = ["--out", trained, "--resume", sampling, "--prompts", path, "--batch-size 3"]
    run_trainer(*resume, "--prompt-tokens 9").one_line(USAGE, "mutually exclusive")
    other = run_trainer(*resume).done()
    assert other.out == result.out
    assert "option --batch-size: 4 in the checkpoint, 3 now\n" in other.err


@pytest.mark.parametrize(("mode", "answer_of"), [("--prompts -", json.loads), ("--interactive", str.rstrip)])
def test_answers_to_a_pipe(trained, mode, answer_of):
    """prompts of a pipe are answered before the next one is written, and as those of a file"""
    words = [*trainer(), "--init", checkpoint(trained, 30), "--generate 12 --temperature 0.5 --separator 10", mode]
    prompts = ["The king", "a", "\u00e9"]
    with subprocess.Popen(words_of(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(60, process.kill)  # of a program that waits for the end of its input
        limit.start()
        answers = []
        for prompt in prompts:
            process.stdin.write(prompt + "\n")
            process.stdin.flush()
            answers.append(answer_of(process.stdout.readline()))
        process.stdin.close()
        assert process.stdout.read() == "" and process.wait(SECONDS) == DONE
        limit.cancel()
    file = "".join(prompt + "\n" for prompt in prompts).encode()
    wanted = lines_of(run_trainer(*words[1:-1], "--prompts -", stdin=file).done(), 3)
    texts = [line["text"] for line in wanted]
    assert answers == (wanted if mode == "--prompts -" else [text.rstrip() for text in texts])


class Terminal:
    """A program whose streams are a terminal, in a with statement."""

    def __init__(self, *command, env=None):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ.update(env or {})
            words = [str(word) for word in words_of(command)]
            os.execv(words[0], words)
        self.printed, self.running = "", True

    def read_until(self, pattern):
        """What has been printed since the last call, when it matches the pattern."""
        end = time.monotonic() + 60
        while not re.search(pattern, self.printed, re.S):
            assert time.monotonic() < end, self.printed
            if not select.select([self.file], [], [], 1)[0]:
                continue
            try:
                self.printed += os.read(self.file, 1 << 16).decode("utf-8", "surrogateescape")
            except OSError:  # the program has ended
                assert re.search(pattern, self.printed, re.S), self.printed
        printed, self.printed = self.printed, ""
        return printed

    def type(self, text):
        os.write(self.file, text.encode())

    def status(self):
        """The exit status of a program that ends."""
        self.running = False
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            self.status()
        os.close(self.file)


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_interactive_terminal(trained, terminal):
    """on a terminal Ctrl-C ends a continuation, an empty line continues it, and Ctrl-D ends the program"""
    options = ["--init", checkpoint(trained, 30), "--separator 1 --top-k 5 --interactive"]
    prompt = r"\n> (\^C)?$"  # the terminal may echo Ctrl-C after the program's answer
    ended = r"\[\d+ tokens, .* ms each: Ctrl-C; an empty line continues\]\r" + prompt
    with Terminal(*trainer(), *options, "--generate 100000", env={"TERM": terminal}) as t:
        t.read_until("> $")
        t.type("half a line\x03")
        t.read_until(prompt)
        t.type("The king\n")
        t.read_until("The king\r\n.{40}")
        t.type("\x03")
        assert "\x1b" not in t.read_until(ended)
        t.type("\n")
        t.read_until("\r\n.{40}")
        t.type("\x03")
        t.read_until(ended)
        t.type("\x04")
        assert t.status() == DONE


def test_interactive_lines(trained, toy):
    """an empty line continues the last text as a longer continuation, and lines that are no text are reported"""
    common = ["--init", checkpoint(trained, 30), "--separator 1 --temperature 0.7 --interactive --generate"]
    long = run_trainer(*common, "40", stdin=b"The king\n").done().out
    both = run_trainer(*common, "20", stdin=b"The king\n\n").done().out
    assert both in [long[:k] + "\n" + long[k:] for k in range(len(long))]
    result = run_trainer(*common, "5", stdin=b"a\xff\nb\0\nThe\n")
    assert result.status == FAILED and result.out.endswith("\n") and len(result.out) > 4
    assert "line 1 of standard input is not valid UTF-8" in result.err
    assert "line 2 of standard input has a NUL byte" in result.err
    run_trainer("--init", toy, "--interactive").one_line(
        FAILED, "--interactive: there is no tokenizer for a vocabulary"
    )
    run_trainer("--interactive --prompt x").one_line(USAGE, "mutually exclusive")
    run_trainer("--out", trained, "--interactive").one_line(USAGE, "--interactive with --out requires --resume")


def test_sample_of_long_prompt(corpus):
    """a sample during training has room for a prompt that is longer than the sequences"""
    options = "--preset tiny --layers 1 --seq-len 64 --batch-size 1 --threads 1 --steps 1 --sample-every 1 --prompt"
    result = run_trainer("--train-data", corpus / "train.bin", options, "x" * 94).done()
    assert f"--- sample after step 1\n{'x' * 94}" in result.out


def test_prompt_of_checkpoint(trained, tmp_path):
    """a prompt of this start replaces the saved one, also of the other kind"""
    asked = shutil.copytree(trained, tmp_path / "asked")
    run_trainer("--out", asked, "--resume --steps 31 --prompt a").done()
    for prompt, text in (("", "a"), ("--prompt-tokens 98,99", "bc"), ("--prompt d", "d")):
        assert f"\n{text}" in "\n" + run_trainer("--out", asked, "--resume --generate 2", prompt).done().out


def test_stop_at_separator(trained, tmp_path):
    """generated text stops before the separator"""
    # the same contexts as exact tokens, with a separator that is not drawn
    path, exact, s = tmp_path / "prompts", tmp_path / "exact", ord("s")
    path.write_text('{"tokens": [97, 32]}\n{"prompt": "th"}\n{"prompt": "on"}')
    exact.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in ([97, 32], [s, 116, 104], [s, 111, 110])))
    common = ["--init", checkpoint(trained, 30), "--temperature 1 --separator"]
    whole = run_trainer(*common, "255 --generate 24 --prompts", exact).done()
    stopped = run_trainer(*common, f"{s} --generate 24 --prompts", path).done()
    early = 0
    for i, (x, y) in enumerate(zip(lines_of(whole, 3), lines_of(stopped, 3))):
        text, separator, _ = x["text"].partition("s")
        assert isinstance(y["prompt"], list) == (i == 0)
        assert y["text"] == text and len(y["tokens"]) == len(text.encode()), (x, y)
        assert y["stopped"] == ("separator" if separator else "length"), (x, y)
        early += bool(separator)
    assert early > 0, "no text has the separator"
    whole = run_trainer(*common, f"255 --generate 200 --prompt-tokens {s},116,104").done()  # enough for an 's'
    stopped = run_trainer(*common, f"{s} --generate 200 --prompt th").done()
    assert whole.out[1:].partition("s")[0] + "\n" == stopped.out, (whole, stopped)


def test_results_are_utf8(tmp_path):
    """results of all bytes are JSON in UTF-8"""
    first = "\x01\x7f\x80"
    (tmp_path / "prompts").write_text(f"{first}\nb\nc\n", encoding="utf-8")
    options = "--vocab 256 --seq-len 256 --temperature 2 --generate 200 --prompts"
    result = run_trainer(options, tmp_path / "prompts").done()
    lines = lines_of(result, 3)  # a model without training draws all bytes
    assert lines[0]["prompt"] == first
    invalid = control = 0
    for line in lines:
        text = bytes(line["tokens"]).decode("utf-8", "surrogateescape")
        assert line["text"] == re.sub("[\udc80-\udcff]", "\ufffd", text)  # of each invalid byte
        invalid += line["text"].count("\ufffd")
        control += sum(token < 0x20 for token in line["tokens"])
    assert invalid > 10 and control > 0


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "not finite"])
def test_not_finite_prompts(tmp_path, broken):
    """prompts whose logits are not finite stop alone, and the program fails"""
    # a weight that is not a number in the embedding of token 5; the texts are null: the 37 tokens have none
    fixtures.unpack(FIXTURE, tmp_path)
    if broken:
        weights, metadata = fixtures.safetensors_read((tmp_path / "model.safetensors").read_bytes())
        dtype, shape, data = weights["model.embed_tokens.weight"]
        row = len(data) // shape[0]
        assert shape[0] == 37
        weights["model.embed_tokens.weight"] = dtype, shape, data[: 5 * row] + b"\xff" * row + data[6 * row :]
        (tmp_path / "model.safetensors").write_bytes(fixtures.safetensors_bytes(weights, metadata))
    (tmp_path / "prompts").write_text('{"tokens":[1]}\n{"tokens":[5]}\n{"tokens":[2,5]}\n{"tokens":[30]}\n')
    result = run_trainer("--init", tmp_path, "--temperature 0 --generate 4 --prompts", tmp_path / "prompts")
    assert result.status == (FAILED if broken else DONE), result
    assert ("not finite after 2 of 4 prompts" in result.err) == broken
    for i, line in enumerate(lines_of(result, 4)):
        stops = broken and i in (1, 2)
        assert line["stopped"] == ("not_finite" if stops else "length"), line
        assert len(line["tokens"]) == (0 if stops else 4) and line["text"] is None, line


@pytest.mark.full
def test_seed_of_samples(corpus, tmp_path):
    """generation prints text that depends only on the seed"""
    run, options = tmp_path / "run", "--steps 2 --sample-every 1 --prompt 'The '"
    result = train(corpus, run, options).done()
    assert "The " in result.out
    samples = records(run, "sample")
    assert [sample["tokens"] for sample in samples] == [200, 200]
    assert not any(sample["text"].startswith("The ") for sample in samples), "a sample includes the prompt"
    words = [word for sample in samples for word in re.findall("[!-~]+", sample["text"])]
    assert len([word for word in words if len(word) > 1]) > 10 and all(word in result.out for word in words)
    # at a rate that moves no weight, the step alone tells two samples apart
    result = train(corpus, tmp_path / "still", options, "--lr 1e-30").done()
    first, second = (result.out.split(f"step {step}\nThe ")[1][:56] for step in (1, 2))
    assert first != second

    init = ["--init", checkpoint(run, 2), "--generate 60 --prompt 'every king'"]
    one, again, two = (run_trainer(*init, f"--seed {seed}").done().out for seed in (1, 1, 2))
    assert one.startswith("every king") and one == again and one != two
    run_trainer("--vocab 300 --generate 5 --prompt x").one_line(FAILED, "no tokenizer")
    assert re.fullmatch(r"(\d+\s){5}", run_trainer("--vocab 300 --generate 5").done().out)


SEPARATORS = [  # options, prompt, whether the prompt is printed, words of the warning, whether also during training
    ("--prompt-tokens 5", [5], True, "", False),
    ("--prompt-tokens 5,9,0 --separator 36", [5, 9, 0], True, "", True),
    ("--separator 36", [36], False, "", True),
    ("--separator 11:after", [11], False, "", False),
    ("--train-data corpus", [35], False, "", True),
    ("--train-data corpus --separator 36", [36], False, "", True),
    ("--train-data corpus --prompt-tokens 5,9", [5, 9], True, "", False),
    ("", [0], False, "begins after token 0", True),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A corpus, and a model whose weights are large enough for temperature 0 to visit many of its 37 tokens."""
    directory = tmp_path_factory.mktemp("toy")
    fixtures.unpack(FIXTURE, directory)
    (directory / "corpus").mkdir()
    shutil.copy(directory / "tokens.bin", directory / "corpus/train_000000.bin")
    described = {"format": 1, "vocab_size": 37, "separator": {"token": 35, "place": "after"}}
    (directory / "corpus/corpus.json").write_text(json.dumps(described))
    return directory


@pytest.mark.parametrize(
    ("options", "prompt", "shown", "warning", "sampled"), SEPARATORS, ids=[case[0] or "default" for case in SEPARATORS]
)
def test_begin_of_generation(toy, tmp_path, options, prompt, shown, warning, sampled):
    """generation begins with the specified prompt, or the separator"""

    given = re.search(r"--separator (\d+)", options)
    separator = given[1] if given else "35" if "corpus" in options else ""

    def until(stop, tokens):
        return tokens[: tokens.index(stop)] if stop in tokens else tokens

    def expect_warning(result):
        assert warning in result.err and result.err.count("\n") == bool(warning), result

    greedy = "--init . --temperature 0"
    numbers = ",".join(map(str, prompt))
    length = 200 if sampled else 30
    whole = run_trainer(greedy, f"--generate {length} --prompt-tokens {numbers}", cwd=toy).done().out.split()
    assert whole[: len(prompt)] == numbers.split(",") and len(whole) == len(prompt) + length
    count = 13 - len(prompt)  # --prompts ends at the end of the context, and puts no separator before tokens
    (tmp_path / "prompts").write_text(json.dumps({"tokens": prompt}))
    result = run_trainer(greedy, f"--generate {count} --separator 36 --prompts", tmp_path / "prompts", cwd=toy).done()
    assert until("36", whole[len(prompt) : 13]) == [str(token) for token in json.loads(result.out)["tokens"]]

    begin = 0 if shown else len(prompt)
    result = run_trainer(greedy, "--generate 30", options, cwd=toy).done()
    assert result.out.split() == whole[begin : len(prompt)] + until(separator, whole[len(prompt) : len(prompt) + 30])
    expect_warning(result)
    if sampled:  # by a run whose weights stay as they are
        data = "" if "--train-data" in options else "--train-data tokens.bin"
        result = run_trainer(greedy, "--steps 1 --lr 0 --sample-every 1 --batch-size 2", options, data, cwd=toy).done()
        assert " ".join(whole[begin:]) + "\n" in result.out
        expect_warning(result)


def test_separators_beyond_the_vocabulary(toy, tmp_path):
    """a separator that is not in the vocabulary is an error"""
    run_trainer("--init . --generate 3 --separator 37", cwd=toy).one_line(FAILED, "vocabulary of 37")
    shutil.copytree(toy / "corpus", tmp_path / "other")
    described = {"format": 1, "vocab_size": 38, "separator": {"token": 37, "place": "after"}}
    (tmp_path / "other/corpus.json").write_text(json.dumps(described))
    result = run_trainer("--init", toy, "--generate 3 --train-data other", cwd=tmp_path)
    result.one_line(FAILED, "the separator 37 of")


@pytest.mark.parametrize("separator", [0, 10])
def test_prompt_separator(trained, separator):
    """a text prompt follows the separator, and a prompt of tokens does not"""
    # A text follows byte 0, as in the corpora of bytes, or --separator; its tokens given as numbers follow nothing.
    # Line ends are left out, as a separator that is printed ends a paragraph.
    common = ["--init", checkpoint(trained, 30), "--temperature 1 --generate 60"]
    generate = lambda options: run_trainer(*common, options).done().out.replace("\n", "")
    text = generate(f"--prompt Th --separator {separator}")
    assert text.startswith("Th") and generate(f"--prompt-tokens {separator},84,104 --separator {separator}") == text
    exact = generate(f"--prompt-tokens 84,104 --separator {separator}")
    assert exact.startswith("Th") and exact != text, "exact tokens continue as if the separator were before them"
    if separator == 0:
        assert generate("--prompt Th") == text
