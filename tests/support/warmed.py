"""Find the kernels that a model launches but its warmup did not compile: python -m
tests.support.warmed CASE

It runs without a GPU and without the interpreter. The model's real tensors pass through the real
code, but every launch only compiles, for sm_90, and nothing reads its results. Prints the launches
and the misses of Triton's cache.
"""

import functools
import json
import sys

import torch
import triton
from triton.runtime.jit import KernelInterface

import moe_runtime
from moe_runtime import backends
from moe_runtime.config import MoEConfig
from moe_runtime.kernels import tiles
from moe_runtime.modules.moe import MoE
from moe_runtime.tools import warmup

TOKENS = 24
ARCH = 90


def _olmoe():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = OlmoeForCausalLM(config).bfloat16()
    moe_runtime.patch(model)
    return model, (torch.randint(0, 64, (1, TOKENS)),)


def _layer():
    layer = MoE(
        MoEConfig(
            hidden_size=64,
            intermediate_size=32,
            num_experts=8,
            top_k=3,
        )
    ).bfloat16()
    return layer, (
        torch.randn(
            1,
            TOKENS,
            64,
            dtype=torch.bfloat16,
            requires_grad=True,
        ),
    )


CASES = {"stock model": _olmoe, "layer with its router": _layer}


def _as_on_a_gpu(counts: list[bool]) -> None:
    """Make every later launch only compile; `counts` records whether each was in the cache."""
    triton.runtime.driver.set_active(warmup.Driver(ARCH))
    triton.knobs.compilation.listener = lambda **event: counts.append(event["cache_hit"])
    backends.choose = lambda op, x, backend=None, cuda_fits=True: (
        backend or ("triton" if op in backends.TRITON_OPS else "torch")
    )
    tiles._device = lambda device: (ARCH, "")
    KernelInterface.__getitem__ = lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)


def main() -> None:
    torch.manual_seed(0)
    model, inputs = CASES[sys.argv[1]]()
    done = warmup.warmup(model, TOKENS, backward=True, arch=ARCH)
    hits = []
    _as_on_a_gpu(hits)
    with torch.no_grad():
        model(*inputs)
    for _ in range(2):
        out = model(*inputs)
        (out if isinstance(out, torch.Tensor) else out.logits).float().sum().backward()
    print(
        json.dumps(
            {
                "warmup": done,
                "launched": len(hits),
                "missed": hits.count(False),
            }
        )
    )


if __name__ == "__main__":
    main()
