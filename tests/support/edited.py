"""Files with other values, as a user or an older version could have written them."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from moe_runtime.io.files import read_json


def edit_json(file: Path, **values) -> None:
    """Change values of a JSON object."""
    file.write_text(json.dumps(read_json(file) | values))


def edit_tensors(folder: Path, change) -> None:
    """Replace the tensors of a folder by `change` of them; None drops one."""
    (file,) = folder.glob("*.safetensors")
    changed = change(load_file(file))
    kept = {key: tensor for key, tensor in changed.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})
