"""A whole ESFT study as one YAML file: the model, its tasks, and how they are scored, selected and trained.

    base_model: deepseek-ai/DeepSeek-V2-Lite        or null, with `pretrain`
    tasks: {law: {train: law.jsonl, ...}, ...}      general: {train: ..., held_out: ...}
    scores: {n_tokens: 131072, variant: v1}         p: {gate: 0.1, token: 0.2}
    fft, lora, esft: {steps, learning_rate, ...}    mix: 1.0, rows of general data per row of a task

The defaults are the paper's (arXiv 2407.01906, Sec. 4.3) and, where it is silent, the released code's.
"""

from dataclasses import dataclass, field
from pathlib import Path

from moe_runtime.config import check_choice, check_fraction, check_number, check_positive
from moe_runtime.methods.esft_selection import SCORES, VARIANTS, check_p
from moe_runtime.prompts import PROMPTS
from moe_runtime.studies import recipe as recipes
from moe_runtime.studies.esft_tasks import GENERAL, check_source
from moe_runtime.studies.recipe import DTYPES, Pretrain, Rows, Training, check_base, check_names
from moe_runtime.studies.recipe_nodes import Node


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
