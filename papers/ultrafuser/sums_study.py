"""Whether a fused model still solves what its specialist solves, compared with single models and
simpler fusions.

    average of the weights        theta = 1/S sum_s theta_s: one model of a specialist's size
    average of the logits         o = 1/S sum_s o_s: a gate whose scores are 0, nothing trained
    best specialist per example   the one with the lowest loss on the answer: an oracle that no
                                  selector can reach
    one model                     the base tuned on all domains: for the steps of the longest
                                  specialist, on balanced batches;
                                  for the steps of all trainings, on the union of the examples,
                                  which all specialists saw

A sum is solved if greedy decoding gives its answer with every step. McNemar's exact test uses the
problems that only one of two models solves (with several seeds: on more seeds than the other);
Holm's correction covers the table.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.optim.swa_utils import AveragedModel

from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.fit import each_row
from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser.training import fuser_losses
from papers.engine.compare import LEVEL, mcnemar
from papers.engine.domains import DomainReport, Judged, places_of
from papers.engine.plots import cycle, figure_of
from papers.engine.stages import loss_of, sizes_of
from papers.engine.sums import KINDS
from papers.engine.tables import Entry, Run
from papers.ultrafuser import selector
from papers.ultrafuser.recipe import FuserRecipe

FULL = "two-stage, balanced"
GATE = "stage 1 alone, balanced"


class Stages(selector.Stages):
    """The stages of a study, with single models and simpler fusions of the same specialists."""

    def single(self, steps: int, balanced: bool) -> Judged:
        """Return the base tuned on all domains in the first specialist's template, otherwise as
        specialists are.
        """
        training = self.recipe.specialist.change(epochs=None, steps=steps)
        return self._on_all(
            "single", f"one model, {steps} steps", self.base(), 0, training, balanced
        )

    def averaged(self) -> Judged:
        """Return one model with the mean of the specialists' weights, in the first one's
        template.
        """
        specialists = [self.specialist(name) for name in self.names]

        def make(tmp: Path, folder: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    models = [
                        ranks.load_model(one.source, self.recipe.dtype).float()
                        for one in specialists
                    ]
                    mean = AveragedModel(models[0])
                    for model in models:
                        mean.update_parameters(model)
                    ranks.save_whole(mean.module, self.tokenizer, tmp / "model", self.recipe.dtype)
            return self._judged_single(tmp / "model", 0)

        return self._made(
            "averaged", "average of the weights", {"dtype": self.recipe.dtype}, specialists, make
        )

    def equal(self) -> Judged:
        """Return the specialists fused with equal weights on every token, without training."""
        specialists = [self.specialist(name) for name in self.names]

        def make(tmp: Path, folder: Path) -> dict:
            model = self._fuser([one.source for one in specialists], self.recipe.dtype)
            for parameter in model.gate.score.parameters():
                nn.init.zeros_(parameter)
            with ranks.leading() as main:
                if main:
                    ultrafuser.save(model, tmp / "model", specialists="reference")
            found = fuser_losses(
                model, self.part("held_out"), collator=self.encoder.collate, **self._judging
            )
            return self._loss(*found) | sizes_of(model)

        settings = {
            "dtype": self.recipe.dtype,
            "gate": self.recipe.gate,
            "joint": self.recipe.joint,
        }
        return self._made("equal", "average of the logits", settings, specialists, make)

    def generated(self, fused: Judged, domain: str) -> list[int]:
        """Return for each held-out example of a domain whether a fused model's greedy generation
        equals its answer.
        """
        rows = self.part("held_out")
        model = ultrafuser.load(fused.folder).to(ranks.state().device)
        place = places_of(self.counts)[domain]

        def take(model, batch: dict) -> list[int]:
            labels = batch["labels"]
            inputs = {name: batch[name] for name in ("prompt_ids", "prompt_mask")}
            found = model.generate(**inputs, max_new_tokens=labels.shape[1], do_sample=False)
            found = nn.functional.pad(found, (0, labels.shape[1] - found.shape[1]), value=-1)
            return ((found == labels) | (labels == -100)).all(1).int().tolist()

        rows = rows.select(range(place.start, place.stop))
        return each_row(model, rows, take, collator=self.encoder.collate, **self._judging)


def check(recipe: FuserRecipe) -> dict:
    """Return the domain of sums; raises ValueError for a recipe without one, or with specialists
    not tuned for steps.
    """
    domain = next((name for name, one in recipe.domains.items() if str(one) in KINDS), None)
    steps = [
        recipe.training_of(name).steps if one.model is None else None
        for name, one in recipe.specialists.items()
    ]
    if None in steps or domain is None:
        raise ValueError(
            "Expected a recipe that tunes all specialists for a number of steps, with a domain of "
            f"{', '.join(KINDS)}, but it has the domains "
            f"{', '.join(map(str, recipe.domains.values()))} and the steps {steps}"
        )
    return {"domain": domain}


def best_of(results: Sequence[Judged]) -> Judged:
    """Return the results of the model with the lowest loss on each example."""
    best = [
        min(range(len(results)), key=lambda s: results[s].losses[row])
        for row in range(len(results[0].losses))
    ]
    losses, exact = (
        [getattr(results[s], of)[row] for row, s in enumerate(best)] for of in ("losses", "exact")
    )
    sizes = {
        of: sum(getattr(one, of) for one in results)
        for of in ("parameters", "trained_parameters", "total_seconds")
    }
    return results[0]._replace(**loss_of(losses, results[0].tokens, exact), **sizes)


def by_steps(result: Judged, domain: str, lengths: Sequence[int]) -> Judged:
    """Return a result with the domain of sums split by the sums' numbers of steps, `lengths`."""
    rows = {}
    order = []
    for name, place in places_of(result.rows).items():
        steps = lengths if name == domain else [0] * (place.stop - place.start)
        for count in sorted(set(steps)):
            chosen = [row for row, own in enumerate(steps, place.start) if own == count]
            rows[f"{count} step{'s' * (count > 1)}" if count else name] = len(chosen)
            order += chosen
    found = ([getattr(result, of)[row] for row in order] for of in ("losses", "tokens", "exact"))
    return result._replace(rows=rows, **loss_of(*found))


def measure(process: Run, domain: str) -> dict:
    """Train and evaluate all models for each seed."""
    r = process.recipe
    first = process.all[0]
    made = [r.training_of(name).steps for name in r.specialists]
    longest = max(made)
    total = sum(made) + r.stage1.steps + r.stage2.steps

    def plan(stages: Stages):
        yield "base", stages.base()
        specialists = {f"specialist {name}": stages.specialist(name) for name in stages.names}
        yield from specialists.items()
        yield "average of the weights", stages.averaged()
        yield "average of the logits", stages.equal()
        yield "sample-level selector", stages.selected()
        yield "best specialist per example", best_of([*specialists.values()])
        yield f"one model, {longest} steps, balanced", stages.single(longest, True)
        yield f"one model, {total} steps", stages.single(total, False)
        yield GATE, stages.gate(balanced=True)
        yield FULL, stages.fused(two_stage=True, balanced=True)

    entries = process.collect(plan)
    place = places_of(first.counts)[domain]
    lengths = [
        first.tokenizer.decode(ids).count("=")
        for ids in first.part("held_out")["response_ids"][place]
    ]
    right = {entry.name: [result.exact[place] for result in entry.results] for entry in entries}
    tests = mcnemar(right, FULL)
    generated = []
    for stages, result in zip(process.all, entries[-1].results, strict=True):
        flags = stages.generated(result, domain)
        generated.append(
            [sum(flags), sum(a != b for a, b in zip(flags, result.exact[place], strict=True))]
        )

    def summary(report: DomainReport) -> list[str]:
        share = {name: statistics.fmean(itertools.chain(*flags)) for name, flags in right.items()}
        lines = [f"{FULL}: {share[FULL]:.3f} of the {len(lengths)} sums solved."]
        for name, (gained, lost, p) in tests.items():
            more = "no difference found" if p > LEVEL else "more" if gained > lost else "fewer"
            lines.append(
                f"{name}: {share[name]:.3f} solved, {more} (McNemar: +{gained} -{lost}, corrected "
                f"p {p:.2g})."
            )
        solved, others = (", ".join(map(str, counts)) for counts in zip(*generated, strict=True))
        return [
            *lines,
            (
                f"Generating token by token {FULL} solves {solved} sums; judged otherwise in the "
                f"table: {others}."
            ),
        ]

    entries = [
        Entry(one.name, [by_steps(result, domain, lengths) for result in one.results])
        for one in entries
    ]
    extra = {"solved": right, "mcnemar": tests, "generated": generated, "lengths": lengths}
    return {"entries": entries, "reference": FULL, "summary": summary, "extra": extra}


def picture(report: DomainReport):
    """Plot the share of solved sums against the loss on the other domains."""
    figure, axes = figure_of(report, (8.6, 4.6))
    others = [domain for domain in report.domains if domain in report.settings["recipe"]["domains"]]
    for entry, (colour, marker) in zip(report.entries, cycle(len(report.entries))):
        style = {"color": colour, "marker": marker}
        losses = [
            statistics.fmean(result.domains[domain] for domain in others)
            for result in entry.results
        ]
        shares = [statistics.fmean(flags) for flags in report.extra["solved"][entry.name]]
        axes.scatter(losses, shares, s=18, alpha=0.4, **style)
        # hollow, so that none hides another
        axes.scatter(
            statistics.fmean(losses),
            statistics.fmean(shares),
            s=70,
            label=entry.name,
            **style | {"facecolor": "none"},
        )
    axes.set(
        xlabel=f"held-out loss per label token, mean of {' and '.join(others)}",
        ylabel="share of held-out sums solved",
    )
    axes.grid()
    figure.legend(
        loc="outside right center", fontsize=8, title="large: mean, small: seeds", title_fontsize=8
    )
    return figure
