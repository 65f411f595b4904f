"""The contract of transformers' experts interface, layout by layout, on experts classes of our own
against their eager code.
"""

import copy
import inspect

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

import moe_runtime
from moe_runtime.hf.dropin import experts, gates
from moe_runtime.hf.training.trainable import train_rows
from moe_runtime.modules import moe
from moe_runtime.ops.activation import Activation
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
    """A stock experts class: eager code as transformers writes it, and the decorator."""

    class Stock(nn.Module):
        has_post_expert_norm = False  # transformers 5.17 has none

        def __init__(self, config):
            super().__init__()
            gated = flags.get("has_gate", True)
            transposed = flags.get("is_transposed", False)
            Z, up = (2 * I, "gate_up_proj") if gated else (I, "up_proj")
            self.num_experts = E
            self.up_name = up
            shapes = {
                up: (E, H, Z) if transposed else (E, Z, H),
                "down_proj": (E, I, H) if transposed else (E, H, I),
            }
            if flags.get("has_bias"):
                shapes |= {f"{up}_bias": (E, Z), "down_proj_bias": (E, H)}
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.randn(shape) / 3))
            self.act_fn = ACT2FN[getattr(config, "hidden_act", "silu")]
            self.limit = 1.5
            self.alpha = 1.702
            self.post_expert_norm = nn.LayerNorm(H)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for e in range(E):
                token, slot = torch.where(top_k_index == e)
                weights = [getattr(self, self.up_name)[e], self.down_proj[e]]
                weights = [w.T if self.is_transposed else w for w in weights]
                z = hidden_states[token] @ weights[0].T
                z = z + getattr(self, f"{self.up_name}_bias")[e] if self.has_bias else z
                y = (self._apply_gate(z) if self.has_gate else self.act_fn(z)) @ weights[1].T
                y = y + self.down_proj_bias[e] if self.has_bias else y
                y = self.post_expert_norm(y) if self.has_post_expert_norm else y
                out = out.index_add(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
            return out

    if apply_gate is not None:
        Stock._apply_gate = apply_gate
    return use_experts_implementation(Stock, **flags)


LAYOUTS = [
    pytest.param({}, {}, True, id="most-models"),
    pytest.param({}, {"hidden_act": "gelu_pytorch_tanh"}, True, id="gemma4"),
    pytest.param({"has_gate": False}, {"hidden_act": "relu2"}, True, id="nemotron_h"),
    pytest.param({"is_transposed": True}, {}, True, id="transposed"),
    pytest.param({"has_bias": True, "is_transposed": True}, {}, True, id="biased-transposed"),
    pytest.param(
        {"has_bias": True, "has_gate": False}, {"hidden_act": "gelu"}, True, id="biased-not-gated"
    ),
    pytest.param(
        {"apply_gate": _clamped, "has_bias": True, "is_transposed": True, "is_concatenated": False},
        {},
        True,
        id="gpt_oss",
    ),
    pytest.param({"apply_gate": _clamped, "is_concatenated": False}, {}, True, id="interleaved"),
    pytest.param({"apply_gate": _deepseek}, {}, True, id="deepseek_v4"),
    pytest.param({"apply_gate": _softcapped}, {}, False, id="inkling2-composed"),
    pytest.param(
        {"apply_gate": _softcapped, "has_bias": True, "is_transposed": True},
        {},
        False,
        id="composed-biased",
    ),
    pytest.param({}, {"hidden_act": "mish"}, False, id="unknown-activation"),
    pytest.param(
        {"has_gate": False}, {"hidden_act": "mish"}, False, id="unknown-activation-not-gated"
    ),
    pytest.param({"has_post_expert_norm": True}, {}, False, id="muse_spark"),
]
# a decorator of an older transformers does not take them all
LAYOUTS = [
    p
    for p in LAYOUTS
    if {*p.values[0]} - {"apply_gate"}
    <= {*inspect.signature(use_experts_implementation).parameters}
]


@pytest.fixture(autouse=True)
def _registered():
    experts.register()


def module_of(flags: dict, fields: dict, implementation: str = "moe_runtime") -> nn.Module:
    config = Config(**fields)
    module = experts_class(**flags)(config)
    config._experts_implementation = implementation
    return module


def slots(dropped: bool = False):
    """Ids of which one expert gets none, and weights; with `dropped`, some ids are the sentinel E
    and some -1.
    """
    idx = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])
    weight = torch.rand(T, K)
    if dropped:
        idx[1::3, 1], idx[::4, 0] = E, -1
        weight = weight.masked_fill((idx < 0) | (idx >= E), 0)
    return idx, weight


def run(module, x, idx, weight, implementation: str) -> dict[str, torch.Tensor]:
    """Output and every gradient."""
    module.config._experts_implementation = implementation
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    module.zero_grad()
    out = module(leaves[0], idx, leaves[1])
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    used = {}
    for name, p in module.named_parameters():
        if module.has_post_expert_norm or "norm" not in name:
            used[name] = p.grad
    return {"out": out.detach(), "dx": leaves[0].grad, "dweight": leaves[1].grad, **used}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dropped", [False, True], ids=["all-here", "sentinels"])
@pytest.mark.parametrize(("flags", "fields", "fused"), LAYOUTS)
def test_same_as_eager(flags, fields, fused, dropped, backend, device, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    module = module_of(flags, fields).to(device)
    x = torch.randn(T, H, device=device)
    idx, weight = (tensor.to(device) for tensor in slots(dropped))
    want = run(module, x, idx, weight, "eager")
    got = run(module, x, idx, weight, "moe_runtime")
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value.norm() > 0, name
        assert distance(got[name], value) < 5e-6, name
    assert (got["dweight"][(idx < 0) | (idx >= E)] == 0).all()


@pytest.mark.parametrize(("flags", "fields", "fused"), LAYOUTS)
def test_runs_in_one_op_where_it_can(flags, fields, fused, monkeypatch):
    module = module_of(flags, fields)
    calls = []
    for place, name in ((moe, "run_experts"), (experts, "_composed")):
        original = getattr(place, name)
        monkeypatch.setattr(
            place,
            name,
            lambda *args, _run=original, _name=name, **kw: (calls.append(_name), _run(*args, **kw))[
                1
            ],
        )
    module(torch.randn(T, H), *slots())
    assert calls == ["run_experts" if fused else "_composed"]


def test_a_gate_that_only_looks_like_a_known_one_runs_its_own_code():
    def almost(self, z):
        gate, up = z.chunk(2, -1)
        return self.act_fn(gate) * up * (1 + 1e-3)

    module, x, (idx, weight) = module_of({"apply_gate": almost}, {}), torch.randn(T, H), slots()
    assert (
        distance(
            run(module, x, idx, weight, "moe_runtime")["out"],
            run(module, x, idx, weight, "eager")["out"],
        )
        < 2e-6
    )


def test_an_activation_is_known_by_what_it_computes():
    tanh = module_of({}, {})
    erf = module_of({}, {})
    tanh.act_fn, erf.act_fn = nn.GELU(approximate="tanh"), nn.GELU()
    found = [gates.gate_of(module).act for module in (tanh, erf)]
    assert found == ["gelu_tanh", "gelu"]


@pytest.mark.parametrize("limit", [0.3, 7, 100.0, 1e4, 1e7])
def test_a_limit_of_any_size_is_seen(limit):
    module = module_of({"apply_gate": _deepseek}, {})
    module.limit = limit
    assert gates.gate_of(module) == Activation("silu", True, limit=limit)


@pytest.mark.parametrize("alpha, act", [(1.702, "quick_gelu"), (1.0, "silu"), (2.0, None)])
def test_the_sigmoid_s_scale_is_that_of_the_instance(alpha, act):
    def scaled(self, z):
        gate, up = z.chunk(2, -1)
        return gate * torch.sigmoid(self.alpha * gate) * up

    module = module_of({"apply_gate": scaled}, {})
    module.alpha = alpha
    assert gates.gate_of(module) == (None if act is None else Activation(act))


@pytest.mark.parametrize("limit", [0.0, None, float("inf"), torch.tensor(2.0), [2.0]], ids=str)
def test_a_limit_that_is_no_number_for_us_leaves_the_class_to_itself(limit):
    module = module_of({"apply_gate": _deepseek}, {})
    module.limit = limit
    assert gates.gate_of(module) is None


class Swish(nn.Module):
    """SiLU as long as beta is 1."""

    def __init__(self, beta=1.0, learned=False):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta)) if learned else beta

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def _set_gate(module):
    module._apply_gate = lambda z: _softcapped(module, z)


CHANGES = {
    "an activation that learns": lambda m: setattr(m, "act_fn", Swish(learned=True)),
    "an activation with a state": lambda m: setattr(m, "act_fn", Swish(2.0)),
    "dropout behind it": lambda m: setattr(m, "act_fn", nn.Sequential(nn.SiLU(), nn.Dropout(0.5))),
    "a hook on it": lambda m: m.act_fn.register_forward_hook(lambda module, args, out: 2 * out),
    "its forward replaced": lambda m: setattr(m.act_fn, "forward", torch.tanh),
    "a function of somebody's": lambda m: (
        delattr(m, "act_fn"),
        setattr(m, "act_fn", lambda x: torch.relu(x)),
    ),
    "a gate of the instance's own": _set_gate,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_an_instance_has_changed_is_what_runs(change):
    module, x, (idx, weight) = module_of({}, {}), torch.randn(T, H), slots()
    assert gates.gate_of(module) == Activation()
    change(module)
    assert gates.gate_of(module) is None
    torch.manual_seed(3)
    out = module.eval()(x, idx, weight)
    assert distance(out, type(module).forward.__wrapped__(module, x, idx, weight)) < 2e-6
    learned = [p for name, p in module.named_parameters() if "beta" in name]
    if learned:
        out.sum().backward()
        assert learned[0].grad.abs() > 0


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast(weights):
    module = module_of({}, {}).to(weights)
    x, (idx, weight) = torch.randn(T, H, dtype=torch.float32), slots()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, idx, weight)
    assert out.dtype == torch.float32
    module.config._experts_implementation = "eager"
    want = module.double()(x.double(), idx, weight.double())
    assert 1e-5 < distance(out, want) < 2e-2


@pytest.mark.parametrize(
    "flags",
    [{}, {"apply_gate": _deepseek}, {"apply_gate": _softcapped}],
    ids=["plain", "clamped", "own"],
)
def test_compiles_without_a_break(flags):
    torch._dynamo.reset()
    gates._form_of_gate.cache_clear()
    module, x, (idx, weight) = module_of(flags, {}), torch.randn(T, H), slots()
    want = run(module, x, idx, weight, "eager")
    module.config._experts_implementation = "moe_runtime"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module.zero_grad()
    out = compiled(x, idx, weight)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    assert distance(out, want["out"]) < 2e-6
    assert distance(module.down_proj.grad, want["down_proj"]) < 2e-6


def test_one_graph_for_all_layers_and_another_for_another_activation():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    config = Config()
    cls = experts_class()
    layers, x, (idx, weight) = [cls(config) for _ in range(12)], torch.randn(T, H), slots()
    config._experts_implementation = "moe_runtime"
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
        layer(x, idx, weight)
    assert counter.frame_count == 1
    layers[5].act_fn = nn.GELU()
    got = layers[5](x, idx, weight)
    assert counter.frame_count == 2
    assert distance(got, cls.forward.__wrapped__(layers[5], x, idx, weight)) < 2e-6


def test_counts_are_the_dispatchs_own():
    module, (idx, weight) = module_of({}, {}), slots(dropped=True)
    module.moe_runtime_counts = torch.zeros(E, dtype=torch.int64)
    module(torch.randn(T, H), idx, weight)
    live = idx[(idx >= 0) & (idx < E)]
    assert torch.equal(module.moe_runtime_counts, torch.bincount(live, minlength=E))
    assert live.numel() < T * K
    assert "moe_runtime_counts" not in module.state_dict()


def test_weights_are_read_at_every_call():
    module, x, (idx, weight) = module_of({}, {}), torch.randn(T, H), slots()
    before = module(x, idx, weight)
    module.down_proj = nn.Parameter(2 * module.down_proj.detach())
    assert distance(module(x, idx, weight), 2 * before) < 1e-6


def test_state_dict_and_deepcopy():
    module, x, (idx, weight) = module_of({}, {}), torch.randn(T, H), slots()
    names = list(module.state_dict())
    out = module(x, idx, weight)
    assert list(module.state_dict()) == names
    assert torch.equal(copy.deepcopy(module)(x, idx, weight), out)


def test_register_names_us_once_and_again():
    experts.register()
    moe_runtime.register()
    assert ExpertsInterface()["moe_runtime"] is experts.experts_forward


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model


def tiny_qwen():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=96,
            hidden_size=32,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
    ).eval()


def test_patch_leaves_another_model_of_the_same_config_alone():
    one = tiny_qwen()
    other = type(one)(one.config)
    other.load_state_dict(one.state_dict())
    assert other.config is one.config
    before = other.config._experts_implementation
    moe_runtime.patch(one)
    configs = {id(module.config) for module in one.modules() if hasattr(module, "config")}
    assert configs == {id(one.config)}
    assert other.config._experts_implementation == before
    ids = torch.arange(12)[None]
    assert distance(one(ids).logits, other.eval()(ids).logits) < 1e-5
    moe_runtime.unpatch(one)
    assert one.config._experts_implementation == before


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "wrapped"])
def test_patch_and_unpatch(wrapped):
    model = tiny_qwen()
    before = model.config._experts_implementation
    ids = torch.arange(12)[None]
    want = model(ids).logits
    keys = list(model.state_dict())
    outer = Wrapper(model) if wrapped else model
    # a second time changes nothing
    assert moe_runtime.patch(outer) == moe_runtime.patch(outer) == 2
    assert model.config._experts_implementation == "moe_runtime"
    assert distance(model(ids).logits, want) < 1e-5
    assert list(model.state_dict()) == keys
    moe_runtime.unpatch(outer)
    assert model.config._experts_implementation == before != "moe_runtime"
    moe_runtime.unpatch(outer)
    assert torch.equal(model(ids).logits, want)


def test_patch_that_fails_changes_nothing():
    class Foreign(nn.Module):
        """Experts without a model of transformers around them, whose config nobody sets."""

        def __init__(self):
            super().__init__()
            self.model, self.other = tiny_qwen(), module_of({}, {}, "eager")

    foreign = Foreign()
    before = foreign.model.config._experts_implementation
    with pytest.raises(
        ValueError,
        match="experts_implementation of other cannot be set to 'moe_runtime' and is still 'eager'",
    ):
        moe_runtime.patch(foreign)
    assert foreign.model.config._experts_implementation == before != "moe_runtime"
    with pytest.raises(
        ValueError,
        match="experts_implementation of Stock cannot be set to 'moe_runtime' and is still 'eager'",
    ):
        moe_runtime.patch(foreign.other)
    with pytest.raises(ValueError, match="str has no experts"):
        moe_runtime.patch("gpt")


def test_patch_of_an_upcycled_model_counts_its_own_layers():
    model = upcycled()
    ids = torch.arange(12)[None]
    want = model(ids).logits
    assert moe_runtime.patch(model) == 2
    assert torch.equal(model(ids).logits, want)


class Packed(torch.Tensor):
    """A tensor that holds int8 and passes for floats, as torchao's quantized weights do; it knows
    no operation.
    """

    @staticmethod
    def __new__(cls, ints, scale):
        return torch.Tensor._make_wrapper_subclass(cls, ints.shape, dtype=scale.dtype)

    def __init__(self, ints, scale):
        self.ints = ints
        self.scale = scale

    def __tensor_flatten__(self):
        return ["ints", "scale"], {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{cls.__name__} dispatch: attempting to run unimplemented operator {func}"
        )


def packed(weight: torch.Tensor) -> nn.Parameter:
    scale = weight.detach().abs().amax() / 127
    return nn.Parameter(
        Packed((weight.detach() / scale).to(torch.int8), scale), requires_grad=False
    )


class Params4bit(nn.Parameter):
    """bitsandbytes' bytes of a stack, as its class of this name has them."""


def in_4_bits(weight: torch.Tensor) -> nn.Parameter:
    return Params4bit(torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), False)


@pytest.mark.parametrize(
    "kind, dtype", [pytest.param(packed, "float32", id="torchao"), (in_4_bits, "uint8")]
)
@pytest.mark.parametrize(
    "make", [pytest.param(upcycled, id="ours"), pytest.param(stock, id="stock")]
)
@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_tensors_that_only_look_like_floats_are_refused(make, stack, kind, dtype):
    """The class is named, and what to do."""
    model = make()
    moe_runtime.patch(model)
    layer = next(module for module in model.modules() if hasattr(module, stack))
    setattr(layer, stack, kind(getattr(layer, stack)))
    name = {packed: "Packed", in_4_bits: "Params4bit"}[kind]
    are = (
        r"^The experts of \S+ must be float16, .*, "
        r"but "
        r"are "
        rf"\S*\.{name} "
        rf"\(torch.{dtype}\)\. "
        r".* "
        r"moe_runtime.quantize_experts"
    )
    for call in (
        lambda: moe_runtime.patch(model),
        lambda: model(torch.ones(1, 4, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match=are):
            call()
    is_one = (
        rf"{stack} .*must be float16, bfloat16 or float32, but is \S*\.{name} \(torch.{dtype}\)"
    )
    with pytest.raises(ValueError, match=is_one):
        moe_runtime.quantize_experts(model, "int8")
    if kind is in_4_bits:
        return
    with pytest.raises(
        ValueError,
        match=rf"{stack} must be a floating-point tensor .*, but is torch.float32 \(Packed\)",
    ):
        train_rows(model, {0: [1]})
