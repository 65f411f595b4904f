"""methods/xft/baselines.py: experts are averaged after each step, in a loop, in Trainer, when
resumed, and sharded over ranks.
"""

import copy

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from moe_runtime.hf.models.modeling import moe_layers
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods.xft import baselines
from moe_runtime.methods.xft.baselines import Averaging, AveragingCallback, average_after_steps
from moe_runtime.modules.ewa import average_experts_
from tests.hf import tiny
from tests.support import dist_averaging
from tests.support.checkpoints import assert_equal
from tests.support.dist_launch import launch

SHARE = 0.3


def ewa():
    """A tiny EWA model with distinct experts."""
    model = tiny.dense("llama")
    baselines.to_ewa(model, num_experts=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in moe_layers(model).values():
            for p in module.experts.parameters():
                p.add_(torch.randn(p.shape, generator=generator) / 8)
    return model.train()


def stacks(model) -> list[torch.Tensor]:
    return [p for module in moe_layers(model).values() for p in module.experts.parameters()]


def step(model, optimizer) -> None:
    ids = tiny.batch()
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_each_step_is_the_optimizers_and_then_one_of_averaging():
    model = ewa()
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
    averaging = average_after_steps(model, optimizer, share=SHARE)
    for number in (1, 2):
        torch.manual_seed(number)
        step(model, optimizer)
        torch.manual_seed(number)
        step(other, plain)
        for stack in stacks(other):
            average_experts_(stack, SHARE)
        assert averaging.step == number
    assert_equal(model.state_dict(), other.state_dict())
    for p, q in zip(
        model.parameters(),
        other.parameters(),
        strict=True,
    ):
        assert torch.equal(
            optimizer.state[p]["exp_avg"],
            plain.state[q]["exp_avg"],
        )
    averaging.remove()
    averaging.remove()
    step(model, optimizer)
    assert averaging.step == 2


def test_a_linear_share_rises_to_the_end_and_stays():
    averaging = Averaging([], 0.4, "linear", 8, 0)
    assert [averaging.share_at(t) for t in (1, 4, 8, 9)] == pytest.approx([0.05, 0.2, 0.4, 0.4])
    assert Averaging([], 0.4, "constant", None, 0).share_at(1) == 0.4


def test_an_overflowed_step_is_skipped():
    model = ewa()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.0,
        weight_decay=0.0,
    )
    averaging = average_after_steps(model, optimizer, share=SHARE)
    before = [stack.clone() for stack in stacks(model)]
    for overflowed, steps in ((1, 0), (0, 1)):
        # GradScaler's flag for a fused optimizer
        optimizer.found_inf = torch.tensor([float(overflowed)])
        averaging._after_step(optimizer, (), {})
        assert averaging.step == steps
        for stack, old in zip(stacks(model), before, strict=True):
            assert torch.equal(stack, old) == bool(overflowed)


ROWS = datasets.Dataset.from_list(
    [{"input_ids": row, "labels": row} for row in tiny.batch(12, 10).tolist()]
)
STEPS = 6


class Stop(TrainerCallback):
    """Ends a run after its second step, as a kill would."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2
        control.should_save = control.should_training_stop


def train(model, folder, callbacks, resume=None, **settings):
    """Train, and return the share of each step."""
    callback = AveragingCallback(share=0.6, schedule="linear")
    shares = {}
    original = Averaging.share_at

    def recorded(self, at):
        shares[at] = original(self, at)
        return shares[at]

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **settings,
    )
    callbacks = [callback, *callbacks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averaging, "share_at", recorded)
        trainer = MoETrainer(
            model=model,
            args=arguments,
            train_dataset=ROWS,
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=resume)
    assert callback.averaging is None
    return shares


def test_a_resumed_run_is_the_whole_run_bit_by_bit(tmp_path):
    settings = {"gradient_checkpointing": True}
    whole = ewa()
    shares = train(whole, tmp_path / "whole", [], **settings)
    assert shares == pytest.approx({t: 0.1 * t for t in range(1, STEPS + 1)})
    first = train(
        ewa(),
        tmp_path / "part",
        [Stop()],
        **settings,
    )
    resumed = ewa()
    rest = train(
        resumed,
        tmp_path / "part",
        [],
        resume=True,
        **settings,
    )
    assert [*first, *rest] == list(shares)
    assert first | rest == shares
    assert_equal(resumed.state_dict(), whole.state_dict())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "checkpoint-2")
    assert saved.config.moe_runtime["stage"] == "ewa"
    assert not torch.equal(
        stacks(saved)[0],
        stacks(whole)[0],
    )


@pytest.mark.slow
def test_fsdp2_is_one_process(tmp_path):
    launch(
        dist_averaging.__file__,
        2,
        tmp_path,
        str(tmp_path),
    )
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = dist_averaging.make()
    dist_averaging.train(alone, tiny.batch())
    assert ranks[0]["kinds"] == {"DTensor"}
    for name, expected in alone.named_parameters():
        assert torch.equal(
            ranks[0]["weights"][name],
            ranks[1]["weights"][name],
        )
        assert (
            tiny.distance(
                ranks[0]["weights"][name],
                expected,
            )
            < 1e-5
        ), name
    weight = torch.randn(
        5,
        4,
        6,
        generator=torch.Generator().manual_seed(3),
    )
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        expected = average_experts_(weight.to(dtype, copy=True), SHARE)
        for name in ("experts", "columns", "copies"):
            assert (
                tiny.distance(
                    ranks[0]["stacks"][f"{name} {dtype}"],
                    expected,
                )
                < bound
            ), (name, dtype)
    assert "placements" in ranks[0]["stacks"]["error"]
