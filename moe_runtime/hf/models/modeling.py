"""The saved form of an upcycled model: one config class and one model class per base architecture.

`MoeRuntimeLlamaForCausalLM` is `LlamaForCausalLM` whose MLPs, in the layers that
`config.moe_runtime` lists, are `modules.moe.MoE` (stage "moe"), `modules.merged.MergedMLP`
("mergeable"), `modules.ewa.EWAMLP` ("ewa") or the result of `modules.lora_linear.add_experts`
("lora"); the same holds for every family. Checkpoints hold the stacks unchanged:
`model.layers.N.mlp.experts.gate_up_proj` [E, 2I, H], `.down_proj`, `.gate.weight`.

The classes are generated and registered with transformers' auto classes on first use. `import
moe_runtime` adds the names of the configs to transformers' table, so that saved folders are
recognized; `register_auto_classes` creates all classes.

    loss     = lm_loss + aux_loss
    aux_loss = sum over layers of RouterOutput.balance_loss + router_aux_loss_coef * pooled

pooled is `ops.balance.pooled_loss`, transformers' loss over the router logits of all layers
together (Switch, Eq. (4) to (6)).
"""

import copy
import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import can_return_tuple

from moe_runtime.hf.common.outputs import check_gradients, make_exports_portable, share_of_batch
from moe_runtime.hf.models.configuration import ConfigMixin, moe_config
from moe_runtime.hf.models.families import FAMILIES, PREFIX
from moe_runtime.hf.models.hub import PushesCard
from moe_runtime.modules.ewa import EWAMLP
from moe_runtime.modules.lora import DrawnHalves, LoRAMoE, ZeroHalves
from moe_runtime.modules.lora_linear import LoRALinear, add_experts
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import Experts, MoE, Router, RouterOutput
from moe_runtime.ops.balance import pooled_loss


@dataclass
class MoeRuntimeModelOutput(MoeModelOutputWithPast):
    """Output of the inner model; `balance_loss` is the sum over layers, including coefficients."""

    balance_loss: torch.FloatTensor | None = None


@dataclass
class MoeRuntimeCausalLMOutput(MoeCausalLMOutputWithPast):
    """Output of the causal LM; `loss` is `lm_loss` plus `aux_loss`, the balance and pooled losses
    with coefficients.
    """

    lm_loss: torch.FloatTensor | None = None


def sum_balance_losses(records: list[RouterOutput]) -> Tensor | None:
    """Sum the layers' balance losses on the device of the first one; None if no layer has one."""
    losses = [record.balance_loss for record in records if record.balance_loss is not None]
    if not losses:
        return None
    return sum(loss.to(losses[0].device) for loss in losses)


def aux_loss(
    config: PreTrainedConfig,
    records: Sequence[Any],
    logits: Sequence[Tensor],
    attention_mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return the auxiliary part of the loss, [] float32: balance and pooled losses with their
    coefficients.
    """
    balance = sum_balance_losses(records)
    aux = torch.zeros((), device=device) if balance is None else balance.to(device)
    if not config.router_aux_loss_coef or not config.num_experts_per_tok:
        return aux
    mask = None
    if attention_mask is not None and attention_mask.dim() == 2:
        mask = attention_mask.reshape(-1)
        if len(mask) != len(logits[0]):
            mask = None
    pooled = pooled_loss(logits, config.num_experts_per_tok, mask)
    return aux + config.router_aux_loss_coef * pooled.to(device)


def moe_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules that replace the MLPs of an upcycled model, by layer; raises ValueError
    for another model.
    """
    block = getattr(getattr(model, "config", None), "moe_runtime", None)
    if block is None:
        raise ValueError(
            f"Expected an upcycled model, but got {type(model).__name__}. Use xft.upcycle to "
            "create one"
        )
    return {layer: model.get_submodule(_layer_path(model, layer)) for layer in block["layers"]}


def _layer_path(model: nn.Module, layer: int) -> str:
    """Return the path of a layer's MLP in `model`; a model without its head has no prefix before
    its layers.
    """
    path = FAMILIES[model.config.moe_runtime["base_model_type"]].path.format(layer)
    if isinstance(model, _Inner):
        return path.removeprefix(f"{model.base_model_prefix}.")
    return path


def is_routed(module: nn.Module) -> bool:
    """Return whether a module collects its router's outputs."""
    return isinstance(module, MoE | LoRALinear)


def _draw(weights: Iterable[Tensor]) -> None:
    """Initialize [..., in] weights as those of linear layers."""
    for weight in weights:
        bound = weight.shape[-1] ** -0.5
        init.uniform_(weight, -bound, bound)


class _Model(PushesCard):
    """Mixin of both model classes: initialization, and collection of the routers' outputs."""

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, (Router, Experts)):
            for name, weight in module.named_parameters(recurse=False):
                # transformers' functions skip weights loaded from a checkpoint; a module's
                # reset_parameters would not
                if name.endswith("_bias"):
                    init.zeros_(weight)
                else:
                    init.normal_(weight, mean=0.0, std=module.config.initializer_range)
        elif isinstance(module, DrawnHalves):
            _draw(module.values())
        elif isinstance(module, LoRALinear):
            # its router is initialized as a linear layer, not as Routers above
            _draw([*module.gate.parameters(), module.lora_a])
            init.zeros_(module.lora_b)
        elif isinstance(module, ZeroHalves):
            for weight in module.values():
                init.zeros_(weight)
        elif isinstance(module, MergedMLP):
            if not getattr(module.mixing_logits, "_is_hf_initialized", False):
                module.reset_parameters()
        else:
            super()._init_weights(module)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Reject transformers' own implementations, which these experts would silently ignore."""
        if requested_experts not in (None, "eager", "moe_runtime"):
            raise ValueError(
                "experts_implementation must be 'moe_runtime' or None, but got "
                f"{requested_experts!r}. This model always runs moe_runtime.ops.moe_mlp; "
                "MOE_RUNTIME_BACKEND selects its kernel"
            )
        return "eager"  # transformers' name for a module's own forward

    def _routed(self, forward, output_router_logits, *args, **kwargs):
        """Run `forward`; return its output, the RouterOutputs, and whether the output should
        include their logits.

        The records are None if none are needed or an outer model collects them; otherwise the
        output is not a tuple.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        balanced = self.config.moe_runtime["config"]["balance_loss"] != "none"
        blocks = []
        if output_router_logits or balanced:
            blocks = list(filter(is_routed, self.modules()))
        if not blocks or blocks[0].records is not None:
            return forward(*args, **kwargs), None, False
        records: list[RouterOutput] = []
        for block in blocks:
            block.records = records
        try:
            out = forward(*args, **kwargs | {"return_dict": True})
        finally:
            for block in blocks:
                block.records = None
        if balanced or self.config.router_aux_loss_coef:
            parameters = []
            for block in blocks:
                parameters += block.gate.parameters()
            check_gradients(parameters, [record.router_logits for record in records])
        return out, records, output_router_logits

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs
    ):
        """Load as transformers does, but raise ValueError for a checkpoint with missing or unknown
        keys, and list them.
        """
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        # a model without a head ignores the checkpoint's head
        head = ("lm_head.", "embed_out.") if issubclass(cls, _Inner) else ()
        wrong = []
        for kind in ("missing", "unexpected"):
            keys = [key for key in info.get(f"{kind}_keys") or () if not key.startswith(head)]
            if keys:
                wrong.append(f"{len(keys)} {kind}: {', '.join(sorted(keys))}")
        if wrong:
            raise ValueError(
                f"The keys of {pretrained_model_name_or_path} do not match {cls.__name__}: "
                f"{'; '.join(wrong)}. Pass a folder written by save_pretrained"
            )
        stage = model.config.moe_runtime["stage"]
        if stage in FREEZE:
            FREEZE[stage](model)  # loading replaces frozen parameters by trainable ones
        if output_loading_info:
            return model, info
        return model


class _Inner(_Model):
    """The model without its head, which TRL calls directly with output_router_logits before it runs
    the head.

    `AutoModel` loads it, and serving engines with a head of their own build it (vLLM's and SGLang's
    Transformers backends).
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        install_layers(self)
        self.post_init()

    @can_return_tuple
    def forward(self, *args, output_router_logits=None, **kwargs):
        """Run the base's forward; add `router_logits` if requested, and `balance_loss` if the
        layers have one.
        """
        out, records, with_logits = self._routed(
            super().forward, output_router_logits, *args, **kwargs
        )
        if records is None:
            return out
        balance = sum_balance_losses(records)
        logits = None
        if with_logits:
            logits = tuple(record.router_logits for record in records)
        return MoeRuntimeModelOutput(**out, router_logits=logits, balance_loss=balance)


class _CausalLM(_Model):
    """The model with its head."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        adopt(self, type(self), model_classes(config.base_type).inner)
        install_layers(self)
        self.post_init()

    @can_return_tuple
    def forward(self, *args, output_router_logits=None, **kwargs):
        """Run the base's forward; add the auxiliary losses to its loss, and `router_logits` if
        requested.
        """
        out, records, with_logits = self._routed(
            super().forward, output_router_logits, *args, **kwargs
        )
        if records is None:
            return out
        fields = dict(out)
        logits = tuple(record.router_logits for record in records)
        if with_logits:
            fields["router_logits"] = logits
        if with_logits or out.loss is not None:
            fields["aux_loss"] = aux_loss(
                self.config, records, logits, kwargs.get("attention_mask"), out.logits.device
            )
        if out.loss is not None:
            device = out.loss.device
            fields["lm_loss"] = out.loss
            share = share_of_batch(kwargs, device)
            fields["loss"] = out.loss + share * fields["aux_loss"].to(device)
        return MoeRuntimeCausalLMOutput(**fields)


def install_layers(model: PreTrainedModel) -> None:
    """Replace the base's MLPs by the modules that `model.config.moe_runtime` describes, newly
    initialized.
    """
    config = moe_config(model.config)
    block = model.config.moe_runtime
    for layer in block["layers"]:
        path = _layer_path(model, layer)
        if block["stage"] == "lora":
            settings = {name: block["lora"][name] for name in ("form", "rank", "alpha", "targets")}
            # transformers loads a parameter in the dtype in which it was created
            dtype = block["lora"].get("dtype")
            settings["dtype"] = dtype and getattr(torch, dtype)
            module = add_experts(model.get_submodule(path), config, **settings)
        elif block["stage"] == "moe":
            module = MoE(config)
        elif block["stage"] == "ewa":
            module = EWAMLP(config)
        else:
            module = MergedMLP(config, shared_rate=block["shared_rate"], soup=block["soup"])
        model.set_submodule(path, module)
    if block["stage"] in FREEZE:
        FREEZE[block["stage"]](model)


def freeze_for_mixing(model: nn.Module) -> None:
    """Freeze everything but the mixing logits (XFT, Sec. 3.2)."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(".mixing_logits"))


def freeze_for_lora(model: nn.Module) -> None:
    """Freeze everything except the low-rank pairs and their routers; with train_backbone only their
    base MLPs.
    """
    model.requires_grad_(model.config.moe_runtime["lora"]["train_backbone"])
    for module in model.modules():
        if isinstance(module, LoRAMoE):
            module.requires_grad_(True).experts.base.requires_grad_(False)
        elif isinstance(module, LoRALinear):
            module.requires_grad_(True).base.requires_grad_(False)


FREEZE = {"mergeable": freeze_for_mixing, "lora": freeze_for_lora}


def adopt(model: PreTrainedModel, causal_lm: type, inner: type) -> None:
    """Set the classes of a model and its inner model to `causal_lm` and `inner`, in place.

    The inner class matters too, as transformers initializes a nested model's children with its
    code.
    """
    model.__class__ = causal_lm
    model.base_model.__class__ = inner
    for module in (model, model.base_model):
        if vars(module).pop("forward", None) is not None:
            # for example by accelerate's autocast or TRL: bound to the old class, whose super()
            # would fail
            warnings.warn(
                f"forward was replaced on this object; that of {type(module).__name__} is restored",
                stacklevel=3,
            )
    for cls in {causal_lm, inner} - _INTRODUCED:
        # transformers records what a class can output (hidden states) when an object is created,
        # which `__class__ =` does not do, so create one without submodules
        PreTrainedModel.__init__(cls.__new__(cls), copy.deepcopy(model.config))
        _INTRODUCED.add(cls)


_INTRODUCED: set[type] = set()


class ModelClasses(NamedTuple):
    """The generated classes of one base architecture and their stock base classes."""

    config: type
    inner: type
    causal_lm: type
    base_config: type
    base_inner: type
    base_causal_lm: type


@functools.cache
def _config_class(model_type: str) -> type:
    """Create and register the config class, which only imports the file of its base."""
    base = CONFIG_MAPPING[model_type]
    members = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} of a model whose MLPs are mixtures of experts.",
        "model_type": PREFIX + model_type,
        "base_type": model_type,
        # the model classes are created with the first config, as they import the base's modeling
        # file
        "make_models": staticmethod(functools.partial(model_classes, model_type)),
        # outputs that an evaluation loop should not gather
        "keys_to_ignore_at_inference": [
            *base.keys_to_ignore_at_inference,
            "aux_loss",
            "lm_loss",
            "router_logits",
        ],
        "base_model_tp_plan": {
            k: v for k, v in (base.base_model_tp_plan or {}).items() if ".mlp." not in k
        },
    }
    cls = type(f"MoeRuntime{base.__name__}", (ConfigMixin, base), members)
    AutoConfig.register(cls.model_type, cls, exist_ok=True)
    globals()[cls.__name__] = cls
    return cls


@functools.cache
def model_classes(model_type: str) -> ModelClasses:
    """Return the classes for a base model_type such as "llama", created and registered on the first
    call.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
    )

    make_exports_portable()
    config = _config_class(model_type)
    base_config = CONFIG_MAPPING[model_type]
    base_inner = MODEL_MAPPING[base_config]
    base_causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    stem = config.__name__.removesuffix("Config")
    inner = _derive(f"{stem}Model", _Inner, base_inner, config)
    causal_lm = _derive(f"{stem}ForCausalLM", _CausalLM, base_causal_lm, config)
    AutoModel.register(config, inner, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    # a base's renamings between file and model (GPT-NeoX's embed_out is lm_head) are looked up by
    # class name
    renamings = get_checkpoint_conversion_mapping(base_causal_lm.__name__)
    if renamings:
        register_checkpoint_conversion_mapping(causal_lm.__name__, renamings, overwrite=True)
    return ModelClasses(config, inner, causal_lm, base_config, base_inner, base_causal_lm)


def _derive(name: str, ours: type, base: type, config: type) -> type:
    """Create and publish the class `name`: our mixin before the stock model class."""

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        return ours.forward(self, *args, **kwargs)

    # Trainer drops the columns, and generate the arguments, that the signature does not name
    signature = inspect.signature(base.forward)
    parameters = list(signature.parameters.values())
    added = inspect.Parameter("output_router_logits", inspect.Parameter.KEYWORD_ONLY, default=None)
    has_kwargs = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - has_kwargs, added)
    forward.__signature__ = signature.replace(parameters=parameters)
    members = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} whose MLPs are mixtures of experts.",
        "config_class": config,
        "forward": forward,
    }
    cls = type(name, (ours, base), members)
    globals()[name] = cls
    return cls


def register_auto_classes() -> None:
    """Register our model classes with AutoConfig, AutoModel and AutoModelForCausalLM.

    `import moe_runtime` makes them known for loading; call this for code that reads transformers'
    own tables. Calling it again has no effect.
    """
    for model_type in FAMILIES:
        _config_class(model_type)


def __getattr__(name: str):
    """Create a generated class on its first import, as pickles, saved folders and users refer to it
    by name.
    """
    match = re.fullmatch(r"MoeRuntime(\w+?)(Config|Model|ForCausalLM)", name)
    for model_type in FAMILIES if match else ():
        if CONFIG_MAPPING[model_type].__name__ == f"{match[1]}Config":
            make = _config_class if match[2] == "Config" else model_classes
            make(model_type)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
