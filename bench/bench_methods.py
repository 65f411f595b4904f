"""The expensive steps of the four methods outside a layer: folders, scores, routing vectors,
generation.

The floor of operations on folders reads every input byte and copies every output byte; "in memory"
loads the model, changes it and saves it.
"""

import copy
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_step import llama, stock, token_ids, train
from moe_runtime.bench.machine import CUDA, DEVICE, fits

KIND = "method"
ROUNDS = 15 if CUDA else 5
CPU_SHAPES = shapes.STEPS_CPU
GPU_SHAPES = shapes.STEPS
DTYPE = torch.bfloat16 if CUDA else torch.float32
LAYERS = 4  # of the model that is scored
SIZES = (shapes.METHODS_GPU, shapes.METHODS_CPU, shapes.METHODS_TINY)
PIECE = 16 << 20  # bytes that are read at once
ROWS = 4  # answers per batch
PROMPT = 32
NEW = 16


@pytest.fixture
def folder():
    """A folder that is deleted afterwards, unlike pytest's tmp_path."""
    if CUDA:
        pytest.skip("operations on files do not use a GPU")
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def dense_model(size, dtype=DTYPE):
    model = llama(size, dtype, max_position_embeddings=4096)
    model.generation_config.eos_token_id = None  # only the benchmark limits the length of an answer
    return model


def move(read: list[Path], written: Path, to: Path):
    """Return a function that reads folders `read` and copies `written` to `to`; and the bytes."""

    def files(folders: list[Path]) -> list[Path]:
        return [path for folder in folders for path in folder.rglob("*") if path.is_file()]

    buffer = memoryview(bytearray(PIECE))

    def call():
        for path in files(read):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(written, to)

    return call, sum(path.stat().st_size for path in files([*read, written]))


def compare_folders(interleaved, read: list[Path], out: Path, ways: dict) -> None:
    """Measure `ways` to write the folder `out` from the folders `read`; the first one runs once
    before.
    """
    next(iter(ways.values()))()
    floor, bytes = move(read, out, out.with_name("copy"))
    interleaved(
        {"copy (floor)": floor, **ways},
        bytes=bytes,
        dtype=torch.bfloat16,
    )


def bench_xft_upcycle_folder(interleaved, size, folder):
    """Upcycle a dense folder to 8 experts."""
    from transformers import LlamaForCausalLM

    from moe_runtime.methods import xft
    from moe_runtime.methods.xft import folders as xft_folders

    dense = folder / "dense"
    out = folder / "moe"
    dense_model(size, torch.bfloat16).save_pretrained(dense)
    settings = {"num_experts": size.E, "top_k": size.K}

    def in_memory():
        model = LlamaForCausalLM.from_pretrained(dense, dtype="auto")
        xft.upcycle(model, **settings)
        model.save_pretrained(folder / "saved")

    ways = {
        "moe_runtime": lambda: xft_folders.upcycle_folder(dense, out, overwrite=True, **settings),
        "moe_runtime, in memory": in_memory,
    }
    compare_folders(interleaved, [dense], out, ways)


def bench_xft_merge_folder(interleaved, size, folder):
    """Merge a folder of 8 experts into a dense one."""
    from transformers import AutoModelForCausalLM

    from moe_runtime.methods import xft
    from moe_runtime.methods.xft import folders as xft_folders

    dense = folder / "dense"
    moe = folder / "moe"
    out = folder / "merged"
    dense_model(size, torch.bfloat16).save_pretrained(dense)
    xft_folders.upcycle_folder(
        dense,
        moe,
        num_experts=size.E,
        top_k=size.K,
    )

    def in_memory():
        model = xft.merge(AutoModelForCausalLM.from_pretrained(moe, dtype="auto"))
        xft.save_dense(model, folder / "saved", overwrite=True)

    ways = {
        "moe_runtime": lambda: xft_folders.merge_folder(moe, out, overwrite=True),
        "moe_runtime, in memory": in_memory,
    }
    compare_folders(interleaved, [moe], out, ways)


def bench_upit_expand_folder(interleaved, size, folder):
    """Expand two experts and their base to a child expert."""
    from moe_runtime.methods.upit.expansion import expand_experts

    base, *experts = (folder / name for name in ("base", "first", "second"))
    model = dense_model(size, torch.bfloat16)
    model.save_pretrained(base)
    for expert in experts:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        model.save_pretrained(expert)
    ways = {
        "moe_runtime": lambda: expand_experts(
            experts,
            3,
            folder / "out",
            base=base,
            overwrite=True,
        )
    }
    compare_folders(
        interleaved,
        [base, *experts],
        folder / "out",
        ways,
    )


def bench_esft_scores(interleaved, shape):
    """Scores of each expert's use by a task, over the tokens of one batch."""
    from moe_runtime.methods import esft

    with fits():
        model = stock(shape, DTYPE, LAYERS).eval()
    ids = token_ids(shape)

    @torch.no_grad()
    def forward():
        return model(input_ids=ids, use_cache=False).logits

    variants = {
        "forward pass (floor)": forward,
        "moe_runtime": lambda: esft.score_experts(
            model,
            [ids],
            ids.numel(),
        ),
    }
    interleaved(variants, tokens=ids.numel(), dtype=DTYPE)


def bench_upit_vectors(interleaved, size):
    """Loss and gradients of a dense model with and without routing vectors at its MLPs."""
    from moe_runtime.methods.upit.vectors import RoutingVectors

    with fits():
        plain = dense_model(size).train()
        routed = copy.deepcopy(plain)
        RoutingVectors(routed, torch.zeros(size.L, size.H))
    ids = torch.randint(
        0,
        size.V,
        (-(-size.T // 1024), min(size.T, 1024)),
        device=DEVICE,
    )

    variants = {
        "without vectors (floor)": lambda: train(plain, ids),
        "moe_runtime": lambda: train(routed, ids),
    }
    interleaved(variants, tokens=ids.numel(), dtype=DTYPE)


def bench_ultrafuser_generate(interleaved, size):
    """Greedy answers of three fused specialists, against those of the three one after the other."""
    from moe_runtime.methods.ultrafuser.model import UltraFuser

    with fits():
        fuser = UltraFuser([dense_model(size) for _ in range(3)]).eval()
    ids = [
        torch.randint(
            3,
            size.V,
            (ROWS, PROMPT),
            device=DEVICE,
        )
        for _ in range(3)
    ]
    masks = [torch.ones_like(one) for one in ids]
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

    def each():
        for model, one, mask in zip(fuser.specialists, ids, masks, strict=True):
            model.generate(input_ids=one, attention_mask=mask, **settings)

    def fused():
        fuser.generate(prompt_ids=ids, prompt_mask=masks, **settings)

    variants = {"three specialists (floor)": each, "moe_runtime": fused}
    interleaved(variants, tokens=ROWS * NEW, dtype=DTYPE)
