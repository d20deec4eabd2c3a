"""cli.py: the lab's command line: its commands, and errors: one line on stderr, exit status 2 for usage, else 1."""

import argparse
import importlib
import sys

COMMANDS = {
    "run": "runs a plan of comparisons, or continues one",
    "report": "writes the report of runs",
    "save": "writes runs into one file that is kept",
    "spike": "finds the cause of a loss spike by experiment",
}


def main():
    command = sys.argv[1] if len(sys.argv) > 1 else "no command"
    if command in COMMANDS:
        return importlib.import_module(f".{command}", __package__).main(sys.argv[2:])
    if command not in ("--help", "-h"):
        fail("lab", f"{command}: the commands are {', '.join(COMMANDS)}; --help describes them", 2)
    print("Usage: python3 scripts/lab COMMAND [OPTION...]\n")
    for name, what in COMMANDS.items():
        print(f"  {name:<11} {what}; python3 scripts/lab {name} --help lists its options")
    return 0


def fail(program, message, status=1):
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(status)


class Once(argparse.Action):
    """Stores a value. Rejects an empty value, and an option that is specified twice."""

    def __call__(self, parser, namespace, value, option_string=None):
        if option_string and value == "":
            parser.error(f"{option_string} '': the value is empty")
        if option_string and self.dest in parser.given:
            parser.error(f"{option_string} is specified more than once")
        parser.given.add(self.dest)
        setattr(namespace, self.dest, value)


class Parser(argparse.ArgumentParser):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.given = set()
        self.register("action", None, Once)

    def error(self, message):
        fail(self.prog, f"{message}; --help lists the options", 2)
