"""The layer: router and experts against float64 loops, XFT's claims at a layer, noise, compile,
memory.
"""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from tests.support.oracle import (
    GATES,
    SHARED,
    SUM_ONE,
    assert_parity,
    mlp,
    moe_oracle,
    route_oracle,
    saved_bytes,
)

H = 33
I = 17


def make(dtype=None, device=None, spread=1.0, **kwargs) -> MoE:
    config = MoEConfig(
        **{"hidden_size": H, "intermediate_size": I, "initializer_range": 0.3} | kwargs
    )
    layer = MoE(config, dtype=dtype, device=device)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("_bias"):
                p.normal_()
            elif name.startswith("gate."):
                p.mul_(spread)
    return layer


def router_logits(config, p: dict, x: torch.Tensor) -> torch.Tensor:
    """W x or W2 tanh(W1 x)."""
    hidden = x @ p["gate.weight"].t()
    return torch.tanh(hidden) @ p["gate.weight_out"].t() if config.router == "mlp" else hidden


def forward_in_float64(layer: MoE, x: torch.Tensor, noise: torch.Tensor | None = None) -> dict:
    """out, dx and the gradient of every parameter for the loss sum(out * cos(0, 1, ...))."""
    config = layer.config
    p = {n: v.detach().double().requires_grad_() for n, v in layer.named_parameters()}
    x = x.detach().double().requires_grad_()
    logits = router_logits(config, p, x)
    if noise is not None:
        logits = logits + noise
    weight, ids = route_oracle(logits, config.top_k, config.gate)
    up = layer.experts.up_name
    biases = {"up_bias": p.get(f"experts.{up}_bias"), "down_bias": p.get("experts.down_proj_bias")}
    options = {"act": config.hidden_act, "gated": config.gated}
    out = moe_oracle(
        x,
        p[f"experts.{up}"],
        p["experts.down_proj"],
        weight,
        torch.tensor(ids),
        **biases,
        **options,
    )
    return collect(out, x, p)


def collect(out, x, parameters: dict) -> dict:
    loss = (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)).sum()
    leaves = {"x": x, **parameters}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {"out": out.detach()} | {
        f"d{n}": torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), grads)
    }


def forward(layer: MoE, x: torch.Tensor) -> dict:
    x = x.detach().clone().requires_grad_()
    return collect(layer(x), x, dict(layer.named_parameters()))


VARIANTS = [
    *[pytest.param({"gate": gate}, id=gate) for gate in GATES],
    pytest.param({"router": "mlp"}, id="mlp router"),
    pytest.param({"bias": True, "gated": False, "hidden_act": "gelu_tanh"}, id="biases, no gate"),
    pytest.param({"num_experts": 1, "top_k": 1}, id="E = 1, shared alone"),
    pytest.param({"num_experts": 1, "top_k": 1, "gate": "topk_softmax"}, id="E = 1"),
    pytest.param({"num_experts": 2, "top_k": 2}, id="E = K = 2"),
    pytest.param({"num_experts": 3, "top_k": 3}, id="K = E = 3"),
    pytest.param({"num_experts": 16, "top_k": 3}, id="more experts than tokens: some have none"),
]


@pytest.mark.parametrize("T", [1, 13], ids=["one token", "ragged T"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parity(variant, T, tolerance):
    layer = make(**variant)
    x = torch.randn(T, H)
    want = forward_in_float64(layer, x)
    got = forward(layer, x)
    assert got.keys() == want.keys()
    # the router's gradient is a difference of nearly equal terms
    limit = {name: tolerance[torch.float32] * (20 if "gate." in name else 2) for name in want}
    small = [n for n in want if want[n].norm() < 1e-9]  # a router over one expert, or none
    assert all(got[n].norm() < 1e-5 for n in small)
    assert_parity(*({n: v for n, v in d.items() if n not in small} for d in (got, want)), limit)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype, gate, tolerance):
    layer = make(dtype, spread=4.0, gate=gate, num_experts=4, top_k=2)
    x = torch.randn(13, H).to(dtype)
    layer.records = []
    got = forward(layer, x)
    routing = layer.records[0]
    # no copy without noise, unless somebody records
    assert layer.gate(x).router_logits.dtype == dtype
    assert (
        got["out"].dtype == dtype
        and routing.topk_weight.dtype == routing.router_logits.dtype == torch.float32
    )
    p = {n: v.detach().double() for n, v in layer.named_parameters()}
    weight, ids = route_oracle(
        routing.router_logits.double(), 2, gate
    )  # the logits as rounded: a flip is no error of the experts
    assert routing.topk_idx.tolist() == ids
    want = moe_oracle(
        x.double(), p["experts.gate_up_proj"], p["experts.down_proj"], weight, torch.tensor(ids)
    )
    assert_parity({"out": got["out"]}, {"out": want}, tolerance[dtype])


@pytest.mark.parametrize("gate, router", [*((gate, "linear") for gate in GATES), ("xft", "mlp")])
def test_gradcheck(gate, router):
    sizes = {"hidden_size": 4, "intermediate_size": 2, "num_experts": 4, "top_k": 3}
    layer = make(torch.float64, gate=gate, router=router, bias=True, spread=4.0, **sizes)
    names, values = zip(*layer.named_parameters())

    def f(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(
        f, (torch.randn(2, 4, dtype=torch.float64, requires_grad=True), *values), fast_mode=True
    )


# XFT
def upcycled(**kwargs) -> MoE:
    layer = make(**kwargs)
    with torch.no_grad():
        for p in layer.experts.parameters():
            p.copy_(p[:1].expand_as(p))
    return layer


def dense_forward(layer: MoE, x: torch.Tensor) -> dict:
    """The MLP that the layer was upcycled from: its expert 0, with its gradients under the experts'
    names.
    """
    x = x.detach().double().requires_grad_()
    p = {n: v.detach()[0].double().requires_grad_() for n, v in layer.experts.named_parameters()}
    args = (
        p[layer.experts.up_name],
        p["down_proj"],
        p.get(f"{layer.experts.up_name}_bias"),
        p.get("down_proj_bias"),
    )
    out = torch.stack([mlp(t, *args, layer.config.hidden_act, layer.config.gated) for t in x])
    return collect(out, x, p)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"bias": True},
        {"router": "mlp"},
        {"noisy_gate": True},
        {"gated": False, "hidden_act": "relu2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", SUM_ONE)
def test_upcycled_equals_dense_and_its_gradients_add_up_to_the_dense_ones(gate, extra, tolerance):
    layer = upcycled(gate=gate, **extra)
    x = torch.randn(13, H)
    want = dense_forward(layer, x)
    got = forward(layer, x)
    summed = {"out": got["out"], "dx": got["dx"]}
    summed |= {
        f"d{n}": got[f"dexperts.{n}"].double().sum(0) for n, _ in layer.experts.named_parameters()
    }
    assert_parity(summed, want, 2 * tolerance[torch.float32])
    scale = got["dexperts.down_proj"].norm()
    # the router learns nothing yet
    assert all(got[n].norm() < 1e-5 * scale for n in got if n.startswith("dgate."))


@pytest.mark.parametrize("gate", ["softmax_topk", "sigmoid_topk", "nonorm"])
def test_gates_that_do_not_sum_to_one_do_not_start_at_the_dense_model(gate):
    layer = upcycled(gate=gate)
    x = torch.randn(13, H)
    out = layer(x)
    want = dense_forward(layer, x)["out"]
    assert (out - want).norm() > 1e-2 * want.norm()


@pytest.mark.parametrize("num_experts, top_k", [(8, 6), (4, 2), (2, 2), (3, 3), (8, 8)])
@pytest.mark.parametrize("gate", SHARED)
def test_shared_expert_sees_all_tokens_and_the_others_T_times_k(gate, num_experts, top_k):
    layer = make(gate=gate, num_experts=num_experts, top_k=top_k)
    layer.records = []
    layer(torch.randn(29, H))
    count = torch.bincount(layer.records[0].topk_idx.flatten(), minlength=num_experts)
    assert count[0] == 29 and count[1:].sum() == 29 * (top_k - 1) and count[1:].max() <= 29


@pytest.mark.parametrize("gate", GATES)
def test_permuted_normal_experts_with_their_router_rows_change_nothing(gate):
    layer = make(torch.float64, gate=gate)
    x = torch.randn(13, H, dtype=torch.float64)
    other = copy.deepcopy(layer)
    shared = int(gate in SHARED)
    order = torch.randperm(8 - shared)
    experts = torch.cat([torch.zeros(shared, dtype=torch.int64), order + shared])
    with torch.no_grad():
        other.gate.weight.copy_(layer.gate.weight[order])
        for p, q in zip(other.experts.parameters(), layer.experts.parameters()):
            p.copy_(q[experts])
    torch.testing.assert_close(other(x), layer(x), rtol=1e-5, atol=1e-6)  # gates are float32


def test_permuted_tokens_permute_the_output():
    layer = make()
    x = torch.randn(13, H)
    order = torch.randperm(13)
    torch.testing.assert_close(layer(x[order]), layer(x)[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [2, 6, 8])
def test_one_routed_expert_makes_nonorm_and_xft_the_same(top_k):
    a = make(gate="xft", top_k=top_k)
    b = MoE(MoEConfig(**a.config.to_dict() | {"gate": "nonorm"}))
    b.load_state_dict(a.state_dict())
    x = torch.randn(13, H)
    same = torch.allclose(a(x), b(x), rtol=1e-5, atol=1e-6)
    assert same == (top_k == 2)


# noise
def test_noise_can_be_injected_and_follows_the_formula(tolerance):
    layer = make(noisy_gate=True, noise_epsilon=0.05)
    x = torch.randn(13, H)
    eps = torch.randn(13, 7)
    p = {n: v.detach().double() for n, v in layer.named_parameters()}
    scale = torch.log(1 + torch.exp(x.double() @ p["gate.noise_weight"].t())) + 0.05
    got = layer.gate(x, eps=eps)
    weight, ids = route_oracle(x.double() @ p["gate.weight"].t() + eps.double() * scale, 6, "xft")
    assert got.topk_idx.tolist() == ids
    assert_parity({"w": got.topk_weight}, {"w": weight}, 2 * tolerance[torch.float32])
    assert_parity(
        {"logits": got.router_logits},
        {"logits": x.double() @ p["gate.weight"].t()},
        tolerance[torch.float32],
    )
    assert (
        torch.autograd.grad(got.topk_weight.square().sum(), layer.gate.noise_weight)[0].abs().sum()
        > 0
    )


def test_noise_is_drawn_while_training_only_and_from_torchs_generator():
    layer = make(noisy_gate=True)
    x = torch.randn(13, H)
    torch.manual_seed(3)
    a = layer(x)
    b = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), a) and not torch.equal(a, b)
    layer.eval()
    quiet = MoE(MoEConfig(**layer.config.to_dict() | {"noisy_gate": False}))
    quiet.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(layer(x), layer(x)) and torch.equal(layer(x), quiet(x))


@pytest.mark.parametrize(
    "eps",
    [torch.randn(7), torch.randn(13, 1), torch.randn(12, 7)],
    ids=["[R] would broadcast", "[T, 1] would broadcast", "another T"],
)
def test_injected_noise_of_another_shape_is_an_error(eps):
    with pytest.raises((ValueError, RuntimeError)):
        make(noisy_gate=True).gate(torch.randn(13, H), eps=eps)


@pytest.mark.parametrize(
    "kind, noisy", [("cv2", False), ("cv2", True), ("switch", False), ("switch", True)]
)
def test_balance_loss_is_returned_and_reaches_the_router(kind, noisy):
    layer = make(balance_loss=kind, balance_loss_coef=0.01, noisy_gate=noisy, top_k=3)
    x = torch.randn(29, H)
    loss = layer.gate(x).balance_loss
    leaves = [p for n, p in layer.gate.named_parameters() if kind == "cv2" or "noise" not in n]
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(loss, leaves))
    # as in the official code: also in eval mode
    assert layer.eval().gate(x).balance_loss is not None
    assert make().gate(x).balance_loss is None


def test_records_collect_what_the_router_said_and_only_when_asked():
    layer = make(balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(2, 5, H)
    layer(x)
    assert layer.records is None
    layer.records = []
    layer(x), layer(x)
    assert len(layer.records) == 2 and layer.records[0].topk_idx.shape == (10, 6)
    assert torch.equal(layer.records[0].topk_idx, layer.gate(x.flatten(0, 1)).topk_idx)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_routes_to_the_same_experts_again(reentrant):
    layer = make(noisy_gate=True)
    x = torch.randn(13, H)
    torch.manual_seed(5)
    want = forward(layer, x)
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    out = checkpoint(layer, leaf, use_reentrant=reentrant)
    (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)).sum().backward()
    got = {"out": out.detach(), "dx": leaf.grad} | {
        f"d{n}": p.grad for n, p in layer.named_parameters()
    }
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_checkpointing_leaves_one_record_of_one_forward_pass():
    layer = make(balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(13, H, requires_grad=True)
    layer.records = records = []
    out = checkpoint(lambda x: layer(x) * 2, x, use_reentrant=False)
    # a list while the forward pass lasts: the recomputation would count its loss twice
    layer.records = None
    (out.sum() + records[0].balance_loss).backward()
    assert len(records) == 1 and layer.gate.weight.grad.abs().sum() > 0


# shapes, dtypes, modes
@pytest.mark.parametrize(
    "shape", [(H,), (7, H), (0, H), (2, 0, H), (2, 7, H), (2, 3, 5, H)], ids=str
)
def test_takes_every_shape_that_a_dense_mlp_takes(shape):
    layer = make()
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == shape
    torch.testing.assert_close(out.reshape(-1, H), layer(x.reshape(-1, H)))
    out.sum().backward()
    assert x.grad.shape == shape and not any(
        p.grad is None or p.grad.isnan().any() for p in layer.parameters()
    )


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_runs_in_bfloat16_as_a_dense_mlp_does(x_dtype):
    layer = make(spread=4.0, num_experts=4, top_k=2)
    x = torch.randn(64, H).to(x_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        assert F.linear(x, layer.gate.weight).dtype == torch.bfloat16 == out.dtype
    out.float().square().mean().backward()
    assert all(
        p.grad.dtype == torch.float32 and not p.grad.isnan().any() for p in layer.parameters()
    )
    want = layer(x.float())
    close = ((out.float() - want).norm(dim=1) < 0.05 * want.norm(dim=1)).float().mean()
    assert close > 0.9  # a token whose experts tie in bfloat16 may go another way


def test_frozen_experts_cost_no_weight_gradient(monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")  # whose products can be counted
    layer = make()
    x = torch.randn(64, H, requires_grad=True)

    def products():
        out = layer(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out.sum().backward()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")

    full = products()
    layer.experts.requires_grad_(False)
    assert products() <= full - 16  # two products fewer for each of the 8 experts


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 2), (torch.float32, 4)], ids=str)
def test_memory_kept_per_token(dtype, size):
    T = 256
    E = 8
    K = 6
    layer = make(dtype, hidden_size=64, intermediate_size=96)
    x = torch.randn(T, 64, dtype=dtype, requires_grad=True)
    kept, _ = saved_bytes(lambda: layer(x), list(layer.parameters()))
    # bf16: 2H + 4IK + 12K, and the logits
    assert kept <= T * (size * (64 + 2 * 96 * K) + 12 * K + 4 * (E - 1)) + 4 * (E + 1)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"gate": "topk_softmax"},
        {"router": "mlp", "noisy_gate": True, "balance_loss": "cv2"},
        {"bias": True, "gated": False},
    ],
    ids=str,
)
def test_compiles_without_a_graph_break(variant):
    torch._dynamo.reset()
    layer = make(**variant).eval()
    x = torch.randn(2, 7, H)
    assert torch._dynamo.explain(layer)(x).graph_break_count == 0
    want = forward(layer, x)
    got = forward(torch.compile(layer, fullgraph=True, backend="aot_eager"), x)
    for name in want:
        torch.testing.assert_close(
            got[name.replace("d", "d_orig_mod.", 1)] if name not in ("out", "dx") else got[name],
            want[name],
        )


def test_compiles_with_records():
    torch._dynamo.reset()
    layer = make(balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(7, H)
    layer.records = []
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    loss = layer.records[0].balance_loss
    assert torch.autograd.grad(loss, layer.gate.weight)[0].abs().sum() > 0


@pytest.mark.parametrize("gate", ["xft", "softmax_topk_renorm"])
def test_twenty_runs_give_the_same_bits(gate):
    layer = make(gate=gate)
    x = torch.randn(64, H)
    first = forward(layer, x)
    for _ in range(20):
        again = forward(layer, x)
        assert all(torch.equal(again[n], first[n]) for n in first)


def test_names_are_transformers():
    assert set(make().state_dict()) == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    shapes = {
        n: tuple(p.shape)
        for n, p in make(bias=True, router="mlp", noisy_gate=True).named_parameters()
    }
    assert shapes == {
        "gate.weight": (7, H),
        "gate.weight_out": (7, 7),
        "gate.noise_weight": (7, H),
        "experts.gate_up_proj": (8, 2 * I, H),
        "experts.down_proj": (8, H, I),
        "experts.gate_up_proj_bias": (8, 2 * I),
        "experts.down_proj_bias": (8, H),
    }
