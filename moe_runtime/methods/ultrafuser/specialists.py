"""Load, name and compare the specialists of an UltraFuser, and detect later changes of their
weights.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moe_runtime.hf.common.loading import load
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.io.files import is_plain_name
from moe_runtime.methods.ultrafuser.inputs import CHAT, Encoder, check_template, check_tokenizers

if TYPE_CHECKING:
    from moe_runtime.methods.ultrafuser.model import UltraFuser

CHUNK = 1 << 23  # bytes read at a time, about the size of a cache


def check_specialists(specialists: Sequence) -> None:
    """Raise ValueError unless `specialists` is a list of at least two folders or models, without
    duplicate models.
    """
    given = [one for one in specialists if not isinstance(one, (str, os.PathLike))]
    are_models = all(isinstance(model, PreTrainedModel) for model in given)
    is_one = isinstance(specialists, (str, os.PathLike))
    if is_one or len(specialists) < 2 or not are_models or len(set(given)) < len(given):
        raise ValueError(
            "specialists must be a list of at least two folders or causal LMs of transformers, "
            f"each loaded separately, but got {[type(one).__name__ for one in specialists]}. Pass "
            "get_base_model() of PEFT models"
        )


def paths_of(specialists: Sequence) -> list[str | None]:
    """Return the path that each specialist was loaded from, or None."""
    paths = []
    for one in specialists:
        if isinstance(one, nn.Module):
            path = getattr(one, "name_or_path", None) or None
        else:
            path = os.fspath(one)
        if path and os.path.isdir(path):
            path = os.path.abspath(path)
        paths.append(path)
    return paths


def open_model(
    source: StrPath | PreTrainedModel, dtype: torch.dtype | str = "auto"
) -> PreTrainedModel:
    """Load a specialist from its folder; a loaded one is returned as it is."""
    if isinstance(source, nn.Module):
        return source
    return load(AutoModelForCausalLM, source, "specialist", dtype=dtype)


def tokenizers_of(specialists: Sequence, tokenizers: Sequence) -> list:
    """Return a tokenizer for each specialist: the one given, else the one in its folder,
    else None.
    """
    tokenizers = list(tokenizers)
    for s, path in enumerate(paths_of(specialists)):
        is_folder = path is not None and Path(path, "tokenizer_config.json").is_file()
        # query the Hub only for an id that was passed, not for the recorded name of a loaded model
        is_id = not isinstance(specialists[s], nn.Module) and not os.path.isabs(path)
        if tokenizers[s] is None and (is_folder or is_id):
            tokenizers[s] = load(AutoTokenizer, path, "specialist")
    return tokenizers


@torch.no_grad()
def fingerprint(model: nn.Module) -> str | None:
    """Return a hash of a model's weights, in one pass over them on their device; None without
    weights.

    It is made of each tensor's bytes, read as 64-bit integers: their sum, and their sum weighted by
    position, modulo 2^64.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if tensor.device.type == "meta":
            return None
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        positions = torch.arange(1, min(flat.numel(), CHUNK) // 8 + 2, device=flat.device)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK]
            if part.numel() % 8 or part.storage_offset() % 8:
                part = F.pad(part, (0, -part.numel() % 8))
            part = part.view(torch.int64)
            digest.update(
                str((int(part.sum()), int((part * positions[: len(part)]).sum()))).encode()
            )
    return digest.hexdigest()


def has_changed(fuser: "UltraFuser", s: int) -> bool:
    """Whether specialist `s` has other weights than when the fuser was made.

    For a sharded or offloaded specialist, whether it has since run with gradients: comparing
    weights would need all processes, or all the weights.
    """
    model = fuser.specialists[s]
    if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        weights = fingerprint(model)
        if weights is not None:
            return weights != fuser.fingerprints[s]
    return s in fuser.touched


def unchanged_keys(fuser: "UltraFuser") -> set[str]:
    """Return the keys of specialists that have not changed and do not train, which a checkpoint can
    omit.

    A specialist that trains is saved even before its first step, so that resuming from this
    checkpoint restores it.
    """
    keys = set()
    for s, model in enumerate(fuser.specialists):
        if not trains(model) and s not in fuser.touched and not has_changed(fuser, s):
            keys |= {f"specialists.{s}.{key}" for key in model.state_dict()}
    return keys


def unsaved_reason(fuser: "UltraFuser", s: int, folder: Path) -> str | None:
    """Return why specialist `s` could not be reloaded from its own path once `folder` has been
    written, or None.
    """
    path = fuser.config.specialists[s]["path"]
    model = fuser.specialists[s]
    if path is None:
        return "was loaded from no folder"
    if os.path.isabs(path) and Path(os.path.realpath(path)).is_relative_to(folder):
        return f"is at {path} in {folder}, which is being replaced"
    if has_changed(fuser, s):
        return "has changed since it was loaded"
    if s not in fuser.opened:
        weights = fingerprint(open_model(path, dtype=model.dtype))
        if weights != fuser.fingerprints[s]:
            return f"has other weights than {path}"
    fuser.opened.add(s)
    return None


def one_each(name: str, value: Any, count: int) -> list:
    """Return `value` as a list of `count` items; raises ValueError for a list of another length."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name} must have one item for each of the {count} specialists, or one for all, but "
            f"has {len(values)}"
        )
    return values


def names_of(specialists: Sequence[Any], names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the specialists' names: the given ones, else the last parts of their folders if these
    differ.
    """
    count = len(specialists)
    candidates = names or [Path(path or "").name for path in paths_of(specialists)]
    if len(candidates) == len(set(candidates)) == count and all(map(is_plain_name, candidates)):
        return tuple(candidates)
    if names:
        raise ValueError(
            f"names must be different words, one for each of the {count} specialists, but got "
            f"{names}"
        )
    return tuple(f"specialist-{s}" for s in range(count))


def encoder_of(
    tokenizers: Sequence[PreTrainedTokenizerBase | None],
    templates: Sequence[str | None],
    names: Sequence[str],
    vocab_size: int,
) -> Encoder | None:
    """Return the encoder, with checked templates; None if a tokenizer is missing."""
    if any(tokenizer is None for tokenizer in tokenizers):
        return None
    check_tokenizers(tokenizers, names, vocab_size)
    checked = []
    for template, tokenizer in zip(templates, tokenizers, strict=True):
        default = CHAT if tokenizer.chat_template else "{prompt}"
        checked.append(check_template(template or default, tokenizer))
    return Encoder(tokenizers, checked, vocab_size)


def trains(model: nn.Module) -> bool:
    """Whether any parameter of a model requires a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())
