"""Compile the kernels that a model will launch before its first step: `moe_runtime.warmup`.

Triton compiles a kernel at its first launch with arguments of new types or constants, about a
second each. Here each layer of the model runs on tensors of the meta device, which have no memory,
and its launches are recorded instead of executed; processes then compile the recorded variants into
Triton's cache, where the launches of the real model find them. As a program, this is such a
process.
"""

import contextlib
import copy
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime import backends
from moe_runtime.ops._torch_private import TorchDispatchMode
from moe_runtime.ops.library import KERNELS

A_PROCESS = 3  # variants at least: starting a process takes as long as compiling so many
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
    """What `warmup` did: variants of kernels that the model needs, and what became of them."""

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
    processes: int | None = None,
) -> Warmup:
    """Compile what the MoE layers of `model` will launch, in parallel, without launching anything.

    Args:
        model: A model whose layers run on moe_runtime (`moe_runtime.patch`, or one of ours), in the
            dtype that it will run in.
        tokens: Numbers of tokens of a forward pass; launch configs depend on them.
        backward: Whether to compile for training too, for the parameters that require a gradient.
        arch: 10 * major + minor of the compute capability to compile for, such as 90; by default
            this machine's GPU.
        processes: How many compile at a time; by default one for each core.

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
    if arch is None:
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    launches = record(model, tokens, backward, arch)
    return _compile_all(
        launches,
        arch,
        processes or os.cpu_count() or 1,
    )


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


def record(model: nn.Module, tokens: list[int], backward: bool, arch: int) -> list[dict]:
    """Return the launches of the model's MoE layers, one of each variant, as JSON has them."""
    layers = _layers(model)
    if not layers:
        raise ValueError(
            f"No layer of {type(model).__name__} runs on moe_runtime. Call "
            "moe_runtime.patch(model) first"
        )
    memo = {id(t): _on_meta(t) for t in (*model.parameters(), *model.buffers())}
    variants = {}
    seen = set()
    with _recording(variants, arch):
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
    return [*variants.values()]


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
def _recording(variants: dict[str, dict], arch: int) -> Iterator[None]:
    """Record launches into `variants` instead of executing them, as on a GPU of this kind."""
    from moe_runtime.kernels import tiles

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def choose(op: str, x: Tensor, backend: str | None = None, cuda_fits: bool = True) -> str:
        if backend is not None:
            return backend
        has_kernel = op in backends.TRITON_OPS and x.dtype != torch.float64
        return "triton" if has_kernel else "torch"

    changed = [
        (backends, "choose", choose),
        (backends, "why_not", lambda *_: None),
        (tiles, "_device", lambda _: (arch, name)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in changed:
            stack.callback(
                setattr,
                owner,
                attribute,
                getattr(owner, attribute),
            )
            setattr(owner, attribute, value)
        for kernel, function in kernels().items():
            stack.callback(vars(function).pop, "run", None)
            function.run = functools.partial(_note, variants, kernel, function)
        stack.enter_context(_Kernels())
        yield


@functools.cache
def kernels() -> dict[str, object]:
    """Return the kernels of kernels/ as module.name."""
    from triton.runtime.jit import JITFunction

    import moe_runtime.kernels

    by_name = {}
    for path in sorted(Path(*moe_runtime.kernels.__path__).glob("*.py")):
        module = importlib.import_module(f"moe_runtime.kernels.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.module == module.__name__:
                by_name[f"{path.stem}.{name}"] = value
    return by_name


def _note(variants: dict[str, dict], kernel: str, function, *args, grid, warmup, **kwargs) -> None:
    """Record a launch, in the place of JITFunction.run."""
    names = [parameter.name for parameter in function.params]
    arguments = {name: _describe(value) for name, value in zip(names, args)}
    options = {}
    for name, value in kwargs.items():
        if name in names:
            arguments[name] = _describe(value)
        else:
            options[name] = value
    types = {}
    for parameter in function.params:
        types[parameter.name] = _type(arguments.get(parameter.name), parameter)
    launch = {"kernel": kernel, "arguments": arguments, "options": options}
    variants.setdefault(json.dumps([kernel, types, options]), launch)


def _describe(value):
    """Return an argument as JSON holds it: a tensor by its dtype, as its memory is aligned."""
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    if hasattr(value, "block_shape"):
        return {
            "descriptor": _describe(value.base)["tensor"],
            "shape": [int(size) for size in value.shape],
            "strides": [int(stride) for stride in value.strides],
            "block": list(value.block_shape),
        }
    if hasattr(value, "_fields"):
        group = f"{type(value).__module__}.{type(value).__name__}"
        return {
            "group": group,
            "members": [*map(_describe, value)],
        }
    if isinstance(value, tuple):
        return {"tuple": [*map(_describe, value)]}
    return value


def _type(value, parameter):
    """Return what of a described argument makes another variant."""
    if isinstance(value, dict) and "descriptor" in value:
        return [value["descriptor"], value["block"]]
    if parameter.is_constexpr or isinstance(value, bool):
        return value
    if isinstance(value, dict) and "group" in value:
        return [value["group"], [_type(member, parameter) for member in value["members"]]]
    if isinstance(value, float):
        return "float"
    if not isinstance(value, int):
        return value
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    if parameter.do_not_specialize:
        return width
    if value == 1:
        return 1
    return f"{width}:16" if value % 16 == 0 else width


def _compile_all(launches: list[dict], arch: int, processes: int) -> Warmup:
    """Compile the launches' variants, and say so."""
    began = time.monotonic()
    count = max(min(processes, len(launches) // A_PROCESS), 1)
    text = f"{len(launches)} variants of kernels for sm_{arch}, in {count} processes"
    print(f"moe_runtime.warmup: {text}", flush=True)
    parts = [launches[i::count] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        states = []
        for part in pool.map(lambda part: _compile_part(part, arch), parts):
            states += part
    failed = tuple(state for state in states if state not in ("compiled", "cached"))
    done = Warmup(
        len(launches),
        states.count("compiled"),
        states.count("cached"),
        failed,
    )
    seconds = time.monotonic() - began
    print(
        f"moe_runtime.warmup: {done.compiled} compiled, {done.cached} already cached, "
        f"{len(failed)} failed in {seconds:.0f} s",
        *failed,
        sep="\n  ",
    )
    return done


def _compile_part(launches: list[dict], arch: int) -> list[str]:
    """Return what became of each launch; a compiler that dies leaves the rest uncompiled."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(arch)]
    text = "".join(json.dumps(launch) + "\n" for launch in launches)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("warmup ")]
    states = [line.removeprefix("warmup ") for line in lines]
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    missing = launches[len(states) :]
    return states + [f"{launch['kernel']}: the compiler died: {last}" for launch in missing]


class Driver:
    """Triton's driver of a GPU that is not there: kernels compile, and none can launch."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        """Return the GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return the number of the only GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def _restore(value):
    """Return an argument for JITFunction.warmup from its description."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(_restore, value["tuple"]))
    if "group" in value:  # its name is part of the key in Triton's cache
        module, _, name = value["group"].rpartition(".")
        return getattr(importlib.import_module(module), name)(*map(_restore, value["members"]))
    if "tensor" in value:
        return torch.empty(
            16,
            dtype=getattr(torch, value["tensor"]),
            device="meta",
        )
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = torch.empty(
        16,
        dtype=getattr(torch, value["descriptor"]),
        device="meta",
    )
    return TensorDescriptor(
        base,
        value["shape"],
        value["strides"],
        value["block"],
    )


def compile_one(launch: dict) -> str:
    """Compile a launch's variant for the active driver; return "compiled", "cached" or an error."""
    from triton import knobs

    hits = []
    knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    arguments = {name: _restore(value) for name, value in launch["arguments"].items()}
    try:
        kernels()[launch["kernel"]].warmup(
            **arguments,
            grid=(1,),
            **launch["options"],
        )
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{launch['kernel']}: {type(error).__name__}: {lines[-1]}"
    return "cached" if all(hits) else "compiled"


def main() -> None:
    """Compile the launches in the input, one a line, for the architecture in the arguments."""
    from triton.runtime import driver

    driver.set_active(Driver(int(sys.argv[1])))
    for line in sys.stdin:
        print("warmup " + compile_one(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
