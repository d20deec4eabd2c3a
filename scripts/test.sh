#!/usr/bin/env bash
# test.sh: builds and tests, in tiers. The last line is "N passed, N failed", and ", N skipped" if tests were skipped.
# Exit status: 0 nothing failed, 1 something failed, 2 usage, 130 stopped by a signal.
#
# A test belongs to the lowest tier in which it finds planted bugs that cheaper tests do not find (dev/bugs.md).
# The last field of a row of tests in C and the marks `full` and `slow` in Python state a tier other than the first.
#
# Stages run side by side, as many as there are cores, at most 4 (tests/stages.sh). A stage prints one line per test:
# "ok", "FAIL" or "skip", which are printed when it ends. A line that begins with "--" says that a stage begins.
#   dependencies     installs what the tests require (scripts/install_deps.sh), before all other stages
#   float            the C programs: operations, models, files, and runs (tests/programs)
#   ranks            runs of several ranks
#   CUDA             the kernels against the C operations, and the CUDA trainer against the C trainer (tests/cuda), run
#                    by dev/emulator in bf16; in the second tier half of the kernels' cases, in turn by revision.
#                    Requires CUDA's headers
#   sources          includes point downwards (dev/rooms.py); the variants in Python equal variants.h; all sources are
#                    formatted (dev/format/format.sh). Prints the lines of code by room (dev/lines.py)
#   runs             the commands of README.md, help, errors and dry runs (tests/golden), conversions, recipes, exports
#                    of runs
#   data             the scripts of data/, and the C tokenizer against the tokenizers library
#   lab              plans, runs and reports of scripts/lab
# Since the second tier, where at one revision the sanitizers run, at another the Hub:
#   double           the C operations and models with REAL=double, and finite differences of the whole model
#   vectors          the C operations for the oldest x86-64, with vectors of 4 floats
#   sanitizers       the C programs under AddressSanitizer and UndefinedBehaviorSanitizer
#   CUDA tools       dev/gpu_check.sh and short.sh with this emulation; or, in turn by revision, parts of them and the
#                    predictions of predict_diffv2
#   nvcc             the configuration of the build (tests/build_test.sh); the CUDA trainer compiles without warnings
#                    for one architecture and precision, in turn by revision. Requires nvcc
#   Hub              the class for Transformers, exported directories, the newest version of the library, and the model
#                    of dev/bench, with PyTorch on the CPU
#   fuzzing          the readers of files (dev/fuzz), half of them, in turn by revision, with libFuzzer. Requires clang
# With --all:
#   AVX2             the C programs as on a CPU without AVX-512, with three cores, so that three threads are the default
#   compiled PTX     the kernels as nvcc compiles them for each architecture, run by dev/emulator/ptx. Requires nvcc
#   CUDA, fp32; CUDA, sanitizers; CUDA, ThreadSanitizer; CUDA without assembly     the emulation, built so
#   Slurm            jobs of a small cluster on this machine
#
# Usage: scripts/test.sh [--full | --all] [--changed] [--list] [STAGE...]
#   (no option)  the first tier: five minutes on two cores of 3 GHz
#   --full       the second tier, which CI runs after the first: ten minutes
#   --all        all tests of all stages, also a million strings through the tokenizers, many ranks, 200 steps, all GPU
#                architectures, cuDNN's plans. Takes hours, but not at once: the same command continues with the stages
#                that did not pass at this revision
#   --changed    only the stages that test files that differ from HEAD
#   --list       only prints the stages, with the result and the seconds of the last run (build/stages)
#   STAGE        only this stage (a name of --list)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
source tests/stages.sh

usage() {
    echo "test.sh: $1: usage: scripts/test.sh [--full | --all] [--changed] [--list] [STAGE...]" >&2
    exit 2
}
tier='' changed=no list=no jobs=$(nproc) only=()
[ "$jobs" -le 4 ] || jobs=4
set_tier() { # number
    [ -z "$tier" ] || usage "--full and --all exclude each other"
    tier=$1
}
while [ $# -gt 0 ]; do
    case $1 in
    --full) set_tier 2 ;;
    --all) set_tier 3 ;;
    --changed) changed=yes ;;
    --list) list=yes ;;
    --help | -h)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/test.sh
        exit 0
        ;;
    -*) usage "unexpected argument '$1'" ;;
    *) only+=("$1") ;;
    esac
    shift
done
tier=${tier:-1}
# what selects the tests of a tier in test programs and in pytest
tests_of_tier=(--tier "$tier")
marks_of_tier=("" "not full and not slow" "full and not slow" "")
[ "$tier" -lt 3 ] || tests_of_tier=()
if [ $changed = yes ]; then
    changed_files=$(git diff --name-only HEAD && git ls-files --others --exclude-standard) \
        || usage "--changed requires a git repository"
fi

# Stages share the cores: where threads of two programs take turns on one core, each barrier waits for the scheduler,
# and tests take up to ten times as long. Tests of threads set their number themselves.
cores=$(nproc)
export OMP_NUM_THREADS=$((jobs < cores ? cores / jobs : 1))

all=$(mktemp -d) || exit 1
scratch=$all
trap 'rm -rf "$all"' EXIT

run_script() { run "$1" "$@"; } # path, arguments...
check() {                       # name, command...: a test, whose output is printed if it fails
    "${@:2}" >"$scratch/check" 2>&1 && pass "$1" && return
    cat "$scratch/check"
    fail "$1"
}
run_tests() { # build directory, program, words that select tests...
    local directory=$1 program=$2 programs=$1
    shift 2
    [ -e "$directory/train_diffv2" ] || programs=build
    TRAIN_DIFFV2="$programs/train_diffv2" TEXT_TO_SHARDS="$programs/text_to_shards" \
        run_script "$directory/$program" ${tests_of_tier[@]+"${tests_of_tier[@]}"} "$@"
}
run_pytest() { # Python environment, build directory, files or directories, options of pytest
    local python environment=$1 directory=$2
    shift 2
    python=$(python3 scripts/python_environment.py "$environment" 2>"$scratch/python") \
        || ! skip "$1 in $environment: $(tail -n 1 "$scratch/python")" || return
    TRAIN_DIFFV2="$directory/train_diffv2" PREDICT_DIFFV2="$directory/predict_diffv2" \
        TEXT_TO_SHARDS="$directory/text_to_shards" PYTHONDONTWRITEBYTECODE=1 \
        run "$1 in $environment with $directory" "$python" -m pytest "$@" -m "${marks_of_tier[tier]}"
}

turn() { # a number that depends on the revision: what is not tested at this one is at another
    echo $((0x$(git rev-parse --short=4 HEAD 2>/dev/null || echo 0)))
}
# The second tier tests some things at every second revision: whether this one is their turn. Named stages test both.
in_turn() { # 0 or 1
    [ "$tier" -ne 2 ] || [ ${#only[@]} -gt 0 ] || [ $(($(turn) % 2)) -eq "$1" ]
}

# The leak checker is off: the programs do not free memory before they exit with an error, and it cannot stop the
# threads of OpenMP.
sanitizers=address,undefined
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
has_sanitizers() { # name, sanitizers: or skips
    echo 'int main(void) { return 0; }' >"$scratch/probe.c"
    cc -fsanitize="$2" -o "$scratch/probe" "$scratch/probe.c" 2>/dev/null && "$scratch/probe" >/dev/null 2>&1 \
        || ! skip "$1: the compiler of this machine does not support -fsanitize=$2"
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

# Stages that do not measure speed: -O1 compiles in a third of the time; --all uses the optimization of users.
speed=(OPT=-O1 DEBUG=-g1)
[ "$tier" -lt 3 ] || speed=(OPT=-O3)
test_programs=(test_operations test_rooms test_prediction test_diffv2)
float() {
    build "float" train_diffv2 text_to_shards build/{train_diffv2,predict_diffv2,text_to_shards,faulty_diffv2} \
        "${test_programs[@]/#/build/}" || return
    local program programs=("${test_programs[@]}")
    [ "$tier" -ne 2 ] || programs=(test_rooms) # the others have no tests of the second tier
    for program in "${programs[@]}"; do run_tests build "$program"; done
    run_pytest tests build tests/programs -k "not test_ranks_"
}
ranks() {
    build "ranks" build/{train_diffv2,text_to_shards,faulty_diffv2,single_diffv2} \
        && run_pytest tests build tests/programs/test_ranks_*.py
}
sources() {
    run_pytest tests build tests/{rooms,variants}_test.py
    [ "$tier" -ne 2 ] || return 0
    check "all sources are formatted" dev/format/format.sh --check
    dev/lines.py
}
double() {
    tests_of_tier=()
    build "double" BUILD=build/fp64 REAL=double "${speed[@]}" build/fp64/test_{operations,diffv2} \
        && run_tests build/fp64 test_operations && run_tests build/fp64 test_diffv2
}
vectors() {
    tests_of_tier=()
    build "operations for x86-64" BUILD=build/narrow ARCH=-march=x86-64 "${speed[@]}" build/narrow/test_operations \
        && run_tests build/narrow test_operations
}
sanitized() {
    has_sanitizers sanitizers $sanitizers || return
    local program programs=("${test_programs[@]}")
    tests_of_tier=()
    [ "$tier" -lt 3 ] || programs+=(train_diffv2 predict_diffv2 text_to_shards faulty_diffv2 single_diffv2)
    build "sanitizers" BUILD=build/asan SANITIZE="$sanitizers" "${programs[@]/#/build/asan/}" || return
    if [ "$tier" -eq 3 ]; then
        for program in "${test_programs[@]}"; do run_tests build/asan "$program"; done
        run_pytest tests build/asan tests/programs
    else # the watchdog's twelve processes would be too late; of the models, what has shapes of its own
        run_tests build/asan test_operations
        run_tests build/asan test_rooms options data corpora tokenizer checkpoint progress devices
        run_tests build/asan test_diffv2 model windows sparse experts documents generation
    fi
}
# Threads do not spin, since there may be more of them than cores.
avx2() {
    local three=$scratch/three_cores.so program
    grep -qw avx2 /proc/cpuinfo || ! skip "AVX2: the CPU does not have it" || return
    export DNNL_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=3 OMP_WAIT_POLICY=passive
    build "AVX2" BUILD=build/avx2 ARCH=-march=x86-64-v3 \
        build/avx2/{train_diffv2,predict_diffv2,text_to_shards,faulty_diffv2} \
        "${test_programs[@]/#/build/avx2/}" || return
    echo 'int omp_get_num_procs(void) { return 3; }' | cc -shared -fPIC -o "$three" -x c -
    for program in "${test_programs[@]}"; do run_tests build/avx2 "$program"; done
    # the other tests of ranks require more programs
    LD_PRELOAD=$three run_pytest tests build/avx2 tests/programs tests/golden_test.py -k "not test_ranks_"
}

cuda=${CUDA:-/usr/local/cuda}
# Skips what requires a file of the toolkit that does not exist: name, file
has() { [ -e "$2" ] || ! skip "$1: no $2 (CUDA=DIRECTORY specifies another directory)"; }
oncpu() { # name, build directory, variables of make, "-", programs...: builds them
    local name=$1 directory=$2/oncpu variables=("BUILD=$2")
    shift 2
    while [ "$1" != - ]; do
        variables+=("$1")
        shift
    done
    shift
    has "$name" "$cuda/include/cuda_runtime.h" && build "$name" "${variables[@]}" "${@/#/$directory/}"
}
# The tests of an emulated program, and what the second tier and --all test of the emulation itself.
run_oncpu() { # build directory
    local trainer=$1/oncpu/test_trainer half=()
    [ "$tier" -ne 2 ] || half=(--shard "$(($(turn) % 2))/2")
    [ "$tier" -eq 1 ] || run_script "$1/oncpu/planted_bugs"
    run "$trainer --operations" "$trainer" --operations ${tests_of_tier[@]+"${tests_of_tier[@]}"} \
        ${half[@]+"${half[@]}"}
    [ "$tier" -eq 2 ] || run_tests "$1/oncpu" test_trainer
    build "the CPU trainer" build/train_diffv2 \
        && DEVICE_TRAINER="$trainer --trainer" run_pytest tests build tests/cuda
}
emulation=(test_trainer)
[ "$tier" -eq 1 ] || emulation+=(planted_bugs)
oncpu_sanitized() { # name, sanitizers, build directory, programs...
    has_sanitizers "$1" "$2" && oncpu "$1" "$3" SANITIZE="$2" - "${@:4}"
}
cuda() {
    oncpu "CUDA" build - "${emulation[@]}" single_diffv2 && run_oncpu build
}
cuda_fp32() { oncpu "CUDA, fp32" build/fp32 PRECISION=fp32 - "${emulation[@]}" && run_oncpu build/fp32; }
cuda_sanitized() {
    oncpu_sanitized "CUDA, sanitizers" $sanitizers build/asan "${emulation[@]}" && run_oncpu build/asan
}
cuda_without_assembly() {
    oncpu "CUDA without assembly" build/ucontext UCONTEXT=yes - planted_bugs \
        && run_script build/ucontext/oncpu/planted_bugs
}
cuda_threads() { # one thread: the barriers of OpenMP are not instrumented
    export OMP_NUM_THREADS=1
    oncpu_sanitized "CUDA, ThreadSanitizer" thread build/tsan "${emulation[@]}" || return
    run_script build/tsan/oncpu/planted_bugs
    run "operations" build/tsan/oncpu/test_trainer --operations
}
cuda_tools() {
    if has "CUDA tools" "$cuda/include/cuda_runtime.h" && build "CUDA tools" \
        build/{{train,predict}_diffv2,text_to_shards,oncpu/{bench_cuda,test_diffv2,test_trainer}} \
        && build "CUDA tools, fp32" BUILD=build/fp32 PRECISION=fp32 build/fp32/oncpu/{test_diffv2,test_trainer}; then
        ! in_turn 0 || run_script tests/gpu_check_test.sh
        if in_turn 1; then
            marks_of_tier[2]="not slow"
            run_pytest tests build tests/{device_programs,gpu_check,gpu_gap,prediction}_test.py
        fi
    fi
}

check_registers() { # build directories
    local missing
    check "nvcc: no kernel exceeds its limits" dev/registers.py "${@/%//train_diffv2.cu.o.ptxas}"
    ! missing=$(grep "atomics are not counted" "$scratch/check") || skip "nvcc: $missing"
}

# Runs the operations of an architecture.
compiled_ptx_of() {
    local program=build/ptx/sm_$1/test_diffv2 shared=99 # KiB of a block
    [ "$1" != 90a ] || shared=227
    # the stage CUDA operations detects accesses of the host to device memory, which takes half a minute
    build "compiled PTX, sm_$1" "$program" \
        && run "$program" env CUDA_ON_CPU_PROTECT=0 CUDA_ON_CPU_SHARED=$shared "$program"
}
compiled_ptx() {
    local arch
    has "compiled PTX" "${NVCC:-$cuda/bin/nvcc}" || return
    for arch in 80 89 90 90a 100 120; do compiled_ptx_of $arch; done
    build "small kernels in PTX" build/ptx/sm_90a/planted90a && run_pytest tests build dev/emulator/ptx
}

nvcc_one() { # one architecture and precision per revision
    local archs=(80 89 90 100 120) precisions=(bf16 fp32) arch precision emulated=build
    arch=${archs[$(turn) % 5]} precision=${precisions[$(turn) / 5 % 2]}
    [ "$precision" = bf16 ] || emulated=build/fp32
    build "the emulated trainer, $precision" BUILD=$emulated PRECISION="$precision" $emulated/oncpu/test_trainer \
        && build "CUDA for sm_$arch, $precision" ARCHS="$arch" PRECISION="$precision" CUDA_BUILD=build/nvcc \
            build/nvcc/train_diffv2cu || return
    check "nvcc: the program starts without a GPU, and its dry run equals the emulated program's" \
        compare_dry_runs $emulated/oncpu/test_trainer
    check_registers build/nvcc
    check "nvcc: --help requires neither a GPU nor other ranks" help_without_ranks
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
    has nvcc "${NVCC:-$cuda/bin/nvcc}" || return
    # cuDNN's frontend is a header-only Python package
    scripts/install_deps.sh --with-cuda-python >"$scratch/frontend" 2>&1 \
        || echo "     nvcc: $(tail -n 1 "$scratch/frontend")"
    if [ "$tier" -eq 3 ]; then
        build "CUDA for all architectures, bf16 and fp32" all-archs && check_registers build/cuda_{bf16,fp32}
        build "CUDA benchmark" ARCHS=90 build/cuda_bf16/bench_cuda
        cudnn_plans
    else
        nvcc_one
    fi
}

data() {
    build "the tokenizer as a filter" build/{encode_text,text_to_shards,train_diffv2} && run_pytest tests build data
}
runs() {
    build "the trainer" train_diffv2 predict_diffv2 text_to_shards || return
    [ "$tier" -eq 2 ] || run_pytest tests build tests/{readme,golden,convert}_test.py
    [ "$tier" -gt 1 ] || return 0
    marks_of_tier[2]="not slow"
    run_script tests/recipe_test.sh
    run_pytest export-tests build tests/export_test.py
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
    local python ignored=(--ignore dev/reference/test_versions.py)
    [ "$tier" -lt 3 ] || ignored=()
    marks_of_tier[2]="not slow"
    build "the trainer" build/train_diffv2 || return
    export CUDA_VISIBLE_DEVICES=''
    run_pytest hub build dev/reference ${ignored[@]+"${ignored[@]}"}
    run_pytest hub build dev/bench # conftest.py of dev/reference disables the compiler that these tests use
    if [ "$tier" -eq 3 ]; then
        run_pytest hub-previous build dev/reference/test_versions.py
        run_pytest hub-oldest build dev/reference/test_versions.py -k imported
    fi
    python=$(python3 scripts/python_environment.py hub 2>/dev/null) || return
    TRAIN_DIFFV2=build/train_diffv2 run newest.py "$python" dev/reference/newest.py
}
lab() {
    build "the trainer" build/{train_diffv2,predict_diffv2,text_to_shards} && run_pytest tests build scripts/lab
}
fuzzing() {
    local halves=("config index prompts safetensors" "shards state tokenizer") targets=() seconds=20
    [ "$tier" -eq 3 ] || read -ra targets <<<"${halves[$(turn) % 2]}"
    [ "$tier" -eq 3 ] || seconds=1
    run_script dev/fuzz/run.sh ${targets[@]+"${targets[@]}"} -max_total_time=$seconds
}

# tiers, function, name, and the paths of --changed: beginnings of names of files
trainer=(Makefile llmc/ train_diffv2.c data/text_to_shards.c dev/predict/ tests/)
stage 23 cuda_tools "CUDA tools" "${trainer[@]}" train_diffv2.cu test_ dev/
stage 123 cuda "CUDA" "${trainer[@]}" train_diffv2.cu test_ dev/emulator/
stage 123 float "float" "${trainer[@]}" test_
stage 123 ranks "ranks" "${trainer[@]}"
stage 123 sources "sources" .
stage 123 runs "runs" "${trainer[@]}" scripts/ README.md docs/ Makefile dev/
stage 123 data "data" "${trainer[@]}" data/ scripts/
stage 123 lab "lab" "${trainer[@]}" scripts/ results/
stage 23 double "double" "${trainer[@]}" test_diffv2.c
[ "$(uname -m)" != x86_64 ] || stage 23 vectors "vectors" Makefile llmc/ops/ tests/
! in_turn 0 || stage 23 sanitized "sanitizers" "${trainer[@]}" test_diffv2.c
stage 23 compile_cuda "nvcc" "${trainer[@]}" train_diffv2.cu test_diffv2.cu scripts/
! in_turn 1 || stage 23 hub "Hub" "${trainer[@]}" dev/reference/ dev/bench/
stage 23 fuzzing "fuzzing" llmc/ dev/fuzz/
[ "$(uname -m)" != x86_64 ] || stage 3 avx2 "AVX2" "${trainer[@]}"
stage 3 compiled_ptx "compiled PTX" llmc/ test_diffv2.cu tests/ dev/
stage 3 cuda_fp32 "CUDA, fp32" "${trainer[@]}" train_diffv2.cu test_ dev/emulator/
stage 3 cuda_sanitized "CUDA, sanitizers" "${trainer[@]}" train_diffv2.cu dev/emulator/
stage 3 cuda_threads "CUDA, ThreadSanitizer" llmc/ test_ tests/ dev/emulator/
stage 3 cuda_without_assembly "CUDA without assembly" dev/emulator/
stage 3 slurm "Slurm" "${trainer[@]}" scripts/
[ ${#only[@]} -eq 0 ] || select_stages "${only[@]}" || usage "there is no stage '$missing' in this tier (see --list)"
if [ $list = yes ]; then
    list_stages
    exit
fi
if [ ${#stage_names[@]} -eq 0 ]; then
    echo "no stage tests a file that differs from HEAD"
    finish
fi

echo "== dependencies"
scripts/install_deps.sh --with-mpi || {
    fail "dependencies: see the line above"
    finish
}
# Now, since apt-get cannot run twice at once, and several stages use these environments. A stage reports what is
# missing.
python3 scripts/python_environment.py tests >/dev/null 2>&1
if [ "$tier" -gt 1 ]; then
    scripts/install_deps.sh --with-fuzzer >/dev/null 2>&1
    python3 scripts/python_environment.py export-tests >/dev/null 2>&1
fi
[ "$tier" -lt 3 ] || [ ${#only[@]} -gt 0 ] || continue_stages
run_stages "$jobs"

echo "     all stages: $SECONDS s, $cpu s of CPU"
finish
