"""The checks of the CPU library must see planted bugs: each mutant is one changed line of csrc/cpu, built anew, and is caught.

Built for the machine's own instruction set and for none, which go different ways. `make test` builds one, `make stress` all.
"""

import shutil

import pytest
import torch

from moe_runtime.native import build
from moe_runtime.native.library import Loaded, cpp
from moe_runtime.ops import moe_mlp_cpp
from tests.support import cpu_build
from tests.support.layer import moe_layer
from tests.support.merging import CASES as MERGES
from tests.support.merging import merge_mismatches
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
    ("tiles.h", "rest[rows - m]", "rest[1]", "the last rows of a tall tile"),
    ("tiles.h", "if (k < length)", "if (false)", "the odd element of a sum in pairs"),
    ("tiles.h", "more ? load(at) + acc[m][v] : acc[m][v]", "acc[m][v]", "a long sum's first part"),
    ("experts.h", "f.H, panel + C)", "f.H, panel)", "up laid out over the gate"),
    ("moert_cpu.cpp", "(begin + rows * (i + 1) / n)", "(begin + rows * i / n)", "pieces of no rows"),
    ("moert_cpu.cpp", "(begin + rows * i / n)", "begin", "a second piece that begins with the first"),
    ("moert_cpu.cpp", "everyone[e] = all", "everyone[e] = offsets[e + 1] - first == T", "T rows taken for every token"),
    ("merging.h", "rounded(m.alpha[e]", "(m.alpha[e]", "products that are not rounded"),
    ("merging.h", "if (!first) e++, w += m.stride_e;", "", "the first expert once more"),
    ("merging.h", "first ? load(sums + v * LANES)", "false ? load(sums + v * LANES)", "groups of experts forgotten"),
    ("merging.h", "v * LANES, total[v], n)", "v * LANES, total[v], n & -2)", "the last number of an expert"),
    ("merging.h", "load_up_to(w + e * stride + i, lanes(size - i))", "vf{}", "the last numbers of a dot"),
    ("merging.h", "for (; e < m.E; e++) block_dots", "for (; e + 1 < m.E; e++) block_dots", "the last expert's gradient"),
    ("merging.h", "sum(total[e][0] + total[e][1])", "sum(total[e][0])", "every other vector of a dot"),
    ("merging.h", "if (m.narrow) widen", "if (sizeof(T) == 2) widen", "dout taken for the weights' dtype"),
    ("merging.h", "m.parts + block * m.E", "m.parts", "blocks that overwrite each other"),
    ("moert_cpu.cpp", "total += m.parts[block * E + e]", "total = m.parts[block * E + e]", "all blocks but the last"),
]  # fmt: skip
FORMS = ({}, {"limit": 0.7, "up_offset": 1.0}, {"limit": 0.7, "interleaved": True})
# T, H, I, E, K, dtype, routing: few tokens and many, an odd number of pairs, a sum in two parts, an expert in two pieces
CASES = [
    *((T, 33, 19, 4, 2, torch.float32, routing) for T, routing in ((3, "random"), (70, "dropped"), (70, "halves"))),
    (70, 33, 19, 4, 2, torch.bfloat16, "random"),
    (40, 530, 19, 1, 1, torch.float32, "random"),
    (1100, 9, 5, 1, 1, torch.float32, "random"),
]
WIDE = ("avx512", "avx512_bf16")  # the sets with code of their own
NEEDS = {
    "(m.alpha[e]": ("avx2", *WIDE),
    "rest[1]": WIDE,
    "acc[m][v]": WIDE,
    "f.H, panel)": WIDE,
    "if (false)": WIDE[1:],
}
pytestmark = pytest.mark.stress


def found(library: Loaded, monkeypatch, tolerance) -> list[str]:
    """Where a layer on this library, or a merge, is not the equation: few tokens and many, every form, activation and way."""
    monkeypatch.setattr(cpp, "_found", library)
    torch.manual_seed(0)
    bad, best = [], library.variant
    for variant in dict.fromkeys((best, "generic")):
        library.handle.moert_cpu_limit(variant.encode())
        with monkeypatch.context() as patch:
            bad += [word for E, P in MERGES for dtype in cpp.DTYPES for word in merge_mismatches(E, P, dtype)]
            if variant in WIDE:  # as where the machine has no matrix tiles
                patch.setattr(moe_mlp_cpp, "_few_rows", lambda dtype: moe_mlp_cpp.ANY)
            for n, act in enumerate(ACT):
                for T, H, I, E, K, dtype, routing in CASES if n == 0 else CASES[:3]:
                    gated = (n + T) % 3 > 0
                    case = make_case(T, H, I, E, K, dtype, routing, act, gated, bias=True)
                    # in bfloat16 what lies next to the limit falls on either side of it
                    case.form = FORMS[(n + T) % 3] if gated and dtype == torch.float32 else {}
                    bad += moe_mismatches(moe_layer(backend="cpp"), case, tolerance[dtype])
    library.handle.moert_cpu_limit(best.encode())
    return bad


def planted(folder, file: str, old: str, new: str):
    """The sources in `folder` with the change in one of them."""
    csrc = folder / "cpu"
    shutil.copytree(build.csrc_dir("cpu"), csrc)
    text = (csrc / file).read_text()
    assert old in text, f"csrc/cpu/{file} has no {old!r} any more; plant this mutant elsewhere"
    (csrc / file).write_text(text.replace(old, new))
    return csrc


def test_unharmed(monkeypatch, tolerance):
    assert not found(cpu_build.library(), monkeypatch, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("file, old, new", [pytest.param(*m[:3], id=m[3]) for m in MUTANTS])
def test_mutant_is_caught(file, old, new, monkeypatch, tolerance, tmp_path):
    variant = cpu_build.library().variant  # skips where there is no compiler
    csrc = planted(tmp_path, file, old, new)
    if not STRESS and old != MUTANTS[0][1]:
        return  # that it still applies is known
    if variant not in NEEDS.get(new, (variant,)):
        pytest.skip(f"{variant} has no code that this changes")
    sets = {name: flags for name, flags in build.X86_SETS.items() if variant.startswith(name)}
    monkeypatch.setattr(build, "X86_SETS", sets)
    if not STRESS:  # less than half of the compiler's time
        monkeypatch.setattr(build, "CPU_FLAGS", ("-O1", *build.CPU_FLAGS[1:]))
    build.build_cpu(tmp_path / build.NAMES["cpu"], csrc=csrc)
    assert found(cpp.bind(tmp_path / build.NAMES["cpu"], csrc), monkeypatch, tolerance)
