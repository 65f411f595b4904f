"""Time of the parts of a training step of bench_step.py's model, each summed over all layers.

Each part is measured with its forward and backward pass unless its name specifies one. The parts do
not add up exactly to the whole step, which also has residuals, launches and different cache states.
The experts' parts are also measured for transformers' implementations; the others are the same for
all.
"""

import copy

import pytest
import torch
from torch import nn

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_step import DTYPES, IMPLEMENTATIONS, LAYERS, stock, token_ids, train
from moe_runtime.bench.machine import CUDA, DEVICE, fits

KIND = "breakdown"
ROUNDS = 15 if CUDA else 7
CPU_SHAPES = shapes.STEPS_CPU
GPU_SHAPES = shapes.STEPS


class StepParts:
    """A model, its batch and the parts of its step as functions without arguments."""

    def __init__(self, shape, dtype):
        self.model = stock(shape, dtype, LAYERS)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=1e-6,
            fused=CUDA,
        )
        self.ids = token_ids(shape)
        self.mlps = [layer.mlp for layer in self.model.model.layers]
        self.x = torch.randn(
            *self.ids.shape,
            shape.H,
            device=DEVICE,
            dtype=dtype,
            requires_grad=True,
        )
        self.rows = self.x.detach().flatten(0, 1).requires_grad_()
        self.dout = torch.randn_like(self.rows)
        with torch.no_grad():
            self.routing = [mlp.gate(self.rows) for mlp in self.mlps]
        for _, weight, _ in self.routing:
            weight.requires_grad_()
        self.gradients = [torch.randn_like(parameter) for parameter in self.model.parameters()]

    def ends(self):
        """Embedding, last norm, head and loss."""
        model = self.model
        parts = (model.model.embed_tokens, model.model.norm, model.lm_head)
        logits = self.ids
        for part in parts:
            logits = part(logits)
        size = model.config.vocab_size
        loss = model.loss_function(
            logits=logits,
            labels=self.ids,
            vocab_size=size,
        )
        return torch.autograd.grad(loss, [p for part in parts for p in part.parameters()])

    def attention(self):
        """All layers without their MoE blocks."""
        layers = self.model.model.layers
        for layer in layers:
            layer.mlp = nn.Identity()
        try:
            leaves = [self.x, *(parameter for layer in layers for parameter in layer.parameters())]
            out = self.model.model(inputs_embeds=self.x).last_hidden_state
            return torch.autograd.grad(
                out,
                leaves,
                self.dout.view_as(out),
            )
        finally:
            for layer, mlp in zip(layers, self.mlps):
                layer.mlp = mlp

    def router(self):
        for mlp in self.mlps:
            _, weight, _ = mlp.gate(self.rows)
            torch.autograd.grad(
                weight,
                [self.rows, *mlp.gate.parameters()],
                torch.ones_like(weight),
            )

    def update(self):
        for parameter, gradient in zip(self.model.parameters(), self.gradients):
            parameter.grad = gradient
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()

    def experts(self, implementation: str):
        """Return two repeatable functions: the experts' forward pass and their backward pass."""
        layers = [beside(mlp.experts) for mlp in self.mlps]

        def forward():
            self.model.config._experts_implementation_internal = implementation
            outputs = []
            for layer, (_, weight, idx) in zip(layers, self.routing):
                outputs.append(layer(self.rows, idx, weight))
            return outputs

        outs = forward()
        leaves = []
        for layer, (_, weight, _) in zip(layers, self.routing):
            leaves.append([self.rows, weight, *layer.parameters()])

        def backward():
            for out, inputs in zip(outs, leaves):
                torch.autograd.grad(
                    out,
                    inputs,
                    self.dout,
                    retain_graph=True,
                )

        return forward, backward


def beside(experts: nn.Module) -> nn.Module:
    """Return the experts with separate parameters that share the same memory.

    The whole step writes to the original parameters, after which autograd would reject a retained
    graph that uses them.
    """
    new = copy.copy(experts)
    new._parameters = {
        name: nn.Parameter(weight.data) for name, weight in experts.named_parameters()
    }
    return new


@pytest.mark.parametrize("dtype", DTYPES)
def bench_step_breakdown(interleaved, shape, dtype):
    with fits():
        step = StepParts(shape, dtype)
        experts = {}
        for name, implementation in IMPLEMENTATIONS.items():
            experts[name] = step.experts(implementation)

    def whole():
        step.model.config._experts_implementation_internal = IMPLEMENTATIONS["moe_runtime"]
        train(step.model, step.ids, step.optimizer)

    ours = experts.pop("moe_runtime")
    parts = {
        "whole step": whole,
        "embedding, head and loss": step.ends,
        "attention and norms": step.attention,
        "router": step.router,
        "experts forward": ours[0],
        "experts backward": ours[1],
        "optimizer": step.update,
    }
    for name, (forward, backward) in experts.items():
        parts |= {f"{name}: experts forward": forward, f"{name}: experts backward": backward}
    with fits():
        interleaved(parts, dtype=dtype)
