"""methods/lora/stacks.py: adapters from any PEFT version are read, converted and merged with
exactly PEFT's changes.
"""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin import experts, peft_files
from moe_runtime.io.files import read_json
from moe_runtime.methods.lora import stacks
from moe_runtime.methods.lora.adapters import is_pattern
from moe_runtime.methods.lora.baseline import load_lora
from tests.support.edited import edit_json
from tests.support.peft_adapter import BOTH, adapted, as_written_by, deltas
from tests.support.stock_moe import stock

SQUARE = {"qwen3_moe": {"moe_intermediate_size": 16}, "gpt_oss": {"intermediate_size": 32}}
WEIGHTS = "adapter_model.safetensors"


def model_of(family: str, shape: str):
    """A model with a square down stack (gpt_oss) or gate_up stack (qwen3_moe), or with neither."""
    return stock(
        family,
        **(SQUARE[family] if shape == "square" else {}),
    )


def read(folder, source="adapter"):
    return stacks.read_peft(
        folder / source,
        stacks.base_skeleton(folder / "base"),
    )


def check_deltas(adapter, want, rtol=1e-6):
    assert set(adapter.pairs) == set(want)
    for name, delta in want.items():
        found = adapter.pairs[name].delta()
        torch.testing.assert_close(
            found,
            delta,
            rtol=rtol,
            atol=1e-7,
        )
        if adapter.pairs[name].is_stack:
            torch.testing.assert_close(
                adapter.pairs[name].delta(5),
                delta[5],
                rtol=rtol,
                atol=1e-7,
            )


@pytest.mark.parametrize(
    "family, settings",
    [
        pytest.param("qwen3_moe", {}, id="plain"),
        pytest.param(
            "qwen3_moe",
            {"parameters": BOTH[:1]},
            id="gate_up alone has down's key",
        ),
        pytest.param("qwen3_moe", {"r": 8, "use_rslora": True}, id="r is E, rank-stabilized"),
        pytest.param(
            "qwen3_moe",
            {
                "rank_pattern": {"mlp.experts.gate_up_proj": 5},
                "alpha_pattern": {"q_proj": 9, "self_attn.q_proj": 5},
            },
            id="patterns",
        ),
        pytest.param(
            "qwen3_moe",
            {"parameters": (*BOTH, "mlp.gate.weight")},
            id="router",
        ),
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
        *itertools.product(
            SQUARE,
            ("square", "rectangular"),
            ("0.18.0", "0.19.0"),
        ),
        ("qwen3_moe", "rectangular", None),
    ],
)
def test_old_files_are_converted_exactly(tmp_path, family, shape, version):
    parameters = BOTH
    if shape == "square":
        if family == "qwen3_moe":
            parameters = BOTH[:1]
        else:
            parameters = BOTH[1:]
    made = adapted(
        tmp_path,
        family,
        model=model_of(family, shape),
        parameters=parameters,
    )
    base = tmp_path / "base"
    new = tmp_path / "new"
    old = as_written_by(
        version,
        tmp_path / "adapter",
        tmp_path / "old",
        family == "gpt_oss",
    )
    adapter = read(tmp_path, "old")
    assert adapter.is_reversed == (family == "qwen3_moe" or version == "0.19.0")
    check_deltas(adapter, deltas(made))
    if not adapter.is_reversed:
        with pytest.raises(ValueError, match=r"0.18.0\) needs no conversion, .* PEFT 0.20"):
            stacks.convert_folder(old, base, new)
        return
    receipt = stacks.convert_folder(old, base, new)
    assert receipt.peft_version == version
    assert receipt.stacks == 2 * len(parameters)
    assert (new / WEIGHTS).read_bytes() == (tmp_path / "adapter" / WEIGHTS).read_bytes()
    config = read_json(old / "adapter_config.json")
    config["peft_version"] = stacks.WRITES
    assert read_json(new / "adapter_config.json") == config
    check_deltas(read(tmp_path, "new"), deltas(made))


def test_a_square_stack_that_stock_peft_transposes_is_refused_by_patch(tmp_path):
    made = adapted(
        tmp_path,
        model=model_of("qwen3_moe", "square"),
        parameters=BOTH[:1],
    )
    as_written_by(
        "0.18.0",
        tmp_path / "adapter",
        tmp_path / "old",
        transposed=False,
    )

    def load(name: str):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return load_lora(base, tmp_path / name)

    wrong = load("old")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    expected = deltas(made)[name]
    # PEFT transposes it silently
    torch.testing.assert_close(
        deltas(wrong)[name],
        expected.transpose(1, 2),
    )
    with pytest.raises(ValueError, match="saved by PEFT 0.18.0.* `moe-runtime lora convert`"):
        experts.patch(wrong)
    stacks.convert_folder(
        tmp_path / "old",
        tmp_path / "base",
        tmp_path / "new",
    )
    right = load("new")
    torch.testing.assert_close(
        deltas(right)[name],
        expected,
    )
    experts.patch(right)


def change_config(folder, **values):
    edit_json(folder / "adapter" / "adapter_config.json", **values)


def half(layer: int, leaf: str = "experts", which: str = "A") -> str:
    return f"base_model.model.model.layers.{layer}.mlp.{leaf}.lora_{which}.weight"


@pytest.mark.parametrize(
    "values, match",
    [
        pytest.param({"use_dora": True}, "use_dora in .* is True", id="dora"),
        pytest.param({"rank_pattern": {"(a*)*b": 3}}, "rank_pattern in .* is", id="exponential"),
        pytest.param({"r": 4}, "has rank 3 and 3 .* must have rank 4", id="another rank"),
        pytest.param(
            {"target_parameters": BOTH[1:]}, "base_layer.lora_A.weight, but", id="unnamed"
        ),
    ],
)
def test_a_config_of_another_form_is_one_error(tmp_path, values, match):
    adapted(tmp_path)
    change_config(tmp_path, **values)
    assert_refused(tmp_path, match)


def assert_refused(folder, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        stacks.merge_folder(
            folder / "base",
            folder / "adapter",
            folder / "out",
        )
    assert "\n" not in str(error.value)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "key, tensor, match",
    [
        pytest.param(
            half(1),
            torch.full((24, 24), 3e38),
            "of the merge of .* NaN",
            id="overflow",
        ),
        pytest.param(
            half(1, which="B"),
            None,
            half(1),
            id="half a pair",
        ),
        pytest.param(
            "base_model.model.lm_head.lora_magnitude",
            torch.zeros(1),
            "lora_magnitude",
            id="unknown key",
        ),
        pytest.param(half(0), torch.zeros(24, 25), "a matrix .*32, 25", id="another size"),
    ],
)
def test_matrices_that_do_not_fit_are_one_error(tmp_path, key, tensor, match):
    adapted(tmp_path)
    file = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(file)
    if tensor is None:
        del tensors[key]
    else:
        tensors[key] = tensor
    save_file(tensors, file, {"format": "pt"})
    assert_refused(tmp_path, match)


@pytest.mark.parametrize("version", [None, "0.20.0.dev0", "new"])
def test_square_stacks_of_an_unknown_version_are_not_guessed(tmp_path, version):
    adapted(
        tmp_path,
        model=model_of("qwen3_moe", "square"),
        parameters=BOTH[:1],
    )
    as_written_by(
        version,
        tmp_path / "adapter",
        tmp_path / "old",
        transposed=False,
    )
    with pytest.raises(ValueError, match=f"all stacks are square, and peft_version is {version!r}"):
        read(tmp_path, "old")


def test_sizes_outweigh_a_version_that_a_reused_config_kept(tmp_path):
    made = adapted(tmp_path)
    change_config(tmp_path, peft_version="0.18.0")
    check_deltas(read(tmp_path), deltas(made))


ROUTER = (*BOTH, "mlp.gate.weight")


@pytest.mark.parametrize(
    "family, dtype, settings",
    [
        pytest.param(
            "qwen3_moe",
            torch.float32,
            {"parameters": ROUTER},
            id="one matrix per expert",
        ),
        pytest.param("mixtral", torch.bfloat16, {}, id="other names, bfloat16"),
        pytest.param(
            "gpt_oss", torch.float32, {"parameters": (*BOTH, "down_proj_bias")}, id="transposed"
        ),
        pytest.param(
            "granitemoe",
            torch.float32,
            {"parameters": ("gate_up_proj", "down_proj")},
            id="other stacks",
        ),
        pytest.param(
            "qwen3_moe",
            torch.float32,
            {"modules_to_save": ["lm_head"]},
            id="a module",
        ),
    ],
)
def test_merged_is_what_peft_merges(tmp_path, family, dtype, settings):
    base = tmp_path / "base"
    adapter = tmp_path / "adapter"
    model = stock(family, tie_word_embeddings=False).to(dtype)
    made = adapted(tmp_path, family, model=model, **settings)
    if "modules_to_save" in settings:
        made.base_model.model.lm_head.modules_to_save["default"].weight.data.add_(1)
        made.save_pretrained(adapter)
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    receipt = stacks.merge_folder(
        base,
        adapter,
        tmp_path / "out",
        max_shard_size="20KB",
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == dtype
    assert receipt.experts == 16
    ours = merged.state_dict()
    changed = {
        name.rpartition(".")[2]
        for name in ours
        if not torch.equal(
            ours[name],
            plain[name],
        )
    }
    assert {"down_proj", "gate_up_proj"} <= changed
    tolerance = {"rtol": 1e-2, "atol": 1e-2}
    if dtype == torch.float32:
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    theirs = made.merge_and_unload().state_dict()
    torch.testing.assert_close(
        {name: ours[name] for name in theirs},
        dict(theirs),
        **tolerance,
    )


def test_tied_weights_are_refused(tmp_path):
    adapted(
        tmp_path,
        model=stock(tie_word_embeddings=True),
        modules=("lm_head",),
    )
    with pytest.raises(ValueError, match="lm_head.weight, which is tied to another weight"):
        stacks.merge_folder(
            tmp_path / "base",
            tmp_path / "adapter",
            tmp_path / "out",
        )


def test_patterns_that_peft_would_match_forever_are_refused(tmp_path):
    adapted(tmp_path)
    original = (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    for name, value in (
        ("rank_pattern", {"(a*)*b": 3}),
        ("alpha_pattern", 3),
        ("target_modules", "(.*)*x"),
    ):
        (tmp_path / "adapter" / "adapter_config.json").write_bytes(original)
        change_config(tmp_path, **{name: value})
        with pytest.raises(ValueError, match=f"{name} in .*adapter_config.json"):
            load_lora(stock("qwen3_moe"), tmp_path / "adapter")
    for key in ("model.layers.0.mlp.experts.down_proj", r"layers\.\d+\.mlp", r"(?:q|v)_proj"):
        assert is_pattern(key)
