"""The experts on matrix tiles (AMX), and, so that the same holds without them, on every other
instruction set.
"""

import pytest
import torch

from moe_runtime.native.library import cpp
from moe_runtime.ops import moe_mlp_cpp, workspace
from tests.ops.test_moe_mlp import layer
from tests.ops.test_moe_mlp_cpp import _library, no_grad, variant  # noqa: F401  fixtures
from tests.support.oracle import make_case, moe_eager, run

BFLOAT = torch.bfloat16
# rows of the experts: below and from the fewest that tiles take, about one and two tiles, more than
# one piece
COUNTS = [[3, 4, 0, 15, 1, 16], [17, 31, 2, 32, 33, 0], [257, 3, 48, 0, 64, 65]]


def routed(counts, H, I, **options):
    """A case whose experts have so many rows each, of tokens that are shuffled."""
    case = make_case(sum(counts), H, I, len(counts), 1, BFLOAT, **options)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    case.topk_idx.copy_(
        ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))][:, None]
    )
    return case


def exact(case):
    """What float64 makes of the same numbers."""
    v = case.view({name: leaf.double() for name, leaf in case.leaves.items()})
    biases = {name: v[name] for name in ("up_bias", "down_bias") if name in v}
    operands = (v["x"], v["up"], v["down"], v["topk_weight"], case.topk_idx)
    return moe_eager(*operands, act=case.act, gated=case.gated, **biases, **case.form)


@pytest.fixture(autouse=True)
def _in_one_call(monkeypatch):
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: moe_mlp_cpp.ANY)
    workspace.release()  # what a smaller case left there would be zero or finite


each = pytest.mark.usefixtures("variant")  # instruction set that this machine has
FORMS = [{}, {"interleaved": True, "limit": 0.5, "up_offset": 1.0}, {"limit": 0.25}, None]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "no gate" if form is None else str(form))
@pytest.mark.parametrize("counts, H, I", zip(COUNTS, (33, 128, 290), (17, 300, 48)), ids=str)
@each
def test_every_count_of_rows_is_near_float64(counts, H, I, form):
    case = routed(counts, H, I, gated=form is not None, bias=True)
    case.form = form or {}
    want = exact(case)
    error = (no_grad(case, backend="cpp") - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-2)
    assert error.max() < 0.02


@each
def test_what_memory_held_before_reaches_no_result(monkeypatch):
    case = routed([3, 20, 1, 37, 2, 50], 70, 41, bias=True)
    want = no_grad(case, backend="cpp")
    scratch = moe_mlp_cpp.scratch

    def dirty(*args):
        space = scratch(*args)
        return space.fill_(0xFF) if space.dtype == torch.uint8 else space  # every number a NaN

    monkeypatch.setattr(moe_mlp_cpp, "scratch", dirty)
    assert torch.equal(no_grad(case, backend="cpp"), want)


@each
def test_neither_saving_nor_threads_change_a_bit(monkeypatch):
    case = routed([5, 300, 18, 0, 33, 2], 96, 160, bias=True)
    want = no_grad(case, backend="cpp")
    for threads in (1, 2, 32):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        workspace.release()
        assert torch.equal(no_grad(case, backend="cpp"), want)
    saved = run(case, layer(backend="cpp"))
    again = run(case, layer(backend="cpp", recompute=True))
    assert torch.equal(saved["out"], want) and all(
        torch.equal(again[name], saved[name]) for name in saved
    )


def test_torchs_tiles_and_the_librarys_leave_each_other_alone():
    library = cpp.library()
    a, b = (
        torch.randn(256, 256, generator=torch.Generator().manual_seed(s)).to(BFLOAT) for s in (1, 2)
    )
    case = routed([40, 3, 70, 16, 5, 33], 96, 64)
    best = library.variant
    product = torch.mm(a, b)
    outs = {}
    try:
        for name in [*library.info["sets"], *library.info["sets"]]:
            if not library.handle.moert_cpu_limit(name.encode()):
                continue
            out = no_grad(case, backend="cpp")
            assert torch.equal(torch.mm(a, b), product) and torch.equal(
                outs.setdefault(name, out), out
            )
    finally:
        library.handle.moert_cpu_limit(best.encode())
    assert library.variant == best and "generic" in outs


@each
def test_a_backward_pass_is_one_call(monkeypatch):
    taken = []
    one_call = moe_mlp_cpp._one_call_back
    monkeypatch.setattr(
        moe_mlp_cpp, "_one_call_back", lambda *args: taken.append(1) or one_call(*args)
    )
    for rows in (3, 9, 70):
        taken.clear()
        run(routed([rows, 1], 48, 64), layer(backend="cpp"))
        assert len(taken) == 1
