"""A whole UltraFuser study as one YAML file: the domains, a specialist of each, and how they are
fused.

    domains: {code: {train: code, limit: 900}, ...}           training and held-out rows of each
    specialists: {code: {model: ..., template: codellama}}    a folder or a Hub id; without one,
                                                              tuned from the base
    base_model | pretrain, specialist: {...}                  that base, and how they are tuned
    stage1, stage2: {steps, learning_rate, batch_size}        the gate alone, then all parameters

The defaults are the paper's (arXiv 2403.08281, Sec. 3.1, App. A): AdamW and a cosine schedule in
both stages, batches with equal shares of all domains, drawn with replacement, the loss on
responses, summed over tokens. The models are checked, by their configs, before anything is trained.
"""

import functools
from typing import Literal

from pydantic import Field, model_validator

from moe_runtime.config import check_choice
from moe_runtime.hf.common.sources import check_source
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Count, Node, Training
from moe_runtime.methods.ultrafuser import specialists as fused
from moe_runtime.methods.ultrafuser.inputs import Encoder
from moe_runtime.methods.ultrafuser.model import REDUCTIONS
from moe_runtime.methods.ultrafuser.runs import Stage, check_sizes
from moe_runtime.methods.ultrafuser.training import hidden_size
from moe_runtime.modules.fuser import GATES
from papers.engine import recipe as recipes
from papers.engine.corpora import Domain
from papers.engine.recipe import Dtype, Pretrain, check_names


class Specialist(Node):
    """One of the fused models, and the template of its prompts."""

    template: str  # ultralm, codellama, wizardmath, chat, or a text with {prompt}
    model: str | None = None  # a folder or a Hub id; None: the base, tuned on `domain`
    domain: str | None = None  # None: the domain with the specialist's name, if there is one
    # of its tuning; None: those of `specialist`
    steps: Count | None = Field(None, exclude_if=lambda steps: steps is None)


class FuserRecipe(Node):
    """A whole study."""

    method: Literal["ultrafuser"] = "ultrafuser"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: Pretrain | None = None
    dtype: Dtype = "float32"
    max_length: Count = 1024  # of the longest prompt and the response
    # of all specialists; None: each one's own
    tokenizer: str | None = Field(None, exclude_if=lambda source: source is None)
    domains: dict[str, Domain]
    specialists: dict[str, Specialist]
    gate: Literal[GATES] = "mlp"
    # the gate sees all specialists' states at once, as different hidden sizes require
    joint: bool = False
    specialist: Training | None = None  # of the specialists that are tuned here
    stage1: Stage
    stage2: Stage
    # of specialists tuned on all domains; None: stage2 with the steps of both stages
    further: Stage | None = None
    two_stage: bool = True  # False: stage 2 alone, from a random gate
    balanced: bool = True
    # of the loss: the paper's sum over tokens and mean over samples, or the "mean" over tokens
    reduction: Literal[REDUCTIONS] = "sample"
    # whether each row of a batch is drawn from all rows of its domain, as in the paper, or from
    # those that were not used yet
    replacement: bool = True
    evaluations: Count = 4  # how often a training run computes the held-out loss
    seed: int = 0

    @model_validator(mode="after")
    def _check_recipe(self):
        check_names("domains", self.domains, least=2)
        check_names("specialists", self.specialists, least=2)
        self._check_specialists()
        for name in ("stage1", "stage2", *(["further"] if self.further else [])):
            size = getattr(self, name).batch_size
            if size % len(self.domains):
                raise ValueError(
                    f"{name}.batch_size must be a multiple of the {len(self.domains)} domains, "
                    f"which have equal shares, but got {size}"
                )
        return self

    def _check_specialists(self) -> None:
        made = [name for name, one in self.specialists.items() if one.model is None]
        given = []
        for name in ("base_model", "pretrain", "specialist"):
            if getattr(self, name) is not None:
                given.append(name)
        bases = len(given) - (self.specialist is not None)
        if bases != bool(made) or bool(made) != (self.specialist is not None):
            if made:
                expected = "one of base_model and pretrain, and specialist"
            else:
                expected = "none of base_model, pretrain, specialist"
            raise ValueError(
                f"Specialists without a model are {', '.join(made) or 'none'} and given is "
                f"{', '.join(given) or 'no base'}. Set {expected}"
            )
        for name, one in self.specialists.items():
            if one.model is not None and one.steps is not None:
                raise ValueError(
                    f"specialists.{name} has a model, so it is not tuned, but steps is "
                    f"{one.steps}. Set one of them"
                )
            if one.domain is not None or one.model is None:
                check_choice(
                    f"specialists.{name}.domain",
                    one.domain or name,
                    tuple(self.domains),
                )

    def domain_of(self, specialist: str) -> str | None:
        """Return a specialist's domain, or None if the recipe names none."""
        named = self.specialists[specialist].domain or specialist
        return named if named in self.domains else None

    def training_of(self, specialist: str) -> Training:
        """Return the training settings of a specialist that is tuned here."""
        steps = self.specialists[specialist].steps
        if steps is None:
            return self.specialist
        return self.specialist.change(epochs=None, steps=steps)

    @property
    def templates(self) -> list[str]:
        """The specialists' templates, in their order."""
        return [one.template for one in self.specialists.values()]

    @property
    def further_stage(self) -> Stage:
        """The training stage of specialists that are tuned further, on all domains."""
        steps = self.stage1.steps + self.stage2.steps
        return self.further or self.stage2.change(steps=steps)


load_recipe = functools.partial(recipes.load_recipe, FuserRecipe)


def check_models(recipe: FuserRecipe) -> None:
    """Raise ValueError, with the key, for models that do not exist or do not fit together.

    A tokenizer that is trained here is checked once it exists, before any model is trained.
    """
    given = {}
    for name, one in recipe.specialists.items():
        if one.model is not None:
            given[f"specialists.{name}.model"] = one.model
    named = given | ({} if recipe.base_model is None else {"base_model": recipe.base_model})
    for name, source in named.items():
        check_source(source, name)
    if not given:
        return  # all are of one base
    sizes = {name: hidden_size(source, name) for name, source in named.items()}
    if recipe.pretrain is not None:
        sizes["pretrain.hidden_size"] = recipe.pretrain.hidden_size
    check_sizes(sizes, recipe.joint)
    if recipe.pretrain is None:
        encoder_of(
            recipe, None if recipe.base_model is None else ranks.load_tokenizer(recipe.base_model)
        )


def encoder_of(recipe: FuserRecipe, tokenizer) -> Encoder:
    """Return the Encoder of a recipe's specialists, with the base's `tokenizer` and those of
    given models.
    """
    if recipe.tokenizer is not None:
        tokenizer = ranks.load_tokenizer(recipe.tokenizer, "tokenizer")
    tokenizers = []
    for name, one in recipe.specialists.items():
        if recipe.tokenizer or one.model is None:
            tokenizers.append(tokenizer)
        else:
            tokenizers.append(ranks.load_tokenizer(one.model, f"specialists.{name}.model"))
    templates = [one.template for one in recipe.specialists.values()]
    vocab_size = min(map(len, tokenizers))
    return fused.encoder_of(tokenizers, templates, list(recipe.specialists), vocab_size)
