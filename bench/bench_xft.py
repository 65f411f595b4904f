"""XFT's tuning step (loss, backward, AdamW) at DeepSeek-Coder-1.3B's shape, upcycled to 8 experts,
6 per token; random weights.

All variants have the same model, batch and optimizer state, and differ in the MoE layers' code.
Ours and transformers' use the same router; "official" is the released code's layer, including its
gate. There is no router noise and no balance loss, so that all compute the same function, and no
gradient checkpointing, as in the released training script.
"""

import functools

import pytest
import torch
from torch import nn

from moe_runtime.bench import clock, shapes
from moe_runtime.bench.bench_layer import DTYPES, mixtral_experts
from moe_runtime.bench.bench_step import llama, train
from moe_runtime.bench.machine import CUDA, DEVICE, fits
from moe_runtime.bench.official import OfficialBlock

KIND = "step"
ROUNDS = 15 if CUDA else 3  # a round takes half a minute on a CPU
SIZES = (shapes.TUNING_GPU, shapes.TUNING_CPU, shapes.TUNING_TINY)


class TransformersBlock(nn.Module):
    """A MoE's router and transformers' experts, which share the MoE's parameters."""

    def __init__(self, moe, implementation: str):
        super().__init__()
        self.gate = moe.gate
        self.experts = mixtral_experts(
            moe.experts.gate_up_proj,
            moe.experts.down_proj,
            moe.config.top_k,
            implementation,
        )

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weight, idx, _ = self.gate(x)
        return self.experts(x, idx.long(), weight).view_as(hidden_states)


class XftModel:
    """The model, and each variant's layers."""

    def __init__(self, size, dtype):
        from moe_runtime.methods import xft

        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 100000.0}
        self.model = llama(
            size, dtype, max_position_embeddings=16384, rope_parameters=rope, use_cache=False
        ).train()
        xft.upcycle(
            self.model,
            num_experts=size.E,
            top_k=size.K,
        )
        self.ids = torch.randint(
            0,
            size.V,
            (size.rows, size.length),
            device=DEVICE,
        )
        moes = []
        for layer in self.model.model.layers:
            moes.append(layer.mlp)
        for parameter in (p for moe in moes for p in moe.experts.parameters()):
            nn.init.normal_(parameter, 0.0, 0.02)  # otherwise all experts would be the same
        self.blocks = {
            "moe_runtime": moes,
            "transformers eager": [TransformersBlock(moe, "eager") for moe in moes],
            "transformers grouped_mm": [TransformersBlock(moe, "grouped_mm") for moe in moes],
            "official": [OfficialBlock(moe) for moe in moes],
        }
        self.optimizers = self.make_optimizers()

    def make_optimizers(self) -> dict:
        """Return an AdamW for each variant.

        The official layers' parameters and states are views of the stacks'.
        """
        adamw = functools.partial(torch.optim.AdamW, lr=1e-6, fused=True)
        stacked = adamw(self.model.parameters())
        for parameter in self.model.parameters():
            stacked.state[parameter] = {
                "step": torch.zeros((), device=DEVICE),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        official = self.blocks["official"]
        moes = self.blocks["moe_runtime"]
        experts = {parameter for moe in moes for parameter in moe.experts.parameters()}
        others = [p for p in self.model.parameters() if p not in experts]
        separate = adamw(others + [part for block in official for part in block.parts()])
        for moe, block in zip(moes, official, strict=True):
            up = stacked.state[moe.experts.gate_up_proj]
            down = stacked.state[moe.experts.down_proj]
            share(
                separate,
                block.weight_gate,
                up,
                lambda t: t.chunk(2, 1)[0],
            )
            share(
                separate,
                block.weight_up,
                up,
                lambda t: t.chunk(2, 1)[1],
            )
            share(
                separate,
                block.weight_down,
                down,
                lambda t: t,
            )
        for parameter in others:
            separate.state[parameter] = stacked.state[parameter]
        return dict.fromkeys(self.blocks, stacked) | {"official": separate}

    def step_of(self, name: str):
        """Return a training step of the model with a variant's layers, as a function."""
        blocks = self.blocks[name]
        optimizer = self.optimizers[name]

        def step():
            for layer, block in zip(self.model.model.layers, blocks):
                layer.mlp = block
            return train(self.model, self.ids, optimizer)

        return step


def share(optimizer, parameters, state, part) -> None:
    """Set the optimizer state of each expert's parameter to views of the stack's state."""
    for e, parameter in enumerate(parameters):
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=DEVICE),
            "exp_avg": part(state["exp_avg"])[e],
            "exp_avg_sq": part(state["exp_avg_sq"])[e],
        }


def flops_of(size) -> int:
    """Return the FLOPs of a step's products: layers without router, causal attention, head."""
    per_token = (
        size.L * (4 * size.H**2 + 3 * size.K * size.H * size.I + size.length * size.H)
        + size.V * size.H
    )
    return 6 * size.T * per_token


@pytest.mark.parametrize("dtype", DTYPES)
def bench_xft_step(interleaved, size, dtype):
    with fits():
        tuned = XftModel(size, dtype)
        variants = {}
        for name in tuned.blocks:
            variants[name] = tuned.step_of(name)
        held = functools.partial(
            clock.held_bytes,
            tuned.model,
            tuned.optimizers["moe_runtime"],
        )
        interleaved(
            variants,
            flops=flops_of(size),
            tokens=size.T,
            dtype=dtype,
            held=held,
        )
