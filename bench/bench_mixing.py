"""XFT's merge stage, where only the mixing logits train: a step against one of dense tuning, a
layer against the official form.

The official form keeps float32 stacks and merges them in every forward pass: softmax, mm, a cast,
three linears.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_step import train
from moe_runtime.bench.machine import CUDA, DEVICE, fits
from moe_runtime.config import MoEConfig
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.merging import merge_experts

KIND = "method"
TOKENS = 2048  # of a device's batch in the official hyperparameters: 2 rows of 1024
GPU_SHAPES = shapes.MIXING
CPU_SHAPES = {"coarse": shapes.CPU["coarse"]}


def pytest_generate_tests(metafunc):
    if "preset" in metafunc.fixturenames:
        metafunc.parametrize("preset", ["tiny" if metafunc.config.getoption("--tiny") else "small"])


def bench_mixing_step(interleaved, preset):
    """A whole step of the demo's model, its batch too: loss, backward and optimizer, of all weights
    or of the logits alone.
    """
    if CUDA:
        pytest.skip(
            "a model of the CPU's size: a GPU would be measured at waiting for its launches"
        )
    from papers.demo import PRESETS
    from papers.xft.recipe import load_recipe

    recipe = load_recipe(PRESETS[preset])
    dense, mergeable = (_demo_model(recipe, mergeable) for mergeable in (False, True))
    ids = torch.randint(
        0,
        recipe.pretrain.vocab_size,
        (recipe.tune.batch_size, recipe.data.max_length),
        device=DEVICE,
    )

    def step_of(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        return lambda: train(model, ids, optimizer)

    variants = {"dense SFT step (floor)": step_of(dense), "moe_runtime": step_of(mergeable)}
    interleaved(variants, tokens=ids.numel(), dtype=torch.float32)


def _demo_model(recipe, mergeable: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    from moe_runtime.methods import xft

    torch.manual_seed(0)
    preset = recipe.pretrain
    heads = max(preset.hidden_size // 32, 1)
    config = LlamaConfig(
        vocab_size=preset.vocab_size,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2 * recipe.data.max_length,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(DEVICE)
    if mergeable:
        xft.upcycle(model, **recipe.experts)
        xft.to_mergeable(model)
    return model.train()


class Official(torch.nn.Module):
    """The official code's merge stage of one layer: experts in float32, alpha's softmax, mm and a
    cast in each forward pass.
    """

    def __init__(self, layer: MergedMLP):
        super().__init__()
        weights = dict(layer.experts.named_parameters())
        gate, up = weights["gate_up_proj"].detach().float().chunk(2, 1)
        self.stacks = [
            w.flatten(1).contiguous() for w in (gate, up, weights["down_proj"].detach().float())
        ]
        self.shapes = [gate.shape[1:], up.shape[1:], weights["down_proj"].shape[1:]]
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
    """Forward, backward and a write to the logits, so that each call merges again, of one layer of
    bfloat16 experts.
    """
    tokens, H, I, E, _, _ = shape
    T = min(tokens, TOKENS)
    config = MoEConfig(hidden_size=H, intermediate_size=I, num_experts=E, top_k=2)
    with fits():
        ours = MergedMLP(config, dtype=torch.bfloat16, device=DEVICE)
        official = Official(ours)
        x, dout = (torch.randn(T, H, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        x.requires_grad_()
        w = {
            name: merge_experts(p, ours.alpha().detach())
            for name, p in ours.experts.named_parameters()
        }
        gate_up, down = (torch.nn.Parameter(w[name]) for name in ("gate_up_proj", "down_proj"))

    def dense():
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return torch.autograd.grad(F.linear(F.silu(gate) * up, down), [x, gate_up, down], dout)[0]

    def step_of(layer):
        def step():
            dx, dlogits = torch.autograd.grad(layer(x), [x, layer.mixing_logits], dout)
            with torch.no_grad():
                layer.mixing_logits.sub_(1e-3 * dlogits.sign())
            return dx

        return step

    variants = {
        "dense layer (floor)": dense,
        "moe_runtime": step_of(ours),
        "official": step_of(official),
    }
    # the experts for the merge and for alpha's gradient
    bytes = 2 * (2 * 3 * E * H * I + 5 * T * H)
    interleaved(
        variants,
        flops=18 * T * H * I,
        bytes=bytes,
        tokens=T,
        dtype=torch.bfloat16,
        compare="official",
    )
