"""moe-runtime upit as a user types it: help, what reaches the tables, the steps on folders, one clear error for bad input."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from typer.testing import CliRunner

from moe_runtime.cli import runs
from moe_runtime.cli.app import app as main_app
from moe_runtime.methods.upit import router as upit_router
from moe_runtime.methods.upit import tables as upit_tables
from tests.support import cli_tables
from tests.support.upit_study import write_study

TABLES = tuple(upit_tables.COMMANDS)
STEPS = ("choose", "grow", "init-routers", "assemble", "export-mixtral")


def invoke(*arguments):
    return CliRunner().invoke(main_app, ["upit", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize("verb", [*TABLES, *STEPS])
def test_help_has_an_example(verb):
    out = invoke(verb, "--help")
    assert out.exit_code == 0 and f"Example: moe-runtime upit {verb}" in out.output


@pytest.fixture
def seen(monkeypatch):
    """The calls that reach the tables."""
    return cli_tables.watch(monkeypatch, upit_tables)


@pytest.mark.parametrize(
    "arguments, options",
    [
        pytest.param(("main",), {}, id="main"),
        *(pytest.param((name,), {"form": None}, id=name) for name in TABLES if name != "main"),
        pytest.param(
            ("ckpt", "front", "back", "--form", "lora"), {"form": "lora", "strategies": ("front", "back")}, id="two"
        ),
        pytest.param(
            ("experts", "--experts", 4, "--active", 1, "--active", 2),
            {"form": None, "sizes": (4,), "active": (1, 2)},
            id="grid",
        ),
        pytest.param(("data", ".5", 1), {"form": None, "shares": (0.5, 1.0)}, id="shares"),
        pytest.param(("epochs", "2,2", "1,.5"), {"form": None, "pairs": ((2.0, 2.0), (1.0, 0.5))}, id="pairs"),
    ],
)
def test_a_command_reaches_its_table(seen, tmp_path, arguments, options):
    out = invoke(*arguments, "--out", tmp_path, "--seeds", 2)
    cli_tables.check_call(seen, out, arguments, tmp_path, options)


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param(("main", "--seeds", 0), "seeds is 0; want an integer of at least 1", id="no seeds"),
        pytest.param(
            ("main", "--preset", "huge"), "preset is 'huge'; want one of llama-2-7b-lora, sheared", id="preset"
        ),
        pytest.param(("main", "--preset", "tiny", "--recipe", "a.yaml"), "want one of the two", id="both"),
        pytest.param(("ckpt", "last"), "strategy is 'last'; want one of front, uniform, back", id="strategy"),
        pytest.param(("router", "none", "none"), "strategy is none, none; want different ones", id="twice"),
        pytest.param(("expand", "--form", "dense"), "form is 'dense'; want one of ffn, lora", id="form"),
        pytest.param(
            ("expand", "--form", "ffn", "--preset", "llama-2-7b-lora"),
            "form is 'ffn', the recipe has .* lora alone",
            id="no form",
        ),
        pytest.param(
            ("experts", "--experts", 2, "--active", 3), "active is 3, experts is 2; want at most", id="active"
        ),
        pytest.param(("data", "2"), "share is 2.0; want a number above 0 and at most 1", id="share"),
        pytest.param(("epochs", "2"), "epochs is 2.0; want two numbers, such as 2,6", id="one number"),
        pytest.param(("epochs", "a,b"), "epochs is 'a,b'; want two numbers", id="no numbers"),
        pytest.param(("epochs", ".25,2"), "checkpoints.count is 3, ffn.sft.epochs is 0.25", id="few epochs"),
    ],
)
def test_bad_input_fails_at_once(tmp_path, arguments, match):
    out = invoke(*arguments, "--out", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception)), out.exception
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, rows, and two experts that differ from it in their MLPs."""
    folder = tmp_path_factory.mktemp("experts")
    write_study(folder)
    for i in range(2):
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        generator = torch.Generator().manual_seed(i)
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / f"saved/step-{i + 1}")
        for file in (folder / "base").glob("tokenizer*"):
            (folder / f"saved/step-{i + 1}" / file.name).write_bytes(file.read_bytes())
    return folder


def test_the_steps_of_the_method_one_after_the_other(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")

    def said(*arguments) -> str:
        out = invoke(*arguments)
        assert out.exit_code == 0, out.exception
        return out.output

    chosen = said("choose", folders / "saved", "--count", 2).split()
    assert [Path(path).name for path in chosen] == ["step-1", "step-2"]
    out = said("grow", *chosen, "--count", 3, "--base", folders / "base", "--out", tmp_path / "grown")
    assert f"{tmp_path / 'grown' / 'expert-2'}: " in out and " of expert 0, " in out
    experts = [*chosen, tmp_path / "grown/expert-2"]
    out = said(
        "init-routers", *experts, "--data", folders / "sums.jsonl", "--out", tmp_path / "routers", "--base", folders / "base",
        "--share", 0.3, "--at-least", 6, "--epochs", 2, "--learning-rate", 0.01, "--batch-size", 4, "--max-length", 32,
        "--vector-std", 0.02, "--vector-learning-rate", 0.05,
    )  # fmt: skip
    values = json.loads((tmp_path / "routers/routers.json").read_text())
    assert 0.5 not in values["before"]  # as it is of vectors that begin at 0
    assert values["buckets"] == [4, 4, 4] and all(a > b for a, b in zip(values["after"], values["before"], strict=True))
    assert out.count(" 4 rows, mean sigmoid") == 3
    said("assemble", "--routers", tmp_path / "routers", "--out", tmp_path / "moe")
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    routed = [upit_router.load_routed(tmp_path / f"routers/expert-{i}") for i in range(3)]
    gate = moe.model.layers[0].mlp.gate.weight
    assert torch.equal(gate, torch.stack([one.vectors[0] for one in routed]))
    said("export-mixtral", tmp_path / "moe", tmp_path / "mixtral")
    ids = torch.arange(6, 26)[None]
    stock = MixtralForCausalLM.from_pretrained(tmp_path / "mixtral")
    torch.testing.assert_close(stock(ids).logits, moe(ids).logits, rtol=1e-4, atol=1e-5)
    out = CliRunner().invoke(main_app, ["export", str(tmp_path / "moe"), str(tmp_path / "same")])
    assert out.exit_code == 0 and out.output.startswith(f"wrote {tmp_path / 'same'}: "), out.exception
    for path in (tmp_path / "mixtral").iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param(("assemble", "--out", "moe"), "experts and routers: neither is given; want", id="nothing"),
        pytest.param(("assemble", "a", "--routers", "b", "--out", "moe"), "both are given; want", id="both"),
        pytest.param(("choose", "none", "--count", 0), "count is 0, checkpoints in none are 0; want", id="no checkpoints"),
        pytest.param(
            ("init-routers", "none", "--data", "a.jsonl", "--out", "o"), "expert is 'none', which is no folder", id="expert"
        ),
        pytest.param(
            ("init-routers", "none", "--data", "a.jsonl", "--out", "o", "--buckets", "x"), "buckets is 'x'; want", id="buckets"
        ),
    ],
)  # fmt: skip
def test_a_step_refuses_bad_input(tmp_path, monkeypatch, arguments, match):
    monkeypatch.chdir(tmp_path)
    out = invoke(*arguments)
    assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception)), out.exception
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["upit/tiny", "sheared-llama-2.7b"])
def test_run_takes_a_recipe_of_upit(monkeypatch, tmp_path, recipe):
    calls = []
    monkeypatch.setattr(f"{runs.STAGES['upit']}.run", lambda *arguments, **options: calls.append(arguments))
    assert CliRunner().invoke(main_app, ["run", recipe, "--out", str(tmp_path)]).exit_code == 0
    ((path, out),) = calls
    assert path.parent.name == "upit" and path.stem == recipe.rpartition("/")[2] and out == tmp_path
