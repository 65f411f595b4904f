"""One of the ranks of tests/modules/test_merged_kept.py: DDP trains a MergedMLP; `dist_merged.py
OUT`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_runtime.ops.activation import Activation
from tests.modules.test_merged import make


def main(path: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer = make(bias=True)  # of other numbers on rank 1, until DDP sends rank 0's
    model = nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            x = torch.randn(2, 5, 33)[rank]
            with model.no_sync() if micro == 0 else torch.enable_grad():
                model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    w = layer.merged_weights()
    up = layer.experts.up_name
    h = Activation(layer.config.hidden_act, layer.config.gated).apply(
        F.linear(x, w[up], w[f"{up}_bias"])
    )
    assert torch.equal(
        layer(x),
        F.linear(h, w["down_proj"], w["down_proj_bias"]),
    )  # nothing stale
    torch.save(layer.state_dict(), f"{path}/{rank}")
