#!/usr/bin/env bash
# test.sh: builds everything and runs all tests. The last line is "N passed, N failed", and ", N skipped" if tests were
# skipped. Exit status: 0 nothing failed, 1 something failed, 2 usage.
#
# Stages, in order. A stage prints one line per test: "ok", "FAIL" or "skip".
#   dependencies     installs what the tests require (scripts/install_deps.sh)
#   float            the tests, with the build that users run
#   C++              the trainer compiled as C++17 computes the same gradients as the C build
#   sources          includes point downwards and headers compile alone (dev/rooms.py); the variants in Python equal
#                    variants.h; all sources are formatted, with at most 120 columns (dev/format/format.sh)
#   double           the tests compiled with REAL=double, and finite differences of the whole model
#   sanitizers       the tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   x86-64           the operations compiled for the oldest x86-64, with vectors of 4 floats
#   CUDA on the CPU  CUDA kernels and trainer, run by dev/cuda_on_cpu, also under the sanitizers; dev/gpu_check.sh with
#                    this emulation; the predictions of --dry-run --device. Requires CUDA's headers
#   nvcc             the configuration of the build (tests/build_test.sh); the CUDA programs compile and link without
#                    warnings, for one architecture; with --all for all of them, and cuDNN's plans for other GPUs
#   data             the scripts of data/, and the C tokenizer against the tokenizers library. Requires Python packages
#   runs             the commands of README.md, the recipes of scripts/, and runs that are interrupted and resumed
#                    (tests/soak.sh); with --all the Slurm recipe under Slurm
#   lab              plans, runs and reports of scripts/lab, and its page in Chromium. Requires Python packages
#   fuzzing          the readers of files (dev/fuzz), 5 s each with libFuzzer if clang is installed
#
# Usage: scripts/test.sh [--quick | --all]
#   --quick   only dependencies, float and C++
#   --all     also the slow tests: a million strings through the tokenizers, Slurm, more interruptions, many ranks and
#             200 steps under the sanitizers, kernels under ThreadSanitizer, all GPU architectures, cuDNN's plans, 20 s
#             of fuzzing each
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

quick=no all=no
case "$#:${1-}" in
0:) ;;
1:--all) all=yes ;;
1:--quick) quick=yes ;;
1:--help | 1:-h)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/test.sh
    exit 0
    ;;
*)
    echo "test.sh: unexpected argument '$*': usage: scripts/test.sh [--quick | --all]" >&2
    exit 2
    ;;
esac

passed=0 failed=0 skipped=0
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT

finish() {
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ]
    exit
}
pass() {
    echo "ok   $1"
    passed=$((passed + 1))
}
fail() {
    echo "FAIL $1"
    failed=$((failed + 1))
}
skip() {
    echo "skip $1"
    skipped=$((skipped + 1))
}

# Builds targets. A failed build is a failed test.
build() { # name, arguments of make...
    local name=$1 start=$SECONDS
    shift
    if make -s -j2 "$@" >"$scratch/build" 2>&1; then
        pass "build: $name ($((SECONDS - start)) s)"
    else
        cat "$scratch/build"
        fail "build: $name"
        return 1
    fi
}

# Runs a test program and adds the counts of its last line, "N passed, N failed[, N skipped]". A program fails if it
# prints no such line, if it runs and skips nothing, or if its exit status contradicts the line.
run() { # name, command...
    local name=$1 status last
    shift
    "$@" 2>&1 | tee "$scratch/tests"
    status=${PIPESTATUS[0]}
    last=$(tail -n 1 "$scratch/tests")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + ${BASH_REMATCH[4]:-0}))
        if [ $((BASH_REMATCH[1] + BASH_REMATCH[2] + ${BASH_REMATCH[4]:-0})) -eq 0 ]; then
            fail "$name ran no test"
        elif [ $((status != 0)) -ne $((BASH_REMATCH[2] != 0)) ]; then
            fail "$name ended with status $status, which contradicts '$last'"
        fi
    else
        passed=$((passed + $(grep -c '^ok ' "$scratch/tests")))
        failed=$((failed + $(grep -c '^FAIL ' "$scratch/tests")))
        fail "$name ended with status $status before its last test"
    fi
}
run_script() { run "$1" "$@"; } # path, arguments...

run_tests() { # build directory, words that select tests
    local directory=$1 start=$SECONDS
    shift
    TRAIN_DIFFV2="$directory/train_diffv2" TEXT_TO_SHARDS="$directory/text_to_shards" \
        run_script "$directory/test_diffv2" "$@"
    echo "     $directory: $((SECONDS - start)) s"
}

# The leak checker is off: the programs do not free memory before they exit with an error, and it cannot stop the
# threads of OpenMP.
sanitizers=address,undefined
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
has_sanitizers() { # sanitizers (default: the two above)
    echo 'int main(void) { return 0; }' >"$scratch/probe.c"
    cc -fsanitize="${1-$sanitizers}" -o "$scratch/probe" "$scratch/probe.c" 2>/dev/null \
        && "$scratch/probe" >/dev/null 2>&1
}

# Compares the gradients of the C++ build and the C build, on a fixture.
compare_languages() {
    local fixture=$scratch/diff_v2_a language program batch
    batch=$(dev/reference/fixtures.py dev/reference/fixtures/diff_v2_a.safetensors "$fixture") || return 1
    for language in c cpp; do
        program=build/train_diffv2
        [ "$language" = c ] || program=build/train_diffv2_cpp
        "$program" --init "$fixture" --train-data "$fixture/tokens.bin" --batch-size "$batch" --threads 1 \
            --dump-grads "$scratch/$language.safetensors" >"$scratch/$language.out" 2>&1 || {
            cat "$scratch/$language.out"
            return 1
        }
    done
    cmp "$scratch/c.safetensors" "$scratch/cpp.safetensors"
}

# Compares the dry run of nvcc's program with the emulated one's, except for cuDNN's workspace and the device. Without
# LD_LIBRARY_PATH: the program must start on a machine without a GPU.
nvcc_program=(env -u LD_LIBRARY_PATH)
compare_dry_runs() { # emulated program
    local dry=(--preset 124m --sample-every 10 --dry-run --ranks 8 --zero 1 --threads 1)
    local rows='^  (parameters|gradients|optimizer states|master|activations|per |of the run|embedding)'
    if ! "${nvcc_program[@]}" build/nvcc/train_diffv2cu "${dry[@]}" >"$scratch/nvcc.out" 2>&1 \
        || ! "$1" --trainer "${dry[@]}" >"$scratch/cpu.out" 2>&1; then
        tail -n 3 "$scratch/nvcc.out" "$scratch/cpu.out"
        return 1
    fi
    grep -E "$rows" "$scratch/nvcc.out" >"$scratch/nvcc.rows" \
        && diff "$scratch/nvcc.rows" <(grep -E "$rows" "$scratch/cpu.out")
}
# --help as one of two processes: only rank 0 prints, and no process waits for the other. (With -q grep would end early,
# and the program could fail to write the rest.)
help_without_ranks() {
    local help=("${nvcc_program[@]}" OMPI_COMM_WORLD_SIZE=2)
    [ -z "$("${help[@]}" OMPI_COMM_WORLD_RANK=1 build/nvcc/train_diffv2cu --help 2>&1)" ] \
        && "${help[@]}" OMPI_COMM_WORLD_RANK=0 build/nvcc/train_diffv2cu --help | grep '^Usage: ' >/dev/null
}

echo "== dependencies"
scripts/install_deps.sh --with-mpi || {
    fail "dependencies: see the line above"
    finish
}

echo "== float"
if build "float" train_diffv2 text_to_shards build/train_diffv2 build/text_to_shards build/test_diffv2 \
    build/faulty_diffv2 build/single_diffv2; then
    run_tests build
    run_script tests/quantize_test.py build/train_diffv2
fi

echo "== C++"
if build "the trainer as C++17" build/train_diffv2 build/train_diffv2_cpp; then
    if compare_languages; then
        pass "C++: the trainer compiled as C++17 computes bitwise equal gradients"
    else
        fail "C++: the gradients of the trainer compiled as C++17 differ from the C build's"
    fi
fi
[ "$quick" = no ] || finish

echo "== sources"
run_script tests/rooms_test.py
run_script tests/variants_test.py
if dev/format/format.sh --check >"$scratch/format" 2>&1; then
    pass "all sources are formatted"
else
    cat "$scratch/format"
    fail "all sources are formatted"
fi

# These stages do not measure speed, and -O1 compiles in a third of the time; --all uses the optimization of users.
speed=(OPT=-O1)
[ $all = no ] || speed=(OPT=-O3)
echo "== FP8"
if ! python=$(python3 scripts/python_environment.py tests 2>"$scratch/python"); then
    skip "FP8: $(tail -n 1 "$scratch/python")"
elif build "the rounding of FP8 as a filter" build/round_fp8; then
    run tests/fp8_test.py "$python" tests/fp8_test.py
fi

echo "== double"
if build "double" BUILD=build/fp64 REAL=double "${speed[@]}" build/fp64/{train_diffv2,text_to_shards,test_diffv2}; then
    run_tests build/fp64
fi

echo "== sanitizers"
if ! has_sanitizers; then
    skip "sanitizers: the compiler of this machine does not support them"
elif build "sanitizers" BUILD=build/asan SANITIZE="$sanitizers" \
    build/asan/{train_diffv2,text_to_shards,test_diffv2,faulty_diffv2,single_diffv2}; then
    if [ $all = yes ]; then run_tests build/asan; else run_tests build/asan -ranks "-200 steps of tiny"; fi
fi

if [ "$(uname -m)" = x86_64 ]; then
    echo "== x86-64"
    if build "x86-64" BUILD=build/narrow ARCH=-march=x86-64 "${speed[@]}" build/narrow/test_diffv2; then
        run_tests build/narrow operations
    fi
fi

echo "== CUDA on the CPU"
cuda_start=$SECONDS cuda=${CUDA:-/usr/local/cuda}
cuda_tests() { # name, build directory, variables of make, "-", programs...: builds and runs them
    local name=$1 directory=$2/oncpu variables=("BUILD=$2") program
    shift 2
    while [ "$1" != - ]; do
        variables+=("$1")
        shift
    done
    shift
    build "$name" "${variables[@]}" "${@/#/$directory/}" || return 1
    for program; do
        # single_diffv2 is started by test_trainer
        [ "$program" = single_diffv2 ] || run_script "$directory/$program"
    done
}
if [ ! -e "$cuda/include/cuda_runtime.h" ]; then
    skip "CUDA on the CPU: no CUDA headers in $cuda/include (CUDA=DIRECTORY specifies another directory)"
else
    cuda_tests "CUDA on the CPU" build - test_layer planted_bugs test_diffv2
    cuda_tests "CUDA on the CPU, fp32" build/fp32 PRECISION=fp32 - test_diffv2
    cuda_tests "the CUDA trainer on the CPU, bf16" build - test_trainer single_diffv2
    cuda_tests "the CUDA trainer on the CPU, fp32" build/fp32 PRECISION=fp32 - test_trainer
    [ ! -x build/fp32/oncpu/test_trainer ] \
        || run_script tests/quantize_test.py 'build/fp32/oncpu/test_trainer --trainer'
    if build "CUDA benchmark on the CPU" build/train_diffv2 build/text_to_shards build/oncpu/bench_cuda; then
        run_script tests/gpu_check_test.sh
        [ ! -x build/oncpu/test_trainer ] || run_script tests/prediction_test.py build/train_diffv2 \
            build/oncpu/bench_cuda 'build/oncpu/test_trainer --trainer'
    fi
    if ! has_sanitizers; then
        skip "CUDA on the CPU, sanitizers: the compiler of this machine does not support them"
    elif cuda_tests "CUDA on the CPU, sanitizers" build/asan SANITIZE="$sanitizers" - \
        test_layer planted_bugs test_diffv2; then
        cuda_tests "the CUDA trainer on the CPU, sanitizers" build/asan SANITIZE="$sanitizers" - test_trainer
    fi
    if [ $all = yes ]; then
        cuda_tests "CUDA on the CPU, without assembly" build/ucontext UCONTEXT=yes - test_layer planted_bugs
        if ! has_sanitizers thread; then
            skip "CUDA on the CPU, ThreadSanitizer: the compiler of this machine does not support it"
        else # one thread: the barriers of OpenMP are not instrumented
            OMP_NUM_THREADS=1 cuda_tests "CUDA on the CPU, ThreadSanitizer" build/tsan SANITIZE=thread - \
                test_layer planted_bugs test_diffv2
        fi
    fi
    echo "     CUDA on the CPU: $((SECONDS - cuda_start)) s"
fi

echo "== nvcc"
run_script tests/build_test.sh
nvcc=${NVCC:-$cuda/bin/nvcc}
# cuDNN's frontend is a header-only Python package
[ ! -x "$nvcc" ] || scripts/install_deps.sh --with-cuda-python >"$scratch/frontend" 2>&1 \
    || echo "     nvcc: $(tail -n 1 "$scratch/frontend")"
if [ ! -x "$nvcc" ]; then
    skip "nvcc: no $nvcc (CUDA=DIRECTORY specifies another directory)"
elif [ $all = yes ]; then
    build "CUDA for all architectures, bf16 and fp32" all-archs
    build "CUDA benchmark" ARCHS=90 build/cuda_bf16/bench_cuda
else # one architecture and precision per revision
    turn=$((0x$(git rev-parse --short=4 HEAD 2>/dev/null || echo 0)))
    archs=(80 89 90 100 120) precisions=(bf16 fp32)
    arch=${archs[turn % 5]} precision=${precisions[turn / 5 % 2]}
    emulated=build/oncpu/test_trainer
    [ "$precision" = bf16 ] || emulated=build/fp32/oncpu/test_trainer
    if build "CUDA for sm_$arch, $precision" ARCHS="$arch" PRECISION="$precision" CUDA_BUILD=build/nvcc \
        build/nvcc/train_diffv2cu build/nvcc/test_diffv2cu && [ -x "$emulated" ]; then
        if compare_dry_runs "$emulated"; then
            pass "nvcc: the program starts without a GPU, and its dry run equals the emulated program's"
        else
            fail "nvcc: the dry runs of build/nvcc/train_diffv2cu and $emulated differ"
        fi
        if help_without_ranks; then
            pass "nvcc: --help requires neither a GPU nor other ranks"
        else
            fail "nvcc: build/nvcc/train_diffv2cu --help fails as one of two processes"
        fi
    fi
fi
if [ $all = yes ] && [ -x "$nvcc" ]; then # cuDNN plans for devices that are not in this machine
    plans=build/cudnn_plans
    mkdir -p "$plans"
    if ! scripts/find_cuda.sh "$plans/cuda.mk" >/dev/null 2>&1 || ! grep -q '^CUDNN_LIBS.*cudnn' "$plans/cuda.mk"; then
        skip "cuDNN plans: cuDNN, its frontend or NVRTC is missing (run scripts/find_cuda.sh -)"
    elif build "cuDNN plans" CUDA_BUILD="$plans" PRECISION=bf16 "$plans/cudnn_plans"; then
        LD_LIBRARY_PATH="$plans/no_gpu" run_script "$plans/cudnn_plans"
    fi
fi

echo "== data"
strings=(--strings 1500 --every 64)
[ $all = no ] || strings=(--strings 125000 --every 4)
if ! python=$(python3 scripts/python_environment.py data 2>"$scratch/python"); then
    skip "data: $(tail -n 1 "$scratch/python")"
elif build "the tokenizer as a filter" build/encode_text build/train_diffv2; then
    run data/test_data.py "$python" data/test_data.py
    run data/test_tokenizer.py "$python" data/test_tokenizer.py "${strings[@]}"
fi

echo "== runs"
rounds=5
[ $all = no ] || rounds=20
if build "the trainer" build/train_diffv2 build/text_to_shards; then
    run_script tests/readme_test.py
    run_script tests/recipe_test.sh
    run_script tests/soak.sh --rounds $rounds
    if [ $all = no ]; then
        :
    elif tests/slurm_test.sh --check 2>"$scratch/slurm"; then
        run_script tests/slurm_test.sh
    else
        skip "Slurm: $(tail -n 1 "$scratch/slurm")"
    fi
fi

echo "== lab"
if ! python=$(python3 scripts/python_environment.py lab 2>"$scratch/python"); then
    skip "lab: $(tail -n 1 "$scratch/python")"
else
    reports=(--report --browser)
    if ! scripts/install_deps.sh --with-browser >"$scratch/browser" 2>&1; then
        skip "lab: pages in a browser: $(tail -n 1 "$scratch/browser")"
        reports=(--report)
    fi
    TRAIN_DIFFV2=build/train_diffv2 run scripts/lab/test_lab.py "$python" scripts/lab/test_lab.py "${reports[@]}"
fi

echo "== fuzzing"
fuzz=(--seconds 5 --mutations 5000)
[ $all = no ] || fuzz=(--seconds 20)
run_script dev/fuzz/run.sh "${fuzz[@]}"

echo "     all stages: $SECONDS s"
finish
