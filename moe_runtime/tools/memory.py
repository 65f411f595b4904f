"""Estimate the memory that training a model needs from its config, without reading weights or
computing anything.

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

import contextlib
import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_runtime.config import SHARED_GATES, check_choice, check_positive
from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.hf.models.folders import skeleton
from moe_runtime.hf.training.ranks import load_config
from moe_runtime.modules.moe import Experts
from moe_runtime.ops import moe_mlp_cpp
from moe_runtime.ops._torch_private import TorchDispatchMode, fake_mode, tensors_in
from moe_runtime.ops.expert_rows import GROUP_ELEMENTS
from moe_runtime.ops.library import ARGUMENTS
from moe_runtime.ops.moe_mlp_torch import BLOCK_ELEMENTS
from moe_runtime.ops.packed import FORMATS, bytes_per_weight

OPTIMIZERS = ("adamw", "adamw_torch", "sgd", "adafactor", "8bit")
BITS = {"16": None, "4": "nf4", "8": "int8"} | {name: name for name in FORMATS}
# part of a class name -> kind of its activations; the innermost module with a match decides
KINDS = {
    "Attention": "attention",
    "Rotary": "attention",
    "Norm": "norms",
    "Experts": "experts",
    "MoeBlock": "experts",
    "MoE": "experts",
    "Router": "experts",
    "MLP": "dense MLPs",
    "Mlp": "dense MLPs",
}
LOGITS = "logits and loss"
OTHER = "residual stream"


class Step(NamedTuple):
    """What one forward and backward pass allocates, in bytes."""

    kept: dict[str, int]  # at the end of the forward pass, by the kind of module that allocated it
    peak: int  # of everything that the step allocates, including gradients
    gradients: int
    active: int  # the peak without gradients


class Estimate(NamedTuple):
    """Bytes of one process; `peak` is the sum of all but `kept`, less `overlap`."""

    experts: int  # weights
    rest: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int  # at the end of the forward pass
    temporary: int  # beyond gradients and activations, at the peak
    overlap: int  # gradients and activations that never exist at the same time
    peak: int
    kept: dict[str, int]  # the activations, by kind
    parameters: int
    trained: int
    active: int  # activations and temporaries at their peak, if gradients are stored elsewhere

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and the optimizer's state."""
        return self.experts + self.rest + self.adapters + self.gradients + self.optimizer


class _Ledger(TorchDispatchMode):
    """Count the storages that operators allocate, by kind, until they are freed, except those of
    `known` tensors.
    """

    def __init__(self, known: Sequence[torch.Tensor], backend: str, head: nn.Module | None):
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata: (0, "") for tensor in known}
        self.by_kind = {}
        self.scratch = {}
        self.now = 0
        self.peak = 0
        self.gradients = 0
        self.active = 0
        self.backend = backend
        self.head = head
        self.kinds = [OTHER]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._add(tensor.untyped_storage())
        own, lasting = scratch_bytes(func, args, self.backend)
        self.scratch |= {
            name: max(size, self.scratch.get(name, 0)) for name, size in lasting.items()
        }
        now = self.now + own + sum(self.scratch.values())
        self.peak, self.active = max(self.peak, now), max(self.active, now - self.gradients)
        return out

    def own(self, parameter: torch.Tensor) -> None:
        """Count the storage of `parameter.grad` as a gradient, once."""
        self.gradients += nbytes(parameter)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.live:
            self.live[storage._cdata] = storage.nbytes(), self.kinds[-1]
            self._count(self.live[storage._cdata], 1)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self._count(self.live.pop(key), -1)

    def _count(self, entry: tuple[int, str], sign: int) -> None:
        self.now += sign * entry[0]
        self.by_kind[entry[1]] = self.by_kind.get(entry[1], 0) + sign * entry[0]

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Attribute each storage to the kind of the running module, without hooks, which would
        change what our layers run.
        """
        original = nn.Module.__call__

        def call(module, *args, **kwargs):
            name = type(module).__name__
            if module is self.head:
                kind = LOGITS
            else:
                kind = next((kind for part, kind in KINDS.items() if part in name), None)
            self.kinds.append(kind or self.kinds[-1])
            try:
                return original(module, *args, **kwargs)
            finally:
                self.kinds.pop()
                if isinstance(module, PreTrainedModel):
                    self.kinds[-1] = LOGITS  # what a causal LM computes after its body

        with mock.patch.object(nn.Module, "__call__", call):
            yield


def scratch_bytes(func, args: Sequence, backend: str) -> tuple[int, dict[str, int]]:
    """Return the scratch bytes of one of our ops on `backend`: used while it runs, and by name,
    reused by later calls.
    """
    name = ""
    if getattr(func, "namespace", "") == "moe_runtime":
        name = func.__name__.partition(".")[0]
    given = dict(zip(ARGUMENTS.get(name, ()), args))
    if not {"x", "up", "gated"} <= given.keys():
        return 0, {}
    x, (E, Z), weight = given["x"], given["up"].shape[:2], given.get("topk_weight")
    (T, H), K, I = (
        x.shape,
        given["top_k"] if weight is None else weight.shape[-1],
        Z // (1 + given["gated"]),
    )
    R = T * K
    is_backward = name.endswith("backward")
    if backend == "triton":
        return R * x.element_size() * (Z + I + H if is_backward else I + H), {}
    # rows of the shared expert, which are not gathered
    alone = T if given.get("gate") in SHARED_GATES else 0
    one_call = {}
    if backend == "cpp" and given.get("up_trained") is None:
        # the largest expert, which decides, has at least `alone` or the average, and at most T rows
        few = moe_mlp_cpp.few_rows(x.dtype)
        if few >= max(alone, -(-R // E)):
            one_call = _one_call_scratch(given, name, (T, H, I, E, K))
        if one_call and few >= T:
            return 0, one_call
    group = min(R - alone, max(math.ceil(R / E), GROUP_ELEMENTS // max(Z, H)))
    widest = max(group, alone)
    s = x.element_size()
    # the torch backend holds three to four float32 tensors per block of rows
    block = 14 * min(widest * I, BLOCK_ELEMENTS) * (is_backward and backend == "torch")
    matmuls = {"y": s * R * H, "x": s * group * H, "h": s * widest * I}
    if is_backward:
        matmuls |= {"dy": s * group * H, "dh": s * widest * I, "dz": s * widest * Z}
    return block, one_call | matmuls


def _one_call_scratch(
    given: Mapping[str, Any], name: str, sizes: tuple[int, int, int, int, int]
) -> dict[str, int]:
    """Return the scratch bytes of an op that the CPU library computes in one call; empty if it does
    not.
    """
    T, H, I, E, K = sizes
    dtype = given["x"].dtype
    if name in ("moe_mlp", "moe_layer"):
        return {"one call": moe_mlp_cpp.one_call_bytes(dtype, T, H, I, E, K)}
    has_bias = given.get("up_bias") is not None or given.get("down_bias") is not None
    if name not in ("moe_mlp_backward", "moe_layer_backward") or has_bias:
        return {}
    # not a tensor, as all tensors are fake here
    rows = (ctypes.c_int32 * (E + 1))(*[T * K * e // E for e in range(E + 1)])
    recompute = given["z"].shape[0] == 0
    form = int(given["gated"])
    return {
        "one call": moe_mlp_cpp.one_call_back_bytes(
            dtype, form, ctypes.addressof(rows), T, H, I, E, K, recompute
        )
    }


def model_of(source: str, dtype: str | None = None) -> nn.Module:
    """Build the model of a folder or Hub id on the meta device, by default in its config's dtype,
    with our experts.
    """
    return built(load_config(source, "model"), dtype)


def built(config, dtype: str | None = None) -> nn.Module:
    """Build the model of a config on the meta device, with our experts."""
    if dtype is not None:
        config.dtype = getattr(torch, dtype)
    model = skeleton(config)
    if any(dropin.is_experts(module) for module in model.modules()):
        dropin.patch(model)
    return model.train()


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and add LoRA matrices by PEFT to all linear layers and expert stacks except
    the head and routers.
    """
    from moe_runtime.io.rows import require
    from moe_runtime.methods.lora import baseline

    with torch.device(next(model.parameters()).device), baseline.quiet_peft():
        if stacks_of(model):
            return baseline.add_lora(model, rank, 2.0)
        peft = require("peft")
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(model, config)


def _give_shapes(model: nn.Module) -> None:
    """Replace a model's tensors by fake ones on the CPU, in place; must be called under
    `fake_mode`.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty_strided(
                        old.shape, old.stride(), dtype=old.dtype, device="cpu"
                    )
                    if isinstance(old, nn.Parameter):
                        made[id(old)] = nn.Parameter(new, old.requires_grad)
                    else:
                        made[id(old)] = new
                tensors[name] = made[id(old)]


def causal_batch(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a step on `batch` examples of `length` tokens, without padding."""
    check_positive("batch", batch)
    check_positive("length", length)
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def step_of(
    model: nn.Module,
    inputs,
    *,
    checkpointing: bool = False,
    bf16: bool = False,
    accumulate: bool = False,
    backend: str = "triton",
    prepare: Callable[[nn.Module], Any] | None = None,
) -> Step:
    """Count one training step of a model on the meta device, which is unusable afterwards;
    `inputs()` returns the batch.

    `prepare(model)` may shard and freeze the weights, which then have shapes. `accumulate` is for
    micro-batches after the first of an optimizer step, when gradients already exist.
    """
    check_choice("backend", backend, ("triton", "torch", "cpp"))
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
        ledger = _Ledger(
            known,
            backend,
            model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None,
        )
        with ledger:
            for p in trained:
                if accumulate:
                    p.grad = torch.empty_like(p)
                    ledger.own(p)
                else:
                    p.register_post_accumulate_grad_hook(ledger.own)
            before = ledger.now
            with ledger.naming(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            kept = dict(ledger.by_kind)
            kept[OTHER] = kept.get(OTHER, 0) - before
            loss.backward()
    return Step(
        {kind: size for kind, size in kept.items() if size},
        ledger.peak,
        sum(map(nbytes, trained)),
        ledger.active,
    )


def checkpoint(model: nn.Module) -> None:
    """Turn on gradient checkpointing, under the name that the installed transformers has for it."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, whatever device they are on."""
    return tensor.numel() * tensor.element_size()


def optimizer_bytes(parameters: Sequence[torch.Tensor], optimizer: str) -> tuple[int, int]:
    """Return the bytes of the optimizer state for these parameters, and of its temporaries in a
    step.

    adamw is torch's fused AdamW, adamw_torch the one that updates all parameters at once (the
    default on GPUs), 8bit is bitsandbytes' AdamW8bit, adafactor is transformers' Adafactor.
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    largest = max((p.numel() for p in parameters), default=0)
    if optimizer.startswith("adamw"):
        return sum(2 * nbytes(p) + 4 for p in parameters), sum(map(nbytes, parameters)) * (
            optimizer == "adamw_torch"
        )
    if optimizer == "sgd":
        return 0, 0
    if optimizer == "8bit":  # small parameters stay in float32; two shared maps of 256 values
        sizes = [
            8 * n if (n := p.numel()) < 4096 else 2 * n + 8 * math.ceil(n / 256) for p in parameters
        ]
        return sum(sizes) + 2048 * any(p.numel() >= 4096 for p in parameters), 0
    rows = [
        math.prod(p.shape[:-1]) + p.numel() // max(p.shape[-2], 1) if p.dim() > 1 else p.numel()
        for p in parameters
    ]
    wide = all(p.dtype == torch.float32 for p in parameters)
    return sum(4 * n + 4 for n in rows), 4 * largest * (2 if wide else 4)


def estimate(
    model: nn.Module, inputs, *, optimizer: str = "adamw", packed: str | None = None, **how: Any
) -> Estimate:
    """Return the memory in bytes for training a model on the meta device, which is unusable
    afterwards.

    `inputs` and `how` are those of `step_of`. `packed` is the format in which frozen stacks are
    stored; in the step they count unpacked, as what an op saves does not depend on it.
    """
    step = step_of(model, inputs, **how)
    stacks = stacks_of(model)
    names = dict(model.named_parameters())
    trained = [p for p in names.values() if p.requires_grad]
    adapters = sum(nbytes(p) for name, p in names.items() if "lora_" in name)
    plain = sum(map(nbytes, stacks))
    rest = sum(map(nbytes, {*names.values(), *model.buffers()})) - adapters - plain
    if packed is None:
        experts = plain
    else:
        experts = sum(
            round(p.numel() * bytes_per_weight(packed))
            if p.dim() == 3 and not p.requires_grad
            else nbytes(p)
            for p in stacks
        )
    state, temporary = optimizer_bytes(trained, optimizer)
    kept = sum(step.kept.values())
    top = max(step.peak, step.gradients + temporary)
    return Estimate(
        experts=experts,
        rest=rest,
        adapters=adapters,
        gradients=step.gradients,
        optimizer=state,
        activations=kept,
        temporary=max(0, top - step.gradients - kept),
        overlap=max(0, step.gradients + kept - top),
        peak=experts + rest + adapters + state + top,
        kept=step.kept,
        parameters=sum(p.numel() for p in names.values()),
        trained=sum(p.numel() for p in trained),
        active=step.active,
    )


def stacks_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model's experts, also through wrappers."""
    found = [m for m in model.modules() if dropin.is_experts(m) or isinstance(m, Experts)]
    return list(
        {
            id(p): p for m in found for name, p in m.named_parameters() if "lora_" not in name
        }.values()
    )


def load(
    source: str, *, lora: int | None = None, bits: str = "16", dtype: str | None = None
) -> nn.Module:
    """Build the model of a folder or Hub id on the meta device; all of it trains, or LoRA matrices
    of rank `lora`.

    `bits` is the format of the frozen stacks of experts: 16, 8 (int8), 4 (nf4), or a format's name.
    Raises ValueError if nothing can be packed: without lora, as packed stacks cannot be trained, or
    without experts.
    """
    check_choice("bits", bits, tuple(BITS))
    if lora is not None:
        check_positive("lora", lora)
    model = model_of(source, dtype)
    if BITS[bits] and (lora is None or not stacks_of(model)):
        if lora is None:
            why = "as all weights train"
        else:
            why = f"as {source} has no stacks of experts to pack"
        raise ValueError(
            f"bits must be 16, {why}, but got {bits}. Pass {'--lora, or ' * (lora is None)}--bits "
            "16"
        )
    return model if lora is None else add_lora(model, lora)


def table(found: Estimate) -> list[tuple[str, int]]:
    """Return the printed lines as (name, bytes); those of activations by kind are indented."""
    lines = [
        ("weights, experts", found.experts),
        ("weights, rest", found.rest),
        ("adapters", found.adapters),
    ]
    lines += [
        ("gradients", found.gradients),
        ("optimizer", found.optimizer),
        ("activations", found.activations),
    ]
    lines += [
        (f"  {kind}", size) for kind, size in sorted(found.kept.items(), key=lambda item: -item[1])
    ]
    lines += [("temporary", found.temporary), ("not at the same time", -found.overlap)]
    return [line for line in lines if line[1]] + [("peak", found.peak)]


def as_text(rows: Mapping[str, int] | Sequence[tuple[str, int]]) -> str:
    """Return lines of name and GiB."""
    return "\n".join(f"{name:24s}{size / 2**30:12.3f} GiB" for name, size in dict(rows).items())
