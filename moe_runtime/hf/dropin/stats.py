"""Router statistics: the distribution of tokens over experts, by layer, and plots.

load           count_e / sum_e count_e                      share of the slots
max violation  max_e count_e / mean_e count_e               1 when balanced
entropy        -sum_e load_e log(load_e) / log(E)           1 when balanced, 0 for a single expert

Max violation and entropy are over the routed experts: a shared one (gates xft, nonorm) sees every
token. Supported are our own layers and stock ones behind transformers' experts interface. If
experts_implementation is "moe_runtime" and the call has no attention mask, the dispatch's own
counts are used; otherwise counting costs one small scatter per layer, without a sync.
"""

import csv
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.experts import NAME
from moe_runtime.hf.dropin.layers import (
    OpenCall,
    RoutedLayer,
    forget_compiled,
    plain_name,
    routed_layers,
    token_mask,
)
from moe_runtime.io.files import atomic_file
from moe_runtime.io.rows import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIELDS = ("layer", "expert", "shared", "slots", "load")
LOW_ENTROPY = 0.5
ENOUGH = 10  # minimum slots per expert, if balanced, to judge a layer


def expert_load(counts: Tensor) -> Tensor:
    """Return each expert's share of the slots.

    Args:
        counts: [..., E].

    Returns:
        [..., E] float64; zeros if nothing was routed.
    """
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def dead_experts(counts: Tensor) -> Tensor:
    """Return which experts received no slot.

    Args:
        counts: [..., E].

    Returns:
        [..., E] bool.
    """
    return counts == 0


def max_violation(counts: Tensor) -> Tensor:
    """Return the largest load divided by the mean load: 1 if balanced, E if one expert has all.

    Args:
        counts: [..., E].

    Returns:
        [...] float64.
    """
    E = counts.shape[-1]
    if E:
        return expert_load(counts).amax(-1) * E
    return counts.new_ones(counts.shape[:-1], dtype=torch.float64)


def load_entropy(counts: Tensor) -> Tensor:
    """Return the entropy of the load divided by log E: 1 if balanced, 0 if one expert has all.

    Args:
        counts: [..., E].

    Returns:
        [...] float64; 1 for E below 2.
    """
    E = counts.shape[-1]
    if E < 2:
        return counts.new_ones(counts.shape[:-1], dtype=torch.float64)
    return torch.special.entr(expert_load(counts)).sum(-1) / math.log(E)


@dataclass(frozen=True, eq=False)
class RouterStats:
    """Slots per layer and expert, with derived statistics.

    Attributes:
        counts: [L, E], slots of each expert; layers may have different numbers of experts.
        layers: Names of the layers.
        num_shared: Leading experts that every token passes through, of all layers or of each.
        num_experts: Number of experts of each layer; None if all have E.
    """

    # [L, E] int64, on the CPU; E is the largest layer's, zeros beyond a smaller one's
    counts: Tensor
    layers: tuple[str, ...]  # a layer's number, or its path if that is not unique
    # leading experts that see every token; a tuple if layers differ
    num_shared: int | tuple[int, ...] = 0
    num_experts: tuple[int, ...] | None = None  # per layer; None if all have E

    def _experts(self, layer: int) -> range:
        """Return the ids of a layer's experts, without shared ones, which come first."""
        start = self.num_shared
        if isinstance(start, tuple):
            start = start[layer]
        if self.num_experts is None:
            return range(start, self.counts.shape[1])
        return range(start, self.num_experts[layer])

    @property
    def routed(self) -> tuple[Tensor, ...]:
        """Return the slots of the routed experts, one [R] per layer."""
        rows = []
        for i, row in enumerate(self.counts):
            experts = self._experts(i)
            rows.append(row[experts.start : experts.stop])
        return tuple(rows)

    @property
    def load(self) -> Tensor:
        """Return each expert's share of its layer's slots, including shared experts, [L, E]
        float64.
        """
        return expert_load(self.counts)

    @property
    def dead(self) -> Tensor:
        """Return which experts received no slot, [L, E] bool; False for experts a layer does not
        have.
        """
        dead = dead_experts(self.counts)
        for i, row in enumerate(dead):
            row[self._experts(i).stop :] = False
        return dead

    @property
    def max_violation(self) -> Tensor:
        """Return the routed experts' largest over mean load, [L] float64."""
        return torch.stack(tuple(map(max_violation, self.routed)))

    @property
    def entropy(self) -> Tensor:
        """Return the normalised entropy of the routed experts' load, [L] float64."""
        return torch.stack(tuple(map(load_entropy, self.routed)))

    def summary(self) -> dict[str, float]:
        """Return three numbers of the worst layer; NaN, NaN and 0 if nothing was routed.

        A layer without slots was not called, and is left out.
        """
        called = self.counts.any(1)
        violation = self.max_violation[called].tolist()
        entropy = self.entropy[called].tolist()
        return {
            "router/max_violation": max(violation, default=math.nan),
            "router/min_entropy": min(entropy, default=math.nan),
            "router/dead_experts": float(self.dead[called].sum().item()),
        }

    def per_layer(self) -> dict[str, float]:
        """Return the three numbers and each expert's load, for every layer."""
        values = {}
        load = self.load.tolist()
        violations = self.max_violation.tolist()
        entropies = self.entropy.tolist()
        dead = self.dead.sum(1).tolist()
        for i, layer in enumerate(self.layers):
            values[f"router/{layer}/max_violation"] = violations[i]
            values[f"router/{layer}/entropy"] = entropies[i]
            values[f"router/{layer}/dead_experts"] = float(dead[i])
            for e in range(self._experts(i).stop):
                values[f"router/{layer}/load/{e}"] = load[i][e]
        return values

    def warning(self, min_entropy: float = LOW_ENTROPY) -> str | None:
        """Describe layers with dead experts or an entropy below `min_entropy`; None if there are
        none.

        A layer with fewer than ENOUGH slots per routed expert is not judged.
        """
        collapsed = []
        for i, row in enumerate(self.routed):
            entropy = self.entropy[i]
            unused = self.dead[i].nonzero().flatten().tolist()
            if row.sum() < ENOUGH * len(row):
                continue
            if not unused and entropy >= min_entropy:
                continue
            text = f"entropy {entropy:.2f}, max violation {self.max_violation[i]:.2f}"
            if unused:
                text = f"experts {', '.join(map(str, unused))} got no token, {text}"
            collapsed.append(f"layer {self.layers[i]}: {text}")
        if not collapsed:
            return None
        return (
            f"routers collapse: {'; '.join(collapsed)}. Add a balance loss (balance_loss, "
            "balance_loss_coef)"
        )

    def rows(self) -> list[tuple]:
        """Return one row of FIELDS per layer and expert."""
        load = self.load.tolist()
        counts = self.counts.tolist()
        rows = []
        for i, layer in enumerate(self.layers):
            routed = self._experts(i)
            for e in range(routed.stop):
                is_shared = int(e not in routed)
                rows.append((layer, e, is_shared, counts[i][e], load[i][e]))
        return rows

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV of FIELDS with one line per layer and expert."""
        with atomic_file(path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            writer.writerows(self.rows())

    def heatmap(self, ax_or_path: "Axes | StrPath") -> "Axes":
        """Plot each routed expert's load over the mean, with layers as rows, on an Axes or to a
        file.

        Returns the Axes. Raises ImportError without matplotlib.
        """
        ids = list(map(self._experts, range(len(self.layers))))
        first = min(r.start for r in ids)
        stop = self.counts.shape[1]
        L = len(ids)
        is_path = isinstance(ax_or_path, (str, Path))
        ax = ax_or_path
        if is_path:
            # created without pyplot, hence without a display or global state
            size = (1.8 + 0.45 * (stop - first), 1.2 + 0.3 * L)
            figure = require("matplotlib.figure", "plot").Figure(size, layout="constrained")
            ax = figure.add_subplot()
        relative = torch.full((L, stop), math.nan, dtype=torch.float64)
        for experts, row, values in zip(ids, self.routed, relative, strict=True):
            values[experts.start : experts.stop] = expert_load(row) * len(row)
        relative = relative[:, first:].numpy()
        # blue and red: seen without green, too
        image = ax.imshow(relative, aspect="auto", vmin=0, vmax=2, cmap="coolwarm")
        ax.figure.colorbar(image, ax=ax, label="load / mean load", extend="max")
        step = 1 + (stop - first - 1) // 32
        ax.set_xticks(range(0, stop - first, step), range(first, stop, step))
        ax.set_yticks(range(L), self.layers)
        ax.set(xlabel="expert", ylabel="layer", title="router load")
        if is_path:
            with atomic_file(ax_or_path) as beside:
                ax.figure.savefig(beside, dpi=150)
        return ax


class RouterCounter:
    """Counts slots per expert during forward passes, on the device and without a sync.

    `read` returns the counts as RouterStats; `close` removes the hooks. Only calls of the model
    itself count, so recomputation under gradient checkpointing, which happens in backward, does
    not. Padding, by the call's attention_mask, is left out, and so are ids outside 0..E-1, the
    sentinels of expert parallelism. Compiled code is compiled again with counting
    (torch.compiler.reset, for the whole process).

    Args:
        model: A stock MoE model or one of ours.
        only_training: Whether to count in training mode only.

    Raises:
        ValueError: For a model without routers.
    """

    def __init__(self, model: nn.Module, only_training: bool = False):
        self.layers = routed_layers(model)
        self.only_training = only_training
        forget_compiled()
        self._counts = {name: _zeros(layer) for name, layer in self.layers.items()}
        self._direct: dict[str, nn.Module] = {}  # layers whose dispatch counts in this call
        self._call = OpenCall(model, self._enter, self._leave)
        self._handles = []
        for name, layer in self.layers.items():
            see = functools.partial(self._see, name)
            self._handles.append(layer.watch(see))

    def _enter(self, module: nn.Module) -> bool:
        is_open = module.training or not self.only_training
        if is_open and self._call.mask is None:
            for name, layer in self.layers.items():
                if _counts_itself(layer):
                    self._move(name, next(layer.module.parameters()).device)
                    layer.module.moe_runtime_counts = self._counts[name]
                    self._direct[name] = layer.module
        return is_open

    def _leave(self) -> None:
        for module in self._direct.values():
            del module.moe_runtime_counts
        self._direct.clear()

    def _move(self, name: str, device: torch.device) -> None:
        """Move the counts to the current device of their layer."""
        if self._counts[name].device != device:
            # a tensor made in inference mode could not be added to outside of it
            with torch.inference_mode(False):
                self._counts[name] = self._counts[name].to(device)

    def _see(self, name: str, topk_idx: Tensor) -> None:
        if self._call.is_open and name not in self._direct:
            self._add(name, topk_idx)

    @torch.no_grad()
    def _add(self, name: str, topk_idx: Tensor) -> None:
        E = self.layers[name].num_experts
        live = (topk_idx >= 0) & (topk_idx < E)
        mask = token_mask(self._call.mask, topk_idx.shape[0])
        if mask is not None:
            live = live & mask.to(live.device)[:, None]
        self._move(name, live.device)
        self._counts[name].scatter_add_(
            0, topk_idx.clamp(0, E - 1).long().flatten(), live.long().flatten()
        )

    def read(self, reset: bool = False, reduce: bool = False) -> RouterStats:
        """Copy the counts to the CPU; `reduce` sums them over torch.distributed's processes,
        `reset` sets them to 0.
        """
        counts = list(self._counts.values())
        counts = pad_sequence([count.to(counts[0].device) for count in counts], batch_first=True)
        if reset:
            for count in self._counts.values():
                count.zero_()
        if reduce and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        counts = counts.cpu()
        layers = list(self.layers.values())
        # skip uncalled layers: an adapter that trains a copy of a module keeps the original
        called = counts.any(1)
        if called.any():
            counts = counts[called]
            layers = list(itertools.compress(layers, called))
        shared = tuple(layer.num_shared for layer in layers)
        sizes = tuple(layer.num_experts for layer in layers)
        return RouterStats(
            counts[:, : max(sizes)],
            layer_names([plain_name(layer.name) for layer in layers]),
            num_shared=shared if len(set(shared)) > 1 else shared[0],
            num_experts=sizes if len(set(sizes)) > 1 else None,
        )

    def close(self) -> None:
        """Remove the hooks."""
        self._call.close()
        for handle in self._handles:
            handle.remove()


def _zeros(layer: RoutedLayer) -> Tensor:
    device = next(layer.module.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu")
    with torch.inference_mode(False):
        return torch.zeros(layer.num_experts, dtype=torch.int64, device=device)


def _counts_itself(layer: RoutedLayer) -> bool:
    """Return whether the layer's own dispatch can add to our counts, which must be on its
    device.
    """
    if not layer.is_stock or getattr(layer.module.config, "_experts_implementation", None) != NAME:
        return False
    device = next(layer.module.parameters()).device.type
    # with a GPU, weights on the CPU may be offloaded; and a module has room for only one counter
    is_home = device != "meta" and (device != "cpu" or not torch.cuda.is_available())
    return is_home and not hasattr(layer.module, "moe_runtime_counts")


def layer_names(names: list[str]) -> tuple[str, ...]:
    """Return the first number in each path if that tells them apart, else the paths without the
    router's own name.
    """
    numbers = []
    for name in names:
        digits = re.search(r"\d+", name)
        numbers.append(name if digits is None else digits[0])
    if len(set(numbers)) == len(names):
        return tuple(numbers)
    return tuple(name.rpartition(".")[0] or name for name in names)


@torch.no_grad()
def collect_router_stats(model: nn.Module, batches: Iterable[Mapping | Tensor]) -> RouterStats:
    """Run a model in eval mode and count where its routers send the tokens.

    Args:
        model: A stock MoE model or one of ours.
        batches: The model's keyword arguments, or its first argument.

    Returns:
        The counts of every layer, with statistics.
    """
    counter = RouterCounter(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
        return counter.read()
    finally:
        for module, training in modes:
            module.training = training
        counter.close()
