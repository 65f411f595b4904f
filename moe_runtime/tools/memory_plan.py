"""Memory of trainings on several GPUs: what a GPU needs with each engine, and whether it fits."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_runtime.config import check_choice
from moe_runtime.hf.training.settings import Training
from moe_runtime.tools import memory
from moe_runtime.tools.memory import Estimate
from moe_runtime.tools.memory_engines import (
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

RESERVED = 1.5e9  # assumed bytes for the CUDA context, NCCL's buffers and fragmentation

# names of optimizers in transformers; any other counts as AdamW
NAMES = {
    "adamw_torch": "adamw_torch",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adamw_bnb_8bit": "8bit",
}


class PlannedTraining(NamedTuple):
    """One training: `make()` builds its model on the meta device, `inputs(B)` a batch."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict]
    training: Training
    length: int
    bf16: bool  # autocast
    runs: bool = True  # False: a baseline of a table
    prepare: Callable[[nn.Module], Any] | None = None
    packed: str | None = None  # the format of its frozen experts


def causal_inputs(length: int) -> Callable[[int], dict]:
    """Return `inputs` of a Stage for a causal LM: batches of B examples of `length` tokens."""
    return lambda batch: memory.causal_batch(batch, length)


class Setting(NamedTuple):
    """How a stage runs: `batch` examples per GPU and forward pass."""

    engine: str
    gpus: int
    batch: int
    checkpointing: bool

    def __str__(self) -> str:
        gpus = f"{self.engine} on {self.gpus} GPUs" if self.gpus > 1 else "one GPU"
        text = f"{gpus}, per_device_batch_size {self.batch}"
        return f"{text}, gradient_checkpointing" if self.checkpointing else text


class Planned(NamedTuple):
    """A stage in a setting: what a GPU holds, what it sends per step, and the least seconds."""

    stage: str
    setting: Setting
    share: Share
    wire: Wire
    seconds: dict[str, float]  # by what bounds them

    def to_dict(self) -> dict:
        """Return all fields, JSON-ready."""
        fields = {"stage": self.stage} | self.setting._asdict()
        for name, size in self.share._asdict().items():
            fields[f"{name}_bytes"] = size
        fields["total_bytes"] = self.share.total
        return fields | {"sent": self.wire._asdict(), "seconds": self.seconds}


class Planner:
    """Trainings on one kind of GPU, with the engines that run them."""

    def __init__(
        self, stages: Sequence[PlannedTraining], gpu: str = "H100", engines: Sequence[str] = ENGINES
    ):
        check_choice("gpu", gpu, tuple(GPUS))
        self.stages = {one.name: one for one in stages}
        self.gpu = GPUS[gpu]
        self.engines = tuple(engines)
        self._counted = functools.cache(self._count)  # settings share counts

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
        inputs = causal_inputs(length)
        return cls(
            [
                PlannedTraining(
                    "training",
                    make,
                    inputs,
                    training,
                    length,
                    bf16,
                    packed=packed,
                )
            ],
            gpu,
        )

    def engines_for(self, name: str, engine: str | None, gpus: int) -> tuple[str, ...]:
        """Return the engines to compare for a stage: the requested one, or all that apply.

        Raises ValueError for expert parallelism on GPUs that do not divide the experts.
        """
        if engine is not None:
            check_choice("engine", engine, ENGINES)
            engines = (engine,)
        elif gpus > 1:
            engines = self.engines
        else:
            engines = ("ddp",)
        if "ep" not in engines:
            return engines
        counts = {p.shape[0] for p in memory.stacks_of(self.stages[name].make())}
        if counts and all(count % gpus == 0 for count in counts):
            return engines
        if engine is None:
            return tuple(one for one in engines if one != "ep")
        experts = "no experts"
        if counts:
            experts = f"layers of {', '.join(map(str, sorted(counts)))} experts"
        raise ValueError(
            f"Engine ep requires that {gpus} GPUs divide the experts, but {name} has {experts}. "
            "Pass another --gpus"
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
                if p.requires_grad:
                    p.data = p.data.float()
        if dtype == torch.bfloat16:
            model = model.to(dtype)
        size = 2 if stage.bf16 else next(model.parameters()).element_size()
        optimizer = NAMES.get(stage.training.optimizer, stage.training.optimizer)
        if optimizer not in memory.OPTIMIZERS:
            optimizer = "adamw"
        estimate = memory.estimate(
            model,
            lambda: stage.inputs(batch),
            optimizer=optimizer,
            checkpointing=checkpointing,
            bf16=stage.bf16,
            accumulate=accumulate,
            prepare=stage.prepare,
            packed=stage.packed,
        )
        return estimate, shapes_of(model, batch * stage.length, size)

    def plan(self, name: str, setting: Setting) -> Planned:
        """Return what a stage needs in a setting."""
        stage = self.stages[name]
        engine, gpus, batch, checkpointing = setting
        micro = max(stage.training.batch_size // (batch * gpus), 1)
        sharded = gpus > 1 and engine in ("fsdp2", "zero3") and stage.bf16
        counted = functools.partial(
            self._counted,
            name,
            batch,
            checkpointing,
            micro > 1,
        )
        estimate, shapes = counted(torch.float32 if sharded else None)
        compute = 1.0
        if sharded:  # weights are gathered in bfloat16, so autocast saves no casts of them
            narrow, smaller = counted(torch.bfloat16)
            estimate = estimate._replace(active=narrow.active)
            compute = smaller.weights / max(shapes.weights, 1)
        wire = wire_of(
            estimate,
            shapes,
            engine,
            gpus,
            micro,
            compute,
            checkpointing,
        )
        active = estimate.parameters * (1 - shapes.expert_share * (1 - shapes.active_experts))
        tokens = micro * batch * stage.length
        seconds = seconds_of(
            estimate,
            wire,
            self.gpu,
            gpus,
            tokens,
            round(active),
            engine,
        )
        share = share_of(estimate, shapes, engine, gpus, compute)
        return Planned(name, setting, share, wire, seconds)

    def nearest(self, name: str, setting: Setting, memory_bytes: float) -> Planned | None:
        """Return the first setting that fits, or None.

        Tried are checkpointing, one example at a time, then FSDP2 on up to 1,024 GPUs.
        """
        small = [
            setting._replace(checkpointing=True),
            setting._replace(checkpointing=True, batch=1),
        ]
        settings = list(small)
        gpus = setting.gpus
        while "fsdp2" in self.engines and gpus <= 1024:
            for one in (setting, *small):
                divides = self.stages[name].training.batch_size % (one.batch * gpus) == 0
                if gpus > 1 and divides:
                    settings.append(one._replace(engine="fsdp2", gpus=gpus))
            gpus *= 2
        for one in settings:
            planned = self.plan(name, one)
            if planned.share.total + RESERVED <= memory_bytes:
                return planned
        return None


def as_text(planned: Planned) -> str:
    """Format a stage as one line: what one GPU holds, in GB, and what it sends."""
    sizes = (*planned.share, planned.share.total, planned.wire.bytes)
    columns = "".join(f"{size / 1e9:10.1f}" for size in sizes)
    bound = max(planned.seconds, key=planned.seconds.get)
    name = f"{planned.stage:12s}{planned.setting.engine:>6s}"
    return f"{name}{columns}  {bound} {planned.seconds[bound]:.2g} s"


COLUMNS = ("weights", "gradients", "optimizer", "activated", "buffers", "all", "sent")

HEADER = f"{'GB':12s}{'':>6s}{''.join(f'{name:>10s}' for name in COLUMNS)}  a step takes at least"
