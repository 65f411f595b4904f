"""Training some experts of stock and upcycled models: gradients, what moves, what is left as it
was.
"""

import copy

import pytest
import torch

import moe_runtime
from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.training.trainable import drop_rows, fold_rows, train_rows
from moe_runtime.methods.esft.freezing import freeze_for_esft
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.hf.training.trainables import (
    MODELS,
    batch,
    count_calls,
    model_of,
    paths_of,
    run,
    train,
    two_each,
)
from tests.support.trained_rows import trained_rows


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_stacks(name):
    whole = model_of(name)
    apart = model_of(name)
    ids = batch(name)
    moe_runtime.patch(whole)
    experts = two_each(apart)
    paths = paths_of(apart)
    receipt = train_rows(apart, experts)
    assert receipt.experts == {number: tuple(ids) for number, ids in experts.items()}
    want = run(whole, ids)
    got = run(apart, ids)
    assert want["logits"].norm() > 0
    assert distance(got["logits"], want["logits"]) < 2e-6
    rows = trained_rows(apart)
    assert rows.keys() == experts.keys()
    for number, layer in rows.items():
        assert layer.ids == tuple(experts[number])
        for stack, parameter in layer.stacks.items():
            path = f"{paths[number]}.{stack}"
            assert parameter is apart.get_parameter(f"{paths[number]}.trained_{stack}")
            assert not apart.get_parameter(path).requires_grad
            assert path not in got
            got.pop(f"{paths[number]}.trained_{stack}")
            wanted = want.pop(path)[list(layer.ids)]
            assert wanted.norm() > 0, path
            assert distance(parameter.grad, wanted) < 1e-5, path
    assert got.keys() == want.keys()
    tiny.assert_close(got, want, 1e-5)


@pytest.mark.parametrize("name", ["deepseek_v2", "gpt_oss", "muse_spark"])
def test_kernels(name, monkeypatch):
    """The Triton path, one layer of experts alone: whole models take the interpreter too long."""
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    whole = model_of(name)
    apart = model_of(name)
    moe_runtime.patch(whole)
    number, experts = next(reversed(two_each(apart).items()))
    train_rows(apart, {number: experts})
    whole, apart = (
        experts_module(model, numbered_layers(model)[number]) for model in (whole, apart)
    )
    E = whole.num_experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        9, apart.down_proj.shape[1 if not apart.is_transposed else 2], generator=generator
    )
    idx = torch.rand(9, E, generator=generator).topk(2).indices
    weight = torch.rand(9, 2, generator=generator)
    out = {}
    for module in (whole, apart):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = module(leaves[0], idx, leaves[1])
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        out[module] = [y.detach(), *(leaf.grad for leaf in leaves)]
    for got, want in zip(out[apart], out[whole], strict=True):
        assert distance(got, want) < 5e-6
    for stack in ("gate_up_proj", "down_proj"):
        assert (
            distance(getattr(apart, f"trained_{stack}").grad, getattr(whole, stack).grad[experts])
            < 5e-6
        )


# Table 3: which routed experts, shared experts, non-expert parameters
TABLE_3 = [
    pytest.param("all", True, True, id="all, shared, rest"),
    pytest.param("relevant", True, False, id="relevant, shared"),
    pytest.param("relevant", False, False, id="relevant"),
    pytest.param("none", True, False, id="shared"),
    pytest.param("none", True, True, id="shared, rest"),
    pytest.param("relevant", True, True, id="relevant, shared, rest"),
    pytest.param("none", False, False, id="nothing"),
]


def selected(model, which: str) -> dict[int, list[int]]:
    layers = numbered_layers(model)
    everyone = {}
    for number, layer in layers.items():
        everyone[number] = list(range(layer.num_shared, layer.num_experts))
    return {"all": everyone, "relevant": two_each(model), "none": {}}[which]


def kinds_of(model) -> dict[str, str]:
    """By name, which parameter is of "experts", of "shared" MLPs or of the "rest": names written
    out, as in the table.
    """
    kinds = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        kinds[name] = "rest"
        if "experts" in parts:
            kinds[name] = "experts"
        elif {"shared_experts", "shared_expert"} & set(parts):
            kinds[name] = "shared"
    return kinds


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2_moe", "ours"])
@pytest.mark.parametrize(("which", "shared", "rest"), TABLE_3)
def test_table_3(which, shared, rest, name):
    """What is said to train moves, all else is the same bit by bit after steps of AdamW with weight
    decay.
    """
    model = model_of(name)
    ids = batch(name)
    before = tiny.weights(model)
    kinds = kinds_of(model)
    paths = paths_of(model)
    experts = selected(model, which)
    receipt = freeze_for_esft(model, experts, shared, rest)
    rows = {number: list(ids) for number, ids in receipt.experts.items()}
    if name == "ours" and shared:  # the shared one is expert 0 of the stack
        experts = {number: [*experts.get(number, []), 0] for number in paths}
    assert rows == experts
    assert receipt.trainable_parameters == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    assert receipt.total_parameters == sum(value.numel() for value in before.values())
    assert bool(receipt.shared_experts) == (shared and name != "ours")
    if receipt.trainable_parameters == 0:
        assert (which, shared, rest) == ("none", False, False)
        assert not model(ids, labels=ids).loss.requires_grad
    else:
        train(model, ids, 3)
    fold_rows(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for p in after.values():
        assert p.requires_grad
    of_stack = {path: number for number, path in paths.items()}
    for path, value in before.items():
        if kinds[path] == "experts":
            ids_here = rows.get(of_stack[path.rpartition(".")[0]], [])
            moved = (after[path] != value).flatten(1).any(1).nonzero().flatten().tolist()
            assert moved == sorted(ids_here), path
        else:
            trains = shared if kinds[path] == "shared" else rest
            assert torch.equal(after[path], value) != trains, path


@pytest.mark.parametrize(
    "name", ["ernie4_5_moe", "afmoe", "granitemoeshared", "deepseek_v32", "glm_moe_dsa", "gemma4"]
)
def test_what_routers_choose_by_stays_frozen(name):
    """No gradient reaches it, and DDP would wait for one; shared MLPs under another name, and
    beside the block, are found.
    """
    model = model_of(name)
    ids = batch(name)
    indexers = {path for path, _ in model.named_parameters() if "indexer" in path.split(".")}
    receipt = freeze_for_esft(model, two_each(model), True, True)
    assert receipt.shared_experts
    for path in receipt.shared_experts:
        assert "gate" not in path.rpartition(".")[2]
    got = run(model, ids)
    trains = {path for path, p in model.named_parameters() if p.requires_grad}
    assert trains == got.keys() - {"logits"}
    left = {path for path, p in model.named_parameters() if not p.requires_grad} - indexers
    left = {path.rpartition(".")[2] for path in left}
    assert left - {"e_score_correction_bias", "expert_bias"} == {"gate_up_proj", "down_proj"}
    assert bool(indexers) == (name in ("deepseek_v32", "glm_moe_dsa"))
    if name == "gemma4":  # an MLP and experts in one block
        assert receipt.shared_experts == tuple(
            f"model.layers.{number}.mlp" for number in numbered_layers(model)
        )


@pytest.mark.parametrize("name", ["deepseek_v2", "gpt_oss", "inkling2", "ours"])
def test_the_others_stay_for_50_steps_and_the_optimizer_knows_none(name):
    model = model_of(name)
    ids = batch(name)
    before = tiny.weights(model)
    paths = paths_of(model)
    receipt = freeze_for_esft(model, two_each(model))
    optimizer = train(model, ids, 50)
    states = list(optimizer.state.values())
    assert (
        sum(state[key].numel() for state in states for key in ("exp_avg", "exp_avg_sq"))
        == 2 * receipt.row_parameters
    )
    assert (
        receipt.row_parameters
        == receipt.trainable_parameters
        == sum(
            2 * value[0].numel()
            for path, value in before.items()
            if path.rpartition(".")[0] in paths.values()
        )
    )
    for path, value in before.items():
        assert torch.equal(model.get_parameter(path), value), path
    rows = {path: trained_rows(model)[number] for number, path in paths.items()}
    for path, layer in rows.items():
        for stack, trained in layer.stacks.items():
            assert (trained != before[f"{path}.{stack}"][list(layer.ids)]).flatten(1).any(1).all()
    logits = run(model, ids)["logits"]
    fold_rows(model)
    assert distance(tiny.logits(model.train(), ids), logits) < 1e-5
    for path, value in before.items():
        if path.rpartition(".")[0] not in rows:
            assert torch.equal(model.get_parameter(path), value), path


@pytest.mark.parametrize("undo", [fold_rows, drop_rows])
@pytest.mark.parametrize("name", ["gpt_oss", "ours"])
def test_a_plain_model_again(name, undo):
    model = model_of(name)
    ids = batch(name)
    first = next(iter(numbered_layers(model)))
    frozen = next(iter(paths_of(model).values())) + ".down_proj"
    model.get_parameter(frozen).requires_grad_(False)
    before = copy.deepcopy(model)
    freeze_for_esft(model, {first: [1]}, non_expert_modules=True)
    if undo is drop_rows:
        with torch.no_grad():
            trained_rows(model)[first].stacks["down_proj"].zero_()
    undo(model)
    assert not [name for name, _ in model.named_buffers() if "trained" in name]
    for (name, p), (other, q) in zip(
        model.named_parameters(), before.named_parameters(), strict=True
    ):
        assert name == other, name
        assert torch.equal(p, q), name
        assert p.requires_grad == q.requires_grad, name
    for one, other in zip(model.modules(), before.modules(), strict=True):
        assert one.__dict__.keys() == other.__dict__.keys()
        assert len(one._forward_pre_hooks) == len(other._forward_pre_hooks)
    assert model.config._experts_implementation == before.config._experts_implementation
    assert torch.equal(model(ids).logits, before(ids).logits)


def test_a_patched_model_stays_patched():
    model = model_of("qwen2_moe")
    moe_runtime.patch(model)
    train_rows(model, {0: [1]})
    fold_rows(model)
    assert model.config._experts_implementation == "moe_runtime"


@pytest.mark.parametrize("name", ["deepseek_v2", "ours"])
def test_rows_in_float32_beside_bfloat16(name):
    model = model_of(name).to(torch.bfloat16)
    ids = batch(name)
    number = next(iter(numbered_layers(model)))
    plain = copy.deepcopy(model)
    moe_runtime.patch(plain)
    receipt = freeze_for_esft(model, {number: [2, 1]}, dtype=torch.float32)
    # each 1e-2 off float64
    assert distance(run(model, ids)["logits"], run(plain, ids)["logits"]) < 1e-2
    rows = trained_rows(model)[number].stacks
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in rows.values())
    assert all(
        p.dtype == torch.bfloat16 for name, p in model.named_parameters() if "trained" not in name
    )
    before = {stack: p.detach().clone() for stack, p in rows.items()}
    # steps that bfloat16 would lose
    optimizer = torch.optim.AdamW(rows.values(), lr=1e-6, weight_decay=0)
    optimizer.step()
    for stack, p in rows.items():
        assert (p != before[stack]).float().mean() > 0.5
    assert sum(s["exp_avg"].numel() for s in optimizer.state.values()) == receipt.row_parameters
    fold_rows(model)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True], ids=["kept", "reentrant"])
@pytest.mark.parametrize("name", ["deepseek_v2", "inkling2", "ours"])
def test_gradient_checkpointing(name, reentrant):
    model = model_of(name)
    ids = batch(name)
    freeze_for_esft(model, two_each(model))
    want = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = count_calls(model)
    got = run(model, ids)
    assert calls == dict.fromkeys(calls, 2)  # each layer ran again
    assert got.keys() == want.keys()
    assert len(got) > 1
    tiny.assert_close(got, want, 1e-6)
