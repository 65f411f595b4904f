"""The stages of a UpIT study.

    base --prepared-->  the tuned dense model, or its LoRA, and every checkpoint during tuning
         --dense-->     the baseline: the same for as many epochs as all of UpIT
    prepared --pool-->  n experts: m chosen checkpoints, and others grown from them
    pool --buckets--> --routers--> --upit-->    experts and vectors tuned on their rows, assembled,
                                                tuned as one
         --self_moe-->                          assembled with random routers; only these are tuned
    base | prepared --upcycled-->               copies of one dense MLP, tuned
                    --loramoe-->                fresh LoRA branches, or copies of one, tuned
    upit --routed-->                            which experts each domain's tokens go to

`papers.engine.stages` says how stages are stored and what their hash covers.
"""

import functools
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.config import check_choice
from moe_runtime.hf.models import families
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Training
from moe_runtime.io import rows as data
from moe_runtime.methods import xft
from moe_runtime.methods.lora import baseline as lora_baseline
from moe_runtime.methods.upit import assembly, expansion, router
from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit import experts as upit_experts
from moe_runtime.methods.upit.checkpoints import ExpertCheckpoints
from moe_runtime.methods.upit.router import UpitTraining
from moe_runtime.methods.xft import baselines
from moe_runtime.modules.moe import Router
from papers.engine.domains import DomainStages, Judged
from papers.upit.recipe import UpitRecipe


class ExpertPool(NamedTuple):
    """Experts: checkpoints of one tuning run, and experts grown from them."""

    name: str
    folder: Path
    experts: list[str]  # folders, relative to that of all stages
    parents: list  # of each grown expert: two indices into `experts`
    total_seconds: float


STARTS = ("pt", "sft")  # a baseline's copies are of the base, or of the tuned dense model
# part of the stages' hashes, from when routers could begin in other ways
SKILLED = {"init": "skilled"}
NAMES = {"ffn": "FFN", "lora": "LoRA"}
DENSE = {"ffn": "SFT", "lora": "LoRA"}


class UpitStages(DomainStages):
    """The stages of one recipe and one seed."""

    FORMAT = 2
    Recipe = UpitRecipe
    result = Judged

    def trainings(self) -> tuple[Training, ...]:
        """Return the recipe's trainings."""
        trainings = []
        for form in map(self._form, self.recipe.forms):
            trainings += [form.sft, form.init, form.post, form.copied]
        return tuple(trainings)

    def base(self) -> Judged:
        """Return the dense model that all others start from: pre-trained here, or the recipe's."""
        r = self.recipe
        settings = {"dtype": r.dtype, "bf16": self.judging.bf16}  # used in evaluation
        if r.pretrain is not None:
            settings |= {"pretrain": r.pretrain.to_dict(), "length": r.max_length}

        def make(tmp: Path, folder: Path) -> dict:
            load = functools.partial(self._load, tmp / "model")
            if r.pretrain is None:
                # not first after the dense tuning
                self._copy_base(tmp / "model", families.family_of)
                return self._judge(load)
            blocks = data.pack(
                self.tokenizer,
                self._documents(),
                r.max_length,
            )
            model, trained = self._pretrain(
                blocks,
                self.held_out,
                folder,
                r.max_length,
            )
            self._save(model, trained, tmp / "model")
            return self._numbers(model, trained, load)

        return self._stage("base", "base", settings, [], make, seed=0)

    def dense(self, form: str) -> Judged:
        """Return the baseline without experts: the base, or its LoRA, tuned for the epochs of both
        of UpIT's stages.
        """
        training = self._form(form).whole

        def make(tmp: Path, folder: Path) -> dict:
            model, trained = self._tuned_dense(form, training, folder)
            if form == "ffn":
                self._save(model, trained, tmp / "model")
            else:
                pairs = {}
                for name, weight in trained.state_dict().items():
                    if "lora_" in name:
                        pairs[name] = weight.to(getattr(torch, self.recipe.dtype))
                with ranks.leading() as main:
                    if main:
                        lora_baseline.save_lora(model, tmp / "model", pairs)
            return self._numbers(
                model,
                trained,
                lambda: self._load(tmp / "model", form),
            )

        settings = self._settings(training) | self._rank(form)
        return self._stage(
            "dense",
            DENSE[form],
            settings,
            [self.base()],
            make,
        )

    @property
    def chosen(self) -> int:
        """How many checkpoints become experts."""
        return min(self.recipe.checkpoints.count, self.recipe.experts.num_experts)

    def check_steps(self, form: str) -> None:
        """Raise ValueError if the first tuning has fewer steps than checkpoints to choose."""
        training = self._form(form).sft
        batch = trainers.split_batch(training.batch_size, training.per_device_batch_size)
        steps = trainers.count_steps(
            len(self.train_rows),
            training.epochs,
            *batch,
        )
        if steps < self.chosen:
            raise ValueError(
                f"checkpoints.count ({self.chosen}) must be at most the {steps} steps of "
                f"{form}.sft on {len(self.train_rows)} examples. Use more examples or smaller "
                "batches"
            )

    def prepared(self, form: str) -> Judged:
        """Return step 1: its folder holds every checkpoint, of which the last is the tuned model or
        its LoRA.
        """
        self.check_steps(form)
        every = self.recipe.checkpoints.every_epochs
        base = self.base()

        def make(tmp: Path, folder: Path) -> dict:
            experts = folder / "experts"  # where a resumed run finds the experts saved so far
            # absolute, since experts may be read from any working directory
            known = base.folder.resolve()
            saver = ExpertCheckpoints(
                experts,
                every,
                base=known,
                dtype=self.recipe.dtype,
                overwrite=True,
            )
            model, trained = self._tuned_dense(
                form,
                self._form(form).sft,
                folder,
                [saver],
            )
            with ranks.leading() as main:
                if main:
                    # not moved: a run killed from here on resumes from the Trainer's last
                    # checkpoint and needs them
                    shutil.copytree(experts, tmp / "experts", copy_function=_link)
                    for expert in upit_experts.saved_experts(tmp / "experts"):
                        self.tokenizer.save_pretrained(expert)
            last = upit_experts.saved_experts(tmp / "experts")[-1]
            return self._numbers(
                model,
                trained,
                lambda: self._load(last, form),
            )

        settings = self._settings(self._form(form).sft) | self._rank(form) | {"every_epochs": every}
        return self._stage(
            "prepared",
            f"experts of {form}",
            settings,
            [base],
            make,
            holds="experts",
        )

    def pool(self, form: str) -> ExpertPool:
        """Return the recipe's number of experts (steps 1 and 2): checkpoints, and others grown."""
        r = self.recipe
        base = self.base()
        prepared = self.prepared(form)
        n = r.experts.num_experts
        m = self.chosen
        chosen = upit_experts.choose_checkpoints(
            prepared.folder,
            m,
            r.checkpoints.which,
        )
        grows = r.expansion.to_dict() if m < n else None

        def make(tmp: Path, checkpoints: Path) -> dict:
            names = [path.relative_to(self.out).as_posix() for path in chosen]
            parents = []
            start = time.perf_counter()
            if grows is not None:
                # where a resumed run finds the children made so far
                grown = checkpoints / "experts"
                with ranks.leading() as main:
                    if main:
                        known = base.folder.resolve()
                        children = expansion.expand_experts(
                            chosen,
                            n,
                            grown,
                            base=known,
                            seed=self.seed,
                            **grows,
                        ).children
                        names += [child.folder.name for child in children]
                        parents = [list(child.parents) for child in children]
                        os.rename(grown, tmp / "experts")
                names, parents = ranks.agree((names, parents))
            seconds = time.perf_counter() - start
            return {"experts": names, "parents": parents, "seconds": seconds}

        settings = {
            "chosen": [path.name for path in chosen],
            "count": n,
            "expansion": grows,
        }
        title = f"{n} experts of {form}"
        pool = self._stage(
            "pool",
            title,
            settings,
            [prepared],
            make,
            holds="experts",
            result=ExpertPool,
        )
        experts = [str(self.out / name) for name in pool.experts[:m]]
        experts += [str(pool.folder / name) for name in pool.experts[m:]]
        return pool._replace(experts=experts)

    def _form(self, form: str):
        return getattr(self.recipe, form)

    @property
    def judging(self) -> Training:
        """The training whose batch size and precision are used in evaluation."""
        return self._form(self.recipe.forms[0]).sft

    def _rank(self, form: str) -> dict:
        """The settings of a form that determine how its model is built."""
        if form == "ffn":
            return {}
        return {
            "rank": self.recipe.lora.rank,
            "alpha": self.recipe.lora.alpha,
        }

    def _tuned_dense(self, form: str, training: Training, folder: Path, callbacks=()) -> tuple:
        """Tune the base or a LoRA of it."""
        model = self._load(self.base().folder.resolve(), device=False)  # an adapter names it
        if form == "lora":
            model = lora_baseline.add_mlp_lora(
                model,
                **self._rank(form),
                seed=self.seed,
            )
        rows = (self.train_rows, self.held_out)
        return model, self._train(
            DENSE[form],
            model,
            *rows,
            training,
            folder,
            callbacks,
        )

    def _load(self, folder: Path, form: str = "ffn", device: bool = True):
        """Load a model, or the base with the adapter of a folder."""
        if form == "lora":
            return lora_baseline.load_lora(self._load(self.base().folder), folder)
        return ranks.load_model(
            folder,
            self.recipe.dtype,
            ranks.state().device if device else None,
        )

    def _train(self, name: str, model, *arguments, **more) -> trainers.TrainingResult:
        """Train with trainable parameters in float32, since AdamW's steps are smaller than a
        bfloat16 weight can resolve.

        Frozen parameters keep their dtype under autocast, except float16, whose gradients would
        vanish.
        """
        for parameter in model.parameters():
            if parameter.requires_grad or parameter.dtype == torch.float16:
                parameter.data = parameter.data.float()
            elif parameter.dtype == torch.bfloat16:
                more["bf16"] = True
        return super()._train(
            name,
            model,
            *arguments,
            **more,
        )

    def buckets(self, form: str, pool: ExpertPool) -> upit_buckets.Buckets:
        """Return the seed data, assigned by the experts' perplexity (step 3)."""
        seed_data = self.recipe.seed_data
        init = self._form(form).init

        def make(tmp: Path, checkpoints: Path) -> dict:
            rows = self.seed_rows()
            start = time.perf_counter()
            perplexity = upit_buckets.perplexities(
                pool.experts,
                rows,
                self.tokenizer,
                base=self.base().folder,
                tokens=seed_data.tokens,
                batch_size=init.per_device_batch_size or init.batch_size,
            )
            buckets = upit_buckets.fill_buckets(perplexity, seed_data.capacity)
            sizes = ", ".join(map(str, map(len, buckets)))
            self.say(f"{len(rows)} rows of seed data, in buckets of {sizes}")
            return {
                "rows": len(rows),
                "buckets": buckets,
                "perplexity": perplexity.tolist(),
                "seconds": time.perf_counter() - start,
            }

        title = f"seed data of {form}"
        kind = upit_buckets.Buckets
        return self._stage(
            "buckets",
            title,
            seed_data.to_dict(),
            [pool],
            make,
            result=kind,
        )

    def seed_rows(self):
        """Return the rows on which experts are compared, drawn by the seed."""
        share = self.recipe.seed_data.share
        count = self._seed_count()
        return upit_buckets.seed_set(
            self.train_rows,
            share,
            at_least=count,
            seed=self.seed,
        )

    def _seed_count(self) -> int:
        """Return the number of seed rows, at least a row per expert."""
        seed_data = self.recipe.seed_data
        rows = len(self.train_rows)
        least = max(seed_data.at_least, self.recipe.experts.num_experts)
        return min(max(round(seed_data.share * rows), least), rows)

    def check(self, form: str) -> None:
        """Raise ValueError if there are too few rows for the checkpoints, or to fill every expert's
        bucket.
        """
        self.check_steps(form)
        count = self._seed_count()
        n = self.recipe.experts.num_experts
        capacity = self.recipe.seed_data.capacity
        size = capacity or math.ceil(count / n)
        if (n - 1) * size >= count:
            raise ValueError(
                f"num_experts is {n} and seed_data.capacity is {capacity}, but the seed data have "
                f"only {count} examples, not more than the {(n - 1) * size} that {n - 1} experts "
                "may get. Use more seed data or a lower capacity"
            )

    def routers(self, form: str, pool: ExpertPool) -> router.Routers:
        """Return experts and routing vectors, tuned on the experts' rows (step 4)."""
        dealt = self.buckets(form, pool)
        r = self.recipe
        training = self._form(form).init
        rows = self.seed_rows()

        def make(tmp: Path, checkpoints: Path) -> dict:
            routed = router.init_routers(
                pool.experts,
                rows,
                dealt.buckets,
                self.tokenizer,
                folder=checkpoints / "routers",
                seed=self.seed,
                base=self.base().folder.resolve(),
                **r.router.to_dict(),
                **training.to_dict(),
            )
            with ranks.leading() as main:
                if main:
                    os.rename(checkpoints / "routers", tmp / "routers")
            return {
                "steps": sum(one.steps for one in routed),
                "seconds": sum(one.seconds for one in routed),
                "before": [statistics.fmean(one.before.sigmoid) for one in routed],
                "after": [statistics.fmean(one.after.sigmoid) for one in routed],
                "buckets": dealt.buckets,
            }

        settings = self._settings(training) | r.router.to_dict() | SKILLED
        kind = router.Routers
        title = f"routers of {form}"
        return self._stage(
            "routers",
            title,
            settings,
            [dealt],
            make,
            holds="routers",
            result=kind,
        )

    def upit(self, form: str, pool: ExpertPool | None = None) -> Judged:
        """Return UpIT's result: experts and vectors, assembled and tuned (step 5)."""
        self.check(form)
        pool = pool or self.pool(form)
        routers = self.routers(form, pool)

        def make(folder: Path):
            experts = []
            vectors = []
            for i in range(len(pool.experts)):
                routed = router.load_routed(routers.folder / f"expert-{i}")
                experts.append(routed.folder)
                vectors.append(routed.vectors)
            return self._assembled(experts, vectors, folder)

        name = f"UpIT ({NAMES[form]})"
        return self._mixed(
            "upit",
            name,
            form,
            self._form(form).post,
            make,
            [routers],
            SKILLED,
        )

    def self_moe(self, form: str) -> Judged:
        """Return the baseline of UpIT's experts behind random routers; only the routers are
        tuned.
        """
        pool = self.pool(form)

        def make(folder: Path):
            model = self._assembled(pool.experts, None, folder).requires_grad_(False)
            for module in model.modules():
                if isinstance(module, Router):
                    module.requires_grad_(True)
            return model

        name = f"Self-MoE ({NAMES[form]})"
        return self._mixed(
            "self_moe",
            name,
            form,
            self._form(form).post,
            make,
            [pool],
            {},
        )

    def upcycled(self, start: str) -> Judged:
        """Return the baseline of copies of the base's MLPs ("pt"), or of those of the tuned model
        ("sft").
        """
        parent, training, last = self._start("ffn", start)

        def make(folder: Path):
            model = self._load(last, device=False)
            xft.upcycle(
                model,
                seed=42 + self.seed,
                **self.recipe.experts.to_dict(),
            )
            return model

        name = f"Upcycle_{start.upper()}"
        settings = {"start": start}
        return self._mixed(
            "upcycled",
            name,
            "ffn",
            training,
            make,
            [parent],
            settings,
        )

    def loramoe(self, start: str) -> Judged:
        """Return the baseline of fresh LoRA branches over the base ("pt"), or of copies of the
        tuned LoRA ("sft").
        """
        parent, training, last = self._start("lora", start)
        experts = self.recipe.experts.to_dict()
        loramoe = self.recipe.lora.loramoe
        form = "block"
        if loramoe == "dense":
            form = "linear"
            experts |= {"top_k": None, "gate": "softmax_topk"}
        # constant if every expert sees every token
        sees_all = experts["top_k"] in (None, experts["num_experts"])
        if sees_all and experts["balance_loss"] == "switch":
            experts["balance_loss"] = "none"

        def make(folder: Path):
            model = self._load(self.base().folder, device=False)
            of = self._rank("lora")
            if start == "sft":
                of = {"experts": [last] * experts["num_experts"]}
            return baselines.to_lora_moe(
                model,
                form=form,
                seed=42 + self.seed,
                **of,
                **experts,
            )

        name = f"LoRAMoE_{start.upper()}"
        settings = {"start": start, "loramoe": loramoe} | self._rank("lora")
        return self._mixed(
            "loramoe",
            name,
            "lora",
            training,
            make,
            [parent],
            settings,
        )

    def _start(self, form: str, start: str) -> tuple[Judged, UpitTraining, Path]:
        """Return the stage to copy, the training of the copies, and the folder of the model or
        LoRA.
        """
        check_choice("start", start, STARTS)
        if start == "pt":
            return self.base(), self._form(form).copied, self.base().folder
        prepared = self.prepared(form)
        return prepared, self._form(form).post, upit_experts.saved_experts(prepared.folder)[-1]

    def _assembled(self, experts: Sequence, vectors: Sequence[torch.Tensor] | None, folder: Path):
        """Assemble an MoE model on one process and load it on all."""
        settings = self.recipe.experts.to_dict()
        del settings["num_experts"]
        settings |= {
            "base": self.base().folder,
            "seed": 42 + self.seed,
            "overwrite": True,
        }
        with ranks.leading() as main:
            if main:
                assembly.assemble(experts, vectors, folder, **settings)
        return self._load(folder, device=False)

    def _mixed(
        self,
        kind: str,
        name: str,
        form: str,
        training: UpitTraining,
        make: Callable,
        parents: list,
        settings: dict,
    ) -> Judged:
        """Return a stage that tunes the MoE model built by `make`, which gets a folder to
        work in.
        """
        settings = settings | self._settings(training)
        settings |= {"form": form, "experts": self.recipe.experts.to_dict()}

        def whole(tmp: Path, checkpoints: Path) -> dict:
            model = make(tmp / "assembled")
            rows = (self.train_rows, self.held_out)
            trained = self._train(
                name,
                model,
                *rows,
                training,
                checkpoints,
            )
            self._save(model, trained, tmp / "model")
            if self.is_main:
                shutil.rmtree(tmp / "assembled", ignore_errors=True)
            return self._numbers(
                model,
                trained,
                lambda: self._load(tmp / "model"),
            )

        return self._stage(kind, name, settings, parents, whole)


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the filesystem has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def run(
    recipe: UpitRecipe | str | Path, out: str | Path, seed: int | None = None, say=print
) -> list[Judged]:
    """Run the method for every kind of expert and report the results; return the base and the MoE
    models.
    """
    stages = UpitStages(recipe, out, seed=seed, say=say)
    recipe = stages.recipe
    for form in recipe.forms:
        stages.check(form)
    results = [stages.base()]
    for form in recipe.forms:
        results += [stages.dense(form), stages.upit(form)]
    domains = "".join(f"{domain:>12s}" for domain in recipe.domains)
    stages.say(f"{'':16s}{domains}{'all':>9s}{'parameters':>14s}{'per token':>14s}{'train s':>9s}")
    for r in results:
        losses = "".join(f"{loss:12.4f}" for loss in r.domains.values())
        sizes = f"{r.parameters:14,}{r.active_parameters:14,}"
        stages.say(f"{r.name:16s}{losses}{r.loss:9.4f}{sizes}{r.total_seconds:9.0f}")
    for r in results[2::2]:
        stages.say(f"{r.name}: {r.folder}")
    return results
