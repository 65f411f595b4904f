"""moe_runtime.methods.upit.router: Eq. (1) and (2), what trains and what must not, what is written,
resume and processes.
"""

import json
import math
import shutil

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.methods.upit.router import init_router, load_routed
from moe_runtime.methods.upit.vectors import RoutingVectors, routing_loss
from tests.support import upit

FAST = {"learning_rate": 3e-3, "steps": 6, "batch_size": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return upit.make_tokenizer()


@pytest.fixture(scope="module")
def rows():
    return upit.make_rows(8)


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tokenizer):
    return upit.save_experts(tmp_path_factory.mktemp("experts"), tokenizer)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, experts):
    base = experts[0].parent / "base"
    return upit.save_adapters(
        tmp_path_factory.mktemp("adapters"), base, 2, (*upit.ADAPTED, "q_proj")
    )


def batch_of(rows, tokenizer) -> dict:
    return pair_collator(tokenizer)(
        [{name: rows[i][name] for name in ("input_ids", "labels")} for i in range(4)]
    )


def by_hand(model, batch: dict, vectors: torch.Tensor, alpha: float) -> float:
    """Eq. (1) in float64, with h caught at the MLPs and no word of RoutingVectors."""
    caught = []
    model = model.double()
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, a: caught.append(a[0]))
        for layer in model.model.layers
    ]
    lm_loss = model(**batch).loss
    for handle in handles:
        handle.remove()
    kept = batch["attention_mask"].bool()
    aux = [
        -torch.sigmoid(h[kept] @ r).log().mean()
        for h, r in zip(caught, vectors.double(), strict=True)
    ]
    return (alpha * lm_loss + (1 - alpha) * sum(aux) / len(aux)).item()


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.0, 1.0])
def test_the_loss_is_equation_1(experts, rows, tokenizer, alpha):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    batch = batch_of(rows, tokenizer)
    vectors = torch.randn(2, 32)
    want = by_hand(AutoModelForCausalLM.from_pretrained(experts[0]), batch, vectors, alpha)
    before = model(**batch).loss.item()
    routing = RoutingVectors(model, vectors, alpha)
    out = model(**batch)
    assert out.loss.item() == pytest.approx(want, rel=1e-5)
    assert out.loss.item() == pytest.approx((out.lm_loss + out.aux_loss).item(), rel=1e-6)
    assert out.lm_loss.item() == pytest.approx(alpha * before, rel=1e-6)
    routing.close()
    assert model(**batch).loss.item() == before and not any(
        "routing" in name for name in model.state_dict()
    )


def test_the_vectors_are_not_in_the_forward_pass(experts, rows, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    batch = batch_of(rows, tokenizer)
    before = model(**batch).logits
    RoutingVectors(model, torch.randn(2, 32))
    assert torch.equal(model(**batch).logits, before)


@pytest.mark.parametrize("detach_h", [False, True])
def test_the_routing_loss_reaches_the_mlps_below(experts, rows, tokenizer, detach_h):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    batch = batch_of(rows, tokenizer)
    routing = RoutingVectors(model, torch.randn(2, 32), alpha=0.0, detach_h=detach_h)
    routing.train_only()
    model(**batch).loss.backward()
    moved = [float(mlp.down_proj.weight.grad.norm()) for mlp in routing.mlps]
    # the last MLP lies above the last h
    assert (moved[0] > 1e-4) == (not detach_h) and moved[1] == 0
    assert all(mlp.routing_vector.grad.norm() > 1e-4 for mlp in routing.mlps)


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_no_gradient(experts, rows, tokenizer, autocast):
    grads = []
    for checkpointing in (False, True):
        model = AutoModelForCausalLM.from_pretrained(experts[0]).train()
        batch = batch_of(rows, tokenizer)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        routing = RoutingVectors(model, torch.ones(2, 32) / 8)
        routing.train_only()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(grads[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_logits_of_the_vectors_stay_float32_under_autocast(experts, rows, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    routing = RoutingVectors(model, torch.randn(2, 32))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**batch_of(rows, tokenizer)).aux_loss.dtype == torch.float32
    assert routing.values().dtype == torch.float32


def test_padding_does_not_count():
    logits = [
        torch.tensor([[1.0, -2.0, 50.0], [0.5, 40.0, 60.0]]),
        torch.tensor([[3.0, 0.0, -70.0], [-1.0, 1e4, -1e4]]),
    ]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    want = sum(math.log1p(math.exp(-z)) for z in (1.0, -2.0, 0.5, 3.0, 0.0, -1.0)) / 6
    assert routing_loss(logits, mask).item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "train_ffn"),
    [(None, True), ("bfloat16", True), (None, False)],
    ids=["fp32", "bf16", "vectors-alone"],
)
def test_vectors_learn_and_the_backbone_stays(tmp_path, experts, rows, tokenizer, dtype, train_ffn):
    settings = FAST | {"train_ffn": train_ffn, "weight_decay": 0.1, "dtype": dtype}
    routed = init_router(experts[0], rows, tokenizer, folder=tmp_path / "out", **settings)
    assert all(b > a for a, b in zip(routed.before.sigmoid, routed.after.sigmoid, strict=True))
    assert (routed.after.loss < routed.before.loss) == train_ffn
    assert (
        routed.vectors.shape == (2, 32)
        and routed.vectors.dtype == torch.float32
        and routed.steps == 6
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if not train_ffn:
        assert routed.folder == experts[0] and not (tmp_path / "out" / "model.safetensors").exists()
        return
    old = upit.tensors_of(experts[0])
    new = upit.tensors_of(routed.folder)
    moved = {name for name in new if not torch.equal(new[name], old[name].to(new[name].dtype))}
    assert moved == {name for name in old if ".mlp." in name} and set(new) == set(old)
    assert {tensor.dtype for tensor in new.values()} == {getattr(torch, dtype or "float32")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bf16", [False, True], ids=["plain", "autocast"])
def test_a_narrow_expert_trains_as_a_wide_one(tmp_path, tokenizer, rows, dtype, bf16):
    """At the paper's rate, of which a narrow weight would take on next to nothing, or
    become NaN.
    """
    narrow = upit.save_experts(tmp_path / "narrow", tokenizer, 1, dtype=dtype)[0]
    AutoModelForCausalLM.from_pretrained(narrow, dtype="float32").save_pretrained(tmp_path / "wide")
    settings = {"steps": 8, "batch_size": 4, "bf16": bf16}
    a, b = (
        init_router(folder, rows, tokenizer, folder=tmp_path / f"{i}", **settings)
        for i, folder in enumerate((narrow, tmp_path / "wide"))
    )
    assert torch.equal(a.vectors, b.vectors) and a.after == b.after and a.after.loss < a.before.loss
    old = upit.tensors_of(narrow)
    found = upit.tensors_of(a.folder)
    want = upit.tensors_of(b.folder)
    assert all(
        torch.equal(found[name], want[name].to(dtype)) and found[name].dtype == dtype
        for name in want
    )
    changed = [(found[name] != old[name]).double().mean() for name in old if ".mlp." in name]
    assert sum(changed) / len(changed) > (0.5 if dtype == torch.float16 else 0.2)
    assert json.loads((a.folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )


def test_vectors_have_a_start_and_a_rate_of_their_own(tmp_path, experts, rows, tokenizer):
    def trained(name: str, **settings):
        settings = {"steps": 2, "batch_size": 8, "learning_rate": 1e-4} | settings
        return init_router(experts[0], rows, tokenizer, folder=tmp_path / name, **settings)

    same = trained("same")
    apart = trained("apart", vector_learning_rate=1e-2)
    # AdamW's first steps are of the rate's size; these begin at 0
    assert same.vectors.abs().max() < 2.1e-4 < 1e-2 < apart.vectors.abs().max() < 2.1e-2
    assert (
        same.before.sigmoid == [0.5, 0.5] and sum(apart.after.sigmoid) > sum(same.after.sigmoid) > 1
    )
    drawn = trained("drawn", vector_std=0.5)
    assert 0.4 < drawn.vectors.std() < 0.6 and not torch.equal(
        drawn.vectors, trained("one", vector_std=0.5, index=1).vectors
    )
    # the expert's own rate stays
    tensors = [
        upit.tensors_of(tmp_path / name) for name in ("expert", "same", "apart") if name != "expert"
    ]
    old = upit.tensors_of(experts[0])
    key = "model.layers.1.mlp.up_proj.weight"
    assert all(0 < (found[key] - old[key]).abs().max() < 2.1e-4 for found in tensors)


def test_of_adapters_their_mlp_pairs_train(tmp_path, adapters, rows, tokenizer):
    routed = init_router(adapters[0], rows, tokenizer, folder=tmp_path / "out", **FAST)
    assert (
        sum(routed.after.sigmoid) > sum(routed.before.sigmoid)
        and routed.after.loss < routed.before.loss
    )
    old = upit.tensors_of(adapters[0])
    new = upit.tensors_of(routed.folder)
    moved = {name for name in new if not torch.equal(new[name], old[name])}
    assert moved == {name for name in old if ".mlp." in name} and set(new) == set(old) != moved
    assert json.loads((routed.folder / "adapter_config.json").read_text())["r"] == 2
    again = init_router(routed.folder, rows, tokenizer, folder=tmp_path / "again", **FAST)
    assert again.before.loss == pytest.approx(routed.after.loss, rel=1e-5)


def test_a_delta_becomes_a_whole_model(tmp_path, experts, rows, tokenizer):
    base = experts[0].parent / "base"
    delta = upit.save_delta(tmp_path / "delta", experts[0], base)
    settings = FAST | {"steps": 2}
    routed = init_router(delta, rows, tokenizer, folder=tmp_path / "out", base=base, **settings)
    want = init_router(experts[0], rows, tokenizer, folder=tmp_path / "want", **settings)
    old = upit.tensors_of(want.folder)
    new = upit.tensors_of(routed.folder)
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def test_what_is_saved_is_what_was_trained(tmp_path, experts, rows, tokenizer):
    routed = init_router(experts[0], rows, tokenizer, folder=tmp_path / "out", **FAST)
    model = AutoModelForCausalLM.from_pretrained(routed.folder)
    measured = RoutingVectors(model, routed.vectors).measure(rows, tokenizer, 4)
    assert measured.loss == pytest.approx(routed.after.loss, rel=1e-6)
    assert measured.sigmoid == pytest.approx(routed.after.sigmoid, rel=1e-6)
    read = load_routed(tmp_path / "out")
    assert torch.equal(read.vectors, routed.vectors)
    assert (read.before, read.after, read.steps, read.folder) == (
        routed.before,
        routed.after,
        6,
        routed.folder,
    )


@torch.no_grad()
def row_by_row(model, rows) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """The logits [S, V] and the layers' h [S, H] of each row alone."""
    caught = []
    found = []
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, args: caught.append(args[0][0]))
        for layer in model.model.layers
    ]
    for row in rows:
        logits = model(torch.tensor([row["input_ids"]])).logits[0]
        found.append((logits, list(caught)))
        caught.clear()
    for handle in handles:
        handle.remove()
    return found


def test_measured_numbers_are_means_over_tokens(experts, rows, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    vectors = torch.randn(2, 32) / 4
    found = RoutingVectors(model, vectors).measure(rows, tokenizer, 3)
    sums = torch.zeros(2, dtype=torch.float64)
    losses = 0.0
    tokens = 0
    labels = 0
    for row, (logits, states) in zip(rows, row_by_row(model, rows), strict=True):
        losses += nn.functional.cross_entropy(
            logits[:-1], torch.tensor(row["labels"][1:]), reduction="sum"
        ).item()
        labels += sum(label != -100 for label in row["labels"][1:])
        sums += torch.stack(
            [torch.sigmoid(h @ r).sum().double() for h, r in zip(states, vectors, strict=True)]
        )
        tokens += len(row["input_ids"])
    assert found.loss == pytest.approx(losses / labels, rel=1e-5)
    assert found.sigmoid == pytest.approx((sums / tokens).tolist(), rel=1e-5)


def test_untrained_vectors_leave_the_expert_where_it_is(tmp_path, experts, rows, tokenizer):
    mean = init_router(
        experts[0], rows, tokenizer, folder=tmp_path / "mean", router_init="hidden_mean"
    )
    drawn = [
        init_router(
            experts[0], rows, tokenizer, folder=tmp_path / f"{i}", router_init="random", index=i
        )
        for i in (0, 1)
    ]
    assert {routed.folder for routed in (mean, *drawn)} == {
        experts[0]
    } and mean.before == mean.after
    assert (
        not torch.equal(drawn[0].vectors, drawn[1].vectors)
        and 0.015 < drawn[0].vectors.std() < 0.025
    )
    states = row_by_row(AutoModelForCausalLM.from_pretrained(experts[0]), rows)
    sums = torch.stack([sum(h[layer].sum(0) for _, h in states) for layer in (0, 1)])
    torch.testing.assert_close(
        mean.vectors, nn.functional.normalize(sums, dim=1), rtol=1e-4, atol=1e-6
    )
    assert load_routed(tmp_path / "mean").folder == experts[0]


@pytest.fixture(scope="module")
def kept(tmp_path_factory, experts, adapters, rows, tokenizer):
    """An adapter's folder, made with the default rate, and what it was made of."""
    folder = tmp_path_factory.mktemp("kept")
    base = shutil.copytree(experts[0].parent / "base", folder / "base")
    expert = shutil.copytree(adapters[0], folder / "expert")
    settings = {"expert": expert, "rows": rows, "base": base, "steps": 1, "batch_size": 4}
    init_router(tokenizer=tokenizer, folder=folder / "out", **settings)
    return settings | {"folder": folder / "out"}


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-3},
        {"steps": 2},
        {"batch_size": 2},
        {"alpha": 0.4},
        {"router_init": "random"},
        {"detach_h": True},
        {"train_ffn": False},
        {"vector_std": 0.1},
        {"vector_learning_rate": 1e-3},
        {"seed": 1},
        {"index": 1},
        {"dtype": "bfloat16"},
        {"weight_decay": 0.1},
        {"rows": upit.make_rows(8, seed=1)},
        {"expert": "other"},
        {"base": "other"},
        {"base": "touched"},
    ],
    ids=lambda change: "-".join(map(str, change)),
)
def test_what_was_made_of_anything_else_is_not_read(
    tmp_path, kept, adapters, experts, tokenizer, change
):
    if change.get("base") == "touched":
        change = {"base": shutil.copytree(kept["base"], tmp_path / "base")}
        upit.change(
            change["base"], lambda tensors: {name: 2 * tensor for name, tensor in tensors.items()}
        )
    others = {"expert": adapters[1], "base": experts[0]}
    change = {
        name: others[name] if isinstance(value, str) and value == "other" else value
        for name, value in change.items()
    }
    with pytest.raises(ValueError, match="out already exists"):
        init_router(tokenizer=tokenizer, **kept | change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"steps": None, "epochs": -1}, "epochs must be a number above 0"),
        ({"learning_rate": -1.0}, "learning_rate must be a number above 0"),
        ({"weigth_decay": 0.1}, "Unknown settings weigth_decay. Pass some of .*weight_decay"),
        ({"optimizer": "adam"}, "optimizer must be"),
        ({"warmup_steps": 6}, "warmup_steps must be below the 6 steps of the training, but got 6"),
        ({"vector_std": -0.1}, "vector_std must be"),
        ({"vector_learning_rate": -1}, "vector_learning_rate must be"),
        ({"dtype": "half-float"}, "dtype is 'half-float'"),
        ({"router_init": "skilful"}, "router_init must be"),
        ({"alpha": 1.5}, "alpha must be from 0 to 1"),
        ({"epochs": 2}, "at most one of epochs and steps, .*epochs is 2, steps is 6"),
        ({"train_ffn": 1}, "train_ffn must be"),
    ],
)
def test_bad_settings_are_refused(tmp_path, experts, rows, tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        init_router(experts[0], rows, tokenizer, folder=tmp_path / "out", **FAST | settings)
    assert not any(tmp_path.iterdir())
