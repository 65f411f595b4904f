"""A whole UpIT study as one YAML file: the base, its domains, and how experts are prepared, expanded, routed and tuned.

    base_model: princeton-nlp/Sheared-LLaMA-2.7B    or null, with `pretrain`
    domains: {code: {train: code, ...}, ...}        rows of each; all are tuned on together and judged apart
    checkpoints: {count: 4, which: back}            m of those that the first tuning saves; grown to experts.num_experts
    expansion, seed_data, router: {...}             steps 2, 3 and 4 of the method
    ffn, lora: {sft, init, post: {epochs, learning_rate, ...}}     the trainings of each kind of expert; one may be null

The defaults are the paper's (arXiv 2410.01610, Sec. 4.1); where it is silent, those of `moe_runtime.methods.upit`.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from moe_runtime.config import MoEConfig, check_choice, check_fraction, check_number, check_positive
from moe_runtime.experiments import recipe as recipes
from moe_runtime.experiments.corpora import Domain
from moe_runtime.experiments.recipe import DTYPES, Node, Pretrain, Training, check_base, check_names
from moe_runtime.io.prompts import PROMPTS

FORMS = ("ffn", "lora")
WHICH = ("back", "front", "uniform")
METRICS, PARENTS, DIFFERENCES = ("cosine", "l2"), ("farthest", "random"), ("delta", "weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptedDomain(Domain):
    """A domain, and how its rows are put."""

    prompt: str = "plain"

    def __post_init__(self):
        Domain.__post_init__(self)
        check_choice("prompt", self.prompt, tuple(PROMPTS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints(Node):
    """Which checkpoints of the first tuning become experts (step 1)."""

    every_epochs: float = 0.25
    count: int = 4  # m; the other experts are grown from these
    which: str = "back"

    def __post_init__(self):
        check_number("every_epochs", self.every_epochs, positive=True)
        check_positive("count", self.count)
        check_choice("which", self.which, WHICH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion(Node):
    """How experts are grown from others (step 2)."""

    metric: str = "cosine"
    of: str = "delta"
    parents: str = "farthest"
    drop: float = 0.5

    def __post_init__(self):
        check_choice("metric", self.metric, METRICS)
        check_choice("of", self.of, DIFFERENCES)
        check_choice("parents", self.parents, PARENTS)
        check_fraction("drop", self.drop, one=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedData(Node):
    """The rows that experts are compared on (step 3)."""

    share: float = 0.01
    at_least: int = 500  # rows, where the share is less
    tokens: str = "response"  # that perplexity counts, or all
    capacity: int | None = None  # rows of a bucket; None: as many as make all buckets equal

    def __post_init__(self):
        check_fraction("share", self.share, zero=False)
        check_positive("at_least", self.at_least)
        check_choice("tokens", self.tokens, ("response", "all"))
        if self.capacity is not None:
            check_positive("capacity", self.capacity)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterInit(Node):
    """How routing vectors are pre-optimized (step 4); what its training is stands in `ffn` and `lora`."""

    alpha: float = 0.5
    detach_h: bool = False
    train_ffn: bool = True
    vector_std: float | None = None  # of the vectors before training; None: they begin at 0
    vector_learning_rate: float | None = None  # None: the training's

    def __post_init__(self):
        check_fraction("alpha", self.alpha)
        for name in ("vector_std", "vector_learning_rate"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning(Training):
    """A training of the study: AdamW at a constant rate, without warmup."""

    warmup_steps: int | None = 0
    batch_size: int = 128
    optimizer: str = "adamw_torch"
    schedule: str = "constant"
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Form(Node):
    """The trainings of one kind of expert: of the dense model, of experts with their vectors, of the mixture."""

    sft: Tuning
    init: Tuning
    post: Tuning

    def __post_init__(self):
        for name in ("sft", "post"):
            if getattr(self, name).epochs is None:
                raise ValueError(f"{name}.steps is {getattr(self, name).steps}; want epochs: checkpoints go by them")

    @property
    def whole(self) -> Tuning:
        """The training of a baseline that has no second stage: sft, for the epochs of sft and post."""
        return replace(self.sft, epochs=self.sft.epochs + self.post.epochs)

    @property
    def copied(self) -> Tuning:
        """The same for a mixture, which takes as many rows at once as `post` does."""
        at_once = ("per_device_batch_size", "gradient_checkpointing", "save_steps")
        return replace(self.whole, **{name: getattr(self.post, name) for name in at_once})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraForm(Form):
    """The same with LoRA experts; the paper names neither rank nor alpha."""

    rank: int = 8
    alpha: float = 16.0
    loramoe: str = (
        "top_k"  # that baseline: a router per MLP, top_k as in `experts`; or "dense", its own code's, per layer
    )

    def __post_init__(self):
        Form.__post_init__(self)
        check_positive("rank", self.rank)
        check_number("alpha", self.alpha, positive=True)
        check_choice("loramoe", self.loramoe, ("top_k", "dense"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(Node):
    """The mixture: its size, its gate, its balance loss (step 5)."""

    num_experts: int = 8
    top_k: int = 2
    gate: str = "softmax_topk_renorm"
    balance_loss: str = "switch"
    balance_loss_coef: float = 0.01

    def __post_init__(self):
        MoEConfig(hidden_size=1, intermediate_size=1, **self.to_dict())
        if self.gate in ("xft", "nonorm"):
            raise ValueError(f"gate is {self.gate!r}, which has a shared expert; want another")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpitRecipe(Node):
    """A whole study."""

    method: str = "upit"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: Pretrain | None = None
    dtype: str = "float32"
    max_length: int = 2048
    domains: dict[str, PromptedDomain]
    experts: Experts = field(default_factory=Experts)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    expansion: Expansion = field(default_factory=Expansion)
    seed_data: SeedData = field(default_factory=SeedData)
    router: RouterInit = field(default_factory=RouterInit)
    ffn: Form | None = None
    lora: LoraForm | None = None
    evaluations: int = 4  # times that a training takes the held-out loss
    seed: int = 0

    def __post_init__(self):
        check_choice("method", self.method, ("upit",))
        check_choice("dtype", self.dtype, DTYPES)
        for name in ("max_length", "evaluations"):
            check_positive(name, getattr(self, name))
        check_base(self)
        if not self.domains:
            raise ValueError("domains is {}; want at least one")
        check_names("domains", self.domains)
        if not self.forms:
            raise ValueError("ffn is null, lora is null; want the trainings of at least one of them")
        if self.checkpoints.count < 2 <= self.experts.num_experts:
            raise ValueError(
                f"checkpoints.count is 1, num_experts is {self.experts.num_experts}; want two checkpoints to grow others from"
            )
        for form in self.forms:
            check_saved(self, form, self.checkpoints.count, "checkpoints.count")

    @property
    def forms(self) -> tuple[str, ...]:
        """The kinds of experts that the recipe has trainings for."""
        return tuple(form for form in FORMS if getattr(self, form) is not None)


def count_saved(recipe: UpitRecipe, form: str) -> int:
    """Return how many checkpoints the first tuning saves at its intervals."""
    return int(getattr(recipe, form).sft.epochs / recipe.checkpoints.every_epochs + 1e-9)


def check_saved(recipe: UpitRecipe, form: str, count: int, name: str) -> None:
    """Raise ValueError if the first tuning saves fewer checkpoints than `count`, which `name` stands for."""
    epochs, every = getattr(recipe, form).sft.epochs, recipe.checkpoints.every_epochs
    saved = count_saved(recipe, form)
    if count > saved:
        raise ValueError(
            f"{name} is {count}, {form}.sft.epochs is {epochs:g}, every_epochs is {every:g}, which makes {saved} checkpoints; "
            "want at most as many"
        )


def shipped_recipes() -> list[str]:
    """Return the names of the studies that come with the package."""
    return recipes.shipped_recipes("upit")


def load_recipe(path_or_name: str | Path) -> UpitRecipe:
    """Read a YAML file, or a shipped study by its name; raises ValueError with the file and the key of a mistake."""
    return recipes.load_recipe(path_or_name, UpitRecipe)
