"""Each table of UpIT from real, very small trainings: what it holds, that nothing is trained twice,
and what it refuses.
"""

import json

import pytest

from papers.engine import domains as upit_routing_study
from papers.engine.compare import compare
from papers.engine.domains import Routed
from papers.upit import tables as upit_reports
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
TABLES = {
    "main": (["base", *OF_FFN, *OF_LORA], "SFT", {}),
    "ckpt": (
        ["SFT", f"{UPIT}, front", f"{UPIT}, back"],
        f"{UPIT}, back",
        {"strategies": ("front", "back")},
    ),
    "pesc": (["LoRA", "PESC", "LoRAMoE_PT", "UpIT (LoRA)"], "LoRA", {}),
    "saved": (["step-2", "step-4", "step-6", "step-8"], "step-8", {}),
    "expand": (
        ["SFT", *(f"{UPIT}, {name}" for name in ("none", "random", "genetic"))],
        f"{UPIT}, genetic",
        {},
    ),
    "router": (
        ["SFT", *(f"{UPIT}, {name}" for name in ("none", "random", "skilled"))],
        f"{UPIT}, skilled",
        {},
    ),
    "experts": (
        [
            "SFT",
            *(
                f"{name} of {E} experts, 1 per token"
                for E in (2, 3)
                for name in ("Upcycle_PT", UPIT)
            ),
        ],
        "SFT",
        {"sizes": (2, 3), "active": (1,)},
    ),
    "data": (
        [
            f"{name}, {share} of the rows"
            for share in ("0.5", "1")
            for name in ("SFT", "Upcycle_PT", "Upcycle_SFT", UPIT)
        ],
        f"{UPIT}, 1 of the rows",
        {"shares": (0.5, 1)},
    ),
    "epochs": (
        [
            f"{name}, {pair}"
            for pair in ("1 + 1", "1 + 0.5")
            for name in ("SFT", "Upcycle_PT", "Upcycle_SFT", UPIT)
        ],
        f"{UPIT}, 1 + 1",
        {"pairs": ((1, 1), (1, 0.5))},
    ),
}


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
    assert [entry.name for entry in report.entries] == names and isinstance(report, UpitReport)
    assert report.reference == reference and report.domains == ("sums", "words")
    # nothing was trained twice
    assert all(times(out)[name] == written for name, written in before.items())
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((out / f"{command}.json").read_text())
    for method, entry in zip(values["methods"], report.entries, strict=True):
        kept = json.loads(
            (out / method["seeds"][0]["folder"]).parent.joinpath("result.json").read_text()
        )
        assert (
            kept["losses"] == entry.results[0].losses
            and method["loss"] == entry.loss == kept["loss"]
        )
        assert method["domains"] == entry.results[0].domains
        assert (
            method["parameters"] == kept["parameters"]
            and method["active_parameters"] == kept["active_parameters"]
        )
    losses = {entry.name: [entry.results[0].losses] for entry in report.entries}
    assert report.comparisons == compare(losses, reference, report.entries[0].results[0].tokens)
    assert [row[0] for row in report.rows()] == names and {len(row) for row in report.rows()} == {
        len(report.columns())
    }
    assert report.summary and "8 of sums, 8 of words" in report.legend()
    assert any("seed 1 of 1" in line for line in said)


@pytest.mark.slow
def test_again_is_instant_and_equal(reports, recipe, out):
    first = reports("main")
    written = times(out)
    second, said = make("main", recipe, out)
    assert (
        times(out) == written and second.rows() == first.rows() and second.summary == first.summary
    )
    assert not any("steps in" in line for line in said)


def test_what_the_methods_of_main_train(reports):
    report = reports("main")
    of = {entry.name: entry.results[0] for entry in report.entries}
    assert (
        of["base"].trained_parameters == 0 < of["Self-MoE (FFN)"].trained_parameters == 2 * 3 * 16
    )
    assert (
        of["SFT"].trained_parameters == of["base"].parameters
        and of["SFT"].steps == of["Upcycle_PT"].steps == 16
    )
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
    assert cells["method"] == UPIT and cells["per token"] == f"{of[UPIT].active_parameters:,}"


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


@pytest.mark.parametrize("command", ["main", "router"])
def test_where_the_domains_tokens_go(command, reports, out):
    reports(command)
    assert (out / f"{command}-routing.png").read_bytes().startswith(b"\x89PNG")
    routing = json.loads((out / f"{command}.json").read_text())["routing"]
    assert list(routing) == (
        [*OF_FFN[1:3], UPIT, *OF_LORA[1:3], "UpIT (LoRA)"]
        if command == "main"
        else [f"{UPIT}, {i}" for i in ("none", "random", "skilled")]
    )
    for found in routing.values():
        (slots,), (distance,) = found["slots"], found["distance_between_domains"]
        assert list(slots) == ["sums", "words"] and distance == pytest.approx(
            upit_routing_study.mean_distance(slots)
        )
        assert found["layers"] == ["0", "1"]


def test_the_ways_to_begin_share_their_experts(reports, recipe, out):
    reports("router")
    made_of = [json.loads(path.read_text())["made_of"] for path in out.glob("upit-*/result.json")]
    whole = [made for made in made_of if made["settings"]["experts"] == recipe.experts.to_dict()]
    inits = {
        made["settings"]["init"]: made["parents"]
        for made in whole
        if made["settings"]["form"] == "ffn"
    }
    assert set(inits) == {"none", "random", "skilled"}
    assert (
        inits["none"][0].startswith("pool-")
        and inits["random"][0].startswith("routers-") != inits["skilled"]
    )


def test_distances_between_domains():
    alike = {"a": [[1, 3], [2, 2]], "b": [[2, 6], [5, 5]]}
    assert (
        upit_routing_study.mean_distance(alike) == 0
        and upit_routing_study.mean_distance({"a": [[1, 3]]}) == 0
    )
    assert upit_routing_study.mean_distance(
        {"a": [[4, 0], [2, 2]], "b": [[0, 4], [1, 3]]}
    ) == pytest.approx((1 + 0.25) / 2)
    assert upit_routing_study.shares({"a": [[1, 3], [0, 0]]})["a"].tolist() == [
        [0.25, 0.75],
        [0, 0],
    ]


@pytest.mark.parametrize(
    "command, options, match",
    [
        pytest.param("table1", {}, "command must be one of main", id="no such table"),
        pytest.param(
            "ckpt",
            {"strategies": ()},
            "strategy must have one or more different values, but got none",
            id="none",
        ),
        pytest.param(
            "experts", {"sizes": (0,)}, "experts must be an integer of at least 1", id="sizes"
        ),
        pytest.param(
            "data",
            {"shares": (0.1, 0.1)},
            "share must have one or more different values, but got 0.1, 0.1",
            id="twice",
        ),
        pytest.param(
            "epochs", {"pairs": ((1, -1),)}, "epochs must be a number above 0", id="epochs"
        ),
        pytest.param("main", {"seeds": 0}, "seeds must be an integer of at least 1", id="no seeds"),
    ],
)
def test_bad_input_trains_nothing(command, options, match, recipe, tmp_path):
    with pytest.raises(ValueError, match=match):
        upit_tables.run(command, recipe, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_nothing_to_expand_is_refused(recipe, tmp_path):
    with pytest.raises(
        ValueError, match="checkpoints.count must be below num_experts .2., as nothing"
    ):
        upit_tables.run("expand", recipe.change(experts__num_experts=2), tmp_path / "out")
    with pytest.raises(
        ValueError, match="num_experts must be at most the 4 checkpoints of ffn.sft.epochs 1"
    ):
        upit_tables.run("expand", recipe.change(experts__num_experts=5), tmp_path / "out")
    assert upit_tables.COMMANDS["expand"].check(
        recipe.change(experts__num_experts=5), strategies=["genetic"]
    )


def test_too_few_rows_are_refused_before_the_first_training(recipe, tmp_path):
    with pytest.raises(ValueError, match="must be at most the 1 steps of ffn.sft on 6 examples"):
        make("data", recipe, tmp_path, shares=(1, 0.1))
    assert kinds(tmp_path) == ["data"]


@pytest.mark.parametrize(
    "command, changes, options, match",
    [
        pytest.param(
            "main",
            {"seed_data__capacity": 1000},
            {},
            r"num_experts is 3 and .* only 13 examples, not "
            "more than the 2000",
            id="capacity",
        ),
        pytest.param(
            "experts",
            {"seed_data__share": 0.1, "seed_data__at_least": 9},
            {"sizes": (8,), "active": (2,)},
            "num_experts is 8 and .* only 9 examples, not more than the 14",
            id="few-seed-rows",
        ),
        pytest.param(
            "expand",
            {"checkpoints__every_epochs": 0.1, "experts__num_experts": 9},
            {"strategies": ("none", "genetic")},
            "num_experts .9. must be at most the 8 steps of ffn.sft on 64 examples",
            id="no-expansion",
        ),
        pytest.param(
            "ckpt",
            {"checkpoints__count": 4, "experts__num_experts": 4},
            {},
            "checkpoints.count must be below the 4 saved checkpoints",
            id="all-checkpoints",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_training(
    command, changes, options, match, recipe, tmp_path
):
    with pytest.raises(ValueError, match=match):
        make(command, recipe.change(**changes), tmp_path, **options)
    assert kinds(tmp_path) in ([], ["data"])


def test_one_domain_has_no_distance():
    one = upit_reports.Routing("t", "s", {"UpIT": [Routed("r", None, {"a": [[1, 3]]}, ["0"], 0.0)]})
    assert one.sentences() == []
    two = upit_reports.Routing(
        "t", "s", {"UpIT": [Routed("r", None, {"a": [[4, 0]], "b": [[0, 4]]}, ["0"], 0.0)]}
    )
    assert "differ by 1.000" in two.sentences()[0]
