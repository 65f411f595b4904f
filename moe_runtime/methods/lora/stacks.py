"""PEFT adapters of MoE models, from disk to disk: read for their base, converted to PEFT's current
layout, or merged into it.

    read_peft       a folder, written by any version of PEFT -> A, B and scaling by the name of the
                    parameter that they change
    convert_folder  files of PEFT 0.18 and 0.19 -> those that PEFT 0.20 and later read
                    (`moe_runtime.hf.dropin.peft_files`)
    merge_folder    base and adapter -> a model folder, W_e + s B_e A_e, in the base's names,
                    layouts and dtypes

A key does not name its parameter: PEFT wraps an experts module once for each of its parameters in
`target_parameters`, in the module's order, the first innermost, and adds `.base_layer` to a pair's
key for each wrapper around it. So the pair `...experts.lora_A.weight` belongs to down_proj, or to
gate_up_proj if that is the only one.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_runtime.config import shown
from moe_runtime.hf.dropin.peft_files import is_reversed, pack, unpack
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.folders import SHARD, Progress, skeleton, to_saved
from moe_runtime.hf.models.saved_rows import SavedRows, saved_rows, saved_tensors
from moe_runtime.io.checkpoint import Checkpoint, check_finite
from moe_runtime.io.files import check_out_dir, read_json
from moe_runtime.methods.lora.adapters import (
    CONFIG,
    HALVES,
    PLAIN,
    PREFIX,
    WEIGHTS,
    AdapterPair,
    is_pattern,
    other_setting,
    read_tensors,
    write_adapter,
)
from moe_runtime.modules.moe import FLOATS

WRITES = "0.21.0"  # the peft_version of the files written here
# settings of PLAIN that are read here
READ = ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter folder: `pairs`, and `whole` tensors of modules_to_save, by the names of the
    base's parameters.
    """

    folder: Path
    config: Mapping[str, Any]
    pairs: Mapping[str, AdapterPair]
    whole: Mapping[str, torch.Tensor]
    keys: Mapping[str, str]  # the prefix of lora_A.weight in the file, by parameter
    # whether the file's pairs of stacks have an old PEFT's axes; `pairs` never do
    is_reversed: bool


def is_peft(folder: object) -> bool:
    """Whether a folder holds an adapter that PEFT reads."""
    return isinstance(folder, str | Path) and Path(folder, CONFIG).is_file()


def check_peft(folder: str | Path) -> None:
    """Raise ValueError unless a folder holds an adapter that PEFT reads."""
    if not is_peft(folder):
        raise ValueError(
            f"Adapter {str(folder)!r} has no {CONFIG}. Pass the folder of an adapter that PEFT "
            "saved (moe-runtime esft merge merges ESFT's own)"
        )


def base_skeleton(base: str | Path) -> nn.Module:
    """Return the model that a folder's config.json describes, on the meta device."""
    return skeleton(folders.read_config(base))


def read_peft(folder: str | Path, model: nn.Module) -> PeftAdapter:
    """Read an adapter of `model`, which may be a skeleton; raises ValueError if it is not plain
    LoRA or for another model.

    Pairs of stacks may have the axes of any PEFT version: their sizes tell which, or `peft_version`
    if all stacks are square.
    """
    check_peft(folder)
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    tensors = read_tensors(folder)
    _check_config(config, folder / CONFIG)
    all_halves, whole = _found(model, config, tensors, folder)
    reverse = _reversed(folder, config, all_halves)
    pairs = {}
    for name, halves in all_halves.items():
        rank, scaling = _rank(config, name)
        a, b = halves.unpacked(reverse)
        if [b.shape[-2], a.shape[-1]] != halves.size or not a.shape[-2] == b.shape[-1] == rank:
            raise ValueError(
                f"{halves.key} in {folder / WEIGHTS} has rank {a.shape[-2]} and {b.shape[-1]} for "
                f"a matrix {[b.shape[-2], a.shape[-1]]}, but must have rank {rank} and "
                f"{halves.size}, as {name} of the base"
            )
        pairs[name] = AdapterPair(a, b, scaling, halves.transposed)
    keys = {name: halves.key for name, halves in all_halves.items()}
    return PeftAdapter(folder, config, pairs, whole, keys, reverse)


class _Halves(NamedTuple):
    """A pair as a file has it: A [r, in] and B [out, r], or of a stack [E r, in] and [out, r E]."""

    key: str  # without .lora_A.weight
    parameter: torch.Tensor
    transposed: bool
    a: torch.Tensor
    b: torch.Tensor

    @property
    def size(self) -> list[int]:
        """[out, in] of one matrix."""
        size = list(self.parameter.shape[-2:])
        return size[::-1] if self.transposed else size

    def unpacked(self, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B, of a stack [E, r, in] and [E, out, r]."""
        E = len(self.parameter)
        is_stack = self.parameter.dim() == 3
        if is_stack and self.a.shape[0] % E == 0 and self.b.shape[1] % E == 0:
            return unpack(self.a, self.b, E, reverse)
        return self.a, self.b


def _found(
    model: nn.Module, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], folder: Path
) -> tuple[dict[str, _Halves], dict[str, torch.Tensor]]:
    """Return an adapter's pairs and whole tensors, by the names of the parameters of `model`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    all_halves = {}
    odd = []
    for key in [key for key in tensors if key.endswith(HALVES[0])]:
        pair_key = key.removesuffix(HALVES[0])
        name = _parameter_of(model, config, pair_key.removeprefix(PREFIX))
        a = tensors.pop(key)
        b = tensors.pop(pair_key + HALVES[1], torch.empty(0))
        are_matrices = a.dim() == b.dim() == 2 and a.is_floating_point() and b.is_floating_point()
        if name is None or name in all_halves or not are_matrices or not key.startswith(PREFIX):
            odd.append(key)
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        transposed = parameters[name].dim() == 3 and getattr(module, "is_transposed", False)
        all_halves[name] = _Halves(pair_key, parameters[name], transposed, a, b)
        # PEFT also saves the frozen weight of a head that has a pair
        tensors.pop(f"{PREFIX}{name.removesuffix('.weight')}.base_layer.weight", None)
    whole = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    for key, tensor in whole.items():
        if key not in parameters or parameters[key].shape != tensor.shape:
            odd.append(key)
    if odd or not all_halves:
        raise ValueError(
            f"{folder / WEIGHTS} has {odd[0] if odd else 'no pair'}, but must have lora_A.weight "
            f"and lora_B.weight of linear layers or of the target_parameters in {folder / CONFIG}, "
            f"for a {type(model).__name__} like the base"
        )
    return all_halves, whole


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    odd = other_setting(config, [name for name in PLAIN if name not in READ])
    numbers = {"r": [config.get("r")], "lora_alpha": [config.get("lora_alpha")]}
    for name in ("rank_pattern", "alpha_pattern"):
        values = config.get(name) or {}
        is_known = isinstance(values, dict) and all(map(is_pattern, values))
        numbers[name] = values.values() if is_known else [None]
    for name, values in numbers.items():
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                odd = odd or name
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        odd = odd or "target_parameters"
    if odd is not None:
        raise ValueError(
            f"{odd} in {path} is {shown(config.get(odd))}, but only LoRA with pairs A, B and "
            "whole modules is supported"
        )


def _parameter_of(model: nn.Module, config: Mapping[str, Any], pair_path: str) -> str | None:
    """Return the name of the parameter that a pair at `pair_path` changes, or None."""
    path = pair_path
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    if isinstance(module, nn.Linear):
        return f"{path}.weight" if path == pair_path else None
    targets = config.get("target_parameters") or []
    chain = []
    for parameter, _ in module.named_parameters(recurse=False):
        name = f"{path}.{parameter}"
        if any(name == target or name.endswith(f".{target}") for target in targets):
            chain.append(name)
    outer = pair_path.count(".base_layer") - path.count(".base_layer")
    return chain[-1 - outer] if outer < len(chain) else None


def _rank(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank of a target, and the scaling."""

    def pattern(of: str, default):
        for key, value in (config.get(of) or {}).items():
            if re.match(rf"(.*\.)?({key})(\.weight)?$", name):
                return value
        return default

    rank = pattern("rank_pattern", config["r"])
    alpha = pattern("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _reversed(folder: Path, config: Mapping[str, Any], all_halves: Mapping[str, _Halves]) -> bool:
    """Return whether the file's pairs of stacks are reversed, by their sizes or, if all are square,
    by the version.
    """
    version = config.get("peft_version")
    by_size = set()
    by_version = set()
    for halves in all_halves.values():
        if halves.parameter.dim() != 3:
            continue
        out, size = halves.size
        if size != out and halves.a.shape[0] % len(halves.parameter) == 0:
            by_size.add((halves.b.shape[0], halves.a.shape[1]) == (size, out))
        by_version.add(is_reversed(version, halves.transposed))
    answers = by_size or by_version
    why = None
    if answers == {None}:
        why = f"all stacks are square, and peft_version is {shown(version)}"
    if len(answers) > 1:
        why = "some of its stacks have the axes of one PEFT, some of another"
    if why:
        raise ValueError(
            f"{folder} has ambiguous pairs of expert stacks: {why}. Save it with PEFT 0.20 or later"
        )
    return True in answers


class ConvertReceipt(NamedTuple):
    """What `convert_folder` wrote."""

    path: Path
    stacks: int  # with converted pairs
    peft_version: str | None  # of the source


def convert_folder(
    folder: str | Path, base: str | Path, out: str | Path, *, overwrite: bool = False
) -> ConvertReceipt:
    """Convert an adapter of the model in folder `base` from an old PEFT's axes of stacks to those
    of PEFT 0.20 and later.

    The change of every weight stays bit-identical. Raises ValueError for an adapter that already
    has the new axes.
    """
    check_out_dir(out, overwrite, [folder, base])
    adapter = read_peft(folder, base_skeleton(base))
    version = adapter.config.get("peft_version")
    if not adapter.is_reversed:
        raise ValueError(
            f"{folder} (peft_version {version}) needs no conversion, as it has the axes of PEFT "
            "0.20 and later"
        )
    tensors = read_tensors(folder)
    stacks = {name: pair for name, pair in adapter.pairs.items() if pair.is_stack}
    for name, pair in stacks.items():
        for half, tensor in zip(HALVES, pack(pair.a, pair.b), strict=True):
            tensors[adapter.keys[name] + half] = tensor
    side_files = [Path(folder, name) for name in folders.side_files(Path(folder))]
    write_adapter(out, tensors, {**adapter.config, "peft_version": WRITES}, overwrite, side_files)
    return ConvertReceipt(Path(out), len(stacks), version)


class MergeReceipt(NamedTuple):
    """What `merge_folder` wrote.

    Attributes:
        path: The folder.
        tensors: Number of tensors.
        bytes: Bytes of all tensors.
        side_files: Names of copied files: config, tokenizer and so on.
        experts: Number of changed experts, over all layers.
        changed: Number of changed tensors.
    """

    path: Path
    tensors: int
    bytes: int
    side_files: list[str]  # copied: config, tokenizer and so on
    experts: int  # changed, over all layers
    changed: int  # tensors of the folder that the adapter changed


def merge_folder(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> MergeReceipt:
    """Write the model folder `base` with PEFT's `adapter` merged into it to the folder `out`.

    Summed in float32 and rounded once to the base's dtype. Holds one tensor of the base, one shard,
    and the adapter. Experts whose B is zero stay as they are, bit for bit.
    """
    check_out_dir(out, overwrite, [base, adapter])
    with open_base(base) as (model, checkpoint):
        changes = peft_changes(model, read_peft(adapter, model), checkpoint)
        return changes.write(
            out, max_shard_size=max_shard_size, overwrite=overwrite, progress=progress
        )


@contextlib.contextmanager
def open_base(base: str | Path) -> Iterator[tuple[nn.Module, Checkpoint]]:
    """Open a model's folder: the model on the meta device, and the tensors."""
    config = folders.read_config(base)
    with Checkpoint(base) as checkpoint:
        yield skeleton(config), checkpoint


class Changes:
    """The tensors of a base's folder that an adapter changes, and their new values."""

    def __init__(self, source: str | Path, model: nn.Module, checkpoint: Checkpoint):
        self.source = source
        self.model = model
        self.checkpoint = checkpoint
        self.experts = 0
        self._new: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._new)

    def add(self, key: str, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the tensor `key` to `new` of it."""
        dtype = self.checkpoint.specs()[key].dtype
        if dtype not in FLOATS:
            raise ValueError(
                f"{self.source} changes {key} in {self.checkpoint.path}, which is {dtype}, but "
                "only weights of a floating dtype can be changed"
            )
        self._new[key] = new

    def add_rows(
        self,
        name: str,
        stack: torch.Tensor,
        ids: tuple[int, ...],
        new: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        value: Callable[[int], torch.Tensor],
    ) -> None:
        """Change the rows `ids` of a stack to `new` of the old row and `value` of its id, which is
        in the model's layout.
        """
        for key, rows in saved_rows(self.model, name, stack, ids, self.checkpoint).items():
            self.add(key, functools.partial(self._with_rows, rows, new, value))

    def _with_rows(self, rows: SavedRows, new, value, tensor: torch.Tensor) -> torch.Tensor:
        for e in rows.ids:
            row = rows.row(self.model, value(e))
            if not rows.stacked:
                return new(tensor, row)
            tensor[e] = new(tensor[e], row)
        return tensor

    def write(self, out: str | Path, **options: Any) -> MergeReceipt:
        """Write the folder with the changes; `options` are those of `folders.rewrite`."""
        job, names = folders.rewrite(self.checkpoint, out, self._tensor, **options)
        return MergeReceipt(Path(out), job.tensors, job.bytes, names, self.experts, len(self))

    def _tensor(self, key: str) -> torch.Tensor:
        tensor = self.checkpoint.get(key)
        if key not in self._new:
            return tensor
        new = self._new[key](tensor).to(tensor.dtype)
        return check_finite(new, key, f"the merge of {self.source}")


def peft_changes(model: nn.Module, adapter: PeftAdapter, checkpoint: Checkpoint) -> Changes:
    """Return what a PEFT adapter changes in the folder of `model`, its base's skeleton."""
    changes = Changes(adapter.folder, model, checkpoint)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", {})
    experts = set()
    for name, pair in adapter.pairs.items():
        if name in tied or name in tied.values():  # PEFT would change one place of it
            raise ValueError(
                f"{adapter.folder} changes {name}, which is tied to another weight, but only "
                "untied weights can be changed"
            )
        if pair.is_stack:
            ids = tuple(e for e, b in enumerate(pair.b) if b.any())
            experts |= {(name.rpartition(".")[0], e) for e in ids}
            changes.add_rows(name, parameters[name], ids, _sum, pair.delta)
            continue
        for key in saved_tensors(model, {name: parameters[name]}, checkpoint):
            changes.add(key, functools.partial(_changed_matrix, model, name, key, pair))
    for key, tensor in saved_tensors(model, adapter.whole, checkpoint).items():
        changes.add(key, functools.partial(_replaced, tensor))
    changes.experts = len(experts)
    return changes


def _changed_matrix(
    model: nn.Module, name: str, key: str, pair: AdapterPair, tensor: torch.Tensor
) -> torch.Tensor:
    change = pair.delta()
    if key != name:
        change = to_saved(model, {name: change})[key]
    return _sum(tensor, change)


def _replaced(new: torch.Tensor, _) -> torch.Tensor:
    return new


def _sum(weight: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return (weight.to(torch.promote_types(weight.dtype, change.dtype)) + change).to(weight.dtype)
