"""What a model's routers do: how the tokens' slots fall on the experts, layer by layer, and pictures of it.

    load           count_e / sum_e count_e                      share of the slots
    max violation  max_e count_e / mean_e count_e               1 when balanced
    entropy        -sum_e load_e log(load_e) / log(E)           1 when balanced, 0 when one expert takes all

The last two are over the routed experts: a shared one (gates xft, nonorm) sees every token and would only dilute them.
Counting costs one small integer scatter per layer on the device; nothing is read back before somebody asks.
"""

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe_runtime.modules.moe import Router, RouterOutput

FIELDS = ("layer", "expert", "shared", "slots", "load")
LOW_ENTROPY = 0.5
ENOUGH = 10  # balanced slots per expert below which an unused expert says nothing


def expert_load(counts: torch.Tensor) -> torch.Tensor:
    """Share of the slots per expert, `counts` [..., E] -> [..., E] float64; zeros where nothing was routed."""
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def dead_experts(counts: torch.Tensor) -> torch.Tensor:
    """Which experts got no slot, `counts` [..., E] -> [..., E] bool."""
    return counts == 0


def max_violation(counts: torch.Tensor) -> torch.Tensor:
    """Largest load over mean load, `counts` [..., E] -> [...] float64: 1 when balanced, E when one expert takes all."""
    E = counts.shape[-1]
    return expert_load(counts).amax(-1) * E if E else counts.new_ones(counts.shape[:-1], dtype=torch.float64)


def load_entropy(counts: torch.Tensor) -> torch.Tensor:
    """Entropy of the load over that of a balanced one, `counts` [..., E] -> [...] float64 from 0 to 1; 1 for E < 2."""
    E = counts.shape[-1]
    if E < 2:
        return counts.new_ones(counts.shape[:-1], dtype=torch.float64)
    return torch.special.entr(expert_load(counts)).sum(-1) / math.log(E)


@dataclass(frozen=True, eq=False)
class RouterStats:
    """Slots per layer and expert, and what follows from them."""

    counts: torch.Tensor  # [L, E] int64, on the CPU
    layers: tuple[str, ...]  # a layer's number, or its path where that is not unique
    num_shared: int = 0  # leading experts that see every token

    @property
    def routed(self) -> torch.Tensor:
        """Slots of the experts that the router chooses among, [L, E - num_shared]."""
        return self.counts[:, self.num_shared :]

    @property
    def load(self) -> torch.Tensor:
        """Share of a layer's slots per expert, the shared one counted, [L, E] float64."""
        return expert_load(self.counts)

    @property
    def dead(self) -> torch.Tensor:
        """Which experts got no slot, [L, E] bool."""
        return dead_experts(self.counts)

    @property
    def max_violation(self) -> torch.Tensor:
        """Largest over mean load of the routed experts, [L] float64."""
        return max_violation(self.routed)

    @property
    def entropy(self) -> torch.Tensor:
        """Normalised entropy of the routed experts' load, [L] float64."""
        return load_entropy(self.routed)

    def summary(self) -> dict[str, float]:
        """The worst layer in three numbers, however many layers there are."""
        return {
            "router/max_violation": self.max_violation.max().item(),
            "router/min_entropy": self.entropy.min().item(),
            "router/dead_experts": float(self.dead.sum().item()),
        }

    def per_layer(self) -> dict[str, float]:
        """The three numbers and each expert's load, for every layer."""
        values = {}
        for i, layer in enumerate(self.layers):
            values[f"router/{layer}/max_violation"] = self.max_violation[i].item()
            values[f"router/{layer}/entropy"] = self.entropy[i].item()
            values[f"router/{layer}/dead_experts"] = float(self.dead[i].sum().item())
            values |= {f"router/{layer}/load/{e}": share for e, share in enumerate(self.load[i].tolist())}
        return values

    def warning(self, min_entropy: float = LOW_ENTROPY) -> str | None:
        """Say which layers have dead experts or an entropy below `min_entropy`; None if none has.

        A layer with fewer than ENOUGH slots per routed expert is not judged.
        """
        found = []
        for i, layer in enumerate(self.layers):
            dead = self.dead[i].nonzero().flatten().tolist()
            if self.routed[i].sum() < ENOUGH * self.routed.shape[1] or not (dead or self.entropy[i] < min_entropy):
                continue
            unused = f"experts {', '.join(map(str, dead))} got no token, " if dead else ""
            numbers = f"entropy {self.entropy[i]:.2f}, max violation {self.max_violation[i]:.2f}"
            found.append(f"layer {layer}: {unused}{numbers}")
        cure = "; a balance loss (balance_loss, balance_loss_coef) spreads the load"
        return "routers collapse: " + "; ".join(found) + cure if found else None

    def rows(self) -> list[tuple]:
        """One row of FIELDS per layer and expert."""
        load, counts = self.load.tolist(), self.counts.tolist()
        return [
            (layer, e, int(e < self.num_shared), counts[i][e], load[i][e])
            for i, layer in enumerate(self.layers)
            for e in range(self.counts.shape[1])
        ]

    def to_csv(self, path: str | Path) -> None:
        """Write FIELDS, one line per layer and expert."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            writer.writerows(self.rows())

    def heatmap(self, ax_or_path=None):
        """Draw each routed expert's load over the mean, layers down; on an Axes, into a file by its suffix, or new.

        Returns the Axes. Raises ImportError without matplotlib.
        """
        figure_class = _matplotlib_figure()
        L, R = self.routed.shape
        is_path = isinstance(ax_or_path, (str, Path))
        if is_path or ax_or_path is None:
            # a Figure of its own, not pyplot's: no display and no global state
            ax = figure_class(figsize=(1.8 + 0.45 * R, 1.2 + 0.3 * L), layout="constrained").add_subplot()
        else:
            ax = ax_or_path
        relative = expert_load(self.routed) * R
        image = ax.imshow(relative.numpy(), aspect="auto", vmin=0, vmax=2, cmap="coolwarm")
        ax.figure.colorbar(image, ax=ax, label="load / mean load", extend="max")
        ax.set_xticks(range(R), range(self.num_shared, self.num_shared + R))
        ax.set_yticks(range(L), self.layers)
        ax.set(xlabel="expert", ylabel="layer", title="router load")
        if is_path:
            ax.figure.savefig(ax_or_path, dpi=150)
        return ax


def _matplotlib_figure() -> type:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"matplotlib cannot be imported ({error}); pip install 'moe-runtime[plot]'") from error
    return Figure


class RouterCounter:
    """Counts slots per expert while the model runs, on its device, without a sync; `read` gives the RouterStats.

    Only calls of `model` itself count, so recomputation under gradient checkpointing, which happens in backward, does
    not; with `only_training`, none in eval mode. Padding, by the call's attention_mask, is left out. `close` removes
    the hooks. Raises ValueError for a model without routers, or with routers of different sizes.
    """

    def __init__(self, model: nn.Module, only_training: bool = False):
        self.routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        if not self.routers:
            raise ValueError(f"model is {type(model).__name__}, without a router; want MoE layers; upcycle it first")
        shapes = {(r.config.num_experts, r.config.has_shared_expert) for r in self.routers.values()}
        if len(shapes) > 1:
            raise ValueError(f"the layers' (num_experts, shared) are {sorted(shapes)}; want the same in each")
        self.only_training = only_training
        self._open, self._mask = False, None
        self._counts = {name: self._zeros(router) for name, router in self.routers.items()}
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
            *(r.register_forward_hook(self._hook(name)) for name, r in self.routers.items()),
        ]

    @staticmethod
    def _zeros(router: Router) -> torch.Tensor:
        return torch.zeros(router.config.num_experts, dtype=torch.int64, device=router.weight.device)

    def _enter(self, module: nn.Module, args, kwargs) -> None:
        self._open = module.training or not self.only_training
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def _leave(self, *_) -> None:
        self._open, self._mask = False, None

    def _hook(self, name: str):
        def count(module: nn.Module, args, out: RouterOutput) -> None:
            if self._open:
                self._add(name, out.topk_idx)

        return count

    @torch.no_grad()
    def _add(self, name: str, topk_idx: torch.Tensor) -> None:
        T, K = topk_idx.shape
        weight = torch.ones(T, K, dtype=torch.int64, device=topk_idx.device)
        if self._mask is not None and T and T % self._mask.shape[0] == 0 and self._mask.numel() >= T:
            # with a cache the mask covers past tokens too, and the new ones come last
            new = self._mask[:, -(T // self._mask.shape[0]) :].reshape(T, 1)
            weight = weight * (new != 0).to(weight.device)
        self._counts[name] = self._counts[name].to(topk_idx.device)
        self._counts[name].scatter_add_(0, topk_idx.flatten().long(), weight.flatten())

    def read(self, reset: bool = False, reduce: bool = False) -> RouterStats:
        """Copy the counts to the CPU; `reduce` sums them over torch.distributed's processes, `reset` starts anew."""
        device = next(iter(self._counts.values())).device
        counts = torch.stack([count.to(device) for count in self._counts.values()])
        if reset:
            self._counts = {name: self._zeros(router) for name, router in self.routers.items()}
        if reduce and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        counts, names = counts.cpu(), list(self.routers)
        # an adapter keeps the original of a module that it trains a copy of, and never calls it
        called = [i for i in range(len(names)) if counts[i].any()] or list(range(len(names)))
        config = next(iter(self.routers.values())).config
        return RouterStats(counts[called], _layer_names([names[i] for i in called]), int(config.has_shared_expert))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _layer_names(names: list[str]) -> tuple[str, ...]:
    """Return the first number in each path if that tells them apart, else the paths without the router's own name."""
    numbers = [match[0] if (match := re.search(r"\d+", name)) else name for name in names]
    return tuple(numbers if len(set(numbers)) == len(names) else (name.rpartition(".")[0] or name for name in names))


@torch.no_grad()
def collect_router_stats(model: nn.Module, batches: Iterable[Mapping | torch.Tensor]) -> RouterStats:
    """Run `model` in eval mode over `batches`, each its keyword arguments or its one argument; return its RouterStats."""
    counter, modes = RouterCounter(model), [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
        return counter.read()
    finally:
        for module, training in modes:
            module.training = training
        counter.close()
