"""moe-runtime esft: score experts, select some, train only those, merge the adapter."""

import warnings  # noqa: I001
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.verbs import (
    DTYPES,
    Bf16,
    Checkpointing,
    Data,
    MaxLength,
    Overwrite,
    Prompt,
    Seed,
    ShardSize,
    Source,
    Target,
    TrainOn,
    HUB,
    argument,
    group,
    one_gpu,
    option,
    verb,
    with_bar,
)
from moe_runtime.io import console
from moe_runtime.io.files import check_out_file
from moe_runtime.io.rows import require

ESFT = "ESFT: tune and ship only the experts that a task uses."
app = group("esft", ESFT, "score olmoe --data law.jsonl --out law/summary.json")
VARIANTS = ("v1", "paper", "normalized", "head")
Adapter = Annotated[Path, argument("Folder or Hub id of the adapter."), HUB]
Pack = Annotated[bool, option("Pack short examples into samples of --max-length tokens.")]
Variant = Annotated[
    str | None, option("Scores: v1 (the default), paper, normalized or head.", words=VARIANTS)
]
ForwardBatch = Annotated[int, option("Samples per forward pass.")]
AnyWeights = Annotated[
    bool, option("Accept a base that the adapter was not trained on.", "--any-weights")
]


@verb(app, "olmoe --data law.jsonl --out law/summary.json")
def score(
    model: Source,
    data: Data,
    out: Annotated[Path, option("The summary to write, a .json file.")],
    tokens: Annotated[int, option("Tokens to score, at most.")] = 131072,
    variant: Variant = None,
    max_length: MaxLength = 4096,
    pack: Pack = True,
    batch_size: ForwardBatch = 1,
    prompt: Prompt = "plain",
    seed: Annotated[int, option("Seed of the samples' order.")] = 5934875,
    overwrite: Overwrite = False,
) -> Any:
    """Measure how much a task uses each expert.

    Gate and token scores, from the model's routers.
    """
    check_out_file(out, overwrite, [model, data])
    require("datasets")
    from moe_runtime.methods.esft.runs import score_folder

    with console.bar("scoring", "token") as update:
        scores = score_folder(
            model,
            data,
            out,
            n_tokens=tokens,
            variant=variant or "v1",
            max_length=max_length,
            packed=pack,
            batch_size=batch_size,
            prompt=prompt,
            seed=seed,
            progress=update,
        )
    if console.is_main():
        typer.echo(
            f"{scores.n_tokens:,} tokens, {len(scores.layers)} layers of {scores.num_experts} "
            "experts"
        )
        typer.echo(f"wrote {out}")
        typer.echo(
            f"next: moe-runtime esft select --summary {out} --score gate --p 0.1 --out config.json"
        )
    return {
        "tokens": scores.n_tokens,
        "layers": len(scores.layers),
        "experts": scores.num_experts,
        "files": [out],
    }


@verb(app, "--summary law/summary.json --score gate --p 0.1 --out law/config.json")
def select(
    summary: Annotated[Path, option("A summary written by score or by the official code.")],
    out: Annotated[Path, option("The configuration to write, a .json file.")],
    p: Annotated[
        float | None,
        option("Sum of the scores of a layer's selected experts; 0.1 for gate, 0.2 for token."),
    ] = None,
    experts: Annotated[
        int | None, option("Instead of --p: the number of experts of each layer.")
    ] = None,
    score: Annotated[str, option("gate or token.", words="gate token")] = "gate",
    variant: Variant = None,
    round: Annotated[
        int | None, option("Digits to round the scores to; the official code uses 4.")
    ] = None,
    shared_experts: Annotated[
        bool, option("Train the shared experts too.", "--shared-experts")
    ] = False,
    non_expert_modules: Annotated[
        bool, option("Train all other modules too.", "--non-expert-modules")
    ] = False,
    skip_unused: Annotated[
        bool, option("Never select an expert with a score of 0.", "--skip-unused")
    ] = False,
    overwrite: Overwrite = False,
) -> Any:
    """Select the experts to train by their scores.

    The fewest of each layer whose scores sum to p, or a number of them; needs no model.
    """
    check_out_file(out, overwrite, [summary])
    if (p is None) == (experts is None):
        raise ValueError(
            "Pass either --p, 0.1 for example, or --experts with a number of experts per layer"
        )
    from moe_runtime.methods.esft.scores import ExpertScores
    from moe_runtime.methods.esft.selection import select_experts

    scores = ExpertScores.load(summary)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        selection = select_experts(
            scores,
            p,
            score,
            variant,
            experts_per_layer=experts,
            shared_experts=shared_experts,
            non_expert_modules=non_expert_modules,
            round=round,
            skip_unused=skip_unused,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    selection.save(out)
    sums = scores.scores(score, variant, round).sum(1).tolist()
    typer.echo(f"scores of a layer sum to {min(sums):.3f} to {max(sums):.3f}")
    for warning in caught:
        typer.echo(f"warning: {warning.message}", err=True)
    _say_selection(selection)
    typer.echo(f"wrote {out}")
    typer.echo(f"next: moe-runtime esft train MODEL --config {out} --data FILE --out adapter")
    return {"path": out, "selection": selection.to_dict()}


@verb(
    app,
    "olmoe --config law/config.json --data law.jsonl --out law/adapter",
    resumes=True,
    push="out",
)
def train(
    model: Source,
    config: Annotated[Path, option("The file written by select, or an official expert_cfg.json.")],
    data: Data,
    out: Annotated[Path, option("Folder of the adapter; must not exist.")],
    held_out: Annotated[
        str | None, option("Held-out examples (default: one in fifty of --data).")
    ] = None,
    steps: Annotated[int, option("Optimizer steps.")] = 500,
    learning_rate: Annotated[float, option("Constant learning rate of AdamW.")] = 1e-5,
    batch_size: Annotated[int, option("Samples per step, over all processes.")] = 32,
    per_device_batch_size: Annotated[int, option("Samples per forward pass of a process.")] = 1,
    weight_decay: Annotated[float, option("Weight decay of AdamW.")] = 0.1,
    max_length: MaxLength = 4096,
    pack: Pack = True,
    prompt: Prompt = "plain",
    train_on: TrainOn = "assistant",
    dtype: Annotated[
        str | None,
        option("Dtype of the trained parameters; at least float32 by default.", words=DTYPES),
    ] = None,
    bf16: Bf16 = False,
    gradient_checkpointing: Checkpointing = False,
    save_steps: Annotated[
        int, option("Steps between checkpoints, from which a rerun resumes; 0 for none.")
    ] = 100,
    shared_experts: Annotated[bool | None, option("Train the shared experts too.")] = None,
    non_expert_modules: Annotated[bool | None, option("Train all other modules too.")] = None,
    lora: Annotated[
        bool,
        option("Train LoRA of the selected experts; writes an adapter that PEFT reads.", "--lora"),
    ] = False,
    rank: Annotated[int, option("With --lora: rank of each expert's matrices.")] = 8,
    ranks: Annotated[
        Path | None,
        option('JSON file {"layer.expert": rank} of experts with another rank; implies --lora.'),
    ] = None,
    alpha: Annotated[float, option("With --lora: the scaling is alpha / the largest rank.")] = 16.0,
    ep_size: Annotated[
        int, option("Processes to shard each layer's experts over (expert parallelism).")
    ] = 1,
    any_weights: Annotated[
        bool, option("Accept a selection from a model with other weights.", "--any-weights")
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Any:
    """Train the selected experts and save them alone.

    Writes them as an adapter; rerun to resume after a crash.

    Keeps the weights of the lowest held-out loss. On several GPUs: accelerate launch -m moe_runtime
    esft train ...
    """
    one_gpu()
    require("datasets")
    pair = None
    if lora or ranks is not None:
        require("peft")
        pair = (rank, alpha)
    from moe_runtime.config import check_choice
    from moe_runtime.hf.training import fit
    from moe_runtime.methods.esft.runs import EsftTraining, train_folder

    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    training = EsftTraining.from_dict(
        {
            "steps": steps,
            "learning_rate": learning_rate,
            "batch_size": batch_size,
            "weight_decay": weight_decay,
            "bf16": bf16,
            "per_device_batch_size": per_device_batch_size,
            "gradient_checkpointing": gradient_checkpointing,
            "save_steps": save_steps or None,
            "ep_size": ep_size,
        }
    )
    fit.quiet()
    with console.bar("training") as on_step:
        receipt = train_folder(
            model,
            config,
            data,
            out,
            training,
            held_out=held_out,
            max_length=max_length,
            packed=pack,
            prompt=prompt,
            train_on=train_on,
            shared_experts=shared_experts,
            non_expert_modules=non_expert_modules,
            dtype=dtype,
            seed=seed,
            check_weights=not any_weights,
            overwrite=overwrite,
            on_step=on_step,
            lora=pair,
            lora_ranks=ranks,
        )
    if console.is_main():
        share = receipt.trained_parameters / receipt.total_parameters
        typer.echo(
            f"trained {receipt.trained_parameters:,} of {receipt.total_parameters:,} parameters "
            f"({share:.1%}), {receipt.steps} steps in {receipt.seconds:.0f} s, optimizer "
            f"{receipt.optimizer_bytes / 1e6:,.1f} MB"
        )
        typer.echo(f"held-out loss: {receipt.loss_before:.4f} -> {receipt.loss:.4f}")
        typer.echo(f"wrote {receipt.path}")
        typer.echo(f"next: moe-runtime esft merge {model} {out} tuned")
    return receipt


@verb(app, "olmoe law/adapter --data law-test.jsonl")
def apply(
    model: Source,
    adapter: Adapter,
    data: Annotated[
        str | None, option("Examples on which to compute the loss, without and with the adapter.")
    ] = None,
    limit: Annotated[int, option("Examples of --data, at most.")] = 256,
    max_length: MaxLength = 4096,
    batch_size: ForwardBatch = 1,
    prompt: Prompt = "plain",
    any_weights: AnyWeights = False,
) -> Any:
    """Show an adapter's contents and its effect.

    Says whether it fits a model; with --data, its effect on the loss. Writes nothing.
    """
    if data is not None:
        require("datasets")
    from moe_runtime.methods.esft.runs import check_folder

    result = check_folder(
        model,
        adapter,
        data,
        limit=limit,
        max_length=max_length,
        batch_size=batch_size,
        prompt=prompt,
        check_weights=not any_weights,
    )
    _say_selection(result.adapter.selection)
    typer.echo(
        f"{result.adapter.num_parameters:,} parameters, {result.adapter.nbytes / 1e6:,.1f} MB"
    )
    typer.echo(f"it fits {model}, and changes {result.tensors} of its tensors")
    if result.loss is not None:
        typer.echo(
            f"loss of {result.rows} examples: {result.base_loss:.4f} without, {result.loss:.4f} "
            "with it"
        )
    return {
        "selection": result.adapter.selection.to_dict(),
        "parameters": result.adapter.num_parameters,
        "bytes": result.adapter.nbytes,
        "tensors": result.tensors,
        "rows": result.rows,
        "base_loss": result.base_loss,
        "loss": result.loss,
    }


@verb(app, "olmoe law/adapter olmoe-law", push="out")
def merge(
    base: Source,
    adapter: Adapter,
    out: Target,
    max_shard_size: ShardSize = "2GB",
    any_weights: AnyWeights = False,
    overwrite: Overwrite = False,
) -> Any:
    """Write a copy of the base with the adapter's experts.

    Without holding the whole model in memory.
    """
    from moe_runtime.methods.esft.folders import merge_folder

    receipt = with_bar(
        "merging",
        merge_folder,
        base,
        adapter,
        out,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        check_weights=not any_weights,
    )
    typer.echo(
        f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB, "
        f"{receipt.changed} of them with the {receipt.experts} experts of {adapter}"
    )
    return receipt


def _say_selection(selection) -> None:
    """Print the number of experts in a selection, and what else it trains."""
    counts = [len(ids) for ids in selection.experts.values()]
    how = f"{sum(counts)} experts in {len(counts)} layers"
    if counts:
        how += f", {min(counts)} to {max(counts)} in a layer"
    if selection.shared_experts:
        how += ", shared experts"
    if selection.non_expert_modules:
        how += ", non-expert modules"
    typer.echo(how)
