"""Stock MoE models on the Triton kernels of a real GPU: bfloat16 against float64, no host
synchronization, generate.

Without a GPU: tests/hf/dropin/test_experts.py (layer by layer, interpreted) and test_layers.py
(whole models).
"""

import pytest
import torch

import moe_runtime

pytest.importorskip("transformers", exc_type=ImportError)
from transformers import AutoConfig, AutoModelForCausalLM

from moe_runtime.hf.dropin.experts import is_experts

pytestmark = pytest.mark.gpu

COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 192},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 320},
    "olmoe": {
        "num_experts": 16,
        "intermediate_size": 192,
        "num_key_value_heads": 4,
        "head_dim": None,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "intermediate_size": 256,
        "layer_types": ["full_attention"] * 2,
    },
    # sizes that are not divisible by 16
    "odd": {
        "num_experts": 6,
        "moe_intermediate_size": 136,
        "hidden_size": 264,
        "num_attention_heads": 3,
        "head_dim": 88,
        "num_key_value_heads": 3,
    },
}


def stock(kind: str, dtype=torch.bfloat16):
    moe_runtime.register()
    torch.manual_seed(0)
    fields = {name: value for name, value in (COMMON | MODELS[kind]).items() if value is not None}
    config = AutoConfig.for_model(
        "qwen3_moe" if kind == "odd" else kind,
        **fields,
    )
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, experts_implementation="moe_runtime"
    ).cuda()


def layer_results(module, implementation: str, wide: bool) -> dict[str, torch.Tensor]:
    """Return output and gradients of one experts module on random tokens; `wide` computes in
    float64 on the same quantized inputs.
    """
    if wide:
        dtype = torch.float64
    else:
        dtype = torch.bfloat16
    module = module.to(dtype)
    module.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(1)
    H = module.down_proj.shape[2 if module.is_transposed else 1]
    x = torch.randn(300, H, generator=generator).bfloat16().cuda().to(dtype).requires_grad_()
    idx = torch.rand(300, module.num_experts, generator=generator).topk(4).indices.cuda()
    weight = (
        torch.rand(300, 4, generator=generator)
        .cuda()
        .to(torch.float64 if wide else torch.float32)
        .requires_grad_()
    )
    dout = torch.randn(300, H, generator=generator).bfloat16().cuda().to(dtype)
    module.zero_grad()
    out = module(x, idx, weight)
    out.backward(dout)
    grads = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    return {
        "out": out.detach(),
        "dx": x.grad,
        "dweight": weight.grad,
        **grads,
    }


def distance(got, expected) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", MODELS)
def test_error_is_at_most_that_of_eager(kind):
    module = next(module for module in stock(kind).modules() if is_experts(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4)
    ours, eager = (layer_results(module, name, False) for name in ("moe_runtime", "eager"))
    expected = layer_results(module, "eager", True)
    for name, value in expected.items():
        assert distance(ours[name], value) < max(
            1.5 * distance(eager[name], value),
            4e-3,
        ), name


@pytest.mark.parametrize("kind", MODELS)
def test_training_step_and_generate(kind):
    model = stock(kind, torch.float32)
    ids = torch.randint(
        3, 512, (2, 40), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    results = {}
    for name in ("eager", "moe_runtime"):
        model.set_experts_implementation(name)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            tokens = model.generate(
                ids[:, :8],
                max_new_tokens=6,
                do_sample=False,
            )
        results[name] = loss.item(), grads, tokens
    (loss, grads, tokens), (want_loss, want_grads, want_tokens) = (
        results["moe_runtime"],
        results["eager"],
    )
    assert loss == pytest.approx(want_loss, rel=1e-4)
    assert grads.keys() == want_grads.keys()
    assert max(distance(grads[name], value) for name, value in want_grads.items()) < 1e-3
    assert torch.equal(tokens, want_tokens)
