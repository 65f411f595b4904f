"""The specialists of an UltraFuser before they are fused: opened, named, checked against each other, recognised later."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moe_runtime.files import is_plain_name
from moe_runtime.hf.ultrafuser_inputs import CHAT, Encoder, check_template, check_tokenizers

CHUNK = 1 << 24  # numbers that are looked at together


def paths_of(specialists: Sequence) -> list[str | None]:
    """Return where each specialist was loaded from, if from anywhere."""
    paths = [
        getattr(one, "name_or_path", None) if isinstance(one, nn.Module) else os.fspath(one) for one in specialists
    ]
    return [os.path.abspath(path) if path and os.path.isdir(path) else path or None for path in paths]


def open_model(source, dtype="auto") -> PreTrainedModel:
    """Load a specialist from its folder; a loaded one is returned as it is."""
    if isinstance(source, nn.Module):
        return source
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".:")
        raise ValueError(
            f"specialist is {str(source)!r}, which transformers cannot load: {reason}; want a folder or an id of the Hub"
        ) from error


def tokenizers_of(specialists: Sequence, tokenizers: Sequence) -> list:
    """Return a tokenizer for each specialist: the one given, else the one in its folder, else None."""
    found = []
    for one, path, tokenizer in zip(specialists, paths_of(specialists), tokenizers, strict=True):
        is_folder = path is not None and Path(path, "tokenizer_config.json").is_file()
        # an id of the Hub is asked for if it was given, not for a model that may have come from anywhere
        is_id = not isinstance(one, nn.Module) and not os.path.isabs(path)
        if tokenizer is None and (is_folder or is_id):
            try:
                tokenizer = AutoTokenizer.from_pretrained(path)
            except (OSError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0].rstrip(".:")
                raise ValueError(f"tokenizer of {path!r} cannot be loaded: {reason}; pass tokenizer") from error
        found.append(tokenizer)
    return found


@torch.no_grad()
def fingerprint(model: nn.Module) -> str | None:
    """Return what tells a model's weights from changed ones, in one pass over them where they are; None without weights.

    Of each tensor's bits, as integers: their sum and their sum weighted by place, modulo 2^64.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if tensor.device.type == "meta":
            return None
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        flat = tensor.detach().contiguous().view(-1).view(bits)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].long()
            place = torch.arange(1, part.numel() + 1, device=part.device)
            digest.update(str((int(part.sum()), int((part * place).sum()))).encode())
    return digest.hexdigest()


def has_changed(fuser, s: int) -> bool:
    """Whether specialist `s` has other weights than when the fuser was made.

    Of one that is split over processes, whether it was run for a gradient since: looking would need all processes.
    """
    model, known = fuser.specialists[s], fuser.fingerprints[s]
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return s in fuser.touched
    return known is None or fingerprint(model) != known


def unchanged_keys(fuser) -> set[str]:
    """Return the keys of specialists that are as they were: a checkpoint need not hold them."""
    same = [s for s in range(len(fuser.specialists)) if not has_changed(fuser, s)]
    return {f"specialists.{s}.{key}" for s in same for key in fuser.specialists[s].state_dict()}


def one_each(name: str, value, count: int) -> list:
    """Return a list of `count`; raises ValueError for a list of another length."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} items, specialists {count}; want one for each, or one for all")
    return values


def names_of(specialists, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the specialists' names: those given, else their folders' last parts where these differ."""
    if names is None:
        found = [Path(path).name if path else "" for path in paths_of(specialists)]
        unique = len(set(found)) == len(found) and all(map(is_plain_name, found))
        names = found if unique else [f"specialist-{s}" for s in range(len(found))]
    names = tuple(names)
    if len(names) != len(specialists) or len(set(names)) < len(names) or not all(map(is_plain_name, names)):
        raise ValueError(f"names is {names}, with {len(specialists)} specialists; want different words, one for each")
    return names


def encoder_of(tokenizers, templates, names, vocab_size) -> Encoder | None:
    """Return the encoder, its templates checked; None where a tokenizer is missing."""
    if any(tokenizer is None for tokenizer in tokenizers):
        return None
    check_tokenizers(tokenizers, names, vocab_size)
    chosen = [t or (CHAT if own.chat_template else "{prompt}") for t, own in zip(templates, tokenizers, strict=True)]
    return Encoder(tokenizers, [check_template(t, own) for t, own in zip(chosen, tokenizers, strict=True)], vocab_size)


def trains(model: nn.Module) -> bool:
    """Whether anything of a model wants a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())
