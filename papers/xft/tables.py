"""The tables of XFT, one command each, on the stages of `study`.

    table1         base, SFT, EWA, MoE, XFT                            Tables 1 to 3
    ablate-gate    XFT's gate against three others                     Table 4
    sweep-lambda   the shared expert's rate                            Table 6 of the long version
    overfit        SFT and XFT at their last and best steps, EMA and   not in the paper
                   SWA at several learning rates: few examples,
                   several epochs
    ensemble       two SFT models, their ensemble and their merge,     Sec. 6.3 of the long version
                   beside the MoE model and its merge
    mix-rows       mixing learned on the tuning examples, or others    not in the paper

The measure is the held-out loss per label token, on rows never trained on, in place of the paper's
benchmarks.
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.config import GATES, check_choice, check_fraction, check_number
from papers.engine import plots, tables
from papers.engine.domains import DomainReport
from papers.engine.tables import Command, Entry, Report, Run, against, best, different, each, spread
from papers.xft.recipe import Recipe, check_shared, resolve_experts
from papers.xft.study import XftStages

EDGE = 0.05  # an exact match this near 0 or 1
LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACTORS = (0.5, 1.0, 2.0)  # learning rates of `overfit`, as multiples of the recipe's tune
MERGES = (0.25, 0.5, 0.75, 0.85)  # lambda of its merges; 1 / E is the experts' mean
LAST = " last"  # step; without it the best one by validation
AVERAGES = {"SFT last": "last", "EMA": "ema", "SWA": "swa"}
OTHER = 1000  # added to a seed for another order of the rows
HELD_BACK = 10  # `mix-rows` holds back one example in ten
SFT = "SFT"
EWA = "EWA"
MOE = "MoE"
XFT = "XFT"


def _table1(process: Run) -> dict:
    def plan(stages: XftStages):
        yield "base", stages.base()
        yield SFT, stages.sft()
        yield EWA, stages.ewa()
        moe = stages.moe()
        yield MOE, moe
        yield XFT, stages.mix(moe)

    def summary(report: Report) -> list[str]:
        return [f"{report.comparison(XFT)}."]

    return {"entries": process.collect(plan), "reference": SFT, "summary": summary}


def _ablate_gate(process: Run) -> dict:
    full = process.recipe.experts.get("gate", "xft")
    others = {
        "no normalization (nonorm)": "nonorm",
        "no shared expert (topk_softmax)": "topk_softmax",
        "no shared expert (softmax_topk)": "softmax_topk",
    }

    def plan(stages: XftStages):
        yield SFT, stages.sft()
        yield f"{MOE} ({full})", stages.moe()
        for name, gate in others.items():
            yield name, stages.moe(gate=gate)

    return {
        "entries": process.collect(plan),
        "reference": f"{MOE} ({full})",
        "summary": each,
    }


def _sweep_lambda(process: Run, shared_rates: Sequence[float]) -> dict:
    names = {}
    for rate in shared_rates:
        names[rate] = f"{XFT}, lambda {rate:g}"

    def plan(stages: XftStages):
        yield SFT, stages.sft()
        moe = stages.moe()
        yield MOE, moe
        for rate, name in names.items():
            yield name, stages.mix(moe, shared_rate=rate)

    rates = {name: rate for rate, name in names.items()}
    return {
        "entries": process.collect(plan),
        "reference": SFT,
        "summary": best(names.values()),
        "extra": {"x": rates, "x_label": "lambda, the shared expert's rate"},
    }


@dataclass(kw_only=True)
class OverfitReport(DomainReport):
    """A DomainReport with the losses of text that no model was tuned on, if the recipe has any."""

    def untouched(self, name: str) -> list[float]:
        """Return a model's loss on that text with each seed; empty if there is none."""
        losses = [result.untouched for result in self.entry(name).results]
        return [] if None in losses else losses

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and their alignment."""
        return [*super().columns(), ("untouched text", "right")]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        losses = self.untouched(entry.name)
        return (*super()._row(entry), spread(losses) if losses else "")

    def to_dict(self) -> dict:
        """Return the report as JSON-ready values."""
        values = super().to_dict()
        for method in values["methods"]:
            method["untouched"] = self.untouched(method["name"])
        return values


def _overfit(process: Run, factors: Sequence[float], shared_rates: Sequence[float]) -> dict:
    tuned_at = process.recipe.tune.learning_rate
    kinds = (XFT, f"{XFT}{LAST}", SFT, *AVERAGES)
    rates = {}  # name -> learning rate

    def plan(stages: XftStages):
        yield "base", stages.by_domain(stages.base())
        for factor in factors:
            learning_rate = factor * tuned_at
            at = stages.change(tune__learning_rate=learning_rate)
            sft = at.sft(learning_rate=learning_rate, averages=True)
            results = {f"{SFT}, {learning_rate:g}": sft}
            for kind, average in AVERAGES.items():
                results[f"{kind}, {learning_rate:g}"] = at.average(sft, average)
            for step, keep_best in {LAST: False, "": True}.items():
                moe = at.change(tune__keep_best=keep_best).moe()
                results[f"{MOE}{step}, {learning_rate:g}"] = moe
                for rate in shared_rates:
                    name = f"{XFT}{step}, {learning_rate:g}, lambda {rate:g}"
                    results[name] = at.merge(moe, shared_rate=rate)
            for name, result in results.items():
                rates[name] = learning_rate
                yield name, at.by_domain(result)

    entries = process.collect(plan)

    def summary(report: OverfitReport) -> list[str]:
        lines = ["At equal learning rates, lambda by validation:"]
        for learning_rate in sorted(set(rates.values())):
            chosen = []
            for kind in kinds:
                chosen.append(by_validation(report, f"{kind}, {learning_rate:g}", rates))
            if None in chosen:
                return ["Without data.validation_rows nothing chooses a lambda or a rate."]
            lines += against(entries, chosen[0], chosen[1:])
        if len(factors) > 1:
            chosen = [by_validation(report, kind, rates) for kind in kinds]
            lines.append("Each at the learning rate that validation chooses:")
            lines += against(entries, chosen[0], chosen[1:])
        for name in chosen:
            if report.untouched(name):
                lines.append(f"{name}: untouched text {spread(report.untouched(name))}.")
        return lines + _loads(entries) + _edges(report)

    return {
        "entries": entries,
        "reference": f"SFT last, {factors[len(factors) // 2] * tuned_at:g}",
        "summary": summary,
        "extra": {"x": rates, "x_label": "learning rate", "x_log": True},
    }


def by_validation(report: Report, start: str, names: Sequence[str]) -> str | None:
    """Return the model with the lowest validation loss of those whose name is `start` or begins
    with it and a comma, or None without validation rows.
    """
    means = {}
    for name in names:
        if name == start or name.startswith(f"{start},"):
            losses = [result.validation for result in report.entry(name).results]
            if None in losses:
                return None
            means[name] = statistics.fmean(losses)
    return min(means, key=means.get)


def _loads(entries: Sequence[Entry]) -> list[str]:
    """Return a sentence on the experts' load for each MoE model."""
    lines = []
    for entry in entries:
        loads = [result.load for result in entry.results if result.load]
        if loads:
            load = np.array(loads)
            lines.append(
                f"{entry.name}: of a layer's slots an expert gets {load.min():.0%} to "
                f"{load.max():.0%}; experts without tokens: {(load == 0).sum()} of {load.size}."
            )
    return lines


def _edges(report: DomainReport) -> list[str]:
    """Return a sentence on the domains whose exact match cannot tell tuned models apart."""
    lines = []
    for domain, table in report.of_domains.items():
        exact = [entry.exact for entry in table.entries if entry.name != "base"]
        if max(exact) < EDGE or min(exact) > 1 - EDGE:
            lines.append(
                f"{domain}: every tuned model has exact match {min(exact):.2f} to "
                f"{max(exact):.2f}, too near an end to tell them apart by it."
            )
    return lines


def _over_rates(report: OverfitReport):
    """Plot the losses against the learning rate, or side by side if there is one; of XFT the lambda
    that validation chooses.
    """
    rates = report.extra["x"]
    names = []
    for name, rate in rates.items():
        start = f"{name.partition(',')[0]}, {rate:g}"
        if name in (start, by_validation(report, start, rates)):
            names.append(name)
    entries = [report.entry(name) for name in names]
    shown = dataclasses.replace(report, entries=entries)
    if len(set(rates.values())) == 1:
        return plots.dots(shown)
    figure = plots.sweep(shown)
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(sorted(set(rates.values())))
    return figure


def _ensemble(process: Run) -> dict:
    rate = process.recipe.tune.learning_rate

    def plan(stages: XftStages):
        models = []
        for seed in (stages.seed, stages.seed + OTHER):
            at = stages.change()
            at.seed = seed
            models.append(at.average(at.sft(learning_rate=rate, averages=True), "last"))
        yield SFT, models[0]
        yield f"{SFT}, other order", models[1]
        for kind in ("ensemble", "merge"):
            yield f"{kind} of both", stages.pair(*models, kind)
        moe = stages.moe()
        yield MOE, moe
        yield XFT, stages.merge(moe)

    entries = process.collect(plan)

    def summary(report: Report) -> list[str]:
        pair = against(entries, "ensemble of both", ["merge of both"])
        return [*each(report), *pair, *against(entries, MOE, [XFT])]

    return {"entries": entries, "reference": SFT, "summary": summary}


def _mix_rows(process: Run) -> dict:
    recipe = process.recipe
    routings = {"router": False}  # name -> whether experts see one domain each
    if (recipe.experts.get("top_k", 6), recipe.experts.get("num_experts", 8) - 1) == (
        2,
        len(process.all[0].domains),
    ):
        routings["domain"] = True

    def plan(stages: XftStages):
        stages = stages.change(mix_rows=None)
        fewer = stages.change(mix_rows=max(len(stages.train_rows) // HELD_BACK, 1))
        sft = stages.sft(learning_rate=recipe.tune.learning_rate, averages=True)
        yield SFT, stages.by_domain(sft)
        for routing, by_domain in routings.items():
            moe = stages.moe(by_domain=by_domain)
            moe_of_fewer = fewer.moe(by_domain=by_domain)
            merged = {
                "INIT": stages.merge(moe),
                "learned, own": stages.mix(moe),
                "INIT, fewer": fewer.merge(moe_of_fewer),
                "learned, held back": fewer.mix(moe_of_fewer),
            }
            for name, result in merged.items():
                yield f"by {routing}: {name}", stages.by_domain(result)

    entries = process.collect(plan)
    alpha = {}
    for entry in entries:
        alpha[entry.name] = [result.alpha for result in entry.results]
    moves = {}
    for name in alpha:
        if "learned" in name:
            initial = f"{name.partition(':')[0]}: INIT"
            moves[name] = float(np.abs(np.subtract(alpha[name], alpha[initial])).max())

    def summary(report: Report) -> list[str]:
        lines = []
        for routing in routings:
            init = f"by {routing}: INIT"
            learned = f"by {routing}: learned, own"
            fewer = f"by {routing}: INIT, fewer"
            held_back = f"by {routing}: learned, held back"
            lines += against(entries, init, [learned, fewer, held_back])
            lines += against(entries, fewer, [held_back])
        for name, move in moves.items():
            lines.append(f"{name}: a coefficient moved by {move:.3f} at most.")
        return lines

    return {
        "entries": entries,
        "reference": SFT,
        "summary": summary,
        "extra": {"largest_move_of_alpha": moves},
    }


def _check_shared(recipe: Recipe) -> dict:
    check_shared(recipe)
    return {}


def _check_gates(recipe: Recipe) -> dict:
    # the others are its ablations
    check_choice(
        "gate",
        recipe.experts.get("gate", "xft"),
        ("xft",),
    )
    for gate in GATES[:4]:
        resolve_experts(recipe.experts | {"gate": gate})
    return {}


def _check_lambdas(recipe: Recipe, shared_rates: Sequence[float] = LAMBDAS) -> dict:
    check_shared(recipe)
    check = functools.partial(check_fraction, "lambda")
    return {"shared_rates": different("lambda", map(float, shared_rates), check)}


def _check_overfit(
    recipe: Recipe, factors: Sequence[float] = FACTORS, shared_rates: Sequence[float] = MERGES
) -> dict:
    check = functools.partial(check_number, "factors", positive=True)
    lambdas = _check_lambdas(recipe, shared_rates)
    return {"factors": different("factors", map(float, factors), check)} | lambdas


COMMANDS = {
    "table1": Command(
        "XFT and its baselines", "XFT, Tables 1 to 3", _table1, plots.dots, _check_shared
    ),
    "ablate-gate": Command(
        "What the gate does", "XFT, Table 4", _ablate_gate, plots.dots, _check_gates
    ),
    "sweep-lambda": Command(
        "The shared expert's rate",
        "XFT, Table 6, long version",
        _sweep_lambda,
        plots.sweep,
        _check_lambdas,
    ),
    "overfit": Command(
        "XFT where SFT overfits",
        "not in the paper",
        _overfit,
        _over_rates,
        _check_overfit,
        report=OverfitReport,
    ),
    "ensemble": Command(
        "Ensembles and merges",
        "XFT, Sec. 6.3, long version",
        _ensemble,
        plots.dots,
        _check_shared,
    ),
    "mix-rows": Command(
        "Examples to learn mixing on",
        "not in the paper",
        _mix_rows,
        plots.dots,
        _check_shared,
        report=DomainReport,
    ),
}
run = functools.partial(tables.run, COMMANDS, XftStages)
