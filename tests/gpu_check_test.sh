#!/usr/bin/env bash
# gpu_check_test.sh: tests dev/gpu_check.sh and short.sh without a GPU: with dev/emulator (--pretend), with programs
# that are wrong, hang or are missing, after a kill, and at time limits. The last line is "N passed, N failed"; exit
# status 0 if nothing failed.
# Requires the programs of --pretend, which scripts/test.sh builds.
#
# Usage: tests/gpu_check_test.sh
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
work=$(mktemp -d) || exit 1
here=$PWD
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive
# the oldest Python that is supported, if pyenv has installed it
for python in "$HOME"/.pyenv/versions/3.8.*/bin/python3.8; do
    [ ! -x "$python" ] || { mkdir -p "$work/python" && ln -sf "$python" "$work/python/python3"; }
done
PATH=$work/python:$PATH

ok() { # sentence, exit status of its test
    if [ "$2" = 0 ]; then
        report "ok  " "check on a device: $1"
    else
        report FAIL "check on a device: $1"
        tail -n 20 "$work/output" | sed 's/^/     | /'
    fi
}
check() { # NAME, arguments...: results in $work/NAME; sets `status` and `folder`, writes $work/output
    folder=$work/$1
    shift
    dev/gpu_check.sh --pretend --out "$folder" "$@" >"$work/output" 2>&1
    status=$?
}
# Whether the last check had this status and its output matches all patterns.
found() { # status, patterns...
    local pattern
    [ "$status" = "$1" ] || return 1
    for pattern in "${@:2}"; do grep -q -- "$pattern" "$work/output" || return 1; done
}
one_line() { [ "$(wc -l <"$work/output")" = 1 ]; }
results() { grep -q -- "$1" "$folder/results.txt"; }
state() { # a Python expression of r, the results of the last check, p, their parts, and rows(part, column=value...)
    python3 -c 'import json, sys
r = json.load(open(sys.argv[1] + "/results.json"))
p = r["parts"]
def rows(part, **values):
    return [x for x in p[part]["rows"] if all(x.get(key) == value for key, value in values.items())]
sys.exit(not eval(f"({sys.argv[2]})"))' "$folder" "$1"
}

bundle=(--bundle "$work/bundle")
mkdir -p "$work/bundle/corpus" "$work/bundle/bin/fp32" "$work/bundle/bin/oncpu" "$work/bundle/lib"
for p in oncpu/test_trainer oncpu/test_diffv2 oncpu/bench_cuda train_diffv2 predict_diffv2; do
    ln -s "$here/build/$p" "$work/bundle/bin/$p"
done
ln -s "$here/build/fp32/oncpu" "$work/bundle/bin/fp32/oncpu"
echo "a folder of this test" >"$work/bundle/CONTENTS"
git describe --always --dirty >"$work/bundle/revision" 2>/dev/null || echo unknown >"$work/bundle/revision"
python3 dev/gpu_check/programs.py >"$work/bundle/sources"
for i in $(seq 2000); do echo "the quick brown fox jumps over the lazy dog $((i % 10))"; done >"$work/text"
build/text_to_shards --out "$work/bundle/corpus" "$work/text" >/dev/null || exit 1

# programs that fail
fakes=$work/fakes
mkdir "$fakes"
fake() { # name: a shell script from stdin
    {
        echo '#!/bin/sh'
        cat
    } >"$fakes/$1"
    chmod +x "$fakes/$1"
}
fake wrong <<'END'
[ "$1" = --help ] && exit
echo "diffv2: cuDNN: no plan for N=3"
echo "FAIL rope N=3: its process ended, exit status 1"
echo "ok   rope N=4"
echo "1 passed, 1 failed"
exit 1
END
fake crash <<'END'
[ "$1" = --help ] || exit 139
END
fake sanitizer <<'END'
case "$*" in
*racecheck*"--error-exitcode 9 --target-processes all"*rmsnorm*)
    echo "========= Error: Race reported between Write access at x.cuh:3"
    exit 9
    ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
END

parts=rates,correctness,profile,models,decode,attention,train,kernels
check a "${bundle[@]}" --parts "$parts"
ok "all parts pass with the emulated device" "$status"
started=$(sed -n 's/^\([a-z0-9]*\): \(starts\|continues\).*/\1/p' "$work/output" | tr '\n' ' ')
[ "$started" = "machine ${parts//,/ } " ] \
    && state 'all(p[n]["status"] == "passed" for n in "machine,'"$parts"'".split(",")) and
        p["profile"]["done"] == ["tiny diff_v2", "tiny diff_v2 --matmul-dtype fp8"] and
        p["models"]["done"] == ["tiny T 16, no update", "tiny T 16"] and p["train"]["done"] == ["bits", "fp32"]'
ok "each part runs once, rates and correctness first; the results contain the status of each" $?
state '(lambda errors: {b for b, x in errors if b == "fp32" and 0 < x < 2e-4 or b != "fp32" and 0.001 < x < 0.4} ==
    {"fp32", "bf16", "fp8"} and len(errors) == 8)(
    [(x["of"].split(", ")[-1], x["measured"]) for x in rows("correctness", case="worst matrix")]) and
    sum("no gradients in fp8" in x["case"] and "experts compute in bf16" in x["note"]
        for x in rows("correctness")) == 1 and
    {f"{b} {i}/2" for b in ("bf16", "fp32") for i in (1, 2)} <= {*p["correctness"]["done"]} and
    len([x for x in rows("correctness", verdict="ok") if x["case"].startswith("operations, ")]) == 4'
ok "the results contain operations in shards, and the errors of gradients, in fp8 too" $?
state '{x["of"] for x in rows("models") if x["case"] != "forward" and x.get("unit") == "tokens/s"} ==
    {f"tiny {m}, B 2 T 16" for m in ("baseline", "diff_v1", "diff_v2", "baseline with 2 NH heads",
        "diff_v2, not deterministic")} and
    len([x for x in rows("models", case="forward")]) == 8'
ok "the results contain the published models without an update, and five models that train" $?
state 'any(x["measured"] > 0 < x["expected"]
    for x in rows("profile", case="linear_forward", against="prediction"))
    and len(rows("profile", case="step", against="prediction")) == 2 and
    {"copy by a kernel", "gemm"} <= {x["case"] for x in rows("rates")} and
    {"fp8_quantize", "linear_forward in fp8", "gemm in fp8"} <= {x["case"] for x in rows("kernels", unit="ms")}' \
    && results 'attention_backward' && results "measured .*expected .*ratio" \
    && tail -n 1 "$folder/results.txt" | grep -q '^[0-9]* passed, 0 failed$'
ok "the results compare predicted and measured times of a step, and have rates and the times of operations" $?
python3 dev/gpu_check/attention_choice.py --print "$folder/results.json" >"$work/output"
[ ! -s "$work/output" ] && state '[(x["case"], x["of"]) for x in rows("attention", unit="ms", against="cuDNN")] ==
    [(f"attention {d}", f"tiny {v}, B 2 T 40{m}") for m in ("", ", not deterministic")
        for v in ("diff_v2", "baseline") for d in ("forward", "backward")]'
ok "the results compare attention by both kernels; those of an unlisted device are in no table" $?
state '{x["of"] for x in rows("decode", case="attention_decode", against="Transformer NH")} ==
        {f"{arm}, B {B}, context {c}" for arm in ("Transformer NH", "Transformer 1.5 NH", "Transformer 2 NH", "DIFF V1",
            "DIFF V2") for B in (1, 2) for c in (20, 70)} and
    len([x for x in rows("decode", case="token") if 0 < x["least"] <= x["ratio"] <= x["most"]]) == 24 and
    any(" window 16;" in x.get("of", "") for x in p["decode"]["rows"])' \
    && results "Transformer NH" && results "tiny DIFF V2 with YOCO"
ok "the results contain decoding of every variant at each context and batch size, and attention with a window" $?
cmp -s "$folder"/results.json "$folder"/published/gpu-device-*.json \
    && cmp -s "$folder"/results.txt "$folder"/published/gpu-device-*.txt
ok "results.json and results.txt are also published under the name of the device and the date" $?
check a "${bundle[@]}" --parts "$parts"
found 0 && [ "$(grep -c '^[a-z]*: starts' "$work/output")" = 1 ]
ok "a second run repeats no part but the choice of programs" $?
mkdir -p "$work/taken" && cp -r "$folder/published" "$work/taken"
check taken "${bundle[@]}" --parts "$parts"
found 0 && [ "$(grep -c '^[a-z]*: starts' "$work/output")" = 1 ] && state 'rows("kernels")'
ok "another directory takes over published results of the same programs and device" $?
CUDA_ON_CPU_NAME="NVIDIA B200" check taken "${bundle[@]}" --parts rates
found 1 'results.json has results of CUDA on the CPU.*, not of NVIDIA B200: choose another --out'
ok "results of another device cause a one-line error" $?
CUDA_ON_CPU_NAME="NVIDIA B200" check s --parts attention
python3 dev/gpu_check/attention_choice.py --print "$folder/results.json" >"$work/output"
n='{[0-9.e+]*, [0-9.e+]*}'
found 0 "^    {\"B200\", 0, 32, 32, 40, true, $n, $n},\$" "^    {\"B200\", 1, 32, 32, 40, false, $n, $n},\$" \
    && [ "$(wc -l <"$work/output")" = 4 ] && dev/gpu_check/attention_choice.py --check \
    && [ -e "$folder"/published/gpu-b200-*.txt ]
ok "the rows of the table of --attention-kernel auto follow from the results, and so does the committed table" $?
CUDA_ON_CPU_CUDNN_FAULT='plan: no engine' check t --parts attention
found 0 && state 'not rows("attention", unit="ms") and len(rows("attention")) == 4 and
    all("--attention-kernel cudnn: forward" in x["note"] and "no engine" in x["note"] for x in rows("attention"))'
ok "shapes that cuDNN does not support are named in the part attention, with the reason" $?

# the emulation is too slow for more than what a case is about: other programs are imitations
fake other <<'END' # gradients of other data stand for wrong gradients; those of the baseline fail
case "$*" in
*gradients-baseline*dump-grads*) exit 139 ;;
*dump-grads*) set -- $(echo "$@" --seed 1 | sed 's/--batch-size 1/--batch-size 2/') ;;
esac
exec build/fp32/oncpu/test_trainer --trainer "$@"
END
fake torch <<'END' # PyTorch's program, with other times
case "$*" in *torch.cuda*) echo 2.0 ;; *) echo "1 parameters, torch 2.0"; while read -r _; do echo 7.5; done ;; esac
END
fake python <<END
echo "\$*" >>"$work/torch_calls"
exec "$fakes/torch" "\$@"
END
TORCH_PYTHON="$fakes/python" TEST_DIFFV2CU="$fakes/wrong" TEST_DIFFV2CU_FP32="$fakes/crash" \
    TRAIN_DIFFV2CU_FP32="$fakes/other" check b "${bundle[@]}" --parts correctness,peer
[ "$(head -n 1 "$work/torch_calls")" = "$here/dev/bench/bench_torch.py tiny diff_v2 2 1 16 --device cpu" ]
ok "PyTorch compiles its models while operations are compared" $?
found 1 'FAIL operations, bf16 0/2: rope N=3: its process ended, exit status 1: diffv2: cuDNN: no plan for N=3' \
    'ok   operations, bf16 1/2: the test program ends: 1 passed, 1 failed' \
    'FAIL operations, fp32 0/2: the test program ends: no output' \
    'FAIL gradients of diff_v2, fp32 .*weight: error' 'ok   gradients of diff_v2, bf16' 'correctness: failed' \
    'FAIL baseline: the fp32 build computes gradients' 'ok   gradients of baseline, bf16'
ok "wrong operations and gradients, and programs that crash, are reported by name; the others are compared" $?
fake stops <<'END'
[ "$1" = --help ] || { printf 'ok   rope N=1\n    x.h:3: off by 0.1\nFAIL rope N=3\nok   rope N=4\n' && exec sleep 60; }
END
TEST_DIFFV2CU="$fakes/stops" TEST_DIFFV2CU_FP32="$fakes/crash" LIMIT_SECONDS=2 check d --parts correctness --minutes 0.2
found 1 'FAIL operations, bf16 0/2: rope N=3: x.h:3: off by 0.1' \
    && results ' operations, bf16 0/2: 3 tests before the time limit' && state '"bf16 2/2" in p["correctness"]["done"]'
ok "the failures that a test program found before it was stopped are kept" $?
fake bench <<'END'
[ "$1" = --help ] && exit
[ "$*" != facts ] || exec build/oncpu/bench_cuda --tiny facts
echo "$*" | grep -q -- "--batch 2 --no-update model tiny 16" || exit 9
shift 6 # --batch B --no-update model PRESET T
for c in "$@"; do
    case $c in diff_v1*) echo "diffv2: out of device memory: cannot allocate 9 MiB" >&2; exit 1 ;; esac
    for what in training forward; do
        echo "{\"case\": \"$what\", \"of\": \"tiny ${c%%,*}, B 2 T 16\", \"measured\": 3.5, \"unit\": \"tokens/s\"," \
            "\"against\": \"\", \"ratio\": null, \"note\": \"\"}"
    done
done
END
BENCH_CUDA="$fakes/bench" LIMIT_SECONDS=20 check i --parts models
found 1 'FAIL bench_cuda --batch 2 model' && ! found 1 'FAIL bench_cuda .*no-update' \
    && results 'too little memory: .*out of device memory: cannot allocate 9 MiB' \
    && state '[x["of"] for x in rows("models", case="training")] ==
        [f"tiny {m}, B 2 T 16" for m in ("baseline", "diff_v2")]'
ok "what does not fit is a fact, not a failure, and the other models run" $?
fake decoder <<'END' # the third arm fails
case "$*" in *-2h*) exec >&-; sleep 0.2; echo "diffv2: a bad kernel" >&2; exit 1 ;; esac
exec build/oncpu/bench_cuda --tiny "$@"
END
BENCH_CUDA="$fakes/decoder" check o --parts decode
found 1 'FAIL B 2: steps of every arm: diffv2: a bad kernel' 'ok   attention with a window is measured'
ok "an arm of the decoding benchmark that does not run is reported with its reason" $?
TORCH_PYTHON="$fakes/python" check peer --parts peer
found 1 'FAIL tiny diff_v2, 2 key/value heads, B 1 T 16: both models have the same number of parameters' \
    && state '[x["of"].split("T 16")[1] for x in rows("peer", case="step", against="PyTorch", expected=7.5)] ==
        ["", ", not deterministic"]'
ok "steps alternate with PyTorch's, deterministic and not; another number of parameters is a failure" $?
fake old <<'END' # a GPU without FP8
case "$*" in *fp8*) echo "diffv2: --matmul-dtype fp8: requires a GPU of compute capability 8.9" >&2; exit 1 ;; esac
exec build/oncpu/test_trainer --trainer "$@"
END
TRAIN_DIFFV2CU="$fakes/old" check m --parts profile
found 0 && results 'no profile of .*fp8: .*requires a GPU of compute capability 8.9'
ok "a device without FP8 has no profile in fp8, with the reason" $?

COMPUTE_SANITIZER="$fakes/sanitizer" check e --parts sanitizer
found 1 'FAIL compute-sanitizer, racecheck rmsnorm: Error: Race reported between Write access at x.cuh:3' \
    && state '{"memcheck unaligned", "racecheck linear", "racecheck attention_decode"} <= {*p["sanitizer"]["done"]} and
        len(rows("sanitizer", verdict="FAIL")) == 1'
ok "an error of the sanitizer is a failure" $?
fake slow <<END
[ -e "$work/quick" ] || case "\$*" in *unaligned*) exec sleep 60 ;; esac
exec "$fakes/sanitizer" "\$@"
END
COMPUTE_SANITIZER="$fakes/slow" LIMIT_SECONDS=2 check k --parts sanitizer
found 1 'sanitizer: unfinished: .*unaligned' \
    && state '"memcheck unaligned" not in p["sanitizer"]["done"] and "memcheck smallest" in p["sanitizer"]["done"]' \
    && results '^unfinished: sanitizer$'
ok "a sanitizer case that is stopped is unfinished, and the following cases run" $?
touch "$work/quick"
COMPUTE_SANITIZER="$fakes/slow" check k --parts sanitizer
state 'p["sanitizer"]["done"][-1] == "memcheck unaligned" and p["sanitizer"]["status"] == "failed"'
ok "the next run repeats only the case that was stopped" $?

python3 -c 'import sys
sys.path.insert(0, "dev/gpu_check")
import operations as o
print(*dict.fromkeys(word for _, word in o.SANITIZED), sep="\n")' >"$work/words"
while read -r word; do # of so many shards the last one is empty: no case runs
    build/oncpu/test_diffv2 --shard 99999/100000 "$word" 2>&1 | grep "no case's line" && break
done <"$work/words" >"$work/output"
[ "$(wc -l <"$work/words")" -gt 15 ] && [ ! -s "$work/output" ]
ok "every word of the sanitizer matches a case" $?

fake fine <<'END'
[ "$1" = --help ] || printf 'ok   rope\n1 passed, 0 failed\n'
END
quick=(env TEST_DIFFV2CU="$fakes/fine" TEST_DIFFV2CU_FP32="$fakes/fine")
check f --parts train --minutes 0.1
found 3 'not started: out of time'
ok "a part that does not fit into the time is not started, and the exit status is 3" $?
"${quick[@]}" setsid dev/gpu_check.sh --pretend --out "$work/g" "${bundle[@]}" --parts correctness \
    >"$work/output" 2>&1 &
victim=$!
for _ in $(seq 400); do
    grep -q '"bf16 2/2"' "$work/g/results.json" 2>/dev/null && break
    sleep 0.05
done
kill -9 -- -"$victim"
wait "$victim" 2>/dev/null
export TEST_DIFFV2CU=$fakes/fine TEST_DIFFV2CU_FP32=$fakes/fine
check g "${bundle[@]}" --parts correctness
found 0 'correctness: continues' \
    && state 'len({*p["correctness"]["done"]}) == 7 == len(p["correctness"]["done"]) and
        sum("the test program ends" in x["case"] for x in rows("correctness", verdict="ok")) == 4'
ok "after a kill during a part, the next run continues, and no case is twice in the results" $?
unset TEST_DIFFV2CU TEST_DIFFV2CU_FP32
sed -i 's/"sources": "[^"]*"/"sources": "others"/; s/"commit": "[^"]*"/"commit": "another"/' "$work/g/results.json"
check g --parts rates
found 1 "has results of the programs of another, and those of .* differ: choose another --out" && one_line
ok "results of other programs cause a one-line error" $?
echo '{"format": 1, "comm' >"$work/g/results.json"
check g --parts rates
found 1 'has an invalid format' && one_line
ok "a truncated results.json causes a one-line error" $?

# a copy of the check without git and without programs, as on a rented machine; make links the programs of this tree
tree=$work/tree
mkdir -p "$tree/dev"
cp -r dev/gpu_check dev/gpu_check.sh "$tree/dev"
fake make <<END
mkdir -p build/fp32
for p in oncpu fp32/oncpu train_diffv2 predict_diffv2; do ln -sfn "$here/build/\$p" "build/\$p"; done
echo "made \$*" >>"$work/made"
END
rented() { # directory of the results, arguments...: the check in that copy
    folder=$work/$1
    : >"$work/made"
    (cd "$tree" && PATH="$fakes:$PATH" dev/gpu_check.sh --pretend --out "$folder" "${@:2}") >"$work/output" 2>&1
    status=$?
}
rented h --parts rates
found 0 'rates: passed' && [ "$(grep -c "made -k" "$work/made")" = 2 ] && grep -q "fp32/oncpu/test_diffv2" "$work/made"
ok "without a bundle all programs are built first" $?
fake other_machine <<'END'
echo "x: error while loading shared libraries: libcudnn.so.9: cannot open shared object file" && exit 127
END
ln -sf "$fakes/other_machine" "$work/bundle/bin/oncpu/test_trainer"
rented j "${bundle[@]}" --parts rates,train
found 1 'FAIL TRAIN_DIFFV2CU starts: cannot start: .*libcudnn' 'rates: passed' 'the fp32 build trains' \
    'train: unfinished: TRAIN_DIFFV2CU: cannot start' && [ ! -s "$work/made" ] \
    && grep -q "bundle/bin/oncpu/bench_cuda --tiny facts" "$folder/log.txt" \
    && state 'r["commit"] == open(sys.argv[1] + "/../bundle/revision").read().strip()'
ok "the programs and the commit are the bundle's; one that cannot start prevents only what requires it" $?
fake make <<'END'
echo "x.cu(3): error: this is no CUDA"
exit 2
END
rm -rf "$tree/build"
rented n --parts rates
found 1 'FAIL make .*build/oncpu/test_trainer: x.cu(3): error: this is no CUDA' \
    'FAIL BENCH_CUDA starts: cannot start' 'rates: unfinished: BENCH_CUDA: cannot start'
ok "a failed build is reported with its reason and the parts that it prevents" $?
fake make <<END
echo "made \$*" >>"$work/made"
exec sleep 60
END
: >"$work/made"
(cd "$tree" && PATH="$fakes:$PATH" exec dev/gpu_check.sh --pretend --out "$work/u" --parts rates) >/dev/null 2>&1 &
victim=$!
for _ in $(seq 200); do [ -s "$work/made" ] && break || sleep 0.05; done
(cd "$tree" && dev/gpu_check.sh --pretend --out "$work/v" --parts rates) >"$work/output" 2>&1
status=$?
found 1 "another gpu_check.sh uses .*/build/gpu_check: wait for its end" && one_line
ok "a second check of the same directory is refused" $?
start=$SECONDS
kill "$victim"
wait "$victim" 2>/dev/null
[ $? = 143 ] && [ $((SECONDS - start)) -lt 10 ] && ! pgrep -f "sleep 60" >/dev/null
ok "SIGTERM ends a check and its programs" $?
fake no_device <<'END'
[ "$1" = --help ] || { echo "diffv2: no CUDA device: no driver; train_diffv2 is the program for CPUs" >&2 && exit 1; }
END
BENCH_CUDA="$fakes/no_device" check w --parts rates,train
found 1 'gpu_check.sh: diffv2: no CUDA device: no driver' && ! found 1 'rates: starts'
ok "without a device the check ends at once, with the reason" $?
check l --parts speed
found 2 "the parts are machine, rates" && one_line && check l --bundle "$work" && found 2 'not a bundle' && one_line
ok "unknown parts and directories that are not bundles are one-line usage errors" $?

# short.sh on a rented machine: one program is wrong, one hangs, one is missing
short=$work/short packed=$work/packed/diffv2_short
mkdir -p "$short" "$packed/bin/oncpu" "$packed/bin/fp32/oncpu" "$packed/lib" "$packed/project"
cp dev/gpu_check/short.sh "$short"
mapfile -t patterns < <(python3 dev/gpu_check/programs.py --patterns) # the files that travel, and no other
git ls-files -z -- "${patterns[@]}" | tar --null -T - -cf - | tar -C "$packed/project" -xf -
cp -r "$work/bundle/corpus" "$work/bundle/CONTENTS" "$work/bundle/revision" "$packed"
for p in oncpu/test_trainer oncpu/bench_cuda {train,predict}_diffv2; do ln -s "$here/build/$p" "$packed/bin/$p"; done
ln -s "$fakes/wrong" "$packed/bin/oncpu/test_diffv2"
ln -s "$fakes/hangs" "$packed/bin/fp32/oncpu/test_diffv2"
fake hangs <<'END' # once, and not even SIGTERM ends it
[ "$1" = --help ] && exit
echo "ok   rope N=1"
case "$*" in
*"--shard 0/2"*) trap '' TERM && while :; do sleep 1; done ;;
*) echo "1 passed, 0 failed" ;;
esac
END
cp "$work/bundle/sources" "$packed"
echo 90 >"$packed/archs"
tar -C "$work/packed" -czf "$short/check.tar.gz" diffv2_short
fake nvidia-smi <<END
cat "$work/gpu"
END
echo "NVIDIA H100 80GB HBM3, 9.0" >"$work/gpu"
on_machine() { # arguments of short.sh
    start=$SECONDS
    (cd / && env PATH="$fakes:$PATH" SHORT_HOME="$work/home" OUT="$work/out" FIRST_SECONDS=100 LIMIT_SECONDS=30 \
        SHORT_OPTIONS="--pretend --parts rates,correctness,train" "$short/short.sh" "$@") >"$work/output" 2>&1
    status=$? folder=$work/home/check/state
}
on_machine first
[ $((SECONDS - start)) -lt 115 ] && found 1 'rates: passed' 'FAIL operations, bf16 0/2: rope N=3' \
    && results 'ok   operations, fp32 1/2' \
    && results 'ok   gradients of diff_v2, bf16' && results 'diff_v2: no gradients of the fp32 build: cannot start' \
    && ! pgrep -f "$fakes/hangs" >/dev/null
ok "short.sh first keeps its limit with a program that hangs, and has the results of all others" $?
[ "$(find "$work/out" -name 'gpu-*' -o -name failed.txt -o -name summary.txt -o -name log.txt.gz | wc -l)" = 5 ] \
    && [ "$(find "$work/out" -type f | wc -l)" = 5 ] && grep -q 'rope N=3' "$work/out/failed.txt"
ok "at most eight files come back, with the failures in one of them" $?
on_machine second 60
[ $((SECONDS - start)) -lt 75 ] && found 1 && results 'ok   a run that is stopped .* is bitwise equal' \
    && state 'len({*p["correctness"]["done"]}) == len(p["correctness"]["done"]) and "bits" in p["train"]["done"]' \
    && results 'unfinished: .*correctness'
ok "short.sh second continues, keeps its limit, and finishes what can be finished" $?
echo "NVIDIA A100-SXM4-80GB, 8.0" >"$work/gpu"
on_machine second 30
found 1 'this GPU is an NVIDIA A100-SXM4-80GB, 8.0, and the programs are for sm_90: short.sh prepare 80' && one_line
ok "a GPU for which the programs have no code is refused before its time is spent" $?
echo "NVIDIA H100 80GB HBM3, 9.0" >"$work/gpu"
mv "$short/check.tar.gz" "$short/gap.tar.gz"
on_machine gap 1
found 1 "gap.py: \($work/home/gap/period has no corpus.tar.xz\|this is Python 3.8.*: 3.10.12 or newer\)" && one_line
ok "short.sh gap starts a period of the lab with the trainer of its archive, and refuses one without a corpus" $?
rm -r "$work/home/check" "$work/out"
on_machine first
found 1 'check.tar.gz is missing: copy the directory' && one_line \
    && [ ! -e "$work/home/check" ] && [ ! -e "$work/out" ] \
    && on_machine second 0 && found 2 'no positive number' && one_line \
    && on_machine third && found 2 'usage: short.sh prepare' && one_line
ok "a missing archive and unexpected arguments of short.sh are one-line errors" $?

finish
