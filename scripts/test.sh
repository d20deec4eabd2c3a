#!/usr/bin/env bash
# test.sh: builds everything and runs all tests. The last line is "N passed, N failed" (and ", N skipped"
# when something was), over all stages; exit status 0 when nothing failed, 1 otherwise, 2 usage.
#   float      the tests with the build that trains
#   double     the same compiled with REAL=double, with finite differences of the whole model
#   sanitizers the same under AddressSanitizer and UndefinedBehaviorSanitizer, tests and programs
#   C++        the trainer compiled as C++17 computes the gradients of the C build
#   narrow     the operations compiled for the oldest x86-64, whose vectors are 4 wide (on such machines)
#   CUDA on the CPU  kernels compiled by g++ and run by dev/cuda_on_cpu (where CUDA's headers are), with sanitizers too;
#              dev/gpu_check.sh with them in the place of a GPU
#   rooms      includes point downwards, headers compile alone, functions are called (dev/rooms.py)
#   format     all sources are formatted, and no line exceeds 120 columns (dev/format/format.sh)
#   nvcc       what the build finds in which places (tests/build_test.sh); the CUDA programs compile and link without warnings:
#              for one architecture, with --all for all of them; cuDNN's plans for an H200, with --all for other GPUs too
#   data       the scripts of data/ and the C tokenizer against the library's (where Python packages can be had)
#   runs       the recipes of scripts/ on this machine, and runs that end by a fault and are resumed (tests/soak.sh); with
#              --all more of them, and the Slurm recipe in a real Slurm on loopback
#   lab        plans, runs and reports of scripts/lab, its page in Chromium (where they can be had)
#   fuzzing    the readers of files against hostile ones (dev/fuzz), 5 s of libFuzzer each where clang is
#
# Usage: scripts/test.sh [--quick | --all]
#   --quick   only float and C++
#   --all     also what takes longer: a million strings through the tokenizers, Slurm, more faults, many ranks and a
#             run of 200 steps under the sanitizers, kernels under ThreadSanitizer, every GPU architecture, cuDNN's
#             plans, fuzzing of 20 s each
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

quick=no
case "$#:${1-}" in
0: | 1:--all) ;;
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
fail_one() {
    echo "FAIL $1"
    failed=$((failed + 1))
}

# Builds targets with make variables; a build that fails is a failed test.
build() { # what, make arguments...
    local what=$1 start=$SECONDS
    shift
    if make -s -j2 "$@" >"$scratch/build" 2>&1; then
        echo "ok   build: $what ($((SECONDS - start)) s)"
        passed=$((passed + 1))
    else
        cat "$scratch/build"
        fail_one "build: $what"
        return 1
    fi
}

# Runs a program or script of tests and adds up the counts of its last line, "N passed, N failed" and perhaps ", N skipped".
# One that ends without such a line, that ran and skipped nothing, or whose status does not agree with its line, failed.
run_script() { # what, command...
    local what=$1 status last
    shift
    "$@" 2>&1 | tee "$scratch/tests"
    status=${PIPESTATUS[0]}
    last=$(tail -n 1 "$scratch/tests")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + ${BASH_REMATCH[4]:-0}))
        if [ $((BASH_REMATCH[1] + BASH_REMATCH[2] + ${BASH_REMATCH[4]:-0})) -eq 0 ]; then
            fail_one "$what ran no test"
        elif [ "${BASH_REMATCH[2]}" -eq 0 ] && [ "$status" -ne 0 ]; then
            fail_one "$what ended with status $status although it says '$last'"
        elif [ "${BASH_REMATCH[2]}" -ne 0 ] && [ "$status" -eq 0 ]; then
            fail_one "$what ended with status 0 although it says '$last'"
        fi
    else
        passed=$((passed + $(grep -c '^ok ' "$scratch/tests")))
        failed=$((failed + $(grep -c '^FAIL ' "$scratch/tests")))
        fail_one "$what ended with status $status in the middle of its tests"
    fi
}

run_tests() { # build directory, words that choose tests
    local directory=$1 start=$SECONDS
    shift
    TRAIN_DIFFV2="$directory/train_diffv2" TEXT_TO_SHARDS="$directory/text_to_shards" run_script "$directory/test_diffv2" "$directory/test_diffv2" "$@"
    echo "     $directory: $((SECONDS - start)) s"
}

# Whether this machine has the sanitizers. Leaks are not looked for: the programs leave their memory to the system
# when they end with an error, and the leak checker cannot stop the threads of OpenMP.
sanitizers=address,undefined
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
has_sanitizers() { # those, or the ones named
    echo 'int main(void) { return 0; }' >"$scratch/probe.c"
    cc -fsanitize="${1-$sanitizers}" -o "$scratch/probe" "$scratch/probe.c" 2>/dev/null && "$scratch/probe" >/dev/null 2>&1
}

# The trainer as C++ against the trainer as C, on a model of the reference.
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

# The program of nvcc, as it starts without LD_LIBRARY_PATH and perhaps without a GPU, against the one on the CPU: but for
# what cuDNN takes, and what is said of the device.
compare_dry_runs() { # the latter's program
    local dry=(--preset 124m --sample-every 10 --dry-run --ranks 8 --zero 1 --threads 1) rows='^  (parameters|gradients|optimizer states|master|activations|per |of the run|embedding)'
    env -u LD_LIBRARY_PATH build/nvcc/train_diffv2cu "${dry[@]}" >"$scratch/nvcc.out" 2>&1 && "$1" --trainer "${dry[@]}" >"$scratch/cpu.out" 2>&1 || {
        tail -n 3 "$scratch/nvcc.out" "$scratch/cpu.out"
        return 1
    }
    grep -E "$rows" "$scratch/nvcc.out" >"$scratch/nvcc.rows" && diff "$scratch/nvcc.rows" <(grep -E "$rows" "$scratch/cpu.out")
}

echo "== dependencies"
scripts/install_deps.sh --with-mpi || {
    fail_one "dependencies: see the line above"
    finish
}

echo "== float"
if build "float" train_diffv2 text_to_shards build/train_diffv2 build/text_to_shards build/test_diffv2 build/faulty_diffv2 build/single_diffv2; then run_tests build; fi

echo "== C++"
if build "the trainer as C++17" build/train_diffv2 build/train_diffv2_cpp; then
    if compare_languages; then
        echo "ok   C++: the trainer compiled as C++17 computes the same bytes of gradients"
        passed=$((passed + 1))
    else
        fail_one "C++: the trainer compiled as C++17 does not compute the gradients of the C build"
    fi
fi
[ "$quick" = no ] || finish

# what needs no speed compiles in a third of the time without it; --all takes the optimization that users get
speed=(OPT=-O1)
[ "${1-}" != --all ] || speed=(OPT=-O3)
echo "== double"
if build "double" BUILD=build/fp64 REAL=double "${speed[@]}" build/fp64/train_diffv2 build/fp64/text_to_shards build/fp64/test_diffv2; then
    run_tests build/fp64
fi

echo "== sanitizers"
if ! has_sanitizers; then
    echo "skip sanitizers: this machine's compiler has none that run"
    skipped=$((skipped + 1))
elif build "sanitizers" BUILD=build/asan SANITIZE="$sanitizers" build/asan/train_diffv2 build/asan/text_to_shards \
    build/asan/test_diffv2 build/asan/faulty_diffv2 build/asan/single_diffv2; then
    if [ "${1-}" = --all ]; then run_tests build/asan; else run_tests build/asan -ranks "-200 steps of tiny"; fi
fi

if [ "$(uname -m)" = x86_64 ]; then
    echo "== narrow"
    if build "narrow" BUILD=build/narrow ARCH=-march=x86-64 "${speed[@]}" build/narrow/test_diffv2; then run_tests build/narrow operations; fi
fi

echo "== CUDA on the CPU"
cuda_start=$SECONDS cuda=${CUDA:-/usr/local/cuda}
cuda_programs() { # build directory, programs that end with their counts
    local directory=$1 program
    shift
    for program in "$@"; do run_script "$directory/$program" "$directory/$program"; done
}
if [ ! -e "$cuda/include/cuda_runtime.h" ]; then
    echo "skip CUDA on the CPU: there are no CUDA headers in $cuda/include (CUDA=DIRECTORY says where they are)"
    skipped=$((skipped + 1))
else
    if build "CUDA on the CPU" build/oncpu/test_layer build/oncpu/planted_bugs build/oncpu/test_diffv2; then
        cuda_programs build/oncpu test_layer planted_bugs test_diffv2
    fi
    if build "CUDA on the CPU in fp32" BUILD=build/fp32 PRECISION=fp32 build/fp32/oncpu/test_diffv2; then
        cuda_programs build/fp32/oncpu test_diffv2
    fi
    # the whole trainer, in both precisions
    if build "the CUDA trainer on the CPU, bf16" build/train_diffv2 build/oncpu/test_trainer build/oncpu/single_diffv2; then cuda_programs build/oncpu test_trainer; fi
    if build "the CUDA trainer on the CPU, fp32" BUILD=build/fp32 PRECISION=fp32 build/fp32/oncpu/test_trainer; then
        cuda_programs build/fp32/oncpu test_trainer
    fi
    # the check on a device, with these programs in its place
    if build "the benchmark of CUDA on the CPU" build/train_diffv2 build/text_to_shards build/oncpu/bench_cuda; then
        run_script tests/gpu_check_test.sh tests/gpu_check_test.sh
        [ ! -x build/oncpu/test_trainer ] || run_script tests/prediction_test.py tests/prediction_test.py build/train_diffv2 \
            build/oncpu/bench_cuda 'build/oncpu/test_trainer --trainer'
    fi
    if ! has_sanitizers; then
        echo "skip CUDA on the CPU with sanitizers: this machine's compiler has none that run"
        skipped=$((skipped + 1))
    elif build "CUDA on the CPU with sanitizers" BUILD=build/asan SANITIZE="$sanitizers" build/asan/oncpu/test_layer \
        build/asan/oncpu/planted_bugs build/asan/oncpu/test_diffv2; then
        cuda_programs build/asan/oncpu test_layer planted_bugs test_diffv2
        if build "the CUDA trainer on the CPU with sanitizers" BUILD=build/asan SANITIZE="$sanitizers" build/asan/oncpu/test_trainer; then
            cuda_programs build/asan/oncpu test_trainer
        fi
    fi
    if [ "${1-}" = --all ]; then
        if build "CUDA on the CPU without assembly" BUILD=build/ucontext UCONTEXT=yes build/ucontext/oncpu/test_layer \
            build/ucontext/oncpu/planted_bugs; then
            cuda_programs build/ucontext/oncpu test_layer planted_bugs
        fi
        if ! has_sanitizers thread; then
            echo "skip CUDA on the CPU with ThreadSanitizer: this machine's compiler has none that runs"
            skipped=$((skipped + 1))
        elif build "CUDA on the CPU with ThreadSanitizer" BUILD=build/tsan SANITIZE=thread build/tsan/oncpu/test_layer \
            build/tsan/oncpu/planted_bugs build/tsan/oncpu/test_diffv2; then
            # one thread of OpenMP: it is not instrumented, so that its own barriers would not count
            OMP_NUM_THREADS=1 cuda_programs build/tsan/oncpu test_layer planted_bugs test_diffv2
        fi
    fi
    echo "     CUDA on the CPU: $((SECONDS - cuda_start)) s"
fi

echo "== nvcc"
run_script tests/build_test.sh tests/build_test.sh
run_script tests/rooms_test.py tests/rooms_test.py
run_script tests/variants_test.py tests/variants_test.py

echo "== format"
if dev/format/format.sh --check >"$scratch/format" 2>&1; then
    echo "ok   all sources are formatted"
    passed=$((passed + 1))
else
    cat "$scratch/format"
    fail_one "all sources are formatted"
fi
nvcc=${NVCC:-$cuda/bin/nvcc}
# cuDNN's frontend is headers from a package
[ ! -x "$nvcc" ] || scripts/install_deps.sh --with-cuda-python >"$scratch/frontend" 2>&1 || echo "     nvcc: $(tail -n 1 "$scratch/frontend")"
if [ ! -x "$nvcc" ]; then
    echo "skip nvcc: there is no $nvcc (CUDA=DIRECTORY says where CUDA is)"
    skipped=$((skipped + 1))
elif [ "${1-}" = --all ]; then
    build "CUDA for every architecture, bf16 and fp32" all-archs
    build "the benchmark for GPUs" ARCHS=90 build/cuda_bf16/bench_cuda
else # one architecture and precision a run: which one follows from the revision
    turn=$((0x$(git rev-parse --short=4 HEAD 2>/dev/null || echo 0)))
    archs=(80 90 100 120) precisions=(bf16 fp32)
    arch=${archs[turn % 4]} precision=${precisions[turn / 4 % 2]}
    on_cpu=build/oncpu/test_trainer
    [ "$precision" = bf16 ] || on_cpu=build/fp32/oncpu/test_trainer
    help_without_ranks() { # by the second of two processes, where there is perhaps no GPU
        [ -z "$(env -u LD_LIBRARY_PATH OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 build/nvcc/train_diffv2cu --help 2>&1)" ] \
            && env -u LD_LIBRARY_PATH OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 build/nvcc/train_diffv2cu --help | grep -q '^Usage: '
    }
    if build "CUDA for sm_$arch, $precision" ARCHS="$arch" PRECISION="$precision" CUDA_BUILD=build/nvcc build/nvcc/train_diffv2cu build/nvcc/test_diffv2cu \
        && [ -x "$on_cpu" ]; then
        if compare_dry_runs "$on_cpu"; then
            echo "ok   nvcc: the program starts where there is no GPU, and its dry run is that of the CPU's layer"
            passed=$((passed + 1))
        else
            fail_one "nvcc: the dry run of build/nvcc/train_diffv2cu is not that of $on_cpu"
        fi
        if help_without_ranks; then
            echo "ok   nvcc: --help needs neither a GPU nor other ranks"
            passed=$((passed + 1))
        else
            fail_one "nvcc: build/nvcc/train_diffv2cu --help fails as one of two processes"
        fi
    fi
fi
# cuDNN's own answers, for devices that are not here
if [ "${1-}" = --all ] && [ -x "$nvcc" ]; then
    plans=build/cudnn_plans
    mkdir -p "$plans"
    if ! scripts/find_cuda.sh "$plans/cuda.mk" >/dev/null 2>&1 || ! grep -q '^CUDNN_LIBS.*cudnn' "$plans/cuda.mk"; then
        echo "skip cuDNN's plans: cuDNN, its frontend or NVRTC is not found (scripts/find_cuda.sh says more)"
        skipped=$((skipped + 1))
    elif build "cuDNN's plans" CUDA_BUILD="$plans" PRECISION=bf16 "$plans/cudnn_plans"; then
        run_script cudnn_plans env LD_LIBRARY_PATH="$plans/no_gpu" "$plans/cudnn_plans"
    fi
fi

echo "== data"
strings=1500 every=64
[ "${1-}" != --all ] || strings=125000 every=4
if ! python=$(python3 scripts/python_environment.py data 2>"$scratch/python"); then
    echo "skip data: $(tail -n 1 "$scratch/python")"
    skipped=$((skipped + 1))
elif build "the tokenizer as a filter" build/encode_text build/train_diffv2; then
    run_script data/test_data.py "$python" data/test_data.py
    run_script data/test_tokenizer.py "$python" data/test_tokenizer.py --strings "$strings" --every "$every"
fi

echo "== runs"
if build "the trainer" build/train_diffv2 build/text_to_shards; then
    run_script tests/recipe_test.sh tests/recipe_test.sh
    if [ "${1-}" = --all ]; then
        run_script tests/soak.sh tests/soak.sh --rounds 20
        if tests/slurm_test.sh --check 2>"$scratch/slurm"; then
            run_script tests/slurm_test.sh tests/slurm_test.sh
        else
            echo "skip Slurm: $(tail -n 1 "$scratch/slurm")"
            skipped=$((skipped + 1))
        fi
    else
        run_script tests/soak.sh tests/soak.sh --rounds 5
    fi
fi

echo "== lab"
if ! python=$(python3 scripts/python_environment.py lab 2>"$scratch/python"); then
    echo "skip lab: $(tail -n 1 "$scratch/python")"
    skipped=$((skipped + 1))
else
    browser=--browser
    if ! scripts/install_deps.sh --with-browser >"$scratch/browser" 2>&1; then
        echo "skip the pages in a browser: $(tail -n 1 "$scratch/browser")"
        skipped=$((skipped + 1)) browser=
    fi
    TRAIN_DIFFV2=build/train_diffv2 run_script scripts/lab/test_lab.py "$python" scripts/lab/test_lab.py --report $browser
fi

echo "== fuzzing"
fuzz=(--seconds 5 --mutations 5000)
[ "${1-}" != --all ] || fuzz=(--seconds 20)
run_script dev/fuzz/run.sh dev/fuzz/run.sh "${fuzz[@]}"

echo "     all stages: $SECONDS s"
finish
