"""LoRA experts as a layer: what it holds and trains, its routing, its merges, and its files as PEFT
reads them.
"""

import copy

import pytest
import torch
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.methods.lora import adapters as lora_adapters
from moe_runtime.methods.lora.adapters import AdapterExperts, read_adapter
from moe_runtime.modules.lora import TARGETS, LoRAExperts, LoRAMoE
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.lora import LoRA
from tests.support.lora import merged_base, oracle
from tests.support.oracle import assert_parity

H = 24
I = 40


class MLP(nn.Module):
    """A dense gated MLP, as the models name it."""

    def __init__(self, hidden=H, intermediate=I, bias=False, dtype=None):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias, dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def fill(layer) -> None:
    """Make every expert one of its own."""
    experts = layer.experts if isinstance(layer, LoRAMoE) else layer
    for b in experts.lora_b.values():
        b.data.normal_(std=0.3)


def make(
    E=3,
    rank=2,
    top_k=2,
    gate="softmax_topk_renorm",
    bias=False,
    dtype=None,
    targets=TARGETS,
    **config,
) -> LoRAMoE:
    config = MoEConfig(
        hidden_size=H,
        intermediate_size=I,
        num_experts=E,
        top_k=top_k,
        gate=gate,
        initializer_range=0.5,
        **config,
    )
    layer = LoRAMoE(MLP(bias=bias, dtype=dtype), config, rank, alpha=3.0, targets=targets)
    fill(layer)
    return layer


def by_oracle(layer: LoRAMoE, x: torch.Tensor, idx, weight) -> torch.Tensor:
    experts = layer.experts
    base = layer.experts.base
    given = {
        target.removesuffix("_proj"): double_pair(experts, target) for target in experts.targets
    }
    if base.gate_proj.bias is not None:
        given |= {
            f"{name}_bias": getattr(base, f"{name}_proj").bias.double()
            for name in ("gate", "up", "down")
        }
    weights = [getattr(base, target).weight.double() for target in TARGETS]
    return oracle(
        x.double(), *weights, weight.double(), idx, scaling=experts.scaling, act="silu", **given
    )


def double_pair(experts, target):
    return LoRA(experts.lora_a[target].double(), experts.lora_b[target].double())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="top 2 of 3"),
        pytest.param({"bias": True}, id="biases"),
        pytest.param(
            {"E": 4, "top_k": 4, "gate": "softmax_topk"}, id="LoRAMoE: all of 4, by their softmax"
        ),
        pytest.param({"targets": ("up_proj",)}, id="one projection"),
        pytest.param({"E": 1, "top_k": 1}, id="E = 1"),
        pytest.param({"recompute": True}, id="recompute"),
    ],
)
def test_layer_is_the_equation(options, tolerance):
    layer = make(**options)
    x = torch.randn(2, 9, H)
    flat = x.flatten(0, 1)
    _, weight, idx, _ = layer.gate(flat)
    got = layer(x)
    assert_parity(
        {"out": got},
        {"out": by_oracle(layer, flat, idx, weight).view_as(x)},
        tolerance[torch.float32],
    )
    if layer.config.top_k == layer.config.num_experts and layer.config.gate == "softmax_topk":
        dense = torch.softmax(flat @ layer.gate.weight.t(), -1)
        assert_parity(
            {"out": layer.experts(flat, None, dense)},
            {"out": got.flatten(0, 1)},
            tolerance[torch.float32],
        )


def test_at_first_every_expert_is_the_base():
    base = MLP()
    x = torch.randn(5, H)
    want = base(x)
    layer = LoRAMoE(
        base,
        MoEConfig(
            hidden_size=H, intermediate_size=I, num_experts=3, top_k=2, gate="softmax_topk_renorm"
        ),
    )
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-6)
    a = layer.experts.lora_a["down_proj"]
    assert a.abs().max() <= I**-0.5 and a.std().item() == pytest.approx(I**-0.5 / 3**0.5, rel=0.1)
    assert not any(b.any() for b in layer.experts.lora_b.values())


def test_base_is_held_by_reference_and_frozen():
    base = MLP()
    weights = {name: p.data_ptr() for name, p in base.named_parameters()}
    layer = LoRAExperts(base, 4, 2)
    assert (
        layer.base is base
        and {name: p.data_ptr() for name, p in layer.base.named_parameters()} == weights
    )
    trains = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trains == {f"lora_{half}.{target}" for half in "ab" for target in TARGETS}
    assert layer.lora_a["up_proj"].shape == (4, 2, H) and layer.lora_b["up_proj"].shape == (4, 2, I)
    assert layer.scaling == 8.0


def test_trains_all_that_it_says_and_nothing_else():
    layer = make(E=4)
    x = torch.randn(64, H)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = torch.optim.AdamW(list(layer.parameters()), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    for name, p in layer.named_parameters():
        moved = (p != before[name]).flatten(1).any(1)
        assert moved.all() if p.requires_grad else not moved.any(), name


def test_records_are_a_moe_layers():
    layer = make(balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(7, H)
    layer.records = []
    layer(x)
    (record,) = layer.records
    assert (
        record.router_logits.shape == (7, 3)
        and record.topk_idx.shape == (7, 2)
        and record.balance_loss > 0
    )
    assert isinstance(layer, MoE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("targets", [TARGETS, ("down_proj",)])
def test_experts_made_whole_are_the_same_layer(targets, bias):
    layer = make(E=4, targets=targets, bias=bias)
    x = torch.randn(33, H)
    moe = layer.to_moe()
    assert type(moe) is MoE and set(moe.state_dict()) >= {
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    torch.testing.assert_close(moe(x), layer(x), rtol=1e-5, atol=1e-5)
    assert not {p.data_ptr() for p in moe.parameters()} & {p.data_ptr() for p in layer.parameters()}


def test_one_expert_goes_into_the_base():
    layer = make(E=3)
    x = torch.randn(9, H)
    idx = torch.full((9, 1), 2, dtype=torch.int32)
    one = torch.ones(9, 1)
    want = layer.experts(x, idx, one)
    base = merged_base(layer.experts, 2)
    torch.testing.assert_close(base(x), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="expert must be from 0 to 2, but got 3"):
        layer.experts.whole_weight("up_proj", 3)


def test_wide_pairs_over_a_narrow_base_and_autocast():
    layer = LoRAExperts(MLP(dtype=torch.bfloat16), 3, 2, dtype=torch.float32)
    fill(layer)
    x = torch.randn(9, H, dtype=torch.bfloat16)
    idx = torch.tensor([[0, 2]] * 9)
    weight = torch.full((9, 2), 0.5)
    out = layer(x, idx, weight)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(
        p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0
        for p in layer.parameters()
        if p.requires_grad
    )
    layer = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(5, H)).dtype == torch.bfloat16


@pytest.mark.parametrize("target", TARGETS)
def test_a_base_that_computes_more_than_its_weights_is_refused(target):
    class Wrapped(nn.Linear):
        pass

    layer = make()
    x = torch.randn(4, H)
    linear = getattr(layer.experts.base, target)
    handle = linear.register_forward_hook(lambda *_: None)
    want = rf"{target} of base must be .*is torch.nn.* with hooks"
    calls = [
        lambda: layer(x),
        lambda: LoRAExperts(layer.experts.base, 2),
        layer.to_moe,
        lambda: merged_base(layer.experts, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=want):
            call()
    handle.remove()
    assert layer(x).isfinite().all()
    setattr(
        layer.experts.base, target, Wrapped(linear.in_features, linear.out_features, bias=False)
    )
    for call in calls:
        with pytest.raises(
            ValueError,
            match=rf"{target} of base must be a plain torch.nn.Linear.*Wrapped.*Merge adapters",
        ):
            call()


# files
@pytest.fixture(scope="module")
def mixtral():
    """A stock model whose experts are all equal, and its blocks as MLPs."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                stack.copy_(
                    torch.randn_like(stack[:1]).mul_(stack.shape[2] ** -0.5).expand_as(stack)
                )
            layer.mlp.gate.weight.normal_(std=0.5)
    return model


def with_lora(model, rank, targets=TARGETS):
    """The stock model with LoRA experts in place of its blocks, and these by path."""
    model = copy.deepcopy(model)
    layers = {}
    for i, block in enumerate(model.model.layers):
        base, (gate_up, down) = (
            MLP(),
            (block.mlp.experts.gate_up_proj[0], block.mlp.experts.down_proj[0]),
        )
        for linear, weight in zip(
            (base.gate_proj, base.up_proj, base.down_proj), (*gate_up.chunk(2), down)
        ):
            linear.weight.data.copy_(weight)
        E = model.config.num_local_experts
        config = MoEConfig(
            hidden_size=H,
            intermediate_size=I,
            num_experts=E,
            top_k=2,
            gate="softmax_topk_renorm",
            initializer_range=0.5,
        )
        block.mlp = layers[f"model.layers.{i}.mlp"] = LoRAMoE(
            base, config, rank, alpha=3.0, targets=targets
        ).eval()
        fill(block.mlp)
    return model, layers


@pytest.mark.parametrize(
    "rank, targets",
    [
        pytest.param(2, TARGETS, id="E is not r"),
        pytest.param(3, TARGETS, id="E is r"),
        pytest.param(2, ("gate_proj", "up_proj"), id="no down"),
        pytest.param(4, ("down_proj",), id="down alone"),
        pytest.param(2, ("up_proj", "down_proj"), id="no gate"),
    ],
)
@torch.no_grad()
def test_peft_reads_all_experts(rank, targets, mixtral, tmp_path):
    from peft import PeftModel

    model, layers = with_lora(mixtral, rank, targets)
    lora_adapters.save_stacked(layers, tmp_path / "adapter", base_model="base")
    ids = torch.randint(50, (2, 11))
    want = model(ids).logits
    plain = mixtral(ids).logits
    stock = PeftModel.from_pretrained(copy.deepcopy(mixtral), tmp_path / "adapter").eval()
    assert (want - plain).norm() > 0.1 * plain.norm()
    torch.testing.assert_close(stock(ids).logits, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stock.merge_and_unload()(ids).logits, want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_written_is_read_back(mixtral, tmp_path):
    _, layers = with_lora(mixtral, 2)
    lora_adapters.save_stacked(layers, tmp_path / "adapter", base_model="base")
    _, others = with_lora(mixtral, 2)
    lora_adapters.load_stacked(others, tmp_path / "adapter")
    for name, layer in layers.items():
        state = others[name].state_dict()
        assert all(torch.equal(state[key], value) for key, value in layer.state_dict().items())


@torch.no_grad()
def test_what_peft_wrote_is_read_back(mixtral, tmp_path):
    from peft import PeftModel

    model, layers = with_lora(mixtral, 2)
    lora_adapters.save_stacked(layers, tmp_path / "ours", base_model="base")
    PeftModel.from_pretrained(copy.deepcopy(mixtral), tmp_path / "ours").save_pretrained(
        tmp_path / "peft"
    )
    other, others = with_lora(mixtral, 2)
    lora_adapters.load_stacked(others, tmp_path / "peft")
    ids = torch.randint(50, (2, 11))
    assert torch.equal(other(ids).logits, model(ids).logits)


@pytest.mark.parametrize("expert", [0, 2])
@torch.no_grad()
def test_peft_reads_one_expert_on_the_dense_base(expert, tmp_path):
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    dense = LlamaForCausalLM(config).eval()
    layers = {
        f"model.layers.{i}.mlp": LoRAExperts(copy.deepcopy(b.mlp), 3, 2)
        for i, b in enumerate(dense.model.layers)
    }
    for layer in layers.values():
        fill(layer)
    lora_adapters.save_single(layers, tmp_path / "adapter", expert, base_model="base")
    stock = PeftModel.from_pretrained(copy.deepcopy(dense), tmp_path / "adapter").eval()
    ids = torch.randint(50, (2, 11))
    plain = dense(ids).logits
    for i, block in enumerate(dense.model.layers):
        block.mlp = merged_base(layers[f"model.layers.{i}.mlp"], expert)
    want = dense(ids).logits
    assert (want - plain).norm() > 0.01 * plain.norm()
    torch.testing.assert_close(stock(ids).logits, want, rtol=1e-4, atol=1e-5)


def test_a_lora_that_peft_trained_becomes_an_expert(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    dense = LlamaForCausalLM(config).eval()
    layers = {
        f"model.layers.{i}.mlp": LoRAExperts(copy.deepcopy(b.mlp), 3, 2)
        for i, b in enumerate(dense.model.layers)
    }
    trained = get_peft_model(
        copy.deepcopy(dense), LoraConfig(r=2, lora_alpha=16, target_modules=list(TARGETS))
    )
    for name, p in trained.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.3)
    trained.save_pretrained(tmp_path / "adapter")
    other = copy.deepcopy(layers)
    for layer in other.values():
        fill(layer)
    lora_adapters.save_single(other, tmp_path / "other", 0, base_model="base")
    adapters = [read_adapter(tmp_path / name) for name in ("other", "adapter", "other")]
    experts = AdapterExperts(tuple(adapters), "model.layers.{}.mlp", TARGETS, (0, 1), ())
    assert (
        experts.rank == layers["model.layers.0.mlp"].rank
        and experts.alpha == layers["model.layers.0.mlp"].alpha
    )
    ids = torch.randint(50, (2, 11))
    want = trained.eval()(ids).logits
    for i, block in enumerate(dense.model.layers):
        layer = layers[f"model.layers.{i}.mlp"]
        experts.fill(i, layer)
        for key, value in layer.state_dict().items():
            if key.startswith("lora"):
                assert torch.equal(
                    value[[0, 2]], other[f"model.layers.{i}.mlp"].state_dict()[key][[0, 0]]
                )
        block.mlp = merged_base(layer, 1)
    torch.testing.assert_close(dense(ids).logits, want, rtol=1e-4, atol=1e-5)
