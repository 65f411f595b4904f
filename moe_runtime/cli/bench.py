"""moe-runtime bench: the benchmarks, their tables and pictures; and two results files side by side."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import Ends, Kept, again, choices
from moe_runtime.io import console

EXAMPLE = "moe-runtime bench --only layer,step"
KEPT = Kept()  # but for what `_run` says
KINDS = ("op", "layer", "step", "tokens", "memory", "breakdown", "method")


def bench(
    only: Annotated[
        str | None,
        typer.Option(
            help=f"Kinds ({', '.join(KINDS)}) or names (merging, xft, ...), with commas; all by default.",
            autocompletion=choices(*KINDS),
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Run each once, at a shape that only proves that it runs.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Rounds per benchmark, at most: in each all variants run in turn.")] = 15,
    seconds: Annotated[float, typer.Option(help="Seconds of timing per benchmark, on a GPU.")] = 3.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File .json to write, or its folder: bench/results of a clone, else bench-results, unless given."
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Run nothing: compare two results files; exit code 1 if ours got worse in the second."
        ),
    ] = None,
):
    """Measure our backends, transformers' implementations and the other packages that are installed, on this machine.

    All variants in turn, round after round, in one process; medians, peak memory, and the share of what the machine can do at
    most. Tables are printed, JSON and pictures written. A run that was stopped goes on where it was.
    """
    if compare is not None:
        return _compare(*compare)
    _check(rounds, seconds)
    from moe_runtime.bench import running

    paths = running.files(only)
    options = ["--rounds", str(rounds), "--seconds", str(seconds), *(["--tiny"] if tiny else [])]
    if tiny and out is None:  # its numbers say nothing, so no file of results gets them
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            return _run(paths, Path(folder) / "tiny.json", options, kept=False)
    target = running.place(out, tiny)
    running.check(target.with_suffix(".jsonl"), target, tiny, rounds)
    return _run(paths, target, options, kept=True)


def _compare(a: Path, b: Path):
    from moe_runtime.bench import compare

    found = compare.compare(a, b)
    typer.echo(compare.text(found))
    return Ends(compare.as_json(found), 1 if found.regressions else 0)


def _check(rounds: int, seconds: float) -> None:
    from moe_runtime.io.rows import require

    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; want at least 1")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds is {seconds}; want a positive number")
    require("pytest", "bench")
    require("pytest_benchmark", "bench")


def _run(paths: list[Path], target: Path, options: list[str], kept: bool):
    """Measure, write the file, print the tables; Ctrl-C keeps what was measured."""
    lines, before = target.with_suffix(".jsonl"), _mark(target)
    try:
        outcome = _measured(paths, lines, target, options)
        pictures = _pictures(outcome.path) if kept and outcome.path else []
    except KeyboardInterrupt as stop:
        if kept:
            stop.kept = _stands(lines, target, before)
        raise
    return _said(outcome, pictures, kept)


def _measured(paths: list[Path], lines: Path, target: Path, options: list[str]):
    """Measure what `lines` does not hold, write `target`, print its tables."""
    from moe_runtime.bench import report, running

    with console.bar("benchmarks", "benchmark") as update:
        running.run(paths, lines, options, update)
    outcome = running.gather(lines, target)
    if outcome.path:
        typer.echo(report.text([outcome.path]))
    return outcome


def _mark(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _stands(lines: Path, target: Path, before: tuple[int, int] | None) -> str:
    """Say what is there when a run is interrupted: the file, when all was measured, else the lines, which go on."""
    from moe_runtime.bench.records import Records

    if _mark(target) != before and not lines.exists():
        return f"whole already: {target}"
    if lines.exists():
        return f"{len(Records(lines).done())} benchmarks are in {lines}; the same command goes on{again()}"
    return "nothing was written"


def _pictures(path: Path) -> list[Path]:
    """Draw what was measured, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed; pip install 'moe-runtime[bench]'", file=sys.stderr)
        return []
    from moe_runtime.bench.pictures import write_pictures

    return write_pictures(path)


def _said(outcome, pictures: list[Path], kept: bool):
    """Say what was left out and what was written; return the same for --json."""
    from moe_runtime.bench.records import benchmarks

    for state in ("skipped", "failed"):
        for name, why in getattr(outcome, state).items():
            print(f"{state}: {name}: {why}", file=sys.stderr)
    if kept and outcome.path:
        typer.echo("wrote " + ", ".join(map(str, (outcome.path, *pictures))))
    if outcome.failed and kept:
        print(f"{len(outcome.failed)} failed; the same command tries them again", file=sys.stderr)
    value = {
        "path": outcome.path if kept else None,
        "pictures": pictures,
        "failed": outcome.failed,
        "skipped": outcome.skipped,
        "benchmarks": benchmarks(outcome.path) if outcome.path else [],
    }
    return Ends(value, 1 if outcome.failed else 0)
