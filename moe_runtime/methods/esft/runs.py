"""ESFT from a model folder and a data file: one function per command.

score_folder   a model's folder and rows -> summary.json
train_folder   a folder, a selection and rows -> an adapter; resumes a run that was killed
check_folder   a base's folder and an adapter -> whether they belong together; with rows, the loss
               without and with it
"""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.config import check_choice, check_positive
from moe_runtime.hf.dropin import experts
from moe_runtime.hf.dropin.parallel import shard_experts
from moe_runtime.hf.training import fit, ranks, trained_files
from moe_runtime.hf.training.calibration import (
    LENGTH,
    SEED,
    TOKENS,
    load_for_scoring,
    load_with_batches,
)
from moe_runtime.hf.training.recording import Recorder, last_checkpoint
from moe_runtime.hf.training.settings import (
    AnyNumber,
    BelowOne,
    Count,
    Number,
    Schedule,
    Steps,
    Training,
)
from moe_runtime.hf.training.trainable import layers_of
from moe_runtime.io import rows as data
from moe_runtime.io.files import (
    atomic_write_json,
    check_out_dir,
    contents_of,
    files_print,
    read_json,
)
from moe_runtime.io.prompts import TRAIN_ON
from moe_runtime.methods import esft
from moe_runtime.methods.esft.adapters import Adapter
from moe_runtime.methods.esft.folders import check_fit
from moe_runtime.methods.esft.lora import LoraAdapter, check_lora, read_ranks
from moe_runtime.methods.esft.packing import join
from moe_runtime.methods.esft.selection import check_selection

VALIDATION = 0.02  # share of the rows, if no held-out rows are given (from the released code)
DROP_BOS = 0.2
SETTINGS = "settings.json"  # the arguments of a training run, next to its checkpoints


class EsftTraining(Training):
    """A run of ESFT or of a baseline: AdamW, a constant rate, the weights of the lowest loss."""

    warmup_steps: Steps | None = 0
    batch_size: Count = 32
    optimizer: str = "adamw_torch"
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.95
    weight_decay: Number = 0.1
    schedule: Schedule = "constant"
    max_grad_norm: AnyNumber = 1.0
    keep_best: bool = True


def score_folder(
    source: str | Path,
    rows: str | Path,
    out: str | Path,
    *,
    n_tokens: int = TOKENS,
    variant: str = "v1",
    max_length: int = LENGTH,
    packed: bool = True,
    batch_size: int = 1,
    prompt: str = "plain",
    seed: int = SEED,
    progress: Callable[[int, int], None] | None = None,
) -> esft.ExpertScores:
    """Score the experts of the model in folder `source` on `rows`, read by `data.read_rows`; write
    the summary to `out`.

    `packed` joins the rows to samples of `max_length` tokens, as in the paper; else each row is a
    sample. `prompt` is one of prompts.PROMPTS.
    """
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
    scores = esft.score_experts(model, batches, n_tokens, variant=variant, per_process=True)
    with ranks.leading() as main:
        if main:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            scores.save(out)
    return scores


class TrainingReceipt(NamedTuple):
    """What `train_folder` did."""

    path: Path
    steps: int
    loss_before: float  # on the validation rows
    loss: float
    trained_parameters: int
    total_parameters: int
    optimizer_bytes: int
    seconds: float


def train_folder(
    source: str | Path,
    selection: esft.ExpertSelection | str | Path,
    rows: str | Path,
    out: str | Path,
    training: EsftTraining,
    *,
    held_out: str | Path | None = None,
    max_length: int = LENGTH,
    packed: bool = True,
    prompt: str = "plain",
    train_on: str = "assistant",
    shared_experts: bool | None = None,
    non_expert_modules: bool | None = None,
    dtype: str | None = None,
    lora: tuple[int, float] | None = None,
    lora_ranks: str | Path | None = None,
    seed: int = 0,
    check_weights: bool = True,
    overwrite: bool = False,
    on_step: Callable[[int, int, float | None], None] | None = None,
) -> TrainingReceipt:
    """Train the experts of `selection` (or its file) of the model in folder `source` on `rows`;
    write an adapter to `out`.

    `dtype` is that of the trained parameters: by default the model's, but float32 for bfloat16 or
    float16, which would round small steps away. `lora`, a rank and alpha, trains LoRA of those
    experts instead; a JSON file `lora_ranks` gives experts another rank (`esft.lora.read_ranks`).
    The validation loss is computed on `held_out` rows, else on one in fifty of `rows`. A selection
    that says which model was scored must belong to this one (`check_weights=False` accepts other
    weights); a file that does not must have all of its MoE layers.

    With training.save_steps, checkpoints go to `out`-checkpoints; the same
    call resumes from them, and they are removed at the end. Every process of a run must call this.
    """
    out = Path(out)
    check_out_dir(out, overwrite, [source, selection, rows, held_out, lora_ranks])
    is_file = not isinstance(selection, esft.ExpertSelection)
    if is_file:
        selection = esft.ExpertSelection.load(selection)
    selection = esft.with_flags(selection, shared_experts, non_expert_modules)
    ranks_of_lora = None
    if lora is not None:
        rank, alpha = lora
        if lora_ranks is not None:
            lora = (read_ranks(lora_ranks, selection, rank), alpha)
        ranks_of_lora = [check_lora(selection, *lora), alpha]
    trained_files.check_place(out)
    check_positive("max_length", max_length)
    check_choice("train_on", train_on, TRAIN_ON)
    if training.ep_size != 1:
        ranks.check_ep_size(training.ep_size, source)
    checkpoints = out.with_name(f"{out.name}-checkpoints")
    settings = {
        "selection": selection.to_dict(),
        "training": training.to_dict(),
        "dtype": dtype,
        "seed": seed,
        "data": [str(rows), files_print(rows), str(held_out), held_out and files_print(held_out)],
        "source": [str(source), files_print(source)],
        "rows": [max_length, packed, prompt, train_on],
        "lora": ranks_of_lora,
    }
    del settings["training"]["per_device_batch_size"]  # may change when a run is resumed

    def check() -> None:
        check_out_dir(out, overwrite)
        _check_checkpoints(checkpoints, settings)

    check()
    with ranks.sole_training(checkpoints, check):
        tokenizer = ranks.load_tokenizer(source)
        model = ranks.load_model(source, "auto", ranks.state().device)
        if lora is not None:  # training whole experts does it
            experts.patch(model)
        if is_file:
            _check_complete(model, selection)
        train, validation = _split_rows(
            tokenizer, rows, held_out, max_length, packed, prompt, train_on
        )
        if training.ep_size > 1 and lora is None:
            shard_experts(model, ranks.expert_mesh(training.ep_size))
        model, receipt = _trainable(model, selection, dtype, lora, seed, check_weights)
        before = _loss(
            model,
            validation,
            tokenizer,
            batch_size=fit.split_batch(training.batch_size, training.per_device_batch_size)[0],
            bf16=training.bf16,
        )
        with ranks.leading() as main:
            if main:
                checkpoints.mkdir(parents=True, exist_ok=True)
                atomic_write_json(checkpoints / SETTINGS, settings)
        done = fit.train(
            model,
            train,
            tokenizer,
            folder=checkpoints,
            held_out=validation,
            seed=seed,
            evaluations=max((training.steps or 0) // 100, 4),
            on_step=on_step,
            **training.to_dict(),
        )
        _save(model, done, out, overwrite, is_lora=lora is not None)
        _remove_checkpoints(checkpoints)
    return TrainingReceipt(
        path=out,
        steps=done.steps,
        loss_before=before,
        loss=fit.mean_loss(done.losses, done.tokens),
        trained_parameters=receipt.trainable_parameters,
        total_parameters=receipt.total_parameters,
        optimizer_bytes=done.optimizer_bytes,
        seconds=done.history.seconds,
    )


def _trainable(
    model: torch.nn.Module,
    selection: esft.ExpertSelection,
    dtype: str | None,
    lora: tuple[int | Callable[[int, int], int], float] | None,
    seed: int,
    check_weights: bool,
) -> tuple[torch.nn.Module, esft.TrainableReceipt]:
    """Return the model whose selected experts, or LoRA of them, train, and a receipt."""
    trained = None if dtype is None else getattr(torch, dtype)
    if trained is None and model.dtype in (torch.float16, torch.bfloat16):
        trained = torch.float32
    if lora is None:
        receipt = esft.train_only(model, selection, dtype=trained, check_weights=check_weights)
        return model, receipt
    return esft.train_lora(
        model, selection, *lora, dtype=trained, seed=seed, check_weights=check_weights
    )


def _save(
    model: torch.nn.Module, done: fit.TrainingResult, out: Path, overwrite: bool, is_lora: bool
) -> None:
    """Write the trained weights to `out`; rank 0 writes, every process must call this."""
    weights = done.state_dict() if is_lora else None
    with ranks.leading() as main:
        if not is_lora:
            esft.save_adapter(model, out, overwrite=overwrite)
        elif main:
            esft.save_lora(model, out, state_dict=weights, overwrite=overwrite)


def _check_complete(model: torch.nn.Module, selection: esft.ExpertSelection) -> None:
    """Raise ValueError if a selection without the model that was scored does not fit, or leaves out
    layers of `model`.
    """
    if selection.base is not None or not selection.experts:
        return
    layers = layers_of(model)
    check_selection(layers, selection)
    missing = sorted(set(layers) - set(selection.experts))
    if missing:
        raise ValueError(
            f"The selection does not say which model was scored, and has {len(selection.experts)} "
            f"layers, while the model has {len(layers)}, also layer {missing[0]}. Select from "
            "scores of this model, or add the others with an empty list"
        )


class CheckReceipt(NamedTuple):
    """What `check_folder` found."""

    adapter: Adapter | LoraAdapter
    tensors: int  # in the folder that the adapter changes
    base_loss: float | None = None  # on the rows
    loss: float | None = None
    rows: int = 0


def check_folder(
    source: str | Path,
    adapter: str | Path,
    rows: str | Path | None = None,
    *,
    limit: int = 256,
    max_length: int = LENGTH,
    batch_size: int = 1,
    prompt: str = "plain",
    check_weights: bool = True,
) -> CheckReceipt:
    """Check that an adapter belongs to the model in folder `source`, reading only headers and a few
    rows of weights.

    With `rows`, as `data.read_rows` accepts them, also return the mean loss per label token of the
    first `limit`, without and with the adapter. Raises ValueError if the adapter is for another
    model.
    """
    read, changed = check_fit(source, adapter, check_weights=check_weights)
    if rows is None:
        return CheckReceipt(read, changed)
    model, tokenizer = load_for_scoring(source)
    tokens = data.tokenize_pairs(
        tokenizer, data.read_rows(rows), max_length, limit=limit, prompt=prompt
    )
    without = _loss(model, tokens, tokenizer, batch_size=batch_size)
    esft.apply(model, adapter, check_weights=check_weights)
    loss = _loss(model, tokens, tokenizer, batch_size=batch_size)
    return CheckReceipt(read, changed, without, loss, len(tokens))


def _loss(model, rows, tokenizer, **options) -> float:
    """Return the mean loss per label token."""
    return fit.mean_loss(*fit.row_losses(model, rows, tokenizer, **options))


def _split_rows(
    tokenizer, rows, held_out, max_length: int, packed: bool, prompt: str, train_on: str
) -> tuple:
    """Return the tokenized training and validation rows; no row is in both."""
    answers = train_on == "assistant"
    tokenized = functools.partial(
        data.tokenize_pairs, tokenizer, max_length=max_length, prompt=prompt, train_on=train_on
    )
    train = data.read_rows(rows, answers=answers)
    validation = None
    if held_out is not None:
        validation = data.read_rows(held_out, answers=answers)
    if validation is None:
        train, validation = data.hold_out(train, max(round(VALIDATION * len(train)), 1))
    train = tokenized(train)
    if packed:
        train = join(train, max_length, tokenizer.bos_token_id, DROP_BOS)
    return train, tokenized(validation)


def _check_checkpoints(folder: Path, settings: Mapping) -> None:
    """Raise ValueError if a folder has checkpoints of a call with other settings, or files not
    written by such a call.
    """
    # a run killed before its settings were written leaves only their hidden temporary file
    names = contents_of(folder) if folder.is_dir() else []
    if all(name.startswith(f".{SETTINGS}.") for name in names):
        return
    saved = {}
    if (folder / SETTINGS).is_file():
        saved = read_json(folder / SETTINGS)
        if last_checkpoint(folder) is None:
            return
    settings = json.loads(json.dumps(settings))  # tuples are lists there
    for name in settings | saved:
        if saved.get(name) != settings.get(name):
            raise ValueError(
                f"{folder} has checkpoints of another training with a different {name}. Use the "
                "same settings to resume, or remove the folder"
            )


def _remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a finished run; if interrupted, the same call still recognizes the
    folder as its own.

    So the files that mark checkpoints as complete go first, the settings last.
    """
    if not ranks.state().is_main_process:
        return
    with contextlib.suppress(OSError):  # the adapter is there
        for mark in folder.glob(f"*/{Recorder.NAME}"):
            mark.unlink()
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != SETTINGS:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
