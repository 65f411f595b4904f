"""moe_runtime.methods.upit.router: Eq. (1) and (2), what trains and what must not, saved files,
resuming, processes.
"""

import contextlib
import shutil

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io.files import read_json
from moe_runtime.methods.upit.router import init_router, load_routed
from moe_runtime.methods.upit.vectors import RoutingVectors, routing_loss
from tests.support import upit
from tests.support.checkpoints import assert_equal

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
    return pair_collator(tokenizer)(list(rows.select_columns(["input_ids", "labels"]))[:4])


@contextlib.contextmanager
def inputs_of_mlps(model):
    """The list to which each MLP appends its input."""
    inputs = []
    handles = []
    for layer in model.model.layers:
        hook = layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        handles.append(hook)
    yield inputs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.0, 1.0])
def test_the_loss_is_equation_1(experts, rows, tokenizer, alpha):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    batch = batch_of(rows, tokenizer)
    vectors = torch.randn(2, 32)
    with inputs_of_mlps(model) as states:
        before = model(**batch)
    mask = batch["attention_mask"].bool()
    losses = []
    for h, vector in zip(states, vectors, strict=True):
        losses.append(-torch.sigmoid(h[mask].double() @ vector.double()).log().mean())
    expected = alpha * before.loss + (1 - alpha) * sum(losses) / 2
    routing = RoutingVectors(model, vectors, alpha)
    out = model(**batch)
    assert torch.equal(out.logits, before.logits)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert out.loss.item() == pytest.approx(
        (out.lm_loss + out.aux_loss).item(),
        rel=1e-6,
    )
    assert out.lm_loss.item() == pytest.approx(
        alpha * before.loss.item(),
        rel=1e-6,
    )
    routing.close()
    assert model(**batch).loss == before.loss
    assert not [name for name in model.state_dict() if "routing" in name]


def test_the_routing_loss_reaches_the_mlps_below(experts, rows, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    routing = RoutingVectors(
        model,
        torch.randn(2, 32),
        alpha=0.0,
    )
    routing.train_only()
    model(**batch_of(rows, tokenizer)).loss.backward()
    first, last = (mlp.down_proj.weight.grad.norm() for mlp in routing.mlps)
    assert first > 1e-4
    assert last == 0  # the last MLP comes after the last h
    for mlp in routing.mlps:
        assert mlp.routing_vector.grad.norm() > 1e-4


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_no_gradient(experts, rows, tokenizer, autocast):
    batch = batch_of(rows, tokenizer)

    def gradients(checkpointing: bool):
        model = AutoModelForCausalLM.from_pretrained(experts[0]).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        RoutingVectors(
            model,
            torch.ones(2, 32) / 8,
        ).train_only()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**batch)
        assert out.aux_loss.dtype == torch.float32
        out.loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected = gradients(False)
    assert len(expected) == 8
    assert_equal(gradients(True), expected)


def test_padding_does_not_count():
    first = torch.tensor([[1.0, -2.0, 50.0], [0.5, 40.0, 60.0]])
    second = torch.tensor([[3.0, 0.0, -70.0], [-1.0, 1e4, -1e4]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    counted = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, -1.0])
    expected = torch.log1p(torch.exp(-counted)).mean()
    torch.testing.assert_close(
        routing_loss([first, second], mask),
        expected,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_learn_and_the_backbone_stays(tmp_path, experts, rows, tokenizer, dtype):
    out = tmp_path / "out"
    settings = FAST | {"weight_decay": 0.1, "dtype": dtype}
    routed = init_router(
        experts[0],
        rows,
        tokenizer,
        folder=out,
        **settings,
    )
    for before, after in zip(
        routed.before.sigmoid,
        routed.after.sigmoid,
        strict=True,
    ):
        assert after > before
    assert routed.after.loss < routed.before.loss
    assert routed.vectors.shape == (2, 32)
    assert routed.vectors.dtype == torch.float32
    assert list(tmp_path.iterdir()) == [out]
    old = upit.tensors_of(experts[0])
    new = upit.tensors_of(routed.folder)
    assert new.keys() == old.keys()
    for name, tensor in new.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(
            tensor,
            old[name].to(tensor.dtype),
        ) == (".mlp." not in name)
    # what was trained is saved
    read = load_routed(out)
    assert torch.equal(read.vectors, routed.vectors)
    for name in ("before", "after", "steps", "folder"):
        assert getattr(read, name) == getattr(routed, name)
    model = AutoModelForCausalLM.from_pretrained(routed.folder)
    measured = RoutingVectors(model, routed.vectors).measure(
        rows,
        tokenizer,
        4,
    )
    if dtype == "float32":
        bound = 1e-6
    else:
        bound = 1e-2
    assert measured.loss == pytest.approx(routed.after.loss, rel=bound)
    assert measured.sigmoid == pytest.approx(routed.after.sigmoid, rel=bound)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16],
    ids=str,
)
@pytest.mark.parametrize(
    "bf16",
    [False, True],
    ids=["plain", "autocast"],
)
def test_a_narrow_expert_trains_as_a_wide_one(tmp_path, tokenizer, rows, dtype, bf16):
    """At the paper's learning rate, updates of narrow weights would round to nothing, or the
    weights would become NaN.
    """
    narrow = upit.save_experts(
        tmp_path / "narrow",
        tokenizer,
        1,
        dtype=dtype,
    )[0]
    wide = tmp_path / "wide"
    AutoModelForCausalLM.from_pretrained(narrow, dtype="float32").save_pretrained(wide)
    settings = {"steps": 8, "batch_size": 4, "bf16": bf16}
    a = init_router(
        narrow,
        rows,
        tokenizer,
        folder=tmp_path / "a",
        **settings,
    )
    b = init_router(
        wide,
        rows,
        tokenizer,
        folder=tmp_path / "b",
        **settings,
    )
    assert torch.equal(a.vectors, b.vectors)
    assert a.after == b.after
    assert a.after.loss < a.before.loss
    result = upit.tensors_of(a.folder)
    rounded = {name: t.to(dtype) for name, t in upit.tensors_of(b.folder).items()}
    assert_equal(result, rounded)
    shares = []
    for name, tensor in upit.tensors_of(narrow).items():
        if ".mlp." in name:
            shares.append((result[name] != tensor).double().mean())
    assert sum(shares) / len(shares) > (0.5 if dtype == torch.float16 else 0.2)
    config = read_json(a.folder / "config.json")
    assert f"torch.{config['dtype']}" == str(dtype)


def test_vectors_may_have_a_rate_of_their_own(tmp_path, experts, rows, tokenizer):
    def trained(name: str, **settings):
        settings = {"steps": 2, "batch_size": 8, "learning_rate": 1e-4} | settings
        return init_router(
            experts[0],
            rows,
            tokenizer,
            folder=tmp_path / name,
            **settings,
        )

    same = trained("same")
    faster = trained("faster", vector_learning_rate=1e-2)
    # AdamW's first steps are as large as the learning rate, and the vectors start at 0
    assert same.vectors.abs().max() < 2.1e-4
    assert 1e-2 < faster.vectors.abs().max() < 2.1e-2
    assert same.before.sigmoid == [0.5, 0.5]
    assert sum(faster.after.sigmoid) > sum(same.after.sigmoid) > 1
    # the expert keeps its own learning rate
    key = "model.layers.1.mlp.up_proj.weight"
    old = upit.tensors_of(experts[0])[key]
    for name in ("same", "faster"):
        assert 0 < (upit.tensors_of(tmp_path / name)[key] - old).abs().max() < 2.1e-4


def test_of_adapters_their_mlp_pairs_train(tmp_path, adapters, rows, tokenizer):
    routed = init_router(
        adapters[0],
        rows,
        tokenizer,
        folder=tmp_path / "out",
        **FAST,
    )
    assert sum(routed.after.sigmoid) > sum(routed.before.sigmoid)
    assert routed.after.loss < routed.before.loss
    old = upit.tensors_of(adapters[0])
    new = upit.tensors_of(routed.folder)
    assert new.keys() == old.keys()
    for name, tensor in new.items():
        assert torch.equal(tensor, old[name]) == (".mlp." not in name)
    again = init_router(
        routed.folder,
        rows,
        tokenizer,
        folder=tmp_path / "again",
        **FAST,
    )
    assert again.before.loss == pytest.approx(routed.after.loss, rel=1e-5)


@torch.no_grad()
def states_and_loss(expert, rows) -> tuple[list[torch.Tensor], float]:
    """Return h [tokens, H] of each layer and the mean loss, computed one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(expert)
    states = [[], []]
    losses = []
    for row in rows:
        with inputs_of_mlps(model) as inputs:
            logits = model(torch.tensor([row["input_ids"]])).logits[0]
        for layer, h in enumerate(inputs):
            states[layer].append(h[0])
        labels = torch.tensor(row["labels"][1:])
        loss = nn.functional.cross_entropy(
            logits[:-1],
            labels,
            reduction="none",
        )
        losses.append(loss[labels != -100])
    return [torch.cat(rows) for rows in states], torch.cat(losses).mean().item()


def test_measured_numbers_are_means_over_tokens(experts, rows, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(experts[0])
    vectors = torch.randn(2, 32) / 4
    measured = RoutingVectors(model, vectors).measure(
        rows,
        tokenizer,
        3,
    )
    states, loss = states_and_loss(experts[0], rows)
    assert measured.loss == pytest.approx(loss, rel=1e-5)
    for h, vector, share in zip(states, vectors, measured.sigmoid, strict=True):
        assert share == pytest.approx(
            torch.sigmoid(h @ vector).mean().item(),
            rel=1e-5,
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory, experts, adapters, rows, tokenizer):
    """An adapter's folder and what it was made from, with the default learning rate."""
    folder = tmp_path_factory.mktemp("made")
    base = shutil.copytree(
        experts[0].parent / "base",
        folder / "base",
    )
    expert = shutil.copytree(
        adapters[0],
        folder / "expert",
    )
    settings = {"expert": expert, "rows": rows, "base": base, "steps": 1, "batch_size": 4}
    settings |= {"tokenizer": tokenizer, "folder": folder / "out"}
    init_router(**settings)
    return settings


def test_results_with_other_inputs_are_not_reused(tmp_path, made, adapters, experts):
    touched = shutil.copytree(
        made["base"],
        tmp_path / "base",
    )
    upit.change(
        touched,
        lambda tensors: {name: 2 * t for name, t in tensors.items()},
    )
    for change in (
        {"learning_rate": 1e-3},
        {"steps": 2},
        {"batch_size": 2},
        {"alpha": 0.4},
        {"vector_learning_rate": 1e-3},
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"weight_decay": 0.1},
        {"rows": upit.make_rows(8, seed=1)},
        {"expert": adapters[1]},
        {"base": experts[0]},
        {"base": touched},
    ):
        with pytest.raises(ValueError, match="out already exists"):
            init_router(**made | change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weigth_decay": 0.1}, "weigth_decay is not a valid key. Use any of .*weight_decay"),
        ({"warmup_steps": 6}, "warmup_steps must be below the 6 steps"),
        ({"dtype": "half-float"}, "dtype must be"),
        ({"keep_best": True}, "keep_best and evaluations require held-out examples"),
        ({"alpha": 1.5}, "alpha must be from 0 to 1"),
        ({"epochs": 2}, "epochs is 2.* and steps is 6. Set exactly one"),
    ],
)
def test_bad_settings_are_refused(tmp_path, experts, rows, tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        init_router(
            experts[0],
            rows,
            tokenizer,
            folder=tmp_path / "out",
            **FAST | settings,
        )
    assert not list(tmp_path.iterdir())
