"""Router initialization: tune each expert and its routing vectors on the expert's bucket.

UpIT (arXiv 2410.01610), Algorithm 1, lines 6 to 11, and Eq. (1), (2):
`moe_runtime.methods.upit.vectors` has the equations. Expert i's MLPs (the matrices of its adapters)
and its routing vectors train on its bucket; its backbone is frozen. `init_routers` does this for
all experts. The paper leaves the initial vectors open; here they start at 0, since at its learning
rates they move by only about 0.01, so that vectors from N(0, 0.02) would still route at random.

A result's folder holds the expert, routing_vectors.safetensors (`vectors` [L, H] float32) and
router.json.
"""

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from moe_runtime.config import check_choice, check_fraction, check_number
from moe_runtime.hf.training import fit, ranks
from moe_runtime.hf.training.settings import AnyNumber, Count, Schedule, Steps, Training
from moe_runtime.io import console
from moe_runtime.io.checkpoint import Checkpoint, write_tensors
from moe_runtime.io.files import (
    atomic_folder,
    atomic_write_json,
    check_out_dir,
    files_print,
    hash_of,
    read_json,
)
from moe_runtime.io.rows import Dataset
from moe_runtime.methods.upit import models
from moe_runtime.methods.upit.experts import Expert, open_expert
from moe_runtime.methods.upit.vectors import Measured, RoutingVectors, VectorTrainer

FORMAT = 1
VECTORS = "routing_vectors.safetensors"
RECORD = "router.json"
RATES = {"ffn": 2e-5, "lora": 2e-4}  # UpIT, Sec. 3.1


class UpitTraining(Training):
    """A training run of UpIT or of a baseline: AdamW at a constant rate, without warmup."""

    warmup_steps: Steps | None = 0
    batch_size: Count = 128
    optimizer: str = "adamw_torch"
    schedule: Schedule = "constant"
    max_grad_norm: AnyNumber = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExpert:
    """A tuned expert and its routing vectors.

    Attributes:
        vectors: [L, H] float32, one for each layer.
        folder: The tuned expert.
        before: Losses on its bucket before training.
        after: The same after training, in float32.
        steps: Optimizer steps.
        seconds: Of training alone.
    """

    vectors: torch.Tensor  # [L, H] float32
    folder: Path
    before: Measured  # loss, and mean sigmoid(h . r) of each layer, on the bucket
    after: Measured  # the same after training, in float32
    steps: int
    seconds: float  # of training only


def init_router(
    expert: str | Path,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: str | Path,
    alpha: float = 0.5,
    vector_learning_rate: float | None = None,
    base: str | Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    callbacks: Sequence = (),
    on_step: Callable[[int, int, float | None], None] | None = None,
    **training: Any,
) -> RoutedExpert:
    """Tune an expert and its routing vectors on its bucket (UpIT, Eq. 1 and 2), and write both.

    Every process of a run must call this. A folder that the same call has already written is
    reused.

    Args:
        expert: The expert's folder. A whole expert trains in float32.
        rows: Tokenized examples of its bucket, with input_ids and labels.
        tokenizer: Of the base.
        folder: The folder to write.
        alpha: Weight of the language model's loss, 0 to 1; the routing loss has the rest.
        vector_learning_rate: Of the routing vectors; None is the expert's.
        base: The dense model of an adapter; None is the recorded one.
        dtype: "float32", "bfloat16" or "float16": of a written whole expert, or of an adapter's
            base during training.
        seed: Of all random numbers.
        overwrite: Whether to replace an existing folder.
        callbacks: Callbacks of transformers' Trainer.
        on_step: Called with the step, the number of steps and the loss.
        training: Settings such as epochs, learning_rate and batch_size; by default 4 epochs at 2e-5
            for a whole expert and 2e-4 for an adapter (Sec. 3.1).

    Returns:
        The vectors, the folder, and the losses before and after.

    Raises:
        ValueError: If a setting is invalid, the rows lack labels, or an adapter changes no MLP.
    """
    check_fraction("alpha", alpha, "the weight of the language model's loss")
    if vector_learning_rate is not None:
        check_number("vector_learning_rate", vector_learning_rate)
    if dtype is not None:
        check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    models.check_labels(rows)
    folder = Path(folder)
    opened = open_expert(expert, base)
    if not any(map(opened.is_ffn, opened.keys())):
        raise ValueError(
            f"Expert {opened.path} is an adapter that changes no MLP. Pass one that does"
        )
    settings = _settings(opened, training)
    made_of = hash_of(
        {
            "alpha": alpha,
            "vector_rate": vector_learning_rate,
            "expert": files_print(expert),
            "rows": hash_of([[*rows["input_ids"]], [*rows["labels"]]]),
            "base": None if opened.kind == "ffn" else files_print(models.base_of([opened])),
            "settings": settings,
            "seed": seed,
            "dtype": dtype,
        }
    )
    record = folder / RECORD
    is_made = record.is_file() and read_json(record).get("made_of") == made_of
    if not overwrite and ranks.agree(is_made):
        _remove_checkpoints(folder)
        return load_routed(folder)
    check_out_dir(folder, overwrite, [expert, base])
    model, adapted = _load(opened, dtype)
    routed, weights = _tune(
        model,
        rows,
        tokenizer,
        folder,
        alpha,
        checkpoints=folder.with_name(f"{folder.name}.checkpoints-{made_of}"),
        seed=seed,
        trainer=functools.partial(VectorTrainer, vector_rate=vector_learning_rate),
        callbacks=callbacks,
        on_step=on_step,
        **settings,
    )
    with ranks.leading() as main:
        if main:
            with atomic_folder(folder, overwrite) as tmp:
                dtype = dtype or models.dtype_of(opened)
                models.save_tuned(model, adapted, tokenizer, weights, dtype, tmp)
                _save_record(tmp, routed, made_of)
    _remove_checkpoints(folder)
    return routed


def _tune(
    model: nn.Module, rows, tokenizer, folder: Path, alpha: float, checkpoints: Path, **training
) -> tuple[RoutedExpert, dict | None]:
    """Train a model's MLPs, or their adapters, and its routing vectors; return the result, to be
    written to `folder`, and the weights.
    """
    at_once, _ = fit.split_batch(training["batch_size"], training["per_device_batch_size"])
    zeros = torch.zeros(model.config.num_hidden_layers, model.config.hidden_size)
    routing = RoutingVectors(model, zeros, alpha)
    measure = functools.partial(routing.measure, rows, tokenizer, at_once, training["bf16"])
    before = measure()
    routing.train_only()
    # one held-out row is enough, since all rows are measured separately, with the vectors
    held_out = rows.select([0]).select_columns(["input_ids", "labels"])
    trained = fit.train(
        model, rows, tokenizer, folder=checkpoints, held_out=held_out, evaluations=1, **training
    )
    routed = RoutedExpert(
        vectors=routing.values(),
        folder=folder,
        before=before,
        after=measure(),
        steps=trained.steps,
        seconds=trained.history.seconds,
    )
    weights = trained.state_dict()
    routing.close()
    return routed, weights


def _settings(opened: Expert, training: dict) -> dict:
    """Return the settings of hf.training.fit.train; raises ValueError for invalid ones."""
    defaults = {"learning_rate": RATES[opened.kind]}
    if training.get("steps") is None:
        defaults["epochs"] = 4.0
    given = {name: value for name, value in training.items() if value is not None}
    tuning = UpitTraining.from_dict(defaults | given)
    if tuning.keep_best or tuning.evaluations:
        raise ValueError("keep_best and evaluations require held-out examples, which experts lack")
    settings = tuning.to_dict()
    fit.check_training(**settings)
    return settings


def _save_record(folder: Path, routed: RoutedExpert, made_of: str) -> None:
    """Write the vectors and the measurements beside a tuned expert."""
    write_tensors(folder / VECTORS, {"vectors": routed.vectors})
    atomic_write_json(
        folder / RECORD,
        {
            "format": FORMAT,
            "steps": routed.steps,
            "seconds": routed.seconds,
            "before": routed.before._asdict(),
            "after": routed.after._asdict(),
            "made_of": made_of,
        },
    )


def _load(opened: Expert, dtype: str | None):
    """Return the expert's dense model and, for an adapter, the PEFT model around it, else None."""
    if opened.kind != "lora":
        # AdamW's steps are smaller than a bfloat16 weight can resolve
        return models.load(opened, dtype="float32"), None
    adapted = models.load_adapter(opened, dtype=dtype, trainable=True)
    model = adapted.get_base_model()
    if dtype is None and model.dtype == torch.float16:
        adapted.float()  # gradients of the frozen layers would vanish
    return model, adapted


def _remove_checkpoints(folder: Path) -> None:
    """Remove the Trainer's checkpoints next to a finished folder, also those of a killed run."""
    if not ranks.state().is_main_process:
        return
    for path in folder.parent.iterdir():
        if path.name.startswith(f"{folder.name}.checkpoints-"):
            shutil.rmtree(path, ignore_errors=True)


class Routers(NamedTuple):
    """Routing vectors and experts after step 4."""

    name: str
    folder: Path  # of expert-<i>/
    buckets: list[list[int]]  # per expert: its rows of the seed data
    before: list[float]  # mean sigmoid of each expert's vectors on its bucket
    after: list[float]
    total_seconds: float


def init_routers(
    experts: Sequence[str | Path],
    rows: Dataset,
    buckets: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: str | Path,
    **settings: Any,
) -> list[RoutedExpert]:
    """Call `init_router` for each expert on its bucket, and write FOLDER/expert-<i>.

    Args:
        experts: The experts' folders.
        rows: The seed data.
        buckets: For each expert the positions of its examples in `rows`, as of `fill_buckets`.
        tokenizer: Of the base.
        folder: Where the experts are written; what the same call has already written is reused.
        settings: Arguments of `init_router`.

    Returns:
        One result for each expert.

    Raises:
        ValueError: If an expert has no examples, or the numbers of experts and buckets differ.
    """
    if len(experts) != len(buckets) or not all(buckets):
        sizes = [len(bucket) for bucket in buckets]
        raise ValueError(
            f"Expected a bucket with examples for each of the {len(experts)} experts, but buckets "
            f"have {sizes}"
        )
    routed = []
    for i, (expert, bucket) in enumerate(zip(experts, buckets, strict=True)):
        with console.bar(f"expert {i}") as update:
            options = {"on_step": update, "folder": Path(folder) / f"expert-{i}"} | settings
            routed.append(init_router(expert, rows.select(bucket), tokenizer, **options))
        ranks.free_memory()
    return routed


def load_routed(folder: str | Path) -> RoutedExpert:
    """Read a folder of `init_router`.

    Args:
        folder: One expert's folder.

    Returns:
        What `init_router` returned.

    Raises:
        ValueError: If the folder is another one.
    """
    folder = Path(folder)
    record = read_json(folder / RECORD)
    try:
        if record["format"] != FORMAT:
            raise KeyError("format")
        with Checkpoint(folder, VECTORS) as checkpoint:
            return RoutedExpert(
                vectors=checkpoint.get("vectors"),
                folder=folder,
                before=Measured(**record["before"]),
                after=Measured(**record["after"]),
                steps=record["steps"],
                seconds=record["seconds"],
            )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / RECORD} has format {record.get('format')!r} or lacks fields, but must be "
            "as upit init-routers wrote it. Run that again"
        ) from error
