"""The stages of an XFT study.

    base --sft-->               a tuned dense model; --average--> the mean of its weights over the
                                steps
         --ewa-->               a dense model: the mean of experts averaged during tuning
         --moe--> --merge-->    upcycled and tuned; merged without training (INIT)
                  --mix-->      merged with learned coefficients: XFT's result

`papers.engine.stages` says how stages are stored and what their hash covers.
"""

import contextlib
import functools
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from moe_runtime.config import check_shared_rate
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Training
from moe_runtime.io import rows as data
from moe_runtime.io.files import hash_of, read_json
from moe_runtime.io.prompts import TEMPLATES
from moe_runtime.methods import xft
from moe_runtime.methods.xft import baselines, folders
from moe_runtime.methods.xft.baselines import AveragingCallback, WeightAverages
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import Router
from moe_runtime.ops.merging import mixing
from papers.engine import stages as stage_rows
from papers.engine.corpora import domain_text, domains_key, joined_rows, standard_library_pairs
from papers.engine.domains import count as count_slots
from papers.engine.domains import shares
from papers.engine.everyday import TASKS, joined_tasks
from papers.engine.stages import KeptStages, StageResult, contents_of, course_of, loss_of, sizes_of
from papers.xft.recipe import Recipe, check_shared, resolve_experts

# built-in sources of three domains, also used to train the base
JOINED = ("code+prose+sums", "code+prose+arithmetic")
ALL_TASKS = "+".join(TASKS)
SOURCES = {data.BUILT_IN: standard_library_pairs, ALL_TASKS: joined_tasks}
for _of in JOINED:
    SOURCES[_of] = functools.partial(joined_rows, _of.split("+"))


class XftStages(KeptStages):
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
        if self.recipe.data.validation_rows:
            return self.part("validation")
        return self.held_out

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of the examples; a single one unless the source joins several."""
        train = self.recipe.data.train
        return tuple(train.split("+")) if train in (*JOINED, ALL_TASKS) else ("examples",)

    def domains_of(self, part: str) -> list[int]:
        """Return for each row of a part the index of its domain in `domains`."""
        count = len(self.part(part))
        counts = read_json(self.out / f"data-{self._key}" / "rows.json")
        return counts["domains"].get(part, [0] * count)

    def by_domain(self, result: StageResult) -> StageResult:
        """Return a result with held-out rows ordered by domain, as tables with a column per domain
        require.
        """
        indices = self.domains_of("held_out")
        order = sorted(range(len(indices)), key=indices.__getitem__)
        return result._replace(
            rows={domain: indices.count(i) for i, domain in enumerate(self.domains)},
            losses=[result.losses[row] for row in order],
            tokens=[result.tokens[row] for row in order],
            exact=[result.exact[row] for row in order],
        )

    def _mixture_rows(self) -> tuple:
        """The examples for tuning the MoE model, and those for learning to mix."""
        count = self.recipe.mix_rows
        if count is None:
            return self.train_rows, self.train_rows
        return data.hold_out(self.train_rows, count, name="mix_rows")

    def _documents(self) -> list[str]:
        """The texts for training the base and its tokenizer."""
        pretrain = self.recipe.pretrain
        if pretrain.domains or len(self.domains) > 1:
            return stage_rows.domain_documents(pretrain, self.domains)
        return stage_rows.documents(pretrain)

    def base(self) -> StageResult:
        """Return the dense model that all others start from: pre-trained here, or the recipe's, as
        safetensors.
        """
        r = self.recipe
        if r.mix_rows:
            self._mixture_rows()  # raises before minutes of training
        settings = {"dtype": r.dtype, "evaluations": r.evaluations}
        if r.pretrain is not None:
            settings |= {
                "pretrain": r.pretrain.to_dict(),
                "length": r.data.max_length,
            }

        def make(tmp: Path, checkpoints: Path) -> dict:
            if r.pretrain is None:
                self._copy_base(tmp / "model")
                return self._judge(tmp / "model")
            blocks = data.pack(
                self.tokenizer,
                self._documents(),
                r.data.max_length,
            )
            model, trained = self._pretrain(
                blocks,
                self.watched,
                checkpoints,
                r.data.max_length,
            )
            return self._finish(model, trained, tmp / "model")

        return self._stage("base", "base", settings, [], make, seed=0)

    def sft(self, steps: int | None = None, averages: bool = False, **changes) -> StageResult:
        """Return the baseline: the dense base tuned by the recipe's `sft`, optionally with other
        `steps` or `changes`.

        `averages` records the averages for `average`; they cannot be saved in checkpoints, so such
        a run saves none.
        """
        base = self.base()
        if steps is not None:
            changes |= {"epochs": None, "steps": steps}
        training = self.recipe.sft.change(**changes)
        settings = self._settings(training)
        if averages:
            training = training.change(save_steps=None)
            settings["averages"] = True

        def make(tmp: Path, checkpoints: Path) -> dict:
            model = ranks.load_model(base.folder, self.recipe.dtype)
            means = WeightAverages()
            means.keeps["last"] = torch.zeros_like  # nothing of the earlier mean: the last weights
            callbacks = [means] * averages
            trained = self._tuned("sft", model, training, checkpoints, callbacks)
            if averages:
                with ranks.leading() as main:
                    if main:
                        for name, mean in means.models.items():
                            whole = mean.module.to(getattr(torch, self.recipe.dtype))
                            ranks.save_whole(
                                whole,
                                self.tokenizer,
                                tmp / name,
                                self.recipe.dtype,
                            )
            return self._finish(model, trained, tmp / "model")

        return self._stage("sft", "sft", settings, [base], make)

    def _tuned(self, name: str, model, training: Training, checkpoints: Path, callbacks=()):
        """Train a model on the training rows."""
        rows = (self.train_rows, self.watched)
        return self._train(
            name,
            model,
            *rows,
            training,
            checkpoints,
            callbacks,
        )

    def average(self, sft: StageResult, kind: str) -> StageResult:
        """Return an average, "ema" or "swa", of the weights over the steps of an SFT run with
        `averages`, or those of its "last" step.
        """

        def make(tmp: Path, folder: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    shutil.copytree(sft.folder.with_name(kind), tmp / "model")
            return self._judge(tmp / "model")

        return self._stage(
            "average",
            kind,
            {"of": kind},
            [sft],
            make,
        )

    def pair(self, one: StageResult, other: StageResult, kind: str) -> StageResult:
        """Return two dense models as one: as "ensemble" with the mean of their logits, as "merge"
        with the mean of their weights.
        """

        def make(tmp: Path, checkpoints: Path) -> dict:
            device = ranks.state().device
            model = ranks.load_model(one.folder, self.recipe.dtype, device)
            second = ranks.load_model(other.folder, self.recipe.dtype, device)
            if kind == "merge":
                with torch.no_grad():
                    for weight, w in zip(model.parameters(), second.parameters(), strict=True):
                        weight.lerp_(w, 0.5)
                return self._judge(model)

            def mean(module, args, kwargs, output):
                output.logits = (output.logits + second(*args, **kwargs).logits) / 2
                return output

            model.register_forward_hook(mean, with_kwargs=True)
            count = 2 * one.parameters
            return self._judge(model) | {"parameters": count, "active_parameters": count}

        return self._stage("pair", kind, {"pair": kind}, [one, other], make)

    def moe(self, by_domain: bool = False, **moe_settings) -> StageResult:
        """Return the base, upcycled with the recipe's experts and `moe_settings`, and tuned,
        optionally `routed_by_domain`.
        """
        base = self.base()
        r = self.recipe
        experts = resolve_experts(r.experts | moe_settings)
        settings = self._settings(r.tune) | {"experts": experts}
        if r.mix_rows is not None:
            settings["mix_rows"] = r.mix_rows
        if r.layers is not None:
            settings["layers"] = r.layers
        if by_domain:
            settings["by_domain"] = True

        def make(tmp: Path, checkpoints: Path) -> dict:
            model = ranks.load_model(base.folder, r.dtype)
            receipt = xft.upcycle(
                model,
                layers=r.layers,
                seed=42 + self.seed,
                **experts,
            )
            self.say(str(receipt).replace("\n", "\n  "))
            rows = (self._mixture_rows()[0], self.watched)
            routing = contextlib.nullcontext()
            if by_domain:
                routing = routed_by_domain(model, self._known_domains())
            with routing:
                trained = self._train(
                    "moe",
                    model,
                    *rows,
                    r.tune,
                    checkpoints,
                )
            result = self._finish(
                model,
                trained,
                tmp / "model",
                anew=by_domain,
            )
            return {"upcycled_error": receipt.error, "load": self._load(tmp / "model")} | result

        return self._stage("moe", "moe", settings, [base], make)

    def _load(self, folder: Path) -> list[list[float]]:
        """Return the share [L][E] of the watched rows' slots that each expert of a model gets."""
        counted = None
        with ranks.leading() as main:
            if main:
                model = ranks.load_model(folder, self.recipe.dtype, ranks.state().device)
                counted, _ = count_slots(model, self.tokenizer, {"all": self.watched})
        return shares(ranks.agree(counted))["all"].tolist()

    def mix(self, moe: StageResult, shared_rate: float | None = None) -> StageResult:
        """Return the merged dense model with trained mixing coefficients.

        They are learned on the rows that the MoE model was tuned on, or on the recipe's `mix_rows`.
        """
        training = self.recipe.mix
        rate = self._rate(shared_rate)

        def make(tmp: Path, checkpoints: Path) -> dict:
            model = ranks.load_model(moe.folder, self.recipe.dtype)
            xft.to_mergeable(model, shared_rate=rate)
            rows = (self._mixture_rows()[1], self.watched)
            trained = self._train(
                "mix",
                model,
                *rows,
                training,
                checkpoints,
            )
            alpha = []
            for module in model.modules():
                if isinstance(module, MergedMLP):
                    alpha.append(mixing(ranks.whole(module.mixing_logits), rate).tolist())
            course = course_of(trained)
            del model, module, trained  # frees memory for the dense model
            self._merge(moe, tmp / "model", alpha=alpha)
            return course | self._judge(tmp / "model") | {"alpha": alpha}

        # a soup would also learn the shared expert's coefficient; kept in the hash
        settings = self._settings(training) | {"shared_rate": rate, "soup": False}
        return self._stage("mix", "xft", settings, [moe], make)

    def merge(self, moe: StageResult, shared_rate: float | None = None) -> StageResult:
        """Merge a tuned MoE model without training, with INIT's coefficients."""
        rate = self._rate(shared_rate)

        def make(tmp: Path, checkpoints: Path) -> dict:
            alpha = self._merge(moe, tmp / "model", shared_rate=rate)
            return self._judge(tmp / "model") | {"alpha": alpha}

        settings = {"shared_rate": rate, "alpha": None}
        return self._stage("merge", "init", settings, [moe], make)

    def _rate(self, shared_rate: float | None) -> float:
        rate = self.recipe.shared_rate if shared_rate is None else shared_rate
        check_shared_rate(rate)
        return rate

    def ewa(self) -> StageResult:
        """Return the dense mean of experts averaged after every step; see
        methods.xft.baselines.to_ewa.
        """
        base = self.base()
        r = self.recipe
        ewa = r.ewa
        count = resolve_experts(r.experts).get("num_experts", 8)
        settings = self._settings(r.ewa_training) | {
            "share": ewa.share,
            "schedule_of_share": ewa.schedule,
            "partition": "random",
            "num_experts": count,
        }
        if r.layers is not None:
            settings["layers"] = r.layers

        def make(tmp: Path, checkpoints: Path) -> dict:
            model = ranks.load_model(base.folder, r.dtype)
            baselines.to_ewa(
                model,
                num_experts=count,
                layers=r.layers,
                seed=42 + self.seed,
            )
            averaging = AveragingCallback(share=ewa.share, schedule=ewa.schedule)
            trained = self._tuned(
                "ewa",
                model,
                r.ewa_training,
                checkpoints,
                [averaging],
            )
            self._save(model, trained, tmp / "experts")
            with ranks.leading() as main:
                if main:
                    folders.merge_folder(tmp / "experts", tmp / "model")
                    shutil.rmtree(tmp / "experts")
            course = course_of(trained)
            del model, trained, averaging
            return course | self._judge(tmp / "model")

        return self._stage("ewa", "ewa", settings, [base], make)

    def _known_domains(self) -> dict[tuple[int, ...], int]:
        """Return the domain index of every training and validation row, by its ids."""
        watched = "validation" if self.recipe.data.validation_rows else "held_out"
        domains = {}
        for part in ("train", watched):
            ids = map(tuple, self.part(part)["input_ids"])
            domains |= zip(ids, self.domains_of(part), strict=True)
        return domains

    def _finish(
        self, model, trained: trainers.TrainingResult, folder: Path, anew: bool = False
    ) -> dict:
        """Save the model and return its results; it is evaluated again if it was trained in another
        dtype.
        """
        self._save(model, trained, folder)
        course = course_of(trained)
        anew |= self.watched is not self.held_out or self.recipe.data.untouched_rows is not None
        if self._is_saved_as_trained(model) and not anew:
            losses = loss_of(trained.losses, trained.tokens, trained.exact)
            return losses | sizes_of(model) | course
        return course | self._judge(folder)

    def _merge(
        self, moe: StageResult, target: Path, shared_rate: float | None = None, alpha=None
    ) -> list:
        """Merge a tuned MoE model to the dense model `target`, on rank 0; return the coefficients
        [L][E].
        """
        with ranks.leading() as main:
            if main:
                alpha = folders.merge_folder(
                    moe.folder,
                    target,
                    shared_rate=shared_rate,
                    alpha=alpha,
                ).alpha
        return ranks.agree(alpha)

    def _judge(self, model: Path | torch.nn.Module) -> dict:
        """Compute the held-out rows' losses of a model, or of that in a folder; all processes share
        the rows.
        """
        ranks.free_memory()
        if isinstance(model, Path):
            model = ranks.load_model(model, self.recipe.dtype, ranks.state().device)
        tune = self.recipe.tune
        batch, _ = trainers.split_batch(tune.batch_size, tune.per_device_batch_size)
        how = {"tokenizer": self.tokenizer, "batch_size": batch, "bf16": tune.bf16}
        result = sizes_of(model) | loss_of(*trainers.row_losses(model, self.held_out, **how))
        if self.watched is not self.held_out:
            losses = trainers.row_losses(model, self.watched, **how)
            result["validation"] = trainers.mean_loss(*losses)
        if self.recipe.data.untouched_rows:
            losses = trainers.row_losses(model, self.part("untouched"), **how)
            result["untouched"] = trainers.mean_loss(*losses)
        return result

    def data_key(self) -> str:
        """Return a hash of the base, the recipe's rows and the version of Python that built-in text
        comes from.
        """
        r = self.recipe
        python = platform.python_version()
        if r.pretrain is None:
            base = contents_of(r.base_model)
        else:
            base = [python, r.pretrain.to_dict()]
        rows = []
        for source in r.data.sources:
            if source in (*JOINED, ALL_TASKS):
                rows.append(domains_key())
            else:
                rows.append(python if source == data.BUILT_IN else contents_of(source))
        key = {
            "format": self.FORMAT,
            "data": r.data.to_dict(),
            "base": base,
            "rows": rows,
        }
        return hash_of(key)

    def make_data(self, folder: Path) -> dict:
        """Write the tokenizer and the training and held-out rows."""
        r = self.recipe.data
        tokenizer = self._base_tokenizer(self._documents)
        # a chat template of the base is not the one trained on
        tokenizer.chat_template = TEMPLATES.get(r.prompt, tokenizer.chat_template)
        tokenizer.save_pretrained(folder / "tokenizer")
        self.say(f"reading and tokenizing {r}")
        joined = len(self.domains)
        count = r.held_out_rows + (r.validation_rows or 0)
        pairs = stage_rows.split_rows(r.change(held_out_rows=count), SOURCES)
        parts = {}
        for name, rows, limit in zip(
            ("train", "held_out"),
            pairs,
            (r.limit, count),
            strict=True,
        ):
            parts[name] = data.tokenize_pairs(
                tokenizer,
                rows,
                r.max_length,
                limit=limit,
                row_ids=joined > 1,
                prompt=r.prompt,
                train_on=r.train_on,
            )
        if r.validation_rows:
            rows = parts["held_out"]
            judging = min(r.held_out_rows, len(rows) - 1)
            parts["held_out"] = rows.select(range(judging))
            parts["validation"] = rows.select(range(judging, len(rows)))
        if r.untouched_rows:
            blocks = data.pack(tokenizer, domain_text("prose"), r.max_length)
            step = len(blocks) // r.untouched_rows
            parts["untouched"] = blocks.select(range(0, step * r.untouched_rows, step))
        counts = {}
        domains = {}
        for name, rows in parts.items():
            if "row_id" in rows.column_names:  # one row of each domain in turn
                domains[name] = [i % joined for i in rows["row_id"]]
                rows = rows.remove_columns("row_id")
            data.save_rows(rows, folder / name)
            counts[name] = len(rows)
        listed = f"{counts['train']:,} rows to tune on, {counts['held_out']:,} held out"
        if r.validation_rows:
            listed += f", {counts['validation']:,} to choose by"
        self.say(listed)
        return counts | {"data": r.to_dict(), "domains": domains}


def run(
    recipe: Recipe | str | Path, out: str | Path, seed: int | None = None, say=print
) -> list[StageResult]:
    """Run the whole method and report the results; return the base, the MoE model, its INIT merge
    and the learned merge.

    `seed` is the recipe's unless given. The last result's folder is the dense model.
    """
    stages = XftStages(recipe, out, seed=seed, say=say)
    check_shared(stages.recipe)
    base = stages.base()
    moe = stages.moe()
    results = [base, moe, stages.merge(moe), stages.mix(moe)]
    for r in results:
        sizes = f"{r.parameters:,} parameters, {r.active_parameters:,} per token"
        stages.say(f"{r.name:8s} loss {r.loss:.4f}, {sizes}, {r.total_seconds:.0f} s of training")
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
        length = batch["input_ids"].shape[1]
        indices = []
        for ids, mask in zip(
            batch["input_ids"],
            batch["attention_mask"].bool(),
            strict=True,
        ):
            indices.append(domains[tuple(ids[mask].tolist())])
        experts = 1 + torch.tensor(indices, device=ids.device)
        experts = experts.repeat_interleave(length)
        # expert 0, the shared one, comes last
        chosen[:] = [torch.stack([experts, torch.zeros_like(experts)], 1)]

    def give(router, args, kwargs):
        return args, kwargs | {"topk_idx": chosen[0]}

    with contextlib.ExitStack() as stack:
        hook = model.register_forward_pre_hook(see, with_kwargs=True)
        stack.callback(hook.remove)
        for module in model.modules():
            if isinstance(module, Router):
                hook = module.register_forward_pre_hook(give, with_kwargs=True)
                stack.callback(hook.remove)
        yield
