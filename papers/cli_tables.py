"""python -m papers METHOD TABLE: the tables of the papers, one verb per entry of TABLES.

The entries are not in papers/METHOD/tables.py, which makes the tables, because --help and
completion must not import torch. Names are the same in both; given options become arguments of
`run` there.
"""

import inspect
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from moe_runtime.cli.verbs import argument, one_gpu, option
from moe_runtime.config import check_choice
from moe_runtime.io import console
from papers.verbs import group, recipes, verb

Lambdas = Annotated[list[float] | None, argument("lambdas (default: 0 .25 .5 .75 1).")]
Factors = Annotated[
    list[float] | None, argument("Factors of the recipe's learning rates (default: .1 .3 1).")
]
OverfitFactors = Annotated[
    list[float] | None, argument("Factors of the recipe's learning rate (default: .5 1 2).")
]
Merges = Annotated[
    list[float] | None,
    option("lambda of the merges; repeatable (default: .25 .5 .75 .85).", "--lambda"),
]
Depths = Annotated[
    list[float] | None,
    option("How far below the base's task loss; repeatable (default: .12 .15 .18).", "--depth"),
]
Rows = Annotated[int | None, option("Held-out examples per domain (default: all).")]


class Table(NamedTuple):
    """A verb: its name, help, the arguments of its example, and its own options by name."""

    name: str
    help: str
    example: str = "--seeds 3"
    options: dict[str, object] = {}


TABLES = {
    "xft": (
        Table(
            "table1",
            "Compare XFT with its baselines (Tables 1 to 3).\n\nBase, SFT, EWA, the MoE model and "
            "XFT's dense model.",
        ),
        Table(
            "ablate-gate",
            "Compare XFT's gate with others (Table 4).\n\nOne without normalization, two without a "
            "shared expert.",
        ),
        Table(
            "sweep-lambda",
            "Merge with several lambdas (Table 6, long version).\n\nOne MoE model, with several "
            "rates of the shared expert.",
            "0 .25 .5 .75 1",
            {"shared_rates": Lambdas},
        ),
        Table(
            "overfit",
            "Compare XFT with SFT, EMA and SWA where SFT overfits.\n\nFew examples, several "
            "epochs, several learning rates; SFT at its best and at its last step.",
            "--preset overfit",
            {"factors": OverfitFactors, "shared_rates": Merges},
        ),
        Table(
            "ensemble",
            "Compare ensembles with merges (Sec. 6.3, long version).\n\nThe ensemble of two SFT "
            "models with their merge, and the MoE model with XFT's.",
            "--preset overfit",
        ),
        Table(
            "mix-rows",
            "Learn to mix on tuning examples, or on others.\n\nThe others are held "
            "back from tuning.",
            "--preset overfit",
        ),
    ),
    "esft": (
        Table(
            "main",
            "Compare ESFT with its baselines (Tables 1 and 2).\n\nBase, FFT, LoRA, ESFT-Token, "
            "ESFT-Gate and as many random experts, on tasks and general text.",
        ),
        Table(
            "frontier",
            "Compare general losses at equal task losses.\n\nFor several learning rates.",
            ".1 .3 1 --preset frontier",
            {"factors": Factors, "depths": Depths},
        ),
        Table("counts", "Show the experts that each task trains (Figures 2, 4)."),
    ),
    "upit": (
        Table(
            "main",
            "Compare UpIT with its baselines (Table 1).\n\nDense tuning, copied experts, "
            "router-only tuning, also as LoRA.",
        ),
        Table(
            "budget",
            "Compare UpIT with SFT at equal steps (Sec. 3.1).\n\nAlso with SWA and copies, with "
            "one schedule or two.",
            "--preset budget",
        ),
    ),
    "ultrafuser": (
        Table(
            "ablate",
            "Compare specialists and fused ones (Tables 2, 4).\n\nAlso specialists tuned further; "
            "fused directly and in two stages.",
        ),
        Table(
            "weights",
            "Show the gate's weights by domain (Table 6, Figure 6).",
            "--rows 100",
            {"rows": Rows},
        ),
    ),
}

PAPERS = {"xft": "XFT", "esft": "ESFT", "upit": "UpIT", "ultrafuser": "UltraFuser"}


def _verb_of(method: str, table: Table):
    """Return the function of a table's verb: its own options, and those that all tables have."""

    def run(
        *,
        preset: Annotated[
            str | None,
            option("A shipped recipe (default: tiny).", words=(lambda: recipes(method),)),
        ] = None,
        recipe: Annotated[
            Path | None, option("A recipe's YAML file, for your own model and data.")
        ] = None,
        out: Annotated[
            Path,
            option("Folder of the stages, which all tables share, and of the tables and pictures."),
        ] = Path("runs", method),
        seeds: Annotated[int, option("Number of seeds; all share the data and the base.")] = 3,
        overwrite: Annotated[
            bool, option("Replace a report with other settings.", "--overwrite")
        ] = False,
        **options,
    ):
        given = {name: value for name, value in options.items() if value not in (None, [])}
        if preset is not None and recipe is not None:
            raise ValueError(
                f"Pass either a preset or a recipe, but got preset {preset!r} and recipe "
                f"{str(recipe)!r}"
            )
        if recipe is None:
            preset = preset or "tiny"
            check_choice("preset", preset, tuple(recipes(method)))
        one_gpu()
        start = time.perf_counter()

        def say(text: str) -> None:
            print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

        tables = import_module(f"papers.{method}.tables")
        report = tables.run(
            table.name,
            recipe or preset,
            out,
            say=say,
            seeds=seeds,
            overwrite=overwrite,
            **given,
        )
        return _shown(report, out)

    signature = inspect.signature(run)
    shared = [one for one in signature.parameters.values() if one.name != "options"]
    parameters = []
    for name, annotation in table.options.items():
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=annotation,
            )
        )
    run.__signature__ = signature.replace(parameters=[*parameters, *shared])
    run.__annotations__ = {one.name: one.annotation for one in (*parameters, *shared)}
    run.__doc__ = table.help
    return run


def _shown(report, out: Path) -> dict:
    """Print a table and the paths of its files; return its report and the files."""
    data = out / f"{report.command}.json"
    picture = out / f"{report.command}.png"
    if console.is_main():
        title = f"{report.title} ({report.source})"
        console.print_table(
            title,
            report.columns(),
            report.rows(),
            width=400,
        )
        for line in (report.legend(), *report.summary, f"numbers: {data}   picture: {picture}"):
            print(line)
    return report.to_dict() | {"files": [data, picture]}


apps: list[typer.Typer] = []
for _method, _paper in PAPERS.items():
    _example = f"{TABLES[_method][0].name} --seeds 3"
    _group = group(_method, f"Make the tables of the {_paper} paper.", _example)
    for _table in TABLES[_method]:
        add = verb(
            _group,
            _table.example,
            name=_table.name,
            resumes=True,
        )
        add(_verb_of(_method, _table))
    apps.append(_group)
