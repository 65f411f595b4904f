"""LoRA experts in a live model: the same function at first, what trains, the saved format, adapters
in and out, refusals.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models import modeling
from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.io.files import read_json
from moe_runtime.methods import lora
from moe_runtime.methods.lora import lora_layers, to_lora_moe
from moe_runtime.modules.lora import TARGETS
from tests.hf import tiny
from tests.hf.models.test_swap import snapshot
from tests.support import dist_lora
from tests.support.dist_launch import launch
from tests.support.lora_models import alone, equalize, lora_model, shake

THREE = [name for name, family in FAMILIES.items() if (*family.up, family.down) == TARGETS]
FORMS = pytest.mark.parametrize("form", ["block", "linear"])


def frozen_in(model) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize(
    "model_type, form",
    [(name, "block") for name in THREE] + [(name, "linear") for name in tiny.ALL],
)
def test_starts_as_the_dense_model_saves_and_merges(model_type, form, tmp_path):
    model = tiny.dense(model_type)
    before = tiny.logits(model)
    config = model.config.to_dict()
    keys = list(model.state_dict())
    assert to_lora_moe(model, num_experts=3, form=form) is model
    assert tiny.distance(tiny.logits(model), before) < 1e-5
    shake(model)
    shaken = tiny.logits(model)
    assert tiny.distance(shaken, before) > 0.05
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(tiny.logits(loaded), shaken)
    assert frozen_in(loaded) == frozen_in(model)

    equalize(loaded, 1)
    one = tiny.logits(loaded)
    assert lora.merge(loaded, alone(loaded, 1)) is loaded
    assert type(loaded) is modeling.model_classes(model_type).base_causal_lm
    assert list(loaded.state_dict()) == keys
    assert tiny.distance(tiny.logits(loaded), one) < 1e-5
    assert tiny.distance(one, before) > 0.05
    ignored = dict.fromkeys(("architectures", "dtype", "_name_or_path", "transformers_version"))
    assert loaded.config.to_dict() | ignored == config | ignored
    assert not frozen_in(loaded)


@FORMS
@pytest.mark.parametrize(
    "changes, settings",
    [
        pytest.param(
            {},
            {"top_k": None, "targets": ["down_proj"]},
            id="dense-down-alone",
        ),
        pytest.param(
            {"num_hidden_layers": 3},
            {"layers": [1]},
            id="one-layer",
        ),
        pytest.param(
            {"dtype": torch.bfloat16},
            {"train_backbone": True},
            id="bf16",
        ),
        pytest.param(
            {"tie_word_embeddings": True}, {"num_experts": 1, "top_k": 1}, id="tied-one-expert"
        ),
        pytest.param({}, {"gate": "xft", "top_k": 3, "rank": 4}, id="shared-expert-E-is-r"),
    ],
)
def test_corners_save_and_load(form, changes, settings, tmp_path):
    model = lora_model("llama", form, changes, **settings)
    model.save_pretrained(tmp_path)
    block = read_json(tmp_path / "config.json")["moe_runtime"]
    assert block["stage"] == "lora"
    assert block["layers"] == settings.get("layers", [0, 1])
    assert block["lora"] == {
        "form": form,
        "rank": settings.get("rank", 3),
        "alpha": 16.0,
        "targets": settings.get("targets", list(TARGETS)),
        "train_backbone": settings.get("train_backbone", False),
        "dtype": None,
        "backbone": "base",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(
        tiny.logits(loaded),
        tiny.logits(model),
    )
    assert loaded.dtype == model.dtype
    assert frozen_in(loaded) == frozen_in(model)


@FORMS
def test_wide_pairs_of_a_narrow_model_are_saved_as_they_are(form, tmp_path):
    model = lora_model(
        "llama",
        form,
        {"dtype": torch.bfloat16},
        dtype=torch.float32,
    )
    model.save_pretrained(tmp_path)
    for dtype in ("auto", torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for name, p in model.named_parameters():
            saved = loaded.get_parameter(name)
            assert torch.equal(
                saved.to(p.dtype),
                p,
            ), name
            assert saved.dtype == (torch.float32 if "lora_" in name else loaded.dtype)
        if dtype != torch.float32:
            assert torch.equal(
                tiny.logits(loaded),
                tiny.logits(model),
            )
    assert lora.merge(loaded, alone(loaded, 1)).dtype == torch.float32


@FORMS
def test_a_model_of_the_config_alone_is_drawn_alike(form):
    # large enough to estimate a spread
    made = to_lora_moe(
        tiny.dense(hidden_size=64, intermediate_size=96),
        num_experts=4,
        form=form,
        initializer_range=0.3,
    )
    fresh = AutoModelForCausalLM.from_config(made.config)
    with torch.device("meta"):
        filled = AutoModelForCausalLM.from_config(made.config)
    filled = filled.to_empty(device="cpu")
    for p in filled.parameters():
        p.data.fill_(7.0)
    filled.init_weights()
    for model in (fresh, filled):
        assert frozen_in(model) == frozen_in(made)
        for name, p in made.named_parameters():
            if "lora_" in name or ".gate." in name:
                drawn = model.get_parameter(name)
                assert torch.equal(drawn, p) == ("lora_b" in name), name
                assert drawn.std().item() == pytest.approx(
                    p.std().item(),
                    rel=0.15,
                ), name


@FORMS
def test_draws_depend_on_seed_and_layer_alone(form):
    def drawn(**options):
        model = tiny.dense(num_hidden_layers=3)
        to_lora_moe(model, num_experts=2, form=form, **options)
        return {n: p for n, p in model.named_parameters() if "lora_a" in n or ".gate." in n}

    first = drawn()
    other = drawn(seed=7)
    part = drawn(layers=[2])
    for name, value in first.items():
        assert not torch.equal(value, other[name])
        if ".layers.2." in name:
            assert torch.equal(value, part[name])
        if ".layers.1." in name:
            assert not torch.equal(
                value,
                first[name.replace(".layers.1.", ".layers.2.")],
            )


@pytest.mark.parametrize(
    "layers, rows",
    [([1], [1]), ([2, 0], [2, 0]), (None, [0, 1, 2])],
)
def test_vectors_are_the_rows_of_the_layers_as_they_are_named(layers, rows):
    vectors = torch.randn(
        len(rows),
        2,
        32,
        generator=torch.Generator().manual_seed(0),
    )
    model = to_lora_moe(
        tiny.dense(num_hidden_layers=3),
        num_experts=2,
        vectors=vectors,
        layers=layers,
    )
    moes = lora_layers(model)
    assert sorted(moes) == sorted(rows)
    for vector, layer in zip(vectors, rows, strict=True):
        assert torch.equal(moes[layer].gate.weight, vector)


@FORMS
@pytest.mark.parametrize("train_backbone", [False, True])
def test_trains_what_it_says_bit_for_bit(form, train_backbone):
    model = lora_model(
        form=form,
        train_backbone=train_backbone,
        balance_loss="switch",
        balance_loss_coef=0.1,
    ).train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-2,
        weight_decay=0.1,
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(tiny.batch(), labels=tiny.batch()).loss.backward()
        optimizer.step()
    base = set()
    for name, p in model.named_parameters():
        is_ours = "lora_" in name or ".gate." in name
        is_base = ".mlp." in name and not is_ours
        if is_base:
            base.add(name)
        trains = is_ours or (train_backbone and not is_base)
        assert torch.equal(p, before[name]) == (not trains), name
    assert len(base) == 2 * 6  # weights and biases: the tiny Llama has both


@FORMS
def test_checkpointing_has_the_same_gradients(form):
    model = lora_model(form=form, balance_loss="cv2", balance_loss_coef=0.1).train()
    leaves = [p for p in model.parameters() if p.requires_grad]

    def gradients():
        return torch.autograd.grad(model(tiny.batch(), labels=tiny.batch()).loss, leaves)

    expected = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for again, gradient in zip(gradients(), expected, strict=True):
        assert tiny.distance(again, gradient) < 1e-6


def test_ddp_is_one_process(tmp_path):
    launch(
        dist_lora.__file__,
        2,
        tmp_path,
        str(tmp_path),
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    expected = dist_lora.train(
        dist_lora.make(),
        tiny.batch(4),
    )
    assert first["losses"] != second["losses"]
    for name, weight in expected["weights"].items():
        assert torch.equal(
            first["weights"][name],
            second["weights"][name],
        )
        assert (
            tiny.distance(
                first["weights"][name],
                weight,
            )
            < 1e-5
        ), name
    mean = (torch.tensor(first["losses"]) + torch.tensor(second["losses"])) / 2
    assert mean.tolist() == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"form": "mlp"}, "form must be one of block, linear"),
        ({"targets": ["q_proj"]}, r"targets is \['q_proj'\] .* Pass some of gate_proj, up_proj"),
        ({"dtype": torch.int8}, "Expected a floating torch.dtype .* dtype is torch.int8"),
        ({"form": "linear", "recompute": True}, "form is 'linear', .* recompute is True"),
        ({"experts": []}, "experts must have a folder for each of the 8 .*, but got 0 folders"),
        ({"vectors": torch.zeros(2, 4, 32)}, r"vectors \(2, 8, 32\) .*vectors is \(2, 4, 32\)"),
        ({"vectors": torch.zeros(2, 8, 32), "form": "linear"}, "form is 'linear'"),
        (
            {"experts": ["a"] * 8, "rank": 2},
            "adapters determine, but got rank=2",
        ),
    ],
)
def test_bad_settings_leave_the_model_alone(settings, words):
    model = tiny.dense()
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        to_lora_moe(model, **settings)
    assert snapshot(model) == before
