"""Balance losses with noise, with padding and in edge cases, against their formulas in plain
Python. The conformance table covers plain logits.
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
    top_k_loss,
)
from moe_runtime.ops.routing import route
from tests.support.oracle import SHARED, cv2_oracle, normal_cdf

QUIRKS = pytest.mark.parametrize("quirk", [False, True], ids=["Shazeer", "official code"])
KINDS = pytest.mark.parametrize("kind", ["cv2", "switch"])


def make_config(R=7, k=5, gate="xft", **kwargs):
    """Return a config with R routed experts, k per token."""
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


def importance_in_python(noisy, k):
    """Sum over tokens the probabilities of the experts that they selected."""
    total = [0.0] * len(noisy[0])
    for row in noisy:
        p = softmax(row)
        for r in selected(row, k):
            total[r] += p[r]
    return total


def load_in_python(clean, noise, scale, k, quirk):
    """P = Phi((clean - threshold) / scale); the threshold is the (k+1)-th noisy logit for selected
    experts, else the k-th.
    """
    load = [0.0] * len(clean[0])
    for lg, eps, ctl in zip(clean, noise, scale, strict=True):
        noisy = [
            a + b
            for a, b in zip(
                lg,
                eps,
                strict=True,
            )
        ]
        top = sorted(noisy, reverse=True)
        for r in range(len(load)):
            compared = eps[r] if quirk else noisy[r]
            threshold = top[k] if compared > top[k] else top[k - 1]
            load[r] += normal_cdf((lg[r] - threshold) / ctl[r])
    return load


def draw(T=23, R=7, spread=1.0):
    """Draw logits, noise and the noise's scale."""
    logits = spread * torch.randn(T, R)
    scale = torch.nn.functional.softplus(torch.randn(T, R)) + 1e-2
    return logits, torch.randn(T, R) * scale, scale


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 4.0],
        [3.0, 3.0],
        [0.0, 0.0, 0.0],
        [5.0],
        [2, 4, 9],  # counts are integers
        # the square of their mean is a quarter of the 1e-10 that is added to it
        [1e-6, 5e-6, 9e-6],
    ],
)
def test_cv2_is_the_squared_coefficient_of_variation(values):
    want = cv2_oracle(values)
    assert cv2(torch.tensor(values)).item() == pytest.approx(
        want,
        rel=1e-5,
        abs=1e-9,
    )


@QUIRKS
@pytest.mark.parametrize("k", [1, 3, 6])
def test_load_with_noise_follows_the_formula(k, quirk):
    logits, noise, scale = draw()
    got = noisy_load(logits, noise, scale, k, quirk)
    want = load_in_python(
        logits.tolist(),
        noise.tolist(),
        scale.tolist(),
        k,
        quirk,
    )
    assert got.tolist() == pytest.approx(
        want,
        rel=1e-4,
        abs=1e-5,
    )


@QUIRKS
def test_cv2_with_noise(quirk):
    logits, noise, scale = draw()
    config = make_config(k=3, balance_loss="cv2", noisy_gate=True, load_quirk=quirk)
    idx = route(logits, config.top_k, "xft", noise=noise).topk_idx
    load = load_in_python(
        logits.tolist(),
        noise.tolist(),
        scale.tolist(),
        3,
        quirk,
    )
    importance = importance_in_python((logits + noise).tolist(), 3)
    want = cv2_oracle(importance) + cv2_oracle(load)
    assert cv2_loss(
        config,
        logits,
        idx,
        noise,
        scale,
    ).item() == pytest.approx(want, rel=1e-4)


def test_noise_reaches_the_loss_and_its_gradient_logits_and_scale():
    logits, _, scale = draw()
    eps = torch.randn(23, 7)
    logits.requires_grad_()
    scale.requires_grad_()
    config = make_config(k=3, balance_loss="cv2", noisy_gate=True)
    noise = eps * scale
    idx = route(logits, 4, "xft", noise=noise).topk_idx
    loss = cv2_loss(config, logits, idx, noise, scale)
    for grad in torch.autograd.grad(loss, (logits, scale)):
        assert grad.abs().max() > 1e-4
        assert grad.isfinite().all()


def test_nothing_where_there_is_no_loss():
    ids = torch.ones(3, 6, dtype=torch.int32)
    assert (
        balance_loss(
            make_config(),
            torch.randn(3, 7),
            ids,
        )
        is None
    )
    switch = make_config(balance_loss="switch", balance_loss_coef=1.0)
    assert (
        balance_loss(
            switch,
            torch.zeros(0, 7),
            ids[:0],
        )
        is None
    )
    shared_alone = make_config(0, 0, balance_loss="cv2", balance_loss_coef=1.0)
    assert (
        balance_loss(
            shared_alone,
            torch.zeros(3, 0),
            ids[:, :1] - 1,
        )
        is None
    )


@pytest.mark.parametrize("kind, want", [("cv2", 0.0), ("switch", 1.0)])
def test_one_routed_expert(kind, want):
    config = make_config(1, 1, balance_loss=kind, balance_loss_coef=1.0)
    logits = torch.randn(5, 1)
    got = balance_loss(config, logits, route(logits, 2, "xft").topk_idx)
    assert got.item() == pytest.approx(want)


@KINDS
def test_an_expert_that_no_token_selects_gives_no_nan(kind):
    logits = torch.randn(12, 7)
    logits[:, 4] = -float("inf")
    logits.requires_grad_()
    config = make_config(k=3, balance_loss=kind, balance_loss_coef=1.0)
    loss = balance_loss(
        config,
        logits,
        route(logits.detach(), 4, "xft").topk_idx,
    )
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert grad.isfinite().all()


# top_k: the auxiliary loss of transformers' stock models
def top_k_in_python(logits: list[list[float]], k: int, mask: list[int]) -> float:
    """E sum_e F_e P_e, F_e = mean_t [e selected by t], P_e = mean_t softmax(logits)[t, e], over the
    tokens with mask 1.
    """
    E = len(logits[0])
    counts = [0] * E
    sums = [0.0] * E
    for row, live in zip(logits, mask, strict=True):
        if live:
            for e in selected(row, k):
                counts[e] += 1
            for e, p in enumerate(softmax(row)):
                sums[e] += p
    T = max(sum(mask), 1)
    return (
        E
        * sum(
            f * p
            for f, p in zip(
                counts,
                sums,
                strict=True,
            )
        )
        / T**2
    )


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param([1] * 7, id="all"),
        pytest.param([1, 0, 1, 1, 0, 1, 1], id="padded"),
        pytest.param([0] * 7, id="only padding"),
    ],
)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_equals_the_formula(k, mask):
    layers = list(2 * torch.randn(3, 7, 6, dtype=torch.float64))
    token_mask = torch.tensor(mask)
    each = [top_k_in_python(logits.tolist(), k, mask) for logits in layers]
    for logits, want in zip(layers, each, strict=True):
        assert top_k_loss(
            logits,
            k,
            token_mask,
        ).item() == pytest.approx(want, rel=1e-5)
    assert per_layer_loss(
        layers,
        k,
        token_mask,
    ).item() == pytest.approx(sum(each) / 3, rel=1e-5)
    pooled = top_k_in_python(
        torch.cat(layers).tolist(),
        k,
        mask * 3,
    )
    assert pooled_loss(
        layers,
        k,
        token_mask,
    ).item() == pytest.approx(pooled, rel=1e-5)


def test_top_k_gradient_is_that_of_the_probabilities_of_live_tokens():
    # the last experts get the most tokens
    logits = (torch.randn(9, 4) + torch.arange(4)).requires_grad_()
    live = torch.arange(9) != 2
    (got,) = torch.autograd.grad(
        top_k_loss(
            logits,
            2,
            live.long(),
        ),
        logits,
    )
    x = logits.detach().double().requires_grad_()
    chosen = torch.zeros(9, 4, dtype=torch.float64).scatter(
        1,
        logits.topk(2).indices,
        1.0,
    )
    share = chosen[live].mean(0)
    (want,) = torch.autograd.grad(4 * (share * x.softmax(-1)[live].mean(0)).sum(), x)
    torch.testing.assert_close(
        got.double(),
        want,
        rtol=0,
        atol=1e-7,
    )
    assert got[0].any()
    assert not got[2].any()
