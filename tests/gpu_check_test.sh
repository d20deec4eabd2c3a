#!/usr/bin/env bash
# gpu_check_test.sh: dev/gpu_check.sh where there is no GPU: with dev/cuda_on_cpu in its place (--pretend), with programs that
# fail, killed and started again, and out of time. The last line is "N passed, N failed"; exit status 0 when nothing failed.
# Needs what --pretend needs; scripts/test.sh has built it.
#
# Usage: tests/gpu_check_test.sh
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive

ok() { # sentence, whether it is so
    if [ "$2" = 0 ]; then
        echo "ok   check on a device: $1"
        passed=$((passed + 1))
    else
        echo "FAIL check on a device: $1"
        tail -n 20 "$work/said" | sed 's/^/     | /'
        failed=$((failed + 1))
    fi
}
check() { # arguments...: its status in `status`, its output in $work/said
    dev/gpu_check.sh "$@" >"$work/said" 2>&1
    status=$?
}
said() { grep -q -- "$1" "$work/said"; }
state() { # folder, an expression of Python over `r`, the results: whether it is true
    python3 -c 'import json, sys
r = json.load(open(sys.argv[1] + "/results.json"))
p = r["parts"]
sys.exit(not eval(f"({sys.argv[2]})"))' "$1" "$2"
}

# a bundle without what only a build needs
mkdir -p "$work/bundle/corpus"
echo "a folder of this test" >"$work/bundle/CONTENTS"
for i in $(seq 2000); do echo "the quick brown fox jumps over the lazy dog $((i % 10))"; done >"$work/text"
build/text_to_shards --out "$work/bundle/corpus" "$work/text" >/dev/null || exit 1

# programs of a device that fail in ways of their own
fakes=$work/fakes
mkdir "$fakes"
printf '#!/bin/sh\necho "FAIL rope N=3 is off by 0.1"\necho "71 passed, 1 failed"\nexit 1\n' >"$fakes/wrong"
printf '#!/bin/sh\necho "diffv2: cuDNN: no plan for T=33"\necho "FAIL attention T=33: its process ended, exit status 1"\necho "71 passed, 1 failed"\nexit 1\n' >"$fakes/refused"
printf '#!/bin/sh\nexit 139\n' >"$fakes/crash"
printf '#!/bin/sh\nsleep 60\n' >"$fakes/hang"
printf '#!/bin/sh\ncase "$*" in *racecheck*rmsnorm*) echo "========= Error: Race reported between Write access at x.cuh:3"; exit 9 ;; esac\necho "========= ERROR SUMMARY: 0 errors"\n' >"$fakes/sanitizer"
chmod +x "$fakes"/*

parts=ops,gradients,train,sizes,models,kernels,profile
check --pretend --out "$work/a" --bundle "$work/bundle" --parts "$parts"
ok "all parts pass with the device that is not there" "$status"
state "$work/a" 'all(p[n]["status"] == "passed" for n in "'"$parts"'".split(","))'
ok "the results say so, part by part" $?
state "$work/a" 'len([x for x in p["gradients"]["records"] if x["build"] == "fp32" and 0 < x["matrix_error"] < 2e-4]) == 2 and
    {x["model"] for x in p["models"]["records"] if x["table"] == "models"} ==
        {"baseline", "diff_v1", "diff_v2", "baseline with 2 NH heads", "diff_v2, not deterministic"}'
ok "they hold the errors of gradients and the five models" $?
state "$work/a" '{"fp32", "measured peak", "first", "second", "resumed"} <= {*p["train"]["done"]} and "products" in open(sys.argv[1] + "/log.txt").read()'
ok "three steps in fp32 and with a measured peak were trained, and operations compared at a model's shapes" $?
grep -q '^targets:' "$work/a/results.txt" && grep -q 'attention_backward' "$work/a/results.txt" && tail -n 1 "$work/a/results.txt" | grep -q '^[0-9]* passed, 0 failed$'
ok "the table has them too, with the targets, and ends with the counts" $?
if [ -e dev/gpu_check/prediction.py ]; then
    state "$work/a" 'any(x["table"] == "predicted" and x["class"] == "block GEMMs + LM head" and x["ms"] > 0 < x["predicted"]
        for x in p["profile"]["records"])' && grep -q "class of work.*measured/predicted" "$work/a/results.txt"
    ok "what is predicted of a step stands beside what was measured, by class of work" $?
fi
check --pretend --out "$work/a" --bundle "$work/bundle" --parts "$parts"
[ "$status" = 0 ] && ! said begins
ok "the same command again repeats nothing" $?

TEST_DIFFV2CU="$fakes/wrong" TEST_DIFFV2CU_FP32="$fakes/crash" check --pretend --out "$work/b" --parts ops
[ "$status" = 1 ] && said 'FAIL operations.*bf16: 71 passed, 1 failed: rope N=3 is off' && said 'FAIL operations.*fp32: it said nothing'
ok "operations that are wrong, or end without a word, fail and are named" $?
TEST_DIFFV2CU="$fakes/refused" check --pretend --out "$work/b" --parts ops --again
[ "$status" = 1 ] && said 'bf16: 71 passed, 1 failed: attention T=33: its process ended, exit status 1: diffv2: cuDNN: no plan for T=33' && said 'ok   operations.*fp32'
ok "a shape that a library refuses is one failing case, with its reason" $?
TRAIN_DIFFV2CU_FP32="$fakes/crash" check --pretend --out "$work/c" --bundle "$work/bundle" --parts gradients
[ "$status" = 1 ] && said 'FAIL diff_v2: gradients of the fp32 build' && state "$work/c" 'p["gradients"]["done"] == ["diff_v2", "baseline"]'
ok "a build that does not run fails its gradients, and the next variant is tried" $?
# gradients of another model stand for wrong ones
cat >"$fakes/other" <<END
#!/bin/sh
case "\$*" in *dump-grads*) set -- "\$@" --seed 1 ; exec build/fp32/oncpu/test_trainer --trainer \$(echo "\$@" | sed 's/--batch-size 1/--batch-size 2/') ;; esac
exec build/fp32/oncpu/test_trainer --trainer "\$@"
END
chmod +x "$fakes/other"
TRAIN_DIFFV2CU_FP32="$fakes/other" check --pretend --out "$work/d" --bundle "$work/bundle" --parts gradients
[ "$status" = 1 ] && said 'FAIL gradients of diff_v2, fp32 .*weight: off by' && said 'ok   gradients of diff_v2, bf16'
ok "gradients of other data are found to be wrong" $?
# made gradients: device's vectors that are off by some factor of the CPU's
python3 - "$work" >"$work/said" 2>&1 <<'END'
import json, struct, sys
sys.path.insert(0, "dev/gpu_check")
import gradient_comparison

def dump(path, factors):  # of layer 0 and layer 1
    tensors = {"loss": [3.0], "model.norm.weight": [1.0, 2.0], "lm_head.weight": [1.0, -1.0]}
    for layer, factor in enumerate(factors):
        for name, size in (("input_layernorm.weight", 2.0), ("self_attn.sinks", 1.0), ("self_attn.lambda", 0.01 + layer)):
            tensors[f"model.layers.{layer}.{name}"] = [factor * size, -factor * size]
    header, data = {}, b""
    for name, values in tensors.items():
        blob = struct.pack(f"<{len(values)}f", *values)
        shape = [1, len(values)] if name == "lm_head.weight" else [len(values)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    text = json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)

dump(sys.argv[1] + "/cpu", (1, 1))
for factors, right in (((1.03, 0.98), True), ((1, 1.07), False), ((1.07, 1), False), ((1, -1), False), ((1, float("nan")), False)):
    dump(sys.argv[1] + "/device", factors)
    for build in ("bf16", "fp32"):
        (what, ok, detail), = gradient_comparison.compare(sys.argv[1] + "/cpu", sys.argv[1] + "/device", "sink", build)[0]
        print(factors, build, ok, detail)
        assert ok == (right and build == "bf16"), factors
        assert ok or ("sinks: off by" in detail and "layernorm.weight: off by" in detail)
END
ok "vectors of a bf16 build are judged: norms, sinks and lambdas" $?
cat >"$fakes/bench" <<'END'
#!/bin/sh
shift 3 # model PRESET T
for c in "$@"; do
    case $c in diff_v1*) echo "diffv2: attention's backward: no plan" >&2; exit 1 ;; esac
    model=${c%%,*}
    case $c in *,2) model="$model with 2 NH heads" ;; *,fast) model="$model, not deterministic" ;; esac
    for what in training forward; do
        echo "{\"table\": \"models\", \"preset\": \"tiny\", \"model\": \"$model\", \"T\": 16, \"B\": 2, \"what\": \"$what\", \"ms\": 1, \"tokens_per_s\": 3.5, \"tflops\": 1, \"device_share\": null}"
    done
done
END
chmod +x "$fakes/bench"
BENCH_CUDA="$fakes/bench" check --pretend --out "$work/i" --parts models
[ "$status" = 1 ] && said "FAIL bench_cuda model.* attention's backward: no plan" && said 'all models ran: 4 of 5' \
    && state "$work/i" '[r["model"] for r in p["models"]["records"] if r["table"] == "models"][::2] == ["baseline", "diff_v2", "baseline with 2 NH heads", "diff_v2, not deterministic"]'
ok "a model that fails does not keep the others from being measured" $?
COMPUTE_SANITIZER="$fakes/sanitizer" check --pretend --out "$work/e" --parts sanitizer
[ "$status" = 1 ] && said 'FAIL compute-sanitizer, racecheck rmsnorm: Error: Race reported between Write access at x.cuh:3' && said '14 passed, 1 failed'
ok "what the sanitizer reports is a failure" $?
cat >"$fakes/slow" <<END
#!/bin/sh
[ -e "$work/quick" ] || case "\$*" in *off*pack*) exec sleep 60 ;; esac
exec "$fakes/sanitizer" "\$@"
END
chmod +x "$fakes/slow"
COMPUTE_SANITIZER="$fakes/slow" SANITIZER_SECONDS=1 check --pretend --out "$work/k" --parts memcheck
[ "$status" = 3 ] && said 'memcheck: unfinished: stopped after 1 s, nothing found until then: memcheck off the pack' \
    && state "$work/k" 'p["memcheck"]["done"] == ["memcheck smallest"]' && grep -q '^unfinished: memcheck$' "$work/k/results.txt"
ok "a sanitizer that was stopped is unfinished, and the cases behind it are tried" $?
touch "$work/quick"
COMPUTE_SANITIZER="$fakes/slow" check --pretend --out "$work/k" --parts memcheck
[ "$status" = 0 ] && state "$work/k" 'p["memcheck"]["done"] == ["memcheck smallest", "memcheck off the pack"] and len(p["memcheck"]["checks"]) == 2'
ok "the next start does the stopped case again, and only that" $?

check --pretend --out "$work/f" --parts ops --minutes 0.1
[ "$status" = 3 ] && said 'not begun: time ran out'
ok "a part that would not fit is not begun, and the status says so" $?
start=$SECONDS
TEST_DIFFV2CU_FP32="$fakes/hang" check --pretend --out "$work/f" --parts ops --minutes 0.14
[ "$status" = 3 ] && said 'ops: unfinished: time ran out' && [ $((SECONDS - start)) -lt 20 ] && state "$work/f" 'p["ops"]["done"] == ["bf16"]'
ok "a program that hangs is stopped when time is up, and what was done before is kept" $?
check --pretend --out "$work/f" --parts ops
[ "$status" = 0 ] && said 'ops: goes on' && state "$work/f" 'p["ops"]["done"] == ["bf16", "fp32"] and len(p["ops"]["checks"]) == 2'
ok "the next start does what is left, once" $?

setsid dev/gpu_check.sh --pretend --out "$work/g" --bundle "$work/bundle" --parts gradients >"$work/said" 2>&1 &
victim=$!
for _ in $(seq 200); do
    grep -q '"diff_v2"' "$work/g/results.json" 2>/dev/null && break
    sleep 0.05
done
kill -9 -- -"$victim"
wait "$victim" 2>/dev/null
check --pretend --out "$work/g" --bundle "$work/bundle" --parts gradients
[ "$status" = 0 ] && said 'gradients: goes on' && state "$work/g" 'p["gradients"]["done"] == ["diff_v2", "baseline"] and len(p["gradients"]["checks"]) == 6'
ok "killed in the middle of a part it goes on behind the last case" $?
sed -i 's/"commit": "[^"]*"/"commit": "another"/' "$work/g/results.json"
check --pretend --out "$work/g" --parts ops
[ "$status" = 1 ] && said "has results of another, and this is .*: name another --out" && [ "$(wc -l <"$work/said")" = 1 ]
ok "results of another commit are not mixed with these: one line" $?
echo '{"format": 1, "comm' >"$work/g/results.json"
check --pretend --out "$work/g" --parts ops
[ "$status" = 1 ] && said 'is not of this program' && [ "$(wc -l <"$work/said")" = 1 ]
ok "a results.json that is torn is named: one line" $?
# a copy of the sources without git and without programs, as on a machine that is lent; make brings those that are here
tree=$work/tree here=$PWD
mkdir -p "$tree/dev"
cp -r dev/gpu_check dev/gpu_check.sh "$tree/dev"
git describe --always --dirty >"$work/bundle/revision" 2>/dev/null || echo unknown >"$work/bundle/revision"
cat >"$fakes/make" <<END
#!/bin/sh
mkdir -p build/fp32
for p in oncpu fp32/oncpu train_diffv2; do ln -sfn "$here/build/\$p" "build/\$p"; done
echo "made \$*" >>"$work/made"
END
chmod +x "$fakes/make"
lent() { (cd "$tree" && PATH="$fakes:$PATH" dev/gpu_check.sh --pretend --out "$work/h" --bundle "$work/bundle" "$@") >"$work/said" 2>&1; }
lent --parts probe,build
[ $? = 0 ] && state "$work/h" '"CUDA on the CPU" in r["device"] and r["commit"] == open(sys.argv[1] + "/../bundle/revision").read().strip()' && [ "$(grep -c -- "-k" "$work/made")" = 3 ]
ok "sources without git have the bundle's commit; the results name the device" $?
rm -rf "$tree/build"
lent --parts ops
[ $? = 0 ] && said 'build: passed' && said 'ops: passed' && [ "$(grep -c -- "-k" "$work/made")" = 6 ]
ok "on another machine the programs are built again, and what is proven is not proven again" $?
cp "$fakes/make" "$fakes/bring"
printf '#!/bin/sh\ncase "$*" in *STRICT=no*) exec %s "$@" ;; esac\necho "a.h:3: error: odd [-Werror=odd]"\nexit 2\n' "$fakes/bring" >"$fakes/make"
rm -rf "$tree/build"
lent --parts build,profile --again
[ $? = 1 ] && said 'FAIL build of fp32 without warnings: a.h:3: error: odd' && said 'ok   build of fp32$' && said 'profile: passed'
ok "a compiler that warns of more than others is said, and does not keep the rest from running" $?
# a bundle that carries the programs
rm -rf "$tree/build" "$work/bundle/bin"
mkdir -p "$work/bundle/bin/fp32" "$work/bundle/lib"
for p in oncpu fp32/oncpu train_diffv2; do ln -sfn "$here/build/$p" "$work/bundle/bin/$p"; done
python3 "$tree/dev/gpu_check/programs.py" >"$work/bundle/sources"
: >"$work/made"
lent --parts build,ops --again
[ $? = 0 ] && [ ! -s "$work/made" ] && state "$work/h" '{"table": "facts", "what": "programs of the bundle", "value": "used"} in p["build"]["records"]' \
    && grep -q "bundle/bin/oncpu/test_diffv2 rope" "$work/h/log.txt"
ok "programs that the bundle carries are used, and nothing is built" $?
echo 0 >"$work/bundle/sources"
lent --parts build --again
[ $? = 1 ] && [ -s "$work/made" ] && said 'FAIL build of fp32 without warnings' && grep -q 'programs of the bundle.*not used: they are of other sources' "$work/h/results.txt"
ok "programs of other sources are built again" $?
python3 "$tree/dev/gpu_check/programs.py" >"$work/bundle/sources"
rm "$work/bundle/bin/train_diffv2"
printf '#!/bin/sh\nexit 127\n' >"$work/bundle/bin/train_diffv2"
lent --parts build --again
[ -s "$work/made" ] && grep -q 'programs of the bundle.*not used: .*bin/train_diffv2 does not start on this machine' "$work/h/results.txt"
ok "programs that do not start on this machine are built there" $?
rm -r "$work/bundle/bin"
printf '#!/bin/sh\necho "x.cu(3): error: this is no CUDA"\nexit 2\n' >"$fakes/make"
rm -rf "$tree/build"
lent --parts kernels
[ $? = 1 ] && said 'FAIL build of bf16: x.cu(3): error: this is no CUDA' && said 'kernels: unfinished: not built: .*BENCH_CUDA'
ok "a build that fails says why, and what it stops" $?

check --parts speed
[ "$status" = 2 ] && said "there are probe, build" && [ "$(wc -l <"$work/said")" = 1 ] \
    && check --bundle "$work" && [ "$status" = 2 ] && said 'no bundle there' && [ "$(wc -l <"$work/said")" = 1 ]
ok "parts and bundles that are none are refused in one line" $?

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
