"""Ctrl-C and SIGTERM in a training of transformers' Trainer: the step ends, a checkpoint is written, and it can go on."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import TrainerCallback

from moe_runtime import interruption
from moe_runtime.hf.ranks import state


class StopCallback(TrainerCallback):
    """Ends the training behind the step in which it was asked to stop, with a checkpoint unless it was the last."""

    def __init__(self, stopping: interruption.Stopping):
        self.stopping = stopping

    def on_step_end(self, args, state, control, **kwargs):
        if self.stopping.asked is not None and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


@contextmanager
def stopping_with_a_checkpoint(trainer) -> Iterator[None]:
    """Let `trainer` train in the block; raise the interruption behind it, if there was one.

    That of a training which is done is raised where the next one begins, so that what calls this writes its result first.

    In a run of several processes signals act at once: not all of them would see one in the same step.
    """
    with interruption.after_the_step(waits=state().num_processes == 1) as stopping:
        callback = StopCallback(stopping)
        trainer.add_callback(callback)
        yield
        trainer.remove_callback(callback)
    if stopping.asked is None:
        return
    if trainer.state.global_step < trainer.state.max_steps:
        raise stopping.asked
    interruption.raise_later(stopping.asked)
