"""A tiny random model of every family whose experts go through transformers' interface, found in
the installed transformers.

`python -m tests.hf.stock` writes docs/families.md.
"""

import functools
import importlib
import re
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from moe_runtime.hf.dropin.experts import gate_of, is_experts
from tests.hf.stock_sizes import CHANGES, CLASSES, MOE, SMALL, VOCAB

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
_FOLDER = Path(transformers.__file__).parent / "models"
_HEADS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForBlockDiffusion",
    "ForTokenClassification",
    "Backbone",
)
_EXPERTS = re.compile(
    r"^class \w*(Experts|SparseMLP|SparseMoeBlock|MoE|Moe)\(",
    re.MULTILINE,
)
# families with experts of their own kind, and why they cannot go through an interface for stacked
# SwiGLU-like experts
OUTSIDE = {
    "aria": "joined the interface in a later transformers",
    "dbrx": "one matrix for all experts, which the model splits itself",
    "doge": "experts of one row each, looked up in embeddings by product keys",
    "jetmoe": "experts in the attention too, and two products that the model calls separately",
    "llama4": "dense: every expert sees every token, scaled by its gate before the first product",
    "longcat_flash": "ids beyond the stack name experts that compute nothing and pass the token on",
    "nllb_moe": "one module an expert, dropout between them, capacity in the router",
    "step3p7": "stacked SwiGLU experts, but its class does not use the interface",
    "switch_transformers": "one module an expert, capacity in the router",
    "vitpose_backbone": "one linear layer an expert, chosen by dataset and not by a router",
}


@functools.cache
def _sources() -> dict[str, tuple[str, str]]:
    """Module name and text of every family's modeling file that speaks of experts."""
    found = {}
    for path in sorted(_FOLDER.glob("*/modeling_*.py")):
        text = path.read_text("utf-8")
        if "@use_experts_implementation" in text or _EXPERTS.search(text):
            found[path.parent.name] = (path.stem, text)
    return found


# as transformers itself finds out whether a model can be switched: by the modeling file's text
FAMILIES = tuple(
    name for name, (_, text) in _sources().items() if "@use_experts_implementation" in text
)
OTHERS = tuple(name for name in _sources() if name not in FAMILIES)


def model_class(family: str) -> type[PreTrainedModel]:
    """The family's class with a head: the causal language model where there is one."""
    module = importlib.import_module(f"transformers.models.{family}.{_sources()[family][0]}")
    if family in CLASSES:
        return getattr(module, CLASSES[family])
    for head in _HEADS:
        for cls in vars(module).values():
            if (
                isinstance(cls, type)
                and cls.__module__ == module.__name__
                and cls.__name__.endswith(head)
            ):
                return cls
    raise LookupError(f"{family} has no class that ends with one of {_HEADS}; add it to CLASSES")


def small_config(cls: type[PreTrainedConfig], changes: dict) -> PreTrainedConfig:
    """The default config of `cls` with the sizes of `stock_sizes`, sub-configs too."""
    default = cls()
    parts = cls.sub_configs or {}
    fields = {
        name: getattr(cls, name, None)
        for base in cls.__mro__
        for name in getattr(base, "__annotations__", ())
    }
    values = (
        {name: value for name, value in SMALL.items() if fields.get(name) is not None}
        | MOE
        | _layers(default)
    )
    if fields.get("num_key_value_heads") is not None:
        grouped = fields["num_key_value_heads"] != fields.get("num_attention_heads")
        values["num_key_value_heads"] = 2 if grouped else 4
    values = {name: value for name, value in values.items() if name in fields}
    values |= {name: value for name, value in changes.items() if name not in parts}
    for name in parts:
        part = getattr(default, name, None)
        own = dict(changes.get(name, {}))
        if "model_type" in own:  # a part without a default
            part = AutoConfig.for_model(own.pop("model_type"))
        if part is not None:
            values[name] = small_config(type(part), own)
    return cls(**values)


def _layers(default: PreTrainedConfig) -> dict:
    """One layer of each kind in the family's own pattern, in the order of their last layers; dense
    MLPs before sparse ones.
    """
    found = {}
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(default, name, None):
            found[name] = list(dict.fromkeys(reversed(kinds)))[::-1]
    count = max(2, *map(len, found.values())) if found else 2
    padded = {name: [kinds[0]] * (count - len(kinds)) + kinds for name, kinds in found.items()}
    if kinds := sorted(found.get("mlp_layer_types", [])):
        padded["mlp_layer_types"] = kinds + [kinds[-1]] * (count - len(kinds))
    return {"num_hidden_layers": count} | padded


def config_of(family: str) -> PreTrainedConfig:
    return small_config(
        model_class(family).config_class,
        CHANGES.get(family, {}),
    )


def build(family: str) -> PreTrainedModel:
    """A tiny model in evaluation mode, its experts run by transformers' own loop."""
    config = config_of(family)
    torch.manual_seed(0)
    model = model_class(family)(config)
    model.set_experts_implementation("eager")
    return _randomized(model).eval()


@torch.no_grad()
def _randomized(model: nn.Module) -> nn.Module:
    """Weights larger than life and nothing left at a constant, so that every part shows and routing
    depends on the token.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.25)
        else:
            (parameter.add_(torch.randn_like(parameter) / 8))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and "bias" in name:
            buffer.normal_(0, 0.1)
        # DeepSeek-V4: experts by token id, all of them expert 0 before a checkpoint is there
        elif name.endswith("tid2eid"):
            buffer.copy_(
                torch.stack(
                    [torch.randperm(MOE["n_routed_experts"])[: buffer.shape[1]] for _ in buffer]
                )
            )
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    values = {}
    for name, module in model.named_modules():
        if is_experts(module):
            values[name] = module
    return values


def batch(rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Token ids without padding, special ones or images."""
    return {
        "input_ids": torch.randint(
            3, VOCAB - 8, (rows, length), generator=torch.Generator().manual_seed(2)
        )
    }


def run(model: PreTrainedModel, implementation: str, **more):
    """The model's output on `batch()` with its experts run by `implementation`."""
    model.set_experts_implementation(implementation)
    torch.manual_seed(0)  # block diffusion begins with noise
    return model(**batch(), **more)


def _weights(module: nn.Module) -> str:
    """Storage of the up projection as the class has it, in words."""
    rows = "2I" if module.has_gate else "I"
    words = [f"[E, H, {rows}]" if module.is_transposed else f"[E, {rows}, H]"]
    words += ["gate and up interleaved"] if module.has_gate and not module.is_concatenated else []
    words += ["biases"] if module.has_bias else []
    return ", ".join(words)


def _between(module: nn.Module) -> tuple[str, str]:
    """What happens between the products, and which way it runs: in one operator, or composed with
    the class's own code.
    """
    gate = gate_of(module)
    if gate is None:
        own = type(module)._apply_gate.__qualname__ if module.has_gate else "_default_apply_gate"
        gating = "its activation" if own == "_default_apply_gate" else f"`{own}`"
        return gating + ", a norm behind each expert" * module.has_post_expert_norm, "composed"
    if not gate.gated:
        return f"{gate.act}(up)", "one operator"
    limit = "" if gate.limit is None else ", both clamped"
    up = f"(up + {gate.up_offset:g})" if gate.up_offset else "up"
    return f"{gate.act}(gate) * {up}{limit}", "one operator"


@torch.no_grad()
def row(family: str, model: PreTrainedModel) -> str:
    """The model's line in docs/families.md."""
    kinds = set()
    for module in experts_of(model).values():
        kinds.add((_weights(module), *_between(module)))
    output = run(model, "eager", output_router_logits=True)
    also = ["generate"] if model.can_generate() else []
    also += [what for key, what in EXTRAS.items() if output.get(key) is not None]
    cells = [
        f"`{family}`",
        f"`{type(model).__name__}`",
        *("; ".join(words) for words in zip(*sorted(kinds))),
    ]
    return f"| {' | '.join([*cells, ', '.join(also)])} |"


EXTRAS = {"router_logits": "router logits", "aux_loss": "auxiliary loss"}
_TEXT = """\
# MoE families of transformers

This page lists which MoE models of transformers run on moe_runtime, and how. `patch` runs a model's experts, or says why it
cannot:

```python
import moe_runtime
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model")
print(moe_runtime.patch(model), "layers run on moe_runtime")
```

Written by `python -m tests.hf.stock` with transformers {version}; `tests/hf/dropin/test_experts_families.py` checks every line.

## On moe_runtime: {count} families

These are the families whose modeling file decorates an experts class with `@use_experts_implementation`. The tests find them
in the installed transformers, so new families are tested too. For each they build a tiny random model of the class below and
compare our experts with transformers' own loop on the CPU: logits, the gradient of every parameter, the experts' error in
bfloat16, one token, experts without tokens, hooks, deepcopy, `save_pretrained` and `from_pretrained`, and what the last
column names. Multimodal models are tested with text. The Triton kernels have separate tests.

*One operator*: both products, the activation between them and the weighted sum are one call of `moe_mlp`. *Composed*: two
grouped products with the class's own code in between.

The loop of `openai_privacy_filter` always computes in float32; ours computes in the weights' dtype, as `grouped_mm` and
`batched_mm` do. `diffusion_gemma` samples its tokens, so its generation is compared in float64.

| family | class | up projection | between the products | runs | also compared |
|---|---|---|---|---|---|
{rows}

## Not on moe_runtime

The experts of these families do not use transformers' experts interface; `moe_runtime.patch` raises ValueError for them.

| family | why |
|---|---|
{outside}
"""  # noqa: E501


def render() -> str:
    """The text of docs/families.md."""
    return _TEXT.format(
        version=transformers.__version__,
        count=len(FAMILIES),
        rows="\n".join(row(family, build(family)) for family in FAMILIES),
        outside="\n".join(f"| `{family}` | {OUTSIDE[family]} |" for family in OTHERS),
    )


if __name__ == "__main__":
    DOCUMENT.write_text(render(), "utf-8")
