"""papers/engine/tiny.py: its tokenizer and its collator."""

import pytest
from transformers import AutoTokenizer

from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io import rows as data
from papers.engine.tiny import train_tokenizer

CHAT = [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["two and two is four: def f(x): return x + 1"] * 20, 300)


def test_the_collator_pads_labels_with_minus_100(tokenizer):
    pairs = [{"prompt": "a" * n + "\n", "completion": "four"} for n in (1, 9)]
    rows = data.tokenize_pairs(tokenizer, pairs, 64)
    batch = pair_collator(tokenizer)(list(rows))
    short = len(rows[0]["input_ids"])
    long = len(rows[1]["input_ids"])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, long)
    assert (batch["input_ids"][0, short:] == tokenizer.pad_token_id).all()
    assert (batch["labels"][0, short:] == -100).all()
    assert batch["labels"][0, short - 1] == tokenizer.eos_token_id
    assert batch["attention_mask"].sum(1).tolist() == [short, long]


def test_the_tokenizer_round_trips_any_text_and_its_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n\treturn  x # 漢字 \U0001f600 é  \n\n"
    for each in (tokenizer, loaded):
        ids = each(text)["input_ids"]
        assert ids[0] == each.bos_token_id
        assert each.decode(ids[1:]) == text
        assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (1, 2, 0)
        assert each.padding_side == "right"
    assert loaded.chat_template == tokenizer.chat_template
    assert len(loaded) == len(tokenizer) <= 300
    prompt = loaded.apply_chat_template(
        CHAT[:1],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert loaded.apply_chat_template(CHAT, tokenize=False) == prompt + "four</s>\n"
