"""The Mixture-of-Experts layer that replaces a dense MLP: router, experts and their combination.

The parameter names are those of transformers: `gate.weight`, `experts.gate_up_proj` [E, 2I, H]
(gate first) and `experts.down_proj` [E, H, I]. With the gates xft and nonorm, expert 0 is the
shared one and the router has E - 1 rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

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
    """Compute router logits, optional noise in training, and the top-k.

    `weight` is [R, H] for R routed experts. router="mlp" computes weight_out tanh(weight x),
    weight_out [R, R]; noisy_gate adds eps * (softplus(x noise_weight^T) + noise_epsilon), eps ~
    N(0, 1), while training (XFT, official code).
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
        where: dict[str, Any] = {"dtype": dtype, "device": device}
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
        self,
        x: Tensor,
        eps: Tensor | None = None,
        topk_idx: Tensor | None = None,
    ) -> RouterOutput:
        """Route `x` [T, H].

        `topk_idx` [T, K] replaces the router's selection, with its weights for these experts. `eps`
        [T, R] replaces the normal draw of the noise; without noisy_gate it must be None.
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
        noise = None
        scale = None
        if config.noisy_gate and (self.training or eps is not None):
            wide = wide_dtype(logits.dtype)
            logits = logits.to(wide)
            scale = F.softplus(F.linear(x, self.noise_weight).to(wide)) + config.noise_epsilon
            if eps is None:
                eps = torch.randn_like(scale)
            noise = eps * scale
        weight, idx = route(
            logits,
            config.top_k,
            config.gate,
            noise=noise,
            topk_idx=topk_idx,
        )
        return RouterOutput(
            logits,
            weight,
            idx,
            balance_loss(
                config,
                logits,
                idx,
                noise,
                scale,
            ),
        )


class Experts(nn.Module):
    """E stacked MLPs: act(gate x) * (up x), or act(up x) when not gated, then `down`."""

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
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        up = "gate_up_proj" if config.gated else "up_proj"
        rows = I * (1 + config.gated)
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
                weight.normal_(0.0, self.config.initializer_range, generator=generator)

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weight: Tensor,
    ) -> Tensor:
        """Compute sum_k topk_weight[t, k] expert_{topk_idx[t, k]}(x[t]) [T, H] of `x` [T, H].

        `topk_idx` and `topk_weight` are [T, K]. Computes and returns the dtype of the weights or,
        under autocast, that of autocast.
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
    """Run x [T, H] through the experts of `module`, ours or transformers', with `moe_mlp`.

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
    tensors: list[Any] = [getattr(module, name) for name in names]
    if rows:
        tensors += [rows[name] for name in names]
    packed_stacks = []
    if is_packed:
        packed_stacks = [packed.stack_of(module, name, transposed) for name in names[:2]]
    else:
        check_floats(tensors, type(module).__name__)
        if transposed:
            tensors = [t.transpose(1, 2) if t.dim() == 3 else t for t in tensors]
    tensors, owners = _local_parts(module, tensors)
    if is_packed:
        dtype = autocast_dtype(x) or x.dtype
        tensors = [*packed_stacks, *tensors[2:]]
    else:
        dtype = autocast_dtype(x) or tensors[1].dtype
    is_frozen = is_packed or bool(adapters)
    if not is_frozen:
        tensors = [tensor.to(dtype) for tensor in tensors]
    stacks = tensors[: len(names)]
    experts: Any
    if is_frozen:
        experts = frozen.experts_of(
            names,
            stacks,
            adapters,
            activation,
            dtype,
            owners,
        )
    elif rows:
        experts = trainable.experts_of(
            module,
            stacks,
            tensors[len(names) :],
            activation,
        )
    else:
        # the shared expert's rows are not the first ones if they come from several ranks
        if owners is not None:
            shared = "group"
        experts = expert_rows.ExpertStacks(*stacks)._replace(
            activation=cast(Activation, activation), shared=shared
        )

    def run_here(x: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> tuple[Tensor, Tensor]:
        if run is not None:
            return run(x, topk_idx, topk_weight, experts)
        if is_frozen:
            return frozen_mlp(x, experts, topk_weight, topk_idx)
        return run_experts(
            x,
            experts,
            topk_weight,
            topk_idx,
            recompute=recompute,
        )

    if owners is None:
        return run_here(x.to(dtype), topk_idx, topk_weight)
    return all_to_all.run_at_owners(
        x.to(dtype),
        topk_idx,
        topk_weight,
        owners,
        run_here,
    )


def _local_parts(module: nn.Module, tensors: list) -> tuple[list[Any], all_to_all.Owners | None]:
    gradients = module.__dict__.get(all_to_all.GRADIENTS_OF, "mean")
    return all_to_all.local_parts(tensors, gradients)


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a tensor is quantized: of integers, or of a subclass such as torchao's."""
    kind = type(tensor)
    is_foreign = hasattr(kind, "__tensor_flatten__") and _package(kind) != "torch"
    return tensor.dtype not in FLOATS or is_foreign


def check_floats(tensors: Sequence[Tensor], name: str) -> None:
    """Raise ValueError unless the parameters of the experts `name` are supported."""
    for tensor in tensors:
        if is_quantized(tensor):
            raise ValueError(
                f"The experts of {name} must be float16, bfloat16, float32 or float64, but are "
                f"{named(tensor)}. Load them without that quantization, then use "
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

    Router and experts run as one op if nothing can observe them separately: a linear router without
    noise, the same dtype, no hook, wrapper or subclass on either, and no global hook.

    Args:
        config: Sizes, gate, router and balance loss.
        dtype: Dtype of all parameters; torch's default if None.
        device: Device of all parameters; torch's default if None.

    Attributes:
        gate: The router.
        experts: The expert stacks `gate_up_proj` [E, 2I, H] ([E, I, H] if not gated) and
            `down_proj` [E, H, I].
        records: A list collects RouterOutputs. Set it for one forward pass and reset it to None
            before the backward pass, in which gradient checkpointing runs the layer again.

    Example:
        >>> layer = MoE(MoEConfig(hidden_size=64, intermediate_size=128))
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
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
        """Compute the layer.

        Args:
            hidden_states: [..., H], in the parameters' dtype or under autocast.

        Returns:
            [..., H], in the dtype of the input.
        """
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
        if has_global_hooks():
            return False
        if not is_plain(self.gate, Router) or not is_plain(self.experts, Experts):
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
        stacks = [getattr(self.experts, name).to(dtype) for name in self.experts.stacks()]
        experts = expert_rows.ExpertStacks(*stacks)._replace(
            activation=self.experts.activation(), shared=config.shared
        )
        weight = self.gate.weight.to(dtype)
        output = moe_layer(
            x.to(dtype),
            weight,
            experts,
            config.top_k,
            config.gate,
            recompute=config.recompute,
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
        return (
            f"num_experts={c.num_experts}, top_k={c.top_k}, gate={c.gate}, "
            f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}"
        )
