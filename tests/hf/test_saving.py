"""What a trainer writes into a folder where something stands already."""

from pathlib import Path

import peft
import pytest
from transformers import TrainingArguments

from moe_runtime.files import atomic_model
from moe_runtime.hf.training import MoETrainer
from tests.hf.tiny import dense


def contents(folder: Path, *left_out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in left_out}


def put(folder: Path, files: dict[str, str]) -> None:
    """Save a model of these files as a trainer does."""
    with atomic_model(folder) as tmp:
        for name, text in files.items():
            (tmp / name).write_text(text)


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_an_adapter_saved_beside_its_base_leaves_the_base(tmp_path, max_shard_size):
    base = dense("llama")
    base.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n\nWhat I wrote.\n")
    before = contents(tmp_path, "README.md")
    assert (len([name for name in before if name.endswith(".safetensors")]) > 1) == (max_shard_size == "20KB")
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for _ in range(2):
        MoETrainer(lora(dense("llama")), args).save_model()
        after = contents(tmp_path)
        assert before.items() <= after.items()
        assert {"adapter_model.safetensors", "adapter_config.json"} <= after.keys()
        card = after["README.md"].decode()
        assert "What I wrote." in card and "license: mit" in card and "library_name: peft" in card
    # and a model saved beside an adapter leaves the adapter
    adapter = {name: after[name] for name in after if name.startswith("adapter_")}
    MoETrainer(dense("llama"), args).save_model()
    found = contents(tmp_path)
    assert adapter.items() <= found.items() and found["README.md"].decode() == card
    assert [name for name in found if name.endswith(".safetensors") and "model-" in name] == []
    assert "model.safetensors.index.json" not in found


def test_nothing_is_removed_where_nothing_came(tmp_path):
    put(tmp_path, {"model.safetensors": "weights", "config.json": "{}"})
    before = contents(tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights were written") as error:
        put(tmp_path, {"config.json": "[]", "training_args.bin": ""})
    assert error.value.filename == str(tmp_path)
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == 2


def test_older_weights_of_the_same_kind_go(tmp_path):
    put(tmp_path, {"adapter_model.bin": "a", "adapter_config.json": "{}"})
    put(tmp_path, {f"model-0000{i}-of-00002.safetensors": "m" for i in (1, 2)} | {"config.json": "{}"})
    put(tmp_path, {"model.safetensors": "n", "config.json": "[]"})
    put(tmp_path, {"adapter_model.safetensors": "b", "adapter_config.json": "{}"})
    assert sorted(contents(tmp_path)) == [
        "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors",
    ]  # fmt: skip
