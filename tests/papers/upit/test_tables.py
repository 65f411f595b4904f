"""Each table of UpIT from real, very small trainings: its contents, that nothing is trained twice,
and refusals.
"""

import functools

import pytest

from moe_runtime.io.files import read_json
from papers.upit import tables as upit_tables
from papers.upit.recipe import load_recipe
from papers.upit.tables import UpitReport
from tests.papers.reports import assert_compared, assert_made_once, entries_of, made_by, rows_of
from tests.support.upit_study import write_study

pytestmark = pytest.mark.usefixtures("quick")
UPIT = "UpIT (FFN)"
OF_FFN = [
    "SFT",
    "Upcycle_PT",
    "Upcycle_SFT",
    "Self-MoE (FFN)",
    UPIT,
]
OF_LORA = ["LoRA", "LoRAMoE_PT", "LoRAMoE_SFT", "Self-MoE (LoRA)", "UpIT (LoRA)"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return load_recipe(write_study(tmp_path_factory.mktemp("study")))


make = functools.partial(made_by, upit_tables.run)


NAMES = ["base", *OF_FFN, *OF_LORA]


@pytest.fixture(scope="module")
def main(recipe, out):
    """The table of all methods, which runs first."""
    report, _ = make("main", recipe, out)
    return report


@pytest.mark.slow
def test_main(main, recipe, out):
    assert entries_of(main) == NAMES
    assert isinstance(main, UpitReport)
    assert main.reference == "SFT"
    assert main.domains == ("sums", "words")
    assert (out / "main.png").read_bytes().startswith(b"\x89PNG")
    values = read_json(out / "main.json")
    for method, entry in zip(values["methods"], main.entries, strict=True):
        folder = (out / method["seeds"][0]["folder"]).parent
        stored = read_json(folder / "result.json")
        assert stored["losses"] == entry.results[0].losses
        assert method["loss"] == entry.loss == stored["loss"]
        assert method["domains"] == entry.results[0].domains
        for count in ("parameters", "active_parameters"):
            assert method[count] == stored[count]
    assert_compared(main)
    assert list(rows_of(main)) == NAMES
    assert "8 of sums, 8 of words" in main.legend()
    assert_made_once(make, main, recipe, out)


def test_what_the_methods_of_main_train(main):
    of = {entry.name: entry.results[0] for entry in main.entries}
    base = of["base"].parameters
    routers = 2 * 3 * 16  # of 3 x 16 in both layers
    assert of["base"].trained_parameters == 0
    assert of["Self-MoE (FFN)"].trained_parameters == routers
    assert of["SFT"].trained_parameters == base
    assert of["SFT"].steps == of["Upcycle_PT"].steps == 16
    # 3 experts, of which each token uses 2
    mlps = 2 * 3 * 16 * 24
    assert of[UPIT].parameters == base + 2 * mlps + routers
    assert of[UPIT].active_parameters == base + mlps + routers


def test_too_small_buckets_are_refused_before_the_first_training(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"num_experts is 3 and .* only 13 examples"):
        make(
            "main",
            recipe.change(seed_data__capacity=1000),
            tmp_path,
        )
    for path in tmp_path.glob("[!.]*"):
        assert path.name.startswith("data-")
