"""What a results file holds of a benchmark, checked: names that can be printed, numbers that can be divided by."""

import json
from typing import Any

WORDS = ("machine", "driver", "python", "torch", "triton", "transformers", "commit", "date", "kind", "dtype", "backend")
COUNTS = ("rounds", "asked", "tokens", "flops", "bytes")
POSITIVE = ("ms", "ratio", "TFLOP/s", "GB/s", "tokens/s")
LEAST, MOST = 1e-30, 1e30  # quotients and products of two such are numbers
LONGEST = 500  # characters of a name, which is a label in pictures


def is_name(value: Any) -> bool:
    """Whether a value is a line of text, not too long for a label."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST and value.isprintable() and not value.isspace()


def _is_number(value: Any, least: float = 0.0) -> bool:
    return type(value) in (int, float) and least <= value <= MOST  # NaN is neither


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= one <= "\udfff" for one in value)


def texts(values: Any) -> bool:
    """Whether a value is an object of texts by name."""
    return isinstance(values, dict) and all(is_name(name) and _is_text(value) for name, value in values.items())


def _wrong_row(row: Any) -> str | None:
    if not isinstance(row, dict) or "ms" not in row:
        return "is no object with ms"
    for column, value in row.items():
        # a result that holds a NaN, or has another shape, differs by no number
        if column == "difference" and value is None:
            continue
        if not is_name(column) or not _is_number(value, LEAST if column in POSITIVE else 0.0):
            return f"has a bad {column!r:.60}"
    return None


def _wrong_rows(rows: Any) -> str | None:
    if not isinstance(rows, dict) or not rows:
        return "rows is no object of variants"
    for variant, row in rows.items():
        if not is_name(variant):
            return f"a variant is named {variant!r:.60}"
        if wrong := _wrong_row(row):
            return f"{variant} {wrong}"
    return None


def _shape_is_one(shape: Any) -> bool:
    return isinstance(shape, dict) and is_name(shape.get("name", "none")) and _is_count(shape.get("T", 0))


def _ceilings_are(values: Any) -> bool:
    return isinstance(values, dict) and all(is_name(u) and _is_number(v, LEAST) for u, v in values.items())


def wrong(entry: Any) -> str | None:
    """Return what is wrong with a benchmark's name and extra_info, None if nothing is."""
    if not isinstance(entry, dict) or not is_name(entry.get("name")):
        return "its name is no line of text"
    info = entry.get("extra_info")
    if not isinstance(info, dict):
        return "its extra_info is no object"
    try:
        json.dumps(info, allow_nan=False)
    except ValueError:
        return "it holds a number that JSON has not"
    checks = {name: is_name for name in WORDS} | {name: _is_count for name in COUNTS}
    checks |= {"tiny": lambda value: isinstance(value, bool), "tiles": is_name, "notes": texts}
    checks |= {"shape": lambda value: value is None or _shape_is_one(value), "ceilings": _ceilings_are}
    for name, holds in checks.items():
        if name in info and not holds(info[name]):
            return f"its {name} cannot be {info[name]!r:.80}"
    return _wrong_rows(info.get("rows"))
