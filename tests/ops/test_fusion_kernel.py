"""The launchers of kernels/fusion.py: tiles, configs, out-of-range labels, offsets."""

import itertools

import pytest
import torch

from tests.ops.test_fusion import IGNORED, sample
from tests.support.oracle import assert_parity

pytest.importorskip("triton")

from moe_runtime.kernels import fusion

BOUND = 5e-6
NAN = float("nan")


def config(m, n, k, precision="ieee", group=8):
    return fusion.FusionTile(m, n, k, 4, 2, precision, group)


def expected(case, V, scale):
    """Compute the results of the launchers in float64."""
    hidden, heads, gate, labels = case
    parts = []
    for h, head in zip(hidden, heads, strict=True):
        parts.append(h.double() @ head[:V].double().t())
    parts = torch.stack(parts)
    logits = torch.einsum("ts,stv->tv", gate.double(), parts)
    valid = labels != IGNORED
    y = labels.clamp_min(0)
    dlogits = logits.softmax(1) - torch.nn.functional.one_hot(y, V).double()
    score = torch.einsum("tv,stv->ts", dlogits, parts)
    nll = -logits.log_softmax(1).gather(1, y[:, None])[:, 0]
    return {
        "nll": torch.where(valid, nll, 0.0),
        "score": torch.where(valid[:, None], score, 0.0),
        "dlogits": dlogits * scale.double()[:, None],
    }


def launched(case, V, scale, tile=None):
    """Return the results of the launchers; the backward one repeats the loss."""
    hidden, heads, gate, labels = case
    if tile is None:
        nll, score = fusion.fused_loss_forward(
            gate,
            labels,
            hidden,
            heads,
            V,
            IGNORED,
            True,
        )
    else:
        nll, _, score = fusion._forward(
            gate,
            labels,
            hidden,
            heads,
            V,
            IGNORED,
            True,
            config=tile,
        )
    again, dlogits = fusion.fused_logits_backward(
        gate,
        labels,
        scale,
        hidden,
        heads,
        V,
        IGNORED,
    )
    torch.testing.assert_close(again, nll)
    return {"nll": nll, "score": score, "dlogits": dlogits}


def scales(labels):
    return torch.where(
        labels == IGNORED,
        0.0,
        torch.rand(len(labels), device=labels.device),
    )


@pytest.mark.parametrize(
    "tile",
    [
        pytest.param(config(16, 16, 16), id="16x16x16"),
        pytest.param(config(64, 16, 32, group=1), id="64x16x32"),
        pytest.param(config(16, 64, 64), id="16x64x64"),
        pytest.param(config(32, 128, 16, "tf32", group=2), id="tf32"),
    ],
)
@pytest.mark.parametrize(
    "T, sizes, V",
    [
        (37, (33, 16, 48), 50),
        (64, (64, 64), 128),
        (1, (17,), 130),
        (90, (16,) * 5, 9),
    ],
)
def test_every_tile(tile, T, sizes, V, device):
    case = sample(
        T,
        sizes,
        range(V, V + len(sizes)),
        device=device,
    )
    labels = case[3]
    labels[0] = V - 1
    scale = scales(labels)
    assert_parity(
        launched(case, V, scale, tile),
        expected(case, V, scale),
        BOUND,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_are_mixed_in_float32(dtype, device):
    """The loss comes from unrounded products; the logits' gradient is rounded once."""
    case = sample(40, (48, 33), (70, 71), dtype, device)
    scale = scales(case[3])
    got = launched(case, 70, scale)
    want = expected(case, 70, scale)
    dlogits = got.pop("dlogits")
    exact = want.pop("dlogits")
    assert dlogits.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).norm()
    assert (dlogits.double() - exact).norm() <= 1.01 * rounding
    assert_parity(got, want, BOUND)


@pytest.mark.parametrize("label", [50, 63, 64, 10**6, -5])
def test_a_label_behind_the_vocabulary_is_nan(label, device):
    """50 to 63 are columns of the last tile."""
    hidden, heads, gate, labels = sample(
        4,
        (16, 16),
        (50, 70),
        device=device,
        ignored=0,
    )
    labels[2] = label
    nll, score = fusion.fused_loss_forward(
        gate,
        labels,
        hidden,
        heads,
        50,
        IGNORED,
        True,
    )
    assert nll.isnan().tolist() == [False, False, True, False]
    assert score.isnan().all(1).tolist() == [False, False, True, False]


def test_large_logits_do_not_overflow(device):
    case = sample(
        12,
        (16, 16),
        (90, 90),
        device=device,
        ignored=0,
    )
    for h in case[0]:
        h *= 300
    scale = torch.ones(12, device=device)
    assert_parity(
        launched(case, 90, scale),
        expected(case, 90, scale),
        1e-4,
    )


@pytest.mark.parametrize("H", [1, 17, 512, 700])
@pytest.mark.parametrize("outputs", itertools.product([True, False], repeat=2))
def test_hidden_backward(H, outputs, device):
    dx = torch.randn(13, H, device=device)
    hidden = torch.randn(13, H, device=device)
    gate = torch.rand(13, 3, device=device)
    dgate = torch.full((13, 3), NAN, device=device)
    weight = gate[:, 1:2].double()
    got = {"dgate": dgate[:, 1]}
    want = {"dgate": (dx.double() * hidden.double()).sum(1)}
    made = []
    for name, is_made, factor in zip(
        ("dhidden", "scaled"),
        outputs,
        (dx, hidden),
        strict=True,
    ):
        made.append(torch.full_like(dx, NAN) if is_made else None)
        if is_made:
            got[name] = made[-1]
            want[name] = weight * factor.double()
    fusion.fused_hidden_backward(
        dx,
        hidden,
        gate[:, 1],
        dgate[:, 1],
        *made,
    )
    assert_parity(got, want, BOUND)
    assert dgate[:, ::2].isnan().all()


ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
WIDTHS = ((5120,) * 3, (4096,) * 2, (2048,) * 7, (1024,) * 40, (4097, 33))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", WIDTHS)
def test_config_fits_the_gpu(sizes, dtype):
    for arch in ARCHITECTURES:
        limit = 160 << 10 if arch in (80, 90, 100, 103) else 99 << 10
        for expect in (False, True):
            c = fusion.fusion_config(arch, dtype, "tf32", sizes, expect)
            elements = c.num_stages * c.BLOCK_K * (c.BLOCK_M + c.BLOCK_N)
            assert elements * dtype.itemsize <= limit
            assert min(c.BLOCK_M, c.BLOCK_N, c.BLOCK_K) >= 16
            # accumulators of all specialists in the registers of 8 warps
            accumulators = c.BLOCK_M * c.BLOCK_N * min(len(sizes), 32)
            assert not expect or accumulators <= 160 * 256
