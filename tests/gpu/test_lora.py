"""kernels/lora.py and lora_backward.py natively, for what the interpreter cannot show. Without a
GPU: tests/ops/test_lora.py.
"""

import pytest
import torch

from moe_runtime.kernels import lora, lora_backward
from moe_runtime.ops.lora import lora_mlp, lora_mlp_reference
from tests.support.lora import arguments, make_case, run
from tests.support.oracle import poison, relative_error

pytestmark = pytest.mark.gpu
TABLE = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2.5e-2,
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((512, 256, 1408, 8, 6, 16), id="XFT"),
        pytest.param((300, 256, 688, 16, 2, 8), id="UpIT: 2 of 16"),
        pytest.param((200, 128, 320, 8, None, 4), id="dense, rank 4"),
        pytest.param((77, 33, 17, 3, 2, 5), id="odd sizes"),
        pytest.param((130, 64, 96, 4, 2, 64), id="rank 64"),
        pytest.param((130, 64, 96, 2, 2, 128), id="rank 128"),
        pytest.param((1, 64, 96, 4, 2, 8), id="one token"),
        pytest.param((0, 64, 96, 4, 2, 8), id="no tokens"),
    ],
)
def test_parity_with_float64_on_poisoned_memory(shape, dtype):
    case = make_case(*shape, dtype=dtype)
    expected = run(case, lora_mlp_reference, torch.float64, "cuda")
    eager = run(case, lora_mlp_reference, device="cuda")
    poison()
    got = run(case, lora_mlp, device="cuda", backend="triton")
    for name in expected:
        if expected[name].numel() and shape[0]:
            bound = max(
                3 * relative_error(eager[name], expected[name]),
                TABLE[dtype] / 5,
            )
            assert relative_error(got[name], expected[name]) < min(bound, TABLE[dtype]), name
        else:
            assert got[name].shape == expected[name].shape
            assert not got[name].any()


def step(case):
    leaves = {name: leaf.detach().to("cuda").requires_grad_() for name, leaf in case.leaves.items()}
    args, kwargs = arguments(case, leaves, None, "cuda")
    dout = case.dout.cuda()
    return lambda: torch.autograd.grad(
        lora_mlp(*args, backend="triton", **kwargs), list(leaves.values()), dout
    )


def test_rows_beyond_two_to_the_31_elements():
    """The last rows of z and h are beyond 2^31 elements; they must equal the same tokens at the
    start.
    """
    T = (1 << 31) // 4096 // 2 + 64
    I = 4096
    E = 2
    rank = 16
    z = torch.zeros(
        T,
        2 * I,
        dtype=torch.bfloat16,
        device="cuda",
    )
    low = torch.zeros(
        3,
        T,
        E * rank,
        dtype=torch.bfloat16,
        device="cuda",
    )
    weight = torch.ones(T, E, device="cuda")
    rows = torch.randn(64, 2 * I, device="cuda").bfloat16()
    z[:64] = z[-64:] = rows
    low[:, :64] = low[:, -64:] = torch.randn(3, 64, E * rank, device="cuda").bfloat16()
    halves = [torch.randn(E, rank, I, device="cuda").bfloat16() for _ in range(3)]
    h = lora.lora_forward(
        z,
        low,
        weight,
        *halves,
        "silu",
        1.0,
    )
    assert h[:64].abs().sum() > 0
    assert torch.equal(h[:64], h[-64:])
    assert torch.equal(low[2, :64], low[2, -64:])
    dz, dlow, dweight = lora_backward.lora_backward(
        h,
        low[2],
        z,
        low,
        weight,
        *halves,
        "silu",
        1.0,
    )
    assert torch.equal(dz[:64], dz[-64:])
    assert torch.equal(dlow[:, :64], dlow[:, -64:])
    assert torch.equal(dweight[:64], dweight[-64:])


def test_keeps_no_row_of_a_single_expert():
    case = make_case(4096, 256, 1408, 8, 6, 16, dtype=torch.bfloat16)
    run_step = step(case)
    run_step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_step()
    # z, dz, h, dh before and after the kernels, and tensors of rank r; one row per slot would take
    # 6 x 2 x 2I
    assert torch.cuda.max_memory_allocated() - before < 2 * 4096 * (
        9 * 1408 + 16 * 8 * 16 + 6 * 256
    )
