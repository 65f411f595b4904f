"""Commands of this package, made like those of `moe_runtime.cli`."""

import functools
from pathlib import Path

from moe_runtime.cli import verbs

PROGRAM = "python -m papers"
FOLDER = Path(__file__).resolve().parent

group = functools.partial(verbs.group, program=PROGRAM)
verb = functools.partial(verbs.verb, program=PROGRAM)


def recipes(method: str | None = None) -> list[str]:
    """List the recipes in this package: the names of a method's, or all as METHOD/NAME."""
    paths = sorted(FOLDER.glob(f"{method or '*'}/recipes/*.yaml"))
    if method is not None:
        return [path.stem for path in paths]
    return [f"{path.parts[-3]}/{path.stem}" for path in paths]
