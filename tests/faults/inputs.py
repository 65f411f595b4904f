"""The inputs of the verbs: models, examples, recipes and the output of earlier verbs, all tiny."""

import json
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moe_runtime.cli.app import app as main_app
from papers.engine.tiny import train_tokenizer
from tests.hf.tiny import dense
from tests.methods.ultrafuser import fusers
from tests.support import esft_study, fuser_study, upit_study
from tests.support.esft_adapter import random_adapter

ROWS = [
    {
        "prompt": f"Write {i}:\n",
        "completion": "x" * (1 + i % 5) + f" = {i}",
    }
    for i in range(12)
]
STEPS = {"learning_rate": 3e-3, "batch_size": 4, "optimizer": "adamw_torch"}


def make() -> None:
    """Write all of it to the folder given on the command line, atomically."""
    target = Path(sys.argv[1])
    folder = target.with_name(target.name + ".new")
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    _xft(folder)
    _esft(folder / "esft")
    _upit(folder / "upit")
    _fuser(folder / "fuser")
    folder.rename(target)


def _verb(*arguments) -> None:
    done = CliRunner().invoke(
        main_app,
        [str(argument) for argument in arguments],
    )
    if done.exit_code:
        raise RuntimeError(f"{arguments}: {done.output}") from done.exception


def _xft(folder: Path) -> None:
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 290)
    dense(
        "llama",
        vocab_size=len(tokenizer),
        mlp_bias=None,
    ).save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    _verb(
        "xft",
        "upcycle",
        folder / "dense",
        folder / "moe",
        "--num-experts",
        4,
        "--top-k",
        2,
    )
    _verb("xft", "to-mergeable", folder / "moe", folder / "mergeable")
    recipe = {
        "method": "xft",
        "base_model": "../dense",
        "experts": {"num_experts": 4, "top_k": 3},
        "evaluations": 1,
        "data": {
            "train": "../rows.jsonl",
            "held_out_rows": 4,
            "prompt": "plain",
            "max_length": 64,
        },
        "sft": STEPS | {"steps": 4},
        "tune": STEPS | {"steps": 4, "save_steps": 2},
        "mix": STEPS | {"steps": 2},
    }
    (folder / "xft").mkdir()
    final = folder.with_name(folder.name.removesuffix(".new"))
    recipe["base_model"] = str(final / "dense")
    recipe["data"]["train"] = str(final / "rows.jsonl")
    (folder / "xft" / "study.yaml").write_text(yaml.safe_dump(recipe))


def _esft(folder: Path) -> None:
    folder.mkdir()
    _moved(esft_study.write_study(folder))
    base = folder / "base"
    sample = ("--data", folder / "sums.jsonl", "--tokens", 64, "--max-length", 32)
    _verb("esft", "score", base, *sample, "--out", folder / "summary.json")
    _verb(
        "esft",
        "select",
        "--summary",
        folder / "summary.json",
        "--p",
        0.4,
        "--out",
        folder / "config.json",
    )
    random_adapter(AutoModelForCausalLM.from_pretrained(base)).save(folder / "adapter")


def _moved(recipe: Path) -> None:
    """Rewrite a recipe's paths to the final location of its files."""
    recipe.write_text(recipe.read_text().replace(".new/", "/"))


def _upit(folder: Path) -> None:
    folder.mkdir()
    _moved(upit_study.write_study(folder))
    for i in range(2):
        _expert(folder, i)


def _expert(folder: Path, i: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    generator = torch.Generator().manual_seed(i)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter += 0.02 * torch.randn(
                    parameter.shape,
                    generator=generator,
                )
    expert = folder / "saved" / f"step-{i + 1}"
    model.save_pretrained(expert)
    for file in (folder / "base").glob("tokenizer*"):
        (expert / file.name).write_bytes(file.read_bytes())


def _fuser(folder: Path) -> None:
    for name, model in zip(("a", "b"), fusers.specialists(2), strict=True):
        model.save_pretrained(folder / name)
        fusers.tokenizer().save_pretrained(folder / name)
    parent = folder.parent
    final = parent.with_name(parent.name.removesuffix(".new")) / "fuser"
    domains = {}
    for name, rows in fuser_study.domain_rows().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        domains[name] = {"train": str(final / f"{name}.jsonl")}
        domains[name]["held_out_rows"] = 4
    sources = {name: str(final / name) for name in ("a", "b")}
    steps = {
        "steps": 4,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 2,
    }
    config = {
        "max_length": 64,
        "domains": domains,
        "specialists": {
            "a": {"model": sources["a"], "template": "ultralm"},
            "b": {"model": sources["b"], "template": "# {prompt}\n"},
        },
        "stage1": steps,
        "stage2": steps,
        "evaluations": 1,
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
