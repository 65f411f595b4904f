"""moe_runtime.methods.shrink.choice and groups: the official code's choices, and bad numbers."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_runtime.methods.shrink import choice, groups

# of CerebrasResearch/reap at 1970473, SamsungSAILMontreal/ream at 84a3030 and, for cp, the code of
# huggingface/peft#3604 at 938b558, run on `drawn`
OFFICIAL = json.loads(Path(__file__).with_name("official.json").read_text("utf-8"))
E, T, H, K = 12, 40, 6, 3
KEEP = 5


def drawn(seed: float, *shape: int) -> Tensor:
    """Return numbers that are the same with every version of torch."""
    n = torch.Size(shape).numel()
    return torch.sin((torch.arange(n, dtype=torch.float64) + 1) * (1.7 + seed)).mul(2).view(shape)


def sums_of(case: int) -> dict[str, Tensor]:
    """Return a layer's statistics from logits [T, E] and outputs [E, T, H]."""
    logits = drawn(0.37 * case + 0.11, T, E).float()
    outputs = drawn(0.53 * case + 0.29, E, T, H).float() * (1 + torch.arange(E)[:, None, None] / 4)
    idx = logits.topk(K, -1).indices
    gates = logits.softmax(-1)
    chosen = gates.gather(1, idx)
    share = chosen / chosen.sum(-1, keepdim=True)
    norm = outputs.norm(dim=-1).t().gather(1, idx)
    sums = {"seen": torch.tensor(float(T), dtype=torch.float64)}
    values = {"count": torch.ones(T, K), "probability": chosen, "gate_norm": share * norm}
    for name, value in values.items():
        total = torch.zeros(E, dtype=torch.float64)
        sums[name] = total.index_add(0, idx.flatten(), value.double().flatten())
    outputs = outputs.double()
    sums["norm"] = outputs.square().sum((1, 2))
    sums["output"] = outputs.sum(1)
    sums["gated"] = (outputs * gates.t()[:, :, None]).sum(1)
    sums["products"] = torch.einsum("ith,jth->ij", outputs, outputs)
    sums["logits"] = logits.double().t() @ logits.double()
    return sums


def sets(labels: list[int]) -> set[frozenset[int]]:
    """Return the groups that labels describe."""
    return {frozenset(i for i, one in enumerate(labels) if one == label) for label in set(labels)}


@pytest.mark.parametrize("case", ["0", "1", "2"])
def test_the_official_code_s_choices(case):
    official = OFFICIAL[case]
    sums = sums_of(int(case))
    assert choice.saliency(sums, "reap").tolist() == pytest.approx(official["reap"], abs=1e-5)
    assert choice.saliency(sums, "cp").tolist() == pytest.approx(official["cp"], abs=1e-5)
    for by in ("reap", "cp"):
        assert choice.kept(sums, by, KEEP) == official[f"{by}_kept"]
    assert sums["count"].tolist() == official["frequency"]
    for by, name in (("m-smoe", "m_smoe"), ("hc-smoe", "hc_smoe"), ("ream", "ream")):
        found = groups.grouped(sums, by, KEEP, group_size=4)
        assert {frozenset(group.members) for group in found} == sets(official[name])
    leaders = [group.members[0] for group in groups.grouped(sums, "ream", KEEP, group_size=4)]
    assert sorted(leaders) == sorted(official["ream_centroids"])


def test_groups_have_their_leaders_first_and_weights_that_sum_to_one():
    sums = sums_of(0)
    for by in groups.NEEDED:
        found = groups.grouped(sums, by, KEEP)
        assert sorted(e for group in found for e in group.members) == list(range(E))
        for group in found:
            assert sum(group.weights) == pytest.approx(1)
            assert group.weights == sorted(group.weights, reverse=True)


def test_experts_of_equal_saliency_stay_in_order():
    sums = {"count": torch.tensor([1.0, 2, 2, 2], dtype=torch.float64)}
    assert choice.kept(sums, "frequency", 2) == [1, 2]


def test_each_routing_group_keeps_as_many():
    sums = {"count": torch.tensor([9.0, 8, 7, 6, 1, 2, 3, 4], dtype=torch.float64)}
    assert choice.kept(sums, "frequency", 4, groups=2) == [0, 1, 6, 7]
    logits = torch.eye(8, dtype=torch.float64)
    found = groups.grouped(sums | {"logits": logits}, "m-smoe", 4, groups=2)
    assert [group.members[0] for group in found] == [0, 1, 6, 7]


def test_do_acp_maximizes_the_determinant_greedily():
    sums = sums_of(1)
    probability = sums["probability"] / sums["count"]
    acp = probability * (sums["norm"] / T).sqrt()
    assert torch.allclose(choice.saliency(sums, "acp"), acp)
    kernel = (acp[:, None] * acp[None, :]).sqrt() * sums["products"] / T
    kernel = kernel + torch.eye(E) * kernel.diagonal().mean() / KEEP
    chosen: list[int] = []
    for _ in range(KEEP):
        rest = [e for e in range(E) if e not in chosen]
        volumes = [torch.logdet(kernel[[*chosen, e]][:, [*chosen, e]]) for e in rest]
        chosen.append(rest[int(torch.stack(volumes).argmax())])
    assert choice.kept(sums, "do-acp", KEEP) == sorted(chosen)


def test_of_two_equal_experts_do_acp_keeps_one():
    sums = sums_of(2)
    strongest = int(choice.saliency(sums, "acp").argmax())
    twin = (strongest + 1) % E
    for name in ("probability", "count", "norm"):
        sums[name][twin] = sums[name][strongest]
    sums["products"][twin] = sums["products"][strongest]
    sums["products"][:, twin] = sums["products"][:, strongest]
    assert {strongest, twin} <= set(choice.kept(sums, "acp", 2))
    assert not {strongest, twin} <= set(choice.kept(sums, "do-acp", 2))


def test_groups_that_cannot_hold_all_experts():
    with pytest.raises(ValueError, match="5 groups of at most 2 cannot hold 12 experts"):
        groups.grouped(sums_of(0), "ream", KEEP, group_size=2)
    with pytest.raises(ValueError, match="by must be one of"):
        groups.grouped(sums_of(0), "reap", KEEP)
