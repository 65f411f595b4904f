"""methods/esft/lora.py: LoRA of only the selected experts, in PEFT's files; merged, applied and
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
from tests.support.checkpoints import assert_equal
from tests.support.esft_adapter import weights
from tests.support.stock_moe import batch, stock

CHOSEN = esft.ExpertSelection(experts={0: (5, 2), 1: (7,)})


def adapted(family="qwen3_moe", selection=CHOSEN, model=None, **settings):
    if model is None:
        model = stock(family)
    experts.patch(model)
    return esft.train_lora(
        model,
        selection,
        **{"rank": 3, "alpha": 6.0, **settings},
    )


def by_expert(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """View PEFT's lora_A [8 r, in] or lora_B [out, r 8] as [8, ...]."""
    is_a = ".lora_A." in name
    if is_a:
        return matrix.view(8, -1, matrix.shape[1])
    return matrix.view(matrix.shape[0], -1, 8).permute(
        2,
        0,
        1,
    )


def halves(model) -> dict[str, SelectedHalf]:
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, SelectedHalf)}


def matrices(model) -> dict[str, torch.Tensor]:
    """Return every LoRA matrix by expert, [E, ...], by name."""
    result = {}
    for name, half in halves(model).items():
        result[name] = by_expert(
            half.weight.detach().clone(),
            name,
        )
    return result


def layer_of(name: str) -> int:
    return int(name.split(".layers.")[1].partition(".")[0])


def train(model) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(**batch(rows=4, length=32, seed=step)).loss.backward()
        optimizer.step()


def start_matrices(model):
    """Give the selected experts' B random values, so that all of A and B get gradients."""
    generator = torch.Generator().manual_seed(4)
    for key, half in halves(model).items():
        if "lora_B" in key:
            half.selected.data.normal_(generator=generator)


def test_equals_masked_lora_of_all_experts():
    """The gradients of the selected experts equal those of PEFT's LoRA on all experts."""
    model, _ = adapted(model=stock().double())
    start_matrices(model)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6.0, target_parameters=targets)
    every = peft.get_peft_model(stock().double(), config)
    experts.patch(every)
    generator = torch.Generator().manual_seed(5)
    for name, matrix in matrices(model).items():
        whole = by_expert(
            every.get_parameter(f"{name}.weight").data.zero_(),
            name,
        )
        if "lora_A" in name:  # the other experts have zeros in B, so the function does not change
            whole.normal_(generator=generator)
        ids = list(CHOSEN.experts[layer_of(name)])
        whole[ids] = matrix[ids]
    model(**batch()).loss.backward()
    every(**batch()).loss.backward()
    for name, half in halves(model).items():
        ids = list(CHOSEN.experts[layer_of(name)])
        expected = by_expert(
            every.get_parameter(f"{name}.weight").grad,
            name,
        )
        result = by_expert(
            half.whole(half.selected.grad),
            name,
        )
        torch.testing.assert_close(
            result[ids],
            expected[ids],
            rtol=1e-9,
            atol=1e-12,
        )


def test_experts_that_are_not_selected_cost_no_bytes():
    """AdamW's state covers the selected experts; PEFT's names and shapes cover all of them."""
    model, receipt = adapted()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=1e-2,
    )
    model(**batch()).loss.backward()
    optimizer.step()
    state = 0
    for of_parameter in optimizer.state.values():
        state += sum(tensor.nbytes for tensor in of_parameter.values() if tensor.dim())
    assert state == 8 * receipt.trainable_parameters
    saved = dict(peft.get_peft_model_state_dict(model))
    for name in saved:
        assert name.endswith(".weight")
    everyone = sum(tensor.numel() for tensor in saved.values())
    assert everyone == 16 * receipt.trainable_parameters / 3  # 3 of 2 x 8 experts
    again, _ = adapted(seed=1)
    assert experts.patch(again) == 2  # patch checks the adapters
    assert not peft.set_peft_model_state_dict(again, saved).unexpected_keys
    for one, other in zip(
        halves(model).values(),
        halves(again).values(),
        strict=True,
    ):
        assert torch.equal(one.selected, other.selected)
    key = next(name for name in model.state_dict() if "base_layer.lora_A" in name)
    with pytest.raises(RuntimeError, match=r"weight of shape \[24, 32\], but got \[4, 32\]"):
        model.load_state_dict(
            {key: torch.zeros(4, 32)},
            strict=False,
        )


def rank_of(layer: int, expert: int) -> int:
    return {5: 3, 2: 1, 7: 2}[expert]


@pytest.mark.parametrize("family, rank", [("qwen3_moe", rank_of), ("gpt_oss", lambda *_: 3)])
def test_saves_a_peft_adapter_and_merges_to_the_same_model(tmp_path, family, rank):
    law = tmp_path / "law"
    model = stock(family)
    model.save_pretrained(tmp_path / "base")
    model, receipt = adapted(family, model=model, rank=rank)
    train(model)
    for name, matrix in matrices(model).items():
        for e in CHOSEN.experts[layer_of(name)]:
            used = matrix[e].any(int("lora_A" in name)).sum()
            assert used == rank(0, e)
    esft.save_lora(model, law)
    names = {"adapter_model.safetensors", "adapter_config.json", "expert_cfg.json", "README.md"}
    assert {path.name for path in law.iterdir()} == names
    saved = read_lora(law)
    assert saved.selection == CHOSEN
    assert saved.nbytes == 4 * saved.num_parameters == 4 * receipt.trainable_parameters

    expected = model.eval()(**batch()).logits
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    before = weights(base)
    receipt = esft.merge(
        tmp_path / "base",
        law,
        tmp_path / "merged",
    )
    assert receipt.experts == 3
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    again = load_lora(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        law,
    ).eval()
    for other in (again, merged):
        torch.testing.assert_close(
            other(**batch()).logits,
            expected,
            rtol=1e-4,
            atol=1e-5,
        )
    for name, weight in merged.named_parameters():
        ids = []
        if ".experts." in name and weight.dim() == 3:
            ids = sorted(CHOSEN.experts[layer_of(name)])
        moved = [
            e
            for e in range(len(weight))
            if not torch.equal(
                weight[e],
                before[name][e],
            )
        ]
        assert moved == ids, name
    esft.apply(base, law)
    assert_equal(weights(base), weights(merged))
    esft.remove(base)
    assert_equal(weights(base), before)


@pytest.fixture
def saved(tmp_path):
    """A base and an adapter for it, in folders."""
    model = stock()
    model.save_pretrained(tmp_path / "base")
    model, _ = adapted(model=model)
    start_matrices(model)
    esft.save_lora(model, tmp_path / "law")
    return tmp_path


def assert_refused(base, model, adapter, match: str) -> None:
    out = adapter.with_name("out")
    with pytest.raises(ValueError, match=match):
        esft.merge(base, adapter, out)
    with pytest.raises(ValueError, match=match):
        esft.apply(model, adapter)
    assert not out.exists()


def test_another_base_is_refused(saved):
    other = stock()
    for parameter in other.parameters():
        parameter.data.mul_(-1.5)
    other.save_pretrained(saved / "other")
    assert_refused(
        saved / "other",
        other,
        saved / "law",
        "law is for a base with other",
    )
    esft.merge(
        saved / "other",
        saved / "law",
        saved / "out",
        check_weights=False,
    )


def test_an_adapter_that_changes_more_than_its_selection_is_refused(saved):
    fewer = replace(CHOSEN, experts={0: (5,), 1: (7,)})
    fewer.save(saved / "law" / "expert_cfg.json")
    match = "law changes model.layers.0.mlp.experts.* beyond the experts"
    assert_refused(
        saved / "base",
        stock(),
        saved / "law",
        match,
    )


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"experts": {0: (8,)}}, r"has experts \[8\] of layer 0, but .* routes to ids 0 to 7"),
        ({"experts": {}}, "selection has no experts, but LoRA supports routed experts only"),
        ({"non_expert_modules": True}, "non_expert_modules is True, but LoRA supports"),
    ],
)
def test_what_cannot_train_is_refused_and_the_model_is_unchanged(changes, match):
    model = stock()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=match):
        adapted(selection=replace(CHOSEN, **changes), model=model)
    assert [name for name, _ in model.named_parameters()] == names
