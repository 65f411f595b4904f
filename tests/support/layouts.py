"""Ways to hold the same tensors of a `Case` in memory; each changes the leaves and the view that undoes the change."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Copies(TorchDispatchMode):
    """Counts tensors of `size` elements that are copied."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        copies = func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy)
        if copies and isinstance(out, torch.Tensor) and out.numel() == self.size:
            self.found.append(str(func))
        return out


def copies_of_transposed_gradients(layer, backend: str | None, device: str = "cpu") -> list[str]:
    """Run layer(x, up, down, weight, idx, backend=) on stacks stored as [E, in, out]; return what copied their gradients."""
    E, H, I, T = 3, 16, 16, 20
    x, weight = torch.randn(T, H, device=device), torch.rand(T, 2, device=device)
    idx = torch.stack([torch.randperm(E)[:2] for _ in range(T)]).to(device)
    up, down = (torch.randn(size, device=device, requires_grad=True) for size in ((E, H, 2 * I), (E, I, H)))
    for size in (up.numel(), down.numel()):
        up.grad = down.grad = None
        with _Copies(size) as copies:
            layer(x, up.transpose(1, 2), down.transpose(1, 2), weight, idx, backend=backend).sum().backward()
        if copies.found:
            return copies.found
    assert up.grad.stride() == up.stride() and down.grad.stride() == down.stride()
    return []


def stride_zero(case):
    E = case.leaves["up"].shape[0]
    case.leaves |= {name: case.leaves[name][:1].clone() for name in ("up", "down")}
    case.view = lambda v: v | {name: v[name].expand(E, -1, -1) for name in ("up", "down")}


def transposed_weights(case):
    case.leaves |= {name: case.leaves[name].transpose(1, 2).contiguous() for name in ("up", "down")}
    case.view = lambda v: v | {name: v[name].transpose(1, 2) for name in ("up", "down")}


def experts_last(case):
    case.leaves |= {name: case.leaves[name].permute(1, 2, 0).contiguous() for name in ("up", "down")}
    case.view = lambda v: v | {name: v[name].permute(2, 0, 1) for name in ("up", "down")}


def strided_x(case):
    case.leaves["x"] = case.leaves["x"].repeat_interleave(2, 1)
    case.view = lambda v: v | {"x": v["x"][:, ::2]}


def transposed_x(case):
    case.leaves["x"] = case.leaves["x"].t().contiguous()
    case.view = lambda v: v | {"x": v["x"].t()}


def expanded_x(case):
    case.leaves["x"] = case.leaves["x"][:1].clone()
    T = case.topk_idx.shape[0]
    case.view = lambda v: v | {"x": v["x"].expand(T, -1)}


def transposed_gates(case):
    case.leaves["topk_weight"] = case.leaves["topk_weight"].t().contiguous()
    case.topk_idx = case.topk_idx.t().contiguous().t()
    case.view = lambda v: v | {"topk_weight": v["topk_weight"].t()}


def expanded_gradient(case):
    case.dout = case.dout[:1].expand_as(case.dout)
