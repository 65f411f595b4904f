"""The two command lines of this repository: `moe-runtime`, and `python -m papers` in a clone."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


class Program(NamedTuple):
    """A command line: its name, the module of its commands, and sys.argv[0] in its process."""

    name: str
    commands: str
    argv0: str

    @property
    def app(self):
        """The typer app with the commands."""
        return importlib.import_module(self.commands).app


LIBRARY = Program("moe-runtime", "moe_runtime.cli.app", "moe-runtime")
PAPERS = Program(
    "python -m papers",
    "papers.cli",
    str(ROOT / "papers" / "__main__.py"),
)
# the first words of a command line; without any of them, the arguments are for `moe-runtime`
STARTS = {
    ("python", "-m", "papers"): PAPERS,
    ("papers",): PAPERS,
    ("python", "-m", "moe_runtime"): LIBRARY,
    ("moe-runtime",): LIBRARY,
}


def program_of(words: Sequence[str]) -> tuple[Program, list[str]]:
    """Return the program that a command line calls, and the arguments after its name."""
    for start, program in STARTS.items():
        if tuple(words[: len(start)]) == start:
            return program, list(words[len(start) :])
    return LIBRARY, list(words)


def run_verb(*words):
    """Run moe-runtime in this process; return typer's result."""
    return CliRunner().invoke(LIBRARY.app, [str(word) for word in words])
