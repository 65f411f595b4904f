"""A small model and transformers' Trainer with few arguments: what the demo runs on."""

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.utils import logging

from moe_runtime.hf.tokenizer import pair_collator
from moe_runtime.hf.training import MoETrainer


def quiet() -> None:
    """Switch transformers' own progress bars off: the caller has one."""
    logging.disable_progress_bar()


def small_llama(tokenizer, *, hidden_size: int, intermediate_size: int, num_layers: int, max_length: int, seed: int):
    """Return a LlamaForCausalLM with random weights for the tokenizer: heads of 32, tied embeddings, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(hidden_size // 32, 1),
        num_key_value_heads=max(hidden_size // 32, 1),
        max_position_embeddings=2 * max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass
class History:
    """What `fit` saw: (step, loss) of the training batches and of the held-out rows, and the seconds of training alone."""

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


class _Watcher(TrainerCallback):
    """Fills a History and reports each step."""

    def __init__(self, history: History, evaluate: Callable[[], float] | None, every: int, on_step):
        self.history, self.evaluate, self.every, self.on_step = history, evaluate, every, on_step
        self.loss = math.nan
        self.paused = 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.loss = logs["loss"]
            self.history.train.append((state.global_step, self.loss))

    def on_step_end(self, args, state, control, **kwargs):
        if self.on_step is not None:
            self.on_step(state.global_step, state.max_steps, self.loss)
        if self.evaluate is not None and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            start = time.perf_counter()
            self.history.held_out.append((state.global_step, self.evaluate()))
            self.paused += time.perf_counter() - start


def fit(
    model,
    rows,
    tokenizer,
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    held_out=None,
    eval_every: int = 0,
    warmup: float = 0.05,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] | None = None,
) -> History:
    """Train what requires a gradient, in place, for `steps` optimizer steps with AdamW and a linear schedule.

    `rows` are tokenized (data.tokenize_pairs). The same `seed` draws the same batches for every model. With `held_out`
    its loss is taken every `eval_every` steps and at the end. `on_step(step, steps, loss)` is for a progress bar.
    """
    history = History()
    evaluate = None if held_out is None else lambda: held_out_loss(model, held_out, tokenizer)
    watcher = _Watcher(history, evaluate, eval_every or steps, on_step)
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            lr_scheduler_type="linear",
            warmup_steps=max(round(warmup * steps), 1),
            logging_steps=max(steps // 40, 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            data_seed=seed,
            use_cpu=not cuda,
            bf16=cuda,
            dataloader_pin_memory=cuda,
        )
        trainer = MoETrainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=pair_collator(tokenizer),
            router_stats=False,
            callbacks=[watcher],
        )
        trainer.remove_callback(PrinterCallback)  # a dict per log
        start = time.perf_counter()
        trainer.train()
        history.seconds = time.perf_counter() - start - watcher.paused
    return history


@torch.no_grad()
def held_out_loss(model, rows, tokenizer, batch_size: int = 32) -> float:
    """Return the mean language-model loss per label token, without auxiliary losses, in eval mode."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in DataLoader(rows, batch_size=batch_size, collate_fn=pair_collator(tokenizer)):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        total, count = total + loss.item(), count + int((labels != -100).sum())
    model.train(training)
    return total / count


@torch.no_grad()
def complete(model, tokenizer, prompt: str, max_new_tokens: int = 48) -> str:
    """Return the model's greedy continuation of `prompt`, without special tokens."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    room = model.config.max_position_embeddings - ids.shape[1]
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=min(max_new_tokens, room), do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
