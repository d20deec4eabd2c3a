#!/usr/bin/env bash
# format.sh: formats all sources: C and CUDA with clang-format, Python with ruff, shell with shfmt. Installs the pinned
# formatters into build/venv-format on its first run.
#
# Usage: dev/format/format.sh [--check]
#   --check   changes nothing; prints unformatted files, unused names in Python, and lines longer than 120 columns; exit
#             status 1 if there are any
set -euo pipefail
cd "$(dirname "$0")/../.."

case "$#:${1-}" in
0:) check=no ;;
1:--check) check=yes ;;
*)
    echo "format.sh: unexpected arguments '$*': usage: dev/format/format.sh [--check]" >&2
    exit 2
    ;;
esac

interpreter=$(python3 scripts/python_environment.py format)
tools=$(dirname "$interpreter")

mapfile -t c < <(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')
mapfile -t python < <(git ls-files '*.py' data/inspect)
mapfile -t shell < <(git ls-files '*.sh' .ci/run)
if [ $check = no ]; then
    "$tools"/clang-format -i "${c[@]}"
    "$tools"/ruff format --quiet "${python[@]}"
    "$tools"/shfmt -w "${shell[@]}"
    exit
fi

failed=0
"$tools"/clang-format --dry-run -Werror "${c[@]}" || failed=1
"$tools"/ruff format --quiet --diff "${python[@]}" || failed=1
"$tools"/ruff check --quiet "${python[@]}" || failed=1
"$tools"/shfmt -d "${shell[@]}" || failed=1
mapfile -t others < <(git ls-files Makefile '*.mk' '*.md' '*.awk' '*.j2' '*.toml')
awk 'length($0) > 120 && !(FILENAME ~ /\.md$/ && /^\|/) {
        printf "%s:%d: %d columns, 120 at most\n", FILENAME, FNR, length($0)
        found = 1
    }
    END { exit found }' "${c[@]}" "${python[@]}" "${shell[@]}" "${others[@]}" || failed=1
[ $failed = 0 ] || echo "format.sh: make format formats the sources; wrap long lines by hand" >&2
exit $failed
