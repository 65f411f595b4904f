"""What is printed: tables with lines on a terminal and plain elsewhere, and values as JSON."""

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


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
