"""What mkdocs asks while it builds the site: the pages made of the code, and Markdown as GitHub reads it.

The command line's page is typer's own help of every verb, the Python page the signatures and docstrings of the public names:
neither is written by hand, so neither can be out of date.
"""

import importlib
import inspect
import re
import textwrap

import typer.main
from mkdocs.structure.files import File

# each module whose functions and classes users call, and what it is for
MODULES = {
    "moe_runtime": "The short way to the names used most.",
    "moe_runtime.config": "Settings of a layer.",
    "moe_runtime.ops.routing": "Router logits to experts and weights.",
    "moe_runtime.ops.moe_mlp": "The experts of a layer.",
    "moe_runtime.ops.merging": "Experts to one dense weight.",
    "moe_runtime.ops.fusion": "Specialists' logits, mixed.",
    "moe_runtime.ops.activation": "What the experts compute between their products.",
    "moe_runtime.modules.moe": "The layer.",
    "moe_runtime.modules.merged": "The layer while its mixture is learned.",
    "moe_runtime.modules.ewa": "The layer of the baseline that averages its experts.",
    "moe_runtime.hf.dropin.experts": "Stock models of transformers.",
    "moe_runtime.hf.dropin.parallel": "Experts on several ranks.",
    "moe_runtime.hf.dropin.balance": "Balance losses.",
    "moe_runtime.hf.dropin.replay": "Expert ids, recorded and replayed.",
    "moe_runtime.hf": "Trainers.",
    "moe_runtime.hf.dropin.stats": "Router statistics.",
    "moe_runtime.methods.xft": "XFT in memory.",
    "moe_runtime.methods.xft.folders": "XFT from folder to folder.",
    "moe_runtime.methods.xft.official": "Folders of the released XFT code.",
    "moe_runtime.hf.models.folders": "What a conversion of folders returns.",
    "moe_runtime.methods.xft.baselines": "XFT's baselines.",
    "moe_runtime.methods.esft": "ESFT.",
    "moe_runtime.methods.upit": "UpIT.",
    "moe_runtime.methods.lora": "LoRA experts.",
    "moe_runtime.methods.ultrafuser": "UltraFuser.",
}


def on_files(files, config):
    """Add the two pages that are made of the code."""
    files.append(File.generated(config, "cli.md", content=cli_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown, **_):
    """Give a named fence its title, and leave links to files beside docs/ without their address."""
    markdown = re.sub(r"^```(\w+) file=(\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```(\w+) \w+=[^\"\s]+$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def commands(command=None, path=("moe-runtime",)):
    """Yield every verb of the command line as its words and typer's command, groups before what is in them."""
    if command is None:
        from moe_runtime.cli.app import app as main_app

        command = typer.main.get_command(main_app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def help_of(path: tuple[str, ...], command) -> str:
    """Return what `--help` prints, at a width of 100."""
    context = command.make_context(" ".join(path), [], resilient_parsing=True, terminal_width=100, max_content_width=100)
    return command.get_help(context).rstrip()


def cli_page() -> str:
    lines = ["# Command line", "", "What `--help` of each verb prints.", ""]
    for path, command in commands():
        heading = "#" * min(len(path) + 1, 4) if len(path) > 1 else "##"
        lines += [f"{heading} {' '.join(path)}", "", "```text", help_of(path, command), "```", ""]
    return "\n".join(lines)


def public(module) -> list[str]:
    """List the names that users call: those of `__all__`, else what the module itself defines with a docstring."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and value.__doc__
    ]


def signature(name: str, value) -> str:
    """Return `name(...)`, one argument a line where it is long."""
    try:
        text = f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):  # a module, a dict, a class without a signature
        return name
    if len(text) <= 100:
        return text
    arguments, starred = [], False
    for argument in inspect.signature(value).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            arguments.append("*")
        starred = starred or argument.kind in (argument.KEYWORD_ONLY, argument.VAR_POSITIONAL)
        arguments.append(str(argument))
    result = text[text.rindex(") -> ") :] if ") -> " in text else ")"
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + result


def api_page() -> str:
    lines = ["# Python", "", "The names that users call, with their signatures and docstrings.", ""]
    for path, title in MODULES.items():
        module = importlib.import_module(path)
        lines += [f"## {path}", "", title, ""]
        for name in public(module):
            value = getattr(module, name)
            if inspect.ismodule(value):
                lines += [f"* `{name}`: the module `{value.__name__}`"]
                continue
            lines += ["", f"### {path.rpartition('.')[2]}.{name}", "", "```python", signature(name, value), "```", ""]
            if callable(value) and value.__doc__:
                lines += ["```text", textwrap.dedent(inspect.getdoc(value)), "```", ""]
        lines.append("")
    return "\n".join(lines)
