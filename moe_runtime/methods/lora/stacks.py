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

import math
import re
from collections.abc import Mapping
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
from moe_runtime.io.checkpoint import Checkpoint, check_finite, write_tensors
from moe_runtime.io.files import atomic_folder, atomic_write_json, check_out_dir, read_json
from moe_runtime.methods.lora.adapters import (
    CONFIG,
    HALVES,
    PLAIN,
    PREFIX,
    WEIGHTS,
    is_pattern,
    other_setting,
    read_tensors,
)
from moe_runtime.modules.moe import FLOATS

WRITES = "0.21.0"  # the peft_version of the files written here
# settings of PLAIN that are read here
READ = ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")


class AdapterPair(NamedTuple):
    """The change s B A of a parameter; of a stack, of each expert."""

    a: torch.Tensor  # [E, r, in]; of a matrix [r, in]
    b: torch.Tensor  # [E, out, r]; of a matrix [out, r]
    scaling: float
    transposed: bool = False  # whether the stack is [E, in, out]

    @property
    def is_stack(self) -> bool:
        """Whether each expert has a pair."""
        return self.a.dim() == 3

    @property
    def rank(self) -> int:
        """Return r, which is per expert."""
        return self.a.shape[-2]

    def delta(self, expert: int | None = None) -> torch.Tensor:
        """Return the change of the parameter, or of row `expert` of a stack, in float32 or
        wider.
        """
        wide = torch.promote_types(self.a.dtype, torch.float32)
        a = self.a if expert is None else self.a[expert]
        b = self.b if expert is None else self.b[expert]
        change = (b.to(wide) @ a.to(wide)).mul_(self.scaling)
        return change.transpose(-2, -1) if self.transposed else change


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
    if is_peft(folder):
        return
    hint = "Pass the folder of an adapter that PEFT saved"
    if Path(folder, "expert_cfg.json").is_file():
        hint = "It is an ESFT adapter of whole experts: merge it with moe-runtime esft merge"
    problem = f"has no {CONFIG}" if Path(folder).is_dir() else "is no folder"
    raise ValueError(f"Adapter {str(folder)!r} {problem}. {hint}")


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
    path = Path(folder) / CONFIG
    config = read_json(path)
    tensors = read_tensors(folder)
    _check_config(config, path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    halves = {}
    keys = {}
    odd = None
    for key in [key for key in tensors if key.endswith(HALVES[0])]:
        place = key.removesuffix(HALVES[0])
        name = _parameter_of(model, config, place.removeprefix(PREFIX))
        a = tensors.pop(key)
        b = tensors.pop(place + HALVES[1], torch.empty(0))
        fits = a.dim() == b.dim() == 2 and a.is_floating_point() and b.is_floating_point()
        if name is None or name in halves or not fits or not key.startswith(PREFIX):
            odd = odd or key
            continue
        halves[name] = (a, b)
        keys[name] = place
        # PEFT also saves the frozen weight of a head that has a pair
        tensors.pop(f"{PREFIX}{name.removesuffix('.weight')}.base_layer.weight", None)
    whole = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    for key, tensor in whole.items():
        if key not in parameters or parameters[key].shape != tensor.shape:
            odd = odd or key
    if odd or not halves:
        raise ValueError(
            f"{Path(folder) / WEIGHTS} has {odd or 'no pair'}, but must have lora_A.weight and "
            f"lora_B.weight of linear layers or of the target_parameters in {path}, for a "
            f"{type(model).__name__} like the base"
        )
    stacks = {}
    for name, pair in halves.items():
        if parameters[name].dim() == 3:
            module = model.get_submodule(name.rpartition(".")[0])
            stacks[name] = (parameters[name], getattr(module, "is_transposed", False), *pair)
    reverse = _reversed(folder, config, stacks)
    pairs = {}
    for name, (a, b) in halves.items():
        shape = parameters[name].shape
        flipped = False
        if name in stacks:
            flipped = stacks[name][1]
            if a.shape[0] % shape[0] == 0 and b.shape[1] % shape[0] == 0:
                a, b = unpack(a, b, shape[0], reverse)
            shape = (shape[2], shape[1]) if flipped else shape[1:]
        rank, scaling = _rank(config, name)
        if (b.shape[-2], a.shape[-1]) != tuple(shape) or not a.shape[-2] == b.shape[-1] == rank:
            raise ValueError(
                f"{keys[name]} in {Path(folder) / WEIGHTS} has rank {a.shape[-2]} and "
                f"{b.shape[-1]} for a matrix {[b.shape[-2], a.shape[-1]]}, but must have rank "
                f"{rank} and {list(shape)}, as {name} of the base"
            )
        pairs[name] = AdapterPair(a, b, scaling, flipped)
    return PeftAdapter(Path(folder), config, pairs, whole, keys, reverse)


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    odd = other_setting(config, [name for name in PLAIN if name not in READ])
    for name in ("r", "lora_alpha"):
        if not _is_positive(config.get(name)):
            odd = odd or name
    for name in ("rank_pattern", "alpha_pattern"):
        if not _are_patterns(config.get(name) or {}):
            odd = odd or name
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        odd = odd or "target_parameters"
    if odd is not None:
        raise ValueError(
            f"{odd} in {path} is {shown(config.get(odd))}, but only LoRA with pairs A, B and "
            "whole modules is supported"
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _are_patterns(values: Any) -> bool:
    return isinstance(values, dict) and all(
        is_pattern(key) and _is_positive(value) for key, value in values.items()
    )


def _parameter_of(model: nn.Module, config: Mapping[str, Any], place: str) -> str | None:
    """Return the name of the parameter that a pair at `place` changes, or None."""
    path = place
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    if isinstance(module, nn.Linear):
        return f"{path}.weight" if path == place else None
    targets = config.get("target_parameters") or []
    chain = []
    for parameter, _ in module.named_parameters(recurse=False):
        name = f"{path}.{parameter}"
        if any(name == target or name.endswith(f".{target}") for target in targets):
            chain.append(name)
    outer = place.count(".base_layer") - path.count(".base_layer")
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


def _reversed(folder: str | Path, config: Mapping[str, Any], stacks: Mapping[str, tuple]) -> bool:
    """Return whether the file's pairs of stacks are reversed, by their sizes or, if all are square,
    by the version.
    """
    fits = set()
    version = config.get("peft_version")
    why = None
    for stack, transposed, a, b in stacks.values():
        E, *sizes = stack.shape
        size, out = sizes if transposed else sizes[::-1]
        if size != out and a.shape[0] % E == 0:
            fits.add((b.shape[0], a.shape[1]) == (size, out))
    found = fits or {is_reversed(version, transposed) for _, transposed, *_ in stacks.values()}
    if len(found) > 1:
        why = "some of its stacks have the axes of one PEFT, some of another"
    elif found == {None}:
        why = f"all stacks are square, and peft_version is {shown(version)}"
    elif single := [
        name
        for name, (stack, transposed, *_) in stacks.items()
        if len(stack) == 1 and (transposed or True in found)
    ]:
        why = f"{single[0]} has one expert, for which PEFT multiplies the pair the other way around"
    if why:
        raise ValueError(
            f"{folder} has ambiguous pairs of expert stacks: {why}. Save it with PEFT 0.20 or later"
        )
    return True in found


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
    write_adapter(
        out,
        tensors,
        {**adapter.config, "peft_version": WRITES},
        copied_from=Path(folder),
        overwrite=overwrite,
    )
    return ConvertReceipt(Path(out), len(stacks), version)


def write_adapter(
    out: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    copied_from: Path,
    overwrite: bool,
) -> None:
    """Write an adapter folder atomically, with the side files (tokenizer and so on) of
    `copied_from`.
    """
    with atomic_folder(out, overwrite) as tmp:
        write_tensors(
            tmp / WEIGHTS,
            {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()},
        )
        atomic_write_json(tmp / CONFIG, dict(config))
        for name in folders.side_files(copied_from):
            (tmp / name).write_bytes((copied_from / name).read_bytes())


class MergeReceipt(NamedTuple):
    """What `merge_folder` wrote."""

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
    config = folders.read_config(base)
    with Checkpoint(base) as checkpoint:
        folders.check_depth(config, checkpoint)
        plan = MergePlan(skeleton(config), adapter, checkpoint)
        how = {"max_shard_size": max_shard_size, "overwrite": overwrite, "progress": progress}
        job, names = folders.rewrite(checkpoint, out, plan.tensor, **how)
    return MergeReceipt(Path(out), job.tensors, job.bytes, names, plan.experts, len(plan))


class MergePlan:
    """The tensors of a folder that a PEFT adapter changes, and their new values."""

    def __init__(self, model: nn.Module, adapter: str | Path, checkpoint: Checkpoint):
        self.model = model
        self.checkpoint = checkpoint
        self.adapter = read_peft(adapter, model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.rows: dict[str, tuple[AdapterPair, SavedRows]] = {}
        self.matrices: dict[str, str] = {}  # parameters by the folder's names
        tied = {
            name for both in getattr(model, "all_tied_weights_keys", {}).items() for name in both
        }
        changed = set()
        # PEFT would change one place of a tied weight
        odd = next(
            (
                f"{name}, which is tied to another weight"
                for name in self.adapter.pairs
                if name in tied
            ),
            None,
        )
        for name, pair in self.adapter.pairs.items() if odd is None else ():
            if pair.is_stack:
                ids = tuple(e for e, b in enumerate(pair.b) if b.any())
                changed |= {(name.rpartition(".")[0], e) for e in ids}
                found = saved_rows(model, name, parameters[name], ids, checkpoint)
                self.rows |= {key: (pair, rows) for key, rows in found.items()}
            else:
                self.matrices |= dict.fromkeys(
                    saved_tensors(model, {name: parameters[name]}, checkpoint), name
                )
        self.whole = saved_tensors(model, self.adapter.whole, checkpoint) if odd is None else {}
        self.experts = len(changed)
        for key in (*self.rows, *self.matrices, *self.whole):
            dtype = checkpoint.specs()[key].dtype
            odd = odd or (
                f"{key}, which is {dtype} in {checkpoint.path}" if dtype not in FLOATS else None
            )
        if odd:
            raise ValueError(
                f"{adapter} changes {odd}, but only untied weights of a floating dtype can be "
                "changed"
            )

    def __len__(self) -> int:
        return len(self.rows) + len(self.matrices) + len(self.whole)

    def tensor(self, key: str) -> torch.Tensor:
        """Return the new value of the folder's tensor `key`; raises ValueError if it is changed to
        NaN or infinity.
        """
        value = self._value(key)
        is_changed = key in self.whole or key in self.matrices or key in self.rows
        if is_changed:
            return check_finite(value, key, f"the merge of {self.adapter.folder}")
        return value

    def _value(self, key: str) -> torch.Tensor:
        tensor = self.checkpoint.get(key)
        if key in self.whole:
            return self.whole[key].to(tensor.dtype)
        if key in self.matrices:
            name = self.matrices[key]
            change = self.adapter.pairs[name].delta()
            return _sum(
                tensor, change if key == name else to_saved(self.model, {name: change})[key]
            )
        if key not in self.rows:
            return tensor
        pair, rows = self.rows[key]
        if not rows.stacked:
            return _sum(tensor, rows.row(self.model, pair.delta(rows.ids[0])))
        for e in rows.ids:
            tensor[e] = _sum(tensor[e], rows.row(self.model, pair.delta(e)))
        return tensor


def _sum(weight: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return (weight.to(torch.promote_types(weight.dtype, change.dtype)) + change).to(weight.dtype)
