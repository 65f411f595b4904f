"""A rank of tests/ops/test_all_to_all.py: `dist_all_to_all.py OUT`, started by dist_launch."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_runtime.ops.all_to_all import all_to_all, local_parts, run_at_owners
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_mlp import run_experts

torch.set_num_threads(1)
E = 8
H = 33
I = 17
K = 3
TOKENS = {  # tokens of rank r, by case
    "ragged": lambda rank: 7 + 5 * rank,
    "empty_rank": lambda rank: 0 if rank == 1 else 9,
    "one_expert": lambda rank: 6,
    "dropped": lambda rank: 10,
    "all_dropped": lambda rank: 4,
}


def case(name: str, rank: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Inputs of rank `rank`: x [T, H], ids and weights [T, K], and the gradient dout [T, H]."""
    generator = torch.Generator().manual_seed(100 + rank)
    T = TOKENS[name](rank)
    idx = torch.rand(T, E, generator=generator).topk(K).indices
    if name == "one_expert":
        idx = torch.full((T, K), 5)
    if name == "dropped":
        idx[::2, 1] = -1
        idx[1::3, 2] = E
        idx[4] = E + 3
    if name == "all_dropped":
        idx = torch.full((T, K), E)
    x, dout = (
        torch.randn(
            2,
            T,
            H,
            generator=generator,
            dtype=torch.float64,
        ).to(dtype)
    ).unbind()
    weight = torch.rand(T, K, generator=generator, dtype=torch.float64)
    weight[(idx < 0) | (idx >= E)] = torch.nan  # must not be read
    return {
        "x": x,
        "idx": idx,
        "weight": weight if dtype == torch.float64 else weight.float(),
        "dout": dout,
    }


def stacks(dtype=torch.float64) -> dict[str, torch.Tensor]:
    """The experts' weights [E, ...]."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (E, 2 * I, H), "down": (E, H, I), "up_bias": (E, 2 * I), "down_bias": (E, H)}
    values = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        values[name] = numbers.to(dtype) / shape[-1] ** 0.5
    return values


def run_case(name: str, mesh, gradients: str, dtype=torch.float64) -> dict:
    """Run this rank's share of a batch through the experts of all ranks."""
    inputs = case(name, dist.get_rank(), dtype)
    experts = stacks(dtype)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    n = mesh.size(-1)
    place = mesh.get_local_rank(mesh.ndim - 1)
    leaves = {}
    for key, stack in experts.items():
        leaves[key] = DTensor.from_local(
            stack.chunk(n)[place].clone(),
            mesh,
            placements,
        ).requires_grad_()
    x = inputs["x"].requires_grad_()
    weight = inputs["weight"].requires_grad_()
    (up, down, up_bias, down_bias), owners = local_parts(list(leaves.values()), gradients)

    def run(rows, idx, ones):
        return run_experts(
            rows,
            ExpertStacks(up, down, up_bias, down_bias),
            ones,
            idx,
        )

    out, offsets = run_at_owners(x, inputs["idx"], weight, owners, run)
    out.backward(inputs["dout"])
    grads = {key: leaf.grad.full_tensor() for key, leaf in leaves.items()}
    return {
        "out": out.detach(),
        "offsets": offsets,
        "grads": grads | {"x": x.grad, "weight": weight.grad},
    }


def rows_there_and_back(group) -> dict:
    """Rank r sends r + s + 1 rows to rank s, so that each received row identifies its sender."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    send = [rank + s + 1 for s in range(n)]
    receive = [s + rank + 1 for s in range(n)]
    rows = torch.tensor(
        [[10.0 * rank + s] for s in range(n) for _ in range(send[s])], requires_grad=True
    )
    there = all_to_all(rows, send, receive, group)
    back = all_to_all(there * 2, receive, send, group)
    (back * torch.arange(len(back))[:, None]).sum().backward()
    return {
        "sent": rows.detach(),
        "there": there.detach(),
        "back": back.detach(),
        "grad": rows.grad,
    }


def refusals(mesh) -> dict[str, str]:
    parts = [
        torch.zeros(E // mesh.size(), 2, 3),
        torch.zeros(E // mesh.size(), 3),
    ]
    messages = {}
    sharded = [DTensor.from_local(part, mesh, [Shard(0)]) for part in parts]
    tries = {
        "columns": [DTensor.from_local(part, mesh, [Shard(1)]) for part in parts],
        "mixed": [
            sharded[0],
            DTensor.from_local(parts[1], mesh, [Replicate()]),
        ],
        "half": [sharded[0], parts[1]],
        "ragged": [
            DTensor.from_local(
                torch.zeros(1 + dist.get_rank(), 2), mesh, [Shard(0)], shape=(3, 2), stride=(2, 1)
            )
        ],
    }
    for name, tensors in tries.items():
        try:
            local_parts(tensors)
        except ValueError as error:
            messages[name] = str(error)
    replicated, owners = local_parts(
        [
            DTensor.from_local(parts[0], mesh, [Replicate()]),
            None,
        ]
    )
    assert owners is None
    assert replicated[1] is None
    assert type(replicated[0]) is torch.Tensor
    return messages


def main(out: str) -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    results = {}
    for name in TOKENS:
        for gradients in ("mean", "sum"):
            results[(name, 1, gradients)] = run_case(name, mesh, gradients)
    results["float32"] = run_case("ragged", mesh, "mean", torch.float32)
    results["bfloat16"] = run_case("ragged", mesh, "mean", torch.bfloat16)
    results["rows"] = rows_there_and_back(mesh.get_group())
    results["refusals"] = refusals(mesh) if n == 2 else {}
    if n == 4:
        both = init_device_mesh("cpu", (2, 2))
        results |= {
            (name, 2, gradients): run_case(name, both, gradients)
            for name in TOKENS
            for gradients in ("mean", "sum")
        }
    torch.save(results, f"{out}/rank{dist.get_rank()}.pt")
