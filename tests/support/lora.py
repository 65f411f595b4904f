"""Cases of LoRA experts, and their oracle: every expert's weights are merged, then the loops of
`moe_oracle` run.
"""

from dataclasses import dataclass, field

import torch

from moe_runtime.ops.lora import LoRA
from tests.support.oracle import choose_experts, gradients, leaves_of, moe_oracle

NAMES = ("gate", "up", "down")


@dataclass
class Case:
    """Leaves as the user has them; the base is frozen. If `topk_idx` is None, every expert is used,
    with weights [T, E].
    """

    # x, topk_weight, <projection>_a, <projection>_b for projections with pairs
    leaves: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]  # gate_proj, up_proj, down_proj, and biases, if any
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
    """Return a layer whose outputs and gradients are O(1); K = None is dense."""
    torch.manual_seed(seed)
    base = {
        "gate_proj": torch.randn(I, H) / H**0.5,
        "up_proj": torch.randn(I, H) / H**0.5,
        "down_proj": 2 * torch.randn(H, I) / I**0.5,
    }
    if bias:
        for name, size in (("gate_bias", I), ("up_bias", I), ("down_bias", H)):
            base[name] = torch.randn(size)
    leaves = {
        "x": torch.randn(T, H),
        "topk_weight": 0.2 + torch.rand(T, E if K is None else K),
    }
    for name in targets:
        size, out = (I, H) if name == "down" else (H, I)
        leaves[f"{name}_a"] = torch.randn(E, rank, size) / size**0.5
        leaves[f"{name}_b"] = torch.randn(E, rank, out) / rank**0.5
    for name, leaf in leaves.items():
        # gates are float32 or wider
        is_gate = name == "topk_weight"
        leaves[name] = leaf.to(torch.promote_types(dtype, torch.float32) if is_gate else dtype)
    base = {name: weight.to(dtype) for name, weight in base.items()}
    idx = None if K is None else choose_experts(T, E, K, routing).int()
    return Case(leaves, base, idx, torch.randn(T, H).to(dtype), act=act)


@torch.no_grad()
def merged_base(experts, expert: int) -> torch.nn.Module:
    """Merge one expert into the base of LoRAExperts, in place."""
    for target in experts.targets:
        getattr(experts.base, target).weight.copy_(experts.whole_weight(target, expert))
    return experts.base


def arguments(
    case: Case, leaves: dict, dtype: torch.dtype | None, device: str
) -> tuple[tuple, dict]:
    """Return the arguments of `lora_mlp`, positional and named."""
    named = {"scaling": case.scaling, "act": case.act}
    for name, weight in case.base.items():
        named[name] = weight.to(device, dtype or weight.dtype)
    weights = [named.pop(f"{name}_proj") for name in NAMES]
    for name in NAMES:
        if f"{name}_a" in leaves:
            named[name] = LoRA(leaves[f"{name}_a"], leaves[f"{name}_b"])
    idx = None if case.topk_idx is None else case.topk_idx.to(device)
    return (leaves["x"], *weights, leaves["topk_weight"], idx), named


def run(
    case: Case, layer, dtype: torch.dtype | None = None, device: str = "cpu", **options
) -> dict[str, torch.Tensor]:
    """Call `layer` like `lora_mlp`; return the output and every d<leaf>, on the CPU."""
    leaves = leaves_of(case, dtype, device)
    args, kwargs = arguments(case, leaves, dtype, device)
    out = layer(*args, **kwargs, **case.options, **options)
    grads = gradients(out, leaves, case.dout.to(device, out.dtype))
    return {"out": out.detach().cpu()} | grads


def oracle(
    x, gate_proj, up_proj, down_proj, topk_weight, topk_idx, *, scaling, act, **given
) -> torch.Tensor:
    """Compute with the merged weights of every expert."""
    E = next(pair for name, pair in given.items() if name in NAMES).a.shape[0]
    stacks = []
    for name, weight in zip(NAMES, (gate_proj, up_proj, down_proj)):
        pair = given.get(name)
        delta = 0 if pair is None else scaling * torch.einsum("ero,eri->eoi", pair.b, pair.a)
        stacks.append(weight.expand(E, -1, -1) + delta)
    up_bias = down_bias = None
    if "gate_bias" in given:
        up_bias = torch.cat([given["gate_bias"], given["up_bias"]]).expand(
            E,
            -1,
        )
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
