"""Frozen experts with low-rank terms against experts made whole in float64: every backend, every
gradient, what is made.
"""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moe_runtime import backends
from moe_runtime.native.library import cpp
from moe_runtime.ops import expert_rows, frozen_mlp_triton, moe_mlp_triton, workspace
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.frozen_mlp import frozen_mlp, frozen_mlp_reference
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack, weight_of
from tests.support import cpu_build
from tests.support.mutants import edited, noting
from tests.support.opcheck import opcheck
from tests.support.oracle import assert_parity, bounds, make_case, mismatches, moe_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT_OSS = {"limit": 7.0, "up_offset": 1.0, "interleaved": True}


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    if DEVICE == "cpu":  # a GPU's tests wait for no compiler
        monkeypatch.setattr(cpp, "_found", cpu_build.library())


@pytest.fixture(params=["torch", "cpp", "triton"])
def backend(request):
    why = backends.why_not(
        request.param, "frozen_mlp", torch.device("cpu" if request.param == "cpp" else DEVICE)
    )
    if why is not None:
        pytest.skip(why)
    return request.param


def halves_of(case, ranks, dtype):
    """Add the pairs to a case's leaves: A [E, r, in], and B as PEFT stores it, [out, r E], its
    expert the fastest index.
    """
    for name, r in zip(("up", "down"), ranks):
        E, out, into = case.leaves[name].shape
        if r:
            case.leaves[f"{name}_a"] = (torch.randn(E, r, into) / into**0.5).to(dtype)
            case.leaves[f"{name}_b"] = (torch.randn(out, r * E) / r**0.5).to(dtype)
    return case


def pair(leaves, name) -> Pair | None:
    a = leaves.get(f"{name}_a")
    if a is None:
        return None
    E, r, _ = a.shape
    return Pair(a, leaves[f"{name}_b"].t().contiguous().view(r, E, -1).transpose(0, 1))


def stored(stack, in_out: bool):
    return stack.transpose(1, 2).contiguous().transpose(1, 2) if in_out else stack


def run(case, layer, dtype=None, device="cpu", in_out=False, frozen=("up", "down")):
    """Run `layer` on the case's leaves -> out and the gradients of all that train."""
    leaves = {
        name: leaf.detach().clone().to(device, dtype or leaf.dtype)
        for name, leaf in case.leaves.items()
    }
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    stacks = [Stack.dense(stored(leaves[name], in_out)) for name in ("up", "down")]
    activation = Activation(case.act, case.gated, **case.form)
    experts = FrozenExperts(
        *stacks,
        leaves.get("up_bias"),
        leaves.get("down_bias"),
        pair(leaves, "up"),
        pair(leaves, "down"),
        activation,
    )
    out = layer(leaves["x"], experts, leaves["topk_weight"], case.topk_idx.to(device))
    learned = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(
        out, list(learned.values()), case.dout.to(device, out.dtype), allow_unused=True
    )
    grads = {
        f"d{n}": torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(learned.items(), grads)
    }
    return {name: tensor.detach().cpu() for name, tensor in ({"out": out} | grads).items()}


def oracle(x, experts, topk_weight, topk_idx):
    """The experts made whole, slot by slot."""
    whole = [
        stack.data if pair is None else stack.data + torch.einsum("ero,eri->eoi", pair.b, pair.a)
        for stack, pair in ((experts.up, experts.up_lora), (experts.down, experts.down_lora))
    ]
    act, gated, *_ = experts.activation
    biases = {"up_bias": experts.up_bias, "down_bias": experts.down_bias}
    form = experts.activation.gate_form() if gated else {}
    return moe_oracle(x, *whole, topk_weight, topk_idx, act=act, gated=gated, **biases, **form)


def with_backend(backend):
    return lambda *args: frozen_mlp(*args, backend=backend)[0]


def check(case, backend, tolerance, **options):
    dtype = case.leaves["x"].dtype
    want = run(case, oracle, torch.float64)
    limit = bounds(run(case, frozen_mlp_reference), want, tolerance[dtype])
    got = run(case, with_backend(backend), device="cpu" if backend == "cpp" else DEVICE, **options)
    assert got["out"].dtype == dtype
    assert_parity(got, want, limit if dtype != torch.float64 else tolerance[dtype])


SHAPES = [  # T, H, I, E, K, ranks of up and down
    pytest.param((29, 33, 17, 4, 2), (3, 3), {}, id="odd sizes, r = 3"),
    pytest.param((29, 32, 24, 8, 2), (8, 8), {"bias": True}, id="r = E, biases"),
    pytest.param((29, 40, 8, 4, 2), (1, 2), {}, id="narrow experts: 2I < H"),
    pytest.param((29, 32, 16, 4, 2), (4, 4), {}, id="square up: 2I = H"),
    pytest.param((29, 32, 32, 4, 2), (16, 16), {}, id="square down: I = H"),
    pytest.param((21, 8, 8, 3, 2), (20, 70), {}, id="r beyond every size"),
    pytest.param((0, 32, 16, 4, 2), (3, 3), {"bias": True}, id="no tokens"),
    pytest.param((1, 32, 16, 4, 2), (3, 3), {}, id="one token"),
    pytest.param((19, 32, 16, 1, 1), (2, 2), {"bias": True}, id="E = 1"),
    pytest.param((19, 32, 16, 4, 4), (3, 3), {}, id="K = E"),
    pytest.param(
        (23, 32, 16, 4, 2), (3, 3), {"routing": "skip", "bias": True}, id="an expert without tokens"
    ),
    pytest.param((23, 32, 16, 4, 1), (3, 3), {"routing": "all"}, id="all tokens on one expert"),
    pytest.param(
        (23, 32, 16, 4, 3), (3, 3), {"routing": "dropped", "bias": True}, id="dropped slots"
    ),
    pytest.param((23, 32, 16, 4, 2), (3, 0), {"routing": "twice"}, id="up alone"),
    pytest.param((23, 32, 16, 4, 2), (0, 3), {}, id="down alone"),
    pytest.param((23, 32, 16, 4, 2), (0, 0), {"bias": True}, id="no adapter"),
    pytest.param((23, 32, 16, 4, 2), (3, 5), {"gated": False, "act": "relu2"}, id="without a gate"),
    pytest.param((40, 32, 16, 20, 2), (3, 3), {}, id="more experts than most have rows"),
]


@pytest.mark.parametrize("sizes, ranks, options", SHAPES)
def test_parity(sizes, ranks, options, backend, tolerance):
    dtype = torch.float64 if backend == "torch" else torch.float32
    check(halves_of(make_case(*sizes, dtype=dtype, **options), ranks, dtype), backend, tolerance)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("routing", ["random", "dropped"])
def test_dtypes(routing, dtype, backend, tolerance):
    case = halves_of(make_case(23, 33, 17, 4, 2, dtype, routing, bias=True), (3, 5), dtype)
    if (backend, dtype) in (
        ("cpp", torch.float64),
        ("triton", torch.float64),
        ("cpp", torch.float16),
    ):
        with pytest.raises(ValueError, match=f"backend '{backend}' cannot run frozen_mlp"):
            run(case, with_backend(backend))
        return
    check(case, backend, tolerance)


@pytest.mark.parametrize("in_out", [False, True], ids=["out x in", "in x out"])
def test_gpt_oss_gate_biases_and_layout(in_out, backend, tolerance):
    case = make_case(29, 32, 16, 4, 2, act="quick_gelu", bias=True)
    case.form = GPT_OSS
    case.leaves["up"] = 6 * case.leaves["up"]  # the clamps show
    check(halves_of(case, (3, 5), torch.float32), backend, tolerance, in_out=in_out)


def test_experts_that_go_together_and_each_alone_agree(monkeypatch, tolerance):
    case = halves_of(
        make_case(40, 33, 17, 6, 2, torch.float32, "dropped", bias=True), (3, 5), torch.float32
    )
    want = run(case, with_backend("torch"))
    for rows in (1, 9, 25):
        monkeypatch.setattr(expert_rows, "GROUP_ELEMENTS", rows * 34)
        # not bit by bit: a BLAS may sum in another order for another number of rows
        assert_parity(run(case, with_backend("torch")), want, tolerance[torch.float32])


@pytest.mark.parametrize("in_out", [False, True])
def test_a_stack_of_another_dtype_is_converted_one_expert_at_a_time(in_out, backend, tolerance):
    """As under autocast: the stacks float32, all else narrow."""
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    case = halves_of(make_case(29, 32, 16, 4, 2, dtype), (3, 3), dtype)
    narrow = run(case, with_backend(backend), device="cpu" if backend == "cpp" else DEVICE)

    def wide(x, experts, *slots):
        stacks = {name: Stack.dense(getattr(experts, name).data.float()) for name in ("up", "down")}
        return with_backend(backend)(x, experts._replace(**stacks), *slots)

    got = run(case, wide, device="cpu" if backend == "cpp" else DEVICE, in_out=in_out)
    assert_parity(got, narrow, tolerance[dtype])
    stack = Stack.dense(stored(torch.randn(3, 4, 6), in_out))
    one = weight_of(stack, 1, torch.bfloat16, "test")
    assert torch.equal(one, stack.data[1].bfloat16()) and one.stride() == stack.data[1].stride()


class Made(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes, and all shapes of three
    dimensions.
    """

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.stacks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.numel() * t.element_size())
                self.stacks += [tuple(t.shape)] * (t.dim() == 3)
        return out


@pytest.mark.parametrize("name", ["torch", "cpp"])
def test_nothing_of_a_stacks_size_is_made(name, monkeypatch):
    """Operators that make a tensor, and every allocation that the profiler sees, C++ included."""
    # what is leased would come from outside of torch's allocator
    monkeypatch.setattr(workspace, "LEASE_FROM", 1 << 62)
    workspace.release()
    case = halves_of(make_case(64, 128, 96, 32, 4), (2, 2), torch.float32)
    stacks = [case.leaves[n].numel() * 4 for n in ("up", "down")]
    rows = 64 * 4 * 192 * 4
    with Made() as made:
        run(case, with_backend(name))
    shapes = [
        s
        for s in made.stacks
        if s[0] == 32 and s[1:] in ((192, 128), (128, 96), (128, 192), (96, 128))
    ]
    cloned = [tuple(case.leaves[n].shape) for n in ("up", "down")]  # by `run` itself
    assert sorted(shapes) == sorted(cloned)

    leaves = {
        n: leaf.clone().requires_grad_(n not in ("up", "down")) for n, leaf in case.leaves.items()
    }
    experts = FrozenExperts(
        Stack.dense(leaves["up"]),
        Stack.dense(leaves["down"]),
        None,
        None,
        pair(leaves, "up"),
        pair(leaves, "down"),
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        out, _ = frozen_mlp(
            leaves["x"], experts, leaves["topk_weight"], case.topk_idx, backend=name
        )
        out.sum().backward()
    found = [
        event.nbytes()
        for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert rows <= max(found) < min(stacks) / 4 and rows < min(stacks) / 4
    assert leaves["up"].grad is None and leaves["down"].grad is None


def test_op_and_flops():
    case = halves_of(make_case(9, 8, 8, 4, 2, bias=True), (3, 5), torch.float32)
    leaves = {n: leaf.requires_grad_(n not in ("up", "down")) for n, leaf in case.leaves.items()}
    experts = FrozenExperts(
        Stack.dense(leaves["up"]),
        Stack.dense(leaves["down"]),
        leaves["up_bias"],
        leaves["down_bias"],
        pair(leaves, "up"),
        pair(leaves, "down"),
    )
    slots = (leaves["topk_weight"], case.topk_idx)
    opcheck(torch.ops.moe_runtime.frozen_mlp, (leaves["x"], *slots, *experts.pack(), True, "torch"))
    R = 18
    base = 16 * 8 + 8 * 8
    low = 3 * (8 + 16) + 5 * (8 + 8)
    with FlopCounterMode(display=False) as counter:
        out, offsets = frozen_mlp(leaves["x"], experts, *slots)
        assert counter.get_total_flops() == 2 * R * (base + low)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * R * (2 * base + 3 * low)
    assert offsets.tolist() == [
        0,
        *torch.bincount(case.topk_idx.flatten(), minlength=4).cumsum(0).tolist(),
    ]


def test_refusals():
    case = halves_of(make_case(9, 8, 8, 4, 2), (3, 5), torch.float32)
    up, down = (Stack.dense(case.leaves[n]) for n in ("up", "down"))
    experts = FrozenExperts(
        up, down, None, None, pair(case.leaves, "up"), pair(case.leaves, "down")
    )

    def refused(match, x=case.leaves["x"], **changes):
        with pytest.raises(ValueError, match=match):
            frozen_mlp(x, experts._replace(**changes), case.leaves["topk_weight"], case.topk_idx)

    refused("Expected .*but down_b is", down_lora=experts.down_lora._replace(b=experts.up_lora.b))
    refused(
        r"up_a is \(4, 3, 8\) torch.bfloat16",
        up_lora=experts.up_lora._replace(a=experts.up_lora.a.bfloat16()),
    )
    refused(
        "Expected a frozen stack on .*, but up requires a gradient",
        up=Stack.dense(up.data.clone().requires_grad_()),
    )
    refused(r"down \(4, 8, 7\)", down=Stack.dense(down.data[..., 1:]))
    refused("Expected x .T, H. of a floating dtype, but x is", x=case.topk_idx)


# mutants of the kernels' source; each has to be caught by the check above
MUTANTS = [
    pytest.param(
        "rows.expert.to(tl.int64) * lora.stride_e", "0 * lora.stride_e", id="first expert's B"
    ),
    pytest.param("rows.first.to(tl.int64) * RANK", "0 * RANK", id="first rows' low"),
    pytest.param("c0 = I + col0", "c0 = col0", id="gate's B for up"),
    pytest.param("tile += low_rank", "tile = low_rank", id="without the base"),
    pytest.param("c0 = col0 * 2", "c0 = n0 * 2", id="interleaved: first columns in every piece"),
    pytest.param("dh += low_rank", "dh = low_rank", id="dh without the base"),
    pytest.param("c0 = n0 + i * COLUMNS", "c0 = n0", id="first columns in every piece"),
    pytest.param("r = r0 + tl.arange", "r = tl.arange", id="first ranks twice"),
    pytest.param(" + n.to(tl.int64)[None, :] * lora.stride_n", "", id="first column of B"),
    pytest.param(
        "outer(r < RANK, n < N)", "outer(r < r + 1, n < N)", id="ranks of the next expert"
    ),
]


def kernels_with(monkeypatch, folder, old, new):
    """Let the Triton backend run with `old` replaced in the three files of its products."""
    from moe_runtime.kernels import grouped_gemm, grouped_gemm_backward, operands

    found = [
        old in Path(module.__file__).read_text()
        for module in (operands, grouped_gemm, grouped_gemm_backward)
    ]
    assert any(found), f"the kernels have no {old!r} any more; plant this mutant elsewhere"
    changed = [
        edited(m, folder, old if has else "", new if has else "")
        for m, has in zip((operands, grouped_gemm, grouped_gemm_backward), found)
    ]
    for module in changed[1:]:
        for name in {"add_terms", "low_rank"} & vars(module).keys():
            setattr(module, name, getattr(changed[0], name))
    for module in (frozen_mlp_triton, moe_mlp_triton):
        monkeypatch.setattr(module, "grouped_gemm", changed[1])
        monkeypatch.setattr(module, "backwards", changed[2])


def caught() -> list[str]:
    found = []
    for sizes, ranks, form in (
        ((40, 32, 40, 3, 2), (20, 70), {}),
        ((21, 40, 24, 2, 1), (3, 5), GPT_OSS),
    ):
        case = halves_of(make_case(*sizes), ranks, torch.float32)
        case.form = form
        with noting(found):
            found += mismatches(
                run(case, with_backend("triton")), run(case, oracle, torch.float64), 2e-5
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, monkeypatch, tmp_path):
    kernels_with(monkeypatch, tmp_path, old, new)
    assert caught()


def test_unharmed_kernels_pass(monkeypatch, tmp_path):
    kernels_with(monkeypatch, tmp_path, "tl.arange", "tl.arange")
    assert not caught()
