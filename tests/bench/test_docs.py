"""docs/benchmarks.md: the benchmark that it shows is one, and the fields that it names are those of the files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    """What the page's own benchmark writes."""
    folder = tmp_path_factory.mktemp("bench")
    ((name, text),) = re.findall(r"```python file=(\S+)\n(.*?)```", TEXT, re.DOTALL)
    (folder / name).write_text(text)
    settings = [
        "-o",
        "python_files=bench_*.py",
        "-o",
        "python_functions=bench_*",
        "-c",
        os.devnull,
        "--rootdir",
        folder,
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "moe_runtime.bench.conftest",
        *settings,
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | {"PYTHONPATH": str(ROOT)}
    command += [name, "--tiny", "--results", "r.jsonl"]
    done = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    (found,) = [line for line in map(json.loads, (folder / "r.jsonl").open()) if "extra_info" in line]
    assert found["name"] == "bench_softmax[tiny]"
    return found["extra_info"]


def fields(heading: str) -> list[str]:
    """The code in the first column of the table that has this head."""
    (table,) = re.findall(rf"\| {heading} \| \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT)
    return [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


def test_the_benchmark_of_the_page_runs(info):
    assert list(info["rows"]) == ["copy (floor)", "torch", "in three steps"]
    assert info["kind"] == "op" and info["dtype"] == "fp32" and info["shape"]["name"] == "tiny"
    assert info["rows"]["in three steps"]["difference"] < 1e-6


def test_the_fields_of_the_page_are_those_of_the_file(info):
    named = fields("field")
    assert set(info) <= set(named)
    # of a benchmark that has tokens, who is missing, and launch configs of a GPU
    assert set(named) - set(info) <= {"flops", "tokens", "notes", "tiles"}


def test_the_columns_of_the_page_are_those_of_a_row(info):
    named = set(fields("column"))
    found = {column for row in info["rows"].values() for column in row}
    assert found <= named and {"ms", "ratio", "spread", "GB/s", "share", "difference"} <= found
    source = "".join(path.read_text() for path in sorted((ROOT / "bench").glob("*.py")) if "pictures" not in path.name)
    assert [name for name in named if f'"{name}"' not in source] == []


def test_kinds_and_pictures_of_the_page_are_all():
    from moe_runtime.bench.described import KINDS
    from moe_runtime.bench.pictures import PICTURES

    for head, names in (("kind | what", KINDS), ("picture | shows", PICTURES)):
        (table,) = re.findall(rf"\| {re.escape(head)} \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT)
        assert sorted(line.split("|")[1].strip() for line in table.splitlines()) == sorted(names)
