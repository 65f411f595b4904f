"""No launcher asks the GPU for a value: the Triton backend of every op runs on tensors of the meta
device, which have none.
"""

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

T = 40
H = 64
I = 48
E = 4
K = 2
R = T * K
RANK = 8
EVERY = (True,) * 6


def meta(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


def floats(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def triton(op: str, *args, backend: str = "triton") -> tuple:
    """Run the Triton backend of an op, not its fake."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return getattr(torch.ops.moe_runtime, op).default.redispatch(
        keys,
        *args,
        backend,
    )


def run_layer(experts: ExpertStacks, save=True, needs=EVERY) -> None:
    x = meta(T, H)
    weight = floats(T, K)
    packed = experts.pack()
    out, *saved = triton(
        "moe_mlp",
        x,
        weight,
        integers(T, K),
        *packed,
        save,
    )
    triton("moe_mlp_backward", out, x, weight, *packed, *saved, needs)


def stacks(Z=2 * I, **options) -> ExpertStacks:
    return ExpertStacks(meta(E, Z, H), meta(E, H, I), **options)


def biased(Z=2 * I, **options) -> ExpertStacks:
    return stacks(
        Z,
        up_bias=meta(E, Z),
        down_bias=meta(E, H),
        **options,
    )


def gated() -> None:
    run_layer(stacks())


def ungated_with_biases() -> None:
    run_layer(biased(I, activation=Activation("silu", False)))


def frozen_experts() -> None:
    run_layer(biased(trainable=meta(E, dtype=torch.bool)))


def separate_trained_experts() -> None:
    trained = {
        "up_trained": meta(
            2,
            2 * I,
            H,
        ),
        "down_trained": meta(2, H, I),
    }
    run_layer(stacks(trainable=integers(E), **trained))


def dense_shared_expert() -> None:
    run_layer(biased(shared="dense"))


def recomputed_with_few_gradients() -> None:
    run_layer(
        stacks(),
        save=False,
        needs=(False, True, False, True, False, False),
    )


def run_whole_layer(shared: str) -> None:
    """Router and experts."""
    x = meta(T, H)
    router = meta(E - 1, H)
    experts = biased(shared=shared).pack()
    out, logits, weight, *saved = triton(
        "moe_layer",
        x,
        router,
        *experts,
        K,
        "xft",
        True,
    )
    tensors = (x, router, *experts, logits, weight, *saved)
    triton("moe_layer_backward", out, logits, weight, *tensors, True, EVERY, "xft")


def grouped_layer() -> None:
    run_whole_layer("group")


def dense_layer() -> None:
    run_whole_layer("dense")


def routing() -> None:
    logits = meta(T, 8)
    slots = integers(T, K)
    gates = floats(T, K)
    triton("route", logits, None, K, "xft")
    triton("route_to", logits, slots, "xft")
    triton("route_backward", gates, logits, slots, "xft")


def rows() -> None:
    slots = integers(T, K)
    values = meta(R, H)
    gates = floats(T, K)
    offsets = integers(E + 1)
    stack = meta(E, I, H)
    triton("dispatch", slots, E)
    triton("combine", values, gates, integers(R))
    triton(
        "combine_backward",
        meta(T, H),
        values,
        gates,
        integers(R),
    )
    for trained in (
        (None, None),
        (
            integers(E),
            meta(
                2,
                I,
                H,
            ),
        ),
    ):
        triton(
            "grouped_gemm",
            values,
            stack,
            offsets,
            meta(E, I),
            *trained,
        )
        grad = meta(R, I)
        triton(
            "grouped_gemm_backward",
            grad,
            values,
            stack,
            offsets,
            *trained,
            (True,) * 3,
        )


def merging() -> None:
    stack = meta(E, I, H)
    alpha = floats(E)
    x = meta(R, H)
    triton("merge_experts", stack, alpha)
    triton("merge_experts_backward_alpha", meta(I, H), stack)
    triton("merged_linear", x, stack, alpha, meta(I, H), None)
    triton(
        "merged_linear_backward",
        meta(R, I),
        x,
        stack,
        meta(I, H),
        False,
    )


def expansion() -> None:
    parent = meta(I, H)
    triton("gram", meta(E, 3072), meta(3072))
    triton(
        "dare_merge",
        parent,
        parent,
        parent,
        1,
        2,
        1 << 31,
        0.5,
        0.5,
    )


def lora() -> None:
    base = (meta(I, H), meta(I, H), meta(H, I), None, None)
    slots = (floats(T, K), integers(T, K))
    pairs = [
        meta(
            E,
            RANK,
            width,
        )
        for width in (H, I, H, I, I, H)
    ]
    arguments = (meta(T, H), *base, *slots, *pairs, E, 2.0, "silu", True)
    out, z, low = triton("lora_mlp", *arguments)
    triton("lora_mlp_backward", out, z, low, True, EVERY, *arguments)


def frozen() -> None:
    """Frozen stacks with a pair each."""
    up = Stack.dense(meta(E, 2 * I, H))
    down = Stack.dense(meta(E, H, I))
    up_pair = Pair(meta(E, RANK, H), meta(E, RANK, 2 * I))
    down_pair = Pair(meta(E, RANK, I), meta(E, RANK, H))
    experts = FrozenExperts(up, down, None, None, up_pair, down_pair).pack()
    x = meta(T, H)
    weight = floats(T, K)
    out, *saved = triton(
        "frozen_mlp",
        x,
        weight,
        integers(T, K),
        *experts,
        True,
    )
    triton(
        "frozen_mlp_backward",
        out,
        x,
        weight,
        *experts,
        *saved,
        (True,) * 8,
    )


def fused_loss() -> None:
    """Two specialists, with vocabularies of two sizes."""
    gate = floats(T, 2)
    labels = integers(T, dtype=torch.int64)
    nll = floats(T)
    models = ([meta(T, 64), meta(T, 48)], [meta(100, 64), meta(120, 48)])
    needs = ([True, True], [True, False])
    _, score = triton(
        "fused_nll",
        gate,
        labels,
        *models,
        -100,
        True,
    )
    triton("fused_nll_backward_gate", nll, score, gate)
    triton(
        "fused_nll_backward",
        nll,
        gate,
        labels,
        *models,
        -100,
        *needs,
    )
    loss, *grads = triton(
        "fused_loss",
        gate,
        labels,
        *models,
        -100,
        *needs,
    )
    triton("fused_loss_backward", loss, gate, *models, *grads)


# and the number of kernels that each launches at least
STEPS = {
    gated: 9,
    ungated_with_biases: 9,
    frozen_experts: 9,
    separate_trained_experts: 9,
    dense_shared_expert: 9,
    recomputed_with_few_gradients: 9,
    grouped_layer: 9,
    dense_layer: 9,
    routing: 2,
    rows: 5,
    merging: 3,
    expansion: 2,
    lora: 3,
    frozen: 5,
    fused_loss: 3,
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_no_launcher_asks_for_a_value(step):
    assert len(record(step)) >= STEPS[step]


def test_every_op_is_asked():
    found = set(re.findall(r'triton\(\s*"(\w+)"', Path(__file__).read_text()))
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        assert namespace != "moe_runtime" or op in found


@pytest.mark.parametrize(
    "ask",
    [
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        torch.Tensor.numpy,
        torch.nonzero,
        bool,
        int,
        lambda x: x[x > 0],
    ],
)
def test_a_value_asked_for_is_seen(ask: Callable):
    with pytest.raises((RuntimeError, TypeError)):
        ask(meta(1))


def test_the_backend_that_loops_on_the_host_is_seen():
    rest = (None, None, None)
    with pytest.raises((RuntimeError, TypeError)):
        triton(
            "grouped_gemm",
            meta(R, H),
            meta(E, I, H),
            integers(E + 1),
            *rest,
            backend="torch",
        )
