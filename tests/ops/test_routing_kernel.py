"""The router's kernels alone: gradients of many experts, layouts, what is saved, offsets."""

import numpy as np
import pytest
import torch

from moe_runtime.ops.routing import route, route_reference
from tests.ops.test_routing import results, slots
from tests.support.oracle import GATES, assert_parity, assert_same, saved_bytes

pytest.importorskip("triton")


def run(logits, top_k, gate, dweight):
    return results(route, logits, top_k, gate, dweight, backend="triton")


@pytest.mark.parametrize("gate", GATES)
def test_gradient_is_that_of_the_reference_in_float64(gate, device):
    logits = 2 * torch.randn(131, 64, device=device)
    dweight = torch.randn(131, slots(gate, 8), device=device)
    got = run(logits, slots(gate, 8), gate, dweight)
    want = results(route_reference, logits.double(), slots(gate, 8), gate, dweight)
    assert_parity(got, want, 5e-6)


def test_saves_the_logits_as_they_came_and_the_ids(device):
    logits = torch.randn(64, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    step = lambda: route(logits, 3, "xft", backend="triton").topk_weight  # noqa: E731
    saved, _ = saved_bytes(step, [logits])
    assert saved == 64 * 3 * 4


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat(1, 2)[:, ::2], id="strided columns"),
        pytest.param(lambda x: x.repeat_interleave(2, 0)[::2], id="every other row"),
        pytest.param(lambda x: torch.cat([x, x, x], 1)[:, 3:10], id="columns of a wider matrix"),
        pytest.param(lambda x: x[:1].expand(19, 7), id="one row for all tokens"),
        pytest.param(lambda x: x[3:4], id="one row"),
        pytest.param(lambda x: x[:, :1].t().contiguous().t(), id="one column"),
    ],
)
@pytest.mark.parametrize("gate", ["xft", "softmax_topk_renorm", "sigmoid_topk"])
def test_layouts(gate, view, device):
    logits = view(torch.randn(19, 7, device=device))
    k = slots(gate, min(2, logits.shape[1]))
    plain = logits.clone(memory_format=torch.contiguous_format)
    dweight = torch.randn(len(logits), k, device=device)
    for upstream in (dweight, dweight[:1, :1].expand(len(logits), k)):
        got = run(logits, k, gate, upstream)
        assert_same(got, run(plain, k, gate, upstream.contiguous()))
        assert got["dlogits"].is_contiguous()


@pytest.mark.parametrize(
    "rows, stride",
    [
        pytest.param(2, 2**31 - 1, id="2^31 - 1"),
        pytest.param(2, 2**31 + 1, id="2^31 + 1"),
        pytest.param(34, 2**26 + 1, id="the second program begins behind 2^31"),
    ],
)
def test_offsets_beyond_int32(rows, stride, device):
    if device == "cuda":
        pytest.skip("calloc's trick is the CPU's")
    # calloc gives pages that take no memory before they are touched
    memory = torch.from_numpy(np.zeros((rows - 1) * stride + 8, dtype=np.float16))
    logits = memory.as_strided((rows, 7), (stride, 1))
    numbers = torch.randn(rows, 7).half()
    for t in range(rows):
        logits[t] = numbers[t]
    op = torch.ops.moe_runtime
    weight, idx = op.route(logits, None, 3, "xft", "triton")
    assert_same([weight, idx], list(op.route(numbers, None, 3, "xft", "triton")))
    dweight = torch.randn(rows, 3)
    assert torch.equal(
        op.route_backward(dweight, logits, idx, "xft", "triton"),
        op.route_backward(dweight, numbers, idx, "xft", "triton"),
    )
