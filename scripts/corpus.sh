#!/usr/bin/env bash
# corpus.sh: writes the default corpus as token shards, corpus/train_*.bin and corpus/val_*.bin. Uses the first of these
# sources that is available:
#   bible    the King James Bible, packages bible-kjv and bible-kjv-text (4 MB of text)
#   gcide    the Collaborative International Dictionary of English, package dict-gcide (32 MB)
#   project  the sources of this program (less than 1 MB: training soon repeats them)
# Tokens are those of a BPE of 2048, or with --bytes the bytes of the text, as in the runs of results/.
# Packages are downloaded with apt-get and unpacked, not installed, which requires no root. Existing shards are kept.
# Exit status: 0 the shards exist, 1 failed, 2 usage.
#
# Usage: scripts/corpus.sh [--force] [--bytes] [SOURCE]
#   --force   replaces existing shards
#   --bytes   without a tokenizer
#   SOURCE    uses only this source
set -euo pipefail
export LC_ALL=C # text is bytes
cd "$(dirname "$0")/.."

fail() {
    echo "corpus.sh: $1" >&2
    exit "${2:-1}"
}

force=no asked= tokens=(--bpe 2048)
sources=(bible gcide project)
for argument in "$@"; do
    case "$argument" in
    --force) force=yes ;;
    --bytes) tokens=() asked+=" $argument" ;;
    gcide | bible | project) sources=("$argument") asked+=" $argument" ;;
    --help | -h)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/corpus.sh
        exit 0
        ;;
    *)
        usage="usage: scripts/corpus.sh [--force] [--bytes] [bible|gcide|project]"
        fail "unexpected argument '$argument': $usage" 2
        ;;
    esac
done

if [ "$force" = no ] && compgen -G 'corpus/train_*.bin' >/dev/null; then
    compgen -G 'corpus/val_*.bin' >/dev/null \
        || fail "corpus has training shards but no validation shards: scripts/corpus.sh --force creates both"
    [ -z "$asked" ] || fail "corpus/ exists: scripts/corpus.sh --force$asked replaces it"
    echo "corpus: $(cat corpus/SOURCE 2>/dev/null || echo 'existing shards'), in corpus/"
    exit 0
fi
[ -x text_to_shards ] || fail "text_to_shards is not built: run make text_to_shards"
mkdir -p corpus
work=$(mktemp -d "$PWD/corpus/work.XXXXXX")
trap 'rm -rf "$work"' EXIT

# Downloads and unpacks packages into $work/root.
unpack_packages() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    local apt=(apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o APT::Sandbox::User=)
    if ! (cd "$work" && "${apt[@]}" download "$@") 2>"$work/apt.err"; then
        # the package lists are missing or old: download private ones, which requires no root
        mkdir -p "$work/lists/partial" "$work/cache"
        apt+=(-o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
        "${apt[@]}" update 2>"$work/apt.err" || return 1
        (cd "$work" && "${apt[@]}" download "$@") 2>>"$work/apt.err" || return 1
    fi
    local deb
    for deb in "$work"/*.deb; do dpkg-deb -x "$deb" "$work/root" || return 1; done
}

# Each make_SOURCE writes documents to $work/text, each after a form feed, and sets `what`; or fails.

# An entry begins at the margin after an empty line, and its text is indented. Removes the front matter, indentation,
# source tags, and braces around cross references.
make_gcide() {
    unpack_packages dict-gcide || return 1
    gzip -dc <"$work/root/usr/share/dictd/gcide.dict.dz" >"$work/raw" || return 1
    local tag=' *\\[(1913 Webster|Webster 1913 Suppl\\.|WordNet [0-9.]+|PJC|Century Dict\\. 1906|AS|RP|RH)'
    awk -v tag="$tag( ?\\\\+ ?[A-Za-z]+)*\\\\]" '
        /^[^ ].*\\.*\\/ && empty { entries = 1; printf "\f" }
        { empty = $0 ~ /^ *$/ }
        !entries { next }
        {
            gsub(tag, "")
            gsub(/[{}]/, "")
            sub(/^ +/, "")
            sub(/ +$/, "")
            if ($0 != "" || empty) print
        }' "$work/raw" >"$work/text" || return 1
    what="the Collaborative International Dictionary of English (package dict-gcide)"
}

make_bible() {
    unpack_packages bible-kjv bible-kjv-text || return 1
    # a verse per line, without its number; a chapter is a document
    "$work/root/usr/bin/bible" -f -p "$work/root/usr/lib" gen1:1-rev22:21 </dev/null >"$work/raw" 2>/dev/null \
        || return 1
    awk '{
            chapter = $1
            sub(/:.*/, "", chapter)
            if (chapter != last) printf "\f"
            last = chapter
            sub(/^[^ ]+ /, "")
            print
        }' "$work/raw" >"$work/text" || return 1
    what="the King James Bible (package bible-kjv-text)"
}

make_project() {
    local file headers=(llmc/*/*.h llmc/ops/*/*.h tests/*.h)
    for file in README.md LICENSE Makefile ./*.c "${headers[@]}" data/*.c scripts/*.sh dev/reference/*.py; do
        [ -f "$file" ] || continue
        printf '\f'
        cat "$file"
    done >"$work/text"
    what="the sources of this program"
}

for source in "${sources[@]}"; do
    case "$source" in gcide | bible) echo "corpus: downloading $source with apt-get" ;; esac
    if "make_$source" && [ "$(wc -c <"$work/text")" -ge 100000 ]; then break; fi
    reason=$(grep -m 1 '^E:' "$work/apt.err" 2>/dev/null || true)
    echo "corpus: $source is not available${reason:+ (${reason#E: }; check the network)}"
    rm -rf "$work"
    mkdir -p "$work"
    source=
done
[ -n "$source" ] \
    || fail "no source is available: create shards from your own text with ./text_to_shards --out corpus FILE..."

bytes=$(wc -c <"$work/text")
# of a small corpus 5%, enough for a validation loss; otherwise the default
[ "$bytes" -ge 10000000 ] || tokens+=(--val-tokens $((bytes / 20)))
./text_to_shards --out corpus "${tokens[@]}" --delimiter '\f' --force - <"$work/text"
what="$what, $((bytes / 100000 / 10)).$((bytes / 100000 % 10)) MB of text"
echo "$what" >corpus/SOURCE
echo "corpus: $what, in corpus/"
