"""Verdicts on random data at the stated rate, detection of real differences, and edge cases: ties,
one row, NaN.
"""

import math

import numpy as np
import pytest
from scipy import stats

from papers.engine.compare import LEVEL, VERDICTS, compare, holm

LOWER, HIGHER, NONE, NOT_FINITE = VERDICTS


TABLES = 250


ROWS = 60


def family(draw, shifts, rng, seeds=2):
    """Return one table: a reference of `ROWS` rows, and a method per shift, each with its own noise
    from `draw`.
    """
    base = rng.gamma(2.0, 1.0, ROWS)
    losses = {"reference": [base + draw(rng, ROWS) for _ in range(seeds)]}
    for i, shift in enumerate(shifts):
        losses[f"method {i}"] = [base + shift + draw(rng, ROWS) for _ in range(seeds)]
    return losses


def normal(rng, n):
    return 0.3 * rng.standard_normal(n)


def skewed(rng, n):
    return rng.exponential(1.0, n) - 1.0


def heavy(rng, n):
    return rng.standard_t(3, n)


@pytest.mark.parametrize("draw", [normal, skewed, heavy])
def test_a_table_without_differences_reports_none_in_95_of_100(draw):
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(TABLES):
        compared = compare(
            family(draw, [0, 0, 0], rng),
            "reference",
            rng.integers(20, 120, ROWS),
        )
        wrong += {one.verdict for one in compared} != {NONE}
    assert wrong <= stats.binom.ppf(0.999, TABLES, LEVEL)


@pytest.mark.parametrize("shift, verdict", [(-0.3, LOWER), (0.3, HIGHER)])
def test_a_real_difference_is_found_and_only_that_one(shift, verdict):
    rng = np.random.default_rng(3)
    hits = others = 0
    for _ in range(100):
        first, second = compare(family(normal, [shift, 0], rng), "reference")
        hits += first.verdict == verdict and first.low <= first.difference <= first.high
        others += second.verdict != NONE
    assert hits >= 95
    assert others <= 12


def test_the_interval_holds_the_truth_in_95_of_100():
    rng = np.random.default_rng(4)
    inside = 0
    for _ in range(TABLES):
        (found,) = compare(family(normal, [0.1], rng, seeds=1), "reference")
        inside += found.low <= 0.1 <= found.high
    low, high = stats.binom.ppf((0.001, 0.999), TABLES, 1 - LEVEL)
    assert low <= inside <= high


def test_the_difference_is_that_of_the_losses_per_token():
    rng = np.random.default_rng(5)
    losses = rng.gamma(2.0, 1.0, (2, 1, 40))
    tokens = rng.integers(1, 300, 40)
    (found,) = compare({"a": losses[0], "b": losses[1]}, "b", tokens)
    a, b = (losses[i, 0] @ tokens / tokens.sum() for i in range(2))
    assert found.difference == pytest.approx(a - b, abs=1e-12)


def test_seeds_are_averaged_and_counted():
    rows = np.linspace(1.0, 2.0, 30)
    losses = {
        "a": [rows - 0.2, rows + 0.1, rows - 0.3],
        "b": [rows, rows, rows],
    }
    (found,) = compare(losses, "b")
    assert found.by_seed == pytest.approx((-0.2, 0.1, -0.3))
    assert found.rows == 30
    assert found.difference == pytest.approx(-0.4 / 3)
    assert found.verdict == LOWER
    assert "a against b: lower by 0.1333" in str(found)
    assert "with each seed: -0.2000, +0.1000, -0.3000" in str(found)
    # seeds do not count as rows
    noisy = rows + normal(np.random.default_rng(6), 30)
    (one,) = compare({"a": [noisy], "b": [rows]}, "b")
    (three,) = compare({"a": [noisy] * 3, "b": [rows] * 3}, "b")
    assert one.p == three.p
    assert (one.low, one.high) == pytest.approx((three.low, three.high))


PLACES = np.arange(40)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_spoils_only_its_own_comparison(bad):
    rows = np.linspace(1.0, 2.0, 40)
    worse, fine = compare(
        {
            "a": [rows * bad],
            "b": [rows],
            "c": [rows - 0.1],
        },
        "b",
    )
    assert worse.verdict == NOT_FINITE
    assert math.isnan(worse.difference)
    assert fine.verdict == LOWER
    assert "not finite" in str(worse)


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_holm(n):
    p = list(np.random.default_rng(n).uniform(0, 0.05, n))
    # by definition, the adjusted value of a hypothesis is the largest of the steps up to it
    adjusted = {}
    largest = 0.0
    for step, value in enumerate(sorted(p)):
        largest = max(largest, (n - step) * value)
        adjusted[value] = min(largest, 1.0)
    assert holm(p) == pytest.approx([adjusted[value] for value in p])
    # a comparison without a p-value still counts in the family
    assert math.isnan(holm([*p, math.nan])[n])
    assert holm([0.01, math.nan, 0.02])[0] == pytest.approx(0.03)


@pytest.mark.parametrize(
    "losses, more, match",
    [
        ({"a": [[1.0]]}, {}, "reference must be one of a"),
        ({"a": [[1.0]], "b": [[1.0, 2.0]]}, {}, "Expected losses .seeds, examples."),
        ({"a": [[1.0]], "b": [[1.0]]}, {"tokens": [0]}, "tokens .examples. of at least 1"),
    ],
)
def test_bad_input(losses, more, match):
    with pytest.raises(ValueError, match=match):
        compare(losses, "b", **more)
