"""A UpIT study as one YAML file: the base, the domains, and the settings of all steps.

    base_model: princeton-nlp/Sheared-LLaMA-2.7B    or null, with `pretrain`
    domains: {code: {train: code, ...}, ...}        rows of each domain; tuned on together,
                                                    evaluated separately
    checkpoints: {count: 4, which: back}            m checkpoints of the first tuning, grown to
                                                    experts.num_experts
    expansion, seed_data, router: {...}             steps 2, 3 and 4 of the method
    ffn, lora: {sft, init, post: {...}}             the training stages of each kind of expert; one
                                                    may be null

The defaults are the paper's (arXiv 2410.01610, Sec. 3.1), otherwise those of
`moe_runtime.methods.upit`.
"""

import functools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from moe_runtime.config import MoEConfig
from moe_runtime.hf.training.settings import (
    BelowOne,
    Count,
    Fraction,
    Node,
    Number,
    Positive,
    Steps,
)
from moe_runtime.methods.upit.router import UpitTraining
from papers.engine import recipe as recipes
from papers.engine.corpora import Domain
from papers.engine.recipe import Dtype, Pretrain, Prompt, TrainOn, check_base, check_names

FORMS = ("ffn", "lora")


class PromptedDomain(Domain):
    """A domain's data and its prompt format."""

    prompt: Prompt = "plain"
    train_on: TrainOn = "assistant"
    # held-out examples for choosing settings, set aside before those for evaluation
    validation_rows: Steps = Field(0, exclude_if=lambda count: count == 0)


class Checkpoints(Node):
    """The checkpoints of the first tuning that become experts (step 1)."""

    every_epochs: Positive = 0.25
    count: Count = 4  # m; the other experts are grown from these
    which: Literal["back", "front", "uniform"] = "back"


class ExpansionSettings(Node):
    """Expert expansion (step 2)."""

    metric: Literal["cosine", "l2"] = "cosine"
    parents: Literal["farthest", "random"] = "farthest"
    drop: BelowOne = 0.5


class SeedData(Node):
    """The data to compare experts on (step 3)."""

    share: Annotated[Positive, Field(le=1)] = 0.01
    at_least: Count = 500  # rows, if the share is smaller
    tokens: Literal["response", "all"] = "response"  # counted by the perplexity
    capacity: Count | None = None  # rows per bucket; None: equal buckets


class RouterInit(Node):
    """Pre-optimization of routing vectors (step 4); the training settings are in `ffn` or
    `lora`.
    """

    alpha: Fraction = 0.5
    vector_learning_rate: Number | None = None  # None: that of the experts


class ExpertForm(Node):
    """The training stages of one kind of expert: of the dense model, of experts with their vectors,
    of the MoE model.
    """

    sft: UpitTraining
    init: UpitTraining
    post: UpitTraining

    @model_validator(mode="after")
    def _check_epochs(self):
        for name in ("sft", "post"):
            if getattr(self, name).epochs is None:
                raise ValueError(
                    f"{name}.steps is {getattr(self, name).steps}. Set epochs instead, as "
                    "checkpoints count epochs"
                )
        return self

    @property
    def whole(self) -> UpitTraining:
        """The training of a baseline without a second stage: sft, for the epochs of sft and
        post.
        """
        return self.sft.change(epochs=self.sft.epochs + self.post.epochs)

    @property
    def copied(self) -> UpitTraining:
        """The same for an MoE model, with the batch size per device of `post`."""
        at_once = ("per_device_batch_size", "gradient_checkpointing", "save_steps")
        return self.whole.change(**{name: getattr(self.post, name) for name in at_once})


class LoraForm(ExpertForm):
    """The same with LoRA experts; the paper gives neither rank nor alpha."""

    rank: Count = 8
    alpha: Positive = 16.0
    # that baseline: a router per MLP, top_k as in `experts`; or "dense", its own code's, per layer
    loramoe: Literal["top_k", "dense"] = "top_k"


class UpitExperts(Node):
    """The MoE model's size, gate and balance loss (step 5)."""

    num_experts: int = 8
    top_k: int = 2
    gate: str = "softmax_topk_renorm"
    balance_loss: str = "switch"
    balance_loss_coef: Number = 0.01

    @model_validator(mode="after")
    def _check_experts(self):
        if MoEConfig(hidden_size=1, intermediate_size=1, **self.to_dict()).has_shared_expert:
            raise ValueError(f"gate must be one without a shared expert, but got {self.gate!r}")
        return self


class UpitRecipe(Node):
    """A whole study."""

    method: Literal["upit"] = "upit"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: Pretrain | None = None
    dtype: Dtype = "float32"
    max_length: Count = 2048
    domains: dict[str, PromptedDomain]
    experts: UpitExperts = UpitExperts()
    checkpoints: Checkpoints = Checkpoints()
    expansion: ExpansionSettings = ExpansionSettings()
    seed_data: SeedData = SeedData()
    router: RouterInit = RouterInit()
    ffn: ExpertForm | None = None
    lora: LoraForm | None = None
    evaluations: Count = 4  # how often a training run computes the held-out loss
    seed: int = 0

    @model_validator(mode="after")
    def _check_recipe(self):
        check_base(self)
        check_names("domains", self.domains)
        if not self.forms:
            raise ValueError("ffn and lora are null, but at least one of them must be given")
        if self.checkpoints.count < 2 <= self.experts.num_experts:
            raise ValueError(
                f"checkpoints.count must be at least 2 to expand to {self.experts.num_experts} "
                "experts, but got 1"
            )
        for form in self.forms:
            check_saved(self, form, self.checkpoints.count, "checkpoints.count")
        return self

    @property
    def forms(self) -> tuple[str, ...]:
        """The kinds of experts that the recipe trains."""
        return tuple(form for form in FORMS if getattr(self, form) is not None)


def count_saved(recipe: UpitRecipe, form: str) -> int:
    """Return the number of checkpoints that the first tuning saves at its intervals."""
    return int(getattr(recipe, form).sft.epochs / recipe.checkpoints.every_epochs + 1e-9)


def check_saved(recipe: UpitRecipe, form: str, count: int, name: str) -> None:
    """Raise ValueError if the first tuning saves fewer than `count` checkpoints; `name` is the
    setting in the error.
    """
    epochs = getattr(recipe, form).sft.epochs
    every = recipe.checkpoints.every_epochs
    saved = count_saved(recipe, form)
    if count > saved:
        raise ValueError(
            f"{name} must be at most the {saved} checkpoints of {form}.sft.epochs {epochs:g} and "
            f"every_epochs {every:g}, but got {count}"
        )


load_recipe = functools.partial(recipes.load_recipe, UpitRecipe)
