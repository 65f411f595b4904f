"""Sources of models: folders, and ids on the Hub.

check_source       raise at once for a misspelt folder that no id can look like
without_retries    use downloaded files where the Hub cannot be reached
local_folder       the folder of a source: itself, or the downloaded files of an id
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
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
    tried, answered = _probed.get(endpoint, (-math.inf, False))
    if now - tried > PROBE_EVERY:
        try:
            get_session().head(endpoint, timeout=PROBE_SECONDS)
            answered = True
        except Exception:  # the client's errors of name resolution, connection and time
            answered = False
        _probed[endpoint] = now, answered
    return answered


@contextlib.contextmanager
def without_retries(source: StrPath) -> Iterator[None]:
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


def hub_problem(source: StrPath, error: Exception) -> str:
    """Return why an id could not be read: the Hub cannot be reached, or the client's own words."""
    from huggingface_hub import constants

    if os.path.exists(source) or is_reachable():
        return one_line(error)
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    else:
        reason = f"{constants.ENDPOINT} cannot be reached"
    return f"it is not among the downloaded models, and {reason}"


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
        with without_retries(source):
            return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (HFValidationError, OSError, ValueError) as error:
        raise ValueError(
            f"{name} {str(source)!r} cannot be read: {hub_problem(source, error)}. Pass the folder "
            "of a model or a Hub id"
        ) from error
