"""Packed stacks: bytes equal those of the libraries, every value of the bytes, and what cannot be
packed.
"""

import hashlib

import pytest
import torch

from moe_runtime.native.library import cpp
from moe_runtime.ops import packed
from tests.support.oracle import assert_same

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("cpu_library")


def weights(E: int, P: int, Q: int, dtype=torch.float32) -> torch.Tensor:
    """Return numbers of all magnitudes, including a row of zeros; the largest values add up exactly
    in any order.
    """
    w = ((torch.arange(E * P * Q) * 2654435761) % 1000003).double() / 500001.5 - 1
    w = (
        (w**3).view(
            E,
            P,
            Q,
        )
        * (1 + torch.arange(P) % 7)[:, None]
        * 256
    ).round() / 256
    w[0, 1] = 0
    return w.to(dtype)


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def unpacked(stack: packed.Packed, dtype) -> torch.Tensor:
    return torch.stack(
        [
            packed.unpack(
                *stack,
                e,
                dtype,
            )
            for e in range(stack.data.shape[0])
        ]
    )


# of weights(3, 40, 192) by bitsandbytes 0.50.2: data, absmax, nested absmax, nested map, offset,
# and the dequantized weights
BITSANDBYTES = {
    torch.float32: (
        "0c9d4f705f96670f cc46f6e1e08c181e 23f12689ae3aac2c e732639a65f497b4 03b90adfefe7ff60 "
        "429441a69e8bdd1d"
    ),
    torch.bfloat16: (
        "1ccc43ac52ab4a96 a994575614996989 7a683529a9c94f7a e732639a65f497b4 70522f29ec9eb88f "
        "722070f76f61a95c"
    ),
    torch.float16: (
        "0c9d4f705f96670f cc46f6e1e08c181e 23f12689ae3aac2c e732639a65f497b4 03b90adfefe7ff60 "
        "61828cf6f3017b93"
    ),
}
INT8 = ("21beeb1b38df800c", "850dc73e143377d6")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nf4_has_the_bytes_of_bitsandbytes(dtype):
    stack = packed.pack(weights(3, 40, 192, dtype), "nf4")
    tensors = (stack.data, *stack.scales, unpacked(stack, dtype))
    assert [digest(tensor) for tensor in tensors] == BITSANDBYTES[dtype].split()


def test_int8_has_the_bytes_of_bitsandbytes():
    stack = packed.pack(
        weights(
            3,
            40,
            192,
            torch.float16,
        ),
        "int8",
    )
    assert [digest(stack.data), digest(stack.scales[0])] == list(INT8)


def test_fp8_has_the_bytes_of_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = type(
        "Config",
        (),
        {"weight_block_size": (128, 128), "scale_fmt": "float"},
    )
    quantize = Fp8Quantize(type("Quantizer", (), {"quantization_config": config}))
    w = weights(2, 256, 384, torch.bfloat16)
    w[1, :128, :128] = 0
    theirs = quantize._quantize_one("w", w)
    stack = packed.pack(w, "fp8_block")
    assert digest(stack.data) == digest(theirs["w"])
    assert torch.equal(stack.scales[0], theirs["w_scale_inv"])


def test_mxfp4_means_what_transformers_reads():
    from transformers.integrations.mxfp4 import dequantize_convertops

    stack = packed.pack(weights(2, 24, 96), "mxfp4")
    stack.scales[0][0, :3, 0] = torch.tensor([0, 1, 254], dtype=torch.uint8)  # the ends of E8M0
    theirs = dequantize_convertops(
        stack.data.view(2, 24, 3, 16),
        stack.scales[0],
        torch.bfloat16,
    )
    assert torch.equal(unpacked(stack, torch.bfloat16), theirs.transpose(1, 2))


def test_mxfp4_takes_the_nearest_value_and_never_overflows():
    w = weights(2, 24, 96)
    stack = packed.pack(w, "mxfp4")
    step = packed.scale_of(*stack).repeat_interleave(32, 2)
    grid = torch.tensor([*packed.E2M1, *(-v for v in packed.E2M1)])
    nearest = (w[..., None] - grid * step[..., None]).abs().amin(-1)
    torch.testing.assert_close(
        (w - unpacked(stack, torch.float32)).abs(),
        nearest,
        rtol=0,
        atol=0,
    )
    assert ((w.abs() / step)[step > 1e-30] <= 6).all()
    largest = (w.abs() / step).unflatten(2, (3, 32)).amax(3)
    assert (largest[1] > 3).all()  # at least half of the range is used


def nibbles(data: torch.Tensor, first_is_high: bool) -> list[int]:
    """Return the 4-bit codes, in order."""
    codes = []
    for byte in data.reshape(-1).view(torch.uint8).tolist():
        pair = [byte & 15, byte >> 4]
        codes += reversed(pair) if first_is_high else pair
    return codes


def by_hand(data: torch.Tensor, scales, name: str) -> torch.Tensor:
    """Compute the stack in float64 independently, number by number."""
    E, P, Q = packed.shape_of(data, name)
    out = []
    if name == "nf4":
        for i, code in enumerate(nibbles(data, first_is_high=True)):
            block = i // 64
            nested = scales[2][int(scales[0][block])] * scales[1][block // 256]
            out.append(float(torch.tensor(packed.NF4[code])) * float(nested + scales[3][0]))
    elif name == "mxfp4":
        exponents = scales[0].reshape(-1).tolist()
        for i, code in enumerate(nibbles(data, first_is_high=False)):
            sign = -1 if code & 8 else 1
            out.append(sign * packed.E2M1[code & 7] * 2.0 ** (exponents[i // 32] - 127))
    else:
        for i, value in enumerate(data.reshape(-1).float().tolist()):
            e, r, q = i // Q // P, i // Q % P, i % Q
            if name == "fp8_block":
                scale = scales[0][e, r // 128, q // 128]
            else:
                scale = scales[0][e, r] / 127
            out.append(value * float(scale))
    return torch.tensor(out, dtype=torch.float64).view(
        E,
        P,
        Q,
    )


SHAPES = {
    "nf4": (3, 5, 192),
    "mxfp4": (3, 5, 96),
    "fp8_block": (2, 130, 131),
    "int8": (3, 5, 33),
}


@pytest.mark.parametrize("name", packed.FORMATS)
def test_reference(name):
    stack = packed.pack(weights(*SHAPES[name]), name)
    assert torch.equal(packed.reference(*stack), by_hand(*stack))
    turned = packed.reference(*stack[:2], name + packed.TRANSPOSED)
    assert torch.equal(turned, by_hand(*stack).transpose(1, 2))
    E, P, Q = SHAPES[name]
    assert packed.shape_of(stack.data, name + packed.TRANSPOSED) == (E, Q, P)


@pytest.mark.parametrize("name", packed.FORMATS)
def test_the_library_makes_the_same_bits(name, variant, monkeypatch):
    stack = packed.pack(weights(*SHAPES[name]), name)
    every = stack.data.view(torch.uint8)[0, 0]
    every.copy_(torch.arange(every.numel()) * 251 % 256)  # including NaN
    if name == "mxfp4":
        stack.scales[0][0, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    dtypes = (torch.float32, torch.bfloat16)
    got = [unpacked(stack, dtype) for dtype in dtypes]
    monkeypatch.setattr(type(cpp), "library", None)  # the backend "torch" runs without it
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    assert_same(got, [unpacked(stack, dtype) for dtype in dtypes])


@pytest.mark.parametrize(
    "name, shape, dtype, says",
    [
        ("nf4", (2, 4, 96), torch.float32, "multiple of 64 elements, but they have 96"),
        ("mxfp4", (2, 4, 48), torch.float32, "multiple of 32 elements, but they have 48"),
        ("nf4", (4, 64), torch.float32, "three dimensions"),
        (
            "int8",
            (2, 4, 64),
            torch.float64,
            "it must be float16, bfloat16 or float32, but is torch.float64",
        ),
        ("int4", (2, 4, 64), torch.float32, "format must be"),
    ],
)
def test_what_cannot_be_packed_is_refused(name, shape, dtype, says):
    with pytest.raises(ValueError, match=says):
        packed.pack(torch.zeros(shape, dtype=dtype), name)


@pytest.mark.parametrize("name", packed.FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_no_format_can_hold_are_refused(name, value):
    w = weights(*SHAPES[name])
    w[1, 2, 3] = value
    with pytest.raises(ValueError, match="Expert 1 .* NaN or infinite"):
        packed.pack(w, name)


def test_part_of_a_stack_reads_within_its_scales():
    stack = packed.part_of(
        packed.pack(weights(4, 64, 256), "nf4"),
        2,
        4,
    )
    stack.scales[4][:] = 3
    with pytest.raises(
        ValueError, match="starts at expert 3, for which 4 second-level scales do not suffice"
    ):
        packed.unpack(*stack, 0, torch.float32)


def test_gate_and_up_share_no_block():
    assert "gate and up, which have 64 each" in packed.why_not((4, 128, 128), "fp8_block", True)
    assert packed.why_not((4, 256, 128), "fp8_block", True) is None
    assert packed.why_not((4, 192, 128), "fp8_block") is None
    assert "gate and up, which have 32 each" in packed.why_not((4, 128, 64), "nf4_t", True)


@pytest.mark.parametrize("name", packed.FORMATS)
def test_bytes_per_weight_are_those_of_a_large_stack(name):
    stack = packed.pack(torch.zeros(2, 512, 2048, dtype=torch.bfloat16), name)
    taken = sum(t.numel() * t.element_size() for t in (stack.data, *stack.scales))
    assert taken / (2 * 512 * 2048) == pytest.approx(packed.bytes_per_weight(name), rel=0.003)
