"""The launchers of kernels/fusion.py alone: tiles, configs, labels that are not there, offsets,
mutants.
"""

import numpy as np
import pytest
import torch

from tests.ops.test_fusion import IGNORED, sample
from tests.support.mutants import edited, noting
from tests.support.oracle import mismatches

pytest.importorskip("triton")

from moe_runtime.kernels import fusion

BOUND = 5e-6
NAN = float("nan")


def config(m, n, k, precision="ieee", group=8):
    return fusion.FusionTile(m, n, k, 4, 2, precision, group)


def mixed(hidden, heads, gate, V):
    """Each specialist's logits [S, T, V] and the mixture's [T, V], in float64."""
    parts = torch.stack([h.double() @ head[:V].double().t() for h, head in zip(hidden, heads)])
    return parts, torch.einsum("ts,stv->tv", gate.double(), parts)


def wanted(case, V, scale):
    """What the launchers return, in float64."""
    hidden, heads, gate, labels = case
    parts, logits = mixed(hidden, heads, gate, V)
    p = logits.softmax(1)
    valid = labels != IGNORED
    y = labels.clamp_min(0)
    hot = torch.nn.functional.one_hot(y, V).double()
    score = torch.einsum("tv,stv->ts", p - hot, parts)
    return {
        "nll": torch.where(valid, -logits.log_softmax(1).gather(1, y[:, None])[:, 0], 0.0),
        "score": torch.where(valid[:, None], score, 0.0),
        "dlogits": (p - hot) * scale.double()[:, None],
    }


def launched(module, case, V, scale, tile=None):
    """What the launchers return: the loss twice, with the gate's gradient and with the logits'."""
    hidden, heads, gate, labels = case
    if tile is None:
        nll, score = module.fused_loss_forward(gate, labels, hidden, heads, V, IGNORED, True)
    else:
        nll, _, score = module._forward(gate, labels, hidden, heads, V, IGNORED, True, config=tile)
    again, dlogits = module.fused_logits_backward(gate, labels, scale, hidden, heads, V, IGNORED)
    return {"nll": nll, "score": score, "dlogits": dlogits}, again


TILES = [
    pytest.param(config(16, 16, 16), id="16x16x16"),
    pytest.param(config(64, 16, 32, group=1), id="64x16x32"),
    pytest.param(config(16, 64, 64), id="16x64x64"),
    pytest.param(config(32, 128, 16, "tf32", group=2), id="tf32"),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "T, sizes, V",
    [(37, (33, 16, 48), 50), (64, (64, 64), 128), (1, (17,), 130), (90, (16,) * 5, 9)],
)
def test_every_tile(tile, T, sizes, V, device):
    case = sample(T, sizes, [V + s for s in range(len(sizes))], device=device)
    labels = case[3]
    labels[0] = V - 1
    scale = torch.where(labels == IGNORED, 0.0, torch.rand(T, device=device))
    got, again = launched(fusion, case, V, scale, tile)
    assert not mismatches(got, wanted(case, V, scale), BOUND)
    torch.testing.assert_close(again, got["nll"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_are_mixed_in_float32(dtype, device):
    """A loss of products that nobody rounded; the logits' gradient rounded once."""
    case = sample(40, (48, 33), (70, 71), dtype, device)
    scale = torch.where(case[3] == IGNORED, 0.0, torch.rand(40, device=device))
    got, _ = launched(fusion, case, 70, scale)
    want = wanted(case, 70, scale)
    rounded = want["dlogits"].to(dtype).double()
    assert got["dlogits"].dtype == dtype
    assert (got["dlogits"].double() - want["dlogits"]).norm() <= 1.01 * (
        rounded - want["dlogits"]
    ).norm()
    assert not mismatches(
        {n: got[n] for n in ("nll", "score")}, {n: want[n] for n in ("nll", "score")}, BOUND
    )


@pytest.mark.parametrize("label", [50, 63, 64, 10**6, -5])
def test_a_label_behind_the_vocabulary_is_nan(label, device):
    """50 to 63 are columns of the last tile."""
    hidden, heads, gate, labels = sample(4, (16, 16), (50, 70), device=device, ignored=0)
    labels[2] = label
    nll, score = fusion.fused_loss_forward(gate, labels, hidden, heads, 50, IGNORED, True)
    assert nll.isnan().tolist() == [False, False, True, False] == score.isnan().all(1).tolist()


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_an_ignored_token_may_overflow(device):
    hidden, heads, gate, labels = sample(4, (16, 16), (50, 70), device=device, ignored=0)
    hidden[0][1], labels[1] = 3e38, IGNORED
    scale = (labels != IGNORED).float()
    nll, score = fusion.fused_loss_forward(gate, labels, hidden, heads, 50, IGNORED, True)
    _, dlogits = fusion.fused_logits_backward(gate, labels, scale, hidden, heads, 50, IGNORED)
    assert (
        nll.isfinite().all()
        and score.isfinite().all()
        and not dlogits[1].any()
        and dlogits.isfinite().all()
    )


def test_large_logits_do_not_overflow(device):
    case = sample(12, (16, 16), (90, 90), device=device, ignored=0)
    for h in case[0]:
        h *= 300
    scale = torch.ones(12, device=device)
    got, _ = launched(fusion, case, 90, scale)
    assert not mismatches(got, wanted(case, 90, scale), 1e-4)


@pytest.mark.parametrize("H", [1, 17, 512, 700])
@pytest.mark.parametrize("outputs", [(True, True), (True, False), (False, True), (False, False)])
def test_hidden_backward(H, outputs, device):
    dx = torch.randn(13, H, device=device)
    hidden = torch.randn(13, H, device=device)
    gate = torch.rand(13, 3, device=device)
    dgate = torch.full((13, 3), NAN, device=device)
    dhidden, scaled = (torch.full_like(dx, NAN) if wants else None for wants in outputs)
    fusion.fused_hidden_backward(dx, hidden, gate[:, 1], dgate[:, 1], dhidden, scaled)
    want = {"dgate": (dx.double() * hidden.double()).sum(1)}
    got = {"dgate": dgate[:, 1]}
    for name, out, factor in (("dhidden", dhidden, dx), ("scaled", scaled, hidden)):
        if out is not None:
            got[name], want[name] = out, gate[:, 1:2].double() * factor.double()
    assert (
        not mismatches(got, want, BOUND) and dgate[:, 0].isnan().all() and dgate[:, 2].isnan().all()
    )


def test_config_fits_the_gpu():
    for arch in (80, 86, 89, 90, 100, 103, 120):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for sizes in ((5120,) * 3, (4096,) * 2, (2048,) * 7, (1024,) * 40, (4097, 33)):
                for expect in (False, True):
                    c = fusion.fusion_config(arch, dtype, "tf32", sizes, expect)
                    elements = c.num_stages * c.BLOCK_K * (c.BLOCK_M + c.BLOCK_N)
                    shared = elements * dtype.itemsize
                    assert shared <= 99 << 10 or (
                        shared <= 160 << 10 and arch in (80, 90, 100, 103)
                    )
                    assert min(c.BLOCK_M, c.BLOCK_N, c.BLOCK_K) >= 16
                    # accumulators of all specialists in 8 warps' registers
                    accumulators = c.BLOCK_M * c.BLOCK_N * min(len(sizes), 32)
                    assert not expect or accumulators <= 160 * 256


# the right element beyond 2^31
def test_logits_beyond_int32(tmp_path):
    """Rows of 2^30 ids: the third lies at 2^31. One tile of many, on a file without content."""
    if torch.cuda.is_available():
        pytest.skip("a file is the CPU's")
    V = 1 << 30
    T = 4
    hidden = torch.randn(T, 16)
    head = torch.randn(32, 16)
    logits = torch.from_numpy(np.memmap(tmp_path / "logits", np.float32, "w+", shape=(T, V)))
    gate = torch.ones(T, 1)
    labels = torch.zeros(T, dtype=torch.int64)
    partial = torch.empty(2, T)
    target = torch.empty(T)
    constants = {"S": 1, "SIZES": (16,), "EXPECT": False, "TILE": config(16, 32, 16)}
    out = fusion.FusedSums(logits, partial, target)
    fusion._fused_logits_fwd_kernel[(1,)](
        (hidden,), (head,), gate, labels, out, T, V, 1, **constants, enable_fp_fusion=True
    )
    want = hidden @ head.t()
    torch.testing.assert_close(logits[:, :32], want)
    torch.testing.assert_close(target, want[:, 0])
    lse = want.logsumexp(1)
    scale = torch.rand(T)
    fusion._fused_logits_bwd_kernel[(T, 1)](
        logits, lse, scale, labels, logits, V, BLOCK_V=32, enable_fp_fusion=True
    )
    softmax = want.softmax(1)
    softmax[:, 0] -= 1
    torch.testing.assert_close(logits[:, :32], softmax * scale[:, None])


# mutants of the kernels' source; each has to be caught by the checks above
def caught(module) -> list[str]:
    """What the checks say of the launchers of `module`."""
    torch.manual_seed(0)
    found = []
    tile = config(16, 32, 16, group=2)
    for T, sizes, V in ((21, (33, 48), 70), (18, (16, 17, 16), 33)):
        hidden, heads, gate, labels = case = sample(
            T, sizes, [V + 3 * s for s in range(len(sizes))]
        )
        labels[-1] = V - 1
        scale = torch.where(labels == IGNORED, 0.0, 0.5 + torch.rand(T))
        dgate = torch.full_like(gate, NAN)
        x, dx = torch.randn(2, T, 520)  # two blocks
        dhidden, scaled = torch.full((2, T, 520), NAN)
        want = wanted(case, V, scale) | {"dgate": (dx.double() * x.double()).sum(1)}
        want |= {"dhidden": gate[:, 1:2].double() * dx, "scaled": gate[:, 1:2].double() * x}
        with noting(found):
            got, again = launched(module, case, V, scale, tile)
            got |= {"again": again}
            module.fused_hidden_backward(dx, x, gate[:, 1], dgate[:, 1], dhidden, scaled)
            got |= {"dgate": dgate[:, 1], "dhidden": dhidden, "scaled": scaled}
            found += mismatches(got, want | {"again": want["nll"]}, BOUND)
            labels = labels.clone()
            labels[3] = V  # a column of the last tile, and an id that the second specialist has
            nll = module._forward(gate, labels, hidden, heads, V, IGNORED, False, config=tile)[0]
            found += [] if nll.isnan().tolist() == [t == 3 for t in range(T)] else [f"nll is {nll}"]
    return found


MUTANTS = [
    pytest.param("rows = (t < T)", "rows = (t <= T)", id="a token too many"),
    pytest.param("columns = (v < V)", "columns = (v <= V)", id="an id too many is read"),
    pytest.param("if H % BLOCK_K != 0:", "if False:", id="columns behind a state's end"),
    pytest.param(
        "range(0, H, BLOCK_K)", "range(0, H - BLOCK_K, BLOCK_K)", id="last columns left out"
    ),
    pytest.param(
        "acc = tl.dot(a, b, acc,", "acc = tl.dot(a, b, tl.zeros_like(acc),", id="last columns only"
    ),
    pytest.param("head += BLOCK_K", "head += 0", id="first columns of the head for all"),
    pytest.param("head_ptrs[s]", "head_ptrs[0]", id="first head for all"),
    pytest.param("hidden_ptrs[s]", "hidden_ptrs[0]", id="first state for all"),
    pytest.param("row * S + s, mask", "row * S, mask", id="first weight for all"),
    pytest.param("logits += tl.load", "logits = tl.load", id="last specialist only"),
    pytest.param(
        'tl.where((v < V)[None, :], logits, float("-inf"))',
        "logits",
        id="ids behind the end in the softmax",
    ),
    pytest.param(
        "tl.minimum(tile_n * BLOCK_N + BLOCK_N, V)",
        "tile_n * BLOCK_N + BLOCK_N",
        id="label behind the end",
    ),
    pytest.param(
        "known = live & (label >= tile_n * BLOCK_N)",
        "known = live",
        id="earlier tiles write a label's logit",
    ),
    pytest.param(
        "v[None, :] == label[:, None]",
        "v[None, :] <= label[:, None]",
        id="logits up to the label's",
    ),
    pytest.param("row * tiles + tile_n", "row * tiles", id="one tile's sums"),
    pytest.param("row * tiles + tile_n", "tile_n * T + row", id="partials transposed"),
    pytest.param("field * (2 + s)", "field * 2", id="expectations of one specialist"),
    pytest.param(
        "tl.sum(p * parts[s], 1)", "tl.sum(parts[s], 1)", id="expectation without the softmax"
    ),
    pytest.param("target + 1 + s", "target + s", id="label's logits shifted"),
    pytest.param(
        "tl.where(hit, parts[s], 0.0)",
        "tl.where(hit, logits, 0.0)",
        id="the mixture's logit for each",
    ),
    pytest.param("p - 1, p)", "p, p)", id="softmax without the label"),
    pytest.param("v == tl.load(labels_ptr", "v <= tl.load(labels_ptr", id="ids up to the label"),
    pytest.param(
        "scale = tl.load(scale_ptr + t)",
        "scale = tl.load(scale_ptr)",
        id="first token's scale for all",
    ),
    pytest.param("tl.load(lse_ptr + t)", "tl.load(lse_ptr)", id="first token's sum for all"),
    pytest.param("mask=v < V)\n\n", "mask=v <= V)\n\n", id="an id too many is written"),
    pytest.param(
        "total += tl.sum(dx * hidden, 1)",
        "total = tl.sum(dx * hidden, 1)",
        id="last columns of the gate's gradient",
    ),
    pytest.param(
        "gate[:, None] * dx", "gate[:, None] * hidden", id="gradient of a state is the state"
    ),
    pytest.param("gate[:, None] * hidden", "hidden", id="state is not scaled"),
    pytest.param("gate_ptr + row * stride_gate", "gate_ptr + row", id="weights without a stride"),
    pytest.param("partial[1] * share", "partial[1]", id="sums of different highest logits"),
    pytest.param(
        "partial[2:] * share", "partial[2:]", id="expectations of different highest logits"
    ),
    pytest.param("torch.where(valid, lse", "torch.where(lse < 1e9, lse", id="ignored tokens count"),
    pytest.param(
        "BLOCK_H=min(512, triton.next_power_of_2(H))",
        "BLOCK_H=16",
        id="nothing: blocks are only slower",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("old, new", MUTANTS[:-1])
def test_mutant_is_caught(old, new, tmp_path):
    assert caught(edited(fusion, tmp_path, old, new))


@pytest.mark.parametrize("old, new", [("", ""), MUTANTS[-1].values])
def test_unharmed_kernels_pass(old, new, tmp_path):
    assert not caught(edited(fusion, tmp_path, old, new))
