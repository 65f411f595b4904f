"""How tensors lie in memory, and how far a result may be from the float64 equation.

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

Tensors = dict[str, torch.Tensor]
LAYOUTS = ("plain", "transposed", "sliced", "offset", "expanded", "gaps")
# the sums' worst order of rounding, and what a few random perturbations miss of the worst one
SLACK = 8.0
PROBES = 4


def held(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor's values in other memory; expanded: the first index of dim 0 for all.

    transposed: the last two dims changed places | sliced: every second column | offset: behind
    numbers of somebody else | gaps: rows that lie apart. What is in between is NaN, which nobody
    may read.
    """
    if tensor.dim() == 0 or layout == "plain":
        return tensor.clone()
    if layout == "expanded":
        return tensor[:1].clone().expand(tensor.shape) if len(tensor) else tensor.clone()
    if layout == "transposed" and tensor.dim() > 1:
        return (
            tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)
        )
    if layout == "sliced":
        return _inside(
            tensor, (*tensor.shape[:-1], 2 * tensor.shape[-1]), lambda room: room[..., 1::2]
        )
    if layout == "gaps":
        return _inside(
            tensor,
            (*tensor.shape[:-1], tensor.shape[-1] + 3),
            lambda room: room[..., : tensor.shape[-1]],
        )
    return _inside(tensor, (tensor.numel() + 7,), lambda room: room[5:-2].view(tensor.shape))


def _inside(tensor: torch.Tensor, shape: tuple[int, ...], view: Callable) -> torch.Tensor:
    nobody = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    place = view(torch.full(shape, nobody, dtype=tensor.dtype))
    place.copy_(tensor)
    return place


@dataclass
class Case:
    """An op on inputs: `product(leaves, backend)` and `oracle(leaves in float64, what the product
    gave)` name their outputs.

    `sums` is the longest sum's length and `unit` the ulp of intermediate results; `scales` are the
    sizes of the terms of gradients in which they cancel whatever the inputs are.
    """

    leaves: Tensors
    product: Callable[[Tensors, str], Tensors]
    oracle: Callable[[Tensors, Tensors], Tensors]
    sums: int = 1
    unit: float = torch.finfo(torch.float32).eps
    scales: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def __repr__(self) -> str:
        tensors = (
            f"{n} {tuple(t.shape)} {t.dtype} by {t.stride()}" for n, t in self.leaves.items()
        )
        return f"{self.note}: {', '.join(tensors)}"


def _with_gradients(outputs: Tensors, leaves: Tensors, upstream: Tensors) -> Tensors:
    """The outputs, and d<leaf> of the sum of their products with `upstream`."""
    floats = {n: t for n, t in leaves.items() if t.requires_grad}
    roots = {n: t for n, t in outputs.items() if t.requires_grad}
    found = {n: t.detach() for n, t in outputs.items()}
    if not roots or not floats:
        return found
    into = [upstream[n].to(t.dtype) for n, t in roots.items()]
    grads = torch.autograd.grad([*roots.values()], [*floats.values()], into, allow_unused=True)
    return found | {
        f"d{n}": torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(floats.items(), grads, strict=True)
    }


def run(case: Case, backend: str, upstream: Tensors | None = None) -> Tensors:
    """What the product gives, every gradient included; `upstream` is made and filled if it is
    empty.
    """
    leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in case.leaves.items()}
    outputs = case.product(leaves, backend)
    upstream = {} if upstream is None else upstream
    for name, tensor in outputs.items():
        if tensor.requires_grad and name not in upstream:
            upstream[name] = torch.randn(tensor.shape).to(tensor.dtype)
    return _with_gradients(outputs, leaves, upstream)


def _equation(case: Case, got: Tensors, upstream: Tensors, nudge: float) -> Tensors:
    """The oracle in float64, each number of its inputs off by +-`nudge` of itself."""

    def near(t):
        return t.double() * (1 + nudge * torch.randint(0, 2, t.shape).mul(2).sub(1).double())

    leaves = {
        n: near(t).requires_grad_() if t.is_floating_point() else t for n, t in case.leaves.items()
    }
    return _with_gradients(
        case.oracle(leaves, got), leaves, {n: near(t) for n, t in upstream.items()}
    )


class Allowance(NamedTuple):
    """The equation's results, how far each of their numbers moved (squared), and the ulp that moved
    them.
    """

    want: Tensors
    moved: Tensors
    ulp: float
    scales: dict[str, float]


def allowance(case: Case, got: Tensors, upstream: Tensors) -> Allowance:
    """What the equation gives, and what rounding explains; `got` tells the oracle which of equal
    choices were made.
    """
    ulp = case.unit + math.sqrt(case.sums) * torch.finfo(torch.float32).eps
    if all(t.dtype == torch.float64 for t in case.leaves.values() if t.is_floating_point()):
        ulp = math.sqrt(case.sums) * torch.finfo(torch.float64).eps
    want = _equation(case, got, upstream, 0.0)
    near = [_equation(case, got, upstream, ulp) for _ in range(PROBES)]
    floats = [name for name, true in want.items() if true.is_floating_point()]
    moved = {
        name: torch.stack([other[name] - want[name] for other in near]).square().mean(0)
        for name in floats
    }
    return Allowance(want, moved, ulp, case.scales)


def mismatches(got: Tensors, allowed: Allowance) -> list[str]:
    """What is farther from the equation than rounding explains."""
    if got.keys() != allowed.want.keys():
        return [f"got {sorted(got)}, want {sorted(allowed.want)}"]
    bad = []
    for name, true in allowed.want.items():
        tensor = got[name]
        if tensor.shape != true.shape:
            bad.append(f"{name} is {tuple(tensor.shape)}; want {tuple(true.shape)}")
        elif name not in allowed.moved:
            if tensor.is_floating_point() or not torch.equal(tensor.long(), true.long()):
                bad.append(f"{name} is {tensor.tolist()}; want {true.tolist()}")
        elif tensor.numel():
            bad += _too_far(name, tensor, true, allowed.moved[name], allowed)
    return bad


def _too_far(
    name: str, got: torch.Tensor, want: torch.Tensor, moved: torch.Tensor, case: Allowance
) -> list[str]:
    """The slices along dim 0 whose error is beyond SLACK times the allowance, of which a slice has
    its mean share at least.
    """
    info = torch.finfo(got.dtype)
    floor = case.scales.get(name, 0.0) * case.ulp
    allowed = (
        moved + (max(info.eps, case.ulp) * want).square() + floor**2 + (info.tiny * info.eps) ** 2
    )
    error = (got.double() - want).square()
    allowed = allowed.expand(want.shape)
    if want.dim():
        error, allowed = (t.reshape(len(t), -1).sum(1) for t in (error, allowed))
        allowed = allowed.clamp_min(allowed.mean().item())
    # nothing is allowed where all terms are zero
    ratio = torch.where(error == 0, 0.0, (error / allowed).sqrt())
    worst = ratio.max().item()
    if math.isfinite(worst) and worst <= SLACK:
        return []
    return [
        (
            f"{name}: an error of {error.max().sqrt():.2e} is {worst:.1f} times its allowance; "
            f"want at most {SLACK}"
        )
    ]
