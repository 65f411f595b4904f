"""Replace the dense MLPs of a live transformers model by our modules, and back.

    stock model --dense_to_moe--> MoE layers --moe_to_mergeable--> MergedMLP layers
         ^  '-----------stage="ewa"--> EWAMLP layers                  |
         '------------------------moe_to_dense------------------------'

LoRA experts (stage "lora") are created and merged in `moe_runtime.methods.lora`. All functions work
in place: modules are replaced, and the model's class and its config change with them, so that
save_pretrained and from_pretrained work. The config is a new object each time, as other models may
hold the old one. Attention, norms, embeddings, head, tied weights, generation config and the hooks
of other modules are left untouched. Checks come first, so that a rejected model is not modified.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models import configuration
from moe_runtime.hf.models.configuration import (
    become_mergeable,
    check_mergeable,
    moe_config,
    moe_fields,
    stock_config,
)
from moe_runtime.hf.models.families import (
    FAMILIES,
    Family,
    check_weights,
    family_of,
    moe_shape,
    read_mlp,
    write_mlp,
)
from moe_runtime.hf.models.modeling import adopt, freeze_for_mixing, model_classes, moe_layers
from moe_runtime.modules.ewa import EWAMLP
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import Experts, MoE, Router
from moe_runtime.modules.trainable import split_of
from moe_runtime.ops.activation import Activation

TOLERANCE = 1e-5  # largest relative difference of an MLP from the formula, in float64


def sampled(layers: Sequence[int]) -> set[int]:
    """Return the first, the middle and the last of `layers`, whose MLPs are probed."""
    return {layers[0], layers[len(layers) // 2], layers[-1]}


def verify_mlp(
    model: nn.Module, layers: Sequence[int] | None = None, family: Family | None = None
) -> dict[int, float]:
    """Compare a dense model's MLPs with down(act(gate x) * up x) on a probe batch; return the
    relative errors.

    Of `layers`, by default all, it runs the first, the middle and the last, and each that differs
    from the first or is patched; both sides in float64, from a copy of one layer at a time. Raises
    ValueError for an error above TOLERANCE, weights on the meta device, weights that are not
    finite, and accelerate's hooks, which move weights in and out.
    """
    family = family or family_of(model)
    layers = check_layers(model.config.num_hidden_layers, layers)
    mlps = {layer: model.get_submodule(family.path.format(layer)) for layer in layers}
    for layer, mlp in mlps.items():
        refuse_offloaded(mlp, family.path.format(layer))
        _refuse_broken(mlp, family.path.format(layer))
    first = repr(mlps[layers[0]])
    probed = sampled(layers)
    errors = {}
    for layer, mlp in mlps.items():
        is_patched = any(
            "forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in mlp.modules()
        )
        if layer not in probed and repr(mlp) == first and not is_patched:
            continue
        errors[layer] = error = mlp_error(mlp, family)
        if not error < TOLERANCE:
            raise ValueError(
                f"{family.path.format(layer)} ({type(mlp).__name__}) must compute "
                f"{family.formula}, but the relative difference is {error:.1e}, above "
                f"{TOLERANCE:.0e}. Check whether the model is patched"
            )
    return errors


def dense_to_moe(
    model: nn.Module,
    config: MoEConfig,
    layers: Sequence[int] | None = None,
    seed: int = 42,
    method: str = "xft",
    stage: str = "moe",
    family: Family | None = None,
) -> dict[int, float]:
    """Replace the MLPs of a stock model, by default of all layers, by the MoE of `config`; return
    `verify_mlp`'s errors.

    Every expert is a copy of the layer's MLP with the same dtype, device and requires_grad. Routers
    are drawn by `draw_router`; stage "ewa" creates EWAMLPs without routers. `family` is looked up
    unless given. Raises ValueError, without modifying the model, if it or the config is not
    supported.
    """
    family = family or family_of(model)
    layers = check_stock(model, family, config, layers)
    errors = verify_mlp(model, layers, family)
    for layer in layers:
        path = family.path.format(layer)
        router = draw_router(config, seed, layer) if stage == "moe" else None
        model.set_submodule(path, _expand(model.get_submodule(path), family, config, router))
    fields = moe_fields(
        config,
        layers=layers,
        base_model_type=family.model_type,
        base_architecture=type(model).__name__,
        method=method,
        stage=stage,
    )
    become_moe(model, fields)
    return errors


def check_stock(
    model: nn.Module, family: Family, config: MoEConfig, layers: Sequence[int] | None
) -> list[int]:
    """Return the layers to change, all for None; raises ValueError unless the model is stock and
    matches `config`.
    """
    stock = model_classes(family.model_type).base_causal_lm
    if type(model) is not stock:
        raise ValueError(
            f"Expected a {stock.__name__}, but got {type(model).__name__}. Unwrap it, merge "
            "adapters (merge_and_unload), or load the folder with AutoModelForCausalLM"
        )
    refuse_offloaded(model, type(model).__name__, recurse=False)
    layers = check_layers(model.config.num_hidden_layers, layers)
    for layer in layers:
        _check_shape(model.get_submodule(family.path.format(layer)), family, config, layer)
    return layers


def become_moe(model: nn.Module, fields: dict) -> None:
    """Set the class and the config of a stock model whose MLPs are replaced, with `fields` from
    `moe_fields`.
    """
    classes = model_classes(fields["moe_runtime"]["base_model_type"])
    set_config(model, copy.deepcopy(model.config))
    configuration.become_moe(model.config, classes, fields)
    adopt(model, classes.causal_lm, classes.inner)


def become_stock(model: nn.Module) -> None:
    """Restore the base's class and a clean config of an upcycled model whose MLPs are stock
    again.
    """
    classes = model_classes(model.config.moe_runtime["base_model_type"])
    set_config(model, stock_config(model.config, classes.base_config))
    adopt(model, classes.base_causal_lm, classes.base_inner)


def set_config(model: nn.Module, config: PreTrainedConfig) -> None:
    """Give a model, and its submodules that hold the same object, the new config object `config`.

    transformers keeps the object that it is given (`LlamaForCausalLM(config)`), so that other
    models may hold the old one.
    """
    old = model.config
    for module in model.modules():
        for name, value in vars(module).items():
            if value is old:
                setattr(module, name, config)


def moe_to_mergeable(model: nn.Module, shared_rate: float = 0.75, soup: bool = False) -> None:
    """Replace every MoE of an upcycled model by a MergedMLP with its experts; only the mixing
    logits are trainable.

    The experts' parameters are moved, not copied, and the routers are removed. Raises ValueError
    for a model at another stage, and for a gate without a shared expert unless `soup` is True.
    """
    modules = _swappable(model, ("moe",))
    block = model.config.moe_runtime
    config = moe_config(model.config)
    check_mergeable(config, soup)
    merged = {}
    for layer in modules:  # raises before anything is changed
        merged[layer] = MergedMLP(config, shared_rate=shared_rate, soup=soup, device="meta")
    path = FAMILIES[block["base_model_type"]].path
    for layer, moe in modules.items():
        new = merged[layer]
        new.experts = moe.experts
        new.mixing_logits = nn.Parameter(
            torch.empty_like(new.mixing_logits, device=moe.experts.down_proj.device)
        )
        new.reset_parameters()
        model.set_submodule(path.format(layer), new.train(moe.training))
    freeze_for_mixing(model)
    set_config(model, copy.deepcopy(model.config))
    become_mergeable(model.config, shared_rate, soup)


def moe_to_dense(
    model: nn.Module, weights_of_layer: Callable[[nn.Module], dict[str, Tensor]]
) -> nn.Module:
    """Convert an upcycled model at any stage back to its base's stock class, in place, and return
    it.

    `weights_of_layer` maps an MoE, MergedMLP or EWAMLP to one dense weight per name of `read_mlp`;
    all layers are computed before the first is replaced. The config has no fields of ours left.
    Weights are trainable if the experts were; after the mergeable stage, which freezes everything,
    all weights are trainable again, as in any loaded model.
    """
    modules = _swappable(model, ("moe", "mergeable", "ewa"))
    block = model.config.moe_runtime
    classes = model_classes(block["base_model_type"])
    family = FAMILIES[block["base_model_type"]]
    with torch.device("meta"):
        stock = classes.base_causal_lm(stock_config(model.config, classes.base_config))
    weights = {}
    for layer, module in modules.items():
        weights[layer] = weights_of_layer(module)
        check_weights(stock.get_submodule(family.path.format(layer)), family, weights[layer])
    for layer, module in modules.items():
        path = family.path.format(layer)
        mlp = stock.get_submodule(path)
        write_mlp(mlp, family, weights.pop(layer), module.experts.down_proj.requires_grad)
        if hasattr(mlp, "config"):
            mlp.config = model.config
        model.set_submodule(path, mlp.train(module.training))
    become_stock(model)
    if block["stage"] == "mergeable":
        model.requires_grad_(True)
    return model


def draw_router(config: MoEConfig, seed: int, layer: int) -> dict[str, Tensor]:
    """Return a layer's router weights, float32, drawn on the CPU from N(0, initializer_range).

    They depend only on the seed and the layer, not on the device or on which other layers are
    upcycled.
    """
    router = Router(config, device="meta").to_empty(device="cpu").float()
    router.reset_parameters(torch.Generator().manual_seed(seed * 65537 + layer))
    return {name: weight.detach() for name, weight in router.named_parameters()}


@torch.no_grad()
def _expand(
    mlp: nn.Module, family: Family, config: MoEConfig, router: dict[str, Tensor] | None
) -> MoE | EWAMLP:
    """Build the MoE that replaces the MLP, or an EWAMLP without a router."""
    moe = EWAMLP(config, device="meta") if router is None else MoE(config, device="meta")
    down = getattr(mlp, family.down).weight
    for name, weight in read_mlp(mlp, family).items():
        stack = weight.unsqueeze(0).repeat(config.num_experts, *[1] * weight.dim())
        setattr(moe.experts, name, nn.Parameter(stack, requires_grad=down.requires_grad))
    for name, weight in (router or {}).items():
        weight = weight.to(device=down.device, dtype=down.dtype)
        setattr(moe.gate, name, nn.Parameter(weight, requires_grad=down.requires_grad))
    return moe.train(mlp.training)


def check_layers(count: int, layers: Sequence[int] | None) -> list[int]:
    """Return the layer numbers below `count`, sorted; all of them for None. Raises ValueError for a
    bad one.
    """
    layers = list(range(count)) if layers is None else sorted(layers)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(count)):
        raise ValueError(
            f"layers must be one or more different numbers from 0 to {count - 1}, but got {layers}"
        )
    return layers


def _check_shape(mlp: nn.Module, family: Family, config: MoEConfig, layer: int) -> None:
    shape = moe_shape(family, mlp)
    configured = {name: getattr(config, name) for name in shape}
    if configured != shape:
        raise ValueError(
            f"The config must have {shape}, the shape of layer {layer}'s MLP (see moe_shape), but "
            f"has {configured}"
        )
    if getattr(mlp, "residual_dropout", 0):
        raise ValueError(
            "residual_dropout must be 0, as the experts have no dropout, but got "
            f"{mlp.residual_dropout}. Load the model with from_pretrained(..., "
            "residual_dropout=0.0)"
        )


def _swappable(model: nn.Module, stages: Sequence[str]) -> dict[int, nn.Module]:
    """Return `moe_layers`; raises ValueError at another stage, or if a module was replaced or
    wrapped.
    """
    modules = moe_layers(model)
    stage = model.config.moe_runtime["stage"]
    if stage not in stages:
        hint = "Pass a model at that stage"
        if stage == "lora":
            hint = (
                "Convert it to whole experts with lora.to_moe, or to a dense model with lora.merge"
            )
        raise ValueError(
            f"The model's stage must be {' or '.join(map(repr, stages))}, but is {stage!r}. {hint}"
        )
    refuse_offloaded(model, type(model).__name__, recurse=False)
    for layer, module in modules.items():
        refuse_offloaded(module, f"layer {layer}'s {type(module).__name__}")
        kind = type(module.experts)
        if kind is not Experts or split_of(module.experts) is not None:
            raise ValueError(
                f"The experts of layer {layer} must be plain Experts, but are {kind.__name__} with "
                "adapters or separately trained rows. Merge adapters, and call "
                "trainable.fold_rows(model), first"
            )
    return modules


def refuse_offloaded(module: nn.Module, path: str, recurse: bool = True) -> None:
    """Raise ValueError if accelerate moves the weights of `module` at `path`, or they are on the
    meta device.
    """
    why = None
    if recurse and any(parameter.is_meta for parameter in module.parameters()):
        why = "is on the meta device"
    for part in module.modules() if recurse else [module]:
        if hasattr(part, "_hf_hook"):
            why = "carries accelerate's hooks"
    if why is not None:
        raise ValueError(
            f"{path} {why}, but weights must stay on one device. "
            "Load the model with from_pretrained without device_map, or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )


def _refuse_broken(mlp: nn.Module, path: str) -> None:
    """Raise ValueError for NaN and infinities in the weights of an MLP, which all copies would
    contain.
    """
    for name, weight in mlp.named_parameters():
        # torch has no aminmax for 8-bit floats
        if not weight.numel() or weight.dtype.itemsize == 1:
            continue
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise ValueError(f"{path}.{name} contains NaN or infinity, but weights must be finite")


@torch.no_grad()
def mlp_error(mlp: nn.Module, family: Family) -> float:
    """Return ||mlp(x) - formula(x)|| / ||formula(x)|| on 16 rows of N(0, 1), in float64; inf if the
    MLP fails.
    """
    shape = moe_shape(family, mlp)
    ours = {name: weight.double() for name, weight in read_mlp(mlp, family).items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, shape["hidden_size"], generator=generator, dtype=torch.float64)
    x = x.to(ours["down_proj"].device)
    z = nn.functional.linear(x, ours[family.up_name], ours.get(f"{family.up_name}_bias"))
    h = Activation(shape["hidden_act"], family.gated).apply(z)
    expected = nn.functional.linear(h, ours["down_proj"], ours.get("down_proj_bias"))
    try:
        out = copy.deepcopy(mlp).double().eval()(x)
    # a patched forward with other arguments, or bound to the original's weights
    except (RuntimeError, TypeError):
        return float("inf")
    if not isinstance(out, Tensor) or out.shape != expected.shape:
        return float("inf")
    scale = expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return ((out - expected).norm() / scale).item()
