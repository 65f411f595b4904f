"""The options of a verb reach the function that does the work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_runtime.cli.app import app

RUNS = "moe_runtime.methods.esft.runs."
UPIT = "moe_runtime.methods.upit."
FUSED = "moe_runtime.methods.ultrafuser.folders."
TRAIN = "esft train m --config c --data d --out o "
CASES = [
    (TRAIN + "--held-out h --no-pack", RUNS + "train_folder", {"held_out": "h", "packed": False}),
    (
        TRAIN + "--shared-experts --non-expert-modules",
        RUNS + "train_folder",
        {"shared_experts": True, "non_expert_modules": True},
    ),
    (TRAIN + "--any-weights", RUNS + "train_folder", {"check_weights": False, "lora": None}),
    (TRAIN + "--lora --rank 3", RUNS + "train_folder", {"check_weights": True, "lora": (3, 16)}),
    (TRAIN + "--ranks r", RUNS + "train_folder", {"lora": (8, 16), "lora_ranks": Path("r")}),
    ("esft score m --data d --out o --no-pack", RUNS + "score_folder", {"packed": False}),
    (
        "esft merge b a o --any-weights",
        "moe_runtime.methods.esft.folders.merge_folder",
        {"check_weights": False},
    ),
    (
        "lora export b a o --to merged --max-shard-size 5MB",
        "moe_runtime.methods.lora.stacks.merge_folder",
        {"max_shard_size": "5MB"},
    ),
    (
        "ultrafuser generate f --prompt p --temperature 0.5 --system s",
        FUSED + "answer",
        {"do_sample": True, "temperature": 0.5, "system": "s"},
    ),
    ("ultrafuser generate f --prompt p", FUSED + "answer", {"do_sample": False, "system": None}),
    ("ultrafuser fuse a b --out o", FUSED + "fuse_folders", {"copy": False, "joint": False}),
    (
        "upit grow a b --base x --out o --parents random --seed 3",
        UPIT + "expand_experts",
        {"parents": "random", "seed": 3},
    ),
    (
        "upit assemble a b --out o --backbone base",
        UPIT + "folders.assemble_folders",
        {"backbone": "base"},
    ),
    (
        "upit init-routers a b --data d --out o --tokens all",
        UPIT + "folders.route_folders",
        {"tokens": "all"},
    ),
    (
        "xft merge m o --alpha 0.25,0.75",
        "moe_runtime.methods.xft.folders.merge_folder",
        {"alpha": [0.25, 0.75]},
    ),
    (
        "xft import-official s t --ffn-folder f",
        "moe_runtime.methods.xft.official.import_official",
        {"ffn_folder": Path("f")},
    ),
    (
        "xft upcycle s t --top-k 3 --seed 7",
        "moe_runtime.methods.xft.folders.upcycle_folder",
        {"top_k": 3, "seed": 7},
    ),
]


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
