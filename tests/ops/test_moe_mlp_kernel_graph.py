"""The Triton experts under autograd, autocast and torch.compile: what is kept, no graph breaks,
what is refused.
"""

import pytest
import torch

from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.ops.routing import route
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import (
    assert_parity,
    bounds,
    make_case,
    mlp,
    moe_eager,
    moe_mismatches,
    moe_oracle,
    run,
    saved_bytes,
)

pytest.importorskip("triton")
from moe_runtime.kernels import tiles
from moe_runtime.kernels.tiles import Tile


def layer(**options):
    return moe_layer(backend="triton", **options)


def one_tile():
    """Few programs where the tile does not matter."""
    return tiles.force(**dict.fromkeys(tiles.KERNELS, Tile(64, 64, 64)))


def on(device, case):
    """The leaves, which require gradients, the ids and the gradient of the output, on `device`."""
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in case.leaves.items()}
    return leaves, case.topk_idx.to(device), case.dout.to(device)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize(
    "dtype, size", [(torch.bfloat16, 2), (torch.float32, 4)], ids=["bfloat16", "float32"]
)
def test_keeps_x_preactivation_gates_and_indices_and_nothing_else(dtype, size, gated, device):
    T = 64
    H = 64
    I = 64
    E = 2
    K = 2
    leaves, idx, dout = on(device, make_case(T, H, I, E, K, dtype, gated=gated, bias=True))
    x, up, down, weight, up_bias, down_bias = leaves.values()

    def step(**options):
        biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
        return moe_mlp(x, up, down, weight, idx, gated=gated, backend="triton", **biases, **options)

    with one_tile():
        Z = up.shape[1]
        kept, out = saved_bytes(step, [up, down, up_bias, down_bias])
        # in bfloat16, gated: 2H + 4IK and up to 12K a token
        assert size * T * (H + K * Z) < kept <= T * (size * (H + K * Z) + 12 * K) + 4 * (E + 1)
        kept, again = saved_bytes(lambda: step(recompute=True), [up, down, up_bias, down_bias])
        assert size * T * H < kept <= T * (size * H + 12 * K) + 4 * (E + 1)  # no pre-activation
        grads = [torch.autograd.grad(o, list(leaves.values()), dout) for o in (out, again)]
    assert torch.equal(out, again) and all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no tensor requires a gradient"])
def test_keeps_nothing_without_a_gradient(how, device):
    leaves, idx, _ = on(device, make_case(12, 33, 17, 4, 2))
    v = [leaf.detach() if how.startswith("no tensor") else leaf for leaf in leaves.values()]
    with (
        {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
            how, torch.enable_grad
        )(),
        one_tile(),
    ):
        kept, out = saved_bytes(lambda: moe_mlp(*v, idx, backend="triton"), [])
    assert kept == 0 and not out.requires_grad


@pytest.mark.parametrize(
    "routing, dtype", [("dropped", torch.bfloat16), ("skip", torch.float32)], ids=str
)
def test_recompute_and_three_runs_give_the_same_bits(routing, dtype, device):
    case = make_case(13, 33, 17, 4, 2, dtype, routing, bias=True)
    first = run(case, layer(), device=device)
    for options in ({"recompute": True}, {}, {}):
        again = run(case, layer(**options), device=device)
        assert all(torch.equal(again[name], first[name]) for name in first)


NEEDS = [
    pytest.param({"x"}, id="weights frozen"),
    pytest.param({"up", "down", "up_bias", "down_bias", "topk_weight"}, id="x frozen"),
    pytest.param({"topk_weight"}, id="only the gates"),
    pytest.param({"up"}, id="only the up projection"),
    pytest.param({"down"}, id="only the down projection"),
    pytest.param({"up_bias"}, id="only a bias"),
    pytest.param({"down_bias", "x"}, id="the other bias and x"),
]


@pytest.mark.parametrize("needs", NEEDS)
def test_gradients_of_some_inputs(needs, device):
    case = make_case(12, 33, 17, 4, 2, routing="dropped", bias=True)
    with one_tile():
        want = run(case, layer(), device=device)
        leaves, idx, dout = on(device, case)
        for name in leaves.keys() - needs:
            leaves[name].requires_grad_(False)
        biases = {"gate_up_bias": leaves["up_bias"], "down_bias": leaves["down_bias"]}
        args = [leaves[name] for name in ("x", "up", "down", "topk_weight")]
        out = moe_mlp(*args, idx, **biases, backend="triton")
        out.backward(dout)
    assert torch.equal(out.detach().cpu(), want["out"])
    for name, leaf in leaves.items():
        assert (
            leaf.grad is None
            if name not in needs
            else torch.equal(leaf.grad.cpu(), want[f"d{name}"])
        )


def test_ids_get_no_gradient_and_a_second_gradient_is_refused(device):
    leaves, idx, _ = on(device, make_case(5, 8, 6, 3, 2))
    x, *weights = leaves.values()
    out = moe_mlp(x, *weights, idx, backend="triton")
    assert out.grad_fn.next_functions[2][0] is None  # the ids'
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_runtime::moe_mlp has no second derivative"):
        torch.autograd.grad(dx.sum(), x)


def test_autocast_rounds_nothing(device):
    case = make_case(13, 33, 17, 4, 2, bias=True)
    with one_tile():
        want = run(case, layer(), device=device)
        with torch.autocast(device, torch.bfloat16):
            got = run(case, layer(), device=device)
    assert all(torch.equal(got[name], want[name]) for name in want)


# shared experts
def with_shared_expert(T, E, K, **sizes):
    """A case whose tokens all have expert 0 in their last slot, and nowhere else."""
    case = make_case(T, 40, 24, E, K, **sizes)
    if T and E > 1:
        case.topk_idx = torch.stack([torch.randperm(E - 1)[:K] + 1 for _ in range(T)]).to(
            case.topk_idx.dtype
        )
    case.topk_idx[:, -1] = 0
    return case


SHARED = [
    pytest.param(19, 4, 3, {"bias": True}, id="biases, ragged T"),
    pytest.param(19, 4, 3, {"dtype": torch.bfloat16, "bias": True}, id="bfloat16"),
    pytest.param(
        19, 4, 2, {"dtype": torch.float16, "gated": False, "act": "gelu"}, id="no gate, float16"
    ),
    pytest.param(13, 3, 1, {}, id="only the shared expert has tokens"),
    pytest.param(13, 1, 1, {"bias": True}, id="only the shared expert exists"),
    pytest.param(0, 4, 2, {"bias": True}, id="no tokens"),
    pytest.param(1, 4, 2, {}, id="one token"),
]


@pytest.mark.parametrize("T, E, K, sizes", SHARED)
def test_dense_shared_expert(T, E, K, sizes, tolerance, device):
    case = with_shared_expert(T, E, K, **sizes)
    dtype = case.leaves["x"].dtype
    want = run(case, moe_oracle, torch.float64)
    # the pre-activation of expert 0 is rounded before the activation, as in the eager path
    limits = bounds(run(case, moe_eager), want, tolerance[dtype])
    assert_parity(run(case, layer(shared="dense"), device=device), want, limits)


def test_dense_shared_expert_in_other_layouts_and_recomputed(device):
    for change in (layouts.transposed_weights, layouts.stride_zero):
        case = with_shared_expert(13, 4, 2)
        change(case)
        first = run(case, layer(shared="dense"), device=device)
        again = run(case, layer(shared="dense", recompute=True), device=device)
        assert all(torch.equal(again[name], first[name]) for name in first)
        assert not moe_mismatches(layer(shared="dense"), case, 5e-6, device)


@pytest.mark.parametrize("shared", ["group", "dense"])
def test_equal_experts_are_the_dense_ffn(shared, device):
    """Upcycled: E views of one FFN and XFT's gates, which sum to 1."""
    T = 19
    H = 40
    I = 24
    E = 4
    K = 3
    x = torch.randn(T, H)
    up = torch.randn(1, 2 * I, H) / H**0.5
    down = torch.randn(1, H, I) / I**0.5
    weight, idx, *_ = route(torch.randn(T, E - 1), K, "xft")
    args = [t.to(device) for t in (x, up, down, weight, idx)]
    out = moe_mlp(
        args[0],
        args[1].expand(E, -1, -1),
        args[2].expand(E, -1, -1),
        *args[3:],
        shared=shared,
        backend="triton",
    )
    want = torch.stack([mlp(row, up[0].double(), down[0].double()) for row in x.double()])
    assert_parity({"out": out.cpu()}, {"out": want}, 1e-6)


# torch.library and torch.compile

OPCHECK = [
    pytest.param({"bias": True}, {}, id="as it is used"),
    pytest.param({"T": 0}, {}, id="no tokens"),
    pytest.param(
        {"gated": False, "dtype": torch.bfloat16},
        {"trainable": [True, False, True]},
        id="frozen experts",
    ),
    pytest.param({}, {"trainable": [0, -1, 1], "apart": True}, id="trained weights apart"),
    pytest.param(
        {}, {"save": False, "change": layouts.transposed_weights}, id="recompute, weights in x out"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes, options", OPCHECK)
def test_opcheck(sizes, options, device):
    case = make_case(**{"T": 5, "H": 8, "I": 6, "E": 3, "K": 2} | sizes)
    if "change" in options:
        options["change"](case)
    leaves, idx, dout = on(device, case)
    v = case.view(
        {name: leaf.detach() for name, leaf in leaves.items()} if "change" in options else leaves
    )
    if "trainable" in options:
        trainable = torch.tensor(options["trainable"], device=device)
    else:
        trainable = None
    apart = (None, None)
    if "apart" in options:
        trainable = trainable.int()
        apart = tuple(v[name][:2].detach().clone().requires_grad_() for name in ("up", "down"))
        v |= {name: v[name].detach() for name in ("up", "down")}
    biases = (v.get("up_bias"), v.get("down_bias"))
    save = options.get("save", True)
    activation = Activation(case.act, case.gated)
    experts = ExpertStacks(v["up"], v["down"], *biases, trainable, *apart, activation).pack()
    with one_tile():
        forward = torch.ops.moe_runtime.moe_mlp
        torch.library.opcheck(forward, (v["x"], v["topk_weight"], idx, *experts, save, "triton"))
        x, weight, *experts = (
            t.detach() if isinstance(t, torch.Tensor) else t
            for t in (v["x"], v["topk_weight"], *experts)
        )
        _, *kept = forward(x, weight, idx, *experts, save, "triton")
        every = [True] * 4 + [bias is not None for bias in biases]
        for needs in (every, [True, False, False, True, False, False])[
            : 1 + (sizes == {"bias": True})
        ]:
            args = (dout, x, weight, *experts, *kept, needs, "triton")
            torch.library.opcheck(torch.ops.moe_runtime.moe_mlp_backward, args)


@pytest.mark.parametrize(
    "backend, options",
    [
        pytest.param("eager", {"recompute": True}, id="eager, recompute"),
        pytest.param("aot_eager", {}, id="aot_eager, T dynamic"),
        pytest.param("aot_eager", {"shared": "dense"}, id="aot_eager, dense shared expert"),
    ],
)
def test_compiles_without_a_graph_break(backend, options, device):
    torch._dynamo.reset()
    dynamic = backend == "aot_eager" and not options
    with one_tile():
        compiled = torch.compile(layer(**options), fullgraph=True, backend=backend, dynamic=dynamic)
        for T in (12, 5) if dynamic else (12,):
            case = with_shared_expert(T, 4, 2, bias=True)
            got = run(case, compiled, device=device)
            want = run(case, layer(**options), device=device)
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_no_graph_break(device):
    torch._dynamo.reset()
    leaves, idx, _ = on(device, make_case(12, 40, 24, 4, 2))
    with one_tile():
        explained = torch._dynamo.explain(lambda *v: moe_mlp(*v, idx, backend="triton"))(
            *leaves.values()
        )
    assert explained.graph_break_count == 0
