"""Stages of UpIT and UltraFuser whose models FSDP2 shards over two processes equal those of one
process, also when resumed.
"""

import json
import random
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support import dist_sharded, fuser_study, upit_study
from tests.support.dist_launch import launch

SGD = {
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "batch_size": 4,
    "max_grad_norm": -1,
    "save_steps": 2,
}
TUNED = SGD | {"epochs": 1}
PLANS = {
    "upit": (
        upit_study,
        {
            "ffn": dict.fromkeys(("sft", "init", "post"), TUNED),
            "lora": dict.fromkeys(("sft", "init", "post"), TUNED) | {"rank": 2, "alpha": 4},
            "seed_data": {
                "share": 0.1875,
                "at_least": 12,
                "capacity": 4,
            },
            # a balance loss is computed over the examples of each process, and the choice of
            # experts may flip
            "experts": {
                "num_experts": 3,
                "top_k": 3,
                "balance_loss": "none",
                "balance_loss_coef": 0.0,
            },
        },
    ),
    "ultrafuser": (
        fuser_study,
        dict.fromkeys(("stage1", "stage2", "specialist"), SGD | {"steps": 6}),
    ),
}


def write_even_rows(folder) -> None:
    """Write examples with the same number of tokens, because the routers' loss is a mean over the
    tokens that a process sees at once.
    """
    draw = random.Random(0)
    # the tokenizer has no merges for these
    for name, letters in {
        "sums": "ABCDEFGHIJKLM",
        "words": "NOPQRSTUVWXYZ",
    }.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(40):
                prompt = "".join(draw.choices(letters, k=8))
                completion = "".join(draw.choices(letters, k=4))
                print(json.dumps({"prompt": prompt, "completion": completion}), file=file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stopped"), [("upit", ["upit"]), ("ultrafuser", ["gate", "fused"])]
)
def test_sharded_stages_equal_one_process(method, stopped, tmp_path):
    study, plan = PLANS[method]
    recipe = study.write_study(tmp_path, **plan)
    if method == "upit":
        write_even_rows(tmp_path)
    values = yaml.safe_load(recipe.read_text())
    # batches that both processes fill, since accelerate would otherwise repeat examples
    for domain in values["domains"].values():
        domain["held_out_rows"] = 8 if method == "upit" else 4
    recipe.write_text(yaml.safe_dump(values))
    done = dist_sharded.run(
        tmp_path / "alone",
        method,
        str(recipe),
        say=lambda text: None,
    )
    alone = done["results"]
    shutil.copytree(
        tmp_path / "alone",
        tmp_path / "out",
        ignore=lambda _, names: _trained(names),
    )
    launch(
        dist_sharded.__file__,
        2,
        tmp_path,
        str(tmp_path),
        method,
        str(recipe),
        *stopped,
    )
    first = torch.load(tmp_path / "rank0.pt", weights_only=False)
    second = torch.load(tmp_path / "rank1.pt", weights_only=False)
    assert first["results"] == second["results"]
    for stage in stopped:
        begun = [begins for name, begins, _ in first["seen"] if name == stage]
        # the second run resumes from the checkpoint of step 2
        assert begun[:2] == [0, 2], first["seen"]
    for name, _, kinds in first["seen"]:
        assert kinds == {"DTensor"}, name
    for name, expected in alone.items():
        result = first["results"][name]
        assert result.folder.parent.name == expected.folder.parent.name
        assert result.steps == expected.steps
        assert result.losses == pytest.approx(expected.losses, rel=1e-4), name
        assert_same_tensors(_tensors(result.folder), _tensors(expected.folder))


def assert_same_tensors(ours: dict, theirs: dict) -> None:
    """Compare tensors relative to the rounding of the others, since routers that start at 0 are
    small.
    """
    assert theirs
    for key in ours:
        # FSDP2 saves a tied head, too
        assert key in theirs or key.endswith(" lm_head.weight")
    for key, value in theirs.items():
        distance = (ours[key] - value).norm().item() / max(value.norm().item(), 1)
        assert distance < 1e-4, key


def _trained(names: list[str]) -> set[str]:
    """Return the names of everything that is newly created, that is, all but the base and the
    examples.
    """
    trained = set()
    for name in names:
        if "-" in name and len(name) > 14 and not name.startswith(("data-", "base-")):
            trained.add(name)
    return trained


def _tensors(folder) -> dict:
    tensors = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for key, value in load_file(path).items():
            tensors[f"{path.relative_to(folder)} {key}"] = value
    return tensors
