"""Products of matrices, in float32 where PyTorch's in bfloat16 are slow: on a CPU without AVX-512
they are 5 to 50 times as slow as those in float32.
"""

import functools

import torch
from torch import Tensor


@functools.cache
def _is_slow() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute torch.mm."""
    if a.dtype is not torch.bfloat16 or not a.is_cpu or not _is_slow():
        return torch.mm(a, b, out=out)
    product = torch.mm(a.float(), b.float())
    return product.bfloat16() if out is None else out.copy_(product)


def addmm(c: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None, alpha: float = 1) -> Tensor:
    """Compute torch.addmm: c + alpha a b."""
    if a.dtype is not torch.bfloat16 or not a.is_cpu or not _is_slow():
        return torch.addmm(c, a, b, alpha=alpha, out=out)
    total = torch.addmm(c.float(), a.float(), b.float(), alpha=alpha)
    return total.bfloat16() if out is None else out.copy_(total)
