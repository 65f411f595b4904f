"""Run PEFT's LoRA on expert stacks (`target_parameters`) without copying the stacks: base and
low-rank terms in one op.

PEFT wraps an experts module in one `ParamWrapper` for each adapted parameter, and before the module
runs each wrapper puts W + s B A in the parameter's place (`ParamWrapper._activate_lora`): a tensor
as large as the stack, twice a call, kept for the backward pass. `install` replaces only that
method. If the module runs on moe_runtime, the wrapper stores its factors A, B and s on the module,
and `experts_forward` computes base and adapters together (`ops.frozen_mlp`). Everything else is
left to PEFT: which adapters are active, disabled or merged, parameters, initialization, files.
"""

import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path

from torch import nn

from moe_runtime import backends
from moe_runtime.hf.common.replacing import replace_once
from moe_runtime.hf.dropin.gates import NAME, is_experts, stack_names
from moe_runtime.hf.dropin.peft_files import transposed_stack
from moe_runtime.modules import packed
from moe_runtime.modules.frozen import ADAPTERS, Factors
from moe_runtime.modules.moe import Experts

LAYER = "peft.tuners.lora.layer"  # PEFT's module of wrappers
MODEL = "peft.peft_model"  # its module of models
# fields of LoraConfig that PEFT ignores for `target_parameters`, and what to do instead
IGNORED = {
    "layers_to_transform": (
        "every layer gets an adapter. Name the layers' parameters in target_parameters"
    ),
    "exclude_modules": (
        "excluded experts still get an adapter. Name the others in target_parameters"
    ),
    "use_qalora": "the experts' adapters are plain LoRA",
}


class _LayerLoader(SourceFileLoader):
    """Loads files of PEFT as Python does, and calls `install` after its modules of wrappers and of
    models.
    """

    def exec_module(self, module) -> None:
        super().exec_module(module)
        if module.__name__ in (LAYER, MODEL):
            install()


def install() -> bool:
    """Make PEFT's wrappers of our experts' parameters store their factors on the module, now or
    once PEFT is imported.

    Returns whether PEFT's module of wrappers has been imported.
    """
    layer = sys.modules.get(LAYER)
    if layer is None and (spec := importlib.util.find_spec("peft")):
        root = Path(*spec.submodule_search_locations)
        for folder in (str(root), str(root / "tuners" / "lora")):
            sys.path_importer_cache[folder] = FileFinder(folder, (_LayerLoader, SOURCE_SUFFIXES))
    model = getattr(sys.modules.get(MODEL), "PeftModel", None)
    if model is not None:
        replace_once(model, "get_nb_trainable_parameters", _count)
    # not a PEFT without target_parameters, or one that is still being imported
    if hasattr(layer, "ParamWrapper"):
        replace_once(layer.ParamWrapper, "merge", _guard)
        replace_once(layer.ParamWrapper, "get_delta_weight", _guard)
        replace_once(layer.ParamWrapper, "_activate_lora", _activate)
    return layer is not None


def _count(stock: Callable, model) -> tuple[int, int]:
    """Return PEFT's counts of parameters, as print_trainable_parameters shows them, with a packed
    stack's weights, not bytes.
    """
    trainable, total = stock(model)
    for module in model.modules():
        for name, layout in packed.layouts(module).items():
            total += math.prod(layout.shape) - getattr(module, name).numel()
    return trainable, total


def _guard(stock: Callable, wrapper, *args, **kwargs):
    """Call a method of PEFT's wrappers, which computes in the parameter's dtype; raise ValueError
    for packed stacks.
    """
    if packed.is_packed(wrapper.get_base_layer(), wrapper.parameter_name):
        raise ValueError(
            f"{wrapper.parameter_name} is quantized, so an adapter cannot be merged into it. "
            "Merge it into the 16-bit model and quantize the result"
        )
    return stock(wrapper, *args, **kwargs)


@contextmanager
def _activate(stock: Callable, wrapper, active_adapters):
    """Store the wrapper's factors on its experts module; without ours, put W + s B A in place."""
    base = wrapper.get_base_layer()
    if not _is_ours(wrapper, base):
        with stock(wrapper, active_adapters):
            yield
        return
    if wrapper.num_experts == 1 and getattr(base, "is_transposed", False):
        raise ValueError(
            f"{wrapper.parameter_name} of {type(base).__name__} is one transposed expert, to "
            "which PEFT would add the transposed update. Use a model with at least two "
            "experts per layer"
        )
    factors = []
    is_meta = False
    for name in active_adapters or ():
        if name in wrapper.lora_A:
            a = wrapper.lora_A[name].weight
            b = wrapper.lora_B[name].weight
            factors.append(Factors(a, b, wrapper.scaling[name], wrapper.num_experts))
            is_meta = is_meta or a.is_meta or b.is_meta
    if not factors:
        yield
        return
    if is_meta and hasattr(base, "_hf_hook"):
        raise ValueError(
            f"The adapter of {wrapper.parameter_name} is offloaded, but PEFT reads its weights "
            "without accelerate's hooks. Offload the model without adapters of the expert "
            "stacks"
        )
    before = base.__dict__.pop(ADAPTERS, {})
    base.__dict__[ADAPTERS] = {**before, wrapper.parameter_name: factors}
    try:
        yield
        if ADAPTERS in base.__dict__:
            raise RuntimeError(
                f"The adapter of {wrapper.parameter_name} was not used, because "
                f"{type(base).__name__} did not run on moe_runtime although its config says "
                "so. Call moe_runtime.patch(model) again"
            )
    finally:
        base.__dict__.pop(ADAPTERS, None)


def _is_ours(wrapper, base: nn.Module) -> bool:
    """Return whether the wrapped parameter is a frozen expert stack that runs through our ops."""
    is_stock = is_experts(base) and base.config._experts_implementation == NAME
    if not (is_stock or isinstance(base, Experts)) or backends.portable() is not None:
        return False
    names = stack_names(base)[:2]
    if wrapper.parameter_name not in names:
        return False
    # a stack that is trained as well gets its gradient as in PEFT, through W + s B A
    return all(
        name in base._parameters and not base._parameters[name].requires_grad for name in names
    )


def adapted_stacks(model: nn.Module) -> dict[str, dict[str, list[str]]]:
    """Return the expert stacks that PEFT adapts, merged adapters included.

    Args:
        model: A PEFT model.

    Returns:
        Path of the experts to parameter to names of adapters.
    """
    stacks = {}
    for name, wrapper in _wrappers(model).items():
        name = name.removesuffix(".base_layer" * name.count(".base_layer"))
        stacks.setdefault(name, {})[wrapper.parameter_name] = list(wrapper.lora_A)
    return stacks


def expert_adapters(model: nn.Module) -> list[nn.Parameter]:
    """Return A and B of every adapter of an expert stack, in the order of the model's modules."""
    parameters = []
    for wrapper in _wrappers(model).values():
        for name in wrapper.lora_A:
            parameters += wrapper.lora_A[name].parameters()
            parameters += wrapper.lora_B[name].parameters()
    return parameters


def _wrappers(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's wrappers of expert stacks by path."""
    kind = getattr(sys.modules.get(LAYER), "ParamWrapper", ())
    wrappers = {}
    for name, module in model.named_modules():
        if isinstance(module, kind) and module._param_ndim == 3:
            wrappers[name] = module
    return wrappers


def check_adapters(model: nn.Module) -> None:
    """Raise ValueError for adapters that would not compute what was requested, and warn about
    settings that PEFT ignores.

    It raises for layer_replication, which copies configs so that layers stay on another
    implementation, and for square stacks saved by PEFT before 0.20, which PEFT loads transposed.
    """
    configs = {}
    for module in model.modules():
        by_adapter = getattr(module, "peft_config", None)
        if isinstance(by_adapter, dict):
            configs |= by_adapter
    adapted = set()  # names of adapters of any stack
    for stack in adapted_stacks(model).values():
        adapted.update(*stack.values())
    for adapter, config in configs.items():
        if getattr(config, "layer_replication", None):
            raise ValueError(
                f"Adapter {adapter!r} has layer_replication {config.layer_replication}, which is "
                "not supported, as copied layers have separate configs. Use an adapter without it"
            )
        targets = getattr(config, "target_parameters", None)
        version = str(getattr(config, "peft_version", None) or "0")
        if not targets or adapter not in adapted:
            if adapter not in adapted:
                _warn_of_experts_without_adapter(adapter, config)
            continue
        if (wrong := transposed_stack(_wrappers(model), adapter, version)) is not None:
            raise ValueError(
                f"Adapter {adapter!r} was saved by PEFT {version}, which stored LoRA of expert "
                f"stacks with other axes than PEFT does today. As {wrong} is square, PEFT has "
                "loaded the transposed update. Convert the folder with `moe-runtime lora convert` "
                "and load the result"
            )
        for field, says in IGNORED.items():
            if getattr(config, field, None):
                warnings.warn(
                    f"Adapter {adapter!r}: PEFT ignores {field} for target_parameters: {says}.",
                    stacklevel=3,
                )
        if getattr(config, "bias", "none") == "all":
            says = "the experts' biases stay frozen. Target them by name, or set requires_grad"
            warnings.warn(
                f"Adapter {adapter!r}: PEFT's bias='all' does not apply to experts: {says}.",
                stacklevel=3,
            )


def _warn_of_experts_without_adapter(adapter: str, config) -> None:
    """Warn if an adapter, which matches no stack, names the experts' projections."""
    targets = getattr(config, "target_modules", None) or ()
    targets = [targets] if isinstance(targets, str) else targets
    named = [name for name in targets if name.endswith(("gate_proj", "up_proj", "down_proj"))]
    if named:
        warnings.warn(
            f"Adapter {adapter!r} has target_modules {sorted(named)}, which do not match this "
            "model's expert stacks, so these get no adapter. Name them in target_parameters, for "
            "example ['experts.gate_up_proj', 'experts.down_proj'].",
            stacklevel=4,
        )
