"""What tells transformers' Trainer, before the first step, that a model whose rows train apart cannot be saved as it is."""

from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

from moe_runtime.hf.trainable import is_guarded


class NoCheckpoints(TrainerCallback):
    """Refuses a training that would come to save_pretrained."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if args.save_strategy != "no" and is_guarded(model):
            raise ValueError(
                f"save_strategy is {args.save_strategy.value!r}, some experts of {type(model).__name__} train apart; want "
                "'no', or esft.train_only, whose checkpoints are adapters"
            )


def watch_trainers() -> None:
    """Give every Trainer that is made from here on the callback above; a model has no other way to see its Trainer."""
    if NoCheckpoints not in DEFAULT_CALLBACKS:
        DEFAULT_CALLBACKS.append(NoCheckpoints)
