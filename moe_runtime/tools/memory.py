"""Estimate the memory that training a model needs, from its config alone.

The model is built on the meta device, and one training step runs on fake tensors, which have shapes
but no data. All that the step allocates and frees is counted storage by storage: what each layer
saves for its backward pass, the logits, and gradients that appear as activations are freed. The
estimate therefore follows what transformers, PEFT and our ops do, including checkpointing and
autocast. What a fake step cannot show is added: packed weights, optimizer state, our kernels'
scratch memory.

    peak = weights + adapters + optimizer + max(the step at its peak, gradients + the optimizer's
    temporaries)

Assumed: no padding, balanced experts, attention that keeps no matrix of scores (SDPA's flash
kernels), gradients set to None after each optimizer step. Not counted: the CUDA context, the
allocator's fragments, NCCL's buffers.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from moe_runtime.config import SHARED_GATES, check_choice, check_positive
from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.hf.models.folders import skeleton
from moe_runtime.hf.training.ranks import load_config
from moe_runtime.modules.moe import Experts
from moe_runtime.ops._torch_private import TorchDispatchMode, fake_mode, tensors_in
from moe_runtime.ops.expert_rows import GROUP_ELEMENTS
from moe_runtime.ops.library import ARGUMENTS
from moe_runtime.ops.moe_mlp_torch import BLOCK_ELEMENTS
from moe_runtime.ops.packed import FORMATS, bytes_per_weight

OPTIMIZERS = ("adamw", "adamw_torch", "sgd", "adafactor", "8bit")
BITS = {"16": None, "4": "nf4", "8": "int8"} | {name: name for name in FORMATS}


class Step(NamedTuple):
    """What one forward and backward pass allocates, in bytes."""

    saved: int  # at the end of the forward pass
    peak: int  # of everything that the step allocates, including gradients
    gradients: int
    active: int  # the peak without gradients


class Estimate(NamedTuple):
    """Bytes of one process; `peak` is the sum of the others, less `overlap`."""

    experts: int  # weights
    rest: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int  # at the end of the forward pass
    temporary: int  # beyond gradients and activations, at the peak
    overlap: int  # gradients and activations that never exist at the same time
    peak: int
    parameters: int
    trained: int
    active: int  # activations and temporaries at their peak, if gradients are stored elsewhere

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and the optimizer's state."""
        return self.experts + self.rest + self.adapters + self.gradients + self.optimizer


class _Ledger(TorchDispatchMode):
    """Counts the storages that operators allocate until they are freed.

    Those of `known` tensors are not counted.
    """

    def __init__(self, known: Sequence[Tensor], backend: str):
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.scratch = {}
        self.now = 0
        self.peak = 0
        self.gradients = 0
        self.active = 0
        self.backend = backend

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._add(tensor.untyped_storage())
        temporary, lasting = scratch_bytes(func, args, self.backend)
        for name, size in lasting.items():
            self.scratch[name] = max(size, self.scratch.get(name, 0))
        now = self.now + temporary + sum(self.scratch.values())
        self.peak = max(self.peak, now)
        self.active = max(self.active, now - self.gradients)
        return out

    def add_gradient(self, parameter: Tensor) -> None:
        """Count the storage of `parameter.grad` as a gradient, once."""
        self.gradients += nbytes(parameter)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.live:
            self.live[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.now -= self.live.pop(key)


def scratch_bytes(func: Any, args: Sequence, backend: str) -> tuple[int, dict[str, int]]:
    """Return the scratch bytes of one of our ops that run experts, on `backend`.

    Returns:
        The bytes used while it runs, and those that later calls reuse, by name.
    """
    name = func.__name__.partition(".")[0]
    arguments = {}
    if getattr(func, "namespace", "") == "moe_runtime":
        arguments = dict(zip(ARGUMENTS.get(name, ()), args))
    if not {"x", "up", "gated"} <= arguments.keys():
        return 0, {}
    T, H = arguments["x"].shape
    E, Z = arguments["up"].shape[:2]
    weight = arguments.get("topk_weight")
    K = arguments["top_k"] if weight is None else weight.shape[-1]
    I = Z // (1 + arguments["gated"])
    R = T * K
    size = arguments["x"].element_size()
    is_backward = name.endswith("backward")
    if backend == "triton":
        return R * (I + H + Z * is_backward) * size, {}
    # PyTorch multiplies groups of rows; those of a shared expert are not gathered
    shared = T if arguments.get("gate") in SHARED_GATES else 0
    group = min(R - shared, max(math.ceil(R / E), GROUP_ELEMENTS // max(Z, H)))
    widest = max(group, shared)
    lasting = {"y": size * R * H, "x": size * group * H, "h": size * widest * I}
    if not is_backward:
        return 0, lasting
    lasting |= {"dy": size * group * H, "dh": size * widest * I, "dz": size * widest * Z}
    # three to four float32 tensors per block of rows
    return 14 * min(widest * I, BLOCK_ELEMENTS), lasting


def model_of(source: str, dtype: str | None = None) -> nn.Module:
    """Build the model of a folder or Hub id on the meta device, with our experts.

    The dtype is by default the config's.
    """
    return built(load_config(source, "model"), dtype)


def built(config: PreTrainedConfig, dtype: str | None = None) -> nn.Module:
    """Build the model of a config on the meta device, with our experts."""
    if dtype is not None:
        config.dtype = getattr(torch, dtype)
    model = skeleton(config)
    if any(dropin.is_experts(module) for module in model.modules()):
        dropin.patch(model)
    return model.train()


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and add LoRA matrices by PEFT.

    All linear layers and expert stacks get them, except the head and the routers.
    """
    from moe_runtime.io.rows import require
    from moe_runtime.methods.lora import baseline

    with torch.device(next(model.parameters()).device), baseline.quiet_peft():
        if stacks_of(model):
            return baseline.add_lora(model, rank, 2.0)
        peft = require("peft")
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, config)


def _give_shapes(model: nn.Module) -> None:
    """Replace a model's tensors by fake ones on the CPU, in place, under FakeTensorMode."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in fakes:
                    fakes[id(old)] = _fake(old)
                tensors[name] = fakes[id(old)]


def _fake(old: Tensor) -> Tensor:
    """Return an empty tensor like `old` on the CPU, a parameter for a parameter."""
    new = torch.empty_strided(
        old.shape,
        old.stride(),
        dtype=old.dtype,
        device="cpu",
    )
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, old.requires_grad)
    return new


def causal_batch(batch: int, length: int) -> dict[str, Tensor]:
    """Return the inputs of a step on `batch` examples of `length` tokens, without padding."""
    check_positive("batch", batch)
    check_positive("length", length)
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def step_of(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    checkpointing: bool = False,
    bf16: bool = False,
    accumulate: bool = False,
    backend: str = "triton",
    prepare: Callable[[nn.Module], Any] | None = None,
) -> Step:
    """Count one training step of a model on the meta device, which is unusable afterwards.

    `inputs()` returns the batch. `prepare(model)` may shard and freeze the weights, which then have
    shapes. `accumulate` is for micro-batches after the first of an optimizer step, when gradients
    already exist.
    """
    check_choice("backend", backend, ("triton", "torch"))
    if checkpointing:
        checkpoint(model)
    # transformers searches position ids for packed examples, which fake ones cannot answer
    packed = mock.patch(
        "transformers.masking_utils.find_packed_sequence_indices", return_value=None, create=True
    )
    with fake_mode(), packed:
        _give_shapes(model)
        if prepare is not None:
            prepare(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        batch = inputs()
        known = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
        ledger = _Ledger(known, backend)
        with ledger:
            for p in trained:
                if accumulate:
                    p.grad = torch.empty_like(p)
                    ledger.add_gradient(p)
                else:
                    p.register_post_accumulate_grad_hook(ledger.add_gradient)
            before = ledger.now
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            saved = ledger.now - before
            loss.backward()
    return Step(saved, ledger.peak, sum(map(nbytes, trained)), ledger.active)


def checkpoint(model: nn.Module) -> None:
    """Turn on gradient checkpointing, under the name that the installed transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        enable = model.activation_checkpointing_enable
    else:
        enable = model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, whatever device they are on."""
    return tensor.numel() * tensor.element_size()


def optimizer_bytes(parameters: Sequence[Tensor], optimizer: str) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and of its temporaries in a step.

    adamw is torch's fused AdamW, adamw_torch the one that updates all parameters at once (the
    default on GPUs), 8bit is bitsandbytes' AdamW8bit, adafactor is transformers' Adafactor.
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    if optimizer == "sgd":
        return 0, 0
    if optimizer == "8bit":
        return _state_of_8bit(parameters), 0
    if optimizer == "adafactor":
        largest = max((p.numel() for p in parameters), default=0)
        is_wide = all(p.dtype == torch.float32 for p in parameters)
        return _state_of_adafactor(parameters), 4 * largest * (2 if is_wide else 4)
    size = sum(map(nbytes, parameters))
    temporary = size if optimizer == "adamw_torch" else 0
    return 2 * size + 4 * len(parameters), temporary


def _state_of_8bit(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of AdamW8bit's state; small parameters stay in float32."""
    state = 0
    maps = 0
    for p in parameters:
        n = p.numel()
        if n < 4096:
            state += 8 * n
        else:
            state += 2 * n + 8 * math.ceil(n / 256)
            maps = 2048  # two of 256 values, which all parameters share
    return state + maps


def _state_of_adafactor(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of Adafactor's state: rows and columns of matrices, all of vectors."""
    state = 0
    for p in parameters:
        n = p.numel()
        if p.dim() > 1:
            n = math.prod(p.shape[:-1]) + n // max(p.shape[-2], 1)
        state += 4 * n + 4
    return state


def estimate(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    optimizer: str = "adamw",
    packed: str | None = None,
    **how: Any,
) -> Estimate:
    """Return the memory in bytes for training a model on the meta device, unusable afterwards.

    `inputs` and `how` are those of `step_of`. `packed` is the format in which frozen stacks are
    stored; in the step they count unpacked, as what an op saves does not depend on it.
    """
    step = step_of(model, inputs, **how)
    names = dict(model.named_parameters())
    trained = [p for p in names.values() if p.requires_grad]
    adapters = sum(nbytes(p) for name, p in names.items() if "lora_" in name)
    stacks = stacks_of(model)
    experts = plain = sum(map(nbytes, stacks))
    rest = sum(map(nbytes, {*names.values(), *model.buffers()})) - adapters - plain
    if packed is not None:
        experts = 0
        for p in stacks:
            if p.dim() == 3 and not p.requires_grad:
                experts += round(p.numel() * bytes_per_weight(packed))
            else:
                experts += nbytes(p)
    state, temporary = optimizer_bytes(trained, optimizer)
    activations = step.saved
    top = max(step.peak, step.gradients + temporary)
    return Estimate(
        experts=experts,
        rest=rest,
        adapters=adapters,
        gradients=step.gradients,
        optimizer=state,
        activations=activations,
        temporary=max(0, top - step.gradients - activations),
        overlap=max(0, step.gradients + activations - top),
        peak=experts + rest + adapters + state + top,
        parameters=sum(p.numel() for p in names.values()),
        trained=sum(p.numel() for p in trained),
        active=step.active,
    )


def stacks_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model's experts, also through wrappers."""
    stacks = {}
    for module in model.modules():
        if not (dropin.is_experts(module) or isinstance(module, Experts)):
            continue
        for name, p in module.named_parameters():
            if "lora_" not in name:
                stacks[id(p)] = p
    return list(stacks.values())


def load(
    source: str, *, lora: int | None = None, bits: str = "16", dtype: str | None = None
) -> nn.Module:
    """Build the model of a folder or Hub id on the meta device.

    All of it trains, or LoRA matrices of rank `lora`. `bits` is the format of the frozen stacks of
    experts: 16, 8 (int8), 4 (nf4), or a format's name. Raises ValueError if nothing can be packed:
    without lora, as packed stacks cannot be trained, or without experts.
    """
    check_choice("bits", bits, tuple(BITS))
    if lora is not None:
        check_positive("lora", lora)
    model = model_of(source, dtype)
    if BITS[bits] and lora is None:
        raise ValueError(
            f"bits must be 16, as all weights train, but got {bits}. Pass --lora, or --bits 16"
        )
    if BITS[bits] and not stacks_of(model):
        raise ValueError(
            f"bits must be 16, as {source} has no stacks of experts to pack, but got {bits}. Pass "
            "--bits 16"
        )
    return model if lora is None else add_lora(model, lora)


def table(estimated: Estimate) -> list[tuple[str, int]]:
    """Return the printed lines as (name, bytes)."""
    lines = [
        ("weights, experts", estimated.experts),
        ("weights, rest", estimated.rest),
        ("adapters", estimated.adapters),
        ("gradients", estimated.gradients),
        ("optimizer", estimated.optimizer),
        ("activations", estimated.activations),
        ("temporary", estimated.temporary),
        ("not at the same time", -estimated.overlap),
    ]
    return [line for line in lines if line[1]] + [("peak", estimated.peak)]


def as_text(rows: Mapping[str, int] | Sequence[tuple[str, int]]) -> str:
    """Return lines of name and GiB."""
    return "\n".join(f"{name:24s}{size / 2**30:12.3f} GiB" for name, size in dict(rows).items())
