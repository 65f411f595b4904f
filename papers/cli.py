"""The commands of the laboratory: `python -m papers ...`.

They import lazily, so that --help is fast.
"""

import importlib
from pathlib import Path
from typing import Annotated

from moe_runtime.cli.verbs import Overwrite, RecipeSeed, Seed, argument, one_gpu, option
from papers import cli_evaluate as evaluate
from papers import cli_tables as tables
from papers.verbs import group, recipes, verb

app = group(
    "", "Experiments with the four papers' methods: recipes, tables, demos.", "demo --preset tiny"
)


@verb(app, "--preset tiny", resumes=True)
def demo(
    preset: Annotated[
        str, option("small (minutes on two cores) or tiny (seconds).", words="small tiny")
    ] = "small",
    out: Annotated[Path, option("Folder for the models, the table and the picture.")] = Path(
        "runs/demo"
    ),
    seed: Seed = 0,
    overwrite: Overwrite = False,
):
    """Run XFT end to end on real text.

    Pre-trains a small model, tunes it with SFT and with XFT, merges, compares.
    """
    one_gpu()
    from moe_runtime.io.files import read_json
    from papers.demo import run

    run(preset, out, seed=seed, overwrite=overwrite)
    return {"path": out} | read_json(out / "results.json")


@verb(app, "--out runs/demo-real", resumes=True)
def demo_real(
    out: Annotated[
        Path, option("Folder for the models and the results; a rerun resumes there.")
    ] = Path("runs/demo-real"),
    model: Annotated[
        Path | None,
        option("Model folder with a chat template (default: SmolLM2-135M-Instruct of the wheel)."),
    ] = None,
    recipe: Annotated[
        str,
        option(
            "XFT recipe that decides experts and steps: a name or a YAML file.", words=(recipes,)
        ),
    ] = "smollm2",
    seed: Seed = 0,
):
    """Tune SmolLM2-135M by XFT and by SFT.

    On four tasks; compares losses and answers.

    Rerun to resume.
    """
    one_gpu()
    from papers.demo_real import run

    return {"path": out} | run(
        out,
        model=model,
        recipe=recipe,
        seed=seed,
    )


@verb(app, "deepseek-coder-1.3b --out runs/deepseek", resumes=True)
def run(
    recipe: Annotated[
        str, argument("A YAML file, or the name of a shipped recipe.", words=(recipes,))
    ],
    out: Annotated[
        Path, option("Folder for the models and their results; a rerun resumes there.")
    ] = Path("runs/recipe"),
    seed: RecipeSeed = None,
    skip_memory_check: Annotated[
        bool, option("Run even if the estimated memory does not fit.", "--skip-memory-check")
    ] = False,
):
    """Run a method from a recipe.

    XFT (base, upcycle, tune, learn mixing, merge), ESFT (base, score, select, tune), UpIT (base,
    tune, expand experts, route, assemble, tune) or UltraFuser (specialists, gate, all). Completed
    stages are skipped. A name may include its method, such as esft/tiny.

    On several GPUs: accelerate launch --config_file FILE -m papers run RECIPE --out OUT.
    """
    one_gpu()
    from moe_runtime.config import check_choice
    from papers.engine.recipe import method_of, recipe_path

    path = recipe_path(recipe, *tables.PAPERS)
    method = method_of(path)
    check_choice("method", method, tuple(tables.PAPERS))
    if not skip_memory_check:
        from papers import memory_plan

        memory_plan.check(memory_plan.recipe_of(str(path)), recipe)
    study = importlib.import_module(f"papers.{method}.study")
    return {
        "out": out,
        "results": study.run(path, out, seed=seed),
    }


@verb(app, "xft/deepseek-coder-1.3b --gpus 8 --gpu-memory 80")
def memory(
    recipe: Annotated[
        str, argument("A YAML file, or the name of a shipped recipe.", words=(recipes,))
    ],
    gpus: Annotated[int, option("Number of GPUs.")] = 1,
    gpu_memory: Annotated[
        float | None, option("Memory of each GPU in GB; exits with 1 if a stage does not fit.")
    ] = None,
    engine: Annotated[
        str | None, option("ddp, fsdp2 or zero3 (default: all that run).", words="ddp fsdp2 zero3")
    ] = None,
):
    """Estimate the memory of a recipe's trainings.

    From configs alone, by stage and engine.

    Assumes examples without padding and balanced experts. The CUDA context and fragmentation are
    not included (--gpu-memory reserves 1.5 GB for them).
    """
    from moe_runtime.cli.tools import print_plan
    from papers import memory_plan

    plan = memory_plan.recipe_of(recipe)
    if plan is None:
        raise ValueError(
            f"recipe must be a YAML file or one of {', '.join(recipes())}, but got {recipe!r}"
        )
    return print_plan(memory_plan.planner_of(plan), gpus, gpu_memory, engine)


app.registered_commands += evaluate.app.registered_commands
for part in (*tables.apps, evaluate.data):
    app.add_typer(part)
