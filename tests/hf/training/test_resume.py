"""Stock MoE models resume from checkpoints with one matrix per expert, bit-identical to an
uninterrupted run.
"""

import functools
from pathlib import Path

import datasets
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import moe_runtime
from moe_runtime.hf import MoESFTTrainer, MoETrainer
from tests.hf import stock, tiny
from tests.hf.dropin.test_layers import TOKENIZER
from tests.support import dist_resume as worker
from tests.support.dist_launch import Launches

FAMILIES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
TRAINERS = {
    "ours": MoETrainer,
    "stock": Trainer,
    "our-sft": MoESFTTrainer,
    "trl": SFTTrainer,
}
STEPS = 4
STOP = 2
IDS = torch.randint(
    3, len(TOKENIZER), (2 * STEPS, 12), generator=torch.Generator().manual_seed(0)
).tolist()
ROWS = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS})
LORA = {
    "r": 2,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


class Stop(TrainerCallback):
    """Stops training after a step, like an interruption."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == STOP


def write_base(family: str, folder: Path) -> Path:
    """Save a tiny random model of a family with its tokenizer."""
    config = stock.config_of(family)
    config.vocab_size = len(TOKENIZER)
    for name in {
        "intermediate_size",
        "moe_intermediate_size",
    } & vars(config).keys():
        setattr(config, name, 24)  # grouped_mm needs multiples of 16 bytes
    torch.manual_seed(0)
    stock.model_class(family)(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a family's model."""
    return functools.cache(
        lambda family: write_base(
            family,
            tmp_path_factory.mktemp(family),
        )
    )


def load(folder: Path, implementation: str | None = "moe_runtime", lora: bool = False):
    moe_runtime.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        experts_implementation=implementation,
    )
    return (
        peft.get_peft_model(
            model,
            peft.LoraConfig(**LORA),
        )
        if lora
        else model
    )


def trainer_of(kind: str, model, folder: Path, callbacks=(), **settings):
    values = {
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": STOP,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    } | settings
    if kind in ("our-sft", "trl"):
        args = SFTConfig(
            str(folder),
            **values,
            bf16=False,
            gradient_checkpointing=False,
        )
    else:
        args = TrainingArguments(str(folder), **values)
    return TRAINERS[kind](
        model,
        args,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        processing_class=TOKENIZER,
        callbacks=list(callbacks),
    )


def logged(trainer, name: str = "loss") -> list[float]:
    values = []
    for entry in trainer.state.log_history:
        if name in entry:
            values.append(entry[name])
    return values


RUNS = []
for kind in TRAINERS:
    for family in FAMILIES:
        marks = () if kind == "ours" or family == "olmoe" else pytest.mark.slow
        RUNS.append(pytest.param(kind, family, {}, id=f"{kind}-{family}", marks=marks))
RUNS += [
    pytest.param("ours", "qwen3_moe", {"implementation": "grouped_mm"}, id="stock-experts"),
    pytest.param("ours", "qwen3_moe", {"lora": True}, id="ours-lora"),
]


@pytest.mark.parametrize("kind, family, settings", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one(kind, family, settings, base, tmp_path):
    def made():
        torch.manual_seed(0)
        return load(base(family), **settings)

    def run(out: str, callbacks=(), resume=None):
        trainer = trainer_of(kind, made(), tmp_path / out, callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    start = tiny.state(made())
    whole = run("whole")
    run("run", [Stop()])
    resumed = run("run", resume=str(tmp_path / "run" / f"checkpoint-{STOP}"))

    assert logged(resumed) == logged(whole)
    assert len(logged(whole)) == STEPS
    expected = whole.model.state_dict()
    tiny.assert_equal(resumed.model.state_dict(), expected)
    trained = "lora" if settings.get("lora") else "experts"
    moved = []
    for name, tensor in expected.items():
        if not torch.equal(tensor, start[name]):
            moved.append(name)
    assert any(trained in name for name in moved)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_the_best_checkpoint_is_loaded(kind, base, tmp_path, monkeypatch, caplog):
    """No file holds a whole stack; the loss increases, so the first checkpoint is the best."""
    model = load(base("mixtral"))
    save = functools.partial(model.save_pretrained, max_shard_size="20KB")
    monkeypatch.setattr(model, "save_pretrained", save)
    trainer = trainer_of(
        kind,
        model,
        tmp_path,
        greater_is_better=False,
        eval_strategy="steps",
        eval_steps=STOP,
        learning_rate=1.0,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    best = tmp_path / f"checkpoint-{STOP}"
    first, second = logged(trainer, "eval_loss")[:2]

    assert first < second
    assert trainer.state.best_model_checkpoint == str(best)
    assert (best / "model.safetensors.index.json").exists()
    tiny.assert_equal(load(best).state_dict(), model.state_dict())
    assert kind == "stock" or "keys in the checkpoint" not in caplog.text


NO_MATRIX = "Only 15 of the tensors of model.layers.1.mlp.experts.gate_up_proj were"


@pytest.mark.parametrize(
    "kind, name, says",
    [
        ("ours", ".mlp.experts.", "no weights for model.layers.0.mlp.experts.gate_up_proj"),
        ("ours", "layers.1.mlp.experts.7.up_proj", NO_MATRIX),
        ("trl", "layers.1.mlp.experts.7.up_proj", NO_MATRIX),
    ],
)
def test_a_checkpoint_without_experts_is_refused(kind, name, says, base, tmp_path):
    folder = base("olmoe")
    trainer_of(kind, load(folder), tmp_path, [Stop()]).train()
    path = tmp_path / f"checkpoint-{STOP}" / "model.safetensors"
    tensors = {}
    for key, tensor in load_file(path).items():
        if name not in key:
            tensors[key] = tensor
    save_file(tensors, path)
    with pytest.raises(ValueError, match=says):
        trainer_of(kind, load(folder), tmp_path).train(resume_from_checkpoint=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of two processes, by scenario."""
    launches = Launches(worker.__file__, tmp_path_factory)
    return lambda: [torch.load(launches(2) / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine, case", [(engine, case) for engine, cases in worker.ENGINES.items() for case in cases]
)
def test_processes_resume(engine, case, ranks):
    for found in ranks():
        result = found[engine, case]
        assert result["losses"] == result["wanted_losses"]
        assert len(result["losses"]) == STEPS
        assert result["different"] == []
        assert result["moved"]
        assert result["is_distributed"] == (engine != "ddp")


@pytest.mark.slow
def test_sharded_experts_load_a_folder(ranks):
    assert [found["loaded"] for found in ranks()] == [[], []]
