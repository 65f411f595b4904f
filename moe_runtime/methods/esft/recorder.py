"""Record slots and gate values per layer and expert while a model runs: the input of ESFT's scores.

ESFT (arXiv 2407.01906), Eq. (1), summed over all tokens t that are not padding and over samples s,
the rows of batches:

    count_e = sum_t 1[e in topk_idx[t]]
    gate_e  = sum_t g_{e,t}
    sample_count_e = sum_s (1 / |s|) sum_{t in s} 1[e in topk_idx[t]]
    sample_gate_e  = sum_s (1 / |s|) sum_{t in s} g_{e,t}

g_{e,t} is the weight that the router hands to the experts, however it is normalized, and 0 where e
is not among the top K. Sums are float64 on the layer's device, in an order that repeats; nothing is
read back before `read`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import (
    OpenCall,
    RoutedLayer,
    forget_compiled,
    ids_of,
    numbered_layers,
    token_mask,
)
from moe_runtime.hf.training.calibration import world


@dataclass(frozen=True, eq=False, kw_only=True)
class GateSums:
    """Sums over the tokens of a sample, from which every variant of the scores follows; on the CPU.

    Attributes:
        layers: Numbers of the model's MoE layers, L of them.
        count: [L, E] int64, tokens that selected an expert.
        gate: [L, E] float64, sum of the router's weights.
        sample_count: [L, E] float64, sum of the samples' mean counts.
        sample_gate: [L, E] float64, sum of the samples' mean weights.
        n_tokens: Number of tokens.
        n_samples: Number of samples.
        top_k: Experts per token that the router selects, without a shared one.
        num_shared: Number of leading experts that every token passes through; their sums are 0.
    """

    layers: tuple[int, ...]
    count: torch.Tensor  # [L, E] int64
    gate: torch.Tensor  # [L, E] float64
    sample_count: torch.Tensor  # [L, E] float64
    sample_gate: torch.Tensor  # [L, E] float64
    n_tokens: int
    n_samples: int
    top_k: int  # slots per token that the router chooses for: without the shared expert's
    num_shared: int = 0


class GateRecorder:
    """Sums slots and gate values during forward passes of `model`, on its devices, without a sync;
    `read` returns GateSums.

    Only calls of `model` itself count, not recomputation in backward. Padding, by the call's
    attention_mask, is left out; `only` [B, S] bool, if set, marks the tokens that count instead. A
    context manager; `close` removes the hooks.
    """

    def __init__(self, model: nn.Module):
        self.layers = dict(sorted(numbered_layers(model).items()))
        for layer in self.layers.values():
            if getattr(layer.module, "_is_expert_parallel", False):
                raise ValueError(
                    f"{layer.name} holds only a part of its experts. Use "
                    "moe_runtime.hf.dropin.parallel, or the whole layer"
                )
        experts = [layer.num_experts for layer in self.layers.values()]
        shared = [layer.num_shared for layer in self.layers.values()]
        self.num_experts = _common("num_experts", self.layers, experts)
        self.num_shared = _common("num_shared", self.layers, shared)
        self.only: torch.Tensor | None = None
        self._samples = 1
        self._slots = {}
        forget_compiled()
        self._call = OpenCall(model)
        self._handles = [model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        self._state = {}
        for number, layer in self.layers.items():
            self._state[number] = self._zeros(layer)
            self._handles.append(_watch(layer, functools.partial(self._add, number)))

    def _zeros(self, layer: RoutedLayer) -> list[torch.Tensor]:
        """Return a layer's sums [4, E] float64, and its tokens and samples [2] int64."""
        device = next(itertools.chain(layer.module.parameters(), layer.module.buffers())).device
        if device.type == "meta":
            device = torch.device("cpu")
        # tensors made in inference mode could not be added to outside of it
        with torch.inference_mode(False):
            sums = torch.zeros(4, self.num_experts, dtype=torch.float64, device=device)
            return [sums, torch.zeros(2, dtype=torch.int64, device=device)]

    def _enter(self, module: nn.Module, args, kwargs) -> None:
        named = self._call.named(args, kwargs)
        self._samples = 1
        for name in ("inputs_embeds", "input_ids"):
            tensor = named.get(name)
            if isinstance(tensor, torch.Tensor):
                self._samples = tensor.shape[0] if tensor.dim() > 1 else 1

    @torch.no_grad()
    def _add(self, number: int, topk_idx: torch.Tensor, topk_weight: torch.Tensor) -> None:
        if not self._call.is_open:
            return
        T = topk_idx.shape[0]
        E = self.num_experts
        B = self._samples if self._samples and T % self._samples == 0 else 1
        self._slots[number] = topk_idx.shape[1] - self.num_shared
        live = token_mask(self._call.mask if self.only is None else self.only, T)
        if live is None:
            live = torch.ones(T, dtype=torch.bool)
        live = live.to(topk_idx.device)
        by_row = live.view(B, T // B)
        counted = (topk_idx >= self.num_shared) & (topk_idx < E) & live[:, None]
        # what does not count goes to a column of its own, which is then left out
        idx = topk_idx.long().masked_fill(~counted, E)
        table = torch.zeros(2, T, E + 1, device=idx.device)
        ones = torch.ones_like(idx, dtype=torch.float32)
        table[0].scatter_add_(1, idx, ones)
        table[1].scatter_add_(1, idx, topk_weight.detach().float())
        by_sample = table[:, :, :E].view(2, B, T // B, E).sum(2, dtype=torch.float64)
        tokens = by_row.sum(1)
        means = by_sample / tokens.clamp(min=1)[:, None]
        if self._state[number][0].device != idx.device:  # the layer has moved
            with torch.inference_mode(False):
                self._state[number] = [tensor.to(idx.device) for tensor in self._state[number]]
        sums, seen = self._state[number]
        sums += torch.cat([by_sample.sum(1), means.sum(1)])
        seen += torch.stack([tokens.sum(), (tokens > 0).sum()])

    def read(self, *, reduce: bool = False) -> GateSums:
        """Copy the sums to the CPU; `reduce` adds those of torch.distributed's other processes.

        Layers that were never called are left out if others were: an adapter keeps the original of
        a module that it trains a copy of.
        """
        device = next(iter(self._state.values()))[0].device
        sums = torch.stack([sums.to(device) for sums, _ in self._state.values()])  # [L, 4, E]
        seen = torch.stack([seen.to(device) for _, seen in self._state.values()])  # [L, 2]
        slots = torch.tensor([self._slots.get(number, 0) for number in self.layers], device=device)
        if reduce and world()[0] > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(seen)
            torch.distributed.all_reduce(slots, torch.distributed.ReduceOp.MAX)
        is_called = (seen[:, 0] > 0).cpu()
        if not is_called.any():
            raise ValueError(
                "The model has routed no tokens. Call it at least once with tokens that are not "
                "padding"
            )
        layers = [layer for layer, called in zip(self.layers, is_called, strict=True) if called]
        tokens, samples = seen.cpu()[is_called].t().tolist()
        count, gate, sample_count, sample_gate = sums.cpu()[is_called].unbind(1)
        return GateSums(
            layers=tuple(layers),
            count=count.long(),
            gate=gate.clone(),
            sample_count=sample_count.clone(),
            sample_gate=sample_gate.clone(),
            n_tokens=_common("tokens", layers, tokens),
            n_samples=samples[0],
            top_k=_common("top_k", layers, slots.cpu()[is_called].tolist()),
            num_shared=self.num_shared,
        )

    def close(self) -> None:
        """Remove the hooks."""
        self._call.close()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "GateRecorder":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _common(what: str, layers: Iterable[int], values: Sequence[int]) -> int:
    """Return the value that all layers have."""
    layers = list(layers)
    for layer, value in zip(layers, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"{what} must be the same in all layers, but is {values[0]} in layer {layers[0]} "
                f"and {value} in layer {layer}"
            )
    return values[0]


def _watch(layer: RoutedLayer, see: Callable[[torch.Tensor, torch.Tensor], None]):
    """Call `see` with the ids and weights [T, K] of each call of the layer; return the hook's
    handle.
    """
    if layer.is_stock:
        return layer.module.register_forward_pre_hook(
            functools.partial(_before_experts, see), with_kwargs=True
        )
    return layer.module.register_forward_hook(functools.partial(_after_router, see))


# functions of the module, not lambdas: a model is pickled and copied with its hooks
def _before_experts(see, module, args, kwargs) -> None:
    idx = ids_of(args, kwargs)
    weight = args[2] if len(args) > 2 else kwargs["top_k_weights"]
    see(idx, weight.reshape(idx.shape))


def _after_router(see, module, args, out) -> None:
    see(out.topk_idx, out.topk_weight)
