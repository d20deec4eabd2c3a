"""Runs the commands of README.md and docs/your-first-hour.md, and checks the links and paths of all documents.

Commands are the lines of both files in blocks of ```sh. They run in their order in a copy of the tracked files, in
which build/ is a link to this build. A command that would train for long gets a signal after some steps; it then saves
a checkpoint and exits with status 3, and the next command continues from there.
"""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 150  # seconds of one command

RUN, STOP, INSTEAD = "run", "stop", "instead"
# The beginning of a command, how it is tested, and
#   STOP     the signal, the log files of what it trains, and how many lines one of them gains before the signal
#   INSTEAD  the command that is run in its place ("..." stands for the remaining arguments), and why
ROWS = [
    ("scripts/quickstart.sh", INSTEAD, "scripts/quickstart.sh --help", ".ci/run runs it with --minutes 0.2"),
    ("make train_diffv2 text_to_shards", INSTEAD, "make -n train_diffv2 text_to_shards", "scripts/test.sh builds both"),
    ("./text_to_shards", RUN),
    ("./train_diffv2 --train-data mytext", STOP, signal.SIGTERM, "runs/mytext/log.jsonl", 10),
    ("./train_diffv2 --out runs/mytext --resume --steps", STOP, signal.SIGTERM, "runs/mytext/log.jsonl", 10),
    ("./train_diffv2 --out runs/mytext --resume --interactive", RUN),
    ("./train_diffv2 --out runs/first --train-data", STOP, signal.SIGTERM, "runs/first/log.jsonl", 5),
    ("awk -f scripts/plot_loss.awk", RUN),
    ("./train_diffv2 --out runs/first --resume --generate", RUN),
    ("./train_diffv2 --out runs/small", STOP, signal.SIGTERM, "runs/small/log.jsonl", 2),
    ("./train_diffv2 --out runs/20m", STOP, signal.SIGTERM, "runs/20m/log.jsonl", 2),
    ("./train_diffv2 --out runs/baseline", STOP, signal.SIGTERM, "runs/baseline/log.jsonl", 2),
    ("scripts/export/export_hub.py", INSTEAD, "scripts/export/export_hub.py --help", "the run was stopped earlier"),
    ("data/prepare.py", RUN),
    ("make train_diffv2cu", INSTEAD, "make -n train_diffv2cu", "scripts/test.sh --full compiles it"),
    ("./train_diffv2cu", INSTEAD, "./predict_diffv2 --device H100 ...", "needs a GPU; the same options"),
    ("dev/gpu_check.sh", INSTEAD, "dev/gpu_check.sh --help", "tests/gpu_check_test.sh runs it on an emulation"),
    ("make predict_diffv2", INSTEAD, "make -n predict_diffv2", "scripts/test.sh builds it"),
    ("./predict_diffv2", RUN),
    ("mpirun", STOP, signal.SIGUSR1, "runs/two/log.jsonl", 5),
    ("scripts/recipe.sh", INSTEAD, "scripts/recipe.sh 124m --help", "tests/recipe_test.sh runs a recipe"),
    ("sbatch scripts/recipe.sh", INSTEAD, "scripts/recipe.sh 124m --help", "tests/slurm_test.sh runs them in Slurm"),
    ("python3 scripts/lab run", STOP, signal.SIGTERM, "runs/smoke-cpu/*/log.jsonl", 60),
    ("python3 scripts/lab report", RUN),
]
STOPPED = 3  # the trainer's exit status


def readme_commands():
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/your-first-hour.md"))
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


COMMANDS = readme_commands()


def rows_of(command):
    words = shlex.split(command, comments=True)
    return [row for row in ROWS if words[: len(row[0].split())] == row[0].split()]


def missing_for(command):
    """Why this machine cannot run a command; empty: it can."""
    if command.startswith("mpirun") and not shutil.which("mpirun"):
        return "mpirun is not installed"
    if command.startswith("make train_diffv2cu"):
        cuda = pathlib.Path(os.environ.get("CUDA", "/usr/local/cuda"))
        return "" if (cuda / "bin/nvcc").exists() else f"there is no nvcc in {cuda}/bin"
    for name, beginning in (("data", "data/prepare.py"), ("lab", "python3 scripts/lab report")):
        if command.startswith(beginning):
            words = ["python3", ROOT / "scripts/python_environment.py", name]
            done = subprocess.run(words, capture_output=True, text=True)
            return (done.stderr.strip().splitlines() or ["no Python packages"])[-1] if done.returncode else ""
    return ""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the tracked files, in which the commands run."""
    to = tmp_path_factory.mktemp("repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "build").symlink_to(ROOT / "build")
    for name in ("train_diffv2", "predict_diffv2", "text_to_shards"):
        shutil.copy2(ROOT / os.environ.get(name.upper(), f"build/{name}"), to / name)
    return to


def lines_of(directory, pattern):
    return max((path.read_bytes().count(b"\n") for path in directory.glob(pattern)), default=0)


def execute(directory, command, row):
    """The exit status, and those that are allowed."""
    words = shlex.split(command, comments=True)
    if row[1] == INSTEAD:
        rest = words[len(row[0].split()) :]
        words = [w for word in row[2].split() for w in (rest if word == "..." else [word])]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    environment["BUILD"] = "unused"  # make would mark the programs in build/ as those of an unknown revision
    environment.pop("DIFFV2_VENV", None)
    end = time.monotonic() + LIMIT
    before = lines_of(directory, row[3]) if row[1] == STOP else 0
    process = subprocess.Popen(
        words,
        cwd=directory,
        stderr=subprocess.STDOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while row[1] == STOP and process.poll() is None and time.monotonic() < end:
            if lines_of(directory, row[3]) >= before + row[4]:
                process.send_signal(row[2])
                return process.wait(max(1, end - time.monotonic())), (0, STOPPED)
            time.sleep(0.1)
        return process.wait(max(1, end - time.monotonic())), (0,)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_readme_has_every_command_of_the_table_of_this_test():
    assert not [row[0] for row in ROWS if not any(row in rows_of(c) for c in COMMANDS)]


SKIPPED = set()  # what commands would have made


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(shlex.split(c, comments=True)) for c in COMMANDS])
def test_a_command_runs(command, repository):
    rows = rows_of(command)
    assert len(rows) == 1, "a command is in one row of the table of this test: add how to test it"
    reason = missing_for(command)
    if not reason and rows[0][1] != INSTEAD and any(f"{made} " in command for made in SKIPPED):
        reason = "it needs what was skipped before"
    if reason:
        SKIPPED.update({"mycorpus"} if command.startswith("data/prepare.py") else ())
        pytest.skip(reason)
    revision = (ROOT / "build/revision.c").stat().st_mtime_ns
    status, allowed = execute(repository, command, rows[0])
    assert status in allowed
    assert revision == (ROOT / "build/revision.c").stat().st_mtime_ns, "make then links the programs of build/ again"


# ---- links and paths


def documents():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines()]


def anchors(text):
    """The anchors that GitHub gives to the headings."""
    found, inside = set(), False
    for line in text.splitlines():
        inside ^= line.startswith("```")
        if line.startswith("#") and not inside:
            heading = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(heading.replace(" ", "-"))
    return found


def test_links_between_documents_refer_to_existing_files_and_headings():
    wrong = []
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            if ":" in name or file.exists() and (not anchor or anchor in anchors(file.read_text(encoding="utf-8"))):
                continue
            wrong.append(f"{path.relative_to(ROOT)}: {target}")
    assert not wrong


def test_paths_that_documents_name_exist():
    wrong = []
    for path in [ROOT / "README.md", ROOT / "data/README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for name in re.findall(r"`((?:llmc|docs|data|scripts|dev|tests)/[\w./-]*)", path.read_text(encoding="utf-8")):
            if not re.search(r"NAME|NNN|SIZE", name) and not (ROOT / name).exists():
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong


def test_training_recommends_the_rates_and_batches_of_presets():
    table = (ROOT / "llmc/model/presets.h").read_text(encoding="utf-8")
    presets = {n: (float(r), int(t)) for n, r, t in re.findall(r'(?:SHAPES|EXPERTS)\("(\S+)", +(\S+), +(\d+),', table)}
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--preset (\S+?)[` ][^|]*\|[^|]*\|[^|]*\|[^|]*\| ([\d.]+), (\d+) \|", text, re.M)
    assert len(rows) == 9 and not [row for row in rows if presets[row[0]] != (float(row[1]), int(row[2]))]


def test_what_is_generated_in_documents_is_up_to_date():
    assert subprocess.run(["dev/rooms_figure.py", "--check"], cwd=ROOT).returncode == 0
