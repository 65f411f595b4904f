"""No launcher asks the GPU for a value: the Triton backend of every op runs on tensors of the meta
device, which have none.
"""

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack
from tests.support.aot import ROOT, record

for path in (ROOT / "moe_runtime" / "ops").glob("*.py"):  # each registers its ops
    importlib.import_module(f"moe_runtime.ops.{path.stem}")


def meta(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def triton(op: str, *args, backend: str = "triton") -> tuple:
    """Run the Triton backend of an op, not its fake."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return getattr(torch.ops.moe_runtime, op).default.redispatch(keys, *args, backend)


def layer(
    gated=True,
    bias=False,
    trainable=False,
    apart=False,
    shared="group",
    save=True,
    needs=(True,) * 6,
) -> None:
    T = 40
    H = 64
    I = 48
    E = 4
    K = 2
    up = meta(E, 2 * I if gated else I, H)
    down = meta(E, H, I)
    weight = meta(T, K, dtype=torch.float32)
    biases = (meta(E, up.shape[1]), meta(E, H)) if bias else (None, None)
    place = meta(E, dtype=torch.int32 if apart else torch.bool) if trainable or apart else None
    trained = (meta(2, *up.shape[1:]), meta(2, H, I)) if apart else (None, None)
    experts = ExpertStacks(
        up, down, *biases, place, *trained, Activation("silu", gated), shared
    ).pack()
    out, *kept = triton(
        "moe_mlp", meta(T, H), weight, meta(T, K, dtype=torch.int32), *experts, save
    )
    triton("moe_mlp_backward", out, meta(T, H), weight, *experts, *kept, needs)


def steps() -> None:
    integers = {"dtype": torch.int32}
    logits = meta(40, 8)
    slots = meta(40, 2, **integers)
    rows = meta(80, 64)
    gates = meta(40, 2, dtype=torch.float32)
    alpha = meta(4, dtype=torch.float32)
    offsets = meta(5, **integers)
    stack = meta(4, 48, 64)
    triton("route", logits, None, 2, "xft")
    triton("route_to", logits, slots, "xft")
    triton("route_backward", gates, logits, slots, "xft")
    triton("dispatch", slots, 4)
    triton("combine", rows, gates, meta(80, **integers))
    triton("combine_backward", meta(40, 64), rows, gates, meta(80, **integers))
    for apart in ((None, None), (meta(4, dtype=torch.int32), meta(2, *stack.shape[1:]))):
        triton("grouped_gemm", rows, stack, offsets, meta(4, 48), *apart)
        triton("grouped_gemm_backward", meta(80, 48), rows, stack, offsets, *apart, (True,) * 3)
    triton("merge_experts", stack, alpha)
    triton("merge_experts_backward_alpha", meta(48, 64), stack)
    triton("merged_linear", rows, stack, alpha, meta(48, 64), None)
    triton("merged_linear_backward", meta(80, 48), rows, stack, meta(48, 64), False)
    lora_and_expansion()
    frozen()
    fused_loss()


def lora_and_expansion() -> None:
    T = 40
    H = 64
    I = 48
    E = 4
    rank = 8
    base = (meta(I, H), meta(I, H), meta(H, I), None, None)
    pairs = [meta(E, rank, n) for n in (H, I, H, I, I, H)]
    shared = (
        meta(T, H),
        *base,
        meta(T, 2, dtype=torch.float32),
        meta(T, 2, dtype=torch.int32),
        *pairs,
    )
    settings = (E, 2.0, "silu", True)
    out, z, low = triton("lora_mlp", *shared, *settings)
    triton("lora_mlp_backward", out, z, low, True, (True,) * 6, *shared, *settings)
    triton("gram", meta(4, 3072), meta(3072))
    triton("dare_merge", base[0], base[1], base[0], 1, 2, 1 << 31, 0.5, 0.5)


def frozen() -> None:
    """Frozen stacks with a pair each."""
    T = 40
    H = 64
    I = 48
    E = 4
    rank = 8
    pairs = [Pair(meta(E, rank, into), meta(E, rank, out)) for out, into in ((2 * I, H), (H, I))]
    experts = FrozenExperts(
        Stack.dense(meta(E, 2 * I, H)), Stack.dense(meta(E, H, I)), None, None, *pairs
    ).pack()
    x = meta(T, H)
    weight = meta(T, 2, dtype=torch.float32)
    out, *kept = triton("frozen_mlp", x, weight, meta(T, 2, dtype=torch.int32), *experts, True)
    triton("frozen_mlp_backward", out, x, weight, *experts, *kept, (True,) * 8)


def fused_loss() -> None:
    """Two specialists, with vocabularies of two sizes."""
    gate = meta(40, 2, dtype=torch.float32)
    labels = meta(40, dtype=torch.int64)
    nll = meta(40, dtype=torch.float32)
    models = ([meta(40, 64), meta(40, 48)], [meta(100, 64), meta(120, 48)])
    needs = ([True] * 2, [True, False])
    _, score = triton("fused_nll", gate, labels, *models, -100, True)
    triton("fused_nll_backward_gate", nll, score, gate)
    triton("fused_nll_backward", nll, gate, labels, *models, -100, *needs)
    loss, *grads = triton("fused_loss", gate, labels, *models, -100, *needs)
    triton("fused_loss_backward", loss, gate, *models, *grads)


def whole_layer(shared: str) -> None:
    T = 40
    H = 64
    I = 48
    E = 4
    K = 2
    x = meta(T, H)
    router = meta(E - 1, H)
    up = meta(E, 2 * I, H)
    down = meta(E, H, I)
    experts = ExpertStacks(up, down, meta(E, 2 * I), meta(E, H), shared=shared).pack()
    out, logits, weight, *kept = triton("moe_layer", x, router, *experts, K, "xft", True)
    tensors = (x, router, *experts, logits, weight, *kept)
    triton("moe_layer_backward", out, logits, weight, *tensors, True, (True,) * 6, "xft")


LAYERS = {
    "gated": {},
    "not gated, biases": {"gated": False, "bias": True},
    "frozen experts": {"trainable": True, "bias": True},
    "trained experts apart": {"apart": True},
    "dense shared expert": {"shared": "dense", "bias": True},
    "recomputed, few gradients": {"save": False, "needs": (False, True, False, True, False, False)},
}
STEPS = {name: functools.partial(layer, **options) for name, options in LAYERS.items()} | {
    "router and experts": functools.partial(whole_layer, "group"),
    "router and experts, dense shared expert": functools.partial(whole_layer, "dense"),
    "each step alone": steps,
}


@pytest.mark.parametrize("step", STEPS)
def test_no_launcher_asks_for_a_value(step):
    assert len(record(STEPS[step])) >= 9


def test_every_op_is_asked():
    asked = set(re.findall(r'triton\(\s*"(\w+)"', Path(__file__).read_text()))
    names = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("moe_runtime::")
    }
    assert names <= asked


VALUES = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.nonzero,
    bool,
    int,
)


@pytest.mark.parametrize("ask", [*VALUES, lambda x: x[x > 0]])
def test_a_value_asked_for_is_seen(ask: Callable):
    with pytest.raises((RuntimeError, TypeError)):
        ask(meta(1))


def test_the_backend_that_loops_on_the_host_is_seen():
    with pytest.raises((RuntimeError, TypeError)):
        triton(
            "grouped_gemm",
            meta(80, 64),
            meta(4, 48, 64),
            meta(5, dtype=torch.int32),
            *[None] * 3,
            backend="torch",
        )
