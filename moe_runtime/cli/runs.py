"""A whole method from its recipe, whichever the recipe names."""

import importlib
from pathlib import Path

from moe_runtime.config import check_choice
from moe_runtime.experiments.recipe import method_of, recipe_path

STAGES = {
    "xft": "moe_runtime.methods.xft.study",
    "esft": "moe_runtime.methods.esft.study",
    "upit": "moe_runtime.methods.upit.study",
    "ultrafuser": "moe_runtime.methods.ultrafuser.study",
}


def run(path_or_name: str | Path, out: str | Path, seed: int | None = None, say=print) -> list:
    """Run the recipe's method and return the results of its stages; `seed` is the recipe's unless given."""
    path = recipe_path(path_or_name, *STAGES)
    method = method_of(path)
    check_choice("method", method, tuple(STAGES))
    return importlib.import_module(STAGES[method]).run(path, out, seed=seed, say=say)
