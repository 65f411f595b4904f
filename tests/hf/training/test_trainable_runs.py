"""Partly trained experts: accumulation, compilation, generation, what autograd computes and
allocates, copies.
"""

import functools

import pytest
import torch

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.methods.esft.freezing import freeze_for_esft
from tests.hf import tiny
from tests.hf.training.trainables import batch, model_of, run
from tests.support.trained_rows import trained_rows


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
