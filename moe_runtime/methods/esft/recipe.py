"""A whole ESFT study as one YAML file: the model, its tasks, and how they are scored, selected and trained.

    base_model: deepseek-ai/DeepSeek-V2-Lite        or null, with `pretrain`
    tasks: {law: {train: law.jsonl, ...}, ...}      general: {train: ..., held_out: ...}
    scores: {n_tokens: 131072, variant: v1}         p: {gate: 0.1, token: 0.2}
    fft, lora, esft: {steps, learning_rate, ...}    mix: 1.0, rows of general data per row of a task

The defaults are the paper's (arXiv 2407.01906, Sec. 4.3) and, where it is silent, the released code's.

The rows of ESFT's tasks: read, told apart from those held out, tokenized and joined; and tasks that come with Python.

Tasks of the standard library are made from its documented functions: `code` asks for one by its docstring, `docstring` for the
docstring of one, `names` for its name, and `case` for the docstring's first sentence, given in upper case. Held-out rows are
of files that nothing was trained on, for every task the same files.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_runtime.config import check_choice, check_fraction, check_number, check_positive
from moe_runtime.experiments import recipe as recipes
from moe_runtime.experiments.corpora import standard_library_pairs, standard_library_text
from moe_runtime.experiments.recipe import DTYPES, Node, Pretrain, Rows, Training, check_base, check_names
from moe_runtime.io import rows as data
from moe_runtime.io.prompts import PROMPTS, put_prompt
from moe_runtime.methods.esft.selection import SCORES, VARIANTS, check_p

GENERAL = data.BUILT_IN  # the source text itself: what the small base was trained on
HIDDEN = "f"  # the name of a function whose name is asked for


def check_source(source: str) -> None:
    """Raise ValueError for a name of the standard library's tasks that is none of them."""
    if source.startswith(f"{GENERAL}/") and source not in BUILT_IN:
        raise ValueError(
            f"train is {source!r}; want one of {', '.join(BUILT_IN)}, a file, a folder or an id of the Hub"
        )


def task_rows(tokenizer, task, recipe) -> dict:
    """Return the rows of a task or of the general text, tokenized: train, validation and held_out, the first joined.

    No row is in two of them. `task` is a Task of `recipe`. Raises ValueError for data that cannot be read or have too
    few rows.
    """
    built_in = _built_in(task)
    if built_in is not None:
        train, held_out = built_in
    elif task.held_out is None:
        train, held_out = data.hold_out(data.read_rows(task.train, task.split), task.held_out_rows)
    else:
        train, held_out = data.read_rows(task.train, task.split), data.read_rows(task.held_out, task.held_out_split)
        known = {str(row) for row in held_out}
        left = [place for place, row in enumerate(train) if str(row) not in known]
        if not left:
            raise ValueError(f"held_out is {task.held_out!r}, which has every row of train; want other rows")
        train = train.select(left)
    train, validation = data.hold_out(train, task.validation_rows, seed=1)
    parts = {}
    for name, rows, count in (
        ("train", train, task.limit), ("validation", validation, task.validation_rows),
        ("held_out", held_out, task.held_out_rows),
    ):  # fmt: skip
        put = (put_prompt(row, task.prompt) for row in rows)
        parts[name] = data.tokenize_pairs(tokenizer, put, recipe.max_length, limit=count)
    if recipe.pack:
        parts["train"] = join(parts["train"], recipe.max_length, tokenizer.bos_token_id, recipe.drop_bos)
    return parts


def join(rows: Iterable[Mapping], length: int, bos: int | None, drop_bos: float = 0.0, seed: int = 0):
    """Join samples, in an order drawn by `seed`, to a datasets.Dataset of rows of `length` ids, as ESFT's code does.

    Of the sample that a row ends with, what does not fit is cut off at its start, so its answer stays. A sample within
    a row begins without BOS with the probability `drop_bos`. Samples of one row see each other. The last row may be
    shorter.
    """
    order, generator = [dict(row) for row in rows], random.Random(seed)
    generator.shuffle(order)
    joined: list[tuple[list[int], list[int]]] = []
    ids, labels = [], []
    for row in order:
        skip = int(bool(ids) and row["input_ids"][:1] == [bos] and generator.random() < drop_bos)
        room = length - len(ids)
        own, wanted = row["input_ids"][skip:][-room:], row["labels"][skip:][-room:]
        ids, labels = ids + own, labels + wanted
        if len(ids) == length:
            joined.append((ids, labels))
            ids, labels = [], []
    if any(label != -100 for label in labels[1:]):
        joined.append((ids, labels))
    return data.require("datasets").Dataset.from_dict(
        {"input_ids": [r[0] for r in joined], "labels": [r[1] for r in joined]}
    )


def mixed(rows, general, ratio: float):
    """Return `rows` and `ratio` times as many of `general`, which are repeated where there are too few."""
    count = round(ratio * len(rows))
    if not count:
        return rows
    return data.require("datasets").concatenate_datasets(
        [rows, general.select([i % len(general) for i in range(count)])]
    )


def _built_in(task) -> tuple | None:
    """Return train and held-out rows of a task of the standard library; None for other sources."""
    make = BUILT_IN.get(task.train)
    if make is None:
        return None
    of = data.require("datasets").Dataset.from_list
    return tuple(of(rows) for rows in make())


def _pairs(make: Callable[[str, str, str], tuple[str, str] | None]) -> Callable[[], tuple]:
    """Return what makes rows of (heading, docstring, source) of each documented function; without rows of None."""

    def rows() -> tuple:
        train, held_out = (_made(part, make) for part in standard_library_pairs())
        return _named(train), _named(pair for pair in held_out if pair not in train)

    return rows


def _made(rows: Sequence[Mapping[str, str]], make) -> dict[tuple[str, str], None]:
    """The pairs made from functions, in their order, none of them twice."""
    split = ((*row["prompt"].partition("\n")[::2], row["completion"]) for row in rows)
    made = (make(heading, doc.strip(), source) for heading, doc, source in split)
    return dict.fromkeys(pair for pair in made if pair is not None)


def _named(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def _code(heading: str, doc: str, source: str) -> tuple[str, str]:
    return f"{heading}\n{doc}\n", source


def _docstring(heading: str, doc: str, source: str) -> tuple[str, str]:
    return f"Document this Python code.\n{source}\n", doc


def _names(heading: str, doc: str, source: str) -> tuple[str, str] | None:
    name = heading.partition("(")[0].rpartition(" ")[2]
    if name.startswith("__") or f"def {name}(" not in source:
        return None
    hidden = source.replace(f"def {name}(", f"def {HIDDEN}(", 1)
    return f"Name this Python function.\n{hidden}\n", name


def _case(heading: str, doc: str, source: str) -> tuple[str, str] | None:
    sentence = " ".join(doc.partition("\n\n")[0].split())
    if not 20 <= len(sentence) <= 120 or sentence == sentence.upper():
        return None
    return f"Write this in the usual case.\n{sentence.upper()}\n", sentence


def _text() -> tuple:
    """The source text, in an order that mixes the files; no piece is in both parts."""
    train = list(dict.fromkeys(standard_library_text()))
    known = set(train)
    held_out = [text for text in dict.fromkeys(standard_library_text(held_out=True)) if text not in known]
    for documents in (train, held_out):
        random.Random(0).shuffle(documents)
    return tuple([{"text": document} for document in documents] for documents in (train, held_out))


BUILT_IN = {
    GENERAL: _text,
    f"{GENERAL}/code": _pairs(_code),
    f"{GENERAL}/docstring": _pairs(_docstring),
    f"{GENERAL}/names": _pairs(_names),
    f"{GENERAL}/case": _pairs(_case),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task(Rows):
    """The rows of a task: to train on, to choose the best step by, and to judge by."""

    validation_rows: int = 64  # of the train rows; nothing is trained on them, nor judged by them
    prompt: str = "deepseek"

    def __post_init__(self):
        Rows.__post_init__(self)
        check_source(self.train)
        check_choice("prompt", self.prompt, tuple(PROMPTS))
        check_positive("validation_rows", self.validation_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class General(Task):
    """Text of no task: what a model should not forget; mixed in while it trains, and judged by."""

    train: str = GENERAL


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainMoE(Pretrain):
    """A small DeepSeek-V2 to start from: fine-grained experts beside shared ones, pre-trained on the standard library.

    `intermediate_size` is the dense layers'.
    """

    num_experts: int = 32
    top_k: int = 4
    expert_size: int = 32  # an expert's intermediate size
    shared_experts: int = 2
    dense_layers: int = 1  # the first ones, without experts
    balance_loss_coef: float = 0.001

    def __post_init__(self):
        Pretrain.__post_init__(self)
        for name in ("num_experts", "top_k", "expert_size", "shared_experts", "dense_layers"):
            check_positive(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, num_experts is {self.num_experts}; want top_k <= num_experts")
        if self.dense_layers >= self.num_layers:
            raise ValueError(f"dense_layers is {self.dense_layers}, num_layers is {self.num_layers}; want fewer")
        check_number("balance_loss_coef", self.balance_loss_coef)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning(Training):
    """A training of the study: AdamW at a constant rate, ended with the weights of its lowest validation loss."""

    warmup_steps: int | None = 0
    batch_size: int = 32
    optimizer: str = "adamw_torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    schedule: str = "constant"
    max_grad_norm: float = 1.0
    keep_best: bool = True

    def __post_init__(self):
        Training.__post_init__(self)
        for name in ("adam_beta1", "adam_beta2"):
            check_fraction(name, getattr(self, name), one=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora(Node):
    """The baseline of low-rank matrices on all linear layers and experts, embeddings and head excepted."""

    rank: int = 8
    scaling: float = 2.0  # alpha / rank
    training: Tuning

    def __post_init__(self):
        check_positive("rank", self.rank)
        check_number("scaling", self.scaling, positive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring(Node):
    """The sample that experts are scored on."""

    n_tokens: int = 131072
    variant: str = "v1"

    def __post_init__(self):
        check_positive("n_tokens", self.n_tokens)
        check_choice("variant", self.variant, VARIANTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds(Node):
    """p of the two scores."""

    gate: float = 0.1
    token: float = 0.2

    def __post_init__(self):
        for name in ("gate", "token"):
            try:
                check_p(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class EsftRecipe(Node):
    """A whole study."""

    method: str = "esft"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: PretrainMoE | None = None
    dtype: str = "float32"
    trained_dtype: str | None = None  # of the experts that train; None: `dtype`
    max_length: int = 4096
    pack: bool = True  # samples joined to rows of max_length
    drop_bos: float = 0.2  # of the samples within a row, so many begin without BOS
    tasks: dict[str, Task]
    general: General = field(default_factory=General)
    mix: float = 1.0
    scores: Scoring = field(default_factory=Scoring)
    p: Thresholds = field(default_factory=Thresholds)
    score: str = "gate"  # that a whole run selects by; tables take both
    fft: Tuning
    lora: Lora
    esft: Tuning
    evaluations: int = 5  # times that a training takes the validation loss
    seed: int = 0

    def __post_init__(self):
        check_choice("method", self.method, ("esft",))
        check_choice("dtype", self.dtype, DTYPES)
        if self.trained_dtype is not None:
            check_choice("trained_dtype", self.trained_dtype, DTYPES)
        check_positive("max_length", self.max_length)
        check_positive("evaluations", self.evaluations)
        check_number("mix", self.mix)
        check_choice("score", self.score, SCORES)
        check_fraction("drop_bos", self.drop_bos)
        check_base(self)
        if not self.tasks:
            raise ValueError("tasks is {}; want at least one task")
        prompts = {part.prompt for part in (*self.tasks.values(), self.general)}
        if {"deepseek", "chat"} <= prompts:
            raise ValueError("prompt is 'deepseek' in one place and 'chat' in another; want one chat template for all")
        if "general" in self.tasks:
            raise ValueError("tasks has the name 'general', which is that of the general text; want another")
        check_names("tasks", self.tasks)


def shipped_recipes() -> list[str]:
    """Return the names of the studies that come with the package."""
    return recipes.shipped_recipes("esft")


def load_recipe(path_or_name: str | Path) -> EsftRecipe:
    """Read a YAML file, or a shipped study by its name; raises ValueError with the file and the key of a mistake."""
    return recipes.load_recipe(path_or_name, EsftRecipe)
