"""The fenced blocks of the README and of docs/, and the real parsers of the commands in them."""

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import typer.main

from moe_runtime import cli
from tests.support.cli import LIBRARY, PAPERS, Program, program_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


class Fence(NamedTuple):
    """A fenced block; `options` follow the language, such as file=train.py."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def fences(path: Path) -> list[Fence]:
    """List the blocks of a page; an unterminated block is an error."""
    found = []
    opened = None
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
                )
            )
            opened = None
        elif opened is not None:
            opened[3].append(line + "\n")
    assert opened is None, f"{path}:{opened[0]} does not end"
    return found


ALL = [fence for page in PAGES for fence in fences(page)]


def statements(text: str) -> list[list[str]]:
    """Return the words of each command in a shell block, without comments; pipes and && separate
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
    """Parse a command with its program's parser; return the program's name. Raises for a command
    that would not run.
    """
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    if not words:
        return "assignment"
    program, *arguments = words
    name = program.removeprefix(".venv/bin/")
    if name in COMMANDS:
        COMMANDS[name](arguments, page)
    elif name not in OTHERS:
        assert (ROOT / program).is_file(), f"{page}: no test knows the command {program}"
    return name


@functools.cache
def command_line(program: Program):
    """Return typer's command of a program."""
    return typer.main.get_command(program.app)


def parse_verb(arguments: list[str], page: str = "", program: Program = LIBRARY) -> None:
    """Parse the words after a program's name with typer, and those of `train` with TRL."""
    command = command_line(program)
    path = program.name
    # parsing these options would already run something
    doing = ("--help", "--version", "--install-completion", "--show-completion")
    arguments = [argument for argument in arguments if argument not in doing]
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
    targets = re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE)
    for argument in arguments:
        variable, is_setting, _ = argument.partition("=")
        known = f"$({variable})" in text if is_setting else argument in targets
        assert known, f"{page}: make has no target {argument}"


def parse_python(arguments: list[str], page: str) -> None:
    if arguments[0] != "-m":
        files = [fence.options.get("file") for fence in ALL]
        known = arguments[0] in files or (ROOT / arguments[0]).is_file()
        assert known, f"{page}: there is no file {arguments[0]}"
        return
    module, *rest = arguments[1:]
    if module == "moe_runtime":
        parse_verb(rest)
    elif module == "papers":
        parse_verb(rest, program=PAPERS)
    else:
        assert importlib.util.find_spec(module), f"{page}: there is no module {module}"


def parse_bash(arguments: list[str], page: str) -> None:
    script, *words = arguments
    text = (ROOT / script).read_text()
    for word in words:
        assert re.search(rf"^    {word}\) echo ", text, re.MULTILINE), word


COMMANDS = {
    "moe-runtime": parse_verb,
    "make": parse_make,
    "python": parse_python,
    "bash": parse_bash,
}
# programs that are not ours: their arguments are not checked
OTHERS = {"pip", "accelerate", "torchrun", "pre-commit", "vllm", "export"}


def run_cli(words: list[str], monkeypatch) -> tuple[int, str, str]:
    """Run a program in this process, with optional NAME=VALUE words first; return exit code,
    stdout, stderr.
    """
    while "=" in words[0]:
        monkeypatch.setenv(*words[0].split("=", 1))
        words = words[1:]
    program, arguments = program_of(words)
    assert len(arguments) < len(words), f"{words[0]} is not one of our programs"
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
