"""A whole method from its recipe, whichever the recipe names."""

import importlib
from pathlib import Path

from moe_runtime.config import check_choice
from moe_runtime.studies.recipe import method_of, recipe_path

STAGES = {
    "xft": "moe_runtime.studies.xft_stages",
    "esft": "moe_runtime.studies.esft_stages",
    "upit": "moe_runtime.studies.upit_stages",
    "ultrafuser": "moe_runtime.studies.fuser_stages",
}


def run(path_or_name: str | Path, out: str | Path, seed: int | None = None, say=print) -> list:
    """Run the recipe's method and return the results of its stages; `seed` is the recipe's unless given."""
    path = recipe_path(path_or_name, *STAGES)
    method = method_of(path)
    check_choice("method", method, tuple(STAGES))
    return importlib.import_module(STAGES[method]).run(path, out, seed=seed, say=say)
