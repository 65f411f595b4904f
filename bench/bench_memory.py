"""Bytes per token that a layer's experts save for the backward pass; counted, so the same on every
device.

Each storage that autograd saves is counted once and entirely, without the experts' weights.
"formula KiB/token" is the documented maximum: s H + 2 s I K + 12 K bytes for elements of s bytes.
"kept MiB" includes what a package stores outside autograd.
"""

import pytest
import torch

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_layer import DTYPES, LayerVariants
from moe_runtime.bench.bench_tokens import experts

KIND = "memory"
ROUNDS = 3  # the times do not matter
GPU_SHAPES = {name: shapes.GPU[name]._replace(T=4096) for name in shapes.GPU}


def saved_bytes(function, besides) -> int:
    """Bytes of the storages that a call saves for the backward pass, except those of `besides`."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in besides}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    # `out` must live until here: the address of a freed storage could be reused
    assert out.requires_grad
    return sum(saved.values())


def formula(layer: LayerVariants) -> int:
    """Return the most bytes per token that our implementation saves."""
    _, H, I, _, K, _ = layer.shape
    return layer.x.element_size() * (H + 2 * I * K) + 12 * K


def count(layer: LayerVariants, variant) -> int:
    """Return the bytes that a variant saves, without weights, including its own if it has any."""
    weights = {layer.up, layer.down}
    if isinstance(variant, tuple):
        weights.update(variant[1])
    return saved_bytes(layer.forward(variant), weights - {layer.x, layer.topk_weight})


@pytest.mark.parametrize("dtype", DTYPES)
def bench_saved_memory(interleaved, shape, dtype, request):
    """The forward pass of a training step."""
    layer, variants, notes = experts(shape, dtype, request)
    details = {}
    functions = {}
    for name, variant in variants.items():
        try:
            row = {"saved KiB/token": count(layer, variant) / shape.T / 1024}
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {error}"
            continue
        if name.startswith("moe_runtime"):
            row["formula KiB/token"] = formula(layer) / 1024
        details[name] = row
        functions[name] = layer.forward(variant)
    interleaved(
        functions,
        tokens=shape.T,
        dtype=dtype,
        notes=notes,
        details=details,
    )
