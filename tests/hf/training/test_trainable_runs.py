"""Partly trained experts: accumulation, compilation, generation, what autograd computes and
allocates, copies.
"""

import functools

import pytest
import torch

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.training.trainable import train_rows
from moe_runtime.methods.esft.freezing import freeze_for_esft
from tests.hf import tiny
from tests.hf.training.trainables import batch, model_of, paths_of, run, two_each
from tests.support.trained_rows import gathered_rows, trained_rows


def test_accumulation_and_autocast():
    model = model_of("deepseek_v2")
    ids = batch("deepseek_v2")
    freeze_for_esft(model, two_each(model))
    expected = run(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        low = run(model, ids)

    assert low.keys() == expected.keys()
    assert low.pop("logits").dtype == torch.bfloat16
    assert {value.dtype for value in low.values()} == {torch.float32}
    del expected["logits"]
    tiny.assert_close(low, expected, 0.1)
    losses = [model(part, labels=part).loss / 2 for part in ids.split(1)]
    model.zero_grad()
    sum(losses).backward()
    at_once = tiny.gradients(model)
    model.zero_grad()
    for part in ids.split(1):
        (model(part, labels=part).loss / 2).backward()
    tiny.assert_close(tiny.gradients(model), at_once, 1e-5)


@pytest.mark.parametrize("name", ["deepseek_v2", "inkling2"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model = model_of(name)
    ids = batch(name)
    number = next(iter(numbered_layers(model)))
    freeze_for_esft(model, {number: [2, 0]})
    want = run(model, ids)
    module = experts_module(model, numbered_layers(model)[number])
    module.compile(fullgraph=True, backend="aot_eager")
    got = run(model, ids)

    assert got.keys() == want.keys()
    tiny.assert_close(got, want, 2e-6)


@pytest.mark.parametrize("name", ["qwen2_moe", "ours"])
def test_nothing_below_the_lowest_layer_that_trains_is_differentiated(name, monkeypatch):
    model = model_of(name)
    *lower, last = numbered_layers(model)
    freeze_for_esft(model, {last: [1, 2]})
    needs = []
    seen = {}
    op = torch.ops.moe_runtime.moe_mlp_backward

    def recorded(*args):
        needs.append(list(args[-2][:3]))
        return op(*args)

    def note(number, module, args, out):
        seen[number] = out.requires_grad

    monkeypatch.setattr(torch.ops.moe_runtime, "moe_mlp_backward", recorded)
    for number, layer in numbered_layers(model).items():
        experts_module(model, layer).register_forward_hook(functools.partial(note, number))
    grads = run(model, batch(name)).keys() - {"logits"}

    assert seen == dict.fromkeys(lower, False) | {last: True}
    # x needs no gradient; both weights do, and nothing else is computed
    assert needs == [[False, True, True]]
    trained = set()
    for stack in trained_rows(model)[last].stacks:
        trained.add(f"trained_{stack}")
    assert {path.rpartition(".")[2] for path in grads} == trained


def test_rows_are_those_of_the_stacks_in_the_order_of_the_selection():
    model = model_of("gpt_oss")
    train_rows(model, {0: [3, 1], 1: []})
    trained = trained_rows(model)
    gathered = gathered_rows(model)

    assert trained.keys() == gathered.keys() == {0}
    assert gathered[0].ids == (3, 1)
    biases = {"gate_up_proj_bias", "down_proj_bias"}
    assert gathered[0].stacks.keys() == {"gate_up_proj", "down_proj"} | biases
    for stack, rows in gathered[0].stacks.items():
        whole = model.get_parameter(f"{paths_of(model)[0]}.{stack}")
        assert torch.equal(rows, trained[0].stacks[stack])
        assert torch.equal(rows, whole[[3, 1]])
        assert not rows.requires_grad
        rows.zero_()
        assert trained[0].stacks[stack].any()
