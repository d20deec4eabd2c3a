# shell_tests.sh: assertions, and the running and counting of tests, for the test scripts in shell, which source it.
# A test is a function test_NAME, which runs in a subshell with `set -e`: it fails when a command fails.
# shellcheck shell=bash
set -uo pipefail
passed=0 failed=0 skipped=0
reason_file=$(mktemp) || exit 1

fail() { # reason
    echo "$1" >"$reason_file"
    exit 1
}
skip() { # reason
    echo "$1" >"$reason_file"
    exit 77
}
contains() { # file, texts...
    local text
    for text in "${@:2}"; do grep -qF -- "$text" "$1" || fail "no '$text' in: $(cat "$1")"; done
}
lacks() { # file, texts...
    local text
    for text in "${@:2}"; do ! grep -qF -- "$text" "$1" || fail "'$text' in: $(cat "$1")"; done
}
refused() { # command...: it must fail
    if "$@"; then fail "it did not fail: $*"; fi
}
equal() { [ "$1" = "$2" ] || fail "'$1', expected '$2'"; } # value, expected value

no_arguments() { # arguments of a script that takes none...
    [ $# -eq 0 ] || {
        echo "${0##*/}: unexpected argument '$1': it takes none" >&2
        exit 2
    }
}
file() { # path, text
    mkdir -p "$(dirname "$1")"
    printf '%s\n' "${2-}" >"$1"
}
program() { # path, shell commands
    file "$1" "#!/bin/sh
$2"
    chmod +x "$1"
}
report() { # ok, FAIL or skip; sentence
    echo "$1 $2"
    case "$1" in FAIL) failed=$((failed + 1)) ;; skip) skipped=$((skipped + 1)) ;; *) passed=$((passed + 1)) ;; esac
}
tests_in_order() { sed -n 's/^\(test_[a-z0-9_]*\)() {.*/\1/p' "tests/${0##*/}"; } # the test functions of the script
sentence() {                                                                      # test function: its name as words
    local words=${1#test_}
    echo "${words//_/ }"
}
run_test() { # function, subject
    : >"$reason_file"
    (
        set -eE
        trap - EXIT
        trap '[ -s "$reason_file" ] || echo "line $LINENO: $BASH_COMMAND" >"$reason_file"' ERR
        "$1"
    )
    case $? in
    0) report "ok  " "$2: $(sentence "$1")" ;;
    77) report skip "$2: $(sentence "$1"): $(cat "$reason_file")" ;;
    *) report FAIL "$2: $(sentence "$1"): $(cat "$reason_file")" ;;
    esac
}
# Installs packages of Debian unless all programs are there. Ends the script, with one line, if it cannot.
require_programs() { # programs in one word, packages...
    local program log
    # shellcheck disable=SC2086 # words
    for program in $1; do
        command -v "$program" >/dev/null || break
        [ "$program" != "${1##* }" ] || return 0
    done
    log=$(mktemp)
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "${0##*/}: $program is missing: install ${*:2}" >&2
    elif { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${@:2}"; } \
        >"$log" 2>&1; then
        rm -f "$log"
        return 0
    else
        tail -n 3 "$log" >&2
        echo "${0##*/}: apt-get install ${*:2} failed: see its output above" >&2
    fi
    exit 1
}
finish() { # prints the counts; it is a failure if no test ran
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    rm -f "$reason_file"
    echo "$line"
    [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
    exit
}
