"""A tiny random model of every family in the installed transformers whose experts use transformers'
experts interface.
"""

import functools
import importlib
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from moe_runtime.hf.dropin.experts import is_experts
from tests.hf.stock_sizes import CHANGES, CLASSES, MOE, SMALL, VOCAB

_FOLDER = Path(transformers.__file__).parent / "models"
_HEADS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForBlockDiffusion",
    "ForTokenClassification",
    "Backbone",
)


@functools.cache
def _sources() -> dict[str, tuple[str, str]]:
    """Return module name and text of every modeling file that uses the experts interface."""
    found = {}
    for path in sorted(_FOLDER.glob("*/modeling_*.py")):
        text = path.read_text("utf-8")
        if "@use_experts_implementation" in text:
            found[path.parent.name] = (path.stem, text)
    return found


# transformers itself reads the modeling file to find out whether a model can be switched
FAMILIES = tuple(_sources())


def model_class(family: str) -> type[PreTrainedModel]:
    """Return the family's class with a head: the causal language model if there is one."""
    module = importlib.import_module(f"transformers.models.{family}.{_sources()[family][0]}")
    if family in CLASSES:
        return getattr(module, CLASSES[family])
    for head in _HEADS:
        for cls in vars(module).values():
            if (
                isinstance(cls, type)
                and cls.__module__ == module.__name__
                and cls.__name__.endswith(head)
            ):
                return cls
    raise LookupError(f"{family} has no class that ends in one of {_HEADS}; add it to CLASSES")


def small_config(cls: type[PreTrainedConfig], changes: dict) -> PreTrainedConfig:
    """Return the default config of `cls` with the sizes of `stock_sizes`, including sub-configs."""
    default = cls()
    parts = cls.sub_configs or {}
    fields = {
        name: getattr(cls, name, None)
        for base in cls.__mro__
        for name in getattr(base, "__annotations__", ())
    }
    values = (
        {name: value for name, value in SMALL.items() if fields.get(name) is not None}
        | MOE
        | _layers(default)
    )
    if fields.get("num_key_value_heads") is not None:
        grouped = fields["num_key_value_heads"] != fields.get("num_attention_heads")
        values["num_key_value_heads"] = 2 if grouped else 4
    values = {name: value for name, value in values.items() if name in fields}
    values |= {name: value for name, value in changes.items() if name not in parts}
    for name in parts:
        part = getattr(default, name, None)
        own = dict(changes.get(name, {}))
        if "model_type" in own:  # this part has no default
            part = AutoConfig.for_model(own.pop("model_type"))
        if part is not None:
            values[name] = small_config(type(part), own)
    return cls(**values)


def _layers(default: PreTrainedConfig) -> dict:
    """Return one layer of each kind in the family's own pattern, ordered by their last layers;
    dense MLPs come before sparse ones.
    """
    found = {}
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(default, name, None):
            found[name] = list(dict.fromkeys(reversed(kinds)))[::-1]
    count = max(2, *map(len, found.values())) if found else 2
    padded = {name: [kinds[0]] * (count - len(kinds)) + kinds for name, kinds in found.items()}
    if kinds := sorted(found.get("mlp_layer_types", [])):
        padded["mlp_layer_types"] = kinds + [kinds[-1]] * (count - len(kinds))
    return {"num_hidden_layers": count} | padded


def config_of(family: str) -> PreTrainedConfig:
    return small_config(
        model_class(family).config_class,
        CHANGES.get(family, {}),
    )


def build(family: str) -> PreTrainedModel:
    """Build a tiny model in evaluation mode, with experts run by transformers' own loop."""
    config = config_of(family)
    torch.manual_seed(0)
    model = model_class(family)(config)
    model.set_experts_implementation("eager")
    return _randomized(model).eval()


@torch.no_grad()
def _randomized(model: nn.Module) -> nn.Module:
    """Use large random weights and no constants, so that every part matters and routing depends on
    the token.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.25)
        else:
            (parameter.add_(torch.randn_like(parameter) / 8))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and "bias" in name:
            buffer.normal_(0, 0.1)
        # DeepSeek-V4 maps token ids to experts, all to expert 0 until a checkpoint is loaded
        elif name.endswith("tid2eid"):
            buffer.copy_(
                torch.stack(
                    [torch.randperm(MOE["n_routed_experts"])[: buffer.shape[1]] for _ in buffer]
                )
            )
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    values = {}
    for name, module in model.named_modules():
        if is_experts(module):
            values[name] = module
    return values


def batch(rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Token ids without padding, special tokens or image tokens."""
    return {
        "input_ids": torch.randint(
            3, VOCAB - 8, (rows, length), generator=torch.Generator().manual_seed(2)
        )
    }


def run(model: PreTrainedModel, implementation: str, **more):
    """Return the model's output on `batch()` with its experts run by `implementation`."""
    model.set_experts_implementation(implementation)
    torch.manual_seed(0)  # block diffusion starts from noise
    return model(**batch(), **more)
