"""Memory of recipes on several GPUs: what each stage needs per GPU with each engine, and whether it
fits.

The stages are those of the methods' studies, built from configs only; `moe-runtime run` calls
`check` before it starts.
"""

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_runtime.config import check_choice
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import become_moe, moe_fields
from moe_runtime.hf.models.modeling import model_classes
from moe_runtime.hf.training import ranks
from moe_runtime.tools import memory
from moe_runtime.tools.memory import Estimate
from papers.engine.recipe import Node, Training, method_of, recipe_path, shipped_recipes
from papers.memory_engines import (
    ENGINES,
    GPUS,
    Shapes,
    Share,
    Wire,
    seconds_of,
    shapes_of,
    share_of,
    wire_of,
)

# the engines with which a method's recipes run: docs/scale.md
RUNS_WITH = {
    "xft": ("ddp", "fsdp2"),
    "esft": ("ddp", "fsdp2"),
    "upit": ("ddp", "fsdp2"),
    "ultrafuser": ("ddp", "fsdp2"),
}
RESERVED = 1.5e9  # assumed bytes for the CUDA context, NCCL's buffers and fragmentation
# the most experts per layer (of 64) that ESFT trains in the paper; a task's selection is known only
# after scoring
ESFT_MOST = 15 / 64
# names of optimizers in transformers; any other counts as AdamW
NAMES = {
    "adamw_torch": "adamw_torch",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adamw_bnb_8bit": "8bit",
}


class Stage(NamedTuple):
    """One training of a recipe: `make()` builds its model on the meta device, `inputs(B)` a batch
    of B examples.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int], dict]
    training: Training
    length: int
    bf16: bool  # autocast
    runs: bool = True  # part of `moe-runtime run`; the others are baselines of the paper's tables
    prepare: Callable[[torch.nn.Module], Any] | None = None
    packed: str | None = None  # the format of its frozen experts


def stages(recipe: Node) -> list[Stage]:
    """Return the trainings of a recipe; raises ValueError for one that pre-trains its base, which
    is small.
    """
    if getattr(recipe, "pretrain", None) is not None:
        raise ValueError(
            f"Recipe {recipe.name} pre-trains a small base. Choose a recipe with base_model"
        )
    return list(
        {"xft": _xft, "esft": _esft, "upit": _upit, "ultrafuser": _ultrafuser}[recipe.method](
            recipe
        )
    )


def _causal(length: int) -> Callable[[int], dict]:
    return lambda batch: memory.causal_batch(batch, length)


def _built(source: str, dtype: str, change: Callable = lambda config: config):
    return memory.built(change(ranks.load_config(source)), dtype)


def _xft(r) -> Iterator[Stage]:
    def moe(config):
        return folders.upcycled_config(
            config, folders.config_for_folder(config, **r.experts), r.layers
        )

    def mixed(config):
        return folders.mergeable_config(moe(config), r.shared_rate, False)

    for name, training, change in (
        ("sft", r.sft, lambda config: config),
        ("tune", r.tune, moe),
        ("mix", r.mix, mixed),
    ):
        make = partial(_built, r.base_model, r.dtype, change)
        yield Stage(
            name,
            make,
            _causal(r.data.max_length),
            training,
            r.data.max_length,
            training.bf16,
            name != "sft",
        )


def _esft(r) -> Iterator[Stage]:
    from moe_runtime.hf.training.trainable import freeze_for_esft, layers_of

    def selected(model) -> None:
        dtype = None if r.trained_dtype is None else getattr(torch, r.trained_dtype)
        ids = {
            number: range(math.ceil(ESFT_MOST * layer.num_experts))
            for number, layer in layers_of(model).items()
        }
        freeze_for_esft(model, ids, dtype=dtype)

    def stage(name, training, make, prepare=None):
        runs = name == "esft"
        inputs = _causal(r.max_length)
        return Stage(name, make, inputs, training, r.max_length, training.bf16, runs, prepare)

    yield stage("fft", r.fft, partial(_built, r.base_model, r.trained_dtype or r.dtype))
    yield stage(
        "lora", r.lora.training, lambda: memory.add_lora(_built(r.base_model, r.dtype), r.lora.rank)
    )
    yield stage("esft", r.esft, partial(_built, r.base_model, r.dtype), selected)


def _upit(r) -> Iterator[Stage]:
    from moe_runtime.methods.lora import baseline
    from moe_runtime.methods.upit.vectors import RoutingVectors

    def moe(config):
        return folders.upcycled_config(
            config, folders.config_for_folder(config, **r.experts.to_dict())
        )

    def vectors(model) -> None:
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        zeros = torch.zeros(model.config.num_hidden_layers, model.config.hidden_size)
        RoutingVectors(model, zeros, r.router.alpha, r.router.detach_h).train_only(
            r.router.train_ffn
        )

    def pairs():
        with torch.device("meta"):
            return baseline.add_mlp_lora(_built(r.base_model, r.dtype), r.lora.rank, r.lora.alpha)

    def lora_moe(config):
        block = {
            "form": "block",
            "rank": r.lora.rank,
            "alpha": r.lora.alpha,
            "targets": ["gate_proj", "up_proj", "down_proj"],
        }
        fields = moe_fields(
            folders.config_for_folder(config, **r.experts.to_dict()),
            layers=list(range(config.num_hidden_layers)),
            base_model_type=config.model_type,
            base_architecture=model_classes(config.model_type).base_causal_lm.__name__,
            stage="lora",
            lora=block | {"dtype": "float32", "train_backbone": False, "backbone": "base"},
        )
        become_moe(config, model_classes(config.model_type), fields)
        return config

    whole = partial(_built, r.base_model, "float32")
    makes = {
        "ffn": (whole, partial(_built, r.base_model, "float32", moe)),
        "lora": (pairs, partial(_built, r.base_model, r.dtype, lora_moe)),
    }
    for form in r.forms:
        trainings, (dense, mixture) = getattr(r, form), makes[form]
        parts = (("sft", dense, None), ("init", dense, vectors), ("post", mixture, None))
        for name, make, prepare in parts:
            training = getattr(trainings, name)
            yield Stage(
                f"{form} {name}",
                make,
                _causal(r.max_length),
                training,
                r.max_length,
                training.bf16,
                True,
                prepare,
            )


def _ultrafuser(r) -> Iterator[Stage]:
    from moe_runtime.methods.ultrafuser.model import UltraFuser

    def fuser(dtype: str, train_all: bool):
        models = [_built(one.model or r.base_model, dtype) for one in r.specialists.values()]
        with torch.device("meta"):
            model = UltraFuser(
                models, "{prompt}", gate=r.gate, joint=r.joint, loss_reduction=r.reduction
            )
        return model.train_all() if train_all else model.freeze_specialists()

    def inputs(batch: int) -> dict:
        # the other half of an example is the response
        half = r.max_length // 2
        count = len(r.specialists)
        ids = torch.zeros(batch, half, dtype=torch.long)
        return {
            "prompt_ids": [ids] * count,
            "prompt_mask": [torch.ones_like(ids)] * count,
            "response_ids": ids,
            "labels": ids,
        }

    if any(one.model is None for one in r.specialists.values()):
        make = partial(_built, r.base_model, "float32")
        yield Stage(
            "specialist", make, _causal(r.max_length), r.specialist, r.max_length, r.specialist.bf16
        )
    yield Stage(
        "stage1", partial(fuser, r.dtype, False), inputs, r.stage1, r.max_length, r.stage1.bf16
    )
    yield Stage(
        "stage2", partial(fuser, "float32", True), inputs, r.stage2, r.max_length, r.stage2.bf16
    )


class Setting(NamedTuple):
    """How a stage runs: `batch` examples per GPU and forward pass."""

    engine: str
    gpus: int
    batch: int
    checkpointing: bool

    def __str__(self) -> str:
        many = f"{self.engine} on {self.gpus} GPUs" if self.gpus > 1 else "one GPU"
        return (
            f"{many}, per_device_batch_size "
            f"{self.batch}{', gradient_checkpointing' * self.checkpointing}"
        )


class Planned(NamedTuple):
    """A stage in a setting, what one GPU holds, what it sends per optimizer step, and the least
    seconds by what bounds it.
    """

    stage: str
    setting: Setting
    share: Share
    wire: Wire
    seconds: dict[str, float]

    def to_dict(self) -> dict:
        """Return all fields, JSON-ready."""
        parts = self.setting._asdict() | {
            f"{name}_bytes": size for name, size in self.share._asdict().items()
        }
        return {
            "stage": self.stage,
            **parts,
            "total_bytes": self.share.total,
            "sent": self.wire._asdict(),
            "seconds": self.seconds,
        }


class Planner:
    """The stages of a recipe, or one stage of a model; counts are shared between settings."""

    def __init__(self, recipe: Node | None, gpu: str = "H100", parts: list[Stage] = ()):
        check_choice("gpu", gpu, tuple(GPUS))
        self.stages, self.gpu = {one.name: one for one in parts or stages(recipe)}, GPUS[gpu]
        self.engines = ENGINES if recipe is None else RUNS_WITH[recipe.method]
        self._counted = functools.cache(self._count)

    @classmethod
    def of_model(
        cls,
        make: Callable,
        gpu: str = "H100",
        *,
        gpus: int = 1,
        batch: int,
        length: int,
        packed: str | None,
        optimizer: str,
        checkpointing: bool,
        bf16: bool,
    ) -> "Planner":
        """Plan one training of the model that `make()` builds, a micro-batch per optimizer step."""
        check_choice("optimizer", optimizer, memory.OPTIMIZERS)
        training = Training(
            steps=1,
            learning_rate=1e-5,
            batch_size=batch * gpus,
            per_device_batch_size=batch,
            optimizer=optimizer,
            bf16=bf16,
            gradient_checkpointing=checkpointing,
        )
        return cls(
            None,
            gpu,
            [Stage("training", make, _causal(length), training, length, bf16, packed=packed)],
        )

    def engines_for(self, name: str, engine: str | None, gpus: int) -> tuple[str, ...]:
        """Return the engines to compare for a stage: the requested one, or all that apply; one GPU
        needs none.

        Raises ValueError for expert parallelism on GPUs that do not divide the experts.
        """
        if engine is not None:
            check_choice("engine", engine, ENGINES)
        asked = (engine,) if engine else self.engines if gpus > 1 else ("ddp",)
        if "ep" not in asked:
            return asked
        counts = {p.shape[0] for p in memory.stacks_of(self.stages[name].make())}
        if counts and all(count % gpus == 0 for count in counts):
            return asked
        if engine is None:
            return tuple(one for one in asked if one != "ep")
        if counts:
            have = f"has layers of {', '.join(map(str, sorted(counts)))} experts"
        else:
            have = "has no experts"
        raise ValueError(
            f"Engine ep requires that {gpus} GPUs divide the experts, but {name} {have}. Pass "
            "another --gpus"
        )

    def setting_of(self, name: str, engine: str, gpus: int) -> Setting:
        """Return the setting of a stage in the recipe."""
        training = self.stages[name].training
        batch = training.per_device_batch_size or max(training.batch_size // gpus, 1)
        return Setting(engine, gpus, batch, training.gradient_checkpointing)

    def _count(
        self,
        name: str,
        batch: int,
        checkpointing: bool,
        accumulate: bool,
        dtype: torch.dtype | None,
    ) -> tuple[Estimate, Shapes]:
        stage = self.stages[name]
        model = stage.make()
        # accelerate's FSDP2 casts trainable weights to float32
        if dtype == torch.float32 and stage.prepare is None:
            for p in model.parameters():
                p.data = p.data.float() if p.requires_grad else p.data
        model = model.to(dtype) if dtype == torch.bfloat16 else model
        size = 2 if stage.bf16 else next(model.parameters()).element_size()
        named = stage.training.optimizer
        optimizer = NAMES.get(named, named if named in memory.OPTIMIZERS else "adamw")
        found = memory.estimate(
            model,
            lambda: stage.inputs(batch),
            optimizer=optimizer,
            checkpointing=checkpointing,
            bf16=stage.bf16,
            accumulate=accumulate,
            prepare=stage.prepare,
            packed=stage.packed,
        )
        return found, shapes_of(model, batch * stage.length, size)

    def plan(self, name: str, setting: Setting) -> Planned:
        """Return what a stage needs in a setting."""
        stage, (engine, gpus, batch, checkpointing) = self.stages[name], setting
        micro = max(stage.training.batch_size // (batch * gpus), 1)
        sharded = gpus > 1 and engine in ("fsdp2", "zero3") and stage.bf16
        counted = functools.partial(self._counted, name, batch, checkpointing, micro > 1)
        found, shapes = counted(torch.float32 if sharded else None)
        compute = 1.0
        per_device = 2 * batch * stage.length
        if sharded:  # weights are gathered in bfloat16, so autocast saves no casts of them
            narrow, smaller = counted(torch.bfloat16)
            found = found._replace(active=narrow.active)
            compute = smaller.weights / max(shapes.weights, 1)
        wire = wire_of(found, shapes, engine, gpus, micro, compute, checkpointing)
        active = found.parameters * (1 - shapes.expert_share * (1 - shapes.active_experts))
        seconds = seconds_of(
            found, wire, self.gpu, gpus, micro * per_device // 2, round(active), engine
        )
        return Planned(name, setting, share_of(found, shapes, engine, gpus, compute), wire, seconds)

    def nearest(self, name: str, setting: Setting, memory_bytes: float) -> Planned | None:
        """Return the first setting that fits: with checkpointing, one example at a time, FSDP2,
        more GPUs up to 1,024.
        """
        mild = [setting._replace(checkpointing=True), setting._replace(checkpointing=True, batch=1)]
        if "fsdp2" in self.engines:
            sharded = [one._replace(engine="fsdp2") for one in (setting, *mild)]
        else:
            sharded = []
        counts = [setting.gpus * 2**n for n in range(11) if setting.gpus * 2**n <= 1024]
        batch_size = self.stages[name].training.batch_size
        more = [
            one._replace(gpus=n)
            for n in counts
            for one in sharded
            if n > 1 and batch_size % (one.batch * n) == 0
        ]
        for one in (*mild, *more):
            found = self.plan(name, one)
            if found.share.total + RESERVED <= memory_bytes:
                return found
        return None


def as_text(found: Planned) -> str:
    """Format a stage as one line: what one GPU holds, in GB, and what it sends."""
    parts = "".join(
        f"{size / 1e9:10.1f}" for size in (*found.share, found.share.total, found.wire.bytes)
    )
    bound = max(found.seconds, key=found.seconds.get)
    return (
        f"{found.stage:12s}{found.setting.engine:>6s}{parts}  {bound} {found.seconds[bound]:.2g} s"
    )


COLUMNS = ("weights", "gradients", "optimizer", "activated", "buffers", "all", "sent")
HEADER = f"{'GB':12s}{'':>6s}{''.join(f'{name:>10s}' for name in COLUMNS)}  a step takes at least"


def recipe_of(source: str):
    """Return the recipe of a name or file; None for anything else, such as a model's folder."""
    methods = tuple(RUNS_WITH)
    shipped = {
        name
        for method in methods
        for one in shipped_recipes(method)
        for name in (one, f"{method}/{one}")
    }
    if source not in shipped and not source.endswith((".yaml", ".yml")):
        return None
    path = recipe_path(source, *methods)
    method = method_of(path)
    check_choice("method", method, methods)
    return importlib.import_module(f"moe_runtime.methods.{method}.recipe").load_recipe(path)


def machine() -> tuple[int, float, str]:
    """Return the number of processes of this run, the free bytes of memory of each, and the engine
    that the launcher sets.
    """
    gpus = int(os.environ.get("WORLD_SIZE", 1))
    engine = "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "ddp"
    engine = "zero3" if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else engine
    if torch.cuda.is_available():
        return gpus, torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0)))[0], engine
    return gpus, free_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), engine


def free_memory() -> int:
    """Return the bytes of memory that programs can still get, without swapping; all of it where
    Linux does not say.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


SMALL = 50_000_000  # parameters of a base that is not checked before it runs


def check(recipe: Node, name: str = "recipe") -> None:
    """Raise ValueError, with the numbers and the nearest setting that fits, if a stage of `run`
    does not fit here.
    """
    if getattr(recipe, "pretrain", None) is not None:
        return
    planner, (gpus, size, engine) = Planner(recipe), machine()
    for stage in planner.stages.values():
        try:
            model = stage.make() if stage.runs else None
        except ValueError:  # the run itself raises a clearer error
            return
        if model is None or sum(p.numel() for p in model.parameters()) < SMALL:
            continue
        found = planner.plan(stage.name, planner.setting_of(stage.name, engine, gpus))
        if found.share.total + RESERVED <= size:
            continue
        parts = ", ".join(
            f"{of} {value / 1e9:.1f}" for of, value in found.share._asdict().items() if value
        )
        near = planner.nearest(stage.name, found.setting, size)
        if near is None:
            fits = "No setting fits"
        else:
            fits = f"It fits with {near.setting}: {near.share.total / 1e9:.1f} GB"
        raise ValueError(
            f"{name}: stage {stage.name} needs {found.share.total / 1e9:.1f} GB per GPU ({parts}) "
            f"with {found.setting}, but only {size / 1e9:.1f} GB are free. {fits}"
        )
