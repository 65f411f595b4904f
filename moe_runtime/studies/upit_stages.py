"""A UpIT study by stages that are kept: after the base and the experts (upit_preparing), routers, mixtures and baselines.

    pool --buckets--> --routers--> --upit-->    experts and vectors tuned on their rows, assembled, tuned as one
    pool --self_moe-->                          assembled with random routers, which alone are tuned
    base | prepared --upcycled-->               copies of one dense MLP, tuned
                    --loramoe-->                fresh LoRA branches, or copies of one, tuned
    upit --routed-->                            which experts each domain's tokens go to

How they are kept, and what a hash is over: `stages`.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from moe_runtime.config import check_choice
from moe_runtime.hf import ranks
from moe_runtime.methods import baselines, upit_assembly, upit_buckets, upit_experts, upit_router, xft
from moe_runtime.modules.moe import Router
from moe_runtime.studies import upit_routing
from moe_runtime.studies.domain_results import Judged
from moe_runtime.studies.upit_preparing import NONE, PreparedStages
from moe_runtime.studies.upit_recipe import Tuning, UpitRecipe, load_recipe
from moe_runtime.studies.upit_results import Buckets, Pool, Routed, Routers

STARTS = ("pt", "sft")  # what the copies of a baseline are of: the base, or the tuned dense model
INITS = ("skilled", "random", "none")  # of routers: expert-specific rows, rows at random, no step 4
NAMES = {"ffn": "FFN", "lora": "LoRA"}


class Stages(PreparedStages):
    """The stages of one recipe and one seed, in the folder `out`, which any number of recipes, seeds and commands share.

    `recipe` is a UpitRecipe, or what `load_recipe` takes. The base and the rows are the same for every seed.
    """

    def buckets(self, form: str, pool: Pool) -> Buckets:
        """Return the seed data, dealt out by the experts' perplexity (step 3)."""
        seed_data = self.recipe.seed_data

        def make(tmp: Path, checkpoints: Path) -> dict:
            rows, start = self.seed_rows(), time.perf_counter()
            found = upit_buckets.perplexities(
                pool.experts, rows, self.tokenizer, base=self.base().folder, tokens=seed_data.tokens,
                batch_size=self._form(form).init.per_device_batch_size or self._form(form).init.batch_size,
            )  # fmt: skip
            buckets = upit_buckets.fill_buckets(found, seed_data.capacity)
            sizes = ", ".join(str(len(bucket)) for bucket in buckets)
            self.say(f"{len(rows)} rows of seed data, in buckets of {sizes}")
            seconds = time.perf_counter() - start
            return {"rows": len(rows), "buckets": buckets, "perplexity": found.tolist(), "seconds": seconds}

        settings = seed_data.to_dict() | ({"share_of_rows": self.share} if self.share < 1 else {})
        return self._stage("buckets", f"seed data of {form}", settings, [pool], make, result=Buckets)

    def seed_rows(self):
        """Return the rows that experts are compared on, drawn anew by every seed."""
        rows, count = self.train_rows, self._seed_count()
        return upit_buckets.seed_set(rows, self.recipe.seed_data.share, at_least=count, seed=self.seed)

    def _seed_count(self) -> int:
        """Return how many rows are seed data; of a share of the rows as small a share of `at_least`, a row per expert."""
        seed_data, rows = self.recipe.seed_data, len(self.train_rows)
        least = max(round(self.share * seed_data.at_least), self.recipe.experts.num_experts)
        return min(max(round(seed_data.share * rows), least), rows)

    def check(self, form: str, parents: str | None = None, init: str = "skilled") -> None:
        """Raise ValueError for rows that are too few for the checkpoints, or for a bucket of every expert."""
        self.check_steps(form, parents)
        count, n, capacity = self._seed_count(), self.recipe.experts.num_experts, self.recipe.seed_data.capacity
        size = capacity or math.ceil(count / n)
        if init != "none" and (n - 1) * size >= count:
            raise ValueError(
                f"num_experts is {n}, seed_data.capacity is {capacity}, the seed data are {count} rows; want more than "
                f"{(n - 1) * size}, as {n - 1} experts may take so many: more seed data, or a lower capacity"
            )

    def routers(self, form: str, pool: Pool, init: str = "skilled") -> Routers:
        """Return experts and routing vectors, tuned on the experts' rows, or on as many drawn at random (step 4)."""
        check_choice("init", init, INITS[:2])
        dealt, r, training = self.buckets(form, pool), self.recipe, self._form(form).init
        rows, buckets = self.seed_rows(), dealt.buckets
        if init == "random":
            buckets = upit_buckets.random_buckets([len(bucket) for bucket in buckets], len(rows), self.seed)

        def make(tmp: Path, checkpoints: Path) -> dict:
            # where a killed run finds the experts that are done
            routed = upit_router.init_routers(
                pool.experts, rows, buckets, self.tokenizer, folder=checkpoints / "routers", seed=self.seed,
                base=self.base().folder.resolve(), **r.router.to_dict(), **training.to_dict(),
            )  # fmt: skip
            with ranks.leading() as main:
                if main:
                    os.rename(checkpoints / "routers", tmp / "routers")
            means = {of: [_mean(getattr(one, of).sigmoid) for one in routed] for of in ("before", "after")}
            course = {of: sum(getattr(one, of) for one in routed) for of in ("steps", "seconds")}
            return course | means | {"buckets": buckets}

        settings = self._settings(training) | r.router.to_dict() | {"init": init}
        name = f"routers of {form}, {init}"
        return self._stage("routers", name, settings, [dealt], make, holds="routers", result=Routers)

    def upit(self, form: str, pool: Pool | None = None, init: str = "skilled") -> Judged:
        """Return the mixture of experts and vectors, tuned (step 5); UpIT's result. `init` "none" draws the routers."""
        check_choice("init", init, INITS)
        self.check(form, NONE if pool is not None and not pool.parents else None, init)
        pool = pool or self.pool(form)
        routers = None if init == "none" else self.routers(form, pool, init)

        def make(folder: Path):
            experts, vectors = pool.experts, None
            if routers is not None:
                found = [upit_router.load_routed(routers.folder / f"expert-{i}") for i in range(len(pool.experts))]
                experts, vectors = [one.folder for one in found], [one.vectors for one in found]
            return self._assembled(experts, vectors, folder)

        name, parents = f"UpIT ({NAMES[form]})", [routers or pool]
        return self._mixed("upit", name, form, self._form(form).post, make, parents, {"init": init})

    def self_moe(self, form: str) -> Judged:
        """Return the baseline of UpIT's experts behind random routers, of which only the routers are tuned."""
        pool = self.pool(form)

        def make(folder: Path):
            return _only_routers(self._assembled(pool.experts, None, folder))

        return self._mixed("self_moe", f"Self-MoE ({NAMES[form]})", form, self._form(form).post, make, [pool], {})

    def upcycled(self, start: str) -> Judged:
        """Return the baseline of copies of the base's MLPs ("pt"), or of those of the tuned model ("sft")."""
        parent, training, last = self._start("ffn", start)

        def make(folder: Path):
            model = self._load(last, device=False)
            xft.upcycle(model, seed=42 + self.seed, **self.recipe.experts.to_dict())
            return model

        return self._mixed("upcycled", f"Upcycle_{start.upper()}", "ffn", training, make, [parent], {"start": start})

    def loramoe(self, start: str) -> Judged:
        """Return the baseline of fresh LoRA branches over the base ("pt"), or of copies of the tuned LoRA ("sft")."""
        parent, training, last = self._start("lora", start)
        experts, lora = self.recipe.experts.to_dict(), self.recipe.lora
        if lora.loramoe == "dense":
            experts |= {"top_k": None, "gate": "softmax_topk"}
        # a constant where every expert sees every token
        if experts["top_k"] in (None, experts["num_experts"]) and experts["balance_loss"] == "switch":
            experts["balance_loss"] = "none"

        def make(folder: Path):
            model = self._load(self.base().folder, device=False)
            of = {"experts": [last] * experts["num_experts"]} if start == "sft" else self._rank("lora")
            kind = "linear" if lora.loramoe == "dense" else "block"
            return baselines.to_lora_moe(model, form=kind, seed=42 + self.seed, **of, **experts)

        settings = {"start": start, "loramoe": lora.loramoe} | self._rank("lora")
        return self._mixed("loramoe", f"LoRAMoE_{start.upper()}", "lora", training, make, [parent], settings)

    def routed(self, moe: Judged) -> Routed:
        """Return which experts the tokens of each domain's held-out rows go to."""

        def make(tmp: Path, checkpoints: Path) -> dict:
            rows = {domain: self.part(f"{domain}-held_out") for domain in self.recipe.domains}
            with ranks.leading() as main:
                found = upit_routing.count(self._load(moe.folder), self.tokenizer, rows) if main else None
            counts, layers = ranks.agree(found)
            return {"counts": counts, "layers": layers}

        return self._stage("routed", f"routing of {moe.name}", {}, [moe], make, result=Routed)

    def _start(self, form: str, start: str) -> tuple[Judged, Tuning, Path]:
        """Return the stage that copies are made of, what they are tuned with, and the model's folder, or the LoRA's."""
        check_choice("start", start, STARTS)
        if start == "pt":
            return self.base(), self._form(form).copied, self.base().folder
        prepared = self.prepared(form)
        return prepared, self._form(form).post, upit_experts.saved_experts(prepared.folder)[-1]

    def _assembled(self, experts: Sequence, vectors: Sequence[torch.Tensor] | None, folder: Path):
        """Assemble a mixture on one process, and load it in all."""
        settings = {name: value for name, value in self.recipe.experts.to_dict().items() if name != "num_experts"}
        base = self.base().folder
        how = settings | {"base": base, "seed": 42 + self.seed, "overwrite": True}
        with ranks.leading() as main:
            if main:
                upit_assembly.assemble(experts, vectors, folder, **how)
        return self._load(folder, device=False)

    def _mixed(
        self, kind: str, name: str, form: str, training: Tuning, make: Callable, parents: list, settings: dict
    ) -> Judged:
        """Return a stage of a mixture that `make` prepares, in a folder that it may use, and that is then tuned."""
        settings = settings | self._settings(training) | {"form": form, "experts": self.recipe.experts.to_dict()}

        def whole(tmp: Path, checkpoints: Path) -> dict:
            model = make(tmp / "assembled")
            trained = self._train(name, model, self.train_rows, self.held_out, training, checkpoints)
            self._save(model, trained, tmp / "model")
            if self.is_main:
                shutil.rmtree(tmp / "assembled", ignore_errors=True)
            return self._numbers(model, trained, lambda: self._load(tmp / "model"))

        return self._stage(kind, name, settings, parents, whole)


def run(recipe: UpitRecipe | str | Path, out: str | Path, seed: int | None = None, say=print) -> list[Judged]:
    """Run the whole method for every kind of expert of the recipe and say what came out; return base and mixtures.

    `seed` is the recipe's unless given. A result's folder is its model.
    """
    recipe = recipe if isinstance(recipe, UpitRecipe) else load_recipe(recipe)
    stages = Stages(recipe, out, seed=recipe.seed if seed is None else seed, say=say)
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


def _only_routers(model):
    """Freeze all but the routers."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Router):
            module.requires_grad_(True)
    return model


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
