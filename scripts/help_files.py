#!/usr/bin/env python3
"""Writes the completions of bash and zsh, and the man page, from the text of train_diffv2 --help on stdin.

  ./train_diffv2 --help | scripts/help_files.py bash       for bash-completion's directory, or to be sourced
  ./train_diffv2 --help | scripts/help_files.py zsh        _train_diffv2, for a directory of $fpath
  ./train_diffv2 --help | scripts/help_files.py man DATE   train_diffv2.1

`make install` installs all three. They are not stored in the repository: the table of options prints the help.
Exit status: 0 written, 1 stdin is not that help, 2 usage.
"""

import re
import sys
import textwrap
from dataclasses import dataclass

PROGRAMS = "train_diffv2", "train_diffv2cu"
PLACES = {"DIR": "directory", "FILE": "file", "DATA": "file"}  # what an argument of this name is


@dataclass
class Option:
    section: str
    name: str
    short: str  # -h, or empty
    negatable: bool
    argument: str  # its name in the help; empty: a flag
    text: str

    @property
    def values(self):
        """The names that the option accepts: the text lists them, and then the default, which is one of them."""
        found = re.search(r": ((?:[\w.-]+, )+[\w.-]+) \(default: ([\w.-]+)\)$", self.text)
        values = found[1].split(", ") if found else []
        return values if found and found[2] in values else []

    @property
    def description(self):
        """The text without the values."""
        return self.text.replace(f": {', '.join(self.values)}", "") if self.values else self.text

    @property
    def spellings(self):
        return [f"--{self.name}"] + [f"--no-{self.name}"] * self.negatable + [self.short] * bool(self.short)


def fail(message, status=1):
    print(f"help_files.py: {message}", file=sys.stderr)
    sys.exit(status)


def parse(text):
    """(usage, description, options, exit status) of the help."""
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) < 4 or not paragraphs[0].startswith("Usage: ") or not paragraphs[-1].startswith("Exit status: "):
        fail("stdin is not the help of the trainer: train_diffv2 --help prints it")
    options = []
    for paragraph in paragraphs[2:-1]:
        section, *lines = paragraph.splitlines()
        for line in lines:
            # one space and the argument; a flag, which has none, is followed by more, or is long and has [no-]
            start = re.match(r"  --(\[no-\])?([a-z0-9-]+)(?:, (-\w))?(?(1)|(?: ('[^']*'|\S+))?) +(\S.*)$", line)
            if start:
                options.append(Option(section, start[2], start[3] or "", bool(start[1]), start[4] or "", start[5]))
            elif options and re.match(r" {20,}\S", line):
                options[-1].text += " " + line.strip()
            else:
                fail(f"cannot read the line '{line}' of the help")
    usage = paragraphs[0].removeprefix("Usage: ").split(maxsplit=1)[1]
    return usage, " ".join(paragraphs[1].split()), options, paragraphs[-1].removeprefix("Exit status: ").strip()


# ---- bash

BASH = r"""# Completion of {program} for bash, generated from its --help.
_{program}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} option=${{COMP_WORDS[COMP_CWORD - 1]}} names=' {names} ' word
    if [[ $current == = ]]; then # bash divides --NAME=VALUE into three words
        current=
    elif [[ $option == = ]]; then
        option=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    COMPREPLY=()
    case $option in
{cases}
    {directories})
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -d -- "$current")
        return
        ;;
    {files})
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
        ;;
    {others})
        return # a number or a text
        ;;
    esac
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do # an option may be given only once
        [[ $word == --* ]] || continue
        word=${{word#--}} word=${{word#no-}}
        names=${{names/ --$word / }}
        names=${{names/ --no-$word / }}
    done
    mapfile -t COMPREPLY < <(compgen -W "$names" -- "$current")
}}
complete -F _{program} {programs}
"""


def bash(options):
    def pattern(chosen):
        return " | ".join(f"--{option.name}" for option in chosen)

    def case(option):
        values = " ".join(option.values)
        return f"""    --{option.name})
        mapfile -t COMPREPLY < <(compgen -W '{values}' -- "$current")
        return
        ;;"""

    valued = [option for option in options if option.argument and not option.values]
    kinds = {kind: [o for o in valued if PLACES.get(o.argument) == kind] for kind in ("directory", "file", None)}
    return BASH.format(
        program=PROGRAMS[0],
        programs=" ".join(PROGRAMS),
        names=" ".join(spelling for option in options for spelling in option.spellings),
        cases="\n".join(case(option) for option in options if option.values),
        directories=pattern(kinds["directory"]),
        files=pattern(kinds["file"]),
        others=pattern(kinds[None]),
    )


# ---- zsh


def zsh(options):
    def quoted(text, special):
        text = re.sub(rf"([{special}\\])", r"\\\1", text)
        return text.replace("'", r"'\''")

    lines = []
    for option in options:
        what = quoted(option.description, r"\[\]:")
        if not option.argument:
            for spelling in option.spellings:
                others = " ".join(option.spellings)
                prefix = "off: " if spelling.startswith("--no-") else ""
                lines.append(f"'({others}){spelling}[{quoted(prefix, ':')}{what}]'")
            continue
        action = {"directory": "_files -/", "file": "_files"}.get(PLACES.get(option.argument), " ")
        if option.values:
            action = f"({' '.join(option.values)})"
        lines.append(f"'--{option.name}=[{what}]:{quoted(option.argument, ':')}:{action}'")
    body = " \\\n    ".join(lines)
    return f"#compdef {' '.join(PROGRAMS)}\n# Generated from --help of {PROGRAMS[0]}.\n_arguments \\\n    {body}\n"


# ---- man


def man(usage, description, options, status, date):
    def escaped(text):  # lines of at most 80 characters
        text = text.translate(str.maketrans({"\\": "\\e", "-": "\\-", "'": "\\(aq", "^": "\\(ha", "~": "\\(ti"}))
        text = "\n".join(textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False))
        return re.sub(r"^(?=\.)", r"\\&", text, flags=re.M)

    lines = [
        f'.TH {PROGRAMS[0].upper()} 1 "{date}" "diffv2.c"',
        ".SH NAME",
        escaped(f"{', '.join(PROGRAMS)}").replace("\\-", "-") + " \\- pretraining of the Differential Transformer V2",
        ".SH SYNOPSIS",
    ]
    for program in PROGRAMS:
        lines += [f".B {program}", escaped(usage), *([".br"] if program != PROGRAMS[-1] else [])]
    lines += [".SH DESCRIPTION", escaped(description), ".PP"]
    lines += [
        escaped("train_diffv2 runs on CPUs, train_diffv2cu on NVIDIA GPUs. Both have the same options."),
        ".SH OPTIONS",
    ]
    section = None
    for option in options:
        if option.section != section:
            section = option.section
            lines.append(f".SS {escaped(section)}")
        spelling = f"--{'[no-]' if option.negatable else ''}{option.name}"
        argument = f" \\fI{escaped(option.argument)}\\fR" if option.argument else ""
        short = f", \\fB{escaped(option.short)}\\fR" if option.short else ""
        lines += [".TP", f"\\fB{escaped(spelling)}\\fR{short}{argument}", escaped(option.text)]
    lines.append(".SH EXIT STATUS")
    for part in status.rstrip(".").split("; "):
        number, _, what = part.partition(" ")
        lines += [".TP", f".B {number}", escaped(what)]
    return "\n".join(lines) + "\n"


def main():
    words = sys.argv[1:]
    if words in (["--help"], ["-h"]):
        print(__doc__.rstrip())
        return
    dated = len(words) == 2 and words[0] == "man" and re.fullmatch(r"\d{4}-\d\d-\d\d", words[1])
    if words not in (["bash"], ["zsh"]) and not dated:
        fail(f"unexpected arguments {words}: usage: train_diffv2 --help | help_files.py bash | zsh | man YYYY-MM-DD", 2)
    usage, description, options, status = parse(sys.stdin.read())
    if dated:
        print(man(usage, description, options, status, words[1]), end="")
    else:
        print({"bash": bash, "zsh": zsh}[words[0]](options), end="")


if __name__ == "__main__":
    main()
