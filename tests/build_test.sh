#!/usr/bin/env bash
# build_test.sh: tests scripts/find_cuda.sh and the Makefile: that each library is found, absent, or where its variable
# says, in directory trees that imitate installations, and what make compiles after a change. Compilers are imitations.
# Usage: tests/build_test.sh. The last line is "N passed, N failed". Exit status: 0 nothing failed, 1 something failed.
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
no_arguments "$@"
tree=$(mktemp -d) || exit 1
trap 'rm -rf "$tree"' EXIT
machine=$(uname -m) home=$tree/usr/local/cuda

files() { local path && for path; do file "$path"; done; }
toolkit() { # directory, CUDART_VERSION, directory of libraries below it, end of their names: with all libraries
    local name
    program "$1/bin/nvcc" "printf 'compute_%s\n' 80 89 90 100 120"
    files "$1/include/"{cuda_runtime,cublasLt,nvrtc,cudnn,cudnn_frontend,nccl}.h
    file "$1/include/cuda_runtime_api.h" "#define CUDART_VERSION  $2"
    versions "$1" 9 32
    for name in cublasLt cudart nvrtc cudnn nccl; do file "$1/${3-lib64}/lib$name.so${4-}"; done
}
versions() { # directory of a toolkit, major version of cuDNN, minor version of its frontend
    file "$1/include/cudnn_version.h" "#define CUDNN_MAJOR $2"
    file "$1/include/cudnn_frontend_version.h" "#define CUDNN_FRONTEND_MAJOR_VERSION 1
#define CUDNN_FRONTEND_MINOR_VERSION $3"
}

# ---- scripts/find_cuda.sh, which sees nothing of this machine
clean_environment() { # VARIABLE=VALUE..., command...
    env -i PATH="$tree/bin:/usr/bin:/bin" HOME="$tree" SYSTEM_ROOT="$tree" PYTHON="$tree/python" "$@"
}
find_cuda() { # VARIABLE=VALUE...
    clean_environment "$@" scripts/find_cuda.sh "$tree/mk" >"$tree/out" 2>"$tree/err"
}
finds() { find_cuda "$@" || fail "status $?: $(cat "$tree/err")"; } # VARIABLE=VALUE...
fails() {                                                           # message, VARIABLE=VALUE...
    if find_cuda "${@:2}"; then fail "it did not fail: $(cat "$tree/mk")"; fi
    contains "$tree/err" "$1"
}
has() { # variable, words of its value...
    local word value
    value=$(sed -n "s/^$1 := *//p" "$tree/mk")
    for word in "${@:2}"; do [[ " $value " == *" $word "* ]] || fail "$1 has no '$word': $value"; done
}
has_all_in() { # directory of headers, directory of libraries
    has CUDA_LIBS "$2/libcublasLt.so" "$2/libcudart.so" "-Wl,-rpath,$2"
    has CUDNN_CFLAGS -DUSE_CUDNN "$1"
    has CUDNN_LIBS "$2/libcudnn.so" "$2/libnvrtc.so"
    has NCCL_CFLAGS -DUSE_NCCL "$1"
    has NCCL_LIBS "$2/libnccl.so"
}
test_each_library_is_found_in_the_toolkit_and_in_system_directories() {
    local lib=lib/$machine-linux-gnu name
    toolkit "$home" 13000
    finds MPI=yes
    has_all_in "$home/include" "$home/lib64"
    contains "$tree/mk" 'frontend 1.32' 'started by MPI or Slurm'
    toolkit "$tree/usr" 12080 "$lib" .12
    finds NVCC="$tree/usr/bin/nvcc"
    for name in cublasLt cudart cudnn nvrtc nccl; do contains "$tree/mk" " $tree/usr/$lib/lib$name.so.12 "; done
    lacks "$tree/mk" isystem rpath # -isystem /usr/include breaks the headers of C++
}
test_each_library_is_found_in_python_packages_of_the_same_cuda_version() {
    local packages=$tree/site-packages nccl=$tree/site-packages/nvidia/nccl
    program "$tree/python" "echo $packages"
    toolkit "$packages/nvidia/cu13" 13000 lib .13
    rm "$packages"/nvidia/cu13/lib/libnccl*
    mv "$packages"/nvidia/cu13/include/cudnn_frontend* "$packages"
    files "$nccl/include/nccl.h" "$nccl/lib/libnccl.so."{2.9.1,2.28.9} "$packages/nvidia_nccl_cu13-2.dist-info/METADATA"
    files "$tree/usr/include/nccl.h" "$tree/usr/lib/libnccl.so" # for another toolkit
    finds
    has CUDA_LIBS "$packages/nvidia/cu13/lib/libcudart.so.13"
    has CUDNN_LIBS "$packages/nvidia/cu13/lib/libcudnn.so.13"
    has NCCL_LIBS "$nccl/lib/libnccl.so.2.28.9" "-Wl,-rpath,$nccl/lib"
    mv "$packages/nvidia_nccl_cu13-2.dist-info" "$packages/nvidia_nccl_cu12-2.dist-info"
    finds
    has NCCL_LIBS "$tree/usr/lib/libnccl.so"
}
test_each_library_is_absent_with_a_line_that_names_it_or_its_variable() {
    local each
    fails 'or specify CUDA=DIRECTORY'
    toolkit "$home" 11080
    fails 'is version 11.8, 12.5 or newer is required; CUDA=DIRECTORY'
    for each in include/cublasLt.h:cublasLt lib64/libcudart.so:cudart; do
        toolkit "$home" 13000
        rm "$home/${each%:*}"
        fails "lib${each#*:}"
    done
    for each in include/cudnn.h:CUDNN include/cudnn_frontend.h:CUDNN_FRONTEND lib64/libnvrtc.so:NVRTC; do
        toolkit "$home" 13000
        rm "$home/${each%:*}"
        finds
        lacks "$tree/mk" USE_CUDNN CUDNN_LIBS
        contains "$tree/mk" "${each#*:}=DIRECTORY"
    done
    rm "$home/lib64/libnccl.so"
    versions "$home" 8 15
    finds
    lacks "$tree/mk" USE_CUDNN USE_NCCL
    contains "$tree/mk" NCCL=DIRECTORY 'older than cuDNN 9' 'frontend is version 1.15, 1.16 or newer is required'
}
test_each_library_is_where_its_variable_says_or_disabled_by_it() {
    local other=$tree/other each
    toolkit "$home" 12080
    toolkit "$other" 13000 lib
    for each in CUDA DEPS; do
        finds "$each=$other"
        has_all_in "$other/include" "$other/lib"
    done
    finds CUDNN="$other" CUDNN_FRONTEND="$other" NVRTC="$other" NCCL="$other"
    has CUDNN_LIBS "$other/lib/libcudnn.so" "$other/lib/libnvrtc.so"
    has NCCL_LIBS "$other/lib/libnccl.so"
    fails "$tree/none has no bin/nvcc" CUDA="$tree/none"
    for each in CUDNN CUDNN_FRONTEND NVRTC; do # nothing else is searched
        finds "$each=$tree/none" NCCL="$tree/none"
        lacks "$tree/mk" USE_CUDNN USE_NCCL
        contains "$tree/mk" "$each=DIRECTORY" NCCL=DIRECTORY
    done
    finds CUDNN=no NCCL=no
    contains "$tree/mk" 'without cuDNN, as requested' 'without NCCL, as requested'
}

# ---- the Makefile. The compiler appends the names of its outputs to $tree/log. Objects depend on $tree/library.h.
compiler() { # program, version, headers that it does not find
    program "$1" "out= old= tracks=no
case \" \$* \" in *' -dM '*) echo '#define VERSION $2'; exit;; *' -E '*) ! grep -q '${3:-^$}'; exit;;
*' --version '*) echo $2; exit;; *' --list-gpu-arch '*) printf 'compute_%s\n' 80 90; exit;; esac
for word; do [ \"\$old\" != -o ] || out=\$word; [ \"\$word\" != -MD ] || tracks=yes; old=\$word; done
echo \"\${out##*/}\" >>$tree/log
echo \"\$0 \$*\" >\"\$out\"
[ \$tracks = no ] || echo \"\$out: $tree/library.h\" >\"\${out%.o}.d\""
}
source_tree() { # a directory with the files of this repository, without its builds and without git
    mkdir -p "$tree/source"
    ln -s "$PWD"/{Makefile,*.c,*.cu,llmc,data,dev,scripts,tests} "$tree/source/"
    program "$tree/bin/pkg-config" 'exit 1'
    program "$tree/bin/mpicc" 'exit 1'
    compiler "$tree/bin/cc" 1
    file "$tree/library.h"
}
makes() { # arguments of make...
    clean_environment make -C "$tree/source" CC="$tree/bin/cc" CXX="$tree/bin/cc" CCACHE=no REVISION=one "$@" \
        >"$tree/out" 2>&1
}
test_each_small_library_is_found_absent_or_where_deps_says() {
    local linked=$tree/source/build/train_diffv2
    source_tree
    makes train_diffv2
    contains "$linked" '-lopenblas -lcjson -lxxhash' -ldnnl
    program "$tree/bin/pkg-config" 'case $1 in --exists) ;; --libs) echo "-lof_$2" ;; esac'
    makes train_diffv2
    contains "$linked" -lof_openblas -lof_libcjson -lof_libxxhash -lof_ompi-c
    makes MPI=no ONEDNN=no train_diffv2
    lacks "$linked" -lof_ompi-c -ldnnl
    program "$tree/bin/pkg-config" 'exit 1'
    compiler "$tree/bin/cc" 1 'cblas\|cJSON\|xxhash\|dnnl'
    refused makes train_diffv2
    contains "$tree/out" 'missing: OpenBLAS cJSON xxHash; scripts/install_deps.sh' DEPS=
    files "$tree/deps/include/"{cblas,cjson/cJSON,xxhash}.h "$tree/deps/lib/lib"{openblas,cjson,xxhash}.so
    makes DEPS="$tree/deps" train_diffv2
    contains "$linked" "-rpath,$tree/deps/lib" "$tree/deps/lib/"{libopenblas,libcjson,libxxhash}.so
}
compiles() { # expected outputs in alphabetical order; arguments of make...: a second make compiles nothing
    local expected
    for expected in "$1" ''; do
        : >"$tree/log"
        sleep 0.02 # the clock of the file system may not have advanced since the last file
        makes "${@:2}" || fail "make ${*:2}: $(cat "$tree/out")"
        equal "${*:2}: $(sort "$tree/log" | paste -sd ' ')" "${*:2}: $expected"
    done
}
test_make_compiles_again_when_flags_compilers_libraries_or_the_commit_change() {
    local change all='revision.o train_diffv2 train_diffv2.o'
    source_tree
    compiles "$all" train_diffv2
    for change in MPI=yes ONEDNN=no OPT=-O1 REAL=double SANITIZE=address STRICT=no LDFLAGS=-s ARCH=-mtune=generic; do
        compiles "$all" "$change" train_diffv2
    done
    compiles "$all" train_diffv2
    compiler "$tree/bin/cc" 2
    compiles "$all" train_diffv2
    touch "$tree/library.h"
    compiles 'train_diffv2 train_diffv2.o' train_diffv2
    compiles 'revision.o train_diffv2' train_diffv2 REVISION=two
    all='revision.o train_diffv2.cu.o train_diffv2cu'
    toolkit "$home" 13000
    rm "$home/lib64/libcudnn.so"
    compiler "$home/bin/nvcc" 13.0
    compiles "$all" train_diffv2cu
    for change in ARCHS=80 PRECISION=fp32 STRICT=no NCCL=no; do compiles "$all" "$change" train_diffv2cu; done
    compiles "$all" train_diffv2cu
    compiler "$home/bin/nvcc" 13.1
    compiles "$all" train_diffv2cu
    file "$home/lib64/libcudnn.so"
    compiles "attention_cudnn.o $all" train_diffv2cu
}

for test in $(tests_in_order); do
    rm -rf "${tree:?}"/*
    run_test "$test" build
done
finish
