"""One of the ranks of tests/methods/esft/test_distributed.py: `dist_esft_stages.py OUT ENGINE
RECIPE METHODS...`.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from papers.esft.recipe import load_recipe
from papers.esft.study import Stages
from tests.support.dist_stages import use_fsdp2

torch.set_num_threads(1)


def main(out: str, engine: str, recipe: str, *names: str) -> None:
    if engine == "fsdp2":
        use_fsdp2()
    said = []

    def say(text: str) -> None:
        said.append(text)
        print(text, flush=True)  # to the log that a failed launch shows

    if engine == "ep":
        recipe = load_recipe(recipe).change(
            esft__ep_size=2, fft__ep_size=2, lora__training__ep_size=2
        )
    stages = Stages(recipe, Path(out, "out"), say=say)
    selection = stages.selection("sums", "gate")
    results = {}
    for name in names:
        results[name] = (
            stages.esft("sums", selection) if name == "esft" else getattr(stages, name)("sums")
        )
    scores = stages.scores("sums").scores
    torch.save(
        {
            "results": results,
            "said": said,
            "gate": scores.gate,
        },
        f"{out}/rank{dist.get_rank()}.pt",
    )
