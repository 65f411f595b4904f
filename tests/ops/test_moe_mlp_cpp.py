"""Details of the cpp backend: vectors, few tokens, threads, instruction sets, OpenMP."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_runtime.native import library
from moe_runtime.native.library import cpp
from moe_runtime.ops import moe_mlp_cpp, workspace
from moe_runtime.ops.activation import ACT, Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from tests.support import layouts
from tests.support.captured import captured
from tests.support.layer import moe_layer
from tests.support.oracle import assert_same, make_case, moe_eager

FLOATS = [torch.float32, torch.bfloat16]
LAYER = moe_layer(backend="cpp")
pytestmark = pytest.mark.usefixtures("cpu_library")


@pytest.fixture(params=[0, 1 << 20], ids=["matmuls", "one call"])
def way(request, monkeypatch):
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: request.param)


def no_grad(case, layer=LAYER):
    """Return the output of a case whose leaves need no gradient."""
    v = case.view(case.leaves)
    biases = {"up_bias": v.get("up_bias"), "down_bias": v.get("down_bias")}
    options = {"act": case.act, "gated": case.gated}
    tensors = (v["x"], v["up"], v["down"], v["topk_weight"], case.topk_idx)
    with torch.no_grad():
        return layer(*tensors, **biases, **options, **case.form)


def routed(counts, H, I, dtype, gated=True, bias=True):
    """Return a case whose experts have these numbers of rows, of shuffled tokens."""
    case = make_case(sum(counts), H, I, len(counts), 1, dtype, gated=gated, bias=bias)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    case.topk_idx.copy_(ids[torch.randperm(len(ids))][:, None])
    return case


class Kernels:
    """The library's individual steps, on gated silu or another form."""

    def __init__(self, dtype, act=0, gate_kind=1, threads=1):
        self.form = (cpp.DTYPES[dtype], act, gate_kind, float("inf"), 0.0)
        self.threads = threads
        self.calls = cpp.library().handle

    def activate(self, z, width):
        """Compute h [rows, width] from z."""
        h = z.new_empty(len(z), width)
        data = (z.data_ptr(), len(z), width, h.data_ptr())
        self.calls.moert_cpu_activate(*self.form, *data, self.threads)
        return h

    def activate_backward(self, z, dh, weight, slots):
        """Compute dz, the weighted h and the gradient of the weights."""
        dz = torch.empty_like(z)
        wh = torch.empty_like(dh)
        dweight = torch.empty(len(z))
        given = [t.data_ptr() for t in (z, dh, weight, slots)]
        made = [t.data_ptr() for t in (dz, wh, dweight)]
        self.calls.moert_cpu_activate_backward(
            *self.form,
            *given,
            *dh.shape,
            *made,
            self.threads,
        )
        return dz, wh, dweight

    def combine(self, y, weight, slot_row, tokens, num_rows):
        """Compute the weighted sums of each token's rows."""
        H = y.shape[1]
        out = y.new_empty(tokens, H)
        given = [t.data_ptr() for t in (y, weight, slot_row)]
        slots = len(slot_row) // tokens
        self.calls.moert_cpu_combine(
            self.form[0], *given, tokens, slots, H, num_rows, out.data_ptr(), self.threads
        )
        return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_change_no_bit(dtype, monkeypatch):
    case = make_case(150, 96, 128, 4, 2, dtype, "dropped", bias=True)
    z = torch.randn(300, 256).to(dtype)
    dh = torch.randn(300, 128).to(dtype)
    weight = torch.rand(300)
    slots = torch.randperm(300).int()
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: 1 << 20)

    def results(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        kernels = Kernels(dtype, threads=threads)
        h = kernels.activate(z, 128)
        gradients = kernels.activate_backward(z, dh, weight, slots)
        out = kernels.combine(dh, weight, slots, 150, 280)
        return [h, *gradients, out, no_grad(case)]

    expected = results(1)
    for threads in (2, 3, 8, 64):
        assert_same(results(threads), expected)


SMALL_TEAM = """
import torch
from moe_runtime.ops.moe_mlp import moe_mlp
torch.manual_seed(0)
weights = torch.randn(4, 64, 64), torch.randn(4, 64, 32)
tensors = (torch.randn(1300, 64), *weights, torch.rand(1300, 2))
idx = torch.randint(0, 4, (1300, 2))
results = []
for threads in (1, 64):
    torch.get_num_threads = lambda: threads
    results.append(moe_mlp(*tensors, idx, backend="cpp"))
assert torch.equal(*results)
"""


def test_a_smaller_team_of_threads_computes_everything():
    env = os.environ | {"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SMALL_TEAM], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [2, 5, 64])
def test_threads_that_share_the_tokens_change_no_bit(threads, dtype, monkeypatch, variant):
    # fewer panels than threads, and enough tokens to share
    case = make_case(1300, 70, 33, 2, 1, dtype, "halves", bias=True)
    case.topk_idx[:1100] = 0  # two parts of one expert
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: moe_mlp_cpp.ANY)
    expected = no_grad(case)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    workspace.release()
    assert torch.equal(no_grad(case), expected)


def evaluate(act: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the library's activation and its slope at x."""
    kernels = Kernels(
        torch.float32,
        act=cpp.ACTS[act],
        gate_kind=0,
    )
    row = x[None]
    h = kernels.activate(row, len(x))
    slots = torch.zeros(1, dtype=torch.int32)
    dz, wh, _ = kernels.activate_backward(
        row,
        torch.ones_like(row),
        torch.ones(1),
        slots,
    )
    assert_same(h, wh)
    return h[0], dz[0]


@pytest.mark.parametrize("act", cpp.ACTS)
def test_activations_and_slopes_are_those_of_float64(act, variant):
    x = torch.linspace(-30, 30, 100_003)
    wide = x.double().requires_grad_()
    expected = ACT[act](wide)
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    h, dz = evaluate(act, x)
    # relative to the larger of x and the value: 1 + erf and 1 + tanh lose their last digits near 0
    assert (
        (h - expected).abs() / torch.maximum(x.abs(), expected.abs()).clamp_min(1e-3)
    ).max() < 4e-7
    assert ((dz - slope).abs() / x.abs().clamp_min(1)).max() < 6e-7


@pytest.mark.parametrize("act", cpp.ACTS)
def test_extremes(act, variant):
    x = torch.tensor(
        [
            float("nan"),
            float("inf"),
            3e38,
            100.0,
            0.0,
            -0.0,
            -100.0,
            -3e38,
            1e-40,
            -1e-40,
        ]
    )
    expected = ACT[act](x.double()).float()
    got = evaluate(act, x)[0]
    torch.testing.assert_close(
        got[:8],
        expected[:8],
        rtol=1e-6,
        atol=1e-37,
        equal_nan=True,
    )
    assert got[8:].abs().max() <= 1e-40


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "up", "down", "topk_weight"])
def test_nan_and_infinity_reach_the_tokens_that_see_them(name, value, dtype, way, variant):
    case = make_case(9, 40, 48, 4, 2, dtype)
    clean = no_grad(case)
    case.leaves[name][1] = value
    out = no_grad(case)
    seen = (case.topk_idx == 1).any(1)
    if name in ("x", "topk_weight"):
        seen = torch.arange(9) == 1
    assert (~out[seen].isfinite()).any(1).all()
    assert torch.equal(out[~seen], clean[~seen])


def test_bfloat16_is_rounded_to_nearest_even(variant):
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.cat([(bits + tail).view(torch.float32) for tail in (0, 0x7FFF, 0x8000, 0x8001)])
    y = x.view(-1, 64)
    n = len(y)
    rows = torch.arange(n, dtype=torch.int32)
    ones = torch.ones(n)
    assert_same(
        Kernels(torch.float32).combine(
            y,
            ones,
            rows,
            n,
            n,
        ),
        y,
    )
    # from float32 to bfloat16: relu leaves positive values unchanged; the few-token path rounds
    # when it stores
    narrow = y.bfloat16()
    kernels = Kernels(torch.bfloat16)
    assert_same(kernels.combine(narrow, ones, rows, n, n), narrow)
    # every product is between two bfloat16 values, often halfway
    factor = 1 + 2**-8
    got = kernels.combine(narrow, ones * factor, rows, n, n)
    assert_same(got, (narrow.float() * factor).bfloat16())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ],
    ids=str,
)
def test_sort_is_stable_and_drops_what_is_outside(dtype):
    lowest = 0 if dtype == torch.uint8 else -2
    idx = torch.randint(lowest, 9, (500,)).to(dtype)
    offsets = torch.full((7,), -7, dtype=torch.int32)
    row_slot = torch.full((500,), -7, dtype=torch.int32)
    slot_row = row_slot.clone()
    cpp.library().handle.moert_cpu_sort(
        idx.data_ptr(),
        cpp.IDX_KINDS[dtype],
        500,
        6,
        offsets.data_ptr(),
        row_slot.data_ptr(),
        slot_row.data_ptr(),
    )
    key = torch.where(
        (idx < 0) | (idx >= 6),
        6,
        idx.long(),
    )
    assert torch.equal(row_slot.long(), key.argsort(stable=True))
    assert offsets[0] == 0
    assert torch.equal(offsets[1:].long(), key.bincount(minlength=7)[:6].cumsum(0))
    assert torch.equal(slot_row[row_slot.long()].long(), torch.arange(500))


def test_the_largest_expert_decides_who_multiplies(monkeypatch):
    taken = []
    one_call = moe_mlp_cpp._one_call

    def recorded(*args):
        taken.append(1)
        return one_call(*args)

    monkeypatch.setattr(moe_mlp_cpp, "_one_call", recorded)
    # a quarter of them each on average
    for T, few, expected in ((48, 48, 1), (49, 48, 0), (500, moe_mlp_cpp.ANY, 1)):
        taken.clear()
        monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype, few=few: few)
        case = make_case(T, 33, 17, 4, 1)
        case.topk_idx.fill_(2)
        no_grad(case)
        assert len(taken) == expected
    taken.clear()
    case = make_case(5, 33, 17, 4, 2)
    layouts.transposed_weights(case)  # their rows are not contiguous
    no_grad(case)
    assert not taken


@pytest.mark.parametrize("H, I", [(4096, 64), (64, 4096)])
def test_long_sums_are_as_exact_as_torchs(H, I, monkeypatch, variant):
    case = make_case(32, H, I, 1, 1)
    wide = [leaf.double() for leaf in case.leaves.values()]
    expected = moe_eager(*wide, case.topk_idx)

    def error(few):
        monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: few)
        return (no_grad(case) - expected).norm()

    assert error(moe_mlp_cpp.ANY) < 2 * error(0)


def test_the_process_has_one_openmp():
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "/libgomp" in line}) == 1
    assert "libgomp" in cpp.library().openmp or "omp" in cpp.library().openmp
    assert ctypes.CDLL(cpp.library().openmp).GOMP_parallel


SECOND = """
import ctypes, sys
other = ctypes.CDLL(sys.argv[1])  # before torch, as scikit-learn's can be
import torch
from moe_runtime.native import build, library
from moe_runtime.native.library import cpp

found = cpp.bind(build.library_path("cpu")).openmp
torch_own = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so").GOMP_parallel
address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
mine = address(ctypes.CDLL(found).GOMP_parallel)
same = mine == address(torch_own) != address(other.GOMP_parallel)
paths = {library.Path(line[5]) for line in library._maps() if len(line) > 5}
print(sum("gomp" in path.name for path in paths), same)
"""


@pytest.mark.parametrize("where", ["first", "last"])
def test_with_two_openmps_it_uses_torchs(where, tmp_path):
    torchs = Path(cpp.library().openmp)
    if torchs.name != "libgomp.so.1":
        pytest.skip(f"torch works in {torchs}")
    other = tmp_path / "libgomp-0.so"
    # under the same name torch would get the copy, since the loader keeps one library per name
    other.write_bytes(torchs.read_bytes().replace(b"libgomp.so.1\0", b"libgomp.so.7\0"))
    program = SECOND
    if where == "last":
        line = next(line for line in SECOND.splitlines() if line.startswith("other"))
        program = SECOND.replace(line + "\n", "").replace("\nfound", f"\n{line}\nfound")
    done = captured([sys.executable, "-c", program, str(other)])
    assert done.stdout.split() == ["2", "True"], done.stdout + done.stderr


def test_without_an_openmp_it_says_so_where_there_are_threads(monkeypatch, cpu_library):
    monkeypatch.setattr(library, "_openmp_runtimes", lambda: iter(()))
    alone = cpp.bind(cpu_library.path)
    try:
        assert alone.openmp == library.NO_OPENMP
    finally:
        monkeypatch.undo()
        cpp.bind(cpu_library.path)  # the library is shared by the process: restore its threads
    monkeypatch.setattr(cpp, "_found", alone)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert "no OpenMP runtime, but torch uses 4 threads. Load libgomp" in cpp.why_not(
        torch.device("cpu")
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpp.why_not(torch.device("cpu")) is None


def test_acts_are_numbered_once():
    assert list(cpp.ACTS) == list(ACT)
    experts = ExpertStacks(
        None,
        None,
        activation=Activation("gelu", True, None, 0.5, True),
    )
    assert moe_mlp_cpp.form_of(experts) == (1, 2, float("inf"), 0.5)


def test_peak_counts_what_it_computes(variant, cpu_library):
    """The ceiling of the benchmarks: the compiler must not remove any of the sums."""
    sink = torch.full((6,), float("nan"))
    arguments = (cpp.DTYPES[torch.float32], 6, 10, sink.data_ptr(), 2)
    lanes = {"generic": 4, "avx2": 8}.get(variant, 16)
    assert cpu_library.handle.moert_cpu_peak(*arguments) == 6 * 10 * 12 * 2 * lanes
    # ten times x / 2 + 1 / 4, starting from each n
    total = sum(0.5 + (n - 0.5) / 1024 for n in range(12))
    torch.testing.assert_close(sink, torch.full((6,), lanes * total))
