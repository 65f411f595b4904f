"""Data parallelism with the engines that users have equals one process, also when a rank leaves
experts without a token.
"""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support import engine_worker
from tests.support.dist_launch import torchrun

ROOT = Path(__file__).resolve().parents[3]
DEEPSPEED = Path(sys.prefix, "deepspeed")  # `make test` installs it there
WHY_NOT = None if DEEPSPEED.is_dir() else f"needs {DEEPSPEED}, which make test installs"
ENGINES = [  # the kind of model, and the engine's classes of the model and its parameters
    pytest.param(
        "ddp",
        "stock",
        "DistributedDataParallel",
        {"Parameter"},
        id="ddp",
    ),
    pytest.param(
        "fsdp2",
        "stock",
        "FSDPQwen3MoeForCausalLM",
        {"DTensor"},
        id="fsdp2",
    ),
    *(
        pytest.param(
            "deepspeed",
            kind,
            "DeepSpeedEngine",
            {"ZeroParamStatus.NOT_AVAILABLE"},
            id=f"zero-3, {kind}",
            marks=pytest.mark.skipif(
                WHY_NOT is not None,
                reason=str(WHY_NOT),
            ),
        )
        for kind in ("stock", "lora", "upcycled")
    ),
]


def launch(*args: str) -> None:
    """Run engine_worker.py in two processes."""
    paths = [
        str(ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ] + [str(DEEPSPEED)] * (args[0] == "deepspeed")
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    env |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    torchrun(str(Path(engine_worker.__file__)), *args, env=env)


@functools.cache
def alone(kind: str) -> dict:
    return engine_worker.steps_alone(kind)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind", "model", "parameters"), ENGINES)
def test_equals_one_process(engine, kind, model, parameters, tmp_path):
    launch(engine, kind, str(tmp_path))
    expected = alone(kind)
    ranks = [
        torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        for rank in range(engine_worker.RANKS)
    ]
    for counts in zip(*(rank["counts"].values() for rank in ranks)):
        # idle on one rank, busy on the other
        assert (counts[0] > 0).all()
        assert (counts[1] == 0).any()
    for step, losses in enumerate(expected["losses"]):
        assert [rank["losses"][step] for rank in ranks] == pytest.approx(losses, rel=1e-5)
    for rank in ranks:
        assert rank["model"] == model
        assert rank["parameters"] == parameters
        assert not rank["missing"]
        assert rank["gradients"].keys() == expected["gradients"].keys()
        for name, want in expected["gradients"].items():
            assert want.norm() > 0, name
            assert distance(rank["gradients"][name], want) < 1e-5, name
        tiny.assert_close(rank["weights"], expected["weights"], 1e-6)
