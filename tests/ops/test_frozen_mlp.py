"""Frozen experts with low-rank terms on every backend: adapters as PEFT stores them, ranks beyond a
block, other dtypes, and allocations.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_runtime.ops import workspace
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.frozen_mlp import frozen_mlp, frozen_mlp_reference
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack, weight_of
from tests.support.oracle import assert_parity, bounds, make_case, moe_oracle

OP = "frozen_mlp"


def adapted(case, up_rank, down_rank):
    """Add the pairs to a case's leaves: A [E, r, in], and B as PEFT stores it, [out, r E], with the
    expert as the fastest index.
    """
    dtype = case.leaves["x"].dtype
    for name, r in (("up", up_rank), ("down", down_rank)):
        E, out, into = case.leaves[name].shape
        if r:
            case.leaves[f"{name}_a"] = (torch.randn(E, r, into) / into**0.5).to(dtype)
            case.leaves[f"{name}_b"] = (torch.randn(out, r * E) / r**0.5).to(dtype)
    return case


def pair(leaves, name) -> Pair | None:
    a = leaves.get(f"{name}_a")
    if a is None:
        return None
    E, r, _ = a.shape
    return Pair(
        a,
        leaves[f"{name}_b"]
        .t()
        .contiguous()
        .view(
            r,
            E,
            -1,
        )
        .transpose(0, 1),
    )


def experts_of(case, leaves) -> FrozenExperts:
    return FrozenExperts(
        Stack.dense(leaves["up"]),
        Stack.dense(leaves["down"]),
        leaves.get("up_bias"),
        leaves.get("down_bias"),
        pair(leaves, "up"),
        pair(leaves, "down"),
        Activation(case.act, case.gated, **case.form),
    )


def run(case, layer, dtype=None, device="cpu"):
    """Run `layer` on the case's leaves; return the output and the gradients of everything that
    trains.
    """
    leaves = {}
    learned = {}
    for name, leaf in case.leaves.items():
        leaves[name] = leaf.detach().clone().to(device, dtype or leaf.dtype)
        if name not in ("up", "down"):
            learned[name] = leaves[name].requires_grad_()
    experts = experts_of(case, leaves)
    out = layer(
        leaves["x"],
        experts,
        leaves["topk_weight"],
        case.topk_idx.to(device),
    )
    dout = case.dout.to(device, out.dtype)
    grads = torch.autograd.grad(
        out,
        list(learned.values()),
        dout,
        allow_unused=True,
    )
    found = {"out": out.detach().cpu()}
    for (name, leaf), grad in zip(
        learned.items(),
        grads,
        strict=True,
    ):
        found[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).cpu()
    return found


def oracle(x, experts, topk_weight, topk_idx):
    """Compute the experts with merged weights, slot by slot."""
    whole = []
    for stack, low in ((experts.up, experts.up_lora), (experts.down, experts.down_lora)):
        weight = stack.data
        if low is not None:
            weight = weight + torch.einsum("ero,eri->eoi", low.b, low.a)
        whole.append(weight)
    act, gated, *_ = experts.activation
    biases = {"up_bias": experts.up_bias, "down_bias": experts.down_bias}
    form = experts.activation.gate_form() if gated else {}
    return moe_oracle(
        x,
        *whole,
        topk_weight,
        topk_idx,
        act=act,
        gated=gated,
        **biases,
        **form,
    )


@pytest.fixture
def layer(backend):
    return lambda *args: frozen_mlp(*args, backend=backend)[0]


@pytest.fixture
def check(layer, tolerance, device):
    """Return check(case), which compares a backend with the oracle."""

    def check(case):
        dtype = case.leaves["x"].dtype
        expected = run(case, oracle, torch.float64)
        limit = bounds(run(case, frozen_mlp_reference), expected, tolerance[dtype])
        assert_parity(run(case, layer, device=device), expected, limit)

    return check


@pytest.mark.parametrize(
    "sizes, ranks, options",
    [
        pytest.param(
            (21, 8, 8, 3, 2),
            (20, 70),
            {},
            id="r beyond every size",
        ),
        pytest.param(
            (29, 33, 17, 4, 2),
            (3, 5),
            {"bias": True},
            id="odd sizes, biases",
        ),
        pytest.param(
            (29, 40, 8, 4, 2),
            (1, 2),
            {},
            id="narrow experts: 2I < H",
        ),
        pytest.param(
            (23, 32, 16, 4, 3),
            (3, 3),
            {"routing": "dropped"},
            id="dropped slots",
        ),
        pytest.param(
            (23, 32, 16, 4, 2),
            (3, 0),
            {"gated": False},
            id="only up, without a gate",
        ),
        pytest.param(
            (23, 32, 16, 4, 2),
            (0, 0),
            {"bias": True},
            id="no adapter",
        ),
        pytest.param(
            (40, 32, 16, 20, 2),
            (3, 3),
            {},
            id="more experts than rows per expert",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parity(sizes, ranks, options, dtype, check):
    check(adapted(make_case(*sizes, dtype=dtype, **options), *ranks))


def in_x_out(stack):
    return stack.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("stored", [torch.Tensor.contiguous, in_x_out])
def test_a_stack_of_another_dtype_is_converted_one_expert_at_a_time(
    stored, layer, backend, tolerance, device
):
    """As under autocast: float32 stacks, everything else narrow."""
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    case = adapted(
        make_case(29, 32, 16, 4, 2, dtype),
        3,
        3,
    )
    narrow = run(case, layer, device=device)

    def wide(x, experts, *slots):
        up = Stack.dense(stored(experts.up.data.float()))
        down = Stack.dense(stored(experts.down.data.float()))
        return layer(
            x,
            experts._replace(up=up, down=down),
            *slots,
        )

    assert_parity(
        run(case, wide, device=device),
        narrow,
        tolerance[dtype],
    )
    stack = Stack.dense(stored(torch.randn(3, 4, 6)))
    one = weight_of(stack, 1, torch.bfloat16, "test")
    assert torch.equal(one, stack.data[1].bfloat16())
    assert one.stride() == stack.data[1].stride()


class Stacks(TorchDispatchMode):
    """Records the shapes of the three-dimensional tensors that operators allocate."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not func.is_view:
                self.shapes.add(tuple(t.shape))
        return out


@pytest.mark.parametrize("name", ["torch", "cpp"])
def test_nothing_of_a_stacks_size_is_made(name, monkeypatch, cpu_library):
    """Covers operators that create a tensor, and every allocation that the profiler sees, including
    C++.
    """
    # leased memory would come from outside torch's allocator
    monkeypatch.setattr(workspace, "LEASE_FROM", 1 << 62)
    workspace.release()
    case = adapted(make_case(64, 128, 96, 32, 4), 2, 2)
    leaves = case.leaves
    for key, leaf in leaves.items():
        leaf.requires_grad_(key not in ("up", "down"))
    experts = experts_of(case, leaves)
    slots = (leaves["topk_weight"], case.topk_idx)
    with (
        Stacks() as made,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace,
    ):
        out, _ = frozen_mlp(
            leaves["x"],
            experts,
            *slots,
            backend=name,
        )
        out.sum().backward()
    for E, *matrix in (leaves["up"].shape, leaves["down"].shape):
        assert (E, *matrix) not in made.shapes
        assert (E, *matrix[::-1]) not in made.shapes
    allocated = []
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated.append(event.nbytes())
    rows = 64 * 4 * 192 * 4
    assert rows <= max(allocated) < leaves["down"].numel()  # a quarter of the smaller stack
    assert leaves["up"].grad is None
    assert leaves["down"].grad is None


def test_bad_arguments_are_named():
    case = adapted(make_case(9, 8, 8, 4, 2), 3, 5)
    experts = experts_of(case, case.leaves)

    def refused(match, x=case.leaves["x"], **changes):
        with pytest.raises(ValueError, match=match):
            frozen_mlp(
                x,
                experts._replace(**changes),
                case.leaves["topk_weight"],
                case.topk_idx,
            )

    up = experts.up.data
    wrong_b = experts.down_lora._replace(b=experts.up_lora.b)
    refused("Expected .*but down_b is", down_lora=wrong_b)
    wrong_a = experts.up_lora._replace(a=experts.up_lora.a.bfloat16())
    refused(r"up_a is \(4, 3, 8\) torch.bfloat16", up_lora=wrong_a)
    trains = Stack.dense(up.clone().requires_grad_())
    refused("Expected a frozen stack on .*, but up requires a gradient", up=trains)
    refused(r"down \(4, 8, 7\)", down=Stack.dense(experts.down.data[..., 1:]))
    refused("Expected x .T, H. of a floating dtype, but x is", x=case.topk_idx)
