"""methods/ultrafuser/runs.py: two stages from folders and files, and how a run resumes."""

import json

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedType

from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser import folders, runs
from moe_runtime.methods.ultrafuser.runs import FuserConfig, train_folder
from tests.methods.ultrafuser import fusers
from tests.support.checkpoints import assert_equal
from tests.support.fuser_study import domain_rows

STEPS = {"steps": 3, "batch_size": 4, "learning_rate": 1e-2, "save_steps": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two specialists, the examples of two domains, and a config."""
    home = tmp_path_factory.mktemp("home")
    for name, model in zip(
        ("a", "b"),
        fusers.specialists(2),
        strict=True,
    ):
        model.save_pretrained(home / name)
        fusers.tokenizer().save_pretrained(home / name)
    for name, rows in domain_rows().items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def config(home, **changes) -> FuserConfig:
    domains = {name: {"train": str(home / f"{name}.jsonl")} for name in domain_rows()}
    values = {
        "max_length": 64,
        "domains": {name: one | {"held_out_rows": 4} for name, one in domains.items()},
        "specialists": {
            "a": {"model": str(home / "a"), "template": "ultralm"},
            "b": {"model": str(home / "b"), "template": "# {prompt}\n"},
        },
        "stage1": STEPS,
        "stage2": STEPS,
        "evaluations": 1,
    }
    return FuserConfig.from_dict(values | changes)


@pytest.fixture(scope="module")
def done(home, tmp_path_factory):
    """A finished run."""
    out = tmp_path_factory.mktemp("runs") / "out"
    return train_folder(
        config(home),
        out,
        say=lambda text: None,
    )


def test_two_stages_make_a_folder_that_generates(done):
    fused = ultrafuser.load(done.path)
    gate = ultrafuser.load(done.path.with_name("gate"))
    base = fusers.specialists(2)
    assert fused.names == ("a", "b")
    assert fused.templates[1] == "# {prompt}\n"
    assert list(done.losses) == ["gate", "model"]
    assert done.losses["gate"].keys() == {"sums", "words"}
    for tuned, frozen, model in zip(
        fused.specialists,
        gate.specialists,
        base,
        strict=True,
    ):
        assert_equal(frozen.state_dict(), model.state_dict())
        assert not torch.equal(
            tuned.lm_head.weight,
            model.lm_head.weight,
        )
    torch.manual_seed(0)
    fresh = ultrafuser.UltraFuser(base, gate="mlp").gate.state_dict()
    for name, trained in gate.gate.state_dict().items():
        # the last bias shifts all scores equally
        assert name == "score.bias" or not torch.equal(trained, fresh[name])
    assert fused.complete(["1 and 2"], max_new_tokens=3, do_sample=False)
    assert not list(done.path.parent.glob("*checkpoints"))


def test_a_finished_run_is_not_run_again(done, home, monkeypatch):
    monkeypatch.setattr(runs.fit, "train", None)
    again = train_folder(
        config(home),
        done.path.parent,
        say=lambda text: None,
    )
    assert again == done


@pytest.mark.parametrize("stage", ["gate", "model"])
def test_an_interrupted_stage_resumes(done, home, tmp_path, monkeypatch, stage):
    """It stops after the last step, or after one of the checkpoints."""
    out = tmp_path / "out"
    save = folders.save

    def interrupted(fuser, folder, **options):
        if folder.name == stage:
            raise KeyboardInterrupt
        return save(fuser, folder, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folders, "save", interrupted)
        train_folder(
            config(home),
            out,
            say=lambda text: None,
        )
    assert list((out / f"{stage}-checkpoints").glob("checkpoint-*"))
    again = train_folder(
        config(home),
        out,
        say=lambda text: None,
    )
    assert again.losses == done.losses
    both = [ultrafuser.load(path).state_dict() for path in (again.path, done.path)]
    assert_equal(*both)


def test_another_run_s_folder_is_refused(done, home):
    with pytest.raises(ValueError, match="holds another run, with a different seed"):
        train_folder(
            config(home),
            done.path.parent,
            seed=3,
        )
    other = config(home, stage2=STEPS | {"learning_rate": 2e-2})
    with pytest.raises(ValueError, match="different stage2. Use the same settings"):
        train_folder(other, done.path.parent)


def test_another_dtype(home, tmp_path):
    one = config(
        home,
        dtype="bfloat16",
        stage2=STEPS | {"steps": 1},
    )
    receipt = train_folder(
        one,
        tmp_path / "out",
        say=lambda text: None,
    )
    fused = ultrafuser.load(receipt.path)
    assert fused.specialists[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"domains": {"sums": {"train": "x.jsonl"}}}, "domains must have at least 2, but got 1"),
        ({"stage1": STEPS | {"batch_size": 3}}, "stage1.batch_size must be a multiple of the 2"),
        ({"gates": 1}, "gates is not a valid key"),
    ],
)
def test_a_wrong_config_names_the_key(home, tmp_path, changes, match):
    values = config(home).to_dict() | changes
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=match):
        train_folder(tmp_path / "mine.yaml", tmp_path / "out")


def test_models_and_data_are_checked_before_anything_is_written(home, tmp_path):
    wide = tmp_path / "wide"
    fusers.specialist(3, hidden_size=64).save_pretrained(wide)
    fusers.tokenizer().save_pretrained(wide)
    none = str(tmp_path / "none.jsonl")
    for section, name, key, value, match in (
        ("specialists", "b", "model", none, "specialists.b.model .*none"),
        ("specialists", "b", "model", str(wide), "The hidden sizes differ .* Set joint: true"),
        ("domains", "words", "train", none, "domains.words: .*none.jsonl"),
    ):
        values = config(home).to_dict()
        values[section][name][key] = value
        with pytest.raises(ValueError, match=match):
            train_folder(
                FuserConfig.from_dict(values),
                tmp_path / "out",
            )
    assert not (tmp_path / "out").exists()


def test_engines_that_do_not_work_are_refused(home, monkeypatch, tmp_path):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="distributed_type NO, MULTI_GPU .* but it is DEEPSPEED"):
        train_folder(config(home), tmp_path / "out")
    assert not (tmp_path / "out").exists()
