"""The launchers of kernels/lora.py and lora_backward.py alone: tiles, ranks, offsets, mutants."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_runtime.ops.activation import ACT
from tests.support.mutants import edited, noting
from tests.support.oracle import mismatches

pytest.importorskip("triton")

from moe_runtime.kernels import lora, lora_backward

BOUND = 5e-6
BACKWARD = ("lora_backward", "lora_backward_w")


def config(t, i, rank):
    return lora.LoraTile(t, i, max(16, 1 << (rank - 1).bit_length()), "ieee", 4, 1)


def inputs(T, I, E, rank, device, dtype=torch.float32, chosen=0.7):
    """z, low, weight, gate_b, up_b, down_a, dh, dlow; some weights are zero."""
    torch.manual_seed(0)
    z = torch.randn(T, 2 * I)
    low = torch.randn(3, T, E * rank) / rank**0.5
    weight = torch.rand(T, E) * (torch.rand(T, E) < chosen)
    halves = [torch.randn(E, rank, I) for _ in range(2)] + [torch.randn(E, rank, I) / I**0.5]
    cast = [
        t.to(device, dtype)
        for t in (z, low, *halves, torch.randn(T, I), torch.randn(T, E * rank) / rank**0.5)
    ]
    return cast[0], cast[1], weight.to(device), *cast[2:]


def want_of(z, low, weight, gate_b, up_b, down_a, dh, dlow, scaling):
    """Every result in float64 from the equations, the gradients by autograd."""
    z, low, weight, gate_b, up_b, down_a = (
        t.double().requires_grad_() for t in (z, low, weight, gate_b, up_b, down_a)
    )
    T, E, (gate, up) = z.shape[0], weight.shape[1], z.chunk(2, 1)
    pg, pu, _ = low.view(3, T, E, -1)
    h = 0
    q = []
    for e in range(E):
        a = ACT["silu"](gate + scaling * pg[:, e] @ gate_b[e]) * (up + scaling * pu[:, e] @ up_b[e])
        h = h + weight[:, e : e + 1] * a
        q.append(weight[:, e : e + 1] * a @ down_a[e].t())
    q = torch.cat(q, 1)
    total = (h * dh.double()).sum() + (q * dlow.double()).sum()
    dz, dweight, dgate_b, dup_b, ddown_a, dp = torch.autograd.grad(
        total, (z, weight, gate_b, up_b, down_a, low)
    )
    return {
        "h": h.detach(),
        "q": q.detach(),
        "dz": dz,
        "dgate": dp[0],
        "dup": dp[1],
        "dweight": dweight,
        "dgate_b": dgate_b,
        "dup_b": dup_b,
        "ddown_a": ddown_a,
    }


def launchers(forward=lora, backward=lora_backward):
    return SimpleNamespace(**vars(forward) | {name: getattr(backward, name) for name in BACKWARD})


def results(module, z, low, weight, gate_b, up_b, down_a, dh, dlow, scaling, block):
    shared = (weight, gate_b, up_b, down_a)
    low = low.clone()
    low[2] = float("nan")
    h = module.lora_forward(z, low, *shared, "silu", scaling, block)
    dz, dlows, dweight = module.lora_backward(dh, dlow, z, low, *shared, "silu", scaling, block)
    grads = module.lora_backward_w(dh, dlow, z, low, *shared, (True,) * 3, "silu", scaling, block)
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


@pytest.mark.parametrize("t, i", [(16, 16), (32, 16), (16, 64), (64, 32)])
@pytest.mark.parametrize(
    "T, I, E, rank", [(37, 49, 2, 5), (32, 64, 2, 16), (5, 130, 2, 1), (20, 33, 1, 20)]
)
def test_every_tile(T, I, E, rank, t, i, device):
    case = inputs(T, I, E, rank, device)
    got = results(launchers(), *case, 1.5, config(t, i, rank))
    assert not mismatches(got, want_of(*case, 1.5), BOUND)


def test_only_what_is_asked_for(device):
    z, low, weight, gate_b, up_b, down_a, dh, dq = inputs(21, 48, 3, 4, device)
    before = low.clone()
    lora.lora_forward(z, low, weight, gate_b, up_b, None, "silu", 1.0)
    assert torch.equal(low, before)
    shared = (dh, dq, z, low, weight, gate_b, None, down_a)
    assert not lora_backward.lora_backward(*shared, "silu", 1.0)[1][1].any()
    found = lora_backward.lora_backward_w(*shared, (False, False, True), "silu", 1.0)
    assert found[:2] == [None, None] and found[2].shape == down_a.shape
    assert lora_backward.lora_backward_w(*shared, (False,) * 3, "silu", 1.0) == [None] * 3


def test_no_tokens(device):
    case = inputs(0, 48, 3, 4, device)
    got = results(launchers(), *case, 1.0, None)
    assert got["h"].shape == (0, 48) and got["dweight"].shape == (0, 3)
    assert not any(got[name].any() for name in ("dgate_b", "dup_b", "ddown_a"))


def test_config_is_for_every_size():
    for dtype in (torch.float32, torch.bfloat16):
        for I, rank in ((5504, 16), (17, 1), (11008, 128), (1408, 256), (1, 3)):
            for kernel in ("fwd", "low", "bwd", "bwd_w"):
                c = lora.lora_config(
                    kernel, torch.empty(1, 2 * I, dtype=dtype, device="meta"), I, rank
                )
                assert max(rank, 16) <= c.BLOCK_R and min(c.BLOCK_T, c.BLOCK_I) >= 16


def test_rows_beyond_int32(tmp_path):
    """Rows of z lie 2^30 apart, of h and the ranks of b 2^29: one program of many, on files without
    content.

    The kernels that sum along I would have to read all of it; what they compute offsets with is the
    same.
    """
    if torch.cuda.is_available():
        pytest.skip("a file is the CPU's")
    I = 1 << 29
    T = 6
    E = 2
    rank = 5
    first = 16
    small = inputs(T, first, E, rank, "cpu", torch.float16)
    z, low, weight, gate_b, up_b, down_a, dh, dq = small

    def file(name, *shape):
        return torch.from_numpy(np.memmap(tmp_path / name, np.float16, "w+", shape=shape))

    wide = {
        "z": file("z", T, 2 * I),
        "dz": file("dz", T, 2 * I),
        "h": file("h", T, I),
        "dh": file("dh", T, I),
    }
    wide["z"][:, :first], wide["z"][:, I : I + first], wide["dh"][:, :first] = *z.chunk(2, 1), dh
    for name, half in (("gate_b", gate_b), ("up_b", up_b), ("down_a", down_a)):
        wide[name], wide[f"d{name}"] = file(name, E, rank, I), file(f"d{name}", E, rank, I)
        wide[name][:, :, :first] = half
    low[2] = float("nan")
    halves = [wide[name] for name in ("gate_b", "up_b", "down_a")]
    sizes = (T, I, rank, E)
    constants = {"ACT": "silu", "TILE": config(16, 16, rank)}
    plane = T * E * rank
    strides = (E * rank, plane, rank * I)
    experts = lora.LoraExperts(wide["z"], low, weight, *halves)
    lora._lora_fwd_kernel[(1,)](experts, wide["h"], *sizes, *strides, 1.5, **constants)
    lora_backward._lora_bwd_z_kernel[(1,)](
        wide["dh"], dq, experts, wide["dz"], *sizes, *strides, 1.5, **constants
    )
    grads = lora_backward.LoraGradients(*(wide[name] for name in ("dgate_b", "dup_b", "ddown_a")))
    lora_backward._lora_bwd_w_kernel[(E,)](
        wide["dh"], dq, experts, grads, *sizes, plane, 1.5, **constants
    )
    got = {
        "h": wide["h"][:, :first],
        "dz": torch.cat([wide["dz"][:, :first], wide["dz"][:, I : I + first]], 1),
    }
    got |= {name: wide[name][:, :, :first] for name in ("dgate_b", "dup_b", "ddown_a")}
    want = want_of(*small, 1.5)
    assert not mismatches(got, {name: want[name] for name in got}, 2e-3)


# mutants of the kernels' source; each has to be caught by the check above
def caught(module) -> list[str]:
    """What the check says of the launchers of `module`."""
    found = []
    for T, I, E, rank in ((20, 40, 2, 5),):
        case = inputs(T, I, E, rank, "cpu")
        with noting(found):
            found += mismatches(
                results(module, *case, 1.5, config(16, 32, rank)), want_of(*case, 1.5), BOUND
            )
    return found


MUTANTS = [
    pytest.param("return z + scaling * tl.dot", "return z + tl.dot", id="without the scaling"),
    pytest.param("return z + scaling *", "return scaling *", id="without the base"),
    pytest.param("(at + I), mask", "at, mask", id="gate for up"),
    pytest.param("low_ptr + plane, b, at", "low_ptr, b, at", id="gate's ranks for up"),
    pytest.param("        low_ptr += R", "        low_ptr += 0", id="first expert's ranks"),
    pytest.param("gate_b_ptr += stride_e", "gate_b_ptr += 0", id="first expert's gate"),
    pytest.param("up_b_ptr += stride_e", "up_b_ptr += 0", id="first expert's up"),
    pytest.param("down_a_ptr += stride_e", "down_a_ptr += 0", id="first expert's down"),
    pytest.param("dq_ptr += R", "dq_ptr += 0", id="first expert's dq"),
    pytest.param("mixed += weigh", "mixed = weigh", id="last expert only"),
    pytest.param("dgate += weigh", "dgate = weigh", id="last expert's gradient"),
    pytest.param("0.0, weight * tile)", "0.0, tile)", id="no weight"),
    pytest.param(
        "tl.where(weight == 0, 0.0, weight * tile)",
        "tl.where(weight != 0, 0.0, tile)",
        id="the others' weight",
    ),
    pytest.param(
        "(t * E + e), mask=t < T, other=0.0)[:, None]",
        "(t * E), mask=t < T, other=0.0)[:, None]",
        id="first weight",
    ),
    pytest.param("tl.trans(a), q,", "tl.trans(a), None,", id="last columns' q"),
    pytest.param("experts.low + plane + plane", "experts.low + plane", id="q over the ranks of up"),
    pytest.param(
        "dweight += tl.sum", "dweight = tl.sum", id="last columns' gradient of the weights"
    ),
    pytest.param(
        "tl.sum(da * value * u, 1)", "tl.sum(da * value, 1)", id="weights' gradient without up"
    ),
    pytest.param(
        "da * u * slope).to(b.dtype)", "da * u).to(b.dtype)", id="no slope in the ranks' gradient"
    ),
    pytest.param(
        "dgate += weigh(weight, da * u * slope)", "dgate += weigh(weight, da * u)", id="no slope"
    ),
    pytest.param(
        "dup += weigh(weight, da * value)",
        "dup += weigh(weight, da * g)",
        id="the pre-activation for its value",
    ),
    pytest.param(
        "tl.trans(b), dgate,", "tl.trans(b), None,", id="last columns' gradient of the ranks"
    ),
    pytest.param(
        "(scaling * dup).to(dlow", "dup.to(dlow", id="ranks' gradient without the scaling"
    ),
    pytest.param("dlow_ptr + plane + low_at", "dlow_ptr + low_at", id="up's gradient over gate's"),
    pytest.param("(scaling * gate_b)", "(gate_b)", id="b's gradient without the scaling"),
    pytest.param(
        "up_b, experts.low + plane, at",
        "up_b, experts.low, at",
        id="gate's ranks in the gradient of up",
    ),
    pytest.param("weigh(weight, value * u)", "value * u", id="no weight in a's gradient"),
    pytest.param("range(0, T, BLOCK_T)", "range(0, BLOCK_T, BLOCK_T)", id="first tokens only"),
    pytest.param("range(0, I, BLOCK_I)", "range(0, BLOCK_I, BLOCK_I)", id="first columns only"),
    pytest.param("rows.to(low.dtype), acc,", "rows.to(low.dtype), None,", id="last tokens only"),
    pytest.param("outer(t < T, r < R)", "outer(t < T, r < R - 1)", id="last rank left out"),
    pytest.param("(tl.program_id(0) % E)", "(tl.program_id(0) * 0)", id="first expert for all"),
    pytest.param("dz_ptr + I, dup", "dz_ptr + I, dgate", id="gate's gradient twice"),
]


@pytest.mark.slow
@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path):
    # where both files have the line, both
    files = [old in Path(module.__file__).read_text() for module in (lora, lora_backward)]
    assert any(files), f"the kernels have no {old!r} any more; plant this mutant elsewhere"
    modules = [
        edited(module, tmp_path, old, new) if has else module
        for module, has in zip((lora, lora_backward), files)
    ]
    assert caught(launchers(*modules))


def test_unharmed_kernels_pass(tmp_path):
    assert not caught(
        launchers(*(edited(module, tmp_path, "", "") for module in (lora, lora_backward)))
    )
