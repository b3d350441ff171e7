"""The `moesys` command: finds the subcommand, loads what it needs and no more, and says errors plainly."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import moesys

COMMANDS = {
    "train": ("moesys.train_command", "train a model, or go on with a run"),
    "eval": ("moesys.evaluation", "loss and bits per byte of a run's model on any text"),
    "generate": ("moesys.generation", "let a run's model continue a prompt"),
    "report": ("moesys.report", "one HTML file about one or more runs"),
    "inspect": ("moesys.report.terminal", "the same about one run, in the terminal"),
    "bench": ("moesys.benchmarks", "measure speed on this machine"),
}
"""Subcommand: the module whose `main(arguments) -> exit status` runs it, and its line in `moesys --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (by default this process's) and return its exit status.

    0 is success, 2 a mistake of the user or the surroundings (told in one message on stderr), 130 an interrupt.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments or ["--help"])
    # GNU OpenMP's threads spin for milliseconds when one waits for another; on a machine that does anything else
    # besides, that made a training step ten times slower. It has to be known before PyTorch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        status = importlib.import_module(COMMANDS[options.command][0]).main(options.arguments)
        sys.stdout.flush()  # here and not at exit, where a failure could not be told
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `moesys inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        return 1
    except (ValueError, OSError) as error:
        if options.debug:
            raise
        print(f"moesys {options.command}: {_message(error)}", file=sys.stderr)
        return 2


def _message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror  # a message of ours, without the errno that Python puts before it
    return str(error) or repr(error)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="moesys",
        usage="moesys [--debug] COMMAND ...",
        description=moesys.__doc__,
        epilog="\n".join(["commands:", *lines, "", "`moesys COMMAND --help` says what a command takes."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moesys {moesys.__version__}")
    parser.add_argument("--debug", action="store_true", help="show where in the code an error arises")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
