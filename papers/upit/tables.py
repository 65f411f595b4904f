"""The tables and figures of the UpIT paper (arXiv 2410.01610), one command each, on the stages of
`study`.

    main       UpIT with whole experts and with LoRA experts, and their baselines             Table 1, Figure 5
    ckpt       which checkpoints become experts: front, uniform, back                         Tables 2 and 8
    pesc       adapters behind the MLPs as experts, compared with LoRA experts                Table 1
    saved      every checkpoint of the first tuning, on each domain                           Figure 2
    expand     no expansion, random parents, farthest parents                                 Tables 2 and 9
    router     no initialization, random rows, skilled                                        Tables 2 and 10, Figure 5
    experts    E experts, A per token                                                         Figure 4, Table 5
    data       a share of the rows                                                            Figure 3
    epochs     epochs of the two stages                                                       Figure 6
    budget     equal optimizer steps: SFT with one schedule, UpIT with one or two             Sec. 4.1

The measure is the held-out loss per label token of every domain, in place of the paper's
benchmarks. Options are checked against the recipe before anything runs.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moe_runtime.config import check_choice, check_fraction, check_number, check_positive
from moe_runtime.methods.upit.experts import saved_experts
from papers.engine import domains, plots, tables
from papers.engine.domains import DomainReport, Judged
from papers.engine.tables import Command, Entry, Run, against, best, different, each
from papers.upit import budget
from papers.upit.budget import Stages
from papers.upit.pesc import NAME as PESC
from papers.upit.recipe import UpitRecipe, check_saved, count_saved
from papers.upit.study import NAMES, NONE, STARTS

SHARES = (0.1, 0.2, 0.4, 1.0)  # 50, 100, 200 of the paper's 500 thousand rows
WHICH = ("front", "uniform", "back")
EPOCHS = ((2.0, 2.0), (2.0, 6.0), (4.0, 4.0))
ACTIVE = (1, 2, 4)
EXPANSIONS = {"none": NONE, "random": "random", "genetic": "farthest"}


def _form(recipe: UpitRecipe, form: str | None) -> str:
    """Return a table's kind of expert, by default the recipe's first."""
    if form is not None:
        check_choice("form", form, recipe.forms)
    return form or recipe.forms[0]


def check_named(known: Sequence[str]) -> Callable:
    """Return the check of a command whose options are a form and some of `known`, by
    default all.
    """

    def check(
        recipe: UpitRecipe, form: str | None = None, strategies: Sequence[str] = tuple(known)
    ) -> dict:
        form = _form(recipe, form)
        strategies = different(
            "strategy", strategies, lambda one: check_choice("strategy", one, tuple(known))
        )
        n = recipe.experts.num_experts
        m = recipe.checkpoints.count
        if known is WHICH and min(m, n) >= (saved := count_saved(recipe, form)):
            raise ValueError(
                f"checkpoints.count must be below the {saved} saved checkpoints, to have a choice, "
                f"but got {m}"
            )
        if known is EXPANSIONS and m >= n:
            raise ValueError(
                f"checkpoints.count must be below num_experts ({n}), as nothing would be expanded, "
                f"but got {m}"
            )
        if known is EXPANSIONS and "none" in strategies:
            check_saved(recipe, form, n, "num_experts")
        return {"form": form, "strategies": strategies}

    return check


def check_experts(
    recipe: UpitRecipe,
    form: str | None = None,
    sizes: Sequence[int] | None = None,
    active: Sequence[int] = ACTIVE,
) -> dict:
    """Return the options of the table of experts and experts per token; `sizes` defaults to the
    recipe's.
    """
    n = recipe.experts.num_experts
    m = recipe.checkpoints.count
    sizes = sorted({max(m, 2), n}) if sizes is None else sizes
    sizes = different("experts", sizes, lambda size: check_positive("experts", size))
    active = different("active", active, lambda one: check_positive("active", one))
    if min(active) > max(sizes):
        raise ValueError(
            f"active (experts per token) must be at most experts ({max(sizes)}), but got "
            f"{min(active)}"
        )
    return {"form": _form(recipe, form), "sizes": sizes, "active": active}


def check_data(
    recipe: UpitRecipe, form: str | None = None, shares: Sequence[float] = SHARES
) -> dict:
    """Return the options of the table of shares of the data."""
    shares = different(
        "share", map(float, shares), lambda share: check_fraction("share", share, zero=False)
    )
    return {"form": _form(recipe, form), "shares": shares}


def check_epochs(
    recipe: UpitRecipe, form: str | None = None, pairs: Sequence[Sequence[float]] = EPOCHS
) -> dict:
    """Return the options of the table of epochs, of an expert's tuning and of the MoE model's."""
    form = _form(recipe, form)

    def check(pair: tuple) -> None:
        if len(pair) != 2:
            raise ValueError(
                f"epochs must be two numbers, such as 2,6, but got {','.join(map(str, pair))}"
            )
        for epochs in pair:
            check_number("epochs", epochs, positive=True)
        check_saved(
            recipe.change(**{f"{form}__sft__epochs": pair[0]}),
            form,
            recipe.checkpoints.count,
            "checkpoints.count",
        )

    return {
        "form": form,
        "pairs": different("epochs", [tuple(map(float, pair)) for pair in pairs], check),
    }


@dataclass(kw_only=True)
class UpitReport(DomainReport):
    """A table of models evaluated on several domains, with their active parameters."""

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        columns = super().columns()
        place = columns.index(("trained", "right"))
        return [*columns[:place], ("per token", "right"), *columns[place:]]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        *row, trained, seconds = super()._row(entry)
        return *row, f"{entry.results[0].active_parameters:,}", trained, seconds


class Routing(NamedTuple):
    """The experts that the domains' tokens go to, by method: a stage's result for every seed."""

    title: str
    source: str
    routed: Mapping[str, Sequence]

    def save(self, path: Path) -> None:
        """Write the picture."""
        plots.save(domains.picture(self, self.routed), path)

    def to_dict(self) -> dict:
        """Return each method's layers, and every seed's slots and distance between domains,
        JSON-ready.
        """
        return {
            name: {
                "layers": results[0].layers,
                "slots": [result.counts for result in results],
                "distance_between_domains": [
                    domains.mean_distance(result.counts) for result in results
                ],
            }
            for name, results in self.routed.items()
        }

    def sentences(self) -> list[str]:
        """Return sentences on how differently each method routes the domains; none for a single
        domain.
        """
        lines = []
        if len(next(iter(self.routed.values()))[0].counts) < 2:
            return lines
        for name, found in self.to_dict().items():
            distances = found["distance_between_domains"]
            mean = sum(distances) / len(distances)
            lines.append(
                f"{name}: two domains' shares of the experts differ by {mean:.3f} (total "
                "variation, 0 to 1)."
            )
        return lines


DENSE = {"ffn": "SFT", "lora": "LoRA"}


def _upit(form: str) -> str:
    return f"UpIT ({NAMES[form]})"


def _copies(stages: Stages, form: str, start: str) -> Judged:
    """Return the form's baseline of copies."""
    return stages.upcycled(start) if form == "ffn" else stages.loramoe(start)


def _copies_name(form: str, start: str) -> str:
    return f"{'Upcycle' if form == 'ffn' else 'LoRAMoE'}_{start.upper()}"


def _others(form: str) -> list[str]:
    """Return the names of UpIT's baselines, in the order of `_compared`."""
    return [DENSE[form], *(_copies_name(form, start) for start in STARTS)]


def _compared(stages: Stages, form: str) -> Iterator[Judged]:
    """Train the form's dense baseline, its copies, and UpIT."""
    yield stages.dense(form)
    for start in STARTS:
        yield _copies(stages, form, start)
    yield stages.upit(form)


def _check(
    process: Run, form: str, parents: str | None = None, init: str = "skilled", **changes
) -> None:
    """Raise ValueError before any training if there are too few rows for the stages with these
    changes.
    """
    process.all[0].change(**changes).check(form, parents, init)


def _routing(process: Run, command: str, entries: Sequence[Entry]) -> tuple[dict, list[str]]:
    """Save the picture of where the domains' tokens go; return the report's extra fields and its
    sentences.
    """
    routed = {
        entry.name: [s.routed(r) for s, r in zip(process.all, entry.results, strict=True)]
        for entry in entries
    }
    found = Routing("Experts that the domains' tokens go to", "UpIT, Figure 5", routed)
    path = f"{command}-routing.png"
    if process.is_main:
        found.save(process.out / path)
    return {"routing": found.to_dict(), "files": [path]}, [
        *found.sentences(),
        f"routing: {process.out / path}",
    ]


def _main(process: Run) -> dict:
    forms = process.recipe.forms
    for form in forms:
        _check(process, form)

    def plan(stages: Stages):
        yield "base", stages.base()
        for form in forms:
            yield DENSE[form], stages.dense(form)
            for start in STARTS:
                yield _copies_name(form, start), _copies(stages, form, start)
            yield f"Self-MoE ({NAMES[form]})", stages.self_moe(form)
            yield _upit(form), stages.upit(form)

    entries = process.collect(plan)
    mixtures = {name for form in forms for name in (*_others(form)[1:], _upit(form))}
    extra, sentences = _routing(
        process, "main", [entry for entry in entries if entry.name in mixtures]
    )

    def summary(report: UpitReport) -> list[str]:
        lines = []
        for form in forms:
            lines += against(
                report.entries, _upit(form), [*_others(form), f"Self-MoE ({NAMES[form]})"]
            )
        return [*lines, *sentences]

    return {"entries": entries, "reference": DENSE[forms[0]], "summary": summary, "extra": extra}


def _variants(
    process: Run, form: str, strategies: Sequence[str], make: Callable[[Stages, str], Judged]
) -> dict:
    """Return the table of the tuned model and of UpIT by strategy; the last one is the
    reference.
    """
    names = {one: f"{_upit(form)}, {one}" for one in strategies}

    def plan(stages: Stages):
        yield DENSE[form], stages.dense(form)
        for one, name in names.items():
            yield name, make(stages, one)

    return {"entries": process.collect(plan), "reference": names[strategies[-1]], "summary": each}


def _ckpt(process: Run, form: str, strategies: Sequence[str]) -> dict:
    _check(process, form)
    return _variants(
        process,
        form,
        strategies,
        lambda stages, which: stages.change(checkpoints__which=which).upit(form),
    )


def _pesc(process: Run) -> dict:
    _check(process, "lora")
    others = [PESC, _copies_name("lora", "pt")]

    def plan(stages: Stages):
        yield DENSE["lora"], stages.dense("lora")
        yield others[0], stages.pesc()
        yield others[1], _copies(stages, "lora", "pt")
        yield _upit("lora"), stages.upit("lora")

    def summary(report: UpitReport) -> list[str]:
        return against(report.entries, _upit("lora"), [DENSE["lora"], *others])

    return {"entries": process.collect(plan), "reference": DENSE["lora"], "summary": summary}


def check_of(form: str) -> Callable:
    """Return the check of a command without options for one form."""

    def check(recipe: UpitRecipe) -> dict:
        _form(recipe, form)
        return {}

    return check


def _saved(process: Run, form: str) -> dict:
    def plan(stages: Stages):
        prepared = stages.prepared(form)
        for folder in saved_experts(prepared.folder):
            yield (
                folder.name,
                stages.judged(f"{folder.name} of {form}", prepared, folder, form=form),
            )

    def summary(report: UpitReport) -> list[str]:
        names = [entry.name for entry in report.entries]
        found = {
            domain: min(names, key=lambda name: report.domain_loss(name, domain))
            for domain in report.domains
        }
        return [
            f"{domain}: {name} is best, {report.domain_loss(name, domain):.4f}."
            for domain, name in found.items()
        ]

    entries = process.collect(plan)
    steps = {entry.name: int(entry.name.rpartition("-")[2]) for entry in entries}
    extra = {"x": steps, "x_label": "steps of the first tuning"}
    return {"entries": entries, "reference": entries[-1].name, "summary": summary, "extra": extra}


def _expand(process: Run, form: str, strategies: Sequence[str]) -> dict:
    for name in strategies:
        _check(process, form, EXPANSIONS[name])
    return _variants(
        process,
        form,
        strategies,
        lambda stages, one: stages.upit(form, stages.pool(form, EXPANSIONS[one])),
    )


def _router(process: Run, form: str, strategies: Sequence[str]) -> dict:
    for init in strategies:
        _check(process, form, init=init)
    made = _variants(process, form, strategies, lambda stages, init: stages.upit(form, init=init))
    extra, sentences = _routing(process, "router", made["entries"][1:])
    return made | {"summary": lambda report: [*each(report), *sentences], "extra": extra}


def _experts(process: Run, form: str, sizes: Sequence[int], active: Sequence[int]) -> dict:
    copies = _copies_name(form, "pt")
    upit = _upit(form)
    grid = [(E, A) for E in sizes for A in active if A <= E]
    names = {
        (of, *one): f"{of} of {one[0]} experts, {one[1]} per token"
        for one in grid
        for of in (copies, upit)
    }
    for E, A in grid:
        _check(process, form, experts__num_experts=E, experts__top_k=A)

    def plan(stages: Stages):
        yield DENSE[form], stages.dense(form)
        for E, A in grid:
            of_size = stages.change(experts__num_experts=E, experts__top_k=A)
            yield names[copies, E, A], _copies(of_size, form, "pt")
            yield names[upit, E, A], of_size.upit(form)

    def summary(report: UpitReport) -> list[str]:
        lines = best(names[upit, E, A] for E, A in grid)(report)
        for E, A in grid:
            lines += against(report.entries, names[upit, E, A], [names[copies, E, A]])
        return lines

    extra = {"x": {name: A for (*_, A), name in names.items()}, "x_label": "experts per token"}
    return {
        "entries": process.collect(plan),
        "reference": DENSE[form],
        "summary": summary,
        "extra": extra,
    }


def _data(process: Run, form: str, shares: Sequence[float]) -> dict:
    methods = [*_others(form), _upit(form)]
    names = {
        (method, share): f"{method}, {share:.3g} of the rows"
        for method in methods
        for share in shares
    }
    rows = len(process.all[0].train_rows)
    for share in shares:
        _check(process, form, share=share)

    def plan(stages: Stages):
        for share in shares:
            part = stages.change(share=share)
            for method, result in zip(methods, _compared(part, form)):
                yield names[method, share], result

    def summary(report: UpitReport) -> list[str]:
        lines = []
        for share in shares:
            lines += against(
                report.entries,
                names[_upit(form), share],
                [names[method, share] for method in methods[:-1]],
            )
        return lines

    extra = {
        "x": {name: share * rows for (_, share), name in names.items()},
        "x_label": "rows",
        "x_log": True,
    }
    reference = names[_upit(form), shares[-1]]
    return {
        "entries": process.collect(plan),
        "reference": reference,
        "summary": summary,
        "extra": extra,
    }


def _epochs(process: Run, form: str, pairs: Sequence[tuple[float, float]]) -> dict:
    others = _others(form)
    names = {
        (method, pair): f"{method}, {pair[0]:g} + {pair[1]:g}"
        for pair in pairs
        for method in (*others, _upit(form))
    }
    changes = {
        pair: {f"{form}__sft__epochs": pair[0], f"{form}__post__epochs": pair[1]} for pair in pairs
    }
    for pair in pairs:
        _check(process, form, **changes[pair])

    def plan(stages: Stages):
        for pair in pairs:
            longer = stages.change(**changes[pair])
            for method, result in zip((*others, _upit(form)), _compared(longer, form)):
                yield names[method, pair], result

    def summary(report: UpitReport) -> list[str]:
        lines = each(report)
        for pair in pairs:
            lines += against(
                report.entries, names[_upit(form), pair], [names[method, pair] for method in others]
            )
        return lines

    return {
        "entries": process.collect(plan),
        "reference": names[_upit(form), pairs[0]],
        "summary": summary,
    }


def _losses(
    title: str,
    source: str,
    make: Callable,
    check: Callable | None = None,
    draw: Callable = plots.dots,
) -> Command:
    return Command(title, f"UpIT, {source}", make, draw, check or (lambda recipe: {}), UpitReport)


COMMANDS = {
    "main": _losses("UpIT and its baselines", "Table 1", _main),
    "ckpt": _losses(
        "Which checkpoints become experts", "Tables 2 and 8", _ckpt, check_named(WHICH)
    ),
    "pesc": _losses("Adapters as experts", "Table 1", _pesc, check_of("lora")),
    "saved": _losses(
        "Checkpoints of one tuning",
        "Figure 2",
        _saved,
        lambda recipe, form=None: {"form": _form(recipe, form)},
        plots.sweep,
    ),
    "expand": _losses(
        "How experts are expanded", "Tables 2 and 9", _expand, check_named(EXPANSIONS)
    ),
    "router": _losses(
        "How routers begin", "Tables 2 and 10", _router, check_named(("none", "random", "skilled"))
    ),
    "experts": _losses(
        "Experts, and experts per token", "Figure 4", _experts, check_experts, plots.sweep
    ),
    "data": _losses("Rows to tune on", "Figure 3", _data, check_data, plots.sweep),
    "epochs": _losses("Epochs before and after", "Figure 6", _epochs, check_epochs),
    "budget": _losses(
        "Equal optimizer steps", "Sec. 4.1", budget.make, check_of("ffn"), plots.curves
    ),
}
run = functools.partial(tables.run, COMMANDS, Stages)
