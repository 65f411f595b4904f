"""Common parts of all commands: examples in the help, --json, completion, interruptions."""

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
from typing import Annotated, Any, NamedTuple

import typer

from moe_runtime.io import console, signals
from moe_runtime.io.prompts import TRAIN_ON
from moe_runtime.methods.prompts import PROMPTS

PROGRAM = "moe-runtime"


def choices(*sources: str | Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for these words; a function among them lists words lazily."""

    def complete(incomplete: str) -> list[str]:
        words = []
        for source in sources:
            words += source() if callable(source) else [source]
        return [word for word in words if word.startswith(incomplete)]

    return complete


def option(
    help: str, *names: str, words: Iterable = (), kind: Callable = typer.Option, **more: Any
) -> Any:
    """Return a typer option with this help text that completes to `words`, a list or a
    space-separated string.
    """
    if isinstance(words, str):
        words = words.split()
    return kind(
        *names,
        help=help,
        autocompletion=choices(*words) if words else None,
        **more,
    )


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


def with_bar(name: str, function: Callable, *args: Any, **options: Any) -> Any:
    """Call a function that reports its progress in bytes with a progress bar of this name; return
    its result.
    """
    with console.bar(name, "B") as update:
        return function(*args, progress=update, **options)


def verb(
    app: typer.Typer,
    example: str,
    *,
    name: str | None = None,
    resumes: bool = False,
    drop: tuple[str, ...] = (),
    push: str | None = None,
    check_push: Callable[[dict], None] | None = None,
    watch: bool = True,
    program: str = PROGRAM,
    **more: Any,
) -> Callable:
    """Add a function to `app` as a verb whose result --json prints.

    The `example` follows the verb's name in the help. An interrupted verb that `resumes` continues
    when it is rerun without the options in `drop`; all others leave complete output or none.
    `push` names the option with the folder that --push-to-hub uploads; without it there is no such
    option. `check_push` raises ValueError for options whose result cannot be pushed. `watch=False`
    is for a verb that shows its own progress at all times.
    """

    def add(function: Callable) -> Callable:
        words = f"{program} {app.info.name or ''} {name or function.__name__.replace('_', '-')}"
        words = " ".join(words.split())
        pushing = _pushing(function, push, check_push) if push else _downloading(function)
        run = _running(
            pushing,
            words if watch else None,
            functools.partial(_end, resumes, drop),
        )
        added = {"push_to_hub": (None, PushToHub)} if push else {}
        _sign(
            run,
            function,
            added | {"json": (False, Json)},
        )
        app.command(
            name,
            epilog=f"Example: {' '.join(f'{words} {example}'.split())}",
            **more,
        )(run)
        return function

    return add


def _end(resumes: bool, drop: tuple[str, ...]) -> str:
    """Return what an interrupted verb says."""
    return again(drop) if resumes else "no incomplete output was left"


def _downloading(function: Callable) -> Callable:
    """Return the function with Hub ids among its `HUB` arguments replaced by downloaded folders."""

    def run(*args, **options):
        for name in _hub_arguments(function):
            if _sources().is_id(options[name]):
                options[name] = _sources().local_folder(options[name], name=name)
        return function(*args, **options)

    return run


def _hub_arguments(function: Callable) -> list[str]:
    """Return the names of the arguments that may be Hub ids."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if HUB in getattr(parameter.annotation, "__metadata__", ()):
            names.append(name)
    return names


def _pushing(function: Callable, out: str, check_push: Callable[[dict], None] | None) -> Callable:
    """Return the function with an option `push_to_hub`: a repository that its output goes to."""
    work = _downloading(function)

    def run(*args, push_to_hub: str | None, **options):
        if push_to_hub is None:
            return work(*args, **options)
        if check_push is not None:
            check_push(options)
        _hub().check_repository(push_to_hub)
        value = work(*args, **options)
        if console.is_main() and not isinstance(value, Ends):
            sources = [options[name] for name in _hub_arguments(function)]
            _push(
                Path(options[out]),
                push_to_hub,
                sources,
                options.get("data"),
                value,
            )
        return value

    return run


def _running(function: Callable, watched: str | None, end: Callable[[], str]) -> Callable:
    """Return the function as typer calls it: prints JSON if asked to, and exits with its code.

    Unless `watched`, the verb's name, is None, a line says every minute that it works.
    """

    def run(*args, json: bool, **options):
        redirected = _stdout_to_stderr() if json else contextlib.nullcontext()
        watching = console.watched(watched) if watched else contextlib.nullcontext()
        try:
            with redirected, watching:
                value = function(*args, **options)
        except KeyboardInterrupt as stop:
            line = f"{signals.word_of(stop)}; {getattr(stop, 'kept', None) or end()}"
            with contextlib.suppress(OSError):  # Ctrl-C on a terminal also stops `2>&1 | tee log`
                if console.is_main():
                    print(line, file=sys.stderr, flush=True)
            raise typer.Exit(signals.code_of(stop)) from None
        code = 0
        if isinstance(value, Ends):
            value, code = value
        if json and console.is_main():
            print(
                json_module.dumps(
                    console.jsonable(value),
                    indent=2,
                    allow_nan=False,
                )
            )
        if code:
            raise typer.Exit(code)

    return run


def _sign(run: Callable, function: Callable, added: dict[str, tuple]) -> None:
    """Give `run` the name, the help and the signature of `function`, with the `added` options."""
    functools.update_wrapper(run, function)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    annotations = dict(function.__annotations__)
    for name, (default, annotation) in added.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        annotations[name] = annotation
    run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)
    run.__annotations__ = annotations


def _hub():
    return importlib.import_module("moe_runtime.hf.models.hub")


def _sources():
    return importlib.import_module("moe_runtime.hf.common.sources")


def _push(folder: Path, repo: str, sources: list[str], data: str | None, value) -> None:
    """Upload the output of a verb, with a model card that records the command."""
    words = [Path(word).name if os.path.exists(word) else word for word in sys.argv[1:]]
    hub = _hub()
    facts = console.jsonable(value)
    url = hub.push(
        folder,
        repo,
        base=sources[0] if sources else None,
        command=shlex.join([PROGRAM, *words]),
        dataset=data if _sources().is_id(data or "") else None,
        method=words[0] if words and words[0] in hub.PAPERS else None,
        facts=facts if isinstance(facts, dict) else None,
    )
    typer.echo(f"pushed to {url}")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect all output to stderr, including that of C code (NCCL) and programs, so that stdout
    is one JSON object.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stdout = None
    with contextlib.suppress(OSError):  # if a descriptor is closed
        stdout = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
            sys.stderr.flush()
    finally:
        if stdout is not None:
            os.dup2(stdout, 1)
            os.close(stdout)


def numbers(text: str | None) -> list[int] | None:
    """Parse 0-3,8 to [0, 1, 2, 3, 8]."""
    if text is None:
        return None
    layers = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not dash:
            last = first
        if not first.isdecimal() or not last.isdecimal():
            raise ValueError(f"Expected numbers and ranges, such as 0-3,8, but got {text!r}")
        layers += range(int(first), int(last) + 1)
    return layers
