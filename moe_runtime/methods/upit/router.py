"""Router initialization: tune each expert and its routing vectors on the expert's bucket.

UpIT (arXiv 2410.01610), Algorithm 1, lines 6 to 11, and Eq. (1), (2):
`moe_runtime.methods.upit.vectors` has the equations. Expert i's MLPs (the matrices of its adapters)
and its routing vectors train on its bucket; its backbone is frozen. `init_routers` does this for
all experts. The paper leaves the initial vectors open; here they start at 0, since at its learning
rates they move by only about 0.01, so that vectors from N(0, 0.02) would still route at random.
Instead of "skilled", untrained vectors can be used: "random", from N(0, 0.02), and "hidden_mean",
the mean of h over the bucket, of length 1.

A result's folder holds routing_vectors.safetensors (`vectors` [L, H] float32), router.json and, if
tuned, the expert.
"""

import contextlib
import functools
import inspect
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.config import (
    check_bool,
    check_choice,
    check_fraction,
    check_number,
    check_positive,
)
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
from moe_runtime.methods.upit import models
from moe_runtime.methods.upit.experts import Expert, open_expert
from moe_runtime.methods.upit.vectors import (
    Measured,
    RoutingVectors,
    VectorTrainer,
    drawn,
    hidden_means,
)

FORMAT = 1
INITS = ("skilled", "random", "hidden_mean")
VECTORS = "routing_vectors.safetensors"
RECORD = "router.json"
NUMBERS = ("router_init", "steps", "seconds")  # fields of RoutedExpert in RECORD
MEASURED = ("before", "after")
# default standard deviation of the initial vectors
STD = {"skilled": 0.0, "random": 0.02, "hidden_mean": 0.0}
RATES = {"ffn": 2e-5, "delta": 2e-5, "lora": 2e-4}  # UpIT, Sec. 4.1
# settings that `init_router` accepts for fit.train
_SETTINGS = inspect.signature(fit.train).parameters.keys() - {
    "model",
    "rows",
    "tokenizer",
    "folder",
    "held_out",
    "evaluations",
    "trainer",
    "collator",
    "losses",
    "keep_best",
}


class UpitTraining(Training):
    """A training run of UpIT or of a baseline: AdamW at a constant rate, without warmup."""

    warmup_steps: Steps | None = 0
    batch_size: Count = 128
    optimizer: str = "adamw_torch"
    schedule: Schedule = "constant"
    max_grad_norm: AnyNumber = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExpert:
    """An expert and its routing vectors."""

    vectors: torch.Tensor  # [L, H] float32
    folder: Path  # of the tuned expert, or of the original if it was not tuned
    router_init: str
    before: Measured  # loss, and mean sigmoid(h . r) of each layer, on the bucket
    after: Measured  # the same after training, in float32; equal to `before` for untrained vectors
    steps: int = 0
    seconds: float = 0.0  # of training only


def init_router(
    expert: str | Path,
    rows,
    tokenizer,
    *,
    folder: str | Path,
    learning_rate: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int = 8,
    alpha: float = 0.5,
    router_init: str = "skilled",
    detach_h: bool = False,
    train_ffn: bool = True,
    vector_std: float | None = None,
    vector_learning_rate: float | None = None,
    base: str | Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    index: int = 0,
    overwrite: bool = False,
    callbacks: Sequence = (),
    on_step: Callable[[int, int, float | None], None] | None = None,
    **training,
) -> RoutedExpert:
    """Tune an expert and its routing vectors on its bucket and write both to `folder`, atomically.

    `rows` are tokenized (io.rows.tokenize_pairs). Trains 4 `epochs`, or `steps`, with AdamW at a
    constant rate, by default RATES; `training` are fit.train's other settings. A whole expert
    trains in float32 and is written in `dtype`; for an adapter, `dtype` is that of its base during
    training. A folder that the same call has already written is reused. `base` is the dense model
    of a delta or adapter, `index` the expert's number, which seeds random vectors.
    `train_ffn=False` trains only the vectors. Every process must call this.
    """
    _check(rows, alpha, epochs, steps, router_init, train_ffn, dtype)
    for name, value in {
        "vector_std": vector_std,
        "vector_learning_rate": vector_learning_rate,
    }.items():
        if value is not None:
            check_number(name, value)
    folder = Path(folder)
    std = STD[router_init] if vector_std is None else vector_std
    opened = open_expert(expert, base)
    if not any(map(opened.is_ffn, opened.keys())):
        raise ValueError(
            f"Expert {opened.path} is an adapter that changes no MLP. Pass one that does"
        )
    settings = _settings(
        RATES[opened.kind], learning_rate, epochs, steps, batch_size, seed, training
    )
    at_once, _ = fit.split_batch(batch_size, settings.get("per_device_batch_size"))
    made_of = hash_of(
        {
            "alpha": alpha,
            "detach_h": detach_h,
            "train_ffn": train_ffn,
            "vector_rate": vector_learning_rate,
            "expert": files_print(expert),
            "rows": hash_of([[*rows["input_ids"]], [*rows["labels"]]]),
            "std": std,
            "base": None if opened.kind == "ffn" else files_print(models.base_of([opened])),
            "settings": settings,
            "router_init": router_init,
            "dtype": dtype,
            "index": index,
        }
    )
    record = folder / RECORD
    is_made = record.is_file() and read_json(record).get("made_of") == made_of
    if not overwrite and ranks.agree(is_made):
        _remove_checkpoints(folder)
        return load_routed(folder)
    check_out_dir(folder, overwrite, [expert, base])
    model, adapted = _load(opened, dtype)
    dtype = dtype or models.dtype_of(opened)
    if router_init == "hidden_mean":
        vectors = hidden_means(model, rows, tokenizer, at_once)
    else:
        config = model.config
        vectors = drawn(config.num_hidden_layers, config.hidden_size, std, seed * 65537 + index)
    routing = RoutingVectors(model, vectors, alpha, detach_h)
    measure = functools.partial(
        routing.measure, rows, tokenizer, at_once, settings.get("bf16", False)
    )
    before = measure()
    done = {"vectors": vectors, "before": before, "after": before, "folder": Path(expert)}
    write = None
    if router_init == "skilled":
        routing.train_only(train_ffn)
        trained = fit.train(
            model,
            rows,
            tokenizer,
            folder=folder.with_name(f"{folder.name}.checkpoints-{made_of}"),
            # one row is enough, since all rows are measured separately, with the vectors
            held_out=rows.select([0]).select_columns(["input_ids", "labels"]),
            evaluations=1,
            trainer=functools.partial(VectorTrainer, vector_rate=vector_learning_rate),
            callbacks=callbacks,
            on_step=on_step,
            **settings,
        )
        done |= {
            "vectors": routing.values(),
            "after": measure(),
            "steps": trained.steps,
            "seconds": trained.history.seconds,
        }
        weights = trained.state_dict()
        if train_ffn:
            done["folder"] = folder
            write = functools.partial(models.save_tuned, model, adapted, tokenizer, weights, dtype)
    routing.close()
    routed = RoutedExpert(router_init=router_init, **done)
    _save(routed, folder, made_of, overwrite, write)
    _remove_checkpoints(folder)
    return routed


def _load(opened: Expert, dtype: str | None):
    """Return the expert's dense model and, for an adapter, the PEFT model around it, else None."""
    if opened.kind != "lora":
        # AdamW's steps are smaller than a bfloat16 weight can resolve
        return models.load(opened, dtype="float32"), None
    adapted = models.load_adapters([opened], dtype=dtype, trainable=True)
    model = adapted.get_base_model()
    if dtype is None and model.dtype == torch.float16:
        adapted.float()  # gradients of the frozen layers would vanish
    return model, adapted


def _settings(
    rate: float, learning_rate, epochs, steps, batch_size: int, seed: int, training: dict
) -> dict:
    """Return the settings of hf.training.fit.train; raises ValueError for unknown ones."""
    unknown = training.keys() - _SETTINGS
    if unknown:
        raise ValueError(
            f"Unknown settings {', '.join(sorted(unknown))}. Pass some of "
            f"{', '.join(sorted(_SETTINGS))}"
        )
    learning_rate = rate if learning_rate is None else learning_rate
    check_number("learning_rate", learning_rate, positive=True)
    settings = {
        "optimizer": "adamw_torch",
        "schedule": "constant",
        "batch_size": batch_size,
        "seed": seed,
    } | training
    if steps is None:
        settings["epochs"] = epochs or 4
    else:
        settings["steps"] = steps
    fit.check_training(
        **{"per_device_batch_size": None, "steps": None, "warmup_steps": None} | settings
    )
    return settings | {"learning_rate": learning_rate}


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
    rows,
    buckets: Sequence[Sequence[int]],
    tokenizer,
    *,
    folder: str | Path,
    **settings,
) -> list[RoutedExpert]:
    """Call `init_router` with `settings` for each expert on its bucket, row numbers of `rows`, and
    write FOLDER/expert-<i>.

    A folder that the same call has already written is reused.
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
            options = {"on_step": update, "folder": Path(folder) / f"expert-{i}", "index": i}
            options |= settings
            routed.append(init_router(expert, rows.select(bucket), tokenizer, **options))
        ranks.free_memory()
    return routed


def load_routed(folder: str | Path) -> RoutedExpert:
    """Read a folder of `init_router`; raises ValueError for other folders."""
    folder = Path(folder)
    record = read_json(folder / RECORD)
    try:
        if record["format"] != FORMAT:
            raise KeyError("format")
        values = {name: record[name] for name in NUMBERS}
        for name in MEASURED:
            values[name] = Measured(**record[name])
        values["folder"] = folder / record["expert"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / RECORD} has format {record.get('format')!r} or lacks fields, but must have "
            f"format {FORMAT} with expert, {', '.join((*NUMBERS, *MEASURED))}. Run upit "
            "init-routers again"
        ) from error
    with Checkpoint(folder, VECTORS) as checkpoint:
        return RoutedExpert(vectors=checkpoint.get("vectors"), **values)


def _check(
    rows, alpha, epochs, steps, router_init: str, train_ffn: bool, dtype: str | None
) -> None:
    check_choice("router_init", router_init, INITS)
    check_bool("train_ffn", train_ffn)
    check_fraction("alpha", alpha, "the weight of the language model's loss")
    if steps is not None:
        check_positive("steps", steps)
    if epochs is not None:
        check_number("epochs", epochs, positive=True)
    is_dtype = dtype is None or isinstance(getattr(torch, str(dtype), None), torch.dtype)
    if not is_dtype or None not in (epochs, steps):
        raise ValueError(
            "Expected at most one of epochs and steps, and dtype None or a name such as "
            f"'bfloat16', but epochs is {epochs}, steps is {steps} and dtype is {dtype!r}"
        )
    models.check_labels(rows)


def _save(
    routed: RoutedExpert,
    folder: Path,
    made_of: str,
    overwrite: bool,
    write: Callable[[Path], None] | None,
) -> None:
    """Write the vectors, the measurements and, through `write`, the tuned expert on rank 0; other
    ranks wait.
    """
    with ranks.leading() as main, contextlib.ExitStack() as stack:
        if main:
            tmp = stack.enter_context(atomic_folder(folder, overwrite))
            if write is not None:
                write(tmp)
            write_tensors(tmp / VECTORS, {"vectors": routed.vectors})
            values = {"format": FORMAT, "expert": "." if write else str(routed.folder.resolve())}
            values |= {name: getattr(routed, name) for name in NUMBERS}
            values |= {name: getattr(routed, name)._asdict() for name in MEASURED}
            atomic_write_json(tmp / RECORD, values | {"made_of": made_of})
