"""A rank of tests/methods/esft/test_scores.py: scores of data split over ranks, also with FSDP2;
arguments OUT.
"""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_runtime.hf.dropin.parallel import shard_experts
from moe_runtime.methods.esft.runs import score_folder
from moe_runtime.methods.esft.scores import score_experts
from moe_runtime.methods.shrink import StatisticsRecorder
from tests.hf.dropin.test_layers import ids, stock

torch.set_num_threads(1)
SAMPLES = ids(rows=7)
FOLDER = {"n_tokens": 250, "max_length": 16, "packed": False, "batch_size": 3}


def make():
    return stock("mixtral", "eager")


def shared_out(rank: int) -> list[torch.Tensor]:
    """The first rank gets more batches than the second."""
    return list((SAMPLES[:4] if rank == 0 else SAMPLES[4:]).split(1))


@torch.no_grad()
def statistics(parts: list[torch.Tensor], mesh=None) -> dict:
    """Return the sums of moe_runtime.methods.shrink, of experts on all ranks of `mesh` if given."""
    model = stock("mixtral", "moe_runtime")
    if mesh is not None:
        shard_experts(model, mesh)
    with StatisticsRecorder(model) as recorder:
        for part in parts:
            model(input_ids=part)
    return recorder.read({}, reduce=mesh is not None).layers


def main(out: str) -> None:
    rank = int(os.environ["RANK"])
    halves = [SAMPLES[:4], SAMPLES[3:]]
    shrink = statistics([halves[rank]], init_device_mesh("cpu", (2,)))
    model = make()
    whole = score_experts(model, shared_out(rank))
    cut = score_experts(model, shared_out(rank), n_tokens=25)
    score_folder(
        f"{out}/base",
        f"{out}/rows.jsonl",
        f"{out}/folder.json",
        **FOLDER,
    )
    alone = score_experts(model, shared_out(rank) if rank else [])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    split = score_experts(model, shared_out(rank))
    try:
        score_experts(model, shared_out(rank) if rank else [])
    except ValueError as raised:
        error = str(raised)
    found = {"whole": whole, "cut": cut, "alone": alone, "split": split}
    torch.save(
        {name: scores.to_dict() for name, scores in found.items()}
        | {"error": error, "shrink": shrink},
        f"{out}/{rank}.pt",
    )
