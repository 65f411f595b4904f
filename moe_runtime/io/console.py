"""Progress of what may take longer than five seconds: a bar with rate and time left on a terminal, few lines in a log.

`bar` gives a function `update(done, total, loss=None)`, which whoever does the work calls as often as it likes.

What is printed: tables with lines on a terminal and plain elsewhere, and values as JSON.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

FIRST, EVERY = 10.0, 60.0  # seconds until a log gets its first line, and between two
SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def is_main() -> bool:
    """Whether this process is the one that speaks, of those of a distributed run."""
    return int(os.environ.get("RANK") or 0) == 0


@contextmanager
def bar(title: str, unit: str = "step", shown: bool = True) -> Iterator[Callable[..., None]]:
    """Yield `update(done, total, loss=None)`; on a terminal a bar, in a log a line after ten seconds and then every minute.

    Lines and bar go to stderr. The unit "B" is for bytes. `shown` is for processes that keep silent, as all but the first do.
    """
    if not (shown and is_main()):
        yield lambda *_: None
    elif sys.stderr.isatty():
        with _terminal(title, unit) as update:
            yield update
    else:
        lines = _Lines(title, unit)
        yield lines.update
        lines.end()


@contextmanager
def _terminal(title: str, unit: str) -> Iterator[Callable[..., None]]:
    from tqdm import tqdm

    words = unit if unit == "B" else f" {unit}s"
    with tqdm(desc=title, unit=words, unit_scale=unit == "B", leave=False, dynamic_ncols=True) as shown:
        began = False

        def update(done: int, total: int | None = None, loss: float | None = None, *_) -> None:
            nonlocal began
            shown.total = total
            if not began and done > 1:  # what a checkpoint holds was not done now, and says nothing of the rate
                shown.reset(total)
                shown.initial = shown.n = shown.last_print_n = done
            began = True
            if loss is not None:
                shown.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            shown.update(done - shown.n)

        yield update


class _Lines:
    """Progress in a log: nothing of what is quick, a line a minute of what is not."""

    def __init__(self, title: str, unit: str):
        self.title, self.unit = title, unit
        self.start = time.monotonic()
        self.next, self.began = self.start + FIRST, None

    def update(self, done: int, total: int | None = None, loss: float | None = None, *_) -> None:
        now = time.monotonic()
        if self.began is None:
            # what was done before this run, as from a checkpoint on, says nothing of the rate
            self.began = now, done
        if now < self.next:
            return
        self.next = now + EVERY
        print(f"{self.title}: {self._text(done, total, now)}" + (f", loss {loss:.3f}" if loss else ""), file=sys.stderr)

    def end(self) -> None:
        """Say that it is done, where something was said before."""
        if self.next > self.start + FIRST:
            print(f"{self.title}: done in {duration(time.monotonic() - self.start)}", file=sys.stderr)

    def _text(self, done: int, total: int | None, now: float) -> str:
        started, first = self.began
        rate = (done - first) / (now - started) if now > started else 0.0
        text = amount(done, self.unit)
        if total:
            text = f"{100 * done / total:.0f}% of {amount(total, self.unit)}"
        if not rate:
            return text
        text += f", {amount(rate, self.unit)}/s"
        return text + (f", {duration((total - done) / rate)} left" if total and total > done else "")


def amount(count: float, unit: str) -> str:
    """Return a count with its unit, bytes in kB, MB or GB."""
    if unit == "B":
        size, name = next(((size, name) for size, name in SIZES if count >= size), (1, "B"))
        return f"{count / size:.1f} {name}"
    return f"{count:,.{0 if count == int(count) or count >= 100 else 2}f} {unit}s"


def duration(seconds: float) -> str:
    """Return seconds in words: 42 s, 3:05 min, 2:10 h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    high, low, unit = (
        (seconds // 60, seconds % 60, "min") if seconds < 3600 else (seconds // 3600, seconds // 60 % 60, "h")
    )
    return f"{high}:{low:02d} {unit}"


def print_table(
    title: str, columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[str]], width: int | None = None
) -> None:
    """Print a table of (name, "left" | "right") columns; boxes and bold are for terminals, and NO_COLOR is heeded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    is_terminal = sys.stdout.isatty()
    # elsewhere a line under the head, and as wide as it wants to be: folded rows are of no use to grep
    table = Table(
        title=title, title_justify="left", box=box.HEAVY_HEAD if is_terminal else box.SIMPLE, show_edge=is_terminal
    )
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=width is not None or not is_terminal)
    for row in rows:
        table.add_row(*row)
    Console(width=width if is_terminal else 400, force_terminal=is_terminal, emoji=False, markup=False).print(table)


def jsonable(value):
    """Return a value as JSON takes it: records as objects, tensors as lists, paths as text, None for NaN and infinities."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return (
        value
        if value is None or isinstance(value, bool | int | str)
        else str(value)
        if isinstance(value, Path)
        else repr(value)
    )
