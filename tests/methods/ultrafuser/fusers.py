"""Small specialists with one tokenizer, a batch of prompts and answers, and UltraFuser's
formula.
"""

import functools

import torch
import torch.nn.functional as F

from moe_runtime.methods.ultrafuser.model import UltraFuser
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny

VOCAB = 280
TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "What is 2 + 3? 2 + 3 = 5.",
    "The quick brown fox jumps over the dog.",
]


@functools.cache
def tokenizer():
    """Return a byte-level tokenizer of at most VOCAB ids, with a chat template."""
    return train_tokenizer(TEXTS * 4, VOCAB - 10)


def specialist(seed: int, model_type: str = "llama", **changes):
    """Return a tiny model of any family, with its own weights."""
    model = tiny.dense(
        model_type,
        **{"vocab_size": VOCAB} | changes,
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(noise.to(parameter.dtype) / 16)
    return model


def specialists(count: int = 3, **changes) -> list:
    """Return distinct models; the second one has a larger vocabulary."""
    models = []
    for s in range(count):
        if s == 1:
            size = VOCAB + 8
        else:
            size = VOCAB
        models.append(specialist(s, **{"vocab_size": size} | changes))
    return models


def fuser(models: list | None = None, **settings) -> UltraFuser:
    """Return an UltraFuser whose gate has no overall preference, but prefers a specialist for each
    token.
    """
    torch.manual_seed(1)
    made = UltraFuser(
        specialists() if models is None else models,
        **settings,
    )
    with torch.no_grad():
        for parameter in made.gate.parameters():
            parameter.mul_(3)
    return made.eval()


def batch(count: int = 3, rows: int = 3, lengths=(7, 5, 9), answer: int = 6) -> dict:
    """Return prompts of several lengths, one set per specialist, padded on the left, and answers,
    with a shorter one in the last row.
    """
    generator = torch.Generator().manual_seed(2)
    ids = [
        torch.randint(
            3,
            VOCAB,
            (rows, lengths[s]),
            generator=generator,
        )
        for s in range(count)
    ]
    mask = [torch.ones_like(i) for i in ids]
    for s in range(count):
        for row in range(1, rows):
            mask[s][row, : row + s % 2] = 0
    response = torch.randint(
        3,
        VOCAB,
        (rows, answer),
        generator=generator,
    )
    labels = response.clone()
    labels[-1, answer - 2 :] = -100
    return {"prompt_ids": ids, "prompt_mask": mask, "response_ids": response, "labels": labels}


def naive(fuser: UltraFuser, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the formula row by row, without padding or optimizations: logits [B, R, V] and
    weights [B, R, S], with gradients.
    """
    logits = []
    weights = []
    for row, response in enumerate(inputs["response_ids"]):
        states = []
        outs = []
        prompts = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        for model, (ids, mask) in zip(fuser.specialists, prompts, strict=True):
            prompt = ids[row][mask[row].bool()]
            whole = torch.cat([prompt, response])[None]
            out = model(input_ids=whole, output_hidden_states=True, use_cache=False)
            answer = slice(len(prompt) - 1, -1)
            states.append(out.hidden_states[-1][0, answer].float())
            outs.append(out.logits[0, answer].float())
        weight = fuser.gate(states)
        V = min(out.shape[-1] for out in outs)
        logits.append(sum(weight[:, s : s + 1] * out[:, :V] for s, out in enumerate(outs)))
        weights.append(weight)
    return torch.stack(logits), torch.stack(weights)


def naive_loss(fuser: UltraFuser, inputs: dict, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of `naive`'s logits."""
    logits = naive(fuser, inputs)[0].transpose(1, 2)
    labels = inputs["labels"]
    nll = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return reduced(nll, labels, reduction)


def reduced(nll: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the loss of the tokens' losses, [rows, tokens]."""
    if reduction == "none":
        return nll
    if reduction == "sum":
        return nll.sum()
    if reduction == "mean":
        return nll.sum() / (labels != -100).sum()
    return nll.sum(1).mean()
