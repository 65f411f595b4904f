"""A common interface to experts on disk: whole dense models, deltas of a base, and LoRA adapters.

UpIT (arXiv 2410.01610), Algorithm 1, line 3: the checkpoints of one tuning run are the experts.
`checkpoints` describes the kinds and writes them. Memory holds one tensor at a time, or rows of
one.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_runtime.config import check_choice, shown
from moe_runtime.hf.common.sources import local_folder
from moe_runtime.hf.models import families, folders
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, TensorSpec
from moe_runtime.io.files import check_out_dir, check_paths, files_print, hash_of, read_json
from moe_runtime.methods.upit.checkpoints import FORMAT, KINDS, RECORD, fingerprint, saved_steps

CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of names in PEFT's files
WHICH = ("back", "front", "uniform")


class Expert:
    """An expert's folder opened for reading by `open_expert`; a context manager.

    `kind` is "ffn", "delta" or "lora"; `record` the content of expert.json; `base` the folder or
    Hub id of its base, if known; `config` the dense model's; `adapter` PEFT's settings of a lora.
    """

    def __init__(self, path: Path, kind: str, record: dict, base: str | Path | None):
        self.path = path
        self.kind = kind
        self.record = record
        self.base = base
        self.adapter = read_json(path / ADAPTER_CONFIG) if kind == "lora" else None
        self._own = Checkpoint(path, ADAPTER if kind == "lora" else None)
        self._base = Checkpoint(base) if kind == "delta" else None
        # in the order of the base's bytes, for sequential reads
        self._specs = {} if self._base is None else self._base.specs()
        for key in record.get("absent", ()):
            self._specs.pop(key, None)
        self._specs |= self._own.specs()

    def __enter__(self) -> "Expert":
        return self

    def __exit__(self, *_) -> None:
        pass

    @functools.cached_property
    def config(self):
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
        """Names of all tensors in reading order, including those that a delta takes from
        its base.
        """
        return list(self._specs)

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return dict(self._specs)

    def spec(self, key: str) -> TensorSpec:
        """Shape and dtype of one tensor."""
        return self._specs[key]

    def get(self, key: str) -> torch.Tensor:
        """Read one tensor; a delta's missing tensors come from its base."""
        return self._source(key).get(key)

    def get_rows(self, key: str, index: int | slice) -> torch.Tensor:
        """Read only the bytes of `tensor[index]`, as Checkpoint.get_rows does."""
        return self._source(key).get_rows(key, index)

    def differs(self, key: str) -> bool:
        """Return whether the expert's own files hold the tensor; a delta's hold those that differ
        from its base.
        """
        return key in self._own

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
        base = None if self._base is None else print_of(self._base)
        return hash_of([print_of(self._own), base])

    def _source(self, key: str) -> Checkpoint:
        return self._base if self._base is not None and key not in self._own else self._own


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
    """Open an expert's folder of any kind; `base` replaces a recorded base that has moved."""
    path = Path(path)
    record = read_json(path / RECORD) if (path / RECORD).is_file() else {}
    if record and (record.get("format") != FORMAT or record.get("kind") not in KINDS):
        raise ValueError(
            f"{path / RECORD} has format {shown(record.get('format'))} and kind "
            f"{shown(record.get('kind'))}, but expected {FORMAT} and one of {', '.join(KINDS)}"
        )
    kind = record.get("kind") or ("lora" if (path / ADAPTER_CONFIG).is_file() else "ffn")
    if kind == "delta":
        return Expert(path, kind, record, _base_of(path, record, base))
    named = base or record.get("base")
    if kind == "lora" and not named:
        named = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if named and not isinstance(named, str | Path):
        raise ValueError(
            f"The base of expert {str(path)!r} must be a path or a Hub id, but is {shown(named)}. "
            "Pass base="
        )
    return Expert(path, kind, record, named or None)


def _base_of(path: Path, record: dict, given: str | Path | None) -> Path:
    """Return the folder of a delta's base: the given or the recorded one, whichever has the
    recorded weights.
    """
    reason = "it names no base"
    for name in (given, record.get("base")):
        if name is None:
            continue
        try:
            with Checkpoint(local_folder(name)) as base:
                if fingerprint(base) == record.get("base_hash"):
                    return base.path
            reason = f"{name} has other weights than its base"
        except ValueError as error:
            reason = str(error).partition(". ")[0]
    raise ValueError(
        f"Expert {str(path)!r} is a delta, but {reason}. Pass base=, the folder of the model it "
        "was trained from"
    )


def saved_experts(folder: str | Path) -> list[Path]:
    """Return the experts saved in a folder during training, by step, or else a Trainer's
    checkpoints.
    """
    return saved_steps(folder) or saved_steps(folder, ("checkpoint-",))


def choose_checkpoints(
    folders: Sequence[str | Path] | str | Path, count: int, which: str = "back"
) -> list[Path]:
    """Choose `count` of the checkpoints `folders`, or of those in one folder, in the order of their
    steps.

    "back" are the last ones (UpIT: between epochs 1 and 2), "front" the first, "uniform" evenly
    spaced up to the last. A step is the number at the end of a folder's name; if any name has none,
    the given order is kept.
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


def materialize(
    expert: Expert | str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = "2GB",
    overwrite: bool = False,
) -> Path:
    """Write a delta or a whole model to the folder `out` as a transformers model, tensor by
    tensor.
    """
    if not isinstance(expert, Expert):
        expert = open_expert(expert)
    if expert.kind == "lora":
        raise ValueError(
            f"Expected a delta, but expert {str(expert.path)!r} is an adapter, which PEFT can merge"
        )
    check_out_dir(out, overwrite, [expert.path, expert.base])
    expected = sum(spec.nbytes for spec in expert.specs().values())
    with CheckpointWriter(
        out, max_shard_size, overwrite=overwrite, expected_bytes=expected
    ) as writer:
        writer.copy_file(expert.path / "config.json")
        folders.copy_side_files(expert.path, writer)
        for key in expert.keys():
            writer.add(key, expert.get(key))
    return Path(out)
