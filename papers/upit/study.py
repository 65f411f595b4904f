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


class Pool(NamedTuple):
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


class Stages(DomainStages):
    """The stages of one recipe and one seed."""

    FORMAT = 2
    Recipe = UpitRecipe
    result = Judged

    def trainings(self) -> tuple[Training, ...]:
        """Return the recipe's trainings."""
        forms = (getattr(self.recipe, form) for form in self.recipe.forms)
        return tuple(
            getattr(form, name) for form in forms for name in ("sft", "init", "post", "copied")
        )

    def base(self) -> Judged:
        """Return the dense model that all others start from: pre-trained here, or the recipe's."""
        pretrain = self.recipe.pretrain
        r = self.recipe

        def make(tmp: Path, folder: Path) -> dict:
            if pretrain is None:
                # not first after the dense tuning
                self._copy_base(tmp / "model", families.family_of)
                return self._judge(lambda: self._load(tmp / "model"))
            blocks = data.pack(self.tokenizer, self._documents(), r.max_length)
            model, trained = self._pretrain(blocks, self.held_out, folder, r.max_length)
            self._save(model, trained, tmp / "model")
            return self._numbers(model, trained, lambda: self._load(tmp / "model"))

        settings = {"pretrain": pretrain.to_dict(), "length": r.max_length} if pretrain else {}
        settings |= {"dtype": r.dtype, "bf16": self.judging.bf16}  # used in evaluation
        return self._stage("base", "base", settings, [], make, seed=0)

    def dense(self, form: str) -> Judged:
        """Return the baseline without experts: the base, or its LoRA, tuned for the epochs of both
        of UpIT's stages.
        """

        def make(tmp: Path, folder: Path) -> dict:
            model, trained = self._tuned_dense(form, self._form(form).whole, folder)
            if form == "ffn":
                self._save(model, trained, tmp / "model")
                return self._numbers(model, trained, lambda: self._load(tmp / "model"))
            weights = trained.state_dict()
            pairs = {}
            for name in weights:
                if "lora_" in name:
                    pairs[name] = weights[name].to(getattr(torch, self.recipe.dtype))
            with ranks.leading() as main:
                if main:
                    lora_baseline.save_lora(model, tmp / "model", pairs)
            return self._numbers(model, trained, lambda: self._load(tmp / "model", form))

        settings = self._settings(self._form(form).whole) | self._rank(form)
        return self._stage(
            "dense", "SFT" if form == "ffn" else "LoRA", settings, [self.base()], make
        )

    @property
    def chosen(self) -> int:
        """How many checkpoints become experts."""
        return min(self.recipe.checkpoints.count, self.recipe.experts.num_experts)

    def check_steps(self, form: str) -> None:
        """Raise ValueError if the first tuning has fewer steps than checkpoints to choose."""
        training = self._form(form).sft
        batch = trainers.split_batch(training.batch_size, training.per_device_batch_size)
        steps = trainers.count_steps(len(self.train_rows), training.epochs, *batch)
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
                experts, every, base=known, dtype=self.recipe.dtype, overwrite=True
            )
            model, trained = self._tuned_dense(form, self._form(form).sft, folder, [saver])
            with ranks.leading() as main:
                if main:
                    # not moved: a run killed from here on resumes from the Trainer's last
                    # checkpoint and needs them
                    shutil.copytree(experts, tmp / "experts", copy_function=_link)
                    for expert in upit_experts.saved_experts(tmp / "experts"):
                        self.tokenizer.save_pretrained(expert)
            last = upit_experts.saved_experts(tmp / "experts")[-1]
            return self._numbers(model, trained, lambda: self._load(last, form))

        settings = self._settings(self._form(form).sft) | self._rank(form) | {"every_epochs": every}
        return self._stage(
            "prepared", f"experts of {form}", settings, [base], make, holds="experts"
        )

    def pool(self, form: str) -> Pool:
        """Return the recipe's number of experts (steps 1 and 2): checkpoints, and others grown."""
        r = self.recipe
        base = self.base()
        prepared = self.prepared(form)
        n = r.experts.num_experts
        m = self.chosen
        chosen = upit_experts.choose_checkpoints(prepared.folder, m, r.checkpoints.which)
        grows = r.expansion.to_dict() if m < n else None

        def make(tmp: Path, checkpoints: Path) -> dict:
            made = {
                "experts": [path.relative_to(self.out).as_posix() for path in chosen],
                "parents": [],
            }
            if grows is None:
                return made
            start = time.perf_counter()
            # where a resumed run finds the children made so far
            grown = checkpoints / "experts"
            children = None
            with ranks.leading() as main:
                if main:
                    known = base.folder.resolve()
                    found = expansion.expand_experts(
                        chosen, n, grown, base=known, seed=self.seed, **grows
                    )
                    children = []
                    for child in found.children:
                        children.append((child.folder.name, list(child.parents)))
                    os.rename(grown, tmp / "experts")
            children = ranks.agree(children)
            made["experts"] += [name for name, _ in children]
            return made | {
                "parents": [pair for _, pair in children],
                "seconds": time.perf_counter() - start,
            }

        settings = {"chosen": [path.name for path in chosen], "count": n, "expansion": grows}
        pool = self._stage(
            "pool",
            f"{n} experts of {form}",
            settings,
            [prepared],
            make,
            holds="experts",
            result=Pool,
        )
        found = [self.out / name for name in pool.experts[:m]] + [
            pool.folder / name for name in pool.experts[m:]
        ]
        return pool._replace(experts=[str(path) for path in found])

    def _form(self, form: str):
        return getattr(self.recipe, form)

    @property
    def judging(self) -> Training:
        """The training whose batch size and precision are used in evaluation."""
        return self._form(self.recipe.forms[0]).sft

    def _rank(self, form: str) -> dict:
        """The settings of a form that determine how its model is built."""
        if form == "lora":
            rank = {}
            for name in ("rank", "alpha"):
                rank[name] = getattr(self.recipe.lora, name)
            return rank
        return {}

    def _tuned_dense(self, form: str, training: Training, folder: Path, callbacks=()) -> tuple:
        """Tune the base or a LoRA of it."""
        model = self._load(self.base().folder.resolve(), device=False)  # an adapter names it
        if form == "lora":
            model = lora_baseline.add_mlp_lora(model, **self._rank(form), seed=self.seed)
        name = "SFT" if form == "ffn" else "LoRA"
        return model, self._train(
            name, model, self.train_rows, self.held_out, training, folder, callbacks
        )

    def _load(self, folder: Path, form: str = "ffn", device: bool = True):
        """Load a model, or the base with the adapter of a folder."""
        if form == "lora":
            return lora_baseline.load_lora(self._load(self.base().folder), folder)
        return ranks.load_model(folder, self.recipe.dtype, ranks.state().device if device else None)

    def _train(self, name: str, model, *arguments, **more) -> trainers.TrainingResult:
        """Train with trainable parameters in float32, since AdamW's steps are smaller than a
        bfloat16 weight can resolve.

        Frozen parameters keep their dtype under autocast, except float16, whose gradients would
        vanish.
        """
        for parameter in model.parameters():
            if parameter.requires_grad or parameter.dtype == torch.float16:
                parameter.data = parameter.data.float()
        if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
            more["bf16"] = True
        return super()._train(name, model, *arguments, **more)

    def buckets(self, form: str, pool: Pool) -> upit_buckets.Buckets:
        """Return the seed data, assigned by the experts' perplexity (step 3)."""
        seed_data = self.recipe.seed_data

        def make(tmp: Path, checkpoints: Path) -> dict:
            rows = self.seed_rows()
            start = time.perf_counter()
            found = upit_buckets.perplexities(
                pool.experts,
                rows,
                self.tokenizer,
                base=self.base().folder,
                tokens=seed_data.tokens,
                batch_size=self._form(form).init.per_device_batch_size
                or self._form(form).init.batch_size,
            )
            buckets = upit_buckets.fill_buckets(found, seed_data.capacity)
            self.say(
                f"{len(rows)} rows of seed data, in buckets of "
                f"{', '.join(str(len(bucket)) for bucket in buckets)}"
            )
            seconds = time.perf_counter() - start
            return {
                "rows": len(rows),
                "buckets": buckets,
                "perplexity": found.tolist(),
                "seconds": seconds,
            }

        return self._stage(
            "buckets",
            f"seed data of {form}",
            seed_data.to_dict(),
            [pool],
            make,
            result=upit_buckets.Buckets,
        )

    def seed_rows(self):
        """Return the rows on which experts are compared, drawn by the seed."""
        rows = self.train_rows
        count = self._seed_count()
        return upit_buckets.seed_set(
            rows, self.recipe.seed_data.share, at_least=count, seed=self.seed
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

    def routers(self, form: str, pool: Pool) -> router.Routers:
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
            means = {}
            for of in ("before", "after"):
                means[of] = [statistics.fmean(getattr(one, of).sigmoid) for one in routed]
            course = {}
            for of in ("steps", "seconds"):
                course[of] = sum(getattr(one, of) for one in routed)
            return course | means | {"buckets": dealt.buckets}

        settings = self._settings(training) | r.router.to_dict() | SKILLED
        return self._stage(
            "routers",
            f"routers of {form}",
            settings,
            [dealt],
            make,
            holds="routers",
            result=router.Routers,
        )

    def upit(self, form: str, pool: Pool | None = None) -> Judged:
        """Return UpIT's result: experts and vectors, assembled and tuned (step 5)."""
        self.check(form)
        pool = pool or self.pool(form)
        routers = self.routers(form, pool)

        def make(folder: Path):
            routed = []
            for i in range(len(pool.experts)):
                routed.append(router.load_routed(routers.folder / f"expert-{i}"))
            experts = [one.folder for one in routed]
            return self._assembled(experts, [one.vectors for one in routed], folder)

        name = f"UpIT ({NAMES[form]})"
        return self._mixed("upit", name, form, self._form(form).post, make, [routers], SKILLED)

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

        return self._mixed(
            "self_moe", f"Self-MoE ({NAMES[form]})", form, self._form(form).post, make, [pool], {}
        )

    def upcycled(self, start: str) -> Judged:
        """Return the baseline of copies of the base's MLPs ("pt"), or of those of the tuned model
        ("sft").
        """
        parent, training, last = self._start("ffn", start)

        def make(folder: Path):
            model = self._load(last, device=False)
            xft.upcycle(model, seed=42 + self.seed, **self.recipe.experts.to_dict())
            return model

        return self._mixed(
            "upcycled",
            f"Upcycle_{start.upper()}",
            "ffn",
            training,
            make,
            [parent],
            {"start": start},
        )

    def loramoe(self, start: str) -> Judged:
        """Return the baseline of fresh LoRA branches over the base ("pt"), or of copies of the
        tuned LoRA ("sft").
        """
        parent, training, last = self._start("lora", start)
        experts = self.recipe.experts.to_dict()
        lora = self.recipe.lora
        if lora.loramoe == "dense":
            experts |= {"top_k": None, "gate": "softmax_topk"}
        # constant if every expert sees every token
        if (
            experts["top_k"] in (None, experts["num_experts"])
            and experts["balance_loss"] == "switch"
        ):
            experts["balance_loss"] = "none"

        def make(folder: Path):
            model = self._load(self.base().folder, device=False)
            if start == "sft":
                of = {"experts": [last] * experts["num_experts"]}
            else:
                of = self._rank("lora")
            kind = "linear" if lora.loramoe == "dense" else "block"
            return baselines.to_lora_moe(model, form=kind, seed=42 + self.seed, **of, **experts)

        settings = {"start": start, "loramoe": lora.loramoe} | self._rank("lora")
        return self._mixed(
            "loramoe", f"LoRAMoE_{start.upper()}", "lora", training, make, [parent], settings
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
        settings = {}
        for name, value in self.recipe.experts.to_dict().items():
            if name != "num_experts":
                settings[name] = value
        how = settings | {"base": self.base().folder, "seed": 42 + self.seed, "overwrite": True}
        with ranks.leading() as main:
            if main:
                assembly.assemble(experts, vectors, folder, **how)
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
        settings = (
            settings
            | self._settings(training)
            | {"form": form, "experts": self.recipe.experts.to_dict()}
        )

        def whole(tmp: Path, checkpoints: Path) -> dict:
            model = make(tmp / "assembled")
            trained = self._train(
                name, model, self.train_rows, self.held_out, training, checkpoints
            )
            self._save(model, trained, tmp / "model")
            if self.is_main:
                shutil.rmtree(tmp / "assembled", ignore_errors=True)
            return self._numbers(model, trained, lambda: self._load(tmp / "model"))

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
    stages = Stages(recipe, out, seed=seed, say=say)
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
