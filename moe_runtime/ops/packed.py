"""Stacks of frozen weights in 4 and 8 bits, byte for byte as the libraries that define the formats.

    W[e, p, q] = decode(data[e, p, q]) * scale[e, p, q // group]

The product is rounded once, to the requested dtype.

nf4        bitsandbytes' NormalFloat (QLoRA, arXiv 2305.14314): 16 values, blocks of 64, the first
           of two in the high nibble; the scales are quantized to 8 bits, in blocks of 256 over the
           whole stack (double quantization)
mxfp4      OCP microscaling E2M1 as in GPT-OSS: blocks of 32, the first of two in the low nibble,
           scale 2^(s - 127)
fp8_block  DeepSeek-V3's E4M3 in blocks of 128 x 128, with the factor to multiply by (scale_inv)
int8       rows in 127 steps of their largest absolute value, as in bitsandbytes' vector-wise int8

A stack [E, P, Q] is packed along its last dimension; its rows are whole blocks. The ops get `data`,
a list `scales`, and a format's name; a name with TRANSPOSED means that [E, P, Q] is [E, in, out],
as GPT-OSS stores its experts.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import check_choice
from moe_runtime.native.library import cpp

TRANSPOSED = "_t"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # dtypes to pack from and unpack to
NESTED = 256  # NF4 scales that share a second-level scale
TINY = torch.finfo(torch.float32).tiny
BLOCK = 128  # rows and columns of an fp8 block
# dtypes of fp8 scales: float32 in DeepSeek-V3, powers of two in V3.1, 16 bits after a cast of the
# model
FP8_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 is the sign


class Format(NamedTuple):
    """One line of FORMATS."""

    number: int  # in csrc/cpu/moert_cpu.h and kernels/packed_gemm.py
    data_bits: int
    scale_bits: float  # per weight, for large stacks
    group: int | None  # neighbours in a row that share a scale; None: the whole row
    dtype: torch.dtype  # of data
    multiple: int  # Q must be a multiple of it
    pack: Callable  # a stack [E, P, Q] -> (data, scales)
    scale: Callable  # (scales, data, first expert, last) -> float32 [experts, P, groups]
    scales: Callable  # (E, P, Q) -> the shape and the dtype of each of the scales


class Packed(NamedTuple):
    """A packed stack [E, P, Q], returned by `pack` and accepted by the ops."""

    data: Tensor  # [E, P, Q / 2] uint8, or [E, P, Q] in 8 bits
    scales: list[Tensor]
    format: str

    def to(self, device: torch.device | str) -> "Packed":
        """Return the stack on a device."""
        scales = [scale.to(device) for scale in self.scales]
        return self._replace(data=self.data.to(device), scales=scales)


def of_name(name: str) -> Format:
    """Return the format of a name, with or without TRANSPOSED; raises ValueError otherwise."""
    base = str(name).removesuffix(TRANSPOSED)
    check_choice("format", base, tuple(FORMATS))
    return FORMATS[base]


def bytes_per_weight(name: str) -> float:
    """Return the bytes per weight of a large stack, including scales."""
    return (of_name(name).data_bits + of_name(name).scale_bits) / 8


def shape_of(data: Tensor, name: str) -> tuple[int, int, int]:
    """Return E, out, in of a packed stack, from any op argument `data` (dense: `name` is empty)."""
    E, P, Q = data.shape
    if name and of_name(name).data_bits == 4:
        Q *= 2
    if name.endswith(TRANSPOSED):
        return E, Q, P
    return E, P, Q


def why_not(shape: Sequence[int], name: str, halves: bool = False) -> str | None:
    """Return why a stack [E, P, Q] cannot be packed, or None.

    With `halves` its P rows are those of gate, then those of up.
    """
    *_, P, Q = shape
    multiple = of_name(name).multiple
    if Q % multiple:
        return f"{name} requires rows of a multiple of {multiple} elements, but they have {Q}"
    if name.endswith(TRANSPOSED) and halves and Q // 2 % 64:
        return f"a block of 64 elements would contain both gate and up, which have {Q // 2} each"
    if name == "fp8_block" and halves and P // 2 % BLOCK:
        return f"a block of {BLOCK} rows would contain both gate and up, which have {P // 2} each"
    return None


def wrong_tensor(data: Tensor, scales: Sequence[Tensor], name: str) -> tuple[int, str] | None:
    """Return which tensor of a packed stack does not fit the format, 0 for `data`, and why.

    None if all fit. Scales of FP8 may be of a narrower dtype (FP8_SCALES). NF4's second-level
    scales may be those of a larger stack.
    """
    fmt = of_name(name)
    if data.dim() != 3 or data.dtype != fmt.dtype:
        return 0, (
            f"must have three dimensions and be {fmt.dtype}, but is {list(data.shape)} {data.dtype}"
        )
    shape = shape_of(data, name.removesuffix(TRANSPOSED))
    reason = why_not(shape, name)
    if reason is not None:
        return 0, f"has the shape {list(data.shape)}, but {reason}"
    expected = fmt.scales(*shape)
    if not len(expected) <= len(scales) <= len(expected) + (fmt.number == 0):
        return 0, f"needs {len(expected)} tensors of scales, but has {len(scales)}"
    for i, (scale, (size, dtype)) in enumerate(zip(scales, expected)):
        fits = tuple(scale.shape) == size
        if len(scales) > len(expected) and i == 1:  # part of a larger stack
            fits = scale.dim() == 1 and scale.numel() >= size[0]
        if scale.dtype != dtype:
            fits = fits and fmt.group == BLOCK and scale.dtype in FP8_SCALES
        if not fits:
            return i + 1, (
                f"must be {list(size)} {dtype} for {list(shape)}, but is {list(scale.shape)} "
                f"{scale.dtype}"
            )
        if scale.device != data.device:
            return i + 1, f"is on {scale.device}, but the codes are on {data.device}"
    return None


def check_tensors(data: Tensor, scales: Sequence[Tensor], name: str, stack: str) -> None:
    """Raise ValueError unless the tensors of a packed stack, called `stack`, fit its format."""
    wrong = wrong_tensor(data, scales, name)
    if wrong is not None:
        at, problem = wrong
        tensor = f"scales[{at - 1}]" if at else "data"
        raise ValueError(f"{tensor} of {stack} in {name} {problem}")


def pack(stack: Tensor, name: str, double: Callable | None = None) -> Packed:
    """Pack `stack` [E, P, Q] of a dtype in FLOATS, one expert at a time.

    Raises ValueError for unsupported stacks and for weights that are NaN or infinite, which no
    format can hold. `double` replaces `nest` if the stack is part of a larger one, whose other
    experts share NF4's second-level scales.
    """
    fmt = of_name(name)
    reason: str | None
    if stack.dtype not in FLOATS:
        reason = f"it must be float16, bfloat16 or float32, but is {stack.dtype}"
    elif stack.dim() != 3:
        reason = "it must have three dimensions"
    else:
        reason = why_not(stack.shape, name)
    if reason:
        raise ValueError(f"A stack {list(stack.shape)} cannot be packed to {name}: {reason}")
    with torch.no_grad():
        if fmt.number == 0:
            data, scales = fmt.pack(stack, double or nest)
        else:
            data, scales = fmt.pack(stack)
        return Packed(data, scales, name)


def part_of(stack: Packed, first: int, last: int) -> Packed:
    """Return a copy of the experts from `first` to `last` of a whole stack."""
    scales = part_of_scales(stack.scales, stack.data.shape[0], first, last)
    return Packed(stack.data[first:last].clone(), scales, stack.format)


def part_of_scales(scales: Sequence[Tensor], E: int, first: int, last: int) -> list[Tensor]:
    """Return the scales of the experts from `first` to `last` of E.

    NF4's blocks of scales may span experts, so the second-level scales stay whole (4 bytes per
    16,384 weights), and a fifth tensor has `first`.
    """
    head, *rest = scales
    part = [head.unflatten(0, (E, -1))[first:last].flatten(0, 1).clone(), *rest]
    if rest:
        part.append(torch.tensor([first], device=head.device))
    return part


def unpack(
    data: Tensor,
    scales: Sequence[Tensor],
    name: str,
    e: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return expert e's weight [out, in] in `dtype`; written into `out` [P, Q] if given.

    On a CPU the compiled library is used if it is available and the backend is "cpp" or the
    default, with bit-identical results. Raises ValueError if data and scales do not fit the format.
    """
    check_tensors(data, scales, name, "a stack")
    fmt = of_name(name)
    shape = shape_of(data, name.removesuffix(TRANSPOSED))[1:]
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=data.device)
    if _is_for_library(fmt, data, scales, out, backend):
        _unpack_cpp(fmt, data, scales, e, out)
    else:
        value = decode(data[e], name)
        if dtype == torch.float64:
            value = value.double()
        scale = fmt.scale(scales, data, e, e + 1)[0].repeat_interleave(fmt.group or shape[1], 1)
        out.copy_(value.mul_(scale[:, : shape[1]]))  # the last block may be narrower
    if name.endswith(TRANSPOSED):
        return out.t()
    return out


def reference(data: Tensor, scales: Sequence[Tensor], name: str) -> Tensor:
    """Return the stack [E, out, in] in float64, where products of codes and scales are exact."""
    return torch.stack([unpack(data, scales, name, e, torch.float64) for e in range(data.shape[0])])


def scale_of(data: Tensor, scales: Sequence[Tensor], name: str) -> Tensor:
    """Return the scales of the whole stack as the kernels read them, float32 [E, P, groups]."""
    return of_name(name).scale(scales, data, 0, data.shape[0])


def decode(data: Tensor, name: str) -> Tensor:
    """Return the values of `data` [..., Q / 2 or Q] without their scales, float32 [..., Q]."""
    if data.dtype != torch.uint8:
        return data.float()
    pairs = _pairs(name.removesuffix(TRANSPOSED), data.device)
    return pairs.index_select(0, data.reshape(-1).int()).view(*data.shape[:-1], -1)


@functools.cache
def _pairs(name: str, device: torch.device) -> Tensor:
    """Return the two values of each byte, [256, 2]."""
    if name == "nf4":
        codes = torch.tensor(NF4, device="cpu")
        pairs = [codes.repeat_interleave(16), codes.repeat(16)]  # the high nibble first
    else:
        codes = torch.tensor([*E2M1, *(-v for v in E2M1)], device="cpu")
        pairs = [codes.repeat(16), codes.repeat_interleave(16)]
    return torch.stack(pairs, 1).to(device)


def _is_for_library(
    fmt: Format,
    data: Tensor,
    scales: Sequence[Tensor],
    out: Tensor,
    backend: str | None,
) -> bool:
    """Return whether the compiled library unpacks this stack.

    It reads the scales' memory in the dtype of the format.
    """
    if backends.requested(backend) not in (None, "cpp") or out.dtype not in cpp.DTYPES:
        return False
    for scale, (_, dtype) in zip(scales, fmt.scales(*data.shape)):
        if scale.dtype != dtype:
            return False
    contiguous = all([tensor.is_contiguous() for tensor in (data, *scales, out)])
    return contiguous and cpp.why_not(data.device) is None


def _unpack_cpp(
    fmt: Format,
    data: Tensor,
    scales: Sequence[Tensor],
    e: int,
    out: Tensor,
) -> None:
    _, P, q = data.shape
    offset = 0.0
    first = 0
    nested = None
    table = None
    if fmt.number == 0:
        offset = float(scales[3])
        if len(scales) > 4:
            first = int(scales[4])
        count = scales[1].numel()
        if first < 0 or (first + data.shape[0]) * P * q > 32 * NESTED * count:
            raise ValueError(
                f"The stack starts at expert {first}, for which {count} second-level scales do "
                "not suffice"
            )
        nested = scales[1].data_ptr()
        table = scales[2].data_ptr()
    # the library indexes experts from the start of the whole stack, so pass that address
    cpp.library().handle.moert_cpu_unpack(
        fmt.number,
        cpp.DTYPES[out.dtype],
        data.data_ptr() - first * P * q,
        scales[0].data_ptr() - first * P * q // 32,
        nested,
        table,
        offset,
        first + e,
        P,
        q * 8 // fmt.data_bits,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def _weights(stack: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert and its weight to be packed; raises ValueError for NaN and infinities."""
    for e in range(stack.shape[0]):  # a stack that is read lazily has no end of its own
        weight = stack[e]
        if not torch.isfinite(weight).all():
            raise ValueError(
                f"Expert {e} of a stack {list(stack.shape)} has weights that are NaN or infinite. "
                "Repair the model"
            )
        yield e, weight.float()


@functools.cache
def dynamic_map() -> Tensor:
    """Return bitsandbytes' signed 8-bit map [256]: seven decades, the d-th one of 2^(6 - d) steps.

    They are numbered from the top.
    """
    values = [torch.tensor([0.0, 1.0], device="cpu")]  # cached, so not on a default device
    for decade in range(7):
        edges = torch.linspace(
            0.1,
            1,
            2**decade + 1,
            dtype=torch.float32,
            device="cpu",
        )
        middles = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the index of the value in the ascending `table` nearest to each of `x`, ties lower."""
    edges = (table[1:] + table[:-1]) / 2
    return torch.bucketize(x.contiguous(), edges, out_int32=True).to(torch.uint8)


def _pack_nf4(stack: Tensor, double: Callable) -> tuple:
    E, P, Q = stack.shape
    data = torch.empty(
        E,
        P,
        Q // 2,
        dtype=torch.uint8,
        device=stack.device,
    )
    largest = torch.empty(E, P * Q // 64, device=stack.device)
    table = torch.tensor(NF4, device=stack.device)
    for e, weight in _weights(stack):
        blocks = weight.reshape(-1, 64)
        torch.amax(blocks.abs(), 1, out=largest[e])
        # a block of zeros gets the code of zero
        code = _nearest(blocks / largest[e, :, None].clamp_min(TINY), table)
        data[e] = (code[:, ::2] << 4 | code[:, 1::2]).view(P, -1)
    return data, double(largest.view(-1))


def nest(largest: Tensor) -> list[Tensor]:
    """Quantize the scales of NF4 blocks, float32 [n].

    Returns bytes [n], float32 [n / 256], the map [256] and the mean [1].
    """
    n = largest.numel()
    table = dynamic_map().to(largest.device)
    mean = largest.mean()
    blocks = F.pad(largest - mean, (0, -n % NESTED)).view(-1, NESTED)
    top = blocks.abs().amax(1)
    # bitsandbytes' CPU library first rounds to one of 65536 evenly spaced values, then looks up its
    # code
    step = torch.round((blocks / top.clamp_min(TINY)[:, None] + 1) * 32767.5)
    code = _nearest(step.double() / 32767.5 - 1, table.double())
    return [code.view(-1)[:n], top, table, mean.view(1)]


def _scale_nf4(scales: Sequence[Tensor], data: Tensor, first: int, last: int) -> Tensor:
    absmax, nested, table, mean, *start = scales  # `start` stays on the device, to avoid a sync
    each = data[0].numel() // 32
    rows = absmax[first * each : last * each].int()
    index = torch.arange(first * each, last * each, device=data.device)
    if start:
        index = index + start[0] * each
    return (table[rows] * nested[index // NESTED] + mean).view(last - first, data.shape[1], -1)


def _pack_mxfp4(stack: Tensor) -> tuple:
    """Pack with scales rounded up and ties away from zero, as GPT-OSS's triton_kernels do."""
    E, P, Q = stack.shape
    data = torch.empty(
        E,
        P,
        Q // 2,
        dtype=torch.uint8,
        device=stack.device,
    )
    scales = torch.empty(
        E,
        P,
        Q // 32,
        dtype=torch.uint8,
        device=stack.device,
    )
    edges = (torch.tensor(E2M1[1:]) + torch.tensor(E2M1[:-1])) / 2
    for e, weight in _weights(stack):
        blocks = weight.reshape(P, -1, 32)
        bits = ((blocks.abs().amax(-1) / 6).view(torch.int32) + 0x7FFFFF) >> 23
        scales[e] = bits
        factor = torch.where(bits == 0, 0.0, 1 / (bits << 23).view(torch.float32))
        value = blocks * factor[:, :, None]
        size = value.abs().contiguous()
        code = torch.bucketize(size, edges.to(value), right=True, out_int32=True)
        code = (code | torch.signbit(value).int() << 3).to(torch.uint8).view(P, -1)
        data[e] = code[:, ::2] | code[:, 1::2] << 4
    return data, [scales]


def _scale_mxfp4(scales: Sequence[Tensor], data: Tensor, first: int, last: int) -> Tensor:
    # E8M0 has no zero; 255 is NaN in its specification, but infinity in GPT-OSS's readers
    bits = scales[0][first:last].int() << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def _pack_fp8(stack: Tensor) -> tuple:
    E, P, Q = stack.shape
    data = torch.empty(
        E,
        P,
        Q,
        dtype=torch.float8_e4m3fn,
        device=stack.device,
    )
    inverse = torch.empty(E, -(-P // BLOCK), -(-Q // BLOCK), device=stack.device)
    for e, weight in _weights(stack):
        padded = F.pad(weight, (0, -Q % BLOCK, 0, -P % BLOCK))
        tiles = padded.view(inverse.shape[1], BLOCK, inverse.shape[2], BLOCK)
        top = tiles.abs().amax((1, 3))
        factor = torch.where(top > 0, 448 / top, 1.0)
        inverse[e] = 1 / factor
        scaled = (tiles * factor[:, None, :, None]).clamp_(-448, 448)
        data[e] = scaled.view(padded.shape)[:P, :Q].to(data.dtype)
    return data, [inverse]


def _scale_fp8(scales: Sequence[Tensor], data: Tensor, first: int, last: int) -> Tensor:
    rows = scales[0][first:last].float().repeat_interleave(BLOCK, 1)
    return rows[:, : data.shape[1]].contiguous()


def _pack_int8(stack: Tensor) -> tuple:
    E, P, Q = stack.shape
    data = torch.empty(
        E,
        P,
        Q,
        dtype=torch.int8,
        device=stack.device,
    )
    top = torch.empty(E, P, device=stack.device)
    for e, rows in _weights(stack):
        torch.amax(rows.abs(), 1, out=top[e])
        data[e] = torch.round(rows * torch.where(top[e] > 0, 127 / top[e], 0.0)[:, None])
    return data, [top]


def _scale_int8(scales: Sequence[Tensor], data: Tensor, first: int, last: int) -> Tensor:
    return (scales[0][first:last] / 127)[:, :, None]


def _scales_nf4(E: int, P: int, Q: int) -> tuple:
    n = E * P * Q // 64
    return (
        ((n,), torch.uint8),
        ((-(-n // NESTED),), torch.float32),
        ((256,), torch.float32),
        ((1,), torch.float32),
    )


FORMATS = {
    "nf4": Format(
        number=0,
        data_bits=4,
        scale_bits=8 / 64 + 32 / 64 / NESTED,
        group=64,
        dtype=torch.uint8,
        multiple=64,
        pack=_pack_nf4,
        scale=_scale_nf4,
        scales=_scales_nf4,
    ),
    "mxfp4": Format(
        number=1,
        data_bits=4,
        scale_bits=8 / 32,
        group=32,
        dtype=torch.uint8,
        multiple=32,
        pack=_pack_mxfp4,
        scale=_scale_mxfp4,
        scales=lambda E, P, Q: (((E, P, Q // 32), torch.uint8),),
    ),
    "fp8_block": Format(
        number=2,
        data_bits=8,
        scale_bits=32 / BLOCK**2,
        group=BLOCK,
        dtype=torch.float8_e4m3fn,
        multiple=1,
        pack=_pack_fp8,
        scale=_scale_fp8,
        scales=lambda E, P, Q: (((E, -(-P // BLOCK), -(-Q // BLOCK)), torch.float32),),
    ),
    "int8": Format(
        number=3,
        data_bits=8,
        scale_bits=0.0,
        group=None,
        dtype=torch.int8,
        multiple=1,
        pack=_pack_int8,
        scale=_scale_int8,
        scales=lambda E, P, Q: (((E, P), torch.float32),),
    ),
}
