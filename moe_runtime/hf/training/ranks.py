"""The processes of one run, started by `accelerate launch`, and model folders that all of them read
and one writes.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moe_runtime.config import check_positive
from moe_runtime.hf.common.loading import load
from moe_runtime.hf.common.sharded import gathered
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.quantize import experts_of
from moe_runtime.hf.models.configuration import write_legacy_rope
from moe_runtime.hf.models.folders import skeleton
from moe_runtime.io import files

if TYPE_CHECKING:
    from accelerate import PartialState


def state() -> "PartialState":
    """Return accelerate's PartialState of this process: its rank, the number of processes, its
    device.
    """
    from accelerate import PartialState

    # the other ranks wait while rank 0 converts a model or waits for another run
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=2))


def agree(value: Any = None) -> Any:
    """Return rank 0's `value` in every process."""
    from accelerate.utils import broadcast_object_list

    values = [value]
    return broadcast_object_list(values)[0] if state().num_processes > 1 else value


@contextlib.contextmanager
def leading() -> Iterator[bool]:
    """Yield whether this is rank 0, which then works alone; all continue when it is done, or raise
    its error.

    Every process must call it, or an error of rank 0 would leave the others waiting.
    """
    outcome = None
    try:
        yield state().is_main_process
    except Exception as error:
        kind = RuntimeError
        if isinstance(error, ValueError | OSError):
            kind = ValueError if isinstance(error, ValueError) else OSError
        agree((kind, str(error) or type(error).__name__))
        raise
    outcome = agree()
    if outcome is not None:
        kind, message = outcome
        raise kind(message)


@contextlib.contextmanager
def sole_training(folder: StrPath, check: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a folder for this run's training on rank 0 (`files.sole_training`); every process must
    call it.

    Rank 0 then calls `check`, as another training may have ended in the folder since the arguments
    were checked.
    """
    with contextlib.ExitStack() as stack:
        with leading() as main:
            if main:
                stack.enter_context(files.sole_training(folder))
                if check is not None:
                    check()
        yield


def gather(values: list) -> list:
    """Return the items of every process, in the order of the ranks."""
    from accelerate.utils import gather_object

    return gather_object(values) if state().num_processes > 1 else values


def largest(value: int) -> int:
    """Return the largest value of all processes. Every process must call this."""
    if state().num_processes == 1:
        return value
    tensor = torch.tensor(value, device=state().device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor)


def engine() -> str:
    """Return accelerate's DistributedType: NO, MULTI_GPU, MULTI_CPU, DEEPSPEED, ...; FSDP means
    FSDP2, FSDP1 the older one.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=state().device.type == "cpu")
    engine = accelerator.distributed_type.value
    if engine == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "FSDP1"
    return engine


def check_ep_size(ep_size: int, source: StrPath | None = None) -> None:
    """Raise ValueError unless `ep_size` divides this run's processes and, by its config, the
    experts of the model `source`.
    """
    check_positive("ep_size", ep_size)
    if ep_size == 1:
        return
    processes = state().num_processes
    reason = None
    if processes % ep_size:
        reason = (
            f"must divide the run's {processes} processes, but got {ep_size}. Pass accelerate "
            "launch --num_processes N"
        )
    elif engine() in ("FSDP", "FSDP1", "DEEPSPEED"):
        reason = (
            f"must be 1 with accelerate's {engine()}, but got {ep_size}. Use DDP, under which "
            "experts can be sharded"
        )
    elif source is not None:
        for layer in experts_of(skeleton(load_config(source))).values():
            count = len(next(layer.parameters(False)))
            if count % ep_size:
                reason = (
                    f"must divide the {count} experts of the layers in {source}, but got {ep_size}"
                )
    if reason is not None:
        raise ValueError(f"ep_size {reason}")


def expert_mesh(ep_size: int) -> DeviceMesh:
    """Return a device mesh of this run's processes for `shard_experts`, with `ep_size` processes
    per copy of the experts.
    """
    from torch.distributed.device_mesh import init_device_mesh

    copies = state().num_processes // ep_size
    shape = (copies, ep_size) if copies > 1 else (ep_size,)
    return init_device_mesh(state().device.type, shape)


def free_memory() -> None:
    """Free unused models, as a Trainer and its callbacks reference each other and the model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_tokenizer(source: StrPath, name: str = "base_model") -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the right, with EOS if it has no padding token, as in the
    official XFT code.
    """
    tokenizer = load(AutoTokenizer, source, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def load_model(
    source: StrPath,
    dtype: str,
    device: torch.device | str | None = None,
    name: str = "base_model",
) -> PreTrainedModel:
    """Load a causal LM in `dtype` ("auto": as saved), to `device` if given; raises ValueError if
    transformers cannot.
    """
    # transformers accepts a dtype's name as well
    model = load(AutoModelForCausalLM, source, name, dtype=dtype)
    return model if device is None else model.to(device)


def load_config(source: StrPath, name: str = "base_model") -> PreTrainedConfig:
    """Load a model's config; raises a ValueError with the `name` of the source if transformers
    cannot.
    """
    return load(AutoConfig, source, name)


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter on the CPU, gathered if it is sharded by FSDP2. Every process must call
    it.
    """
    return gathered(parameter.detach()).cpu()


def save_whole(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: str,
    state_dict: dict | None = None,
) -> None:
    """Write a model in `dtype`, with its tokenizer and both formats of the rotary keys, to an
    existing folder.

    `state_dict` replaces the weights of a sharded model; FSDP2 holds them in float32 under mixed
    precision.
    """
    for name, value in (state_dict or {}).items():
        if value.is_floating_point():
            state_dict[name] = value.to(getattr(torch, dtype))
    model.save_pretrained(folder, state_dict=state_dict)
    tokenizer.save_pretrained(folder)
    write_legacy_rope(folder, dtype=dtype)
