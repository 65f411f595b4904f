"""All implementations of a layer's experts for different numbers of tokens: from one, as in
generation, to training batches.

Forward without gradients; bench_tokens_backward.py adds the backward pass. Weights and routing are
those of bench_layer.py. Few tokens choose few experts, and only the bytes of used experts count.
"""

import pytest

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_layer import DTYPES, LayerVariants, measure, variants_of
from moe_runtime.bench.machine import CUDA, fits

KIND = "tokens"
ROUNDS = 15 if CUDA else 9
SWEPT = {name: shapes.GPU[name] for name in shapes.SWEPT}
CPU_SHAPES = shapes.sweep(shapes.CPU, shapes.SWEEP_CPU)
GPU_SHAPES = shapes.sweep(SWEPT, shapes.SWEEP_GPU)


def experts(shape, dtype, request) -> tuple[LayerVariants, dict, dict]:
    """Return a layer, its variants without floor and dense FFN, and notes on missing ones."""
    with fits():
        layer = LayerVariants(shape, dtype)
        variants, notes = variants_of(layer, request.config.getoption("--tiny"))
    variants.pop("dense FFN", None)
    layer.buffers.clear()
    return layer, variants, notes


@pytest.mark.parametrize("dtype", DTYPES)
def bench_tokens(interleaved, shape, dtype, request):
    measure(interleaved, *experts(shape, dtype, request))
