"""LoRA experts as adapter folders that PEFT reads: adapter_model.safetensors and adapter_config.json.

stacked  one adapter for a model whose layers have all experts made whole side by side, such as Mixtral or an upcycled model:
         PEFT's target_parameters on experts.gate_up_proj [E, 2I, H] and experts.down_proj [E, H, I], the router among
         modules_to_save. PEFT wants A as [E r, in], expert after expert, and B as [out, r E], rank after rank. gate and up
         share one weight there, so they share one pair of twice the rank, B being [B_gate 0; 0 B_up]; alpha / r stays.
single   one expert as a plain adapter for the dense base: target_modules gate_proj, up_proj, down_proj. So may those of linear
         layers with routers of their own be saved (LoRALinear), which have no stacked form.
"""

import os
from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open

from moe_runtime.checkpoint import write_tensors
from moe_runtime.files import atomic_folder, read_json
from moe_runtime.files import atomic_write_json as write_json
from moe_runtime.modules.lora import LoRAExperts, LoRAMoE, check_expert
from moe_runtime.modules.lora_linear import LinearExperts

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
PLACES = {"gate_up_proj": "base_layer.", "down_proj": ""}  # PEFT nests: the first parameter's adapter is the inner one


def save_stacked(
    layers: Mapping[str, LoRAExperts | LoRAMoE], folder: str | os.PathLike, *, base_model: str, overwrite: bool = False
) -> None:
    """Write one adapter of all `layers`, by the path of the MoE block that each is (model.layers.0.mlp).

    `base_model` is what the config names: the model that has the experts made of the base, all equal. Raises ValueError for
    layers of different settings, before anything is written.
    """
    experts = {name: _experts(layer) for name, layer in layers.items()}
    first = _alike(experts)
    tensors, parameters = {}, []
    for name, layer in experts.items():
        for parameter, (a, b) in _stacked(layer).items():
            place = f"{PREFIX}{name}.experts.{PLACES[parameter] if len(_stacked_names(layer)) == 2 else ''}"
            # [E, r, in] -> [E r, in];  [E, r, out] -> [out, r E]
            tensors[f"{place}lora_A.weight"] = a.reshape(-1, a.shape[2])
            tensors[f"{place}lora_B.weight"] = b.permute(2, 1, 0).reshape(b.shape[2], -1)
    parameters = [f"experts.{parameter}" for parameter in _stacked_names(first)]
    gates = {name: layer.gate for name, layer in layers.items() if isinstance(layer, LoRAMoE)}
    for name, gate in gates.items():
        tensors |= {f"{PREFIX}{name}.gate.{key}": value for key, value in gate.state_dict().items()}
    ranks = {parameter: first.rank * (2 if parameter.endswith("gate_up_proj") else 1) for parameter in parameters}
    config = _config(first, base_model) | {
        "target_modules": [],
        "target_parameters": parameters,
        "rank_pattern": {f"{parameter}": rank for parameter, rank in ranks.items() if rank != first.rank},
        "alpha_pattern": {
            parameter: first.alpha * rank / first.rank for parameter, rank in ranks.items() if rank != first.rank
        },
        "modules_to_save": sorted({f"{name.rpartition('.')[2]}.gate" for name in gates}) or None,
    }
    _write(folder, tensors, config, overwrite)


def save_single(
    layers: Mapping[str, LoRAExperts | LoRAMoE | LinearExperts],
    folder: str | os.PathLike,
    expert: int,
    *,
    base_model: str,
    overwrite: bool = False,
) -> None:
    """Write one expert of all `layers`, by the path of the dense MLP that each has the place of, as an adapter of the base.

    Raises ValueError for an expert that is not there and for layers of different settings.
    """
    experts = {name: _experts(layer, LinearExperts) for name, layer in layers.items()}
    first = _alike(experts)
    check_expert(expert, first.num_experts)
    tensors = {}
    for name, layer in experts.items():
        for target in layer.targets:
            place = f"{PREFIX}{name}.{target}."
            tensors[f"{place}lora_A.weight"] = layer.lora_a[target][expert]
            tensors[f"{place}lora_B.weight"] = layer.lora_b[target][expert].t()
    _write(folder, tensors, _config(first, base_model) | {"target_modules": list(first.targets)}, overwrite)


@torch.no_grad()
def load_stacked(layers: Mapping[str, LoRAExperts | LoRAMoE], folder: str | os.PathLike) -> None:
    """Read what `save_stacked` wrote, or PEFT from there on, into `layers` of the same settings, in place.

    Raises ValueError, with the layers untouched, for a file of other layers, sizes or settings, and for a rank that serves
    both gate and up, which PEFT can train and pairs of their own cannot hold.
    """
    experts = {name: _experts(layer) for name, layer in layers.items()}
    first, path = _alike(experts), os.path.join(folder, WEIGHTS)
    _check_config(first, os.path.join(folder, CONFIG))
    tensors = read_tensors(path)
    found = {}
    for name, layer in experts.items():
        E, nested = layer.num_experts, len(_stacked_names(layer)) == 2
        for parameter, (a, b) in _stacked(layer).items():
            place = f"{PREFIX}{name}.experts.{PLACES[parameter] if nested else ''}"
            flat_a = _take(tensors, f"{place}lora_A.weight", (E * a.shape[1], a.shape[2]), path)
            flat_b = _take(tensors, f"{place}lora_B.weight", (b.shape[2], b.shape[1] * E), path)
            new = flat_a.view(a.shape), flat_b.view(b.shape[2], b.shape[1], E).permute(2, 1, 0)
            found[name, parameter] = (
                _apart(layer, *new, place, path) if parameter == "gate_up_proj" else {"down_proj": new}
            )
    routers = {}
    for name, layer in layers.items():
        if isinstance(layer, LoRAMoE):
            routers[name] = {
                key: _take(tensors, f"{PREFIX}{name}.gate.{key}", tuple(value.shape), path)
                for key, value in layer.gate.state_dict().items()
            }
    _check_empty(tensors, path)
    for (name, _), halves in found.items():
        for target, (a, b) in halves.items():
            experts[name].lora_a[target].copy_(a)
            experts[name].lora_b[target].copy_(b)
    for name, state in routers.items():
        layers[name].gate.load_state_dict(state)


def _check_empty(left: dict, path: str) -> None:
    if left:
        raise ValueError(f"{path} has {sorted(left)[0]} and {len(left) - 1} more tensors; want those of `layers` alone")


def _experts(layer, *kinds: type) -> LoRAExperts | LinearExperts:
    """Return the pairs of a layer that is of our kinds, or of one of `kinds`."""
    experts = layer.experts if isinstance(layer, LoRAMoE) else layer
    if not isinstance(experts, (LoRAExperts, *kinds)):
        raise ValueError(f"a layer is a {type(layer).__name__}; want LoRAExperts or LoRAMoE")
    return experts


def _alike(experts: Mapping[str, LoRAExperts]) -> LoRAExperts:
    """Return one of the layers; ValueError unless one config describes them all."""
    settings = {
        (layer.num_experts, layer.rank, layer.alpha, layer.targets): name for name, layer in reversed(experts.items())
    }
    if len(settings) != 1:
        shown = "; ".join(f"{name}: {key}" for key, name in settings.items()) or "none"
        raise ValueError(f"layers' num_experts, rank, alpha and targets are {shown}; want one setting for all")
    return next(iter(experts.values()))


def _stacked_names(layer: LoRAExperts) -> list[str]:
    names = ["gate_up_proj"] * ("gate_proj" in layer.targets or "up_proj" in layer.targets)
    return names + ["down_proj"] * ("down_proj" in layer.targets)


def _stacked(layer: LoRAExperts) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (a [E, r, in], b [E, r, out]) by the stack's name; of gate and up together, twice the rank."""
    found = {}
    if "gate_up_proj" in _stacked_names(layer):
        gate, up = (_halves(layer, target) for target in ("gate_proj", "up_proj"))
        zero = torch.zeros_like(gate[1])
        b = torch.cat([torch.cat([gate[1], zero], 2), torch.cat([zero, up[1]], 2)], 1)
        found["gate_up_proj"] = torch.cat([gate[0], up[0]], 1), b
    if "down_proj" in layer.targets:
        found["down_proj"] = _halves(layer, "down_proj")
    return found


def _halves(layer: LoRAExperts, target: str) -> tuple[torch.Tensor, torch.Tensor]:
    if target in layer.targets:
        return layer.lora_a[target].detach(), layer.lora_b[target].detach()
    (out, size), some = getattr(layer.base, target).weight.shape, next(iter(layer.lora_a.values()))
    shape = layer.num_experts, layer.rank
    return some.new_zeros(*shape, size), some.new_zeros(*shape, out)


def _apart(layer: LoRAExperts, a, b, place: str, path: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return gate's and up's own halves of the pair that they share; ValueError where a rank serves both."""
    r, I = layer.rank, b.shape[2] // 2
    found = {"gate_proj": (a[:, :r], b[:, :r, :I]), "up_proj": (a[:, r:], b[:, r:, I:])}
    beside = [b[:, :r, I:], b[:, r:, :I], *(found.pop(target)[1] for target in set(found) - set(layer.targets))]
    if any(part.any() for part in beside):
        raise ValueError(
            f"{place}lora_B.weight in {path} has ranks that serve both gate and up, or one of them that is not among "
            f"{', '.join(layer.targets)}; want each rank in one target: PEFT can load it"
        )
    return found


def _config(layer: LoRAExperts, base_model: str) -> dict:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": layer.rank,
        "lora_alpha": layer.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
    }


def _check_config(layer: LoRAExperts, path: str) -> None:
    config = read_json(path)
    ours = _config(layer, "")
    for key in ("r", "lora_alpha", "use_rslora"):
        if config.get(key) != ours[key]:
            raise ValueError(f"{key} in {path} is {config.get(key)!r}, of the layers {ours[key]!r}; want the same")


def _write(folder, tensors: dict[str, torch.Tensor], config: dict, overwrite: bool) -> None:
    with atomic_folder(folder, overwrite) as tmp:
        # a copy each: safetensors refuses tensors that share memory, which a stack's experts do
        plain = {
            key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
        }
        write_tensors(tmp / WEIGHTS, plain)
        write_json(tmp / CONFIG, config)


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of an adapter's file; raises ValueError where it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"path is {path}, which cannot be read ({error}); want an adapter's safetensors file"
        ) from error


def _take(tensors: dict, key: str, shape: tuple[int, ...], path: str) -> torch.Tensor:
    tensor = tensors.pop(key, None)
    if tensor is None or tuple(tensor.shape) != shape:
        raise ValueError(f"{key} in {path} is {None if tensor is None else list(tensor.shape)}; want {list(shape)}")
    return tensor
