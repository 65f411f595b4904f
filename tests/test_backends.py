"""Which backend runs, and why another one does not: an explicit request is honored or refused with
the reason, never replaced.
"""

import json
from pathlib import Path

import pytest
import torch

from moe_runtime import backends
from moe_runtime.native.library import Loaded, cpp, cuda
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.expansion import dare_merge, gram
from moe_runtime.ops.frozen_mlp import frozen_mlp
from moe_runtime.ops.frozen_rows import FrozenExperts, Stack
from moe_runtime.ops.fusion import fused_cross_entropy
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.lora import LoRA, lora_mlp
from moe_runtime.ops.merging import merge_experts
from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.ops.routing import route
from moe_runtime.tools import doctor as surroundings
from tests.support import cpu_build

CPU = torch.device("cpu")
IDX = torch.zeros(3, 2, dtype=torch.int32)
CALLS = {
    "route": lambda **b: route(torch.randn(3, 4), 2, "softmax_topk", **b)[0],
    "dispatch": lambda **b: dispatch(IDX, 2, **b)[0],
    "grouped_gemm": lambda **b: grouped_gemm(
        torch.randn(3, 4), torch.randn(1, 2, 4), torch.tensor([0, 3]), **b
    ),
    "combine": lambda **b: combine(torch.randn(6, 4), torch.rand(3, 2), torch.arange(6), **b),
    "moe_mlp": lambda **b: moe_mlp(
        torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3), torch.rand(3, 2), IDX, **b
    ),
    "frozen_mlp": lambda **b: frozen_mlp(
        torch.randn(3, 4),
        FrozenExperts(Stack.dense(torch.randn(2, 6, 4)), Stack.dense(torch.randn(2, 4, 3))),
        torch.rand(3, 2),
        IDX,
        **b,
    )[0],
    "merge_experts": lambda **b: merge_experts(torch.randn(2, 3), torch.rand(2), **b),
    "lora_mlp": lambda **b: lora_mlp(
        torch.randn(3, 4),
        *torch.randn(2, 5, 4),
        torch.randn(4, 5),
        torch.rand(3, 2),
        IDX,
        up=LoRA(torch.randn(2, 1, 4), torch.randn(2, 1, 5)),
        **b,
    ),
    "gram": lambda **b: gram(torch.randn(2, 3), **b).float(),
    "dare_merge": lambda **b: dare_merge(
        *torch.randn(2, 3), weights=(0.5, 0.5), seed=0, tensor=0, **b
    ),
    "fused_cross_entropy": lambda **b: fused_cross_entropy(
        [torch.randn(3, 4)], [torch.randn(5, 4)], torch.rand(3, 1), torch.arange(3), **b
    ),
}
EACH_OP = pytest.mark.parametrize("op", CALLS)


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv("MOE_RUNTIME_BACKEND", raising=False)


@pytest.fixture
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class OnGpu:
    """The attributes that `pick` reads from a tensor on a GPU."""

    is_cuda = True
    device = torch.device("cuda:0")
    dtype = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    def of(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return OnGpu()

    return of


@EACH_OP
def test_torch_runs_everywhere_and_is_the_default_on_the_cpu(op, monkeypatch):
    monkeypatch.setattr(cpp, "_found", "the CPU library is not built")
    assert backends.pick(op, torch.zeros(1)) == "torch"
    assert backends.pick(op, torch.zeros(1), "torch") == "torch"
    assert backends.why_not("torch", op, CPU) is None
    torch.manual_seed(1)
    default = CALLS[op]()
    torch.manual_seed(1)
    assert torch.equal(CALLS[op](backend="torch"), default)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "")  # how a shell or a compose file unsets it
    torch.manual_seed(1)
    assert torch.equal(CALLS[op](), default)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@EACH_OP
def test_an_unusable_requested_backend_is_an_error_with_the_reason(op, backend, not_interpreted):
    with pytest.raises(ValueError) as error:
        CALLS[op](backend=backend)
    assert f"backend {backend!r} cannot run {op}: " in str(error.value)
    assert backends.why_not(backend, op, CPU) in str(error.value)


@EACH_OP
def test_unknown_backend_is_an_error(op, monkeypatch):
    for backend in ("Triton", "cutlass", ""):
        with pytest.raises(ValueError, match="backend must be one of torch, triton, cuda") as error:
            CALLS[op](backend=backend)
        assert repr(backend) in str(error.value)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "tritn")
    with pytest.raises(ValueError, match="backend must be one of torch, triton, cuda.*'tritn'"):
        CALLS[op]()


@pytest.mark.parametrize("op", backends.TRITON_OPS)
def test_variable_is_honoured_or_refused(op, monkeypatch, not_interpreted):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        CALLS[op]()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.pick(op, torch.zeros(1)) == "triton"


def test_an_argument_beats_the_variable(monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    for op in CALLS:
        assert backends.pick(op, torch.zeros(1), "torch") == "torch"
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    with pytest.raises(ValueError, match="cuda"):
        backends.pick("merge_experts", torch.zeros(1), "cuda")


@pytest.mark.parametrize("op", backends.TRITON_OPS)
def test_triton_is_the_default_on_a_gpu_that_can(op, gpu, monkeypatch):
    assert backends.pick(op, gpu((9, 0))) == "triton"
    assert backends.pick(op, gpu((8, 0)), "triton") == "triton"
    assert backends.pick(op, gpu((12, 0))) == "triton"  # newer than any known capability
    assert backends.pick(op, gpu((7, 5))) == "torch"
    with pytest.raises(ValueError, match="sm_75, but sm_80 or newer"):
        backends.pick(op, gpu((7, 5)), "triton")
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", False)
    assert backends.pick(op, gpu((9, 0))) == "torch"
    with pytest.raises(ValueError, match="triton is not installed"):
        backends.pick(op, gpu((9, 0)), "triton")


def test_asking_the_gpu_what_it_is_does_not_break_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    torch._dynamo.reset()

    def f(x):
        return x + 1 if backends.why_not("triton", "moe_mlp", torch.device("cuda:0")) is None else x

    assert torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1


# the library of csrc/cpu, which is the default for the experts where it exists
@EACH_OP
def test_cpp_is_the_default_of_experts_and_merging_where_its_library_is(op, monkeypatch):
    library = cpu_build.library()
    monkeypatch.setattr(cpp, "_found", library)
    assert str(library.path) in cpp.describe()
    default = "cpp" if op in backends.CPP_OPS else "torch"
    for dtype in (torch.float32, torch.bfloat16):
        assert backends.pick(op, torch.zeros(1, dtype=dtype)) == default
    for dtype in (torch.float16, torch.float64):
        assert backends.pick(op, torch.zeros(1, dtype=dtype)) == "torch"
    assert backends.pick(op, torch.zeros(1), "torch") == "torch"
    # applies to the experts, not to the others
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "cpp")
    assert backends.pick(op, torch.zeros(1)) == default
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    assert backends.pick(op, torch.zeros(1)) == "torch"


# the library of csrc/: requested, or measured to be faster
@pytest.fixture
def library(monkeypatch):
    """A library for GPUs, which is never called, and a GPU that has it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    cuda.use(Loaded(None, Path("lib.so"), {"archs": ["sm_90"], "nvcc": "13.0"}))
    yield OnGpu()
    cuda.use(None)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Write another table of measured backends."""
    path = tmp_path / "table.json"
    monkeypatch.setattr(backends, "CUDA_TABLE", path)

    def write(*rows):
        path.write_text(json.dumps({"measured": rows}))
        backends.measured_faster.cache_clear()

    yield write
    backends.measured_faster.cache_clear()


@EACH_OP
def test_cuda_runs_only_when_it_is_asked_for(op, library, monkeypatch):
    requested = "cuda" if op in backends.CUDA_OPS else "triton"
    if op in backends.CUDA_OPS:
        assert backends.pick(op, library) == "triton"
        assert backends.pick(op, library, "cuda") == "cuda"
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "cuda")
    assert backends.pick(op, library) == requested


def test_cuda_is_the_default_where_the_table_says_so(library, table, monkeypatch):
    table({"op": "dispatch", "device": "NVIDIA H200"}, {"op": "route", "device": "NVIDIA A100"})
    assert backends.pick("dispatch", library) == "cuda"
    assert backends.pick("route", library) == "triton"
    assert backends.pick("dispatch", library, "triton") == "triton"
    cuda.use(None)  # the table does not replace a library
    monkeypatch.setattr(cuda, "_found", "the CUDA library is not built")
    assert backends.pick("dispatch", library) == "triton"


def test_cuda_is_never_the_default_where_it_would_refuse(library, table):
    table(*({"op": op, "device": "NVIDIA H200"} for op in backends.CUDA_OPS))
    assert {backends.pick(op, library) for op in backends.CUDA_OPS} == {"cuda"}
    assert {backends.pick(op, library, cuda_fits=False) for op in backends.CUDA_OPS} == {"triton"}
    # if requested, the op says why it cannot run
    assert backends.pick("route", library, "cuda", cuda_fits=False) == "cuda"
    assert cuda_kernels.fits(1024)
    assert not cuda_kernels.fits(1025)
    library.dtype = torch.int8
    assert backends.pick("merge_experts", library) == "triton"
    assert backends.pick("dispatch", library) == "cuda"


@pytest.mark.parametrize(
    "call", [lambda E: route(torch.randn(2, E), 2, "softmax_topk"), lambda E: dispatch(IDX, E)]
)
def test_ops_say_what_fits(call, monkeypatch):
    fits = []

    def pick(*_, cuda_fits):
        fits.append(cuda_fits)
        return "torch"

    monkeypatch.setattr(backends, "pick", pick)
    for E in (4, 1025):
        call(E)
    assert fits == [True, False]


def test_cuda_says_why_it_cannot(library, monkeypatch):
    assert backends.why_not("cuda", "moe_mlp", library.device) == "moe_mlp has no cuda kernel"
    with pytest.raises(ValueError, match="'cuda' cannot run dispatch: the tensor is on the CPU"):
        backends.pick("dispatch", torch.zeros(1), "cuda")
    why = backends.why_not("cuda", "dispatch", torch.device("xpu"))
    assert why == "the tensor is on xpu, not on cuda"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: library)
        why = surroundings.explain("dispatch", library.device)
    assert why == "triton; cuda on request: not measured to be faster here"
    cuda.use(None)
    monkeypatch.setattr(cuda, "_found", "the CUDA library is not built. To build it, run how to")
    with pytest.raises(ValueError, match="combine: the CUDA library is not built. To build it"):
        backends.pick("combine", library, "cuda")
    cuda.use(Loaded(None, Path("emulator.so"), {}))
    # on the CPU, as in tests/csrc
    assert backends.pick("combine", torch.zeros(1), "cuda") == "cuda"
    with pytest.raises(ValueError, match="the emulator, which runs on the CPU"):
        backends.pick("combine", library, "cuda")
