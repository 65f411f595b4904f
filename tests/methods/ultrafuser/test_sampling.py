"""moe_runtime.methods.ultrafuser.training: every batch is balanced, every example is used, every
process gets its share.
"""

from collections import Counter

import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader

from moe_runtime.methods.ultrafuser.training import BalancedSampler

DOMAINS = ["code"] * 7 + ["prose"] * 3 + ["sums"] * 5
SIZES = Counter(DOMAINS)


def named(places):
    return Counter(DOMAINS[place] for place in places)


@pytest.mark.parametrize("per_domain", [1, 4])
def test_every_batch_has_as_many_of_each(per_domain):
    sampler = BalancedSampler(DOMAINS, rounds=12, seed=3)
    batches = list(BatchSampler(sampler, per_domain * len(SIZES), drop_last=False))
    assert len(batches) == 12 // per_domain
    for batch in batches:
        assert named(batch) == dict.fromkeys(SIZES, per_domain)
    assert len(BalancedSampler(DOMAINS)) == 3 * 7


def test_each_row_comes_once_before_any_comes_twice():
    stream = list(BalancedSampler(DOMAINS, rounds=21, seed=1))
    for domain, size in SIZES.items():
        rows = [place for place in stream if DOMAINS[place] == domain]
        passes = [tuple(rows[i : i + size]) for i in range(0, 21, size)]
        for one in passes:
            assert len(set(one)) == len(one)
        assert len(set(passes[: 21 // size])) > 1  # shuffled again


def test_seed_and_epoch_decide_and_nothing_else():
    sampler = BalancedSampler(DOMAINS, seed=4)
    first = list(sampler)
    assert list(sampler) == first
    assert list(BalancedSampler(DOMAINS, seed=5)) != first
    again = BalancedSampler(DOMAINS, seed=4)
    again.set_epoch(1)
    assert list(again) != first
    again.set_epoch(0)
    assert list(again) == first
    drawn = list(BalancedSampler(DOMAINS, seed=4, replacement=True))
    assert list(map(DOMAINS.__getitem__, drawn)) == list(map(DOMAINS.__getitem__, again))
    assert set(drawn) < set(first)
    # the order of a domain's examples does not depend on the other domains
    longer = list(BalancedSampler([*DOMAINS, "prose"], seed=4))
    assert [place for place in longer if place < 7] == [place for place in first if place < 7]


@pytest.mark.parametrize("processes", [1, 2])
def test_each_process_gets_a_balanced_part_of_a_balanced_step(processes):
    batch_size = 6

    def loader_of(process: int):
        sampler = BalancedSampler(DOMAINS, rounds=24, seed=2)
        loader = DataLoader(range(15), batch_size=batch_size, sampler=sampler)
        return prepare_data_loader(loader, num_processes=processes, process_index=process)

    seen = []
    for process in range(processes):
        batches = [batch.tolist() for batch in loader_of(process)]
        for batch in batches:
            assert named(batch) == dict.fromkeys(SIZES, batch_size // 3)
        rest = skip_first_batches(loader_of(process), 2)
        assert [batch.tolist() for batch in rest] == batches[2:]
        seen.append(batches)
    flat = [place for step in zip(*seen, strict=True) for batch in step for place in batch]
    assert flat == list(BalancedSampler(DOMAINS, rounds=24, seed=2))
