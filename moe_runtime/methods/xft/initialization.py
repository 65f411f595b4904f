"""How an upcycled layer's experts differ from the dense MLP before they are tuned, and experts that
are shards of the MLP.

    copy    not at all
    noise   the neurons in another order, a share `ratio` of each matrix's rows with noise from
            N(0, 0.02)
    drop    the neurons in another order, a share `ratio` of each matrix's rows redrawn from
            N(mean, std) of those rows                       Drop-Upcycling, arXiv 2502.19261

A row here is a neuron's: of gate and up projection a row, of the down projection a column. Each
matrix draws its own rows, in the order of the authors' scripts (Taishi-N324/Drop-Upcycling): per
expert a permutation, then for gate, down and up the rows and their values. With the same generator
the experts are theirs bit for bit. A shared expert stays a copy.

With a granularity G (virtual groups, arXiv 2410.07524) each expert is cut into G of I / G neurons,
whose down projections are multiplied by G, and which share a row of the router. So all G have equal
logits and are chosen together, each with 1 / G of the weight: the model computes the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_runtime.config import MoEConfig, check_choice, check_number, check_positive

GRANULAR = ("softmax_topk_renorm", "topk_softmax")  # gates of a chosen token's experts sum to 1
INITS = ("copy", "noise", "drop")
NOISE = 0.02  # the standard deviation of `noise`
Matrices = Mapping[str, Tensor]  # by our names: up projections [I or 2 I, H], down_proj [H, I]


def check_init(init: str, ratio: float) -> None:
    """Raise ValueError for an unknown initialization, or a ratio that is no share."""
    check_choice("init", init, INITS)
    check_number("ratio", ratio)
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be from 0 to 1, but got {ratio}")


def granular(config: MoEConfig, granularity: int) -> MoEConfig:
    """Return the config of layers whose experts are cut into `granularity` each.

    Raises:
        ValueError: The neurons cannot be divided by it, or the gate does not keep the sum.
    """
    check_positive("granularity", granularity)
    if granularity == 1:
        return config
    I = config.intermediate_size
    plain = config.gate in GRANULAR and not config.noisy_gate and not config.bias
    if I % granularity or not plain:
        raise ValueError(
            f"granularity {granularity} requires a number of neurons that it divides, one of the "
            f"gates {', '.join(GRANULAR)} without noise, and MLPs without biases, but got "
            f"{I} neurons, gate {config.gate!r}, noisy_gate={config.noisy_gate}, "
            f"bias={config.bias}"
        )
    return replace(
        config,
        num_experts=config.num_experts * granularity,
        top_k=config.top_k * granularity,
        intermediate_size=I // granularity,
    )


def shards(expert: Matrices, granularity: int) -> Iterator[dict[str, Tensor]]:
    """Yield the experts that one is cut into."""
    down = expert["down_proj"]
    up_name = next(name for name in expert if name.endswith("up_proj"))
    halves = expert[up_name].split(down.shape[1])
    parts = zip(*(half.chunk(granularity) for half in halves), strict=True)
    for columns, rows in zip(down.chunk(granularity, 1), parts, strict=True):
        yield {up_name: torch.cat(rows), "down_proj": columns * granularity}


def experts(
    mlp: Matrices, config: MoEConfig, init: str, ratio: float, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Yield the matrices of each expert of a layer.

    Args:
        mlp: The dense MLP's, with biases [I or 2 I] and [H] if it has some.
        config: The upcycled layer's.
        init: One of INITS.
        ratio: The share of rows that changes.
        generator: On the CPU.
    """
    for _ in range(config.has_shared_expert):
        yield dict(mlp)
    for _ in range(config.num_routed_experts):
        yield dict(mlp) if init == "copy" else _expert(mlp, init, ratio, generator)


def _expert(mlp: Matrices, init: str, ratio: float, generator: torch.Generator) -> dict:
    """Return one expert's matrices."""
    down = mlp["down_proj"]
    I = down.shape[1]
    order = torch.randperm(I, generator=generator)
    up_name = next(name for name in mlp if name.endswith("up_proj"))
    gate, *up = mlp[up_name].split(I)
    halves = [_changed(gate[order], 0, init, ratio, generator)]
    changed = {"down_proj": _changed(down[:, order], 1, init, ratio, generator)}
    halves += [_changed(half[order], 0, init, ratio, generator) for half in up]
    changed[up_name] = torch.cat(halves)
    bias = mlp.get(f"{up_name}_bias")
    if bias is not None:
        changed[f"{up_name}_bias"] = torch.cat([half[order] for half in bias.split(I)])
        changed["down_proj_bias"] = mlp["down_proj_bias"]
    return changed


def _changed(
    matrix: Tensor, dim: int, init: str, ratio: float, generator: torch.Generator
) -> Tensor:
    """Return a matrix with a share of its neurons, along `dim`, changed."""
    I = matrix.shape[dim]
    chosen = torch.randperm(I, generator=generator)[: int(I * ratio)]
    part = matrix.index_select(dim, chosen)
    mean = 0.0
    std = NOISE
    if init == "drop" and part.numel():
        mean = part.mean().item()
        std = part.std().item()
    values = torch.normal(mean, std, part.shape, generator=generator).to(matrix.dtype)
    if init == "noise":
        values = part + values
    return matrix.index_copy(dim, chosen, values)
