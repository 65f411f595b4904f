"""What the backends of `moe_mlp` share: the experts' weights, their rows in expert order, and their gradients.

    rows of expert e: expert_offsets[e] <= r < expert_offsets[e + 1];  d down_e = dy^T wh,  d gate_up_e = dz^T x  over them

Weights of the experts that train may lie apart from the stack of all, as in `grouped_gemm`:

    weight of e = trained[trainable[e]] where trainable[e] >= 0, else stack[e]
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from moe_runtime.ops.activation import FORM, Activation
from moe_runtime.ops.library import kind
from moe_runtime.ops.workspace import lease

ROWS = 8  # a matmul of 255 rows takes 15 % longer than one of 256 in float32; 2 cores, torch 2.13, 2026-11-20
PADDED_FROM = 4  # rows; fewer take the way of a matrix and a vector, which is faster
GROUP_ELEMENTS = 1 << 19  # rows of the experts that go together, times the columns of the widest buffer


def check_trained(stack: torch.Tensor, trainable, trained, name: str = "trained", masks: bool = True) -> None:
    """Raise ValueError unless `trainable` [E] int32 and `trained` [n, ...], called `name`, fit the frozen `stack` [E, ...].

    Without `trained`, `trainable` is a mask [E] bool, where the op takes `masks`.
    """
    if trainable is None and trained is None:
        return
    dtype = torch.bool if trained is None and masks else torch.int32
    fits = trainable is not None and trainable.shape == stack.shape[:1] and trainable.dtype == dtype
    if not fits or trainable.device != stack.device or (trained is None and not masks):
        wanted = f"[{stack.shape[0]}] {str(dtype).removeprefix('torch.')} on {stack.device}"
        wanted += "" if dtype == torch.bool else ", and trained with it"
        raise ValueError(f"trainable is {kind(trainable)}; want {wanted}")
    if trained is None:
        return
    if trained.shape[1:] != stack.shape[1:] or trained.dtype != stack.dtype or trained.device != stack.device:
        wanted = f"[n, *{list(stack.shape[1:])}] {stack.dtype} on {stack.device}"
        raise ValueError(f"{name} is {kind(trained)}; want {wanted}")
    if stack.requires_grad:
        raise ValueError(f"the stack beside {name} requires a gradient; want it frozen: `trained` holds what trains")


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


# an `Experts` as the ops take it
SCHEMA = (
    f"Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? trainable, Tensor? up_trained, Tensor? down_trained, "
    f"{FORM}, str shared"
)


_NONE = Activation(*[None] * len(Activation._fields))  # the gradient of an activation


class Experts(NamedTuple):
    """The experts of a layer: what goes from the public function through the ops to the kernels, in the order of SCHEMA."""

    up: torch.Tensor  # [E, 2I or I, H]
    down: torch.Tensor  # [E, H, I]
    up_bias: torch.Tensor | None = None  # [E, 2I or I]
    down_bias: torch.Tensor | None = None  # [E, H]
    trainable: torch.Tensor | None = None  # [E] bool; with the two below int32: the expert's row in them, or -1
    up_trained: torch.Tensor | None = None  # [n, 2I or I, H]
    down_trained: torch.Tensor | None = None  # [n, H, I]
    activation: Activation = Activation()
    shared: str = "group"  # "dense": the Triton backend leaves expert 0's matmuls to torch

    def pack(self) -> tuple:
        """Return the op arguments of SCHEMA."""
        *tensors, activation, shared = self
        return *tensors, *activation, shared

    @classmethod
    def unpack(cls, arguments: Sequence) -> "Experts":
        """Return the experts of the op arguments of SCHEMA, or what autograd says about each of these arguments."""
        *values, shared = arguments
        tensors = len(values) - len(Activation._fields)
        return cls(*values[:tensors], Activation(*values[tensors:]), shared)

    def requires_grad(self) -> bool:
        """Whether any of the tensors requires a gradient."""
        *tensors, _, _ = self
        return any([t.requires_grad for t in tensors if t is not None])

    def learned(self) -> "Gradients":
        """Return the tensors that may get a gradient: of weights stored in two places, those that train."""
        up, down = (self.up, self.down) if self.up_trained is None else (self.up_trained, self.down_trained)
        return Gradients(None, up, down, None, self.up_bias, self.down_bias)

    def needs(self, x: bool, topk_weight: bool, flags: Sequence) -> "Gradients":
        """Return which of x, topk_weight and `learned` need a gradient, by autograd's flag for each op argument of SCHEMA."""
        of = Experts.unpack(flags)
        up, down = (of.up, of.down) if self.up_trained is None else (of.up_trained, of.down_trained)
        return Gradients(x, up, down, topk_weight, of.up_bias, of.down_bias)

    def in_place(self, grads: "Gradients") -> tuple:
        """Return `grads` as the gradients of the op arguments of SCHEMA."""
        biases = {"up_bias": grads.up_bias, "down_bias": grads.down_bias, "activation": _NONE, "shared": None}
        if self.up_trained is None:
            return Experts(grads.up, grads.down, **biases).pack()
        return Experts(None, None, up_trained=grads.up, down_trained=grads.down, **biases).pack()

    def rows(self) -> list[int]:
        """Return each expert's row in the weights that train, -1 for a frozen expert."""
        return trained_rows(self.up.shape[0], self.trainable)

    def at(self, e: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return up and down of expert e, whose row in the weights that train is `row`."""
        return weight_at(e, row, self.up, self.up_trained), weight_at(e, row, self.down, self.down_trained)


class Gradients(NamedTuple):
    """Gradients of `moe_mlp`, None where the input is absent or needs none; as `needs`, which of them are asked for."""

    x: torch.Tensor | None
    up: torch.Tensor | None
    down: torch.Tensor | None
    topk_weight: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def only(self, needs: "Gradients") -> "Gradients":
        """Return those that `needs` asks for, None in place of the others."""
        return Gradients(*[grad if need else None for grad, need in zip(self, needs)])

    def besides(self, others: "Gradients") -> "Gradients":
        """Return those that are None in `others`, None in place of the rest."""
        return Gradients(*[grad if other is None else None for grad, other in zip(self, others)])


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


NOWHERE = Gradients(*[None] * len(Gradients._fields))


def accumulate_into_grad(parameters: Iterable[torch.Tensor], enabled: bool = True) -> None:
    """Let the backward pass add to the `.grad` of the stacks [E, ., .] among `parameters` in place, or to their `main_grad`.

    From the second micro-batch on, no gradient of a stack's size is made and added: with float32 gradients the result has
    the same bits. Autograd sees no gradient then, and runs no hook: not for DDP or FSDP, which reduce in hooks, nor for
    torch.autograd.grad. What is compiled by torch.compile, or differentiated with create_graph=True, gets its gradient as ever.
    """
    for parameter in parameters:
        if parameter.dim() == 3:
            setattr(parameter, _ACCUMULATES, enabled)


_ACCUMULATES = "moe_runtime_accumulates"


def accumulating(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter of `accumulate_into_grad` that `tensor` is, or is the transpose of; None of any other."""
    leaf = tensor if tensor.is_leaf else tensor._base
    if not getattr(leaf, _ACCUMULATES, False):
        return None
    same = any(tensor.shape == t.shape and tensor.stride() == t.stride() for t in (leaf, leaf.transpose(1, 2)))
    return leaf if same else None


def gradients_so_far(learned: Gradients, leaves: Sequence[torch.Tensor | None]) -> Gradients:
    """Return the gradients of `leaves`, the parameters of up and down, to add to; NOWHERE if there are none yet."""
    found = []
    for tensor, leaf in zip((learned.up, learned.down), leaves, strict=True):
        grad = None if leaf is None or torch.is_grad_enabled() else getattr(leaf, "main_grad", leaf.grad)
        found.append(grad if grad is None or leaf.stride() == tensor.stride() else grad.transpose(1, 2))
    return NOWHERE if all(grad is None for grad in found) else NOWHERE._replace(up=found[0], down=found[1])


def new_gradients(
    experts: Experts, bounds: list[int], trained: list[int], needs: Gradients, into: Gradients = NOWHERE
) -> Gradients:
    """Return memory for the gradients of the weights and biases that `needs` asks for; zeros for experts without rows.

    `into` has what is added to in place.
    """
    learned = experts.learned().only(needs)
    # the page faults of fresh memory would take a sixth of the time of a pass with 64 experts
    grads = Gradients(*(
        old if t is None or old is not None else in_layout_of(t, lambda shape, t=t: lease(shape, t))
        for t, old in zip(learned, into)
    ))  # fmt: skip
    E = len(trained)
    idle = [e for e in range(E) if bounds[e] == bounds[e + 1] or trained[e] < 0]
    # rows of weights that train which belong to no expert get zeros too
    busy = {e if experts.up_trained is None else trained[e] for e in set(range(E)).difference(idle)}
    unused = set(range(experts.learned().up.shape[0])).difference(busy)
    for part, rows in ((grads.up, unused), (grads.down, unused), (grads.up_bias, idle), (grads.down_bias, idle)):
        for row in rows if part is not None and part is not into.up and part is not into.down else ():
            part[row].zero_()
    return grads


def is_transposed(tensor: torch.Tensor) -> bool:
    """Whether this is a stack [E, out, in] that is stored as [E, in, out], as GPT-OSS's are."""
    return tensor.dim() == 3 and tensor.stride(1) == 1 and tensor.stride(2) != 1


def in_layout_of(tensor: torch.Tensor, new: Callable[[tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of this shape that `new` makes of a shape, stored in the order of `tensor` [...].

    A gradient in its parameter's own layout becomes `.grad` as it is; autograd copies any other.
    """
    shape = tuple(tensor.shape)
    return new((shape[0], shape[2], shape[1])).transpose(1, 2) if is_transposed(tensor) else new(shape)


def add_product(dy, x, out, adds: bool) -> None:
    """Write dy^T x [out, in], or add it to `out` as autograd would."""
    out.add_(torch.mm(dy.t(), x)) if adds else torch.mm(dy.t(), x, out=out)


def weight_gradients(grads: Gradients, member: Member, row: int, dy, wh, dz, rows, row_weight, into=NOWHERE) -> None:
    """Fill an expert's gradients: down[row] = dy^T wh, up[row] = dz^T x; biases are sums over the rows.

    Those that `into` has are added to.
    """
    e, dy, dz = member.expert, member.own(dy), member.own(dz)
    if grads.down is not None:
        add_product(dy, member.own(wh), grads.down[row], into.down is not None)
    if grads.up is not None:
        add_product(dz, member.own(rows), grads.up[row], into.up is not None)
    if grads.up_bias is not None:
        grads.up_bias[e].copy_(dz.sum(0))
    if grads.down_bias is not None:
        weight = member.own(row_weight)
        grads.down_bias[e].copy_(weight @ dy.to(weight.dtype))
