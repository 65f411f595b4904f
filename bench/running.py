"""A run of benchmarks: pytest in a subprocess, results saved as they arrive, and one JSON file at
the end.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench import machine
from moe_runtime.bench.records import LOST, UNWRITTEN, Records, benchmarks
from moe_runtime.io.files import atomic_write_json, atomic_write_text, check_out_file

# not resolved, as only moe_runtime/bench is the same in a clone and in an installed package
FOLDER = Path(__file__).parent
DEVICE = "gpu" if machine.CUDA else "cpu"
SETTINGS = (
    f"--rootdir={FOLDER}",
    "-c",
    os.devnull,
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "--strict-markers",
    "-o",
    "python_files=bench_*.py",
    "-o",
    "python_functions=bench_*",
    "-q",
    "--tb=short",
    "--benchmark-columns=median",
)


class RunOutcome(NamedTuple):
    """The file of a run, and benchmark -> reason for those that failed or were skipped."""

    path: Path | None
    failed: dict[str, str]
    skipped: dict[str, str]


def kinds() -> dict[str, list[Path]]:
    """Return kind -> files of benchmarks, by their KIND, without importing them."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(FOLDER.glob("bench_*.py")):
        match = re.search(r'^KIND = "(\w+)"', path.read_text(), re.MULTILINE)
        kinds.setdefault(match[1] if match else "op", []).append(path)
    return kinds


def files(only: str | None) -> list[Path]:
    """Return the files of a comma-separated list of kinds or of names after bench_; None: all."""
    groups = kinds()
    every = sorted(path for group in groups.values() for path in group)
    if only is None:
        return every
    names = {_name(path): [path] for path in every} | groups
    chosen = set()
    for word in only.split(","):
        word = word.strip()
        if word not in names:
            every_kind = ", ".join(groups)
            known = ", ".join(map(_name, every))
            raise ValueError(
                f"only must list kinds ({every_kind}) or names ({known}), but got {word!r}"
            )
        chosen.update(names[word])
    return sorted(chosen)


def _name(path: Path) -> str:
    return path.stem.removeprefix("bench_")


def place(out: Path | None, tiny: bool = False) -> Path:
    """Return the JSON file of a run: `out`, or a file in that folder, named by date, commit, device
    and -tiny.

    An interrupted run of the same commit keeps its name, so that it is resumed.
    """
    if out is None:
        out = Path("bench-results")
        if (machine.ROOT / ".git").exists():
            out = FOLDER.resolve() / "results"
    if out.suffix == ".json":
        return out
    if out.exists() and not out.is_dir():
        raise ValueError(f"Output {out} is a file. Choose a folder, or a name that ends in .json")
    name = f"{machine.commit()}-{DEVICE}" + "-tiny" * tiny
    begun = sorted(out.glob(f"*-{name}.jsonl"))
    if begun:
        return begun[-1].with_suffix(".json")
    return out / f"{machine.today()}-{name}.json"


def check(lines: Path, target: Path, tiny: bool, rounds: int) -> None:
    """Raise ValueError for invalid paths, for mixing tiny and real results, and for resuming with
    another number of rounds.
    """
    for path in (lines, target):
        check_out_file(path, overwrite=True)
    begun = benchmarks(lines)
    kind, other = ("tiny", "real") if tiny else ("real", "tiny")
    for path, benches in ((lines, begun), (target, _there(target))):
        for bench in benches:
            if bench["extra_info"].get("tiny", tiny) != tiny:
                raise ValueError(
                    f"{path} contains {other} results. Choose another file than {target} for "
                    f"{kind} ones"
                )
    before = min((bench["extra_info"].get("asked", rounds) for bench in begun), default=rounds)
    if before != rounds:
        raise ValueError(
            f"rounds is {rounds}, but {lines} was started with {before}. Pass the same, or "
            "another --out"
        )


def resume(lines: Path, target: Path, overwrite: bool = False) -> None:
    """Count the benchmarks in `target` as measured, unless `overwrite`."""
    if overwrite:
        return
    records = Records(lines)
    done = records.done()
    for bench in _there(target):
        if bench["name"] not in done:
            records.write(bench["name"], extra_info=bench["extra_info"])


def run(paths: list[Path], lines: Path, options: list[str], update) -> None:
    """Run the files' benchmarks that are not in `lines`; `update(done, total)` reports progress.

    If the process dies, the benchmark that it ran has failed, and a new process runs the others.
    Raises OSError if `lines` cannot be written, RuntimeError if pytest cannot run at all.
    """
    records = Records(lines)
    lines.parent.mkdir(parents=True, exist_ok=True)
    while True:
        before = len(records.lines())
        # an existing folder: by default pytest-benchmark creates one in the working directory
        arguments = [
            "--results",
            str(lines),
            "--owner",
            str(os.getpid()),
            f"--benchmark-storage={lines.parent.absolute()}",
        ]
        status, output = _pytest(
            [*map(str, paths), *arguments, *options],
            records,
            update,
        )
        if status < 0 and (name := records.unfinished()):
            records.write(name, failed=f"the process died of {signal.Signals(-status).name}")
        elif status != LOST:
            break
        if len(records.lines()) == before:
            break
    if status == UNWRITTEN and (told := re.search(r"\(errno (\d+)\)", output)):
        raise OSError(
            int(told[1]),
            os.strerror(int(told[1])),
            str(lines),
        )
    if status not in (0, 1, 5):  # passed, some failed, nothing left to run
        raise RuntimeError(f"pytest failed with exit code {status}:\n{output}")


def _pytest(arguments: list[str], records: Records, update) -> tuple[int, str]:
    """Run pytest; return its exit status and the end of its output. Ctrl-C also ends it."""
    # pytest-benchmark disables itself in workers of xdist, which it detects by these variables
    env = {}
    for name, value in os.environ.items():
        if not name.startswith("PYTEST"):
            env[name] = value
    # fixes for Triton's interpreter, for --tiny without a GPU
    if (machine.ROOT / "tests" / "support").is_dir():
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(machine.ROOT), env.get("PYTHONPATH")))
        )
    before = len(records.done())
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *SETTINGS, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
                if planned := records.planned():
                    update(len(records.done()), before + planned)
        except BaseException:
            _end(process)
            raise
        log.seek(0)
        return process.returncode, log.read()[-3000:]


def _end(process) -> None:
    """Wait for the process, which also receives a terminal's Ctrl-C; otherwise interrupt it, then
    kill it.
    """
    for patience, step in (
        (2, lambda: process.send_signal(signal.SIGINT)),
        (10, process.kill),
        (None, None),
    ):
        try:
            process.wait(timeout=patience)
            return
        except subprocess.TimeoutExpired:
            step()


def gather(lines: Path, target: Path | None) -> RunOutcome:
    """Write the results in `lines` as one JSON file, keeping `target`'s of other benchmarks.

    `lines` is removed unless benchmarks failed; failures are not kept there, so that a rerun
    repeats them.
    """
    records = Records(lines)
    states: dict[str, dict] = {"failed": {}, "skipped": {}}
    for name, line in records.last().items():
        for state, names in states.items():
            if state in line:
                names[name] = line[state]
    if target is None:
        return RunOutcome(None, **states)
    measured = {}
    newest = {}
    for bench in (*_there(target), *benchmarks(lines)):
        name = bench["name"]
        # an earlier result of a benchmark that failed now is dropped
        if name not in states["failed"]:
            newest = bench["extra_info"]
            measured[name] = {"name": name, "extra_info": newest}
    if measured:
        about = {key: newest.get(key) for key in machine.describe()}
        benches = list(measured.values())
        atomic_write_json(target, {"about": about, "benchmarks": benches, **states})
    if states["failed"]:
        left = []
        for line in records.lines():
            if not {"failed", "began"} & line.keys():
                left.append(json.dumps(line) + "\n")
        atomic_write_text(lines, "".join(left))
    else:
        lines.unlink()
    return RunOutcome(target if measured else None, **states)


def _there(target: Path) -> list[dict]:
    return benchmarks(target) if target.exists() else []
