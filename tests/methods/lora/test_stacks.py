"""methods/lora/stacks.py: adapters of any PEFT read, converted and merged; every change is PEFT's
own.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin import experts, peft_files
from moe_runtime.methods.lora import stacks
from moe_runtime.methods.lora.adapters import is_pattern
from moe_runtime.methods.lora.baseline import load_lora
from tests.support.peft_adapter import BOTH, adapted, as_written_by, deltas
from tests.support.stock_moe import stock

SQUARE = {"qwen3_moe": {"moe_intermediate_size": 16}, "gpt_oss": {"intermediate_size": 32}}
WEIGHTS = "adapter_model.safetensors"


def model_of(family: str, shape: str):
    """A model whose down stack is square (gpt_oss) or whose gate_up stack is (qwen3_moe), or
    neither.
    """
    return stock(family, **(SQUARE[family] if shape == "square" else {}))


def read(folder, source="adapter"):
    return stacks.read_peft(folder / source, stacks.base_skeleton(folder / "base"))


def check_deltas(adapter, want, rtol=1e-6):
    assert set(adapter.pairs) == set(want)
    for name, delta in want.items():
        found = adapter.pairs[name].delta()
        torch.testing.assert_close(found, delta, rtol=rtol, atol=1e-7)
        if adapter.pairs[name].is_stack:
            torch.testing.assert_close(adapter.pairs[name].delta(5), delta[5], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(
    "family, settings",
    [
        pytest.param("qwen3_moe", {}, id="plain"),
        pytest.param("qwen3_moe", {"parameters": BOTH[:1]}, id="gate_up alone has down's key"),
        pytest.param("qwen3_moe", {"r": 8, "use_rslora": True}, id="r is E, rank-stabilized"),
        pytest.param(
            "qwen3_moe",
            {"rank_pattern": {"mlp.experts.gate_up_proj": 5}, "alpha_pattern": {"q_proj": 9}},
            id="patterns",
        ),
        pytest.param("qwen3_moe", {"parameters": (*BOTH, "mlp.gate.weight")}, id="router"),
        pytest.param(
            "gpt_oss",
            {"parameters": (*BOTH, "gate_up_proj_bias", "down_proj_bias")},
            id="transposed, biases",
        ),
    ],
)
def test_every_change_is_pefts(tmp_path, family, settings):
    adapter_of = adapted(tmp_path, family, **settings)
    adapter = read(tmp_path)
    assert not adapter.is_reversed
    check_deltas(adapter, deltas(adapter_of))


@pytest.mark.parametrize(
    "version", ["0.18.0", "0.18.2.dev0", "0.19.0", "0.19.1@abc", "0.20.0", None]
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_axes_by_version(family, version):
    is_reversed = peft_files.is_reversed(version, family == "gpt_oss")
    want = {"0.18": family == "qwen3_moe", "0.19": True, "0.20": False}.get((version or "")[:4])
    assert is_reversed is want


@pytest.mark.parametrize(
    "family, shape, version",
    [
        *(
            (family, shape, version)
            for family in SQUARE
            for shape in ("square", "rectangular")
            for version in ("0.18.0", "0.19.0")
        ),
        ("qwen3_moe", "rectangular", None),
    ],
)
def test_old_files_are_converted_exactly(tmp_path, family, shape, version):
    parameters = BOTH[:1] if family == "qwen3_moe" else BOTH[1:]
    made = adapted(
        tmp_path,
        family,
        model=model_of(family, shape),
        parameters=parameters if shape == "square" else BOTH,
    )
    old = as_written_by(version, tmp_path / "adapter", tmp_path / "old", family == "gpt_oss")
    adapter = read(tmp_path, "old")
    assert adapter.is_reversed == (family == "qwen3_moe" or version == "0.19.0")
    check_deltas(adapter, deltas(made))
    if not adapter.is_reversed:
        with pytest.raises(
            ValueError, match=r"old \(peft_version 0.18.0\) needs no conversion, .* PEFT 0.20"
        ):
            stacks.convert_folder(old, tmp_path / "base", tmp_path / "new")
        return
    receipt = stacks.convert_folder(old, tmp_path / "base", tmp_path / "new")
    assert receipt.peft_version == version and receipt.stacks == 2 * (1 if shape == "square" else 2)
    want, got = (load_file(tmp_path / name / WEIGHTS) for name in ("adapter", "new"))
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == (
        tmp_path / "adapter" / WEIGHTS
    ).read_bytes()
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert config == json.loads((old / "adapter_config.json").read_text()) | {
        "peft_version": stacks.WRITES
    }
    check_deltas(read(tmp_path, "new"), deltas(made))


def test_a_square_stack_that_stock_peft_transposes_is_refused_by_patch(tmp_path):
    made = adapted(tmp_path, model=model_of("qwen3_moe", "square"), parameters=BOTH[:1])
    as_written_by("0.18.0", tmp_path / "adapter", tmp_path / "old", transposed=False)
    wrong = load_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "old")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    # PEFT's silent mistake
    torch.testing.assert_close(deltas(wrong)[name], deltas(made)[name].transpose(1, 2))
    with pytest.raises(
        ValueError, match="saved by PEFT 0.18.0.* gate_up_proj of .*`moe-runtime lora convert`"
    ):
        experts.patch(wrong)
    stacks.convert_folder(tmp_path / "old", tmp_path / "base", tmp_path / "new")
    right = load_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "new")
    torch.testing.assert_close(deltas(right)[name], deltas(made)[name])
    experts.patch(right)


def change_config(folder, **values):
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder, change):
    tensors = load_file(folder / "adapter" / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / "adapter" / WEIGHTS, {"format": "pt"})


def half(layer: int, leaf: str = "experts", which: str = "A") -> str:
    return f"base_model.model.model.layers.{layer}.mlp.{leaf}.lora_{which}.weight"


@pytest.mark.parametrize(
    "spoil, match",
    [
        pytest.param(
            lambda f: change_config(f, use_dora=True), "use_dora in .* is True", id="dora"
        ),
        pytest.param(
            lambda f: change_config(f, peft_type="LOHA"),
            "peft_type in .* is 'LOHA'",
            id="another method",
        ),
        pytest.param(
            lambda f: change_config(f, rank_pattern={"(": 3}),
            "rank_pattern in .* is",
            id="no regular expression",
        ),
        pytest.param(
            lambda f: change_config(f, rank_pattern={"(a*)*b": 3}),
            "rank_pattern in .* is",
            id="exponential time",
        ),
        pytest.param(
            lambda f: change_config(f, alpha_pattern={".*" * 9 + "b": 3}),
            "alpha_pattern in .* is",
            id="x**9 time",
        ),
        pytest.param(
            lambda f: change_tensors(f, lambda t: t[half(1)].view(-1)[0].fill_(torch.nan)),
            rf"{half(1)} of .*{WEIGHTS} contains NaN",
            id="NaN",
        ),
        pytest.param(
            lambda f: change_tensors(f, lambda t: t[half(1)].fill_(3e38)),
            r"of the merge of .* contains NaN",
            id="overflow",
        ),
        pytest.param(
            lambda f: change_config(f, alpha_pattern={"x": "3"}),
            "alpha_pattern in .* is",
            id="text for a number",
        ),
        pytest.param(
            lambda f: change_config(f, target_parameters="down_proj"),
            "target_parameters in .* is 'down_",
            id="no list",
        ),
        pytest.param(
            lambda f: change_config(f, r=4),
            "has rank 3 and 3 .* must have rank 4",
            id="another rank",
        ),
        pytest.param(
            lambda f: change_config(f, target_parameters=BOTH[1:]),
            r"base_layer.lora_A.weight, but",
            id="unnamed",
        ),
        pytest.param(
            lambda f: change_tensors(f, lambda t: t.pop(half(1, which="B"))),
            half(1),
            id="half a pair",
        ),
        pytest.param(
            lambda f: change_tensors(f, lambda t: t.update({half(7): torch.zeros(24, 24)})),
            r"layers.7.mlp",
            id="no such layer",
        ),
        pytest.param(
            lambda f: change_tensors(
                f, lambda t: t.update({"base_model.model.lm_head.lora_magnitude": torch.zeros(1)})
            ),
            "lora_magnitude",
            id="unknown key",
        ),
        pytest.param(
            lambda f: change_tensors(f, lambda t: t.update({half(0): torch.zeros(24, 25)})),
            "a matrix .*32, 25",
            id="another size",
        ),
        pytest.param(
            lambda f: change_tensors(f, lambda t: t.update({half(0): torch.zeros(25, 24)})),
            "has rank 25 and 24",
            id="no rank of 8",
        ),
        pytest.param(
            lambda f: change_tensors(
                f, lambda t: t.update({half(0): torch.zeros(24, 24, dtype=torch.int8)})
            ),
            half(0),
            id="int8",
        ),
    ],
)
def test_what_is_not_lora_of_this_model_is_one_error(tmp_path, spoil, match):
    adapted(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=match) as error:
        stacks.merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family, version, is_clear",
    [("qwen3_moe", "0.21.2", True), ("qwen3_moe", "0.18.0", False), ("gpt_oss", "0.21.2", False)],
)
def test_one_expert_has_a_meaning_in_plain_stacks_of_today_alone(
    tmp_path, family, version, is_clear
):
    experts_of = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 1)
    made = adapted(
        tmp_path, family, model=stock(family, **SQUARE[family], **experts_of), parameters=BOTH
    )
    change_config(tmp_path, peft_version=version)
    if is_clear:
        adapter = read(tmp_path)
        assert all(
            torch.allclose(adapter.pairs[name].delta(), change)
            for name, change in deltas(made).items()
        )
        return
    if version == "0.18.0":  # its sizes say otherwise
        assert not read(tmp_path).is_reversed
        return
    with pytest.raises(ValueError, match="experts.* has one expert, for which PEFT"):
        read(tmp_path)


@pytest.mark.parametrize("version", [None, "0.20.0.dev0", "new"])
def test_square_stacks_of_an_unknown_version_are_not_guessed(tmp_path, version):
    adapted(tmp_path, model=model_of("qwen3_moe", "square"), parameters=BOTH[:1])
    as_written_by(version, tmp_path / "adapter", tmp_path / "old", transposed=False)
    with pytest.raises(ValueError, match=f"all stacks are square, and peft_version is {version!r}"):
        read(tmp_path, "old")


def test_sizes_outweigh_a_version_that_a_reused_config_kept(tmp_path):
    made = adapted(tmp_path)
    change_config(tmp_path, peft_version="0.18.0")
    check_deltas(read(tmp_path), deltas(made))


@pytest.mark.parametrize(
    "family, dtype, settings",
    [
        pytest.param(
            "qwen3_moe",
            torch.float32,
            {"parameters": (*BOTH, "mlp.gate.weight")},
            id="a matrix for each expert",
        ),
        pytest.param("mixtral", torch.bfloat16, {}, id="other names, bfloat16"),
        pytest.param(
            "gpt_oss",
            torch.float32,
            {"parameters": (*BOTH, "down_proj_bias")},
            id="transposed stacks",
        ),
        pytest.param(
            "granitemoe",
            torch.float32,
            {"parameters": ("gate_up_proj", "down_proj")},
            id="other stacks",
        ),
        pytest.param(
            "qwen3_moe", torch.float32, {"modules_to_save": ["lm_head"]}, id="a whole module"
        ),
    ],
)
def test_merged_is_what_peft_merges(tmp_path, family, dtype, settings):
    made = adapted(
        tmp_path, family, model=stock(family, tie_word_embeddings=False).to(dtype), **settings
    )
    if "modules_to_save" in settings:
        made.base_model.model.lm_head.modules_to_save["default"].weight.data.add_(1)
        made.save_pretrained(tmp_path / "adapter")
    receipt = stacks.merge_folder(
        tmp_path / "base", tmp_path / "adapter", tmp_path / "out", max_shard_size="20KB"
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == dtype and receipt.experts == 16
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    ours = merged.state_dict()
    theirs = made.merge_and_unload().state_dict()
    if dtype == torch.float32:
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    else:
        tolerance = {"rtol": 1e-2, "atol": 1e-2}
    changed = {name for name in ours if not torch.equal(ours[name], plain[name])}
    assert {"down_proj", "gate_up_proj"} <= {name.rpartition(".")[2] for name in changed}
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, msg=name, **tolerance)


def test_tied_weights_are_refused(tmp_path):
    adapted(tmp_path, model=stock(tie_word_embeddings=True), modules=("lm_head",))
    with pytest.raises(ValueError, match="lm_head.weight, which is tied to another weight"):
        stacks.merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def test_patterns_that_peft_would_match_forever_are_refused(tmp_path):
    adapted(tmp_path)
    for name, value in (
        ("rank_pattern", {"(a*)*b": 3}),
        ("alpha_pattern", 3),
        ("target_modules", "(.*)*x"),
    ):
        before = (tmp_path / "adapter" / "adapter_config.json").read_bytes()
        change_config(tmp_path, **{name: value})
        with pytest.raises(ValueError, match=f"{name} in .*adapter_config.json"):
            load_lora(stock("qwen3_moe"), tmp_path / "adapter")
        (tmp_path / "adapter" / "adapter_config.json").write_bytes(before)
    for key in ("model.layers.0.mlp.experts.down_proj", r"layers\.\d+\.mlp", r"(?:q|v)_proj"):
        assert is_pattern(key)
