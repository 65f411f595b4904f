"""Extensions of transformers' Trainer and TRL's SFTTrainer: the parts of the loss, router
statistics, a stop at NaN.

    loss = lm_loss + balance_loss
    balance_loss = sum of the layers' balance losses + router_aux_loss_coef * transformers' pooled
    loss
                   or, with a trainer's option balance_loss, coef * the loss of
                   moe_runtime.hf.dropin.balance for a stock model

A layer's loss includes its coefficient. Over the micro-batches of a step it is a mean weighted by
label tokens (`hf.common.outputs.share_of_batch`), so it does not grow with gradient accumulation.
The loop, the optimizer, checkpoints and resumption are transformers' own. `check_rows` raises for
token ids outside the vocabulary before anything runs. MoESFTTrainer is in
`moe_runtime.hf.training.sft`.
"""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from moe_runtime.hf.common.outputs import share_of_batch
from moe_runtime.hf.common.sharded import local_part
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.balance import BalanceLoss, use_balance_loss
from moe_runtime.hf.dropin.experts import is_experts
from moe_runtime.hf.training import trainable, trained_files
from moe_runtime.hf.training.recording import MixingCallback, RouterStatsCallback
from moe_runtime.hf.training.saving import WholeSaves, hold_workers, last_whole_checkpoint
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import Router
from moe_runtime.ops.all_to_all import is_distributed

ROW_ID = "row_id"  # a column with row numbers, for errors about a batch


class _MoETrainer(WholeSaves):
    """Mixin of both trainers, placed before transformers' class.

    `router_stats` adds a RouterStatsCallback before the reporting callbacks, and a mergeable model
    gets a MixingCallback there. `stop_on_nan` stops at a loss that is NaN or infinite, before the
    optimizer step. For a stock MoE model, `balance_loss` ("per_layer" or "pooled") and
    `balance_loss_coef` are those of use_balance_loss, which stays active after the training.
    """

    def __init__(
        self,
        *args,
        stop_on_nan: bool = True,
        router_stats: bool = True,
        balance_loss: str | None = None,
        balance_loss_coef: float | None = None,
        **kwargs,
    ):
        self.balance_loss: BalanceLoss | None = None
        if balance_loss is not None:
            model = args[0] if args else kwargs.get("model")
            if not isinstance(model, torch.nn.Module):
                raise ValueError(
                    f"balance_loss {balance_loss!r} requires a loaded model, but got {model!r}"
                )
            # before the constructor of transformers' class, as TRL reads the config there
            self.balance_loss = use_balance_loss(model, balance_loss, balance_loss_coef)
        use_cache = _UseCache()
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), use_cache]
        super().__init__(*args, **kwargs)
        self.remove_callback(use_cache)
        if self._trains_spread() and all(
            is_distributed(p) for p in self.model.parameters() if p.requires_grad
        ):
            # sharded experts average their own gradients, and DDP raises for a model without other
            # trainable parameters
            self.accelerator.prepare_model = functools.partial(
                self.accelerator.prepare_model, evaluation_mode=True
            )
        self._passes_use_cache = use_cache.put_back()
        modules = list(self.model.modules())
        routers = [one for one in modules if isinstance(one, Router) or is_experts(one)]
        self._check(routers)
        self._check_place(self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        for rows in (self.train_dataset, self.eval_dataset):
            check_rows(self.model, rows, tokenizer)
        self.stop_on_nan = stop_on_nan
        # "train" or "eval": [lm_loss, balance_loss, weight] and the first step
        self._sums: dict[str, list] = {}
        self._row_ids: Tensor | None = None
        self._put_first(RouterStatsCallback, router_stats and bool(routers))
        is_mergeable = any(isinstance(module, MergedMLP) for module in modules)
        self._put_first(MixingCallback, is_mergeable)

    def _put_first(self, kind: type[TrainerCallback], add: bool) -> None:
        """Put the callback of this class, which adds to the logs, before those that report them."""
        callback = self.pop_callback(kind)
        if callback is None and add:
            callback = kind()
        if callback is not None:
            self.callback_handler.callbacks.insert(0, callback)

    def _check(self, routers: list[torch.nn.Module]) -> None:
        """Raise ValueError if the model cannot be trained or saved with these arguments."""
        args = self.args
        model = self.model
        trained_files.check_trains(model)
        training = self._training()
        is_mixed = training is not None and training.dtypes
        balanced = self.balance_loss is not None or any(
            r.config.balance_loss != "none" and r.config.balance_loss_coef
            for r in routers
            if isinstance(r, Router)
        )
        reason = None
        if args.n_gpu > 1:
            reason = (
                f"This process sees {args.n_gpu} GPUs, but must use one. Use accelerate launch or "
                "torchrun, or set CUDA_VISIBLE_DEVICES"
            )
        elif balanced and (self.label_smoother is not None or self.compute_loss_func is not None):
            reason = (
                f"label_smoothing_factor ({args.label_smoothing_factor}) must be 0 and "
                f"compute_loss_func ({self.compute_loss_func}) None with a balance loss, which "
                "they would omit"
            )
        elif getattr(self, "aux_loss_enabled", False) and not routers:
            reason = (
                "router_aux_loss_coef must be 0 for a model without routers, but got "
                f"{self.router_aux_loss_coef}"
            )
        elif is_mixed and not (args.bf16 or args.fp16):
            reason = (
                "bf16 is False, but the trained parameters have another dtype than the rest of "
                "the model. Pass bf16=True, or call esft.train_only without dtype"
            )
        elif args.save_strategy != "no" and trainable.is_guarded(model):
            reason = (
                f"save_strategy is {args.save_strategy.value!r}, but a checkpoint cannot hold "
                f"{type(model).__name__} with experts that train separately. Pass "
                "save_strategy='no' and save the adapter with esft.train_only"
            )
        if reason is not None:
            raise ValueError(reason)

    def _training(self) -> trained_files.TrainedParameters | None:
        return trained_files.training_of(self.model)

    def _check_place(self, folder: StrPath) -> None:
        """Raise ValueError for the folder of a whole model if only trained experts will be
        saved.
        """
        if self._training() is not None and self.args.should_save:
            trained_files.check_place(folder)

    def _ranks(self, num_items_in_batch) -> int:
        """Return Trainer's factor for a loss that is a sum over the tokens of all processes."""
        whole = self.args.average_tokens_across_devices and num_items_in_batch is not None
        return self.accelerator.num_processes // self.get_tp_size() if whole else 1

    def _share(self, inputs, num_items_in_batch, device):
        """Return `share_of_batch` of these inputs, also in a step without label tokens."""
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)
        return share_of_batch({**inputs, "num_items_in_batch": num_items_in_batch}, device)

    def _note(self, lm_loss: Tensor, balance_loss: Tensor, inputs, num_items_in_batch) -> None:
        """Add both parts to the sums for the next log, on the device, weighted as Trainer weights
        their loss.
        """
        mode = "train" if self.model.training else "eval"
        if mode == "eval":
            weight = float(inputs["labels"].shape[0])
        elif num_items_in_batch is None:
            weight = 1.0 / self.current_gradient_accumulation_steps
        else:
            weight = 1.0
        parts = torch.stack(
            [lm_loss.detach().float(), balance_loss.detach().float(), lm_loss.new_ones(()).float()]
        )
        sums, first = self._sums.get(mode, (0.0, self.state.global_step))
        self._sums[mode] = [sums + weight * parts, first]

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Log as transformers does, with the two parts of the loss."""
        losses = [key for key in logs if key.endswith("loss")]
        mode = "train" if "loss" in logs else "eval"
        sums = None
        if "train_loss" not in logs:
            sums, first = self._sums.pop(mode, (None, 0))
        if sums is not None and losses:
            lm_loss, balance_loss, weight = self.accelerator.gather(sums[None]).sum(0).tolist()
            if mode == "train":
                weight = (self.state.global_step - first) * self.accelerator.num_processes
            prefix = min(losses, key=len).removesuffix("loss")  # such as eval_
            logs[f"{prefix}lm_loss"] = lm_loss / weight
            logs[f"{prefix}balance_loss"] = balance_loss / weight
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Evaluate as transformers does, without losses recorded by an earlier predict()."""
        self._sums.pop("eval", None)
        return super().evaluate(*args, **kwargs)

    def training_step(self, model, inputs, *args, **kwargs) -> Tensor:
        """Run transformers' step; raise ValueError for a loss that is not finite, before the
        optimizer's.
        """
        loss = super().training_step(model, inputs, *args, **kwargs)
        # no further sync: by default Trainer reads each loss for its own NaN filter
        if self.stop_on_nan and not torch.isfinite(loss).all():
            raise ValueError(self._not_finite(f"loss is {loss.item()}"))
        return loss

    def _save_checkpoint(self, model, trial):
        """Save as transformers does, but never weights that are not finite, which would replace
        good checkpoints.
        """
        if self.stop_on_nan:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad and not local_part(parameter).isfinite().all():
                    raise ValueError(self._not_finite(f"{name} has NaN or infinite values"))
        super()._save_checkpoint(model, trial)

    def save_model(self, output_dir=None, _internal_call=False):
        """Save as transformers does; a model that trains some experts saves only those, never into
        a whole model's folder.
        """
        self._check_place(self.args.output_dir if output_dir is None else output_dir)
        if trained_files.training_of(self.model) is None or not (
            self.is_fsdp_enabled or trained_files.is_split(self.model)
        ):
            super().save_model(output_dir, _internal_call)
            return
        if _internal_call and self._trains_spread():
            self._write_spread("model", output_dir)
        # Trainer's own method would write parts, gather the whole model, or wait on one rank for
        # the others
        self._save(
            output_dir, state_dict=trained_files.gathered(self.model, keep=self.args.should_save)
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _not_finite(self, what: str) -> str:
        rows = ""
        if self._row_ids is not None:
            numbers = ", ".join(map(str, (self._row_ids + 1).tolist()))
            rows = f" in a batch of the examples {numbers}"
        last = last_whole_checkpoint(self.args.output_dir)
        return (
            f"{what} at step {self.state.global_step + 1}{rows}. Lower the learning rate, set "
            "max_grad_norm or check the data, then resume from "
            f"{last or 'the start, as no checkpoint was saved'}"
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, ROW_ID]))

    def get_train_dataloader(self):
        """Return transformers' data loader, whose batches keep the column row_id if there
        is one.
        """
        collator = self.data_collator
        if ROW_ID in (getattr(self.train_dataset, "column_names", None) or ()):
            self.data_collator = functools.partial(_collate_with_row_ids, collator)
        try:
            return hold_workers(super().get_train_dataloader())
        finally:
            self.data_collator = collator

    def get_eval_dataloader(self, *args, **kwargs):
        """Return transformers' data loader, whose workers ignore signals to the process group."""
        return hold_workers(super().get_eval_dataloader(*args, **kwargs))

    def _prepare_inputs(self, inputs):
        self._row_ids = inputs.pop(ROW_ID, None)
        inputs = super()._prepare_inputs(inputs)
        if self._passes_use_cache:
            return {"use_cache": self.args.use_cache, **inputs}
        return inputs


class _UseCache(TrainerCallback):
    """Restores the config's use_cache, which Trainer would overwrite for every folder saved later;
    batches get Trainer's.
    """

    model = None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        self.model = model
        if hasattr(model, "get_base_model"):
            self.model = model.get_base_model()
        self.value = getattr(getattr(self.model, "config", None), "use_cache", None)

    def put_back(self) -> bool:
        """Restore it if the model accepts use_cache as an argument, and return whether it does."""
        takes = (
            self.value is not None
            and "use_cache" in inspect.signature(self.model.forward).parameters
        )
        if takes:
            self.model.config.use_cache = self.value
        return takes


def _collate_with_row_ids(collator, rows: list[dict]):
    rows = [dict(row) for row in rows]
    ids = torch.tensor([row.pop(ROW_ID) for row in rows])
    batch = collator(rows)
    batch[ROW_ID] = ids
    return batch


class MoETrainer(_MoETrainer, Trainer):
    """transformers' Trainer for upcycled, mergeable and stock MoE models.

    It logs `lm_loss` and `balance_loss` separately, and its checkpoints can be resumed with sharded
    experts.

    Args:
        args: Trainer's positional arguments.
        stop_on_nan: Whether to stop at a loss that is NaN or infinite.
        router_stats: Whether to log the experts' load, with router_stats.csv in the output folder.
        balance_loss: For a stock model: "per_layer" or "pooled", in place of its own auxiliary
            loss.
        balance_loss_coef: Weight of this loss.
        kwargs: Trainer's other arguments.
    """

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss, which includes the balance losses."""
        loss, out = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        lm_loss = getattr(out, "lm_loss", None)
        ranks = self._ranks(num_items_in_batch)
        if lm_loss is not None:
            share = self._share(inputs, num_items_in_batch, loss.device)
            coef = 1.0 if self.balance_loss is None else self.balance_loss.coef
            self._note(
                ranks * lm_loss, ranks * share * coef * out.aux_loss, inputs, num_items_in_batch
            )
        return (loss, out) if return_outputs else loss


def check_rows(model: torch.nn.Module, rows: Any, tokenizer: Any = None) -> None:
    """Raise ValueError for an id in `input_ids` outside the model's embedding.

    `rows` are a datasets.Dataset, or several of them by name; other rows are not checked.
    """
    parts = rows.values() if isinstance(rows, Mapping) else [rows]
    for part in parts:
        is_stored = hasattr(part, "with_format") and not isinstance(part, IterableDataset)
        if is_stored and "input_ids" in (part.column_names or ()):
            check_ids(model, _largest_of_each(part), tokenizer)


def _largest_of_each(rows: Any) -> Iterator[int]:
    """Yield the largest id of each batch of rows, which may not fit into memory."""
    from pyarrow import compute, types

    for table in rows.select_columns("input_ids").with_format("arrow").iter(4096):
        column = table["input_ids"]
        if types.is_nested(column.type):
            column = compute.list_flatten(column, recursive=True)
        if types.is_integer(column.type):
            yield compute.max(column).as_py() or 0


def check_ids(model: torch.nn.Module, ids: Iterable[int], tokenizer: Any = None) -> None:
    """Raise ValueError for a token id outside the model's embedding."""
    size = _size(model)
    largest = max(ids, default=0)
    if size is None or largest < size:
        return
    token = str(largest)
    rows = largest + 1
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        text = tokenizer.convert_ids_to_tokens(largest)
        if text is not None:
            token = f"{largest} ({text!r})"
            rows = max(rows, len(tokenizer))
    raise ValueError(
        f"Token ids must be below vocab_size ({size}), but got {token}. Use the model's tokenizer, "
        f"or enlarge the model: model.resize_token_embeddings({rows})"
    )


def _size(model) -> int | None:
    """Return the number of rows of a model's embedding, or None if it is unknown."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return None
