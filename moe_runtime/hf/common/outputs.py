"""What our model classes and the drop-in share: the gradient of an auxiliary loss and its share of
a batch, and exports to formats without our ops.
"""

import contextlib
import functools

import torch
from torch import Tensor, nn


def check_gradients(parameters: list[nn.Parameter], router_logits: list[Tensor]) -> None:
    """Raise ValueError if routers with these `parameters` train but use_reentrant=True detached
    their logits.
    """
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    if trains and router_logits and not any(logits.requires_grad for logits in router_logits):
        raise ValueError(
            "use_reentrant=True in gradient checkpointing would lose the gradient of a balance "
            "loss or router_aux_loss_coef. Pass gradient_checkpointing_kwargs={'use_reentrant': "
            "False}"
        )


def share_of_batch(kwargs: dict, device: torch.device | str | None) -> Tensor | float:
    """Return this call's share of the step's tokens; 1 unless Trainer passes num_items_in_batch.

    The base's loss is then a sum over num_items_in_batch; without this factor, gradient
    accumulation over n calls would count an auxiliary loss n times.
    """
    items = kwargs.get("num_items_in_batch")
    if items is None:
        return 1.0
    labels = kwargs.get("shift_labels")
    if labels is None:
        labels = kwargs["labels"][..., 1:]
    if isinstance(items, Tensor):
        items = items.to(device)
    return labels.ne(-100).sum().to(device) / items


@functools.cache
def make_exports_portable() -> None:
    """Make transformers' exporters to formats without our ops set `backends.foreign_experts` while
    they trace.
    """
    exported = {"onnx": "grouped_mm", "executorch": "batched_mm", "openvino": "batched_mm"}
    with contextlib.suppress(ImportError):  # a transformers without exporters
        from transformers.exporters.utils import register_patch

        for target, experts in exported.items():
            register = register_patch(target, "moe_runtime.backends.foreign_experts")
            register(lambda _, experts=experts: experts)
