"""A rank of tests/methods/upit/test_distributed.py: `dist_upit.py OUT EXPERTS ADAPTERS`."""

from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime.hf.training import ranks
from moe_runtime.methods.upit.buckets import perplexities
from moe_runtime.methods.upit.router import init_router
from tests.support import upit

torch.set_num_threads(1)
SETTINGS = {"learning_rate": 3e-3, "steps": 2, "batch_size": 4}


def run(out: Path, experts: list[Path], adapters: list[Path]) -> dict:
    """Compute perplexities of both kinds and train a router of each, in `out`, with one process or
    several.
    """
    tokenizer = ranks.load_tokenizer(experts[0])
    rows = upit.make_rows(8, spread=1)
    base = experts[0].parent / "base"
    odd = upit.make_rows(7)
    found = {
        "perplexity": perplexities(
            [*experts, *adapters],
            odd,
            tokenizer,
            base=base,
        )
    }
    for name, expert in {"ffn": experts[0], "lora": adapters[0]}.items():
        routed = init_router(
            expert,
            rows,
            tokenizer,
            folder=out / name,
            base=base,
            **SETTINGS,
        )
        found[name] = {
            "vectors": routed.vectors,
            "before": routed.before,
            "after": routed.after,
        }
    return found


def main(out: str, experts: str, adapters: str) -> None:
    folders = []
    for folder, pattern in ((experts, "expert-*"), (adapters, "adapter-*")):
        folders.append(sorted(Path(folder).glob(pattern)))
    torch.save(run(Path(out), *folders), f"{out}/rank{dist.get_rank()}.pt")
