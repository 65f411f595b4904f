"""Rules for every verb, found by walking the command tree: help with an example that parses,
--json, completion without torch.
"""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from moe_runtime import __version__, config
from moe_runtime.cli import verbs as cli_verbs
from moe_runtime.cli.app import app as main_app
from moe_runtime.cli.verbs import Ends, verb
from tests.support import cli
from tests.support.captured import captured
from tests.support.fences import parse_verb

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "text, found", [(None, None), ("4", [4]), ("0-3,8", [0, 1, 2, 3, 8]), (" 2 - 2 ", [2])]
)
def test_numbers_and_ranges(text, found):
    assert cli_verbs.numbers(text) == found


def walk(command, words=()) -> dict[tuple[str, ...], object]:
    """Return {words: command} of all groups and verbs."""
    walked = {words: command}
    for name, one in getattr(command, "commands", {}).items():
        walked |= walk(one, (*words, name))
    return walked


TREE = walk(get_command(main_app))
VERBS = {words: command for words, command in TREE.items() if not hasattr(command, "commands")}


ALL = {}


for PROGRAM in (cli.LIBRARY, cli.PAPERS):
    for WORDS, COMMAND in walk(get_command(PROGRAM.app)).items():
        ALL[f"{PROGRAM.name} {' '.join(WORDS)}".strip()] = (PROGRAM, list(WORDS), COMMAND)


@pytest.mark.parametrize("line", ALL)
def test_help_says_what_everything_is_for_and_gives_an_example_that_parses(line):
    program, words, command = ALL[line]
    assert command.help, "no help"
    assert command.help.strip()[0].isupper()
    for option in command.params:
        # typer adds the context and the completion options itself
        assert getattr(option, "help", None), f"{option.name} has no help"
    out = CliRunner().invoke(program.app, [*words, "--help"])
    assert out.exit_code == 0
    assert f"Example: {line}" in " ".join(out.output.split())
    assert hasattr(command, "commands") or "--json" in out.output, "no --json"
    assert out.output.startswith(("Usage: ", "usage: "))
    assert len(out.output.splitlines()[0]) < 100
    start = f"Example: {program.name} "
    assert command.epilog.startswith(start)
    typed = shlex.split(command.epilog.removeprefix(start))
    assert typed[: len(words)] == words, "the example is for another verb"
    parse_verb(typed, program=program)


@pytest.fixture
def app(monkeypatch):
    """A command line with one verb that prints while it runs and returns the given result."""

    def make(result, **options):
        app = typer.Typer()

        def one(path: Path = Path("x")):
            """Do it."""
            print("on the way")
            typer.echo("by typer")
            if isinstance(result, BaseException):
                raise result
            return result

        verb(app, "", **options)(one)
        return app

    monkeypatch.delenv("RANK", raising=False)
    return make


def test_json_is_alone_on_stdout(app, monkeypatch):
    result = {"path": Path("a/b"), "loss": float("nan"), "rows": (1, 2)}
    out = CliRunner().invoke(app(result), ["--json"])
    assert out.exit_code == 0
    assert json.loads(out.stdout) == {"path": "a/b", "loss": None, "rows": [1, 2]}
    assert out.stderr.splitlines() == ["on the way", "by typer"]
    out = CliRunner().invoke(app(result), [])
    assert out.stdout.splitlines() == ["on the way", "by typer"]
    assert out.stderr == ""
    out = CliRunner().invoke(app(Ends({"worse": 1}, 1)), ["--json"])
    assert out.exit_code == 1
    assert json.loads(out.stdout) == {"worse": 1}
    monkeypatch.setenv("RANK", "1")  # only one process prints it
    out = CliRunner().invoke(app(result), ["--json"])
    assert out.exit_code == 0
    assert out.stdout == ""


LOUD = """
import os, subprocess, typer
from moe_runtime.cli.verbs import verb

app = typer.Typer()

@verb(app, '')
def loud():
    os.write(1, b'from C\\n')
    subprocess.run(['echo', 'from a program'])
    print('from Python')
    return {'a': 1}

app()
"""


def test_json_is_alone_on_the_descriptor():
    """NCCL and child processes write to the file descriptor, bypassing Python's stdout."""
    done = captured([sys.executable, "-c", LOUD, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"a": 1}, done.stderr
    assert done.stderr.splitlines() == ["from C", "from a program", "from Python"]


@pytest.mark.parametrize(
    "where, options, line",
    [
        (None, {}, "no incomplete output was left"),
        ("The last checkpoint is c", {}, "The last checkpoint is c"),
        (
            None,
            {"resumes": True, "drop": ("--overwrite",)},
            "rerun to resume: moe-runtime one --json",
        ),
    ],
)
def test_an_interruption_says_how_to_resume(app, monkeypatch, where, options, line):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["moe-runtime", "one", "--json", "--overwrite"])
    stop = KeyboardInterrupt()
    if where:
        stop.kept = where
    out = CliRunner().invoke(app(stop, **options), ["--json"])
    assert out.exit_code == 130
    assert out.stdout == ""
    assert out.stderr.splitlines()[-1] == f"interrupted; {line}"


# a program that reports at exit which heavy packages it has imported
START = """
import sys
from moe_runtime import cli
sys.argv = {argv!r}
try:
    cli.main({commands!r})
finally:
    heavy = {{'torch', 'transformers', 'numpy', 'matplotlib', 'rich.table'}}
    sys.stderr.write(' '.join(heavy & set(sys.modules)))
"""


def imports_of(program: cli.Program, arguments: list[str], env: dict[str, str]) -> str:
    """Run a program that must not import heavy packages, and return its output."""
    code = START.format(argv=[program.argv0, *arguments], commands=program.commands)
    command = [sys.executable, "-c", code]
    done = captured(command, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", f"imported or printed: {done.stderr}"
    return done.stdout


def completed(line: str, shell: str = "bash") -> str:
    """Return what a shell offers after `line`."""
    program, arguments = cli.program_of(line.split(" "))
    line = " ".join(["moe-runtime", *arguments])
    env = os.environ | {
        "_MOE_RUNTIME_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(arguments)),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    program = program._replace(argv0="moe-runtime")  # it determines the name of the variable
    return imports_of(program, [], env)


@pytest.mark.parametrize(
    "line, offered",
    [
        pytest.param("moe-runtime tu", ["tune"], id="verb"),
        pytest.param("moe-runtime xft upcycle a b --gate ", sorted(config.GATES), id="gate"),
        pytest.param("python -m papers run upit/l", ["upit/llama-2-7b-lora"], id="recipe"),
        pytest.param(
            "python -m papers xft table1 --preset tiny",
            ["tiny", "tinyllama-1.1b"],
            id="a method's recipe",
        ),
        pytest.param("python -m papers upit b", ["budget"], id="a table"),
    ],
)
def test_completion_offers_the_words_that_fit(line, offered):
    assert sorted(completed(line).splitlines()) == offered


@pytest.mark.parametrize(
    "line",
    [
        "moe-runtime --help",
        "moe-runtime --version",
        "moe-runtime xft upcycle --help",
        "moe-runtime eval --help",
        "python -m papers esft --help",
    ],
)
def test_help_and_version_start_without_torch(line):
    program, arguments = cli.program_of(line.split())
    printed = imports_of(program, arguments, dict(os.environ))
    assert printed == f"moe-runtime {__version__}\n" if "--version" in line else printed


@pytest.mark.parametrize("visible, expected", [(None, "0"), ("3", "3")])
def test_one_gpu_keeps_the_users_choice(monkeypatch, visible, expected):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cli_verbs.one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
