"""The launchers of kernels/merging.py alone: tiles, the guard on alpha, offsets, what is never in
memory, mutants.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.ops.merging import _linear_backward_alpha, merge_experts, remerge_experts
from tests.support.mutants import edited, noting
from tests.support.oracle import mismatches

pytest.importorskip("triton")

from moe_runtime.kernels import merging

BOUND = 5e-6
NAN = float("nan")


def config(n, k, t, precision="ieee"):
    blocks = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": t}
    return blocks | {"PRECISION": precision, "num_warps": 4, "num_stages": 2}


def linear_case(T, E, N, K, dtype, weight_dtype, device):
    """dout, x, weight and dalpha in float64."""
    dout = torch.randn(T, N)
    x = torch.randn(T, K)
    weight = torch.randn(E, N, K)
    dout, x, weight = (
        t.to(device, d) for t, d in ((dout, dtype), (x, dtype), (weight, weight_dtype))
    )
    return dout, x, weight, torch.einsum("tn,tk,enk->e", dout.double(), x.double(), weight.double())


TILES = [
    pytest.param(config(16, 16, 16), id="16x16x16"),
    pytest.param(config(64, 16, 32), id="64x16x32"),
    pytest.param(config(16, 64, 64), id="16x64x64"),
    pytest.param(config(32, 32, 16, "tf32"), id="tf32"),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("T, N, K", [(37, 33, 49), (64, 64, 128), (1, 17, 130), (16, 300, 16)])
def test_linear_backward_on_every_tile(tile, T, N, K, device):
    dout, x, weight, want = linear_case(T, 3, N, K, torch.bfloat16, torch.bfloat16, device)
    got = merging.merged_linear_backward_alpha(dout, x, weight, tile)
    assert not mismatches({"dalpha": got}, {"dalpha": want}, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_linear_backward_of_every_pair_of_dtypes(dtype, weight_dtype, device):
    dout, x, weight, want = linear_case(33, 9, 17, 65, dtype, weight_dtype, device)
    got = merging.merged_linear_backward_alpha(dout, x, weight)
    assert not mismatches({"dalpha": got}, {"dalpha": want}, BOUND)


def test_config_fits_the_gpu():
    for arch in (80, 86, 89, 90, 100, 103, 120):
        for dtype, weight_dtype in (
            (torch.bfloat16,) * 2,
            (torch.bfloat16, torch.float32),
            (torch.float32,) * 2,
        ):
            for T, N, K in (
                (4096, 2048, 5504),
                (1, 2048, 5504),
                (4096, 33, 17),
                (65536, 64, 1 << 15),
            ):
                c = merging.linear_config(arch, dtype, weight_dtype, "tf32", T, N, K)
                shared = (
                    c["num_stages"] * c["BLOCK_T"] * (c["BLOCK_N"] + c["BLOCK_K"]) * dtype.itemsize
                )
                assert shared <= (227 << 10 if arch in (90, 100, 103) else 99 << 10)
                assert min(c["BLOCK_N"], c["BLOCK_K"], c["BLOCK_T"]) >= 16


@pytest.mark.parametrize("E", [1, 3, 8, 9, 17])
@pytest.mark.parametrize("P", [1, 17, 4096, 2049])
def test_merge_and_dalpha_of_every_number_of_experts(E, P, device):
    weight, alpha, dout = (torch.randn(shape, device=device) for shape in ((E, P), (E,), (P,)))
    got = {
        "out": merging.merge_experts_forward(weight, alpha),
        "dalpha": merging.merge_experts_backward_alpha(dout, weight),
    }
    want = {"out": alpha.double() @ weight.double(), "dalpha": weight.double() @ dout.double()}
    assert not mismatches(got, want, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("E", [1, 3, 8, 11])
def test_merges_again_only_when_alpha_changed(E, dtype, device):
    weight = torch.randn(E, 50, 60, device=device)
    alpha = torch.rand(E, device=device)
    merged = torch.full((50, 60), 7.0, dtype=dtype, device=device)
    seen = alpha.clone()
    remerge_experts(merged, weight, alpha, seen)
    assert (merged == 7).all()
    for e in range(E):
        alpha[e] = torch.nextafter(alpha[e], alpha[e] + 1)
        remerge_experts(merged.fill_(7), weight, alpha, seen)
        assert torch.equal(merged, merge_experts(weight, alpha, backend="triton").to(dtype))
        seen.copy_(alpha)
    alpha[E - 1] = seen[E - 1] = NAN  # nothing equals NaN
    remerge_experts(merged, weight, alpha, seen)
    assert merged.isnan().all()


class Sizes(TorchDispatchMode):
    """Collects the number of elements of every tensor that an op returns and that is no view of
    `known`.
    """

    def __init__(self, known):
        super().__init__()
        self.known = known.untyped_storage().data_ptr()
        self.created = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.known:
            self.created.append(out.numel())
        return out


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_gradient_of_the_experts_is_never_in_memory(backend, device):
    dout, x, weight, _ = linear_case(5, 8, 33, 49, torch.float32, torch.float32, device)
    with Sizes(weight) as sizes:
        _linear_backward_alpha(dout, x, weight, backend)
    assert (33 * 49 in sizes.created) == (backend == "torch") and sizes.created


def test_rows_beyond_int32(tmp_path):
    """The second row of an expert and the third of x lie at 2^30 and 2^31: one program of many, on
    files without content.
    """
    if torch.cuda.is_available():
        pytest.skip("a file is the CPU's")
    K = 1 << 30
    N = 3
    T = 3
    x, weight = (
        torch.from_numpy(np.memmap(tmp_path / name, np.float16, "w+", shape=(3, K)))
        for name in ("x", "weight")
    )
    numbers = torch.randn(2, 3, 16).half()
    dout = torch.randn(T, N).half()
    x[:, :16], weight[:, :16] = numbers[0], numbers[1]
    partial = torch.full((1, 1), NAN)
    constants = {"E": 1, "BLOCK_N": 16, "BLOCK_K": 16, "BLOCK_T": 16, "PRECISION": "ieee"}
    merging._merged_linear_bwd_alpha_kernel[(1,)](
        dout, x, weight, partial, T, N, K, N * K, **constants
    )
    want = torch.einsum("tn,tk,nk->", dout.double(), numbers[0].double(), numbers[1].double())
    assert not mismatches({"dalpha": partial[0, 0]}, {"dalpha": want}, 1e-5)


# mutants of the kernels' source; each has to be caught by the checks above
def caught(module) -> list[str]:
    """What the checks say of the launchers of `module`."""
    torch.manual_seed(0)
    found = []
    for E, P in ((11, 4097), (3, 64)):
        weight = torch.randn(E, P)
        alpha = torch.rand(E)
        dout = torch.randn(P)
        dout3, x, stack, dlinear = linear_case(37, E, 33, 49, torch.float32, torch.float32, "cpu")
        want = {
            "out": alpha.double() @ weight.double(),
            "dalpha": weight.double() @ dout.double(),
            "linear": dlinear,
        }
        want |= {"same": torch.full([P], 7.0), "again": want["out"]}
        with noting(found):
            got = {
                "out": module.merge_experts_forward(weight, alpha),
                "dalpha": module.merge_experts_backward_alpha(dout, weight),
                "linear": module.merged_linear_backward_alpha(dout3, x, stack, config(16, 32, 16)),
                "same": module.merge_experts_forward(
                    weight, alpha, torch.full([P], 7.0), alpha.clone()
                ),
            }
            seen = alpha.clone()
            seen[0] += 1
            got["again"] = module.merge_experts_forward(weight, alpha, torch.full([P], 7.0), seen)
            found += mismatches(got, want, BOUND)
    return found


MUTANTS = [
    pytest.param("mask=p < P)", "mask=p <= P)", id="an element too many is written"),
    pytest.param("outer(e < E, p < P)", "outer(e < E - 1, p < P)", id="last expert left out"),
    pytest.param(
        "for e0 in range(0, E, BLOCK_E)",
        "for e0 in range(0, BLOCK_E, BLOCK_E)",
        id="first experts only",
    ),
    pytest.param(", stride_e, p)", ", P // 2, p)", id="stride of another tensor"),
    pytest.param("if changed == 0", "if changed != 0", id="guard upside down"),
    pytest.param("changed = 0\n", "changed = 1\n", id="guard never holds"),
    pytest.param("changed += tl.sum", "changed = tl.sum", id="guard sees the last experts only"),
    pytest.param("e * blocks + block", "block * E + e", id="partials transposed"),
    pytest.param("outer(n < N, t < T)", "outer(n < N, t < T - 1)", id="last row left out"),
    pytest.param("outer(t < T, k < K)", "outer(t < t + 1, k < K)", id="rows behind the end"),
    pytest.param("range(0, T, BLOCK_T)", "range(0, BLOCK_T, BLOCK_T)", id="first rows only"),
    pytest.param(
        "cells(n.to(tl.int64), K, k)",
        "cells(n.to(tl.int64), N, k)",
        id="rows of the expert too short",
    ),
    pytest.param("row[None, :] * N + n", "row[None, :] * K + n", id="rows of dout too long"),
    pytest.param("tile_n, tile_k = ", "tile_k, tile_n = ", id="tiles transposed"),
    pytest.param("weight_ptr += stride_e", "weight_ptr += 0", id="first expert for all"),
    pytest.param("x, dw, input_precision", "x, None, input_precision", id="last rows only"),
    pytest.param("BLOCK_K + tl.arange", "(BLOCK_K - 1) + tl.arange", id="tiles that overlap"),
    pytest.param("partial.sum(1)", "partial[:, :-1].sum(1)", id="last block left out"),
]


@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path):
    assert caught(edited(merging, tmp_path, old, new))


def test_unharmed_kernels_pass(tmp_path):
    assert not caught(edited(merging, tmp_path, "", ""))
