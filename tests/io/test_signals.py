"""Real signals to real commands: the exit code, one line that says what is kept, nothing half
written, and going on.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.hf.tiny import dense
from tests.papers.xft.test_study import make_recipe
from tests.support.cli import program_of
from tests.support.dist_launch import forked, launch
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# moe-runtime, which sends itself a signal when the bar of that title has come to that step
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
    return forked(COMMAND, title, at, int(number), *arguments)


def completed(*arguments) -> subprocess.CompletedProcess:
    """Run the command to its end."""
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
    upcycle = ("xft", "upcycle", tmp_path / "dense", tmp_path / "moe", "--top-k", 2)
    done = stopped("upcycling", 1, number, *upcycle, "--num-experts", 4)

    assert done.returncode == 128 + number, done.stderr
    assert done.stdout == ""
    assert last_line(done) == f"{word}; no incomplete output was left"
    assert os.listdir(tmp_path) == ["dense"]

    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "note").write_text("old")
    done = stopped("upcycling", 1, number, *upcycle, "--num-experts", 4, "--overwrite")
    assert last_line(done) == f"{word}; no incomplete output was left"
    assert sorted(os.listdir(tmp_path)) == ["dense", "moe"]
    assert (tmp_path / "moe" / "note").read_text() == "old"


# moe-runtime, which sends itself a signal while its verbs are imported, or while its words are
# parsed
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
    "place", ["typer", "moe_runtime.cli.verbs", "parsing", "moe_runtime.tools.doctor"]
)
def test_a_signal_before_a_verb_runs_ends_alike(place, number, word):
    command = [sys.executable, "-c", EARLY, place, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)

    assert done.returncode == 128 + number
    assert done.stdout == ""
    # within the verb it is known that it writes nothing
    assert done.stderr == (
        f"{word}; no incomplete output was left\n"
        if place == "moe_runtime.tools.doctor"
        else f"{word}\n"
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe of few steps without save_steps: only the interruption writes a checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    path = folder / "recipe.yaml"
    path.write_text(
        yaml.safe_dump({"method": "xft"} | make_recipe(folder, tune__save_steps=None).to_dict())
    )
    return path


@pytest.fixture(scope="module")
def whole(recipe) -> dict:
    """The dense model that the recipe makes when nobody disturbs it."""
    done = completed("papers", "run", recipe, "--out", recipe.parent / "whole", "--json")
    assert done.returncode == 0, done.stderr
    return weights(json.loads(done.stdout))


def weights(result: dict) -> dict:
    return load_file(Path(result["results"][-1]["folder"], "model.safetensors"))


@pytest.mark.slow
def test_a_run_goes_on_from_the_step_where_it_was_stopped(recipe, whole, tmp_path):
    out = tmp_path / "out"
    done = stopped("moe", 2, signal.SIGINT, "papers", "run", recipe, "--out", out)
    assert done.returncode == 130, done.stderr
    word, _, command = last_line(done).partition("; rerun to resume: ")
    assert word == "interrupted"
    command = shlex.split(command)
    assert command == ["python", "-m", "papers", "run", str(recipe), "--out", str(out)]
    assert "stopping after this step with a checkpoint" in done.stderr
    assert [path.name for path in out.glob("*.checkpoints/checkpoint-*")] == ["checkpoint-2"]
    assert not list(out.glob(".*.tmp-*")), "a half written stage is left"
    again = completed(*command, "--json")
    assert again.returncode == 0, again.stderr
    found = weights(json.loads(again.stdout))
    assert found.keys() == whole.keys()
    for name in whole:
        assert found[name].equal(whole[name])
    assert not list(out.glob("*.checkpoints"))


@pytest.mark.slow
def test_train_writes_a_checkpoint_and_goes_on(recipe, tmp_path):
    code = """
import os, signal, sys
from moe_runtime import cli

cli._quiet()  # before transformers is imported, as the command does
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
    folder = recipe.parent
    out = tmp_path / "tuned"
    arguments = [
        "train",
        "--model",
        folder / "base",
        "--data",
        folder / "rows.jsonl",
        "--output_dir",
        out,
        "--max_steps",
        "4",
    ]
    arguments = [*map(str, arguments), "--json"]
    # a whole start of Python: what other packages would print is settled before they are imported
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert done.returncode == 143, done.stderr
    line = (
        f"terminated; {out}/checkpoint-2 is the last checkpoint. Rerun with --resume to continue "
        "from it"
    )
    assert last_line(done) == line
    assert "Warning" not in done.stderr
    assert "it/s]" not in done.stderr
    again = completed(*arguments, "--resume_from_checkpoint", "true")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["path"] == str(out), again.stderr
    assert "after step 4" in again.stderr


def test_signals_that_are_ignored_stay_ignored():
    from moe_runtime.io import signals

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
    """What each of two processes says of signals that reach them in different steps
    (tests/support/dist_interruption.py).
    """
    import torch

    folder = tmp_path_factory.mktemp("ranks")
    launch(ROOT / "tests" / "support" / "dist_interruption.py", 2, folder, str(folder))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    "case, how, steps",
    [
        pytest.param("one of them", "Terminated", 2, id="a signal to one"),
        pytest.param("all, not together", "KeyboardInterrupt", 1, id="signals in different steps"),
    ],
)
def test_all_processes_stop_behind_the_same_step_and_go_on(ranks, case, how, steps):
    for one in ranks:
        found = one[case]
        whole = one["whole"]["weights"]
        assert (found["how"], found["steps"]) == (how, list(range(1, steps + 1)))
        assert found["saved"] == [f"checkpoint-{steps}"]
        assert found["next"] == "done"
        assert found["again"] == list(range(steps + 1, 5))
        for name in whole:
            assert found["weights"][name].equal(whole[name])
