"""UltraFuser from folders: what the command line's verbs do, each with one call.

fuse_folders   specialists' folders -> a fused model's folder, its gate not trained yet
link           a stage's folder -> a path that stays
answer         a fused model's folder and prompts -> answers
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.config import check_choice
from moe_runtime.files import check_out_dir
from moe_runtime.hf import ranks
from moe_runtime.methods import ultrafuser
from moe_runtime.modules.fuser import GATES
from moe_runtime.progress import bar


class FuseReceipt(NamedTuple):
    """What `fuse_folders` did."""

    path: Path
    names: tuple[str, ...]
    gate_parameters: int


def fuse_folders(
    specialists: Sequence[str | Path],
    out: str | Path,
    *,
    templates: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    gate: str = "mlp",
    joint: bool = False,
    copy: bool = False,
    seed: int = 0,
    overwrite: bool = False,
) -> FuseReceipt:
    """Write the folder of a model fused of `specialists`, folders or ids of the Hub, with a gate that `seed` draws.

    `templates` and `names` as UltraFuser's, a single template for all. `copy` puts the specialists in it. Raises
    ValueError, with nothing written, for specialists that do not fit together and for an existing target.
    """
    check_choice("gate", gate, GATES)
    check_out_dir(out, overwrite, specialists if copy else ())
    templates = templates[0] if templates and len(templates) == 1 else templates or None
    torch.manual_seed(seed)
    fuser = ultrafuser.UltraFuser(list(map(str, specialists)), templates, gate=gate, joint=joint, names=names or None)
    with bar("copying", "B") as update:
        path = ultrafuser.save(
            fuser, out, specialists="copy" if copy else "reference", overwrite=overwrite, progress=update
        )
    return FuseReceipt(path, fuser.names, sum(p.numel() for p in fuser.gate.parameters()))


def link(path: str | Path, target: str | Path) -> None:
    """Have the link `path` lead to a folder `target` below its own, in the place of what it led to."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(Path(target).relative_to(path.parent))
    os.replace(beside, path)


def answer(
    folder: str | Path, prompts: Sequence[str], *, system: str | None = None, seed: int = 0, **settings
) -> list[str]:
    """Return the answers of a folder's fused model to prompts; `settings` are generate()'s."""
    fuser = ultrafuser.load(folder, device=ranks.state().device)
    torch.manual_seed(seed)
    made, most = 0, settings.get("max_new_tokens", 0)
    with bar("answering", "token") as update:

        def count(ids: torch.Tensor, scores, **_) -> torch.Tensor:
            nonlocal made
            made += 1
            update(made, most)
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)  # of no answer the end

        return fuser.complete(list(prompts), system=system, stopping_criteria=[count], **settings)
