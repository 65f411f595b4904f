"""Compile the kernels that a model will launch before its first step: `moe_runtime.warmup`.

Triton compiles a kernel at its first launch with arguments of new types or constants, about a
second each. Here each layer of the model runs on tensors of the meta device, which have no memory;
its launches only compile, in parallel threads, into Triton's cache, where the launches of the real
model find them.
"""

import contextlib
import copy
import functools
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime import backends
from moe_runtime.ops._torch_private import TorchDispatchMode
from moe_runtime.ops.library import KERNELS

# fields of configs
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


class Warmup(NamedTuple):
    """The variants of kernels that a model needs, and what became of them."""

    variants: int
    compiled: int
    cached: int  # of an earlier call or run
    failed: tuple[str, ...]  # one line for each


def warmup(
    model: nn.Module,
    tokens: int | Iterable[int] = (1, 4096),
    *,
    backward: bool = False,
    arch: int | None = None,
    threads: int | None = None,
) -> Warmup:
    """Compile what the MoE layers of `model` will launch, in parallel, without launching anything.

    Args:
        model: A model whose layers run on moe_runtime (`moe_runtime.patch`, or one of ours), in the
            dtype that it will run in.
        tokens: Numbers of tokens of a forward pass; launch configs depend on them.
        backward: Whether to compile for training too, for the parameters that require a gradient.
        arch: 10 * major + minor of the compute capability to compile for, such as 90; by default
            this machine's GPU.
        threads: How many compile at a time; by default one for each core.

    Returns:
        What was compiled; all zeros, after a printed line, without a GPU that runs the kernels.

    Raises:
        ValueError: If no layer of the model runs on moe_runtime, or for numbers of tokens below 1.
    """
    tokens = [tokens] if isinstance(tokens, int) else [*tokens]
    if not tokens or min(tokens) < 1:
        raise ValueError(f"tokens must be at least 1, but got {tokens}")
    problem = _problem(arch)
    if problem is not None:
        print(f"moe_runtime.warmup: nothing to compile: {problem}")
        return Warmup(0, 0, 0, ())
    layers = _layers(model)
    if not layers:
        raise ValueError(
            f"No layer of {type(model).__name__} runs on moe_runtime. Call "
            "moe_runtime.patch(model) first"
        )
    began = time.monotonic()
    hits: list[bool] = []
    with _as_on_a_gpu(arch, hits), compile_only(threads or os.cpu_count() or 1) as mode:
        _run_all(model, layers, tokens, backward)
        print(f"moe_runtime.warmup: {len(mode.raw_futures)} variants of kernels", flush=True)
    failed = []
    for future in mode.raw_futures:
        if error := future.exception():
            lines = str(error).strip().splitlines() or [""]
            failed.append(f"{type(error).__name__}: {lines[-1]}")
    cached = hits.count(True)
    compiled = len(mode.raw_futures) - cached - len(failed)
    print(
        f"moe_runtime.warmup: {compiled} compiled, {cached} already cached, "
        f"{len(failed)} failed in {time.monotonic() - began:.0f} s",
        *failed,
        sep="\n  ",
    )
    return Warmup(len(mode.raw_futures), compiled, cached, tuple(failed))


def _problem(arch: int | None) -> str | None:
    """Return why there is nothing to compile, or None."""
    if backends.interpreted():
        return "TRITON_INTERPRET=1 interprets the kernels"
    if arch is not None:
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return backends.why_not(
        "triton",
        "moe_mlp",
        torch.device("cuda", torch.cuda.current_device()),
    )


@contextlib.contextmanager
def compile_only(threads: int) -> Iterator:
    """Let every launch in this block compile in `threads` threads, and launch nothing.

    Yields Triton's AsyncCompileMode; the block ends when everything is compiled or has failed.
    """
    import triton
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__
    try:
        with (
            ThreadPoolExecutor(threads) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
        ):
            KernelInterface.__getitem__ = lambda kernel, grid: functools.partial(
                kernel.warmup, grid=grid
            )
            yield mode
    finally:
        KernelInterface.__getitem__ = launch


def _run_all(model: nn.Module, layers: dict, tokens: list[int], backward: bool) -> None:
    """Run one layer of each shape on the meta device."""
    memo = {id(t): _on_meta(t) for t in (*model.parameters(), *model.buffers())}
    seen = set()
    for name, layer in layers.items():
        shapes = []
        for of, t in layer.module.named_parameters():
            shapes.append((of, t.shape, t.stride(), t.dtype, t.requires_grad))
        if tuple(shapes) in seen:
            continue
        seen.add(tuple(shapes))
        try:
            for T in tokens:
                module = copy.deepcopy(layer.module, dict(memo))
                _run(layer._replace(module=module), T, backward)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"moe_runtime.warmup: {name} cannot run without memory: {why}")


class _Layer(NamedTuple):
    """A module to run, and the fields that its inputs depend on."""

    module: nn.Module
    hidden_size: int
    top_k: int | None  # of experts, which get ids and weights; None for a layer with its router


def _layers(model: nn.Module) -> dict[str, _Layer]:
    """Return the MoE layers that run on moe_runtime: ours, and experts of stock models.

    PEFT's wrappers belong to the experts that they wrap.
    """
    from moe_runtime.hf.dropin.gates import NAME, is_experts
    from moe_runtime.modules.moe import MoE

    layers = {}
    for path, module in model.named_modules():
        if isinstance(module, MoE):
            layers[path] = _Layer(module, module.config.hidden_size, None)
        elif is_experts(module) and getattr(module.config, "_experts_implementation", None) == NAME:
            name = path
            while name.endswith(".base_layer"):
                name = name.removesuffix(".base_layer")
            values = [getattr(module.config, field, None) for field in TOP_K]
            top_k = next(value for value in values if value)
            layers[name] = _Layer(
                model.get_submodule(name),
                module.config.hidden_size,
                top_k,
            )
    return layers


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor or parameter like this one on the meta device, with its attributes."""
    meta = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device="meta",
    )
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
    vars(meta).update(vars(tensor))
    return meta


def _run(layer: _Layer, T: int, backward: bool) -> None:
    """Run a layer on T tokens, without gradients and, if `backward`, with them."""
    dtype = next(t.dtype for t in layer.module.parameters() if t.is_floating_point())
    with torch.no_grad():
        layer.module(*_inputs(layer, T, dtype, False))
    for _ in range(2 if backward else 0):  # the second one adds to gradients
        out = layer.module(*_inputs(layer, T, dtype, True))
        if isinstance(out, tuple):
            out = out[0]
        out.sum().backward()


def _inputs(layer: _Layer, T: int, dtype: torch.dtype, requires_grad: bool) -> tuple[Tensor, ...]:
    floats = {"dtype": dtype, "device": "meta", "requires_grad": requires_grad}
    if layer.top_k is None:
        return (torch.empty(1, T, layer.hidden_size, **floats),)
    idx = torch.empty(
        T,
        layer.top_k,
        dtype=torch.int64,
        device="meta",
    )
    return torch.empty(T, layer.hidden_size, **floats), idx, torch.empty(T, layer.top_k, **floats)


class _Kernels(TorchDispatchMode):
    """Runs the kernels of our ops on the meta device, where their fakes would run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "moe_runtime":
            return KERNELS[func.__name__.partition(".")[0]](*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _as_on_a_gpu(arch: int | None, hits: list[bool]) -> Iterator[None]:
    """Choose backends and configs as on a GPU: this machine's, or one of capability `arch`.

    `hits` gets whether Triton's cache had each kernel.
    """
    from triton import knobs
    from triton.runtime import driver

    from moe_runtime.kernels import compiling, tiles

    compiling.install()  # later it would replace the listener of this block

    def choose(op: str, x: Tensor, backend: str | None = None, cuda_fits: bool = True) -> str:
        if backend is not None:
            return backend
        has_kernel = op in backends.TRITON_OPS and x.dtype != torch.float64
        return "triton" if has_kernel else "torch"

    name = ""
    major, minor = divmod(arch or 0, 10)
    if arch is None:
        name = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
    changed = [
        (backends, "choose", choose),
        (backends, "why_not", lambda *_: None),
        (tiles, "_device", lambda _: (10 * major + minor, name)),
        (knobs.compilation, "listener", lambda **event: hits.append(event["cache_hit"])),
    ]
    if arch is not None:
        changed.append((driver, "_active", Driver(arch)))
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in changed:
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, value)
        stack.enter_context(_Kernels())
        yield
    if arch is not None:  # a kernel keeps what was compiled for the driver that is gone
        for path, module in list(sys.modules.items()):
            if path.startswith("moe_runtime.kernels."):
                for value in vars(module).values():
                    if hasattr(value, "device_caches"):
                        value.device_caches.clear()


class Driver:
    """Triton's driver of a GPU that is not there: kernels compile, and none can launch."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> Any:
        """Return the GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return the number of the only GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0
