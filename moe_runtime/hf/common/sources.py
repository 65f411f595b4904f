"""Sources of models: folders, and ids on the Hub.

check_source       raise at once for a misspelt folder that no id can look like
local_folder       the folder of a source: itself, or the downloaded files of an id
"""

import os
import re
from pathlib import Path

from moe_runtime.config import one_line

StrPath = str | Path
# without pickles and code, which are never loaded
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")


def is_id(source: StrPath) -> bool:
    """Return whether `source` looks like a Hub id (allenai/OLMoE-1B-7B-0924) and neither it nor its
    parent is a local path.
    """
    looks = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source))
    return bool(looks) and not Path(source).exists() and not Path(source).parent.is_dir()


def check_source(source: StrPath, name: str = "model") -> None:
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


def local_folder(source: StrPath, patterns: tuple[str, ...] = FILES, name: str = "model") -> Path:
    """Return `source` if it is a folder, else the folder of that Hub id's downloaded files; raises
    ValueError for neither.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    check_source(source, name)
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (HFValidationError, OSError, ValueError) as error:
        raise ValueError(
            f"{name} {str(source)!r} cannot be read: {one_line(error)}. Pass the folder "
            "of a model or a Hub id"
        ) from error
