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

    GateRecorder    the sums, recorded while a model runs
    model_inputs    batches up to a number of tokens, in step with other processes, as the model's
                    keyword arguments
    group_routing   simulate coarser experts: the router chooses groups of experts (App. B, Fig. 7)
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_runtime.config import shown
from moe_runtime.hf.dropin.layers import (
    OpenCall,
    RoutedLayer,
    block_of,
    forget_compiled,
    ids_of,
    numbered_layers,
    token_mask,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class GateSums:
    """Slots and gate values per layer and expert, on the CPU; a leading shared expert has zeros."""

    layers: tuple[int, ...]
    count: torch.Tensor  # [L, E] int64
    gate: torch.Tensor  # [L, E] float64
    sample_count: torch.Tensor  # [L, E] float64
    sample_gate: torch.Tensor  # [L, E] float64
    n_tokens: int
    n_samples: int
    top_k: int  # slots per token that the router chooses for: without the shared expert's
    num_shared: int = 0
    pairs: torch.Tensor | None = None  # [L, E, E] int64: tokens that chose both


@dataclass(frozen=True, eq=False)
class GateCall:
    """One call of one layer: ids and weights as its experts see them."""

    layer: int
    topk_idx: torch.Tensor  # [T, K]
    topk_weight: torch.Tensor  # [T, K]
    live: torch.Tensor  # [samples, T / samples] bool; False for padding
    num_shared: int


class GateRecorder:
    """Sums slots and gate values during forward passes of `model`, on its devices, without a sync;
    `read` returns GateSums.

    Only calls of `model` itself count, not recomputation in backward. Padding, by the call's
    attention_mask, is left out; `only` [B, S] bool, if set, marks the tokens that count instead.
    `pairs` also counts how often two experts serve one token. `see` is called with each GateCall. A
    context manager; `close` removes the hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pairs: bool = False,
        see: Callable[[GateCall], None] | None = None,
    ):
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
        self._see = see
        self._samples = 1
        self._slots = {}
        forget_compiled()
        self._call = OpenCall(model)
        self._handles = [model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        self._state = {}
        for number, layer in self.layers.items():
            self._state[number] = self._zeros(layer, pairs)
            self._handles.append(_watch(layer, functools.partial(self._add, number)))

    def _zeros(self, layer: RoutedLayer, pairs: bool) -> list[torch.Tensor]:
        """A layer's sums [4, E] float64, its tokens and samples [2] int64, and with `pairs` those
        [E, E] float64.
        """
        device = next(itertools.chain(layer.module.parameters(), layer.module.buffers())).device
        if device.type == "meta":
            device = torch.device("cpu")
        E = self.num_experts
        # tensors made in inference mode could not be added to outside of it
        with torch.inference_mode(False):
            sums = torch.zeros(4, E, dtype=torch.float64, device=device)
            seen = torch.zeros(2, dtype=torch.int64, device=device)
            if not pairs:
                return [sums, seen]
            return [sums, seen, torch.zeros(E, E, dtype=torch.float64, device=device)]

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
        if self._see is not None:
            self._see(GateCall(number, topk_idx, topk_weight, by_row, self.num_shared))
        counted = (topk_idx >= self.num_shared) & (topk_idx < E) & live[:, None]
        # what does not count goes to a column of its own, which is then left out
        idx = topk_idx.long().masked_fill(~counted, E)
        table = torch.zeros(2, T, E + 1, device=idx.device)
        ones = torch.ones_like(idx, dtype=torch.float32)
        hot = table[0].scatter_add_(1, idx, ones)[:, :E]
        table[1].scatter_add_(1, idx, topk_weight.detach().float())
        by_sample = table[:, :, :E].view(2, B, T // B, E).sum(2, dtype=torch.float64)
        tokens = by_row.sum(1)
        means = by_sample / tokens.clamp(min=1)[:, None]
        if self._state[number][0].device != idx.device:  # the layer has moved
            with torch.inference_mode(False):
                self._state[number] = [tensor.to(idx.device) for tensor in self._state[number]]
        sums, seen, *pairs = self._state[number]
        sums += torch.cat([by_sample.sum(1), means.sum(1)])
        seen += torch.stack([tokens.sum(), (tokens > 0).sum()])
        if pairs:
            # sums of ones are exact in float32 up to 2^24 tokens; autocast would round them
            with torch.autocast(idx.device.type, enabled=False):
                pairs[0] += hot.T @ hot

    def read(self, *, reset: bool = False, reduce: bool = False) -> GateSums:
        """Copy the sums to the CPU; `reduce` adds those of torch.distributed's other processes,
        `reset` clears them.

        Layers that were never called are left out if others were: an adapter keeps the original of
        a module that it trains a copy of.
        """
        states = list(self._state.values())
        device = states[0][0].device
        tables = []  # of all layers: sums [L, 4, E], tokens and samples [L, 2], pairs [L, E, E]
        for parts in zip(*states, strict=True):
            tables.append(torch.stack([part.to(device) for part in parts]))
        slots = torch.tensor([self._slots.get(number, 0) for number in self.layers], device=device)
        if reset:
            for part in itertools.chain(*states):
                part.zero_()
        if reduce and world()[0] > 1:
            for table in tables:
                torch.distributed.all_reduce(table)
            torch.distributed.all_reduce(slots, torch.distributed.ReduceOp.MAX)
        is_called = (tables[1][:, 0] > 0).cpu()
        if not is_called.any():
            raise ValueError(
                "The model has routed no tokens. Call it at least once with tokens that are not "
                "padding"
            )
        sums, seen, *pairs = [table.cpu()[is_called] for table in tables]
        layers = [layer for layer, called in zip(self.layers, is_called, strict=True) if called]
        tokens, samples = seen.t().tolist()
        count, gate, sample_count, sample_gate = sums.unbind(1)
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
            pairs=pairs[0].long() if pairs else None,
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


# with the tokens that count, [B, S] bool; None for all
Batches = Iterator[tuple[dict[str, Any], torch.Tensor | None]]


def world() -> tuple[int, int]:
    """Return the number of processes and this one's rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return (torch.distributed.get_world_size(), torch.distributed.get_rank())
    return (1, 0)


def model_inputs(
    model: nn.Module, dataloader: Iterable[Mapping | torch.Tensor], n_tokens: int
) -> Batches:
    """Yield the model's inputs on its device, and a mask of the tokens that count, `n_tokens` in
    total.
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    known = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for batch, only in _in_step(model, _limited(dataloader, n_tokens)):
        inputs = {}
        for name, value in batch.items():
            # no loss is needed, and columns that the model does not accept would be errors
            if name != "labels" and (takes_all or name in known):
                inputs[name] = value.to(device) if isinstance(value, torch.Tensor) else value
        if "use_cache" in known:
            inputs["use_cache"] = False
        if "logits_to_keep" in known:
            inputs["logits_to_keep"] = 1
        yield inputs, only


def _limited(dataloader: Iterable[Mapping | torch.Tensor], n_tokens: int) -> Batches:
    """Yield batches until `n_tokens`; of the batch that exceeds it, the first tokens count."""
    left = n_tokens
    for batch in dataloader:
        batch = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        if not any(isinstance(value, torch.Tensor) for value in batch.values()):
            raise ValueError(
                "A batch must be input_ids [rows, tokens] or the model's arguments as tensors, "
                f"but got {shown(batch, 60)}. Tokenize the texts first"
            )
        mask = batch.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = torch.ones(_shape(batch), dtype=torch.bool)
        mask = mask != 0
        tokens = int(mask.sum())
        only = None
        if tokens > left:
            only = mask & (mask.flatten().cumsum(0) <= left).view(mask.shape)
        yield batch, only
        left -= tokens
        if left <= 0:
            return


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    name = "input_ids" if "input_ids" in batch else "inputs_embeds"
    return batch[name].shape[:2]


def _in_step(model: nn.Module, batches: Batches) -> Batches:
    """Yield `batches`; for sharded or synchronized models, all processes make the same number of
    calls.
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    is_sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if world()[0] == 1 or not (is_ddp or is_sharded):
        yield from batches
        return
    device = next(model.parameters()).device
    batch, only = next(batches, (None, None))
    if not _everywhere(batch is not None, device, torch.distributed.ReduceOp.MIN):
        raise ValueError(
            "A process has no batch, but every process needs data, as the model is distributed "
            "over all of them"
        )
    following = (batch, only)
    while _everywhere(following is not None, device, torch.distributed.ReduceOp.MAX):
        if following is None:
            # the others need this process's part of the weights, whose results do not count
            only = torch.zeros(_shape(batch), dtype=torch.bool)
        else:
            batch, only = following
        yield batch, only
        following = next(batches, None)


def _everywhere(value: bool, device: torch.device, by) -> bool:
    flag = torch.tensor(int(value), device=device)
    torch.distributed.all_reduce(flag, by)
    return bool(flag)


def group_routing(model: nn.Module, groups: Mapping[int, Sequence[Sequence[int]]]) -> list:
    """Make `model` route by `groups` of expert ids, layer -> groups; return the hooks' handles.

    For groups G of g experts, K experts per token and gates s = softmax(logits), the K / g groups
    with the highest s_G = mean_{e in G} s_e are chosen, each of their experts with the weight s_G:
    a token passes through as many experts as before. Supports routers like DeepSeek-V2's, which
    return logits [T, E], weights and ids [T, K], the weights being softmax(logits) times a
    constant.
    """
    handles = []
    for number, layer in numbered_layers(model).items():
        children = dict(block_of(model, layer).named_children())
        router = children.get("gate", children.get("router"))
        top_k = getattr(router, "top_k", None)
        E = layer.num_experts
        table = torch.tensor([list(group) for group in groups.get(number, ())])
        is_partition = table.flatten().sort().values.tolist() == list(range(E))
        is_known = isinstance(top_k, int) and not layer.num_shared
        if not is_partition or not is_known or top_k % table.shape[-1]:
            raise ValueError(
                f"groups of layer {number} have the shape {tuple(table.shape)}, num_experts is {E} "
                f"and top_k is {top_k}, but expected a router like DeepSeek-V2's, every expert in "
                "one group, and a group size that divides top_k"
            )
        handles.append(router.register_forward_hook(functools.partial(_regroup, table, [])))
    return handles


def _regroup(table: torch.Tensor, seen: list, router: nn.Module, args, out):
    """A hook of a router: return the weights and ids of whole groups, [T, K] as before."""
    is_known = isinstance(out, tuple) and len(out) == 3
    if is_known:
        logits, weights, ids = out
        table = table.to(logits.device)
        gates = logits.float().softmax(-1)
        scale = getattr(router, "routed_scaling_factor", 1.0)
        # compared in the first call only, since reading the result waits for the device
        is_known = bool(seen) or torch.allclose(
            gates.gather(1, ids.long()) * scale, weights.float(), rtol=1e-3, atol=1e-6
        )
    if not is_known:
        raise ValueError(
            f"{type(router).__name__} does not return logits, ids and weights that are the logits' "
            "softmax, as required: use a router like DeepSeek-V2's"
        )
    seen[:] = [True]
    size = table.shape[1]
    best, chosen = gates[:, table].mean(-1).topk(ids.shape[1] // size, dim=-1)
    weights = (best * scale).repeat_interleave(size, 1).to(weights.dtype)
    return logits, weights, table[chosen].flatten(1).to(ids.dtype)
