"""The cases of every op: `make(draw)` returns inputs, the call and the equation.

An op's backends are those of the name in CASES.
"""

from collections.abc import Callable

import torch

from moe_runtime.ops import (
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


def draw_gate(d: Draw) -> tuple[str, int, int]:
    """Return a gate, its number of logits, and top_k with the shared expert."""
    gate = d.of(*oracle.GATES)
    routed = d.of(1, 2, 3, 7, 16, 33)
    k = d.of(*(k for k in (1, 2, 3, 7, 33) if k <= routed))
    return gate, routed, k + (gate in oracle.SHARED)


def draw_experts(d: Draw, E: int) -> tuple[Tensors, dict]:
    """Return the weights of E experts, and the form of what is between their two products."""
    H = d.size()
    I = d.size()
    form = {"act": d.of(*oracle.ACT), "gated": d.flag()}
    Z = 2 * I if form["gated"] else I
    if form["gated"] and d.flag():
        form |= {"interleaved": d.flag(), "up_offset": d.of(0.0, 1.0)}
        # a number at the limit has a gradient, one beyond it has none; half precision rounds many
        # numbers to the limit
        if d.dtype.itemsize >= 4:
            form["limit"] = d.of(None, 0.7)
    leaves = {"up": d.floats(E, Z, H, scale=H**-0.5), "down": d.floats(E, H, I, scale=2 * I**-0.5)}
    if d.flag():
        leaves |= {"up_bias": d.floats(E, Z), "down_bias": d.floats(E, H)}
    return leaves, form


def low_rank(d: Draw, name: str, E: int, rank: int, out: int, into: int) -> Tensors:
    """Return A and B of LoRA for E matrices [out, into]."""
    a = d.floats(E, rank, into, scale=into**-0.5)
    b = d.floats(E, rank, out, scale=rank**-0.5)
    return {f"{name}_a": a, f"{name}_b": b}


def biases(tensors: Tensors) -> dict[str, torch.Tensor | None]:
    """Return both biases of experts, None where there are none."""
    return {name: tensors.get(name) for name in ("up_bias", "down_bias")}


def route(d: Draw) -> Case:
    """Free choices, also among equal logits, and given ones."""
    gate, routed, top_k = draw_gate(d)
    shared = int(gate in oracle.SHARED)
    kind = d.of("free", "ties", "given", "noise", "bias")
    T = d.tokens()
    logits = 2 * d.normal(T, routed)
    if kind == "ties":
        logits = logits.round()
    leaves = {"logits": d.held(logits)}
    fixed = {}
    if kind == "given":
        ids = d.uniform(T, routed).argsort(1)[:, : top_k - shared] + shared
        fixed["idx"] = d.ints(torch.cat([ids, torch.zeros(T, shared, dtype=torch.int64)], 1))
    elif kind == "noise":
        leaves["noise"] = d.floats(T, routed)
    elif kind == "bias" and gate == "sigmoid_topk":
        fixed["bias"] = d.normal(routed).to(d.gate_dtype)

    def product(v, backend):
        given = (v.get("noise"), v.get("bias"), backend, v.get("idx"))
        choice = routing.route(v["logits"], top_k, gate, *given)
        return {"weight": choice.topk_weight, "idx": choice.topk_idx}

    # the op's own sum and sigmoid, in its precision, decide between numbers that nearly tie
    scores = sum(leaves.values())
    if "bias" in fixed:
        scores = scores.to(d.gate_dtype).sigmoid() + fixed["bias"]

    def equation(v, actual):
        total = v["logits"]
        if "noise" in v:  # the sum is rounded to the logits' dtype
            total = total + v["noise"]
            total = total + (scores.double() - total).detach()
        idx = fixed["idx"] if "idx" in fixed else oracle.best_experts(scores, top_k, gate)
        return {"weight": oracle.gate_weights(total, idx, gate), "idx": idx.int()}

    scales = {"dlogits": 1.0, "dnoise": 1.0}
    note = f"route {gate} {top_k} {kind}"
    return Case(leaves, product, equation, fixed, routed, scales=scales, note=note)


def dispatched(d: Draw) -> Case:
    """Ids in every integer dtype and layout."""
    ids, E, how = d.slots()

    def product(v, backend):
        return dispatch.dispatch(v["ids"], E, backend)._asdict()

    return Case({}, product, lambda v, actual: oracle.dispatch(ids, E), {"ids": ids}, note=how)


def grouped(d: Draw) -> Case:
    """Experts with no row, one and many, rows of no expert, and experts stored separately."""
    E = d.of(1, 2, 3, 5)
    N = d.size()
    H = d.size()
    bounds = [0]
    for _ in range(E):
        bounds.append(bounds[-1] + d.of(0, 1, 3, 17, 33))
    R = bounds[-1] + d.of(0, 1, 5)
    stack = d.floats(E, N, H, scale=H**-0.5)
    leaves = {"x": d.floats(R, H)}
    fixed = {"offsets": d.ints(torch.tensor(bounds))}
    row_of = [-1] * E
    is_separate = d.flag()
    if is_separate:
        chosen = d.permutation(E)[: d.of(1, 2, 3)].tolist()
        for row, e in enumerate(chosen):
            row_of[e] = row
        leaves["trained"] = d.floats(len(chosen), N, H, scale=H**-0.5)
        fixed |= {"stack": stack, "trainable": torch.tensor(row_of, dtype=torch.int32)}
    else:
        leaves["stack"] = stack
    if d.flag():
        leaves["bias"] = d.floats(E, N)

    def product(v, backend):
        separate = {name: v[name] for name in ("trainable", "trained") if name in v}
        y = grouped_gemm.grouped_gemm(
            v["x"], v["stack"], v["offsets"], v.get("bias"), backend, **separate
        )
        return {"y": y}

    def equation(v, actual):
        rows = []
        for e in range(E):
            is_frozen = is_separate and row_of[e] < 0
            if is_separate:
                weight = stack[e].double() if is_frozen else v["trained"][row_of[e]]
            else:
                weight = v["stack"][e]
            y = v["x"][bounds[e] : bounds[e + 1]] @ weight.t()
            if "bias" in v:
                y = y + (v["bias"][e].detach() if is_frozen else v["bias"][e])
            rows.append(y)
        of_no_expert = 0 * v["x"][bounds[-1] :] @ stack[0].double().t()
        return {"y": torch.cat([*rows, of_no_expert])}

    note = f"grouped_gemm {bounds} of {R} rows"
    return Case(leaves, product, equation, fixed, max(R, N, H), d.unit, note=note)


def combined(d: Draw) -> Case:
    """The weighted sum of a token's rows."""
    T = d.tokens()
    K = d.of(1, 2, 3, 7, 0)
    H = d.size()
    slot_row = d.ints(d.permutation(T * K))
    leaves = {"y": d.floats(T * K, H), "weight": d.gates(d.normal(T, K))}

    def product(v, backend):
        return {"out": combine.combine(v["y"], v["weight"], v["slot_row"], backend)}

    def equation(v, actual):
        rows = v["y"][slot_row.long()].view(T, K, H)
        return {"out": (v["weight"][..., None] * rows).sum(1)}

    fixed = {"slot_row": slot_row}
    return Case(leaves, product, equation, fixed, max(K, H), note="combine")


def experts(d: Draw) -> Case:
    """All forms of experts: all train, some are frozen, or some are stored separately and train."""
    ids, E, how = d.slots()
    leaves, form = draw_experts(d, E)
    H, I = leaves["down"].shape[1:]
    T, K = ids.shape
    leaves |= {"x": d.floats(T, H), "weight": d.gates(d.uniform(T, K))}
    kind = d.of("all", "frozen", "separate")
    recompute = d.flag()
    fixed = {"ids": ids}
    trains = torch.ones(E, dtype=torch.bool)
    row_of = torch.full((E,), -1, dtype=torch.int32)
    if kind == "frozen":
        trains = d.uniform(E) < 0.5
        fixed["trainable"] = trains
    elif kind == "separate":
        fixed |= {name: leaves.pop(name) for name in ("up", "down")}
        chosen = d.permutation(E)[:2]
        row_of[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        trains = row_of >= 0
        fixed["trainable"] = row_of
        for name in ("up", "down"):
            shape = (len(chosen), *fixed[name].shape[1:])
            leaves[f"{name}_trained"] = d.floats(*shape, scale=0.3)

    def product(v, backend):
        options = {}
        if kind != "all":
            options["trainable"] = v["trainable"]
        if kind == "separate":
            options["trained"] = (v["up_trained"], v["down_trained"])
        out = moe_mlp.moe_mlp(
            v["x"],
            v["up"],
            v["down"],
            v["weight"],
            v["ids"],
            gate_up_bias=v.get("up_bias"),
            down_bias=v.get("down_bias"),
            recompute=recompute,
            backend=backend,
            **form,
            **options,
        )
        return {"out": out}

    def stack(v, name):
        if name in v:
            mask = trains.view(E, *[1] * (v[name].dim() - 1))
            return torch.where(mask, v[name], v[name].detach())
        if name not in fixed:
            return None
        rows = [fixed[name][e].double() for e in range(E)]
        for e, row in enumerate(row_of.tolist()):
            if row >= 0:
                rows[e] = v[f"{name}_trained"][row]
        return torch.stack(rows)

    def equation(v, actual):
        names = ("up_bias", "down_bias")
        both = {name: stack(v, name) for name in names}
        up, down = stack(v, "up"), stack(v, "down")
        return {"out": oracle.moe(v["x"], up, down, v["weight"], ids, **both, **form)}

    note = f"moe_mlp {how} {kind} {form}{' recompute' * recompute}"
    return Case(leaves, product, equation, fixed, max(H, 2 * I, T * K), d.unit, note=note)


def layer(d: Draw) -> Case:
    """Router and experts in one; gradients come through the logits and the weights too."""
    gate, routed, top_k = draw_gate(d)
    leaves, form = draw_experts(d, routed + (gate in oracle.SHARED))
    H, I = leaves["down"].shape[1:]
    T = d.tokens()
    recompute = d.flag()
    mode = d.of("group", "dense") if gate in oracle.SHARED else "group"
    leaves |= {"x": d.floats(T, H), "router": d.floats(routed, H, scale=2 * H**-0.5)}

    def product(v, backend):
        stacks = ExpertStacks(
            v["up"], v["down"], **biases(v), activation=Activation(**form), shared=mode
        )
        output = moe_layer.moe_layer(
            v["x"], v["router"], stacks, top_k, gate, recompute=recompute, backend=backend
        )
        return output._asdict()

    def equation(v, actual):
        logits = v["x"] @ v["router"].t()
        # the op's own logits decide between experts that are equal but for rounding
        ids = oracle.best_experts(actual["router_logits"], top_k, gate)
        weight = oracle.gate_weights(logits, ids, gate)
        out = oracle.moe(v["x"], v["up"], v["down"], weight, ids, **biases(v), **form)
        return {"out": out, "router_logits": logits, "topk_weight": weight, "topk_idx": ids}

    scales = {"drouter": 1.0, "dx": 1.0}
    note = f"moe_layer {gate} {top_k} {mode} {form}{' recompute' * recompute}"
    sums = max(H, 2 * I, T * top_k)
    return Case(leaves, product, equation, sums=sums, unit=d.unit, scales=scales, note=note)


def merged(d: Draw) -> Case:
    """Experts of any shape to one weight."""
    shape = d.of((7, 33), (1,), (), (0, 5), (2, 3, 5), (129,), (40, 130))
    E = d.of(1, 2, 3, 8, 11)
    leaves = {"weight": d.floats(E, *shape), "alpha": d.gates(d.normal(E))}

    def product(v, backend):
        return {"merged": merging.merge_experts(v["weight"], v["alpha"], backend=backend)}

    def equation(v, actual):
        return {"merged": sum(v["alpha"][e] * v["weight"][e] for e in range(E))}

    sums = max(E, leaves["weight"][0].numel())
    return Case(leaves, product, equation, sums=sums, note="merge_experts")


def merged_layer(d: Draw) -> Case:
    """A linear layer with merged weights, made here or given, and kept up to date in place."""
    E = d.of(1, 2, 3, 8)
    N = d.size()
    K = d.size()
    shape = d.of((5, K), (0, K), (K,), (2, 3, K), (37, K))
    weight = d.floats(E, N, K, scale=K**-0.5)
    leaves = {"x": d.floats(*shape), "alpha": d.gates(d.normal(E))}
    if d.flag():
        leaves["bias"] = d.floats(N)
    is_given = d.flag()

    def product(v, backend):
        frozen = v["weight"]
        alpha = v["alpha"].detach()
        given = merging.merge_experts(frozen, alpha, backend=backend) if is_given else None
        y = merging.merged_linear(v["x"], frozen, v["alpha"], given, v.get("bias"), backend=backend)
        results = {"y": y}
        if backend in ("triton", "cuda") and frozen.is_contiguous():
            for name, seen in (("same", alpha), ("new", alpha + 1)):
                results[name] = torch.zeros_like(frozen[0])
                merging.remerge_experts(results[name], frozen, alpha.float(), seen.float(), backend)
        return results

    def equation(v, actual):
        whole = torch.einsum("e,enk->nk", v["alpha"], weight.double())
        results = {"y": v["x"] @ whole.t() + v.get("bias", 0)}
        if "new" in actual:
            results |= {"same": torch.zeros_like(whole.detach()), "new": whole.detach()}
        return results

    sums = max(N * K, leaves["x"].numel())
    note = f"merged_linear, {'given' if is_given else 'made'}"
    return Case(leaves, product, equation, {"weight": weight}, sums, d.unit, note=note)


def lora_experts(d: Draw) -> Case:
    """Low-rank experts over a frozen MLP; every expert is selected, or some."""
    ids, E, how = d.slots()
    T, K = ids.shape
    H = d.size()
    I = d.size()
    rank = d.of(1, 2, 5, 8, 17)
    is_dense = d.flag()
    act = d.of(*oracle.ACT)
    scaling = d.of(1.5, 0.25)
    targets = d.of(PROJECTIONS, ("gate",), ("up",), ("down",), ("gate", "down"), ("up", "gate"))
    sizes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    leaves = {"x": d.floats(T, H), "weight": d.gates(d.uniform(T, E if is_dense else K))}
    for name in targets:
        leaves |= low_rank(d, name, E, rank, *sizes[name])
    fixed = {f"{name}_proj": d.floats(*size, scale=size[1] ** -0.5) for name, size in sizes.items()}
    if d.flag():
        fixed |= {f"{name}_bias": d.floats(size[0]) for name, size in sizes.items()}
    base = dict(fixed)
    if not is_dense:
        fixed["ids"] = ids
    recompute = d.flag()

    def product(v, backend):
        pairs = {name: lora.LoRA(v[f"{name}_a"], v[f"{name}_b"]) for name in targets}
        added = {name: v[name] for name in base if name.endswith("_bias")}
        weights = [v[f"{name}_proj"] for name in PROJECTIONS]
        out = lora.lora_mlp(
            v["x"],
            *weights,
            v["weight"],
            v.get("ids"),
            **pairs,
            **added,
            scaling=scaling,
            act=act,
            recompute=recompute,
            backend=backend,
        )
        return {"out": out}

    def equation(v, actual):
        whole = {}
        for name in PROJECTIONS:
            whole[name] = base[f"{name}_proj"].double().expand(E, -1, -1)
            if name in targets:
                whole[name] = (
                    whole[name] + scaling * v[f"{name}_b"].transpose(1, 2) @ v[f"{name}_a"]
                )
        added = {}
        if "up_bias" in base:
            first = torch.cat([base["gate_bias"], base["up_bias"]]).double()
            added = {"up_bias": first.expand(E, -1)}
            added["down_bias"] = base["down_bias"].double().expand(E, -1)
        up = torch.cat([whole["gate"], whole["up"]], 1)
        every = torch.arange(E).expand(T, -1)
        chosen = every if is_dense else ids
        return {"out": oracle.moe(v["x"], up, whole["down"], v["weight"], chosen, act=act, **added)}

    note = f"lora_mlp {'dense' if is_dense else how} {act} {targets}{' recompute' * recompute}"
    return Case(leaves, product, equation, fixed, max(H, I, T, E * rank), d.unit, note=note)


def frozen_experts(d: Draw) -> Case:
    """Frozen stacks, dense or in a packed format, with low-rank terms on one of them or both."""
    ids, E, how = d.slots()
    packing = d.of("", "mxfp4", "", "int8", "", "fp8_block", "", "nf4")
    leaves = {}
    form = {"act": "silu", "gated": True}
    stacks = {}  # tensors, or the parts of a packed format
    means = {}  # what they stand for
    if packing:
        for name, shape in {"up": (E, 128, 128), "down": (E, 128, 64)}.items():
            numbers = d.normal(*shape) * shape[2] ** -0.5
            data, scales, _ = packed.pack(numbers.float(), packing)
            stacks[name] = (data, *scales)
            means[name] = packed.reference(data, scales, packing)
    else:
        leaves, form = draw_experts(d, E)
        for name in ("up", "down"):
            means[name] = leaves.pop(name)
            stacks[name] = (means[name],)
    T, K = ids.shape
    H, I = means["down"].shape[1:]
    rank = d.of(1, 3, 16)
    adapted = d.of(("up", "down"), ("up",), ("down",))
    for name in adapted:
        leaves |= low_rank(d, name, E, rank, *means[name].shape[1:])
    leaves |= {"x": d.floats(T, H), "weight": d.gates(d.uniform(T, K))}
    fixed = {"ids": ids}
    for name, parts in stacks.items():
        fixed |= {f"{name}{i}": part for i, part in enumerate(parts)}

    def product(v, backend):
        held = []
        pairs = []
        for name, parts in stacks.items():
            data, *scales = (v[f"{name}{i}"] for i in range(len(parts)))
            stack = Stack.dense(data)
            if packing:
                stack = Stack(data, scales, packing, tuple(means[name].shape))
            held.append(stack)
            pair = None
            if name in adapted:
                pair = Pair(v[f"{name}_a"], v[f"{name}_b"])
            pairs.append(pair)
        whole = FrozenExperts(*held, *biases(v).values(), *pairs, Activation(**form))
        return {"out": frozen_mlp.frozen_mlp(v["x"], whole, v["weight"], v["ids"], backend)[0]}

    def equation(v, actual):
        whole = {name: mean.double() for name, mean in means.items()}
        for name in adapted:
            whole[name] = whole[name] + v[f"{name}_b"].transpose(1, 2) @ v[f"{name}_a"]
        up, down = whole["up"], whole["down"]
        return {"out": oracle.moe(v["x"], up, down, v["weight"], ids, **biases(v), **form)}

    note = f"frozen_mlp {packing} {how} {adapted} {form}"
    return Case(leaves, product, equation, fixed, max(H, 2 * I, T * K), d.unit, note=note)


def gram(d: Draw) -> Case:
    """A stack, or tensors one by one, with a base and without."""
    n = d.of(1, 2, 3, 8, 33, 64)
    shape = d.of((7,), (1,), (3, 11), (0,), (257,), (16, 129))
    leaves = {"experts": d.floats(n, *shape)}
    if d.flag():
        leaves["base"] = d.floats(*shape)
    is_list = d.flag()

    def product(v, backend):
        stack = [*v["experts"]] if is_list else v["experts"]
        return {"gram": expansion.gram(stack, v.get("base"), backend=backend)}

    def equation(v, actual):
        rows = (v["experts"] - v.get("base", 0)).detach().reshape(n, -1)
        return {"gram": rows @ rows.t()}

    sums = max(leaves["experts"][0].numel(), 1)
    note = f"gram of {'tensors' if is_list else 'a stack'}"
    return Case(leaves, product, equation, sums=sums, note=note)


def child(d: Draw) -> Case:
    """A child of two experts by DARE, made at once or in two parts."""
    shape = d.of((7,), (1,), (3, 11), (0,), (257,), (16, 65))
    names = ("first", "second", "base") if d.flag() else ("first", "second")
    fixed = {name: d.floats(*shape) for name in names}
    drop = d.of(0.5, 0.0, 0.9, 1.0, 1 / 3)
    weights = d.of((0.5, 0.5), (0.25, 0.75), (1.0, 0.0))
    options = {"weights": weights, "drop": drop, "rescale": d.flag()}
    options |= {"seed": d.of(0, 7, 2**63 - 1), "tensor": d.of(0, 3, 2**62 + 1)}
    P = fixed["first"].numel()
    cut = d.of(0, *range(4, P, 4)) if P < 300 else 128

    def product(v, backend):
        if cut == 0:
            whole = [v[name] for name in names]
            return {"child": expansion.dare_merge(*whole, **options, backend=backend)}
        parts = []
        for start, stop in ((0, cut), (cut, P)):
            part = [v[name].reshape(-1)[start:stop] for name in names]
            parts.append(expansion.dare_merge(*part, **options, start=start, backend=backend))
        return {"child": torch.cat(parts).view(shape)}

    def equation(v, actual):
        scale = 1.0
        if options["rescale"] and drop < 1:
            scale = 1 / (1 - drop)
        base = fixed.get("base", torch.zeros(shape)).double()
        keeps = oracle.kept_by_dare(options["seed"], options["tensor"], P, drop)
        total = base
        for name, weight, keep in zip(("first", "second"), weights, keeps, strict=True):
            delta = weight * scale * (fixed[name].double() - base)
            total = total + torch.where(keep.view(shape), delta, 0.0)
        return {"child": total}

    return Case({}, product, equation, fixed, 2, note=f"dare_merge drop {drop} cut {cut}")


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
    reduction = d.of("sum", "none") if T == 0 else d.of("sum", "none", "mean")
    parts = {}
    for s, (size, vocabulary) in enumerate(zip(sizes, vocabularies, strict=True)):
        parts[f"hidden{s}"] = d.floats(T, size)
        parts[f"heads{s}"] = d.floats(vocabulary, size, scale=size**-0.5)
    leaves = {n: t for n, t in parts.items() if trains == "all" or n.startswith(trains)}
    leaves["gate"] = d.gates((2 * d.normal(T, S)).softmax(-1))
    fixed = {n: t for n, t in parts.items() if n not in leaves} | {"labels": labels}

    def lists(v):
        return [v[f"hidden{s}"] for s in range(S)], [v[f"heads{s}"] for s in range(S)]

    def product(v, backend):
        loss = fusion.fused_cross_entropy(
            *lists(v), v["gate"], v["labels"], reduction=reduction, backend=backend
        )
        return {"loss": loss, "logits": fusion.fuse_logits(*lists(v), v["gate"])}

    def equation(v, actual):
        frozen = {n: t.double() for n, t in fixed.items() if n in parts}
        logits = oracle.fused_logits(*lists(frozen | v), v["gate"])
        return {"loss": oracle.cross_entropy(logits, labels, reduction), "logits": logits}

    scales = {f"d{name}": 1.0 for name in leaves}
    note = f"fused_cross_entropy {reduction} {trains} labels {labels.tolist()}"
    return Case(leaves, product, equation, fixed, max(*sizes, V, T), d.unit, scales, note)


# case: the op whose backends it has, and what makes it
CASES: dict[str, tuple[str, Callable[[Draw], Case]]] = {
    "route": ("route", route),
    "dispatch": ("dispatch", dispatched),
    "grouped_gemm": ("grouped_gemm", grouped),
    "combine": ("combine", combined),
    "moe_mlp": ("moe_mlp", experts),
    "moe_layer": ("moe_mlp", layer),
    "merge_experts": ("merge_experts", merged),
    "merged_linear": ("merge_experts", merged_layer),
    "lora_mlp": ("lora_mlp", lora_experts),
    "frozen_mlp": ("frozen_mlp", frozen_experts),
    "gram": ("gram", gram),
    "dare_merge": ("dare_merge", child),
    "fused_cross_entropy": ("fused_cross_entropy", fused),
}
