"""Every Triton kernel compiles for the GPUs we ship to, without spills, on a machine that has none of them."""

import fcntl
import importlib.metadata
import json
import os

import pytest
import torch

from moe_runtime.kernels import tiles
from tests.support import aot, aot_table
from tests.support.aot import AMD, ROOT, Case, Report
from tests.support.aot_cases import grouped_gemm

pytestmark = pytest.mark.aot
CASES = aot.all_cases()
JOBS = aot.jobs(CASES)
NVIDIA = [job for job in JOBS if job[1] != AMD]
AMD_FAILS = set()  # kernels that AMD's compiler refuses


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[tuple[int, int | str], Report]:
    """What each job became; compiled once, whichever test worker asks first."""
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
    return f"sm_{job[1]}-{case.kernel.split('.')[1].strip('_').removesuffix('_kernel')}-{case.note}-{case.title()}"


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("job", NVIDIA, ids=name)
def test_compiles_to_what_it_should(reports, job):
    assert aot.complaints(CASES[job[0]], job[1], reports[job]) == []


@pytest.mark.slow
def test_amd_compiles_no_fewer_than_it_did(reports):
    fails = {CASES[i].kernel: report.error for (i, target), report in reports.items() if target == AMD and report.error}
    assert fails.keys() <= AMD_FAILS, fails
    assert {CASES[i].kernel for i, target in JOBS if target == AMD} == set(aot.kernels())


def test_a_few_compile():
    """One case each of a gather, a matrix product and a step that only moves bytes; `make test-slow` compiles the rest."""
    wanted = ("combine._combine_fwd_kernel", "grouped_gemm._grouped_gemm_fwd_kernel", "merging._merge_experts_fwd_kernel")
    few = [next(case for case in CASES if case.kernel == name and 90 in case.capabilities) for name in wanted]
    reports = aot.compile_all([(case, 90) for case in few])
    assert [aot.complaints(case, 90, report) for case, report in zip(few, reports, strict=True)] == [[], [], []]


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
    """With sizes where nothing is small the launch is the table's, so what compiles here is what runs."""
    launched = {
        (case.note.split(" ")[0], case.title(), case.num_warps, case.num_stages, "tma" in case.expect)
        for case in CASES
        if arch in case.capabilities
    }
    for kernel, rows in tiles.TABLE[arch].items():
        for _, tile in rows:
            tile = tiles.clip(tile, tiles.Problem(kernel, arch, "bfloat16", 2048, 2048, 4096, gated=kernel == "up"))
            title = f"{tile.BLOCK_M}x{tile.BLOCK_N}x{tile.BLOCK_K}" + " joined" * tile.JOINED
            assert (kernel, title, tile.num_warps, tile.num_stages, tile.TMA) in launched


@pytest.mark.slow
def test_docs_hold_what_compiles(reports):
    """The whole table with the Triton that wrote it; with another, the kernels and their configs."""
    text = aot_table.PATH.read_text()
    version, rows = aot_table.read(text)
    if version == importlib.metadata.version("triton"):
        assert text == aot_table.render(CASES, reports), "run python -m tests.support.aot_table"
    for target, gpu in aot_table.GPUS.items():
        want = [aot_table.plan(CASES[i]) for i, t in aot_table.listed(CASES) if t == target]
        assert sorted(rows[gpu]) == sorted(want), "run python -m tests.support.aot_table"


# the gate itself
@pytest.mark.parametrize("change, says", [
    pytest.param({}, None, id="as it should be"),
    pytest.param({"error": "no"}, "no", id="does not compile"),
    pytest.param({"stack": 8}, "spills into 8 bytes", id="spills"),
    pytest.param({"registers": 200}, "200 registers; want 128", id="registers"),
    pytest.param({"shared": 102400}, "sm_86 has 101376", id="shared memory"),
    pytest.param({"global_atomics": 1}, "1 atomics on global", id="global atomics"),
    pytest.param({"shared_atomics": 1}, "1 on shared", id="shared atomics"),
    pytest.param({"features": ("cp.async",)}, "no mma.sync; has cp.async", id="no tensor cores"),
])  # fmt: skip
def test_gate_sees(change, says):
    case = Case("a._kernel", {}, {}, expect=("mma.sync", "cp.async"), max_registers=128)
    good = Report(registers=128, shared=101376, features=("mma.sync", "cp.async"))
    bad = aot.complaints(case, 86, good._replace(**change))
    assert len(bad) == (says is not None) and all(says in line for line in bad)


@pytest.mark.slow
def test_gate_sees_a_config_that_is_too_large():
    tile = tiles.Tile(128, 128, 64, num_warps=4, num_stages=6)
    (case,) = aot.record(lambda: grouped_gemm.Layer().up_forward(tile))
    (report,) = aot.compile_all([(case, 80)])
    bad = " ".join(aot.complaints(case._replace(expect=("wgmma",)), 80, report))
    assert "spills into" in bad and "bytes of shared memory" in bad and "no wgmma; has mma.sync, cp.async" in bad


def test_cases_are_what_the_launcher_gives():
    (case,) = aot.record(lambda: grouped_gemm.Layer(bias=True).down_forward(tiles.Tile(64, 64, 32, TMA=True)))
    assert case.signature["a"] == "tensordesc<bf16[64,32]>" and case.signature["y_ptr"] == "*bf16:16"
    assert case.signature["num_m"] == "i32" and case.signature["K"] == "i32:16"
    assert case.constants["stride_k"] == 1 and case.constants["BIAS"] is True and case.constants["TMA"] is True
    (case,) = aot.record(lambda: grouped_gemm.Layer(odd=True).down_forward(tiles.Tile(64, 64, 32, TMA=True)))
    assert case.signature["a"] == "*bf16:16" and case.signature["stride_a"] == "i32" and not case.constants["TMA"]
    assert aot._type(torch.empty(0, 2**31, dtype=torch.int8, device="meta").stride(0)) == "i64:16"
