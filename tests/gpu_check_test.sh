#!/usr/bin/env bash
# gpu_check_test.sh: tests dev/gpu_check.sh without a GPU: with dev/cuda_on_cpu (--pretend), with programs that fail or
# hang, after a kill, and at time limits. The last line is "N passed, N failed"; exit status 0 if nothing failed.
# Requires the programs of --pretend, which scripts/test.sh builds.
#
# Usage: tests/gpu_check_test.sh
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
work=$(mktemp -d) || exit 1
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

# a bundle without what only a build requires
bundle=(--bundle "$work/bundle")
mkdir -p "$work/bundle/corpus"
echo "a folder of this test" >"$work/bundle/CONTENTS"
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
echo "FAIL rope N=3 is off by 0.1"
echo "71 passed, 1 failed"
exit 1
END
fake refused <<'END'
echo "diffv2: cuDNN: no plan for T=33"
echo "FAIL attention T=33: its process ended, exit status 1"
echo "71 passed, 1 failed"
exit 1
END
echo "exit 139" | fake crash
echo "sleep 60" | fake hang
fake sanitizer <<'END'
case "$*" in *racecheck*rmsnorm*)
    echo "========= Error: Race reported between Write access at x.cuh:3"
    exit 9
    ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
END

parts=profile,ops,gradients,steps,attention,experts,train,sizes,models,fp8,kernels,decode
check a "${bundle[@]}" --parts "$parts"
ok "all parts pass with the emulated device" "$status"
started=$(sed -n 's/^\([a-z0-9]*\): \(starts\|continues\).*/\1/p' "$work/output" | tr '\n' ' ')
first="profile ops gradients steps attention experts train "
[ "$started" = "${first}profile ops gradients attention experts train sizes models fp8 kernels decode " ] \
    && state 'p["profile"]["done"][:2] == ["first", "loss"] and p["ops"]["done"][0] == "first" and
        p["gradients"]["done"][0] == "diff_v2" and p["experts"]["done"][0] == "products 1" and
        p["train"]["done"][:2] == ["first", "second"] and rows("profile", case="tiny diff_v2 trains for 12 steps")'
ok "the most valuable cases come first: speed and loss, operations, gradients, steps, experts, a repeated run" $?
state 'all(p[n]["status"] == "passed" for n in "'"$parts"'".split(","))'
ok "the results contain the status of each part" $?
state '(lambda errors: len([x for b, x in errors if b == "fp32" and 0 < x < 2e-4]) == 2 and
    len([x for b, x in errors if b == "fp8" and 0.01 < x < 0.4]) == 2)(
    [(x["of"].split(", ")[1], x["measured"]) for x in rows("gradients", case="worst matrix")]) and
    {x["of"] for x in rows("models", case="training")} == {f"tiny {m}, B 2 T 16" for m in
        ("baseline", "diff_v1", "diff_v2", "baseline with 2 NH heads", "diff_v2, not deterministic")}'
ok "the results contain the errors of gradients and the five models" $?
state '{"fp32", "measured peak", "first", "second", "resumed"} <= {*p["train"]["done"]} and
    "ok   matmul" in open(sys.argv[1] + "/log.txt").read()'
ok "the parts train in fp32 and with a measured peak, and compare operations at the shapes of a model" $?
state 'sorted(x["of"] for x in rows("experts", case="worst matrix")) ==
    [f"experts, {x}" for x in ("all active, bf16", "all active, fp32", "moe-tiny, bf16", "moe-tiny, fp32")] and
    sum("no gradients in fp8" in x["case"] and "experts compute in bf16" in x["note"] for x in rows("experts")) == 1 and
    len([x for x in rows("experts", against="CPU") if abs(x["measured"] - x["expected"]) < 0.1]) == 2 * 3 and
    sum("bitwise equal" in x["case"] for x in rows("experts", verdict="ok")) == 2 * 3'
ok "the results contain gradients and losses of models with experts, and why there are none in FP8" $?
state '{"router_forward", "router_totals", "router_backward", "router_balance", "expert_group",
    "expert_gather", "expert_combine", "expert_swiglu_forward", "expert_swiglu_backward", "expert_linear_forward",
    "expert_linear_to_input", "expert_linear_to_weight"} ==
        {x["case"] for x in rows("experts", unit="ms") if x["against"] in ("copy", "product")} and
    len([x for x in rows("experts", against="a dense product") if 0 < x["least"] <= x["ratio"] <= x["most"]]) == 6' \
    && results "measured .*expected .*ratio"
ok "the results contain the times of the operations of models with experts" $?
results '^targets:' && results 'attention_backward' \
    && tail -n 1 "$folder/results.txt" | grep -q '^[0-9]* passed, 0 failed$'
ok "results.txt has the same tables, the targets, and the counts in its last line" $?
state 'any(x["measured"] > 0 < x["expected"]
    for x in rows("profile", case="block GEMMs + LM head", against="prediction"))'
ok "the results compare predicted and measured times of a step, by class of work" $?
state '[x["ratio"] > 0 for x in rows("steps", unit="ms")] == [True, True, True] and
    rows("steps", against="bf16") and rows("steps", against="deterministic") and
    rows("steps", case="step with --tune-gemm", against="the library'"'"'s first choices") and
    {x["case"] for x in rows("fp8", unit="nats", against="bf16")} ==
        {*(f"loss of step {n}" for n in (1, 2, 5, 7, 10)), "mean loss of the last 5",
         "mean loss of the last 5 --fp8-fast-accum"} and
    {"fp8_quantize", "linear_forward in fp8", "gemm in fp8"} <= {x["case"] for x in rows("kernels", unit="ms")}' \
    && results "^ *step in fp8 .* bf16 " && results "^ *mean loss of the last 5 .* bf16 "
ok "the results contain the time of a step in fp8 beside bf16, the losses of both, and the kernels of fp8" $?
python3 dev/results/attention.py --print "$folder/results.json" >"$work/output"
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
check a "${bundle[@]}" --parts "$parts"
found 0 && ! found 0 starts
ok "a second run repeats no part" $?

fake recomputes <<'END' # another learning rate stands for a wrong recomputation
exec build/oncpu/test_trainer --trainer $(echo "$@" | sed '/--recompute 2/s/--lr 3e-3/--lr 2e-3/')
END
fake few <<'END' # without grouped products
build/oncpu/bench_cuda --tiny "$@" | grep -v expert_linear
END
TRAIN_DIFFV2CU="$fakes/recomputes" BENCH_CUDA="$fakes/few" check p "${bundle[@]}" --parts experts
found 1 'ok   moe-tiny with --recompute 1 is bitwise' 'FAIL moe-tiny with --recompute 2 is bitwise equal: step' \
    'ok   moe-tiny, 1 x 16: every operation of experts is measured: 11 rows' \
    'FAIL moe-tiny, 1 x 16: every product of experts is measured: 0 rows, 0 of peers'
ok "a wrong recomputation of experts, and rows that are missing, are reported" $?

TEST_DIFFV2CU="$fakes/wrong" TEST_DIFFV2CU_FP32="$fakes/crash" check b --parts ops
found 1 'FAIL operations.*bf16: 71 passed, 1 failed: rope N=3 is off' 'FAIL operations.*fp32: no output'
ok "incorrect operations, and a test program without output, are reported by name" $?
TEST_DIFFV2CU="$fakes/refused" check b --parts ops --again
found 1 'ok   operations.*fp32' \
    'bf16: 71 passed, 1 failed: attention T=33: its process ended, exit status 1: diffv2: cuDNN: no plan for T=33'
ok "a shape that a library rejects is one failed case, with the reason" $?
TRAIN_DIFFV2CU_FP32="$fakes/crash" check c "${bundle[@]}" --parts gradients
found 1 'FAIL diff_v2: the fp32 build computes gradients' && state 'p["gradients"]["done"] == ["diff_v2", "baseline"]'
ok "a build that does not run fails its gradient comparison, and the next variant is compared" $?
fake other <<'END' # gradients of other data stand for wrong gradients
case "$*" in *dump-grads*) set -- $(echo "$@" --seed 1 | sed 's/--batch-size 1/--batch-size 2/') ;; esac
exec build/fp32/oncpu/test_trainer --trainer "$@"
END
TRAIN_DIFFV2CU_FP32="$fakes/other" check d "${bundle[@]}" --parts gradients
found 1 'FAIL gradients of diff_v2, fp32 .*weight: error' 'ok   gradients of diff_v2, bf16'
ok "gradients of different data fail the comparison" $?
fake bench <<'END'
shift 3 # model PRESET T
for c in "$@"; do
    case $c in diff_v1*) echo "diffv2: attention's backward: no plan" >&2; exit 1 ;; esac
    model=${c%%,*}
    case $c in *,2) model="$model with 2 NH heads" ;; *,fast) model="$model, not deterministic" ;; esac
    for what in training forward; do
        echo "{\"case\": \"$what\", \"of\": \"tiny $model, B 2 T 16\", \"measured\": 3.5, \"unit\": \"tokens/s\"," \
            "\"against\": \"\", \"ratio\": null, \"note\": \"\"}"
    done
done
END
BENCH_CUDA="$fakes/bench" check i --parts models
found 1 "FAIL bench_cuda model.* attention's backward: no plan" 'all models run: 4 of 5' \
    && state '[x["of"] for x in rows("models", case="training")] == [f"tiny {m}, B 2 T 16" for m in
        ("baseline", "diff_v2", "baseline with 2 NH heads", "diff_v2, not deterministic")]'
ok "the other models are tested after a model fails" $?
fake decoder <<'END' # the third arm does not fit in the memory
case "$*" in *-2h*) exec >&-; sleep 0.2; echo "diffv2: out of device memory" >&2; exit 1 ;; esac
exec build/oncpu/bench_cuda --tiny "$@"
END
BENCH_CUDA="$fakes/decoder" check o --parts decode
found 1 'FAIL B 2: steps of every arm: diffv2: out of device memory' 'ok   attention with a window is measured'
ok "an arm of the decoding benchmark that does not run is reported with its reason" $?
CUDA_ON_CPU_NAME="NVIDIA B200" check s --parts attention
python3 dev/results/attention.py --print "$folder/results.json" >"$work/output"
n='{[0-9.e+]*, [0-9.e+]*}'
found 0 "^    {\"B200\", 0, 32, 32, 40, true, $n, $n},\$" "^    {\"B200\", 1, 32, 32, 40, false, $n, $n},\$" \
    && [ "$(wc -l <"$work/output")" = 4 ] && dev/results/attention.py --check
ok "the rows of the table of --sdpa auto follow from the results, and so does the committed table" $?
CUDA_ON_CPU_CUDNN_FAULT='plan: no engine' check t --parts attention
found 0 && state 'not rows("attention", unit="ms") and len(rows("attention")) == 4 and
    all("--sdpa cudnn: forward" in x["note"] and "no engine" in x["note"] for x in rows("attention"))'
ok "shapes that cuDNN does not support are named in the part attention, with the reason" $?
COMPUTE_SANITIZER="$fakes/sanitizer" check e --parts sanitizer
found 1 'FAIL compute-sanitizer, racecheck rmsnorm: Error: Race reported between Write access at x.cuh:3' \
    '28 passed, 1 failed' && state '[x[10:] for x in p["sanitizer"]["done"][:5]] ==
    ["expert_linear", "expert_gather", "expert_group", "expert_swiglu", "router"] and
    {"racecheck linear", "racecheck attention_decode"} <= {*p["sanitizer"]["done"]}'
ok "an error of the sanitizer is a failure" $?
fake slow <<END
[ -e "$work/quick" ] || case "\$*" in *unaligned*) exec sleep 60 ;; esac
exec "$fakes/sanitizer" "\$@"
END
COMPUTE_SANITIZER="$fakes/slow" LIMIT_SECONDS=1 check k --parts memcheck
found 3 'memcheck: unfinished: stopped after 1 s: .* unaligned' \
    && state 'p["memcheck"]["done"] == ["memcheck smallest"]' && results '^unfinished: memcheck$'
ok "a sanitizer case that is stopped is unfinished, and the following cases run" $?
touch "$work/quick"
COMPUTE_SANITIZER="$fakes/slow" check k --parts memcheck
found 0 && state 'p["memcheck"]["done"] == ["memcheck smallest", "memcheck unaligned"] and
    len(rows("memcheck")) == 2'
ok "the next run repeats only the case that was stopped" $?

# As compute-sanitizer follows processes: not into another program unless it is asked to. With PLANTED each process that
# it follows to its end has a race.
cc -shared -fPIC -o "$work/follow.so" -x c - <<'END' || exit 1
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int execv(const char *path, char *const argv[]) {
    if (strcmp(getenv("FOLLOWS"), "all") != 0) unsetenv("LD_PRELOAD");
    return ((int (*)(const char *, char *const[]))dlsym(RTLD_NEXT, "execv"))(path, argv);
}
__attribute__((destructor)) static void end(void) { close(creat(getenv("FOLLOWED"), 0600)); }
END
fake follower <<END
follows=application-only
while :; do
    case "\$1 \$2" in
    "--tool memcheck" | "--tool racecheck" | "--tool synccheck" | "--tool initcheck") ;;
    "--error-exitcode "[0-9]*) code=\$2 ;;
    "--target-processes all" | "--target-processes application-only") follows=\$2 ;;
    -*) echo "unrecognised option or argument '\$1 \$2'" && exit 1 ;;
    *) break ;;
    esac
    shift 2
done
rm -f "$work/followed"
echo "========= COMPUTE-SANITIZER"
FOLLOWS=\$follows FOLLOWED="$work/followed" LD_PRELOAD="$work/follow.so" "\$@" || exit 1
if [ ! -e "$work/followed" ]; then
    echo "========= Error: Target application terminated before first instrumented API call"
    echo "========= Tracking kernels launched by child processes requires the --target-processes all option."
    exit 1
elif [ "\$PLANTED" ]; then
    echo "========= Error: Race reported between Write access at planted.cuh:3"
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    exit "\$code"
fi
echo "========= ERROR SUMMARY: 0 errors"
END
planted='Error: Race reported between Write access at planted.cuh:3'
export COMPUTE_SANITIZER=$fakes/follower
export -n OMP_WAIT_POLICY GOMP_SPINCOUNT KMP_BLOCKTIME # with these no program executes itself again
check q --parts memcheck
found 0 '2 passed, 0 failed' && PLANTED=yes check q --parts memcheck --again \
    && found 1 "FAIL compute-sanitizer, memcheck unaligned: $planted" "FAIL .* memcheck smallest: $planted"
ok "an error is found by the sanitizer in a program that executes itself again" $?
alone() { # variables, the tool and its options
    env PLANTED=yes "$@" build/oncpu/test_diffv2 --one-process head_norm >"$work/output" 2>&1
    status=$?
}
racecheck=("$COMPUTE_SANITIZER" --tool racecheck --error-exitcode 9)
alone "${racecheck[@]}"
found 1 'terminated before first instrumented API call' && ! found 1 "$planted" \
    && alone "${racecheck[@]}" --target-processes all && found 9 "$planted" \
    && alone GOMP_SPINCOUNT=1 KMP_BLOCKTIME=0 OPENBLAS_CORETYPE=Haswell "${racecheck[@]}" && found 9 "$planted" \
    && alone "$COMPUTE_SANITIZER" --tool races && found 1 "unrecognised option or argument '--tool races'"
ok "without --target-processes all and the variables that prevent this, the sanitizer would lose the process" $?
unset COMPUTE_SANITIZER
export OMP_WAIT_POLICY
python3 -c 'import sys
sys.path.insert(0, "dev/gpu_check")
import operations as o
print(*o.FIRST, *dict.fromkeys(word for _, word in o.SHORT + o.LONG if word), sep="\n")' >"$work/words"
while read -r word; do # chosen and excluded: none runs
    build/oncpu/test_diffv2 "$word" "-$word" 2>&1 | grep "no case's line" && break
done <"$work/words" >"$work/output"
[ "$(wc -l <"$work/words")" -gt 20 ] && [ ! -s "$work/output" ]
ok "every word of the first operations and of the sanitizer matches a case" $?

fake old <<'END' # a GPU without FP8
case "$*" in *fp8*) echo "diffv2: --gemm fp8: requires a GPU of compute capability 8.9 or higher" >&2; exit 1 ;; esac
END
TRAIN_DIFFV2CU="$fakes/old" check m "${bundle[@]}" --parts fp8
found 0 'fp8: skipped: .*requires a GPU of compute capability 8.9'
ok "a device without FP8 skips the part fp8, with the reason" $?
TRAIN_DIFFV2CU="$fakes/old" check m "${bundle[@]}" --parts fp8
found 0 'fp8: starts' 'fp8: skipped: '
ok "a skipped part is tried again by the next run" $?
fake same <<'END' # --gemm fp8 without an effect
exec build/oncpu/test_trainer --trainer $(echo "$@" | sed 's/--gemm fp8//; s/--fp8-fast-accum//')
END
TRAIN_DIFFV2CU="$fakes/same" check n "${bundle[@]}" --parts fp8
found 1 'FAIL the losses in fp8 are not those of bf16'
ok "losses in fp8 that equal those of bf16 fail" $?

fake fine <<'END'
echo "1 passed, 0 failed"
END
TEST_DIFFV2CU="$fakes/hang" TEST_DIFFV2CU_FP32="$fakes/fine" LIMIT_SECONDS=1 check r --parts ops
found 3 'ops: unfinished: at its time limit' 'ops: unfinished: stopped after 1 s: .*/hang.*; stopped after 1 s' \
    '1 passed, 0 failed' && state 'p["ops"]["done"] == ["fp32"]'
ok "a part at its time limit is unfinished, not failed, and continues after the others" $?
check r --parts ops
found 0 '3 passed, 0 failed' && state 'p["ops"]["done"] == ["fp32", "first", "bf16"]'
ok "the same command completes a part that was stopped at its time limit" $?
check f --parts ops --minutes 0.1
found 3 'not started: out of time'
ok "a part that does not fit into the time is not started, and the exit status is 3" $?
start=$SECONDS
TEST_DIFFV2CU_FP32="$fakes/hang" check f --parts ops --minutes 0.25
found 3 'ops: unfinished: out of time' && [ $((SECONDS - start)) -lt 25 ] \
    && state 'p["ops"]["done"] == ["first", "bf16"]'
ok "a program that hangs is stopped at the time limit, and earlier results are kept" $?
check f --parts ops
found 0 'ops: continues' && state 'p["ops"]["done"] == ["first", "bf16", "fp32"] and len(rows("ops")) == 3'
ok "the next run completes the remaining parts, each once" $?

setsid dev/gpu_check.sh --pretend --out "$work/g" "${bundle[@]}" --parts gradients >"$work/output" 2>&1 &
victim=$!
for _ in $(seq 200); do
    grep -q '"diff_v2"' "$work/g/results.json" 2>/dev/null && break
    sleep 0.05
done
kill -9 -- -"$victim"
wait "$victim" 2>/dev/null
check g "${bundle[@]}" --parts gradients
found 0 'gradients: continues' \
    && state 'p["gradients"]["done"] == ["diff_v2", "baseline"] and len(rows("gradients", verdict="ok")) == 8'
ok "after a kill during a part, the next run continues after the last completed case" $?
sed -i 's/"commit": "[^"]*"/"commit": "another"/' "$work/g/results.json"
check g --parts ops
found 1 "has results of commit another, and this is .*: choose another --out" && one_line
ok "results of another commit cause a one-line error" $?
echo '{"format": 1, "comm' >"$work/g/results.json"
check g --parts ops
found 1 'has an invalid format' && one_line
ok "a truncated results.json causes a one-line error" $?

# a copy of the sources without git and without programs, as on a rented machine; make links the programs of this tree
tree=$work/tree here=$PWD
mkdir -p "$tree/dev"
cp -r dev/gpu_check dev/gpu_check.sh "$tree/dev"
git describe --always --dirty >"$work/bundle/revision" 2>/dev/null || echo unknown >"$work/bundle/revision"
fake make <<END
mkdir -p build/fp32
for p in oncpu fp32/oncpu train_diffv2; do ln -sfn "$here/build/\$p" "build/\$p"; done
echo "made \$*" >>"$work/made"
END
rented() { # arguments...: the check in that copy
    folder=$work/h
    (cd "$tree" && PATH="$fakes:$PATH" dev/gpu_check.sh --pretend --out "$folder" "${bundle[@]}" "$@") \
        >"$work/output" 2>&1
    status=$?
}
builds() { grep -c -- "-k" "$work/made"; }
rented --parts probe,build
found 0 && [ "$(builds)" = 3 ] \
    && state '"CUDA on the CPU" in r["device"] and
        r["commit"] == open(sys.argv[1] + "/../bundle/revision").read().strip()'
ok "without git the commit is that of the bundle, and the results name the device" $?
rm -rf "$tree/build"
rented --parts ops
found 0 'build: passed' 'ops: passed' && [ "$(builds)" = 6 ]
ok "on another machine the programs are rebuilt, and completed parts are not repeated" $?
cp "$fakes/make" "$fakes/link"
fake make <<END
case "\$*" in *STRICT=no*) exec "$fakes/link" "\$@" ;; esac
echo "a.h:3: error: odd [-Werror=odd]"
exit 2
END
rm -rf "$tree/build"
rented --parts build,profile --again
found 1 'FAIL build of fp32 without warnings: a.h:3: error: odd' 'ok   build of fp32$' 'profile: passed'
ok "additional compiler warnings fail the build, but do not prevent the other parts" $?

# a bundle with the programs
digest() { python3 "$tree/dev/gpu_check/programs.py" >"$work/bundle/sources"; }
rm -rf "$tree/build" "$work/bundle/bin"
mkdir -p "$work/bundle/bin/fp32" "$work/bundle/lib"
for p in oncpu fp32/oncpu train_diffv2; do ln -sfn "$here/build/$p" "$work/bundle/bin/$p"; done
digest
: >"$work/made"
rented --parts build,ops --again
found 0 && [ ! -s "$work/made" ] && grep -q "bundle/bin/oncpu/test_diffv2 rope" "$folder/log.txt" \
    && state '[x["note"] for x in rows("build", case="programs of the bundle")] == ["used"]'
ok "programs of the bundle are used, and nothing is built" $?
echo 0 >"$work/bundle/sources"
rented --parts build --again
found 1 'FAIL build of fp32 without warnings' && [ -s "$work/made" ] \
    && results 'programs of the bundle.*not used: compiled from other sources'
ok "programs that were built from other sources are rebuilt" $?
digest
ln -sf "$fakes/other_machine" "$work/bundle/bin/train_diffv2"
echo "exit 127" | fake other_machine
rented --parts build --again
[ -s "$work/made" ] && results 'programs of the bundle.*not used: .*bin/train_diffv2: no output'
ok "programs that do not start on this machine are rebuilt on it" $?
fake other_machine <<'END'
[ "$*" = --help ] || echo "step 2/2 | loss     nan | norm     nan"
END
rented --parts build --again
results 'programs of the bundle.*not used: .*bin/train_diffv2: step 2/2 | loss     nan'
ok "programs that start, but do not compute, are rebuilt" $?
ln -sf "$here/build/train_diffv2" "$work/bundle/bin/train_diffv2"
mv "$tree" "$work/bundle/source"
folder=$work/bundle/results
(cd / && PATH="$fakes:$PATH" "$work/bundle/source/dev/gpu_check.sh" --pretend --parts ops) >"$work/output" 2>&1
status=$?
found 0 'bundle/results/issue.txt: to be pasted into an issue' 'ops: passed' \
    && grep -q 'bundle/bin/oncpu/test_diffv2 rope' "$folder/log.txt"
ok "the sources in a bundle use its programs, from any directory, and write the results into it" $?
mv "$work/bundle/source" "$tree"
rm -r "$work/bundle/bin"
fake make <<'END'
echo "x.cu(3): error: this is no CUDA"
exit 2
END
rm -rf "$tree/build"
rented --parts kernels
found 1 'FAIL build of bf16: x.cu(3): error: this is no CUDA' 'kernels: unfinished: not built: .*BENCH_CUDA'
ok "a failed build is reported with its reason and the parts that it prevents" $?
fake make <<END
echo "made \$*" >>"$work/made"
sleep 60
END
: >"$work/made"
(cd "$tree" && PATH="$fakes:$PATH" exec dev/gpu_check.sh --pretend --out "$work/u" --parts build) >/dev/null 2>&1 &
victim=$!
for _ in $(seq 200); do [ -s "$work/made" ] && break || sleep 0.05; done
rented --parts probe --again
found 1 "another gpu_check.sh uses .*/build/gpu_check: wait for its end" && one_line
ok "a second check of the same directory is refused" $?
kill "$victim"
wait "$victim" 2>/dev/null
[ $? = 143 ] && [ ! -e "$tree/build/gpu_check/building" ]
ok "SIGTERM ends a check and its programs, and what was built remains" $?

check l --parts speed
found 2 "the parts are probe, build" && one_line && check l --bundle "$work" && found 2 'not a bundle' && one_line
ok "unknown parts and directories that are not bundles are one-line usage errors" $?

finish
