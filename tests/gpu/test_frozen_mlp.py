"""Frozen experts, dense and packed, with low-rank terms natively, at sizes that use the tiles of a
real layer.

Without a GPU: tests/ops/test_frozen_mlp.py and test_frozen_mlp_packed.py, in the interpreter.
"""

import pytest
import torch

from moe_runtime.ops.frozen_mlp import frozen_mlp
from tests.ops import test_frozen_mlp as dense
from tests.ops import test_frozen_mlp_packed as packed
from tests.support.oracle import assert_parity, bounds, make_case, poison

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SMOOTH = packed.GPT_OSS._replace(limit=None)  # no clamp: rounding can move a value across its kink
# T, H, I, E, K. RAGGED: no block size divides a dimension, but rows are multiples of 16 bytes
EVEN = (1500, 512, 768, 6, 2)
RAGGED = (1500, 520, 712, 6, 2)
FEW = (40, 512, 768, 16, 4)


def case_of(sizes, ranks, form=None, in_out=False, **options):
    case = make_case(*sizes, BF16, **options)
    case.form = form or {}
    if in_out:
        for name in ("up", "down"):
            case.leaves[name] = dense.in_x_out(case.leaves[name])
    return dense.adapted(case, *ranks)


def layer(backend):
    return lambda *args: frozen_mlp(*args, backend=backend)[0]


def oracle(x, experts, topk_weight, topk_idx):
    """The experts with their low-rank terms merged in, each applied to all tokens."""
    pairs = (experts.up_lora, experts.down_lora)
    biases = (experts.up_bias, experts.down_bias)
    out = 0
    stacks = [stack.data for stack in (experts.up, experts.down)]
    stacks = [
        w if pair is None else w + pair.b.transpose(1, 2) @ pair.a for w, pair in zip(stacks, pairs)
    ]
    for e in range(experts.up.shape[0]):
        weight = torch.where(topk_idx == e, topk_weight, 0).sum(
            1,
            keepdim=True,
        )
        h = experts.activation.apply(x @ stacks[0][e].t() + biases[0][e])
        out = out + weight * (h @ stacks[1][e].t() + biases[1][e])
    return out


@pytest.mark.parametrize(
    "in_out",
    [False, True],
    ids=["out x in", "in x out"],
)
@pytest.mark.parametrize(
    "form",
    [{}, {"limit": 7.0, "up_offset": 1.0, "interleaved": True}],
    ids=["gate, up", "GPT-OSS"],
)
@pytest.mark.parametrize(
    "ranks",
    [(16, 16), (64, 0), (0, 5)],
    ids=str,
)
@pytest.mark.parametrize(
    "sizes",
    [EVEN, RAGGED, FEW],
    ids=["even", "ragged", "few rows"],
)
def test_dense_stacks(sizes, ranks, form, in_out, tolerance):
    if form:
        act = "quick_gelu"
    else:
        act = "silu"
    case = case_of(
        sizes,
        ranks,
        form=form,
        in_out=in_out,
        routing="dropped",
        act=act,
        bias=True,
    )
    expected = dense.run(case, oracle, torch.float64, "cuda")
    limit = bounds(
        dense.run(case, layer("torch"), device="cuda"),
        expected,
        tolerance[BF16],
    )
    poison()
    assert_parity(dense.run(case, layer("triton"), device="cuda"), expected, limit)


@pytest.mark.parametrize("T", [1500, 40])
@pytest.mark.parametrize(
    "form, options",
    [
        pytest.param("nf4", {"H": 512, "I": 768}, id="nf4"),
        pytest.param(
            "nf4_t",
            {"H": 512, "I": 384, "activation": SMOOTH},
            id="nf4 of GPT-OSS",
        ),
        pytest.param(
            "mxfp4",
            {"H": 480, "I": 352, "activation": SMOOTH},
            id="mxfp4 of GPT-OSS",
        ),
        pytest.param("fp8_block", {"H": 520, "I": 384}, id="fp8"),
        pytest.param("int8", {"H": 520, "I": 712}, id="int8"),
    ],
)
def test_packed_stacks(form, options, T, tolerance):
    case = packed.Case(
        form,
        T=T,
        dtype=BF16,
        E=6,
        rank=16,
        **options,
    )
    expected = case.oracle()
    limit = bounds(
        case.run("torch", "cuda"),
        expected,
        tolerance[BF16],
    )
    poison()
    assert_parity(case.run("triton", "cuda"), expected, limit)
