"""JSON files with other values, as a user or an older version could have written them."""

import json
from pathlib import Path

from moe_runtime.io.files import read_json


def edit_json(file: Path, **values) -> None:
    """Change values of a JSON object."""
    file.write_text(json.dumps(read_json(file) | values))
