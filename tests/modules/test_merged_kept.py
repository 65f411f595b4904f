"""MergedMLP merges once per optimizer step: what it keeps is never stale, never copied or saved,
and changes no gradient.
"""

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_runtime import backends
from moe_runtime.modules import merged
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.activation import Activation
from tests.modules.test_merged import make
from tests.support import dist_merged
from tests.support.dist_launch import launch
from tests.support.oracle import assert_parity

BACKENDS = ("torch", "triton", "cpp")


@pytest.fixture
def merges(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the stacks that were merged, biases left out."""
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
    """The layer with every forward pass's merging in the graph: what it was before anything was
    kept.
    """
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


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "AdamW, one by one": lambda p: torch.optim.AdamW(
        p,
        lr=0.1,
        foreach=False,
    ),
    "AdamW, foreach": lambda p: torch.optim.AdamW(
        p,
        lr=0.1,
        foreach=True,
    ),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_merges_once_per_step_of_four_micro_batches(name, merges, backend):
    layer = make(bias=True)
    other = copy.deepcopy(layer)
    batches = torch.randn(3, 4, 5, 33)
    optimizer = OPTIMIZERS[name]([layer.mixing_logits])
    plain_optimizer = OPTIMIZERS[name]([other.mixing_logits])
    merges_in_place = "fused" in name and backend == "triton"
    expected = 0
    for step, batch in enumerate(batches):
        if step == 0 or not merges_in_place:
            expected += 2
        for x in batch:
            layer(x).square().sum().backward()
            # a fused optimizer counts no version: then the kernel finds out and writes in place
            assert len(merges) == expected
        optimizer.step()
        optimizer.zero_grad()
    for batch in batches:
        plain(other, batch).square().sum().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    torch.testing.assert_close(
        layer.mixing_logits,
        other.mixing_logits,
        rtol=1e-3,
        atol=1e-3,
    )
    with torch.no_grad():
        assert torch.equal(layer(x), plain(layer, x))


@torch.no_grad()
def test_the_kernel_leaves_the_kept_weights_alone_until_alpha_changes(monkeypatch, device):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    layer = make().to(device)
    x = torch.randn(3, 33, device=device)
    layer(x)
    weights = layer._mixture.weights
    for weight in weights.values():
        weight.fill_(7.0)
    layer(x)
    for weight in weights.values():
        assert (weight == 7).all()
    layer.mixing_logits.data[2] += 1e-6  # no version is counted
    assert torch.equal(layer(x), plain(layer, x))
    assert layer._mixture.weights is weights


def frozen():
    return make().requires_grad_(False)


def assign_all(layer):
    layer.load_state_dict(
        make().state_dict(),
        assign=True,
    )
    layer.experts.requires_grad_(False)


CHANGES = {
    "logits in place": lambda m: m.mixing_logits.detach().mul_(0.5),
    "logits written past autograd": lambda m: m.mixing_logits.data.mul_(0.5),
    "other logits": lambda m: setattr(m, "mixing_logits", make().mixing_logits),
    "an expert in place": lambda m: m.experts.down_proj.detach()[3].zero_(),
    "data of an expert": lambda m: setattr(
        m.experts.down_proj,
        "data",
        make().experts.down_proj,
    ),
    "another expert": lambda m: setattr(
        m.experts,
        "down_proj",
        frozen().experts.down_proj,
    ),
    "other experts": lambda m: setattr(m, "experts", make().experts),
    "load_state_dict": lambda m: m.load_state_dict(make().state_dict()),
    "load_state_dict, assign": assign_all,
    "shared_rate": lambda m: setattr(m, "shared_rate", 0.25),
    "half precision": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "half precision and back": lambda m: m.half().float(),
    "memory swapped": lambda m: torch.utils.swap_tensors(
        m.experts.down_proj, frozen().experts.down_proj
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_missed(name, backend):
    if (name, backend) == ("half precision", "cpp"):
        pytest.skip("cpp refuses float16")
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, merges, backend):
    layer = make(bias=True)
    x = torch.randn(5, 33)
    expected = gradients(plain, layer, x)
    del merges[:]
    y = x.clone().requires_grad_()
    out = checkpoint(layer, y, use_reentrant=reentrant)
    out.square().sum().backward()
    assert len(merges) == 2
    assert torch.equal(out, expected["out"])
    assert torch.equal(y.grad, expected["dx"])
    torch.testing.assert_close(
        layer.mixing_logits.grad,
        expected["da"],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16],
    ids=str,
)
def test_autocast_switched_on_and_off(dtype, backend):
    if (dtype, backend) == (torch.float16, "cpp"):
        pytest.skip("cpp refuses float16")
    layer = make(dtype=dtype)
    x = torch.randn(5, 33, dtype=dtype)
    for autocast in (False, True, True, False):
        with torch.autocast(
            "cpu",
            torch.bfloat16,
            enabled=autocast,
        ):
            assert torch.equal(
                layer(x),
                plain(layer, x),
            )
    assert layer._mixture.weights["down_proj"].dtype == dtype


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


def references(layer) -> list[weakref.ref]:
    """Weak references to the merged weights that the layer holds."""
    layer(torch.randn(5, 33))
    return [weakref.ref(weight) for weight in layer._mixture.weights.values()]


@pytest.mark.parametrize(
    "free",
    [
        lambda m: m.release(),
        lambda m: m.to("meta"),
        lambda m: m.bfloat16(),
    ],
    ids=["release", "meta", "cast"],
)
def test_memory_is_freed(free):
    layer = make()
    held = references(layer)
    free(layer)
    gc.collect()
    assert layer._mixture is None
    assert [ref() for ref in held] == [None] * 2


def test_there_is_one_kept_mixture_at_a_time(monkeypatch):
    """The old weights go before the new ones are made: the peak is one dense MLP more."""
    layer = make()
    held = references(layer)
    original = merged.merge_experts

    def watched(weight, alpha):
        assert [ref() for ref in held] == [None] * 2
        return original(weight, alpha)

    monkeypatch.setattr(merged, "merge_experts", watched)
    layer.mixing_logits.detach().normal_()
    layer(torch.randn(5, 33))


def test_experts_that_train_get_their_gradients_and_nothing_is_kept(backend):
    layer = make(bias=True)
    x = torch.randn(5, 33)
    layer(x)
    layer.experts.requires_grad_()
    leaves = list(layer.parameters())
    result = torch.autograd.grad(
        layer(x).square().sum(),
        leaves,
    )
    torch.testing.assert_close(
        result,
        torch.autograd.grad(
            plain(layer, x).square().sum(),
            leaves,
        ),
    )
    layer.experts.down_proj.data.mul_(2)
    assert torch.equal(layer(x), plain(layer, x))


def test_threads(backend):
    layer = make()
    batches = torch.randn(4, 6, 5, 33)

    def run(batch):
        return [gradients(MergedMLP.__call__, layer, x) for x in batch]

    # the interpreter knows one launch at a time
    if backend == "triton":
        workers = 1
    else:
        workers = 4
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(run, batches))
    for batch, found in zip(batches, results, strict=True):
        for x, result in zip(batch, found, strict=True):
            expected = gradients(plain, layer, x)
            assert torch.equal(
                result["out"],
                expected["out"],
            )
            assert torch.equal(
                result["dx"],
                expected["dx"],
            )
            torch.testing.assert_close(
                result["da"],
                expected["da"],
                rtol=1e-4,
                atol=1e-5,
            )


def test_data_parallel(tmp_path):
    launch(
        dist_merged.__file__,
        2,
        tmp_path,
        str(tmp_path),
    )
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name])
    torch.manual_seed(0)
    layer = make(bias=True)
    optimizer = torch.optim.AdamW(
        [layer.mixing_logits],
        lr=0.1,
    )
    for step in range(3):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            x = torch.randn(2, 5, 33)
            (plain(layer, x).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(
        first["mixing_logits"], layer.mixing_logits.detach(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    "is_counted",
    [False, True],
    ids=["past autograd", "in place"],
)
def test_an_older_graph_has_its_own_mixture(is_counted, backend):
    """A kernel merges in place after a write that autograd does not count; the dx of an older graph
    used the new weights.
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
    for _ in range(2):  # in both orders: each merges what it needs
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
