"""The experts on matrix tiles (AMX), and the same checks on every other instruction set."""

import pytest
import torch

from moe_runtime.ops import moe_mlp_cpp, workspace
from tests.ops.test_moe_mlp_cpp import no_grad, routed
from tests.support.layer import moe_layer
from tests.support.oracle import assert_same, moe_eager, run

BFLOAT = torch.bfloat16
LAYER = moe_layer(backend="cpp")


@pytest.fixture(autouse=True)
def _in_one_call(monkeypatch, cpu_library):
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: moe_mlp_cpp.ANY)
    workspace.release()  # otherwise memory from a smaller case would be zero or finite


def exact(case):
    """Compute the same numbers in float64."""
    v = {name: leaf.double() for name, leaf in case.leaves.items()}
    weight = v.pop("topk_weight")
    x, up, down = (v.pop(name) for name in ("x", "up", "down"))
    return moe_eager(
        x,
        up,
        down,
        weight,
        case.topk_idx,
        **v,
        act=case.act,
        gated=case.gated,
        **case.form,
    )


FORMS = [
    pytest.param({}, id="plain"),
    pytest.param({"interleaved": True, "limit": 0.5, "up_offset": 1.0}, id="GPT-OSS"),
    pytest.param({"limit": 0.25}, id="limit"),
    pytest.param(None, id="no gate"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "counts, H, I",
    [
        pytest.param(
            [3, 4, 0, 15, 1, 16],
            33,
            17,
            id="around the fewest rows for tiles",
        ),
        pytest.param(
            [17, 31, 2, 32, 33, 0],
            128,
            300,
            id="about one and two tiles",
        ),
        pytest.param(
            [257, 3, 48, 0, 64, 65],
            290,
            48,
            id="more than one part",
        ),
    ],
)
def test_every_count_of_rows_is_near_float64(counts, H, I, form, variant):
    case = routed(counts, H, I, BFLOAT, gated=form is not None)
    case.form = form or {}
    expected = exact(case)
    error = (no_grad(case) - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-2)
    assert error.max() < 0.02


def test_stale_memory_does_not_affect_results(monkeypatch, variant):
    case = routed([3, 20, 1, 37, 2, 50], 70, 41, BFLOAT)
    expected = no_grad(case)
    scratch = moe_mlp_cpp.scratch

    def dirty(*args):
        space = scratch(*args)
        if space.dtype == torch.uint8:
            space.fill_(0xFF)  # every value a NaN
        return space

    monkeypatch.setattr(moe_mlp_cpp, "scratch", dirty)
    assert torch.equal(no_grad(case), expected)


def test_neither_saving_nor_threads_change_a_bit(monkeypatch, variant):
    case = routed([5, 300, 18, 0, 33, 2], 96, 160, BFLOAT)
    expected = no_grad(case)
    for threads in (1, 2, 32):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        workspace.release()
        assert torch.equal(no_grad(case), expected)
    saved = run(case, LAYER)
    assert torch.equal(saved["out"], expected)
    assert_same(run(case, moe_layer(backend="cpp", recompute=True)), saved)


def test_torchs_tiles_and_the_librarys_leave_each_other_alone(cpu_library):
    a, b = torch.randn(2, 256, 256).to(BFLOAT)
    case = routed([40, 3, 70, 16, 5, 33], 96, 64, BFLOAT)
    best = cpu_library.variant
    product = torch.mm(a, b)
    outs = {}
    try:
        for name in 2 * list(cpu_library.info["sets"]):
            if cpu_library.handle.moert_cpu_limit(name.encode()):
                out = no_grad(case)
                assert torch.equal(torch.mm(a, b), product)
                assert torch.equal(outs.setdefault(name, out), out)
    finally:
        cpu_library.handle.moert_cpu_limit(best.encode())
    assert cpu_library.variant == best
    assert "generic" in outs


def test_a_backward_pass_is_one_call(monkeypatch, variant):
    taken = []
    one_call = moe_mlp_cpp._one_call_back

    def counted(*args):
        taken.append(1)
        return one_call(*args)

    monkeypatch.setattr(moe_mlp_cpp, "_one_call_back", counted)
    for rows in (3, 9, 70):
        taken.clear()
        run(
            routed(
                [rows, 1],
                48,
                64,
                BFLOAT,
                bias=False,
            ),
            LAYER,
        )
        assert len(taken) == 1
