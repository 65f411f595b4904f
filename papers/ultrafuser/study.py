"""The stages of an UltraFuser study: specialists of the domains, then fused models of them.

    base --specialist-->                  the base tuned on one domain, or a given model
         specialist --further-->          tuned on all domains like the fused models: the baseline
         specialists --gate-->            fused, with only the gate trained (stage 1)
                     --fused-->           fused, with everything trained (stage 2), after stage 1 or
                                          directly

Every model is evaluated on the same held-out rows of every domain, each specialist in its own
template. `papers.engine.stages` says how stages are stored and what their hash covers.
"""

import contextlib
import functools
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Training
from moe_runtime.io import rows as data
from moe_runtime.io.files import hash_of
from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser import training as fuser_training
from moe_runtime.methods.ultrafuser.folders import load_gate
from moe_runtime.methods.ultrafuser.inputs import Encoder
from moe_runtime.methods.ultrafuser.runs import check_engine, with_weights
from moe_runtime.methods.ultrafuser.training import encode_rows
from papers.engine import stages as stage_rows
from papers.engine.corpora import SOURCES, Domain, domains_key
from papers.engine.domains import Judged
from papers.engine.stages import (
    KeptStages,
    contents_of,
    course_of,
    domain_pairs,
    link,
    loss_of,
    sizes_of,
)
from papers.engine.tiny import train_tokenizer
from papers.ultrafuser import recipe as fuser_checks
from papers.ultrafuser.recipe import FuserRecipe, Stage


def study_rows(encoder: Encoder, recipe: FuserRecipe) -> dict:
    """Return the encoded training and held-out rows, domain after domain, with the column `domain`.

    Training rows whose prompt is held out in any domain are dropped, since cutting chats and long
    answers can make different rows equal. Raises ValueError, with the domain, for data that cannot
    be read or have too few rows.
    """
    train: dict[str, Any] = {}
    held_out: dict[str, Any] = {}
    prompts: list = []
    for name, domain in recipe.domains.items():
        with _named(name):
            train[name], rows = domain_pairs(domain)
            held_out[name] = _encoded(encoder, recipe, name, rows, domain.held_out_rows)
        prompts += held_out[name]["prompt_ids"]
    for name, domain in recipe.domains.items():
        with _named(name):
            train[name] = _encoded(
                encoder,
                recipe,
                name,
                train[name],
                domain.limit,
                prompts,
            )
    concatenate = data.require("datasets").concatenate_datasets
    return {
        "train": concatenate([*train.values()]),
        "held_out": concatenate([*held_out.values()]),
    }


def _encoded(
    encoder: Encoder,
    recipe: FuserRecipe,
    name: str,
    rows,
    limit: int | None,
    without: Iterable = (),
):
    where = functools.partial(_where, recipe.domains[name])
    encoded = encode_rows(
        encoder,
        rows,
        recipe.max_length,
        limit=limit,
        without=without,
        where=where,
    )
    return encoded.add_column("domain", [name] * len(encoded))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the domain."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"domains.{name}: {error}") from error


def _where(domain: Domain, index: int, row: Mapping) -> str:
    """Return a row's position in its file; rows have been shuffled, so it is searched for."""
    for of in (*domain.listed(), *domain.listed("held_out")):
        if of.source in SOURCES:
            continue
        for number, one in enumerate(data.read_rows(of.source, of.split), 1):
            if dict(one) == data.one_form(row):
                return f"example {number} of {of.source!r}"
    return f"example {index + 1} of {str(domain)!r}"


def rows_by_domain(domains: Iterable[str]) -> dict[str, int]:
    """Return the number of rows per domain, in order of appearance."""
    return dict(Counter(domains))


def sources(recipe: FuserRecipe) -> list[str]:
    """Return the files and ids that rows are read from, without built-in domains."""
    every = [source for domain in recipe.domains.values() for source in domain.sources]
    return [source for source in every if source not in SOURCES]


MODEL = "model"  # in OUT: a link to the model of the last `run`


class UltrafuserStages(KeptStages):
    """The stages of one recipe and one seed."""

    FORMAT = 2
    Recipe = FuserRecipe
    result = Judged

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.names = tuple(self.recipe.specialists)
        check_engine()
        fuser_checks.check_models(self.recipe)

    def trainings(self) -> tuple[Training, ...]:
        """Return the recipe's trainings."""
        r = self.recipe
        return r.stage1, r.stage2, r.further_stage, *([r.specialist] if r.specialist else [])

    def base(self) -> Judged:
        """Return the specialists' base, pre-trained here or the recipe's, evaluated in the first
        specialist's template.
        """
        r = self.recipe
        settings = {"dtype": r.dtype}
        if r.pretrain is not None:
            settings["pretrain"] = r.pretrain.to_dict()

        def make(tmp: Path, folder: Path) -> dict:
            course = {}
            if r.pretrain is None:
                self._copy_base(tmp / "model")
            else:
                blocks = data.pack(
                    self.tokenizer,
                    self._base_text,
                    r.max_length,
                )
                held_out = self._single("held_out", 0)
                model, trained = self._pretrain(
                    blocks,
                    held_out,
                    folder,
                    r.max_length,
                    "cosine",
                )
                course = course_of(trained)
                self._save(model, trained, tmp / "model")
            return course | self._judged_single(tmp / "model", 0)

        return self._made("base", "base", settings, [], make, seed=0)

    def specialist(self, name: str) -> Judged:
        """Return the specialist `name`: the base tuned on its domain, or the model given in the
        recipe.
        """
        number = self.names.index(name)
        r = self.recipe
        given = r.specialists[name].model
        settings = {"number": number, "dtype": r.dtype}
        if given is not None:

            def evaluate(tmp: Path, folder: Path) -> dict:
                return {"source": str(given)} | self._judged_single(given, number)

            settings["model"] = [given, contents_of(given)]
            return self._made(
                "given",
                name,
                settings,
                [],
                evaluate,
                seed=0,
            )
        base = self.base()
        domain = r.domain_of(name)
        training = r.training_of(name)

        def make(tmp: Path, folder: Path) -> dict:
            rows = self._single("train", number, domain)
            held_out = self._single("held_out", number, domain)
            return self._tuned(
                name,
                base.source,
                number,
                tmp,
                folder,
                training,
                rows,
                held_out,
            )

        settings |= self._settings(training) | {"domain": domain}
        return self._made(
            "specialist",
            name,
            settings,
            [base],
            make,
        )

    def further(self, name: str) -> Judged:
        """Return a specialist tuned on all domains, which have the same shares as in the recipe's
        batches.
        """
        number = self.names.index(name)
        parent = self.specialist(name)
        r = self.recipe
        training = r.further_stage
        title = f"{name}, further"

        def make(tmp: Path, folder: Path) -> dict:
            return self._tuned(
                title,
                parent.source,
                number,
                tmp,
                folder,
                training,
                self._single("train", number),
                self._single("held_out", number),
                trainer=functools.partial(
                    fuser_training.SampledTrainer, sampler=self._sampler(training, r.balanced)
                ),
            )

        settings = self._settings(training) | {"number": number} | self._drawn(r.balanced)
        return self._made(
            "further",
            title,
            settings,
            [parent],
            make,
        )

    def gate(self, balanced: bool | None = None) -> Judged:
        """Return the fused specialists with only the gate trained: stage 1."""
        training = self.recipe.stage1
        if balanced is None:
            balanced = self.recipe.balanced
        specialists = [*map(self.specialist, self.names)]

        def make(tmp: Path, folder: Path) -> dict:
            sources = [one.source for one in specialists]
            model = self._fuser(sources, self.recipe.dtype).freeze_specialists()
            return self._fused(
                "gate",
                model,
                sources,
                tmp,
                folder,
                training,
                balanced,
                "reference",
            )

        settings = self._of_fused(training, balanced)
        return self._made("gate", "stage 1", settings, specialists, make)

    def fused(self, two_stage: bool | None = None, balanced: bool | None = None) -> Judged:
        """Return the fused model with everything trained: stage 2, after stage 1 or, without
        `two_stage`, directly.

        It trains in float32, so that small steps are not rounded away, and is saved in the recipe's
        dtype.
        """
        training = self.recipe.stage2
        if two_stage is None:
            two_stage = self.recipe.two_stage
        if balanced is None:
            balanced = self.recipe.balanced
        specialists = [*map(self.specialist, self.names)]
        gate = None
        parents = specialists
        if two_stage:
            parents = [self.gate(balanced)]
            gate = parents[0].folder

        def make(tmp: Path, folder: Path) -> dict:
            dtype = "float32"
            # under mixed precision accelerate converts what FSDP2 shards to float32, so that no
            # process holds all of it
            if ranks.engine() == "FSDP" and training.bf16:
                dtype = self.recipe.dtype
            sources = [one.source for one in specialists]
            model = self._fuser(sources, dtype, gate).train_all()
            return self._fused(
                "fused",
                model,
                sources,
                tmp,
                folder,
                training,
                balanced,
                "copy",
            )

        settings = self._of_fused(training, balanced) | {"two_stage": two_stage}
        return self._made("fused", "fused", settings, parents, make)

    def weights(self, fused: Judged) -> list[list[list[float]]]:
        """Return the weights [R, S] that a fused model's gate gives on each held-out row's
        response.
        """
        model = ultrafuser.load(fused.folder).to(ranks.state().device)
        return fuser_training.gate_weights(
            model,
            self.part("held_out"),
            collator=self.encoder.collate,
            **self._judging,
        )

    @cached_property
    def encoder(self) -> Encoder:
        """The Encoder with the specialists' templates."""
        return fuser_checks.encoder_of(self.recipe, self.tokenizer)

    def _fuser(
        self, sources: list[str], dtype: str, trained: Path | None = None
    ) -> ultrafuser.UltraFuser:
        """Return the fused specialists, with a gate initialized from the seed, or that of the
        folder `trained`.

        FSDP2 shards them from the CPU, so they need not fit on one device.
        """
        torch.manual_seed(self.seed)
        device = None
        if ranks.engine() != "FSDP":
            device = ranks.state().device
        fuser = ultrafuser.UltraFuser(
            [ranks.load_model(source, dtype, device) for source in sources],
            self.recipe.templates,
            tokenizer=self.encoder.tokenizers,
            gate=self.recipe.gate,
            joint=self.recipe.joint,
            names=self.names,
            loss_reduction=self.recipe.reduction,
        )
        if trained is not None:
            load_gate(fuser, trained)
        return fuser

    def _fused(
        self,
        name: str,
        model,
        sources: list[str],
        tmp: Path,
        folder: Path,
        training: Stage,
        balanced: bool,
        copy: str,
    ) -> dict:
        """Train a fused model's trainable parameters, save it in the recipe's dtype and evaluate it
        as saved.
        """
        rows = self.part("held_out")
        how = fuser_training.training_of(self.encoder, self._sampler(training, balanced))
        trained = self._train(
            name,
            model,
            self.part("train"),
            rows,
            training,
            folder,
            **how,
        )
        losses = (trained.losses, trained.tokens, trained.exact)
        is_as_trained = self._is_saved_as_trained(model.specialists)
        if not is_as_trained:
            fuser_training.cast(model.specialists, self.recipe.dtype)
        weights = None
        # split: of stage 1 the gate alone is gathered
        if any(hasattr(p, "full_tensor") for p in model.parameters()):
            weights = {f"gate.{of}": ranks.whole(p) for of, p in model.gate.named_parameters()}
            if copy == "copy":
                weights = trained.state_dict() or {}
        with ranks.leading() as main:
            if main:
                whole = model
                if weights is not None:  # on the CPU
                    whole = with_weights(self._fuser(sources, self.recipe.dtype), weights)
                ultrafuser.save(whole, tmp / "model", specialists=copy)
        if not is_as_trained:
            losses = fuser_training.fuser_losses(
                model,
                rows,
                collator=self.encoder.collate,
                **self._judging,
            )
        return self._course(trained) | self._loss(*losses) | sizes_of(model)

    def _tuned(
        self,
        name: str,
        source: str,
        number: int,
        tmp: Path,
        folder: Path,
        training: Training,
        rows,
        held_out,
        **more,
    ) -> dict:
        """Train one model in float32 on rows in specialist `number`'s template; save it and
        evaluate it on all domains.
        """
        model = ranks.load_model(source, "float32")
        trained = self._train(
            name,
            model,
            rows,
            held_out,
            training,
            folder,
            **more,
        )
        self._save(model, trained, tmp / "model")
        course = self._course(trained)
        del model, trained
        ranks.free_memory()
        return course | self._judged_single(tmp / "model", number)

    def _judged_single(self, source: str | Path, number: int) -> dict:
        """Evaluate one model in the template of specialist `number`."""
        model = ranks.load_model(
            source,
            self.recipe.dtype,
            ranks.state().device,
        )
        rows = self._single("held_out", number)
        losses = trainers.row_losses(
            model,
            rows,
            self.tokenizer,
            **self._judging,
        )
        return self._loss(*losses) | sizes_of(model)

    def _course(self, trained: trainers.TrainingResult) -> dict:
        return course_of(trained) | {"optimizer_bytes": trained.optimizer_bytes}

    def _loss(self, *measured: list) -> dict:
        return loss_of(*measured) | {"rows": self.counts}

    @property
    def _base_text(self) -> list[str]:
        named = (source for domain in self.recipe.domains.values() for source in domain.sources)
        return stage_rows.domain_documents(self.recipe.pretrain, named)

    @property
    def _judging(self) -> dict:
        """Options of evaluation: the batch size is stage 2's."""
        stage = self.recipe.stage2
        batch_size, _ = trainers.split_batch(stage.batch_size, stage.per_device_batch_size)
        return {"batch_size": batch_size, "bf16": stage.bf16}

    @property
    def counts(self) -> dict[str, int]:
        """The number of held-out rows of each domain."""
        return rows_by_domain(self.part("held_out")["domain"])

    def _single(self, part: str, number: int, domain: str | None = None):
        """Return the rows of a part in the template of specialist `number`, of one domain or of
        all.
        """
        rows = self.part(part)
        if domain is not None:
            rows = rows.select(
                [index for index, value in enumerate(rows["domain"]) if value == domain]
            )
        return fuser_training.single_rows(rows, number)

    def _sampler(self, training: Training, balanced: bool):
        return fuser_training.sampler_for(
            self.part("train")["domain"],
            steps=training.steps,
            batch_size=training.batch_size,
            balanced=balanced,
            seed=self.seed,
            replacement=self.recipe.replacement,
        )

    def _drawn(self, balanced: bool) -> dict:
        """Return what the sampling of rows adds to a stage's hash."""
        drawn = {"balanced": balanced}
        if self.recipe.replacement:
            drawn["replacement"] = True
        return drawn

    def _of_fused(self, training: Stage, balanced: bool) -> dict:
        settings = self._settings(training) | self._drawn(balanced)
        settings |= {"gate": self.recipe.gate, "reduction": self.recipe.reduction}
        if self.recipe.joint:
            settings["joint"] = True
        return settings

    def _made(self, kind: str, name: str, *arguments, **settings) -> Judged:
        """Return a stage, with its source if that is not its own folder."""
        result = self._stage(
            kind,
            name,
            *arguments,
            **settings,
        )
        return result._replace(source=result.source or str(result.folder))

    def data_key(self) -> str:
        """Return a hash of the tokenizer, the templates, all rows and the version of Python that
        built-in text comes from.
        """
        r = self.recipe
        base = r.base_model and contents_of(r.base_model)
        if r.pretrain:
            base = [platform.python_version(), r.pretrain.to_dict()]
        files = sources(r)
        built_in = None
        if r.pretrain or len(files) < sum(len(domain.sources) for domain in r.domains.values()):
            built_in = domains_key()
        domains = {name: domain.to_dict() for name, domain in r.domains.items()}
        rows = [
            r.max_length,
            r.templates,
            domains,
            built_in,
            [*map(contents_of, files)],
        ]
        if r.tokenizer:
            rows.append(contents_of(r.tokenizer))
        return hash_of(
            {
                "format": self.FORMAT,
                "method": "ultrafuser",
                "base": base,
                "given": [one.model and contents_of(one.model) for one in r.specialists.values()],
                "rows": rows,
            }
        )

    def make_data(self, folder: Path) -> dict:
        """Write the tokenizer and the training and held-out rows of all domains, encoded for every
        specialist.
        """
        r = self.recipe
        if r.pretrain is not None:
            tokenizer = train_tokenizer(
                self._base_text,
                r.pretrain.vocab_size,
                r.pretrain.split_digits,
            )
        else:
            given = (one.model for one in r.specialists.values() if one.model is not None)
            tokenizer = ranks.load_tokenizer(r.tokenizer or r.base_model or next(given))
        tokenizer.save_pretrained(folder / "tokenizer")
        encoder = fuser_checks.encoder_of(r, tokenizer)
        self.say(f"reading and encoding {', '.join(r.domains)} for {', '.join(self.names)}")
        counts = {}
        for part, rows in study_rows(encoder, r).items():
            data.save_rows(rows, folder / part)
            counts[part] = rows_by_domain(rows["domain"])
            listed = ", ".join(f"{count:,} of {domain}" for domain, count in counts[part].items())
            self.say(f"rows {'to train on' if part == 'train' else 'held out'}: {listed}")
        return counts


def run(
    recipe: FuserRecipe | str | Path, out: str | Path, seed: int | None = None, say=print
) -> list[Judged]:
    """Run the whole method and report the results; return the specialists, the model after stage 1
    and the fused one.

    `seed` is the recipe's unless given. The last result's folder is the fused model; OUT/model
    links to it.
    """
    model = Path(out) / MODEL
    if model.exists() and not model.is_symlink():
        raise ValueError(f"{MODEL} in {str(out)!r} exists and is not a link. Choose another folder")
    stages = UltrafuserStages(recipe, out, seed=seed, say=say)
    recipe = stages.recipe
    results = [*map(stages.specialist, stages.names)]
    if recipe.two_stage:
        results.append(stages.gate())
    results.append(stages.fused())
    heads = "".join(f"{head:>12s}" for head in (*recipe.domains, "all"))
    stages.say(f"{'':16s}{heads}{'train s':>9s}")
    for one in results:
        losses = "".join(f"{loss:12.4f}" for loss in (*one.domains.values(), one.loss))
        stages.say(f"{one.name:16s}{losses}{one.total_seconds:9.0f}")
    if stages.is_main:
        link(model, results[-1].folder)
    stages.say(f"the fused model: {model}, which is {results[-1].folder}")
    return results
