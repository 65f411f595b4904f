"""What a recipe is made of: dataclasses that are built from YAML's mappings, with the key's whole name in each error."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass

from moe_runtime.config import shown


class Node:
    """from_dict / to_dict and change of a recipe and the dataclasses in it."""

    __slots__ = ()

    def to_dict(self) -> dict:
        """Return the fields as a JSON-ready dict; `from_dict` takes it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping, name: str = ""):
        """Build it from a mapping; raises ValueError, with the key's whole `name`, for unknown keys and wrong values."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{name or 'recipe'} is {shown(values)}; want keys and values: {', '.join(_names(cls))}")
        dot = f"{name}." if name else ""
        unknown = [str(key) for key in values if key not in _names(cls)]
        if unknown:
            raise ValueError(f"{dot}{unknown[0][:200]} is no key of a recipe; want some of {', '.join(_names(cls))}")
        hints = typing.get_type_hints(cls)
        built = {key: value_of(hints[key], value, f"{dot}{key}") for key, value in values.items()}
        missing = [f.name for f in fields(cls) if f.name not in built and _required(f)]
        if missing:
            raise ValueError(f"{dot}{missing[0]} is missing; want {_word(hints[missing[0]])}")
        try:
            return cls(**built)
        except ValueError as error:
            raise ValueError(f"{dot}{error}") from error

    def change(self, **changes) -> "Node":
        """Return a recipe with other values; keys are dotted, with __ for the dot: change(data__limit=8, seed=1)."""
        values = self.to_dict()
        for key, value in changes.items():
            *path, last = key.split("__")
            node = values
            for part in path:
                node = node[part]
            node[last] = value.to_dict() if is_dataclass(value) else value
        return type(self).from_dict(values)


def _names(cls) -> list[str]:
    return [f.name for f in fields(cls)]


def _required(f) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _word(hint) -> str:
    """What a user calls a type."""
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false", dict: "keys and values"}
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    parts = [typing.get_origin(part) or part for part in parts if part is not type(None)]
    return " or ".join(words.get(part, f"keys and values ({getattr(part, '__name__', part)})") for part in parts)


def value_of(hint, value, name: str):
    """Return `value` as the type `hint`; raises ValueError with `name`. YAML 1.1 reads 5e-5 as text, a number here."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is dict:
            if isinstance(value, Mapping):
                of = typing.get_args(kind)[1]
                return {str(key): value_of(of, one, f"{name}.{key}") for key, one in value.items()}
            continue
        if is_dataclass(kind):
            return value if isinstance(value, kind) else kind.from_dict(value, name)
        if kind is float and isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                continue
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
    raise ValueError(f"{name} is {shown(value)}; want {_word(hint)}")
