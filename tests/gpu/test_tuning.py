"""The tuner with a real clock. Without a GPU: tests/tools/test_tune.py."""

import pytest
import torch

from moe_runtime.io.files import read_json
from moe_runtime.kernels import tiles
from moe_runtime.tools import tune

pytestmark = pytest.mark.gpu


def test_a_layer_is_tuned_and_the_kernels_take_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layer = tune.Layer(256, 512, 4, 2, shared=True)
    device = torch.device("cuda", torch.cuda.current_device())
    steps = list(tune.tune({"layer": layer}, [512], ["bfloat16"]))
    assert [step.state for step in steps] == ["measured"] * 6, "; ".join(map(str, steps))
    entries = read_json(tiles.tuned_path())["devices"][torch.cuda.get_device_name()]["tiles"]
    for step in steps:
        ran = [tried for tried in step.entry["candidates"] if tried["ms"]]
        assert 0 < step.entry["ms"] <= step.entry["table"]["ms"]
        assert len(ran) >= 4
        wrong = [
            tried["note"] for tried in step.entry["candidates"] if "wrong result" in tried["note"]
        ]
        assert not wrong, f"{step.title}: {wrong}"
    tiles.read_tuned.cache_clear()
    tiles.lookup.cache_clear()
    try:
        x = torch.empty(1, dtype=torch.bfloat16, device=device)
        problem = tune.problem_of("down", layer, 512, "bfloat16", device)
        tile = tiles.choose(
            "down",
            x,
            problem.N,
            problem.K,
            1024,
            4,
        )
        assert tile == tiles.clip(
            tiles.Tile(**entries[problem.key()]["tile"]),
            problem,
        )
    finally:
        tiles.read_tuned.cache_clear()
        tiles.lookup.cache_clear()
    assert [step.state for step in tune.tune({"layer": layer}, [512], ["bfloat16"])] == ["kept"] * 6


def test_the_clock_sees_the_gpu_and_not_the_launch():
    """A copy of 1 GiB takes between 0.2 and 20 ms on any GPU that runs the kernels, and a small one
    far less.
    """
    timer = tune.EventTimer(torch.device("cuda", torch.cuda.current_device()))
    large = torch.ones(1 << 28, device="cuda")
    small = torch.ones(1 << 10, device="cuda")
    functions = [
        lambda: large.clone(),
        lambda: small.clone(),
        lambda: [large.clone() for _ in range(3)],
    ]
    timer.round(functions)
    one, tiny, three = timer.round(functions)
    assert 0.2 < one < 20
    assert tiny < one / 4
    assert 2 * one < three < 4.5 * one
