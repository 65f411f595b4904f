"""The shared libraries of csrc/ and csrc/cpu: where they lie, how they are loaded, and why one cannot be.

The argument types are read from a library's C header: no second list of them exists.
"""

import ctypes
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Library = TypeVar("Library")
_TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def read_header(text: str) -> dict[str, tuple[type | None, list[type]]]:
    """Return name -> (result type, argument types) of each MOERT_API function that a C header declares."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    declared = re.findall(r"^\s*MOERT_API\s+([\w\s]+?[\s*]+)(moert_\w+)\s*\(([^)]*)\)\s*;", text, re.M)
    found = {}
    for result, name, arguments in declared:
        parts = [part.strip() for part in arguments.split(",") if part.strip() not in ("", "void")]
        found[name] = (ctypes.c_char_p if "char" in result else _type(result), [_type(part) for part in parts])
    return found


def _type(declaration: str) -> type | None:
    if "*" in declaration:
        return ctypes.c_void_p
    words = [word for word in declaration.split() if word != "const"]
    return _TYPES[words[0]]


def bind(path: Path, header: Path, prefix: str, sources: str, command: str) -> tuple[ctypes.CDLL, dict]:
    """Load the library at `path` with the types of `header`; return it and what it says of how it was built.

    Raises OSError where it does not load, or is not of `sources`, the hash of the header's folder; `command` builds it.
    """
    text, handle = header.read_text(), ctypes.CDLL(str(path))
    for name, (result, arguments) in read_header(text).items():
        try:
            function = getattr(handle, name)
        except AttributeError:
            raise OSError(f"{path} has no {name}; rebuild it: {command}") from None
        function.restype, function.argtypes = result, arguments
    info = json.loads(getattr(handle, f"{prefix}_build_info")())
    version = re.search(rf"#define {prefix.upper()}_ABI_VERSION (\d+)", text)
    if info.get("sources", sources) != sources or getattr(handle, f"{prefix}_abi_version")() != int(version[1]):
        raise OSError(f"{path} was built from other sources than {header.parent}; rebuild it: {command}")
    return handle, info


def places(wheel: Path, cached: Callable[[], Path]) -> list[Path]:
    """Return where a library may lie: `wheel`, in the wheel that brought it, and `cached`, where the command puts it."""
    try:
        return [wheel, cached()]
    except (OSError, RuntimeError):  # no home, as in containers that run as a number
        return [wheel]


def find(
    places: Callable[[], list[Path]],
    bind: Callable[[Path], Library],
    header: Callable[[], Path],
    missing: str,
) -> Library | str:
    """Return the first library that loads, or why there is none; `missing` where there is no file of one."""
    reasons = []
    try:
        if not (path := header()).is_file():
            return f"{path.parent} has no {path.name}; want a checkout or an installed wheel"
    except OSError as error:
        return str(error)
    for path in places():
        try:
            if path.is_file():  # raises where a folder above it may not be read
                return bind(path)
        except (OSError, RuntimeError, ValueError) as error:
            reasons.append(str(error))
    return "; ".join(reasons) or missing
