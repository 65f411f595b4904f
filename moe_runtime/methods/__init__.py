"""The methods, one folder each, with the same file names; imported on first use.

    xft           upcycle a dense model to MoE, tune it, merge it back           arXiv 2404.15247
    upit          turn checkpoints of one tuning run into specialized experts    arXiv 2410.01610
    esft          tune only the experts that a task uses                         arXiv 2407.01906
    shrink        prune or merge the experts of a MoE model, or make it dense    several papers
    ultrafuser    fuse specialists with a gate, token by token                   arXiv 2403.08281
    lora          LoRA experts: part of upit, and a baseline of xft and esft

In each folder `__init__` holds the paper's algorithm and the public names, and the other files its
steps; `folders` and `runs` do the same from disk to disk, and `official` reads and writes the
released code's files.
"""

from importlib import import_module

from moe_runtime.methods import cards as _cards  # noqa: F401 - registers the methods' papers
from moe_runtime.methods import prompts as _prompts  # noqa: F401 - registers their formats

__all__ = ["esft", "lora", "shrink", "ultrafuser", "upit", "xft"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
