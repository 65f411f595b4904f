"""Adafactor under FSDP2.

transformers makes the averages of rows and columns as plain tensors, which do not go with weights that are split. Here they
are made before its first step, split as the weights are; the step is transformers' own.
"""

import torch
from transformers import Adafactor, TrainerCallback


class SplitAdafactor(TrainerCallback):
    """Fills the state of a Trainer's Adafactor for weights that FSDP2 has split; does nothing otherwise."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        """Have the state filled before each step, for the weights that have none."""
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate's wrapper
        if isinstance(optimizer, Adafactor):
            optimizer.register_step_pre_hook(fill_state)


@torch.no_grad()
def fill_state(optimizer: Adafactor, args=None, kwargs=None) -> None:
    """Give every split matrix that has a gradient and no state the averages that Adafactor starts from: zeros."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None or not hasattr(p, "full_tensor") or p.dim() < 2 or optimizer.state[p]:
                continue
            zeros = torch.zeros_like(p.grad, dtype=torch.float32)
            state = {"step": 0, "RMS": 0}
            if group["beta1"] is not None:
                state["exp_avg"] = zeros.clone()
            for name, dim in (("exp_avg_sq_row", -1), ("exp_avg_sq_col", -2)):
                state[name] = _settled(zeros.mean(dim))
            optimizer.state[p].update(state)


def _settled(tensor):
    """Return a DTensor without placements that are partial sums; those become whole on every rank."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)
