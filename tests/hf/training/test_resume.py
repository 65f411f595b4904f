"""Stock MoE models resume from checkpoints with a matrix per expert, bit by bit as if they had
never stopped.
"""

import functools
import json
from pathlib import Path

import datasets
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import moe_runtime
from moe_runtime.hf import MoESFTTrainer, MoETrainer, train_command
from tests.hf import stock, tiny
from tests.hf.dropin.test_layers import TOKENIZER
from tests.support import dist_resume as worker
from tests.support.dist_launch import Launches

FAMILIES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
TRAINERS = {"ours": MoETrainer, "stock": Trainer, "our-sft": MoESFTTrainer, "trl": SFTTrainer}
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
    """Ends a training after a step, as an interruption does."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == STOP


def write_base(family: str, folder: Path) -> Path:
    """Save a tiny random model of a family with its tokenizer."""
    config = stock.config_of(family)
    config.vocab_size = len(TOKENIZER)
    for name in {"intermediate_size", "moe_intermediate_size"} & vars(config).keys():
        setattr(config, name, 24)  # grouped_mm needs multiples of 16 bytes
    torch.manual_seed(0)
    stock.model_class(family)(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a family's model."""
    return functools.cache(lambda family: write_base(family, tmp_path_factory.mktemp(family)))


def load(folder: Path, implementation: str | None = "moe_runtime", lora: bool = False):
    moe_runtime.register()
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)) if lora else model


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
    sft = {"bf16": False, "gradient_checkpointing": False} if "sft" in kind or kind == "trl" else {}
    args = (SFTConfig if sft else TrainingArguments)(str(folder), **values, **sft)
    parts = {
        "train_dataset": ROWS,
        "eval_dataset": ROWS,
        "processing_class": TOKENIZER,
        "callbacks": list(callbacks),
    }
    return TRAINERS[kind](model, args, **parts)


def logged(trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_weights(model, want: dict[str, torch.Tensor]) -> None:
    tiny.assert_equal(want, model.state_dict())


@pytest.mark.parametrize(
    "kind, family, settings",
    [
        *(pytest.param("ours", family, {}, id=f"ours-{family}") for family in FAMILIES),
        *(pytest.param(kind, "olmoe", {}, id=f"{kind}-olmoe") for kind in list(TRAINERS)[1:]),
        pytest.param(
            "ours", "qwen3_moe", {"implementation": "grouped_mm"}, id="ours-with-stock-experts"
        ),
        pytest.param("ours", "qwen3_moe", {"lora": True}, id="ours-lora"),
        pytest.param("trl", "qwen3_moe", {"lora": True}, id="trl-lora"),
        *(
            pytest.param(kind, family, {}, id=f"{kind}-{family}", marks=pytest.mark.slow)
            for kind in list(TRAINERS)[1:]
            for family in FAMILIES[1:]
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(kind, family, settings, base, tmp_path):
    folder = base(family)
    torch.manual_seed(0)
    start = tiny.state(load(folder, **settings))

    def run(out: str, callbacks=(), resume=None):
        torch.manual_seed(0)
        trainer = trainer_of(kind, load(folder, **settings), tmp_path / out, callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    run("run", [Stop()])
    resumed = run("run", resume=str(tmp_path / "run" / f"checkpoint-{STOP}"))
    assert logged(resumed) == logged(whole)
    assert len(logged(whole)) == STEPS
    want = whole.model.state_dict()
    assert_same_weights(resumed.model, want)
    trained = "lora" if settings.get("lora") else "experts"
    assert any(
        trained in name and not torch.equal(tensor, start[name]) for name, tensor in want.items()
    )


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("max_shard_size", ["50GB", "20KB"], ids=["one-file", "sharded"])
def test_the_best_checkpoint_is_loaded(kind, max_shard_size, base, tmp_path, monkeypatch, caplog):
    """Also of several files, none of which has a whole stack: the loss grows, so the first
    checkpoint is the best.
    """
    model = load(base("mixtral"))
    monkeypatch.setattr(
        model,
        "save_pretrained",
        functools.partial(model.save_pretrained, max_shard_size=max_shard_size),
    )
    settings = {
        "eval_strategy": "steps",
        "eval_steps": STOP,
        "load_best_model_at_end": True,
        "learning_rate": 1.0,
    }
    trainer = trainer_of(
        kind,
        model,
        tmp_path,
        **settings,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    trainer.train()
    best = tmp_path / f"checkpoint-{STOP}"
    assert logged(trainer, "eval_loss")[0] < logged(trainer, "eval_loss")[1]
    assert trainer.state.best_model_checkpoint == str(best)
    assert (best / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    assert_same_weights(model, load(best).state_dict())
    assert kind == "stock" or "keys in the checkpoint" not in caplog.text


@pytest.mark.parametrize("family", ["olmoe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_command_resumes(family, base, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"{i} and {i} make {2 * i}"}) + "\n" for i in range(2 * STEPS))
    )
    argv = [
        "--model",
        str(base(family)),
        "--data",
        str(data),
        "--save_steps",
        str(STOP),
        "--report_to",
        "none",
    ]
    argv += [
        "--learning_rate",
        "1e-2",
        "--per_device_train_batch_size",
        "2",
        "--lr_scheduler_type",
        "constant",
    ]
    argv += ["--dtype", "float32"]
    train_command([*argv, "--output_dir", str(tmp_path / "whole"), "--max_steps", str(STEPS)])
    train_command([*argv, "--output_dir", str(tmp_path / "run"), "--max_steps", str(STOP)])
    train_command(
        [*argv, "--output_dir", str(tmp_path / "run"), "--max_steps", str(STEPS), "--resume"]
    )
    assert_same_weights(load(tmp_path / "run"), load(tmp_path / "whole").state_dict())


@pytest.mark.parametrize(
    "kind, names, says",
    [
        pytest.param(
            "ours",
            ".mlp.experts.",
            "no weights for model.layers.0.mlp.experts.gate_up_proj, which would stay",
            id="no-experts",
        ),
        *(
            pytest.param(
                kind,
                "layers.1.mlp.experts.7.up_proj",
                "Only 15 of the tensors of model.layers.1.mlp.experts.gate_up_proj were",
                id=f"no-matrix-{kind}",
            )
            for kind in ("ours", "stock", "trl")
        ),
    ],
)
def test_a_checkpoint_without_experts_is_refused(kind, names, says, base, tmp_path):
    folder = base("olmoe")
    trainer_of(kind, load(folder), tmp_path, [Stop()]).train()
    weights = tmp_path / f"checkpoint-{STOP}" / "model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(weights).items() if names not in name}, weights
    )
    with pytest.raises(ValueError, match=says):
        trainer_of(kind, load(folder), tmp_path).train(resume_from_checkpoint=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes found, by scenario."""
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
