"""Memory of trainings on several GPUs: what each needs with each engine."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

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


class Stage(NamedTuple):
    """One training: `make()` builds its model on the meta device, `inputs(B)` a batch
    of B examples.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int], dict]
    training: Training
    length: int
    bf16: bool  # autocast
    runs: bool = True  # False: a baseline of a table
    prepare: Callable[[torch.nn.Module], Any] | None = None
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
    """Trainings on one kind of GPU with the engines that run them; counts are shared between
    settings.
    """

    def __init__(
        self, stages: Sequence[Stage], gpu: str = "H100", engines: Sequence[str] = ENGINES
    ):
        check_choice("gpu", gpu, tuple(GPUS))
        self.stages = {one.name: one for one in stages}
        self.gpu = GPUS[gpu]
        self.engines = tuple(engines)
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
        inputs = causal_inputs(length)
        return cls([Stage("training", make, inputs, training, length, bf16, packed=packed)], gpu)

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
