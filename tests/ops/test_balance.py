"""Balance losses against their formulas in plain Python, and their gradient against finite
differences (float64).
"""

import math

import pytest
import torch

from moe_runtime.config import MoEConfig
from moe_runtime.ops.balance import (
    balance_loss,
    cv2,
    cv2_loss,
    noisy_load,
    per_layer_loss,
    pooled_loss,
    selection_mask,
    switch_loss,
    top_k_loss,
)
from moe_runtime.ops.routing import route
from tests.support.oracle import GATES, SHARED, cv2_oracle, normal_cdf


def make_config(R=7, k=5, gate="xft", **kwargs):
    shared = gate in SHARED
    return MoEConfig(
        hidden_size=4,
        intermediate_size=4,
        num_experts=R + shared,
        top_k=k + shared,
        gate=gate,
        **kwargs,
    )


def softmax(row):
    exp = [math.exp(v - max(row)) for v in row]
    return [v / sum(exp) for v in exp]


def selected(row, k):
    return sorted(range(len(row)), key=lambda r: (-row[r], r))[:k]


def switch_in_python(logits: list[list[float]], k: int) -> float:
    """R sum_r f_r P_r, f_r = count_r / (T k), P_r = mean_t softmax(logits)[t, r]."""
    T = len(logits)
    R = len(logits[0])
    f = [sum(r in selected(row, k) for row in logits) / (T * k) for r in range(R)]
    P = [sum(softmax(row)[r] for row in logits) / T for r in range(R)]
    return R * sum(a * b for a, b in zip(f, P))


def importance_in_python(noisy, k, gate="xft"):
    """The vanilla gate's softmax runs over the selected logits alone (official code,
    TopKBalancedNoisyGate).
    """
    R = len(noisy[0])
    if gate == "topk_softmax":
        noisy = [
            [value if r in selected(row, k) else -math.inf for r, value in enumerate(row)]
            for row in noisy
        ]
    return [sum(softmax(row)[r] for row in noisy if r in selected(row, k)) for r in range(R)]


def load_in_python(clean, noise, scale, k, quirk):
    """P = Phi((clean - thr) / scale), thr the (k+1)-th noisy logit for those inside, else
    the k-th.
    """
    R = len(clean[0])
    load = [0.0] * len(clean[0])
    for lg, eps, ctl in zip(clean, noise, scale):
        noisy = [a + b for a, b in zip(lg, eps)]
        top = sorted(noisy, reverse=True)
        thr_in = top[k]
        thr_out = top[k - 1]
        for r in range(R):
            inside = (eps[r] if quirk else noisy[r]) > thr_in
            load[r] += normal_cdf((lg[r] - (thr_in if inside else thr_out)) / ctl[r])
    return load


def draw(T=23, R=7, spread=1.0):
    logits = spread * torch.randn(T, R)
    scale = torch.nn.functional.softplus(torch.randn(T, R)) + 1e-2
    return logits, torch.randn(T, R) * scale, scale


def test_cv2_is_the_squared_coefficient_of_variation():
    for values in ([1.0, 2.0, 4.0], [3.0, 3.0], [0.0, 0.0, 0.0], [5.0]):
        assert cv2(torch.tensor(values)).item() == pytest.approx(
            cv2_oracle(values), rel=1e-5, abs=1e-9
        )
    # counts are integers
    assert cv2(torch.tensor([2, 4, 9])).item() == pytest.approx(cv2_oracle([2, 4, 9]), rel=1e-5)
    tiny = [1e-6, 5e-6, 9e-6]  # their mean's square is a quarter of the 1e-10 that is added to it
    assert cv2(torch.tensor(tiny)).item() == pytest.approx(cv2_oracle(tiny), rel=1e-5)


@pytest.mark.parametrize("gate", GATES)
def test_selection_mask_leaves_the_shared_expert_out(gate):
    logits = torch.randn(11, 7)
    config = make_config(gate=gate)
    mask = selection_mask(config, route(logits, config.top_k, gate).topk_idx)
    assert mask.shape == (11, 7) and mask.dtype == torch.bool
    assert [sorted(row.nonzero().flatten().tolist()) for row in mask] == [
        sorted(selected(row, 5)) for row in logits.tolist()
    ]


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("gate", GATES)
def test_switch_follows_the_formula(gate, k):
    logits = torch.randn(23, 7)
    config = make_config(k=k, gate=gate)
    idx = route(logits, config.top_k, gate).topk_idx
    assert switch_loss(config, logits, idx).item() == pytest.approx(
        switch_in_python(logits.tolist(), k), rel=1e-5
    )


@pytest.mark.parametrize("R, k", [(4, 1), (4, 2), (8, 3), (1, 1)])
def test_switch_is_one_for_a_uniform_router_with_even_dispatch(R, k):
    config = make_config(R, k, "softmax_topk_renorm")
    idx = torch.tensor([[(t + j) % R for j in range(k)] for t in range(R)], dtype=torch.int32)
    assert switch_loss(config, torch.full((R, R), 0.3), idx).item() == pytest.approx(1.0, abs=1e-6)


def test_switch_of_a_collapsed_router_is_the_number_of_experts():
    config = make_config(8, 1, "softmax_topk_renorm")
    logits = torch.full((16, 8), -50.0)
    logits[:, 3] = 50
    assert switch_loss(
        config, logits, torch.full((16, 1), 3, dtype=torch.int32)
    ).item() == pytest.approx(8.0, abs=1e-5)


def test_switch_gradient_goes_through_the_probabilities_only():
    logits = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    config = make_config(4, 2, "softmax_topk")
    idx = route(logits, 2, "softmax_topk").topk_idx
    (got,) = torch.autograd.grad(switch_loss(config, logits, idx), logits)
    f = torch.tensor(
        [sum(r in row for row in idx.tolist()) / 18 for r in range(4)], dtype=torch.float64
    )
    (want,) = torch.autograd.grad(4 * (f * logits.softmax(-1).mean(0)).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k", [1, 5, 7])
@pytest.mark.parametrize("gate", GATES)
def test_cv2_without_noise_uses_hard_counts(gate, k):
    logits = torch.randn(23, 7)
    config = make_config(k=k, gate=gate, balance_loss="cv2")
    idx = route(logits, config.top_k, gate).topk_idx
    counts = [sum(r in selected(row, k) for row in logits.tolist()) for r in range(7)]
    want = cv2_oracle(importance_in_python(logits.tolist(), k, gate)) + cv2_oracle(counts)
    assert cv2_loss(config, logits, idx).item() == pytest.approx(want, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("quirk", [False, True], ids=["Shazeer", "official code"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_load_with_noise_follows_the_formula(k, quirk):
    logits, noise, scale = draw()
    got = noisy_load(logits, noise, scale, k, quirk)
    want = load_in_python(logits.tolist(), noise.tolist(), scale.tolist(), k, quirk)
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=1e-4, atol=1e-5)


def test_quirk_changes_the_loss():
    logits, noise, scale = draw(spread=3.0)
    a, b = (noisy_load(logits, noise, scale, 3, quirk) for quirk in (False, True))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("quirk", [False, True], ids=["Shazeer", "official code"])
def test_cv2_with_noise(quirk):
    logits, noise, scale = draw()
    config = make_config(k=3, balance_loss="cv2", noisy_gate=True, load_quirk=quirk)
    idx = route(logits, config.top_k, "xft", noise=noise).topk_idx
    noisy = (logits + noise).tolist()
    load = load_in_python(logits.tolist(), noise.tolist(), scale.tolist(), 3, quirk)
    want = cv2_oracle(importance_in_python(noisy, 3)) + cv2_oracle(load)
    assert cv2_loss(config, logits, idx, noise, scale).item() == pytest.approx(want, rel=1e-4)


def test_all_experts_selected_uses_counts_even_with_noise():
    logits, noise, scale = draw()
    config = make_config(k=7, balance_loss="cv2", noisy_gate=True)
    idx = route(logits, 8, "xft", noise=noise).topk_idx
    want = cv2_oracle(importance_in_python((logits + noise).tolist(), 7))
    assert cv2_loss(config, logits, idx, noise, scale).item() == pytest.approx(want, rel=1e-4)


def test_noise_reaches_the_loss_and_its_gradient_logits_and_scale():
    logits, _, scale = draw()
    eps = torch.randn(23, 7)
    logits.requires_grad_(), scale.requires_grad_()
    config = make_config(k=3, balance_loss="cv2", noisy_gate=True)
    idx = route(logits, 4, "xft", noise=eps * scale).topk_idx
    grads = torch.autograd.grad(cv2_loss(config, logits, idx, eps * scale, scale), (logits, scale))
    assert all(grad.abs().max() > 1e-4 and not grad.isnan().any() for grad in grads)


def test_gradient_of_cv2_by_finite_differences():
    logits = torch.randn(8, 5)
    config = make_config(5, 2, "softmax_topk", balance_loss="cv2")
    idx = route(logits, 2, "softmax_topk").topk_idx
    leaf = logits.clone().requires_grad_()
    (got,) = torch.autograd.grad(cv2_loss(config, leaf, idx), leaf)

    def importance(values):  # the choice stays: hard counts carry no gradient
        rows = [softmax(row) for row in values.tolist()]
        return cv2_oracle(
            [sum(rows[t][r] for t in range(8) if r in idx[t].tolist()) for r in range(5)]
        )

    for t, r in ((0, 0), (3, 4), (7, 2)):
        up = logits.double().clone()
        down = logits.double().clone()
        up[t, r] += 1e-5
        down[t, r] -= 1e-5
        assert got[t, r].item() == pytest.approx(
            (importance(up) - importance(down)) / 2e-5, rel=1e-3, abs=1e-6
        )


@pytest.mark.parametrize("kind", ["cv2", "switch"])
def test_coefficient_multiplies(kind):
    logits = torch.randn(23, 7)
    idx = route(logits, 6, "xft").topk_idx
    loss = switch_loss if kind == "switch" else cv2_loss
    config = make_config(balance_loss=kind, balance_loss_coef=0.01)
    got = balance_loss(config, logits, idx)
    assert got.shape == () and got.dtype == torch.float32
    assert got.item() == pytest.approx(0.01 * loss(config, logits, idx).item())


@pytest.mark.parametrize("kind", ["cv2", "switch"])
def test_low_precision_logits_are_summed_in_float32(kind):
    logits = torch.randn(4096, 7).bfloat16()
    config = make_config(balance_loss=kind, balance_loss_coef=1.0)
    idx = route(logits, 6, "xft").topk_idx
    got = balance_loss(config, logits, idx)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(
        balance_loss(config, logits.double(), idx).item(), rel=1e-4, abs=1e-7
    )


def test_nothing_where_there_is_no_loss():
    logits = torch.zeros(0, 7)
    idx = torch.zeros(0, 6, dtype=torch.int32)
    assert (
        balance_loss(make_config(), torch.randn(3, 7), torch.ones(3, 6, dtype=torch.int32)) is None
    )
    assert (
        balance_loss(make_config(balance_loss="switch", balance_loss_coef=1.0), logits, idx) is None
    )
    one = MoEConfig(
        hidden_size=4,
        intermediate_size=4,
        num_experts=1,
        top_k=1,
        balance_loss="cv2",
        balance_loss_coef=1.0,
    )
    assert balance_loss(one, torch.zeros(3, 0), torch.zeros(3, 1, dtype=torch.int32)) is None


@pytest.mark.parametrize("kind", ["cv2", "switch"])
def test_one_routed_expert(kind):
    config = make_config(1, 1, balance_loss=kind, balance_loss_coef=1.0)
    logits = torch.randn(5, 1)
    got = balance_loss(config, logits, route(logits, 2, "xft").topk_idx)
    assert got.item() == pytest.approx({"cv2": 0.0, "switch": 1.0}[kind])


def test_an_expert_that_nobody_selects_gives_no_nan():
    logits = torch.randn(12, 7)
    logits[:, 4] = -float("inf")
    logits.requires_grad_()
    for kind in ("cv2", "switch"):
        config = make_config(k=3, balance_loss=kind, balance_loss_coef=1.0)
        loss = balance_loss(config, logits, route(logits.detach(), 4, "xft").topk_idx)
        (grad,) = torch.autograd.grad(loss, logits)
        assert loss.isfinite() and not grad.isnan().any()


# top_k: the auxiliary loss of transformers' stock models
def top_k_in_python(logits: list[list[float]], k: int, mask: list[int]) -> float:
    """E sum_e F_e P_e, F_e = mean_t [e selected by t], P_e = mean_t softmax(logits)[t, e], over the
    tokens with mask 1.
    """
    rows = [row for row, live in zip(logits, mask, strict=True) if live]
    E = len(logits[0])
    T = max(len(rows), 1)
    F = [sum(e in selected(row, k) for row in rows) / T for e in range(E)]
    P = [sum(softmax(row)[e] for row in rows) / T for e in range(E)]
    return E * sum(f * p for f, p in zip(F, P, strict=True))


MASKS = [
    pytest.param(None, id="all"),
    pytest.param([1, 0, 1, 1, 0, 1, 1], id="padded"),
    pytest.param([0] * 7, id="nothing-but-padding"),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_equals_the_formula(k, mask):
    layers = [2 * torch.randn(7, 6, dtype=torch.float64) for _ in range(3)]
    token_mask = None if mask is None else torch.tensor(mask)
    each = [top_k_in_python(logits.tolist(), k, mask or [1] * 7) for logits in layers]
    assert [top_k_loss(logits, k, token_mask).item() for logits in layers] == pytest.approx(
        each, rel=1e-5
    )
    assert per_layer_loss(layers, k, token_mask).item() == pytest.approx(sum(each) / 3, rel=1e-5)
    together = torch.cat(layers).tolist()
    pooled = top_k_in_python(together, k, (mask or [1] * 7) * 3)
    assert pooled_loss(layers, k, token_mask).item() == pytest.approx(pooled, rel=1e-5)


def test_top_k_gradient_is_that_of_the_probabilities_alone():
    logits = (torch.randn(9, 4) + torch.arange(4)).requires_grad_()  # the last experts get most
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1])
    (got,) = torch.autograd.grad(top_k_loss(logits, 2, mask), logits)
    live = mask.bool()
    x = logits.detach().double().requires_grad_()
    share = torch.zeros(9, 4).scatter(1, logits.topk(2).indices, 1.0)[live].double().mean(0)
    (want,) = torch.autograd.grad(4 * (share * x.softmax(-1)[live].mean(0)).sum(), x)
    assert (
        torch.allclose(got.double(), want, atol=1e-7)
        and got[2].abs().sum() == 0
        and got[0].abs().sum() > 0
    )


def test_top_k_is_top_k_when_balanced_and_e_when_collapsed():
    E = 8
    k = 2
    even = torch.eye(E)[torch.arange(16) % E] + torch.eye(E)[(torch.arange(16) + 1) % E]
    assert top_k_loss(even, k).item() == pytest.approx(k)
    collapsed = torch.full((16, E), -1e4)
    collapsed[:, :k] = 0
    assert top_k_loss(collapsed, k).item() == pytest.approx(E)
    layers = [collapsed.roll(k * layer, 1) for layer in range(4)]
    assert pooled_loss(layers, k).item() == pytest.approx(k)
    assert per_layer_loss(layers, k).item() == pytest.approx(E)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_top_k_is_float32_whatever_the_logits_are(dtype):
    logits = torch.randn(9, 6).to(dtype)
    got = per_layer_loss([logits], 2, torch.ones(9))
    assert got.dtype == torch.float32 and got == per_layer_loss([logits.float()], 2)
    with torch.autocast("cpu", torch.bfloat16):
        under = per_layer_loss([logits], 2, torch.ones(9))
    assert under.dtype == torch.float32 and under == got
