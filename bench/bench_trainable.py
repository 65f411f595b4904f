"""Forward and backward of a layer of which a fifth of the experts trains (ESFT), against training all of them."""

import pytest
import torch

from bench import shapes
from bench.bench_layer import Layer
from bench.conftest import DEVICE, fits
from moe_runtime.ops.moe_mlp import moe_mlp

pytestmark = pytest.mark.gpu
GPU_SHAPES = {name: shapes.GPU[name] for name in shapes.FINE}
SHARE = 5  # every fifth expert trains


def bench_partly_trained(interleaved, shape):
    with fits():
        layer = Layer(shape, torch.bfloat16)
        layer.buffers.clear()
    experts = torch.arange(0, shape.E, SHARE, device=DEVICE)
    mask = torch.zeros(shape.E, dtype=torch.bool, device=DEVICE)
    mask[experts] = True
    place = torch.full((shape.E,), -1, dtype=torch.int32, device=DEVICE)
    place[experts] = torch.arange(len(experts), dtype=torch.int32, device=DEVICE)
    apart = [torch.nn.Parameter(weight.detach()[experts]) for weight in (layer.up, layer.down)]
    frozen = [layer.up.detach(), layer.down.detach()]

    def step(weights, inputs, **options):
        out = moe_mlp(layer.x, *weights, layer.topk_weight, layer.topk_idx, **options)
        return torch.autograd.grad(out, [layer.x, *inputs, layer.topk_weight], layer.dout)

    stacks = [layer.up, layer.down]
    interleaved(
        {
            "all experts (floor)": lambda: step(stacks, stacks),
            "moe_runtime, a mask": lambda: step(stacks, stacks, trainable=mask),
            "moe_runtime, apart": lambda: step(frozen, apart, trainable=place, trained=tuple(apart)),
        }
    )
