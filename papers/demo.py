"""XFT end to end on real text, in minutes on two cores: the code of `python -m papers demo`.

    standard library's source, documentation, sums -> tokenizer, base model
    few examples of each                           -> SFT, and XFT: upcycle -> tune -> learn mixing
                                                   -> merge -> dense

The stages are those of `study`, the settings recipes/demo.yaml. SFT runs at three learning rates,
each for as many steps as tuning the MoE model and learning to mix take together, and keeps its best
step by validation rows; XFT has one rate and keeps its last step. Losses are means over the label
tokens of examples used neither for training nor for selection.
"""

import itertools
import json
import math
import shutil
import textwrap
import time
from pathlib import Path

import torch

from moe_runtime.config import check_choice
from moe_runtime.hf.dropin.stats import RouterStats, collect_router_stats
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.fit import complete, each_row, pair_collator
from moe_runtime.io.console import print_table
from moe_runtime.io.files import atomic_folder, check_out_dir
from moe_runtime.io.rows import require, tokenize_pairs
from papers.engine import plots
from papers.engine.compare import compare
from papers.engine.corpora import domain_rows
from papers.engine.stages import StageResult
from papers.engine.tables import columns_of
from papers.xft.recipe import load_recipe
from papers.xft.study import XftStages

PRESETS = {"small": "demo", "tiny": "demo-tiny"}  # -> the recipe
RATES = (0.5, 1.0, 2.0)  # learning rates of the SFT baselines, as multiples of XFT's
ROUTED = 64  # held-out rows in the picture of the routers
# held-out sums to solve, and to print with answers
SUMS = 120
SHOWN = 3
# time per example, with the judging afterwards, relative to pre-training: SFT, tuning the MoE
# model, learning to mix
WORK = {"base": 1.0, "sft": 1.1, "moe": 2.1, "mix": 8.0}


class Clock:
    """Prints progress and an estimate of the time left, from the pace of the stages so far."""

    def __init__(self, recipe):
        self.start = time.perf_counter()
        steps = {
            "base": recipe.pretrain,
            "sft": recipe.sft,
            "moe": recipe.tune,
            "mix": recipe.mix,
        }
        self.work = {name: one.steps * one.batch_size * WORK[name] for name, one in steps.items()}
        self.left = []
        self.pace = None

    def say(self, text: str) -> None:
        """Print a line, except for a stage's lines about its folder and copied weights."""
        if ": to " not in text and not text.startswith("upcycled"):
            print(f"[{time.perf_counter() - self.start:4.0f} s] {text}", flush=True)

    def begin(self, what: str, kind: str, left: list[str]) -> None:
        """Announce a stage of the given kind; `left` lists the kinds of the stages after it."""
        about = ""
        if self.pace:
            about = (
                f" (about {max(self.pace * sum(self.work[one] for one in (kind, *left)), 1):.0f} s "
                "left in all)"
            )
        self.say(f"{what}{about}")

    def learn(self, kind: str, seconds: float) -> None:
        """Set the pace from the duration of a finished stage."""
        self.pace = seconds / self.work[kind]


def run(preset: str, out: str | Path, seed: int = 0, overwrite: bool = False) -> list[dict]:
    """Run the demo; write its models, results.json and xft.png to the folder `out`; return the
    table's rows.

    Finished stages are also kept in `<out>.stages`, from which another run resumes.
    """
    check_choice("preset", preset, tuple(PRESETS))
    out = check_out_dir(out, overwrite)
    require("matplotlib", "plot")  # now, not after minutes of training
    recipe = load_recipe(PRESETS[preset])
    clock = Clock(recipe)
    stages = XftStages(
        recipe,
        out.with_name(f"{out.name}.stages"),
        seed=seed,
        say=clock.say,
    )
    with atomic_folder(out, overwrite) as folder:
        made = _made(stages, clock)
        texts = domain_rows("sums").held_out[:SUMS]
        sums = tokenize_pairs(stages.tokenizer, texts, recipe.data.max_length)
        clock.say(f"solving {SUMS} sums with each model")
        rows = []
        for name, (result, note) in made.items():
            rows.append(
                _row(
                    name,
                    result,
                    note,
                    _solved(stages, result, sums),
                )
            )
        results = _results(stages, made, rows)
        stats = _routed(stages, made["MoE"][0])
        results["expert_slots"] = stats.counts.tolist()
        (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        plots.save(plots.watermark(_picture(results, stats), preset == "tiny"), folder / "xft.png")
        best = made[results["best_sft"]][0]
        models = {
            "base": made["base"][0],
            "sft": best,
            "moe": made["MoE"][0],
            "merged": made["merged"][0],
        }
        for name, result in models.items():
            shutil.copytree(result.folder, folder / name)
        answers = []
        for result in (made["base"][0], made["merged"][0]):
            answers.append(_answers(stages, result, texts[:SHOWN]))
    _show(results, out, clock, texts, answers)
    return rows


def _made(stages: XftStages, clock: Clock) -> dict[str, tuple[StageResult, str]]:
    """Make all models; return {name: (result, note)}."""
    recipe = stages.recipe
    rate = stages.recipe.tune.learning_rate
    count = recipe.experts["num_experts"]
    top = recipe.experts["top_k"]
    clock.say("reading Python's standard library")
    tuning = len(stages.train_rows)
    kinds = ["sft"] * len(RATES) + ["moe", "mix"]
    clock.begin("base: pre-training a small Llama on text", "base", kinds)
    made = {"base": (stages.base(), "pre-trained on text")}
    clock.learn("base", made["base"][0].seconds)
    for index, times in enumerate(RATES):
        name = f"SFT {times * rate:g}"
        clock.begin(
            f"{name}: tuning the dense model on {tuning} examples",
            "sft",
            kinds[index + 1 :],
        )
        made[name] = (
            stages.sft(learning_rate=times * rate),
            "dense, tuned; its best step by validation",
        )
    clock.begin(
        f"XFT: the base upcycled to {count} experts, {top} per token, and tuned on the same "
        "examples",
        "moe",
        ["mix"],
    )
    moe = stages.moe()
    made["MoE"] = moe, f"XFT: {count} experts, {top} per token, tuned"
    made["merged INIT"] = stages.merge(moe), f"lambda {recipe.shared_rate}, mixing not trained"
    clock.begin(
        "XFT: learning how to mix the experts, and merging them to one dense model", "mix", []
    )
    made["merged"] = stages.mix(moe), f"lambda {recipe.shared_rate}, mixing learned: XFT's result"
    return made


def _row(name: str, result: StageResult, note: str, solved: float) -> dict:
    """Return a model's row of the table."""
    return {
        "model": name,
        "loss": result.loss,
        "solved": solved,
        "parameters": result.parameters,
        "active": result.active_parameters,
        "seconds": result.total_seconds,
        "note": note,
        "perplexity": math.exp(result.loss),
    }


def _results(stages: XftStages, made: dict, rows: list[dict]) -> dict:
    """Return the contents of results.json: numbers, curves, and a comparison of the merged model
    with the best SFT.
    """
    curves = {name: result.history for name, (result, _) in made.items() if result.history}
    best = min(
        (name for name in made if name.startswith("SFT")),
        key=lambda name: min(loss for _, loss in curves[name]),
    )
    merged = made["merged"][0]
    moe = made["MoE"][0]
    losses = {name: [made[name][0].losses] for name in ("merged", best)}
    return {
        "recipe": stages.recipe.to_dict(),
        "seed": stages.seed,
        "rows": rows,
        "best_sft": best,
        "against_best_sft": str(compare(losses, best, merged.tokens)[0]),
        "upcycled_error": moe.upcycled_error,
        "alpha": merged.alpha,
        "validation_curves": curves,
        "torch": torch.__version__,
    }


def _loaded(stages: XftStages, result: StageResult):
    return ranks.load_model(
        result.folder,
        stages.recipe.dtype,
        ranks.state().device,
    )


def _solved(stages: XftStages, result: StageResult, sums) -> float:
    """Return the share of sums for which greedy decoding gets every token right."""

    def take(model, batch: dict) -> list[bool]:
        labels = batch.pop("labels")
        return all_right(model(**batch, use_cache=False).logits, labels)

    right = each_row(
        _loaded(stages, result),
        sums,
        take,
        collator=pair_collator(stages.tokenizer),
    )
    return sum(right) / len(right)


def all_right(logits: torch.Tensor, labels: torch.Tensor) -> list[bool]:
    """Return for each example whether argmax equals every label; `logits` [B, S, V], `labels` [B,
    S].
    """
    labels = labels[:, 1:]
    return ((logits[:, :-1].argmax(-1) == labels) | (labels == -100)).all(1).tolist()


def _answers(stages: XftStages, result: StageResult, rows: list[dict]) -> list[str]:
    """Return the first line of a model's completion of each prompt."""
    model = _loaded(stages, result)
    answers = []
    for row in rows:
        answer = complete(model, stages.tokenizer, row["prompt"])
        answers.append(answer.strip().partition("\n")[0])
    return answers


def _routed(stages: XftStages, moe: StageResult) -> RouterStats:
    """Count which experts held-out rows go to."""
    model = _loaded(stages, moe)
    rows = stages.held_out.select(range(min(ROUTED, len(stages.held_out))))
    return collect_router_stats(
        model,
        ({"input_ids": torch.tensor([ids], device=model.device)} for ids in rows["input_ids"]),
    )


def _picture(results: dict, stats: RouterStats):
    """Draw the table's losses and solved sums, validation losses during tuning, and the routers'
    load.
    """
    conclusion = results["against_best_sft"].partition(" (")[0]
    parameters = results["rows"][0]["parameters"]
    title = f"{conclusion}\na base of {parameters:,} parameters, seed {results['seed']}"
    figure, axes = plots.new_figure(title, (10.5, 7.4), mosaic="AB;CD")
    colours = dict(zip([row["model"] for row in results["rows"]], itertools.cycle(plots.COLOURS)))
    plots.losses(
        axes["A"],
        [(row["model"], row["loss"], colours[row["model"]]) for row in results["rows"]],
        "merged",
    )
    axes["A"].set(xlabel="loss per label token (lower is better)", title="held-out examples")
    for y, row in enumerate(results["rows"]):
        axes["B"].barh(
            y,
            row["solved"],
            color=colours[row["model"]],
            height=0.6,
        )
        axes["B"].text(
            row["solved"] + 0.01,
            y,
            f"{row['solved']:.0%}",
            va="center",
            fontsize=9,
        )
    axes["B"].set_yticks(range(len(colours)), colours)
    axes["B"].set(
        xlim=(0, 1.1),
        ylim=(len(colours) - 0.5, -0.5),
        xlabel="share solved, greedily",
        title="held-out sums",
    )
    axes["B"].xaxis.set_major_formatter("{x:.0%}")
    ways = dict(results["validation_curves"])
    start = 0
    ways.pop("base")
    for name, marker in zip(ways, plots.MARKERS):
        steps, values = zip(*ways[name], strict=True)
        start = ways["MoE"][-1][0] if name == "merged" else 0  # mixing is learned after tuning
        label = f"{name}, its mixing" if start else name
        axes["C"].plot(
            [step + start for step in steps],
            values,
            marker=marker,
            color=colours[name],
            label=label,
        )
    axes["C"].set(
        xlabel="step", ylabel="loss per label token", title="validation examples while tuning"
    )
    axes["C"].legend(
        fontsize=9,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=3,
        frameon=False,
    )
    axes["C"].grid()
    stats.heatmap(axes["D"])
    axes["D"].set_title("tokens of each routed expert over the mean")
    return figure


def _show(
    results: dict, out: Path, clock: Clock, texts: list[dict], answers: list[list[str]]
) -> None:
    """Print the table, its conclusions, sample answers, and next steps."""
    columns = columns_of("model", "loss", "sums solved", "parameters", "per token", "train s")
    rows = []
    for row in results["rows"]:
        rows.append(
            (
                row["model"],
                f"{row['loss']:.4f}",
                f"{row['solved']:.0%}",
                f"{row['parameters']:,}",
                f"{row['active']:,}",
                f"{row['seconds']:.0f}",
                row["note"],
            )
        )
    clock.say("done\n")
    print_table(
        "held-out functions, texts and sums",
        [*columns, ("", "left")],
        rows,
    )
    print(f"{results['against_best_sft']}.")
    print("\nHeld-out sums, as the base and as the merged model answer them:")
    for row, before, after in zip(texts, *answers, strict=False):
        print(textwrap.indent(row["prompt"].strip(), "  "))
        mark = "right" if after == row["completion"] else f"wrong: {row['completion']}"
        print(f"    base:   {before!r}\n    merged: {after!r}  ({mark})")
    print(
        "\n"
        f"models: {out}/base, sft (the best), moe, merged; "
        f"AutoModelForCausalLM.from_pretrained({str(out / 'merged')!r})\n"
        f"picture: {out / 'xft.png'}   numbers: {out / 'results.json'}   for another run: "
        f"{out}.stages\n"
        f"next: moe-runtime xft merge {out / 'moe'} other --shared-rate 0.5    another dense model "
        "of the same experts\n"
        "      python -m papers xft table1                       the paper's comparison, three "
        "seeds, with tests\n"
        "      python -m papers run mine.yaml                          the same on your model and "
        "data: docs/papers/recipes.md"
    )
