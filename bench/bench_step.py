"""Stock models of transformers: a decoder layer and a whole training step, with our experts and
with transformers' own.

All use the same weights and differ in `experts_implementation`, like a model before and after the
drop-in. Attention has H / 128 heads, and XFT's shared expert is another routed one, as no stock
class has XFT's router.
"""

import contextlib
import functools

import pytest
import torch

from moe_runtime.bench import clock, machine, shapes
from moe_runtime.bench.bench_layer import DTYPES
from moe_runtime.bench.machine import CUDA, DEVICE, fits

KIND = "step"
ROUNDS = 15 if CUDA else 9
IMPLEMENTATIONS = {
    "moe_runtime": "moe_runtime",
    "transformers grouped_mm": "grouped_mm",
    "transformers eager": "eager",
}
CPU_SHAPES = shapes.STEPS_CPU
GPU_SHAPES = shapes.STEPS
LAYERS = 4
SEQUENCE = 4096  # most tokens of a sequence
VOCAB = 32000 if CUDA else 2048  # smaller on a CPU, where embeddings would dominate a small model


def stock(shape, dtype, layers: int):
    """A Qwen3-MoE of this shape, or a Mixtral if the shape has a shared expert, as XFT's have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import moe_runtime

    moe_runtime.register()
    _, H, I, E, K, shared = shape
    common = {
        "hidden_size": H,
        "num_hidden_layers": layers,
        "num_attention_heads": max(H // 128, 1),
        "vocab_size": VOCAB,
        "num_key_value_heads": max(H // 512, 1),
        "head_dim": min(H, 128),
        "num_experts_per_tok": K,
        "use_cache": False,
    }
    if shared:
        config = AutoConfig.for_model("mixtral", intermediate_size=I, num_local_experts=E, **common)
    else:
        config = AutoConfig.for_model(
            "qwen3_moe",
            moe_intermediate_size=I,
            num_experts=E,
            intermediate_size=I,
            norm_topk_prob=True,
            **common,
        )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation="moe_runtime"
        )


def llama(size, dtype, **options):
    """A Llama with random weights and a size's H, I, L, heads and V."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.V,
        hidden_size=size.H,
        intermediate_size=size.I,
        num_hidden_layers=size.L,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        **options,
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM._from_config(config, dtype=dtype)


def train(model, ids, optimizer=None) -> torch.Tensor:
    """Run a training step, or only its gradients without an optimizer; return the loss."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    try:
        loss.backward()
        if optimizer is not None:
            optimizer.step()
    finally:  # otherwise the next call's peak would exclude these gradients
        (optimizer or model).zero_grad()
    return loss.detach()


def with_each(model, run) -> dict:
    """Return name -> `run` with each implementation and, on a CPU, each of our backends."""

    def variant(implementation, backend=None):
        def call():
            # what set_experts_implementation sets, without its timed walk through all modules
            model.config._experts_implementation_internal = implementation
            with asked(backend):
                return run()

        return call

    others = [] if CUDA else machine.others("moe_mlp", model.dtype)
    variants = {name: variant(implementation) for name, implementation in IMPLEMENTATIONS.items()}
    return variants | {
        f"moe_runtime {backend}": variant("moe_runtime", backend) for backend in others
    }


@contextlib.contextmanager
def asked(backend: str | None):
    """Set MOE_RUNTIME_BACKEND to a backend, unless it is None."""
    with pytest.MonkeyPatch.context() as patch:
        if backend is not None:
            patch.setenv("MOE_RUNTIME_BACKEND", backend)
        yield


def flops_of(model, tokens: int, head: bool) -> int:
    """Return the FLOPs of a forward and a backward pass: products, causal attention, no router."""
    c = model.config
    experts = getattr(c, "moe_intermediate_size", c.intermediate_size) * c.num_experts_per_tok
    projections = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
    attention = min(tokens, SEQUENCE) * c.head_dim * c.num_attention_heads
    per_token = c.num_hidden_layers * (projections + attention + 3 * c.hidden_size * experts)
    return 6 * tokens * (per_token + head * c.vocab_size * c.hidden_size)


def token_ids(shape) -> torch.Tensor:
    length = min(shape.T, SEQUENCE)
    return torch.randint(
        0,
        VOCAB,
        (shape.T // length, length),
        device=DEVICE,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def bench_decoder_layer(interleaved, shape, dtype):
    """Forward and backward of one layer, gradients of x and of every weight."""
    with fits():
        model = stock(shape, dtype, 1).model
        ids = token_ids(shape)
        x = torch.randn(
            *ids.shape,
            shape.H,
            device=DEVICE,
            dtype=dtype,
            requires_grad=True,
        )
        dout = torch.randn_like(x)
    leaves = [x, *model.layers.parameters()]

    def run():
        return torch.autograd.grad(
            model(inputs_embeds=x).last_hidden_state,
            leaves,
            dout,
        )

    flops = flops_of(model, ids.numel(), head=False)
    interleaved(
        with_each(model, run),
        flops=flops,
        tokens=ids.numel(),
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def bench_training_step(interleaved, shape, dtype):
    """Loss, backward and AdamW of a model of four layers."""
    with fits():
        model = stock(shape, dtype, LAYERS)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=1e-6,
            fused=CUDA,
        )
        ids = token_ids(shape)

    flops = flops_of(model, ids.numel(), head=True)
    held = functools.partial(clock.held_bytes, model, optimizer)
    run = functools.partial(train, model, ids, optimizer)
    interleaved(
        with_each(model, run),
        flops=flops,
        tokens=ids.numel(),
        dtype=dtype,
        held=held,
    )
