"""What the tables of UpIT take as options: checked against the recipe, before anything is made."""

from collections.abc import Callable, Sequence

from moe_runtime.config import check_choice, check_fraction, check_number, check_positive
from moe_runtime.studies.upit_preparing import NONE
from moe_runtime.studies.upit_recipe import UpitRecipe, check_saved, count_saved

SHARES = (0.1, 0.2, 0.4, 1.0)  # 50, 100, 200 of the paper's 500 thousand rows
WHICH = ("front", "uniform", "back")
EPOCHS = ((2.0, 2.0), (2.0, 6.0), (4.0, 4.0))
ACTIVE = (1, 2, 4)
EXPANSIONS = {"none": NONE, "random": "random", "genetic": "farthest"}


def _form(recipe: UpitRecipe, form: str | None) -> str:
    """Return the kind of expert that a table is of, the recipe's first unless given."""
    if form is None:
        return recipe.forms[0]
    check_choice("form", form, ("ffn", "lora"))
    if form not in recipe.forms:
        raise ValueError(f"form is {form!r}, the recipe has trainings of {', '.join(recipe.forms)} alone; want that")
    return form


def _different(name: str, values: Sequence, check: Callable) -> tuple:
    """Return the values of an option, checked one by one; raises ValueError for none and for one given twice."""
    values = tuple(values)
    if not values or len(set(values)) < len(values):
        given = ", ".join(map(str, values)) or "not given"
        raise ValueError(f"{name} is {given}; want different ones")
    for value in values:
        check(value)
    return values


def check_named(known: Sequence[str]) -> Callable:
    """Return what checks a command whose options are a form and some of `known`, all unless given."""

    def check(recipe: UpitRecipe, form: str | None = None, strategies: Sequence[str] = tuple(known)) -> dict:
        form = _form(recipe, form)
        strategies = _different("strategy", strategies, lambda one: check_choice("strategy", one, tuple(known)))
        n, m = recipe.experts.num_experts, recipe.checkpoints.count
        if known is WHICH and min(m, n) >= (saved := count_saved(recipe, form)):
            raise ValueError(
                f"checkpoints.count is {m}, the tuning saves {saved}; want fewer: there is nothing to choose"
            )
        if known is EXPANSIONS and m >= n:
            raise ValueError(f"checkpoints.count is {m}, num_experts is {n}; want fewer: there is nothing to expand")
        if known is EXPANSIONS and "none" in strategies:
            check_saved(recipe, form, n, "num_experts")
        return {"form": form, "strategies": strategies}

    return check


def check_experts(
    recipe: UpitRecipe, form: str | None = None, sizes: Sequence[int] | None = None, active: Sequence[int] = ACTIVE
) -> dict:
    """Return the options of the table of experts and experts per token; unless given, `sizes` are the recipe's."""
    n, m = recipe.experts.num_experts, recipe.checkpoints.count
    sizes = sorted({max(m, 2), n}) if sizes is None else sizes
    sizes = _different("experts", sizes, lambda size: check_positive("experts", size))
    active = _different("active", active, lambda one: check_positive("active", one))
    if min(active) > max(sizes):
        raise ValueError(
            f"active is {min(active)}, experts is {max(sizes)}; want at most as many per token as there are"
        )
    if max(sizes) > m == 1:
        raise ValueError(f"experts is {max(sizes)}, checkpoints.count is 1; want two checkpoints to grow others from")
    return {"form": _form(recipe, form), "sizes": sizes, "active": active}


def check_data(recipe: UpitRecipe, form: str | None = None, shares: Sequence[float] = SHARES) -> dict:
    """Return the options of the table of shares of the data."""
    shares = _different("share", map(float, shares), lambda share: check_fraction("share", share, zero=False))
    return {"form": _form(recipe, form), "shares": shares}


def check_epochs(recipe: UpitRecipe, form: str | None = None, pairs: Sequence[Sequence[float]] = EPOCHS) -> dict:
    """Return the options of the table of epochs, those of an expert's tuning and of the mixture's."""
    form = _form(recipe, form)

    def check(pair: tuple) -> None:
        if len(pair) != 2:
            raise ValueError(f"epochs is {','.join(map(str, pair))}; want two numbers, such as 2,6")
        for epochs in pair:
            check_number("epochs", epochs, positive=True)
        check_saved(
            recipe.change(**{f"{form}__sft__epochs": pair[0]}), form, recipe.checkpoints.count, "checkpoints.count"
        )

    return {"form": form, "pairs": _different("epochs", [tuple(map(float, pair)) for pair in pairs], check)}
