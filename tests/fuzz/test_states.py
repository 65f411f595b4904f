"""What trainings, expansions and studies keep to go on from, broken: gone on from as it says, or refused by name."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from moe_runtime.config import MoEConfig
from moe_runtime.hf.training import recording, saving
from moe_runtime.hf.training.recording import RouterStatsCallback
from moe_runtime.methods.esft import official as esft_official
from moe_runtime.methods.esft import study as esft_study
from moe_runtime.methods.lora.adapters import load_stacked, save_stacked
from moe_runtime.methods.upit import expansion as upit_expansion
from moe_runtime.methods.upit import folders as upit_folders
from moe_runtime.methods.xft import routing_study as xft_routing_study
from moe_runtime.modules.lora import LoRAExperts
from moe_runtime.modules.moe import MoE
from tests.fuzz.attempts import attempt, run_seeds
from tests.fuzz.mutations import mutate_bytes, mutate_value, to_json
from tests.support.stress import scaled

pytestmark = pytest.mark.stress


class Kind(NamedTuple):
    """A kind of folder that is gone on from: how it is written, and how it is read."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    refuses: bool = True  # False: what is broken is passed over, as if it were not there


def put(name: str, values: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(values))


def restore(folder: Path) -> Any:
    recorder = recording.Recorder(recording.History(), lambda: None, 1, None)
    recorder.restore(folder)
    history = recorder.history
    # what is done with them: rows' losses by token, times in a sum, points in JSON
    sum(loss * count for loss, count in zip(*recorder.last, strict=True)) + recorder.before
    return json.dumps([history.train, history.held_out, history.rows])


HISTORY = {
    "train": [[1, 2.5], [2, float("nan")]], "held_out": [[2, 1.5]], "rows": [[2, [1.0, 2.0]]], "seconds": 3.5,
    "last": [[1.0, 2.0], [3, 4]],
}  # fmt: skip


def best(folder: Path) -> recording.Best:
    torch.manual_seed(0)
    found = recording.Best(torch.nn.Linear(3, 2), folder)
    return found


def go_on_with_the_best(folder: Path) -> Any:
    found = best(folder)
    found.begin(is_resumed=True)
    found.see(found.loss + 1, ([], []))
    return found.put_back()


def router_stats(folder: Path) -> Any:
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=2)
    callback, model = RouterStatsCallback(), torch.nn.Sequential(MoE(config))
    callback.path = folder / "router_stats.csv"
    state = SimpleNamespace(global_step=20, is_world_process_zero=True)
    callback.on_train_begin(SimpleNamespace(output_dir=str(folder)), state, None, model=model)
    lines = callback.path.read_text().splitlines()
    assert lines[0] == "step,layer,expert,shared,slots,load"
    assert all(len(line.split(",")) >= 6 and int(line.split(",")[0]) <= 20 for line in lines[1:])


def write_stats(folder: Path) -> None:
    lines = [f"{step},0,{e},False,7,0.5" for step in (10, 20, 30) for e in range(3)]
    (folder / "router_stats.csv").write_text("\r\n".join(["step,layer,expert,shared,slots,load", *lines, ""]))


def stacked(fill: float) -> dict:
    sizes = {"gate_proj": (4, 3), "up_proj": (4, 3), "down_proj": (3, 4)}
    base = torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()})
    for name, linear in base.items():
        setattr(base, name, linear)
    layer = LoRAExperts(base, num_experts=2, rank=2, alpha=4.0)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, fill)
    return {"layers.0": layer}


def write_logs(folder: Path) -> None:
    for layer in (1, 2):
        (folder / f"expert_weights_{layer}.txt").write_text("0\t1\t2\t0\t\t0.5000\t0.2500\t0.7000\t0.1000\n" * 3)


def known(folder: Path) -> Any:
    found = xft_routing_study._known(folder / "report.json", ["a/b"], {"x": 1})
    return found and torch.tensor(found["counts"]).sum()


REPORT = {
    "folders": ["a/b"], "settings": {"x": 1}, "tokens": {"t": 7, "u": 8}, "layers": ["1", "2"],
    "counts": [[[[[1, 2], [3, 4]]] * 2] * 2],
}  # fmt: skip
SIZES = {"tasks": ["a", "b"], "sizes": [512, 1024], "shared": [[1.0, 2.0], [2.0, 2.5]], "top": 6, "score": "gate"}


def products(folder: Path) -> Any:
    path = folder / upit_expansion.SUMMARY
    return upit_expansion._values(upit_expansion._kept(path), path, 2, 2)


KINDS = {
    "history": Kind(put("history.json", HISTORY), restore),
    "best": Kind(lambda folder: best(folder).see(1.0, ([1.0], [2])), go_on_with_the_best),
    "router_stats": Kind(write_stats, router_stats, refuses=False),
    "trainer_state": Kind(put("trainer_state.json", {"global_step": 3}), saving._is_whole, refuses=False),
    "sizes": Kind(put("found.json", SIZES), lambda folder: esft_study._sizes_in(folder / "found.json")),
    "routing": Kind(put("report.json", REPORT), known),
    "expansion": Kind(put(upit_expansion.SUMMARY, {"products": {"values": [[1.0, 0.5], [0.5, 1.0]]}}), products),
    "routers": Kind(
        put(upit_folders.SUMMARY, {"experts": [1, 2]}), lambda f: upit_folders.assemble_folders([], f / "o", routers=f)
    ),
    "logs": Kind(write_logs, lambda folder: esft_official.read_logs(folder, num_experts=4)),
    "stacked": Kind(
        lambda folder: save_stacked(stacked(1.0), folder, base_model="base", overwrite=True),
        lambda folder: load_stacked(stacked(0.0), folder),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_states(tmp_path, kind):
    whole, folder = tmp_path / "whole", tmp_path / kind
    whole.mkdir()
    KINDS[kind].write(whole)
    shutil.copytree(whole, folder)
    names, refused = sorted(path.name for path in whole.iterdir()), []
    if kind != "routers":
        assert attempt(lambda: KINDS[kind].read(folder)).is_read

    def case(rng: random.Random) -> None:
        name = rng.choice(names)
        data = (whole / name).read_bytes()
        if name.endswith(".json") and rng.random() < 0.8:
            (folder / name).write_bytes(to_json(rng, mutate_value(rng, json.loads(data))))
        else:
            (folder / name).write_bytes(mutate_bytes(rng, data))
        refused.append(not attempt(lambda: KINDS[kind].read(folder), name, folder.name).is_read)
        (folder / name).write_bytes(data)

    run_seeds(scaled(15, 2000), case)
    assert any(refused) == KINDS[kind].refuses


@pytest.mark.parametrize("end", ["1", "10", "10,0,0", "20,0,0,False,7,0.", "\r\n\r\n10,0"])
def test_half_a_line_of_router_statistics_is_no_line(tmp_path, end):
    """A process that was killed while it wrote one leaves it; the step that it names may be another's."""
    write_stats(tmp_path)
    path = tmp_path / "router_stats.csv"
    path.write_bytes(path.read_bytes() + end.encode())
    router_stats(tmp_path)
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["step"] + ["10"] * 3 + ["20"] * 3
