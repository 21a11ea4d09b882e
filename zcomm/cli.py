"""The console script ``zcomm``: ``doctor``, ``topo``, ``tune``, and commands of other packages.

A **command** is an object with the members of ``Command``: ``DoctorCommand`` and its like
here, others from the entry-point group ``zcomm.commands``, where the name of the entry point is the
word on the command line. Only the command that was asked for is imported, so a broken one does not
harm the others. Do not assume MPI or torch here: ``zcomm doctor`` is for machines that lack them.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn, Protocol

import zcomm
from zcomm.errors import ZcommError

GROUP = "zcomm.commands"


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print it and end with exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


class Command(Protocol):
    """What stands behind one word of the command line."""

    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


class DoctorCommand:
    """``zcomm doctor``: say what zcomm finds on this machine, and what brings the rest."""

    help = "show what is installed, what is missing, and what brings it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare ``--json``."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the findings; return 1 when something that zcomm cannot do without is missing."""
        from zcomm import doctor

        return doctor.main(as_json=arguments.json)


class TuneCommand:
    """``zcomm tune``: measure which algorithms are the fastest in this job."""

    help = "measure this job, so that algorithm='auto' takes what is fastest (under mpirun)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what to measure, and where to write it."""
        from zcomm import tune_command

        tune_command.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, write and print; return the exit code."""
        from zcomm import tune_command

        return tune_command.run(arguments)


class TopoCommand:
    """``zcomm topo``: show who is near whom, of this job or of a file."""

    help = "show the machine: verdict, matrix, tree, picture; of this job, or of a file"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what to show, and how."""
        from zcomm import topo_command

        topo_command.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print and draw; return the exit code."""
        from zcomm import topo_command

        return topo_command.run(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (by default ``sys.argv[1:]``); return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    available = commands()
    if words and words[0] in available:
        return run(words[0], available[words[0]], words[1:])
    parser = overview(available)
    parser.parse_args(words)
    parser.print_help()
    return 0


def commands() -> dict[str, Command | EntryPoint]:
    """Return the commands by name, those of other packages not yet imported."""
    found: dict[str, Command | EntryPoint] = {
        entry.name: entry for entry in entry_points(group=GROUP)
    }
    own: dict[str, Command | EntryPoint] = {
        "doctor": DoctorCommand(),
        "topo": TopoCommand(),
        "tune": TuneCommand(),
    }
    return own | dict(sorted(found.items()))


def run(name: str, command: Command | EntryPoint, words: Sequence[str]) -> int:
    """Run one command; an error that is the user's to mend becomes one line.

    The exit code is 2 for arguments that cannot be, 1 for what could not be done.
    """
    try:
        loaded: Command = load(command)
        parser = Parser(prog=f"zcomm {name}", description=loaded.help)
        loaded.add_arguments(parser)
        code = loaded.run(parser.parse_args(words))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough: what is left must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ZcommError, ValueError, OSError) as error:
        print(f"zcomm {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def load(command: Command | EntryPoint) -> Command:
    """Import a command of another package.

    Raises:
        ZcommError: it cannot be imported; the message names the package.
    """
    if not isinstance(command, EntryPoint):
        return command
    try:
        found: Command = command.load()
    except Exception as error:
        package = command.dist.name if command.dist else command.value
        raise ZcommError(f"the package {package} cannot be loaded: {error}") from error
    return found


def overview(available: dict[str, Command | EntryPoint]) -> argparse.ArgumentParser:
    """Return the parser of a command line without a known command: help, version, errors."""
    parser = Parser(prog="zcomm", description="Tools of zcomm.")
    parser.add_argument("--version", action="version", version=f"zcomm {zcomm.__version__}")
    described = [f"{name} ({describe(command)})" for name, command in available.items()]
    parser.add_argument(
        "command", nargs="?", choices=list(available), metavar="COMMAND", help="; ".join(described)
    )
    return parser


def describe(command: Command | EntryPoint) -> str:
    """Return the line of help of a command, or why there is none."""
    try:
        return load(command).help
    except ZcommError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
