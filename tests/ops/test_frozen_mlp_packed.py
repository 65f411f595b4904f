"""Experts over packed stacks against float64 of the weights that the bytes mean: every format,
backend and gradient.
"""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from moe_runtime import backends
from moe_runtime.kernels import tiles
from moe_runtime.native.library import cpp
from moe_runtime.ops import frozen_mlp_triton, moe_mlp_triton, packed
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.frozen_mlp import frozen_mlp
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack
from tests.support import cpu_build
from tests.support.mutants import edited, noting
from tests.support.opcheck import opcheck
from tests.support.oracle import assert_parity, mismatches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT_OSS = Activation("quick_gelu", True, 7.0, 1.0, True)
SILU = Activation("silu")


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    if DEVICE == "cpu":  # a GPU's tests wait for no compiler
        monkeypatch.setattr(cpp, "_found", cpu_build.library())


def make(
    form: str,
    H: int = 64,
    I: int = 64,
    T: int = 21,
    activation=SILU,
    dtype=torch.float32,
    E=3,
    K=2,
    rank=3,
    empty=None,
):
    """A case with stacks in the format `form`; expert `empty` gets no token."""
    torch.manual_seed(0)
    shapes = (E, (1 + activation.gated) * I, H), (E, H, I)
    stacks = [
        one(torch.randn(shape) * (1 + torch.arange(shape[1]) % 3)[:, None] * 0.1, form)
        for shape in shapes
    ]
    chosen = [e for e in range(E) if e != empty]
    topk_idx = torch.stack(
        [torch.tensor(chosen)[torch.randperm(len(chosen))[:K]] for _ in range(T)]
    )
    leaves = {"x": torch.randn(T, H), "topk_weight": torch.rand(T, K)}
    halves = zip(("up_a", "up_b", "down_a", "down_b"), (H, shapes[0][1], I, H))
    leaves |= {name: 0.3 * torch.randn(E, rank, n) for name, n in halves if rank}
    leaves = {
        name: leaf if name == "topk_weight" else leaf.to(dtype) for name, leaf in leaves.items()
    }
    return SimpleNamespace(
        stacks=stacks,
        topk_idx=topk_idx,
        leaves=leaves,
        dout=torch.randn(T, H).to(dtype),
        activation=activation,
    )


def one(weight: torch.Tensor, form: str) -> Stack:
    stored = weight.transpose(1, 2).contiguous() if form.endswith(packed.TRANSPOSED) else weight
    return Stack(
        *packed.pack(stored, form.removesuffix(packed.TRANSPOSED))[:2], form, tuple(weight.shape)
    )


def experts_of(case, leaves, stacks) -> FrozenExperts:
    pairs = [
        Pair(leaves[f"{n}_a"], leaves[f"{n}_b"]) if f"{n}_a" in leaves else None
        for n in ("up", "down")
    ]
    return FrozenExperts(*stacks, None, None, *pairs, case.activation)


def run(case, backend: str) -> dict[str, torch.Tensor]:
    device = "cpu" if backend == "cpp" else DEVICE
    leaves = {name: leaf.clone().to(device).requires_grad_() for name, leaf in case.leaves.items()}
    stacks = [
        s._replace(data=s.data.to(device), scales=[t.to(device) for t in s.scales])
        for s in case.stacks
    ]
    experts = experts_of(case, leaves, stacks)
    out, _ = frozen_mlp(
        leaves["x"], experts, leaves["topk_weight"], case.topk_idx.to(device), backend
    )
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout.to(device))
    return {"out": out.detach().cpu()} | {
        f"d{name}": grad.cpu() for name, grad in zip(leaves, grads)
    }


def oracle(case) -> dict[str, torch.Tensor]:
    """The same by autograd in float64, from dense weights."""
    leaves = {name: leaf.double().requires_grad_() for name, leaf in case.leaves.items()}
    up, down = (packed.reference(*stack[:3]) for stack in case.stacks)
    if "up_a" in leaves:
        up = up + leaves["up_b"].transpose(1, 2) @ leaves["up_a"]
        down = down + leaves["down_b"].transpose(1, 2) @ leaves["down_a"]
    out = 0
    for e in range(up.shape[0]):
        weight = torch.where(case.topk_idx == e, leaves["topk_weight"], 0).sum(1, keepdim=True)
        out = out + weight * (case.activation.apply(leaves["x"] @ up[e].t()) @ down[e].t())
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout.double())
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads)}


SLOW = pytest.mark.slow
CASES = [
    pytest.param("nf4", {}, id="nf4"),
    pytest.param(
        "nf4",
        {"H": 192, "T": 40, "empty": 1},
        id="nf4: several tiles, an expert without tokens",
        marks=SLOW,
    ),
    pytest.param(
        "nf4",
        {"activation": Activation("relu2", False), "rank": 0},
        id="nf4: no gate, no adapter",
        marks=SLOW,
    ),
    pytest.param("nf4_t", {"H": 128}, id="nf4 [in, out]", marks=SLOW),
    pytest.param("nf4_t", {"activation": GPT_OSS}, id="nf4 [in, out], GPT-OSS"),
    pytest.param("mxfp4", {"H": 96, "I": 32, "activation": GPT_OSS}, id="mxfp4, GPT-OSS"),
    pytest.param(
        "fp8_block", {"H": 200, "I": 128}, id="fp8: a last block that is narrower", marks=SLOW
    ),
    pytest.param("int8", {"H": 65, "I": 33}, id="int8, odd sizes"),
    pytest.param("int8", {"T": 1, "K": 1}, id="one token", marks=SLOW),
]


@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
@pytest.mark.parametrize("form, options", CASES)
def test_parity(form, options, backend, tolerance):
    if why := backends.why_not(
        backend, "frozen_mlp", torch.device("cpu" if backend == "cpp" else DEVICE)
    ):
        pytest.skip(why)
    case = make(form, **options)
    before = [
        hashlib.sha256(t.numpy().tobytes()).digest()
        for s in case.stacks
        for t in (s.data.view(torch.uint8), *s.scales)
    ]
    assert_parity(run(case, backend), oracle(case), tolerance[torch.float32])
    after = [
        hashlib.sha256(t.numpy().tobytes()).digest()
        for s in case.stacks
        for t in (s.data.view(torch.uint8), *s.scales)
    ]
    assert before == after


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.log2().ceil()).to(torch.float8_e8m0fnu)


SCALES = {
    "powers of two in 8 bits": powers_of_two,
    "16 bits": torch.Tensor.bfloat16,
    "strided": lambda scale: torch.stack([scale, scale * 7], -1)[..., 0],
}


@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
@pytest.mark.parametrize("form", SCALES)
def test_fp8_scales_of_other_dtypes_and_strides(form, backend, tolerance):
    if why := backends.why_not(
        backend, "frozen_mlp", torch.device("cpu" if backend == "cpp" else DEVICE)
    ):
        pytest.skip(why)
    case = make("fp8_block", H=136, I=128)
    case.stacks = [stack._replace(scales=[SCALES[form](stack.scales[0])]) for stack in case.stacks]
    case.leaves["x"] /= 4
    assert_parity(run(case, backend), oracle(case), tolerance[torch.float32])


@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
def test_strided_codes(backend, tolerance):
    if why := backends.why_not(
        backend, "frozen_mlp", torch.device("cpu" if backend == "cpp" else DEVICE)
    ):
        pytest.skip(why)
    case = make("int8", H=65, I=33)
    expected = oracle(case)
    case.stacks = [stack._replace(data=stack.data.mT.contiguous().mT) for stack in case.stacks]
    assert_parity(run(case, backend), expected, tolerance[torch.float32])


@pytest.mark.parametrize("form", packed.FORMATS)
def test_tensors_that_do_not_fit_the_format_are_refused(form):
    stack = one(torch.randn(3, 128, 64), form)
    wrong = [("data", stack.data.view(torch.int16), None), ("data", stack.data[0], None)]
    for i, scale in enumerate(stack.scales):
        changed = [
            scale[:0],
            scale.to(torch.int64),
            scale[None],
            scale.new_empty(scale.shape, device="meta"),
        ]
        changed += [scale[:-1]] if len(scale) > 1 else []
        wrong += [(f"scales\\[{i}\\]", tensor, i) for tensor in changed]
    for named, tensor, i in wrong:
        scales = [tensor if j == i else scale for j, scale in enumerate(stack.scales)]
        data = tensor if i is None else stack.data
        with pytest.raises(ValueError, match=named):
            packed.unpack(data, scales, form, 0, torch.float32)
        with pytest.raises(ValueError, match=named):
            broken = Stack(data, scales, form, stack.shape)
            weight = torch.ones(1, 1)
            idx = torch.zeros(1, 1, dtype=torch.int64)
            frozen_mlp(
                torch.ones(1, 64),
                FrozenExperts(broken, one(torch.randn(3, 64, 64), form)),
                weight,
                idx,
            )


@pytest.fixture
def wide_tiles(monkeypatch):
    """Interpret tiles of 64 columns and steps of 64, as on a GPU: two groups of MXFP4 in one, and
    half of one of FP8.
    """
    for kernel in tiles.KERNELS:
        monkeypatch.setitem(tiles._INTERPRETER, kernel, ((0, tiles.Tile(16, 64, 64, 4, 1)),))


@SLOW
@pytest.mark.parametrize("form, options", [CASES[0], CASES[4], CASES[5], CASES[6]])
def test_wide_tiles(form, options, wide_tiles, tolerance):
    if not backends.interpreted():
        pytest.skip("the tiles of the interpreter")
    case = make(form, **options)
    assert_parity(run(case, "triton"), oracle(case), tolerance[torch.float32])


@pytest.mark.parametrize("backend, dtype", [("cpp", torch.bfloat16), ("triton", torch.float16)])
@pytest.mark.parametrize(
    "form", ["nf4", *(pytest.param(name, marks=SLOW) for name in ("mxfp4", "fp8_block", "int8"))]
)
def test_16_bits(form, backend, dtype, tolerance):
    case = make(form, dtype=dtype, I=128)
    assert_parity(run(case, backend), oracle(case), tolerance[dtype])


def test_float64_is_exact():
    case = make("nf4")
    case.leaves = {name: leaf.double() for name, leaf in case.leaves.items()}
    case.dout = case.dout.double()
    assert_parity(run(case, "torch"), oracle(case), 1e-12)


@SLOW
def test_op_keeps_torchs_rules():
    case = make("nf4", T=5)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    experts = experts_of(case, leaves, case.stacks)
    args = (leaves["x"], leaves["topk_weight"], case.topk_idx, *experts.pack(), True, "torch")
    opcheck(torch.ops.moe_runtime.frozen_mlp, args)


# of kernels/packed.py; each has to be caught by the checks above
MUTANTS = [
    pytest.param(
        "tl.join(p >> 4, p & 15)", "tl.join(p & 15, p >> 4)", "nf4", id="nf4: low nibble first"
    ),
    pytest.param(
        "tl.join(p & 15, p >> 4)", "tl.join(p >> 4, p & 15)", "mxfp4", id="mxfp4: high nibble first"
    ),
    pytest.param("c0 // GROUP, mask", "c0 // GROUP + 1, mask", "nf4", id="absmax off by one block"),
    pytest.param(
        "c0 // GROUP + tl.arange(0, N)",
        "c0 // GROUP + 0 * tl.arange(0, N)",
        "mxfp4",
        id="first scale of a tile for all",
    ),
    pytest.param(
        "scale + r[:, None] * groups",
        "scale + 0 * r[:, None] * groups",
        "mxfp4",
        id="first row's scales",
    ),
    pytest.param("(code & 8) << 28", "0 << 28", "mxfp4", id="no sign"),
    pytest.param("(p & 128) << 24", "0 << 24", "fp8_block", id="fp8: no sign"),
    pytest.param(
        "1.329227995784916e36", "2.658455991569832e36", "fp8_block", id="fp8: twice as large"
    ),
    pytest.param("p.to(tl.int8, bitcast=True)", "p", "int8", id="int8: unsigned"),
]


@pytest.fixture
def kernels_with(monkeypatch, tmp_path):
    """Let the Triton backend run with a line of kernels/packed.py replaced."""
    from moe_runtime.kernels import grouped_gemm, grouped_gemm_backward, operands
    from moe_runtime.kernels import packed as kernel

    def load(old: str, new: str) -> None:
        block = edited(kernel, tmp_path, old, new)
        operand = edited(operands, tmp_path, "tl.arange", "tl.arange")
        operand.packed_block = block.packed_block
        operand.PackedWeight = kernel.PackedWeight
        changed = [
            edited(module, tmp_path, "tl.arange", "tl.arange")
            for module in (grouped_gemm, grouped_gemm_backward)
        ]
        for module in changed:
            module.weight_block = operand.weight_block
        for module in (frozen_mlp_triton, moe_mlp_triton):
            monkeypatch.setattr(module, "grouped_gemm", changed[0])
            monkeypatch.setattr(module, "backwards", changed[1])

    return load


def caught(form: str) -> list[str]:
    found = []
    case = make(form, T=9, I=128)
    with noting(found):
        found += mismatches(run(case, "triton"), oracle(case), 2e-5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("old, new, form", MUTANTS)
def test_mutant_is_caught(old, new, form, kernels_with, wide_tiles):
    kernels_with(old, new)
    assert caught(form)


def test_unharmed_kernels_pass(kernels_with, wide_tiles):
    kernels_with("tl.arange", "tl.arange")
    assert not caught("mxfp4")
