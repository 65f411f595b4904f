"""`moe-runtime bench`: what it runs, keeps and compares; from a clone, interrupted, with a
benchmark that dies.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_runtime.bench import compare, described, machine, report, running
from moe_runtime.bench.records import Records, benchmarks
from moe_runtime.cli import tools as cli_tools
from moe_runtime.cli.app import app as main_app
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def file_of(path: Path, rows: dict, **info) -> Path:
    """A results file of one benchmark, or of several: {name: {variant: row}}."""
    names = rows if all(name.startswith("bench_") for name in rows) else {"bench_x[a]": rows}
    about = {
        "machine": "M",
        "torch": "2.11",
        "rounds": 9,
        "kind": "layer",
        "ceilings": {"GB/s": 10.0},
    } | info
    found = [{"name": name, "extra_info": about | {"rows": rows}} for name, rows in names.items()]
    path.write_text(json.dumps({"benchmarks": found}))
    return path


def row(ms: float, ratio: float = 1.0, **more) -> dict:
    return {"ms": ms, "ratio": ratio, "spread": 0.1, "iqr": 0.02} | more


def both(tmp_path, a: dict, b: dict, **info) -> compare.Comparison:
    return compare.compare(file_of(tmp_path / "a.json", a), file_of(tmp_path / "b.json", b, **info))


@pytest.mark.parametrize(
    "a, b, says",
    [
        (row(10.0, 1.2), row(12.0, 1.44), "slower x1.20"),
        (row(10.0, 1.2), row(10.4, 1.25), ""),
        (row(10.0, 1.2), row(12.0, 1.21), ""),
        (row(10.0, 1.2), row(10.1, 1.5), ""),
        (row(10.0, 1.2, iqr=0.15), row(12.0, 1.44, iqr=0.1), ""),
        (row(10.0, 1.2), row(8.0, 0.96), "faster"),
        (row(10.0, **{"peak MiB": 100.0}), row(10.0, **{"peak MiB": 120.0}), "peak MiB x1.20"),
        (row(10.0, **{"peak MiB": 1.0}), row(10.0, **{"peak MiB": 4.0}), ""),
        (
            row(1.0, **{"saved KiB/token": 50.0}),
            row(1.0, **{"saved KiB/token": 51.0}),
            "saved KiB/token x1.02",
        ),
    ],
)
def test_what_is_a_regression(tmp_path, a, b, says):
    """The floor is as fast as before: its pace is in the ratios."""
    found = both(
        tmp_path, {"floor": row(8.0), "moe_runtime": a}, {"floor": row(8.0), "moe_runtime": b}
    )
    assert [row.verdict for row in found.rows] == ["", says]
    assert [row.variant for row in found.regressions] == (
        ["moe_runtime"] if says not in ("", "faster") else []
    )


def test_a_peer_that_is_slower_is_no_regression_of_ours(tmp_path):
    found = both(
        tmp_path,
        {"floor": row(8.0), "official": row(8.0)},
        {"floor": row(8.0), "official": row(16.0, 2.0)},
    )
    assert found.rows[1].verdict == "slower x2.00"
    assert found.regressions == []


def test_what_is_missing_in_the_second_file_is_named(tmp_path):
    a = {
        "floor": row(1.0),
        "moe_runtime": row(1.0),
        "moe_runtime cuda": row(1.0),
        "eager": row(1.0),
    }
    names = ("bench_a", "bench_b", "bench_c")
    one = file_of(tmp_path / "a.json", dict.fromkeys(names, a))
    rest = {"floor": row(1.0), "moe_runtime": row(1.0)}
    other = file_of(
        tmp_path / "b.json", {"bench_a": rest}, notes={"moe_runtime cuda": "no compiler"}
    )
    other.write_text(json.dumps(json.loads(other.read_text()) | {"failed": {"bench_b": "boom"}}))
    found = compare.compare(one, other)
    assert [(lost.benchmark, lost.variant, lost.verdict) for lost in found.regressions] == [
        ("bench_a", "moe_runtime cuda", "missing: no compiler"),
        ("bench_b", "moe_runtime", "missing: the benchmark failed: boom"),
        ("bench_b", "moe_runtime cuda", "missing: the benchmark failed: boom"),
    ]
    text = compare.text(found)
    whole = compare.as_json(found)
    assert "missing in B: bench_a: eager: no note says why" in text
    assert "no regression of ours" not in text
    assert "regression: bench_a: moe_runtime cuda: missing: no compiler" in text
    assert len(whole["missing"]) == 6
    assert len(whole["regressions"]) == 3
    assert found.alone[0] == ["bench_b", "bench_c"]


def test_other_machines_versions_and_paces_are_named(tmp_path):
    same = {"moe_runtime": row(1.0)}
    assert both(tmp_path, same, same).warnings == []
    found = both(tmp_path, same, same, torch="2.12", ceilings={"GB/s": 5.0})
    slower = "the machine's own GB/s are 0.50 times as many in the second file"
    assert found.warnings == ["torch differs: 2.11 and 2.12", slower]
    assert both(tmp_path, {"bench_a": same}, {"bench_b": same}).warnings == [
        "the files have no benchmark in common"
    ]


def test_ratios_of_a_kind(tmp_path):
    a = {f"bench_x[{n}]": {"floor": row(1.0), "moe_runtime": row(1.0)} for n in range(3)}
    b = {
        name: {"floor": row(1.0), "moe_runtime": row(n + 1.0, n + 1.0)} for n, name in enumerate(a)
    }
    found = both(tmp_path, a, b | {"bench_y": {"moe_runtime": row(1.0)}})
    assert compare.by_kind(found) == [
        ("layer", "floor", 3, 1.0, 1.0, 1.0),
        ("layer", "moe_runtime", 3, 1.0, 2.0, 3.0),
    ]
    assert found.alone == ([], ["bench_y"])
    assert "| layer | moe_runtime | 3 | 1.000 | 2.000 | 3.000 |" in compare.text(found)
    assert "only in B: bench_y" in compare.text(found)


def test_compare_on_the_command_line(tmp_path):
    a = file_of(tmp_path / "a.json", {"floor": row(1.0), "moe_runtime": row(1.0)})
    b = file_of(tmp_path / "b.json", {"floor": row(1.0), "moe_runtime": row(2.0, 2.0)})
    good = CliRunner().invoke(main_app, ["bench", "--compare", str(a), str(a)])
    assert good.exit_code == 0
    assert "no regression of ours" in good.stdout
    bad = CliRunner().invoke(main_app, ["bench", "--compare", str(a), str(b), "--json"])
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["regressions"] == [
        {"benchmark": "bench_x[a]", "variant": "moe_runtime"}
    ]


def test_the_results_of_the_repository_compare():
    old, new = sorted((ROOT / "bench" / "results").glob("*-cpu.json"))[:2]
    found = compare.compare(old, new)
    assert len(found.rows) > 40
    assert json.dumps(compare.as_json(found), allow_nan=False)


def test_kinds_and_names_choose_files():
    every = {path.name for path in (ROOT / "bench").glob("bench_*.py")}
    assert {path.name for path in running.files(None)} == every
    assert {path.name for path in running.files("merging,routing")} == {
        "bench_merging.py",
        "bench_routing.py",
    }
    groups = running.kinds()
    assert running.files("layer, step") == sorted(groups["layer"] + groups["step"])
    with pytest.raises(
        ValueError, match="only must list kinds .*layer.* or names .*merging.* but got 'layers'"
    ):
        running.files("op,layers")


def test_kinds_are_those_that_the_help_names():
    assert tuple(described.KINDS) == cli_tools.KINDS
    assert set(running.kinds()) <= set(described.KINDS)


def test_file_is_named_by_date_commit_and_device(tmp_path):
    path = running.place(tmp_path)
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\d-{re.escape(machine.commit())}-{running.DEVICE}\.json", path.name
    )
    assert running.place(tmp_path / "my.json") == tmp_path / "my.json"
    begun = tmp_path / f"2020-01-01-{machine.commit()}-{running.DEVICE}.jsonl"
    begun.touch()
    assert running.place(tmp_path) == begun.with_suffix(".json")
    with pytest.raises(
        ValueError, match="is a file. Choose a folder, or a name that ends in .json"
    ):
        running.place(begun)


@pytest.mark.parametrize(
    "there, arguments, says",
    [
        ({"tiny": False}, ["--tiny"], "contains real results. Choose another file"),
        ({"tiny": True}, [], "contains tiny results. Choose another file"),
        (
            {"asked": 15},
            ["--rounds", "5"],
            "rounds is 5, but .* was started with 15. Pass the same",
        ),
    ],
)
def test_results_of_another_kind_are_not_mixed(tmp_path, there, arguments, says):
    path = tmp_path / "r.jsonl"
    Records(path).write("bench_x", extra_info={"rows": {"moe_runtime": row(1.0)}} | there)
    before = path.read_text()
    done = CliRunner().invoke(
        main_app, ["bench", "--only", "merging", "--out", str(tmp_path / "r.json"), *arguments]
    )
    assert isinstance(done.exception, ValueError)
    assert re.search(says, str(done.exception))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--rounds", "0"], "rounds must be at least 1 and seconds positive, but got rounds 0"),
        (
            ["--seconds", "-1"],
            "rounds must be at least 1 and seconds positive, but got .* seconds -1.0",
        ),
        (["--only", "what"], "only must list kinds .* but got 'what'"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, arguments, says):
    done = CliRunner().invoke(main_app, ["bench", *arguments, "--out", str(tmp_path / "x")])
    assert isinstance(done.exception, ValueError)
    assert re.search(says, str(done.exception))
    assert not list(tmp_path.iterdir())


def test_without_pytest_benchmark_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    done = CliRunner().invoke(main_app, ["bench", "--out", str(tmp_path)])
    assert isinstance(done.exception, ImportError)
    assert "pip install 'moe-runtime[bench]'" in str(done.exception)


QUICK = """
import time
import pytest

KIND = "op"

@pytest.mark.parametrize("n", range(3))
def bench_quick(interleaved, n):
    floor = {"copy (floor)": lambda: time.sleep(0.001)}
    interleaved(floor | {"moe_runtime": lambda: time.sleep(0.002)}, bytes=8)
"""
DIES = """
import os
import pytest

def bench_dies(interleaved):
    os.kill(os.getpid(), 9)

def bench_fails(interleaved):
    raise ValueError("no such thing")

def bench_skips(interleaved):
    pytest.skip("not here")
"""
SLOW = """
import time

def bench_slow(interleaved):
    time.sleep(60)
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of benchmarks of the test's own, with the machinery of bench/."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "conftest.py").write_text("from moe_runtime.bench.conftest import *\n")
    monkeypatch.setattr(running, "FOLDER", folder)
    settings = tuple(
        f"--rootdir={folder}" if word.startswith("--rootdir") else word for word in running.SETTINGS
    )
    monkeypatch.setattr(running, "SETTINGS", settings)

    def write(**files: str) -> Path:
        for name, text in files.items():
            (folder / f"bench_{name}.py").write_text(text)
        return folder

    return write


@pytest.mark.slow
def test_a_benchmark_that_dies_costs_itself_alone(folder, tmp_path):
    folder(a=DIES, b=QUICK)
    heard = []
    lines = tmp_path / "out" / "r.jsonl"
    target = tmp_path / "out" / "r.json"
    running.run(
        running.files(None), lines, ["--tiny"], lambda done, total: heard.append((done, total))
    )
    outcome = running.gather(lines, target)
    assert outcome.failed.keys() == {"bench_dies", "bench_fails"}
    assert outcome.skipped.keys() == {"bench_skips"}
    assert outcome.failed["bench_dies"] == "the process died of SIGKILL"
    assert "no such thing" in outcome.failed["bench_fails"]
    assert "not here" in outcome.skipped["bench_skips"]
    whole = json.loads(target.read_text())
    assert [bench["name"] for bench in whole["benchmarks"]] == [
        f"bench_quick[{n}]" for n in range(3)
    ]
    assert whole["about"]["commit"] == machine.commit()
    assert whole["failed"] == outcome.failed
    assert heard[-1][1] == 6
    assert all(done <= total for done, total in heard)
    # what failed is tried again, and only that
    assert Records(lines).done() == {"bench_skips", *(f"bench_quick[{n}]" for n in range(3))}
    folder(a="def bench_dies(interleaved):\n    interleaved({'moe_runtime': lambda: 1})\n")
    running.run(running.files(None), lines, ["--tiny"], lambda done, total: None)
    outcome = running.gather(lines, target)
    assert not outcome.failed
    assert not lines.exists()
    assert {bench["name"] for bench in benchmarks(target)} == {
        "bench_dies",
        *(f"bench_quick[{n}]" for n in range(3)),
    }
    info = benchmarks(target)[0]["extra_info"]
    assert info["tiny"] is True
    assert info["asked"] == 15
    assert info["kind"] == "op"
    assert info["bytes"] == 8
    assert info["rows"]["moe_runtime"]["ms"] > 1


LOSES = """
from moe_runtime.bench import clock, conftest

conftest.CUDA, conftest.ceilings, clock.launch_configs = True, lambda *_: {}, lambda: "built in"

def measure_gpu(variants, rounds, seconds, pedantic, notes, compare):
    if "bad" in variants:
        raise clock.ContextLost(variants["bad"](), "RuntimeError: CUDA error")
    return clock.measure_cpu(variants, rounds, pedantic)

clock.measure_gpu = measure_gpu

def bench_alone(interleaved):
    interleaved({"moe_runtime": lambda: 1, "bad": lambda: "bad"})

def bench_together(interleaved):
    interleaved({"moe_runtime": lambda: 1, "bad": lambda: "one of the variants"})
"""


@pytest.mark.slow
def test_a_context_that_is_lost_again_costs_the_benchmark(folder, tmp_path):
    """Who loses it by itself is left out; in the timed rounds nobody knows who it was."""
    folder(a=LOSES, b=QUICK)
    lines = tmp_path / "r.jsonl"
    target = tmp_path / "r.json"
    running.run(running.files(None), lines, ["--tiny"], lambda done, total: None)
    outcome = running.gather(lines, target)
    assert outcome.failed == {
        "bench_together": "one of the variants broke the CUDA context: RuntimeError: CUDA error"
    }
    found = {bench["name"]: bench["extra_info"] for bench in benchmarks(target)}
    assert len(found) == 4
    assert found["bench_alone"]["notes"] == {"bad": "RuntimeError: CUDA error"}


INTERRUPTED = """
import signal, sys
from pathlib import Path
from moe_runtime import cli
from moe_runtime.bench import running

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
running.FOLDER = Path(sys.argv[1])
running.SETTINGS = (f"--rootdir={sys.argv[1]}", *running.SETTINGS[1:])
sys.argv = ["moe-runtime", *sys.argv[2:]]
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["group", "process"])
def test_ctrl_c_keeps_what_was_measured(folder, tmp_path, whom):
    """A terminal signals the whole group, a script the process alone."""
    where = folder(a=QUICK, b=SLOW)
    lines = tmp_path / "r.jsonl"
    arguments = [where, "bench", "--tiny", "--out", tmp_path / "r.json"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while Records(lines).unfinished() != "bench_slow":
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGINT)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "interrupted; rerun to resume: " in said
    assert len(Records(lines).done()) == 3
    assert not (tmp_path / "r.json").exists()
    with pytest.raises(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, 0)


@pytest.mark.slow
def test_a_run_from_the_clone_prints_its_tables(tmp_path):
    """The benchmarks themselves, by the command a user types; and --json of the same."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "moe_runtime",
            "bench",
            "--only",
            "merging",
            "--tiny",
            "--out",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / ".benchmarks").exists()
    path = next(tmp_path.glob("*.json"))
    assert "| bench_merge_experts | copy (floor) | moe_runtime torch |" in done.stdout
    assert f"wrote {path}" in done.stdout
    assert report.text([path]) in done.stdout
    assert [p.suffix for p in tmp_path.iterdir() if p.suffix == ".jsonl"] == []
