"""Export an upcycled model as a stock MoE model of transformers, which runs without this package;
see docs/serving.md.

A family fits if it has the base's attention and its router computes the gate, with s =
softmax(router logits):

    topk_softmax, softmax_topk_renorm   the top k of s divided by their sum, which is softmax over
                                        the chosen logits
    softmax_topk                        the top k of s: `norm_topk_prob` false
    sigmoid_topk                        the router of DeepSeek-V3 without correction, groups and
                                        scale, as in GLM4-MoE
    xft, nonorm, top_k 2                (1 - s_max) shared(x) + s_max expert(x) = shared(x) + s_max
                                        (expert - shared)(x), where
                                        expert - shared is one MLP of twice the width; Qwen2-MoE has
                                        both terms

With larger top_k, xft and nonorm depend on s_max in a way that no stock router supports.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_runtime.config import SHARED_GATES, STOCK_FAMILIES, MoEConfig, check_choice
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.hf.models.folders import SHARD, Conversion, FolderReceipt, Progress
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter
from moe_runtime.io.files import check_out_dir

_NORMALIZED = {"softmax_topk_renorm": {}, "topk_softmax": {}}
_SOFTMAX = {
    gate: {"norm_topk_prob": gate != "softmax_topk"} for gate in (*_NORMALIZED, "softmax_topk")
}
_LLAMAS = ("llama", "mistral")
# fields of MoEConfig
_E = "num_routed_experts"
_K = "num_routed_per_token"
_I = "intermediate_size"
_QWEN = {"num_experts": _E, "num_experts_per_tok": _K, "moe_intermediate_size": _I}
_UNUSED = 128  # width of a shared expert that a family always has and the model does not
# parts of the names of tensors that are zero where the model has none
_ZERO = ("bias", ".shared_expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """A stock MoE family: the dense bases whose attention it has, the gates it computes, and its
    names.

    `also` lists optional features: "shared" (an expert times the sigmoid of a linear gate),
    "window" (sliding attention), "partial" (dense layers).
    """

    bases: tuple[str, ...]
    # the fields of the config that make the router compute the gate
    gates: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, str]  # other fields, and the fields of MoEConfig that they equal
    # and fields computed from the upcycled model's config
    more: Callable[[Any, str], dict] = lambda config, base: {}
    also: tuple[str, ...] = ()


STOCK = {
    "mixtral": Stock(
        bases=_LLAMAS,
        gates=_NORMALIZED,
        sizes={"num_local_experts": _E, "num_experts_per_tok": _K},
        also=("window",),
    ),
    "qwen2_moe": Stock(
        bases=(*_LLAMAS, "qwen2"),
        gates=_SOFTMAX,
        sizes=_QWEN,
        also=("shared", "partial"),
        # without these biases vLLM's class would read uninitialized memory
        more=lambda config, base: {"qkv_bias": True, "shared_expert_intermediate_size": _UNUSED},
    ),
    "qwen3_moe": Stock(bases=("qwen3",), gates=_SOFTMAX, sizes=_QWEN, also=("partial",)),
    "glm4_moe": Stock(
        bases=(*_LLAMAS, "qwen2", "qwen3"),
        gates={"sigmoid_topk": {"norm_topk_prob": False}},
        sizes={"n_routed_experts": _E, "num_experts_per_tok": _K, "moe_intermediate_size": _I},
        more=lambda config, base: {
            "attention_bias": base == "qwen2",
            "use_qk_norm": base == "qwen3",
            "partial_rotary_factor": 1.0,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    "flex_olmo": Stock(
        bases=("olmo2",), gates=_SOFTMAX, sizes={"num_experts": _E, "num_experts_per_tok": _K}
    ),
}
# fields of a base's config that the stock config has too
_COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "rope_parameters",
    "dtype",
)


def is_exact(to: str, moe: MoEConfig) -> bool:
    """Return whether the stock family `to` computes the gate of `moe`."""
    return moe.gate in STOCK[to].gates or (
        "shared" in STOCK[to].also and moe.has_shared_expert and moe.top_k == 2
    )


def exact_settings(
    to: str, gate: str | None = None, top_k: int | None = None
) -> tuple[str, int | None]:
    """Return a gate and top_k (None: any) that the family `to` computes exactly; given values are
    kept.
    """
    stock = _stock(to)
    if gate is None and "shared" in stock.also and top_k in (None, 2):
        gate = "xft"
    elif gate is None:
        gate = next(iter(stock.gates))
    if gate in SHARED_GATES and top_k is None:
        top_k = 2
    return gate, top_k


def _stock(to: str) -> Stock:
    check_choice("to", to, STOCK_FAMILIES)
    return STOCK[to]


def stock_config(config: PreTrainedConfig, to: str = "mixtral") -> PreTrainedConfig:
    """Return the config of the stock model of family `to` that computes what an upcycled model
    does; raises ValueError if there is none.
    """
    stock = _stock(to)
    moe = moe_config(config)
    block = config.moe_runtime
    layers = list(range(config.num_hidden_layers))
    rope = config.rope_parameters or {}
    base = block["base_model_type"]
    window = getattr(config, "sliding_window", None)
    _check_known(
        to, {"stage": (block["stage"], ("moe",)), "model_type of the base": (base, stock.bases)}
    )
    if not is_exact(to, moe):
        raise ValueError(_inexact(to, moe, base))
    checks = {
        "router": (moe.router, ("linear",)),
        "noisy_gate": (moe.noisy_gate, (False,)),
        "mlp_bias": (moe.bias, (False,)),
        "attention_bias": (getattr(config, "attention_bias", False), (False,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0, None)),
    }
    if "partial" not in stock.also:
        checks["layers"] = (block["layers"], (layers,))
    if "window" not in stock.also:
        checks["sliding_window"] = (window, (None,))
    _check_known(to, checks)
    fields = {name: getattr(config, name) for name in _COMMON if hasattr(config, name)}
    fields |= stock.more(config, base)
    for name, size in stock.sizes.items():
        fields[name] = getattr(moe, size)
    fields |= stock.gates.get(moe.gate, {})
    if "window" in stock.also:
        fields["sliding_window"] = window
    if "partial" in stock.also:
        fields["mlp_only_layers"] = sorted(set(layers) - set(block["layers"]))
    if moe.has_shared_expert:
        fields |= {
            "shared_expert_intermediate_size": moe.intermediate_size,
            "moe_intermediate_size": 2 * moe.intermediate_size,
            "norm_topk_prob": False,
        }
    # its loss pools the layers, ours has one for each; the coefficient is the closest equivalent
    fields["router_aux_loss_coef"] = 0.0
    if moe.balance_loss == "switch":
        fields["router_aux_loss_coef"] = moe.balance_loss_coef
    return AutoConfig.for_model(to, **fields, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[to]])


def _check_known(to: str, checks: dict[str, tuple]) -> None:
    """Raise ValueError for the first name whose value is not among those that `to` supports."""
    for name, (value, known) in checks.items():
        if value not in known:
            raise ValueError(
                f"{name} is {value!r}, but {to} supports only {' or '.join(map(repr, known))}. "
                "Use xft merge for a dense model"
            )


def _inexact(to: str, moe: MoEConfig, base: str) -> str:
    """Describe why the family does not compute the gate, and what to do."""
    gate = f"gate is {moe.gate!r}"
    known = list(map(repr, STOCK[to].gates))
    if "shared" in STOCK[to].also:
        known.append("'xft' and 'nonorm' with top_k 2")
        if moe.has_shared_expert:
            gate += f" with top_k {moe.top_k}"
    remedies = ["xft merge for a dense model", "xft export --to official"]
    for name, stock in STOCK.items():
        if base in stock.bases and is_exact(name, moe):
            remedies.append(f"--to {name}")
    return (
        f"{gate}, but {to} supports only {' or '.join(known)}. Use {', '.join(remedies)}, or start "
        f"with xft upcycle --for {to}"
    )


class _Target:
    """The stock model on the meta device: names and layouts on disk, and the tensors still to be
    written.
    """

    def __init__(self, config):
        self.model = folders.skeleton(config)
        tied = self.model.all_tied_weights_keys
        self.left = {
            name: tensor for name, tensor in self.model.state_dict().items() if name not in tied
        }
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.left.values())

    def saved(self, name: str, tensor: Tensor, expert: int = 0) -> dict[str, Tensor]:
        """Return the saved form of a tensor, or of the row [1, ...] of an expert in a stack."""
        self.left.pop(name, None)
        saved = folders.to_saved(self.model, {name: tensor})
        number = f".experts.{expert}."
        return {key.replace(".experts.0.", number): value for key, value in saved.items()}


def export_stock(
    folder: StrPath,
    out: StrPath,
    to: str = "mixtral",
    *,
    check: bool = False,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Write the upcycled model `folder` as a stock model of family `to`, a key of STOCK, to the
    folder `out`.

    Tensors are streamed: memory holds one tensor of the backbone, one expert's matrices and one
    shard. With `check`, both models are loaded and the receipt has the relative error of the
    logits. Raises ValueError, with nothing written, if the family has no such model.
    """
    check_out_dir(out, overwrite, [folder])
    config = folders.read_config(folder)
    new = stock_config(config, to)
    moe = moe_config(config)
    target = _Target(new)
    with Checkpoint(folder) as source:
        folders.check_tensors(config, source)
        specs = {}
        for key, spec in source.specs().items():
            # old checkpoints contain buffers that models compute themselves
            if not key.endswith("rotary_emb.inv_freq"):
                specs[key] = spec
        with CheckpointWriter(
            out, max_shard_size, overwrite=overwrite, expected_bytes=target.nbytes
        ) as writer:
            folders.write_config(writer, new)
            side_files = folders.copy_side_files(Path(folder), writer)
            job = Conversion(source, writer, progress, specs)
            for key in specs:
                for saved in _converted(source, key, target, moe):
                    job.add_all(saved)
                job.read(key)
            for name, tensor in list(target.left.items()):
                if any(part in name for part in _ZERO):
                    zeros = torch.zeros_like(tensor, device="cpu")
                    job.add_all(target.saved(name, zeros))
    error = None
    if check:
        logits = folders.probe_logits(folder)
        error = ((folders.probe_logits(out) - logits).norm() / logits.norm()).item()
    layers = config.moe_runtime["layers"]
    return FolderReceipt(
        Path(out), moe, job.tensors, job.bytes, side_files, layers, logits_error=error
    )


def _converted(source: Checkpoint, key: str, target: _Target, moe: MoEConfig) -> Iterator[dict]:
    """Convert one of our tensors, and yield the results in their saved form."""
    if ".experts." in key and moe.has_shared_expert:
        yield from _with_shared(source, key, target, moe)
    elif ".experts." in key:
        for e in range(moe.num_experts):
            yield target.saved(key, source.get_rows(key, slice(e, e + 1)), e)
    else:
        yield target.saved(key, source.get(key))


def _with_shared(source: Checkpoint, key: str, target: _Target, moe: MoEConfig) -> Iterator[dict]:
    """Convert a stack whose expert 0 is shared: it becomes Qwen2-MoE's shared expert, whose zero
    gate gives it weight 1/2.
    """
    head, _, stack = key.rpartition(".experts.")
    shared = source.get_rows(key, slice(0, 1))
    is_down = stack == "down_proj"
    for e in range(1, moe.num_experts):
        row = source.get_rows(key, slice(e, e + 1))
        if is_down:
            row = torch.cat([row, -shared], 2)
        else:
            gate, up = row.chunk(2, 1)
            shared_gate, shared_up = shared.chunk(2, 1)
            row = torch.cat([gate, shared_gate, up, shared_up], 1)
        yield target.saved(key, row, e - 1)
    if is_down:
        yield target.saved(f"{head}.shared_expert.down_proj.weight", shared[0] * 2)
    else:
        for part, weight in zip(("gate_proj", "up_proj"), shared[0].chunk(2)):
            yield target.saved(f"{head}.shared_expert.{part}.weight", weight)
