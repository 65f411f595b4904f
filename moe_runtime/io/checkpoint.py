"""Safetensors folders, read tensor by tensor and written shard by shard, atomically.

Reading holds one tensor and writing one shard, so that models larger than memory can be converted:
safetensors' mmap refuses such files, and its "pread" backend allocates whole tensors for slices
(safetensors 0.8, 2026-11-20). No pickle is ever loaded.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_runtime.config import one_line, shown
from moe_runtime.io.files import (
    atomic_folder,
    check_names,
    check_out_dir,
    check_regular,
    is_plain_name,
    naming,
    parse_object,
    read_json,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_DIMS = 64  # torch's own limit
SHOWN = 8  # keys or files of a kind in an error
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "Pickle files (.bin, .pt) can run code and are never loaded. Convert one that you trust with "
    "transformers: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Return a number of bytes.

    Args:
        size: A number, or a string such as "500MB" or "1.5GiB": with B, KB, MB, GB or TB (powers of
            1000) or KiB, MiB, GiB or TiB (of 1024).

    Raises:
        ValueError: It is neither, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])?(I)?B)?", str(size).upper())
    value = 0
    if match and (match[2] or not match[3]):
        base = 1024 if match[3] else 1000
        value = int(Fraction(match[1]) * base ** " KMGT".index(match[2] or " "))
    if value < 1:
        raise ValueError(
            "size must be a number of bytes or a string such as '2GB', '500MB' or '1.5GiB', but "
            f"got {size!r}"
        )
    return value


def _join(names: list[str]) -> str:
    return ", ".join(one_line(name, 200) for name in names[:SHOWN]) + ", ..." * (len(names) > SHOWN)


def _list_shards(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return the sorted names of the shards, and the index's map from key to shard, if any."""
    index = folder / INDEX
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Use hf download to get the folder of a model")
    names = sorted(file.name for file in folder.iterdir())
    if INDEX not in names and (folder / SINGLE).is_file():
        return [SINGLE], None
    if not index.is_file():  # a pipe is refused too: opening it would block
        weights = _join([name for name in names if name.endswith(WEIGHTS)]) or "no weights"
        raise ValueError(
            f"Expected {SINGLE} or {INDEX} in {folder}, but found {weights}. {CONVERT}"
        )
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"weight_map in {index} must be an object that maps keys to shards, but got "
            f"{shown(weight_map, 80)}"
        )
    check_names(weight_map, index)
    for shard in weight_map.values():
        if not is_plain_name(shard) or not shard.endswith(".safetensors"):
            raise ValueError(
                f"Shards in {index} must be plain names of .safetensors files, but got "
                f"{shown(shard)}"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(
            f"{index} names {_join(missing)}, which do not exist. Download the missing shards"
        )
    if SINGLE in names and SINGLE not in shards:
        raise ValueError(
            f"{folder} has both {INDEX} and a {SINGLE} that the index does not name. Delete the "
            "stale one"
        )
    return shards, weight_map


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[TensorSpec, int]]]:
    """Read a header, which the safetensors package has checked.

    Returns the metadata, and each tensor's spec and first byte in the order of their bytes.
    """
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a valid safetensors file ({one_line(error)}). Download it again, and "
            "with git lfs if it is a pointer"
        ) from error
    with open(path, "rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        source = f"header of {path}"
        header = parse_object(stream.read(start - 8), source)
    check_names(header, source)
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for key, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape = tuple(fields["shape"])
        dtype = DTYPES.get(fields["dtype"])
        # torch multiplies all sizes of an empty tensor too
        if dtype is None or len(shape) > MAX_DIMS or math.prod(max(n, 1) for n in shape) >= 2**60:
            raise ValueError(
                f"{key} in the {source} must have a dtype and a shape of torch, but got "
                f"{shown(fields)}"
            )
        tensors[key] = (TensorSpec(shape, dtype), start + fields["data_offsets"][0])
    return metadata, tensors


class _Entry(NamedTuple):
    """A tensor of a checkpoint."""

    spec: TensorSpec
    shard: str
    start: int  # its first byte


class Checkpoint:
    """A safetensors folder for reading: `model.safetensors`, or shards with an index, or one file.

    Opening it checks the headers against the index. Tensors are read on demand, and no file stays
    open between reads.

    Args:
        path: The folder.
        file: A single file in it, instead of the model's.

    Raises:
        ValueError: A file is missing or invalid, or the index names other tensors than the shards
            hold; the message names the file and the key.
    """

    def __init__(self, path: str | os.PathLike, file: str | None = None):
        self.path = Path(path)
        self.metadata: dict[str, str] = {}  # of all shards; the first one wins
        self._tensors: dict[str, _Entry] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}
        shards, weight_map = ([file], None) if file else _list_shards(self.path)
        for shard in shards:
            check_regular(self.path / shard)
            with open(self.path / shard, "rb") as stream:
                self._stamps[shard] = _stamp(stream)
            metadata, tensors = _read_header(self.path / shard)
            self.metadata = metadata | self.metadata
            for key, (spec, start) in tensors.items():
                name = shard
                if key in self._tensors:
                    name = f"{self._tensors[key].shard} and {shard}"
                self._tensors[key] = _Entry(spec, name, start)
        if weight_map is not None:
            self._check_index(weight_map)

    def _check_index(self, weight_map: dict[str, str]) -> None:
        shards = {key: entry.shard for key, entry in self._tensors.items()}
        for key in sorted({*shards, *weight_map}):
            if shards.get(key) != weight_map.get(key):
                named = weight_map.get(key, "no shard")
                raise ValueError(
                    f"According to {self.path / INDEX}, {key} is in {named}, but it is in "
                    f"{shards.get(key, 'none')}. Download the folder again"
                )

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, as no file stays open between reads."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def keys(self) -> list[str]:
        """Return the keys in the order of shards and bytes, the fastest order to read them in."""
        return list(self._tensors)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every tensor, from the headers."""
        return {key: entry.spec for key, entry in self._tensors.items()}

    def get(self, key: str) -> torch.Tensor:
        """Read one tensor; raises ValueError for an unknown key."""
        return self._read(key, self._entry(key).spec, 0)

    def get_rows(self, key: str, index: int | slice) -> torch.Tensor:
        """Return `tensor[index]`, reading only its bytes.

        Args:
            key: The tensor.
            index: An int, or a slice of step 1, of the first dimension.

        Raises:
            ValueError: The key is unknown.
            IndexError: The index is out of range.
        """
        (n, *rest), dtype = self._entry(key).spec
        row = TensorSpec(tuple(rest), dtype)
        rows = range(n)[index]
        if isinstance(rows, int):
            return self._read(key, row, rows * row.nbytes)
        return self._read(key, TensorSpec((len(rows), *rest), dtype), rows.start * row.nbytes)

    def _entry(self, key: str) -> _Entry:
        if key not in self._tensors:
            raise ValueError(
                f"Key {shown(key)} is not among the {len(self._tensors)} keys of {self.path}"
            )
        return self._tensors[key]

    def _read(self, key: str, spec: TensorSpec, skip: int) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        _, shard, start = self._tensors[key]
        with open(self.path / shard, "rb") as stream:
            stream.seek(start + skip)
            count = stream.readinto(values)
            if count != spec.nbytes or _stamp(stream) != self._stamps[shard]:
                raise ValueError(
                    f"{stream.name} has changed since its header was read. Open the checkpoint "
                    "again"
                )
        return tensor


def _stamp(stream: BinaryIO) -> tuple[int, ...]:
    """Return what identifies a file, so that a file that replaced it is not read by its offsets."""
    stat = os.fstat(stream.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_finite(tensor: torch.Tensor, key: str, source: str | os.PathLike) -> torch.Tensor:
    """Return `tensor`; raises ValueError for NaN and infinities.

    Integers and 8-bit floats are not checked.
    """
    is_checked = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0
    # one pass, without a mask of the tensor's size
    if is_checked and not torch.stack(tensor.aminmax()).isfinite().all():
        raise ValueError(
            f"{key} of {os.fspath(source)} contains NaN or infinity, but weights must be finite"
        )
    return tensor


def check_keys(
    specs: Mapping[str, TensorSpec],
    expected: Mapping[str, TensorSpec],
    *,
    source: str | os.PathLike,
) -> None:
    """Compare the tensors of a checkpoint with those of a model.

    Args:
        specs: The tensors that the checkpoint has.
        expected: The tensors that it must have.
        source: What the error calls it.

    Raises:
        ValueError: Keys, shapes or dtypes differ; the message counts all and lists 8 of each kind.
    """
    kinds = {
        "missing": [key for key in expected if key not in specs],
        "unexpected": [key for key in specs if key not in expected],
        "with a wrong shape or dtype": [],
    }
    for key, spec in expected.items():
        if specs.get(key, spec) != spec:
            shape, dtype = specs[key]
            kinds["with a wrong shape or dtype"].append(
                f"{key} is {list(shape)} {dtype}, not {list(spec.shape)} {spec.dtype}"
            )
    problems = [f"{len(keys)} {kind}: {_join(keys)}" for kind, keys in kinds.items() if keys]
    if problems:
        raise ValueError(
            f"The {len(specs)} tensors of {source} do not match the {len(expected)} expected: "
            f"{'; '.join(problems)}"
        )


def write_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {"format": "pt"}
) -> None:
    """Write one safetensors file with the permissions of its folder. Raises OSError if it fails."""
    with naming(file, file):
        save_file(
            dict(tensors),
            file,
            metadata=dict(metadata),
        )
    # save_file sets the mode 0600
    file.chmod(file.parent.stat().st_mode & 0o666)


class CheckpointWriter:
    """Write tensors one by one into shards; a context manager over `atomic_folder`.

    It holds one shard in memory. The folder appears when the block ends, and does not appear if the
    block raises. One shard becomes `model.safetensors`, several become
    `model-00001-of-0000N.safetensors` with an index.

    Args:
        out_dir: The folder to write.
        max_shard_size: Bytes of a shard, as a number or for `parse_size`; a larger tensor gets a
            separate shard.
        overwrite: Whether an existing folder is replaced.
        expected_bytes: What will be written, to compare with the free space first.

    Raises:
        ValueError: The folder cannot be written, or the disk has too little space.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike,
        max_shard_size: int | str = 2 * 2**30,
        *,
        overwrite: bool = False,
        expected_bytes: int | None = None,
    ):
        self.out_dir = check_out_dir(out_dir, overwrite)
        self.max_shard_size = parse_size(max_shard_size)
        existing = next(parent for parent in self.out_dir.parents if parent.exists())
        free = shutil.disk_usage(existing).free
        if expected_bytes is not None and free < expected_bytes:
            raise ValueError(
                f"Writing {self.out_dir} needs {expected_bytes} bytes, but the disk has {free} free"
            )
        self.overwrite = overwrite
        self._stack = contextlib.ExitStack()
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards = 0
        self._shard_of: dict[str, int] = {}

    def __enter__(self) -> "CheckpointWriter":
        self._tmp = self._stack.enter_context(atomic_folder(self.out_dir, self.overwrite))
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            with self._stack:  # which also sees what _finish raises
                self._finish()
        else:
            self._stack.__exit__(*error)

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Store the current values of a tensor.

        Raises:
            ValueError: The key is repeated, or this is no plain tensor.
        """
        is_plain = type(tensor.detach()) is torch.Tensor and tensor.layout == torch.strided
        is_stored = tensor.dtype in DTYPES.values() and not tensor.is_meta
        if not (is_plain and is_stored) or key in self._shard_of:
            raise ValueError(
                f"Tensor {key!r} must be a plain tensor of a safetensors dtype, with values and "
                f"under a new name, but got a {type(tensor).__name__} of {tensor.dtype} on "
                f"{tensor.device} after {len(self._shard_of)} others"
            )
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if self._pending_bytes + spec.nbytes > self.max_shard_size:
            self._flush()
        tensor = tensor.detach()
        is_view = tensor.is_conj() or tensor.is_neg()
        as_stored = tensor.is_cpu and tensor.is_contiguous() and not is_view
        # a tensor that waits for others is copied, as the caller may reuse its memory
        if not as_stored or spec.nbytes < self.max_shard_size:
            tensor = torch.empty(spec.shape, dtype=spec.dtype).copy_(tensor)
        self._pending[key] = tensor
        self._shard_of[key] = self._shards + 1
        self._pending_bytes += spec.nbytes
        self._total_bytes += spec.nbytes
        if self._pending_bytes >= self.max_shard_size:
            self._flush()

    def copy_file(self, src: str | os.PathLike) -> None:
        """Copy one file (config, tokenizer) under the same name."""
        shutil.copyfile(src, self.place(Path(src).name))

    def write_text(self, name: str, text: str) -> None:
        """Write a UTF-8 text file."""
        self.place(name).write_text(text, encoding="utf-8")

    def place(self, name: str) -> Path:
        """Return the path at which to write one more file of the folder before the block ends."""
        return self._tmp / name

    def _flush(self) -> None:
        if self._pending:
            write_tensors(self._tmp / f"model-{self._shards + 1:05d}.safetensors", self._pending)
            self._pending = {}
            self._pending_bytes = 0
            self._shards += 1

    def _finish(self) -> None:
        self._flush()
        names = {}
        for i in range(1, self._shards + 1):
            names[i] = f"model-{i:05d}-of-{self._shards:05d}.safetensors"
            if self._shards == 1:
                names[i] = SINGLE
            os.rename(self._tmp / f"model-{i:05d}.safetensors", self._tmp / names[i])
        if self._shards > 1:
            weight_map = {key: names[i] for key, i in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self.write_text(INDEX, json.dumps(index, indent=2) + "\n")
