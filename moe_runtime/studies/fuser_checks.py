"""What an UltraFuser study needs of its models and processes, checked before anything is made: from configs, not weights."""

import os
from pathlib import Path

from moe_runtime.hf import ranks
from moe_runtime.hf.fuser_training import hidden_size
from moe_runtime.hf.ultrafuser_inputs import Encoder, check_template, check_tokenizers
from moe_runtime.studies.fuser_recipe import FuserRecipe


def check_engine() -> None:
    """Raise ValueError where accelerate would split a model, or wrap it in anything but DDP."""
    engine = ranks.engine()
    if engine != "NO" and not engine.startswith("MULTI_"):
        raise ValueError(
            f"accelerate's distributed_type is {engine}; want NO or MULTI_GPU (DDP): fused models are not sharded"
        )


def check_models(recipe: FuserRecipe) -> None:
    """Raise ValueError, with the key, for models that are not there or do not fit together.

    A tokenizer that is trained here is checked when it is there, before any model is trained.
    """
    given = {
        f"specialists.{name}.model": one.model for name, one in recipe.specialists.items() if one.model is not None
    }
    named = given | ({} if recipe.base_model is None else {"base_model": recipe.base_model})
    for name, source in named.items():
        check_source(name, source)
    if not given:
        return  # all are of one base
    sizes = {name: hidden_size(source, name) for name, source in named.items()}
    if recipe.pretrain is not None:
        sizes["pretrain.hidden_size"] = recipe.pretrain.hidden_size
    if not recipe.joint and len(set(sizes.values())) > 1:
        said = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        raise ValueError(f"joint is False, the hidden sizes are {said}; want joint: true, or models of one size")
    if recipe.pretrain is None:
        encoder_of(recipe, None if recipe.base_model is None else ranks.load_tokenizer(recipe.base_model))


def check_source(name: str, source: str) -> None:
    """Raise ValueError for a folder that is no model's, or is not there: the Hub would be asked for it, again and again."""
    path, want = Path(source), "want a model's folder, or an id of the Hub"
    if path.exists():
        if not (path / "config.json").is_file():
            raise ValueError(f"{name} is {source!r}, which has no config.json; {want}")
        return
    is_id = len(path.parts) <= 2 and source[0] not in f".~{os.sep}" and not source.endswith(os.sep)
    if not is_id or (len(path.parts) == 2 and path.parent.is_dir()):
        raise ValueError(f"{name} is {source!r}, which does not exist; {want}")


def encoder_of(recipe: FuserRecipe, own) -> Encoder:
    """Return what encodes for a recipe's specialists, with the base's tokenizer `own` and those of given models.

    Raises ValueError for other ids than the first one's, and for templates that do not fit.
    """
    names, specialists = list(recipe.specialists), recipe.specialists.values()
    tokenizers = [
        own if one.model is None else ranks.load_tokenizer(one.model, f"specialists.{name}.model")
        for name, one in recipe.specialists.items()
    ]
    vocab_size = min(map(len, tokenizers))
    check_tokenizers(tokenizers, names, vocab_size)
    templates = [check_template(one.template, of) for one, of in zip(specialists, tokenizers, strict=True)]
    return Encoder(tokenizers, templates, vocab_size)
