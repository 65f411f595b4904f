"""Common parts of the methods' recipes: one YAML file per run, checked by pydantic models.

papers/METHOD/recipe.py defines a method's whole recipe; keys follow mergekit where it has them
(base_model, dtype). Any mistake raises a one-line ValueError with the file, the key, the expected
value and the given one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from moe_runtime.hf.training.settings import Count, Node, Positive
from moe_runtime.io.prompts import TRAIN_ON
from moe_runtime.io.yaml_files import read_yaml
from moe_runtime.methods.prompts import PROMPTS

METHODS = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16", "float16")


Dtype = Literal[DTYPES]
Prompt = Literal[tuple(PROMPTS)]
# excluded at its default, so that the hashes of recipes without it do not change
TrainOn = Annotated[Literal[TRAIN_ON], Field(exclude_if=lambda value: value == "assistant")]


class RowSource(Node):
    """One of several sources of rows; each has its own columns."""

    source: str
    # relative number of rows; given for all sources, or for none to use all rows
    weight: Positive | None = None
    limit: Count | None = None  # maximum number of rows, drawn from all
    split: str | None = None  # None: that of the recipe


def _as_sources(value: Any) -> str | list[RowSource]:
    """Return a single source unchanged, several as a list of Source."""
    if not isinstance(value, str | list) or not value:
        raise PydanticCustomError("sources", "a source, or a list of sources")
    if isinstance(value, str):
        return value
    sources = []
    for index, one in enumerate(value):
        try:
            sources.append(
                one
                if isinstance(one, RowSource)
                else RowSource.from_dict({"source": one} if isinstance(one, str) else one)
            )
        except ValueError as error:
            raise ValueError(f"{index}.{error}") from None
    weighed = sum(one.weight is not None for one in sources)
    if weighed not in (0, len(sources)):
        raise ValueError(
            f"weight must be given for all sources or for none, but {weighed} of {len(sources)} "
            "have one"
        )
    return sources


Sources = Annotated[Any, PlainValidator(_as_sources)]  # str | list[Source]


class DataSplits(Node):
    """Training and held-out rows: their sources and numbers."""

    # a built-in source, a .jsonl, .json or .parquet file, a folder of them, or a Hub id; or several
    train: Sources
    split: str = "train"
    # None: `held_out_rows` of the train rows, which are then not trained on
    held_out: Sources | None = None
    held_out_split: str = "test"
    held_out_rows: Count = 256
    limit: Count | None = None  # maximum number of training rows
    # whether weighted sources that run out start again, until each has been read once
    repeat: bool = Field(False, exclude_if=lambda repeats: not repeats)

    def listed(self, part: str = "train") -> list[RowSource]:
        """Return the sources of `train` or `held_out`, each with its split; an empty list if not
        given.
        """
        value = getattr(self, part)
        split = self.split if part == "train" else self.held_out_split
        sources = value if isinstance(value, list) else [RowSource(source=value)] if value else []
        return [one.change(split=one.split or split) for one in sources]

    @property
    def sources(self) -> list[str]:
        """The names of all sources, those of `train` first."""
        sources = []
        for part in ("train", "held_out"):
            for one in self.listed(part):
                sources.append(one.source)
        return sources

    def __str__(self) -> str:
        return " + ".join(one.source for one in self.listed())


class Pretrain(Node):
    """A small Llama to start from, pre-trained here on the source text of Python's standard
    library.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    steps: Count
    batch_size: Count
    learning_rate: Positive = 1e-3
    documents: Count | None = None  # number of documents of about 2,000 characters; all by default
    # documents of each built-in domain, instead of `documents`
    domains: dict[str, Count] | None = Field(None, exclude_if=lambda domains: domains is None)
    seed: int = 0  # independent of the run's seed: every seed tunes the same base
    optimizer: str = Field("adamw_torch", exclude_if=lambda name: name == "adamw_torch")
    split_digits: bool = Field(False, exclude_if=lambda split: not split)  # one token per digit


def check_base(recipe) -> None:
    """Raise ValueError unless a recipe has one of base_model and pretrain."""
    if (recipe.base_model is None) == (recipe.pretrain is None):
        if recipe.pretrain is None:
            given = "neither"
        else:
            given = f"both (base_model is {recipe.base_model!r})"
        raise ValueError(
            f"pretrain or base_model must be given, but got {given}. With pretrain, set "
            "base_model: null"
        )


def check_names(of: str, names: Iterable[str], least: int = 1) -> None:
    """Raise ValueError if `of` has fewer than `least` names, or one that cannot name a folder."""
    names = list(names)
    bad = [name for name in names if not name.replace("-", "").replace("_", "").isalnum()]
    if len(names) < least or bad:
        few = f"must have at least {least}, but got {', '.join(names) or 'none'}"
        if bad:
            named = (
                f"must be named with letters, digits, - and _, as folders are, but got {bad[0]!r}"
            )
        else:
            named = few
        raise ValueError(f"{of} {named}")


def load_recipe(kind: type[Node], path_or_name: str | Path | Node):
    """Read a YAML file, or a shipped recipe by name, as the recipe `kind` of a method; a recipe is
    returned unchanged.

    Raises a ValueError that names the file and the key of a mistake.
    """
    if isinstance(path_or_name, kind):
        return path_or_name
    path = recipe_path(path_or_name, kind.model_fields["method"].default)
    values = read_yaml(path)
    try:
        return kind.from_dict({"name": path.stem} | values if isinstance(values, dict) else values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def shipped_recipes(method: str) -> list[str]:
    """Return the names of a method's recipes in the package."""
    return sorted(path.stem for path in (METHODS / method / "recipes").glob("*.yaml"))


def recipe_path(path_or_name: str | Path, *methods: str) -> Path:
    """Return the file of a recipe: the path itself, or the shipped recipe of that name in the first
    of `methods` that has it.

    The name may include the method: esft/tiny.
    """
    if Path(path_or_name).is_file():
        return Path(path_or_name)
    known = {}
    for method in methods:
        for name in shipped_recipes(method):
            known[f"{method}/{name}"] = method
    for name in (str(path_or_name), *(f"{method}/{path_or_name}" for method in methods)):
        if name in known:
            return METHODS / known[name] / "recipes" / f"{name.partition('/')[2]}.yaml"
    names = ", ".join(name if len(methods) > 1 else name.partition("/")[2] for name in known)
    raise ValueError(
        f"Recipe {str(path_or_name)!r} does not exist. Pass a YAML file or one of {names}"
    )


def method_of(path: Path) -> str:
    """Return the method that a recipe file names, by default xft."""
    values = read_yaml(path)
    return values.get("method", "xft") if isinstance(values, dict) else "xft"
