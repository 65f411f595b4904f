"""The stages of an XFT study.

    base --sft-->                     a tuned dense model; --average--> the mean of its weights over
                                      the steps
         --ewa-->                     a dense model: the mean of experts averaged during tuning
         --moe--> --merge-->          upcycled and tuned; merged without training (INIT, uniform,
                                      given coefficients)
                  --mix-->            merged with learned coefficients: XFT's result

`papers.engine.stages` says how stages are stored and what their hash covers.
"""

import contextlib
import functools
import math
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from moe_runtime.config import check_choice, check_shared_rate
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Training
from moe_runtime.io import rows as data
from moe_runtime.io.files import files_print, hash_of, read_json
from moe_runtime.io.prompts import TEMPLATES
from moe_runtime.methods import xft
from moe_runtime.methods.xft import baselines, folders
from moe_runtime.methods.xft.baselines import AveragingCallback, WeightAverages
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import Router
from moe_runtime.ops.merging import mixing
from papers.engine import stages as stage_rows
from papers.engine.corpora import domains_key, joined_rows, standard_library_pairs
from papers.engine.stages import KeptStages, Result, course_of, loss_of, sizes_of
from papers.xft.recipe import Recipe, check_shared, resolve_experts

# built-in sources of three domains, also used to train the base
JOINED = ("code+prose+sums", "code+prose+arithmetic")
SOURCES = {data.BUILT_IN: standard_library_pairs} | {
    of: functools.partial(joined_rows, of.split("+")) for of in JOINED
}


class Stages(KeptStages):
    """The stages of one recipe and one seed."""

    FORMAT = 3
    Recipe = Recipe

    def trainings(self) -> tuple[Training, ...]:
        """Return the recipe's trainings."""
        return self.recipe.sft, self.recipe.tune, self.recipe.mix, self.recipe.ewa_training

    @property
    def train_rows(self):
        """The tokenized training rows."""
        return self.part("train")

    @property
    def held_out(self):
        """The tokenized rows for evaluation; the same for every stage and seed."""
        return self.part("held_out")

    @property
    def watched(self):
        """The rows for validation during training."""
        return self.part("validation") if self.recipe.data.validation_rows else self.held_out

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of the examples; a single one unless the source joins several."""
        train = self.recipe.data.train
        return tuple(train.split("+")) if train in JOINED else ("examples",)

    def domains_of(self, part: str) -> list[int]:
        """Return for each row of a part the index of its domain in `domains`."""
        count = len(self.part(part))
        kept = read_json(self.out / f"data-{self._key}" / "rows.json")
        return kept["domains"].get(part, [0] * count)

    def by_domain(self, result: Result) -> Result:
        """Return a result with held-out rows ordered by domain, as tables with a column per domain
        require.
        """
        places = self.domains_of("held_out")
        order = sorted(range(len(places)), key=places.__getitem__)
        rows = {domain: places.count(i) for i, domain in enumerate(self.domains)}
        parts = {}
        for of in ("losses", "tokens", "exact"):
            parts[of] = [getattr(result, of)[i] for i in order]
        return result._replace(rows=rows, **parts)

    def _mixture_rows(self) -> tuple:
        """The examples for tuning the MoE model, and those for learning to mix."""
        count = self.recipe.mix_rows
        if count:
            return data.hold_out(self.train_rows, count, name="mix_rows")
        return (self.train_rows, self.train_rows)

    def _documents(self) -> list[str]:
        """The texts for training the base and its tokenizer."""
        pretrain = self.recipe.pretrain
        if pretrain.domains or len(self.domains) > 1:
            return stage_rows.domain_documents(pretrain, self.domains)
        return stage_rows.documents(pretrain)

    def base(self) -> Result:
        """Return the dense model that all others start from: pre-trained here, or the recipe's, as
        safetensors.
        """
        pretrain = self.recipe.pretrain
        r = self.recipe
        if r.mix_rows:
            self._mixture_rows()  # raises before minutes of training
        source = {"pretrain": pretrain.to_dict(), "length": r.data.max_length} if pretrain else {}

        def make(tmp: Path, folder: Path) -> dict:
            if pretrain is None:
                self._copy_base(tmp / "model")
                return self._judge(tmp / "model")
            blocks = data.pack(self.tokenizer, self._documents(), r.data.max_length)
            model, trained = self._pretrain(blocks, self.watched, folder, r.data.max_length)
            return self._finish(model, trained, tmp / "model")

        settings = source | {"dtype": r.dtype, "evaluations": r.evaluations}
        return self._stage("base", "base", settings, [], make, seed=0)

    def sft(self, steps: int | None = None, averages: bool = False, **changes) -> Result:
        """Return the baseline: the dense base tuned by the recipe's `sft`, optionally with other
        `steps` or `changes`.

        `averages` records the averages for `average`; they cannot be saved in checkpoints, so such
        a run saves none.
        """
        base = self.base()
        training = _for_steps(self.recipe.sft, steps).change(**changes)
        training = training.change(save_steps=None) if averages else training

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            kept = WeightAverages()
            trained = self._train(
                "sft",
                model,
                self.train_rows,
                self.watched,
                training,
                folder,
                [kept] if averages else [],
            )
            with ranks.leading() as main:
                for name, average in kept.models.items() if main else ():
                    narrow = average.module.to(getattr(torch, self.recipe.dtype))
                    ranks.save_whole(narrow, self.tokenizer, tmp / name, self.recipe.dtype)
            return self._finish(model, trained, tmp / "model")

        settings = self._settings(training) | ({"averages": True} if averages else {})
        return self._stage("sft", "sft", settings, [base], make)

    def average(self, sft: Result, kind: str) -> Result:
        """Return an average, "ema" or "swa", of the weights over the steps of an SFT run with
        `averages`.
        """

        def make(tmp: Path, folder: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    shutil.copytree(sft.folder.with_name(kind), tmp / "model")
            return self._judge(tmp / "model")

        return self._stage("average", kind, {"of": kind}, [sft], make)

    def moe(self, by_domain: bool = False, **moe_settings) -> Result:
        """Return the base, upcycled with the recipe's experts and `moe_settings`, and tuned,
        optionally `routed_by_domain`.
        """
        base = self.base()
        experts = resolve_experts(self.recipe.experts | moe_settings)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            receipt = xft.upcycle(model, layers=self.recipe.layers, seed=42 + self.seed, **experts)
            self.say(str(receipt).replace("\n", "\n  "))
            with (
                routed_by_domain(model, self._known_domains())
                if by_domain
                else contextlib.nullcontext()
            ):
                trained = self._train(
                    "moe", model, self._mixture_rows()[0], self.watched, self.recipe.tune, folder
                )
            return {"upcycled_error": receipt.error} | self._finish(
                model, trained, tmp / "model", anew=by_domain
            )

        more = {
            "mix_rows": self.recipe.mix_rows,
            "layers": self.recipe.layers,
            "by_domain": by_domain or None,
        }
        settings = self._settings(self.recipe.tune) | {"experts": experts}
        for name, value in more.items():
            if value is not None:
                settings[name] = value
        return self._stage("moe", "moe", settings, [base], make)

    def mix(
        self,
        moe: Result,
        shared_rate: float | None = None,
        soup: bool = False,
        steps: int | None = None,
    ) -> Result:
        """Return the merged dense model with trained mixing coefficients; `soup` also trains the
        shared expert's.

        They are learned on the rows that the MoE model was tuned on, or on the recipe's `mix_rows`.
        """
        training = _for_steps(self.recipe.mix, steps)
        rate = self.recipe.shared_rate if shared_rate is None else shared_rate
        check_shared_rate(rate)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(moe.folder, self.recipe.dtype)
            xft.to_mergeable(model, shared_rate=rate, soup=soup)
            trained = self._train(
                "mix", model, self._mixture_rows()[1], self.watched, training, folder
            )
            layers = []
            for module in model.modules():
                if isinstance(module, MergedMLP):
                    layers.append(module)
            logits = [ranks.whole(layer.mixing_logits) for layer in layers]
            alpha = []
            for row in logits:
                alpha.append(mixing(row, None if soup else rate).tolist())
            course = course_of(trained)
            del model, layers, trained  # frees memory for the dense model
            self._merge(moe, tmp / "model", alpha=alpha)
            return course | self._judge(tmp / "model") | {"alpha": alpha}

        settings = self._settings(training) | {"shared_rate": rate, "soup": soup}
        return self._stage("mix", "soup" if soup else "xft", settings, [moe], make)

    def merge(self, moe: Result, shared_rate: float | None = None, alpha=None) -> Result:
        """Merge a tuned MoE model without training: with INIT's coefficients, or `alpha` as in
        `xft.merge`.
        """
        if alpha is None:
            shared_rate = self.recipe.shared_rate if shared_rate is None else shared_rate
            check_shared_rate(shared_rate)
        elif isinstance(alpha, str):
            check_choice("alpha", alpha, ("uniform",))
        name = "init" if alpha is None else alpha if isinstance(alpha, str) else "given"
        listed = alpha.tolist() if hasattr(alpha, "tolist") else alpha

        def make(tmp: Path, folder: Path) -> dict:
            used = self._merge(moe, tmp / "model", shared_rate=shared_rate, alpha=alpha)
            return self._judge(tmp / "model") | {"alpha": used}

        return self._stage(
            "merge", name, {"shared_rate": shared_rate, "alpha": listed}, [moe], make
        )

    def ewa(
        self, share: float | None = None, schedule: str | None = None, partition: str = "random"
    ) -> Result:
        """Return the dense mean of experts averaged after every step; see
        methods.xft.baselines.to_ewa.
        """
        base = self.base()
        training = self.recipe.ewa_training
        ewa = self.recipe.ewa
        ewa = ewa.change(
            share=ewa.share if share is None else share, schedule=schedule or ewa.schedule
        )
        count = resolve_experts(self.recipe.experts).get("num_experts", 8)

        def make(tmp: Path, folder: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            baselines.to_ewa(
                model,
                num_experts=count,
                layers=self.recipe.layers,
                partition=partition,
                seed=42 + self.seed,
            )
            callbacks = [AveragingCallback(share=ewa.share, schedule=ewa.schedule)]
            trained = self._train(
                "ewa", model, self.train_rows, self.watched, training, folder, callbacks
            )
            self._save(model, trained, tmp / "experts")
            with ranks.leading() as main:
                if main:
                    alpha = "uniform" if partition == "router" else None
                    folders.merge_folder(tmp / "experts", tmp / "model", alpha=alpha)
                    shutil.rmtree(tmp / "experts")
            course = course_of(trained)
            del model, trained, callbacks
            return course | self._judge(tmp / "model")

        settings = self._settings(training) | {
            "share": ewa.share,
            "schedule_of_share": ewa.schedule,
            "partition": partition,
            "num_experts": count,
        }
        if self.recipe.layers is not None:
            settings["layers"] = self.recipe.layers
        return self._stage("ewa", "ewa", settings, [base], make)

    def _known_domains(self) -> dict[tuple[int, ...], int]:
        """Return the domain index of every training and validation row, by its ids."""
        parts = ("train", "validation" if self.recipe.data.validation_rows else "held_out")
        found = (
            zip(self.part(part)["input_ids"], self.domains_of(part), strict=True) for part in parts
        )
        return {tuple(ids): place for pairs in found for ids, place in pairs}

    def _finish(self, model, trained: trainers.Trained, folder: Path, anew: bool = False) -> dict:
        """Save the model and return its results; it is evaluated again if it was trained in another
        dtype.
        """
        self._save(model, trained, folder)
        if self._is_saved_as_trained(model) and self.watched is self.held_out and not anew:
            return _numbers(model, trained)
        return course_of(trained) | self._judge(folder)

    def _merge(
        self, moe: Result, target: Path, shared_rate: float | None = None, alpha=None
    ) -> list:
        """Merge a tuned MoE model to the dense model `target`, on rank 0; return the coefficients
        [L][E].
        """
        used = None
        with ranks.leading() as main:
            if main:
                used = folders.merge_folder(
                    moe.folder, target, shared_rate=shared_rate, alpha=alpha
                ).alpha
        return ranks.agree(used)

    def _judge(self, folder: Path) -> dict:
        """Load the model of a folder and compute the held-out rows' losses; all processes share the
        rows.
        """
        ranks.free_memory()
        model = ranks.load_model(folder, self.recipe.dtype, ranks.state().device)
        tune = self.recipe.tune
        batch, _ = trainers.split_batch(tune.batch_size, tune.per_device_batch_size)
        judge = functools.partial(
            trainers.row_losses, model, tokenizer=self.tokenizer, batch_size=batch, bf16=tune.bf16
        )
        if self.watched is self.held_out:
            validation = {}
        else:
            validation = {"validation": trainers.mean_loss(*judge(self.watched))}
        return loss_of(*judge(self.held_out)) | validation | sizes_of(model)

    def data_key(self) -> str:
        """Return a hash of the base, the recipe's rows and the version of Python that built-in text
        comes from.
        """
        r = self.recipe
        pretrain = self.recipe.pretrain
        python = platform.python_version()
        made = dict.fromkeys(JOINED, domains_key()) | {data.BUILT_IN: python}
        base = [python, pretrain.to_dict()] if pretrain else files_print(r.base_model)
        rows = [made[s] if s in made else files_print(s) for s in r.data.sources]
        return hash_of(
            {"format": self.FORMAT, "data": r.data.to_dict(), "base": base, "rows": rows}
        )

    def make_data(self, folder: Path) -> dict:
        """Write the tokenizer and the training and held-out rows."""
        r = self.recipe
        tokenizer = self._base_tokenizer(self._documents)
        # a chat template of the base is not the one trained on
        tokenizer.chat_template = TEMPLATES.get(r.data.prompt, tokenizer.chat_template)
        tokenizer.save_pretrained(folder / "tokenizer")
        self.say(f"reading and tokenizing {r.data}")
        count = r.data.held_out_rows + (r.data.validation_rows or 0)
        joined = len(self.domains)
        how = {"row_ids": joined > 1, "prompt": r.data.prompt, "train_on": r.data.train_on}
        train, held_out = (
            data.tokenize_pairs(tokenizer, rows, r.data.max_length, limit=limit, **how)
            for rows, limit in zip(
                stage_rows.split_rows(r.data.change(held_out_rows=count), SOURCES),
                (r.data.limit, count),
                strict=True,
            )
        )
        parts = {"train": train, "held_out": held_out}
        if r.data.validation_rows:
            judging = min(r.data.held_out_rows, len(held_out) - 1)
            parts["held_out"] = held_out.select(range(judging))
            parts["validation"] = held_out.select(range(judging, len(held_out)))
        counts = {name: len(rows) for name, rows in parts.items()}
        domains = {}
        for name, rows in parts.items():
            if joined > 1:  # one row of each domain in turn
                domains[name] = [i % joined for i in rows["row_id"]]
                rows = rows.remove_columns("row_id")
            data.save_rows(rows, folder / name)
        watching = f", {counts['validation']:,} to choose by" if "validation" in counts else ""
        self.say(f"{counts['train']:,} rows to tune on, {counts['held_out']:,} held out{watching}")
        return counts | {"data": r.data.to_dict(), "domains": domains}


def run(
    recipe: Recipe | str | Path, out: str | Path, seed: int | None = None, say=print
) -> list[Result]:
    """Run the whole method and report the results; return the base, the MoE model, its INIT merge
    and the learned merge.

    `seed` is the recipe's unless given. The last result's folder is the dense model.
    """
    stages = Stages(recipe, out, seed=seed, say=say)
    check_shared(stages.recipe)
    base = stages.base()
    moe = stages.moe()
    results = [base, moe, stages.merge(moe), stages.mix(moe)]
    stages.say(
        f"{'':8s}{'loss':>9s}{'perplexity':>12s}{'parameters':>16s}{'per token':>16s}{'train s':>9s}"
    )
    for r in results:
        sizes = f"{r.parameters:16,}{r.active_parameters:16,}"
        stages.say(
            f"{r.name:8s}{r.loss:9.4f}{math.exp(min(r.loss, 700)):12.2f}{sizes}{r.total_seconds:9.0f}"
        )
    stages.say(f"the dense model: {results[-1].folder}")
    return results


@contextlib.contextmanager
def routed_by_domain(model, domains: Mapping[tuple[int, ...], int]) -> Iterator[None]:
    """Route all tokens of an example to the shared expert and its domain's routed expert, with the
    router's weights.

    `domains` maps each example's ids, without padding, to its domain index. For experiments with
    experts that must differ.
    """
    chosen = []

    def see(module, args, batch):
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        places = torch.tensor(
            [domains[tuple(ids[mask].tolist())] for ids, mask in rows],
            device=batch["input_ids"].device,
        )
        experts = 1 + places.repeat_interleave(batch["input_ids"].shape[1])
        # expert 0, the shared one, comes last
        chosen[:] = [torch.stack([experts, torch.zeros_like(experts)], 1)]

    def give(router, args, kwargs):
        return args, kwargs | {"topk_idx": chosen[0]}

    hooks = [(model, see)] + [
        (module, give) for module in model.modules() if isinstance(module, Router)
    ]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _for_steps(training: Training, steps: int | None) -> Training:
    return training if steps is None else training.change(epochs=None, steps=steps)


def _numbers(model, trained: trainers.Trained) -> dict:
    """Return the fields of a result that training determines."""
    return (
        loss_of(trained.losses, trained.tokens, trained.exact)
        | sizes_of(model)
        | course_of(trained)
    )
