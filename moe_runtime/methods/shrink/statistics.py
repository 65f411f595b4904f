"""What shrinking needs to know about a model's experts, from one pass over text.

For expert e of a layer, over the tokens t that are not padding: l_{e,t} is the router's logit,
p_{e,t} = softmax_e(l_t), g_{e,t} the weight that the router hands to the experts, 0 outside of the
token's top K, and f_e(x_t) the expert's output.

    count        [E]     sum_t 1[e in top K of t]
    gate         [E]     sum_t g_{e,t}
    gate_norm    [E]     sum_t g_{e,t} / (sum_j g_{j,t}) |f_e(x_t)|
    probability  [E]     sum_t p_{e,t} 1[e in top K of t], if the router's logits can be read

With `outputs`, every expert is run on every token, which costs E / K times the layer:

    seen         []      the number of tokens
    norm         [E]     sum_t |f_e(x_t)|^2
    output       [E, H]  sum_t f_e(x_t)
    gated        [E, H]  sum_t p_{e,t} f_e(x_t)
    products     [E, E]  sum_t <f_i(x_t), f_j(x_t)>
    logits       [E, E]  sum_t l_{i,t} l_{j,t}

Sums are float64. Outputs come from the layer's own experts, called with one expert per row, so any
family, packed experts and experts on several ranks are supported.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moe_runtime.hf.dropin.balance import logits_of, routers_of
from moe_runtime.hf.dropin.layers import (
    OpenCall,
    RoutedLayer,
    forget_compiled,
    ids_of,
    numbered_layers,
    token_mask,
)
from moe_runtime.hf.training.calibration import world
from moe_runtime.io.checkpoint import write_tensors
from moe_runtime.io.files import atomic_file

CHUNK = 2**24  # numbers of all experts' outputs that are held at a time


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """The sums of a calibration pass.

    Attributes:
        layers: By layer number: name of a sum -> tensor, float64 on the CPU.
        tokens: The tokens that were counted.
        top_k: Experts per token.
        facts: What was read and which model was run; JSON-ready.
    """

    layers: Mapping[int, Mapping[str, Tensor]]
    tokens: int
    top_k: int
    facts: Mapping[str, Any]

    def save(self, path: str | Path, **more: Any) -> None:
        """Write one safetensors file, atomically; `more` is added to its facts."""
        tensors = {}
        for number, sums in self.layers.items():
            for name, tensor in sums.items():
                tensors[f"{number}.{name}"] = tensor.contiguous()
        about = {"tokens": self.tokens, "top_k": self.top_k, "facts": {**self.facts, **more}}
        with atomic_file(path) as beside:
            write_tensors(Path(beside), tensors, {"statistics": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> "ExpertStatistics":
        """Read a file that `save` wrote.

        Raises:
            ValueError: It is none; the message names the file.
        """
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})["statistics"])
                layers: dict[int, dict[str, Tensor]] = {}
                for key in file.keys():
                    number, name = key.split(".")
                    layers.setdefault(int(number), {})[name] = file.get_tensor(key)
            return cls(layers, about["tokens"], about["top_k"], about["facts"])
        except Exception as error:
            raise ValueError(
                f"{path} is not a file of expert statistics ({error!r}). Write one with "
                "moe-runtime shrink score"
            ) from error


class StatisticsRecorder:
    """Sums the statistics while `model` runs; a context manager that removes its hooks.

    Only calls of `model` itself count. Padding, by the call's attention_mask, is left out; `only`
    [B, S] bool, if set, marks the tokens that count instead.

    Args:
        model: A stock MoE model.
        outputs: Whether to run every expert on every token.

    Raises:
        ValueError: The model has no stock MoE layers, or `outputs` is not possible for one.
    """

    def __init__(self, model: nn.Module, outputs: bool = False):
        self.layers = dict(sorted(numbered_layers(model).items()))
        for layer in self.layers.values():
            _check(layer, outputs)
        self.outputs = outputs
        self.only: Tensor | None = None
        self.tokens = 0
        self.top_k = 0
        self._logits: dict[int, Tensor] = {}
        self._sums: dict[int, dict[str, Tensor]] = {number: {} for number in self.layers}
        forget_compiled()
        self._call = OpenCall(model)
        self._handles = []
        for number, layer in self.layers.items():
            see = functools.partial(self._see, number)
            self._handles.append(layer.module.register_forward_pre_hook(see, with_kwargs=True))
            routers = routers_of(model, [layer])
            if outputs and not routers:
                raise ValueError(
                    f"{layer.name} has no router whose logits can be read, so its experts can only "
                    "be pruned by frequency or reap"
                )
            for router, pick in routers[:1]:
                catch = functools.partial(self._catch, number, pick)
                self._handles.append(router.register_forward_hook(catch))

    def _catch(self, number: int, pick, module, args, out) -> None:
        if self._call.is_open:
            self._logits[number] = logits_of(pick, out).float()

    @torch.no_grad()
    def _see(self, number: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._call.is_open:
            return
        x = args[0] if args else kwargs["hidden_states"]
        idx = ids_of(args, kwargs)
        weight = args[2] if len(args) > 2 else kwargs["top_k_weights"]
        x = x.reshape(-1, x.shape[-1])
        live = token_mask(self._call.mask if self.only is None else self.only, len(x))
        if live is None:
            live = torch.ones(len(x), dtype=torch.bool)
        live = live.to(x.device)
        if number == next(iter(self.layers)):
            self.tokens += int(live.sum())
            self.top_k = idx.shape[1]
        logits = None
        if number in self._logits:
            logits = self._logits.pop(number)[:, : module.num_experts].to(x.device)
        found = _routed(module, x, idx, weight.reshape(idx.shape).float(), live, logits)
        if self.outputs:
            found |= _outputs(module, x[live], logits[live])
        sums = self._sums[number]
        for name, tensor in found.items():
            sums[name] = sums[name].to(tensor.device) + tensor if name in sums else tensor

    def add(self, before: ExpertStatistics) -> None:
        """Add the sums of an earlier part of the same pass."""
        self.tokens += before.tokens
        self.top_k = before.top_k
        for number, sums in before.layers.items():
            mine = self._sums[number]
            for name, tensor in sums.items():
                mine[name] = mine[name].cpu() + tensor if name in mine else tensor

    def read(self, facts: Mapping[str, Any], *, reduce: bool = False) -> ExpertStatistics:
        """Return the sums so far; `reduce` adds those of torch.distributed's other processes."""
        layers = {}
        reduce = reduce and world()[0] > 1
        device = next(next(iter(self.layers.values())).module.parameters()).device
        tokens = torch.tensor(self.tokens)
        if reduce:
            tokens = _summed(tokens, device)
        for number, sums in self._sums.items():
            layers[number] = {}
            for name, tensor in sums.items():
                if reduce:
                    tensor = _summed(tensor, device)
                layers[number][name] = tensor.cpu()
        return ExpertStatistics(layers, int(tokens), self.top_k, facts)

    def __enter__(self) -> "StatisticsRecorder":
        return self

    def __exit__(self, *error: object) -> None:
        self._call.close()
        for handle in self._handles:
            handle.remove()


def _check(layer: RoutedLayer, outputs: bool) -> None:
    """Raise ValueError for a layer whose experts cannot be observed."""
    if not layer.is_stock:
        raise ValueError(
            f"{layer.name} is an upcycled layer of moe_runtime. Export the model first: "
            "moe-runtime xft export MODEL OUT --to mixtral"
        )
    if getattr(layer.module, "_is_expert_parallel", False):
        raise ValueError(
            f"{layer.name} holds only a part of its experts. Use moe_runtime.hf.dropin.parallel, "
            "or the whole layer"
        )
    if outputs and world()[0] > 1:
        raise ValueError(
            "Every expert can be run on every token in one process only, but there are "
            f"{world()[0]}. Leave out the outputs"
        )


def _summed(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the sum over all processes."""
    tensor = tensor.to(device)
    torch.distributed.all_reduce(tensor)
    return tensor


def _routed(
    module: nn.Module, x: Tensor, idx: Tensor, weight: Tensor, live: Tensor, logits: Tensor | None
) -> dict[str, Tensor]:
    """Return the sums of every pass over the tokens `live` of x [T, H], with ids and weights [T, K]
    and, if they can be read, the router's logits [T, E].
    """
    E = module.num_experts
    T, K = idx.shape
    ones = torch.ones(T * K, 1, dtype=weight.dtype, device=x.device)
    rows = x.repeat_interleave(K, 0)
    # one expert per row, in full: [T * K, H]
    outputs = module.forward(rows, idx.reshape(-1, 1), ones)
    norm = outputs.float().norm(dim=-1).view(T, K)
    counted = (idx >= 0) & (idx < E) & live[:, None]
    weight = weight.masked_fill(~counted, 0)
    share = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    ids = idx.long().clamp(0, E - 1).flatten()
    values = {"count": counted, "gate": weight, "gate_norm": share * norm * counted}
    if logits is not None:
        values["probability"] = logits.softmax(-1).gather(1, ids.view(T, K)) * counted
    sums = {}
    for name, value in values.items():
        total = torch.zeros(E, dtype=torch.float64, device=x.device)
        sums[name] = total.index_add_(0, ids, value.double().flatten())
    return sums


def _outputs(module: nn.Module, x: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """Return the sums of `outputs` over all tokens of x [T, H] with the router's logits [T, E]."""
    E = module.num_experts
    H = x.shape[1]
    shapes = {"norm": (E,), "output": (E, H), "gated": (E, H), "products": (E, E)}
    sums = {}
    for name, shape in shapes.items():
        sums[name] = torch.zeros(shape, dtype=torch.float64, device=x.device)
    sums["seen"] = x.new_tensor(len(x), dtype=torch.float64)
    sums["logits"] = logits.double().t() @ logits.double()
    size = max(1, CHUNK // (E * H))
    for part, scores in zip(x.split(size), logits.split(size), strict=True):
        n = len(part)
        ids = torch.arange(E, device=x.device).repeat(n)[:, None]
        ones = torch.ones(n * E, 1, dtype=torch.float32, device=x.device)
        f = module.forward(part.repeat_interleave(E, 0), ids, ones).float().view(n, E, H)
        gates = scores.softmax(-1)
        sums["norm"] += f.square().sum((0, 2), dtype=torch.float64)
        sums["output"] += f.sum(0, dtype=torch.float64)
        sums["gated"] += (gates[:, :, None] * f).sum(0, dtype=torch.float64)
        sums["products"] += torch.einsum("nih,njh->ij", f, f)
    return sums


def check_layers(
    statistics: ExpertStatistics, experts: Mapping[int, int], needed: Sequence[str]
) -> None:
    """Raise ValueError unless statistics are of a model with these layers (number -> E) and have
    the sums `needed`, and some token has reached an expert of each layer.
    """
    found = {number: len(sums["count"]) for number, sums in statistics.layers.items()}
    if found != dict(experts):
        raise ValueError(
            f"The statistics are of layers with these numbers of experts: {found}, but the model "
            f"has {dict(experts)}. Score this model"
        )
    for number, sums in statistics.layers.items():
        missing = [name for name in needed if name not in sums]
        if missing:
            raise ValueError(
                f"The statistics lack {', '.join(missing)}. Score the model again, with --outputs, "
                "which runs every expert on every token"
            )
        if not sums["count"].any():
            raise ValueError(
                f"No token of the calibration text has reached an expert of layer {number}. Score "
                "with more text"
            )
