"""Small random models of every family, with the family's features: grouped attention, a rope base
of 1e5, biases.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models import swap
from moe_runtime.hf.models.families import FAMILIES, family_of, moe_shape

EVERY = list(FAMILIES)
# features shared with these families are tested once
LIKE_OTHERS = (
    "gemma",
    "olmo3",
    "glm4",
    "cohere2",
    "exaone4",
    "ernie4_5",
    "hunyuan_v1_dense",
    "nemotron",
    "arcee",
)
ALL = [model_type for model_type in EVERY if model_type not in LIKE_OTHERS]
VOCAB = 96
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 1e5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CHANGES = {
    "llama": {"mlp_bias": True},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "exaone4": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "phi3": {"original_max_position_embeddings": 128},
    "gpt_neox": {
        "rope_theta": None,
        "num_key_value_heads": None,
        "rotary_emb_base": 1e5,
    },
}


def dense_config(model_type: str, **changes):
    """Return the config of a tiny stock model; None as a value keeps the family's default."""
    fields = _BASE | _CHANGES.get(model_type, {}) | changes
    return AutoConfig.for_model(
        model_type, **{name: value for name, value in fields.items() if value is not None}
    )


def dense(
    model_type: str = "llama", dtype: torch.dtype = torch.float32, scale: float = 4, **changes
):
    """Return a tiny stock model with large random weights, norms and biases, so that every part
    shows in the logits.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        dense_config(model_type, **changes),
        dtype=dtype,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            else:
                (parameter.add_(torch.randn_like(parameter) / 8))
    return model.eval()


def config_of(model, **settings) -> MoEConfig:
    """Return a MoEConfig of 4 experts, 3 per token, for a dense model."""
    return MoEConfig(
        **moe_shape(family_of(model), model.config), **{"num_experts": 4, "top_k": 3} | settings
    )


def upcycled(model_type: str = "llama", layers=None, changes: dict | None = None, **settings):
    """Return a tiny model after dense_to_moe, with distinct experts."""
    model = dense(model_type, **changes or {})
    swap.dense_to_moe(model, config_of(model, **settings), layers=layers)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name or ".mlp.gate." in name:
                parameter.add_(
                    torch.randn(
                        parameter.shape,
                        generator=generator,
                    ).to(parameter.dtype)
                    / 8
                )
    return model


def batch(rows: int = 2, length: int = 12) -> torch.Tensor:
    """Token ids without padding."""
    return torch.randint(
        3,
        VOCAB,
        (rows, length),
        generator=torch.Generator().manual_seed(2),
    )


@torch.no_grad()
def logits(model, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return the model's logits on `batch()`, in evaluation mode."""
    return model.eval()(batch() if ids is None else ids).logits


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def assert_close(values, expected, tolerance: float) -> None:
    """Assert that each tensor of `expected` is close to the one with the same name in `values`."""
    for name, tensor in expected.items():
        assert distance(values[name], tensor) < tolerance, name


def assert_equal(values, expected) -> None:
    """Assert that each tensor of `expected` equals the one with the same name in `values`."""
    for name, tensor in expected.items():
        assert torch.equal(values[name], tensor), name


def gradients(model) -> dict[str, torch.Tensor]:
    """Copy the existing gradients by parameter name."""
    parameters = model.named_parameters()
    values = {}
    for name, p in parameters:
        if p.grad is not None:
            values[name] = p.grad.clone()
    return values


def trained(model) -> list[torch.nn.Parameter]:
    """The parameters that require a gradient."""
    values = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            values.append(parameter)
    return values


def weights(model) -> dict[str, torch.Tensor]:
    """Copy the parameters by name."""
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = parameter.detach().clone()
    return values


def state(model) -> dict[str, torch.Tensor]:
    """Copy the tensors of the state_dict."""
    values = {}
    for name, tensor in model.state_dict().items():
        values[name] = tensor.clone()
    return values


def contents(folder) -> dict:
    """Return the contents of a folder's files by path."""
    values = {}
    for path in folder.rglob("*"):
        if path.is_file():
            values[path] = path.read_bytes()
    return values
