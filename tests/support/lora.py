"""Cases of LoRA experts, and their oracle: every expert's weights made whole, then the loops of
`moe_oracle`.
"""

from dataclasses import dataclass, field

import torch

from moe_runtime.ops.lora import LoRA
from tests.support.oracle import choose_experts, moe_oracle

NAMES = ("gate", "up", "down")


@dataclass
class Case:
    """Leaves as the user holds them; the base is frozen. `topk_idx` None: every expert, with
    weights [T, E].
    """

    # x, topk_weight, <projection>_a, <projection>_b of those that have pairs
    leaves: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]  # gate_proj, up_proj, down_proj, maybe biases
    topk_idx: torch.Tensor | None
    dout: torch.Tensor
    scaling: float = 1.5
    act: str = "silu"
    options: dict = field(default_factory=dict)


def make_case(
    T,
    H,
    I,
    E,
    K,
    rank,
    dtype=torch.float32,
    routing="random",
    act="silu",
    targets=NAMES,
    bias=False,
    seed=0,
) -> Case:
    """A layer whose outputs and gradients are O(1); K = None is dense."""
    torch.manual_seed(seed)
    base = {
        "gate_proj": torch.randn(I, H) / H**0.5,
        "up_proj": torch.randn(I, H) / H**0.5,
        "down_proj": 2 * torch.randn(H, I) / I**0.5,
    }
    if bias:
        base |= {
            "gate_bias": torch.randn(I),
            "up_bias": torch.randn(I),
            "down_bias": torch.randn(H),
        }
    leaves = {"x": torch.randn(T, H), "topk_weight": 0.2 + torch.rand(T, E if K is None else K)}
    for name in targets:
        size, out = (I, H) if name == "down" else (H, I)
        leaves[f"{name}_a"] = torch.randn(E, rank, size) / size**0.5
        leaves[f"{name}_b"] = torch.randn(E, rank, out) / rank**0.5
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: leaf.to(gates if name == "topk_weight" else dtype) for name, leaf in leaves.items()
    }
    idx = None if K is None else choose_experts(T, E, K, routing).int()
    return Case(
        leaves,
        {name: w.to(dtype) for name, w in base.items()},
        idx,
        torch.randn(T, H).to(dtype),
        act=act,
    )


@torch.no_grad()
def merged_base(experts, expert: int) -> torch.nn.Module:
    """The base of LoRAExperts with one expert in its weights, in place."""
    for target in experts.targets:
        getattr(experts.base, target).weight.copy_(experts.whole_weight(target, expert))
    return experts.base


def arguments(
    case: Case, leaves: dict, dtype: torch.dtype | None, device: str
) -> tuple[tuple, dict]:
    """The arguments of `lora_mlp`: by position, and by name."""
    base = {name: weight.to(device, dtype or weight.dtype) for name, weight in case.base.items()}
    pairs = {
        name: LoRA(leaves[f"{name}_a"], leaves[f"{name}_b"])
        for name in NAMES
        if f"{name}_a" in leaves
    }
    weights = [base.pop(f"{name}_proj") for name in NAMES]
    idx = None if case.topk_idx is None else case.topk_idx.to(device)
    return (leaves["x"], *weights, leaves["topk_weight"], idx), pairs | base | {
        "scaling": case.scaling,
        "act": case.act,
    }


def run(
    case: Case, layer, dtype: torch.dtype | None = None, device: str = "cpu", **options
) -> dict[str, torch.Tensor]:
    """Run `layer` as `lora_mlp` is called -> out and every d<leaf>, on the CPU."""
    leaves = {
        name: leaf.detach().clone().to(device, dtype or leaf.dtype)
        for name, leaf in case.leaves.items()
    }
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    args, kwargs = arguments(case, leaves, dtype, device)
    out = layer(*args, **kwargs, **case.options, **options)
    grads = torch.autograd.grad(
        out, list(leaves.values()), case.dout.to(device, out.dtype), allow_unused=True
    )
    grads = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves.values(), grads, strict=True)
    ]
    return {"out": out.detach().cpu()} | {
        f"d{name}": grad.cpu() for name, grad in zip(leaves, grads)
    }


def oracle(
    x, gate_proj, up_proj, down_proj, topk_weight, topk_idx, *, scaling, act, **given
) -> torch.Tensor:
    """Every expert made whole."""
    E = next(pair for name, pair in given.items() if name in NAMES).a.shape[0]
    stacks = []
    for name, weight in zip(NAMES, (gate_proj, up_proj, down_proj)):
        pair = given.get(name)
        delta = 0 if pair is None else scaling * torch.einsum("ero,eri->eoi", pair.b, pair.a)
        stacks.append(weight.expand(E, -1, -1) + delta)
    up_bias = down_bias = None
    if "gate_bias" in given:
        up_bias = torch.cat([given["gate_bias"], given["up_bias"]]).expand(E, -1)
        down_bias = given["down_bias"].expand(E, -1)
    if topk_idx is None:
        topk_idx = torch.arange(E, device=x.device).expand(x.shape[0], -1)
    return moe_oracle(
        x,
        torch.cat(stacks[:2], 1),
        stacks[2],
        topk_weight,
        topk_idx,
        up_bias=up_bias,
        down_bias=down_bias,
        act=act,
    )
