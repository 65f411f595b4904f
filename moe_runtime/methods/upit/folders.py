"""UpIT on folders and data files: the functions behind the commands.

route_folders     experts and rows -> each expert and its routing vectors, tuned on the rows it is
                  best at
assemble_folders  experts, or the output of route_folders -> an MoE model
export_mixtral    an MoE model -> a stock Mixtral folder with the same logits in plain transformers;
                  see also `hf.models.stock`
"""

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.config import check_choice, check_positive, shown
from moe_runtime.hf.common.sources import local_folder
from moe_runtime.hf.models.folders import FolderReceipt
from moe_runtime.hf.models.stock import export_stock
from moe_runtime.hf.training import fit, ranks
from moe_runtime.io import rows as data
from moe_runtime.io.files import atomic_write_text, check_out_file, read_json
from moe_runtime.io.prompts import TEMPLATES, TRAIN_ON
from moe_runtime.methods.upit import assembly, router
from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit.experts import open_expert
from moe_runtime.methods.upit.router import UpitTraining

SUMMARY = "routers.json"
LENGTH = 2048


class RoutersReceipt(NamedTuple):
    """Result of `route_folders`."""

    path: Path
    rows: int  # of the seed data
    buckets: list[int]  # rows per expert
    before: list[float]  # mean sigmoid of each expert's vectors on its bucket
    after: list[float]
    seconds: float


def route_folders(
    experts: Sequence[str | Path],
    rows: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    share: float = 0.01,
    at_least: int = 500,
    capacity: int | None = None,
    tokens: str = "response",
    alpha: float = 0.5,
    max_length: int = LENGTH,
    prompt: str = "plain",
    train_on: str = "assistant",
    epochs: float = 4.0,
    learning_rate: float | None = None,
    vector_learning_rate: float | None = None,
    seed: int = 0,
    overwrite: bool = False,
    **training: Any,
) -> RoutersReceipt:
    """Assign examples to experts by perplexity, tune each expert and its vectors on them, and write
    OUT/expert-<i>.

    `rows` is read by `io.rows.read_rows`; `share` of them, but at least `at_least`, are the seed
    data. `learning_rate` defaults to the paper's; `training` are UpitTraining's other settings.
    Experts that the same call has tuned are reused; those of another call raise an error, and
    `overwrite` removes all first.
    """
    check_positive("max_length", max_length)
    check_choice("train_on", train_on, TRAIN_ON)
    out = check_out_file(Path(out, SUMMARY), overwrite=True).parent
    tokenizer, kind = _tokenizer(experts, base, prompt)
    tuning = UpitTraining.from_dict(
        {"epochs": epochs, "learning_rate": learning_rate or router.RATES[kind], **training}
    )
    fit.check_training(**tuning.to_dict())
    with ranks.sole_training(out):
        tokenized = data.tokenize_pairs(
            tokenizer,
            data.read_rows(rows, answers=train_on == "assistant"),
            max_length,
            prompt=prompt,
            train_on=train_on,
        )
        picked = upit_buckets.seed_set(
            tokenized, share, at_least=min(at_least, len(tokenized)), seed=seed
        )
        perplexity = upit_buckets.perplexities(
            experts,
            picked,
            tokenizer,
            base=base,
            tokens=tokens,
            batch_size=tuning.per_device_batch_size or tuning.batch_size,
        )
        dealt = upit_buckets.fill_buckets(perplexity, capacity)
        with ranks.leading() as main:
            for path in out.glob(f"expert-*/{router.RECORD}") if main and overwrite else ():
                shutil.rmtree(path.parent)
        routed = router.init_routers(
            experts,
            picked,
            dealt,
            tokenizer,
            folder=out,
            base=base,
            seed=seed,
            alpha=alpha,
            vector_learning_rate=vector_learning_rate,
            **tuning.to_dict(),
        )
        receipt = RoutersReceipt(
            path=out,
            rows=len(picked),
            buckets=list(map(len, dealt)),
            before=[statistics.fmean(one.before.sigmoid) for one in routed],
            after=[statistics.fmean(one.after.sigmoid) for one in routed],
            seconds=sum(one.seconds for one in routed),
        )
        with ranks.leading() as main:
            if main:
                values = receipt._asdict()
                del values["path"]
                values |= {"experts": [str(path) for path in experts], "bucket_rows": dealt}
                atomic_write_text(out / SUMMARY, json.dumps(values, indent=2) + "\n")
        return receipt


def assemble_folders(
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    routers: str | Path | None = None,
    **settings: Any,
) -> assembly.FolderReceipt:
    """Assemble expert folders, or the experts and vectors of `route_folders` in `routers`, into an
    MoE model in `out`.

    Without `routers` the router is random. `settings` are `assemble`'s. Raises ValueError for both
    or neither.
    """
    if bool(experts) == (routers is not None):
        given = "both are given" if experts else "neither is given"
        raise ValueError(
            f"Pass either expert folders or the folder of upit init-routers, but {given}"
        )
    if routers is None:
        return assembly.assemble(experts, None, out, **settings)
    listed = read_json(Path(routers) / SUMMARY).get("experts")
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"experts in {Path(routers) / SUMMARY} are {shown(listed)}. Pass the folder written by "
            "upit init-routers"
        )
    routed = [router.load_routed(Path(routers) / f"expert-{i}") for i in range(len(listed))]
    return assembly.assemble(
        [one.folder for one in routed], [one.vectors for one in routed], out, **settings
    )


def _tokenizer(experts: Sequence[str | Path], base: str | Path | None, prompt: str):
    """Load the tokenizer of the first expert, or of its base if it has none; return it and the
    expert's kind.
    """
    expert = open_expert(experts[0], base)
    source = expert.path
    if expert.base is not None and not (source / "tokenizer_config.json").is_file():
        source = local_folder(expert.base, ("config.json",))
    tokenizer = ranks.load_tokenizer(source)
    tokenizer.chat_template = TEMPLATES.get(prompt, tokenizer.chat_template)
    return tokenizer, expert.kind


def export_mixtral(folder: str | Path, out: str | Path, **options: Any) -> FolderReceipt:
    """Write an upcycled model as a stock Mixtral, which runs without this package.

    Args:
        folder: A model whose gate and base Mixtral can hold.
        out: The folder to write.
        options: check=True compares the logits of both; max_shard_size, overwrite and progress.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: With nothing written, if Mixtral has no such model.
    """
    return export_stock(folder, out, "mixtral", **options)
