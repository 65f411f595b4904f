"""Experts that are low-rank changes of one dense MLP, which is frozen and shared by all of them.

UpIT's LoRA experts: FFN_e = base + scaling B_e A_e in each projection, and a router selects top_k
of them. LoRAMoE (arXiv 2312.09979) selects every expert. For the equations, and why the base runs
once per token, see `moe_runtime.ops.lora`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.config import ACTIVATIONS, MoEConfig, check_choice, check_number, check_positive
from moe_runtime.modules.moe import MoE, Router, is_plain
from moe_runtime.ops.library import autocast_dtype, wide_dtype
from moe_runtime.ops.lora import LoRA, lora_mlp

TARGETS = ("gate_proj", "up_proj", "down_proj")


class DrawnHalves(nn.ParameterDict):
    """The a of each target, [E, r, in]; a class of its own, which transformers initializes."""


class ZeroHalves(nn.ParameterDict):
    """The b of each target, [E, r, out]."""


class LoRAExperts(nn.Module):
    """E low-rank experts over `base`, a gated MLP with the linear layers of TARGETS.

    The base is referenced and frozen. `lora_a[target]` [E, r, in] is initialized as in nn.Linear
    and `lora_b[target]` [E, r, out] to zero, so that every expert starts as the base. The update is
    alpha / rank times b^T a. Its dtype may differ from the base's, in which it computes. The base's
    weights are read directly and its layers never called: each must be a plain nn.Linear.
    """

    def __init__(
        self,
        base: Any,
        num_experts: int,
        rank: int = 8,
        *,
        alpha: float = 16.0,
        hidden_act: str = "silu",
        targets: tuple[str, ...] = TARGETS,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("num_experts", num_experts)
        check_positive("rank", rank)
        check_number("alpha", alpha, positive=True)
        check_choice("hidden_act", hidden_act, ACTIVATIONS)
        check_base(base)
        if not targets or set(targets) - set(TARGETS):
            raise ValueError(f"targets must be some of {', '.join(TARGETS)}, but got {targets!r}")
        self.base = base.requires_grad_(False)
        self.num_experts = num_experts
        self.rank = rank
        self.alpha = alpha
        self.hidden_act = hidden_act
        self.recompute = recompute
        self.targets = tuple(target for target in TARGETS if target in targets)
        self.lora_a = DrawnHalves()
        self.lora_b = ZeroHalves()
        for target in self.targets:
            weight = self._weight(target)
            where: dict[str, Any] = {"dtype": dtype or weight.dtype, "device": weight.device}
            out, size = weight.shape
            self.lora_a[target] = nn.Parameter(torch.empty(num_experts, rank, size, **where))
            self.lora_b[target] = nn.Parameter(torch.empty(num_experts, rank, out, **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw every a from U(-1, 1) / sqrt(in), as nn.Linear does, and set every b to zero.

        A `generator` draws in float32 on its device, so that the numbers do not depend on the
        layer's device and dtype.
        """
        for target in self.targets:
            draw_as_linear(self.lora_a[target], generator)
            self.lora_b[target].zero_()

    @property
    def scaling(self) -> float:
        """The factor of b^T a: alpha / rank."""
        return self.alpha / self.rank

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return a [E, r, in] and b [E, r, out] of each target."""
        return [(self.lora_a[target], self.lora_b[target]) for target in self.targets]

    def _linear(self, target: str) -> nn.Linear:
        linear = getattr(self.base, target)
        check_plain(linear, target)
        return linear

    def _weight(self, target: str) -> Tensor:
        return self._linear(target).weight

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weight: Tensor,
    ) -> Tensor:
        """Sum topk_weight[t, k] expert_{topk_idx[t, k]}(x[t]) over k for `x` [T, H].

        `topk_idx` and `topk_weight` are [T, K]. With `topk_idx` None every expert runs, with
        weights [T, E]. Computes in the base's or autocast's dtype.
        """
        gate, up, down = (self._linear(target) for target in TARGETS)
        dtype = autocast_dtype(x) or down.weight.dtype
        pairs: dict[str, LoRA | None] = dict.fromkeys(TARGETS)
        for target in self.targets:
            pairs[target] = LoRA(self.lora_a[target].to(dtype), self.lora_b[target].to(dtype))
        return lora_mlp(
            x.to(dtype),
            gate.weight.to(dtype),
            up.weight.to(dtype),
            down.weight.to(dtype),
            topk_weight,
            topk_idx,
            gate=pairs["gate_proj"],
            up=pairs["up_proj"],
            down=pairs["down_proj"],
            scaling=self.scaling,
            act=self.hidden_act,
            gate_bias=None if gate.bias is None else gate.bias.to(dtype),
            up_bias=None if up.bias is None else up.bias.to(dtype),
            down_bias=None if down.bias is None else down.bias.to(dtype),
            recompute=self.recompute,
        )

    @torch.no_grad()
    def whole_weight(self, target: str, expert: int) -> Tensor:
        """Return the weight [out, in] of `expert` in the projection `target`, in the base's dtype.

        It is summed in float32. Raises ValueError for an expert out of range.
        """
        check_expert(expert, self.num_experts)
        weight = self._weight(target)
        if target not in self.targets:
            return weight.clone()
        a = self.lora_a[target][expert : expert + 1]
        b = self.lora_b[target][expert : expert + 1]
        return add_pairs(weight, a, b, torch.tensor([self.scaling]))

    @torch.no_grad()
    def merged_weight(self, target: str, alpha: Tensor) -> Tensor:
        """Return W + scaling sum_e alpha_e b_e^T a_e [out, in] in the base's dtype, `alpha` [E]."""
        weight = self._weight(target)
        if target not in self.targets:
            return weight.clone()
        return add_pairs(
            weight,
            self.lora_a[target],
            self.lora_b[target],
            alpha * self.scaling,
        )

    @torch.no_grad()
    def merged_experts(self) -> dict[str, Tensor]:
        """Return whole experts with the names and shapes of `modules.moe.Experts`.

        gate_up_proj [E, 2I, H], down_proj [E, H, I], and a copy of the base's biases for each
        expert: gate_up_proj_bias [E, 2I], down_proj_bias [E, H].
        """
        gate = self._weight("gate_proj")
        I, H = gate.shape
        E = self.num_experts
        up = gate.new_empty(E, 2 * I, H)
        down = self._weight("down_proj").new_empty(E, H, I)
        for e in range(E):
            up[e, :I] = self.whole_weight("gate_proj", e)
            up[e, I:] = self.whole_weight("up_proj", e)
            down[e] = self.whole_weight("down_proj", e)
        stacks = {"gate_up_proj": up, "down_proj": down}
        if self.has_bias():
            biases: list[Tensor] = []
            for target in TARGETS:
                linear = self._linear(target)
                bias = linear.weight.new_zeros(linear.weight.shape[0])
                biases.append(bias if linear.bias is None else linear.bias)
            stacks["gate_up_proj_bias"] = torch.cat(biases[:2]).repeat(E, 1)
            stacks["down_proj_bias"] = biases[2].repeat(E, 1)
        return stacks

    def has_bias(self) -> bool:
        """Whether a projection of the base has a bias."""
        return any(self._linear(target).bias is not None for target in TARGETS)


def check_expert(expert: int, num_experts: int) -> None:
    """Raise ValueError unless `expert` is the number of one of `num_experts` experts."""
    if not 0 <= expert < num_experts:
        raise ValueError(f"expert must be from 0 to {num_experts - 1}, but got {expert}")


class LoRAMoE(MoE):
    """A router and LoRA experts that replace the dense MLP `base`.

    `config.top_k` experts process each token; with gate="softmax_topk" and top_k = num_experts all
    do, weighted by the softmax (LoRAMoE). The sizes and the activation of `config` are those of the
    base.
    """

    def __init__(
        self,
        base: Any,
        config: MoEConfig,
        rank: int = 8,
        *,
        alpha: float = 16.0,
        targets: tuple[str, ...] = TARGETS,
        dtype: torch.dtype | None = None,
    ):
        nn.Module.__init__(self)  # MoE's own experts are full ones
        check_base(base)
        sizes = (config.intermediate_size, config.hidden_size)
        if base.gate_proj.weight.shape != sizes or not config.gated:
            raise ValueError(
                "Expected a gated config of base's sizes, but gate_proj is "
                f"{tuple(base.gate_proj.weight.shape)} and the config has {sizes}, "
                f"gated={config.gated}"
            )
        weight = base.gate_proj.weight
        self.config = config
        self.gate = Router(config, dtype=weight.dtype, device=weight.device)
        self.experts: Any = LoRAExperts(
            base,
            config.num_experts,
            rank,
            alpha=alpha,
            hidden_act=config.hidden_act,
            targets=targets,
            recompute=config.recompute,
            dtype=dtype,
        )
        self.records = None

    @torch.no_grad()
    def to_moe(self) -> MoE:
        """Return an equivalent layer (up to rounding) with whole experts and a copied router."""
        config = MoEConfig.from_dict(self.config.to_dict() | {"bias": self.experts.has_bias()})
        with torch.device("meta"):
            moe = MoE(config, dtype=self.experts.base.down_proj.weight.dtype)
        state = {f"gate.{name}": value.clone() for name, value in self.gate.state_dict().items()}
        state |= {f"experts.{name}": value for name, value in self.experts.merged_experts().items()}
        moe.load_state_dict(state, assign=True)
        return moe.train(self.training)


def draw_as_linear(weight: Tensor, generator: torch.Generator | None = None) -> None:
    """Fill `weight` [..., in] from U(-1, 1) / sqrt(in), in float32 with a generator."""
    bound = 1 / math.sqrt(weight.shape[-1])
    if generator is None:
        weight.uniform_(-bound, bound)
    else:
        drawn = torch.empty(weight.shape, device=generator.device)
        weight.copy_(drawn.uniform_(-bound, bound, generator=generator))


def add_pairs(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return weight + sum_e scale_e b_e^T a_e [out, in], summed in float32, in weight's dtype.

    `a` is [E, r, in], `b` [E, r, out].
    """
    wide = wide_dtype(weight.dtype)
    scaled = b.to(wide) * scale.to(device=weight.device, dtype=wide)[:, None, None]
    total = torch.addmm(weight.to(wide), scaled.flatten(0, 1).t(), a.to(wide).flatten(0, 1))
    return total.to(weight.dtype)


def check_base(base: Any) -> None:
    """Raise ValueError unless `base` is a gated MLP of plain linears of one dtype and device."""
    layers: list[Any] = []
    for target in TARGETS:
        layers.append(getattr(base, target, None))
        check_plain(layers[-1], target)
    shapes = [tuple(layer.weight.shape) for layer in layers]
    if not shapes[0] == shapes[1] == shapes[2][::-1]:
        raise ValueError(
            f"{', '.join(TARGETS)} of base must be linear layers [I, H], [I, H], [H, I], but got "
            f"{shapes}"
        )
    kinds = [f"{layer.weight.dtype} on {layer.weight.device}" for layer in layers]
    if len(set(kinds)) != 1 or not layers[0].weight.is_floating_point():
        raise ValueError(
            "The weights of base must have one floating dtype and one device, but are "
            f"{', '.join(kinds)}"
        )


def check_plain(linear: Any, name: str) -> None:
    """Raise ValueError unless `linear` is exactly an nn.Linear without hooks.

    Its weight and bias then define its output. accelerate's hooks are allowed if they do not move
    the weights (a device_map over several GPUs).
    """
    kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
    if type(linear) is nn.Linear:
        hooks = linear._forward_hooks or linear._forward_pre_hooks
        is_dispatched = hasattr(linear, "_hf_hook") and not linear.weight.is_meta and not hooks
        if is_dispatched or is_plain(linear, nn.Linear):
            return
        kind += " with hooks"
    raise ValueError(
        f"{name} of base must be a plain torch.nn.Linear without hooks, as its weights are read "
        f"directly, but is {kind}. Merge adapters (merge_and_unload) or exclude the MLPs"
    )
