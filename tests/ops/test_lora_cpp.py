"""LoRA experts in the CPU library: every instruction set, sizes that are no multiples of vectors,
panels and blocks, and bits that do not depend on the number of threads.
"""

import pytest
import torch

from moe_runtime.ops.lora import lora_mlp
from tests.support.lora import make_case, oracle, run
from tests.support.oracle import assert_parity, assert_same

FLOATS = [torch.float32, torch.bfloat16]


OF_LIBRARY = ("dgate_b", "dup_b", "ddown_a", "dtopk_weight")


def ours(case):
    return run(case, lora_mlp, backend="cpp")


CASES = [
    pytest.param((40, 34, 48, 8, 2, 33), {}, id="remainders"),
    pytest.param((40, 16, 530, 3, None, 70), {}, id="every expert, ranks of two panels"),
    pytest.param((190, 8, 2100, 8, 8, 3), {}, id="several groups of tokens"),
    pytest.param((150, 8, 33, 2, 1, 1), {}, id="more rows than a block of a sum"),
    pytest.param((30, 32, 40, 4, 2, 6), {"routing": "skip", "bias": True}, id="dropped slots"),
    pytest.param((21, 32, 40, 4, 2, 6), {"targets": ("gate", "down")}, id="gate and down"),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes, options", CASES)
def test_is_the_equation(sizes, options, dtype, variant, tolerance):
    case = make_case(*sizes, dtype=dtype, **options)
    assert_parity(ours(case), run(case, oracle, torch.float64), tolerance[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, cpu_library):
    """Of the library's sums: torch's products before them are exact, those after may differ."""
    case = make_case(300, 16, 600, 8, 4, 5, dtype=dtype)
    for tensor in (*case.leaves.values(), *case.base.values(), case.dout):
        tensor.mul_(8).round_().div_(8)
    results = []
    for threads in (3, torch.get_num_threads()):
        torch.set_num_threads(threads)
        got = ours(case)
        results.append({name: got[name] for name in OF_LIBRARY})
    assert_same(*results)


def test_no_tokens(cpu_library):
    got = ours(make_case(0, 16, 24, 4, 2, 3))
    assert got["out"].shape == (0, 16)
    assert not got["dgate_a"].any()
