"""Integration with Hugging Face's libraries, shared by the methods; the names below are imported on
first use.

    dropin      stock MoE models on our kernels: their experts, gates and layers, expert
                parallelism, routing replay,
                balance losses, router statistics
    models      dense models to MoE models and back, in memory and as folders: the families, the
                generated classes, config.json
    training    transformers' Trainer and TRL's SFTTrainer for both, trainable experts, and the
                files that training writes

models and dropin do not depend on training.
"""

from pkgutil import resolve_name

_PUBLIC = {
    "MoESFTTrainer": "moe_runtime.hf.training.sft:MoESFTTrainer",
    "MoETrainer": "moe_runtime.hf.training.trainer:MoETrainer",
    "MixingCallback": "moe_runtime.hf.training.recording:MixingCallback",
    "RouterStatsCallback": "moe_runtime.hf.training.recording:RouterStatsCallback",
    "train_command": "moe_runtime.hf.training.sft:train_command",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = resolve_name(_PUBLIC[name])
    return globals()[name]
