"""The layer: router and experts against float64 loops, XFT's claims about a layer, noise, compile,
memory.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from moe_runtime.tools.conformance import oracle
from tests.support.layer import dense_mlp
from tests.support.oracle import GATES, SUM_ONE, assert_parity

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


def forward_in_float64(layer: MoE, x: torch.Tensor) -> dict:
    """Return the output, dx and the gradient of every parameter for the loss sum(out * cos(0, 1,
    ...)).
    """
    config = layer.config
    p = {n: v.detach().double().requires_grad_() for n, v in layer.named_parameters()}
    x = x.detach().double().requires_grad_()
    logits = x @ p["gate.weight"].t()
    if config.router == "mlp":
        logits = torch.tanh(logits) @ p["gate.weight_out"].t()
    ids = oracle.best_experts(
        logits,
        config.top_k,
        config.gate,
    )
    weight = oracle.gate_weights(
        logits,
        ids,
        config.gate,
    )
    up = f"experts.{layer.experts.up_name}"
    out = oracle.moe(
        x,
        p[up],
        p["experts.down_proj"],
        weight,
        ids,
        up_bias=p.get(f"{up}_bias"),
        down_bias=p.get("experts.down_proj_bias"),
        act=config.hidden_act,
        gated=config.gated,
    )
    return collect(out, x, p)


def collect(out, x, parameters: dict) -> dict:
    loss = (
        out
        * torch.cos(
            torch.arange(
                out.numel(),
                dtype=out.dtype,
            )
        ).view(out.shape)
    ).sum()
    leaves = {"x": x, **parameters}
    gradients = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    result = {"out": out.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        result[f"d{name}"] = gradient
    return result


def forward(layer: MoE, x: torch.Tensor) -> dict:
    x = x.detach().clone().requires_grad_()
    return collect(
        layer(x),
        x,
        dict(layer.named_parameters()),
    )


VARIANTS = [
    *[pytest.param({"gate": gate}, id=gate) for gate in GATES],
    pytest.param({"router": "mlp"}, id="mlp router"),
    pytest.param(
        {"bias": True, "gated": False, "hidden_act": "gelu_tanh"},
        id="biases, no gate",
    ),
    pytest.param(
        {"num_experts": 1, "top_k": 1, "gate": "topk_softmax"},
        id="E = 1",
    ),
    pytest.param({"num_experts": 2, "top_k": 2}, id="E = K = 2"),
    pytest.param({"num_experts": 3, "top_k": 3}, id="K = E = 3"),
    pytest.param({"num_experts": 16, "top_k": 3}, id="more experts than tokens: some have none"),
]


@pytest.mark.parametrize(
    "T",
    [1, 13],
    ids=["one token", "ragged T"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parity(variant, T, tolerance):
    layer = make(**variant)
    x = torch.randn(T, H)
    expected = forward_in_float64(layer, x)
    result = forward(layer, x)
    assert result.keys() == expected.keys()
    limits = {}
    for name in list(expected):
        limits[name] = 2 * tolerance[torch.float32]
        if "gate." in name:  # a difference of nearly equal terms
            limits[name] *= 10
            if expected[name].norm() < 1e-9:  # a router over one expert, or none
                assert result.pop(name).norm() < 1e-5
                del expected[name]
    assert_parity(result, expected, limits)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16],
    ids=str,
)
def test_gates_are_float32(dtype):
    layer = make(dtype)
    x = torch.randn(13, H).to(dtype)
    layer.records = []
    assert layer(x).dtype == dtype
    (record,) = layer.records
    assert record.topk_weight.dtype == torch.float32
    assert record.router_logits.dtype == torch.float32
    # no float32 copy without noise, unless the logits are recorded
    assert layer.gate(x).router_logits.dtype == dtype


def dense_forward(layer: MoE, x: torch.Tensor) -> dict:
    """Compute the MLP that the layer was upcycled from, its expert 0, with gradients under the
    experts' names.
    """
    x = x.detach().double().requires_grad_()
    p = {n: v.detach()[0].double().requires_grad_() for n, v in layer.experts.named_parameters()}
    return collect(dense_mlp(layer, p, x), x, p)


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
    layer = make(gate=gate, **extra)
    with torch.no_grad():
        for p in layer.experts.parameters():
            p.copy_(p[:1].expand_as(p))
    x = torch.randn(13, H)
    expected = dense_forward(layer, x)
    result = forward(layer, x)
    summed = {"out": result["out"], "dx": result["dx"]}
    for name, _ in layer.experts.named_parameters():
        summed[f"d{name}"] = result[f"dexperts.{name}"].double().sum(0)
    assert_parity(
        summed,
        expected,
        2 * tolerance[torch.float32],
    )
    scale = result["dexperts.down_proj"].norm()
    for name, _ in layer.gate.named_parameters():  # the router has no gradient yet
        assert result[f"dgate.{name}"].norm() < 1e-5 * scale


def test_noise_can_be_injected_and_follows_the_formula(tolerance):
    layer = make(noisy_gate=True, noise_epsilon=0.05)
    x = torch.randn(13, H)
    eps = torch.randn(13, 7)
    p = {n: v.detach().double() for n, v in layer.gate.named_parameters()}
    logits = x.double() @ p["weight"].t()
    scale = torch.log(1 + torch.exp(x.double() @ p["noise_weight"].t())) + 0.05
    noisy = logits + eps.double() * scale
    ids = oracle.best_experts(noisy, 6, "xft")
    routing = layer.gate(x, eps=eps)
    assert torch.equal(routing.topk_idx, ids)
    expected = {"w": oracle.gate_weights(noisy, ids, "xft"), "logits": logits}
    result = {"w": routing.topk_weight, "logits": routing.router_logits}
    assert_parity(
        result,
        expected,
        2 * tolerance[torch.float32],
    )
    loss = routing.topk_weight.square().sum()
    assert torch.autograd.grad(
        loss,
        layer.gate.noise_weight,
    )[0].any()
    # these would broadcast
    for shape in ((7,), (13, 1), (12, 7)):
        with pytest.raises((ValueError, RuntimeError)):
            layer.gate(x, eps=torch.randn(shape))


def test_noise_is_drawn_while_training_only_and_from_torchs_generator():
    layer = make(noisy_gate=True)
    x = torch.randn(13, H)
    torch.manual_seed(3)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    quiet = make()
    quiet.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(layer.eval()(x), quiet(x))


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("kind", ["cv2", "switch"])
def test_balance_loss_is_returned_and_reaches_the_router(kind, noisy):
    layer = make(
        balance_loss=kind,
        balance_loss_coef=0.01,
        noisy_gate=noisy,
        top_k=3,
    )
    x = torch.randn(29, H)
    loss = layer.gate(x).balance_loss
    leaves = [layer.gate.weight]
    if noisy and kind == "cv2":
        leaves.append(layer.gate.noise_weight)
    for gradient in torch.autograd.grad(loss, leaves):
        assert gradient.any()
    # as in the official code, also in eval mode
    assert layer.eval().gate(x).balance_loss is not None
    assert make().gate(x).balance_loss is None


def test_records_collect_router_outputs_only_on_request():
    layer = make(balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(2, 5, H)
    layer(x)
    assert layer.records is None
    layer.records = []
    for _ in range(2):
        layer(x)
    expected = layer.gate(x.flatten(0, 1)).topk_idx
    assert [torch.equal(record.topk_idx, expected) for record in layer.records] == [True, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_routes_to_the_same_experts_again(reentrant):
    layer = make(noisy_gate=True)
    x = torch.randn(13, H)

    def gradients(run):
        torch.manual_seed(5)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.square().sum().backward()
        return [
            out,
            leaf.grad,
            *(p.grad for p in layer.parameters()),
        ]

    expected = gradients(layer)
    result = gradients(lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


def test_checkpointing_leaves_one_record_of_one_forward_pass():
    layer = make(balance_loss="switch", balance_loss_coef=0.1)
    x = torch.randn(13, H, requires_grad=True)
    layer.records = records = []
    out = checkpoint(
        lambda x: layer(x) * 2,
        x,
        use_reentrant=False,
    )
    # records must only be collected during the forward pass: recomputation would count the loss
    # twice
    layer.records = None
    (out.sum() + records[0].balance_loss).backward()
    assert len(records) == 1
    assert layer.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"gate": "topk_softmax"},
        {"router": "mlp", "noisy_gate": True, "balance_loss": "cv2", "balance_loss_coef": 0.1},
        {"bias": True, "gated": False},
    ],
    ids=str,
)
def test_compiles_without_a_graph_break(variant):
    torch._dynamo.reset()
    layer = make(**variant).eval()
    x = torch.randn(2, 7, H)
    expected = forward(layer, x)
    layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        forward(layer, x),
        expected,
    )
    if "balance_loss" in variant:
        layer.records = []
        layer(x)
        (record,) = layer.records
        assert torch.autograd.grad(
            record.balance_loss,
            layer.gate.weight,
        )[0].any()
