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
from moe_runtime.cli.verbs import Ends, Kept, verb
from moe_runtime.experiments.recipe import shipped_recipes
from moe_runtime.io.prompts import PROMPTS

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


ALL = walk(TREE)
VERBS = {words: command for words, command in ALL.items() if not hasattr(command, "commands")}
METHODS = ("xft", "esft", "upit", "ultrafuser")  # and lora, which has no paper of its own here
NAMES = [pytest.param(words, id=" ".join(words) or "moe-runtime") for words in ALL]


def test_the_tree():
    """The same shape for every method; at the top what belongs to none."""
    top = {words[0] for words in ALL if len(words) == 1}
    top_verbs = {
        "demo",
        "demo-real",
        "run",
        "train",
        "eval",
        "data",
        "stats",
        "bench",
        "tune",
        "doctor",
        "memory",
        "paper",
        "lora",
    }
    assert top == {*top_verbs, *METHODS}
    assert {words for words in ALL if words not in VERBS} == {
        (),
        ("paper",),
        ("data",),
        ("lora",),
        *((method,) for method in METHODS),
        *(("paper", method) for method in METHODS),
    }


@pytest.mark.parametrize("words", NAMES)
def test_help_says_what_everything_is_for_and_gives_an_example(words):
    command = ALL[words]
    assert command.help and command.help.strip()[0].isupper(), "no help"
    for option in command.params:
        # typer's own context and the completion's options are not ours
        assert getattr(option, "help", None), f"{option.name} has no help"
    out = CliRunner().invoke(main_app, [*words, "--help"])
    start = "Example: moe-runtime " + " ".join(words)
    assert out.exit_code == 0 and start in " ".join(out.output.split())
    assert words not in VERBS or "--json" in out.output, "no --json"
    assert out.output.startswith(("Usage: ", "usage: ")) and len(out.output.splitlines()[0]) < 100


@pytest.mark.parametrize("words", NAMES)
def test_the_example_parses(words):
    epilog = ALL[words].epilog
    assert epilog.startswith("Example: moe-runtime ")
    typed = shlex.split(epilog.removeprefix("Example: "))[1:]
    assert tuple(typed[: len(words)]) == words, "the example is of another verb"
    command = TREE
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(command.name, list(typed), parent=context)
        name, command, typed = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
    command.make_context(name, typed, parent=context)  # raises UsageError where it does not parse


@pytest.fixture
def app(monkeypatch):
    """A command line of one verb that prints on the way, and whose result a test gives."""

    def make(result, kept=None):
        app = typer.Typer()

        def one(path: Path = Path("x")):
            """Do it."""
            print("on the way")
            typer.echo("by typer")
            if isinstance(result, BaseException):
                raise result
            return result

        verb(app, "", kept)(one)
        return app

    monkeypatch.delenv("RANK", raising=False)
    return make


def test_json_is_alone_on_stdout(app):
    result = {"path": Path("a/b"), "loss": float("nan"), "rows": (1, 2)}
    out = CliRunner().invoke(app(result), ["--json"])
    assert out.exit_code == 0 and json.loads(out.stdout) == {
        "path": "a/b",
        "loss": None,
        "rows": [1, 2],
    }
    assert out.stderr.splitlines() == ["on the way", "by typer"]
    out = CliRunner().invoke(app(result), [])
    assert out.stdout.splitlines() == ["on the way", "by typer"] and out.stderr == ""


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
    assert done.returncode == 0 and json.loads(done.stdout) == {"a": 1}, done.stderr
    assert done.stderr.splitlines() == ["from C", "from a program", "from Python"]


def test_an_exit_code_comes_behind_the_json(app):
    out = CliRunner().invoke(app(Ends({"worse": 1}, 1)), ["--json"])
    assert out.exit_code == 1 and json.loads(out.stdout) == {"worse": 1}


def test_one_process_prints_the_json(app, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    out = CliRunner().invoke(app({"a": 1}), ["--json"])
    assert out.exit_code == 0 and out.stdout == ""


def test_an_interruption_says_what_the_work_says_is_kept(app):
    stop = KeyboardInterrupt()
    stop.kept = "The last checkpoint is c"
    for error, line in (
        (KeyboardInterrupt(), "interrupted; nothing was written"),
        (stop, f"interrupted; {stop.kept}"),
    ):
        out = CliRunner().invoke(app(error, Kept()), ["--json"])
        assert out.exit_code == 130 and out.stdout == "" and out.stderr.splitlines()[-1] == line


# completion and start
def completed(line: str, shell: str = "bash") -> tuple[list[str], float]:
    """Return what a shell offers behind `line`, and the seconds of CPU that it took."""
    words = line.split(" ")
    env = {
        **os.environ,
        "_MOE_RUNTIME_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = (
        "import sys\n"
        "from moe_runtime import cli\n"
        "sys.argv = ['moe-runtime']\n"
        "try:\n    cli.main()\n"
        "finally:\n    sys.stderr.write(' '.join(m "
        "for "
        "m "
        "in "
        "('torch', "
        "'transformers', "
        "'rich.table') if m in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr == "", f"imported or said: {done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "line, offered",
    [
        pytest.param("moe-runtime tu", ["tune"], id="verb"),
        pytest.param("moe-runtime esft sc", ["score"], id="verb of a group"),
        pytest.param("moe-runtime demo --preset ", ["small", "tiny"], id="preset"),
        pytest.param(
            "moe-runtime xft upcycle a b --gate soft",
            ["softmax_topk", "softmax_topk_renorm"],
            id="gate",
        ),
        pytest.param("moe-runtime xft upcycle a b --router ", ["linear", "mlp"], id="router"),
        pytest.param("moe-runtime run upit/l", ["upit/llama-2-7b-lora"], id="recipe"),
        pytest.param(
            "moe-runtime run ultrafuser/",
            ["ultrafuser/sums", "ultrafuser/tiny", "ultrafuser/ultrafuser-13b"],
            id="more",
        ),
        pytest.param(
            "moe-runtime paper xft table1 --preset tiny",
            ["tiny", "tinyllama-1.1b"],
            id="a method's recipe",
        ),
        pytest.param("moe-runtime paper upit ckpt b", ["back"], id="a table's strategy"),
        pytest.param("moe-runtime esft score m --prompt ", sorted(PROMPTS), id="prompt"),
        pytest.param("moe-runtime tune --dtype f", ["float16", "float32"], id="dtype"),
    ],
)
def test_completion_offers_the_words_that_fit(line, offered):
    assert sorted(completed(line)) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_too(shell):
    assert "small" in "\n".join(completed("moe-runtime demo --preset ", shell))


def test_words_that_are_offered_are_those_that_are_taken():
    from moe_runtime.methods.xft import demo

    for method in ("xft", "esft", "upit", "ultrafuser"):
        assert sorted(cli_verbs.recipes(method)) == shipped_recipes(method)
    assert sorted(demo.PRESETS) == sorted(completed("moe-runtime demo --preset "))
    assert set(config.GATES) == set(completed("moe-runtime xft upcycle a b --gate "))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["xft", "upcycle", "--help"], ["paper", "esft", "--help"]],
)
def test_help_and_version_start_without_torch(arguments):
    code = (
        "import sys\n"
        "from moe_runtime import cli\n"
        f"sys.argv = ['moe-runtime', *{arguments!r}]\n"
        "try:\n    cli.main()\n"
        "finally:\n"
        "    names = [m for m in ('torch', 'transformers', "
        "'numpy', "
        "'matplotlib') "
        "if "
        "m "
        "in "
        "sys.modules]\n"
        "    sys.stderr.write(' '.join(names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and done.stderr == ""


def test_version():
    from moe_runtime import __version__

    out = CliRunner().invoke(main_app, ["--version"])
    assert out.exit_code == 0 and out.output == f"moe-runtime {__version__}\n"
