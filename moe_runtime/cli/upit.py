"""moe-runtime upit: checkpoints to experts to one mixture, step by step on folders; and the UpIT paper's tables."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime import config
from moe_runtime.cli import upit_tables
from moe_runtime.cli.tables import prepare
from moe_runtime.cli.verbs import GoesOn, Seed, ShardSize, Whole, choices, mount, verb
from moe_runtime.io import console
from moe_runtime.io.prompts import PROMPTS

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="UpIT: checkpoints of a tuning become the experts of a mixture; and the paper's tables and figures.",
    epilog="Example: moe-runtime upit main --seeds 3",
)

Experts = Annotated[
    list[Path],
    typer.Argument(help="Experts' folders: models, deltas or LoRA adapters, of one base.", show_default=False),
]
Base = Annotated[
    Path | None,
    typer.Option(help="Folder of the dense model that all were tuned from, where it is needed.", show_default=False),
]
Target = Annotated[Path, typer.Option(help="Folder to write.", show_default=False)]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")]
Buckets = Annotated[
    str,
    typer.Option(
        help="Rows of an expert: skilled (by perplexity) or random.", autocompletion=choices("skilled", "random")
    ),
]
Counted = Annotated[
    str,
    typer.Option(help="Tokens that perplexity counts: response or all.", autocompletion=choices("response", "all")),
]
Prompt = Annotated[
    str,
    typer.Option(help="How prompts are put: plain, magicoder, chat or deepseek.", autocompletion=choices(*PROMPTS)),
]


@verb(app, example="moe-runtime upit choose runs/sft/experts --count 4")
def choose(
    folder: Annotated[
        Path, typer.Argument(help="Where a tuning saved its experts, or its checkpoints.", show_default=False)
    ],
    count: Annotated[int, typer.Option(help="How many become experts.")] = 4,
    which: Annotated[
        str,
        typer.Option(
            help="back (the last ones), front or uniform.", autocompletion=choices("back", "front", "uniform")
        ),
    ] = "back",
):
    """Print which checkpoints become experts, a folder per line."""
    from moe_runtime.methods.upit import choose_checkpoints

    found = choose_checkpoints(folder, count, which)
    for path in found:
        typer.echo(path)
    return {"checkpoints": found}


@verb(
    app,
    example="moe-runtime upit grow step-100 step-200 --count 8 --base llama --out grown",
    kept=GoesOn(drop=("--overwrite",)),
)
def grow(
    experts: Experts,
    out: Target,
    base: Annotated[Path, typer.Option(help="Folder of the dense model that all were tuned from.", show_default=False)],
    count: Annotated[int, typer.Option(help="Experts in the end, the given ones counted.")] = 8,
    metric: Annotated[
        str, typer.Option(help="How experts are compared: cosine or l2.", autocompletion=choices("cosine", "l2"))
    ] = "cosine",
    of: Annotated[
        str,
        typer.Option(
            help="What is compared: delta (what training added) or weight.", autocompletion=choices("delta", "weight")
        ),
    ] = "delta",
    parents: Annotated[
        str, typer.Option(help="farthest, the paper's way, or random.", autocompletion=choices("farthest", "random"))
    ] = "farthest",
    drop: Annotated[float, typer.Option(help="DARE's share of changes that are dropped.")] = 0.5,
    seed: Seed = 0,
    overwrite: Replace = False,
):
    """Make more experts: each is a weighted, mutated mixture of the two that differ most. A killed run goes on."""
    from moe_runtime.methods.upit import expand_experts

    with console.bar("growing", "B") as update:
        found = expand_experts(
            experts, count, out, base=base, metric=metric, of=of, parents=parents, drop=drop, seed=seed,
            overwrite=overwrite, progress=update,
        )  # fmt: skip
    for child in found.children:
        (i, j), (a, b) = child.parents, child.weights
        typer.echo(f"{child.folder}: {a:.3f} of expert {i}, {b:.3f} of expert {j}; their distance {child.distance:.4f}")
    typer.echo(
        "next: moe-runtime upit init-routers " + " ".join(map(str, found.experts)) + " --data rows.jsonl --out routers"
    )
    return found


@verb(app, example="moe-runtime upit init-routers step-100 step-200 --data rows.jsonl --out routers", kept=GoesOn())
def init_routers(
    experts: Experts,
    data: Annotated[
        str, typer.Option(help="The rows that were tuned on: jsonl, parquet or a dataset's id.", show_default=False)
    ],
    out: Target,
    base: Base = None,
    share: Annotated[float, typer.Option(help="Of the rows, drawn as seed data.")] = 0.01,
    at_least: Annotated[int, typer.Option(help="Rows of seed data, where the share is less.")] = 500,
    capacity: Annotated[
        int | None, typer.Option(help="Rows of an expert, at most; all get as many unless given.", show_default=False)
    ] = None,
    buckets: Buckets = "skilled",
    tokens: Counted = "response",
    alpha: Annotated[float, typer.Option(help="Weight of the language model's loss against the router's.")] = 0.5,
    epochs: Annotated[float, typer.Option(help="Over each expert's rows.")] = 4.0,
    learning_rate: Annotated[
        float | None, typer.Option(help="Constant; 2e-5 unless given, with LoRA 2e-4.", show_default=False)
    ] = None,
    vector_std: Annotated[
        float | None, typer.Option(help="Of the vectors before training; 0 unless given.", show_default=False)
    ] = None,
    vector_learning_rate: Annotated[
        float | None, typer.Option(help="Of the vectors; the learning rate unless given.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of an optimizer step.")] = 128,
    per_device_batch_size: Annotated[
        int | None, typer.Option(help="Rows at once; all of a step unless given.", show_default=False)
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 under autocast.")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="Save memory.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a row, at most.")] = 2048,
    prompt: Prompt = "plain",
    seed: Seed = 0,
):  # fmt: skip
    """Give each expert the rows that it is best at, and tune it and its routing vectors on them. A killed run goes on."""
    prepare(None, None)
    from moe_runtime.methods.upit.folders import route_folders

    done = route_folders(
        experts, data, out, base=base, share=share, at_least=at_least, capacity=capacity, tokens=tokens, buckets=buckets,
        alpha=alpha, max_length=max_length, prompt=prompt, seed=seed, epochs=epochs, learning_rate=learning_rate,
        vector_std=vector_std, vector_learning_rate=vector_learning_rate, batch_size=batch_size,
        per_device_batch_size=per_device_batch_size, bf16=bf16, gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip
    if not console.is_main():
        return None
    for i, (rows, before, after) in enumerate(zip(done.buckets, done.before, done.after, strict=True)):
        typer.echo(f"expert {i}: {rows} rows, mean sigmoid of its vectors {before:.3f} -> {after:.3f}")
    typer.echo(f"next: moe-runtime upit assemble --routers {done.path} --out moe")
    return done


@verb(app, example="moe-runtime upit assemble --routers routers --out moe", kept=Whole("out"))
def assemble(
    experts: Annotated[
        list[Path] | None, typer.Argument(help="Experts' folders, for a random router.", show_default=False)
    ] = None,
    out: Target = ...,
    routers: Annotated[
        Path | None, typer.Option(help="What init-routers wrote: experts and vectors.", show_default=False)
    ] = None,
    base: Base = None,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    gate: Annotated[
        str,
        typer.Option(
            help="softmax_topk_renorm (Mixtral's), topk_softmax, softmax_topk or sigmoid_topk.",
            autocompletion=choices(*(gate for gate in config.GATES if gate not in config.SHARED_GATES)),
        ),
    ] = "softmax_topk_renorm",
    balance_loss: Annotated[
        str, typer.Option(help="switch, cv2 or none.", autocompletion=choices(*config.BALANCE_LOSSES))
    ] = "switch",
    balance_loss_coef: Annotated[float, typer.Option(help="Weight of the balance loss.")] = 0.01,
    backbone: Annotated[
        str,
        typer.Option(
            help="All but the experts: their mean, or the base's (mean, base).", autocompletion=choices("mean", "base")
        ),
    ] = "mean",
    seed: Seed = 42,
    overwrite: Replace = False,
):
    """Put experts side by side behind a router made of their routing vectors: a model to tune as any other."""
    from moe_runtime.methods.upit.folders import assemble_folders

    with console.bar("assembling", "B") as update:
        done = assemble_folders(
            experts or (), out, routers=routers, base=base, top_k=top_k, gate=gate, balance_loss=balance_loss,
            balance_loss_coef=balance_loss_coef, backbone=backbone, seed=seed, overwrite=overwrite, progress=update,
        )  # fmt: skip
    typer.echo(f"wrote {done.path}: {done.config.num_experts} experts, {done.bytes / 1e6:,.1f} MB")
    typer.echo(f"next: moe-runtime train --model {done.path} --data rows.jsonl --output_dir tuned")
    return done


@verb(app, example="moe-runtime upit export-mixtral tuned mixtral", kept=Whole("target"))
def export_mixtral(
    source: Annotated[Path, typer.Argument(help="Folder of a mixture.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)],
    max_shard_size: ShardSize = "2GB",
    overwrite: Replace = False,
):
    """Write a mixture as a stock Mixtral model, which runs without this package."""
    from moe_runtime.methods.upit import export_mixtral as export

    with console.bar("writing", "B") as update:
        done = export(source, target, max_shard_size=max_shard_size, overwrite=overwrite, progress=update)
    typer.echo(f"wrote {done.path}: {done.tensors} tensors, {done.bytes / 1e6:,.1f} MB")
    return done


mount(upit_tables.app, app)
