"""hf/dropin/balance.py: both losses against transformers' own, in a stock model's loss, in Trainer
and in TRL.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_runtime.hf.dropin import balance
from moe_runtime.hf.dropin.balance import use_balance_loss
from moe_runtime.hf.dropin.layers import routed_layers
from moe_runtime.ops.balance import per_layer_loss, pooled_loss
from papers.engine.tiny import train_tokenizer
from tests.hf import stock as families
from tests.hf import tiny
from tests.support.stock_moe import FAMILIES, batch, stock

COEF = 0.3
KINDS = ("per_layer", "pooled")
# families whose classes add their own auxiliary loss; so does granitemoe's, but it crashes in
# transformers 5.17
WITH_OWN_LOSS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "phimoe")


def logits_of(layers=4, rows=3, length=7, E=8):
    generator = torch.Generator().manual_seed(3)
    return tuple(
        2
        * torch.randn(
            rows * length,
            E,
            generator=generator,
        )
        for _ in range(layers)
    )


def a_mask(rows=3, length=7):
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, 4:] = 0
    mask[2, :2] = 0
    return mask


def reference(model, inputs, kind="per_layer"):
    """Compute the loss and the balance loss from the router logits that transformers itself
    returns.
    """
    out = model(**inputs, output_router_logits=True)
    E = out.router_logits[0].shape[1]
    groups = [out.router_logits]
    if kind == "per_layer":
        groups = [(logits,) for logits in out.router_logits]
    mask = inputs.get("attention_mask")
    parts = [
        load_balancing_loss_func(group, E, model.config.num_experts_per_tok, mask)
        for group in groups
    ]
    plain = model(**inputs, output_router_logits=False).loss
    return plain, torch.stack(parts).mean()


def close(a, b, error=1e-5):
    return torch.allclose(a, b, rtol=error, atol=1e-6)


@pytest.mark.parametrize("mask", [None, a_mask()], ids=["all", "padded"])
def test_both_are_transformers_formula(mask):
    logits = [x.requires_grad_() for x in logits_of()]
    flat = None if mask is None else mask.flatten() != 0
    pooled = pooled_loss(logits, 3, flat)
    expected = load_balancing_loss_func(tuple(logits), 8, 3, mask)

    assert torch.allclose(pooled, expected, rtol=1e-6)
    grads, expected_grads = (torch.autograd.grad(loss, logits) for loss in (pooled, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert torch.allclose(grad, expected_grad, rtol=1e-4, atol=1e-8)
    layers = []
    for layer in logits:
        layers.append(load_balancing_loss_func((layer,), 8, 3, mask))
    assert torch.allclose(
        per_layer_loss(logits, 3, flat),
        sum(layers) / 4,
        rtol=1e-6,
    )


def test_four_layers_that_collapse_on_different_experts_only_look_balanced_when_pooled():
    layers = torch.full((4, 100, 8), -1e4)
    for layer in range(4):
        layers[layer, :, 2 * layer : 2 * layer + 2] = 0  # with probability 1/2 each
    balanced = [torch.eye(8).roll(1, 0) + torch.eye(8)] * 4
    assert pooled_loss(list(layers), 2).item() == pytest.approx(2.0)
    assert pooled_loss(balanced, 2).item() == pytest.approx(2.0)
    assert per_layer_loss(balanced, 2).item() == pytest.approx(2.0)
    assert per_layer_loss(list(layers), 2).item() == pytest.approx(8.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_OWN_LOSS)
def test_a_models_own_loss_is_replaced(name, kind):
    model = stock(name).eval()
    inputs = batch(padding=3)
    lm_loss, aux_loss = reference(model, inputs, kind)
    model.config.output_router_logits = True  # so that it would add its own
    with_own = model(**inputs).loss
    in_use = use_balance_loss(model, kind, COEF)
    out = model(**inputs)

    assert close(out.aux_loss, aux_loss)
    assert torch.equal(out.lm_loss, lm_loss)
    assert close(out.loss, lm_loss + COEF * aux_loss)
    assert [tuple(x.shape) for x in out.router_logits] == [(18, 8)] * 2
    in_use.close()
    assert torch.equal(model(**inputs).loss, with_own)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_that_of_the_formula_and_reaches_every_router(name):
    model = stock(name).eval()
    inputs = batch(padding=3)
    logits = []
    handles = []

    def catch(module, args, out):  # the logits are the only floating-point output of this width
        for part in out:
            if part.is_floating_point() and part.shape[-1] == 8:
                logits.append(part)
                break

    routers = {}
    for path, module in model.named_modules():
        if path.endswith(("mlp.gate", "router")):
            routers[path] = module
            handles.append(module.register_forward_hook(catch))

    assert len(routers) == 2
    loss = model(**inputs).loss
    loss += COEF * per_layer_loss(logits, 2, inputs["attention_mask"].flatten() != 0)
    loss.backward()
    for handle in handles:
        handle.remove()
    expected = tiny.gradients(model)
    model.zero_grad()
    use_balance_loss(model, "per_layer", COEF)
    model(**inputs).loss.backward()
    grads = tiny.gradients(model)
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient.norm() > 0:
            assert tiny.distance(grads[name], gradient) < 1e-5, name
    for path in routers:
        assert any(grads[name].norm() > 0 for name in grads if name.startswith(path))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_routers_are_found_in_every_family(family):
    model = families.build(family)
    layers = [layer for layer in routed_layers(model).values() if layer.is_stock]
    # layers that choose experts by token id have no balance loss
    hashed = family == "deepseek_v4"
    assert len(balance.routers_of(model, layers)) == len(layers) - hashed


class Collapse(torch.overrides.TorchFunctionMode):
    """Set the logits of a router with 8 experts to 0 for the first `used` ones and to far less for
    the others.
    """

    def __init__(self, used):
        super().__init__()
        self.used = used

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # some have a skip expert or shared experts besides the 8; no other output in a router is as
        # narrow
        if func is torch.nn.functional.linear and 8 <= out.shape[-1] <= 12:
            return 0 * out - 1e4 * (torch.arange(out.shape[-1]) >= self.used)
        return out


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_collapse_costs_every_family_the_same(family):
    model = families.build(family)
    used = 3
    seen = []
    in_use = use_balance_loss(model, coef=1.0)

    def see(*_):
        seen.append((in_use._loss(in_use._logits), in_use._logits[0].shape[1], in_use._top_k))

    model.register_forward_hook(see, prepend=True)
    for module, _ in in_use.routers:
        mode = Collapse(used)
        module.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
        module.register_forward_hook(
            lambda *_, mode=mode: mode.__exit__(None, None, None), prepend=True
        )
    with torch.no_grad():
        families.run(model, "eager", output_router_logits=True)
    # every slot is on `used` experts, each with probability 1 / used: E sum_e (top_k / used) (1 /
    # used)
    (loss, E, top_k), *_ = seen

    assert loss.item() == pytest.approx(E / used * top_k, rel=1e-4)
    assert E in (8, 9)


def hooks_of(model) -> list[int]:
    values = []
    for m in model.modules():
        values.append(len(m._forward_hooks) + len(m._forward_pre_hooks))
    return values


def test_closing_gives_hooks_and_config_back():
    model = stock("deepseek_v3")
    before = model.config.to_dict()
    hooks = hooks_of(model)
    use_balance_loss(model, "per_layer", 0.1)
    in_use = use_balance_loss(model, "per_layer", 0.2)  # replaces the first one
    out = model(**batch())

    assert close(out.loss, out.lm_loss + 0.2 * out.aux_loss)
    assert model.config.router_aux_loss_coef == 0.2
    in_use.close()
    assert model.config.to_dict() == before
    assert hooks_of(model) == hooks


def test_checkpointing_keeps_the_gradient_or_is_refused():
    model = stock("qwen3_moe")
    inputs = batch()
    use_balance_loss(model, "per_layer", COEF)
    model(**inputs).loss.backward()
    expected = tiny.gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**inputs).loss.backward()
    tiny.assert_equal(tiny.gradients(model), expected)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True"):
        model(**inputs)


def test_compiled_models_have_the_loss_too():
    """The compiled model is one graph."""
    torch.compiler.reset()
    model = stock("qwen3_moe", num_hidden_layers=1).eval()
    model.set_experts_implementation("grouped_mm")
    inputs = batch(padding=3)
    in_use = use_balance_loss(model, "per_layer", COEF)
    expected = model(**inputs).loss
    expected.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad.clone()
    in_use.close()
    model.zero_grad()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    use_balance_loss(model, "per_layer", COEF)
    loss = compiled(**inputs).loss
    loss.backward()

    assert close(loss, expected)
    assert close(model.model.layers[0].mlp.gate.weight.grad, gradient)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: torch.nn.Linear(2, 2), "Expected a model of transformers, .*but got Linear"),
        (tiny.dense, "no MoE layers with a router"),
        (tiny.upcycled, r"For layers of moe_runtime set MoEConfig\(balance_loss=...\)"),
    ],
    ids=["not-a-model", "dense", "ours"],
)
def test_what_has_no_router_logits_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        use_balance_loss(make(), coef=0.1)


def rows_of_all_lengths():
    for i in range(4):
        yield {name: tensor[0].tolist() for name, tensor in batch(1, 9 - i, seed=i).items()}


ROWS = list(rows_of_all_lengths())


def collate(rows):
    """Pad to the longest row."""
    length = max(len(row["input_ids"]) for row in rows)
    padded = {"input_ids": [], "labels": []}
    for row in rows:
        missing = length - len(row["input_ids"])
        padded["input_ids"].append(row["input_ids"] + [0] * missing)
        padded["labels"].append(row["labels"] + [-100] * missing)
    tensors = {name: torch.tensor(values) for name, values in padded.items()}
    return tensors | {"attention_mask": (tensors["labels"] != -100).long()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_accumulation_makes_it_the_mean_weighted_by_tokens(name, kind, tmp_path):
    model = stock(name)
    use_balance_loss(model, kind, COEF)
    items = sum(len(row["labels"]) - 1 for row in ROWS)
    for row in ROWS:
        out = model(**collate([row]))
        share = (len(row["labels"]) - 1) / items
        (share * (out.lm_loss + COEF * out.aux_loss)).backward()
    expected = tiny.gradients(model)
    model.zero_grad()
    args = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    grads = {}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            grads.update(tiny.gradients(model))

    Trainer(model, args, collate, ROWS, callbacks=[Watch()]).train()

    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient.norm() > 0:
            assert tiny.distance(grads[name], gradient) < 1e-5, name


DOCUMENT = Path(__file__).parents[3] / "docs" / "routers.md"


@pytest.mark.parametrize(
    "text",
    re.findall(
        r"```python\n(.*?)```",
        DOCUMENT.read_text(),
        re.DOTALL,
    ),
)
def test_the_examples_of_the_docs_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(
        ["3 and 4 make 7", "a longer line: 30 and 40 make 70"],
        280,
    )
    tokenizer.save_pretrained("model")
    stock("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained("model")
    names: dict = {"__name__": "__main__"}
    exec(compile(text, str(DOCUMENT), "exec"), names)
    for layer in names["model"].model.layers:
        assert (layer.mlp.gate.weight.grad is not None) == ("backward" in text)
