"""The cases of `moe_runtime.tools.check`: small and unusual inputs of every op, and the op's
equation in float64.

A case is (leaves, run(leaves, backend), want(leaves, outputs of run)); _leaves and integers get no
gradient. `want` computes in float64 on the CPU and calls none of the checked code, only
`moe_mlp_reference` and `lora_mlp_reference`, dense loops over experts that no backend uses.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F

from moe_runtime.config import GATES, SHARED_GATES, MoEConfig
from moe_runtime.modules.ewa import average_experts_
from moe_runtime.ops import (
    balance,
    combine,
    dispatch,
    expansion,
    frozen_mlp,
    frozen_rows,
    fusion,
    grouped_gemm,
    lora,
    merging,
    packed,
    routing,
)
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import Experts
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp_reference, run_experts

SECONDS = 5.0  # duration of repeating a large layer on a GPU
# T, H, I, E, K, and how tokens choose their experts; the last one is not for the interpreter
LAYERS = (
    (0, 16, 16, 2, 2, "random"),
    (1, 33, 17, 3, 2, "random"),
    (13, 33, 17, 3, 2, "last idle"),
    (29, 48, 32, 4, 2, "one"),
    (16, 32, 16, 4, 4, "random"),
    (7, 17, 33, 1, 1, "random"),
    (37, 64, 32, 8, 3, "dropped"),
    (19, 32, 48, 5, 3, "shared"),
    (300, 144, 160, 4, 2, "random"),
)
# act, gated, limit, up_offset, interleaved; transposed stacks, strided x, recompute; odd experts
# train, by mask or separately
FORMS = (
    (("silu",), ""),
    (("gelu",), "bias"),
    (("relu2", False), "strided"),
    (("silu",), "bias apart"),
    (("gelu_tanh",), "bias mask"),
    (("relu", False), "bias transposed recompute"),
    (("quick_gelu", True, 0.7, 1.0, True), "bias transposed"),
)
LOGITS = (
    (0, 4, 2, ""),
    (1, 1, 1, ""),
    (13, 3, 3, "ties"),
    (17, 33, 5, "strided"),
    (16, 8, 3, "given"),
    (5, 16, 4, "bias"),
)


class Draw:
    """Random inputs of a dtype that are the same on every machine."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.rng = dtype, torch.Generator().manual_seed(20)

    def floats(
        self, *shape: int, scale: float = 1.0, wide: bool = False, draw: Callable = torch.randn
    ) -> torch.Tensor:
        """Return random numbers, in at least float32 if `wide`."""
        numbers = scale * draw(shape, generator=self.rng, dtype=torch.float64)
        return numbers.to(torch.promote_types(self.dtype, torch.float32) if wide else self.dtype)

    def ids(self, T: int, E: int, K: int, how: str) -> torch.Tensor:
        """Return [T, K] ids of E experts: random, last expert idle, all on one, shared (0 comes
        last), or some dropped.
        """
        ids = torch.rand(T, E - (how in ("last idle", "shared")), generator=self.rng).argsort(1)[
            :, : K - (how == "shared")
        ]
        if how == "shared":
            ids = torch.cat([ids + 1, torch.zeros(T, 1)], 1)
        if how == "one":
            ids = torch.full((T, K), E // 2)
        if how == "dropped":
            ids[::3, 0], ids[1::4, -1] = -1, E
        return ids.int()


def _experts(d: Draw, T, H, I, E, K, how, form, words, gate=None):
    """Return a case of moe_mlp, or of moe_layer if there is a gate."""
    activation = Activation(*form)
    if d.dtype.itemsize < 4:  # no limit and no kink, as rounding could move numbers across
        activation = activation._replace(limit=None, act="gelu" if form[0] == "relu" else form[0])
    if gate:
        K = min(max(K, 2), E)
        how = "shared" if gate in SHARED_GATES else ""
        words = words.replace("mask", "").replace("apart", "")
    shapes = {"up": (E, I * (1 + activation.gated), H), "down": (E, H, I)}
    leaves = {n: d.floats(*shape, scale=shape[2] ** -0.5) for n, shape in shapes.items()}
    leaves |= {f"{n}_bias": d.floats(*shape[:2]) for n, shape in shapes.items() if "bias" in words}
    odd = torch.arange(E) % 2 == 1
    apart = "apart" in words
    turned = [*shapes] if "transposed" in words else []
    leaves |= {"trainable": odd} if "mask" in words else {}
    if apart:
        leaves |= {"trainable": torch.where(odd, torch.arange(E) // 2, -1).int()} | {
            f"_{n}": leaves[n] for n in shapes
        }
        leaves |= {
            n: d.floats(max(E // 2, 1), *shape[1:], scale=shape[2] ** -0.5)
            for n, shape in shapes.items()
        }
    leaves |= {n: leaves[n].transpose(1, 2).contiguous() for n in turned}
    leaves["x"] = d.floats(*((H, T) if "strided" in words else (T, H)))
    if gate:
        leaves["router"] = d.floats(E - (gate in SHARED_GATES), H, scale=H**-0.5)
    else:
        leaves |= {"weight": d.floats(T, K, wide=True, draw=torch.rand), "idx": d.ids(T, E, K, how)}
    names = (*shapes, "up_bias", "down_bias")
    mode = "dense" if how == "shared" and "trainable" not in leaves else "group"

    def view(v):
        return (
            v
            | {n: v[n].transpose(1, 2) for n in turned}
            | ({"x": v["x"].t()} if "strided" in words else {})
        )

    def run(v, backend):
        v = view(v)
        trained = (v["up"], v["down"]) if apart else (None, None)
        experts = Experts(
            *(v.get(f"_{n}", v.get(n)) for n in names),
            v.get("trainable"),
            *trained,
            activation,
            mode,
        )
        options = {"recompute": "recompute" in words, "backend": backend}
        if gate:
            return moe_layer(v["x"], v["router"], experts, K, gate, **options)._asdict()
        return {"out": run_experts(v["x"], experts, v["weight"], v["idx"], **options)[0]}

    def want(v, got):
        v = view(v)
        found = {}
        stacks = [v.get(n) for n in names]
        if apart:
            stacks[:2] = [
                torch.stack([v[n][e // 2] if e % 2 else v[f"_{n}"][e] for e in range(E)])
                for n in shapes
            ]
        if "trainable" in v:
            stacks = [
                t if t is None else torch.where(odd.view(-1, *[1] * (t.dim() - 1)), t, t.detach())
                for t in stacks
            ]
        weight = v.get("weight")
        idx = v.get("idx")
        if gate:
            # selected by rounded logits
            logits = v["x"] @ v["router"].t()
            idx = got["topk_idx"]
            weight = _gate(logits, idx, gate)
            best = _best(got["router_logits"].double(), K, gate)
            found = {"router_logits": logits, "topk_weight": weight, "topk_idx": best}
        biases = {"gate_up_bias": stacks[2], "down_bias": stacks[3]}
        return found | {
            "out": moe_mlp_reference(
                v["x"], *stacks[:2], weight, idx, **biases, **activation._asdict()
            )
        }

    return leaves, run, want


def _best(scores, top_k: int, gate: str):
    """Return ids by descending score, ties to the lower id, a shared expert last."""
    shared = int(gate in SHARED_GATES)
    rows = [
        sorted(range(len(row)), key=lambda r: (-row[r], r))[: top_k - shared]
        for row in scores.tolist()
    ]
    return torch.tensor(
        [[r + shared for r in row] + [0] * shared for row in rows], dtype=torch.int32
    ).view(-1, top_k)


def _gate(logits, idx, gate: str):
    """Return the weights of the experts `idx`, from the equations of `moe_runtime.ops.routing`."""
    shared = int(gate in SHARED_GATES)
    idx = idx.long()[:, : idx.shape[1] - shared] - shared
    s = logits.softmax(-1).gather(1, idx)
    top = s[:, :1] if s.shape[1] else s.new_zeros(len(s), 1)  # the shared expert is alone
    weight = s
    if gate == "xft":
        weight = s.exp() / s.exp().sum(-1, keepdim=True) * top
    elif gate in ("topk_softmax", "softmax_topk_renorm"):
        weight = s / s.sum(-1, keepdim=True)
    elif gate == "sigmoid_topk":
        weight = 1 / (1 + (-logits.gather(1, idx)).exp())
    return torch.cat([weight, 1 - top], 1) if shared else weight


def _route(d: Draw, gate, T, R, k, kind):
    shared = int(gate in SHARED_GATES)
    K = k + shared
    logits = d.floats(T, R, scale=2.0)
    leaves = {
        "logits": logits.t().contiguous().t()
        if kind == "strided"
        else logits.round()
        if kind == "ties"
        else logits
    }
    if kind == "given":
        leaves |= {"idx": d.ids(T, R + shared, K, "shared" if shared else "random")}
    else:
        leaves |= {}
    leaves |= {"_bias": d.floats(R, wide=True)} if kind == "bias" and gate == "sigmoid_topk" else {}

    def run(v, backend):
        found = routing.route(v["logits"], K, gate, None, v.get("_bias"), backend, v.get("idx"))
        return {"weight": found.topk_weight, "idx": found.topk_idx}

    def want(v, got):
        scores = v["logits"].sigmoid() + v["_bias"] if "_bias" in v else v["logits"]
        idx = v["idx"] if "idx" in v else _best(scores, K, gate)
        return {"weight": _gate(v["logits"], idx, gate), "idx": idx}

    return leaves, run, want


def _dispatch(d: Draw, T, H, I, E, K, how):
    def want(v, got):
        expert = [e if 0 <= e < E else E for e in v["idx"].flatten().tolist()]
        slots = torch.tensor(sorted(range(T * K), key=lambda s: (expert[s], s)), dtype=torch.int32)
        offsets = torch.tensor(
            [sum(e < bound for e in expert) for bound in range(E + 1)], dtype=torch.int32
        )
        return {
            "expert_offsets": offsets,
            "row_token": slots // K,
            "row_slot": slots,
            "slot_row": slots.argsort().int(),
        }

    return (
        {"idx": d.ids(T, E, K, how).long()},
        lambda v, backend: dispatch.dispatch(v["idx"], E, backend)._asdict(),
        want,
    )


def _combine(d: Draw, T, H, I, E, K, how):
    def want(v, got):
        return {"out": (v["weight"][..., None] * v["y"][v["row"].long()].view(T, K, H)).sum(1)}

    leaves = {
        "y": d.floats(T * K, H),
        "weight": d.floats(T, K, wide=True),
        "row": torch.randperm(T * K, generator=d.rng).int(),
    }
    return (
        leaves,
        lambda v, backend: {"out": combine.combine(v["y"], v["weight"], v["row"], backend)},
        want,
    )


def _grouped_gemm(d: Draw, counts, N, K):
    E = len(counts)
    ends = [0, *np.cumsum(counts).tolist()]
    leaves = {
        "x": d.floats(ends[-1] + 3, K),
        "weight": d.floats(E, N, K, scale=K**-0.5),
        "offsets": torch.tensor(ends),
    }

    def run(v, backend):
        return {
            "y": grouped_gemm.grouped_gemm(v["x"], v["weight"], v["offsets"], v["bias"], backend)
        }

    def want(v, got):
        rows = [v["x"][ends[e] : ends[e + 1]] @ v["weight"][e].t() + v["bias"][e] for e in range(E)]
        return {"y": torch.cat([*rows, v["x"].new_zeros(3, N)])}  # rows of no expert

    return leaves | {"bias": d.floats(E, N)}, run, want


def _merging(d: Draw, E, N, K, T):
    """Check merge_experts, merged_linear, Eq. (5), EWA's step and, for kernels, the in-place merge
    after alpha has changed.
    """
    weight = d.floats(E, N, K, scale=K**-0.5)
    bias = d.floats(N)
    leaves = {
        "weight": weight,
        "_weight": weight,
        "alpha": d.floats(E, wide=True),
        "x": d.floats(T, K),
        "bias": bias,
    }

    def run(v, backend):
        frozen = v["_weight"]
        alpha = v["alpha"]
        found = {
            "merged": merging.merge_experts(v["weight"].transpose(1, 2), alpha, backend=backend)
        }
        found["y"] = merging.merged_linear(v["x"], frozen, alpha, None, v["bias"], backend=backend)
        found |= {
            "mixing": merging.mixing(v["logits"], 0.7),
            "ewa": average_experts_(frozen.clone(), 0.3),
        }
        for name, seen in (
            (("same", alpha), ("new", alpha + 1)) if backend in ("triton", "cuda") else ()
        ):
            found[name] = torch.zeros_like(frozen[0])
            merging.remerge_experts(found[name], frozen, alpha.detach(), seen.detach(), backend)
        return found

    def want(v, got):
        merged, again = (torch.einsum("e,enk->nk", v["alpha"], v[n]) for n in ("weight", "_weight"))
        mixing = torch.cat([torch.full((1,), 0.7 if E > 1 else 1.0), 0.3 * v["logits"].softmax(0)])
        others = (v["_weight"].sum(0) - v["_weight"]) / max(E - 1, 1)
        ewa = v["_weight"] + (0.3 * (others - v["_weight"]) if E > 1 else 0)
        found = {
            "merged": merged.t(),
            "y": v["x"] @ again.t() + v["bias"],
            "mixing": mixing,
            "ewa": ewa,
        }
        return found | (
            {"same": torch.zeros(N, K).double(), "new": again.detach()} if "new" in got else {}
        )

    return leaves | {"logits": d.floats(E - 1).float()}, run, want


def _lora(d: Draw, T, H, I, E, K, how, act, targets, dense):
    sizes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    leaves = {
        "x": d.floats(T, H),
        "weight": d.floats(T, E if dense else K, wide=True, draw=torch.rand),
    }
    leaves |= {f"_{n}": d.floats(*size, scale=size[1] ** -0.5) for n, size in sizes.items()}
    leaves |= {f"_{n}_bias": d.floats(size[0]) for n, size in sizes.items()}
    leaves |= {
        n + half: d.floats(E, 5, sizes[n][half == "a"], scale=0.3)
        for n in targets.split()
        for half in "ab"
    }
    leaves |= {} if dense else {"idx": d.ids(T, E, K, how)}

    def call(function, v, **options):
        options |= {n: lora.LoRA(v[n + "a"], v[n + "b"]) for n in targets.split()} | {
            f"{n}_bias": v[f"_{n}_bias"] for n in sizes
        }
        return {
            "out": function(
                v["x"],
                *(v[f"_{n}"] for n in sizes),
                v["weight"],
                v.get("idx"),
                scaling=0.5,
                act=act,
                **options,
            )
        }

    return (
        leaves,
        lambda v, b: call(lora.lora_mlp, v, backend=b),
        lambda v, _: call(lora.lora_mlp_reference, v),
    )


def _frozen(d: Draw, form, T, H, I, E, K, how):
    """Check frozen stacks, dense or packed, with low-rank terms."""
    sizes = {"up": (E, 2 * I, H), "down": (E, H, I)}
    leaves = {
        "x": d.floats(T, H),
        "weight": d.floats(T, K, wide=True, draw=torch.rand),
        "idx": d.ids(T, E, K, how),
    }
    stored = {}
    means = {}
    for n, (_, out, width) in sizes.items():
        leaves |= {
            f"{n}_a": d.floats(E, 5, width, scale=width**-0.5),
            f"{n}_b": d.floats(E, 5, out, scale=0.3),
        }
        stack = d.floats(E, out, width, scale=width**-0.5)
        data, scales, _ = packed.pack(stack.float(), form) if form else (stack, [], "")
        stored[n], means[n] = (
            [data, *scales],
            packed.reference(data, scales, form) if form else stack.double(),
        )

    def run(v, backend):
        parts = [[t.to(v["x"].device) for t in stored[n]] for n in sizes]
        stacks = [
            frozen_rows.Stack(data, scales, form, sizes[n])
            for n, (data, *scales) in zip(sizes, parts)
        ]
        pairs = [frozen_rows.Pair(v[f"{n}_a"], v[f"{n}_b"]) for n in sizes]
        experts = frozen_rows.FrozenExperts(*stacks, None, None, *pairs, Activation("silu"))
        return {"out": frozen_mlp.frozen_mlp(v["x"], experts, v["weight"], v["idx"], backend)[0]}

    def want(v, got):
        stacks = [means[n] + v[f"{n}_b"].transpose(1, 2) @ v[f"{n}_a"] for n in sizes]
        return {"out": moe_mlp_reference(v["x"], *stacks, v["weight"], v["idx"])}

    return leaves, run, want


def _fusion(d: Draw, T, sizes, vocabularies, frozen, reduction):
    """Check fused cross-entropy, and the mixed logits alone."""
    S = len(sizes)
    V = min(vocabularies)
    parts = {f"hidden{s}": d.floats(T, size) for s, size in enumerate(sizes)}
    parts |= {
        f"head{s}": d.floats(vocabularies[s], size, scale=size**-0.5)
        for s, size in enumerate(sizes)
    }
    leaves = {("_" + n if n[:4] in frozen else n): t for n, t in parts.items()}
    leaves |= {
        "gate": d.floats(T, S, wide=True).softmax(-1),
        "labels": torch.randint(V, (T,), generator=d.rng),
    }
    leaves["labels"][1::3] = -100

    def lists(v):
        return [
            [v.get(f"{kind}{s}", v.get(f"_{kind}{s}")) for s in range(S)]
            for kind in ("hidden", "head")
        ]

    def run(v, backend):
        loss = fusion.fused_cross_entropy(
            *lists(v), v["gate"], v["labels"], reduction=reduction, backend=backend
        )
        return {"loss": loss, "logits": fusion.fuse_logits(*lists(v), v["gate"])}

    def want(v, got):
        logits = sum(
            v["gate"][:, s, None] * (h @ head[:V].t()) for s, (h, head) in enumerate(zip(*lists(v)))
        )
        return {"loss": F.cross_entropy(logits, v["labels"], reduction=reduction), "logits": logits}

    return leaves, run, want


def _expansion(d: Draw, n, size, drop):
    """Check the Gram matrix and distances of experts, and a child of two of them."""

    def run(v, backend):
        gram, (first, *_, last) = (
            expansion.gram(v["_experts"], v["_base"], backend=backend),
            v["_experts"],
        )
        options = {
            "weights": (0.25, 0.75),
            "drop": drop,
            "seed": 7,
            "tensor": 3,
            "backend": backend,
        }
        child = expansion.dare_merge(first, last, v["_base"], **options)
        return {
            "gram": gram,
            "cosine": expansion.distances(gram),
            "l2": expansion.distances(gram, "l2"),
            "child": child,
        }

    def want(v, got):
        delta = v["_experts"] - v["_base"]
        child = v["_base"]
        bits = np.random.Philox(key=np.array([7, 3], np.uint64)).random_raw(-(-size // 4) * 4)[
            :size
        ]
        for parent, weight, number in (
            (delta[0], 0.25, bits & 0xFFFFFFFF),
            (delta[-1], 0.75, bits >> np.uint64(32)),
        ):
            kept = torch.from_numpy(number >= np.uint64(round(drop * 2**32)))
            child = child + torch.where(kept, parent * weight / (1 - drop or 1), 0.0)
        unit = F.normalize(delta, dim=1)
        cosine = (1 - unit @ unit.t()).fill_diagonal_(0)
        l2 = (delta[:, None] - delta).norm(dim=2)
        return {"gram": delta @ delta.t(), "cosine": cosine, "l2": l2, "child": child}

    return {"_experts": d.floats(n, size), "_base": d.floats(size)}, run, want


def _balance(d: Draw, T, R, k, kind, gate):
    sizes = {
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_experts": R + (gate == "xft"),
        "top_k": k + (gate == "xft"),
    }
    config = MoEConfig(**sizes, gate=gate, balance_loss=kind, balance_loss_coef=0.5)

    def run(v, backend):
        loss = balance.balance_loss(
            config, v["logits"], v["logits"].topk(k).indices + (gate == "xft")
        )
        return {"loss": loss, "top_k": balance.top_k_loss(v["logits"], k)}

    def want(v, got):
        p = v["logits"].softmax(-1)
        chosen = torch.zeros(T, R).double().scatter(1, v["logits"].topk(k).indices, 1.0)
        top_k = R * (chosen.mean(0) * p.mean(0)).sum()
        used = p * chosen / ((p * chosen).sum(1, keepdim=True) if gate == "topk_softmax" else 1)
        cv2 = sum(part.var() / part.mean() ** 2 for part in (used.sum(0), chosen.sum(0)))
        return {"loss": 0.5 * (top_k / k if kind == "switch" else cv2), "top_k": top_k}

    return {"logits": d.floats(T, R).float()}, run, want


def _repeated(d: Draw):
    """Run a large layer repeatedly; count the runs in which a result or gradient differs in bits
    from the first.
    """

    def run(v, backend):
        large = v["_x"].is_cuda and backend != "torch"  # torch's sums are atomic on a GPU
        small = (32, 32, 16, 4, 2) if backend == "triton" else (256, 128, 96, 8, 2)  # interpreted
        T, H, I, E, K = (8192, 2048, 768, 64, 8) if large else small
        first = None
        end = time.monotonic() + (SECONDS if large else 0.1 * (not v["_x"].is_cuda))
        place = {"device": v["_x"].device, "dtype": d.dtype, "requires_grad": True}
        x, up, down, weight = (
            torch.randn(shape, **place) for shape in ((T, H), (E, 2 * I, H), (E, H, I), (T, K))
        )
        idx = torch.rand(T, E, device=x.device).topk(K).indices
        runs = torch.zeros(5, dtype=torch.int64, device=x.device)
        while first is None or time.monotonic() < end:
            out = run_experts(x, Experts(up, down), weight, idx, backend=backend)[0]
            grads = torch.autograd.grad(out, (x, up, down, weight), torch.ones_like(out))
            found = [t.detach().view(torch.int8) for t in (out, *grads)]
            first = first or found
            runs += torch.stack([(a != b).any() for a, b in zip(found, first)])
        return {"runs of other bits": runs}

    return (
        {"_x": d.floats(1)},
        run,
        lambda v, got: {"runs of other bits": torch.zeros(5, dtype=torch.int64)},
    )


# name: its cases, the op whose backends it has (None: only torch), and two lists of arguments,
# tested in all combinations
CASES: dict[str, tuple[Callable, str | None, Iterable, Iterable]] = {
    "route": (_route, "route", [(gate,) for gate in GATES], LOGITS),
    "dispatch": (_dispatch, "dispatch", LAYERS, [()]),
    "combine": (_combine, "combine", LAYERS, [()]),
    "grouped_gemm": (
        _grouped_gemm,
        "grouped_gemm",
        [((0, 5),), ((17, 0, 40),), ((3,),)],
        [(16, 32), (17, 33), (1, 48)],
    ),
    "moe_mlp": (_experts, "moe_mlp", LAYERS, FORMS),
    "moe_layer": (
        _experts,
        "moe_mlp",
        LAYERS,
        [(*form, gate) for form, gate in zip(FORMS, (*GATES, "xft"))],
    ),
    "merging": (
        _merging,
        "merge_experts",
        [(1,), (3,), (8,)],
        [(1, 1, 1), (33, 17, 0), (32, 64, 29)],
    ),
    "lora_mlp": (
        _lora,
        "lora_mlp",
        LAYERS,
        [("silu", "gate up down", False), ("gelu", "up", True), ("relu2", "down", False)],
    ),
    "frozen_mlp": (
        _frozen,
        "frozen_mlp",
        [("",), ("mxfp4",), ("int8",), ("fp8_block",), ("nf4",)],
        [(9, 128, 64, 3, 2, "dropped")],
    ),
    "fused_cross_entropy": (
        _fusion,
        "fused_cross_entropy",
        [(0, (16, 33), (17, 20)), (1, (32,), (64,)), (29, (17, 48, 32), (70, 33, 64))],
        [("", "sum"), ("hiddhead", "none"), ("head", "sum"), ("hidd", "none")],
    ),
    "expansion": (_expansion, "gram", [(2,), (3,), (33,)], [(1, 0.0), (257, 0.5), (1040, 1.0)]),
    "balance": (
        _balance,
        None,
        [(13, 3, 3), (37, 16, 4)],
        [("switch", "xft"), ("cv2", "softmax_topk"), ("cv2", "topk_softmax")],
    ),
    "moe_mlp, repeated": (_repeated, "moe_mlp", [()], [()]),
}
