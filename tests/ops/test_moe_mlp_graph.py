"""The experts of a layer under autograd and torch.compile: what is kept, what the fakes promise, no
graph breaks.
"""

import pytest
import torch

from moe_runtime.backends import interpreted
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.ops.test_moe_mlp import layer
from tests.support import layouts
from tests.support.opcheck import opcheck
from tests.support.oracle import make_case, run, saved_bytes


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize(
    "dtype, size", [(torch.bfloat16, 2), (torch.float32, 4)], ids=["bfloat16", "float32"]
)
def test_keeps_x_preactivation_gates_and_indices_and_nothing_else(dtype, size, gated):
    T = 512
    H = 64
    I = 96
    E = 4
    K = 2
    case = make_case(T, H, I, E, K, dtype, gated=gated, bias=True)
    leaves = [leaf.requires_grad_() for leaf in case.leaves.values()]
    x, up, down, weight, up_bias, down_bias = leaves

    def step(**options):
        return moe_mlp(
            x,
            up,
            down,
            weight,
            case.topk_idx,
            gated=gated,
            gate_up_bias=up_bias,
            down_bias=down_bias,
            **options,
        )

    Z = up.shape[1]
    kept, out = saved_bytes(step, [up, down, up_bias, down_bias])
    # in bfloat16, gated: 2H + 4IK and up to 12K a token
    assert size * T * (H + K * Z) < kept <= T * (size * (H + K * Z) + 12 * K) + 4 * (E + 1)
    kept, again = saved_bytes(lambda: step(recompute=True), [up, down, up_bias, down_bias])
    assert size * T * H < kept <= T * (size * H + 12 * K) + 4 * (E + 1)  # no pre-activation
    grads = [torch.autograd.grad(o, leaves, case.dout) for o in (out, again)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no tensor requires a gradient"])
def test_keeps_nothing_without_a_gradient(how):
    case = make_case(32, 33, 17, 4, 2)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
        how, torch.enable_grad
    )
    with context():
        kept, out = saved_bytes(lambda: moe_mlp(*case.leaves.values(), case.topk_idx), [])
    assert kept == 0 and not out.requires_grad


GPT_OSS = {"limit": 0.75, "up_offset": 1.0, "interleaved": True}


def form(case) -> Activation:
    return Activation(case.act, case.gated, **case.form)


OPCHECK = [
    pytest.param({}, {}, id="as it is used"),
    pytest.param({"T": 0}, {}, id="no tokens"),
    pytest.param(
        {"gated": False, "bias": True, "dtype": torch.bfloat16}, {}, id="biases, no gate, bfloat16"
    ),
    pytest.param(
        {"bias": True}, {"trainable": torch.tensor([True, False, True])}, id="frozen experts"
    ),
    pytest.param({"bias": True}, {"apart": [1, -1, 0]}, id="trainable weights apart"),
    pytest.param({}, {"save": False}, id="recompute"),
    pytest.param({"act": "quick_gelu", "bias": True}, {"form": GPT_OSS}, id="clamped, in turns"),
    pytest.param({}, {"change": layouts.transposed_weights}, id="weights stored in x out"),
    pytest.param({}, {"change": layouts.stride_zero}, id="E views of one expert"),
    pytest.param({}, {"change": layouts.transposed_x}, id="x transposed"),
    pytest.param({}, {"change": layouts.transposed_gates}, id="weights and ids stored [K, T]"),
]


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("sizes, options", OPCHECK)
def test_opcheck(sizes, options, backend):
    if backend == "triton" and not interpreted():
        pytest.skip("on a GPU test_moe_mlp_kernel_graph.py checks it")
    case = make_case(**{"T": 5, "H": 8, "I": 6, "E": 3, "K": 2} | sizes)
    if "change" in options:
        options["change"](case)
    case.form = options.get("form", {})
    if "change" in options:
        leaves = case.leaves
    else:
        leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    v = case.view(leaves)
    weights = (v["up"], v["down"])
    biases = (v.get("up_bias"), v.get("down_bias"))
    trainable = options.get("trainable")
    save = options.get("save", True)
    apart = (None, None)
    if "apart" in options:
        trainable = torch.tensor(options["apart"], dtype=torch.int32)
        apart = [torch.randn(2, *v[name].shape[1:]).requires_grad_() for name in ("up", "down")]
        weights = (v["up"].detach(), v["down"].detach())
    # test_moe_mlp_kernel_graph.py traces the other backend's
    is_traced = backend == "torch"
    experts = ExpertStacks(*weights, *biases, trainable, *apart, form(case)).pack()
    op = torch.ops.moe_runtime.moe_mlp
    opcheck(op, (v["x"], v["topk_weight"], case.topk_idx, *experts, save, backend), is_traced)
    x, weight, *experts = (
        t.detach() if isinstance(t, torch.Tensor) else t
        for t in (v["x"], v["topk_weight"], *experts)
    )
    _, *kept = op(x, weight, case.topk_idx, *experts, save, backend)
    every = [True] * 4 + [bias is not None for bias in biases]
    for needs in (every, [True, False, False, True, False, False], [False] * 6):
        args = (case.dout, x, weight, *experts, *kept, needs, backend)
        opcheck(torch.ops.moe_runtime.moe_mlp_backward, args, is_traced)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "change",
    [None, layouts.transposed_weights, layouts.stride_zero],
    ids=["plain", "weights in x out", "stride 0"],
)
@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_compiles_without_a_graph_break(recompute, change, dynamic):
    torch._dynamo.reset()
    case = make_case(12, 33, 17, 4, 2)
    if change:
        change(case)
    if not dynamic:
        leaves = case.view({name: leaf.requires_grad_() for name, leaf in case.leaves.items()})
        assert (
            torch._dynamo.explain(moe_mlp)(*leaves.values(), case.topk_idx).graph_break_count == 0
        )
    compiled = torch.compile(
        layer(recompute=recompute), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for T in (12, 29, 5) if dynamic and change is None else (12,):
        other = case if T == 12 else make_case(T, 33, 17, 4, 2)
        got = run(other, compiled)
        want = run(other, layer(recompute=recompute))
        assert all(torch.equal(got[name], want[name]) for name in want)
