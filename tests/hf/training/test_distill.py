"""`moe-runtime train --distill`: a student learns a teacher's predictions."""

from pathlib import Path

import pytest
import torch

from moe_runtime.hf.training.sft import divergence, train_command
from moe_runtime.methods.shrink import compare_folders, dense_folder, score_folder
from papers.engine.tiny import train_tokenizer
from tests.methods.esft.test_runs import write_base
from tests.support.checkpoints import tensors
from tests.support.stock_moe import stock


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A MoE model, a dense one made of two of its experts, and rows."""
    home = tmp_path_factory.mktemp("distill")
    write_base(home)
    scored = score_folder(home / "base", home / "rows.jsonl", home / "s.st", n_tokens=128)
    dense_folder(home / "base", scored, home / "dense", 2, by="cp")
    return home


def trained(home: Path, model: str, out: Path, *more: str) -> Path:
    """Train a model of `home` on its rows for some steps without a warmup."""
    words = f"--model {home / model} --data {home / 'rows.jsonl'} --output_dir {out}"
    settings = (
        "--max_steps 40 --learning_rate 1e-3 --lr_scheduler_type constant --train_on all "
        "--per_device_train_batch_size 8 --save_strategy no --report_to none --seed 1"
    )
    return train_command([*f"{words} {settings}".split(), *more])


def test_the_divergence_is_the_equation():
    generator = torch.Generator().manual_seed(0)
    logits, expected = torch.randn(2, 1, 5, 7, generator=generator)
    labels = torch.tensor([[-100, 1, -100, 2, 3]])
    total = 0.0
    for position in (0, 2, 3):
        p = expected[0, position].double().softmax(-1)
        q = logits[0, position].double().softmax(-1)
        total += float((p * (p / q).log()).sum())
    assert float(divergence(logits, expected, labels)) == pytest.approx(total, rel=1e-5)
    assert float(divergence(expected, expected, labels)) == 0


def test_a_student_comes_closer_to_its_teacher(home, tmp_path):
    before = compare_folders(home / "base", home / "dense", home / "rows.jsonl", limit=16)
    teacher = str(home / "base")
    student = trained(home, "dense", tmp_path / "student", "--distill", teacher)
    after = compare_folders(home / "base", student, home / "rows.jsonl", limit=16)
    assert after.divergence < 0.9 * before.divergence
    assert after.loss_before == before.loss_before


def test_a_teacher_teaches_itself_nothing(home, tmp_path):
    base = str(home / "base")
    # Adam would follow the signs of rounding errors
    same = trained(home, "base", tmp_path / "same", "--distill", base, "--optim", "sgd")
    found = compare_folders(base, same, home / "rows.jsonl", limit=8)
    assert found.divergence < 1e-4


def test_a_teacher_with_another_vocabulary(home, tmp_path):
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 280)
    stock("deepseek_v2", vocab_size=len(tokenizer) + 3).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"Teacher .*other' has \d+ tokens, but model"):
        trained(home, "dense", tmp_path / "out", "--distill", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="no-such-folder"):
        trained(home, "dense", tmp_path / "out", "--distill", "no-such-folder")


def test_frozen_routers_stay_and_everything_else_moves(home, tmp_path):
    out = trained(home, "base", tmp_path / "out", "--freeze_routers", "--max_steps", "2")
    before = tensors(home / "base")
    after = tensors(out)
    moved = {key for key, value in before.items() if not torch.equal(after[key], value)}
    routers = {key for key in before if key.endswith("gate.weight")}
    assert routers
    assert moved.isdisjoint(routers)
    assert len(moved) > len(before) / 2
    with pytest.raises(ValueError, match="adapters of PEFT train no routers"):
        trained(home, "base", tmp_path / "no", "--freeze_routers", "--use_peft")
