"""Common parts of the backends of `moe_mlp`: weights of experts, rows in expert order, gradients.

    rows of expert e: expert_offsets[e] <= r < expert_offsets[e + 1]
    over them: d down_e = dy^T wh,  d gate_up_e = dz^T x

The weights of trained experts may be stored separately from the stack, as in `grouped_gemm`:

    weight of e = trained[trainable[e]] where trainable[e] >= 0, else stack[e]
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.ops.activation import FORM, Activation
from moe_runtime.ops.library import kind
from moe_runtime.ops.products import addmm, mm
from moe_runtime.ops.workspace import lease, scratch

# a matmul of 255 rows takes 15 % longer than one of 256 in float32; 2 cores, torch 2.13, 2026-11-20
ROWS = 8
PADDED_FROM = 4  # rows; fewer use matrix-vector products, which are faster
GROUP_ELEMENTS = 1 << 19  # rows of the experts in a group times the columns of the widest buffer


def matches(tensor: Tensor, shape: Sequence[int], like: Tensor) -> bool:
    """Return whether `tensor` has this shape, and dtype and device of `like`."""
    is_alike = tensor.dtype == like.dtype and tensor.device == like.device
    return is_alike and tuple(tensor.shape) == tuple(shape)


def check_like(x: Tensor, expected: Iterable[tuple[str, Tensor | None, Sequence[int]]]) -> None:
    """Raise ValueError unless each (name, tensor, shape) has its shape, x's dtype and device."""
    for name, tensor, shape in expected:
        if tensor is not None and not matches(tensor, shape, x):
            raise ValueError(
                f"Expected {tuple(shape)} {x.dtype} on {x.device}, as x, but {name} is "
                f"{kind(tensor)}"
            )


def check_sizes(
    x: Tensor,
    up: Sequence[int],
    down: Sequence[int],
    gated: bool,
    names: tuple[str, str],
) -> tuple[int, int, int]:
    """Return E, Z and I of stacks [E, Z, H] and [E, H, I] that match x [T, H], else ValueError."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"Expected x [T, H] of a floating dtype, but x is {kind(x)}")
    H = x.shape[1]
    E = I = 0
    if len(down) == 3:
        E, _, I = down
    Z = I * (1 + gated)
    if E == 0 or I == 0 or tuple(up) != (E, Z, H) or tuple(down) != (E, H, I):
        rows = "2I" if gated else "I"
        raise ValueError(
            f"Expected {names[0]} [E, {rows}, H], {names[1]} [E, H, I] and x [T, H] with E >= 1 "
            f"and I >= 1, but {names[0]} is {tuple(up)}, {names[1]} {tuple(down)}, x "
            f"{tuple(x.shape)}"
        )
    return E, Z, I


def check_trained(
    stack: Tensor,
    trainable: Tensor | None,
    trained: Tensor | None,
    name: str = "trained",
    masks: bool = True,
) -> None:
    """Raise ValueError unless `trainable` [E] int32 and `trained` [n, ...] match `stack` [E, ...].

    Without `trained`, `trainable` is a mask [E] bool if the op supports `masks`. `name` is what the
    caller calls `trained`. The stack must be frozen.
    """
    if trainable is None and trained is None:
        return
    dtype = torch.int32
    if trained is None and masks:
        dtype = torch.bool
    elif trained is None:
        trainable = None
    if (
        trainable is None
        or trainable.dtype != dtype
        or trainable.shape != stack.shape[:1]
        or trainable.device != stack.device
    ):
        raise ValueError(
            f"Expected [{stack.shape[0]}] {dtype} on {stack.device}, int32 together with {name}, "
            f"but trainable is {kind(trainable)}"
        )
    if trained is None:
        return
    if not matches(trained, (*trained.shape[:1], *stack.shape[1:]), stack):
        raise ValueError(
            f"Expected [n, *{list(stack.shape[1:])}] {stack.dtype} on {stack.device}, but {name} "
            f"is {kind(trained)}"
        )
    if stack.requires_grad:
        raise ValueError(
            f"The stack of {name} must be frozen, as only `trained` is trained, but it requires a "
            "gradient"
        )


def trained_rows(E: int, trainable: Tensor | None) -> list[int]:
    """Return each expert's row in the trained weights, or -1; `trainable` [E] is bools or rows."""
    if trainable is None:
        return list(range(E))
    if trainable.dtype == torch.bool:
        return [e if trains else -1 for e, trains in enumerate(trainable.tolist())]
    return trainable.tolist()


def weight_at(e: int, row: int, stack: Tensor, separate: Tensor | None) -> Tensor:
    """Return expert e's weight: `row` of `separate` [n, out, in], or e of `stack` [E, out, in]."""
    if separate is None or row < 0:
        return stack[e]
    return separate[row]


# schema of an `ExpertStacks` in the ops
SCHEMA = (
    "Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? trainable, Tensor? "
    f"up_trained, Tensor? down_trained, {FORM}, str shared"
)


class ExpertStacks(NamedTuple):
    """The experts of a layer, from the public function to the kernels, in the order of SCHEMA."""

    up: Tensor  # [E, 2I or I, H]
    down: Tensor  # [E, H, I]
    up_bias: Tensor | None = None  # [E, 2I or I]
    down_bias: Tensor | None = None  # [E, H]
    # [E] bool; with the two below int32: the expert's row in them, or -1
    trainable: Tensor | None = None
    up_trained: Tensor | None = None  # [n, 2I or I, H]
    down_trained: Tensor | None = None  # [n, H, I]
    activation: Activation = Activation()
    shared: str = "group"  # "dense": the Triton backend computes expert 0 with torch's matmuls

    def pack(self) -> tuple:
        """Return the op arguments of SCHEMA."""
        *tensors, activation, shared = self
        return *tensors, *activation, shared

    @classmethod
    def unpack(cls, arguments: Sequence) -> "ExpertStacks":
        """Build the experts from op arguments of SCHEMA, or from autograd's value for each."""
        *values, shared = arguments
        tensors = len(values) - len(Activation._fields)
        return cls._make((*values[:tensors], Activation(*values[tensors:]), shared))

    def requires_grad(self) -> bool:
        """Return whether any of the tensors requires a gradient."""
        return any([t.requires_grad for t in self[:-2] if t is not None])

    def learned(self, x: Any = None, topk_weight: Any = None) -> "Gradients":
        """Return the tensors that may get a gradient: the trained ones, or else the stacks."""
        stacks = (self.up, self.down)
        if self.up_trained is not None and self.down_trained is not None:
            stacks = (self.up_trained, self.down_trained)
        return Gradients(
            x,
            *stacks,
            topk_weight,
            self.up_bias,
            self.down_bias,
        )

    def needs(self, x: Any, topk_weight: Any, flags: Sequence) -> "Gradients":
        """Return which of x, topk_weight and `learned` need a gradient.

        `flags` are autograd's, one for each op argument of SCHEMA.
        """
        of = ExpertStacks.unpack(flags)
        if self.up_trained is None:
            of = of._replace(up_trained=None)
        return of.learned(x, topk_weight)

    def in_place(self, grads: "Gradients") -> tuple:
        """Return `grads` in the positions of the op arguments of SCHEMA, None for the others."""
        stacks = (grads.up, grads.down)
        biases = (grads.up_bias, grads.down_bias)
        rest = (None,) * (len(Activation._fields) + 1)
        if self.up_trained is None:
            return *stacks, *biases, None, None, None, *rest
        return None, None, *biases, None, *stacks, *rest

    def rows(self) -> list[int]:
        """Return each expert's row in the trained weights, -1 for a frozen expert."""
        return trained_rows(self.up.shape[0], self.trainable)

    def weights(self, name: str, transposed: bool = False) -> Sequence[Tensor]:
        """Return the weight of each expert, "up" or "down", [out, in] or [in, out]."""
        stack = getattr(self, name)
        separate = getattr(self, f"{name}_trained")
        if transposed:
            stack = stack.transpose(1, 2)
        if separate is None:
            return stack.unbind(0)
        if transposed:
            separate = separate.transpose(1, 2)
        return [weight_at(e, row, stack, separate) for e, row in enumerate(self.rows())]


class Gradients(NamedTuple):
    """Gradients of `moe_mlp`, None if absent or not needed; as `needs`, the requested ones."""

    x: Tensor | None
    up: Tensor | None
    down: Tensor | None
    topk_weight: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def only(self, needs: "Gradients") -> "Gradients":
        """Return the gradients requested by `needs`, None for the others."""
        return Gradients(*[grad if need else None for grad, need in zip(self, needs)])

    def besides(self, others: "Gradients") -> "Gradients":
        """Return the gradients that are None in `others`, None for the rest."""
        return Gradients(*[grad if other is None else None for grad, other in zip(self, others)])


class Member(NamedTuple):
    """An expert of a group; its rows are numbered from the group's first row."""

    expert: int
    start: int
    end: int
    padded: int  # the end, padded to a multiple of ROWS rows if there are as many

    def own(self, rows: Tensor) -> Tensor:
        """Return a view of its rows within a group's, [rows, ...]."""
        return rows[self.start : self.end]

    def wide(self, rows: Tensor) -> Tensor:
        """Return a view of its rows up to the padded end, [rows, ...].

        Results for rows of later experts are overwritten when these are computed, as experts are
        processed in ascending order.
        """
        return rows[self.start : self.padded]


class Group(NamedTuple):
    """Neighbouring experts whose rows are gathered and pass through the activation together."""

    start: int
    end: int  # the padded end of the last member
    members: list[Member]
    everyone: bool  # a single expert that processes every token once, in order


# dweight [T, K] -> dlogits [T, R] and the router's weight [R, H]; their product is added to dx
Router = Callable[[Tensor], tuple[Tensor, Tensor]]


def groups(bounds: list[int], everyone: list[bool], R: int, width: int) -> Iterator[Group]:
    """Yield groups of experts with rows, limited by GROUP_ELEMENTS.

    `everyone` marks experts that process every token.
    """
    members: list[Member] = []
    start = 0
    for e, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            continue
        if members and (everyone[e] or (b - start) * width > GROUP_ELEMENTS):
            yield Group(start, start + members[-1].padded, members, False)
            members = []
        if everyone[e]:
            yield Group(a, b, [Member(e, 0, b - a, b - a)], True)
            continue
        if not members:
            start = a
        padded = b
        if b - a > PADDED_FROM:
            padded = min(a + -(-(b - a) // ROWS) * ROWS, R)
        members.append(Member(e, a - start, b - start, padded - start))
    if members:
        yield Group(start, start + members[-1].padded, members, False)


NOWHERE = Gradients(*[None] * len(Gradients._fields))


def accumulate_into_grad(parameters: Iterable[Tensor], enabled: bool = True) -> None:
    """Make the backward pass add to the `.grad` (or `main_grad`) of stacks [E, ., .] in place.

    From the second micro-batch on, no separate gradient of a stack's size is allocated. The result
    equals autograd's sum up to one rounding of each element. Autograd then sees no gradient and
    runs no hooks, so this is not for DDP or FSDP, which reduce in hooks, nor for
    torch.autograd.grad. Code of torch.compile, or with create_graph=True, gets its gradient as
    usual.
    """
    for parameter in parameters:
        if parameter.dim() == 3:
            setattr(parameter, _ACCUMULATES, enabled)


_ACCUMULATES = "moe_runtime_accumulates"


def accumulating(tensor: Tensor | None) -> Tensor | None:
    """Return the parameter of `accumulate_into_grad` that `tensor` is or transposes, if any."""
    if tensor is None:
        return None
    leaf = tensor if tensor.is_leaf else tensor._base
    if not getattr(leaf, _ACCUMULATES, False):
        return None
    assert leaf is not None
    if _same_view(leaf, tensor) or _same_view(leaf.transpose(1, 2), tensor):
        return leaf
    return None


def _same_view(a: Tensor, b: Any) -> bool:
    """Return whether two views of one memory are equal; [E, 1, H] and [E, H, 1] share strides."""
    return a.shape == b.shape and a.stride() == b.stride()


def gradients_so_far(learned: Gradients, leaves: Sequence[Tensor | None]) -> Gradients:
    """Return the existing gradients of `leaves`, the parameters of up and down; NOWHERE if none."""
    so_far = []
    for tensor, leaf in zip((learned.up, learned.down), leaves, strict=True):
        grad = None
        if leaf is not None and not torch.is_grad_enabled():
            grad = getattr(leaf, "main_grad", leaf.grad)
            if grad is not None and not _same_view(leaf, tensor):
                grad = grad.transpose(1, 2)
        so_far.append(grad)
    up, down = so_far
    if up is None and down is None:
        return NOWHERE
    return NOWHERE._replace(up=up, down=down)


def new_gradients(
    experts: ExpertStacks,
    bounds: list[int],
    trained: list[int],
    needs: Gradients,
    into: Gradients = NOWHERE,
) -> Gradients:
    """Allocate the requested gradients of weights and biases; zeros for experts without rows.

    `into` contains the gradients that are accumulated in place.
    """
    grads = []
    for t, old in zip(experts.learned().only(needs), into):
        if t is None or old is not None:
            grads.append(old)
        else:
            # page faults of fresh memory would take a sixth of a pass with 64 experts
            grads.append(in_layout_of(t, functools.partial(lease, like=t)))
    made = Gradients(*grads)
    idle = [e for e, row in enumerate(trained) if bounds[e] == bounds[e + 1] or row < 0]
    if experts.up_trained is None:
        unused = idle
    else:  # rows of trained weights that belong to no expert also get zeros
        busy = {row for e, row in enumerate(trained) if e not in idle}
        unused = [row for row in range(experts.up_trained.shape[0]) if row not in busy]
    if into.up is None:
        _zero_rows(made.up, unused)
    if into.down is None:
        _zero_rows(made.down, unused)
    _zero_rows(made.up_bias, idle)
    _zero_rows(made.down_bias, idle)
    return made


def _zero_rows(tensor: Tensor | None, rows: list[int]) -> None:
    if tensor is not None:
        for row in rows:
            tensor[row].zero_()


def is_transposed(tensor: Tensor) -> bool:
    """Return whether this is a stack [E, out, in] that is stored as [E, in, out], as in GPT-OSS."""
    return tensor.dim() == 3 and tensor.stride(1) == 1 and tensor.stride(2) != 1


def in_layout_of(tensor: Tensor, new: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Return a tensor of this shape, allocated by `new`, with the memory order of `tensor` [...].

    Autograd uses a gradient in its parameter's layout as `.grad` directly, and copies any other.
    """
    shape = tuple(tensor.shape)
    if is_transposed(tensor):
        return new((shape[0], shape[2], shape[1])).transpose(1, 2)
    return new(shape)


class Rows:
    """The rows of one call in expert order; backends add the steps between the products."""

    folded = False  # whether h is multiplied by the routing weights, instead of the rows of y

    def __init__(
        self,
        up: Sequence[int],
        I: int,
        topk_weight: Tensor,
        bounds: list[int],
        row_slot: Tensor,
    ):
        self.E, self.Z, self.H = up
        self.I = I
        self.T, self.K = topk_weight.shape
        self.R = self.T * self.K
        self.weight = topk_weight
        self.bounds = bounds
        self.rows = bounds[-1]  # rows of experts; those of dropped slots follow
        self.row_slot = row_slot

    def divide(self, everyone: list[bool]) -> None:
        """Divide the rows into groups; `everyone` as in `groups`."""
        self.groups = list(groups(self.bounds, everyone, self.R, max(self.Z, self.H)))

    @functools.cached_property
    def row_weight(self) -> Tensor:
        """The routing weight of each row [R]."""
        return self.weight.reshape(-1)[self.row_slot]

    def add_dots(self, dweight: Tensor, group: Group, member: Member, dots: Tensor) -> None:
        """Add `dots` [n] of a member's rows to the gradient of the weights by slot [R]."""
        dweight.index_add_(0, member.own(self.row_slot[group.start : group.end]), dots)


class Products:
    """The products of one call with the experts' weights, and with their gradients."""

    def __init__(
        self,
        experts: ExpertStacks,
        steps: Any,
        needs: Gradients | None = None,
        into: Gradients = NOWHERE,
    ):
        self.experts = experts
        self.steps = steps
        self.into = into
        if needs is None:
            self.down_t = experts.weights("down", transposed=True)
            return
        self.up = experts.weights("up")
        self.down = experts.weights("down")
        self.trained = experts.rows()
        self.grads = new_gradients(
            experts,
            steps.bounds,
            self.trained,
            needs,
            self.into,
        )

    @functools.cached_property
    def up_t(self) -> Sequence[Tensor]:
        """Each expert's up projection [in, out]; not needed if the pre-activation was saved."""
        return self.experts.weights("up", transposed=True)

    def first(self, group: Group, rows: Tensor, z: Tensor) -> None:
        """Write the pre-activation of a group's `rows` into z."""
        biases = self.experts.up_bias
        for member in group.members:
            e = member.expert
            bias = None if biases is None else biases[e]
            self.steps.linear(
                member,
                group,
                rows,
                self.up_t[e],
                bias,
                z,
                False,
            )

    def second(self, group: Group, h: Tensor, y: Tensor) -> None:
        """Write the down projection of a group's h into y."""
        biases = self.experts.down_bias
        for member in group.members:
            e = member.expert
            bias = None if biases is None else biases[e]
            self.steps.linear(
                member,
                group,
                h,
                self.down_t[e],
                bias,
                y,
                True,
            )

    def second_backward(self, group: Group, dy: Tensor, dh: Tensor) -> None:
        """Write the gradient of a group's h."""
        for member in group.members:
            mm(member.wide(dy), self.down[member.expert], out=member.wide(dh))

    def backward(
        self,
        member: Member,
        group: Group,
        rows: Tensor,
        dy: Tensor,
        dz: Tensor,
        wh: Tensor,
        dx: Tensor | None,
    ) -> Tensor | None:
        """Write a member's dx and gradients; return the bias's part of the weights' gradient."""
        e = member.expert
        if dx is not None:
            mm(member.wide(dz), self.up[e], out=member.wide(dx))
        row = self.trained[e]
        if row >= 0:
            weight_gradients(
                self.grads,
                member,
                row,
                dy,
                wh,
                dz,
                rows,
                self.steps.row_weight[group.start : group.end],
                self.into,
            )
        if self.experts.down_bias is None:
            return None
        wide = self.steps.weight.dtype
        return (member.own(dy).to(wide) * self.experts.down_bias[e].to(wide)).sum(1)


def run_forward(steps: Any, products: Any, x: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """Return out [T, H] and z [R, 2I or I], empty without `save`."""
    if save:
        z_all = lease((steps.R, steps.Z), x)
    else:
        z_all = x.new_empty(0, steps.Z)
    y = scratch("y", (steps.R, steps.H), x)
    for group in steps.groups:
        a = group.start
        b = group.end
        rows = steps.gather("x", x, group)
        z = z_all[a:b] if save else scratch("z", (b - a, steps.Z), x)
        products.first(group, rows, z)
        h = scratch("h", (b - a, steps.I), x)
        steps.activate(group, z, h)
        products.second(group, h, y[a:b])
    return steps.combine(y, weighted=True), z_all


def run_backward(
    steps: Any,
    products: Any,
    dout: Tensor,
    x: Tensor,
    z_all: Tensor,
    need_x: bool,
    recompute: Callable[[Group, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return dx [T, H], None unless needed, and the gradient of the routing weights [T, K].

    `products` gets the other gradients. `z_all` [0, ...] is computed again, by `recompute` if it
    is given.
    """
    recompute = recompute or products.first
    dweight = steps.weight.new_zeros(steps.R)  # by slot
    dx = None
    if need_x:
        dx = scratch("y", (steps.R, steps.H), x)
    for group in steps.groups:
        a = group.start
        b = group.end
        dy = steps.gather("dy", dout, group)
        rows = steps.gather("x", x, group)
        if z_all.shape[0]:
            z = z_all[a:b]
        else:
            z = scratch("z", (b - a, steps.Z), x)
            recompute(group, rows, z)
        dh = scratch("dh", (b - a, steps.I), x)
        dz = scratch("dz", (b - a, steps.Z), x)
        wh = scratch("h", (b - a, steps.I), x)
        products.second_backward(group, dy, dh)
        steps.activate_backward(
            group,
            z,
            dh,
            dz,
            wh,
            dweight,
        )
        dx_rows = None if dx is None else dx[a:b]
        for member in group.members:
            dots = products.backward(
                member,
                group,
                rows,
                dy,
                dz,
                wh,
                dx_rows,
            )
            if dots is not None:
                steps.add_dots(dweight, group, member, dots)
    if dx is not None:
        dx = steps.combine(dx, weighted=False)
    return dx, dweight.view(steps.T, steps.K)


def with_router(
    grads: Gradients, dx: Tensor | None, dweight: Tensor, router: Router | None
) -> Gradients:
    """Return `grads` with those of x, to which the router's part is added, and of the weights."""
    if router is not None:
        dlogits, weight = router(dweight)
        if dx is not None:
            addmm(dx, dlogits, weight, out=dx)
    return grads._replace(x=dx, topk_weight=dweight)


def add_product(dy: Tensor, x: Tensor, out: Tensor, adds: bool) -> None:
    """Write dy^T x [out, in] to `out`, or add it as autograd would."""
    if adds:
        out.add_(mm(dy.t(), x))
    else:
        mm(dy.t(), x, out=out)


def weight_gradients(
    grads: Gradients,
    member: Member,
    row: int,
    dy: Tensor,
    wh: Tensor,
    dz: Tensor,
    rows: Tensor,
    row_weight: Tensor | None,
    into: Gradients = NOWHERE,
) -> None:
    """Fill an expert's gradients: down[row] = dy^T wh, up[row] = dz^T x, and sums for biases.

    Gradients in `into` are accumulated.
    """
    e = member.expert
    dy = member.own(dy)
    dz = member.own(dz)
    if grads.down is not None:
        add_product(dy, member.own(wh), grads.down[row], into.down is not None)
    if grads.up is not None:
        add_product(dz, member.own(rows), grads.up[row], into.up is not None)
    if grads.up_bias is not None:
        grads.up_bias[e].copy_(dz.sum(0))
    if grads.down_bias is not None:
        assert row_weight is not None
        weight = member.own(row_weight)
        grads.down_bias[e].copy_(weight @ dy.to(weight.dtype))
