"""Batches with as many rows of every domain: UltraFuser's balanced class sampler.

UltraFuser (arXiv 2403.08281), Algorithm 1:    batch = union over the domains t of S(D_t, n)

S(D, n) are n rows drawn uniformly from a domain. Here each row of a domain comes once before any comes twice, in an order
drawn anew for every pass; `replacement=True` draws each row on its own, as the paper writes it. The rows come in rounds, one
of every domain, so any n rounds in a row are n rows of each: an optimizer step is balanced however it is cut into
processes and micro-batches, and so is a process's own part where the number of domains divides it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from moe_runtime.config import check_choice, check_positive

EPOCHS = ("largest", "smallest")


class BalancedSampler(Sampler[int]):
    """Yields the places of rows in rounds, one row of every domain; the same for the same seed and epoch, in every process.

    `domains` names the domain of each row. `rounds` is how many an epoch has; unless given, as many as the largest
    domain has rows (`epoch` "largest": smaller domains are passed again), or the smallest. A training whose sampler has
    rounds for all of its steps goes on exactly where it was left. Raises ValueError for no rows.
    """

    def __init__(
        self,
        domains: Sequence,
        *,
        rounds: int | None = None,
        epoch: str = "largest",
        replacement: bool = False,
        seed: int = 0,
    ):
        places: dict = {}
        for place, domain in enumerate(domains):
            places.setdefault(domain, []).append(place)
        if not places:
            raise ValueError(f"domains is {list(domains)}; want the domain of at least one row")
        check_choice("epoch", epoch, EPOCHS)
        if rounds is not None:
            check_positive("rounds", rounds)
        self.names = tuple(sorted(places, key=str))
        self.places = [torch.tensor(places[name]) for name in self.names]
        of_epoch = max if epoch == "largest" else min
        self.rounds = rounds or of_epoch(map(len, self.places))
        self.replacement, self.seed, self._epoch = replacement, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw anew from the next pass on; data loaders of accelerate call it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.rounds * len(self.places)

    def __iter__(self) -> Iterator[int]:
        # streams of their own: what one domain draws does not depend on how many rows another has
        streams = [self._stream(number, places) for number, places in enumerate(self.places)]
        for _ in range(self.rounds):
            yield from map(next, streams)

    def _stream(self, number: int, places: torch.Tensor) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self._epoch) * 1_009 + number)
        while True:
            if self.replacement:
                drawn = torch.randint(len(places), (len(places),), generator=generator)
            else:
                drawn = torch.randperm(len(places), generator=generator)
            yield from places[drawn].tolist()


def union_sampler(rows: int, *, seed: int = 0, draws: int | None = None) -> Sampler[int]:
    """Return a sampler of all rows alike, whatever their domain: what training without balance takes.

    Each row comes once before any comes twice, as from BalancedSampler; `draws` is how many an epoch has.
    """
    return BalancedSampler([0] * rows, rounds=draws, seed=seed)
