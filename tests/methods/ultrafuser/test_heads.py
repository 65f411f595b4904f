"""The heads alone: engines that run the specialists elsewhere get the tokens that the whole fuser
generates.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.methods import ultrafuser
from tests.methods.ultrafuser import fusers

KINDS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "soft cap": ("gemma2", {"final_logit_softcapping": 6.0}),
    "bias": ("phi", {}),
    "another name": ("gpt_neox", {}),
    "scale": ("cohere", {"logit_scale": 0.4}),
}


def save_specialists(tmp_path, second) -> list:
    """Folders of two specialists with their tokenizer."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, model in zip(
        folders,
        (fusers.specialist(0).bfloat16(), second),
        strict=True,
    ):
        model.save_pretrained(folder)
        fusers.tokenizer().save_pretrained(folder)
    return folders


@torch.no_grad()
@pytest.mark.parametrize("copied", ["reference", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_of_their_own_answer_alike(tmp_path, kind, copied):
    model_type, changes = KINDS[kind]
    folders = save_specialists(
        tmp_path,
        fusers.specialist(1, model_type, **changes),
    )
    fused = fusers.fuser(folders, templates=["ultralm", "chat"])
    head = ultrafuser.load_head(
        ultrafuser.save(
            fused,
            tmp_path / "fused",
            specialists=copied,
        )
    )
    engines = []
    for folder in folders:
        engines.append(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").base_model)
    prompts = head.encoder.prompt("What is 2 + 3?")
    answer = []
    for _ in range(4):
        states = []
        for engine, prompt in zip(engines, prompts, strict=True):
            ids = torch.tensor([prompt + answer])
            states.append(engine(input_ids=ids, use_cache=False)[0][0, -1])
        logits, weight = head(states)
        answer.append(int(logits.argmax()))
    inputs = fused.encode(["What is 2 + 3?"])
    expected = fused.generate(**inputs, max_new_tokens=4, eos_token_id=None, do_sample=False)
    assert answer == expected[0].tolist()
    assert weight.shape == (2,)
    assert logits.shape == (fusers.VOCAB,)
    held = [fused.gate, *(model.get_output_embeddings() for model in fused.specialists)]
    sizes = [p.numel() for module in held for p in module.parameters()]
    assert sum(p.numel() for p in head.parameters()) == sum(sizes)


def test_heads_have_the_dtype_that_was_fused(tmp_path):
    folders = save_specialists(tmp_path, fusers.specialist(1))
    fused = fusers.fuser(folders, dtype="bfloat16")
    head = ultrafuser.load_head(ultrafuser.save(fused, tmp_path / "fused"))
    assert {linear.weight.dtype for linear in head.linears} == {torch.bfloat16}
