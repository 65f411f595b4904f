"""moe-runtime stats, memory, doctor, tune, bench."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.verbs import (
    DTYPES,
    Bf16,
    Checkpointing,
    Data,
    Ends,
    MaxLength,
    Overwrite,
    Source,
    argument,
    numbers,
    option,
    verb,
)
from moe_runtime.io import console
from moe_runtime.io.rows import require

BITS = "4 8 16 nf4 mxfp4 fp8_block int8"
OPTIMIZERS = "adamw adamw_torch sgd adafactor 8bit"
ENGINES = "ddp fsdp2 zero3 ep"
KINDS = ("op", "layer", "step", "tokens", "memory", "breakdown", "method")
app = typer.Typer()  # its verbs are mounted at the top


@verb(app, "olmoe --data pairs.jsonl --out runs/stats")
def stats(
    source: Source,
    data: Data,
    out: Annotated[Path, option("Folder for the CSV file and the heat map.")] = Path("runs/stats"),
    tokens: Annotated[int, option("Tokens to route, at most.")] = 131072,
    max_length: MaxLength = 1024,
    batch_size: Annotated[int, option("Examples per forward pass.")] = 4,
    overwrite: Overwrite = False,
) -> Any:
    """Show how a model's routers use its experts.

    Of any MoE model, stock or ours: how the tokens of a data set are distributed over the experts.
    """
    require("datasets")
    require("matplotlib", "plot")
    from moe_runtime.tools.router_report import FILES, router_report

    stats = router_report(
        source,
        data,
        out,
        tokens=tokens,
        max_length=max_length,
        batch_size=batch_size,
        overwrite=overwrite,
    )
    typer.echo(f"{int(stats.counts.sum()):,} slots; violation and entropy are 1 when balanced")
    typer.echo(f"{'layer':>8s}{'experts':>9s}{'dead':>6s}{'max violation':>15s}{'entropy':>9s}")
    layers = []
    for i, name in enumerate(stats.layers):
        slots = stats.routed[i]
        dead = int(stats.dead[i].sum())
        violation = float(stats.max_violation[i])
        entropy = float(stats.entropy[i])
        layers.append(
            {
                "layer": name,
                "slots": slots,
                "dead": dead,
                "max_violation": violation,
                "entropy": entropy,
            }
        )
        typer.echo(f"{name:>8s}{len(slots):9d}{dead:6d}{violation:15.2f}{entropy:9.2f}")
    warning = stats.warning()
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    files = [out / name for name in FILES]
    typer.echo("wrote " + ", ".join(map(str, files)))
    return {"layers": layers, "warning": warning, "files": files}


@verb(app, "Qwen/Qwen3-30B-A3B --lora 16 --bits 4 --batch-size 4 --gradient-checkpointing")
def memory(
    model: Annotated[str, argument("Folder or Hub id, of which only the config is read.")],
    lora: Annotated[
        int | None,
        option("Rank of LoRA on linear layers and experts (default: all weights train)."),
    ] = None,
    bits: Annotated[
        str,
        option("Frozen experts in 16, 8 (int8) or 4 (NF4) bits, or a format's name.", words=BITS),
    ] = "16",
    batch_size: Annotated[int, option("Examples per device and forward pass.")] = 1,
    max_length: Annotated[int, option("Tokens per example.")] = 2048,
    optimizer: Annotated[
        str, option("adamw (fused), adamw_torch, sgd, adafactor or 8bit.", words=OPTIMIZERS)
    ] = "adamw",
    checkpointing: Checkpointing = False,
    bf16: Bf16 = False,
    dtype: Annotated[
        str | None, option("Dtype of the weights (default: the config's).", words=DTYPES)
    ] = None,
    backend: Annotated[
        str, option("Backend of the experts: triton or torch.", words="triton torch")
    ] = "triton",
    gpus: Annotated[int, option("Number of GPUs.")] = 1,
    gpu_memory: Annotated[
        float | None, option("Memory of each GPU in GB; exits with 1 if a stage does not fit.")
    ] = None,
    engine: Annotated[
        str | None, option("ddp, fsdp2, zero3 or ep (default: all that run).", words=ENGINES)
    ] = None,
) -> Any:
    """Estimate the memory of training from configs alone.

    Weights, gradients, optimizer, activations, peak; and by engine.

    Assumes examples without padding and balanced
    experts. The CUDA context and fragmentation are not included (--gpu-memory reserves 1.5 GB for
    them).
    """
    from moe_runtime.config import check_choice
    from moe_runtime.hf.training.settings import Training
    from moe_runtime.tools import memory as accounts
    from moe_runtime.tools.memory_plan import PlannedTraining, Planner

    check_choice("optimizer", optimizer, accounts.OPTIMIZERS)

    def make():
        return accounts.load(model, lora=lora, bits=bits, dtype=dtype)

    if gpus > 1 or gpu_memory is not None:
        training = Training(
            steps=1,
            learning_rate=1e-5,
            batch_size=batch_size * gpus,
            per_device_batch_size=batch_size,
            optimizer=optimizer,
            bf16=bf16,
            gradient_checkpointing=checkpointing,
        )
        stage = PlannedTraining(
            "training",
            make,
            lambda count: accounts.causal_batch(count, max_length),
            training,
            max_length,
            packed=accounts.BITS[bits],
        )
        return print_plan(Planner([stage]), gpus, gpu_memory, engine)
    estimate = accounts.estimate(
        make(),
        lambda: accounts.causal_batch(batch_size, max_length),
        packed=accounts.BITS[bits],
        backend=backend,
        optimizer=optimizer,
        checkpointing=checkpointing,
        bf16=bf16,
    )
    typer.echo(f"{estimate.parameters:,} parameters, of which {estimate.trained:,} train")
    typer.echo(accounts.as_text(accounts.table(estimate)))
    return estimate._asdict()


def print_plan(planner: Any, gpus: int, gpu_memory: float | None, engine: str | None) -> Ends:
    """Print a line for each stage and engine; exit with 1 if a stage that runs fits with none."""
    from moe_runtime.config import check_positive
    from moe_runtime.tools import memory_plan as plans

    check_positive("gpus", gpus)
    limit = float("inf") if gpu_memory is None else gpu_memory * 1e9
    rows = []
    code = 0
    typer.echo(plans.HEADER)
    for name, stage in planner.stages.items():
        fits_somewhere = False
        for one in planner.engines_for(name, engine, gpus):
            share = planner.share(name, one, gpus)
            fits = share.total + plans.RESERVED <= limit
            fits_somewhere |= fits
            notes = "  DOES NOT FIT" * (not fits) + "  (a baseline)" * (not stage.runs)
            typer.echo(plans.as_text(name, one, share) + notes)
            row = {"stage": name, "engine": one, "gpus": gpus, "fits": fits, "runs": stage.runs}
            rows.append(row | share._asdict() | {"total": share.total})
        if stage.runs and not fits_somewhere:
            code = 1
    return Ends(rows, code)


@verb(app, "--check")
def doctor(
    check: Annotated[
        bool,
        option("Also run every op on every backend that works here against float64.", "--check"),
    ] = False,
    interpret: Annotated[
        bool, option("Check Triton's kernels in its interpreter, without a GPU.", "--interpret")
    ] = False,
    verbose: Annotated[
        bool, option("Print all packages and paths, and why each op has its backend.", "--verbose")
    ] = False,
) -> Any:
    """Print versions, devices and backends, and what to fix.

    If there are problems, exit with 1. With --check, also compare each op's outputs and gradients
    on small and unusual shapes with float64.
    """
    from moe_runtime.tools import doctor as diagnosis

    report = diagnosis.report()
    shown = report if verbose else diagnosis.summary(report)
    for title, rows in shown.items():
        typer.echo(title)
        for name, value in rows.items():
            typer.echo(f"  {name:22s}{value}")
        if not rows:
            typer.echo("  none")
    if (check or interpret) and "all" not in report["devices"]:  # torch can be imported
        from moe_runtime.tools import check as checks

        report["check"] = checks.report(interpret=interpret)
    return Ends(report, 1 if report["problems"] or report.get("check", {}).get("failures") else 0)


@verb(app, "--model llama-1b-moe", resumes=True, drop=("--overwrite",))
def tune(
    shape: Annotated[
        str | None, option("A published model's layer, such as mixtral-8x7b, several, or all.")
    ] = None,
    model: Annotated[
        Path | None, option("Instead of --shape: folder of an MoE model, or of its config.json.")
    ] = None,
    tokens: Annotated[str, option("Tokens per forward pass, comma-separated.")] = "4096,16384",
    dtype: Annotated[
        str, option("bfloat16, float16, float32, or several of them.", words=DTYPES)
    ] = "bfloat16",
    out: Annotated[
        Path | None, option("File to write (default: the one that the kernels read).")
    ] = None,
    overwrite: Annotated[bool, option("Repeat measurements that the file already has.")] = False,
    seconds: Annotated[float | None, option("Time after which no new measurement starts.")] = None,
) -> Any:
    """Measure the kernels' launch configs on this GPU.

    For all processes that start later. Rerun to resume.
    """
    from moe_runtime.config import check_choice
    from moe_runtime.io.files import check_out_file
    from moe_runtime.tools import tune as tuning
    from moe_runtime.tools.layer_shapes import find_layers

    if (shape is None) == (model is None):
        raise ValueError("Pass either --shape or --model")
    if shape is not None:
        layers = find_layers(shape)
    else:  # requires transformers, which a GPU machine may lack
        from moe_runtime.hf.models.folders import read_layer

        layers = {model.name: read_layer(model)}
    counts = numbers(tokens)
    dtypes = [part.strip() for part in dtype.split(",")]
    for part in dtypes:
        check_choice("dtype", part, tuning.DTYPES)
    path = out or tuning.tiles.tuned_path()
    if out is not None:
        check_out_file(out, overwrite=True, reads=[model])
    states = {}
    try:
        with console.bar("measuring", "config") as update:
            for step in tuning.tune(
                layers,
                counts,
                dtypes,
                path,
                again=overwrite,
                seconds=seconds,
            ):
                update(step.number, step.of)
                states[step.state] = states.get(step.state, 0) + 1
                typer.echo(f"[{step.number}/{step.of}] {step}", err=step.state == "failed")
    except tuning.ContextLost as lost:
        typer.echo(f"error: {lost}", err=True)
        return Ends({"path": path, **states}, 3)
    typer.echo(f"{path}: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    if set(states) == {"failed"}:
        raise ValueError(
            "No config could be measured, not even the built-in ones. Check the GPU with "
            "moe-runtime doctor"
        )
    return {"path": path, **states}


@verb(app, "--only layer,step", resumes=True)
def bench(
    only: Annotated[
        str | None, option(f"{', '.join(KINDS)}; or names: merging, xft, ...", words=KINDS)
    ] = None,
    tiny: Annotated[
        bool, option("Run each once on tiny shapes, as a smoke test.", "--tiny")
    ] = False,
    rounds: Annotated[
        int, option("Rounds per benchmark, at most; each round runs all variants in turn.")
    ] = 15,
    seconds: Annotated[float, option("Seconds of timing per benchmark, on a GPU.")] = 3.0,
    out: Annotated[
        Path | None, option("The .json file or its folder; bench/results or bench-results.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, option("Only compare two results files.", metavar="A B")
    ] = None,
    overwrite: Annotated[
        bool, option("Repeat measurements that the file already has.", "--overwrite")
    ] = False,
) -> Any:
    """Benchmark this machine.

    Our backends, transformers' implementations and other installed packages.

    All variants run in turn, round after round, in one process. Reports medians, peak memory, and
    the share of the machine's measured peak; prints tables, writes JSON and pictures. Rerun to
    resume. --compare exits with 1 if ours became slower.
    """
    if compare is not None:
        from moe_runtime.bench import compare as comparing

        compared = comparing.compare(*compare)
        typer.echo(comparing.text(compared))
        return Ends(comparing.as_json(compared), 1 if compared.regressions else 0)
    if rounds < 1 or not 0 < seconds < float("inf"):
        raise ValueError(
            f"rounds must be at least 1 and seconds positive, but got rounds {rounds} and seconds "
            f"{seconds}"
        )
    require("pytest", "bench")
    require("pytest_benchmark", "bench")
    from moe_runtime.bench import running

    paths = running.files(only)
    options = ["--rounds", str(rounds), "--seconds", str(seconds)]
    if tiny:
        options.append("--tiny")
    if tiny and out is None:  # the numbers are meaningless, so they are not added to results
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            outcome = _measure(paths, Path(folder) / "tiny.json", options)
            return _report(outcome, [], is_kept=False)
    target = running.place(out, tiny)
    running.check(
        target.with_suffix(".jsonl"),
        target,
        tiny,
        rounds,
    )
    running.resume(target.with_suffix(".jsonl"), target, overwrite)
    outcome = _measure(paths, target, options)
    pictures = []
    if outcome.path and find_spec("matplotlib") is None:
        typer.echo(
            "No plots were written: matplotlib is not installed. Run pip install "
            "'moe-runtime[bench]'",
            err=True,
        )
    elif outcome.path:
        from moe_runtime.bench.pictures import write_pictures

        pictures = write_pictures(outcome.path)
    return _report(outcome, pictures, is_kept=True)


def _measure(paths: list[Path], target: Path, options: list[str]):
    """Run the benchmarks missing from the records next to `target`, write `target`, and print its
    tables.
    """
    from moe_runtime.bench import report, running

    lines = target.with_suffix(".jsonl")
    with console.bar("benchmarks", "benchmark") as update:
        running.run(paths, lines, options, update)
    outcome = running.gather(lines, target)
    if outcome.path:
        typer.echo(report.text([outcome.path]))
    return outcome


def _report(outcome, pictures: list[Path], is_kept: bool) -> Ends:
    """Print what was skipped and written, and return it for --json."""
    from moe_runtime.bench.records import benchmarks

    for state in ("skipped", "failed"):
        for name, why in getattr(outcome, state).items():
            typer.echo(f"{state}: {name}: {why}", err=True)
    if is_kept and outcome.path:
        typer.echo("wrote " + ", ".join(map(str, (outcome.path, *pictures))))
    if outcome.failed and is_kept:
        typer.echo(f"{len(outcome.failed)} failed; rerun to try them again", err=True)
    value = {
        "path": outcome.path if is_kept else None,
        "pictures": pictures,
        "failed": outcome.failed,
        "skipped": outcome.skipped,
        "benchmarks": benchmarks(outcome.path) if outcome.path else [],
    }
    return Ends(value, 1 if outcome.failed else 0)
