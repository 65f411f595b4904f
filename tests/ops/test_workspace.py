"""Leased memory is never shared by two live tensors, never read before it is written, and returned
to the pool when a graph is freed.
"""

import concurrent.futures
import gc
import importlib.util
import sys
import threading
import weakref

import pytest
import torch

from moe_runtime.ops import workspace
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.support.oracle import assert_same, make_case
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def _empty_pool():
    workspace.release()
    yield
    workspace.release()


def pool_bytes() -> int:
    return sum(map(len, workspace._pool.free))


def poison() -> int:
    """Fill every free lease and all of this thread's scratch memory with NaN bits; return the
    number of blocks.
    """
    for block in workspace._pool.free:
        block[:] = b"\xff" * len(block)
    for buffer in getattr(workspace._local, "buffers", {}).values():
        buffer.view(torch.uint8).fill_(255)
    return len(workspace._pool.free)


def big_case(T=256, E=4, dtype=torch.float32, **kwargs):
    """A layer whose pre-activation is large enough to be leased: T * 2 * 512 elements."""
    case = make_case(T, 33, 256, E, 2, dtype, **kwargs)
    assert T * 2 * 512 * case.dout.element_size() >= workspace.LEASE_FROM
    return case


def start(case):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in case.leaves.items()}
    return moe_mlp(*leaves.values(), case.topk_idx), list(leaves.values())


def finish(case, out, leaves, **kwargs):
    return [
        out.detach(),
        *torch.autograd.grad(
            out,
            leaves,
            case.dout,
            **kwargs,
        ),
    ]


def test_release_reaches_the_scratch_memory_of_every_thread():
    """A GPU's backward pass runs in an autograd thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        alive = pool.submit(
            lambda: weakref.ref(
                workspace.scratch(
                    "a",
                    (4,),
                    LIKE,
                )._base
            )
        ).result()
        held = (
            pool.submit(
                workspace.scratch,
                "b",
                (4,),
                LIKE,
            )
            .result()
            .fill_(3)
        )
        assert alive() is not None
        workspace.release()
        assert alive() is None and held.tolist() == [3.0] * 4
        assert pool.submit(lambda: len(workspace._buffers())).result() == 0
        count = len(workspace._threads)
    gc.collect()
    assert len(workspace._threads) < count  # a finished thread leaves nothing


LIKE = torch.empty(0)
SHAPE = (3, 1 << 18)


def test_a_small_lease_takes_no_large_block():
    tensor = workspace.lease(SHAPE, LIKE)
    address = tensor.data_ptr()
    del tensor
    assert workspace.lease((1 << 18,), LIKE).data_ptr() != address


def test_two_live_leases_never_share():
    leases = [workspace.lease(SHAPE, LIKE).fill_(value) for value in range(3)]
    assert len({tensor.data_ptr() for tensor in leases}) == 3
    for value, tensor in enumerate(leases):
        assert (tensor == value).all()


@pytest.mark.parametrize(
    "part",
    [
        lambda t: t[2, 5:],
        lambda t: t.detach(),
        lambda t: t.view(-1)[::7],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
    ],
)
def test_a_view_keeps_the_memory(part):
    tensor = workspace.lease(SHAPE, LIKE).fill_(7)
    view = part(tensor)
    del tensor
    assert pool_bytes() == 0
    other = workspace.lease(SHAPE, LIKE).fill_(9)
    assert not isinstance(view, torch.Tensor) or (view == 7).all()
    del view, other
    assert pool_bytes() == 2 * (3 << 20)


def test_scratch_is_uninitialized_and_private_to_its_thread():
    mine = workspace.scratch("x", (4, 5), LIKE)
    assert mine.isnan().all()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        theirs = other.submit(
            workspace.scratch,
            "x",
            (4, 5),
            LIKE,
        ).result()
    assert mine.data_ptr() != theirs.data_ptr()
    assert (
        workspace.scratch(
            "x",
            (2, 2),
            LIKE,
        ).data_ptr()
        == mine.data_ptr()
    )
    assert (
        workspace.scratch(
            "y",
            (2, 2),
            LIKE,
        ).data_ptr()
        != mine.data_ptr()
    )
    assert workspace.scratch(
        "x",
        (0, 9),
        LIKE,
    ).shape == (0, 9)


def test_a_collection_in_the_middle_of_a_lease_does_not_deadlock():
    # a lease in a reference cycle (an exception's traceback is enough) is returned by the garbage
    # collector, which from Python 3.12 on may run between any two instructions, also while this
    # thread holds the pool's lock
    spec = importlib.util.find_spec("moe_runtime.ops.workspace")
    # a separate lock: a deadlock must not affect the other tests
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    gc.collect()
    gc.freeze()  # otherwise every collection traverses torch
    cycles = []
    done = threading.Event()
    for n in range(40):
        cycles.append([fresh.lease((fresh.LEASE_FROM // 4 + n,), LIKE)])
        cycles[-1].append(cycles[-1])

    def collect(frame, event, arg):
        if frame.f_code.co_filename != fresh.__file__:
            return None
        if cycles:
            cycles.pop()
            gc.collect()
        return collect

    def work():
        sys.settrace(collect)
        tensor = fresh.lease((fresh.LEASE_FROM // 4,), LIKE)
        del tensor
        fresh.release()
        sys.settrace(None)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    finished = done.wait(PATIENCE)
    assert finished


def test_layer_leases_and_returns():
    case = big_case()
    out, leaves = start(case)
    assert pool_bytes() == 0
    finish(case, out, leaves)
    del out
    assert pool_bytes() == 256 * 2 * 512 * 4
    start(case)  # a graph that is freed without a backward pass
    gc.collect()
    assert pool_bytes() == 256 * 2 * 512 * 4


@pytest.mark.parametrize("routing", ["random", "dropped", "skip"])
def test_poison_between_forward_and_backward_does_not_reach_the_graph(routing):
    case = big_case(routing=routing)
    other = big_case()
    expected = finish(case, *start(case))
    out, leaves = start(case)
    finish(other, *start(other))
    poison()
    assert_same(finish(case, out, leaves), expected)


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 2),
        (2, 1, 0),
        (1, 2, 0),
    ],
    ids=str,
)
def test_graphs_that_live_at_once(order):
    cases = [big_case(T) for T in (256, 256, 300)]
    expected = [finish(case, *start(case)) for case in cases]
    graphs = [start(case) for case in cases]
    for i in order:
        poison()
        assert_same(finish(cases[i], *graphs[i]), expected[i])


def test_backward_from_another_thread():
    case = big_case()
    expected = finish(case, *start(case))
    out, leaves = start(case)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        got = pool.submit(
            finish,
            case,
            out,
            leaves,
        ).result(timeout=PATIENCE)
    assert_same(got, expected)
    del out
    assert_same(finish(case, *start(case)), expected)


@pytest.mark.parametrize("order", ["itit", "titi"])
def test_inference_mode_and_training_take_turns(order):
    case = big_case()
    expected = finish(case, *start(case))
    workspace.release()
    for step in order:
        if step == "i":
            with torch.inference_mode():
                got = moe_mlp(*case.leaves.values(), case.topk_idx)
            assert torch.equal(got, expected[0])
        else:
            assert_same(finish(case, *start(case)), expected)


def test_pool_does_not_grow_with_every_new_length():
    # batches of varying length, as from any data loader that does not pad to a fixed length
    lengths = range(256, 256 + 32)
    for T in lengths:
        case = big_case(T)
        finish(case, *start(case))
    assert pool_bytes() <= 4 * (lengths[-1] * 2 * 512 * 4)


def buffers_of(stream: int) -> set[int]:
    """Return the addresses of this thread's scratch memory of a stream."""
    found = set()
    for key, buffer in workspace._buffers().items():
        if key[-1] == stream:
            found.add(buffer.data_ptr())
    return found


def test_streams_have_scratch_memory_of_their_own(monkeypatch):
    """Two streams of one thread must not write into each other's buffers; here two fake streams
    alternate for whole forward passes.
    """
    stream = [1]
    x = torch.randn(4, 3)
    monkeypatch.setattr(workspace, "stream_of", lambda device: stream[0])
    first = workspace.scratch("rows", (4, 3), x)
    stream[0] = 2
    second = workspace.scratch("rows", (4, 3), x)
    assert first.data_ptr() != second.data_ptr()
    stream[0] = 1
    assert (
        workspace.scratch(
            "rows",
            (4, 3),
            x,
        ).data_ptr()
        == first.data_ptr()
    )
    case = big_case()
    moe_mlp(*case.leaves.values(), case.topk_idx, backend="torch")
    held = buffers_of(1)
    stream[0] = 2
    moe_mlp(*case.leaves.values(), case.topk_idx, backend="torch")
    assert len(held) > 3
    assert held.isdisjoint(buffers_of(2))
