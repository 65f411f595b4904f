"""Experts over packed stacks against float64 of the dequantized weights: transposed stacks, several
tiles, other layouts of scales and codes, and refusals.
"""

import pytest
import torch

from moe_runtime.kernels import tiles
from moe_runtime.ops import packed
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.frozen_mlp import frozen_mlp
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack
from tests.support.oracle import assert_parity

OP = "frozen_mlp"
GPT_OSS = Activation("quick_gelu", True, 7.0, 1.0, True)
SILU = Activation("silu")
SLOW = pytest.mark.slow


class Case:
    """Experts with stacks in the format `form`; expert `empty` gets no token."""

    def __init__(
        self,
        form: str,
        H=64,
        I=64,
        T=21,
        activation=SILU,
        dtype=torch.float32,
        E=3,
        K=2,
        rank=3,
        empty=None,
    ):
        torch.manual_seed(0)
        self.activation = activation
        Z = 2 * I if activation.gated else I
        self.stacks = [packed_stack((E, Z, H), form), packed_stack((E, H, I), form)]
        scores = torch.rand(T, E)
        if empty is not None:
            scores[:, empty] = -1
        self.topk_idx = scores.topk(K).indices
        self.leaves = {"x": torch.randn(T, H).to(dtype), "topk_weight": torch.rand(T, K)}
        if rank:
            for name, n in (("up_a", H), ("up_b", Z), ("down_a", I), ("down_b", H)):
                self.leaves[name] = (0.3 * torch.randn(E, rank, n)).to(dtype)
        self.dout = torch.randn(T, H).to(dtype)

    def gradients(self, leaves, out):
        grads = torch.autograd.grad(
            out,
            list(leaves.values()),
            self.dout.to(out),
        )
        found = {"out": out.detach().cpu()}
        for name, grad in zip(leaves, grads, strict=True):
            found[f"d{name}"] = grad.cpu()
        return found

    def run(self, backend, device="cpu"):
        """Return output and gradients of a backend."""
        leaves = {}
        for name, leaf in self.leaves.items():
            leaves[name] = leaf.clone().to(device).requires_grad_()
        stacks = []
        for stack in self.stacks:
            scales = [scale.to(device) for scale in stack.scales]
            stacks.append(stack._replace(data=stack.data.to(device), scales=scales))
        pairs = (None, None)
        if "up_a" in leaves:
            pairs = (Pair(leaves["up_a"], leaves["up_b"]), Pair(leaves["down_a"], leaves["down_b"]))
        experts = FrozenExperts(*stacks, None, None, *pairs, self.activation)
        idx = self.topk_idx.to(device)
        out, _ = frozen_mlp(
            leaves["x"],
            experts,
            leaves["topk_weight"],
            idx,
            backend,
        )
        return self.gradients(leaves, out)

    def oracle(self):
        """Compute the same by autograd in float64, from dense weights."""
        leaves = {name: leaf.double().requires_grad_() for name, leaf in self.leaves.items()}
        up, down = (packed.reference(*stack[:3]) for stack in self.stacks)
        if "up_a" in leaves:
            up = up + leaves["up_b"].transpose(1, 2) @ leaves["up_a"]
            down = down + leaves["down_b"].transpose(1, 2) @ leaves["down_a"]
        out = 0
        for e in range(len(up)):
            weight = torch.where(
                self.topk_idx == e,
                leaves["topk_weight"],
                0,
            ).sum(1, keepdim=True)
            h = self.activation.apply(leaves["x"] @ up[e].t())
            out = out + weight * (h @ down[e].t())
        return self.gradients(leaves, out)


def packed_stack(shape, form: str) -> Stack:
    """Return random weights with rows of several magnitudes."""
    sizes = 1 + torch.arange(shape[1]) % 3
    weight = torch.randn(shape) * sizes[:, None] * 0.1
    if form.endswith(packed.TRANSPOSED):
        weight = weight.transpose(1, 2).contiguous()
    data, scales, _ = packed.pack(weight, form.removesuffix(packed.TRANSPOSED))
    return Stack(data, scales, form, shape)


NF4_TILES = {"H": 192, "T": 40, "empty": 1}
CASES = [
    pytest.param("nf4", {}, id="nf4"),
    pytest.param("nf4", NF4_TILES, id="nf4: several tiles, an idle expert", marks=SLOW),
    pytest.param("nf4_t", {"H": 128}, id="nf4 [in, out]", marks=SLOW),
    pytest.param("nf4_t", {"activation": GPT_OSS}, id="nf4 [in, out], GPT-OSS"),
    pytest.param(
        "mxfp4",
        {"H": 96, "I": 32, "activation": GPT_OSS},
        id="mxfp4, GPT-OSS",
    ),
    pytest.param(
        "fp8_block",
        {"H": 200, "I": 128},
        id="fp8: a narrower last block",
        marks=SLOW,
    ),
    pytest.param(
        "int8",
        {"H": 65, "I": 33, "rank": 0},
        id="int8, odd sizes, no adapter",
    ),
]


@pytest.mark.parametrize("form, options", CASES)
def test_parity(form, options, backend, device, tolerance):
    case = Case(form, **options)
    tensors = []
    for stack in case.stacks:
        tensors += [stack.data.view(torch.uint8), *stack.scales]
    before = [tensor.clone() for tensor in tensors]
    assert_parity(
        case.run(backend, device),
        case.oracle(),
        tolerance[torch.float32],
    )
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)


SCALES = {
    "powers of two in 8 bits": lambda s: torch.exp2(s.log2().ceil()).to(torch.float8_e8m0fnu),
    "16 bits": torch.Tensor.bfloat16,
    "strided": lambda scale: torch.stack([scale, scale * 7], -1)[..., 0],
}


@pytest.mark.parametrize("form", SCALES)
def test_fp8_scales_of_other_dtypes_and_strides(form, backend, device, tolerance):
    case = Case("fp8_block", H=136, I=128)
    case.stacks = [stack._replace(scales=[SCALES[form](stack.scales[0])]) for stack in case.stacks]
    case.leaves["x"] /= 4
    assert_parity(
        case.run(backend, device),
        case.oracle(),
        tolerance[torch.float32],
    )


@pytest.mark.parametrize("form", packed.FORMATS)
def test_tensors_that_do_not_fit_the_format_are_refused(form):
    stack = packed_stack((3, 128, 64), form)
    wrong = [
        ("data", stack._replace(data=stack.data.view(torch.int16))),
        ("data", stack._replace(data=stack.data[0])),
    ]
    for i, scale in enumerate(stack.scales):
        elsewhere = scale.new_empty(scale.shape, device="meta")
        changed = [
            scale[:0],
            scale.to(torch.int64),
            scale[None],
            elsewhere,
        ]
        if len(scale) > 1:
            changed.append(scale[:-1])
        for tensor in changed:
            scales = list(stack.scales)
            scales[i] = tensor
            wrong.append((f"scales\\[{i}\\]", stack._replace(scales=scales)))
    down = packed_stack((3, 64, 64), form)
    idx = torch.zeros(1, 1, dtype=torch.int64)
    for named, broken in wrong:
        with pytest.raises(ValueError, match=named):
            packed.unpack(broken.data, broken.scales, form, 0, torch.float32)
        with pytest.raises(ValueError, match=named):
            frozen_mlp(
                torch.ones(1, 64),
                FrozenExperts(broken, down),
                torch.ones(1, 1),
                idx,
            )


@pytest.mark.parametrize(
    "form, options",
    [
        pytest.param("nf4", {}, id="nf4"),
        pytest.param("mxfp4", {"T": 9, "I": 128}, id="mxfp4"),
        pytest.param(
            "mxfp4",
            {"H": 96, "I": 32, "activation": GPT_OSS},
            id="GPT-OSS",
            marks=SLOW,
        ),
        pytest.param(
            "fp8_block",
            {"H": 200, "I": 128},
            id="fp8",
            marks=SLOW,
        ),
    ],
)
def test_wide_tiles(form, options, monkeypatch, device, tolerance):
    """Tiles of 64 columns and steps of 64, as on a GPU: two MXFP4 groups in one tile, and half an
    FP8 group.
    """
    for kernel in tiles.KERNELS:
        monkeypatch.setitem(
            tiles._INTERPRETER,
            kernel,
            ((0, tiles.Tile(16, 64, 64, 4, 1)),),
        )
    case = Case(form, **options)
    assert_parity(
        case.run("triton", device),
        case.oracle(),
        tolerance[torch.float32],
    )
