"""The tables and figures of the UpIT paper (arXiv 2410.01610), one command each, on the stages of `upit_stages`.

    main       UpIT of whole experts and of LoRA experts, and what they are compared with     Table 1, Figure 5
    ckpt       which checkpoints become experts: front, uniform, back                         Tables 2 and 8
    expand     no expansion, random parents, the genetic way                                  Tables 2 and 9
    router     no initialization, rows at random, skilled                                     Tables 2 and 10, Figure 5
    experts    E experts, A per token                                                         Figure 4, Table 5
    data       a share of the rows                                                            Figure 3
    epochs     of the two trainings                                                           Figure 6

The measure is the held-out loss per label token of every domain, in the place of the paper's benchmarks. A stage that OUT
holds already is read, not trained, whichever command made it; so a command that was killed goes on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from moe_runtime.studies import pictures, tables
from moe_runtime.studies.domain_results import Judged
from moe_runtime.studies.reports import Entry
from moe_runtime.studies.tables import Command, Run, best, each
from moe_runtime.studies.upit_options import EXPANSIONS, WHICH, check_data, check_epochs, check_experts, check_named
from moe_runtime.studies.upit_recipe import UpitRecipe, load_recipe
from moe_runtime.studies.upit_reports import Routing, UpitReport, against
from moe_runtime.studies.upit_stages import NAMES, STARTS, Stages

DENSE = {"ffn": "SFT", "lora": "LoRA"}


def run(
    command: str,
    recipe: UpitRecipe | str | Path = "tiny",
    out: str | Path = "runs/upit",
    *,
    seeds: int = 3,
    say: Callable[[str], None] = print,
    overwrite: bool = False,
    **options,
) -> UpitReport:
    """Make a table, as `tables.run` says."""
    return tables.run(
        COMMANDS, Stages, load_recipe, command, recipe, out, seeds=seeds, say=say, overwrite=overwrite, **options
    )


def _upit(form: str) -> str:
    return f"UpIT ({NAMES[form]})"


def _copies(stages: Stages, form: str, start: str) -> Judged:
    """Return the form's baseline of copies."""
    return stages.upcycled(start) if form == "ffn" else stages.loramoe(start)


def _copies_name(form: str, start: str) -> str:
    return f"{'Upcycle' if form == 'ffn' else 'LoRAMoE'}_{start.upper()}"


def _check(process: Run, form: str, parents: str | None = None, init: str = "skilled", **changes) -> None:
    """Raise ValueError before the first training if there are too few rows for the stages with these changes."""
    process.all[0].change(**changes).check(form, parents, init)


def _routing(process: Run, command: str, entries: Sequence[Entry]) -> tuple[dict, list[str]]:
    """Save the picture of where the domains' tokens go; return the report's extra fields, and what is said."""
    routed = {entry.name: [s.routed(r) for s, r in zip(process.all, entry.results, strict=True)] for entry in entries}
    found, path = Routing("Experts that the domains' tokens go to", "UpIT, Figure 5", routed), f"{command}-routing.png"
    if process.is_main:
        found.save(process.out / path)
    return {"routing": found.to_dict(), "files": [path]}, [*found.said(), f"routing: {process.out / path}"]


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
    mixtures = {name for form in forms for name in (*(_copies_name(form, start) for start in STARTS), _upit(form))}
    extra, said = _routing(process, "main", [entry for entry in entries if entry.name in mixtures])

    def summary(report: UpitReport) -> list[str]:
        lines = []
        for form in forms:
            others = [DENSE[form], *(_copies_name(form, start) for start in STARTS), f"Self-MoE ({NAMES[form]})"]
            lines += against(report.entries, _upit(form), others)
        return [*lines, *said]

    return {"entries": entries, "reference": DENSE[forms[0]], "summary": summary, "extra": extra}


def _ckpt(process: Run, form: str, strategies: Sequence[str]) -> dict:
    _check(process, form)

    def plan(stages: Stages):
        yield DENSE[form], stages.dense(form)
        for which in strategies:
            yield f"{_upit(form)}, {which}", stages.change(checkpoints__which=which).upit(form)

    return {"entries": process.collect(plan), "reference": f"{_upit(form)}, {strategies[-1]}", "summary": each}


def _expand(process: Run, form: str, strategies: Sequence[str]) -> dict:
    for name in strategies:
        _check(process, form, EXPANSIONS[name])

    def plan(stages: Stages):
        yield DENSE[form], stages.dense(form)
        for name in strategies:
            yield f"{_upit(form)}, {name}", stages.upit(form, stages.pool(form, EXPANSIONS[name]))

    return {"entries": process.collect(plan), "reference": f"{_upit(form)}, {strategies[-1]}", "summary": each}


def _router(process: Run, form: str, strategies: Sequence[str]) -> dict:
    names = {init: f"{_upit(form)}, {init}" for init in strategies}
    for init in strategies:
        _check(process, form, init=init)

    def plan(stages: Stages):
        yield DENSE[form], stages.dense(form)
        for init, name in names.items():
            yield name, stages.upit(form, init=init)

    entries = process.collect(plan)
    extra, said = _routing(process, "router", [entry for entry in entries if entry.name in names.values()])
    summary = {"summary": lambda report: [*each(report), *said]}
    return {"entries": entries, "reference": names[strategies[-1]], "extra": extra} | summary


def _experts(process: Run, form: str, sizes: Sequence[int], active: Sequence[int]) -> dict:
    copies, upit = _copies_name(form, "pt"), _upit(form)
    grid = [(E, A) for E in sizes for A in active if A <= E]
    names = {(of, *one): f"{of} of {one[0]} experts, {one[1]} per token" for one in grid for of in (copies, upit)}
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
    return {"entries": process.collect(plan), "reference": DENSE[form], "summary": summary, "extra": extra}


def _data(process: Run, form: str, shares: Sequence[float]) -> dict:
    methods = [DENSE[form], *(_copies_name(form, start) for start in STARTS), _upit(form)]
    names = {(method, share): f"{method}, {share:.3g} of the rows" for method in methods for share in shares}
    rows = len(process.all[0].train_rows)
    for share in shares:
        _check(process, form, share=share)

    def plan(stages: Stages):
        for share in shares:
            part = stages.change(share=share)
            yield names[DENSE[form], share], part.dense(form)
            for start in STARTS:
                yield names[_copies_name(form, start), share], _copies(part, form, start)
            yield names[_upit(form), share], part.upit(form)

    def summary(report: UpitReport) -> list[str]:
        lines = []
        for share in shares:
            others = [names[method, share] for method in methods[:-1]]
            lines += against(report.entries, names[_upit(form), share], others)
        return lines

    extra = {"x": {name: share * rows for (_, share), name in names.items()}, "x_label": "rows", "x_log": True}
    reference = names[_upit(form), shares[-1]]
    return {"entries": process.collect(plan), "reference": reference, "summary": summary, "extra": extra}


def _epochs(process: Run, form: str, pairs: Sequence[tuple[float, float]]) -> dict:
    others = [DENSE[form], *(_copies_name(form, start) for start in STARTS)]
    names = {
        (method, pair): f"{method}, {pair[0]:g} + {pair[1]:g}" for pair in pairs for method in (*others, _upit(form))
    }
    changes = {pair: {f"{form}__sft__epochs": pair[0], f"{form}__post__epochs": pair[1]} for pair in pairs}
    for pair in pairs:
        _check(process, form, **changes[pair])

    def plan(stages: Stages):
        for pair in pairs:
            longer = stages.change(**changes[pair])
            yield names[DENSE[form], pair], longer.dense(form)
            for start in STARTS:
                yield names[_copies_name(form, start), pair], _copies(longer, form, start)
            yield names[_upit(form), pair], longer.upit(form)

    def summary(report: UpitReport) -> list[str]:
        lines = each(report)
        for pair in pairs:
            lines += against(report.entries, names[_upit(form), pair], [names[method, pair] for method in others])
        return lines

    return {"entries": process.collect(plan), "reference": names[_upit(form), pairs[0]], "summary": summary}


def _losses(
    title: str, source: str, make: Callable, check: Callable | None = None, draw: Callable = pictures.dots
) -> Command:
    return Command(title, f"UpIT, {source}", make, draw, check or (lambda recipe: {}), UpitReport)


COMMANDS = {
    "main": _losses("UpIT and its baselines", "Table 1", _main),
    "ckpt": _losses("Which checkpoints become experts", "Tables 2 and 8", _ckpt, check_named(WHICH)),
    "expand": _losses("How experts are expanded", "Tables 2 and 9", _expand, check_named(EXPANSIONS)),
    "router": _losses("How routers begin", "Tables 2 and 10", _router, check_named(("none", "random", "skilled"))),
    "experts": _losses("Experts, and experts per token", "Figure 4", _experts, check_experts, pictures.sweep),
    "data": _losses("Rows to tune on", "Figure 3", _data, check_data, pictures.sweep),
    "epochs": _losses("Epochs before and after", "Figure 6", _epochs, check_epochs),
}
