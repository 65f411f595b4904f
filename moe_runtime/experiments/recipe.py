"""A whole XFT run as one YAML file: what is trained, on which rows, for how long.

    base_model: deepseek-ai/deepseek-coder-1.3b-base      a folder or the Hub's id; or null, with `pretrain`
    data: {train, held_out, prompt, max_length, ...}      experts: {num_experts, top_k, gate, ... | preset}
    shared_rate: 0.75                                     sft, tune, mix: {epochs | steps, learning_rate, ...}

The words are mergekit's where it has them (base_model, dtype). A mistake is one ValueError with the file and the key.

What a recipe is made of: dataclasses that are built from YAML's mappings, with the key's whole name in each error.

YAML files of settings: one document, each key once, and no more values than a hand would write.
"""

import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_runtime import config
from moe_runtime.config import (
    MoEConfig,
    check_choice,
    check_fraction,
    check_number,
    check_positive,
    check_shared_rate,
    shown,
)
from moe_runtime.io.prompts import PROMPTS
from moe_runtime.io.rows import BUILT_IN


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


MAX_VALUES = 100_000  # that aliases may make of a file: nine lines can stand for a billion
_MERGE = "tag:yaml.org,2002:merge"
# what PyYAML's constructors raise for a value that is none of its tag, and its parser for one in too many others
_NAKED = (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError, RecursionError)


def read_yaml(path: Path) -> Any:
    """Read a YAML file's one document; raises ValueError, with the file, for what is none."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            _check_nodes(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, *_NAKED) as error:
        why = " ".join(str(error).split())[:500] or type(error).__name__
        raise ValueError(f"{path} is not valid YAML ({why}); want a recipe") from error


def _check_nodes(node: yaml.Node | None) -> None:
    """Raise ValueError for a key given twice, of which YAML keeps the last in silence, and for aliases without bound."""
    stack, count = [] if node is None else [node], 0
    while stack:
        node, count = stack.pop(), count + 1
        if count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values, aliases written out")
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
            twice = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
            if twice is not None:
                raise ValueError(f"the key {twice[:80]!r} is given twice{node.start_mark}")
            stack += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += node.value


METHODS = Path(__file__).resolve().parents[1] / "methods"
DTYPES = ("float32", "bfloat16", "float16")
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
OF_THE_BASE = ("hidden_size", "intermediate_size", "hidden_act", "gated", "bias")  # fields of MoEConfig no recipe sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Node):
    """Rows to tune on and rows to judge by: where they are, and how many."""

    train: str  # what comes with the package, a .jsonl, .json, .parquet file, a folder of them, an id of the Hub
    split: str = "train"
    held_out: str | None = None  # None: `held_out_rows` of the train rows, on which nothing is trained
    held_out_split: str = "test"
    held_out_rows: int = 256
    limit: int | None = None  # rows to train on at most

    def __post_init__(self):
        check_positive("held_out_rows", self.held_out_rows)
        if self.limit is not None:
            check_positive("limit", self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Rows):
    """The rows of an XFT run, and how they are put."""

    train: str = BUILT_IN
    prompt: str = "magicoder"
    max_length: int = 1024

    def __post_init__(self):
        Rows.__post_init__(self)
        check_choice("prompt", self.prompt, tuple(PROMPTS))
        check_positive("max_length", self.max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrain(Node):
    """A small Llama to start from, pre-trained here on the source text of Python's standard library."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    steps: int
    batch_size: int
    learning_rate: float = 1e-3
    documents: int | None = None  # of the text, about 2,000 characters each; all by default
    seed: int = 0  # not the run's seed: every seed tunes the same base

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "steps", "batch_size"):
            check_positive(name, getattr(self, name))
        if self.documents is not None:
            check_positive("documents", self.documents)
        check_number("learning_rate", self.learning_rate, positive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(Node):
    """One training. The defaults are the official XFT code's: Adafactor, a linear schedule, no clipping."""

    epochs: float | None = None
    steps: int | None = None
    learning_rate: float
    warmup_steps: int | None = None  # None: one step in twenty
    batch_size: int = 64  # rows per optimizer step, all processes together
    per_device_batch_size: int | None = None  # None: all rows of a process at once
    optimizer: str = "adafactor"  # a name that transformers' TrainingArguments takes as optim
    weight_decay: float = 0.0
    schedule: str = "linear"
    max_grad_norm: float = -1.0  # -1: no clipping
    bf16: bool = False
    gradient_checkpointing: bool = False
    save_steps: int | None = None  # a checkpoint every so many steps, from which a killed run goes on

    def __post_init__(self):
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs is {self.epochs}, steps is {self.steps}; want one of the two")
        if self.epochs is not None:
            check_number("epochs", self.epochs, positive=True)
        for name in ("steps", "per_device_batch_size", "save_steps"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_positive("batch_size", self.batch_size)
        check_number("learning_rate", self.learning_rate, positive=True)
        check_number("weight_decay", self.weight_decay)
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; want an integer of 0 or more")
        check_choice("schedule", self.schedule, SCHEDULES)
        if not (self.max_grad_norm == -1 or 0 < self.max_grad_norm < math.inf):
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; want a number above 0, or -1 for no clipping")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ewa(Node):
    """The baseline of expert weight averaging; its training is that of `sft` unless given."""

    share: float = 0.3
    schedule: str = "constant"
    training: Training | None = None

    def __post_init__(self):
        check_choice("schedule", self.schedule, ("constant", "linear"))
        check_fraction("share", self.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Node):
    """A whole run. `experts` holds MoEConfig's fields, without those that the base decides; a preset in it is resolved."""

    method: str = "xft"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: Pretrain | None = None
    dtype: str = "float32"
    data: Data = field(default_factory=Data)
    experts: dict = field(default_factory=dict)
    shared_rate: float = 0.75
    sft: Training
    tune: Training
    mix: Training
    ewa: Ewa = field(default_factory=Ewa)
    evaluations: int = 4  # times that a training takes the held-out loss
    seed: int = 0

    def __post_init__(self):
        check_choice("method", self.method, ("xft",))
        check_choice("dtype", self.dtype, DTYPES)
        check_positive("evaluations", self.evaluations)
        check_base(self)
        check_shared_rate(self.shared_rate)
        object.__setattr__(self, "experts", resolve_experts(self.experts))

    @property
    def ewa_training(self) -> Training:
        """The training of the EWA baseline."""
        return self.ewa.training or self.sft


def check_base(recipe) -> None:
    """Raise ValueError unless a recipe has one of base_model and pretrain."""
    if (recipe.base_model is None) == (recipe.pretrain is None):
        other = "null" if recipe.pretrain is None else f"given, base_model is {recipe.base_model!r}"
        raise ValueError(f"pretrain is {other}; want one of the two: base_model, or pretrain with base_model: null")


def check_names(of: str, names: Iterable[str]) -> None:
    """Raise ValueError for a name of `of` that cannot name a folder."""
    for name in names:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{of} has the name {name!r}; want letters, digits, - and _, as it names a folder")


def resolve_experts(values: Mapping) -> dict:
    """Return MoEConfig's settings of `values`, whose preset, if any, gives what they leave out; raises ValueError."""
    values = dict(values)
    preset = values.pop("preset", None)
    if preset is not None:
        check_choice("experts.preset", preset, tuple(config.PRESETS))
        values = dict(config.PRESETS[preset]) | values
    known = [f.name for f in fields(MoEConfig) if f.name not in OF_THE_BASE]
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise ValueError(
            f"experts.{unknown[0][:200]} is no setting of experts; want some of preset, {', '.join(known)}"
        )
    hints = typing.get_type_hints(MoEConfig)
    values = {key: value_of(hints[key], value, f"experts.{key}") for key, value in values.items()}
    try:
        MoEConfig(hidden_size=1, intermediate_size=1, **values)
    except ValueError as error:
        raise ValueError(f"experts.{error}") from error
    if values.get("balance_loss", "none") == "none" and values.get("balance_loss_coef"):
        raise ValueError(
            f"experts.balance_loss_coef is {values['balance_loss_coef']}, balance_loss is 'none'; want both"
        )
    return values


def shipped_recipes(method: str = "xft") -> list[str]:
    """Return the names of a method's recipes that come with the package."""
    return sorted(path.stem for path in (METHODS / method / "recipes").glob("*.yaml"))


def load_recipe(path_or_name: str | Path, kind: type[Node] | None = None):
    """Read a YAML file, or a shipped recipe of the method by its name, as `kind`: Recipe unless given.

    Raises ValueError with the file and the key of a mistake.
    """
    kind = kind or Recipe
    path = recipe_path(path_or_name, kind.__dataclass_fields__["method"].default)
    values = read_yaml(path)
    try:
        if isinstance(values, Mapping):
            values = {"name": path.stem} | values
        return kind.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def recipe_path(path_or_name: str | Path, *methods: str) -> Path:
    """Return the file of a recipe: the path itself, or a shipped one by its name in the first of `methods` that has it.

    A method's name may stand before it: esft/tiny.
    """
    known = {
        f"{method}/{name}": METHODS / method / "recipes" / f"{name}.yaml"
        for method in methods
        for name in shipped_recipes(method)
    }
    if Path(path_or_name).is_file():
        return Path(path_or_name)
    for name in (str(path_or_name), *(f"{method}/{path_or_name}" for method in methods)):
        if name in known:
            return known[name]
    names = ", ".join(known if len(methods) > 1 else (path.stem for path in known.values()))
    raise ValueError(f"recipe is {str(path_or_name)!r}; want a YAML file, or one of {names}")


def method_of(path: Path) -> str:
    """Return the method that a recipe's file names, xft unless it does."""
    values = read_yaml(path)
    return values.get("method", "xft") if isinstance(values, Mapping) else "xft"
