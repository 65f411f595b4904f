"""`python -m papers eval`: evaluate models on tasks, problem by problem, with significance tests of
their differences.

OUT/results.json             the settings, every score with its interval, every comparison
OUT/results.png              the scores
OUT/MODEL/TASK.jsonl         every problem: question, answer, verdict and its reason
OUT/MODEL/answers-HASH.jsonl the model's answers, written as they are generated: a rerun generates
only the missing ones

Two models are compared on the problems that only one of them solves, with McNemar's exact test
(binomial distribution), or with Wilcoxon's signed-rank test for scores of lm-eval that are not 0 or
1. Holm's correction covers all comparisons of the run, as in `papers.engine.compare`.
"""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.config import check_choice, check_positive, one_line
from moe_runtime.hf.training.ranks import free_memory
from moe_runtime.io import files
from moe_runtime.io.console import bar, jsonable, print_table
from moe_runtime.io.rows import require
from papers.engine.compare import LEVEL, VERDICTS, holm
from papers.engine.plots import grouped, legend_below, new_figure, save
from papers.evaluation.evaluate_models import Model, RecordedLM, find_models, load_lm, tokenizer_of
from papers.evaluation.evaluate_tasks import Asked, Choices, find_tasks
from papers.evaluation.run_code import Verdict

DTYPES = ("auto", "float32", "bfloat16", "float16")


class Score(NamedTuple):
    """A model's result on a task."""

    task: str
    model: str
    metric: str
    score: float
    low: float  # Wilson's interval at 1 - LEVEL; NaN if the values of the problems are not 0 or 1
    high: float
    problems: int
    truncated: int  # questions that were too long and truncated on the left
    cut: int  # answers that reached the largest number of tokens
    values: list[float]  # of each problem; empty if the metric has none


class TaskComparison(NamedTuple):
    """One model against the reference on one task."""

    task: str
    metric: str
    model: str
    reference: str
    gained: int  # problems on which the model is better than the reference
    lost: int
    test: str
    p: float
    p_corrected: float
    verdict: str  # higher, lower or no difference found


class EvaluationReport(NamedTuple):
    """The results that `evaluate` returns and writes."""

    settings: dict[str, Any]
    scores: list[Score]
    comparisons: list[TaskComparison]
    notes: list[str]

    def print(self) -> None:
        """Print a line for every task and model."""
        comparisons = {(one.task, one.metric, one.model): one for one in self.comparisons}
        columns = [
            ("task", "left"),
            ("model", "left"),
            ("metric", "left"),
            ("score", "right"),
            (f"{1 - LEVEL:.0%} interval", "right"),
            ("problems", "right"),
        ]
        if comparisons:
            reference = self.comparisons[0].reference
            columns += [(f"vs {reference}", "right"), ("p", "right"), ("verdict", "left")]
        rows = []
        for score in self.scores:
            interval = ""
            if not math.isnan(score.low):
                interval = f"{score.low:.3f} to {score.high:.3f}"
            row = [score.task, score.model, score.metric, f"{score.score:.3f}", interval]
            row.append(str(score.problems))
            one = comparisons.get((score.task, score.metric, score.model))
            if one is not None:
                row += [f"+{one.gained} -{one.lost}", f"{one.p_corrected:.2g}", one.verdict]
            rows.append(row)
        print_table("Scores", columns, rows)
        if comparisons:
            tests = " and ".join(sorted({one.test for one in self.comparisons}))
            print(
                f"+ and -: problems better and worse than the reference's; p: {tests}, corrected "
                f"by Holm for {len(comparisons)}."
            )
        for note in self.notes:
            print(f"note: {note}")


def evaluate(
    models: Sequence[str],
    tasks: str,
    out: str | Path,
    *,
    reference: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    prompt: str = "plain",
    batch_size: int = 16,
    dtype: str = "auto",
    max_new_tokens: int | None = None,
    code_seconds: int = 10,
) -> EvaluationReport:
    """Evaluate models (see `find_models`) on tasks (see `find_tasks`) and write the results to
    `out`.

    All models, tasks and settings are checked first. Decoding is greedy, on the first `limit`
    problems of each task. `prompt` is one of prompts.PROMPTS: "plain" continues a question as text,
    as in tuning with "plain"; the others use a chat template. Fused models always use their
    specialists' templates. The first `shots` problems of a task are shown with their answers and
    not asked; by default none, but gsm8k shows examples of its own. Rerun an interrupted evaluation
    to resume it.
    """
    for name, value in {"batch_size": batch_size, "code_seconds": code_seconds}.items():
        check_positive(name, value)
    for name, value in {"limit": limit, "max_new_tokens": max_new_tokens}.items():
        if value is not None:
            check_positive(name, value)
    if shots is not None and shots < 0:
        raise ValueError(f"shots must be at least 0, but got {shots}")
    check_choice("dtype", dtype, DTYPES)
    known = find_models(models)
    requested = find_tasks(tasks)
    reference = known[0].name if reference is None else reference
    check_choice(
        "reference",
        reference,
        tuple(model.name for model in known),
    )
    require("lm_eval", "eval")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    choices = Choices(shots=shots, max_new_tokens=max_new_tokens, code_seconds=code_seconds)
    for one in requested:
        one.build(choices)
    tokenizers = [tokenizer_of(model, prompt) for model in known]
    out = Path(out)
    scores = []
    out.mkdir(parents=True, exist_ok=True)
    with files.locked(out, wait=False) as free:
        if free is False:
            raise ValueError(f"Another evaluation is writing to {out}. Choose another folder")
        for model, tokenizer in zip(known, tokenizers, strict=True):
            is_chat = prompt != "plain" or model.kind == "fused"
            (out / model.name).mkdir(exist_ok=True)
            answers = out / model.name / f"answers-{model.print()}-{dtype}.jsonl"
            lm = RecordedLM(
                model,
                tokenizer,
                prompt,
                answers,
                lambda m=model, t=tokenizer: load_lm(m, t, dtype, batch_size),
            )
            for one in requested:
                scores += _scores(
                    lm,
                    one,
                    choices._replace(chat=is_chat),
                    limit,
                    out / model.name,
                )
            del lm
            free_memory()
    settings = {
        "prompt": prompt,
        "limit": limit,
        "shots": shots,
        "batch_size": batch_size,
        "dtype": dtype,
    }
    settings |= {
        "max_new_tokens": max_new_tokens,
        "models": {m.name: [m.base, m.folder] for m in known},
        "tasks": tasks,
    }
    order = list(dict.fromkeys((score.task, score.metric) for score in scores))
    scores.sort(key=lambda score: order.index((score.task, score.metric)))
    report = EvaluationReport(
        settings,
        scores,
        _compared(scores, reference),
        _notes(known, tokenizers, scores, reference),
    )
    files.atomic_write_json(out / "results.json", jsonable(report))
    return report


def _scores(
    lm: RecordedLM, requested: Asked, choices: Choices, limit: int | None, folder: Path
) -> list[Score]:
    """Run a task or a group of tasks, and write each problem's verdict to `folder`."""
    evaluator = require("lm_eval.evaluator", "eval")
    built = requested.build(choices)
    lm.is_rendered = requested.task is not None or choices.chat
    lm.truncated = 0
    lm.cut = 0
    # lm-eval's progress bar counts the preparation of requests and reaches 100% before the model
    # starts
    require("lm_eval.api.task", "eval").tqdm = lambda rows, **_: rows
    with bar(f"{lm.model.name}, {requested.name}", "request") as lm.progress:
        try:
            output = evaluator.evaluate(
                lm,
                {"tasks": built, "groups": {}},
                limit=limit,
                bootstrap_iters=0,
                apply_chat_template=lm.is_rendered,
                fewshot_as_multiturn=lm.is_rendered,
            )
        except (ValueError, OSError, MemoryError, RuntimeError):
            raise
        except Exception as error:  # the templates and metrics of a YAML file may raise anything
            raise ValueError(
                f"Task {requested.name!r} failed: {type(error).__name__}: {one_line(error, 400)}"
            ) from error
    scores = []
    for name, samples in output["samples"].items():
        metric = samples[0]["metrics"][0]
        by_filter: dict[str, list[dict]] = {}
        for sample in samples:
            by_filter.setdefault(sample["filter"], []).append(sample)
        problems = []
        for one in samples:
            if one["filter"] == samples[0]["filter"]:
                problems.append(_problem(one, metric, requested.task is not None))
        for filter_name, of_filter in by_filter.items():
            label = metric if len(by_filter) == 1 else f"{metric}, {filter_name}"
            values = [one[metric] for one in of_filter]
            if len(by_filter) > 1:
                for problem, sample in zip(problems, of_filter, strict=True):
                    problem[label] = sample[metric]
                    problem[f"found, {filter_name}"] = sample["filtered_resps"][0]
            score = float(output["results"][name][f"{metric},{filter_name}"])
            scores.append(_score(name, lm, label, score, values))
        lines = [json.dumps(jsonable(problem), ensure_ascii=False) for problem in problems]
        files.atomic_write_text(folder / f"{name}.jsonl", "\n".join(lines) + "\n")
    return scores


def _score(task: str, lm: RecordedLM, metric: str, score: float, values: list) -> Score:
    """Return a score with its interval, if the values of the problems are 0 or 1."""
    problems = len(values)
    if not all(isinstance(value, bool | int | float) for value in values):
        values = []  # a perplexity's parts, a set's F1
    low = high = math.nan
    if values and set(values) <= {0, 1}:
        low, high = (
            require("scipy.stats")
            .binomtest(int(sum(values)), problems)
            .proportion_ci(1 - LEVEL, "wilson")
        )
    counts = problems, lm.truncated, lm.cut
    return Score(
        task,
        lm.model.name,
        metric,
        score,
        float(low),
        float(high),
        *counts,
        [float(value) for value in values],
    )


def _problem(sample: dict, metric: str, is_ours: bool) -> dict:
    """Return the record of a problem."""
    given = [one[0] for one in sample["resps"]]
    if len(given) == 1:
        given = given[0]
    record = {"id": sample["doc_id"], metric: sample[metric]}
    if is_ours:
        record["id"] = sample["doc"].get("id", sample["doc_id"])
    verdict = sample["filtered_resps"][0]
    if isinstance(verdict, Verdict):
        record["reason"] = verdict.reason
    record["asked"] = sample["arguments"][0][0]
    return record | {"answer": given, "expected": sample["target"]}


def _compared(scores: Sequence[Score], reference: str) -> list[TaskComparison]:
    of_reference = {}
    for score in scores:
        if score.model == reference:
            of_reference[score.task, score.metric] = score
    comparisons = []
    for score in scores:
        other = of_reference[score.task, score.metric]
        if score is not other and score.values and len(score.values) == len(other.values):
            comparisons.append(_difference(score, other))
    corrected = holm([one.p for one in comparisons])
    for i, q in enumerate(corrected):
        comparisons[i] = comparisons[i]._replace(p_corrected=q)
        if q > LEVEL:
            comparisons[i] = comparisons[i]._replace(verdict=VERDICTS[2])
    return comparisons


def _difference(score: Score, other: Score) -> TaskComparison:
    """Compare two models on a task; p and the verdict are not corrected yet."""
    stats = require("scipy.stats")
    moved = [a - b for a, b in zip(score.values, other.values, strict=True) if a != b]
    gained = sum(difference > 0 for difference in moved)
    is_binary = {*score.values, *other.values} <= {0, 1}
    test = "Wilcoxon's test"
    if is_binary:
        test = "McNemar's exact test"
    p = 1.0
    if moved and is_binary:
        p = float(stats.binomtest(gained, len(moved)).pvalue)
    elif moved:
        p = float(stats.wilcoxon(moved).pvalue)
    lower, higher, verdict, _ = VERDICTS
    total = sum(moved)
    if total > 0:
        verdict = higher
    elif total < 0:
        verdict = lower
    return TaskComparison(
        task=score.task,
        metric=score.metric,
        model=score.model,
        reference=other.model,
        gained=gained,
        lost=len(moved) - gained,
        test=test,
        p=p,
        p_corrected=p,
        verdict=verdict,
    )


def _notes(
    models: Sequence[Model], tokenizers: Sequence, scores: Sequence[Score], reference: str
) -> list[str]:
    notes = []
    vocabularies = {}
    for model, tokenizer in zip(models, tokenizers, strict=True):
        vocabularies[model.name] = tokenizer.get_vocab()
    expected = vocabularies[reference]
    others = [name for name, words in vocabularies.items() if words != expected]
    if others:
        notes.append(
            f"{', '.join(others)} and {reference} have different tokenizers, so they are compared "
            "by problems, not tokens"
        )
    truncated: dict[str, None] = {}
    cut: dict[str, None] = {}
    for s in scores:
        if s.truncated:
            truncated[f"{s.model} on {s.task} ({s.truncated})"] = None
        if s.cut:
            cut[f"{s.model} on {s.task} ({s.cut} of {s.problems})"] = None
    if truncated:
        listed = ", ".join(truncated)
        notes.append(f"questions longer than the context, truncated on the left: {listed}")
    if cut:
        notes.append(f"answers that reached --max-new-tokens and may be cut off: {', '.join(cut)}")
    return notes


def picture(report: EvaluationReport, path: Path) -> None:
    """Plot the scores with their intervals, one group of bars for each task."""
    tasks: dict[str, None] = {}
    scores: dict[str, list[float]] = {}
    spans: dict[str, list] = {}
    for score in report.scores:
        tasks[f"{score.task}\n{score.metric}"] = None
        scores.setdefault(score.model, []).append(score.score)
        span = None
        if not math.isnan(score.low):
            span = (score.low, score.high)
        spans.setdefault(score.model, []).append(span)
    width = max(6.0, 2.0 + (0.5 + 0.36 * len(scores)) * len(tasks))
    figure, axes = new_figure("", (width, 4.8))
    grouped(
        axes,
        list(tasks),
        scores,
        spans,
        form="{:.2f}",
    )
    axes.set_ylabel("score")
    legend_below(
        figure,
        axes,
        f"lines: {1 - LEVEL:.0%} interval over the problems",
        4,
    )
    save(figure, path)
