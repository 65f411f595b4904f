"""Models, statistics and folders for the tests of shrink."""

from pathlib import Path

import torch
from torch import nn

from moe_runtime.hf.dropin.experts import stack_names
from moe_runtime.hf.dropin.layers import numbered_layers
from moe_runtime.methods.shrink import ExpertStatistics, StatisticsRecorder
from tests.hf import stock as every

# of the families of tests.hf.stock, and why
NOT_CUT = {
    "deepseek_v4": "no router whose logits",
    "diffusion_gemma": "have the same number 0",
    "ernie4_5_vl_moe": "have the same number 1",
    "inkling": "changes with the number of experts",
    "zaya": "changes with the number of experts",
}


def build(family: str, groups: int = 2, **fields) -> nn.Module:
    """Build a tiny model of a family with `groups` routing groups, and other fields of its config
    where it has them.
    """
    config = every.config_of(family)
    for part in (config, config.get_text_config()):
        if getattr(part, "n_group", None) == 4:
            part.n_group = groups
            part.topk_group = groups
        for name, value in fields.items():
            if hasattr(part, name):
                setattr(part, name, value)
    torch.manual_seed(0)
    model = every.model_class(family)(config)
    model.set_experts_implementation("eager")
    return every._randomized(model).eval()


@torch.no_grad()
def statistics_of(model: nn.Module, outputs: bool = True, **batch) -> ExpertStatistics:
    """Run a model over random tokens, its experts by transformers' own loop."""
    model.set_experts_implementation("eager")
    with StatisticsRecorder(model, outputs) as recorder:
        model(**(batch or every.batch()))
        return recorder.read({"text": "random"})


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    """Return a model's logits for fixed tokens, with experts run by transformers' own loop."""
    model.set_experts_implementation("eager")
    return model(**every.batch()).logits


def stacks_of(model: nn.Module) -> dict[int, dict[str, torch.Tensor]]:
    """Return the stacks of each layer."""
    stacks = {}
    for number, layer in numbered_layers(model).items():
        module = layer.module
        stacks[number] = {name: getattr(module, name).detach() for name in stack_names(module)}
    return stacks


def saved(model: nn.Module, folder: Path) -> Path:
    """Save a model and return its folder."""
    model.save_pretrained(folder)
    return folder
