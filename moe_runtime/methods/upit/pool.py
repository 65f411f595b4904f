"""Pool of experts, read together by rows of the same tensor, for inner products and children.

    G_ij = <W_i - W_base, W_j - W_base> over the MLP tensors of all layers, before the metric
    child = W_base + a D(W_j - W_base) + b D(W_k - W_base) of an MLP; else the parents' mean

The formulas are in `moe_runtime.ops.expansion`. Each pass reads each expert once. Memory holds
CHUNK elements of all experts together, and the tensor of a child that is being assembled.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_runtime.hf.common.sources import local_folder
from moe_runtime.hf.models.folders import Progress
from moe_runtime.io.checkpoint import Checkpoint, TensorSpec, check_keys
from moe_runtime.methods.upit.checkpoints import fingerprint
from moe_runtime.methods.upit.experts import Expert, open_expert, print_of
from moe_runtime.modules.moe import FLOATS
from moe_runtime.ops.expansion import dare_merge, gram, gram_row

CHUNK = 1 << 22  # elements read at once, over all experts
# PEFT's settings that define what A and B mean
_ADAPTER_FIELDS = (
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
)


class Mix(NamedTuple):
    """Parents and weights of a child."""

    parents: tuple[int, int]
    weights: tuple[float, float]
    drop: float
    seed: int


class _Rows(NamedTuple):
    """Rows of one tensor, in one dtype."""

    index: Any  # a slice, or ... for a tensor without dimensions
    start: int  # number of the first element
    experts: list[torch.Tensor]
    base: torch.Tensor | None


class Pool:
    """Experts open for reading; a context manager. Their MLPs are compared with those of `base`, an
    adapter's dense model.

    `wide` computes products in float64 with torch, for distances much smaller than the factors;
    products of adapters, which have no base, always do.
    """

    def __init__(
        self,
        base: str | Path,
        *,
        wide: bool = False,
        backend: str | None = None,
        device: str | torch.device | None = None,
    ):
        self.base_folder = base
        self.wide = wide
        self.backend = backend
        self.device = device
        self.experts: list[Expert] = []
        self.prints: list[str] = []
        self.specs: dict[str, TensorSpec] = {}  # of the first expert
        self.ffn: set[str] = set()
        self.base: Checkpoint | None = None
        self.base_hash: str | None = None  # as recorded by experts
        self.base_print: str | None = None
        self.progress: Progress | None = None
        self.done = 0
        self.total = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        if self.base is not None:
            self.base.close()

    def add(self, path: str | Path) -> None:
        """Open one more expert; raises ValueError unless its tensors match the first expert's and
        its MLPs the base's.
        """
        expert = open_expert(path, self.base_folder)
        if self.experts:
            _check_alike(self.experts[0], expert)
        else:
            self._begin(expert)
        recorded = expert.record.get("base_hash")
        if self.base_hash is not None and recorded not in (None, self.base_hash):
            raise ValueError(
                f"Base {self.base_folder} has other weights than the one that {expert.path} was "
                "trained from. Pass the folder of its base"
            )
        for key in self.ffn:
            if expert.spec(key).dtype not in FLOATS:
                raise ValueError(
                    f"{key} in {expert.path} must have a floating dtype, but is "
                    f"{expert.spec(key).dtype}"
                )
        self.experts.append(expert)
        self.prints.append(expert.fingerprint())

    def _begin(self, first: Expert) -> None:
        self.specs = first.specs()
        self.ffn = {key for key in self.specs if first.is_ffn(key)}
        is_dora = first.kind == "lora" and first.adapter.get("use_dora")
        if not self.ffn or is_dora:
            what = "uses DoRA (use_dora is True)" if is_dora else "has no tensor of an MLP"
            raise ValueError(
                f"Expert {first.path} {what}. Experts must differ in MLPs, and adapters must be "
                "plain LoRA"
            )
        if first.kind == "lora":
            self.wide = True
            return
        self.base = Checkpoint(local_folder(self.base_folder))
        self.base_specs = self.base.specs()
        self.base_hash = fingerprint(self.base)
        self.base_print = print_of(self.base)
        expected = {key: self.specs[key] for key in self.ffn}
        of_base = {key: spec for key, spec in self.base_specs.items() if first.is_ffn(key)}
        check_keys(_with_dtypes(of_base, expected), expected, source=self.base.path)

    def expect(self, count: int, progress: Progress | None) -> None:
        """Tell `progress` how many bytes growing to `count` experts will read."""
        self.progress = progress
        ffn = sum(self.specs[key].nbytes for key in self.ffn)
        self.total = len(self.experts) * ffn
        for number in range(len(self.experts), count):
            self.total += self.child_bytes + (number + 1) * ffn

    @property
    def child_bytes(self) -> int:
        """Bytes of the parents that making a child reads."""
        return 2 * sum(spec.nbytes for spec in self.specs.values())

    def products(self) -> torch.Tensor:
        """Return G [n, n] float64; each expert's MLPs are read once."""
        n = len(self.experts)
        total = torch.zeros(n, n, dtype=torch.float64)
        for rows in self._mlps():
            backend = "torch" if self.wide else self.backend
            total += gram(rows.experts, rows.base, backend=backend).cpu()
        return total

    def last_row(self) -> torch.Tensor:
        """Return the last expert's row of G, [n] float64; each expert's MLPs are read once."""
        total = torch.zeros(len(self.experts), dtype=torch.float64)
        for rows in self._mlps():
            *others, last = rows.experts
            total += gram_row(others, last, rows.base).cpu()
        return total

    def _mlps(self) -> Iterator[_Rows]:
        """Read rows of all MLPs of all experts, in the dtype of their products."""
        for key in self.specs:
            if key in self.ffn:
                for rows in self._walk(key, range(len(self.experts)), with_base=True):
                    if self.wide:
                        base = None if rows.base is None else rows.base.double()
                        rows = rows._replace(
                            experts=[part.double() for part in rows.experts], base=base
                        )
                    yield rows

    def child(self, mix: Mix) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a child's tensors, in the dtypes of the first parent's."""
        for key, spec in self.specs.items():
            out = torch.empty(spec.shape, dtype=self.experts[mix.parents[0]].spec(key).dtype)
            parts = self._grown(key, mix) if key in self.ffn else self._mean(key, mix)
            for index, part in parts:
                out[index] = part
            yield key, out

    def _grown(self, key: str, mix: Mix) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield rows of a child's MLP."""
        for rows in self._walk(key, mix.parents, with_base=True):
            part = dare_merge(
                *rows.experts,
                rows.base,
                weights=mix.weights,
                drop=mix.drop,
                seed=mix.seed,
                tensor=key,
                start=rows.start,
                backend=self.backend,
            )
            yield rows.index, part.cpu()

    def _mean(self, key: str, mix: Mix) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield rows of the parents' mean, rounded once from float32 or float64; integers are the
        first parent's.
        """
        for rows in self._walk(key, mix.parents, with_base=False):
            first, second = rows.experts
            if first.is_floating_point():
                wide = torch.promote_types(first.dtype, torch.float32)
                first = (first.to(wide) + second.to(wide)) / 2
            yield rows.index, first.cpu()

    def _walk(self, key: str, places: Sequence[int], with_base: bool) -> Iterator[_Rows]:
        """Read rows of a tensor of the experts at `places`, and of the base."""
        sources = [self.experts[e] for e in places]
        dtypes = [expert.spec(key).dtype for expert in sources]
        if with_base and self.base is not None:
            sources.append(self.base)
            dtypes.append(self.base_specs[key].dtype)
        dtype = functools.reduce(torch.promote_types, dtypes)
        shape = self.specs[key].shape
        n = len(places)
        width = math.prod(shape[1:])
        # DARE's random numbers come in fours
        step = max(CHUNK // (max(width, 1) * len(sources)) // 4 * 4, 4)
        for start in range(0, shape[0] if shape else 1, step):
            if shape:
                index = slice(start, min(start + step, shape[0]))
                parts = [source.get_rows(key, index) for source in sources]
            else:
                index = ...
                parts = [source.get(key) for source in sources]
            self.saw(sum(part.nbytes for part in parts[:n]))
            parts = [part.to(self.device, dtype) for part in parts]
            yield _Rows(index, start * width, parts[:n], parts[n] if parts[n:] else None)

    def saw(self, nbytes: int) -> None:
        """Count bytes as read."""
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _with_dtypes(
    specs: dict[str, TensorSpec], like: dict[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return `specs` with the dtypes of `like`, which may differ."""
    return {
        key: TensorSpec(spec.shape, like[key].dtype if key in like else spec.dtype)
        for key, spec in specs.items()
    }


def _form(expert: Expert) -> dict:
    """Return what all experts of a pool must share."""
    if expert.kind != "lora":
        return {"kind": "model"}
    return {"kind": "adapter"} | {field: expert.adapter.get(field) for field in _ADAPTER_FIELDS}


def _check_alike(first: Expert, other: Expert) -> None:
    """Raise ValueError unless two experts are of the same kind of model, with the same tensors."""
    ours = _form(first)
    theirs = _form(other)
    for field, value in ours.items():
        if value != theirs.get(field):
            raise ValueError(
                f"{field} must be the same for all experts, but is {theirs.get(field)!r} for "
                f"{other.path} and {value!r} for {first.path}"
            )
    check_keys(_with_dtypes(other.specs(), first.specs()), first.specs(), source=other.path)
