"""UltraFuser on disk: `save` and `load` of a fused model, its checkpoints, and the functions behind
the commands.

fuser_config.json       {"format": 1, "gate": {"kind", "joint", "hidden_sizes"}, "loss_reduction",
                        "specialists": [...]},
                        each {"name", "path", "template", "dtype", "weights"}; weights is a
                        fingerprint
gate.safetensors        the gate's parameters, float32
generation_config.json  generate's defaults
specialists/<name>      a copied specialist: a transformers folder with its tokenizer
tokenizers/<name>       the tokenizer of a specialist that is not copied

    save, load     a fused model to a folder and back
    fuse_folders   specialists' folders -> a fused model's folder, with an untrained gate
    answer         a fused model's folder and prompts -> answers
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import AfterValidator, BaseModel, ValidationError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from moe_runtime.config import check_choice, shown
from moe_runtime.hf.models.configuration import write_legacy_rope
from moe_runtime.hf.training import ranks
from moe_runtime.io.checkpoint import Checkpoint, TensorSpec, check_keys, write_tensors
from moe_runtime.io.console import bar
from moe_runtime.io.files import (
    atomic_folder,
    atomic_write_json,
    check_out_dir,
    is_plain_name,
    read_json,
)
from moe_runtime.methods.ultrafuser.inputs import check_tokenizers
from moe_runtime.methods.ultrafuser.model import UltraFuser
from moe_runtime.methods.ultrafuser.specialists import (
    fingerprint,
    one_each,
    open_model,
    tokenizers_of,
    unsaved_reason,
)
from moe_runtime.modules.fuser import GATES

CONFIG = "fuser_config.json"
GATE = "gate.safetensors"
COPIES = "specialists"
TOKENIZERS = "tokenizers"
FORMAT = 1
MODES = ("reference", "copy")


def save(
    fuser: UltraFuser,
    folder: str | os.PathLike,
    specialists: str = "reference",
    *,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Save the gate and the specialists to a folder, atomically.

    Of several processes that hold the whole model, one calls this.

    Args:
        fuser: The fused model.
        folder: The folder to write.
        specialists: "reference" saves their paths, "copy" the models.
        overwrite: Whether to replace an existing folder.
        max_shard_size: Bytes of a weights file of a copy at most, or a text.

    Returns:
        The folder.

    Raises:
        ValueError: With "reference", if a specialist differs from its folder or has an adapter.
    """
    check_choice("specialists", specialists, MODES)
    paths = [one["path"] for one in fuser.config.specialists]
    copies = Path(folder, COPIES).resolve()
    # a specialist that is one of this folder's own copies is written again
    others = [path for path in paths if copies not in Path(path or "").resolve().parents]
    folder = check_out_dir(folder, overwrite, others if specialists == "copy" else ())
    described = []
    for s, (name, model) in enumerate(zip(fuser.names, fuser.specialists, strict=True)):
        if any(hasattr(module, "base_layer") for module in model.modules()):
            raise ValueError(
                f"Specialist {name!r} has an adapter. Merge it in place with PEFT's "
                "merge_and_unload"
            )
        reason = unsaved_reason(fuser, s, folder) if specialists == "reference" else None
        if reason is not None:
            raise ValueError(
                f"Specialist {name!r} {reason}. Use specialists='copy' or another folder"
            )
        described.append(
            {
                "name": name,
                "path": paths[s],
                "template": fuser.templates[s],
                "dtype": str(model.dtype).removeprefix("torch."),
                "weights": fuser.fingerprints[s],
            }
        )
    with atomic_folder(folder, overwrite) as tmp:
        for s, (one, model) in enumerate(zip(described, fuser.specialists, strict=True)):
            target = tmp / TOKENIZERS / one["name"]
            if specialists == "copy":
                one["path"] = f"{COPIES}/{one['name']}"
                target = tmp / one["path"]
                model.save_pretrained(target, max_shard_size=max_shard_size)
                write_legacy_rope(target)
                one["weights"] = fingerprint(model)
            if fuser.encoder is not None:
                fuser.encoder.tokenizers[s].save_pretrained(target)
        state = fuser.gate.state_dict()
        write_tensors(tmp / GATE, {n: t.detach().cpu().contiguous() for n, t in state.items()})
        fuser.generation_config.save_pretrained(tmp)
        atomic_write_json(
            tmp / CONFIG,
            {
                "format": FORMAT,
                "gate": {
                    "kind": fuser.gate.kind,
                    "joint": fuser.gate.joint,
                    "hidden_sizes": list(fuser.gate.hidden_sizes),
                },
                "loss_reduction": fuser.config.loss_reduction,
                "specialists": described,
            },
        )
    return folder


def load(
    folder: str | os.PathLike,
    *,
    specialists: Mapping[str, str | os.PathLike] | None = None,
    dtype: str | torch.dtype | None = None,
    device: torch.device | str | Sequence | None = None,
) -> UltraFuser:
    """Load a fused model.

    Args:
        folder: A folder of `save`.
        specialists: New folders of specialists that have moved, by name.
        dtype: None is the saved one.
        device: One for all, or one for each specialist.

    Returns:
        The fused model.

    Raises:
        ValueError: If a specialist is missing, or has other weights or another tokenizer than when
            it was saved.
    """
    saved = read(folder, specialists or {})
    parts = saved.specialists
    devices = one_each("device", device, len(parts))
    tokenizers = list(map(saved_tokenizer, parts))
    models = []
    for part, device in zip(parts, devices, strict=True):
        model = open_model(part.path, dtype=dtype or part.dtype)
        models.append(model if device is None else model.to(device))
    fuser = UltraFuser(
        models,
        [part.template for part in parts],
        tokenizer=tokenizers,
        names=[part.name for part in parts],
        gate=saved.gate.kind,
        joint=saved.gate.joint,
        loss_reduction=saved.loss_reduction,
    )
    fuser.opened = set(range(len(parts)))
    _check_weights(fuser, parts)
    load_gate(fuser, folder)
    if Path(folder, GENERATION_CONFIG_NAME).is_file():
        fuser.generation_config = GenerationConfig.from_pretrained(folder)
    return fuser.eval()


def _plain_name(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError("no name of a folder")
    return name


class _Gate(BaseModel):
    kind: str
    joint: bool


class Part(BaseModel):
    """A specialist's entry in fuser_config.json."""

    name: Annotated[str, AfterValidator(_plain_name)]
    path: str
    template: str | None
    dtype: str
    weights: str | None
    tokenizer: Path | None = None  # its folder, which is not in the file


class Saved(BaseModel):
    """The content of fuser_config.json."""

    format: Literal[FORMAT]
    gate: _Gate
    loss_reduction: str
    specialists: list[Part]


def read(folder: str | os.PathLike, moved: Mapping[str, str | os.PathLike] = {}) -> Saved:
    """Return a folder's fuser_config.json, with the specialists' paths as they are now.

    `moved` maps names to new folders. Raises ValueError for other folders and formats, missing
    specialists, and unknown names in `moved`.
    """
    path = Path(folder) / CONFIG
    values = read_json(path)
    try:
        saved = Saved.model_validate(values)
    except ValidationError as error:
        raise ValueError(
            f"{path} must have format {FORMAT} with gate, loss_reduction and specialists, as "
            f"written by ultrafuser.save, but has format {shown(values.get('format'))} or other "
            "fields. A newer moe_runtime may have written it"
        ) from error
    names = [part.name for part in saved.specialists]
    for name in moved:
        check_choice("specialist", name, names)
    for part in saved.specialists:
        copied = Path(folder, COPIES, part.name)
        is_local = True
        if part.name in moved:
            part.path = os.fspath(moved[part.name])
        elif part.path == f"{COPIES}/{part.name}":
            part.path = str(copied)
        else:
            is_local = os.path.isabs(part.path)
        if is_local and not Path(part.path, "config.json").is_file():
            raise ValueError(
                f"Specialist {part.name!r} of {str(folder)!r} was not found at {part.path}. Put "
                f"its folder there, or pass specialists={{{part.name!r}: its folder}}"
            )
        for source in (Path(folder, TOKENIZERS, part.name), copied):
            if (source / "tokenizer_config.json").is_file():
                part.tokenizer = source
    return saved


def saved_tokenizer(part: Part) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that a specialist was saved with; raises ValueError if its folder's
    tokenizer has changed.
    """
    if part.tokenizer is None:
        return None
    tokenizer = tokenizers_of([part.tokenizer], [None])[0]
    present = tokenizers_of([part.path], [None])[0] if os.path.isdir(part.path) else None
    if present is not None:
        size = min(len(tokenizer), len(present))
        check_tokenizers([tokenizer, present], [str(part.tokenizer), part.path], size)
    return tokenizer


def _check_weights(fuser: UltraFuser, parts: Sequence[Part]) -> None:
    """Raise ValueError if a specialist's weights have changed since saving, unless its dtype has
    changed.
    """
    for part, model, weights in zip(parts, fuser.specialists, fuser.fingerprints, strict=True):
        is_comparable = part.weights is not None and str(model.dtype) == f"torch.{part.dtype}"
        if is_comparable and weights != part.weights:
            raise ValueError(
                f"Specialist {part.name!r} at {part.path} has other weights than when the gate was "
                "saved. Pass the right folder in specialists, or train the gate again"
            )


@torch.no_grad()
def load_gate(fuser: UltraFuser, folder: str | os.PathLike) -> None:
    """Read gate.safetensors into a fuser's gate; raises ValueError for other names or shapes."""
    with Checkpoint(folder, GATE) as checkpoint:
        state = fuser.gate.state_dict()
        specs = {n: TensorSpec(tuple(t.shape), torch.float32) for n, t in state.items()}
        check_keys(checkpoint.specs(), specs, source=Path(folder) / GATE)
        for name, tensor in state.items():
            tensor.copy_(checkpoint.get(name))


class FuseReceipt(NamedTuple):
    """Result of `fuse_folders`."""

    path: Path
    names: tuple[str, ...]
    gate_parameters: int


def fuse_folders(
    specialists: Sequence[str | Path],
    out: str | Path,
    *,
    templates: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    gate: str = "mlp",
    joint: bool = False,
    copy: bool = False,
    seed: int = 0,
    overwrite: bool = False,
) -> FuseReceipt:
    """Fuse `specialists` (folders or Hub ids) and save the model, with a gate initialized from
    `seed`.

    `templates` and `names` are as in UltraFuser. `copy` copies the specialists into the folder.
    """
    check_choice("gate", gate, GATES)
    check_out_dir(out, overwrite, specialists if copy else ())
    for one in specialists:
        if os.path.isdir(one) and not Path(one, "tokenizer_config.json").is_file():
            raise ValueError(
                f"Specialist {str(one)!r} has no tokenizer. Save the specialists' tokenizer into "
                "its folder"
            )
    templates = templates[0] if templates and len(templates) == 1 else templates or None
    torch.manual_seed(seed)
    fuser = UltraFuser(
        list(map(str, specialists)), templates, gate=gate, joint=joint, names=names or None
    )
    how = "copy" if copy else "reference"
    path = save(fuser, out, specialists=how, overwrite=overwrite)
    return FuseReceipt(path, fuser.names, sum(p.numel() for p in fuser.gate.parameters()))


def answer(
    folder: str | Path,
    prompts: Sequence,
    *,
    system: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    **settings: Any,
) -> list[str]:
    """Return the answers of a folder's fused model to prompts, texts or chats; `settings` are
    generate()'s.

    `batch_size` prompts are answered at a time, the longest first; all at once unless given.
    """
    fuser = load(folder, device=ranks.state().device)
    prompts = list(prompts)
    torch.manual_seed(seed)
    order = list(range(len(prompts)))
    if batch_size is not None:
        order.sort(key=lambda i: -max(map(len, fuser.encoder.prompt(prompts[i], system))))
    size = batch_size or max(len(prompts), 1)
    answers = {}
    with bar("answering", "prompt") as update:
        for i in range(0, len(order), size):
            update(i, len(order))
            batch = order[i : i + size]
            texts = fuser.complete([prompts[j] for j in batch], system=system, **settings)
            answers |= dict(zip(batch, texts, strict=True))
    return [answers[i] for i in range(len(prompts))]
