"""Tensor files of the released XFT code, by key: safetensors, `pytorch_model*.bin`, and the experts' `ffn_layer_{l}.pt`.

The last two are pickles. They are loaded with `weights_only=True`, which builds tensors and containers and runs nothing;
a file that asks for more is refused. They are mapped, not read, where torch can (its zip format).
"""

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from moe_runtime.checkpoint import INDEX as SAFE_INDEX
from moe_runtime.checkpoint import SINGLE, Checkpoint, TensorSpec
from moe_runtime.files import is_plain_name, read_json

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
KINDS = ("weight_gate", "weight_up", "weight_down")
EXPERTS = "model.layers.{}.mlp.calculator.experts.{}.{}.weight"  # layer, kind, expert


def load_tensors(file: Path) -> Mapping:
    """Load a file of torch.save that holds tensors and containers alone; raises ValueError for any other."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except MemoryError:
        raise
    except Exception as error:  # what an unpickler raises for bytes that are no pickle is not specified
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{file} cannot be loaded ({why}); want a whole file of tensors alone, as torch.save writes it: what a "
            "pickle asks for beyond tensors is never run"
        ) from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{file} holds a {type(loaded).__name__}; want a dict of tensors")
    return loaded


class TorchFiles:
    """Files of torch.save open for reading, with the reading half of Checkpoint; one file is open at a time.

    `flatten` turns what a file holds into {key: tensor}. Raises ValueError for anything but dense tensors, and for a key in
    two files.
    """

    def __init__(self, path: Path, names: list[str], flatten: Callable[[Mapping, Path], Mapping]):
        self.path, self._flatten = path, flatten
        self._place: dict[str, tuple[TensorSpec, str]] = {}
        self._name, self._open = "", {}
        for name in names:
            for key, tensor in self._load(name).items():
                plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta
                if not isinstance(key, str) or not plain:
                    raise ValueError(f"{key} in {path / name} is a {type(tensor).__name__}; want a dense tensor")
                if key in self._place:
                    raise ValueError(f"{key} is in {name} and in {self._place[key][1]} of {path}; want it once")
                self._place[key] = (TensorSpec(tuple(tensor.shape), tensor.dtype), name)
        self.close()

    def keys(self) -> list[str]:
        """Keys file by file: the order to walk them in."""
        return list(self._place)

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return {key: spec for key, (spec, _) in self._place.items()}

    def get(self, key: str) -> torch.Tensor:
        """Return one tensor, which may be mapped from the file."""
        return self._load(self._place[key][1])[key].detach()

    def close(self) -> None:
        """Let go of the open file."""
        self._name, self._open = "", {}

    def _load(self, name: str) -> Mapping:
        if name != self._name:
            self.close()  # before the next takes as much memory
            self._open = self._flatten(load_tensors(self.path / name), self.path / name)
            self._name = name
        return self._open


def open_model(path: str | Path) -> Checkpoint | TorchFiles:
    """Open the tensors of a model folder: safetensors where there are some, else `pytorch_model*.bin`."""
    path = Path(path)
    found = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if not found & {BIN, BIN_INDEX} or found & {SINGLE, SAFE_INDEX}:
        return Checkpoint(path)
    if BIN_INDEX not in found:
        return TorchFiles(path, [BIN], lambda tensors, _: tensors)
    weight_map = read_json(path / BIN_INDEX).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or any(not is_plain_name(name) or name not in found for name in names):
        raise ValueError(f"weight_map of {path / BIN_INDEX} names {names}; want files beside it; get all of them")
    files = TorchFiles(path, sorted(set(names)), lambda tensors, _: tensors)
    for key in weight_map.keys() - files.specs().keys():
        raise ValueError(f"{path / weight_map[key]} lacks {key}, which {BIN_INDEX} has there; want every key")
    return files


def open_experts(folder: str | Path, num_layers: int) -> TorchFiles:
    """Open a folder of `ffn_layer_{l}.pt`, each {weight_gate | weight_up | weight_down: {expert: tensor}}, by EXPERTS' keys."""
    folder = Path(folder)
    names = []
    for layer in range(num_layers):  # one by one: the number is a config's
        names.append(f"ffn_layer_{layer}.pt")
        if not (folder / names[-1]).is_file():
            raise ValueError(f"ffn_folder is {folder}, which lacks {names[-1]}; want one file for each layer")
    return TorchFiles(folder, names, _flatten_experts)


def _flatten_experts(loaded: Mapping, file: Path) -> dict:
    layer = int(re.search(r"(\d+)\.pt$", file.name)[1])
    if set(loaded) != set(KINDS) or any(not isinstance(experts, Mapping) for experts in loaded.values()):
        raise ValueError(f"{file} holds {', '.join(map(str, loaded))}; want {', '.join(KINDS)}, each a dict of experts")
    return {EXPERTS.format(layer, kind, e): tensor for kind in KINDS for e, tensor in loaded[kind].items()}


def find_experts(source: Path, said: str | None, given: str | Path | None) -> Path:
    """Return the folder of `ffn_layer_0.pt`: the one `given`, `source` itself, the one that config.json `said`, or its sibling.

    Raises ValueError, with where it looked, if none has the file.
    """
    if said is not None and not isinstance(said, str):
        raise ValueError(f"ffn_folder_path is {said!r}; want a path")
    said = [Path(said), source.parent / Path(said).name] if said else []
    places = [Path(given)] if given is not None else [source, *said]
    for place in places:
        if (place / "ffn_layer_0.pt").is_file():
            return place
    looked = ", ".join(map(str, places))
    raise ValueError(f"ffn_layer_0.pt is in none of {looked}; want the folder of the experts' files as ffn_folder")
