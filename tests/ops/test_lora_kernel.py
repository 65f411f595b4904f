"""The launchers of kernels/lora.py and lora_backward.py: tiles, ranks, offsets."""

import pytest
import torch

from moe_runtime.ops.activation import ACT
from tests.support.oracle import assert_parity

pytest.importorskip("triton")

from moe_runtime.kernels import lora, lora_backward

BOUND = 5e-6
NAN = float("nan")
SCALING = 1.5


def config(t, i, rank):
    return lora.LoraTile(
        t,
        i,
        max(16, 1 << (rank - 1).bit_length()),
        "ieee",
        4,
        1,
    )


def inputs(T, I, E, rank, device, dtype=torch.float32):
    """Return z, low, weight, gate_b, up_b, down_a, dh, dlow; some weights are zero."""
    weight = torch.rand(T, E) * (torch.rand(T, E) < 0.7)
    tensors = {
        "z": torch.randn(T, 2 * I),
        "low": torch.randn(3, T, E * rank) / rank**0.5,
        "gate_b": torch.randn(E, rank, I),
        "up_b": torch.randn(E, rank, I),
        "down_a": torch.randn(E, rank, I) / I**0.5,
        "dh": torch.randn(T, I),
        "dlow": torch.randn(T, E * rank) / rank**0.5,
    }
    case = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    return case | {"weight": weight.to(device)}


LEAVES = ("z", "weight", "gate_b", "up_b", "down_a", "low")


def expected(case):
    """Compute every result in float64 from the equations, gradients by autograd."""
    v = {name: case[name].double().requires_grad_() for name in LEAVES}
    gate, up = v["z"].chunk(2, 1)
    T, E = case["weight"].shape
    gate_low, up_low, _ = v["low"].view(3, T, E, -1)
    h = 0
    q = []
    for e in range(E):
        g = gate + SCALING * gate_low[:, e] @ v["gate_b"][e]
        u = up + SCALING * up_low[:, e] @ v["up_b"][e]
        part = v["weight"][:, e : e + 1] * ACT["silu"](g) * u
        h = h + part
        q.append(part @ v["down_a"][e].t())
    q = torch.cat(q, 1)
    total = (h * case["dh"].double()).sum() + (q * case["dlow"].double()).sum()
    grads = torch.autograd.grad(total, list(v.values()))
    found = {"h": h.detach(), "q": q.detach()}
    for name, grad in zip(LEAVES, grads, strict=True):
        found[f"d{name}"] = grad
    dlow = found.pop("dlow")
    return found | {"dgate": dlow[0], "dup": dlow[1]}


def launched(case, tile):
    """Return every result of the launchers; the forward pass fills the third plane of `low`."""
    low = case["low"].clone()
    low[2] = NAN
    halves = (case["weight"], case["gate_b"], case["up_b"], case["down_a"])
    shared = (case["dh"], case["dlow"], case["z"], low, *halves)
    h = lora.lora_forward(
        case["z"],
        low,
        *halves,
        "silu",
        SCALING,
        tile,
    )
    dz, dlows, dweight = lora_backward.lora_backward(
        *shared,
        "silu",
        SCALING,
        tile,
    )
    needs = (True, True, True)
    grads = lora_backward.lora_backward_w(*shared, needs, "silu", SCALING, tile)
    return {
        "h": h,
        "q": low[2],
        "dz": dz,
        "dgate": dlows[0],
        "dup": dlows[1],
        "dweight": dweight,
        "dgate_b": grads[0],
        "dup_b": grads[1],
        "ddown_a": grads[2],
    }


@pytest.mark.parametrize(
    "t, i",
    [
        (16, 16),
        (32, 16),
        (16, 64),
        (64, 32),
    ],
)
@pytest.mark.parametrize(
    "T, I, E, rank",
    [
        (37, 49, 2, 5),
        (32, 64, 2, 16),
        (5, 130, 2, 1),
        (20, 33, 1, 20),
    ],
)
def test_every_tile(T, I, E, rank, t, i, device):
    case = inputs(T, I, E, rank, device)
    assert_parity(
        launched(case, config(t, i, rank)),
        expected(case),
        BOUND,
    )


def test_only_what_is_asked_for(device):
    case = inputs(21, 48, 3, 4, device)
    z, low, weight, gate_b = (case[name] for name in ("z", "low", "weight", "gate_b"))
    before = low.clone()
    lora.lora_forward(
        z,
        low,
        weight,
        gate_b,
        case["up_b"],
        None,
        "silu",
        1.0,
    )
    assert torch.equal(low, before)
    shared = (case["dh"], case["dlow"], z, low, weight, gate_b, None, case["down_a"])
    _, dlows, _ = lora_backward.lora_backward(*shared, "silu", 1.0)
    assert not dlows[1].any()
    found = lora_backward.lora_backward_w(
        *shared,
        (False, False, True),
        "silu",
        1.0,
    )
    assert found[:2] == [None, None]
    assert found[2].shape == case["down_a"].shape
    assert (
        lora_backward.lora_backward_w(
            *shared,
            (False,) * 3,
            "silu",
            1.0,
        )
        == [None] * 3
    )
