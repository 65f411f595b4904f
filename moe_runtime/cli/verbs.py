"""Common parts of all commands: help with an example, --json, completion of choices, and the
message on interruption.
"""

import contextlib
import functools
import importlib
import inspect
import json as json_module
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from moe_runtime.io import console, signals
from moe_runtime.io.prompts import PROMPTS, TRAIN_ON

PROGRAM = "moe-runtime"


def choices(*found: str | Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for these words; a function in `found` lists words lazily."""

    def complete(incomplete: str) -> list[str]:
        words = [word for one in found for word in (one() if callable(one) else [one])]
        return [word for word in words if word.startswith(incomplete)]

    return complete


def option(help: str, *names: str, words: Iterable = (), kind: Callable = typer.Option, **more):
    """Return a typer option with this help text that completes to `words`, a list or a
    space-separated string.
    """
    words = words.split() if isinstance(words, str) else words
    return kind(*names, help=help, autocompletion=choices(*words) if words else None, **more)


argument = functools.partial(option, kind=typer.Argument)
DTYPES = ("float32", "bfloat16", "float16")
# arguments and options of several verbs
HUB = object()  # marks a folder that may be a Hub id
Source = Annotated[Path, argument("Folder or Hub id of the model to read."), HUB]
Target = Annotated[Path, argument("Folder to write; must not exist.")]
Overwrite = Annotated[bool, option("Replace the target if it exists.", "--overwrite")]
ShardSize = Annotated[str, option("Largest file of the target, such as 500MB or 2GB.")]
Seed = Annotated[int, option("Seed of all random numbers.")]
Data = Annotated[
    str,
    option(
        "jsonl, parquet or a dataset's id: chats, pairs or text; docs/data.md lists the formats."
    ),
]
MaxLength = Annotated[int, option("Tokens per sample, at most.")]
Prompt = Annotated[
    str,
    option("Prompt format: plain, deepseek, chat (the tokenizer's) or magicoder.", words=PROMPTS),
]
TrainOn = Annotated[
    str,
    option(
        "Tokens to train on: the assistant's (of a pair, the completion's) or all.", words=TRAIN_ON
    ),
]
RecipeSeed = Annotated[int | None, option("Seed (default: the recipe's).")]
Bf16 = Annotated[bool, option("Compute in bfloat16 (autocast).", "--bf16")]
Checkpointing = Annotated[
    bool, option("Recompute activations to save memory.", "--gradient-checkpointing")
]
PushToHub = Annotated[
    str | None, option("Upload the result to this model repository, OWNER/NAME, with a model card.")
]
Json = Annotated[
    bool, option("Print the result as one JSON object; everything else goes to stderr.", "--json")
]


def group(name: str, help: str, example: str, program: str = PROGRAM) -> typer.Typer:
    """Return an empty group of commands called `name`; the `example` follows the name in
    the help.
    """
    return typer.Typer(
        name=name,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=help,
        epilog=f"Example: {' '.join(f'{program} {name} {example}'.split())}",
    )


class Ends(NamedTuple):
    """Return value of a command that exits with a code other than 0."""

    value: object
    code: int


class Kept:
    """Paths that an interrupted command leaves either complete or unwritten, with the command's
    options in braces.

    A command that `resumes` continues from the first path when it is rerun, without the options in
    `drop`.
    """

    def __init__(self, *paths: str, resumes: bool = False, drop: tuple[str, ...] = ()):
        self.paths = paths
        self.resumes = resumes
        self.drop = drop

    def begin(self, options: dict) -> None:
        """Remember which of the paths exist before the verb runs."""
        self.before = {path: _mark(path) for path in self._named(options)}

    def say(self, options: dict) -> str:
        """Describe what has been written, and how to resume."""
        named = self._named(options)
        if self.resumes:
            found = os.path.exists(named[0])
            if found:
                return f"completed work is in {named[0]}; {again(self.drop)}"
            return "nothing was written"
        made = [path for path in named if _mark(path) != self.before[path]]
        return f"already complete: {', '.join(made)}" if made else "nothing was written"

    def _named(self, options: dict) -> list[str]:
        given = {name: value for name, value in options.items() if value is not None}
        return [path.format(**given) for path in self.paths if path[1 : path.index("}")] in given]


def _mark(path: str) -> tuple | None:
    """Return the identity of a file or a folder that is not empty."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not Path(path).is_dir() or any(Path(path).iterdir()):
        return (found.st_dev, found.st_ino)
    return None


def again(drop: tuple[str, ...] = ()) -> str:
    """Return the advice to rerun this command; under a launcher without the command, as the
    launcher's is unknown.
    """
    if "LOCAL_RANK" in os.environ:
        return "rerun to resume"
    return "rerun to resume: " + shlex.join(
        [*program().split(), *(part for part in sys.argv[1:] if part not in drop)]
    )


def program() -> str:
    """Return how this program was called: moe-runtime, or `python -m` and another package."""
    package = Path(sys.argv[0]).resolve().parent.name
    if Path(sys.argv[0]).name != "__main__.py" or package == "moe_runtime":
        return PROGRAM
    return f"python -m {package}"


def one_gpu() -> None:
    """Hide all GPUs except the first, unless a launcher is running; must be called before torch
    queries the GPUs.

    Trainer would otherwise use DataParallel over all visible GPUs in a single process.
    """
    if "LOCAL_RANK" not in os.environ:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


@contextlib.contextmanager
def leaving(say: Callable[[], str]) -> Iterator[None]:
    """If the block is interrupted, print the result of `say` instead of that of the command's
    `Kept`.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.kept = say()
        raise


def with_bar(name: str, function: Callable, *args, **options):
    """Call a function that reports its progress in bytes with a progress bar of this name; return
    its result.
    """
    with console.bar(name, "B") as update:
        return function(*args, progress=update, **options)


def verb(
    app: typer.Typer,
    example: str,
    kept: Kept | None = None,
    name: str | None = None,
    push: str | None = None,
    check_push: Callable[[dict], None] | None = None,
    watch: bool = True,
    program: str = PROGRAM,
    **more,
) -> Callable:
    """Add a function to `app` as a verb whose result --json prints; the `example` follows the
    verb's name in the help.

    `push` names the option with the folder that --push-to-hub uploads; without it there is no such
    option. `check_push` raises ValueError for options whose result cannot be pushed. `watch=False`
    is for a verb that shows its own progress at all times.
    """

    def add(function: Callable) -> Callable:
        words = f"{program} {app.info.name or ''} {name or function.__name__.replace('_', '-')}"
        words = " ".join(words.split())
        wrapped = _wrapped(function, kept or Kept(), push, check_push, words if watch else None)
        app.command(name, epilog=f"Example: {' '.join(f'{words} {example}'.split())}", **more)(
            wrapped
        )
        return function

    return add


def _wrapped(
    function: Callable,
    kept: Kept,
    push: str | None,
    check_push: Callable[[dict], None] | None,
    watched: str | None,
) -> Callable:
    """Return the function with the options --push-to-hub and --json, and a message if it is
    interrupted.

    Unless `watched`, the verb's name, is None, a line says every minute that it works.
    """
    old = inspect.signature(function)
    ids = [
        name
        for name, p in old.parameters.items()
        if HUB in getattr(p.annotation, "__metadata__", ())
    ]

    @functools.wraps(function)
    def run(*args, json: bool = False, push_to_hub: str | None = None, **options):
        kept.begin(options)
        redirected = _stdout_to_stderr() if json else contextlib.nullcontext()
        try:
            with redirected, console.watched(watched) if watched else contextlib.nullcontext():
                if push_to_hub is not None and check_push is not None:
                    check_push(options)
                if push_to_hub is not None:
                    _hub().check_repository(push_to_hub)
                given = {name: options[name] for name in ids}
                value = function(
                    *args,
                    **options | {name: _downloaded(name, source) for name, source in given.items()},
                )
                if push_to_hub is not None and console.is_main() and not isinstance(value, Ends):
                    _push(Path(options[push]), push_to_hub, given, options, value)
        except KeyboardInterrupt as stop:
            line = f"{signals.word_of(stop)}; {getattr(stop, 'kept', None) or kept.say(options)}"
            with contextlib.suppress(OSError):  # Ctrl-C on a terminal also stops `2>&1 | tee log`
                if console.is_main():
                    print(line, file=sys.stderr, flush=True)
            json = False
            value = Ends(None, signals.code_of(stop))
        value, code = value if isinstance(value, Ends) else (value, 0)
        if json and console.is_main():
            print(json_module.dumps(console.jsonable(value), indent=2, allow_nan=False))
        if code:
            raise typer.Exit(code)

    added = {"push_to_hub": (None, PushToHub)} if push else {}
    added |= {"json": (False, Json)}
    new = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=a)
        for n, (d, a) in added.items()
    ]
    run.__signature__ = old.replace(
        parameters=[*old.parameters.values(), *new], return_annotation=None
    )
    run.__annotations__ = function.__annotations__ | {
        name: annotation for name, (_, annotation) in added.items()
    }
    return run


def _hub():
    return importlib.import_module("moe_runtime.hf.models.hub")


def _sources():
    return importlib.import_module("moe_runtime.hf.common.sources")


def _downloaded(name: str, source: Path) -> Path:
    """Return the folder of a Hub id's files, or any other path unchanged."""
    return _sources().local_folder(source, name=name) if _sources().is_id(source) else source


def _push(folder: Path, repo: str, given: dict, options: dict, value) -> None:
    """Upload the output of a verb, with a model card that records the command."""
    words = [Path(word).name if os.path.exists(word) else word for word in sys.argv[1:]]
    url = _hub().push(
        folder,
        repo,
        base=next((source for source in given.values()), None),
        command=shlex.join(["moe-runtime", *words]),
        dataset=options.get("data") if _sources().is_id(options.get("data") or "") else None,
        method=words[0] if words and words[0] in _hub().PAPERS else None,
        facts=found if isinstance(found := console.jsonable(value), dict) else None,
    )
    typer.echo(f"pushed to {url}")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect all output to stderr, including that of C code (NCCL) and programs, so that stdout
    is one JSON object.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = None
    with contextlib.suppress(OSError):  # if a descriptor is closed
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


def numbers(text: str | None) -> list[int] | None:
    """Parse 0-3,8 to [0, 1, 2, 3, 8]."""
    if text is None:
        return None
    found = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"layers must be numbers and ranges, such as 0-3,8, but got {text!r}")
        found += range(int(first), int(last if dash else first) + 1)
    return found
