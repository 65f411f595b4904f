"""esft.train_only and what it saves: adapters at any time, a Trainer's checkpoints, and training
that goes on from them.
"""

import copy
import pickle
from dataclasses import replace

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
from tests.hf.tiny import upcycled
from tests.support.esft_adapter import random_adapter, same, weights
from tests.support.stock_moe import VOCAB, batch, stock

SELECTION = ExpertSelection(experts={1: (7, 2), 2: (0,)})
FAMILIES = {
    "deepseek_v2": SELECTION,
    "mixtral": ExpertSelection(experts={0: (3,), 1: (0, 5)}),
    "gpt_oss": ExpertSelection(experts={1: (6, 1)}),  # transposed, interleaved, biases
    "granitemoe": ExpertSelection(experts={0: (1,)}),
}


def trained(model, steps: int = 3):
    """Train in place, with a weight decay that would move what is not frozen."""
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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 with fp32 rows"]
)
@pytest.mark.parametrize("family, selection", FAMILIES.items(), ids=FAMILIES)
def test_train_save_apply_remove(tmp_path, family, selection, dtype):
    base = stock(family).to(dtype)
    before = weights(base)
    at_first = logits(base)
    model = copy.deepcopy(base)
    receipt = esft.train_only(model, selection, dtype=torch.float32)
    torch.testing.assert_close(
        logits(model), at_first, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-2
    )
    trained(model)
    esft.save_adapter(model, tmp_path / "adapter")
    adapter = esft.load_adapter(tmp_path / "adapter")
    assert adapter.num_parameters == receipt.row_parameters == receipt.trainable_parameters
    assert adapter.nbytes == 4 * receipt.row_parameters and adapter.selection == selection
    size = (tmp_path / "adapter" / "model.safetensors").stat().st_size
    assert adapter.nbytes < size < adapter.nbytes + 20_000
    esft.fold(model)
    esft.apply(base, adapter)
    assert same(weights(base), weights(model)) and not same(before, weights(base))
    esft.remove(base)
    assert same(before, weights(base))


TABLE_3 = [  # routed experts, shared experts, all that is no expert
    pytest.param(True, False, False, id="ESFT"),
    pytest.param(True, True, False, id="and shared"),
    pytest.param(True, False, True, id="and non-expert"),
    pytest.param(True, True, True, id="and both"),
    pytest.param(False, True, True, id="no routed"),
    pytest.param(False, True, False, id="shared alone"),
    pytest.param(False, False, True, id="non-expert alone"),
]


@pytest.mark.parametrize("ours", [False, True], ids=["deepseek_v2", "upcycled"])
@pytest.mark.parametrize("routed, shared, others", TABLE_3)
def test_the_adapter_has_what_the_flags_train(tmp_path, routed, shared, others, ours):
    def base():
        return upcycled("llama", changes={"vocab_size": VOCAB}) if ours else stock("deepseek_v2")

    selection = ExpertSelection(
        experts={1: (2, 3)} if routed else {}, shared_experts=shared, non_expert_modules=others
    )
    model = base()
    receipt = esft.train_only(model, selection)
    trained(model)
    esft.save_adapter(model, tmp_path / "adapter")
    adapter = esft.load_adapter(tmp_path / "adapter")
    assert adapter.num_parameters == receipt.trainable_parameters
    assert ("model.norm.weight" in adapter.tensors) == others
    name = "model.layers.1.mlp." + (
        "experts.0.gate_proj.weight" if ours else "shared_experts.gate_proj.weight"
    )
    assert (name in adapter.tensors) == shared
    assert ("model.layers.1.mlp.experts.2.up_proj.weight" in adapter.tensors) == routed
    target = base()
    before = weights(target)
    esft.apply(target, adapter)
    torch.testing.assert_close(logits(target), logits(model), atol=1e-5, rtol=1e-4)
    changed = {
        name for name, tensor in weights(target).items() if not torch.equal(before[name], tensor)
    }
    assert len(changed) >= len(adapter.others) and changed
    esft.remove(target)
    assert same(before, weights(target))


def test_flags_given_are_before_the_selection_s():
    model = stock("deepseek_v2")
    selection = replace(SELECTION, shared_experts=True, non_expert_modules=True)
    esft.train_only(model, selection, non_expert_modules=False)
    assert esft.adapter_of(model).selection == replace(selection, non_expert_modules=False)
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in esft.adapter_of(model).tensors
    assert "model.norm.weight" not in esft.adapter_of(model).tensors


def test_drop_is_the_base_and_fold_a_plain_model(tmp_path):
    model = stock("qwen3_moe")
    before = weights(model)
    selection = ExpertSelection(experts={0: (1, 4)})
    esft.train_only(model, selection)
    trained(model)
    copied = copy.deepcopy(model)
    esft.drop(model)
    assert same(before, weights(model)) and all(p.requires_grad for p in model.parameters())
    want = logits(copied)
    esft.fold(copied)
    assert "save_pretrained" not in copied.__dict__ and not any(
        BEFORE in m.__dict__ for m in copied.modules()
    )
    assert not any(m._load_state_dict_pre_hooks for m in copied.modules())
    copied.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(loaded), want, atol=1e-5, rtol=1e-4)
    esft.train_only(model, selection)  # and again


def test_an_adapter_does_not_follow_the_training(tmp_path):
    model = stock("qwen3_moe")
    esft.train_only(model, ExpertSelection(experts={0: (1,)}, non_expert_modules=True))
    adapter = esft.adapter_of(model)
    kept = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    trained(model)
    assert same(kept, dict(adapter.tensors)) and not same(
        kept, dict(esft.adapter_of(model).tensors)
    )


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_save_pretrained_writes_the_adapter_of_the_model_it_is_called_on(tmp_path, clone):
    model = stock("qwen3_moe")
    esft.train_only(model, ExpertSelection(experts={0: (1, 3)}))
    other = clone(model)
    trained(model)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for which, name in ((model, "folder"), (other, "other")):
        which.save_pretrained(tmp_path / name)
        assert same(
            dict(esft.load_adapter(tmp_path / name).tensors), dict(esft.adapter_of(which).tensors)
        )
    names = {"expert_cfg.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in (tmp_path / "folder").iterdir()} == names
    with pytest.raises((OSError, ValueError), match="config.json"):  # no folder of a whole model
        AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert not same(dict(esft.adapter_of(model).tensors), dict(esft.adapter_of(other).tensors))
    esft.load_trained(other, tmp_path / "folder")
    assert same(dict(esft.adapter_of(model).tensors), dict(esft.adapter_of(other).tensors))


@pytest.mark.parametrize("family, selection", FAMILIES.items(), ids=FAMILIES)
def test_load_state_dict_takes_the_adapter_s_names(tmp_path, family, selection):
    model = stock(family)
    other = stock(family)
    for each in (model, other):
        esft.train_only(each, selection)
    trained(model).save_pretrained(tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "model.safetensors")
    found = other.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and not any("trained_" in name for name in found.missing_keys)
    assert same(dict(esft.adapter_of(model).tensors), dict(esft.adapter_of(other).tensors))
    other.load_state_dict(model.state_dict())  # its own names, strictly
    esft.drop(other)
    fewer = replace(
        selection,
        experts={layer: ids[:1] + ((ids[0] + 1) % 8,) for layer, ids in selection.experts.items()},
    )
    esft.train_only(other, fewer)
    with pytest.raises(RuntimeError, match="the file must have the trained experts"):
        other.load_state_dict(state, strict=False)


def test_load_trained_wants_the_same_training(tmp_path):
    model = stock("qwen3_moe")
    esft.train_only(model, ExpertSelection(experts={0: (1, 3)}))
    esft.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="trains no experts separately"):
        esft.load_trained(stock("qwen3_moe"), tmp_path / "adapter")
    for ids, match in (
        ((1,), "has model.layers.0.mlp.experts.3"),
        ((1, 3, 4), "lacks model.layers.0.mlp.experts.4"),
    ):
        other = stock("qwen3_moe")
        esft.train_only(other, ExpertSelection(experts={0: ids}))
        before = weights(other)
        with pytest.raises(ValueError, match=match):
            esft.load_trained(other, tmp_path / "adapter")
        assert same(before, weights(other))
    narrow = stock("qwen3_moe", moe_intermediate_size=16)
    esft.train_only(narrow, ExpertSelection(experts={0: (1, 3)}))
    with pytest.raises(ValueError, match=r"has shape \[24, 32\], but the model's is \[16, 32\]"):
        trained_files.load_trained(narrow, tmp_path / "adapter")
    with pytest.raises(
        ValueError, match="for a base whose moe_intermediate_size is 24, but the model's is 16"
    ):
        esft.load_trained(narrow, tmp_path / "adapter")


@pytest.mark.parametrize(
    "scaled, match",
    [
        pytest.param("lm_head", None, id="one matrix"),
        pytest.param("", "other weights", id="all"),
        pytest.param("mlp.experts.", "other experts: 100%", id="experts alone"),
    ],
)
def test_load_trained_wants_the_same_base(tmp_path, scaled, match):
    selection = ExpertSelection(experts={0: (1, 0)})
    first = stock("qwen3_moe")
    other = stock("qwen3_moe")
    esft.train_only(first, selection)
    esft.save_adapter(first, tmp_path / "adapter")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.mul_(1.1 if scaled in name else 1)
    esft.train_only(other, selection)
    before = weights(other)
    if match is None:
        esft.load_trained(other, tmp_path / "adapter")
        return
    with pytest.raises(ValueError, match=match):
        esft.load_trained(other, tmp_path / "adapter")
    assert same(before, weights(other))


def test_what_trains_beside_the_experts_is_cast_too_and_is_what_it_was_in_the_end(tmp_path):
    model = stock("deepseek_v2").to(torch.bfloat16)
    before = weights(model)
    selection = replace(SELECTION, shared_experts=True, non_expert_modules=True)
    esft.train_only(model, selection, dtype=torch.float32)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with pytest.raises(
        ValueError, match="bf16 is False, but the trained parameters have another dtype"
    ):
        trainer_of(MoETrainer, tmp_path / "run", model=model)
    # steps that bfloat16 would round away
    settings = {
        "max_steps": 2,
        "bf16": True,
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
        "save_strategy": "no",
    }
    trainer_of(MoETrainer, tmp_path / "run", model=model, **settings).train()
    adapter = esft.adapter_of(model)
    assert {tensor.dtype for tensor in adapter.tensors.values()} == {torch.float32}
    norm = adapter.tensors["model.norm.weight"]
    assert not torch.equal(norm, before["model.norm.weight"].float())
    assert torch.equal(norm.bfloat16(), before["model.norm.weight"])
    esft.drop(model)
    assert {name: tensor.dtype for name, tensor in weights(model).items()} == {
        n: t.dtype for n, t in before.items()
    }
    logits(model)  # without autocast
    esft.apply(model, adapter)


def test_peft_and_esft_do_not_undo_each_other(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    model = stock("qwen3_moe")
    esft.train_only(model, ExpertSelection(experts={0: (1,)}))
    frozen = get_peft_model(model, lora)
    for call in (
        lambda: esft.save_adapter(frozen, tmp_path / "adapter"),
        lambda: trainer_of(MoETrainer, tmp_path / "run", model=frozen),
    ):
        with pytest.raises(ValueError, match="trained_.* was selected for training but is frozen"):
            call()
    adapted = get_peft_model(stock("qwen3_moe"), lora)
    with pytest.raises(
        ValueError, match="non_expert_modules is True, but the model has the PEFT adapter .*lora_A"
    ):
        esft.train_only(adapted, ExpertSelection(experts={0: (1,)}, non_expert_modules=True))
    esft.train_only(adapted, ExpertSelection(experts={0: (1,)}))
    esft.save_adapter(adapted, tmp_path / "adapter")
    assert len(esft.load_adapter(tmp_path / "adapter").tensors) == 3


@pytest.fixture
def wrapped(tmp_path):
    """A model in DDP, in a run of one process."""
    torch.distributed.init_process_group(
        "gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield torch.nn.parallel.DistributedDataParallel(stock("qwen3_moe"))
    torch.distributed.destroy_process_group()


def test_a_wrapped_model_is_named_or_unwrapped(wrapped):
    with pytest.raises(
        ValueError, match="The parameters of DistributedDataParallel are held by an engine"
    ):
        esft.train_only(wrapped, ExpertSelection(experts={0: (1,)}))
    adapter = random_adapter(stock("qwen3_moe"))
    before = weights(wrapped.module)
    esft.apply(wrapped, adapter)
    assert not same(before, weights(wrapped.module))
    esft.remove(wrapped)
    assert same(before, weights(wrapped.module))


@pytest.mark.parametrize(
    "change, match",
    [
        pytest.param(
            lambda m: ExpertSelection(experts={5: (1,)}),
            r"selection has experts \[1\] of layer 5",
            id="layer",
        ),
        pytest.param(
            lambda m: ExpertSelection(experts={0: (8,)}),
            r"experts \[8\] of layer 0, .* to 7",
            id="expert",
        ),
        pytest.param(
            lambda m: ExpertSelection(experts={0: ()}), "The selection is empty", id="nothing"
        ),
        pytest.param(
            lambda m: (
                esft.train_only(m, ExpertSelection(experts={0: (2,)}))
                and ExpertSelection(experts={0: (1,)})
            ),
            "The model trains experts. Call esft.fold or esft.drop",
            id="twice",
        ),
    ],
)
def test_what_cannot_train_is_refused(change, match):
    model = stock("qwen3_moe")
    selection = change(model)
    before = weights(model)
    required = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=match):
        esft.train_only(model, selection)
    assert same(before, weights(model)) and required == [
        p.requires_grad for p in model.parameters()
    ]


ROWS = {"input_ids": [[3 + (5 * i + j) % 50 for j in range(8)] for i in range(12)]}
ROWS["labels"] = ROWS["input_ids"]


def trainer_of(kind, folder, selection=SELECTION, family="deepseek_v2", model=None, **settings):
    """A trainer over `model`, or over one that trains `selection`; None for a model that trains
    all.
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
    }
    common |= {
        "weight_decay": 0.1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
    }
    rows = datasets.Dataset.from_dict(ROWS).with_format("torch")
    return kind(
        model,
        TrainingArguments(str(folder), **common | settings),
        train_dataset=rows,
        eval_dataset=rows,
    )


def learned(trainer) -> dict[str, torch.Tensor]:
    return dict(esft.adapter_of(trainer.model).tensors)


@pytest.mark.parametrize("others", [False, True], ids=["experts", "everything else too"])
@pytest.mark.parametrize("kind", [MoETrainer, Trainer])
def test_checkpoints_are_small_and_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, others):
    selection = replace(SELECTION, shared_experts=others, non_expert_modules=others)
    whole = trainer_of(kind, tmp_path / "run", selection)
    whole.train()
    want = learned(whole)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    half = esft.load_adapter(checkpoint)
    assert half.tensors.keys() == want.keys() and not same(dict(half.tensors), want)
    sizes = {
        name: (checkpoint / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")
    }
    assert (
        sizes["model.safetensors"] < half.nbytes + 20_000
        and sizes["optimizer.pt"] < 2 * half.nbytes + 40_000
    )
    resumed = trainer_of(kind, tmp_path / "run", selection)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(learned(resumed), want)
    resumed.save_model(str(tmp_path / "last"))
    assert same(dict(esft.load_adapter(tmp_path / "last").tensors), want)
    esft.apply(stock("deepseek_v2"), tmp_path / "last")


@pytest.mark.parametrize("shards", ["one", "several", "bin"])
def test_an_adapter_never_replaces_a_whole_model(tmp_path, shards):
    base = tmp_path / "base"
    model = stock("qwen3_moe")
    model.save_pretrained(base, max_shard_size="20KB" if shards == "several" else "5GB")
    if shards == "bin":
        (base / "model.safetensors").rename(base / "pytorch_model.bin")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    assert len(before) > 4 or shards != "several"
    esft.train_only(model, ExpertSelection(experts={0: (1,)}))
    adapter = esft.adapter_of(model)
    trainer = trainer_of(MoETrainer, tmp_path / "run", model=model)
    plain = trainer_of(Trainer, base, model=model)
    for call in (
        lambda: trainer_of(MoETrainer, base, model=model),
        lambda: trainer.save_model(str(base)),
        lambda: plain.save_model(),
        lambda: model.save_pretrained(base),
        lambda: esft.save_adapter(model, base, overwrite=True),
        lambda: adapter.save(base, overwrite=True),
    ):
        with pytest.raises(ValueError, match="base holds a whole model .*Choose another folder"):
            call()
        assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    # an adapter's own folder may be written again, with its base's config too, as hub folders have
    # it
    trainer.save_model()
    model.config.save_pretrained(tmp_path / "run")
    trainer.save_model()
    assert same(dict(esft.load_adapter(tmp_path / "run").tensors), learned(trainer))


def test_a_split_model_s_adapter_is_gathered_and_written_once(tmp_path, monkeypatch):
    trainer = trainer_of(MoETrainer, tmp_path)
    written = []
    write = trained_files.write_files
    monkeypatch.setattr(
        trained_files, "write_files", lambda *args: written.append(args) or write(*args)
    )
    # as under FSDP with FULL_STATE_DICT; Trainer would then gather all of the model
    trainer.is_fsdp_enabled = True
    monkeypatch.setattr(
        trainer.accelerator, "get_state_dict", lambda *_: pytest.fail("gathers the whole model")
    )
    trainer.save_model(str(tmp_path / "last"))
    assert len(written) == 1 and same(
        dict(esft.load_adapter(tmp_path / "last").tensors), learned(trainer)
    )
    assert trained_files.gathered(trainer.model, keep=False) == {}


@pytest.mark.parametrize(
    "first, then, match",
    [
        pytest.param(
            SELECTION,
            None,
            "of a model that trains experts separately.*this model trains all",
            id="not made ready",
        ),
        pytest.param(
            None,
            SELECTION,
            "of a model that trains all.*this model trains experts separately",
            id="of a whole model",
        ),
        pytest.param(
            SELECTION,
            replace(SELECTION, experts={1: (7,)}),
            "has model.layers.1",
            id="other experts",
        ),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, first, then, match):
    trainer_of(MoETrainer, tmp_path, first, max_steps=1, save_steps=1).train()
    with pytest.raises(ValueError, match=match):
        trainer_of(MoETrainer, tmp_path, then).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
