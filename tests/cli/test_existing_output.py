"""The table in docs/commands.md of what each verb does with existing output: every cell is a
test.
"""

import functools
import importlib
import shutil
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from moe_runtime.bench import records
from papers.cli_tables import TABLES
from papers.engine import corpora
from tests.cli.test_verbs import VERBS as TREE
from tests.cli.test_verbs import walk
from tests.faults import inputs
from tests.faults.machine import strays
from tests.faults.verbs import VERBS, _verb
from tests.papers import test_demo_real
from tests.support import cli, peft_adapter

STATES = ("wrong kind", "other content", "same", "different", "unfinished", "overwrite")


def read_page() -> tuple[dict, set[str]]:
    """Return the table's cells by verb and state, and the verbs that write a single file."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
    table = text.split("## What a command does with existing")[1]
    cells = {}
    files = set()
    for line in table.splitlines():
        if line.startswith("| `"):
            name, kind, *words = [cell.strip(" `") for cell in line.strip("|").split("|")]
            name = name.replace("python -m papers", "papers")
            if kind == "file":
                files.add(name)
            for state, word in zip(STATES, words, strict=True):
                cells[name, state] = word
    return cells, files


CELLS, FILES = read_page()


FAULTY = {"papers run" if name == "run" else name: verb for name, verb in VERBS.items()}
ANSWERS = "out/dense/arithmetic.jsonl"  # the last file that `eval` writes for a task
ALL = FAULTY | {
    "papers demo": _verb(
        "papers demo --preset tiny --out out",
        beside=("out.stages",),
        before="tests.cli.stand_ins:short_demo",
    ),
    "papers xft table1": _verb(
        "papers xft table1 --recipe {in}/xft/study.yaml --seeds 1 --out out", whole=False
    ),
    "tune": _verb(
        "tune --model {in}/moe --tokens 16 --dtype float32 --out out",
        whole=False,
        before="tests.cli.stand_ins:fake_gpu",
    ),
    "bench": _verb(
        "bench --tiny --only merging --out out.json",
        out="out.json",
        whole=False,
        beside=("out.jsonl",),
        before="tests.cli.stand_ins:short_bench",
    ),
    "xft to-mergeable": _verb("xft to-mergeable {in}/moe out"),
    "xft import-official": _verb("xft import-official {in}/of-export out"),
    "upit assemble": _verb("upit assemble {in}/upit/saved/step-1 {in}/upit/saved/step-2 --out out"),
    "upit export": _verb("upit export {in}/of-assemble out"),
    "lora convert": _verb("lora convert {in}/lora/base {in}/lora/old out"),
    "lora export": _verb("lora export {in}/lora/base {in}/lora/adapter out --to merged"),
    "shrink score": _verb(
        "shrink score {in}/esft/base --data {in}/esft/sums.jsonl --tokens 64 --max-length 32 "
        "--outputs --out out"
    ),
    "shrink prune": _verb("shrink prune {in}/esft/base out --statistics {in}/of-score --keep 4"),
    "shrink merge": _verb("shrink merge {in}/esft/base out --statistics {in}/of-score --keep 4"),
    "shrink to-dense": _verb(
        "shrink to-dense {in}/esft/base out --statistics {in}/of-score --keep 4"
    ),
    "ultrafuser generate": _verb(
        "ultrafuser generate {in}/of-fuse --data {in}/rows.jsonl --out out --max-new-tokens 2"
    ),
    "papers data decontaminate": _verb(
        "papers data decontaminate {in}/rows.jsonl out --against {in}/esft/sums.jsonl --min-chars 3"
    ),
    "papers data smollm2": _verb(
        "papers data smollm2 out", before="tests.papers.evaluation.test_smollm2:install"
    ),
    "papers data tasks": _verb("papers data tasks out --train 4 --held-out 2"),
    "papers demo-real": _verb(
        "papers demo-real --model {in}/../real/model --recipe {in}/../real/small.yaml --out out"
    ),
    "papers eval": _verb(
        "papers eval {in}/dense --tasks arithmetic --limit 2 --max-new-tokens 4 --out out"
    ),
}
# options that change the result; verbs that are not listed get another seed
SHARDS = dict.fromkeys(
    ("xft export", "xft import-official", "upit export", "esft merge"), ("--max-shard-size", "9KB")
)
CHANGES = SHARDS | {
    "xft to-mergeable": ("--shared-rate", "0.5"),
    "xft merge": ("--alpha", "uniform"),
    "esft select": ("--p", "0.1"),
    "stats": ("--tokens", "40"),
    "tune": ("--tokens", "32"),
    "papers xft table1": ("--seeds", "2"),
    "bench": (),
    "lora convert": (),
    "lora export": ("--max-shard-size", "9KB"),
    **dict.fromkeys(("shrink prune", "shrink merge"), ("--keep", "3")),
    "shrink to-dense": ("--by", "cp"),
    "papers eval": ("--dtype", "bfloat16"),
    "papers data decontaminate": ("--min-chars", "4"),
    "papers data smollm2": ("--dtype", "float32"),
    "ultrafuser generate": ("--max-new-tokens", "3"),
}
LONG = {
    "papers demo",
    "papers xft table1",
    "papers run",
    "ultrafuser train",
    "train",
    "upit init-routers",
    "esft train",
    "papers eval",
    "papers data smollm2",
    "papers data tasks",
    "papers demo-real",
}  # each takes seconds
# attributes that `before` of a verb replaces
REPLACED = {
    "papers demo": {
        "papers.engine.corpora": ["standard_library_files"],
        "papers.demo": ["load_recipe"],
    },
    "papers data smollm2": {"papers.evaluation.smollm2": ["_place"]},
    "bench": {"moe_runtime.bench.running": ["_pytest"]},
    "tune": {"moe_runtime.tools.tune": ["find_gpu", "runner", "ROUNDS", "versions"]},
}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files below a folder, except locks."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and ".locks" not in path.parts:
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def results(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the main results of a verb, which contain no times."""
    chosen = {}
    for name, value in files.items():
        if name.endswith(".safetensors") or name in ("out", "out.json", ANSWERS):
            chosen[name] = value
    return chosen


def invoked(words: list[str]):
    """Run a command line of either program in this process."""
    program, arguments = cli.program_of(words)
    return CliRunner().invoke(program.app, arguments)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The verbs' inputs, and the outputs of three verbs that others need."""
    folder = tmp_path_factory.mktemp("existing") / "inputs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", str(folder)])
        inputs.make()
    peft_adapter.adapted(folder / "lora")
    adapter = folder / "lora" / "adapter"
    peft_adapter.as_written_by("0.18.0", adapter, folder / "lora" / "old", transposed=False)
    test_demo_real.write_inputs(folder.parent / "real")
    for name in ("xft export", "upit assemble", "ultrafuser fuse", "shrink score"):
        words = ALL[name].arguments(folder)
        words[words.index("out")] = str(folder / f"of-{name.split()[1]}")
        assert invoked(words).exit_code == 0
    return folder


@pytest.fixture
def invoke(given, monkeypatch, tmp_path):
    """Run a verb in its own folder; attributes that the verb's stand-in replaces are restored."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *more: str):
        for target, attributes in REPLACED.get(name, {}).items():
            module = importlib.import_module(target)
            for attribute in attributes:
                monkeypatch.setattr(module, attribute, getattr(module, attribute))
        # later tests in this process must not see what is cached of the demo's files
        rows = functools.cache(corpora._library_rows.__wrapped__)
        monkeypatch.setattr(corpora, "_library_rows", rows)
        if ALL[name].before:
            module, function = ALL[name].before.split(":")
            getattr(importlib.import_module(module), function)()
        return invoked([*ALL[name].arguments(given), *more])

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Put a verb's result into a folder; each result is computed once."""
    folders = {}

    def make(name: str, invoke, here: Path) -> None:
        if name in folders:
            shutil.copytree(folders[name], here, symlinks=True, dirs_exist_ok=True)
            return
        done = invoke(name)
        assert done.exit_code == 0, done.output
        folders[name] = tmp_path_factory.mktemp("made") / "here"
        shutil.copytree(here, folders[name], symlinks=True)

    return make


def unfinish(name: str) -> None:
    """Reduce a verb's result to what an interruption near its end would leave."""
    out = Path(ALL[name].out)
    if name == "bench":
        first = records.benchmarks(out)[0]
        lines = records.Records(out.with_suffix(".jsonl"))
        lines.write(first["name"], extra_info=first["extra_info"])
        out.unlink()
    elif name != "tune":  # its file is complete after every config
        shutil.rmtree(max(out.glob("*-*/"), key=lambda path: path.stat().st_mtime_ns))


def test_every_verb_has_a_row_and_the_options_it_lists():
    silent = {"upit choose", "esft apply", "doctor", "memory", "eval", "papers memory"}
    silent.add("shrink compare")
    named = {" ".join(words): command for words, command in TREE.items()}
    for words, command in walk(get_command(cli.PAPERS.app)).items():
        if hasattr(command, "commands"):
            continue
        if words[0] in TABLES:  # all of them are alike
            words = ("xft", "table1")
        named[f"papers {' '.join(words)}"] = command
    listed = {name for name, _ in CELLS}
    assert listed == set(named) - silent
    for name in listed - {"train"}:  # TRL's parser has its options
        options = {option.name for option in named[name].params}
        assert ("overwrite" in options) == (CELLS[name, "overwrite"] != "-"), name


def cells() -> list:
    """Return the table's cells except slow ones, which the tests of the verbs cover."""
    params = []
    for (name, state), word in CELLS.items():
        is_quick = name not in LONG
        refuses = state in ("wrong kind", "other content") and word == "refuses"
        if refuses and name != "papers data tasks":
            is_quick = True
        if is_quick and word != "-":
            params.append(pytest.param(name, state, word, id=f"{name}-{state}"))
    return params


def prepare(name: str, state: str, invoke, finished, here: Path) -> tuple:
    """Create the state before the verb runs; return the path of a note in it, and the results of
    the verb if it has run.
    """
    out = Path(ALL[name].out)
    note = out / "note"
    if state in ("wrong kind", "other content"):
        if (name in FILES) == (state == "other content"):
            note = out
        note.parent.mkdir(exist_ok=True)
        note.write_text("mine")
        return note, {}
    finished(name, invoke, here)
    whole = results(snapshot(here))
    if name == "bench" and state in ("same", "overwrite"):  # the stand-in always measures the same
        out.write_text(out.read_text().replace('"ms": 1.5', '"ms": 9.5'))
    elif name == "bench" and state == "different":
        out.write_text(out.read_text().replace("bench_x[b]", "bench_y[b]"))
    elif state == "unfinished":
        unfinish(name)
    elif state == "overwrite":
        is_ours = name in {*FILES, "upit grow"}
        if CELLS[name, "other content"] == "refuses" and not is_ours:
            note.write_text("mine")
    return note, whole


def measured(text: bytes) -> set[bytes]:
    """Return the names of the benchmarks in a file."""
    return {part for part in text.split(b'"') if part.startswith(b"bench_")}


@pytest.mark.parametrize("name, state, word", cells())
def test_existing_output(invoke, finished, tmp_path, name, state, word):
    more = []
    if state in ("different", "overwrite"):
        more += CHANGES.get(name, ("--seed", "5"))
    if state == "overwrite":
        more.append("--overwrite")
    note, whole = prepare(name, state, invoke, finished, tmp_path)
    before = snapshot(tmp_path)
    done = invoke(name, *more)
    after = snapshot(tmp_path)
    assert not strays(tmp_path)
    if word == "refuses":
        message = str(done.exception)
        assert done.exit_code, done.output
        assert "out" in message, done.output
        assert "\n" not in message, done.output
        assert after == before, done.output
        if state == "wrong kind" and CELLS[name, "overwrite"] != "-":
            assert invoke(name, "--overwrite").exit_code
            assert snapshot(tmp_path) == before
        return
    assert done.exit_code == 0, done.output
    if word == "keeps":
        assert results(after) == results(before)
    elif word == "resumes":
        assert results(after) == whole
    elif word == "replaces":
        assert after != before
        assert not Path("out/note").exists()
    elif name in FILES:
        out = ALL[name].out
        assert after[out] != before[out]
        assert measured(before[out]) <= measured(after[out])
    else:
        assert word == "adds"
        assert after.keys() > before.keys()
        assert results(before).items() <= results(after).items()
        assert note.exists() == (state == "other content")
