"""Every stock MoE family of the installed transformers: our experts against its eager loop on the
same tiny model.
"""

import contextlib
import copy
from types import NoneType

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

import moe_runtime
from moe_runtime.hf.dropin import experts
from tests.hf import stock, tiny
from tests.hf.tiny import distance

# families that sample during generation: float32 noise changes the draws, also with transformers'
# own implementations
DRAWS = ("diffusion_gemma",)
# families whose loop computes in float32 whatever the dtype of the weights; ours and batched_mm
# compute in that dtype
FLOAT32_LOOPS = ("openai_privacy_filter",)


@pytest.fixture(scope="module", params=stock.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    moe_runtime.register()
    return stock.build(family)


@pytest.fixture(scope="module")
def logits(model):
    """Return the model's logits with transformers' own loop."""
    with torch.no_grad():
        return stock.run(model, "eager").logits


@contextlib.contextmanager
def hooked(modules, hook):
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def called():
    """The experts modules that our function is called for, in order."""
    modules = []

    def counted(self, *args):
        modules.append(self)
        return experts.experts_forward(self, *args)

    ExpertsInterface.register("moe_runtime", counted)
    try:
        yield modules
    finally:
        moe_runtime.register()


def shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return [shapes(part) for part in value]
    return type(value).__name__


@torch.no_grad()
def test_logits_calls_and_hooks(model, logits):
    inside = {
        id(part)
        for module in stock.experts_of(model).values()
        for part in module.modules()
        if part is not module
    }
    watched = {module: name for name, module in model.named_modules() if id(module) not in inside}
    seen = {"eager": [], "moe_runtime": []}
    for implementation, log in seen.items():
        with (
            called() as modules,
            hooked(
                watched,
                lambda module, _, output, log=log: log.append((watched[module], shapes(output))),
            ),
        ):
            got = stock.run(model, implementation).logits

    assert distance(got, logits) < 2e-6
    assert seen["moe_runtime"] == seen["eager"]  # including the router's and the experts'
    names = [watched[module] for module in modules]
    assert names
    assert names == [name for name, _ in seen["eager"] if name in stock.experts_of(model)]


def gradients(model, implementation: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = stock.run(model, implementation).logits
    (
        out
        * torch.randn(
            out.shape,
            generator=torch.Generator().manual_seed(3),
        )
    ).sum().backward()
    return tiny.gradients(model)


def test_gradients(model):
    expected = gradients(model, "eager")
    got = gradients(model, "moe_runtime")
    assert got.keys() == expected.keys()

    assert any(got[name].norm() > 0 for name in got if "embed" in name)
    noise = 1e-7 * torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        assert (got[name] - value).norm() < 1e-5 * value.norm() + noise, name
    used = {prefix for prefix in stock.experts_of(model) if f"{prefix}.down_proj" in expected}
    assert used
    for prefix in used:  # those of the experts and of the router next to them
        layer = prefix.rpartition(".")[0]
        routers = [
            name
            for name in expected
            if name.startswith(layer) and ("gate.w" in name or "router" in name)
        ]
        assert routers, routers
        assert all(expected[name].norm() > noise for name in [f"{prefix}.down_proj", *routers]), (
            routers
        )


@torch.no_grad()
def test_generate(family, model):
    if not model.can_generate():
        with pytest.raises(Exception, match="generat"):
            model.generate(**stock.batch(), max_new_tokens=1)
        return
    model = copy.deepcopy(model).double() if family in DRAWS else model
    tokens = []
    for implementation in ("eager", "moe_runtime"):
        model.set_experts_implementation(implementation)
        torch.manual_seed(0)
        with called() as modules:
            out = model.generate(
                **stock.batch(), max_new_tokens=4, min_new_tokens=4, do_sample=False
            )
        tokens.append(getattr(out, "sequences", out))

    assert torch.equal(*tokens)
    assert tokens[0].shape[1] >= 16
    assert modules


@torch.no_grad()
def test_router_logits_and_auxiliary_loss(family, model):
    labels = stock.batch()["input_ids"]
    labels = labels % 2 if "TokenClassification" in type(model).__name__ else labels
    # Granite in transformers 5.17 does not collect its router logits: its auxiliary loss is the int
    # 0, which breaks the sum of losses
    whole = isinstance(
        stock.run(model, "eager", output_router_logits=True).get("aux_loss"),
        (torch.Tensor, NoneType),
    )
    labels = {"labels": labels} if whole and family not in DRAWS else {}
    expected = stock.run(model, "eager", output_router_logits=True, **labels)
    got = stock.run(model, "moe_runtime", output_router_logits=True, **labels)

    assert got.keys() == expected.keys()
    losses = [key for key in ("loss", "aux_loss") if isinstance(expected.get(key), torch.Tensor)]
    for key in losses:
        assert expected[key] > 0
        assert distance(got[key], expected[key]) < 2e-6
    assert "loss" in losses or not labels
    for ours, theirs in zip(
        got.get("router_logits") or (), expected.get("router_logits") or (), strict=True
    ):
        assert theirs.numel()
        assert distance(ours, theirs) < 2e-6


def first_calls(model) -> list[tuple[nn.Module, tuple]]:
    """Each experts module that runs, with the arguments of its first call."""
    calls = {}

    def keep(module, args, _):
        calls.setdefault(module, tuple(arg.detach() for arg in args))

    with hooked(stock.experts_of(model).values(), keep), torch.no_grad():
        stock.run(model, "eager")
    return list(calls.items())


def apply(module, implementation: str, *args) -> torch.Tensor:
    module.config._experts_implementation = implementation
    return module(*args)


@torch.no_grad()
def test_error_in_bfloat16(family, model):
    """Compares with the same bfloat16 weights and inputs in float64."""
    peer = "batched_mm" if family in FLOAT32_LOOPS else "eager"
    for module, (x, idx, weight) in first_calls(model):
        module = copy.deepcopy(module).bfloat16()
        x = x.bfloat16()
        expected = apply(
            copy.deepcopy(module).double(),
            "eager",
            x.double(),
            idx,
            weight.double(),
        )
        theirs, ours = (apply(module, name, x, idx, weight) for name in (peer, "moe_runtime"))
        assert ours.dtype == torch.bfloat16
        assert 0 < distance(ours, expected) < 1.5 * distance(theirs, expected) < 0.05
