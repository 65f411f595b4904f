"""TRL's SFTTrainer for upcycled and mergeable models, and `moe-runtime train`: TRL's SFT command
with additional flags.
"""

import functools
import math
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    TrainerCallback,
    dynamic_module_utils,
)
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import is_torch_bf16_gpu_available

from moe_runtime.config import check_choice, shown
from moe_runtime.hf.common.loading import load
from moe_runtime.hf.common.sources import check_source, is_id
from moe_runtime.hf.dropin.balance import routers_of
from moe_runtime.hf.dropin.experts import register
from moe_runtime.hf.dropin.layers import routed_layers
from moe_runtime.hf.dropin.parallel import shard_experts
from moe_runtime.hf.models.folders import read_config, skeleton
from moe_runtime.hf.models.hub import UNKNOWN_OWNER, model_card
from moe_runtime.hf.models.modeling import register_auto_classes
from moe_runtime.hf.models.prediction import keep_prediction
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.ranks import check_ep_size, expert_mesh
from moe_runtime.hf.training.saving import last_whole_checkpoint, stopping_with_a_checkpoint
from moe_runtime.hf.training.trainer import ROW_ID, _MoETrainer
from moe_runtime.io import console
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import atomic_write_text, contents_of
from moe_runtime.io.prompts import TRAIN_ON
from moe_runtime.io.rows import encode, in_form, layout_of, read_rows, require
from moe_runtime.io.yaml_files import read_yaml

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
)
PROG = "moe-runtime train"
HELP = {
    "usage": f"{PROG} --model MODEL --data DATA --output_dir FOLDER [OPTIONS]",
    "description": (
        "Tune a dense or MoE model with TRL's SFT command. The first options are ours, the others "
        "those of `trl sft`; --config FILE reads them from a YAML file, and those of the command "
        "line win; --json prints the result as one JSON object, and everything else to stderr."
    ),
    "epilog": f"Example: {PROG} --model llama-1b-moe --data pairs.jsonl --output_dir tuned",
}


@dataclass
class TrainArguments:
    """Additional flags of `moe-runtime train`."""

    model: str | None = HfArg(
        default=None, help="folder or Hub id; the same as --model_name_or_path"
    )
    data: str | None = HfArg(
        default=None,
        help="a .jsonl, .json or .parquet file, a folder of them, or the id of a data set",
    )
    eval_data: str | None = HfArg(default=None, help="as --data, for --eval_strategy")
    router_stats: bool = HfArg(
        default=True, help="log the experts' load; router_stats.csv in output_dir"
    )
    train_on: str = HfArg(
        default="assistant",
        help="the assistant's turns (of a pair, the completion), or all",
        metadata={"choices": TRAIN_ON},
    )
    distill: str | None = HfArg(
        default=None,
        help="folder or Hub id of a teacher, whose predictions are learned instead of the labels",
    )
    freeze_routers: bool = HfArg(default=False, help="train everything but the routers")
    ep_size: int = HfArg(default=1, help="processes to shard each layer's experts over")
    stop_on_nan: bool = HfArg(default=True, help="stop at a loss that is NaN or infinite")
    resume: bool = HfArg(
        default=False, help="resume from the newest complete checkpoint in --output_dir"
    )
    overwrite: bool = HfArg(
        default=False, help="replace the model and the checkpoints in --output_dir"
    )


def parse(trl: Any, argv: Sequence[str] | None) -> tuple:
    """Parse flags and config file with TRL's parser; bf16 stays TRL's default only if the device
    supports it.

    Raises ValueError for unknown flags and an invalid config file.
    """
    types = (
        TrainArguments,
        trl.ScriptArguments,
        trl.SFTConfig,
        trl.ModelConfig,
        trl.DatasetMixtureConfig,
    )
    parser = trl.TrlParser(types, prog=PROG, **HELP)
    parser.set_defaults(
        # PEFT rejects any other value on the experts of stock models
        lora_dropout=0.0,
        output_dir="",  # transformers would write to ./trainer_output
    )
    if not is_torch_bf16_gpu_available():
        parser.set_defaults(bf16=False)
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True)
    if not sys.stderr.isatty():
        parser.set_defaults(disable_tqdm=True)  # `_pace` reports a few lines instead
    argv = _with_config(list(sys.argv[1:] if argv is None else argv))
    with warnings.catch_warnings():
        # TRL's own default, under a name that transformers has removed
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        return parser.parse_args_and_config(argv)


def _with_config(argv: list[str]) -> list[str]:
    """Return the arguments with --config FILE as two words, as TRL expects; raises ValueError for a
    file without options.
    """
    words = []
    for word in argv:
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    if "--config" in words:
        path = Path(*words[words.index("--config") + 1 :][:1])
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ValueError(
                f"Config {str(path)!r} must have one `name: value` per option, but is "
                f"{shown(values)}"
            )
    return words


class _MoESFTTrainer(_MoETrainer):
    """TRL's SFTTrainer for upcycled and mergeable models, which adds the layers' balance losses and
    logs the loss parts.

    TRL runs the inner model and computes the head itself, so the loss of our model class is not
    used. Examples in a layout of io.rows are encoded there, as in every other command; `train_on`
    is one of TRAIN_ON. With a `teacher`, the loss is the forward KL divergence of its predictions,
    at temperature 1, over the tokens that have labels. `freeze_routers` trains everything else.
    """

    def __init__(
        self,
        model,
        args=None,
        *more,
        train_on: str = "assistant",
        teacher=None,
        freeze_routers: bool = False,
        **kwargs,
    ):
        check_choice("train_on", train_on, TRAIN_ON)
        if getattr(args, "completion_only_loss", None) is False:
            train_on = "all"
        self._train_on = train_on
        if args is not None and _layout(kwargs.get("train_dataset")):
            args.assistant_only_loss = False  # we provide the masks
        super().__init__(model, args, *more, **kwargs)
        self._caught: list[torch.Tensor] | None = None
        if freeze_routers:
            freeze(self.model)
        self._teacher = None
        if teacher is not None:
            self._teacher = teacher.eval().requires_grad_(False).to(self.args.device)
        inner = self.model
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        inner.base_model.register_forward_hook(self._catch)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags=None
    ) -> None:
        """Write our model card to the output folder, in place of TRL's, once the folder has a
        model.
        """
        folder = Path(self.args.output_dir)
        has_model = any(
            (folder / name).is_file() for name in ("config.json", "adapter_config.json")
        )
        if not self.is_world_process_zero() or not has_model:
            return
        repo = self.args.hub_model_id or f"{UNKNOWN_OWNER}/{folder.resolve().name}"
        if dataset_name is not None and not is_id(dataset_name):
            dataset_name = None  # a local file
        card = model_card(
            folder,
            repo,
            command=self.card_command,
            base=self.card_base,
            dataset=dataset_name,
            facts={"steps": self.state.global_step, "trl": require("trl").__version__},
        )
        atomic_write_text(folder / "README.md", card)

    # for the card: the command line, and the folder or id of the model that was tuned
    card_command = ""
    card_base = None

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, *more):
        layout = _layout(dataset)
        # otherwise TRL's own encoding is requested
        ours = formatting_func is None and args.dataset_text_field == "text"
        if layout and ours and isinstance(processing_class, PreTrainedTokenizerBase):
            workers = {}
            if not isinstance(dataset, IterableDataset):
                workers["num_proc"] = args.dataset_num_proc
            with args.main_process_first(local=True):
                dataset = dataset.map(
                    _masked,
                    with_indices=True,
                    fn_kwargs={
                        "tokenizer": processing_class,
                        "layout": layout,
                        "train_on": self._train_on,
                    },
                    remove_columns=list(layout),
                    **workers,
                )
        return super()._prepare_dataset(
            dataset, processing_class, args, packing, formatting_func, *more
        )

    def _catch(self, module, args, out) -> None:
        balance_loss = getattr(out, "balance_loss", None)
        if self._caught is not None and balance_loss is not None:
            self._caught.append(balance_loss)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return TRL's loss plus the layers' balance losses."""
        self._caught = []
        try:
            if self._teacher is None:
                result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            else:
                result = self._taught(model, inputs, num_items_in_batch)
                result = result if return_outputs else result[0]
            caught = self._caught[:1]  # TRL may run the model again for its metrics
        finally:
            self._caught = None
        lm_loss = result[0] if return_outputs else result
        loss = lm_loss
        balance_loss = torch.zeros_like(lm_loss.detach())
        if caught:
            share = self._share(inputs, num_items_in_batch, lm_loss.device)
            balance_loss = self._ranks(num_items_in_batch) * share * caught[0].to(lm_loss.device)
            loss = lm_loss + balance_loss
        if caught or self.aux_loss_enabled:
            pooled = self._pooled(num_items_in_batch)
            self._note(lm_loss - pooled, balance_loss + pooled, inputs, num_items_in_batch)
        return (loss, result[1]) if return_outputs else loss

    def _taught(self, model, inputs, num_items_in_batch) -> tuple:
        """Return the mean divergence from the teacher's predictions, and the model's output."""
        inputs = {name: value for name, value in inputs.items() if name != "use_cache"}
        labels = inputs.pop("labels")
        out = model(**inputs, use_cache=False)
        with torch.no_grad():
            expected = self._teacher(**inputs, use_cache=False).logits
        total = divergence(out.logits, expected, labels)
        count = (labels[:, 1:] != -100).sum()
        if num_items_in_batch is not None:
            count = num_items_in_batch / self._ranks(num_items_in_batch)
        return total / count, out

    def _pooled(self, num_items_in_batch) -> float:
        """Return the pooled loss that TRL has just added, which it logs as `aux_loss` without its
        coefficient.
        """
        if not self.aux_loss_enabled:
            return 0.0
        mode = "train" if self.model.training else "eval"
        pooled = self.router_aux_loss_coef * self._metrics[mode]["aux_loss"][-1]
        if num_items_in_batch is not None:
            pooled = pooled / self.current_gradient_accumulation_steps
        return pooled


def freeze(model: torch.nn.Module) -> None:
    """Freeze the routers of a model, ours and transformers'."""
    layers = routed_layers(model).values()
    routers = [layer.module for layer in layers if not layer.is_stock]
    routers += [router for router, _ in routers_of(model, [x for x in layers if x.is_stock])]
    for router in routers:
        router.requires_grad_(False)


def divergence(logits: torch.Tensor, expected: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over the label tokens of KL(softmax(expected) || softmax(logits)); logits
    [B, S, V], labels [B, S] with -100 for other tokens.
    """
    student = logits[:, :-1].float().log_softmax(-1)
    teacher = expected[:, :-1].to(student.device).float().log_softmax(-1)
    kl = torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return kl[labels[:, 1:] != -100].sum()


def _layout(dataset) -> tuple[str, ...]:
    """Return the layout of a dataset; () if TRL prepares it: ids, images, other columns."""
    first = next(iter(dataset or ()), {})
    if {"input_ids", "image", "images"} & first.keys():
        return ()
    return layout_of(first)


def _masked(row, number: int, tokenizer, layout: tuple[str, ...], train_on: str) -> dict:
    """Return the ids of a row, and as TRL's assistant_masks which of them are trained."""
    ids, labels = encode(
        tokenizer,
        in_form(row, layout, f"example {number + 1}", train_on == "assistant"),
        train_on=train_on,
    )
    return {"input_ids": ids, "assistant_masks": [int(label != -100) for label in labels]}


@functools.cache
def _sft_trainer() -> type:
    """Create MoESFTTrainer, whose base class comes from an optional extra."""
    return type(
        "MoESFTTrainer",
        (_MoESFTTrainer, require("trl").SFTTrainer),
        {"__module__": __name__, "__doc__": _MoESFTTrainer.__doc__},
    )


def __getattr__(name: str):
    if name == "MoESFTTrainer":
        return _sft_trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train_command(argv: list[str] | None = None) -> Path:
    """Fine-tune a model folder with TRL's SFT command and MoESFTTrainer; return the folder it was
    saved to.

    Accepts all flags of `trl sft`, also from the YAML file of --config, and those of
    TrainArguments. Raises ValueError for a model without tokenizer, unreadable data, unknown flags,
    and an output folder that is not empty, unless it is resumed or overwritten.
    """
    trl = require("trl")
    # never prompt whether to run a folder's code for --chat_template_path
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    ours, script, args, model, mixture = parse(trl, argv)
    name = ours.model or model.model_name_or_path
    if args.completion_only_loss is False:  # TRL's name of --train_on all
        ours.train_on = "all"
    # True, the last checkpoint, can only be spelled on a command line
    resume = args.resume_from_checkpoint or ours.resume or None
    if str(resume).lower() == "true":
        resume = True
    _check(name, ours, script, args, model, mixture)
    check = functools.partial(_check_output, name, ours, args, resume, adapter=model.use_peft)
    check()
    with ranks.sole_training(args.output_dir, check):
        with console.watched("preparing the training"):
            trainer = _trainer(trl, name, ours, script, args, model, mixture)
        trainer.card_base, trainer.card_command = name, _command(argv)
        _train(trainer, ours, script.dataset_name, resume)
        return Path(args.output_dir)


def _train(trainer, ours: TrainArguments, dataset: str | None, resume: str | bool | None) -> None:
    """Train, save the model to the trainer's output folder, and upload it if asked to."""
    args = trainer.args
    if ours.overwrite and args.should_save:
        _remove_checkpoints(args.output_dir)
    trainer.accelerator.wait_for_everyone()
    try:
        with stopping_with_a_checkpoint(trainer), _pace(trainer):
            result = trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt as stop:
        stop.kept = _kept(args.output_dir)
        raise
    trainer.save_model(args.output_dir)
    if args.should_save and Path(args.output_dir, "config.json").is_file():
        kept = keep_prediction(trainer.card_base, args.output_dir)
        if kept:
            trainer.accelerator.print(
                f"copied {len(kept)} tensors of multi-token prediction, which are not trained"
            )
    trainer.create_model_card(dataset_name=ours.data or dataset)
    trainer.accelerator.print(
        f"saved {type(trainer.model).__name__} to {args.output_dir} after step "
        f"{result.global_step}, mean training loss {result.training_loss:.4f}"
    )
    guess = math.log(trainer.model.config.get_text_config().vocab_size)
    if not result.training_loss <= 2 * guess:
        trainer.accelerator.print(
            f"warning: the training diverged, as a uniform guess has loss {guess:.2f}. Lower "
            f"--learning_rate, which is {args.learning_rate}",
            file=sys.stderr,
        )
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=ours.data or dataset)
    if hasattr(trainer, "end"):  # from transformers 5.18 on
        trainer.end()


def _command(argv: Sequence[str] | None) -> str:
    """Return the command line for a model card, with the names of local files in place of their
    paths.
    """
    words = ["moe-runtime", "train"]
    for word in sys.argv[2:] if argv is None else argv:
        words.append(Path(word).name if os.path.exists(word) else word)
    return shlex.join(words)


@contextmanager
def _pace(trainer) -> Iterator[None]:
    """Report speed and remaining time in logs, where transformers' progress bar is not shown."""

    class Pace(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            update(state.global_step, state.max_steps)

        on_train_begin = on_step_end  # steps from a checkpoint do not count for the pace

    with console.bar("training", shown=not sys.stderr.isatty()) as update:
        trainer.add_callback(Pace())
        yield


def _kept(folder: str) -> str:
    """Describe the checkpoints of an interrupted run, and how to resume it."""
    last = last_whole_checkpoint(folder)
    if last is None:
        return f"no checkpoint was written to {folder} yet"
    return f"{last} is the last checkpoint. Rerun with --resume to continue from it"


def _trainer(trl, name: str, ours: TrainArguments, script, args, model, mixture):
    """Read the data and build the MoESFTTrainer; TRL loads the model, as it knows the flags
    for it.
    """
    register_auto_classes()
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    } | (args.model_init_kwargs or {})
    if not (model.lora_target_modules or model.lora_target_parameters):
        model.lora_target_modules = "all-linear"  # PEFT has no default for MoE models
    if ours.freeze_routers and model.use_peft:
        raise ValueError("--freeze_routers is for full tuning: adapters of PEFT train no routers")
    train_rows, eval_rows = _load_rows(trl, ours, script, mixture, args.eval_strategy != "no")
    peft_config = trl.get_peft_config(model)
    teacher = _load_teacher(ours.distill, name, model.model_revision)
    try:
        if ours.ep_size > 1:
            name = _load_spread(name, ours.ep_size, args, peft_config)
            peft_config = None
        return _sft_trainer()(
            model=name,
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            quantization_config=trl.get_quantization_config(model),
            peft_config=peft_config,
            router_stats=ours.router_stats,
            stop_on_nan=ours.stop_on_nan,
            train_on=ours.train_on,
            teacher=teacher,
            freeze_routers=ours.freeze_routers,
        )
    except SafetensorError as error:
        raise ValueError(
            f"Cannot read the weights of model {name!r}: {error}. Download them again"
        ) from error


def _load_teacher(teacher: str | None, name: str, revision: str | None):
    """Load the model of --distill; raises ValueError if its vocabulary is not the student's."""
    if teacher is None:
        return None
    check_source(teacher, "Teacher")
    register()
    loaded = load(AutoModelForCausalLM, teacher, "distill", dtype="auto")
    student = load(AutoConfig, name, "Model", revision=revision)
    sizes = [one.get_text_config().vocab_size for one in (loaded.config, student)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"Teacher {teacher!r} has {sizes[0]} tokens, but model {name!r} has {sizes[1]}. Pass a "
            "teacher with the same tokenizer"
        )
    return loaded


def _load_spread(name: str, ep_size: int, args, peft_config):
    """Load the model as TRL does, add adapters, and keep each process's share of the experts."""
    settings = args.model_init_kwargs
    args.model_init_kwargs = None
    # TRL's default; never run a folder's code
    dtype = settings.pop("dtype") or "float32"
    _ = settings.pop("trust_remote_code")
    model = load(
        AutoModelForCausalLM, name, "model", dtype=getattr(torch, dtype, dtype), **settings
    )
    if peft_config is not None:
        model = require("peft").get_peft_model(model, peft_config)
    shard_experts(model, expert_mesh(ep_size))
    return model


def _check(name: str | None, ours: TrainArguments, script, args, model, mixture) -> None:
    """Raise ValueError for a model without files or tokenizer, and no data."""
    path = Path(name or "")
    needs_eval_data = ours.eval_data is None and args.eval_strategy != "no"
    reason = None
    if name is None:
        reason = "No model is given. Pass a folder or a Hub id with --model"
    elif not path.exists():
        check_source(name, "Model")
    elif not (path / "config.json").is_file():
        reason = f"Model {name!r} has no config.json. Pass a folder written by save_pretrained"
    elif not any((path / file).is_file() for file in TOKENIZER_FILES):
        reason = (
            f"Model {name!r} has no tokenizer. Copy that of the base model: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({name!r})"
        )
    if reason is None and ours.data is None and not (script.dataset_name or mixture.datasets):
        reason = "No data is given. Pass a file, a folder or the id of a dataset with --data"
    elif reason is None and ours.data is not None and needs_eval_data:
        reason = "No evaluation data is given. Pass --eval_data, or --eval_strategy no"
    if reason is not None:
        raise ValueError(reason)
    if not path.exists() and not args.trust_remote_code:
        load(AutoConfig, name, "Model", revision=model.model_revision)
    if path.exists() and not args.trust_remote_code:
        config = read_config(name)
        if not is_deepspeed_zero3_enabled():  # ZeRO-3 would shard the skeleton
            skeleton(config)
        Checkpoint(name)  # rejects pickles and paths outside the folder
    check_ep_size(ours.ep_size, name)


def _check_output(
    name: str, ours: TrainArguments, args, resume: str | bool | None, adapter: bool
) -> None:
    """Raise ValueError unless --output_dir is new, empty, to be overwritten, or holds the
    checkpoint to resume from.

    An adapter may be written into the folder of its model.
    """
    out = Path(args.output_dir).resolve()
    source = Path(name).resolve()
    last = last_whole_checkpoint(args.output_dir)
    checkpoint = last if resume is True else resume
    resumes = checkpoint is not None and Path(checkpoint).resolve().is_relative_to(out)
    into_its_model = adapter and source == out
    was_trained = [*out.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *out.glob("adapter_config.json")]
    may_be_full = resumes or ours.overwrite or (into_its_model and not was_trained)
    reason = None
    if not args.output_dir:
        reason = "is not a folder. Pass --output_dir FOLDER"
    elif out.exists() and not out.is_dir():
        reason = "is a file. Pass a new or empty folder"
    elif resume is not None and ours.overwrite:
        reason = "cannot be both resumed and overwritten. Pass either --resume or --overwrite"
    elif resume is True and last is None:
        reason = "has no complete checkpoint. Run without --resume"
    elif source.exists() and source.is_relative_to(out) and not into_its_model:
        verb = "is" if source == out else "contains"
        reason = f"{verb} {name}, the model to train. Pass another folder"
    elif not may_be_full and out.is_dir() and contents_of(out):
        reason = (
            "already exists. Pass a new or empty folder, or --overwrite to replace its model and "
            "checkpoints"
        )
        if last:
            reason += f", or --resume to continue from {last.name}"
    if reason is not None:
        raise ValueError(f"output_dir {args.output_dir or None} {reason}")


def _remove_checkpoints(folder: str) -> None:
    """Remove the checkpoints of an earlier run, so that none is resumed; its model stays until it
    is replaced.
    """
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(path)


def _load_rows(trl, ours: TrainArguments, script, mixture, evaluates: bool) -> tuple:
    """Return the training and evaluation examples: from --data, else from TRL's flags."""
    held_out = None
    if ours.data is not None:
        answers = ours.train_on == "assistant"
        rows = read_rows(ours.data, answers=answers)
        rows = rows.add_column(ROW_ID, list(range(len(rows))))
        if evaluates:
            held_out = read_rows(ours.eval_data, answers=answers)
        return rows, held_out
    if mixture.datasets:
        sets = trl.get_dataset(mixture)
    else:
        sets = require("datasets").load_dataset(
            script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming
        )
    if evaluates:
        held_out = sets[script.dataset_test_split]
    return sets[script.dataset_train_split], held_out
