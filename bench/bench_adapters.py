"""PEFT's LoRA on the expert stacks of a stock layer, forward and backward: our op against PEFT's
own code, which computes W + s B A in memory.

The stacks are frozen; gradients are those of x and of both stacks' adapters. PEFT's code runs with
transformers' grouped_mm and, for few experts, its loop. The same adapters are also measured on NF4
stacks, which stay packed.
"""

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
RANK = 16
EAGER = 8  # most experts for which transformers' loop is measured


@pytest.fixture
def layer(size):
    """The wrapped experts module, the same with NF4 stacks, their config and their arguments."""
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
            packed.put(
                small,
                name,
                pack(stack, "nf4"),
                stack.shape,
                stack.dtype,
            )
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
    (wrapper, small), config, args = layer
    dout = torch.randn_like(args[0])

    def step_of(implementation, wrapper=wrapper):
        learned = [args[0], *(p for p in wrapper.parameters() if p.requires_grad)]

        def step():
            config._experts_implementation = implementation
            return torch.autograd.grad(
                wrapper(*args),
                learned,
                dout,
            )

        return step

    T, H, I, E, K, _ = size.shape
    variants = {PEFT: step_of("grouped_mm"), "moe_runtime": step_of("moe_runtime")}
    if E <= EAGER:
        variants["PEFT, eager"] = step_of("eager")
    variants[NF4] = step_of("moe_runtime", small)
    interleaved(
        variants,
        flops=6 * T * K * H * I * 2,  # forward and dx
        bytes=3 * E * H * I * size.dtype.itemsize * 2,
        tokens=T,
        dtype=size.dtype,
    )
