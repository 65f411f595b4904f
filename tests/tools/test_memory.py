"""The estimate against what small trainings measure on this machine: torch's own count of what is allocated and freed."""

import copy
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Adafactor, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.methods import xft
from moe_runtime.ops import workspace
from moe_runtime.tools import memory

SIZES = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3}
BATCH, LENGTH = 2, 128


def real_model(kind: str, gate: str = "xft", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    if kind == "stock":
        more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32}
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **more, num_key_value_heads=2), dtype=dtype)
        dropin.patch(model)
        return model
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=dtype)
    if kind == "ours":
        xft.upcycle(model, num_experts=4, top_k=2, gate=gate)
    return model


def batch():
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def measured(call) -> int:
    """Return the most bytes that a call has allocated at once, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [(e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, size in sorted(events):
        now += size
        peak = max(peak, now)
    return peak


def tensors_in(optimizer) -> int:
    return sum(memory.nbytes(t) for held in optimizer.state.values() for t in held.values() if torch.is_tensor(t))


CASES = [("cpp", kind, lora, again) for kind in ("dense", "stock", "ours") for lora in (None, 4) for again in (False, True)]


@pytest.mark.parametrize(
    ("backend", "kind", "lora", "checkpointing"), [*CASES, ("torch", "stock", None, False), ("torch", "ours", None, True)]
)
def test_estimate(kind, backend, lora, checkpointing, monkeypatch):
    monkeypatch.setattr(workspace, "LEASE_FROM", 1 << 60)  # or large ones come from the system, which nobody counts
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model = real_model(kind, "softmax_topk_renorm" if lora else "xft")
    fake = memory.built(copy.deepcopy(model.config))
    if lora:
        fake, model = memory.add_lora(fake, lora), memory.add_lora(model, lora)
    found = memory.estimate(fake, lambda: memory.causal_batch(BATCH, LENGTH), checkpointing=checkpointing, backend=backend)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    data = batch()

    def step():
        model(**data).loss.backward()

    step()
    optimizer.step()
    assert found.experts + found.rest + found.adapters == sum(map(memory.nbytes, {*model.parameters(), *model.buffers()}))
    assert found.gradients == sum(memory.nbytes(p.grad) for p in trained)
    assert found.optimizer == tensors_in(optimizer)
    model.zero_grad()
    workspace.release()
    peak = measured(step)
    whole = found.peak - found.experts - found.rest - found.adapters - found.optimizer
    assert whole == pytest.approx(peak, rel=0.05)
