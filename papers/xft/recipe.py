"""A whole XFT run as one YAML file: model, data and training.

base_model: deepseek-ai/deepseek-coder-1.3b-base      a folder or a Hub id; or null, with `pretrain`
data: {train, held_out, prompt, max_length, ...}      experts: {num_experts, top_k, gate, ... |
                                                      preset}
shared_rate: 0.75                                     sft, tune, mix: {epochs | steps,
                                                      learning_rate, ...}
"""

import functools
import typing
from typing import Literal

from pydantic import Field, create_model, field_validator, model_validator

from moe_runtime.config import SHARED_GATES, MoEConfig, check_choice
from moe_runtime.hf.training.settings import AnyNumber, Count, Fraction, Node, Steps, Training
from moe_runtime.io.rows import BUILT_IN
from moe_runtime.methods.xft.presets import PRESETS
from papers.engine import recipe as recipes
from papers.engine.recipe import DataSplits, Dtype, Pretrain, Prompt, Sources, TrainOn

# MoEConfig's fields set by the base
OF_THE_BASE = ("hidden_size", "intermediate_size", "hidden_act", "gated", "bias")
SETTINGS = {
    name: kind for name, kind in typing.get_type_hints(MoEConfig).items() if name not in OF_THE_BASE
}
XftExperts = create_model(
    "XftExperts",
    __base__=Node,
    preset=(str | None, None),
    **{name: (AnyNumber if kind is float else kind, None) for name, kind in SETTINGS.items()},
)


class Data(DataSplits):
    """The data of an XFT run, and their prompt format."""

    train: Sources = BUILT_IN
    prompt: Prompt = "magicoder"
    train_on: TrainOn = "assistant"
    max_length: Count = 1024
    # additional held-out rows for validation during training and for `keep_best`; None: the rows
    # that evaluate the models
    validation_rows: Count | None = Field(None, exclude_if=lambda count: count is None)
    # blocks of prose on which every model is evaluated besides, and none is tuned
    untouched_rows: Count | None = Field(None, exclude_if=lambda count: count is None)


class Ewa(Node):
    """The baseline of expert weight averaging; `training` defaults to `sft`."""

    share: Fraction = 0.3
    schedule: Literal["constant", "linear"] = "constant"
    training: Training | None = None


class Recipe(Node):
    """A whole run. `experts` holds MoEConfig's fields without those set by the base; a preset in it
    is resolved.
    """

    method: Literal["xft"] = "xft"
    name: str = "recipe"
    base_model: str | None = None
    pretrain: Pretrain | None = None
    dtype: Dtype = "float32"
    data: Data = Data()
    experts: dict = {}
    # to upcycle; None: all
    layers: list[Steps] | None = Field(None, exclude_if=lambda layers: layers is None)
    shared_rate: Fraction = 0.75
    sft: Training
    tune: Training
    mix: Training
    # examples reserved for `mix` and not used by `tune`; None: both use all examples, as in the
    # paper
    mix_rows: Count | None = Field(None, exclude_if=lambda count: count is None)
    ewa: Ewa = Ewa()
    evaluations: Count = 4  # how often a training run computes the held-out loss
    seed: int = 0

    @field_validator("experts")
    @classmethod
    def _resolve(cls, values: dict) -> dict:
        return resolve_experts(values)

    @model_validator(mode="after")
    def _check_recipe(self):
        recipes.check_base(self)
        count = self.experts.get("num_experts", 8)
        size = self.tune.ep_size
        if (
            count % size
            or max(
                self.sft.ep_size,
                self.mix.ep_size,
                self.ewa_training.ep_size,
            )
            > 1
        ):
            raise ValueError(
                f"tune.ep_size is {size}, of {count} experts; expected a divisor of them, and no "
                "ep_size for sft, mix and ewa, which have no routed experts"
            )
        return self

    @property
    def ewa_training(self) -> Training:
        """The training of the EWA baseline."""
        return self.ewa.training or self.sft


def resolve_experts(values: dict) -> dict:
    """Return MoEConfig's settings of `values`, completed by their preset if any; raises ValueError
    for invalid ones.
    """
    values = XftExperts.from_dict(values).model_dump(exclude_unset=True)
    preset = values.pop("preset", None)
    if preset is not None:
        check_choice("preset", preset, tuple(PRESETS))
        values = PRESETS[preset] | values
    MoEConfig(hidden_size=1, intermediate_size=1, **values)
    if values.get("balance_loss", "none") == "none" and values.get("balance_loss_coef"):
        raise ValueError(
            f"balance_loss_coef is {values['balance_loss_coef']}, but balance_loss is 'none'. Set "
            "both"
        )
    return values


def check_shared(recipe: Recipe) -> None:
    """Raise ValueError for a gate without a shared expert: XFT's merge is not defined for it."""
    check_choice("gate", recipe.experts.get("gate", "xft"), SHARED_GATES)


load_recipe = functools.partial(recipes.load_recipe, Recipe)
