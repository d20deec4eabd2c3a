#!/usr/bin/env bash
# install_test.sh: tests make install and make uninstall, the completions in bash and zsh, and the man page.
# The last line is "N passed, N failed[, N skipped]". Exit status: 0 nothing failed, 1 something failed.
#
# Usage: tests/install_test.sh
# Variables: TRAIN_DIFFV2 (build/train_diffv2), TEXT_TO_SHARDS (build/text_to_shards)
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
no_arguments "$@"
work=$(mktemp -d) || exit 1
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
trainer=$(realpath "${TRAIN_DIFFV2:-build/train_diffv2}")
converter=$(realpath "${TEXT_TO_SHARDS:-build/text_to_shards}")

# A tree with links to the sources and with these programs, which make does not build.
source=$work/source
mkdir -p "$source"
ln -s "$PWD"/{LICENSE,Makefile,*.c,*.cu,llmc,data,dev,scripts,tests} "$source/"
cp "$trainer" "$source/train_diffv2"
cp "$converter" "$source/text_to_shards"
makes() { # arguments of make...
    make -s -C "$source" -o train_diffv2 -o text_to_shards BUILD="$work/build" "$@" >"$work/out" 2>&1
}
destination="$work/a directory"
root=$destination/opt/diff
makes install DESTDIR="$destination" PREFIX=/opt/diff || {
    cat "$work/out"
    echo "FAIL install: make install"
    echo "0 passed, 1 failed"
    exit 1
}
files_of() { (cd "$1" && find . -type f -o -type l | sort); } # directory

# ---------------------------------------------------------------------------------------------------
# make install and make uninstall

test_make_install_builds_the_programs_for_cpus_alone() {
    make -n -C "$source" BUILD="$work/new" install >"$work/out" 2>&1 || fail "$(cat "$work/out")"
    contains "$work/out" new/train_diffv2 new/text_to_shards 'scripts/install.sh install'
    lacks "$work/out" test_diffv2 nvcc new/bench
}
test_programs_scripts_man_page_and_completions_are_installed_without_tests() {
    local file
    for file in bin/{train_diffv2,text_to_shards,diffv2-lab,diffv2-watch,diffv2-export-run,diffv2-prepare} \
        share/man/man1/train_diffv2.1 share/zsh/site-functions/_train_diffv2 \
        share/bash-completion/completions/train_diffv2{,cu} share/diffv2/scripts/plans/smoke.plan \
        share/diffv2/scripts/lab/page.css share/diffv2/{data,scripts/lab,scripts/export_python}/requirements.txt; do
        [ -r "$root/$file" ] || fail "$file is missing"
    done
    cmp "$trainer" "$root/bin/train_diffv2" || fail "another trainer is installed"
    equal "$(find "$root" -name '*test*' -o -name '*cu.1' -o -name '*.pyc' -o -path '*bin/*cu')" ''
    equal "$(find "$destination" ! -type l ! -perm -444)" ''
    equal "$(find "$root/bin" -type f ! -perm 755)" ''
    equal "$(find "$root" -lname '/*')" '' # a link with the path of the installation
}
test_the_gpu_trainer_is_installed_if_it_is_built_and_a_second_installation_replaces_the_first() {
    cp "$trainer" "$source/train_diffv2cu"
    makes install PREFIX="$work/gpu" || fail "$(cat "$work/out")"
    [ -x "$work/gpu/bin/train_diffv2cu" ] && contains "$work/gpu/share/man/man1/train_diffv2cu.1" man1/train_diffv2.1
    touch "$work/gpu/share/diffv2/scripts/of_an_older_version.py"
    rm "$source/train_diffv2cu"
    makes install PREFIX="$work/gpu" || fail "$(cat "$work/out")"
    equal "$(diff <(files_of "$work/gpu") <(files_of "$root"))" ''
}
test_make_uninstall_removes_what_was_installed_and_nothing_else() {
    makes install PREFIX="$work/two" || fail "$(cat "$work/out")"
    echo >"$work/two/bin/other"
    echo >"$work/two/share/man/man1/other.1"
    makes uninstall PREFIX="$work/two" || fail "$(cat "$work/out")"
    equal "$(files_of "$work/two" | paste -sd ' ')" './bin/other ./share/man/man1/other.1'
}
test_a_relative_or_unwritable_directory_is_refused() {
    if makes install PREFIX=relative; then fail "PREFIX=relative is accepted"; fi
    contains "$work/out" "PREFIX 'relative' is relative"
    if makes install PREFIX=/proc/none; then fail "PREFIX=/proc/none is accepted"; fi
    contains "$work/out" '/proc/none: cannot be written'
    [ ! -e "$source/relative" ]
}
test_installed_programs_run_in_another_directory_from_files_that_cannot_be_written() {
    local home=$work/home
    mkdir -p "$home/run"
    cp -a "$destination" "$work/moved" # the files have no path of their installation
    chmod -R a-w "$work/moved"
    cd "$home"
    export PATH="$work/moved/opt/diff/bin:$PATH" HOME="$home" XDG_CACHE_HOME="$home/cache"
    train_diffv2 --version | grep -q '^train_diffv2 [0-9.]*, revision'
    diffv2-lab run smoke --dry-run --data none >out 2>&1 || fail "$(cat out)"
    contains out diff_v2.lr0.002.seed1
    printf '{"format": 1, "options": {"steps": "1"}}\n' >run/run.json
    diffv2-watch --help | grep -q 'live page'
    diffv2-export-hub --help | grep -q CHECKPOINT
    diffv2-export-gguf --help | grep -q CHECKPOINT
    python3 -c "import sys; sys.path.insert(0, '$work/moved/opt/diff/share/diffv2/scripts')
import python_environment as e; print(e.place_of('lab'), e.PROGRAMS)" >out
    equal "$(cat out)" "$home/cache/diffv2/venv-lab $work/moved/opt/diff/bin"
    equal "$(find . -newer run/run.json -type f)" ./out
}

# ---------------------------------------------------------------------------------------------------
# completions

mkdir -p "$work/place/directory one" "$work/place/other"
: >"$work/place/file one"
completes() { # words of a command line, the last one is completed: prints the completions, sorted, in a line
    (
        cd "$work/place"
        source "$root/share/bash-completion/completions/train_diffv2"
        complete -p train_diffv2cu | grep -q ' _train_diffv2 ' || fail "train_diffv2cu has no completion"
        COMP_WORDS=(train_diffv2 "$@")
        COMP_CWORD=$#
        _train_diffv2
        printf '%s\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"} | LC_ALL=C sort | paste -sd ' '
    )
}
test_bash_completes_options_values_files_and_directories() {
    equal "$(completes --att)" --attention
    equal "$(completes --attention diff_v1)" "diff_v1 diff_v1_no_norm"
    equal "$(completes --attention diff_g)" 'diff_grouped_2 diff_grouped_4'
    equal "$(completes --schedule '')" 'constant cosine linear wsd'
    equal "$(completes --schedule =)" 'constant cosine linear wsd'
    equal "$(completes --seed 3 --gemm = b)" bf16
    equal "$(completes --out '')" 'directory one other'
    equal "$(completes --init = di)" 'directory one'
    equal "$(completes --train-data f)" 'file one'
    equal "$(completes --tokenizer '')" 'directory one file one other'
    equal "$(completes --steps '')" ''
    equal "$(completes --resu)" --resume
    equal "$(completes --no-re)" --no-resume
    equal "$(completes --no-la)" ''
}
test_bash_omits_options_that_are_given() {
    equal "$(completes --resume --no-re)" ''
    equal "$(completes --no-resume --resu)" ''
    equal "$(completes --eval --eva)" '--eval-choices --eval-out'
    equal "$(completes --lr = 1 --lr)" ''
}
# The trainer's message on a wrong value says what an option accepts: "one of" for those with values, "no value" for
# flags.
test_completions_have_every_option_of_the_trainer_with_the_values_that_it_accepts() {
    local names name line words=()
    names=$(completes --)
    for name in $names; do
        [[ $name == --no-* ]] || words+=("$name=?")
    done
    [ ${#words[@]} -gt 70 ] || fail "too few options: $names"
    "$trainer" "${words[@]/--help=?/}" >"$work/out" 2>&1 || true
    for name in $names; do
        [[ $name != --no-* && $name != --help ]] || continue
        line=$(grep -E -- "^diffv2: $name( |:)" "$work/out") || continue # a text that accepts ?
        case $line in
        *"not accepted: it must be one of "*)
            line=${line%, or NAME-*} # of presets
            equal "$(completes "$name" '')" \
                "$(tr -d , <<<"${line##*one of }" | tr ' ' '\n' | LC_ALL=C sort | paste -sd ' ')"
            ;;
        *"takes no value"*) contains "$work/out" "$name" && [ -n "$(completes "$name" --)" ] ;;
        *"not accepted"*) equal "$(completes "$name" '')" '' ;;
        esac
    done
    equal "$(grep -c 'not accepted: it must be one of' "$work/out")" \
        "$(grep -c "compgen -W '" "$root/share/bash-completion/completions/train_diffv2")"
}
test_zsh_completes_options_with_descriptions_values_and_directories() {
    command -v zsh >/dev/null || skip "zsh is not installed"
    cat >"$work/types.zsh" <<'Z'
zmodload zsh/zpty
zpty z 'TERM=dumb COLUMNS=120 zsh -f -i'
zpty -w z "PS1=READ''Y; fpath=(${(q)1} \$fpath); autoload -U compinit; compinit -D -u; cd ${(q)2}"
zpty -r z line '*READY*' # the prompt
zpty -w -n z "train_diffv2 $3"$'\t\t'$'\C-U'"echo EN''D"$'\n'
while zpty -r z line; do print -r -- $line; [[ $line == *END* ]] && break; done
Z
    types() { # text: prints what zsh shows when it completes the text
        timeout 60 zsh "$work/types.zsh" "$root/share/zsh/site-functions" "$work/place" "$1" >"$work/out"
    }
    types '--schedule '
    contains "$work/out" constant cosine linear wsd
    types '--out '
    contains "$work/out" other/ directory
    lacks "$work/out" file
    types '--no-q'
    contains "$work/out" --no-qk-norm
    types '--eval'
    contains "$work/out" '--eval-out' 'with --eval: write the results as JSON'
}

# ---------------------------------------------------------------------------------------------------
# the man page

test_the_man_page_has_the_options_of_the_help_and_no_warnings() {
    local page=$root/share/man/man1/train_diffv2.1 checked=no
    if command -v mandoc >/dev/null; then
        checked=yes
        equal "$(mandoc -T lint "$page" 2>&1)" ''
    fi
    if command -v groff >/dev/null; then
        checked=yes
        equal "$(groff -ww -man -Tascii -z "$page" 2>&1)" ''
        # the text of the page, without indentation and hyphens of broken lines, is that of the help
        groff -man -Tascii -P-c -rLL=2000n -rHY=0 "$page" \
            | sed 's/.\x08//g; s/\x1b\[[0-9;]*m//g' | tr -s ' \n' ' ' >"$work/page"
        "$trainer" --help | sed -n '/^model$/,/^Exit/{/^Exit/d;p}' | tr -s ' \n' ' ' >"$work/help"
        grep -qF -- "$(sed 's/ $//' "$work/help")" "$work/page" || fail "the page is not the help: $(cat "$work/page")"
    fi
    [ $checked = yes ] || skip "neither mandoc nor groff is installed"
}
test_help_files_refuses_other_input() {
    if scripts/help_files.py bash <LICENSE >"$work/out" 2>&1; then fail "a license is accepted"; fi
    contains "$work/out" 'stdin is not the help of the trainer'
    local status=0
    scripts/help_files.py fish </dev/null >"$work/out" 2>&1 || status=$?
    equal $status 2
    contains "$work/out" usage
}

for test in $(declare -F | sed -n 's/^declare -f \(test_\)/\1/p'); do run_test "$test" install; done
finish
