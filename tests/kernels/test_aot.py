"""Every Triton kernel compiles for the GPUs we ship to, without spills, on a machine without any of
them.
"""

import fcntl
import importlib.metadata
import json
import os
import sys

import pytest
import torch

from moe_runtime.kernels import tiles
from tests.support import aot, aot_table
from tests.support.aot import AMD, ROOT, Case, Report
from tests.support.aot_cases import grouped_gemm
from tests.support.captured import captured

pytestmark = pytest.mark.aot
CASES = aot.all_cases()
JOBS = aot.jobs(CASES)
NVIDIA = [job for job in JOBS if job[1] != AMD]
AMD_FAILS = set()  # kernels that AMD's compiler rejects


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[tuple[int, int | str], Report]:
    """Result of each job; compiled once, by the first test worker that needs it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "aot.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "aot.json"
        if not path.exists():
            path.write_text(json.dumps(aot.compile_all([(CASES[i], target) for i, target in JOBS])))
    found = [Report(*fields) for fields in json.loads(path.read_text())]
    return dict(zip(JOBS, found, strict=True))


def name(job: tuple[int, int]) -> str:
    case = CASES[job[0]]
    kernel = case.kernel.split(".")[1].strip("_").removesuffix("_kernel")
    return f"sm_{job[1]}-{kernel}-{case.note}-{case.title()}"


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("job", NVIDIA, ids=name)
def test_compiles_to_what_it_should(reports, job):
    assert (
        aot.complaints(
            CASES[job[0]],
            job[1],
            reports[job],
        )
        == []
    )


@pytest.mark.slow
def test_amd_compiles_no_fewer_than_it_did(reports):
    fails = {
        CASES[i].kernel: report.error
        for (i, target), report in reports.items()
        if target == AMD and report.error
    }
    assert fails.keys() <= AMD_FAILS, fails
    # only reads and writes through descriptors
    hopper = {"grouped_gemm._grouped_gemm_stream_kernel", "grouped_gemm._up_stream_kernel"}
    assert {CASES[i].kernel for i, target in JOBS if target == AMD} == set(aot.kernels()) - hopper


def test_a_few_compile():
    """One case each of a gather, a matrix product and a step that only moves bytes; `make
    test-slow` compiles the rest.
    """
    wanted = (
        "combine._combine_fwd_kernel",
        "grouped_gemm._grouped_gemm_fwd_kernel",
        "merging._merge_experts_fwd_kernel",
    )
    few = [
        next(case for case in CASES if case.kernel == name and 90 in case.capabilities)
        for name in wanted
    ]
    reports = aot.compile_all([(case, 90) for case in few])
    assert [
        aot.complaints(case, 90, report) for case, report in zip(few, reports, strict=True)
    ] == [[], [], []]


def test_every_kernel_has_a_case_and_a_line_in_the_docs():
    found = {
        f"{path.stem}.{line.split('(')[0].removeprefix('def ')}"
        for path in (ROOT / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    }
    assert found == set(aot.kernels())
    assert found == {case.kernel for case in CASES}
    assert found == set(aot_table.WHAT)


@pytest.mark.parametrize("arch", tiles.TABLE)
def test_every_config_has_a_case(arch):
    """At sizes where no dimension is small the launch uses the table's config, so what compiles
    here is what runs.
    """
    launched = {
        (
            case.note.split(" ")[0],
            case.title(),
            case.num_warps,
            case.num_stages,
            "tma" in case.expect,
        )
        for case in CASES
        if arch in case.capabilities
    }
    for kernel, rows in tiles.TABLE[arch].items():
        for _, tile in rows:
            tile = tiles.clip(
                tile,
                tiles.Problem(
                    kernel,
                    arch,
                    "bfloat16",
                    2048,
                    2048,
                    4096,
                    gated=kernel == "up",
                ),
            )
            title = f"{tile.BLOCK_M}x{tile.BLOCK_N}x{tile.BLOCK_K}"
            if tile.JOINED:
                title += " persistent joined"
            assert (kernel, title, tile.num_warps, tile.num_stages, tile.TMA) in launched


@pytest.mark.slow
def test_docs_hold_what_compiles(reports):
    """Compares the whole table for the Triton version that wrote it; for another one, the kernels
    and their configs.
    """
    text = aot_table.PATH.read_text()
    version, rows = aot_table.read(text)
    if version == importlib.metadata.version("triton"):
        assert text == aot_table.render(CASES, reports), "run python -m tests.support.aot_table"
    for target, gpu in aot_table.GPUS.items():
        want = [aot_table.plan(CASES[i]) for i, t in aot_table.listed(CASES) if t == target]
        assert sorted(rows[gpu]) == sorted(want), "run python -m tests.support.aot_table"


# the gate itself
@pytest.mark.parametrize(
    "change, says",
    [
        pytest.param({}, None, id="as expected"),
        pytest.param({"error": "no"}, "no", id="does not compile"),
        pytest.param({"stack": 8}, "spills into 8 bytes", id="spills"),
        pytest.param({"registers": 200}, "200 registers; want 128", id="registers"),
        pytest.param({"shared": 102400}, "sm_86 has 101376", id="shared memory"),
        pytest.param({"global_atomics": 1}, "1 atomics on global", id="global atomics"),
        pytest.param({"shared_atomics": 1}, "1 on shared", id="shared atomics"),
        pytest.param(
            {"features": ("cp.async",)}, "no mma.sync; has cp.async", id="no tensor cores"
        ),
        pytest.param({"hazards": ("two tl.dot",)}, "two tl.dot", id="miscompiled"),
    ],
)
def test_gate_sees(change, says):
    case = Case("a._kernel", {}, {}, expect=("mma.sync", "cp.async"), max_registers=128)
    good = Report(registers=128, shared=101376, features=("mma.sync", "cp.async"))
    bad = aot.complaints(case, 86, good._replace(**change))
    assert len(bad) == (says is not None)
    for line in bad:
        assert says in line


@pytest.mark.parametrize(
    "constants, says",
    [
        ({"TMA": True, "EVEN_K": False}, "ends inside of a block"),
        ({"BLOCK_N": 256}, "256 columns; want 128"),
        ({"BLOCK_N": 128, "INTERLEAVED": True}, "256 columns; want 128"),
        ({"BLOCK_N": 128, "TMA": True, "EVEN_K": True}, None),
    ],
)
def test_gate_sees_what_is_not_for_blackwell(constants, says):
    case = Case("grouped_gemm._up_fwd_kernel", {}, constants)
    assert aot.complaints(case, 90, Report()) == []
    bad = aot.complaints(case, 100, Report())
    assert len(bad) == (says is not None)
    for line in bad:
        assert says in line


@pytest.mark.slow
def test_gate_sees_a_config_that_is_too_large():
    tile = tiles.Tile(128, 128, 64, num_warps=4, num_stages=6)
    (case,) = aot.record(lambda: grouped_gemm.Layer().up_forward(tile))
    (report,) = aot.compile_all([(case, 80)])
    bad = " ".join(
        aot.complaints(
            case._replace(expect=("wgmma",)),
            80,
            report,
        )
    )
    assert "spills into" in bad
    assert "bytes of shared memory" in bad
    assert "no wgmma; has mma.sync, cp.async" in bad


def test_cases_are_what_the_launcher_gives():
    (case,) = aot.record(
        lambda: grouped_gemm.Layer(bias=True).down_forward(tiles.Tile(64, 64, 32, TMA=True))
    )
    assert case.signature["a"] == "tensordesc<bf16[64,32]>"
    assert case.signature["y_ptr"] == "*bf16:16"
    assert case.signature["num_m"] == "i32"
    assert case.signature["K"] == "i32:16"
    weight = case.signature["weight"]
    assert weight["stride_k"] == 1
    assert weight["bias"] == "*bf16:16"
    assert weight["scale"] is None
    assert case.constants["TILE"]["TMA"] is True
    assert case.constant("K_LAST") is True
    (case,) = aot.record(
        lambda: grouped_gemm.Layer(odd=True).down_forward(tiles.Tile(64, 64, 32, TMA=True))
    )
    assert case.signature["a"] == "*bf16:16"
    assert case.signature["stride_a"] == "i32"
    assert not case.constant("TMA")
    assert (
        aot._type(
            torch.empty(
                0,
                2**31,
                dtype=torch.int8,
                device="meta",
            ).stride(0)
        )
        == "i64:16"
    )


# known bugs of Triton and ptxas
LOOP = """tt.func public @_kernel(%n: i32) attributes {{noinline = false}} {{
  %acc = scf.for %k = %c0 to %n step %c1 iter_args(%sum = %zero) -> (tensor<16x16xf32>)  : i32 {{
    %first = tt.dot %a, %b, %sum : tensor<16x16xbf16> * tensor<16x16xbf16> -> tensor<16x16xf32>
    scf.if %flag {{
      {inner}
    }} loc(#loc4)
    scf.yield %first : tensor<16x16xf32> loc(#loc5)
  }} loc(#loc6)
  %last = tt.dot %a, %b, %acc : tensor<16x16xbf16> * tensor<16x16xbf16> -> tensor<16x16xf32>
  {outer}
}} loc(#loc)"""
DOT = (
    "%second = tt.dot %a, %b, {}, inputPrecision = tf32 : tensor<16x16xbf16> * tensor<16x16xbf16> "
    "-> tensor<16x16xf32>"
)


@pytest.mark.parametrize(
    "inner, outer, wrong",
    [
        pytest.param(DOT.format("%first"), "", 1, id="in one round"),
        pytest.param(DOT.format("%other"), "", 0, id="another accumulator"),
        pytest.param("", DOT.format("%last"), 0, id="after the loop"),
    ],
)
def test_gate_sees_chained_products(inner, outer, wrong):
    assert len(aot.chained_products(LOOP.format(inner=inner, outer=outer))) == wrong


PTX = """$L__BB0_1:
\tcp.async.wait_group 2;
\t{fence}
\t{product} {{%r1,%r2}}, %rd1, %rd2, 0, 1, 1, 0, 1;
\t{load}.shared.global [ %r43 + 0 ], [ %rd24 + 0 ], 0x10, %r44;
\t@%p1 bra \t$L__BB0_1;
\tfence.proxy.async.shared::cta;
"""
WGMMA = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
TCGEN05 = "@%p1 tcgen05.mma.cta_group::1.kind::f16"


@pytest.mark.parametrize("product", [WGMMA, TCGEN05])
@pytest.mark.parametrize(
    "fence, load, wrong",
    [
        pytest.param("", "cp.async.cg", 1, id="without a fence"),
        pytest.param("fence.proxy.async.shared::cta;", "cp.async.ca", 0, id="with one"),
        pytest.param("", "cp.async.bulk.tensor.3d", 0, id="a descriptor"),
    ],
)
def test_gate_sees_a_missing_fence(product, fence, load, wrong):
    assert len(aot.missing_fences(PTX.format(fence=fence, load=load, product=product))) == wrong


MMA = "HGMMA.64x16x16.F32.BF16 R48, R24, gdesc[UR4], R48, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PACK = "F2FP.BF16.F32.PACK_AB R27, R5, R4"
AGAIN = "@P0 BRA 0x10"


@pytest.mark.parametrize(
    "program, wrong",
    [
        pytest.param(
            [MMA, PACK, WAIT],
            1,
            id="before the wait",
        ),
        pytest.param([MMA, WAIT, PACK], 0, id="after it"),
        pytest.param([MMA, "LDS.128 R22, [R1+0x10]", WAIT], 1, id="by the last two of four"),
        pytest.param(
            [MMA, "LDS.64 R22, [R1]", "STS [R24], R25", "ISETP.NE.AND P0, PT, R24, RZ, PT", WAIT],
            0,
            id="others",
        ),
        pytest.param([MMA, "SHFL.IDX PT, R25, R4, RZ, 0x1f", WAIT], 1, id="under a predicate"),
        pytest.param(
            ["NOP", "MOV R24, R4", "WARPGROUP.ARRIVE", MMA, AGAIN, WAIT], 1, id="in the next round"
        ),
        pytest.param(
            ["NOP", "MOV R24, R4", "WARPGROUP.ARRIVE", MMA, WAIT, AGAIN],
            0,
            id="in the next round, after the wait",
        ),
        pytest.param(
            [MMA, MMA.replace("R24", "R32"), "WARPGROUP.DEPBAR.LE gsb0, 0x1", PACK],
            0,
            id="the older one is done",
        ),
        pytest.param(
            [MMA.replace("R24", "R32"), MMA, "WARPGROUP.DEPBAR.LE gsb0, 0x1", PACK],
            1,
            id="the younger one is not",
        ),
    ],
)
def test_gate_sees_a_register_that_a_product_may_still_read(program, wrong):
    sass = "\n".join(
        f"        /*{16 * i:04x}*/                   {line} ;   /* 0x0 */"
        for i, line in enumerate(program)
    )
    assert len(aot.rewritten_operands(sass)) == wrong


PLANTED_KERNEL = """
import triton
import triton.language as tl
@triton.jit
def _chained_kernel(p, n, B: tl.constexpr):
    at = p + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    acc = tl.zeros((B, B), tl.float32)
    for k in range(n):
        acc = tl.dot(tl.load(at), tl.load(at + B), acc, input_precision="ieee")
        acc = tl.dot(tl.load(at + k), tl.load(at + B), acc, input_precision="ieee")
    tl.store(at, acc.to(tl.bfloat16))
"""
PLANT = r"""
import sys, tempfile, pathlib, re
sys.path.insert(0, sys.argv[1])
import mutant
from tests.support import aot
cases, mine = aot.all_cases(), aot.kernels() | {"mutant._chained_kernel": mutant._chained_kernel}
up = next(c for c in cases if c.kernel == "grouped_gemm._up_fwd_kernel" and 90 in c.capabilities)
ptx = aot.assemble(up, 90).asm["ptx"]
weaker = ptx.replace("fence.proxy.async", "membar")
print(len(aot.missing_fences(ptx)), len(aot.missing_fences(weaker)))
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    low = next(c for c in cases if c.kernel == "lora._lora_fwd_low_kernel")
    pathlib.Path(file.name).write_bytes(aot.assemble(low, 90).asm["cubin"])
    sass = aot._cuobjdump("-sass", pathlib.Path(file.name))
    product = re.search(r"\n.*HGMMA\S+ R\d+, (R\d+), gdesc.*gsb0.*", sass)
    move = f"\n        /*fff0*/                   MOV {product[1]}, RZ ;"
    changed = sass[: product.end()] + move + sass[product.end() :]
    print(len(aot.rewritten_operands(sass)), len(aot.rewritten_operands(changed)))
    aot.kernels = lambda: mine
    case = aot.Case("mutant._chained_kernel", {"p": "*bf16:16", "n": "i32"}, {"B": 64})
    print(0, len(aot._compile(case, 90, pathlib.Path(file.name)).hazards))
"""


@pytest.mark.slow
def test_gates_see_what_is_planted_in_real_programs(tmp_path):
    """A removed fence, a register written too early, chained products: each gate finds all of them,
    and nothing in the real kernels.
    """
    (tmp_path / "mutant.py").write_text(PLANTED_KERNEL)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PLANT, str(tmp_path)]
    done = captured(command, cwd=ROOT, env=env)
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    if not importlib.metadata.version("triton").startswith("3.6."):
        fences = (0, 1)
    else:
        fences = (1, 1)
    assert found == [fences, (0, 1), (0, 1)], done.stderr[-2000:]
