"""csrc/ on the CPU: the checks against numpy in two orders of the threads, under sanitizers, and with planted bugs."""

import subprocess
from pathlib import Path

import pytest

from tests.csrc import emulator

pytestmark = emulator.needs_cxx


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """The runtime of AddressSanitizer, which must be in a process before all else."""
    path = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():  # what g++ prints of a file that it has not
        pytest.skip("needs g++'s AddressSanitizer")
    return path


def test_against_numpy_in_two_orders_of_the_threads():
    done = emulator.check(emulator.build(), seeds=(0, 1))
    assert done.returncode == 0, done.stderr


def test_under_address_and_undefined_behavior_sanitizers(sanitizer):
    names = [name for name in emulator.checks() if name != "offsets"]  # gigabytes, which the sanitizer marks one by one
    done = emulator.check(emulator.build(emulator.SANITIZED), *names, preload=sanitizer)
    assert done.returncode == 0, done.stderr


OUTSIDE = [  # file, text, what stands in its place, the check that must see it
    pytest.param("combine.cu", "H - h, whole),", "H, whole),", "combine", id="a row read beyond its end"),
    pytest.param(
        "route_plan.cu",
        "+ kWarpSums) * sizeof(int32_t);\n  if",
        ") * sizeof(int32_t);\n  if",
        "plan",
        id="shared memory",
    ),
]


@pytest.mark.parametrize("file, text, instead, name", OUTSIDE)
def test_the_sanitizer_sees_what_lies_outside(file, text, instead, name, sanitizer):
    done = emulator.check(emulator.build(emulator.SANITIZED, (file, text, instead)), name, preload=sanitizer)
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr


SYNC = "  __syncthreads();\n"
MUTANTS = [
    pytest.param("route_plan.cu", "next[i] = 0;\n" + SYNC, "next[i] = 0;\n", "plan", id="counts before zeros"),
    pytest.param("route_plan.cu", "});\n" + SYNC + "  for", "});\n  for", "plan", id="sums before counts"),
    pytest.param(
        "route_plan.cu", "  " + SYNC + "    if (i < n) a[i]", "    if (i < n) a[i]", "plan", id="scan before sums"
    ),
    pytest.param("route_plan.cu", "wait_for_all_blocks();", "0;", "plan_together", id="blocks do not wait"),
    pytest.param(
        "route_plan.cu", "__syncwarp();\n    if (live", "if (live", "plan", id="counted on before all have read"
    ),
    pytest.param(
        "route_plan.cu", "row < rows_before", "row <= rows_before", "plan_together", id="a block counts itself"
    ),
    pytest.param("routing.cu", "other_id < id)", "other_id > id)", "route", id="ties to the higher id"),
    pytest.param("routing.cu", "return;\n" + SYNC, "return;\n", "route", id="counts handed out before the last"),
    pytest.param(
        "merging.cu", "__fadd_rn(sum[n], product)", "fmaf(a, to_f32(w[j].value[n]), sum[n])", "merge", id="rounding"
    ),
    pytest.param("combine.cu", "&& r < limit", "&& r <= limit", "combine", id="a row that nobody wrote"),
]


@pytest.mark.parametrize("file, text, instead, name", MUTANTS)
def test_a_planted_bug_is_found(file, text, instead, name):
    done = emulator.check(emulator.build(edit=(file, text, instead)), name, seeds=(0, 1))
    assert done.returncode != 0, "not noticed"
