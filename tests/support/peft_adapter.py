"""PEFT adapters of tiny MoE models, and the files that older versions of PEFT would have written
for them.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_runtime.io.files import read_json
from moe_runtime.methods.lora.baseline import quiet_peft
from tests.support.stock_moe import stock

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapted(
    folder: Path,
    family: str = "qwen3_moe",
    *,
    parameters=BOTH,
    modules=("q_proj",),
    model=None,
    seed=2,
    **settings,
):
    """Write a base to folder/base and a random adapter for it to folder/adapter; return the model
    with the adapter.
    """
    from peft import LoraConfig, get_peft_model

    base = stock(family) if model is None else model
    base.save_pretrained(folder / "base")
    config = {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings
    config |= {
        "target_modules": list(modules),
        "target_parameters": list(parameters),
    }
    with quiet_peft():
        made = get_peft_model(base, LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
    made.save_pretrained(folder / "adapter")
    return made


def deltas(model) -> dict[str, torch.Tensor]:
    """Return PEFT's own change of every parameter that it adapts, by the parameter's plain name."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and "default" in module.lora_A:
            path = name.removeprefix("base_model.model.").replace(
                ".base_layer",
                "",
            )
            found[f"{path}.{getattr(module, 'parameter_name', 'weight')}"] = (
                module.get_delta_weight("default").detach()
            )
    return found


def as_written_by(
    version: str | None, folder: Path, old: Path, transposed: bool, num_experts: int = 8
) -> Path:
    """Write to `old` what this version of PEFT would save for the adapter in `folder`.

    The axes are those of the table in `moe_runtime.hf.dropin.peft_files`, written out by indices.
    They were compared with files of PEFT 0.18.0 and 0.19.0 themselves, for Qwen3-MoE and GPT-OSS
    with these sizes, on 2026-11-22: keys, shapes and order of the wrappers match, and `read_peft`
    gives the same change as their get_delta_weight.
    """
    shutil.copytree(folder, old)
    config = read_json(old / "adapter_config.json")
    config["peft_version"] = version
    if version is None:
        del config["peft_version"]
    (old / "adapter_config.json").write_text(json.dumps(config))
    flip = (version in (None, "0.18.0") and not transposed) or version == "0.19.0"
    tensors = load_file(old / "adapter_model.safetensors")
    for key in [
        key for key in tensors if flip and ".experts." in key and key.endswith("lora_A.weight")
    ]:
        other = key.replace("lora_A", "lora_B")
        E = num_experts
        a = tensors[key]
        b = tensors[other]
        r = a.shape[0] // E
        new_a = a.new_zeros(E * r, b.shape[0])
        new_b = b.new_zeros(a.shape[1], r * E)
        for e in range(E):
            for j in range(r):
                new_a[e * r + j] = b[:, j * E + e]
                new_b[:, j * E + e] = a[e * r + j]
        tensors |= {key: new_a, other: new_b}
    save_file(tensors, old / "adapter_model.safetensors", {"format": "pt"})
    return old
