"""The baselines of XFT and UpIT: each one's source, and the call that makes it.

Most are settings of `moe_runtime.methods.xft`. EWA (arXiv 2308.06093) is defined here: the MLP
becomes E experts without a router, each of which sees a random part of every batch; after each
optimizer step they move towards their mean, and the final mean is the dense model.

    to_ewa               every MLP becomes E copies of itself
    (tune)               with any trainer and AveragingCallback, or in a loop that calls
                         average_after_steps
    xft.merge            the dense model: the experts' mean

    share of step t = 1 .. T    "constant": share    "linear": share t / T    (XFT, Figure 3)

WeightAverages needs no experts: EMA and SWA (arXiv 1803.05407) of a dense model's weights over one
tuning run.

UpIT's baselines (arXiv 2410.01610, Tables 1 and 2): LoRA on the MLPs, and LoRAMoE from fresh pairs
or copies of one LoRA.

    to_lora              peft's pairs on the MLPs' linear layers
    (tune, save)         an adapter folder
    lora.to_lora_moe     fresh pairs, or experts=[folder] * E
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe_runtime.config import MoEConfig, check_choice, check_positive
from moe_runtime.hf.models.families import family_of, moe_shape
from moe_runtime.methods import xft
from moe_runtime.methods.lora import to_lora_moe
from moe_runtime.methods.lora.baseline import add_mlp_lora as to_lora
from moe_runtime.modules.ewa import average_experts_, check_share
from moe_runtime.modules.moe import Experts

__all__ = [
    "SCHEDULES",
    "Averaging",
    "AveragingCallback",
    "WeightAverages",
    "average_after_steps",
    "to_ewa",
    "to_lora",
    "to_lora_moe",
]
SCHEDULES = ("constant", "linear")


def to_ewa(
    model: nn.Module,
    *,
    num_experts: int = 8,
    layers: Sequence[int] | None = None,
    seed: int = 42,
) -> xft.UpcycleReceipt:
    """Replace the MLPs of a dense transformers model by EWA's experts, in place (arXiv 2308.06093).

    Each token of a batch goes to a random expert, and eval mode runs the mean expert. Averaging
    itself is done by `average_after_steps`, or by AveragingCallback in a trainer.

    Args:
        model: A dense causal language model of a supported architecture.
        num_experts: Number of experts.
        layers: Numbers of the layers; None is all.
        seed: Of the draws.

    Returns:
        The sizes before and after, and the relative error of the logits.

    Raises:
        ValueError: With the model unchanged, as `xft.upcycle` does.
    """
    family = family_of(model)
    config = MoEConfig(
        **moe_shape(family, model.config), num_experts=num_experts, top_k=1, gate="topk_softmax"
    )
    return xft.upcycle_to("ewa", model, family, config, layers=layers, seed=seed, method="ewa")


class Averaging:
    """Handle returned by `average_after_steps`; `step` counts the averaged steps, `remove` stops
    averaging.
    """

    def __init__(
        self,
        stacks: list[nn.Parameter],
        share: float,
        schedule: str,
        total_steps: int | None,
        step: int,
    ):
        self.stacks = stacks
        self.share = share
        self.schedule = schedule
        self.total_steps = total_steps
        self.step = step
        self._hook = None

    def attach(self, optimizer: torch.optim.Optimizer) -> "Averaging":
        """Average after each step of `optimizer` from now on."""
        self._hook = optimizer.register_step_post_hook(self._after_step)
        return self

    def remove(self) -> None:
        """Stop averaging; a second call does nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def share_at(self, step: int) -> float:
        """Return the share of step 1, 2, ...; a linear share stays constant after the last step."""
        if self.schedule == "constant":
            return self.share
        return self.share * min(step / self.total_steps, 1.0)

    def _after_step(self, optimizer, args, kwargs) -> None:
        # on overflow GradScaler skips most optimizers' step; fused ones are called and get this
        # tensor
        overflowed = getattr(optimizer, "found_inf", None)
        if overflowed is not None and overflowed.item():
            return
        self.step += 1
        for stack in self.stacks:
            average_experts_(stack, self.share_at(self.step))


def average_after_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    share: float = 0.3,
    schedule: str = "constant",
    total_steps: int | None = None,
    step: int = 0,
) -> Averaging:
    """Average the trained experts after each optimizer step; the optimizer's state is not averaged.

    Call it after FSDP2 or accelerate have prepared model and optimizer, since they replace
    parameters.

    Args:
        model: A model after `to_ewa`.
        optimizer: Its optimizer.
        share: How far each expert moves towards the mean, 0 to 1.
        schedule: "constant", or "linear" from 0 to `share`.
        total_steps: Number of steps of a linear schedule.
        step: Number of completed steps, when training resumes.

    Returns:
        A handle, whose `remove` stops averaging.

    Raises:
        ValueError: For a model without trainable experts, or an optimizer without their parameters.
    """
    check_schedule(share, schedule)
    if schedule == "linear":
        check_positive("total_steps", total_steps)
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # the one that accelerate's wrapper calls
    stacks = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, p in module.named_parameters(prefix=path):
                if p.requires_grad:
                    stacks[name] = p
    held = set()
    if isinstance(optimizer, torch.optim.Optimizer):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    other = [name for name, stack in stacks.items() if id(stack) not in held]
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no trainable experts. Pass a model from baselines.to_ewa"
        )
    for name, stack in stacks.items():
        # FSDP1 and ZeRO-3 leave a flat shard, or nothing, under the stack's name
        if stack.dim() != (2 if name.endswith("_bias") else 3):
            raise ValueError(
                f"{name} must be a whole stack [E, ...], but is {tuple(stack.shape)}. Train with "
                "FSDP2 (fsdp_version: 2) or DDP instead of FSDP1 and ZeRO-3"
            )
    if other:
        raise ValueError(
            f"{type(optimizer).__name__} does not hold {', '.join(other)}. Pass the optimizer of "
            "this model. DeepSpeed's optimizers hold copies: train with FSDP2 or DDP instead"
        )
    return Averaging(list(stacks.values()), share, schedule, total_steps, step).attach(optimizer)


def check_schedule(share: float, schedule: str) -> None:
    """Raise ValueError unless `share` is from 0 to 1 and `schedule` is one of SCHEDULES."""
    check_share(share)
    check_choice("schedule", schedule, SCHEDULES)


class AveragingCallback(TrainerCallback):
    """`average_after_steps` for Trainer; a resumed run continues with the share of its step.

    Args:
        share: How far each expert moves towards the mean, 0 to 1.
        schedule: "constant", or "linear" from 0 to `share`.
    """

    def __init__(self, share: float = 0.3, schedule: str = "constant"):
        check_schedule(share, schedule)
        self.share = share
        self.schedule = schedule
        self.averaging: Averaging | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin to average."""
        self.on_train_end(args, state, control)
        self.averaging = average_after_steps(
            model,
            optimizer,
            share=self.share,
            schedule=self.schedule,
            total_steps=state.max_steps,
            step=state.global_step,
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Use the trainer's step count, which includes steps skipped by an overflow."""
        if self.averaging is not None:
            self.averaging.step = state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop averaging."""
        if self.averaging is not None:
            self.averaging.remove()
            self.averaging = None


class WeightAverages(TrainerCallback):
    """Averages of the trained weights W_t after steps t = 1 .. T, in float32, as whole models in
    `models`.

    ema    M_1 = W_1, M_t = d M_{t-1} + (1 - d) W_t with d = min(decay, t / (9 + t)), so that early
           weights do not linger
    swa    the mean of W_t over t > start T
    """

    def __init__(self, decay: float = 0.99, start: float = 0.5):
        # factor of the mean of n weights when the next one is added
        self.keeps = {
            "ema": lambda n: ((1 + n) / (10 + n)).clamp(max=decay),
            "swa": lambda n: n / (n + 1),
        }
        self.start = start
        self.models = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy the model for each average."""
        for name, keep in self.keeps.items():

            def averaged(mean, weight, n, keep=keep):
                return torch.lerp(weight.to(mean.dtype), mean, keep(n).to(mean.dtype))

            self.models[name] = AveragedModel(model, avg_fn=averaged).float()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the weights of the step."""
        for name, average in self.models.items():
            if name != "swa" or state.global_step > self.start * state.max_steps:
                average.update_parameters(model)
