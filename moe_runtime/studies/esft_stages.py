"""An ESFT study by stages that are kept: after the base and the experts' scores (esft_scoring), a model per task and method.

    base --scores--> selection --esft-->    an adapter: the selected experts, and what Table 3 trains beside them
         --lora-->                          an adapter of low-rank matrices
         --fft-->                           a whole model

All are tuned on the same rows, a task's and as many of general text as the recipe's `mix` says, and judged as they were
saved, on the task's held-out rows and on general ones. How stages are kept, and what a hash is over: `stages`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from moe_runtime.hf import lora_baseline, ranks
from moe_runtime.methods import esft
from moe_runtime.studies.esft_recipe import EsftRecipe, Tuning, load_recipe
from moe_runtime.studies.esft_results import Tuned
from moe_runtime.studies.esft_scoring import GENERAL, ScoredStages
from moe_runtime.studies.esft_tasks import mixed
from moe_runtime.studies.stages import course_of, loss_of


class Stages(ScoredStages):
    """The stages of one recipe and one seed, in the folder `out`, which any number of recipes, seeds and commands share.

    `recipe` is an EsftRecipe, or what `load_recipe` takes. The base and the rows are the same for every seed.
    """

    def fft(self, task: str, mix: float | None = None, group_size: int = 1) -> Tuned:
        """Return the base, all of it tuned on a task."""

        def make(model) -> tuple:
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            return model, {}

        def save(model, trained, folder: Path) -> None:
            weights = trained.state_dict()
            with ranks.leading() as main:
                if main:
                    ranks.save_whole(model, self.tokenizer, folder, self.recipe.dtype, weights)

        return self._tuned(
            "fft", task, self.recipe.fft, make, save, self._load, mix, group_size, dtype=self.recipe.trained_dtype
        )

    def lora(self, task: str, rank: int | None = None, mix: float | None = None) -> Tuned:
        """Return low-rank matrices for the base, tuned on a task; `rank` in the place of the recipe's."""
        settings = self.recipe.lora
        rank, scaling = settings.rank if rank is None else rank, settings.scaling

        def make(model) -> tuple:
            return lora_baseline.add_lora(model, rank, scaling, seed=self.seed), {}

        def save(model, trained, folder: Path) -> None:
            weights = trained.state_dict()
            with ranks.leading() as main:
                if main:
                    lora_baseline.save_lora(model, folder, weights)

        def load(folder: Path, group_size: int):
            return lora_baseline.load_lora(self._load(self.base().folder), folder)

        more = {"rank": rank, "scaling": scaling}
        return self._tuned("lora", task, settings.training, make, save, load, mix, more=more)

    def esft(
        self,
        task: str,
        selection: esft.ExpertSelection,
        mix: float | None = None,
        group_size: int = 1,
        scored: bool = True,
    ) -> Tuned:
        """Return an adapter with the experts of `selection`, tuned on a task; `scored` counts the seconds of their scores.

        Where all that is no expert trains too, it is tuned as FFT is: experts alone bear larger steps.
        """
        training = self.recipe.fft if selection.non_expert_modules else self.recipe.esft
        dtype = None if self.recipe.trained_dtype is None else getattr(torch, self.recipe.trained_dtype)

        def make(model) -> tuple:
            receipt = esft.train_only(model, selection, dtype=dtype)
            return model, {"experts": {str(layer): list(ids) for layer, ids in receipt.experts.items()}}

        def save(model, trained, folder: Path) -> None:
            adapter = esft.adapter_of(model)  # of all processes
            with ranks.leading() as main:
                if main:
                    adapter.save(folder)

        def load(folder: Path, group_size: int):
            model = self._load(self.base().folder, group_size)
            esft.apply(model, folder)
            return model

        parents = [self.scores(task, group_size)] if scored else []
        chosen = {of: value for of, value in selection.to_dict().items() if of not in ("score", "p", "variant")}
        more = {"selection": chosen, "trained_dtype": self.recipe.trained_dtype}
        return self._tuned("esft", task, training, make, save, load, mix, group_size, parents=parents, more=more)

    def _tuned(
        self, kind: str, task: str, training: Tuning, make, save, load, mix: float | None = None, group_size: int = 1,
        *, parents=(), more: Mapping = {}, dtype: str | None = None,
    ) -> Tuned:  # fmt: skip
        """Return a stage of a model that `make` prepares, `save` writes to its folder and `load` reads from it."""
        base, mix = self.base(), self.recipe.mix if mix is None else mix

        def whole(tmp: Path, checkpoints: Path) -> dict:
            model, notes = make(self._load(base.folder, group_size, dtype))
            rows = self._mixed(task, mix)
            held_out = self.part(f"{task}-validation")
            trained = self._train(f"{kind} {task}", model, rows, held_out, training, checkpoints)
            save(model, trained, tmp / "model")
            notes |= course_of(trained)
            notes |= {of: getattr(trained, of) for of in ("trained_parameters", "optimizer_bytes")}
            del model, trained
            ranks.free_memory()
            sizes = {of: getattr(base, of) for of in ("parameters", "active_parameters")}  # without what peft puts in
            return notes | sizes | self._judged(load(tmp / "model", group_size), task)

        settings = self._settings(training) | {"task": task, "mix": mix} | dict(more) | self._groups_in(group_size)
        return self._stage(kind, f"{kind} {task}", settings, [base, *parents], whole)

    def _mixed(self, task: str, mix: float):
        rows = self.part(f"{task}-train")
        return mixed(rows, self.part(f"{GENERAL}-train"), mix) if mix else rows

    def _judged(self, model, task: str) -> dict:
        own = loss_of(*self._losses(model, f"{task}-held_out"))
        general = loss_of(*self._losses(model, f"{GENERAL}-held_out"))
        return own | {f"{GENERAL}_{of}": value for of, value in general.items()}


def run(recipe: EsftRecipe | str | Path, out: str | Path, seed: int | None = None, say=print) -> list[Tuned]:
    """Run the method for every task and say what came out; return the base and each task's model.

    `seed` is the recipe's unless given. A result's folder is the task's adapter.
    """
    recipe = recipe if isinstance(recipe, EsftRecipe) else load_recipe(recipe)
    stages = Stages(recipe, out, seed=recipe.seed if seed is None else seed, say=say)
    base = stages.base()
    tuned = {task: stages.esft(task, stages.selection(task, recipe.score)) for task in recipe.tasks}
    stages.say(
        f"{'task':16s}{'base':>9s}{'tuned':>9s}{'general':>9s}{'then':>9s}{'trained':>14s}{'of all':>8s}{'train s':>9s}"
    )
    for task, one in tuned.items():
        losses = f"{base.tasks[task].loss:9.4f}{one.loss:9.4f}{base.general_loss:9.4f}{one.general_loss:9.4f}"
        share = one.trained_parameters / one.parameters
        stages.say(f"{task:16s}{losses}{one.trained_parameters:14,}{share:8.1%}{one.total_seconds:9.0f}")
    for task, one in tuned.items():
        stages.say(f"the adapter of {task}: {one.folder}; its base: {base.folder}")
    return [base, *tuned.values()]
