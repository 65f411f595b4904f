"""Tiny models (MoE, ESFT, UltraFuser), trained by every backend that runs here: the same losses, the same bits again."""

import copy

import pytest
import torch
import torch.nn.functional as F

from moe_runtime import backends
from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from moe_runtime.modules.trainable import split_rows
from moe_runtime.ops.expansion import dare_merge, distances, farthest_pair, gram
from moe_runtime.ops.fusion import fused_cross_entropy
from tests.support.stress import STRESS, scaled

V, H, LENGTH, BATCH = 29, 16, 8, 4
STEPS, REPEATS = scaled(5, 50), scaled(2, 20)
# fifty steps of AdamW end up to 1.4e-6 apart (CPU, torch 2.13, 2026-11-22)
TOLERANCE = 2e-5
KINDS = ("all", "esft", "fuser")
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


class Fuser(torch.nn.Module):
    """Two specialists of other sizes, fused by a gate over both their hidden states (UltraFuser)."""

    def __init__(self):
        super().__init__()
        self.embeds = torch.nn.ModuleList([torch.nn.Embedding(V, size) for size in (H, H + 5)])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(size, V, bias=False) for size in (H, H + 5)])
        self.gate = torch.nn.Linear(2 * H + 5, 2)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`ids` [B, N] -> the loss, and the gates' mean, which is not in it."""
        hidden = [embed(ids[:, :-1]) for embed in self.embeds]
        weight = self.gate(torch.cat(hidden, -1)).softmax(-1)
        heads = [head.weight for head in self.heads]
        return fused_cross_entropy(hidden, heads, weight, ids[:, 1:]), weight.mean()


def made(kind: str = "all") -> tuple[torch.nn.Module, torch.Tensor]:
    """The model and its text, which a rule makes: each token is three times the one before, and five.

    all: every expert trains | esft: experts 1 and 3, apart from the frozen stacks | fuser: UltraFuser's modules.
    """
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=H, intermediate_size=12, num_experts=4, top_k=3, balance_loss="switch", balance_loss_coef=0.02,
        initializer_range=0.2,
    )  # fmt: skip
    ids = [torch.randint(0, V, (STEPS, BATCH, 1))]
    for _ in range(LENGTH):
        ids.append((3 * ids[-1] + 5) % V)
    model = Fuser() if kind == "fuser" else Model(config)
    for layer in model.layers if kind == "esft" else ():
        split_rows(layer.experts, layer.experts.stacks(), [1, 3])
    return model, torch.cat(ids, -1)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def runs(kind: str) -> list[str]:
    """The backends that have the op of a kind; the interpreter's seconds are for the first kind, and for `make stress`."""
    op = "fused_cross_entropy" if kind == "fuser" else "moe_mlp"
    names = [name for name in BACKENDS if STRESS or kind == "all" or name != "triton"]
    return [name for name in names if backends.why_not(name, op, CPU) is None]


def train(model, optimizer, text) -> list[float]:
    found = []
    for ids in text:
        loss, _ = model(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def losses(backend: str, kind: str, monkeypatch) -> list[float]:
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model, text = made(kind)
    return train(model, optimizer_of(model), text)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_other_backends(kind, monkeypatch):
    found = {backend: losses(backend, kind, monkeypatch) for backend in runs(kind)}
    assert "torch" in found and ("triton" in found or not (STRESS or kind == "all"))
    for backend, curve in found.items():
        assert curve == pytest.approx(found["torch"], rel=TOLERANCE), backend
        assert curve[-1] < curve[0] - scaled(0, 1) * (kind == "all")


@pytest.mark.parametrize("kind, backend", [(kind, backend) for kind in KINDS for backend in runs(kind)])
def test_a_step_is_itself_again(kind, backend, monkeypatch):
    """Loss and gradients, to the last bit."""
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    model, text = made(kind)

    def step():
        model.zero_grad()
        loss, other = model(text[0])
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        return [loss.detach(), other.detach(), *grads]

    first = step()
    assert all(grad.abs().sum() > 0 for grad in first)
    for _ in range(REPEATS):
        assert all(map(torch.equal, step(), first))


@pytest.mark.parametrize("kind", ["esft", "fuser"])
def test_resumed_at_any_step_it_is_the_same_training(kind, monkeypatch):
    """Losses and weights to the last bit; what is frozen is as it was."""
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    model, text = made(kind)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer, kept, want = optimizer_of(model), [], []
    for ids in text:
        kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        want += train(model, optimizer, ids[None])
    whole = dict(model.named_parameters())
    assert bool(frozen) == (kind == "esft") and all(torch.equal(whole[name], p) for name, p in frozen.items())
    for step in range(1, STEPS):
        other, _ = made(kind)
        again = optimizer_of(other)
        other.load_state_dict(kept[step][0])
        again.load_state_dict(kept[step][1])
        assert train(other, again, text[step:]) == want[step:], step
        assert all(torch.equal(p, whole[name]) for name, p in other.named_parameters()), step


def grown(backend: str) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """UpIT's expansion of two experts by scaled(3, 50), each child of the two that differ most."""
    torch.manual_seed(0)
    base, pairs = torch.randn(7, 9), []
    experts = [base + 0.1 * torch.randn(7, 9) for _ in range(2)]
    for number in range(scaled(3, 50)):
        pairs.append(farthest_pair(distances(gram(experts, base, backend=backend))))
        a = (number % 7 + 1) / 9
        parents = [experts[place] for place in pairs[-1]]
        experts.append(
            dare_merge(*parents, base, weights=(a, 1 - a), drop=0.3, seed=7, tensor=f"up {number}", backend=backend)
        )
    return experts, pairs


def test_an_expansion_is_that_of_the_other_backends_and_itself_again():
    """The same pairs, children but for rounding; on one backend the same bits."""
    want, pairs = grown("torch")
    for backend in ("torch", "triton")[: scaled(1, 2)]:
        first, found = grown(backend)
        assert found == pairs
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(first, want, strict=True))
        for _ in range(REPEATS if backend == "torch" else 2):
            assert all(map(torch.equal, grown(backend)[0], first))
