"""Our experts behind transformers' experts interface: `experts_implementation="moe_runtime"` for every stock MoE model.

    out[t] = sum_k top_k_weights[t, k] norm(down_e(gate_e(up_e x[t]))),   e = top_k_index[t, k]

`norm` is the identity but for models with a norm behind each expert. The router stays the model's own. What a class does
between its two products is found out numerically, once: where it is h = act(min(gate, limit)) * (clamp(up, -limit, limit) +
up_offset) with an activation that our kernels know, `moe_mlp` runs all of it; anything else goes through the class's own
`_apply_gate` between two grouped products. Parameters keep their names, shapes and layout.
"""

import functools
import itertools
import types
import weakref
from typing import NamedTuple

import torch
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from moe_runtime.modules.moe import MoE, autocast_dtype
from moe_runtime.ops import all_to_all
from moe_runtime.ops.activation import ACT, Activation, activate
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.moe_mlp import moe_mlp_with_offsets

NAME = "moe_runtime"
OLDEST = "5.16"  # the first transformers whose interface has all that this file reads
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# what the classes' own gates read of their experts module
_SCALARS = ("limit", "alpha", "swiglu_limit", "swiglu_alpha")
_replaced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model: [(config, implementation before patch)]


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
    if model not in _replaced:
        _replaced[model] = [(module.config, module.config._experts_implementation) for module in layers.values()]
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation(NAME)
    missed = [name for name, module in layers.items() if module.config._experts_implementation != NAME]
    if missed:
        raise ValueError(
            f"experts_implementation of {missed[0]} is {layers[missed[0]].config._experts_implementation!r} still; want "
            f"{NAME!r}; load the model through a class of transformers"
        )
    return len(layers) + ours


def unpatch(model: nn.Module) -> None:
    """Give `model` back the implementation that it had before `patch`; a model that was not patched stays as it is."""
    for config, before in _replaced.pop(model, ()):
        config._experts_implementation = before


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
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = [up, "down_proj"] + ([f"{up}_bias", "down_proj_bias"] if module.has_bias else [])
    tensors = [getattr(module, name) for name in names] + [None] * (4 - len(names))
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
    stacks, owners = all_to_all.local_parts(stacks_of(self), self.__dict__.get(all_to_all.GRADIENTS_OF, "mean"))
    stacks = Stacks(*stacks)
    _check_dtype(stacks.down.dtype, type(self).__name__)
    dtype = autocast_dtype(hidden_states) or stacks.down.dtype
    stacks = Stacks(*(None if tensor is None else tensor.to(dtype) for tensor in stacks))
    gate = gate_of(self)
    run = functools.partial(_composed if gate is None else functools.partial(_fused, gate=gate), self, stacks=stacks)
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


def _fused(module, x, topk_idx, topk_weight, stacks: Stacks, gate: Activation):
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
    )


def _composed(module, x, topk_idx, topk_weight, stacks: Stacks):
    """Two grouped products with the class's own code between them."""
    E = stacks.up.shape[0]
    expert_offsets, row_token, _, slot_row = dispatch(topk_idx, E)
    rows = gather_rows(x, row_token, slot_row)
    z = grouped_gemm(rows, stacks.up, expert_offsets, stacks.up_bias)
    h = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    y = grouped_gemm(h.to(x.dtype), stacks.down, expert_offsets, stacks.down_bias)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y).to(x.dtype)
    # a norm may make something of the rows behind the last expert
    live = (topk_idx >= 0) & (topk_idx < E)
    return combine(y, topk_weight.masked_fill(~live, 0), slot_row), expert_offsets


def gate_of(module: nn.Module) -> Activation | None:
    """Return what the module does between its products, None if `moe_mlp` does not have it."""
    gate, scalars = _gate_of(module)
    # torch.compile guards what it sees compared, and nothing that _gate_of reads
    for name, known in zip(_SCALARS, scalars):
        if known is not None and getattr(module, name, None) != known:
            raise RuntimeError(f"{name} of {type(module).__name__} changed while it was read")
    return gate


def _gate_of(module: nn.Module) -> tuple[Activation | None, tuple]:
    scalars = tuple(getattr(module, name, None) for name in _SCALARS)
    if getattr(module, "has_post_expert_norm", False):
        return None, scalars
    act = _act_of(getattr(module, "act_fn", None))
    if not module.has_gate:
        return (None if act is None else Activation(act, gated=False)), scalars
    return _find_gate(type(module)._apply_gate, act, scalars), scalars


# what torch.compiler.assume_constant_result sets: tracing runs it for real
_gate_of._dynamo_marked_constant = True
_acts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _act_of(act_fn) -> str | None:
    """Name the activation, by its values; None if `moe_mlp` has none like it."""
    if act_fn is None:
        return None
    if act_fn not in _acts:
        _acts[act_fn] = _first_equal(act_fn, ACT)
    return _acts[act_fn]


@functools.lru_cache(maxsize=256)
def _find_gate(apply_gate, act: str | None, scalars: tuple) -> Activation | None:
    """Run a class's `_apply_gate` on numbers and find out which of ours it is.

    The class itself would be no key: PEFT makes a new one at every call.
    """
    attributes = {name: value for name, value in zip(_SCALARS, scalars) if value is not None}
    stand_in = types.SimpleNamespace(act_fn=ACT.get(act), **attributes)
    limits = [None, *{float(value) for name, value in attributes.items() if name.endswith("limit")}]
    gates = itertools.product(ACT, [True], limits, (0.0, 1.0), (False, True))
    known = {gate: functools.partial(activate, **gate._asdict()) for gate in itertools.starmap(Activation, gates)}
    return _first_equal(functools.partial(apply_gate, stand_in), known)


@torch.no_grad()
def _first_equal(wanted, candidates: dict):
    """Return the key of the first candidate that computes what `wanted` does; None without one, or if `wanted` cannot run."""
    with _disable_current_modes():  # inside somebody's fake or meta mode there would be no numbers
        # both parts of a gate far beyond the usual limits, in both signs and in no order
        generator = torch.Generator(device="cpu").manual_seed(0)
        z = 12 * torch.randn(64, 16, dtype=torch.float64, device="cpu", generator=generator)
        try:
            values = wanted(z)
        except Exception:  # a class that needs more than numbers; it runs through its own code
            return None
        for key, candidate in candidates.items():
            got = candidate(z)
            if got.shape == values.shape and torch.allclose(got, values.to(got.dtype), rtol=1e-6, atol=1e-9):
                return key
    return None
