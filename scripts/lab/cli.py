"""cli.py: how the lab's programs say what is wrong: one line on stderr, exit status 2 for a command line, else 1."""
import argparse
import sys


def fail(program, message, status=1):
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(self.prog, f"{message}; --help lists the options", 2)
