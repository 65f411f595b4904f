"""What two ranks really send in one training step, by engine: for
tests/papers/test_memory_plan.py.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_runtime.hf.dropin.experts import patch
from moe_runtime.hf.dropin.parallel import shard_experts

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BATCH = 2
LENGTH = 32
sent: dict[str, list[int]] = {}  # kind -> bytes of each call


def counted(kind: str, names: tuple[str, ...], size) -> None:
    """Let torch.distributed's functions `names`, those that there are, note how many bytes this
    rank sends by them.
    """
    sent[kind] = []
    for name in names:
        original = getattr(dist, name, None)

        def call(output, *args, original=original, **kwargs):
            sent[kind].append(size(output, *args))
            return original(output, *args, **kwargs)

        if original is not None:
            setattr(dist, name, call)


def main(folder: str) -> None:
    """Write sent-ENGINE-CHECKPOINTING.json: the bytes and calls of a step, summed over the
    ranks.
    """
    n = dist.get_world_size()
    # torch 2.13 has new names for what FSDP2 calls
    counted(
        "all_gather",
        ("all_gather_into_tensor", "all_gather_single"),
        lambda output, part, *_: part.nbytes * (n - 1),
    )
    scatter = ("reduce_scatter_tensor", "reduce_scatter_single")
    counted(
        "reduce_scatter",
        scatter,
        lambda output, *args: output.nbytes * (n - 1),
    )
    counted(
        "all_to_all",
        ("all_to_all_single",),
        lambda output, rows, *_: rows.nbytes * (n - 1) // n if rows.is_floating_point() else 0,
    )
    for engine, checkpointing in (("ddp", False), ("fsdp2", False), ("ep", False), ("ep", True)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG))
        patch(model)
        mesh = init_device_mesh("cpu", (n,))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if engine == "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if engine == "ep":
            shard_experts(model, mesh)
        buckets = []
        if engine != "fsdp2":
            model = DistributedDataParallel(model)
            model.register_comm_hook(buckets, noted)
        ids = torch.randint(
            0, 512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank())
        )
        for calls in sent.values():
            calls.clear()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        total = sum(map(sum, sent.values())) + sum(2 * size * (n - 1) // n for size in buckets)
        calls = {name: len(found) for name, found in sent.items() if found} | (
            {"all_reduce": len(buckets)} if buckets else {}
        )
        every = [None] * n
        dist.all_gather_object(every, total)
        if dist.get_rank() == 0:
            Path(folder, f"sent-{engine}-{checkpointing}.json").write_text(
                json.dumps([sum(every), calls])
            )


def noted(buckets: list[int], bucket):
    """Do what DDP does without a hook, and note the bucket's size."""
    buckets.append(bucket.buffer().nbytes)
    n = dist.get_world_size()
    future = dist.all_reduce(
        bucket.buffer().div_(n),
        async_op=True,
    ).get_future()
    return future.then(lambda done: done.value()[0])
