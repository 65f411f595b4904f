"""hf/dropin/replay.py: stock models and our own choose the recorded experts, bit-equal where
nothing else changed.
"""

import contextlib
import copy

import pytest
import torch

import moe_runtime
from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin import balance as routers
from moe_runtime.hf.dropin.layers import routed_layers
from moe_runtime.hf.dropin.replay import RoutingRecord, record_routing, replay_routing
from moe_runtime.modules.moe import MoE
from tests.hf import stock as families
from tests.hf import tiny
from tests.support.stock_moe import FAMILIES, batch, stock

UNSTEERED = ("phimoe", "zaya")
STEERED = [name for name in FAMILIES if name != "phimoe"]
GATES = ("xft", "softmax_topk_renorm", "sigmoid_topk")


def model_of(name, **changes):
    """A stock model, or ours with the gate `name`."""
    if name not in GATES:
        return stock(name, **changes)
    return tiny.upcycled(gate=name, changes={"vocab_size": 64}).train()


def step(model, inputs, backward=True):
    """Logits, loss and gradients of one step."""
    model.zero_grad()
    out = model(**inputs)
    if backward:
        out.loss.backward()
    return [
        out.logits.detach(),
        out.loss.detach(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def ids_equal(a, b):
    return a.ids.keys() == b.ids.keys() and all(equal(a.ids[name], b.ids[name]) for name in a.ids)


def add_noise(model):
    """Make every router of `model` choose otherwise: its weights get noise, in place."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".gate." in name or ".router." in name:
                p.add_(torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("name", [*STEERED, *GATES])
def test_a_replay_of_the_record_is_bit_equal_forward_and_backward(name):
    model = model_of(name)
    inputs = batch()
    plain = step(model, inputs)
    with record_routing(model) as record:
        recorded = step(model, inputs)
    with record_routing(model) as again, replay_routing(model, record):
        replayed = step(model, inputs)
    assert equal(plain, recorded)
    assert equal(recorded, replayed)
    assert ids_equal(record, again)
    assert len(record.ids) == 2
    for calls in record.ids.values():
        assert calls[0].shape == (18, calls[0].shape[1])
    for m in model.modules():
        if "Router" in type(m).__name__:
            assert not m._forward_hooks
            assert not m._forward_pre_hooks


@pytest.mark.parametrize("name", [*STEERED, *GATES])
def test_other_routers_keep_the_experts_and_get_a_gradient(name):
    model = model_of(name)
    inputs = batch()
    with record_routing(model) as record:
        model(**inputs)
    add_noise(model)
    with record_routing(model) as free:
        other = step(model, inputs)
    assert not ids_equal(record, free)
    with record_routing(model) as again, replay_routing(model, record):
        replayed = step(model, inputs)
    assert ids_equal(record, again)
    assert not torch.equal(other[0], replayed[0])
    routers = [p for n, p in model.named_parameters() if ".gate.weight" in n or ".router." in n]
    assert routers
    for p in routers:
        assert p.grad is not None
        assert p.grad.norm() > 0


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_of_transformers_is_recorded_and_replayed(family):
    model = families.build(family)

    def run():
        with torch.no_grad():
            return families.run(model, "eager")[0]

    with record_routing(model) as record:
        want = run()
    with replay_routing(model, record):
        assert torch.equal(run(), want)
    layers = [layer for layer in routed_layers(model).values() if layer.is_stock]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for module, _ in routers._routers_beside(model, layers):
            for p in module.parameters():
                p.add_(torch.randn(p.shape, generator=generator))
    with record_routing(model) as free:
        run()
    assert not ids_equal(free, record)
    with contextlib.ExitStack() as stack:
        if family in UNSTEERED:
            stack.enter_context(
                pytest.raises(ValueError, match="does not select .* with torch.topk")
            )
        with record_routing(model) as again, replay_routing(model, record):
            got = run()
        assert ids_equal(again, record)
        assert not torch.equal(got, want)
        assert got.isfinite().all()


def test_the_weights_are_the_routers_own_for_the_forced_experts():
    model = stock("qwen3_moe", num_hidden_layers=1)
    block = model.model.layers[0].mlp
    with record_routing(model) as record:
        model(**batch())
    add_noise(model)
    seen = []
    block.gate.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    with replay_routing(model, record):
        model(**batch())
    (x, (_, weights, ids)), (want,) = seen[0], record.ids["model.layers.0.mlp.experts"]
    probability = (x @ block.gate.weight.T).softmax(-1).gather(1, want.long())
    assert torch.equal(ids, want.long())
    assert torch.allclose(weights, probability / probability.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("noise", ["input", "logits"])
def test_noise_on_the_router_by_a_hook_does_not_move_tokens(noise):
    model = stock("deepseek_v3")
    inputs = batch()
    with record_routing(model) as record:
        model(**inputs)
    for layer in model.model.layers[1:]:
        if noise == "input":
            layer.mlp.gate.register_forward_pre_hook(
                lambda module, args: (args[0] + torch.randn_like(args[0]),)
            )
        else:
            layer.mlp.gate.register_forward_hook(
                lambda m, args, out: (out[0], out[1] * torch.rand_like(out[1]), out[2])
            )
    with record_routing(model) as free:
        model(**inputs)
    with record_routing(model) as again, replay_routing(model, record):
        model(**inputs)
    assert ids_equal(record, again)
    assert noise == "logits" or not ids_equal(record, free)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm", "moe_runtime"])
def test_under_any_experts_implementation(implementation):
    moe_runtime.register()
    model = stock("mixtral", intermediate_size=64)
    inputs = batch()
    with record_routing(model) as record:
        model(**inputs)
    model.set_experts_implementation(implementation)
    add_noise(model)
    with record_routing(model) as again, replay_routing(model, record):
        model(**inputs).loss.backward()
    assert ids_equal(record, again)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "xft"])
def test_checkpointing_repeats_the_ids_of_its_own_call(name, reentrant):
    batches = [batch(seed=seed) for seed in (1, 2, 3)]
    model = model_of(name)
    with record_routing(model) as record:
        for inputs in batches:
            model(**inputs)
    add_noise(model)

    def gradients():
        model.zero_grad()
        with replay_routing(model, record):
            losses = [model(**inputs).loss for inputs in batches]
            for i in (1, 2, 0):  # in no order
                losses[i].backward()
        return list(tiny.gradients(model).values())

    want = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record_routing(model) as again:
        got = gradients()
    assert equal(got, want) and ids_equal(record, again)  # and what ran again is not recorded


def test_every_call_of_generate_has_its_record():
    model = stock("qwen3_moe").eval()
    prompt = batch()["input_ids"]
    with record_routing(model) as record:
        want = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert [len(ids) for ids in record.ids["model.layers.0.mlp.experts"]] == [18, 2, 2, 2]
    with replay_routing(model, record):
        got = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want)


def test_a_record_fits_the_model_inside_its_wrappers():
    peft = pytest.importorskip("peft")
    model = stock("qwen3_moe")
    inputs = batch()
    with record_routing(model) as record:
        want = model(**inputs).logits
    config = peft.LoraConfig(
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    add_noise(wrapped)
    with record_routing(wrapped) as again, replay_routing(wrapped, record):
        wrapped(**inputs)
    assert ids_equal(record, again)
    assert want.isfinite().all()


def test_a_file_keeps_the_record(tmp_path):
    model = stock("deepseek_v3")
    inputs = batch()
    with record_routing(model) as record:
        for _ in range(11):  # so that names do not sort as numbers do
            inputs["input_ids"] = inputs["input_ids"].roll(1, 1)
            model(**inputs)
    record.save(tmp_path / "ids.safetensors")
    (tmp_path / "any").write_text("")
    # save_file leaves 0600
    assert (tmp_path / "ids.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode
    read = RoutingRecord.load(tmp_path / "ids.safetensors")
    assert ids_equal(read, record)
    assert read.num_experts == record.num_experts
    for calls in read.ids.values():
        for ids in calls:
            assert ids.dtype == torch.int32


def test_what_does_not_fit_is_refused_and_leaves_no_trace():
    model = stock("qwen3_moe")
    inputs = batch()
    with record_routing(model) as record:
        model(**inputs)
    want = model(**inputs).logits
    cases = [
        (
            batch(length=5),
            r"call 0 of model.layers.0.mlp.experts has 10 tokens, but the record has 18 tokens",
        ),
        (
            batch(seed=7) | {"twice": True},
            r"call 1 of .* has 18 tokens, but the record has 1 calls",
        ),
    ]
    for case, message in cases:
        twice = case.pop("twice", False)
        with pytest.raises(ValueError, match=message), replay_routing(model, record):
            model(**case)
            if twice:
                model(**case)
    with (
        pytest.raises(ValueError, match="outside of a call of the model"),
        replay_routing(model, record),
    ):
        model.model.layers[0].mlp(torch.randn(2, 9, 32))
    assert torch.equal(model(**inputs).logits, want)
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_routers_that_cannot_be_steered_are_refused_when_they_go_astray():
    model = stock("phimoe").eval()
    inputs = batch()
    with record_routing(model) as record:  # which works for every router
        want = model(**inputs).logits
    with replay_routing(model, record):
        assert torch.equal(model(**inputs).logits, want)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.weight.neg_()
    message = r"its router does not select 2 of 8 with torch.topk"
    with pytest.raises(ValueError, match=message), replay_routing(model, record):
        model(**inputs)


def test_the_whole_layer_op_is_not_a_way_around():
    layer = MoE(
        MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=3, gate="softmax_topk")
    )
    torch.nn.init.normal_(layer.gate.weight)
    model = torch.nn.Sequential(layer)
    x = torch.randn(7, 16)
    assert layer._is_whole(x)
    forced = torch.tensor([[5, 0, 2]] * 7)
    with record_routing(model) as seen, replay_routing(model, RoutingRecord({"0.gate": [forced]})):
        out = model(x)
    weight = (x @ layer.gate.weight.T).softmax(-1).gather(1, forced)
    assert torch.equal(seen.ids["0.gate"][0], forced.int())
    assert torch.allclose(out, layer.experts(x, forced, weight), atol=1e-6)
