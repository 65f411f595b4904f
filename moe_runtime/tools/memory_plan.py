"""Recipes and several GPUs: what each stage takes of every GPU, what crosses the wire per step, and what bounds the step.

    DDP      every GPU holds all; gradients are all-reduced in buckets, which are a copy of them
    FSDP2    weights, gradients and state in n parts; a block's weights are gathered to run it, forward and backward
    ZeRO-3   the same parts; up to a billion gathered weights stay (stage3_max_live_parameters)
    EP       the stacks of experts in n parts, all else as in DDP; rows travel to their experts and back

Bytes that a GPU sends per optimizer step, P weights as they are gathered, G gradients, f = (n - 1) / n:

    DDP   2 f G        FSDP2, ZeRO-3   f (2 P m + G m)        EP   f (2 G_rest + 2 (2 + recomputed) m R H s L)

with m micro-batches, R = T K rows of H elements of s bytes, and L MoE layers. A step takes at least the longest of its
FLOPs at the GPU's rate, its bytes at the link's, and its weights, gradients and state at the memory's.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_runtime.config import check_choice
from moe_runtime.experiments.recipe import Node, Training, method_of, recipe_path, shipped_recipes
from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import become_moe, moe_fields
from moe_runtime.hf.models.modeling import model_classes
from moe_runtime.hf.training import ranks
from moe_runtime.modules.moe import Experts, MoE
from moe_runtime.tools import memory
from moe_runtime.tools.memory import Estimate

ENGINES = ("ddp", "fsdp2", "zero3", "ep")
# with which the recipes of a method run: docs/scale.md
RUNS_WITH = {"xft": ("ddp", "fsdp2"), "esft": ("ddp", "fsdp2"), "upit": ("ddp", "fsdp2"), "ultrafuser": ("ddp",)}
LIVE = 10**9  # gathered weights that ZeRO-3 lets stay, by default
RESERVED = 1.5e9  # bytes of a GPU that are not ours: CUDA's context, NCCL's buffers, fragments; a guess
# of 64 experts a layer, those that ESFT trains: the paper's most. What a task selects is known when it is scored
ESFT_MOST = 15 / 64
# transformers' names of optimizers; any other counts as AdamW
NAMES = {"adamw_torch": "adamw_torch", "adafactor": "adafactor", "sgd": "sgd", "adamw_bnb_8bit": "8bit"}


class Gpu(NamedTuple):
    """A GPU as its data sheet describes it: dense bfloat16 FLOP/s, bytes/s of memory, of NVLink and of the network, one way."""

    flops: float
    memory: float
    link: float
    network: float = 50e9  # 400 Gbit/s per GPU
    per_node: int = 8


GPUS = {"H100": Gpu(989e12, 3.35e12, 450e9), "H200": Gpu(989e12, 4.8e12, 450e9), "A800": Gpu(312e12, 2.04e12, 200e9, 25e9)}


class Stage(NamedTuple):
    """One training of a recipe: `make()` builds its model on the meta device, `inputs(B)` a batch of B examples."""

    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int], dict]
    training: Training
    length: int
    bf16: bool  # autocast
    runs: bool = True  # in `moe-runtime run`; the others are baselines of the paper's tables
    prepare: Callable[[torch.nn.Module], Any] | None = None
    packed: str | None = None  # the format of its frozen experts


class Shapes(NamedTuple):
    """What of a model says how it is split, in bytes of its weights; T tokens per micro-batch."""

    weights: int
    block: int  # the largest of its layers
    blocks: int  # how many
    outside: int  # of all layers
    expert_share: float  # of weights
    moe_layers: int
    row_bytes: int  # of a micro-batch's rows of one layer, T K H s
    active_experts: float  # share of a layer's experts that a token goes through


class Share(NamedTuple):
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # and temporaries
    buffers: int  # the engine's own: buckets, gathered blocks, rows under way

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def shapes_of(model: torch.nn.Module, tokens: int, size: int) -> Shapes:
    """Return the shapes of a model for micro-batches of `tokens` tokens of elements of `size` bytes."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    lists = [m for m in lists if not any(other is not m and other in set(m.modules()) for other in lists)]  # of layers
    blocks = [sum(map(memory.nbytes, layer.parameters())) for layers in lists for layer in layers] or [0]
    weights = sum(map(memory.nbytes, model.parameters()))
    layers, K, H, E = 0, 0, 0, 1
    for module in model.modules():
        if isinstance(module, MoE):
            c = module.config
            layers, K, H, E = layers + 1, c.top_k or c.num_experts, c.hidden_size, c.num_experts
        elif dropin.is_experts(module):
            c = module.config
            layers, K, H, E = layers + 1, getattr(c, "num_experts_per_tok", 1), c.hidden_size, module.num_experts
    share = sum(map(memory.nbytes, memory.stacks_of(model))) / max(weights, 1)
    outside, rows = weights - sum(blocks), tokens * K * H * size
    return Shapes(weights, max(blocks), len(blocks), outside, share, layers, rows, K / E)


def share_of(found: Estimate, shapes: Shapes, engine: str, gpus: int, compute: float = 1.0) -> Share:
    """Return what one of `gpus` GPUs holds; `compute` is the size of a gathered weight, in those of a stored one."""
    weights = found.experts + found.rest + found.adapters
    active = found.active if gpus > 1 and engine != "ddp" else found.activations + found.temporary - found.overlap
    if engine == "ep":
        kept = 1 - shapes.expert_share * (1 - 1 / gpus)
        parts = [math.ceil(kept * size) for size in (weights, found.gradients, found.optimizer)]
        buckets = (1 - shapes.expert_share) * found.gradients
        return Share(*parts, active, math.ceil(buckets) + 2 * shapes.row_bytes if gpus > 1 else 0)
    if engine == "ddp" or gpus == 1:
        return Share(weights, found.gradients, found.optimizer, active, found.gradients if gpus > 1 else 0)
    live = 2 * shapes.block + shapes.outside if engine == "fsdp2" else min(weights, LIVE * (shapes.weights / found.parameters))
    gathered = compute * (live + (shapes.block + shapes.outside) * found.gradients / max(weights, 1))
    parts = [math.ceil(size / gpus) for size in (weights, found.gradients, found.optimizer)]
    return Share(*parts, active, math.ceil(gathered))


class Wire(NamedTuple):
    """What one GPU sends per optimizer step."""

    bytes: int
    collectives: dict[str, int]


def wire_of(found: Estimate, shapes: Shapes, engine: str, gpus: int, micro: int = 1, compute: float = 1.0,
            checkpointing: bool = False) -> Wire:  # fmt: skip
    """Return the bytes that a GPU sends per optimizer step of `micro` micro-batches, and its collectives."""
    if gpus == 1:
        return Wire(0, {})
    f = (gpus - 1) / gpus
    if engine == "ddp":
        return Wire(math.ceil(2 * f * found.gradients), {"all_reduce": _buckets(found.gradients)})
    if engine == "ep":
        experts = shapes.expert_share * shapes.weights
        rest = found.gradients * (1 - experts / max(shapes.weights, 1))
        exchanges = shapes.moe_layers * micro * (4 + 2 * checkpointing)
        # beside the rows go their counts, once in each forward pass
        count = {"all_to_all": shapes.moe_layers * micro * (5 + 3 * checkpointing), "all_reduce": _buckets(rest)}
        return Wire(math.ceil(f * (2 * rest + exchanges * shapes.row_bytes)), count)
    # what is outside the blocks is gathered once and stays until the backward pass ends
    inside = shapes.weights - shapes.outside
    gathered = compute * (2 * inside + shapes.outside) * micro
    count = {"all_gather": (2 * shapes.blocks + 1) * micro, "reduce_scatter": (shapes.blocks + 1) * micro}
    return Wire(math.ceil(f * (gathered + compute * found.gradients * micro)), count)


def _buckets(gradients: float) -> int:
    """Return how many all-reduces DDP makes of gradients of so many bytes: the first takes 1 MiB, each other one 25."""
    return 1 + math.ceil(max(gradients - 2**20, 0) / (25 * 2**20))


def seconds_of(
    found: Estimate, wire: Wire, gpu: Gpu, gpus: int, tokens: int, active: int, engine: str = "ddp"
) -> dict[str, float]:
    """Return the least seconds of a step by what bounds it: its FLOPs (6 per token and active weight), link and memory."""
    link = gpu.link if gpus <= gpu.per_node else gpu.network
    states = found.states / (gpus if engine in ("fsdp2", "zero3") else 1)
    return {"compute": 6 * tokens * active / gpu.flops, "link": wire.bytes / link, "memory": 3 * states / gpu.memory}


def stages(recipe: Node) -> list[Stage]:
    """Return the trainings of a recipe; raises ValueError for one that pre-trains its base, which is small."""
    if getattr(recipe, "pretrain", None) is not None:
        raise ValueError(f"recipe {recipe.name} pre-trains its own small base; use a recipe with base_model")
    return list({"xft": _xft, "esft": _esft, "upit": _upit, "ultrafuser": _ultrafuser}[recipe.method](recipe))


def _causal(length: int) -> Callable[[int], dict]:
    return lambda batch: memory.causal_batch(batch, length)


def _built(source: str, dtype: str, change: Callable = lambda config: config):
    return memory.built(change(ranks.load_config(source)), dtype)


def _xft(r) -> Iterator[Stage]:
    def moe(config):
        return folders.upcycled_config(config, folders.config_for_folder(config, **r.experts))

    def mixed(config):
        return folders.mergeable_config(moe(config), r.shared_rate, False)

    for name, training, change in (("sft", r.sft, lambda config: config), ("tune", r.tune, moe), ("mix", r.mix, mixed)):
        make = partial(_built, r.base_model, r.dtype, change)
        yield Stage(name, make, _causal(r.data.max_length), training, r.data.max_length, training.bf16, name != "sft")


def _esft(r) -> Iterator[Stage]:
    from moe_runtime.hf.training.trainable import freeze_for_esft, layers_of

    def selected(model) -> None:
        dtype = None if r.trained_dtype is None else getattr(torch, r.trained_dtype)
        ids = {number: range(math.ceil(ESFT_MOST * layer.num_experts)) for number, layer in layers_of(model).items()}
        freeze_for_esft(model, ids, dtype=dtype)

    def stage(name, training, make, prepare=None):
        runs, inputs = name == "esft", _causal(r.max_length)
        return Stage(name, make, inputs, training, r.max_length, training.bf16, runs, prepare)

    yield stage("fft", r.fft, partial(_built, r.base_model, r.trained_dtype or r.dtype))
    yield stage("lora", r.lora.training, lambda: memory.add_lora(_built(r.base_model, r.dtype), r.lora.rank))
    yield stage("esft", r.esft, partial(_built, r.base_model, r.dtype), selected)


def _upit(r) -> Iterator[Stage]:
    from moe_runtime.methods.lora import baseline
    from moe_runtime.methods.upit.vectors import RoutingVectors

    def moe(config):
        return folders.upcycled_config(config, folders.config_for_folder(config, **r.experts.to_dict()))

    def vectors(model) -> None:
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        zeros = torch.zeros(model.config.num_hidden_layers, model.config.hidden_size)
        RoutingVectors(model, zeros, r.router.alpha, r.router.detach_h).train_only(r.router.train_ffn)

    def pairs():
        with torch.device("meta"):
            return baseline.add_mlp_lora(_built(r.base_model, r.dtype), r.lora.rank, r.lora.alpha)

    def lora_moe(config):
        block = {"form": "block", "rank": r.lora.rank, "alpha": r.lora.alpha, "targets": ["gate_proj", "up_proj", "down_proj"]}
        fields = moe_fields(
            folders.config_for_folder(config, **r.experts.to_dict()), layers=list(range(config.num_hidden_layers)),
            base_model_type=config.model_type, base_architecture=model_classes(config.model_type).base_causal_lm.__name__,
            stage="lora", lora=block | {"dtype": "float32", "train_backbone": False, "backbone": "base"},
        )  # fmt: skip
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
            yield Stage(f"{form} {name}", make, _causal(r.max_length), training, r.max_length, training.bf16, True, prepare)


def _ultrafuser(r) -> Iterator[Stage]:
    from moe_runtime.methods.ultrafuser.model import UltraFuser

    def fuser(dtype: str, train_all: bool):
        models = [_built(one.model or r.base_model, dtype) for one in r.specialists.values()]
        with torch.device("meta"):
            model = UltraFuser(models, "{prompt}", gate=r.gate, joint=r.joint, loss_reduction=r.reduction)
        return model.train_all() if train_all else model.freeze_specialists()

    def inputs(batch: int) -> dict:
        half, count = r.max_length // 2, len(r.specialists)  # of a row, the other half is the response
        ids = torch.zeros(batch, half, dtype=torch.long)
        return {"prompt_ids": [ids] * count, "prompt_mask": [torch.ones_like(ids)] * count, "response_ids": ids, "labels": ids}

    if any(one.model is None for one in r.specialists.values()):
        make = partial(_built, r.base_model, "float32")
        yield Stage("specialist", make, _causal(r.max_length), r.specialist, r.max_length, r.specialist.bf16)
    yield Stage("stage1", partial(fuser, r.dtype, False), inputs, r.stage1, r.max_length, r.stage1.bf16)
    yield Stage("stage2", partial(fuser, "float32", True), inputs, r.stage2, r.max_length, r.stage2.bf16)


class Setting(NamedTuple):
    """How a stage runs: `batch` examples per GPU and forward pass."""

    engine: str
    gpus: int
    batch: int
    checkpointing: bool

    def __str__(self) -> str:
        many = f"{self.engine} on {self.gpus} GPUs" if self.gpus > 1 else "one GPU"
        return f"{many}, per_device_batch_size {self.batch}{', gradient_checkpointing' * self.checkpointing}"


class Planned(NamedTuple):
    """A stage in a setting, what one GPU holds, what it sends per optimizer step, and the least seconds by what bounds it."""

    stage: str
    setting: Setting
    share: Share
    wire: Wire
    seconds: dict[str, float]

    def to_dict(self) -> dict:
        """Return all of it, ready for JSON."""
        parts = self.setting._asdict() | {f"{name}_bytes": size for name, size in self.share._asdict().items()}
        return {
            "stage": self.stage,
            **parts,
            "total_bytes": self.share.total,
            "sent": self.wire._asdict(),
            "seconds": self.seconds,
        }


class Planner:
    """The stages of a recipe, or one of a model; what is counted for one setting is not counted again for another."""

    def __init__(self, recipe: Node | None, gpu: str = "H100", parts: list[Stage] = ()):
        check_choice("gpu", gpu, tuple(GPUS))
        self.stages, self.gpu = {one.name: one for one in parts or stages(recipe)}, GPUS[gpu]
        self.engines = ENGINES if recipe is None else RUNS_WITH[recipe.method]
        self._counted = functools.cache(self._count)

    @classmethod
    def of_model(
        cls, make: Callable, gpu: str = "H100", *, gpus: int = 1, batch: int, length: int, packed: str | None,
        optimizer: str, checkpointing: bool, bf16: bool,
    ) -> "Planner":  # fmt: skip
        """Plan one training of the model that `make()` builds, a micro-batch per optimizer step."""
        check_choice("optimizer", optimizer, memory.OPTIMIZERS)
        training = Training(
            steps=1, learning_rate=1e-5, batch_size=batch * gpus, per_device_batch_size=batch, optimizer=optimizer, bf16=bf16,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        return cls(None, gpu, [Stage("training", make, _causal(length), training, length, bf16, packed=packed)])

    def engines_for(self, name: str, engine: str | None, gpus: int) -> tuple[str, ...]:
        """Return the engines to compare for a stage: the one that is asked for, or all that run; one GPU needs none.

        Raises ValueError for expert parallelism on GPUs that do not divide the experts.
        """
        if engine not in (None, "ep"):
            check_choice("engine", engine, ENGINES)
            return (engine,)
        counts = {m.num_experts for m in self.stages[name].make().modules() if dropin.is_experts(m) or isinstance(m, Experts)}
        divide = bool(counts) and all(count % gpus == 0 for count in counts)
        if engine == "ep" and not divide:
            have = f"has layers of {', '.join(map(str, counts))} experts" if counts else "has no experts"
            raise ValueError(f"engine is ep on {gpus} GPUs, {name} {have}; pass a number of GPUs that divides the experts")
        several = [one for one in self.engines if one != "ep" or divide] if engine is None else ["ep"]
        return tuple(several) if gpus > 1 else ("ddp",)

    def setting_of(self, name: str, engine: str, gpus: int) -> Setting:
        """Return the recipe's own setting of a stage."""
        training = self.stages[name].training
        batch = training.per_device_batch_size or max(training.batch_size // gpus, 1)
        return Setting(engine, gpus, batch, training.gradient_checkpointing)

    def _count(self, name: str, batch: int, checkpointing: bool, accumulate: bool, narrow: bool) -> tuple[Estimate, Shapes]:
        stage = self.stages[name]
        model = stage.make()
        model = model.to(torch.bfloat16) if narrow else model
        size = 2 if stage.bf16 or narrow else next(model.parameters()).element_size()
        named = stage.training.optimizer
        optimizer = NAMES.get(named, named if named in memory.OPTIMIZERS else "adamw")
        found = memory.estimate(
            model, lambda: stage.inputs(batch), optimizer=optimizer, checkpointing=checkpointing, bf16=stage.bf16,
            accumulate=accumulate, prepare=stage.prepare, packed=stage.packed,
        )  # fmt: skip
        return found, shapes_of(model, batch * stage.length, size)

    def plan(self, name: str, setting: Setting) -> Planned:
        """Return what a stage takes in a setting."""
        stage, (engine, gpus, batch, checkpointing) = self.stages[name], setting
        micro = max(stage.training.batch_size // (batch * gpus), 1)
        found, shapes = self._counted(name, batch, checkpointing, micro > 1, False)
        compute, per_device = 1.0, 2 * batch * stage.length
        if gpus > 1 and engine in ("fsdp2", "zero3") and stage.bf16:  # which gather weights in bfloat16: no casts are kept
            narrow, smaller = self._counted(name, batch, checkpointing, micro > 1, True)
            found, compute = found._replace(active=narrow.active), smaller.weights / max(shapes.weights, 1)
        wire = wire_of(found, shapes, engine, gpus, micro, compute, checkpointing)
        active = found.parameters * (1 - shapes.expert_share * (1 - shapes.active_experts))
        seconds = seconds_of(found, wire, self.gpu, gpus, micro * per_device // 2, round(active), engine)
        return Planned(name, setting, share_of(found, shapes, engine, gpus, compute), wire, seconds)

    def nearest(self, name: str, setting: Setting, memory_bytes: float) -> Planned | None:
        """Return the first setting that fits: with checkpointing, one example at a time, FSDP2, more GPUs up to 1,024."""
        mild = [setting._replace(checkpointing=True), setting._replace(checkpointing=True, batch=1)]
        sharded = [one._replace(engine="fsdp2") for one in (setting, *mild)] if "fsdp2" in self.engines else []
        counts = [setting.gpus * 2**n for n in range(11) if setting.gpus * 2**n <= 1024]
        batch_size = self.stages[name].training.batch_size
        more = [one._replace(gpus=n) for n in counts for one in sharded if n > 1 and batch_size % (one.batch * n) == 0]
        for one in (*mild, *more):
            found = self.plan(name, one)
            if found.share.total + RESERVED <= memory_bytes:
                return found
        return None


def as_text(found: Planned) -> str:
    """Return one line of a stage: what one GPU holds, in GB, and what it sends."""
    parts = "".join(f"{size / 1e9:10.1f}" for size in (*found.share, found.share.total, found.wire.bytes))
    bound = max(found.seconds, key=found.seconds.get)
    return f"{found.stage:12s}{found.setting.engine:>6s}{parts}  {bound} {found.seconds[bound]:.2g} s"


COLUMNS = ("weights", "gradients", "optimizer", "activated", "buffers", "all", "sent")
HEADER = f"{'GB':12s}{'':>6s}{''.join(f'{name:>10s}' for name in COLUMNS)}  a step takes at least"


def recipe_of(source: str):
    """Return the recipe that a name or a file is of; None for anything else, such as a model's folder."""
    methods = tuple(RUNS_WITH)
    shipped = {name for method in methods for one in shipped_recipes(method) for name in (one, f"{method}/{one}")}
    if source not in shipped and not source.endswith((".yaml", ".yml")):
        return None
    path = recipe_path(source, *methods)
    method = method_of(path)
    check_choice("method", method, methods)
    return importlib.import_module(f"moe_runtime.methods.{method}.recipe").load_recipe(path)


def machine() -> tuple[int, float, str]:
    """Return how many processes this run has, the bytes of memory of one, and the engine that its launcher sets."""
    gpus = int(os.environ.get("WORLD_SIZE", 1))
    engine = "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "ddp"
    engine = "zero3" if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else engine
    if torch.cuda.is_available():
        return gpus, torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0))).total_memory, engine
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return gpus, whole / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), engine


SMALL = 50_000_000  # parameters of a base that is not checked before it runs


def check(recipe: Node, name: str = "recipe") -> None:
    """Raise ValueError, with the numbers and the nearest setting that fits, for a stage of `run` that does not fit here."""
    if getattr(recipe, "pretrain", None) is not None:
        return
    planner, (gpus, size, engine) = Planner(recipe), machine()
    for stage in planner.stages.values():
        try:
            model = stage.make() if stage.runs else None
        except ValueError:  # the run says it with the recipe's own words
            return
        if model is None or sum(p.numel() for p in model.parameters()) < SMALL:
            continue
        found = planner.plan(stage.name, planner.setting_of(stage.name, engine, gpus))
        if found.share.total + RESERVED <= size:
            continue
        parts = ", ".join(f"{of} {value / 1e9:.1f}" for of, value in found.share._asdict().items() if value)
        near = planner.nearest(stage.name, found.setting, size)
        fits = "no setting of it that runs fits" if near is None else f"{near.setting} fits, in {near.share.total / 1e9:.1f} GB"
        raise ValueError(
            f"{name}: stage {stage.name} takes {found.share.total / 1e9:.1f} GB per GPU ({parts}) with {found.setting}, and "
            f"there are {size / 1e9:.1f} GB; {fits}"
        )
