"""Run a case, and say how far its results may be from the float64 equation.

The allowance is that of a backward stable computation: what the result moves by when every input
moves by an ulp of the precision that intermediate results have (measured, in float64, at random
signs), as many ulps of float32 as the square root of the longest sum, and one rounding of the
result itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moe_runtime.tools.conformance.draw import placed

Tensors = dict[str, torch.Tensor]
# room for the worst order of rounding in a sum, and for what a few random perturbations miss
SLACK = 8.0
PROBES = 4
CPU = torch.device("cpu")


@dataclass
class Case:
    """An op on inputs: `product(tensors, backend)` and `oracle(leaves in float64, what the product
    gave)` name their outputs.
    """

    leaves: Tensors  # get gradients
    product: Callable[[Tensors, str], Tensors]  # given the leaves and `fixed`
    oracle: Callable[[Tensors, Tensors], Tensors]
    fixed: Tensors = field(default_factory=dict)  # other tensors, on the device of the leaves
    sums: int = 1  # length of the longest sum
    unit: float = torch.finfo(torch.float32).eps  # ulp of intermediate results
    # sizes of the terms of gradients in which they cancel whatever the inputs are
    scales: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def __repr__(self) -> str:
        tensors = []
        for name, t in (self.leaves | self.fixed).items():
            tensors.append(f"{name} {tuple(t.shape)} {t.dtype} by {t.stride()}")
        return f"{self.note}: {', '.join(tensors)}"


def _with_gradients(outputs: Tensors, leaves: Tensors, upstream: Tensors) -> Tensors:
    """Return the outputs, and as d<leaf> the gradients of their sum weighted by `upstream`."""
    results = {name: t.detach().cpu() for name, t in outputs.items()}
    roots = {name: t for name, t in outputs.items() if t.requires_grad}
    if not roots or not leaves:
        return results
    into = [upstream[name].to(t) for name, t in roots.items()]
    grads = torch.autograd.grad([*roots.values()], [*leaves.values()], into, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaf).cpu() if grad is None else grad.cpu()
    return results


def run(
    case: Case, backend: str, upstream: Tensors | None = None, device: torch.device = CPU
) -> Tensors:
    """Return what the op gives and every gradient, on the CPU; draw what `upstream` lacks."""
    leaves = {name: placed(t, device).requires_grad_() for name, t in case.leaves.items()}
    fixed = {name: placed(t, device) for name, t in case.fixed.items()}
    outputs = case.product(leaves | fixed, backend)
    upstream = {} if upstream is None else upstream
    rng = torch.Generator().manual_seed(21)
    for name, tensor in sorted(outputs.items()):
        if tensor.requires_grad and name not in upstream:
            weights = torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
            upstream[name] = weights.to(tensor.dtype)
    return _with_gradients(outputs, leaves, upstream)


def _equation(
    case: Case, actual: Tensors, upstream: Tensors, nudge: float, rng: torch.Generator
) -> Tensors:
    """Return the oracle's results, each number of its inputs moved by +-`nudge` of itself."""

    def near(t: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, t.shape, generator=rng) * 2 - 1
        return t.double() * (1 + nudge * signs.double())

    leaves = {name: near(t).requires_grad_() for name, t in case.leaves.items()}
    outputs = case.oracle(leaves, actual)
    return _with_gradients(outputs, leaves, {name: near(t) for name, t in upstream.items()})


class Allowance(NamedTuple):
    """The equation's results, how far each of their numbers moved (squared), and the ulp that moved
    them.
    """

    expected: Tensors
    moved: Tensors
    ulp: float
    scales: dict[str, float]


def allowance(case: Case, actual: Tensors, upstream: Tensors) -> Allowance:
    """Return what the equation gives, and what rounding explains.

    `actual` tells the oracle which of several equal choices the op made.
    """
    rng = torch.Generator().manual_seed(22)
    ulp = case.unit + math.sqrt(case.sums) * torch.finfo(torch.float32).eps
    if all(t.dtype == torch.float64 for t in case.leaves.values()):
        ulp = math.sqrt(case.sums) * torch.finfo(torch.float64).eps
    expected = _equation(case, actual, upstream, 0.0, rng)
    near = [_equation(case, actual, upstream, ulp, rng) for _ in range(PROBES)]
    moved = {}
    for name, true in expected.items():
        if true.is_floating_point():
            moved[name] = torch.stack([one[name] - true for one in near]).square().mean(0)
    return Allowance(expected, moved, ulp, case.scales)


def errors(actual: Tensors, allowed: Allowance) -> dict[str, float]:
    """Return each result's largest error over its allowance; infinite for a wrong integer, shape or
    name, and for NaN.
    """
    ratios = {}
    for name in actual.keys() | allowed.expected.keys():
        ratios[name] = math.inf
        if name in actual and name in allowed.expected:
            ratios[name] = _error(name, actual[name], allowed)
    return ratios


def _error(name: str, actual: torch.Tensor, allowed: Allowance) -> float:
    expected = allowed.expected[name]
    if actual.shape != expected.shape or actual.is_floating_point() != expected.is_floating_point():
        return math.inf
    if name not in allowed.moved:
        return 0.0 if torch.equal(actual.long(), expected.long()) else math.inf
    if actual.numel() == 0:
        return 0.0
    info = torch.finfo(actual.dtype)
    floor = allowed.scales.get(name, 0.0) * allowed.ulp
    bound = allowed.moved[name] + (max(info.eps, allowed.ulp) * expected).square()
    bound = bound + floor**2 + (info.tiny * info.eps) ** 2
    error = (actual.double() - expected).square()
    bound = bound.expand(expected.shape)
    if expected.dim():
        # slices along dimension 0, each of which has at least the mean allowance
        error = error.reshape(len(error), -1).sum(1)
        bound = bound.reshape(len(bound), -1).sum(1)
        bound = bound.clamp_min(bound.mean().item())
    # nothing is allowed where all terms are zero
    ratio = torch.where(error == 0, 0.0, (error / bound).sqrt()).max().item()
    return ratio / SLACK if math.isfinite(ratio) else math.inf
