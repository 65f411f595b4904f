"""Memory of recipes on several GPUs: what each stage needs per GPU with each engine, and whether it
fits.

The stages are those of the methods' studies, built from configs only; `python -m papers run` calls
`check` before it starts.
"""

import importlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import torch

from moe_runtime.config import check_choice
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import become_moe, moe_fields
from moe_runtime.hf.models.modeling import model_classes
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.settings import Node
from moe_runtime.tools import memory
from moe_runtime.tools.memory_plan import RESERVED, PlannedTraining, Planner
from papers.engine.recipe import method_of, recipe_path, shipped_recipes

# the most experts per layer (of 64) that ESFT trains in the paper; a task's selection is known only
# after scoring
ESFT_MOST = 15 / 64


def planner_of(recipe: Node) -> Planner:
    """Return the Planner of a recipe's trainings, with the engines that run it: docs/scale.md."""
    return Planner(stages(recipe), ("ddp", "fsdp2"))


def stages(recipe: Node) -> list[PlannedTraining]:
    """Return the trainings of a recipe; raises ValueError for one that pre-trains its base, which
    is small.
    """
    if getattr(recipe, "pretrain", None) is not None:
        raise ValueError(
            f"Recipe {recipe.name} pre-trains a small base. Choose a recipe with base_model"
        )
    return list(MAKERS[recipe.method](recipe))


def _stage(
    r, name: str, training, make: Callable, runs: bool = True, prepare=None
) -> PlannedTraining:
    """Return a training of a causal LM on samples of the recipe's length."""
    length = getattr(r, "data", r).max_length
    return PlannedTraining(
        name,
        make,
        lambda batch: memory.causal_batch(batch, length),
        training,
        length,
        runs,
        prepare,
    )


def _built(source: str, dtype: str, change: Callable = lambda config: config):
    return memory.built(change(ranks.load_config(source)), dtype)


def _xft(r) -> Iterator[PlannedTraining]:
    def moe(config):
        fields = folders.config_for_folder(config, **r.experts)
        return folders.upcycled_config(config, fields, r.layers)

    def mixed(config):
        return folders.mergeable_config(moe(config), r.shared_rate, False)

    built = partial(_built, r.base_model, r.dtype)
    yield _stage(r, "sft", r.sft, built, runs=False)
    yield _stage(
        r,
        "tune",
        r.tune,
        partial(built, moe),
    )
    yield _stage(
        r,
        "mix",
        r.mix,
        partial(built, mixed),
    )


def _esft(r) -> Iterator[PlannedTraining]:
    from moe_runtime.hf.training.trainable import layers_of
    from moe_runtime.methods.esft.freezing import freeze_for_esft

    def selected(model) -> None:
        dtype = None if r.trained_dtype is None else getattr(torch, r.trained_dtype)
        ids = {}
        for number, layer in layers_of(model).items():
            ids[number] = range(math.ceil(ESFT_MOST * layer.num_experts))
        freeze_for_esft(model, ids, dtype=dtype)

    def lora():
        return memory.add_lora(built(), r.lora.rank)

    built = partial(_built, r.base_model, r.dtype)
    whole = partial(
        _built,
        r.base_model,
        r.trained_dtype or r.dtype,
    )
    yield _stage(r, "fft", r.fft, whole, runs=False)
    yield _stage(
        r,
        "lora",
        r.lora.training,
        lora,
        runs=False,
    )
    yield _stage(r, "esft", r.esft, built, prepare=selected)


def _upit(r) -> Iterator[PlannedTraining]:
    from moe_runtime.methods.lora import baseline
    from moe_runtime.methods.upit.vectors import RoutingVectors

    def moe(config):
        fields = folders.config_for_folder(config, **r.experts.to_dict())
        return folders.upcycled_config(config, fields)

    def vectors(model) -> None:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        zeros = torch.zeros(model.config.num_hidden_layers, model.config.hidden_size)
        RoutingVectors(model, zeros, r.router.alpha).train_only()

    def pairs():
        with torch.device("meta"):
            return baseline.add_mlp_lora(
                _built(r.base_model, r.dtype),
                r.lora.rank,
                r.lora.alpha,
            )

    def lora_moe(config):
        classes = model_classes(config.model_type)
        fields = moe_fields(
            folders.config_for_folder(config, **r.experts.to_dict()),
            layers=list(range(config.num_hidden_layers)),
            base_model_type=config.model_type,
            base_architecture=classes.base_causal_lm.__name__,
            stage="lora",
            lora={
                "form": "block",
                "rank": r.lora.rank,
                "alpha": r.lora.alpha,
                "targets": ["gate_proj", "up_proj", "down_proj"],
                "dtype": "float32",
                "train_backbone": False,
                "backbone": "base",
            },
        )
        become_moe(config, classes, fields)
        return config

    whole = partial(_built, r.base_model, "float32")
    makes = {
        "ffn": (whole, partial(whole, moe)),
        "lora": (pairs, partial(_built, r.base_model, r.dtype, lora_moe)),
    }
    for form in r.forms:
        trainings = getattr(r, form)
        dense, mixture = makes[form]
        yield _stage(
            r,
            f"{form} sft",
            trainings.sft,
            dense,
        )
        yield _stage(
            r,
            f"{form} init",
            trainings.init,
            dense,
            prepare=vectors,
        )
        yield _stage(
            r,
            f"{form} post",
            trainings.post,
            mixture,
        )


def _ultrafuser(r) -> Iterator[PlannedTraining]:
    from moe_runtime.methods.ultrafuser.model import UltraFuser

    def fuser(dtype: str, train_all: bool):
        models = [_built(one.model or r.base_model, dtype) for one in r.specialists.values()]
        with torch.device("meta"):
            model = UltraFuser(
                models,
                "{prompt}",
                gate=r.gate,
                joint=r.joint,
                loss_reduction=r.reduction,
            )
        return model.train_all() if train_all else model.freeze_specialists()

    def inputs(batch: int) -> dict:
        # the other half of an example is the response
        ids = torch.zeros(
            batch,
            r.max_length // 2,
            dtype=torch.long,
        )
        count = len(r.specialists)
        return {
            "prompt_ids": [ids] * count,
            "prompt_mask": [torch.ones_like(ids)] * count,
            "response_ids": ids,
            "labels": ids,
        }

    if any(one.model is None for one in r.specialists.values()):
        yield _stage(
            r,
            "specialist",
            r.specialist,
            partial(_built, r.base_model, "float32"),
        )
    stages = (("stage1", r.stage1, r.dtype, False), ("stage2", r.stage2, "float32", True))
    for name, training, dtype, train_all in stages:
        stage = _stage(
            r,
            name,
            training,
            partial(fuser, dtype, train_all),
        )
        yield stage._replace(inputs=inputs)


MAKERS = {"xft": _xft, "esft": _esft, "upit": _upit, "ultrafuser": _ultrafuser}


def recipe_of(source: str):
    """Return the recipe of a name or file; None for anything else, such as a model's folder."""
    methods = tuple(MAKERS)
    if not source.endswith((".yaml", ".yml")):
        shipped = []
        for method in methods:
            for name in shipped_recipes(method):
                shipped += [name, f"{method}/{name}"]
        if source not in shipped:
            return None
    path = recipe_path(source, *methods)
    method = method_of(path)
    check_choice("method", method, methods)
    return importlib.import_module(f"papers.{method}.recipe").load_recipe(path)


def machine() -> tuple[int, float, str]:
    """Return the number of processes of this run, the free bytes of memory of each, and the engine
    that the launcher sets.
    """
    env = os.environ
    gpus = int(env.get("WORLD_SIZE", "1"))
    engine = "ddp"
    if env.get("ACCELERATE_USE_DEEPSPEED") == "true":
        engine = "zero3"
    elif env.get("ACCELERATE_USE_FSDP") == "true":
        engine = "fsdp2"
    if torch.cuda.is_available():
        return gpus, torch.cuda.mem_get_info(int(env.get("LOCAL_RANK", "0")))[0], engine
    return gpus, psutil.virtual_memory().available / int(env.get("LOCAL_WORLD_SIZE", "1")), engine


SMALL = 50_000_000  # parameters of a base that is not checked before it runs


def check(recipe: Node, name: str = "recipe") -> None:
    """Raise ValueError, with the numbers, if a stage of `run` does not fit here."""
    if getattr(recipe, "pretrain", None) is not None:
        return
    planner = planner_of(recipe)
    gpus, size, engine = machine()
    for stage in planner.stages.values():
        if not stage.runs:
            continue
        try:
            model = stage.make()
        except ValueError:  # the run itself raises a clearer error
            return
        if sum(p.numel() for p in model.parameters()) < SMALL:
            continue
        share = planner.share(stage.name, engine, gpus)
        if share.total + RESERVED > size:
            parts = ", ".join(f"{of} {part / 1e9:.1f}" for of, part in share._asdict().items())
            raise ValueError(
                f"{name}: stage {stage.name} needs {share.total / 1e9:.1f} GB per GPU ({parts}), "
                f"but only {size / 1e9:.1f} GB are free. Try gradient_checkpointing, a smaller "
                "per_device_batch_size, or FSDP2 on several GPUs"
            )
