"""Experts spread over 2 and 4 gloo processes: losses, gradients, clipped AdamW steps and the
checkpoint of one process.
"""

import functools

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin.parallel import clip_grad_norm, shard_experts
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support import dist_expert_parallel as worker
from tests.support.dist_launch import Launches
from tests.support.lora_models import lora_model

TWO = [
    name for name, scenario in worker.SCENARIOS.items() if torch.Size(scenario.mesh).numel() == 2
]
FOUR = [name for name in worker.SCENARIOS if name not in TWO]
alone = functools.cache(worker.alone)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By scenario: its checkpoint folder and what each rank found; all scenarios of as many ranks
    in one launch.
    """
    launches = Launches(worker.__file__, tmp_path_factory)

    def result(name: str):
        ranks = 2 if name in worker.OTHERS else torch.Size(worker.SCENARIOS[name].mesh).numel()
        folder = launches(ranks, *([*TWO, *worker.OTHERS] if ranks == 2 else FOUR))
        files = [folder / f"{name}-rank{rank}.pt" for rank in range(ranks)]
        return folder / name, [torch.load(file, weights_only=False) for file in files]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_equals_one_process(name, results):
    _, ranks = results(name)
    want = alone(worker.SCENARIOS[name].family, len(ranks))
    assert min(want["norms"]) > worker.MAX_NORM  # or nothing was clipped
    for rank, got in enumerate(ranks):
        assert not got["missing"]
        assert got["gradients"].keys() == want["gradients"].keys()
        assert got["losses"] == pytest.approx([losses[rank] for losses in want["losses"]], rel=1e-5)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
        for parameter, gradient in want["gradients"].items():
            assert gradient.norm() > 0, parameter
            assert distance(got["gradients"][parameter], gradient) < 1e-5, parameter
        tiny.assert_close(got["weights"], want["weights"], 1e-5)
        assert distance(got["logits"], want["logits"]) < 1e-5


@pytest.mark.parametrize("most, left", [(1.0, 1.0), (10.0, 5.0)])
def test_clipping_shrinks_large_gradients_alone(most, left):
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad = torch.full((1, 1), 3.0)
    layer.bias.grad = torch.full((1,), 4.0)
    assert clip_grad_norm(layer, most) == 5
    norm = torch.hypot(layer.weight.grad, layer.bias.grad).item()
    assert norm == pytest.approx(left, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_each_rank_holds_its_share(name, results):
    scenario, (_, ranks) = worker.SCENARIOS[name], results(name)
    whole = {
        parameter: weight.shape
        for parameter, weight in alone(scenario.family, len(ranks))["weights"].items()
    }
    replicas = scenario.mesh[0] if scenario.engine == "fsdp2" else 1
    for got in ranks:
        assert {parameter for parameter in whole if "experts" in parameter} == got["experts"].keys()
        for parameter, shape in got["experts"].items():
            assert shape[0] == whole[parameter][0] // scenario.mesh[1] // replicas
            assert shape[1:] == whole[parameter][1:]


COUNTED = [
    name
    for name, scenario in worker.SCENARIOS.items()
    if scenario.family != "ours" and not scenario.checkpointing
]


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_the_own_tokens(name, results):
    _, ranks = results(name)
    K = worker.FIELDS["num_experts_per_tok"]
    for rank, got in enumerate(ranks):
        passes = worker.STEPS * worker.batch(rank).numel() + worker.batch(0).numel()
        for counts in got["counts"].values():
            assert counts.sum() == passes * K


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_one_checkpoint(name, results):
    """Plain from_pretrained reads it, and the stock implementation runs it."""
    folder, ranks = results(name)
    want = alone(worker.SCENARIOS[name].family, len(ranks))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter for parameter, _ in model.named_parameters()} == want["weights"].keys()
    for parameter, weight in model.named_parameters():
        assert torch.equal(weight, ranks[0]["weights"][parameter]), parameter
    with torch.no_grad():
        assert distance(model(worker.batch(0)).logits, want["logits"]) < 1e-5


@pytest.mark.slow
def test_trainer(results, tmp_path):
    """transformers' Trainer as it comes: DDP, gradient accumulation, clipping."""
    model = worker.make("qwen3_moe")
    want = worker.train_and_save(model, 1, str(tmp_path), type(model).save_pretrained)
    folder, ranks = results("trainer")
    assert len(want["steps"]) == 2
    assert min(norm for _, norm in want["steps"]) > worker.MAX_NORM
    for got in ranks:
        assert got["wrapped"] == "DistributedDataParallel"
        assert got["steps"] == [pytest.approx(step, rel=1e-5) for step in want["steps"]]
        tiny.assert_close(got["weights"], want["weights"], 1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(weight, ranks[0]["weights"][parameter])
        for parameter, weight in model.named_parameters()
    )
    first, got = (
        AutoModelForCausalLM.from_pretrained(there / "step1").state_dict()
        for there in (tmp_path, folder)
    )
    assert first.keys() == got.keys()
    assert not torch.equal(got["lm_head.weight"], model.lm_head.weight)
    assert all(distance(got[name], weight) < 1e-5 for name, weight in first.items())


@pytest.mark.slow
def test_a_checkpoint_of_every_rank_resumes(results, tmp_path):
    """MoETrainer with AdamW: weights and moments of each rank's experts, as of one process that
    never stopped.

    Each rank also refuses a planted index of the optimizer's state.
    """
    want = worker.train(worker.make("qwen3_moe"), 1, str(tmp_path))["weights"]
    folder, ranks = results("resumed")
    assert {"experts", "experts-optimizer"} <= {
        path.name for path in (folder / "checkpoint-1").iterdir()
    }
    for got in ranks:
        assert (
            max(distance(got["weights"][parameter], weight) for parameter, weight in want.items())
            < 1e-5
        )


@pytest.mark.slow
def test_the_command_trains_with_ep_size(results):
    folder, _ = results("command")
    assert (folder / "checkpoint-2" / "experts-optimizer").is_dir()
    folders = (f"{folder}-base", folder, f"{folder}-whole")
    base, got, want = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in folders)
    for name, weight in want.items():
        assert distance(got[name], weight) < 1e-5, name
        assert not torch.equal(weight, base[name]), name


@pytest.mark.slow
def test_trainer_saves_adapters(results, tmp_path):
    """LoRA of the attention beside frozen experts that are spread: Trainer's own checkpoints, at
    every step.
    """
    from peft import PeftModel

    want = worker.train(worker.with_lora(worker.make("qwen3_moe")), 1, str(tmp_path))
    folder, ranks = results("lora")
    for got in ranks:
        assert got["steps"] == [pytest.approx(step, rel=1e-5) for step in want["steps"]]
        tiny.assert_close(got["weights"], want["weights"], 1e-5)
    saved = PeftModel.from_pretrained(worker.make("qwen3_moe"), folder / "checkpoint-2")
    for name, p in saved.named_parameters():
        assert torch.equal(p, ranks[0]["weights"][name])
    assert (folder / "checkpoint-1").is_dir()


@pytest.fixture
def three():
    """A mesh of three ranks that are not there: what is refused is refused before anything
    is sent.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield functools.partial(init_device_mesh, "cpu")
    torch.distributed.destroy_process_group()


def test_refuses(three):
    model = worker.make("qwen3_moe")
    mesh = three((3,))
    before = dict(model.named_parameters())
    for make, says in [
        (
            lambda: shard_experts(model, mesh),
            "mlp.experts has 8 experts, which must be divisible by the 3 ranks",
        ),
        (lambda: shard_experts(model, three((1, 1, 3))), "replicas and experts, but has 3"),
        (lambda: shard_experts(model, mesh, gradients="max"), "gradients must be one of mean, sum"),
        (lambda: shard_experts(torch.nn.Linear(2, 2), mesh), "Linear has no experts"),
        (
            lambda: shard_experts(DistributedDataParallel(model), mesh),
            "The model is wrapped in DistributedDataParallel",
        ),
        (
            lambda: shard_experts(lora_model(), mesh),
            "layers.0.mlp has LoRA experts, which have no stacks",
        ),
        (
            lambda: shard_experts(lora_model(form="linear"), mesh),
            "gate_proj has LoRA experts, which have no stacks",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            make()
    quantized = worker.make("qwen3_moe")
    experts = quantized.model.layers[0].mlp.experts
    stack = experts.down_proj
    for kind, says in (  # as bitsandbytes' bytes, and its parametrization
        (
            lambda: setattr(experts, "down_proj", torch.nn.Parameter(stack.detach().byte(), False)),
            "down_proj as torch.uint8. Load",
        ),
        (
            lambda: register_parametrization(experts, "gate_up_proj", torch.nn.Identity()),
            r"parametrized \['gate_up_proj'\]",
        ),
    ):
        kind()
        with pytest.raises(ValueError, match=says):
            shard_experts(quantized, mesh)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, parameter in before.items():
        assert after[name] is parameter
    assert model.model.layers[0].mlp.experts.config._experts_implementation != "moe_runtime"


def test_a_second_call_changes_nothing(three, tmp_path):
    config = transformers.Qwen3MoeConfig(**worker.FIELDS, moe_intermediate_size=24, num_experts=6)
    model = transformers.Qwen3MoeForCausalLM(config)
    mesh = three((3,))
    down = model.model.layers[0].mlp.experts.down_proj
    down.requires_grad_(False)
    assert shard_experts(model, mesh) == 2
    first = dict(model.named_parameters())
    got = first["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(got.to_local(), down[2:4]) and not got.requires_grad  # rank 1 of 3
    assert got.to_local().untyped_storage().nbytes() == down.nbytes // 3  # the rest is gone
    assert shard_experts(model, mesh) == 2
    for name, parameter in model.named_parameters():
        assert first[name] is parameter
    with pytest.raises(ValueError, match="parallel.save_pretrained.* on every rank"):
        model.save_pretrained(tmp_path)  # as Trainer would, on one rank alone
    with pytest.raises(ValueError, match="The experts of Qwen3MoeModel are distributed"):
        model.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="as a DTensor .* but must be unsharded"):
        shard_experts(model, three((1, 3)))
