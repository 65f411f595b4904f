"""Ctrl-C and SIGTERM in a training of transformers' Trainer: the step ends, a checkpoint is written, and it can go on.

The processes of a run agree behind each step: a signal that reaches one of them, or all in different steps, ends all in the
same step.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import TrainerCallback

from moe_runtime import interruption
from moe_runtime.hf import ranks


class StopCallback(TrainerCallback):
    """Ends the training behind the step in which it was asked to stop, with a checkpoint unless it was the last."""

    def __init__(self, stopping: interruption.Stopping):
        self.stopping = stopping
        self.agreed: KeyboardInterrupt | None = None
        self.saved: int | None = None  # the step of the newest checkpoint

    def agree(self) -> None:
        """Take what a process was asked for all of them; every process must call."""
        asked = self.stopping.asked
        # one number more per step, where the loss is read on the host anyway
        code = ranks.largest(interruption.code_of(asked) if asked is not None else 0)
        if code and self.agreed is None:
            self.agreed = interruption.of(code)

    def on_step_end(self, args, state, control, **kwargs):
        self.agree()
        if self._stops(state):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # who stops a run waits for nothing, and with "best" it says what is saved

    def on_save(self, args, state, control, **kwargs):
        self.saved = state.global_step

    def on_epoch_end(self, args, state, control, **kwargs):
        """Take back what transformers asks for at an epoch's end, which a stop in its middle is for it."""
        if self._stops(state):
            control.should_evaluate, control.should_save = False, self.saved != state.global_step

    def _stops(self, state) -> bool:
        return self.agreed is not None and state.global_step < state.max_steps


@contextmanager
def stopping_with_a_checkpoint(trainer) -> Iterator[None]:
    """Let `trainer` train in the block; raise the interruption behind it, if there was one.

    That of a training which is done is raised where the next one begins, so that what calls this writes its result first.
    """
    with interruption.after_the_step() as stopping:
        callback = StopCallback(stopping)
        trainer.add_callback(callback)
        yield
        trainer.remove_callback(callback)
        callback.agree()  # what came behind the last step
    if callback.agreed is None:
        if stopping.asked is not None:  # since then, and in this process alone: at once, as between trainings
            raise stopping.asked
        return
    if trainer.state.global_step < trainer.state.max_steps:
        raise callback.agreed
    interruption.raise_later(callback.agreed)


def hold_workers(loader):
    """Let a data loader's workers outlive a signal to the whole group, so that the step ends; return the loader."""
    inner = getattr(loader, "base_dataloader", loader)  # of accelerate's
    begin = getattr(inner, "worker_init_fn", None)
    if getattr(inner, "num_workers", 0) and getattr(begin, "func", None) is not _begin_worker:
        inner.worker_init_fn = functools.partial(_begin_worker, begin)
    return loader


def _begin_worker(begin: Callable[[int], None] | None, number: int) -> None:
    interruption.hold()
    if begin is not None:
        begin(number)
