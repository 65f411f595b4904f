"""Tensors that may be sharded over ranks."""

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered from all ranks, which must all call this; any other unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
