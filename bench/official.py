"""An XFT layer with the steps of the released code (ise-uiuc/xft, commit 4c5e439), reimplemented.

    logits = router(x)                                       sorted: the best k + 1, then all
    p = softmax of all logits, s = its k best                rounded to x's dtype
    weights = [softmax(s) s_1, 1 - s_1]                      Eq. (2), rounded to x's dtype
    slots sorted by expert, x gathered, three linears per expert, results concatenated, weighted,
    added by index

Each step also sums how much and how often every expert is used. There is no balance loss and no
noise on the logits, so that the function is the same as for the others in the comparison.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moe_runtime.modules.moe import MoE


class OfficialBlock(nn.Module):
    """Replaces a MoE with the gate xft; its experts' parameters are views of the MoE's stacks."""

    def __init__(self, moe: MoE):
        super().__init__()
        config = moe.config
        if (
            config.gate != "xft"
            or config.noisy_gate
            or config.hidden_act != "silu"
            or config.bias
            or not config.gated
        ):
            raise ValueError(
                "config must have gate='xft', noisy_gate=False, hidden_act='silu' and no bias, "
                f"but is {config}"
            )
        self.k = config.top_k - 1
        self.num_experts = config.num_experts
        self.router = moe.gate
        up = moe.experts.gate_up_proj.detach()
        down = moe.experts.down_proj.detach()
        stacks = (*up.chunk(2, 1), down)
        self.weight_gate, self.weight_up, self.weight_down = (
            nn.ParameterList(list(stack)) for stack in stacks
        )

    def parts(self) -> list[nn.Parameter]:
        """Return every expert's matrices."""
        return [*self.weight_gate, *self.weight_up, *self.weight_down]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` [..., H] -> [..., H]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        idx, weight = self.route(x)
        return self.run_experts(x, idx, weight).view_as(hidden_states)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and weights [T, k + 1] of each token's experts, the shared one last."""
        logits = F.linear(x, self.router.weight)
        if hasattr(self.router, "weight_out"):
            logits = F.linear(logits.tanh(), self.router.weight_out)
        chosen = logits.topk(min(self.k + 1, logits.shape[1]), dim=1).indices[:, : self.k]
        ranked = logits.topk(logits.shape[1], dim=1).values
        s = ranked.float().softmax(1)[:, : self.k].to(logits.dtype)
        used = torch.zeros_like(logits, requires_grad=True).scatter(
            1,
            chosen,
            s,
        )
        self.importance, self.load = used.sum(0).detach(), (used > 0).sum(0)
        shared = torch.ones_like(s[:, 0]) - s[:, 0]
        weight = torch.cat([s.float().softmax(1) * s[:, :1], shared[:, None]], -1).to(logits.dtype)
        return torch.cat([chosen + 1, torch.zeros_like(chosen[:, :1])], -1), weight

    def run_experts(self, x: torch.Tensor, idx: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return sum_j weight[t, j] FFN_{idx[t, j]}(x[t]), [T, H].

        Rows are counted on the host.
        """
        T, slots = idx.shape
        token = torch.arange(T, device=x.device).repeat_interleave(slots)
        idx = idx.flatten()
        order = idx.sort(0).indices
        weight = weight.flatten().index_select(0, order)
        token = token.index_select(0, order)
        rows = x.index_select(0, token).split(idx.bincount(minlength=self.num_experts).tolist())
        y = torch.cat([self.expert(e, part) for e, part in enumerate(rows) if len(part)])
        y = y * (weight[:, None] * 1.0)  # the released code has a score factor of 1
        return torch.zeros_like(x).index_add(0, token, y)

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        """Run one expert's MLP."""
        h = F.silu(F.linear(rows, self.weight_gate[e])) * F.linear(rows, self.weight_up[e])
        return F.linear(h, self.weight_down[e])
