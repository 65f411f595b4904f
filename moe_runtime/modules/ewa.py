"""The layer of EWA: experts without a router, each token of a batch seen by one of them, drawn at random.

EWA (arXiv 2308.06093): while training, a random equal partition of the batch's tokens over the experts, weight 1; else the
expert whose weights are the mean of theirs. What draws the experts to that mean after each step is `ops.averaging`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import Experts
from moe_runtime.ops.activation import activate
from moe_runtime.ops.library import compute_dtype
from moe_runtime.ops.merging import merge_experts


class EWAMLP(nn.Module):
    """E stacked MLPs; `config`'s gate, router and top_k play no part.

    Padding counts as tokens. The partition comes from the device's default generator, so that a seed repeats it, and so
    does gradient checkpointing that preserves the generator (preserve_rng_state) of the device that the input comes from.
    """

    def __init__(self, config: MoEConfig, *, dtype=None, device=None):
        super().__init__()
        self.config = config
        self.experts = Experts(config, dtype=dtype, device=device)

    def alpha(self) -> torch.Tensor:
        """Return the mean's coefficients [E] float32: 1 / E each."""
        return uniform_mixture(self.config.num_experts, self.experts.down_proj.device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` [..., H] -> [..., H]."""
        if not self.training:
            return self._mean(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        idx = random_partition(x.shape[0], self.config.num_experts, x.device)[:, None]
        one = torch.ones(idx.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return self.experts(x, idx, one).view_as(hidden_states)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Run the mean expert, made anew in each call: nothing is kept that an optimizer's step would make stale."""
        alpha, up = self.alpha(), self.experts.up_name
        mean = {name: merge_experts(weight, alpha) for name, weight in self.experts.named_parameters()}
        mean = {name: weight.to(compute_dtype(weight)) for name, weight in mean.items()}
        z = F.linear(x.to(compute_dtype(x)), mean[up], mean.get(f"{up}_bias"))
        h = activate(z, self.config.hidden_act, self.config.gated)
        return F.linear(h, mean["down_proj"], mean.get("down_proj_bias"))

    def extra_repr(self) -> str:
        """Show the sizes in print(model)."""
        c = self.config
        return f"num_experts={c.num_experts}, hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}"


def random_partition(tokens: int, num_experts: int, device=None) -> torch.Tensor:
    """Return an expert for each token [T] int32, every partition into groups equal but for one token as likely as another."""
    # which experts get a token more is drawn too, or with fewer tokens than experts the last ones would never train
    order = torch.randperm(num_experts, device=device)
    return order[torch.randperm(tokens, device=device) % num_experts].to(torch.int32)


def uniform_mixture(num_experts: int, device=None) -> torch.Tensor:
    """Return alpha [E] float32 of the uniform mean."""
    return torch.full((num_experts,), 1 / num_experts, dtype=torch.float32, device=device)
