"""Paired tests of whether one model's held-out loss is lower than another's.

    d_r = (t_r / mean t) (x_r - y_r)       row r: its label tokens t_r, and the mean losses of the
                                           two models on it
    mean d                                 the difference of the two losses per label token

x_r and y_r are means over the seeds, so each row counts once, however many seeds were trained.
Wilcoxon's signed-rank test asks whether the d_r lie around 0, Holm's correction keeps the chance of
any false verdict in a family of comparisons at `level`, and Student's t gives the interval of the
mean. A verdict requires both: a few long rows can move the mean on their own, and many small ones
the ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.config import check_fraction
from moe_runtime.io.rows import require

LEVEL = 0.05
TIE = 1e-6  # smaller differences of an example's loss are float32 rounding
VERDICTS = ("lower", "higher", "no difference found", "not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of a method's held-out loss with the reference's on the same examples."""

    name: str
    reference: str
    difference: float  # mean loss per label token, method minus reference
    low: float  # the difference's interval at 1 - LEVEL, uncorrected; NaN if it has none
    high: float
    p: float
    p_corrected: float  # Holm's, over the comparisons made together
    verdict: str
    rows: int
    by_seed: tuple[float, ...]  # the difference with each seed, the unit of a claim on a method

    def __str__(self) -> str:
        """Return the comparison as a sentence."""
        if self.verdict == VERDICTS[3]:
            return f"{self.name} against {self.reference}: a loss is not finite"
        if self.verdict == VERDICTS[2]:
            what = self.verdict
        else:
            what = f"{self.verdict} by {signed(self.difference)[1:]}"
        if math.isnan(self.low):
            interval = ""
        else:
            interval = f"interval {signed(self.low)} to {signed(self.high)}, "
        of_seeds = ", ".join(map(signed, self.by_seed))
        if len(self.by_seed) == 1:
            seeds = "one seed"
        else:
            seeds = f"with each seed: {of_seeds}"
        return (
            f"{self.name} against {self.reference}: {what} ({interval}corrected p "
            f"{self.p_corrected:.2g}, over {self.rows} rows; {seeds})"
        )


def signed(value: float) -> str:
    """Format a difference of losses with four decimals, or with an exponent if they would
    all be 0.
    """
    return f"{value:+.0e}" if 0 < abs(value) < 5e-5 else f"{value:+.4f}"


def compare(
    losses: Mapping[str, Sequence[Sequence[float]]],
    reference: str,
    tokens: Sequence[int] | None = None,
    level: float = LEVEL,
) -> list[Comparison]:
    """Compare every method in `losses`, name -> [seeds, rows], with the method `reference`, in the
    given order.

    `tokens` [rows] are the label tokens of each row, the same for all methods; without them all
    rows weigh the same. Raises ValueError for an unknown reference, arrays of different shapes, no
    rows, or weights below 1.
    """
    if reference not in losses:
        raise ValueError(f"reference must be one of {', '.join(losses)}, but got {reference!r}")
    check_fraction("level", level, zero=False, one=False)
    arrays = {name: np.asarray(rows, dtype=np.float64) for name, rows in losses.items()}
    shape = arrays[reference].shape
    weight = np.ones(shape[1:]) if tokens is None else np.asarray(tokens, dtype=np.float64)
    shapes = {array.shape for array in arrays.values()}
    if (
        len(shapes) > 1
        or len(shape) != 2
        or 0 in shape
        or weight.shape != shape[1:]
        or not (weight >= 1).all()
    ):
        raise ValueError(
            "Expected losses [seeds, examples] of the same shape for every method, and tokens "
            f"[examples] of at least 1, but losses are {', '.join(map(str, shapes))} and tokens "
            f"{weight.shape}"
        )
    weight = weight / weight.mean()
    names = [name for name in losses if name != reference]
    differences = []
    for name in names:
        differences.append(
            _difference(
                weight,
                arrays[name],
                arrays[reference],
                level,
            )
        )
    corrected = holm([p for _, _, _, p, _ in differences])
    compare = []
    for name, (mean, low, high, p, direction), q in zip(names, differences, corrected, strict=True):
        compare.append(
            Comparison(
                name=name,
                reference=reference,
                difference=mean,
                low=low,
                high=high,
                p=p,
                p_corrected=q,
                verdict=_verdict(low, high, direction, q, level),
                rows=shape[1],
                by_seed=tuple(((arrays[name] - arrays[reference]) @ weight / shape[1]).tolist()),
            )
        )
    return compare


def holm(p: Sequence[float]) -> list[float]:
    """Correct one family of p-values by Holm's step-down: sorted p_(i) times m - i + 1, made
    monotone; NaN counts as 1.
    """
    filled = []
    for value in p:
        filled.append(1.0 if math.isnan(value) else value)
    corrected = [0.0] * len(filled)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(filled)), key=filled.__getitem__)):
        largest = max(largest, min((len(filled) - rank) * filled[i], 1.0))
        corrected[i] = largest
    holm = []
    for value, q in zip(p, corrected, strict=True):
        holm.append(math.nan if math.isnan(value) else q)
    return holm


def _difference(weight, method, reference, level: float) -> tuple[float, float, float, float, int]:
    """Return the mean difference, its interval, Wilcoxon's p and the sign of the rank sum: -1, 0 or
    1.
    """
    with np.errstate(invalid="ignore"):
        plain = method.mean(0) - reference.mean(0)
    if not np.isfinite(plain).all():
        return math.nan, math.nan, math.nan, math.nan, 0
    d = weight * np.where(np.abs(plain) < TIE, 0.0, plain)
    mean = float(d.mean())
    n = len(d)
    low = math.nan
    high = math.nan
    stats = require("scipy.stats")
    if n > 1:
        # `mean` is sum t x / sum t, so a row contributes t (x - mean) to its error; otherwise the
        # spread of lengths would count
        left = d - weight * mean
        margin = float(stats.t.ppf(1 - level / 2, n - 1) * left.std(ddof=1) / math.sqrt(n))
        low = mean - margin
        high = mean + margin
    moved = d[d != 0]
    if not len(moved):
        return mean, low, high, 1.0, 0
    # ties are evidence for neither side and are left out of the ranks, as in Wilcoxon's original
    # test
    p = float(stats.wilcoxon(moved, zero_method="wilcox").pvalue)
    ranks = stats.rankdata(np.abs(moved))
    return mean, low, high, p, int(np.sign((np.sign(moved) * ranks).sum()))


def _verdict(low: float, high: float, direction: int, p: float, level: float) -> str:
    if math.isnan(p):
        return VERDICTS[3]
    if p <= level and direction < 0 and high < 0:
        return VERDICTS[0]
    if p <= level and direction > 0 and low > 0:
        return VERDICTS[1]
    return VERDICTS[2]
