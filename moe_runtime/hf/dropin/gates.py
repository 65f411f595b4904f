"""Detect stock experts, and determine numerically, once per class, what they compute between their
two products.

If it is h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset) with an activation of
`moe_mlp`, that op runs all of it. Anything that could change the numbers without changing the class
(a gate or a forward set on an instance, hooks, an activation with state, an unknown attribute)
makes the result None, and the class's own code runs.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.backends import constant_in_graphs
from moe_runtime.modules.moe import Experts, is_plain
from moe_runtime.ops._torch_private import outside_of_modes
from moe_runtime.ops.activation import ACT, QUICK, Activation

NAME = "moe_runtime"  # of our implementation, in transformers' interface
# attribute of an experts module: its Activation, if it depends on the instance
GATE = "moe_runtime_gate"
LIMITS = ("limit", "swiglu_limit")  # attributes that classes clamp by
ALPHAS = ("alpha", "swiglu_alpha")  # and scale by, inside the sigmoid
# packages whose activations are determined by their types; others may have state
PLAIN_MODULES = ("torch.nn.modules.activation", "transformers.activations")
PLAIN_FUNCTIONS = ("torch", "torch.nn.functional", "torch._C._nn")


class GateForm(NamedTuple):
    """The gate of a class, and the attributes of an instance that hold its parameters."""

    activation: Activation
    limit: str | None = None
    alpha: str | None = None


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` is a stock experts module, with a class decorated by transformers."""
    return hasattr(type(module), "_apply_gate") and all(
        hasattr(module, name)
        for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
    )


def has_stacks(module: nn.Module) -> bool:
    """Return whether `module` holds stacks of experts: stock ones, or our Experts."""
    return isinstance(module, Experts) or is_experts(module)


def stack_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the up and down projections and of their biases, if any."""
    if isinstance(module, Experts):
        return module.stacks()
    up = "gate_up_proj" if module.has_gate else "up_proj"
    if module.has_bias:
        return (up, "down_proj", f"{up}_bias", "down_proj_bias")
    return (up, "down_proj")


def gate_of(module: nn.Module) -> Activation | None:
    """Return what the experts module computes between its products, or None if `moe_mlp` does not
    support it.

    All attributes that the result depends on are read here, so that torch.compile guards them and
    one graph serves all layers.
    """
    if isinstance(module, Experts):
        return module.activation()
    if GATE in module.__dict__:
        return module.__dict__[GATE]
    act_fn = getattr(module, "act_fn", None)
    if "_apply_gate" in module.__dict__ or getattr(module, "has_post_expert_norm", False):
        return None
    if isinstance(act_fn, nn.Module):
        if not is_plain(act_fn, type(act_fn)):
            return None
        form = _form(
            type(module), module.has_gate, type(act_fn), getattr(act_fn, "approximate", None)
        )
    else:
        form = _form(type(module), module.has_gate, act_fn, None)
    return None if form is None else _of_instance(form, module)


def note_gate(module: nn.Module) -> Activation | None:
    """Determine what one instance computes, store it for `gate_of`, and return it.

    Used for FP8Experts, a single class for the gates of all families whose branches depend on the
    instance's parameters.
    """
    if module.has_gate:
        limits = {getattr(module, name, None) for name in LIMITS} | {None}
        apply_gate = functools.partial(type(module)._apply_gate, module)
        gate = _first_equal(apply_gate, _known_gates(limits, (False,)))
    else:
        gate = gate_of(module)
    module.__dict__[GATE] = gate
    return gate


def _known_gates(limits: Iterable[float | None], interleaved: Iterable[bool]) -> dict:
    """Return the gates that `moe_mlp` supports with these parameters, and what they compute."""
    gates = itertools.product(ACT, [True], limits, (0.0, 1.0), interleaved)
    return {gate: gate.apply for gate in itertools.starmap(Activation, gates)}


def _of_instance(form: GateForm, module: nn.Module) -> Activation | None:
    """Fill in the instance's parameters; None for values that `moe_mlp` does not support."""
    # by name, as torch 2.11 cannot trace unpacking a constant tuple
    activation = form.activation
    act = activation.act
    limit = None
    if form.alpha is not None:
        alpha = getattr(module, form.alpha)
        if not isinstance(alpha, (int, float)) or not (alpha == QUICK or alpha == 1):
            return None
        act = "quick_gelu" if alpha == QUICK else "silu"
    if form.limit is not None:
        limit = getattr(module, form.limit)
        if not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
            return None
    return Activation(act, activation.gated, limit, activation.up_offset, activation.interleaved)


@constant_in_graphs  # a module as argument would make the graph specific to it
def _form(kind: type, gated: bool, act_fn, approximate: str | None) -> GateForm | None:
    """Return the form of a class; `act_fn` is the type of an activation, a function or None."""
    act = _name_of(act_fn, approximate)
    if not gated:
        return None if act is None else GateForm(Activation(act, gated=False))
    return _form_of_gate(kind._apply_gate, act)


@functools.lru_cache(maxsize=64)
def _name_of(act_fn, approximate: str | None) -> str | None:
    """Return the name of the activation with the same values, or None if ACT has none."""
    if isinstance(act_fn, type):
        if act_fn.__module__ not in PLAIN_MODULES:
            return None
        options = {} if approximate is None else {"approximate": approximate}
        return _first_equal(act_fn(**options), ACT)
    if getattr(act_fn, "__module__", None) not in PLAIN_FUNCTIONS:
        return None
    return _first_equal(act_fn, ACT)


class _StandIn:
    """A stand-in for an experts module with an activation and given parameters, which records which
    of them were read.
    """

    def __init__(self, act: str | None, limit: float, alpha: float):
        self._act = act
        self._numbers = dict.fromkeys(LIMITS, limit) | dict.fromkeys(ALPHAS, alpha)
        self.read = set()

    def __getattr__(self, name: str):
        if name == "act_fn" and self._act is not None:
            return ACT[self._act]
        if name in self._numbers:
            self.read.add(name)
            return self._numbers[name]
        raise LookupError(name)  # not AttributeError, which a getattr with a default would hide


@functools.lru_cache(maxsize=256)
def _form_of_gate(apply_gate, act: str | None) -> GateForm | None:
    """Run a class's `_apply_gate` on numbers and determine which supported form it is.

    The class itself cannot be the cache key, as PEFT creates a new one at every call.
    """
    gates = []
    for limit, alpha in ((3.0, QUICK), (0.7, QUICK), (3.0, 1.0)):
        stand_in = _StandIn(act, limit, alpha)
        known = _known_gates((None, limit), (False, True))
        gates.append(_first_equal(functools.partial(apply_gate, stand_in), known))
    limits = [name for name in LIMITS if name in stand_in.read]
    alphas = [name for name in ALPHAS if name in stand_in.read]
    if None in gates or len(limits) > 1 or len(alphas) > 1:
        return None
    # every attribute that is read must affect the result in the assumed way
    first, with_other_limit, with_other_alpha = gates
    if (first.limit is not None) != bool(limits) or (alphas and first.act != "quick_gelu"):
        return None
    expected = first._replace(limit=0.7) if limits else first
    if with_other_limit != expected:
        return None
    expected = first._replace(act="silu") if alphas else first
    if with_other_alpha != expected:
        return None
    return GateForm(first, *(limits or [None]), *(alphas or [None]))


@torch.no_grad()
def _first_equal(function, candidates: dict):
    """Return the key of the first candidate equal to `function`; None if there is none, or if it
    cannot run.
    """
    with outside_of_modes():  # an outer fake or meta mode would give no numbers
        # both signs of both parts, unordered, and large enough that a clamp has an effect
        generator = torch.Generator(device="cpu").manual_seed(0)
        z = torch.randn(96, 16, dtype=torch.float64, device="cpu", generator=generator)
        scales = torch.tensor([0.5, 5.0, 50.0, 1e3, 1e5, 1e8], dtype=z.dtype, device="cpu")
        z *= scales.repeat_interleave(16)[:, None]
        try:
            values = function(z.clone())
        except Exception:  # a class that needs more than numbers runs through its own code
            return None
        for key, candidate in candidates.items():
            known = candidate(z)
            if known.shape != values.shape:
                continue
            if torch.allclose(known, values.to(known.dtype), rtol=1e-6, atol=1e-9):
                return key
    return None
