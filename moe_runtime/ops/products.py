"""Products of matrices, in float32 where PyTorch's in bfloat16 are slow: on a CPU without AVX-512
they are 5 to 50 times as slow as those in float32.
"""

import torch
from torch import Tensor

SLOW = ("AVX2", "DEFAULT")


def is_slow(a: Tensor) -> bool:
    """Return whether this CPU multiplies matrices in a's dtype faster in float32."""
    if a.dtype is not torch.bfloat16 or not a.is_cpu:
        return False
    return torch.backends.cpu.get_cpu_capability() in SLOW


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute torch.mm."""
    if not is_slow(a):
        return torch.mm(a, b, out=out)
    product = torch.mm(a.float(), b.float())
    if out is None:
        return product.bfloat16()
    return out.copy_(product)


def addmm(c: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None, alpha: float = 1) -> Tensor:
    """Compute torch.addmm: c + alpha a b."""
    if not is_slow(a):
        return torch.addmm(c, a, b, alpha=alpha, out=out)
    total = torch.addmm(c.float(), a.float(), b.float(), alpha=alpha)
    if out is None:
        return total.bfloat16()
    return out.copy_(total)
