"""XFT's merge stage, where only the mixing logits train: a step against one of dense tuning, and a
layer against the official code's.

The official code keeps float32 stacks and merges them in every forward pass: softmax, mm, a cast,
three linears.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_step import llama, train
from moe_runtime.bench.machine import CUDA, DEVICE, fits, random
from moe_runtime.config import MoEConfig
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.merging import merge_experts

KIND = "method"
TOKENS = 2048  # per device in the official hyperparameters: 2 sequences of 1024
GPU_SHAPES = shapes.MIXING
CPU_SHAPES = {"coarse": shapes.CPU["coarse"]}


SIZES = (shapes.MIXING_STEP, shapes.MIXING_STEP, shapes.MIXING_TINY)


def bench_mixing_step(interleaved, size):
    """A training step of a small model (loss, backward, optimizer), for all weights or for the
    mixing logits only.
    """
    if CUDA:
        pytest.skip("the model is too small for a GPU, whose time would be that of the launches")
    from moe_runtime.methods import xft

    ids = torch.randint(
        0,
        size.V,
        (size.rows, size.length),
        device=DEVICE,
    )
    variants = {}
    for name in ("dense SFT step (floor)", "moe_runtime"):
        torch.manual_seed(0)
        model = llama(size, torch.float32, tie_word_embeddings=True)
        if name == "moe_runtime":
            xft.upcycle(
                model,
                num_experts=size.E,
                top_k=size.K,
            )
            xft.to_mergeable(model)
        learned = [p for p in model.train().parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=1e-4)
        variants[name] = functools.partial(train, model, ids, optimizer)
    interleaved(
        variants,
        tokens=ids.numel(),
        dtype=torch.float32,
    )


class Official(torch.nn.Module):
    """The official code's merge stage of one layer."""

    def __init__(self, layer: MergedMLP):
        super().__init__()
        weights = dict(layer.experts.named_parameters())
        self.stacks = []
        self.shapes = []
        for stack in (*weights["gate_up_proj"].chunk(2, 1), weights["down_proj"]):
            self.stacks.append(stack.detach().float().flatten(1).contiguous())
            self.shapes.append(stack.shape[1:])
        self.mixing_logits = torch.nn.Parameter(layer.mixing_logits.detach().clone())
        self.shared_rate = layer.shared_rate

    def forward(self, x):
        rest = (1 - self.shared_rate) * self.mixing_logits.softmax(-1)
        alpha = torch.cat([rest.new_full((1,), self.shared_rate), rest])[:, None]
        gate, up, down = (
            torch.mm(w.t(), alpha).view(shape).to(x.dtype)
            for w, shape in zip(self.stacks, self.shapes)
        )
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def bench_mixing_layer(interleaved, shape):
    """Forward and backward of a layer of bfloat16 experts, and a write to the logits, so that each
    call merges again.
    """
    tokens, H, I, E, _, _ = shape
    T = min(tokens, TOKENS)
    config = MoEConfig(hidden_size=H, intermediate_size=I, num_experts=E, top_k=2)
    with fits():
        ours = MergedMLP(config, dtype=torch.bfloat16, device=DEVICE)
        official = Official(ours)
        x = random(T, H).requires_grad_()
        dout = random(T, H)
        alpha = ours.alpha().detach()
        gate_up = torch.nn.Parameter(merge_experts(ours.experts.gate_up_proj, alpha))
        down = torch.nn.Parameter(merge_experts(ours.experts.down_proj, alpha))

    def dense():
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return torch.autograd.grad(
            F.linear(F.silu(gate) * up, down),
            [x, gate_up, down],
            dout,
        )[0]

    def step_of(layer):
        def step():
            dx, dlogits = torch.autograd.grad(
                layer(x),
                [x, layer.mixing_logits],
                dout,
            )
            with torch.no_grad():
                layer.mixing_logits.sub_(1e-3 * dlogits.sign())
            return dx

        return step

    interleaved(
        {
            "dense layer (floor)": dense,
            "moe_runtime": step_of(ours),
            "official": step_of(official),
        },
        flops=18 * T * H * I,
        bytes=2 * (2 * 3 * E * H * I + 5 * T * H),  # experts for the merge and alpha's gradient
        tokens=T,
        dtype=torch.bfloat16,
        compare="official",
    )
