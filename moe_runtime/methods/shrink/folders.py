"""Prune or merge the experts of a model's folder, tensor by tensor, to a folder of the same class.

Every layer keeps the same number of experts, so that config.json can say it. All other tensors are
copied byte for byte, except those of multi-token prediction if they have experts: config.json sets
one number for all layers, so they are left out, and it says so. `shrink.json` in the folder is the
receipt.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.config import check_choice
from moe_runtime.hf.models import prediction
from moe_runtime.hf.models.folders import (
    SHARD,
    Conversion,
    Progress,
    copy_side_files,
    read_config,
    skeleton,
)
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter
from moe_runtime.io.files import check_out_dir, read_json
from moe_runtime.methods.shrink import choice, groups
from moe_runtime.methods.shrink.cuts import Cuts
from moe_runtime.methods.shrink.experts import LayerExperts
from moe_runtime.methods.shrink.groups import Group
from moe_runtime.methods.shrink.statistics import ExpertStatistics, check_layers

RECEIPT = "shrink.json"
Tensors = Iterator[tuple[str, Tensor]]  # of the target, by name
Kept = Mapping[int, list[int]]  # by layer: the experts whose entries stay, ascending


class ShrinkReceipt(NamedTuple):
    """What was done to a model.

    Attributes:
        path: The written folder.
        experts_before: Experts per layer of the source.
        experts: Those that are left; of a dense model, those in each MLP.
        parameters_before: Parameters of the source.
        parameters: Parameters of the result.
        bytes_before: Bytes of the source's tensors.
        bytes: Bytes of the result's tensors.
        left_out: Tensors of multi-token prediction that could not stay.
        facts: The content of shrink.json: the method, the experts or groups of each layer, and the
            text.
    """

    path: Path
    experts_before: int
    experts: int
    parameters_before: int
    parameters: int
    bytes_before: int
    bytes: int
    left_out: list[str]
    facts: Mapping[str, Any]


def prune_folder(
    source: str | Path,
    statistics: ExpertStatistics | str | Path,
    out: str | Path,
    keep: int,
    *,
    by: str = "reap",
    top_k: int | None = None,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ShrinkReceipt:
    """Write a model's folder with the `keep` most salient experts of each layer.

    The experts that stay keep their bytes, also packed ones.

    Args:
        source: Folder of a stock MoE model.
        statistics: Those of the model, or the file.
        out: The folder to write.
        keep: Experts per layer.
        by: frequency or reap.
        top_k: Experts per token; by default unchanged.
        max_shard_size: Largest file.
        overwrite: Whether `out` is replaced if it exists.
        progress: Called with the bytes done and all bytes.

    Raises:
        ValueError: The family's experts cannot be cut, or not to this number, or the statistics are
            of another model. Nothing is written then.
    """
    check_choice("by", by, choice.PRUNE)
    check_out_dir(out, overwrite, [source, statistics])
    shrinking = Shrinking(source, statistics)
    shrinking.check(keep, top_k, ())
    shrinking.cuts.check_separable(floats=False)
    kept = {}
    for number, sums in shrinking.statistics.layers.items():
        kept[number] = choice.kept(sums, by, keep, shrinking.cuts.groups)
    return shrinking.write(
        out,
        shrinking.pruned(kept),
        shrinking.cuts.changed_json(keep, top_k),
        {"method": "prune", "by": by, "keep": keep, "kept": kept},
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=progress,
    )


def merge_folder(
    source: str | Path,
    statistics: ExpertStatistics | str | Path,
    out: str | Path,
    keep: int,
    *,
    by: str = "ream",
    align: bool | None = None,
    group_size: int = groups.GROUP_SIZE,
    top_k: int | None = None,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ShrinkReceipt:
    """Write a model's folder with each layer's experts merged to `keep`; the router keeps the rows
    of the groups' leaders.

    Sums are computed in float32 and rounded once.

    Args:
        source: Folder of a stock MoE model.
        statistics: Those of the model with outputs, or the file.
        out: The folder to write.
        keep: Experts per layer.
        by: m-smoe, hc-smoe or ream.
        align: Whether the neurons of a group's experts are matched first; by default with m-smoe
            and ream.
        group_size: Largest group of ream.
        top_k: Experts per token; by default unchanged.
        max_shard_size: Largest file.
        overwrite: Whether `out` is replaced if it exists.
        progress: Called with the bytes done and all bytes.

    Raises:
        ValueError: As in `prune_folder`, or the experts are quantized.
    """
    check_choice("by", by, tuple(groups.NEEDED))
    check_out_dir(out, overwrite, [source, statistics])
    if align is None:
        align = by in groups.ALIGNED
    shrinking = Shrinking(source, statistics)
    shrinking.check(keep, top_k, groups.NEEDED[by])
    shrinking.cuts.check_separable(floats=True)
    found = {}
    for number, sums in shrinking.statistics.layers.items():
        found[number] = groups.grouped(sums, by, keep, shrinking.cuts.groups, group_size)
    return shrinking.write(
        out,
        shrinking.merged(found, align),
        shrinking.cuts.changed_json(keep, top_k),
        {"method": "merge", "by": by, "keep": keep, "align": align, "groups": found},
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=progress,
    )


class Shrinking:
    """A model's folder that is being shrunk.

    Args:
        source: The folder.
        statistics: Those of the model, or the file.

    Raises:
        ValueError: The family's experts cannot be cut, or the folder lacks some.
    """

    def __init__(self, source: str | Path, statistics: ExpertStatistics | str | Path):
        if not isinstance(statistics, ExpertStatistics):
            statistics = ExpertStatistics.load(statistics)
        self.statistics = statistics
        self.checkpoint = Checkpoint(source)
        self.cuts = Cuts.of(self.checkpoint)
        self.places = {}
        for key in self.checkpoint:
            place = self.cuts.place(key)
            if place is not None:
                self.places[key] = place
        self._check_found()
        # config.json has one number of experts for all layers, also for those of prediction heads
        ignored = prediction.passed_over(self.cuts.model, self.checkpoint)
        has_experts = any("experts." in key for key in ignored)
        self.left_out = sorted(ignored) if has_experts else []
        self.read = lambda *keys: None  # reports tensors of the source as done

    def _check_found(self) -> None:
        """Raise ValueError unless the folder has every expert of each layer."""
        E = self.cuts.num_experts
        found: dict[int, set[int]] = {number: set() for number in self.cuts.layers}
        for place in self.places.values():
            if place.expert is not None:
                found[place.layer].add(place.expert)
            elif place.is_stack:
                found[place.layer].update(range(E))
        for number, experts in found.items():
            if experts != set(range(E)):
                raise ValueError(
                    f"{self.checkpoint.path} has {len(experts)} of the {E} experts of layer "
                    f"{number} under the names of transformers. Pass a folder written by "
                    "save_pretrained, or the model from the Hub"
                )

    def check(self, keep: int, top_k: int | None, needed: tuple[str, ...]) -> None:
        """Check a number of experts, and that the statistics are of this model."""
        self.cuts.check_keep(keep, top_k)
        experts = dict.fromkeys(self.cuts.layers, self.cuts.num_experts)
        check_layers(self.statistics, experts, needed)

    def check_dense(self, keep: int, needed: tuple[str, ...]) -> None:
        """Check a number of experts to become one MLP, and that the statistics are of this
        model.
        """
        E = self.cuts.num_experts
        if not 1 <= keep <= E:
            raise ValueError(f"keep must be from 1 to {E}, as layers have {E}, but got {keep}")
        self.cuts.check_separable(floats=True)
        check_layers(self.statistics, dict.fromkeys(self.cuts.layers, E), needed)

    def saved_blocks(self) -> dict[int, str]:
        """Return by layer the path of the module around its experts, as the folder names it."""
        blocks = {}
        for key, place in self.places.items():
            if place.expert is not None:
                blocks[place.layer] = place.prefix.removesuffix(".experts.")
            elif place.is_stack:
                blocks.setdefault(place.layer, key.partition(".experts.")[0])
        return blocks

    def pruned(self, kept: Kept) -> Tensors:
        """Yield the tensors of the model with the experts `kept`."""
        for key in self.checkpoint.keys():
            place = self.places.get(key)
            if place is not None and place.expert is not None:
                ids = kept[place.layer]
                if place.expert in ids:
                    name = f"{place.prefix}{ids.index(place.expert)}{place.suffix}"
                    yield name, self.checkpoint.get(key)
            elif place is not None and place.is_stack:
                yield key, self._rows_of_stack(key, kept[place.layer])
            else:
                yield from self.other(key, kept)
            self.read(key)

    def _rows_of_stack(self, key: str, ids: list[int]) -> Tensor:
        """Read experts of a stack, or of a part of a packed one, which may be flat."""
        shape = self.checkpoint.specs()[key].shape
        E = self.cuts.num_experts
        if shape[0] == E:
            return torch.stack([self.checkpoint.get_rows(key, e) for e in ids])
        each = shape[0] // E
        rows = [self.checkpoint.get_rows(key, slice(e * each, (e + 1) * each)) for e in ids]
        return torch.cat(rows)

    def other(self, key: str, kept: Kept) -> Tensors:
        """Yield a tensor outside of the experts, with the entries of those that are kept."""
        if key in self.left_out:
            return
        tensor = self.checkpoint.get(key)
        place = self.places.get(key)
        if place is not None:
            tensor = tensor.index_select(place.dim, torch.tensor(kept[place.layer]))
        yield key, tensor

    def merged(self, found: Mapping[int, list[Group]], align: bool) -> Tensors:
        """Yield the tensors of the model with the experts of each group merged."""
        for number, layer in found.items():
            yield from self._merged_layer(number, layer, align)
        leaders = {number: [g.members[0] for g in layer] for number, layer in found.items()}
        for key in self.checkpoint.keys():
            place = self.places.get(key)
            if place is None or not (place.is_stack or place.expert is not None):
                yield from self.other(key, leaders)
                self.read(key)

    def _merged_layer(self, number: int, layer: list[Group], align: bool) -> Tensors:
        """Yield a layer's merged experts; a stack once it is complete."""
        experts = LayerExperts(self.cuts, self.checkpoint, number)
        stacks: dict[str, list[Tensor]] = {}
        for e, group in enumerate(layer):
            for name, row in experts.joined(experts.merged(group, align)).items():
                for key, tensor, is_stacked in experts.converted(name, row, e):
                    if is_stacked:
                        stacks.setdefault(key, []).append(tensor)
                    else:
                        yield key, tensor
        for key, rows in stacks.items():
            yield key, torch.stack(rows)
        self.read(*(key for saved in experts.saved.values() for key in saved))

    def write(
        self,
        out: str | Path,
        tensors: Tensors,
        config: dict[str, Any],
        facts: dict[str, Any],
        *,
        max_shard_size: int | str,
        overwrite: bool,
        progress: Progress | None,
    ) -> ShrinkReceipt:
        """Write the tensors, config.json, the other files and the receipt."""
        if self.left_out:
            config = prediction.without(config)
        with CheckpointWriter(out, max_shard_size, overwrite=overwrite) as writer:
            writer.write_text("config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
            names = copy_side_files(self.cuts.path, writer)
            work = Conversion(self.checkpoint, writer, progress)
            self.read = work.read
            for key, tensor in tensors:
                work.add(key, tensor)
            about = {
                **facts,
                "source": self.cuts.path.name,
                "experts_before": self.cuts.num_experts,
                "parameters_before": _parameters(self.cuts.path),
                "parameters": _parameters(writer.place("config.json").parent),
                "bytes_before": work.total,
                "bytes": work.bytes,
                "calibration": {**self.statistics.facts, "tokens": self.statistics.tokens},
                "left_out": self.left_out,
            }
            if RECEIPT in names:
                about["before"] = read_json(self.cuts.path / RECEIPT)
            writer.write_text(RECEIPT, json.dumps(about, indent=1) + "\n")
        return ShrinkReceipt(
            path=Path(out),
            experts_before=self.cuts.num_experts,
            experts=facts["keep"],
            parameters_before=about["parameters_before"],
            parameters=about["parameters"],
            bytes_before=work.total,
            bytes=work.bytes,
            left_out=self.left_out,
            facts=about,
        )


def _parameters(folder: Path) -> int:
    """Return the number of parameters of the model that a folder's config.json describes."""
    return sum(parameter.numel() for parameter in skeleton(read_config(folder)).parameters())
