# runs.sh: what the tests of runs share (tests/recipe_test.sh, tests/slurm_test.sh, tests/soak.sh source it): a scratch
# directory with a corpus, small runs, comparison of what they leave, and the count of what passed.
#
# Variables it sets: scratch, program, data (a corpus directory), passed, failed, skipped
# Variables it reads: TRAIN_DIFFV2 and TEXT_TO_SHARDS (build/train_diffv2, build/text_to_shards)
# shellcheck shell=bash disable=SC2034
set -uo pipefail
passed=0 failed=0 skipped=0
program=$(realpath "${TRAIN_DIFFV2:-build/train_diffv2}")
export TRAIN_DIFFV2=$program

# More ranks than cores: a thread that waits leaves its core to others at once.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

report() { # ok, FAIL or skip, sentence
    echo "$1 $2"
    case "$1" in FAIL) failed=$((failed + 1)) ;; skip) skipped=$((skipped + 1)) ;; *) passed=$((passed + 1)) ;; esac
}
finish() { # that nothing was run is a failure
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
    exit
}

# Makes the scratch directory and the corpus: the sources of this program.
make_scratch() {
    local tool=${TEXT_TO_SHARDS:-build/text_to_shards}
    [ -x "$program" ] || {
        echo "${0##*/}: there is no $program: make build/train_diffv2, or set TRAIN_DIFFV2" >&2
        exit 1
    }
    [ -x "$tool" ] || {
        echo "${0##*/}: there is no $tool: make build/text_to_shards, or set TEXT_TO_SHARDS" >&2
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
last_step() { # run directory: of the log
    tail -n 1 "$1/log.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9]*\).*/\1/p'
}

# Waits until a command succeeds. 1: it did not within the time.
await() { # seconds, command...
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}
at_step() { # run directory, step: the run has come to it
    local step
    step=$(last_step "$1")
    [ -n "$step" ] && [ "$step" -ge "$2" ]
}

# The newest checkpoints of two runs are the same bit for bit; prints what differs.
same_end() { # run, run
    local a b
    a=$(newest_checkpoint "$1") b=$(newest_checkpoint "$2")
    [ -n "$a" ] && [ -n "$b" ] && [ "${a##*/}" = "${b##*/}" ] || {
        echo "the last checkpoints are ${a:-none} and ${b:-none}"
        return 1
    }
    diff -rq "$a" "$b"
}
