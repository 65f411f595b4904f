"""The launchers of kernels/merging.py: tiles, the guard on alpha, offsets, what is never
materialized.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.ops.merging import _linear_backward, merge_experts, remerge_experts
from tests.support.oracle import assert_parity

pytest.importorskip("triton")

from moe_runtime.kernels import merging

BOUND = 5e-6
NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def config(n, k, t, precision="ieee"):
    blocks = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": t}
    return blocks | {"PRECISION": precision, "num_warps": 4, "num_stages": 2}


class Linear:
    """dout, x, weight and dalpha in float64."""

    def __init__(self, T, E, N, K, dtype=torch.float32, weight_dtype=torch.float32, device="cpu"):
        self.dout = torch.randn(T, N).to(device, dtype)
        self.x = torch.randn(T, K).to(device, dtype)
        self.weight = torch.randn(E, N, K).to(device, weight_dtype)
        wide = (self.dout.double(), self.x.double(), self.weight.double())
        self.dalpha = torch.einsum("tn,tk,enk->e", *wide)

    def check(self, *tile):
        got = merging.merged_linear_backward_alpha(
            self.dout,
            self.x,
            self.weight,
            *tile,
        )
        assert_parity({"dalpha": got}, {"dalpha": self.dalpha}, BOUND)


@pytest.mark.parametrize(
    "tile",
    [
        pytest.param(config(16, 16, 16), id="16x16x16"),
        pytest.param(config(64, 16, 32), id="64x16x32"),
        pytest.param(config(16, 64, 64), id="16x64x64"),
        pytest.param(config(32, 32, 16, "tf32"), id="tf32"),
    ],
)
@pytest.mark.parametrize(
    "T, N, K",
    [
        (37, 33, 49),
        (64, 64, 128),
        (1, 17, 130),
        (16, 300, 16),
    ],
)
def test_linear_backward_on_every_tile(tile, T, N, K, device):
    Linear(
        T,
        3,
        N,
        K,
        torch.bfloat16,
        torch.bfloat16,
        device,
    ).check(tile)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_linear_backward_of_every_pair_of_dtypes(dtype, weight_dtype, device):
    Linear(33, 9, 17, 65, dtype, weight_dtype, device).check()


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize(
    "dtype, weight_dtype",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_config_fits_the_gpu(dtype, weight_dtype, arch):
    limit = 227 << 10 if arch in (90, 100, 103) else 99 << 10
    for sizes in ((4096, 2048, 5504), (1, 2048, 5504), (4096, 33, 17), (65536, 64, 1 << 15)):
        c = merging.linear_config(arch, dtype, weight_dtype, "tf32", *sizes)
        elements = c["num_stages"] * c["BLOCK_T"] * (c["BLOCK_N"] + c["BLOCK_K"])
        assert elements * dtype.itemsize <= limit
        assert (
            min(
                c["BLOCK_N"],
                c["BLOCK_K"],
                c["BLOCK_T"],
            )
            >= 16
        )


@pytest.mark.parametrize("E", [1, 3, 8, 9, 17])
@pytest.mark.parametrize("P", [1, 17, 4096, 2049])
def test_merge_and_dalpha_of_every_number_of_experts(E, P, device):
    weight = torch.randn(E, P + 5, device=device)[:, :P]
    alpha = torch.randn(E, device=device)
    dout = torch.randn(P, device=device)
    got = {
        "out": merging.merge_experts_forward(weight, alpha),
        "dalpha": merging.merge_experts_backward_alpha(dout, weight),
    }
    expected = {"out": alpha.double() @ weight.double(), "dalpha": weight.double() @ dout.double()}
    assert_parity(got, expected, BOUND)


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
        assert torch.equal(
            merged,
            merge_experts(
                weight,
                alpha,
                backend="triton",
            ).to(dtype),
        )
        seen.copy_(alpha)
    alpha[E - 1] = NAN  # NaN equals nothing
    seen[E - 1] = NAN
    remerge_experts(merged, weight, alpha, seen)
    assert merged.isnan().all()


class Sizes(TorchDispatchMode):
    """Records the number of elements of every tensor that an op returns and that is not a view of
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


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_gradient_of_the_experts_is_never_in_memory(name, device):
    case = Linear(5, 8, 33, 49, device=device)
    with Sizes(case.weight) as sizes:
        _linear_backward(case.dout, case.x, case.weight, None, False, name)
    assert sizes.created
    assert (33 * 49 in sizes.created) == (name == "torch")
