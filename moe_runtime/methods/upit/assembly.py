"""Assemble experts and their routing vectors into one Mixture-of-Experts model, tensor by tensor.

UpIT (arXiv 2410.01610), Algorithm 1, lines 12 and 13, and Sec. 2.3:

    experts   E_1, ..., E_n side by side: layer l's stack has expert i's MLP at place i
    router    R^l = [r_1^l; ...; r_n^l], the routing vectors in the same order
    backbone  mean over the experts of all but the MLPs ("mean"), or the base's ("base")

The paper's R is [d_h, n], ours [n, H]. It leaves open how the router's outputs become weights; the
default is the top 2 of a softmax, renormalized, as in Mixtral, to which `upit.export_mixtral`
converts. Without vectors the router is initialized at random (the paper's "w/o Init").
`xft.folders.upcycle_folder` makes the baselines that upcycle copies of one model.

Adapters become LoRA experts over their base (`moe_runtime.methods.lora`), which replaces the mean
of the backbones.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_runtime.config import SHARED_GATES, MoEConfig, check_choice
from moe_runtime.hf.common.sources import local_folder
from moe_runtime.hf.models import families, folders, swap
from moe_runtime.hf.models.folders import SHARD, Conversion, FolderReceipt, Progress
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, check_keys
from moe_runtime.io.files import atomic_folder, check_out_dir, check_paths
from moe_runtime.methods.lora import to_lora_moe
from moe_runtime.methods.upit import models
from moe_runtime.methods.upit.experts import Expert, open_expert

BACKBONES = ("mean", "base")
# fields in which configs may differ without changing the logits
_ASIDE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "use_cache",
    "architectures",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}


def assemble(
    experts: Sequence[str | Path],
    vectors: Sequence[torch.Tensor] | torch.Tensor | None,
    out: str | Path,
    *,
    base: str | Path | None = None,
    top_k: int = 2,
    gate: str = "softmax_topk_renorm",
    balance_loss: str = "switch",
    balance_loss_coef: float = 0.01,
    backbone: str = "mean",
    seed: int = 42,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Write experts and routing vectors as one MoE model (UpIT, Algorithm 1, lines 11 to 13).

    Whole experts are streamed: memory holds one stack of experts and one shard. For adapters the
    base is loaded, and saved with them.

    Args:
        experts: Folders, all whole models or all adapters.
        vectors: [L, H] for each expert, which become the rows of the routers; None draws the
            routers.
        out: The folder to write.
        base: The dense model, in place of the one that adapters record. Required for whole experts
            with backbone "base".
        top_k: Experts per token.
        gate: A gate without a shared expert; the default is Mixtral's.
        balance_loss: "none", "cv2" or "switch".
        balance_loss_coef: Its weight in the training loss.
        backbone: Everything but the MLPs: "mean" of the experts, or of the "base".
        seed: Of routers that are drawn.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: If experts are of two kinds or two bases, or values are not finite.
    """
    check_choice("backbone", backbone, BACKBONES)
    check_paths("experts", experts)
    if gate in SHARED_GATES:
        raise ValueError(
            f"Gate {gate!r} has a shared expert, which has no routing vector. Use one without a "
            "shared expert"
        )
    check_out_dir(out, overwrite, [*experts, base])
    opened = [open_expert(path, base) for path in experts]
    first = opened[0] if opened else None
    if first is None or len({expert.kind == "lora" for expert in opened}) > 1:
        raise ValueError(
            "experts must be one or more folders, either all adapters or none, but got "
            f"[{', '.join(expert.kind for expert in opened)}]"
        )
    moe = folders.config_for_folder(
        first.config,
        num_experts=len(experts),
        top_k=top_k,
        gate=gate,
        balance_loss=balance_loss,
        balance_loss_coef=balance_loss_coef,
    )
    rows = None
    if vectors is not None:
        rows = _stacked(
            vectors, len(experts), first.config.num_hidden_layers, first.config.hidden_size
        )
    if first.kind == "lora":
        return _assemble_adapters(
            opened, rows, Path(out), moe, backbone, seed, max_shard_size, overwrite
        )
    _check_alike(opened)
    folders.check_tensors(first.config, first)
    source = _backbone(opened, base) if backbone == "base" else None
    made = _Made(opened, rows, moe, source, seed)
    with CheckpointWriter(
        out, max_shard_size, overwrite=overwrite, expected_bytes=made.expected()
    ) as writer:
        new_config = folders.upcycled_config(first.config, moe)
        new_config.moe_runtime = new_config.moe_runtime | {"method": "upit"}
        folders.write_config(writer, new_config)
        side_files = folders.copy_side_files(first.path, writer)
        job = Conversion(first, writer, progress)
        for key in first.keys():
            job.add_all(made.of(key))
            job.read(key)
    layers = list(range(first.config.num_hidden_layers))
    return FolderReceipt(Path(out), moe, job.tensors, job.bytes, side_files, layers)


def _stacked(vectors, n: int, L: int, H: int) -> torch.Tensor:
    """Return vectors [n, L, H] float32; raises ValueError for other shapes and for values that are
    not finite.
    """
    vectors = [vector.detach().float().cpu() for vector in vectors]
    shapes = [tuple(vector.shape) for vector in vectors]
    problem = None if shapes == [(L, H)] * n else f"are {shapes}"
    bad = [i for i, vector in enumerate(vectors) if not vector.isfinite().all()]
    if bad:
        problem = f"those of experts {bad} have NaN or infinite values"
    if problem is not None:
        raise ValueError(
            f"vectors must be finite and [{L}, {H}] for each of the {n} experts, but {problem}"
        )
    return torch.stack(vectors)


def _check_alike(opened: Sequence[Expert]) -> None:
    """Raise ValueError unless the experts differ only in the values of their tensors."""
    first = opened[0]
    fields = first.config.to_dict()
    for expert in opened[1:]:
        others = expert.config.to_dict()
        for name in sorted((fields.keys() | others.keys()) - _ASIDE):
            ours = fields.get(name)
            theirs = others.get(name)
            if ours != theirs:
                raise ValueError(
                    f"{name} of {expert.path} is {theirs!r}, but {ours!r} for {first.path}. Pass "
                    "experts of one base"
                )
        check_keys(expert.specs(), first.specs(), source=expert.path)


def _backbone(opened: Sequence[Expert], base: str | Path | None) -> Checkpoint:
    """Open the base, which has the experts' backbone in the same shapes and dtypes."""
    named = [expert for expert in opened if expert.base is not None]
    if base is None and not named:
        raise ValueError("backbone 'base' requires base=, the folder of the dense model")
    source = Checkpoint(local_folder(base or models.base_of(named)))
    first = opened[0]
    specs = source.specs()
    expected = {key: spec for key, spec in first.specs().items() if not first.is_ffn(key)}
    present = {key: spec for key, spec in specs.items() if key in expected}
    check_keys(present, expected, source=source.path)
    return source


class _Made:
    """Makes the target's tensors from the experts' keys."""

    def __init__(
        self,
        opened: Sequence[Expert],
        vectors: torch.Tensor | None,
        moe: MoEConfig,
        source: Checkpoint | None,
        seed: int,
    ):
        self.opened = opened
        self.vectors = vectors
        self.moe = moe
        self.source = source
        self.seed = seed
        self.family = opened[0].family
        self.specs = opened[0].specs()

    def expected(self) -> int:
        """Bytes of the target's tensors, routers aside."""
        total = 0
        for key, spec in self.specs.items():
            copies = len(self.opened) if self.opened[0].is_ffn(key) else 1
            total += spec.nbytes * copies
        return total

    def of(self, key: str) -> dict[str, torch.Tensor]:
        """Return the target's tensors for a key of the experts; a stack comes with its first part,
        the others give none.
        """
        mlp_key = families.locate_key(self.family, key)
        if mlp_key is None and self.source is not None:
            return {key: self.source.get(key)}
        if mlp_key is None:
            return {key: self._mean(key)}
        if mlp_key.part > 0:
            return {}
        layer = mlp_key.layer
        bias = self.moe.bias
        parts = families.mlp_keys(self.family, layer, bias)[mlp_key.name]
        sizes = [self.specs[part].shape[0] for part in parts]
        spec = self.specs[key]
        stack = torch.empty(len(self.opened), sum(sizes), *spec.shape[1:], dtype=spec.dtype)
        for expert, row in zip(self.opened, stack, strict=True):
            for part, rows in zip(parts, row.split(sizes), strict=True):
                rows.copy_(_finite(expert.get(part), part, expert))
        tensors = {families.expert_keys(self.family, layer, bias)[mlp_key.name]: stack}
        if mlp_key.name == "down_proj":
            if self.vectors is None:
                router = swap.draw_router(self.moe, self.seed, layer)["weight"]
            else:
                router = self.vectors[:, layer].contiguous()
            tensors[f"{self.family.path.format(layer)}.gate.weight"] = router.to(stack.dtype)
        return tensors

    def _mean(self, key: str) -> torch.Tensor:
        """Return the mean of a tensor over the experts, rounded once; exact if all are equal."""
        dtype = self.specs[key].dtype
        tensors = (_finite(expert.get(key), key, expert) for expert in self.opened)
        if not dtype.is_floating_point:
            return next(tensors)
        wide = torch.float64 if dtype.itemsize >= 4 else torch.float32
        total = next(tensors).to(wide)
        for tensor in tensors:
            total += tensor
        return total.div_(len(self.opened)).to(dtype)


def _finite(tensor: torch.Tensor, key: str, expert: Expert) -> torch.Tensor:
    if not tensor.isfinite().all():
        raise ValueError(
            f"{key} of {expert.path} has NaN or infinite values. Lower the learning rate"
        )
    return tensor


def _assemble_adapters(
    opened: Sequence[Expert],
    vectors: torch.Tensor | None,
    out: Path,
    moe: MoEConfig,
    backbone: str,
    seed: int,
    max_shard_size: int | str,
    overwrite: bool,
) -> FolderReceipt:
    """Write the base with the adapters as its LoRA experts."""
    for expert in opened:
        for key in expert.keys():
            _finite(expert.get(key), key, expert)
    model = models.load_base(opened, device="cpu")
    mlp_keys = map(opened[0].locate, opened[0].keys())
    layers = sorted({mlp_key.layer for mlp_key in mlp_keys if mlp_key is not None})
    rows = None if vectors is None else vectors[:, layers].transpose(0, 1).contiguous()
    to_lora_moe(
        model,
        moe,
        experts=[expert.path for expert in opened],
        backbone=backbone,
        vectors=rows,
        method="upit",
        seed=seed,
    )
    with atomic_folder(out, overwrite) as tmp:
        source = Path(local_folder(opened[0].base, ("config.json",)))
        side_files = list(folders.side_files(source))
        for name in side_files:
            shutil.copyfile(source / name, tmp / name)
        model.save_pretrained(tmp, max_shard_size=max_shard_size)
    tensors = list(model.parameters())
    size = sum(tensor.nbytes for tensor in tensors)
    return FolderReceipt(out, moe, len(tensors), size, side_files, layers)
