"""The UltraFuser model: its loss is the paper's formula, its two stages train the right parameters,
and Trainer resumes it.
"""

import copy
import re
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, default_collate
from transformers import Trainer, TrainingArguments

from moe_runtime.methods.ultrafuser import heads as ultrafuser_heads
from moe_runtime.methods.ultrafuser.folders import load, save
from moe_runtime.methods.ultrafuser.model import UltraFuser
from tests.methods.ultrafuser import fusers
from tests.support.checkpoints import assert_equal


@pytest.fixture(scope="module")
def fused():
    return fusers.fuser()


def assert_loss(fused, inputs, bound: float = 1e-4) -> None:
    expected = fusers.naive_loss(fused, inputs)
    torch.testing.assert_close(
        fused(**inputs).loss,
        expected,
        rtol=bound,
        atol=bound,
    )


def assert_is_naive(out, fused, inputs, reduction: str = "mean") -> tuple:
    """Compare loss and logits with the formula's; return its loss and gate weights."""
    loss = fusers.naive_loss(fused, inputs, reduction)
    logits, weight = fusers.naive(fused, inputs)
    torch.testing.assert_close(out.loss, loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-4)
    return loss, weight


@pytest.mark.parametrize("reduction", ["mean", "sum", "sample", "none"])
def test_loss_is_the_formula(fused, reduction):
    inputs = fusers.batch()
    out = fused(**inputs, reduction=reduction, want_logits=True)
    _, weight = assert_is_naive(out, fused, inputs, reduction)
    torch.testing.assert_close(
        out.gate_weight,
        weight,
        rtol=1e-4,
        atol=1e-5,
    )
    assert not out.gate_weight.requires_grad
    assert out.logits.shape[-1] == fusers.VOCAB
    # an inactive gate would hide swapped specialists
    assert (weight.amax(-1) - weight.amin(-1)).mean() > 0.1


def test_gradients_are_the_formula_s():
    fused = fusers.fuser().train_all()
    inputs = fusers.batch()
    parameters = list(fused.parameters())
    ours = torch.autograd.grad(
        fused(**inputs).loss,
        parameters,
    )
    theirs = torch.autograd.grad(
        fusers.naive_loss(fused, inputs),
        parameters,
    )
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=1e-3,
        atol=1e-6,
    )


def test_prompts_padded_on_the_right_are_the_same(fused):
    inputs = fusers.batch()
    turned = copy.deepcopy(inputs)
    for ids, mask in zip(
        turned["prompt_ids"],
        turned["prompt_mask"],
        strict=True,
    ):
        for row in range(len(ids)):
            padding = int((mask[row] == 0).sum())
            ids[row] = ids[row].roll(-padding)
            mask[row] = mask[row].roll(-padding)
    assert not torch.equal(
        turned["prompt_mask"][0],
        inputs["prompt_mask"][0],
    )
    assert torch.equal(
        fused(**turned).loss,
        fused(**inputs).loss,
    )


def test_padding_of_answers_does_not_count(fused):
    inputs = fusers.batch()
    expected = fused(**inputs).loss
    inputs["response_ids"][inputs["labels"] == -100] += 1
    torch.testing.assert_close(
        fused(**inputs).loss,
        expected,
    )


def test_loss_over_the_tokens_of_a_step(fused):
    inputs = fusers.batch()
    expected = fused(**inputs, reduction="sum").loss / 40
    for count in (40, torch.tensor(40)):
        torch.testing.assert_close(
            fused(**inputs, num_items_in_batch=count).loss,
            expected,
        )


CASES = [  # families, changes of the first and of the second, whether the loss is a fused one
    pytest.param(
        ("granite", "cohere"),
        ({"logits_scaling": 3.0}, {"logit_scale": 0.3}),
        True,
        id="different scales",
    ),
    pytest.param(
        ("gemma2", "llama"), ({"final_logit_softcapping": 5.0}, {}), False, id="a soft cap"
    ),
    pytest.param(
        ("phi", "llama"),
        ({}, {}),
        False,
        id="a bias",
    ),
    pytest.param(("gpt_neox", "gpt2"), ({}, {}), True, id="other names"),
]


@pytest.mark.parametrize("kinds, changes, is_fused", CASES)
def test_families_with_other_heads(kinds, changes, is_fused, monkeypatch):
    models = []
    for s in range(2):
        model = fusers.specialist(
            s,
            kinds[s],
            **changes[s],
        )
        bias = getattr(model.get_output_embeddings(), "bias", None)
        if bias is not None:  # zero biases would not be missed
            nn.init.normal_(bias)
        models.append(model)
    fused = fusers.fuser(models).train_all()
    fuser_loss = mock.Mock(wraps=ultrafuser_heads.fuser_loss)
    chunked_loss = mock.Mock(wraps=ultrafuser_heads.chunked_loss)
    monkeypatch.setattr(ultrafuser_heads, "fuser_loss", fuser_loss)
    monkeypatch.setattr(ultrafuser_heads, "chunked_loss", chunked_loss)
    inputs = fusers.batch(2)
    out = fused(**inputs, want_logits=True)
    assert fuser_loss.call_count == is_fused
    assert chunked_loss.call_count == (not is_fused)
    if not is_fused:
        with pytest.raises(ValueError, match="backend must be None, but got 'torch': a head has"):
            fused(**inputs, backend="torch")
    # transformers' own forward, including the head
    loss, _ = assert_is_naive(out, fused, inputs)
    parameters = list(fused.parameters())
    ours = torch.autograd.grad(
        out.loss,
        parameters,
        materialize_grads=True,
        allow_unused=True,
    )
    theirs = torch.autograd.grad(
        loss,
        parameters,
        materialize_grads=True,
        allow_unused=True,
    )
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=2e-3,
        atol=1e-5,
    )


def test_making_a_fuser_leaves_every_mode():
    models = [fusers.specialist(s).train() for s in range(2)]
    models[1].model.layers[0].eval()
    before = [module.training for model in models for module in model.modules()]
    UltraFuser(models)
    assert [module.training for model in models for module in model.modules()] == before


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_several_hidden_sizes_want_the_joint_gate(kind):
    models = [fusers.specialist(0), fusers.specialist(1, hidden_size=48, num_attention_heads=4)]
    with pytest.raises(ValueError, match=r"must be the same .* but got \(32, 48\)"):
        UltraFuser(models)
    assert_loss(
        fusers.fuser(models, gate=kind, joint=True),
        fusers.batch(2),
    )


def test_stage_one_trains_the_gate_alone():
    fused = fusers.fuser([fusers.specialist(s, attention_dropout=0.5) for s in range(2)]).train()
    fused.freeze_specialists()
    assert fused.gate.training
    fused.train()  # as Trainer does at every step
    before = copy.deepcopy(fused.state_dict())
    head = mock.Mock()
    modes = set()
    for model in fused.specialists:
        assert not model.training
        model.model.register_forward_hook(lambda *_: modes.add(torch.is_grad_enabled()))
        model.lm_head.register_forward_hook(head)
    optimizer = torch.optim.AdamW(
        fused.parameters(),
        lr=0.1,
        weight_decay=0.1,
    )
    inputs = fusers.batch(2)
    losses = []
    for _ in range(2):
        loss = fused(**inputs).loss
        assert torch.equal(
            loss,
            fused(**inputs).loss,
        )  # no dropout
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert modes == {False}
    head.assert_not_called()
    assert losses[1] < losses[0]
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, before[name]) == (not name.startswith("gate.")), name
    fused.train_all()
    for parameter in fused.parameters():
        assert parameter.requires_grad
    for model in fused.specialists:
        assert model.training


def test_gradient_checkpointing_and_autocast():
    fused = fusers.fuser().train_all().train()
    inputs = fusers.batch()
    plain = torch.autograd.grad(
        fused(**inputs).loss,
        list(fused.parameters()),
    )
    if hasattr(fused, "activation_checkpointing_enable"):
        fused.activation_checkpointing_enable({"use_reentrant": False})
    else:
        fused.gradient_checkpointing_enable({"use_reentrant": False})
    for model in fused.specialists:
        assert model.model.gradient_checkpointing
    again = torch.autograd.grad(
        fused(**inputs).loss,
        list(fused.parameters()),
    )
    torch.testing.assert_close(again, plain)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused(**inputs)
    assert out.loss.dtype == torch.float32
    assert out.gate_weight.dtype == torch.float32
    torch.testing.assert_close(
        out.loss,
        fused(**inputs).loss,
        rtol=0.1,
        atol=0.1,
    )


def test_mixed_dtypes():
    models = [fusers.specialist(0).to(torch.bfloat16), fusers.specialist(1)]
    fused = fusers.fuser(models).train_all()
    inputs = fusers.batch(2)
    assert_loss(fused, inputs, bound=2e-2)
    fused(**inputs).loss.backward()
    for parameter in fused.parameters():
        assert parameter.grad.dtype == parameter.dtype
    assert {p.dtype for p in fused.gate.parameters()} == {torch.float32}


def test_adapters_count_train_and_merge(tmp_path):
    config = LoraConfig(target_modules=["lm_head", "q_proj"], r=4, init_lora_weights=False)
    adapted = get_peft_model(fusers.specialist(0), config)
    fused = fusers.fuser([adapted.get_base_model(), fusers.specialist(1)])
    inputs = fusers.batch(2)
    assert_loss(fused, inputs)
    loss = fused(**inputs).loss
    loss.backward()
    trained = [name for name, p in fused.specialists[0].named_parameters() if p.grad is not None]
    assert len(trained) == 6
    for name in trained:
        assert "lora_" in name
    with pytest.raises(ValueError, match="Specialist 'specialist-0' has an adapter. Merge it"):
        save(fused, tmp_path / "fused", specialists="copy")
    adapted.merge_and_unload()
    torch.testing.assert_close(
        fused(**inputs).loss,
        loss,
        rtol=1e-4,
        atol=1e-5,
    )
    saved = load(save(fused, tmp_path / "fused", specialists="copy"))
    assert saved(**inputs).loss == fused(**inputs).loss


class Rows(Dataset):
    """Batches of one row, as a collator would build them."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = i % 3
        inputs = fusers.batch(2, rows=3)
        for name in ("prompt_ids", "prompt_mask"):
            inputs[name] = [tensor[row] for tensor in inputs[name]]
        for name in ("response_ids", "labels"):
            inputs[name] = inputs[name][row]
        return inputs


def train(model, folder, resume=None, **settings):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        remove_unused_columns=False,
        **settings,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(), data_collator=default_collate
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("stage", ["freeze_specialists", "train_all"])
def test_a_plain_trainer_saves_and_goes_on(tmp_path, stage):
    specialists = [fusers.specialist(s, tie_word_embeddings=s == 1) for s in range(2)]
    whole = fusers.fuser(specialists, loss_reduction="mean")
    getattr(whole, stage)()
    resumed = copy.deepcopy(whole)
    trainer = train(whole, tmp_path)
    assert trainer.evaluate(Rows())["eval_loss"] > 0
    checkpoint = tmp_path / "checkpoint-2"
    if stage == "train_all":
        expected = whole.state_dict().keys() - {"specialists.1.lm_head.weight"}
    else:
        expected = {f"gate.{name}" for name in whole.gate.state_dict()}
    assert load_file(checkpoint / "model.safetensors").keys() == expected
    # the other half's training resumes in the middle, and ends with the same weights
    train(
        resumed,
        tmp_path / "second",
        resume=str(checkpoint),
    )
    assert_equal(resumed.state_dict(), whole.state_dict())
    tied = resumed.specialists[1]
    assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)


def test_a_checkpoint_before_the_first_move_holds_what_trains(tmp_path):
    fused = fusers.fuser([fusers.specialist(s) for s in range(2)]).train_all()
    fused.specialists[1].requires_grad_(False)
    names = {name for name in fused.state_dict() if not name.startswith("specialists.1")}
    fused.save_pretrained(tmp_path / "first")
    assert load_file(tmp_path / "first" / "model.safetensors").keys() == names
    # after a backward pass the specialists may train again
    fused(**fusers.batch(2)).loss.backward()
    fused.freeze_specialists().save_pretrained(tmp_path / "frozen")
    assert load_file(tmp_path / "frozen" / "model.safetensors").keys() == names


def test_a_mean_over_samples_is_divided_by_trainer(tmp_path):
    models = [fusers.specialist(s) for s in range(2)]
    assert fusers.fuser(models).accepts_loss_kwargs
    rows = fusers.naive_loss(
        fusers.fuser(models),
        fusers.batch(2),
        "none",
    ).sum(1)
    fused = fusers.fuser(models, loss_reduction="sample")
    assert not fused.accepts_loss_kwargs
    trainer = train(fused.freeze_specialists(), tmp_path, logging_steps=1)
    assert rows.min() <= trainer.state.log_history[0]["loss"] <= rows.max()


def test_bad_inputs_are_named(fused):
    inputs = fusers.batch()
    ids = inputs["prompt_ids"]
    for change, words in (
        ({"prompt_ids": ids[:2]}, "but got [(3, 7), (3, 5)] and"),
        ({"prompt_mask": None}, " and []"),
        ({"response_ids": None}, "but got None"),
        ({"labels": inputs["labels"][:, :2]}, "(3, 6), in training, but got (3, 2)"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            fused(**inputs | change)
