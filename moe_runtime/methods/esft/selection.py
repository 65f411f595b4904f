"""ESFT's selection of the experts to train for a task, and its configuration file.

ESFT (arXiv 2407.01906), Eq. (8): the smallest set E_s of a layer's experts, taken by descending
score R, with

    sum_{i in E_s} R_i >= p

R is the gate score (Eq. 6) or the token score (Eq. 7) of `moe_runtime.methods.esft.scores`. Ties go
to the lower id.
"""

import math
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_runtime.config import (
    check_bool,
    check_choice,
    check_fraction,
    check_positive,
    one_line,
    shown,
)
from moe_runtime.hf.dropin.layers import RoutedLayer
from moe_runtime.hf.training.trainable import ExpertsLayer
from moe_runtime.io.files import atomic_write_json, read_json
from moe_runtime.methods.esft.base import OURS, read_base, write_base
from moe_runtime.methods.esft.official import layer_number
from moe_runtime.methods.esft.scores import SCORES, VARIANTS, ExpertScores

FLAGS = ("shared_experts", "non_expert_modules")
_KEYS = (*FLAGS, "score", "p", "variant")


def check_p(p: float) -> None:
    """Raise ValueError unless `p` is above 0 and at most 1."""
    check_fraction("p", p, "such as 0.1 for gate scores, 0.2 for token", zero=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSelection:
    """The experts to train, by layer.

    Attributes:
        experts: Layer number to ids of experts, in the order of selection.
        shared_experts: Whether the MLPs that every token passes through train too (Table 3).
        non_expert_modules: Whether everything that is not an expert trains too (Table 3).
        score: "gate", "token" or "random", if it is known.
        p: The sum of scores that was asked for, if any.
        variant: Definition of the scores, if it is known.
        base: Identifies the model that was scored, if it is known.
    """

    experts: Mapping[int, tuple[int, ...]]  # in the order of selection
    shared_experts: bool = False
    non_expert_modules: bool = False
    score: str | None = None
    p: float | None = None
    variant: str | None = None
    # the scored model, if it is known
    base: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        for name in FLAGS:
            check_bool(name, getattr(self, name))
        if self.score is not None:
            check_choice("score", self.score, (*SCORES, "random"))
        if self.p is not None:
            check_p(self.p)
        if self.variant is not None:
            check_choice("variant", self.variant, VARIANTS)
        bad = self.experts
        is_mapping = isinstance(bad, Mapping)
        if is_mapping:
            bad = {layer: ids for layer, ids in bad.items() if not _are_ids(layer, ids)}
        if bad or not is_mapping:
            raise ValueError(
                "experts must be unique ids by layer, such as {1: (4, 0)}, but got "
                f"{shown(bad, 60)}"
            )
        experts = {layer: tuple(ids) for layer, ids in sorted(self.experts.items())}
        object.__setattr__(self, "experts", experts)

    @property
    def num_experts(self) -> int:
        """Number of selected experts in all layers."""
        return sum(map(len, self.experts.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the official configuration, JSON-ready, with `score`, `p` and `variant` if
        known.
        """
        values = {name: getattr(self, name) for name in _KEYS}
        experts = {str(layer): list(ids) for layer, ids in self.experts.items()}
        known = {name: value for name, value in values.items() if value is not None}
        return {"experts": experts} | known

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "selection") -> "ExpertSelection":
        """Create a selection from `to_dict`'s or the official configuration; errors name
        `source`.
        """
        base = read_base(values, source)
        values = {name: value for name, value in values.items() if name != OURS}
        experts = values.get("experts")
        if isinstance(experts, Mapping):
            values["experts"] = {_from_text(layer): ids for layer, ids in experts.items()}
        try:
            return cls(**values, base=base)
        except (TypeError, ValueError) as error:  # TypeError for a key too many or too few
            raise ValueError(
                f"{source}: {one_line(error, 300)}. Expected experts, and some of "
                f"{', '.join(_KEYS)}"
            ) from error

    def save(self, path: str | os.PathLike) -> None:
        """Write `to_dict` and, if it is known, the scored model as JSON, atomically."""
        atomic_write_json(path, self.to_dict() | write_base(self.base))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ExpertSelection":
        """Read a configuration file, also an official one; raises ValueError that names the file
        and the problem.
        """
        return cls.from_dict(read_json(path), str(path))


def select_experts(
    scores: ExpertScores,
    p: float | None = None,
    score: str = "gate",
    variant: str | None = None,
    *,
    experts_per_layer: int | None = None,
    shared_experts: bool = False,
    non_expert_modules: bool = False,
    round: int | None = None,
    skip_unused: bool = False,
) -> ExpertSelection:
    """Select each layer's experts with the highest scores, until their sum is at least p: Eq. (8).

    At least one is selected; among equal scores the lower id comes first. Where a layer's scores
    sum to less than p, all its experts are selected, as in the official code, with a warning.

    Args:
        scores: Of `score_experts`, or `ExpertScores.load(path)`.
        p: Sum of scores, above 0 and at most 1: 0.1 for gate scores and 0.2 for token scores in the
            paper.
        score: "gate" or "token".
        variant: Definition of the scores; None is that of `scores`.
        experts_per_layer: Selects this many experts of each layer, in place of `p`.
        shared_experts: Whether the MLPs that every token passes through train too.
        non_expert_modules: Whether everything that is not an expert trains too.
        round: Digits to which scores are rounded first; 4 in the official code.
        skip_unused: Whether to leave out experts with a score of 0, which no token selected.

    Returns:
        The selection, for `train_only` or `train_lora`.

    Raises:
        ValueError: If not exactly one of `p` and `experts_per_layer` is given, one is invalid, or a
            layer has no score above 0.
    """
    if not isinstance(scores, ExpertScores):
        raise ValueError(
            f"Expected ExpertScores, but got {shown(scores, 60)}. Read a file with "
            "ExpertScores.load(path)"
        )
    routed = range(scores.num_shared, scores.num_experts)
    if (p is None) == (experts_per_layer is None):
        raise ValueError(f"Pass either p or experts_per_layer, but got {p} and {experts_per_layer}")
    if p is not None:
        check_p(p)
    elif type(experts_per_layer) is not int or not 0 < experts_per_layer <= len(routed):
        raise ValueError(
            f"experts_per_layer must be 1 to {len(routed)}, the routed experts of a layer, but is "
            f"{experts_per_layer}"
        )
    variant = scores.variant if variant is None else variant
    table = scores.scores(score, variant, round)
    experts = {}
    for layer, row in zip(scores.layers, table.tolist(), strict=True):
        problem = None if any(row) else f"no {score} scores above 0"
        if not all(map(math.isfinite, row)):
            problem = f"{score} scores that are NaN or infinite"
        if problem is not None:
            raise ValueError(f"Layer {layer} has {problem}. Score the task again")
        experts[layer] = _take(row, routed, p, experts_per_layer, skip_unused)
    if p is not None:
        _warn_of_short(dict(zip(scores.layers, table.sum(1).tolist(), strict=True)), p, skip_unused)
    return ExpertSelection(
        experts=experts,
        shared_experts=shared_experts,
        non_expert_modules=non_expert_modules,
        score=score,
        p=p,
        variant=variant,
        base=scores.base,
    )


def _warn_of_short(sums: Mapping[int, float], p: float, skip_unused: bool) -> None:
    """Warn of layers whose scores sum to less than p, so that all their experts are selected."""
    # with a tolerance for rounded scores
    short = {layer: total for layer, total in sums.items() if p > total + 1e-3}
    if not short:
        return
    which = "all" if len(short) == len(sums) else ", ".join(map(str, short))
    selected = "experts with a score above 0" if skip_unused else "experts"
    least = min(short.values())
    most = max(short.values())
    warnings.warn(
        f"p is {p}, but the scores sum to only {least:.3f} to {most:.3f} in {len(short)} of "
        f"{len(sums)} layers ({which}): all their {selected} are selected. Choose a smaller p, a "
        "number of experts per layer, or the variant 'normalized' if p is a share",
        stacklevel=3,
    )


def _take(
    row: Sequence[float],
    routed: Sequence[int],
    p: float | None,
    count: int | None,
    skip_unused: bool,
) -> list[int]:
    """Return the fewest `routed` experts whose scores reach p, or `count`, by descending score."""
    taken = []
    reached = 0.0
    for e in sorted(routed, key=lambda e: (-row[e], e)):
        is_enough = len(taken) >= count if p is None else reached >= p
        if is_enough or (skip_unused and not row[e]):
            break
        taken.append(e)
        reached += row[e]
    return taken


def random_experts(
    selection: ExpertSelection, num_experts: int, seed: int, *, num_shared: int = 0
) -> ExpertSelection:
    """Draw as many experts per layer as a selection has: the control of the paper's Table 4.

    Args:
        selection: Determines how many experts each layer gets.
        num_experts: Experts per layer E, shared ones included.
        seed: Of the draw, which is uniform and without replacement.
        num_shared: Leading experts that are never drawn.

    Returns:
        A selection with the score "random".
    """
    check_positive("num_experts", num_experts)
    generator = random.Random(seed)
    pool = range(num_shared, num_experts)
    drawn = {layer: generator.sample(pool, len(ids)) for layer, ids in selection.experts.items()}
    return replace(selection, experts=drawn, score="random", variant=None)


def check_is_selection(selection: Any) -> None:
    """Raise ValueError for anything but an ExpertSelection, such as the path of one."""
    if not isinstance(selection, ExpertSelection):
        raise ValueError(
            f"Expected an ExpertSelection, but got {shown(selection, 60)}. Read a file with "
            "ExpertSelection.load"
        )


def check_selection(
    layers: Mapping[int, RoutedLayer | ExpertsLayer], selection: ExpertSelection
) -> None:
    """Raise ValueError unless a model's `layers`, by number, have all experts of `selection`.

    The shared expert of our own layers is not routed to: `shared_experts` trains it.
    """
    for number, ids in selection.experts.items():
        problem = f"layers {', '.join(map(str, layers))}"
        missing = ids
        if number in layers:
            routed = range(layers[number].num_shared, layers[number].num_experts)
            missing = [e for e in ids if e not in routed]
            problem = f"ids {routed.start} to {routed.stop - 1}"
            if routed.start:
                problem += ". Pass shared_experts=True to train those before"
        if missing or number not in layers:
            raise ValueError(
                f"The selection has experts {list(missing)} of layer {number}, but the model "
                f"routes to {problem}"
            )


def _are_ids(layer: Any, ids: Any) -> bool:
    """Return whether a layer's number and its ids are integers of at least 0 and the ids are
    unique.
    """
    if isinstance(ids, str | Mapping) or not hasattr(ids, "__iter__"):
        return False
    numbers = [layer, *ids]
    is_whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    return is_whole and len(set(ids)) == len(list(ids))


def _from_text(layer: Any) -> Any:
    """Return the layer number of a file's key, or the key itself if it is not a number."""
    try:
        return layer_number(layer)
    except ValueError:
        return layer
