"""UltraFuser: causal language models with one tokenizer, fused token by token by a gate.

UltraFuser (arXiv 2403.08281), Sec. 3.1:

    h_s = E_s(template_s(x), y_<i),  w = softmax_s(g(h_s))
    o = sum_s w_s o_s,               L = sum_i CE(o_i, y_i)

Symbols: `modules.fuser` (g), `ops.fusion` (o, L), `methods.ultrafuser.inputs` (templates). A
specialist's sequence is its prompt, padded on the left, and the answer; token i of the answer comes
from the state at P_s - 1 + i. Each specialist's inner model runs once, and its head never runs over
all positions (`methods.ultrafuser.heads`). Stage 1 trains the gate, with the specialists under
no_grad and in eval mode (`freeze_specialists`), stage 2 everything (`train_all`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from moe_runtime.config import check_choice
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.methods.ultrafuser.generation import FuserGeneration
from moe_runtime.methods.ultrafuser.heads import (
    device_of,
    gate_weight,
    head_of,
    logits_of,
    loss_of,
    run,
)
from moe_runtime.methods.ultrafuser.inputs import check_answers, check_prompts, check_template
from moe_runtime.methods.ultrafuser.specialists import (
    check_specialists,
    encoder_of,
    fingerprint,
    names_of,
    one_each,
    open_model,
    paths_of,
    tokenizers_of,
    trains,
    unchanged_keys,
)
from moe_runtime.modules.fuser import FuserGate

REDUCTIONS = ("mean", "sample")


@strict
class UltraFuserConfig(PreTrainedConfig):
    """transformers' config of an UltraFuser.

    Attributes:
        specialists: Name, path, template and model_type of each.
        gate: "mlp" or "linear".
        joint: Whether each specialist has a row of the gate's last layer.
        loss_reduction: "mean" or "sample".
        vocab_size: Number of ids that all specialists have.
        hidden_size: The largest of the specialists'.
    """

    model_type = "moe_runtime_ultrafuser"
    # what an evaluation loop should not gather
    keys_to_ignore_at_inference = ["gate_weight", "past_key_values"]

    specialists: list | None = None
    gate: str = "mlp"
    joint: bool = False
    loss_reduction: str = "mean"
    vocab_size: int = 0
    hidden_size: int = 0


@dataclass
class UltraFuserOutput(ModelOutput):
    """Result of UltraFuser.forward.

    Attributes:
        loss: [], with labels.
        logits: [B, R, V] float32, if asked for.
        gate_weight: [B, R, S] float32, without a gradient.
        past_key_values: The specialists' caches, in generation.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    gate_weight: torch.FloatTensor | None = None
    past_key_values: Any = None


class UltraFuser(FuserGeneration, PreTrainedModel, GenerationMixin):
    """S specialists and the gate that mixes their logits; a model for Trainer and generate().

    Args:
        specialists: Two or more causal language models that share a tokenizer, or their folders.
        templates: One per specialist or one for all: a text with {prompt} and optionally {system},
            a name in `TEMPLATES`, or "chat", the specialist's own. None is "chat" if it has one,
            else the plain prompt.
        tokenizer: One for all or one per specialist; None reads the folders'. Their common ids must
            agree, and vocabularies are cut to these.
        gate: "mlp" (App. A) or "linear" (Sec. 3).
        joint: Whether each specialist has a row of the gate's last layer; required for several
            hidden sizes.
        names: Of the specialists; None uses the folders' names.
        loss_reduction: "mean" over tokens, or "sample", the paper's: the sum over tokens and the
            mean over samples.
        dtype: Of specialists that are loaded from folders.

    Raises:
        ValueError: If the specialists cannot be fused, such as for other tokenizers or heads.

    Example:
        >>> fuser = UltraFuser(["prose", "code"], templates=["ultralm", "codellama"])
        >>> batch = fuser.encode(["What is 2 + 3?"], ["5"])
        >>> fuser.freeze_specialists()(**batch).loss.backward()  # stage 1
    """

    config_class = UltraFuserConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(
        self,
        specialists: Sequence[PreTrainedModel | str | os.PathLike],
        templates: str | Sequence[str] | None = None,
        *,
        tokenizer: Any = None,
        gate: str = "mlp",
        joint: bool = False,
        names: Sequence[str] | None = None,
        loss_reduction: str = "mean",
        dtype: str | torch.dtype = "auto",
    ):
        check_choice("loss_reduction", loss_reduction, REDUCTIONS)
        check_specialists(specialists)
        paths = paths_of(specialists)
        names = names_of(specialists, names)
        templates = one_each("templates", templates, len(names))
        tokenizers = tokenizers_of(specialists, one_each("tokenizer", tokenizer, len(names)))
        models = [open_model(one, dtype=dtype) for one in specialists]
        heads = [head_of(model, name) for model, name in zip(models, names, strict=True)]
        vocab_size = min(head.linear.out_features for head in heads)
        hidden_sizes = [head.linear.in_features for head in heads]
        encoder = encoder_of(tokenizers, templates, names, vocab_size)
        if encoder:
            templates = encoder.templates
        else:
            templates = tuple(template and check_template(template) for template in templates)
        described = []
        for s, model in enumerate(models):
            described.append(
                {
                    "name": names[s],
                    "path": paths[s],
                    "template": templates[s],
                    "model_type": model.config.model_type,
                }
            )
        super().__init__(
            UltraFuserConfig(
                specialists=described,
                gate=gate,
                joint=joint,
                loss_reduction=loss_reduction,
                vocab_size=vocab_size,
                hidden_size=max(hidden_sizes),
            )
        )
        self.specialists = nn.ModuleList(models)
        self.gate = FuserGate(
            hidden_sizes, kind=gate, joint=joint, device=device_of(heads[0].linear)
        )
        self.names = names
        self.templates = templates
        self.encoder = encoder
        self._heads = heads
        self.fingerprints = [fingerprint(model) for model in models]
        # loaded from their folders just now, so their weights need no comparison
        self.opened = {s for s, one in enumerate(specialists) if not isinstance(one, nn.Module)}
        self.touched: set[int] = set()  # specialists that have been run for a gradient
        # what transformers expects; its post_init would initialize the specialists again
        self._keys_to_ignore_on_save = set()
        self.all_tied_weights_keys = {}
        no_split = set()
        for s, model in enumerate(models):
            prefix = f"specialists.{s}."
            self._keys_to_ignore_on_save |= {prefix + key for key in model.state_dict()}
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            for name, twin in tied.items():
                self.all_tied_weights_keys[prefix + name] = prefix + twin
            no_split |= set(model._no_split_modules or ())
        self._no_split_modules = sorted(no_split)
        self._collect_settings()

    def get_input_embeddings(self) -> None:
        """Return None: each specialist has its own. accelerate asks under FSDP2."""

    @property
    def hf_device_map(self) -> dict[str, str]:
        """The parts' devices, in accelerate's format; as on any model, absent if all are on one
        device.

        Trainer then leaves them in place, and accelerate refuses to copy the model to several
        processes.
        """
        places = {"gate": str(self.gate.score.weight.device)}
        for s, model in enumerate(self.specialists):
            places[f"specialists.{s}"] = str(device_of(model.get_input_embeddings()))
        if len(set(places.values())) == 1:
            raise AttributeError("hf_device_map")
        return places

    def freeze_specialists(self) -> "UltraFuser":
        """Train only the gate (stage 1); the specialists run frozen, without gradients or
        dropout.
        """
        self.specialists.requires_grad_(False)
        self.gate.requires_grad_(True)
        return self.train(self.training)

    def train_all(self) -> "UltraFuser":
        """Train the gate and the specialists (stage 2): all floating-point parameters."""
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return self.train(self.training)

    def train(self, mode: bool = True) -> "UltraFuser":
        """Set the mode as nn.Module does; a specialist without trainable parameters stays in eval
        mode.
        """
        super().train(mode)
        for model in self.specialists:
            if not trains(model):
                model.eval()
        return self

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Return whether Trainer may pass the number of tokens of a step; a mean over samples is
        divided by Trainer.
        """
        return self.config.loss_reduction == "mean"

    def forward(
        self,
        prompt_ids: Sequence[torch.Tensor] | None = None,
        prompt_mask: Sequence[torch.Tensor] | None = None,
        response_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        want_logits: bool = False,
        reduction: str | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        backend: str | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> UltraFuserOutput:
        """Compute the loss of answers, or the next token's logits.

        Specialists may be on different devices; the output is on the first's.

        Args:
            prompt_ids: S tensors [B, P_s], padded left or right.
            prompt_mask: S tensors [B, P_s], 0 on padding.
            response_ids: [B, R], padded right.
            labels: [B, R], -100 on padding.
            input_ids: [B, n], the answers so far, in place of response_ids, for generate().
            attention_mask: Ignored.
            past_key_values: The specialists' caches.
            use_cache: Whether to return caches.
            want_logits: Whether to return logits [B, R, V].
            reduction: None is the config's loss_reduction; or "sum", or "none" for a loss [B, R].
            num_items_in_batch: Divides the sum, if given.
            backend: Of the loss: "torch" or "triton"; None selects the default for the device.
            return_dict: False returns a tuple.

        Returns:
            The loss and the gate's weights; with `input_ids` logits [B, 1, V].
        """
        if input_ids is not None:
            out = self._next_token(prompt_ids, prompt_mask, input_ids, past_key_values)
        else:
            prompts = self._prompts(prompt_ids, prompt_mask)
            items = num_items_in_batch
            reduction = "sum" if items is not None else reduction or self.config.loss_reduction
            out = self._answers(prompts, response_ids, labels, want_logits, reduction, backend)
            if out.loss is not None and items is not None:
                if isinstance(items, torch.Tensor):
                    items = items.to(out.loss.device)
                out.loss = out.loss / items
        return out if return_dict is not False else out.to_tuple()

    def _prompts(self, ids, mask) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each specialist's prompts, padded on the left, and their masks; raises ValueError
        unless they fit.
        """
        return check_prompts(ids, mask, len(self.specialists))

    def _answers(
        self, prompts, response_ids, labels, want_logits, reduction, backend
    ) -> UltraFuserOutput:
        check_answers(response_ids, len(prompts[0][0]))
        needs_labels = self.training and torch.is_grad_enabled() and not want_logits
        shape = None if labels is None else labels.shape
        if shape != response_ids.shape and (shape is not None or needs_labels):
            raise ValueError(
                f"labels must have the shape of response_ids, {tuple(response_ids.shape)}, in "
                f"training, but got {shape and tuple(shape)}. A Trainer drops labels unless "
                "label_smoothing_factor=0"
            )
        hidden = []
        for s, (model, (ids, mask)) in enumerate(zip(self.specialists, prompts, strict=True)):
            wants_gradient = torch.is_grad_enabled() and trains(model)
            if wants_gradient:
                self.touched.add(s)
            with torch.set_grad_enabled(wants_gradient):
                state = run(model, ids, mask, response_ids)
                # the state before each token of the answer
                hidden.append(state[:, ids.shape[1] - 1 : -1])
        loss = weight = logits = None
        if labels is not None:
            labels = labels.to(self.gate.score.weight.device)
            loss, weight = loss_of(
                self.gate, self._heads, hidden, labels, reduction=reduction, backend=backend
            )
        if labels is None or want_logits:
            gate = gate_weight(self.gate, hidden)
            logits = logits_of(self._heads, hidden, gate) if want_logits else None
            weight = gate.detach()
        return UltraFuserOutput(loss=loss, logits=logits, gate_weight=weight)

    def _next_token(self, prompt_ids, prompt_mask, input_ids, caches) -> UltraFuserOutput:
        of_models = caches.caches if caches is not None else []
        # with non-empty caches, generate() has already passed these prompts
        if of_models and of_models[0].get_seq_length():
            prompts = zip(prompt_ids, prompt_mask, strict=True)
        else:
            prompts = self._prompts(prompt_ids, prompt_mask)
        of_models = of_models or [None] * len(self.specialists)
        hidden = []
        for model, (ids, mask), cache in zip(self.specialists, prompts, of_models, strict=True):
            hidden.append(run(model, ids, mask, input_ids, cache)[:, -1:])
        weight = gate_weight(self.gate, hidden)
        logits = logits_of(self._heads, hidden, weight)
        return UltraFuserOutput(logits=logits, gate_weight=weight.detach(), past_key_values=caches)

    def encode(
        self,
        prompts: Sequence,
        responses: Sequence[str] | None = None,
        *,
        system: str | None = None,
        end: bool = True,
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return forward's and generate's inputs for prompts, texts or chats, and their answers:
        `Encoder.batch`.
        """
        if self.encoder is None:
            raise ValueError("The fuser has no tokenizer. Pass tokenizer, or folders that have one")
        return self.encoder.batch(prompts, responses, system=system, end=end)

    def save_pretrained(
        self,
        save_directory: StrPath,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint for Trainer to resume from: the gate, and the specialists that have
        changed.

        `ultrafuser.save` writes the folder that `load` reads.
        """
        self._keys_to_ignore_on_save = unchanged_keys(self)
        # a given state dict is Trainer's, and stays complete
        state_dict = None if state_dict is None else dict(state_dict)
        kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, state_dict=state_dict, **kwargs)
