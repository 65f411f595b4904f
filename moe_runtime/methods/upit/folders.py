"""UpIT from disk to disk: its steps on folders and a file of rows, as the command line's verbs do them, each in one call.

route_folders     experts and rows -> each expert and its routing vectors, tuned on the rows that it is best at
assemble_folders  experts, or what route_folders wrote -> a Mixture-of-Experts model
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe_runtime.config import check_choice, check_positive, shown
from moe_runtime.hf.training import fit, ranks
from moe_runtime.io import rows as data
from moe_runtime.io.files import atomic_write_text, read_json
from moe_runtime.io.prompts import DEEPSEEK_CHAT, MAGICODER_CHAT, put_prompt
from moe_runtime.methods.upit import assembly, router
from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit.checkpoints import model_folder
from moe_runtime.methods.upit.experts import open_expert
from moe_runtime.methods.upit.recipe import Tuning

SUMMARY = "routers.json"
BUCKETS = ("skilled", "random")
LENGTH = 2048


class RoutersReceipt(NamedTuple):
    """What `route_folders` did."""

    path: Path
    rows: int  # of the seed data
    buckets: list[int]  # rows that each expert got
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
    buckets: str = "skilled",
    alpha: float = 0.5,
    detach_h: bool = False,
    train_ffn: bool = True,
    max_length: int = LENGTH,
    prompt: str = "plain",
    epochs: float = 4.0,
    learning_rate: float | None = None,
    vector_std: float | None = None,
    vector_learning_rate: float | None = None,
    seed: int = 0,
    **training,
) -> RoutersReceipt:
    """Find the rows that each expert is best at, and tune expert and routing vectors on them, to OUT/expert-<i>.

    `rows` is what `io.rows.read_rows` reads; `share` of them, and no fewer than `at_least`, are the seed data. `buckets`
    "random" distributes as many rows at random. `learning_rate` defaults to the paper's, `training` are Tuning's other
    settings. Experts that the same call has tuned before are not tuned again. Raises ValueError, with nothing written, for
    rows or experts that cannot be read, and for an `out` of another call.
    """
    check_choice("buckets", buckets, BUCKETS)
    check_positive("max_length", max_length)
    out = Path(out)
    tokenizer, kind = _tokenizer(experts, base, prompt)
    tuning = Tuning.from_dict({"epochs": epochs, "learning_rate": learning_rate or router.RATES[kind], **training})
    fit.check_training(**tuning.to_dict())
    put = (put_prompt(row, prompt) for row in data.read_rows(rows))
    tokenized = data.tokenize_pairs(tokenizer, put, max_length)
    picked = upit_buckets.seed_set(tokenized, share, at_least=min(at_least, len(tokenized)), seed=seed)
    at_once = tuning.per_device_batch_size or tuning.batch_size
    found = upit_buckets.perplexities(experts, picked, tokenizer, base=base, tokens=tokens, batch_size=at_once)
    dealt = upit_buckets.fill_buckets(found, capacity)
    if buckets == "random":
        dealt = upit_buckets.random_buckets([len(bucket) for bucket in dealt], len(picked), seed)
    routed = router.init_routers(
        experts, picked, dealt, tokenizer, folder=out, base=base, seed=seed, alpha=alpha, detach_h=detach_h,
        train_ffn=train_ffn, vector_std=vector_std, vector_learning_rate=vector_learning_rate, **tuning.to_dict(),
    )  # fmt: skip
    receipt = RoutersReceipt(
        path=out,
        rows=len(picked),
        buckets=[len(bucket) for bucket in dealt],
        before=[sum(one.before.sigmoid) / len(one.before.sigmoid) for one in routed],
        after=[sum(one.after.sigmoid) / len(one.after.sigmoid) for one in routed],
        seconds=sum(one.seconds for one in routed),
    )
    with ranks.leading() as main:
        if main:
            values = {name: value for name, value in receipt._asdict().items() if name != "path"}
            values |= {"experts": [str(path) for path in experts], "bucket_rows": dealt}
            atomic_write_text(out / SUMMARY, json.dumps(values, indent=2) + "\n")
    return receipt


def assemble_folders(
    experts: Sequence[str | Path], out: str | Path, *, routers: str | Path | None = None, **settings
) -> assembly.FolderReceipt:
    """Write the MoE model of expert folders to `out`, or of the experts and vectors that `route_folders` wrote to `routers`.

    Without `routers` the router is drawn at random. `settings` are `assemble`'s. Raises ValueError for both or neither.
    """
    if bool(experts) == (routers is not None):
        given = "both are given" if experts else "neither is given"
        raise ValueError(f"experts and routers: {given}; pass expert folders, or the folder of upit init-routers")
    if routers is None:
        return assembly.assemble(experts, None, out, **settings)
    listed = read_json(Path(routers) / SUMMARY).get("experts")
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"experts of {Path(routers) / SUMMARY} are {shown(listed)}; expected what upit init-routers wrote"
        )
    routed = [router.load_routed(Path(routers) / f"expert-{i}") for i in range(len(listed))]
    return assembly.assemble([one.folder for one in routed], [one.vectors for one in routed], out, **settings)


def _tokenizer(experts: Sequence[str | Path], base: str | Path | None, prompt: str):
    """Load the tokenizer of the first expert, or of its base if it has none; return it and the expert's kind."""
    with open_expert(experts[0], base) as expert:
        has_own = (expert.path / "tokenizer_config.json").is_file()
        kind = expert.kind
        source = expert.path if has_own or expert.base is None else model_folder(expert.base, ("config.json",))
    tokenizer = ranks.load_tokenizer(source)
    templates = {"magicoder": MAGICODER_CHAT, "deepseek": DEEPSEEK_CHAT}
    if prompt in templates:
        tokenizer.chat_template = templates[prompt]
    return tokenizer, kind
