"""Convert model folders of the released XFT code (ise-uiuc/xft) to ours and back, tensor by tensor;
docs/papers/xft-official.md.

    model.layers.{l}.mlp.                                   ours, in the same place
    calculator.experts.weight_{gate,up}.{e}.weight [I, H]   experts.gate_up_proj [E, 2I, H]
    calculator.experts.weight_down.{e}.weight      [H, I]   experts.down_proj [E, H, I]
    gate.gate_network.0.weight, .2.weight                   gate.weight [R, H], weight_out [R, R]
    gate.gate_network.weight (linear router)       [R, H]   gate.weight
    gate.weight_noise.weight                       [R, H]   gate.noise_weight
    average_weights                                [R]      mixing_logits, float32

The weighted model stores the experts in separate files, `ffn_layer_{l}.pt`: {"weight_gate": {e:
tensor}, ...}. Nothing is computed: a round trip in either direction is bit-identical.

These and `pytorch_model*.bin` are pickles. They are loaded with `weights_only=True`, which builds
tensors and containers and runs nothing, and mapped rather than read where torch can (its zip
format).
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch

from moe_runtime.config import MoEConfig, check_positive, one_line, shown
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.hf.models.folders import (
    SHARD,
    Conversion,
    FolderReceipt,
    Progress,
    expert_rows,
    open_upcycled,
)
from moe_runtime.io.checkpoint import INDEX as SAFE_INDEX
from moe_runtime.io.checkpoint import SINGLE, Checkpoint, CheckpointWriter, TensorSpec, check_keys
from moe_runtime.io.files import check_out_dir, check_regular, is_plain_name, read_json
from moe_runtime.methods.xft import official_config

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
# our stacks, of theirs
STACKS = {"gate_up_proj": ("weight_gate", "weight_up"), "down_proj": ("weight_down",)}
KINDS = ("weight_gate", "weight_up", "weight_down")
EXPERTS = "model.layers.{}.mlp.calculator.experts.{}.{}.weight"  # layer, kind, expert
MLP = "model.layers.{}.mlp"
# limit on expected tensors, since a damaged config could ask for arbitrarily many
MAX_NAMES = 10**6
# the weighted model's own MLP, which the released code writes at random and never uses
_PLACEHOLDERS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def load_tensors(file: Path) -> Mapping:
    """Load a file of torch.save that contains only tensors and containers; raises ValueError for
    any other.
    """
    check_regular(file)
    try:
        loaded = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
        if not isinstance(loaded, Mapping):
            raise TypeError(f"it holds a {type(loaded).__name__}")
    except Exception as error:  # an unpickler raises anything
        raise ValueError(
            f"{file} cannot be loaded ({one_line(error, 200)}). Pass a complete file with a dict "
            "of tensors, as written by torch.save. Other content of a pickle is never executed"
        ) from error
    return loaded


class TorchFiles:
    """Files of torch.save with Checkpoint's reading methods; one is open at a time, `flatten` turns
    it into {key: tensor}.

    Raises ValueError for files with anything but dense tensors, and for a key in two files.
    """

    def __init__(
        self, path: Path, names: Iterable[str], flatten: Callable[[Mapping, str], Mapping]
    ):
        self.path = path
        self._flatten = flatten
        self._specs: dict[str, TensorSpec] = {}
        self._files: dict[str, str] = {}
        self._close()
        for name in names:
            for key, tensor in self._load(name).items():
                is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
                if not isinstance(key, str) or not is_dense or tensor.is_meta or key in self._files:
                    raise ValueError(
                        f"{key} in {path / name} must be a dense tensor in one file only, but is a "
                        f"{type(tensor).__name__}"
                    )
                self._specs[key] = TensorSpec(tuple(tensor.shape), tensor.dtype)
                self._files[key] = name
        self._close()

    def keys(self) -> list[str]:
        """Return the keys file by file, in reading order."""
        return list(self._specs)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every tensor."""
        return self._specs

    def get(self, key: str) -> torch.Tensor:
        """Return one tensor, which may be memory-mapped."""
        return self._load(self._files[key])[key].detach()

    def _close(self) -> None:
        self._name = ""
        self._open: Mapping = {}

    def _load(self, name: str) -> Mapping:
        if name != self._name:
            self._close()  # free the previous file before loading the next
            self._open = self._flatten(load_tensors(self.path / name), name)
            self._name = name
        return self._open


def open_model(path: str | Path) -> Checkpoint | TorchFiles:
    """Open the tensors of a model folder: its safetensors if any, else `pytorch_model*.bin`."""
    path = Path(path)
    files = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if not files & {BIN, BIN_INDEX} or files & {SINGLE, SAFE_INDEX}:
        return Checkpoint(path)
    names = {BIN}
    if BIN_INDEX in files:
        weight_map = read_json(path / BIN_INDEX).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else ()
        if not names or not all(is_plain_name(name) and name in files for name in names):
            raise ValueError(
                f"weight_map of {path / BIN_INDEX} must name files in its folder, but names "
                f"{shown(list(names))}"
            )
    return TorchFiles(path, sorted(set(names)), lambda tensors, _: tensors)


def _flatten_experts(loaded: Mapping, name: str) -> dict:
    """Give the tensors of `ffn_layer_{l}.pt`, {weight_gate | weight_up | weight_down: {expert:
    tensor}}, the MoE's names.
    """
    layer = int(re.search(r"\d+", name)[0])
    flat = {}
    for kind, experts in loaded.items():
        if not isinstance(experts, Mapping):
            experts = {None: experts}
        for e, tensor in experts.items():
            flat[EXPERTS.format(layer, kind, e)] = tensor
    return flat


class _Source:
    """A folder of the released code, and its experts' files if separate; with Checkpoint's reading
    methods.
    """

    def __init__(self, path: Path, stage: str, *parts: Checkpoint | TorchFiles):
        self.path = path
        self.stage = stage
        self._specs: dict[str, TensorSpec] = {}
        self._parts = {}
        for part in parts:
            self._specs |= part.specs()
            self._parts |= dict.fromkeys(part.keys(), part)

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def get(self, key: str) -> torch.Tensor:
        return self._parts[key].get(key)


def import_official(
    source: str | Path,
    target: str | Path,
    *,
    ffn_folder: str | Path | None = None,
    rope_theta: float | None = None,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Convert a folder of the released XFT code: its MoE, or its weighted model to a mergeable one.

    Args:
        source: Folder of the released code.
        target: The folder to write.
        ffn_folder: Folder of a weighted model's `ffn_layer_{l}.pt`; None is `source`, or the one
            that its config names.
        rope_theta: Replaces the RoPE base that the released code uses: 10000 for an MoE, even if
            its config has another, then with a warning.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: With nothing written, for an unsupported option, tensors that do not match the
            config, pickles with more than tensors, or an existing target.
    """
    check_out_dir(target, overwrite, [source, ffn_folder])
    source = Path(source)
    values = official_config.read_values(source)
    opened = _open(source, values, ffn_folder)
    config = official_config.import_config(values, opened.stage, rope_theta)
    moe = moe_config(config)
    theirs, ours = _check(opened, config, moe)
    expected = sum(spec.nbytes for spec in ours.values())
    with CheckpointWriter(
        target, max_shard_size, overwrite=overwrite, expected_bytes=expected
    ) as writer:
        folders.write_config(writer, config)
        side_files = folders.copy_side_files(source, writer)
        job = Conversion(opened, writer, progress)
        for key in opened.specs():
            if key in theirs:
                continue
            if key in ours:
                job.add(key, opened.get(key))
            job.read(key)
        layers = list(range(config.num_hidden_layers))
        for layer in layers:
            _import_layer(job, layer, moe, opened.stage)
    return FolderReceipt(Path(target), moe, job.tensors, job.bytes, side_files, layers)


def _open(source: Path, values: dict, ffn_folder: str | Path | None) -> _Source:
    """Open a folder's tensors and infer its stage from them; raises ValueError for a folder without
    experts.
    """
    model = open_model(source)
    names = {key.partition(".mlp.")[2] for key in model.keys()}
    if any(name.startswith("calculator.experts.") for name in names):
        if values["model_type"] != official_config.MODEL_TYPE or ffn_folder is not None:
            raise ValueError(
                f"model_type is {values['model_type']!r} and ffn_folder is {ffn_folder}, but "
                f"{source} contains the experts. Use {official_config.MODEL_TYPE!r} and no "
                "ffn_folder"
            )
        return _Source(source, "moe", model)
    if "average_weights" not in names:
        raise ValueError(
            f"{source} has no tensor such as {EXPERTS.format(0, 'weight_gate', 0)} or "
            f"{MLP.format(0)}.average_weights. Pass an MoE or a weighted model of the released XFT "
            "code. Its merged models are Llama models, which transformers loads"
        )
    if ffn_folder is not None:
        folder = Path(ffn_folder)
    elif (source / "ffn_layer_0.pt").is_file():
        folder = source
    else:
        folder = Path(str(values.get("ffn_folder_path") or source))
    if not (folder / "ffn_layer_0.pt").is_file():
        raise ValueError(
            f"ffn_layer_0.pt was not found in {source} and {folder}. Pass the folder of the "
            "experts' files as ffn_folder"
        )
    num_layers = values.get("num_hidden_layers", 32)  # the default of Llama's config
    check_positive("num_hidden_layers", num_layers)
    # a generator, since a damaged config may have a huge number; the first missing file stops it
    files = (f"ffn_layer_{layer}.pt" for layer in range(num_layers))
    experts = TorchFiles(folder, files, _flatten_experts)
    return _Source(source, "mergeable", model, experts)


def _others(moe: MoEConfig, stage: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map our names of a layer's router tensors, or mixing logits, to theirs and the shapes."""
    R = moe.num_routed_experts
    H = moe.hidden_size
    if stage == "mergeable":
        return {"mixing_logits": ("average_weights", (moe.num_experts - 1,))}
    if moe.router == "mlp":
        names = {
            "gate.weight": ("gate.gate_network.0.weight", (R, H)),
            "gate.weight_out": ("gate.gate_network.2.weight", (R, R)),
        }
    else:
        names = {"gate.weight": ("gate.gate_network.weight", (R, H))}
    if moe.noisy_gate:
        names["gate.noise_weight"] = ("gate.weight_noise.weight", (R, H))
    return names


def _check(opened: _Source, config, moe: MoEConfig) -> tuple[dict, dict]:
    """Return the specs of their tensors of experts and routers, and of all of ours; raises
    ValueError, in terms of their names, if the tensors do not match the config.
    """
    specs = opened.specs()
    layers = config.num_hidden_layers
    E = moe.num_experts
    H = moe.hidden_size
    I = moe.intermediate_size
    if layers * E * 3 > max(len(specs), MAX_NAMES):
        raise ValueError(
            f"num_hidden_layers is {layers} and num_experts is {E} in config.json, more than the "
            f"{len(specs)} tensors in {opened.path}"
        )
    is_mergeable = opened.stage == "mergeable"
    present = {}  # of experts and routers
    ours = {}
    dtype = None  # experts must share one
    for key, spec in specs.items():
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            raise ValueError(
                f"{key} must be float16, bfloat16, float32 or float64, but is {spec.dtype}"
            )
        if ".mlp." in key:
            if not (is_mergeable and key.partition(".mlp.")[2] in _PLACEHOLDERS):
                present[key] = spec
            if ".experts." in key:
                dtype = dtype or spec.dtype
        # without those that the released code recomputes or ties
        elif not key.endswith(".rotary_emb.inv_freq") and not (
            key == "lm_head.weight" and config.tie_word_embeddings
        ):
            ours[key] = spec
    shapes = {"weight_gate": (I, H), "weight_up": (I, H), "weight_down": (H, I)}
    theirs = {}
    for layer in range(layers):
        path = MLP.format(layer)
        for kind, shape in shapes.items():
            for e in range(E):
                theirs[EXPERTS.format(layer, kind, e)] = TensorSpec(shape, dtype)
        ours[f"{path}.experts.gate_up_proj"] = TensorSpec((E, 2 * I, H), dtype)
        ours[f"{path}.experts.down_proj"] = TensorSpec((E, H, I), dtype)
        for name, (their_name, shape) in _others(moe, opened.stage).items():
            key = f"{path}.{their_name}"
            theirs[key] = TensorSpec(shape, specs[key].dtype if key in specs else dtype)
            ours[f"{path}.{name}"] = theirs[key]
            if is_mergeable:
                ours[f"{path}.{name}"] = TensorSpec(shape, torch.float32)
    check_keys(present, theirs, source=opened.path)
    folders.check_tensors(config, SimpleNamespace(path=opened.path, specs=lambda: ours))
    return theirs, ours


def _import_layer(job: Conversion, layer: int, moe: MoEConfig, stage: str) -> None:
    """Write one layer's experts as stacks, and its router or its mixing logits."""
    path = MLP.format(layer)
    E = moe.num_experts
    for name, kinds in STACKS.items():
        matrix = job.specs[EXPERTS.format(layer, kinds[0], 0)]
        stack = torch.empty(E, len(kinds), *matrix.shape, dtype=matrix.dtype)
        # in file order, expert by expert, since a layer may span two files
        for index, kind in enumerate(kinds):
            for e in range(E):
                key = EXPERTS.format(layer, kind, e)
                stack[e, index] = job.source.get(key)
                job.read(key)
        job.add(f"{path}.experts.{name}", stack.flatten(1, 2))
        del stack
    for name, (their_name, _) in _others(moe, stage).items():
        tensor = job.source.get(f"{path}.{their_name}")
        job.add(f"{path}.{name}", tensor.float() if stage == "mergeable" else tensor)
        job.read(f"{path}.{their_name}")


def export_official(
    source: str | Path,
    target: str | Path,
    *,
    keep_rope: bool = False,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Convert an upcycled or mergeable Llama folder for the released XFT code.

    The weighted model's `ffn_layer_{l}.pt` are in the target itself, whose absolute path is in
    config.json.

    Args:
        source: Folder at stage "moe" or "mergeable".
        target: The folder to write.
        keep_rope: Whether to allow an MoE with another rope_theta than 10000, which the released
            code would ignore.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: With nothing written, for settings that the released code does not support, or
            an existing target.
    """
    out = check_out_dir(target, overwrite, [source])
    config, moe, paths = open_upcycled(source)
    stage = config.moe_runtime["stage"]
    if stage not in ("moe", "mergeable"):
        raise ValueError(f"The stage of {source} must be 'moe' or 'mergeable', but is {stage!r}")
    values = official_config.export_values(config, out, keep_rope)
    with Checkpoint(source) as checkpoint:
        folders.check_tensors(config, checkpoint)
        expected = sum(spec.nbytes for spec in checkpoint.specs().values())
        with CheckpointWriter(
            target, max_shard_size, overwrite=overwrite, expected_bytes=expected
        ) as writer:
            writer.write_text("config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
            side_files = folders.copy_side_files(Path(source), writer)
            job = Conversion(checkpoint, writer, progress)
            for key in checkpoint.keys():
                if key.partition(".mlp.")[0] + ".mlp" not in paths:
                    job.add(key, checkpoint.get(key))
                    job.read(key)
            for path, layer in paths.items():
                for name, (their_name, _) in _others(moe, stage).items():
                    job.add(f"{path}.{their_name}", checkpoint.get(f"{path}.{name}"))
                    job.read(f"{path}.{name}")
                experts: dict[str, dict[int, torch.Tensor]] = {kind: {} for kind in KINDS}
                for kind, e, matrix in _matrices(checkpoint, path):
                    if stage == "moe":
                        job.add(EXPERTS.format(layer, kind, e), matrix)
                    else:
                        experts[kind][e] = matrix
                if stage == "mergeable":
                    torch.save(experts, writer.place(f"ffn_layer_{layer}.pt"))
                job.read(f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj")
    return FolderReceipt(
        Path(target), moe, job.tensors, job.bytes, side_files, list(paths.values())
    )


def _matrices(checkpoint: Checkpoint, path: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Read a layer's experts as (kind, expert, matrix)."""
    for name, kinds in STACKS.items():
        for e, rows in enumerate(expert_rows(checkpoint, f"{path}.experts.{name}")):
            for kind, matrix in zip(kinds, rows.chunk(len(kinds)), strict=True):
                # a copy, since safetensors rejects views that share storage
                yield kind, e, matrix.clone()
