"""What the backends of `moe_mlp` share: the experts' weights, their rows in expert order, and their gradients.

    rows of expert e: expert_offsets[e] <= r < expert_offsets[e + 1];  d down_e = dy^T wh,  d gate_up_e = dz^T x  over them

Weights of the experts that train may lie apart from the stack of all, as in `grouped_gemm`:

    weight of e = trained[trainable[e]] where trainable[e] >= 0, else stack[e]
"""

import itertools
from typing import NamedTuple

import torch

from moe_runtime.ops.activation import Activation
from moe_runtime.ops.workspace import lease

ROWS = 8  # a matmul of 255 rows takes 15 % longer than one of 256 in float32; 2 cores, torch 2.13, 2026-11-20
PADDED_FROM = 4  # rows; fewer take the way of a matrix and a vector, which is faster
GROUP_ELEMENTS = 1 << 19  # rows of the experts that go together, times the columns of the widest buffer


def check_place(trainable, trained, stack: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless `trainable` [E] fits `stack` [E, ...]: a mask, or int32 with `trained`, as `dtype` says."""
    fits = trainable is not None and trainable.shape == stack.shape[:1] and trainable.dtype == dtype
    if not fits or trainable.device != stack.device or (trained is None) != (dtype == torch.bool):
        got = None if trainable is None else f"{tuple(trainable.shape)} {trainable.dtype} on {trainable.device}"
        wanted = f"[{stack.shape[0]}] {str(dtype).removeprefix('torch.')} on {stack.device}"
        raise ValueError(f"trainable is {got}; want {wanted}{'' if dtype == torch.bool else ', and trained with it'}")


def check_apart(name: str, apart: torch.Tensor, stack_name: str, stack: torch.Tensor) -> None:
    """Raise ValueError unless `apart` [n, ...] may hold rows that train in place of the stack's."""
    if apart.shape[1:] != stack.shape[1:] or apart.dtype != stack.dtype or apart.device != stack.device:
        raise ValueError(
            f"{name} is {tuple(apart.shape)} {apart.dtype} on {apart.device}; want [n, *{list(stack.shape[1:])}] "
            f"{stack.dtype} on {stack.device}"
        )
    if stack.requires_grad:
        raise ValueError(f"{stack_name} requires a gradient; want it frozen where `trained` holds what trains")


def trained_rows(E: int, trainable: torch.Tensor | None) -> list[int]:
    """Return for each expert the row of the weights that train, -1 if it is frozen; `trainable` [E], bools or such rows."""
    if trainable is None:
        return list(range(E))
    if trainable.dtype == torch.bool:
        return [e if trains else -1 for e, trains in enumerate(trainable.tolist())]
    return trainable.tolist()


def weight_at(e: int, row: int, stack: torch.Tensor, apart: torch.Tensor | None) -> torch.Tensor:
    """Return expert e's weight [out, in]: `row` of `apart` [n, out, in] if it trains there, else of `stack` [E, out, in]."""
    return stack[e] if apart is None or row < 0 else apart[row]


class Experts(NamedTuple):
    """The weights of all experts and what to do with them."""

    up: torch.Tensor  # [E, 2I or I, H]
    down: torch.Tensor  # [E, H, I]
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: Activation
    shared: str = "group"  # "dense": the Triton backend leaves expert 0's matmuls to torch
    trainable: torch.Tensor | None = (
        None  # [E] bool, or with the two below int32: their row that is the expert's, or -1
    )
    up_trained: torch.Tensor | None = None  # [n, 2I or I, H]
    down_trained: torch.Tensor | None = None  # [n, H, I]

    def rows(self) -> list[int]:
        """Return for each expert the row of the trainable weights that it has, -1 if it is frozen."""
        return trained_rows(self.up.shape[0], self.trainable)

    def at(self, e: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of expert e, whose place among the trainable ones is `row`."""
        return weight_at(e, row, self.up, self.up_trained), weight_at(e, row, self.down, self.down_trained)


class Member(NamedTuple):
    """An expert of a group; its rows count from the group's first."""

    expert: int
    start: int
    end: int
    padded: int  # the end, moved on to a multiple of ROWS rows if there are so many

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return its rows of a group's, [rows, ...]; a view."""
        return rows[self.start : self.end]

    def wide(self, rows: torch.Tensor) -> torch.Tensor:
        """Return its rows and those up to the padded end, [rows, ...]; a view.

        What is computed for the rows of later experts is overwritten when their turn comes: experts go in ascending order.
        """
        return rows[self.start : self.padded]


class Group(NamedTuple):
    """Neighbouring experts, whose rows are gathered and go through the activation together."""

    start: int
    end: int  # the last member's padded one
    members: list[Member]
    everyone: bool  # one expert that sees every token once, in order


def groups(bounds: list[int], everyone: list[bool], R: int, width: int):
    """Yield the experts that have rows, as many at a time as GROUP_ELEMENTS lets in; `everyone` says who sees every token."""
    members, start = [], 0
    for e, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            continue
        if members and (everyone[e] or (b - start) * width > GROUP_ELEMENTS):
            yield Group(start, start + members[-1].padded, members, False)
            members = []
        if everyone[e]:
            yield Group(a, b, [Member(e, 0, b - a, b - a)], True)
            continue
        start = start if members else a
        padded = min(a + -(-(b - a) // ROWS) * ROWS, R) if b - a > PADDED_FROM else b
        members.append(Member(e, a - start, b - start, padded - start))
    if members:
        yield Group(start, start + members[-1].padded, members, False)


class Gradients(NamedTuple):
    """Gradients of a backend's `forward`; None where the input has no such part or needs none."""

    x: torch.Tensor | None
    up: torch.Tensor | None
    down: torch.Tensor | None
    topk_weight: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def new_gradients(experts: Experts, bounds: list[int], trained: list[int], needs) -> tuple[torch.Tensor | None, ...]:
    """Return memory for the gradients of up, down and their biases that `needs` asks for; of who has no rows, zeros."""
    weights = experts[:2] if experts.up_trained is None else experts[-2:]
    up, down, _, up_bias, down_bias = (
        # the page faults of fresh memory would take a sixth of the time of a pass with 64 experts
        lease(tuple(t.shape), t) if t is not None and need else None
        for t, need in zip((*weights, None, *experts[2:4]), needs[1:])
    )
    E = len(trained)
    idle = [e for e in range(E) if bounds[e] == bounds[e + 1] or trained[e] < 0]
    # of weights that lie apart, those that are no expert's get zeros too
    busy = {e if experts.up_trained is None else trained[e] for e in set(range(E)).difference(idle)}
    for grads, rows in (((up, down), set(range(weights[0].shape[0])).difference(busy)), ((up_bias, down_bias), idle)):
        for grad, row in itertools.product((grad for grad in grads if grad is not None), rows):
            grad[row].zero_()
    return up, down, up_bias, down_bias


def weight_gradients(grads: Gradients, member: Member, row: int, dy, wh, dz, rows) -> None:
    """Fill an expert's gradients: down[row] = dy^T wh, up[row] = dz^T x; biases are sums over the rows."""
    e, dy, dz = member.expert, member.own(dy), member.own(dz)
    if grads.down is not None:
        torch.mm(dy.t(), member.own(wh), out=grads.down[row])
    if grads.up is not None:
        torch.mm(dz.t(), member.own(rows), out=grads.up[row])
    if grads.up_bias is not None:
        grads.up_bias[e].copy_(dz.sum(0))
    if grads.down_bias is not None:
        weight = member.own(grads.topk_weight)
        grads.down_bias[e].copy_(weight @ dy.to(weight.dtype))
