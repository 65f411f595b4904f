"""What holds for every verb: help with an example that parses, --json, completion without torch;
found by walking the tree.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from moe_runtime import config
from moe_runtime.cli import verbs as cli_verbs
from moe_runtime.cli.app import app as main_app
from moe_runtime.cli.verbs import Ends, verb
from moe_runtime.methods.prompts import PROMPTS
from papers.engine.recipe import shipped_recipes
from papers.verbs import recipes
from tests.support import cli
from tests.support.fences import parse_verb

ROOT = Path(__file__).resolve().parents[2]
TREE = get_command(main_app)


@pytest.mark.parametrize(
    "text, found", [(None, None), ("4", [4]), ("0-3,8", [0, 1, 2, 3, 8]), (" 2 - 2 ", [2])]
)
def test_numbers_and_ranges(text, found):
    assert cli_verbs.numbers(text) == found


def walk(command, words=()) -> dict[tuple[str, ...], object]:
    """Return words -> command of all groups and verbs."""
    found = {words: command}
    for name, one in getattr(command, "commands", {}).items():
        found |= walk(one, (*words, name))
    return found


VERBS = {
    words: command for words, command in walk(TREE).items() if not hasattr(command, "commands")
}
METHODS = ("xft", "esft", "upit", "ultrafuser", "lora")
ALL = {
    (program, *words): command
    for program in (cli.LIBRARY, cli.PAPERS)
    for words, command in walk(get_command(program.app)).items()
}
NAMES = [pytest.param(key, id=" ".join([key[0].name, *key[1:]])) for key in ALL]


def test_the_tree():
    """The same shape for every method; at the top what belongs to none."""
    groups = {words for words, command in walk(TREE).items() if hasattr(command, "commands")}
    assert groups == {(), *((method,) for method in METHODS)}
    top = {"train", "eval", "stats", "bench", "tune", "doctor", "memory"}
    assert {words[0] for words in VERBS if len(words) == 1} == top
    papers = walk(get_command(cli.PAPERS.app))
    top = {
        "demo",
        "demo-real",
        "run",
        "memory",
        "eval",
        "data",
        "xft",
        "esft",
        "upit",
        "ultrafuser",
    }
    assert {words[0] for words in papers if words} == top


@pytest.mark.parametrize("key", NAMES)
def test_help_says_what_everything_is_for_and_gives_an_example(key):
    command = ALL[key]
    program, *words = key
    assert command.help, "no help"
    assert command.help.strip()[0].isupper(), "no help"
    for option in command.params:
        # typer's own context and the completion's options are not ours
        assert getattr(option, "help", None), f"{option.name} has no help"
    out = CliRunner().invoke(program.app, [*words, "--help"])
    start = f"Example: {program.name} " + " ".join(words)
    assert out.exit_code == 0
    assert start in " ".join(out.output.split())
    assert hasattr(command, "commands") or "--json" in out.output, "no --json"
    assert out.output.startswith(("Usage: ", "usage: "))
    assert len(out.output.splitlines()[0]) < 100


@pytest.mark.parametrize("key", NAMES)
def test_the_example_parses(key):
    program, *words = key
    start = f"Example: {program.name} "
    epilog = ALL[key].epilog
    assert epilog.startswith(start)
    typed = shlex.split(epilog.removeprefix(start))
    assert typed[: len(words)] == words, "the example is of another verb"
    parse_verb(typed, program=program)


@pytest.fixture
def app(monkeypatch):
    """A command line of one verb that prints on the way, and whose result a test gives."""

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


def test_json_is_alone_on_stdout(app):
    result = {"path": Path("a/b"), "loss": float("nan"), "rows": (1, 2)}
    out = CliRunner().invoke(app(result), ["--json"])
    assert out.exit_code == 0
    assert json.loads(out.stdout) == {
        "path": "a/b",
        "loss": None,
        "rows": [1, 2],
    }
    assert out.stderr.splitlines() == ["on the way", "by typer"]
    out = CliRunner().invoke(app(result), [])
    assert out.stdout.splitlines() == ["on the way", "by typer"]
    assert out.stderr == ""


def test_json_is_alone_whoever_writes():
    """NCCL and programs that are started write to the descriptor, past Python's stdout."""
    code = (
        "import os, subprocess, typer\n"
        "from moe_runtime.cli.verbs import verb\n"
        "app = typer.Typer()\n"
        "@verb(app, '')\n"
        "def loud():\n"
        "    os.write(1, b'from C\\n')\n"
        "    subprocess.run(['echo', 'from a program'])\n"
        "    print('from Python')\n"
        "    return {'a': 1}\n"
        "app()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"a": 1}, done.stderr
    assert done.stderr.splitlines() == ["from C", "from a program", "from Python"]


def test_an_exit_code_comes_behind_the_json(app):
    out = CliRunner().invoke(app(Ends({"worse": 1}, 1)), ["--json"])
    assert out.exit_code == 1
    assert json.loads(out.stdout) == {"worse": 1}


def test_one_process_prints_the_json(app, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    out = CliRunner().invoke(app({"a": 1}), ["--json"])
    assert out.exit_code == 0
    assert out.stdout == ""


def test_an_interruption_says_how_to_resume(app, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["moe-runtime", "one", "--json", "--overwrite"])
    stop = KeyboardInterrupt()
    stop.kept = "The last checkpoint is c"
    cases = [
        (KeyboardInterrupt(), {}, "no incomplete output was left"),
        (stop, {}, "The last checkpoint is c"),
        (
            KeyboardInterrupt(),
            {"resumes": True, "drop": ("--overwrite",)},
            "rerun to resume: moe-runtime one --json",
        ),
    ]
    for error, options, line in cases:
        out = CliRunner().invoke(app(error, **options), ["--json"])
        assert out.exit_code == 130
        assert out.stdout == ""
        assert out.stderr.splitlines()[-1] == f"interrupted; {line}"


# completion and start
def imports_of(program: cli.Program, arguments: list[str], env: dict[str, str]) -> str:
    """Run a program without heavy imports; return what it prints."""
    code = (
        "import sys\n"
        "from moe_runtime import cli\n"
        f"sys.argv = {[program.argv0, *arguments]!r}\n"
        "try:\n"
        f"    cli.main({program.commands!r})\n"
        "finally:\n"
        "    heavy = ('torch', 'transformers', 'numpy', 'matplotlib', 'rich.table')\n"
        "    sys.stderr.write(' '.join(name for name in heavy if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"imported or said: {done.stderr}"
    assert done.stderr == "", f"imported or said: {done.stderr}"
    return done.stdout


def completed(line: str, shell: str = "bash") -> list[str]:
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
    program = program._replace(argv0="moe-runtime")  # which decides the name of the variable
    return imports_of(program, [], env).splitlines()


@pytest.mark.parametrize(
    "line, offered",
    [
        pytest.param("moe-runtime tu", ["tune"], id="verb"),
        pytest.param("moe-runtime esft sc", ["score"], id="verb of a group"),
        pytest.param("python -m papers demo --preset ", ["small", "tiny"], id="preset"),
        pytest.param(
            "moe-runtime xft upcycle a b --gate soft",
            ["softmax_topk", "softmax_topk_renorm"],
            id="gate",
        ),
        pytest.param("moe-runtime xft upcycle a b --router ", ["linear", "mlp"], id="router"),
        pytest.param("python -m papers run upit/l", ["upit/llama-2-7b-lora"], id="recipe"),
        pytest.param(
            "python -m papers run ultrafuser/",
            ["ultrafuser/tiny", "ultrafuser/ultrafuser-13b"],
            id="more",
        ),
        pytest.param(
            "python -m papers xft table1 --preset tiny",
            ["tiny", "tinyllama-1.1b"],
            id="a method's recipe",
        ),
        pytest.param("python -m papers upit b", ["budget"], id="a table"),
        pytest.param("moe-runtime esft score m --prompt ", sorted(PROMPTS), id="prompt"),
        pytest.param("moe-runtime tune --dtype f", ["float16", "float32"], id="dtype"),
    ],
)
def test_completion_offers_the_words_that_fit(line, offered):
    assert sorted(completed(line)) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_too(shell):
    assert "small" in "\n".join(completed("python -m papers demo --preset ", shell))


def test_words_that_are_offered_are_those_that_are_taken():
    from papers import demo

    for method in ("xft", "esft", "upit", "ultrafuser"):
        assert sorted(recipes(method)) == shipped_recipes(method)
    assert sorted(demo.PRESETS) == sorted(completed("python -m papers demo --preset "))
    assert set(config.GATES) == set(completed("moe-runtime xft upcycle a b --gate "))


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
    assert imports_of(program, arguments, dict(os.environ))


def test_version():
    from moe_runtime import __version__

    out = CliRunner().invoke(main_app, ["--version"])
    assert out.exit_code == 0
    assert out.output == f"moe-runtime {__version__}\n"
