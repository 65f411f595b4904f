"""`python -m papers demo-real`: the table `xft overfit` at one learning rate on a real pretrained
model, and the answers of its models.

OUT/smollm2           SmolLM2-135M-Instruct from its wheel, unless another model is given
OUT/<stage>-HASH      the stages of papers.xft.study
OUT/overfit.json, .png    the table
OUT/tasks             held-out examples of each task
OUT/eval              every held-out question, its answer and verdict (papers.evaluation.evaluate)
OUT/base, SFT, MoE, XFT    links to the models: SFT at its best step, XFT's merge with the lambda
                      that validation rows choose
OUT/transcript.md     some answers before and after

Finished stages are kept, so rerunning the command resumes a killed run.
"""

import json
from pathlib import Path

from moe_runtime.config import one_line
from moe_runtime.io.console import print_table
from moe_runtime.io.files import atomic_write_text
from moe_runtime.io.rows import require
from papers.engine.everyday import TASKS, write_tasks
from papers.engine.stages import link
from papers.engine.tables import columns_of
from papers.evaluation.evaluate import evaluate
from papers.evaluation.evaluate_models import find_models, tokenizer_of
from papers.evaluation.smollm2 import check_smollm2, write_smollm2
from papers.xft import tables
from papers.xft.recipe import load_recipe

ASKED = 16  # held-out examples of each task that are answered
NEW_TOKENS = 64  # maximum length of an answer


def run(
    out: str | Path,
    *,
    model: str | Path | None = None,
    recipe: str | Path = "smollm2",
    seed: int = 0,
) -> dict:
    """Tune a pretrained model by XFT and by SFT on four tasks, compare their losses and answers,
    and write results to `out`.

    `model` is a folder with tokenizer and chat template, by default SmolLM2-135M-Instruct. `recipe`
    sets experts and steps. Everything is checked before anything is written.
    """
    require("lm_eval", "eval")
    out = Path(out)
    settings = load_recipe(recipe)
    if out.exists() and not out.is_dir():
        raise ValueError(f"Output folder {out} is a file. Choose another")
    if model is None:
        check_smollm2()
    else:
        tokenizer_of(find_models([str(model)])[0], "chat")
    if model is None and not (out / "smollm2").is_dir():
        write_smollm2(out / "smollm2", dtype="float32")
    settings = settings.change(base_model=str(model or out / "smollm2"), seed=seed)
    rates = (0.25, 0.5, 0.85)
    report = tables.run("overfit", settings, out, seeds=1, factors=(1.0,), shared_rates=rates)
    print_table(report.title, report.columns(), report.rows(), width=400)
    print("\n".join((report.legend(), *report.summary)))
    models = {"base": "base"}
    for kind in (tables.SFT, tables.XFT):
        models[kind] = tables.by_validation(report, kind, report.extra["x"])
    moe = tables.by_validation(report, tables.MOE, report.extra["x"])
    for name, entry in (models | {tables.MOE: moe}).items():
        link(out / name, report.entry(entry).results[0].folder)
    if not (out / "tasks").is_dir():
        write_tasks(out / "tasks", train=ASKED, held_out=ASKED)
    answers = evaluate(
        [f"{name}={out / name}" for name in models],
        ",".join(f"{name}={out / 'tasks' / f'{name}-held_out.jsonl'}" for name in TASKS),
        out / "eval",
        reference=tables.SFT,
        prompt="chat",
        batch_size=2 * ASKED,
        dtype="bfloat16" if settings.tune.bf16 else "auto",
        shots=0,
        max_new_tokens=NEW_TOKENS,
    )
    text = transcript(out / "eval", out / "tasks")
    atomic_write_text(out / "transcript.md", text)
    print(text)
    rows = {name: {} for name in models}
    for score in reversed(answers.scores):  # of two scores of a task the strict one is the first
        rows[score.model][score.task] = score.score
    cells = []
    for name, exact in rows.items():
        cells.append((name, *(f"{exact[task]:.2f}" for task in TASKS), models[name]))
    title = f"Exact match of generated answers, {ASKED} of each task"
    print_table(title, [*columns_of("model", *TASKS), ("", "left")], cells)
    print(f"dense model: {out / tables.XFT}   all answers: {out / 'eval'}")
    return {"models": models, "exact_match": rows, "summary": report.summary}


def transcript(folder: Path, tasks: Path, count: int = 5) -> str:
    """Return `count` held-out questions, from each task in turn, with the base's and the merged
    model's answers.
    """
    told = []
    for name in TASKS:
        files = (
            tasks / f"{name}-held_out.jsonl",
            folder / "base" / f"{name}.jsonl",
            folder / tables.XFT / f"{name}.jsonl",
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
