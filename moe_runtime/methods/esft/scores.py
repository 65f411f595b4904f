"""ESFT's gate score and token score: how much a task uses each expert.

ESFT (arXiv 2407.01906), for expert e of a layer, K experts per token, over the tokens t of a sample
of the training set:

    gate score   g_e = mean_t g_{e,t}               Eq. (6), g_{e,t} = 0 outside of t's top K
    token score  r_e = mean_t 1[g_{e,t} > 0] / K    Eq. (7)

Variants, since the paper, the released results and the released script differ in what they divide
by:

    v1           means over all tokens: every released result; a row of token scores sums to 1, one
                 of gate scores does not
    paper        means over the samples of each sample's mean, as the equations are written
    normalized   v1 with rows that sum to 1: "normalized gate values" (Sec. 3.3)
    head         v1 over its sum over the layers, as the released script now divides: columns sum to
                 1

Gate values are those that the router hands to the experts. If it scales them (by a
routed_scaling_factor of 2.5, say), v1 is scaled too, and p is a share of the gate values only with
`normalized`.
"""

import builtins
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moe_runtime.config import check_choice, check_positive
from moe_runtime.hf.models.families import check_module
from moe_runtime.hf.training.calibration import TOKENS, model_inputs, world
from moe_runtime.io.files import atomic_write_text, read_json
from moe_runtime.methods.esft.base import identify, read_base, write_base
from moe_runtime.methods.esft.official import read_tables, summary_tables
from moe_runtime.methods.esft.recorder import GateRecorder, GateSums

SCORES = ("gate", "token")
VARIANTS = ("v1", "paper", "normalized", "head")
_TABLES = ("count", "gate", "sample_count", "sample_gate")
SUMS = (*_TABLES, "n_tokens", "n_samples", "top_k", "num_shared")  # fields of GateSums


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertScores:
    """Scores of every expert of every layer on a task (ESFT, Eq. 6 and 7).

    Attributes:
        layers: Numbers of the model's MoE layers, L of them.
        gate: [L, E] float64, the mean weight that the router gives an expert.
        token: [L, E] float64, the share of tokens that select an expert, divided by K.
        variant: Definition of the scores: "v1", "paper", "normalized" or "head".
        num_shared: Number of leading experts that every token passes through; their scores are 0.
        sums: What the scores were computed from; None for an official summary, which then has only
            its own variant and those that follow from it.
        base: Identifies the model that was scored, if it is known.
    """

    layers: tuple[int, ...]
    gate: torch.Tensor  # [L, E] float64
    token: torch.Tensor  # [L, E] float64
    variant: str = "v1"
    num_shared: int = 0  # leading experts that every token sees; they have zeros
    sums: GateSums | None = None
    base: Mapping[str, Any] | None = None  # the scored model, if it is known

    @classmethod
    def from_sums(cls, sums: GateSums, variant: str = "v1") -> "ExpertScores":
        """Divide the sums of a GateRecorder."""
        check_choice("variant", variant, VARIANTS)
        return cls(
            layers=sums.layers,
            **_tables(sums, variant),
            variant=variant,
            num_shared=sums.num_shared,
            sums=sums,
        )

    @property
    def num_experts(self) -> int:
        """Number of experts E, including shared ones."""
        return self.gate.shape[1]

    @property
    def n_tokens(self) -> int | None:
        """Number of scored tokens; None if only the scores are known."""
        return None if self.sums is None else self.sums.n_tokens

    @property
    def top_k(self) -> int | None:
        """Routed experts per token; None if only the scores are known."""
        return None if self.sums is None else self.sums.top_k

    def scores(
        self, score: str = "gate", variant: str | None = None, round: int | None = None
    ) -> torch.Tensor:
        """Return the scores of one kind, [L, E] float64, rounded to `round` digits if given (4 in
        the official code).
        """
        check_choice("score", score, SCORES)
        variant = self.variant if variant is None else variant
        check_choice("variant", variant, VARIANTS)
        if variant == self.variant:
            table = getattr(self, score)
        elif self.sums is not None:
            table = _tables(self.sums, variant)[score]
        elif self.variant == "v1" and variant != "paper":
            table = _divided(getattr(self, score), variant)
        else:
            raise ValueError(
                f"Variant {variant!r} cannot be computed from {self.variant!r} scores without "
                f"their sums. Use {self.variant!r}, or score again"
            )
        if round is None:
            return table.clone()
        # Python rounds the decimal number, torch.round a product that may have lost the last bit
        rows = [[builtins.round(value, round) for value in row] for row in table.tolist()]
        return torch.tensor(rows, dtype=torch.float64)

    def to_dict(self, round: int | None = None) -> dict[str, Any]:
        """Return the official summary, JSON-ready; unless it is rounded, with the model and the
        sums for every variant.
        """
        tables = {score: self.scores(score, round=round) for score in SCORES}
        values = summary_tables(self.layers, self.num_shared, **tables) | {"variant": self.variant}
        if round is not None:
            return values
        if self.sums is not None:
            values["sums"] = {}
            for name in SUMS:
                part = getattr(self.sums, name)
                values["sums"][name] = part.tolist() if torch.is_tensor(part) else part
        return values | write_base(self.base)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], variant: str | None = None, source: str = "summary"
    ) -> "ExpertScores":
        """Create scores from `to_dict`'s or an official summary; errors name `source` and the key.

        An official summary does not name its variant: "head" if columns sum to 1 and rows do not,
        else "v1", unless `variant` is given.
        """
        layers, num_shared, tables = read_tables(values, source)
        saved = values.get("variant") or variant or _guess_variant(tables["token"])
        variant = variant or saved
        check_choice(f"{source}: variant", saved, VARIANTS)
        base = read_base(values, source)
        if "sums" in values:
            sums = _read_sums(values["sums"], layers, source)
            return replace(cls.from_sums(sums, variant), base=base)
        scores = cls(layers=layers, **tables, variant=saved, num_shared=num_shared, base=base)
        tables = {name: scores.scores(name, variant) for name in SCORES}
        return replace(scores, variant=variant, **tables)

    def save(self, path: str | os.PathLike, *, round: int | None = None) -> None:
        """Write the summary, atomically; `round=4` makes it the official one."""
        atomic_write_text(path, json.dumps(self.to_dict(round), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike, variant: str | None = None) -> "ExpertScores":
        """Read a summary, also an official one; raises ValueError that names the file and
        the key.
        """
        return cls.from_dict(read_json(path), variant, str(path))


def _tables(sums: GateSums, variant: str) -> dict[str, torch.Tensor]:
    if variant == "paper":
        return {
            "gate": sums.sample_gate / sums.n_samples,
            "token": sums.sample_count / (sums.n_samples * sums.top_k),
        }
    means = {
        "gate": sums.gate / sums.n_tokens,
        "token": sums.count.double() / (sums.n_tokens * sums.top_k),
    }
    return {score: _divided(table, variant) for score, table in means.items()}


def _divided(table: torch.Tensor, variant: str) -> torch.Tensor:
    """Normalize v1's scores for `variant`; rows or columns with sum 0 stay 0."""
    if variant == "v1":
        return table
    total = table.sum(int(variant == "normalized"), keepdim=True)
    return torch.where(total > 0, table / total, table)


def _guess_variant(token: torch.Tensor) -> str:
    # tables of 4 digits are off by half of the last one per summand
    columns = (token.sum(0) - 1).abs().max().item() / token.shape[0]
    rows = (token.sum(1) - 1).abs().max().item() / token.shape[1]
    return "head" if columns < 1e-4 <= rows else "v1"


def _read_sums(values: Any, layers: tuple[int, ...], source: str) -> GateSums:
    try:
        parts = {name: values[name] for name in SUMS}
        for name in _TABLES:
            dtype = torch.int64 if name == "count" else torch.float64
            parts[name] = torch.tensor(parts[name], dtype=dtype)
        for name in ("n_tokens", "n_samples", "top_k"):
            check_positive(name, parts[name])
        shape = (len(layers), parts["count"].shape[-1])
        if any(parts[name].shape != shape for name in _TABLES):
            raise ValueError(f"tables of different shapes, not all {shape}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{source}: the sums cannot be read ({error!r}). Pass the file as it was written"
        ) from error
    return GateSums(layers=layers, **parts)


@torch.no_grad()
def score_experts(
    model: nn.Module,
    dataloader: Iterable[Mapping[str, torch.Tensor] | torch.Tensor],
    n_tokens: int = TOKENS,
    *,
    variant: str = "v1",
    per_process: bool = False,
) -> ExpertScores:
    """Run a model over a sample and return each expert's scores (ESFT, Eq. 6 and 7).

    The model runs in eval mode, and every module is set back to its mode afterwards. All tokens but
    padding count. A shared expert of our own models gets scores of 0.

    Args:
        model: A stock MoE model, or one of ours.
        dataloader: Batches: the model's keyword arguments, or its input_ids [B, S]. A row is a
            sample. With torch.distributed every process brings its own.
        n_tokens: Tokens to score at most, over all processes; the paper's number by default.
        variant: Definition of the scores: "v1" (the first release), "paper", "normalized" or
            "head".
        per_process: Whether each process scores `n_tokens` tokens.

    Returns:
        The scores, the same in all processes.

    Raises:
        ValueError: If the model has no MoE layers, or an argument is invalid.
    """
    check_module(model)
    check_positive("n_tokens", n_tokens)
    check_choice("variant", variant, VARIANTS)
    ranks, rank = world()
    if not per_process:
        n_tokens = n_tokens // ranks + (rank < n_tokens % ranks)
    modes = [(module, module.training) for module in model.modules()]
    with GateRecorder(model) as recorder:
        model.eval()
        try:
            for batch, only in model_inputs(model, dataloader, n_tokens):
                recorder.only = only
                model(**batch)
        finally:
            for module, training in modes:
                module.training = training
        sums = recorder.read(reduce=True)
    return replace(ExpertScores.from_sums(sums, variant), base=identify(model, recorder.layers))
