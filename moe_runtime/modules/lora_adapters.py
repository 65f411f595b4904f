"""A PEFT LoRA adapter of a dense model as its pairs, by the path of the linear layer that each changes: W + scaling B A.

Adapters that say more than that (DoRA, biases, whole modules, a rank or alpha per layer) are refused by name.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_runtime.files import read_json
from moe_runtime.modules.lora_folders import CONFIG, PREFIX, WEIGHTS, read_tensors

HALVES = (".lora_A.weight", ".lora_B.weight")
# settings of which any changes the equation, or whose weights are no pairs
PLAIN = (
    "use_dora", "use_qalora", "use_bdlora", "bias", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save",
    "target_parameters", "trainable_token_indices", "fan_in_fan_out", "megatron_config", "layer_replication",
    "alora_invocation_tokens", "arrow_config", "kasa_config",
)  # fmt: skip
# with the other initializations the pairs are of a base whose weights they have changed, too
INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Adapter:
    """One adapter: `pairs` holds A [r, in] and B [out, r] by the path of the linear layer, as in the dense model."""

    folder: str
    rank: int
    alpha: float  # of rank-stabilized LoRA, whose scaling is lora_alpha / sqrt(r), what gives it as alpha / r
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def scaling(self) -> float:
        """Return what B A is multiplied by."""
        return self.alpha / self.rank

    def delta(self, path: str) -> torch.Tensor:
        """Return scaling B A [out, in] of one linear layer, in float32 at least."""
        a, b = self.pairs[path]
        wide = torch.promote_types(a.dtype, torch.float32)
        return (b.to(wide) @ a.to(wide)).mul_(self.scaling)


def read_adapter(folder: str | os.PathLike) -> Adapter:
    """Read the adapter folder that PEFT or `lora_folders.save_single` wrote; raises ValueError for what is more than LoRA."""
    path = os.path.join(folder, CONFIG)
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type in {path} is {config.get('peft_type')!r}; want 'LORA'")
    for name in PLAIN:
        if config.get(name) not in (None, False, "none", [], {}):
            raise ValueError(f"{name} in {path} is {config[name]!r}; want none: plain pairs A, B alone")
    if config.get("init_lora_weights") not in INITIAL:
        raise ValueError(
            f"init_lora_weights in {path} is {config['init_lora_weights']!r}, whose pairs are of another base; want it "
            "converted as it is saved: path_initial_model_for_weight_conversion of peft's save_pretrained"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"r in {path} is {rank!r}, lora_alpha {alpha!r}; want an integer of at least 1 and a number")
    alpha = alpha * rank**0.5 if config.get("use_rslora") else alpha
    return Adapter(str(folder), rank, float(alpha), _pairs(os.path.join(folder, WEIGHTS), rank))


def _pairs(path: str, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tensors, pairs = read_tensors(path), {}
    for key in [key for key in tensors if key.startswith(PREFIX) and key.endswith(HALVES[0])]:
        name = key.removesuffix(HALVES[0])
        a, b = tensors.pop(key), tensors.pop(name + HALVES[1], None)
        if b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            shapes = [list(a.shape), None if b is None else list(b.shape)]
            raise ValueError(f"{name} in {path} has A, B of {shapes}; want [{rank}, in] and [out, {rank}]")
        pairs[name.removeprefix(PREFIX)] = a, b
    if tensors or not pairs:
        key = sorted(tensors)[0] if tensors else "no tensor"
        raise ValueError(
            f"{path} has {key}; want lora_A.weight and lora_B.weight of linear layers alone, one pair at least"
        )
    return pairs
