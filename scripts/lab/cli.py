"""cli.py: how the lab's programs say what is wrong: one line on stderr, exit status 2 for a command line, else 1."""

import argparse
import sys


def fail(program, message, status=1):
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(status)


class Once(argparse.Action):
    """Stores a value, and refuses a second one and an empty one, which would be passed over."""

    def __call__(self, parser, namespace, value, option_string=None):
        if option_string and value == "":
            parser.error(f"{option_string} '': the value is empty")
        if option_string and self.dest in parser.given:
            parser.error(f"{option_string} is given more than once")
        parser.given.add(self.dest)
        setattr(namespace, self.dest, value)


class Parser(argparse.ArgumentParser):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.given = set()
        self.register("action", None, Once)

    def error(self, message):
        fail(self.prog, f"{message}; --help lists the options", 2)
