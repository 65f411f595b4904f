"""All implementations of a layer's experts, forward and backward, for the numbers of tokens of
training batches.
"""

import pytest

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_layer import DTYPES, measure
from moe_runtime.bench.bench_tokens import SWEPT, experts
from moe_runtime.bench.machine import CUDA

KIND = "tokens"
ROUNDS = 15 if CUDA else 3  # transformers' loop over many experts takes seconds on a CPU
CPU_SHAPES = shapes.sweep(shapes.CPU, tuple(T for T in shapes.SWEEP_CPU if T >= 256))
GPU_SHAPES = shapes.sweep(SWEPT, tuple(T for T in shapes.SWEEP_GPU if T >= 256))


@pytest.mark.parametrize("dtype", DTYPES)
def bench_tokens_backward(interleaved, shape, dtype, request):
    measure(
        interleaved,
        *experts(shape, dtype, request),
        backward=True,
    )
