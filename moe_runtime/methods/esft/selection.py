"""Which experts a task trains: ESFT's selection and its configuration file.

ESFT (arXiv 2407.01906), Eq. (8): the smallest set E_s of a layer's experts, taken by descending score R, with

    sum_{i in E_s} R_i >= p

R is the gate score (Eq. 6) or the token score (Eq. 7) of `moe_runtime.methods.esft.scores`. Equal scores: the lower id
first.
"""

import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moe_runtime.config import check_bool, check_choice, check_fraction, check_positive, shown
from moe_runtime.hf.dropin.layers import RoutedLayer, numbered_layers
from moe_runtime.io.files import atomic_write_json, read_json
from moe_runtime.methods.esft.scores import SCORES, VARIANTS, ExpertScores

MAX_GROUPS = 2**21  # candidates that `group_experts` compares
FLAGS = ("shared_experts", "non_expert_modules")
_KEYS = ("experts", *FLAGS, "score", "p", "variant")


def check_p(p: float) -> None:
    """Raise ValueError unless `p` is above 0 and at most 1."""
    check_fraction("p", p, "such as 0.1 for gate scores, 0.2 for token", zero=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSelection:
    """The experts to train, by layer; the two flags say what trains beside them (the paper's Table 3).

    Layers are the model's own numbers, ids indices into the experts' stack. Nothing of a layer that is missing or empty
    trains. `score`, `p` and `variant` say how the selection was made; "random" is the score of `random_experts`.
    """

    experts: Mapping[int, tuple[int, ...]]  # in the order of selection
    shared_experts: bool = False
    non_expert_modules: bool = False
    score: str | None = None
    p: float | None = None
    variant: str | None = None

    def __post_init__(self):
        for name in FLAGS:
            check_bool(name, getattr(self, name))
        if self.score is not None:
            check_choice("score", self.score, (*SCORES, "random"))
        if self.p is not None:
            check_p(self.p)
        if self.variant is not None:
            check_choice("variant", self.variant, VARIANTS)
        if not isinstance(self.experts, Mapping):
            raise ValueError(f"experts is {shown(self.experts)}; want ids by layer, such as {{1: (4, 0)}}")
        experts = {_number("layer", layer): _ids(layer, ids) for layer, ids in self.experts.items()}
        object.__setattr__(self, "experts", dict(sorted(experts.items())))

    @property
    def num_experts(self) -> int:
        """How many experts train, over all layers."""
        return sum(map(len, self.experts.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the official configuration, JSON-ready; `score`, `p` and `variant` are in it where they are known."""
        values: dict[str, Any] = {"experts": {str(layer): list(ids) for layer, ids in self.experts.items()}}
        values |= {name: getattr(self, name) for name in FLAGS}
        made = {name: getattr(self, name) for name in ("score", "p", "variant")}
        return values | {name: value for name, value in made.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "selection") -> "ExpertSelection":
        """Read `to_dict`'s or the official configuration; raises ValueError naming `source` and the key that is wrong."""
        unknown = sorted(set(values) - set(_KEYS))
        if unknown or "experts" not in values:
            problem = f"has the key {shown(unknown[0])}" if unknown else "has no key 'experts'"
            raise ValueError(f"{source} {problem}; want experts, and some of {', '.join(_KEYS[1:])}")
        experts = values["experts"]
        if not isinstance(experts, Mapping) or not all(isinstance(ids, list | tuple) for ids in experts.values()):
            raise ValueError(
                f"{source}: experts is {shown(experts, 60)}; want lists of ids by layer, such as {{'1': [4, 0]}}"
            )
        numbers = {layer: _from_text(layer) for layer in experts}
        bad = [layer for layer, number in numbers.items() if number is None]
        if bad:
            raise ValueError(f"{source}: experts has the layer {shown(bad[0])}; want whole numbers, such as '1'")
        by_layer = {numbers[layer]: ids for layer, ids in experts.items()}
        try:
            return cls(experts=by_layer, **{name: value for name, value in values.items() if name != "experts"})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write `to_dict` as JSON, whole or not at all."""
        atomic_write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ExpertSelection":
        """Read a configuration file, the official ones too; raises ValueError naming the file and the key that is wrong."""
        return cls.from_dict(read_json(path), str(path))


def select_experts(
    scores: ExpertScores,
    p: float,
    score: str = "gate",
    variant: str | None = None,
    *,
    shared_experts: bool = False,
    non_expert_modules: bool = False,
    group_size: int = 1,
    groups: Mapping[int, Sequence[Sequence[int]]] | None = None,
    round: int | None = None,
) -> ExpertSelection:
    """Take each layer's experts by descending score until their sum is at least `p`, Eq. (8); at least one.

    `variant` is the scores' own unless given, v1 unless they were made otherwise.
    `round=4` rounds the scores first, as the official code does. An expert without a token is never taken, so a `p`
    that the layer's scores do not reach takes all that have one. `groups`, of each layer, come together, by the sum of
    their scores (App. B); `group_size` makes them by `group_experts` from the pairs that `scores` counted. Raises
    ValueError for p outside (0, 1], a variant that the scores do not have, a layer without scores, scores that are no
    numbers, and groups that are no partition.
    """
    check_p(p)
    check_positive("group_size", group_size)
    variant = scores.variant if variant is None else variant
    table = scores.scores(score, variant, round)
    if groups is None and group_size > 1:
        both = zip(scores.layers, _pairs(scores), strict=True)
        groups = {layer: group_experts(pairs, group_size, num_shared=scores.num_shared) for layer, pairs in both}
    experts = {}
    for layer, row in zip(scores.layers, table.tolist(), strict=True):
        if not all(map(math.isfinite, row)):
            raise ValueError(f"layer {layer} has {score} scores that are NaN or infinite; want numbers")
        if not any(row):
            raise ValueError(f"layer {layer} has no {score} scores above 0; want scores of every layer")
        routed = range(scores.num_shared, len(row))
        of_layer = [(e,) for e in routed] if groups is None else groups.get(layer, ())
        if sorted(e for group in of_layer for e in group) != list(routed):
            raise ValueError(
                f"groups of layer {layer} are {shown(of_layer)}; want each of {routed.start} to {routed.stop - 1} in one"
            )
        experts[layer] = _take(row, of_layer, p)
    made = {"score": score, "p": p, "variant": variant}
    flags = {"shared_experts": shared_experts, "non_expert_modules": non_expert_modules}
    return ExpertSelection(experts=experts, **flags, **made)


def _take(row: Sequence[float], groups: Iterable[Sequence[int]], p: float) -> list[int]:
    """The fewest groups, by descending sum of their scores, that reach p; in a group the best first."""
    total = {tuple(sorted(group, key=lambda e: (-row[e], e))): sum(row[e] for e in group) for group in groups}
    taken, reached = [], 0.0
    for group in sorted(total, key=lambda group: (-total[group], min(group))):
        if reached >= p or not total[group]:
            break
        taken += group
        reached += total[group]
    return taken


def _pairs(scores: ExpertScores) -> torch.Tensor:
    if scores.sums is None or scores.sums.pairs is None:
        raise ValueError("scores have no pairs, which groups are made from; want score_experts(..., pairs=True)")
    return scores.sums.pairs


def random_experts(selection: ExpertSelection, num_experts: int, seed: int, *, num_shared: int = 0) -> ExpertSelection:
    """Draw as many experts per layer as `selection` has, uniformly without replacement: the control of Table 4."""
    check_positive("num_experts", num_experts)
    generator, pool = random.Random(seed), range(num_shared, num_experts)
    for layer, ids in selection.experts.items():
        if len(ids) > len(pool):
            raise ValueError(
                f"num_experts is {num_experts}, num_shared is {num_shared}, selection has {len(ids)} experts of layer {layer}; "
                "want no more than are routed"
            )
    drawn = {layer: generator.sample(pool, len(ids)) for layer, ids in selection.experts.items()}
    return replace(selection, experts=drawn, score="random", variant=None)


def group_experts(pairs: torch.Tensor, group_size: int, *, num_shared: int = 0) -> list[tuple[int, ...]]:
    """Group the routed experts of one layer by how alike their company is, greedily (App. B).

    `pairs` [E, E] counts the tokens that chose both of two experts. Of all groups of `group_size` experts that are left
    the one with the largest mean pairwise cosine between rows of `pairs`, without the diagonal, is taken, until none is
    left. Raises ValueError unless the size divides the number of routed experts.
    """
    check_positive("group_size", group_size)
    E = pairs.shape[-1] - num_shared
    if pairs.shape != (E + num_shared,) * 2 or E % group_size or math.comb(E, group_size) > MAX_GROUPS:
        raise ValueError(
            f"group_size is {group_size}, pairs is {tuple(pairs.shape)}, num_shared is {num_shared}; want a size that divides "
            f"the routed experts, with at most {MAX_GROUPS} possible groups"
        )
    if group_size == 1:
        return [(e,) for e in range(num_shared, num_shared + E)]
    both = pairs[num_shared:, num_shared:].double()
    rows = torch.nn.functional.normalize(both - both.diag().diag(), dim=1)
    groups = torch.combinations(torch.arange(E), group_size)
    alike = (rows @ rows.T).flatten()
    score = sum(alike[groups[:, i] * E + groups[:, j]] for j in range(group_size) for i in range(j))
    taken, is_free = [], torch.ones(E, dtype=torch.bool)
    while len(groups):
        # the first of equal ones
        best = groups[score.argmax()]
        taken.append(tuple(e + num_shared for e in best.tolist()))
        is_free[best] = False
        left = is_free[groups].all(1)
        groups, score = groups[left], score[left]
    return taken


def check_selection(model: nn.Module | Mapping[int, RoutedLayer], selection: ExpertSelection) -> None:
    """Raise ValueError unless `model` has all layers and ids of `selection`.

    An expert that our own layers share is no choice of the router's: `shared_experts` trains it.
    """
    layers = numbered_layers(model) if isinstance(model, nn.Module) else model
    unknown = [layer for layer in selection.experts if layer not in layers]
    if unknown:
        raise ValueError(
            f"selection has layer {unknown[0]}; want some of {_listed(layers)}, the layers that have experts"
        )
    for layer, ids in selection.experts.items():
        E, shared = layers[layer].num_experts, layers[layer].num_shared
        bad = [e for e in ids if e >= E]
        if bad:
            raise ValueError(f"selection has expert {bad[0]} of layer {layer}, num_experts is {E}; want ids below {E}")
        bad = [e for e in ids if e < shared]
        if bad:
            raise ValueError(
                f"selection has expert {bad[0]} of layer {layer}, which every token sees; want routed experts, ids from "
                f"{shared}; shared_experts=True trains it"
            )


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {shown(value)}; want a whole number of 0 or more")
    return value


def _ids(layer: int, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise ValueError(f"experts of layer {layer} is {shown(ids)}; want ids, such as (4, 0)")
    ids = tuple(_number(f"expert of layer {layer}", e) for e in ids)
    twice = sorted({e for e in ids if ids.count(e) > 1})
    if twice:
        raise ValueError(f"experts of layer {layer} has {twice[0]} twice; want each id once")
    return ids


def _from_text(layer: Any) -> int | None:
    is_number = isinstance(layer, str) and layer.isascii() and layer.isdigit() and str(int(layer)) == layer
    return int(layer) if is_number else None


def _listed(layers: Mapping[int, Any]) -> str:
    return ", ".join(map(str, layers))
