"""PEFT's LoRA on the expert stacks of a stock layer, forward and backward: in our op, and as PEFT does, W + s B A made whole.

The stacks are frozen; gradients go to x and the adapters of both. PEFT's own runs on transformers' grouped_mm, and on its loop
where there are few experts.
"""

import functools

import pytest
import torch

from moe_runtime.bench import shapes
from moe_runtime.bench.goals import PEFT
from moe_runtime.bench.machine import DEVICE, fits

KIND = "layer"
ROUNDS = 5
SIZES = (shapes.ADAPTERS_GPU, shapes.ADAPTERS_CPU, shapes.ADAPTERS_TINY)
RANK, EAGER = 16, 8  # experts up to which transformers' loop is run


@pytest.fixture
def layer(size):
    """The wrapped experts module, its config, and what it is called with."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import moe_runtime

    (T, H, I, E, K, _), dtype = size.shape, size.dtype
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "grouped_mm"
    with fits(), torch.device(DEVICE):
        experts = Qwen3MoeExperts(config)
        for parameter in experts.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=dtype) * parameter.shape[2] ** -0.5
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora = LoraConfig(r=RANK, target_parameters=targets, init_lora_weights=False)
        model = get_peft_model(torch.nn.ModuleDict({"experts": experts}), lora)
        moe_runtime.register()
        x = torch.randn(T, H, dtype=dtype).requires_grad_()
        return model.base_model.model["experts"], config, (x, torch.rand(T, E).topk(K).indices, torch.rand(T, K))


def bench_adapters(interleaved, size, layer):
    wrapper, config, args = layer
    learned = [args[0], *(p for p in wrapper.parameters() if p.requires_grad)]
    dout = torch.randn_like(args[0])

    def step(implementation):
        config._experts_implementation = implementation
        return torch.autograd.grad(wrapper(*args), learned, dout)

    names = {PEFT: "grouped_mm", "moe_runtime": "moe_runtime"} | ({"PEFT, eager": "eager"} if size.shape.E <= EAGER else {})
    variants = {name: functools.partial(step, implementation) for name, implementation in names.items()}
    T, H, I, E, K, _ = size.shape
    flops = 6 * T * K * H * I * 2  # forward and dx
    interleaved(variants, flops=flops, bytes=3 * E * H * I * size.dtype.itemsize * 2, tokens=T, dtype=size.dtype)
