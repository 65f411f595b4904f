"""`moe-runtime upit` as a user types it: the steps on folders, and one clear error for bad
input.
"""

import functools
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from moe_runtime.io.files import read_json
from moe_runtime.methods.upit import router as upit_router
from tests.support.cli import run_verb
from tests.support.upit_study import write_study

invoke = functools.partial(run_verb, "upit")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, examples, and two experts that differ from the base in their MLPs."""
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


ROUTERS = (
    "--share 0.3 --at-least 6 --epochs 2 --learning-rate 0.01 --batch-size 4 --max-length 32 "
    "--vector-learning-rate 0.05"
)


def test_the_steps_of_the_method_one_after_the_other(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")

    def step(*arguments) -> str:
        out = invoke(*arguments)
        assert out.exit_code == 0, out.exception
        return out.output

    base = ("--base", folders / "base")
    assert step("choose", folders / "saved", "--count", 1).strip().endswith("step-2")
    chosen = step("choose", folders / "saved", "--count", 2).split()
    assert [Path(path).name for path in chosen] == ["step-1", "step-2"]
    out = step(
        "grow",
        *chosen,
        "--count",
        3,
        *base,
        "--out",
        tmp_path / "grown",
    )
    assert f"{tmp_path / 'grown' / 'expert-2'}: " in out
    assert " of expert 0, " in out
    experts = [*chosen, tmp_path / "grown/expert-2"]
    routers = tmp_path / "routers"
    files = ("--data", folders / "sums.jsonl", *base, "--out", routers)
    out = step("init-routers", *experts, *files, *ROUTERS.split())
    values = read_json(routers / "routers.json")
    assert values["buckets"] == [4, 4, 4]
    for after, before in zip(values["after"], values["before"], strict=True):
        assert after > before
    assert out.count(" 4 examples, mean sigmoid") == 3
    moe_folder = tmp_path / "moe"
    step(
        "assemble",
        "--routers",
        routers,
        "--max-shard-size",
        "20KB",
        "--out",
        moe_folder,
    )
    assert (moe_folder / "model.safetensors.index.json").is_file()
    moe = AutoModelForCausalLM.from_pretrained(moe_folder)
    vectors = [upit_router.load_routed(routers / f"expert-{i}").vectors[0] for i in range(3)]
    assert torch.equal(moe.model.layers[0].mlp.gate.weight, torch.stack(vectors))
    step("export", moe_folder, tmp_path / "mixtral")
    ids = torch.arange(6, 26)[None]
    stock = MixtralForCausalLM.from_pretrained(tmp_path / "mixtral")
    torch.testing.assert_close(stock(ids).logits, moe(ids).logits, rtol=1e-4, atol=1e-5)
    out = run_verb("xft", "export", moe_folder, tmp_path / "same")
    assert out.exit_code == 0, out.exception
    for path in (tmp_path / "mixtral").iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "line, match",
    [
        ("assemble --out moe", "or the folder of upit init-routers, but neither"),
        ("assemble a --routers b --out moe", "but both are given"),
        ("init-routers none --data a.jsonl --out o", "none is not a folder"),
    ],
)
def test_a_step_refuses_bad_input(tmp_path, monkeypatch, line, match):
    monkeypatch.chdir(tmp_path)
    out = invoke(*line.split())
    assert isinstance(out.exception, ValueError), out.output
    assert re.search(match, str(out.exception)), out.exception
    assert not list(tmp_path.iterdir())
