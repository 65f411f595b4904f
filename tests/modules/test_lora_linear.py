"""LoRA experts with a router for each linear layer, and what both forms share: forced experts,
merges, draws.
"""

import copy

import pytest
import torch
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.modules.lora import TARGETS, LoRAMoE
from moe_runtime.modules.lora_linear import LinearExperts, LoRALinear, add_experts
from tests.modules.test_lora import MLP, H, I, make
from tests.support.lora import merged_base
from tests.support.oracle import assert_parity

E = 4
RANK = 3
ALPHA = 5.0
SETTINGS = {
    "dense": {"top_k": E, "gate": "softmax_topk"},
    "top-2": {"top_k": 2, "gate": "softmax_topk_renorm"},
    "not-renormalised": {"top_k": 2, "gate": "softmax_topk"},
    "shared": {"top_k": 3, "gate": "xft"},
}


def config_of(**settings) -> MoEConfig:
    return MoEConfig(
        **{"hidden_size": H, "intermediate_size": I, "num_experts": E}
        | SETTINGS["top-2"]
        | settings
    )


def linear(bias=False, dtype=None, **settings) -> LoRALinear:
    """A layer whose experts differ and whose router has a say."""
    torch.manual_seed(0)
    layer = LoRALinear(
        nn.Linear(H, I, bias=bias, dtype=dtype), config_of(**settings), RANK, alpha=ALPHA
    )
    with torch.no_grad():
        layer.lora_b.normal_(std=0.3)
        layer.gate.weight.normal_(std=0.5)
    return layer


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert_parity({"it": got.detach()}, {"it": want.detach()}, bound)


def gate_weights(name: str, logits: torch.Tensor) -> torch.Tensor:
    """w [T, E] by a loop over tokens, from the logits alone."""
    weight = torch.zeros(logits.shape[0], E, dtype=logits.dtype)
    rows = []
    for row in logits:
        p = torch.softmax(row, 0)
        best = torch.argsort(row, descending=True)[: {"dense": E}.get(name, 2)]
        out = torch.zeros_like(weight[0])
        if name == "shared":
            share = torch.softmax(p[best], 0) * p[best[0]]
            out[best + 1] = share
            out[0] = 1 - p[best[0]]
        else:
            out[best] = p[best] / (p[best].sum() if name == "top-2" else 1)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_layer_is_the_equation_with_its_gradients(name, bias):
    layer = linear(bias, **SETTINGS[name])
    x = torch.randn(2, 7, H, requires_grad=True)
    grad = torch.randn(2, 7, I)
    layer(x).backward(grad)

    double = copy.deepcopy(layer).double()
    wide = x.detach().double().flatten(0, 1).requires_grad_()
    weight = gate_weights(name, wide @ double.gate.weight.t())
    want = wide @ double.base.weight.t() + (0 if not bias else double.base.bias)
    for e in range(E):
        low = wide @ double.lora_a[e].t()
        want = want + ALPHA / RANK * weight[:, e : e + 1] * (low @ double.lora_b[e])
    leaves = [wide, double.lora_a, double.lora_b, double.gate.weight]
    grads = torch.autograd.grad(want, leaves, grad.double().flatten(0, 1))
    found = [x.grad.flatten(0, 1), layer.lora_a.grad, layer.lora_b.grad, layer.gate.weight.grad]
    assert_close(layer(x).detach().flatten(0, 1), want.detach(), 1e-6)
    for got, expected in zip(found, grads, strict=True):
        assert_close(got, expected, 1e-5)
    assert layer.base.weight.grad is None and not layer.base.weight.requires_grad


def test_at_first_it_is_the_linear_layer_which_it_holds():
    base = nn.Linear(H, I)
    layer = LoRALinear(base, config_of(), RANK)
    x = torch.randn(5, H)
    assert layer.base is base and torch.equal(layer(x), base(x))
    assert layer.scaling == 2 * 8 / RANK and not layer.lora_b.any()
    bound = H**-0.5
    for weight in (layer.lora_a, layer.gate.weight):
        assert 0.9 * bound < weight.abs().max() <= bound
    assert layer(torch.randn(0, H)).shape == (0, I)


def test_a_router_has_the_width_of_its_layers_input():
    mlp = add_experts(MLP(), config_of(), form="linear", rank=2, alpha=4.0)
    assert [getattr(mlp, name).gate.weight.shape for name in TARGETS] == [(E, H), (E, H), (E, I)]
    part = add_experts(MLP(), config_of(), form="linear", rank=2, alpha=4.0, targets=("up_proj",))
    assert type(part.gate_proj) is nn.Linear and LinearExperts(part).targets == ("up_proj",)
    assert isinstance(add_experts(MLP(), config_of(), form="block", rank=2, alpha=4.0), LoRAMoE)


def test_records_are_those_of_the_router():
    layer = linear(balance_loss="switch", balance_loss_coef=0.5)
    x = torch.randn(9, H)
    layer.records = []
    layer(x)
    (record,) = layer.records
    assert record.router_logits.shape == (9, E) and record.topk_idx.shape == (9, 2)
    assert torch.equal(record.balance_loss, layer.gate(x).balance_loss) and record.balance_loss > 0


def test_wide_pairs_over_a_narrow_base_and_autocast():
    layer = LoRALinear(
        nn.Linear(H, I, dtype=torch.bfloat16), config_of(), RANK, dtype=torch.float32
    )
    with torch.no_grad():
        layer.lora_b.normal_(std=0.3)
    x = torch.randn(6, H)
    wide = copy.deepcopy(layer).float()
    out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16 and layer.lora_a.dtype == torch.float32
    assert_close(out, wide(x), 2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = wide(x)
    assert mixed.dtype == torch.bfloat16
    assert_close(mixed, wide(x), 2e-2)


def test_what_weighs_the_experts_is_not_rounded():
    layer = linear(**SETTINGS["dense"]).bfloat16()
    x = torch.randn(64, H).bfloat16()
    weight = layer._weights(x, x).detach()
    low = torch.nn.functional.linear(x, layer.lora_a.flatten(0, 1)).view(-1, E, RANK)
    want = (low.double() * weight.double()[:, :, None] * layer.scaling).bfloat16().flatten(
        1
    ) @ layer.lora_b.flatten(0, 1)
    narrow = (low * (weight * layer.scaling).bfloat16()[:, :, None]).flatten(
        1
    ) @ layer.lora_b.flatten(0, 1)
    got = layer(x)
    assert weight.dtype == torch.float32 and torch.equal(got, layer.base(x) + want)
    assert not torch.equal(got, layer.base(x) + narrow)


# what both forms share
def both() -> dict[str, nn.Module]:
    """An MLP of each form, over the same weights, the same pairs in both."""
    torch.manual_seed(0)
    block = make(E=E, rank=RANK)
    mlp = copy.deepcopy(block.experts.base)
    mlp = add_experts(mlp, block.config, form="linear", rank=RANK, alpha=3.0)
    for target in TARGETS:
        with torch.no_grad():
            getattr(mlp, target).lora_a.copy_(block.experts.lora_a[target])
            getattr(mlp, target).lora_b.copy_(block.experts.lora_b[target])
    return {"block": block, "linear": mlp}


def force(layer: nn.Module, ids) -> None:
    for module in layer.modules():
        if isinstance(module, LoRAMoE | LoRALinear):
            module.forced = ids


@pytest.mark.parametrize("form", ["block", "linear"])
def test_a_forced_expert_is_that_expert_merged(form):
    layer = both()[form]
    ids = torch.tensor([2, 0, 2, 3])
    x = torch.randn(4, 5, H)
    force(layer, ids)
    got = layer(x)
    for row, e in enumerate(ids.tolist()):
        plain = make(E=E, rank=RANK)
        plain.experts.load_state_dict(both()["block"].experts.state_dict())
        assert_close(got[row], merged_base(plain.experts, e)(x[row]), 1e-5)
    with pytest.raises(
        ValueError, match="forced must have one expert for each of 3 rows, but has 4"
    ):
        layer(x[:3])
    force(layer, None)
    assert not torch.allclose(layer(x), got)


@pytest.mark.parametrize("form", ["block", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weight_is_the_sum(form, dtype):
    layer = both()[form].to(dtype)
    pairs = layer.experts if form == "block" else LinearExperts(layer)
    alpha = torch.tensor([0.1, 0.6, 0.0, 0.3])
    for target in TARGETS:
        linear = getattr(pairs.base, target)
        weight = linear.weight if form == "block" else linear.base.weight
        want = weight.double().clone()
        for e in range(E):
            want += (
                alpha[e]
                * 3.0
                / RANK
                * pairs.lora_b[target][e].double().t()
                @ pairs.lora_a[target][e].double()
            )
        got = pairs.merged_weight(target, alpha)
        assert got.dtype == dtype and got.shape == weight.shape
        assert_close(got, want, 1e-6 if dtype == torch.float32 else 4e-3)


def test_unwrap_gives_the_mlp_back():
    mlp = MLP()
    linears = {name: getattr(mlp, name) for name in TARGETS}
    x = torch.randn(3, H)
    want = mlp(torch.zeros(1, H))
    layer = add_experts(mlp, config_of(), form="linear", rank=2, alpha=4.0)
    assert layer is mlp and torch.equal(layer(torch.zeros(1, H)), want)
    assert LinearExperts(layer).unwrap() is mlp
    assert all(getattr(mlp, name) is linears[name] for name in TARGETS) and mlp(x).shape == (3, H)
