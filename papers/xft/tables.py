"""The tables and figures of the XFT paper that need training, one command each, on the stages of
`study`.

    table1         base, SFT, EWA, MoE, XFT                        Tables 1 to 3
    ablate-gate    XFT's gate against three others                 Table 4
    ablate-merge   MoE, INIT, learned, learned soup, uniform       Table 5
    sweep-lambda   the shared expert's rate                        Table 6 of the long version
    sweep-topk     experts per token                               footnote 1
    budget         SFT for as many steps, and for as long          Table 8 of the long version
    ewa-schedule   constant and linear share rate                  Figure 3
    routing-stats  share of tokens per expert and text             Figure 4 (routing_study)
    overfit        SFT, EMA, SWA and XFT at three learning rates   not in the paper: few examples, several epochs
    mix-rows       mixing learned on the tuning examples, or others   not in the paper

The measure is the held-out loss per label token, on rows never trained on, in place of the paper's
benchmarks.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

from moe_runtime.config import GATES, check_choice, check_fraction
from papers.engine import plots, tables
from papers.engine.domains import DomainReport
from papers.engine.plots import INK, figure_of, grouped, legend_below
from papers.engine.tables import Command, Report, Run, against, best, different, each, verdict
from papers.xft import routing_study
from papers.xft.recipe import Recipe, check_shared, resolve_experts
from papers.xft.study import Result, Stages


def shares(report):
    """Draw each text's share of tokens per routed expert, for the first, the middle and the last
    layer, of one seed.
    """
    # expert ids are arbitrary per seed, so bars cannot be averaged over seeds
    share = report.share(0)
    L, R = share.shape[1:]
    layers = sorted({0, (L - 1) // 2, L - 1})
    size = max(7.0, 1.1 * R + 1.5), 1.3 + 2.1 * len(layers)
    figure, all_axes = figure_of(report, size, rows=len(layers), sharey=True)
    for axes, layer in zip(all_axes, layers):
        grouped(
            axes,
            range(1, R + 1),
            {name: share[i, layer].tolist() for i, name in enumerate(report.tokens)},
        )
        axes.axhline(1 / R, color=INK, linestyle="--", linewidth=1)
        axes.set(ylabel=f"layer {report.layers[layer]}\nshare of tokens")
    all_axes[-1].set_xlabel(f"routed expert (dashed: 1/{R}; seed {report.seeds[0]})")
    legend_below(figure, all_axes[0], columns=3)
    return figure


LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0)
TOP_KS = (2, 4, 6)
TIMES = (0.5, 1.0, 2.0)  # learning rates of `overfit`, as multiples of the recipe's tune
HELD_BACK = 10  # `mix-rows` holds back one example in ten
SFT = "SFT"
EWA = "EWA"
MOE = "MoE"
XFT = "XFT"


def _table1(process: Run) -> dict:
    def plan(stages: Stages):
        yield "base", stages.base()
        yield SFT, stages.sft()
        yield EWA, stages.ewa()
        moe = stages.moe()
        yield MOE, moe
        yield XFT, stages.mix(moe)

    return {
        "entries": process.collect(plan),
        "reference": SFT,
        "summary": lambda report: [verdict(report, XFT)],
    }


def _ablate_gate(process: Run) -> dict:
    full = process.recipe.experts.get("gate", "xft")
    others = {
        "no normalization (nonorm)": "nonorm",
        "no shared expert (topk_softmax)": "topk_softmax",
        "no shared expert (softmax_topk)": "softmax_topk",
    }

    def plan(stages: Stages):
        yield SFT, stages.sft()
        yield f"{MOE} ({full})", stages.moe()
        for name, gate in others.items():
            yield name, stages.moe(gate=gate)

    return {"entries": process.collect(plan), "reference": f"{MOE} ({full})", "summary": each}


def _ablate_merge(process: Run) -> dict:
    init = f"{XFT} (INIT)"
    soup = "learned soup"
    uniform = "uniform"

    def plan(stages: Stages):
        moe = stages.moe()
        yield MOE, moe
        yield XFT, stages.mix(moe)
        yield init, stages.merge(moe)
        yield soup, stages.mix(moe, soup=True)
        yield uniform, stages.merge(moe, alpha="uniform")

    entries = process.collect(plan)
    alpha = {entry.name: [result.alpha for result in entry.results] for entry in entries}
    moved = _distance(alpha[XFT], alpha[init])
    shared = statistics.fmean(row[0] for layers in alpha[soup] for row in layers)
    rate = process.recipe.shared_rate

    def summary(report: Report) -> list[str]:
        return [
            *each(report),
            f"Learning moved a coefficient by {moved:.4f} at most from its initial value; the "
            f"soup's shared expert went from {rate:.4f} to {shared:.4f} on average.",
        ]

    extra = {"largest_move_of_alpha": moved, "mean_shared_coefficient_of_the_soup": shared}
    return {"entries": entries, "reference": XFT, "summary": summary, "extra": extra}


def _sweep_lambda(process: Run, shared_rates: Sequence[float]) -> dict:
    names = {rate: f"{XFT}, lambda {rate:g}" for rate in shared_rates}

    def plan(stages: Stages):
        yield SFT, stages.sft()
        moe = stages.moe()
        yield MOE, moe
        for rate, name in names.items():
            yield name, stages.mix(moe, shared_rate=rate)

    extra = {
        "x": {name: rate for rate, name in names.items()},
        "x_label": "lambda, the shared expert's rate",
    }
    return {
        "entries": process.collect(plan),
        "reference": SFT,
        "summary": best(names.values()),
        "extra": extra,
    }


def _sweep_topk(process: Run, top_ks: Sequence[int]) -> dict:
    moes, merged = ({k: f"{kind}, top {k}" for k in top_ks} for kind in (MOE, XFT))

    def plan(stages: Stages):
        yield SFT, stages.sft()
        for k in top_ks:
            moe = stages.moe(top_k=k)
            yield moes[k], moe
            yield merged[k], stages.mix(moe)

    names = [*moes.items(), *merged.items()]
    extra = {
        "x": {name: k for k, name in names},
        "x_label": "experts per token, the shared one counted",
    }
    return {
        "entries": process.collect(plan),
        "reference": SFT,
        "summary": best(merged.values()),
        "extra": extra,
    }


def _budget(process: Run) -> dict:
    def plan(stages: Stages):
        moe = stages.moe()
        yield MOE, moe
        merged = stages.mix(moe)
        yield XFT, merged
        same = stages.sft()
        steps = moe.steps + merged.steps
        yield "SFT, same steps", same if same.steps == steps else stages.sft(steps=steps)

    moe, merged, same = process.collect(plan)
    # the same number of steps for all seeds, from the mean times of both
    per_step = same.seconds / same.results[0].steps
    steps = max(round(merged.seconds / per_step), 1)
    process.say(
        f"XFT took {merged.seconds:.1f} s, an SFT step {per_step:.4f} s: {steps} steps of SFT for "
        "the same time"
    )
    (longer,) = process.collect(lambda stages: iter([("SFT, same time", stages.sft(steps=steps))]))

    def summary(report: Report) -> list[str]:
        parts = (
            [result.seconds for result in merged.results],
            [result.seconds for result in moe.results],
        )
        mixing, tuning = map(statistics.fmean, parts)
        return [
            *each(report),
            f"XFT took {tuning:.1f} s of tuning and {mixing:.1f} s of mixing, "
            f"{merged.seconds / same.seconds:.2f} times SFT's {same.seconds:.1f} s for as many "
            f"steps; {steps} steps of SFT took {longer.seconds:.1f} s.",
        ]

    extra = {"seconds_per_sft_step": per_step, "sft_steps_for_the_same_time": steps}
    return {
        "entries": [merged, same, longer, moe],
        "reference": XFT,
        "summary": summary,
        "extra": extra,
    }


def _ewa_schedule(process: Run) -> dict:
    names = {schedule: f"{EWA}, {schedule}" for schedule in ("constant", "linear")}

    def plan(stages: Stages):
        yield SFT, stages.sft()
        for schedule, name in names.items():
            yield name, stages.ewa(schedule=schedule)

    entries = process.collect(plan)
    rises = {entry.name: max(map(_rise, entry.results)) for entry in entries}

    def summary(report: Report) -> list[str]:
        curves = [
            f"{name}: the held-out loss rose by {rises[name]:.4f} at most above its lowest value "
            f"before, over {len(report.entry(name).results[0].history)} points and "
            f"{len(report.seeds)} seeds."
            for name in names.values()
        ]
        return [*each(report), *curves]

    extra = {"largest_rise_of_held_out_loss": rises, "share": process.recipe.ewa.share}
    return {"entries": entries, "reference": names["constant"], "summary": summary, "extra": extra}


def _routing_stats(process: Run, texts: Sequence[str], tokens: int, files: list) -> dict:
    # `files` is recorded so that the report detects changed files
    return routing_study.measure(process, texts, tokens)


def _overfit(process: Run) -> dict:
    own = process.recipe.tune.learning_rate
    rate = process.recipe.shared_rate
    kinds = (XFT, SFT, "EMA", "SWA")
    x = {}

    def plan(stages: Stages):
        for learning_rate in (times * own for times in TIMES):
            at = stages.change(tune__learning_rate=learning_rate)
            sft = at.sft(learning_rate=learning_rate, averages=True)
            moe = at.moe()
            found = {
                SFT: sft,
                "EMA": at.average(sft, "ema"),
                "SWA": at.average(sft, "swa"),
                MOE: moe,
                XFT: at.merge(moe),
            }
            for kind, result in found.items():
                x[f"{kind}, {learning_rate:g}"] = learning_rate
                yield f"{kind}, {learning_rate:g}", at.by_domain(result)
        moe = stages.moe()
        for other in (one for one in LAMBDAS[:-1] if one != rate):
            yield (
                f"{XFT}, {own:g}, lambda {other:g}",
                stages.by_domain(stages.merge(moe, shared_rate=other)),
            )

    def summary(report: Report) -> list[str]:
        names = [name for name in x if not name.startswith(MOE)]
        lines = ["At equal learning rates:"]
        for one in (name for name in names if name.startswith(XFT)):
            lines += against(report.entries, one, [one.replace(XFT, kind) for kind in kinds[1:]])
        validation = {
            name: [result.validation for result in report.entry(name).results] for name in names
        }
        if None in validation[names[0]]:
            return [*lines, "Without data.validation_rows nothing chooses a learning rate."]
        means = {name: statistics.fmean(losses) for name, losses in validation.items()}
        chosen, *others = [
            min((n for n in names if n.startswith(kind)), key=means.__getitem__) for kind in kinds
        ]
        return [
            *lines,
            "Each at the learning rate that validation chooses:",
            *against(report.entries, chosen, others),
        ]

    extra = {"x": x, "x_label": "learning rate", "x_log": True}
    return {
        "entries": process.collect(plan),
        "reference": f"{SFT}, {own:g}",
        "summary": summary,
        "extra": extra,
    }


def _over_rates(report: DomainReport):
    """Plot the losses against the learning rate, without the merges made at one rate only."""
    x = report.extra["x"]
    figure = plots.sweep(
        dataclasses.replace(report, entries=[entry for entry in report.entries if entry.name in x])
    )
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(sorted(set(x.values())))
    return figure


def _mix_rows(process: Run) -> dict:
    recipe = process.recipe
    sizes = recipe.experts.get("top_k", 6), recipe.experts.get("num_experts", 8) - 1
    ways = {"router": False} | (
        {"domain": True} if sizes == (2, len(process.all[0].domains)) else {}
    )
    names = "INIT", "learned, own", "INIT, fewer", "learned, held back"

    def plan(stages: Stages):
        stages = stages.change(mix_rows=None)
        fewer = stages.change(mix_rows=max(len(stages.train_rows) // HELD_BACK, 1))
        yield (
            SFT,
            stages.by_domain(stages.sft(learning_rate=recipe.tune.learning_rate, averages=True)),
        )
        for way, by_domain in ways.items():
            moe = stages.moe(by_domain=by_domain)
            less = fewer.moe(by_domain=by_domain)
            merged = stages.merge(moe), stages.mix(moe), fewer.merge(less), fewer.mix(less)
            for name, result in zip(names, merged, strict=True):
                yield f"by {way}: {name}", stages.by_domain(result)

    entries = process.collect(plan)
    alpha = {entry.name: [result.alpha for result in entry.results] for entry in entries}
    moved = {
        name: _distance(alpha[name], alpha[f"{name.partition(':')[0]}: INIT"])
        for name in alpha
        if "learned" in name
    }

    def summary(report: Report) -> list[str]:
        lines = []
        for init, own, fewer, held_back in (
            [f"by {way}: {name}" for name in names] for way in ways
        ):
            lines += against(entries, init, [own, fewer, held_back]) + against(
                entries, fewer, [held_back]
            )
        return lines + [
            f"{name}: a coefficient moved by {far:.3f} at most." for name, far in moved.items()
        ]

    return {
        "entries": entries,
        "reference": SFT,
        "summary": summary,
        "extra": {"largest_move_of_alpha": moved},
    }


def _distance(a, b) -> float:
    """Largest difference between two nested lists of coefficients, [seeds][L][E]."""
    pairs = zip(
        (v for x in a for row in x for v in row),
        (v for x in b for row in x for v in row),
        strict=True,
    )
    return max(abs(x - y) for x, y in pairs)


def _rise(result: Result) -> float:
    """Return the largest rise of a history above its previous minimum: 0 if it only falls, infinite
    if it diverged.
    """
    lowest = math.inf
    rise = 0.0
    for _, loss in result.history:
        if not math.isfinite(loss):
            return math.inf
        rise = max(rise, loss - lowest)
        lowest = min(lowest, loss)
    return rise


def _check_shared(recipe: Recipe) -> dict:
    check_shared(recipe)
    return {}


def _check_gates(recipe: Recipe) -> dict:
    # the others are its ablations
    check_choice("gate", recipe.experts.get("gate", "xft"), ("xft",))
    for gate in GATES[:4]:
        resolve_experts(recipe.experts | {"gate": gate})
    return {}


def _check_lambdas(recipe: Recipe, shared_rates: Sequence[float] = LAMBDAS) -> dict:
    check_shared(recipe)
    return {
        "shared_rates": different(
            "lambda", map(float, shared_rates), lambda rate: check_fraction("lambda", rate)
        )
    }


def _check_top_ks(recipe: Recipe, top_ks: Sequence[int] | None = None) -> dict:
    """Check the given numbers; by default return those of TOP_KS that the recipe's experts
    allow.
    """
    check_shared(recipe)
    if top_ks is None:
        top_ks = [k for k in TOP_KS if k <= recipe.experts.get("num_experts", 8)]
    return {
        "top_ks": different(
            "top_k", top_ks, lambda k: resolve_experts(recipe.experts | {"top_k": k})
        )
    }


COMMANDS = {
    "table1": Command(
        "XFT and its baselines", "XFT, Tables 1 to 3", _table1, plots.dots, _check_shared
    ),
    "ablate-gate": Command(
        "What the gate does", "XFT, Table 4", _ablate_gate, plots.dots, _check_gates
    ),
    "ablate-merge": Command(
        "What learning to merge does", "XFT, Table 5", _ablate_merge, plots.dots, _check_shared
    ),
    "sweep-lambda": Command(
        "The shared expert's rate",
        "XFT, Table 6, long version",
        _sweep_lambda,
        plots.sweep,
        _check_lambdas,
    ),
    "sweep-topk": Command(
        "Experts per token", "XFT, footnote 1", _sweep_topk, plots.sweep, _check_top_ks
    ),
    "budget": Command(
        "The price of training", "XFT, Table 8, long version", _budget, plots.times, _check_shared
    ),
    "ewa-schedule": Command("EWA's share rate", "XFT, Figure 3", _ewa_schedule, plots.curves),
    "routing-stats": Command(
        "Tokens per expert",
        "XFT, Figure 4",
        _routing_stats,
        shares,
        routing_study.check,
        routing_study.Routing,
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
run = functools.partial(tables.run, COMMANDS, Stages)
