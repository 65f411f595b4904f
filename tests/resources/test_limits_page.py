"""docs/limits.md: a line for every op and engine, and no date of a GPU without a results file of one."""

import re
from pathlib import Path

from moe_runtime import backends
from tests.hf.dropin import test_engines

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["part", "CPU", "interpreter", "emulator", "compiled", "GPU"]


def table() -> dict[str, dict[str, str]]:
    """The page's table of what was proven: {part: {column: cell}}."""
    text = (ROOT / "docs" / "limits.md").read_text()
    found = re.search(r"^\| part \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    head = [cell.strip() for cell in found[0].splitlines()[0].strip("|").split("|")]
    assert head == COLUMNS
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    assert all(len(row) == len(COLUMNS) for row in rows)
    return {row[0].strip("`"): dict(zip(COLUMNS, row, strict=True)) for row in rows}


def test_every_op_has_a_line_that_knows_its_kernels():
    rows = table()
    for op in backends.OPS:
        row = rows[op]
        assert row["CPU"] != "-"
        assert (row["interpreter"] != "-") == (op in backends.TRITON_OPS) == ("Triton" in row["compiled"])
        if op in backends.CUDA_OPS:
            assert row["emulator"] != "-" and "CUDA" in row["compiled"]
        assert ("C++" in row["CPU"]) == (op in backends.CPP_OPS)


def test_every_engine_has_a_line():
    parts = " ".join(table()).lower()
    engines = {case.values[0] for case in test_engines.ENGINES}
    assert len(engines) >= 3
    for engine in engines:
        assert re.sub(r"[^a-z0-9]", "", engine.lower())[:4] in re.sub(r"[^a-z0-9]", "", parts), engine


def test_every_op_s_proof_is_there():
    """Each op has a test file of its own and one of its kernel."""
    names = {path.stem for path in (ROOT / "tests" / "ops").glob("test_*.py")}
    files = {
        "route": "routing", "merge_experts": "merging", "lora_mlp": "lora", "gram": "expansion",
        "dare_merge": "expansion", "fused_cross_entropy": "fusion",
    }  # fmt: skip
    for op in backends.OPS:
        name = files.get(op, op)
        assert {f"test_{name}", f"test_{name}_kernel"} <= names, op


def test_a_gpu_is_dated_by_a_results_file():
    dates = {path.name[:10] for path in (ROOT / "bench" / "results").glob("*-gpu.json")}
    for part, row in table().items():
        named = set(re.findall(r"20\d\d-\d\d-\d\d", row["GPU"]))
        assert named <= dates, part
        assert named or row["GPU"] in ("none yet", "-"), part
