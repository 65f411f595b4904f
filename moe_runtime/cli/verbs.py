"""What every verb of the command line shares: its example, --json, what an interruption leaves, and completion of choices."""

import contextlib
import functools
import inspect
import json as json_module
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from moe_runtime.io import console, signals

PACKAGE = Path(__file__).resolve().parents[1]
METHODS = ("xft", "esft", "upit", "ultrafuser")

# arguments and options of several verbs
Source = Annotated[Path, typer.Argument(help="Folder of the model to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)]
ReplaceTarget = Annotated[bool, typer.Option("--overwrite", help="Replace the target folder if it exists.")]
ShardSize = Annotated[str, typer.Option(help="Largest file of the target, such as 500MB or 2GB.")]
Seed = Annotated[int, typer.Option(help="Seed of all that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object; all else goes to stderr.")]


class Ends(NamedTuple):
    """What a verb returns that ends in another exit code than 0."""

    value: object
    code: int


class Kept:
    """What a verb leaves when it is interrupted: nothing, unless a subclass says more."""

    def begin(self, options: dict) -> None:
        """Look at what is there before the verb runs."""

    def say(self, options: dict) -> str:
        """Say what is kept, and how it goes on."""
        return "nothing was written"


class Whole(Kept):
    """For a verb whose targets, options that name paths, appear whole or not at all."""

    def __init__(self, *names: str):
        self.names = names

    def begin(self, options: dict) -> None:
        """Remember which files and folders are there."""
        self.before = {name: self._mark(options[name]) for name in self.names if options.get(name) is not None}

    def say(self, options: dict) -> str:
        """Say which of the targets were made in time."""
        made = [str(options[name]) for name, mark in self.before.items() if self._mark(options[name]) != mark]
        return f"whole already: {', '.join(made)}" if made else "nothing was written"

    @staticmethod
    def _mark(path) -> tuple | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if not Path(path).is_dir() or any(Path(path).iterdir()) else None


class WholeIn(Whole):
    """For a verb that makes files, each whole or not at all, in the folder that its option `name` names."""

    def __init__(self, name: str, *files: str):
        super().__init__(*files)
        self.name = name

    def _paths(self, options: dict) -> dict:
        return {file: Path(options[self.name], file) for file in self.names}

    def begin(self, options: dict) -> None:
        """Remember which files are there."""
        super().begin(self._paths(options))

    def say(self, options: dict) -> str:
        """Say which of the files were made in time."""
        return super().say(self._paths(options))


class GoesOn(Kept):
    """For a verb that goes on where it was, in the folder or file that its option --out names."""

    def __init__(self, what: str = "what is done is kept in {}", suffix: str = "", drop: tuple[str, ...] = ()):
        self.what, self.suffix, self.drop = what, suffix, drop

    def say(self, options: dict) -> str:
        """Say where it is, and the command."""
        if not os.path.exists(f"{options['out']}{self.suffix}"):
            return super().say(options)
        return f"{self.what.format(options['out'])}; the same command goes on{again(self.drop)}"


def again(drop: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> str:
    """Return the command that runs, to type once more; nothing under a launcher, whose command is not known here."""
    if "LOCAL_RANK" in os.environ:
        return ""
    return ": " + shlex.join(["moe-runtime", *(part for part in sys.argv[1:] if part not in drop), *also])


def verb(
    app: typer.Typer,
    name: str | None = None,
    *,
    example: str,
    kept: Kept | None = None,
    help: str | None = None,
    **more,
) -> Callable:
    """Add a function to `app` as a verb with an example, --json for what it returns, and a line where it is interrupted."""

    def add(function: Callable) -> Callable:
        app.command(name, epilog=f"Example: {example}", help=help, **more)(_wrapped(function, kept or Kept()))
        return function

    return add


def mount(child: typer.Typer, parent: typer.Typer) -> None:
    """Add the verbs of an app to another one, as its own."""
    parent.registered_commands += child.registered_commands


def _wrapped(function: Callable, kept: Kept) -> Callable:
    """Return the function with --json after its own options."""

    @functools.wraps(function)
    def run(*args, json: bool = False, **options):
        kept.begin(options)
        try:
            with _stdout_to_stderr() if json else contextlib.nullcontext():
                value = function(*args, **options)
        except KeyboardInterrupt as stop:
            _say_stopped(stop, getattr(stop, "kept", None) or kept.say(options))
            raise typer.Exit(signals.code_of(stop)) from None
        value, code = value if isinstance(value, Ends) else (value, 0)
        if json and console.is_main():
            print(json_module.dumps(console.jsonable(value), indent=2, allow_nan=False))
        if code:
            raise typer.Exit(code)

    old = inspect.signature(function)
    added = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    run.__signature__ = old.replace(parameters=[*old.parameters.values(), added], return_annotation=None)
    run.__annotations__ = {**function.__annotations__, "json": Json}
    return run


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let all that prints write to stderr, C (NCCL) and programs too, so that stdout holds one JSON object."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = None
    with contextlib.suppress(OSError):  # a descriptor is closed
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
            sys.stderr.flush()
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _say_stopped(stop: KeyboardInterrupt, kept: str) -> None:
    if console.is_main():
        with contextlib.suppress(OSError):  # a terminal's Ctrl-C ends `2>&1 | tee log` as well
            print(f"{signals.word_of(stop)}; {kept}", file=sys.stderr, flush=True)


def choices(*found: str | Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Return what completes an option to one of these words; a function gives them late."""

    def complete(incomplete: str) -> list[str]:
        words = [word for one in found for word in (one() if callable(one) else [one])]
        return [word for word in words if word.startswith(incomplete)]

    return complete


def recipes(method: str | None = None) -> Callable[[], list[str]]:
    """Return what lists the recipes that come along: a method's by their names, or all with the method before them."""

    def names() -> list[str]:
        if method is not None:
            return sorted(path.stem for path in (PACKAGE / "methods" / method / "recipes").glob("*.yaml"))
        return [
            f"{one}/{path.stem}"
            for one in METHODS
            for path in sorted((PACKAGE / "methods" / one / "recipes").glob("*.yaml"))
        ]

    return names


def numbers(text: str | None) -> list[int] | None:
    """Parse 0-3,8 to [0, 1, 2, 3, 8]."""
    if text is None:
        return None
    found = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"layers is {text!r}; want numbers and ranges, such as 0-3,8")
        found += range(int(first), int(last if dash else first) + 1)
    return found
