# runs.sh: shared functions of the tests of runs (recipe_test.sh and slurm_test.sh source it): a scratch directory with
# a corpus, waiting for steps of a run, and comparison of the final checkpoints.
#
# Sets: scratch, program, data (a corpus directory)
# Reads: TRAIN_DIFFV2 and TEXT_TO_SHARDS (default: build/train_diffv2, build/text_to_shards)
# shellcheck shell=bash disable=SC2034
source tests/shell_tests.sh
program=$(realpath "${TRAIN_DIFFV2:-build/train_diffv2}")
export TRAIN_DIFFV2=$program

# There may be more ranks than cores: a waiting thread yields its core.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

# Creates the scratch directory and a corpus of this program's sources.
make_scratch() {
    local tool=${TEXT_TO_SHARDS:-build/text_to_shards}
    [ -x "$program" ] || {
        echo "${0##*/}: no $program: run make build/train_diffv2, or set TRAIN_DIFFV2" >&2
        exit 1
    }
    [ -x "$tool" ] || {
        echo "${0##*/}: no $tool: run make build/text_to_shards, or set TEXT_TO_SHARDS" >&2
        exit 1
    }
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/diffv2_runs_XXXXXX") || exit 1
    data=$scratch/corpus
    "$tool" --out "$data" train_diffv2.c llmc >"$scratch/corpus.out" 2>&1 || {
        cat "$scratch/corpus.out" >&2
        exit 1
    }
}

has_mpi() { [[ $(ldd "$program") == *libmpi* ]]; }

newest_checkpoint() { # run directory
    find "$1/checkpoints" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | tail -n 1
}
last_step() { # run directory: the last step of its log
    tail -n 1 "$1/log.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9]*\).*/\1/p'
}

await() { # seconds, command...: waits until the command succeeds; fails after that time
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}
at_step() { # run directory, step: whether the run has reached it
    local step
    step=$(last_step "$1")
    [ -n "$step" ] && [ "$step" -ge "$2" ]
}

# Compares the last checkpoints of two runs bitwise; prints the difference.
same_end() { # run, run
    local a b
    a=$(newest_checkpoint "$1") b=$(newest_checkpoint "$2")
    [ -n "$a" ] && [ -n "$b" ] && [ "${a##*/}" = "${b##*/}" ] || {
        echo "the last checkpoints are ${a:-none} and ${b:-none}"
        return 1
    }
    diff -rq "$a" "$b"
}
