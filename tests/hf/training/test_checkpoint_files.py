"""A malicious or damaged checkpoint: nothing in it is executed, and the error names the file before
training starts.
"""

import contextlib
import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import TrainingArguments

from moe_runtime.hf.training.checkpoint_files import check_checkpoint
from moe_runtime.hf.training.trainer import MoETrainer
from tests.hf.tiny import VOCAB, dense
from tests.support.edited import edit_json
from tests.support.pickled import Planted

ROWS = torch.randint(
    3,
    VOCAB,
    (8, 8),
    generator=torch.Generator().manual_seed(0),
).tolist()
ROWS = Dataset.from_dict({"input_ids": ROWS, "labels": ROWS})
# folders of distributed checkpoints: ours, and accelerate's under FSDP2
SPREAD = ("experts", "experts-optimizer", "pytorch_model_fsdp_0", "optimizer_0")


def trainer(folder: Path) -> MoETrainer:
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return MoETrainer(dense("llama"), args, train_dataset=ROWS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the folder of a training run with checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    trainer(folder).train()
    return folder


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> Path:
    """Return a folder written by torch.distributed.checkpoint, with tensors and other values."""
    folder = tmp_path_factory.mktemp("spread")
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    shutil.copytree(trained / "checkpoint-2", tmp_path / "checkpoint-2")
    return tmp_path / "checkpoint-2"


def test_a_checkpoint_as_written_is_resumed(checkpoint):
    assert trainer(checkpoint.parent).train(resume_from_checkpoint=True).global_step == 4


FILES = (
    "optimizer.pt",
    "rng_state.pth",
    "trainer_state.json",
    "pytorch_model.bin",
    "default/adapter_model.bin",
    *(f"{name}/.metadata" for name in SPREAD),
    *(f"{name}/__0_0.distcp" for name in SPREAD),
)


@pytest.mark.parametrize("by", ["torch", "pickle", "truncated"])
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_runs_code(checkpoint, spread, tmp_path, name, by):
    touched = tmp_path / "touched"
    path = checkpoint / name
    if path.parent.name in SPREAD:
        shutil.copytree(spread, path.parent)
    path.parent.mkdir(exist_ok=True)
    payload = {"state": {}, "param_groups": Planted(touched)}
    if by == "torch":
        path.write_bytes(saved(payload))
    elif by == "pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        path.write_bytes(path.read_bytes()[:40] if path.exists() else b"")
    with pytest.raises(
        ValueError,
        match="Resume from another checkpoint",
    ) as refused:
        trainer(checkpoint.parent).train(resume_from_checkpoint=str(checkpoint))

    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert not touched.exists()


def saved(value) -> bytes:
    """Return the output of torch.save."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def plant_in_index(folder: Path, payload, where: str) -> None:
    """Plant a payload in a readable index of torch.distributed.checkpoint, or in a value that it
    describes.
    """
    index = pickle.loads((folder / ".metadata").read_bytes())
    stored = next(stored for key, stored in index.storage_data.items() if key.fqn.endswith(".lr"))
    if where == "planner data":
        index.planner_data = payload
    else:
        stored.relative_path = where
        stored.offset = 0
        stored.length = len(saved(payload))
        (folder / where).write_bytes(saved(payload))
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_an_index_names_no_file_outside_of_its_folder(checkpoint, spread):
    folder = checkpoint / SPREAD[0]
    shutil.copytree(spread, folder)
    plant_in_index(folder, 0.5, "../harmless.distcp")
    with pytest.raises(
        ValueError,
        match="expected the name of a file in its folder",
    ):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "where",
    ["planner data", "value.distcp", "../outside.distcp"],
)
@pytest.mark.parametrize("name", SPREAD)
def test_no_index_of_a_checkpoint_runs_code(checkpoint, spread, tmp_path, name, where):
    folder = checkpoint / name
    touched = tmp_path / "touched"
    shutil.copytree(spread, folder)
    check_checkpoint(checkpoint)
    plant_in_index(folder, Planted(touched), where)
    with pytest.raises(
        ValueError,
        match="Resume from another checkpoint",
    ) as refused:
        check_checkpoint(checkpoint)

    assert str(folder) in str(refused.value)
    assert not touched.exists()
    state = {"optimizer": {"param_groups": [{"lr": 0.0}]}}
    with contextlib.suppress(Exception):
        dcp.load(state, checkpoint_id=folder)
    assert touched.exists()  # the payload works: torch itself runs it


def test_training_args_are_never_loaded(checkpoint, tmp_path):
    (checkpoint / "training_args.bin").write_bytes(pickle.dumps(Planted(tmp_path / "touched")))
    trainer(checkpoint.parent).train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"global_step": 10**9},
        {"global_step": "2"},
        {"log_history": 3},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_trainer_state_that_cannot_be_is_refused(checkpoint, values):
    edit_json(checkpoint / "trainer_state.json", **values)
    with pytest.raises(
        ValueError, match=r"trainer_state\.json is .* Resume from another checkpoint"
    ):
        trainer(checkpoint.parent).train(resume_from_checkpoint=str(checkpoint))


def test_a_best_checkpoint_elsewhere_is_checked(checkpoint, tmp_path):
    made = trainer(checkpoint.parent)
    made.state.best_model_checkpoint = str(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Planted(tmp_path / "touched")))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is refused"):
        made._load_best_model()
    assert not (tmp_path / "touched").exists()
