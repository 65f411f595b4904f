"""Tiny models with distinct LoRA experts, and PEFT adapters of the tiny dense model."""

import copy
from pathlib import Path

import torch

from moe_runtime.methods.lora import to_lora_moe
from moe_runtime.methods.lora.baseline import add_mlp_lora
from tests.hf import tiny


def lora_model(
    model_type: str = "llama", form: str = "block", changes: dict | None = None, **settings
):
    """Return a tiny model with 4 LoRA experts of rank 3, whose pairs and routers affect the
    logits.
    """
    model = tiny.dense(model_type, **changes or {})
    to_lora_moe(
        model,
        **{"num_experts": 4, "rank": 3, "form": form} | settings,
    )
    shake(model)
    return model


@torch.no_grad()
def shake(model) -> None:
    """Make the experts distinct, and the routers decisive."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_b" in name or ".gate." in name or "lora_B" in name:
            parameter.add_(
                torch.randn(
                    parameter.shape,
                    generator=generator,
                ).to(parameter.dtype)
                / 2
            )


@torch.no_grad()
def equalize(model, expert: int) -> None:
    """Make all LoRA experts of a model equal, so that the routers' choice does not matter."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(parameter[expert].clone().expand_as(parameter))


def adapters(
    folder: Path,
    count: int = 3,
    rank: int = 2,
    alpha: float = 5.0,
    targets=None,
    model=None,
    **extra,
) -> list[Path]:
    """Write adapter folders of the tiny Llama with PEFT itself; `extra` replaces LoraConfig's
    fields, which by default select the MLPs.
    """
    folders = []
    for e in range(count):
        dense = copy.deepcopy(tiny.dense() if model is None else model)
        if extra:
            from peft import LoraConfig, get_peft_model

            names = extra.get(
                "target_modules",
                ["gate_proj", "up_proj", "down_proj"],
            )
            config = LoraConfig(
                **{"r": rank, "lora_alpha": alpha} | extra | {"target_modules": names}
            )
            adapted = get_peft_model(dense, config)
        else:
            adapted = add_mlp_lora(dense, rank, alpha, targets, seed=e)
        generator = torch.Generator().manual_seed(e)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(
                        torch.randn(
                            parameter.shape,
                            generator=generator,
                        )
                        / 4
                    )
        folders.append(folder / f"adapter-{e}")
        adapted.save_pretrained(str(folders[-1]))
    return folders


def alone(model, e: int) -> torch.Tensor:
    """Coefficients that keep only expert e."""
    return torch.eye(model.config.moe_runtime["config"]["num_experts"])[e]
