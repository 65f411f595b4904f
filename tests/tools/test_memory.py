"""The estimate against what small trainings measure on this machine: torch's own count of what is
allocated and freed.
"""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Adafactor, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from moe_runtime.cli.app import app
from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.methods import xft
from moe_runtime.ops import moe_mlp_cpp, workspace
from moe_runtime.ops.moe_mlp_cpp import ANY
from moe_runtime.tools import memory

SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
BATCH = 2
LENGTH = 128


def real_model(kind: str, gate: str = "xft", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    if kind == "stock":
        more = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "head_dim": 32,
        }
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**SIZES, **more, num_key_value_heads=2), dtype=dtype
        )
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
    events = [
        (e.start_ns(), e.nbytes())
        for e in seen.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    now = peak = 0
    for _, size in sorted(events):
        now += size
        peak = max(peak, now)
    return peak


def tensors_in(optimizer) -> int:
    return sum(
        memory.nbytes(t)
        for held in optimizer.state.values()
        for t in held.values()
        if torch.is_tensor(t)
    )


# backend, the CPU library's rows up to which it runs in one call on this instruction set, model,
# LoRA, checkpointing
CASES = [
    ("cpp", ANY, kind, lora, again)
    for kind in ("dense", "stock", "ours")
    for lora in (None, 4)
    for again in (False, True)
]
CASES += [("cpp", 0, kind, None, again) for kind in ("stock", "ours") for again in (False, True)]
CASES += [("torch", ANY, "stock", None, False), ("torch", ANY, "ours", None, True)]
QUICK = (
    ("cpp", ANY, "stock", None, False),
    ("cpp", ANY, "ours", None, True),
    ("cpp", 0, "stock", None, False),
)


@pytest.mark.parametrize(
    ("backend", "few", "kind", "lora", "checkpointing"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_estimate(kind, backend, few, lora, checkpointing, monkeypatch):
    # which depends on the processor
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: few)
    # or large ones come from the system, which nobody counts
    monkeypatch.setattr(workspace, "LEASE_FROM", 1 << 60)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model = real_model(kind, "softmax_topk_renorm" if lora else "xft")
    fake = memory.built(copy.deepcopy(model.config))
    if lora:
        fake = memory.add_lora(fake, lora)
        model = memory.add_lora(model, lora)
    found = memory.estimate(
        fake,
        lambda: memory.causal_batch(BATCH, LENGTH),
        checkpointing=checkpointing,
        backend=backend,
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
    assert found.experts + found.rest + found.adapters == sum(
        map(memory.nbytes, {*model.parameters(), *model.buffers()})
    )
    assert found.gradients == sum(memory.nbytes(p.grad) for p in trained)
    assert found.optimizer == tensors_in(optimizer)
    model.zero_grad()
    workspace.release()
    peak = measured(step)
    whole = found.peak - found.experts - found.rest - found.adapters - found.optimizer
    assert whole == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("few, alone", [(100, True), (100, False), (300, True), (63, False)])
def test_scratch_of_both_ways_where_the_largest_expert_decides(few, alone, monkeypatch):
    """256 tokens on 8 experts, 2 each: 64 rows on average, 256 on a shared expert."""
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: few)
    x = torch.empty(256, 32)
    up = torch.empty(8, 48, 32)
    given = {
        "x": x,
        "up": up,
        "gated": True,
        "top_k": 2,
        "gate": "xft" if alone else "softmax_topk",
    }
    monkeypatch.setitem(memory.ARGUMENTS, "moe_layer", list(given))
    func = SimpleNamespace(__name__="moe_layer.default", namespace="moe_runtime")
    found = memory.scratch_bytes(func, list(given.values()), "cpp")[1]
    expected = {
        (100, True): {"y"},
        (100, False): {"one call", "y"},
        (300, True): {"one call"},
        (63, False): {"y"},
    }[few, alone]
    assert found.keys() & {"one call", "y"} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "8bit"])
def test_state_of_optimizer_to_the_byte(name, dtype):
    parameters = [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype))
        for shape in ((96, 64), (64,), (3, 40, 64), (1,))
    ]
    if name == "8bit":
        optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters)
    elif name == "adafactor":
        optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    else:
        optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    # maps are shared
    found = {
        id(t): t for held in optimizer.state.values() for t in held.values() if torch.is_tensor(t)
    }
    assert memory.optimizer_bytes(parameters, name)[0] == sum(map(memory.nbytes, found.values()))


def folder_of(config, tmp_path):
    config.architectures = [
        {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[config.model_type]
    ]
    config.save_pretrained(tmp_path / config.model_type)
    return tmp_path / config.model_type


def stock_config():
    return Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, dtype="bfloat16"
    )


def run(*words):
    result = CliRunner().invoke(app, ["memory", *map(str, words)])
    return (
        result.exit_code,
        result.output if result.exception is None else f"{result.output}{result.exception}",
    )


def test_command(tmp_path):
    folder = folder_of(stock_config(), tmp_path)
    lengths = ("--batch", 2, "--length", 64)
    text = run(folder, "--lora", 4, *lengths, "--json")[1]
    plain = json.loads(text[text.index("{") :])
    text = run(folder, "--lora", 4, "--bits", 4, *lengths, "--json")[1]
    packed = json.loads(text[text.index("{") :])
    stacks = 3 * 8 * 3 * 64 * 128  # layers, experts, gate, up and down
    assert plain["experts"] == 2 * stacks
    assert packed["experts"] == pytest.approx(stacks * (4 + 8 / 64 + 32 / 64 / 256) / 8, abs=6)
    assert plain["peak"] - packed["peak"] == plain["experts"] - packed["experts"]
    # all linear layers and every expert, float32
    per_layer = 4 * (128 + 32 * 4) + 8 * 4 * (128 + 128) + 8 * 4 * (64 + 128)
    assert plain["adapters"] == plain["gradients"]
    assert plain["adapters"] > 4 * 3 * per_layer * 0.9
    for size in (
        "experts",
        "rest",
        "adapters",
        "gradients",
        "optimizer",
        "activations",
        "temporary",
    ):
        assert plain[size] >= 0
    parts = sum(
        plain[name]
        for name in (
            "experts",
            "rest",
            "adapters",
            "gradients",
            "optimizer",
            "activations",
            "temporary",
        )
    )
    assert parts - plain["overlap"] == plain["peak"]
    assert sum(plain["kept"].values()) == plain["activations"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--bits", 4),
            "bits must be 16, as all weights train, but got 4. Pass --lora, or --bits 16",
        ),
        (("--bits", 5, "--lora", 4), "bits must be"),
        (("--lora", 0), "lora must be"),
        (("--length", 0), "length must be"),
        (("--optimizer", "lion"), "optimizer must be"),
        (("--gpus", 2, "--engine", "magic"), "engine must be"),
        (
            ("--gpus", 3, "--engine", "ep"),
            "requires that 3 GPUs divide the experts, but training has layers of 8",
        ),
    ],
)
def test_refuses(words, expected, tmp_path):
    code, text = run(folder_of(stock_config(), tmp_path), *words)
    assert code
    assert expected in text


def test_dense_model_has_nothing_to_pack(tmp_path):
    folder = folder_of(LlamaConfig(**SIZES), tmp_path)
    code, text = run(folder, "--bits", "nf4", "--lora", 2)
    assert code
    assert "has no stacks of experts" in text
