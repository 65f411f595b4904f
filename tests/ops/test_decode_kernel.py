"""With few slots, the fused launches compute the same as the steps that they replace."""

import pytest
import torch

from moe_runtime.config import GATES, SHARED_GATES
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.support.aot import record
from tests.support.oracle import assert_same, choose_experts, relative_error

pytest.importorskip("triton")
import triton.runtime.interpreter as interpreter

from moe_runtime.kernels import decode, dispatch, routing

NAN = float("nan")


@pytest.fixture
def both(monkeypatch):
    """both(step) returns the results of `step` with the fused launches, and without."""

    def run(step):
        fused = step()
        monkeypatch.setattr(decode, "SMALL", 0)
        plain = step()
        monkeypatch.undo()
        return fused, plain

    return run


@pytest.fixture
def launches(monkeypatch):
    """The names of the launched kernels."""
    names = []
    run = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return names


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
@pytest.mark.parametrize(
    "T, E, K, BLOCK_M, first, routing_of",
    [
        pytest.param(1, 8, 2, 16, 0, "random", id="one token"),
        pytest.param(19, 4, 2, 16, 0, "dropped", id="dropped slots"),
        pytest.param(64, 100, 8, 16, 0, "random", id="512 slots, more experts than a step's"),
        pytest.param(33, 3, 2, 64, 0, "skip", id="an expert without tokens, tiles of 64 rows"),
        pytest.param(20, 5, 2, 16, 1, "random", id="the shared expert's rows are not the kernels'"),
    ],
)
def test_plan_is_the_sort_and_the_map(T, E, K, BLOCK_M, first, routing_of, dtype, device):
    ids = choose_experts(T, E, K, routing_of).to(device, dtype)
    weight, idx, plan = decode.plan_forward(ids, E, BLOCK_M, first)
    offsets, _, row_slot, slot_row = dispatch.dispatch_forward(ids, E)
    tiles = dispatch.tile_map(offsets, ids.numel(), BLOCK_M, first)
    assert weight is None
    assert_same(list(plan), [offsets, row_slot, slot_row, tiles])
    assert idx.equal(ids)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "T, E, K",
    [
        (1, 8, 2),
        (21, 9, 3),
        (64, 70, 8),
    ],
)
def test_routes_as_the_router_does(T, E, K, gate, device):
    shared = int(gate in SHARED_GATES)
    logits = torch.randn(T, E - shared, device=device)
    weight, idx, plan = decode.plan_forward(
        None, E, 16, logits=logits, top_k=K, gate=gate, shared=shared
    )
    want_weight, want_idx = routing.route_forward(logits, None, K, gate, shared)
    assert_same([weight, idx], [want_weight, want_idx])
    assert_same(
        list(plan),
        list(
            decode.plan_forward(
                want_idx,
                E,
                16,
            )[2]
        ),
    )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "T, K, bias, transposed",
    [
        pytest.param(1, 2, False, False, id="one token"),
        pytest.param(17, 3, True, False, id="biases"),
        pytest.param(30, 2, True, True, id="stacks stored in x out"),
        pytest.param(60, 4, False, False, id="the weighted sum in a separate launch"),
    ],
)
def test_same_experts(T, K, bias, transposed, dtype, both, device, tolerance):
    E = 5
    H = 40
    I = 24
    torch.manual_seed(T)
    x = torch.randn(T, H).to(device, dtype) / 4
    up = torch.randn(E, 2 * I, H).to(device, dtype) / 4
    down = torch.randn(E, H, I).to(device, dtype) / 4
    if transposed:
        up = up.transpose(1, 2).contiguous().transpose(1, 2)
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    biases = {}
    if bias:
        biases["gate_up_bias"] = torch.randn(E, 2 * I).to(device, dtype)
        biases["down_bias"] = torch.randn(E, H).to(device, dtype)
    idx = choose_experts(T, E, K, "dropped").to(device)
    weight = torch.where(
        (idx >= 0) & (idx < E),
        torch.rand(T, K, device=device),
        NAN,
    )
    fused, plain = both(
        lambda: moe_mlp(
            x,
            up,
            down,
            weight,
            idx,
            backend="triton",
            **biases,
        )
    )
    # the tile sizes differ, so the order of sums depends on the processor
    assert relative_error(fused, plain) <= tolerance[dtype]


@pytest.mark.parametrize("gate", ["xft", "softmax_topk_renorm"])
@pytest.mark.parametrize(
    "T, fused_names, plain_count",
    [
        pytest.param(
            2,
            ["_plan_kernel", "_up_fwd_kernel", "_down_combine_kernel"],
            6,
            id="3 launches up to 128 rows",
        ),
        pytest.param(
            48,
            ["_plan_kernel", "_up_fwd_kernel", "_grouped_gemm_fwd_kernel", "_combine_fwd_kernel"],
            8,
            id="4 of 512",
        ),
    ],
)
def test_launches_of_a_layer(T, fused_names, plain_count, gate, both, launches, device, tolerance):
    E = 6
    H = 16
    I = 16
    x = torch.randn(T, H, device=device)
    router = torch.randn(E - (gate in SHARED_GATES), H, device=device)
    experts = ExpertStacks(
        torch.randn(E, 2 * I, H, device=device),
        torch.randn(E, H, I, device=device),
    )

    def step():
        launches.clear()
        out = moe_layer(x, router, experts, 4, gate, backend="triton")
        return out, list(launches)

    (fused, names), (plain, many) = both(step)
    assert names == fused_names
    assert len(many) == plain_count
    for a, b in zip(fused, plain, strict=True):
        assert relative_error(a, b) <= tolerance[torch.float32]


@pytest.mark.parametrize(
    "E, K",
    [
        (8, 2),
        (128, 8),
        (64, 6),
    ],
)
def test_a_new_number_of_tokens_compiles_at_most_once_more(E, K):
    """A server's batch sizes vary: the launch has two sizes, whatever the number of tokens."""

    def step():
        for T in range(1, decode.SMALL // K + 1):
            logits = torch.empty(T, E, dtype=torch.bfloat16, device="meta")
            decode.plan_forward(
                None,
                E,
                16,
                logits=logits,
                top_k=K,
                gate="softmax_topk",
            )

    variants = {str((case.signature, case.constants)) for case in record(step)}
    assert len(variants) == 2
