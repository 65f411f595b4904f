"""Partly trained experts: unsupported models and selections are refused, and the model is left
unchanged.
"""

import copy
import functools
import pickle

import pytest
import torch
from transformers import Trainer, TrainingArguments

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.training.trainable import drop_rows, fold_rows, train_rows
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods.esft.freezing import freeze_for_esft
from tests.hf import tiny
from tests.hf.training.trainables import batch, model_of
from tests.support.trained_rows import gathered_rows, trained_rows

BAD = [
    pytest.param(
        {1: [0, 8]},
        {},
        r"layer 1 must be .* from 0 to 7.* \[0, 8\]",
        id="too high",
    ),
    pytest.param(
        {1: [2]},
        {"dtype": torch.int8},
        "dtype must be .* torch.int8",
        id="integers",
    ),
]


@pytest.mark.parametrize("call", [train_rows, freeze_for_esft])
@pytest.mark.parametrize(("experts", "options", "says"), BAD)
def test_refuses(experts, options, says, call):
    model = model_of("deepseek_v2")
    check_untouched(
        model,
        functools.partial(call, model, experts, **options),
        says,
    )


def check_untouched(model, change, says: str) -> None:
    before = state_of(model)
    with pytest.raises(ValueError, match=says):
        change()
    assert state_of(model) == before


def state_of(model) -> list:
    """Everything that a call could leave in a model, except the values of its weights."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    hooks = ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return [
        [(name, id(tensor), tensor.requires_grad) for name, tensor in tensors],
        [
            (*module.__dict__, *(len(getattr(module, hook)) for hook in hooks))
            for module in model.modules()
        ],
        model.config._experts_implementation if hasattr(model, "config") else None,
    ]


def test_refuses_models_that_it_cannot_change():
    model = model_of("ours")
    says = r"experts of layer 0 must be routed ones, but are \[0, 1\], and 0 is the"
    check_untouched(
        model,
        functools.partial(freeze_for_esft, model, {0: [0, 1]}),
        says,
    )
    for undo in (fold_rows, drop_rows):
        says = "has no separately trained experts"
        check_untouched(model, functools.partial(undo, model), says)
    dense = tiny.dense()
    train = functools.partial(train_rows, dense, {0: [0]})
    check_untouched(dense, train, "has no MoE layers with a router")
    model = model_of("qwen2_moe")
    experts = experts_module(model, numbered_layers(model)[0])
    down = experts.down_proj
    experts.down_proj = torch.nn.Parameter(
        down.detach().to(torch.int8),
        requires_grad=False,
    )
    train = functools.partial(train_rows, model, {0: [1]})
    check_untouched(
        model,
        train,
        r"experts.down_proj must be .*but is torch.int8 \(Parameter\)",
    )
    experts.down_proj = down
    train()
    for again in (train_rows, freeze_for_esft):
        with pytest.raises(
            ValueError,
            match=r"Call fold_rows\(model\) or drop_rows",
        ):
            again(model, {1: [1]})


@pytest.mark.parametrize("undo", [fold_rows, drop_rows])
def test_no_checkpoint_that_reads_as_the_base(undo, tmp_path):
    model = model_of("qwen2_moe")
    ids = batch("qwen2_moe")
    freeze_for_esft(model, {0: [1]})
    with torch.no_grad():
        trained_rows(model)[0].stacks["down_proj"].mul_(2)
    for part in (model, model.model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(
            ValueError, match="are stored separately .* would be saved untrained. Call fold_rows"
        ):
            part.save_pretrained(tmp_path / "checkpoint")

    assert not list(tmp_path.iterdir())
    undo(model)
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = type(model).from_pretrained(
        tmp_path / "checkpoint",
        experts_implementation="eager",
    )
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_a_trainer_says_so_before_the_first_step(tmp_path):
    ids = batch("qwen2_moe")[0]

    def train(save: str, kind=MoETrainer) -> None:
        args = TrainingArguments(
            str(tmp_path),
            max_steps=1,
            save_strategy=save,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        kind(
            model,
            args,
            train_dataset=[{"input_ids": ids, "labels": ids}] * 8,
        ).train()

    model = model_of("qwen2_moe")
    freeze_for_esft(model, {0: range(model.config.num_experts)})
    before = gathered_rows(model)[0].stacks["down_proj"]
    says = "'steps', but a checkpoint cannot hold Qwen2MoeForCausalLM with experts that"
    with pytest.raises(ValueError, match=says):
        train("steps")

    assert torch.equal(before, gathered_rows(model)[0].stacks["down_proj"])
    with pytest.raises(
        ValueError,
        match="Some experts of Qwen2MoeForCausalLM are stored sep",
    ):
        train("steps", kind=Trainer)  # Trainer calls it at the first checkpoint
    assert not (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    train("no")
    assert not torch.equal(
        before,
        gathered_rows(model)[0].stacks["down_proj"],
    )
    fold_rows(model)
    train("steps")
    assert (tmp_path / "checkpoint-1" / "config.json").is_file()
