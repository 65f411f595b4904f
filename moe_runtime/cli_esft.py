"""moe-runtime esft: score experts, select some, train those alone, and put the adapter into its base."""

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime import progress
from moe_runtime.cli_verbs import PROMPTS, GoesOn, Whole, choices, numbers, verb

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="ESFT: tune only the experts of a mixture that a task uses, ship those alone; and the paper's tables and figures.",
    epilog="Example: moe-runtime esft main --seeds 3",
)

Model = Annotated[Path, typer.Argument(help="Folder of the model, any mixture of experts.", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="Folder of the adapter.", show_default=False)]
Data = Annotated[
    str,
    typer.Option(
        help="jsonl, parquet or a dataset's id: messages, prompt and completion, or text.", show_default=False
    ),
]
MaxLength = Annotated[int, typer.Option(help="Tokens of a sample.")]
Pack = Annotated[bool, typer.Option("--pack/--no-pack", help="Join rows to samples of that length.")]
Prompt = Annotated[
    str,
    typer.Option(
        help="How prompts are put: plain, deepseek, chat (the tokenizer's) or magicoder.",
        autocompletion=choices(*PROMPTS),
    ),
]
Variant = Annotated[
    str | None,
    typer.Option(
        help="Of the scores: v1 unless given, paper, normalized or head.",
        autocompletion=choices("v1", "paper", "normalized", "head"),
    ),
]
AnyWeights = Annotated[
    bool, typer.Option("--any-weights", help="Take a base whose weights are not those that the adapter was trained on.")
]
TrainedDtype = Annotated[
    str | None,
    typer.Option(
        help="Of all that trains; the model's unless given, and float32 if that is bfloat16 or float16.",
        show_default=False,
        autocompletion=choices("float32", "bfloat16", "float16"),
    ),
]
TrainShared = Annotated[
    bool | None,
    typer.Option(
        "--shared-experts/--no-shared-experts", help="Train the shared experts too; as the file says unless given."
    ),
]
TrainOthers = Annotated[
    bool | None,
    typer.Option(
        "--non-expert-modules/--no-non-expert-modules",
        help="Train all that is no expert too; as the file says unless given.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")]


@verb(app, example="moe-runtime esft score olmoe --data law.jsonl --out law/summary.json", kept=Whole("out", "logs"))
def score(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The summary to write, a .json file.", show_default=False)],
    n_tokens: Annotated[int, typer.Option(help="Tokens to score, at most.")] = 131072,
    logs: Annotated[
        Path | None, typer.Option(help="A folder for the official logs too; must not exist.", show_default=False)
    ] = None,
    variant: Variant = None,
    max_length: MaxLength = 4096,
    pack: Pack = True,
    batch_size: Annotated[int, typer.Option(help="Samples of a forward pass.")] = 1,
    prompt: Prompt = "plain",
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Count pairs of experts too, for select --group-size.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the samples' order.")] = 5934875,
    overwrite: Overwrite = False,
):
    """Measure how much each expert of a model does for a task: gate and token scores, from its routers."""
    _check_free(out, overwrite)
    _require("datasets")
    from moe_runtime.methods.esft_runs import score_folder

    with progress.bar("scoring", "token") as update:
        scores = score_folder(
            model, data, out, logs=logs, n_tokens=n_tokens, variant=variant or "v1", max_length=max_length, packed=pack,
            batch_size=batch_size, prompt=prompt, pairs=pairs, seed=seed, progress=update,
        )  # fmt: skip
    if progress.is_main():
        typer.echo(f"{scores.n_tokens:,} tokens, {len(scores.layers)} layers of {scores.num_experts} experts")
        typer.echo(f"wrote {out}" + (f" and the logs in {logs}" if logs else ""))
        typer.echo(f"next: moe-runtime esft select --summary {out} --score gate --p 0.1 --out config.json")
    return {
        "tokens": scores.n_tokens,
        "layers": len(scores.layers),
        "experts": scores.num_experts,
        "files": [out, logs],
    }


@verb(
    app,
    example="moe-runtime esft select --summary law/summary.json --score gate --p 0.1 --out law/config.json",
    kept=Whole("out"),
)
def select(
    out: Annotated[Path, typer.Option(help="The configuration to write, a .json file.", show_default=False)],
    p: Annotated[float, typer.Option(help="What the scores of a layer's experts sum to; 0.1 for gate, 0.2 for token.")],
    summary: Annotated[
        Path | None, typer.Option(help="A summary that score or the official code wrote.", show_default=False)
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="In its place: a folder of official logs.", show_default=False)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Of the logs: experts per token, if not as they say.", show_default=False)
    ] = None,
    num_experts: Annotated[
        int | None, typer.Option(help="Of the logs: experts per layer, if not all were used.", show_default=False)
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Of the logs: the layers, such as 1,2,5-26; all unless given.", show_default=False),
    ] = None,
    score: Annotated[str, typer.Option(help="gate or token.", autocompletion=choices("gate", "token"))] = "gate",
    variant: Variant = None,
    round: Annotated[
        int | None, typer.Option(help="Digits to round the scores to; the official code takes 4.", show_default=False)
    ] = None,
    group_size: Annotated[int, typer.Option(help="Take experts by groups of this size, which pairs make.")] = 1,
    shared_experts: Annotated[bool, typer.Option("--shared-experts", help="Train the shared experts too.")] = False,
    non_expert_modules: Annotated[
        bool, typer.Option("--non-expert-modules", help="Train all that is no expert too.")
    ] = False,
    overwrite: Overwrite = False,
):
    """Take the fewest experts of each layer whose scores sum to p; needs no model."""
    _check_free(out, overwrite)
    if (summary is None) == (logs is None):
        given = [None if path is None else str(path) for path in (summary, logs)]
        raise ValueError(f"summary is {given[0]!r}, logs is {given[1]!r}; want one of the two")
    options = {"top_k": top_k, "num_experts": num_experts, "layers": layers}
    given = [name for name, value in options.items() if value is not None]
    if logs is None and given:
        raise ValueError(f"{given[0]} is {options[given[0]]!r}, logs is None; want it with --logs alone")
    from moe_runtime.methods.esft_scores import ExpertScores
    from moe_runtime.methods.esft_selection import select_experts

    if logs is None:
        scores = ExpertScores.load(summary)
    else:
        options |= {"layers": numbers(layers), "pairs": group_size > 1}
        scores = ExpertScores.from_logs(logs, variant or "v1", **options)
    selection = select_experts(
        scores, p, score, variant, shared_experts=shared_experts, non_expert_modules=non_expert_modules,
        group_size=group_size, round=round,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    selection.save(out)
    _say_sums(scores.scores(score, variant, round).sum(1).tolist(), p)
    _say_selection(selection)
    typer.echo(f"wrote {out}")
    typer.echo(f"next: moe-runtime esft train MODEL --config {out} --data FILE --out adapter")
    return {"path": out, "selection": selection.to_dict()}


@verb(
    app,
    example="moe-runtime esft train olmoe --config law/config.json --data law.jsonl --out law/adapter",
    kept=GoesOn(what="checkpoints are kept in {}-checkpoints", suffix="-checkpoints"),
)
def train(
    model: Model,
    config: Annotated[
        Path, typer.Option(help="What select wrote, or an official expert_cfg.json.", show_default=False)
    ],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder of the adapter; must not exist.", show_default=False)],
    held_out: Annotated[
        str | None,
        typer.Option(help="Rows to take the loss on; one in fifty of data unless given.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 500,
    learning_rate: Annotated[float, typer.Option(help="Constant learning rate of AdamW.")] = 1e-5,
    batch_size: Annotated[int, typer.Option(help="Samples of a step, over all processes.")] = 32,
    per_device_batch_size: Annotated[int, typer.Option(help="Samples that a process takes at once.")] = 1,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.1,
    max_length: MaxLength = 4096,
    pack: Pack = True,
    prompt: Prompt = "plain",
    dtype: TrainedDtype = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 (autocast).")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="Save activations.")] = False,
    save_steps: Annotated[int, typer.Option(help="A checkpoint every so many steps, to go on from; 0 for none.")] = 100,
    shared_experts: TrainShared = None,
    non_expert_modules: TrainOthers = None,
    seed: Annotated[int, typer.Option(help="Seed of the batches.")] = 0,
    overwrite: Overwrite = False,
):
    """Train the selected experts of a model and write them as an adapter; the same call goes on after a crash.

    The best weights by held-out loss are kept. On several GPUs: accelerate launch -m moe_runtime.cli esft train ...
    """
    if "LOCAL_RANK" not in os.environ:
        # one GPU is enough, and Trainer would spread a single process over all that it sees; before torch looks
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    _require("datasets")
    from dataclasses import replace

    from moe_runtime.config import check_choice
    from moe_runtime.hf import fit
    from moe_runtime.methods.esft_adapters import load_selection
    from moe_runtime.methods.esft_recipe import Tuning
    from moe_runtime.methods.esft_runs import train_folder
    from moe_runtime.methods.recipe import DTYPES

    if dtype is not None:
        check_choice("dtype", dtype, tuple(DTYPES))
    selection = load_selection(config)
    flags = {"shared_experts": shared_experts, "non_expert_modules": non_expert_modules}
    selection = replace(selection, **{name: flag for name, flag in flags.items() if flag is not None})
    training = Tuning(
        steps=steps, learning_rate=learning_rate, batch_size=batch_size, per_device_batch_size=per_device_batch_size,
        weight_decay=weight_decay, bf16=bf16, gradient_checkpointing=gradient_checkpointing, save_steps=save_steps or None,
    )  # fmt: skip
    fit.quiet()
    with progress.bar("training") as on_step:
        receipt = train_folder(
            model, selection, data, out, training, held_out=held_out, max_length=max_length, packed=pack, prompt=prompt,
            dtype=dtype, seed=seed, overwrite=overwrite, on_step=on_step,
        )  # fmt: skip
    if progress.is_main():
        _say_training(receipt)
        typer.echo(f"next: moe-runtime esft merge {model} {out} tuned")
    return receipt


@verb(app, example="moe-runtime esft apply olmoe law/adapter --data law-test.jsonl")
def apply(
    model: Model,
    adapter: Folder,
    data: Annotated[
        str | None, typer.Option(help="Rows to take the loss on, without the adapter and with it.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Rows of them, at most.")] = 256,
    max_length: MaxLength = 4096,
    batch_size: Annotated[int, typer.Option(help="Rows of a forward pass.")] = 1,
    prompt: Prompt = "plain",
    any_weights: AnyWeights = False,
):
    """Say what an adapter holds and whether it belongs to a model; with data, what it does to the loss. Writes nothing."""
    if data is not None:
        _require("datasets")
    from moe_runtime.methods.esft_runs import check_folder

    found = check_folder(
        model, adapter, data, limit=limit, max_length=max_length, batch_size=batch_size, prompt=prompt,
        check_weights=not any_weights,
    )  # fmt: skip
    _say_selection(found.adapter.selection)
    others = len(found.adapter.others)
    typer.echo(
        f"{found.adapter.num_parameters:,} parameters, {found.adapter.nbytes / 1e6:,.1f} MB"
        + (f", of them {others} tensors that are no experts'" if others else "")
    )
    typer.echo(f"it belongs to {model}, and changes {found.tensors} of its tensors")
    if found.loss is not None:
        typer.echo(f"loss of {found.rows} rows: {found.base_loss:.4f} without, {found.loss:.4f} with it")
    return {
        "selection": found.adapter.selection.to_dict(), "parameters": found.adapter.num_parameters,
        "bytes": found.adapter.nbytes, "tensors": found.tensors, "rows": found.rows, "base_loss": found.base_loss,
        "loss": found.loss,
    }  # fmt: skip


@verb(app, example="moe-runtime esft merge olmoe law/adapter olmoe-law", kept=Whole("out"))
def merge(
    base: Model,
    adapter: Folder,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)],
    max_shard_size: Annotated[str, typer.Option(help="Largest file of the target, such as 500MB or 2GB.")] = "2GB",
    any_weights: AnyWeights = False,
    overwrite: Overwrite = False,
):
    """Write the base with the adapter's experts in it, a folder like the base's; never holds the whole model."""
    from moe_runtime.methods.esft_folders import merge_folder

    with progress.bar("merging", "B") as update:
        receipt = merge_folder(
            base, adapter, out, max_shard_size=max_shard_size, overwrite=overwrite, check_weights=not any_weights,
            progress=update,
        )  # fmt: skip
    typer.echo(
        f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB, {receipt.changed} of them with the "
        f"{receipt.experts} experts of {adapter}; and {', '.join(receipt.side_files)}"
    )
    return receipt


def _require(module: str) -> None:
    from moe_runtime.data import require

    require(module)


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise ValueError if a file is there that should not be replaced."""
    if out.exists() and (out.is_dir() or not overwrite):
        raise ValueError(f"out is {out}, which exists; want a new file; or pass overwrite=True")


def _say_sums(sums: list[float], p: float) -> None:
    """Say what the scores of the layers sum to, and warn where p is more."""
    typer.echo(f"scores of a layer sum to {min(sums):.3f} to {max(sums):.3f}")
    beyond = sum(p > total + 1e-3 for total in sums)  # sums of scores that were rounded are off by little
    if beyond:
        typer.echo(
            f"warning: p is {p}, more than the scores of {beyond} of {len(sums)} layers sum to: all their experts that had a "
            "token are selected; p is a share only with --variant normalized",
            err=True,
        )


def _say_training(receipt) -> None:
    share = receipt.trained_parameters / receipt.total_parameters
    typer.echo(
        f"trained {receipt.trained_parameters:,} of {receipt.total_parameters:,} parameters ({share:.1%}), "
        f"{receipt.steps} steps in {receipt.seconds:.0f} s, optimizer {receipt.optimizer_bytes / 1e6:,.1f} MB"
    )
    typer.echo(f"held-out loss: {receipt.loss_before:.4f} -> {receipt.loss:.4f}")
    typer.echo(f"wrote {receipt.path}")


def _say_selection(selection) -> None:
    counts = [len(ids) for ids in selection.experts.values()]
    also = [flag.replace("_", " ") for flag in ("shared_experts", "non_expert_modules") if getattr(selection, flag)]
    how = f"{sum(counts)} experts in {len(counts)} layers"
    if counts:
        how += f", {min(counts)} to {max(counts)} in a layer, {sum(counts) / len(counts):.1f} on average"
    typer.echo(how + "".join(f", {name}" for name in also))
