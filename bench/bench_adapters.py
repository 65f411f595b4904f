"""PEFT's LoRA on the expert stacks of a stock layer, forward and backward: in our op, and in PEFT's
way, W + s B A in memory.

The stacks are frozen; gradients go to x and the adapters of both. PEFT's own runs on transformers'
grouped_mm, and on its loop where there are few experts. The same adapters are also measured on
stacks in NF4, which stay packed.
"""

import functools

import pytest
import torch

from moe_runtime.bench import shapes
from moe_runtime.bench.goals import NF4, PEFT
from moe_runtime.bench.machine import DEVICE, fits
from moe_runtime.modules import packed
from moe_runtime.ops.packed import pack

KIND = "layer"
ROUNDS = 5
SIZES = (shapes.ADAPTERS_GPU, shapes.ADAPTERS_CPU, shapes.ADAPTERS_TINY)
# experts up to which transformers' loop is run
RANK = 16
EAGER = 8


@pytest.fixture
def layer(size):
    """The wrapped experts module, the same over stacks in NF4, their config, and what they are
    called with.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import moe_runtime

    (T, H, I, E, K, _), dtype = size.shape, size.dtype
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K
    )
    config._experts_implementation = "grouped_mm"
    with fits(), torch.device(DEVICE):
        experts = Qwen3MoeExperts(config)
        for parameter in experts.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=dtype) * parameter.shape[2] ** -0.5
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora = LoraConfig(r=RANK, target_parameters=targets, init_lora_weights=False)
        moe_runtime.register()
        small = Qwen3MoeExperts(config)
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(experts, name).detach()
            packed.put(small, name, pack(stack, "nf4"), stack.shape, stack.dtype)
        wrappers = []
        for e in (experts, small):
            wrappers.append(
                get_peft_model(torch.nn.ModuleDict({"experts": e}), lora).base_model.model[
                    "experts"
                ]
            )
        x = torch.randn(T, H, dtype=dtype).requires_grad_()
        return wrappers, config, (x, torch.rand(T, E).topk(K).indices, torch.rand(T, K))


def bench_adapters(interleaved, size, layer):
    wrappers, config, args = layer
    learned = []
    for wrapper in wrappers:
        learned.append([args[0], *(p for p in wrapper.parameters() if p.requires_grad)])
    dout = torch.randn_like(args[0])

    def step(implementation, which=0):
        config._experts_implementation = implementation
        return torch.autograd.grad(wrappers[which](*args), learned[which], dout)

    names = {PEFT: "grouped_mm", "moe_runtime": "moe_runtime"} | (
        {"PEFT, eager": "eager"} if size.shape.E <= EAGER else {}
    )
    variants = {
        name: functools.partial(step, implementation) for name, implementation in names.items()
    }
    variants[NF4] = functools.partial(step, "moe_runtime", 1)
    T, H, I, E, K, _ = size.shape
    flops = 6 * T * K * H * I * 2  # forward and dx
    interleaved(
        variants,
        flops=flops,
        bytes=3 * E * H * I * size.dtype.itemsize * 2,
        tokens=T,
        dtype=size.dtype,
    )
