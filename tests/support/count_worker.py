"""One of two processes that count tokens and add up their counts: `count_worker.py RENDEZVOUS`."""

import torch
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin.stats import RouterCounter
from moe_runtime.modules.moe import MoE


def main() -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=16, intermediate_size=8, num_experts=5, top_k=3, gate="softmax_topk"
    )
    model = nn.Sequential(MoE(config))
    x = torch.randn(2, 20, 16)
    nn.init.normal_(model[0].gate.weight)
    ids = [model[0].gate(tokens).topk_idx.flatten() for tokens in x]
    counter = RouterCounter(model)
    model(x[rank])
    assert torch.equal(
        counter.read().counts[0],
        torch.bincount(ids[rank], minlength=5),
    )
    assert torch.equal(
        counter.read(reduce=True).counts[0], torch.bincount(torch.cat(ids), minlength=5)
    )
