"""Separately trained rows of an expert stack: the layer computes the same, and the gradients equal
those of the whole stack.
"""

import copy

import pytest
import torch

from moe_runtime.config import MoEConfig
from moe_runtime.modules import trainable
from moe_runtime.modules.moe import MoE
from tests.hf.tiny import distance

H = 33
I = 17
T = 11
LAYERS = [
    pytest.param({}, [3, 1], id="xft"),
    pytest.param({"bias": True}, [2], id="biases"),
    pytest.param(
        {"gate": "topk_softmax"},
        [0, 3, 2, 1],
        id="all of them",
    ),
    pytest.param(
        {"gated": False, "hidden_act": "gelu", "bias": True}, [1, 2], id="not gated, biases"
    ),
    pytest.param(
        {"gate": "nonorm", "recompute": True},
        [2, 0],
        id="the shared expert, recomputed",
    ),
    pytest.param(
        {"gate": "xft", "shared": "dense"}, [1], id="a frozen shared expert that runs separately"
    ),
    pytest.param(
        {"gate": "softmax_topk", "top_k": 4},
        [3],
        id="K = E",
    ),
    pytest.param(
        {"gate": "sigmoid_topk", "num_experts": 1, "top_k": 1},
        [0],
        id="E = 1",
    ),
    pytest.param(
        {"router": "mlp", "balance_loss": "switch", "balance_loss_coef": 0.1},
        [3],
        id="a deep router",
    ),
]


def layer_of(changes: dict, dtype: torch.dtype = torch.float32) -> MoE:
    sizes = {"hidden_size": H, "intermediate_size": I, "num_experts": 4, "top_k": 3}
    torch.manual_seed(0)
    layer = MoE(
        MoEConfig(**sizes | changes),
        dtype=dtype,
    )
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3)
    return layer


def split(layer: MoE, ids: list[int], dtype: torch.dtype | None = None) -> MoE:
    trainable.split_rows(
        layer.experts,
        layer.experts.stacks(),
        ids,
        dtype,
    )
    return layer


def run(layer: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output and every gradient."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    (
        out
        * torch.linspace(
            -1,
            1,
            out.numel(),
            dtype=out.dtype,
        ).view_as(out)
    ).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    return {
        "out": out.detach(),
        "dx": x.grad,
        **grads,
    }


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(
        T,
        H,
        generator=torch.Generator().manual_seed(1),
    ).to(dtype)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("changes", "ids"), LAYERS)
def test_gradients_are_those_of_the_whole_stack(changes, ids, backend, monkeypatch, device):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    x = tokens().to(device)
    whole = layer_of(changes).to(device)
    divided = split(
        layer_of(changes).to(device),
        ids,
    )
    expected = run(whole, x)
    result = run(divided, x)
    assert expected["out"].norm() > 0
    for name in divided.experts.stacks():
        rows = expected.pop(f"experts.{name}")[ids]
        assert rows.norm() > 0
        expected[f"experts.trained_{name}"] = rows
    assert result.keys() == expected.keys()  # the frozen stacks get no gradient
    for name, value in expected.items():
        assert distance(result[name], value) < 5e-6, name


def test_rows_of_a_wider_dtype_are_cast_where_they_are_used():
    x = tokens(torch.bfloat16)
    expected = run(
        split(
            layer_of({"bias": True}, torch.bfloat16),
            [2, 1],
        ),
        x,
    )
    layer = split(
        layer_of({"bias": True}, torch.bfloat16),
        [2, 1],
        torch.float32,
    )
    result = run(layer, x)
    assert result["out"].dtype == torch.bfloat16
    assert torch.equal(
        result["out"],
        expected["out"],
    )
    for name, rows in trainable.trained_parameters(layer.experts).items():
        assert rows.dtype == torch.float32
        assert getattr(layer.experts, name).dtype == torch.bfloat16
        assert torch.equal(
            rows.grad,
            expected[f"experts.trained_{name}"].float(),
        )


def test_fold_and_drop():
    layer = layer_of({"bias": True})
    layer.experts.down_proj.requires_grad_(False)
    trains = {name: p.requires_grad for name, p in layer.named_parameters()}
    before = copy.deepcopy(layer.state_dict())
    stacks = list(layer.experts.stacks())
    for undo in (trainable.drop_rows, trainable.fold_rows):
        split(layer, [3, 1])
        experts = layer.experts
        assert torch.equal(
            experts.trained_row,
            torch.tensor(
                [-1, 1, -1, 0],
                dtype=torch.int32,
            ),
        )
        for name in stacks:
            assert not getattr(experts, name).requires_grad
        new = layer.state_dict().keys() - before.keys()
        assert new == {f"experts.trained_{name}" for name in stacks}
        for rows in trainable.trained_parameters(experts).values():
            rows.data.mul_(2)
        changed = layer(tokens())
        undo(experts)
        assert {name: p.requires_grad for name, p in layer.named_parameters()} == trains
        assert not list(layer.buffers())
        assert trainable.split_of(experts) is None
        if undo is trainable.fold_rows:
            for name in stacks:
                before[f"experts.{name}"][[3, 1]] *= 2
            assert distance(layer(tokens()), changed) < 2e-6
        for name, tensor in layer.state_dict().items():
            assert torch.equal(
                tensor,
                before[name],
            ), name
