#!/usr/bin/env bash
# install.sh: copies the programs that are built, the scripts that use them, the man page and the completions of bash
# and zsh to PREFIX, or removes them. `make install` and `make uninstall` call it.
#
#   PREFIX/bin                  train_diffv2, text_to_shards, and train_diffv2cu if it is built; links to the scripts
#   PREFIX/share/diffv2         scripts/, data/ and dev/reference/ as in the repository, without tests
#   PREFIX/share/man/man1, PREFIX/share/bash-completion/completions, PREFIX/share/zsh/site-functions
#
# The scripts find the programs and each other relative to their own place, so that PREFIX may be moved. Their Python
# packages are installed by their first user, into ~/.cache/diffv2.
#
# Usage: PREFIX=DIRECTORY DESTDIR=DIRECTORY scripts/install.sh install|uninstall
# Exit status: 0 done, 1 failed, 2 usage.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "install.sh: $1" >&2
    exit "${2:-1}"
}
[[ $# -eq 1 && $1 =~ ^(install|uninstall)$ ]] \
    || fail "usage: PREFIX=... DESTDIR=... scripts/install.sh install|uninstall" 2
prefix=${PREFIX:-/usr/local} programs=(train_diffv2 text_to_shards train_diffv2cu)
[[ $prefix == /* ]] || fail "PREFIX '$prefix' is relative: specify an absolute directory" 2
[[ -z ${DESTDIR-} || $DESTDIR == /* ]] || fail "DESTDIR '$DESTDIR' is relative: specify an absolute directory" 2
root=${DESTDIR-}${prefix%/}
share=$root/share/diffv2 man=$root/share/man/man1
bash=$root/share/bash-completion/completions zsh=$root/share/zsh/site-functions
# name in PREFIX/bin: script
commands=(diffv2-lab:scripts/lab/__main__.py diffv2-watch:scripts/watch.py diffv2-export-run:scripts/export_run.py
    diffv2-prepare:data/prepare.py diffv2-prepare-choices:data/prepare_choices.py
    diffv2-synthetic-tasks:data/synthetic_tasks.py diffv2-average:scripts/average.py
    diffv2-export-hub:dev/reference/export_hub.py diffv2-export-gguf:dev/reference/export_gguf.py)
files=(LICENSE scripts/{python_environment,watch,export_run,average}.py scripts/plot_loss.awk
    scripts/{lab,plans,export_python}/* data/*.py data/{inspect,requirements.txt} data/gpt2_ranks/*
    dev/reference/{export_gguf,export_hub,model_card,modeling_diffv2}.py)

remove() {
    rm -rf "$share"
    local command program
    for command in "${commands[@]}"; do rm -f "$root/bin/${command%%:*}"; done
    for program in "${programs[@]}"; do rm -f "$root/bin/$program" "$bash/$program" "$man/$program.1"; done
    rm -f "$zsh/_train_diffv2"
}
copy() { # files of the repository: to $share, without tests and what Python has compiled
    local file mode
    for file; do
        [[ -f $file && $file != */test_*.py && ! $file =~ /(testing|browser)\.py$ && $file != *.in ]] || continue
        mode=644
        [ ! -x "$file" ] || mode=755
        install -D -m $mode "$file" "$share/$file"
    done
}

mkdir -p "$root" 2>/dev/null && [ -w "$root" ] || fail "$root: cannot be written; use sudo, or PREFIX=DIRECTORY"
if [ "$1" = uninstall ]; then
    remove
    exit
fi
help=$(./train_diffv2 --help) || fail "./train_diffv2 --help failed: run make"
[ -e text_to_shards ] || fail "text_to_shards is missing: run make"
remove
mkdir -p "$root/bin" "$man" "$bash" "$zsh"
for program in "${programs[@]}"; do
    [ ! -x "$program" ] || install -m 755 "$program" "$root/bin/$program"
done
copy "${files[@]}"
for command in "${commands[@]}"; do ln -s "../share/diffv2/${command#*:}" "$root/bin/${command%%:*}"; done

date=$(git log -1 --format=%cs 2>/dev/null || date -r Makefile +%F)
scripts/help_files.py bash <<<"$help" >"$bash/train_diffv2"
scripts/help_files.py zsh <<<"$help" >"$zsh/_train_diffv2"
scripts/help_files.py man "$date" <<<"$help" >"$man/train_diffv2.1"
ln -s train_diffv2 "$bash/train_diffv2cu" # bash-completion looks for the name of the command
[ ! -e "$root/bin/train_diffv2cu" ] || echo '.so man1/train_diffv2.1' >"$man/train_diffv2cu.1"
chmod 644 "$bash/train_diffv2" "$zsh/_train_diffv2" "$man"/train_diffv2*.1
