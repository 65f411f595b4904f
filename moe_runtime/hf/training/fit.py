"""`train`: transformers' Trainer with the arguments of recipes; and `row_losses`, the losses of
single examples.

The processes of a run share the examples. Adafactor also works under FSDP2: transformers creates
its row and column averages as plain tensors, which do not match sharded weights, so they are
created here before the first step, sharded like the weights; the step is that of transformers.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    Adafactor,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from moe_runtime.config import check_choice
from moe_runtime.hf.common.sharded import local_part
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.parallel import gathered, shard_experts
from moe_runtime.hf.training.ranks import check_ep_size, expert_mesh, gather, state
from moe_runtime.hf.training.recording import Best, History, Recorder, last_checkpoint
from moe_runtime.hf.training.saving import stopping_with_a_checkpoint
from moe_runtime.hf.training.trained_files import needs_autocast
from moe_runtime.hf.training.trainer import MoETrainer, check_rows
from moe_runtime.io.console import bar
from moe_runtime.ops.all_to_all import is_distributed


class TrainingResult(NamedTuple):
    """Result of `train`."""

    history: History
    steps: int
    losses: list[float]  # of each held-out example, at the end
    tokens: list[int]
    # per held-out example: 1 if greedy decoding gives its label tokens, else 0
    exact: list[int] | None
    # rank 0 gets all weights, the others may get None; every process must call
    state_dict: Callable[[], dict | None]
    trained_parameters: int
    optimizer_bytes: int  # of the optimizer's state, over all processes


def _arguments(folder: StrPath, save_steps: int | None, seed: int, **settings) -> TrainingArguments:
    """Return transformers' arguments for a training that only writes checkpoints."""
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        save_total_limit=2,
        logging_steps=max(settings["max_steps"] // 40, 1),
        seed=seed,
        # accelerate adds the epoch, so consecutive seeds would share almost all orders
        data_seed=1_000_003 * seed,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        report_to=[],
        disable_tqdm=True,
        # every trained parameter is used in every step: expert stacks are single tensors
        ddp_find_unused_parameters=False,
        **settings,
    )


def train(
    model: nn.Module,
    rows: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    folder: StrPath,
    learning_rate: float,
    batch_size: int,
    held_out: Any,
    epochs: float | None = None,
    steps: int | None = None,
    warmup_steps: int | None = None,
    per_device_batch_size: int | None = None,
    optimizer: str = "adafactor",
    weight_decay: float = 0.0,
    schedule: str = "linear",
    max_grad_norm: float = -1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    bf16: bool = False,
    gradient_checkpointing: bool = False,
    save_steps: int | None = None,
    ep_size: int = 1,
    keep_best: bool = False,
    balance_loss: str | None = None,
    balance_loss_coef: float | None = None,
    evaluations: int | Sequence[int] = 4,
    seed: int = 0,
    callbacks: Sequence[TrainerCallback] = (),
    on_step: Callable[[int, int, float | None], None] | None = None,
    trainer: Callable[..., MoETrainer] = MoETrainer,
    collator: Callable | None = None,
    losses: Callable | None = None,
) -> TrainingResult:
    """Train all parameters that require a gradient, in place, in all processes of the run, with
    transformers' Trainer.

    An optimizer step uses `batch_size` examples: `per_device_batch_size` at a time in each process,
    the rest by gradient accumulation. Adafactor runs without its relative step. With `save_steps`,
    checkpoints are written to `folder` at that interval and on interruption, and a second call
    resumes from the newest complete one. `ep_size` processes share the experts from here on
    (`shard_experts`). The held-out loss is measured `evaluations` times at even intervals, or after
    the given steps; `keep_best` restores the weights with the lowest one. `balance_loss` is that of
    MoETrainer, for the duration of this training. For models with other inputs than a causal LM,
    `trainer` creates the Trainer, `collator` the batches, and `losses(model, held_out, batch_size=,
    bf16=)` returns the results of `row_losses`. Raises ValueError for indivisible batch sizes and a
    warmup as long as the training.
    """
    bf16 = bf16 or needs_autocast(model)
    device_batch, accumulation = split_batch(batch_size, per_device_batch_size)
    total = steps or count_steps(len(rows), epochs, device_batch, accumulation)
    warmup_steps = _warmup(warmup_steps, total)
    if ep_size > 1 and not any(map(is_distributed, model.parameters())):
        shard_experts(model, expert_mesh(ep_size))
    if gradient_checkpointing:
        # the new name if transformers has it, as the old one causes a warning
        enable = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    history = History()
    losses = losses or functools.partial(row_losses, tokenizer=tokenizer)

    def take() -> tuple[float, tuple]:
        measured = losses(model, held_out, batch_size=device_batch, bf16=bf16)
        return mean_loss(*measured), measured

    every = evaluations
    if isinstance(evaluations, int):
        every = max(round(total / evaluations), 1)
    best = Best(model, folder) if keep_best else None
    recorder = Recorder(history, take, every, on_step, best)
    arguments = _arguments(
        folder,
        save_steps,
        seed,
        max_steps=total,
        learning_rate=learning_rate,
        per_device_train_batch_size=device_batch,
        gradient_accumulation_steps=accumulation,
        optim=optimizer,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        weight_decay=weight_decay,
        lr_scheduler_type=schedule,
        warmup_steps=warmup_steps,
        max_grad_norm=max_grad_norm,
        bf16=bf16,
    )
    runner = trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=collator or pair_collator(tokenizer),
        router_stats=False,
        balance_loss=balance_loss,
        balance_loss_coef=balance_loss_coef,
        callbacks=[SplitAdafactor(), *callbacks, recorder],
    )
    _run(runner, recorder, last_checkpoint(folder))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 0
    for state_of in runner.optimizer.state.values():
        for value in state_of.values():
            if torch.is_tensor(value):
                size += local_part(value).nbytes

    def state_dict() -> dict | None:
        if runner._trains_spread():
            return gathered(model)
        return runner.accelerator.get_state_dict(runner.model_wrapped)

    return TrainingResult(history, total, *recorder.last, state_dict, trained, sum(gather([size])))


def _run(trainer: MoETrainer, recorder: Recorder, checkpoint: Path | None) -> None:
    """Train, resuming from a checkpoint if there is one. Ctrl-C and SIGTERM stop it after a step,
    with a checkpoint.
    """
    trainer.remove_callback(PrinterCallback)
    if checkpoint is not None:
        recorder.restore(checkpoint)
        checkpoint = str(checkpoint)
    with stopping_with_a_checkpoint(trainer):
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.balance_loss is not None:
        trainer.balance_loss.close()


def _warmup(steps: int | None, total: int) -> int:
    """Return the steps of warmup, by default one in twenty."""
    if steps is None:
        return min(max(round(0.05 * total), 1), total - 1)
    if steps >= total:
        raise ValueError(
            f"warmup_steps must be below the {total} steps of the training, but got {steps}"
        )
    return steps


def check_training(
    *,
    batch_size: int,
    per_device_batch_size: int | None,
    optimizer: str,
    steps: int | None,
    warmup_steps: int | None,
    ep_size: int = 1,
    **_: Any,
) -> None:
    """Raise ValueError for settings of `train` that cannot work here, as far as is known without
    the data.
    """
    split_batch(batch_size, per_device_batch_size)
    check_choice("optimizer", optimizer, tuple(name.value for name in OptimizerNames))
    check_ep_size(ep_size)
    if steps:
        _warmup(warmup_steps, steps)


def pair_collator(tokenizer: PreTrainedTokenizerBase) -> DataCollatorForSeq2Seq:
    """Return the collator for `data.tokenize_pairs`: pads input_ids as the tokenizer does, labels
    with -100.
    """
    return DataCollatorForSeq2Seq(tokenizer)


def split_batch(batch_size: int, per_device_batch_size: int | None) -> tuple[int, int]:
    """Return the examples per forward pass of a process, and the number of accumulation steps per
    optimizer step.
    """
    ranks = state().num_processes
    device_batch = per_device_batch_size or max(batch_size // ranks, 1)
    if batch_size % (device_batch * ranks):
        raise ValueError(
            f"batch_size must be a multiple of per_device_batch_size ({device_batch}) times "
            f"{ranks} processes, but got {batch_size}"
        )
    return device_batch, batch_size // (device_batch * ranks)


def count_steps(rows: int, epochs: float, device_batch: int, accumulation: int) -> int:
    """Return the optimizer steps of `epochs` as counted by transformers: the last step of an epoch
    may be smaller.
    """
    batches = math.ceil(rows / (device_batch * state().num_processes))
    return math.ceil(epochs * math.ceil(batches / accumulation))


def quiet() -> None:
    """Disable transformers' progress bars, as the caller has one."""
    logging.disable_progress_bar()


@torch.no_grad()
def each_row(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    take: Callable,
    *,
    collator: Callable,
    batch_size: int = 32,
    bf16: bool = False,
    column: str = "input_ids",
    device: torch.device | None = None,
) -> list:
    """Return the results of `take(model, batch)`, one per example of a batch, in the order of the
    rows and in eval mode.

    Every process must call it: each processes its share of the rows, and all return the whole.
    Batches have rows of similar length, that of their `column`. `bf16` computes under autocast,
    `device` is that of the batches, by default the process's. Raises ValueError for a token that is
    not in the model's vocabulary.
    """
    from accelerate.utils import send_to_device

    check_rows(model, rows, getattr(collator, "tokenizer", None))
    rank = state().process_index
    ranks = state().num_processes
    device = device or state().device
    lengths = list(map(len, rows[column]))
    order = sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)
    # the same number for every rank, as the forward pass of a sharded model waits for the others
    count = math.ceil(len(rows) / ranks)
    numbers = [order[min(rank + i * ranks, len(rows) - 1)] for i in range(count)]
    loader = DataLoader(rows.select(numbers), batch_size=batch_size, collate_fn=collator)
    training = model.training
    bf16 = bf16 or needs_autocast(model)
    model.eval()
    results = []
    try:
        with bar("judging", "row") as update:
            for batch in loader:
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    results += take(model, send_to_device(batch, device))
                update(min(len(results) * ranks, len(rows)), len(rows))
    finally:
        model.train(training)
    by_number = dict(gather(list(zip(numbers, results, strict=True))))
    return [by_number[number] for number in range(len(rows))]


def row_losses(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 32,
    bf16: bool = False,
) -> tuple[list, list, list]:
    """Return each row's mean loss per label token, without auxiliary losses, its label tokens, and
    whether all are right.

    They are right (1, otherwise 0) if each is the most probable token: greedy decoding then gives
    the label. Every process must call.
    """

    def take(model, batch: dict) -> list[tuple]:
        labels = batch.pop("labels")
        return token_sums(model(**batch, use_cache=False).logits, labels)

    return means_of(
        each_row(
            model, rows, take, collator=pair_collator(tokenizer), batch_size=batch_size, bf16=bf16
        )
    )


def token_sums(logits: Tensor, labels: Tensor) -> list[tuple]:
    """Return `sums_of` each row's label tokens; `logits` [B, S, V], `labels` [B, S]."""
    logits = logits[:, :-1]
    labels = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none"
    )
    return sums_of(losses, labels, logits.argmax(-1))


def sums_of(losses: Tensor, labels: Tensor, predicted: Tensor | None = None) -> list[tuple]:
    """Return, for each row of `losses` [B, n], their sum, the number of labels [B, n] that are not
    -100, and an exact match.

    That is 1 if the tokens `predicted` [B, n] are the labels, else 0, and None without them.
    """
    counted = labels != -100
    if predicted is None:
        exact = [None] * len(labels)
    else:
        exact = ((predicted == labels) | ~counted).all(1).int().tolist()
    return list(zip(losses.double().sum(1).tolist(), counted.sum(1).tolist(), exact, strict=True))


def means_of(results: Sequence[tuple]) -> tuple[list[float], list[int], list[int] | None]:
    """Return each row's mean, its number of label tokens, and the exact matches, None if they are
    unknown.
    """
    sums, tokens, exact = zip(*results, strict=True)
    means = [total / count for total, count in zip(sums, tokens, strict=True)]
    return means, list(tokens), None if None in exact else list(exact)


def mean_loss(
    losses: Sequence[float], tokens: Sequence[int], exact: Sequence[int] | None = None
) -> float:
    """Return the mean over all label tokens from the results of `row_losses`; `exact` is
    ignored.
    """
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)


class SplitAdafactor(TrainerCallback):
    """Initialize the state of a Trainer's Adafactor for weights sharded by FSDP2; do nothing
    otherwise.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Initialize the state before each step for the weights that have none."""
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate's wrapper
        if isinstance(optimizer, Adafactor):
            optimizer.register_step_pre_hook(fill_state)


@torch.no_grad()
def fill_state(optimizer: Adafactor, args: Any = None, kwargs: Any = None) -> None:
    """Set the averages of every sharded matrix with a gradient and no state to zeros, Adafactor's
    initial values.
    """
    from torch.distributed.tensor import Replicate

    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None or not hasattr(p, "full_tensor") or p.dim() < 2 or optimizer.state[p]:
                continue
            zeros = torch.zeros_like(p.grad, dtype=torch.float32)
            state = {"step": 0, "RMS": 0}
            if group["beta1"] is not None:
                state["exp_avg"] = zeros.clone()
            for name, dim in (("exp_avg_sq_row", -1), ("exp_avg_sq_col", -2)):
                mean = zeros.mean(dim)  # a DTensor, possibly with partial sums
                state[name] = mean.redistribute(
                    placements=[Replicate() if p.is_partial() else p for p in mean.placements]
                )
            optimizer.state[p].update(state)


@torch.no_grad()
def complete(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int = 48
) -> str:
    """Return the model's greedy continuation of `prompt`, without special tokens."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    room = model.config.max_position_embeddings - ids.shape[1]
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=min(max_new_tokens, room), do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
