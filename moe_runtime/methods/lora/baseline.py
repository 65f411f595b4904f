"""PEFT's LoRA: on an MoE model with its experts, the baseline of ESFT; on a dense model's MLPs, the
start of UpIT's experts.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.models.families import family_of
from moe_runtime.io.rows import require
from moe_runtime.methods.lora.adapters import check_patterns

# peft mistakes linear layers with these names for experts of old checkpoints, and skips those of
# dense and shared MLPs
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def add_lora(model: nn.Module, rank: int, scaling: float, seed: int = 0) -> nn.Module:
    """Return `model` with LoRA, its only trainable parameters, on all linear layers, routers and
    expert stacks.

    Embeddings and head have none (ESFT, Sec. 4.3). Every expert has its own matrices, one pair for
    each stack. `scaling` is alpha / rank. Raises ValueError if peft leaves a layer out.
    """
    head = model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    linear = [
        name
        for module, name in names.items()
        if isinstance(module, nn.Linear) and module is not head
    ]
    modules = [name for name in linear if not name.endswith(OF_EXPERTS)]
    parameters = [f"{name}.weight" for name in linear if name not in modules]
    for layer in numbered_layers(model).values():
        module = experts_module(model, layer)
        parameters += [
            f"{names[module]}.{name}"
            for name, p in module.named_parameters(recurse=False)
            if p.dim() == 3
        ]
        block = names[module].rpartition(".")[0]
        sizes = (layer.num_experts, layer.num_experts - layer.num_shared)
        for name, other in model.get_submodule(block).named_children():
            weight = getattr(other, "weight", None)
            is_linear = f"{block}.{name}" in linear  # it has its matrices already
            if torch.is_tensor(weight) and len(weight) in sizes and not is_linear:
                parameters.append(f"{block}.{name}.weight")
    adapted = _adapted(model, rank, scaling * rank, seed, modules, parameters)
    pairs = sum(".lora_A." in name for name, _ in adapted.named_parameters())
    if pairs != len(modules) + len(parameters):
        raise ValueError(
            f"PEFT adapted only {pairs} of the {len(modules) + len(parameters)} weights of "
            f"{type(model).__name__}"
        )
    return adapted


def add_parameter_lora(
    model: nn.Module, parameters: Sequence[str], rank: int, alpha: float, seed: int = 0
) -> nn.Module:
    """Return `model` with LoRA, its only trainable parameters, for each expert of the stacks with
    these full names.
    """
    return _adapted(model, rank, alpha, seed, [], list(parameters))


def add_mlp_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Add LoRA, the only trainable parameters, to the linear layers of a dense model's MLPs.

    The adapter that PEFT saves can be an expert of `methods.lora.to_lora_moe`.

    Args:
        model: A stock dense model.
        rank: Of the matrices.
        alpha: The scaling is alpha / rank.
        targets: Names of the MLP's linear layers; None is all.
        seed: Initializes the matrices.

    Returns:
        The PEFT model.

    Raises:
        ValueError: For names that the MLPs lack.
    """
    family = family_of(model)
    names = (*family.up, family.down)
    modules = []
    for layer in range(model.config.num_hidden_layers):
        for name in names if targets is None else targets:
            modules.append(f"{family.path.format(layer)}.{name}")
    return _adapted(model, rank, alpha, seed, modules)


def _adapted(
    model: nn.Module,
    rank: int,
    alpha: float,
    seed: int,
    modules: list[str],
    parameters: list[str] | None = None,
) -> nn.Module:
    peft = require("peft")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=modules,
        target_parameters=parameters,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    with quiet_peft():
        return peft.get_peft_model(model, config)


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence the warning that peft reads a deprecated name of transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def save_lora(model: nn.Module, folder: str | Path, state_dict: dict | None = None) -> None:
    """Write only the matrices; `state_dict` replaces the weights of a sharded model."""
    model.save_pretrained(str(folder), state_dict=state_dict)


def load_lora(model: nn.Module, folder: str | Path) -> nn.Module:
    """Return `model` with the matrices from a folder; raises ValueError for patterns that PEFT
    could not match in time.
    """
    check_patterns(folder)
    with quiet_peft():
        return require("peft").PeftModel.from_pretrained(model, str(folder))
