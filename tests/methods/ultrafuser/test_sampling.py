"""moe_runtime.methods.ultrafuser.training: every batch is balanced, every row has its turn, every
process its part.
"""

from collections import Counter
from itertools import islice

import pytest
from torch.utils.data import BatchSampler, DataLoader

from moe_runtime.methods.ultrafuser.training import BalancedSampler, union_sampler

DOMAINS = ["code"] * 7 + ["prose"] * 3 + ["sums"] * 5
SIZES = Counter(DOMAINS)


def named(places):
    return Counter(DOMAINS[place] for place in places)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("per_domain", [1, 2, 4])
def test_every_batch_has_as_many_of_each(per_domain, replacement):
    sampler = BalancedSampler(DOMAINS, rounds=12, replacement=replacement, seed=3)
    batches = list(BatchSampler(sampler, per_domain * len(SIZES), drop_last=False))
    assert len(batches) == 12 // per_domain
    for batch in batches:
        assert named(batch) == dict.fromkeys(SIZES, per_domain)


@pytest.mark.parametrize("epoch, rounds", [("largest", 7), ("smallest", 3)])
def test_an_epoch_is_over_the_domain_asked_for(epoch, rounds):
    sampler = BalancedSampler(DOMAINS, epoch=epoch)
    assert len(sampler) == len(list(sampler)) == 3 * rounds


def test_each_row_comes_once_before_any_comes_twice():
    stream = list(BalancedSampler(DOMAINS, rounds=21, seed=1))
    for domain, size in SIZES.items():
        own = [place for place in stream if DOMAINS[place] == domain]
        passes = [own[i : i + size] for i in range(0, 21, size)]
        assert all(len(set(one)) == len(one) for one in passes)
        assert len({tuple(one) for one in passes if len(one) == size}) > 1  # drawn anew
    counts = Counter(union for union in union_sampler(15, draws=30))
    assert set(counts) == set(range(15)) and set(counts.values()) == {2}


def test_draws_are_uniform_within_a_domain():
    counts = Counter(BalancedSampler(DOMAINS, rounds=6000, replacement=True, seed=5))
    for place, count in counts.items():
        expected = 6000 / SIZES[DOMAINS[place]]
        assert abs(count - expected) < 5 * expected**0.5  # five standard deviations
    # a pass of draws is no permutation
    assert len(set(islice(BalancedSampler(["a"] * 50, replacement=True), 50))) < 45


def test_seed_and_epoch_decide_and_nothing_else():
    sampler = BalancedSampler(DOMAINS, seed=4)
    again = BalancedSampler(DOMAINS, seed=4)
    first = list(sampler)
    assert first == list(sampler) == list(again) != list(BalancedSampler(DOMAINS, seed=5))
    again.set_epoch(1)
    assert list(again) != first
    again.set_epoch(0)
    assert list(again) == first
    # the rows of one domain come in the same order whatever the others have
    longer = BalancedSampler([*DOMAINS, "prose"], seed=4)
    codes = [[place for place in one if place < 7] for one in (first, list(longer))]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("batch_size", [3, 6])
@pytest.mark.parametrize("processes", [1, 2])
def test_each_process_gets_a_balanced_part_of_a_balanced_step(processes, batch_size):
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    def parts():
        for process in range(processes):
            loader = DataLoader(
                range(15),
                batch_size=batch_size,
                sampler=BalancedSampler(DOMAINS, rounds=24, seed=2),
            )
            yield prepare_data_loader(loader, num_processes=processes, process_index=process)

    seen = [[batch.tolist() for batch in loader] for loader in parts()]
    for step in zip(*seen, strict=True):
        assert all(named(batch) == dict.fromkeys(SIZES, batch_size // 3) for batch in step)
    flat = [place for step in zip(*seen, strict=True) for batch in step for place in batch]
    assert flat == list(BalancedSampler(DOMAINS, rounds=24, seed=2))
    for loader, whole in zip(parts(), seen, strict=True):
        assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == whole[2:]
