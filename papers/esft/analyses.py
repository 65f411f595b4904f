"""The analyses behind ESFT's figures: which experts a task uses, and how few they are.

ESFT (arXiv 2407.01906):

    gate mass       c_r = sum of the r largest shares g_e / sum_e g_e of a layer       Fig. 2
    counts          experts that a selection trains, by layer                          Fig. 4
    token shares    a token's slots on trained experts / its slots, over all layers    Fig. 9

Results hold plain numbers: `to_dict` is JSON-ready, and `Kind(**values)` reads it back. Figure 9
becomes an HTML page, where a token's colour is deeper the more of its experts are trained.
"""

import os
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
from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import ExpertSelection, check_selection
from papers.engine import plots


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
        reach = []
        for row in self.cumulative:
            reach.append([r for r, value in enumerate(row, 1) if value >= mass - 1e-9])
        experts_for = []
        for found, row in zip(reach, self.cumulative, strict=True):
            experts_for.append(min(found, default=len(row)))
        return experts_for


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
        shares = []
        for row in self.counts:
            shares.append(sum(row) / (len(self.layers) * self.num_experts))
        return shares


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
    counts = []
    for one in selections.values():
        counts.append([len(one.experts.get(layer, ())) for layer in layers])
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
    modes = []
    for module in model.modules():
        modes.append((module, module.training))
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
    shapes = set()
    for one in scores:
        shapes.add((one.layers, one.num_experts, one.num_shared))
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
