"""One of the ranks of tests/methods/ultrafuser/test_training.py: `dist_fuser.py RENDEZVOUS OUT`; trains both stages."""

import sys

import torch
import torch.distributed as dist

from tests.methods.ultrafuser.test_training import make, train, weights
from tests.support.dist_launch import leave, start

torch.set_num_threads(1)


def main(rendezvous: str, out: str) -> None:
    start(rendezvous)
    for stage in ("freeze_specialists", "train_all"):
        model = getattr(make(), stage)()
        done = train(model, f"{out}/{stage}")
        torch.save({"losses": done.losses, "weights": weights(model)}, f"{out}/{stage}-{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
