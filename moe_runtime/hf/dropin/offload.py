"""Offload models with packed experts to the CPU or a disk by accelerate (cpu_offload, disk_offload,
dispatch_model).

accelerate moves a module's parameters to the execution device for each call, from a map that it
builds from the state_dict. There packed stacks have the names and shapes of the formats' libraries.
`install` gives its hooks of experts modules a map with the stacks as the module holds them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from moe_runtime.hf.common.replacing import replace_once
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.modules import packed

# from_pretrained's names of a device_map
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
# those of from_pretrained that `dispatch` has
SETTINGS = ("device_map", "max_memory", "offload_folder", "offload_buffers")


class _Stacks(Mapping):
    """A module's tensors by name from accelerate's map, packed stacks as the module holds them."""

    def __init__(self, saved: Mapping, module: nn.Module):
        self.saved, self.layouts = saved, packed.layouts(module)
        self.shapes = {name: module._parameters[name].shape for name in self.layouts}
        # the scales are few, and some are not in a state_dict
        names = [
            name
            for name in module._buffers
            if any(name.startswith(f"{stack}_packed") for stack in self.layouts)
        ]
        self.scales = {name: module._buffers[name].to("cpu") for name in names}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer of the module."""
        if name in self.scales:
            return self.scales[name]
        if name not in self.layouts:
            return self.saved[name]
        return packed.bytes_of_saved(self.saved, name, self.layouts[name].format, self.shapes[name])

    def __iter__(self):
        return iter([*self.saved, *self.scales])

    def __len__(self) -> int:
        return len(self.saved) + len(self.scales)


def install() -> None:
    """Make accelerate's hooks offload packed stacks, if accelerate is installed; calling it again
    has no effect.
    """
    try:
        from accelerate.hooks import AlignDevicesHook
    except ImportError:
        return
    replace_once(AlignDevicesHook, "init_hook", _init_hook)


def _init_hook(stock: Callable, hook, module: nn.Module) -> nn.Module:
    if hook.offload and hook.weights_map is not None and packed.layouts(module):
        hook.weights_map = _Stacks(hook.weights_map, module)
    return stock(hook, module)


def is_several(device_map: Any) -> bool:
    """Return whether a device_map of from_pretrained may split a model over devices, or
    offload it.
    """
    if isinstance(device_map, str):
        return device_map in PLANS
    return isinstance(device_map, Mapping) and (
        len(set(device_map.values())) > 1 or "disk" in device_map.values()
    )


def dispatch(
    model: nn.Module,
    device_map: Any,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: StrPath | None = None,
    offload_buffers: bool = False,
) -> nn.Module:
    """Place a whole model on devices, the CPU and a disk, as from_pretrained does with these
    settings; returns the model.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if isinstance(device_map, str):
        whole = list(model._no_split_modules or ())
        memory = max_memory
        if device_map != "sequential":
            low = device_map == "balanced_low_0"
            memory = get_balanced_memory(model, memory, no_split_module_classes=whole, low_zero=low)
        device_map = infer_auto_device_map(model, memory, no_split_module_classes=whole)
    return dispatch_model(
        model, dict(device_map), offload_dir=offload_folder, offload_buffers=offload_buffers
    )
