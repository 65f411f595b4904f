"""Whether a fused model still solves what its specialist solves, beside single models of equal steps and plainer fusions.

    average of the weights        theta = 1/S sum_s theta_s: one model of a specialist's size
    average of the logits         o = 1/S sum_s o_s: a gate whose scores are 0, nothing trained
    best specialist per example   the one with the lowest loss on the answer, which no selector can know
    one model                     the base tuned on all domains: for the steps of the longest specialist, on balanced batches;
                                  for the steps of all trainings, on the union of the examples, which all specialists saw

A sum is solved if greedy decoding gives its answer, every step of it. McNemar's exact test is on the problems that only one of
two models solves, with more seeds than the other where there are several; Holm's correction covers the table.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe_runtime.experiments.compare import LEVEL, VERDICTS, mcnemar
from moe_runtime.experiments.corpora import KINDS
from moe_runtime.experiments.domains import DomainReport, Judged, places_of
from moe_runtime.experiments.plots import COLOURS, MARKERS, figure_of
from moe_runtime.experiments.stages import loss_of, sizes_of
from moe_runtime.experiments.tables import Entry, Run, finite
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.fit import each_row
from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser import selector
from moe_runtime.methods.ultrafuser.recipe import FuserRecipe
from moe_runtime.methods.ultrafuser.training import fuser_losses

FUSED, GATE = "fused: two stages, balanced", "fused: stage 1 alone"


class Stages(selector.Stages):
    """The stages of a study, with single models and plainer fusions of the same specialists."""

    def single(self, steps: int, balanced: bool) -> Judged:
        """Return the base tuned on all domains in the first specialist's template, otherwise as specialists are."""
        training = self.recipe.specialist.change(epochs=None, steps=steps)
        return self._on_all("single", f"one model, {steps} steps", self.base(), 0, training, balanced)

    def averaged(self) -> Judged:
        """Return one model with the mean of the specialists' weights, in the first one's template."""
        specialists = [self.specialist(name) for name in self.names]

        def make(tmp: Path, folder: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    models = [ranks.load_model(one.source, self.recipe.dtype) for one in specialists]
                    parts = zip(*(model.parameters() for model in models), strict=True)
                    with torch.no_grad():
                        for own, *others in parts:
                            own.copy_(torch.stack([own, *others]).float().mean(0))
                    ranks.save_whole(models[0], self.tokenizer, tmp / "model", self.recipe.dtype)
            return self._judged_single(tmp / "model", 0)

        return self._made("averaged", "average of the weights", {"dtype": self.recipe.dtype}, specialists, make)

    def equal(self) -> Judged:
        """Return the specialists fused with equal weights on every token; nothing is trained."""
        specialists = [self.specialist(name) for name in self.names]

        def make(tmp: Path, folder: Path) -> dict:
            model = self._fuser([one.source for one in specialists], self.recipe.dtype)
            for parameter in model.gate.score.parameters():
                nn.init.zeros_(parameter)
            with ranks.leading() as main:
                if main:
                    ultrafuser.save(model, tmp / "model", specialists="reference")
            found = fuser_losses(model, self.part("held_out"), collator=self.encoder.collate, **self._judging)
            return self._loss(*found) | sizes_of(model)

        settings = {"dtype": self.recipe.dtype, "gate": self.recipe.gate, "joint": self.recipe.joint}
        return self._made("equal", "average of the logits", settings, specialists, make)

    def generated(self, fused: Judged, domain: str) -> list[int]:
        """Return for each held-out example of a domain whether a fused model's greedy generation is its answer."""
        rows, model = self.part("held_out"), ultrafuser.load(fused.folder).to(ranks.state().device)
        place = places_of(self.counts)[domain]

        def take(model, batch: dict) -> list[int]:
            labels = batch["labels"]
            inputs = {name: batch[name] for name in ("prompt_ids", "prompt_mask")}
            found = model.generate(**inputs, max_new_tokens=labels.shape[1], do_sample=False)
            found = nn.functional.pad(found, (0, labels.shape[1] - found.shape[1]), value=-1)
            return ((found == labels) | (labels == -100)).all(1).int().tolist()

        return each_row(model, rows.select(range(place.start, place.stop)), take, collator=self.encoder.collate, **self._judging)


@dataclass(kw_only=True)
class SumsReport(DomainReport):
    """A table of the sums that models solve, by their number of steps, and of the losses of all domains."""

    domain: str  # that of the sums
    lengths: list[int]  # steps of each held-out sum
    generated: list[tuple[int, int]]  # of each seed: sums that the fused model solves in generation; with another verdict

    def __post_init__(self):
        super().__post_init__()
        place = places_of(self.entries[0].results[0].rows)[self.domain]
        self.right = {entry.name: [result.exact[place] for result in entry.results] for entry in self.entries}
        self.tests = mcnemar(self.right, self.reference)

    def solved_of(self, name: str, steps: int | None = None) -> list[float]:
        """Return the share of solved sums, of all or of so many steps, for each seed."""
        chosen = [place for place, length in enumerate(self.lengths) if steps in (None, length)]
        return [statistics.fmean(right[place] for place in chosen) for right in self.right[name]]

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and their alignment."""
        steps = [f"{count} step{'s' * (count > 1)}" for count in sorted(set(self.lengths))]
        names = (*steps, "solved", "+ -", "p", *(f"loss {domain}" for domain in self.domains), "all", "parameters", "train s")
        return [("method", "left"), *((name, "right") for name in names)]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        by_steps = [statistics.fmean(self.solved_of(entry.name, steps)) for steps in sorted(set(self.lengths))]
        solved, seconds = self.solved_of(entry.name), f"{entry.seconds:,.0f}" if entry.seconds else ""
        spread = f" ± {statistics.stdev(solved):.3f}" if len(solved) > 1 else ""
        gained, lost, p = self.tests.get(entry.name, (0, 0, math.nan))
        tested = ("", "") if math.isnan(p) else (f"+{gained} -{lost}", f"{p:.3f}" if p >= 0.001 else f"{p:.1e}")
        return (
            entry.name, *(f"{share:.3f}" for share in by_steps), f"{statistics.fmean(solved):.3f}{spread}", *tested,
            *(self._cell(entry.name, domain) for domain in self.domains), entry.mean_sd(),
            f"{entry.results[0].parameters:,}", seconds,
        )  # fmt: skip

    def legend(self) -> str:
        """Return lines that explain the table's numbers."""
        counts = ", ".join(f"{self.lengths.count(steps)} of {steps}" for steps in sorted(set(self.lengths)))
        return (
            f"solved: share of the {len(self.lengths)} held-out sums (by steps: {counts}) of whose answer every token is the most "
            f"probable one; + -: sums solved with more and with fewer seeds than by {self.reference}; p: McNemar's exact test on "
            f"these, corrected by Holm for {len(self.tests)}.\n{super().legend()}"
        )

    def to_dict(self) -> dict:
        """Return the report as JSON-ready values."""
        steps = (None, *sorted(set(self.lengths)))
        solved = {name: {str(count or "all"): self.solved_of(name, count) for count in steps} for name in self.right}
        return super().to_dict() | finite({"solved": solved, "tests": self.tests, "generated": self.generated})


def check(recipe: FuserRecipe) -> dict:
    """Return no options; raises ValueError for a recipe without sums, or whose specialists are not made of a base."""
    if recipe.specialist is None or domain_of(recipe) is None:
        found = ", ".join(map(str, recipe.domains.values()))
        raise ValueError(f"Expected a recipe that tunes specialists, with a domain of {', '.join(KINDS)}, but it has {found}")
    return {}


def domain_of(recipe: FuserRecipe) -> str | None:
    """Return the first domain that is of sums."""
    return next((name for name, domain in recipe.domains.items() if domain.train in list(KINDS)), None)


def best_of(results: Sequence[Judged]) -> Judged:
    """Return the results of the model with the lowest loss on each example."""
    places = [min(range(len(results)), key=lambda s: results[s].losses[row]) for row in range(len(results[0].losses))]
    losses, exact = ([getattr(results[s], of)[row] for row, s in enumerate(places)] for of in ("losses", "exact"))
    sizes = {of: sum(getattr(one, of) for one in results) for of in ("parameters", "total_seconds")}
    return results[0]._replace(**loss_of(losses, results[0].tokens, exact), **sizes)


def measure(process: Run) -> dict:
    """Train and judge all models for each seed."""
    r, domain = process.recipe, domain_of(process.recipe)
    made = [r.training_of(name).steps for name, one in r.specialists.items() if one.model is None]
    longest, total = max(made), sum(made) + r.stage1.steps + r.stage2.steps

    def plan(stages: Stages):
        yield "base", stages.base()
        specialists = {name: stages.specialist(name) for name in stages.names}
        yield from ((f"specialist {name}", one) for name, one in specialists.items())
        yield "average of the weights", stages.averaged()
        yield "average of the logits", stages.equal()
        yield "best specialist per example", best_of([*specialists.values()])
        yield "sample-level selector", stages.selected()
        yield f"one model, {longest} steps, balanced", stages.single(longest, True)
        yield f"one model, {total} steps, all examples", stages.single(total, False)
        yield GATE, stages.gate(balanced=True)
        yield FUSED, stages.fused(two_stage=True, balanced=True)

    entries, first = process.collect(plan), process.all[0]
    place, decode = places_of(first.counts)[domain], first.encoder.tokenizer.decode
    lengths = [decode(ids).count("=") for ids in first.part("held_out")["response_ids"][place]]
    generated = []
    for stages, fused in zip(process.all, entries[-1].results, strict=True):
        flags = stages.generated(fused, domain)
        generated.append((sum(flags), sum(a != b for a, b in zip(flags, fused.exact[place], strict=True))))
    return {
        "entries": entries, "reference": FUSED, "domain": domain, "lengths": lengths, "generated": generated,
        "summary": _summary,
    }  # fmt: skip


def _summary(report: SumsReport) -> list[str]:
    lines = []
    for name, (gained, lost, p) in report.tests.items():
        verdict = VERDICTS[2] if p > LEVEL else "more" if gained > lost else "fewer"
        share, ours = (statistics.fmean(report.solved_of(one)) for one in (name, report.reference))
        lines.append(f"{name} against {report.reference}: {share:.3f} and {ours:.3f} of the sums solved, {verdict} (p {p:.2g}).")
    solved = ", ".join(f"{count} of {len(report.lengths)}" for count, _ in report.generated)
    others = ", ".join(str(count) for _, count in report.generated)
    return [*lines, f"The fused model, generating token by token: {solved} solved; verdicts that differ from the table's: {others}."]


def picture(report: SumsReport):
    """Plot the share of solved sums by their steps, and all sums against the loss on the other domains."""
    figure, (left, right) = figure_of(report, (12.6, 4.8), columns=2)
    steps = sorted(set(report.lengths))
    others = [domain for domain in report.domains if domain != report.domain]
    for number, entry in enumerate(report.entries):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        shares = [statistics.fmean(report.solved_of(entry.name, count)) for count in steps]
        left.plot(steps, shares, linewidth=1, **style)
        losses = [statistics.fmean(result.domains[domain] for domain in others) for result in entry.results]
        right.scatter(losses, report.solved_of(entry.name), s=18, alpha=0.4, **style)
        right.scatter(statistics.fmean(losses), statistics.fmean(report.solved_of(entry.name)), s=60, label=entry.name, **style)
    left.set(xlabel="steps of the sum", ylabel="share of held-out sums solved", xticks=steps)
    right.set(xlabel=f"held-out loss per label token, mean of {' and '.join(others)}", ylabel="share of all sums solved")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", fontsize=8)
    return figure
