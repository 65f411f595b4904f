"""The tables of XFT, one command each, on the stages of `study`.

    table1         base, SFT, EWA, MoE, XFT                            Tables 1 to 3
    ablate-gate    XFT's gate against three others                     Table 4
    sweep-lambda   the shared expert's rate                            Table 6 of the long version
    overfit        SFT, EMA, SWA and XFT at three learning rates,      not in the paper
                   with few examples and several epochs
    mix-rows       mixing learned on the tuning examples, or others    not in the paper

The measure is the held-out loss per label token, on rows never trained on, in place of the paper's
benchmarks.
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence

import numpy as np

from moe_runtime.config import GATES, check_choice, check_fraction
from papers.engine import plots, tables
from papers.engine.domains import DomainReport
from papers.engine.tables import Command, Report, Run, against, best, different, each
from papers.xft.recipe import Recipe, check_shared, resolve_experts
from papers.xft.study import XftStages

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0)
TIMES = (0.5, 1.0, 2.0)  # learning rates of `overfit`, as multiples of the recipe's tune
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


def _overfit(process: Run) -> dict:
    tuned_at = process.recipe.tune.learning_rate
    kinds = (XFT, SFT, "EMA", "SWA")
    rates = {}  # name -> learning rate

    def plan(stages: XftStages):
        for times in TIMES:
            learning_rate = times * tuned_at
            at = stages.change(tune__learning_rate=learning_rate)
            sft = at.sft(learning_rate=learning_rate, averages=True)
            moe = at.moe()
            results = {
                SFT: sft,
                "EMA": at.average(sft, "ema"),
                "SWA": at.average(sft, "swa"),
                MOE: moe,
                XFT: at.merge(moe),
            }
            for kind, result in results.items():
                name = f"{kind}, {learning_rate:g}"
                rates[name] = learning_rate
                yield name, at.by_domain(result)
        moe = stages.moe()
        for shared_rate in LAMBDAS[:-1]:
            if shared_rate != process.recipe.shared_rate:
                merged = stages.merge(moe, shared_rate=shared_rate)
                yield f"{XFT}, {tuned_at:g}, lambda {shared_rate:g}", stages.by_domain(merged)

    def summary(report: Report) -> list[str]:
        lines = ["At equal learning rates:"]
        for name in rates:
            if name.startswith(XFT):
                others = []
                for kind in kinds[1:]:
                    others.append(name.replace(XFT, kind))
                lines += against(report.entries, name, others)
        chosen = []
        for kind in kinds:
            chosen.append(_by_validation(report, kind, rates))
        if None in chosen:
            return [*lines, "Without data.validation_rows nothing chooses a learning rate."]
        lines.append("Each at the learning rate that validation chooses:")
        return lines + against(
            report.entries,
            chosen[0],
            chosen[1:],
        )

    return {
        "entries": process.collect(plan),
        "reference": f"{SFT}, {tuned_at:g}",
        "summary": summary,
        "extra": {"x": rates, "x_label": "learning rate", "x_log": True},
    }


def _by_validation(report: Report, kind: str, names: Sequence[str]) -> str | None:
    """Return a kind's model with the lowest validation loss, or None without validation rows."""
    means = {}
    for name in names:
        if name.startswith(kind):
            losses = [result.validation for result in report.entry(name).results]
            if None in losses:
                return None
            means[name] = statistics.fmean(losses)
    return min(means, key=means.get)


def _over_rates(report: DomainReport):
    """Plot the losses against the learning rate, without the merges made at one rate only."""
    rates = report.extra["x"]
    entries = [entry for entry in report.entries if entry.name in rates]
    figure = plots.sweep(dataclasses.replace(report, entries=entries))
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(sorted(set(rates.values())))
    return figure


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
        _check_shared,
        report=DomainReport,
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
