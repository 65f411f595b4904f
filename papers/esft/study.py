"""The stages of an ESFT study: the base, the experts' scores, and a model per task and method.

    base --scores--> selection --esft-->    an adapter: the selected experts
         --lora-->                          an adapter of low-rank matrices
         --fft-->                           a whole model

All are tuned on the same rows, a task's and `mix` times as many of general text, and evaluated as
saved, on held-out rows of the task and of general text. `papers.engine.stages` says how
stages are stored and what their hash covers.
"""

import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from moe_runtime.hf.dropin import experts
from moe_runtime.hf.dropin.parallel import shard_experts
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks, trained_files
from moe_runtime.hf.training.calibration import SEED, sample_batches
from moe_runtime.io import rows as data
from moe_runtime.io.files import hash_of
from moe_runtime.io.prompts import TEMPLATES
from moe_runtime.methods import esft
from moe_runtime.methods.esft.runs import EsftTraining
from moe_runtime.methods.lora import baseline as lora_baseline
from papers.engine.corpora import DOMAINS, domains_key
from papers.engine.stages import KeptStages, contents_of, course_of, loss_of, sizes_of
from papers.engine.tiny import small_deepseek
from papers.esft.recipe import BUILT_IN, EsftRecipe, documents, mixed, task_rows
from papers.esft.results import COSTS, Base, Scored, Tuned, join

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_experts",
    "top_k",
    "expert_size",
    "shared_experts",
    "dense_layers",
)
GENERAL = "general"  # the name of the general rows among the tasks'


class EsftStages(KeptStages):
    """The stages of one recipe and one seed."""

    FORMAT = 1
    HAS_EXPERTS = True
    Recipe = EsftRecipe
    result = Tuned

    def trainings(self) -> tuple[EsftTraining, ...]:
        """Return the recipe's trainings."""
        return self.recipe.fft, self.recipe.lora.training, self.recipe.esft

    def base(self) -> Tuned:
        """Return the model that all others start from: pre-trained here, or the recipe's, joined
        over the tasks.
        """
        r = self.recipe
        settings = {"dtype": r.dtype}
        if r.pretrain is not None:
            settings |= {"pretrain": r.pretrain.to_dict(), "length": r.max_length}

        def make(tmp: Path, folder: Path) -> dict:
            result = {}
            if r.pretrain is None:
                self._copy_base(tmp / "model")
            else:
                model, trained = self._pretrained(folder)
                result = course_of(trained)
                self._save(model, trained, tmp / "model")
                del model, trained
            model = self._load(tmp / "model")
            result |= sizes_of(model) | {"trained_parameters": 0, "optimizer_bytes": 0}
            result["found"] = {}
            for task in (*r.tasks, GENERAL):
                result["found"][task] = loss_of(*self._losses(model, f"{task}-held_out"))
            return result

        stage = self._stage(
            "base",
            "base",
            settings,
            [],
            make,
            seed=0,
            result=Base,
        )
        shared = {of: getattr(stage, of) for of in COSTS}
        for of, value in stage.found[GENERAL].items():
            shared[f"{GENERAL}_{of}"] = value
        return join("base", {task: Tuned(**shared, **stage.found[task]) for task in r.tasks})

    def scores(self, task: str) -> Scored:
        """Return the experts' scores on a task's rows."""
        base = self.base()
        n_tokens = self.recipe.scores.n_tokens
        rows = self.part(f"{task}-train")

        def make(tmp: Path, checkpoints: Path) -> dict:
            model = self._load(base.folder)
            start = time.perf_counter()
            scores = esft.score_experts(
                model,
                self._batches(rows),
                n_tokens,
                per_process=True,
            )
            with ranks.leading() as main:
                if main:
                    (tmp / "seen").mkdir()
                    scores.save(tmp / "seen" / "summary.json")
            return {"seconds": time.perf_counter() - start}

        settings = {"task": task, "n_tokens": n_tokens, "dtype": self.recipe.dtype}
        return self._stage(
            "scores",
            f"scores of {task}",
            settings,
            [base],
            make,
            holds="seen",
            result=Scored,
        )

    def selection(self, task: str, score: str, **flags) -> esft.ExpertSelection:
        """Return the experts of a task that reach the recipe's p; `flags` are ExpertSelection's.

        Raises ValueError if they are all experts, which leaves nothing to compare.
        """
        p = getattr(self.recipe.p, score)
        variant = self.recipe.scores.variant
        scores = self.scores(task).scores
        selection = esft.select_experts(scores, p, score, variant, **flags)
        routed = scores.num_experts - scores.num_shared
        if all(len(ids) == routed for ids in selection.experts.values()):
            raise ValueError(
                f"p.{score} = {p:g} selects all {routed} routed experts of every layer for {task}. "
                "Choose a smaller one, or scores.variant: normalized"
            )
        return selection

    def selected(self, task: str, score: str) -> str:
        """Return a sentence on how many experts of a task are selected, and their scores' sums."""
        scores = self.scores(task).scores
        chosen = self.selection(task, score).experts
        sums = []
        table = scores.scores(score, self.recipe.scores.variant)
        for layer, row in zip(scores.layers, table.tolist(), strict=True):
            sums.append(sum(row[expert] for expert in chosen[layer]))
        count = sum(map(len, chosen.values()))
        routed = len(chosen) * (scores.num_experts - scores.num_shared)
        return (
            f"{task}, by {score} scores: {count} of {routed} experts ({count / routed:.0%}), whose "
            f"scores sum to {min(sums):.2f} to {max(sums):.2f} in a layer, for p = "
            f"{getattr(self.recipe.p, score):g}."
        )

    def drawn(self, task: str, score: str) -> esft.ExpertSelection:
        """Return as many experts per layer as `selection`, drawn at random."""
        selection = self.selection(task, score)
        scores = self.scores(task).scores
        seed = 1000 * self.seed + list(self.recipe.tasks).index(task)
        return esft.random_experts(
            selection,
            scores.num_experts,
            seed,
            num_shared=scores.num_shared,
        )

    def _pretrained(self, folder: Path) -> tuple:
        pretrain = self.recipe.pretrain
        length = self.recipe.max_length
        blocks = data.pack(
            self.tokenizer,
            documents(pretrain),
            length,
        )
        sizes = {of: getattr(pretrain, of) for of in SIZES}
        model = small_deepseek(
            self.tokenizer,
            max_length=length,
            seed=pretrain.seed,
            **sizes,
        )
        experts.patch(model)
        training = EsftTraining(
            steps=pretrain.steps,
            batch_size=pretrain.batch_size,
            learning_rate=pretrain.learning_rate,
            warmup_steps=None,
            schedule="cosine",
            weight_decay=0.0,
            keep_best=False,
        )
        balance = {}
        if pretrain.balance_loss_coef:
            coef = pretrain.balance_loss_coef
            balance = {"balance_loss": "per_layer", "balance_loss_coef": coef}
        watched = self.part(f"{GENERAL}-validation")
        return model, self._train(
            "base",
            model,
            blocks,
            watched,
            training,
            folder,
            seed=pretrain.seed,
            **balance,
        )

    def _load(self, folder: Path, dtype: str | None = None):
        """Load a model to this process's device; its experts run through moe_runtime, the same for
        all methods.
        """
        model = ranks.load_model(
            folder,
            dtype or self.recipe.dtype,
            ranks.state().device,
        )
        experts.patch(model)
        return model

    def _batches(self, rows) -> Iterator[dict]:
        """This process's share of a sample of rows, in batches on its device."""
        r = self.recipe
        state = ranks.state()
        for batch in sample_batches(
            rows,
            r.scores.n_tokens,
            length=r.max_length,
            packed=False,
            batch_size=self._batch,
            seed=SEED + self.seed,
            part=(state.process_index, state.num_processes),
        ):
            yield {name: value.to(state.device) for name, value in batch.items()}

    @property
    def _batch(self) -> int:
        """Rows per batch outside of training."""
        training = self.recipe.esft
        return trainers.split_batch(training.batch_size, training.per_device_batch_size)[0]

    def _losses(self, model, part: str) -> tuple[list, list, list]:
        bf16 = self.recipe.esft.bf16
        return trainers.row_losses(
            model,
            self.part(part),
            self.tokenizer,
            batch_size=self._batch,
            bf16=bf16,
        )

    def data_key(self) -> str:
        """Return a hash of the base, all rows and the version of Python that built-in text comes
        from.
        """
        r = self.recipe
        python = platform.python_version()
        if r.pretrain is None:
            base = contents_of(r.base_model)
        else:
            text = domains_key() if r.pretrain.domains else python
            base = [text, r.pretrain.to_dict()]
        parts = {}
        rows = []
        for task, one in {**r.tasks, GENERAL: r.general}.items():
            parts[task] = one.to_dict()
            for source in one.sources:
                if source in DOMAINS:
                    rows.append(domains_key())
                else:
                    rows.append(python if source in BUILT_IN else contents_of(source))
        return hash_of(
            {
                "format": self.FORMAT,
                "method": "esft",
                "data": parts,
                "how": [r.max_length, r.pack, r.drop_bos],
                "base": base,
                "rows": rows,
            }
        )

    def make_data(self, folder: Path) -> dict:
        """Write the tokenizer and, for every task and the general text, the training, validation
        and held-out rows.
        """
        r = self.recipe
        tokenizer = self._base_tokenizer(lambda: documents(r.pretrain))
        parts = {**r.tasks, GENERAL: r.general}
        for part in reversed(parts.values()):  # the first one that brings a template decides
            if part.prompt in ("deepseek", "esft"):
                tokenizer.chat_template = TEMPLATES[part.prompt]
        tokenizer.save_pretrained(folder / "tokenizer")
        counts = {}
        for name, part in parts.items():
            self.say(f"reading and tokenizing {name}: {part}")
            counts[name] = {}
            listed = []
            for kind, rows in task_rows(tokenizer, part, r).items():
                data.save_rows(rows, folder / f"{name}-{kind}")
                counts[name][kind] = len(rows)
                listed.append(f"{len(rows):,} rows {kind.replace('_', ' ')}")
            self.say(", ".join(listed))
        return counts

    def fft(self, task: str) -> Tuned:
        """Return the base with all parameters tuned on a task."""

        def make(model) -> tuple:
            return model.requires_grad_(True), {}

        dtype = self.recipe.trained_dtype
        return self._tuned(
            "fft",
            task,
            self.recipe.fft,
            make,
            self._save,
            dtype=dtype,
        )

    def lora(self, task: str, rank: int | None = None) -> Tuned:
        """Return low-rank matrices for the base, tuned on a task; `rank` replaces the recipe's."""
        settings = self.recipe.lora
        rank = settings.rank if rank is None else rank
        scaling = settings.scaling

        def make(model) -> tuple:
            return lora_baseline.add_lora(
                model,
                rank,
                scaling,
                seed=self.seed,
            ), {}

        def save(model, trained, folder: Path) -> None:
            weights = trained.state_dict()
            with ranks.leading() as main:
                if main:
                    lora_baseline.save_lora(model, folder, weights)

        more = {"rank": rank, "scaling": scaling}
        return self._tuned(
            "lora",
            task,
            settings.training,
            make,
            save,
            more=more,
        )

    def esft(self, task: str, selection: esft.ExpertSelection, scored: bool = True) -> Tuned:
        """Return an adapter with the experts of `selection`, tuned on a task; `scored` adds the
        seconds that scoring took.

        With non-expert modules it is tuned with FFT's settings; experts alone tolerate larger
        steps.
        """
        training = self.recipe.fft if selection.non_expert_modules else self.recipe.esft
        name = self.recipe.trained_dtype
        dtype = None if name is None else getattr(torch, name)

        def make(model) -> tuple:
            if training.ep_size > 1:
                shard_experts(model, ranks.expert_mesh(training.ep_size))
            receipt = esft.train_only(model, selection, dtype=dtype)
            chosen = {str(layer): list(ids) for layer, ids in receipt.experts.items()}
            return model, {"experts": chosen}

        def save(model, trained, folder: Path) -> None:
            adapter = esft.adapter_of(model)  # of all processes
            with ranks.leading() as main:
                if main:
                    adapter.save(folder)

        parents = [self.scores(task)] if scored else []
        chosen = selection.to_dict()
        for of in ("score", "p", "variant"):
            chosen.pop(of, None)
        more = {"selection": chosen, "trained_dtype": name}
        return self._tuned(
            "esft",
            task,
            training,
            make,
            save,
            parents=parents,
            more=more,
        )

    def _load_tuned(self, folder: Path):
        """Load a model of `fft`, `lora` or `esft`, or the base."""
        is_lora = (folder / "adapter_config.json").is_file()
        if not is_lora and not (folder / trained_files.CONFIG).is_file():
            return self._load(folder)
        model = self._load(self.base().folder)
        if is_lora:
            return lora_baseline.load_lora(model, folder)
        esft.apply(model, folder)
        return model

    def _tuned(
        self,
        kind: str,
        task: str,
        training: EsftTraining,
        make,
        save,
        *,
        parents=(),
        more: Mapping = {},
        dtype: str | None = None,
    ) -> Tuned:
        """Return a stage of a model that `make` prepares and `save` writes to its folder."""
        base = self.base()
        mix = self.recipe.mix
        name = f"{kind} {task}"

        def whole(tmp: Path, checkpoints: Path) -> dict:
            model, result = make(self._load(base.folder, dtype))
            rows = self.part(f"{task}-train")
            if mix:
                rows = mixed(
                    rows,
                    self.part(f"{GENERAL}-train"),
                    mix,
                )
            watched = self.part(f"{task}-validation")
            trained = self._train(
                name,
                model,
                rows,
                watched,
                training,
                checkpoints,
            )
            save(model, trained, tmp / "model")
            result |= course_of(trained) | {
                "optimizer_bytes": trained.optimizer_bytes,
                # without the matrices that peft adds
                "parameters": base.parameters,
                "active_parameters": base.active_parameters,
            }
            del model, trained
            ranks.free_memory()
            model = self._load_tuned(tmp / "model")
            result |= loss_of(*self._losses(model, f"{task}-held_out"))
            for of, value in loss_of(*self._losses(model, f"{GENERAL}-held_out")).items():
                result[f"{GENERAL}_{of}"] = value
            return result

        settings = self._settings(training) | {"task": task, "mix": mix} | dict(more)
        return self._stage(
            kind,
            name,
            settings,
            [base, *parents],
            whole,
        )


def run(
    recipe: EsftRecipe | str | Path, out: str | Path, seed: int | None = None, say=print
) -> list[Tuned]:
    """Run the method for every task and report the results; return the base and each task's model.

    `seed` is the recipe's unless given. A result's folder is the task's adapter.
    """
    stages = EsftStages(recipe, out, seed=seed, say=say)
    recipe = stages.recipe
    base = stages.base()
    tuned = {}
    for task in recipe.tasks:
        tuned[task] = stages.esft(task, stages.selection(task, recipe.score))
    heads = ("base", "tuned", "general", "then")
    listed = "".join(f"{head:>9s}" for head in heads)
    stages.say(f"{'task':16s}{listed}{'trained':>14s}{'of all':>8s}{'train s':>9s}")
    for task, one in tuned.items():
        losses = f"{base.tasks[task].loss:9.4f}{one.loss:9.4f}"
        losses += f"{base.general_loss:9.4f}{one.general_loss:9.4f}"
        share = one.trained_parameters / one.parameters
        costs = f"{one.trained_parameters:14,}{share:8.1%}{one.total_seconds:9.0f}"
        stages.say(f"{task:16s}{losses}{costs}")
    for task, one in tuned.items():
        stages.say(f"the adapter of {task}: {one.folder}; its base: {base.folder}")
    return [base, *tuned.values()]
