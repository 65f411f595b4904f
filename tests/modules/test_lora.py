"""LoRA experts as a layer: what it holds and trains, its routing, its merges, and its files, which
PEFT reads.
"""

import pytest
import torch
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.modules.lora import TARGETS, LoRAExperts, LoRAMoE
from moe_runtime.ops.lora import LoRA
from tests.support.lora import merged_base, oracle
from tests.support.oracle import assert_parity

H = 24
I = 40


class MLP(nn.Module):
    """A dense gated MLP with the models' names."""

    def __init__(self, hidden=H, intermediate=I, bias=False, dtype=None):
        super().__init__()
        self.gate_proj = nn.Linear(
            hidden,
            intermediate,
            bias=bias,
            dtype=dtype,
        )
        self.up_proj = nn.Linear(
            hidden,
            intermediate,
            bias=bias,
            dtype=dtype,
        )
        self.down_proj = nn.Linear(
            intermediate,
            hidden,
            bias=bias,
            dtype=dtype,
        )

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def fill(layer) -> None:
    """Make the experts distinct."""
    if isinstance(layer, LoRAMoE):
        experts = layer.experts
    else:
        experts = layer
    for b in experts.lora_b.values():
        b.data.normal_(std=0.3)


def config_of(E=3, top_k=2, gate="softmax_topk_renorm", **settings) -> MoEConfig:
    return MoEConfig(
        hidden_size=H,
        intermediate_size=I,
        num_experts=E,
        top_k=top_k,
        gate=gate,
        initializer_range=0.5,
        **settings,
    )


def make(rank=2, bias=False, dtype=None, targets=TARGETS, **settings) -> LoRAMoE:
    base = MLP(bias=bias, dtype=dtype)
    layer = LoRAMoE(
        base,
        config_of(**settings),
        rank,
        alpha=3.0,
        targets=targets,
    )
    fill(layer)
    return layer


def by_oracle(layer: LoRAMoE, x: torch.Tensor, idx, weight) -> torch.Tensor:
    experts = layer.experts
    given = {}
    for target in experts.targets:
        pair = LoRA(
            experts.lora_a[target].double(),
            experts.lora_b[target].double(),
        )
        given[target.removesuffix("_proj")] = pair
    weights = []
    for target in TARGETS:
        linear = getattr(experts.base, target)
        weights.append(linear.weight.double())
        if linear.bias is not None:
            given[target.replace("_proj", "_bias")] = linear.bias.double()
    return oracle(
        x.double(), *weights, weight.double(), idx, scaling=experts.scaling, act="silu", **given
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="top 2 of 3"),
        pytest.param({"bias": True}, id="biases"),
        pytest.param(
            {"E": 4, "top_k": 4, "gate": "softmax_topk"},
            id="LoRAMoE: all of 4",
        ),
        pytest.param({"targets": ("up_proj",)}, id="one projection"),
        pytest.param({"E": 1, "top_k": 1}, id="E = 1"),
        pytest.param({"recompute": True}, id="recompute"),
    ],
)
def test_layer_is_the_equation(options, tolerance):
    layer = make(**options, balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(2, 9, H)
    flat = x.flatten(0, 1)
    layer.records = []
    out = layer(x).flatten(0, 1)
    (record,) = layer.records
    assert record.balance_loss > 0
    expected = by_oracle(
        layer,
        flat,
        record.topk_idx,
        record.topk_weight,
    )
    assert_parity(
        {"out": out},
        {"out": expected},
        tolerance[torch.float32],
    )
    if layer.config.top_k == 4:
        dense = torch.softmax(
            flat @ layer.gate.weight.t(),
            -1,
        )
        by_weights = layer.experts(flat, None, dense)
        assert_parity(
            {"out": by_weights},
            {"out": out},
            tolerance[torch.float32],
        )


def test_experts_start_as_the_frozen_base():
    base = MLP()
    weights = {name: p.data_ptr() for name, p in base.named_parameters()}
    x = torch.randn(5, H)
    expected = base(x)
    layer = LoRAMoE(base, config_of(E=4))
    torch.testing.assert_close(
        layer(x),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )
    experts = layer.experts
    a = experts.lora_a["down_proj"]
    assert a.abs().max() <= I**-0.5
    assert a.std().item() == pytest.approx(
        I**-0.5 / 3**0.5,
        rel=0.1,
    )
    for b in experts.lora_b.values():
        assert not b.any()
    assert experts.base is base
    assert {name: p.data_ptr() for name, p in base.named_parameters()} == weights
    trains = {name for name, p in experts.named_parameters() if p.requires_grad}
    assert trains == {f"lora_{half}.{target}" for half in "ab" for target in TARGETS}
    assert experts.lora_a["up_proj"].shape == (4, 8, H)
    assert experts.lora_b["up_proj"].shape == (4, 8, I)
    assert LoRAExperts(base, 4, 2).scaling == 8.0


def test_wide_pairs_over_a_narrow_base_and_autocast():
    layer = LoRAExperts(
        MLP(dtype=torch.bfloat16),
        3,
        2,
        dtype=torch.float32,
    )
    fill(layer)
    x = torch.randn(9, H, dtype=torch.bfloat16)
    out = layer(
        x,
        torch.tensor([[0, 2]] * 9),
        torch.full((9, 2), 0.5),
    )
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    for p in (*layer.lora_a.values(), *layer.lora_b.values()):
        assert p.grad.dtype == torch.float32
        assert p.grad.any()
    with torch.autocast("cpu", torch.bfloat16):
        assert make()(torch.randn(5, H)).dtype == torch.bfloat16


@pytest.mark.parametrize("target", TARGETS)
def test_a_base_that_computes_more_than_its_weights_is_refused(target):
    class Wrapped(nn.Linear):
        pass

    layer = make()
    base = layer.experts.base
    x = torch.randn(4, H)
    calls = [
        lambda: layer(x),
        lambda: LoRAExperts(base, 2),
        layer.to_moe,
        lambda: merged_base(layer.experts, 0),
    ]
    linear = getattr(base, target)
    handle = linear.register_forward_hook(lambda *_: None)
    for call in calls:
        with pytest.raises(
            ValueError,
            match=rf"{target} of base .*torch.nn.* with hooks",
        ):
            call()
    handle.remove()
    assert layer(x).isfinite().all()
    setattr(
        base,
        target,
        Wrapped(
            linear.in_features,
            linear.out_features,
            bias=False,
        ),
    )
    for call in calls:
        with pytest.raises(
            ValueError,
            match=rf"{target} of base .*Wrapped.*Merge adapters",
        ):
            call()
