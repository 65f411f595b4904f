"""The options of a verb reach the function that does the work."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from moe_runtime.cli.app import app

RUNS = "moe_runtime.methods.esft.runs."
TRAIN = "esft train m --config c --data d --out o "
CASES = [
    (TRAIN + "--lora --rank 3", RUNS + "train_folder", {"check_weights": True, "lora": (3, 16)}),
    (
        "xft import-official s t --ffn-folder f",
        "moe_runtime.methods.xft.official.import_official",
        {"ffn_folder": Path("f")},
    ),
]
for _case in yaml.safe_load(Path(__file__).with_name("passed_on.yaml").read_text()):
    CASES.append((_case["line"], _case["function"], _case["options"]))


class Passed(Exception):
    """The arguments that a function was called with."""


def passed(monkeypatch, line: str, function: str) -> tuple[tuple, dict]:
    """Run the line with a function that does nothing, and return its arguments."""

    def stop(*args, **options):
        raise Passed(args, options)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # one_gpu sets it
    monkeypatch.setattr(function, stop)
    out = CliRunner().invoke(app, line.split())
    assert isinstance(out.exception, Passed), (out.output, out.exception)
    return out.exception.args


@pytest.mark.parametrize("line, function, options", CASES, ids=[case[0] for case in CASES])
def test_options(monkeypatch, line, function, options):
    _, found = passed(monkeypatch, line, function)
    assert {name: found[name] for name in options} == options


@pytest.mark.parametrize("asked, steps", [("0", None), ("7", 7)])
def test_no_checkpoints_are_saved_with_save_steps_0(monkeypatch, asked, steps):
    args, _ = passed(monkeypatch, f"{TRAIN} --save-steps {asked}", RUNS + "train_folder")
    assert args[4].save_steps == steps
