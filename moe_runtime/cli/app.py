"""The verbs of moe-runtime, its groups mounted. Heavy imports happen inside the verbs, so that --help is quick."""

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime import __version__
from moe_runtime.cli import bench, esft, folders, tools, ultrafuser, upit, xft
from moe_runtime.cli.verbs import (
    Ends,
    GoesOn,
    ReplaceTarget,
    Seed,
    Source,
    Whole,
    WholeIn,
    choices,
    mount,
    recipes,
    verb,
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts runtime: upcycle a dense model, tune it, learn how to mix its experts, merge it to a dense one.",
    epilog="Example: moe-runtime demo --preset tiny",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"moe-runtime {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
):
    pass


@verb(app, example="moe-runtime demo --preset tiny", kept=Whole("out"))
def demo(
    preset: Annotated[
        str,
        typer.Option(help="small (minutes on two cores) or tiny (seconds).", autocompletion=choices("small", "tiny")),
    ] = "small",
    out: Annotated[Path, typer.Option(help="Folder for the models, the table and the picture.")] = Path("runs/demo"),
    seed: Seed = 0,
    overwrite: ReplaceTarget = False,
):
    """Run the whole way on real text: pre-train a small model, SFT and XFT it, merge, compare."""
    # one GPU is enough, and Trainer would spread a single process over all that it sees; before torch looks
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    from moe_runtime.experiments.demo import run
    from moe_runtime.io.files import read_json

    run(preset, out, seed=seed, overwrite=overwrite)
    return {"path": out} | read_json(out / "results.json")


mount(folders.app, app)


@verb(
    app,
    example="moe-runtime train --model llama-1b-moe --data pairs.jsonl --output_dir tuned",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(context: typer.Context):
    """Tune a model folder with TRL's SFT command; all its flags work, and --config train.yaml (see train --help)."""
    from moe_runtime.io.rows import require

    require("trl")
    from moe_runtime.hf.training.trainer import train_command

    return {"path": train_command(context.args)}


@verb(
    app,
    example="moe-runtime stats olmoe --data pairs.jsonl --out runs/stats",
    kept=WholeIn("out", "router_load.csv", "router_load.png"),
)
def stats(
    source: Source,
    data: Annotated[
        str, typer.Option(help="jsonl, parquet or a dataset's id: messages, prompt and completion, or text.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the CSV file and the heat map.")] = Path("runs/stats"),
    tokens: Annotated[int, typer.Option(help="Tokens to route, at most.")] = 131072,
    max_length: Annotated[int, typer.Option(help="Tokens of a row, at most.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Rows of a forward pass.")] = 4,
):
    """Show how a model's routers spread the tokens of a data set over the experts; any MoE model, stock or ours."""
    from moe_runtime.io.rows import require

    require("datasets")
    require("matplotlib", "plot")
    from moe_runtime.tools.router_report import FILES, router_report

    found = router_report(source, data, out, tokens=tokens, max_length=max_length, batch_size=batch_size)
    typer.echo(f"{int(found.counts.sum()):,} slots; violation and entropy are 1 when balanced")
    typer.echo(f"{'layer':>8s}{'experts':>9s}{'dead':>6s}{'max violation':>15s}{'entropy':>9s}")
    rows = zip(found.layers, found.routed, found.dead, found.max_violation.tolist(), found.entropy.tolist())
    for layer, counts, dead, violation, entropy in rows:
        typer.echo(f"{layer:>8s}{len(counts):9d}{int(dead.sum()):6d}{violation:15.2f}{entropy:9.2f}")
    if warning := found.warning():
        typer.echo(f"warning: {warning}", err=True)
    typer.echo("wrote " + ", ".join(str(out / name) for name in FILES))
    layers = [
        {"layer": layer, "slots": counts, "dead": int(dead.sum()), "max_violation": violation, "entropy": entropy}
        for layer, counts, dead, violation, entropy in zip(
            found.layers, found.routed, found.dead, found.max_violation.tolist(), found.entropy.tolist()
        )
    ]
    return {"layers": layers, "warning": found.warning(), "files": [out / name for name in FILES]}


@verb(app, example="moe-runtime run deepseek-coder-1.3b --out runs/deepseek", kept=GoesOn())
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A YAML file, or the name of a recipe that comes along.",
            show_default=False,
            autocompletion=choices(recipes()),
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the models and their results; a later run goes on there.")
    ] = Path("runs/recipe"),
    seed: Annotated[int | None, typer.Option(help="Seed; the recipe's unless given.", show_default=False)] = None,
):
    """Run a method from a recipe.

    XFT (base, upcycle, tune, learn mixing, merge), ESFT (base, score, select, tune), UpIT (base, tune, expand experts, route,
    assemble, tune) or UltraFuser (specialists, gate, all). What is there is not made again. A name may have its method before
    it: esft/tiny.

    On several GPUs: accelerate launch --config_file FILE -m moe_runtime.cli run RECIPE --out OUT.
    """
    if "LOCAL_RANK" not in os.environ:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # as in demo
    from moe_runtime.cli import runs

    return {"out": out, "results": runs.run(recipe, out, seed=seed)}


@verb(app, example="moe-runtime doctor")
def doctor():
    """Print versions, devices, the backend of each op and why, and what is broken with its mend; then the exit code is 1."""
    from moe_runtime.tools import doctor as diagnosis

    report = diagnosis.report()
    for title, rows in report.items():
        typer.echo(title)
        for name, value in rows.items():
            typer.echo(f"  {name:22s}{value}")
    if not report["problems"]:
        typer.echo("  none")
    return Ends(report, 1 if report["problems"] else 0)


verb(app, example=tools.EXAMPLE, kept=tools.KEPT)(tools.tune)
verb(app, example=bench.EXAMPLE, kept=bench.KEPT)(bench.bench)
app.add_typer(xft.app, name="xft")
app.add_typer(esft.app, name="esft")
app.add_typer(upit.app, name="upit")
verb(app, example=ultrafuser.FUSE, kept=Whole("out"))(ultrafuser.fuse)
app.add_typer(ultrafuser.app, name="fuser")
