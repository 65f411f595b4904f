"""A rank of tests/methods/ultrafuser/test_training.py: `dist_fuser.py OUT`; trains both stages."""

import torch
import torch.distributed as dist

from tests.methods.ultrafuser.test_training import make, train, weights

torch.set_num_threads(1)


def main(out: str) -> None:
    for stage in ("freeze_specialists", "train_all"):
        model = getattr(make(), stage)()
        done = train(model, f"{out}/{stage}")
        torch.save(
            {"losses": done.losses, "weights": weights(model)},
            f"{out}/{stage}-{dist.get_rank()}.pt",
        )
