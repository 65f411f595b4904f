"""Folders as the released XFT code writes them, tiny and random, and what that code computes on
them, in plain float32.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

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
    """The names and shapes of all tensors; a weighted model's experts are not among them."""
    H, I, V, E = (
        values[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_experts")
    )
    kv = H // values["num_attention_heads"] * values["num_key_value_heads"]
    R = E - (values["gate_type"] != VANILLA)
    out = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if not values["tie_word_embeddings"]:
        out["lm_head.weight"] = (V, H)
    for layer in range(values["num_hidden_layers"]):
        names = {}
        for name, rows in zip("qkvo", (H, kv, kv, H)):
            names[f"self_attn.{name}_proj.weight"] = (rows, H)
        names |= {
            "input_layernorm.weight": (H,),
            "post_attention_layernorm.weight": (H,),
        }
        if stage == "weighted":
            names |= {"mlp.average_weights": (R,)}
            names |= {
                "mlp.gate_proj.weight": (I, H),
                "mlp.up_proj.weight": (I, H),
                "mlp.down_proj.weight": (H, I),
            }
        else:
            network = {
                "mlp": {".0": (R, H), ".2": (R, R)},
                "linear": {"": (R, H)},
            }[values["gate_network"]]
            names |= {
                f"mlp.gate.gate_network{part}.weight": shape for part, shape in network.items()
            }
            names |= {"mlp.gate.weight_noise.weight": (R, H)} if values["gate_add_noise"] else {}
            for kind in KINDS:
                shape = (H, I) if kind == "weight_down" else (I, H)
                names |= {f"mlp.calculator.experts.{kind}.{e}.weight": shape for e in range(E)}
        out |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    return out


def draw(
    named: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict:
    """Random tensors, large enough that each of them shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in named.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (
            1 + noise / 8 if "norm" in name else noise / 5 if len(shape) > 1 else noise
        ).to(dtype)
    return tensors


def write_moe(
    folder: Path, form: str = "safetensors", dtype: torch.dtype = torch.float32, **changes
):
    """Write an MoE's folder; returns its config.json and its tensors. `form`: safetensors, bin,
    shards, old (no zip).
    """
    values = VALUES | {"torch_dtype": str(dtype).removeprefix("torch.")} | changes
    tensors = draw(shapes(values), dtype)
    _write(folder, values, tensors, form)
    return values, tensors


def write_weighted(folder: Path, ffn_folder: Path, dtype: torch.dtype = torch.float32, **changes):
    """Write a weighted model's folder and its experts' files; returns config.json, the tensors and
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
        names = list(tensors)
        n = 3
        place = {}
        for i, name in enumerate(names):
            place[name] = f"pytorch_model-{i * n // len(names) + 1:05d}-of-{n:05d}.bin"
        for file in set(place.values()):
            torch.save(
                {name: tensors[name] for name in names if place[name] == file}, folder / file
            )
        index = {"metadata": {}, "weight_map": place}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def forward(
    values: dict,
    tensors: dict,
    ids: torch.Tensor,
    experts: list | None = None,
    eps: list | None = None,
):
    """Return the logits [B, S, V] and the sum of the layers' balance losses; a weighted model's is
    0.

    `experts` are a weighted model's; `eps` [T, R] of each layer are the noise of a training step.
    """
    # the MoE's attention has its own, whatever the config says
    rope = values["rope_theta"] if experts else 10000.0
    x = tensors["model.embed_tokens.weight"][ids]
    losses = torch.zeros(())
    for layer in range(values["num_hidden_layers"]):
        own = {}
        for k, v in tensors.items():
            if f".layers.{layer}." in k:
                own[k.removeprefix(f"model.layers.{layer}.")] = v
        x = x + attention(
            values,
            own,
            norm(values, x, own["input_layernorm.weight"]),
            rope,
        )
        h = norm(values, x, own["post_attention_layernorm.weight"])
        if experts:
            x = x + mixed_mlp(
                values,
                own["mlp.average_weights"],
                experts[layer],
                h,
            )
        else:
            out, loss = moe(
                values,
                own,
                h.flatten(0, 1),
                None if eps is None else eps[layer],
            )
            x = x + out.view_as(x)
            losses = losses + loss
    head = "model.embed_tokens.weight" if values["tie_word_embeddings"] else "lm_head.weight"
    return norm(values, x, tensors["model.norm.weight"]) @ tensors[head].T, losses


def norm(values: dict, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + values["rms_norm_eps"]).sqrt()


def attention(values: dict, own: dict, x: torch.Tensor, base: float) -> torch.Tensor:
    """Causal attention with rotary positions; each key and value head serves a group of query
    heads.
    """
    B, S, H = x.shape
    heads = values["num_attention_heads"]
    d = H // values["num_attention_heads"]
    scaling = values["rope_scaling"] or {"type": "none", "factor": 1.0}
    factor = scaling["factor"]
    longest = values["max_position_embeddings"]
    if scaling["type"] == "dynamic" and longest < S:
        base = base * (factor * S / longest - (factor - 1)) ** (d / (d - 2))
    position = torch.arange(S) / (factor if scaling["type"] == "linear" else 1.0)
    angle = position[:, None] * base ** (-torch.arange(0, d, 2) / d)
    rotation = torch.polar(torch.ones_like(angle), angle)  # feature i turns with feature i + d / 2

    def project(name: str, turn: bool) -> torch.Tensor:
        y = (
            (x @ own[f"self_attn.{name}_proj.weight"].T)
            .view(B, S, -1, d)
            .transpose(
                1,
                2,
            )
        )
        if turn:
            y = torch.complex(*y.chunk(2, -1)) * rotation
            y = torch.cat([y.real, y.imag], -1)
        return y.repeat_interleave(heads // y.shape[1], 1)

    q = project("q", True)
    k = project("k", True)
    v = project("v", False)
    score = q @ k.transpose(2, 3) / math.sqrt(d) + torch.full((S, S), -math.inf).triu(1)
    return (score.softmax(-1) @ v).transpose(1, 2).reshape(B, S, H) @ own[
        "self_attn.o_proj.weight"
    ].T


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe(values: dict, own: dict, x: torch.Tensor, eps: torch.Tensor | None):
    """Official code: `x` [T, H] -> its output and the layer's balance loss."""
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
    """Official code, with its quirk: the noise, not the noisy logit, is compared with the
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
