"""The checks of the CPU library must see planted bugs: each mutant is one changed line of csrc/cpu, built anew, and is caught.

Built for one instruction set, which is all that a mistake needs. `make test` builds one of them, `make stress` all.
"""

import shutil

import pytest
import torch

from moe_runtime import build_cpu, cpp
from tests.support import cpu_build
from tests.support.layer import moe_layer
from tests.support.oracle import ACT, make_case, moe_mismatches
from tests.support.stress import STRESS

MUTANTS = [  # file, what is there, what takes its place, what it is
    ("experts.h", "+ w * load(y + n)", "+ load(y + n)", "weights forgotten where one call does it all"),
    ("kernels.cpp", "dots += h * grad", "dots += at.value * grad", "up forgotten in the weight's gradient"),
    ("kernels.cpp", "absolute(pair.up) > limit ? vf{} : at", "at", "gradient through up's clamp"),
    ("kernels.cpp", "pair.gate > limit ? vf{} : grad", "grad", "gradient through the gate's clamp"),
    ("tiles.h", "for (; n < columns; n++)", "for (; n + 1 < columns; n++)", "the last column of a product"),
    ("tiles.h", "    if (i < length)", "    if (i + 1 < length)", "the last element of a sum"),
    ("experts.h", "add_bias(up, rows, bias + up_from", "add_bias(up, rows, bias", "the gate's bias for up"),
    ("experts.h", "scalar(bias[n * step])", "scalar(bias[n])", "biases in turns taken for one after the other"),
    ("activation.h", "half + x * 0.39894228f", "half + x * 0.3989f", "a constant off by five hundred thousandths"),
    ("activation.h", "(1.0f + c * x", "(1.0f + x", "slope of quick_gelu"),
    ("activation.h", "2.0f * positive}", "positive}", "slope of relu2"),
    ("moert_cpu.cpp", "everyone[e] = all", "everyone[e] = offsets[e + 1] - first == T", "T rows taken for every token"),
]  # fmt: skip
FORMS = ({}, {"limit": 0.7, "up_offset": 1.0}, {"limit": 0.7, "interleaved": True})
pytestmark = pytest.mark.stress


def found(library: cpp.Library, monkeypatch, tolerance) -> list[str]:
    """Where a layer on this library is not the equation: few tokens and many, every form and activation."""
    monkeypatch.setattr(cpp, "_find", lambda: library)
    torch.manual_seed(0)
    bad = []
    for n, act in enumerate(ACT):
        for T, routing in ((3, "random"), (70, "dropped"), (70, "halves")):
            gated = (n + T) % 3 > 0
            case = make_case(T, 33, 19, 4, 2, routing=routing, act=act, gated=gated, bias=True)
            case.form = FORMS[(n + T) % 3] if gated else {}
            bad += moe_mismatches(moe_layer(backend="cpp"), case, tolerance[torch.float32])
    return bad


def planted(folder, file: str, old: str, new: str):
    """The sources in `folder` with the change in one of them."""
    csrc = folder / "cpu"
    shutil.copytree(build_cpu.csrc_dir(), csrc)
    text = (csrc / file).read_text()
    assert old in text, f"csrc/cpu/{file} has no {old!r} any more; plant this mutant elsewhere"
    (csrc / file).write_text(text.replace(old, new))
    return csrc


def test_unharmed(monkeypatch, tolerance):
    assert not found(cpu_build.library(), monkeypatch, tolerance)


@pytest.mark.parametrize("file, old, new", [pytest.param(*m[:3], id=m[3]) for m in MUTANTS])
def test_mutant_is_caught(file, old, new, monkeypatch, tolerance, tmp_path):
    cpu_build.library()  # skips where there is no compiler
    csrc = planted(tmp_path, file, old, new)
    if not STRESS and old != MUTANTS[0][1]:
        return  # that it still applies is known
    monkeypatch.setattr(build_cpu, "X86_SETS", {})
    build_cpu.build(tmp_path / build_cpu.NAME, csrc=csrc)
    assert found(cpp.bind(tmp_path / build_cpu.NAME, csrc), monkeypatch, tolerance)
