"""PEFT's LoRA on expert stacks in our op against PEFT's own: values, gradients, states, files,
refusals, every family.
"""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

import moe_runtime
from moe_runtime import MoEConfig
from moe_runtime.hf.dropin import adapters
from moe_runtime.hf.dropin.adapters import adapted_stacks
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.frozen_mlp import frozen_mlp
from tests.hf import stock as families
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support.stock_moe import batch, stock

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(family="qwen3_moe", r=3, targets=TARGETS, dtype=torch.float64, sizes=None, **options):
    """A tiny model with adapters that change its output; transformers' loop runs its experts."""
    sizes = {"num_hidden_layers": 1} | (sizes or {})
    model = stock(family, **sizes).to(dtype)
    model.set_experts_implementation("eager")
    config = LoraConfig(
        r=r, lora_alpha=7, target_parameters=targets, init_lora_weights=False, **options
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def wrapper_of(model) -> ParamWrapper:
    return next(module for module in model.modules() if isinstance(module, ParamWrapper))


def inputs(model, tokens=30, pool=None):
    """Tokens of a layer of size 32, two experts per token among the first `pool`, and their
    weights.
    """
    wrapper = wrapper_of(model)
    dtype = next(wrapper.parameters()).dtype
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 32, dtype=dtype, generator=generator)
    E = pool or wrapper.num_experts
    idx = torch.rand(tokens, E, generator=generator).topk(min(2, E)).indices
    weight = torch.rand(idx.shape, dtype=dtype, generator=generator)
    return x, idx, weight


def results(model, pool=None) -> list[torch.Tensor]:
    """Return the output of the outermost wrapper, and the gradients of x, the weights and all
    trainable parameters.
    """
    wrapper = wrapper_of(model)
    x, idx, weight = inputs(model, pool=pool)
    leaves = [
        x.requires_grad_(),
        weight.requires_grad_(),
        *tiny.trained(wrapper),
    ]
    out = wrapper(x, idx, weight)
    loss = (out * torch.linspace(-1, 1, 32, dtype=x.dtype)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    # a merged adapter has no gradient
    return [out, *(grad for grad in grads if grad is not None)]


def worst(got, want) -> float:
    return max(distance(g, w) for g, w in zip(got, want, strict=True))


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of our op."""
    from moe_runtime.modules import moe

    seen = []
    monkeypatch.setattr(
        moe,
        "frozen_mlp",
        lambda *args: seen.append(args[1]) or frozen_mlp(*args),
    )
    return seen


FORMS = [
    pytest.param("qwen3_moe", 8, {}, {}, id="r = E"),
    pytest.param(
        "qwen3_moe", 16, {"moe_intermediate_size": 8}, {"use_rslora": True}, id="2I < H, rsLoRA"
    ),
    pytest.param("qwen3_moe", 3, {"num_experts": 1, "num_experts_per_tok": 1}, {}, id="E = 1"),
    pytest.param("gpt_oss", 3, {"intermediate_size": 32}, {}, id="GPT-OSS: I = H"),
]


@pytest.mark.parametrize("family, r, sizes, options", FORMS)
def test_equals_peft_in_float64(family, r, sizes, options, calls):
    """Compares the output and every gradient; in some cases an expert gets no tokens."""
    model = adapted(family, r, sizes=sizes, **options)
    pools = {None, max(1, wrapper_of(model).num_experts - 1)}
    expected = {pool: results(model, pool) for pool in pools}

    assert moe_runtime.patch(model) == 1
    for pool, values in expected.items():
        assert worst(results(model, pool), values) < 1e-14
    assert len(calls) == len(pools)
    moe_runtime.unpatch(model)
    assert worst(results(model), expected[None]) == 0  # PEFT's own implementation again
    assert len(calls) == len(pools)


def test_states(calls):
    """Disabled, several adapters at the same time, merged (one stack of two, then both), unmerged,
    deleted, added after `patch`.
    """
    model = adapted()
    moe_runtime.patch(model)
    model.add_adapter(
        "second",
        LoraConfig(r=5, target_parameters=TARGETS, init_lora_weights=False),
    )
    stock_model = copy.deepcopy(model)
    moe_runtime.unpatch(stock_model)
    both = (model, stock_model)

    assert len(calls) == 0

    def same(bound=1e-13) -> torch.Tensor:
        mine, theirs = map(results, both)
        assert worst(mine, theirs) < bound
        return mine[0]

    def same_output() -> None:
        mine, theirs = (wrapper_of(one)(*inputs(one)) for one in both)
        assert distance(mine, theirs) < 1e-14

    first = same()
    assert len(calls) == 1
    for one in both:
        one.base_model.set_adapter(["default", "second"])
    assert distance(same(), first) > 0.1
    with model.disable_adapter(), stock_model.disable_adapter():
        same_output()
    for one in both:
        one.base_model.set_adapter("default")
        wrapper_of(one).merge()  # the outer one, down; up's adapter is still separate
    same()
    for one in both:
        wrapper_of(one).base_layer.merge()
    same_output()
    for one in both:
        one.unmerge_adapter()
        one.delete_adapter("second")
    assert distance(same(1e-12), first) < 1e-12
    assert (
        distance(
            model.merge_and_unload()(**ids()).logits,
            stock_model(**ids()).logits,
        )
        < 1e-6
    )


def ids() -> dict:
    return {"input_ids": batch()["input_ids"]}


@pytest.mark.parametrize(
    "targets, count",
    [(TARGETS[:1], 2), (TARGETS[1:], 2), ([*TARGETS, "gate.weight"], 6)],
    ids=["up only", "down only", "with the router"],
)
def test_targets(targets, count, calls):
    model = adapted(targets=targets, dtype=torch.float32)
    outputs = []
    for patched in (False, True):
        if patched:
            moe_runtime.patch(model)
        model.zero_grad()
        out = model(**batch())
        out.loss.backward()
        outputs.append((out.logits, tiny.gradients(model)))
    (logits, expected), (same_logits, grads) = outputs

    assert len(expected) == count
    assert distance(same_logits, logits) < 1e-6
    assert len(calls) == 1
    tiny.assert_close(grads, expected, 1e-4)


@pytest.mark.parametrize("what", ["experts' biases", "a stack that trains"])
def test_what_goes_through_pefts_own(what, calls):
    """PEFT handles two-dimensional parameters; a stack that itself trains gets its gradient through
    W + s B A.
    """
    biases = what == "experts' biases"
    if biases:
        targets = [
            *TARGETS,
            "experts.gate_up_proj_bias",
            "experts.down_proj_bias",
        ]
    else:
        targets = TARGETS
    model = adapted("gpt_oss", targets=targets)
    if not biases:
        wrapper_of(model).get_base_layer().down_proj.requires_grad_(True)
    want = results(model)
    moe_runtime.patch(model)
    got = results(model)

    assert len(got) == (11 if biases else 8)
    assert worst(got, want) < 1e-13
    assert len(calls) == (1 if biases else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_stacks_and_autocast(dtype, calls):
    """bfloat16 with float32 adapters, PEFT's default, and float32 stacks under autocast, both
    against float64.
    """
    exact = adapted()
    model = copy.deepcopy(exact).to(dtype)
    for name, p in model.named_parameters():
        if "lora" in name:
            p.data = p.data.float()
    moe_runtime.patch(model)
    x, idx, weight = inputs(exact)
    with torch.autocast(
        "cpu",
        torch.bfloat16,
        enabled=dtype == torch.float32,
    ):
        out = wrapper_of(model)(x.to(dtype), idx, weight.float())
    out.float().sum().backward()
    expected = wrapper_of(exact)(x, idx, weight)
    expected.sum().backward()

    assert distance(out, expected) < 2e-2
    assert out.dtype == dtype
    grads = tiny.gradients(model)
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    tiny.assert_close(grads, tiny.gradients(exact), 2e-2)
    assert calls[0].up.data.dtype == dtype  # the whole stack is not converted
    assert calls[0].up_lora.a.dtype == torch.bfloat16


def test_files_are_pefts_and_reload(tmp_path):
    """Files are byte-identical to those of the same model on transformers' own implementation; they
    can be loaded, merged and loaded again.
    """
    model = adapted(dtype=torch.float32)
    model.save_pretrained(tmp_path / "stock")
    moe_runtime.patch(model)
    logits = model(**ids()).logits
    model.save_pretrained(tmp_path / "ours")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    for implementation in ("eager", "moe_runtime"):
        base = stock(num_hidden_layers=1)
        base.set_experts_implementation(implementation)
        again = PeftModel.from_pretrained(base, tmp_path / "ours").train()
        assert distance(again(**ids()).logits, logits) < 1e-6
        again.merge_and_unload().save_pretrained(tmp_path / implementation)
        merged = type(base).from_pretrained(
            tmp_path / implementation, experts_implementation=implementation
        )
        assert distance(merged.train()(**ids()).logits, logits) < 1e-5
        base = stock(num_hidden_layers=1)
        base.set_experts_implementation(implementation)
        base.load_adapter(str(tmp_path / "ours"))  # transformers' own way
        assert distance(base(**ids()).logits, logits) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, calls):
    gradients = []
    for checkpointing in (False, True):
        model = adapted(dtype=torch.float32)
        moe_runtime.patch(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**batch()).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(calls) == 3

    assert worst(*gradients) < 1e-6


def test_our_own_layers(calls):
    """A MoE of this package is adapted like a stock one."""
    config = MoEConfig(
        hidden_size=32,
        intermediate_size=24,
        num_experts=8,
        top_k=2,
        gate="softmax_topk",
    )
    layer = torch.nn.ModuleDict({"mlp": MoE(config).double()})
    options = LoraConfig(
        r=3,
        target_parameters=TARGETS,
        init_lora_weights=False,
    )
    model = get_peft_model(layer, options, autocast_adapter_dtype=False)
    expected = results(model)
    adapters.install()

    assert worst(results(model), expected) < 1e-14
    assert len(calls) >= 1


def test_the_hook_is_there():
    """Fails rather than skips if PEFT no longer has what the hook replaces."""
    assert adapters.install()
    assert hasattr(ParamWrapper._activate_lora, "moe_runtime_stock")
    before = ParamWrapper._activate_lora
    adapters.install()
    assert ParamWrapper._activate_lora is before


SQUARE = {"moe_intermediate_size": 16}  # for gate_up, PEFT loads what 0.19 wrote, and transposes it


def test_refusals():
    model = adapted(layer_replication=[[0, 1], [0, 1]])
    with pytest.raises(ValueError, match="layer_replication .* configs"):
        moe_runtime.patch(model)
    model = adapted(sizes=SQUARE)
    for version in ("0.18.1", "0.19.1"):
        model.peft_config["default"].peft_version = version
        with pytest.raises(
            ValueError,
            match=f"PEFT {version}, .* gate_up_proj of .* transposed",
        ):
            moe_runtime.patch(model)
    one = {"num_local_experts": 1, "num_experts": 1, "num_experts_per_tok": 1}
    one |= {"intermediate_size": 32}
    model = adapted("gpt_oss", sizes=one, targets=TARGETS[1:])
    moe_runtime.patch(model)
    with pytest.raises(ValueError, match="one transposed expert"):
        wrapper_of(model)(*inputs(model))


def test_adapted_layers_are_reported():
    model = adapted(sizes={"num_hidden_layers": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moe_runtime.patch(model) == 2
    path = "base_model.model.model.layers.{}.mlp.experts"

    assert adapted_stacks(model) == {
        path.format(layer): {
            "down_proj": ["default"],
            "gate_up_proj": ["default"],
        }
        for layer in range(2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_trains_its_adapters(family):
    """The gradients equal PEFT's; after one step every adapter that gets a gradient from PEFT has
    changed.
    """
    model = families.build(family)
    modules = families.experts_of(model)
    targets = set()
    for name, module in modules.items():
        for stack in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            targets.add(f"{name.rpartition('.')[2]}.{stack}")
    config = LoraConfig(
        r=3,
        target_parameters=sorted(targets),
        init_lora_weights=False,
    )
    model = get_peft_model(model, config).eval()

    assert sum(map(len, adapted_stacks(model).values())) == 2 * len(modules)

    def step():
        model.zero_grad()
        torch.manual_seed(0)
        out = model(**families.batch()).logits
        out.float().square().mean().backward()
        return out.detach(), tiny.gradients(model)

    expected_logits, expected = step()
    moe_runtime.patch(model)
    logits, grads = step()
    assert distance(logits, expected_logits) < 2e-6
    assert grads.keys() == expected.keys()
    tiny.assert_close(grads, expected, 0.0001)
    before = tiny.weights(model)
    torch.optim.SGD(tiny.trained(model), lr=1.0).step()
    live = [name for name, gradient in expected.items() if gradient.norm() > 0]
    assert live
    for name in live:
        assert not torch.equal(model.get_parameter(name), before[name]), name
