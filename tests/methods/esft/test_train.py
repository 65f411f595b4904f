"""esft.train_only and what it saves: adapters at any time, a Trainer's checkpoints, and resuming
from them.
"""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from moe_runtime.hf.dropin.experts import BEFORE
from moe_runtime.hf.training import trained_files
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods import esft
from moe_runtime.methods.esft import ExpertSelection
from tests.support.checkpoints import assert_equal, snapshot
from tests.support.esft_adapter import random_adapter, same, weights
from tests.support.stock_moe import batch, stock

SELECTION = ExpertSelection(experts={1: (7, 2), 2: (0,)})
FAMILIES = {
    "deepseek_v2": SELECTION,
    "mixtral": ExpertSelection(experts={0: (3,), 1: (0, 5)}),
    "gpt_oss": ExpertSelection(experts={1: (6, 1)}),  # transposed, interleaved, biases
    "granitemoe": ExpertSelection(experts={0: (1,)}),
}


def trained(model, steps: int = 3):
    """Train in place, with weight decay that would change parameters that are not frozen."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        model.train()(**batch(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model):
    return model.eval()(**batch()).logits


def tensors_of(adapter) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter, of a model that trains one, or of a folder."""
    if isinstance(adapter, Path):
        adapter = esft.load_adapter(adapter)
    elif isinstance(adapter, torch.nn.Module):
        adapter = esft.adapter_of(adapter)
    return dict(adapter.tensors)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize(
    "family, selection",
    FAMILIES.items(),
    ids=FAMILIES,
)
def test_train_save_apply_remove(tmp_path, family, selection, dtype):
    """The trained rows are float32, also for a bfloat16 model."""
    base = stock(family).to(dtype)
    before = weights(base)
    at_first = logits(base)
    model = copy.deepcopy(base)
    receipt = esft.train_only(model, selection, dtype=torch.float32)
    if dtype == torch.float32:
        bound = 1e-5
    else:
        bound = 0.05
    torch.testing.assert_close(
        logits(model),
        at_first,
        atol=bound,
        rtol=1e-2,
    )
    trained(model)
    esft.save_adapter(model, tmp_path / "adapter")
    adapter = esft.load_adapter(tmp_path / "adapter")
    assert adapter.num_parameters == receipt.trainable_parameters
    assert adapter.nbytes == 4 * receipt.trainable_parameters
    assert adapter.selection == selection
    size = (tmp_path / "adapter" / "model.safetensors").stat().st_size
    assert adapter.nbytes < size < adapter.nbytes + 20_000
    esft.fold(model)
    esft.apply(base, adapter)
    assert_equal(weights(base), weights(model))
    assert not same(before, weights(base))
    esft.remove(base)
    assert_equal(before, weights(base))


def test_flags_given_are_before_the_selection_s():
    model = stock("deepseek_v2")
    selection = replace(SELECTION, shared_experts=True, non_expert_modules=True)
    esft.train_only(model, selection, non_expert_modules=False)
    adapter = esft.adapter_of(model)
    assert adapter.selection == replace(selection, non_expert_modules=False)
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in adapter.tensors
    assert "model.norm.weight" not in adapter.tensors


def test_drop_is_the_base_and_fold_a_plain_model(tmp_path):
    model = stock("qwen3_moe")
    before = weights(model)
    selection = ExpertSelection(experts={0: (1, 4)})
    esft.train_only(model, selection)
    trained(model)
    copied = copy.deepcopy(model)
    esft.drop(model)
    assert_equal(before, weights(model))
    for parameter in model.parameters():
        assert parameter.requires_grad
    expected = logits(copied)
    esft.fold(copied)
    assert "save_pretrained" not in copied.__dict__
    for module in copied.modules():
        assert BEFORE not in module.__dict__
        assert not module._load_state_dict_pre_hooks
    copied.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(
        logits(loaded),
        expected,
        atol=1e-5,
        rtol=1e-4,
    )
    esft.train_only(model, selection)  # and train again


def test_an_adapter_does_not_follow_the_training():
    model = stock("qwen3_moe")
    esft.train_only(
        model,
        ExpertSelection(experts={0: (1,)}, non_expert_modules=True),
    )
    adapter = esft.adapter_of(model)
    before = copy.deepcopy(tensors_of(adapter))
    trained(model)
    assert_equal(before, tensors_of(adapter))
    assert not same(before, tensors_of(model))


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_save_pretrained_writes_the_adapter_of_the_model_it_is_called_on(tmp_path, clone):
    model = stock("qwen3_moe")
    esft.train_only(
        model,
        ExpertSelection(experts={0: (1, 3)}),
    )
    other = clone(model)
    trained(model)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for which, path in ((model, folder), (other, tmp_path / "other")):
        which.save_pretrained(path)
        assert_equal(tensors_of(path), tensors_of(which))
    names = {"expert_cfg.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == names
    with pytest.raises((OSError, ValueError), match="config.json"):  # no folder of a whole model
        AutoModelForCausalLM.from_pretrained(folder)
    assert not same(tensors_of(model), tensors_of(other))
    esft.load_trained(other, folder)
    assert_equal(tensors_of(model), tensors_of(other))


@pytest.mark.parametrize(
    "family, selection",
    FAMILIES.items(),
    ids=FAMILIES,
)
def test_load_state_dict_takes_the_adapter_s_names(tmp_path, family, selection):
    model = stock(family)
    other = stock(family)
    esft.train_only(model, selection)
    esft.train_only(other, selection)
    trained(model).save_pretrained(tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "model.safetensors")
    loaded = other.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys
    assert "trained_" not in str(loaded.missing_keys)
    assert_equal(tensors_of(model), tensors_of(other))
    other.load_state_dict(model.state_dict())  # also strictly, with its own names
    esft.drop(other)
    others = {layer: (ids[0], 4) for layer, ids in selection.experts.items()}
    esft.train_only(other, ExpertSelection(experts=others))
    with pytest.raises(RuntimeError, match="the file must have the trained experts"):
        other.load_state_dict(state, strict=False)


def test_load_trained_wants_the_same_training_and_base(tmp_path):
    folder = tmp_path / "adapter"
    first = stock("qwen3_moe")
    esft.train_only(
        first,
        ExpertSelection(experts={0: (1, 0), 1: (0,)}),
    )
    esft.save_adapter(first, folder)
    with pytest.raises(ValueError, match="trains no experts separately"):
        esft.load_trained(stock("qwen3_moe"), folder)
    sizes = "for a base whose moe_intermediate_size is 24, but the model's is 16"
    for experts, changes, scaled, match in (
        ((1,), {}, None, "has model.layers.0.mlp.experts.0"),
        ((0, 1, 4), {}, None, "lacks model.layers.0.mlp.experts.4"),
        ((1, 0), {"moe_intermediate_size": 16}, None, sizes),
        ((1, 0), {}, "lm_head", None),  # a single matrix may differ
        ((1, 0), {}, "", "other weights"),
        ((1, 0), {}, "mlp.experts.", "other experts: 100%"),
    ):
        model = stock("qwen3_moe", **changes)
        for name, parameter in model.named_parameters():
            if scaled is not None and scaled in name:
                parameter.data.mul_(1.1)
        esft.train_only(
            model,
            ExpertSelection(experts={0: experts, 1: (0,)}),
        )
        if match is None:
            esft.load_trained(model, folder)
            continue
        before = weights(model)
        with pytest.raises(ValueError, match=match):
            esft.load_trained(model, folder)
        assert_equal(before, weights(model))


def test_experts_that_an_adapter_trains_may_differ_from_its_base():
    model = stock("qwen3_moe")
    esft.train_only(
        model,
        ExpertSelection(experts={0: (1, 0), 1: (0,)}),
    )
    adapter = esft.adapter_of(model)
    other = stock("qwen3_moe")
    for layer in other.model.layers:
        layer.mlp.experts.down_proj.data[0].mul_(2)
        layer.mlp.experts.gate_up_proj.data[0].mul_(2)
    esft.apply(other, adapter)


def test_trained_non_experts_are_cast_and_restored(tmp_path):
    model = stock("deepseek_v2").to(torch.bfloat16)
    before = weights(model)
    selection = replace(SELECTION, shared_experts=True, non_expert_modules=True)
    esft.train_only(model, selection, dtype=torch.float32)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with pytest.raises(ValueError, match="bf16 is False, but the trained parameters have another"):
        trainer_of(MoETrainer, tmp_path / "run", model=model)
    # steps that bfloat16 would round away
    trainer_of(
        MoETrainer,
        tmp_path / "run",
        model=model,
        bf16=True,
        max_steps=2,
        learning_rate=1e-6,
        weight_decay=0.0,
        save_strategy="no",
    ).train()
    adapter = esft.adapter_of(model)
    assert {tensor.dtype for tensor in adapter.tensors.values()} == {torch.float32}
    norm = adapter.tensors["model.norm.weight"]
    assert not torch.equal(
        norm,
        before["model.norm.weight"].float(),
    )
    assert torch.equal(
        norm.bfloat16(),
        before["model.norm.weight"],
    )
    esft.drop(model)
    for name, tensor in weights(model).items():
        assert tensor.dtype == before[name].dtype
    logits(model)  # without autocast
    esft.apply(model, adapter)


def test_peft_and_esft_do_not_undo_each_other(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    selection = ExpertSelection(experts={0: (1,)})
    model = stock("qwen3_moe")
    esft.train_only(model, selection)
    frozen = get_peft_model(model, lora)
    for call in (
        lambda: esft.save_adapter(frozen, tmp_path / "adapter"),
        lambda: trainer_of(MoETrainer, tmp_path / "run", model=frozen),
    ):
        with pytest.raises(ValueError, match="trained_.* was selected for training but is frozen"):
            call()
    adapted = get_peft_model(stock("qwen3_moe"), lora)
    with pytest.raises(ValueError, match="non_expert_modules is True, but .*PEFT adapter .*lora_A"):
        esft.train_only(adapted, selection, non_expert_modules=True)
    esft.train_only(adapted, selection)
    esft.save_adapter(adapted, tmp_path / "adapter")
    assert len(tensors_of(tmp_path / "adapter")) == 3


@pytest.fixture
def wrapped(tmp_path):
    """A model in DDP, in a run with a single process."""
    url = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", url, rank=0, world_size=1)
    yield torch.nn.parallel.DistributedDataParallel(stock("qwen3_moe"))
    torch.distributed.destroy_process_group()


def test_a_wrapped_model_is_named_or_unwrapped(wrapped):
    with pytest.raises(ValueError, match="parameters of DistributedDataParallel are held by"):
        esft.train_only(
            wrapped,
            ExpertSelection(experts={0: (1,)}),
        )
    before = weights(wrapped.module)
    esft.apply(wrapped, random_adapter(stock("qwen3_moe")))
    assert not same(before, weights(wrapped.module))
    esft.remove(wrapped)
    assert_equal(before, weights(wrapped.module))


@pytest.mark.parametrize(
    "experts, match",
    [
        ({5: (1,)}, r"selection has experts \[1\] of layer 5"),
        ({0: (8,)}, r"experts \[8\] of layer 0, .* to 7"),
    ],
)
def test_what_cannot_train_is_refused(experts, match):
    model = stock("qwen3_moe")
    before = weights(model)
    with pytest.raises(ValueError, match=match):
        esft.train_only(model, ExpertSelection(experts=experts))
    assert_equal(before, weights(model))
    for parameter in model.parameters():
        assert parameter.requires_grad


ROWS = {"input_ids": [[3 + (5 * i + j) % 50 for j in range(8)] for i in range(12)]}
ROWS["labels"] = ROWS["input_ids"]


def trainer_of(kind, folder, selection=SELECTION, family="deepseek_v2", model=None, **settings):
    """A trainer of `model`, or of a model that trains `selection`; None means a model that trains
    everything.
    """
    if model is None:
        model = stock(family)
        if selection is not None:
            esft.train_only(model, selection)
    common = {
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
    }
    arguments = TrainingArguments(
        str(folder),
        **common | settings,
    )
    rows = datasets.Dataset.from_dict(ROWS).with_format("torch")
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows)


def learned(trainer) -> dict[str, torch.Tensor]:
    return tensors_of(trainer.model)


@pytest.mark.parametrize(
    "others",
    [False, True],
    ids=["experts", "everything else too"],
)
@pytest.mark.parametrize("kind", [MoETrainer, Trainer])
def test_checkpoints_are_small_and_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, others):
    selection = replace(SELECTION, shared_experts=others, non_expert_modules=others)
    whole = trainer_of(kind, tmp_path / "run", selection)
    whole.train()
    expected = learned(whole)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    half = esft.load_adapter(checkpoint)
    assert half.tensors.keys() == expected.keys()
    assert not same(dict(half.tensors), expected)
    assert (checkpoint / "model.safetensors").stat().st_size < half.nbytes + 20_000
    assert (checkpoint / "optimizer.pt").stat().st_size < 2 * half.nbytes + 40_000
    resumed = trainer_of(kind, tmp_path / "run", selection)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(learned(resumed), expected)
    resumed.save_model(str(tmp_path / "last"))
    assert_equal(tensors_of(tmp_path / "last"), expected)


@pytest.mark.parametrize("shards", ["one", "several", "bin"])
def test_an_adapter_never_replaces_a_whole_model(tmp_path, shards):
    base = tmp_path / "base"
    run = tmp_path / "run"
    model = stock("qwen3_moe")
    model.save_pretrained(
        base,
        max_shard_size="20KB" if shards == "several" else "5GB",
    )
    if shards == "bin":
        (base / "model.safetensors").rename(base / "pytorch_model.bin")
    before = snapshot(base)
    esft.train_only(
        model,
        ExpertSelection(experts={0: (1,)}),
    )
    trainer = trainer_of(MoETrainer, run, model=model)
    for call in (
        lambda: trainer_of(MoETrainer, base, model=model),
        lambda: trainer.save_model(str(base)),
        trainer_of(Trainer, base, model=model).save_model,
        lambda: model.save_pretrained(base),
        lambda: esft.save_adapter(model, base, overwrite=True),
        lambda: esft.adapter_of(model).save(base, overwrite=True),
    ):
        with pytest.raises(ValueError, match="base holds a whole model .*Choose another folder"):
            call()
        assert snapshot(base) == before
    # an adapter's own folder may be overwritten, also if it has its base's config, as folders on
    # the Hub do
    trainer.save_model()
    model.config.save_pretrained(run)
    trainer.save_model()
    assert_equal(tensors_of(run), learned(trainer))


def test_a_split_model_s_adapter_is_gathered_and_written_once(tmp_path, monkeypatch):
    trainer = trainer_of(MoETrainer, tmp_path)
    write = mock.Mock(wraps=trained_files.write_files)
    gather = mock.Mock()
    monkeypatch.setattr(trained_files, "write_files", write)
    # as under FSDP with FULL_STATE_DICT, where Trainer would gather the whole model
    trainer.is_fsdp_enabled = True
    monkeypatch.setattr(trainer.accelerator, "get_state_dict", gather)
    trainer.save_model(str(tmp_path / "last"))
    write.assert_called_once()
    gather.assert_not_called()
    assert_equal(
        tensors_of(tmp_path / "last"),
        learned(trainer),
    )
    assert trained_files.gathered(trainer.model, keep=False) == {}


@pytest.mark.parametrize(
    "first, then, match",
    [
        (SELECTION, None, "that trains experts separately.*this model trains all"),
        (None, SELECTION, "that trains all.*this model trains experts separately"),
        (SELECTION, replace(SELECTION, experts={1: (7,)}), "has model.layers.1"),
    ],
    ids=["not prepared", "of a whole model", "other experts"],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, first, then, match):
    trainer_of(MoETrainer, tmp_path, first, max_steps=1, save_steps=1).train()
    other = trainer_of(MoETrainer, tmp_path, then)
    with pytest.raises(ValueError, match=match):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
