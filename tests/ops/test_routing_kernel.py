"""The router's kernels: what is saved, and offsets."""

import numpy as np
import pytest
import torch

from moe_runtime.ops.routing import route
from tests.support.oracle import assert_same, saved_bytes

pytest.importorskip("triton")


def test_saves_the_logits_as_they_came_and_the_ids(device):
    logits = torch.randn(64, 8, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step():
        return route(logits, 3, "xft", backend="triton").topk_weight

    saved, _ = saved_bytes(step, [logits])
    assert saved == 64 * 3 * 4


@pytest.mark.parametrize(
    "rows, stride",
    [
        pytest.param(2, 2**31 - 1, id="2^31 - 1"),
        pytest.param(2, 2**31 + 1, id="2^31 + 1"),
        pytest.param(34, 2**26 + 1, id="the second program starts after 2^31"),
    ],
)
def test_offsets_beyond_int32(rows, stride, device):
    if device == "cuda":
        pytest.skip("relies on calloc on the CPU")
    # untouched pages from calloc take no memory
    memory = torch.from_numpy(np.zeros((rows - 1) * stride + 8, dtype=np.float16))
    logits = memory.as_strided((rows, 7), (stride, 1))
    numbers = torch.randn(rows, 7).half()
    for t in range(rows):
        logits[t] = numbers[t]
    op = torch.ops.moe_runtime
    weight, idx = op.route(logits, None, 3, "xft", "triton")
    assert_same(
        [weight, idx],
        list(
            op.route(
                numbers,
                None,
                3,
                "xft",
                "triton",
            )
        ),
    )
    dweight = torch.randn(rows, 3)
    assert torch.equal(
        op.route_backward(dweight, logits, idx, "xft", "triton"),
        op.route_backward(dweight, numbers, idx, "xft", "triton"),
    )
