"""Convert model folders of the released XFT code (ise-uiuc/xft) to ours and back, tensor by tensor;
docs/xft-official.md.

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
from typing import NamedTuple

import torch

from moe_runtime.config import MoEConfig, check_positive, shown
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.hf.models.folders import (
    SHARD,
    Conversion,
    FolderReceipt,
    Progress,
    expert_rows,
    mixture_of,
    open_upcycled,
)
from moe_runtime.io.checkpoint import INDEX as SAFE_INDEX
from moe_runtime.io.checkpoint import SINGLE, Checkpoint, CheckpointWriter, TensorSpec, check_keys
from moe_runtime.io.files import check_out_dir, check_regular, is_plain_name, read_json
from moe_runtime.methods.xft import official_config
from moe_runtime.ops.merging import merge_rows

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
KINDS = ("weight_gate", "weight_up", "weight_down")
EXPERTS = "model.layers.{}.mlp.calculator.experts.{}.{}.weight"  # layer, kind, expert
MLP = "model.layers.{}.mlp"
# limit on expected tensors, since a damaged config could ask for arbitrarily many
MAX_NAMES = 10**6
# the weighted model's own MLP, which is never used
_PLACEHOLDERS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def load_tensors(file: Path) -> Mapping:
    """Load a file of torch.save that contains only tensors and containers; raises ValueError for
    any other.
    """
    cause = None
    check_regular(file)
    try:
        loaded = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
        reason = None if isinstance(loaded, Mapping) else f"holds a {type(loaded).__name__}"
    except Exception as error:  # an unpickler raises anything
        reason = f"cannot be loaded ({str(error).partition(chr(10))[0] or type(error).__name__})"
        cause = error
    if reason is not None:
        raise ValueError(
            f"{file} {reason}. Pass a complete file with a dict of tensors, as written by "
            "torch.save. Other content of a pickle is never executed"
        ) from cause
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
        self._place: dict[str, tuple[TensorSpec, str]] = {}
        self._name = ""
        self._open = {}
        for name in names:
            for key, tensor in self._load(name).items():
                plain = (
                    isinstance(tensor, torch.Tensor)
                    and tensor.layout == torch.strided
                    and not tensor.is_meta
                )
                if not isinstance(key, str) or not plain or key in self._place:
                    raise ValueError(
                        f"{key} in {path / name} must be a dense tensor in one file only, but is a "
                        f"{type(tensor).__name__}"
                    )
                self._place[key] = (TensorSpec(tuple(tensor.shape), tensor.dtype), name)
        self._name = ""
        self._open = {}

    def keys(self) -> list[str]:
        """Return the keys file by file, in reading order."""
        return list(self._place)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every tensor."""
        return {key: spec for key, (spec, _) in self._place.items()}

    def get(self, key: str) -> torch.Tensor:
        """Return one tensor, which may be memory-mapped."""
        return self._load(self._place[key][1])[key].detach()

    def _load(self, name: str) -> Mapping:
        if name == self._name:
            return self._open
        # free the previous file before loading the next
        self._name = ""
        self._open = {}
        self._open = self._flatten(load_tensors(self.path / name), name)
        self._name = name
        return self._open


def open_model(path: str | Path) -> Checkpoint | TorchFiles:
    """Open the tensors of a model folder: its safetensors if any, else `pytorch_model*.bin`."""
    path = Path(path)
    found = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if not found & {BIN, BIN_INDEX} or found & {SINGLE, SAFE_INDEX}:
        return Checkpoint(path)
    names = [BIN]
    if BIN_INDEX in found:
        weight_map = read_json(path / BIN_INDEX).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or any(not is_plain_name(name) or name not in found for name in names):
            raise ValueError(
                f"weight_map of {path / BIN_INDEX} must name files in its folder, but names "
                f"{shown(names)}"
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


class _Source(NamedTuple):
    """A folder of the released code, and its experts' files if separate; with Checkpoint's reading
    methods.
    """

    path: Path
    parts: tuple[Checkpoint | TorchFiles, ...]
    stage: str

    def specs(self) -> dict[str, TensorSpec]:
        return {key: spec for part in self.parts for key, spec in part.specs().items()}

    def keys(self) -> Iterator[str]:
        return (key for part in self.parts for key in part.keys())

    def get(self, key: str) -> torch.Tensor:
        return next(part for part in self.parts if key in part.specs()).get(key)


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
    """Convert a folder of the released XFT code to one of ours: an MoE to stage "moe", a weighted
    model to "mergeable".

    `ffn_folder` holds a weighted model's `ffn_layer_{l}.pt`; by default it is `source`,
    config.json's ffn_folder_path or a folder of that name next to `source`. `rope_theta` replaces
    the RoPE base that the released code uses: 10000 for an MoE, even if its config.json has another
    (then with a warning). Raises ValueError, with nothing written, for an unsupported option,
    tensors that do not match the config, pickles with more than tensors, or an existing target.
    """
    check_out_dir(target, overwrite, [source, ffn_folder])
    source, values = Path(source), official_config.read_values(source)
    opened = _open(source, values, ffn_folder)
    return _import(opened, values, target, rope_theta, max_shard_size, overwrite, progress)


def _import(
    opened: _Source, values: dict, target, rope_theta, max_shard_size, overwrite, progress
) -> FolderReceipt:
    config = official_config.import_config(values, opened.stage, rope_theta)
    moe = moe_config(config)
    layers = range(config.num_hidden_layers)
    specs = opened.specs()
    if len(layers) * moe.num_experts * len(KINDS) > max(len(specs), MAX_NAMES):
        raise ValueError(
            f"num_hidden_layers is {len(layers)} and num_experts is {moe.num_experts} in "
            f"config.json, more than the {len(specs)} tensors in {opened.path}"
        )
    for key, spec in specs.items():
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            raise ValueError(
                f"{key} must be float16, bfloat16, float32 or float64, but is {spec.dtype}"
            )
    wanted = [_wanted(moe, layer, opened.stage) for layer in layers]
    specs = _check(opened, config, wanted)
    expected = sum(spec.nbytes for spec in specs.values())
    with CheckpointWriter(
        target, max_shard_size, overwrite=overwrite, expected_bytes=expected
    ) as writer:
        folders.write_config(writer, config)
        side_files = folders.copy_side_files(opened.path, writer)
        job = Conversion(opened, writer, progress)
        later = {name for names in wanted for name in names}
        for key in opened.keys():
            if key in later:
                continue
            if key in specs:
                job.add(key, opened.get(key))
            job.read(key)
        for layer, names in zip(layers, wanted, strict=True):
            _import_layer(job, layer, moe, opened.stage)
            job.read(*names)
    return FolderReceipt(Path(target), moe, job.tensors, job.bytes, side_files, list(layers))


def _open(source: Path, values: dict, ffn_folder: str | Path | None) -> _Source:
    """Open a folder's tensors and infer its stage from them; raises ValueError for a folder without
    experts.
    """
    model = open_model(source)
    reason = None
    names = {key.partition(".mlp.")[2] for key in model.keys()}
    is_moe = any(name.startswith("calculator.experts.") for name in names)
    configured = str(values.get("ffn_folder_path") or source)
    if ffn_folder is not None:
        places = [Path(ffn_folder)]
    else:
        places = [source, Path(configured), source.parent / Path(configured).name]
    folder = next((place for place in places if (place / "ffn_layer_0.pt").is_file()), None)
    if is_moe and (values["model_type"] != official_config.MODEL_TYPE or ffn_folder is not None):
        reason = (
            f"model_type is {values['model_type']!r} and ffn_folder is {ffn_folder}, but {source} "
            f"contains the experts. Use {official_config.MODEL_TYPE!r} and no ffn_folder"
        )
    elif not is_moe and "average_weights" not in names:
        reason = (
            f"{source} has no tensor such as {EXPERTS.format(0, KINDS[0], 0)} or "
            f"{MLP.format(0)}.average_weights. Pass an MoE or a weighted model of the released XFT "
            "code. Its merged models are Llama models, which transformers loads"
        )
    elif not is_moe and folder is None:
        looked = ", ".join(map(str, dict.fromkeys(places)))
        reason = (
            f"ffn_layer_0.pt was not found in {looked}. Pass the folder of the experts' files as "
            "ffn_folder"
        )
    if reason is not None:
        raise ValueError(reason)
    if is_moe:
        return _Source(source, (model,), "moe")
    num_layers = values.get("num_hidden_layers", 32)  # the default of Llama's config
    check_positive("num_hidden_layers", num_layers)
    # a generator, since a damaged config may have a huge number; the first missing file stops it
    files = (f"ffn_layer_{layer}.pt" for layer in range(num_layers))
    return _Source(source, (model, TorchFiles(folder, files, _flatten_experts)), "mergeable")


def _router_names(moe: MoEConfig) -> dict[str, tuple[str, tuple[int, int]]]:
    """Map our name of each router tensor to theirs and the shape."""
    R = moe.num_routed_experts
    H = moe.hidden_size
    names = {"weight": ("gate_network.weight", (R, H))}
    if moe.router == "mlp":
        names = {
            "weight": ("gate_network.0.weight", (R, H)),
            "weight_out": ("gate_network.2.weight", (R, R)),
        }
    return names | ({"noise_weight": ("weight_noise.weight", (R, H))} if moe.noisy_gate else {})


def _wanted(moe: MoEConfig, layer: int, stage: str) -> dict[str, tuple[int, ...]]:
    """Return their keys of one layer's experts and router, or mixing logits, with the shapes."""
    H = moe.hidden_size
    I = moe.intermediate_size
    shapes = {"weight_gate": (I, H), "weight_up": (I, H), "weight_down": (H, I)}
    keys = {
        EXPERTS.format(layer, kind, e): shapes[kind]
        for kind in KINDS
        for e in range(moe.num_experts)
    }
    if stage == "mergeable":
        return keys | {f"{MLP.format(layer)}.average_weights": (moe.num_experts - 1,)}
    return keys | {
        f"{MLP.format(layer)}.gate.{name}": shape for name, shape in _router_names(moe).values()
    }


def _check(opened: _Source, config, wanted: list[dict]) -> dict[str, TensorSpec]:
    """Return the tensors to write; raises ValueError, in terms of their names, if the tensors do
    not match the config.
    """
    found = opened.specs()
    moe = moe_config(config)
    stage = opened.stage
    unused = {
        f"{MLP.format(layer)}.{name}" for layer in range(len(wanted)) for name in _PLACEHOLDERS
    }
    mlp = {
        key: spec
        for key, spec in found.items()
        if ".mlp." in key and not (stage == "mergeable" and key in unused)
    }
    # experts must share one dtype
    dtype = next((spec.dtype for key, spec in mlp.items() if ".experts." in key), torch.float32)
    want = {key: shape for names in wanted for key, shape in names.items()}
    check_keys(
        mlp,
        {
            k: TensorSpec(v, dtype if ".experts." in k or k not in mlp else mlp[k].dtype)
            for k, v in want.items()
        },
        source=opened.path,
    )
    # tensors that the released code recomputes or ties
    passed_over = {key for key in found if key.endswith(".rotary_emb.inv_freq")}
    passed_over |= {"lm_head.weight"} if config.tie_word_embeddings else set()
    specs = {
        key: spec for key, spec in found.items() if ".mlp." not in key and key not in passed_over
    }
    E = moe.num_experts
    H = moe.hidden_size
    I = moe.intermediate_size
    for layer in range(len(wanted)):
        path = MLP.format(layer)
        specs[f"{path}.experts.gate_up_proj"] = TensorSpec((E, 2 * I, H), dtype)
        specs[f"{path}.experts.down_proj"] = TensorSpec((E, H, I), dtype)
        if stage == "mergeable":
            specs[f"{path}.mixing_logits"] = TensorSpec((E - 1,), torch.float32)
            continue
        for ours, (theirs, _) in _router_names(moe).items():
            specs[f"{path}.gate.{ours}"] = found[f"{path}.gate.{theirs}"]
    folders.check_tensors(config, SimpleNamespace(path=opened.path, specs=lambda: specs))
    return specs


def _import_layer(job: Conversion, layer: int, moe: MoEConfig, stage: str) -> None:
    """Write one layer's experts as stacks, and its router or its mixing logits."""
    path = MLP.format(layer)
    get = job.source.get
    E = moe.num_experts
    H = moe.hidden_size
    I = moe.intermediate_size
    dtype = job.specs[EXPERTS.format(layer, "weight_down", 0)].dtype
    # in file order, expert by expert, since a layer may span two files
    stack = torch.empty(E, 2 * I, H, dtype=dtype)
    for kind, rows in (("weight_gate", slice(0, I)), ("weight_up", slice(I, 2 * I))):
        for e in range(E):
            stack[e, rows] = get(EXPERTS.format(layer, kind, e))
    job.add(f"{path}.experts.gate_up_proj", stack)
    del stack
    stack = torch.empty(E, H, I, dtype=dtype)
    for e in range(E):
        stack[e] = get(EXPERTS.format(layer, "weight_down", e))
    job.add(f"{path}.experts.down_proj", stack)
    if stage == "mergeable":
        job.add(f"{path}.mixing_logits", get(f"{path}.average_weights").float())
        return
    for ours, (theirs, _) in _router_names(moe).items():
        job.add(f"{path}.gate.{ours}", get(f"{path}.gate.{theirs}"))


def export_official(
    source: str | Path,
    target: str | Path,
    *,
    keep_rope: bool = False,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Convert an upcycled Llama folder for the released XFT code: stage "moe" to its MoE,
    "mergeable" to its weighted model.

    The weighted model's `ffn_layer_{l}.pt` are in `target` itself, whose absolute path is in
    config.json. `keep_rope` allows an MoE with another rope_theta than 10000, which the released
    MoE code would ignore. Raises ValueError, with nothing written, for settings that the released
    code does not support, or an existing target.
    """
    out = check_out_dir(target, overwrite, [source])
    config, moe, paths = open_upcycled(source)
    stage = config.moe_runtime["stage"]
    if stage not in ("moe", "mergeable"):
        raise ValueError(f"The stage of {source} must be 'moe' or 'mergeable', but is {stage!r}")
    values = official_config.export_values(config, out if stage == "mergeable" else None, keep_rope)
    with Checkpoint(source) as checkpoint:
        folders.check_tensors(config, checkpoint)
        sizes = [(key, spec.nbytes) for key, spec in checkpoint.specs().items()]
        merged = sum(size for key, size in sizes if ".experts." in key) // moe.num_experts
        expected = sum(size for _, size in sizes) + (merged if stage == "mergeable" else 0)
        with CheckpointWriter(
            target, max_shard_size, overwrite=overwrite, expected_bytes=expected
        ) as writer:
            writer.write_text("config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
            side_files = folders.copy_side_files(Path(source), writer)
            job = Conversion(checkpoint, writer, progress)
            for key in checkpoint.keys():
                path = key.partition(".mlp.")[0] + ".mlp"
                if path not in paths:
                    job.add(key, checkpoint.get(key))
                    job.read(key)
            for path, layer in paths.items():
                if stage == "moe":
                    _export_moe(job, path, layer, moe)
                else:
                    _export_weighted(job, path, layer, mixture_of(checkpoint, config, moe, path))
    return FolderReceipt(
        Path(target), moe, job.tensors, job.bytes, side_files, list(paths.values())
    )


def _experts(checkpoint: Checkpoint, path: str, kind: str) -> Iterator[torch.Tensor]:
    """Read one kind's matrices, expert by expert."""
    down = kind == "weight_down"
    key = f"{path}.experts.{'down_proj' if down else 'gate_up_proj'}"
    for rows in expert_rows(checkpoint, key):
        # copies, since safetensors rejects views that share storage
        yield rows if down else rows.chunk(2)[kind == "weight_up"].clone()


def _export_moe(job: Conversion, path: str, layer: int, moe: MoEConfig) -> None:
    for ours, (theirs, _) in _router_names(moe).items():
        job.add(f"{path}.gate.{theirs}", job.source.get(f"{path}.gate.{ours}"))
        job.read(f"{path}.gate.{ours}")
    for kind in KINDS:
        for e, matrix in enumerate(_experts(job.source, path, kind)):
            job.add(EXPERTS.format(layer, kind, e), matrix)
    job.read(f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj")


def _export_weighted(job: Conversion, path: str, layer: int, alpha: torch.Tensor) -> None:
    experts: dict[str, Mapping] = {
        kind: dict(enumerate(_experts(job.source, path, kind))) for kind in KINDS
    }
    torch.save(experts, job.writer.place(f"ffn_layer_{layer}.pt"))
    del experts
    job.add(f"{path}.average_weights", job.source.get(f"{path}.mixing_logits"))
    # the released code writes a random MLP that it never uses; ours is the merged one, which other
    # readers can use
    merged = merge_rows(expert_rows(job.source, f"{path}.experts.gate_up_proj"), alpha)
    for part, name in zip(merged.chunk(2), _PLACEHOLDERS):
        job.add(f"{path}.{name}", part.clone())
    del merged
    merged = merge_rows(expert_rows(job.source, f"{path}.experts.down_proj"), alpha)
    job.add(f"{path}.{_PLACEHOLDERS[2]}", merged)
    job.read(f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj", f"{path}.mixing_logits")
