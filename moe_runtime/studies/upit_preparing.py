"""The first steps of a UpIT study by stages that are kept: rows, base, the dense tuning, and experts out of it.

base --prepared-->  the dense model tuned, or its LoRA, and every checkpoint on the way
     --dense-->     the baseline: the same for as many epochs as all of UpIT
prepared --pool-->  n experts: m checkpoints chosen, the others grown from them
"""

import copy
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_runtime import data
from moe_runtime.hf import families, lora_baseline, ranks
from moe_runtime.hf import fit as trainers
from moe_runtime.hf.expert_checkpoints import ExpertCheckpoints
from moe_runtime.methods import upit_expansion, upit_experts
from moe_runtime.methods.fingerprints import files_print, hash_of
from moe_runtime.studies import stage_rows
from moe_runtime.studies.domain_results import Judged
from moe_runtime.studies.domains import DOMAINS, domains_key
from moe_runtime.studies.recipe import Training
from moe_runtime.studies.stages import KeptStages, course_of, loss_of, sizes_of
from moe_runtime.studies.upit_recipe import UpitRecipe, load_recipe
from moe_runtime.studies.upit_results import Pool

NONE = "none"  # no expansion: as many checkpoints as experts


class PreparedStages(KeptStages):
    """The stages of one recipe and one seed before routers; `upit_stages.Stages` has the others."""

    FORMAT = 2
    result = Judged
    share = 1.0  # of each domain's train rows that are tuned on

    def __init__(
        self, recipe: UpitRecipe | str | Path, out: str | Path, seed: int = 0, say: Callable[[str], None] = print
    ):
        super().__init__(recipe if isinstance(recipe, UpitRecipe) else load_recipe(recipe), out, seed, say)

    def trainings(self) -> tuple[Training, ...]:
        """Return the recipe's trainings."""
        forms = (getattr(self.recipe, form) for form in self.recipe.forms)
        return tuple(getattr(form, name) for form in forms for name in ("sft", "init", "post", "copied"))

    def change(self, share: float | None = None, **changes):
        """Return the stages of the same rows and base with another share of the rows, or with the recipe's values changed.

        `changes` are as `Node.change` takes them, of experts and trainings alone.
        """
        other = copy.copy(self)
        other.share = self.share if share is None else share
        other.recipe = self.recipe.change(**changes)
        return other

    @property
    def train_rows(self):
        """The rows of all domains to tune on, tokenized."""
        parts = [self.part(f"{domain}-train") for domain in self.recipe.domains]
        if self.share < 1:
            parts = [part.select(range(max(round(self.share * len(part)), 1))) for part in parts]
        return data.require("datasets").concatenate_datasets(parts)

    @property
    def held_out(self):
        """The rows to judge by, tokenized, domain after domain; the same for every stage and seed."""
        parts = [self.part(f"{domain}-held_out") for domain in self.recipe.domains]
        return data.require("datasets").concatenate_datasets(parts)

    def base(self) -> Judged:
        """Return the dense model that all others start from: pre-trained here, or the recipe's."""
        pretrain, r = self.recipe.pretrain, self.recipe

        def make(tmp: Path, folder: Path) -> dict:
            if pretrain is None:
                with ranks.leading() as main:
                    if main:
                        model = ranks.load_model(r.base_model, r.dtype)
                        families.family_of(model)  # now, not after the dense tuning
                        ranks.save_whole(model, self.tokenizer, tmp / "model", r.dtype)
                return self._judge(lambda: self._load(tmp / "model"))
            blocks = data.pack(self.tokenizer, self._documents(), r.max_length)
            model, trained = self._pretrain(blocks, self.held_out, folder, r.max_length)
            self._save(model, trained, tmp / "model")
            return self._numbers(model, trained, lambda: self._load(tmp / "model"))

        settings = {"pretrain": pretrain.to_dict(), "length": r.max_length} if pretrain else {}
        settings |= {"dtype": r.dtype, "bf16": self._form(r.forms[0]).sft.bf16}  # which it is judged in
        return self._stage("base", "base", settings, [], make, seed=0)

    def dense(self, form: str) -> Judged:
        """Return the baseline without experts: the base tuned, or its LoRA, for the epochs of both of UpIT's trainings."""

        def make(tmp: Path, folder: Path) -> dict:
            model, trained = self._tuned_dense(form, self._form(form).whole, folder)
            if form == "ffn":
                self._save(model, trained, tmp / "model")
                return self._numbers(model, trained, lambda: self._load(tmp / "model"))
            weights = trained.state_dict()
            with ranks.leading() as main:
                if main:
                    dtype = getattr(torch, self.recipe.dtype)
                    pairs = {name: tensor.to(dtype) for name, tensor in weights.items() if "lora_" in name}
                    lora_baseline.save_lora(model, tmp / "model", pairs)
            return self._numbers(model, trained, lambda: self._load(tmp / "model", form))

        settings = self._settings(self._form(form).whole) | self._rank(form)
        return self._stage("dense", "SFT" if form == "ffn" else "LoRA", settings, [self.base()], make)

    def chosen(self, parents: str | None = None) -> int:
        """Return how many checkpoints become experts; `parents` as `pool` takes it."""
        n = self.recipe.experts.num_experts
        return n if parents == NONE else min(self.recipe.checkpoints.count, n)

    def check_steps(self, form: str, parents: str | None = None) -> None:
        """Raise ValueError if the first tuning has fewer steps than there are checkpoints to be chosen."""
        training, count = self._form(form).sft, self.chosen(parents)
        name = "num_experts" if parents == NONE else "checkpoints.count"
        batch = trainers.split_batch(training.batch_size, training.per_device_batch_size)
        steps = trainers.count_steps(len(self.train_rows), training.epochs, *batch)
        if steps < count:
            raise ValueError(
                f"{name} is {count}, {form}.sft has {steps} steps on {len(self.train_rows)} rows; want as many steps: more "
                "rows or smaller batches"
            )

    def prepared(self, form: str) -> Judged:
        """Return step 1's tuning; its folder has every checkpoint, the last one of them the tuned model or its LoRA."""
        self.check_steps(form)
        every, base = self.recipe.checkpoints.every_epochs, self.base()

        def make(tmp: Path, folder: Path) -> dict:
            experts = folder / "experts"  # where a killed training finds those that it has saved
            known = base.folder.resolve()  # whatever folder the experts are read from
            saver = ExpertCheckpoints(experts, every, base=known, dtype=self.recipe.dtype, overwrite=True)
            model, trained = self._tuned_dense(form, self._form(form).sft, folder, [saver])
            with ranks.leading() as main:
                if main:
                    # not moved: a run that is killed from here on begins at the Trainer's last checkpoint, and needs them
                    shutil.copytree(experts, tmp / "experts", copy_function=_link)
                    for expert in upit_experts.saved_experts(tmp / "experts"):
                        self.tokenizer.save_pretrained(expert)
            last = upit_experts.saved_experts(tmp / "experts")[-1]
            return self._numbers(model, trained, lambda: self._load(last, form))

        settings = self._settings(self._form(form).sft) | self._rank(form) | {"every_epochs": every}
        return self._stage("prepared", f"experts of {form}", settings, [base], make, holds="experts")

    def pool(self, form: str, parents: str | None = None) -> Pool:
        """Return the recipe's number of experts (steps 1 and 2); `parents` in the place of the recipe's, or NONE.

        NONE takes as many checkpoints as there are experts; else those that are missing are grown.
        """
        r, parents = self.recipe, parents or self.recipe.expansion.parents
        self.check_steps(form, parents)
        base, prepared, n = self.base(), self.prepared(form), r.experts.num_experts
        m = self.chosen(parents)
        chosen = upit_experts.choose_checkpoints(prepared.folder, m, r.checkpoints.which)
        grows = r.expansion.to_dict() | {"parents": parents} if m < n else None

        def make(tmp: Path, checkpoints: Path) -> dict:
            made = {"experts": [path.relative_to(self.out).as_posix() for path in chosen], "parents": []}
            if grows is None:
                return made
            start = time.perf_counter()
            # where a killed run finds those that it has grown
            grown, children = checkpoints / "experts", None
            with ranks.leading() as main:
                if main:
                    known = base.folder.resolve()
                    found = upit_expansion.expand_experts(chosen, n, grown, base=known, seed=self.seed, **grows)
                    children = [(child.folder.name, list(child.parents)) for child in found.children]
                    os.rename(grown, tmp / "experts")
            children = ranks.agree(children)
            made["experts"] += [name for name, _ in children]
            return made | {"parents": [pair for _, pair in children], "seconds": time.perf_counter() - start}

        settings = {"chosen": [path.name for path in chosen], "count": n, "expansion": grows}
        pool = self._stage("pool", f"{n} experts of {form}", settings, [prepared], make, holds="experts", result=Pool)
        found = [self.out / name for name in pool.experts[:m]] + [pool.folder / name for name in pool.experts[m:]]
        return pool._replace(experts=[str(path) for path in found])

    def _form(self, form: str):
        return getattr(self.recipe, form)

    def _rank(self, form: str) -> dict:
        """What of a form says how its model is made."""
        return {name: getattr(self.recipe.lora, name) for name in ("rank", "alpha")} if form == "lora" else {}

    def _tuned_dense(self, form: str, training: Training, folder: Path, callbacks=()) -> tuple:
        """Tune the base, or a LoRA of it."""
        model = self._load(self.base().folder.resolve(), device=False)  # an adapter names it
        if form == "lora":
            model = lora_baseline.add_mlp_lora(model, **self._rank(form), seed=self.seed)
        name = "SFT" if form == "ffn" else "LoRA"
        return model, self._train(name, model, self.train_rows, self.held_out, training, folder, callbacks)

    def _load(self, folder: Path, form: str = "ffn", device: bool = True):
        """Load a model, or the base with the adapter of a folder."""
        if form == "lora":
            return lora_baseline.load_lora(self._load(self.base().folder), folder)
        return ranks.load_model(folder, self.recipe.dtype, ranks.state().device if device else None)

    def _train(self, name: str, model, *arguments, **more) -> trainers.Trained:
        """Train in float32 what trains: AdamW's steps are smaller than what a bfloat16 weight can take on.

        What is frozen keeps its dtype, and autocast brings the two together; but float16, whose gradients would vanish.
        """
        for parameter in model.parameters():
            if parameter.requires_grad or parameter.dtype == torch.float16:
                parameter.data = parameter.data.float()
        if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
            more["bf16"] = True
        return super()._train(name, model, *arguments, **more)

    def _settings(self, training: Training) -> dict:
        return super()._settings(training) | ({"share": self.share} if self.share < 1 else {})

    def _numbers(self, model, trained: trainers.Trained, load: Callable) -> dict:
        """What a training's result says; judged anew, of what `load` gives, where it was not saved as it was trained."""
        course = course_of(trained) | {of: getattr(trained, of) for of in ("trained_parameters", "optimizer_bytes")}
        if self._is_saved_as_trained(model):
            return course | self._row_counts() | loss_of(trained.losses, trained.tokens) | sizes_of(model)
        del model, trained
        return course | self._judge(load)

    def _judge(self, load: Callable) -> dict:
        """Take the held-out rows' losses of the model that `load` gives; all processes share the rows."""
        ranks.free_memory()
        model, training = load(), self._form(self.recipe.forms[0]).sft
        batch, _ = trainers.split_batch(training.batch_size, training.per_device_batch_size)
        found = trainers.row_losses(model, self.held_out, self.tokenizer, batch_size=batch, bf16=training.bf16)
        return self._row_counts() | loss_of(*found) | sizes_of(model)

    def _row_counts(self) -> dict:
        return {"rows": {domain: len(self.part(f"{domain}-held_out")) for domain in self.recipe.domains}}

    def _documents(self) -> list[str]:
        return stage_rows.domain_documents(self.recipe.pretrain, [d.train for d in self.recipe.domains.values()])

    def data_key(self) -> str:
        """Return a hash of the base, of every domain's rows, and of what built-in ones are made of."""
        r, built_in = self.recipe, domains_key()
        sources = [source for d in r.domains.values() for source in (d.train, d.held_out) if source]
        rows = [built_in if source in DOMAINS else files_print(source) for source in sources]
        base = [built_in, r.pretrain.to_dict()] if r.pretrain else files_print(r.base_model)
        domains = {name: domain.to_dict() for name, domain in r.domains.items()}
        return hash_of({"format": self.FORMAT, "domains": domains, "length": r.max_length, "base": base, "rows": rows})

    def make_data(self, folder: Path) -> dict:
        """Write the tokenizer, and each domain's rows to tune on and to judge by."""
        r = self.recipe
        tokenizer = self._base_tokenizer(self._documents)
        self.say("reading and tokenizing " + ", ".join(f"{name}: {domain.train}" for name, domain in r.domains.items()))
        counts = {}
        for part, rows in stage_rows.tokenized_domains(tokenizer, r.domains, r.max_length).items():
            data.save_rows(rows, folder / part)
            counts[part] = len(rows)
        tokenizer.save_pretrained(folder / "tokenizer")
        said = ", ".join(f"{counts[f'{n}-train']:,} of {n} ({counts[f'{n}-held_out']:,} held out)" for n in r.domains)
        self.say(f"rows to tune on: {said}")
        return {"rows": counts, "domains": {name: domain.to_dict() for name, domain in r.domains.items()}}


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where the filesystem cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
