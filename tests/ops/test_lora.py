"""LoRA experts over one base against experts made whole, forward and every gradient; what runs
once, and what is kept.
"""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime import backends
from moe_runtime.ops import lora as lora_ops
from moe_runtime.ops import lora_torch
from moe_runtime.ops.lora import LoRA, lora_mlp, lora_mlp_reference, mixed_weight
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.support.lora import NAMES, arguments, make_case, oracle, run
from tests.support.oracle import assert_parity, bounds, saved_bytes

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name in ("torch", "triton")
    for why in [
        backends.why_not(
            name, "lora_mlp", torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
    ]
]
SHAPES = [  # T, H, I, E, K, rank
    pytest.param((37, 34, 48, 8, 6, 8), {}, id="XFT: 6 of 8"),
    pytest.param((29, 33, 17, 3, 2, 5), {}, id="E = 3, odd sizes"),
    pytest.param((0, 32, 48, 4, 2, 8), {}, id="no tokens"),
    pytest.param((1, 32, 48, 4, 2, 8), {}, id="one token"),
    pytest.param((19, 32, 48, 1, 1, 4), {}, id="E = 1"),
    pytest.param((19, 32, 48, 4, 4, 16), {}, id="K = E"),
    pytest.param((19, 32, 48, 4, None, 16), {}, id="dense"),
    pytest.param((23, 32, 48, 4, 2, 8), {"routing": "skip"}, id="an expert without tokens"),
    pytest.param((23, 32, 48, 4, 1, 8), {"routing": "all"}, id="all tokens on one expert"),
    pytest.param((23, 32, 48, 4, 3, 8), {"routing": "dropped"}, id="dropped slots"),
    pytest.param((23, 32, 48, 4, 2, 8), {"routing": "twice"}, id="one expert twice"),
    pytest.param((40, 32, 48, 5, 2, 1), {}, id="rank 1"),
    pytest.param((21, 32, 48, 3, 2, 33), {}, id="rank beyond H"),
    pytest.param((21, 32, 48, 4, 2, 8), {"bias": True, "act": "gelu"}, id="biases"),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of tokens, with tokens of every kind."""
    monkeypatch.setattr(lora_torch, "EXPERT_ELEMENTS", 1 << 9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, options", SHAPES)
def test_parity(shape, options, dtype, backend, device, tolerance):
    case = make_case(*shape, dtype=dtype, **options)
    want = run(case, oracle, torch.float64)
    got = run(case, lora_mlp, device=device, backend=backend)
    if dtype == torch.float32:
        limit = tolerance[dtype]
    else:
        limit = bounds(run(case, lora_mlp_reference), want, tolerance[dtype])
    assert got["out"].dtype == dtype and got["dtopk_weight"].dtype == torch.float32
    assert_parity(got, want, limit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "targets", [("gate",), ("up",), ("down",), ("gate", "down"), ("up", "gate")], ids=" ".join
)
def test_projections_without_pairs_are_the_bases(targets, backend, device, tolerance):
    case = make_case(21, 33, 49, 3, 2, 6, targets=targets)
    got = run(case, lora_mlp, device=device, backend=backend)
    assert_parity(got, run(case, oracle, torch.float64), tolerance[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("act", ["gelu_tanh", "quick_gelu", "relu", "relu2"])
def test_activations(act, backend, device, tolerance):
    case = make_case(21, 32, 48, 3, 2, 6, act=act)
    got = run(case, lora_mlp, device=device, backend=backend)
    assert_parity(got, run(case, oracle, torch.float64), tolerance[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16(backend, device, tolerance):
    case = make_case(21, 32, 48, 3, 2, 6, dtype=torch.float16)
    assert_parity(
        run(case, lora_mlp, device=device, backend=backend),
        run(case, oracle, torch.float64),
        tolerance[torch.float16],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputed_gives_the_same_bits(backend, device):
    case = make_case(37, 33, 49, 4, 2, 6, bias=True)
    kept, again = (
        run(case, lora_mlp, device=device, backend=backend, recompute=on) for on in (False, True)
    )
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts(backend, device, tolerance):
    """x every other column, a stacked gate_up as the base, pairs transposed, an expanded
    gradient.
    """
    case = make_case(21, 32, 48, 3, 2, 6)
    case.dout = case.dout[:1, :1].expand(21, 32)
    want = run(case, oracle, torch.float64)

    def apart(x, gate_proj, up_proj, down_proj, weight, idx, **kwargs):
        x = torch.stack([x, torch.zeros_like(x)], 2).flatten(1)[:, ::2]
        gate_proj, up_proj = torch.cat([gate_proj, up_proj]).chunk(2)
        for name in NAMES:
            kwargs[name] = LoRA(
                *(half.transpose(1, 2).contiguous().transpose(1, 2) for half in kwargs[name])
            )
        return lora_mlp(
            x,
            gate_proj,
            up_proj,
            down_proj.t().contiguous().t(),
            weight,
            idx,
            backend=backend,
            **kwargs,
        )

    assert_parity(run(case, apart, device=device), want, tolerance[torch.float32])


def test_reference_is_the_equation(tolerance):
    for K in (2, None):
        case = make_case(21, 33, 17, 3, K, 6, dtype=torch.float64, bias=True)
        assert_parity(run(case, lora_mlp_reference), run(case, oracle), tolerance[torch.float64])
        assert_parity(run(case, lora_mlp), run(case, oracle), tolerance[torch.float64])


def test_gradcheck():
    case = make_case(5, 4, 6, 3, 2, 2, dtype=torch.float64)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}

    def layer(*tensors):
        args, kwargs = arguments(case, dict(zip(leaves, tensors)), None, "cpu")
        return lora_mlp(*args, **kwargs)

    assert torch.autograd.gradcheck(layer, tuple(leaves.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_pairs_are_the_dense_base(backend, device):
    case = make_case(21, 32, 48, 4, 2, 6)
    for name in NAMES:
        case.leaves[f"{name}_b"].zero_()
    case.leaves["topk_weight"].fill_(0.5)
    got = run(case, lora_mlp, device=device, backend=backend)["out"]
    base = [weight[None] for weight in case.base.values()]
    one = torch.zeros(21, 1, dtype=torch.int32)
    want = moe_mlp(
        case.leaves["x"], torch.cat(base[:2], 1), base[2], torch.ones(21, 1), one, backend="torch"
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_chose_may_be_anything(backend, device):
    """An expert that overflows harms those alone that chose it, and the weights of dropped slots
    nobody.
    """
    case = make_case(24, 32, 48, 4, 2, 6, routing="skip")
    case.topk_idx[5] = torch.tensor([3, -1])
    case.leaves["topk_weight"][5, 1] = float("nan")
    others = torch.arange(24) != 5
    want = run(case, lora_mlp, device=device, backend=backend)
    assert want["out"].isfinite().all() and want["dtopk_weight"][5, 1] == 0
    for name in ("gate_b", "up_b"):
        case.leaves[name][3] *= 1e25
    got = run(case, lora_mlp, device=device, backend=backend)
    assert not got["out"][5].isfinite().any()
    for name in ("out", "dx", "dtopk_weight"):
        assert torch.equal(got[name][others], want[name][others])
    for name in case.leaves:
        if name[-2:] in ("_a", "_b"):
            assert torch.equal(got[f"d{name}"][:3], want[f"d{name}"][:3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_of_zero_has_a_gradient(backend, device, tolerance):
    case = make_case(21, 32, 48, 4, 2, 6)
    case.leaves["topk_weight"][::2, 0] = 0
    want = run(case, oracle, torch.float64)
    assert want["dtopk_weight"][::2, 0].abs().min() > 0
    assert_parity(
        run(case, lora_mlp, device=device, backend=backend), want, tolerance[torch.float32]
    )


class Products(TorchDispatchMode):
    """Counts the multiply-adds of matrix products, and those in which `weights` take part."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {w.data_ptr(): name for name, w in weights.items()}
        self.found = []
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.total += a.shape[0] * a.shape[1] * b.shape[1]
            self.found += [
                self.weights[t.data_ptr()] for t in (a, b) if t.data_ptr() in self.weights
            ]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_base_runs_once_per_token(backend, device):
    T = 64
    H = 48
    I = 80
    E = 8
    K = 6
    rank = 4
    case = make_case(T, H, I, E, K, rank)
    leaves = {name: leaf.to(device) for name, leaf in case.leaves.items()}
    (x, gate, up, down, weight, idx), kwargs = arguments(case, leaves, None, device)
    halves = [half for name in NAMES for half in kwargs[name]]
    shared = (x, gate, up, down, None, None, weight, idx, *halves)
    with Products({"gate": gate, "up": up, "down": down}) as products:
        _, z, low = lora_ops._forward(*shared, E, 1.0, "silu", True, backend)
    assert sorted(products.found) == ["down", "gate", "up"]
    own = 3 * T * E * rank * (H + I)
    assert 3 * T * H * I <= products.total <= 3 * T * H * I + own < 3 * T * K * H * I
    with Products({"gate": gate, "up": up, "down": down}) as products:
        lora_ops._backward(x, z, low, True, [True] * 6, *shared, E, 1.0, "silu", True, backend)
    assert sorted(products.found) == ["down", "gate", "up"]  # and no gradient of the base
    assert products.total <= 3 * T * H * I + 3 * own


def test_keeps_the_input_one_pre_activation_and_what_has_rank_r():
    T = 256
    H = 64
    I = 96
    E = 4
    rank = 2
    case = make_case(T, H, I, E, 2, rank)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    args, kwargs = arguments(case, leaves, None, "cpu")
    besides = [*leaves.values(), *args[1:4], args[5]]
    found, _ = saved_bytes(lambda: lora_mlp(*args, **kwargs), besides)
    assert found == 4 * T * (2 * I + 3 * E * rank)
    found, _ = saved_bytes(lambda: lora_mlp(*args, recompute=True, **kwargs), besides)
    assert found == 4 * T * 3 * E * rank


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_give_the_same_bits(backend, device):
    case = make_case(37, 33, 49, 4, 2, 6)
    first = run(case, lora_mlp, device=device, backend=backend)
    for _ in range(20 if backend == "torch" or "TRITON_INTERPRET" not in os.environ else 2):
        again = run(case, lora_mlp, device=device, backend=backend)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize(
    "needed", ["x", "topk_weight", *(f"{name}_{half}" for name in NAMES for half in "ab")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_gradient_alone(needed, backend, device):
    case = make_case(21, 32, 48, 3, 2, 6)
    want = run(case, lora_mlp, device=device, backend=backend)[f"d{needed}"]
    leaves = {name: leaf.detach().to(device) for name, leaf in case.leaves.items()}
    leaves[needed].requires_grad_()
    args, kwargs = arguments(case, leaves, None, device)
    out = lora_mlp(*args, backend=backend, **kwargs)
    assert torch.equal(
        torch.autograd.grad(out, leaves[needed], case.dout.to(device))[0].cpu(), want
    )


def op_arguments(dense: bool, targets=NAMES, dtype=torch.float32):
    case = make_case(7, 5, 6, 3, None if dense else 2, 2, dtype=dtype, targets=targets)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    (x, gate, up, down, weight, idx), kwargs = arguments(case, leaves, None, "cpu")
    halves = [half for name in NAMES for half in (kwargs.get(name) or (None, None))]
    return (x, gate, up, down, None, None, weight, idx, *halves), case.dout


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"dense": False},
        {"dense": True},
        {"dense": False, "targets": ("up",)},
        {"dense": True, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_opcheck(options, save):
    tensors, dout = op_arguments(**options)
    op = torch.ops.moe_runtime
    torch.library.opcheck(op.lora_mlp, (*tensors, 3, 1.5, "silu", save, "torch"))
    _, z, low = op.lora_mlp(*tensors, 3, 1.5, "silu", save, "torch")
    plain = [None if t is None else t.detach() for t in tensors]
    torch.library.opcheck(
        op.lora_mlp_backward,
        (dout, z.detach(), low.detach(), True, [True] * 6, *plain, 3, 1.5, "silu", save, "torch"),
    )


def test_compiles_without_a_graph_break():
    case = make_case(21, 32, 48, 3, 2, 6, bias=True)
    torch._dynamo.reset()
    compiled = torch.compile(lora_mlp, fullgraph=True, backend="aot_eager")
    assert_parity(run(case, compiled), run(case, lora_mlp), 1e-6)


def test_second_gradient_is_refused():
    case = make_case(7, 8, 6, 3, 2, 2)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    args, kwargs = arguments(case, leaves, None, "cpu")
    (dx,) = torch.autograd.grad(lora_mlp(*args, **kwargs).sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="lora_mlp has no second derivative"):
        dx.sum().backward()


def test_weights_of_slots_are_summed_by_expert():
    weight = torch.tensor([[1.0, 2.0, 4.0]])
    idx = torch.tensor([[2, -1, 2]])
    assert mixed_weight(weight, idx, 3).tolist() == [[0.0, 0.0, 5.0]]
    assert mixed_weight(weight, None, 3) is weight
