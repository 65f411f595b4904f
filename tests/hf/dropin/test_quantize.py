"""Stock models with quantized experts: logits, adapters, saving and loading, and refusals."""

import copy
import hashlib

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import moe_runtime
from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin import offload, quantize
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from moe_runtime.modules import packed as modules
from moe_runtime.modules.moe import MoE
from moe_runtime.native.library import cpp
from moe_runtime.ops import packed
from tests.hf import tiny
from tests.hf.dropin.test_layers import TOKENIZER
from tests.support import cpu_build
from tests.support.edited import edit_json
from tests.support.fences import ROOT, fences

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
}
IDS = torch.arange(14).view(2, 7) * 5 % 32
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def qwen(**sizes):
    torch.manual_seed(0)
    fields = (
        {
            "moe_intermediate_size": 128,
            "num_experts": 3,
            "norm_topk_prob": True,
        }
        | SIZES
        | sizes
    )
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))


def gpt_oss(**sizes):
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**{"num_local_experts": 3} | SIZES | sizes))


def experts_in(model):
    return list(quantize.experts_of(model).values())


def twin_of(model, quantized):
    """Return `model` with the dequantized weights of `quantized`, on transformers' own code."""
    twin = copy.deepcopy(model)
    for mine, theirs in zip(
        experts_in(twin),
        experts_in(quantized),
        strict=True,
    ):
        for name in modules.layouts(theirs):
            weight = packed.reference(*modules.get(theirs, name)).float()
            getattr(mine, name).data.copy_(weight.transpose(1, 2) if mine.is_transposed else weight)
    twin.set_experts_implementation("eager")
    return twin


def quantized_of(model, form):
    quantized = copy.deepcopy(model)
    moe_runtime.quantize_experts(quantized, form)
    return quantized


def quant_method(folder) -> str:
    config = read_json(folder / "config.json")
    return config["quantization_config"]["quant_method"]


def error(got, want) -> float:
    return ((got - want).norm() / want.norm()).item()


def digests(model) -> list[str]:
    values = []
    for module in experts_in(model):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype == torch.uint8:
                values.append(hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest())
    assert values
    return values


def models():
    """Each class in each format; the fast tests use one class for each of three formats."""
    fast = {(qwen, "nf4"), (gpt_oss, "mxfp4"), (qwen, "fp8_block")}
    for make in (qwen, gpt_oss):
        for form in packed.FORMATS:
            marks = () if (make, form) in fast else pytest.mark.slow
            yield pytest.param(
                make,
                form,
                id=f"{make.__name__}-{form}",
                marks=marks,
            )


MODELS = list(models())
# formats that transformers itself reads
STOCK_METHODS = {(gpt_oss, "mxfp4"): "mxfp4", (qwen, "fp8_block"): "fp8"}


@pytest.mark.parametrize("make, form", MODELS)
def test_save_and_load(make, form, tmp_path, capsys):
    model = make()
    quantized = copy.deepcopy(model)
    receipt = moe_runtime.quantize_experts(quantized, form)

    assert str(receipt) in capsys.readouterr().out
    expected_bytes = receipt.before / 4 * packed.bytes_per_weight(form)
    assert receipt.after == pytest.approx(expected_bytes, rel=0.2)
    folder = tmp_path / "quantized"
    plain = tmp_path / "plain"
    with torch.no_grad():
        logits = quantized(IDS).logits
        assert error(logits, twin_of(model, quantized)(IDS).logits) < 5e-6
        moe_runtime.save_quantized(quantized, folder)
        loaded = moe_runtime.load_quantized(folder)
        assert torch.equal(loaded(IDS).logits, logits)
        model.save_pretrained(plain)
        state = quantized.state_dict()
        # quantized while loading, too
        for other in (loaded, moe_runtime.load_quantized(plain, form)):
            theirs = other.state_dict()
            assert state.keys() == theirs.keys()
            for key in state:
                assert torch.equal(
                    state[key].view(torch.uint8),
                    theirs[key].view(torch.uint8),
                )
        if (make, form) in STOCK_METHODS:
            assert quant_method(folder) == STOCK_METHODS[make, form]
            stock = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
            )
            assert error(stock(IDS).logits, logits) < 5e-6
        else:  # no other library mistakes the bytes for weights
            with pytest.raises(
                RuntimeError,
                match="size mismatch|ignore_mismatched_sizes",
            ):
                AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(
        ValueError,
        match=r"moe_runtime\.save_quantized\(model, folder\)",
    ):
        quantized.save_pretrained(tmp_path / "no")


@pytest.mark.parametrize("make, form", MODELS)
def test_adapters_train_and_the_bytes_stay(make, form, tmp_path):
    model = make()
    quantized = quantized_of(model, form)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_parameters=TARGETS,
        init_lora_weights=False,
    )
    # PEFT sees the shapes in a copy as well
    mine = get_peft_model(copy.deepcopy(quantized), config)
    theirs = get_peft_model(twin_of(model, quantized), copy.deepcopy(config))

    assert mine.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()
    lora = {}
    for name, tensor in mine.state_dict().items():
        if "lora" in name:
            lora[name] = tensor
    assert lora
    assert not theirs.load_state_dict(lora, strict=False).unexpected_keys
    before = digests(mine)
    results = []
    for one in (mine, theirs):
        out = one(input_ids=IDS, labels=IDS)
        out.loss.backward()
        results.append({"logits": out.logits.detach()} | tiny.gradients(one))
    assert results[0].keys() == results[1].keys()
    tiny.assert_close(*results, 2e-5)
    torch.optim.AdamW(tiny.trained(mine), lr=1e-2, weight_decay=0.1).step()
    assert digests(mine) == before
    for merge in (mine.merge_adapter, mine.merge_and_unload):
        with pytest.raises(
            ValueError,
            match="an adapter cannot be merged into it",
        ):
            merge()
    assert digests(mine) == before
    mine.save_pretrained(tmp_path)  # only the adapter
    again = PeftModel.from_pretrained(copy.deepcopy(quantized), tmp_path)
    assert torch.equal(again(IDS).logits, mine(IDS).logits)


def test_casts_do_not_reach_the_bytes():
    quantized = quantized_of(qwen(), "nf4")
    before = digests(quantized)
    assert digests(quantized.to(torch.bfloat16)) == before
    assert quantized(IDS).logits.isfinite().all()
    with pytest.raises(RuntimeError, match="floating point"):
        experts_in(quantized)[0].down_proj.requires_grad_(True)


def test_our_own_layer():
    layer = MoE(
        MoEConfig(
            hidden_size=64, intermediate_size=128, num_experts=4, top_k=2, gate="softmax_topk"
        )
    )
    x = torch.randn(5, 64)
    before = copy.deepcopy(layer)
    moe_runtime.quantize_experts(layer, "nf4")
    for name in ("gate_up_proj", "down_proj"):
        weight = packed.reference(*modules.get(layer.experts, name))
        getattr(before.experts, name).data.copy_(weight)

    assert error(layer(x), before(x)) < 5e-6


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    page = ROOT / "docs" / "quantized-experts.md"
    examples = [fence for fence in fences(page) if fence.language == "python"]
    monkeypatch.chdir(tmp_path)
    qwen(vocab_size=len(TOKENIZER)).save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    (tmp_path / "data.jsonl").write_text('{"text": "one two three"}\n' * 4)
    for example in examples:
        exec(compile(example.text, str(page), "exec"), {})
    names = Checkpoint("adapter", "adapter_model.safetensors").keys()

    assert sum("experts" in name for name in names) == 4


def fp8_model(scale_fmt: str = "float", **sizes):
    """Qwen3-MoE with transformers' own FP8Experts, and the equivalent model in float32."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    plain = qwen(**sizes)
    model = copy.deepcopy(plain)
    source = experts_in(plain)[0]
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    replace_with_fp8_linear(
        model,
        linear,
        FineGrainedFP8Config(scale_fmt=scale_fmt),
    )
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    for name in ("gate_up_proj", "down_proj"):
        data, (scale,), _ = packed.pack(
            getattr(source, name).detach(),
            "fp8_block",
        )
        if scale_fmt == "ue8m0":
            scale = torch.exp2(scale.log2().round()).to(torch.float8_e8m0fnu)
        getattr(experts, name).data = data
        getattr(experts, f"{name}_scale_inv").data = scale
        getattr(source, name).data.copy_(dequantized(data, scale))
    return model, plain


def dequantized(data, scale) -> torch.Tensor:
    each = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return data.double() * each[:, : data.shape[1], : data.shape[2]]


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize(
    "scale_fmt",
    ["float", "ue8m0", "strided", "bfloat16"],
)
def test_transformers_own_fp8_experts_are_served(scale_fmt, backend, monkeypatch):
    monkeypatch.setattr(cpp, "_found", cpu_build.library())
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model, plain = fp8_model(
        "ue8m0" if scale_fmt == "ue8m0" else "float",
        hidden_size=256,
    )
    (mine,) = experts_in(model)
    (theirs,) = experts_in(plain)
    for name in ("gate_up_proj", "down_proj"):
        scale = getattr(mine, f"{name}_scale_inv")
        if scale_fmt == "strided":
            scale.data = torch.stack([scale.data, scale.data * 7], -1)[..., 0]
        elif scale_fmt == "bfloat16":  # as after model.to(torch.bfloat16)
            scale.data = scale.data.bfloat16()
            getattr(theirs, name).data.copy_(
                dequantized(
                    getattr(mine, name).data,
                    scale.data,
                )
            )

    assert moe_runtime.patch(model) == 1
    with torch.no_grad():
        plain.set_experts_implementation("eager")
        assert error(model(IDS).logits, plain.double()(IDS).logits) < 5e-6
    with pytest.raises(ValueError, match="it is already quantized"):
        moe_runtime.quantize_experts(model, "nf4")


def narrow():
    return qwen(moe_intermediate_size=96)


def broken():
    model = qwen()
    experts_in(model)[0].down_proj.data[1, 2, 3] = float("nan")
    return model


@pytest.mark.parametrize(
    "make, form, says",
    [
        pytest.param(
            qwen,
            "nf5",
            "format must be one of nf4, .*'nf5'",
            id="no such format",
        ),
        pytest.param(
            lambda: quantized_of(qwen(), "nf4"), "int8", "it is already quantized", id="twice"
        ),
        pytest.param(
            narrow,
            "fp8_block",
            "gate and up, which have 96 each",
            id="halves",
        ),
        pytest.param(
            broken,
            "mxfp4",
            "down_proj of expert 1 has weights that are NaN",
            id="NaN",
        ),
    ],
)
def test_refused_before_anything_changes(make, form, says):
    model = make()
    before = tiny.state(model)
    with pytest.raises(ValueError, match=says):
        moe_runtime.quantize_experts(model, form)
    after = model.state_dict()

    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor.nan_to_num(), after[key].nan_to_num())


def test_loading_reads_one_expert_at_a_time(tmp_path, monkeypatch):
    qwen(num_experts=16).to(torch.bfloat16).save_pretrained(tmp_path)
    read = []
    get = Checkpoint.get
    monkeypatch.setattr(
        Checkpoint,
        "get",
        lambda self, key: read.append(key) or get(self, key),
    )
    (experts,) = experts_in(moe_runtime.load_quantized(tmp_path, "nf4"))

    assert sum("experts" in key for key in read) == 16 * 3
    held = sum(tensor.nbytes for tensor in (*experts.parameters(), *experts.buffers()))
    assert held < 16 * 3 * 64 * 128 * 2 / 3.3


def test_what_cannot_run_packed_experts_is_refused():
    quantized = quantized_of(qwen(), "nf4")
    expected = quantized(IDS).logits
    with pytest.raises(
        ValueError,
        match="in nf4, which the previous implementation cannot run",
    ):
        moe_runtime.unpatch(quantized)
    wrapped = get_peft_model(quantized, LoraConfig(target_modules=["q_proj"]))
    for model in (quantized, quantized.model, copy.deepcopy(quantized), wrapped):
        for implementation in ("eager", {"": "grouped_mm"}):
            with pytest.raises(
                ValueError,
                match="in nf4, which '(eager|grouped_mm)' cannot run",
            ):
                model.set_experts_implementation(implementation)

    assert moe_runtime.patch(quantized) == 1
    quantized.set_experts_implementation("moe_runtime")
    assert torch.equal(quantized(IDS).logits, expected)


OFFLOADS = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "cpu, scales too": lambda model, folder: accelerate.cpu_offload(
        model, "cpu", offload_buffers=True
    ),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "dispatch": lambda model, folder: accelerate.dispatch_model(
        model, PLACES, main_device="cpu", offload_dir=folder
    ),
}
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@torch.no_grad()
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("make, form", MODELS)
def test_offloaded_by_accelerate(make, form, offload, tmp_path):
    quantized = quantized_of(make(), form)
    expected = quantized(IDS).logits
    (experts,) = experts_in(quantized)
    shape = experts.down_proj.ds_shape
    OFFLOADS[offload](quantized, tmp_path)
    for _ in range(2):
        assert torch.equal(quantized(IDS).logits, expected)
        assert experts.down_proj.is_meta
        assert experts.down_proj.ds_shape == shape
    with pytest.raises(
        ValueError,
        match="is offloaded. Call save_quantized before",
    ):
        moe_runtime.save_quantized(quantized, tmp_path / "folder")


@torch.no_grad()
@pytest.mark.parametrize(
    "device_map, several",
    [
        ("auto", True),
        ("cuda:0", False),
        (None, False),
        ({"": 0}, False),
        ({"": "disk"}, True),
        ({"model": 0, "lm_head": "cpu"}, True),
    ],
)
def test_a_device_map_of_several_places_or_a_disk_is_dispatched(device_map, several):
    assert offload.is_several(device_map) == several


def test_offload_of_a_folder_and_of_16_bits(tmp_path):
    folder = tmp_path / "model"
    qwen().save_pretrained(folder)
    expected = moe_runtime.load_quantized(folder, "nf4")(IDS).logits
    disk = {"device_map": PLACES, "offload_folder": tmp_path / "disk"}
    for options, is_meta in ((disk, True), ({"device_map": "auto"}, False)):
        model = moe_runtime.load_quantized(folder, "nf4", **options)
        assert torch.equal(model(IDS).logits, expected)
        assert experts_in(model)[0].down_proj.is_meta == is_meta
    model = qwen()
    moe_runtime.patch(model)
    expected = model(IDS).logits
    accelerate.cpu_offload(model, "cpu")
    assert torch.equal(model(IDS).logits, expected)
    assert experts_in(model)[0].down_proj.is_meta
    with pytest.raises(
        ValueError,
        match="Quantize the model first, then offload it",
    ):
        moe_runtime.quantize_experts(model, "nf4")


def test_offloaded_adapters_of_stacks_are_refused():
    quantized = quantized_of(qwen(), "nf4")
    accelerate.cpu_offload(quantized, "cpu")
    model = get_peft_model(
        quantized,
        LoraConfig(r=4, target_parameters=TARGETS),
    )
    with pytest.raises(
        ValueError,
        match="is offloaded, but PEFT reads its weights without",
    ):
        model(IDS)


def test_folders_that_cannot_be_loaded_are_refused(tmp_path):
    plain = tmp_path / "plain"
    nf4 = tmp_path / "nf4"
    model = qwen()
    model.save_pretrained(plain)
    with pytest.raises(ValueError, match="has no quantized experts"):
        moe_runtime.save_quantized(model, "nowhere")
    moe_runtime.save_quantized(quantized_of(model, "nf4"), nf4)
    for options, says in (({}, "are not quantized. Pass a format"),):
        with pytest.raises(ValueError, match=says):
            moe_runtime.load_quantized(plain, **options)
    with pytest.warns(
        UserWarning,
        match="quantized to nf4, and int8 rounds them a second time",
    ):
        moe_runtime.load_quantized(nf4, "int8")
    whole = read_json(nf4 / "config.json")
    for changes, says in (
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'}, which load_quantized cannot"),
        ({"model_type": "no-such-model"}, "cannot be loaded by transformers"),
    ):
        edit_json(nf4 / "config.json", **whole | changes)
        with pytest.raises(ValueError, match=says):
            moe_runtime.load_quantized(nf4)
