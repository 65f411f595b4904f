"""How far a reader follows one argument through the library, counted while the call runs.

    walk = follow(train_folder, source, selection, rows, out, training)
    walk.stays, walk.rooms, walk.returns

A frame of the package holds the object if one of its named arguments is the object, or a list or
tuple that contains it. Objects are compared by identity, paths by their text. A module that a
function returns while it holds a followed path is followed as well: the path becomes the model.

    stay     a line of the package that passes the object to a function of another module; the first
             function counts as one, and a line counts once, however often it runs
    room     a module that holds the object
    return   a stay in a room that was left before: stays minus rooms

A loop over steps or layers counts once; ten functions that each look up the model's layers count
ten times. Functions that torch or transformers call get the object from the line of the package
that called torch or transformers.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

import moe_runtime

PACKAGE = f"{Path(moe_runtime.__file__).parent}{os.sep}"


class Walk(NamedTuple):
    """Where an argument was."""

    result: Any
    modules: list[str]  # of each stay
    places: list[str]  # "module:line -> module.function" of each stay

    @property
    def stays(self) -> int:
        """Number of stays."""
        return len(self.modules)

    @property
    def rooms(self) -> int:
        """Number of modules."""
        return len(set(self.modules))

    @property
    def returns(self) -> int:
        """Number of stays in a module that was left before."""
        return self.stays - self.rooms


class _Follower:
    """A profile function that records the package's frames that hold the followed objects."""

    def __init__(self, value: Any):
        self.paths = set()
        self.objects = []
        self.seen: set[tuple] = set()
        self.modules: list[str] = []
        self.places: list[str] = []
        if isinstance(value, str | os.PathLike):
            self.paths.add(os.fspath(value))
        else:
            self.objects.append(value)

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if not _is_ours(frame):
            return
        if event == "call" and self._holds(frame):
            self._note(frame)
        if event == "return" and any(map(self._is_path, _arguments(frame))):
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, nn.Module) and not self._is_object(part):
                    self.objects.append(part)

    def _is_path(self, value: Any) -> bool:
        return isinstance(value, str | os.PathLike) and os.fspath(value) in self.paths

    def _is_object(self, value: Any) -> bool:
        return any(value is one for one in self.objects)

    def _holds(self, frame: FrameType) -> bool:
        return any(self._is_path(one) or self._is_object(one) for one in _arguments(frame))

    def _note(self, frame: FrameType) -> None:
        caller = _ours(frame.f_back)
        holder = caller
        while holder is not None and not self._holds(holder):
            holder = _ours(holder.f_back)
        room = frame.f_globals["__name__"]
        if holder is not None and holder.f_globals["__name__"] == room:
            return
        line = "start"
        if caller is not None:
            line = f"{caller.f_globals['__name__']}:{caller.f_lineno}"
        if (line, frame.f_code) not in self.seen:
            self.seen.add((line, frame.f_code))
            self.modules.append(room)
            self.places.append(f"{line} -> {room}.{frame.f_code.co_qualname}")


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def _ours(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the package, starting from `frame`."""
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame


def _arguments(frame: FrameType) -> list[Any]:
    """Return a frame's named arguments without self; of a list or tuple, its items."""
    code = frame.f_code
    found = []
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = frame.f_locals.get(name)
        if name != "self":
            found += value if type(value) in (list, tuple) else [value]
    return found


def follow(function: Callable, value: Any, *arguments: Any, **settings: Any) -> Walk:
    """Call a function and follow its first argument, `value`, through the package."""
    follower = _Follower(value)
    before = sys.getprofile()
    sys.setprofile(follower)
    try:
        result = function(value, *arguments, **settings)
    finally:
        sys.setprofile(before)
    return Walk(result, follower.modules, follower.places)
