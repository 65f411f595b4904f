"""UltraFuser's training: examples encoded for several templates, balanced batches, and the Trainer
of both stages.

UltraFuser (arXiv 2403.08281), Algorithm 1: N1 steps of the gate alone, N2 steps of all, each on

    batch = union over the domains t of S(D_t, n)

S(D, n) are n rows drawn uniformly from a domain. Here each row of a domain comes once before any
repeats, in an order redrawn for every pass. Rows come in rounds, one of every domain, so an
optimizer step is balanced however it is split over processes and micro-batches.

A row has `prompt_ids`, a list of ids per specialist, `response_ids` and `domain`; Encoder.collate
makes batches of them. The loss of a step is, over all its processes and micro-batches,

    reduction "mean"     sum of the tokens' losses / response tokens of the step
    reduction "sample"   the same sum / rows of the step, the paper's Eq. (2)
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Sampler

from moe_runtime.config import shown
from moe_runtime.hf.models.folders import skeleton
from moe_runtime.hf.training.fit import each_row, means_of, sums_of
from moe_runtime.hf.training.ranks import load_config
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.io.prompts import chat_of
from moe_runtime.io.rows import one_form, require
from moe_runtime.methods.ultrafuser.heads import head_of
from moe_runtime.methods.ultrafuser.inputs import Encoder

if TYPE_CHECKING:
    from datasets import Dataset


class BalancedSampler(Sampler[int]):
    """Yields indices in rounds, one example of every domain; deterministic for a seed and epoch, in
    every process.

    `domains` is the domain of each row; an epoch has `rounds` rounds, by default as many as the
    largest domain has rows. With enough rounds for all its
    steps, training resumes exactly where it stopped. With `replacement` every row is drawn from all
    rows of its domain, as in UltraFuser's Algorithm 1; otherwise each is used once before any is
    used again.
    """

    def __init__(
        self,
        domains: Sequence,
        *,
        rounds: int | None = None,
        seed: int = 0,
        replacement: bool = False,
    ):
        places: dict = {}
        for index, domain in enumerate(domains):
            places.setdefault(domain, []).append(index)
        self.names = tuple(sorted(places, key=str))
        self.places = [torch.tensor(places[name]) for name in self.names]
        self.rounds = rounds or max(map(len, self.places))
        self.seed = seed
        self.replacement = replacement
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order; accelerate's data loaders call it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.rounds * len(self.places)

    def __iter__(self) -> Iterator[int]:
        # one stream per domain, so that its draws do not depend on the sizes of the others
        streams = [self._stream(number, places) for number, places in enumerate(self.places)]
        for _ in range(self.rounds):
            yield from map(next, streams)

    def _stream(self, number: int, places: torch.Tensor) -> Iterator[int]:
        generator = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + self._epoch) * 1_009 + number
        )
        while True:
            if self.replacement:
                order = torch.randint(len(places), (len(places),), generator=generator)
            else:
                order = torch.randperm(len(places), generator=generator)
            yield from places[order].tolist()


def encode_rows(
    encoder: Encoder,
    rows: Iterable[Mapping],
    max_length: int,
    limit: int | None = None,
    *,
    without: Iterable[Sequence[Sequence[int]]] = (),
    where: Callable[[int, Mapping], str] = lambda index, row: f"example {index + 1}",
) -> "Dataset":
    """Encode the first `limit` rows of prompt and completion, or messages, for every specialist;
    return a datasets.Dataset.

    The first answer of a chat is the response, all before it the prompt. A response is cut so that
    it and the longest prompt fit into `max_length`; a row is dropped if its prompt leaves no room,
    or is among `without`, the prompt_ids of held-out rows. `where(index, row)` names a row in
    errors.
    """
    columns: dict[str, list] = {"prompt_ids": [], "response_ids": []}
    known = set(map(_key, without))
    dropped = 0
    for index, row in enumerate(map(one_form, rows)):
        if len(columns["response_ids"]) == limit:
            break
        try:
            prompt, response = _exchange(row)
            prompts = encoder.prompt(prompt)
            answer = encoder.answer(response)
        except ValueError as error:
            raise ValueError(f"{where(index, row)}: {error}") from error
        answer = answer[: max(max_length - max(map(len, prompts)), 0)]
        if known and _key(prompts) in known:
            dropped += 1
        elif answer:
            columns["prompt_ids"].append(prompts)
            columns["response_ids"].append(answer)
    if not columns["response_ids"]:
        raise ValueError(
            f"No examples are left: {dropped} have a held-out prompt, the others no response "
            f"within max_length ({max_length}). Use a larger one, or other prompts"
        )
    return require("datasets").Dataset.from_dict(columns)


def _key(prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, prompts))


def _exchange(row: Mapping) -> tuple[str | list[Mapping], str]:
    """Return the prompt and the response of a row."""
    turns, given = chat_of(row) or ((), 0)
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant" and i >= max(given, 1):
            return turns[:i], turn["content"]
    prompt = row.get("prompt")
    response = row.get("completion")
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise ValueError(
            "Expected text in prompt and completion, or messages with an assistant's answer to a "
            f"user, but got {shown(dict(row))}"
        )
    return prompt, response


@torch.no_grad()
def cast(model: torch.nn.Module, dtype: str) -> None:
    """Round a model's parameters to `dtype`, in place; buffers keep their dtype, as in
    from_pretrained.

    Parameters sharded by FSDP2 keep their own dtype, with rounded values.
    """
    for parameter in model.parameters():
        if hasattr(parameter, "full_tensor"):
            parameter.copy_(parameter.to(getattr(torch, dtype)))
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, dtype))


def hidden_size(source: str, name: str) -> int:
    """Return the size of a model's last hidden states from its config; `name` is the source in
    errors.
    """
    return head_of(skeleton(load_config(source, name)), name).linear.in_features


def single_rows(rows: "Dataset", specialist: int) -> "Dataset":
    """Return the examples for a single specialist: input_ids, and labels on the response."""
    columns: dict[str, list] = {"input_ids": [], "labels": []}
    for prompts, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True):
        prompt = prompts[specialist]
        columns["input_ids"].append(prompt + response)
        columns["labels"].append([-100] * len(prompt) + response)
    return require("datasets").Dataset.from_dict(columns)


def sampler_for(
    domains: Sequence[str],
    *,
    steps: int,
    batch_size: int,
    balanced: bool = True,
    seed: int = 0,
    replacement: bool = False,
) -> BalancedSampler:
    """Return a training sampler: balanced over domains in every step, or over all examples."""
    if not balanced:
        domains = [""] * len(domains)
    rounds = steps * batch_size // len(set(domains))
    return BalancedSampler(domains, rounds=rounds, seed=seed, replacement=replacement)


class SampledTrainer(MoETrainer):
    """A MoETrainer with a given sampler; None for transformers' default."""

    def __init__(self, *args: Any, sampler: Sampler[int] | None = None, **kwargs: Any):
        self.sampler = sampler
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, train_dataset=None) -> Sampler | None:
        if self.sampler is not None:
            return self.sampler
        return super()._get_train_sampler(train_dataset)


class FuserTrainer(SampledTrainer):
    """A SampledTrainer for both stages of UltraFuser; the model's `loss_reduction` is applied over
    whole steps.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # each micro-batch's sum is divided by the count of the whole step; labels are not shifted
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = False

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        """Count the items that the loss is averaged over: label tokens, or examples."""
        if self.accelerator.unwrap_model(self.model).config.loss_reduction == "sample":
            batch_samples = [
                {"labels": batch["labels"].new_zeros(len(batch["labels"]), 1)}
                for batch in batch_samples
            ]
        return super()._get_num_items_in_batch(batch_samples, device)


def training_of(encoder: Encoder, sampler: Sampler[int] | None = None) -> dict[str, Callable]:
    """Return the arguments with which `fit.train` trains an UltraFuser on rows of `encode_rows`."""
    return {
        "trainer": functools.partial(FuserTrainer, sampler=sampler),
        "collator": encoder.collate,
        "losses": functools.partial(fuser_losses, collator=encoder.collate),
    }


_each_row = functools.partial(each_row, column="response_ids")


def fuser_losses(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    *,
    collator: Callable,
    batch_size: int = 32,
    bf16: bool = False,
) -> tuple:
    """Like `fit.row_losses`, for the response tokens of each row."""

    def take(model, batch: dict) -> list[tuple]:
        out = model(**batch, reduction="none", want_logits=True)
        return sums_of(out.loss, batch["labels"], out.logits.argmax(-1))

    return means_of(
        _each_row(model, rows, take, collator=collator, batch_size=batch_size, bf16=bf16)
    )


def gate_weights(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    *,
    collator: Callable,
    batch_size: int = 32,
    bf16: bool = False,
) -> list[list[list[float]]]:
    """Return the gate's weights [R, S] for the response tokens of each row; every process must call
    this.
    """

    def take(model, batch: dict) -> list[list[list[float]]]:
        counts = (batch.pop("labels") != -100).sum(1).tolist()
        weight = model(**batch).gate_weight.float().cpu()
        return [row[:count].tolist() for row, count in zip(weight, counts, strict=True)]

    return _each_row(model, rows, take, collator=collator, batch_size=batch_size, bf16=bf16)
