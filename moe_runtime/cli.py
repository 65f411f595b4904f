"""moe-runtime <verb>: the command line. Heavy imports happen inside the verbs, so that --help is quick."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime import (
    __version__,
    cli_bench,
    cli_esft,
    cli_esft_tables,
    cli_fuser,
    cli_tune,
    cli_upit,
    cli_xft,
    config,
    interruption,
    progress,
)
from moe_runtime.cli_verbs import Ends, GoesOn, Whole, choices, numbers, recipes, verb
from moe_runtime.terminal import jsonable

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts runtime: upcycle a dense model, tune it, learn how to mix its experts, merge it to a dense one.",
    epilog="Example: moe-runtime demo --preset tiny",
)

Source = Annotated[Path, typer.Argument(help="Folder of the model to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the target folder if it exists.")]
ShardSize = Annotated[str, typer.Option(help="Largest file of the target, such as 500MB or 2GB.")]
SharedRate = Annotated[float, typer.Option(help="lambda: the shared expert's mixing coefficient.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]


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
    overwrite: Overwrite = False,
):
    """Run the whole way on real text: pre-train a small model, SFT and XFT it, merge, compare."""
    # one GPU is enough, and Trainer would spread a single process over all that it sees; before torch looks
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    from moe_runtime.demo import run
    from moe_runtime.files import read_json

    run(preset, out, seed=seed, overwrite=overwrite)
    return {"path": out} | read_json(out / "results.json")


@verb(app, example="moe-runtime upcycle llama-1b llama-1b-moe --num-experts 8 --top-k 6", kept=Whole("target"))
def upcycle(
    source: Source,
    target: Target,
    num_experts: Annotated[int, typer.Option(help="Experts per layer, the shared one counted.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token, the shared one counted.")] = 6,
    preset: Annotated[
        str,
        typer.Option(
            help="What the options below are unless given: xft-paper, or xft-official for its code's.",
            autocompletion=choices(*config.PRESETS),
        ),
    ] = "xft-paper",
    gate: Annotated[
        str | None,
        typer.Option(
            help="xft, nonorm, topk_softmax, softmax_topk, softmax_topk_renorm or sigmoid_topk.",
            autocompletion=choices(*config.GATES),
        ),
    ] = None,
    router: Annotated[str | None, typer.Option(help="linear or mlp.", autocompletion=choices(*config.ROUTERS))] = None,
    noisy_gate: Annotated[
        bool | None, typer.Option("--noisy-gate/--no-noisy-gate", help="Noise on the router logits while training.")
    ] = None,
    balance_loss: Annotated[
        str | None, typer.Option(help="none, cv2 or switch.", autocompletion=choices(*config.BALANCE_LOSSES))
    ] = None,
    balance_loss_coef: Annotated[float | None, typer.Option(help="Weight of the balance loss.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to upcycle, such as 0-3,8; all by default.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Load both models and compare their logits.")] = False,
    max_shard_size: ShardSize = "2GB",
    seed: Seed = 42,
    overwrite: Overwrite = False,
):
    """Turn a dense model into a mixture of experts: every MLP becomes copies of itself behind a router."""
    from moe_runtime.config import PRESETS, check_choice
    from moe_runtime.methods import xft_folders

    check_choice("preset", preset, tuple(PRESETS))
    given = {
        "gate": gate, "router": router, "noisy_gate": noisy_gate, "balance_loss": balance_loss,
        "balance_loss_coef": balance_loss_coef,
    }  # fmt: skip
    settings = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    if (settings["balance_loss"] == "none") != (settings["balance_loss_coef"] == 0):
        raise ValueError(
            f"balance_loss is {settings['balance_loss']!r}, balance_loss_coef is {settings['balance_loss_coef']}; want "
            "both or neither, such as --balance-loss cv2 --balance-loss-coef 0.01"
        )
    with progress.bar("upcycling", "B") as update:
        receipt = xft_folders.upcycle_folder(
            source, target, layers=numbers(layers), seed=seed, max_shard_size=max_shard_size, overwrite=overwrite,
            progress=update, num_experts=num_experts, top_k=top_k, **settings,
        )  # fmt: skip
    _say(receipt)
    error = None
    if check:
        with progress.bar("checking", "model") as update:
            error = xft_folders.compare_folders(source, target, update)
        typer.echo(f"upcycled against dense logits: relative error {error:.1e}")
    typer.echo(f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir tuned")
    return jsonable(receipt) | {"logits_error": error}


@verb(app, example="moe-runtime to-mergeable tuned mergeable --shared-rate 0.75", kept=Whole("target"))
def to_mergeable(
    source: Source,
    target: Target,
    shared_rate: SharedRate = 0.75,
    soup: Annotated[bool, typer.Option("--soup", help="Learn the coefficients of all experts (learned soup).")] = False,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
):
    """Make a tuned mixture mergeable: its MLP weights become a mixture of the experts with logits to train."""
    from moe_runtime.methods import xft_folders

    with progress.bar("writing", "B") as update:
        receipt = xft_folders.mergeable_folder(
            source, target, shared_rate=shared_rate, soup=soup, max_shard_size=max_shard_size, overwrite=overwrite,
            progress=update,
        )  # fmt: skip
    _say(receipt)
    typer.echo(
        f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir mixed; then moe-runtime merge mixed dense"
    )
    return receipt


@verb(app, example="moe-runtime merge mixed dense", kept=Whole("target"))
def merge(
    source: Source,
    target: Target,
    shared_rate: Annotated[
        float | None, typer.Option(help="lambda of a merge without training; 0.75 unless given.", show_default=False)
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(help="Coefficients in place of the learned ones: uniform, or E numbers a,b,... that sum to 1."),
    ] = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
):
    """Merge the experts to a dense model of the base's own architecture, with the learned or the initial coefficients."""
    from moe_runtime.methods import xft_folders

    with progress.bar("merging", "B") as update:
        receipt = xft_folders.merge_folder(
            source, target, shared_rate=shared_rate, alpha=_alpha(alpha), max_shard_size=max_shard_size,
            overwrite=overwrite, progress=update,
        )  # fmt: skip
    _say(receipt)
    for layer, row in zip(receipt.layers, receipt.alpha):
        typer.echo(f"layer {layer}: alpha " + " ".join(f"{value:.4f}" for value in row))
    return receipt


@verb(
    app,
    example="moe-runtime train --model llama-1b-moe --data pairs.jsonl --output_dir tuned",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(context: typer.Context):
    """Tune a model folder with TRL's SFT command; all its flags work, and --config train.yaml (see train --help)."""
    from moe_runtime.data import require

    require("trl")
    from moe_runtime.hf.training import train_command

    return {"path": train_command(context.args)}


@verb(app, example="moe-runtime stats olmoe --data pairs.jsonl --out runs/stats")
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
    from moe_runtime.data import require

    require("datasets")
    require("matplotlib", "plot")
    from moe_runtime.hf.router_report import FILES, router_report

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
    from moe_runtime.methods import runs

    return {"out": out, "results": runs.run(recipe, out, seed=seed)}


@verb(app, example="moe-runtime doctor")
def doctor():
    """Print versions, devices, the backend of each op and why, and what is broken with its mend; then the exit code is 1."""
    from moe_runtime import diagnosis

    report = diagnosis.report()
    for title, rows in report.items():
        typer.echo(title)
        for name, value in rows.items():
            typer.echo(f"  {name:22s}{value}")
    if not report["problems"]:
        typer.echo("  none")
    return Ends(report, 1 if report["problems"] else 0)


verb(app, example=cli_tune.EXAMPLE, kept=cli_tune.KEPT)(cli_tune.tune)
verb(app, example=cli_bench.EXAMPLE, kept=cli_bench.KEPT)(cli_bench.bench)
app.add_typer(cli_xft.app, name="xft")
cli_esft_tables.mount(cli_esft.app)
app.add_typer(cli_esft.app, name="esft")
app.add_typer(cli_upit.app, name="upit")
verb(app, example=cli_fuser.FUSE, kept=Whole("out"))(cli_fuser.fuse)
app.add_typer(cli_fuser.app, name="fuser")


def _alpha(text: str | None) -> str | list[float] | None:
    if text is None or text == "uniform":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"alpha is {text!r}; want 'uniform' or numbers such as 0.75,0.125,0.125") from None


def _say(receipt) -> None:
    c = receipt.config
    typer.echo(
        f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB"
        + (f", and {', '.join(receipt.side_files)}" if receipt.side_files else "")
    )
    typer.echo(f"experts: {c.num_experts}, {c.top_k} per token, gate {c.gate}, {c.hidden_size} x {c.intermediate_size}")
    if receipt.mlp_error is not None:
        typer.echo(f"the MLPs against the formula: largest relative error {receipt.mlp_error:.1e}")


def _quiet() -> None:
    """Keep other packages' bars out of logs, and their advice out of both; before they are imported."""
    if not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def main() -> None:
    """Run the command line; bad input ends in one line on stderr and exit code 1, Ctrl-C in 130, SIGTERM in 143."""
    _quiet()
    try:
        with interruption.sigterm_raises():
            app()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("MOE_RUNTIME_DEBUG"):
            raise
        message = str(error).replace("overwrite=True", "--overwrite")
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as stop:
        print(interruption.word_of(stop), file=sys.stderr)
        sys.exit(interruption.code_of(stop))


if __name__ == "__main__":
    main()
