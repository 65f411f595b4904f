"""The emulator's instructions, each on values whose result the PTX ISA gives."""

import struct
from pathlib import Path

import pytest
import torch
import yaml

from tests.csrc.emulator import needs_cxx
from tests.emulator.library import EmulationError, Program, Schedule

pytestmark = needs_cxx
HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .u64 kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred %p<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<99>;
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 8;
	add.s64 %rd4, %rd2, %rd3;
{body}
	ret;
}}
"""


def execute(
    body: str,
    values: list[int],
    threads: int = 32,
    schedule: Schedule | None = None,
    shared_bytes: int = 4096,
) -> list[int]:
    """Run a body that reads 64-bit values at %rd1 and stores one per thread at %rd4."""
    source = torch.tensor([struct.unpack("<q", struct.pack("<Q", v))[0] for v in values])
    target = torch.full((threads,), -1)
    arguments = [source.data_ptr(), target.data_ptr()]
    program = Program(HEADER.format(threads=threads, body=body))
    program.run((1, 1, 1), (threads, 1, 1), shared_bytes, arguments, [source, target], (), schedule)
    return [value & 0xFFFFFFFFFFFFFFFF for value in target.tolist()]


def f32(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bf16(value: float) -> int:
    return f32(value) >> 16


def f16(value: float) -> int:
    return struct.unpack("<H", struct.pack("<e", value))[0]


NAN = f32(float("nan"))
ONES = 0xFFFFFFFF

# instruction, where d is the result, a, b and c are the values; values; expected
CASES = [
    ("fma.rn.f32 d, a, b, c", (f32(1 + 2**-23), f32(1 - 2**-23), f32(-1.0)), f32(-(2.0**-46))),
    ("max.f32 d, a, b", (NAN, f32(2.0)), f32(2.0)),
    ("min.NaN.f32 d, a, b", (NAN, f32(2.0)), 0x7FFFFFFF),
    ("add.f32 d, a, b", (0xFFC12345, f32(1.0)), 0x7FFFFFFF),
    ("ex2.approx.ftz.f32 d, a", (f32(-130.0),), 0),
    ("add.rn.f32.bf16 d, a, b", (bf16(1.5), f32(2.0)), f32(3.5)),
    ("fma.rn.f32.bf16 d, a, b, c", (bf16(1.5), bf16(2.0), f32(1.0)), f32(4.0)),
    (
        "add.bf16x2 d, a, b",
        (bf16(1.0) << 16 | bf16(2.0), bf16(3.0) << 16 | bf16(4.0)),
        bf16(4.0) << 16 | bf16(6.0),
    ),
    (
        "add.f32x2 d, a, b",
        (f32(1.0) << 32 | f32(2.0), f32(3.0) << 32 | f32(4.0)),
        f32(4.0) << 32 | f32(6.0),
    ),
    ("cvt.rn.f16x2.f32 d, a, b", (f32(1.0), f32(2.0)), f16(1.0) << 16 | f16(2.0)),
    ("cvt.rn.bf16.f32 d, a", (f32(1.0) + 0x8000,), bf16(1.0)),  # ties to even
    ("cvt.rn.bf16.f32 d, a", (f32(1.0) + 0x18000,), bf16(1.0) + 2),
    ("cvt.f32.f16 d, a", (f16(6e-8),), f32(2.0**-24)),
    ("cvt.rn.f32.s16 d, a", (0xFFFF,), f32(-1.0)),
    ("cvt.rzi.s32.f32 d, a", (f32(-1.9),), ONES),
    ("cvt.rzi.u32.f32 d, a", (f32(-1.9),), 0),
    ("setp.neu.f32 %p1, a, b; selp.b32 d, 1, 0, %p1", (NAN, NAN), 1),
    ("setp.ge.f32 %p1, a, b; selp.b32 d, 1, 0, %p1", (NAN, NAN), 0),
    (
        "setp.gt.bf16x2 %p1|%p2, a, b; selp.b32 d, 1, 0, %p2",
        (bf16(2.0) << 16 | bf16(0.0), bf16(1.0) << 16 | bf16(1.0)),
        1,
    ),
    ("fma.rn.f32 d, a, b, c", (f32(2**-15), f32(2**-15), f32(1.0)), f32(1.0)),
    ("fma.rm.f32 d, a, b, c", (f32(-(2**-15)), f32(2**-15), f32(1.0)), f32(1.0) - 1),
    ("fma.rp.f32 d, a, b, c", (f32(2**-15), f32(2**-15), f32(1.0)), f32(1.0) + 1),
]
_INTEGERS = Path(__file__).with_name("integers.yaml")
CASES += yaml.safe_load(_INTEGERS.read_text())


@pytest.mark.parametrize("text, values, expected", CASES, ids=[case[0] for case in CASES])
def test_an_instruction(text, values, expected):
    for letter in "dabc":
        text = text.replace(f" {letter},", f" %{letter},").replace(f" {letter};", f" %{letter};")
        text = text.replace(f"{{{letter},", f"{{%{letter},").replace(
            f" {letter}}}", f" %{letter}}}"
        )
        if text.endswith(f" {letter}"):
            text = f"{text[:-1]}%{letter}"
    loads = "".join(
        f"ld.global.b64 %{name}, [%rd1+{8 * i}];\n" for i, name in enumerate("abc"[: len(values)])
    )
    body = f"mov.b64 %d, 0;\n{loads}{text};\nst.global.b64 [%rd4], %d;"
    assert execute(body, list(values))[0] == expected


def test_lanes_exchange_values():
    body = """
	shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
	shfl.sync.up.b32 %r3, %r1, 2, 0, -1;
	shfl.sync.idx.b32 %r4, %r1, 5, 31, -1;
	redux.sync.add.s32 %r5, %r1, -1;
	mad.lo.s32 %r6, %r3, 100, %r2;
	mad.lo.s32 %r7, %r4, 10000, %r6;
	mad.lo.s32 %r8, %r5, 1000000, %r7;
	cvt.u64.u32 %rd5, %r8;
	st.global.b64 [%rd4], %rd5;"""
    expected = []
    for lane in range(32):
        up = lane - 2 if lane >= 2 else lane
        expected.append((lane ^ 1) + 100 * up + 10_000 * 5 + 1_000_000 * sum(range(32)))
    assert execute(body, [0]) == expected


def test_lanes_diverge_and_meet_again():
    body = """
	and.b32 %r2, %r1, 3;
	mov.u32 %r3, 0;
$L_loop:
	setp.ge.s32 %p1, %r3, %r2;
	@%p1 bra $L_end;
	add.s32 %r3, %r3, 1;
	bra.uni $L_loop;
$L_end:
	redux.sync.add.s32 %r4, %r3, -1;
	cvt.u64.u32 %rd5, %r4;
	st.global.b64 [%rd4], %rd5;"""
    assert execute(body, [0]) == [8 * 6] * 32


EXCHANGE = """
	mov.b32 %r2, global_smem;
	shl.b32 %r3, %r1, 2;
	add.s32 %r4, %r2, %r3;
	st.shared.b32 [%r4], %r1;
	{barrier}
	xor.b32 %r5, %r3, 128;
	add.s32 %r6, %r2, %r5;
	ld.shared.b32 %r7, [%r6];
	cvt.u64.u32 %rd5, %r7;
	st.global.b64 [%rd4], %rd5;"""


@pytest.mark.parametrize("seed", range(5))
def test_a_barrier_orders_warps(seed):
    body = EXCHANGE.format(barrier="bar.sync 0;")
    result = execute(body, [0], threads=64, schedule=Schedule(seed=seed))
    assert result == [thread ^ 32 for thread in range(64)]


@pytest.mark.parametrize("seed", range(5))
def test_a_missing_barrier_is_a_race(seed):
    with pytest.raises(EmulationError, match="Race: byte .* no barrier orders"):
        execute(EXCHANGE.format(barrier=""), [0], threads=64, schedule=Schedule(seed=seed))


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.warp.sync -1;"])
def test_a_barrier_orders_lanes(barrier):
    body = EXCHANGE.format(barrier=barrier).replace(", 128;", ", 64;")
    assert execute(body, [0]) == [thread ^ 16 for thread in range(32)]


@pytest.mark.parametrize("between", ["", "match.any.sync.b32 %r8, %r1, -1;"])
def test_lanes_race_without_a_barrier(between):
    body = EXCHANGE.format(barrier=between).replace(", 128;", ", 64;")
    with pytest.raises(EmulationError, match="no barrier orders the write of another lane"):
        execute(body, [0])


def test_the_barrier_of_all_threads_returns_whether_one_holds():
    body = """
	setp.eq.s32 %p1, %r1, 40;
	bar.red.or.pred %p2, 0, %p1;
	selp.b64 %rd5, 7, 8, %p2;
	st.global.b64 [%rd4], %rd5;"""
    assert execute(body, [0], threads=64) == [7] * 64


TENSOR = """
	mov.b32 %r2, global_smem;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
	bar.sync 0;
	ld.shared.b32 %r3, [%r2];
	bar.sync 0;
	add.s32 %r4, %r1, 500;
	tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {%r1, %r4};
	{stored}
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r3];
	{loaded}
	mad.lo.s32 %r7, %r6, 1000, %r5;
	cvt.u64.u32 %rd5, %r7;
	st.global.b64 [%rd4], %rd5;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;"""
STORED, LOADED = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"


def test_tensor_memory_holds_what_a_warp_stores():
    body = TENSOR.replace("{stored}", STORED).replace("{loaded}", LOADED)
    assert execute(body, [0]) == [1000 * (lane + 500) + lane for lane in range(32)]


@pytest.mark.parametrize(
    "stored, loaded, message",
    [
        ("", LOADED, "Tensor memory is accessed before tcgen05.wait::st"),
        (STORED, "", "%r6 is read while an instruction in flight writes it"),
    ],
)
def test_tensor_memory_is_waited_for(stored, loaded, message):
    body = TENSOR.replace("{stored}", stored).replace("{loaded}", loaded)
    with pytest.raises(EmulationError, match=message):
        execute(body, [0])


COPY = """
	mov.b32 %r2, global_smem;
	shl.b32 %r3, %r1, 3;
	add.s32 %r4, %r2, %r3;
	add.s64 %rd5, %rd1, %rd3;
	cp.async.ca.shared.global [%r4], [%rd5], 8, 8;
	cp.async.commit_group;
	cp.async.wait_group {left};
	ld.shared.b64 %rd6, [%r4];
	st.global.b64 [%rd4], %rd6;"""


def test_a_copy_lands_when_it_is_waited_for():
    values = list(range(100, 132))
    for arrival in ("early", "late", "random"):
        assert execute(COPY.format(left=0), values, schedule=Schedule(arrival)) == values


def test_a_copy_that_is_not_waited_for_is_poison():
    values = list(range(100, 132))
    assert execute(COPY.format(left=1), values, schedule=Schedule("late")) == [2**64 - 1] * 32
    assert execute(COPY.format(left=1), values, schedule=Schedule("early")) == values


@pytest.mark.parametrize(
    "body, message",
    [
        ("frob.b32 %r2, %r1;", "PTX line 20: unknown opcode frob.b32"),
        ("ld.global.b64 %rd5, [%rd1+8];", "A load outside of every tensor, 0 bytes behind"),
        ("ld.global.b64 %rd5, [%rd1+4];", "A load of 8 bytes at .* which is not a multiple"),
        ("ld.shared.b32 %r2, [99999];", "Shared memory has 4096 bytes"),
        ("st.global.b32 [%rd2], %r1;", "two lanes store different values to one address"),
        ("mbarrier.arrive.shared.b64 _, [1024];", "An mbarrier that was not initialized"),
        ("shfl.sync.idx.b32 %r2, %r1, 0, 31, 15;", "shfl of other lanes than those that reach it"),
    ],
)
def test_what_a_gpu_would_not_do_is_refused(body, message):
    with pytest.raises(EmulationError, match=message):
        execute(body, [0])


def test_a_deadlock_is_reported():
    body = """
	setp.lt.s32 %p1, %r1, 32;
	@%p1 bra $L_end;
	bar.sync 0;
$L_end:"""
    with pytest.raises(EmulationError, match="Deadlock"):
        execute(body, [0], threads=64)
