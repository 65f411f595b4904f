"""Tiny random folders as the released XFT code writes them, and what that code computes on them, in
plain float32.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = ("weight_gate", "weight_up", "weight_down")
XFT = "TopKUniversalBalancedNoisyGate"
NONORM = "TopKUniversalBalancedNoNormalizationNoisyGate"
VANILLA = "TopKBalancedNoisyGate"
VALUES = {
    "model_type": "llama_moe_upscaling",
    "architectures": ["LlamaMoEUpscalingForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_experts": 4,
    "num_selects": 3,
    "size_experts": None,
    "gate_type": XFT,
    "gate_network": "mlp",
    "gate_use_softmax": True,
    "gate_use_balance": True,
    "gate_balance_loss_weight": 0.01,
    "gate_add_noise": True,
    "gate_noise_epsilon": 0.01,
    "calculator_type": "UniversalCalculator",
    "multiply_gate_scores": True,
    "score_scale_factor": 1.0,
    "add_weight_norm": False,
    "drop_tokens": True,
    "dropped_padding": "zero",
    "capacity_factor": 1.25,
    "shared_expert_weight": 0.75,
    "ffn_folder_path": "nowhere_ffn",
    "torch_dtype": "float32",
    "transformers_version": "4.37.0",
}
WEIGHTED = {
    "model_type": "llama",
    "architectures": ["LlamaWeightedForCausalLM"],
}


def shapes(values: dict, stage: str = "moe") -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors, without a weighted model's experts."""
    H = values["hidden_size"]
    I = values["intermediate_size"]
    V = values["vocab_size"]
    kv = H // values["num_attention_heads"] * values["num_key_value_heads"]
    R = values["num_experts"] - (values["gate_type"] != VANILLA)
    layer = {f"self_attn.{name}_proj.weight": (H, H) for name in "qo"}
    layer |= {f"self_attn.{name}_proj.weight": (kv, H) for name in "kv"}
    layer |= {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    if stage == "weighted":
        layer["mlp.average_weights"] = (R,)
        layer |= {"mlp.gate_proj.weight": (I, H), "mlp.up_proj.weight": (I, H)}
        layer["mlp.down_proj.weight"] = (H, I)
    else:
        if values["gate_network"] == "mlp":
            layer["mlp.gate.gate_network.0.weight"] = (R, H)
            layer["mlp.gate.gate_network.2.weight"] = (R, R)
        else:
            layer["mlp.gate.gate_network.weight"] = (R, H)
        if values["gate_add_noise"]:
            layer["mlp.gate.weight_noise.weight"] = (R, H)
        for kind in KINDS:
            for e in range(values["num_experts"]):
                shape = (H, I) if kind == "weight_down" else (I, H)
                layer[f"mlp.calculator.experts.{kind}.{e}.weight"] = shape
    out = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if not values["tie_word_embeddings"]:
        out["lm_head.weight"] = (V, H)
    for number in range(values["num_hidden_layers"]):
        out |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return out


def draw(
    named: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict:
    """Random tensors, large enough that each one shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in named.items():
        tensor = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensor = 1 + tensor / 8
        elif len(shape) > 1:
            tensor = tensor / 5
        tensors[name] = tensor.to(dtype)
    return tensors


def write_moe(
    folder: Path, form: str = "safetensors", dtype: torch.dtype = torch.float32, **changes
):
    """Write an MoE folder; return its config.json and its tensors. `form`: safetensors, bin,
    shards, old (no zip).
    """
    values = VALUES | {"torch_dtype": str(dtype).removeprefix("torch.")} | changes
    tensors = draw(shapes(values), dtype)
    _write(folder, values, tensors, form)
    return values, tensors


def write_weighted(folder: Path, ffn_folder: Path, dtype: torch.dtype = torch.float32, **changes):
    """Write a weighted model's folder and its experts' files; return config.json, the tensors and
    the experts by layer.
    """
    values = VALUES | WEIGHTED | {"ffn_folder_path": str(ffn_folder)} | changes
    tensors = draw(shapes(values, "weighted"))
    _write(folder, values, tensors, "safetensors")
    ffn_folder.mkdir(exist_ok=True)
    experts = []
    drawn = draw(shapes(values), dtype, seed=1)
    for layer in range(values["num_hidden_layers"]):
        name = "model.layers.{}.mlp.calculator.experts.{}.{}.weight"
        E = range(values["num_experts"])
        experts.append({kind: {e: drawn[name.format(layer, kind, e)] for e in E} for kind in KINDS})
        torch.save(experts[-1], ffn_folder / f"ffn_layer_{layer}.pt")
    return values, tensors, experts


def _write(folder: Path, values: dict, tensors: dict, form: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if form == "safetensors":
        save_file(
            tensors,
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
    elif form in ("bin", "old"):
        torch.save(
            tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin"
        )
    else:
        place = {}
        for i in range(3):
            file = f"pytorch_model-{i + 1:05d}-of-00003.bin"
            part = dict(list(tensors.items())[i::3])
            torch.save(part, folder / file)
            place |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": place}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


class Mlp(nn.Module):
    """An MLP that computes a given function."""

    def __init__(self, compute: Callable):
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


@torch.no_grad()
def forward(
    values: dict,
    tensors: dict,
    ids: torch.Tensor,
    experts: list | None = None,
    eps: list | None = None,
):
    """Return the logits [B, S, V] and the sum of the layers' balance losses, which is 0 for a
    weighted model.

    `experts` are a weighted model's; `eps` [T, R] of each layer is the noise of a training step.
    """
    # the MoE's attention uses its own base, regardless of the config
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"] if experts else 10000.0}
    scaling = values["rope_scaling"]
    if scaling:
        rope |= {"rope_type": scaling["type"], "factor": scaling["factor"]}
    own = {key: value for key, value in values.items() if not key.startswith("rope_")}
    model = LlamaForCausalLM(LlamaConfig(**own, rope_parameters=rope)).eval()
    losses = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp = Mlp(_compute(values, tensors, number, experts, eps, losses))
    model.load_state_dict({k: v.float() for k, v in tensors.items() if ".mlp." not in k}, False)
    return model(ids).logits, sum(losses, torch.zeros(()))


def _compute(values: dict, tensors: dict, number: int, experts, eps, losses: list) -> Callable:
    """Return the function of a layer's MLP, which appends its balance loss to `losses`."""
    start = f"model.layers.{number}."
    own = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

    def routed(x: torch.Tensor) -> torch.Tensor:
        out, loss = moe(values, own, x.flatten(0, 1), eps[number] if eps else None)
        losses.append(loss)
        return out.view_as(x)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return mixed_mlp(values, own["mlp.average_weights"], experts[number], x)

    return mixed if experts else routed


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe(values: dict, own: dict, x: torch.Tensor, eps: torch.Tensor | None):
    """Official code: `x` [T, H] -> the output and the layer's balance loss."""
    shared = values["gate_type"] != VANILLA
    name = "mlp.gate.gate_network"
    k = values["num_selects"] - shared
    if values["gate_network"] == "mlp":
        clean = torch.tanh(x @ own[f"{name}.0.weight"].T) @ own[f"{name}.2.weight"].T
    else:
        clean = x @ own[f"{name}.weight"].T
    scale = noise = None
    if eps is not None:
        scale = F.softplus(x @ own["mlp.gate.weight_noise.weight"].T) + values["gate_noise_epsilon"]
        noise = eps * scale
    logits = clean if eps is None else clean + noise
    out = []
    importance = torch.zeros_like(logits)
    for t, row in enumerate(logits):
        chosen = row.argsort(descending=True)[:k]
        s = row[chosen].softmax(0) if not shared else row.softmax(0)[chosen]
        importance[t, chosen] = s
        weight = s.softmax(0) * s[0] if values["gate_type"] == XFT else s
        slots = list(zip((chosen + shared).tolist(), weight)) + ([(0, 1 - s[0])] if shared else [])
        out.append(sum(w * mlp(x[t], *expert(own, e)) for e, w in slots))
    if not values["gate_use_balance"]:
        return torch.stack(out), torch.zeros(())
    load = (importance > 0).sum(0).float()
    if eps is not None and k < logits.shape[1]:
        load = noisy_load(clean, noise, logits, scale, k)
    return torch.stack(out), values["gate_balance_loss_weight"] * (
        cv2(importance.sum(0)) + cv2(load)
    )


def expert(own: dict, e: int) -> list[torch.Tensor]:
    values = []
    for kind in KINDS:
        values.append(own[f"mlp.calculator.experts.{kind}.{e}.weight"])
    return values


def noisy_load(clean, noise, logits, scale, k: int) -> torch.Tensor:
    """Official code, including a quirk: it compares the noise, not the noisy logit, with the
    threshold.
    """
    ranked = logits.sort(-1, descending=True).values
    inside = ranked[:, k, None]
    outside = ranked[:, k - 1, None]
    z = (clean - torch.where(noise > inside, inside, outside)) / scale
    return ((1 + torch.erf(z / math.sqrt(2))) / 2).sum(0)


def cv2(v: torch.Tensor) -> torch.Tensor:
    return torch.zeros(()) if len(v) == 1 else v.var(unbiased=True) / (v.mean() ** 2 + 1e-10)


def mixed_mlp(
    values: dict, average_weights: torch.Tensor, experts: dict, x: torch.Tensor
) -> torch.Tensor:
    """XFT, Eq. (3), without the released code's rounding of the mixed weights to bfloat16."""
    rate = values["shared_expert_weight"]
    alpha = [
        rate,
        *((1 - rate) * average_weights.float().softmax(0)).tolist(),
    ]
    mixed = []
    for kind in KINDS:
        mixed.append(sum(a * experts[kind][e].float() for e, a in enumerate(alpha)))
    return mlp(x, *mixed)
