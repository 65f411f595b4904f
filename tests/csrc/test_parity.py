"""Backend "cuda" on the emulator against "torch" through the public ops, bit for bit where the
order of operations is fixed.
"""

import pytest
import torch

from moe_runtime import backends
from moe_runtime.native.library import cuda
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops import moe_layer as moe_layer_op
from moe_runtime.ops import moe_mlp as moe_mlp_op
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.tools.conformance.draw import Draw
from tests.conformance.test_ops import check
from tests.csrc import emulator
from tests.support.oracle import relative_error

pytestmark = [emulator.needs_cxx, pytest.mark.usefixtures("emulated")]
needs_interpreter = pytest.mark.skipif(
    not backends.interpreted(), reason="the emulator works on CPU tensors"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["route", "dispatch", "combine", "merge_experts", "merged_linear"])
def test_is_the_equation(name, dtype):
    """Uses the case table that every backend is tested with, with every layout and kind of ids."""
    for number in range(24):
        check(name, "cuda", "cpu", Draw.numbered(dtype, number))


@pytest.mark.parametrize(
    "T, E", [(5, 7), (1700, 7), (330, 30)], ids=["one block", "small rows", "wide rows"]
)
def test_the_plan_with_router_counts_and_maps_is_one_launch(T, E):
    K = 6
    logits = torch.randn(T, E)
    count = cuda_kernels.new_block_count(logits, 1)
    _, idx = cuda_kernels.route_forward(logits, None, K, "xft", 1, block_count=count)
    assert (
        count.sum(0).tolist()
        == torch.bincount(
            idx.flatten(),
            minlength=E + 1,
        ).tolist()
    )
    tokens = cuda_kernels.block_tokens(T, E)
    *got, maps = cuda_kernels.route_plan(
        idx,
        E + 1,
        (16, 128),
        1,
        count,
        tokens,
    )
    expected = dispatch(idx, E + 1, "torch")
    for pair in zip(got, expected, strict=True):
        assert torch.equal(*pair)
    *_, wanted = cuda_kernels.route_plan(idx, E + 1, (16, 128), 1)
    for tiles, others in zip(maps, wanted, strict=True):
        assert torch.equal(tiles, others)


@needs_interpreter
@pytest.mark.parametrize("shared", ["group", "dense"])
@pytest.mark.parametrize("T", [0, 1, 9])
def test_whole_layer_with_csrc_and_triton_kernels(T, shared, monkeypatch, tolerance):
    """moe_layer and moe_mlp with the kernels of csrc/ around Triton's matrix products equal
    Triton's own.
    """
    x = torch.randn(T, 16)
    router = torch.randn(3, 16)
    up = torch.randn(4, 24, 16)
    down = torch.randn(4, 16, 12) / 16
    found = {}
    launched = []
    launch = cuda.launch
    monkeypatch.setattr(
        cuda, "launch", lambda name, *args: launched.append(name) or launch(name, *args)
    )
    for name in ("triton", "cuda"):
        monkeypatch.setattr(
            moe_layer_op,
            "pick",
            lambda *_, name=name: name,
        )
        monkeypatch.setattr(
            moe_mlp_op,
            "pick",
            lambda *_, name=name: name,
        )
        leaves = [t.clone().requires_grad_() for t in (x, router, up, down)]
        layer = moe_layer_op.moe_layer(
            *leaves[:2],
            ExpertStacks(*leaves[2:], shared=shared),
            3,
            "xft",
        )
        weight = layer.topk_weight.detach().requires_grad_()
        out = moe_mlp_op.moe_mlp(
            x,
            leaves[2],
            leaves[3],
            weight,
            layer.topk_idx,
            shared=shared,
        )
        grads = torch.autograd.grad(
            layer.out.square().sum() + out.square().sum(), [*leaves, weight]
        )
        found[name] = [
            layer.out.detach(),
            out.detach(),
            layer.topk_idx,
            *grads,
        ]
    for expected, got in zip(found["triton"], found["cuda"], strict=True):
        assert relative_error(got, expected) < tolerance[torch.float32]
    # one launch of the plan includes the maps; Triton computes the gradients of the products
    plan = ["moert_route_plan", "moert_combine_forward"]
    assert launched == ["moert_route_forward", *plan, *plan, "moert_route_backward"]


def test_what_the_kernels_do_not_take_is_refused():
    with pytest.raises(
        ValueError, match="num_experts must be at most 1024 for backend 'cuda', but got 1025"
    ):
        dispatch(
            torch.zeros(2, 2, dtype=torch.int64),
            1025,
            "cuda",
        )
    with pytest.raises(ValueError, match="Use backend 'torch' for float64"):
        combine(
            torch.randn(4, 2, dtype=torch.float64),
            torch.rand(2, 2),
            torch.arange(4),
            "cuda",
        )
    idx = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="moert_route_plan failed: an argument is invalid"):
        cuda_kernels.route_plan(idx, 4, (1,), -1)
