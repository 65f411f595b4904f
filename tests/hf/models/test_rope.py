"""config.json has both spellings of rotary embeddings: each is complete, and both agree."""

import json

import pytest
from transformers import AutoConfig

from moe_runtime.hf.models.configuration import legacy_rope, write_legacy_rope
from moe_runtime.io.files import read_json
from tests.hf import tiny

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "rope_theta": 1e5,
}
CASES = [(model_type, None) for model_type in tiny.EVERY] + [
    ("llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}),
    (
        "gpt_neox",
        {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 1e5,
            "partial_rotary_factor": 0.5,
        },
    ),
    ("phi3", LONG),
    (
        "gemma3_text",
        {
            "full_attention": {
                "rope_type": "linear",
                "factor": 8.0,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
]


@pytest.mark.parametrize(("model_type", "rope"), CASES)
def test_both_spellings_agree(model_type, rope, tmp_path):
    if rope is None:
        changes = {}
    else:
        changes = {
            "rope_parameters": rope,
            "rope_theta": None,
            "rotary_emb_base": None,
        }
    config = tiny.dense_config(model_type, **changes)
    config.save_pretrained(tmp_path)
    write_legacy_rope(tmp_path)
    both = read_json(tmp_path / "config.json")
    old = {}
    for key, value in both.items():
        if key != "rope_parameters":
            old[key] = value

    assert len(old) > len(json.loads(config.to_json_string())) - 1
    for spelling in (both, old):
        read = AutoConfig.for_model(**spelling).rope_parameters
        read.pop("type", None)  # phi3's old name for rope_type
        assert read == config.rope_parameters


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("llama", {"rope_theta": 1e5}),
        ("stablelm", {"rope_theta": 1e5, "partial_rotary_factor": 0.25}),
        ("gpt_neox", {"rotary_emb_base": 1e5, "rotary_pct": 0.25}),
        (
            "gemma3_text",
            {
                "rope_theta": 1e5,
                "rope_local_base_freq": 10_000.0,
            },
        ),
    ],
)
def test_the_keys_by_family(model_type, expected):
    assert legacy_rope(tiny.dense_config(model_type).to_dict()) == expected


def test_the_keys_of_long_and_of_unknown_rotations():
    phi3 = tiny.dense_config(
        "phi3",
        rope_parameters=LONG,
        rope_theta=None,
    ).to_dict()
    scaling = {
        "type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    assert legacy_rope(phi3)["rope_scaling"] == scaling

    assert legacy_rope({"model_type": "gpt2"}) == {}
    # layer types that the old spelling cannot distinguish
    layers = {"full_attention": {"rope_theta": 1e4}, "linear_attention": None}
    assert legacy_rope({"rope_parameters": layers}) == {}
