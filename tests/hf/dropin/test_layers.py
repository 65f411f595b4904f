"""Stock MoE models on our experts in the stack that users have: checkpointing, compile, autocast,
Trainer, TRL, PEFT.
"""

import re

import datasets
import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import moe_runtime
from moe_runtime.hf.dropin import experts
from moe_runtime.hf.training.fit import pair_collator
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.hf.tiny import distance, upcycled
from tests.hf.training.test_trainer import COMMON as SETTINGS

datasets.disable_progress_bars()
TEXTS = [f"{i} and {j} make {i + j}" for i in range(6) for j in range(4)]
TOKENIZER = train_tokenizer(TEXTS, 280)
COMMON = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    # transposed, interleaved, biased, clamped
    "gpt_oss": {
        "num_local_experts": 4,
        "intermediate_size": 24,
        "layer_types": ["full_attention"] * 2,
    },
}
EVERY = pytest.mark.parametrize("kind", MODELS)
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def stock(kind: str = "qwen3_moe", implementation: str = "moe_runtime", **changes):
    """A tiny stock model whose parts all show in the loss."""
    moe_runtime.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON | MODELS[kind] | changes)
    model = AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else:
                (parameter.add_(torch.randn_like(parameter) / 8))
    return model


def ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(
        3, len(TOKENIZER), (rows, length), generator=torch.Generator().manual_seed(2)
    )


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(ids(), labels=ids(), **inputs).loss).backward()
    return tiny.gradients(model)


def assert_same(got: dict, want: dict, tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    tiny.assert_close(got, want, tolerance)


@pytest.fixture
def routed(monkeypatch):
    """The ids of every call of our experts function, recomputation's too."""
    seen = []
    run = experts.experts_forward

    def noting(self, hidden_states, top_k_index, top_k_weights):
        seen.append(top_k_index.clone())
        return run(self, hidden_states, top_k_index, top_k_weights)

    monkeypatch.setattr(experts, "experts_forward", noting)
    return seen


@EVERY
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(kind, reentrant, routed):
    want = gradients(stock(kind).train())
    routed.clear()
    model = stock(kind).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = gradients(model)
    tiny.assert_equal(got, want)
    assert got.keys() == want.keys()
    first = routed[:2]
    again = routed[2:]
    # each layer ran again, and took the same way; the last layer comes first
    assert len(again) == 2
    for a, b in zip(first, reversed(again)):
        assert torch.equal(a, b)


@pytest.mark.slow
@EVERY
def test_a_compiled_training_step(kind):
    torch._dynamo.reset()
    model = stock(kind)
    want = gradients(model)
    explained = torch._dynamo.explain(lambda x: model(x, labels=x, use_cache=False).loss)(ids())
    assert explained.graph_break_count == 0, explained.break_reasons
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    compiled(ids(), labels=ids(), use_cache=False).loss.backward()
    assert_same(tiny.gradients(model), want)


@pytest.mark.slow
def test_inductor_and_another_number_of_tokens():
    torch._dynamo.reset()
    model = stock("qwen3_moe", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True)
    for length in (12, 7, 9):
        x = ids(2, length)
        with torch.no_grad():
            assert (
                distance(
                    compiled(x, use_cache=False).logits,
                    model(x).logits,
                )
                < 1e-5
            )


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": text} for text in TEXTS])


def trained(trainer: str, model, folder, **settings):
    common = SETTINGS | {"per_device_train_batch_size": 4} | settings
    if trainer == "sft":
        sft = {
            "bf16": False,
            "gradient_checkpointing": False,
            "max_length": 64,
        }
        args = SFTConfig(str(folder), **common, **sft)
        loop = SFTTrainer(
            model,
            args,
            train_dataset=rows(),
            processing_class=TOKENIZER,
        )
    else:
        data = []
        for text in TEXTS:
            tokens = TOKENIZER(text)["input_ids"]
            data.append({"input_ids": tokens, "labels": tokens})
        loop = Trainer(
            model, TrainingArguments(str(folder), **common), pair_collator(TOKENIZER), data
        )
    loop.train()
    values = []
    for entry in loop.state.log_history:
        if "loss" in entry:
            values.append(entry["loss"])
    return values


@EVERY
@pytest.mark.parametrize("trainer", ["trainer", "sft"])
def test_trainers_come_to_eagers_losses_and_weights(trainer, kind, tmp_path):
    losses = []
    states = []
    for implementation in ("eager", "moe_runtime"):
        model = stock(kind, implementation)
        settings = {"gradient_accumulation_steps": 2}
        losses.append(
            trained(
                trainer,
                model,
                tmp_path / implementation,
                **settings,
            )
        )
        states.append(model.state_dict())
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert losses[0][2] < losses[0][0]
    for name, before in stock(kind).state_dict().items():
        moved = states[0][name] - before
        # Adam's first steps are signs: where a gradient is nothing but rounding, they differ
        assert moved.norm() > 0, name
        assert distance(states[1][name] - before, moved) < 2e-2, name


def adapted(kind: str, r: int, implementation: str = "moe_runtime"):
    """LoRA on attention and on the expert stacks, both factors random."""
    config = LoraConfig(
        r=r,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        target_parameters=STACKS,
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    return get_peft_model(stock(kind, implementation), config)


@EVERY
@pytest.mark.parametrize("r", [3, "E"], ids=["r-is-not-E", "r-is-E"])
def test_lora_on_the_stacks(kind, r, tmp_path):
    if r == "E":
        r = MODELS[kind].get("num_experts") or MODELS[kind]["num_local_experts"]
    model = adapted(kind, r)
    assert moe_runtime.patch(model) == 2
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    # q, v and both stacks, in both layers, two factors each
    assert len(trains) == 16
    assert sum("experts" in name for name in trains) == 8
    assert_same(gradients(model), gradients(adapted(kind, r, "eager")))
    before = tiny.weights(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-2,
        weight_decay=0.1,
    )
    for _ in range(2):
        gradients(model)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != (name in trains), name
    logits = model.eval()(ids()).logits.detach()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(stock(kind), tmp_path).eval()
    assert distance(loaded(ids()).logits, logits) < 1e-6
    assert distance(model.merge_and_unload()(ids()).logits, logits) < 1e-5


PROJECTIONS = {
    "qwen3_moe": ["gate_proj", "up_proj", "down_proj"],
    "mixtral": ["w1", "w2", "w3"],
}


@pytest.mark.skipif(
    Version(peft.__version__) < Version("0.21"),
    reason="older PEFT adapts no stack through target_modules",
)
@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize(
    "is_all_linear",
    [True, False],
    ids=["all-linear", "projections"],
)
def test_what_target_modules_mean_for_the_stacks(kind, is_all_linear):
    """As docs/drop-in.md says."""
    expected = {"mlp.experts"}
    names = PROJECTIONS[kind]
    if is_all_linear:
        names = "all-linear"
        expected |= {
            "mlp.gate",
            *(f"self_attn.{name}_proj" for name in "qkvo"),
        }
    config = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=names,
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    model = get_peft_model(stock(kind), config)
    assert moe_runtime.patch(model) == 2
    parts = set()
    for name, p in model.named_parameters():
        if p.requires_grad:
            parts.add(re.sub(r".*\.layers\.\d+\.(\w+\.\w+).*", r"\1", name))
    assert parts == expected
    torch.manual_seed(1)
    assert_same(
        gradients(model),
        gradients(get_peft_model(stock(kind, "eager"), config)),
    )
    with pytest.raises(ValueError, match="lora_dropout != 0"):
        get_peft_model(
            stock(kind),
            LoraConfig(r=2, target_modules=names, lora_dropout=0.1),
        )


def test_on_an_upcycled_model_all_linear_is_the_attention():
    model = get_peft_model(
        upcycled(),
        LoraConfig(r=2, target_modules="all-linear"),
    )
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert ".self_attn." in name


def test_generate_takes_any_number_of_tokens():
    model = stock().eval()
    eager = stock(implementation="eager").eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    for rows_, beams in ((1, 1), (3, 1), (2, 3)):
        prompts = ids(rows_, 5)
        want = eager.generate(prompts, num_beams=beams, **options)
        assert torch.equal(
            model.generate(prompts, num_beams=beams, **options),
            want,
        )
