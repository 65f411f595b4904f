"""hf/dropin/replay.py: stock models and our own choose the recorded experts, bit-identical if
nothing else changes.
"""

from types import SimpleNamespace

import pytest
import torch

from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin import balance, replay
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


def step(model, inputs):
    """Return logits, loss and gradients of one step."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return {
        "logits": out.logits.detach(),
        "loss": out.loss.detach(),
    } | tiny.gradients(model)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def ids_equal(a, b) -> bool:
    if a.ids.keys() != b.ids.keys():
        return False
    for name, calls in a.ids.items():
        if len(calls) != len(b.ids[name]) or not all(map(torch.equal, calls, b.ids[name])):
            return False
    return True


def add_noise(*modules):
    """Add noise to the weights of every router in `modules` in place, which changes its choices."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in modules:
            for p in module.parameters():
                p.add_(torch.randn(p.shape, generator=generator))


def routers_of(model) -> list[torch.nn.Module]:
    paths = (".gate", ".router")
    values = []
    for name, module in model.named_modules():
        if name.endswith(paths):
            values.append(module)
    return values


@pytest.mark.parametrize("name", [*STEERED, *GATES])
def test_a_replay_keeps_the_experts_forward_and_backward(name):
    """Bit-identical with the same routers; other routers still use the recorded experts and get a
    gradient.
    """
    model = model_of(name)
    inputs = batch()
    plain = step(model, inputs)
    with record_routing(model) as record:
        recorded = step(model, inputs)
    with record_routing(model) as again, replay_routing(model, record):
        replayed = step(model, inputs)

    assert same(plain, recorded)
    assert same(recorded, replayed)
    assert ids_equal(record, again)
    assert [calls[0].shape[0] for calls in record.ids.values()] == [18, 18]
    routers = routers_of(model)
    add_noise(*routers)
    with record_routing(model) as free:
        other = step(model, inputs)
    assert not ids_equal(record, free)
    with record_routing(model) as again, replay_routing(model, record):
        replayed = step(model, inputs)
    assert ids_equal(record, again)
    assert not torch.equal(other["logits"], replayed["logits"])
    assert len(routers) == 2
    for module in routers:
        assert any(p.grad.norm() > 0 for p in tiny.trained(module))
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_of_transformers_is_recorded_and_replayed(family):
    model = families.build(family)

    def run():
        with torch.no_grad():
            return families.run(model, "eager")[0]

    with record_routing(model) as record:
        expected = run()
    with replay_routing(model, record):
        assert torch.equal(run(), expected)
    layers = []
    for layer in routed_layers(model).values():
        if layer.is_stock:
            layers.append(layer)
    add_noise(*(module for module, _ in balance.routers_of(model, layers)))
    with record_routing(model) as free:
        run()

    assert not ids_equal(free, record)
    if family in UNSTEERED:
        says = "does not select .* with torch.topk"
        with pytest.raises(ValueError, match=says), replay_routing(model, record):
            run()
        return
    with record_routing(model) as again, replay_routing(model, record):
        out = run()
    assert ids_equal(again, record)
    assert not torch.equal(out, expected)
    assert out.isfinite().all()


def test_the_weights_are_the_routers_own_for_the_forced_experts():
    model = stock("qwen3_moe", num_hidden_layers=1)
    gate = model.model.layers[0].mlp.gate
    with record_routing(model) as record:
        model(**batch())
    add_noise(gate)
    seen = []
    gate.register_forward_hook(lambda module, args, out: seen.append((args[0], *out)))
    with replay_routing(model, record):
        model(**batch())
    ((x, _, weights, ids),) = seen
    forced = record.ids["model.layers.0.mlp.experts"][0].long()
    probability = (x @ gate.weight.T).softmax(-1).gather(1, forced)

    assert torch.equal(ids, forced)
    assert torch.allclose(
        weights,
        probability / probability.sum(-1, keepdim=True),
        atol=1e-6,
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "xft"])
def test_checkpointing_repeats_the_ids_of_its_own_call(name, reentrant):
    batches = [batch(seed=seed) for seed in (1, 2, 3)]
    model = model_of(name)
    with record_routing(model) as record:
        for inputs in batches:
            model(**inputs)
    add_noise(*routers_of(model))

    def gradients():
        model.zero_grad()
        with replay_routing(model, record):
            losses = [model(**inputs).loss for inputs in batches]
            for i in (1, 2, 0):  # in shuffled order
                losses[i].backward()
        return tiny.gradients(model)

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record_routing(model) as again:
        assert same(gradients(), expected)

    assert ids_equal(record, again)  # and recomputation is not recorded


def test_recomputation_is_recognized_after_an_in_place_change_of_the_input():
    ids = [torch.tensor([[0]]), torch.tensor([[1]])]
    calls = SimpleNamespace(is_open=True)
    layer = replay._Replay(SimpleNamespace(name="layer"), ids, calls)
    x = torch.ones(1, 4)
    layer.next(x)
    layer.next(torch.zeros(1, 4))
    x.zero_()
    calls.is_open = False
    assert layer.next(torch.ones(1, 4)) is ids[0]


def test_a_file_keeps_the_record(tmp_path):
    model = stock("deepseek_v3")
    inputs = batch()
    with record_routing(model) as record:
        for _ in range(11):  # more than ten, so that the names do not sort like the numbers
            inputs["input_ids"] = inputs["input_ids"].roll(1, 1)
            model(**inputs)
    record.save(tmp_path / "ids.safetensors")
    (tmp_path / "any").write_text("")
    # save_file creates files with mode 0600
    assert (tmp_path / "ids.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode
    read = RoutingRecord.load(tmp_path / "ids.safetensors")
    assert ids_equal(read, record)
    assert read.num_experts == record.num_experts
    for calls in read.ids.values():
        for ids in calls:
            assert ids.dtype == torch.int32


@pytest.mark.parametrize(
    "make_calls, says",
    [
        (
            lambda model: model(**batch(length=5)),
            "model.layers.0.mlp.experts has 10 tokens in call 0, but other ones in the record",
        ),
        (
            lambda model: [model(**batch(seed=7)) for _ in range(2)],
            "has 18 tokens in call 1, but other ones in the record",
        ),
        (
            lambda model: model.model.layers[0].mlp(torch.randn(2, 9, 32)),
            "outside of a call of the model",
        ),
    ],
    ids=["tokens", "calls", "one-layer"],
)
def test_what_does_not_fit_is_refused_and_leaves_no_trace(make_calls, says):
    model = stock("qwen3_moe")
    with record_routing(model) as record:
        expected = model(**batch()).logits
    with pytest.raises(ValueError, match=says), replay_routing(model, record):
        make_calls(model)
    assert torch.equal(model(**batch()).logits, expected)
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_a_layer_in_one_op_is_replayed_too():
    layer = MoE(
        MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=3, gate="softmax_topk")
    )
    torch.nn.init.normal_(layer.gate.weight)
    model = torch.nn.Sequential(layer)
    x = torch.randn(7, 16)

    assert layer._is_whole(x)
    forced = torch.tensor([[5, 0, 2]] * 7)
    record = RoutingRecord({"0.gate": [forced]})
    with record_routing(model) as seen, replay_routing(model, record):
        out = model(x)
    weight = (x @ layer.gate.weight.T).softmax(-1).gather(1, forced)
    assert torch.equal(seen.ids["0.gate"][0], forced.int())
    assert torch.allclose(out, layer.experts(x, forced, weight), atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("left", [False, True])
def test_ids_of_an_engine_are_replayed_and_missing_ones_chosen(name, left):
    """The engine has other weights, and no ids for the last token of a sequence."""
    model = model_of(name)
    inputs = batch(padding=3)
    if left:
        inputs = {key: value.flip(1) for key, value in inputs.items()}
    with record_routing(model) as own:
        model(**inputs)
    mask = inputs["attention_mask"]
    layers = routed_layers(model)
    E = model.config.num_experts if name == "qwen3_moe" else model.config.n_routed_experts
    K = next(iter(own.ids.values()))[0].shape[1]
    engine = []
    for row, count in enumerate(mask.sum(1).tolist()):
        start = torch.arange(count - 1)[:, None, None] + row
        layer = torch.arange(len(layers))[None, :, None]
        ids = (start + layer + torch.arange(K)) % E
        ids[0] = -1
        engine.append(ids)
    record = RoutingRecord.from_engine(model, engine, mask)
    with replay_routing(model, record), record_routing(model) as seen:
        out = model(**inputs)
        out.loss.backward()
    for number, (path, [ids]) in enumerate(seen.ids.items()):
        ids = ids.view(*mask.shape, K)
        live = own.ids[path][0].view(*mask.shape, K)
        for row in range(len(mask)):
            places = mask[row].nonzero().flatten()
            assert torch.equal(ids[row, places[1:-1]], engine[row][1:, number].int())
            if number == 0:  # before any forced choice: the router's own
                free = [*(~mask[row].bool()).nonzero().flatten(), places[0], places[-1]]
                assert torch.equal(ids[row, free], live[row, free])
    routers = [router for router, _ in balance.routers_of(model, [*layers.values()])]
    assert all(router.weight.grad.any() for router in routers)


def test_ids_of_an_engine_that_do_not_fit():
    model = model_of("qwen3_moe")
    mask = batch(padding=3)["attention_mask"]
    right = [torch.zeros(9, 2, 2), torch.zeros(6, 2, 2)]
    one_row = right[:1]
    too_many_tokens = [right[0], torch.zeros(7, 2, 2)]
    too_many_layers = [right[0], torch.zeros(6, 3, 2)]
    for ids in (one_row, too_many_tokens, too_many_layers):
        with pytest.raises(ValueError, match=r"ids must be tensors \[tokens, 2, K\]"):
            RoutingRecord.from_engine(model, ids, mask)
    with pytest.raises(ValueError, match="integers from 0 to 7"):
        RoutingRecord.from_engine(model, [right[0] + 8, right[1]], mask)
