"""Ways to hold the same tensors of a `Case` in memory; each changes the leaves and the view that undoes the change."""


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
