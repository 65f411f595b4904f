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


@pytest.mark.parametrize("copied", ["reference", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_of_their_own_answer_alike(tmp_path, kind, copied):
    model_type, changes = KINDS[kind]
    own = [tmp_path / "first", tmp_path / "second"]
    for path, model in zip(
        own, (fusers.specialist(0).bfloat16(), fusers.specialist(1, model_type, **changes))
    ):
        model.save_pretrained(path)
        fusers.tokenizer().save_pretrained(path)
    fused = fusers.fuser(own, templates=["ultralm", "chat"])
    head = ultrafuser.load_head(ultrafuser.save(fused, tmp_path / "fused", specialists=copied))
    engines = [AutoModelForCausalLM.from_pretrained(path, dtype="auto").base_model for path in own]
    prompts = head.encoder.prompt("What is 2 + 3?")
    answer = []
    for _ in range(4):
        inputs = [torch.tensor([prompt + answer]) for prompt in prompts]
        states = [
            e(input_ids=i, use_cache=False)[0][0, -1] for e, i in zip(engines, inputs, strict=True)
        ]
        logits, weight = head(states)
        answer.append(int(logits.argmax()))
    want = fused.generate(
        **fused.encode(["What is 2 + 3?"]), max_new_tokens=4, eos_token_id=None, do_sample=False
    )
    assert answer == want[0].tolist() and weight.shape == (2,) and logits.shape == (fusers.VOCAB,)
    held = sum(p.numel() for p in head.parameters())
    assert held == sum(
        p.numel()
        for p in [
            *fused.gate.parameters(),
            *(p for m in fused.specialists for p in m.get_output_embeddings().parameters()),
        ]
    )


def test_heads_have_the_dtype_that_was_fused(tmp_path):
    own = [tmp_path / "first", tmp_path / "second"]
    for s, path in enumerate(own):
        fusers.specialist(s).save_pretrained(path)
    head = ultrafuser.load_head(
        ultrafuser.save(fusers.fuser(own, dtype="bfloat16"), tmp_path / "fused")
    )
    assert {linear.weight.dtype for linear in head.linears} == {torch.bfloat16}
