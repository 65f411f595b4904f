"""`python -m papers demo-real`: tune a real pretrained model by XFT and by SFT, and evaluate its
answers.

OUT/smollm2                  SmolLM2-135M-Instruct from its wheel, unless another model is given
OUT/tasks-HASH               the examples, a file for each task and part
                             (papers.engine.everyday)
OUT/<stage>-HASH             base, SFT, MoE model, merges: the stages of papers.xft.study
OUT/eval                     every held-out question, its answer and verdict
                             (papers.evaluation.evaluate)
OUT/base, SFT, SFT_time, MoE,   links to the models
INIT, merged
OUT/results.json, real.png, transcript.md

There are two SFT baselines: one with as many steps as tuning the MoE model and learning to mix
together, and one with as many as take the same time on this machine. Finished stages are kept, so
rerunning the command resumes a killed run.
"""

import json
import operator
import statistics
import tempfile
import time
from pathlib import Path

import torch

from moe_runtime.config import one_line
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.io.console import jsonable, print_table
from moe_runtime.io.files import (
    atomic_write_json,
    atomic_write_text,
    files_print,
    hash_of,
    read_json,
)
from moe_runtime.io.rows import in_form, layout_of, require
from moe_runtime.methods import xft
from papers.engine import plots
from papers.engine.compare import compare
from papers.engine.corpora import SplitRows
from papers.engine.everyday import TASKS, write_tasks
from papers.engine.stages import StageResult, link
from papers.engine.tables import columns_of
from papers.evaluation.evaluate import EvaluationReport, evaluate
from papers.evaluation.evaluate_models import find_models, tokenizer_of
from papers.evaluation.evaluate_tasks import find_tasks, hub_rows
from papers.evaluation.smollm2 import check_smollm2, write_smollm2
from papers.xft.recipe import Recipe, load_recipe
from papers.xft.study import XftStages

GSM8K = "openai/gsm8k"
TOKENS = {"gsm8k": 160} | dict.fromkeys(TASKS, 64)  # maximum length of an answer
ASKED_AT_ONCE = 32
MEASURED = 4
NOTES = {
    "base": "as it was pretrained",
    "SFT": "equal steps",
    "SFT_time": "equal time",
    "MoE": "XFT, before the merge",
    "INIT": "merged, mixing not learned",
    "merged": "merged, mixing learned: XFT's result",
}


def run(
    out: str | Path,
    *,
    model: str | Path | None = None,
    gsm8k: str | None = None,
    recipe: str | Path = "smollm2",
    seed: int = 0,
) -> dict:
    """Tune a pretrained model by XFT and by SFT on four tasks, evaluate them on held-out examples,
    and write results to `out`.

    `model` is a folder with tokenizer and chat template, by default SmolLM2-135M-Instruct; `gsm8k`
    a file or Hub id of GSM8K, as a fifth task. `recipe` sets experts and steps. Everything is
    checked before anything is written.
    """
    require("lm_eval", "eval")
    require("matplotlib", "plot")
    require("datasets")
    require("accelerate")
    out = Path(out)
    settings = load_recipe(recipe)
    if out.exists() and not out.is_dir():
        raise ValueError(f"Output folder {out} is a file. Choose another")
    if model is None:
        check_smollm2()
    else:
        tokenizer_of(find_models([str(model)])[0], "chat")
    names = tuple(TASKS)
    train = (settings.data.limit or 320) // len(TASKS)
    held_out = settings.data.held_out_rows // len(TASKS)
    more = {}
    if gsm8k:
        names += ("gsm8k",)
        more["gsm8k"] = _school(gsm8k, train, held_out)

    if model is None and not (out / "smollm2").is_dir():
        write_smollm2(out / "smollm2", dtype="float32")
    tasks = out / f"tasks-{hash_of([train, held_out, seed, gsm8k and files_print(gsm8k)])}"
    if not tasks.is_dir():
        write_tasks(
            tasks,
            train=train,
            held_out=held_out,
            seed=seed,
            more=more,
        )
    settings = _placed(
        settings,
        model or out / "smollm2",
        tasks,
        len(names),
    )
    stages = XftStages(settings, out, seed=seed)
    clock = out / f"measured-{hash_of(settings.to_dict())}.json"
    if not clock.is_file():
        stages.say(f"measuring some steps of each training on this machine ({_machine(settings)})")
        atomic_write_json(clock, _measured(stages))
    measured = read_json(clock)
    xft_seconds = settings.tune.steps * measured["tune"] + settings.mix.steps * measured["mix"]
    longer = max(round(xft_seconds / measured["sft"]), settings.sft.steps)
    stages.say(
        f"{settings.base_model}: {len(stages.train_rows)} examples of {', '.join(names)}; about "
        f"{_minutes(stages, measured, longer):.0f} minutes in total on an idle machine. It can be "
        f"interrupted: the same command resumes from the finished stages in {out}"
    )
    base = stages.base()
    sft = stages.sft()
    moe = stages.moe()
    init = stages.merge(moe)
    merged = stages.mix(moe)
    merged = merged._replace(steps=moe.steps + merged.steps)
    models = dict(
        zip(
            NOTES,
            (base, sft, stages.sft(longer), moe, init, merged),
            strict=True,
        )
    )
    for name, one in models.items():
        link(out / name, one.folder)
    report = evaluate(
        [f"{name}={one.folder}" for name, one in models.items() if name != "INIT"],
        ",".join(f"{name}={tasks / f'{name}-held_out.jsonl'}" for name in names),
        out / "eval",
        reference="SFT",
        prompt="chat",
        batch_size=ASKED_AT_ONCE,
        dtype="bfloat16" if settings.tune.bf16 else "auto",
        shots=0,
        max_new_tokens=max(map(TOKENS.get, names)),
    )
    results = _results(stages, models, report, measured)
    atomic_write_json(out / "results.json", jsonable(results))
    plots.save(_picture(results), out / "real.png")
    text = transcript(out / "eval", tasks, names)
    atomic_write_text(out / "transcript.md", text)
    print(text)
    _show(results, out)
    return results


def _school(source: str, train: int, held_out: int) -> SplitRows:
    """Return training and held-out rows of GSM8K; raises ValueError for a file with too few rows or
    other columns.
    """
    if source == GSM8K:
        rows = list(hub_rows(GSM8K, "main", "train")())
    else:
        rows = find_tasks(f"gsm8k={source}")[0].rows
    if len(rows) < train + held_out:
        raise ValueError(
            f"{source} must have at least {train + held_out} examples, but has {len(rows)}"
        )
    rows = [in_form(row, layout_of(row), source) for row in rows[: train + held_out]]
    return SplitRows(rows[held_out:], rows[:held_out])


def _placed(recipe: Recipe, model: Path, tasks: Path, count: int) -> Recipe:
    """Return the recipe for these folders, with bfloat16 autocast if this machine multiplies faster
    in it.
    """
    if torch.cuda.is_available():
        is_quick = torch.cuda.is_bf16_supported()
    else:
        is_quick = torch.cpu.get_capabilities().get("amx_bf16", False)
    share = count / len(TASKS)
    return recipe.change(
        base_model=str(model),
        data__train=str(tasks / "train.jsonl"),
        data__held_out=str(tasks / "held_out.jsonl"),
        data__limit=round((recipe.data.limit or 320) * share),
        data__held_out_rows=round(recipe.data.held_out_rows * share),
        sft__bf16=recipe.sft.bf16 or is_quick,
        tune__bf16=recipe.tune.bf16 or is_quick,
        mix__bf16=recipe.mix.bf16 or is_quick,
    )


def _machine(recipe: Recipe) -> str:
    where = f"{torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    return f"{where}, {'bfloat16' if recipe.tune.bf16 else 'float32'}"


def _measured(stages: XftStages) -> dict[str, float]:
    """Return the seconds per step of each training, and the tokens per second that dense and MoE
    models generate.
    """
    recipe = stages.recipe
    measured = {}
    for name in ("sft", "tune", "mix"):
        model = ranks.load_model(
            recipe.base_model,
            recipe.dtype,
            ranks.state().device,
        )
        if name == "sft":
            measured["dense tokens/s"] = _speed(model, stages)
        else:
            xft.upcycle(
                model,
                layers=recipe.layers,
                **recipe.experts,
            )
        if name == "tune":
            measured["MoE tokens/s"] = _speed(model, stages)
        elif name == "mix":
            xft.to_mergeable(model, shared_rate=recipe.shared_rate)
        ends = []
        settings = getattr(recipe, name).change(
            epochs=None,
            steps=MEASURED,
            warmup_steps=None,
            save_steps=None,
            evaluations=[1],
        )
        with tempfile.TemporaryDirectory() as folder:
            trainers.train(
                model,
                stages.train_rows,
                stages.tokenizer,
                folder=folder,
                held_out=stages.held_out.select([0]),
                on_step=lambda *_, ends=ends: ends.append(time.perf_counter()),
                **settings.to_dict(),
            )
        seconds = map(operator.sub, ends[1:], ends)
        measured[name] = statistics.median(seconds)
        del model
        ranks.free_memory()
    return measured


@torch.no_grad()
def _speed(model, stages: XftStages, tokens: int = 16) -> float:
    """Return the tokens per second of a model that answers ASKED_AT_ONCE questions at a time, as in
    evaluation.
    """
    dtype = model.dtype
    model.eval()
    if stages.recipe.tune.bf16:
        model.to(torch.bfloat16)
    rows = stages.held_out["input_ids"][:ASKED_AT_ONCE]
    ids = torch.tensor([row[: min(map(len, rows))] for row in rows], device=model.device)
    for new in (2, tokens):  # the first call warms up
        start = time.perf_counter()
        answers = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
        )
        answers.tolist()  # waits for a GPU
    seconds = time.perf_counter() - start
    model.to(dtype).train()
    return len(rows) * tokens / seconds


def _minutes(stages: XftStages, measured: dict[str, float], longer: int) -> float:
    """Return the estimated minutes of the whole run."""
    recipe = stages.recipe
    rows = len(stages.held_out)
    trained = (recipe.sft.steps + longer) * measured["sft"]
    trained += recipe.tune.steps * measured["tune"] + recipe.mix.steps * measured["mix"]
    evaluated = 10 * measured["sft"] / 3 * rows / recipe.sft.batch_size
    answered = 32 * rows * (4 / measured["dense tokens/s"] + 1 / measured["MoE tokens/s"])
    return (1.1 * trained + evaluated + answered) / 60 + 1


def _results(
    stages: XftStages,
    models: dict[str, StageResult],
    report: EvaluationReport,
    measured: dict[str, float],
) -> dict:
    tasks = dict.fromkeys(one.task for one in report.scores)  # None: not asked
    rows = {}
    for name, one in models.items():
        rows[name] = {
            "model": name,
            "note": NOTES[name],
            "loss": one.loss,
            "steps": one.steps,
            "seconds": one.total_seconds,
            "parameters": one.parameters,
            "active": one.active_parameters,
            "tokens_per_second": measured["dense tokens/s"],
            "exact_match": dict(tasks),
            "interval": dict(tasks),
        }
    rows["MoE"]["tokens_per_second"] = measured["MoE tokens/s"]
    for score in reversed(report.scores):  # of two scores of a task the strict one is the first
        rows[score.model]["exact_match"][score.task] = score.score
        rows[score.model]["interval"][score.task] = [score.low, score.high]
    losses = {name: [one.losses] for name, one in models.items() if name != "base"}
    merged = models["merged"]
    return {
        "recipe": stages.recipe.to_dict(),
        "seed": stages.seed,
        "machine": _machine(stages.recipe),
        "torch": torch.__version__,
        "measured": measured,
        "rows": [*rows.values()],
        "comparisons": [one._asdict() for one in report.comparisons],
        "loss_comparisons": [*map(str, compare(losses, "merged", merged.tokens))],
        "alpha": merged.alpha,
        "upcycled_error": models["MoE"].upcycled_error,
        "curves": {name: one.history for name, one in models.items()},
    }


def transcript(folder: Path, tasks: Path, names: tuple[str, ...], count: int = 5) -> str:
    """Return `count` held-out questions, from each task in turn, with the base's and the merged
    model's answers.
    """
    told = []
    for name in names:
        files = (
            tasks / f"{name}-held_out.jsonl",
            folder / "base" / f"{name}.jsonl",
            folder / "merged" / f"{name}.jsonl",
        )
        lines = [path.read_text(encoding="utf-8").splitlines()[:count] for path in files]
        for number, three in enumerate(zip(*lines, strict=False)):
            told.append((number, name, *map(json.loads, three)))
    parts = ["# Before and after"]
    for _, name, row, before, after in sorted(told, key=lambda one: one[0])[:count]:
        verdict = "right"
        if not after["exact_match"]:
            verdict = f"expected: {one_line(row['completion'], 200)}"
        question = row["prompt"].replace("\n", "\n    ")
        parts.append(
            f"## {name}\n\n    {question}\n"
            f"\n* before: {one_line(before['answer'], 300)}"
            f"\n* after: {one_line(after['answer'], 300)} ({verdict})"
        )
    return "\n\n".join(parts) + "\n"


def _picture(results: dict):
    """Draw the held-out losses, those on the way, and each model's exact match by task."""
    rows = results["rows"]
    parameters = f"{rows[0]['parameters'] / 1e6:.0f} M parameters"
    title = f"{parameters}, tuned by SFT and by XFT, seed {results['seed']}"
    figure, axes = plots.new_figure(title, (10.5, 7.8), mosaic="AB;CC")
    colours = dict(zip(NOTES, plots.COLOURS, strict=False))
    losses = []
    labels = []
    exact_match = {}
    intervals = {}
    for row in rows:
        name = row["model"]
        losses.append((name, row["loss"], colours[name]))
        labels.append(f"{name}\n{row['note'].partition(':')[0]}")
        if None not in row["exact_match"].values():
            exact_match[name] = [*row["exact_match"].values()]
            intervals[name] = [*row["interval"].values()]
    a, b, c = axes["A"], axes["B"], axes["C"]
    plots.losses(a, losses, "merged")
    a.set_yticks(
        range(len(rows)),
        labels,
        fontsize=9,
    )
    a.set(xlabel="loss per token of the answers (lower is better)", title="held-out examples")
    for (name, points), marker in zip(
        results["curves"].items(),
        plots.MARKERS,
        strict=False,
    ):
        if points:
            start, loss = 0, rows[0]["loss"]
            if name == "merged":
                start, loss = results["curves"]["MoE"][-1][0], rows[-2]["loss"]
            steps, values = zip((0, loss), *points, strict=True)
            steps = [start + step for step in steps]
            b.plot(
                steps,
                values,
                marker=marker,
                color=colours[name],
                label=name,
            )
    b.set(
        xlabel="step",
        ylabel="loss per token, logarithmic",
        yscale="log",
        title="held-out examples while tuning",
    )
    low, high = b.get_ylim()
    ticks = [tick / 10 for tick in range(1, 100) if low <= tick / 10 <= high]
    b.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    b.minorticks_off()
    b.legend(fontsize=9)
    b.grid()
    tasks = [*rows[0]["exact_match"]]
    plots.grouped(
        c,
        tasks,
        exact_match,
        intervals,
        form="{:.2f}",
        colours=colours,
    )
    c.set(ylabel="exact match", ylim=(0, 1.12), title="answers to held-out examples")
    plots.legend_below(figure, c, "lines: 95% interval over the problems", len(exact_match))
    return figure


def _show(results: dict, out: Path) -> None:
    """Print the table and the comparison of XFT with SFT."""
    rows = results["rows"]
    tasks = rows[0]["exact_match"]
    columns = columns_of("model", "loss", *tasks, "tokens/s", "steps", "train s")
    cells = []
    for row in rows:
        exact = ["" if share is None else f"{share:.2f}" for share in row["exact_match"].values()]
        speed = f"{row['tokens_per_second']:.0f}"
        costs = [speed, str(row["steps"]), f"{row['seconds']:.0f}"]
        cells.append(
            [
                row["model"],
                f"{row['loss']:.4f}",
                *exact,
                *costs,
                row["note"],
            ]
        )
    title = "Held-out loss of the answers, and exact match by task"
    print_table(
        title,
        [*columns, ("", "left")],
        cells,
    )
    print("held-out losses, " + "\n".join(results["loss_comparisons"]))
    for one in results["comparisons"]:
        if one["model"] == "merged":
            print(
                f"{one['task']}: merged solves {one['gained']} that SFT does not, SFT "
                f"{one['lost']} that merged does not (p {one['p_corrected']:.2g}, {one['test']}, "
                "corrected by Holm)"
            )
    print(
        f"dense model: {out / 'merged'}\n"
        f"picture: {out / 'real.png'}   numbers: {out / 'results.json'}   answers: {out / 'eval'}"
    )
