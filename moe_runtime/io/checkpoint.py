"""Safetensors folders: read tensor by tensor, written shard by shard, whole or not at all.

Reading holds one tensor and writing one shard, so a model larger than the memory can be converted. Bytes are read from
the file into memory of their own: safetensors' mmap refuses a file larger than the memory, and a slice from its "pread"
backend allocates the whole tensor first (torch 2.13, safetensors 0.8, 2026-11-20). No pickle is ever loaded.
"""

import errno
import json
import math
import mmap
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moe_runtime.io.files import atomic_folder, check_out_dir, is_plain_name, os_error_of, parse_object, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
SHOWN = 8  # keys or files of a kind in an error

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class TensorSpec(NamedTuple):
    """What a tensor looks like, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes of `size`: a number, or one with B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT]?)B|([KMGT])IB)?", str(size).upper())
    unit, base = (match[3], 1024) if match and match[3] else (match and match[2], 1000)
    value = int(Fraction(match[1]) * base ** " KMGT".index(unit or " ")) if match else 0
    if value < 1:
        raise ValueError(f"size is {size!r}; want at least one byte, as a number or such as '2GB', '500MB', '1.5GiB'")
    return value


def _join(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN)


def _empty(spec: TensorSpec) -> torch.Tensor:
    """Memory of its own for one tensor; large ones go back to the system, where the heap would keep holes as large."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, spec.nbytes, flags=private) if spec.nbytes >= 2**20 else bytearray(spec.nbytes)
    return torch.frombuffer(memory, dtype=spec.dtype).view(spec.shape)


def _list_shards(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the shards, sorted, and the index's map from key to shard (None without an index). Opens no shard."""
    if not folder.is_dir():
        raise ValueError(f"path is {folder}, which is not a folder; want one with {SINGLE}; hf download makes it")
    index, found = folder / INDEX, sorted(file.name for file in folder.iterdir())
    for name in {INDEX, SINGLE} & set(found):
        if not (folder / name).is_file():  # opening a pipe would wait for ever
            raise ValueError(f"{folder / name} is no file; want {SINGLE} or {INDEX}; get the folder again")
    if INDEX not in found and SINGLE in found:
        return [SINGLE], None
    if INDEX not in found:
        weights = _join([n for n in found if n.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt"))])
        how = "convert one that you trust with transformers' from_pretrained(path).save_pretrained(new_path)"
        only = f"only safetensors is read, as a pickle (.bin, .pt) can run code: {how}"
        raise ValueError(f"path is {folder}, which holds {weights or 'no weights'}; want {SINGLE} or {INDEX}; {only}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"weight_map of {index} is {str(weight_map)[:80]}; want an object from key to shard")
    for key, shard in weight_map.items():
        if not is_plain_name(shard) or not shard.endswith(".safetensors"):
            shown = f"shard of {key[:200]} in {index} is {repr(shard)[:200]}"
            raise ValueError(f"{shown}; want the plain name of a .safetensors file")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{index} names {_join(missing)}, which are missing; want all shards; get them again")
    if SINGLE in found and SINGLE not in shards:
        raise ValueError(f"{index} does not name the {SINGLE} beside it; want one of the two; delete the stale one")
    return shards, weight_map


def _parse_tensor(key: str, fields: Any, file: str) -> tuple[int, int, str, TensorSpec]:
    try:
        (begin, end), spec = fields["data_offsets"], TensorSpec(tuple(fields["shape"]), DTYPES[fields["dtype"]])
        valid = all(type(n) is int and n >= 0 for n in (begin, end, *spec.shape)) and end - begin == spec.nbytes
        # torch multiplies the sizes of an empty tensor too
        valid = valid and math.prod(max(n, 1) for n in spec.shape) * spec.dtype.itemsize < 2**63
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        want = f"a dtype among {', '.join(DTYPES)}, a shape, and data_offsets that span its bytes"
        raise ValueError(f"{key} in the header of {file} is {str(fields)[:200]}; want {want}")
    return begin, end, key, spec


def _read_header(stream: BinaryIO) -> tuple[dict[str, str], dict[str, tuple[TensorSpec, int]]]:
    """Read and check a header: the metadata; spec and first byte of each tensor, in the order of their bytes."""
    file, size, length = stream.name, os.fstat(stream.fileno()).st_size, int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        again = "get it again, it is cut off or a git-lfs pointer"
        raise ValueError(f"{file} is {size} bytes with a header of {length}; want a whole safetensors file; {again}")
    header = parse_object(stream.read(length), f"header of {file}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ of {file} is {str(metadata)[:200]}; want an object of texts")
    tensors, data, position = {}, 8 + length, 0
    for begin, end, key, spec in sorted(_parse_tensor(key, fields, file) for key, fields in header.items()):
        if begin != position:
            raise ValueError(f"data_offsets of {key} in {file} are [{begin}, {end}]; want them to begin at {position}")
        if data + end > size:
            raise ValueError(f"{file} is {size} bytes; want {data + end}, where {key} ends; get the whole file again")
        tensors[key], position = (spec, data + begin), end
    if data + position != size:
        raise ValueError(f"{file} is {size} bytes; want {data + position}, where its last tensor ends; get it again")
    return metadata, tensors


class Checkpoint:
    """A safetensors folder open for reading: `model.safetensors`, or shards and their `model.safetensors.index.json`.

    Opening reads the headers and checks them against each other and the index; ValueError names the file and the key.
    Tensors are read on demand, with one shard open at a time, into memory of their own. One thread at a time. `file` is
    the name of the one file to read, whatever else is there: an adapter's `adapter_model.safetensors`.
    """

    def __init__(self, path: str | os.PathLike, file: str | None = None):
        self.path = Path(path)
        self.metadata: dict[str, str] = {}  # of all shards; the first one's word stands
        self._tensors: dict[str, tuple[TensorSpec, str, int]] = {}  # spec, shard, first byte
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._stream: BinaryIO | None = None
        if file is not None and not (self.path / file).is_file():
            raise ValueError(f"path is {self.path}, which has no {file}; want the folder of one")
        shards, weight_map = _list_shards(self.path) if file is None else ([file], None)
        with self:
            for shard in shards:
                metadata, tensors = _read_header(self._open(shard))
                self.metadata = metadata | self.metadata
                for key, (spec, start) in tensors.items():
                    place = shard if weight_map is None else weight_map.get(key, "no shard")
                    if place != shard:
                        raise ValueError(f"{self.path / shard} holds {key}, which {INDEX} has in {place}; want one")
                    self._tensors[key] = (spec, shard, start)
        for key in sorted((weight_map or {}).keys() - self._tensors.keys()):
            raise ValueError(f"{self.path / weight_map[key]} lacks {key}, which {INDEX} has there; want every key")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def close(self) -> None:
        """Close the open shard; a later `get` opens its own again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def keys(self) -> list[str]:
        """Keys shard by shard, in the order of their bytes: the order to walk them in."""
        return list(self._tensors)

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor, from the headers."""
        return {key: spec for key, (spec, _, _) in self._tensors.items()}

    def get(self, key: str) -> torch.Tensor:
        """Read one tensor; raises ValueError for a key that is not there."""
        return self._read(key, self._spec(key), 0)

    def get_rows(self, key: str, index: int | slice) -> torch.Tensor:
        """Read `tensor[index]` and no other bytes: [E, ...] -> [...] for an int, [n, ...] for a slice of step 1.

        Raises ValueError for an index out of range.
        """
        shape, dtype = self._spec(key)
        try:
            rows = range(*shape[:1])[index]
        except (IndexError, TypeError):
            rows = None
        if rows is None or (isinstance(rows, range) and rows.step != 1):
            raise ValueError(f"index is {index!r}, {key} is {list(shape)}; want an int in dim 0 or a slice of step 1")
        first, lead = (rows.start, (len(rows),)) if isinstance(rows, range) else (rows, ())
        return self._read(key, TensorSpec((*lead, *shape[1:]), dtype), first * TensorSpec(shape[1:], dtype).nbytes)

    def _spec(self, key: str) -> TensorSpec:
        if key not in self._tensors:
            raise ValueError(f"key is {key!r}; want one of the {len(self._tensors)} keys of {self.path}")
        return self._tensors[key][0]

    def _open(self, shard: str) -> BinaryIO:
        file = str(self.path / shard)
        if self._stream is None or self._stream.name != file:
            self.close()
            self._stream = open(file, "rb")  # noqa: SIM115
            stat = os.fstat(self._stream.fileno())
            stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            # offsets from one file must not be used on another
            if self._stamps.setdefault(shard, stamp) != stamp:
                raise ValueError(f"{file} changed since its header was read; want it unchanged; open {self.path} anew")
        return self._stream

    def _read(self, key: str, spec: TensorSpec, skip: int) -> torch.Tensor:
        tensor, (_, shard, start) = _empty(spec), self._tensors[key]
        stream = self._open(shard)
        stream.seek(start + skip)
        if stream.readinto(tensor.reshape(-1).view(torch.uint8).numpy()) != spec.nbytes:
            raise ValueError(f"{self.path / shard} ends within {key}; want it unchanged while it is read")
        return tensor


def check_keys(specs: Mapping[str, TensorSpec], want: Mapping[str, TensorSpec], *, source: str | os.PathLike) -> None:
    """Raise one ValueError with each missing, unexpected, misshapen and mistyped key of `specs`, and both values.

    Of each kind the first 8 are listed, and all are counted.
    """
    both = [(key, specs[key], want[key]) for key in want if key in specs]
    kinds = {
        "missing": [key for key in want if key not in specs],
        "unexpected": [key for key in specs if key not in want],
        "of another shape": [f"{k} is {list(a.shape)}, want {list(b.shape)}" for k, a, b in both if a.shape != b.shape],
        "of another dtype": [f"{k} is {a.dtype}, want {b.dtype}" for k, a, b in both if a.dtype != b.dtype],
    }
    faults = [f"{len(keys)} {kind}: {_join(keys)}" for kind, keys in kinds.items() if keys]
    if faults:
        raise ValueError("\n".join([f"{source} has {len(specs)} tensors; want the {len(want)} asked for", *faults]))


def write_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {"format": "pt"}
) -> None:
    """Write one safetensors file with the mode of any new file in its folder. Raises OSError where it cannot be written."""
    try:
        save_file(dict(tensors), file, metadata=dict(metadata))
    except SafetensorError as error:
        raise os_error_of(error, file) or OSError(errno.EIO, str(error), str(file)) from error
    # save_file leaves 0600
    file.chmod(file.parent.stat().st_mode & 0o666)


class CheckpointWriter:
    """Write tensors as they come, in shards of `max_shard_size` bytes; a context manager over `atomic_folder`.

    Holds one shard in memory. The folder appears when the block ends, and not at all when it raises. One shard becomes
    `model.safetensors`, several `model-00001-of-0000N.safetensors` with an index; a tensor above `max_shard_size` has a
    shard of its own. Raises ValueError before anything is written, also if `expected_bytes` exceed the free space.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike,
        max_shard_size: int | str = 2 * 2**30,
        *,
        overwrite: bool = False,
        expected_bytes: int | None = None,
    ):
        self.out_dir, self.max_shard_size = check_out_dir(out_dir, overwrite), parse_size(max_shard_size)
        free = shutil.disk_usage(next(parent for parent in self.out_dir.parents if parent.exists())).free
        if expected_bytes is not None and free < expected_bytes:
            raise ValueError(f"out_dir is {self.out_dir}, on a disk with {free} bytes free; want {expected_bytes}")
        self._folder = atomic_folder(self.out_dir, overwrite)
        self._tmp: Path | None = None
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = self._shards = 0
        self._shard_of: dict[str, int] = {}

    def __enter__(self) -> "CheckpointWriter":
        self._tmp = self._folder.__enter__()
        return self

    def __exit__(self, *error) -> None:
        try:
            if error[0] is None:
                self._finish(self._tmp)
        except BaseException:
            error = sys.exc_info()
            raise
        finally:
            self._tmp = None
            self._folder.__exit__(*error)

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Store the values that `tensor` (any device, any strides) has now; raises ValueError for a key given twice.

        Sparse, meta and subclass tensors (DTensor) and dtypes that safetensors lacks are ValueErrors too.
        """
        tmp = self._open_folder()
        if not isinstance(key, str) or key in ("", "__metadata__") or key in self._shard_of:
            raise ValueError(f"key is {key!r}; want a name that was not added before")
        plain = isinstance(tensor, torch.Tensor) and type(tensor.detach()) is torch.Tensor
        if not plain or tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES.values():
            what = f"{tensor.layout} {tensor.dtype} on {tensor.device}" if plain else f"a {type(tensor).__name__}"
            raise ValueError(f"tensor of {key} is {what}; want a plain dense tensor of a dtype of safetensors")
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if self._pending_bytes + spec.nbytes > self.max_shard_size:
            self._flush(tmp)
        tensor = tensor.detach()
        as_stored = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        # a tensor that waits for others is copied: the caller may reuse its memory meanwhile
        if not as_stored or spec.nbytes < self.max_shard_size:
            tensor = _empty(spec).copy_(tensor)
        self._pending[key] = tensor
        self._shard_of[key] = self._shards + 1
        self._pending_bytes += spec.nbytes
        self._total_bytes += spec.nbytes
        if self._pending_bytes >= self.max_shard_size:
            self._flush(tmp)

    def copy_file(self, src: str | os.PathLike) -> None:
        """Copy one file (config, tokenizer) under its own name."""
        if not Path(src).is_file():
            raise ValueError(f"src is {src}; want a file")
        shutil.copyfile(src, self._target(Path(src).name))

    def write_text(self, name: str, text: str) -> None:
        """Write a file of UTF-8 text."""
        self._target(name).write_text(text, encoding="utf-8")

    def place(self, name: str) -> Path:
        """Return the path at which to write one more file of the folder, before the block ends."""
        return self._target(name)

    def _open_folder(self) -> Path:
        if self._tmp is None:
            raise ValueError(f"writer of {self.out_dir} is not open; want it used inside its `with` block")
        return self._tmp

    def _target(self, name: str) -> Path:
        tmp = self._open_folder()
        if not is_plain_name(name) or name == INDEX or name.endswith(".safetensors") or (tmp / name).exists():
            raise ValueError(f"name is {name!r}; want a plain file name, not taken; tensors are written by add")
        return tmp / name

    def _flush(self, tmp: Path) -> None:
        if not self._pending:
            return
        write_tensors(tmp / f"model-{self._shards + 1:05d}.safetensors", self._pending)
        self._pending, self._pending_bytes, self._shards = {}, 0, self._shards + 1

    def _finish(self, tmp: Path) -> None:
        self._flush(tmp)
        if not self._shards:
            raise ValueError(f"writer of {self.out_dir} was given no tensor; want at least one; or use atomic_folder")
        names = {i: f"model-{i:05d}-of-{self._shards:05d}.safetensors" for i in range(1, self._shards + 1)}
        if self._shards > 1:
            weight_map = {key: names[i] for key, i in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (tmp / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for i, name in names.items():
            os.rename(tmp / f"model-{i:05d}.safetensors", tmp / (SINGLE if self._shards == 1 else name))
