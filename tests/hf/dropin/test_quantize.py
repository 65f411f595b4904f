"""Stock models whose experts are quantized: logits, adapters, saving and loading, and what is
refused.
"""

import copy
import hashlib
import json
import subprocess
import sys

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
from moe_runtime.modules import packed as modules
from moe_runtime.modules.moe import MoE
from moe_runtime.native.library import cpp
from moe_runtime.ops import packed
from tests.hf import tiny
from tests.hf.dropin.test_layers import TOKENIZER
from tests.support import cpu_build
from tests.support.fences import ROOT, fences
from tests.support.patience import PATIENCE

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
        {"moe_intermediate_size": 128, "num_experts": 3, "norm_topk_prob": True} | SIZES | sizes
    )
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))


def gpt_oss(**sizes):
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**{"num_local_experts": 3} | SIZES | sizes))


def experts_in(model):
    return list(quantize.experts_of(model).values())


def twin_of(model, quantized):
    """`model` with the weights that the bytes of `quantized` mean, on transformers' own code."""
    twin = copy.deepcopy(model)
    for mine, theirs in zip(experts_in(twin), experts_in(quantized), strict=True):
        for name in modules.layouts(theirs):
            weight = packed.reference(*modules.get(theirs, name)).float()
            getattr(mine, name).data.copy_(weight.transpose(1, 2) if mine.is_transposed else weight)
    twin.set_experts_implementation("eager")
    return twin


def quantized_of(model, form):
    quantized = copy.deepcopy(model)
    return quantized, moe_runtime.quantize_experts(quantized, form)


def error(got, want) -> float:
    return ((got - want).norm() / want.norm()).item()


def digests(model) -> list[str]:
    tensors = []
    for m in experts_in(model):
        for t in (*m.parameters(), *m.buffers()):
            if t.dtype == torch.uint8:
                tensors.append(t)
    assert tensors
    return [hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for tensor in tensors]


FAST = {(qwen, "nf4"), (gpt_oss, "mxfp4"), (qwen, "fp8_block")}
MODELS = [
    pytest.param(
        make,
        form,
        id=f"{make.__name__}-{form}",
        marks=[] if (make, form) in FAST else pytest.mark.slow,
    )
    for make in (qwen, gpt_oss)
    for form in packed.FORMATS
]


@pytest.mark.parametrize("make, form", MODELS)
def test_save_and_load(make, form, tmp_path, capsys):
    model = make()
    quantized, receipt = quantized_of(model, form)
    assert str(receipt) in capsys.readouterr().out
    assert receipt.after == pytest.approx(
        receipt.before / 4 * packed.bytes_per_weight(form), rel=0.2
    )
    with torch.no_grad():
        logits = quantized(IDS).logits
        assert error(logits, twin_of(model, quantized)(IDS).logits) < 5e-6
        folder = tmp_path / "quantized"
        plain = tmp_path / "plain"
        moe_runtime.save_quantized(quantized, folder)
        loaded = moe_runtime.load_quantized(folder)
        assert torch.equal(loaded(IDS).logits, logits)
        model.save_pretrained(plain)
        for other in (loaded, moe_runtime.load_quantized(plain, form)):  # as it was read, too
            mine = quantized.state_dict()
            theirs = other.state_dict()
            assert mine.keys() == theirs.keys()
            for key in mine:
                assert torch.equal(mine[key].view(torch.uint8), theirs[key].view(torch.uint8))
        method = json.loads((folder / "config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        if (make, form) in ((gpt_oss, "mxfp4"), (qwen, "fp8_block")):
            assert method == {"mxfp4": "mxfp4", "fp8_block": "fp8"}[form]
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert error(theirs(IDS).logits, logits) < 5e-6
        else:  # no one else takes the bytes for weights
            with pytest.raises(RuntimeError, match="size mismatch|ignore_mismatched_sizes"):
                AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"moe_runtime\.save_quantized\(model, folder\)"):
        quantized.save_pretrained(tmp_path / "no")


@pytest.mark.parametrize("make, form", MODELS)
def test_adapters_train_and_the_bytes_stay(make, form, tmp_path):
    model = make()
    quantized, _ = quantized_of(model, form)
    config = LoraConfig(r=4, lora_alpha=8, target_parameters=TARGETS, init_lora_weights=False)
    # PEFT sees the shapes in a copy as well
    mine = get_peft_model(copy.deepcopy(quantized), config)
    theirs = get_peft_model(twin_of(model, quantized), copy.deepcopy(config))
    lora = {name: tensor for name, tensor in mine.state_dict().items() if "lora" in name}
    assert lora
    assert not theirs.load_state_dict(lora, strict=False).unexpected_keys
    before = digests(mine)
    results = []
    for one in (mine, theirs):
        out = one(input_ids=IDS, labels=IDS)
        out.loss.backward()
        results.append({"logits": out.logits.detach()} | tiny.gradients(one))
    assert results[0].keys() == results[1].keys()
    assert max(error(results[0][name], results[1][name]) for name in results[0]) < 2e-5
    trained = tiny.trained(mine)
    torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1).step()
    assert digests(mine) == before
    for merge in (mine.merge_adapter, mine.merge_and_unload):
        with pytest.raises(ValueError, match="an adapter cannot be merged into it"):
            merge()
    assert digests(mine) == before
    mine.save_pretrained(tmp_path)  # the adapter alone
    again = PeftModel.from_pretrained(copy.deepcopy(quantized), tmp_path)
    assert torch.equal(again(IDS).logits, mine(IDS).logits)


@pytest.mark.slow
def test_compiles_in_one_graph_and_is_computed_again():
    quantized, _ = quantized_of(qwen(), "nf4")
    config = LoraConfig(r=4, target_parameters=TARGETS, init_lora_weights=False)
    model = get_peft_model(quantized, config)
    layer = model.base_model.model.model.layers[0].mlp
    x = torch.randn(2, 5, 64, requires_grad=True)
    want = layer(x)
    got = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train().zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append(list(tiny.gradients(model).values()))
    assert len(grads[0]) == 4
    assert all(map(torch.equal, *grads))
    with torch.no_grad():
        logits = model(IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert error(model(IDS).logits.float(), logits) < 0.05


def test_a_stack_spread_over_ranks_is_refused(monkeypatch):
    quantized, _ = quantized_of(qwen(), "nf4")
    monkeypatch.setattr(modules, "is_distributed", lambda tensor: True)
    with pytest.raises(ValueError, match="gate_up_proj is quantized and distributed over ranks"):
        quantized(IDS)


def test_names_are_those_of_the_libraries():
    states = {form: quantized_of(gpt_oss(), form)[0].state_dict() for form in ("nf4", "mxfp4")}
    states["fp8_block"] = quantized_of(qwen(), "fp8_block")[0].state_dict()
    path = "model.layers.0.mlp.experts."
    nf4 = states["nf4"]
    mxfp4 = states["mxfp4"]
    fp8 = states["fp8_block"]
    assert nf4[path + "gate_up_proj"].shape == (3 * 64 * 256 // 2, 1)
    state = json.loads(bytes(nf4[path + "gate_up_proj.quant_state.bitsandbytes__nf4"].tolist()))
    assert (state["shape"], state["blocksize"], state["dtype"]) == ([3, 64, 256], 64, "float32")
    assert {key.rpartition("proj")[2] for key in nf4 if path + "down_proj." in key} == {
        ".absmax",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_map",
        ".quant_state.bitsandbytes__nf4",
    }
    assert mxfp4[path + "gate_up_proj_blocks"].shape == (3, 256, 2, 16)
    assert mxfp4[path + "gate_up_proj_scales"].shape == (3, 256, 2)
    assert fp8[path + "down_proj"].dtype == torch.float8_e4m3fn
    assert fp8[path + "down_proj_scale_inv"].shape == (3, 1, 1)


def test_state_dict_that_does_not_fit_is_refused():
    quantized, _ = quantized_of(qwen(), "nf4")
    state = quantized.state_dict()
    key = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(RuntimeError, match=r"down_proj\.absmax is missing"):
        quantized.load_state_dict({name: t for name, t in state.items() if name != f"{key}.absmax"})
    with pytest.raises(RuntimeError, match="must have 12288 elements"):
        quantized.load_state_dict(state | {key: state[key][1:]})
    other = quantized_of(qwen(), "nf4")[0]
    other.load_state_dict(state)
    assert digests(other) == digests(quantized)


def test_casts_do_not_reach_the_bytes():
    quantized, _ = quantized_of(qwen(), "nf4")
    before = digests(quantized)
    assert digests(quantized.to(torch.bfloat16)) == before
    assert quantized(IDS).logits.isfinite().all()
    with pytest.raises(RuntimeError, match="floating point"):
        experts_in(quantized)[0].down_proj.requires_grad_(True)


def test_our_own_layer():
    torch.manual_seed(0)
    layer = MoE(
        MoEConfig(
            hidden_size=64, intermediate_size=128, num_experts=4, top_k=2, gate="softmax_topk"
        )
    )
    x = torch.randn(5, 64)
    before = copy.deepcopy(layer)
    moe_runtime.quantize_experts(layer, "nf4")
    for name in ("gate_up_proj", "down_proj"):
        getattr(before.experts, name).data.copy_(
            packed.reference(*modules.get(layer.experts, name))
        )
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
    """Qwen3-MoE with transformers' own FP8Experts, and the model in float32 that they came from."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    plain = qwen(**sizes)
    model = copy.deepcopy(plain)
    source = experts_in(plain)[0]
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    replace_with_fp8_linear(model, linear, FineGrainedFP8Config(scale_fmt=scale_fmt))
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    for name in ("gate_up_proj", "down_proj"):
        data, (scale,), _ = packed.pack(getattr(source, name).detach(), "fp8_block")
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
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0", "strided", "bfloat16"])
def test_transformers_own_fp8_experts_are_served(scale_fmt, backend, monkeypatch):
    monkeypatch.setattr(cpp, "_found", cpu_build.library())
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model, plain = fp8_model("ue8m0" if scale_fmt == "ue8m0" else "float", hidden_size=256)
    (mine,), (theirs,) = experts_in(model), experts_in(plain)
    for name in ("gate_up_proj", "down_proj"):
        scale = getattr(mine, f"{name}_scale_inv")
        if scale_fmt == "strided":
            scale.data = torch.stack([scale.data, scale.data * 7], -1)[..., 0]
        elif scale_fmt == "bfloat16":  # as model.to(torch.bfloat16) leaves them
            scale.data = scale.data.bfloat16()
            getattr(theirs, name).data.copy_(dequantized(getattr(mine, name).data, scale.data))
    assert moe_runtime.patch(model) == 1
    with torch.no_grad():
        plain.set_experts_implementation("eager")
        assert error(model(IDS).logits, plain.double()(IDS).logits) < 5e-6
    with pytest.raises(ValueError, match="it is already quantized"):
        moe_runtime.quantize_experts(model, "nf4")


def test_fp8_that_transformers_keeps_on_a_gpu(tmp_path, monkeypatch):
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    quantized, _ = quantized_of(qwen(), "fp8_block")
    moe_runtime.save_quantized(quantized, tmp_path)
    # which asks for a GPU
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    loaded = moe_runtime.load_quantized(tmp_path)
    assert type(experts_in(loaded)[0]).__name__ == "FP8Experts"
    assert torch.equal(loaded(IDS).logits, quantized(IDS).logits)
    with (
        pytest.warns(UserWarning, match="second time"),
        pytest.raises(ValueError, match="as FP8Experts, not in nf4"),
    ):
        moe_runtime.load_quantized(tmp_path, "nf4")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"block_size": (64, 64)}, r"blocks of \(64, 64\)"),
        ({"block_size": None}, "blocks of None"),
        ({"gate_softcap": 3.0}, "moe_mlp supports"),
    ],
)
def test_fp8_experts_that_no_kernel_reads_are_refused(change, says):
    model, _ = fp8_model()
    vars(experts_in(model)[0]).update(change, up_softcap=3.0)
    with pytest.raises(ValueError, match=says):
        moe_runtime.patch(model)


def test_refused_before_anything_changes():
    model = qwen()
    twice, _ = quantized_of(model, "nf4")
    spread = qwen(moe_intermediate_size=96)
    before = copy.deepcopy(model.state_dict())
    for changed, form, says in (
        (model, "nf5", "format must be"),
        (twice, "int8", "it is already quantized"),
        (spread, "fp8_block", "gate and up, which have 96 each"),
        (spread, "nf4", "of 64 elements, but they have 96"),
        (torch.nn.Linear(2, 2), "nf4", "no experts"),
        (qwen().double(), "nf4", "must be float16, .*torch.float64"),
    ):
        with pytest.raises(ValueError, match=says):
            moe_runtime.quantize_experts(changed, form)
    tiny.assert_equal(before, model.state_dict())
    with pytest.raises(ValueError, match="has no quantized experts"):
        moe_runtime.save_quantized(model, "nowhere")


PEAK = """
import sys, torch, moe_runtime
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
moe_runtime.load_quantized(sys.argv[1], "nf4", dtype="bfloat16")  # a small one: imports, compilers, thread pools
before = peak()
moe_runtime.load_quantized(sys.argv[2], "nf4", dtype="bfloat16")
print("grew", peak() - before)
"""  # noqa: E501


@pytest.mark.slow
def test_the_16_bit_stacks_are_never_in_memory(tmp_path):
    for name, experts in (("small", 2), ("large", 96)):
        qwen(num_experts=experts, hidden_size=512, moe_intermediate_size=512).to(
            torch.bfloat16
        ).save_pretrained(tmp_path / name)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    stacks = 96 * 3 * 512 * 512 * 2
    grew = int(done.stdout.split()[-1])
    assert grew < 0.5 * stacks, (grew, stacks)  # 0.26 are the packed ones


def test_loading_reads_one_expert_at_a_time(tmp_path, monkeypatch):
    model = qwen(num_experts=16, dtype=torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    read = []
    stacks = 16 * 3 * 64 * 128 * 2
    get = Checkpoint.get
    monkeypatch.setattr(Checkpoint, "get", lambda self, key: read.append(key) or get(self, key))
    loaded = moe_runtime.load_quantized(tmp_path, "nf4")
    assert len([key for key in read if "experts" in key]) == 16 * 3
    held = sum(
        t.numel() * t.element_size()
        for m in experts_in(loaded)
        for t in (*m.parameters(), *m.buffers())
    )
    assert held < stacks / 3.3
    with pytest.raises(ValueError, match="are not quantized. Pass a format"):
        moe_runtime.load_quantized(tmp_path)
    with pytest.raises(ValueError, match="format must be .*but got 'nf3'"):
        moe_runtime.load_quantized(tmp_path, "nf3")


def test_what_cannot_run_packed_experts_is_refused(tmp_path):
    quantized, _ = quantized_of(qwen(), "nf4")
    expected = quantized(IDS).logits
    with pytest.raises(
        ValueError, match="packed in nf4, which the previous implementation cannot run"
    ):
        moe_runtime.unpatch(quantized)
    wrapped = get_peft_model(quantized, LoraConfig(target_modules=["q_proj"]))
    for model in (quantized, quantized.model, copy.deepcopy(quantized), wrapped):
        for implementation in ("eager", {"": "grouped_mm"}):
            with pytest.raises(
                ValueError, match="packed in nf4, which '(eager|grouped_mm)' cannot run"
            ):
                model.set_experts_implementation(implementation)
    assert moe_runtime.patch(quantized) == 1
    quantized.set_experts_implementation("moe_runtime")
    assert torch.equal(quantized(IDS).logits, expected)
    qwen().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="experts_implementation is 'eager'"):
        moe_runtime.load_quantized(tmp_path, "nf4", experts_implementation="eager")


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
    quantized, _ = quantized_of(make(), form)
    expected = quantized(IDS).logits
    shapes = [module.down_proj.ds_shape for module in experts_in(quantized)]
    OFFLOADS[offload](quantized, tmp_path)
    for _ in range(2):
        assert torch.equal(quantized(IDS).logits, expected)
        stacks = [module.down_proj for module in experts_in(quantized)]
        assert [(stack.device.type, stack.ds_shape) for stack in stacks] == [
            ("meta", shape) for shape in shapes
        ]
    with pytest.raises(ValueError, match="is offloaded. Call save_quantized before"):
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
    qwen().save_pretrained(tmp_path / "model")
    expected = moe_runtime.load_quantized(tmp_path / "model", "nf4")(IDS).logits
    model = moe_runtime.load_quantized(
        tmp_path / "model", "nf4", device_map=PLACES, offload_folder=tmp_path / "disk"
    )
    assert torch.equal(model(IDS).logits, expected)
    assert experts_in(model)[0].down_proj.is_meta
    model = moe_runtime.load_quantized(tmp_path / "model", "nf4", device_map="auto")
    assert torch.equal(model(IDS).logits, expected)
    model = qwen()
    moe_runtime.patch(model)
    expected = model(IDS).logits
    accelerate.cpu_offload(model, "cpu")
    assert torch.equal(model(IDS).logits, expected)
    assert experts_in(model)[0].down_proj.is_meta
    with pytest.raises(ValueError, match="Quantize the model first, then offload it"):
        moe_runtime.quantize_experts(model, "nf4")


def test_offloaded_adapters_of_stacks_are_refused():
    quantized, _ = quantized_of(qwen(), "nf4")
    accelerate.cpu_offload(quantized, "cpu")
    model = get_peft_model(quantized, LoraConfig(r=4, target_parameters=TARGETS))
    with pytest.raises(
        ValueError, match="is offloaded, but PEFT reads its weights without accelerate's hooks"
    ):
        model(IDS)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_peft_counts_weights_not_bytes(form):
    model, (quantized, _) = qwen(), quantized_of(qwen(), form)
    config = LoraConfig(r=4, target_parameters=TARGETS)
    counts = []
    for one in (model, quantized):
        counts.append(get_peft_model(one, copy.deepcopy(config)).get_nb_trainable_parameters())
    assert counts[0] == counts[1]


def test_messages(tmp_path):
    for format in (4, None, ["nf4"]):
        with pytest.raises(ValueError, match="format must be one of nf4, "):
            moe_runtime.quantize_experts(qwen(), format)
    with pytest.raises(
        ValueError, match=r"is torch.float64. Convert the model first, with model.float\(\)"
    ):
        moe_runtime.quantize_experts(qwen().double(), "nf4")
    broken = qwen()
    broken.model.layers[0].mlp.experts.down_proj.data[1, 2, 3] = float("nan")
    before = copy.deepcopy(broken.state_dict())
    with pytest.raises(ValueError, match="down_proj of expert 1 has weights that are NaN"):
        moe_runtime.quantize_experts(broken, "mxfp4")
    assert broken.state_dict().keys() == before.keys()
    quantized, _ = quantized_of(qwen(), "nf4")
    with pytest.raises(
        RuntimeError,
        match="torch.float32, which is not quantized. Load such weights .* before quantize_experts",
    ):
        quantized.load_state_dict(qwen().state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*experts\.down_proj"):
        quantized.load_state_dict(
            {name: t for name, t in quantized.state_dict().items() if "down_proj" not in name}
        )
    moe_runtime.save_quantized(quantized, tmp_path / "nf4")
    with pytest.warns(UserWarning, match="quantized to nf4, and int8 rounds them a second time"):
        moe_runtime.load_quantized(tmp_path / "nf4", "int8")
    config = json.loads((tmp_path / "nf4" / "config.json").read_text())
    (tmp_path / "nf4" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(ValueError, match="quantized by 'awq', which load_quantized cannot read"):
        moe_runtime.load_quantized(tmp_path / "nf4")
    (tmp_path / "nf4" / "config.json").write_text(
        json.dumps(config | {"model_type": "no-such-model"})
    )
    with pytest.raises(ValueError, match="cannot be loaded by transformers") as caught:
        moe_runtime.load_quantized(tmp_path / "nf4")
    assert "Pass a folder" not in str(caught.value)
