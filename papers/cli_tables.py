"""python -m papers METHOD TABLE: the tables and figures of the papers, one verb per entry of
TABLES.

The entries are not in papers/METHOD/tables.py, which makes the tables, because --help and
completion must not import torch. Names are the same in both; given options become arguments of
`run` there.
"""

import inspect
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from moe_runtime.cli.verbs import argument, one_gpu, option
from moe_runtime.io import console
from papers.verbs import group, recipes, verb


class Table(NamedTuple):
    """A verb: its name, help, the arguments of its example, and name -> (type, default) of its own
    options.
    """

    name: str
    help: str
    example: str = "--seeds 3"
    options: dict[str, tuple] = {}


def _several(kind: type, help: str, *names: str, **more) -> tuple:
    """Return the type and the default of an argument of several values; of a repeatable option if
    it has names.
    """
    return Annotated[
        list[kind] | None, option(help, *names) if names else argument(help, **more)
    ], None


def _epochs(text: str) -> tuple[float, ...]:
    """Parse 2,6 to (2.0, 6.0)."""
    return tuple(float(part) for part in text.split(","))


def _upit(name: str, help: str, example: str, **options: tuple) -> Table:
    """Return a table of UpIT, whose experts are whole FFNs or LoRA adapters; its strategies are
    those of the example.
    """
    some = f"Some of {example} (default: all)."
    return Table(
        name,
        help,
        example,
        (options or {"strategies": _several(str, some, words=example)}) | {"form": FORM},
    )


SCORE = Annotated[str, option("gate or token.", words="gate token")]
SCORES = Annotated[str, option("gate, token or both.", words="gate token both")]
TOP = (Annotated[int, option("Experts per layer that are compared.")], 6)
TOKENS = (Annotated[int, option("Tokens per text, at most.")], 16384)
ROWS = (Annotated[int | None, option("Held-out examples per domain (default: all).")], None)
CHECKPOINTS = (Annotated[int, option("Measurements during stage 2.")], 12)
FORM = (
    Annotated[
        str | None, option("ffn or lora experts (default: the recipe's first).", words="ffn lora")
    ],
    None,
)
TEXTS = _several(str, "Another text, a jsonl or parquet file; repeatable.", "--data")
RANKS = _several(int, "A rank of LoRA; repeatable; 1, the recipe's and 4 times that.", "--rank")
RATIOS = _several(float, "Examples of general text per example of the task (default: 0 1).")
FACTORS = _several(float, "Factors of the recipe's learning rates (default: .1 .3 1).")
DEPTHS = _several(
    float, "How far below the base's task loss; repeatable (default: .12 .15 .18).", "--depth"
)
MIX = (Annotated[float, option("Examples of general text per example of the task.")], 0.0)
TABLES = {
    "xft": (
        Table(
            "table1", "Compare base, SFT, EWA, the MoE model and XFT's dense model (Tables 1 to 3)."
        ),
        Table(
            "ablate-gate",
            (
                "Compare the gate with one without normalization and two without a shared expert "
                "(Table 4)."
            ),
        ),
        Table(
            "ablate-merge",
            (
                "Compare ways to merge one MoE model: learned, initial, learned soup, uniform "
                "(Table 5)."
            ),
        ),
        Table(
            "sweep-lambda",
            (
                "Merge one MoE model with several rates of the shared expert (Table 6 of the long "
                "version)."
            ),
            "0 .25 .5 .75 1",
            {"shared_rates": _several(float, "lambdas (default: 0 .25 .5 .75 1).")},
        ),
        Table(
            "sweep-topk",
            "Tune and merge MoE models with several numbers of experts per token (footnote 1).",
            "2 4 6",
            {"top_ks": _several(int, "Experts per token (default: 2 4 6).")},
        ),
        Table(
            "budget",
            "Compare XFT with SFT of equal steps and of equal time (Table 8 of the long version).",
        ),
        Table(
            "ewa-schedule",
            "Compare EWA with a constant and a linear share rate, during training too (Figure 3).",
        ),
        Table(
            "routing-stats",
            "Show which experts process the tokens of different texts (Figure 4).",
            "--data java.jsonl --data rust.jsonl",
            {"texts": TEXTS, "tokens": TOKENS},
        ),
        Table(
            "overfit",
            (
                "Compare XFT with SFT, EMA and SWA at three learning rates: few examples, several "
                "epochs."
            ),
            "--preset overfit",
        ),
        Table(
            "mix-rows",
            "Learn to mix on the tuning examples, or on examples held back from tuning.",
            "--preset overfit",
        ),
    ),
    "esft": (
        Table(
            "main",
            (
                "Compare base, FFT, LoRA, ESFT-Token and ESFT-Gate, on tasks and general text "
                "(Tables 1 and 2)."
            ),
        ),
        Table(
            "sweep-p",
            "Vary how much is trained: ESFT by p, LoRA by rank (Figure 6).",
            ".05 .1 .2 .4 --score gate --rank 2 --rank 8",
            {
                "ps": _several(float, "Thresholds (default: .05 .1 .2 .4)."),
                "score": (SCORES, "both"),
                "ranks": RANKS,
            },
        ),
        Table(
            "shared-grid",
            (
                "Train relevant experts, shared experts and other modules, in seven combinations "
                "(Table 3)."
            ),
            "--score token",
            {"score": (SCORE, "token")},
        ),
        Table("random-experts", "Compare the selected experts with as many random ones (Table 4)."),
        Table(
            "group-size",
            (
                "Route by groups of experts, as if the experts were coarser; tune with FFT and "
                "ESFT (Figure 7)."
            ),
            "1 2 4",
            {"sizes": _several(int, "Experts per group (default: 1 2 4).")},
        ),
        Table(
            "mix-data",
            "Tune with and without general text mixed in (Tables 9 and 10).",
            "0 1",
            {"ratios": RATIOS},
        ),
        Table(
            "other-tasks",
            "Tune on one task, evaluate on the others: FFT, LoRA, ESFT (Table 8).",
            "--mix 0",
            {"mix": MIX},
        ),
        Table(
            "frontier",
            "Compare general losses at equal task losses, for several learning rates.",
            ".1 .3 1 --preset frontier",
            {"factors": FACTORS, "depths": DEPTHS},
        ),
        Table(
            "counts",
            (
                "Show the experts that each task's selection trains, and where in text (Figures "
                "2, 4 and 9)."
            ),
        ),
        Table(
            "sample-size",
            "Show how much text is needed to find the same experts (Figure 8).",
            "1024 8192 --top 6",
            {
                "sizes": _several(int, "Tokens per sample (default: powers of two)."),
                "top": TOP,
                "score": (SCORE, "gate"),
            },
        ),
        Table(
            "overlap",
            "Show how many top experts samples of the same or of different tasks share (Figure 3).",
            "--top 6",
            {"top": TOP, "score": (SCORE, "gate")},
        ),
    ),
    "upit": (
        Table(
            "main",
            (
                "Compare UpIT with dense tuning, copied experts, router-only tuning, also as LoRA "
                "(Table 1)."
            ),
        ),
        _upit("ckpt", "Choose checkpoints in three ways (Tables 2 and 8).", "front uniform back"),
        Table(
            "pesc",
            (
                "Compare adapters behind the MLPs as experts with LoRA, copied LoRA experts and "
                "UpIT (Table 1)."
            ),
        ),
        Table(
            "saved",
            "Evaluate each checkpoint of the first tuning by domain (Figure 2).",
            "--form lora",
            {"form": FORM},
        ),
        _upit(
            "expand",
            "Expand experts in three ways, or not at all (Tables 2 and 9).",
            "none random genetic",
        ),
        _upit(
            "router",
            "Start from three kinds of routers (Tables 2 and 10, Figure 5).",
            "none random skilled",
        ),
        _upit(
            "experts",
            "Vary the experts and the experts per token, of UpIT and of copied experts (Figure 4).",
            "--experts 4 --experts 8 --active 1 --active 2",
            sizes=_several(
                int, "Experts; repeatable (default: the recipe's m and n).", "--experts"
            ),
            active=_several(
                int, "Experts per token; repeatable (default: 1, 2 and 4).", "--active"
            ),
        ),
        _upit(
            "data",
            "Tune on a share of the examples: dense, copied experts, UpIT (Figure 3).",
            "0.25 0.5 1",
            shares=_several(float, "Shares of the examples (default: 0.1 0.2 0.4 1)."),
        ),
        _upit(
            "epochs",
            "Vary the epochs of the two stages: dense, copied experts, UpIT (Figure 6).",
            "2,2 2,6 4,4",
            pairs=_several(
                str, "Epochs before and after, such as 2,6 (default: 2,2 2,6 4,4).", parser=_epochs
            ),
        ),
        Table(
            "budget",
            (
                "Compare UpIT with SFT, SWA and copies at equal optimizer steps, with one "
                "schedule or two (Sec. 4.1)."
            ),
            "--preset budget",
        ),
    ),
    "ultrafuser": (
        Table(
            "ablate",
            (
                "Compare specialists, specialists tuned further, and fused ones: direct, in two "
                "stages (Tables 2, 4)."
            ),
        ),
        Table(
            "sample-level",
            "Compare a selector of one specialist per prompt with the fused model (Sec. 3.1).",
        ),
        Table(
            "weights",
            (
                "Show the gate's weights by domain, as a map and token by token on a page (Table "
                "6, Figures 6 to 8)."
            ),
            "--rows 100",
            {"rows": ROWS},
        ),
        Table(
            "stability",
            "Show the losses during stage 2, with the balanced sampler and without (Table 5).",
            "--checkpoints 12",
            {"checkpoints": CHECKPOINTS},
        ),
        Table(
            "sums",
            "Show the sums that specialists, fused and single models solve, by their steps.",
            "--preset sums",
        ),
    ),
}

PAPERS = {"xft": "XFT", "esft": "ESFT", "upit": "UpIT", "ultrafuser": "UltraFuser"}
apps: list[typer.Typer] = []


def _add(method: str, parent: typer.Typer, table: Table) -> None:
    """Add the verb of a table: its own options, and those that all tables have."""
    options = table.options | {
        "preset": (
            Annotated[
                str | None,
                option("A shipped recipe (default: tiny).", words=(lambda: recipes(method),)),
            ],
            None,
        ),
        "recipe": (
            Annotated[Path | None, option("A recipe's YAML file, for your own model and data.")],
            None,
        ),
        "out": (
            Annotated[
                Path,
                option(
                    "Folder of the stages, which all tables share, and of the tables and pictures."
                ),
            ],
            Path("runs", method),
        ),
        "seeds": (Annotated[int, option("Number of seeds; all share the data and the base.")], 3),
        "overwrite": (
            Annotated[bool, option("Replace a report with other settings.", "--overwrite")],
            False,
        ),
    }

    def run(*, preset, recipe, out, seeds, overwrite, **given):
        given = {name: value for name, value in given.items() if value not in (None, [])}
        return _make(
            method, table.name, preset, recipe, out, seeds=seeds, overwrite=overwrite, **given
        )

    run.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    )
    run.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    run.__doc__ = table.help
    verb(parent, table.example, name=table.name, resumes=True)(run)


def _make(
    method: str, name: str, preset: str | None, recipe: Path | None, out: Path, **options
) -> dict:
    """Make a table, print it and the paths of its files; return its report and the files."""
    if preset is not None and recipe is not None:
        raise ValueError(
            f"Pass either a preset or a recipe, but got preset {preset!r} and recipe "
            f"{str(recipe)!r}"
        )
    if recipe is None:
        from moe_runtime.config import check_choice

        check_choice("preset", preset := preset or "tiny", tuple(recipes(method)))
    one_gpu()
    from importlib import import_module

    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    tables = import_module(f"papers.{method}.tables")
    report = tables.run(name, recipe or preset, out, say=say, **options)
    data = out / f"{name}.json"
    picture = out / f"{name}.png"
    if console.is_main():
        console.print_table(
            f"{report.title} ({report.source})", report.columns(), report.rows(), width=400
        )
        for line in (report.legend(), *report.summary, f"numbers: {data}   picture: {picture}"):
            print(line)
    return report.to_dict() | {"files": [data, picture]}


for _method, _paper in PAPERS.items():
    _example = f"{TABLES[_method][0].name} --seeds 3"
    _group = group(_method, f"Make the tables and figures of the {_paper} paper.", _example)
    for _table in TABLES[_method]:
        _add(_method, _group, _table)
    apps.append(_group)
