"""PEFT's LoRA on expert stacks in our op against PEFT's own: values, gradients, states, files,
refusals, every family.
"""

import copy
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

import moe_runtime
from moe_runtime.hf.dropin import adapters
from moe_runtime.hf.dropin.adapters import adapted_stacks
from moe_runtime.modules import frozen
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.frozen_mlp import frozen_mlp
from tests.hf import stock as families
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support.stock_moe import batch, stock

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(family="qwen3_moe", r=3, targets=TARGETS, dtype=torch.float64, sizes=None, **options):
    """A tiny model with adapters that change what it says; its experts run by transformers'
    loop.
    """
    sizes = {"num_hidden_layers": 1} | (sizes or {})
    model = stock(family, **sizes).to(dtype)
    model.set_experts_implementation("eager")
    config = LoraConfig(
        r=r, lora_alpha=7, target_parameters=targets, init_lora_weights=False, **options
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def wrapper_of(model) -> ParamWrapper:
    return next(module for module in model.modules() if isinstance(module, ParamWrapper))


def results(model, tokens=30, pool=None) -> list[torch.Tensor]:
    """What the outermost wrapper returns, and the gradients of x, the weights and all that
    trains.
    """
    wrapper = wrapper_of(model)
    E = wrapper.num_experts
    dtype = next(wrapper.parameters()).dtype
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 32, dtype=dtype, generator=generator).requires_grad_()
    K = min(2, E)
    idx = torch.stack([torch.randperm(pool or E, generator=generator)[:K] for _ in range(tokens)])
    weight = torch.rand(tokens, K, dtype=dtype, generator=generator).requires_grad_()
    out = wrapper(x, idx, weight)
    learned = tiny.trained(wrapper)
    loss = (out * torch.linspace(-1, 1, 32, dtype=dtype)).sum()
    # a merged adapter gets none
    grads = torch.autograd.grad(loss, [x, weight, *learned], allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


def worst(got, want) -> float:
    return max(distance(g, w) for g, w in zip(got, want, strict=True))


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of our op."""
    from moe_runtime.modules import moe

    seen = []
    monkeypatch.setattr(moe, "frozen_mlp", lambda *args: seen.append(args[1]) or frozen_mlp(*args))
    return seen


FORMS = [
    pytest.param("qwen3_moe", 1, {}, {}, id="r = 1"),
    pytest.param("qwen3_moe", 3, {}, {}, id="r = 3"),
    pytest.param("qwen3_moe", 8, {}, {}, id="r = E"),
    pytest.param(
        "qwen3_moe", 16, {"moe_intermediate_size": 8}, {"use_rslora": True}, id="2I < H, rsLoRA"
    ),
    pytest.param("qwen3_moe", 40, {"moe_intermediate_size": 16}, {}, id="2I = H, r > in"),
    pytest.param(
        "qwen3_moe", 4, {"moe_intermediate_size": 32, "num_experts": 4}, {}, id="I = H, r = E"
    ),
    pytest.param("qwen3_moe", 3, {"num_experts": 1, "num_experts_per_tok": 1}, {}, id="E = 1"),
    pytest.param("gpt_oss", 3, {}, {}, id="GPT-OSS: biases, transposed"),
    pytest.param("gpt_oss", 8, {"intermediate_size": 16}, {}, id="GPT-OSS: 2I = H, r = E"),
    pytest.param("gpt_oss", 3, {"intermediate_size": 32}, {}, id="GPT-OSS: I = H"),
]


@pytest.mark.parametrize("family, r, sizes, options", FORMS)
def test_equals_peft_in_float64(family, r, sizes, options, calls):
    """Forward and every gradient; with an expert without tokens too."""
    model = adapted(family, r, sizes=sizes, **options)
    one = wrapper_of(model).num_experts == 1
    pools = (None,) if one else (None, wrapper_of(model).num_experts - 1)
    want = [results(model, pool=pool) for pool in pools]
    assert moe_runtime.patch(model) == 1
    for pool, values in zip(pools, want):
        assert worst(results(model, pool=pool), values) < 1e-14
    assert len(calls) == len(pools)
    moe_runtime.unpatch(model)
    assert worst(results(model), want[0]) == 0 and len(calls) == len(pools)  # PEFT's own again


def test_a_reader_that_takes_b_for_expert_slowest_is_caught(monkeypatch):
    model = adapted(r=3)
    want = results(model)
    moe_runtime.patch(model)
    right = frozen.pair_of

    def wrong(factors, E, *rest):
        turned = []
        for f in factors:
            turned.append(
                f._replace(b=f.b.view(-1, E, f.b.shape[1] // E).transpose(1, 2).reshape(f.b.shape))
            )
        return right(turned, E, *rest)

    monkeypatch.setattr(frozen, "pair_of", wrong)
    assert worst(results(model)[:1], want[:1]) > 0.1
    # and the delta is PEFT's, expert by expert
    wrapper = wrapper_of(model)
    (a, b), s = (
        (half["default"].weight for half in (wrapper.lora_A, wrapper.lora_B)),
        wrapper.scaling["default"],
    )
    pair = right([frozen.Factors(a, b, s, 8)], 8, torch.float64)
    delta = torch.einsum("ero,eri->eoi", pair.b, pair.a)
    assert distance(delta, wrapper.get_delta_weight("default")) < 1e-15


def test_states(calls):
    """Disabled, several adapters at once, merged (one stack of two, then both), unmerged, deleted,
    added after `patch`.
    """
    model = adapted()
    moe_runtime.patch(model)
    model.add_adapter("second", LoraConfig(r=5, target_parameters=TARGETS, init_lora_weights=False))
    stock_model = copy.deepcopy(model)
    moe_runtime.unpatch(stock_model)
    assert len(calls) == 0

    def same(bound=1e-13) -> list[torch.Tensor]:
        got = results(model)
        want = results(stock_model)
        assert worst(got, want) < bound
        return got

    first = same()[0]
    assert len(calls) == 1
    for one in (model, stock_model):
        one.base_model.set_adapter(["default", "second"])
    both = same()[0]
    assert distance(both, first) > 0.1
    with model.disable_adapter(), stock_model.disable_adapter():
        assert (
            distance(
                wrapper_of(model)(*inputs(model)), wrapper_of(stock_model)(*inputs(stock_model))
            )
            < 1e-14
        )
    for one in (model, stock_model):
        one.base_model.set_adapter("default")
        wrapper_of(one).merge()  # the outer one: down; up's adapter stays apart
    same()
    for one in (model, stock_model):
        wrapper_of(one).base_layer.merge()
    merged = wrapper_of(model)(*inputs(model))
    assert distance(merged, wrapper_of(stock_model)(*inputs(stock_model))) < 1e-14
    for one in (model, stock_model):
        one.unmerge_adapter()
        one.delete_adapter("second")
    again = same(1e-12)[0]
    assert distance(again, first) < 1e-12
    assert distance(model.merge_and_unload()(**ids()).logits, stock_model(**ids()).logits) < 1e-6


def inputs(model):
    dtype = next(wrapper_of(model).parameters()).dtype
    generator = torch.Generator().manual_seed(5)
    idx = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)])
    return torch.randn(9, 32, dtype=dtype, generator=generator), idx, torch.ones(9, 2, dtype=dtype)


def ids() -> dict:
    return {"input_ids": batch()["input_ids"]}


@pytest.mark.parametrize(
    "targets, grads",
    [(TARGETS[:1], 2), (TARGETS[1:], 2), ([*TARGETS, "gate.weight"], 6)],
    ids=["up alone", "down alone", "and the router"],
)
def test_targets(targets, grads, calls):
    model = adapted(targets=targets, sizes={"num_hidden_layers": 1}, dtype=torch.float32)
    want = model(**batch())
    want.loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert len(wanted) == grads
    model.zero_grad()
    moe_runtime.patch(model)
    got = model(**batch())
    got.loss.backward()
    assert distance(got.logits, want.logits) < 1e-6
    assert len(calls) == 1
    for name, value in wanted.items():
        assert distance(model.get_parameter(name).grad, value) < 1e-4, name


@pytest.mark.parametrize("what", ["experts' biases", "a stack that trains"])
def test_what_goes_through_pefts_own(what, calls):
    """Two-dimensional parameters stay PEFT's matter; a stack that itself trains gets its gradient
    through W + s B A.
    """
    biases = what == "experts' biases"
    if biases:
        targets = [*TARGETS, "experts.gate_up_proj_bias", "experts.down_proj_bias"]
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
    """bfloat16 with float32 adapters as PEFT keeps them, and float32 stacks under autocast: both
    judged by float64.
    """
    exact = adapted()
    want = results(exact)
    model = copy.deepcopy(exact).to(dtype)
    for name, p in model.named_parameters():
        p.data = p.data.float() if "lora" in name else p.data
    moe_runtime.patch(model)
    wrapper = wrapper_of(model)
    x, idx, weight = inputs(exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        out = wrapper(x.to(dtype), idx, weight.float())
    out.float().sum().backward()
    want = wrapper_of(exact)(x, idx, weight)
    want.sum().backward()
    assert distance(out, want) < 2e-2
    assert out.dtype == dtype
    for got, leaf in zip(wrapper.parameters(), wrapper_of(exact).parameters()):
        if leaf.requires_grad:
            assert got.grad.dtype == torch.float32
            assert distance(got.grad, leaf.grad) < 2e-2
    assert calls[0].up.data.dtype == dtype  # not converted as a whole
    assert calls[0].up_lora.a.dtype == torch.bfloat16


def test_files_are_pefts_and_reload(tmp_path):
    """Byte for byte those of the same model on transformers' own implementation; loaded, merged and
    loaded again alike.
    """
    model = adapted(dtype=torch.float32)
    model.save_pretrained(tmp_path / "stock")
    moe_runtime.patch(model)
    wanted = model(**ids()).logits
    model.save_pretrained(tmp_path / "ours")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    for implementation in ("eager", "moe_runtime"):
        base = stock(num_hidden_layers=1)
        base.set_experts_implementation(implementation)
        again = PeftModel.from_pretrained(base, tmp_path / "ours").train()
        assert distance(again(**ids()).logits, wanted) < 1e-6
        again.merge_and_unload().save_pretrained(tmp_path / implementation)
    merged = stock(num_hidden_layers=1)
    merged = (
        type(merged)
        .from_pretrained(tmp_path / "moe_runtime", experts_implementation="moe_runtime")
        .train()
    )
    assert distance(merged(**ids()).logits, wanted) < 1e-5


def test_adapters_that_transformers_loads(tmp_path, calls):
    adapted(dtype=torch.float32).save_pretrained(tmp_path)
    logits = []
    for implementation in ("eager", "moe_runtime"):
        model = stock(num_hidden_layers=1)
        model.set_experts_implementation(implementation)
        model.load_adapter(str(tmp_path))
        logits.append(model(**ids()).logits)
    assert distance(*logits) < 1e-6
    assert len(calls) == 1
    assert len(adapted_stacks(model)) == 1


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


@pytest.mark.slow
def test_compiles_into_one_graph():
    for family in ("qwen3_moe", "gpt_oss"):
        model = adapted(family, dtype=torch.float32)
        moe_runtime.patch(model)
        wrapper = wrapper_of(model)
        args = inputs(model)
        learned = tiny.trained(wrapper)
        compiled = torch.compile(wrapper, fullgraph=True)
        outs = [call(*args) for call in (wrapper, compiled)]
        assert (
            worst(*([out, *torch.autograd.grad(out.sin().sum(), learned)] for out in outs)) < 1e-6
        )
        with model.disable_adapter():
            assert distance(compiled(*args), wrapper(*args)) < 1e-6
        assert distance(compiled(*args), outs[0]) < 1e-6


def test_our_own_layers(calls):
    """A MoE of this package is adapted as a stock one."""
    from moe_runtime import MoEConfig

    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=32, intermediate_size=24, num_experts=8, top_k=2, gate="softmax_topk"
    )
    layer = torch.nn.ModuleDict({"mlp": MoE(config).double()})
    options = LoraConfig(r=3, target_parameters=TARGETS, init_lora_weights=False)
    model = get_peft_model(layer, options, autocast_adapter_dtype=False)
    want = results(model)
    adapters.install()
    assert worst(results(model), want) < 1e-14
    assert len(calls) >= 1


def test_the_hook_is_there():
    """Fails, and does not skip, where PEFT no longer has what the hook replaces."""
    assert adapters.install()
    assert hasattr(ParamWrapper._activate_lora, "moe_runtime_stock")
    before = ParamWrapper._activate_lora
    adapters.install()
    assert ParamWrapper._activate_lora is before
    assert {"get_base_layer", "forward", "get_delta_weight"} <= set(vars(ParamWrapper)) | set(
        dir(ParamWrapper)
    )


def test_the_hook_comes_with_a_peft_that_is_imported_later(monkeypatch):
    """After patch: the packages of a training script may be imported in any order."""
    package = sys.modules[adapters.LAYER.rpartition(".")[0]]
    before = list(sys.meta_path)
    monkeypatch.setattr(package, "layer", package.layer)
    monkeypatch.delitem(sys.modules, adapters.LAYER)
    assert not adapters.install()
    assert not adapters.install()
    later = importlib.import_module(adapters.LAYER)
    assert later.ParamWrapper is not ParamWrapper
    assert hasattr(later.ParamWrapper._activate_lora, "moe_runtime_stock")
    assert sys.meta_path == before


def test_factors_that_nobody_takes_are_an_error(monkeypatch):
    model = adapted()
    moe_runtime.patch(model)
    base = wrapper_of(model).get_base_layer()
    monkeypatch.setattr(type(base), "forward", lambda self, x, *_: x)
    with pytest.raises(RuntimeError, match="gate_up_proj was not used.*patch"):
        wrapper_of(model)(*inputs(model))
    assert frozen.ADAPTERS not in base.__dict__


def test_refusals_and_warnings():
    def said(match, error=UserWarning, **options):
        model = adapted(**options)
        if error is UserWarning:
            with pytest.warns(UserWarning, match=match):
                moe_runtime.patch(model)
        else:
            with pytest.raises(error, match=match):
                moe_runtime.patch(model)
        return model

    said("ignores layers_to_transform", layers_to_transform=[0], layers_pattern="layers")
    said("ignores use_qalora", use_qalora=True)
    said("bias='all' does not apply to experts", bias="all")
    said("layer_replication .* configs", ValueError, layer_replication=[[0, 1], [0, 1]])
    # gate_up is square: PEFT loads what 0.19 wrote, and transposes it
    model = adapted(sizes={"moe_intermediate_size": 16})
    model.peft_config["default"].peft_version = "0.19.1"
    with pytest.raises(
        ValueError, match="was saved by PEFT 0.19.1, .* gate_up_proj of .* transposed update"
    ):
        moe_runtime.patch(model)
    model = get_peft_model(
        stock("gpt_oss", num_hidden_layers=1), LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    )
    with pytest.warns(UserWarning, match="do not match this model's expert stacks"):
        moe_runtime.patch(model)
    sizes = {
        "num_local_experts": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
    }
    one = adapted("gpt_oss", sizes=sizes, targets=TARGETS[1:])
    moe_runtime.patch(one)
    with pytest.raises(ValueError, match="one transposed expert"):
        wrapper_of(one)(
            torch.randn(3, 32).double(),
            torch.zeros(3, 1, dtype=torch.long),
            torch.ones(3, 1).double(),
        )


@pytest.mark.parametrize("what", ["sharded", "of other experts"])
def test_adapters_that_another_engine_has_taken_apart_are_refused(what, monkeypatch):
    model = adapted()
    moe_runtime.patch(model)
    wrapper = wrapper_of(model)
    if what == "sharded":  # as fully_shard on the adapters' own linear layers leaves them
        wrapper.lora_A["default"].weight.placements = ()
    else:  # as transformers' expert parallelism does: the stack is local, the adapter global
        monkeypatch.setattr(wrapper, "num_experts", 4)
    with pytest.raises(
        ValueError,
        match="Apply fully_shard" if what == "sharded" else "4 experts, but the stacks have 8",
    ):
        wrapper(*inputs(model))


def test_what_is_adapted_is_said():
    model = adapted(sizes={"num_hidden_layers": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moe_runtime.patch(model) == 2
    path = "base_model.model.model.layers.{}.mlp.experts"
    assert adapted_stacks(model) == {
        path.format(layer): {"down_proj": ["default"], "gate_up_proj": ["default"]}
        for layer in range(2)
    }
    assert Path(adapters.__file__).stat().st_size < 12_000


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_trains_its_adapters(family):
    """Equal to PEFT's own; after one step every adapter that PEFT's own gives a gradient
    has moved.
    """
    model = families.build(family)
    targets = set()
    for name, module in families.experts_of(model).items():
        for stack in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            targets.add(f"{name.rpartition('.')[2]}.{stack}")
    model = get_peft_model(
        model, LoraConfig(r=3, target_parameters=sorted(targets), init_lora_weights=False)
    ).eval()
    assert sum(map(len, adapted_stacks(model).values())) == 2 * len(families.experts_of(model))

    def step():
        model.zero_grad()
        torch.manual_seed(0)
        out = model(**families.batch()).logits
        out.float().square().mean().backward()
        return [out.detach(), tiny.gradients(model)]

    logits, want = step()
    moe_runtime.patch(model)
    got = step()
    assert distance(got[0], logits) < 2e-6
    assert got[1].keys() == want.keys()
    tiny.assert_close(got[1], want, 0.0001)
    live = [name for name, gradient in want.items() if gradient.norm() > 0]
    before = {name: model.get_parameter(name).detach().clone() for name in live}
    torch.optim.SGD([model.get_parameter(name) for name in live], lr=1.0).step()
    assert live
    assert not any(torch.equal(model.get_parameter(name), value) for name, value in before.items())
