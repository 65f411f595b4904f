"""The mergeable layer: a dense MLP whose weights are a learned mixture of frozen experts.

XFT, Eq. (4) and (6): only the mixing logits are trained, one vector per layer for all projections.
The mixture changes once per optimizer step, so it is computed once per step and cached for the
forward passes until the next one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moe_runtime import backends
from moe_runtime.config import MoEConfig, check_shared_rate
from moe_runtime.modules.moe import Experts
from moe_runtime.ops._torch_private import in_dispatch_mode, in_transform
from moe_runtime.ops.library import compute_dtype
from moe_runtime.ops.merging import Kept, merge_experts, merged_linear, mixing, soup_logits
from moe_runtime.ops.workspace import stream_of


class _Mixture(NamedTuple):
    """Merged weights, and the inputs that they were computed from."""

    key: tuple
    storages: tuple[StorageWeakRef, ...]  # keep the addresses in `key` from being reused
    seen: Tensor  # [E], the alpha in `weights`
    # [out, in] by the stack's name, in the dtype that F.linear computes in
    weights: dict[str, Tensor]


class MergedMLP(nn.Module):
    """An MLP act(gate x) * (up x), then `down`, with W = sum_e alpha_e W_e.

    alpha = mixing(mixing_logits, shared_rate). `mixing_logits` is float32: [E - 1] for XFT (expert
    0 gets `shared_rate`), [E] for a learned soup (`soup=True`).
    """

    _mixture: _Mixture | None = None

    def __init__(
        self,
        config: MoEConfig,
        *,
        shared_rate: float = 0.75,
        soup: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        check_shared_rate(shared_rate)
        self.config = config
        self.shared_rate = shared_rate
        self.soup = soup
        self.experts = Experts(config, dtype=dtype, device=device).requires_grad_(False)
        size = config.num_experts if soup else config.num_experts - 1
        self.mixing_logits = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the logits to the INIT mixture, [shared_rate, (1 - shared_rate) / (E - 1), ...]."""
        if self.soup:
            logits = soup_logits(self.config.num_experts, self.shared_rate)
        else:
            logits = torch.ones(self.mixing_logits.shape)
        self.mixing_logits.copy_(logits)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the logits float32 in casts, as bfloat16 near 1 loses updates of 1e-5."""
        self.release()
        super()._apply(fn, recurse)
        self.mixing_logits.data = self.mixing_logits.data.float()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the cached mixture from copies and pickles, as from state_dict."""
        return self.__dict__ | {"_mixture": None}

    def release(self) -> None:
        """Free the cached mixture, which has the size of a dense MLP.

        The next forward pass recomputes it. Call it after changing the experts without updating
        autograd's version counter, for example by `weight.data.copy_()`. Changes of the mixing
        logits are always detected.
        """
        self._mixture = None

    def alpha(self) -> Tensor:
        """Return the mixing coefficients [E] float32, which sum to 1."""
        return mixing(self.mixing_logits, None if self.soup else self.shared_rate)

    def merged_weights(self) -> dict[str, Tensor]:
        """Return a dense weight per expert stack, by its name, differentiable in alpha."""
        alpha = self.alpha()
        stacks = self.experts.named_parameters()
        return {name: merge_experts(weight, alpha) for name, weight in stacks}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [..., H] from `hidden_states` [..., H]."""
        linear = self._linear()
        z = linear(hidden_states, self.experts.up_name)
        return linear(self.experts.activation().apply(z), "down_proj")

    def _linear(self) -> Callable[[Tensor, str], Tensor]:
        """Return a function of x and the name of a stack: x W^T + b, merged."""
        alpha = self.alpha()
        weights: dict[str, Tensor] = {}
        bias: dict[str, Tensor] = {}
        for name, stack in self.experts.named_parameters():
            if name.endswith("_bias"):
                bias[name.removesuffix("_bias")] = merge_experts(stack, alpha)
            else:
                weights[name] = stack
        if any(weight.requires_grad for weight in weights.values()) or in_transform():
            merged = {name: merge_experts(weight, alpha) for name, weight in weights.items()}
            return lambda x, name: F.linear(x, merged[name], bias.get(name))
        # when ops are traced, faked or counted, the result of one call must not become a constant
        # of another
        watched = torch.compiler.is_compiling() or in_dispatch_mode() or torch.jit.is_tracing()
        merged = {} if watched else self._merged(weights, alpha)
        return lambda x, name: merged_linear(
            x,
            weights[name],
            alpha,
            merged.get(name),
            bias.get(name),
        )

    @torch.inference_mode(False)  # tensors made under inference_mode cannot be saved for backward
    @torch.no_grad()
    def _merged(self, weights: dict[str, Tensor], alpha: Tensor) -> dict[str, Tensor]:
        """Return `weights` merged with `alpha`, from the cache if nothing changed, or {}."""
        sources = (self.mixing_logits, *weights.values())
        device = alpha.device
        backend = backends.pick("merge_experts", weights["down_proj"])
        plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in sources)
        # comparing alpha would wait for the GPU
        if not plain or (backend == "torch" and device.type != "cpu"):
            return {}
        # another stream would not wait for the merging one, and a CUDA graph capture runs no kernel
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return {}
        dtypes = {name: compute_dtype(weight) for name, weight in weights.items()}
        key = (
            self.shared_rate,
            self.soup,
            backend,
            stream_of(device),
            *dtypes.values(),
            *map(_identity, sources),
        )
        mixture = self._mixture  # read once, as other threads may write it
        if mixture is not None and mixture.key != key:
            mixture = None
        # fused optimizers and writes through .data do not change the version counter, so alpha
        # itself is compared, on a GPU by the kernel, in place and without a sync
        if mixture is not None and backend not in ("torch", "cpp"):
            for name, weight in weights.items():
                merged: Any = mixture.weights[name]
                merged.kept.remerge(merged, weight, alpha)
        elif mixture is None or not torch.equal(alpha, mixture.seen):
            mixture = self._mixture = None  # frees memory for the new weights
            new = {}
            for name, weight in weights.items():
                merged = merge_experts(weight, alpha).to(dtypes[name])
                merged.kept = Kept(alpha.clone(), backend)
                new[name] = merged
            storages = tuple(StorageWeakRef(t.untyped_storage()) for t in sources)
            mixture = self._mixture = _Mixture(key, storages, alpha.clone(), new)
        return mixture.weights


def _identity(t: Tensor) -> tuple:
    """Return a key that changes if `t` is replaced, moved, cast or written to."""
    return (
        id(t),
        t._version,
        t.untyped_storage()._cdata,
        t.data_ptr(),
        t.dtype,
        t.device,
        t.shape,
        t.stride(),
    )
