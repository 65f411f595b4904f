"""UltraFuser from specialists' folders and a data file per domain, as `ultrafuser train` runs it.

    domains: {law: {train: law.jsonl}, code: {train: code.jsonl, held_out: code-test.jsonl}}
    specialists: {law: {model: models/law, template: chat}, code: {model: models/code, ...}}
    stage1: {steps: 400, learning_rate: 2e-5}      the gate alone
    stage2: {steps: 4000, learning_rate: 2e-5}     all parameters

UltraFuser (arXiv 2403.08281), Algorithm 1. It writes

    OUT/gate, OUT/model         the fused models after stage 1, which refers to the specialists, and
                                after stage 2, with copies
    OUT/gate.json, model.json   their losses on each domain's held-out rows; written last
    OUT/settings.json           the settings of the run

A finished stage is not run again, and one that was interrupted resumes from its last checkpoint.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import model_validator

from moe_runtime.hf.common.sources import check_source
from moe_runtime.hf.training import fit, ranks
from moe_runtime.hf.training.settings import AnyNumber, Count, Node, Schedule, Steps, Training
from moe_runtime.io import console
from moe_runtime.io import rows as data
from moe_runtime.io.files import atomic_write_json, files_print, read_json
from moe_runtime.io.yaml_files import read_yaml
from moe_runtime.methods.ultrafuser import folders
from moe_runtime.methods.ultrafuser.inputs import Encoder
from moe_runtime.methods.ultrafuser.model import REDUCTIONS, UltraFuser
from moe_runtime.methods.ultrafuser.specialists import encoder_of
from moe_runtime.methods.ultrafuser.training import (
    cast,
    encode_rows,
    fuser_losses,
    hidden_size,
    sampler_for,
    training_of,
)
from moe_runtime.modules.fuser import GATES

SETTINGS = "settings.json"
STAGES = ("gate", "model")  # the names of their folders
# settings that may change when a run is resumed
NOT_COMPARED = ("per_device_batch_size", "gradient_checkpointing", "save_steps")


class DomainData(Node):
    """The rows of a domain: files, folders of files, or Hub ids."""

    train: str
    split: str = "train"
    held_out: str | None = None  # None: `held_out_rows` of the train rows, which do not train
    held_out_split: str = "test"
    held_out_rows: Count = 256
    limit: Count | None = None  # maximum number of training rows


class GivenSpecialist(Node):
    """One of the fused models, and the template of its prompts."""

    model: str  # a folder or a Hub id
    template: str  # ultralm, codellama, wizardmath, chat, or a text with {prompt}


class Stage(Training):
    """A training stage of a given number of steps: AdamW, a cosine schedule without warmup."""

    warmup_steps: Steps | None = 0
    optimizer: str = "adamw_torch"
    schedule: Schedule = "cosine"
    max_grad_norm: AnyNumber = 1.0

    @model_validator(mode="after")
    def _check_steps(self):
        if self.steps is None:
            raise ValueError(
                f"epochs is {self.epochs}. Set steps instead, as batches are drawn by domain, not "
                "by epoch"
            )
        return self


class FuserConfig(Node):
    """What `train_folder` reads from a YAML file; the defaults are the paper's (App. A)."""

    method: Literal["ultrafuser"] = "ultrafuser"
    name: str = "config"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # in which the model is saved
    max_length: Count = 1024  # of the longest prompt and the response
    domains: dict[str, DomainData]
    specialists: dict[str, GivenSpecialist]
    gate: Literal[GATES] = "mlp"
    joint: bool = False  # one gate over all hidden states, which may differ in size
    stage1: Stage
    stage2: Stage
    reduction: Literal[REDUCTIONS] = "mean"  # "sample": a sum over tokens, a mean over samples
    evaluations: Count = 4  # how often a stage computes the held-out loss
    seed: int = 0

    @model_validator(mode="after")
    def _check_config(self):
        for key in ("domains", "specialists"):
            names = getattr(self, key)
            if len(names) < 2:
                raise ValueError(f"{key} must have at least 2, but got {len(names)}")
        for name in ("stage1", "stage2"):
            size = getattr(self, name).batch_size
            if size % len(self.domains):
                raise ValueError(
                    f"{name}.batch_size must be a multiple of the {len(self.domains)} domains, "
                    f"which have equal shares, but got {size}"
                )
        return self


class TrainReceipt(NamedTuple):
    """What `train_folder` made."""

    path: Path  # of the fused model
    losses: dict[str, dict[str, float]]  # stage -> domain -> mean loss per held-out response token


def train_folder(
    config: FuserConfig | str | Path,
    out: str | Path,
    *,
    seed: int | None = None,
    say: Callable[[str], None] = print,
) -> TrainReceipt:
    """Fuse the specialists of `config`, or of its YAML file, in two stages; write OUT/model.

    Stage 1 trains the gate, stage 2 everything, in float32 unless FSDP2 keeps float32 weights
    itself; models are saved in the config's dtype. `seed` replaces the config's. The same call
    resumes an interrupted run. Every process of a run must call this. Raises ValueError, before
    anything is written, for models that do not fit together, and for another run's folder.
    """
    config = _read(config)
    if seed is not None:
        config = config.change(seed=seed)
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"Output folder {out} is a file. Choose another")
    check_engine()
    for stage in (config.stage1, config.stage2):
        fit.check_training(**stage.to_dict())
    encoder = _encoder(config)
    settings = _settings(config)

    def check() -> None:
        path = out / SETTINGS
        before = read_json(path) if path.is_file() else settings
        for name in settings | before:
            if before.get(name) != settings.get(name):
                raise ValueError(
                    f"{out} holds another run, with a different {name}. Use the same settings to "
                    "resume it, or another folder"
                )

    check()
    run = _Run(config, out, encoder, say if ranks.state().is_main_process else lambda text: None)
    if not all(map(run.is_done, STAGES)):
        fit.quiet()
        run.read_rows()
        with ranks.sole_training(out, check):
            with ranks.leading() as main:
                if main:
                    atomic_write_json(out / SETTINGS, settings)
            for name in STAGES:
                if not ranks.agree(run.is_done(name)):
                    run.train(name)
    losses = {name: read_json(out / f"{name}.json") for name in STAGES}
    for name, by_domain in losses.items():
        listed = ", ".join(f"{loss:.4f} of {domain}" for domain, loss in by_domain.items())
        run.say(f"{name}: held-out loss {listed}")
    return TrainReceipt(out / "model", losses)


def _read(config: FuserConfig | str | Path) -> FuserConfig:
    if isinstance(config, FuserConfig):
        return config
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"Recipe {str(config)!r} does not exist. Pass a YAML file")
    values = read_yaml(path)
    try:
        return FuserConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _settings(config: FuserConfig) -> dict:
    """Return what must be the same for a run to resume, JSON-ready."""
    settings = config.to_dict()
    for name in ("stage1", "stage2"):
        for key in NOT_COMPARED:
            del settings[name][key]
    files = []
    for domain in config.domains.values():
        files += [domain.train, domain.held_out]
    for specialist in config.specialists.values():
        files.append(specialist.model)
    settings["files"] = [files_print(file) for file in files if file is not None]
    return settings


def check_engine() -> None:
    """Raise ValueError if accelerate would use a kind of sharding that is not supported."""
    engine = ranks.engine()
    if engine not in ("NO", "FSDP") and not engine.startswith("MULTI_"):
        raise ValueError(
            "Fused models train with distributed_type NO, MULTI_GPU (DDP) or FSDP with "
            f"fsdp_version 2, but it is {engine}"
        )


def check_sizes(sizes: Mapping[str, int], joint: bool) -> None:
    """Raise ValueError for hidden sizes, by the config's keys, that only a joint gate can mix."""
    if not joint and len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        raise ValueError(
            f"The hidden sizes differ ({listed}), but joint is False. Set joint: true, or use "
            "models of one size"
        )


def _encoder(config: FuserConfig) -> Encoder:
    """Check the specialists by their configs and tokenizers; return their Encoder."""
    sources = {f"specialists.{name}.model": one.model for name, one in config.specialists.items()}
    sizes = {}
    for key, source in sources.items():
        check_source(source, key)
        sizes[key] = hidden_size(source, key)
    check_sizes(sizes, config.joint)
    tokenizers = [ranks.load_tokenizer(source, key) for key, source in sources.items()]
    templates = [one.template for one in config.specialists.values()]
    vocab_size = min(map(len, tokenizers))
    return encoder_of(tokenizers, templates, list(config.specialists), vocab_size)


class _Run:
    """A run's rows, and its stages by the names of their folders: gate and model."""

    def __init__(self, config: FuserConfig, out: Path, encoder: Encoder, say):
        self.config = config
        self.out = out
        self.encoder = encoder
        self.say = say
        self.sources = [one.model for one in config.specialists.values()]

    def is_done(self, name: str) -> bool:
        """Whether a stage has been finished."""
        if not (self.out / name / folders.CONFIG).is_file():
            return False
        return (self.out / f"{name}.json").is_file()

    def read_rows(self) -> None:
        """Encode all rows, domain after domain; no prompt that is held out anywhere trains."""
        texts = {}
        held_out = []
        prompts: list = []
        for name, domain in self.config.domains.items():
            texts[name], held_out_texts = _texts(name, domain)
            rows = self._encoded(name, held_out_texts, domain.held_out_rows)
            prompts += rows["prompt_ids"]
            held_out.append(rows)
        train = []
        for name, domain in self.config.domains.items():
            train.append(self._encoded(name, texts[name], domain.limit, prompts))
        concatenate = data.require("datasets").concatenate_datasets
        self.rows = concatenate(train)
        self.held_out = concatenate(held_out)

    def _encoded(self, name: str, texts, limit: int | None, without: Iterable = ()):
        try:
            rows = encode_rows(
                self.encoder, texts, self.config.max_length, limit=limit, without=without
            )
        except ValueError as error:
            raise ValueError(f"domains.{name}: {error}") from error
        return rows.add_column("domain", [name] * len(rows))

    def train(self, name: str) -> None:
        """Train one stage, and write its folder and losses."""
        config = self.config
        is_gate = name == "gate"
        if is_gate:
            stage = config.stage1
            model = self.fuser(config.dtype)
            model.freeze_specialists()
            self.say(f"training the gate for {stage.steps} steps")
        else:
            stage = config.stage2
            # under mixed precision accelerate converts what FSDP2 shards to float32
            is_converted = ranks.engine() == "FSDP" and stage.bf16
            model = self.fuser(config.dtype if is_converted else "float32")
            folders.load_gate(model, self.out / "gate")
            model.train_all()
            self.say(f"training everything for {stage.steps} steps")
        checkpoints = self.out / f"{name}-checkpoints"
        sampler = sampler_for(
            self.rows["domain"],
            steps=stage.steps,
            batch_size=stage.batch_size,
            seed=config.seed,
        )
        with console.bar(name, shown=ranks.state().is_main_process) as on_step:
            trained = fit.train(
                model,
                self.rows,
                None,
                folder=checkpoints,
                held_out=self.held_out,
                seed=config.seed,
                on_step=on_step,
                **{"evaluations": config.evaluations} | stage.to_dict(),
                **training_of(self.encoder, sampler),
            )
        losses = trained.losses
        narrow = getattr(torch, config.dtype)
        if any(parameter.dtype != narrow for parameter in model.specialists.parameters()):
            cast(model.specialists, config.dtype)
            batch_size, _ = fit.split_batch(stage.batch_size, stage.per_device_batch_size)
            losses, *_ = fuser_losses(
                model,
                self.held_out,
                collator=self.encoder.collate,
                batch_size=batch_size,
                bf16=stage.bf16,
            )
        whole = self._gathered(model, trained, is_gate)
        with ranks.leading() as main:
            if main:
                how = "reference" if is_gate else "copy"
                folders.save(whole, self.out / name, specialists=how, overwrite=True)
                by_domain = self._by_domain(losses, trained.tokens)
                atomic_write_json(self.out / f"{name}.json", by_domain)
                shutil.rmtree(checkpoints, ignore_errors=True)
        del model, whole, trained
        ranks.free_memory()

    def fuser(self, dtype: str) -> UltraFuser:
        """Fuse the specialists, with a gate drawn by the seed; FSDP2 shards them from the CPU."""
        torch.manual_seed(self.config.seed)
        device = None if ranks.engine() == "FSDP" else ranks.state().device
        return UltraFuser(
            [ranks.load_model(source, dtype, device) for source in self.sources],
            [one.template for one in self.config.specialists.values()],
            tokenizer=self.encoder.tokenizers,
            gate=self.config.gate,
            joint=self.config.joint,
            names=tuple(self.config.specialists),
            loss_reduction=self.config.reduction,
        )

    def _gathered(
        self, model: UltraFuser, trained: fit.TrainingResult, is_gate: bool
    ) -> UltraFuser:
        """Return the whole model on rank 0; every process must call this."""
        if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            return model
        if is_gate:
            named = model.gate.named_parameters()
            weights = {f"gate.{name}": ranks.whole(parameter) for name, parameter in named}
        else:
            weights = trained.state_dict() or {}
        if not ranks.state().is_main_process:
            return model
        return with_weights(self.fuser(self.config.dtype), weights)

    def _by_domain(self, losses: list[float], tokens: list[int]) -> dict[str, float]:
        """Return the mean loss per response token of each domain's held-out rows."""
        by_domain = {name: ([], []) for name in self.config.domains}
        for domain, loss, count in zip(self.held_out["domain"], losses, tokens, strict=True):
            of_losses, of_tokens = by_domain[domain]
            of_losses.append(loss)
            of_tokens.append(count)
        return {name: fit.mean_loss(*lists) for name, lists in by_domain.items()}


@torch.no_grad()
def with_weights(fuser: UltraFuser, weights: Mapping[str, torch.Tensor]) -> UltraFuser:
    """Copy gathered weights into a fused model on the CPU; return it."""
    state = fuser.state_dict()
    for name, tensor in weights.items():
        state[name].copy_(tensor)
    return fuser


def _texts(name: str, domain: DomainData) -> tuple:
    """Return a domain's training and held-out rows as texts, the former in a fixed random order."""
    try:
        rows = data.read_rows(domain.train, domain.split)
        if domain.held_out is None:
            return data.hold_out(rows, domain.held_out_rows)
        return rows.shuffle(seed=0), data.read_rows(domain.held_out, domain.held_out_split)
    except ValueError as error:
        raise ValueError(f"domains.{name}: {error}") from error
