"""`moe-runtime bench`: what it runs, saves and compares; running from a clone, interruptions, a
benchmark that crashes.
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

from moe_runtime.bench import compare, machine, running
from moe_runtime.bench.records import ABOUT, Records, benchmarks
from moe_runtime.cli import tools as cli_tools
from moe_runtime.cli.app import app as main_app
from moe_runtime.io.files import read_json
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def file_of(path: Path, rows: dict, **info) -> Path:
    """Write a results file from {benchmark: {variant: row}}."""
    about = {
        **dict.fromkeys(ABOUT, "x"),
        "torch": "2.11",
        "rounds": 9,
        "kind": "layer",
    }
    about |= {"ceilings": {"GB/s": 10.0}} | info
    benchmarks = [
        {
            "name": name,
            "extra_info": about | {"rows": of_name},
        }
        for name, of_name in rows.items()
    ]
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return path


def compared(tmp_path, a: dict, b: dict) -> compare.FileComparison:
    """Compare two files of one benchmark."""
    one = file_of(tmp_path / "a.json", {"bench_x[a]": a})
    return compare.compare(one, file_of(tmp_path / "b.json", {"bench_x[a]": b}))


def row(ms: float, ratio: float = 1.0, **more) -> dict:
    return {
        "ms": ms,
        "ratio": ratio,
        "spread": 0.1,
        "iqr": 0.02,
    } | more


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
@pytest.mark.parametrize("variant", ["moe_runtime", "official"])
def test_what_is_a_regression(tmp_path, a, b, says, variant):
    """The floor has not changed, since ratios account for its speed. A peer's slowdown is no
    regression.
    """
    result = compared(
        tmp_path,
        {"floor": row(8.0), variant: a},
        {"floor": row(8.0), variant: b},
    )
    assert [one.verdict for one in result.rows] == ["", says]
    if says in ("", "faster") or variant == "official":
        assert result.regressions == []
    else:
        assert [one.variant for one in result.regressions] == [variant]


def bench(*arguments):
    """Run the command in this process."""
    return CliRunner().invoke(main_app, ["bench", *map(str, arguments)])


def test_compare_on_the_command_line(tmp_path):
    a = file_of(tmp_path / "a.json", {"bench_x": {"floor": row(1.0), "moe_runtime": row(1.0)}})
    slow = {"bench_x": {"floor": row(1.0), "moe_runtime": row(2.0, 2.0)}}
    b = file_of(tmp_path / "b.json", slow)
    good = bench("--compare", a, a)
    assert good.exit_code == 0
    assert "no regression of ours" in good.stdout
    bad = bench("--compare", a, b, "--json")
    assert bad.exit_code == 1
    (regression,) = json.loads(bad.stdout)["regressions"]
    assert regression == {"benchmark": "bench_x", "variant": "moe_runtime"}


@pytest.mark.parametrize("failed, code", [({}, 0), ({"bench_a": "boom"}, 1)])
def test_a_failed_benchmark_ends_in_1(failed, code):
    outcome = running.RunOutcome(None, failed, {})
    assert cli_tools._report(outcome, [], True).code == code


@pytest.mark.parametrize(
    "there, arguments, says",
    [
        ({"tiny": False}, ["--tiny"], "contains real results. Choose another file"),
        ({"tiny": True}, [], "contains tiny results. Choose another file"),
        ({"asked": 15}, ["--rounds", "5"], "rounds is 5, but .* was started with 15. Pass the"),
        ({}, ["--rounds", "0"], "rounds must be at least 1 and seconds positive, .* rounds 0"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, there, arguments, says):
    path = tmp_path / "r.jsonl"
    info = dict.fromkeys(ABOUT, "x") | {"ceilings": {}, "rows": {"moe_runtime": row(1.0)}}
    Records(path).write("bench_x", extra_info=info | there)
    before = path.read_text()
    done = bench(
        "--only",
        "merging",
        "--out",
        tmp_path / "r.json",
        *arguments,
    )
    assert isinstance(done.exception, ValueError)
    assert re.search(says, str(done.exception))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


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
    """Create a folder of benchmarks for the test, with the fixtures of bench/."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "conftest.py").write_text("from moe_runtime.bench.conftest import *\n")
    monkeypatch.setattr(running, "FOLDER", folder)
    others = [word for word in running.SETTINGS if not word.startswith("--rootdir")]
    monkeypatch.setattr(running, "SETTINGS", (f"--rootdir={folder}", *others))

    def write(**files: str) -> Path:
        for name, text in files.items():
            (folder / f"bench_{name}.py").write_text(text)
        return folder

    return write


QUICK_NAMES = {f"bench_quick[{n}]" for n in range(3)}


def run_all(lines: Path, progress=lambda done, total: None):
    """Run all benchmarks of the folder and return the outcome."""
    running.run(
        running.files(None),
        lines,
        ["--tiny"],
        progress,
    )
    return running.gather(lines, lines.with_suffix(".json"))


@pytest.mark.slow
def test_a_crash_loses_only_its_own_benchmark(folder, tmp_path):
    folder(a=DIES, b=QUICK)
    counts = []
    lines = tmp_path / "out" / "r.jsonl"
    target = lines.with_suffix(".json")
    outcome = run_all(lines, lambda done, total: counts.append((done, total)))
    assert outcome.failed.keys() == {"bench_dies", "bench_fails"}
    assert outcome.skipped.keys() == {"bench_skips"}
    assert outcome.failed["bench_dies"] == "the process died of SIGKILL"
    assert "no such thing" in outcome.failed["bench_fails"]
    assert "not here" in outcome.skipped["bench_skips"]
    whole = read_json(target)
    assert {bench["name"] for bench in whole["benchmarks"]} == QUICK_NAMES
    assert whole["about"]["commit"] == machine.commit()
    assert whole["failed"] == outcome.failed
    assert counts[-1][1] == 6
    # only the failed benchmarks run again
    assert Records(lines).done() == {"bench_skips", *QUICK_NAMES}
    folder(a="def bench_dies(interleaved):\n    interleaved({'moe_runtime': lambda: 1})\n")
    outcome = run_all(lines)
    assert not outcome.failed
    assert not lines.exists()
    infos = {bench["name"]: bench["extra_info"] for bench in benchmarks(target)}
    assert infos.keys() == {"bench_dies", *QUICK_NAMES}
    info = infos["bench_quick[0]"]
    assert info["tiny"] is True
    assert (info["asked"], info["kind"], info["bytes"]) == (15, "op", 8)
    assert info["rows"]["moe_runtime"]["ms"] > 1


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
@pytest.mark.parametrize("kill", [os.killpg, os.kill])
def test_ctrl_c_keeps_what_was_measured(folder, tmp_path, kill):
    """A terminal signals the whole process group; a script signals only the process."""
    lines = tmp_path / "r.jsonl"
    arguments = [
        folder(a=QUICK, b=SLOW),
        "bench",
        "--tiny",
        "--out",
        tmp_path / "r.json",
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            INTERRUPTED,
            *map(str, arguments),
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while Records(lines).unfinished() != "bench_slow":
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted; rerun to resume: " in errors
    assert len(Records(lines).done()) == 3
    assert not (tmp_path / "r.json").exists()
    with pytest.raises(ProcessLookupError):  # no process is left
        os.killpg(process.pid, 0)
