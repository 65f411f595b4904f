"""The stages of a study: each runs once, is stored in its own folder, and is read back by the
stages that need it.

OUT/<kind>-<hash>/ holds a stage's output and result.json, written atomically; the hash covers
everything that the stage depends on: settings, parents, data, seed. Under `accelerate launch` every
process makes the same calls: all train, rank 0 writes. A recipe's rows are also read, split into
training and held-out ones, and tokenized here.
"""

import contextlib
import copy
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.hf.dropin.layers import sizes
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Node, Training
from moe_runtime.io import console
from moe_runtime.io import rows as data
from moe_runtime.io.files import atomic_folder, atomic_write_text, hash_of, read_json
from moe_runtime.io.prompts import TEMPLATES
from papers.engine.corpora import (
    DOMAINS,
    SOURCES,
    SUMS,
    domain_rows,
    domain_text,
    standard_library_text,
)
from papers.engine.recipe import DataSplits, Pretrain, load_recipe
from papers.engine.tiny import small_llama, train_tokenizer


def remove(folder: Path) -> None:
    """Remove a folder that is no longer needed, on rank 0."""
    if ranks.state().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)


def contents_of(source: str | Path) -> str | dict[str, str]:
    """Return a hash of each file of a folder, or of a file, the same on every machine.

    A Hub id is returned unchanged.
    """
    path = Path(source)
    if not path.exists():
        return str(source)
    hashes = {}
    for file in sorted((path, *path.rglob("*"))):
        if file.is_file():
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256")
            hashes[file.relative_to(path).as_posix()] = digest.hexdigest()
    return hashes


# settings that change results only by rounding, except for a noisy gate, a balance loss and EWA,
# whose draws and means depend on the rows that a process gets at once
NOT_HASHED = ("per_device_batch_size", "gradient_checkpointing", "save_steps")


class StageResult(NamedTuple):
    """A finished stage."""

    name: str
    folder: Path  # of the model
    loss: float  # mean over the label tokens of the held-out rows
    losses: list[float]  # mean over the label tokens of each held-out row
    tokens: list[int]  # label tokens of each held-out row
    steps: int
    seconds: float  # of this stage's training only
    total_seconds: float  # including previous stages, except for the base
    parameters: int
    active_parameters: int  # used per token
    history: list  # (step, held-out loss)
    steps_per_second: float
    alpha: list | None = None  # [L][E] mixing coefficients of a merged model
    # relative error of the upcycled model's logits against the dense one's
    upcycled_error: float | None = None
    trained_parameters: int = 0
    validation: float | None = None  # loss on the validation rows, if any
    rows: dict[str, int] | None = None  # domain -> held-out examples, if they are ordered by domain
    exact: list | None = None  # per held-out row: 1 if greedy decoding gives its label, else 0
    untouched: float | None = None  # loss on text that no model was tuned on
    load: list | None = None  # [L][E] share of the slots of each expert of an MoE model


class KeptStages:
    """The stages of one recipe and one seed, in the folder `out`, which recipes, seeds and commands
    can share.

    A method's subclass defines the stages and

        Recipe             the class of its recipe
        result             the class of its results
        FORMAT             part of every hash; increased when a stage changes, so that it gets new
                           folders
        trainings()        the recipe's training settings, checked before anything runs
        data_key()         a hash of everything that tokenizer and rows depend on
        make_data(folder)  writes the folder `tokenizer` and one for each part of the rows; returns
                           counts to record

    `recipe` is a recipe, its file, or the name of a shipped one; `seed` None is the recipe's own.
    The base and the rows are the same for every seed.
    """

    FORMAT: int
    HAS_EXPERTS = False  # whether the base is already an MoE model
    Recipe: type[Node]
    result: type = StageResult

    def __init__(
        self,
        recipe: Node | str | Path,
        out: str | Path,
        seed: int | None = 0,
        say: Callable[[str], None] = print,
    ):
        for module in ("accelerate", "datasets", "tokenizers"):
            data.require(module)  # fails before minutes of training
        self.recipe = load_recipe(self.Recipe, recipe)
        self.out = Path(out)
        self.seed = self.recipe.seed if seed is None else seed
        self.is_main = ranks.state().is_main_process
        self.say = say if self.is_main else lambda text: None
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"Output folder {out} is a file. Choose another")
        base = None
        if self.HAS_EXPERTS:
            base = self.recipe.base_model
        for training in self.trainings():
            trainers.check_training(**training.to_dict())
            ranks.check_ep_size(training.ep_size, base)
        trainers.quiet()
        self._rows: dict = {}
        self._key = ranks.agree(self.data_key())  # computed once, as the rows are read once

    def change(self, **changes):
        """Return stages with the same rows and base, but changed values of the recipe: of experts
        and training only.
        """
        other = copy.copy(self)
        other.recipe = self.recipe.change(**changes)
        return other

    @property
    def tokenizer(self):
        """The base's tokenizer, trained here if the recipe pre-trains a base."""
        return self.part("tokenizer")

    def part(self, name: str):
        """Return the tokenizer or the rows of that name, which are read, tokenized and saved on
        first use.
        """
        if name not in self._rows:
            folder = self.out / f"data-{self._key}"
            made_once(folder, "rows.json", self._made_data)
            load = ranks.load_tokenizer if name == "tokenizer" else data.load_rows
            self._rows[name] = load(folder / name)
        return self._rows[name]

    def _made_data(self, tmp: Path) -> dict:
        with ranks.leading() as main:
            return self.make_data(tmp) if main else {}

    def _stage(
        self,
        kind: str,
        name: str,
        settings: dict,
        parents: list,
        make: Callable[[Path, Path], dict],
        seed: int | None = None,
        holds: str = "model",
        result: type | None = None,
    ):
        """Return the result of the stage with these settings, running `make(tmp, checkpoints)` if
        it does not exist yet.

        `holds` is the path of the result's `folder` within the stage's; `result` overrides the
        class's kind of result.
        """
        if seed is None:
            seed = self.seed
        folders = [parent.folder.parent.name for parent in parents]
        named = {
            "format": self.FORMAT,
            "kind": kind,
            "settings": settings,
            "seed": seed,
            "data": self._key,
            "parents": folders,
        }
        folder = self.out / f"{kind}-{hash_of(named)}"
        checkpoints = folder.with_name(f"{folder.name}.checkpoints")

        def whole(tmp: Path) -> dict:
            self.part("tokenizer")  # in all processes, before rank 0 works alone
            self.say(f"{name}, seed {seed}: to {folder}")
            values = {"steps": 0, "seconds": 0.0, "history": []} | make(tmp, checkpoints)
            ranks.free_memory()
            steps = values["steps"]
            seconds = values["seconds"]
            total = seconds
            for parent, of in zip(parents, folders, strict=True):
                if not of.startswith("base-"):
                    total += parent.total_seconds
            rate = steps / seconds if seconds else 0.0
            if "loss" in values:
                duration = f"{steps} steps in {seconds:.0f} s, " if steps else ""
                self.say(f"{name}, seed {seed}: {duration}held-out loss {values['loss']:.4f}")
            done = {"name": name, "total_seconds": total, "steps_per_second": rate}
            return done | values | {"made_of": named}

        made_once(folder, "result.json", whole)
        remove(checkpoints)
        return read_result(
            folder,
            result or self.result,
            name=name,
            folder=folder / holds,
        )

    def _settings(self, training: Training) -> dict:
        """Return what a training adds to its stage's hash."""
        values = training.to_dict()
        for name in NOT_HASHED:
            values.pop(name, None)
        return {
            "training": values,
            "dtype": self.recipe.dtype,
            "evaluations": self.recipe.evaluations,
        }

    def _train(
        self,
        name: str,
        model,
        rows,
        held_out,
        training: Training,
        checkpoints: Path,
        callbacks=(),
        seed=None,
        **more,
    ) -> trainers.TrainingResult:
        settings = {"evaluations": self.recipe.evaluations} | training.to_dict() | more
        with console.bar(name, shown=self.is_main) as on_step:
            return trainers.train(
                model,
                rows,
                self.tokenizer,
                folder=checkpoints,
                held_out=held_out,
                on_step=on_step,
                seed=self.seed if seed is None else seed,
                callbacks=callbacks,
                **settings,
            )

    def _base_tokenizer(self, text: Callable[[], Iterable[str]]):
        """Return the base's tokenizer: trained on `text()` if the recipe pre-trains a base, else
        its own.
        """
        pretrain = self.recipe.pretrain
        if pretrain is None:
            return ranks.load_tokenizer(self.recipe.base_model)
        return train_tokenizer(text(), pretrain.vocab_size, pretrain.split_digits)

    def _pretrain(
        self, rows, held_out, checkpoints: Path, max_length: int, schedule: str = "linear"
    ) -> tuple[torch.nn.Module, trainers.TrainingResult]:
        """Build the small Llama of the recipe's `pretrain` and train all its weights on `rows` with
        AdamW.
        """
        pretrain = self.recipe.pretrain
        model = small_llama(
            self.tokenizer,
            max_length=max_length,
            hidden_size=pretrain.hidden_size,
            intermediate_size=pretrain.intermediate_size,
            num_layers=pretrain.num_layers,
            seed=pretrain.seed,
        )
        training = Training(
            steps=pretrain.steps,
            batch_size=pretrain.batch_size,
            learning_rate=pretrain.learning_rate,
            optimizer=pretrain.optimizer,
            schedule=schedule,
            max_grad_norm=1.0,
        )
        return model, self._train(
            "base",
            model,
            rows,
            held_out,
            training,
            checkpoints,
            seed=pretrain.seed,
        )

    def _copy_base(self, folder: Path, check: Callable = lambda model: None) -> None:
        """Write the recipe's base to a folder, on rank 0, once `check` accepts the model."""
        with ranks.leading() as main:
            if main:
                model = ranks.load_model(self.recipe.base_model, self.recipe.dtype)
                check(model)
                ranks.save_whole(
                    model,
                    self.tokenizer,
                    folder,
                    self.recipe.dtype,
                )

    def _save(self, model, trained: trainers.TrainingResult, folder: Path) -> None:
        """Gather the weights once and write them, on rank 0."""
        weights = trained.state_dict()
        with ranks.leading() as main:
            if main:
                ranks.save_whole(
                    model,
                    self.tokenizer,
                    folder,
                    self.recipe.dtype,
                    weights,
                )

    def _is_saved_as_trained(self, model) -> bool:
        """Return whether saving does not round; otherwise a model is evaluated again, as saved."""
        return all(p.dtype == getattr(torch, self.recipe.dtype) for p in model.parameters())


def link(path: str | Path, target: str | Path) -> None:
    """Point the symbolic link `path` at `target`, a folder below its own, atomically."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(Path(target).relative_to(path.parent))
    os.replace(beside, path)


def made_once(folder: Path, mark: str, make: Callable[[Path], dict | None]) -> None:
    """Fill `folder` by `make`, unless its file `mark` exists; `make`'s result is written to `mark`.

    Every process of the run must call this and runs `make`; rank 0's folder is kept. Of two
    concurrent runs one waits.
    """
    if ranks.agree((folder / mark).is_file()):
        return
    with contextlib.ExitStack() as stack:
        tmp = None
        with ranks.leading() as main:
            if main:
                stack.enter_context(_locked(folder))
                if not (folder / mark).is_file():
                    tmp = str(stack.enter_context(atomic_folder(folder, overwrite=True)))
        tmp = ranks.agree(tmp)
        if tmp is None:
            return
        values = make(Path(tmp))
        # no process reads before rank 0 has moved the folder into place
        with ranks.leading() as main:
            if main:
                # a loss may be NaN
                atomic_write_text(Path(tmp) / mark, json.dumps(values or {}, indent=2) + "\n")
                stack.close()


def read_result(stage: Path, kind: type = StageResult, **changes):
    """Read result.json of a stage's folder as the NamedTuple `kind`; `changes` replace its
    fields.
    """
    values = read_json(stage / "result.json")
    try:
        values["history"] = [tuple(point) for point in values["history"]]
        return kind(**{name: values[name] for name in kind._fields if name in values} | changes)
    except (KeyError, TypeError) as error:
        how = "Remove the folder to run the stage again"
        raise ValueError(f"{stage / 'result.json'} lacks fields ({error}). {how}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which the kernel releases if the process dies; without file locks
    two runs may both work.
    """
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / folder.name, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def course_of(trained: trainers.TrainingResult) -> dict:
    """Return a training's history and costs, but not its final loss: a model derived from it is
    evaluated again.
    """
    return {
        "steps": trained.steps,
        "seconds": trained.history.seconds,
        "history": trained.history.held_out,
        "trained_parameters": trained.trained_parameters,
    }


def loss_of(losses: list[float], tokens: list[int], exact: list[int] | None = None) -> dict:
    """Return the fields of a result on held-out rows."""
    values = {
        "loss": trainers.mean_loss(losses, tokens),
        "losses": losses,
        "tokens": tokens,
    }
    if exact is not None:
        values["exact"] = exact
    return values


def sizes_of(model) -> dict:
    """Return the fields of a result on sizes."""
    total, active = sizes(model)
    return {"parameters": total, "active_parameters": active}


def split_rows(
    rows: DataSplits, built_in: Mapping[str, Callable] = {}, shuffle: bool = False
) -> tuple:
    """Return the training and the held-out rows, not tokenized; no row is in both.

    `built_in` maps names of sources to functions that return both parts. `shuffle` puts a file's
    training rows in a fixed random order, so that a limit samples from all of them.
    """
    if rows.held_out is None and isinstance(rows.train, str) and rows.train in built_in:
        return built_in[rows.train]()
    if rows.held_out is None and not rows.repeat:
        return data.hold_out(_read(rows, "train", built_in), rows.held_out_rows)
    if rows.held_out is None:  # read without repeats, so that no row is held out twice
        held_out = data.hold_out(
            _read(rows.change(repeat=False), "train", built_in), rows.held_out_rows
        )[1]
    else:
        held_out = _read(rows, "held_out", built_in)
    train = _read(rows, "train", built_in)
    source = " + ".join(one.source for one in rows.listed("held_out") or rows.listed())
    return without(
        train.shuffle(seed=0) if shuffle else train,
        held_out,
        source,
    ), held_out


def _read(rows: DataSplits, part: str, built_in: Mapping[str, Callable]):
    """Return the rows of one part: of a single source in order, or of several, mixed."""
    answers = getattr(rows, "train_on", "assistant") == "assistant"
    listed = rows.listed(part)
    parts = []
    for one in listed:
        parts.append(
            built_in[one.source]()[part == "held_out"]
            if one.source in built_in
            else data.read_rows(one.source, one.split, answers)
        )
    if isinstance(getattr(rows, part), str):
        return parts[0]
    weights = [one.weight for one in listed]
    return data.mix(
        parts,
        None if None in weights else weights,
        [one.limit for one in listed],
        rows.repeat,
    )


def domain_pairs(domain) -> tuple:
    """Return a domain's training and held-out rows, not tokenized; a built-in domain returns all
    its held-out rows.
    """
    count = max(domain.limit or 0, domain.held_out_rows)
    # SUMS bounds generated problems; some extra rows, since those that are too long are dropped
    limit = count + count // 8 if count > SUMS else None
    made = {name: functools.partial(domain_rows, name, limit=limit) for name in SOURCES}
    return split_rows(domain, made, shuffle=True)


def tokenized_domains(tokenizer, domains: Mapping, max_length: int) -> dict:
    """Return `<name>-train` and `<name>-held_out` of every domain, tokenized; no training row is
    held out in any domain.

    Each domain has its own prompt format. The tokenizer keeps the chat template of the first domain
    that has one, or its own if a domain's prompt is "chat". A domain's first `validation_rows`
    held-out rows become `<name>-validation`.
    """
    template = tokenizer.chat_template
    parts = {}
    counts = {}
    for name, domain in domains.items():
        counts[name] = domain.held_out_rows + domain.validation_rows
    pairs = {}
    for name, domain in domains.items():
        pairs[name] = domain_pairs(domain.change(held_out_rows=counts[name]))
    held_out = [row for _, rows in pairs.values() for row in rows]
    for name, domain in domains.items():
        rows = {
            "train": without(
                pairs[name][0],
                held_out,
                ", ".join(domains),
            ),
            "held_out": pairs[name][1],
        }
        for part, limit in (("train", domain.limit), ("held_out", counts[name])):
            parts[f"{name}-{part}"] = data.tokenize_pairs(
                tokenizer,
                rows[part],
                max_length,
                limit=limit,
                prompt=domain.prompt,
                train_on=domain.train_on,
            )
        if domain.validation_rows:
            judging = parts[f"{name}-held_out"]
            first = min(domain.validation_rows, len(judging) - 1)
            parts[f"{name}-held_out"] = judging.select(range(first, len(judging)))
            parts[f"{name}-validation"] = judging.select(range(first))
    prompts = [domain.prompt for domain in domains.values()]
    if "chat" in prompts:
        tokenizer.chat_template = template
    else:
        tokenizer.chat_template = next(filter(None, map(TEMPLATES.get, prompts)), template)
    # truncation at max_length may have made rows equal
    known = {tuple(ids) for name in domains for ids in parts[f"{name}-held_out"]["input_ids"]}
    for name in domains:
        ids = parts[f"{name}-train"]["input_ids"]
        left = [index for index, row in enumerate(ids) if tuple(row) not in known]
        if not left:
            raise ValueError(
                f"All examples of {name}, truncated to {max_length} tokens, are in the domains' "
                "held_out. Choose others"
            )
        if len(left) < len(ids):
            parts[f"{name}-train"] = parts[f"{name}-train"].select(left)
    return parts


def without(train, held_out, source: str | None):
    """Return the rows of `train`, a list or a Dataset, that are not held out; raises ValueError if
    none is left.
    """
    known = {str(data.one_form(row)) for row in held_out}
    left = []
    for index, row in enumerate(train):
        if str(data.one_form(row)) not in known:
            left.append(index)
    if not left:
        raise ValueError(
            f"held_out {source!r} contains every example of train. Choose other examples"
        )
    return train.select(left) if hasattr(train, "select") else [train[index] for index in left]


def documents(pretrain: Pretrain) -> list[str]:
    """Return the texts for training a small base and its tokenizer, sampled evenly from all."""
    documents = standard_library_text()
    count = pretrain.documents or len(documents)
    return documents[:: max(len(documents) // count, 1)][:count]


def domain_documents(pretrain: Pretrain, sources: Iterable[str]) -> list[str]:
    """Return the texts for training a study's small base: equally many of each built-in domain
    among `sources`.

    The texts of `code` are the standard library's source. If no source is built in, all built-in
    domains are used. The recipe's `domains` overrides which are used, and how many of each.
    """
    known = set(sources)
    names = [name for name in SOURCES if name in known] or list(DOMAINS)
    counts = pretrain.domains or dict.fromkeys(
        names, pretrain.documents and max(pretrain.documents // len(names), 1)
    )
    texts = []
    for name, count in counts.items():
        texts.extend(domain_text(name, limit=count))
    return texts
