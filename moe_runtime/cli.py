"""moe-runtime <verb>: the command line. Heavy imports happen inside the verbs, so that --help is quick."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts runtime: upcycle a dense model, tune it, learn how to mix its experts, merge it to a dense one.",
)

Source = Annotated[Path, typer.Argument(help="Folder of the model to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the target folder if it exists.")]
ShardSize = Annotated[str, typer.Option(help="Largest file of the target, such as 500MB or 2GB.")]
SharedRate = Annotated[float, typer.Option(help="lambda: the shared expert's mixing coefficient.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]


@app.command(epilog="Example: moe-runtime demo --preset tiny")
def demo(
    preset: Annotated[str, typer.Option(help="small (minutes on two cores) or tiny (seconds).")] = "small",
    out: Annotated[Path, typer.Option(help="Folder for the models, the table and the picture.")] = Path("runs/demo"),
    seed: Seed = 0,
    overwrite: Overwrite = False,
):
    """Run the whole way on real text: pre-train a small model, SFT and XFT it, merge, compare."""
    # one GPU is enough, and Trainer would spread a single process over all that it sees; before torch looks
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    from moe_runtime.demo import run

    run(preset, out, seed=seed, overwrite=overwrite)


@app.command(epilog="Example: moe-runtime upcycle llama-1b llama-1b-moe --num-experts 8 --top-k 6")
def upcycle(
    source: Source,
    target: Target,
    num_experts: Annotated[int, typer.Option(help="Experts per layer, the shared one counted.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token, the shared one counted.")] = 6,
    gate: Annotated[
        str, typer.Option(help="xft, nonorm, topk_softmax, softmax_topk, softmax_topk_renorm or sigmoid_topk.")
    ] = "xft",
    router: Annotated[str, typer.Option(help="linear or mlp.")] = "linear",
    noisy_gate: Annotated[
        bool, typer.Option("--noisy-gate", help="Noise on the router logits while training.")
    ] = False,
    balance_loss: Annotated[str, typer.Option(help="none, cv2 or switch.")] = "none",
    balance_loss_coef: Annotated[float, typer.Option(help="Weight of the balance loss.")] = 0.0,
    layers: Annotated[str | None, typer.Option(help="Layers to upcycle, such as 0-3,8; all by default.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Load both models and compare their logits.")] = False,
    max_shard_size: ShardSize = "2GB",
    seed: Seed = 42,
    overwrite: Overwrite = False,
):
    """Turn a dense model into a mixture of experts: every MLP becomes copies of itself behind a router."""
    from moe_runtime.methods import xft_folders

    if (balance_loss == "none") != (balance_loss_coef == 0):
        raise ValueError(
            f"balance_loss is {balance_loss!r}, balance_loss_coef is {balance_loss_coef}; want both or neither, such as "
            "--balance-loss cv2 --balance-loss-coef 0.01"
        )
    settings = {
        "num_experts": num_experts, "top_k": top_k, "gate": gate, "router": router, "noisy_gate": noisy_gate,
        "balance_loss": balance_loss, "balance_loss_coef": balance_loss_coef,
    }  # fmt: skip
    with _progress("upcycling") as progress:
        receipt = xft_folders.upcycle_folder(
            source, target, layers=_numbers(layers), seed=seed, max_shard_size=max_shard_size, overwrite=overwrite,
            progress=progress, **settings,
        )  # fmt: skip
    _say(receipt)
    if check:
        error = xft_folders.compare_folders(source, target)
        typer.echo(f"upcycled against dense logits: relative error {error:.1e}")
    typer.echo(f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir tuned")


@app.command(epilog="Example: moe-runtime to-mergeable tuned mergeable --shared-rate 0.75")
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

    with _progress("writing") as progress:
        receipt = xft_folders.mergeable_folder(
            source, target, shared_rate=shared_rate, soup=soup, max_shard_size=max_shard_size, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    _say(receipt)
    typer.echo(
        f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir mixed; then moe-runtime merge mixed dense"
    )


@app.command(epilog="Example: moe-runtime merge mixed dense")
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

    with _progress("merging") as progress:
        receipt = xft_folders.merge_folder(
            source, target, shared_rate=shared_rate, alpha=_alpha(alpha), max_shard_size=max_shard_size,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    _say(receipt)
    for layer, row in zip(receipt.layers, receipt.alpha):
        typer.echo(f"layer {layer}: alpha " + " ".join(f"{value:.4f}" for value in row))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    epilog="Example: moe-runtime train --model llama-1b-moe --data pairs.jsonl --output_dir tuned",
)
def train(context: typer.Context):
    """Tune a model folder with TRL's SFT command; all its flags work, and --config train.yaml (see train --help)."""
    from moe_runtime.data import require

    require("trl")
    from moe_runtime.hf.training import train_command

    train_command(context.args)


@app.command(epilog="Example: moe-runtime stats olmoe --data pairs.jsonl --out runs/stats")
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


@app.command(epilog="Example: moe-runtime doctor")
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False):
    """Print versions, devices, and for each op the backend that would run it here and why."""
    from moe_runtime import backends

    report = backends.doctor()
    if json:
        from json import dumps

        return typer.echo(dumps(report, indent=2))
    for title, rows in report.items():
        typer.echo(title)
        for name, value in rows.items():
            typer.echo(f"  {name:22s}{value}")
    return None


@app.command(
    epilog="Example: moe-runtime tune --model llama-1b-moe; or moe-runtime tune --shape qwen3-30b-a3b --tokens 4096,16384"
)
def tune(
    shape: Annotated[
        str | None, typer.Option(help="A published model's layer, such as mixtral-8x7b, several of them, or all.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Folder whose config.json names the sizes.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="H; of --model unless given, as the sizes below.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="I, of one expert.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts per layer, a shared one counted.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token, a shared one counted.")] = None,
    shared: Annotated[bool | None, typer.Option(help="Expert 0 sees every token.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens per forward pass, several with commas.")] = "4096,16384",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or several with commas.")] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="File to write; the one that the kernels read unless given.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what the file has already.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Begin nothing new after this time.")] = None,
):
    """Measure the launch configs of the experts' kernels on this GPU, for processes that start from now on.

    A run that was stopped goes on where it was.
    """
    from moe_runtime import tuning
    from moe_runtime.config import check_choice

    sizes = {
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts, "top_k": top_k,
        "shared": shared,
    }  # fmt: skip
    layers = _layers(shape, model, {name: size for name, size in sizes.items() if size is not None})
    T = [int(part) if part.strip().isdigit() and int(part) else 0 for part in tokens.split(",")]
    if not all(T):
        raise ValueError(f"tokens is {tokens!r}; want integers of at least 1 such as 4096,16384")
    dtypes = [part.strip() for part in dtype.split(",")]
    for part in dtypes:
        check_choice("dtype", part, tuning.DTYPES)
    path, counts = out or tuning.tiles.tuned_path(), {}
    try:
        for step in _steps(tuning.tune(layers, T, dtypes, path, again=again, seconds=seconds)):
            counts[step.state] = counts.get(step.state, 0) + 1
            typer.echo(f"[{step.number}/{step.of}] {step}", err=step.state == "failed")
    except tuning.ContextLost as lost:
        typer.echo(f"error: {lost}", err=True)
        raise typer.Exit(3) from None
    typer.echo(f"{path}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    if path != tuning.tiles.tuned_path():
        typer.echo(f"the kernels read {tuning.tiles.tuned_path()}, not this file")
    if set(counts) == {"failed"}:
        raise ValueError("nothing could be measured; want a GPU on which the built-in configs run")


def _layers(shape: str | None, model: Path | None, sizes: dict) -> dict:
    """Return name -> tuning.Layer of --shape, or of --model and the sizes given beside it."""
    from moe_runtime.config import check_choice
    from moe_runtime.tuning import LAYERS, Layer, read_layer

    if shape is not None:
        if model is not None or sizes:
            raise ValueError("shape stands beside --model or sizes; want --shape alone, or the others")
        known = {name.lower(): name for name in LAYERS}
        names = list(known) if shape.lower() == "all" else [part.strip().lower() for part in shape.split(",")]
        for name in names:
            check_choice("shape", name, (*known, "all"))
        return {known[name]: LAYERS[known[name]] for name in names}
    layer = Layer(0, 0, 0, 0) if model is None else read_layer(model)
    layer = layer._replace(**sizes)
    if model is None and not sizes:
        raise ValueError(
            "no layer is named; want --shape, --model, or --hidden-size, --intermediate-size, --num-experts, --top-k"
        )
    missing = [f"--{name.replace('_', '-')}" for name in Layer._fields[:4] if not getattr(layer, name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is missing{f' in {model}' if model else ''}; want the layer's four sizes"
        )
    return {"layer" if model is None else model.name: layer}


def _steps(steps):
    """Pass the tuner's steps on; on a terminal under a progress bar."""
    if not sys.stderr.isatty():
        yield from steps
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        for step in steps:
            bar.update(task, total=step.of, completed=step.number, description=step.title)
            yield step


def _numbers(text: str | None) -> list[int] | None:
    """Parse 0-3,8 to [0, 1, 2, 3, 8]."""
    if text is None:
        return None
    numbers = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise ValueError(f"layers is {text!r}; want numbers and ranges such as 0-3,8")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def _alpha(text: str | None) -> str | list[float] | None:
    if text is None or text == "uniform":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"alpha is {text!r}; want 'uniform' or numbers such as 0.75,0.125,0.125") from None


def _progress(title: str):
    """A progress bar over bytes; on a terminal only, so that logs stay short."""
    from contextlib import contextmanager

    @contextmanager
    def bar():
        if not sys.stderr.isatty():
            yield None
            return
        from tqdm import tqdm

        with tqdm(desc=title, unit="B", unit_scale=True, leave=False) as progress:

            def update(done: int, total: int) -> None:
                progress.total = total
                progress.update(done - progress.n)

            yield update

    return bar()


def _say(receipt) -> None:
    c = receipt.config
    typer.echo(
        f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB"
        + (f", and {', '.join(receipt.side_files)}" if receipt.side_files else "")
    )
    typer.echo(f"experts: {c.num_experts}, {c.top_k} per token, gate {c.gate}, {c.hidden_size} x {c.intermediate_size}")
    if receipt.mlp_error is not None:
        typer.echo(f"the MLPs against the formula: largest relative error {receipt.mlp_error:.1e}")


def main() -> None:
    """Run the command line; bad input ends in one line on stderr and exit code 1, Ctrl-C in 130."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("MOE_RUNTIME_DEBUG"):
            raise
        message = str(error).replace("overwrite=True", "--overwrite")
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
