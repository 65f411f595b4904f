"""Training some experts of stock and upcycled models: gradients, what moves, what is left as it was, what is refused."""

import copy
import functools
import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import moe_runtime
from moe_runtime.hf.layers import experts_module, numbered_layers
from moe_runtime.hf.trainable import drop_rows, fold_rows, freeze_for_esft, train_rows
from moe_runtime.methods import xft
from moe_runtime.modules import trainable
from moe_runtime.ops import workspace
from moe_runtime.stats import RouterCounter
from tests.hf import stock, tiny
from tests.hf.tiny import distance
from tests.modules.test_merged_memory import allocations, peak
from tests.support import stock_moe
from tests.support.trained_rows import gathered_rows, trained_rows

# deepseek_v2: a dense layer, shared MLPs; gpt_oss: transposed, interleaved, biases; nemotron_h: not gated; qwen2_moe: a gate in
# front of the shared MLP; muse_spark: composed, a norm behind each expert; inkling2: composed, a gate of its own
STOCK = ("deepseek_v2", "gpt_oss", "nemotron_h", "qwen2_moe", "muse_spark", "inkling2")
OURS = {"ours": {}, "ours-plain-gate": {"gate": "topk_softmax"}}
MODELS = (*STOCK, *OURS)


@functools.cache
def _made(name: str):
    model = tiny.upcycled("llama", **OURS[name]) if name in OURS else stock.build(name)
    return model.train()


def model_of(name: str):
    return copy.deepcopy(_made(name))


def batch(name: str) -> torch.Tensor:
    return tiny.batch() if name in OURS else stock.batch()["input_ids"]


def two_each(model) -> dict[int, list[int]]:
    """Two routed experts of each layer, the later one first."""
    return {
        number: [layer.num_experts - 1 - number % 2, layer.num_shared]
        for number, layer in numbered_layers(model).items()
    }


def paths_of(model) -> dict[int, str]:
    names = {module: name for name, module in model.named_modules()}
    return {number: names[experts_module(model, layer)] for number, layer in numbered_layers(model).items()}


def run(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and every gradient, of a loss that is O(1)."""
    model.zero_grad()
    logits = model(ids).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_stacks(name):
    whole, apart, ids = model_of(name), model_of(name), batch(name)
    moe_runtime.patch(whole)
    experts, paths = two_each(apart), paths_of(apart)
    receipt = train_rows(apart, experts)
    assert receipt.experts == {number: tuple(ids) for number, ids in experts.items()}
    want, got = run(whole, ids), run(apart, ids)
    assert want["logits"].norm() > 0 and distance(got["logits"], want["logits"]) < 2e-6
    rows = trained_rows(apart)
    assert rows.keys() == experts.keys()
    for number, layer in rows.items():
        assert layer.ids == tuple(experts[number])
        for stack, parameter in layer.stacks.items():
            path = f"{paths[number]}.{stack}"
            assert parameter is apart.get_parameter(f"{paths[number]}.trained_{stack}")
            assert not apart.get_parameter(path).requires_grad and path not in got
            got.pop(f"{paths[number]}.trained_{stack}")
            wanted = want.pop(path)[list(layer.ids)]
            assert wanted.norm() > 0 and distance(parameter.grad, wanted) < 1e-5, path
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert distance(got[path], value) < 1e-5, path


@pytest.mark.parametrize("name", ["deepseek_v2", "gpt_oss", "muse_spark"])
def test_kernels(name, monkeypatch):
    """The Triton path, one layer of experts alone: whole models take the interpreter too long."""
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    whole, apart = model_of(name), model_of(name)
    moe_runtime.patch(whole)
    number, experts = next(reversed(two_each(apart).items()))
    train_rows(apart, {number: experts})
    whole, apart = (experts_module(model, numbered_layers(model)[number]) for model in (whole, apart))
    E, generator = whole.num_experts, torch.Generator().manual_seed(0)
    x = torch.randn(9, apart.down_proj.shape[1 if not apart.is_transposed else 2], generator=generator)
    idx, weight = torch.rand(9, E, generator=generator).topk(2).indices, torch.rand(9, 2, generator=generator)
    out = {}
    for module in (whole, apart):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = module(leaves[0], idx, leaves[1])
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        out[module] = [y.detach(), *(leaf.grad for leaf in leaves)]
    for got, want in zip(out[apart], out[whole], strict=True):
        assert distance(got, want) < 5e-6
    for stack in ("gate_up_proj", "down_proj"):
        assert distance(getattr(apart, f"trained_{stack}").grad, getattr(whole, stack).grad[experts]) < 5e-6


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)


def train(model, ids: torch.Tensor, steps: int) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return optimizer


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
    everyone = {number: list(range(layer.num_shared, layer.num_experts)) for number, layer in layers.items()}
    return {"all": everyone, "relevant": two_each(model), "none": {}}[which]


def kinds_of(model) -> dict[str, str]:
    """By name, which parameter is of "experts", of "shared" MLPs or of the "rest": names written out, as in the table."""
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
    """What is said to train moves, all else is the same bit by bit after steps of AdamW with weight decay."""
    model, ids = model_of(name), batch(name)
    before, kinds, paths = (
        {n: p.detach().clone() for n, p in model.named_parameters()},
        kinds_of(model),
        paths_of(model),
    )
    experts = selected(model, which)
    receipt = freeze_for_esft(model, experts, shared, rest)
    rows = {number: list(ids) for number, ids in receipt.experts.items()}
    if name == "ours" and shared:  # the shared one is expert 0 of the stack
        experts = {number: [*experts.get(number, []), 0] for number in paths}
    assert rows == experts
    assert receipt.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert receipt.total_parameters == sum(value.numel() for value in before.values())
    assert bool(receipt.shared_experts) == (shared and name != "ours")
    if receipt.trainable_parameters == 0:
        assert (which, shared, rest) == ("none", False, False)
        assert not model(ids, labels=ids).loss.requires_grad
    else:
        train(model, ids, 3)
    fold_rows(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(p.requires_grad for p in after.values())
    of_stack = {path: number for number, path in paths.items()}
    for path, value in before.items():
        if kinds[path] == "experts":
            ids_here = rows.get(of_stack[path.rpartition(".")[0]], [])
            moved = (after[path] != value).flatten(1).any(1).nonzero().flatten().tolist()
            assert moved == sorted(ids_here), path
        else:
            trains = shared if kinds[path] == "shared" else rest
            assert torch.equal(after[path], value) != trains, path


@pytest.mark.parametrize("name", ["ernie4_5_moe", "afmoe", "granitemoeshared", "deepseek_v32", "glm_moe_dsa", "gemma4"])
def test_what_routers_choose_by_stays_frozen(name):
    """No gradient reaches it, and DDP would wait for one; shared MLPs under another name, and beside the block, are found."""
    model, ids = model_of(name), batch(name)
    indexers = {path for path, _ in model.named_parameters() if "indexer" in path.split(".")}
    receipt = freeze_for_esft(model, two_each(model), True, True)
    assert receipt.shared_experts and not any("gate" in path.rpartition(".")[2] for path in receipt.shared_experts)
    got = run(model, ids)
    trains = {path for path, p in model.named_parameters() if p.requires_grad}
    assert trains == got.keys() - {"logits"}
    left = {path for path, p in model.named_parameters() if not p.requires_grad} - indexers
    left = {path.rpartition(".")[2] for path in left}
    assert left - {"e_score_correction_bias", "expert_bias"} == {"gate_up_proj", "down_proj"}
    assert bool(indexers) == (name in ("deepseek_v32", "glm_moe_dsa"))
    if name == "gemma4":  # an MLP and experts in one block
        assert receipt.shared_experts == tuple(f"model.layers.{number}.mlp" for number in numbered_layers(model))


@pytest.mark.parametrize("name", ["deepseek_v2", "gpt_oss", "inkling2", "ours"])
def test_the_others_stay_for_50_steps_and_the_optimizer_knows_none(name):
    model, ids = model_of(name), batch(name)
    before, paths = {n: p.detach().clone() for n, p in model.named_parameters()}, paths_of(model)
    receipt = freeze_for_esft(model, two_each(model))
    optimizer = train(model, ids, 50)
    states = [state for state in optimizer.state.values()]
    assert (
        sum(state[key].numel() for state in states for key in ("exp_avg", "exp_avg_sq")) == 2 * receipt.row_parameters
    )
    assert (
        receipt.row_parameters
        == receipt.trainable_parameters
        == sum(2 * value[0].numel() for path, value in before.items() if path.rpartition(".")[0] in paths.values())
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
    model, ids = model_of(name), batch(name)
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
    for (name, p), (other, q) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q) and p.requires_grad == q.requires_grad, name
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
    model, ids = model_of(name).to(torch.bfloat16), batch(name)
    number = next(iter(numbered_layers(model)))
    plain = copy.deepcopy(model)
    moe_runtime.patch(plain)
    receipt = freeze_for_esft(model, {number: [2, 1]}, dtype=torch.float32)
    assert distance(run(model, ids)["logits"], run(plain, ids)["logits"]) < 1e-2  # each 1e-2 off float64
    rows = trained_rows(model)[number].stacks
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in rows.values())
    assert all(p.dtype == torch.bfloat16 for name, p in model.named_parameters() if "trained" not in name)
    before = {stack: p.detach().clone() for stack, p in rows.items()}
    optimizer = torch.optim.AdamW(rows.values(), lr=1e-6, weight_decay=0)  # steps that bfloat16 would lose
    optimizer.step()
    for stack, p in rows.items():
        assert (p != before[stack]).float().mean() > 0.5
    assert sum(s["exp_avg"].numel() for s in optimizer.state.values()) == receipt.row_parameters
    fold_rows(model)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True], ids=["kept", "reentrant"])
@pytest.mark.parametrize("name", ["deepseek_v2", "inkling2", "ours"])
def test_gradient_checkpointing(name, reentrant):
    model, ids = model_of(name), batch(name)
    freeze_for_esft(model, two_each(model))
    want = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = count_calls(model)
    got = run(model, ids)
    assert calls == {number: 2 for number in calls}  # each layer ran again
    assert got.keys() == want.keys() and len(got) > 1
    for path, value in want.items():
        assert distance(got[path], value) < 1e-6, path


def count_calls(model) -> dict[int, int]:
    calls = dict.fromkeys(numbered_layers(model), 0)

    def count(number, *_):
        calls[number] += 1

    for number, layer in numbered_layers(model).items():
        experts_module(model, layer).register_forward_pre_hook(functools.partial(count, number))
    return calls


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
    for train in (False, True):
        if train:
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
        torch.ops.moe_runtime, "moe_mlp_backward", lambda *args: (needed.append(args[-8]), op(*args))[1]
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


BAD = [
    pytest.param({5: [0]}, {}, "experts name layer 5; want layers with experts: 1", id="no such layer"),
    pytest.param({0: [0]}, {}, "experts name layer 0; want layers with experts: 1", id="a dense layer"),
    pytest.param({1: [0, 8]}, {}, r"experts of layer 1 are \[0, 8\]; want ids from 0 to 7, none", id="no such expert"),
    pytest.param({1: [-1]}, {}, r"experts of layer 1 are \[-1\]; want ids", id="below zero"),
    pytest.param({1: [2, 2]}, {}, r"experts of layer 1 are \[2, 2\]; want ids", id="twice"),
    pytest.param({1: [2]}, {"dtype": torch.int8}, "dtype is torch.int8; want one of torch.float16", id="integers"),
]


@pytest.mark.parametrize("call", [train_rows, freeze_for_esft])
@pytest.mark.parametrize(("experts", "options", "says"), BAD)
def test_refuses(experts, options, says, call):
    model = model_of("deepseek_v2")
    check_untouched(model, functools.partial(call, model, experts, **options), says)


def check_untouched(model, change, says: str) -> None:
    before = state_of(model)
    with pytest.raises(ValueError, match=says):
        change()
    assert state_of(model) == before


def state_of(model) -> list:
    """All that a call could leave in a model, but the values of its weights."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    hooks = ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return [
        [(name, id(tensor), tensor.requires_grad) for name, tensor in tensors],
        [(*module.__dict__, *(len(getattr(module, hook)) for hook in hooks)) for module in model.modules()],
        model.config._experts_implementation if hasattr(model, "config") else None,
    ]


def test_refuses_models_that_it_cannot_change():
    model = model_of("ours")
    check_untouched(
        model, lambda: freeze_for_esft(model, {0: [0, 1]}), r"experts of layer 0 are \[0, 1\], of which 0 is the"
    )
    for undo in (fold_rows, drop_rows):
        check_untouched(
            model, lambda undo=undo: undo(model), "of which no rows train; want one that train_rows has changed"
        )
    check_untouched(tiny.dense(), lambda: train_rows(tiny.dense(), {0: [0]}), "without a router; want MoE layers")
    trained = model_of("qwen2_moe")
    train_rows(trained, {0: [1]})
    for again in (train_rows, freeze_for_esft):
        with pytest.raises(
            ValueError, match=r"trains rows already; want fold_rows\(model\) or drop_rows\(model\) first"
        ):
            again(trained, {1: [1]})
    quantized = model_of("qwen2_moe")
    experts = experts_module(quantized, numbered_layers(quantized)[0])
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().to(torch.int8), requires_grad=False)
    check_untouched(quantized, lambda: train_rows(quantized, {0: [1]}), "experts.down_proj is torch.int8; want one of")


@pytest.mark.parametrize("step", ["split_rows", "register_maps"])
def test_out_of_memory_half_way_leaves_the_model_as_it_was(step, monkeypatch):
    model, real = model_of("qwen2_moe"), getattr(trainable, step)

    def second_fails(module, *args):
        if module is experts_module(model, numbered_layers(model)[1]):
            raise MemoryError
        real(module, *args)

    monkeypatch.setattr(trainable, step, second_fails)
    before = state_of(model)
    with pytest.raises(MemoryError):
        freeze_for_esft(model, {0: [1], 1: [2]})
    assert state_of(model) == before
    monkeypatch.undo()
    train_rows(model, {0: [1], 1: [2]})


def test_what_is_quantized_cannot_train():
    model = model_of("qwen2_moe")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().to(torch.int8), requires_grad=False)
    check_untouched(
        model, lambda: freeze_for_esft(model, {0: [1]}, non_expert_modules=True), "lm_head.weight is torch.int8"
    )
    assert freeze_for_esft(model, {0: [1]}).experts == {0: (1,)}


def test_compiled_and_adapted_models_get_back_what_required_a_gradient():
    from peft import LoraConfig, get_peft_model

    model = model_of("qwen2_moe")
    model.lm_head.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    compiled = torch.compile(model, backend="eager")
    freeze_for_esft(compiled, {0: [1]})
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    fold_rows(adapted)
    adapted.unload()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_what_peft_unloads_can_be_folded():
    from peft import LoraConfig, get_peft_model

    model, ids = model_of("qwen2_moe"), batch("qwen2_moe")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    train_rows(wrapped, {0: [1]})
    with torch.no_grad():
        trained_rows(wrapped)[0].stacks["down_proj"].add_(1)
    want = wrapped(ids).logits
    with pytest.raises(ValueError, match="some experts of PeftModel train apart"):
        wrapped.save_pretrained("never")
    unloaded = wrapped.merge_and_unload()
    for again in (train_rows, freeze_for_esft):
        check_untouched(unloaded, lambda again=again: again(unloaded, {0: [1]}), "the model trains rows already")
    assert trained_rows(unloaded)[0].ids == (1,)
    fold_rows(unloaded)
    assert distance(unloaded(ids).logits, want) < 1e-6
    assert not [name for name, _ in unloaded.named_parameters() if "trained_" in name]
    assert "save_pretrained" not in unloaded.__dict__


@pytest.mark.parametrize("undo", [fold_rows, drop_rows])
def test_no_checkpoint_that_reads_as_the_base(undo, tmp_path):
    model, ids = model_of("qwen2_moe"), batch("qwen2_moe")
    freeze_for_esft(model, {0: [1]})
    with torch.no_grad():
        trained_rows(model)[0].stacks["down_proj"].mul_(2)
    for part in (model, model.model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(
            ValueError, match="train apart, and from_pretrained would read what they were; want fold_rows"
        ):
            part.save_pretrained(tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())
    undo(model)
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = type(model).from_pretrained(tmp_path / "checkpoint", experts_implementation="eager")
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_a_trainer_says_so_before_the_first_step(tmp_path):
    from transformers import Trainer, TrainingArguments

    def train(save: str) -> None:
        made = TrainingArguments(
            str(tmp_path), max_steps=1, save_strategy=save, use_cpu=True, report_to=[], disable_tqdm=True
        )
        row = {"input_ids": batch("qwen2_moe")[0], "labels": batch("qwen2_moe")[0]}
        Trainer(model, made, train_dataset=[row] * 8).train()

    model = model_of("qwen2_moe")
    freeze_for_esft(model, {0: range(model.config.num_experts)})
    before = gathered_rows(model)[0].stacks["down_proj"]
    with pytest.raises(ValueError, match="save_strategy is 'steps', some experts of Qwen2MoeForCausalLM train"):
        train("steps")
    assert torch.equal(before, gathered_rows(model)[0].stacks["down_proj"])
    train("no")
    assert not torch.equal(before, gathered_rows(model)[0].stacks["down_proj"])
    fold_rows(model)
    train("steps")
    assert (tmp_path / "checkpoint-1" / "config.json").is_file()


def test_refuses_weights_that_are_not_here(monkeypatch):
    from accelerate import cpu_offload

    with torch.device("meta"):
        model = stock_moe.stock("qwen3_moe")
    says = "layers.0.mlp.experts.gate_up_proj is on the meta device; want weights that stay"
    check_untouched(model, lambda: train_rows(model, {0: [1]}), says)
    offloaded = model_of("qwen2_moe")
    cpu_offload(offloaded, execution_device="cpu")
    with pytest.raises(ValueError, match=says):
        freeze_for_esft(offloaded, {0: [1]})
    # FSDP sends the first rank's weights to ranks that have loaded none, and no maps
    monkeypatch.setattr("moe_runtime.hf.trainable_layers.is_fsdp_enabled", lambda: True)
    train_rows(model, {0: [6, 1]})
    experts = model.model.layers[0].mlp.experts
    assert experts.trained_down_proj.is_meta and experts.trained_down_proj.shape[0] == 2
    assert experts.trained_row.tolist() == [-1, 1, -1, -1, -1, -1, 0, -1] and experts.trained_expert.tolist() == [6, 1]


def test_refuses_stacks_of_two_layers():
    model = model_of("qwen2_moe")
    first, second = (experts_module(model, layer) for layer in numbered_layers(model).values())
    second.down_proj = first.down_proj
    for number in (0, 1):
        check_untouched(
            model,
            lambda n=number: train_rows(model, {n: [1]}),
            f"down_proj of layer {number} is layer {1 - number}'s too",
        )


def test_refuses_adapted_experts():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of("qwen2_moe"), LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]))
    check_untouched(model, lambda: train_rows(model, {0: [1]}), "mlp.experts.base_layer lies in PEFT's adapters")


@pytest.mark.parametrize("change", [xft.to_mergeable, xft.merge])
def test_no_other_method_takes_the_stacks_alone(change):
    model = model_of("ours")
    train_rows(model, {0: [1]})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="experts of layer 0 train apart from their stacks; want them folded in"):
        change(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    fold_rows(model)
    change(model)


@pytest.fixture
def one_rank():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_refuses_what_an_engine_holds(one_rank):
    from torch.distributed.fsdp import fully_shard

    wrapped = DistributedDataParallel(model_of("qwen2_moe"))
    with pytest.raises(ValueError, match="model is DistributedDataParallel, whose parameters an engine holds"):
        train_rows(wrapped, {0: [1]})
    model = model_of("qwen2_moe")
    train_rows(model, {0: [1]})
    sharded = fully_shard(model)
    with pytest.raises(ValueError, match="whose parameters an engine holds; want it as it was before that"):
        fold_rows(sharded)
    with pytest.raises(ValueError, match="experts.gate_up_proj is sharded; want train_rows before FSDP2"):
        train_rows(fully_shard(model_of("qwen2_moe")), {0: [1]})
