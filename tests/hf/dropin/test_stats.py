"""stats.py: metrics against counts by hand, and the counts against the routers' ids."""

import math

import pytest
import torch
from torch import nn

import moe_runtime
from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin import stats
from moe_runtime.hf.dropin.replay import record_routing
from moe_runtime.hf.dropin.stats import RouterCounter, RouterStats, collect_router_stats
from moe_runtime.modules.moe import MoE
from tests.hf.tiny import upcycled
from tests.support import count_worker
from tests.support.dist_launch import launch
from tests.support.stock_moe import FAMILIES, batch, stock

H = 16


class Toy(nn.Module):
    """Two MoE layers with residual connections."""

    def __init__(self, **settings):
        super().__init__()
        sizes = {
            "hidden_size": H,
            "intermediate_size": 8,
            "num_experts": 5,
            "top_k": 3,
        }
        config = MoEConfig(**sizes | settings)
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": MoE(config)}) for _ in range(2)])
        for layer in self.layers:
            nn.init.normal_(layer["mlp"].gate.weight)

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


def ids_of(model, x):
    """Expert ids of each layer, [T, K]."""
    with record_routing(model) as record, torch.no_grad():
        model(x)
    return [calls[0] for calls in record.ids.values()]


def bincount(ids, E=5):
    return torch.stack(
        [
            torch.bincount(
                i.flatten().long(),
                minlength=E,
            )
            for i in ids
        ]
    )


def test_measures_of_a_balanced_a_collapsed_and_a_mixed_layer():
    counts = torch.tensor(
        [
            [5, 5, 5, 5],
            [20, 0, 0, 0],
            [10, 5, 5, 0],
            [0, 0, 0, 0],
        ]
    )
    assert stats.expert_load(counts).tolist() == [
        [0.25] * 4,
        [1, 0, 0, 0],
        [0.5, 0.25, 0.25, 0],
        [0] * 4,
    ]
    assert stats.dead_experts(counts).sum(1).tolist() == [0, 3, 1, 4]

    assert stats.max_violation(counts).tolist() == [1, 4, 2, 0]
    mixed = 1.5 * math.log(2) / math.log(4)
    assert stats.load_entropy(counts).tolist() == pytest.approx([1, 0, mixed, 0])
    one = torch.tensor([7])
    assert stats.max_violation(one) == 1
    assert stats.load_entropy(one) == 1


def test_each_layer_is_measured_and_named_without_its_shared_expert():
    # the first expert is shared; pooled over the layers, the other experts are balanced
    counts = torch.tensor(
        [
            [80, 80, 80, 0, 0],
            [80, 0, 0, 80, 80],
            [40, 40, 40, 40, 40],
        ]
    )
    seen = RouterStats(counts, ("0", "3", "7"), num_shared=1)
    assert seen.max_violation.tolist() == [2, 2, 1]

    assert seen.entropy.tolist() == pytest.approx([0.5, 0.5, 1])
    assert seen.dead.sum(1).tolist() == [2, 2, 0]
    assert seen.load[0, 0] == 1 / 3
    warning = seen.warning()
    assert "layer 0: experts 3, 4 got no token" in warning
    assert "layer 3: experts 1, 2 got no token" in warning
    assert "layer 7" not in warning
    values = seen.per_layer()
    assert values["router/3/load/4"] == 1 / 3
    assert values["router/3/max_violation"] == 2
    assert values["router/7/entropy"] == 1
    assert values["router/3/dead_experts"] == 2
    assert seen.summary() == {
        "router/max_violation": 2,
        "router/min_entropy": pytest.approx(0.5),
        "router/dead_experts": 4,
    }


@pytest.mark.parametrize(
    "counts, options, says",
    [
        ([100, 90, 110, 95], {}, None),
        ([100, 100, 100, 0], {}, "layer 7: experts 3 got no token"),
        ([1000, 10, 10, 10], {}, "layer 7: entropy 0.1"),
    ],
)
def test_warning_is_for_dead_experts_and_low_entropy_only(counts, options, says):
    warning = RouterStats(torch.tensor([counts]), ("7",)).warning(**options)
    assert warning is None if says is None else says in warning


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="xft"),
        pytest.param(
            {"gate": "topk_softmax", "top_k": 2},
            id="without-shared",
        ),
        pytest.param({"num_experts": 1, "top_k": 1}, id="one-expert"),
    ],
)
def test_counts_are_the_bincount_of_the_ids(settings):
    model = Toy(**settings).eval()
    batches = [torch.randn(2, 9, H), torch.randn(7, H), torch.randn(0, H)]
    seen = collect_router_stats(model, batches)
    expected = sum(
        bincount(
            ids_of(model, x),
            seen.counts.shape[1],
        )
        for x in batches
    )

    assert torch.equal(seen.counts, expected)
    assert seen.layers == ("0", "1")
    assert seen.num_shared == model.layers[0]["mlp"].config.has_shared_expert
    assert torch.allclose(
        seen.load.sum(1),
        torch.ones(2, dtype=torch.float64),
    )
    assert all(map(math.isfinite, seen.summary().values()))


def test_padding_is_left_out():
    model = Toy().eval()
    x = torch.randn(2, 6, H)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    seen = collect_router_stats(model, [{"x": x, "attention_mask": mask}])

    assert torch.equal(
        seen.counts,
        bincount([i[mask.flatten().bool()] for i in ids_of(model, x)]),
    )
    counter = RouterCounter(model)
    model(x, mask)
    assert torch.equal(counter.read().counts, seen.counts)
    counter.close()
    # with a cache: one new token per row and a mask over all tokens
    new = x[:, -1:]
    seen = collect_router_stats(model, [{"x": new, "attention_mask": mask}])
    assert torch.equal(
        seen.counts,
        bincount([i[1:] for i in ids_of(model, new)]),
    )


def test_reading_resets_when_asked_and_training_only_when_asked():
    model = Toy()
    x = torch.randn(4, H)
    counter = RouterCounter(model, only_training=True)
    model(x)
    model.eval()(x)

    assert counter.read().counts.sum() == 4 * 3 * 2
    assert counter.read(reset=True).counts.sum() == 4 * 3 * 2
    assert counter.read().counts.sum() == 0
    model.train().layers[0]["mlp"](x)  # not a call of the model itself
    assert counter.read().counts.sum() == 0
    model(x)
    counter.close()
    model(x)
    assert counter.read().counts.sum() == 4 * 3 * 2


def test_layers_of_different_sizes_are_counted_and_measured_separately(tmp_path):
    model = Toy()
    x = torch.randn(40, H)
    small = MoE(
        MoEConfig(hidden_size=H, intermediate_size=8, num_experts=3, top_k=2, gate="softmax_topk")
    )
    nn.init.zeros_(small.gate.weight)  # ties go to experts 0 and 1
    model.layers[1]["mlp"] = small
    seen = collect_router_stats(model, [x])

    assert torch.equal(seen.counts, bincount(ids_of(model, x)))
    assert seen.counts[1].tolist() == [40, 40, 0, 0, 0]
    assert seen.num_experts == (5, 3)
    assert seen.num_shared == (1, 0)
    assert seen.dead[1].tolist() == [False, False, True, False, False]
    assert seen.max_violation[1] == 1.5
    assert seen.entropy[1] == pytest.approx(math.log(2) / math.log(3))
    assert [row[:3] for row in seen.rows()[5:]] == [("1", 0, 0), ("1", 1, 0), ("1", 2, 0)]
    assert "layer 1: experts 2 got no token" in seen.warning()
    assert "router/1/load/3" not in seen.per_layer()
    drawn = seen.heatmap(tmp_path / "load.png").images[0].get_array()
    assert drawn.mask.tolist() == [
        [True] + [False] * 4,
        [False] * 3 + [True] * 2,
    ]
    assert drawn[1, 0] == 1.5


def test_processes_add_their_counts(tmp_path):
    launch(count_worker.__file__, 2, tmp_path)


def stock_counts(model, batches):
    """Count slots by the ids that the stock experts of `model` receive, without padding."""
    counts = 0
    for inputs in batches:
        with record_routing(model) as record, torch.no_grad():
            model(**inputs)
        mask = (
            inputs.get(
                "attention_mask",
                torch.ones_like(inputs["input_ids"]),
            )
            .flatten()
            .bool()
        )
        counts = counts + bincount(
            [calls[0][mask] for calls in record.ids.values()],
            8,
        )
    return counts


@pytest.mark.parametrize(
    "implementation",
    ["eager", "grouped_mm", "moe_runtime"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_stock_counts_are_the_bincount_of_the_ids(name, implementation):
    moe_runtime.register()
    model = stock(name).eval()
    model.set_experts_implementation(implementation)
    batches = [batch(), batch(padding=3), batch(1, 5)]
    want = stock_counts(model, batches)
    got = collect_router_stats(model, batches)
    dense = model.config.num_hidden_layers - 2  # leading layers without experts

    assert torch.equal(got.counts, want)
    assert got.layers == (str(dense), str(dense + 1))
    assert got.counts.sum(1).tolist() == [2 * (18 + 15 + 5)] * 2


def test_our_experts_are_counted_by_dispatch_without_hooks(monkeypatch):
    model = stock("qwen3_moe")
    moe_runtime.patch(model)
    added = []
    monkeypatch.setattr(
        RouterCounter,
        "_add",
        lambda self, name, ids: added.append(name),
    )
    expected = stock_counts(model, [batch()])

    assert torch.equal(
        collect_router_stats(model, [batch()]).counts,
        expected,
    )
    assert not added
    collect_router_stats(model, [batch(padding=3)])
    # with padding, a hook masks the ids
    assert added == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    for module in model.modules():
        assert not (hasattr(module, "moe_runtime_counts"))


@pytest.mark.parametrize("name", ["mixtral", "ours"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_the_counter_keeps_outputs_and_ignores_recomputation(reentrant, name):
    results = []
    for count in (False, True):
        torch.manual_seed(3)
        if name == "ours":
            model = upcycled(
                noisy_gate=True,
                changes={"vocab_size": 64},
            ).train()
        else:
            model = stock(name)
            moe_runtime.patch(model)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        keys = list(model.state_dict())
        counter = RouterCounter(model) if count else None
        out = model(**batch())
        out.loss.backward()
        results.append(
            [
                out.logits,
                out.loss,
                *(p.grad for p in model.parameters()),
            ]
        )
        slots = 3 if name == "ours" else 2
        assert counter is None or counter.read().counts.sum(1).tolist() == [18 * slots] * 2
        assert list(model.state_dict()) == keys
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_ids_of_no_expert_do_not_count():
    # expert parallelism uses these ids for slots of other ranks
    experts = stock("qwen3_moe", num_experts=5).model.layers[0].mlp.experts
    model = nn.Sequential(experts)
    model.forward = lambda x, ids: experts(x, ids, torch.ones(ids.shape))
    experts.forward = lambda x, ids, weights: x
    ids = torch.tensor([[0, -1], [4, 4], [5, 100], [1, 0]])
    counter = RouterCounter(model)
    model(torch.randn(4, 32), ids)

    assert counter.read().counts.tolist() == [[2, 1, 0, 0, 2]]
