"""Read and write model folders without loading the model: configs, sizes, side files, names of
tensors.

load                          a config, tokenizer or model of a folder or a Hub id; never runs its
                              code
read_config, check_tensors    check that a folder holds a model that transformers knows, with all of
                              its tensors
upcycled_config, ...          the config of the model that a conversion makes; write_config
skeleton, to_saved            the names and layouts in which transformers saves experts, mostly a
                              matrix for each projection
Conversion, FolderReceipt     counts and result of a conversion
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from moe_runtime.config import Layer, MoEConfig, check_choice, check_shared_rate
from moe_runtime.hf.common.loading import check_folder, load, reason_of
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.models.configuration import (
    SHIM,
    become_mergeable,
    become_moe,
    check_mergeable,
    legacy_rope,
    moe_config,
    moe_fields,
    stock_config,
)
from moe_runtime.hf.models.families import FAMILIES, family_of, moe_shape, write_mlp
from moe_runtime.hf.models.modeling import model_classes
from moe_runtime.hf.models.swap import check_layers, mlp_error
from moe_runtime.io import files
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, check_keys
from moe_runtime.ops.merging import check_mixture, init_mixture, mixing, uniform_mixture


def _build(config, cls: type | None = None) -> nn.Module:
    """Build a config's model on the meta device, of the class `cls` if given; raises ValueError if
    transformers cannot.
    """
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            if cls is None:
                return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return cls._from_config(config)
    # model classes raise various errors, for indivisible sizes or an unknown activation
    except Exception as error:
        where = f" of {config.name_or_path}" if config.name_or_path else ""
        raise ValueError(
            f"config.json{where} does not describe a {config.model_type} model: "
            f"{reason_of(error)}. Pass a causal language model saved by transformers"
        ) from error


def read_layer(folder: Path) -> Layer:
    """Return the sizes of the MoE layers from a config.json, ours or transformers'; 0 for those
    that a dense model lacks.
    """
    check_folder(folder)
    values = files.read_json(Path(folder) / "config.json")
    if isinstance(block := values.get("moe_runtime"), dict):
        c = MoEConfig.from_dict(block.get("config"))
        return Layer(
            c.hidden_size, c.intermediate_size, c.num_experts, c.top_k, c.has_shared_expert, c.gated
        )
    values = values.get("text_config") or values

    def first(*names: str) -> int:
        return next(filter(None, map(values.get, names)), 0)

    return Layer(
        first("hidden_size"),
        first(
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "intermediate_size",
            "ffn_hidden_size",
        ),
        first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        first("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"),
    )


# files with weights, which are not copied
_LEFT_OUT = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".index.json",
)
# nor are files that are rewritten or describe the old weights: cards, records, and logs of their
# training
_OF_THESE = (
    "config.json",
    f"{SHIM}.py",
    "README.md",
    "adapter_config.json",
    "expert_cfg.json",
    "expert.json",
    "router.json",
    "router_stats.csv",
    "trainer_state.json",
    "all_results.json",
    "train_results.json",
    "eval_results.json",
)


def read_config(folder: StrPath) -> PreTrainedConfig:
    """Return the transformers config of a model folder; raises ValueError for anything else."""
    if not Path(folder, "config.json").is_file():
        raise ValueError(
            f"Folder {str(folder)!r} has no config.json. Pass the folder of a transformers model"
        )
    return load(AutoConfig, folder)


def config_for_folder(config: PreTrainedConfig, **settings: Any) -> MoEConfig:
    """Return the MoEConfig for a dense model's config; `settings` are the other fields of
    MoEConfig.
    """
    return MoEConfig(**moe_shape(family_of(config), config), **settings)


def upcycled_config(
    config: PreTrainedConfig, moe: MoEConfig, layers: Sequence[int] | None = None
) -> PreTrainedConfig:
    """Return the config of the upcycled model, as after `swap.dense_to_moe`."""
    classes = model_classes(family_of(config).model_type)
    new = copy.deepcopy(config)
    layers = check_layers(config.num_hidden_layers, layers)
    fields = moe_fields(
        moe,
        layers=layers,
        base_model_type=config.model_type,
        base_architecture=classes.base_causal_lm.__name__,
    )
    become_moe(new, classes, fields)
    return new


def mergeable_config(config: PreTrainedConfig, shared_rate: float, soup: bool) -> PreTrainedConfig:
    """Return the config of an upcycled model after `swap.moe_to_mergeable`; raises the same
    ValueErrors.
    """
    check_mergeable(moe_config(config), soup)
    check_shared_rate(shared_rate)
    new = copy.deepcopy(config)
    become_mergeable(new, shared_rate, soup)
    return new


def dense_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the stock config of an upcycled model's base, without our fields."""
    return stock_config(config, model_classes(config.moe_runtime["base_model_type"]).base_config)


def write_config(writer: CheckpointWriter, config: PreTrainedConfig) -> None:
    """Write config.json with both formats of the rotary keys and, for an upcycled model, the file
    named by its auto_map.
    """
    values = json.loads(config.to_json_string(use_diff=True))
    writer.write_text(
        "config.json", json.dumps(values | legacy_rope(values), indent=2, sort_keys=True) + "\n"
    )
    if hasattr(config, "moe_runtime"):
        writer.write_text(f"{SHIM}.py", config.shim())


def side_files(source: Path) -> list[str]:
    """Return the names of the files that a model derived from this folder also needs: tokenizer,
    generation config, ...
    """
    names = {path.name for path in source.iterdir() if path.is_file()}
    files.check_names(names, source)  # a receipt names them
    hidden = (".", "training_args")
    names = names.difference(_OF_THESE)
    return sorted(n for n in names if not (n.endswith(_LEFT_OUT) or n.startswith(hidden)))


def copy_side_files(source: Path, writer: CheckpointWriter) -> list[str]:
    """Copy `side_files`; return their names."""
    names = side_files(source)
    for name in names:
        writer.copy_file(source / name)
    return names


def check_tensors(config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError unless a folder's tensors match the model of its config by name and shape.

    Tied weights may be missing, and tensors that transformers ignores (old rotary buffers) may be
    present.
    """
    specs = checkpoint.specs()
    model = skeleton(config)
    # transformers renames some keys between file and model (GPT-NeoX's embed_out)
    renamings = []
    for renaming in get_checkpoint_conversion_mapping(type(model).__name__) or ():
        renamings += zip(renaming.source_patterns, renaming.target_patterns)
    ignored = [r"rotary_emb\.inv_freq$", r"\.masked_bias$"]
    ignored += model._keys_to_ignore_on_load_unexpected or ()
    saved = {}
    for key, spec in specs.items():
        for source, target in renamings:
            key = re.sub(source, target, key)
        if not any(re.search(pattern, key) for pattern in ignored):
            saved[key] = spec
    optional = {name for name, _ in model.named_buffers()}
    optional.update(getattr(model, "all_tied_weights_keys", ()))
    expected = {}
    for key, tensor in model.state_dict().items():
        if key in saved:
            expected[key] = TensorSpec(tuple(tensor.shape), saved[key].dtype)
        elif key not in optional:
            expected[key] = TensorSpec(tuple(tensor.shape), tensor.dtype)
    check_keys(saved, expected, source=checkpoint.path)


def stock_mlp_error(config: PreTrainedConfig, weights: dict[str, Tensor], layer: int = 0) -> float:
    """Return the relative difference between transformers' MLP with `weights` (see `read_mlp`) and
    our formula, in float64.
    """
    family = FAMILIES[config.model_type]
    with torch.device("meta"):
        stock = model_classes(config.model_type).base_causal_lm(copy.deepcopy(config))
    mlp = stock.get_submodule(family.path.format(layer))
    write_mlp(mlp, family, weights)
    return mlp_error(mlp, family)


def probe_logits(source: nn.Module | StrPath) -> Tensor:
    """Return the float32 logits of a fixed batch of random token ids; `source` is a model, or its
    folder.
    """
    model = source
    if not isinstance(source, nn.Module):
        model = load(AutoModelForCausalLM, source)
    config = model.config.get_text_config()
    length = min(32, getattr(config, "max_position_embeddings", None) or 32)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits.float()
    model.train(training)
    return logits


def skeleton(config: PreTrainedConfig) -> nn.Module:
    """Return the model of a config on the meta device, of the config's class."""
    model = _build(config, getattr(transformers, (config.architectures or [""])[0], None))
    # cache what transformers looks up for every tensor of a model that was not loaded
    model._weight_conversions = family_conversions(model)
    return model


def family_conversions(model: nn.Module) -> list:
    """Return transformers' conversions between the files of a model's family and its tensors."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [one for one in conversions if not isinstance(one, PrefixChange)]


def to_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `save_pretrained` would write of these tensors of `model`; rows [n, ...] may
    stand for a stack of experts.
    """
    return revert_weight_conversion(model, dict(tensors))


SHARD = 2 * 2**30
Progress = Callable[[int, int], None]  # bytes of the source done, bytes in all


class FolderReceipt(NamedTuple):
    """What a conversion of folders wrote.

    Attributes:
        path: The folder.
        config: Of the MoE layers.
        tensors: Number of tensors.
        bytes: Bytes of all tensors.
        side_files: Names of copied files: tokenizer and so on.
        layers: Numbers of the layers with experts.
        mlp_error: Upcycling: relative error of the first, middle and last MLP against the formula.
        alpha: Merging: the coefficients [L, E].
        mixing: Merging: whether these are initial or learned.
        logits_error: Export: relative error of the logits, if it was measured.
    """

    path: Path
    config: MoEConfig
    tensors: int
    bytes: int
    side_files: list[str]  # copied: tokenizer and so on
    layers: list[int]
    # upcycling: first, middle and last MLP against the formula, relative
    mlp_error: float | None = None
    alpha: list[list[float]] | None = None  # merging: [L, E]
    mixing: str | None = None  # merging: whether these are initial or learned
    logits_error: float | None = None  # export: relative, if measured


class Conversion:
    """Counts of a conversion while it iterates over the source's keys: bytes read and tensors
    written.

    `source` has the reading interface of Checkpoint; `specs` are those of the tensors that are
    read, by default all.
    """

    def __init__(
        self,
        source: Checkpoint,
        writer: CheckpointWriter,
        progress: Progress | None,
        specs: dict[str, TensorSpec] | None = None,
    ):
        self.source = source
        self.writer = writer
        self.progress = progress
        self.specs = specs or source.specs()
        self.total = sum(spec.nbytes for spec in self.specs.values())
        self.done = self.tensors = self.bytes = 0

    def add(self, key: str, tensor: Tensor) -> None:
        """Write a tensor of the target."""
        self.writer.add(key, tensor)
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()

    def add_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of the target, by name."""
        for key, tensor in tensors.items():
            self.add(key, tensor)

    def read(self, *keys: str) -> None:
        """Report tensors of the source as done."""
        self.done += sum(self.specs[key].nbytes for key in keys)
        if self.progress is not None:
            self.progress(self.done, self.total)


def rewrite(
    checkpoint: Checkpoint,
    out: StrPath,
    tensor: Callable[[str], Tensor],
    *,
    max_shard_size: int | str,
    overwrite: bool,
    progress: Progress | None,
) -> tuple[Conversion, list[str]]:
    """Rewrite a model's folder to `out`, atomically: each tensor is the result of `tensor(name)`,
    other files are copied.

    Returns the receipt and the names of the other files.
    """
    base = Path(checkpoint.path)
    total = sum(spec.nbytes for spec in checkpoint.specs().values())
    with CheckpointWriter(out, max_shard_size, overwrite=overwrite, expected_bytes=total) as writer:
        names = [name for name in ("config.json", f"{SHIM}.py") if (base / name).is_file()]
        for name in names:
            writer.copy_file(base / name)
        names += copy_side_files(base, writer)
        job = Conversion(checkpoint, writer, progress)
        for key in checkpoint.keys():
            job.add(key, tensor(key))
            job.read(key)
    return job, names


def open_upcycled(
    source: StrPath, stage: str | None = None
) -> tuple[PreTrainedConfig, MoEConfig, dict[str, int]]:
    """Return config, MoEConfig and {path of an upcycled MLP: layer} of an upcycled folder, at
    `stage` if given.
    """
    config = read_config(source)
    block = getattr(config, "moe_runtime", None)
    saved = block.get("stage") if isinstance(block, dict) else None
    if saved is None or stage not in (None, saved):
        kind = "an upcycled model" if saved is None else f"a model of stage {stage!r}"
        raise ValueError(
            f"Expected the folder of {kind}, but {str(source)!r} has model_type "
            f"{config.model_type!r}, stage {saved!r}"
        )
    moe = moe_config(config)
    check_choice("base_model_type", block["base_model_type"], tuple(FAMILIES))
    family = FAMILIES[block["base_model_type"]]
    return config, moe, {family.path.format(layer): layer for layer in block["layers"]}


def mixture_of(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    moe: MoEConfig,
    path: str,
    shared_rate: float = 0.75,
) -> Tensor:
    """Return alpha [E] of a layer for its stage: INIT's at `shared_rate`, the learned one, or EWA's
    mean.
    """
    block = config.moe_runtime
    if block["stage"] == "ewa":
        return uniform_mixture(moe.num_experts)
    if block["stage"] == "moe":
        return init_mixture(moe, shared_rate)
    learned = checkpoint.get(f"{path}.mixing_logits")
    alpha = mixing(learned, None if block["soup"] else block["shared_rate"])
    return check_mixture(alpha, f"{path} of {checkpoint.path}")


def expert_rows(checkpoint: Checkpoint, key: str) -> Iterator[Tensor]:
    """Read the stack `key` [E, ...] expert by expert."""
    return (checkpoint.get_rows(key, e) for e in range(checkpoint.specs()[key].shape[0]))
