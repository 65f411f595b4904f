"""Hooks of mkdocs: the pages generated from the code and the notebooks, and Markdown as GitHub
reads it.

The command line's page consists of typer's help of every verb, the Python pages of the signatures
and docstrings of public names, a notebook's page of its cells with their outputs.
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

# the modules of the Python pages: what each is for, and the names that users call where the module
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
    "moe_runtime.methods.shrink": ("Smaller MoE models, and dense ones.", ()),
    "moe_runtime.methods.upit": ("UpIT.", ()),
    "moe_runtime.methods.lora": ("LoRA experts.", ()),
    "moe_runtime.methods.ultrafuser": ("UltraFuser.", ()),
}


# the Python pages: title, what is on it, and the modules
TOPICS = {
    "api": ("Python API", "The names of `import moe_runtime`.", ("moe_runtime",)),
    "api-layers": (
        "Layers and ops",
        "The MoE layer, and the ops that it consists of.",
        (
            "moe_runtime.config",
            "moe_runtime.modules.moe",
            "moe_runtime.modules.merged",
            "moe_runtime.modules.ewa",
            "moe_runtime.ops.routing",
            "moe_runtime.ops.moe_mlp",
            "moe_runtime.ops.activation",
            "moe_runtime.ops.merging",
            "moe_runtime.ops.fusion",
            "moe_runtime.ops.expert_rows",
        ),
    ),
    "api-dropin": (
        "Stock models",
        "Trainers, adapters, routers and expert parallelism of stock MoE models.",
        (
            "moe_runtime.hf",
            "moe_runtime.hf.dropin.adapters",
            "moe_runtime.hf.dropin.parallel",
            "moe_runtime.hf.dropin.balance",
            "moe_runtime.hf.dropin.stats",
            "moe_runtime.hf.dropin.replay",
        ),
    ),
    "api-xft": (
        "XFT",
        "Upcycling, mixing and merging, in memory and from folder to folder.",
        (
            "moe_runtime.methods.xft",
            "moe_runtime.methods.xft.folders",
            "moe_runtime.methods.xft.official",
            "moe_runtime.methods.xft.baselines",
            "moe_runtime.hf.models.folders",
        ),
    ),
    "api-esft": (
        "ESFT",
        "Scoring, selecting and training experts.",
        ("moe_runtime.methods.esft",),
    ),
    "api-upit": (
        "UpIT and LoRA experts",
        "Checkpoints and adapters that become experts.",
        ("moe_runtime.methods.upit", "moe_runtime.methods.lora"),
    ),
    "api-shrink": (
        "Shrink",
        "Smaller MoE models, and dense ones.",
        ("moe_runtime.methods.shrink",),
    ),
    "api-ultrafuser": (
        "UltraFuser",
        "Fused specialists.",
        ("moe_runtime.methods.ultrafuser",),
    ),
}


NOTEBOOKS = sorted(Path(__file__).parent.glob("notebooks/*.ipynb"))


def generated_pages() -> dict[str, str]:
    """Return the pages that are generated, by name."""
    pages = cli_pages()
    for topic in TOPICS:
        pages[f"{topic}.md"] = api_page(topic)
    for path in NOTEBOOKS:
        pages[f"notebook-{path.stem}.md"] = notebook_page(path)
    return pages


def on_files(files, config):
    """Add the pages that are generated."""
    for name, content in generated_pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text, and its code with what it printed."""
    lines = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            text = f"```python\n{text}\n```"
        lines += [text, ""]
        printed = ""
        for output in cell.get("outputs", ()):
            printed += "".join(output["text"])
        if printed:
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
            target = "#" + "-".join((*path, name))
            if hasattr(child, "commands"):
                target = f"cli-{name}.md"
            summary = (child.help or "").partition("\n\n")[0]
            lines.append(f"| [{name}]({target}) | {cell(summary)} |")
        lines.append("")
    if command.epilog:
        lines += ["```text", command.epilog, "```", ""]
    return lines


def cli_pages() -> dict[str, str]:
    """Return one page for each group of commands, and `cli.md` for those outside groups."""
    pages = {
        "cli.md": [
            "# Options of every command",
            "",
            "Every command with its arguments, options and an example, as `--help` prints them.",
            "Each group has a page of its own.",
            "",
        ]
    }
    for path, command in commands():
        is_group = len(path) == 2 and hasattr(command, "commands")
        name = "cli.md"
        if is_group or len(path) > 2:
            name = f"cli-{path[1]}.md"
        if is_group:
            pages[name] = [f"# Options of {' '.join(path)}", ""]
        pages[name] += verb(path, command)
    return {name: "\n".join(lines) for name, lines in pages.items()}


def public(path: str) -> list[str]:
    """List the names of a module that users call."""
    module = importlib.import_module(path)
    return list(MODULES[path][1]) or [name for name in module.__all__ if not name.startswith("_")]


# long names of types, as a user writes them
SHORTER = {
    "collections.abc.": "",
    "torch.nn.modules.module.Module": "nn.Module",
    "pathlib.Path": "Path",
    "typing.": "",
    "os.PathLike": "PathLike",
    "transformers.tokenization_utils_base.": "",
    "transformers.modeling_utils.": "",
    "torch.distributed.device_mesh.": "",
}


def signature(name: str, value) -> str:
    """Return `name(...)`, one argument a line where it is long."""
    try:
        parameters = inspect.signature(value)
    except (TypeError, ValueError):  # a module, a dict, a class without a signature
        return name
    text = _shorter(f"{name}{parameters}")
    if len(text) <= 80:
        return text
    arguments = []
    starred = False
    for argument in parameters.parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            arguments.append("*")
        starred = starred or argument.kind in (argument.KEYWORD_ONLY, argument.VAR_POSITIONAL)
        arguments.append(_shorter(str(argument)))
    result = text[text.rindex(") -> ") :] if ") -> " in text else ")"
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + result


def _shorter(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return re.sub(r"moe_runtime(\.\w+)+\.(?=[A-Z])", "", text)


ITEMS = {"Args": "argument", "Attributes": "attribute", "Raises": "error"}


def docstring(text: str) -> list[str]:
    """Return the lines of a docstring in Google style as Markdown: arguments, attributes and errors
    as tables, examples as blocks.
    """
    lines = []
    for part in re.split(
        r"^(?=(?:Args|Attributes|Raises|Returns|Yields|Example):$)", text, flags=re.M
    ):
        title, _, body = part.partition(":\n")
        if title in ITEMS:
            lines += [f"| {ITEMS[title]} | meaning |", "|---|---|"]
            for item in re.split(r"\n(?=\S)", textwrap.dedent(body).strip()):
                name, _, meaning = item.partition(":")
                lines.append(f"| `{name}` | {cell(meaning)} |")
            lines.append("")
        elif title in ("Returns", "Yields"):
            lines += [f"**{title}** {escaped(' '.join(body.split()))}", ""]
        elif title == "Example":
            lines += ["```pycon", textwrap.dedent(body).strip(), "```", ""]
        else:
            lines += prose(part)
    return lines


def methods(value) -> list[str]:
    """Return a table of the public methods and properties that a class itself defines."""
    rows = []
    for name, member in vars(value).items():
        text = inspect.getdoc(member)
        is_member = inspect.isroutine(member) or isinstance(member, property | classmethod)
        if is_member and text and not name.startswith("_"):
            summary = re.split(r"\n\s*\n", text)[0]
            rows.append(f"| `{name}` | {cell(summary)} |")
    if not rows:
        return []
    return ["| method or property | what it does |", "|---|---|", *rows, ""]


def home_of(value) -> str:
    """Return the name of the module that a value is, or was defined in."""
    return value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")


def page_of(module: str) -> str:
    """Return the Python page that documents a module."""
    return next(topic for topic, (_, _, modules) in TOPICS.items() if module in modules)


def api_page(topic: str) -> str:
    """Return the Markdown of one Python page."""
    title, about, modules = TOPICS[topic]
    lines = [f"# {title}", "", about, ""]
    if topic == "api":
        lines += [
            "Names that are not on these pages may change without notice.",
            "",
            "| page | what is on it |",
            "|---|---|",
        ]
        for name, (other, text, _) in TOPICS.items():
            if name != topic:
                lines.append(f"| [{other}]({name}.md) | {text} |")
        lines.append("")
    for path in modules:
        lines += module_part(path)
    return "\n".join(lines)


def module_part(path: str) -> list[str]:
    """Return the lines of one module: its names with signature and docstring, and where others are
    documented.
    """
    module = importlib.import_module(path)
    lines = [f"## {path}", "", MODULES[path][0], ""]
    values = {name: getattr(module, name) for name in public(path)}
    elsewhere = {}
    for name, value in values.items():
        home = home_of(value)
        if path == "moe_runtime" and home in MODULES and home != path:
            elsewhere[name] = home
    if elsewhere:
        lines += ["| name | documented as |", "|---|---|"]
        for name, home in elsewhere.items():
            is_module = inspect.ismodule(values[name])
            target = home if is_module else f"{home}.{name}"
            anchor = home.replace(".", "") if is_module else target
            lines.append(f"| `{path}.{name}` | [{target}]({page_of(home)}.md#{anchor}) |")
        lines.append("")
    for name, value in values.items():
        if name in elsewhere:
            continue
        full = f"{path}.{name}"
        lines += [f"### {full} {{ #{full} }}", "", "```python", signature(name, value), "```", ""]
        if callable(value) and value.__doc__:
            lines += docstring(inspect.getdoc(value))
        if inspect.isclass(value):
            lines += methods(value)
    return lines
