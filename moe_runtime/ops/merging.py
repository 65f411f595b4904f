"""Experts to one dense weight.

XFT, Eq. (3):  W = sum_e alpha_e W_e
XFT, Eq. (5):  alpha_0 = lambda for the shared expert (`shared_rate`), alpha_{e>0} = (1 - lambda) softmax(logits)_e
Learned soup:  alpha = softmax(logits) over all experts
XFT, Eq. (4) and (6) learn the logits through this op, which is differentiable in alpha and in the weights.
"""

import torch

from moe_runtime import backends
from moe_runtime.ops.library import LIB, register


def mixing(logits: torch.Tensor, shared_rate: float | None) -> torch.Tensor:
    """Eq. (5): `logits` [E - 1] of the normal experts -> alpha [E] float32, the shared expert first, sum 1.

    shared_rate=None is the learned soup: `logits` [E] -> softmax over all. Raises ValueError for a rate outside 0..1.
    """
    if logits.dim() != 1:
        raise ValueError(f"logits is {tuple(logits.shape)}; want one logit per expert")
    if shared_rate is None:
        return logits.float().softmax(-1)
    if not 0 <= shared_rate <= 1:
        raise ValueError(f"shared_rate is {shared_rate}; want 0 to 1, the shared expert's mixing coefficient")
    if logits.numel() == 0:  # one expert: it is all there is
        return logits.new_ones(1, dtype=torch.float32)
    shared = logits.new_full((1,), shared_rate, dtype=torch.float32)
    return torch.cat([shared, (1 - shared_rate) * logits.float().softmax(-1)])


def soup_logits(num_experts: int, shared_rate: float) -> torch.Tensor:
    """Logits [E] whose softmax is [shared_rate, (1 - shared_rate) / (E - 1), ...], the learned soup's start."""
    if num_experts == 1:
        return torch.zeros(1)
    rest = (1 - shared_rate) / (num_experts - 1)
    alpha = torch.tensor([shared_rate] + [rest] * (num_experts - 1), dtype=torch.float64)
    return alpha.clamp_min(torch.finfo(torch.float32).tiny).log().float()


def merge_experts(weight: torch.Tensor, alpha: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Eq. (3): `weight` [E, ...], `alpha` [E] -> [...] in weight's dtype, summed in float32; differentiable in both."""
    if weight.dim() == 0 or alpha.shape != weight.shape[:1]:
        raise ValueError(f"alpha is {tuple(alpha.shape)}, weight {tuple(weight.shape)}; want one alpha per expert")
    if weight.shape[0] == 0:
        raise ValueError(f"weight is {tuple(weight.shape)}; want at least one expert")
    if weight.dtype != torch.float64:
        alpha = alpha.float()
        chosen = backends.pick("merge_experts", weight, backend)
    else:  # the kernels sum in float32
        if backend not in (None, "torch"):
            raise ValueError(f"weight is {weight.dtype}, backend is {backend!r}; want 'torch' for float64")
        chosen = "torch"
    return torch.ops.moe_runtime.merge_experts(weight, alpha, chosen)


LIB.define("merge_experts(Tensor weight, Tensor alpha, str backend) -> Tensor")
LIB.define("merge_experts_backward_alpha(Tensor dout, Tensor weight, str backend) -> Tensor")


def _merge(weight, alpha, backend):
    if backend == "triton":
        from moe_runtime.kernels.merging import merge_experts_forward

        return merge_experts_forward(weight, alpha)
    # expert by expert in float32: no float32 copy of the stack, each expert read once
    out = weight[0].to(alpha.dtype, copy=True).mul_(alpha[0])
    for e in range(1, weight.shape[0]):
        out.add_(weight[e].to(alpha.dtype).mul(alpha[e]))
    return out.to(weight.dtype)


def _merge_backward_alpha(dout, weight, backend):
    if backend == "triton":
        from moe_runtime.kernels.merging import merge_experts_backward_alpha

        return merge_experts_backward_alpha(dout, weight)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    dout = dout.reshape(-1).to(dtype)
    return torch.stack([dout.dot(w.reshape(-1).to(dtype)) for w in weight])


def _setup_context(ctx, inputs, output):
    weight, alpha, ctx.backend = inputs
    ctx.save_for_backward(weight, alpha)


def _autograd(ctx, dout):
    weight, alpha = ctx.saved_tensors
    dweight = dalpha = None
    if ctx.needs_input_grad[0]:
        dweight = (alpha.view(-1, *[1] * dout.dim()) * dout.to(alpha.dtype)).to(weight.dtype)
    if ctx.needs_input_grad[1]:
        dalpha = torch.ops.moe_runtime.merge_experts_backward_alpha(dout, weight, ctx.backend)
    return dweight, dalpha, None


def _fake_alpha(dout, weight, backend):
    return weight.new_empty(weight.shape[0], dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32)


register("merge_experts", _merge, lambda weight, alpha, backend: torch.empty_like(weight[0]), _autograd, _setup_context)
register("merge_experts_backward_alpha", _merge_backward_alpha, _fake_alpha)
