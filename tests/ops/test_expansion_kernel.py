"""The launchers of kernels/expansion.py alone: what they read, numbers of experts and columns,
mutants.
"""

import numpy as np
import pytest
import torch

from moe_runtime.ops.expansion import draws
from tests.support.mutants import edited, noting
from tests.support.oracle import mismatches

pytest.importorskip("triton")

from moe_runtime import backends
from moe_runtime.kernels import expansion
from tests.support import interp_san

BOUND = 2e-6


def gram_in_float64(weight, base):
    rows = weight.double() - (0 if base is None else base.double())
    return rows @ rows.t()


@pytest.mark.parametrize("with_base", [False, True], ids=["", "base"])
@pytest.mark.parametrize("n, P", [(1, 1), (2, 8192), (5, 8193), (16, 300), (33, 500), (64, 130)])
def test_every_number_of_experts(n, P, with_base, device):
    weight = torch.randn(n, P, device=device)
    base = torch.randn(P, device=device) if with_base else None
    got = expansion.gram_forward(weight, base)
    assert not mismatches({"gram": got}, {"gram": gram_in_float64(weight, base)}, BOUND)


@pytest.mark.skipif(not backends.interpreted(), reason="counts the interpreter's loads")
def test_each_expert_is_read_once(monkeypatch):
    n = 5
    P = 9001
    found = []
    weight = torch.randn(n, P + 3)[:, :P]
    base = torch.randn(P)
    check = interp_san._Launch.check

    def count(self, kind, ptr, mask, size):
        if kind == "load":
            found.append(np.broadcast_to(ptr.data, mask.data.shape)[mask.data.astype(bool)])
        return check(self, kind, ptr, mask, size)

    monkeypatch.setattr(interp_san._Launch, "check", count)
    expansion.gram_forward(weight, base)
    addresses = np.concatenate([a.ravel() for a in found])
    want = [t.data_ptr() + 4 * np.arange(P) for t in (*weight, base)]
    assert np.array_equal(np.sort(addresses), np.sort(np.concatenate(want)).astype(addresses.dtype))


def thinned(first, second, base, seed, stream, threshold, scales):
    """The equation in float64."""
    numbers = draws(seed, stream, 0, first.numel())
    kept = torch.from_numpy(numbers >= threshold).to(first.device)
    out = 0 if base is None else base.double()
    for i, parent in enumerate((first, second)):
        delta = parent.double() - (0 if base is None else base.double())
        out = out + torch.where(kept[:, i], delta * scales[i], 0)
    return out


def caught(module) -> list[str]:
    """What the checks say of the launchers of `module`."""
    torch.manual_seed(0)
    found = []
    for n, P, with_base in ((5, 8261, True), (3, 1027, False)):
        memory = torch.randn(n, P + 3)  # experts that lie apart
        base = torch.randn(P) if with_base else None
        first, second = torch.randn(2, P + 2)[:, :P]
        first = first.clone()
        second = second.clone()
        want = {"gram": gram_in_float64(memory[:, :P], base)}
        scales = (0.75, 2.0)
        threshold = 3 << 30
        want["child"] = thinned(
            first, second, base, (1 << 62) + 7, (1 << 61) + 3, threshold, scales
        )
        with noting(found):
            got = {"gram": module.gram_forward(memory[:, :P], base)}
            got["child"] = module.dare_merge_forward(
                first, second, base, (1 << 62) + 7, (1 << 61) + 3, threshold, *scales
            )
            found += mismatches(got, want, BOUND)
    return found


MUTANTS = [
    pytest.param("outer(e < n, p < P)", "outer(e < n, p < P - 1)", id="last column left out"),
    pytest.param("- base[None, :]", "+ base[None, :]", id="the base added"),
    pytest.param("tl.trans(w), acc,", "tl.trans(w), None,", id="last columns only"),
    pytest.param("range(0, CHUNK, BLOCK_P)", "range(0, BLOCK_P, BLOCK_P)", id="first columns only"),
    pytest.param("chunk * CHUNK + p0", "chunk * (CHUNK - 1) + p0", id="chunks that overlap"),
    pytest.param("chunk * n * n +", "chunk * n +", id="partials on top of each other"),
    pytest.param("[:, None] * stride_e", "[:, None] * P", id="experts taken for neighbours"),
    pytest.param("partial.sum(0, dtype", "partial[:1].sum(0, dtype", id="first chunk only"),
    pytest.param("(block + 1).to", "block.to", id="counters from zero"),
    pytest.param(
        "tl.join(tl.join(a, c), tl.join(b, d))",
        "tl.join(tl.join(a, b), tl.join(c, d))",
        id="numbers in another order",
    ),
    pytest.param("zero + stream.to(tl.uint64)", "zero", id="one stream for all tensors"),
    pytest.param("zero + seed.to(tl.uint64)", "zero + stream.to(tl.uint64)", id="no seed"),
    pytest.param(", 10)", ", 7)", id="fewer rounds"),
    pytest.param("_kept(draw >> 32", "_kept(draw & 0xFFFFFFFF", id="one mask for both parents"),
    pytest.param(">= threshold", "> threshold + (1 << 24)", id="a little less kept"),
    pytest.param("second * second_scale", "second * first_scale", id="the first parent's weight"),
    pytest.param("second -= base", "second -= 0", id="the second parent whole"),
    pytest.param("out = base + out", "out = out", id="without the base"),
    pytest.param(
        "triton.cdiv(P, 4 * BLOCK_C)", "max(1, P // (4 * BLOCK_C))", id="the last elements"
    ),
    pytest.param("mask = p < P\n", "mask = p <= P\n", id="an element too many"),
]


@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path):
    assert caught(edited(expansion, tmp_path, old, new))


def test_unharmed_kernels_pass(tmp_path):
    assert not caught(edited(expansion, tmp_path, "", ""))
