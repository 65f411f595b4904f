"""One step of EWA's averaging against the paper's sum in float64: every layout and edge; what it leaves alone."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.modules import ewa
from moe_runtime.modules.ewa import average_experts_
from tests.support.oracle import assert_parity


def by_the_paper(weight: torch.Tensor, share: float) -> torch.Tensor:
    """(1 - b) W_i + b / (E - 1) sum_{j != i} W_j, in float64."""
    w, E = weight.double(), weight.shape[0]
    others = [sum((w[j] for j in range(E) if j != i), torch.zeros_like(w[i])) for i in range(E)]
    return torch.stack([(1 - share) * w[i] + share / (E - 1) * others[i] for i in range(E)])


SHAPES = [
    pytest.param((8, 34, 33), id="XFT: 8 experts"),
    pytest.param((3, 17), id="E = 3, a bias"),
    pytest.param((2, 1), id="one number each"),
    pytest.param((4,), id="experts that are numbers"),
    pytest.param((2, 0, 7), id="no elements"),
    pytest.param((33, 129), id="many experts, odd sizes"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, device, tolerance):
    weight = torch.randn(shape, device=device).to(dtype)
    want = by_the_paper(weight, 0.3)
    got = average_experts_(weight, 0.3)
    assert got is weight and got.dtype == dtype
    assert_parity({"weight": got}, {"weight": want}, tolerance[dtype])


@pytest.mark.parametrize("share", [1e-6, 0.3, 0.43, 0.44, 0.7, 1.0])  # c is below and above 1/2, and above 1
@pytest.mark.parametrize("E", [2, 3, 8, 11])
def test_mean_stays_and_deviations_shrink_by_the_factor(E, share, device):
    weight = torch.randn(E, 33, 17, device=device)
    before = weight.double()
    average_experts_(weight, share)
    after, factor = weight.double(), 1 - share * E / (E - 1)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(after - after.mean(0), factor * (before - before.mean(0)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("E", [2, 3, 8, 11])
def test_the_share_that_makes_all_equal_does_so_to_the_last_bit(E, dtype, device):
    weight = torch.randn(E, 65, device=device).to(dtype)
    mean = weight.double().mean(0)
    average_experts_(weight, (E - 1) / E)
    assert (weight == weight[0]).all()
    torch.testing.assert_close(weight[0].double(), mean, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equal_experts_stay_what_they_are(dtype, share, device):
    one = torch.randn(65, device=device).to(dtype)
    weight = one.expand(7, -1).clone()
    assert all(torch.equal(w, one) for w in average_experts_(weight, share))


@pytest.mark.parametrize("share, shape", [(0.0, (4, 5)), (0.3, (1, 5))], ids=["share 0", "one expert"])
def test_nothing_to_do_is_done(share, shape):
    weight = torch.randn(shape)
    before, version = weight.clone(), weight._version
    assert torch.equal(average_experts_(weight, share), before) and weight._version == version


@pytest.mark.parametrize(
    "stored, view",
    [
        pytest.param((6, 33, 34), lambda w: w.transpose(1, 2), id="transposed"),
        pytest.param((34, 33, 6), lambda w: w.permute(2, 0, 1), id="the expert as the fastest dim"),
        pytest.param((12, 34, 33), lambda w: w[::2], id="every other expert"),
        pytest.param((6, 34, 66), lambda w: w[:, :, 1::2], id="strided"),
        pytest.param((8, 34, 33), lambda w: w[1:-1], id="not the first"),
    ],
)
def test_layouts(stored, view, device, tolerance):
    memory = torch.randn(stored, device=device)
    want = memory.double()
    view(want).copy_(by_the_paper(view(memory), 0.3))
    average_experts_(view(memory), 0.3)
    assert_parity({"memory": memory}, {"memory": want}, tolerance[torch.float32])  # what lies between is untouched


def test_float64_is_computed_in_float64():
    weight = torch.randn(5, 7, dtype=torch.float64)
    want = by_the_paper(weight, 0.3)
    torch.testing.assert_close(average_experts_(weight, 0.3), want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_once(dtype, device):
    weight = torch.randn(8, 64, 33, device=device).to(dtype)
    want = by_the_paper(weight, 0.3)
    average_experts_(weight, 0.3)
    assert (weight.double() - want).norm() <= 1.01 * (want.to(dtype).double() - want).norm()


def test_a_parameter_that_a_graph_saved_is_written_and_the_graph_knows(device):
    weight = torch.nn.Parameter(torch.randn(4, 5, device=device))
    loss = weight.square().sum()
    average_experts_(weight, 0.3)
    assert weight.is_leaf and weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_runs_give_the_same_bits(device):
    weight = torch.randn(8, 65, 33, device=device)
    first = average_experts_(weight.clone(), 0.3)
    assert all(torch.equal(average_experts_(weight.clone(), 0.3), first) for _ in range(3))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf"), "0.3", True, None])
def test_a_share_outside_is_named(share):
    with pytest.raises(ValueError, match="share is"):
        average_experts_(torch.randn(3, 4), share)


class Partitioned(torch.Tensor):
    """What DeepSpeed ZeRO-3 leaves of a parameter between its uses."""

    ds_id, ds_numel, ds_shape = 3, 60, (3, 4, 5)


@pytest.mark.parametrize(
    "weight, words",
    [
        pytest.param(torch.randn(()), "weight is ()", id="a number"),
        pytest.param(torch.randn(0, 3), "weight is (0, 3)", id="no experts"),
        pytest.param(torch.randn(1, 3).expand(4, 3), "want experts of their own memory", id="experts that overlap"),
        pytest.param(torch.arange(10.0).as_strided((3, 4), (2, 1)), "experts of their own memory", id="half overlap"),
        pytest.param(torch.empty(0).as_subclass(Partitioned), "ZeRO-3", id="DeepSpeed ZeRO-3"),
    ],
)
def test_bad_stacks_are_named(weight, words):
    with pytest.raises(ValueError) as error:
        average_experts_(weight, 0.3)
    assert words in str(error.value)


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    weight = torch.randn(3, 4, 5)
    want = average_experts_(weight.clone(), 0.3)
    torch.compile(lambda w: average_experts_(w, 0.3), fullgraph=True, backend="aot_eager")(weight)
    assert torch.equal(weight, want)


class Sizes(TorchDispatchMode):
    """Collects the bytes of every tensor that an op returns in memory of its own."""

    def __init__(self, known):
        super().__init__()
        self.known, self.created = known.untyped_storage().data_ptr(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.known:
            self.created.append(out.untyped_storage().nbytes())
        return out


def test_torch_makes_no_float32_copy_of_the_stack(monkeypatch):
    monkeypatch.setattr(ewa, "block_size", lambda one: 1 << 10)
    weight = torch.randn(8, 64, 64).bfloat16()
    want = by_the_paper(weight, 0.3)
    with Sizes(weight) as sizes:
        average_experts_(weight, 0.3)
    assert_parity({"weight": weight}, {"weight": want}, 1.5e-2)
    assert sizes.created and max(sizes.created) <= 4 << 10


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31, 2**31 + 1], ids=["2^31 - 1", "2^31", "2^31 + 1"])
def test_offsets_beyond_int32(stride):
    # calloc gives pages that take no memory before they are touched
    weight = torch.from_numpy(np.zeros(stride + 8, dtype=np.float16)).as_strided((2, 5), (stride, 1))
    weight[0], weight[1] = torch.arange(5), torch.arange(5, 10)
    average_experts_(weight, 0.25)
    assert weight.tolist() == [[i + 1.25 for i in range(5)], [i + 3.75 for i in range(5)]]
