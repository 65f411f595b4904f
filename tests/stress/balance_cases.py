"""Cases of every balance loss and measure of load, drawn: sizes, dtypes, strides, gates, masks, collapsed and tied routers."""

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin.stats import dead_experts, expert_load, load_entropy, max_violation
from moe_runtime.ops.balance import (
    cv2_loss,
    noisy_load,
    per_layer_loss,
    pooled_loss,
    selection_mask,
    switch_loss,
    top_k_loss,
)
from moe_runtime.ops.routing import route
from tests.stress.measure import Case, Tensors
from tests.stress.op_cases import Draw
from tests.support.oracle import GATES, SHARED

KINDS = ("random", "ties", "collapsed", "sharp", "equal")


def _tokens(d: Draw) -> int:
    return d.of(1, 2, 5, 13, 37, 64)


def _logits(d: Draw, T: int, R: int) -> torch.Tensor:
    """A router's logits: of any scale, tied, or all for one expert."""
    kind = d.of(*KINDS)
    scale, layouts = {"sharp": 8.0, "equal": 0.0}.get(kind, 1.0), ("plain", "transposed", "sliced", "gaps")
    logits = d.floats(T, R, scale=scale, layouts=layouts)
    if kind == "ties":
        logits.copy_(logits.round())
    if kind == "collapsed":
        logits[:, 0] += 20
    return logits


def _routed(d: Draw, **more) -> tuple[MoEConfig, int, int]:
    """A layer's settings, its routed experts, and how many of them a token gets."""
    gate, R = d.of(*GATES), d.of(1, 2, 3, 7, 16)
    k = d.of(*(k for k in (1, 2, 5, 16) if k <= R))
    shared = int(gate in SHARED)
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_experts": R + shared, "top_k": k + shared}
    return MoEConfig(**sizes, gate=gate, **more), R, k


def _cv2(v: torch.Tensor) -> torch.Tensor:
    if len(v) < 2:
        return torch.zeros((), dtype=torch.float64)
    mean = v.sum() / len(v)
    return ((v - mean) ** 2).sum() / (len(v) - 1) / (mean**2 + 1e-10)


def _softmax(rows: torch.Tensor) -> torch.Tensor:
    e = (rows - rows.detach().amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def _chosen(ids: torch.Tensor, R: int) -> torch.Tensor:
    """Ids [T, k] -> [T, R], one by one."""
    mask = torch.zeros(len(ids), R, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        mask[t, row] = 1
    return mask


def switch_case(d: Draw) -> Case:
    """R sum_r f_r P_r of the experts that route chose."""
    config, R, k = _routed(d, balance_loss="switch")
    T = _tokens(d)
    leaves = {"logits": _logits(d, T, R)}
    ids = route(leaves["logits"], config.top_k, config.gate).topk_idx

    def product(v, backend):
        return {"loss": switch_loss(config, v["logits"], ids)}

    def oracle(v, got):
        f = _chosen(ids[:, :k] - int(config.has_shared_expert), R).sum(0) / (T * k)
        return {"loss": R * (f * _softmax(v["logits"]).sum(0) / T).sum()}

    return Case(leaves, product, oracle, T * R, scales={"dlogits": R / T}, note=f"switch {config.gate} {k} of {R}")


def cv2_case(d: Draw) -> Case:
    """Importance and load, hard or with noise, of the formula and of the official code's quirk."""
    config, R, k = _routed(d, balance_loss="cv2", load_quirk=d.flag())
    T, noisy = _tokens(d), d.flag() and d.dtype == torch.float32
    leaves = {"logits": _logits(d, T, R)}
    if noisy:
        leaves |= {"noise": torch.randn(T, R), "scale": torch.rand(T, R) + 0.1}
    ids = route(leaves["logits"], config.top_k, config.gate, leaves.get("noise")).topk_idx
    mask = _chosen(ids[:, :k] - int(config.has_shared_expert), R)
    total = leaves["logits"] + leaves["noise"] if noisy else leaves["logits"]
    order = total.topk(min(k + 1, R), -1).indices  # of what is equal but for rounding, the rounded numbers decide

    def product(v, backend):
        return {"loss": cv2_loss(config, v["logits"], ids, v.get("noise"), v.get("scale"))}

    def smooth(v):
        noisy64 = v["logits"] + v["noise"]
        inside, outside = (noisy64.gather(1, order[:, i : i + 1]) for i in (k, k - 1))
        limit = total.gather(1, order[:, k : k + 1])
        is_in = (leaves["noise"] if config.load_quirk else total) > limit
        z = (v["logits"] - torch.where(is_in, inside, outside)) / v["scale"]
        return (0.5 * (1 + torch.erf(z / math.sqrt(2)))).sum(0)

    def oracle(v, got):
        scores = v["logits"] + v["noise"] if noisy else v["logits"]
        if config.gate == "topk_softmax":
            scores = scores.masked_fill(mask == 0, float("-inf"))
        importance = (_softmax(scores) * mask).sum(0)
        load = smooth(v) if noisy and k < R else mask.sum(0)
        return {"loss": _cv2(importance) + _cv2(load)}

    scales = {"dlogits": R * R / T, "dnoise": R * R / T, "dscale": R * R / T, "loss": 1.0}
    note = f"cv2 {config.gate} {k} of {R} noisy {noisy} quirk {config.load_quirk}"
    return Case(leaves, product, oracle, T * R, scales=scales, note=note)


def noisy_load_case(d: Draw) -> Case:
    """P of each token and expert, by its own words: inside against the next one, outside against the last one inside."""
    R, T, quirk = d.of(2, 3, 7, 16), _tokens(d), d.flag()
    k = d.of(*(k for k in (1, 2, 5) if k < R))
    leaves = {"logits": torch.randn(T, R), "noise": torch.randn(T, R), "scale": torch.rand(T, R) + 0.1}
    total = leaves["logits"] + leaves["noise"]
    rows, limits = total.tolist(), (leaves["noise"] if quirk else total).tolist()
    other = torch.empty(T, R, dtype=torch.long)  # the expert that each one is measured against
    for t, row in enumerate(rows):
        best = sorted(range(R), key=lambda r: -row[r])
        for r in range(R):
            other[t, r] = best[k] if limits[t][r] > row[best[k]] else best[k - 1]

    def product(v, backend):
        return {"load": noisy_load(v["logits"], v["noise"], v["scale"], k, quirk)}

    def oracle(v, got):
        z = (v["logits"] - (v["logits"] + v["noise"]).gather(1, other)) / v["scale"]
        return {"load": (0.5 * (1 + torch.erf(z / math.sqrt(2)))).sum(0)}

    scales = dict.fromkeys(("load", "dlogits", "dnoise", "dscale"), 1.0)
    return Case(leaves, product, oracle, T, scales=scales, note=f"noisy_load {k} of {R} quirk {quirk}")


def _top_k_oracle(rows: list[torch.Tensor], ids: list[torch.Tensor], mask) -> torch.Tensor:
    """E sum_e F_e P_e over the tokens of `rows` together."""
    E = rows[0].shape[1]
    weight = [torch.ones(len(r), dtype=torch.float64) if mask is None else mask.double() for r in rows]
    tokens = max(sum(w.sum() for w in weight), torch.tensor(1.0))
    F = sum((w[:, None] * _chosen(i, E)).sum(0) for w, i in zip(weight, ids)) / tokens
    P = sum((w[:, None] * _softmax(r)).sum(0) for w, r in zip(weight, rows)) / tokens
    return E * (F * P).sum()


def top_k_case(d: Draw) -> Case:
    """Stock models' loss: of one layer, of all layers' tokens together, the mean of the layers; with and without padding."""
    form, E = d.of("one", "pooled", "per_layer"), d.of(1, 2, 3, 7, 16)
    k, T, L = d.of(*(k for k in (1, 2, 5, 16) if k <= E)), d.of(1, 0, 2, 13, 37), d.of(1, 2, 3)
    L = 1 if form == "one" else L
    leaves = {f"logits{i}": _logits(d, T, E) for i in range(L)}
    mask = d.of(None, torch.rand(T) < 0.6, torch.zeros(T), (torch.rand(T) < 0.5).long())
    ids = [leaf.float().softmax(-1).topk(k, -1).indices for leaf in leaves.values()]

    def product(v, backend):
        rows = [*v.values()]
        if form == "one":
            return {"loss": top_k_loss(rows[0], k, mask)}
        return {"loss": (pooled_loss if form == "pooled" else per_layer_loss)(rows, k, mask)}

    def oracle(v, got):
        rows = [*v.values()]
        if form == "per_layer":
            return {"loss": sum(_top_k_oracle([r], [i], mask) for r, i in zip(rows, ids)) / L}
        return {"loss": _top_k_oracle(rows, ids, mask)}

    tokens = max(1.0, float(L * T if mask is None else L * mask.sum()))
    scales = {f"dlogits{i}": E * k / tokens for i in range(L)}
    return Case(leaves, product, oracle, max(T * L * E, 1), scales=scales, note=f"{form} {k} of {E}, {L} layers")


def load_case(d: Draw) -> Case:
    """Shares, the worst one, the entropy, and who is dead, of counts of any shape."""
    shape, E = d.of((), (3,), (2, 3), (0,)), d.of(1, 2, 3, 8, 33)
    counts = torch.randint(0, d.of(1, 2, 50, 10**6), (*shape, E))

    def product(v, backend):
        found = {"load": expert_load(counts), "violation": max_violation(counts), "entropy": load_entropy(counts)}
        return found | {"dead": dead_experts(counts)}

    def oracle(v, got):
        rows = counts.reshape(math.prod(shape), E).tolist()
        shares = [[c / sum(row) if sum(row) else 0.0 for c in row] for row in rows]
        entropy = [-sum(p * math.log(p) for p in s if p) / math.log(E) if E > 1 else 1.0 for s in shares]
        numbers = {"load": shares, "violation": [max(s) * E for s in shares], "entropy": entropy}
        sizes = {"load": (*shape, E), "violation": shape, "entropy": shape, "dead": (*shape, E)}
        numbers["dead"] = [[c == 0 for c in row] for row in rows]
        kinds = {"dead": torch.bool}
        return {n: torch.tensor(v, dtype=kinds.get(n, torch.float64)).view(sizes[n]) for n, v in numbers.items()}

    return Case({}, product, oracle, E, note=f"load of {counts.tolist()}")


def mask_case(d: Draw) -> Case:
    config, R, k = _routed(d)
    ids = route(_logits(d, d.tokens(), R), config.top_k, config.gate).topk_idx

    def product(v, backend):
        return {"mask": selection_mask(config, ids)}

    def oracle(v, got):
        return {"mask": _chosen(ids[:, :k] - int(config.has_shared_expert), R).bool()}

    return Case({}, product, oracle, note=f"selection_mask {config.gate} {k} of {R}")


CASES: dict[str, Callable[[Draw], Case]] = {
    "switch": switch_case, "cv2": cv2_case, "noisy_load": noisy_load_case, "top_k": top_k_case, "load": load_case,
    "mask": mask_case,
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(name: str, data) -> tuple[Case, Tensors]:
    """A case, and the gradients of its outputs, still to be drawn."""
    return CASES[name](Draw(data.draw, data.draw(st.sampled_from(DTYPES)))), {}
