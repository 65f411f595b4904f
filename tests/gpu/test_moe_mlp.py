"""The experts of a layer natively, at sizes of several tiles in each dimension, config by config,
against float64 on the same GPU.

Without a GPU, the tests without the gpu mark run in the interpreter, at sizes that it can handle.
"""

import os

import pytest
import torch

from moe_runtime.ops.moe_mlp import moe_mlp
from tests.ops.test_moe_mlp_kernel import everywhere
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import (
    Case,
    assert_parity,
    bounds,
    choose_experts,
    make_case,
    mismatches,
    moe_eager,
    run,
)

pytest.importorskip("triton")
from moe_runtime.kernels import tiles
from moe_runtime.kernels.candidates import candidates
from moe_runtime.kernels.tiles import Problem, Tile

NATIVE = os.environ.get("TRITON_INTERPRET") != "1"
# T, H, I, E, K. RAGGED: no block size divides a dimension, but rows are multiples of 16 bytes
EVEN, RAGGED = (
    ((1500, 512, 768, 6, 2), (1500, 520, 712, 6, 2))
    if NATIVE
    else ((21, 64, 64, 3, 2), (21, 72, 40, 3, 2))
)
ARCH = (
    10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    if NATIVE
    else 90
)
BF16 = torch.bfloat16


def slow_if_interpreted(test):
    """Mark a test as slow in the interpreter, where tests/emulator covers it."""
    return test if NATIVE else pytest.mark.slow(test)


def check(case: Case, tolerance: float, device: str, **options) -> None:
    """Fail if the layer's error against float64 exceeds the bound from the eager path in its
    dtype.
    """
    expected = run(case, moe_eager, torch.float64, device)
    got = run(
        case,
        moe_layer(backend="triton", **options),
        device=device,
    )
    bad = mismatches(
        got,
        expected,
        bounds(
            run(case, moe_eager, device=device),
            expected,
            tolerance,
        ),
    )
    assert not bad, "; ".join(bad)


def table(dtype: str = "bfloat16") -> list:
    """Every config of the built-in table, also with TMA and with persistence toggled."""
    if dtype == "float32":
        rows = tiles._FLOAT32
    else:
        rows = tiles.TABLE[tiles.nearest(ARCH)]
    found = {}
    for kernel, entries in rows.items():
        for i, (_, tile) in enumerate(entries):
            found[kernel, tile] = None
            if kernel != "dw" and (NATIVE or i == 0):
                if tile.TMA and kernel in ("down", "dx"):
                    found[kernel, tile._replace(PERSISTENT=True)] = None
                found[kernel, tile._replace(TMA=not tile.TMA and ARCH >= 90)] = None
    return [
        pytest.param(
            kernel,
            tile,
            id=f"{kernel}-{'x'.join(map(str, tile))}",
        )
        for kernel, tile in found
    ]


def candidate_configs() -> list:
    """Every config that the tuner may choose."""
    found = {}
    for kernel in tiles.KERNELS:
        for rows in (4096, 128, 16):
            pool = candidates(
                Problem(
                    kernel,
                    ARCH,
                    "bfloat16",
                    4096,
                    4096,
                    rows,
                    kernel == "up",
                )
            )
            found |= dict.fromkeys((kernel, tile) for tile in pool)
    return [
        pytest.param(
            kernel,
            tile,
            id=f"{kernel}-{'x'.join(map(str, tile))}",
        )
        for kernel, tile in found
    ]


def one_kernel(kernel: str, tile: Tile):
    """Use this config for this kernel; in the interpreter the other kernels use few programs."""
    return tiles.force(
        **({} if NATIVE else dict.fromkeys(tiles.KERNELS, Tile(64, 64, 64))) | {kernel: tile}
    )


@slow_if_interpreted
@pytest.mark.parametrize("kernel, tile", table())
def test_every_config_of_the_table(kernel, tile, tolerance, device):
    with one_kernel(kernel, tile):
        check(
            make_case(*RAGGED, BF16, "dropped", bias=True),
            tolerance[BF16],
            device,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, tile", table())
def test_every_config_of_the_table_where_blocks_divide(kernel, tile, tolerance, device):
    with one_kernel(kernel, tile):
        check(
            make_case(*EVEN, BF16),
            tolerance[BF16],
            device,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, tile", candidate_configs())
def test_every_config_that_may_be_tuned(kernel, tile, tolerance, device):
    with one_kernel(kernel, tile):
        check(
            make_case(*EVEN, BF16, "skip"),
            tolerance[BF16],
            device,
        )


OTHERS = [(torch.float16, *param.values) for param in table()]
OTHERS += [(torch.float32, *param.values) for param in table("float32")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, kernel, tile", OTHERS, ids=str)
def test_every_config_of_the_table_in_other_dtypes(dtype, kernel, tile, tolerance, device):
    with one_kernel(kernel, tile):
        check(make_case(*RAGGED, dtype, bias=True), tolerance[dtype], device)


@pytest.mark.parametrize(
    "dtype",
    [BF16, torch.float32],
    ids=str,
)
@pytest.mark.parametrize("routing", ["random", "all", "halves", "twice", "skip"])
def test_default_configs(routing, dtype, tolerance, device):
    """No config is forced: the table chooses, for balanced and unbalanced experts."""
    check(
        make_case(*EVEN, dtype, routing),
        tolerance[dtype],
        device,
    )


def form_case(sizes, form, dtype=BF16) -> Case:
    """Weights are stored in x out; gate and up have few bits, so that no value is within rounding
    of the limit.
    """
    case = make_case(*sizes, dtype, "dropped", "quick_gelu", bias=True)
    case.form = form
    leaves = case.leaves
    leaves["x"] = leaves["x"].clamp(-1, 1).round()
    width = leaves["x"].shape[1]
    for name, scale in (("up", width**0.5), ("up_bias", 8)):
        leaves[name] = (leaves[name] * scale).clamp(-1, 1).round() / 8
    layouts.transposed_weights(case)
    return case


@slow_if_interpreted
@pytest.mark.parametrize(
    "kernel, tile",
    [param for param in table() if param.values[0] != "dw"],
)
def test_every_config_of_the_table_for_interleaved_gate_and_up(kernel, tile, tolerance, device):
    with one_kernel(kernel, tile):
        case = form_case(RAGGED, {"limit": 0.6875, "up_offset": 1.0, "interleaved": True})
        check(case, tolerance[BF16], device)


@pytest.mark.parametrize(
    "T",
    [1, 5, 40, 300, 5000] if NATIVE else [1, 5],
)
def test_few_rows_and_many(T, tolerance, device):
    """Each power of two of rows per expert has its own config."""
    check(
        make_case(T, *EVEN[1:], BF16),
        tolerance[BF16],
        device,
    )


def shared_case(T, H, I, E, K, dtype) -> Case:
    """Expert 0 uses the last slot of every token."""
    case = make_case(T, H, I, E, K, dtype)
    case.topk_idx = torch.cat(
        [
            choose_experts(
                T,
                E - 1,
                K - 1,
                "random",
            )
            + 1,
            torch.zeros(T, 1, dtype=torch.int64),
        ],
        1,
    )
    return case


def test_shared_expert_by_torch(tolerance, device):
    with tiles.force() if NATIVE else everywhere(Tile(64, 64, 64)):
        check(
            shared_case(*RAGGED, BF16),
            tolerance[BF16],
            device,
            shared="dense",
        )


VARIANTS = {
    "built in": {},
    "persistent": dict.fromkeys(
        tiles.KERNELS,
        Tile(64, 128, 64, 4, 3, TMA=True, PERSISTENT=True, JOINED=True),
    ),
    "descriptors": dict.fromkeys(
        tiles.KERNELS,
        Tile(64, 128, 64, 4, 3, TMA=True),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_runs_give_the_same_bits(variant, device):
    case = make_case(*RAGGED, BF16, "dropped", bias=True)
    with tiles.force(**VARIANTS[variant]):
        first = run(case, moe_layer(backend="triton"), device=device)
        for _ in range(20 if NATIVE else 1):
            again = run(case, moe_layer(backend="triton"), device=device)
            for name in first:
                assert torch.equal(
                    again[name],
                    first[name],
                )


class Step:
    """Forward and backward on inputs at fixed addresses."""

    def __init__(self, case: Case, **options):
        self.leaves = {name: leaf.to("cuda").requires_grad_() for name, leaf in case.leaves.items()}
        self.idx, self.dout, self.options = case.topk_idx.to("cuda"), case.dout.to("cuda"), options

    def __call__(self) -> list[torch.Tensor]:
        x, up, down, weight = self.leaves.values()
        out = moe_mlp(
            x,
            up,
            down,
            weight,
            self.idx,
            backend="triton",
            **self.options,
        )
        return [
            out,
            *torch.autograd.grad(
                out,
                list(self.leaves.values()),
                self.dout,
            ),
        ]

    def change(self, case: Case) -> None:
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(case.leaves[name])
            self.idx.copy_(case.topk_idx)
            self.dout.copy_(case.dout)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", ["group", "dense"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [RAGGED[0], 24])
def test_cuda_graph_of_forward_and_backward(T, variant, shared):
    sizes = (T, *RAGGED[1:])
    with tiles.force(**VARIANTS[variant]):
        step = Step(shared_case(*sizes, BF16), shared=shared)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):  # new tokens, weights and expert choices
            step.change(shared_case(*sizes, BF16))
            graph.replay()
            for got, expected in zip(captured, step()):
                if shared == "group":
                    assert torch.equal(got, expected)
                else:  # cuBLAS may sum in a different order during capture
                    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    T = 32768
    H = 64
    I = 5504
    E = 8
    K = 6
    assert T * K * 2 * I > 2**31
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free memory")
    torch.utils.deterministic.fill_uninitialized_memory = False
    where = {"device": "cuda", "dtype": BF16}
    leaves = {
        "x": torch.randn(T, H, **where),
        "up": torch.randn(E, 2 * I, H, **where) * H**-0.5,
        "down": torch.randn(E, H, I, **where) * I**-0.5,
        "topk_weight": torch.rand(T, K, device="cuda"),
    }
    idx = torch.rand(T, E, device="cuda").topk(K).indices
    dout = torch.randn(T, H, **where)
    step = Step(Case(leaves, idx, dout))
    got = dict(zip(["out", *leaves], step()))
    expected = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in got.items()}
    # float64 of all rows at the same time would take 17 GB per buffer
    for part in torch.arange(T, device="cuda").split(2048):
        v = {
            name: leaf.double()[part] if leaf.shape[0] == T else leaf.double()
            for name, leaf in leaves.items()
        }
        v = {name: leaf.detach().requires_grad_() for name, leaf in v.items()}
        out = moe_eager(*v.values(), idx[part])
        grads = torch.autograd.grad(
            out,
            list(v.values()),
            dout[part].double(),
        )
        for name, tensor in zip(
            expected,
            [out.detach(), *grads],
        ):
            expected[name][part if tensor.shape[0] == len(part) else slice(None)] += tensor
    cpu = [{name: tensor.cpu() for name, tensor in tensors.items()} for tensors in (got, expected)]
    assert_parity(*cpu, 1.5e-2)
