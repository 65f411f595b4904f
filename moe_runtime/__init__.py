"""Mixture-of-Experts runtime: the public names, each loaded on first use.

Importing this package loads neither torch nor transformers. After it, transformers loads the
folders that our models save: `AutoModelForCausalLM.from_pretrained(folder)`, whichever of the two
packages is imported first.
"""

import importlib.util
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from pkgutil import resolve_name

__version__ = "0.1.0"

_PUBLIC = {
    "MoE": "moe_runtime.modules.moe:MoE",
    "MoEConfig": "moe_runtime.config:MoEConfig",
    "doctor": "moe_runtime.tools.doctor:report",
    "esft": "moe_runtime.methods.esft:",
    "load_quantized": "moe_runtime.hf.dropin.quantize:load_quantized",
    "merge_experts": "moe_runtime.ops.merging:merge_experts",
    "mixing": "moe_runtime.ops.merging:mixing",
    "moe_mlp": "moe_runtime.ops.moe_mlp:moe_mlp",
    "patch": "moe_runtime.hf.dropin.experts:patch",
    "push_to_hub": "moe_runtime.methods.cards:push_to_hub",
    "quantize_experts": "moe_runtime.hf.dropin.quantize:quantize_experts",
    "register": "moe_runtime.hf.dropin.experts:register",
    "register_auto_classes": "moe_runtime.hf.models.modeling:register_auto_classes",
    "route": "moe_runtime.ops.routing:route",
    "save_quantized": "moe_runtime.hf.dropin.quantized_files:save_quantized",
    "shrink": "moe_runtime.methods.shrink:",
    "status": "moe_runtime.hf.dropin.status:status",
    "ultrafuser": "moe_runtime.methods.ultrafuser:",
    "unpatch": "moe_runtime.hf.dropin.experts:unpatch",
    "upit": "moe_runtime.methods.upit:",
    "warmup": "moe_runtime.tools.warmup:warmup",
    "xft": "moe_runtime.methods.xft:",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name in _PUBLIC:
        globals()[name] = resolve_name(_PUBLIC[name])
        return globals()[name]
    if name.startswith("MoeRuntime"):  # a model class, which transformers' table of configs names
        return resolve_name(f"moe_runtime.hf.models.modeling:{name}")
    raise AttributeError(f"module 'moe_runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# transformers has no entry points, so our configs can enter its table only once both packages are
# loaded. When transformers comes second, Python's own finder for one folder,
# transformers/models/auto, adds them: a finder of ours would see every import of the process, and
# importing transformers here would take 0.6 s, or 1.6 s with the table and torch (CPU time, two
# cores, Python 3.11, transformers 5.23). Only names are added: a class is made when a folder of its
# kind is loaded, never halfway through an import of transformers.
_AUTO = "transformers.models.auto.configuration_auto"


class _AutoLoader(SourceFileLoader):
    """Load a file of transformers/models/auto as Python does, then add our configs to the table."""

    def exec_module(self, module) -> None:
        super().exec_module(module)
        if module.__name__ == _AUTO:
            _add_configs(module.CONFIG_MAPPING)


def _add_configs(mapping) -> None:
    """Add our config classes to transformers' lazy table of configs, by name."""
    families = importlib.import_module("moe_runtime.hf.models.families")
    for base in families.FAMILIES:
        model_type = families.PREFIX + base
        mapping._mapping[model_type] = f"MoeRuntime{mapping._mapping[base]}"
        mapping._modules[model_type] = sys.modules[__name__]


def _watch_auto_classes() -> None:
    """Add our configs to transformers' table now if it is loaded, else as soon as it is."""
    if hasattr(sys.modules.get(_AUTO), "CONFIG_MAPPING"):
        _add_configs(sys.modules[_AUTO].CONFIG_MAPPING)
    elif spec := importlib.util.find_spec("transformers"):
        folder = str(Path(*spec.submodule_search_locations, "models", "auto"))
        sys.path_importer_cache[folder] = FileFinder(folder, (_AutoLoader, SOURCE_SUFFIXES))


_watch_auto_classes()
