"""LoRA experts of one linear layer with a separate router: LoRAMoE (arXiv 2312.09979, Eq. (5)).

    y = W x + s sum_i w_i(x) B_i A_i x,   w(x) = softmax(G x) over all experts,   s = alpha / r

LoRAMoE's experts process every token; with config.top_k below num_experts, w are the weights of
`config.gate` for the top_k. `modules.lora.LoRAMoE` routes once for a whole MLP and mixes the
outputs of its activation; here each linear layer routes its input, and the activation is applied to
the mixture. G and A are initialized as in nn.Linear, B to zero, as in LoRAMoE's code.

LoRAMoE's localized balancing constraint, a cv2 of importances weighted by the type of an example's
task, is not implemented, as examples have no type in this package; config.balance_loss applies to
all routers.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.config import MoEConfig, check_choice, check_number, check_positive
from moe_runtime.modules.lora import TARGETS, LoRAMoE, add_pairs, check_plain, draw_as_linear
from moe_runtime.modules.moe import Router, RouterOutput
from moe_runtime.ops.lora import mixed_weight

FORMS = ("block", "linear")


class LoRALinear(nn.Module):
    """A frozen nn.Linear `base` and E low-rank changes of it that are weighted by a router.

    `lora_a` [E, r, in], `lora_b` [E, r, out]. Same inputs and outputs as `base`. Only the router
    settings of `config` are used; its hidden_size is replaced by the layer's in_features. `records`
    works as in MoE.
    """

    def __init__(
        self,
        base: nn.Module,
        config: MoEConfig,
        rank: int = 8,
        *,
        alpha: float = 16.0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("rank", rank)
        check_number("alpha", alpha, positive=True)
        if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
            raise ValueError(
                f"base must be an nn.Linear of a floating dtype, but is a {type(base).__name__}"
            )
        weight = base.weight
        self.config = dataclasses.replace(config, hidden_size=base.in_features)
        self.base = base.requires_grad_(False)
        self.rank = rank
        self.alpha = alpha
        self.gate = Router(self.config, dtype=weight.dtype, device=weight.device)
        E = config.num_experts
        where: dict[str, Any] = {"dtype": dtype or weight.dtype, "device": weight.device}
        self.lora_a = nn.Parameter(torch.empty(E, rank, base.in_features, **where))
        self.lora_b = nn.Parameter(torch.empty(E, rank, base.out_features, **where))
        self.records: list[RouterOutput] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the router and every a from U(-1, 1) / sqrt(in), and set every b to zero."""
        for weight in (*self.gate.parameters(), self.lora_a):
            draw_as_linear(weight, generator)
        self.lora_b.zero_()

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return a [E, r, in] and b [E, r, out], like those of a single target of LoRAExperts."""
        return [(self.lora_a, self.lora_b)]

    @property
    def scaling(self) -> float:
        """The factor of b^T a: alpha / rank."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., out] from `x` [..., in], in the dtype in which `base` computes."""
        out = self.base(x)
        rows = x.reshape(-1, x.shape[-1])
        weight = self._weights(rows)
        E = self.config.num_experts
        dtype = out.dtype
        low = F.linear(rows.to(dtype), self.lora_a.to(dtype).flatten(0, 1)).view(-1, E, self.rank)
        # the weights are float32 in this product, as in the experts' op
        low = (low * (weight * self.scaling)[:, :, None]).to(dtype)
        return out + (low.flatten(1) @ self.lora_b.to(dtype).flatten(0, 1)).view_as(out)

    def _weights(self, rows: Tensor) -> Tensor:
        """Return each token's weight for each expert, [T, E]."""
        routing = self.gate(rows)
        if self.records is not None:
            self.records.append(routing.widened())
        return mixed_weight(routing.topk_weight, routing.topk_idx, self.config.num_experts)


class LinearExperts:
    """The LoRALinears of one MLP with the interface of LoRAExperts."""

    def __init__(self, mlp: nn.Module):
        self.base = mlp
        self.linears: dict[str, LoRALinear] = {}
        for name, module in mlp.named_children():
            if isinstance(module, LoRALinear):
                self.linears[name] = module
        if not self.linears:
            raise ValueError(
                f"mlp must have LoRALinear layers, but is a {type(mlp).__name__} without any"
            )
        first = next(iter(self.linears.values()))
        self.num_experts = first.config.num_experts
        self.rank = first.rank
        self.alpha = first.alpha
        self.scaling = first.scaling
        self.targets = tuple(self.linears)
        self.lora_a = {name: linear.lora_a for name, linear in self.linears.items()}
        self.lora_b = {name: linear.lora_b for name, linear in self.linears.items()}

    @torch.no_grad()
    def merged_weight(self, target: str, alpha: Tensor) -> Tensor:
        """Return W + scaling sum_e alpha_e b_e^T a_e [out, in] in the base's dtype, `alpha` [E]."""
        check_plain(self.linears[target].base, target)
        return add_pairs(
            self.linears[target].base.weight,
            self.lora_a[target],
            self.lora_b[target],
            alpha * self.scaling,
        )

    def unwrap(self) -> nn.Module:
        """Replace the LoRALinears by the original linear layers and return the MLP."""
        for name, linear in self.linears.items():
            self.base.set_submodule(name, linear.base)
        return self.base


def add_experts(
    mlp: nn.Module,
    config: MoEConfig,
    *,
    form: str,
    rank: int,
    alpha: float,
    targets: tuple[str, ...] = TARGETS,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return a LoRAMoE over the MLP (form "block"), or the MLP with LoRALinears ("linear")."""
    check_choice("form", form, FORMS)
    if form == "block":
        return LoRAMoE(
            mlp,
            config,
            rank,
            alpha=alpha,
            targets=targets,
            dtype=dtype,
        )
    for target in targets:
        linear = LoRALinear(
            getattr(mlp, target),
            config,
            rank,
            alpha=alpha,
            dtype=dtype,
        )
        mlp.set_submodule(target, linear)
    return mlp
