"""The mixture's loss at a vocabulary of 32,000 takes a fraction of the memory of the formula in
torch.
"""

import json

import pytest

from tests.support import limited

STEP = """
import json, sys
import torch
import torch.nn.functional as F
from moe_runtime.ops.fusion import fused_cross_entropy
from tests.support.limited import memory

which, frozen, T, V, H, S = sys.argv[1], sys.argv[2] == "True", *map(int, sys.argv[3:])

def step(T, V):
    torch.manual_seed(0)
    hidden = [torch.randn(T, H, requires_grad=not frozen) for _ in range(S)]
    heads = [torch.randn(V, H, requires_grad=not frozen) for _ in range(S)]
    gate = torch.full((T, S), 1 / S, requires_grad=True)
    labels = torch.arange(T) % V
    before = memory("VmRSS")
    if which == "ours":
        loss = fused_cross_entropy(hidden, heads, gate, labels)
    else:
        parts = (gate[:, s : s + 1] * F.linear(hidden[s], heads[s]) for s in range(S))
        loss = F.cross_entropy(sum(parts), labels)
    loss.backward()
    return before, loss.item(), gate.grad.norm().item()

step(8, 64)  # what the libraries take at their first call
before, *numbers = step(T, V)
print(json.dumps([memory("VmHWM") - before, *numbers]))
"""


def peak(which: str, frozen: bool, T=768, V=32000, H=32, S=3) -> tuple[int, list[float]]:
    """Return the bytes allocated on top of what existed before the step, and its loss and
    gradient.
    """
    done = limited.run(STEP, which, frozen, T, V, H, S)
    assert done.returncode == 0, done.stderr[-2000:]
    found, *numbers = json.loads(done.stdout)
    return found, numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen, share", [(False, 0.35), (True, 0.1)], ids=["all train", "frozen specialists"]
)
def test_peak_is_a_share_of_the_naive(frozen, share):
    ours, numbers = peak("ours", frozen)
    naive, expected = peak("naive", frozen)
    assert numbers == pytest.approx(expected, rel=1e-4)
    logits = 768 * 32000 * 4
    assert naive > 4 * logits  # at least those of each specialist and of the mixture
    assert ours <= share * naive, f"{ours >> 20} MiB, naive {naive >> 20} MiB"
