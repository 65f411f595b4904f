"""The Hub: push finished folders with a model card.

check_repository   raise before any work if nothing could be pushed
push               write the card and upload a folder; `moe_runtime.push_to_hub`
PushesCard         the same card in transformers' `model.push_to_hub`

What only a method knows, its paper and the folders that it writes, it adds to PAPERS and KINDS.
"""

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime import __version__
from moe_runtime.config import one_line, shown
from moe_runtime.hf.common.sources import StrPath, is_id, local_folder
from moe_runtime.io.console import jsonable
from moe_runtime.io.files import atomic_write_text, read_json

# of a training's folder, what is no part of its model: checkpoints, pickles, the locks of running
# writers
NOT_PUSHED = (
    "checkpoint-*",
    "training_args.bin",
    "*optimizer*.bin",
    "*.pt",
    "*.pth",
    "*.distcp",
    ".*",
)
UNKNOWN_OWNER = "OWNER"  # of a repository in a card that was written before any push
# what shows that nobody wrote a card: the heading of transformers' and PEFT's empty template, and
# TRL's link to no base
_TEMPLATES = ("# Model Card for Model ID", "(https://huggingface.co/None)")
_STOCK = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
"""
_PEFT = """from peft import PeftModel
from transformers import AutoModelForCausalLM

import moe_runtime

model = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "{repo}")
moe_runtime.patch(model)
"""
_CARD = """---
{{ card_data }}
---

# {{ name }}

{{ noun }}
{%- if base %} made of [{{ base }}](https://huggingface.co/{{ base }}){% endif %}
{%- if method %} with {{ method }}{% endif %} by moe_runtime.

## How to use
{% if is_ours %}
This needs the Python package moe_runtime, version {{ version }} or newer, installed from its own
repository.
{% endif %}
```python
{{ code }}
```
{% if command %}
## How it was made

```bash
{{ command }}
```
{% endif %}
{%- if facts %}
| | |
|---|---|
{% for key, value in facts %}| {{ key }} | {{ value }} |
{% endfor %}{% endif %}
{%- if paper %}
Method: {{ paper.title }} ([arXiv:{{ paper.arxiv }}](https://arxiv.org/abs/{{ paper.arxiv }})).
{% endif %}"""


class Paper(NamedTuple):
    """The publication of a method."""

    name: str  # of the method
    title: str
    arxiv: str


class Kind(NamedTuple):
    """A kind of folder: what a card says about it, and how the folder is loaded."""

    noun: str
    code: str  # Python, with {repo}, {base} and {tokenizer}
    library: str = "moe-runtime"
    is_adapter: bool = False
    method: str | None = None  # that writes such folders
    check: Callable[[Path], None] | None = None  # raises ValueError for what nobody else could load


PAPERS: dict[str, Paper] = {}  # by method
# by the file that shows it; the first one found in a folder counts
KINDS = {"adapter_config.json": Kind("A LoRA adapter", _PEFT, "peft", is_adapter=True)}
_MODEL = Kind("A language model", _STOCK, "transformers")
_UPCYCLED = Kind("A Mixture-of-Experts model", "import moe_runtime\n" + _STOCK, "transformers")


def check_repository(repo: str) -> None:
    """Raise ValueError unless `repo` is a valid id and the Hub knows this machine's token."""
    from huggingface_hub import get_token, whoami
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        if "/" not in repo:
            raise ValueError("Expected OWNER/NAME.")
        if get_token() is None:
            raise ValueError("The Hub needs a token: run `hf auth login` or set HF_TOKEN.")
        whoami()
    except (HFValidationError, OSError, ValueError) as error:
        raise ValueError(f"Cannot push to {shown(repo)}. {one_line(error)}") from error


def push(folder: StrPath, repo: str, **facts: Any) -> str:
    """Upload a folder to a model repository of the Hub, which is created if it is missing.

    Checkpoints of a training and pickles are not uploaded. A folder without a README.md, or with a
    template that nobody filled in, gets a model card first.

    Args:
        folder: A model or an adapter.
        repo: "owner/name".
        facts: For the model card, such as the receipt of the command that made the folder:
            facts=receipt.

    Returns:
        The address of the repository.

    Raises:
        ValueError: For a fused model that refers to local folders, or if the upload fails; the
            message has the command that uploads later, and the folder is unchanged.
    """
    from huggingface_hub import HfApi

    kind, _ = _kind(Path(folder))
    if kind.check is not None:
        kind.check(Path(folder))
    _write_card(folder, repo, **facts)
    api = HfApi()
    try:
        url = api.create_repo(repo, exist_ok=True)
        api.upload_folder(
            folder_path=folder,
            repo_id=repo,
            commit_message="Upload with moe-runtime",
            ignore_patterns=[*NOT_PUSHED],
        )
    except (OSError, ValueError) as error:  # HfHubHTTPError is an OSError
        words = ["hf", "upload", repo, str(folder)]
        for pattern in NOT_PUSHED:
            if any(Path(folder).rglob(pattern)):
                words += ["--exclude", pattern]
        raise ValueError(
            f"Cannot push to {repo!r}: {one_line(error)}. {folder} is complete; upload it with: "
            f"{shlex.join(words)}"
        ) from error
    return str(url)


def _write_card(folder: StrPath, repo: str, **facts) -> None:
    card = Path(folder, "README.md")
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    unknown = f'"{UNKNOWN_OWNER}/{Path(folder).resolve().name}"'
    if not text or any(mark in text for mark in _TEMPLATES):
        atomic_write_text(card, model_card(folder, repo, **facts))
    elif unknown in text:
        atomic_write_text(card, text.replace(unknown, f'"{repo}"'))


class PushesCard:
    """Mixin of our model classes: `push_to_hub` writes `model_card` instead of transformers' empty
    template.
    """

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        config = self.config.moe_runtime
        _write_card(
            working_dir,
            repo_id,
            base=self.name_or_path or None,
            facts=config["config"] | {"stage": config["stage"]},
        )
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def model_card(
    folder: StrPath,
    repo: str,
    *,
    command: str = "",
    base: StrPath | None = None,
    dataset: str | None = None,
    method: str | None = None,
    facts: Any = None,
) -> str:
    """Return the text of a model card, with the metadata that the Hub checks.

    `base` is the model that this one was made from: a Hub id, or a folder whose own card names the
    base and its license; `facts` is the conversion's receipt, whose numbers and words the card
    lists.
    """
    from huggingface_hub import ModelCard, ModelCardData

    kind, recorded = _kind(Path(folder))
    method = method or recorded
    paper = PAPERS.get(method)
    origin = _card_of(base)
    if base is not None and is_id(base):
        base_id = str(base)
    else:
        base_id = origin.get("base_model")
    if isinstance(base_id, list):
        base_id = base_id[0]
    tags = ["moe-runtime"]
    if method is not None:
        tags.append(method)
    if paper is not None:
        tags.append(f"arxiv:{paper.arxiv}")
    rows = []
    for key, value in jsonable(facts or {}).items():
        is_path = key == "path" or "/" in str(value)
        if isinstance(value, int | float | str) and not is_path:
            rows.append((key, value))
    base_or_blank = base_id or "BASE"
    tokenizer = repo if any(Path(folder).glob("tokenizer*")) else base_or_blank
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_id,
            license=origin.get("license"),
            datasets=dataset,
            pipeline_tag="text-generation",
            library_name=kind.library,
            base_model_relation="adapter" if kind.is_adapter else None,
            tags=tags,
        ),
        template_str=_CARD,
        name=repo.partition("/")[2],
        noun=kind.noun,
        base=base_id,
        method=method if paper is None else paper.name,
        is_ours=kind is not _MODEL,
        version=__version__,
        code=kind.code.format(repo=repo, base=base_or_blank, tokenizer=tokenizer).strip(),
        command=command,
        facts=rows,
        paper=paper,
    )
    return str(card)


def _kind(folder: Path) -> tuple[Kind, str | None]:
    """Return the kind of a folder, and the method that made it, if recorded."""
    kinds = [kind for file, kind in KINDS.items() if Path(folder, file).is_file()]
    if kinds:
        return kinds[0], next((kind.method for kind in kinds if kind.method is not None), None)
    if Path(folder, "config.json").is_file():
        block = read_json(folder / "config.json").get("moe_runtime")
        if isinstance(block, dict):
            return _UPCYCLED, block.get("method")
    return _MODEL, None


def _card_of(base: StrPath | None) -> dict:
    """Return the metadata of the card in a model's folder; empty without one."""
    from huggingface_hub import RepoCard

    if base is None:
        return {}
    with contextlib.suppress(ValueError):
        base = local_folder(base, ("README.md",)) if is_id(base) else base
    path = Path(base, "README.md")
    if not path.is_file():
        return {}
    return RepoCard.load(path, ignore_metadata_errors=True).data.to_dict()
