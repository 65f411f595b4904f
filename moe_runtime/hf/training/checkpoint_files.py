"""Checks of a Trainer's checkpoint before any of its files is loaded: no file may run code, and a
damaged one is named.

transformers and accelerate load `*.pt`, `*.pth` and `*.bin` weights-only, which builds tensors and
plain values and nothing else. torch.distributed.checkpoint does not: it unpickles the index
`.metadata` without restrictions, and so the values in `*.distcp` that are not tensors (torch 2.13,
2026-11-20). Sharded experts and FSDP2 use it. `check_checkpoint` therefore reads the index with the
few classes that such an index consists of, and the values weights-only, before torch does.
`training_args.bin` is never loaded. DeepSpeed unpickles its own files, which are not checked.
"""

import io
import re
import zipfile
from pathlib import Path
from pickle import Unpickler, UnpicklingError

import torch
from pydantic import BaseModel
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moe_runtime.config import one_line, shown
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.training.settings import Steps
from moe_runtime.io.files import check_regular, is_plain_name

PICKLES = ("*.pt", "*.pth", "*.bin", "*/adapter_model.bin")
INDEXES = ("*/*.metadata", "*.metadata")
_STATES = "torch.distributed.checkpoint.metadata"
_INDEX_CLASSES = {
    (_STATES, "Metadata"),
    (_STATES, "MetadataIndex"),
    (_STATES, "StorageMeta"),
    (_STATES, "ChunkStorageMetadata"),
    (_STATES, "TensorStorageMetadata"),
    (_STATES, "BytesStorageMetadata"),
    (_STATES, "TensorProperties"),
    (_STATES, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _IndexUnpickler(Unpickler):
    """Reads the index of torch.distributed.checkpoint; raises UnpicklingError for any other class
    or function.
    """

    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _INDEX_CLASSES:
            raise UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")
        return super().find_class(module, name)


def checkpoints(folder: StrPath, file: str = "") -> list[Path]:
    """Return a Trainer's checkpoints in `folder`, those that have `file` if given."""
    paths = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = [path for path in paths if path.name.rpartition("-")[2].isdecimal()]
    return [path for path in numbered if (path / file).exists()]


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def refusal(path: Path, error: Exception) -> ValueError:
    """Return the error for a file of a checkpoint that could not be read because of `error`."""
    unsupported = re.search(
        r"Unsupported (?:global|class|operand).*?([\w.]+\.[\w.]+)", str(error).replace("\n", " ")
    )
    if unsupported is not None:
        reason = f"it refers to {unsupported[1]}, but only tensors and plain values are loaded"
    else:
        reason = f"it is damaged ({type(error).__name__}: {one_line(error, 120)})"
    return ValueError(f"{path} is refused: {reason}. Resume from another checkpoint")


def check_checkpoint(folder: StrPath) -> None:
    """Raise a ValueError that names the file of a checkpoint that is damaged or holds more than
    tensors and plain values.

    `folder` is what transformers' Trainer resumes from. Tensors are mapped, not read.
    """
    folder = Path(folder)
    if (folder / TRAINER_STATE_NAME).exists():
        _check_trainer_state(folder / TRAINER_STATE_NAME)
    for path in sorted(path for pattern in PICKLES for path in folder.glob(pattern)):
        if path.name != TRAINING_ARGS_NAME:
            _check_pickle(path)
    for path in sorted(path for pattern in INDEXES for path in folder.glob(pattern)):
        _check_index(path)


class _State(BaseModel, strict=True):
    """What a Trainer's state must have."""

    global_step: Steps
    max_steps: Steps
    log_history: list[dict]


def _check_trainer_state(path: Path) -> None:
    check_regular(path)
    named = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.parent.name)
    try:
        TrainerState.load_from_json(str(path))
        state = _State.model_validate_json(path.read_bytes())
        step = state.global_step
        if step > state.max_steps or (named is not None and step != int(named[1])):
            raise ValueError(f"global_step is {step} of {state.max_steps}")
    except Exception as error:  # of wrong types, transformers' class may raise anything
        raise refusal(path, error) from error


def _check_pickle(path: Path) -> None:
    check_regular(path)
    try:
        with safe_globals():  # the generators' states hold NumPy arrays
            torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch.load may raise anything for a file of another kind
        raise refusal(path, error) from error


def _check_index(path: Path) -> None:
    """Check an index of torch.distributed.checkpoint and the values beside it that are not
    tensors.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

    check_regular(path)
    try:
        with open(path, "rb") as stream:
            index = _IndexUnpickler(stream).load()
        if type(index) is not Metadata:
            raise UnpicklingError(f"expected Metadata, but got {type(index).__name__}")
        for stored in index.storage_data.values():
            if not is_plain_name(stored.relative_path) or stored.transform_descriptors:
                raise UnpicklingError(
                    "expected the name of a file in its folder, but got "
                    f"{shown(stored.relative_path)}"
                )
        values = []
        for name, described in index.state_dict_metadata.items():
            if type(described) is BytesStorageMetadata:
                values.append(index.storage_data[MetadataIndex(name)])
            elif type(described) is not TensorStorageMetadata:
                raise UnpicklingError(
                    "expected a tensor's or a value's description, but got "
                    f"{type(described).__name__}"
                )
    except Exception as error:  # a pickle may raise anything
        raise refusal(path, error) from error
    for stored in values:
        _check_value(path.parent / stored.relative_path, stored.offset, stored.length)


def _check_value(path: Path, offset: int, length: int) -> None:
    """Check one value of a `.distcp` file, at `offset` with `length` bytes."""
    check_regular(path)
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            torch.load(io.BytesIO(stream.read(length)), map_location="cpu", weights_only=True)
    except Exception as error:
        raise refusal(path, error) from error
