#!/usr/bin/env bash
# build_test.sh: tests scripts/find_cuda.sh and the Makefile: what they find in directory trees that imitate
# installations of CUDA, cuDNN, NCCL and the small libraries (toolkit, Debian, conda, Python packages for CUDA 12 and
# 13, a directory of dependencies), and what make compiles after a change. Compilers are imitations too, except where
# nvcc compiles kernels.
# The last line is "N passed, N failed[, N skipped]". Exit status: 0 nothing failed, 1 something failed.
#
# Usage: tests/build_test.sh
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
no_arguments "$@"
tree=$(mktemp -d) || exit 1
trap 'rm -rf "$tree"' EXIT
machine=$(uname -m)

# Each test starts with an empty $tree.

# ---------------------------------------------------------------------------------------------------
# Imitations

files() { # paths...
    local path
    for path; do file "$path"; done
}
nvcc() { program "$1/bin/nvcc" "echo '$2' | tr ' ' '\n'"; } # directory, architectures
runtime_headers() {                                         # directory, CUDA version
    file "$1/cuda_runtime.h"
    file "$1/cuda_runtime_api.h" "#define CUDART_VERSION  $2"
}
cudnn_headers() { # directory, major version
    file "$1/cudnn.h"
    file "$1/cudnn_version.h" "#define CUDNN_MAJOR ${2:-9}"
}
cudnn() { # directory of headers, library
    cudnn_headers "$1"
    file "$2"
}
nccl() { # directory of headers, library
    file "$1/nccl.h"
    file "$2"
}
frontend() { # directory, minor version
    file "$1/cudnn_frontend.h"
    file "$1/cudnn_frontend_version.h" "#define CUDNN_FRONTEND_MAJOR_VERSION 1
#define CUDNN_FRONTEND_MINOR_VERSION ${2:-32}"
}
known='compute_80 compute_89 compute_90 compute_100 compute_120'
toolkit() { # directory, version, directory of libraries below it
    nvcc "$1" "$known"
    runtime_headers "$1/include" "$2"
    files "$1/include/"{cublasLt,nvrtc}.h "$1/${3-lib64}/lib"{cublasLt,cudart,nvrtc}.so
}
python() { program "$tree/python" "echo $1"; } # directory of packages: an interpreter
smi() { program "$tree/bin/nvidia-smi" "$1"; }
complete_toolkit() {
    home=$tree/usr/local/cuda
    toolkit "$home" 13000
    cudnn "$home/include" "$home/lib64/libcudnn.so"
    frontend "$home/include"
    nccl "$home/include" "$home/lib64/libnccl.so"
}

# ---------------------------------------------------------------------------------------------------
# scripts/find_cuda.sh, which sees nothing of this machine

clean_environment() { # VARIABLE=VALUE..., command...
    env -i PATH="$tree/bin:/usr/bin:/bin" HOME="$tree" SYSTEM_ROOT="$tree" PYTHON="$tree/python" "$@"
}
find_cuda() { # VARIABLE=VALUE...
    clean_environment MPI=yes "$@" scripts/find_cuda.sh "$tree/mk" >"$tree/out" 2>"$tree/err"
}
finds() { # VARIABLE=VALUE...
    rm -f "$tree/mk"
    find_cuda "$@" || fail "status $?: $(cat "$tree/err")"
}
fails() { # VARIABLE=VALUE..., -, number of lines, texts in them...
    local variables=()
    while [ "$1" != - ]; do
        variables+=("$1")
        shift
    done
    rm -f "$tree/mk"
    if find_cuda ${variables[@]+"${variables[@]}"}; then fail "it did not fail: $(cat "$tree/mk")"; fi
    [ "$(wc -l <"$tree/err")" -eq "$2" ] || fail "not $2 lines: $(cat "$tree/err")"
    contains "$tree/err" "${@:3}"
    [ ! -e "$tree/mk" ] || fail "it wrote assignments although it failed"
}
value() { sed -n "s/^$1 := *//p" "$tree/mk" 2>/dev/null; }
has() { # variable, words of its value...
    local word text
    text=" $(value "$1") "
    for word in "${@:2}"; do [[ $text == *" $word "* ]] || fail "$1 has no '$word': $text; $(cat "$tree/err")"; done
}
empty() { # variables...
    local name
    for name; do [ -z "$(value "$name")" ] || fail "$name is $(value "$name")"; done
}
notes() { contains "$tree/mk" "$@"; }

test_find_a_toolkit_that_contains_everything() {
    complete_toolkit
    finds
    has CUDA_HOME "$home"
    has NVCC "$home/bin/nvcc"
    has CUDA_LIBS "$home/lib64/libcublasLt.so" "$home/lib64/libcudart.so" "-Wl,-rpath,$home/lib64"
    has CUDNN_CFLAGS -DUSE_CUDNN "$home/include"
    has CUDNN_LIBS "$home/lib64/libcudnn.so" "$home/lib64/libnvrtc.so"
    has NCCL_CFLAGS -DUSE_NCCL
    has NCCL_LIBS "$home/lib64/libnccl.so"
    has CUDA_ARCHS 80 89 90 100 120
    notes 'frontend 1.32' 'no GPU detected'
}
test_find_the_newest_toolkit_without_a_link() {
    toolkit "$tree/usr/local/cuda-12.4" 12040
    toolkit "$tree/usr/local/cuda-12.10" 12100
    toolkit "$tree/usr/local/cuda-9" 9000
    finds
    has CUDA_HOME "$tree/usr/local/cuda-12.10"
}
test_find_the_toolkit_of_the_user_first() {
    toolkit "$tree/usr/local/cuda" 13000
    toolkit "$tree/mine" 12080 lib
    finds CUDA="$tree/mine"
    has CUDA_HOME "$tree/mine"
    has CUDA_MAJOR 12
    has CUDA_LIBS "$tree/mine/lib/libcudart.so"
}
test_find_debians_files_in_system_directories() {
    local lib=$tree/usr/lib/$machine-linux-gnu
    toolkit "$tree/usr" 12080 "lib/$machine-linux-gnu"
    cudnn "$tree/usr/include/$machine-linux-gnu" "$lib/libcudnn.so.9"
    frontend "$tree/usr/include"
    nccl "$tree/usr/include" "$lib/libnccl.so"
    finds NVCC="$tree/usr/bin/nvcc"
    has CUDA_LIBS "$lib/libcudart.so"
    has CUDNN_LIBS "$lib/libcudnn.so.9"
    has NCCL_LIBS "$lib/libnccl.so"
    # -isystem /usr/include breaks the headers of C++
    lacks "$tree/mk" isystem rpath
}
test_find_condas_libraries_below_targets() {
    local machine name target
    for name in x86_64:x86_64-linux aarch64:sbsa-linux; do
        machine=${name%:*} target=$tree/$machine/targets/${name#*:}
        program "$tree/bin/uname" "echo $machine"
        nvcc "$tree/$machine" "$known"
        runtime_headers "$target/include" 12080
        files "$target/include/cublasLt.h" "$target/lib/lib"{cublasLt,cudart}.so
        finds CUDA="$tree/$machine"
        has CUDA_CFLAGS "$target/include"
        has CUDA_LIBS "$target/lib/libcublasLt.so"
    done
}
test_find_python_packages_for_cuda_13_as_a_toolkit() {
    local packages=$tree/site-packages home=$tree/site-packages/nvidia/cu13
    python "$packages"
    nvcc "$home" "$known"
    runtime_headers "$home/include" 13000
    files "$home/include/"{cublasLt,nvrtc}.h "$home/lib/lib"{cublasLt,cudart,nvrtc}.so.13
    cudnn "$packages/nvidia/cudnn/include" "$packages/nvidia/cudnn/lib/libcudnn.so.9"
    nccl "$packages/nvidia/nccl/include" "$packages/nvidia/nccl/lib/libnccl.so.2"
    frontend "$packages/include"
    files "$packages/nvidia_"{cudnn_cu13-9.19.0,nccl_cu13-2.28.9}.dist-info/METADATA
    nccl "$tree/usr/include" "$tree/usr/lib/libnccl.so" # the system's NCCL is for another toolkit
    finds
    cp "$tree/mk" "$tree/first"
    python "$tree/nothing"
    finds CUDA="$home"
    cmp -s "$tree/mk" "$tree/first" || fail "CUDA=DIRECTORY gives: $(diff "$tree/first" "$tree/mk")"
    has CUDA_LIBS "$home/lib/libcublasLt.so.13" "-Wl,-rpath,$home/lib"
    has CUDNN_LIBS "$packages/nvidia/cudnn/lib/libcudnn.so.9" "$home/lib/libnvrtc.so.13"
    has CUDNN_CFLAGS "$packages/include" "$packages/nvidia/cudnn/include"
    has NCCL_LIBS "$packages/nvidia/nccl/lib/libnccl.so.2" "-Wl,-rpath,$packages/nvidia/nccl/lib"
}
test_find_header_and_library_in_one_place() {
    complete_toolkit
    local packages=$tree/usr/lib/python3/site-packages name # no directory that the loader searches
    python "$packages"
    for name in cudnn nccl; do
        $name "$packages/nvidia/$name/include" "$packages/nvidia/$name/lib/lib$name.so.2"
        rm "$home/lib64/lib$name.so"
    done
    finds
    has CUDNN_CFLAGS "$packages/nvidia/cudnn/include"
    has CUDNN_LIBS "$packages/nvidia/cudnn/lib/libcudnn.so.2" "-Wl,-rpath,$packages/nvidia/cudnn/lib"
    has NCCL_CFLAGS "$packages/nvidia/nccl/include"
    has NCCL_LIBS "$packages/nvidia/nccl/lib/libnccl.so.2" "-Wl,-rpath,$packages/nvidia/nccl/lib"
    rm "$packages"/nvidia/*/include/{cudnn,nccl}.h "$home/include/nvrtc.h"
    finds
    empty CUDNN_LIBS NCCL_LIBS
    notes 'cuDNN 9 not found' 'NVRTC not found'
}
test_find_missing_libraries_in_python_packages_of_the_same_cuda_version() {
    local packages=$tree/site-packages
    python "$packages"
    nvcc "$tree/usr/local/cuda" "$known"
    runtime_headers "$tree/usr/local/cuda/include" 12080
    files "$packages/nvidia/"{cublas/lib/libcublasLt,cuda_runtime/lib/libcudart,cuda_nvrtc/lib/libnvrtc}.so.12 \
        "$packages/nvidia/"{cublas/include/cublasLt,cuda_nvrtc/include/nvrtc}.h
    frontend "$packages/include"
    cudnn "$packages/nvidia/cudnn/include" "$packages/nvidia/cudnn/lib/libcudnn.so.9"
    nccl "$packages/nvidia/nccl/include" "$packages/nvidia/nccl/lib/libnccl.so.2"
    files "$packages/nvidia_"{cudnn_cu12-9.8.0,nccl_cu13-2.28.9}.dist-info/METADATA
    finds
    has CUDA_LIBS "$packages/nvidia/cublas/lib/libcublasLt.so.12"
    has CUDNN_LIBS "$packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    empty NCCL_LIBS NCCL_CFLAGS
    notes 'libnccl.so.2 is not for CUDA 12' nvidia-nccl-cu12
}
test_find_a_directory_of_dependencies_before_the_system() {
    toolkit "$tree/usr/local/cuda" 13000
    cudnn "$tree/deps/include" "$tree/deps/lib/libcudnn.so.9"
    frontend "$tree/deps/include"
    cudnn "$tree/usr/include" "$tree/usr/lib/libcudnn.so"
    finds DEPS="$tree/deps"
    has CUDNN_LIBS "$tree/deps/lib/libcudnn.so.9" "-Wl,-rpath,$tree/deps/lib"
    has CUDNN_CFLAGS "$tree/deps/include"
}
test_find_the_newest_version_of_a_library() {
    toolkit "$tree/usr/local/cuda" 13000
    local version
    for version in 2 2.9.1 2.28.9; do nccl "$tree/nccl/include" "$tree/nccl/lib/libnccl.so.$version"; done
    finds NCCL="$tree/nccl"
    has NCCL_LIBS "$tree/nccl/lib/libnccl.so.2.28.9"
}
test_find_libraries_only_in_the_directory_that_the_user_specifies() {
    complete_toolkit
    finds NCCL="$tree/none" CUDNN="$tree/none"
    empty NCCL_CFLAGS CUDNN_CFLAGS
    notes NCCL=DIRECTORY CUDNN=DIRECTORY
}
test_libraries_can_be_disabled() {
    complete_toolkit
    finds NCCL=no
    empty NCCL_CFLAGS
    has CUDNN_CFLAGS -DUSE_CUDNN
    notes 'without NCCL, as requested'
    finds CUDNN=no
    empty CUDNN_CFLAGS CUDNN_LIBS
    notes 'without cuDNN, as requested'
    finds MPI=no
    notes 'OpenMPI not found'
}
test_cudnn_is_disabled_if_a_part_is_missing_and_one_line_names_all_missing_parts() {
    toolkit "$tree/usr/local/cuda" 13000
    rm "$tree/usr/local/cuda/lib64/libnvrtc.so"
    finds
    empty CUDNN_CFLAGS CUDNN_LIBS NCCL_LIBS
    notes nvidia-cudnn-cu13 nvidia-cudnn-frontend nvidia-cuda-nvrtc nvidia-nccl-cu13
    equal "$(grep -c 'attention:' "$tree/mk")" 1
}
test_an_old_cudnn_is_rejected() {
    complete_toolkit
    cudnn_headers "$home/include" 8
    finds
    empty CUDNN_CFLAGS
    notes 'older than cuDNN 9'
}
test_an_old_frontend_is_rejected_and_a_newer_one_elsewhere_is_used() {
    complete_toolkit
    frontend "$home/include" 15
    finds
    empty CUDNN_CFLAGS
    notes 'frontend is version 1.15, 1.16 or newer is required' --with-cuda-python
    frontend "$home/include" 16
    finds
    has CUDNN_CFLAGS "$home/include"
    notes 'frontend 1.16'
    frontend "$home/include" 14
    frontend "$tree/site-packages/include" 32
    python "$tree/site-packages"
    finds
    has CUDNN_CFLAGS "$tree/site-packages/include"
    notes 'frontend 1.32'
}
test_all_missing_requirements_are_printed() {
    fails - 1 'no nvcc found' 'CUDA=DIRECTORY'
    fails CUDA="$tree/none" - 1 "$tree/none has no bin/nvcc"
    nvcc "$tree/usr/local/cuda" "$known"
    runtime_headers "$tree/usr/local/cuda/include" 13000
    fails ARCHS=77 - 4 libcublasLt libcudart cublasLt.h sm_77
    fails CUDA="$tree/a directory" - 1 "error: CUDA '$tree/a directory' contains a space"
}
test_an_old_toolkit_does_not_hide_a_newer_one() {
    complete_toolkit
    toolkit "$tree/usr/local/cuda-12.4" 12040
    program "$tree/old/nvcc" true
    finds CUDA_HOME="$tree/usr/local/cuda-12.4"
    has CUDA_HOME "$home"
}
test_an_old_toolkit_is_rejected() {
    toolkit "$tree/usr/local/cuda" 11080
    fails - 1 'version 11.8, 12.5 or newer'
}
test_architectures_are_those_of_the_gpus_or_of_the_user() {
    toolkit "$tree/usr/local/cuda" 13000
    smi "printf '9.0\n9.0\n8.0\n12.0\n'"
    finds
    equal "$(value CUDA_ARCHS)" "80 90 120"
    smi "printf '8.9\n7.5\n'"
    finds
    equal "$(value CUDA_ARCHS)" 89
    notes 'no code for sm_75'
    smi "echo 7.5"
    fails - 1 'GPUs are of sm_75; 80 or newer'
    finds ARCHS="9.0 sm_120"
    equal "$(value CUDA_ARCHS)" "90 120"
    smi "echo \"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\"; exit 9"
    finds
    has CUDA_ARCHS 80 89 90 100 120
    fails ARCHS=hopper - 1 "'hopper' is not an architecture"
    nvcc "$tree/usr/local/cuda" 'compute_80 compute_90'
    finds
    equal "$(value CUDA_ARCHS)" "80 90"
    notes 'sm_80 90'
}
test_the_file_is_written_only_if_it_changes() {
    toolkit "$tree/usr/local/cuda" 13000
    find_cuda
    touch -d '2020-01-01' "$tree/mk"
    find_cuda
    equal "$(date -r "$tree/mk" +%Y)" 2020
    find_cuda ARCHS=90
    [ "$(date -r "$tree/mk" +%Y)" != 2020 ] || fail 'not written although ARCHS changed'
}

# ---------------------------------------------------------------------------------------------------
# The Makefile

no_packages() { # a machine where pkg-config and mpicc find nothing
    program "$tree/bin/pkg-config" 'exit 1'
    program "$tree/bin/mpicc" 'exit 1'
}
mpicc() { # flags of compiler and linker
    program "$tree/bin/mpicc" "case \$1 in --showme:compile) echo $1;; --showme:link) echo $2;; *) exit 1;; esac"
}
dry_make() { # arguments of make...
    env PATH="$tree/bin:/usr/bin:/bin" make -n BUILD="$tree/build" CC="$tree/bin/cc" "$@" train_diffv2 \
        >"$tree/out" 2>"$tree/err"
}
without_headers() { # arguments of make...: the compiler has no headers of small libraries
    no_packages
    program "$tree/bin/cc" \
        "case \"\$*\" in *--version*) echo cc;; *-E*) ! grep -q 'cblas\|cJSON\|xxhash\|dnnl';; *) exit 1;; esac"
    dry_make "$@"
}
with_headers() { # arguments of make...: the compiler finds all headers
    program "$tree/bin/cc" 'exit 0'
    dry_make ONEDNN=no "$@" || fail "$(cat "$tree/err")"
}
test_make_prints_all_missing_small_libraries() {
    refused without_headers
    contains "$tree/err" 'missing: OpenBLAS cJSON xxHash; scripts/install_deps.sh' DEPS=
}
test_make_finds_small_libraries_in_a_directory_of_dependencies() {
    files "$tree/deps/include/"{cblas,cjson/cJSON,xxhash}.h "$tree/deps/lib/"{libopenblas.so.0,libcjson.so}
    refused without_headers DEPS="$tree/deps"
    contains "$tree/err" 'missing: xxHash;'
    file "$tree/deps/lib/libxxhash.so"
    without_headers DEPS="$tree/deps" || fail "$(cat "$tree/err")"
    contains "$tree/out" "-isystem $tree/deps/include" "-rpath,$tree/deps/lib" \
        "$tree/deps/lib/"{libopenblas.so.0,libcjson.so,libxxhash.so}
    lacks "$tree/out" DONEDNN DUSE_MPI
    ln -s deps "$tree/a link"
    refused without_headers DEPS="$tree/a link"
    contains "$tree/err" "DEPS '$tree/a link' contains a space"
}
test_make_links_a_library_by_name_if_only_the_compiler_knows_it() {
    no_packages
    with_headers
    contains "$tree/out" '-lopenblas -lcjson -lxxhash'
}
test_make_finds_openmpi_by_its_wrapper() {
    no_packages
    mpicc "-I$tree/mpi/include" "-L$tree/mpi/lib -lmpi"
    with_headers
    contains "$tree/out" "-DUSE_MPI -isystem $tree/mpi/include" "-L$tree/mpi/lib -lmpi"
}
test_make_finds_openmpi_in_the_directories_of_the_compiler() {
    no_packages
    program "$tree/bin/pkg-config" 'case "$*" in "--libs ompi-c") echo -lmpi ;; *ompi-c) ;; *) exit 1 ;; esac'
    with_headers
    contains "$tree/out" -DUSE_MPI -lmpi
}
test_make_ignores_common_variables_of_the_environment() {
    no_packages
    ARCH=x86_64 DEBUG=yes with_headers
    contains "$tree/out" ' -march=native ' ' -g '
}

# What make compiles again. The compiler appends the names of its outputs to $tree/log, and every object depends on
# $tree/library.h, a header of a library.
fake_compiler() { # directory, version
    program "$1/cc" "out= old= tracks=no
case \" \$* \" in *' -dM '*) echo '#define VERSION $2'; exit;; *' -E '*) exit;; esac
for word; do [ \"\$old\" != -o ] || out=\$word; [ \"\$word\" != -MD ] || tracks=yes; old=\$word; done
[ -n \"\$out\" ] || exit 0
echo \"\${out##*/}\" >>$tree/log
echo \"\$0 \$*\" >\"\$out\"
[ \$tracks = no ] || echo \"\$out: $tree/library.h\" >\"\${out%.o}.d\""
}
fake_nvcc() { # directory, version
    fake_compiler "$tree/fake" nvcc
    program "$1/bin/nvcc" "case \"\$*\" in --version) echo $2;; --list-gpu-arch) echo '$known' | tr ' ' '\n';;
*) exec $tree/fake/cc \"\$@\";; esac"
}
# A directory with the files of this repository, without its builds and without git.
source_tree() {
    mkdir -p "$tree/source"
    ln -s "$PWD"/{Makefile,*.c,*.cu,llmc,data,dev,scripts,tests} "$tree/source/"
    no_packages
    fake_compiler "$tree/bin" 1
    file "$tree/library.h"
}
make_in_tree() { # arguments of make...
    clean_environment make -C "$tree/source" CC="$tree/bin/cc" CXX="$tree/bin/cc" ONEDNN=no REVISION=one "$@" \
        >"$tree/out" 2>&1 || fail "make $*: $(cat "$tree/out")"
}
compiles() { # expected outputs in alphabetical order; arguments of make...
    local made
    : >"$tree/log"
    sleep 0.02 # the clock of the file system may not have advanced since the last file
    make_in_tree "${@:2}"
    made=$(sort "$tree/log" | paste -sd ' ')
    [ "$made" = "$1" ] || fail "make ${*:2}: it makes '$made', not '$1'"
}
compiles_once() { # the same: a second make compiles nothing
    compiles "$@"
    compiles '' "${@:2}"
}
names() { printf '%s\n' "$@" | sort | paste -sd ' '; }
cpu='predict_diffv2.o revision.o train_diffv2 train_diffv2.o'
gpu='predict_diffv2.o revision.o train_diffv2.cu.o train_diffv2cu'

test_make_compiles_what_depends_on_a_change() {
    source_tree
    compiles_once "$cpu" train_diffv2
    # OpenMPI is installed after the first build
    mpicc "-I$tree/mpi" -lmpi
    compiles_once "$cpu" train_diffv2
    contains "$tree/source/build/train_diffv2.o" -DUSE_MPI
    local change
    for change in MPI=no MPI=yes ONEDNN=yes OPT=-O1 REAL=double SANITIZE=address STRICT=no LDFLAGS=-s \
        ARCH=-mtune=generic; do
        compiles_once "$cpu" "$change" train_diffv2
    done
    compiles "$cpu" train_diffv2
    fake_compiler "$tree/bin" 2
    compiles "$cpu" train_diffv2
    touch "$tree/library.h"
    compiles_once 'predict_diffv2.o train_diffv2 train_diffv2.o' train_diffv2
}
test_a_new_commit_compiles_only_the_revision() {
    source_tree
    compiles "$cpu" train_diffv2
    compiles_once 'revision.o train_diffv2' train_diffv2 REVISION=two
    contains "$tree/source/build/revision.c" '"two"'
}
test_programs_in_the_root_are_copies_from_the_requested_build() {
    source_tree
    compiles "$cpu" train_diffv2
    compiles "$cpu" BUILD=build/fp64 REAL=double train_diffv2
    contains "$tree/source/train_diffv2" build/fp64
    compiles '' train_diffv2
    lacks "$tree/source/train_diffv2" build/fp64
}
test_make_clean_keeps_python_packages() {
    source_tree
    compiles "$cpu" train_diffv2
    mkdir "$tree"/source/build/{python,venv-lab}
    make_in_tree clean
    equal "$(ls "$tree/source/build" | paste -sd ' ')" 'python venv-lab'
    [ ! -e "$tree/source/train_diffv2" ]
}
test_make_compiles_cuda_after_a_change_of_toolkit_architecture_precision_or_library() {
    source_tree
    home=$tree/usr/local/cuda
    toolkit "$home" 13000
    fake_nvcc "$home" 13.0
    compiles_once "$gpu" train_diffv2cu
    compiles_once "$gpu" ARCHS=90 train_diffv2cu
    compiles "$gpu" ARCHS=90 PRECISION=fp32 train_diffv2cu
    compiles '' ARCHS=90 train_diffv2cu
    lacks "$tree/source/train_diffv2cu" cuda_fp32
    compiles "$gpu" ARCHS=90 STRICT=no train_diffv2cu
    compiles "$gpu" train_diffv2cu
    fake_nvcc "$home" 13.1
    compiles "$gpu" train_diffv2cu
    cudnn "$home/include" "$home/lib64/libcudnn.so"
    frontend "$home/include"
    compiles_once "attention_cudnn.o $gpu" train_diffv2cu
    touch "$tree/library.h"
    compiles_once 'attention_cudnn.o predict_diffv2.o train_diffv2.cu.o train_diffv2cu' train_diffv2cu
}
# The flags of OpenBLAS 0.3.21 (Debian 12), of 0.3.26 and newer with OpenMP (Ubuntu 24.04, Debian 13), and of an OpenMPI
# with threads. nvcc does not accept -fopenmp and -pthread.
test_nvcc_gets_directories_and_macros_and_the_host_compiler_gets_other_flags() {
    source_tree
    local packages=$tree/site-packages cflags word object=$tree/source/build/cuda_bf16/train_diffv2.cu.o
    home=$tree/usr/local/cuda
    python "$packages"
    nvcc "$home" "$known"
    runtime_headers "$home/include" 13000
    file "$home/lib64/libcudart.so"
    file "$packages/nvidia/cublas/include/cublasLt.h"
    file "$packages/nvidia/cublas/lib/libcublasLt.so.13"
    fake_nvcc "$home" 13.0
    for cflags in '-I/usr/include/openblas-openmp' '-I/usr/include/openblas-openmp -fopenmp' \
        '-I/usr/include/mpi -pthread -DUSE_THAT -UTHIS'; do
        program "$tree/bin/pkg-config" "case \"\$*\" in
'--exists openblas') exit;; '--cflags openblas') echo '$cflags';;
'--libs openblas') echo -lopenblas;; *) exit 1;; esac"
        make_in_tree ARCHS='80 90' train_diffv2cu
        for word in $cflags; do
            case $word in
            -f* | -p*) grep -q -- " -Xcompiler $word " "$object" && ! grep -q -- "[^r] $word " "$object" ;;
            *) grep -q -- "[^r] $word " "$object" ;;
            esac || fail "$cflags: nvcc gets $(cat "$object")"
        done
    done
    contains "$object" "-isystem $packages/nvidia/cublas/include " " -ccbin $tree/bin/cc "
    grep -q -- 'arch=compute_80,code=sm_80.*arch=compute_90a,code=sm_90a.*arch=compute_90,code=compute_90' "$object" \
        || fail "no PTX of the newest architecture: $(cat "$object")"
    lacks "$object" code=compute_80
}
test_make_compiles_cuda_on_the_cpu_after_a_change() {
    source_tree
    local all layer program=build/oncpu/test_layer
    layer=$(names $(cd dev/cuda_on_cpu && printf '%s\n' *.cpp | sed 's/cpp$/o/') test_layer test_layer.cu.o)
    all=$(names $layer predict_diffv2.o revision.o)
    compiles_once "$all" "$program"
    compiles "$layer" PRECISION=fp32 "$program"
    compiles_once "$layer" UCONTEXT=yes "$program"
    compiles "$all" SANITIZE=address "$program"
}

# nvcc splits a store if it cannot prove that the index is a multiple of the vector; PTX shows it.
test_vectorised_kernels_store_16_bytes_at_a_time() {
    local nvcc=${NVCC:-${CUDA:-/usr/local/cuda}/bin/nvcc} name kernels with_max per_head per_head_with_max
    [ -x "$nvcc" ] || skip "no $nvcc"
    kernels='adamw scale fill swiglu_forward swiglu_backward rope embedding_forward'
    with_max='swiglu_forward swiglu_backward gate_forward'
    kernels+=' gate_forward expert_swiglu_forward expert_gather expert_combine'
    per_head='head_norm_forward exclusive_backward' # their second argument is a number
    per_head_with_max='exclusive_forward diff_combine_forward'
    file "$tree/kernels.cu" "#define DEVICE_OPS
#define PRECISION_BF16
#include \"llmc/base/common.h\"
#include \"llmc/ops/all_ops.h\"
extern const void *const kernels[] = {$(printf '(const void *)%s_kernel<PACK>, ' $kernels)
$(printf '(const void *)%s_kernel<PACK, Absmax>, ' $with_max)
$(printf '(const void *)%s_kernel<PACK, 2>, ' $per_head)
$(printf '(const void *)%s_kernel<PACK, 2, Absmax>, ' $per_head_with_max)};"
    "$nvcc" -std=c++17 -O3 -arch=sm_90 -I. -ptx -o "$tree/ptx" "$tree/kernels.cu" 2>"$tree/err" \
        || fail "$(tail -n 3 "$tree/err")"
    for name in $kernels $per_head $per_head_with_max; do
        awk -v kernel="[0-9]${name}_kernelILi8E" '/\.entry / { here = match($0, kernel) }
            here && /st\.global/ { stores++; narrow += !/st\.global\.v4\.(u|b|f)32/ }
            END { exit stores == 0 || narrow > 0 }' "$tree/ptx" || fail "${name}_kernel has narrower stores, or none"
    done
}

# ---------------------------------------------------------------------------------------------------
# Python packages

# Every package has a version and hashes, and is a wheel: pip runs no code to build it.
test_every_python_package_is_pinned_with_hashes() {
    local file name line
    for file in $(find data dev scripts tests -name requirements.txt); do
        contains "$file" --require-hashes '--only-binary :all:'
        awk '/^#/ || /^--/ { next }
            /^[a-z]/ { if (open || $1 !~ /^[a-z0-9_.-]+==[0-9][^ ]*$/ || !/\\$/) { print; bad = 1 } open = 1; next }
            /^    --hash=sha256:[0-9a-f]+( \\)?$/ && length($1) == 78 { open = /\\$/; next }
            { print; bad = 1 }
            END { exit bad || open }' "$file" >"$tree/unpinned" \
            || fail "$file: not pinned: $(head -n 3 "$tree/unpinned")"
        for name in $(sed -n 's/^\([a-zA-Z][a-zA-Z0-9_.-]*\).*/\1/p' "${file%txt}in" | tr 'A-Z_' 'a-z-'); do
            grep -q "^$name==" "$file" || fail "$file has no $name: run scripts/pin_packages.sh"
        done
    done
    [ -n "${name-}" ] || fail "no requirements.txt found"
    # Every call of pip requires hashes. find_cuda.sh and pin_packages.sh only print commands, and newest.py tests the
    # newest release, which has no pin.
    contains dev/reference/newest.py '"--only-binary", ":all:"'
    grep -rnE --include='*.sh' --include='*.py' --exclude={find_cuda,pin_packages,build_test}.sh --exclude=newest.py \
        -e '-m"?,? "?pip"?,? +"?(install|download)' data dev scripts >"$tree/calls"
    [ "$(wc -l <"$tree/calls")" -ge 3 ] || fail "calls of pip are not found: $(cat "$tree/calls")"
    while IFS=: read -r file line _; do
        sed -n "$line,$((line + 2))p" "$file" | grep -q -- --require-hashes \
            || fail "$file:$line calls pip without --require-hashes"
    done <"$tree/calls"
}
install_cuda_python() {
    if clean_environment scripts/install_deps.sh --with-cuda-python >"$tree/out" 2>&1; then fail "it did not fail"; fi
}
test_python_packages_for_cuda_are_installed_as_pinned() {
    program "$tree/python" "[ \"\$1\" = -m ] || exit 0
echo \"\$*\" >$tree/call
for word; do last=\$word; done
cp \"\$last\" $tree/pins
exit 1"
    install_cuda_python
    contains "$tree/call" '--require-hashes --only-binary :all:'
    local name
    for name in nvidia-cuda-nvcc nvidia-cudnn-cu13 nvidia-cudnn-frontend nvidia-nccl-cu13; do
        grep -A 1 "^$name==[0-9]" "$tree/pins" | grep -q -- '--hash=sha256:' \
            || fail "no pinned $name: $(cat "$tree/pins")"
    done
}
# The imitation of pip replaces the directory nvidia/ of its target, as pip does.
test_python_packages_for_cuda_are_added_to_those_that_are_installed() {
    local packages=$tree/repository/build/python
    mkdir "$tree/repository"
    cp -r scripts "$tree/repository"
    file "$packages/nvidia/cudnn/lib/libcudnn.so.9"
    file "$packages/nvidia/nccl/version" old
    program "$tree/python" "[ \"\$1\" = -m ] || exit 0
while [ \"\$1\" != --target ]; do shift; done
rm -rf \"\$2/nvidia\"
mkdir -p \"\$2/nvidia/nccl\"
echo new >\"\$2/nvidia/nccl/version\""
    cd "$tree/repository"
    install_cuda_python
    equal "$(cat "$packages/nvidia/nccl/version")" new
    [ -e "$packages/nvidia/cudnn/lib/libcudnn.so.9" ] || fail "cuDNN is deleted"
    equal "$(ls build)" python
    mv "$tree/repository" "$tree/a repository"
    cd "$tree/a repository"
    install_cuda_python
    contains "$tree/out" "'$tree/a repository' contains a space"
}
test_python_packages_for_cuda_match_the_driver() {
    program "$tree/python" "[ \"\$1\" = -m ] || { echo $tree/nothing; exit 0; }
echo called >$tree/call
exit 1"
    driver() { smi "echo '| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   $1   |'"; }
    installs() { # whether pip is called, expected message
        rm -f "$tree/call"
        install_cuda_python
        contains "$tree/out" "$2"
        equal "$([ -e "$tree/call" ] && echo yes || echo no)" "$1"
    }
    installs yes 'no driver found (nvidia-smi): installs packages for CUDA 13'
    driver 'CUDA Version: 12.8'
    installs no 'the driver supports CUDA 12.8, and the toolkit is CUDA 13: update the driver'
    driver 'CUDA UMD Version: 13.0'
    installs yes 'pip install failed'
    toolkit "$tree/usr/local/cuda" 12080
    driver 'CUDA Version: 12.4'
    installs yes 'nvidia-cudnn-cu12'
}

# ---------------------------------------------------------------------------------------------------
# dev/gpu_check/short.sh prepare, with imitations of what downloads, unpacks and compiles

prepares() { # arguments: short.sh in a repository of one's own
    (cd / && PATH="$tree/bin:$PATH" "$tree/repository/dev/gpu_check/short.sh" "$@") >"$tree/out" 2>&1
}
test_short_sh_packs_programs_libraries_and_sources() {
    local usr=$tree/unpacked/usr at=$tree/repository package
    mkdir -p "$at/dev" "$at/scripts/cuda_python" "$at/llmc" "$usr/share/dictd"
    cp -r dev/gpu_check "$at/dev"
    cp scripts/cuda_python/requirements.txt "$at/scripts/cuda_python"
    file "$at/llmc/a.h"
    file "$at/llmc/untracked.h"
    file "$tree/library.so"
    for package in xxhash.h cblas.h cblas_mangling.h cjson/cJSON.h; do file "$usr/include/$package"; done
    for package in blis-openmp/libblas.so.3 libcjson.so.1 libxxhash.so.0; do
        file "$usr/lib/x86_64-linux-gnu/$package"
    done
    for package in libblis4-openmp libcjson1 libxxhash0 dict-gcide; do file "$usr/share/doc/$package/copyright"; done
    gzip -c "$tree/library.so" >"$usr/share/dictd/gcide.dict.dz"
    program "$tree/bin/apt-get" 'case "$*" in *download*) touch x.deb ;; esac'
    program "$tree/bin/dpkg-deb" "case \$1 in
-x) mkdir -p \"\$3\" && cp -r '$tree/unpacked/.' \"\$3\" ;;
*) echo x 1.2 ;;
esac"
    # pip writes below what follows -d, zipfile below its last argument
    program "$tree/bin/python3" "case \"\$*\" in
*pip*) while [ \"\$1\" != -d ]; do shift; done
    mkdir -p \"\$2\" && touch \"\$2/nvidia_cudnn_frontend-1.2-py3.whl\" ;;
*zipfile*) mkdir -p \"\$5/include\" \"\$5/licenses\" && touch \"\$5/licenses/LICENSE\" ;;
*) exec '$(command -v python3)' \"\$@\" ;;
esac"
    program "$tree/bin/git" 'case "$*" in
*ls-files*:*llmc*) printf "llmc/a.h\0dev/gpu_check/programs.py\0" ;;
*) echo abc ;;
esac'
    program "$tree/bin/strip" 'cp "$4" "$3"'
    program "$tree/bin/cc" "echo '$tree/library.so'"
    program "$tree/bin/make" "echo \"\$*\" >>'$tree/made'
for goal; do case \$goal in */build/short/*) mkdir -p \"\$(dirname \"\$goal\")\" && touch \"\$goal\" ;; esac; done"
    program "$at/text_to_shards" 'mkdir -p "$2"'
    prepares prepare 80,90 || fail "$(cat "$tree/out")"
    contains "$tree/out" 'x 1.2' 'nvidia-cudnn-frontend 1.2' 'programs for sm_80, sm_90: cuda_bf16/train_diffv2cu' \
        "$at/build/short/check: 0.0 MB, revision abc"
    contains "$tree/made" ' MPI=no ONEDNN=no PTX=no ARCHS=80 90 PRECISION=bf16 ' ' PRECISION=fp32 '
    equal "$(ls "$at/build/short/check")" $'check.tar.gz\nshort.sh'
    tar -tzf "$at/build/short/check/check.tar.gz" >"$tree/packed"
    for package in bin/cuda_{bf16,fp32}/t{rain,est}_diffv2cu bin/cuda_bf16/bench_cuda bin/train_diffv2 lib/library.so \
        include/cjson/cJSON.h licenses/dict-gcide project/llmc/a.h project/dev/gpu_check/programs.py CONTENTS sources \
        archs revision corpus/; do
        grep -qx "diffv2_short/$package" "$tree/packed" || fail "$package is missing"
    done
    ! grep -q untracked "$tree/packed" || fail 'a file that git does not list is packed'
    equal "$(find "$at/build/short" -name 'work.*')" ''
    : >"$tree/made"
    prepares prepare 80 || fail "$(cat "$tree/out")"
    contains "$tree/made" ' ARCHS=80 PRECISION=bf16 '
    head -c 41000000 /dev/urandom >"$at/build/short/deps/large"
    ! prepares prepare || fail 'an archive of more than 40 MB is made'
    contains "$tree/out" "short.sh: $at/build/short/check has 41.0 MB, more than 40"
    equal "$(find "$at/build/short" -name 'work.*')" ''
    ! prepares prepare sm_90 || fail 'sm_90 is accepted'
    contains "$tree/out" "ARCHS 'sm_90': must be numbers, such as 90 or 80,90"
}

# ---------------------------------------------------------------------------------------------------
# tests/stages.sh: how it counts the results of a test program, and runs stages side by side

counts() { # expected passed, failed and skipped; the program's last line and exit status
    program "$tree/program" "echo 'ok   one'; echo 'FAIL other'; echo '$2'; exit $3"
    local counted
    counted=$(
        scratch=$tree
        source tests/stages.sh
        run tests "$tree/program" >/dev/null
        echo "$passed $failed $skipped"
    )
    [ "$counted" = "$1" ] || fail "'$2' and status $3 count as $counted, not $1"
}
test_a_test_program_must_run_tests_and_its_status_must_match_its_counts() {
    counts '3 0 0' '3 passed, 0 failed' 0
    counts '3 2 0' '3 passed, 2 failed' 1
    counts '3 0 1' '3 passed, 0 failed, 1 skipped' 0
    counts '0 0 2' '0 passed, 0 failed, 2 skipped' 0
    counts '0 1 0' '0 passed, 0 failed' 0
    counts '3 1 0' '3 passed, 0 failed' 1
    counts '3 1 0' '3 passed, 0 failed' 139
    counts '3 2 0' '3 passed, 1 failed' 0
    counts '1 2 0' 'Segmentation fault' 139
    counts '1 2 0' '' 0
}
stages() { # text: writes a script whose stages run two at a time
    mkdir "$tree/all"
    file "$tree/stages" "source tests/stages.sh; all=$tree/all tree=$tree; $1; run_stages 2; finish"
}
test_stages_run_at_once_and_their_output_is_printed_whole_and_in_their_order() {
    stages 'waits() { echo first; until [ -e $tree/other ]; do sleep 0.1; done; pass waits; }
        ends() { : >$tree/other; fail ends; skip ends; }
        dies() { pass unknown; kill -KILL $BASHPID; }
        last() { pass last; }
        stage waits "the first"; stage ends "the second"; stage dies "the third"; stage last "the fourth"'
    timeout 60 bash "$tree/stages" >"$tree/out" 2>&1 && fail "the exit status is 0"
    equal "$(sed '/^     .*: [0-9]* s$/d; /Killed/d' "$tree/out")" "$(printf '%s\n' '== the first' first 'ok   waits' \
        '== the second' 'FAIL ends' 'skip ends' '== the third' 'ok   unknown' \
        'FAIL the stage ended before its last test' '== the fourth' 'ok   last' 'failed in the second: ends' \
        'failed in the third: the stage ended before its last test' '2 passed, 2 failed, 1 skipped')"
}
test_recorded_stages_continue_where_they_were_stopped() {
    local repository=$tree/repository stages=$PWD/tests/stages.sh
    git init -q "$repository"
    cd "$repository"
    commit() { git add . && git -c user.name=t -c user.email=t@t commit -q -m "$1"; }
    file .gitignore records
    commit first
    mkdir records
    file "$tree/stages" "source $stages; records=records all=\$(mktemp -d -p $tree); work() { [ ! -e $tree/fault ]; }"'
        good() { pass one; skip two; }
        bad() { if work; then pass three; else fail three; fi; }
        slow() { [ -z "${STOP-}" ] || { kill $$; sleep 60; }; pass four; }
        stage good Good; stage bad Bad; stage slow Slow
        [ $# -eq 0 ] || select_stages "$@" || echo "no $missing"
        [ -n "${LIST-}" ] && { list_stages; exit; }
        continue_stages; run_stages 1; finish'
    states() { LIST=1 bash "$tree/stages" | awk 'NR > 1 { printf "%s %s, ", $1, $2 }'; }
    equal "$(states)" "good never, bad never, slow never, "
    : >"$tree/fault"
    STOP=1 bash "$tree/stages" >"$tree/out" 2>&1 && fail "the exit status of a stopped call is 0"
    equal "$(states)" "good fresh, bad failed, slow never, "
    rm "$tree/fault"
    bash "$tree/stages" >"$tree/out" 2>&1 || fail "$(cat "$tree/out")"
    equal "$(sed -n 's/^== \([A-Z][a-z]*\).*/\1/p' "$tree/out" | tr '\n' ' ')" 'Good Slow Bad '
    equal "$(tail -n 1 "$tree/out")" '3 passed, 0 failed, 1 skipped'
    equal "$(states)" "good fresh, bad fresh, slow fresh, "
    file other
    equal "$(states)" "good stale, bad stale, slow stale, "
    bash "$tree/stages" slow >"$tree/out" 2>&1
    commit second
    equal "$(states)" "good stale, bad stale, slow stale, "
    bash "$tree/stages" slow >"$tree/out" 2>&1
    equal "$(states)" "good stale, bad stale, slow fresh, "
    bash "$tree/stages" nothing >"$tree/out" 2>&1
    contains "$tree/out" 'no nothing'
}
test_a_signal_stops_all_stages_and_what_they_have_started() {
    local stages end process
    stages 'shell() { echo $BASHPID >$tree/one; sleep 100; }
        group() { timeout 100 sh -c "echo \$\$ >$tree/two; sleep 100"; } # timeout makes a process group
        stage shell one; stage group two'
    bash "$tree/stages" >"$tree/out" 2>&1 &
    stages=$! end=$((SECONDS + 20))
    until [ -s "$tree/one" ] && [ -s "$tree/two" ]; do
        [ $SECONDS -lt $end ] || fail "not started after 20 s: $(cat "$tree/out")"
        sleep 0.1
    done
    kill "$stages"
    wait "$stages" && fail "the exit status is 0"
    for process in $(cat "$tree/one" "$tree/two"); do
        while kill -0 "$process" 2>/dev/null; do
            [ $SECONDS -lt $end ] || fail "process $process is alive: $(ps -o args= "$process")"
            sleep 0.1
        done
    done
}

for test in $(declare -F | sed -n 's/^declare -f \(test_\)/\1/p'); do
    rm -rf "${tree:?}"/*
    mkdir -p "$tree/bin"
    python "$tree/nothing"
    run_test "$test" build
done
finish
