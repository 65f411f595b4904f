"""A case of every op, drawn by hypothesis: sizes, dtypes, strides, routings and options that its
documentation allows.
"""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

from moe_runtime.ops.activation import Activation
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import INTEGERS, dispatch
from moe_runtime.ops.expansion import dare_merge, gram
from moe_runtime.ops.expert_rows import Experts
from moe_runtime.ops.frozen_mlp import frozen_mlp
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack
from moe_runtime.ops.fusion import fuse_logits, fused_cross_entropy
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.lora import lora_mlp
from moe_runtime.ops.merging import merge_experts, merged_linear
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.ops.routing import route
from tests.ops.test_fusion import IGNORED, by_the_paper
from tests.stress.measure import LAYOUTS, Case, held
from tests.support import lora
from tests.support.oracle import ACT, GATES, SHARED, choose_experts, moe_oracle

ROUTINGS = ("random", "skip", "all", "twice", "halves", "dropped", "skewed", "none")
SIZES = (1, 2, 3, 7, 16, 17, 31, 33, 48)
ACTS = tuple(ACT)


class Draw:
    """What a case is made of; `dtype` is the one that is tested."""

    def __init__(self, draw: Callable, dtype: torch.dtype):
        self.draw = draw
        self.dtype = dtype
        self.gate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        torch.manual_seed(draw(st.integers(0, 2**31 - 1)))

    def of(self, *choices):
        """One of the choices, the first where hypothesis looks for the simplest case."""
        return self.draw(st.sampled_from(choices))

    def size(self, *more: int) -> int:
        return self.of(*more, *SIZES)

    def tokens(self) -> int:
        return self.of(1, 0, 2, 5, 13, 16, 29, 37)

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def floats(
        self, *shape: int, scale=1.0, dtype=None, layouts=LAYOUTS, values=torch.randn
    ) -> torch.Tensor:
        return held((scale * values(shape)).to(dtype or self.dtype), self.of(*layouts))

    def ints(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ids in another integer dtype, which holds them, and other memory."""
        low, high = (tensor.min().item(), tensor.max().item()) if tensor.numel() else (0, 0)
        fits = [
            dtype
            for dtype in INTEGERS
            if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max
        ]
        return held(
            tensor.to(self.of(*fits)), self.of(*(name for name in LAYOUTS if name != "expanded"))
        )

    def slots(self) -> tuple[torch.Tensor, int, str]:
        """Ids [T, K] of E experts, and how they were chosen."""
        T = self.tokens()
        E = self.of(1, 2, 3, 5, 8)
        K = self.of(*(k for k in (1, 2, 3, 5, 0) if k <= E))
        routing = self.of(*ROUTINGS)
        if routing == "skewed":
            chance = 0.3 ** torch.arange(E).float()
            if T * K:
                ids = torch.multinomial(chance, T * K, replacement=True).view(T, K)
            else:
                ids = torch.zeros(T, K).long()
        elif routing == "none":
            ids = torch.full((T, K), -1)
        else:
            routing = "random" if K == 0 or (routing == "skip" and K >= E) else routing
            ids = choose_experts(T, E, K, routing).long()
        return self.ints(ids), E, routing

    @property
    def unit(self) -> float:
        return torch.finfo(self.dtype).eps


def _gate_weights(logits: torch.Tensor, ids: torch.Tensor, gate: str) -> torch.Tensor:
    """The weights [T, K] of the experts `ids`, from Eq. (1), (2) and the others of
    `moe_runtime.ops.routing`.
    """
    shared = int(gate in SHARED)
    picked = ids.long()[:, : ids.shape[1] - shared] - shared
    chosen = logits.gather(1, picked)
    p = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    s = p.gather(1, picked)
    weight = {
        "xft": lambda: s.exp() / s.exp().sum(-1, keepdim=True) * s[:, :1],
        "nonorm": lambda: s,
        "topk_softmax": lambda: s / s.sum(-1, keepdim=True),
        "softmax_topk": lambda: s,
        "softmax_topk_renorm": lambda: s / s.sum(-1, keepdim=True),
        "sigmoid_topk": lambda: 1 / (1 + (-chosen).exp()),
    }[gate]()
    return torch.cat([weight, 1 - s[:, :1]], 1) if shared else weight


def _best(scores: torch.Tensor, top_k: int, gate: str) -> torch.Tensor:
    """Ids [T, K], by score, ties to the lower id, the shared expert last."""
    shared = int(gate in SHARED)
    rows = [
        sorted(range(len(row)), key=lambda r: (-row[r], r))[: top_k - shared]
        for row in scores.tolist()
    ]
    ids = [[r + shared for r in row] + [0] * shared for row in rows]
    return torch.tensor(ids, dtype=torch.int32).view(len(rows), top_k)


def _gate(d: Draw) -> tuple[str, int, int]:
    """A gate, its number of logits, and top_k."""
    gate = d.of(*GATES)
    routed = d.of(1, 2, 3, 7, 16, 33)
    k = d.of(*(k for k in (1, 2, 3, 7, 33) if k <= routed))
    return gate, routed, k + (gate in SHARED)


def route_case(d: Draw) -> Case:
    """Free choice, among equal logits too, and choices that are given."""
    gate, routed, top_k = _gate(d)
    kind = d.of("free", "ties", "given", "noise", "bias")
    T = d.tokens()
    logits = d.floats(T, routed, scale=2.0)
    if kind == "ties":
        logits.copy_(logits.round()) if 0 not in logits.stride() else None
    leaves = {"logits": logits}
    options = {}
    ids = None
    if kind == "given":
        shared = int(gate in SHARED)
        if T:
            ids = torch.stack([torch.randperm(routed)[: top_k - shared] for _ in range(T)])
        else:
            ids = torch.zeros(0, top_k)
        ids = torch.cat([ids + shared, torch.zeros(T, 1)], 1) if T and shared else ids
        options["topk_idx"] = d.ints(ids.long())
    elif kind == "noise":
        leaves["noise"] = d.floats(T, routed)
    elif kind == "bias" and gate == "sigmoid_topk":
        options["bias"] = torch.randn(routed).to(d.gate_dtype)

    def product(v, backend):
        found = route(v["logits"], top_k, gate, v.get("noise"), backend=backend, **options)
        return {"weight": found.topk_weight, "idx": found.topk_idx}

    def oracle(v, got):
        total = v["logits"]
        if "noise" in v:  # the sum is rounded to the logits' dtype
            total = total + v["noise"]
            total = total + ((leaves["logits"] + leaves["noise"]).double() - total).detach()
        scores = leaves["logits"] if "noise" not in v else leaves["logits"] + leaves["noise"]
        if "bias" in options:
            scores = scores.to(d.gate_dtype).sigmoid() + options["bias"]
        best = _best(scores, top_k, gate) if ids is None else ids
        return {"weight": _gate_weights(total, best, gate), "idx": best.int()}

    scales = {"dlogits": 1.0, "dnoise": 1.0}
    return Case(leaves, product, oracle, routed, scales=scales, note=f"route {gate} {top_k} {kind}")


def dispatch_case(d: Draw) -> Case:
    """Every integer dtype and stride of the ids."""
    ids, E, routing = d.slots()
    names = ("expert_offsets", "row_token", "row_slot", "slot_row")

    def product(v, backend):
        return dict(zip(names, dispatch(v["ids"], E, backend), strict=True))

    def oracle(v, got):
        flat = [e if 0 <= e < E else E for e in v["ids"].reshape(-1).tolist()]
        row_slot = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
        slot_row = [row_slot.index(slot) for slot in range(len(flat))]
        offsets = [sum(e < bound for e in flat) for bound in range(E + 1)]
        tokens = [slot // max(v["ids"].shape[1], 1) for slot in row_slot]
        found = (offsets, tokens, row_slot, slot_row)
        return {
            name: torch.tensor(numbers, dtype=torch.int32)
            for name, numbers in zip(names, found, strict=True)
        }

    return Case({"ids": ids}, product, oracle, note=f"dispatch {routing}")


def grouped_gemm_case(d: Draw) -> Case:
    """Rows of none, one and many experts, rows that are nobody's, weights that lie apart."""
    E = d.of(1, 2, 3, 5)
    N = d.size()
    H = d.size()
    counts = [d.of(0, 1, 3, 17, 33) for _ in range(E)]
    R = sum(counts) + d.of(0, 1, 5)
    apart = d.flag()
    offsets = d.ints(torch.tensor([sum(counts[:e]) for e in range(E + 1)]))
    stack = d.floats(E, N, H, scale=H**-0.5)
    leaves = {"x": d.floats(R, H)} | ({} if apart else {"weight": stack})
    if d.flag():
        leaves["bias"] = d.floats(E, N)
    place = torch.full((E,), -1, dtype=torch.int32)
    if apart:
        n = d.of(1, 2, 3)
        chosen = torch.randperm(E)[:n]
        place[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        leaves["trained"] = d.floats(max(len(chosen), 1), N, H, scale=H**-0.5)

    def product(v, backend):
        options = {"trainable": place, "trained": v["trained"]} if apart else {}
        return {
            "y": grouped_gemm(
                v["x"], v.get("weight", stack), offsets, v.get("bias"), backend, **options
            )
        }

    def oracle(v, got):
        bounds = offsets.tolist()
        rows = []
        for e in range(E):
            frozen = apart and place[e] < 0
            at = slice(bounds[e], bounds[e + 1])
            if apart and not frozen:
                weight = v["trained"][place[e]]
            else:
                weight = v.get("weight", stack.double())[e]
            y = v["x"][at] @ weight.t()
            if "bias" in v:
                y = y + (v["bias"][e].detach() if frozen else v["bias"][e])
            rows.append(y)
        return {"y": torch.cat([*rows, 0 * v["x"][bounds[-1] :] @ stack[0].double().t()])}

    return Case(
        leaves, product, oracle, max(R, N, H), d.unit, note=f"grouped_gemm {counts} of {R} rows"
    )


def combine_case(d: Draw) -> Case:
    T = d.tokens()
    K = d.of(1, 2, 3, 7, 0)
    H = d.size()
    slot_row = d.ints(torch.randperm(T * K))
    leaves = {"y": d.floats(T * K, H), "weight": d.floats(T, K, dtype=d.gate_dtype)}
    if d.flag() and T * K:
        slot_row = slot_row.view(T, K) if slot_row.is_contiguous() else slot_row.reshape(T, K)

    def product(v, backend):
        return {"out": combine(v["y"], v["weight"], slot_row, backend)}

    def oracle(v, got):
        rows = v["y"][slot_row.reshape(-1).long()].view(T, K, H)
        return {"out": (v["weight"][..., None] * rows).sum(1)}

    return Case(leaves, product, oracle, max(K, H), note="combine")


def _experts(d: Draw, E: int) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights of E experts, and the form of what is between their products."""
    H = d.size()
    I = d.size()
    gated = d.flag()
    Z = 2 * I if gated else I
    form = {"act": d.of(*ACTS), "gated": gated}
    if gated and d.flag():
        form |= {"interleaved": d.flag(), "up_offset": d.of(0.0, 1.0)}
        # a number that rounds to the limit has a gradient, one beyond has none: not in dtypes that
        # round many to it
        if d.dtype in (torch.float32, torch.float64):
            form["limit"] = d.of(None, 0.7)
    leaves = {"up": d.floats(E, Z, H, scale=H**-0.5), "down": d.floats(E, H, I, scale=2 * I**-0.5)}
    if d.flag():
        leaves |= {"up_bias": d.floats(E, Z), "down_bias": d.floats(E, H)}
    return leaves, form


def moe_mlp_case(d: Draw) -> Case:
    """All forms; frozen experts, and experts that lie apart."""
    ids, E, routing = d.slots()
    leaves, form = _experts(d, E)
    H, I = leaves["down"].shape[1:]
    T, K = ids.shape
    leaves |= {"x": d.floats(T, H), "weight": d.floats(T, K, dtype=d.gate_dtype, values=torch.rand)}
    kind = d.of("all", "frozen", "apart")
    recompute = d.flag()
    stacks = {}
    place = torch.full((E,), -1, dtype=torch.int32)
    mask = torch.rand(E) < 0.5
    if kind == "apart":
        stacks = {name: leaves.pop(name) for name in ("up", "down")}
        place[torch.randperm(E)[:2]] = torch.arange(min(E, 2), dtype=torch.int32)
        leaves |= {
            f"{n}_trained": d.floats(min(E, 2), *t.shape[1:], scale=0.3) for n, t in stacks.items()
        }

    def product(v, backend):
        options = {"frozen": {"trainable": mask}, "all": {}}.get(kind)
        if kind == "apart":
            options = {"trainable": place, "trained": (v["up_trained"], v["down_trained"])}
        up, down = (v.get(name, stacks.get(name)) for name in ("up", "down"))
        out = moe_mlp(
            v["x"],
            up,
            down,
            v["weight"],
            ids,
            gate_up_bias=v.get("up_bias"),
            down_bias=v.get("down_bias"),
            recompute=recompute,
            backend=backend,
            **form,
            **options,
        )
        return {"out": out}

    def oracle(v, got):
        trains = {"frozen": mask, "apart": place >= 0}.get(kind, torch.ones(E, dtype=torch.bool))

        def stack(name):
            if name in stacks:
                part = v[f"{name}_trained"]
                return torch.stack(
                    [part[p] if p >= 0 else stacks[name][e].double() for e, p in enumerate(place)]
                )
            if name not in v:
                return None
            whole = v[name]
            return torch.where(trains.view(E, *[1] * (whole.dim() - 1)), whole, whole.detach())

        biases = {name: stack(name) for name in ("up_bias", "down_bias")}
        return {
            "out": moe_oracle(
                v["x"], stack("up"), stack("down"), v["weight"], ids, **biases, **form
            )
        }

    note = f"moe_mlp {routing} {kind} {form}{' recompute' if recompute else ''}"
    return Case(leaves, product, oracle, max(H, 2 * I, T * K), d.unit, note=note)


def moe_layer_case(d: Draw) -> Case:
    """Gradients that come through the logits and the weights too."""
    gate, routed, top_k = _gate(d)
    leaves, form = _experts(d, routed + (gate in SHARED))
    H, I = leaves["down"].shape[1:]
    T = d.tokens()
    recompute = d.flag()
    leaves |= {"x": d.floats(T, H), "router": d.floats(routed, H, scale=2 * H**-0.5)}
    options = {"recompute": recompute, **form}

    def product(v, backend):
        experts = Experts(
            v["up"], v["down"], v.get("up_bias"), v.get("down_bias"), activation=Activation(**form)
        )
        found = moe_layer(
            v["x"], v["router"], experts, top_k, gate, recompute=recompute, backend=backend
        )
        return found._asdict()

    def oracle(v, got):
        logits = v["x"] @ v["router"].t()
        # of numbers that are equal but for rounding, the product's own decide
        ids = _best(got["router_logits"], top_k, gate)
        weight = _gate_weights(logits, ids, gate)
        biases = {"up_bias": v.get("up_bias"), "down_bias": v.get("down_bias")}
        out = moe_oracle(v["x"], v["up"], v["down"], weight, ids, **biases, **form)
        return {"out": out, "router_logits": logits, "topk_weight": weight, "topk_idx": ids}

    scales = dict.fromkeys(("drouter", "dx"), 1.0)
    note = f"moe_layer {gate} {top_k} {options}"
    return Case(leaves, product, oracle, max(H, 2 * I, T * top_k), d.unit, scales, note)


def merge_experts_case(d: Draw) -> Case:
    shape = d.of((7, 33), (1,), (), (0, 5), (2, 3, 5), (129,), (40, 130))
    E = d.of(1, 2, 3, 8, 11)
    leaves = {"weight": d.floats(E, *shape), "alpha": d.floats(E, dtype=d.gate_dtype)}

    def product(v, backend):
        return {"merged": merge_experts(v["weight"], v["alpha"], backend=backend)}

    def oracle(v, got):
        return {"merged": sum(v["alpha"][e] * v["weight"][e] for e in range(E))}

    return Case(leaves, product, oracle, max(E, leaves["weight"][0].numel()), note="merge_experts")


def merged_linear_case(d: Draw) -> Case:
    """Frozen experts; the merged weight given or made."""
    E = d.of(1, 2, 3, 8)
    N = d.size()
    K = d.size()
    shape = d.of((5, K), (0, K), (K,), (2, 3, K), (37, K))
    weight = d.floats(E, N, K, scale=K**-0.5)
    bias = d.flag()
    leaves = {"x": d.floats(*shape), "alpha": d.floats(E, dtype=d.gate_dtype)}
    leaves |= {"bias": d.floats(N)} if bias else {}
    given = d.flag()

    def product(v, backend):
        merged = merge_experts(weight, v["alpha"].detach(), backend=backend) if given else None
        return {
            "y": merged_linear(v["x"], weight, v["alpha"], merged, v.get("bias"), backend=backend)
        }

    def oracle(v, got):
        merged = torch.einsum("e,enk->nk", v["alpha"], weight.double())
        return {"y": v["x"] @ merged.t() + v.get("bias", 0)}

    return Case(
        leaves,
        product,
        oracle,
        max(N * K, leaves["x"].numel()),
        d.unit,
        note=f"merged_linear {given}",
    )


def lora_mlp_case(d: Draw) -> Case:
    """Pairs of some projections; every expert chosen, or some."""
    ids, E, routing = d.slots()
    (T, K), H, I, rank = ids.shape, d.size(), d.size(), d.of(1, 2, 5, 8, 17)
    dense = d.flag()
    act = d.of(*ACTS)
    scaling = d.of(1.5, 0.25)
    targets = d.of(lora.NAMES, ("gate",), ("up",), ("down",), ("gate", "down"), ("up", "gate"))
    leaves = {
        "x": d.floats(T, H),
        "topk_weight": d.floats(T, E if dense else K, dtype=d.gate_dtype, values=torch.rand),
    }
    for name in targets:
        size, out = (I, H) if name == "down" else (H, I)
        leaves[f"{name}_a"] = d.floats(E, rank, size, scale=size**-0.5)
        leaves[f"{name}_b"] = d.floats(E, rank, out, scale=rank**-0.5)
    sizes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    base = {name: d.floats(*shape, scale=shape[1] ** -0.5) for name, shape in sizes.items()}
    if d.flag():
        base |= {"gate_bias": d.floats(I), "up_bias": d.floats(I), "down_bias": d.floats(H)}
    case = lora.Case(leaves, base, None if dense else ids, torch.empty(0), scaling, act)
    options = {"recompute": d.flag()}

    def product(v, backend):
        args, kwargs = lora.arguments(case, v, None, "cpu")
        return {"out": lora_mlp(*args, **kwargs, **options, backend=backend)}

    def oracle(v, got):
        args, kwargs = lora.arguments(case, v, torch.float64, "cpu")
        return {"out": lora.oracle(*args, **kwargs)}

    note = f"lora_mlp {routing if not dense else 'dense'} {act} {targets} {options}"
    return Case(leaves, product, oracle, max(H, I, T, E * rank), d.unit, note=note)


def frozen_mlp_case(d: Draw) -> Case:
    """Frozen stacks, with low-rank terms on one of them or both."""
    ids, E, routing = d.slots()
    leaves, form = _experts(d, E)
    stacks = {name: leaves.pop(name) for name in ("up", "down")}
    rank = d.of(1, 3, E, 16)
    (T, K), (H, I), adapted = (
        ids.shape,
        stacks["down"].shape[1:],
        d.of(("up", "down"), ("up",), ("down",)),
    )
    for name in adapted:
        out, into = stacks[name].shape[1:]
        leaves |= {
            f"{name}_a": d.floats(E, rank, into, scale=into**-0.5),
            f"{name}_b": d.floats(E, rank, out, scale=rank**-0.5),
        }
    leaves |= {"x": d.floats(T, H), "weight": d.floats(T, K, dtype=d.gate_dtype, values=torch.rand)}

    def product(v, backend):
        pairs = [
            Pair(v[f"{name}_a"], v[f"{name}_b"]) if name in adapted else None for name in stacks
        ]
        held = [Stack.dense(stack) for stack in stacks.values()]
        experts = FrozenExperts(
            *held, v.get("up_bias"), v.get("down_bias"), *pairs, Activation(**form)
        )
        return {"out": frozen_mlp(v["x"], experts, v["weight"], ids, backend)[0]}

    def oracle(v, got):
        whole = {name: stack.double() for name, stack in stacks.items()}
        whole |= {
            name: whole[name] + v[f"{name}_b"].transpose(1, 2) @ v[f"{name}_a"] for name in adapted
        }
        biases = {name: v.get(name) for name in ("up_bias", "down_bias")}
        return {
            "out": moe_oracle(
                v["x"], whole["up"], whole["down"], v["weight"], ids, **biases, **form
            )
        }

    note = f"frozen_mlp {routing} {adapted} {form}"
    return Case(leaves, product, oracle, max(H, 2 * I, T * K), d.unit, note=note)


def gram_case(d: Draw) -> Case:
    """A stack, or tensors one by one; with a base and without."""
    n = d.of(1, 2, 3, 8, 33, 64)
    shape = d.of((7,), (1,), (3, 11), (0,), (257,), (16, 129))
    leaves = {"experts": d.floats(n, *shape)} | ({"base": d.floats(*shape)} if d.flag() else {})
    apart = d.flag()

    def product(v, backend):
        experts = [*v["experts"]] if apart else v["experts"]
        return {"gram": gram(experts, v.get("base"), backend=backend)}

    def oracle(v, got):
        rows = (v["experts"] - v.get("base", 0)).detach().reshape(n, -1)
        return {"gram": rows @ rows.t()}

    return Case(
        leaves, product, oracle, int(np.prod(shape)), note=f"gram {'apart' if apart else 'stack'}"
    )


def dare_merge_case(d: Draw) -> Case:
    """All at once, or in two parts."""
    shape = d.of((7,), (1,), (3, 11), (0,), (257,), (16, 65))
    names = ("first", "second", "base") if d.flag() else ("first", "second")
    leaves = {name: d.floats(*shape) for name in names}
    drop = d.of(0.5, 0.0, 0.9, 1.0, 1 / 3)
    rescale = d.flag()
    weights = d.of((0.5, 0.5), (0.25, 0.75), (1.0, 0.0))
    seed = d.of(0, 7, 2**63 - 1)
    tensor = d.of(0, 3, 2**62 + 1)
    P = leaves["first"].numel()
    cut = d.of(0, *range(4, P, 4)) if P < 300 else 128

    def product(v, backend):
        def part(start, stop):
            mine = [v[name].reshape(-1)[start:stop] for name in names]
            return dare_merge(
                *mine,
                weights=weights,
                drop=drop,
                rescale=rescale,
                seed=seed,
                tensor=tensor,
                start=start,
                backend=backend,
            )

        if cut == 0:
            options = {
                "weights": weights,
                "drop": drop,
                "rescale": rescale,
                "seed": seed,
                "tensor": tensor,
            }
            return {"child": dare_merge(*v.values(), **options, backend=backend)}
        return {"child": torch.cat([part(0, cut), part(cut, P)]).view(shape)}

    def oracle(v, got):
        bits = np.random.Philox(key=np.array([seed, tensor], np.uint64)).random_raw(-(-P // 4) * 4)[
            :P
        ]
        low = bits & 0xFFFFFFFF
        high = bits >> np.uint64(32)
        scale = 1.0 if drop == 1 or not rescale else 1 / (1 - drop)
        base = v["base"].detach() if "base" in v else torch.zeros(shape, dtype=torch.float64)
        child = base
        for name, weight, number in (("first", weights[0], low), ("second", weights[1], high)):
            kept = torch.from_numpy(number.astype(np.int64) >= round(drop * 2**32)).view(shape)
            child = child + torch.where(kept, weight * scale * (v[name].detach() - base), 0)
        return {"child": child}

    return Case(leaves, product, oracle, 2, note=f"dare_merge drop {drop} cut {cut}")


def fused_cross_entropy_case(d: Draw) -> Case:
    """Specialists that train, and frozen ones whose gate alone does."""
    T = d.tokens()
    S = d.of(1, 2, 3)
    sizes = [d.size() for _ in range(S)]
    vocabularies = [d.of(1, 2, 17, 33, 70) for _ in range(S)]
    V = min(vocabularies)
    kind = d.of("all", "gate", "heads", "hidden")
    labels = torch.randint(0, V, (T,))
    labels[torch.rand(T) < d.of(0.25, 0.0)] = IGNORED
    labels[:1] = V - 1
    reduction = d.of("sum", "none") if T == 0 else d.of("sum", "none", "mean")
    parts = {f"hidden{s}": d.floats(T, size) for s, size in enumerate(sizes)}
    parts |= {
        f"heads{s}": d.floats(V, sizes[s], scale=sizes[s] ** -0.5)
        for s, V in enumerate(vocabularies)
    }
    frozen = {n: t for n, t in parts.items() if kind != "all" and not n.startswith(kind)}
    leaves = {n: t for n, t in parts.items() if n not in frozen}
    leaves["gate"] = held((2 * torch.randn(T, S)).softmax(-1).to(d.gate_dtype), d.of(*LAYOUTS))

    def arguments(v, dtype):
        every = {n: t.to(dtype) for n, t in frozen.items()} | v
        return (
            [every[f"hidden{s}"] for s in range(S)],
            [every[f"heads{s}"] for s in range(S)],
            v["gate"],
            labels,
        )

    def product(v, backend):
        loss = fused_cross_entropy(*arguments(v, d.dtype), reduction=reduction, backend=backend)
        return {"loss": loss, "logits": fuse_logits(*arguments(v, d.dtype)[:3])}

    def oracle(v, got):
        hidden, heads, gate, _ = arguments(v, torch.float64)
        logits = sum(gate[:, s : s + 1] * (hidden[s] @ heads[s][:V].t()) for s in range(S))
        return {"loss": by_the_paper(hidden, heads, gate, labels, reduction), "logits": logits}

    scales = {f"d{name}": 1.0 for name in leaves}
    note = f"fused_cross_entropy {reduction} {kind} labels {labels.tolist()}"
    return Case(leaves, product, oracle, max(*sizes, V, T), d.unit, scales, note)


# what `backends.OPS` names, and the op of it that decides the backend of the others
CASES: dict[str, tuple[str, Callable[[Draw], Case]]] = {
    "route": ("route", route_case),
    "dispatch": ("dispatch", dispatch_case),
    "grouped_gemm": ("grouped_gemm", grouped_gemm_case),
    "combine": ("combine", combine_case),
    "moe_mlp": ("moe_mlp", moe_mlp_case),
    "moe_layer": ("moe_mlp", moe_layer_case),
    "merge_experts": ("merge_experts", merge_experts_case),
    "merged_linear": ("merge_experts", merged_linear_case),
    "frozen_mlp": ("frozen_mlp", frozen_mlp_case),
    "lora_mlp": ("lora_mlp", lora_mlp_case),
    "gram": ("gram", gram_case),
    "dare_merge": ("dare_merge", dare_merge_case),
    "fused_cross_entropy": ("fused_cross_entropy", fused_cross_entropy_case),
}
