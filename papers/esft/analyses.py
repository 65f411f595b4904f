"""The analyses behind ESFT's figures: which experts a task uses, how few they are, and how much
text it takes to find them.

ESFT (arXiv 2407.01906), with top(s) the experts of a layer with the largest scores of sample s:

    gate mass      c_r = sum of the r largest shares g_e / sum_e g_e of a layer            Fig. 2
    overlap        |top(a) & top(b)|, mean over the layers, of independent samples a, b    Fig. 3, and by their size Fig. 8
    counts         experts that a selection trains, by layer                               Fig. 4
    token shares   a token's slots on trained experts / its slots, over all layers         Fig. 9

Results hold plain numbers: `to_dict` is JSON-ready, and `Kind(**values)` reads it back. Figure 9
becomes an HTML page, where a token's colour is deeper the more of its experts are trained.
"""

import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from moe_runtime.config import check_positive
from moe_runtime.hf.dropin.layers import numbered_layers
from moe_runtime.io.files import atomic_write_text
from moe_runtime.methods.esft.recorder import GateCall, GateRecorder
from moe_runtime.methods.esft.scores import SEED, ExpertScores, sample_batches, score_experts
from moe_runtime.methods.esft.selection import ExpertSelection, check_selection
from papers.engine import plots

TOP = 6  # experts that the figures compare


class _Plain:
    def to_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class GateMass(_Plain):
    """The share of a layer's gate values on its r best experts, r = 1, 2, ...: mean and standard
    deviation over the layers.
    """

    tasks: Sequence[str]
    share: Sequence[Sequence[float]]  # [tasks][R], of the expert of each rank alone
    cumulative: Sequence[Sequence[float]]  # [tasks][R]
    share_sd: Sequence[Sequence[float]]
    cumulative_sd: Sequence[Sequence[float]]

    def experts_for(self, mass: float) -> list[int]:
        """Return how many experts per task hold at least `mass` of the gate values, on average over
        the layers.
        """
        reach = [
            [r for r, value in enumerate(row, 1) if value >= mass - 1e-9] for row in self.cumulative
        ]
        return [
            min(found, default=len(row)) for found, row in zip(reach, self.cumulative, strict=True)
        ]


def gate_mass(scores: Mapping[str, ExpertScores], score: str = "gate") -> GateMass:
    """Sort each layer's shares of the scores in descending order (Fig. 2); `scores` of one model,
    by task.
    """
    _check(scores.values(), "scores")
    found = {"share": [], "cumulative": [], "share_sd": [], "cumulative_sd": []}
    for one in scores.values():
        table = one.scores(score)[:, one.num_shared :]
        share = (table / table.sum(1, keepdim=True)).sort(1, descending=True).values
        for name, rows in (("share", share), ("cumulative", share.cumsum(1))):
            found[name].append(rows.mean(0).tolist())
            found[f"{name}_sd"].append(rows.std(0, correction=0).tolist())
    return GateMass(tasks=tuple(scores), **found)


def shared_top(a: ExpertScores, b: ExpertScores, top: int = TOP, score: str = "gate") -> list[int]:
    """Count, layer by layer, the experts that are among the `top` best of both."""
    check_positive("top", top)
    _check((a, b), "scores")
    routed = a.num_experts - a.num_shared
    if top > routed:
        raise ValueError(
            f"top must be at most the {routed} routed experts of a layer, but got {top}"
        )
    return (_top(a, top, score) & _top(b, top, score)).sum(1).tolist()


def _top(scores: ExpertScores, top: int, score: str) -> torch.Tensor:
    """Return which experts are among the `top` best, [L, E] bool; ties go to lower ids."""
    table = scores.scores(score)
    table[:, : scores.num_shared] = -1
    best = table.sort(dim=1, descending=True, stable=True).indices[:, :top]
    return torch.zeros(table.shape, dtype=torch.bool).scatter_(1, best, True)


@dataclass(frozen=True, kw_only=True)
class Overlap(_Plain):
    """Mean shared top experts between samples of tasks; None on the diagonal for a task with one
    sample.
    """

    tasks: Sequence[str]
    shared: Sequence[Sequence[float | None]]  # [tasks][tasks]
    top: int
    chance: float  # expected overlap of random sets: top^2 / routed experts

    @property
    def within(self) -> float | None:
        """Mean of the diagonal: samples of the same task."""
        found = [row[i] for i, row in enumerate(self.shared) if row[i] is not None]
        return statistics.fmean(found) if found else None

    @property
    def between(self) -> float | None:
        """Mean off the diagonal: samples of different tasks."""
        found = [
            value for i, row in enumerate(self.shared) for j, value in enumerate(row) if i != j
        ]
        return statistics.fmean(found) if found else None


def overlap(
    samples: Mapping[str, Sequence[ExpertScores]], top: int = TOP, score: str = "gate"
) -> Overlap:
    """Compare the top experts of all pairs of independent samples, by task (Fig. 3); the diagonal
    requires two per task.
    """
    _check([one for of_task in samples.values() for one in of_task], "samples")
    shared = []
    for a, ours in samples.items():
        row = []
        for b, theirs in samples.items():
            pairs = [
                (x, y) for i, x in enumerate(ours) for j, y in enumerate(theirs) if a != b or i < j
            ]
            found = [statistics.fmean(shared_top(x, y, top, score)) for x, y in pairs]
            row.append(statistics.fmean(found) if found else None)
        shared.append(row)
    first = next(iter(samples.values()))[0]
    return Overlap(
        tasks=tuple(samples),
        shared=shared,
        top=top,
        chance=top**2 / (first.num_experts - first.num_shared),
    )


def two_samples(rows: Sequence, seed: int = SEED) -> tuple[list, list]:
    """Split `rows` at random into two disjoint halves."""
    rows = list(rows)
    if len(rows) < 2:
        raise ValueError(f"Two samples require at least 2 examples, but got {len(rows)}")
    random.Random(seed).shuffle(rows)
    return rows[::2], rows[1::2]


@dataclass(frozen=True, kw_only=True)
class SampleSizes(_Plain):
    """Mean number of top experts shared by two independent samples of a task, by sample size."""

    tasks: Sequence[str]
    sizes: Sequence[int]  # tokens of a sample
    shared: Sequence[Sequence[float]]  # [tasks][sizes]
    top: int
    score: str = "gate"


def sample_sizes(
    model: nn.Module,
    rows: Mapping[str, Sequence],
    sizes: Sequence[int],
    *,
    top: int = TOP,
    score: str = "gate",
    seed: int = SEED,
    **options,
) -> SampleSizes:
    """Compare the top experts of two disjoint samples of each task, for each sample size in tokens
    (Fig. 8).

    `rows` are tokenized examples by task; `options` are those of `sample_batches`.
    """
    sizes = sorted(sizes)
    halves = {task: two_samples(of_task, seed) for task, of_task in rows.items()}
    for task, both in halves.items():
        least = min(
            sum(len(row["input_ids"] if isinstance(row, Mapping) else row) for row in half)
            for half in both
        )
        if least < sizes[-1]:
            raise ValueError(
                f"sizes must be at most {least}, the tokens in half of the examples of {task!r}, "
                f"but got {sizes[-1]}"
            )
    shared = []
    for both in halves.values():
        found = []
        for size in sizes:
            pair = [
                score_experts(model, sample_batches(half, size, seed=seed, **options), size)
                for half in both
            ]
            found.append(statistics.fmean(shared_top(*pair, top, score)))
        shared.append(found)
    return SampleSizes(tasks=tuple(rows), sizes=sizes, shared=shared, top=top, score=score)


@dataclass(frozen=True, kw_only=True)
class ExpertCounts(_Plain):
    """Experts that train, by task and layer."""

    tasks: Sequence[str]
    layers: Sequence[int]
    counts: Sequence[Sequence[int]]  # [tasks][layers]
    num_experts: int  # routed experts per layer

    @property
    def shares(self) -> list[float]:
        """The share of all routed experts that trains, per task."""
        return [sum(row) / (len(self.layers) * self.num_experts) for row in self.counts]


def expert_counts(
    selections: Mapping[str, ExpertSelection], num_experts: int, layers: Sequence[int] | None = None
) -> ExpertCounts:
    """Count the selected experts per layer (Fig. 4); `num_experts` are the routed ones of a layer,
    `layers` all by default.
    """
    check_positive("num_experts", num_experts)
    layers = sorted(
        {n for one in selections.values() for n in one.experts} if layers is None else set(layers)
    )
    counts = [[len(one.experts.get(layer, ())) for layer in layers] for one in selections.values()]
    return ExpertCounts(
        tasks=tuple(selections), layers=layers, counts=counts, num_experts=num_experts
    )


@dataclass(frozen=True, kw_only=True)
class TokenShares(_Plain):
    """A text in pieces, one per token, and the share of each token's slots that are on trained
    experts.
    """

    pieces: Sequence[str]  # joined: the text up to max_length tokens; "" for a special token
    shares: Sequence[float]
    slots: int  # per token, over all layers

    @property
    def mean(self) -> float:
        """The mean share over the tokens."""
        return statistics.fmean(self.shares) if self.shares else 0.0


@torch.no_grad()
def token_shares(
    model: nn.Module,
    tokenizer,
    texts: Iterable[str],
    selection: ExpertSelection,
    *,
    max_length: int = 1024,
) -> list[TokenShares]:
    """Return each token's share of slots on trained experts (Fig. 9); runs `model` in eval mode,
    texts cut at `max_length`.
    """
    check_selection(numbered_layers(model), selection)
    check_positive("max_length", max_length)
    found = []
    modes = [(module, module.training) for module in model.modules()]
    device = getattr(model, "device", None) or next(model.parameters()).device
    model.eval()
    try:
        for text in texts:
            if getattr(tokenizer, "is_fast", False):
                with_offsets = {"return_offsets_mapping": True}
            else:
                with_offsets = {}
            tokens = tokenizer(text, truncation=True, max_length=max_length, **with_offsets)
            ids = tokens["input_ids"]
            if not ids:
                raise ValueError(f"Text {text!r} has no tokens. Pass other text")
            pieces = _pieces(tokenizer, text, ids, tokens.get("offset_mapping"))
            trained = _Trained(selection, len(ids))
            with GateRecorder(model, see=trained.see):
                model(torch.tensor([ids], device=device))
            shares = (trained.slots.double() / trained.of).tolist()
            found.append(TokenShares(pieces=pieces, shares=shares, slots=trained.of))
    finally:
        for module, training in modes:
            module.training = training
    return found


class _Trained:
    """Counts each token's slots on trained experts, call by call."""

    def __init__(self, selection: ExpertSelection, tokens: int):
        self.selection, self.slots, self.of = selection, torch.zeros(tokens, dtype=torch.long), 0

    def see(self, call: GateCall) -> None:
        ids = torch.tensor(self.selection.experts.get(call.layer, ()), dtype=torch.long)
        self.slots += torch.isin(call.topk_idx.long().cpu(), ids).sum(1)
        self.of += call.topk_idx.shape[1] - call.num_shared


def _pieces(
    tokenizer, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None
) -> list[str]:
    """Cut `text` at its tokens; a character of several tokens goes to the first of them."""
    if offsets is None:
        return [tokenizer.decode([one]) for one in ids]
    pieces = []
    at = 0
    for _, end in offsets:
        # what a tokenizer drops between two tokens stays in the text
        pieces.append(text[at:end])
        at = max(at, end)
    return pieces


def _check(scores: Iterable[ExpertScores], name: str) -> None:
    scores = list(scores)
    shapes = {(one.layers, one.num_experts, one.num_shared) for one in scores}
    if len(shapes) != 1:
        problem = "empty" if not shapes else f"of {len(shapes)} kinds of models"
        raise ValueError(f"{name} must be scores of one model's layers, but is {problem}")


_NOTE = "Each token's experts over all layers: the deeper the colour, the more of them are trained."


def page(
    texts: Mapping[str, Sequence[TokenShares]],
    title: str = "Where trained experts work",
    note: str = "",
) -> str:
    """Return an HTML page of texts by task."""
    scale = " ".join(_token(f" {step / 4:.0%} ", step / 4, "") for step in range(5))
    sections = "\n".join(_section(task, shares) for task, shares in texts.items())
    return plots.page(
        title,
        f"{_NOTE} {note}".strip(),
        f"Share of a token's experts that are trained: {scale}",
        sections,
        light="--tint: 0, 114, 178;",
        dark="--tint: 58, 150, 210;",
        # legible on a token whose experts are all trained too
        background="rgba(var(--tint), calc(0.6 * var(--s)))",
    )


def write_page(
    path: str | os.PathLike, texts: Mapping[str, Sequence[TokenShares]], **options
) -> None:
    """Write `page`, atomically."""
    atomic_write_text(path, page(texts, **options))


def _section(task: str, texts: Sequence[TokenShares]) -> str:
    blocks = []
    for text in texts:
        pairs = zip(text.pieces, text.shares, strict=True)
        tokens = "".join(
            _token(piece, share, f"{share:.0%} of {text.slots}") for piece, share in pairs if piece
        )
        blocks.append(plots.block(tokens, f"{text.mean:.1%} of {len(text.shares)} tokens' experts"))
    return plots.section(task, blocks)


def _token(piece: str, share: float, tooltip: str) -> str:
    return plots.token(piece, f"--s:{share:.3f}", tooltip)
