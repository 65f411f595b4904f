"""Our experts behind transformers' experts interface: `experts_implementation="moe_runtime"` for every stock MoE model.

    out[t] = sum_k top_k_weights[t, k] norm(down_e(gate_e(up_e x[t]))),   e = top_k_index[t, k]

`norm` is the identity but for models with a norm behind each expert. The router stays the model's own. What a class does
between its two products is found out numerically (hf.dropin.gates): where our kernels have it, `moe_mlp` runs all of it; anything
else goes through the class's own `_apply_gate` between two grouped products. Parameters keep names, shapes and layout.
"""

import functools
from typing import NamedTuple

import torch
from packaging.version import Version
from torch import nn

from moe_runtime.hf.dropin.gates import gate_of
from moe_runtime.modules import trainable
from moe_runtime.modules.moe import MoE
from moe_runtime.ops import all_to_all
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch, live_weights
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.library import autocast_dtype
from moe_runtime.ops.moe_mlp import moe_mlp_with_offsets

NAME = "moe_runtime"
OLDEST = "5.16"  # the first transformers whose interface has all that this file reads
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# parts of a path in which PEFT keeps what it adapts or trains a copy of
ADAPTED = {"base_layer", "original_module", "modules_to_save"}
# attribute of an experts module that `patch` has changed: its implementation before
BEFORE = "moe_runtime_replaced"


def register() -> None:
    """Make `experts_implementation="moe_runtime"` known to transformers; a second call changes nothing.

    Then `from_pretrained(..., experts_implementation="moe_runtime")` or `model.set_experts_implementation("moe_runtime")`.
    Raises ImportError for a transformers older than 5.16.
    """
    import transformers

    if Version(transformers.__version__) < Version(OLDEST):
        raise ImportError(
            f"transformers is {transformers.__version__}, whose experts cannot be replaced; want >={OLDEST},<6; "
            f"pip install -U 'transformers>={OLDEST},<6'"
        )
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def patch(model: nn.Module) -> int:
    """Run the experts of `model` through moe_runtime from now on and return how many layers that are; `unpatch` undoes it.

    Our own MoE layers count: they run nothing else. Unlike `set_experts_implementation` it works on wrapped models (PEFT, DDP)
    too and never leaves a model as it was in silence: raises ValueError where no module goes through transformers' experts
    interface, or where the experts are quantized.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; want a torch module")
    register()
    layers = {name: module for name, module in model.named_modules() if is_experts(module)}
    ours = sum(isinstance(module, MoE) for module in model.modules())
    if not layers and not ours:
        raise ValueError(
            f"model is {type(model).__name__}, without experts that go through transformers' experts interface; want a MoE "
            "model whose modeling file uses it (docs/families.md lists them)"
        )
    for name, module in layers.items():
        _check_dtype(module.down_proj.dtype, name)
    for module in layers.values():
        if module.config._experts_implementation != NAME:
            setattr(module, BEFORE, module.config._experts_implementation)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation(NAME)
    missed = [name for name, module in layers.items() if module.config._experts_implementation != NAME]
    if missed:
        still = layers[missed[0]].config._experts_implementation
        unpatch(model)
        raise ValueError(
            f"experts_implementation of {missed[0] or type(model).__name__} is {still!r} still; want {NAME!r}; load the model "
            "through a class of transformers"
        )
    return len(layers) + ours


def unpatch(model: nn.Module) -> None:
    """Give the experts of `model` back the implementation that they had before `patch`, by whatever wrapper that was called.

    Experts that `patch` has not changed stay as they are.
    """
    for module in model.modules():
        before = module.__dict__.pop(BEFORE, None)
        if before is not None:
            module.config._experts_implementation = before


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is a stock experts module: one whose class transformers' decorator has been at."""
    return hasattr(type(module), "_apply_gate") and all(
        hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
    )


class Stacks(NamedTuple):
    """An experts module's weights as [E, out, in], strides as they come, and its biases."""

    up: torch.Tensor  # [E, 2I or I, H]
    down: torch.Tensor  # [E, H, I]
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def stacks_of(module: nn.Module) -> Stacks:
    """Read the weights as they are now, under FSDP, PEFT or tensor parallelism too; each once, since a look may compute."""
    return _as_out_in(module, [None if name is None else getattr(module, name) for name in stack_names(module)])


def stack_names(module: nn.Module) -> tuple[str | None, ...]:
    """Return the names of the up and down projections and of their biases, None where it has none."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return (up, "down_proj", *((f"{up}_bias", "down_proj_bias") if module.has_bias else (None, None)))


def _as_out_in(module: nn.Module, tensors: list) -> Stacks:
    if module.is_transposed:
        tensors[:2] = [weight.transpose(1, 2) for weight in tensors[:2]]
    return Stacks(*tensors)


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run `hidden_states` [T, H] through the experts module `self`: ids and weights [T, K] -> [T, H] in hidden_states' dtype.

    Computes in the weights' dtype or, under autocast, in autocast's; weights and sums stay float32. A slot with an id outside
    0..E-1 (expert parallelism's sentinel) contributes nothing and gets no gradient.
    """
    rows = trainable.trained_parameters(self)
    tensors = [*stacks_of(self)] + ([*_as_out_in(self, [rows.get(name) for name in stack_names(self)])] if rows else [])
    tensors, owners = all_to_all.local_parts(tensors, self.__dict__.get(all_to_all.GRADIENTS_OF, "mean"))
    _check_dtype(tensors[1].dtype, type(self).__name__)
    dtype, options = autocast_dtype(hidden_states) or tensors[1].dtype, {}
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    if rows:
        tensors[2:4], options = trainable.apart(self, tensors[:4], tensors[4:])
    gate, stacks = gate_of(self), Stacks(*tensors[:4])
    run = functools.partial(_composed if gate is None else functools.partial(_fused, gate=gate), self)
    run = functools.partial(run, stacks=stacks, options=options)
    if owners is not None:  # expert parallelism
        run = functools.partial(all_to_all.run_at_owners, owners=owners, run=run)
    out, expert_offsets = run(hidden_states.to(dtype), top_k_index, top_k_weights)
    counts = getattr(self, "moe_runtime_counts", None)
    if counts is not None:  # a RouterCounter is open
        counts += expert_offsets.diff()
    return out.to(hidden_states.dtype)


def _check_dtype(dtype: torch.dtype, name: str) -> None:
    if dtype not in FLOATS:
        raise ValueError(
            f"the experts of {name} are {dtype}; want float16, bfloat16, float32 or float64: quantized experts have "
            "implementations of their own in transformers"
        )


def _fused(module, x, topk_idx, topk_weight, stacks: Stacks, options: dict, gate: Activation):
    return moe_mlp_with_offsets(
        x,
        stacks.up,
        stacks.down,
        topk_weight,
        topk_idx,
        act=gate.act,
        gated=gate.gated,
        limit=gate.limit,
        up_offset=gate.up_offset,
        interleaved=gate.interleaved,
        gate_up_bias=stacks.up_bias,
        down_bias=stacks.down_bias,
        **options,
    )


def _composed(module, x, topk_idx, topk_weight, stacks: Stacks, options: dict):
    """Two grouped products with the class's own code between them."""
    place, (up, down) = options.get("trainable"), options.get("trained", (None, None))
    E = stacks.up.shape[0]
    expert_offsets, row_token, _, slot_row = dispatch(topk_idx, E)
    rows = gather_rows(x, row_token, slot_row)
    z = grouped_gemm(rows, stacks.up, expert_offsets, stacks.up_bias, trainable=place, trained=up)
    h = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    y = grouped_gemm(h.to(x.dtype), stacks.down, expert_offsets, stacks.down_bias, trainable=place, trained=down)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y).to(x.dtype)
    # a norm may make something of the rows behind the last expert
    return combine(y, live_weights(topk_weight, topk_idx, E), slot_row), expert_offsets
