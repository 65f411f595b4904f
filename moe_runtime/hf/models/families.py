"""The MLPs of the supported dense architectures: a table of their names, and their conversion to
expert stacks and back.

    gated   mlp(x) = down(act(gate x) * up x)
    plain   mlp(x) = down(act(up x))

Our names are gate_up_proj [2I, H] (gate first), or up_proj [I, H], and down_proj [H, I].
Biases are `<name>_bias`, as in `moe_runtime.modules.moe.Experts` without its leading expert
dimension. The functions on modules serve a model in memory; those on names serve checkpoints that
are read tensor by tensor.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from moe_runtime.config import shown
from moe_runtime.ops.activation import ACT

PREFIX = "moe_runtime_"  # of the model_type of an upcycled model


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """An architecture: the paths of its MLPs and the names of their linear layers."""

    model_type: str
    path: str = "model.layers.{}.mlp"
    # its rows, stacked in this order, are our up projection
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    act: str = "act_fn"  # the MLP's activation module
    act_field: str = "hidden_act"  # its name in the config
    bias: bool | str = False  # a string names the config field that says so

    @property
    def fused(self) -> bool:
        """Whether gate and up are a single linear layer."""
        return self.gated and len(self.up) == 1

    @property
    def formula(self) -> str:
        """What its MLPs compute."""
        return "down(act(gate x) * up x)" if self.gated else "down(act(up x))"

    @property
    def up_name(self) -> str:
        """Our name of the up projection."""
        return "gate_up_proj" if self.gated else "up_proj"


_PLAIN = {"gated": False, "act": "act", "bias": True}
_FIELDS = {
    "llama": {"bias": "mlp_bias"},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"act_field": "hidden_activation"},
    "gemma3_text": {"act_field": "hidden_activation"},
    "phi3": {"up": ("gate_up_proj",), "act": "activation_fn"},
    "stablelm": {},
    "smollm3": {"bias": "mlp_bias"},
    "olmo2": {},
    "granite": {"bias": "mlp_bias"},
    "gemma": {},
    "olmo3": {},
    "glm4": {"up": ("gate_up_proj",), "act": "activation_fn"},
    "cohere2": {},
    "exaone4": {},
    "ernie4_5": {"bias": "use_bias"},
    "hunyuan_v1_dense": {},
    "nemotron": {"up": ("up_proj",), "gated": False, "bias": "mlp_bias"},
    "arcee": {"up": ("up_proj",), "gated": False, "bias": "mlp_bias"},
    "gpt_neox": _PLAIN
    | {
        "path": "gpt_neox.layers.{}.mlp",
        "up": ("dense_h_to_4h",),
        "down": "dense_4h_to_h",
    },
    "phi": _PLAIN | {"up": ("fc1",), "down": "fc2", "act": "activation_fn"},
    "starcoder2": _PLAIN | {"up": ("c_fc",), "down": "c_proj", "bias": "use_bias"},
}
FAMILIES = {name: Family(model_type=name, **fields) for name, fields in _FIELDS.items()}

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_module(model: Any) -> None:
    """Raise ValueError unless `model` is a module, for example for the path of one."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Expected a model, but got {shown(model, 60)}. Load a folder with "
            "AutoModelForCausalLM.from_pretrained(folder)"
        )


def family_of(model: nn.Module | PreTrainedConfig | str) -> Family:
    """Return the family of a dense model, its config or a model_type; raises ValueError with the
    reason for others.
    """
    config = getattr(model, "config", model)
    model_type = config if isinstance(config, str) else getattr(config, "model_type", None)
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    hint = ""
    if str(model_type).startswith(PREFIX):
        hint = ", which is already upcycled. Merge it to a dense model first"
    elif any(getattr(config, field, None) for field in EXPERT_FIELDS):
        hint = ", which already has experts"
    raise ValueError(
        f"model_type must be one of {', '.join(FAMILIES)}, but got {model_type!r}{hint}"
    )


def activation_name(act: str | Callable[[Tensor], Tensor]) -> str:
    """Return our name of an activation, given as transformers' name or as a callable.

    Activations are compared as functions, in float64 on [-12, 12] to 1e-5: gelu_new, gelu_fast and
    gelu_pytorch_tanh are "gelu_tanh". Raises ValueError for an unsupported one.
    """
    from transformers.activations import ACT2FN

    function = act
    name = type(act).__name__
    if isinstance(act, str):
        name = act
        function = ACT2FN[act] if act in ACT2FN else None  # noqa: SIM401 - get() builds nothing
    learned = isinstance(function, nn.Module) and next(function.parameters(), None) is not None
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    if function is not None and not learned:
        with torch.no_grad():
            for ours, formula in ACT.items():
                if (formula(x) - function(x)).abs().max() < 1e-5:
                    return ours
    raise ValueError(f"hidden_act must be equivalent to one of {', '.join(ACT)}, but got {name!r}")


def moe_shape(family: Family, source: nn.Module | PreTrainedConfig) -> dict:
    """Return MoEConfig's hidden_size, intermediate_size, hidden_act, gated and bias, from a dense
    config or an MLP.

    Raises ValueError for an unsupported activation.
    """
    if isinstance(source, nn.Module):
        down = _linear(source, family.down)
        H, I = down.weight.shape
        act = getattr(source, family.act)
        bias = down.bias is not None
    else:
        H = source.hidden_size
        I = source.intermediate_size
        act = getattr(source, family.act_field)
        bias = family.bias
        if isinstance(bias, str):
            bias = getattr(source, bias)
    return {
        "hidden_size": H,
        "intermediate_size": I,
        "hidden_act": activation_name(act),
        "gated": family.gated,
        "bias": bool(bias),
    }


def _linear(mlp: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer `name`; raises ValueError for anything else, such as an adapter or a
    quantized layer.
    """
    layer = getattr(mlp, name, None)
    # subclasses are refused too, as PEFT's and the quantizers' layers compute more than their
    # weight shows
    if type(layer) is not nn.Linear or not layer.weight.is_floating_point():
        raise ValueError(
            f"{type(mlp).__name__}.{name} must be a plain torch.nn.Linear of floats, but is "
            f"{type(layer).__name__}. Merge adapters (merge_and_unload) and load without "
            "quantization"
        )
    return layer


@torch.no_grad()
def read_mlp(mlp: nn.Module, family: Family) -> dict[str, Tensor]:
    """Return the MLP's weights under our names, without the expert dimension."""
    up = [_linear(mlp, name) for name in family.up]
    down = _linear(mlp, family.down)
    weights = {
        family.up_name: torch.cat([layer.weight for layer in up]),
        "down_proj": down.weight.detach(),
    }
    if down.bias is not None:
        weights[f"{family.up_name}_bias"] = torch.cat([layer.bias for layer in up])
        weights["down_proj_bias"] = down.bias.detach()
    return weights


@torch.no_grad()
def write_mlp(
    mlp: nn.Module, family: Family, weights: dict[str, Tensor], requires_grad: bool = True
) -> None:
    """Set the weights of an MLP, which may be on the meta device, from the format of `read_mlp`.

    Raises ValueError, and writes nothing, for a wrong set of names or a wrong shape.
    """
    check_weights(mlp, family, weights)
    for name, parts in split_weights(family, weights).items():
        kind = "bias" if name.endswith("_bias") else "weight"
        layers = (family.down,) if name.startswith("down_proj") else family.up
        for layer, part in zip(layers, parts, strict=True):
            setattr(_linear(mlp, layer), kind, nn.Parameter(part, requires_grad=requires_grad))


def check_weights(mlp: nn.Module, family: Family, weights: dict[str, Tensor]) -> None:
    """Raise ValueError unless `weights` has the names and shapes that `write_mlp` expects."""
    shape = moe_shape(family, mlp)
    H = shape["hidden_size"]
    rows = shape["intermediate_size"] * (1 + family.gated)
    expected = {family.up_name: (rows, H), "down_proj": (H, shape["intermediate_size"])}
    if shape["bias"]:
        expected |= {f"{family.up_name}_bias": (rows,), "down_proj_bias": (H,)}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if shapes != expected:
        raise ValueError(f"Expected an MLP with weights of shapes {expected}, but got {shapes}")


def split_weights(family: Family, weights: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Split our tensors into the base's, in the order of `mlp_keys`; the parts of a split tensor
    are copies.
    """
    parts = {}
    for name, weight in weights.items():
        parts[name] = [weight]
        if len(family.up) > 1 and not name.startswith("down_proj"):
            # copies, as safetensors does not accept two views of one storage
            parts[name] = [part.clone() for part in weight.chunk(len(family.up))]
    return parts


def mlp_keys(family: Family, layer: int, bias: bool = False) -> dict[str, list[str]]:
    """Return, for each of our names, the keys of that layer in the base checkpoint whose rows it
    stacks, in order.
    """
    path = family.path.format(layer)
    keys = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        suffix = "_bias" if kind == "bias" else ""
        keys[family.up_name + suffix] = [f"{path}.{name}.{kind}" for name in family.up]
        keys[f"down_proj{suffix}"] = [f"{path}.{family.down}.{kind}"]
    return keys


class MLPKey(NamedTuple):
    """Meaning of a key of a base checkpoint."""

    layer: int
    name: str  # ours
    part: int  # its place among the keys of `mlp_keys`


def locate_key(family: Family, key: str) -> MLPKey | None:
    """Return the layer, our name and the part of a base checkpoint's key; None for a key outside
    the MLPs.
    """
    digits = re.search(r"\d+", key)
    if digits is None:
        return None
    layer = int(digits[0])
    for name, keys in mlp_keys(family, layer, bias=True).items():
        if key in keys:
            return MLPKey(layer, name, keys.index(key))
    return None


def expert_keys(family: Family, layer: int, bias: bool = False) -> dict[str, str]:
    """Return, for each of our names, the upcycled checkpoint's key of the stack [E, ...]."""
    path = family.path.format(layer)
    return {name: f"{path}.experts.{name}" for name in mlp_keys(family, layer, bias)}
