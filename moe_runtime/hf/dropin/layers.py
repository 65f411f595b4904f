"""Find the MoE layers of a model, ours and transformers' stock experts, and observe their calls and
sizes.

A layer is watched only while the model that contains it runs, as gradient checkpointing runs it
again in the backward pass, which is not a call of the model.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_runtime.hf.dropin.experts import is_experts
from moe_runtime.modules.ewa import EWAMLP
from moe_runtime.modules.lora import LoRAExperts, LoRAMoE
from moe_runtime.modules.lora_linear import LoRALinear
from moe_runtime.modules.moe import MoE, Router
from moe_runtime.ops._torch_private import has_compiled

# parts that DDP, torch.compile, FSDP and PEFT insert into a module's path
_WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
    "original_module",
}
_TRAINED_COPY = re.compile(r"\.modules_to_save\.[^.]+")


@dataclass(frozen=True, eq=False)
class RoutedLayer:
    """An MoE layer: `module` is our Router or a stock experts module, `name` is its path."""

    name: str
    module: nn.Module
    num_experts: int
    num_shared: int = 0  # leading experts that process every token

    @property
    def is_stock(self) -> bool:
        """Whether the layer is transformers' own."""
        return not isinstance(self.module, Router)

    def watch(self, see: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `see` with the ids [T, K] of each call of the layer; return the hook's handle."""
        if self.is_stock:
            return self.module.register_forward_pre_hook(
                functools.partial(_before_experts, see), with_kwargs=True
            )
        return self.module.register_forward_hook(functools.partial(_after_router, see))


# module-level functions instead of lambdas, as a model is pickled and copied with its hooks
def _before_experts(see, module, args, kwargs) -> None:
    see(ids_of(args, kwargs))


def _after_router(see, module, args, out) -> None:
    see(out.topk_idx)


def ids_of(args: tuple, kwargs: dict) -> Tensor:
    """Return the ids [T, K] from the arguments of a stock experts module."""
    ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
    return ids.reshape(-1, ids.shape[-1])


def routed_layers(model: nn.Module) -> dict[str, RoutedLayer]:
    """Return the MoE layers of `model` by path, in the order of its modules; raises ValueError if
    there are none.
    """
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Router):
            config = module.config
            layers[name] = RoutedLayer(
                name, module, config.num_experts, int(config.has_shared_expert)
            )
        elif is_experts(module):
            layers[name] = RoutedLayer(name, module, module.num_experts)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no MoE layers with a router. Upcycle it first, or use a "
            "stock model whose experts use transformers' experts interface"
        )
    return layers


def numbered_layers(model: nn.Module) -> dict[int, RoutedLayer]:
    """Return the MoE layers of `model` by layer number, the first number in their path (as in
    ESFT's files).

    Copies that an adapter trains replace their originals. Raises ValueError if two layers have the
    same number, as in models with several stacks of layers.
    """
    numbered: dict[int, RoutedLayer] = {}
    for layer in routed_layers(model).values():
        name = plain_name(layer.name)
        digits = re.search(r"\d+", name)
        if digits is None:
            raise ValueError(
                f"Layer {layer.name} has no number in its path, but a model with numbered layers "
                "is required"
            )
        number = int(digits[0])
        other = numbered.get(number)
        if other is not None and plain_name(other.name) != name:
            hint = ""
            if isinstance(block_of(model, layer), LoRALinear):
                hint = ", or LoRA experts of form 'block', which have one router for a layer"
            raise ValueError(
                f"layers {other.name} and {layer.name} have the same number {number}, but a model "
                f"with a single stack of layers is required{hint}"
            )
        if other is None or _TRAINED_COPY.search(layer.name):
            numbered[number] = layer
    return numbered


def experts_module(model: nn.Module, layer: RoutedLayer) -> nn.Module:
    """Return the module with a layer's expert stacks: transformers' experts, or our Experts beside
    our Router.

    Raises ValueError for LoRA experts, which have none.
    """
    if layer.is_stock:
        return layer.module
    block = block_of(model, layer)
    if isinstance(block, LoRALinear) or isinstance(block.experts, LoRAExperts):
        raise ValueError(
            f"{layer.name} has LoRA experts, but whole ones are required. Convert them with "
            "moe_runtime.methods.lora.to_moe"
        )
    return block.experts


def plain_name(name: str) -> str:
    """Return a layer's path without the parts of wrappers such as DDP or PEFT."""
    parts = _TRAINED_COPY.sub("", name).split(".")
    name = ".".join(part for part in parts if part not in _WRAPPERS)
    return name.removeprefix("base_model.model.")


def block_of(model: nn.Module, layer: RoutedLayer) -> nn.Module:
    """Return the module that contains a layer, skipping wrappers; for stock experts, the
    MoE block.
    """
    path = layer.name.split(".")
    while path and path[-1] in _WRAPPERS:
        path.pop()
    return model.get_submodule(".".join(path[:-1]))


class OpenCall:
    """Track whether `model` is being called, and with which 2-d attention mask.

    `enter`, if given, is called at the start and returns whether this call counts; `leave` is
    called at the end, also after an error; after Ctrl-C, when the next call starts or at `close`.
    `names` are those of the forward's arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        enter: Callable[[nn.Module], bool] | None = None,
        leave: Callable[[], None] | None = None,
    ):
        self.is_open = False
        self.mask = None
        self._on_enter = enter
        self._on_leave = leave
        self.names = tuple(inspect.signature(model.forward).parameters)
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args, kwargs) -> None:
        # torch does not call hooks after a KeyboardInterrupt, even with always_call
        self._leave()
        mask = self.named(args, kwargs).get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.mask = mask
        self.is_open = self._on_enter is None or self._on_enter(module)

    def _leave(self, *_) -> None:
        self.is_open = False
        self.mask = None
        if self._on_leave is not None:
            self._on_leave()

    def named(self, args: tuple, kwargs: dict) -> dict:
        """Return a call's arguments by name, including the positional ones."""
        return dict(zip(self.names, args, strict=False)) | kwargs

    def close(self) -> None:
        """Remove the hooks, and leave a call in progress."""
        self._leave()
        for handle in self._handles:
            handle.remove()


def token_mask(mask: Tensor | None, rows: int) -> Tensor | None:
    """Return which of `rows` tokens are not padding, [rows] bool, by an attention mask [B, S]; None
    if it does not match.

    With a cache, the mask also covers past tokens, and the new ones come last.
    """
    if mask is None or not rows:
        return None
    length, rest = divmod(rows, len(mask))
    if rest or length > mask.shape[1]:
        return None
    return mask[:, -length:].reshape(rows) != 0


def forget_compiled() -> None:
    """Make compiled code recompile, as torch.compile does not notice hooks that are added later."""
    if has_compiled():
        torch.compiler.reset()


def sizes(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of parameters of a model and of those that process a token; tied weights
    count once.
    """
    total = sum(p.numel() for p in model.parameters())
    idle = 0.0
    for module in model.modules():
        if not isinstance(module, MoE | EWAMLP | LoRALinear):
            continue
        top_k = module.config.top_k
        # of LoRA experts only the pairs, without their common base
        if isinstance(module, LoRAMoE):
            weights = itertools.chain(*module.experts.pairs())
        elif isinstance(module, LoRALinear):
            weights = itertools.chain(*module.pairs())
        else:
            weights = module.experts.parameters()
            if isinstance(module, EWAMLP):
                top_k = 1  # it assigns each token to one expert, whatever top_k is
        unused = 1 - top_k / module.config.num_experts
        idle += unused * sum(weight.numel() for weight in weights)
    return total, round(total - idle)
