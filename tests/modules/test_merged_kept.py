"""MergedMLP merges once per optimizer step: what it keeps is never stale, never copied or saved,
and changes no gradient.
"""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_runtime import backends
from moe_runtime.modules import merged
from moe_runtime.ops.activation import Activation
from tests.modules.test_merged import make
from tests.support import dist_merged
from tests.support.dist_launch import launch
from tests.support.oracle import assert_parity

WHY_NOT = {
    name: backends.why_not(name, "merge_experts", torch.device("cpu"))
    for name in ("torch", "triton", "cpp")
}
CPU_BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name, why in WHY_NOT.items()
]


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


@pytest.fixture(params=CPU_BACKENDS)
def backend(request, monkeypatch) -> str:
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", request.param)
    return request.param


def plain(layer, x):
    """The layer with every forward pass's merging in the graph: what it was before anything was
    kept.
    """
    w = layer.merged_weights()
    up = layer.experts.up_name
    z = nn.functional.linear(x, w[up], w.get(f"{up}_bias"))
    h = Activation(layer.config.hidden_act, layer.config.gated).apply(z)
    return nn.functional.linear(h, w["down_proj"], w.get("down_proj_bias"))


def fresh(layer, x):
    with torch.no_grad():
        return plain(layer, x)


def gradients(f, layer, x):
    x = x.detach().requires_grad_()
    out = f(layer, x)
    da, dx = torch.autograd.grad(out.float().square().sum(), (layer.mixing_logits, x))
    return {"out": out.detach(), "da": da, "dx": dx}


@pytest.mark.parametrize(
    "variant", [{}, {"bias": True, "soup": True}, {"gated": False, "hidden_act": "gelu"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_merging_in_the_graph(dtype, variant, backend, tolerance):
    layer = make(**variant, dtype=dtype)
    x = torch.randn(7, 33, dtype=dtype)
    layer(x)
    got = gradients(type(layer).__call__, layer, x)
    want = gradients(plain, layer, x)
    assert torch.equal(got["out"], want["out"]) and torch.equal(got["dx"], want["dx"])
    wide = gradients(plain, copy.deepcopy(layer).double(), x.double())
    assert_parity(
        got, wide, {"out": tolerance[dtype], "dx": 3 * tolerance[dtype], "da": 5 * tolerance[dtype]}
    )


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_merges_once_per_step_of_four_micro_batches(name, merges, backend):
    layer = make(bias=True)
    xs = torch.randn(3, 4, 5, 33)
    other = copy.deepcopy(layer)
    optimizer = OPTIMIZERS[name](layer.parameters())
    for step, batch in enumerate(xs):
        for x in batch:
            layer(x).square().sum().backward()
            # a fused optimizer counts no version: then the kernel finds out and writes in place
            assert len(merges) == 2 * (1 if "fused" in name and backend == "triton" else step + 1)
        optimizer.step()
        optimizer.zero_grad()
    optimizer = OPTIMIZERS[name](other.parameters())
    for batch in xs:
        sum(plain(other, x).square().sum() for x in batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(layer.mixing_logits, other.mixing_logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(layer(xs[0, 0]), fresh(layer, xs[0, 0]))


def test_the_kernel_leaves_the_kept_weights_alone_until_alpha_changes(monkeypatch, device):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    layer = make().to(device)
    x = torch.randn(3, 33, device=device)
    layer(x)
    kept = layer._mixture.weights
    for weight in kept.values():
        weight.fill_(7.0)
    layer(x)
    assert all((weight == 7).all() for weight in kept.values())
    layer.mixing_logits.data[2] += 1e-6  # no version is counted
    assert torch.equal(layer(x), fresh(layer, x)) and layer._mixture.weights is kept


CHANGES = {
    "logits in place": lambda m: m.mixing_logits.detach().mul_(0.5),
    "logits written past autograd": lambda m: m.mixing_logits.data.mul_(0.5),
    "other logits": lambda m: setattr(
        m, "mixing_logits", nn.Parameter(m.mixing_logits.detach() * 0.5)
    ),
    "an expert in place": lambda m: m.experts.down_proj.detach()[3].zero_(),
    "data of an expert": lambda m: setattr(
        m.experts.down_proj, "data", 2 * m.experts.down_proj.data
    ),
    "another expert": lambda m: setattr(
        m.experts, "down_proj", make().requires_grad_(False).experts.down_proj
    ),
    "other experts": lambda m: setattr(m, "experts", make().experts),
    "load_state_dict": lambda m: m.load_state_dict(make().state_dict()),
    "load_state_dict, assign": lambda m: (
        m.load_state_dict(make().state_dict(), assign=True).__class__
        and m.experts.requires_grad_(False)
    ),
    "shared_rate": lambda m: setattr(m, "shared_rate", 0.25),
    "half precision": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "half precision and back": lambda m: m.half().float(),
    "memory swapped": lambda m: torch.utils.swap_tensors(
        m.experts.down_proj, make().requires_grad_(False).experts.down_proj
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
    assert torch.equal(after, fresh(layer, x)) and not torch.equal(after.float(), before)
    assert torch.equal(layer(x), after)


def test_a_graph_outlives_the_step_that_changes_the_logits(backend):
    layer = make()
    x = torch.randn(5, 33)
    want = gradients(plain, layer, x)
    y = x.detach().requires_grad_()
    out = layer(y)
    with torch.no_grad():
        layer.mixing_logits.add_(torch.randn(7))
    layer(x)
    da, dx = torch.autograd.grad(out.square().sum(), (layer.mixing_logits, y))
    assert torch.equal(dx, want["dx"])
    torch.testing.assert_close(da, want["da"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, merges, backend):
    layer = make(bias=True)
    x = torch.randn(5, 33)
    want = gradients(plain, layer, x)
    del merges[:]
    if not reentrant:
        got = gradients(lambda m, x: checkpoint(m, x, use_reentrant=reentrant), layer, x)
    else:
        got = None
    if reentrant:  # which wants backward(), not grad()
        y = x.detach().requires_grad_()
        out = checkpoint(layer, y, use_reentrant=True)
        out.square().sum().backward()
        got = {"out": out.detach(), "da": layer.mixing_logits.grad, "dx": y.grad}
    assert (
        len(merges) == 2
        and torch.equal(got["out"], want["out"])
        and torch.equal(got["dx"], want["dx"])
    )
    torch.testing.assert_close(got["da"], want["da"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_switched_on_and_off(dtype, merges, backend):
    if (dtype, backend) == (torch.float16, "cpp"):
        pytest.skip("cpp refuses float16")
    layer = make(dtype=dtype)
    x = torch.randn(5, 33, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = plain(layer, x)
    for autocast in (False, True, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(layer(x), narrow if autocast else plain(layer, x))
    assert layer._mixture.weights["down_proj"].dtype == dtype


def test_is_in_no_copy_pickle_or_state_dict():
    layer = make()
    x = torch.randn(5, 33)
    size = len(pickle.dumps(layer))
    keys = list(layer.state_dict())
    out = layer(x)
    assert list(layer.state_dict()) == keys and len(list(layer.buffers())) == 0
    assert len(pickle.dumps(layer)) == size
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(layer), copy.copy(layer), torch.load(file, weights_only=False)):
        assert other._mixture is None and layer._mixture is not None
        assert torch.equal(other(x), out) and other._mixture.weights is not layer._mixture.weights


@pytest.mark.parametrize(
    "free",
    [lambda m: m.release(), lambda m: m.to("meta"), lambda m: m.bfloat16()],
    ids=["release", "meta", "cast"],
)
def test_memory_is_freed(free):
    layer = make()
    layer(torch.randn(5, 33))
    kept = [weakref.ref(weight) for weight in layer._mixture.weights.values()]
    free(layer)
    gc.collect()
    assert layer._mixture is None and not any(ref() is not None for ref in kept)


def test_there_is_one_kept_mixture_at_a_time(monkeypatch):
    """The old weights go before the new ones are made: the peak is one dense MLP more."""
    layer = make()
    x = torch.randn(5, 33)
    layer(x)
    kept = [weakref.ref(weight) for weight in layer._mixture.weights.values()]
    original = merged.merge_experts

    def watched(weight, alpha):
        assert not any(ref() is not None for ref in kept)
        return original(weight, alpha)

    monkeypatch.setattr(merged, "merge_experts", watched)
    with torch.no_grad():
        layer.mixing_logits.normal_()
    layer(x)


def test_experts_that_train_get_their_gradients_and_nothing_is_kept(backend):
    layer = make(bias=True)
    x = torch.randn(5, 33)
    layer(x)
    layer.experts.requires_grad_()
    leaves = list(layer.parameters())
    got = torch.autograd.grad(layer(x).square().sum(), leaves)
    want = torch.autograd.grad(plain(layer, x).square().sum(), leaves)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        layer.experts.down_proj.data.mul_(2)
        assert torch.equal(layer(x), plain(layer, x))


def test_threads(merges, backend):
    layer = make()
    xs = torch.randn(4, 6, 5, 33)
    found = {}
    want = [gradients(plain, layer, x) for x in xs.flatten(0, 1)]

    def work(i):
        torch.manual_seed(i)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            found[i] = [gradients(type(layer).__call__, layer, x) for x in xs[i]]

    if backend == "triton":  # the interpreter knows one launch at a time
        for i in range(4):
            work(i)
    else:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for got, wanted in zip((g for i in range(4) for g in found[i]), want):
        assert torch.equal(got["out"], wanted["out"]) and torch.equal(got["dx"], wanted["dx"])
        torch.testing.assert_close(got["da"], wanted["da"], rtol=1e-4, atol=1e-5)


def test_data_parallel(tmp_path):
    launch(dist_merged.__file__, 2, tmp_path, str(tmp_path))
    a, b = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    torch.manual_seed(0)
    layer = make(bias=True)
    optimizer = torch.optim.AdamW([layer.mixing_logits], lr=0.1)
    for step in range(3):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            (sum(plain(layer, x).square().sum() for x in torch.randn(2, 5, 33)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(
        a["mixing_logits"], layer.mixing_logits.detach(), rtol=1e-3, atol=1e-3
    )


def test_an_older_graph_has_its_own_mixture(backend):
    """A kernel merges in place after a write that autograd does not count; the dx of an older graph
    used the new weights.
    """
    layer = make()
    older, newer = leaves = [torch.randn(5, 33, requires_grad=True) for _ in range(2)]
    wanted = [torch.autograd.grad(plain(layer, older).sum(), (older, layer.mixing_logits))]
    out = [layer(older)]
    layer.mixing_logits.data.copy_(torch.randn_like(layer.mixing_logits))
    wanted.append(torch.autograd.grad(plain(layer, newer).sum(), (newer, layer.mixing_logits)))
    out.append(layer(newer))
    for _ in range(2):  # in both orders: each merges what it needs
        for x, y, grads in zip(leaves, out, wanted):
            torch.testing.assert_close(
                torch.autograd.grad(y.sum(), (x, layer.mixing_logits), retain_graph=True), grads
            )
    torch.testing.assert_close(layer(newer), out[1])
