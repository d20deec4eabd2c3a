#!/usr/bin/env python3
"""readme_test.py: runs the commands of README.md, and checks the links and paths of all documents.

Usage: tests/readme_test.py [--list]
  --list   print the commands of README.md and how each is tested
Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/train_diffv2, build/text_to_shards)
The last line is "N passed, N failed" (and ", N skipped"). Exit status: 0 nothing failed, 1 otherwise, 2 usage.

Commands are the lines of README.md in blocks of ```sh. They run in their order in a copy of the tracked files, in which
build/ is a link to this build. A command that would train for long gets a signal after some steps; it then saves a
checkpoint and exits with status 3, and the next command continues from there.
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 150  # seconds of one command

RUN, STOP, INSTEAD = "run", "stop", "instead"
# The beginning of a command, how it is tested, and
#   STOP     the signal, the log files of what it trains, and how many lines one of them gains before the signal
#   INSTEAD  the command that is run in its place ("..." stands for the remaining arguments), and why
COMMANDS = [
    ("scripts/quickstart.sh", INSTEAD, "scripts/quickstart.sh --help", ".ci/run runs it with --minutes 0.2"),
    ("scripts/test.sh", INSTEAD, "scripts/test.sh --help", ".ci/run runs it, and it runs this test"),
    ("make train_diffv2 text_to_shards", INSTEAD, "make -n train_diffv2 text_to_shards", "scripts/test.sh builds both"),
    ("./text_to_shards", RUN),
    ("./train_diffv2 --train-data mytext", STOP, signal.SIGTERM, "runs/mytext/log.jsonl", 10),
    ("./train_diffv2 --out runs/mytext --resume --steps", STOP, signal.SIGTERM, "runs/mytext/log.jsonl", 10),
    ("./train_diffv2 --out runs/mytext --resume --generate", RUN),
    ("awk -f scripts/plot_loss.awk", RUN),
    ("scripts/watch.py", INSTEAD, "scripts/watch.py --help", "serves until Ctrl-C; scripts/lab/test_page.py runs it"),
    ("data/prepare.py", RUN),
    ("./train_diffv2 --train-data mycorpus", STOP, signal.SIGTERM, "runs/mycorpus/log.jsonl", 5),
    ("make train_diffv2cu", INSTEAD, "make -n train_diffv2cu", "scripts/test.sh compiles it for one architecture"),
    ("./train_diffv2cu", INSTEAD, "./train_diffv2 --dry-run --device H100 ...", "needs a GPU; the same options"),
    ("dev/gpu_check.sh", INSTEAD, "dev/gpu_check.sh --help", "tests/gpu_check_test.sh runs it on an emulation"),
    ("./train_diffv2 --dry-run", RUN),
    ("mpirun", STOP, signal.SIGUSR1, "runs/two/log.jsonl", 5),
    ("scripts/recipe.sh", INSTEAD, "scripts/recipe.sh 124m --help", "tests/recipe_test.sh runs the recipes"),
    ("sbatch scripts/recipe.sh", INSTEAD, "scripts/recipe.sh 124m --help", "tests/slurm_test.sh runs them in Slurm"),
    ("./train_diffv2 --preset moe-tiny", STOP, signal.SIGTERM, "runs/moe/log.jsonl", 5),
    ("python3 scripts/lab run", STOP, signal.SIGTERM, "runs/smoke-cpu/*/log.jsonl", 60),
    ("python3 scripts/lab report", RUN),
]
STOPPED = 3  # the trainer's exit status


def readme_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def rows_of(command):
    words = shlex.split(command, comments=True)
    return [row for row in COMMANDS if words[: len(row[0].split())] == row[0].split()]


def missing_for(command):
    """Why this machine cannot run a command; empty: it can."""
    if command.startswith("mpirun") and not shutil.which("mpirun"):
        return "mpirun is not installed"
    if command.startswith("make train_diffv2cu"):
        cuda = pathlib.Path(os.environ.get("CUDA", "/usr/local/cuda"))
        return "" if (cuda / "bin/nvcc").exists() else f"there is no nvcc in {cuda}/bin"
    for name, beginning in (("data", "data/prepare.py"), ("lab", "python3 scripts/lab report")):
        if command.startswith(beginning):
            words = [sys.executable, ROOT / "scripts/python_environment.py", name]
            done = subprocess.run(words, capture_output=True, text=True)
            return (done.stderr.strip().splitlines() or ["no Python packages"])[-1] if done.returncode else ""
    return ""


def copy_repository(to):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "build").symlink_to(ROOT / "build")
    for name in ("train_diffv2", "text_to_shards"):
        program = ROOT / os.environ.get(name.upper(), f"build/{name}")
        shutil.copy2(program, to / name)


def lines_of(directory, pattern):
    return max((path.read_bytes().count(b"\n") for path in directory.glob(pattern)), default=0)


def execute(directory, command, row):
    """None, or what went wrong."""
    words = shlex.split(command, comments=True)
    if row[1] == INSTEAD:
        rest = words[len(row[0].split()) :]
        words = [w for word in row[2].split() for w in (rest if word == "..." else [word])]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    environment["BUILD"] = "unused"  # make would mark the programs in build/ as those of an unknown revision
    environment.pop("DIFFV2_VENV", None)
    output = directory / "output.txt"
    begun, allowed = time.monotonic(), [0]
    before = lines_of(directory, row[3]) if row[1] == STOP else 0
    with open(output, "w") as file:
        process = subprocess.Popen(
            words,
            cwd=directory,
            stdout=file,
            stderr=file,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        while row[1] == STOP and process.poll() is None and time.monotonic() - begun < LIMIT:
            if lines_of(directory, row[3]) >= before + row[4]:
                process.send_signal(row[2])
                allowed = [0, STOPPED]
                break
            time.sleep(0.1)
        status = process.wait(max(1, LIMIT - (time.monotonic() - begun)))
    except subprocess.TimeoutExpired:
        status = f"none within {LIMIT} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return None if status in allowed else f"status {status}: {output.read_text(errors='replace').strip()[-600:]}"


def test_commands(report):
    commands = readme_commands()
    unused = [row[0] for row in COMMANDS if not any(row in rows_of(c) for c in commands)]
    report("README.md has every command of the table of this test", not unused, ", ".join(unused))
    skipped, revision = set(), (ROOT / "build/revision.c").stat().st_mtime_ns
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        copy_repository(directory)
        for command in commands:
            rows, shown = rows_of(command), " ".join(shlex.split(command, comments=True))
            if len(rows) != 1:
                report(shown, False, "is in no row of the table of this test, or in several: add how to test it")
                continue
            reason = missing_for(command)
            if not reason and any(f"{made} " in command for made in skipped) and rows[0][1] != INSTEAD:
                reason = "it needs what was skipped before"
            if reason:
                skipped.update({"mycorpus"} if command.startswith("data/prepare.py") else ())
                report(shown, None, reason)
                continue
            error = execute(directory, command, rows[0])
            report(shown, error is None, error or "")
    kept = revision == (ROOT / "build/revision.c").stat().st_mtime_ns
    report("the commands leave the revision of this build as it is", kept, "make then links its programs again")


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


def test_links(report):
    wrong = []
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if ":" in name:
                continue
            file = path.parent / name if name else path
            if not file.exists():
                wrong.append(f"{path.relative_to(ROOT)}: {target} does not exist")
            elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
                wrong.append(f"{path.relative_to(ROOT)}: {target}: no such heading")
    report("links between documents refer to existing files and headings", not wrong, "; ".join(wrong))


def test_paths(report):
    wrong = []
    for path in [ROOT / "README.md", ROOT / "data/README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for name in re.findall(r"`((?:llmc|docs|data|scripts|dev|tests)/[\w./-]*)", path.read_text(encoding="utf-8")):
            if not re.search(r"NAME|NNN|SIZE", name) and not (ROOT / name).exists():
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    report("paths that documents name exist", not wrong, "; ".join(wrong))


def test_generated(report):
    environment = {**os.environ, "TRAIN_DIFFV2": os.environ.get("TRAIN_DIFFV2", "build/train_diffv2")}
    for what, script, *documents in (
        ("docs/rooms.svg shows the includes of llmc", "dev/rooms_figure.py"),
        (
            "the help in docs/options.md and the tables of docs/sizing.md are up to date",
            "scripts/update_docs.py",
            "docs/options.md",
            "docs/sizing.md",
        ),
    ):
        done = subprocess.run([ROOT / script, "--check", *documents], capture_output=True, text=True, env=environment)
        report(what, done.returncode == 0, done.stderr.strip())


def main():
    if sys.argv[1:] == ["--list"]:
        for command in readme_commands():
            how = [f"{row[1]} {row[2:]}" for row in rows_of(command)]
            print(f"{command}\n    {'; '.join(how) or 'not in the table'}")
        return 0
    if sys.argv[1:]:
        print("readme_test.py: usage: tests/readme_test.py [--list]", file=sys.stderr)
        return 2
    counts = {True: 0, False: 0, None: 0}

    def report(what, good, why):
        counts[good] += 1
        print(
            {True: "ok   ", False: "FAIL ", None: "skip "}[good] + what + ("" if good or not why else f": {why}"),
            flush=True,
        )

    for test in (test_links, test_paths, test_generated, test_commands):
        test(report)
    print(f"{counts[True]} passed, {counts[False]} failed" + (f", {counts[None]} skipped" if counts[None] else ""))
    return 1 if counts[False] else 0


if __name__ == "__main__":
    sys.exit(main())
