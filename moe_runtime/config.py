"""User settings: frozen dataclasses, checked on construction, that convert to a JSON object."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import NamedTuple

GATES = ("xft", "nonorm", "topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
# expert 0 is shared: it sees every token and has no row in the router
SHARED_GATES = ("xft", "nonorm")
ROUTERS = ("linear", "mlp")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
SHARED_MODES = ("group", "dense")
BALANCE_LOSSES = ("none", "cv2", "switch")
# stock MoE models that an upcycled one may be exported to: hf/models/stock.py
STOCK_FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "flex_olmo",
)


def shown(value: object, width: int = 200) -> str:
    """Format a value for an error message: its repr, truncated to `width` characters."""
    return _truncated(repr(value), width)


def _truncated(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def one_line(text: object, width: int = 500) -> str:
    """Format foreign text for an error message: one line of `width`, control characters escaped."""
    words = " ".join(str(text)[: 4 * width].split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    return _truncated(line, width)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but got {shown(value)}")


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, but got {shown(value)}")


def check_number(name: str, value: float, positive: bool = False) -> None:
    """Raise ValueError unless `value` is a finite number of 0 or more, or above 0 if `positive`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max or (positive and value == 0):
        bounds = "above 0" if positive else "of at least 0"
        raise ValueError(f"{name} must be a number {bounds}, but got {shown(value)}")


def check_fraction(
    name: str, value: float, meaning: str = "", *, zero: bool = True, one: bool = True
) -> None:
    """Raise ValueError unless `value` is a number from 0 to 1, without `zero` or `one` if False."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        if zero:
            bounds = "from 0 to 1" if one else "from 0 to below 1"
        else:
            bounds = "above 0 and at most 1" if one else "above 0 and below 1"
        if meaning:
            bounds = f"{bounds} ({meaning})"
        raise ValueError(f"{name} must be {bounds}, but got {shown(value)}")


def check_shared_rate(shared_rate: float, name: str = "shared_rate") -> None:
    """Raise ValueError unless `shared_rate`, called `name`, is a number from 0 to 1."""
    check_fraction(name, shared_rate, "the shared expert's mixing coefficient")


def check_seed(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer from 0 to 2^63 - 1, as seeds must be."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} must be an integer from 0 to 2^63 - 1, but got {shown(value)}")


def check_bool(name: str, value: bool) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, but got {shown(value)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Configuration of one MoE layer, checked on construction and frozen.

    The counts are those of the XFT paper: they include the shared expert. The defaults are those of
    XFT for DeepSeek-Coder-1.3B (arXiv 2404.15247, Sec. 4.1).

    Attributes:
        hidden_size: Size H of a token's hidden state.
        intermediate_size: Size I of an expert's hidden layer.
        num_experts: Number of experts E, a shared expert included.
        top_k: Experts per token K, a shared expert included; at least 2 with a shared expert.
        gate: How router logits become weights: "xft" and "nonorm" have a shared expert, which is
            expert 0, processes every token and has no row in the router; "topk_softmax",
            "softmax_topk", "softmax_topk_renorm" and "sigmoid_topk" have none.
            `moe_runtime.ops.routing` has the equations.
        router: "linear", or "mlp", W2 tanh(W1 x), the default of XFT's official code.
        hidden_act: Activation: "silu", "gelu", "gelu_tanh", "quick_gelu", "relu" or "relu2".
        gated: Whether an expert computes act(gate(x)) * up(x), and act(up(x)) otherwise.
        bias: Whether the experts' linear layers have biases.
        noisy_gate: Whether to add Shazeer's noise to the router logits while training.
        noise_epsilon: Smallest standard deviation of this noise, above 0.
        balance_loss: "none", "cv2" (Shazeer's squared coefficients of variation) or "switch".
        balance_loss_coef: Weight of the balance loss in the training loss.
        load_quirk: Whether the load of "cv2" compares the noise, and not the noisy logit, with the
            threshold, as XFT's official code does.
        initializer_range: Standard deviation of the normal distribution of initial weights.
        shared: "group" computes the shared expert with the others; "dense" computes it, on a GPU,
            with torch's matrix product.
        recompute: Whether to save only x for the backward pass, and to compute the pre-activations
            again there.

    Raises:
        ValueError: If a field has an invalid value, or two do not fit together.

    Example:
        >>> config = MoEConfig(hidden_size=64, intermediate_size=128, num_experts=8, top_k=6)
        >>> config.num_routed_experts, config.num_routed_per_token
        (7, 5)
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int = 8
    top_k: int = 6
    gate: str = "xft"
    router: str = "linear"  # "mlp" is W2 tanh(W1 x), the official code's default
    hidden_act: str = "silu"
    gated: bool = True  # False: act(up(x)) instead of act(gate(x)) * up(x)
    bias: bool = False
    noisy_gate: bool = False  # Shazeer's noise on the router logits while training
    noise_epsilon: float = 1e-2
    balance_loss: str = "none"
    balance_loss_coef: float = 0.0
    # the official cv2 load compares the noise, not the noisy logit, with the threshold
    load_quirk: bool = False
    initializer_range: float = 0.02
    # "dense": on a GPU, torch's matmul computes the shared expert instead of the experts' kernels
    shared: str = "group"
    recompute: bool = False  # save only x for the backward pass and recompute the pre-activation

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_positive(name, getattr(self, name))
        check_choice("gate", self.gate, GATES)
        check_choice("router", self.router, ROUTERS)
        check_choice("hidden_act", self.hidden_act, ACTIVATIONS)
        check_choice("balance_loss", self.balance_loss, BALANCE_LOSSES)
        check_choice("shared", self.shared, SHARED_MODES)
        if self.shared == "dense" and self.gate not in SHARED_GATES:
            raise ValueError(
                f"shared='dense' requires gate to be one of {', '.join(SHARED_GATES)}, but got "
                f"{self.gate!r}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k must be at most num_experts ({self.num_experts}), but got {self.top_k}"
            )
        if self.gate in SHARED_GATES and self.num_experts > 1 and self.top_k < 2:
            raise ValueError(
                f"top_k must be at least 2 for gate {self.gate!r} (the shared expert and a routed "
                f"one), but got {self.top_k}"
            )
        check_number("balance_loss_coef", self.balance_loss_coef)
        check_number("initializer_range", self.initializer_range)
        check_number("noise_epsilon", self.noise_epsilon, positive=True)
        for name in ("gated", "bias", "noisy_gate", "load_quirk", "recompute"):
            check_bool(name, getattr(self, name))

    def to_dict(self) -> dict:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "MoEConfig":
        """Build the config from the output of `to_dict`.

        Args:
            values: The fields by name; those with a default may be missing.

        Raises:
            ValueError: For other keys, missing ones, or invalid values.
        """
        required = {field.name: field.default is MISSING for field in fields(cls)}
        problem = None
        if not isinstance(values, Mapping):
            problem = f"must be an object, but got {shown(values)}"
        elif unknown := sorted(str(key) for key in values if key not in required):
            problem = f"has no field {one_line(', '.join(unknown), 200)}"
        elif missing := [name for name, must in required.items() if must and name not in values]:
            problem = f"lacks {', '.join(missing)}"
        if problem is not None:
            raise ValueError(f"MoEConfig {problem}. Its fields are {', '.join(sorted(required))}")
        return cls(**values)

    @property
    def has_shared_expert(self) -> bool:
        """Whether expert 0 is shared: it processes every token and has no row in the router."""
        return self.gate in SHARED_GATES

    @property
    def num_routed_experts(self) -> int:
        """Number of routed experts, which is the width of the router logits."""
        return self.num_experts - self.has_shared_expert

    @property
    def num_routed_per_token(self) -> int:
        """Number of experts that the router selects for each token."""
        return self.top_k - self.has_shared_expert


class Layer(NamedTuple):
    """Sizes of one MoE layer; experts and slots include a shared expert, which is expert 0.

    The shared expert processes every token.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    shared: bool = False
    gated: bool = True

    def check(self) -> None:
        """Raise ValueError for invalid sizes."""
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_positive(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k must be at most num_experts ({self.num_experts}), but got {self.top_k}"
            )
