"""generate() for several language models: each has its own cache and prompt, and all share the next
token.

UltraFuser (arXiv 2403.08281), App. B: per token S forward passes; the logits are mixed, one token
is drawn and given to all. transformers' loop sees only the answer: logits processors, stopping
criteria and the caller get the ids after the prompts. The loop grows, prunes and copies the caches
together, row by row (beams, several sequences).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.generation import GenerationMode

from moe_runtime.methods.ultrafuser.heads import device_of
from moe_runtime.methods.ultrafuser.inputs import check_answers

# arguments of transformers' generate that ours sets
_TAKEN = {"inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values"}


class FuserCache(Cache):
    """One cache per specialist, exposing the layers of all; empty without caching."""

    def __init__(self, caches: Sequence[Cache]):
        self.caches = list(caches)
        super().__init__(layers=[])

    @property
    def layers(self) -> list:
        """Return the layers of all caches, which grow while the models run."""
        return [layer for cache in self.caches for layer in cache.layers]

    @layers.setter
    # by Cache.__init__; the layers belong to the specialists' caches
    def layers(self, value: list) -> None:
        pass

    @property
    def is_compileable(self) -> bool:
        """Return False: transformers cannot compile the decoding step, as the caches grow."""
        return False


class FuserGeneration(GenerationMixin):
    """Mixin that adapts transformers' generation loop to several prompts."""

    _supported_generation_modes = [
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    ]

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[torch.Tensor] | None = None,
        prompt_mask: Sequence[torch.Tensor] | None = None,
        response_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continue the answers to prompts, S of [B, P_s]; returns the answers' ids [B, n], or what
        transformers returns.

        `response_ids` [B, n] are beginnings of the answers, without padding; the result starts with
        them. `kwargs` are transformers': max_new_tokens, do_sample, num_beams, streamer, ...
        """
        settings = kwargs.get("generation_config") or self.generation_config
        odd = sorted(_TAKEN & kwargs.keys())
        if odd:
            raise ValueError(
                f"{odd[0]} is not supported, as each specialist has a separate prompt and state. "
                "Pass prompt_ids and prompt_mask from fuser.encode"
            )
        prompts = self._prompts(prompt_ids, prompt_mask)
        rows = len(prompts[0][0])
        device = self.gate.score.weight.device
        start = prompts[0][0].new_empty(rows, 0) if response_ids is None else response_ids
        check_answers(start, rows)
        if labels is not None and (labels == -100).any():
            raise ValueError(
                "response_ids must not be padded. Pass beginnings of the same length, or one "
                "answer at a time"
            )
        caches = []
        if kwargs.pop("use_cache", settings.use_cache) is not False:
            for model in self.specialists:
                caches.append(DynamicCache(config=model.config.get_text_config(decoder=True)))
        ids = []
        masks = []
        for model, (of_model, mask) in zip(self.specialists, prompts, strict=True):
            model_device = device_of(model.get_input_embeddings())
            ids.append(of_model.to(model_device))
            masks.append(mask.to(model_device))
        return super().generate(
            start.to(device),
            # zero width lets transformers' loop start without ids and without guessing their
            # padding
            inputs_embeds=torch.empty(*start.shape, 0, device=device),
            attention_mask=torch.ones_like(start, device=device),
            prompt_ids=ids,
            prompt_mask=masks,
            past_key_values=FuserCache(caches),
            **kwargs,
        )

    def _collect_settings(self) -> None:
        """Set the ids that end, begin and pad an answer; any specialist's EOS ends it if all have
        that id.
        """
        settings = self.generation_config
        ends = []
        for model in self.specialists:
            end = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
            ends += end if isinstance(end, list) else [end]
        if self.encoder is not None:
            ends.append(self.encoder.tokenizer.eos_token_id)
            settings.pad_token_id = self.encoder.pad_token_id
            settings.bos_token_id = self.encoder.tokenizer.bos_token_id
        ends = sorted({end for end in ends if end is not None and end < self.config.vocab_size})
        settings.eos_token_id = ends or None
        if settings.pad_token_id is None and ends:
            settings.pad_token_id = ends[0]

    def complete(self, prompts: Sequence, *, system: str | None = None, **kwargs: Any) -> list[str]:
        """Return the answers to prompts, texts or chats, as text without special tokens; `kwargs`
        are generate's.
        """
        inputs = self.encode(prompts, system=system)
        out = self.generate(**inputs, **{"tokenizer": self.encoder.tokenizer} | kwargs)
        ids = out if isinstance(out, torch.Tensor) else out.sequences
        return self.encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        prompt_ids: Sequence[Tensor] | None = None,
        prompt_mask: Sequence[Tensor] | None = None,
        **kwargs: Any,
    ) -> dict:
        """Return forward's inputs for the next token: the whole answers, of which all but the last
        token are cached.
        """
        return {
            "input_ids": input_ids,
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "past_key_values": past_key_values,
        }

    def _expand_inputs_for_generation(
        self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs
    ):
        """Repeat the prompts too, which transformers skips since they are lists."""
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        for name in ("prompt_ids", "prompt_mask"):
            model_kwargs[name] = [
                tensor.repeat_interleave(expand_size, 0) for tensor in model_kwargs[name]
            ]
        return input_ids, model_kwargs
