"""Random inputs of a case: sizes, dtypes, routings, and how tensors lie in memory."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_runtime.ops.dispatch import INTEGERS

LAYOUTS = ("plain", "transposed", "sliced", "offset", "expanded", "gaps")
ROUTINGS = ("random", "skip", "all", "twice", "halves", "dropped", "skewed", "none")
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
SIZES = (1, 2, 3, 7, 16, 17, 31, 33, 48)


def choose_experts(
    T: int, E: int, K: int, routing: str, rng: torch.Generator | None = None
) -> torch.Tensor:
    """Return ids [T, K] of E experts, drawn by `rng`, by default the global generator.

    random   distinct experts
    skip     distinct, none of them the last expert
    all      expert E // 2 for every token
    twice    two slots of a token have the same expert
    halves   every other token has expert 0 in all slots, the others expert 1
    dropped  some ids are -1 or beyond the last expert
    """
    pool = E - 1 if routing == "skip" else E
    idx = torch.rand(T, pool, generator=rng).argsort(1)[:, :K]
    if routing == "all":
        idx = torch.full((T, K), E // 2)
    elif routing == "halves":
        idx = (torch.arange(T) % min(2, E))[:, None].repeat(1, K)
    elif routing == "twice" and K > 1:
        idx[:, 1] = idx[:, 0]
    elif routing == "dropped":
        idx[::3, 0] = -1
        idx[1::4, -1] = E
        idx[2::5, 0] = E + 7
    return idx


def held(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the tensor's values in other memory; the gaps between them are NaN, or large integers.

    plain       contiguous
    transposed  the last two dimensions are swapped
    sliced      every second column of a wider tensor
    offset      behind other numbers
    expanded    the first slice along dimension 0, for all slices
    gaps        the rows are separated
    """
    if tensor.dim() == 0 or layout == "plain":
        return tensor.clone()
    if layout == "expanded":
        return tensor[:1].clone().expand(tensor.shape) if len(tensor) else tensor.clone()
    if layout == "transposed" and tensor.dim() > 1:
        swapped = tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        return swapped.transpose(-1, -2)
    *outer, width = tensor.shape
    if layout == "sliced":
        return _inside(tensor, (*outer, 2 * width), lambda whole: whole[..., 1::2])
    if layout == "gaps":
        return _inside(tensor, (*outer, width + 3), lambda whole: whole[..., :width])
    return _inside(tensor, (tensor.numel() + 7,), lambda whole: whole[5:-2].view(tensor.shape))


def _inside(tensor: torch.Tensor, shape: tuple[int, ...], view: Callable) -> torch.Tensor:
    unused = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    part = view(torch.full(shape, unused, dtype=tensor.dtype))
    part.copy_(tensor)
    return part


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on another device with the same strides, gaps included."""
    if device == tensor.device:
        return tensor.detach()
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Draw:
    """Draws what a case is made of; `dtype` is the dtype that is checked.

    `choose` selects one of several options, and `seed` determines all numbers.
    """

    def __init__(self, dtype: torch.dtype, choose: Callable[[Sequence], object], seed: int):
        self.dtype = dtype
        self.gate_dtype = torch.promote_types(dtype, torch.float32)
        self.choose = choose
        self.rng = torch.Generator().manual_seed(seed)

    @classmethod
    def numbered(cls, dtype: torch.dtype, number: int) -> "Draw":
        """Return draw `number`, which is the same on every machine.

        Consecutive numbers visit the options of every choice evenly (a Kronecker sequence): choice
        i follows the multiples of the square root of the i-th of PRIMES. Number 0 has the first
        option of all.
        """
        choices = itertools.count()

        def choose(options: Sequence):
            prime = PRIMES[next(choices) % len(PRIMES)]
            return options[int(number * math.sqrt(prime) % 1.0 * len(options))]

        return cls(dtype, choose, number)

    @property
    def unit(self) -> float:
        """The relative rounding error of the dtype."""
        return torch.finfo(self.dtype).eps

    def of(self, *options: Any) -> Any:
        """Return one of the options; the first is the simplest."""
        return self.choose(options)

    def flag(self) -> bool:
        """Return True or False."""
        return self.of(False, True)

    def size(self) -> int:
        """Return a size, often not a multiple of any block."""
        return self.of(*SIZES)

    def tokens(self) -> int:
        """Return a number of tokens, 0 included."""
        return self.of(1, 0, 2, 5, 13, 16, 29, 37)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return normal numbers in float64."""
        return torch.randn(shape, generator=self.rng, dtype=torch.float64)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Return numbers from 0 to 1 in float64."""
        return torch.rand(shape, generator=self.rng, dtype=torch.float64)

    def permutation(self, n: int) -> torch.Tensor:
        """Return the integers below n in random order."""
        return torch.randperm(n, generator=self.rng)

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values in a random layout, rounded to the dtype."""
        return held(tensor.to(self.dtype), self.of(*LAYOUTS))

    def floats(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normal numbers times `scale` in the dtype, in a random layout."""
        return self.held(scale * self.normal(*shape))

    def gates(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers in the gates' dtype, in a random layout."""
        return held(numbers.to(self.gate_dtype), self.of(*LAYOUTS))

    def ints(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return integers in a random dtype that holds them, in a random layout."""
        low = high = 0
        if tensor.numel():
            low = tensor.min().item()
            high = tensor.max().item()
        dtypes = []
        for dtype in INTEGERS:
            info = torch.iinfo(dtype)
            if info.min <= low and high <= info.max:
                dtypes.append(dtype)
        layouts = [layout for layout in LAYOUTS if layout != "expanded"]
        return held(tensor.to(self.of(*dtypes)), self.of(*layouts))

    def slots(self) -> tuple[torch.Tensor, int, str]:
        """Return ids [T, K], the number E of experts, and how the ids were chosen."""
        T = self.tokens()
        E = self.of(1, 2, 3, 5, 8)
        K = self.of(*(k for k in (1, 2, 3, 5, 0) if k <= E))
        routing = self.of(*ROUTINGS)
        if K == 0 or (routing == "skip" and K >= E):
            routing = "random"
        if routing == "skewed":
            ids = (self.uniform(T, K) ** 3 * E).long()
        elif routing == "none":
            ids = torch.full((T, K), -1)
        else:
            ids = choose_experts(T, E, K, routing, self.rng)
        return self.ints(ids), E, routing
