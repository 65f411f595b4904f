"""The torch backend of `moe_runtime.ops.fusion`.

The loss is computed over blocks of the vocabulary, gradients per chunk of tokens.

Products are written to reused memory; elementwise ops run on pieces that stay in the cache. The
functions have the signatures of those in kernels/fusion.py.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_runtime.ops.workspace import scratch

ROWS = 256  # tokens per pass over the vocabulary
CACHED = 1 << 20  # logits of all specialists that fit into the cache
ON_GPU = 1 << 26  # the same on a GPU, where a launch costs more than memory


def fused_loss_forward(
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    V: int,
    ignore_index: int,
    need_score: bool,
) -> tuple:
    """Return each token's loss [T] and its gradient in the gate's weights [T, S], or else [0]."""
    T, S = gate.shape
    nll = gate.new_empty(T)
    score = gate.new_empty((T, S) if need_score else 0)
    on_cpu = gate.device.type == "cpu"
    if on_cpu:
        step = ROWS
        logits = CACHED
    else:
        step = max(ON_GPU // (S * 1024), 1)
        logits = ON_GPU
    width = max(logits // (S * step) // 64 * 64, 64)
    for start in range(0, T, step):
        rows = slice(start, start + step)
        sums = _Sums(gate[rows], need_score)
        states = [h[rows] for h in hidden]
        for first in range(0, V, width):
            parts = _parts(states, heads, slice(first, min(first + width, V)), gate)
            sums.add(parts, gate[rows], labels[rows] - first)
        valid = labels[rows] != ignore_index
        nll[rows] = torch.where(valid, sums.nll(), 0.0)
        if need_score:
            score[rows] = torch.where(valid[:, None], sums.score(), 0.0)
    return nll, score


class _Sums:
    """Online softmax of some tokens' mixed logits over blocks of the vocabulary."""

    def __init__(self, gate: Tensor, need_score: bool):
        T, S = gate.shape
        self.top = gate.new_full((T, 1), -math.inf)
        self.total = gate.new_zeros(T, 1)
        self.target = gate.new_full((T, 1), math.nan)  # stays NaN for a label that is in no block
        self.need_score = need_score
        if need_score:  # E_p[o_s] times the total, and o_s of the label
            self.mean = gate.new_zeros(S, T)
            self.targets = gate.new_full((S, T), math.nan)

    def add(self, parts: Tensor, gate: Tensor, labels: Tensor) -> None:
        """Add a block: `parts` [S, T, n] is overwritten, `labels` are relative to its first id."""
        n = parts.shape[2]
        mix = torch.mul(parts[0], gate[:, :1], out=scratch("fusion mix", parts.shape[1:], parts))
        for s in range(1, len(parts)):
            mix.addcmul_(parts[s], gate[:, s : s + 1])
        inside = ((labels >= 0) & (labels < n))[:, None]
        label = labels.clamp(0, n - 1)[:, None]
        self.target = torch.where(inside, mix.gather(1, label), self.target)
        top = torch.maximum(self.top, mix.amax(1, keepdim=True))
        shrink = torch.exp(self.top - top)
        mix.sub_(top).exp_()
        self.top = top
        self.total = self.total * shrink + mix.sum(1, keepdim=True)
        if self.need_score:
            logits = parts.gather(2, label.expand(len(parts), *label.shape))[:, :, 0]
            self.targets = torch.where(inside[:, 0], logits, self.targets)
            self.mean = self.mean * shrink[:, 0] + parts.mul_(mix).sum(2)

    def nll(self) -> Tensor:
        """Return the loss of each token [T]; NaN if its label was not seen."""
        return (self.top + self.total.log() - self.target)[:, 0]

    def score(self) -> Tensor:
        """Return its gradient in the gate's weights [T, S]: E_p[o_s] - o_s[y]."""
        return (self.mean / self.total[:, 0] - self.targets).t()


def _parts(hidden: Sequence[Tensor], heads: Sequence[Tensor], ids: slice, gate: Tensor) -> Tensor:
    """Return each specialist's logits [S, T, n] of a slice of ids, in gate's dtype."""
    T = len(hidden[0])
    n = ids.stop - ids.start
    parts = scratch("fusion parts", (len(heads), T, n), gate)
    for part, h, head in zip(parts, hidden, heads, strict=True):
        if h.dtype == part.dtype:
            torch.mm(h, head[ids].t(), out=part)
        else:
            part.copy_(torch.mm(h, head[ids].t(), out=scratch("fusion part", (T, n), h)))
    return parts


def fused_logits_backward(
    gate: Tensor,
    labels: Tensor,
    scale: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    V: int,
    ignore_index: int,
) -> tuple:
    """Return each token's loss [T], and the gradient of `scale` [T] times it in the mixed logits.

    The gradient [T, V] has hidden's dtype and is scratch memory, which the next call overwrites.
    """
    T = len(labels)
    logits, dlogits = _mixed_logits(gate, hidden, heads, V)
    nll = gate.new_empty(T)
    label = labels.clamp(0, V - 1)[:, None]
    inside = (labels >= 0) & (labels < V)
    for rows in _cached_rows(T, V, gate.device):
        block = logits[rows]
        y = label[rows]
        weight = scale[rows, None]
        target = block.gather(1, y)
        top = block.amax(1, keepdim=True)
        total = block.sub_(top).exp_().sum(1, keepdim=True)
        nll[rows] = (top + total.log() - target)[:, 0]
        block.mul_(weight / total).scatter_add_(1, y, -weight)
        if dlogits is not logits:
            dlogits[rows] = block
    nll = torch.where(inside, nll, math.nan)
    return torch.where(labels != ignore_index, nll, 0.0), dlogits


def _mixed_logits(gate: Tensor, hidden: Sequence[Tensor], heads: Sequence[Tensor], V: int) -> tuple:
    """Return the mixed logits [T, V] in gate's dtype, and memory for their gradient in hidden's.

    The two may be the same.
    """
    T = len(gate)
    logits = scratch("fusion logits", (T, V), gate)
    if hidden[0].dtype == logits.dtype:
        for s, (h, head) in enumerate(zip(hidden, heads, strict=True)):
            x = torch.mul(h, gate[:, s : s + 1], out=scratch("fusion x", h.shape, h))
            torch.addmm(
                logits,
                x,
                head[:V].t(),
                beta=min(s, 1),
                out=logits,
            )
        return logits, logits
    part = scratch("fusion dlogits", (T, V), hidden[0])
    for s, (h, head) in enumerate(zip(hidden, heads, strict=True)):
        torch.mm(h, head[:V].t(), out=part)
        for rows in _cached_rows(T, V, gate.device):
            block = logits[rows]
            weight = gate[rows, s : s + 1]
            if s == 0:
                torch.mul(part[rows], weight, out=block)
            else:
                wide = scratch("fusion wide", block.shape, block).copy_(part[rows])
                block.addcmul_(wide, weight)
    return logits, part


def _cached_rows(T: int, V: int, device: torch.device) -> Iterator[slice]:
    """Return slices of rows of V numbers that fit into the caches; all rows on a GPU."""
    step = max(T, 1)
    if device.type == "cpu":
        step = max((1 << 17) * torch.get_num_threads() // V, 1)
    return (slice(start, min(start + step, T)) for start in range(0, T, step))


def fused_hidden_backward(
    dx: Tensor,
    hidden: Tensor,
    gate: Tensor,
    dgate: Tensor,
    dhidden: Tensor | None,
    scaled: Tensor | None,
) -> None:
    """Write the gradients of one specialist's logits from `dx` [T, H] = do W.

    <dx, hidden> into `dgate` [T], gate * dx into `dhidden`, gate * hidden into `scaled` [T, H].
    """
    product = scratch("fusion product", dx.shape, gate).copy_(dx)
    torch.sum(product.mul_(hidden), 1, out=dgate)
    if dhidden is not None:
        torch.mul(dx, gate[:, None], out=dhidden)
    if scaled is not None:
        torch.mul(hidden, gate[:, None], out=scaled)
