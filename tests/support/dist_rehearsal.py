"""A rank of tests/methods/test_rehearsal.py: `dist_rehearsal.py OUT ENGINE METHOD RECIPE`."""

import importlib
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.dist_stages import use_fsdp2

torch.set_num_threads(1)


def main(out: str, engine: str, method: str, recipe: str) -> None:
    if engine == "fsdp2":
        use_fsdp2()
    study = importlib.import_module(f"papers.{method}.study")
    results = study.run(
        recipe,
        Path(out),
        say=lambda text: print(text, flush=True),
    )
    torch.save(results, f"{out}/rank{dist.get_rank()}.pt")
