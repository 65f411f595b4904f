"""Memory layouts for the tensors of a `Case`; each changes the leaves and the view that undoes the
change.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_runtime.ops.expert_rows import ExpertStacks, accumulate_into_grad
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.support.oracle import choose_experts, relative_error


class _Large(TorchDispatchMode):
    """Records the ops that return a tensor of `size` elements: copies, or with `every` all ops
    except views and in-place ops.
    """

    COPIES = (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy)

    def __init__(self, size: int, every: bool = False):
        super().__init__()
        self.size = size
        self.seen = []
        self.every = every

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in self.COPIES and (not self.every or func.is_view):
            return out
        for tensor in tree_leaves(out):
            is_new = not any(tensor is arg for arg in args)
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.size and is_new:
                self.seen.append(str(func))
        return out


def copies_of_transposed_gradients(layer, backend: str | None, device: str = "cpu") -> list[str]:
    """Run layer(x, up, down, weight, idx, backend=) on stacks stored as [E, in, out]; return the
    ops that copied their gradients.
    """
    E = 3
    H = 16
    I = 16
    T = 20
    x = torch.randn(T, H, device=device)
    weight = torch.rand(T, 2, device=device)
    idx = choose_experts(T, E, 2, "random").to(device)
    up = torch.randn(E, H, 2 * I, device=device, requires_grad=True)
    down = torch.randn(E, I, H, device=device, requires_grad=True)
    for size in (up.numel(), down.numel()):
        up.grad = down.grad = None
        with _Large(size) as copies:
            out = layer(
                x,
                up.transpose(1, 2),
                down.transpose(1, 2),
                weight,
                idx,
                backend=backend,
            )
            out.sum().backward()
        if copies.seen:
            return copies.seen
    assert up.grad.stride() == up.stride()
    assert down.grad.stride() == down.stride()
    return []


NARROW = "transposed stacks with H = 1"  # [E, 1, 2I] and [E, 2I, 1] may have the same strides


def check_accumulation(form: str, backend: str | None, device: str = "cpu") -> None:
    """Assert that three micro-batches with `accumulate_into_grad` give the sums of separate adds,
    in the same memory and without other allocations.

    Our kernels add the rounded product, like autograd, so the bits are equal; a BLAS may round only
    once.
    """
    E = 3
    H = 1 if form == NARROW else 16
    I = 8
    T = 20
    torch.manual_seed(0)
    is_swapped = form in ("transposed stacks", NARROW)
    shapes = [(E, H, 2 * I), (E, I, H)] if is_swapped else [(E, 2 * I, H), (E, H, I)]
    plain = []
    for shape in shapes:
        plain.append(torch.randn(shape, device=device, requires_grad=True))
    added = [weight.detach().clone().requires_grad_() for weight in plain]
    accumulate_into_grad(added)
    if form == "main_grad":
        for weight in added:
            weight.main_grad = torch.zeros_like(weight)
    router = torch.randn(E, H, device=device)

    def step(stacks, x, weight, idx) -> list[str]:
        up, down = stacks
        if is_swapped:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if form == "a layer with its router":
            experts = ExpertStacks(up, down)
            out = moe_layer(
                x,
                router,
                experts,
                2,
                "softmax_topk",
                backend=backend,
            ).out
        else:
            out = moe_mlp(x, up, down, weight, idx, backend=backend)
        with _Large(up.numel(), every=True) as large:
            out.square().sum().backward()
        return large.seen

    def sums() -> list[torch.Tensor]:
        values = []
        for weight in added:
            values.append(weight.main_grad if form == "main_grad" else weight.grad)
        return values

    memory = []
    for _ in range(3):
        x = torch.randn(T, H, device=device)
        weight = torch.rand(T, 2, device=device)
        idx = choose_experts(T, E, 2, "skip").to(device)
        step(plain, x, weight, idx)
        large = step(added, x, weight, idx)
        memory.append([grad.data_ptr() for grad in sums()])
    assert large == [], "the last backward pass allocated tensors of a stack's size"
    assert memory[1] == memory[2]
    assert form != "main_grad" or added[0].grad is None
    is_exact = backend == "triton" or (backend == "cpp" and not is_swapped)
    for weight, grad in zip(plain, sums(), strict=True):
        if is_exact:
            assert weight.grad.equal(grad)
        else:
            assert relative_error(grad, weight.grad) < 1e-6


def stride_zero(case):
    E = case.leaves["up"].shape[0]
    case.leaves |= {name: case.leaves[name][:1].clone() for name in ("up", "down")}
    case.view = lambda v: v | {name: v[name].expand(E, -1, -1) for name in ("up", "down")}


def transposed_weights(case):
    case.leaves |= {name: case.leaves[name].transpose(1, 2).contiguous() for name in ("up", "down")}
    case.view = lambda v: v | {name: v[name].transpose(1, 2) for name in ("up", "down")}


def experts_last(case):
    case.leaves |= {
        name: case.leaves[name].permute(1, 2, 0).contiguous() for name in ("up", "down")
    }
    case.view = lambda v: v | {name: v[name].permute(2, 0, 1) for name in ("up", "down")}


def strided_x(case):
    case.leaves["x"] = case.leaves["x"].repeat_interleave(2, 1)
    case.view = lambda v: v | {"x": v["x"][:, ::2]}


def transposed_x(case):
    case.leaves["x"] = case.leaves["x"].t().contiguous()
    case.view = lambda v: v | {"x": v["x"].t()}


def expanded_gradient(case):
    case.dout = case.dout[:1].expand_as(case.dout)
