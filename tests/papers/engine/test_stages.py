"""Common parts of the studies of all methods: a stage succeeds in all processes or in none;
examples of one source or of several.
"""

import importlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from moe_runtime.io import rows as data
from moe_runtime.io.files import read_json
from papers.engine.recipe import DataSplits, load_recipe
from papers.engine.stages import _read, contents_of, split_rows
from papers.xft.recipe import Recipe
from tests.support import dist_leading, esft_study, xft_study
from tests.support.dist_launch import launch


@pytest.mark.slow
def test_an_error_of_rank_0_alone_ends_all_processes(tmp_path):
    launch(
        dist_leading.__file__,
        2,
        tmp_path,
        str(tmp_path),
    )
    first = read_json(tmp_path / "rank0.json")
    second = read_json(tmp_path / "rank1.json")
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
    for name, message in first.items():
        # an error in a single process is raised everywhere with the same message, and with the same
        # type if the command line handles it
        if second[name] != message:
            assert second[name].partition(": ")[2] == message.partition(": ")[2], name


def test_stages_depend_on_contents_not_on_times_or_places(tmp_path):
    folder = tmp_path / "base"
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights = folder / "model/weights"
    weights.write_bytes(b"12")
    before = contents_of(folder)
    assert set(before) == {"config.json", "model/weights"}
    other = shutil.copytree(folder, tmp_path / "other", copy_function=shutil.copyfile)
    assert contents_of(other) == before
    weights.write_bytes(b"13")
    assert contents_of(folder) != before
    assert contents_of(weights) != contents_of(folder / "config.json")
    assert contents_of("openai-community/gpt2") == "openai-community/gpt2"


def chat(user: str, **more) -> dict:
    """Return an example with one exchange."""
    answer = {"role": "assistant", "content": "That."} | more
    return {"messages": [{"role": "user", "content": user}, answer]}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder with files in four formats; the first letter of a prompt identifies its file."""
    folder = tmp_path_factory.mktemp("sources")
    pairs = [{"prompt": f"p{i}", "completion": "c"} for i in range(40)]
    alpaca = [
        {
            "instruction": f"a{i}",
            "input": "x",
            "output": "c",
        }
        for i in range(60)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    write_rows(folder / "turns.jsonl", [chat(f"t{i}") for i in range(30)])
    write_rows(
        folder / "calls.jsonl", [chat(f"c{i}", **{"weight": 1} if i % 2 else {}) for i in range(20)]
    )
    return folder


def rows_of(folder: Path, listed: list[dict], **more) -> DataSplits:
    train = [one | {"source": str(folder / one["source"])} for one in listed]
    return DataSplits.from_dict({"train": train} | more)


def beginnings(rows) -> list[str]:
    """Return the first letter of each example's prompt."""
    letters = []
    for row in rows:
        row = data.one_form(row)
        assert row.keys() in ({"prompt", "completion"}, {"messages"})
        prompt = row["prompt"] if "prompt" in row else row["messages"][0]["content"]
        letters.append(prompt[0])
    return letters


@pytest.mark.parametrize(
    "weights, repeat, counts",
    [
        pytest.param(
            {"pairs.jsonl": None, "turns.jsonl": None},
            False,
            "pt 40 30",
            id="all-rows",
        ),
        pytest.param(
            {"pairs.jsonl": 1, "alpaca.json": 3}, False, "pa 20 60", id="scarcest-decides"
        ),
        pytest.param(
            {"pairs.jsonl": 1, "alpaca.json": 3},
            True,
            "pa 40 120",
            id="repeated",
        ),
        pytest.param(
            {
                "turns.jsonl": 1,
                "calls.jsonl": 1,
                "pairs.jsonl": 1,
            },
            False,
            "tcp 20 20 20",
            id="turns-of-other-keys",
        ),
    ],
)
def test_weights_are_counts(sources, weights, repeat, counts):
    listed = [{"source": name, "weight": weight} for name, weight in weights.items()]
    rows = rows_of(
        sources,
        listed,
        held_out_rows=6,
        repeat=repeat,
    )
    letters, *numbers = counts.split()
    whole = _read(rows, "train", {})
    assert Counter(beginnings(whole)) == dict(zip(letters, map(int, numbers), strict=True))
    train, held_out = split_rows(rows)
    known = {str(data.one_form(row)) for row in held_out}
    assert len(known) == len(held_out) == 6
    assert known.isdisjoint(str(data.one_form(row)) for row in train)
    assert len(train) == len(whole) - sum(str(data.one_form(row)) in known for row in whole)
    again, _ = split_rows(rows)
    assert list(again) == list(train)
    order = "".join(beginnings(train))
    assert order.index(letters[0]) < len(train) / 4, "the files are not mixed"
    assert order.rindex(letters[0]) > len(train) / 2, "the files are not mixed"


def test_a_source_has_its_own_limit_and_held_out_files_may_be_several(sources):
    listed = [{"source": "pairs.jsonl", "limit": 8}, {"source": "alpaca.json", "limit": 5}]
    held_out = [
        str(sources / "calls.jsonl"),
        {
            "source": str(sources / "pairs.jsonl"),
            "limit": 12,
        },
    ]
    train, judging = split_rows(rows_of(sources, listed, held_out=held_out), shuffle=True)
    assert Counter(beginnings(judging)) == {"c": 20, "p": 12}
    # both draw from the shuffled file: its first eight examples are among its first twelve
    assert Counter(beginnings(train)) == {"a": 5}


TRAINING = {"steps": 1, "learning_rate": 1.0}


@pytest.mark.parametrize(
    "value, says",
    [
        ([], "data.train must be a source, or a list of sources, but got []"),
        (
            ["a", {"source": "b", "weight": 1}],
            "data.train.weight must be given for all sources or for none, but 1 of 2 have one",
        ),
    ],
)
def test_bad_sources_are_one_error(value, says):
    values = dict.fromkeys(("sft", "tune", "mix"), TRAINING)
    with pytest.raises(ValueError) as error:
        Recipe.from_dict(values | {"base_model": "x", "data": {"train": value}})
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


STUDIES = {"xft": xft_study, "esft": esft_study}
PLACES = {
    "xft": ("data", "data__max_length", "tune"),
    "esft": ("tasks__sums", "max_length", "esft"),
}


@pytest.mark.parametrize("method", PLACES)
@pytest.mark.parametrize(
    "key, value, says",
    [
        ("{0}__train", "none.jsonl", "Data 'none.jsonl' does not exist"),
        ("{0}__held_out_rows", 64, "held_out_rows .64. leaves no training examples"),
        ("{2}__warmup_steps", 4, "warmup_steps must be below the 4 steps .* but got 4"),
    ],
)
def test_a_wrong_value_is_one_error_and_leaves_nothing_half_done(
    tmp_path, method, key, value, says
):
    study = importlib.import_module(f"papers.{method}.study")
    Stages = getattr(study, f"{method.title()}Stages")
    path = STUDIES[method].write_study(tmp_path)
    recipe = load_recipe(Stages.Recipe, path).change(**{key.format(*PLACES[method]): value})
    with pytest.raises(ValueError, match=says):
        stages = Stages(recipe, tmp_path / "out", say=lambda text: None)
        stages.moe() if method == "xft" else stages.scores("sums")
    for path in (tmp_path / "out").glob("[!.]*"):
        assert path.name.startswith(("data-", "base-"))
        assert ".tmp" not in path.name
