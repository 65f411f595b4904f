"""What the classes return in training: the parts of the loss, which parameters they reach, and the
effect of checkpointing.
"""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_runtime.hf.models import swap
from moe_runtime.modules.moe import MoE
from tests.hf import tiny


def routers(model) -> list[torch.Tensor]:
    values = []
    for module in model.modules():
        if isinstance(module, MoE):
            values.append(module.gate.weight)
    return values


def checkpoint_layers(model, use_reentrant: bool):
    # the name in 5.23, and the one before it
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()


def gradients(model, **kwargs):
    model.zero_grad()
    loss = model(tiny.batch(), labels=tiny.batch(), **kwargs).loss
    loss.backward()
    return loss, tiny.gradients(model)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
@pytest.mark.parametrize("stage", ["moe", "mergeable"])
def test_gradient_checkpointing_changes_nothing(model_type, stage):
    model = tiny.upcycled(
        model_type, balance_loss="cv2", balance_loss_coef=0.1, noisy_gate=True
    ).train()
    if stage == "mergeable":
        swap.moe_to_mergeable(model)
    torch.manual_seed(5)
    loss, expected = gradients(model)
    checkpoint_layers(model, use_reentrant=False)
    torch.manual_seed(5)
    again, grads = gradients(model)

    assert torch.equal(loss, again)
    assert grads.keys() == expected.keys()
    tiny.assert_close(grads, expected, 1e-5)


def test_reentrant_checkpointing_with_a_balance_loss_is_refused():
    model = tiny.upcycled(balance_loss="cv2", balance_loss_coef=0.1).train()
    checkpoint_layers(model, use_reentrant=True)
    with pytest.raises(
        ValueError,
        match="use_reentrant=True in gradient checkpointing would lose",
    ):
        model(tiny.batch(), labels=tiny.batch())
    for module in model.modules():
        if isinstance(module, MoE):
            assert module.records is None
    model.eval()(tiny.batch(), labels=tiny.batch())
    plain = tiny.upcycled().train()
    checkpoint_layers(plain, use_reentrant=True)
    # the loss does not depend on the logits, so nothing is lost
    gradients(plain, output_router_logits=True)
    plain.config.router_aux_loss_coef = 0.1
    with pytest.raises(ValueError, match="use_reentrant=True"):
        gradients(plain, output_router_logits=True)


def check_routers_have_a_gradient(model) -> None:
    # the first layer's router also gets the second's loss, through its experts
    for weight in routers(model):
        assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["cv2", "switch"])
def test_balance_losses_are_added_and_reported_separately(kind, training):
    model = tiny.upcycled(
        balance_loss=kind,
        balance_loss_coef=0.5,
    ).train(training)
    plain = tiny.upcycled().train(training)
    out = model(tiny.batch(), labels=tiny.batch())
    losses = []

    def record(module, args, _):
        losses.append(module.gate(args[0].flatten(0, 1)).balance_loss)

    for module in model.modules():
        if isinstance(module, MoE):
            module.register_forward_hook(record)
    model(tiny.batch())

    assert sum(losses) > 0
    assert torch.allclose(out.aux_loss, sum(losses))
    assert torch.equal(
        out.lm_loss,
        plain(tiny.batch(), labels=tiny.batch()).loss,
    )
    assert torch.equal(out.loss, out.lm_loss + out.aux_loss)
    assert out.router_logits is None
    out.aux_loss.backward()
    check_routers_have_a_gradient(model)


def test_the_pooled_loss_is_transformers():
    model = tiny.upcycled().train()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    labels = tiny.batch().masked_fill(mask == 0, -100)
    plain = model(tiny.batch(), attention_mask=mask, labels=labels)

    assert not hasattr(plain, "aux_loss")
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = 0.25
    out = model(tiny.batch(), attention_mask=mask, labels=labels)
    expected = 0.25 * load_balancing_loss_func(out.router_logits, 3, 2, mask)
    assert torch.allclose(out.aux_loss, expected)
    assert torch.equal(out.lm_loss, plain.loss)
    assert torch.equal(out.loss, out.lm_loss + out.aux_loss)
    out.aux_loss.backward()
    check_routers_have_a_gradient(model)
    assert (
        model(
            tiny.batch(),
            output_router_logits=False,
        ).get("router_logits")
        is None
    )
    loss, aux, *_ = model(tiny.batch(), labels=labels, return_dict=False)
    assert loss.dim() == aux.dim() == 0


def test_gradient_accumulation_counts_the_auxiliary_loss_once():
    model = tiny.upcycled(balance_loss="switch", balance_loss_coef=0.5)
    labels = tiny.batch()
    labels[1, :7] = -100  # the second row has fewer tokens
    counts = labels[:, 1:].ne(-100).sum(1)
    for i in range(2):
        row = slice(i, i + 1)
        out = model(
            tiny.batch()[row],
            labels=labels[row],
            num_items_in_batch=counts.sum(),
        )
        share = counts[i] / counts.sum()
        assert torch.allclose(
            out.loss - out.lm_loss,
            share * out.aux_loss,
            atol=1e-6,
        )


def test_records_go_even_when_the_forward_fails():
    model = tiny.upcycled(balance_loss="cv2", balance_loss_coef=0.1)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([[tiny.VOCAB + 5]]))
    for module in model.modules():
        if isinstance(module, MoE):
            assert module.records is None
