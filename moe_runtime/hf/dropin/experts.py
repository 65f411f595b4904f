"""Experts for transformers' experts interface: `experts_implementation="moe_runtime"` for every
stock MoE model.

    out[t] = sum_k top_k_weights[t, k] norm(down_e(gate_e(up_e x[t]))),   e = top_k_index[t, k]

`norm` is the identity except for models with a norm after each expert. The model's router is kept.
What a class computes between its two products is determined numerically (hf.dropin.gates): if our
kernels support it, `moe_mlp` runs everything; otherwise the class's `_apply_gate` runs between two
grouped products. Parameters keep their names, shapes and layout.
"""

import contextlib
import copy
import functools

from packaging.version import Version
from torch import Tensor, nn

from moe_runtime import backends
from moe_runtime.hf.common.outputs import make_exports_portable
from moe_runtime.hf.dropin import adapters, loading
from moe_runtime.hf.dropin.gates import NAME, gate_of, is_experts, note_gate, stack_names
from moe_runtime.modules import packed, trainable
from moe_runtime.modules.moe import MoE, check_floats, forward_experts
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch, live_weights
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.frozen_rows import FrozenExperts
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.packed import BLOCK, TRANSPOSED

OLDEST = "5.16"  # the first transformers whose interface has everything that this file reads
# parts of a path under which PEFT stores what it adapts or trains a copy of
ADAPTED = {"base_layer", "original_module", "modules_to_save"}
# attribute of an experts module changed by `patch`: its previous implementation
BEFORE = "moe_runtime_replaced"


def register() -> None:
    """Make `experts_implementation="moe_runtime"` known to transformers.

    Afterwards pass it to `from_pretrained` or to `model.set_experts_implementation`.
    `load_state_dict` of transformers' models then also accepts the names that they save, so that
    Trainer resumes experts. Calling it again has no effect.

    Raises:
        ImportError: If transformers is older than 5.16.

    Example:
        >>> moe_runtime.register()
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     "allenai/OLMoE-1B-7B-0924", experts_implementation="moe_runtime"
        ... )
    """
    import transformers

    if Version(transformers.__version__) < Version(OLDEST):
        raise ImportError(
            f"transformers>={OLDEST},<6 is required to replace experts, but "
            f"{transformers.__version__} is installed. Run pip install -U "
            f"'transformers>={OLDEST},<6'"
        )
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)
    with contextlib.suppress(ImportError, AttributeError):  # FP8Experts have a separate interface
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

        ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    make_exports_portable()
    adapters.install()
    loading.install()


def patch(model: nn.Module) -> int:
    """Run the experts of a model on moe_runtime from now on; `unpatch` reverts it.

    In contrast to `set_experts_implementation`, it also works on wrapped models (PEFT, DDP) and
    never silently leaves a model unchanged. Adapters on the expert stacks, added before or after,
    run in the same op without a copy of a stack.

    Args:
        model: A transformers model whose experts use its experts interface, wrapped or not.

    Returns:
        The number of layers that run on moe_runtime, our own MoE layers included.

    Raises:
        ValueError: If no module uses transformers' experts interface, if torchao or another library
            has quantized the experts, or if PEFT's adapters would not compute what they should.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924")
        >>> moe_runtime.patch(model)
        16
    """
    from transformers import PreTrainedModel

    register()
    layers = {}
    ours = 0
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if is_experts(module):
            layers[name] = module
            check_stacks(module, stack_names(module), name)
        elif isinstance(module, MoE):
            ours += 1
            stacks = getattr(module.experts, "stacks", None)  # LoRA experts have none
            check_stacks(module.experts, stacks() if stacks else (), name)
    if not layers and not ours:
        raise ValueError(
            f"{type(model).__name__} has no experts that use transformers' experts interface. Pass "
            "an MoE model of a supported family (see docs/families.md)"
        )
    adapters.check_adapters(model)
    changed = [m for m in layers.values() if m.config._experts_implementation != NAME]
    if changed:
        _separate_configs(model)
    for module in changed:
        setattr(module, BEFORE, module.config._experts_implementation)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation(NAME)
    for name, module in layers.items():
        if ".modules_to_save." in name:  # PEFT's copy of a module has a copy of its config
            module.config._experts_implementation = NAME
        implementation = module.config._experts_implementation
        if implementation != NAME:
            unpatch(model)
            raise ValueError(
                f"experts_implementation of {name or type(model).__name__} cannot be set to "
                f"{NAME!r} and is still {implementation!r}. Load the model through a class of "
                "transformers"
            )
    return len(layers) + ours


def _separate_configs(model: nn.Module) -> None:
    """Give the modules of `model` a copy of their configs, which other models may share."""
    from transformers import PreTrainedConfig

    copies = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def check_stacks(module: nn.Module, names: tuple[str, ...], path: str) -> None:
    """Raise ValueError unless our kernels support the stacks of an experts module: floats, packed,
    or FP8 in blocks of 128.
    """
    if packed.layouts(module):
        return
    if not names or not packed.is_packed(module, names[0]):
        check_floats([getattr(module, name) for name in names], path)
        return
    shape = getattr(module, names[0]).shape
    blocks = getattr(module, "block_size", None)
    fits = blocks is not None and tuple(blocks) == (BLOCK, BLOCK)
    if names[0] == "gate_up_proj":
        fits = fits and shape[1] // 2 % BLOCK == 0
    if not fits or note_gate(module) is None:
        raise ValueError(
            f"FP8 experts {path} {list(shape)} have blocks of {blocks}, but need blocks of "
            f"{BLOCK} x {BLOCK} that do not mix gate and up, and an activation that moe_mlp "
            "supports"
        )


def check_runnable(module: nn.Module, implementation: str | None, path: str = "") -> None:
    """Raise ValueError if the experts `module` is packed and the implementation is not ours."""
    layout = next(iter(packed.layouts(module).values()), None)
    if layout is not None and implementation != NAME:
        form = layout.format.removesuffix(TRANSPOSED)
        which = "the previous implementation" if implementation is None else repr(implementation)
        raise ValueError(
            f"The experts {path or type(module).__name__} are packed in {form}, which {which} "
            f"cannot run: only {NAME!r} can. Load the model without quantization to use another"
        )


def unpatch(model: nn.Module) -> None:
    """Restore the implementation that the experts of a model had before `patch`.

    Experts that `patch` has not changed are left unchanged.

    Args:
        model: A model after `patch`; it may have been wrapped since.

    Raises:
        ValueError: Before anything changes, if the experts are packed (`quantize_experts`,
            `load_quantized`): transformers cannot run those.
    """
    for name, module in model.named_modules():
        if is_experts(module):
            check_runnable(module, None, name)
    for module in model.modules():
        before = module.__dict__.pop(BEFORE, None)
        if before is not None:
            module.config._experts_implementation = before


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute the experts module `self` on `hidden_states` [T, H] with ids and weights [T, K] ->
    [T, H] in the same dtype.

    Computes in the dtype of the weights or, under autocast, in that of autocast; routing weights
    and sums stay float32. A slot with an id outside 0..E-1 (the sentinel of expert parallelism)
    contributes nothing and gets no gradient.
    """
    names = stack_names(self)
    portable = backends.portable()
    if portable is not None and not (
        trainable.split_of(self) is not None or packed.is_packed(self, names[0])
    ):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS[portable](self, hidden_states, top_k_index, top_k_weights)
    gate = gate_of(self)
    out, expert_offsets = forward_experts(
        self,
        hidden_states,
        top_k_index,
        top_k_weights,
        names,
        gate,
        transposed=self.is_transposed,
        run=functools.partial(_composed, self) if gate is None else None,
    )
    counts = getattr(self, "moe_runtime_counts", None)
    if counts is not None:  # a RouterCounter is open
        counts += expert_offsets.diff()
    return out.to(hidden_states.dtype)


def _composed(module: nn.Module, x, topk_idx, topk_weight, experts: ExpertStacks | FrozenExperts):
    """Compute two grouped products with the class's own code between them."""
    E = experts.up.shape[0]
    expert_offsets, row_token, _, slot_row = dispatch(topk_idx, E)
    rows = gather_rows(x, row_token, slot_row)
    z = _product(rows, experts, "up", expert_offsets)
    h = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    y = _product(h.to(x.dtype), experts, "down", expert_offsets)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y).to(x.dtype)
    # a norm may produce values in the rows after the last expert
    return combine(y, live_weights(topk_weight, topk_idx, E), slot_row), expert_offsets


def _product(rows, experts: ExpertStacks | FrozenExperts, name: str, expert_offsets) -> Tensor:
    """Return the grouped product of `rows` [R, in] with the stack `name`, its bias and its low-rank
    terms.
    """
    stack = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias")
    if isinstance(experts, ExpertStacks):
        trained = getattr(experts, f"{name}_trained")
        return grouped_gemm(
            rows, stack, expert_offsets, bias, trainable=experts.trainable, trained=trained
        )
    y = grouped_gemm(rows, stack.data.to(rows.dtype), expert_offsets, bias)
    pair = getattr(experts, f"{name}_lora")
    if pair is None:
        return y
    low = grouped_gemm(rows, pair.a, expert_offsets)
    return y + grouped_gemm(low, pair.b.transpose(1, 2), expert_offsets)
