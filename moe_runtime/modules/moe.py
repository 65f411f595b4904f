"""The Mixture-of-Experts layer that replaces a dense MLP: router, experts and their combination.

The parameter names are those of transformers: `gate.weight`, `experts.gate_up_proj` [E, 2I, H]
(gate first) and `experts.down_proj` [E, H, I]. With the gates xft and nonorm, expert 0 is the
shared one and the router has E - 1 rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.config import MoEConfig
from moe_runtime.modules import frozen, packed, trainable
from moe_runtime.ops import all_to_all, expert_rows
from moe_runtime.ops._torch_private import has_global_hooks
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.balance import balance_loss
from moe_runtime.ops.frozen_mlp import frozen_mlp
from moe_runtime.ops.library import autocast_dtype, wide_dtype
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import run_experts
from moe_runtime.ops.routing import route

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes of experts


class RouterOutput(NamedTuple):
    """Output of a router; the first three fields are in the order of transformers' routers."""

    # [T, E or E - 1], before noise, in the router's dtype; float32 in MoE.records
    router_logits: Tensor
    topk_weight: Tensor  # [T, K] float32
    topk_idx: Tensor  # [T, K] int32
    # [] float32, times its coefficient; None without a balance loss
    balance_loss: Tensor | None

    def widened(self) -> "RouterOutput":
        """Return a copy with logits in float32 or wider."""
        wide = wide_dtype(self.router_logits.dtype)
        return self._replace(router_logits=self.router_logits.to(wide))


class Router(nn.Module):
    """Compute router logits, optional noise in training, and the top-k. `weight` [R, H], R = routed
    experts.

    router="mlp" computes weight_out tanh(weight x), weight_out [R, R]; noisy_gate adds
    eps * (softplus(x noise_weight^T) + noise_epsilon), eps ~ N(0, 1), while training (XFT, official
    code).
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        R = config.num_routed_experts
        H = config.hidden_size
        where = {"dtype": dtype, "device": device}
        self.config = config
        self.weight = nn.Parameter(torch.empty(R, H, **where))
        if config.router == "mlp":
            self.weight_out = nn.Parameter(torch.empty(R, R, **where))
        if config.noisy_gate:
            self.noise_weight = nn.Parameter(torch.empty(R, H, **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights from N(0, initializer_range), as the official XFT code does."""
        for weight in self.parameters():
            weight.normal_(0.0, self.config.initializer_range, generator=generator)

    def forward(
        self, x: Tensor, eps: Tensor | None = None, topk_idx: Tensor | None = None
    ) -> RouterOutput:
        """Route `x` [T, H]; `topk_idx` [T, K] replaces the router's selection, with the router's
        weights for these experts.

        `eps` [T, R] replaces the normal draw of the noise; without noisy_gate it must be None.
        """
        config = self.config
        logits = F.linear(x, self.weight)
        if config.router == "mlp":
            logits = F.linear(torch.tanh(logits), self.weight_out)
        if eps is not None and not (config.noisy_gate and eps.shape == logits.shape):
            raise ValueError(
                f"Expected eps {tuple(logits.shape)} and noisy_gate=True, but eps is "
                f"{tuple(eps.shape)} and noisy_gate is {config.noisy_gate}"
            )
        noise = scale = None
        if config.noisy_gate and (self.training or eps is not None):
            wide = wide_dtype(logits.dtype)
            logits = logits.to(wide)
            scale = F.softplus(F.linear(x, self.noise_weight).to(wide)) + config.noise_epsilon
            eps = torch.randn_like(scale) if eps is None else eps
            noise = eps * scale
        weight, idx = route(logits, config.top_k, config.gate, noise=noise, topk_idx=topk_idx)
        return RouterOutput(logits, weight, idx, balance_loss(config, logits, idx, noise, scale))


class Experts(nn.Module):
    """E stacked MLPs: act(gate x) * (up x), or act(up x) when not gated, then `down`; biases as
    configured.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        E = config.num_experts
        H = config.hidden_size
        I = config.intermediate_size
        where = {"dtype": dtype, "device": device}
        up, rows = ("gate_up_proj", 2 * I) if config.gated else ("up_proj", I)
        self.config = config
        self.up_name = up
        self.register_parameter(up, nn.Parameter(torch.empty(E, rows, H, **where)))
        self.down_proj = nn.Parameter(torch.empty(E, H, I, **where))
        if config.bias:
            self.register_parameter(f"{up}_bias", nn.Parameter(torch.empty(E, rows, **where)))
            self.down_proj_bias = nn.Parameter(torch.empty(E, H, **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights from N(0, initializer_range), set the biases to zero."""
        for name, weight in self.named_parameters():
            if name.endswith("_bias"):
                weight.zero_()
            else:
                (weight.normal_(0.0, self.config.initializer_range, generator=generator))

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
        """Compute sum_k topk_weight[t, k] expert_{topk_idx[t, k]}(x[t]) [T, H] of `x` [T, H],
        `topk_idx`, `topk_weight` [T, K].

        Computes and returns the dtype of the weights or, under autocast, that of autocast.
        """
        return forward_experts(
            self,
            x,
            topk_idx,
            topk_weight,
            self.stacks(),
            self.activation(),
            shared=self.config.shared,
            recompute=self.config.recompute,
        )[0]

    def stacks(self) -> tuple[str, ...]:
        """Return the names of the stacked parameters: up and down projection, then their biases."""
        up = self.up_name
        if self.config.bias:
            return (up, "down_proj", f"{up}_bias", "down_proj_bias")
        return (up, "down_proj")

    def activation(self) -> Activation:
        """Return the activation between the two projections."""
        return Activation(self.config.hidden_act, self.config.gated)


def forward_experts(
    module: nn.Module,
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    names: Sequence[str],
    activation: Activation | None,
    *,
    transposed: bool = False,
    shared: str = "group",
    recompute: bool = False,
    run: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """Run x [T, H] through the experts of `module` (ours or transformers') with `moe_mlp` on its
    parameters.

    `names` are those of its stacks: up [E, 2I or I, H], down [E, H, I] (`transposed`: [E, in,
    out]), then any biases. Trained experts may be stored separately (`modules.trainable`), and
    experts may be distributed over ranks (`ops.all_to_all`). With adapters (`modules.frozen`) or
    packed stacks (`modules.packed`) `frozen_mlp` runs. `run(x, topk_idx, topk_weight, experts)`
    replaces `moe_mlp` or `frozen_mlp`. Returns [T, H] in the dtype of the weights (x's if packed)
    or, under autocast, that of autocast, and the expert_offsets [E + 1] of x's slots.
    """
    adapters = frozen.take(module)
    rows = trainable.trained_parameters(module)
    if adapters and rows:
        raise ValueError(
            f"{type(module).__name__} has both adapters and separately trained experts. Call "
            "fold_rows(model)"
        )
    is_packed = packed.is_packed(module, names[0])
    if is_packed and activation is None:
        raise ValueError(
            f"{type(module).__name__} is packed and has an unknown activation. Call "
            "moe_runtime.patch(model)"
        )
    # each is read once, as reading a parameter may compute it under FSDP, PEFT or tensor
    # parallelism
    tensors = [getattr(module, name) for name in names] + [rows[name] for name in names if rows]
    stacks = [packed.stack_of(module, name, transposed) for name in names[: 2 * is_packed]]
    if not is_packed:
        check_floats(tensors, type(module).__name__)
    if transposed and not is_packed:
        tensors = [tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for tensor in tensors]
    tensors, owners = all_to_all.local_parts(
        tensors, module.__dict__.get(all_to_all.GRADIENTS_OF, "mean")
    )
    dtype = autocast_dtype(x) or (x.dtype if is_packed else tensors[1].dtype)
    is_frozen = is_packed or bool(adapters)
    if not is_frozen:
        tensors = [tensor.to(dtype) for tensor in tensors]
    stacks = [*stacks, *tensors[len(stacks) : len(names)]]
    trained = tensors[len(names) :]
    if is_frozen:
        experts = frozen.experts_of(names, stacks, adapters, activation, dtype, owners)
    elif rows:
        experts = trainable.experts_of(module, stacks, trained, activation)
    else:
        # the shared expert's rows are not the first ones if they come from several ranks
        shared = shared if owners is None else "group"
        experts = expert_rows.Experts(*stacks, activation=activation, shared=shared)

    def run_here(x: Tensor, topk_idx: Tensor | None, topk_weight: Tensor) -> Tensor:
        if run is not None:
            return run(x, topk_idx, topk_weight, experts)
        if is_frozen:
            return frozen_mlp(x, experts, topk_weight, topk_idx)
        return run_experts(x, experts, topk_weight, topk_idx, recompute=recompute)

    if owners is None:
        return run_here(x.to(dtype), topk_idx, topk_weight)
    return all_to_all.run_at_owners(x.to(dtype), topk_idx, topk_weight, owners, run_here)


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a tensor is quantized: of integers, or of a subclass from another package such
    as torchao.
    """
    kind = type(tensor)
    return tensor.dtype not in FLOATS or (
        hasattr(kind, "__tensor_flatten__") and _package(kind) != "torch"
    )


def check_floats(tensors: Sequence[Tensor], name: str) -> None:
    """Raise ValueError unless the parameters of the experts `name` are supported."""
    found = next((tensor for tensor in tensors if is_quantized(tensor)), None)
    if found is not None:
        raise ValueError(
            f"The experts of {name} must be float16, bfloat16, float32 or float64, but are "
            f"{named(found)}. Load them without that quantization, then use "
            "moe_runtime.quantize_experts, or load with moe_runtime.load_quantized"
        )


def named(tensor: Tensor) -> str:
    """Return a tensor's dtype, preceded by its class if that is not from torch."""
    kind = type(tensor)
    if _package(kind) != "torch":
        return f"{kind.__module__}.{kind.__name__} ({tensor.dtype})"
    return str(tensor.dtype)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_plain(module: nn.Module, kind: type) -> bool:
    """Return whether calling `module` only calls kind.forward."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return type(module) is kind and "forward" not in module.__dict__ and not any(hooks)


class MoE(nn.Module):
    """Router and experts, with the inputs and outputs of the dense MLP.

    `records` collects RouterOutputs while it is a list: set it for one forward pass and reset it
    before the backward pass, in which gradient checkpointing runs the layer again. Router and
    experts run as one op if nothing can observe them separately: a linear router without noise, the
    same dtype, no hook, wrapper or subclass on either, and no global hook.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.config = config
        self.gate = Router(config, dtype=dtype, device=device)
        self.experts = Experts(config, dtype=dtype, device=device)
        self.records: list[RouterOutput] | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., H] -> [..., H]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self._is_whole(x):
            return self._forward_whole(x).view_as(hidden_states)
        routing = self.gate(x)
        self._record(routing)
        return self.experts(x, routing.topk_idx, routing.topk_weight).view_as(hidden_states)

    def _is_whole(self, x: Tensor) -> bool:
        config = self.config
        if config.router != "linear" or (config.noisy_gate and self.training):
            return False
        if has_global_hooks() or not (
            is_plain(self.gate, Router) and is_plain(self.experts, Experts)
        ):
            return False
        if all_to_all.is_distributed(self.experts.down_proj) or trainable.split_of(self.experts):
            return False
        if any(is_quantized(getattr(self.experts, name)) for name in self.experts.stacks()):
            return False
        dtypes = {x.dtype, self.gate.weight.dtype, self.experts.down_proj.dtype}
        return len(dtypes) == 1 or autocast_dtype(x) is not None

    def _forward_whole(self, x: Tensor) -> Tensor:
        config = self.config
        dtype = autocast_dtype(x) or x.dtype
        stacks = (getattr(self.experts, name).to(dtype) for name in self.experts.stacks())
        experts = expert_rows.Experts(
            *stacks, activation=self.experts.activation(), shared=config.shared
        )
        weight = self.gate.weight.to(dtype)
        output = moe_layer(
            x.to(dtype), weight, experts, config.top_k, config.gate, recompute=config.recompute
        )
        # with or without records, as checkpointing needs the same graph when it runs the layer
        # again
        loss = balance_loss(config, output.router_logits, output.topk_idx)
        self._record(RouterOutput(*output[1:], loss))
        return output.out

    def _record(self, routing: RouterOutput) -> None:
        if self.records is not None:
            self.records.append(routing.widened())

    def extra_repr(self) -> str:
        """Show the sizes in print(model)."""
        c = self.config
        sizes = f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}"
        return f"num_experts={c.num_experts}, top_k={c.top_k}, gate={c.gate}, {sizes}"
