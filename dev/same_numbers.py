#!/usr/bin/env python3
"""
Prints a SHA-256 of everything that the trainers of a build compute, so that a change which must not change numbers can
be checked: run it before and after on one machine, in the same state. (Other CPUs and libraries give other numbers.)

Usage: dev/same_numbers.py [--build DIRECTORY] [--write FILE | --compare FILE] [WORD...]
  --build DIRECTORY   with train_diffv2 and, if they are built, oncpu/test_trainer, fp32/oncpu/test_trainer: the CUDA
                      trainer, emulated (default: build)
  --write FILE        also writes the lines into FILE
  --compare FILE      also prints the lines of FILE that differ, or are missing on one side; exit status 1 if some do
  WORD                only cases whose names contain all words

Gradients: of all fixtures (dev/reference/fixtures), which are all variants with windows, YOCO, experts and QK norm.
Runs: 20 steps, a resume at step 10, two ranks with --zero 3. Their checkpoints and log.jsonl without times are hashed,
and --eval and --generate of their last checkpoint. Each key of the records "stats" has a hash of its own; --compare
ignores keys that one side does not have.
"""

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/reference"))
import fixtures

GRADIENTS = [
    "",
    "--recompute 2 --doc-mask --separator 3",
    "--recompute 1",
    "--matmul-dtype bf16",
    "--matmul-dtype fp8",
    "--matmul-dtype fp8 --recompute 2",
]
MODEL = "--heads 4 --kv-heads 2 --head-dim 8 --hidden 16 --ffn 10 --vocab 37 --seq-len 24 --train-data train.bin"
RUN = "--batch-size 2 --total-batch 192 --steps 20 --checkpoint-every 10 --stats-every 10 --val-every 10 --val-steps 2"
EXPERTS = "--experts 4 --experts-active 2 --expert-ffn 6"
MODELS = {
    "dense": "--layers 3 --no-tie-embeddings --doc-mask --separator 3",
    "yoco": "--layers 4 --yoco --window 5 --qk-norm --recompute 2",
    "experts": f"--layers 3 {EXPERTS} --shared-experts 1 --dense-layers 1 --recompute 1",
    "bias": f"--layers 2 {EXPERTS} --router-bias --window 7 --full-every 2",
    "fp8": "--layers 4 --matmul-dtype fp8 --attention diff_v2_gated_elem --skip-grad-z 3",
}
TIMES = ("ms", "comm_ms", "stall_ms", "tokens_per_s", "flops_util")
STATS = "stats "
OF_MACHINE = ("checkpoint", "device_memory")  # events whose place or numbers depend on time or machine


def shard(count, seed):
    tokens = [int.from_bytes(hashlib.sha256(b"%d %d" % (seed, i)).digest()[:4]) % 37 for i in range(count)]
    return fixtures.token_shard_bytes(struct.pack(f"<{count}H", *tokens))


def log_records(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if r.get("what") not in OF_MACHINE]


def log_text(path):
    records = [r for r in log_records(path) if r["kind"] != "stats"]
    return "\n".join(json.dumps({k: v for k, v in r.items() if k not in TIMES}) for r in records)


def state_text(path):
    state = json.loads(path.read_text())
    return json.dumps({k: v for k, v in state.items() if k not in ("options", "checksums", "checksum")})


def stats_texts(path):
    """{key: its values in the records "stats"}"""
    found = {}
    for record in (r for r in log_records(path) if r["kind"] == "stats"):
        where = [record.get(key) for key in ("step", "layer")]
        for key in record:
            found.setdefault(key, []).append(json.dumps([*where, record[key]]))
    return {key: "\n".join(values) for key, values in found.items()}


def digest(path):
    text = {"log.jsonl": log_text, "trainer_state.json": state_text}.get(path.name)
    return hashlib.sha256(text(path).encode() if text else path.read_bytes()).hexdigest()


class Cases:
    def __init__(self, words):
        self.words, self.lines = words, {}

    def wanted(self, name):
        return all(word in name for word in self.words)

    def add(self, name, path):
        found = {name: digest(path)}
        if path.name == "log.jsonl":
            texts = stats_texts(path)
            found |= {f"{name} {STATS}{key}": hashlib.sha256(texts[key].encode()).hexdigest() for key in texts}
        for name in found:
            print(found[name], name, flush=True)
        self.lines |= found


def execute(directory, *command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_ON_CPU_DEVICES": "2", "BUCKET": "1024"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    words = [str(word) for part in command for word in (part.split() if isinstance(part, str) else [part])]
    done = subprocess.run([*words, "--threads", "1"], cwd=directory, env=environment, capture_output=True)
    if done.returncode:
        sys.exit(f"same_numbers.py: {' '.join(words)}: status {done.returncode}: {done.stderr.decode()[-500:]}")
    return done.stdout


def gradients(cases, name, trainer, directory):
    for fixture in sorted((ROOT / "dev/reference/fixtures").glob("*.safetensors")):
        batch = fixtures.unpack(fixture, directory / fixture.stem)["batch_size"]
        for options in GRADIENTS:
            case = f"{name} gradients {fixture.stem} {options}".strip()
            if cases.wanted(case) and not (name == "fp32" and "--matmul-dtype" in options):  # built for one precision
                data = f"--init {fixture.stem} --train-data {fixture.stem}/tokens.bin --batch-size {batch}"
                execute(directory, trainer, data, options, "--dump-grads out")
                cases.add(case, directory / "out")


def runs(cases, name, trainer, directory):
    for file, count, seed in (("train.bin", 3000, 1), ("val.bin", 500, 2)):
        (directory / file).write_bytes(shard(count, seed))
    for model, options in MODELS.items():
        train = (MODEL, RUN, options, "--val-data val.bin")
        for way, starts in {
            "20 steps": ("",),
            "resumed": ("--stop-after 10", "--resume"),
            "2 ranks": ("--zero 3",),
        }.items():
            case, out = f"{name} {model} {way}", f"{name}.{model}.{way}".replace(" ", "_")
            if not cases.wanted(case) or (name == "fp32" and "--matmul-dtype" in options):
                continue
            launcher = "mpirun -q -n 2" if way == "2 ranks" else ""
            for start in starts:
                execute(directory, launcher, trainer, *train, start, f"--out {out}")
            for path in sorted((directory / out).glob("checkpoints/*/*")) + [directory / out / "log.jsonl"]:
                cases.add(f"{case}: {path.relative_to(directory / out)}", path)
            if way == "20 steps":
                load = f"--init {out}/checkpoints/step_00000020"
                evaluate = "--eval --val-data val.bin --val-steps 2 --batch-size 2 --eval-out out"
                execute(directory, trainer, load, evaluate)
                cases.add(f"{case}: --eval", directory / "out")
                (directory / "out").write_bytes(
                    execute(directory, trainer, load, "--generate 12 --prompt-tokens 1,2,3")
                )
                cases.add(f"{case}: --generate", directory / "out")


def differences(found, path, wanted):
    before = dict(reversed(line.split(" ", 1)) for line in path.read_text().splitlines())
    names = [name for name in {**before, **found} if wanted(name.split(":")[0]) and before.get(name) != found.get(name)]
    both = [name for name in names if name in before and name in found]
    one = [name for name in names if name not in both and f" {STATS}" not in name]
    return [f"differs: {name}" for name in both] + [f"on one side: {name}" for name in one]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("word", nargs="*")
    args = parser.parse_args()
    programs = {
        "cpu": "train_diffv2",
        "bf16": "oncpu/test_trainer --trainer",
        "fp32": "fp32/oncpu/test_trainer --trainer",
    }
    cases = Cases(args.word)
    for name, program in programs.items():
        trainer = f"{args.build.resolve()}/{program}"
        if Path(trainer.split()[0]).exists():
            with tempfile.TemporaryDirectory() as directory:
                gradients(cases, name, trainer, Path(directory))
                runs(cases, name, trainer, Path(directory))
    if args.write:
        args.write.write_text("".join(f"{value} {name}\n" for name, value in cases.lines.items()))
    found = differences(cases.lines, args.compare, cases.wanted) if args.compare else []
    print(*found, f"{len(cases.lines)} digests" + (f", {len(found)} differences" if args.compare else ""), sep="\n")
    return 1 if found or not cases.lines else 0


if __name__ == "__main__":
    sys.exit(main())
