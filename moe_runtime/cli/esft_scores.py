"""moe-runtime esft score and select: which experts a task uses, and which of them to train."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import Whole, choices, numbers, verb
from moe_runtime.io import console
from moe_runtime.io.prompts import PROMPTS

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Model = Annotated[Path, typer.Argument(help="Folder of the model, any mixture of experts.", show_default=False)]
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
    from moe_runtime.io.rows import require

    require("datasets")
    from moe_runtime.methods.esft.runs import score_folder

    with console.bar("scoring", "token") as update:
        scores = score_folder(
            model, data, out, logs=logs, n_tokens=n_tokens, variant=variant or "v1", max_length=max_length, packed=pack,
            batch_size=batch_size, prompt=prompt, pairs=pairs, seed=seed, overwrite=overwrite, progress=update,
        )  # fmt: skip
    if console.is_main():
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
    from moe_runtime.methods.esft.scores import ExpertScores
    from moe_runtime.methods.esft.selection import select_experts

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
    say_selection(selection)
    typer.echo(f"wrote {out}")
    typer.echo(f"next: moe-runtime esft train MODEL --config {out} --data FILE --out adapter")
    return {"path": out, "selection": selection.to_dict()}


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise ValueError if a file is there that should not be replaced."""
    if out.exists() and (out.is_dir() or not overwrite):
        raise ValueError(f"out is {out}, which exists; want a new file; or pass overwrite=True")
    if above := next((one for one in out.parents if one.exists() and not one.is_dir()), None):
        raise ValueError(f"out is {out}, below {above}, which is a file; want it in a folder")


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


def say_selection(selection) -> None:
    """Say how many experts a selection has, and what else."""
    counts = [len(ids) for ids in selection.experts.values()]
    also = [flag.replace("_", " ") for flag in ("shared_experts", "non_expert_modules") if getattr(selection, flag)]
    how = f"{sum(counts)} experts in {len(counts)} layers"
    if counts:
        how += f", {min(counts)} to {max(counts)} in a layer, {sum(counts) / len(counts):.1f} on average"
    typer.echo(how + "".join(f", {name}" for name in also))
