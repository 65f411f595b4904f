"""Score a model's experts on text, and compare two models on text, from folders."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime.hf.training import fit, ranks
from moe_runtime.hf.training.calibration import (
    LENGTH,
    SEED,
    TOKENS,
    load_with_batches,
    model_inputs,
)
from moe_runtime.io import rows as data
from moe_runtime.io.files import check_out_file, files_print
from moe_runtime.methods.shrink.statistics import ExpertStatistics, StatisticsRecorder

SECONDS = 60  # between two saves of what is done so far


def score_folder(
    source: str | Path,
    rows: str | Path,
    out: str | Path,
    *,
    outputs: bool = False,
    n_tokens: int = TOKENS,
    max_length: int = LENGTH,
    packed: bool = True,
    batch_size: int = 1,
    prompt: str = "plain",
    seed: int = SEED,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ExpertStatistics:
    """Run a model over text and write its experts' statistics.

    What is done is saved every minute to `out`.partial, from which the same call resumes. Every
    process of a run must call this; only a single one saves and resumes.

    Args:
        source: Folder of a stock MoE model, in 16 bits or with packed experts.
        rows: Text, chats or a task's examples, as `data.read_rows` reads them.
        out: The file to write, .safetensors.
        outputs: Whether to run every expert on every token, as merging, acp and do-acp require.
        n_tokens: Tokens to read, at most.
        max_length: Tokens of a sample.
        packed: Whether examples are joined to samples of `max_length`.
        batch_size: Samples per forward pass.
        prompt: One of prompts.PROMPTS.
        seed: Of the order of the examples.
        overwrite: Whether an existing file is replaced.
        progress: Called with the tokens done and all tokens.

    Raises:
        ValueError: The model has no stock MoE layers, or the text cannot be read.
    """
    check_out_file(out, overwrite, [source, rows])
    model, batches = load_with_batches(
        source,
        rows,
        n_tokens=n_tokens,
        max_length=max_length,
        packed=packed,
        batch_size=batch_size,
        prompt=prompt,
        seed=seed,
        progress=progress,
    )
    processes = ranks.state().num_processes
    settings = {
        "rows": [str(rows), files_print(rows)],
        "source": [str(source), files_print(source)],
        "read": [n_tokens, max_length, packed, batch_size, prompt, seed, outputs],
    }
    partial = Path(f"{out}.partial")
    facts = {"text": Path(rows).name, "model": Path(source).name}
    model.eval()
    with StatisticsRecorder(model, outputs) as recorder:
        saves = _Saves(partial, recorder, settings, processes == 1)
        batches = itertools.islice(batches, saves.resumed(), None)
        left = max(n_tokens // processes - recorder.tokens, 1)
        with torch.no_grad():
            for batch, only in model_inputs(model, batches, left):
                recorder.only = only
                model(**batch)
                saves.batch_done()
        statistics = recorder.read(facts, reduce=True)
    with ranks.leading() as main:
        if main:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            statistics.save(out)
            partial.unlink(missing_ok=True)
    return statistics


class _Saves:
    """Saves the sums of an unfinished pass now and then, and resumes from them."""

    def __init__(self, path: Path, recorder: StatisticsRecorder, settings: dict, active: bool):
        self.path = path
        self.recorder = recorder
        self.settings = settings
        self.active = active
        self.batches = 0
        self.last = time.monotonic()

    def resumed(self) -> int:
        """Add the saved sums of the same pass to the recorder; return its batches."""
        if self.active and self.path.is_file():
            with contextlib.suppress(ValueError):  # an incomplete file
                saved = ExpertStatistics.load(self.path)
                if saved.facts.get("settings") == self.settings:
                    self.recorder.add(saved)
                    self.batches = saved.facts["batches"]
        return self.batches

    def batch_done(self) -> None:
        """Save the sums if the last time was a while ago."""
        self.batches += 1
        if self.active and time.monotonic() - self.last > SECONDS:
            facts = {"settings": self.settings, "batches": self.batches}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.recorder.read(facts).save(self.path)
            self.last = time.monotonic()


class Comparison(NamedTuple):
    """Two models on the same text.

    Attributes:
        loss_before: Mean loss per label token of the first model.
        loss: That of the second one.
        divergence: Mean KL(first || second) of the next token's distribution, in nats.
        agreement: Share of the tokens for which both predict the same one.
        examples: Examples that were read.
        tokens: Label tokens.
    """

    loss_before: float
    loss: float
    divergence: float
    agreement: float
    examples: int
    tokens: int


def compare_folders(
    before: str | Path,
    after: str | Path,
    rows: str | Path,
    *,
    limit: int = 64,
    max_length: int = 1024,
    batch_size: int = 1,
    prompt: str = "plain",
    train_on: str = "all",
) -> Comparison:
    """Compare two models with the same tokenizer on held-out text; both are loaded at once.

    Args:
        before: Folder of the first model, for example the one that was shrunk.
        after: Folder of the second.
        rows: Text, as `data.read_rows` reads it.
        limit: Examples, at most.
        max_length: Tokens of an example.
        batch_size: Examples per forward pass.
        prompt: One of prompts.PROMPTS.
        train_on: The tokens that count, one of prompts.TRAIN_ON.

    Raises:
        ValueError: The text cannot be read, or the models have other vocabularies.
    """
    first, tokenizer = load_any(before)
    second, _ = load_any(after)
    sizes = [model.config.get_text_config().vocab_size for model in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"Both models must have the same vocabulary, but have {sizes} tokens")
    tokens = data.tokenize_pairs(
        tokenizer, data.read_rows(rows), max_length, limit=limit, prompt=prompt, train_on=train_on
    )

    def take(model: nn.Module, batch: dict[str, Tensor]) -> list[tuple]:
        labels = batch.pop("labels")
        pair = [one(**batch, use_cache=False).logits for one in (first, model)]
        return list(_differences(*pair, labels))

    sums = fit.each_row(
        second, tokens, take, collator=fit.pair_collator(tokenizer), batch_size=batch_size
    )
    totals = torch.tensor(sums, dtype=torch.float64).sum(0)
    means = (totals[:4] / totals[4]).tolist()
    return Comparison(*means, examples=len(tokens), tokens=int(totals[4]))


def load_any(source: str | Path) -> tuple[Any, Any]:
    """Return a model, dense or MoE, in its own dtype, and its tokenizer."""
    from moe_runtime.hf.dropin.experts import patch, register

    register()
    model = ranks.load_model(source, "auto", ranks.state().device)
    with contextlib.suppress(ValueError):  # a dense model, or experts of another library
        patch(model)
    return model.eval(), ranks.load_tokenizer(source)


def _differences(before: Tensor, after: Tensor, labels: Tensor) -> Iterator[tuple]:
    """Yield for each row the sums over its label tokens of both losses, of the divergence and of
    equal predictions, and the number of tokens; logits [B, S, V], labels [B, S].
    """
    labels = labels[:, 1:]
    counted = labels != -100
    targets = labels.clamp(min=0)[..., None]
    old = before[:, :-1].float().log_softmax(-1)
    new = after[:, :-1].float().log_softmax(-1)
    values = [
        -old.gather(-1, targets)[..., 0],
        -new.gather(-1, targets)[..., 0],
        (old.exp() * (old - new)).sum(-1),
        old.argmax(-1) == new.argmax(-1),
        counted,
    ]
    for row in range(len(labels)):
        yield tuple(float((value[row] * counted[row]).double().sum()) for value in values)
