"""The contract of transformers' experts interface, layout by layout, with our own experts classes
against their eager code.
"""

import inspect

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import moe_runtime
from moe_runtime.hf.dropin import experts, gates
from moe_runtime.hf.training.trainable import train_rows
from moe_runtime.ops.activation import Activation
from tests.hf import tiny
from tests.hf.tiny import distance, upcycled
from tests.support.stock_moe import stock

E = 5
H = 24
I = 17
T = 13
K = 3


class Config(PreTrainedConfig):
    model_type = "contract"


def _clamped(self, z):
    gate = z[..., ::2]
    up = z[..., 1::2]
    gate = gate.clamp(max=self.limit)
    up = up.clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def _deepseek(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def _softcapped(self, z):
    gate, up = z.chunk(2, -1)
    return 3 * torch.tanh(gate / 3) * torch.sigmoid(gate) * up


def experts_class(apply_gate=None, **flags):
    """Create a stock experts class: eager code as in transformers, and the decorator."""

    class Stock(nn.Module):
        has_post_expert_norm = False  # transformers 5.17 lacks it

        def __init__(self, config):
            super().__init__()
            gated = flags.get("has_gate", True)
            self.num_experts = E
            self.up_name = "gate_up_proj" if gated else "up_proj"
            Z = 2 * I if gated else I
            for name, out, into in ((self.up_name, Z, H), ("down_proj", H, I)):
                shape = (E, into, out) if flags.get("is_transposed") else (E, out, into)
                self.register_parameter(
                    name,
                    nn.Parameter(torch.randn(shape) / 3),
                )
                if flags.get("has_bias"):
                    bias = nn.Parameter(torch.randn(E, out) / 3)
                    self.register_parameter(f"{name}_bias", bias)
            self.act_fn = ACT2FN[getattr(config, "hidden_act", "silu")]
            self.limit = 1.5
            self.alpha = 1.702
            self.post_expert_norm = nn.LayerNorm(H)
            nn.init.normal_(self.post_expert_norm.bias)  # the norm's output for an unrouted row

        def linear(self, x, name, e):
            weight = getattr(self, name)[e]
            y = x @ (weight if self.is_transposed else weight.T)
            return y + getattr(self, f"{name}_bias")[e] if self.has_bias else y

        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for e in range(E):
                token, slot = torch.where(top_k_index == e)
                z = self.linear(hidden_states[token], self.up_name, e)
                h = self._apply_gate(z) if self.has_gate else self.act_fn(z)
                y = self.linear(h, "down_proj", e)
                if self.has_post_expert_norm:
                    y = self.post_expert_norm(y)
                out = out.index_add(
                    0,
                    token,
                    (y * top_k_weights[token, slot, None]).to(out.dtype),
                )
            return out

    if apply_gate is not None:
        Stock._apply_gate = apply_gate
    return use_experts_implementation(Stock, **flags)


GPT_OSS = {"apply_gate": _clamped, "is_concatenated": False}
BIASED = {"has_bias": True, "is_transposed": True}
LAYOUTS = [
    pytest.param({}, {}, True, id="most-models"),
    pytest.param(
        {"has_gate": False},
        {"hidden_act": "relu2"},
        True,
        id="nemotron_h",
    ),
    pytest.param(GPT_OSS | BIASED, {}, True, id="gpt_oss"),
    pytest.param({"apply_gate": _deepseek}, {}, True, id="deepseek_v4"),
    pytest.param(
        {"apply_gate": _softcapped},
        {},
        False,
        id="inkling2-composed",
    ),
    pytest.param(
        {"has_gate": False}, {"hidden_act": "mish"}, False, id="unknown-activation-not-gated"
    ),
]
if "has_post_expert_norm" in inspect.signature(use_experts_implementation).parameters:
    LAYOUTS.append(
        pytest.param(
            {"has_post_expert_norm": True},
            {},
            False,
            id="muse_spark",
        )
    )
# the decorator of an older transformers does not accept all of them
LAYOUTS = [
    p
    for p in LAYOUTS
    if {*p.values[0]} - {"apply_gate"}
    <= {*inspect.signature(use_experts_implementation).parameters}
]


@pytest.fixture(autouse=True)
def _registered():
    experts.register()


def module_of(flags: dict | None = None, fields: dict | None = None) -> nn.Module:
    config = Config(**fields or {})
    module = experts_class(**flags or {})(config)
    config._experts_implementation = "moe_runtime"
    return module


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(T, H), *slots()


def eager(module, *args) -> torch.Tensor:
    """Compute the output with the class's own code."""
    return type(module).forward.__wrapped__(module, *args)


def slots(dropped: bool = False):
    """Return ids, with one expert unused, and weights; with `dropped`, some ids are the sentinel E
    and some -1.
    """
    idx = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])
    weight = torch.rand(T, K)
    if dropped:
        idx[1::3, 1] = E
        idx[::4, 0] = -1
        weight = weight.masked_fill((idx < 0) | (idx >= E), 0)
    return idx, weight


def run(module, x, idx, weight, implementation: str) -> dict[str, torch.Tensor]:
    """Return the output and every gradient."""
    module.config._experts_implementation = implementation
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    module.zero_grad()
    out = module(leaves[0], idx, leaves[1])
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    used = {}
    for name, p in module.named_parameters():
        if module.has_post_expert_norm or "norm" not in name:
            used[name] = p.grad
    return {
        "out": out.detach(),
        "dx": leaves[0].grad,
        "dweight": leaves[1].grad,
        **used,
    }


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "dropped",
    [False, True],
    ids=["all-here", "sentinels"],
)
@pytest.mark.parametrize(("flags", "fields", "is_fused"), LAYOUTS)
def test_same_as_eager(flags, fields, is_fused, dropped, backend, device, monkeypatch):
    """Compares the output and every gradient, in one op where possible."""
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    module = module_of(flags, fields).to(device)
    x = torch.randn(T, H, device=device)
    idx, weight = (tensor.to(device) for tensor in slots(dropped))
    expected = run(module, x, idx, weight, "eager")
    calls = []
    composed = experts._composed

    def counted(*args):
        calls.append(1)
        return composed(*args)

    monkeypatch.setattr(experts, "_composed", counted)
    values = run(module, x, idx, weight, "moe_runtime")

    assert bool(calls) != is_fused
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
    tiny.assert_close(values, expected, 5e-6)
    assert (values["dweight"][(idx < 0) | (idx >= E)] == 0).all()


def scaled(self, z):
    gate, up = z.chunk(2, -1)
    return gate * torch.sigmoid(self.alpha * gate) * up


@pytest.mark.parametrize(
    "apply_gate, changes, expected",
    [
        pytest.param(
            None, {"act_fn": nn.GELU(approximate="tanh")}, Activation("gelu_tanh"), id="tanh"
        ),
        pytest.param(
            None,
            {"act_fn": nn.GELU()},
            Activation("gelu"),
            id="erf",
        ),
        pytest.param(
            scaled,
            {"alpha": 1.702},
            Activation("quick_gelu"),
            id="alpha-1.702",
        ),
        pytest.param(
            scaled,
            {"alpha": 1.0},
            Activation("silu"),
            id="alpha-1",
        ),
        pytest.param(scaled, {"alpha": 2.0}, None, id="alpha-2"),
        *(
            pytest.param(
                _deepseek, {"limit": limit}, Activation("silu", True, limit=limit), id=f"{limit:g}"
            )
            for limit in (0.3, 7, 1e4, 1e7)
        ),
        *(
            pytest.param(
                _deepseek,
                {"limit": limit},
                None,
                id=f"limit-{limit}",
            )
            for limit in (0.0, None, float("inf"), torch.tensor(2.0), [2.0])
        ),
    ],
)
def test_a_gate_is_recognized_by_its_values(apply_gate, changes, expected):
    module = module_of({"apply_gate": apply_gate})
    for name, value in changes.items():
        setattr(module, name, value)
    assert gates.gate_of(module) == expected


class Swish(nn.Module):
    """SiLU while beta is 1."""

    def __init__(self, beta=1.0, learned=False):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta)) if learned else beta

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


CHANGES = {
    "an activation that learns": lambda m: setattr(m, "act_fn", Swish(learned=True)),
    "a hook on it": lambda m: m.act_fn.register_forward_hook(lambda module, args, out: 2 * out),
    "its forward replaced": lambda m: setattr(m.act_fn, "forward", torch.tanh),
    "a gate of the instance's own": lambda m: setattr(
        m, "_apply_gate", lambda z: _softcapped(m, z)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_to_an_instance_are_respected(change):
    module = module_of()
    args = inputs()
    assert gates.gate_of(module) == Activation()
    change(module)

    assert gates.gate_of(module) is None
    out = module.eval()(*args)
    assert distance(out, eager(module, *args)) < 2e-6
    learned = [p for name, p in module.named_parameters() if "beta" in name]
    if learned:
        out.sum().backward()
        assert learned[0].grad.abs() > 0


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast(weights):
    module = module_of().to(weights)
    x, idx, weight = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, idx, weight)
    assert out.dtype == torch.float32
    expected = eager(module.double(), x.double(), idx, weight.double())
    assert 1e-5 < distance(out, expected) < 2e-2


@pytest.mark.parametrize(
    "flags",
    [{}, {"apply_gate": _deepseek}, {"apply_gate": _softcapped}],
    ids=["plain", "clamped", "own"],
)
def test_compiles_without_a_break(flags):
    torch._dynamo.reset()
    gates._form_of_gate.cache_clear()
    module = module_of(flags)
    args = inputs()
    expected = run(module, *args, "eager")
    module.config._experts_implementation = "moe_runtime"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module.zero_grad()
    out = compiled(*args)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()

    assert distance(out, expected["out"]) < 2e-6
    assert distance(module.down_proj.grad, expected["down_proj"]) < 2e-6


def test_counts_are_the_dispatchs_own():
    module = module_of()
    idx, weight = slots(dropped=True)
    module.moe_runtime_counts = torch.zeros(E, dtype=torch.int64)
    for _ in range(2):
        module(torch.randn(T, H), idx, weight)
    live = idx[(idx >= 0) & (idx < E)]

    assert torch.equal(
        module.moe_runtime_counts,
        2 * torch.bincount(live, minlength=E),
    )
    assert live.numel() < T * K
    assert "moe_runtime_counts" not in module.state_dict()


def tiny_qwen():
    return stock("qwen3_moe").eval()


def test_patch_leaves_another_model_of_the_same_config_alone():
    one = tiny_qwen()
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())

    assert other.config is one.config
    before = other.config._experts_implementation
    moe_runtime.patch(one)
    configs = set()
    for module in one.modules():
        if hasattr(module, "config"):
            configs.add(id(module.config))
    assert configs == {id(one.config)}
    assert other.config._experts_implementation == before
    ids = torch.arange(12)[None]
    assert distance(one(ids).logits, other(ids).logits) < 1e-5
    moe_runtime.unpatch(one)
    assert one.config._experts_implementation == before


@pytest.mark.parametrize(
    "is_wrapped",
    [False, True],
    ids=["model", "wrapped"],
)
def test_patch_and_unpatch(is_wrapped):
    model = tiny_qwen()
    before = model.config._experts_implementation
    ids = torch.arange(12)[None]
    expected = model(ids).logits
    keys = list(model.state_dict())
    outer = nn.ModuleDict({"inner": model}) if is_wrapped else model
    # a second call changes nothing
    assert moe_runtime.patch(outer) == moe_runtime.patch(outer) == 2
    assert model.config._experts_implementation == "moe_runtime"
    assert distance(model(ids).logits, expected) < 1e-5
    assert list(model.state_dict()) == keys
    for _ in range(2):
        moe_runtime.unpatch(outer)
        assert model.config._experts_implementation == before != "moe_runtime"
    assert torch.equal(model(ids).logits, expected)


class Packed(torch.Tensor):
    """Looks like a float tensor, as torchao's quantized weights do, but supports no operation."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            weight.shape,
            dtype=weight.dtype,
        )

    def __tensor_flatten__(self):
        return [], {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{cls.__name__} has no {func}")


@pytest.mark.parametrize("make", [upcycled, stock])
def test_tensors_that_only_look_like_floats_are_refused(make):
    """The error names the class and what to do."""
    model = make()
    moe_runtime.patch(model)
    layer = next(module for module in model.modules() if hasattr(module, "down_proj"))
    layer.down_proj = nn.Parameter(Packed(layer.down_proj.detach()), requires_grad=False)
    says = r"must be float16, .*, but are \S*\.Packed .* moe_runtime.quantize_experts"
    with pytest.raises(ValueError, match=says):
        moe_runtime.patch(model)
    with pytest.raises(ValueError, match=says):
        model(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"down_proj .*but is \S*\.Packed "):
        moe_runtime.quantize_experts(model, "int8")
    with pytest.raises(ValueError, match="down_proj must be a floating-point .*Packed"):
        train_rows(model, {0: [1]})
