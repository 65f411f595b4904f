"""A layer with some trained experts (ESFT) against one with all trained: forward and backward, the
backward pass alone, a step.
"""

import torch

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_layer import LayerVariants
from moe_runtime.bench.machine import CUDA, DEVICE, fits
from moe_runtime.ops.moe_mlp import moe_mlp

KIND = "method"
GPU_SHAPES = {name: shapes.GPU[name] for name in shapes.FINE}
CPU_SHAPES = {"fine": shapes.CPU["fine"]}
DTYPE = torch.bfloat16 if CUDA else torch.float32
FIFTH = 5  # every fifth expert trains


class Partly(LayerVariants):
    """The layer with the weights of `experts` stored separately from the frozen stacks."""

    def __init__(self, shape, experts: range):
        super().__init__(shape, DTYPE)
        self.buffers.clear()
        chosen = torch.tensor(experts, device=DEVICE)
        self.mask = torch.zeros(
            shape.E,
            dtype=torch.bool,
            device=DEVICE,
        )
        self.mask[chosen] = True
        self.place = torch.full(
            (shape.E,),
            -1,
            dtype=torch.int32,
            device=DEVICE,
        )
        self.place[chosen] = torch.arange(
            len(experts),
            dtype=torch.int32,
            device=DEVICE,
        )
        self.stacks, self.frozen = [self.up, self.down], [self.up.detach(), self.down.detach()]
        self.apart = [torch.nn.Parameter(weight[chosen]) for weight in self.frozen]

    def ways(self) -> dict:
        """Return name -> (weights, inputs to differentiate, options).

        All experts train, or some in two ways, or none.
        """
        options = {"trainable": self.place, "trained": tuple(self.apart)}
        return {
            "all experts (floor)": (self.stacks, self.stacks, {}),
            "moe_runtime, a mask": (self.stacks, self.stacks, {"trainable": self.mask}),
            "moe_runtime, apart": (self.frozen, self.apart, options),
            "no expert": (self.frozen, [], {}),
        }

    def forward_of(self, weights, options):
        return moe_mlp(
            self.x,
            *weights,
            self.topk_weight,
            self.topk_idx,
            **options,
        )

    def both_of(self, weights, inputs, options):
        out = self.forward_of(weights, options)
        return torch.autograd.grad(
            out,
            [self.x, *inputs, self.topk_weight],
            self.dout,
        )

    def backward_of(self, weights, inputs, options):
        """Return a repeatable function: the backward pass of one forward pass."""
        out = self.forward_of(weights, options)
        inputs = [self.x, *inputs, self.topk_weight]
        return lambda: torch.autograd.grad(
            out,
            inputs,
            self.dout,
            retain_graph=True,
        )

    def step_of(self, weights, inputs, options):
        """Return a training step as a function: forward, backward, AdamW."""
        optimizer = torch.optim.AdamW(inputs, lr=1e-6, fused=True)

        def step():
            out = self.forward_of(weights, options)
            try:
                torch.autograd.backward(
                    out,
                    self.dout,
                    inputs=[self.x, *inputs],
                )
                optimizer.step()
            finally:  # gradients of a failed variant would add to the memory of others
                self.x.grad = None
                optimizer.zero_grad()

        return step


def _measure(interleaved, shape, names, make, experts: range | None = None) -> None:
    """Time `make` of the named ways; `experts` train, by default every FIFTH."""
    with fits():
        layer = Partly(shape, experts or range(0, shape.E, FIFTH))
    ways = layer.ways()
    variants = {name: make(layer, *ways[name]) for name in names}
    interleaved(variants, tokens=shape.T, dtype=DTYPE)


def _both(layer: Partly, *way):
    return lambda: layer.both_of(*way)


TWO = ("all experts (floor)", "moe_runtime, apart")
THREE = (*TWO, "moe_runtime, a mask")


def bench_partly_trained(interleaved, shape):
    _measure(interleaved, shape, THREE, _both)


def bench_partly_trained_backward(interleaved, shape):
    _measure(interleaved, shape, THREE, Partly.backward_of)


def bench_partly_trained_step(interleaved, shape):
    _measure(interleaved, shape, TWO, Partly.step_of)


def bench_selected_experts(interleaved, shape):
    """As many as in the released selections: 3.2 to 5.9 of 64 per layer."""
    count = max(1, shape.E * 6 // 64)
    experts = range(shape.E - count, shape.E)
    _measure(interleaved, shape, (*TWO, "no expert"), _both, experts)
