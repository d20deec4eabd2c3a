#!/usr/bin/env bash
# build_test.sh: what the Makefile and scripts/find_cuda.sh find, over trees that imitate the places where people have CUDA,
# cuDNN, NCCL and the small libraries: toolkit, Debian, conda, Python's packages for CUDA 12 and 13, a directory of
# dependencies; and what make compiles again after a change. Compilers are imitations, too, but for the test of what nvcc
# makes of kernels. The last line is "N passed, N failed, N skipped". Exit status: 0 nothing failed, 1 something did.
#
# Usage: tests/build_test.sh
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -eq 0 ] || {
    echo "build_test.sh: unexpected argument '$1': it takes none" >&2
    exit 2
}
tree=$(mktemp -d) || exit 1
trap 'rm -rf "$tree"' EXIT
passed=0 failed=0 skipped=0
gcc_machine=$(uname -m)

# ---------------------------------------------------------------------------------------------------
# Imitations

file() { # path, text
    mkdir -p "$(dirname "$1")"
    printf '%s\n' "${2-}" >"$1"
}
program() { # path, lines of a script
    file "$1" "#!/bin/sh
$2"
    chmod +x "$1"
}
nvcc() { program "$1/bin/nvcc" "echo '$2' | tr ' ' '\n'"; } # directory, what it compiles for
runtime_headers() {                                         # directory, CUDA's version
    file "$1/cuda_runtime.h"
    file "$1/cuda_runtime_api.h" "#define CUDART_VERSION  $2"
}
cudnn_headers() { # directory, major version
    file "$1/cudnn.h"
    file "$1/cudnn_version.h" "#define CUDNN_MAJOR ${2:-9}"
}
frontend() { # directory, minor version
    file "$1/cudnn_frontend.h"
    file "$1/cudnn_frontend_version.h" "#define CUDNN_FRONTEND_MAJOR_VERSION 1
#define CUDNN_FRONTEND_MINOR_VERSION ${2:-32}"
}
known='compute_80 compute_90 compute_100 compute_120'
toolkit() { # directory, version, directory of libraries below it
    nvcc "$1" "$known"
    runtime_headers "$1/include" "$2"
    file "$1/include/cublasLt.h"
    file "$1/include/nvrtc.h"
    local name
    for name in cublasLt cudart nvrtc; do file "$1/${3-lib64}/lib$name.so"; done
}
# An interpreter whose packages are in a directory.
python() { program "$tree/python" "echo $1"; }

# ---------------------------------------------------------------------------------------------------

# What the script finds: nothing of this machine, but what the test lays out.
find_cuda() { # VARIABLE=VALUE...
    rm -f "$tree/mk"
    env -i PATH="$tree/bin:/usr/bin:/bin" HOME="$tree" SYSTEM_ROOT="$tree" PYTHON="$tree/python" MPI=yes "$@" \
        scripts/find_cuda.sh "$tree/mk" >"$tree/out" 2>"$tree/err"
}
clear_tree() {
    rm -rf "${tree:?}"/*
    mkdir -p "$tree/bin"
    python "$tree/nothing"
}
value() { sed -n "s/^$1 := *//p" "$tree/mk" 2>/dev/null; }
has() { # variable, words that its value has...
    local name=$1 word text
    text=" $(value "$name") "
    shift
    for word; do [[ $text == *" $word "* ]] || {
        why="$name has no '$word': $text; $(cat "$tree/err")"
        return 1
    }; done
}
empty() {
    local name
    for name; do [ -z "$(value "$name")" ] || {
        why="$name is $(value "$name")"
        return 1
    }; done
}
notes() { # text that a line for the user has...
    local text
    for text; do grep -qF -- "$text" "$tree/mk" || {
        why="no '$text' in: $(grep info "$tree/mk")"
        return 1
    }; done
}
succeeds() { find_cuda "$@" || {
    why="status $?: $(cat "$tree/err")"
    return 1
}; }
fails() { # number of lines, texts in them...; the variables are in $with
    local lines=$1 text
    shift
    ! find_cuda ${with-} || {
        why="it did not fail: $(cat "$tree/mk")"
        return 1
    }
    [ "$(wc -l <"$tree/err")" -eq "$lines" ] || {
        why="not $lines lines: $(cat "$tree/err")"
        return 1
    }
    for text; do grep -qF -- "$text" "$tree/err" || {
        why="no '$text' in: $(cat "$tree/err")"
        return 1
    }; done
    [ ! -e "$tree/mk" ] || {
        why="it wrote assignments although it failed"
        return 1
    }
}

a_toolkit_with_everything_in_it() {
    local home=$tree/usr/local/cuda
    toolkit "$home" 13000
    cudnn_headers "$home/include"
    frontend "$home/include"
    file "$home/include/nccl.h"
    file "$home/lib64/libcudnn.so"
    file "$home/lib64/libnccl.so"
    succeeds && has CUDA_HOME "$home" && has NVCC "$home/bin/nvcc" && has CUDA_LIBS "$home/lib64/libcublasLt.so" "$home/lib64/libcudart.so" "-Wl,-rpath,$home/lib64" \
        && has CUDNN_CFLAGS -DUSE_CUDNN "$home/include" && has CUDNN_LIBS "$home/lib64/libcudnn.so" "$home/lib64/libnvrtc.so" \
        && has NCCL_CFLAGS -DUSE_NCCL && has NCCL_LIBS "$home/lib64/libnccl.so" && has CUDA_ARCHS 80 90 100 120 && notes 'frontend 1.32' 'no GPU here'
}
the_newest_toolkit_where_there_is_no_link() {
    toolkit "$tree/usr/local/cuda-12.4" 12040
    toolkit "$tree/usr/local/cuda-12.10" 12100
    toolkit "$tree/usr/local/cuda-9" 9000
    succeeds && has CUDA_HOME "$tree/usr/local/cuda-12.10"
}
a_toolkit_named_by_the_user_goes_first() {
    toolkit "$tree/usr/local/cuda" 13000
    toolkit "$tree/mine" 12080 lib
    succeeds CUDA="$tree/mine" && has CUDA_HOME "$tree/mine" && has CUDA_MAJOR 12 && has CUDA_LIBS "$tree/mine/lib/libcudart.so"
}
debian_has_headers_and_libraries_in_system_directories() {
    local lib=$tree/usr/lib/$gcc_machine-linux-gnu
    toolkit "$tree/usr" 12040 "lib/$gcc_machine-linux-gnu"
    cudnn_headers "$tree/usr/include/$gcc_machine-linux-gnu"
    frontend "$tree/usr/include"
    file "$tree/usr/include/nccl.h"
    file "$lib/libcudnn.so.9"
    file "$lib/libnccl.so"
    # neither -isystem /usr/include, which breaks C++'s headers, nor an rpath to the system
    PATH=$tree/usr/bin:$PATH succeeds NVCC="$tree/usr/bin/nvcc" && has CUDA_LIBS "$lib/libcudart.so" && has CUDNN_LIBS "$lib/libcudnn.so.9" && has NCCL_LIBS "$lib/libnccl.so" \
        && ! grep -q 'isystem\|rpath' "$tree/mk" || {
        why=${why:-"flags for system directories: $(cat "$tree/mk")"}
        return 1
    }
}
conda_has_its_libraries_under_targets() {
    local env=$tree/conda
    nvcc "$env" "$known"
    runtime_headers "$env/targets/$gcc_machine-linux/include" 12080
    file "$env/targets/$gcc_machine-linux/include/cublasLt.h"
    file "$env/targets/$gcc_machine-linux/lib/libcublasLt.so"
    file "$env/targets/$gcc_machine-linux/lib/libcudart.so"
    succeeds CUDA="$env" && has CUDA_CFLAGS "$env/targets/$gcc_machine-linux/include" && has CUDA_LIBS "$env/targets/$gcc_machine-linux/lib/libcublasLt.so"
}
pythons_packages_for_cuda_13_are_a_toolkit() {
    local packages=$tree/site-packages home=$tree/site-packages/nvidia/cu13
    python "$packages"
    nvcc "$home" "$known"
    runtime_headers "$home/include" 13000
    file "$home/include/cublasLt.h"
    file "$home/include/nvrtc.h"
    for name in cublasLt cudart nvrtc; do file "$home/lib/lib$name.so.13"; done
    cudnn_headers "$packages/nvidia/cudnn/include"
    file "$packages/nvidia/cudnn/lib/libcudnn.so.9"
    file "$packages/nvidia/nccl/include/nccl.h"
    file "$packages/nvidia/nccl/lib/libnccl.so.2"
    frontend "$packages/include"
    file "$packages/nvidia_cudnn_cu13-9.19.0.dist-info/METADATA"
    file "$packages/nvidia_nccl_cu13-2.28.9.dist-info/METADATA"
    file "$tree/usr/include/nccl.h" # the system's own are for another toolkit
    file "$tree/usr/lib/libnccl.so"
    succeeds && cp "$tree/mk" "$tree/first" && python "$tree/nothing" && succeeds CUDA="$home" && cmp -s "$tree/mk" "$tree/first" \
        || {
            why=${why:-"named as CUDA=DIRECTORY they are another toolkit: $(diff "$tree/first" "$tree/mk")"}
            return 1
        }
    has CUDA_LIBS "$home/lib/libcublasLt.so.13" "-Wl,-rpath,$home/lib" && has CUDNN_LIBS "$packages/nvidia/cudnn/lib/libcudnn.so.9" "$home/lib/libnvrtc.so.13" \
        && has CUDNN_CFLAGS "$packages/include" "$packages/nvidia/cudnn/include" && has NCCL_LIBS "$packages/nvidia/nccl/lib/libnccl.so.2" "-Wl,-rpath,$packages/nvidia/nccl/lib"
}
pythons_packages_fill_up_a_bare_toolkit_but_not_with_another_cuda() {
    local packages=$tree/site-packages
    python "$packages"
    nvcc "$tree/usr/local/cuda" "$known"
    runtime_headers "$tree/usr/local/cuda/include" 12080
    for name in cublas:cublasLt cuda_runtime:cudart cuda_nvrtc:nvrtc; do file "$packages/nvidia/${name%:*}/lib/lib${name#*:}.so.12"; done
    file "$packages/nvidia/cublas/include/cublasLt.h"
    file "$packages/nvidia/cuda_nvrtc/include/nvrtc.h"
    frontend "$packages/include"
    cudnn_headers "$packages/nvidia/cudnn/include"
    file "$packages/nvidia/cudnn/lib/libcudnn.so.9"
    file "$packages/nvidia_cudnn_cu12-9.8.0.dist-info/METADATA"
    file "$packages/nvidia/nccl/include/nccl.h"
    file "$packages/nvidia/nccl/lib/libnccl.so.2"
    file "$packages/nvidia_nccl_cu13-2.28.9.dist-info/METADATA"
    succeeds && has CUDA_LIBS "$packages/nvidia/cublas/lib/libcublasLt.so.12" && has CUDNN_LIBS "$packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12" && empty NCCL_LIBS NCCL_CFLAGS \
        && notes 'libnccl.so.2 is not for CUDA 12' nvidia-nccl-cu12
}
a_directory_of_dependencies_goes_before_the_system() {
    toolkit "$tree/usr/local/cuda" 13000
    cudnn_headers "$tree/deps/include"
    frontend "$tree/deps/include"
    file "$tree/deps/lib/libcudnn.so.9"
    cudnn_headers "$tree/usr/include"
    file "$tree/usr/lib/libcudnn.so"
    succeeds DEPS="$tree/deps" && has CUDNN_LIBS "$tree/deps/lib/libcudnn.so.9" "-Wl,-rpath,$tree/deps/lib" && has CUDNN_CFLAGS "$tree/deps/include"
}
the_newest_of_several_versions_of_a_library() {
    toolkit "$tree/usr/local/cuda" 13000
    file "$tree/nccl/include/nccl.h"
    file "$tree/nccl/lib/libnccl.so.2"
    file "$tree/nccl/lib/libnccl.so.2.9.1"
    file "$tree/nccl/lib/libnccl.so.2.28.9"
    succeeds NCCL="$tree/nccl" && has NCCL_LIBS "$tree/nccl/lib/libnccl.so.2.28.9"
}
what_the_user_names_is_there_or_nowhere() {
    a_toolkit_with_everything_in_it && succeeds NCCL="$tree/none" CUDNN="$tree/none" && empty NCCL_CFLAGS CUDNN_CFLAGS && notes NCCL=DIRECTORY CUDNN=DIRECTORY
}
parts_can_be_left_out() {
    a_toolkit_with_everything_in_it && succeeds NCCL=no && empty NCCL_CFLAGS && has CUDNN_CFLAGS -DUSE_CUDNN && notes 'without NCCL, as asked for' \
        && succeeds CUDNN=no && empty CUDNN_CFLAGS CUDNN_LIBS && notes 'without cuDNN, as asked for' && succeeds MPI=no && notes 'OpenMPI is not found'
}
without_its_parts_cudnn_is_left_out_and_all_of_them_are_named() {
    toolkit "$tree/usr/local/cuda" 13000
    rm "$tree/usr/local/cuda/lib64/libnvrtc.so"
    succeeds && empty CUDNN_CFLAGS CUDNN_LIBS NCCL_LIBS && notes nvidia-cudnn-cu13 nvidia-cudnn-frontend nvidia-cuda-nvrtc nvidia-nccl-cu13 \
        && [ "$(grep -c 'attention by' "$tree/mk")" -eq 1 ] || {
        why=${why:-"not one line: $(cat "$tree/mk")"}
        return 1
    }
}
an_old_cudnn_is_refused() {
    a_toolkit_with_everything_in_it
    cudnn_headers "$tree/usr/local/cuda/include" 8
    succeeds && empty CUDNN_CFLAGS && notes 'older than cuDNN 9'
}
an_old_frontend_is_refused_and_a_newer_one_behind_it_is_taken() {
    local home=$tree/usr/local/cuda
    a_toolkit_with_everything_in_it
    frontend "$home/include" 15
    succeeds && empty CUDNN_CFLAGS && notes 'frontend is 1.15, and 1.16 or newer is needed' --with-cuda-python || return 1
    frontend "$home/include" 16
    succeeds && has CUDNN_CFLAGS "$home/include" && notes 'frontend 1.16' || return 1
    frontend "$home/include" 14
    frontend "$tree/site-packages/include" 32
    python "$tree/site-packages"
    succeeds && has CUDNN_CFLAGS "$tree/site-packages/include" && notes 'frontend 1.32'
}
what_is_missing_is_said_all_at_once() {
    fails 1 'no nvcc found' 'CUDA=DIRECTORY' && with="CUDA=$tree/none" fails 1 "$tree/none has no bin/nvcc" || return 1
    nvcc "$tree/usr/local/cuda" "$known"
    runtime_headers "$tree/usr/local/cuda/include" 13000
    with="ARCHS=77" fails 4 libcublasLt libcudart cublasLt.h sm_77
}
an_old_toolkit_is_refused() {
    toolkit "$tree/usr/local/cuda" 11080
    fails 1 '11.8: 12 or newer'
}
architectures_are_the_gpus_or_the_users() {
    toolkit "$tree/usr/local/cuda" 13000
    program "$tree/bin/nvidia-smi" "printf '9.0\n9.0\n8.0\n12.0\n'"
    succeeds && has CUDA_ARCHS 80 90 120 && [ "$(value CUDA_ARCHS)" = "80 90 120" ] || {
        why=${why:-"CUDA_ARCHS is $(value CUDA_ARCHS)"}
        return 1
    }
    succeeds ARCHS="9.0 sm_120" && [ "$(value CUDA_ARCHS)" = "90 120" ] || {
        why=${why:-"CUDA_ARCHS is $(value CUDA_ARCHS)"}
        return 1
    }
    program "$tree/bin/nvidia-smi" "echo \"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\"; exit 9"
    succeeds && has CUDA_ARCHS 80 90 100 120 || return 1
    with="ARCHS=hopper" fails 1 "'hopper' is not an architecture" || return 1
    nvcc "$tree/usr/local/cuda" 'compute_80 compute_90'
    succeeds && [ "$(value CUDA_ARCHS)" = "80 90" ] && notes 'sm_80 90' || {
        why=${why:-"CUDA_ARCHS is $(value CUDA_ARCHS)"}
        return 1
    }
}
the_file_is_written_again_only_when_something_changed() {
    toolkit "$tree/usr/local/cuda" 13000
    find_cuda
    touch -d '2020-01-01' "$tree/mk"
    env -i PATH="$tree/bin:/usr/bin:/bin" SYSTEM_ROOT="$tree" PYTHON="$tree/python" MPI=yes scripts/find_cuda.sh "$tree/mk"
    [ "$(date -r "$tree/mk" +%Y)" = 2020 ] || {
        why='written although nothing changed'
        return 1
    }
    env -i PATH="$tree/bin:/usr/bin:/bin" SYSTEM_ROOT="$tree" PYTHON="$tree/python" MPI=yes ARCHS=90 scripts/find_cuda.sh "$tree/mk"
    [ "$(date -r "$tree/mk" +%Y)" != 2020 ] || {
        why='not written although ARCHS changed'
        return 1
    }
}

# The Makefile, where pkg-config knows nothing and the compiler has no such headers.
small_libraries() { # make's arguments...
    program "$tree/bin/pkg-config" 'exit 1'
    program "$tree/bin/cc" "case \"\$*\" in *--version*) echo cc;; *-E*) ! grep -q 'cblas\|cJSON\|xxhash\|dnnl';; *) exit 1;; esac"
    program "$tree/bin/mpicc" 'exit 1'
    env PATH="$tree/bin:/usr/bin:/bin" make -n BUILD="$tree/build" CC="$tree/bin/cc" "$@" >"$tree/out" 2>"$tree/err"
}
make_names_all_small_libraries_that_are_missing() {
    ! small_libraries train_diffv2 || {
        why='it did not fail'
        return 1
    }
    grep -q 'missing: OpenBLAS cJSON xxHash; scripts/install_deps.sh.*DEPS=' "$tree/err" || {
        why=$(cat "$tree/err")
        return 1
    }
}
make_finds_small_libraries_in_a_directory_of_dependencies() {
    file "$tree/deps/include/cblas.h"
    file "$tree/deps/include/cjson/cJSON.h"
    file "$tree/deps/include/xxhash.h"
    file "$tree/deps/lib/libopenblas.so.0"
    file "$tree/deps/lib/libcjson.so"
    ! small_libraries DEPS="$tree/deps" train_diffv2 && grep -q 'missing: xxHash;' "$tree/err" || {
        why="$(cat "$tree/err")"
        return 1
    }
    file "$tree/deps/lib/libxxhash.so"
    small_libraries DEPS="$tree/deps" train_diffv2 || {
        why="$(cat "$tree/err")"
        return 1
    }
    local word
    for word in "-isystem $tree/deps/include" "$tree/deps/lib/libopenblas.so.0" "$tree/deps/lib/libcjson.so" "$tree/deps/lib/libxxhash.so" "-rpath,$tree/deps/lib"; do
        grep -qF -- "$word" "$tree/out" || {
            why="no '$word' in: $(cat "$tree/out")"
            return 1
        }
    done
    ! grep -q 'DONEDNN\|DUSE_MPI' "$tree/out" || {
        why="optional libraries that are not there: $(cat "$tree/out")"
        return 1
    }
}

a_library_that_only_the_compiler_knows_is_taken_by_its_name() {
    program "$tree/bin/pkg-config" 'exit 1'
    program "$tree/bin/cc" 'exit 0'
    env PATH="$tree/bin:/usr/bin:/bin" make -n BUILD="$tree/build" CC="$tree/bin/cc" ONEDNN=no train_diffv2 >"$tree/out" 2>"$tree/err" || {
        why="$(cat "$tree/err")"
        return 1
    }
    grep -q -- '-lopenblas -lcjson -lxxhash' "$tree/out" || {
        why="$(cat "$tree/out")"
        return 1
    }
}
openmpi_is_found_by_its_wrapper_too() {
    program "$tree/bin/pkg-config" 'exit 1'
    program "$tree/bin/cc" 'exit 0'
    program "$tree/bin/mpicc" "case \$1 in --showme:compile) echo -I$tree/mpi/include;; --showme:link) echo -L$tree/mpi/lib -lmpi;; *) exit 1;; esac"
    env PATH="$tree/bin:/usr/bin:/bin" make -n BUILD="$tree/build" CC="$tree/bin/cc" ONEDNN=no train_diffv2 >"$tree/out" 2>"$tree/err" || {
        why="$(cat "$tree/err")"
        return 1
    }
    grep -q -- "-DUSE_MPI -isystem $tree/mpi/include" "$tree/out" && grep -q -- "-L$tree/mpi/lib -lmpi" "$tree/out" || {
        why="$(cat "$tree/out")"
        return 1
    }
}

# What make compiles again. The compiler writes the names of the files that it makes to $tree/log, and as the dependencies
# of an object a header of a library.
fake_compiler() { # directory of programs, version
    program "$1/cc" "out= old= tracks=no
case \" \$* \" in *' -dM '*) echo '#define VERSION $2'; exit;; *' -E '*) exit;; esac
for word; do [ \"\$old\" != -o ] || out=\$word; [ \"\$word\" != -MD ] || tracks=yes; old=\$word; done
[ -n \"\$out\" ] || exit 0
echo \"\${out##*/}\" >>$tree/log
echo \"\$0 \$*\" >\"\$out\"
[ \$tracks = no ] || echo \"\$out: $tree/library.h\" >\"\${out%.o}.d\""
}
fake_nvcc() { # directory, version
    program "$1/bin/nvcc" "case \"\$*\" in --version) echo $2;; --list-gpu-arch) echo '$known' | tr ' ' '\n';; *) exec $tree/fake/cc \"\$@\";; esac"
}
# A directory with this repository's files, without its builds and without git.
source_tree() {
    mkdir -p "$tree/source"
    ln -s "$PWD"/{Makefile,*.c,*.cu,llmc,data,dev,scripts,tests} "$tree/source/"
    program "$tree/bin/pkg-config" 'exit 1'
    program "$tree/bin/mpicc" 'exit 1'
    fake_compiler "$tree/bin" 1
    file "$tree/library.h"
}
make_in_tree() { # make's arguments...
    env -i PATH="$tree/bin:/usr/bin:/bin" HOME="$tree" SYSTEM_ROOT="$tree" PYTHON="$tree/python" \
        make -C "$tree/source" CC="$tree/bin/cc" CXX="$tree/bin/cc" ONEDNN=no REVISION=one "$@" >"$tree/out" 2>&1 \
        || {
            why="make $*: $(cat "$tree/out")"
            return 1
        }
}
compiled() { # names of the files that make must make, in order of the alphabet; make's arguments...
    local expected=$1 made
    shift
    : >"$tree/log"
    # the file system's clock may not have ticked since the last file
    sleep 0.02
    make_in_tree "$@" || return 1
    made=$(sort "$tree/log" | tr '\n' ' ')
    [ "$made" = "$expected${expected:+ }" ] || {
        why="make $*: it makes '$made', not '$expected'"
        return 1
    }
}
names() { printf '%s\n' "$@" | sort | paste -sd ' '; }
make_compiles_again_what_a_change_concerns_and_nothing_when_nothing_changed() {
    source_tree
    local all='revision.o train_diffv2 train_diffv2.o'
    compiled "$all" train_diffv2 && compiled '' train_diffv2 || return 1
    # what a test script does that installs OpenMPI after the first build
    program "$tree/bin/mpicc" "case \$1 in --showme:compile) echo -I$tree/mpi;; --showme:link) echo -lmpi;; *) exit 1;; esac"
    compiled "$all" train_diffv2 && grep -q -- '-DUSE_MPI' "$tree/source/build/train_diffv2.o" && compiled '' train_diffv2 \
        || {
            why=${why:-"compiled without -DUSE_MPI"}
            return 1
        }
    compiled "$all" MPI=no train_diffv2 && compiled "$all" train_diffv2 && compiled "$all" ONEDNN=yes train_diffv2 \
        && compiled "$all" OPT=-O1 train_diffv2 && compiled "$all" REAL=double train_diffv2 && compiled '' REAL=double train_diffv2 \
        && compiled "$all" SANITIZE=address train_diffv2 && compiled "$all" STRICT=no train_diffv2 && compiled "$all" LDFLAGS=-s train_diffv2 \
        && compiled "$all" ARCH=-mtune=generic train_diffv2 && compiled "$all" train_diffv2 || return 1
    fake_compiler "$tree/bin" 2
    compiled "$all" train_diffv2 && touch "$tree/library.h" && compiled 'train_diffv2 train_diffv2.o' train_diffv2 && compiled '' train_diffv2
}
a_commit_compiles_its_name_alone() {
    source_tree
    compiled 'revision.o train_diffv2 train_diffv2.o' train_diffv2 && compiled 'revision.o train_diffv2' train_diffv2 REVISION=two \
        && compiled '' train_diffv2 REVISION=two && grep -q '"two"' "$tree/source/build/revision.c" || {
        why=${why:-"not the revision: $(cat "$tree/source/build/revision.c")"}
        return 1
    }
}
the_copies_of_programs_are_those_of_the_build_that_was_asked_for() {
    source_tree
    local all='revision.o train_diffv2 train_diffv2.o'
    compiled "$all" train_diffv2 && compiled "$all" BUILD=build/fp64 REAL=double train_diffv2 && grep -q build/fp64 "$tree/source/train_diffv2" \
        && compiled '' train_diffv2 && ! grep -q build/fp64 "$tree/source/train_diffv2" || {
        why=${why:-"the copy is of another build"}
        return 1
    }
}
make_compiles_cuda_again_after_a_change_of_toolkit_architecture_precision_or_library() {
    source_tree
    local home=$tree/usr/local/cuda all='revision.o train_diffv2.cu.o train_diffv2cu'
    toolkit "$home" 13000
    fake_compiler "$tree/fake" nvcc
    fake_nvcc "$home" 13.0
    compiled "$all" train_diffv2cu && compiled '' train_diffv2cu && compiled "$all" ARCHS=90 train_diffv2cu && compiled '' ARCHS=90 train_diffv2cu \
        && compiled "$all" ARCHS=90 PRECISION=fp32 train_diffv2cu && compiled '' ARCHS=90 train_diffv2cu && ! grep -q cuda_fp32 "$tree/source/train_diffv2cu" \
        && compiled "$all" ARCHS=90 STRICT=no train_diffv2cu || {
        why=${why:-"the copy is of another precision"}
        return 1
    }
    compiled "$all" train_diffv2cu && fake_nvcc "$home" 13.1 && compiled "$all" train_diffv2cu || return 1
    cudnn_headers "$home/include"
    frontend "$home/include"
    file "$home/lib64/libcudnn.so"
    compiled "attention_cudnn.o $all" train_diffv2cu && compiled '' train_diffv2cu || return 1
    touch "$tree/library.h"
    compiled 'attention_cudnn.o train_diffv2.cu.o train_diffv2cu' train_diffv2cu && compiled '' train_diffv2cu
}
# The flags of OpenBLAS 0.3.21 (Debian 12), of 0.3.26 and newer with OpenMP (Ubuntu 24.04, Debian 13), and of an OpenMPI whose
# programs have threads: nvcc refuses -fopenmp and -pthread.
nvcc_gets_directories_and_macros_and_its_host_compiler_all_other_flags() {
    source_tree
    local home=$tree/usr/local/cuda packages=$tree/site-packages cflags object=$tree/source/build/cuda_bf16/train_diffv2.cu.o
    python "$packages"
    nvcc "$home" "$known"
    runtime_headers "$home/include" 13000
    file "$home/lib64/libcudart.so"
    file "$packages/nvidia/cublas/include/cublasLt.h"
    file "$packages/nvidia/cublas/lib/libcublasLt.so.13"
    fake_compiler "$tree/fake" nvcc
    fake_nvcc "$home" 13.0
    for cflags in '-I/usr/include/openblas-openmp' '-I/usr/include/openblas-openmp -fopenmp' '-I/usr/include/mpi -pthread -DUSE_THAT -UTHIS'; do
        program "$tree/bin/pkg-config" "case \"\$*\" in '--exists openblas') exit;; '--cflags openblas') echo '$cflags';; '--libs openblas') echo -lopenblas;; *) exit 1;; esac"
        make_in_tree ARCHS='80 90' train_diffv2cu || return 1
        for word in $cflags; do
            case $word in
            -f* | -p*) grep -q -- " -Xcompiler $word " "$object" && ! grep -q -- "[^r] $word " "$object" ;;
            *) grep -q -- "[^r] $word " "$object" ;;
            esac || {
                why="$cflags: nvcc gets $(cat "$object")"
                return 1
            }
        done
    done
    grep -q -- "-isystem $packages/nvidia/cublas/include " "$object" || {
        why="nvcc does not find cuBLAS's headers: $(cat "$object")"
        return 1
    }
    grep -q -- 'arch=compute_80,code=sm_80.*arch=compute_90,code=sm_90.*arch=compute_90,code=compute_90' "$object" \
        && ! grep -q -- 'code=compute_80' "$object" || {
        why="no PTX of the newest architecture alone: $(cat "$object")"
        return 1
    }
}
make_compiles_cuda_on_the_cpu_again_after_a_change() {
    source_tree
    local all layer program=build/oncpu/test_layer
    layer=$(names $(cd dev/cuda_on_cpu && printf '%s\n' *.cpp | sed 's/cpp$/o/') test_layer test_layer.cu.o)
    all=$(names $layer revision.o)
    compiled "$all" "$program" && compiled '' "$program" && compiled "$layer" PRECISION=fp32 "$program" && compiled "$layer" UCONTEXT=yes "$program" \
        && compiled '' UCONTEXT=yes "$program" && compiled "$all" SANITIZE=address "$program"
}

# In PTX, where nvcc decides it: of an index that it does not see to be a multiple, it makes several narrow stores.
kernels_of_whole_packs_store_16_bytes_at_a_time() {
    local nvcc=${NVCC:-${CUDA:-/usr/local/cuda}/bin/nvcc} name kernels
    [ -x "$nvcc" ] || {
        why="there is no $nvcc"
        return 77
    }
    kernels='adamw residual scale fill swiglu_forward swiglu_backward rope embedding_forward'
    kernels+=' diff_combine_forward gate_forward'
    file "$tree/kernels.cu" "#define DEVICE_OPS
#define PRECISION_BF16
#include \"llmc/base/common.h\"
#include \"llmc/ops/all_ops.h\"
extern const void *const kernels[] = {$(printf '(const void *)%s_kernel<PACK>, ' $kernels)};"
    "$nvcc" -std=c++17 -O3 -arch=sm_90 -I. -ptx -o "$tree/ptx" "$tree/kernels.cu" 2>"$tree/err" \
        || {
            why=$(tail -n 3 "$tree/err")
            return 1
        }
    for name in $kernels; do
        awk -v kernel="${name}_kernelILi8E" '/\.entry / { here = index($0, kernel) }
            here && /st\.global/ { stores++; narrow += !/st\.global\.v4\.(u|b|f)32/ }
            END { exit stores == 0 || narrow > 0 }' "$tree/ptx" \
            || {
                why="${name}_kernel stores less at a time, or nothing"
                return 1
            }
    done
}

# What scripts install of Python: every package in its version, with hashes, as wheels, which run nothing.
every_python_package_is_pinned_with_hashes() {
    local file name
    for file in $(find data dev scripts -name requirements.txt); do
        grep -qx -- --require-hashes "$file" && grep -qx -- '--only-binary :all:' "$file" || {
            why="$file admits packages without hashes, or code that builds them"
            return 1
        }
        awk '/^#/ || /^--/ { next }
            /^[a-z]/ { if (open || $1 !~ /^[a-z0-9_.-]+==[0-9][^ ]*$/ || !/\\$/) { print; bad = 1 } open = 1; next }
            /^    --hash=sha256:[0-9a-f]+( \\)?$/ && length($1) == 78 { open = /\\$/; next }
            { print; bad = 1 }
            END { exit bad || open }' "$file" >"$tree/unpinned" || {
            why="$file: not pinned: $(head -n 3 "$tree/unpinned")"
            return 1
        }
        for name in $(sed -n 's/^\([a-zA-Z][a-zA-Z0-9_.-]*\).*/\1/p' "${file%txt}in" | tr 'A-Z_' 'a-z-'); do
            grep -q "^$name==" "$file" || {
                why="$file has no $name: run scripts/pin_packages.sh"
                return 1
            }
        done
    done
    [ -n "${name-}" ] || {
        why="no requirements.txt is looked at"
        return 1
    }
    # every call of pip asks for them; find_cuda.sh and pin_packages.sh only advise the user
    grep -rnE --include='*.sh' --include='*.py' --exclude=find_cuda.sh --exclude=pin_packages.sh --exclude=build_test.sh \
        -e '-m"?,? "?pip"?,? +"?(install|download)' data dev scripts >"$tree/calls"
    [ "$(wc -l <"$tree/calls")" -ge 4 ] || {
        why="calls of pip are not found: $(cat "$tree/calls")"
        return 1
    }
    while IFS=: read -r file name _; do
        sed -n "$name,$((name + 1))p" "$file" | grep -q -- --require-hashes || {
            why="$file:$name calls pip without --require-hashes"
            return 1
        }
    done <"$tree/calls"
}
packages_for_cuda_are_installed_as_they_are_pinned() {
    program "$tree/python" "[ \"\$1\" = -m ] || exit 0
echo \"\$*\" >$tree/call
for word; do last=\$word; done
cp \"\$last\" $tree/pins
exit 1"
    ! env -i PATH=/usr/bin:/bin HOME="$tree" SYSTEM_ROOT="$tree" PYTHON="$tree/python" scripts/install_deps.sh --with-cuda-python >"$tree/out" 2>&1 || {
        why="it did not fail"
        return 1
    }
    grep -q -- '--require-hashes --only-binary :all:' "$tree/call" || {
        why="pip is called without hashes: $(cat "$tree/call" "$tree/out")"
        return 1
    }
    local name
    for name in nvidia-cuda-nvcc nvidia-cudnn-cu13 nvidia-cudnn-frontend nvidia-nccl-cu13; do
        grep -A 1 "^$name==[0-9]" "$tree/pins" | grep -q -- '--hash=sha256:' || {
            why="no pinned $name: $(cat "$tree/pins")"
            return 1
        }
    done
}

packages_for_cuda_are_those_that_the_driver_runs() {
    program "$tree/python" "[ \"\$1\" = -m ] || { echo $tree/nothing; exit 0; }
echo called >$tree/call
exit 1"
    smi() { program "$tree/bin/nvidia-smi" "echo '| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   $1   |'"; }
    cuda_python() { # what must be said, whether pip is called
        rm -f "$tree/call"
        ! env -i PATH="$tree/bin:/usr/bin:/bin" HOME="$tree" SYSTEM_ROOT="$tree" PYTHON="$tree/python" scripts/install_deps.sh --with-cuda-python >"$tree/out" 2>&1 || {
            why="it did not fail"
            return 1
        }
        grep -qF -- "$1" "$tree/out" || {
            why="no '$1' in: $(cat "$tree/out")"
            return 1
        }
        [ "$([ -e "$tree/call" ] && echo yes || echo no)" = "$2" ] || {
            why="pip: not $2, $(cat "$tree/out")"
            return 1
        }
    }
    cuda_python 'no driver here (nvidia-smi): what is installed is for CUDA 13' yes || return 1
    smi 'CUDA Version: 12.8'
    cuda_python 'this driver runs CUDA 12.8, and the toolkit is for CUDA 13: update the driver' no || return 1
    smi 'CUDA UMD Version: 13.0'
    cuda_python 'pip install failed' yes || return 1
    toolkit "$tree/usr/local/cuda" 12080
    smi 'CUDA Version: 12.4'
    cuda_python 'nvidia-cudnn-cu12' yes
}

# How scripts/test.sh counts what a program of tests says.
counted() { # passed, failed, skipped that are expected; the program's last line and status
    program "$tree/program" "echo 'ok   one'; echo 'FAIL other'; echo '$4'; exit $5"
    local counts
    counts=$(
        scratch=$tree passed=0 failed=0 skipped=0
        eval "$(sed -n '/^fail_one()/,/^}/p; /^run_script()/,/^}/p' scripts/test.sh)"
        run_script tests "$tree/program" >/dev/null
        echo "$passed $failed $skipped"
    )
    [ "$counts" = "$1 $2 $3" ] || {
        why="'$4' and status $5 are counted as $counts, not $1 $2 $3"
        return 1
    }
}
programs_of_tests_are_believed_if_they_ran_something_and_their_status_agrees() {
    counted 3 0 0 '3 passed, 0 failed' 0 && counted 3 2 0 '3 passed, 2 failed' 1 && counted 3 0 1 '3 passed, 0 failed, 1 skipped' 0 \
        && counted 0 0 2 '0 passed, 0 failed, 2 skipped' 0 && counted 0 1 0 '0 passed, 0 failed' 0 && counted 3 1 0 '3 passed, 0 failed' 1 \
        && counted 3 1 0 '3 passed, 0 failed' 139 && counted 3 2 0 '3 passed, 1 failed' 0 && counted 1 2 0 'Segmentation fault' 139 && counted 1 2 0 '' 0
}

for test in $(declare -F | awk '{ print $3 }'); do
    case "$test" in
    file | program | nvcc | runtime_headers | cudnn_headers | frontend | toolkit | python | find_cuda | clear_tree | value | has | empty | notes | succeeds | fails | small_libraries | fake_compiler | source_tree | make_in_tree | compiled | fake_nvcc | names | counted | smi | cuda_python) continue ;;
    esac
    clear_tree
    why='' with=''
    if "$test"; then
        echo "ok   build: ${test//_/ }"
        passed=$((passed + 1))
    elif [ $? -eq 77 ]; then
        echo "skip build: ${test//_/ }: $why"
        skipped=$((skipped + 1))
    else
        echo "FAIL build: ${test//_/ }: $why"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
