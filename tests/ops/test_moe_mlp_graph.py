"""The experts of a layer under autograd, autocast and torch.compile on every backend."""

import pytest
import torch

from moe_runtime.ops.moe_mlp import moe_mlp
from tests.support.layer import moe_layer
from tests.support.oracle import assert_same, make_case, run, saved_bytes

OP = "moe_mlp"


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keeps_x_preactivation_gates_and_indices_and_nothing_else(dtype, gated, backend, device):
    T = 64
    H = 64
    K = 2
    case = make_case(T, H, 64, 2, K, dtype, gated=gated, bias=True)
    leaves = [leaf.to(device).requires_grad_() for leaf in case.leaves.values()]
    x, up, down, weight, up_bias, down_bias = leaves
    idx = case.topk_idx.to(device)

    def step(recompute):
        return moe_mlp(
            x,
            up,
            down,
            weight,
            idx,
            gated=gated,
            gate_up_bias=up_bias,
            down_bias=down_bias,
            recompute=recompute,
            backend=backend,
        )

    size = dtype.itemsize
    pre_activation = size * K * up.shape[1]
    rest = T * 12 * K + 4 * (2 + 1)  # weights, indices and offsets
    weights = [up, down, up_bias, down_bias]
    kept, out = saved_bytes(lambda: step(recompute=False), weights)
    assert T * (size * H + pre_activation) < kept <= T * (size * H + pre_activation) + rest
    kept, again = saved_bytes(lambda: step(recompute=True), weights)
    assert T * size * H < kept <= T * size * H + rest
    dout = case.dout.to(device)
    assert_same(
        torch.autograd.grad(again, leaves, dout),
        torch.autograd.grad(out, leaves, dout),
    )


def test_autocast_rounds_nothing(backend, device):
    case = make_case(13, 33, 17, 4, 2, bias=True)
    layer = moe_layer(backend=backend)
    expected = run(case, layer, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert_same(run(case, layer, device=device), expected)


@pytest.mark.parametrize("shared", ["group", "dense"])
def test_compiles_once_for_any_number_of_tokens(shared, backend, device):
    torch._dynamo.reset()
    layer = moe_layer(shared=shared, backend=backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (12, 29, 5):
        case = make_case(T, 33, 17, 4, 2, bias=True)
        case.topk_idx[:, 0] = 1
        case.topk_idx[:, 1] = 0
        assert_same(
            run(
                case,
                compiled,
                device=device,
            ),
            run(case, layer, device=device),
        )
