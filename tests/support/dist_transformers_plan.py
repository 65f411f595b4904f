"""A rank of tests/hf/dropin/test_parallel_plan.py: `dist_transformers_plan.py OUT`.

Uses transformers' own expert-parallel plan, with our function behind its experts interface.
"""

from dataclasses import fields

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_runtime
from moe_runtime.hf.dropin.experts import is_experts
from tests.support.dist_expert_parallel import batch, make, whole

FAMILIES = ("qwen3_moe", "gpt_oss")
NEW = "ep_size" in {field.name for field in fields(DistributedConfig)}


def plans(ranks: int) -> dict[str, dict]:
    """DistributedConfigs by name, as far as this transformers version has them."""
    if not NEW:
        return {"plan": {"tp_size": ranks, "enable_expert_parallel": True}}
    implementations = ("auto", "all_reduce", "all_to_all")
    found = {}
    for name in implementations:
        found[name] = {
            "tp_size": ranks,
            "ep_size": ranks,
            "ep_implementation": name,
        }
    # more ranks than the tiny models have heads: the dense part is split over two ranks, or not at
    # all
    if ranks == 4:
        found = {"tp2": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}}
    return found | {
        "fsdp": {
            "tp_size": 1,
            "fsdp_size": ranks,
            "ep_size": ranks,
        }
    }


def batches(plan: dict, ranks: int) -> list[torch.Tensor]:
    """The batches of the ranks; a tensor-parallel group shares one."""
    return [batch(rank // plan.get("tp_size", 1)) for rank in range(ranks)]


def run(family: str, plan: dict, folder: str) -> dict:
    config = DistributedConfig(**plan)
    ids = batches(plan, dist.get_world_size())[dist.get_rank()]
    model = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="moe_runtime", distributed_config=config
    )
    with torch.no_grad():
        logits = whole(model.eval()(ids).logits)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradients[name] = whole(p.grad)
    experts = {
        name: len(local(p)) for name, p in model.named_parameters() if name.endswith("down_proj")
    }
    implementations = set()
    for module in model.modules():
        if is_experts(module):
            implementations.add(module.config._experts_implementation)
    return {
        "logits": logits,
        "loss": whole(loss).item(),
        "gradients": gradients,
        "experts": experts,
        "ours": implementations,
    }


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def main(out: str) -> None:
    moe_runtime.register()
    results = {}
    ranks = dist.get_world_size()
    for family in FAMILIES:
        folder = f"{out}/{family}"
        if dist.get_rank() == 0:
            make(family).save_pretrained(folder)
        dist.barrier()
        results |= {
            (family, name): run(family, plan, folder) for name, plan in plans(ranks).items()
        }
    torch.save(results, f"{out}/rank{dist.get_rank()}.pt")
