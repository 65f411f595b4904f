"""csrc/ on the emulator: the checks against numpy, and planted bugs."""

import re

import pytest

from tests.csrc import emulator
from tests.support.stress import scaled

pytestmark = [emulator.needs_cxx, pytest.mark.stress]


# of warps and of asynchronous copies
SEEDS = scaled((1,), (0, 1, 2))


def test_against_numpy():
    done = emulator.check(emulator.build(), seeds=SEEDS)
    assert done.returncode == 0, done.stderr


@emulator.needs_nvcc
def test_the_stored_ptx_is_of_these_sources():
    release = re.compile(r"^// Cuda compilation tools, (.*)$", re.M)
    fresh = emulator.to_store()
    old = emulator.stored()
    if release.findall(old) != release.findall(fresh):
        pytest.skip("nvcc is another one than the stored PTX was made by")
    assert old == fresh, "run python -m tests.csrc.emulator"


SYNC = "  __syncthreads();\n"
MUTANTS = [
    pytest.param(
        "route_plan.cu",
        "    __syncthreads();  // before the next round",
        "//",
        "plan",
        id="scan continues before sums are read",
    ),
    pytest.param(
        "merging.cu",
        "  " + SYNC + "  }\n}",
        "  }\n}",
        "dalpha",
        id="sums overwritten before they are read",
    ),
    pytest.param(
        "route_plan.cu", "wait_for_all_blocks();", "0;", "plan_together", id="blocks do not wait"
    ),
    pytest.param(
        "route_plan.cu",
        "row < rows_before",
        "row <= rows_before",
        "plan_together",
        id="a block counts itself",
    ),
    pytest.param(
        "routing.cu", "other_id < id)", "other_id > id)", "route", id="ties to the higher id"
    ),
    pytest.param(
        "routing.cu",
        "return;\n" + SYNC,
        "return;\n",
        "route",
        id="counts published before the last",
    ),
    pytest.param(
        "merging.cu",
        "__fadd_rn(sum[n], product)",
        "fmaf(a, to_f32(w[j].value[n]), sum[n])",
        "merge",
        id="rounding",
    ),
    pytest.param("combine.cu", "&& r < limit", "&& r <= limit", "combine", id="an unwritten row"),
    pytest.param(
        "combine.cu", "H - h, whole),", "H, whole),", "combine", id="a row read beyond its end"
    ),
    pytest.param(
        "route_plan.cu",
        "+ kWarpSums) * sizeof(int32_t);\n  if",
        ") * sizeof(int32_t);\n  if",
        "plan",
        id="shared memory is too small",
    ),
    pytest.param(
        "route_plan.cu",
        "+= __popc(same);\n    __syncwarp();\n  });\n#pragma",
        "+= __popc(same);\n  });\n#pragma",
        "plan",
        id="a match does not order accesses",
    ),
]


@emulator.needs_nvcc
@pytest.mark.parametrize("file, text, instead, name", MUTANTS)
def test_a_planted_bug_is_found(file, text, instead, name):
    done = emulator.check(emulator.build((file, text, instead)), name, seeds=(0, 1, 2))
    assert done.returncode != 0, "not detected"
