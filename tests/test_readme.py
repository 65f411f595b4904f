"""What the README says is there: the equation table, the families, the commands, the code blocks, the figures."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from moe_runtime import cli
from moe_runtime.hf.families import FAMILIES
from tests.hf import stock as stock_families
from tests.hf.test_stack import stock
from tests.hf.tiny import dense

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BACKENDS = ("_torch", "_triton")


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_each_equation_lives_where_the_table_says():
    places = re.findall(
        r"`((?:moe_runtime|kernels)/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", section("Where each equation lives")
    )
    assert len(places) >= 15
    for path, names in places:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{path} has no {name}"


def test_every_op_has_its_line():
    table = section("Where each equation lives")
    for path in (ROOT / "moe_runtime" / "ops").glob("*.py"):
        if path.stem not in ("__init__", "library", "workspace", "activation") and not path.stem.endswith(BACKENDS):
            assert f"moe_runtime/ops/{path.name}" in table, f"{path.name} is missing from the table"


def test_families_are_those_of_the_code():
    assert set(re.findall(r"`([a-z0-9_]+)`", section("Which models"))) == set(FAMILIES)


def test_stock_families_are_those_of_the_installed_transformers():
    served, others = section("Stock MoE models of transformers").split("Compared with")[1].split("Not served")
    served, others = (set(re.findall(r"`([a-z0-9_]+)`", text)) - {"patch"} for text in (served, others))
    written_with = re.search(r"transformers ([\d.]+)", (ROOT / "docs" / "families.md").read_text())[1].rstrip(".")
    missing = set(stock_families.FAMILIES) - served
    if transformers.__version__ == written_with:
        assert served == set(stock_families.FAMILIES) and others == set(stock_families.OTHERS)
    else:  # an older one has fewer, a newer one more
        assert not missing or Version(transformers.__version__) > Version(written_with)


def test_commands_are_those_of_the_code():
    named = set(re.findall(r"^\| `moe-runtime ([a-z-]+)", section("On the command line"), re.MULTILINE))
    verbs = {command.name or command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands}
    assert named == verbs | {group.name for group in cli.app.registered_groups}


@pytest.mark.parametrize("block", range(3))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense("llama").save_pretrained("base")
    stock().save_pretrained("moe-model")
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[block]
    names: dict = {}
    exec(compile(code, f"README.md, Python block {block}", "exec"), names)
    if block == 1:
        assert (tmp_path / "dense" / "config.json").exists()
    elif block == 0:
        assert names["model"].config._experts_implementation == "moe_runtime"
    else:
        assert names["out"].shape == (20, 64) and torch.allclose(names["weight"].sum(1), torch.ones(20))
        torch.testing.assert_close(names["out"].view_as(names["y"]), names["y"])


def test_all_python_blocks_are_run():
    assert README.count("```python") == 3


def test_cpu_figures_are_those_of_the_newest_file():
    newest = max((ROOT / "bench" / "results").glob("*-cpu.json"))
    rows = {
        (bench["name"], name): row
        for bench in json.loads(newest.read_text())["benchmarks"]
        for name, row in bench["extra_info"]["rows"].items()
    }
    table = section("Speed on the CPU")
    assert newest.name in table
    report = importlib.import_module("moe_runtime.bench.report")
    for text in (report.cpu_table(rows), report.steps_table(rows), report.goals(rows, report.CPU_GOALS).strip()):
        assert text in table


def test_nothing_is_left_to_fill_in_and_pictures_are_there():
    assert "<!--" not in README and "held-out functions of the standard library" in section("What the demo prints")
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).read_bytes().startswith(b"\x89PNG")
