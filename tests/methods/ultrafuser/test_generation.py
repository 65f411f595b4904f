"""generate(): a cache per specialist changes no token, however transformers' loop reorders the
rows.
"""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer

from tests.methods.ultrafuser import fusers

NEW = 8


@pytest.fixture(scope="module")
def fused():
    return fusers.fuser(
        tokenizer=fusers.tokenizer(),
        templates=["ultralm", "codellama", "chat"],
    )


def prompts(**settings) -> dict:
    inputs = fusers.batch(**settings)
    return {name: inputs[name] for name in ("prompt_ids", "prompt_mask")}


@torch.no_grad()
def greedy(fused, inputs: dict, start: torch.Tensor | None = None) -> torch.Tensor:
    """Generate token by token with whole forward passes, without a cache and without transformers'
    loop.
    """
    answer = start
    if start is None:
        answer = torch.zeros(
            len(inputs["prompt_ids"][0]),
            0,
            dtype=torch.long,
        )
    for _ in range(NEW):
        # the logits do not depend on the last token itself
        guess = torch.nn.functional.pad(answer, (0, 1))
        logits = fused(**inputs, response_ids=guess, want_logits=True).logits[:, -1]
        answer = torch.cat(
            [answer, logits.argmax(-1, keepdim=True)],
            1,
        )
    return answer


def run(fused, inputs, **settings):
    torch.manual_seed(5)
    settings = {"eos_token_id": None, "pad_token_id": 0} | settings
    return fused.generate(**inputs, max_new_tokens=NEW, **settings)


def assert_caches_change_nothing(fused, inputs, **settings) -> None:
    cached = run(fused, inputs, **settings)
    assert torch.equal(
        cached,
        run(fused, inputs, use_cache=False, **settings),
    )


def test_greedy_is_the_uncached_forward(fused):
    expected = greedy(fused, prompts())
    assert len(expected.unique()) > 8  # a repetitive model would hide errors
    assert torch.equal(
        run(fused, prompts(), do_sample=False),
        expected,
    )
    assert torch.equal(
        run(fused, prompts(), do_sample=False, use_cache=False),
        expected,
    )
    config = GenerationConfig(max_new_tokens=NEW, use_cache=False, pad_token_id=0)
    by_config = fused.generate(**prompts(), generation_config=config)
    assert torch.equal(by_config[:, :3], expected[:, :3])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"do_sample": True, "top_p": 0.7, "top_k": 20, "num_return_sequences": 3},
            id="several per prompt",
        ),
        pytest.param(
            {"num_beams": 3, "do_sample": True, "length_penalty": 0.5}, id="sampled beams"
        ),
        pytest.param({"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}, id="processors"),
        pytest.param(
            {"min_new_tokens": 6, "eos_token_id": [5, 77, 200]},
            id="several ends",
        ),
    ],
)
def test_the_caches_change_nothing(fused, settings):
    assert_caches_change_nothing(fused, prompts(), **settings)


def test_sliding_windows_and_other_families():
    models = [
        fusers.specialist(0, "mistral", sliding_window=4),
        fusers.specialist(1, "gemma2", sliding_window=5),
        fusers.specialist(2, "gpt2"),
    ]
    fused = fusers.fuser(models)
    assert torch.equal(
        run(fused, prompts()),
        greedy(fused, prompts()),
    )
    assert_caches_change_nothing(fused, prompts(), num_beams=3)


def test_processors_see_the_answer_alone(fused):
    seen = []

    def look(ids, scores):
        seen.append(ids.clone())
        return scores

    out = run(
        fused,
        prompts(),
        logits_processor=LogitsProcessorList([look]),
    )
    assert [ids.shape[1] for ids in seen] == list(range(NEW))
    assert torch.equal(seen[-1], out[:, :-1])


def test_beginnings_of_answers(fused):
    start = torch.tensor([[7, 30, 9]] * 3)
    inputs = prompts() | {"response_ids": start}
    assert torch.equal(
        run(fused, inputs),
        greedy(fused, prompts(), start=start),
    )
    assert_caches_change_nothing(fused, inputs, num_beams=2)
    with pytest.raises(ValueError, match="response_ids must not be padded"):
        fused.generate(**fusers.batch(), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"Expected response_ids \[3, R\], .*but got \(2, 3\)"):
        fused.generate(**prompts(), response_ids=start[:2], max_new_tokens=2)


def test_texts_in_texts_out(fused, capsys):
    texts = ["What is 2 + 3?", "A fox", "def add(a, b):"]
    answers = fused.complete(texts, max_new_tokens=5)
    for text, answer in zip(texts, answers, strict=True):
        assert fused.complete([text], max_new_tokens=5) == [answer]
    tokenizer = fused.encoder.tokenizer
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    fused.generate(
        **fused.encode(texts[:1]),
        max_new_tokens=5,
        streamer=streamer,
    )
    assert capsys.readouterr().out.strip() == answers[0].strip()
    assert fused.generation_config.eos_token_id == [2]
    first = tokenizer.decode(
        fused.encode(
            ["x"],
            [answers[0]],
        )["response_ids"][0, :1]
    )
    assert (
        fused.complete(
            texts[:1],
            max_new_tokens=5,
            stop_strings=[first],
        )
        != answers[:1]
    )
    with pytest.raises(ValueError, match="The fuser has no tokenizer"):
        fusers.fuser([fusers.specialist(s) for s in range(2)]).complete(["x"])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"prompt_lookup_num_tokens": 2}, "UltraFuser only supports"),
        ({"input_ids": torch.zeros(3, 2, dtype=torch.long)}, "input_ids is not supported"),
    ],
)
def test_what_it_cannot_do_is_named(fused, settings, words):
    with pytest.raises(ValueError, match=words):
        fused.generate(
            **prompts() | settings,
            max_new_tokens=2,
        )


def test_an_answer_ends_where_any_specialist_ends_it():
    models = fusers.specialists(2)
    models[0].generation_config.eos_token_id = [5, fusers.VOCAB + 3]
    models[1].generation_config.eos_token_id = 9
    assert fusers.fuser(models).generation_config.eos_token_id == [5, 9]
