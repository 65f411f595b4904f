"""XFT by stages that are kept: each is trained once, lies in a folder of its own, and is read back by whoever needs it.

    base --sft-->                     a dense model, tuned
         --ewa-->                     a dense model: the mean of experts that were averaged while they were tuned
         --moe--> --merge-->          upcycled and tuned; merged without training (INIT, uniform, given coefficients)
                  --mix-->            merged with learned coefficients: XFT's result

OUT/<kind>-<hash>/ holds `model` and result.json, whole or not at all; the hash is over all that the stage depends on:
settings, parents, data, seed. Under `accelerate launch` every process runs the same calls: all train, rank 0 writes.
"""

import math
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from moe_runtime import data
from moe_runtime.config import SHARED_GATES, check_choice
from moe_runtime.hf import fit as trainers
from moe_runtime.hf import ranks
from moe_runtime.hf.averaging import AveragingCallback
from moe_runtime.hf.modeling import moe_layers
from moe_runtime.hf.tokenizer import train_tokenizer
from moe_runtime.methods import baselines, stage_rows, xft, xft_folders
from moe_runtime.methods.recipe import Recipe, Training, load_recipe, resolve_experts
from moe_runtime.methods.stage_folders import Result, fingerprint, hash_of, made_once, read_result, remove
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.merging import mixing

FORMAT = 2  # part of every hash: a change of what a stage does gives new folders
# how a training is carried out; the same up to rounding, but for a noisy gate, a balance loss and EWA, whose draws and means
# are of the rows that a process takes at once
NOT_HASHED = ("per_device_batch_size", "gradient_checkpointing", "save_steps")


class Stages:
    """The stages of one recipe and one seed, in the folder `out`, which any number of recipes, seeds and commands share.

    `recipe` is a Recipe, or what `load_recipe` takes. The base and the rows are the same for every seed.
    """

    def __init__(self, recipe: Recipe | str | Path, out: str | Path, seed: int = 0, say: Callable[[str], None] = print):
        for module in ("accelerate", "datasets", "tokenizers"):
            data.require(module)  # now, not after minutes of training
        self.recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        self.out, self.seed = Path(out), seed
        self.is_main = ranks.state().is_main_process
        self.say = say if self.is_main else lambda text: None
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out is {out}, which is a file; want a folder")
        for training in (self.recipe.sft, self.recipe.tune, self.recipe.mix, self.recipe.ewa_training):
            trainers.check_training(**asdict(training))
        trainers.quiet()
        self._rows: dict = {}
        self._key = ranks.agree(self._data_key())  # once, as the rows are read once

    @property
    def tokenizer(self):
        """The base's tokenizer; trained on the way where the recipe pre-trains a base."""
        return self._data("tokenizer")

    @property
    def train_rows(self):
        """The rows to tune on, tokenized."""
        return self._data("train")

    @property
    def held_out(self):
        """The rows to judge by, tokenized; the same for every stage and seed."""
        return self._data("held_out")

    def base(self) -> Result:
        """Return the dense model that all others start from: pre-trained here, or the recipe's, as safetensors."""
        pretrain, r = self.recipe.pretrain, self.recipe
        source = {"pretrain": pretrain.to_dict(), "length": r.data.max_length} if pretrain else {}

        def make(tmp: Path, folder: Path) -> dict:
            if pretrain is None:
                if self.is_main:
                    model = ranks.load_model(r.base_model, r.dtype)
                    ranks.save_whole(model, self.tokenizer, tmp / "model", r.dtype)
                return self._judge(tmp / "model")
            blocks = data.pack(self.tokenizer, stage_rows.documents(pretrain), r.data.max_length)
            model = trainers.small_llama(
                self.tokenizer, hidden_size=pretrain.hidden_size, intermediate_size=pretrain.intermediate_size,
                num_layers=pretrain.num_layers, max_length=r.data.max_length, seed=pretrain.seed,
            )  # fmt: skip
            training = Training(
                steps=pretrain.steps, batch_size=pretrain.batch_size, learning_rate=pretrain.learning_rate,
                optimizer="adamw_torch", max_grad_norm=1.0,
            )  # fmt: skip
            trained = self._train("base", model, blocks, training, folder, seed=pretrain.seed)
            return self._finish(model, trained, tmp / "model")

        settings = source | {"dtype": r.dtype, "evaluations": r.evaluations}
        return self._stage("base", "base", settings, [], make, seed=0)

    def sft(self, steps: int | None = None) -> Result:
        """Return the baseline: the dense base, tuned as the recipe's `sft` says, or for `steps` optimizer steps."""
        base, training = self.base(), _for_steps(self.recipe.sft, steps)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            trained = self._train("sft", model, self.train_rows, training, folder)
            return self._finish(model, trained, tmp / "model")

        return self._stage("sft", "sft", self._settings(training), [base], make)

    def moe(self, **moe_settings) -> Result:
        """Return the base, upcycled with the recipe's experts and `moe_settings` in their place, and tuned."""
        base, experts = self.base(), resolve_experts(self.recipe.experts | moe_settings)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            receipt = xft.upcycle(model, seed=42 + self.seed, **experts)
            self.say(str(receipt).replace("\n", "\n  "))
            trained = self._train("moe", model, self.train_rows, self.recipe.tune, folder)
            return self._finish(model, trained, tmp / "model")

        return self._stage("moe", "moe", self._settings(self.recipe.tune) | {"experts": experts}, [base], make)

    def mix(
        self, moe: Result, shared_rate: float | None = None, soup: bool = False, steps: int | None = None
    ) -> Result:
        """Return the dense model of a tuned mixture, its coefficients learned on the same rows; `soup` learns all of them."""
        training = _for_steps(self.recipe.mix, steps)
        rate = _check_rate(self.recipe.shared_rate if shared_rate is None else shared_rate)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(moe.folder, self.recipe.dtype)
            xft.to_mergeable(model, shared_rate=rate, soup=soup)
            trained = self._train("mix", model, self.train_rows, training, folder)
            layers = [module for module in model.modules() if isinstance(module, MergedMLP)]
            logits = [ranks.whole(layer.mixing_logits) for layer in layers]
            alpha = [mixing(row, None if soup else rate).tolist() for row in logits]
            course = _course(trained)
            del model, layers, trained  # before the dense model takes its memory
            self._merge(moe, tmp / "model", alpha=alpha)
            return course | self._judge(tmp / "model") | {"alpha": alpha}

        settings = self._settings(training) | {"shared_rate": rate, "soup": soup}
        return self._stage("mix", "soup" if soup else "xft", settings, [moe], make)

    def merge(self, moe: Result, shared_rate: float | None = None, alpha=None) -> Result:
        """Return the dense model of a tuned mixture without training: INIT, or `alpha` as `xft.merge` takes it."""
        if alpha is None:
            shared_rate = _check_rate(self.recipe.shared_rate if shared_rate is None else shared_rate)
        elif isinstance(alpha, str):
            check_choice("alpha", alpha, ("uniform",))
        name = "init" if alpha is None else alpha if isinstance(alpha, str) else "given"
        listed = alpha.tolist() if hasattr(alpha, "tolist") else alpha

        def make(tmp: Path, folder: Path) -> dict:
            used = self._merge(moe, tmp / "model", shared_rate=shared_rate, alpha=alpha)
            return self._judge(tmp / "model") | {"alpha": used}

        return self._stage("merge", name, {"shared_rate": shared_rate, "alpha": listed}, [moe], make)

    def ewa(self, share: float | None = None, schedule: str | None = None, partition: str = "random") -> Result:
        """Return the dense mean of experts that were averaged after every step; see methods.baselines.to_ewa."""
        base, training, ewa = self.base(), self.recipe.ewa_training, self.recipe.ewa
        ewa = replace(ewa, share=ewa.share if share is None else share, schedule=schedule or ewa.schedule)
        count = resolve_experts(self.recipe.experts).get("num_experts", 8)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            baselines.to_ewa(model, num_experts=count, partition=partition, seed=42 + self.seed)
            callbacks = [AveragingCallback(share=ewa.share, schedule=ewa.schedule)]
            trained = self._train("ewa", model, self.train_rows, training, folder, callbacks)
            self._save(model, trained, tmp / "experts")
            if self.is_main:
                alpha = "uniform" if partition == "router" else None
                xft_folders.merge_folder(tmp / "experts", tmp / "model", alpha=alpha)
                shutil.rmtree(tmp / "experts")
            course = _course(trained)
            del model, trained, callbacks
            return course | self._judge(tmp / "model")

        settings = self._settings(training) | {
            "share": ewa.share, "schedule_of_share": ewa.schedule, "partition": partition, "num_experts": count,
        }  # fmt: skip
        return self._stage("ewa", "ewa", settings, [base], make)

    def _stage(
        self, kind: str, name: str, settings: dict, parents: list[Result], make, seed: int | None = None
    ) -> Result:
        """Return the stage of these settings, made by `make(tmp, checkpoints)` if it is not there yet."""
        named = {
            "format": FORMAT, "kind": kind, "settings": settings, "seed": self.seed if seed is None else seed,
            "data": self._key, "parents": [parent.folder.parent.name for parent in parents],
        }  # fmt: skip
        folder = self.out / f"{kind}-{hash_of(named)}"
        checkpoints = folder.with_name(f"{folder.name}.checkpoints")
        before = sum(parent.total_seconds for parent in parents if not parent.folder.parent.name.startswith("base-"))

        def whole(tmp: Path) -> dict:
            self._data("tokenizer")  # by all processes, before rank 0 does something alone
            self.say(f"{name}, seed {named['seed']}: to {folder}")
            values = {"steps": 0, "seconds": 0.0, "history": []} | make(tmp, checkpoints)
            ranks.free_memory()
            total = before + values["seconds"]
            rate = values["steps"] / values["seconds"] if values["seconds"] else 0.0
            done = {"name": name, "total_seconds": total, "steps_per_second": rate, "alpha": None} | values
            took = f"{values['steps']} steps in {values['seconds']:.0f} s, " if values["steps"] else ""
            self.say(f"{name}, seed {named['seed']}: {took}held-out loss {values['loss']:.4f}")
            return done | {"made_of": named}

        made_once(folder, "result.json", whole)
        remove(checkpoints)
        return read_result(folder, name=name)

    def _settings(self, training: Training) -> dict:
        """What a training adds to its stage's hash."""
        values = {name: value for name, value in asdict(training).items() if name not in NOT_HASHED}
        return {"training": values, "dtype": self.recipe.dtype, "evaluations": self.recipe.evaluations}

    def _train(self, name: str, model, rows, training: Training, checkpoints: Path, callbacks=(), seed=None):
        settings = asdict(training)
        with _bar(name, self.is_main) as on_step:
            return trainers.train(
                model, rows, self.tokenizer, folder=checkpoints, held_out=self.held_out, on_step=on_step,
                evaluations=self.recipe.evaluations, seed=self.seed if seed is None else seed, callbacks=callbacks,
                **settings,
            )  # fmt: skip

    def _save(self, model, trained: trainers.Trained, folder: Path) -> None:
        """Gather the weights once and write them, on rank 0."""
        weights = trained.state_dict()
        if self.is_main:
            ranks.save_whole(model, self.tokenizer, folder, self.recipe.dtype, weights)

    def _finish(self, model, trained: trainers.Trained, folder: Path) -> dict:
        """Save, and return the numbers of what was saved: it is judged anew where it trained in another dtype."""
        self._save(model, trained, folder)
        if all(p.dtype == getattr(torch, self.recipe.dtype) for p in model.parameters()):
            return _numbers(model, trained)
        return _course(trained) | self._judge(folder)

    def _merge(self, moe: Result, target: Path, shared_rate: float | None = None, alpha=None) -> list:
        """Merge a tuned mixture to the dense model `target`, on rank 0; return the coefficients [L][E]."""
        used = None
        if self.is_main:
            model = ranks.load_model(moe.folder, self.recipe.dtype)
            used = _coefficients(model, shared_rate, alpha)
            ranks.save_whole(xft.merge(model, alpha=used), self.tokenizer, target, self.recipe.dtype)
        return ranks.agree(used)

    def _judge(self, folder: Path) -> dict:
        """Load the model of a folder and take the held-out rows' losses; all processes share the rows."""
        ranks.agree()  # until rank 0 has written it
        ranks.free_memory()
        model = ranks.load_model(folder, self.recipe.dtype, ranks.state().device)
        tune = self.recipe.tune
        batch, _ = trainers.split_batch(tune.batch_size, tune.per_device_batch_size)
        losses, tokens = trainers.row_losses(model, self.held_out, self.tokenizer, batch_size=batch, bf16=tune.bf16)
        return _loss(losses, tokens) | _sizes(model)

    def _data_key(self) -> str:
        r, pretrain = self.recipe, self.recipe.pretrain
        python = platform.python_version()
        base = [python, pretrain.to_dict()] if pretrain else fingerprint(r.base_model)
        rows = [python if s == data.BUILT_IN else fingerprint(s) for s in (r.data.train, r.data.held_out) if s]
        return hash_of({"format": FORMAT, "data": r.data.to_dict(), "base": base, "rows": rows})

    def _data(self, part: str):
        """Return the tokenizer or rows, read, tokenized and kept on the first use."""
        if part not in self._rows:
            folder = self.out / f"data-{self._key}"
            made_once(folder, "rows.json", self._make_data)
            if part == "tokenizer":
                self._rows[part] = ranks.load_tokenizer(folder / part)
            else:
                self._rows[part] = data.load_rows(folder / part)
        return self._rows[part]

    def _make_data(self, tmp: Path) -> dict:
        if not self.is_main:
            return {}
        r = self.recipe
        if r.pretrain is not None:
            tokenizer = train_tokenizer(stage_rows.documents(r.pretrain), r.pretrain.vocab_size)
        else:
            tokenizer = ranks.load_tokenizer(r.base_model)
        if r.data.prompt == "magicoder":
            tokenizer.chat_template = data.MAGICODER_CHAT  # the base's own, if any, is not what the model learns
        tokenizer.save_pretrained(tmp / "tokenizer")
        self.say(f"reading and tokenizing {r.data.train}")
        train, held_out = stage_rows.tokenized(tokenizer, r)
        data.save_rows(train, tmp / "train")
        data.save_rows(held_out, tmp / "held_out")
        self.say(f"{len(train):,} rows to tune on, {len(held_out):,} held out")
        return {"train": len(train), "held_out": len(held_out), "data": r.data.to_dict()}


def run(recipe: Recipe | str | Path, out: str | Path, seed: int | None = None, say=print) -> list[Result]:
    """Run the whole method and say what came out; return the base, the mixture, its INIT merge and the learned one.

    `seed` is the recipe's unless given. The last result's folder is the dense model.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    gate = recipe.experts.get("gate", "xft")
    if gate not in SHARED_GATES:
        raise ValueError(
            f"gate is {gate!r}, which has no shared expert; want one of {', '.join(SHARED_GATES)} in experts"
        )
    stages = Stages(recipe, out, seed=recipe.seed if seed is None else seed, say=say)
    base, moe = stages.base(), stages.moe()
    results = [base, moe, stages.merge(moe), stages.mix(moe)]
    stages.say(f"{'':8s}{'loss':>9s}{'perplexity':>12s}{'parameters':>16s}{'per token':>16s}{'train s':>9s}")
    for r in results:
        sizes = f"{r.parameters:16,}{r.active_parameters:16,}"
        stages.say(f"{r.name:8s}{r.loss:9.4f}{math.exp(min(r.loss, 700)):12.2f}{sizes}{r.total_seconds:9.0f}")
    stages.say(f"the dense model: {results[-1].folder}")
    return results


def _coefficients(model, shared_rate: float | None, alpha) -> list:
    """Return [L][E]: what `alpha` says, or INIT's; raises ValueError as `xft.merge` would."""
    configs = [layer.config for layer in moe_layers(model).values()]
    if alpha is None:
        return [xft.init_mixture(config, shared_rate).tolist() for config in configs]
    if isinstance(alpha, str):
        return [[1 / config.num_experts] * config.num_experts for config in configs]
    rows = torch.as_tensor(alpha, dtype=torch.float32)
    return (rows.expand(len(configs), -1) if rows.dim() == 1 else rows).tolist()


def _for_steps(training: Training, steps: int | None) -> Training:
    return training if steps is None else replace(training, epochs=None, steps=steps)


def _check_rate(shared_rate: float) -> float:
    if not 0 <= shared_rate <= 1:
        raise ValueError(f"shared_rate is {shared_rate}; want 0 to 1, the shared expert's mixing coefficient")
    return shared_rate


def _numbers(model, trained: trainers.Trained) -> dict:
    """A training's part of a result, of the model that was trained."""
    return _loss(trained.losses, trained.tokens) | _sizes(model) | _course(trained)


def _course(trained: trainers.Trained) -> dict:
    """How a training went, without where it ended: a model made of the trained one is judged anew."""
    history = trained.history
    return {"steps": trained.steps, "seconds": history.seconds, "history": history.held_out}


def _loss(losses: list[float], tokens: list[int]) -> dict:
    return {"loss": trainers.mean_loss(losses, tokens), "losses": losses, "tokens": tokens}


def _sizes(model) -> dict:
    total, active = ranks.sizes(model)
    return {"parameters": total, "active_parameters": active}


@contextmanager
def _bar(name: str, is_main: bool) -> Iterator[Callable]:
    """A progress bar on a terminal; nothing elsewhere."""
    from tqdm import tqdm

    with tqdm(desc=name, unit="step", leave=False, disable=not (is_main and sys.stderr.isatty())) as progress:

        def on_step(step: int, total: int, loss: float) -> None:
            progress.total = total
            progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            progress.update(step - progress.n)

        yield on_step
