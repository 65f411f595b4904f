"""What the studies of all methods share: a stage is made by all processes or by none; rows of one
source or of several.
"""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from moe_runtime.io import rows as data
from papers.engine.recipe import Rows, load_recipe
from papers.engine.stages import _read, split_rows
from papers.xft.recipe import Recipe
from tests.support import dist_leading, esft_study, fuser_study, upit_study, xft_study
from tests.support.dist_launch import launch


@pytest.mark.slow
def test_an_error_of_rank_0_alone_ends_all_processes(tmp_path):
    launch(dist_leading.__file__, 2, tmp_path, str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["merge"].startswith("ValueError: Folder ")
    assert "has no config.json" in first["merge"]
    assert first["full disk"] == "OSError: [Errno 28] No space left on device: 'model.safetensors'"
    assert first["other"] == "KeyError: 'lm_head'"
    assert first["rows"] == first["other"]
    assert "Error: " in first["no place"]
    assert "file" in first["no place"]
    assert first["mark"] == first["full disk"]
    assert first["whole"] == "no error"
    assert first["there"] == [".locks", "stage"]
    for name, said in first.items():
        # an error that only one process has keeps its words everywhere, and its kind where the
        # command line knows it
        assert said == second[name] or second[name].partition(": ")[2] == said.partition(": ")[2], (
            name
        )


CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
FILES = {
    "pairs.jsonl": [{"prompt": f"p{i}", "completion": "c"} for i in range(40)],
    "alpaca.json": [{"instruction": f"q{i}", "input": "x", "output": "c"} for i in range(60)],
    "chats.jsonl": [
        {"messages": [{"role": "user", "content": f"{i}"}, CHAT[1]]} for i in range(30)
    ],
    "calls.jsonl": [
        {
            "messages": [
                {"role": "user", "content": f"call {i}"},
                CHAT[1] | ({"weight": 1} if i % 2 else {}),
            ]
        }
        for i in range(20)
    ],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name, rows in FILES.items():
        if name.endswith(".json"):
            text = json.dumps(rows)
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text)
    return folder


def rows_of(folder: Path, listed: list[dict], **more) -> Rows:
    return Rows.from_dict(
        {"train": [one | {"source": str(folder / one["source"])} for one in listed]} | more
    )


def counts_of(rows) -> dict[str, int]:
    """How many rows are of each file."""
    kinds = [data.one_form(row) for row in rows]
    for row in kinds:
        assert row.keys() in ({"prompt", "completion"}, {"messages"})
    texts = [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in kinds]
    begins = {"p": "pairs", "q": "alpaca", "c": "calls"}
    return dict(Counter(begins.get(text[0], "chats") for text in texts))


@pytest.mark.parametrize(
    "listed, more, counts",
    [
        pytest.param(
            [("pairs.jsonl", None), ("chats.jsonl", None)],
            {},
            {"pairs": 40, "chats": 30},
            id="all-rows",
        ),
        pytest.param(
            [("pairs.jsonl", 1), ("alpaca.json", 3)],
            {},
            {"pairs": 20, "alpaca": 60},
            id="scarcest-decides",
        ),
        pytest.param(
            [("pairs.jsonl", 0.5), ("alpaca.json", 0.25)],
            {},
            {"pairs": 40, "alpaca": 20},
            id="of-any-sum",
        ),
        pytest.param(
            [("pairs.jsonl", 1), ("alpaca.json", 3)],
            {"repeat": True},
            {"pairs": 40, "alpaca": 120},
            id="repeated",
        ),
        pytest.param(
            [("chats.jsonl", 1), ("calls.jsonl", 1), ("pairs.jsonl", 1)],
            {},
            {"chats": 20, "calls": 20, "pairs": 20},
            id="turns-of-other-keys",
        ),
    ],
)
def test_weights_are_counts(sources, listed, more, counts):
    rows = rows_of(
        sources,
        [{"source": name, "weight": weight} for name, weight in listed],
        held_out_rows=6,
        **more,
    )
    whole = _read(rows, "train", {})
    assert counts_of(whole) == counts
    train, held_out = split_rows(rows)
    known = [str(data.one_form(row)) for row in held_out]
    assert len(set(known)) == 6 == len(known)
    assert not {str(data.one_form(row)) for row in train} & set(known)
    assert len(train) == len(whole) - sum(str(data.one_form(row)) in known for row in whole)
    again = split_rows(rows)
    assert [list(part) for part in again] == [list(train), list(held_out)]
    places = [
        i for i, row in enumerate(train) if next(iter(counts_of([row]))) == next(iter(counts))
    ]
    assert min(places) < len(train) / 4, "the files are not mixed"
    assert max(places) > len(train) / 2, "the files are not mixed"


def test_a_source_has_its_own_limit_and_held_out_files_may_be_several(sources):
    listed = [{"source": "pairs.jsonl", "limit": 8}, {"source": "alpaca.json", "limit": 5}]
    held_out = [str(sources / "calls.jsonl"), {"source": str(sources / "pairs.jsonl"), "limit": 12}]
    train, judged = split_rows(rows_of(sources, listed, held_out=held_out), shuffle=True)
    assert counts_of(judged) == {"calls": 20, "pairs": 12}
    # both draw from the shuffled file: the first eight of its rows are among the first twelve
    assert counts_of(train) == {"alpaca": 5}


@pytest.mark.parametrize(
    "value, says",
    [
        ([], "data.train must be a source, or a list of sources, but got []"),
        (5, "data.train must be a source, or a list of sources, but got 5"),
        ([{"source": "a", "weight": -1}], "data.train.0.weight must be greater than 0, but got -1"),
        (["a", {"source": "b", "weight": "much"}], "data.train.1.weight must be a valid number"),
        (["a", {"weight": 1}], "data.train.1.source is missing"),
        (
            ["a", {"source": "b", "weight": 1}],
            "data.train.weight must be given for all sources or for none, but 1 of 2 have one",
        ),
        ([{"source": "a", "columns": 1}], "data.train.0.columns is not a valid key"),
    ],
)
def test_bad_sources_are_one_error(value, says):
    training = {"steps": 1, "learning_rate": 1.0}
    values = {
        "base_model": "x",
        "sft": training,
        "tune": training,
        "mix": training,
        "data": {"train": value},
    }
    with pytest.raises(ValueError) as error:
        Recipe.from_dict(values)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "bad, says",
    [
        ('{"prompt": "p", "solution": "s"}\n', "has the columns prompt, solution. Rename them"),
        ("", "is empty. Pass"),
        (
            '{"prompt": [{"role": "user", '
            '"content": '
            '"p"}], '
            '"completion": '
            '[{"role": '
            '"assistant", '
            '"content": "c"}]}\n',
            "Column prompt is text in one source and turns in another",
        ),
    ],
)
def test_a_bad_file_among_others_is_one_error(sources, tmp_path, bad, says):
    (tmp_path / "bad.jsonl").write_text(bad)
    with pytest.raises(ValueError) as error:
        split_rows(
            rows_of(sources, [{"source": "pairs.jsonl"}, {"source": str(tmp_path / "bad.jsonl")}])
        )
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["xft", "esft", "upit", "ultrafuser"])
def test_every_method_trains_on_several_files(sources, tmp_path, method):
    studies = {"xft": xft_study, "esft": esft_study, "upit": upit_study, "ultrafuser": fuser_study}
    path = studies[method].write_study(tmp_path)
    values = yaml.safe_load(path.read_text())
    name = {"xft": "data", "esft": "sums", "upit": "sums", "ultrafuser": "sums"}[method]
    part = values.get("data") or values.get("tasks", values.get("domains"))[name]
    part["train"] = [
        {"source": part["train"], "weight": 1},
        {"source": str(sources / "pairs.jsonl"), "weight": 2},
    ]
    part["held_out_rows"] = 4
    if method != "ultrafuser":  # whose templates decide
        part["prompt"] = "deepseek" if method != "upit" else "plain"
    if method == "xft":  # a file of chats too
        part["train"].append({"source": str(sources / "chats.jsonl"), "weight": 1})
    if method == "esft":
        part["validation_rows"] = 2
    path.write_text(yaml.safe_dump(values))
    stages = importlib.import_module(f"papers.{method}.study").Stages(
        path, tmp_path / "out", say=lambda text: None
    )
    train = stages.part({"xft": "train", "ultrafuser": "train"}.get(method, f"{name}-train"))
    rows = train.filter(lambda row: row["domain"] == "sums") if method == "ultrafuser" else train
    # 20 sums for 40 pairs, and as many chats; six held out, or four
    assert len(rows) == {"xft": 76, "esft": 54, "upit": 56, "ultrafuser": 56}[method]
    chats = [row for row in train if "That." in stages.tokenizer.decode(row.get("input_ids", []))]
    assert len(chats) > 10 if method == "xft" else not chats


PLACES = {
    "xft": ("data", "data__max_length", "tune"),
    "esft": ("tasks__sums", "max_length", "esft"),
}


@pytest.mark.parametrize("method", PLACES)
@pytest.mark.parametrize(
    "key, value, says",
    [
        ("{0}__train", "none.jsonl", "Data 'none.jsonl' does not exist"),
        ("{0}__held_out_rows", 64, "held_out_rows .64. leaves no training examples: the data has"),
        ("{1}", 2, "No example has a token to train on within max_length .2"),
        ("base_model", "./none", "base_model './none'"),
        (
            "{2}__warmup_steps",
            4,
            "warmup_steps must be below the 4 steps of the training, but got 4",
        ),
        ("{2}__optimizer", "adam", "optimizer must be one of adamw_torch"),
        ("{2}__per_device_batch_size", 3, "per_device_batch_size .3. times 1 processes"),
    ],
)
def test_a_wrong_value_is_one_error_and_leaves_nothing_half_done(
    tmp_path, method, key, value, says
):
    Stages = importlib.import_module(f"papers.{method}.study").Stages
    path = {"xft": xft_study, "esft": esft_study}[method].write_study(tmp_path)
    recipe = load_recipe(Stages.Recipe, path).change(**{key.format(*PLACES[method]): value})
    with pytest.raises(ValueError, match=says):
        stages = Stages(recipe, tmp_path / "out", say=lambda text: None)
        stages.moe() if method == "xft" else stages.scores("sums")
    left = [path.name for path in (tmp_path / "out").glob("*") if path.name != ".locks"]
    for name in left:
        assert name.startswith(("data-", "base-"))
        assert ".tmp" not in name
