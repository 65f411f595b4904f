"""Sizes of the MoE layers of published models, for measurements and for tuning launch configs.

The XFT ones are those of its paper, or assumed where the paper gives no number of experts.
"""

from moe_runtime.config import Layer, check_choice

LAYERS = {
    "XFT-DSCoder-1.3B": Layer(2048, 5504, 8, 6, shared=True),
    "XFT-StableCode-3B": Layer(2560, 6912, 4, 2, shared=True),
    "XFT-TinyLlama-1.1B": Layer(2048, 5632, 8, 6, shared=True),
    "XFT-TinyLlama-1.1B-4e": Layer(2048, 5632, 4, 2, shared=True),
    "DeepSeek-V2-Lite": Layer(2048, 1408, 64, 6),
    "Mixtral-8x7B": Layer(4096, 14336, 8, 2),
    "OLMoE": Layer(2048, 1024, 64, 8),
    "Qwen3-30B-A3B": Layer(2048, 768, 128, 8),
}


def find_layers(names: str) -> dict[str, Layer]:
    """Return the layers of comma-separated names, in any case, or of all."""
    if names.lower() == "all":
        return dict(LAYERS)
    known = {name.lower(): name for name in LAYERS}
    layers = {}
    for part in names.split(","):
        name = part.strip().lower()
        check_choice("shape", name, (*known, "all"))
        layers[known[name]] = LAYERS[known[name]]
    return layers
