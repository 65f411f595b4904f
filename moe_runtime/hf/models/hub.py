"""The Hub: use a model's id in place of a folder, and push finished folders with a model card.

check_source       raise at once for a misspelt folder that no id can look like
without_retries    use downloaded files where the Hub cannot be reached
local_folder       the folder of a source: itself, or the downloaded files of an id
check_repository   raise before any work if nothing could be pushed
check_references   raise for a fused model that nobody else could load
push               write the card and upload a folder; `moe_runtime.push_to_hub`
PushesCard         the same card in transformers' `model.push_to_hub`
"""

import contextlib
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime import __version__
from moe_runtime.config import one_line, shown
from moe_runtime.io.console import jsonable
from moe_runtime.io.files import atomic_write_text, read_json

FUSED = "fuser_config.json"
# without pickles and code, which are never loaded
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
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
PAPERS = {
    "xft": (
        "XFT: Unlocking the Power of Code Instruction Tuning by Simply Merging Upcycled "
        "Mixture-of-Experts",
        "2404.15247",
    ),
    "upit": (
        "Upcycling Instruction Tuning from Dense to Mixture-of-Experts via Parameter Merging",
        "2410.01610",
    ),
    "esft": (
        "Let the Expert Stick to His Last: Expert-Specialized Fine-Tuning for Sparse "
        "Architectural Large Language Models",
        "2407.01906",
    ),
    "ultrafuser": (
        "Mastering Text, Code and Math Simultaneously via Fusing Highly Specialized Language "
        "Models",
        "2403.08281",
    ),
}
_STOCK = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
"""
_ADAPTED = """from transformers import AutoModelForCausalLM
{imports}

model = AutoModelForCausalLM.from_pretrained("{base}")
"""
_LOAD = {
    "model": _STOCK,
    "upcycled": "import moe_runtime\n" + _STOCK,
    "peft": _ADAPTED.replace("{imports}", "from peft import PeftModel\n\nimport moe_runtime")
    + 'model = PeftModel.from_pretrained(model, "{repo}")\nmoe_runtime.patch(model)\n',
    "esft": _ADAPTED.replace(
        "{imports}", "from huggingface_hub import snapshot_download\n\nfrom moe_runtime import esft"
    )
    + 'esft.apply(model, snapshot_download("{repo}"))\n',
    "fused": "from huggingface_hub import snapshot_download\n\n"
    "from moe_runtime import ultrafuser\n\n"
    'model = ultrafuser.UltraFuser.from_pretrained(snapshot_download("{repo}"))\n',
}
_CARD = """---
{data}
---

# {name}

{what}

## How to use

{needs}```python
{load}```

{made}{paper}"""
_NEEDS = (
    f"This needs the Python package moe_runtime, version {__version__} or newer, installed from "
    "its own repository.\n"
    "\n"
)
_MADE = """## How it was made

```bash
{command}
```

"""
# what shows that nobody wrote a card: the heading of transformers' and PEFT's empty template, and
# TRL's link to no base
_TEMPLATES = ("# Model Card for Model ID", "(https://huggingface.co/None)")
UNKNOWN_OWNER = "OWNER"  # of a repository in a card that was written before any push


def is_id(source: str | Path) -> bool:
    """Return whether `source` looks like a Hub id (allenai/OLMoE-1B-7B-0924) and neither it nor its
    parent is a local path.
    """
    looks = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source))
    return bool(looks) and not Path(source).exists() and not Path(source).parent.is_dir()


def check_source(source: str | Path, name: str = "model") -> None:
    """Raise ValueError unless `source` exists or is written like a Hub id, OWNER/NAME, so that a
    misspelt folder is not sought.

    Ids without an owner, such as gpt2, are names of before 2023; all of these models have an
    owner's id as well.
    """
    text = str(source)
    if os.path.exists(source) or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text):
        return
    if re.fullmatch(r"[\w.-]+", text):
        hint = "A Hub id has an owner, as in openai-community/gpt2"
    else:
        hint = "Check its spelling"
    raise ValueError(f"{name} {text!r} is neither a folder nor a Hub id. {hint}")


PROBE_SECONDS = 5.0
PROBE_EVERY = 60.0
# endpoint -> when it was asked, and whether it answered
_probed: dict[str, tuple[float, bool]] = {}


def is_reachable() -> bool:
    """Return whether the Hub answers at all, as of the last minute; False in offline mode."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return False
    now = time.monotonic()
    endpoint = constants.ENDPOINT
    asked, answered = _probed.get(endpoint, (-math.inf, False))
    if now - asked > PROBE_EVERY:
        try:
            get_session().head(endpoint, timeout=PROBE_SECONDS)
            answered = True
        except Exception:  # the client's errors of name resolution, connection and time
            answered = False
        _probed[endpoint] = now, answered
    return answered


@contextlib.contextmanager
def without_retries(source: str | Path) -> Iterator[None]:
    """Within the block, huggingface_hub uses downloaded files at once if `source` is an id and the
    Hub cannot be reached.

    It would ask five times for every file, for half a minute each.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not (os.path.exists(source) or is_reachable())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_problem(source: str | Path, error: Exception) -> str:
    """Return why an id could not be read: the Hub cannot be reached, or the client's own words."""
    from huggingface_hub import constants

    if os.path.exists(source) or is_reachable():
        return one_line(error)
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    else:
        reason = f"{constants.ENDPOINT} cannot be reached"
    return f"it is not among the downloaded models, and {reason}"


def local_folder(
    source: str | Path, patterns: tuple[str, ...] = FILES, name: str = "model"
) -> Path:
    """Return `source` if it is a folder, else the folder of that Hub id's downloaded files; raises
    ValueError for neither.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    check_source(source, name)
    try:
        with without_retries(source):
            return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (HFValidationError, OSError, ValueError) as error:
        raise ValueError(
            f"{name} {str(source)!r} cannot be read: {hub_problem(source, error)}. Pass the folder "
            "of a model or a Hub id"
        ) from error


def check_repository(repo: str) -> None:
    """Raise ValueError unless `repo` is a valid id and the Hub knows this machine's token."""
    from huggingface_hub import get_token, whoami
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        if "/" not in repo or get_token() is None:
            if "/" in repo:
                reason = "The Hub needs a token: run `hf auth login` or set HF_TOKEN."
            else:
                reason = "Expected OWNER/NAME."
            raise ValueError(reason)
        whoami()
    except (HFValidationError, OSError, ValueError) as error:
        raise ValueError(f"Cannot push to {shown(repo)}. {one_line(error)}") from error


def push(folder: str | Path, repo: str, **facts) -> str:
    """Upload `folder` to the model repository `repo`, made if missing, and return its address.

    A training's checkpoints and pickles are left out (NOT_PUSHED). A folder without a README.md, or
    with a template that nobody filled in, gets `model_card(folder, repo, **facts)` first. Raises
    ValueError for a fused model that refers to local folders, and, with the command to upload
    later, if the upload fails; the folder stays unchanged.
    """
    from huggingface_hub import HfApi

    if Path(folder, FUSED).is_file():
        described = read_json(Path(folder, FUSED)).get("specialists")
        paths = [str(one.get("path")) for one in described or () if isinstance(one, Mapping)]
        check_references(
            [path for path in paths if Path(path).is_absolute() or not Path(folder, path).is_dir()]
        )
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
        left_out = [
            word
            for pattern in NOT_PUSHED
            if any(Path(folder).rglob(pattern))
            for word in ("--exclude", pattern)
        ]
        command = shlex.join(["hf", "upload", repo, str(folder), *left_out])
        raise ValueError(
            f"Cannot push to {repo!r}: {one_line(error)}. {folder} is complete; upload it with: "
            f"{command}"
        ) from error
    return str(url)


def check_references(specialists: Sequence[str]) -> None:
    """Raise ValueError if a fused model to upload refers to specialists that are not Hub ids."""
    local = [path for path in specialists if not is_id(path)]
    if local:
        raise ValueError(
            f"A fused model that refers to the local folder {local[0]} cannot be loaded elsewhere. "
            "Write it with --copy, or fuse Hub ids"
        )


def _write_card(folder: str | Path, repo: str, **facts) -> None:
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
    folder: str | Path,
    repo: str,
    *,
    command: str = "",
    base: str | Path | None = None,
    dataset: str | None = None,
    method: str | None = None,
    facts: Any = None,
) -> str:
    """Return the text of a model card, with the metadata that the Hub checks.

    `base` is the model that this one was made from: a Hub id, or a folder whose own card names the
    base and its license; `facts` is the conversion's receipt, whose numbers and words the card
    lists.
    """
    from huggingface_hub import ModelCardData

    kind, found = _kind(Path(folder))
    method = method or found
    origin = _card_of(base)
    base_id = str(base) if base is not None and is_id(base) else origin.get("base_model")
    base_id = base_id[0] if isinstance(base_id, list) else base_id
    data = ModelCardData(
        base_model=base_id,
        license=origin.get("license"),
        datasets=dataset,
        pipeline_tag="text-generation",
        library_name={"model": "transformers", "upcycled": "transformers", "peft": "peft"}.get(
            kind, "moe-runtime"
        ),
        base_model_relation="adapter" if kind in ("peft", "esft") else None,
        tags=[
            "moe-runtime",
            *([method] if method else []),
            *([f"arxiv:{PAPERS[method][1]}"] if method in PAPERS else []),
        ],
    )
    rows = [
        (key, value)
        for key, value in jsonable(facts or {}).items()
        if isinstance(value, int | float | str)
    ]
    lines = [
        f"| {key} | {value} |" for key, value in rows if key != "path" and "/" not in str(value)
    ]
    table = ["| | |", "|---|---|", *lines, ""] if lines else []
    tokenizer = repo if any(Path(folder).glob("tokenizer*")) else base_id or "BASE"
    title, number = PAPERS.get(method, ("", ""))
    return _CARD.format(
        data=data.to_yaml(),
        name=repo.partition("/")[2],
        what=_what(kind, method, base_id),
        load=_LOAD[kind].format(repo=repo, base=base_id or "BASE", tokenizer=tokenizer),
        command=command,
        needs="" if kind == "model" else _NEEDS,
        made=(_MADE.format(command=command) if command else "")
        + "".join(line + "\n" for line in table),
        paper=f"Method: {title} ([arXiv:{number}](https://arxiv.org/abs/{number})).\n"
        if title
        else "",
    )


def _kind(folder: Path) -> tuple[str, str | None]:
    """Return the kind of a folder, a key of _LOAD, and the method that made it, if recorded."""
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names:
        return "peft", "esft" if "expert_cfg.json" in names else None
    if "expert_cfg.json" in names:
        return "esft", "esft"
    if FUSED in names:
        return "fused", "ultrafuser"
    values = read_json(folder / "config.json") if "config.json" in names else {}
    if isinstance(block := values.get("moe_runtime"), dict):
        return "upcycled", block.get("method")
    return "model", None


def _card_of(base: str | Path | None) -> dict:
    """Return the metadata of the card in a model's folder; empty without one."""
    from huggingface_hub import RepoCard

    if base is None:
        return {}
    with contextlib.suppress(ValueError):
        base = local_folder(base, ("README.md",)) if is_id(base) else base
    path = Path(base, "README.md")
    return RepoCard.load(path, ignore_metadata_errors=True).data.to_dict() if path.is_file() else {}


def _what(kind: str, method: str | None, base: str | None) -> str:
    of = f" made of [{base}](https://huggingface.co/{base})" if base else ""
    how = f" with {method.upper() if method in ('xft', 'esft') else method}" if method else ""
    noun = {
        "model": "A language model",
        "upcycled": "A Mixture-of-Experts model",
        "fused": "A fused model of specialists",
        "esft": "Tuned experts of a Mixture-of-Experts model",
        "peft": "A LoRA adapter",
    }[kind]
    return f"{noun}{of}{how} by moe_runtime."
