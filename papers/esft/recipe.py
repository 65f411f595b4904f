"""A whole ESFT study as one YAML file: the model, its tasks, and how they are scored, selected and
trained.

    base_model: deepseek-ai/DeepSeek-V2-Lite        or null, with `pretrain`
    tasks: {law: {train: law.jsonl, ...}, ...}      general: {train: ..., held_out: ...}
    scores: {n_tokens: 131072, variant: v1}         p: {gate: 0.1, token: 0.2}
    fft, lora, esft: {steps, learning_rate, ...}    mix: 1.0, rows of general data per row of a task

The defaults are the paper's (arXiv 2407.01906, Sec. 4.3) and, where it is silent, the released
code's.

Built-in tasks are made from the standard library's documented functions: `code` asks for a function
by its docstring, `docstring` for its docstring, `names` for its name, and `case` for the
docstring's first sentence, given in upper case. Held-out rows come from files that are never
trained on, the same files for every task. `code`, `prose` and `arithmetic` without the prefix
`standard-library/` are the domains of the other methods' studies.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from moe_runtime.hf.training.settings import Count, Fraction, Node, Number, Positive, Steps
from moe_runtime.io import rows as data
from moe_runtime.methods.esft.packing import join
from moe_runtime.methods.esft.runs import EsftTraining
from moe_runtime.methods.esft.selection import SCORES, VARIANTS
from papers.engine import recipe as recipes
from papers.engine import stages
from papers.engine.corpora import (
    DOMAINS,
    domain_rows,
    domain_text,
    named_rows,
    standard_library_pairs,
    standard_library_text,
)
from papers.engine.recipe import (
    DataSplits,
    Dtype,
    Pretrain,
    Prompt,
    Sources,
    TrainOn,
    check_base,
    check_names,
)

GENERAL = data.BUILT_IN  # the source text itself: what the small base was trained on
HIDDEN = "f"  # replaces the name of a function in the task that asks for it


def task_rows(tokenizer, task, recipe) -> dict:
    """Return the tokenized rows of a task or of the general text: train, packed if the recipe says
    so, validation, held_out.

    No row is in two of them. `task` is a Task of `recipe`.
    """
    train, held_out = stages.split_rows(task, BUILT_IN)
    of = data.require("datasets").Dataset
    train = of.from_list(train) if isinstance(train, list) else train
    train, validation = data.hold_out(train, task.validation_rows, seed=1)
    parts = {}
    for name, rows, count in (
        ("train", train, task.limit),
        ("validation", validation, task.validation_rows),
        ("held_out", held_out, task.held_out_rows),
    ):
        parts[name] = data.tokenize_pairs(
            tokenizer,
            rows,
            recipe.max_length,
            limit=count,
            prompt=task.prompt,
            train_on=task.train_on,
        )
    if recipe.pack:
        parts["train"] = join(
            parts["train"],
            recipe.max_length,
            tokenizer.bos_token_id,
            recipe.drop_bos,
        )
    return parts


def mixed(rows, general, ratio: float):
    """Return `rows` and `ratio` times as many of `general`, repeated if there are too few."""
    count = round(ratio * len(rows))
    if not count:
        return rows
    return data.require("datasets").concatenate_datasets(
        [rows, general.select([i % len(general) for i in range(count)])]
    )


def _pairs(make: Callable[[str, str, str], tuple[str, str] | None]) -> Callable[[], tuple]:
    """Return a function that makes rows from (heading, docstring, source) of each documented
    function; None is skipped.
    """

    def rows() -> tuple:
        train, held_out = (_made(part, make) for part in standard_library_pairs())
        return named_rows(train), named_rows(pair for pair in held_out if pair not in train)

    return rows


def _made(rows: Sequence[Mapping[str, str]], make) -> dict[tuple[str, str], None]:
    """Return the distinct pairs made from functions, in order."""
    made = {}
    for row in rows:
        heading, _, doc = row["prompt"].partition("\n")
        pair = make(heading, doc.strip(), row["completion"])
        if pair is not None:
            made[pair] = None
    return made


def _code(heading: str, doc: str, source: str) -> tuple[str, str]:
    return f"{heading}\n{doc}\n", source


def _docstring(heading: str, doc: str, source: str) -> tuple[str, str]:
    return f"Document this Python code.\n{source}\n", doc


def _names(heading: str, doc: str, source: str) -> tuple[str, str] | None:
    name = heading.partition("(")[0].rpartition(" ")[2]
    if name.startswith("__") or f"def {name}(" not in source:
        return None
    hidden = source.replace(
        f"def {name}(",
        f"def {HIDDEN}(",
        1,
    )
    return f"Name this Python function.\n{hidden}\n", name


def _case(heading: str, doc: str, source: str) -> tuple[str, str] | None:
    sentence = " ".join(doc.partition("\n\n")[0].split())
    if not 20 <= len(sentence) <= 120 or sentence == sentence.upper():
        return None
    return f"Write this in the usual case.\n{sentence.upper()}\n", sentence


def _text() -> tuple:
    """Return the source text, the files shuffled; no piece is in both parts."""
    train = list(dict.fromkeys(standard_library_text()))
    known = set(train)
    held_out = []
    for text in dict.fromkeys(standard_library_text(held_out=True)):
        if text not in known:
            held_out.append(text)
    for documents in (train, held_out):
        random.Random(0).shuffle(documents)
    return tuple([{"text": document} for document in documents] for documents in (train, held_out))


BUILT_IN = {
    GENERAL: _text,
    f"{GENERAL}/code": _pairs(_code),
    f"{GENERAL}/docstring": _pairs(_docstring),
    f"{GENERAL}/names": _pairs(_names),
    f"{GENERAL}/case": _pairs(_case),
    **{name: functools.partial(domain_rows, name) for name in DOMAINS},
}


class Task(DataSplits):
    """The rows of a task: for training, for choosing the best step, and for evaluation."""

    validation_rows: Count = 64  # taken from the train rows; neither trained on nor evaluated
    prompt: Prompt = "deepseek"
    train_on: TrainOn = "assistant"

    @model_validator(mode="after")
    def _check_source(self):
        unknown = []
        for one in self.sources:
            if one.startswith(f"{GENERAL}/") and one not in BUILT_IN:
                unknown.append(one)
        if unknown:
            raise ValueError(
                f"train must be one of {', '.join(BUILT_IN)} or other data, but got {unknown[0]!r}"
            )
        return self


class General(Task):
    """General text, which a model should not forget: mixed into its training data, and
    evaluated.
    """

    train: Sources = GENERAL


class PretrainMoE(Pretrain):
    """A small DeepSeek-V2 to start from: fine-grained experts beside shared ones, pre-trained on
    the standard library.

    `intermediate_size` is that of the dense layers.
    """

    num_experts: Count = 32
    top_k: Count = 4
    expert_size: Count = 32  # an expert's intermediate size
    shared_experts: Count = 2
    dense_layers: Steps = 1  # the first ones, without experts
    balance_loss_coef: Number = 0.001
    # documents of code, prose and arithmetic, in place of the standard library's source
    domains: dict[Literal[DOMAINS], Count] | None = Field(
        None, exclude_if=lambda counts: counts is None
    )

    @model_validator(mode="after")
    def _check_sizes(self):
        if self.top_k > self.num_experts or self.dense_layers >= self.num_layers:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts}), and "
                f"dense_layers ({self.dense_layers}) below num_layers ({self.num_layers})"
            )
        return self


def documents(pretrain: PretrainMoE) -> list[str]:
    """Return the texts that a small base and its tokenizer are trained on."""
    if pretrain.domains is None:
        return stages.documents(pretrain)
    documents = []
    for name, count in pretrain.domains.items():
        documents.extend(domain_text(name, limit=count))
    return documents


class Lora(Node):
    """The LoRA baseline: low-rank matrices on all linear layers and experts, but not on embeddings
    and head.
    """

    rank: Count = 8
    scaling: Positive = 2.0  # alpha / rank
    training: EsftTraining


class Scoring(Node):
    """The sample that experts are scored on."""

    n_tokens: Count = 131072
    variant: Literal[VARIANTS] = "v1"


Threshold = Annotated[Positive, Field(le=1)]


class Thresholds(Node):
    """The threshold p of each score."""

    gate: Threshold = 0.1
    token: Threshold = 0.2


class EsftRecipe(Node):
    """A whole study."""

    method: Literal["esft"] = "esft"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: PretrainMoE | None = None
    dtype: Dtype = "float32"
    trained_dtype: Dtype | None = None  # of the experts that train; None: `dtype`
    max_length: Count = 4096
    pack: bool = True  # samples joined to rows of max_length
    drop_bos: Fraction = 0.2  # share of the samples within a row that start without BOS
    tasks: dict[str, Task]
    general: General = General()
    mix: Number = 1.0
    scores: Scoring = Scoring()
    p: Thresholds = Thresholds()
    score: Literal[SCORES] = "gate"  # for `run`; tables use both
    fft: EsftTraining
    lora: Lora
    esft: EsftTraining
    evaluations: Count = 5  # how often a training run computes the validation loss
    seed: int = 0

    @model_validator(mode="after")
    def _check_recipe(self):
        check_base(self)
        check_names("tasks", self.tasks)
        prompts = set()
        for part in (*self.tasks.values(), self.general):
            prompts.add(part.prompt)
        if "general" in self.tasks or len(prompts & {"deepseek", "chat", "esft"}) > 1:
            raise ValueError(
                "No task may be named 'general', and all must use one chat template ('deepseek', "
                f"'esft' or 'chat'), but tasks are {', '.join(self.tasks)} with the prompts "
                f"{', '.join(sorted(prompts))}"
            )
        return self


load_recipe = functools.partial(recipes.load_recipe, EsftRecipe)
