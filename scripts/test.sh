#!/usr/bin/env bash
# test.sh: builds everything and runs all tests. The last line is "N passed, N failed", and ", N skipped" if tests were
# skipped. Exit status: 0 nothing failed, 1 something failed, 2 usage, 130 stopped by a signal.
#
# Stages run side by side (tests/stages.sh), since most of them use one core. Their output is printed in this order. A
# stage prints one line per test: "ok", "FAIL" or "skip".
#   dependencies     installs what the tests require (scripts/install_deps.sh), before all other stages
#   float            the tests, with the build that users run, and those of programs (tests/programs), which require
#                    Python packages; the trainer compiled as C++17 computes the same gradients
#   sources          includes point downwards and headers compile alone (dev/rooms.py); the variants in Python equal
#                    variants.h; all sources are formatted, with at most 120 columns (dev/format/format.sh). Prints the
#                    lines of code by room (dev/lines.py)
#   FP8              rounding to FP8 against ml_dtypes. Requires Python packages
#   double           the tests compiled with REAL=double, and finite differences of the whole model
#   sanitizers       the tests, and half of the files of tests/programs, in turn by revision, under AddressSanitizer and
#                    UndefinedBehaviorSanitizer; with --all all files
#   x86-64           the operations compiled for the oldest x86-64, with vectors of 4 floats
#   AVX2             operations, models, a quarter of the files of tests/programs, in turn by revision, and tests/golden
#                    as on a CPU without AVX-512 (-march=x86-64-v3, DNNL_MAX_CPU_ISA=AVX2) and with three cores, so that
#                    three threads are the default, which other stages do not have. Sums depend on the number of
#                    threads there, so replays of spikes are always tested. With --all all tests but those of ranks
#   CUDA operations, CUDA trainer
#                    kernels and trainer, run by dev/cuda_on_cpu, in bf16; one of both in fp32 or under the sanitizers,
#                    in turn by revision; with --all both in both. Requires CUDA's headers, and for runs of the trainer
#                    (tests/cuda) Python packages
#   CUDA tools       dev/gpu_check.sh and short.sh with this emulation; the predictions of --dry-run --device
#   compiled PTX     the operations on what nvcc compiles for sm_90a or sm_80, in turn by revision, run by dev/ptx, and
#                    mistakes planted in PTX; with --all for all architectures, and the layouts of wgmma against CuTe.
#                    Requires nvcc
#   nvcc             instead of compiled PTX, in turn by revision: the configuration of the build (tests/build_test.sh);
#                    the CUDA programs compile and link without warnings, for one architecture; with --all for all of
#                    them, and cuDNN's plans for other GPUs
#   data             the scripts of data/, and the C tokenizer against the tokenizers library. Requires Python packages
#   runs             the commands of README.md, the recipes of scripts/, exports of runs; help, errors and
#                    dry runs are as in tests/golden
#   soak             runs that are interrupted and resumed (tests/soak.sh)
#   Hub              the class for Transformers, exported directories, and a part of these with the previous version
#                    and the newest of the index (where a failure counts as skipped), and of the import, with PyTorch
#                    on the CPU; the oldest supported version imports the class; the model of dev/bench in PyTorch;
#                    with --all everything, and the tests of a model that the library has
#   lab              plans, runs and reports of scripts/lab, and its page in Chromium. Requires Python packages
#   fuzzing          the readers of files (dev/fuzz), 5 s each with libFuzzer. Requires clang
#
# Usage: scripts/test.sh [--quick | --all [--list] [STAGE...]] [--jobs N]
#   --quick   only dependencies and float
#   --all     also the slow tests: a million strings through the tokenizers, Slurm, more interruptions, many ranks and
#             200 steps under the sanitizers, kernels under ThreadSanitizer, all GPU architectures, cuDNN's plans, 20 s
#             of fuzzing each. Takes hours, but not at once: a stage that ends is recorded in build/stages, and the
#             same command continues with those that did not pass at this revision, those that never ended first
#   --list    only prints the record of each stage
#   STAGE     only this stage, whether it passed or not (a name of --list)
#   --jobs N  stages at once (default: the number of cores, at most 4)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
source tests/stages.sh

usage() {
    echo "test.sh: $1: usage: scripts/test.sh [--quick | --all [--list] [STAGE...]] [--jobs N]" >&2
    exit 2
}
quick=no all_tests=no list=no jobs=$(nproc) only=()
[ "$jobs" -le 4 ] || jobs=4
while [ $# -gt 0 ]; do
    case $1 in
    --all) all_tests=yes ;;
    --list) list=yes ;;
    --quick) quick=yes ;;
    --jobs)
        [[ ${2-} =~ ^[1-9][0-9]?$ ]] || usage "--jobs '${2-}' must be a number from 1 to 99"
        jobs=$2
        shift
        ;;
    --help | -h)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/test.sh
        exit 0
        ;;
    -*) usage "unexpected argument '$1'" ;;
    *) only+=("$1") ;;
    esac
    shift
done
[ $quick$all_tests != yesyes ] || usage "--quick and --all exclude each other"
[ $all_tests = yes ] || [ $list = no ] || usage "--list requires --all"
[ $all_tests = yes ] || [ ${#only[@]} -eq 0 ] || usage "unexpected argument '${only[0]}'"

# Stages share the cores: where threads of two programs take turns on one core, each barrier waits for the scheduler,
# and tests take up to ten times as long. Tests of threads set their number themselves.
cores=$(nproc)
export OMP_NUM_THREADS=$((jobs < cores ? cores / jobs : 1))

all=$(mktemp -d) || exit 1
scratch=$all
trap 'rm -rf "$all"' EXIT

run_script() { run "$1" "$@"; } # path, arguments...
run_tests() {                   # build directory, words that select tests
    local directory=$1
    shift
    TRAIN_DIFFV2="$directory/train_diffv2" TEXT_TO_SHARDS="$directory/text_to_shards" \
        run_script "$directory/test_diffv2" "$@"
}
run_pytest() { # Python environment, build directory, files or directories, options of pytest
    local python environment=$1 directory=$2
    shift 2
    if ! python=$(python3 scripts/python_environment.py "$environment" 2>"$scratch/python"); then
        skip "$1 in $environment: $(tail -n 1 "$scratch/python")"
        return
    fi
    [ $all_tests = yes ] || set -- "$@" -m "not slow"
    TRAIN_DIFFV2="$directory/train_diffv2" TEXT_TO_SHARDS="$directory/text_to_shards" PYTHONDONTWRITEBYTECODE=1 \
        run "$1 in $environment with $directory" "$python" -m pytest "$@"
}

turn() { # a number that depends on the revision: what is not tested at this one is at another
    echo $((0x$(git rev-parse --short=4 HEAD 2>/dev/null || echo 0)))
}
# Sets `files` to every N-th file of tests/programs, without tests of ranks, which require more programs, and slow ones.
programs_in_turn() { # N
    local i
    files=(tests/programs/test_*.py)
    for i in "${!files[@]}"; do (((i + $(turn)) % $1 == 0)) || unset "files[i]"; done
    files+=(-k "not ranks and not 200_steps_of_tiny and not interrupted_output")
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

float() {
    build "float" train_diffv2 text_to_shards build/{train_diffv2,train_diffv2_cpp,text_to_shards,test_diffv2} \
        build/{faulty_diffv2,single_diffv2} || return
    if compare_languages; then
        pass "C++: the trainer compiled as C++17 computes bitwise equal gradients"
    else
        fail "C++: the gradients of the trainer compiled as C++17 differ from the C build's"
    fi
    run_tests build
    run_pytest tests build tests/programs
}
sources() {
    run_pytest tests build tests/{rooms,variants}_test.py
    if dev/format/format.sh --check >"$scratch/format" 2>&1; then
        pass "all sources are formatted"
    else
        cat "$scratch/format"
        fail "all sources are formatted"
    fi
    dev/lines.py
}
fp8() {
    build "the rounding of FP8 as a filter" build/round_fp8 && run_pytest tests build tests/fp8_test.py
}
# Stages that do not measure speed: -O1 compiles in a third of the time; --all uses the optimization of users.
speed=(OPT=-O1 DEBUG=-g1)
[ $all_tests = no ] || speed=(OPT=-O3)
double() {
    local words=()
    [ $all_tests = yes ] || words=("-reads the positions of its window") # half a minute; the same code in `float`
    build "double" BUILD=build/fp64 REAL=double "${speed[@]}" build/fp64/test_diffv2 \
        && run_tests build/fp64 ${words[@]+"${words[@]}"}
}
sanitized() {
    if ! has_sanitizers; then
        skip "sanitizers: the compiler of this machine does not support them"
        return
    fi
    local programs=(build/asan/{train_diffv2,text_to_shards,test_diffv2}) words=() files=(tests/programs)
    if [ $all_tests = yes ]; then
        programs+=(build/asan/{faulty_diffv2,single_diffv2}) # of the tests of ranks
    else
        # twelve processes, of which rank 0 must be at most 0.3 s (WATCH_GRACE) later than the others
        words=("-a line of several ranks is printed once")
        programs_in_turn 2
    fi
    if build "sanitizers" BUILD=build/asan SANITIZE="$sanitizers" "${programs[@]}"; then
        run_tests build/asan ${words[@]+"${words[@]}"}
        run_pytest tests build/asan "${files[@]}"
    fi
}
narrow() {
    build "x86-64" BUILD=build/narrow ARCH=-march=x86-64 "${speed[@]}" build/narrow/test_operations \
        && run_script build/narrow/test_operations
}
# With the optimization of users. Threads do not spin, since there may be more of them than cores.
avx2() {
    local three=$scratch/three_cores.so words=(operations model sparse) every=4 files
    if ! grep -qw avx2 /proc/cpuinfo; then
        skip "AVX2: the CPU does not have it"
        return
    fi
    export DNNL_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=3 OMP_WAIT_POLICY=passive
    [ $all_tests = no ] || words=() every=1
    programs_in_turn $every
    if build "AVX2" BUILD=build/avx2 ARCH=-march=x86-64-v3 build/avx2/{train_diffv2,text_to_shards,test_diffv2} \
        && echo 'int omp_get_num_procs(void) { return 3; }' | cc -shared -fPIC -o "$three" -x c -; then
        run_tests build/avx2 ${words[@]+"${words[@]}"}
        LD_PRELOAD=$three run_pytest tests build/avx2 "${files[@]}" tests/programs/test_spike_causes.py \
            tests/golden_test.py
    fi
}

cuda=${CUDA:-/usr/local/cuda}
has_cuda_headers() { [ -e "$cuda/include/cuda_runtime.h" ]; }
has_nvcc() { [ -x "${NVCC:-$cuda/bin/nvcc}" ]; }
oncpu() { # name, build directory, variables of make, "-", programs...: builds and runs them
    local name=$1 directory=$2/oncpu variables=("BUILD=$2") program words=()
    shift 2
    while [ "$1" != - ]; do
        variables+=("$1")
        shift
    done
    shift
    if ! has_cuda_headers; then
        skip "$name: no CUDA headers in $cuda/include (CUDA=DIRECTORY specifies another directory)"
        return 1
    fi
    build "$name" "${variables[@]}" "${@/#/$directory/}" || return 1
    # under sanitizers the cases of many tiles take long; other stages have them
    [ $all_tests = yes ] || [[ ${variables[*]} != *SANITIZE* ]] || words=("-many tiles")
    for program; do
        case $program in
        single_diffv2) ;; # tests/cuda starts it
        test_diffv2) run_script "$directory/$program" ${words[@]+"${words[@]}"} ;;
        *) run_script "$directory/$program" ;;
        esac
    done
}
oncpu_sanitized() { # name, sanitizers, build directory, programs...
    if has_sanitizers "$2"; then
        oncpu "$1" "$3" SANITIZE="$2" - "${@:4}"
    else
        skip "$1: the compiler of this machine does not support -fsanitize=$2"
        return 1
    fi
}
cuda_operations() { oncpu "CUDA operations" build - test_layer planted_bugs test_diffv2; }
cuda_operations_fp32() { oncpu "CUDA operations, fp32" build/fp32 PRECISION=fp32 - test_diffv2; }
cuda_runs() { # build directory
    build "the CPU trainer" build/train_diffv2 \
        && DEVICE_TRAINER="$1/oncpu/test_trainer --trainer" run_pytest tests build tests/cuda
}
cuda_trainer() { oncpu "CUDA trainer" build - test_trainer single_diffv2 && cuda_runs build; }
cuda_trainer_fp32() {
    oncpu "CUDA trainer, fp32" build/fp32 PRECISION=fp32 - test_trainer && cuda_runs build/fp32
}
cuda_operations_sanitized() {
    oncpu_sanitized "CUDA operations, sanitizers" $sanitizers build/asan test_layer planted_bugs test_diffv2
}
cuda_trainer_sanitized() {
    oncpu_sanitized "CUDA trainer, sanitizers" $sanitizers build/asan test_trainer && cuda_runs build/asan
}
without_assembly() { oncpu "CUDA without assembly" build/ucontext UCONTEXT=yes - test_layer planted_bugs; }
thread_sanitizer() { # one thread: the barriers of OpenMP are not instrumented
    OMP_NUM_THREADS=1 oncpu_sanitized "CUDA, ThreadSanitizer" thread build/tsan test_layer planted_bugs test_diffv2
}
cuda_tools() {
    if ! has_cuda_headers; then
        skip "CUDA tools: no CUDA headers in $cuda/include (CUDA=DIRECTORY specifies another directory)"
    elif build "CUDA tools" build/{train_diffv2,text_to_shards} build/oncpu/{bench_cuda,test_diffv2,test_trainer} \
        && build "CUDA tools, fp32" BUILD=build/fp32 PRECISION=fp32 build/fp32/oncpu/{test_diffv2,test_trainer}; then
        run_script tests/gpu_check_test.sh
        run_pytest tests build tests/{device_programs,gpu_check,gpu_gap,prediction}_test.py
    fi
}

check_registers() { # build directories
    if dev/registers.py "${@/%//train_diffv2.cu.o.ptxas}" >"$scratch/registers"; then
        pass "nvcc: no kernel exceeds its limits of registers, stack and shared memory"
    else
        cat "$scratch/registers"
        fail "nvcc: kernels exceed their limits of registers, stack or shared memory"
    fi
}

# Runs the operations of an architecture.
compiled_ptx_of() {
    local program=build/ptx/sm_$1/test_diffv2 shared=99 # KiB of a block
    [ "$1" != 90a ] || shared=227
    # the stage CUDA operations detects accesses of the host to device memory, which takes half a minute
    build "compiled PTX, sm_$1" "$program" \
        && run "$program" env CUDA_ON_CPU_PROTECT=0 CUDA_ON_CPU_SHARED=$shared "$program"
}
wgmma_layouts() { # comparison with CuTe
    local python packages
    if ! python=$(python3 scripts/python_environment.py cute 2>"$scratch/python"); then
        skip "layouts of wgmma: $(tail -n 1 "$scratch/python")"
        return
    fi
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    g++ -std=c++17 -w -Idev -I"$packages/cutlass_library/source/include" -I"$packages/nvidia/cu13/include/cccl" \
        -isystem "$cuda/include" -o "$scratch/compare_cute" dev/ptx/compare_cute.cpp 2>&1 | tail -n 20
    run "layouts of wgmma" "$scratch/compare_cute"
}
compiled_ptx() {
    local arch
    if ! has_nvcc; then
        skip "compiled PTX: no ${NVCC:-$cuda/bin/nvcc} (CUDA=DIRECTORY specifies another directory)"
        return
    fi
    if [ $all_tests = yes ]; then
        for arch in 80 89 90 90a 100 120; do
            compiled_ptx_of $arch
        done
    else # one architecture per revision
        local archs=(90a 80)
        compiled_ptx_of "${archs[$(turn) % 2]}"
    fi
    build "small kernels in PTX" build/ptx/sm_90/planted build/oncpu/planted build/ptx/sm_90a/planted90a \
        && run_pytest tests build dev/ptx
    [ $all_tests = no ] || wgmma_layouts
}

nvcc_one() { # one architecture and precision per revision
    local archs=(80 89 90 100 120) precisions=(bf16 fp32) arch precision emulated
    arch=${archs[$(turn) % 5]} precision=${precisions[$(turn) / 5 % 2]}
    emulated=build
    [ "$precision" = bf16 ] || emulated=build/fp32
    build "the emulated trainer, $precision" BUILD=$emulated PRECISION="$precision" $emulated/oncpu/test_trainer \
        && build "CUDA for sm_$arch, $precision" ARCHS="$arch" PRECISION="$precision" CUDA_BUILD=build/nvcc \
            build/nvcc/train_diffv2cu build/nvcc/test_diffv2cu || return
    if compare_dry_runs $emulated/oncpu/test_trainer; then
        pass "nvcc: the program starts without a GPU, and its dry run equals the emulated program's"
    else
        fail "nvcc: the dry runs of build/nvcc/train_diffv2cu and $emulated/oncpu/test_trainer differ"
    fi
    check_registers build/nvcc
    if help_without_ranks; then
        pass "nvcc: --help requires neither a GPU nor other ranks"
    else
        fail "nvcc: build/nvcc/train_diffv2cu --help fails as one of two processes"
    fi
}
cudnn_plans() { # for devices that are not in this machine
    local plans=build/cudnn_plans
    mkdir -p $plans
    if ! scripts/find_cuda.sh $plans/cuda.mk >/dev/null 2>&1 || ! grep -q '^CUDNN_LIBS.*cudnn' $plans/cuda.mk; then
        skip "cuDNN plans: cuDNN, its frontend or NVRTC is missing (run scripts/find_cuda.sh -)"
    elif build "cuDNN plans" CUDA_BUILD=$plans PRECISION=bf16 $plans/cudnn_plans; then
        LD_LIBRARY_PATH=$plans/no_gpu run_script $plans/cudnn_plans
    fi
}
compile_cuda() {
    run_script tests/build_test.sh
    if ! has_nvcc; then
        skip "nvcc: no ${NVCC:-$cuda/bin/nvcc} (CUDA=DIRECTORY specifies another directory)"
        return
    fi
    # cuDNN's frontend is a header-only Python package
    scripts/install_deps.sh --with-cuda-python >"$scratch/frontend" 2>&1 \
        || echo "     nvcc: $(tail -n 1 "$scratch/frontend")"
    if [ $all_tests = yes ]; then
        build "CUDA for all architectures, bf16 and fp32" all-archs && check_registers build/cuda_{bf16,fp32}
        build "CUDA benchmark" ARCHS=90 build/cuda_bf16/bench_cuda
        cudnn_plans
    else
        nvcc_one
    fi
}

data() {
    build "the tokenizer as a filter" build/encode_text build/train_diffv2 && run_pytest tests build data
}
runs() {
    build "the trainer" train_diffv2 text_to_shards || return
    run_pytest tests build tests/{readme,golden}_test.py
    run_script tests/recipe_test.sh
    run_pytest export-tests build tests/export_test.py
}
soak() {
    local rounds=5
    [ $all_tests = no ] || rounds=20
    build "the trainer" build/{train_diffv2,text_to_shards} && run_script tests/soak.sh --rounds $rounds
}
slurm() {
    build "the trainer" train_diffv2 text_to_shards || return
    if tests/slurm_test.sh --check 2>"$scratch/tools"; then
        run_script tests/slurm_test.sh
    else
        skip "Slurm: $(tail -n 1 "$scratch/tools")"
    fi
}
hub() {
    local part environment python name words
    # environment, test_NAME.py, and which of its tests run without --all
    local parts=("hub reference gradients or fixtures or loops" "hub modeling" "hub export"
        "hub hub as_the_hub_has_them" hub{,-previous}\ versions "hub-oldest versions imported")
    [ $all_tests = no ] || parts=("hub "{reference,modeling,export,hub} hub{,-previous}\ versions
        "hub-oldest versions imported")
    build "the trainer" build/train_diffv2 || return
    for part in "${parts[@]}"; do
        read -r environment name words <<<"$part"
        CUDA_VISIBLE_DEVICES='' run_pytest "$environment" build "dev/reference/test_$name.py" -k "$words"
    done
    CUDA_VISIBLE_DEVICES='' run_pytest hub build dev/bench
    python=$(python3 scripts/python_environment.py hub 2>/dev/null) || return
    TRAIN_DIFFV2=build/train_diffv2 CUDA_VISIBLE_DEVICES='' run newest.py "$python" dev/reference/newest.py
    if [ $all_tests = yes ]; then
        CUDA_VISIBLE_DEVICES='' run dev/reference/library_tests.py "$python" dev/reference/library_tests.py
    fi
}
lab() {
    local options=()
    if ! scripts/install_deps.sh --with-browser >"$scratch/browser" 2>&1; then
        skip "lab: pages in a browser: $(tail -n 1 "$scratch/browser")"
        options=(--ignore scripts/lab/test_browser.py)
    fi
    build "the trainer" build/train_diffv2 build/text_to_shards \
        && run_pytest tests build scripts/lab ${options[@]+"${options[@]}"}
}
fuzzing() {
    local seconds=5
    [ $all_tests = no ] || seconds=20
    run_script dev/fuzz/run.sh -max_total_time=$seconds
}

stage float "float"
if [ $quick = no ]; then
    stage sources "sources"
    stage fp8 "FP8"
    stage double "double"
    stage sanitized "sanitizers"
    if [ "$(uname -m)" = x86_64 ]; then
        stage narrow "x86-64"
        stage avx2 "AVX2"
    fi
    stage cuda_operations "CUDA operations"
    stage cuda_trainer "CUDA trainer"
    others=("cuda_operations_fp32 CUDA operations, fp32" "cuda_trainer_fp32 CUDA trainer, fp32"
        "cuda_operations_sanitized CUDA operations, sanitizers" "cuda_trainer_sanitized CUDA trainer, sanitizers")
    compiled=("compiled_ptx compiled PTX" "compile_cuda nvcc")
    if [ $all_tests = no ]; then # one of each per revision
        others=("${others[$(turn) / 2 % 4]}")
        compiled=("${compiled[$(turn) / 8 % 2]}")
    fi
    for each in "${others[@]}" "${compiled[@]}"; do stage "${each%% *}" "${each#* }"; done
    stage cuda_tools "CUDA tools"
    stage data "data"
    stage runs "runs"
    stage soak "soak"
    stage hub "Hub"
    stage lab "lab"
    stage fuzzing "fuzzing"
fi
if [ $all_tests = yes ]; then
    stage without_assembly "CUDA without assembly"
    stage thread_sanitizer "CUDA, ThreadSanitizer"
    stage slurm "Slurm"
    records=build/stages
fi
[ ${#only[@]} -eq 0 ] || select_stages "${only[@]}" || usage "there is no stage '$missing' (see --list)"
if [ $list = yes ]; then
    list_stages
    exit
fi

echo "== dependencies"
scripts/install_deps.sh --with-mpi || {
    fail "dependencies: see the line above"
    finish
}
if [ $quick = no ]; then
    # Now, since apt-get cannot run twice at once, and several stages use these environments (`tests` is installed
    # too). A stage reports what is missing.
    scripts/install_deps.sh --with-fuzzer >/dev/null 2>&1
    python3 scripts/python_environment.py export-tests >/dev/null 2>&1
fi
if [ $all_tests = yes ]; then
    mkdir -p $records
    [ ${#only[@]} -gt 0 ] || continue_stages
fi
run_stages "$jobs"

echo "     all stages: $SECONDS s"
finish
