"""Folders of ours and of others, a file in them broken: read, or refused by name; one base of each kind, many mutations."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from moe_runtime.experiments.stages import read_result
from moe_runtime.hf.dropin import replay
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.hf.models.tiny import train_tokenizer
from moe_runtime.hf.training import ranks
from moe_runtime.kernels import tiles
from moe_runtime.methods.esft import adapters as esft_adapters
from moe_runtime.methods.lora import adapters as lora_adapters
from moe_runtime.methods.ultrafuser import folders as ultrafuser_folders
from moe_runtime.methods.upit import router as upit_router
from moe_runtime.methods.upit.experts import open_expert
from moe_runtime.methods.xft import folders as xft_folders
from moe_runtime.methods.xft import official as xft_official
from moe_runtime.methods.xft.official_config import import_config, read_values
from tests.fuzz.attempts import attempt, run_seeds
from tests.fuzz.mutations import mutate_bytes, mutate_value, to_json
from tests.hf import tiny
from tests.support.stress import scaled

pytestmark = pytest.mark.stress


class Kind(NamedTuple):
    """A kind of folder: how one is written, how it is read, and how many mutations of its files are read."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    few: int = 60


def write_model(folder: Path) -> None:
    tiny.dense("llama").save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def write_upcycled(folder: Path) -> None:
    tiny.upcycled("llama").save_pretrained(folder)
    for name in ("generation_config.json", "modeling_moe_runtime.py"):
        (folder / name).unlink(missing_ok=True)


def read_shape(folder: Path) -> Any:
    return folders.config_for_folder(folders.read_config(folder), num_experts=4, top_k=2)


def write_official(folder: Path) -> None:
    values = {"model_type": "llama_moe_upscaling", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "num_experts": 4, "num_selects": 2}
    values |= {"gate_type": "TopKUniversalBalancedNoisyGate", "rope_scaling": {"factor": 4.0, "type": "linear"}}
    (folder / "config.json").write_text(json.dumps(values))


def write_adapter(folder: Path) -> None:
    selection = {"experts": {"1": [2]}, "shared_experts": False, "non_expert_modules": False, "score": "gate", "p": 0.2}
    (folder / "expert_cfg.json").write_text(
        json.dumps(selection | {"moe_runtime": {"format": 1, "base": {"weights": {}}}})
    )
    parts = {f"{part}_proj": torch.ones(2, 2) for part in ("gate", "up", "down")}
    save_file({f"model.layers.1.mlp.experts.2.{k}.weight": v for k, v in parts.items()}, folder / "model.safetensors")


def write_lora(folder: Path) -> None:
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "base_model_name_or_path": "base",
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    halves = {name.format("A"): torch.ones(2, 4), name.format("B"): torch.ones(6, 2)}
    save_file(halves, folder / "adapter_model.safetensors")


def write_routed(folder: Path) -> None:
    measured = {"sigmoid": [0.5], "softmax": [0.5], "loss": 1.0}
    fields = upit_router.Measured._fields
    measured = {name: measured.get(name, 1.0) for name in fields}
    values = {"format": upit_router.FORMAT, "expert": ".", "router_init": "constrained", "steps": 1, "seconds": 1.0}
    (folder / upit_router.RECORD).write_text(json.dumps(values | {"before": measured, "after": measured}))
    save_file({"vectors": torch.ones(2, 4)}, folder / upit_router.VECTORS)


def write_fuser(folder: Path) -> None:
    one = {"name": "a", "path": "specialists/a", "template": None, "dtype": "float32", "weights": None}
    gate = {"kind": "mlp", "joint": False, "hidden_sizes": [8, 8]}
    values = {"format": ultrafuser_folders.FORMAT, "gate": gate, "loss_reduction": "mean"}
    values |= {"specialists": [one, one | {"name": "b", "path": "specialists/b"}]}
    (folder / ultrafuser_folders.CONFIG).write_text(json.dumps(values))


def read_fuser(folder: Path) -> Any:
    outside = folder.with_name("outside")
    for place in (folder / "specialists" / "a", folder / "specialists" / "b", outside):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text("{}")
    return ultrafuser_folders.locate(folder, ultrafuser_folders.read(folder), {})


def write_result(folder: Path) -> None:
    values = {"name": "sft", "folder": "x", "loss": 1.0, "losses": [1.0], "tokens": [3], "steps": 2, "seconds": 1.0}
    values |= {"total_seconds": 2.0, "parameters": 9, "active_parameters": 5, "history": [[0, 2.0], [2, 1.0]]}
    (folder / "result.json").write_text(json.dumps(values | {"steps_per_second": 2.0, "alpha": [[0.5, 0.5]]}))


def write_tuned(folder: Path) -> None:
    tile = tiles.Tile(**{name: 16 for name in tiles.Tile._fields if name not in tiles.Tile._field_defaults})
    devices = {"GPU": {"tiles": {"up": {"tile": tile._asdict(), "ms": 1.0}}}}
    (folder / "tiles.json").write_text(json.dumps({"format": 1, "devices": devices}))


def write_routing(folder: Path) -> None:
    record = replay.RoutingRecord({"layers.0": [torch.tensor([[0, 1], [2, 3]])]}, {"layers.0": 4})
    record.save(folder / "routing.safetensors")


def write_tokenizer(folder: Path) -> None:
    train_tokenizer(["Add 1 and 2."], 300).save_pretrained(folder)


KINDS = {
    "model": Kind(write_model, read_shape, 100),
    "upcycled": Kind(write_upcycled, lambda folder: moe_config(folders.read_config(folder)), 60),
    "official": Kind(write_official, lambda folder: import_config(read_values(folder), "moe"), 100),
    "adapter": Kind(write_adapter, esft_adapters.load_adapter),
    "lora": Kind(write_lora, lora_adapters.read_adapter),
    "expert": Kind(write_lora, lambda folder: open_expert(folder).specs()),
    "routed": Kind(write_routed, upit_router.load_routed),
    "fuser": Kind(write_fuser, read_fuser),
    "result": Kind(write_result, read_result),
    "tuned": Kind(write_tuned, lambda folder: tiles.read_tuned.__wrapped__(folder / "tiles.json")),
    "routing": Kind(write_routing, lambda folder: replay.RoutingRecord.load(folder / "routing.safetensors")),
    "tokenizer": Kind(write_tokenizer, lambda folder: ranks.load_tokenizer(folder), 30),
    "pickle": Kind(
        lambda folder: torch.save({"a": torch.ones(4)}, folder / "pytorch_model.bin"),
        lambda folder: xft_official.open_model(folder).specs(),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_folders(tmp_path, kind):
    whole, folder = tmp_path / "whole", tmp_path / kind
    whole.mkdir()
    KINDS[kind].write(whole)
    shutil.copytree(whole, folder)
    names, refused = sorted(path.name for path in whole.iterdir()), []
    assert attempt(lambda: KINDS[kind].read(folder)).is_read

    def case(rng: random.Random) -> None:
        name = rng.choice(names)
        data = (whole / name).read_bytes()
        is_json = name.endswith(".json") and len(data) < 20_000
        try:
            if rng.random() < 0.05:
                (folder / name).unlink()
                if rng.random() < 0.5:
                    (folder / name).mkdir()
            elif is_json and rng.random() < 0.85:
                (folder / name).write_bytes(to_json(rng, mutate_value(rng, json.loads(data))))
            else:
                (folder / name).write_bytes(mutate_bytes(rng, data))
            refused.append(not attempt(lambda: KINDS[kind].read(folder), name, folder.name).is_read)
        finally:
            if (folder / name).is_dir():
                (folder / name).rmdir()
            (folder / name).write_bytes(data)

    run_seeds(scaled(KINDS[kind].few // 3, 10 * KINDS[kind].few), case)
    assert any(refused)


@pytest.mark.parametrize("layers", [2**31, 10**400])
def test_more_layers_than_a_model_has_take_no_memory(tmp_path, layers):
    write_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": layers}))
    error = attempt(
        lambda: xft_folders.upcycle_folder(tmp_path, tmp_path / "out", num_experts=4, top_k=2), path.name
    ).error
    assert "num_hidden_layers" in error and not (tmp_path / "out").exists()


# transformers' config makes a list of them
@pytest.mark.parametrize(
    "key, family",
    [("num_hidden_layers", "qwen3"), ("n_layer", "gpt2"), ("num_labels", "llama"), ("num_experts", "olmoe")],
)
def test_counts_that_no_model_has_are_refused_before_transformers_reads_them(tmp_path, monkeypatch, key, family):
    path = tmp_path / "config.json"
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers has read it"))
    for values in ({key: 10**12}, {"text_config": {key: 10**12}}):
        path.write_text(json.dumps({"model_type": family} | values))
        for read in (folders.read_config, ranks.load_config):
            with pytest.raises(ValueError, match=rf"{key} is 1000000000000; want at most \d+, in {path}"):
                read(tmp_path)
