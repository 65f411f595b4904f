"""The methods, a folder each with the same file names; a method is imported on first use.

    xft           a dense model to MoE, tuned, and merged back to dense      arXiv 2404.15247
    upit          checkpoints of one tuning become specialized experts       arXiv 2410.01610
    esft          only the experts that a task uses are tuned                arXiv 2407.01906
    ultrafuser    specialists fused by a gate, token by token                arXiv 2403.08281
    lora          LoRA experts, which xft and esft compare with and upit uses

In each folder `__init__` is the paper's algorithm and the public names, and the other files are its steps; `folders` does the
same from disk to disk, and `official` reads and writes the released code's files. `recipe` holds the settings of the paper's
experiments, `study` their stages, `tables` their tables.
"""

from importlib import import_module

__all__ = ["esft", "lora", "ultrafuser", "upit", "xft"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
