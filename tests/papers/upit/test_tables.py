"""Each table of UpIT from real, very small trainings: what it holds, that nothing is trained twice,
and what it refuses.
"""

import json

import pytest

from papers.engine import domains
from papers.engine.compare import compare
from papers.upit import tables as upit_tables
from papers.upit.recipe import load_recipe
from papers.upit.tables import UpitReport
from tests.support.dist_launch import times
from tests.support.upit_study import write_study

pytestmark = pytest.mark.usefixtures("quick")
UPIT = "UpIT (FFN)"
OF_FFN = ["SFT", "Upcycle_PT", "Upcycle_SFT", "Self-MoE (FFN)", UPIT]
OF_LORA = ["LoRA", "LoRAMoE_PT", "LoRAMoE_SFT", "Self-MoE (LoRA)", "UpIT (LoRA)"]
# name -> methods, reference, options
TABLES = {"main": (["base", *OF_FFN, *OF_LORA], "SFT", {})}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return load_recipe(write_study(tmp_path_factory.mktemp("study")))


def make(command, recipe, out, **options):
    said = []
    return upit_tables.run(command, recipe, out, say=said.append, **{"seeds": 1} | options), said


@pytest.fixture(scope="module")
def reports(recipe, out):
    """The report of a table, as it was made first."""
    made = {}

    def report(command):
        if command not in made:
            made[command], _ = make(command, recipe, out, **TABLES[command][2])
        return made[command]

    return report


def kinds(out):
    """The kinds of stages that are there."""
    return sorted({path.name.partition("-")[0] for path in out.glob("*") if path.name != ".locks"})


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_a_table(command, recipe, out):
    names, reference, options = TABLES[command]
    before = times(out)
    report, said = make(command, recipe, out, **options)
    assert [entry.name for entry in report.entries] == names
    assert isinstance(report, UpitReport)
    assert report.reference == reference
    assert report.domains == ("sums", "words")
    # nothing was trained twice
    for name, written in before.items():
        assert times(out)[name] == written
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((out / f"{command}.json").read_text())
    for method, entry in zip(values["methods"], report.entries, strict=True):
        kept = json.loads(
            (out / method["seeds"][0]["folder"]).parent.joinpath("result.json").read_text()
        )
        assert kept["losses"] == entry.results[0].losses
        assert method["loss"] == entry.loss == kept["loss"]
        assert method["domains"] == entry.results[0].domains
        assert method["parameters"] == kept["parameters"]
        assert method["active_parameters"] == kept["active_parameters"]
    losses = {entry.name: [entry.results[0].losses] for entry in report.entries}
    assert report.comparisons == compare(losses, reference, report.entries[0].results[0].tokens)
    assert [row[0] for row in report.rows()] == names
    assert {len(row) for row in report.rows()} == {len(report.columns())}
    assert report.summary
    assert "8 of sums, 8 of words" in report.legend()
    assert any("seed 1 of 1" in line for line in said)


@pytest.mark.slow
def test_again_is_instant_and_equal(reports, recipe, out):
    first = reports("main")
    written = times(out)
    second, said = make("main", recipe, out)
    assert times(out) == written
    assert second.rows() == first.rows()
    assert second.summary == first.summary
    for line in said:
        assert "steps in" not in line


def test_what_the_methods_of_main_train(reports):
    report = reports("main")
    of = {entry.name: entry.results[0] for entry in report.entries}
    assert (
        of["base"].trained_parameters == 0 < of["Self-MoE (FFN)"].trained_parameters == 2 * 3 * 16
    )
    assert of["SFT"].trained_parameters == of["base"].parameters
    assert of["SFT"].steps == of["Upcycle_PT"].steps == 16
    assert {of[name].steps for name in (*OF_FFN[2:], *OF_LORA[2:])} == {8}
    # 3 experts of which 2 see a token; routers of 3 x 16 in both layers
    mlps = 2 * 3 * 16 * 24
    routers = 2 * 3 * 16
    assert of[UPIT].parameters == of["base"].parameters + 2 * mlps + routers
    assert of[UPIT].active_parameters == of["base"].parameters + mlps + routers
    pairs = of["LoRA"].trained_parameters
    assert (
        of["UpIT (LoRA)"].trained_parameters
        == 3 * pairs + routers
        == of["LoRAMoE_PT"].trained_parameters
    )
    assert of["UpIT (LoRA)"].active_parameters == of["base"].parameters + 2 * pairs + routers
    cells = dict(zip([name for name, _ in report.columns()], report.rows()[5], strict=True))
    assert cells["method"] == UPIT
    assert cells["per token"] == f"{of[UPIT].active_parameters:,}"


def test_each_kind_is_compared_with_its_own(reports):
    report = reports("main")
    said = [line.partition(":")[0] for line in report.summary]
    against = [f"{name} against {UPIT}" for name in OF_FFN[:-1]]
    against += [f"{name} against UpIT (LoRA)" for name in OF_LORA[:-1]]
    assert [line.partition(":")[0] for line in report.summary[:8]] == against
    assert said[8:14] == [
        "Upcycle_PT",
        "Upcycle_SFT",
        UPIT,
        "LoRAMoE_PT",
        "LoRAMoE_SFT",
        "UpIT (LoRA)",
    ]


def test_where_the_domains_tokens_go(reports, out):
    reports("main")
    assert (out / "main-routing.png").read_bytes().startswith(b"\x89PNG")
    routing = json.loads((out / "main.json").read_text())["routing"]
    assert list(routing) == [*OF_FFN[1:3], UPIT, *OF_LORA[1:3], "UpIT (LoRA)"]
    for values in routing.values():
        (slots,) = values["slots"]
        (distance,) = values["distance_between_domains"]
        assert list(slots) == ["sums", "words"]
        assert distance == pytest.approx(domains.mean_distance(slots))
        assert values["layers"] == ["0", "1"]


def test_distances_between_domains():
    alike = {"a": [[1, 3], [2, 2]], "b": [[2, 6], [5, 5]]}
    assert domains.mean_distance(alike) == 0
    assert domains.mean_distance({"a": [[1, 3]]}) == 0
    assert domains.mean_distance({"a": [[4, 0], [2, 2]], "b": [[0, 4], [1, 3]]}) == pytest.approx(
        (1 + 0.25) / 2
    )
    assert domains.shares({"a": [[1, 3], [0, 0]]})["a"].tolist() == [[0.25, 0.75], [0, 0]]


@pytest.mark.parametrize(
    "command, options, match",
    [
        ("table1", {}, "command must be one of main"),
        ("main", {"seeds": 0}, "seeds must be an integer of at least 1"),
    ],
)
def test_bad_input_trains_nothing(command, options, match, recipe, tmp_path):
    with pytest.raises(ValueError, match=match):
        upit_tables.run(command, recipe, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_too_small_buckets_are_refused_before_the_first_training(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"num_experts is 3 and .* only 13 examples"):
        make("main", recipe.change(seed_data__capacity=1000), tmp_path)
    assert kinds(tmp_path) == ["data"]
