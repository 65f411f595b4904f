"""Experts that train in part: accumulation, compilation, generation, what is differentiated and allocated, copies."""

import copy
import functools
import pickle

import pytest
import torch

import moe_runtime
from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.dropin.stats import RouterCounter
from moe_runtime.hf.training.trainable import fold_rows, freeze_for_esft, train_rows
from moe_runtime.ops import workspace
from tests.hf.tiny import distance
from tests.hf.training.trainables import batch, model_of, optimizer_of, paths_of, run, train, two_each
from tests.modules.test_merged_memory import allocations, peak
from tests.support import stock_moe
from tests.support.trained_rows import gathered_rows, trained_rows


def test_accumulation_and_autocast():
    model, ids = model_of("deepseek_v2"), batch("deepseek_v2")
    freeze_for_esft(model, two_each(model))
    want = run(model, ids)
    logits = [model(part).logits for part in ids.split(1)]
    scale = torch.linspace(-1, 1, want["logits"].numel()).view_as(want["logits"])
    model.zero_grad()
    for part, weight in zip(logits, scale.split(1)):
        (part * weight).sum().div(scale.numel()).backward()
    for number, layer in trained_rows(model).items():
        path = paths_of(model)[number]
        for stack, p in layer.stacks.items():
            assert distance(p.grad, want[f"{path}.trained_{stack}"]) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        low = run(model, ids)
    for path, value in want.items():
        assert low[path].dtype == (torch.bfloat16 if path == "logits" else torch.float32)
        assert distance(low[path], value) < 0.1, path


@pytest.mark.parametrize("name", ["deepseek_v2", "inkling2"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model, ids = model_of(name), batch(name)
    number = next(iter(numbered_layers(model)))
    freeze_for_esft(model, {number: [2, 0]})
    want = run(model, ids)
    module = experts_module(model, numbered_layers(model)[number])
    module.compile(fullgraph=True, backend="aot_eager")
    got = run(model, ids)
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert distance(got[path], value) < 2e-6, path


@pytest.mark.parametrize("name", ["deepseek_v2", "ours"])
def test_counts_and_generation_are_the_models_own(name):
    model, ids = model_of(name).eval(), batch(name)
    moe_runtime.patch(model)
    seen = []
    for apart in (False, True):
        if apart:
            train_rows(model, two_each(model))
        counter = RouterCounter(model)
        with torch.no_grad():
            model(ids)
        counts = counter.read().counts
        counter.close()
        assert counts.any()
        seen.append((counts, model.generate(ids, max_new_tokens=3, do_sample=False)))
    assert all(torch.equal(a, b) for a, b in zip(*seen))


@pytest.mark.parametrize("name", ["qwen2_moe", "ours"])
def test_nothing_below_the_lowest_layer_that_trains_is_differentiated(name, monkeypatch):
    model, ids = model_of(name), batch(name)
    numbers = list(numbered_layers(model))
    freeze_for_esft(model, {numbers[-1]: [1, 2]})
    needed, seen = [], {}
    op = torch.ops.moe_runtime.moe_mlp_backward
    monkeypatch.setattr(
        torch.ops.moe_runtime, "moe_mlp_backward", lambda *args: (needed.append(args[-2]), op(*args))[1]
    )

    def note(number, module, args, out):
        seen[number] = out.requires_grad

    for number, layer in numbered_layers(model).items():
        experts_module(model, layer).register_forward_hook(functools.partial(note, number))
    got = run(model, ids)
    assert seen == {number: number == numbers[-1] for number in numbers}
    # x needs none; both weights do, and these are all that came out
    assert [list(needs[:3]) for needs in needed] == [[False, True, True]]
    trained = trained_rows(model)[numbers[-1]].stacks
    assert {path.rpartition(".")[2] for path in got} == {"logits", *(f"trained_{stack}" for stack in trained)}


SELECTED, ALL = 12, 64  # ESFT's share at DeepSeek-V2-Lite


def many_experts(experts: dict[int, range]):
    model = stock_moe.stock("qwen3_moe", num_experts=ALL, hidden_size=64, moe_intermediate_size=96)
    receipt = freeze_for_esft(model, experts)
    return model, receipt.row_parameters


def first_steps(model) -> list[int]:
    """What is allocated and freed by two steps of AdamW: gradients, the optimizer's states and all that passes."""
    optimizer, ids = optimizer_of(model), stock_moe.batch(1, 4)["input_ids"]

    def two_steps():
        for _ in range(2):
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
        workspace.release()

    workspace.release()
    sizes = allocations(two_steps)
    held = [p.grad for p in model.parameters() if p.grad is not None]
    held += [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert sum(sizes) == pytest.approx(sum(tensor.nbytes for tensor in held), rel=0.01)  # nothing else stays
    return sizes


def test_gradients_and_optimizer_take_their_share_of_the_memory(monkeypatch):
    """Within 5 % of selected / all; and nowhere on the way does anything as large as a stack exist."""
    monkeypatch.setattr(workspace, "LEASE_FROM", 1 << 60)  # what is leased, the profiler does not see
    number = {layer: range(ALL) for layer in (0, 1)}
    whole, all_numbers = many_experts(number)
    some, some_numbers = many_experts({layer: range(3, 3 + SELECTED) for layer in number})
    assert some_numbers / all_numbers == SELECTED / ALL
    full, got = first_steps(whole), first_steps(some)
    assert sum(got) / sum(full) == pytest.approx(SELECTED / ALL, rel=0.05)
    assert peak(got) / peak(full) == pytest.approx(SELECTED / ALL, rel=0.3)  # activations are no share
    stacks = [
        p.nbytes for name, p in some.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert len(stacks) == 4 and max(got) < min(stacks) / 2 and max(full) >= max(stacks)


def test_other_implementations_are_refused():
    model, ids = model_of("qwen2_moe"), batch("qwen2_moe")
    train_rows(model, {0: [0]})
    for change in (lambda: model.set_experts_implementation("grouped_mm"), lambda: moe_runtime.unpatch(model)):
        moe_runtime.patch(model)
        change()
        with pytest.raises(
            ValueError, match="experts_implementation is '(grouped_mm|eager)', some of Qwen2MoeExperts's"
        ):
            model(ids)
    moe_runtime.patch(model)
    model(ids)
    fold_rows(model)
    model.set_experts_implementation("eager")
    model(ids)


def test_copies_and_pickles_train_on():
    model, ids = model_of("deepseek_v2"), batch("deepseek_v2")
    freeze_for_esft(model, two_each(model))
    want = run(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(other, ids, 1)
        assert not torch.equal(run(other, ids)["logits"], want["logits"])
        fold_rows(other)
        other.set_experts_implementation("eager")
        other(ids)
    assert torch.equal(run(model, ids)["logits"], want["logits"])


def test_rows_are_those_of_the_stacks_in_the_order_asked_for():
    model = model_of("gpt_oss")
    train_rows(model, {0: [3, 1], 1: []})
    own, gathered = trained_rows(model), gathered_rows(model)
    assert own.keys() == gathered.keys() == {0} and gathered[0].ids == (3, 1)
    assert gathered[0].stacks.keys() == {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    for stack, rows in gathered[0].stacks.items():
        whole = model.get_parameter(f"{paths_of(model)[0]}.{stack}")
        assert torch.equal(rows, own[0].stacks[stack]) and torch.equal(rows, whole[[3, 1]]) and not rows.requires_grad
        rows.zero_()
        assert own[0].stacks[stack].any()
