"""A rank of tests/hf/dropin/test_parallel.py: `dist_expert_parallel.py OUT SCENARIO...`.

Runs AdamW steps with clipped gradients on tiny models, with batches that differ so much between
ranks that some leave experts without a token.
"""

import functools
import json
import pickle
import re
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.hf.dropin.parallel import (
    clip_grad_norm,
    parameter_groups,
    save_pretrained,
    shard_experts,
)
from moe_runtime.hf.training.saving import last_whole_checkpoint
from tests.support.pickled import Planted
from tests.support.stock_moe import counted

torch.set_num_threads(1)
STEPS = 2
MAX_NORM = 0.1
VOCAB = 96
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}


class Scenario(NamedTuple):
    family: str
    engine: str
    mesh: tuple[int, int]  # replicas, owners
    checkpointing: bool = False
    optimizer: str = ""  # an option of AdamW
    scaled: bool = False


def scenario_of(name: str) -> Scenario:
    """Return the scenario that a name describes."""
    family, engine, *parts = name.split("-")
    sizes = {part[:2]: int(part[2:]) for part in parts if part[:2] in ("dp", "ep")}
    return Scenario(
        {"qwen3": "qwen3_moe"}.get(family, family),
        engine,
        (sizes.get("dp", 1), sizes["ep"]),
        "checkpointing" in parts,
        "".join(part for part in parts if part in ("fused", "foreach")),
        "scaled" in parts,
    )


NAMES = """
qwen3-ddp-ep2
gpt_oss-ddp-ep2
ours-ddp-ep2
qwen3-fsdp2-ep2
qwen3-ddp-ep2-checkpointing
qwen3-ddp-ep2-fused
qwen3-ddp-ep2-foreach
qwen3-ddp-ep2-scaled
qwen3-ddp-ep4
qwen3-fsdp2-ep4
qwen3-ddp-dp2-ep2
qwen3-fsdp2-dp2-ep2
ours-fsdp2-dp2-ep2-fused
"""
SCENARIOS = {name: scenario_of(name) for name in NAMES.split()}


def make(family: str):
    """The model, the same in every process, with large weights, so that rounding does not decide
    the routing.
    """
    import transformers

    torch.manual_seed(0)
    if family == "ours":
        from tests.hf.tiny import upcycled

        return upcycled("llama").train()
    if family == "gpt_oss":
        config = transformers.GptOssConfig(
            **FIELDS,
            intermediate_size=24,
            num_local_experts=4,
        )
        config._attn_implementation = "eager"
        model = transformers.GptOssForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            **FIELDS, moe_intermediate_size=24, num_experts=8, tie_word_embeddings=True
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else:
                (parameter.add_(torch.randn_like(parameter) / 8))
    return model


def batch(rank: int) -> torch.Tensor:
    """Many tokens for even ranks, two for odd ones: 2 tokens with 2 slots leave at least half of 8
    experts idle.
    """
    return torch.randint(
        0,
        VOCAB,
        (2, 20) if rank % 2 == 0 else (1, 2),
        generator=torch.Generator().manual_seed(rank),
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def optimizers_of(model, scenario: Scenario | None = None) -> list[torch.optim.Optimizer]:
    """A single AdamW by default, or several as the docs recommend for its options and a
    GradScaler.
    """
    if scenario and (scenario.optimizer or scenario.scaled):
        groups = parameter_groups(model)
    else:
        groups = model.parameters()
    switches = {scenario.optimizer: True} if scenario and scenario.optimizer else {}
    # far above 1e-8, where a gradient that is zero up to rounding would cause a whole step
    make = functools.partial(
        torch.optim.AdamW,
        lr=1e-2,
        weight_decay=0.1,
        eps=1e-5,
        **switches,
    )
    return [make([group]) for group in groups] if scenario and scenario.scaled else [make(groups)]


def steps(model, losses_of, clip, optimizers, scaler=NO_SCALER) -> dict:
    """Train; return losses, the norms of the gradients, and the first step's gradients."""
    losses = []
    norms = []
    gradients = {}
    for _ in range(STEPS):
        model.zero_grad()
        losses.append(losses_of())
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        missing = []
        for name, p in model.named_parameters():
            if p.grad is None:
                missing.append(name)
        gradients = gradients or {
            name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        norms.append(whole(clip(model, MAX_NORM)).item())
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "missing": missing,
    }


def alone(family: str, ranks: int) -> dict:
    """Compute the reference for all engines: the mean of the ranks' losses in one process, with the
    unchanged model.
    """
    model = make(family)

    def losses_of():
        parts = []
        for rank in range(ranks):
            parts.append(model(batch(rank), labels=batch(rank)).loss)
        (sum(parts) / ranks).backward()
        return [part.item() for part in parts]

    def clip(model, most):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    result = steps(model, losses_of, clip, optimizers_of(model))
    with torch.no_grad():
        logits = model(batch(0)).logits
    return result | {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "logits": logits,
    }


def spread(model, scenario: Scenario):
    """Distribute the model over the ranks as a user would; return what to call."""
    mesh = init_device_mesh("cpu", scenario.mesh, mesh_dim_names=("dp", "ep"))
    if scenario.engine == "ddp":
        shard_experts(model, mesh if scenario.mesh[0] > 1 else mesh["ep"])
        return DistributedDataParallel(model)
    shard_experts(model, mesh["ep"])
    everyone = init_device_mesh("cpu", (mesh.size(),))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def run(scenario: Scenario, folder: str) -> dict:
    model = make(scenario.family)
    ids = batch(dist.get_rank())
    before = {name: p.shape for name, p in model.named_parameters()}
    if scenario.checkpointing:
        model.gradient_checkpointing_enable()
    called = spread(model, scenario)
    counts = counted(model)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=1024.0,
        enabled=scenario.scaled,
    )

    def losses_of():
        loss = called(ids, labels=ids).loss
        scaler.scale(loss).backward()
        return loss.item()

    result = steps(
        model,
        losses_of,
        clip_grad_norm,
        optimizers_of(model, scenario),
        scaler,
    )
    assert {name: p.shape for name, p in model.named_parameters()} == before
    with torch.no_grad():
        logits = model(batch(0)).logits
    save_pretrained(called, folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_model_state_dict(model, options=options)  # saved by torch on rank 0
    weights = {name: whole(p) for name, p in model.named_parameters()}
    assert dist.get_rank() or all(
        torch.equal(states[name], weight) for name, weight in weights.items()
    )
    experts = {}
    for name, p in model.named_parameters():
        if "experts" in name and hasattr(p, "to_local"):
            experts[name] = tuple(p.to_local().shape)
    return result | {
        "weights": weights,
        "logits": logits,
        "counts": counts,
        "experts": experts,
    }


def trainer_of(model, ranks: int, folder: str, callbacks=(), kind=None, **options):
    """transformers' Trainer, unless `kind` names another one: two steps of 8 rows in two
    micro-batches on `ranks` processes.
    """
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(0)
    ids = []
    for _ in range(16):
        ids.append(torch.randint(0, VOCAB, (12,), generator=generator))
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=4 // ranks,
        gradient_accumulation_steps=2,
        max_grad_norm=MAX_NORM,
        learning_rate=1e-2,
        adam_epsilon=1e-5,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no"} | options,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    return (kind or Trainer)(
        model,
        arguments,
        train_dataset=data,
        callbacks=list(callbacks),
    )


def train(model, *args, **options) -> dict:
    trainer = trainer_of(model, *args, **options)
    trainer.train()
    steps = []
    for log in trainer.state.log_history:
        if "loss" in log:
            steps.append((log["loss"], log["grad_norm"]))
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {
        "steps": steps,
        "weights": weights,
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def sharded(model):
    shard_experts(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train_and_save(model, ranks: int, folder: str, save) -> dict:
    """Train, and save the weights to step1 after the first step, as in the docs."""
    from transformers import TrainerCallback

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                save(model, f"{folder}/step1")

    return train(model, ranks, folder, [Save()])


def run_trainer(folder: str) -> dict:
    model = sharded(make("qwen3_moe"))
    result = train_and_save(
        model,
        dist.get_world_size(),
        folder,
        save_pretrained,
    )
    save_pretrained(model, folder)
    return result


def run_resumed(folder: str) -> dict:
    """MoETrainer that stops after a checkpoint, and one that resumes from it in a model of
    zeros.
    """
    from transformers import TrainerCallback

    from moe_runtime.hf import MoETrainer

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    options = {"kind": MoETrainer, "save_strategy": "steps", "save_steps": 1}
    trainer_of(
        sharded(make("qwen3_moe")), dist.get_world_size(), folder, [Stop()], **options
    ).train()
    model = sharded(make("qwen3_moe"))
    for parameter in model.parameters():
        (parameter.data.to_local() if hasattr(parameter, "to_local") else parameter.data).zero_()
    again = trainer_of(model, dist.get_world_size(), folder, **options)
    again.train(resume_from_checkpoint=True)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    index = last_whole_checkpoint(folder) / "experts-optimizer" / ".metadata"
    touched = Path(f"{folder}-touched")
    dist.barrier()
    if dist.get_rank() == 0:
        index.write_bytes(pickle.dumps(Planted(touched)))
    dist.barrier()
    with pytest.raises(
        ValueError,
        match=f"{re.escape(str(index))} is refused",
    ):
        again.train(resume_from_checkpoint=True)
    dist.barrier()
    assert not touched.exists()
    return {"weights": weights}


def write_base(folder: str) -> None:
    """Write a model with its tokenizer, and examples."""
    from tests.hf.dropin.test_layers import TOKENIZER, stock

    stock().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    rows = []
    for i in range(4):
        for j in range(4):
            rows.append({"text": f"{i} and {j} make {i + j}"})
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_command(folder: str) -> dict:
    """Run `moe-runtime train` with the experts split over the ranks, and with all experts on both:
    the routers' losses are per rank.
    """
    from moe_runtime.hf import train_command

    base = f"{folder}-base"
    if dist.get_rank() == 0:
        write_base(base)
    dist.barrier()
    words = (
        "--max_steps 2 --save_steps 1 --learning_rate 1e-2 --adam_epsilon 1e-5 "
        "--per_device_train_batch_size 1"
    )
    words += (
        f" --optim adamw_torch --report_to none --no_router_stats --model {base} --data "
        f"{base}/rows.jsonl"
    )
    with mock.patch.object(
        dist,
        "destroy_process_group",
    ):  # which others need
        for out, ep_size in ((folder, "2"), (f"{folder}-whole", "1")):
            train_command(
                [
                    *words.split(),
                    "--output_dir",
                    out,
                    "--ep_size",
                    ep_size,
                ]
            )
    return {}


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            init_lora_weights=False,
        ),
    )


def run_lora(folder: str) -> dict:
    """LoRA on attention next to distributed frozen experts, with Trainer's own checkpoints."""
    model = sharded(with_lora(make("qwen3_moe")))
    return train(
        model,
        dist.get_world_size(),
        folder,
        save_strategy="steps",
        save_steps=1,
    )


def run_overflow(folder: str) -> dict:
    """Make a gradient of one expert infinite, only on the last rank."""
    model = sharded(make("qwen3_moe"))
    scaler = torch.amp.GradScaler("cpu")
    optimizers = []
    for group in parameter_groups(model):
        optimizers.append(torch.optim.SGD([group], lr=10))
    before = {name: whole(p) for name, p in model.named_parameters()}
    ids = batch(dist.get_rank())
    scale = scaler.get_scale()
    scaler.scale(
        DistributedDataParallel(model)(
            ids,
            labels=ids,
        ).loss
    ).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        model.model.layers[0].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    moved = set()
    for name, p in model.named_parameters():
        if not torch.equal(whole(p), before[name]):
            moved.add(name)
    return {"moved": moved, "scale": scaler.get_scale() / scale}


OTHERS = {
    "trainer": run_trainer,
    "resumed": run_resumed,
    "lora": run_lora,
    "overflow": run_overflow,
    "command": run_command,
}


def main(out: str, *names: str) -> None:
    for name in names:
        if name in OTHERS:
            result = OTHERS[name](f"{out}/{name}")
        else:
            result = run(SCENARIOS[name], f"{out}/{name}")
        torch.save(result, f"{out}/{name}-rank{dist.get_rank()}.pt")
