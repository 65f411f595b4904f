"""The saved format: the contents of the folder, who can and cannot load it, and that the model
generates, compiles and trains.
"""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from moe_runtime.hf.models import modeling, swap
from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.io.files import read_json
from tests.hf import tiny
from tests.support.captured import captured
from tests.support.patience import PATIENCE


def reload(model, folder, **kwargs):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def mergeable(model_type="llama", soup=False, **settings):
    model = tiny.upcycled(model_type, **settings)
    swap.moe_to_mergeable(model, shared_rate=0.8, soup=soup)
    with torch.no_grad():
        for module in modeling.moe_layers(model).values():
            module.mixing_logits.add_(torch.arange(module.mixing_logits.numel()) / 7)
    return model


def test_config_json(tmp_path):
    model = tiny.upcycled("llama", layers=[1], router="mlp")
    model.save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    block = {
        "config": tiny.config_of(tiny.dense(), router="mlp").to_dict(),
        "format": 1,
        "method": "xft",
        "stage": "moe",
        "layers": [1],
        "base_model_type": "llama",
        "base_architecture": "LlamaForCausalLM",
        "shared_rate": None,
        "soup": False,
    }
    expected = {
        "moe_runtime": block,
        "model_type": "moe_runtime_llama",
        "architectures": ["MoeRuntimeLlamaForCausalLM"],
        "num_experts": 3,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 48,
        "decoder_sparse_step": 1,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "rope_theta": 1e5,
        "auto_map": {
            "AutoConfig": "modeling_moe_runtime.MoeRuntimeLlamaConfig",
            "AutoModel": "modeling_moe_runtime.MoeRuntimeLlamaModel",
            "AutoModelForCausalLM": "modeling_moe_runtime.MoeRuntimeLlamaForCausalLM",
        },
    }

    assert {key: config[key] for key in expected} == expected
    keys = set(load_file(tmp_path / "model.safetensors"))
    moe = {key.partition(".layers.1.mlp.")[2] for key in keys} - {""}
    assert moe == {
        "gate.weight",
        "gate.weight_out",
        "experts.gate_up_proj",
        "experts.down_proj",
        "experts.gate_up_proj_bias",
        "experts.down_proj_bias",
    }
    assert "model.layers.0.mlp.gate_proj.weight" in keys
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_moe_runtime.py",
    ]


@pytest.mark.parametrize("model_type", tiny.ALL)
def test_the_model_without_its_head_is_the_same_model(model_type, tmp_path):
    """A serving engine with its own head builds AutoModel, also from the config on the meta
    device.
    """
    model = tiny.upcycled(model_type, layers=[1], router="mlp")
    model.save_pretrained(tmp_path / "whole")
    inner = AutoModel.from_pretrained(tmp_path / "whole")

    assert type(inner) is type(model.base_model)
    assert type(inner).__name__.endswith("Model")
    assert set(inner.state_dict()) == set(model.base_model.state_dict())
    assert list(modeling.moe_layers(inner)) == [1]
    hidden = model.base_model(tiny.batch()).last_hidden_state
    inner.save_pretrained(tmp_path / "inner")
    for loaded in (inner, AutoModel.from_pretrained(tmp_path / "inner")):
        assert torch.equal(loaded(tiny.batch()).last_hidden_state, hidden)
    with torch.device("meta"):
        empty = AutoModel.from_config(model.config)
    shapes = [(name, p.shape) for name, p in inner.named_parameters()]
    assert [(name, p.shape) for name, p in empty.named_parameters()] == shapes
    if not model.config.tie_word_embeddings:
        with pytest.raises(ValueError, match="missing: (lm_head|embed_out)"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "inner")


@pytest.mark.parametrize("model_type", tiny.ALL)
@pytest.mark.parametrize("soup", [False, True])
def test_mergeable_models_come_back(model_type, soup, tmp_path):
    model = mergeable(model_type, soup=soup)
    loaded = reload(model, tmp_path, dtype=torch.float32)
    assert torch.equal(tiny.logits(loaded), tiny.logits(model))
    trained = [name for name, p in loaded.named_parameters() if p.requires_grad]
    assert len(trained) == 2
    for name in trained:
        assert name.endswith(".mlp.mixing_logits")
    assert loaded.config.moe_runtime == model.config.moe_runtime


def test_mixing_logits_stay_float32(tmp_path):
    model = tiny.dense(dtype=torch.bfloat16)
    swap.dense_to_moe(model, tiny.config_of(model))
    swap.moe_to_mergeable(model)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.mixing_logits.fill_(1.00123)
    model.save_pretrained(tmp_path)
    for options, dtype in (({}, torch.bfloat16), ({"dtype": torch.float16}, torch.float16)):
        loaded = (
            AutoModelForCausalLM.from_pretrained(
                tmp_path,
                **options,
            )
            .model.layers[0]
            .mlp
        )
        assert loaded.mixing_logits.dtype == torch.float32
        assert torch.equal(loaded.mixing_logits, mlp.mixing_logits)
        assert loaded.experts.down_proj.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [{}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}],
)
def test_sharded(options, tmp_path):
    model = tiny.upcycled("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert torch.equal(tiny.logits(loaded), tiny.logits(model))
    assert set(loaded._no_split_modules) == {"Qwen2DecoderLayer"}


def test_registration_is_idempotent():
    from transformers import CONFIG_MAPPING

    classes = modeling.model_classes("llama")
    modeling.register_auto_classes()
    modeling.register_auto_classes()

    assert modeling.model_classes("llama") is classes
    assert {
        CONFIG_MAPPING[f"moe_runtime_{model_type}"].base_type for model_type in FAMILIES
    } == set(FAMILIES)
    assert modeling.MoeRuntimeLlamaForCausalLM is classes.causal_lm
    with pytest.raises(
        AttributeError,
        match="has no attribute 'MoeRuntimeOptConfig'",
    ):
        _ = modeling.MoeRuntimeOptConfig


RUN = """
import json, sys, torch
{imports}
from transformers import AutoModelForCausalLM
folder, flags = sys.argv[1], json.loads(sys.argv[2])
try:
    model = AutoModelForCausalLM.from_pretrained(folder, **flags)
except ValueError as error:
    print("refused:", " ".join(str(error).split()))
else:
    with torch.no_grad():
        logits = model(torch.load(folder + "/ids.pt")).logits
    print(type(model).__name__, torch.equal(logits, torch.load(folder + "/logits.pt")))
    model.save_pretrained(folder + "/again")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "flags", "printed"),
    [
        (
            "from moe_runtime.hf.models.modeling import register_auto_classes as r; r()",
            {},
            "MoeRuntimeLlamaForCausalLM True",
        ),
        ("", {"trust_remote_code": True}, "MoeRuntimeLlamaForCausalLM True"),
        ("", {"trust_remote_code": False}, "refused: .*contains custom code"),
    ],
    ids=["registered", "shim", "neither"],
)
def test_in_a_fresh_process(imports, flags, printed, tmp_path):
    model = tiny.upcycled()
    model.save_pretrained(tmp_path)
    torch.save(tiny.batch(), tmp_path / "ids.pt")
    torch.save(tiny.logits(model), tmp_path / "logits.pt")
    code = [
        sys.executable,
        "-c",
        RUN.format(imports=imports),
        str(tmp_path),
        json.dumps(flags),
    ]
    ran = captured(code, timeout=PATIENCE)

    assert re.match(printed, ran.stdout), ran.stdout + ran.stderr
    if "refused" in printed:
        return
    # no source file is copied next to the weights, and auto_map still names the shim
    again = tmp_path / "again"
    assert [path.name for path in again.glob("*.py")] == ["modeling_moe_runtime.py"]
    for name in ("config.json", "modeling_moe_runtime.py"):
        assert (again / name).read_text() == (tmp_path / name).read_text()


WEIGHT = "model.layers.{}.mlp.{}"


def spoiled(folder, spoil):
    tiny.upcycled().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    spoil(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        WEIGHT.format(1, "gate.weight"),
        WEIGHT.format(0, "experts.down_proj"),
        "model.norm.weight",
    ],
)
def test_a_checkpoint_without_a_tensor_is_refused(name, tmp_path):
    spoiled(tmp_path, lambda state: state.pop(name))
    with pytest.raises(
        ValueError,
        match=rf"1 missing: {re.escape(name)}\. Pass",
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"stage": "fused"}, {"layers": [-1]}, {"layers": None}], ids=str
)
def test_a_config_that_is_not_ours_is_refused(change):
    config = tiny.upcycled().config
    config.moe_runtime |= change
    says = "moe_runtime in config.json must have format 1, a stage of moe.*layers from 0 to 1"
    with pytest.raises(ValueError, match=says):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", tiny.ALL)
@pytest.mark.parametrize("make", [tiny.upcycled, mergeable])
def test_from_config_initialises_everything(model_type, make):
    model = AutoModelForCausalLM.from_config(
        make(
            model_type,
            router="mlp",
            noisy_gate=True,
        ).config
    )
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if ".experts." in name or ".gate." in name:
            std = 0.0 if name.endswith("_bias") else 0.02
            assert abs(parameter.std().item() - std) < 0.01, name
        if name.endswith("mixing_logits"):
            assert torch.equal(parameter, torch.ones(3))
    assert type(model) is type(make(model_type))

    assert tiny.logits(model).isfinite().all()


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma3_text", "phi3", "gpt_neox"],
)
def test_generate_with_and_without_cache(model_type):
    model = tiny.upcycled(
        model_type,
        balance_loss="cv2",
        balance_loss_coef=0.01,
    )
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    ids = tiny.batch(2, 5)
    with_cache = model.generate(ids, use_cache=True, **options)

    assert with_cache.shape == (2, 13)
    assert torch.equal(
        with_cache,
        model.generate(ids, use_cache=False, **options),
    )
