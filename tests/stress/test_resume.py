"""A training that is stopped after any step and resumed equals an uninterrupted one: weights,
optimizer, losses, data, routers.
"""

import pytest
import torch

from tests.hf.training.test_trainer import logged, trainer_of, upcycled
from tests.support.stress import STRESS

STEPS = 10 if STRESS else 4
SETTINGS = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "save_total_limit": None,
}
pytestmark = pytest.mark.stress


class Order:
    """Records the examples of each batch, as the model receives them."""

    def __init__(self, trainer):
        self.rows = []
        prepare = trainer._prepare_inputs

        def recorded(inputs):
            self.rows.append(inputs["input_ids"].tolist())
            return prepare(inputs)

        trainer._prepare_inputs = recorded


def state_of(folder, step) -> dict:
    """Return the state of a checkpoint besides the weights: optimizer, scheduler, and
    generators.
    """
    names = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    values = {}
    for name in names:
        values[name] = torch.load(
            folder / f"checkpoint-{step}" / name,
            weights_only=False,
        )
    return values


def same(a, b) -> bool:
    """Whether two nested structures of dicts, lists, tensors and numbers are bit-identical."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run; a noisy router draws numbers at every step, and the third batch ends
    an epoch.
    """
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_of(
        "trainer", upcycled(noisy_gate=True), folder, places=[0, 1, 2, 3, 4, 5], **SETTINGS
    )
    order = Order(trainer)
    trainer.train()
    return folder, trainer, order.rows, (folder / "router_stats.csv").read_text()


@pytest.mark.parametrize("step", range(1, STEPS))
def test_stopped_after_any_step_it_is_the_same_training(step, whole, tmp_path):
    folder, wanted, rows, stats = whole
    (tmp_path / "router_stats.csv").write_text(stats)
    torch.manual_seed(1234 + step)  # a new process has other random numbers
    trainer = trainer_of(
        "trainer", upcycled(noisy_gate=True), tmp_path, places=[0, 1, 2, 3, 4, 5], **SETTINGS
    )
    order = Order(trainer)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    for name in ("loss", "lm_loss", "balance_loss", "grad_norm", "learning_rate"):
        assert len(logged(wanted, name)) == STEPS and logged(trainer, name) == logged(
            wanted, name
        ), name
    assert order.rows == rows[step:]
    for (name, got), expected in zip(
        trainer.model.named_parameters(), wanted.model.parameters(), strict=True
    ):
        assert torch.equal(got, expected), name
    assert same(state_of(tmp_path, STEPS), state_of(folder, STEPS))
    assert (tmp_path / "router_stats.csv").read_text() == stats


def test_one_step_less_differs(whole):
    """Shows that the comparisons above can fail."""
    folder, wanted, rows, _ = whole
    assert not same(state_of(folder, STEPS - 1), state_of(folder, STEPS))
    assert len({str(batch) for batch in rows}) > 2
    assert len(set(logged(wanted, "loss"))) == STEPS
