"""One of the processes of tests/hf/dropin/test_engines.py: `python -m torch.distributed.run ...
engine_worker.py ENGINE OUT`.

Runs two SGD steps on a tiny stock model, with batches that differ so much between the two ranks
that one leaves experts without a token.
"""

import os
import sys
from pathlib import Path

import torch

from tests.support.dist_expert_parallel import whole
from tests.support.dist_launch import leave
from tests.support.stock_moe import counted

torch.set_num_threads(1)
RANKS = 2
STEPS = 2
LR = 0.5
FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def make(kind: str):
    """The model, the same in every process. For "lora", PEFT's adapters of the experts and of
    attention train.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    import moe_runtime
    from moe_runtime.methods import xft

    torch.manual_seed(0)
    if kind == "upcycled":
        of_dense = {
            name: value
            for name, value in FIELDS.items()
            if "experts" not in name and "moe" not in name
        }
        model = LlamaForCausalLM(LlamaConfig(**of_dense, intermediate_size=24))
        xft.upcycle(model, num_experts=8, top_k=2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".experts." in name:  # equal ones would leave the router without a gradient
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**FIELDS))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(
            r=3, target_parameters=targets, target_modules=["q_proj"], init_lora_weights=False
        )
        model = get_peft_model(model, config)
    moe_runtime.patch(model)
    return model


def batch(rank: int) -> torch.Tensor:
    """Many tokens for rank 0, two for the others: 2 tokens with 2 slots leave at least half of 8
    experts idle.
    """
    size = (2, 40) if rank == 0 else (1, 2)
    return torch.randint(
        0,
        96,
        size,
        generator=torch.Generator().manual_seed(rank),
    )


def steps_alone(kind: str) -> dict:
    """Compute the reference for the engines: the mean of the ranks' losses in one process."""
    model = make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for rank in range(RANKS):
            parts.append(model(batch(rank), labels=batch(rank)).loss)
        (sum(parts) / RANKS).backward()
        losses.append([part.item() for part in parts])
        optimizer.step()
    gradients = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradients[name] = p.grad.clone()
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": model.state_dict(),
    }


def accelerator_of(engine: str):
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    if engine == "fsdp2":
        # accelerate disables FSDP on the CPU although its own code works there
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def steps_with_accelerate(engine: str) -> dict:
    accelerator = accelerator_of(engine)
    model = make("stock")
    counts = counted(model)
    model, optimizer = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=LR),
    )
    ids = batch(accelerator.process_index)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        gradients = {
            name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()
        }
        optimizer.step()
    weights = {}
    for name, p in model.named_parameters():
        weights[name.removeprefix("module.")] = whole(p)
    kinds = {type(p).__name__ for p in model.parameters()}
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": weights,
        "counts": counts,
        "missing": missing,
        "model": type(model).__name__,
        "parameters": kinds,
    }


def steps_with_deepspeed(kind: str) -> dict:
    import deepspeed

    # avoids minutes of g++ in each process for collectives through shared memory; gloo's suffice
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    model = make(kind)
    counts = counted(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
    )
    ids = batch(rank)
    losses = []
    missing = []
    for _ in range(STEPS):
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        losses.append(loss.item())
        learned = {}
        for n, p in engine.module.named_parameters():
            if p.requires_grad:
                learned[n] = p
        gradients = {n: deepspeed.utils.safe_get_full_grad(p) for n, p in learned.items()}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        engine.step()
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = whole(parameter.data)
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": weights,
        "counts": counts,
        "missing": missing,
        "model": type(engine).__name__,
        "parameters": {str(p.ds_status) for p in engine.module.parameters()},
    }


def main(engine: str, kind: str, out: str) -> None:
    result = steps_with_deepspeed(kind) if engine == "deepspeed" else steps_with_accelerate(engine)
    path = Path(out) / f"rank{os.environ['RANK']}.pt"
    torch.save(result, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
