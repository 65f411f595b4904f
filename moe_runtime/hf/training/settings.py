"""Settings of training runs and recipes: pydantic models whose mistakes are one-line errors.

Any mistake raises a one-line ValueError with the key, the expected value and the given one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from moe_runtime.config import one_line, shown


def _as_number(value: Any) -> Any:
    """Convert a string to a number, as YAML 1.1 parses 5e-5 as a string."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _as_bf16(value: Any) -> Any:
    """Resolve `auto`: whether this machine multiplies faster in bfloat16 than in float32."""
    if value != "auto":
        return value
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))


Count = Annotated[int, Field(ge=1)]

Steps = Annotated[int, Field(ge=0)]

AnyNumber = Annotated[float, BeforeValidator(_as_number)]

Number = Annotated[AnyNumber, Field(ge=0)]

Positive = Annotated[AnyNumber, Field(gt=0)]

Fraction = Annotated[AnyNumber, Field(ge=0, le=1)]

BelowOne = Annotated[AnyNumber, Field(ge=0, lt=1)]

Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]


class Node(BaseModel):
    """A recipe, or a mapping in it: frozen, strictly typed, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            unknown = [key for key in values if key not in cls.model_fields]
        else:
            unknown = []
        if unknown:
            raise ValueError(
                f"{one_line(unknown[0], 200)} is not a valid key. Use any of "
                f"{', '.join(cls.model_fields)}"
            )
        return values

    def to_dict(self) -> dict:
        """Return the fields as a JSON-ready dict; `from_dict` reads it."""
        return self.model_dump()

    @classmethod
    def from_dict(cls, values: Mapping) -> Self:
        """Build it from a mapping; raises a one-line ValueError that names the first wrong key."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None

    def change(self, **changes: Any) -> Self:
        """Return a recipe with other values; keys are dotted, with __ for the dot:
        change(data__limit=8, seed=1).
        """
        values = self.to_dict()
        for key, value in changes.items():
            *path, last = key.split("__")
            node = values
            for part in path:
                node = node[part]
            node[last] = value.to_dict() if isinstance(value, Node) else value
        return self.from_dict(values)


def _sentence(error: ValidationError) -> str:
    """Format pydantic's first error as one line: the key, the expected value and the given one."""
    first = error.errors(include_url=False)[0]
    key = ".".join(one_line(part, 200) for part in first["loc"] if part != "[key]")
    # from our own checks, which already name the key within their node
    if first["type"] == "value_error":
        return f"{key}{'.' if key else ''}{first['ctx']['error']}"
    if first["type"] == "missing":
        return f"{key} is missing from the recipe"
    valid = first["msg"].removeprefix("Input should be ").partition(" or instance of ")[0]
    return f"{key or 'recipe'} must be {valid}, but got {shown(first['input'])}"


class Training(Node):
    """Settings of one training run. The defaults are the official XFT code's: Adafactor, a linear
    schedule, no clipping.
    """

    epochs: Positive | None = None
    steps: Count | None = None
    learning_rate: Positive
    warmup_steps: Steps | None = None  # None: one step in twenty
    batch_size: Count = 64  # examples per optimizer step, over all processes
    per_device_batch_size: Count | None = None  # None: all examples of a process at once
    optimizer: str = "adafactor"  # a value of optim in transformers' TrainingArguments
    weight_decay: Number = 0.0
    schedule: Schedule = "linear"
    max_grad_norm: AnyNumber = -1.0  # -1: no clipping
    # autocast; auto: where this machine multiplies faster in bfloat16
    bf16: Annotated[bool, BeforeValidator(_as_bf16)] = False
    gradient_checkpointing: bool = False
    # steps between checkpoints, from which an interrupted run resumes
    save_steps: Count | None = None
    # processes that share each layer's experts
    ep_size: Count = Field(1, exclude_if=lambda size: size == 1)
    # steps after which the held-out loss is measured, instead of the recipe's evenly spaced
    # `evaluations`
    evaluations: list[Count] | None = Field(None, exclude_if=lambda steps: steps is None)
    # restore the weights with the lowest held-out loss
    keep_best: bool = Field(False, exclude_if=lambda keep: not keep)

    @model_validator(mode="after")
    def _check_training(self):
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs is {self.epochs} and steps is {self.steps}. Set exactly one of the two"
            )
        if self.max_grad_norm != -1 and self.max_grad_norm <= 0:
            raise ValueError(
                "max_grad_norm must be a number above 0, or -1 for no clipping, but got "
                f"{self.max_grad_norm}"
            )
        return self
