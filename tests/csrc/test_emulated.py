"""csrc/ on the CPU: the checks against numpy with several thread orders, under sanitizers, and with
planted bugs.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc import emulator
from tests.support.stress import scaled

pytestmark = [emulator.needs_cxx, pytest.mark.stress]


def runtime(name: str) -> str:
    """Return the runtime of a sanitizer, which a process must preload; skip where it does not
    run.
    """
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).is_absolute():  # g++ prints the bare name of a file that it does not have
        pytest.skip(f"needs g++'s {name}")
    environment = emulator.OPTIONS | {"LD_PRELOAD": path}
    tried = subprocess.run(
        [sys.executable, "-c", ""], env=environment, capture_output=True, text=True
    )
    if tried.returncode:  # ThreadSanitizer needs fewer bits of address randomization
        pytest.skip(f"{name} does not run here: {tried.stderr}")
    return path


@pytest.fixture(scope="module")
def sanitizer() -> str:
    return runtime("libasan.so")


@pytest.fixture(scope="module")
def races() -> str:
    return runtime("libtsan.so")


# thread orders: in turn; shuffled, with warps that fall behind; and the first warp last behind
# every barrier. In `make test` each of the three builds uses one of them, in `make stress` all
ORDERS = (0, 1, 2)


def test_against_numpy_in_several_orders_of_the_threads():
    done = emulator.check(
        emulator.build(),
        seeds=scaled(ORDERS[1:2], ORDERS),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_under_address_and_undefined_behavior_sanitizers(sanitizer):
    # it allocates gigabytes, which the sanitizer has to track
    names = [name for name in emulator.checks() if name != "offsets"]
    seeds = scaled(ORDERS[:1], ORDERS)
    done = emulator.check(
        emulator.build(emulator.SANITIZED), *names, seeds=seeds, preload=sanitizer
    )
    assert done.returncode == 0, done.stderr


OUTSIDE = [  # file, text, its replacement, the check that must detect it
    pytest.param(
        "combine.cu",
        "H - h, whole),",
        "H, whole),",
        "combine",
        id="a row read beyond its end",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "route_plan.cu",
        "+ kWarpSums) * sizeof(int32_t);\n  if",
        ") * sizeof(int32_t);\n  if",
        "plan",
        id="shared memory",
    ),
]


@pytest.mark.parametrize("file, text, instead, name", OUTSIDE)
def test_the_sanitizer_detects_out_of_bounds_accesses(file, text, instead, name, sanitizer):
    done = emulator.check(
        emulator.build(
            emulator.SANITIZED,
            (file, text, instead),
        ),
        name,
        preload=sanitizer,
    )
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr


@pytest.mark.slow
def test_no_access_races_another(races):
    names = ("plan", "route", "merge", "dalpha", "combine")
    seeds = scaled(ORDERS[2:], ORDERS)
    done = emulator.check(
        emulator.build(emulator.RACES),
        *names,
        seeds=seeds,
        preload=races,
    )
    assert done.returncode == 0, done.stderr


def test_a_warp_match_does_not_order_accesses(races):
    """All lanes meet at the match, so that no thread order shows the bug; only the sanitizer
    does.
    """
    bug = (
        "route_plan.cu",
        "+= __popc(same);\n    __syncwarp();\n  });\n#pragma",
        "+= __popc(same);\n  });\n#pragma",
    )
    done = emulator.check(
        emulator.build(emulator.RACES, bug),
        "plan",
        preload=races,
    )
    assert "ThreadSanitizer: data race" in done.stderr, done.stderr


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
]


@pytest.mark.parametrize("file, text, instead, name", MUTANTS)
def test_a_planted_bug_is_found(file, text, instead, name):
    done = emulator.check(
        emulator.build(edit=(file, text, instead)),
        name,
        seeds=ORDERS,
    )
    assert done.returncode != 0, "not detected"
