"""One tiny language model of MoE layers, trained by every backend that runs here: the same losses, and the same bits again."""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime import backends
from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from tests.support.stress import scaled

V, H, LENGTH, BATCH = 29, 16, 8, 4
STEPS, REPEATS = scaled(5, 50), scaled(2, 20)
# fifty steps of AdamW end up to 1.4e-6 apart (CPU, torch 2.13, 2026-11-22)
TOLERANCE = 2e-5
CPU = torch.device("cpu")
BACKENDS = [name for name in ("torch", "cpp", "triton") if backends.why_not(name, "moe_mlp", CPU) is None]
pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares the backends of a CPU"),
]


class Model(torch.nn.Module):
    """Tokens to the logits of the next ones: two layers beside a residual stream, the token before mixed in."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(V, H), torch.nn.Linear(H, V)
        self.layers = torch.nn.ModuleList([MoE(config), MoE(config)])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(H), torch.nn.LayerNorm(H)])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`ids` [B, N] -> the loss, and the balance loss, which is in it."""
        x, balance = self.embed(ids[:, :-1]), 0.0
        x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            layer.records = []
            x = x + layer(norm(x))
            balance, layer.records = balance + layer.records[0].balance_loss, None
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())
        return loss + balance, balance


def made() -> tuple[Model, torch.Tensor]:
    """The model and its text, which a rule makes: each token is three times the one before, and five."""
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=H, intermediate_size=12, num_experts=4, top_k=3, balance_loss="switch", balance_loss_coef=0.02,
        initializer_range=0.2,
    )  # fmt: skip
    ids = [torch.randint(0, V, (STEPS, BATCH, 1))]
    for _ in range(LENGTH):
        ids.append((3 * ids[-1] + 5) % V)
    return Model(config), torch.cat(ids, -1)


def losses(backend: str, monkeypatch) -> list[float]:
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model, text = made()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for ids in text:
        loss, _ = model(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_losses_are_those_of_the_other_backends(monkeypatch):
    found = {backend: losses(backend, monkeypatch) for backend in BACKENDS}
    assert "torch" in found and "triton" in found
    for backend, curve in found.items():
        assert curve == pytest.approx(found["torch"], rel=TOLERANCE), backend
        assert curve[-1] < curve[0] - scaled(0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_itself_again(backend, monkeypatch):
    """Loss and gradients, to the last bit."""
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model, text = made()

    def step():
        model.zero_grad()
        loss, balance = model(text[0])
        loss.backward()
        return [loss.detach(), balance.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    first = step()
    assert all(grad.abs().sum() > 0 for grad in first)
    for _ in range(REPEATS):
        assert all(map(torch.equal, step(), first))
