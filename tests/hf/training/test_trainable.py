"""Training some experts of stock and upcycled models: gradients, which weights change and which do
not.
"""

import copy
import itertools

import pytest
import torch

import moe_runtime
from moe_runtime.hf.dropin.layers import numbered_layers
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
    split = model_of(name)
    ids = batch(name)
    moe_runtime.patch(whole)
    experts = two_each(split)
    receipt = train_rows(split, experts)

    assert receipt.experts == {number: tuple(ids) for number, ids in experts.items()}
    expected = run(whole, ids)
    values = run(split, ids)
    assert expected["logits"].norm() > 0
    assert distance(values.pop("logits"), expected.pop("logits")) < 2e-6
    rows = trained_rows(split)
    assert rows.keys() == experts.keys()
    for number, path in paths_of(split).items():
        for stack, parameter in rows[number].stacks.items():
            assert parameter is split.get_parameter(f"{path}.trained_{stack}")
            assert not split.get_parameter(f"{path}.{stack}").requires_grad
            gradient = expected.pop(f"{path}.{stack}")[experts[number]]
            assert gradient.norm() > 0
            assert (
                distance(
                    values.pop(f"{path}.trained_{stack}"),
                    gradient,
                )
                < 1e-5
            ), path
    assert values.keys() == expected.keys()
    tiny.assert_close(values, expected, 1e-5)


# Table 3: which routed experts, shared experts, non-expert parameters
TABLE_3 = [
    ("all", True, True),
    ("relevant", True, False),
    ("relevant", False, False),
    ("none", True, False),
    ("none", True, True),
    ("relevant", True, True),
]


def select(model, which: str) -> dict[int, list[int]]:
    if which == "all":
        every = {}
        for number, layer in numbered_layers(model).items():
            every[number] = list(range(layer.num_shared, layer.num_experts))
        return every
    return two_each(model) if which == "relevant" else {}


def kind_of(name: str) -> str:
    """Return whether a parameter belongs to "experts", "shared" MLPs or the "rest", by explicit
    names, as in the table.
    """
    parts = set(name.split("."))
    if "experts" in parts:
        return "experts"
    return "shared" if {"shared_experts", "shared_expert"} & parts else "rest"


ROWS = list(itertools.product(("deepseek_v2", "qwen2_moe", "ours"), TABLE_3))
# models without shared experts
ROWS += [
    ("gpt_oss", ("relevant", False, False)),
    ("inkling2", ("relevant", False, False)),
]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=str)
def test_table_3(name, row):
    """After AdamW steps with weight decay, everything selected has changed, the rest is
    bit-identical, and the optimizer has no state for it.
    """
    which, shared, rest = row
    model = model_of(name)
    has_shared = name in ("deepseek_v2", "qwen2_moe")
    before = tiny.weights(model)
    experts = select(model, which)
    receipt = freeze_for_esft(model, experts, shared, rest)
    paths = paths_of(model)
    if name == "ours" and shared:  # the shared expert is expert 0 of the stack
        experts = {number: [*experts.get(number, []), 0] for number in paths}

    assert receipt.experts == {number: tuple(ids) for number, ids in experts.items()}
    assert receipt.trainable_parameters == sum(p.numel() for p in tiny.trained(model))
    assert receipt.total_parameters == sum(value.numel() for value in before.values())
    assert bool(receipt.shared_experts) == (shared and has_shared)
    optimizer = train(model, batch(name), 3)
    states = [state["exp_avg"].numel() for state in optimizer.state.values()]
    assert sum(states) == receipt.trainable_parameters
    logits = tiny.logits(model, batch(name))
    fold_rows(model)
    assert distance(tiny.logits(model, batch(name)), logits) < 1e-5
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    numbers = {path: number for number, path in paths.items()}
    for path, value in before.items():
        assert after[path].requires_grad
        kind = kind_of(path)
        if kind == "experts":
            moved = (after[path] != value).flatten(1).any(1).nonzero().flatten().tolist()
            assert moved == sorted(
                experts.get(
                    numbers[path.rpartition(".")[0]],
                    [],
                )
            ), path
        else:
            trains = shared if kind == "shared" else rest
            assert torch.equal(after[path], value) != trains, path


@pytest.mark.parametrize(
    "name",
    [
        "afmoe",
        "deepseek_v32",
        "gemma4",
    ],
)
def test_selection_biases_stay_frozen(name):
    """They get no gradient, and DDP would wait for one; shared MLPs with another name, or next to
    the block, are found.
    """
    model = model_of(name)
    receipt = freeze_for_esft(model, two_each(model), True, True)

    assert receipt.shared_experts
    for path in receipt.shared_experts:
        assert "gate" not in path.rpartition(".")[2]
    grads = run(model, batch(name)).keys() - {"logits"}
    frozen = set()
    has_indexer = False
    for path, p in model.named_parameters():
        assert p.requires_grad == (path in grads), path
        if "indexer" in path.split("."):
            has_indexer = True
        elif not p.requires_grad:
            frozen.add(path.rpartition(".")[2])
    chosen_by = {"e_score_correction_bias", "expert_bias"}
    assert frozen - chosen_by == {"gate_up_proj", "down_proj"}
    assert has_indexer == (name == "deepseek_v32")
    if name == "gemma4":  # an MLP and experts in one block
        numbers = numbered_layers(model)
        assert receipt.shared_experts == tuple(f"model.layers.{number}.mlp" for number in numbers)


@pytest.mark.parametrize("undo", [fold_rows, drop_rows])
@pytest.mark.parametrize("name", ["gpt_oss", "ours"])
def test_a_plain_model_again(name, undo):
    model = model_of(name)
    ids = batch(name)
    first = next(iter(numbered_layers(model)))
    model.get_parameter(f"{paths_of(model)[first]}.down_proj").requires_grad_(False)
    before = copy.deepcopy(model)
    freeze_for_esft(model, {first: [1]}, non_expert_modules=True)
    if undo is drop_rows:
        with torch.no_grad():
            trained_rows(model)[first].stacks["down_proj"].zero_()
    undo(model)

    assert traces_of(model) == traces_of(before)
    tiny.assert_equal(
        dict(model.named_parameters()),
        dict(before.named_parameters()),
    )
    assert torch.equal(model(ids).logits, before(ids).logits)


def traces_of(model) -> list:
    """Everything that training of some experts could leave in a model, except values of weights."""
    tensors = []
    for name, p in model.named_parameters():
        tensors.append((name, p.requires_grad))
    modules = []
    for module in model.modules():
        modules.append((module.__dict__.keys(), len(module._forward_pre_hooks)))
    buffers = [name for name, _ in model.named_buffers()]
    return [tensors, modules, buffers, model.config._experts_implementation]


@pytest.mark.parametrize(
    "reentrant",
    [False, True],
    ids=["non-reentrant", "reentrant"],
)
@pytest.mark.parametrize("name", ["deepseek_v2", "inkling2", "ours"])
def test_gradient_checkpointing(name, reentrant):
    model = model_of(name)
    ids = batch(name)
    freeze_for_esft(model, two_each(model))
    expected = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = count_calls(model)
    values = run(model, ids)

    assert calls == dict.fromkeys(calls, 2)  # each layer ran again
    assert values.keys() == expected.keys()
    assert len(values) > 1
    tiny.assert_close(values, expected, 1e-6)
