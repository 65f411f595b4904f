"""UpIT on folders and data files: the functions behind the commands.

route_folders     experts and rows -> each expert and its routing vectors, tuned on the rows that it is best at
assemble_folders  experts, or what route_folders wrote -> an MoE model
export_mixtral    an MoE model -> a stock Mixtral folder with the same logits in plain transformers

Mixtral's gate renormalizes the top k of a softmax, which is softmax over the logits of the top k: gates softmax_topk_renorm
and topk_softmax. Its base is a Llama or Mistral without biases. The export streams: memory holds a tensor of the backbone, one
expert's matrices and a shard of the target.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import MixtralConfig

from moe_runtime.config import check_choice, check_positive, shown
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.hf.models.folders import SHARD, Conversion, FolderReceipt, Progress
from moe_runtime.hf.models.hub import local_folder
from moe_runtime.hf.training import fit, ranks
from moe_runtime.io import rows as data
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, check_keys
from moe_runtime.io.files import atomic_write_text, check_out_dir, check_out_file, read_json
from moe_runtime.io.prompts import TEMPLATES, TRAIN_ON
from moe_runtime.methods.upit import assembly, router
from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit.experts import open_expert
from moe_runtime.methods.upit.recipe import Tuning

SUMMARY = "routers.json"
BUCKETS = ("skilled", "random")
LENGTH = 2048


class RoutersReceipt(NamedTuple):
    """Result of `route_folders`."""

    path: Path
    rows: int  # of the seed data
    buckets: list[int]  # rows that each expert got
    before: list[float]  # mean sigmoid of each expert's vectors on its bucket
    after: list[float]
    seconds: float


def route_folders(
    experts: Sequence[str | Path], rows: str | Path, out: str | Path, *, base: str | Path | None = None, share: float = 0.01,
    at_least: int = 500, capacity: int | None = None, tokens: str = "response", buckets: str = "skilled", alpha: float = 0.5,
    detach_h: bool = False, train_ffn: bool = True, max_length: int = LENGTH, prompt: str = "plain",
    train_on: str = "assistant", epochs: float = 4.0, learning_rate: float | None = None, vector_std: float | None = None,
    vector_learning_rate: float | None = None, seed: int = 0, overwrite: bool = False, **training,
) -> RoutersReceipt:  # fmt: skip
    """Assign examples to experts by perplexity, tune each expert and its vectors on them, and write OUT/expert-<i>.

    `rows` is what `io.rows.read_rows` reads; `share` of them, and no fewer than `at_least`, are the seed data. `buckets`
    "random" distributes as many rows at random. `learning_rate` defaults to the paper's, `training` are Tuning's other
    settings. Experts that the same call has tuned before are not tuned again; those of another call are refused, and with
    `overwrite` all are removed first.
    """
    check_choice("buckets", buckets, BUCKETS)
    check_positive("max_length", max_length)
    check_choice("train_on", train_on, TRAIN_ON)
    out = check_out_file(Path(out, SUMMARY), overwrite=True).parent
    tokenizer, kind = _tokenizer(experts, base, prompt)
    tuning = Tuning.from_dict({"epochs": epochs, "learning_rate": learning_rate or router.RATES[kind], **training})
    fit.check_training(**tuning.to_dict())
    found = data.read_rows(rows, answers=train_on == "assistant")
    tokenized = data.tokenize_pairs(tokenizer, found, max_length, prompt=prompt, train_on=train_on)
    picked = upit_buckets.seed_set(tokenized, share, at_least=min(at_least, len(tokenized)), seed=seed)
    at_once = tuning.per_device_batch_size or tuning.batch_size
    found = upit_buckets.perplexities(experts, picked, tokenizer, base=base, tokens=tokens, batch_size=at_once)
    dealt = upit_buckets.fill_buckets(found, capacity)
    if buckets == "random":
        dealt = upit_buckets.random_buckets([len(bucket) for bucket in dealt], len(picked), seed)
    with ranks.leading() as main:
        for path in out.glob(f"expert-*/{router.RECORD}") if main and overwrite else ():
            shutil.rmtree(path.parent)
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
    """Assemble expert folders, or the experts and vectors of `route_folders` in `routers`, to an MoE model in `out`.

    Without `routers` the router is drawn at random. `settings` are `assemble`'s. Raises ValueError for both or neither.
    """
    if bool(experts) == (routers is not None):
        given = "both are given" if experts else "neither is given"
        raise ValueError(f"Pass either expert folders or the folder of upit init-routers, but {given}")
    if routers is None:
        return assembly.assemble(experts, None, out, **settings)
    listed = read_json(Path(routers) / SUMMARY).get("experts")
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"experts in {Path(routers) / SUMMARY} are {shown(listed)}. Pass the folder written by upit init-routers"
        )
    routed = [router.load_routed(Path(routers) / f"expert-{i}") for i in range(len(listed))]
    return assembly.assemble([one.folder for one in routed], [one.vectors for one in routed], out, **settings)


def _tokenizer(experts: Sequence[str | Path], base: str | Path | None, prompt: str):
    """Load the tokenizer of the first expert, or of its base if it has none; return it and the expert's kind."""
    with open_expert(experts[0], base) as expert:
        has_own = (expert.path / "tokenizer_config.json").is_file()
        kind = expert.kind
        source = expert.path if has_own or expert.base is None else local_folder(expert.base, ("config.json",))
    tokenizer = ranks.load_tokenizer(source)
    tokenizer.chat_template = TEMPLATES.get(prompt, tokenizer.chat_template)
    return tokenizer, kind


GATES = ("softmax_topk_renorm", "topk_softmax")
BASES = ("llama", "mistral")
# fields of a base's config that Mixtral's has too
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "sliding_window", "attention_dropout", "rope_parameters", "dtype",
)  # fmt: skip


def mixtral_config(config) -> MixtralConfig:
    """Return the config of the stock Mixtral equivalent to an upcycled model; raises ValueError if there is none."""
    moe, block = moe_config(config), config.moe_runtime
    layers = list(range(config.num_hidden_layers))
    rope = config.rope_parameters or {}
    checks = {
        "stage": (block["stage"], ("moe",)),
        "model_type of the base": (block["base_model_type"], BASES),
        "gate": (moe.gate, GATES),
        "router": (moe.router, ("linear",)),
        "noisy_gate": (moe.noisy_gate, (False,)),
        "layers": (block["layers"], (layers,)),
        "mlp_bias": (moe.bias, (False,)),
        "attention_bias": (getattr(config, "attention_bias", False), (False,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0, None)),
    }
    for name, (value, known) in checks.items():
        if value not in known:
            only = f"{name} is {value!r}, but Mixtral supports only {' or '.join(map(repr, known))}"
            others = f", xft export --to official, or start with --gate {GATES[0]}" if name == "gate" else ""
            raise ValueError(f"{only}. Use xft merge for a dense model{others}")
    fields = {name: getattr(config, name) for name in _SHARED if hasattr(config, name)}
    return MixtralConfig(
        **fields,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        # its loss pools the layers, ours has one for each; the coefficient is the closest equivalent
        router_aux_loss_coef=moe.balance_loss_coef if moe.balance_loss == "switch" else 0.0,
        architectures=["MixtralForCausalLM"],
    )


class Names:
    """Mixtral's names and layouts on disk."""

    def __init__(self, config: MixtralConfig):
        self.model = folders.skeleton(config)
        self.specs = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def whole(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the saved form of a tensor outside of the experts."""
        return folders.to_saved(self.model, {name: tensor})

    def row(self, name: str, expert: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the saved form of one expert's row [1, ...] of a stack."""
        found = folders.to_saved(self.model, {name: tensor})
        return {key.replace(".experts.0.", f".experts.{expert}."): value for key, value in found.items()}


def export_mixtral(
    folder: str | Path, out: str | Path, *, max_shard_size: int | str = SHARD, overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:  # fmt: skip
    """Write the upcycled model `folder` as a MixtralForCausalLM to the folder `out`, with its tokenizer."""
    check_out_dir(out, overwrite, [folder])
    config = folders.read_config(folder)
    target = mixtral_config(config)
    names, moe = Names(target), moe_config(config)
    with Checkpoint(folder) as source:
        # old checkpoints hold buffers that every model computes itself
        specs = {key: spec for key, spec in source.specs().items() if not key.endswith("rotary_emb.inv_freq")}
        tied = set(names.model.all_tied_weights_keys)
        want = {key: TensorSpec(shape, specs[key].dtype) for key, shape in names.specs.items() if key in specs}
        want |= {key: TensorSpec(shape, target.dtype) for key, shape in names.specs.items() if key not in {*specs, *tied}}
        check_keys(specs, want, source=source.path)
        total = sum(spec.nbytes for spec in specs.values())
        with CheckpointWriter(out, max_shard_size, overwrite=overwrite, expected_bytes=total) as writer:
            folders.write_config(writer, target)
            side_files = folders.copy_side_files(Path(folder), writer)
            job = Conversion(source, writer, progress, specs)
            for key in specs:
                if ".experts." in key:
                    rows = (names.row(key, e, source.get_rows(key, slice(e, e + 1))) for e in range(moe.num_experts))
                else:
                    rows = (names.whole(key, source.get(key)),)
                for saved in rows:
                    for name, tensor in saved.items():
                        job.add(name, tensor)
                job.read(key)
    layers = list(range(config.num_hidden_layers))
    return FolderReceipt(Path(out), moe, job.tensors, job.bytes, side_files, layers)
