"""generate() for several language models at once: a cache for each, its own prompt, one token for all.

UltraFuser, App. B: per token S forward passes; the logits are mixed, one token is drawn and given to all.
transformers' loop sees the answer alone: its logits processors and stopping criteria get the ids after the prompts, and
so does the caller. What the loop grows, prunes and copies per row (beams, several sequences) are the caches together.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.generation import GenerationMode

from moe_runtime.hf.ultrafuser_heads import inner_model

# what transformers' generate takes and ours makes
_TAKEN = {"inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values"}


class FuserCache(Cache):
    """One cache per specialist, the layers of all being its layers; or none, where nothing is to be kept."""

    def __init__(self, caches: Sequence[Cache]):
        self.caches = list(caches)
        super().__init__(layers=[])

    @property
    def layers(self) -> list:
        """The layers of all caches, which grow while the models run."""
        return [layer for cache in self.caches for layer in cache.layers]

    @layers.setter
    def layers(self, value: list) -> None:
        if value:
            raise AttributeError("layers belong to the caches of the specialists")

    @property
    def is_compileable(self) -> bool:
        """Whether transformers may compile the decoding step by itself: no, the caches grow."""
        return False


def run(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, answer: torch.Tensor, cache: Cache | None = None):
    """Return the last hidden states of prompts `ids` [B, P], `mask`, padded on the left, followed by `answer` [B, R].

    [B, P + R, H]; with a cache that holds something, the answer's last token alone: [B, 1, H].
    """
    inner, device = inner_model(model), model.get_input_embeddings().weight.device
    ids, mask, answer = ids.to(device), mask.to(device), answer.to(device)
    # the answer's padding is behind all that counts
    mask = torch.cat([mask, mask.new_ones(answer.shape)], 1)
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    ids = torch.cat([ids, answer], 1)
    if cache is not None and cache.get_seq_length():
        new = ids.shape[1] - cache.get_seq_length()
        ids, positions = ids[:, -new:], positions[:, -new:]
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": cache is not None, "past_key_values": cache}
    if "position_ids" in inspect.signature(inner.forward).parameters:
        inputs["position_ids"] = positions
    return inner(**inputs, return_dict=True).last_hidden_state


class FuserGeneration(GenerationMixin):
    """What the model adds to transformers' loop."""

    _supported_generation_modes = [
        GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE,
    ]  # fmt: skip

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[torch.Tensor] | None = None,
        prompt_mask: Sequence[torch.Tensor] | None = None,
        response_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ):
        """Continue the answers to prompts, S of [B, P_s]; returns the answers' ids [B, n], or what transformers returns.

        `response_ids` [B, n] are beginnings of the answers, without padding; the result starts with them. `kwargs` are
        transformers': max_new_tokens, do_sample, num_beams, streamer, ... Raises ValueError for what needs another model
        or the prompts' ids (assisted generation, prompt lookup).
        """
        if given := sorted(_TAKEN & kwargs.keys()):
            raise ValueError(f"{', '.join(given)} is given; want prompt_ids and prompt_mask; fuser.encode makes them")
        prompts = self._prompts(prompt_ids, prompt_mask)
        device = self.gate.score.weight.device
        start = prompts[0][0].new_empty(len(prompts[0][0]), 0) if response_ids is None else response_ids
        if labels is not None and (labels == -100).any():
            raise ValueError("response_ids is padded; want beginnings of one length; or answers one at a time")
        settings = kwargs.get("generation_config") or self.generation_config
        caches = []
        if kwargs.pop("use_cache", settings.use_cache) is not False:
            configs = (model.config.get_text_config(decoder=True) for model in self.specialists)
            caches = [DynamicCache(config=config) for config in configs]
        places = [model.get_input_embeddings().weight.device for model in self.specialists]
        ids, mask = zip(*((i.to(d), m.to(d)) for (i, m), d in zip(prompts, places, strict=True)), strict=True)
        return super().generate(
            start.to(device),
            # of no width: what lets transformers' loop begin with no ids at all, and without a guess at their padding
            inputs_embeds=torch.empty(*start.shape, 0, device=device),
            attention_mask=torch.ones_like(start, device=device),
            prompt_ids=list(ids),
            prompt_mask=list(mask),
            past_key_values=FuserCache(caches),
            **kwargs,
        )

    def complete(self, prompts: Sequence, *, system: str | None = None, **kwargs) -> list[str]:
        """Return the answers to prompts, texts or chats, as text without special tokens; `kwargs` are generate's."""
        out = self.generate(**self.encode(prompts, system=system), **kwargs)
        ids = out if isinstance(out, torch.Tensor) else out.sequences
        return self.encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        past_key_values=None,
        attention_mask=None,
        inputs_embeds=None,
        prompt_ids=None,
        prompt_mask=None,
        **kwargs,
    ) -> dict:
        """Return what forward takes for the next token: the whole answers, of which the caches know all but the last."""
        return {
            "input_ids": input_ids,
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "past_key_values": past_key_values,
        }

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        """Repeat the prompts too, which transformers' own passes over: they are lists."""
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        for name in ("prompt_ids", "prompt_mask"):
            model_kwargs[name] = [tensor.repeat_interleave(expand_size, 0) for tensor in model_kwargs[name]]
        return input_ids, model_kwargs
