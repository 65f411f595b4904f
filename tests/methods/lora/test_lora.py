"""LoRA experts in a live model: the same function at first, what trains, the saved form, adapters
in and out, refusals.
"""

import copy
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin.stats import RouterCounter
from moe_runtime.hf.models import modeling, swap
from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.methods import lora
from moe_runtime.methods.lora import forced_experts, lora_layers, to_lora_moe
from moe_runtime.modules.lora import TARGETS
from moe_runtime.modules.lora_linear import LoRALinear
from moe_runtime.modules.moe import MoE
from tests.hf import tiny
from tests.hf.models.test_swap import snapshot, unchanged
from tests.support import dist_lora
from tests.support.dist_launch import launch
from tests.support.lora_models import adapters, alone, lora_model, shake

THREE = [name for name, family in FAMILIES.items() if (*family.up, family.down) == TARGETS]
FORMS = pytest.mark.parametrize("form", ["block", "linear"])


# the saved form
@pytest.mark.parametrize(
    "model_type, form",
    [(name, "block") for name in THREE] + [(name, "linear") for name in tiny.ALL],
)
def test_starts_as_the_dense_model_saves_and_merges(model_type, form, tmp_path):
    model = tiny.dense(model_type)
    want = tiny.logits(model)
    config = model.config.to_dict()
    keys = list(model.state_dict())
    assert to_lora_moe(model, num_experts=3, form=form) is model
    assert tiny.distance(tiny.logits(model), want) < 1e-5
    shake(model)
    got = tiny.logits(model)
    assert tiny.distance(got, want) > 0.05
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and torch.equal(tiny.logits(loaded), got)
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }

    with forced_experts(loaded, [1, 1]):
        one = tiny.logits(loaded)
    assert lora.merge(loaded, alone(loaded, 1)) is loaded
    assert (
        type(loaded) is modeling.model_classes(model_type).base_causal_lm
        and list(loaded.state_dict()) == keys
    )
    assert tiny.distance(tiny.logits(loaded), one) < 1e-5 and tiny.distance(one, want) > 0.05
    ignored = dict.fromkeys(("architectures", "dtype", "_name_or_path", "transformers_version"))
    assert loaded.config.to_dict() | ignored == config | ignored
    assert all(p.requires_grad for p in loaded.parameters())


@FORMS
@pytest.mark.parametrize(
    "changes, settings",
    [
        pytest.param({}, {"top_k": None, "targets": ["down_proj"]}, id="dense-down-alone"),
        pytest.param({"num_hidden_layers": 3}, {"layers": [1]}, id="one-layer"),
        pytest.param({"dtype": torch.bfloat16}, {"train_backbone": True}, id="bf16"),
        pytest.param(
            {"tie_word_embeddings": True}, {"num_experts": 1, "top_k": 1}, id="tied-one-expert"
        ),
        pytest.param({}, {"gate": "xft", "top_k": 3, "rank": 4}, id="shared-expert-E-is-r"),
    ],
)
def test_corners_save_and_load(form, changes, settings, tmp_path):
    model = lora_model("llama", form, changes, **settings)
    got = tiny.logits(model)
    model.save_pretrained(tmp_path)
    block = json.loads((tmp_path / "config.json").read_text())["moe_runtime"]
    assert block["stage"] == "lora" and block["layers"] == settings.get("layers", [0, 1])
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
    assert torch.equal(tiny.logits(loaded), got) and loaded.dtype == model.dtype
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


@FORMS
def test_wide_pairs_of_a_narrow_model_are_saved_as_they_are(form, tmp_path):
    model = lora_model("llama", form, {"dtype": torch.bfloat16}, dtype=torch.float32)
    want = tiny.logits(model)
    model.save_pretrained(tmp_path)
    for dtype in ("auto", torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for name, p in model.named_parameters():
            got = loaded.get_parameter(name)
            assert (
                torch.equal(got, p)
                if dtype is not torch.float32
                else torch.equal(got.to(p.dtype), p)
            ), name
            assert got.dtype == (torch.float32 if "lora_" in name else loaded.dtype)
        assert dtype is torch.float32 or torch.equal(tiny.logits(loaded), want)
    assert lora.merge(loaded, alone(loaded, 1)).dtype == torch.float32


@FORMS
def test_a_model_of_the_config_alone_is_drawn_alike(form):
    wanted = {"hidden_size": 64, "intermediate_size": 96}  # enough numbers for a spread
    made = to_lora_moe(tiny.dense(**wanted), num_experts=4, form=form, initializer_range=0.3)
    fresh = AutoModelForCausalLM.from_config(made.config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(made.config)
    filled = empty.to_empty(device="cpu")
    with torch.no_grad():
        for p in filled.parameters():
            p.fill_(7.0)
    filled.init_weights()
    for model in (fresh, filled):
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in made.parameters()
        ]
        for name, p in made.named_parameters():
            if "lora_" in name or ".gate." in name:
                got = model.get_parameter(name)
                assert torch.equal(got, p) == ("lora_b" in name), name
                assert got.std().item() == pytest.approx(p.std().item(), rel=0.15), name


def test_draws_depend_on_seed_and_layer_alone():
    def drawn(form, **options):
        model = tiny.dense(num_hidden_layers=3)
        to_lora_moe(model, num_experts=2, form=form, **options)
        return {n: p for n, p in model.named_parameters() if "lora_a" in n or ".gate." in n}

    for form in ("block", "linear"):
        one = drawn(form)
        other = drawn(form, seed=7)
        part = drawn(form, layers=[2])
        assert part and all(torch.equal(one[name], value) for name, value in part.items())
        assert not any(torch.equal(one[name], other[name]) for name in one)
        first = [name for name in one if ".layers.1." in name]
        assert first and not any(
            torch.equal(one[n], one[n.replace(".layers.1.", ".layers.2.")]) for n in first
        )


@pytest.mark.parametrize("layers, rows", [([1], [1]), ([2, 0], [2, 0]), (None, [0, 1, 2])])
@pytest.mark.parametrize("noisy_gate", [False, True])
def test_vectors_are_the_rows_of_the_layers_as_they_are_named(layers, rows, noisy_gate):
    vectors = torch.randn(len(rows), 2, 32, generator=torch.Generator().manual_seed(0))
    dense = tiny.dense(num_hidden_layers=3)
    model = to_lora_moe(dense, num_experts=2, vectors=vectors, layers=layers, noisy_gate=noisy_gate)
    moes = lora_layers(model)
    assert sorted(moes) == sorted(rows)
    for row, layer in zip(vectors, rows, strict=True):
        assert torch.equal(moes[layer].gate.weight, row)
        if noisy_gate:
            assert torch.equal(
                moes[layer].gate.noise_weight,
                swap.draw_router(moes[layer].config, 42, layer)["noise_weight"],
            )


# training
@FORMS
@pytest.mark.parametrize("train_backbone", [False, True])
def test_trains_what_it_says_bit_for_bit(form, train_backbone):
    model = lora_model(
        form=form, train_backbone=train_backbone, balance_loss="switch", balance_loss_coef=0.1
    ).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = [name for name in before if "lora_" in name or ".gate." in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(tiny.batch(), labels=tiny.batch()).loss.backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    base = {name for name in before if ".mlp." in name} - set(ours)
    assert len(base) == 2 * 6  # weights and biases: the tiny Llama has them
    assert moved == (set(before) - base if train_backbone else set(ours))


@FORMS
def test_a_backbone_that_trains_is_without_whole_mlps_or_without_what_has_pairs(form):
    model = lora_model(form=form, targets=["down_proj"], train_backbone=True)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    base = "mlp.experts.base." if form == "block" else "mlp."
    held = TARGETS if form == "block" else ("down_proj.base",)
    assert frozen == {
        f"model.layers.{i}.{base}{name}.{k}"
        for i in (0, 1)
        for name in held
        for k in ("weight", "bias")
    }


@FORMS
def test_losses_and_statistics_are_a_moes(form):
    model = lora_model(form=form, balance_loss="switch", balance_loss_coef=0.1).train()
    ids = tiny.batch()
    routers = 2 if form == "block" else 6
    counter = RouterCounter(model)
    out = model(ids, labels=ids, output_router_logits=True)
    assert len(out.router_logits) == routers and out.router_logits[0].shape == (ids.numel(), 4)
    blocks = [module for module in model.modules() if isinstance(module, MoE | LoRALinear)]
    assert len(blocks) == routers and all(block.records is None for block in blocks)
    probability = [logits.softmax(1).mean(0) for logits in out.router_logits]
    shares = [c.float() / ids.numel() / 2 for c in counter.read().counts]
    balance = sum(0.1 * 4 * (p * share).sum() for p, share in zip(probability, shares, strict=True))
    counter.close()
    torch.testing.assert_close(out.aux_loss, balance)
    torch.testing.assert_close(out.loss, out.lm_loss + balance)


@FORMS
def test_checkpointing_and_autocast_have_the_same_gradients(form):
    # all experts see all tokens: a choice may flip in bfloat16
    model = lora_model(form=form, top_k=None, balance_loss="cv2", balance_loss_coef=0.1).train()
    with torch.no_grad():
        # as large as in life again, or bfloat16 is far off in any model
        for parameter in model.parameters():
            parameter.div_(4 if parameter.dim() > 1 else 1)

    def grads(autocast=False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tiny.batch(), labels=tiny.batch()).loss
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = grads()
    near = grads(autocast=True)
    assert (
        set(near) == set(want) and max(tiny.distance(near[name], want[name]) for name in want) < 0.2
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, grad in grads().items():
        assert tiny.distance(grad, want[name]) < 1e-6, name


def test_one_expert_trains_as_pefts_lora(tmp_path):
    (folder,) = adapters(tmp_path, 1)
    by_peft = PeftModel.from_pretrained(tiny.dense(), str(folder), is_trainable=True)
    ours = to_lora_moe(tiny.dense(), experts=[folder], top_k=1)
    for model in (by_peft, ours):
        model.train()(tiny.batch(), labels=tiny.batch()).loss.backward()
    for layer, moe in lora_layers(ours).items():
        for target in TARGETS:
            module = by_peft.base_model.model.model.layers[layer].mlp.get_submodule(target)
            a, b = (half.default.weight.grad for half in (module.lora_A, module.lora_B))
            assert tiny.distance(moe.experts.lora_a[target].grad[0], a) < 1e-5
            assert tiny.distance(moe.experts.lora_b[target].grad[0].t(), b) < 1e-5


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    model = lora_model().train()
    ids = tiny.batch()
    want = model(ids, labels=ids).loss
    loss = torch.compile(model, fullgraph=True, backend="eager")(ids, labels=ids).loss
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("form", ["block", "linear"])
def test_generates_as_the_uncached_forward(form):
    model = lora_model(form=form).eval()
    ids = tiny.batch(2, 5)
    model.generation_config.pad_token_id = 0
    got = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert got.shape == (2, 9)
    for _ in range(4):
        scores = model(ids).logits[:, -1].clone()
        scores[:, model.generation_config.eos_token_id] = -torch.inf  # min_new_tokens
        ids = torch.cat([ids, scores.argmax(1, keepdim=True)], 1)
    assert torch.equal(got, ids)


def test_ddp_is_one_process(tmp_path):
    launch(dist_lora.__file__, 2, tmp_path, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = dist_lora.train(dist_lora.make(), tiny.batch(4))
    assert first["losses"] != second["losses"] and len(alone["losses"]) == 3
    for name, want in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        assert tiny.distance(first["weights"][name], want) < 1e-5, name
    for step, want in enumerate(alone["losses"]):
        assert (first["losses"][step] + second["losses"][step]) / 2 == pytest.approx(want, rel=1e-5)


# what the experts cannot see


# forced experts
@FORMS
def test_rows_go_to_the_experts_that_were_named(form):
    model = lora_model(form=form)
    ids = tiny.batch(1).repeat(4, 1)
    free = tiny.logits(model, ids)
    with forced_experts(torch.nn.Sequential(model), torch.tensor([3, 0, 1, 2])):
        got = tiny.logits(model, ids)
        with pytest.raises(
            ValueError, match="forced must have one expert for each of 2 rows, but has 4"
        ):
            model(ids[:2])
    assert torch.equal(tiny.logits(model, ids), free)
    for row, e in enumerate((3, 0, 1, 2)):
        plain = lora.merge(copy.deepcopy(model), alone(model, e))
        assert tiny.distance(tiny.logits(plain, ids[:1])[0], got[row]) < 1e-5


# what is refused
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"form": "mlp"}, "form must be one of block, linear"),
        (
            {"targets": ["q_proj"]},
            r"targets is \['q_proj'\] .* Pass some of gate_proj, up_proj, down_proj",
        ),
        ({"targets": "up_proj"}, "targets is 'up_proj'"),
        ({"rank": 0}, "rank must be"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"dtype": torch.int8}, "Expected a floating torch.dtype .* dtype is torch.int8"),
        ({"dtype": "float32"}, "Expected a floating torch.dtype .* dtype is 'float32'"),
        ({"form": "linear", "recompute": True}, "form is 'linear', .* recompute is True"),
        (
            {"top_k": None, "balance_loss": "switch"},
            "'switch' is constant .*top_k 8 of 8 experts.*Use 'none' or 'cv2'",
        ),
        (
            {"top_k": 8, "gate": "xft", "balance_loss": "switch"},
            "balance_loss 'switch' is constant .*top_k 8 of 8",
        ),
        ({"vectors": [[[0.0] * 32] * 8] * 2}, "vectors is list"),
        ({"train_backbone": 1}, "train_backbone must be"),
        ({"layers": [5]}, r"layers must be .*but got \[5\]"),
        ({"top_k": 9}, "top_k must be"),
        (
            {"experts": []},
            "experts must have a folder for each of the 8 experts, but got 0 folders",
        ),
        ({"experts": "folder", "num_experts": 2}, "experts must have a folder"),
        ({"vectors": torch.zeros(2, 4, 32)}, r"vectors \(2, 8, 32\) .*vectors is \(2, 4, 32\)"),
        ({"vectors": torch.zeros(2, 8, 32), "form": "linear"}, "form is 'linear'"),
        ({"vectors": torch.zeros(2, 8, 32), "router": "mlp"}, "router is 'mlp'"),
    ],
)
def test_bad_settings_leave_the_model_alone(settings, words):
    model = tiny.dense()
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        to_lora_moe(model, **settings)
    assert unchanged(model, before)
