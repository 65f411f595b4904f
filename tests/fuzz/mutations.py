"""Seeded mutations of bytes, of JSON and YAML values, and of text by lines."""

import copy
import json
import random
from typing import Any

HUGE = 10**400
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    2**31,
    2**64,
    HUGE,
    -HUGE,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "1",
    "nan",
    "../x",
    "/etc/passwd",
    "..",
    "\0",
    "é",
    "x" * 20_000,
    [],
    {},
    [1, 1],
    [None],
    ["x"],
    {"": None},
    {"x": 1},
    [-1, 2**40],
    [[[[[[[[[[]]]]]]]]]],
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of every value in a JSON value, except the root."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        items = ()
    found = []
    for key, one in items:
        found += [(*path, key), *places(one, (*path, key))]
    return found


def at(value: Any, path: tuple) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with one to three changes: replaced, removed, added, wrapped, swapped,
    renamed.
    """
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(value) if isinstance(value, dict | list) else []
        if not found or rng.random() < 0.02:
            return copy.deepcopy(rng.choice(HOSTILE))
        *path, key = rng.choice(found)
        node = at(value, tuple(path))
        _change(rng, node, key, found, value)
    return value


def _change(rng: random.Random, node: Any, key: Any, found: list[tuple], whole: Any) -> None:
    kind = rng.choice(
        ("replace", "replace", "replace", "nudge", "remove", "add", "wrap", "other", "rename")
    )
    if kind == "remove":
        del node[key]
    elif kind == "add":
        new = rng.choice(("x", "", "../x", "00", "-1", "é"))
        one = copy.deepcopy(rng.choice(HOSTILE))
        node.update({new: one}) if isinstance(node, dict) else node.append(one)
    elif kind == "wrap":
        node[key] = [node[key]]
    elif kind == "other":
        node[key] = copy.deepcopy(at(whole, rng.choice(found)))
    elif kind == "rename" and isinstance(node, dict):
        node[rng.choice((key.upper(), f" {key}", f"0{key}", f"{key}s"))] = node.pop(key)
    elif kind == "nudge" and type(node[key]) in (int, float) and abs(node[key]) < 1e300:
        node[key] = rng.choice(
            (-node[key], node[key] + 1, node[key] - 1, node[key] * 10**6, float(node[key]))
        )
    else:
        node[key] = copy.deepcopy(rng.choice(HOSTILE))


def to_json(rng: random.Random, value: Any) -> bytes:
    """Write a value as JSON, sometimes malformed: NaN, a duplicate key, a BOM, too deep,
    truncated.
    """
    text = json.dumps(value).encode()
    kind = rng.random()
    if kind < 0.04 and isinstance(value, dict) and value:
        key = rng.choice(list(value))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice(HOSTILE))}}}".encode()
    elif kind < 0.06:
        text = b"[" * 100_000
    elif kind < 0.12:
        text = mutate_bytes(rng, text)
    return text


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes that are truncated, have bits flipped, or have pieces inserted, removed,
    repeated or swapped.
    """
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    piece = rng.choice(
        (
            b"\0",
            b"\xff",
            b"\r\n",
            b"\xed\xa0\x80",
            b"\xef\xbb\xbf",
            b"9" * 30,
            b'"',
            b"}",
            bytes(64),
        )
    )
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 32))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return rng.choice(
        (
            b"",
            data[:a],
            data[a:],
            data[:a] + data[b:],
            data[:b] + data[a:],
            data + piece,
            data[:a] + piece + data[a:],
            bytes(changed),
            bytes(changed),
            data + data,
        )
    )
