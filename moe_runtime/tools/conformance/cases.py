"""The cases of every op: `make(draw)` returns inputs, the call and the equation.

The inputs that get gradients are `leaves`, the others `fixed`. `product` calls the op on all of
them, by name; `equation` computes the same from the leaves in float64.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from moe_runtime.config import MoEConfig
from moe_runtime.modules import ewa
from moe_runtime.ops import (
    balance,
    combine,
    dispatch,
    expansion,
    frozen_mlp,
    fusion,
    grouped_gemm,
    lora,
    merging,
    moe_layer,
    moe_mlp,
    packed,
    routing,
)
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack
from moe_runtime.tools.conformance import oracle
from moe_runtime.tools.conformance.draw import Draw
from moe_runtime.tools.conformance.measure import Case, Tensors

PROJECTIONS = ("gate", "up", "down")
STACKS = ("up", "down", "up_bias", "down_bias")


def draw_gate(d: Draw) -> tuple[str, int, int, int]:
    """Return a gate, its number of logits, top_k with the shared expert, and how many it shares."""
    gate = d.of(*oracle.GATES)
    routed = d.of(1, 2, 3, 7, 16, 33)
    k = d.of(*(k for k in (1, 2, 3, 7, 33) if k <= routed))
    shared = oracle.shared(gate)
    return gate, routed, k + shared, shared


def draw_experts(d: Draw, E: int) -> tuple[Tensors, dict]:
    """Return the weights of E experts, and the form of what is between their two products."""
    H = d.size()
    I = d.size()
    form = {
        "act": d.of(*oracle.ACT),
        "gated": d.flag(),
    }
    Z = I
    if form["gated"]:
        Z = 2 * I
    if form["gated"] and d.flag():
        form["interleaved"] = d.flag()
        form["up_offset"] = d.of(0.0, 1.0)
        # a number at the limit has a gradient, one beyond it has none; half precision rounds many
        # numbers to the limit
        if d.dtype.itemsize >= 4:
            form["limit"] = d.of(None, 0.7)
    leaves = {
        "up": d.floats(
            E,
            Z,
            H,
            scale=H**-0.5,
        ),
        "down": d.floats(
            E,
            H,
            I,
            scale=2 * I**-0.5,
        ),
    }
    if d.flag():
        leaves["up_bias"] = d.floats(E, Z)
        leaves["down_bias"] = d.floats(E, H)
    return leaves, form


def draw_pairs(d: Draw, sizes: dict[str, tuple[int, int]], E: int, rank: int) -> Tensors:
    """Return low-rank matrices for E weights of each of these sizes (out, in)."""
    pairs = {}
    for name, (out, into) in sizes.items():
        pairs[f"{name}_a"] = d.floats(
            E,
            rank,
            into,
            scale=into**-0.5,
        )
        pairs[f"{name}_b"] = d.floats(
            E,
            rank,
            out,
            scale=rank**-0.5,
        )
    return pairs


def low_rank(pairs: Tensors, name: str) -> Tensor:
    """Return what a pair adds to each expert's weight, [E, out, in]."""
    return pairs[f"{name}_b"].transpose(1, 2) @ pairs[f"{name}_a"]


def route(d: Draw) -> Case:
    """Free choices, also among equal logits, and given ones."""
    gate, routed, top_k, shared = draw_gate(d)
    kind = d.of("free", "ties", "given", "noise", "bias")
    T = d.tokens()
    logits = 2 * d.normal(T, routed)
    if kind == "ties":
        logits = logits.round()
    leaves = {"logits": d.held(logits)}
    fixed = {}
    if kind == "given":
        ids = d.uniform(T, routed).argsort(1)[:, : top_k - shared] + shared
        fixed["idx"] = d.ints(torch.cat([ids, ids.new_zeros(T, shared)], 1))
    elif kind == "noise":
        leaves["noise"] = d.floats(T, routed)
    elif kind == "bias" and gate == "sigmoid_topk":
        fixed["bias"] = d.normal(routed).to(d.gate_dtype)

    def product(backend, logits, noise=None, bias=None, idx=None):
        routing_of = routing.route(
            logits,
            top_k,
            gate,
            noise,
            bias,
            backend,
            idx,
        )
        return {"weight": routing_of.topk_weight, "idx": routing_of.topk_idx}

    # the op's own sum and sigmoid, in its precision, decide between numbers that nearly tie
    scores = sum(leaves.values())
    if "bias" in fixed:
        scores = scores.to(d.gate_dtype).sigmoid() + fixed["bias"]

    def equation(result, logits, noise=None):
        total = logits
        if noise is not None:  # the sum is rounded to the logits' dtype
            total = total + noise
            total = total + (scores.double() - total).detach()
        idx = fixed.get("idx")
        if idx is None:
            idx = oracle.best_experts(scores, top_k, gate)
        return {
            "weight": oracle.gate_weights(total, idx, gate),
            "idx": idx.int(),
        }

    return Case(
        leaves,
        product,
        equation,
        fixed,
        sums=routed,
        scales={"dlogits": 1.0, "dnoise": 1.0},
        note=(gate, top_k, kind),
    )


def dispatched(d: Draw) -> Case:
    """Ids in every integer dtype and layout."""
    ids, E, how = d.slots()

    def product(backend, ids):
        return dispatch.dispatch(ids, E, backend)

    def equation(result):
        return oracle.dispatch(ids, E)

    return Case({}, product, equation, {"ids": ids}, note=how)


def grouped(d: Draw) -> Case:
    """Experts with no row, one and many, rows of no expert, and experts stored separately."""
    E = d.of(1, 2, 3, 5)
    N = d.size()
    H = d.size()
    bounds = [0]
    for _ in range(E):
        bounds.append(bounds[-1] + d.of(0, 1, 3, 17, 33))
    R = bounds[-1] + d.of(0, 1, 5)
    stack = d.floats(
        E,
        N,
        H,
        scale=H**-0.5,
    )
    frozen = stack.double()
    leaves = {"x": d.floats(R, H)}
    fixed = {"offsets": d.ints(torch.tensor(bounds))}
    row_of = [-1] * E
    is_separate = d.flag()
    if is_separate:
        chosen = d.permutation(E)[: d.of(1, 2, 3)].tolist()
        for row, e in enumerate(chosen):
            row_of[e] = row
        leaves["trained"] = d.floats(
            len(chosen),
            N,
            H,
            scale=H**-0.5,
        )
        fixed["stack"] = stack
        fixed["trainable"] = torch.tensor(row_of, dtype=torch.int32)
    else:
        leaves["stack"] = stack
    if d.flag():
        leaves["bias"] = d.floats(E, N)

    def product(backend, x, stack, offsets, bias=None, **separate):
        return grouped_gemm.grouped_gemm(
            x,
            stack,
            offsets,
            bias,
            backend,
            **separate,
        )

    def equation(result, x, stack=frozen, trained=None, bias=None):
        if bias is None:
            bias = x.new_zeros(E, N)
        rows = []
        for e in range(E):
            weight = stack[e]
            added = bias[e]
            if row_of[e] >= 0:
                weight = trained[row_of[e]]
            elif is_separate:
                added = added.detach()
            rows.append(x[bounds[e] : bounds[e + 1]] @ weight.t() + added)
        of_no_expert = 0 * x[bounds[-1] :] @ stack[0].t()
        return torch.cat([*rows, of_no_expert])

    note = ("bounds", *bounds, "rows", R)
    return Case(
        leaves,
        product,
        equation,
        fixed,
        sums=max(R, N, H),
        unit=d.unit,
        note=note,
    )


def combined(d: Draw) -> Case:
    """The weighted sum of a token's rows."""
    T = d.tokens()
    K = d.of(1, 2, 3, 7, 0)
    H = d.size()
    slot_row = d.ints(d.permutation(T * K))
    leaves = {
        "y": d.floats(T * K, H),
        "weight": d.gates(d.normal(T, K)),
    }

    def product(backend, y, weight, slot_row):
        return combine.combine(y, weight, slot_row, backend)

    def equation(result, y, weight):
        rows = y[slot_row.long()].view(
            T,
            K,
            H,
        )
        return (weight[..., None] * rows).sum(1)

    return Case(
        leaves,
        product,
        equation,
        {"slot_row": slot_row},
        sums=max(K, H),
    )


def experts(d: Draw) -> Case:
    """All forms of experts: all train, some are frozen, or some are stored separately and train."""
    ids, E, how = d.slots()
    leaves, form = draw_experts(d, E)
    H, I = leaves["down"].shape[1:]
    T, K = ids.shape
    leaves["x"] = d.floats(T, H)
    leaves["weight"] = d.gates(d.uniform(T, K))
    kind = d.of("all", "frozen", "separate")
    recompute = d.flag()
    fixed = {"ids": ids}
    trains = torch.ones(E, dtype=torch.bool)
    if kind == "frozen":
        trains = d.uniform(E) < 0.5
        fixed["trainable"] = trains
    elif kind == "separate":
        for name in ("up", "down"):
            fixed[name] = leaves.pop(name)
        chosen = d.permutation(E)[:2]
        row_of = torch.full(
            (E,),
            -1,
            dtype=torch.int32,
        )
        row_of[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        trains = row_of >= 0
        fixed["trainable"] = row_of
        for name in ("up", "down"):
            shape = (len(chosen), *fixed[name].shape[1:])
            leaves[f"{name}_trained"] = d.floats(*shape, scale=0.3)

    def product(
        backend, x, up, down, weight, ids, up_bias=None, down_bias=None, trainable=None, **separate
    ):
        trained = None
        if kind == "separate":
            trained = (separate["up_trained"], separate["down_trained"])
        return moe_mlp.moe_mlp(
            x,
            up,
            down,
            weight,
            ids,
            gate_up_bias=up_bias,
            down_bias=down_bias,
            trainable=trainable,
            trained=trained,
            recompute=recompute,
            backend=backend,
            **form,
        )

    def stack(v, name):
        if name in v:
            mask = trains.view(E, *[1] * (v[name].dim() - 1))
            return torch.where(
                mask,
                v[name],
                v[name].detach(),
            )
        if name in fixed:
            return (
                fixed[name]
                .double()
                .index_copy(
                    0,
                    chosen,
                    v[f"{name}_trained"],
                )
            )
        return None

    def equation(result, x, weight, **v):
        stacks = {name: stack(v, name) for name in STACKS}
        return oracle.moe(
            x,
            weight,
            ids,
            **stacks,
            **form,
        )

    return Case(
        leaves,
        product,
        equation,
        fixed,
        sums=max(H, 2 * I, T * K),
        unit=d.unit,
        note=(how, kind, form, recompute),
    )


def layer(d: Draw) -> Case:
    """Router and experts in one; gradients come through the logits and the weights too."""
    gate, routed, top_k, shared = draw_gate(d)
    leaves, form = draw_experts(d, routed + shared)
    H, I = leaves["down"].shape[1:]
    T = d.tokens()
    recompute = d.flag()
    mode = "group"
    if shared:
        mode = d.of("group", "dense")
    leaves["x"] = d.floats(T, H)
    leaves["router"] = d.floats(
        routed,
        H,
        scale=2 * H**-0.5,
    )

    def product(backend, x, router, **stacks):
        whole = ExpertStacks(
            **stacks,
            activation=Activation(**form),
            shared=mode,
        )
        return moe_layer.moe_layer(
            x,
            router,
            whole,
            top_k,
            gate,
            recompute=recompute,
            backend=backend,
        )

    def equation(result, x, router, **stacks):
        logits = x @ router.t()
        # the op's own logits decide between experts that are equal but for rounding
        ids = oracle.best_experts(result["router_logits"], top_k, gate)
        weight = oracle.gate_weights(logits, ids, gate)
        out = oracle.moe(
            x,
            weight,
            ids,
            **stacks,
            **form,
        )
        return {"out": out, "router_logits": logits, "topk_weight": weight, "topk_idx": ids}

    return Case(
        leaves,
        product,
        equation,
        sums=max(H, 2 * I, T * top_k),
        unit=d.unit,
        scales={"drouter": 1.0, "dx": 1.0},
        note=(gate, top_k, mode, form, recompute),
    )


def merged(d: Draw) -> Case:
    """Experts of any shape to one weight."""
    shape = d.of(
        (7, 33),
        (1,),
        (),
        (0, 5),
        (2, 3, 5),
        (129,),
        (40, 130),
    )
    E = d.of(1, 2, 3, 8, 11)
    leaves = {
        "weight": d.floats(E, *shape),
        "alpha": d.gates(d.normal(E)),
    }

    def product(backend, weight, alpha):
        return merging.merge_experts(weight, alpha, backend=backend)

    def equation(result, weight, alpha):
        return sum(alpha[e] * weight[e] for e in range(E))

    return Case(
        leaves,
        product,
        equation,
        sums=max(E, leaves["weight"][0].numel()),
    )


def merged_layer(d: Draw) -> Case:
    """A linear layer with merged weights, made here or given, and kept up to date in place."""
    E = d.of(1, 2, 3, 8)
    N = d.size()
    K = d.size()
    shape = d.of(
        (5, K),
        (0, K),
        (K,),
        (2, 3, K),
        (37, K),
    )
    weight = d.floats(
        E,
        N,
        K,
        scale=K**-0.5,
    )
    leaves = {
        "x": d.floats(*shape),
        "alpha": d.gates(d.normal(E)),
    }
    if d.flag():
        leaves["bias"] = d.floats(N)
    is_given = d.flag()

    def product(backend, x, alpha, weight, bias=None):
        before = alpha.detach()
        given = None
        if is_given:
            given = merging.merge_experts(weight, before, backend=backend)
        y = merging.merged_linear(
            x,
            weight,
            alpha,
            given,
            bias,
            backend=backend,
        )
        outputs = {"y": y}
        if backend in ("triton", "cuda") and weight.is_contiguous():
            for name, seen in {"same": before, "new": before + 1}.items():
                outputs[name] = torch.zeros_like(weight[0])
                merging.remerge_experts(
                    outputs[name],
                    weight,
                    before.float(),
                    seen.float(),
                    backend,
                )
        return outputs

    def equation(result, x, alpha, bias=0):
        whole = torch.einsum("e,enk->nk", alpha, weight.double())
        outputs = {"y": x @ whole.t() + bias}
        if "new" in result:
            outputs["new"] = whole.detach()
            outputs["same"] = torch.zeros_like(whole)
        return outputs

    sums = max(N * K, leaves["x"].numel())
    fixed = {"weight": weight}
    return Case(
        leaves,
        product,
        equation,
        fixed,
        sums=sums,
        unit=d.unit,
        note=("given", is_given),
    )


def mixture(d: Draw) -> Case:
    """Eq. (5)'s coefficients, and EWA's step."""
    E = d.of(1, 2, 3, 8)
    shared_rate = d.of(0.75, 0.0, 1.0, None)
    routed = E
    if shared_rate is not None:
        routed = E - 1
    logits = d.normal(routed).float()
    weight = d.floats(E, 3, 5)

    def product(backend, logits, weight):
        moved = ewa.average_experts_(weight.clone(), 0.3)
        return {"alpha": merging.mixing(logits, shared_rate), "ewa": moved}

    def equation(result, logits):
        moved = oracle.averaged(weight.double(), 0.3)
        return {"alpha": oracle.mixing(logits, shared_rate), "ewa": moved}

    return Case(
        {"logits": logits},
        product,
        equation,
        {"weight": weight},
        sums=E,
        unit=d.unit,
        scales={"dlogits": 1.0},
        note=(E, shared_rate),
    )


def lora_experts(d: Draw) -> Case:
    """Low-rank experts over a frozen MLP; every expert is selected, or some."""
    ids, E, how = d.slots()
    T = len(ids)
    H = d.size()
    I = d.size()
    rank = d.of(1, 2, 5, 8, 17)
    is_dense = d.flag()
    act = d.of(*oracle.ACT)
    scaling = d.of(1.5, 0.25)
    targets = d.of(
        PROJECTIONS,
        ("gate",),
        ("up",),
        ("down",),
        ("gate", "down"),
        ("up", "gate"),
    )
    sizes = {
        "gate": (I, H),
        "up": (I, H),
        "down": (H, I),
    }
    fixed = {}
    chosen = torch.arange(E).expand(T, -1)
    if not is_dense:
        chosen = ids
        fixed["ids"] = ids
    leaves = {
        "x": d.floats(T, H),
        "weight": d.gates(d.uniform(*chosen.shape)),
    }
    leaves |= draw_pairs(
        d,
        {name: sizes[name] for name in targets},
        E,
        rank,
    )
    base = {f"{name}_proj": d.floats(*size, scale=size[1] ** -0.5) for name, size in sizes.items()}
    if d.flag():
        base |= {f"{name}_bias": d.floats(size[0]) for name, size in sizes.items()}
    recompute = d.flag()

    def product(backend, x, weight, ids=None, **v):
        pairs = {name: lora.LoRA(v[f"{name}_a"], v[f"{name}_b"]) for name in targets}
        return lora.lora_mlp(
            x,
            topk_weight=weight,
            topk_idx=ids,
            **{name: v[name] for name in base},
            **pairs,
            scaling=scaling,
            act=act,
            recompute=recompute,
            backend=backend,
        )

    def equation(result, x, weight, **pairs):
        wide = {}  # the base for each expert
        for name, tensor in base.items():
            wide[name] = tensor.double().expand(E, *tensor.shape)
        for name in targets:
            wide[f"{name}_proj"] = wide[f"{name}_proj"] + scaling * low_rank(pairs, name)
        stacks = {
            "up": torch.cat([wide["gate_proj"], wide["up_proj"]], 1),
            "down": wide["down_proj"],
        }
        if "up_bias" in wide:
            stacks["up_bias"] = torch.cat([wide["gate_bias"], wide["up_bias"]], 1)
            stacks["down_bias"] = wide["down_bias"]
        return oracle.moe(
            x,
            weight,
            chosen,
            **stacks,
            act=act,
        )

    return Case(
        leaves,
        product,
        equation,
        fixed | base,
        sums=max(H, I, T, E * rank),
        unit=d.unit,
        note=(how, "dense", is_dense, act, targets, recompute),
    )


def frozen_experts(d: Draw) -> Case:
    """Frozen stacks with low-rank terms on one of them or both."""
    ids, E, how = d.slots()
    leaves, form = draw_experts(d, E)
    means = {name: leaves.pop(name) for name in ("up", "down")}
    parts = {name: (mean,) for name, mean in means.items()}
    return _frozen(
        d,
        ids,
        leaves,
        parts,
        means,
        form,
        note=how,
    )


def packed_experts(d: Draw) -> Case:
    """Frozen stacks in each of the packed formats, with low-rank terms."""
    ids, E, how = d.slots()
    name = d.of("mxfp4", "int8", "fp8_block", "nf4")
    parts = {}
    means = {}
    for of, shape in {"up": (E, 128, 128), "down": (E, 128, 64)}.items():
        numbers = d.normal(*shape) * shape[2] ** -0.5
        data, scales, _ = packed.pack(numbers.float(), name)
        parts[of] = (data, *scales)
        means[of] = packed.reference(data, scales, name)
    return _frozen(
        d,
        ids,
        {},
        parts,
        means,
        {"act": "silu", "gated": True},
        name,
        note=how,
    )


def _frozen(
    d: Draw,
    ids: Tensor,
    leaves: Tensors,
    parts: dict[str, tuple],
    means: Tensors,
    form: dict,
    packing: str = "",
    *,
    note: str,
) -> Case:
    """Return a case of frozen stacks: their `parts` in memory, and the weights that these mean."""
    T, K = ids.shape
    E, H, I = means["down"].shape
    rank = d.of(1, 3, 16)
    adapted = d.of(("up", "down"), ("up",), ("down",))
    leaves |= draw_pairs(
        d,
        {name: means[name].shape[1:] for name in adapted},
        E,
        rank,
    )
    leaves["x"] = d.floats(T, H)
    leaves["weight"] = d.gates(d.uniform(T, K))
    fixed = {"ids": ids}
    for name, tensors in parts.items():
        for i, tensor in enumerate(tensors):
            fixed[f"{name}{i}"] = tensor

    def product(backend, x, weight, ids, up_bias=None, down_bias=None, **v):
        stacks = []
        pairs = []
        for name, mean in means.items():
            data, *scales = [v[f"{name}{i}"] for i in range(len(parts[name]))]
            stacks.append(
                Stack(
                    data,
                    scales,
                    packing,
                    tuple(mean.shape),
                )
            )
            pair = None
            if name in adapted:
                pair = Pair(v[f"{name}_a"], v[f"{name}_b"])
            pairs.append(pair)
        whole = FrozenExperts(
            *stacks,
            up_bias,
            down_bias,
            *pairs,
            Activation(**form),
        )
        return frozen_mlp.frozen_mlp(x, whole, weight, ids, backend)[0]

    def equation(result, x, weight, up_bias=None, down_bias=None, **pairs):
        stacks = {name: mean.double() for name, mean in means.items()}
        for name in adapted:
            stacks[name] = stacks[name] + low_rank(pairs, name)
        return oracle.moe(
            x,
            weight,
            ids,
            **stacks,
            up_bias=up_bias,
            down_bias=down_bias,
            **form,
        )

    return Case(
        leaves,
        product,
        equation,
        fixed,
        sums=max(H, 2 * I, T * K),
        unit=d.unit,
        note=(packing, note, adapted, form),
    )


def gram(d: Draw) -> Case:
    """A stack, or tensors one by one, with a base and without."""
    n = d.of(1, 2, 3, 8, 33, 64)
    shape = d.of(
        (7,),
        (1,),
        (3, 11),
        (0,),
        (257,),
        (16, 129),
    )
    leaves = {"experts": d.floats(n, *shape)}
    if d.flag():
        leaves["base"] = d.floats(*shape)
    is_list = d.flag()

    def product(backend, experts, base=None):
        if is_list:
            experts = [*experts]
        return expansion.gram(experts, base, backend=backend)

    def equation(result, experts, base=0):
        rows = (experts - base).detach().reshape(n, -1)
        return rows @ rows.t()

    sums = max(leaves["experts"][0].numel(), 1)
    return Case(
        leaves,
        product,
        equation,
        sums=sums,
        note=("list", is_list),
    )


def child(d: Draw) -> Case:
    """A child of two experts by DARE, made at once or in two parts."""
    shape = d.of(
        (7,),
        (1,),
        (3, 11),
        (0,),
        (257,),
        (16, 65),
    )
    names = ("first", "second")
    if d.flag():
        names = ("first", "second", "base")
    fixed = {name: d.floats(*shape) for name in names}
    drop = d.of(0.5, 0.0, 0.9, 1.0, 1 / 3)
    options = {
        "weights": d.of(
            (0.5, 0.5),
            (0.25, 0.75),
            (1.0, 0.0),
        ),
        "drop": drop,
        "rescale": d.flag(),
        "seed": d.of(0, 7, 2**63 - 1),
        "tensor": d.of(0, 3, 2**62 + 1),
    }
    P = fixed["first"].numel()
    cut = 128
    if P < 300:
        cut = d.of(0, *range(4, P, 4))

    def product(backend, **v):
        if cut == 0:
            return expansion.dare_merge(**v, **options, backend=backend)
        parts = []
        for start, stop in ((0, cut), (cut, P)):
            part = {name: tensor.reshape(-1)[start:stop] for name, tensor in v.items()}
            parts.append(
                expansion.dare_merge(
                    **part,
                    **options,
                    start=start,
                    backend=backend,
                )
            )
        return torch.cat(parts).view(shape)

    def equation(result):
        scale = 1.0
        if options["rescale"] and drop < 1:
            scale = 1 / (1 - drop)
        whole = {name: tensor.double() for name, tensor in fixed.items()}
        base = whole.pop("base", torch.zeros(shape, dtype=torch.float64))
        masks = oracle.dare_masks(
            options["seed"],
            options["tensor"],
            P,
            drop,
        )
        out = base
        for parent, weight, mask in zip(
            whole.values(),
            options["weights"],
            masks,
            strict=True,
        ):
            delta = weight * scale * (parent - base)
            out = out + torch.where(mask.view(shape), delta, 0.0)
        return out

    return Case(
        {},
        product,
        equation,
        fixed,
        sums=2,
        note=("drop", drop, "cut", cut),
    )


def fused(d: Draw) -> Case:
    """Specialists that train, and frozen ones with a gate that trains."""
    T = d.tokens()
    S = d.of(1, 2, 3)
    sizes = [d.size() for _ in range(S)]
    vocabularies = [d.of(1, 2, 17, 33, 70) for _ in range(S)]
    V = min(vocabularies)
    trains = d.of("all", "gate", "heads", "hidden")
    labels = (d.uniform(T) * V).long()
    labels[d.uniform(T) < d.of(0.25, 0.0)] = oracle.IGNORED
    labels[:1] = V - 1
    reductions = ["sum", "none"]
    if T:
        reductions.append("mean")
    reduction = d.of(*reductions)
    leaves = {}
    fixed = {}
    for s, (size, vocabulary) in enumerate(zip(sizes, vocabularies, strict=True)):
        hidden = d.floats(T, size)
        head = d.floats(
            vocabulary,
            size,
            scale=size**-0.5,
        )
        for kind, tensor in {"hidden": hidden, "heads": head}.items():
            is_trained = trains in ("all", kind)
            (leaves if is_trained else fixed)[f"{kind}{s}"] = tensor
    frozen = {name: tensor.double() for name, tensor in fixed.items()}
    fixed["labels"] = labels
    leaves["gate"] = d.gates((2 * d.normal(T, S)).softmax(-1))

    def lists(v):
        return [v[f"hidden{s}"] for s in range(S)], [v[f"heads{s}"] for s in range(S)]

    def product(backend, gate, labels, **v):
        hidden, heads = lists(v)
        loss = fusion.fused_cross_entropy(
            hidden,
            heads,
            gate,
            labels,
            reduction=reduction,
            backend=backend,
        )
        return {
            "loss": loss,
            "logits": fusion.fuse_logits(hidden, heads, gate),
        }

    def equation(result, gate, **v):
        logits = oracle.fused_logits(*lists(frozen | v), gate)
        return {
            "loss": oracle.cross_entropy(logits, labels, reduction),
            "logits": logits,
        }

    return Case(
        leaves,
        product,
        equation,
        fixed,
        sums=max(*sizes, V, T),
        unit=d.unit,
        scales={f"d{name}": 1.0 for name in leaves},
        note=(reduction, trains, "labels", labels.tolist()),
    )


def balanced(d: Draw) -> Case:
    """Both balance losses of a layer, and the loss over a model's logits."""
    gate = d.of("xft", "softmax_topk", "topk_softmax")
    shared = oracle.shared(gate)
    T = d.of(13, 37)
    routed = d.of(3, 8, 16)
    k = d.of(1, 2, 3)
    kind = d.of("switch", "cv2")
    config = MoEConfig(
        hidden_size=1,
        intermediate_size=1,
        num_experts=routed + shared,
        top_k=k + shared,
        gate=gate,
        balance_loss=kind,
        balance_loss_coef=0.5,
    )

    def product(backend, logits):
        ids = logits.topk(k).indices + shared
        loss = balance.balance_loss(config, logits, ids)
        return {"loss": loss, "top_k": balance.top_k_loss(logits, k)}

    def equation(result, logits):
        top_k = oracle.switch_loss(logits, k)
        loss = top_k / k
        if kind == "cv2":
            loss = oracle.cv2_loss(logits, k, gate == "topk_softmax")
        return {"loss": 0.5 * loss, "top_k": top_k}

    leaves = {"logits": d.normal(T, routed).float()}
    scales = {"dlogits": 0.2 / T}
    return Case(
        leaves,
        product,
        equation,
        sums=T * routed,
        scales=scales,
        note=(kind, gate, k),
    )


ONCE = ("moe_mlp, repeated",)  # one case says it all
SECONDS = 5.0  # duration of repeating a large layer on a GPU


def repeated(d: Draw) -> Case:
    """A large layer, run repeatedly: how many runs differ from the first in any bit."""

    def product(backend, where):
        device = where.device
        T, H, I, E, K = (256, 128, 96, 8, 2)
        seconds = 0.1
        if device.type == "cuda":
            seconds = 0.0
            if backend != "torch":  # torch's sums on a GPU are atomic
                T, H, I, E, K = (8192, 2048, 768, 64, 8)
                seconds = SECONDS
        elif backend == "triton":  # in the interpreter
            T, H, I, E, K = (32, 32, 16, 4, 2)
        inputs = []
        for shape in (
            (T, H),
            (E, 2 * I, H),
            (E, H, I),
            (T, K),
        ):
            inputs.append(
                torch.randn(
                    shape,
                    device=device,
                    dtype=d.dtype,
                    requires_grad=True,
                )
            )
        x, up, down, weight = inputs
        ids = torch.rand(T, E, device=device).topk(K).indices
        first = None
        differing = torch.zeros(5, dtype=torch.int64, device=device)
        end = time.monotonic() + seconds
        while first is None or time.monotonic() < end:
            out = moe_mlp.run_experts(
                x,
                ExpertStacks(up, down),
                weight,
                ids,
                backend=backend,
            )[0]
            grads = torch.autograd.grad(
                out,
                inputs,
                torch.ones_like(out),
            )
            bits = [t.detach().view(torch.int8) for t in (out, *grads)]
            first = first or bits
            differing += torch.stack([(a != b).any() for a, b in zip(bits, first, strict=True)])
        return {"runs of other bits": differing}

    def equation(result):
        return {"runs of other bits": torch.zeros(5, dtype=torch.int64)}

    return Case(
        {},
        product,
        equation,
        {"where": torch.zeros(1)},
    )


# case: the op whose backends it has, None for PyTorch alone, and what makes it
CASES: dict[str, tuple[str | None, Callable[[Draw], Case]]] = {
    "route": ("route", route),
    "dispatch": ("dispatch", dispatched),
    "grouped_gemm": ("grouped_gemm", grouped),
    "combine": ("combine", combined),
    "moe_mlp": ("moe_mlp", experts),
    "moe_layer": ("moe_mlp", layer),
    "merge_experts": ("merge_experts", merged),
    "merged_linear": ("merge_experts", merged_layer),
    "mixing": (None, mixture),
    "lora_mlp": ("lora_mlp", lora_experts),
    "frozen_mlp": ("frozen_mlp", frozen_experts),
    "packed_mlp": ("frozen_mlp", packed_experts),
    "gram": ("gram", gram),
    "dare_merge": ("dare_merge", child),
    "fused_cross_entropy": ("fused_cross_entropy", fused),
    "balance": (None, balanced),
    "moe_mlp, repeated": ("moe_mlp", repeated),
}
