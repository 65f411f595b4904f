"""hf/training/trainer.py and sft.py: transformers' Trainer and TRL's SFTTrainer on upcycled and
mergeable models.
"""

import contextlib
import csv
import json
import math
import re

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig

from moe_runtime.hf import MoESFTTrainer, MoETrainer, RouterStatsCallback, train_command
from moe_runtime.hf.models import swap
from moe_runtime.hf.models.modeling import moe_layers
from moe_runtime.hf.training import sft
from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io import console
from moe_runtime.io.files import read_json
from moe_runtime.io.rows import encode, read_rows, tokenize_pairs
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.support.dist_launch import forked

datasets.disable_progress_bars()
ROWS = [
    {"prompt": f"add {i} to {j}:\n", "completion": f"{i + j} is it" + "!" * i}
    for i in range(5)
    for j in range(2)
]
TOKENIZER = train_tokenizer(
    [row["prompt"] + row["completion"] for row in ROWS],
    280,
)
BALANCE = {"balance_loss": "switch", "balance_loss_coef": 0.1}
COMMON = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


SFT = {
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": 64,
} | COMMON


def upcycled(**settings):
    """A tiny upcycled Llama with the tokenizer's vocabulary, and a balance loss by default."""
    return tiny.upcycled(
        changes={"vocab_size": len(TOKENIZER)},
        **BALANCE | settings,
    )


def mergeable():
    model = upcycled()
    swap.moe_to_mergeable(model)
    return model


def rows(places=None):
    return datasets.Dataset.from_list([ROWS[i] for i in places] if places else ROWS)


def trainer_of(
    kind,
    model,
    folder,
    places=None,
    train=None,
    eval_set=None,
    callbacks=None,
    parts=None,
    **settings,
):
    """Return a MoETrainer ("trainer"), MoESFTTrainer ("sft") or transformers' own trainer
    ("plain").
    """
    train = train or rows(places)
    parts = {"callbacks": callbacks} | (parts or {})
    if kind == "sft":
        args = SFTConfig(str(folder), **SFT | settings)
        return MoESFTTrainer(
            model,
            args,
            train_dataset=train,
            eval_dataset=eval_set,
            processing_class=TOKENIZER,
            **parts,
        )
    train = tokenize_pairs(TOKENIZER, train, 64, row_ids=True)
    eval_set = eval_set and tokenize_pairs(TOKENIZER, eval_set, 64)
    cls = {"trainer": MoETrainer, "plain": Trainer}[kind]
    args = TrainingArguments(str(folder), **COMMON | settings)
    return cls(
        model,
        args,
        pair_collator(TOKENIZER),
        train,
        eval_set,
        TOKENIZER,
        **parts,
    )


def run(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


def logged(trainer, name="loss"):
    values = []
    for entry in trainer.state.log_history:
        if name in entry and "train_loss" not in entry:
            values.append(entry[name])
    return values


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step, as the optimizer sees them."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.__dict__.setdefault("grads", tiny.gradients(model))


def batch_of(*places):
    """Return examples as one batch, as the trainers build it."""
    return pair_collator(TOKENIZER)(list(tokenize_pairs(TOKENIZER, rows(places), 64)))


def use_pooled_loss(model, coef):
    model.config.router_aux_loss_coef = coef
    model.config.output_router_logits = True


def router_stats(folder) -> list[dict]:
    """Return the lines of a run's router_stats.csv."""
    with open(folder / "router_stats.csv", newline="") as file:
        return list(csv.DictReader(file))


KINDS = pytest.mark.parametrize("kind", ["trainer", "sft"])


@KINDS
@pytest.mark.parametrize(
    "settings, coef, counts_tokens",
    [
        pytest.param({}, 0.0, True, id="switch"),
        pytest.param({}, 0.0, False, id="mean-of-micro-batches"),
        pytest.param({}, 0.1, True, id="with-the-pooled-loss"),
    ],
)
def test_the_parts_of_the_loss_are_logged_apart(kind, settings, coef, counts_tokens, tmp_path):
    model = upcycled(**settings)
    model.accepts_loss_kwargs = counts_tokens
    if coef:
        use_pooled_loss(model, coef)
    steps = {
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "max_steps": 4,
        "per_device_eval_batch_size": 2,
    }
    model.config.use_cache = True  # Trainer would overwrite it
    trainer = run(kind, model, tmp_path, eval_set=rows([1, 9, 3]), **steps)
    assert model.config.use_cache
    parts = [logged(trainer, name) for name in ("loss", "lm_loss", "balance_loss")]
    trainer.predict(trainer.train_dataset)  # a prediction must not log losses as an evaluation
    metrics = trainer.evaluate()
    for number, name in enumerate(("eval_loss", "eval_lm_loss", "eval_balance_loss")):
        assert len(parts[number]) == 2
        parts[number].append(metrics[name])
    for loss, lm_loss, balance_loss in zip(*parts, strict=True):
        assert abs(loss - lm_loss - balance_loss) < 1e-5
        assert balance_loss > 1e-3


@pytest.mark.parametrize("kind", ["trainer", "sft", "plain"])
def test_a_balance_loss_is_weighted_by_the_tokens_of_its_micro_batch(kind, tmp_path):
    """The balance loss equals that of a single batch, and so do the other parts of the loss."""
    places = [0, 3, 7, 9]
    one_a_step = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
    }
    keep = Gradients()
    settings = {"max_steps": 1, "max_grad_norm": 0.0} | one_a_step
    run(
        kind,
        upcycled(),
        tmp_path,
        places=places,
        callbacks=[keep],
        **settings,
    )
    model = upcycled().train()
    batches = [batch_of(place) for place in places]
    tokens = [batch["labels"][:, 1:].ne(-100).sum() for batch in batches]
    for batch, count in zip(batches, tokens, strict=True):
        out = model(**batch)
        ((out.lm_loss + out.aux_loss) * count / sum(tokens)).backward()
    tiny.assert_close(keep.grads, tiny.gradients(model), 2e-5)


@KINDS
@pytest.mark.parametrize(
    "stage, noisy, settings",
    [
        pytest.param("moe", True, {}, id="moe-noise"),
        pytest.param(
            "mergeable",
            False,
            {"gradient_accumulation_steps": 2},
            id="mergeable",
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(kind, stage, noisy, settings, tmp_path):
    def model():
        model = upcycled(noisy_gate=noisy)
        if stage == "mergeable":
            swap.moe_to_mergeable(model)
        return model

    folder = tmp_path / "run"
    # 10 examples, 5 batches per epoch: step 4 is inside the first epoch, step 8 inside the second
    settings = {
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 4,
    } | settings
    whole = run(kind, model(), folder, **settings)
    weights = tiny.weights(whole.model)
    stats = tiny.contents(folder).get(folder / "router_stats.csv")
    resumed = trainer_of(kind, model(), folder, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    for name in ("loss", "grad_norm"):
        assert len(logged(whole, name)) == 8
        assert logged(resumed, name) == logged(whole, name)
    tiny.assert_equal(tiny.weights(resumed.model), weights)
    start = tiny.weights(model())

    assert any(not torch.equal(start[name], weight) for name, weight in weights.items())
    assert (stats is not None) == (stage == "moe")
    assert tiny.contents(folder).get(folder / "router_stats.csv") == stats


class Poison(TrainerCallback):
    """Sets a weight to NaN in one step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            model.get_output_embeddings().weight.data[5] = math.nan


@KINDS
@pytest.mark.parametrize(
    "with_ids",
    [True, False],
    ids=["rows-known", "rows-unknown"],
)
def test_a_nan_loss_stops_and_leaves_the_checkpoint(kind, with_ids, tmp_path):
    ids = list(range(100, 110)) if kind == "sft" else list(range(10))
    train = rows()
    if with_ids and kind == "sft":
        train = train.add_column("row_id", ids)
    trainer = trainer_of(
        kind,
        upcycled(),
        tmp_path,
        train=train,
        callbacks=[Poison(3)],
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        max_steps=8,
    )
    if not with_ids and kind == "trainer":
        trainer.train_dataset = trainer.train_dataset.remove_columns("row_id")
    router = moe_layers(trainer.model)[0].gate.weight
    with pytest.raises(ValueError, match="loss is nan at step 3") as error:
        trainer.train()
    message = str(error.value)

    assert f"resume from {tmp_path / 'checkpoint-2'}" in message
    named = re.search(r"batch of the examples (\d+), (\d+)", message)
    assert bool(named) == with_ids
    if with_ids:
        assert {int(number) for number in named.groups()} <= set(ids)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for p in saved.parameters():
        assert torch.isfinite(p).all()
    assert torch.equal(
        moe_layers(saved)[0].gate.weight,
        router,
    )  # the optimizer did not run step 3


class Seen(TrainerCallback):
    """A reporting callback that keeps the logs."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("kind", ["trainer", "sft", "plain"])
def test_router_statistics_are_those_of_the_batches(kind, tmp_path):
    model = upcycled()
    records = []
    masks = []

    def keep_ids(module, args, out):
        if module.training:
            records.append(out.topk_idx)

    def keep_mask(module, args, kwargs):
        if module.training:
            masks.append(kwargs["attention_mask"].clone())

    for block in moe_layers(model).values():
        block.gate.register_forward_hook(keep_ids)
    model.register_forward_pre_hook(keep_mask, with_kwargs=True)
    stats = RouterStatsCallback(per_layer=True)
    seen = Seen()
    trainer = run(
        kind,
        model,
        tmp_path,
        places=range(8),
        eval_set=rows([0]),
        eval_strategy="steps",
        eval_steps=2,
        callbacks=[stats, seen] if kind == "plain" else [seen, stats],
        max_steps=4,
        logging_steps=2,
        gradient_accumulation_steps=2,
    )
    counts = torch.zeros(2, 2, 4, dtype=torch.int64)  # [log, layer, expert]

    assert len(masks) == 8
    assert any((mask == 0).any() for mask in masks)
    assert len(records) == 2 * len(masks)
    for call, ids in enumerate(records):
        unmasked = ids[masks[call // 2].flatten().bool()].flatten().long()
        counts[call // 8, call % 2] += torch.bincount(unmasked, minlength=4)
    lines = router_stats(tmp_path)
    assert [int(line["slots"]) for line in lines] == counts.flatten().tolist()
    assert [int(line["step"]) for line in lines] == [2] * 8 + [4] * 8
    routed = counts[..., 1:].double()
    worst = (routed / routed.mean(-1, keepdim=True)).amax((1, 2))
    assert logged(trainer, "router/max_violation") == pytest.approx(worst.tolist())
    load = counts[:, 1, 2] / counts[:, 1].sum(-1)
    assert logged(trainer, "router/1/load/2") == pytest.approx(load.tolist())
    reported = [logs for logs in seen.logs if "loss" in logs]
    assert len(reported) == 2
    for logs in reported:
        assert "router/min_entropy" in logs


# our tokenizer's template without the markers of assistant turns
UNMARKED = re.sub("{% (end)?generation %}", "", TOKENIZER.chat_template)
CHAT = [
    {"role": "user", "content": "add 1 to 2"},
    {"role": "assistant", "content": "3 is it"},
]


PAIR = {"prompt": "add 1 to 2\n", "completion": "3 is it"}
LINES = {"text": "add 1 to 2\n3 is it"}


@pytest.mark.parametrize(
    "row, settings, train_on",
    [
        pytest.param({"messages": CHAT}, {}, "assistant", id="messages"),
        pytest.param(
            {"messages": CHAT}, {"assistant_only_loss": True}, "assistant", id="trls-option"
        ),
        pytest.param({"messages": CHAT}, {}, "all", id="all-of-messages"),
        pytest.param(PAIR, {}, "assistant", id="prompt-completion"),
        pytest.param(
            PAIR,
            {"completion_only_loss": False},
            "all",
            id="trls-word-for-all",
        ),
        pytest.param(LINES, {"packing": True}, "assistant", id="packed"),
    ],
)
def test_sft_trains_on_what_all_commands_do(row, settings, train_on, tmp_path, monkeypatch):
    """The data is read by --data or passed to TRL directly, with a template with or without {%
    generation %}.
    """
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    read = read_rows(tmp_path / "rows.jsonl")
    raw = datasets.Dataset.from_list([row] * 8)
    ids, labels = encode(TOKENIZER, read[0], train_on=train_on)
    count = len(ids)
    parts = {}
    if not settings:
        parts["train_on"] = train_on
    for train, template in (
        (read, TOKENIZER.chat_template),
        (raw, UNMARKED),
        (raw.to_iterable_dataset(), UNMARKED),
    ):
        monkeypatch.setattr(TOKENIZER, "chat_template", template)
        trainer = trainer_of(
            "sft", upcycled(), tmp_path / "out", train=train, max_steps=1, parts=parts, **settings
        )
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["input_ids"][0].tolist()[:count] == ids
        trained = batch["labels"][0].tolist()
        assert trained[:count] in (labels, [-100, *labels[1:]])
        # in packing, the next example follows
        assert set(trained[count:]) <= {-100} or settings.get("packing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved upcycled model with its tokenizer, and a data file next to it."""
    folder = tmp_path_factory.mktemp("folder")
    upcycled().save_pretrained(folder / "moe")
    TOKENIZER.save_pretrained(folder / "moe")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def words(model, data, options: str) -> list[str]:
    """Return the arguments of the command."""
    return f"--model {model} --data {data} --report_to none {options}".split()


def steps_of(checkpoint, name: str) -> list[int]:
    """Return the steps whose log has a value."""
    state = read_json(checkpoint / "trainer_state.json")
    return [entry["step"] for entry in state["log_history"] if name in entry]


def test_the_command_trains_a_folder_and_saves_one(folder, tmp_path):
    (tmp_path / "train.yaml").write_text(
        "max_steps: 3\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-2\n"
    )
    out = tmp_path / "out"
    options = f"--config {tmp_path}/train.yaml --max_steps 2 --logging_steps 1 --output_dir {out}"
    code = "import sys; from moe_runtime.hf import train_command; train_command(sys.argv[1:])"
    done = forked(
        code,
        *words(folder / "moe", folder / "rows.jsonl", options),
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert f"saved MoeRuntimeLlamaForCausalLM to {out} after step 2" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(folder / "moe")
    assert type(model) is type(start)
    for name in (".gate.weight", ".experts.down_proj"):
        path = f"model.layers.0.mlp{name}"
        assert not torch.equal(
            model.get_parameter(path),
            start.get_parameter(path),
        )
    assert steps_of(out / "checkpoint-2", "balance_loss") == [1, 2]
    assert (out / "router_stats.csv").exists()
    assert (out / "tokenizer.json").exists()


def test_an_example_without_an_answer_is_named(tmp_path):
    examples = datasets.Dataset.from_list([{"messages": CHAT}, {"messages": CHAT[:1]}])
    with pytest.raises(ValueError, match="example 2"):
        trainer_of("sft", upcycled(), tmp_path, train=examples)


def test_the_command_evaluates_resumes_and_says_how_long_it_takes(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(console, "FIRST", 0.0)
    monkeypatch.setattr(console, "EVERY", 0.0)
    data = folder / "rows.jsonl"
    argv = (
        f"--model_name_or_path {folder}/moe --data {data} --eval_data {data} --eval_strategy steps "
        f"--eval_steps 2 --output_dir {tmp_path} --save_steps 1 --report_to none --no_router_stats"
    ).split()

    assert train_command([*argv, "--max_steps", "2"]) == tmp_path
    capsys.readouterr()
    resume = ["--max_steps", "4", "--resume_from_checkpoint", "true"]
    assert train_command([*argv, *resume]) == tmp_path
    printed = capsys.readouterr()
    assert "after step 4" in printed.out
    lines = []
    for line in printed.err.splitlines():
        if line.startswith("training: "):
            lines.append(line)
    assert lines[0].startswith("training: 50% 2/4 [")
    assert re.fullmatch(
        r"training: 75% 3/4 \[\d\d:\d\d<\d\d:\d\d, +\S+(step/s|s/step)\]",
        lines[1],
    )
    assert lines[-1].startswith("training: done in ")
    card = (tmp_path / "README.md").read_text()
    for text in (
        f'from_pretrained("OWNER/{tmp_path.name}")',
        "2404.15247",
        "moe-runtime train --model_name_or_path moe --data rows.jsonl",
        "| steps | 4 |",
    ):
        assert text in card
    assert "None" not in card
    assert steps_of(tmp_path / "checkpoint-4", "eval_balance_loss") == [2, 4]
    assert not (tmp_path / "router_stats.csv").exists()


def test_the_command_replaces_no_earlier_run_and_resumes_the_latest_one(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    files = words(folder / "moe", folder / "rows.jsonl", "--no_router_stats")
    argv = [*files, "--output_dir", "out", "--save_steps", "2"]
    for refused, says in (
        (files, "output_dir None is not a folder. Pass --output_dir"),
        ([*argv, "--resume"], "out has no complete checkpoint. Run without --resume"),
    ):
        with pytest.raises(ValueError, match=says):
            train_command(refused)

    assert not list(tmp_path.iterdir())
    train_command([*argv, "--max_steps", "4"])
    before = tiny.contents(tmp_path)
    inside = ["--model", "out/checkpoint-4", *argv[2:], "--overwrite"]
    for refused, says in (
        (argv, "already exists. .*, or --overwrite .*, or --resume to continue from checkpoint-4$"),
        ([*argv, "--resume", "--overwrite"], "either"),
        (inside, "output_dir out contains out/checkpoint-4, the model to train"),
    ):
        with pytest.raises(ValueError, match=says):
            train_command(refused)
    assert tiny.contents(tmp_path) == before
    # the earlier run's checkpoint of a later step is gone
    train_command([*argv, "--max_steps", "2", "--overwrite", "--seed", "7"])
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    seen = []

    def bar(*args, **options):
        return contextlib.nullcontext(lambda step, *_: seen.append(step))

    monkeypatch.setattr(sft.console, "bar", bar)
    train_command([*argv, "--max_steps", "3", "--resume"])
    assert seen[0] == 2


def test_lora_has_targets_and_a_diverged_training_is_said(folder, tmp_path, capsys):
    options = f"--no_router_stats --max_steps 3 --save_strategy no --output_dir {tmp_path}"
    argv = words(folder / "moe", folder / "rows.jsonl", options)
    train_command([*argv, "--learning_rate", "1000", "--no_stop_on_nan"])
    guess = math.log(len(TOKENIZER))
    warning = f"the training diverged, as a uniform guess has loss {guess:.2f}. Lower --learning"

    assert warning in capsys.readouterr().err
    train_command([*argv, "--overwrite", "--use_peft"])
    assert "diverged" not in capsys.readouterr().err
    config = read_json(tmp_path / "adapter_config.json")
    assert config["lora_dropout"] == 0
    targets = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj"}
