#!/usr/bin/env bash
# update_readme.sh: puts the output of ./train_diffv2 --help between the markers of README.md.
# Exit status: 0 README.md is up to date, 1 failed.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -eq 0 ] || {
    echo "update_readme.sh: unexpected argument '$1': it takes none" >&2
    exit 2
}
make -s train_diffv2
new=$(mktemp README.md.XXXXXX)
trap 'rm -f "$new"' EXIT
help=$(./train_diffv2 --help) awk '
    /<!-- help: end -->/ { inside = 0; ends++ }
    !inside { print }
    /<!-- help: begin/ { inside = 1; print "```"; print ENVIRON["help"]; print "```" }
    END { exit ends != 1 || inside }' README.md >"$new" || {
    echo "update_readme.sh: README.md lacks the markers <!-- help: begin and <!-- help: end -->" >&2
    exit 1
}
chmod 644 "$new"
mv "$new" README.md
