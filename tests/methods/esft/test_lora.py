"""methods/esft/lora.py: LoRA of the selected experts alone, in PEFT's files; merged, applied and
resumed.
"""

from dataclasses import replace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin import experts
from moe_runtime.methods import esft
from moe_runtime.methods.esft.lora import SelectedHalf, read_lora
from moe_runtime.methods.lora.baseline import load_lora
from tests.support.stock_moe import batch, stock

CHOSEN = esft.ExpertSelection(experts={0: (5, 2), 1: (7,)})


def adapted(family="qwen3_moe", selection=CHOSEN, model=None, **settings):
    model = stock(family) if model is None else model
    experts.patch(model)
    return esft.train_lora(model, selection, **{"rank": 3, "alpha": 6.0, **settings})


def by_expert(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """A view of PEFT's lora_A [8 r, in] or lora_B [out, r 8] as [8, ...]."""
    is_a = ".lora_A." in name
    if is_a:
        return matrix.view(8, -1, matrix.shape[1])
    return matrix.view(matrix.shape[0], -1, 8).permute(2, 0, 1)


def halves(model) -> dict[str, SelectedHalf]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, SelectedHalf)
    }


def matrices(model) -> dict[str, torch.Tensor]:
    """Every matrix of LoRA by expert [E, ...], by name."""
    return {
        name: by_expert(half.weight.detach().clone(), name) for name, half in halves(model).items()
    }


def layer_of(name: str) -> int:
    return int(name.split(".layers.")[1].partition(".")[0])


def train(model, steps=3, optimizer=torch.optim.AdamW, **settings):
    trained = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2, **settings)
    for step in range(steps):
        trained.zero_grad()
        model(**batch(rows=4, length=32, seed=step)).loss.backward()
        trained.step()


@pytest.mark.parametrize(
    "family, optimizer, settings",
    [
        pytest.param("qwen3_moe", torch.optim.AdamW, {"weight_decay": 0.1}, id="AdamW"),
        pytest.param("gpt_oss", torch.optim.AdamW, {"weight_decay": 0.1}, id="transposed stacks"),
        pytest.param(
            "qwen3_moe", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, id="SGD"
        ),
    ],
)
def test_every_selected_expert_moves_and_no_other_bit_does(family, optimizer, settings):
    model, receipt = adapted(family)
    start = matrices(model)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert len(start) == 8  # two stacks of two layers
    share = sum(len(CHOSEN.experts[layer_of(name)]) * m[0].numel() for name, m in start.items())
    assert trained == share < sum(m.numel() for m in start.values()) / 4
    assert (
        receipt.trainable_parameters == receipt.row_parameters == share < receipt.total_parameters
    )
    train(model, optimizer=optimizer, **settings)
    for name, after in matrices(model).items():
        ids = CHOSEN.experts[layer_of(name)]
        for e in range(8):
            if e in ids:
                assert (after[e] != start[name][e]).double().mean() > 0.9, (name, e)
            else:
                zero = torch.zeros_like(after[e])
                # not -0.0 either
                assert torch.equal(after[e].view(torch.int32), zero.view(torch.int32)), (name, e)
    for name, parameter in model.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name]), name


def start_matrices(model):
    """Give the selected experts' B random values, so that all of A and B have gradients."""
    generator = torch.Generator().manual_seed(4)
    for key, half in halves(model).items():
        if "lora_B" in key:
            half.selected.data.normal_(generator=generator)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_in_our_op_and_in_stock_peft_it_is_the_same(family):
    model, _ = adapted(family, model=stock(family).double())
    start_matrices(model)
    assert hasattr(peft.tuners.lora.layer.ParamWrapper._activate_lora, "moe_runtime_stock")
    found = []
    for implementation in ("moe_runtime", "eager"):
        model.base_model.model.set_experts_implementation(implementation)
        loss = model(**batch()).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        found.append((loss.detach(), grads))
        model.zero_grad()
    (ours, our_grads), (theirs, their_grads) = found
    # norms of the model compute in float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for name, grad in their_grads.items():
        torch.testing.assert_close(
            our_grads[name], grad, rtol=1e-5, atol=1e-7 * float(grad.abs().max()), msg=name
        )
        assert grad.any() and name.endswith(".selected")


def test_the_equation_is_that_of_a_mask_on_whole_lora():
    """The gradients of the selected experts are those of PEFT's LoRA on all experts."""
    model, _ = adapted(model=stock().double())
    start_matrices(model)
    config = peft.LoraConfig(
        r=3, lora_alpha=6.0, target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    every = peft.get_peft_model(stock().double(), config)
    experts.patch(every)
    generator = torch.Generator().manual_seed(5)
    for name, matrix in matrices(model).items():
        whole = by_expert(every.get_parameter(f"{name}.weight").data.zero_(), name)
        if "lora_A" in name:  # of the others: their B is zero, so the function stays
            whole.copy_(torch.randn(whole.shape, generator=generator, dtype=whole.dtype))
        ids = list(CHOSEN.experts[layer_of(name)])
        whole[ids] = matrix[ids]
    for one in (model, every):
        one(**batch()).loss.backward()
    for name, half in halves(model).items():
        grad = by_expert(every.get_parameter(f"{name}.weight").grad, name)
        ids = list(CHOSEN.experts[layer_of(name)])
        own = by_expert(half.whole(half.selected.grad), name)
        torch.testing.assert_close(own[ids], grad[ids], rtol=1e-9, atol=1e-12)


def test_experts_that_are_not_selected_cost_no_bytes():
    """Gradients and AdamW's state are those of the selected experts; PEFT's names and shapes are of
    all.
    """
    model, receipt = adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model(**batch()).loss.backward()
    optimizer.step()
    bytes_of = [
        sum(t.nbytes for t in tensors)
        for tensors in (
            trained,
            [p.grad for p in trained],
            [t for s in optimizer.state.values() for t in s.values() if t.dim()],
        )
    ]
    assert bytes_of == [
        4 * receipt.trainable_parameters,
        4 * receipt.trainable_parameters,
        8 * receipt.trainable_parameters,
    ]
    state = dict(peft.get_peft_model_state_dict(model).items())
    everyone = sum(t.nbytes for t in state.values())
    # 3 of 2 x 8 experts
    assert all(name.endswith(".weight") for name in state) and everyone == 16 * bytes_of[0] / 3
    again, _ = adapted(seed=1)
    assert experts.patch(again) == 2  # which looks at the adapters
    assert not peft.set_peft_model_state_dict(again, state).unexpected_keys
    assert all(
        torch.equal(one.selected, other.selected)
        for one, other in zip(halves(model).values(), halves(again).values())
    )
    with pytest.raises(RuntimeError, match=r"weight of shape \[24, 32\], but got \[4, 32\]"):
        key = next(name for name in model.state_dict() if "base_layer.lora_A" in name)
        model.load_state_dict({key: torch.zeros(4, 32)}, strict=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_saved_it_is_pefts_adapter_and_merged_it_is_the_same_model(tmp_path, family):
    model = stock(family)
    model.save_pretrained(tmp_path / "base")
    model, _ = adapted(family, model=model)
    train(model)
    esft.save_lora(model, tmp_path / "law")
    assert {path.name for path in (tmp_path / "law").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "expert_cfg.json",
        "README.md",
    }
    want = model.eval()(**batch()).logits
    load = AutoModelForCausalLM.from_pretrained
    again = load_lora(load(tmp_path / "base"), tmp_path / "law").eval()
    torch.testing.assert_close(again(**batch()).logits, want, rtol=1e-4, atol=1e-5)
    receipt = esft.merge(tmp_path / "base", tmp_path / "law", tmp_path / "merged")
    assert receipt.experts == 3
    merged = load(tmp_path / "merged").eval()
    base = load(tmp_path / "base").eval()
    torch.testing.assert_close(merged(**batch()).logits, want, rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(merged.named_parameters(), base.parameters(), strict=True):
        ids = CHOSEN.experts[layer_of(name)] if ".experts." in name and a.dim() == 3 else ()
        moved = [e for e in range(len(a)) if not torch.equal(a[e], b[e])]
        assert moved == sorted(ids), name
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    esft.apply(base, tmp_path / "law")
    assert all(
        torch.equal(a, b) for a, b in zip(base.parameters(), merged.parameters(), strict=True)
    )
    esft.remove(base)
    assert all(torch.equal(p, before[name]) for name, p in base.named_parameters())
    found = read_lora(tmp_path / "law")
    assert found.selection == CHOSEN and found.nbytes == 4 * found.num_parameters


def test_another_base_is_refused(tmp_path):
    model = stock()
    model.save_pretrained(tmp_path / "base")
    model, _ = adapted(model=model)
    esft.save_lora(model, tmp_path / "law")
    other = stock()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    other.save_pretrained(tmp_path / "other")
    for call in (
        lambda: esft.merge(tmp_path / "other", tmp_path / "law", tmp_path / "out"),
        lambda: esft.apply(other, tmp_path / "law"),
    ):
        with pytest.raises(ValueError, match="law is for a base with other"):
            call()
    assert not (tmp_path / "out").exists()
    esft.merge(tmp_path / "other", tmp_path / "law", tmp_path / "out", check_weights=False)


def test_an_adapter_that_changes_more_than_its_selection_is_refused(tmp_path):
    model = stock()
    model.save_pretrained(tmp_path / "base")
    model, _ = adapted(model=model)
    start_matrices(model)
    esft.save_lora(model, tmp_path / "law")
    esft.ExpertSelection.save(
        replace(CHOSEN, experts={0: (5,), 1: (7,)}), tmp_path / "law" / "expert_cfg.json"
    )
    law = tmp_path / "law"
    for call in (
        lambda: esft.merge(tmp_path / "base", law, tmp_path / "out"),
        lambda: esft.apply(stock(), law),
    ):
        with pytest.raises(
            ValueError, match="law changes model.layers.0.mlp.experts.* beyond the experts"
        ):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "selection, settings, match",
    [
        (
            replace(CHOSEN, experts={0: (8,)}),
            {},
            r"selection has experts \[8\] of layer 0, but the model routes to ids 0 to 7",
        ),
        (replace(CHOSEN, experts={4: (1,)}), {}, "of layer 4, but the model routes to layers 0, 1"),
        (
            replace(CHOSEN, experts={}),
            {},
            "selection has no experts, but LoRA supports routed experts only",
        ),
        (replace(CHOSEN, shared_experts=True), {}, "shared_experts is True, but LoRA supports"),
        (
            replace(CHOSEN, non_expert_modules=True),
            {},
            "non_expert_modules is True, but LoRA supports",
        ),
        (CHOSEN, {"rank": 0}, "rank must be"),
        (CHOSEN, {"alpha": -1.0}, "alpha must be"),
    ],
)
def test_what_cannot_train_is_refused_and_the_model_is_unchanged(selection, settings, match):
    model = stock()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=match):
        adapted(selection=selection, model=model, **settings)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stock_peft_loads_trains_and_merges_whole_experts(family, tmp_path):
    """esft.save_peft: an adapter of whole experts as copies of modules; with it comes
    AutoPeftModel.
    """
    stock(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    esft.train_only(base, CHOSEN)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.1 if parameter.requires_grad else 0)
    want = base.eval()(**batch()).logits
    esft.save_adapter(base, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    esft.save_peft(model, tmp_path / "adapter", tmp_path / "peft")
    after = {name: (p.requires_grad, p) for name, p in model.named_parameters()}
    assert all(
        after[name][0] == flag and torch.equal(after[name][1], weight)
        for name, (flag, weight) in before.items()
    )
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "peft", is_trainable=True
    ).eval()
    torch.testing.assert_close(loaded(**batch()).logits, want)
    assert experts.patch(loaded) == 2 * len(CHOSEN.experts)  # the copies, and what they stand for
    torch.testing.assert_close(loaded(**batch()).logits, want)
    loaded(**batch()).loss.backward()
    trained = {
        name.split(".modules_to_save.")[0]
        for name, p in loaded.named_parameters()
        if p.grad is not None and p.grad.any()
    }
    paths = {f"base_model.model.model.layers.{layer}.mlp.experts" for layer in CHOSEN.experts}
    assert {name for name in trained if "lora_" not in name} == paths
    torch.testing.assert_close(loaded.merge_and_unload()(**batch()).logits, want)


def test_an_adapter_of_everything_is_no_adapter(tmp_path):
    model = stock()
    esft.train_only(model, CHOSEN, non_expert_modules=True)
    esft.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(
        ValueError,
        match="adapter changes every linear layer, so it is a whole model. Use esft merge",
    ):
        esft.save_peft(stock(), tmp_path / "adapter", tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
