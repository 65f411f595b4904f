"""A training step of a MoE model with NF4 experts and LoRA (QLoRA): its peak memory against the
estimate of `moe-runtime memory`.

All weights are random, and packed bytes are generated in place, so no stack is ever in memory in 16
bits. As in Trainer: autocast to bfloat16, gradient checkpointing, gradients set to None after the
optimizer's step.
"""

import functools

import pytest
import torch
from torch import nn

from moe_runtime.bench import clock, shapes
from moe_runtime.bench.machine import CUDA, DEVICE, fits

KIND = "step"
ROUNDS = 3
SIZES = (shapes.QLORA_GPU, shapes.QLORA_CPU, shapes.TUNING_TINY)
RANK = 16
SETTINGS = {  # adapted modules, adapters' dtype, optimizer in `moe-runtime memory`
    "fp32-adamw": ("all", torch.float32, "adamw"),  # the defaults of PEFT and Trainer
    "attention-fp32-adamw": ("attention", torch.float32, "adamw"),
    "bf16-adafactor": ("all", torch.bfloat16, "adafactor"),
    "bf16-adamw": ("all", torch.bfloat16, "adamw"),
    "bf16-8bit": ("all", torch.bfloat16, "8bit"),
}


def blank(size) -> nn.Module:
    """Return a Qwen3-MoE of a size without allocating its weights."""
    from transformers import Qwen3MoeConfig

    from moe_runtime.tools import memory

    config = Qwen3MoeConfig(
        hidden_size=size.H,
        moe_intermediate_size=size.I,
        intermediate_size=3 * size.H,
        num_hidden_layers=size.L,
        num_experts=size.E,
        num_experts_per_tok=size.K,
        norm_topk_prob=True,
        num_attention_heads=size.heads,
        num_key_value_heads=max(size.heads // 8, 1),
        head_dim=max(size.H // 16, 16),
        vocab_size=size.V,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return memory.built(config, "bfloat16")


def draw(model: nn.Module) -> nn.Module:
    """Fill a blank model with random weights, and its stacks with random NF4."""
    from moe_runtime.hf.dropin.gates import stack_names
    from moe_runtime.hf.dropin.quantize import experts_of
    from moe_runtime.modules import packed
    from moe_runtime.ops.packed import Packed, nest

    for module in experts_of(model).values():
        for name in stack_names(module)[:2]:
            E, P, Q = shape = getattr(module, name).shape
            data = torch.randint(
                256,
                (E, P, Q // 2),
                dtype=torch.uint8,
                device=DEVICE,
            )
            scales = nest(torch.rand(E * P * Q // 64, device=DEVICE) * Q**-0.5)
            packed.put(
                module,
                name,
                Packed(data, scales, "nf4"),
                shape,
                torch.bfloat16,
            )
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                new = torch.ones(
                    old.shape,
                    dtype=old.dtype,
                    device=DEVICE,
                )
                module._parameters[name] = nn.Parameter(
                    new.normal_(std=0.02) if old.dim() > 1 else new
                )
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(DEVICE)
    return model


def adapted(model: nn.Module, where: str, dtype: torch.dtype) -> nn.Module:
    """Return the model with adapters, the only trainable parameters."""
    import peft

    from moe_runtime.methods.lora import baseline

    if where == "all":
        model = baseline.add_lora(model, RANK, 2.0)
    else:
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        with baseline.quiet_peft():
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=RANK, target_modules=names, task_type="CAUSAL_LM")
            )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "8bit":
        return pytest.importorskip("bitsandbytes").optim.AdamW8bit(learned, lr=1e-5)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(learned, lr=1e-5, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(learned, lr=1e-5, fused=CUDA)


@functools.cache
def estimate(size, setting: str):
    """Return the estimate of `moe-runtime memory` for a setting."""
    from moe_runtime.tools import memory

    where, dtype, optimizer = SETTINGS[setting]
    with torch.device("meta"):
        model = adapted(blank(size), where, dtype)
    return memory.estimate(
        model,
        lambda: memory.causal_batch(size.rows, size.length),
        optimizer=optimizer,
        packed="nf4",
        checkpointing=True,
        bf16=True,
    )


@pytest.mark.parametrize("setting", SETTINGS)
def bench_qlora(interleaved, size, setting):
    from moe_runtime.tools import memory

    where, dtype, name = SETTINGS[setting]
    with fits():
        model = adapted(draw(blank(size)), where, dtype)
    memory.checkpoint(model)
    optimizer = optimizer_of(model, name)
    ids = torch.randint(
        size.V,
        (size.rows, size.length),
        device=DEVICE,
    )

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    estimated = estimate(size, setting)
    details = {
        "moe_runtime": {
            "estimate MiB": estimated.peak / 2**20,
            "weights MiB": (estimated.experts + estimated.rest) / 2**20,
        }
    }
    held = functools.partial(clock.held_bytes, model, optimizer)
    interleaved(
        {"moe_runtime": step},
        tokens=size.T,
        dtype=torch.bfloat16,
        details=details,
        held=held,
    )
