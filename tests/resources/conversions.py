"""`main(FOLDER, LIMIT)`: run each conversion between folders in its own process, which may allocate
LIMIT bytes more than it already has.

Every source folder is larger than twice the limit. A conversion uses the output of earlier ones.
Each prints a line of JSON: its name, whether the limit was still in force at the end, and the
error, if any.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from moe_runtime.methods.esft import folders as esft_folders
from moe_runtime.methods.upit import assembly as upit_assembly
from moe_runtime.methods.upit import folders as upit_mixtral
from moe_runtime.methods.xft import folders as xft_folders
from moe_runtime.methods.xft import official as xft_official
from tests.hf import tiny
from tests.support import esft_adapter, limited, stock_moe

SIZE = {"max_shard_size": "2MB"}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 18}
NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
MOE = {"num_experts": 2, "top_k": 2}


def prepare(place: Path, sizes: dict) -> None:
    """Write the inputs of the first conversions: a dense model, two variants of it, and stock MoE
    models with an adapter.
    """
    model = tiny.dense("llama", mlp_bias=None, **sizes)
    model.save_pretrained(place / "dense", **SIZE)
    for e in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + (e + 1) / 64)
        model.save_pretrained(place / f"expert-{e}", **SIZE)
    sizes = {
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": -(-4 * sizes["num_hidden_layers"] // 9),
    }
    for family in ("qwen3_moe", "gpt_oss"):  # one tensor per expert, and stacks
        stock = stock_moe.stock(
            family,
            **sizes,
            intermediate_size=256,
            moe_intermediate_size=256,
        )
        stock.save_pretrained(place / family, **SIZE)
        esft_adapter.random_adapter(stock).save(place / f"{family}-adapter")


# a conversion: the folder that it reads, whose size counts, and a function of the parent folder
WAYS = {
    "upcycle": (
        "dense",
        lambda f: xft_folders.upcycle_folder(
            f / "dense",
            f / "moe",
            **MOE,
            **SIZE,
        ),
    ),
    "to-mergeable": (
        "moe",
        lambda f: xft_folders.mergeable_folder(
            f / "moe",
            f / "mergeable",
            **SIZE,
        ),
    ),
    "merge": (
        "mergeable",
        lambda f: xft_folders.merge_folder(
            f / "mergeable",
            f / "merged",
            **SIZE,
        ),
    ),
    "export-official": (
        "moe",
        lambda f: xft_official.export_official(
            f / "moe",
            f / "theirs",
            keep_rope=True,
            **SIZE,
        ),
    ),
    "export-official, weighted": (
        "mergeable",
        lambda f: xft_official.export_official(
            f / "mergeable", f / "weighted", keep_rope=True, **SIZE
        ),
    ),
    "import-official": (
        "theirs",
        lambda f: xft_official.import_official(
            f / "theirs",
            f / "ours",
            **SIZE,
        ),
    ),
    "assemble": (
        "expert-0",
        lambda f: upit_assembly.assemble(
            [f / "expert-0", f / "expert-1"], None, f / "upit", top_k=1, **SIZE
        ),
    ),
    "assemble with the base's backbone": (
        "expert-0",
        lambda f: upit_assembly.assemble(
            [f / "expert-0", f / "expert-1"],
            None,
            f / "upit-base",
            base=f / "dense",
            backbone="base",
            top_k=1,
            **SIZE,
        ),
    ),
    "export-mixtral": (
        "upit",
        lambda f: upit_mixtral.export_mixtral(
            f / "upit",
            f / "mixtral",
            **SIZE,
        ),
    ),
    "esft merge": (
        "qwen3_moe",
        lambda f: esft_folders.merge_folder(
            f / "qwen3_moe", f / "qwen3_moe-adapter", f / "esft", **SIZE
        ),
    ),
    "esft merge of stacks": (
        "gpt_oss",
        lambda f: esft_folders.merge_folder(
            f / "gpt_oss", f / "gpt_oss-adapter", f / "esft-stacks", **SIZE
        ),
    ),
    "esft apply": (
        "qwen3_moe",
        lambda f: esft_folders.check_fit(
            f / "qwen3_moe",
            f / "qwen3_moe-adapter",
        ),
    ),
}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(folder: str, limit: str) -> None:
    torch.set_num_threads(1)
    wide = Path(folder, "wide")
    limit = int(limit)
    warm = Path(folder, "warm")
    prepare(warm, NARROW)
    with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
        for _, way in WAYS.values():  # imports do not count towards the limit
            way(warm)
    _in_a_child(lambda: prepare(wide, WIDE))
    for name, (source, way) in WAYS.items():
        _in_a_child(
            lambda name=name, source=source, way=way: _limited(name, wide, source, way, limit)
        )


def _limited(name: str, wide: Path, source: str, way, limit: int) -> None:
    result = {"way": name, "size": size(wide / source), "limit": limit}
    limited.limit_data(limit)
    try:
        way(wide)
        result["held"] = limited.is_held(limit + (16 << 20))
    except Exception:
        result["error"] = traceback.format_exc()[-2000:]
    print(json.dumps(result), flush=True)


def _in_a_child(function) -> None:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.waitpid(child, 0)
