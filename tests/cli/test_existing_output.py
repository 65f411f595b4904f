"""docs/start.md's table of what each verb does with existing output: every cell is a test."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moe_runtime.cli.app import app
from tests.cli.test_verbs import VERBS as TREE
from tests.faults import inputs
from tests.faults.machine import strays
from tests.faults.verbs import VERBS, _verb

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "start.md").read_text().split("## What a command does with existing")[1]
STATES = ("wrong kind", "other content", "same", "different", "unfinished", "overwrite")
LINES = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
CELLS = {(name, state): word for name, _, *words in LINES for state, word in zip(STATES, words, strict=True)}
FILES = {name for name, kind, *_ in LINES if kind == "file"}
ALL = VERBS | {
    "xft to-mergeable": _verb("xft to-mergeable {in}/moe out"),
    "xft import-official": _verb("xft import-official {in}/of-export out"),
    "upit assemble": _verb("upit assemble {in}/upit/saved/step-1 {in}/upit/saved/step-2 --out out"),
    "upit export": _verb("upit export {in}/of-assemble out"),
}
SEED = ("--seed", "5")
# what makes a different result
CHANGES = {
    "xft to-mergeable": ("--shared-rate", "0.5"), "xft merge": ("--alpha", "uniform"),
    "xft export": ("--max-shard-size", "9KB"), "xft import-official": ("--max-shard-size", "9KB"),
    "upit export": ("--max-shard-size", "9KB"), "esft merge": ("--max-shard-size", "9KB"), "esft select": ("--p", "0.1"),
    "stats": ("--tokens", "40"), "tune": ("--tokens", "32"), "paper": ("--seeds", "2"), "bench": (),
}  # fmt: skip
LONG = {"demo", "paper", "run", "ultrafuser train", "train", "upit init-routers", "esft train"}  # seconds each


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, but for locks."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if ".locks" not in name}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The verbs' inputs, and what two of the verbs make of them."""
    folder, patch = tmp_path_factory.mktemp("existing") / "inputs", pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["", str(folder)])
    inputs.make()
    patch.undo()
    for name, verb in (("export", ALL["xft export"]), ("assemble", ALL["upit assemble"])):
        argv = [str(folder / f"of-{name}") if part == "out" else part for part in verb.arguments(folder)]
        assert CliRunner().invoke(app, argv).exit_code == 0
    return folder


@pytest.fixture
def place(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def invoke(given, monkeypatch):
    """Run a verb in the current folder; what its test replaces is put back."""

    def run(name: str, *more: str):
        verb = ALL[name]
        if verb.before:
            module, function = verb.before.split(":")
            module = importlib.import_module(module)
            for target, attributes in REPLACED.get(name, {}).items():
                target = importlib.import_module(target)
                for attribute in attributes:
                    monkeypatch.setattr(target, attribute, getattr(target, attribute))
            getattr(module, function)()
        return CliRunner().invoke(app, [*verb.arguments(given), *more])

    return run


# what `before` of a verb replaces
REPLACED = {
    "demo": {"moe_runtime.experiments.corpora": ["standard_library_files"], "moe_runtime.methods.xft.demo": ["load_recipe"]},
    "bench": {"moe_runtime.bench.running": ["_pytest"]},
    "tune": {"moe_runtime.tools.tune": ["find_gpu", "runner", "ROUNDS", "versions"]},
}


@pytest.fixture(scope="module")
def made(given, tmp_path_factory):
    """Return the folder with a verb's result, made once."""
    folders = {}

    def make(name: str, invoke, here: Path) -> None:
        if name not in folders:
            done = invoke(name)
            assert done.exit_code == 0, done.output
            folders[name] = tmp_path_factory.mktemp("made") / "here"
            shutil.copytree(here, folders[name], symlinks=True)
        else:
            shutil.copytree(folders[name], here, symlinks=True, dirs_exist_ok=True)

    return make


def refused(done, before: dict[str, bytes], place: Path) -> None:
    assert isinstance(done.exception, ValueError | typer.Exit | OSError), done.output
    assert "out" in str(done.exception) and "\n" not in str(done.exception)
    assert snapshot(place) == before and not strays(place)


def cell(state: str):
    """Parametrize a test by the verbs that have a word in a column."""
    slow = LONG if state not in ("wrong kind", "other content") else ()
    found = [(name, CELLS[name, state]) for name, *_ in LINES if CELLS[name, state] != "-"]
    marks = lambda name, word: pytest.mark.slow if name in slow or (name in LONG and word == "adds") else ()  # noqa: E731
    return pytest.mark.parametrize("name, word", [pytest.param(*one, id=one[0], marks=marks(*one)) for one in found])


def test_every_verb_has_a_line():
    named = {" ".join(words) for words in TREE if words[0] != "paper"} | {"paper"}
    silent = {"upit choose", "esft apply", "ultrafuser generate", "doctor"}
    assert {name for name, *_ in LINES} == named - silent and len(LINES) == len(named - silent)
    assert all(f"`{name}`" in PAGE for name in silent)
    # --overwrite is where the table has it
    for words, command in TREE.items():
        name = "paper" if words[0] == "paper" else " ".join(words)
        if name not in silent and name != "train":
            assert ("overwrite" in {option.name for option in command.params}) == (CELLS[name, "overwrite"] != "-"), name


@cell("wrong kind")
def test_a_file_for_a_folder_or_the_reverse(place, invoke, name, word):
    out = Path(ALL[name].out)
    out.mkdir() if name in FILES else out.write_text("mine")
    for more in ((), ("--overwrite",)) if CELLS[name, "overwrite"] != "-" else ((),):
        done = invoke(name, *more)
        assert word == "refuses" and done.exit_code == 1, done.output
        assert os.listdir(place) == [out.name] and (out.is_dir() or out.read_text() == "mine")


@cell("other content")
def test_other_content(place, invoke, name, word):
    out = Path(ALL[name].out)
    note = out if name in FILES else out / "note"
    note.parent.mkdir(exist_ok=True)
    note.write_text("mine")
    before = snapshot(place)
    done = invoke(name)
    if word == "refuses":
        return refused(done, before, place)
    assert word == "adds" and done.exit_code == 0 and note.read_text() == "mine" and len(snapshot(place)) > 1


@cell("same")
def test_the_same_result(place, invoke, made, name, word):
    made(name, invoke, place)
    mark(name)
    before = snapshot(place)
    done = invoke(name)
    if word == "refuses":
        return refused(done, before, place)
    assert word == "keeps" and done.exit_code == 0, done.output
    assert weights(snapshot(place)) == weights(before)


def mark(name: str) -> None:
    """Make the numbers of `bench`, which here always measures the same, those of an earlier run."""
    if name == "bench":
        Path("out.json").write_text(Path("out.json").read_text().replace('"ms": 1.5', '"ms": 9.5'))


def weights(files: dict[str, bytes]) -> dict[str, bytes]:
    """What a verb is for, which has no times in it."""
    return {name: value for name, value in files.items() if name.endswith(".safetensors") or name in ("out", "out.json")}


@cell("different")
def test_a_different_result(place, invoke, made, name, word):
    made(name, invoke, place)
    if name == "bench":
        Path("out.json").write_text(Path("out.json").read_text().replace("bench_x[b]", "bench_y[b]"))
    before = snapshot(place)
    done = invoke(name, *CHANGES.get(name, SEED))
    if word == "refuses":
        return refused(done, before, place)
    assert word == "adds" and done.exit_code == 0, done.output
    after = snapshot(place)
    if name in FILES:
        inner = lambda text: {part for part in text.split(b'"') if part.startswith((b"bench_", b"16,", b"fp32"))}  # noqa: E731
        assert inner(before[ALL[name].out]) <= inner(after[ALL[name].out]) and before != after
    else:
        assert weights(before).items() < weights(after).items()


def unfinish(name: str) -> None:
    """Leave of a verb's result what an interruption near its end would."""
    out = Path(ALL[name].out)
    if name == "train":
        for path in out.glob("model*"):
            path.unlink()
        shutil.rmtree(out / "checkpoint-4")
    elif name in ("upit grow", "upit init-routers"):
        shutil.rmtree(sorted(out.glob("expert-*"))[-1])
    elif name in FILES:
        text = out.read_text()
        if name == "bench":
            records = importlib.import_module("moe_runtime.bench.records")
            first = records.benchmarks(out)[0]
            records.Records(out.with_suffix(".jsonl")).write(first["name"], extra_info=first["extra_info"])
            out.unlink()
        assert name == "bench" or text
    else:
        shutil.rmtree(max(out.glob("*-*/"), key=lambda path: path.stat().st_mtime_ns))


@cell("unfinished")
def test_unfinished_work(place, invoke, made, monkeypatch, name, word):
    if name == "esft train":
        esft = importlib.import_module("moe_runtime.methods.esft")
        inner = esft.save_adapter

        def stop(*args, **options):
            monkeypatch.setattr(esft, "save_adapter", inner)
            raise KeyboardInterrupt

        monkeypatch.setattr(esft, "save_adapter", stop)
        assert invoke(name).exit_code == 130
        want, kept = None, {path: path.stat().st_mtime_ns for path in Path("out-checkpoints").rglob("*") if path.is_file()}
    else:
        made(name, invoke, place)
        want = weights(snapshot(place))
        unfinish(name)
        kept = {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")}
    before = snapshot(place)
    done = invoke(name)
    if word == "refuses":
        assert "--resume to continue from checkpoint-2" in str(done.exception)
        refused(done, before, place)
        done = invoke(name, "--resume")
    assert done.exit_code == 0, done.output
    assert want is None or weights(snapshot(place)) == want
    assert not kept or any(path.stat().st_mtime_ns == time for path, time in kept.items() if path.exists()) or want is None


@cell("overwrite")
def test_overwrite(place, invoke, made, name, word):
    made(name, invoke, place)
    out = Path(ALL[name].out)
    mark(name)
    old = snapshot(place)
    if name not in FILES and CELLS[name, "other content"] == "refuses" and name != "upit grow":
        (out / "note").write_text("mine")
    done = invoke(name, *CHANGES.get(name, SEED), "--overwrite")
    assert word == "replaces" and done.exit_code == 0, done.output
    assert (out / "note").exists() == (name == "train")
    assert not strays(place) and snapshot(place) != old
