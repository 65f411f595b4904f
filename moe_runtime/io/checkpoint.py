"""Safetensors folders, read tensor by tensor and written shard by shard, atomically.

Reading holds one tensor and writing one shard, so that models larger than memory can be converted:
safetensors' mmap refuses such files, and its "pread" backend allocates whole tensors for slices
(safetensors 0.8, 2026-11-20). No pickle is ever loaded.
"""

import contextlib
import json
import math
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
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
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
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
    """Parse `size` in bytes: a number, optionally with B, KB, MB, GB, TB (powers of 1000) or KiB,
    MiB, GiB, TiB (of 1024).
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT]?)B|([KMGT])IB)?", str(size).upper())
    unit, base = (match[3], 1024) if match and match[3] else (match and match[2], 1000)
    value = int(Fraction(match[1]) * base ** " KMGT".index(unit or " ")) if match else 0
    if value < 1:
        raise ValueError(
            "size must be a number of bytes or a string such as '2GB', '500MB' or '1.5GiB', but "
            f"got {size!r}"
        )
    return value


def _join(names: list[str]) -> str:
    return ", ".join(one_line(name, 200) for name in names[:SHOWN]) + ", ..." * (len(names) > SHOWN)


def _empty(spec: TensorSpec) -> torch.Tensor:
    """Return memory for one tensor; large ones are mapped so that freeing them does not fragment
    the heap.
    """
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if spec.nbytes >= 2**20:
        memory = mmap.mmap(-1, spec.nbytes, flags=private)
    else:
        memory = bytearray(spec.nbytes)
    return torch.frombuffer(memory, dtype=spec.dtype).view(spec.shape)


def _list_shards(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the shards, sorted, and the index's map from key to shard (None without
    an index).
    """
    index = folder / INDEX
    found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    if INDEX not in found and (folder / SINGLE).is_file():
        return [SINGLE], None
    problem = None
    weight_map = None
    if not folder.is_dir():
        problem = f"{folder} is not a folder. Use hf download to get the folder of a model"
    elif not index.is_file():  # a pipe is refused too: opening it would block
        weights = _join([name for name in found if name.endswith(WEIGHTS)]) or "no weights"
        problem = f"Expected {SINGLE} or {INDEX} in {folder}, but found {weights}. {CONVERT}"
    elif not isinstance(weight_map := read_json(index).get("weight_map"), dict) or not weight_map:
        problem = (
            f"weight_map in {index} must be an object that maps keys to shards, but got "
            f"{shown(weight_map, 80)}"
        )
    elif wrong := [
        k for k, v in weight_map.items() if not is_plain_name(v) or not v.endswith(".safetensors")
    ]:
        shard = shown(weight_map[wrong[0]])
        problem = (
            f"The shard of {one_line(wrong[0])} in {index} must be the plain name of a "
            f".safetensors file, but got {shard}"
        )
    elif missing := [
        shard for shard in sorted(set(weight_map.values())) if not (folder / shard).is_file()
    ]:
        problem = f"{index} names {_join(missing)}, which do not exist. Download the missing shards"
    elif SINGLE in found and SINGLE not in weight_map.values():
        problem = (
            f"{folder} has both {INDEX} and a {SINGLE} that the index does not name. Delete the "
            "stale one"
        )
    if problem:
        raise ValueError(problem)
    check_names(weight_map, index)
    return sorted(set(weight_map.values())), weight_map


def _parse_tensor(fields: Any) -> tuple[int, int, TensorSpec] | None:
    """Return the first byte, the end and the spec in a header entry; None if the entry is
    invalid.
    """
    try:
        (begin, end), spec = (
            fields["data_offsets"],
            TensorSpec(tuple(fields["shape"]), DTYPES[fields["dtype"]]),
        )
        valid = len(spec.shape) <= MAX_DIMS  # the product of the sizes takes quadratic time
        valid = (
            valid
            and all(type(n) is int and n >= 0 for n in (begin, end, *spec.shape))
            and end - begin == spec.nbytes
        )
        # torch also multiplies the sizes of an empty tensor
        valid = valid and math.prod(max(n, 1) for n in spec.shape) * spec.dtype.itemsize < 2**63
    except (KeyError, TypeError, ValueError):
        valid = False
    return (begin, end, spec) if valid else None


def _read_header(stream: BinaryIO) -> tuple[dict[str, str], dict[str, tuple[TensorSpec, int]]]:
    """Read and check a header; return the metadata, and each tensor's spec and first byte in the
    order of their bytes.
    """
    file = stream.name
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        why = f"its size is {size} bytes and its header would take {length}"
        raise ValueError(f"{file} is truncated or a git-lfs pointer: {why}. Download it again")
    header = parse_object(stream.read(length), f"header of {file}")
    check_names(header, f"header of {file}")
    metadata = header.pop("__metadata__", {})
    parsed = {key: _parse_tensor(fields) for key, fields in header.items()}
    bad = [key for key, entry in parsed.items() if entry is None]
    tensors = {}
    data = 8 + length
    position = 0
    for key, (begin, end, spec) in (
        sorted(parsed.items(), key=lambda item: item[1][:2]) if not bad else ()
    ):
        if begin != position:
            bad.append(key)
            break
        tensors[key], position = (spec, data + begin), end
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        bad, header["__metadata__"] = ["__metadata__"], metadata
    if bad:
        valid = (
            "have a known dtype, a shape, and data_offsets that span its bytes and follow the "
            "previous tensor"
        )
        valid = "be an object of strings" if bad == ["__metadata__"] else valid
        raise ValueError(
            f"{bad[0]} in the header of {file} must {valid}, but got {shown(header[bad[0]])}"
        )
    if data + position != size:
        raise ValueError(
            f"{file} has {size} bytes, but its header describes {data + position}. Download it "
            "again"
        )
    return metadata, tensors


class Checkpoint:
    """A safetensors folder for reading: `model.safetensors`, or shards with an index, or the single
    file `file`.

    Opening it checks the headers against the index and raises a ValueError that names the file and
    the key. Tensors are read on demand.
    """

    def __init__(self, path: str | os.PathLike, file: str | None = None):
        self.path = Path(path)
        self.metadata: dict[str, str] = {}  # of all shards; the first one wins
        self._tensors: dict[str, tuple[TensorSpec, str, int]] = {}  # spec, shard, first byte
        self._stamps: dict[str, tuple[int, ...]] = {}
        shards, weight_map = _list_shards(self.path) if file is None else ([file], None)
        for shard in shards:
            check_regular(self.path / shard)
            with open(self.path / shard, "rb") as stream:
                metadata, tensors = _read_header(stream)
                self._stamps[shard] = _stamp(stream)
            self.metadata = metadata | self.metadata
            for key, (spec, start) in tensors.items():
                name = f"{self._tensors[key][1]} and {shard}" if key in self._tensors else shard
                self._tensors[key] = (spec, name, start)
        held = {key: shard for key, (_, shard, _) in self._tensors.items()}
        if weight_map is not None and (wrong := sorted(dict(held.items() ^ weight_map.items()))):
            where = (
                f"{wrong[0]} is in {weight_map.get(wrong[0], 'no shard')}, but it is in "
                f"{held.get(wrong[0], 'none')}"
            )
            raise ValueError(
                f"According to {self.path / INDEX}, {where}. Download the folder again"
            )

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, as no file stays open between reads."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def keys(self) -> list[str]:
        """Return the keys shard by shard in the order of their bytes, the fastest order to read
        them in.
        """
        return list(self._tensors)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every tensor, from the headers."""
        return {key: spec for key, (spec, _, _) in self._tensors.items()}

    def get(self, key: str) -> torch.Tensor:
        """Read one tensor; raises ValueError for an unknown key."""
        return self._read(key, self._spec(key), 0)

    def get_rows(self, key: str, index: int | slice) -> torch.Tensor:
        """Read only the bytes of `tensor[index]`; raises ValueError unless `index` is an int in
        range or a slice of step 1.
        """
        shape, dtype = self._spec(key)
        try:
            rows = range(*shape[:1])[index]
        except (IndexError, TypeError):
            rows = None
        if rows is None or (isinstance(rows, range) and rows.step != 1):
            raise ValueError(
                f"index must be an int in dim 0 of {key} {list(shape)} or a slice of step 1, but "
                f"got {index!r}"
            )
        first, lead = (rows.start, (len(rows),)) if isinstance(rows, range) else (rows, ())
        return self._read(
            key, TensorSpec((*lead, *shape[1:]), dtype), first * TensorSpec(shape[1:], dtype).nbytes
        )

    def _spec(self, key: str) -> TensorSpec:
        if key not in self._tensors:
            raise ValueError(
                f"Key {shown(key)} is not among the {len(self._tensors)} keys of {self.path}"
            )
        return self._tensors[key][0]

    def _read(self, key: str, spec: TensorSpec, skip: int) -> torch.Tensor:
        tensor, (_, shard, start) = _empty(spec), self._tensors[key]
        with open(self.path / shard, "rb") as stream:
            stream.seek(start + skip)
            count = stream.readinto(tensor.reshape(-1).view(torch.uint8).numpy())
            if count != spec.nbytes or _stamp(stream) != self._stamps[shard]:
                raise ValueError(
                    f"{stream.name} has changed since its header was read. Open the checkpoint "
                    "again"
                )
        return tensor


def _stamp(stream: BinaryIO) -> tuple[int, ...]:
    """Return what identifies a file, so that the offsets of one are never used on another that
    replaced it.
    """
    stat = os.fstat(stream.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_finite(tensor: torch.Tensor, key: str, source: str | os.PathLike) -> torch.Tensor:
    """Return `tensor`; raises ValueError for NaN and infinities. Integers and 8-bit floats are not
    checked.
    """
    is_checked = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0
    # one pass, without a mask of the tensor's size
    if is_checked and not torch.stack(tensor.aminmax()).isfinite().all():
        raise ValueError(
            f"{key} of {os.fspath(source)} contains NaN or infinity, but weights must be finite"
        )
    return tensor


def check_keys(
    specs: Mapping[str, TensorSpec], want: Mapping[str, TensorSpec], *, source: str | os.PathLike
) -> None:
    """Raise one ValueError that counts the missing and unexpected keys and the wrong shapes and
    dtypes, and lists 8 of each.
    """
    both = [(key, specs[key], want[key]) for key in want if key in specs]
    kinds = {
        "missing": [key for key in want if key not in specs],
        "unexpected": [key for key in specs if key not in want],
        "with a wrong shape": [
            f"{k} is {list(a.shape)}, not {list(b.shape)}" for k, a, b in both if a.shape != b.shape
        ],
        "with a wrong dtype": [
            f"{k} is {a.dtype}, not {b.dtype}" for k, a, b in both if a.dtype != b.dtype
        ],
    }
    faults = [f"{len(keys)} {kind}: {_join(keys)}" for kind, keys in kinds.items() if keys]
    if faults:
        raise ValueError(
            f"The {len(specs)} tensors of {source} do not match the {len(want)} expected: "
            f"{'; '.join(faults)}"
        )


def write_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {"format": "pt"}
) -> None:
    """Write one safetensors file with the default permissions of its folder. Raises OSError if it
    cannot be written.
    """
    with naming(file, file):
        save_file(dict(tensors), file, metadata=dict(metadata))
    # save_file sets the mode 0600
    file.chmod(file.parent.stat().st_mode & 0o666)


class CheckpointWriter:
    """Write tensors one by one into shards of `max_shard_size` bytes; a context manager over
    `atomic_folder`.

    It holds one shard in memory. The folder appears when the block ends, and does not appear if the
    block raises. One shard becomes `model.safetensors`, several become
    `model-00001-of-0000N.safetensors` with an index; a tensor larger than `max_shard_size` gets a
    separate shard. Raises ValueError before writing, also if `expected_bytes` exceed the free
    space.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike,
        max_shard_size: int | str = 2 * 2**30,
        *,
        overwrite: bool = False,
        expected_bytes: int | None = None,
    ):
        self.out_dir, self.max_shard_size = (
            check_out_dir(out_dir, overwrite),
            parse_size(max_shard_size),
        )
        free = shutil.disk_usage(
            next(parent for parent in self.out_dir.parents if parent.exists())
        ).free
        if expected_bytes is not None and free < expected_bytes:
            raise ValueError(
                f"Writing {self.out_dir} needs {expected_bytes} bytes, but the disk has {free} free"
            )
        self.overwrite, self._stack = overwrite, contextlib.ExitStack()
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = self._shards = 0
        self._shard_of: dict[str, int] = {}

    def __enter__(self) -> "CheckpointWriter":
        self._tmp = self._stack.enter_context(atomic_folder(self.out_dir, self.overwrite))
        return self

    def __exit__(self, *error) -> None:
        if error[0] is None:
            with self._stack:  # which also sees what _finish raises
                self._finish()
        else:
            self._stack.__exit__(*error)

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Store the current values of `tensor`; raises ValueError for a repeated key or anything
        but a plain dense tensor.
        """
        plain = isinstance(tensor, torch.Tensor) and type(tensor.detach()) is torch.Tensor
        if plain:
            what = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
        else:
            what = f"a {type(tensor).__name__}"
        stored = (
            plain
            and tensor.layout == torch.strided
            and not tensor.is_meta
            and tensor.dtype in DTYPES.values()
        )
        if (
            not stored
            or not isinstance(key, str)
            or key in ("", "__metadata__")
            or key in self._shard_of
        ):
            valid = "must be a plain dense tensor of a safetensors dtype under a new name"
            raise ValueError(
                f"Tensor {key!r} {valid}, but got {what} after {len(self._shard_of)} others"
            )
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if self._pending_bytes + spec.nbytes > self.max_shard_size:
            self._flush()
        tensor = tensor.detach()
        as_stored = (
            tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )
        # a tensor that waits for others is copied, as the caller may reuse its memory
        if not as_stored or spec.nbytes < self.max_shard_size:
            tensor = _empty(spec).copy_(tensor)
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
            self._shards = self._shards + 1

    def _finish(self) -> None:
        self._flush()
        names = {
            i: f"model-{i:05d}-of-{self._shards:05d}.safetensors"
            for i in range(1, self._shards + 1)
        }
        if self._shards > 1:
            weight_map = {key: names[i] for key, i in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self.write_text(INDEX, json.dumps(index, indent=2) + "\n")
        for i, name in names.items():
            os.rename(
                self._tmp / f"model-{i:05d}.safetensors",
                self._tmp / (SINGLE if self._shards == 1 else name),
            )
