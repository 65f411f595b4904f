"""XFT end to end on real text, in minutes on two cores: what `moe-runtime demo` and `make demo` run.

    standard library's source -> tokenizer, base model -> SFT, and XFT: upcycle -> tune -> learn mixing -> merge -> dense

The stages are those of `study`, the settings recipes/demo.yaml. SFT takes as many steps as tuning the MoE model and learning
to mix take together, on the same batches in the same order; the merged model has SFT's size and speed. Losses are means over
the label tokens of functions from files that nothing was trained on.
"""

import json
import math
import os
import textwrap
import time
from pathlib import Path

import torch

from moe_runtime.config import check_choice
from moe_runtime.experiments import plots
from moe_runtime.experiments.corpora import standard_library_pairs
from moe_runtime.experiments.stages import Result, remove
from moe_runtime.hf.dropin.stats import RouterStats, collect_router_stats
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.fit import complete
from moe_runtime.io.console import print_table
from moe_runtime.io.files import atomic_folder, check_out_dir
from moe_runtime.io.rows import require
from moe_runtime.methods.xft.recipe import load_recipe
from moe_runtime.methods.xft.study import Stages

PRESETS = {"small": "demo", "tiny": "demo-tiny"}  # -> the recipe
ROUTED = 64  # held-out rows that the picture of the routers is made of


def run(preset: str, out: str | Path, seed: int = 0, overwrite: bool = False) -> list[dict]:
    """Run the demo and write its models, results.json and xft.png to the folder `out`; return the table's rows."""
    check_choice("preset", preset, tuple(PRESETS))
    out = check_out_dir(out, overwrite)
    require("matplotlib", "plot")  # now, not after minutes of training
    start = time.perf_counter()

    def say(text: str) -> None:
        if ": to " not in text:  # where a stage is made: not there any more at the end
            print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    recipe = load_recipe(PRESETS[preset])
    with atomic_folder(out, overwrite) as folder:
        stages = Stages(recipe, folder / "stages", seed=seed, say=say)
        base, sft, moe = stages.base(), stages.sft(), stages.moe()
        init, merged = stages.merge(moe), stages.mix(moe)
        notes = {
            "base": "pre-trained on source text",
            "SFT": "the dense model, tuned",
            "MoE": f"XFT: {recipe.experts['num_experts']} experts, {recipe.experts['top_k']} per token, tuned",
            "merged INIT": f"lambda {recipe.shared_rate}, mixing not trained",
            "merged": f"lambda {recipe.shared_rate}, mixing learned: the result",
        }
        found = dict(zip(notes, (base, sft, moe, init, merged), strict=True))
        rows = [_row(name, found[name], note) for name, note in notes.items()]
        stats = _routed(stages, moe)
        results = {
            "recipe": recipe.to_dict(), "seed": seed, "rows": rows, "upcycled_error": moe.upcycled_error, "alpha": merged.alpha,
            "expert_slots": stats.counts.tolist(),
            "held_out_curves": {name: found[name].history for name in ("base", "SFT", "MoE")} | {"mixing": merged.history},
            "torch": torch.__version__,
        }  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        plots.save(_picture(results, stats), folder / "xft.png")
        transcript = _transcript(stages, merged)
        for name, model in (("base", base), ("sft", sft), ("moe", moe), ("merged", merged)):
            os.rename(model.folder, folder / name)
        remove(stages.out)
    _show(results, out)
    print(transcript)
    return rows


def _row(name: str, result: Result, note: str) -> dict:
    """Return a model's line of the table."""
    return {
        "model": name, "loss": result.loss, "parameters": result.parameters, "active": result.active_parameters,
        "seconds": result.total_seconds, "note": note, "perplexity": math.exp(result.loss),
    }  # fmt: skip


def _routed(stages: Stages, moe: Result) -> RouterStats:
    """Count which experts held-out rows go to."""
    model = ranks.load_model(moe.folder, stages.recipe.dtype, ranks.state().device)
    rows = stages.held_out.select(range(min(ROUTED, len(stages.held_out))))
    return collect_router_stats(model, ({"input_ids": torch.tensor([ids], device=model.device)} for ids in rows["input_ids"]))


def _picture(results: dict, stats: RouterStats):
    """Draw held-out losses, router load and learned mixing."""
    figure = require("matplotlib.figure", "plot").Figure(figsize=(15, 4.2), layout="constrained")
    losses, load, mixing = figure.subplots(1, 3)
    for name in ("SFT", "MoE"):
        points = [(0, results["rows"][0]["loss"]), *results["held_out_curves"][name]]
        losses.plot(*zip(*points, strict=True), marker="o", label=name)
    for row, style in zip(results["rows"][3:], (":", "--"), strict=True):
        losses.axhline(row["loss"], linestyle=style, color="black", label=row["model"])
    losses.set(xlabel="step", ylabel="held-out loss", title="held-out loss (lower is better)")
    losses.legend()
    stats.heatmap(load)
    normal = [row[1:] for row in results["alpha"]]
    image = mixing.imshow(normal, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=mixing, label="alpha")
    mixing.set_xticks(range(len(normal[0])), range(1, len(normal[0]) + 1))
    mixing.set_yticks(range(len(normal)))
    rate = results["recipe"]["shared_rate"]
    mixing.set(xlabel="expert", ylabel="layer", title=f"learned mixing of the normal experts (shared: {rate})")
    return figure


def _show(results: dict, out: Path) -> None:
    """Print the table and what it says."""
    columns = ("model", "left"), ("loss", "right"), ("perplexity", "right"), ("parameters", "right")
    columns += ("per token", "right"), ("train s", "right"), ("", "left")
    rows = [
        (
            row["model"], f"{row['loss']:.4f}", f"{row['perplexity']:.2f}", f"{row['parameters']:,}", f"{row['active']:,}",
            f"{row['seconds']:.0f}", row["note"],
        )
        for row in results["rows"]
    ]  # fmt: skip
    print_table("held-out functions of the standard library", columns, rows)
    print(verdict(results))
    print(
        f"The mixture kept the base's function when it was made: relative error {results['upcycled_error']:.1e}.\n"
        f"dense model: {out / 'merged'}   AutoModelForCausalLM.from_pretrained({str(out / 'merged')!r}) loads it\n"
        f"picture: {out / 'xft.png'}   numbers: {out / 'results.json'}"
    )


def verdict(results: dict) -> str:
    """Say in sentences what XFT gained or lost here, against the SFT that the table shows and against the best one."""
    losses = {row["model"]: row["loss"] for row in results["rows"]}
    sft, merged = losses["SFT"], losses["merged"]
    gain = sft - merged
    gained = f"lower than SFT's by {gain:.4f}" if gain > 0 else f"higher than SFT's by {-gain:.4f}: XFT did not pay here"
    text = f"The merged model has the size and the speed of SFT's, and a held-out loss that is {gained}."
    step, best = min(results["held_out_curves"]["SFT"], key=lambda point: point[1])
    if best < min(sft, merged):
        text += (
            f"\nSFT was best at step {step}, with {best:.4f}: from there on both learn their rows by heart, and the average "
            "of the experts takes part of that back."
        )
    return text


def _transcript(stages: Stages, merged: Result) -> str:
    """Have the merged model complete the first held-out prompt that leaves it room."""
    tokenizer = stages.tokenizer
    prompts = (row["prompt"] for row in standard_library_pairs().held_out)
    prompt = next(one for one in prompts if len(tokenizer(one).input_ids) < stages.recipe.data.max_length)
    text = complete(ranks.load_model(merged.folder, stages.recipe.dtype, ranks.state().device), tokenizer, prompt)
    prompt, text = (textwrap.indent(one.strip(), "    ", lambda line: True) for one in (prompt, text))
    return f"\nIt was asked:\n{prompt}\nand wrote:\n{text}"
