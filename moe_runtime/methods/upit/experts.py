"""A common interface to experts on disk: whole dense models, and LoRA adapters of one.

UpIT (arXiv 2410.01610), Algorithm 1, line 3: the checkpoints of one tuning run are the experts.
`checkpoints` describes the kinds and writes them. Memory holds one tensor at a time, or rows of
one.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from moe_runtime.config import check_choice, shown
from moe_runtime.hf.common.sources import local_folder
from moe_runtime.hf.models import families, folders
from moe_runtime.io.checkpoint import Checkpoint, TensorSpec
from moe_runtime.io.files import check_paths, files_print, hash_of, read_json
from moe_runtime.methods.upit.checkpoints import FORMAT, KINDS, RECORD, fingerprint, saved_steps

CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of names in PEFT's files
WHICH = ("back", "front", "uniform")


class Expert:
    """An expert's folder, opened for reading by `open_expert`.

    Attributes:
        path: The folder.
        kind: "ffn" for a whole model, "lora" for a PEFT adapter.
        record: Content of expert.json; empty if there is none.
        base: Folder or Hub id of the model that was tuned, if it is known.
        config: transformers' config of the dense model.
        adapter: PEFT's settings, if it is an adapter.
    """

    def __init__(self, path: Path, kind: str, record: dict, base: str | Path | None):
        self.path = path
        self.kind = kind
        self.record = record
        self.base = base
        self.adapter = read_json(path / ADAPTER_CONFIG) if kind == "lora" else None
        self._tensors = Checkpoint(path, ADAPTER if kind == "lora" else None)
        self._specs = self._tensors.specs()

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        """The dense model's transformers config; raises ValueError for a lora whose base is unknown
        or missing.
        """
        source = self.path
        if self.kind == "lora":
            if self.base is None:
                raise ValueError(
                    f"{self.path / ADAPTER_CONFIG} names no base model. Pass its folder as base="
                )
            source = local_folder(self.base, ("config.json",))
        return folders.read_config(source)

    @property
    def family(self) -> families.Family:
        """The model's Family; raises ValueError for unsupported models."""
        return families.family_of(self.config)

    def keys(self) -> list[str]:
        """Names of all tensors in reading order."""
        return list(self._specs)

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return dict(self._specs)

    def spec(self, key: str) -> TensorSpec:
        """Shape and dtype of one tensor."""
        return self._specs[key]

    def get(self, key: str) -> torch.Tensor:
        """Read one tensor."""
        return self._tensors.get(key)

    def get_rows(self, key: str, index: int | slice) -> torch.Tensor:
        """Read only the bytes of `tensor[index]`, as Checkpoint.get_rows does."""
        return self._tensors.get_rows(key, index)

    def is_ffn(self, key: str) -> bool:
        """Return whether a tensor belongs to an MLP: to one of its linear layers or their LoRA
        matrices.
        """
        return self.locate(key) is not None

    def locate(self, key: str) -> families.MLPKey | None:
        """Return the layer and part of the MLP that a tensor or LoRA matrix belongs to; None for
        other tensors.
        """
        if self.kind == "lora":
            key = re.sub(r"\.lora_[AB](\.\w+)?\.weight$", ".weight", key.removeprefix(PREFIX))
        return families.locate_key(self.family, key)

    def fingerprint(self) -> str:
        """Return a cheap hash that changes with the expert.

        It covers the tensors' names, shapes, dtypes and a row of each, and the files' sizes, times
        and settings.
        """
        return print_of(self._tensors)


def print_of(checkpoint: Checkpoint) -> str:
    """Return a cheap hash of a folder's model or adapter that changes if any file does."""
    folder = checkpoint.path
    settings = []
    for path in (folder / CONFIG, folder / ADAPTER_CONFIG):
        if path.is_file():
            settings.append(path.read_text())
    files = [files_print(path) for path in sorted(folder.glob("*.safetensors"))]
    return hash_of([fingerprint(checkpoint), files, settings])


def open_expert(path: str | Path, base: str | Path | None = None) -> Expert:
    """Open an expert's folder.

    Args:
        path: A whole model or a PEFT adapter, with or without expert.json.
        base: The model that was tuned, in place of a recorded one that has moved.

    Returns:
        The expert, whose tensors are read when asked for.

    Raises:
        ValueError: If the folder is neither.
    """
    path = Path(path)
    record = read_json(path / RECORD) if (path / RECORD).is_file() else {}
    if record and (record.get("format") != FORMAT or record.get("kind") not in KINDS):
        raise ValueError(
            f"{path / RECORD} has format {shown(record.get('format'))} and kind "
            f"{shown(record.get('kind'))}, but expected {FORMAT} and one of {', '.join(KINDS)}"
        )
    kind = record.get("kind") or ("lora" if (path / ADAPTER_CONFIG).is_file() else "ffn")
    named = base or record.get("base")
    if kind == "lora" and not named:
        named = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if named and not isinstance(named, str | Path):
        raise ValueError(
            f"The base of expert {str(path)!r} must be a path or a Hub id, but is {shown(named)}. "
            "Pass base="
        )
    return Expert(path, kind, record, named or None)


def saved_experts(folder: str | Path) -> list[Path]:
    """Return the experts that a training saved, or else a Trainer's checkpoints.

    Args:
        folder: Of `ExpertCheckpoints`, or a Trainer's output folder.

    Returns:
        Folders in the order of their steps; empty if there are none.
    """
    return saved_steps(folder) or saved_steps(folder, ("checkpoint-",))


def choose_checkpoints(
    folders: Sequence[str | Path] | str | Path, count: int, which: str = "back"
) -> list[Path]:
    """Choose checkpoints to become experts (UpIT, Algorithm 1, line 3).

    Args:
        folders: Checkpoints, or the folder that contains them.
        count: How many to choose.
        which: "back" for the last ones (in UpIT, between epochs 1 and 2), "front" for the first,
            "uniform" for evenly spaced ones up to the last.

    Returns:
        Folders in the order of their steps, the number at the end of a name; in the given order if
        a name has none.

    Raises:
        ValueError: If there are fewer than `count`.
    """
    check_choice("which", which, WHICH)
    if isinstance(folders, str | Path):
        paths = saved_experts(folders)
        where = f" in {folders}"
    else:
        check_paths("folders", folders)
        paths = [Path(folder) for folder in folders]
        where = ""
    steps = {path: path.name.rpartition("-")[2] for path in paths}
    if all(map(str.isdecimal, steps.values())):
        paths.sort(key=lambda path: int(steps[path]))
    n = len(paths)
    if not 1 <= count <= n:
        raise ValueError(
            f"count must be from 1 to the {n} checkpoints{where}, but got {count}. Save more often"
        )
    if which == "uniform":
        return [paths[(i + 1) * n // count - 1] for i in range(count)]
    return paths[:count] if which == "front" else paths[-count:]
