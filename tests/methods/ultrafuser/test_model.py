"""UltraFuser the model: its loss is the paper's formula, its two stages train what they say, and
Trainer goes on with it.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from moe_runtime.methods.ultrafuser import heads as ultrafuser_heads
from moe_runtime.methods.ultrafuser.folders import load, restore, save
from moe_runtime.methods.ultrafuser.model import UltraFuser
from tests.hf import tiny
from tests.methods.ultrafuser import fusers


@pytest.fixture(scope="module")
def fused():
    return fusers.fuser()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("reduction", ["mean", "sum", "sample", "none"])
def test_loss_is_the_formula(fused, reduction):
    inputs = fusers.batch()
    out = fused(**inputs, reduction=reduction, want_logits=True)
    logits, weight = fusers.naive(fused, inputs)
    torch.testing.assert_close(
        out.loss, fusers.naive_loss(fused, inputs, reduction), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.gate_weight, weight, rtol=1e-4, atol=1e-5)
    assert not out.gate_weight.requires_grad and out.logits.shape[-1] == fusers.VOCAB
    # a gate that does nothing would hide a swap
    assert (weight.max(-1).values - weight.min(-1).values).mean() > 0.1


def test_gradients_are_the_formula_s():
    fused = fusers.fuser().train_all()
    inputs = fusers.batch()
    names = [name for name, _ in fused.named_parameters()]
    losses = fused(**inputs).loss, fusers.naive_loss(fused, inputs)
    ours, theirs = (torch.autograd.grad(loss, list(fused.parameters())) for loss in losses)
    for name, got, want in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_prompts_padded_on_the_right_are_the_same(fused):
    inputs = fusers.batch()
    turned = dict(inputs, prompt_ids=[], prompt_mask=[])
    for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True):
        shifts = (mask == 0).sum(1).tolist()
        turned["prompt_ids"].append(
            torch.stack([row.roll(-n) for row, n in zip(ids, shifts, strict=True)])
        )
        turned["prompt_mask"].append(
            torch.stack([row.roll(-n) for row, n in zip(mask, shifts, strict=True)])
        )
    assert not torch.equal(turned["prompt_mask"][0], inputs["prompt_mask"][0])
    assert torch.equal(fused(**turned).loss, fused(**inputs).loss)


def test_padding_of_answers_does_not_count(fused):
    inputs = fusers.batch()
    other = dict(
        inputs, response_ids=torch.where(inputs["labels"] == -100, 7, inputs["response_ids"])
    )
    assert not torch.equal(other["response_ids"], inputs["response_ids"])
    torch.testing.assert_close(fused(**other).loss, fused(**inputs).loss)


def test_loss_over_the_tokens_of_a_step(fused):
    inputs = fusers.batch()
    want = fused(**inputs, reduction="sum").loss / 40
    torch.testing.assert_close(fused(**inputs, num_items_in_batch=torch.tensor(40)).loss, want)
    torch.testing.assert_close(fused(**inputs, num_items_in_batch=40).loss, want)


CASES = {
    "a scale each": (
        ["granite", "cohere"],
        {"granite": {"logits_scaling": 3.0}, "cohere": {"logit_scale": 0.3}},
        True,
    ),
    "a soft cap": (["gemma2", "llama"], {"gemma2": {"final_logit_softcapping": 5.0}}, False),
    "a bias": (["phi", "llama"], {}, False),
    "other names": (["gpt_neox", "gpt2"], {}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_families_with_other_heads(case, monkeypatch):
    kinds, changes, is_fused = CASES[case]
    models = [fusers.specialist(s, kind, **changes.get(kind, {})) for s, kind in enumerate(kinds)]
    for model in models:  # a bias of zeros would not be missed
        bias = getattr(model.get_output_embeddings(), "bias", None)
        nn.init.normal_(bias) if bias is not None else None
    fused = fusers.fuser(models).train_all()
    taken = []
    for name in ("fuser_loss", "chunked_loss"):
        function = getattr(ultrafuser_heads, name)
        wrapped = lambda *a, f=function, n=name, **k: taken.append(n) or f(*a, **k)  # noqa: E731
        monkeypatch.setattr(ultrafuser_heads, name, wrapped)
    inputs = fusers.batch(2)
    out = fused(**inputs, want_logits=True)
    assert taken == ["fuser_loss" if is_fused else "chunked_loss"]
    if not is_fused:
        with pytest.raises(
            ValueError, match="backend must be None, but got 'torch': a head has a bias"
        ):
            fused(**inputs, backend="torch")
    # as transformers says them: its own forward, head and all
    want = fusers.naive_loss(fused, inputs)
    torch.testing.assert_close(out.loss, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.logits, fusers.naive(fused, inputs)[0], rtol=1e-4, atol=1e-4)
    parameters = [p for p in fused.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (out.loss, want)
    )
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-5)


def test_making_a_fuser_leaves_every_mode():
    models = [fusers.specialist(s).train() for s in range(2)]
    models[1].model.layers[0].eval()
    before = [module.training for model in models for module in model.modules()]
    UltraFuser(models)
    assert [module.training for model in models for module in model.modules()] == before


def test_what_transformers_asks_of_the_outer_model():
    models = [fusers.specialist(0), fusers.specialist(1, "gpt2")]
    models[0].generation_config.eos_token_id = [5, fusers.VOCAB + 3]
    models[1].generation_config.eos_token_id = 9
    fused = fusers.fuser(models)
    assert fused._no_split_modules == ["GPT2Block", "LlamaDecoderLayer"]
    assert fused.generation_config.eos_token_id == [5, 9]


def test_upcycled_models_are_specialists_too():
    models = [fusers.specialist(0), tiny.upcycled(changes={"vocab_size": fusers.VOCAB})]
    fused = fusers.fuser(models)
    inputs = fusers.batch(2)
    torch.testing.assert_close(
        fused(**inputs).loss, fusers.naive_loss(fused, inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_several_hidden_sizes_want_the_joint_gate(kind):
    models = [fusers.specialist(0), fusers.specialist(1, hidden_size=48, num_attention_heads=4)]
    with pytest.raises(
        ValueError, match=r"hidden_sizes must be the same for all specialists, but got \(32, 48\)"
    ):
        UltraFuser(models)
    fused = fusers.fuser(models, gate=kind, joint=True)
    inputs = fusers.batch(2)
    torch.testing.assert_close(
        fused(**inputs).loss, fusers.naive_loss(fused, inputs), rtol=1e-4, atol=1e-5
    )


def test_stage_one_trains_the_gate_alone():
    fused = fusers.fuser([fusers.specialist(s, attention_dropout=0.5) for s in range(2)]).train()
    assert all(model.training for model in fused.specialists)
    fused.freeze_specialists()
    assert fused.gate.training and not any(model.training for model in fused.specialists)
    fused.train()  # as Trainer does at every step
    before = weights_of(fused)
    heads = []
    modes = []
    for model in fused.specialists:
        model.model.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
        model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    optimizer = torch.optim.AdamW(fused.parameters(), lr=0.1, weight_decay=0.1)
    inputs = fusers.batch(2)
    losses = []
    for _ in range(2):
        loss = fused(**inputs).loss
        assert torch.equal(loss, fused(**inputs).loss)  # no dropout
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert not any(modes) and not heads and losses[1] < losses[0]
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, before[name]) == (not name.startswith("gate.")), name
    assert all(p.grad is None for p in fused.specialists.parameters())
    fused.train_all()
    assert all(p.requires_grad for p in fused.parameters()) and all(
        model.training for model in fused.specialists
    )


def test_gradient_checkpointing_and_autocast():
    fused = fusers.fuser().train_all().train()
    inputs = fusers.batch()
    plain = torch.autograd.grad(fused(**inputs).loss, list(fused.parameters()))
    enable = (
        getattr(fused, "activation_checkpointing_enable", None)
        or fused.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    assert all(model.model.gradient_checkpointing for model in fused.specialists)
    again = torch.autograd.grad(fused(**inputs).loss, list(fused.parameters()))
    for got, want in zip(again, plain, strict=True):
        torch.testing.assert_close(got, want)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused(**inputs)
    assert out.loss.dtype == out.gate_weight.dtype == torch.float32
    torch.testing.assert_close(out.loss, fused(**inputs).loss, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["one", "two"],
)
def test_narrow_and_mixed_dtypes(dtypes):
    models = [fusers.specialist(s).to(dtype) for s, dtype in enumerate(dtypes)]
    fused = fusers.fuser(models).train_all()
    inputs = fusers.batch(2)
    out = fused(**inputs)
    torch.testing.assert_close(out.loss, fusers.naive_loss(fused, inputs), rtol=2e-2, atol=2e-2)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in fused.parameters())
    assert {p.dtype for p in fused.gate.parameters()} == {torch.float32}


def test_adapters_count_train_and_merge(tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["lm_head", "q_proj"], r=4, init_lora_weights=False)
    adapted = get_peft_model(fusers.specialist(0), lora)
    fused = fusers.fuser([adapted.get_base_model(), fusers.specialist(1)])
    inputs = fusers.batch(2)
    loss = fused(**inputs).loss
    torch.testing.assert_close(loss, fusers.naive_loss(fused, inputs), rtol=1e-4, atol=1e-5)
    loss.backward()
    trained = [name for name, p in fused.specialists[0].named_parameters() if p.grad is not None]
    assert len(trained) == 6 and all("lora_" in name for name in trained)
    with pytest.raises(ValueError, match="Specialist 'specialist-0' has an adapter. Merge it"):
        save(fused, tmp_path / "fused", specialists="copy")
    adapted.merge_and_unload()
    torch.testing.assert_close(fused(**inputs).loss, loss, rtol=1e-4, atol=1e-5)
    assert (
        load(save(fused, tmp_path / "fused", specialists="copy"))(**inputs).loss
        == fused(**inputs).loss
    )


class Rows(Dataset):
    """Batches of one row, as a collator would make them."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        inputs = fusers.batch(2, rows=3)
        row = i % 3
        return {
            k: [t[row] for t in v] if isinstance(v, list) else v[row] for k, v in inputs.items()
        }


def collate(rows):
    out = {name: torch.stack([row[name] for row in rows]) for name in ("response_ids", "labels")}
    return out | {
        n: [torch.stack(parts) for parts in zip(*(r[n] for r in rows))]
        for n in ("prompt_ids", "prompt_mask")
    }


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
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), data_collator=collate)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("stage", [1, 2])
def test_a_plain_trainer_saves_and_goes_on(tmp_path, stage):
    base = fusers.fuser(
        [fusers.specialist(s, tie_word_embeddings=s == 1) for s in range(2)], loss_reduction="mean"
    )
    models = [copy.deepcopy(base) for _ in range(3)]
    for model in models:
        model.freeze_specialists() if stage == 1 else model.train_all()
    trainer = train(models[0], tmp_path)
    assert trainer.evaluate(Rows())["eval_loss"] > 0
    checkpoint = tmp_path / "checkpoint-2"
    held = set(load_file(checkpoint / "model.safetensors"))
    gate = {f"gate.{name}" for name in models[0].gate.state_dict()}
    tied = {"specialists.1.lm_head.weight"}
    assert held == (gate if stage == 1 else set(models[0].state_dict()) - tied)
    # the optimizer of the other half goes on from the middle, and ends where the first did
    train(models[1], tmp_path / "second", resume=checkpoint)
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    restore(models[2], tmp_path / "checkpoint-4")
    assert all(
        torch.equal(a, b)
        for a, b in zip(models[2].state_dict().values(), models[0].state_dict().values())
    )
    assert torch.equal(
        models[2].specialists[1].lm_head.weight, models[2].specialists[1].model.embed_tokens.weight
    )


def test_a_checkpoint_before_the_first_move_holds_what_trains(tmp_path):
    fused = fusers.fuser([fusers.specialist(s) for s in range(2)]).train_all()
    fused.specialists[1].requires_grad_(False)
    fused.save_pretrained(tmp_path / "first")
    gate = {f"gate.{name}" for name in fused.gate.state_dict()}
    own = {f"specialists.0.{name}" for name in fused.specialists[0].state_dict()}
    assert set(load_file(tmp_path / "first" / "model.safetensors")) == gate | own
    # one that was run for a gradient may move again
    fused(**fusers.batch(2)).loss.backward()
    fused.freeze_specialists().save_pretrained(tmp_path / "frozen")
    assert set(load_file(tmp_path / "frozen" / "model.safetensors")) == gate | own


def test_a_mean_over_samples_is_divided_by_trainer(tmp_path):
    fused = fusers.fuser([fusers.specialist(s) for s in range(2)], loss_reduction="sample")
    assert (
        not fused.accepts_loss_kwargs and fusers.fuser(list(fused.specialists)).accepts_loss_kwargs
    )
    trainer = train(fused.freeze_specialists(), tmp_path, logging_steps=1)
    first = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    rows = fusers.naive_loss(fusers.fuser(list(fused.specialists)), fusers.batch(2), "none").sum(1)
    assert rows.min() <= first <= rows.max()


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(
            lambda b: b.update(prompt_ids=b["prompt_ids"][:2]),
            "but got [(3, 7), (3, 5)] and",
            id="S",
        ),
        pytest.param(lambda b: b.update(prompt_mask=None), " and []", id="none"),
        pytest.param(
            lambda b: b["prompt_mask"][1][2].zero_(),
            "at least one token per prompt",
            id="empty prompt",
        ),
        pytest.param(
            lambda b: b["prompt_ids"].__setitem__(0, b["prompt_ids"][0][:, :3]),
            "but got [(3, 3), (3, 5), (3, 9)] and [(3, 7), ",
            id="mask",
        ),
        pytest.param(lambda b: b.update(response_ids=None), "but got None", id="no answer"),
        pytest.param(
            lambda b: b.update(labels=b["labels"][:, :2]),
            "(3, 6), in training, but got (3, 2)",
            id="labels",
        ),
        pytest.param(
            lambda b: b["labels"][0].fill_(fusers.VOCAB),
            f"but got {fusers.VOCAB}",
            id="a id of one alone",
        ),
        pytest.param(
            lambda b: [b[name][0].fill_(fusers.VOCAB) for name in ("response_ids", "labels")],
            f"one row per prompt, with ids from 0 to {fusers.VOCAB - 1}",
            id="an answer's id of one alone",
        ),
        pytest.param(
            lambda b: b["response_ids"][0].fill_(-100),
            "Expected response_ids [3, R]",
            id="no padding's id",
        ),
        pytest.param(
            lambda b: b["prompt_ids"][0][0].fill_(fusers.VOCAB),
            f"and ids below {fusers.VOCAB}, ",
            id="prompt's id",
        ),
    ],
)
def test_bad_inputs_are_named(fused, change, words):
    inputs = fusers.batch()
    change(inputs)
    with pytest.raises(ValueError) as error:
        fused(**inputs)
    assert words in str(error.value)
