"""The mergeable layer: a dense MLP whose weights are a learned mixture of frozen experts.

XFT, Eq. (4) and (6): only the mixing logits train; one vector of them per layer serves every projection.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import Experts
from moe_runtime.ops.activation import activate
from moe_runtime.ops.merging import merge_experts, mixing, soup_logits


class MergedMLP(nn.Module):
    """act(gate x) * (up x) through `down`, with W = sum_e alpha_e W_e and alpha = mixing(mixing_logits, shared_rate).

    `mixing_logits` is float32: [E - 1] for XFT (expert 0 gets `shared_rate`), [E] for a learned soup (`soup=True`).
    """

    def __init__(self, config: MoEConfig, *, shared_rate: float = 0.75, soup: bool = False, dtype=None, device=None):
        super().__init__()
        if not 0 <= shared_rate <= 1:
            raise ValueError(f"shared_rate is {shared_rate}; want 0 to 1, the shared expert's mixing coefficient")
        self.config, self.shared_rate, self.soup = config, shared_rate, soup
        self.experts = Experts(config, dtype=dtype, device=device).requires_grad_(False)
        size = config.num_experts if soup else config.num_experts - 1
        self.mixing_logits = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the logits to the INIT mixture: alpha = [shared_rate, (1 - shared_rate) / (E - 1), ...]."""
        logits = (
            soup_logits(self.config.num_experts, self.shared_rate)
            if self.soup
            else torch.ones(self.mixing_logits.shape)
        )
        self.mixing_logits.copy_(logits)

    def _apply(self, fn, recurse=True):
        """Keep the logits float32 whatever the module is cast to: steps of 1e-5 are lost on a bfloat16 number near 1."""
        super()._apply(fn, recurse)
        self.mixing_logits.data = self.mixing_logits.data.float()
        return self

    def alpha(self) -> torch.Tensor:
        """Return the mixing coefficients [E] float32, which sum to 1."""
        return mixing(self.mixing_logits, None if self.soup else self.shared_rate)

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Return one dense weight per expert stack, under the stack's name, in its dtype; differentiable in alpha."""
        alpha = self.alpha()
        return {name: merge_experts(weight, alpha) for name, weight in self.experts.named_parameters()}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` [..., H] -> [..., H]."""
        w, up = self.merged_weights(), self.experts.up_name
        z = F.linear(hidden_states, w[up], w.get(f"{up}_bias"))
        h = activate(z, self.config.hidden_act, self.config.gated)
        return F.linear(h, w["down_proj"], w.get("down_proj_bias"))

    def extra_repr(self) -> str:
        """Show the mixture's settings in print(model)."""
        return f"experts={self.config.num_experts}, " + ("soup" if self.soup else f"shared_rate={self.shared_rate}")
