"""Printed output: progress bars, tables with borders on a terminal and plain elsewhere, and values
as JSON.
"""

import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

# seconds before the first line in a log, and between lines
FIRST = 10.0
EVERY = 60.0
SILENCE = 60.0  # seconds without a line, after which one says that the work goes on


def is_main() -> bool:
    """Return whether this is the process of a distributed run that prints."""
    return int(os.environ.get("RANK") or 0) == 0


class _Watch:
    """A thread that prints a line about the innermost work in progress after a minute without."""

    def __init__(self) -> None:
        # each describes how far a work is; None if that is on the screen
        self.works: list[Callable[[], str | None]] = []
        self.woken = threading.Event()
        self.lock = threading.Lock()

    def begin(self, describe: Callable[[], str | None]) -> None:
        """Watch one more work; the first one starts the thread."""
        with self.lock:
            self.works.append(describe)
            if len(self.works) == 1:
                self.woken.clear()
                arguments = (sys.stderr, self.woken)
                threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def end(self, describe: Callable[[], str | None]) -> None:
        """Stop watching a work; the last one ends the thread."""
        with self.lock:
            self.works.remove(describe)
            if not self.works:
                self.woken.set()
                self.woken = threading.Event()

    def _run(self, stream: TextIO, woken: threading.Event) -> None:
        while True:
            is_woken = woken.wait(SILENCE)
            with self.lock:
                if woken is not self.woken:
                    return
                line = None if is_woken else self.works[-1]()
                woken.clear()
            if line is not None:
                print(line, file=stream, flush=True)


_watch = _Watch()


@contextmanager
def watched(title: str) -> Iterator[None]:
    """Print to stderr every minute that the block still runs, unless a `bar` within it prints.

    Only the first process of a run prints.
    """
    if not is_main():
        yield
        return
    start = time.monotonic()

    def describe() -> str:
        return f"{title}: still working after {_interval(time.monotonic() - start)}"

    _watch.begin(describe)
    try:
        yield
    finally:
        _watch.end(describe)


def _interval(seconds: float) -> str:
    """Return [hours:]minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{minutes:02}:{rest:02}"
    return f"{hours}:{text}" if hours else text


@contextmanager
def bar(title: str, unit: str = "step", shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show progress on stderr: a bar on a terminal, or lines in a log.

    A log gets a line after ten seconds and then every minute, also without updates. Only the first
    process of a run prints, and only if `shown`.

    Args:
        title: What is done.
        unit: What is counted; "B" is for bytes.
        shown: Whether anything is printed.

    Yields:
        `update(done, total, loss=None)`.
    """
    if not (shown and is_main()):
        yield lambda *_: None
        return
    from tqdm import tqdm

    stream = sys.stderr
    terminal = stream.isatty()
    start = time.monotonic()
    began: tuple[float, int] | None = None  # when the first update came, and what was done then
    following = FIRST
    latest: tuple[int, int | None] = 0, None
    units = {"unit": unit, "unit_scale": unit == "B"}

    def update(done: int, total: int | None = None, loss: float | None = None, *_: object) -> None:
        nonlocal began, following, latest
        now = time.monotonic()
        latest = done, total
        if began is None:
            # work restored from a checkpoint does not count towards the rate
            began = now, done
            if terminal and done > 1:
                progress.reset(total)
                progress.initial = progress.n = progress.last_print_n = done
        if terminal:
            progress.total = total
            if loss is not None:
                progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            progress.update(done - progress.n)
        elif now - start >= following:
            following = now - start + EVERY
            line = tqdm.format_meter(
                done,
                total,
                now - began[0],
                prefix=title,
                initial=began[1],
                bar_format=LOG if total else None,
                postfix=f"loss {loss:.3f}" if loss else None,
                **units,
            )
            print(line, file=stream, flush=True)
            _watch.woken.set()

    def describe() -> str | None:
        nonlocal following
        now = time.monotonic()
        if terminal:
            progress.refresh()
            return None
        following = now - start + EVERY
        done, total = latest
        reached = f" at {done / total:.0%}" if total else ""
        return f"{title}: still working{reached} after {_interval(now - start)}"

    with tqdm(
        desc=title,
        leave=False,
        dynamic_ncols=True,
        disable=not terminal,
        file=stream,
        **units,
    ) as progress:
        _watch.begin(describe)
        try:
            yield update
        finally:
            _watch.end(describe)
    if not terminal and following > FIRST:
        print(
            f"{title}: done in {_interval(time.monotonic() - start)}",
            file=stream,
            flush=True,
        )


# a line in a log: training: 5% 10/200 [00:10<03:10, 1.00step/s, loss 2.500]
LOG = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def print_table(
    title: str,
    columns: Iterable[tuple[str, Literal["left", "right"]]],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
) -> None:
    """Print a table, with boxes and bold on terminals only; NO_COLOR is respected."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    is_terminal = sys.stdout.isatty()
    # elsewhere a line under the header, and the full width, so that grep finds whole rows
    table = Table(
        title=title,
        title_justify="left",
        box=box.HEAVY_HEAD if is_terminal else box.SIMPLE,
        show_edge=is_terminal,
    )
    for name, justify in columns:
        table.add_column(
            name,
            justify=justify,
            no_wrap=width is not None or not is_terminal,
        )
    for row in rows:
        table.add_row(*row)
    Console(
        width=width if is_terminal else 400,
        force_terminal=is_terminal,
        emoji=False,
        markup=False,
    ).print(table)


def jsonable(value: Any) -> Any:
    """Convert a value for JSON.

    Records become objects, tensors lists, paths strings, NaN and infinities None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value) if isinstance(value, Path) else repr(value)
