"""generate(): a cache per specialist changes no token, whatever transformers' loop does with the
rows.
"""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer

from tests.methods.ultrafuser import fusers

NEW = 8


@pytest.fixture(scope="module")
def fused():
    return fusers.fuser(tokenizer=fusers.tokenizer(), templates=["ultralm", "codellama", "chat"])


def prompts(**settings) -> dict:
    return {
        name: value for name, value in fusers.batch(**settings).items() if name.startswith("prompt")
    }


@torch.no_grad()
def greedy(
    fused, inputs: dict, steps: int = NEW, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Token after token from whole forward passes, no cache, no loop of transformers'."""
    rows = len(inputs["prompt_ids"][0])
    answer = torch.zeros(rows, 0, dtype=torch.long) if start is None else start
    for _ in range(steps):
        # its own place is not seen
        guess = torch.cat([answer, torch.zeros(rows, 1, dtype=torch.long)], 1)
        logits = fused(**inputs, response_ids=guess, want_logits=True).logits[:, -1]
        answer = torch.cat([answer, logits.argmax(-1, keepdim=True)], 1)
    return answer


def run(fused, inputs, **settings):
    torch.manual_seed(5)
    return fused.generate(
        **inputs, max_new_tokens=NEW, **{"eos_token_id": None, "pad_token_id": 0} | settings
    )


def test_greedy_is_the_uncached_forward(fused):
    want = greedy(fused, prompts())
    assert len(set(want.flatten().tolist())) > 8  # a model that repeats itself would hide much
    assert torch.equal(run(fused, prompts(), do_sample=False), want)
    assert torch.equal(run(fused, prompts(), do_sample=False, use_cache=False), want)
    config = GenerationConfig(max_new_tokens=NEW, use_cache=False, pad_token_id=0)
    assert torch.equal(fused.generate(**prompts(), generation_config=config)[:, :3], want[:, :3])


def test_rows_do_not_see_each_other(fused):
    whole = prompts()
    for row in range(3):
        ids = [
            i[row][m[row].bool()][None]
            for i, m in zip(whole["prompt_ids"], whole["prompt_mask"], strict=True)
        ]
        alone = run(fused, {"prompt_ids": ids, "prompt_mask": [torch.ones_like(i) for i in ids]})
        assert torch.equal(alone[0], run(fused, whole)[row])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"do_sample": True, "temperature": 1.5}, id="sampling"),
        pytest.param(
            {"do_sample": True, "top_p": 0.7, "top_k": 20, "num_return_sequences": 3},
            id="several per prompt",
        ),
        pytest.param({"num_beams": 4, "num_return_sequences": 2}, id="beams"),
        pytest.param(
            {"num_beams": 3, "do_sample": True, "length_penalty": 0.5}, id="sampled beams"
        ),
        pytest.param({"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}, id="processors"),
        pytest.param({"min_new_tokens": 6, "eos_token_id": [5, 77, 200]}, id="several ends"),
    ],
)
def test_the_caches_change_nothing(fused, settings):
    assert torch.equal(
        run(fused, prompts(), **settings), run(fused, prompts(), use_cache=False, **settings)
    )


def test_beams_find_what_is_more_likely(fused):
    def score(out):
        inputs = prompts()
        logits = fused(**inputs, response_ids=out, want_logits=True).logits.log_softmax(-1)
        return logits.gather(-1, out[..., None]).sum((1, 2))

    beams = run(fused, prompts(), num_beams=6)
    one = run(fused, prompts())
    assert not torch.equal(beams, one) and (score(beams) >= score(one) - 1e-3).all()
    out = run(fused, prompts(), num_beams=6, return_dict_in_generate=True, output_scores=True)
    torch.testing.assert_close(out.sequences_scores, score(beams) / NEW, rtol=1e-3, atol=1e-3)


def test_sliding_windows_and_other_families():
    models = [
        fusers.specialist(0, "mistral", sliding_window=4),
        fusers.specialist(1, "gemma2", sliding_window=5),
        fusers.specialist(2, "gpt2"),
    ]
    fused = fusers.fuser(models)
    assert torch.equal(run(fused, prompts()), greedy(fused, prompts()))
    assert torch.equal(
        run(fused, prompts(), num_beams=3), run(fused, prompts(), num_beams=3, use_cache=False)
    )


def test_processors_see_the_answer_alone(fused):
    seen = []

    def look(ids, scores):
        seen.append(ids.clone())
        return scores

    out = run(fused, prompts(), logits_processor=LogitsProcessorList([look]))
    assert [ids.shape[1] for ids in seen] == list(range(NEW)) and torch.equal(seen[-1], out[:, :-1])


def test_beginnings_of_answers(fused):
    start = torch.tensor([[7, 30, 9]] * 3)
    want = greedy(fused, prompts(), start=start)
    assert torch.equal(run(fused, prompts(), response_ids=start), want)
    assert torch.equal(
        run(fused, prompts(), response_ids=start, num_beams=2),
        run(fused, prompts(), response_ids=start, num_beams=2, use_cache=False),
    )
    with pytest.raises(ValueError, match="response_ids must not be padded"):
        fused.generate(**fusers.batch(), max_new_tokens=2)
    for wrong, words in (
        (start[:2], r"Expected response_ids \[3, R\], .*but got \(2, 3\)"),
        (start[0], r"Expected response_ids .*but got \(3,\)"),
        (start + fusers.VOCAB, "Expected .* ids from 0 to"),
    ):
        with pytest.raises(ValueError, match=words):
            fused.generate(**prompts(), response_ids=wrong, max_new_tokens=2)


def test_texts_in_texts_out(fused, capsys):
    texts = ["What is 2 + 3?", "A fox", "def add(a, b):"]
    answers = fused.complete(texts, max_new_tokens=5)
    one = [fused.complete([text], max_new_tokens=5)[0] for text in texts]
    assert answers == one and all(isinstance(answer, str) for answer in answers)
    streamer = TextStreamer(fused.encoder.tokenizer, skip_special_tokens=True)
    fused.generate(**fused.encode(texts[:1]), max_new_tokens=5, streamer=streamer)
    assert capsys.readouterr().out.strip() == answers[0].strip()
    assert fused.generation_config.eos_token_id == [2]
    first = fused.encoder.tokenizer.decode(fused.encode(["x"], [answers[0]])["response_ids"][0, :1])
    assert fused.complete(texts[:1], max_new_tokens=5, stop_strings=[first])[0] != answers[0]
    with pytest.raises(ValueError, match="The fuser has no tokenizer"):
        fusers.fuser([fusers.specialist(s) for s in range(2)]).complete(["x"])


@pytest.mark.parametrize(
    "settings, words",
    [
        pytest.param({"prompt_lookup_num_tokens": 2}, "UltraFuser only supports", id="lookup"),
        pytest.param({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search", id="contrastive"),
        pytest.param(
            {"input_ids": torch.zeros(3, 2, dtype=torch.long)},
            "input_ids is not supported",
            id="ids",
        ),
        pytest.param({"past_key_values": object()}, "past_key_values is not supported", id="cache"),
        pytest.param({"cache_implementation": "static"}, "cache_implementation", id="static"),
        pytest.param({"typo": 3}, "typo", id="typo"),
        pytest.param(
            {"guidance_scale": 1.5},
            "guidance_scale is not supported, as each specialist",
            id="guidance",
        ),
        pytest.param(
            {"output_attentions": True}, "output_attentions is not supported", id="attentions"
        ),
        pytest.param(
            {"generation_config": GenerationConfig(output_hidden_states=True)},
            "output_hidden_states is not supported",
            id="states",
        ),
        pytest.param({"prompt_ids": None}, "but got [] and", id="none"),
    ],
)
def test_what_it_cannot_do_is_named(fused, settings, words):
    with pytest.raises(ValueError) as error:
        fused.generate(**prompts() | settings, max_new_tokens=2)
    assert words in str(error.value)
