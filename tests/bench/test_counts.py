"""The benchmarks' own counters: saved bytes against sums by hand, bytes and FLOPs of shapes."""

import pytest
import torch

from moe_runtime.bench import bench_layer, bench_memory, shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ours_saves_at_most_the_formula_and_less_than_others(dtype):
    layer = bench_layer.LayerVariants(
        shapes.Shape(
            96,
            64,
            48,
            4,
            3,
            shared=True,
        ),
        dtype,
    )
    variants, _ = bench_layer.variants_of(layer, tiny=False)
    kept = {name: bench_memory.count(layer, variant) for name, variant in variants.items()}
    most = layer.shape.T * bench_memory.formula(layer) + 4 * (layer.shape.E + 1)
    ours = {name for name in kept if name.startswith("moe_runtime")}
    for name in ours:
        assert kept[name] <= most
    size = layer.x.element_size()
    # x and the pre-activation
    assert kept["moe_runtime"] >= layer.shape.T * size * (64 + 2 * 48 * 3)
    assert {"transformers eager", "transformers grouped_mm", "official"} <= kept.keys()
    for name in kept.keys() - ours:
        assert kept[name] > kept["moe_runtime"], name
