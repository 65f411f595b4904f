"""UpIT's perplexities and routers in two processes equal those of one process on every rank, and
are written once.
"""

from pathlib import Path

import pytest
import torch

from tests.support import dist_launch, dist_upit, upit


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the results of one process and of each of two, and their folders: (alone, [rank 0's,
    rank 1's], folders).
    """
    root = tmp_path_factory.mktemp("ranks")
    experts = upit.save_experts(
        root / "experts",
        upit.make_tokenizer(),
        2,
    )
    adapters = upit.save_adapters(
        root / "adapters",
        root / "experts" / "base",
        2,
    )
    alone = dist_upit.run(root / "alone", experts, adapters)
    (root / "two").mkdir()
    arguments = (str(root / name) for name in ("two", "experts", "adapters"))
    dist_launch.launch(
        dist_upit.__file__,
        2,
        root,
        *arguments,
    )
    found = [
        torch.load(
            root / "two" / f"rank{rank}.pt",
            weights_only=False,
        )
        for rank in (0, 1)
    ]
    return alone, found, (root / "alone", root / "two")


def test_perplexities_are_those_of_one_process(both):
    alone, found, _ = both
    for rank in found:
        torch.testing.assert_close(
            rank["perplexity"],
            alone["perplexity"],
            rtol=1e-6,
            atol=0,
        )


@pytest.mark.parametrize("name", ["ffn", "lora"])
def test_routers_are_those_of_one_process(both, name):
    alone, found, folders = both
    for rank in found:
        torch.testing.assert_close(
            rank[name]["vectors"], alone[name]["vectors"], rtol=2e-5, atol=2e-6
        )
        for when in ("before", "after"):
            assert rank[name][when].loss == pytest.approx(
                alone[name][when].loss,
                rel=1e-5,
            )
            assert rank[name][when].sigmoid == pytest.approx(
                alone[name][when].sigmoid,
                rel=1e-5,
            )
    assert torch.equal(
        found[0][name]["vectors"],
        found[1][name]["vectors"],
    )
    one, two = (upit.tensors_of(folder / name) for folder in folders)
    assert one.keys() == two.keys()
    assert one
    for key in one:
        torch.testing.assert_close(
            two[key],
            one[key],
            rtol=1e-4,
            atol=1e-5,
        )


def test_nothing_is_left_beside_the_folders(both):
    assert sorted(path.name for path in Path(both[2][0]).iterdir()) == ["ffn", "lora"]
    assert sorted(path.name for path in both[2][1].iterdir() if path.is_dir()) == [
        "ffn",
        "lora",
    ]
