"""Hooks of mkdocs: the pages generated from the code and the notebooks, and Markdown as GitHub
reads it.

The command line's page consists of typer's help of every verb, the Python page of the public names'
signatures and docstrings, a notebook's page of its cells with their outputs.
"""

import html
import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path

import typer.main
from mkdocs.structure.files import File

# the modules of the Python page: what each is for, and the names that users call where the module
# has no __all__
MODULES = {
    "moe_runtime": ("The most used names.", ()),
    "moe_runtime.config": ("Settings of a layer.", ("MoEConfig",)),
    "moe_runtime.modules.moe": ("The MoE layer.", ("MoE", "Router", "Experts")),
    "moe_runtime.modules.merged": (
        "The layer while its mixing coefficients are learned.",
        ("MergedMLP",),
    ),
    "moe_runtime.modules.ewa": (
        "The EWA baseline, which averages its experts.",
        ("EWAMLP", "average_experts_"),
    ),
    "moe_runtime.ops.routing": (
        "From router logits to experts and weights.",
        ("Routing", "route", "route_reference"),
    ),
    "moe_runtime.ops.moe_mlp": ("The experts of a layer.", ("moe_mlp", "moe_mlp_reference")),
    "moe_runtime.ops.activation": ("Activations between the experts' products.", ("Activation",)),
    "moe_runtime.ops.merging": (
        "From experts to one dense weight.",
        (
            "mixing",
            "soup_logits",
            "init_mixture",
            "uniform_mixture",
            "merge_experts",
            "merged_linear",
        ),
    ),
    "moe_runtime.ops.fusion": (
        "Mixed logits of specialists.",
        ("mix", "fuse_logits", "fused_cross_entropy"),
    ),
    "moe_runtime.ops.expert_rows": ("Gradient accumulation in place.", ("accumulate_into_grad",)),
    "moe_runtime.hf": ("Trainers.", ()),
    "moe_runtime.hf.dropin.adapters": ("LoRA on the experts of stock models.", ("adapted_stacks",)),
    "moe_runtime.hf.dropin.parallel": (
        "Expert parallelism.",
        ("shard_experts", "clip_grad_norm", "parameter_groups", "save_pretrained"),
    ),
    "moe_runtime.hf.dropin.balance": ("Balance losses.", ("use_balance_loss",)),
    "moe_runtime.hf.dropin.stats": (
        "Router statistics.",
        (
            "collect_router_stats",
            "RouterCounter",
            "RouterStats",
            "expert_load",
            "load_entropy",
            "max_violation",
            "dead_experts",
        ),
    ),
    "moe_runtime.hf.dropin.replay": (
        "Recording and replaying experts.",
        ("record_routing", "replay_routing", "RoutingRecord"),
    ),
    "moe_runtime.methods.xft": (
        "XFT in memory.",
        ("upcycle", "UpcycleReceipt", "to_mergeable", "mixing_coefficients", "merge", "save_dense"),
    ),
    "moe_runtime.methods.xft.folders": (
        "XFT from folder to folder.",
        ("upcycle_folder", "mergeable_folder", "merge_folder"),
    ),
    "moe_runtime.methods.xft.official": (
        "Folders of the released XFT code.",
        ("import_official", "export_official"),
    ),
    "moe_runtime.methods.xft.baselines": ("XFT's baselines.", ()),
    "moe_runtime.hf.models.folders": ("What a conversion of folders returns.", ("FolderReceipt",)),
    "moe_runtime.methods.esft": ("ESFT.", ()),
    "moe_runtime.methods.upit": ("UpIT.", ()),
    "moe_runtime.methods.lora": ("LoRA experts.", ()),
    "moe_runtime.methods.ultrafuser": ("UltraFuser.", ()),
}


NOTEBOOKS = sorted(Path(__file__).parent.glob("notebooks/*.ipynb"))


def on_files(files, config):
    """Add the pages that are generated."""
    pages = {"cli.md": cli_page(), "api.md": api_page()}
    for name, content in (
        pages | {f"notebook-{path.stem}.md": notebook_page(path) for path in NOTEBOOKS}
    ).items():
        files.append(File.generated(config, name, content=content))
    return files


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text, and its code with what it printed."""
    lines = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        lines += [text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```", ""]
        if printed := "".join("".join(out["text"]) for out in cell.get("outputs", ())):
            lines += [f"```text\n{printed.rstrip()}\n```", ""]
    return "\n".join(lines)


def on_page_markdown(markdown, page=None, **_):
    """Give a named fence its title, link notebooks to their pages, and drop the address of links to
    files beside docs/.
    """
    depth = page.file.src_uri.count("/") if page else 0
    outside = re.escape("../" * (depth + 1))
    markdown = re.sub(r"\]\(notebooks/([\w-]+)\.ipynb\)", r"](notebook-\1.md)", markdown)
    markdown = re.sub(r"^```(\w+) file=(\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```(\w+) \w+=[^\"\s]+$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(rf"(?<!!)\[([^]]+)\]\({outside}[^)]*\)", r"\1", markdown)


def commands(command=None, path=("moe-runtime",)):
    """Yield every verb of the command line as its words and typer's command, groups before what is
    in them.
    """
    if command is None:
        from moe_runtime.cli.app import app as main_app

        command = typer.main.get_command(main_app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def cell(text: str) -> str:
    """Return a text for a cell of a table, with what Markdown and HTML would read as markup
    escaped.
    """
    return " ".join(escaped(text).replace("|", "\\|").split())


def escaped(text: str) -> str:
    """Escape markup outside of code spans."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(
        part if i % 2 else re.sub(r"([*_\[\]#])", r"\\\1", html.escape(part, quote=False))
        for i, part in enumerate(parts)
    )


def prose(text: str) -> list[str]:
    """Return the lines of a docstring as Markdown: indented parts as blocks, the rest as paragraphs
    and lists.
    """
    lines = []
    for part in re.split(r"\n\s*\n", text.strip()):
        if part.startswith("  "):
            lines += ["```text", textwrap.dedent(part), "```", ""]
        else:
            lines += [
                re.sub(r"^\\\*(?= )", "*", escaped(line.strip())) for line in part.splitlines()
            ] + [""]
    return lines


def verb(path: tuple[str, ...], command) -> list[str]:
    """Return the lines of one command: what it does, its usage, its arguments and options as a
    table, its example.
    """
    context = command.make_context(
        " ".join(path), [], resilient_parsing=True, terminal_width=10**4, max_content_width=10**4
    )
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = [
        f"{'#' * min(len(path) + 1, 4)} {' '.join(path)}",
        "",
        *prose(inspect.cleandoc(command.help or "")),
    ]
    lines += ["```text", usage, "```", ""]
    records = [
        record
        for option in command.get_params(context)
        if (record := option.get_help_record(context))
    ]
    records = [record for record in records if record[0] != "--help"]
    if records:
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| `{name.replace('|', '/')}` | {cell(text)} |" for name, text in records] + [""]
    if children := getattr(command, "commands", None):
        lines += ["| command | what it does |", "|---|---|"]
        for name, child in children.items():
            anchor = "-".join((*path, name))
            lines.append(
                f"| [{name}](#{anchor}) | {cell((child.help or '').partition(chr(10) * 2)[0])} |"
            )
        lines.append("")
    if command.epilog:
        lines += ["```text", command.epilog, "```", ""]
    return lines


def cli_page() -> str:
    lines = [
        "# Options of every command",
        "",
        "Every command with its arguments, options and an example, as `--help` prints them.",
        "",
    ]
    for path, command in commands():
        lines += verb(path, command)
    return "\n".join(lines)


def public(path: str) -> list[str]:
    """List the names of a module that users call."""
    module = importlib.import_module(path)
    return list(MODULES[path][1]) or [name for name in module.__all__ if not name.startswith("_")]


def signature(name: str, value) -> str:
    """Return `name(...)`, one argument a line where it is long."""
    try:
        text = f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):  # a module, a dict, a class without a signature
        return name
    if len(text) <= 100:
        return text
    arguments = []
    starred = False
    for argument in inspect.signature(value).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            arguments.append("*")
        starred = starred or argument.kind in (argument.KEYWORD_ONLY, argument.VAR_POSITIONAL)
        arguments.append(str(argument))
    result = text[text.rindex(") -> ") :] if ") -> " in text else ")"
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + result


def home_of(value) -> str:
    """Return the name of the module that a value is, or was defined in."""
    return value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")


def api_page() -> str:
    lines = [
        "# Python API",
        "",
        (
            "The public names, with their signatures and docstrings. Other names may change "
            "without notice."
        ),
        "",
    ]
    for path, (title, _) in MODULES.items():
        module = importlib.import_module(path)
        lines += [f"## {path}", "", title, ""]
        values = {name: getattr(module, name) for name in public(path)}
        elsewhere = {
            name: home
            for name, value in values.items()
            if (home := home_of(value)) in MODULES and home != path
        }
        if path == "moe_runtime":
            lines += [f"* `{name}`: see `{home}`" for name, home in elsewhere.items()] + [""]
            values = {name: value for name, value in values.items() if name not in elsewhere}
        for name, value in values.items():
            lines += [
                f"### {path.rpartition('.')[2]}.{name}",
                "",
                "```python",
                signature(name, value),
                "```",
                "",
            ]
            if callable(value) and value.__doc__:
                lines += prose(inspect.getdoc(value))
    return "\n".join(lines)
