"""Mixture-of-Experts runtime: the public names, each loaded on first use.

Importing this package loads neither torch nor transformers. Once transformers' auto classes are loaded, before or after
it, they know our saved folders: `AutoModelForCausalLM.from_pretrained(folder)` (moe_runtime.hf.models.modeling).
"""

from pkgutil import resolve_name

from moe_runtime.hf.models import modeling

__version__ = "0.1.0"

_PUBLIC = {
    "MoE": "moe_runtime.modules.moe:MoE",
    "MoEConfig": "moe_runtime.config:MoEConfig",
    "doctor": "moe_runtime.tools.doctor:report",
    "esft": "moe_runtime.methods.esft:",
    "merge_experts": "moe_runtime.ops.merging:merge_experts",
    "mixing": "moe_runtime.ops.merging:mixing",
    "moe_mlp": "moe_runtime.ops.moe_mlp:moe_mlp",
    "patch": "moe_runtime.hf.dropin.experts:patch",
    "register": "moe_runtime.hf.dropin.experts:register",
    "register_auto_classes": "moe_runtime.hf.models.modeling:register_auto_classes",
    "route": "moe_runtime.ops.routing:route",
    "ultrafuser": "moe_runtime.methods.ultrafuser:",
    "unpatch": "moe_runtime.hf.dropin.experts:unpatch",
    "upit": "moe_runtime.methods.upit:",
    "xft": "moe_runtime.methods.xft:",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moe_runtime' has no attribute {name!r}")
    globals()[name] = resolve_name(_PUBLIC[name])
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


modeling.register_when_imported()
