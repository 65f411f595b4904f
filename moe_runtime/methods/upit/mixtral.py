"""An assembled model as a stock Mixtral folder: the same logits in plain transformers, and wherever Mixtral runs.

Mixtral's gate, softmax over all experts, the top k of it, divided by their sum, is softmax over the logits of the top k:
gates softmax_topk_renorm and topk_softmax. Its base is a Llama or Mistral without biases. The config, the names and the
layouts come from transformers' own tables. Streamed: memory holds a tensor of the backbone, one expert's matrices and a
shard of the target.
"""

from pathlib import Path

import torch
from transformers import MixtralConfig

from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.hf.models.conversions import SHARD, Conversion, FolderReceipt, Progress
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, check_keys
from moe_runtime.io.files import check_out_dir

GATES = ("softmax_topk_renorm", "topk_softmax")
BASES = ("llama", "mistral")
# fields of a base's config that Mixtral's has too
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "sliding_window", "attention_dropout", "rope_parameters", "dtype",
)  # fmt: skip


def mixtral_config(config) -> MixtralConfig:
    """Return the config of the stock Mixtral that computes what an upcycled model does; ValueError if there is none."""
    moe, block = moe_config(config), config.moe_runtime
    layers = list(range(config.num_hidden_layers))
    rope = config.rope_parameters or {}
    checks = {
        "stage": (block["stage"], ("moe",)),
        "model_type of the base": (block["base_model_type"], BASES),
        "gate": (moe.gate, GATES),
        "router": (moe.router, ("linear",)),
        "noisy_gate": (moe.noisy_gate, (False,)),
        "layers": (block["layers"], (layers,)),
        "mlp_bias": (moe.bias, (False,)),
        "attention_bias": (getattr(config, "attention_bias", False), (False,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0, None)),
    }
    for name, (value, known) in checks.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}; Mixtral computes only {' or '.join(map(repr, known))}")
    fields = {name: getattr(config, name) for name in _SHARED if hasattr(config, name)}
    return MixtralConfig(
        **fields,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        # its loss pools the layers, ours has one for each; the coefficient is the closest equivalent
        router_aux_loss_coef=moe.balance_loss_coef if moe.balance_loss == "switch" else 0.0,
        architectures=["MixtralForCausalLM"],
    )


class Names:
    """Mixtral's names and layouts on disk."""

    def __init__(self, config: MixtralConfig):
        self.model = folders.skeleton(config)
        self.specs = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def whole(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what is saved of a tensor that no expert has a row of."""
        return folders.to_saved(self.model, {name: tensor})

    def row(self, name: str, expert: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what is saved of one expert's row [1, ...] of a stack."""
        found = folders.to_saved(self.model, {name: tensor})
        return {key.replace(".experts.0.", f".experts.{expert}."): value for key, value in found.items()}


def export_mixtral(
    folder: str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Write the upcycled model `folder` as a MixtralForCausalLM to the folder `out`, with its tokenizer.

    Raises ValueError, with nothing written, for whatever Mixtral lacks, by name, for an existing target and too little disk
    space.
    """
    check_out_dir(out, overwrite, [folder])
    config = folders.read_config(folder)
    target = mixtral_config(config)
    names, moe = Names(target), moe_config(config)
    with Checkpoint(folder) as source:
        # old checkpoints hold buffers that every model computes itself
        specs = {key: spec for key, spec in source.specs().items() if not key.endswith("rotary_emb.inv_freq")}
        tied = set(names.model.all_tied_weights_keys)
        want = {key: TensorSpec(shape, specs[key].dtype) for key, shape in names.specs.items() if key in specs}
        want |= {
            key: TensorSpec(shape, target.dtype) for key, shape in names.specs.items() if key not in {*specs, *tied}
        }
        check_keys(specs, want, source=source.path)
        total = sum(spec.nbytes for spec in specs.values())
        with CheckpointWriter(out, max_shard_size, overwrite=overwrite, expected_bytes=total) as writer:
            folders.write_config(writer, target)
            side_files = folders.copy_side_files(Path(folder), writer)
            job = Conversion(source, writer, progress, specs)
            for key in specs:
                if ".experts." in key:
                    rows = (names.row(key, e, source.get_rows(key, slice(e, e + 1))) for e in range(moe.num_experts))
                else:
                    rows = (names.whole(key, source.get(key)),)
                for saved in rows:
                    for name, tensor in saved.items():
                        job.add(name, tensor)
                job.read(key)
    layers = list(range(config.num_hidden_layers))
    return FolderReceipt(Path(out), moe, job.tensors, job.bytes, side_files, layers)
