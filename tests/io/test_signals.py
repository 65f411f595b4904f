"""Real signals to real commands: the exit code, one line that says what is kept, no partial output,
and resuming.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from moe_runtime.io import signals
from tests.hf.tiny import dense
from tests.papers.xft.test_study import make_recipe
from tests.support.captured import captured
from tests.support.cli import program_of
from tests.support.dist_launch import forked, launch
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# moe-runtime, which sends itself a signal when the progress bar with that title reaches that step
COMMAND = """
import os, signal, sys
from contextlib import contextmanager
from moe_runtime import cli
from moe_runtime.io import console
from tests.support.cli import program_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

title, at, number = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
bar = console.bar

@contextmanager
def counted(name, *args, **kwargs):
    with bar(name, *args, **kwargs) as update:
        def count(done, total, *rest):
            update(done, total, *rest)
            if name == title and count.is_armed and done >= at:
                count.is_armed = False
                os.kill(os.getpid(), number)
        count.is_armed = True
        yield count

console.bar = counted
program, arguments = program_of(sys.argv[4:])
sys.argv = [program.argv0, *arguments]
cli.main(program.commands)
"""


def stopped(title: str, at: float, number: int, *arguments) -> subprocess.CompletedProcess:
    """Run the command, which gets the signal at that point."""
    return forked(
        COMMAND,
        title,
        at,
        int(number),
        *arguments,
    )


def completed(*arguments) -> subprocess.CompletedProcess:
    """Run the command to completion."""
    program, arguments = program_of([str(argument) for argument in arguments])
    lines = [
        "import sys",
        "from moe_runtime import cli",
        f"sys.argv[0] = {program.argv0!r}",
        f"cli.main({program.commands!r})",
    ]
    return forked("\n".join(lines), *arguments)


def last_line(done: subprocess.CompletedProcess) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


STOPS = pytest.mark.parametrize(
    "number, word", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)


@STOPS
def test_a_conversion_leaves_what_was_there(tmp_path, number, word):
    dense("llama").save_pretrained(tmp_path / "dense")
    out = tmp_path / "moe"
    upcycle = ("xft", "upcycle", tmp_path / "dense", out, "--top-k", 2, "--num-experts", 4)
    done = stopped(
        "upcycling",
        1,
        number,
        *upcycle,
    )

    assert done.returncode == 128 + number, done.stderr
    assert done.stdout == ""
    assert last_line(done) == f"{word}; no incomplete output was left"
    assert os.listdir(tmp_path) == ["dense"]

    out.mkdir()
    (out / "note").write_text("old")
    done = stopped(
        "upcycling",
        1,
        number,
        *upcycle,
        "--overwrite",
    )
    assert last_line(done) == f"{word}; no incomplete output was left"
    assert sorted(os.listdir(tmp_path)) == ["dense", "moe"]
    assert (out / "note").read_text() == "old"


# moe-runtime, which sends itself a signal while its verbs are imported or its arguments are parsed
EARLY = """
import os, signal, sys
from moe_runtime import cli

signal.signal(signal.SIGINT, signal.default_int_handler)
place, number = sys.argv[1], int(sys.argv[2])
sys.argv = ["moe-runtime", "doctor"]

class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            os.kill(os.getpid(), number)

if place == "parsing":
    from typer.core import TyperGroup
    parse = TyperGroup.parse_args

    def parse_args(self, context, args):
        os.kill(os.getpid(), number)
        return parse(self, context, args)

    TyperGroup.parse_args = parse_args
sys.meta_path.insert(0, Importing())
cli.main()
"""


@STOPS
@pytest.mark.parametrize(
    "place, rest",
    [
        ("typer", ""),
        ("parsing", ""),
        # inside the verb, it is known that the verb writes nothing
        ("moe_runtime.tools.doctor", "; no incomplete output was left"),
    ],
)
def test_a_signal_before_a_verb_runs_ends_alike(place, rest, number, word):
    command = [
        sys.executable,
        "-c",
        EARLY,
        place,
        str(int(number)),
    ]
    done = captured(command, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 128 + number

    assert done.stdout == ""
    assert done.stderr == f"{word}{rest}\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe with few steps and without save_steps: only the interruption writes a checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    values = make_recipe(folder, tune__save_steps=None).to_dict()
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"method": "xft"} | values))
    return folder / "recipe.yaml"


# moe-runtime train, which is terminated in its second step
TRAIN = """
import os, signal, sys
from moe_runtime import cli

cli._set_environment()  # before transformers is imported, as the command does
from moe_runtime.hf.training import saving

ends = saving.StopCallback.on_step_end

def at_step_two(self, args, state, control, **kwargs):
    if state.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return ends(self, args, state, control, **kwargs)

saving.StopCallback.on_step_end = at_step_two
sys.argv = ["moe-runtime", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.slow
def test_train_writes_a_checkpoint_and_goes_on(recipe, tmp_path):
    folder = recipe.parent
    out = tmp_path / "tuned"
    arguments = [
        "train",
        "--model",
        str(folder / "base"),
        "--data",
        str(folder / "rows.jsonl"),
    ]
    arguments += [
        "--output_dir",
        str(out),
        "--max_steps",
        "4",
        "--json",
    ]
    # a fresh Python process, because output of other packages is configured before they are
    # imported
    command = [sys.executable, "-c", TRAIN, *arguments]
    done = captured(command, cwd=ROOT, timeout=PATIENCE)

    assert done.returncode == 143, done.stderr
    assert last_line(done) == (
        f"terminated; {out}/checkpoint-2 is the last checkpoint. Rerun with --resume to continue "
        "from it"
    )
    assert "Warning" not in done.stderr
    assert "it/s]" not in done.stderr
    again = completed(*arguments, "--resume_from_checkpoint", "true")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["path"] == str(out), again.stderr
    assert "after step 4" in again.stderr


def test_signals_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals.sigterm_raises(), signals.after_the_step() as stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping.asked is None
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """Results of two processes that receive signals in different steps
    (tests/support/dist_interruption.py).
    """
    folder = tmp_path_factory.mktemp("ranks")
    launch(
        ROOT / "tests" / "support" / "dist_interruption.py",
        2,
        folder,
        str(folder),
    )
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    "case, how, steps",
    [("one of them", "Terminated", 2), ("all, not together", "KeyboardInterrupt", 1)],
)
def test_all_processes_stop_after_the_same_step_and_resume(ranks, case, how, steps):
    for rank in ranks:
        run = rank[case]
        assert run["how"] == how
        assert run["steps"] == list(range(1, steps + 1))
        assert run["saved"] == [f"checkpoint-{steps}"]
        assert run["next"] == "done"
        assert run["again"] == list(range(steps + 1, 5))
        for name, value in rank["whole"]["weights"].items():
            assert run["weights"][name].equal(value)
