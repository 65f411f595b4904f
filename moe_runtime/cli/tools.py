"""moe-runtime tune: the launch configs of the experts' kernels, measured on the GPU that is there."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import GoesOn, choices
from moe_runtime.io import console

EXAMPLE = "moe-runtime tune --model llama-1b-moe"


class _Measured(GoesOn):
    """The file that the kernels read, unless another one is named."""

    def say(self, options: dict) -> str:
        """Say where the measurements are; the same command with --again would begin anew."""
        from moe_runtime.tools import tune as tuning

        return super().say(options | {"out": options.get("out") or tuning.tiles.tuned_path()})


KEPT = _Measured(what="what was measured is kept in {}", drop=("--again",))


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
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float16, float32, or several with commas.",
            autocompletion=choices("bfloat16", "float16", "float32"),
        ),
    ] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="File to write; the one that the kernels read unless given.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what the file has already.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Begin nothing new after this time.")] = None,
):
    """Measure the launch configs of the experts' kernels on this GPU, for processes that start from now on.

    A run that was stopped goes on where it was.
    """
    from moe_runtime.config import check_choice
    from moe_runtime.tools import tune as tuning

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
    read = _read_by_kernels(out)
    path, counts = out or read, {}
    try:
        for step in _steps(tuning.tune(layers, T, dtypes, path, again=again, seconds=seconds)):
            counts[step.state] = counts.get(step.state, 0) + 1
            typer.echo(f"[{step.number}/{step.of}] {step}", err=step.state == "failed")
    except tuning.ContextLost as lost:
        typer.echo(f"error: {lost}", err=True)
        raise typer.Exit(3) from None
    typer.echo(f"{path}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    if path != read:
        typer.echo(f"the kernels read {read or 'no file: there is no home, and no XDG_CACHE_HOME'}, not this file")
    if set(counts) == {"failed"}:
        raise ValueError("nothing could be measured; want a GPU on which the built-in configs run")
    return {"path": path, "read_by_kernels": path == read, **counts}


def _read_by_kernels(out: Path | None) -> Path | None:
    """Return the file that the kernels read; without a home None, and ValueError where it is the one to write."""
    from moe_runtime.tools import tune as tuning

    try:
        return tuning.tiles.tuned_path()
    except ValueError:
        if out is None:
            raise
        return None


def _layers(shape: str | None, model: Path | None, sizes: dict) -> dict:
    """Return name -> Layer of --shape, or of --model and the sizes given beside it."""
    from moe_runtime.config import LAYERS, Layer, check_choice

    if shape is not None:
        if model is not None or sizes:
            raise ValueError("shape stands beside --model or sizes; want --shape alone, or the others")
        known = {name.lower(): name for name in LAYERS}
        names = list(known) if shape.lower() == "all" else [part.strip().lower() for part in shape.split(",")]
        for name in names:
            check_choice("shape", name, (*known, "all"))
        return {known[name]: LAYERS[known[name]] for name in names}
    layer = Layer(0, 0, 0, 0)
    if model is not None:  # which wants transformers; a GPU machine may have none
        from moe_runtime.hf.models.folders import read_layer

        layer = read_layer(model)
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
    """Pass the tuner's steps on, under a progress bar."""
    with console.bar("measuring", "config") as update:
        for step in steps:
            update(step.number, step.of)
            yield step
