"""A rank of tests/papers/engine/test_stages.py: `dist_leading.py OUT`; an error of only rank 0 must
end all ranks.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from moe_runtime.hf.training import ranks
from moe_runtime.methods.xft import folders as xft_folders
from papers.engine import stages
from papers.xft.study import XftStages


def error_of(call) -> str:
    """Return the message and the type of a call's error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(out: str) -> None:
    out = Path(out)
    main = dist.get_rank() == 0

    def full(*_, **__):
        raise OSError(28, "No space left on device", "model.safetensors")

    def lacks(*_, **__):
        raise KeyError("lm_head")

    def write(tmp: Path) -> dict:
        if main:
            (tmp / "made").touch()
        return {}

    moe = SimpleNamespace(folder=out / "none")
    found = {
        "merge": error_of(
            lambda: XftStages._merge(
                SimpleNamespace(),
                moe,
                out / "dense",
            )
        )
    }
    xft_folders.merge_folder = full
    found["full disk"] = error_of(
        lambda: XftStages._merge(
            SimpleNamespace(),
            moe,
            out / "dense",
        )
    )
    xft_folders.merge_folder = lacks
    found["other"] = error_of(
        lambda: XftStages._merge(
            SimpleNamespace(),
            moe,
            out / "dense",
        )
    )
    (out / "file").touch()
    dist.barrier()
    found["no place"] = error_of(
        lambda: stages.made_once(
            out / "file" / "stage",
            "result.json",
            write,
        )
    )
    rows = SimpleNamespace(make_data=lacks)

    def make(tmp):
        return stages.KeptStages._made_data(rows, tmp)

    found["rows"] = error_of(
        lambda: stages.made_once(
            out / "rows",
            "rows.json",
            make,
        )
    )
    real = stages.atomic_write_text
    stages.atomic_write_text = full
    found["mark"] = error_of(
        lambda: stages.made_once(
            out / "stage",
            "result.json",
            write,
        )
    )
    stages.atomic_write_text = real
    found["whole"] = error_of(
        lambda: stages.made_once(
            out / "stage",
            "result.json",
            write,
        )
    )
    found["there"] = ranks.agree(sorted(path.name for path in out.iterdir() if path.is_dir()))
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
