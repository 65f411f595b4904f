"""The estimate against measurements of small trainings on this machine, from torch's own record of
allocations.
"""

import copy
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Adafactor, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from moe_runtime.cli.app import app
from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.methods import xft
from moe_runtime.ops import workspace
from moe_runtime.tools import memory

SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
PARTS = "experts rest adapters gradients optimizer activations temporary".split()
BATCH = 2
LENGTH = 128


def real_model(kind: str, gate: str = "xft"):
    torch.manual_seed(0)
    if kind == "stock":
        sizes = SIZES | {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
        }
        config = Qwen3MoeConfig(
            **sizes,
            head_dim=32,
            num_key_value_heads=2,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        dropin.patch(model)
        return model
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32)
    if kind == "ours":
        xft.upcycle(
            model,
            num_experts=4,
            top_k=2,
            gate=gate,
        )
    return model


def batch():
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH))
    return {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
    }


def measured(call) -> int:
    """Return the peak number of allocated bytes during a call, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    sizes = {}
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            sizes.setdefault(event.start_ns(), []).append(event.nbytes())
    now = peak = 0
    for time in sorted(sizes):
        for size in sorted(sizes[time]):
            now += size
            peak = max(peak, now)
    return peak


def state_bytes(optimizer) -> int:
    """Return the bytes of an optimizer's tensors, counting shared maps once."""
    tensors = {}
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                tensors[id(value)] = memory.nbytes(value)
    return sum(tensors.values())


# model, LoRA, checkpointing
QUICK = [("stock", None, False), ("ours", None, True), ("ours", 4, False)]
SLOW = [("dense", 4, True), ("stock", None, True)]


@pytest.mark.parametrize(
    ("kind", "lora", "checkpointing"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_estimate(kind, lora, checkpointing, monkeypatch):
    # otherwise large allocations come from the system, which nothing counts
    monkeypatch.setattr(workspace, "LEASE_FROM", 1 << 60)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    model = real_model(kind, "softmax_topk_renorm" if lora else "xft")
    fake = memory.built(copy.deepcopy(model.config))
    if lora:
        fake = memory.add_lora(fake, lora)
        model = memory.add_lora(model, lora)
    estimate = memory.estimate(
        fake,
        lambda: memory.causal_batch(BATCH, LENGTH),
        checkpointing=checkpointing,
        backend="torch",
    )
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
    held = estimate.experts + estimate.rest + estimate.adapters
    assert held == sum(map(memory.nbytes, {*model.parameters(), *model.buffers()}))
    parts = sum(getattr(estimate, part) for part in PARTS)
    assert parts - estimate.overlap == estimate.peak
    assert estimate.gradients == sum(memory.nbytes(p.grad) for p in trained)
    assert estimate.optimizer == state_bytes(optimizer)
    model.zero_grad()
    workspace.release()
    peak = measured(step)
    assert estimate.peak - held - estimate.optimizer == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "8bit"])
def test_state_of_optimizer_to_the_byte(name, dtype):
    parameters = []
    for shape in ((96, 64), (64,), (3, 40, 64), (1,)):
        parameters.append(torch.nn.Parameter(torch.randn(shape, dtype=dtype)))
        parameters[-1].grad = torch.randn_like(parameters[-1])
    if name == "8bit":
        optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters)
    elif name == "adafactor":
        optimizer = Adafactor(
            parameters,
            lr=1e-3,
            scale_parameter=False,
            relative_step=False,
        )
    elif name == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
    optimizer.step()
    assert memory.optimizer_bytes(parameters, name)[0] == state_bytes(optimizer)


def test_small_states_are_not_quantized():
    assert memory.optimizer_bytes([torch.empty(100)], "8bit") == (800, 0)


def test_gradients_of_earlier_micro_batches_are_there_before_the_step():
    model = memory.built(real_model("dense").config)
    step = memory.step_of(model, lambda: memory.causal_batch(1, 8), accumulate=True)
    assert step.peak - step.active == step.gradients


@pytest.fixture
def stock_folder(tmp_path):
    """A folder with the config of a stock MoE model."""
    sizes = SIZES | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    config = Qwen3MoeConfig(
        **sizes,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def run(folder, *words) -> tuple[int, str]:
    """Run the command; return its exit code and all its output."""
    result = CliRunner().invoke(app, ["memory", str(folder), *map(str, words)])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def sizes_of(folder, *words) -> dict:
    _, text = run(
        folder,
        *words,
        "--batch-size",
        2,
        "--max-length",
        64,
        "--json",
    )
    return json.loads(text[text.index("{") :])


def test_command(stock_folder):
    plain = sizes_of(stock_folder, "--lora", 4)
    packed = sizes_of(
        stock_folder,
        "--lora",
        4,
        "--bits",
        4,
    )
    stacks = 3 * 8 * 3 * 64 * 128  # layers, experts, gate, up and down
    assert plain["experts"] == 2 * stacks
    assert packed["experts"] == pytest.approx(stacks * (4 + 8 / 64 + 32 / 64 / 256) / 8, abs=6)
    assert plain["peak"] - packed["peak"] == plain["experts"] - packed["experts"]
    # all linear layers and every expert, float32
    per_layer = 4 * (128 + 32 * 4) + 8 * 4 * (128 + 128) + 8 * 4 * (64 + 128)
    assert plain["adapters"] == plain["gradients"]
    assert plain["adapters"] > 4 * 3 * per_layer * 0.9
    assert min(plain[part] for part in PARTS) >= 0
    assert sum(plain[part] for part in PARTS) - plain["overlap"] == plain["peak"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--bits 4", "bits must be 16, as all weights train, but got 4. Pass --lora"),
        ("--lora 0", "lora must be"),
        ("--optimizer lion", "optimizer must be"),
        ("--gpus 3 --engine ep", "requires that 3 GPUs divide the experts"),
    ],
)
def test_refuses(words, expected, stock_folder):
    code, text = run(stock_folder, *words.split())
    assert code
    assert expected in text
