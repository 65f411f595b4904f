"""MergedMLP merges once per optimizer step: its cache is never stale, copied or saved, and changes
no gradient.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from moe_runtime import backends
from moe_runtime.modules import merged
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.activation import Activation
from tests.modules.test_merged import make
from tests.support.oracle import assert_parity

BACKENDS = ("torch", "triton", "cpp")


@pytest.fixture
def merges(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the stacks that are merged, without biases."""
    found = []
    original = merged.merge_experts

    def counted(weight, alpha, **kwargs):
        found.extend([tuple(weight.shape)] * (weight.dim() == 3))
        return original(weight, alpha, **kwargs)

    monkeypatch.setattr(merged, "merge_experts", counted)
    return found


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> str:
    why = backends.why_not(
        request.param,
        "merge_experts",
        torch.device("cpu"),
    )
    if why is not None:
        pytest.skip(why)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", request.param)
    return request.param


def plain(layer, x):
    """Compute the layer with merging in the graph of every forward pass, without a cache."""
    w = layer.merged_weights()
    up = layer.experts.up_name
    z = nn.functional.linear(
        x,
        w[up],
        w.get(f"{up}_bias"),
    )
    h = Activation(
        layer.config.hidden_act,
        layer.config.gated,
    ).apply(z)
    return nn.functional.linear(
        h,
        w["down_proj"],
        w.get("down_proj_bias"),
    )


def gradients(f, layer, x):
    x = x.detach().requires_grad_()
    out = f(layer, x)
    da, dx = torch.autograd.grad(
        out.float().square().sum(),
        (layer.mixing_logits, x),
    )
    return {"out": out.detach(), "da": da, "dx": dx}


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"bias": True, "soup": True},
        {"gated": False, "hidden_act": "gelu"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=str,
)
def test_gradients_are_those_of_merging_in_the_graph(dtype, variant, backend, tolerance):
    layer = make(**variant, dtype=dtype)
    x = torch.randn(7, 33, dtype=dtype)
    layer(x)
    result = gradients(MergedMLP.__call__, layer, x)
    expected = gradients(plain, layer, x)
    assert torch.equal(
        result["out"],
        expected["out"],
    )
    assert torch.equal(result["dx"], expected["dx"])
    wide = gradients(
        plain,
        copy.deepcopy(layer).double(),
        x.double(),
    )
    bound = tolerance[dtype]
    assert_parity(
        result,
        wide,
        {
            "out": bound,
            "dx": 3 * bound,
            "da": 5 * bound,
        },
    )


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
def test_merges_once_per_step_of_four_micro_batches(fused, merges, backend):
    layer = make(bias=True)
    other = copy.deepcopy(layer)
    batches = torch.randn(3, 4, 5, 33)
    optimizer, plain_optimizer = (
        torch.optim.AdamW([one.mixing_logits], lr=0.1, fused=fused) for one in (layer, other)
    )
    expected = 0
    for step, batch in enumerate(batches):
        # a fused optimizer does not change the version: the kernel detects the change and writes in
        # place
        if step == 0 or not (fused and backend == "triton"):
            expected += 2
        for x in batch:
            layer(x).square().sum().backward()
            assert len(merges) == expected
        optimizer.step()
        optimizer.zero_grad()
    for batch in batches:
        plain(other, batch).square().sum().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    torch.testing.assert_close(layer.mixing_logits, other.mixing_logits, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(layer, x))


def frozen():
    return make().requires_grad_(False)


CHANGES = {
    "logits written past autograd": lambda m: m.mixing_logits.data.mul_(0.5),
    "an expert in place": lambda m: m.experts.down_proj.detach()[3].zero_(),
    "data of an expert": lambda m: setattr(m.experts.down_proj, "data", make().experts.down_proj),
    "another expert": lambda m: setattr(m.experts, "down_proj", frozen().experts.down_proj),
    "load_state_dict": lambda m: m.load_state_dict(make().state_dict()),
    "shared_rate": lambda m: setattr(m, "shared_rate", 0.25),
    "bfloat16": lambda m: m.bfloat16(),
    "memory swapped": lambda m: torch.utils.swap_tensors(
        m.experts.down_proj, frozen().experts.down_proj
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_missed(name, backend):
    torch.manual_seed(1)
    layer = make()
    x = torch.randn(5, 33)
    with torch.no_grad():
        before = layer(x)
    CHANGES[name](layer)
    x = x.to(layer.experts.down_proj.dtype)
    after = layer(x)
    with torch.no_grad():
        assert torch.equal(after, plain(layer, x))
    assert not torch.equal(after.float(), before)
    assert torch.equal(layer(x), after)


def test_is_in_no_copy_pickle_or_state_dict():
    layer = make()
    x = torch.randn(5, 33)
    size = len(pickle.dumps(layer))
    keys = list(layer.state_dict())
    out = layer(x)
    assert list(layer.state_dict()) == keys
    assert not list(layer.buffers())
    assert len(pickle.dumps(layer)) == size
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), copy.copy(layer), torch.load(file, weights_only=False)):
        assert other._mixture is None
        assert torch.equal(other(x), out)
        assert other._mixture.weights is not layer._mixture.weights
    layer.release()
    assert layer._mixture is None


@pytest.mark.parametrize(
    "is_counted",
    [False, True],
    ids=["bypassing autograd", "in place"],
)
def test_an_older_graph_has_its_own_mixture(is_counted, backend):
    """A kernel merges in place after a write that autograd does not count; the dx of an older graph
    then uses the new weights.
    """
    layer = make()
    logits = layer.mixing_logits
    leaves = [torch.randn(5, 33, requires_grad=True) for _ in range(2)]
    outs = []
    expected = []
    for x in leaves:
        if is_counted:
            logits.detach().normal_()
        else:
            logits.data.normal_()
        expected.append(
            torch.autograd.grad(
                plain(layer, x).square().sum(),
                (x, logits),
            )
        )
        outs.append(layer(x))
    for _ in range(2):  # in both orders, each merges what it needs
        for x, out, wanted in zip(leaves, outs, expected, strict=True):
            result = torch.autograd.grad(
                out.square().sum(),
                (x, logits),
                retain_graph=True,
            )
            torch.testing.assert_close(
                result,
                wanted,
                rtol=1e-4,
                atol=1e-5,
            )
    torch.testing.assert_close(
        layer(leaves[1]),
        outs[1],
    )
