"""Experts distributed over 2 and 4 gloo processes: losses, gradients, clipped AdamW steps and the
checkpoint equal those of one process.
"""

import functools

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin.parallel import clip_grad_norm, shard_experts
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support import dist_expert_parallel as worker
from tests.support.dist_launch import Launches, fake_group
from tests.support.lora_models import lora_model

TWO = [
    name for name, scenario in worker.SCENARIOS.items() if torch.Size(scenario.mesh).numel() == 2
]
FOUR = [name for name in worker.SCENARIOS if name not in TWO]
alone = functools.cache(worker.alone)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the checkpoint folder and each rank's results of a scenario; scenarios with the same
    number of ranks share one launch.
    """
    launches = Launches(worker.__file__, tmp_path_factory)

    def result(name: str):
        ranks = 2 if name in worker.OTHERS else torch.Size(worker.SCENARIOS[name].mesh).numel()
        folder = launches(
            ranks,
            *([*TWO, *worker.OTHERS] if ranks == 2 else FOUR),
        )
        files = [folder / f"{name}-rank{rank}.pt" for rank in range(ranks)]
        return folder / name, [torch.load(file, weights_only=False) for file in files]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_equals_one_process(name, results):
    """Compares training steps, each rank's share of the experts and of the counts, and the
    checkpoint, which plain from_pretrained reads and the stock implementation runs.
    """
    folder, ranks = results(name)
    scenario = worker.SCENARIOS[name]
    expected = alone(scenario.family, len(ranks))

    assert min(expected["norms"]) > worker.MAX_NORM  # make sure that clipping takes effect
    for gradient in expected["gradients"].values():
        assert gradient.norm() > 0
    replicas = scenario.mesh[0] if scenario.engine == "fsdp2" else 1
    for rank, values in enumerate(ranks):
        assert not values["missing"]
        losses = [step[rank] for step in expected["losses"]]
        assert values["losses"] == pytest.approx(losses, rel=1e-5)
        assert values["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert values["gradients"].keys() == expected["gradients"].keys()
        tiny.assert_close(values["gradients"], expected["gradients"], 1e-5)
        tiny.assert_close(values["weights"], expected["weights"], 1e-5)
        assert distance(values["logits"], expected["logits"]) < 1e-5
        for parameter, weight in expected["weights"].items():
            if "experts" in parameter:
                share, *rest = values["experts"][parameter]
                assert share == len(weight) // scenario.mesh[1] // replicas
                assert rest == list(weight.shape[1:])
        if scenario.family != "ours" and not scenario.checkpointing:
            passes = worker.STEPS * worker.batch(rank).numel() + worker.batch(0).numel()
            for counts in values["counts"].values():
                assert counts.sum() == passes * worker.FIELDS["num_experts_per_tok"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = dict(model.named_parameters())
    assert weights.keys() == expected["weights"].keys()
    tiny.assert_equal(weights, ranks[0]["weights"])
    with torch.no_grad():
        assert (
            distance(
                model(worker.batch(0)).logits,
                expected["logits"],
            )
            < 1e-5
        )


@pytest.mark.parametrize("most, left", [(1.0, 1.0), (10.0, 5.0)])
def test_clipping_shrinks_large_gradients_alone(most, left):
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad = torch.full((1, 1), 3.0)
    layer.bias.grad = torch.full((1,), 4.0)
    assert clip_grad_norm(layer, most) == 5
    norm = torch.hypot(layer.weight.grad, layer.bias.grad).item()
    assert norm == pytest.approx(left, rel=1e-5)


@pytest.mark.slow
def test_trainer(results, tmp_path):
    """Runs transformers' Trainer unchanged: DDP, gradient accumulation, clipping."""
    model = worker.make("qwen3_moe")
    expected = worker.train_and_save(
        model,
        1,
        str(tmp_path),
        type(model).save_pretrained,
    )
    folder, ranks = results("trainer")

    assert len(expected["steps"]) == 2
    assert min(norm for _, norm in expected["steps"]) > worker.MAX_NORM
    for values in ranks:
        assert values["wrapped"] == "DistributedDataParallel"
        assert values["steps"] == [pytest.approx(step, rel=1e-5) for step in expected["steps"]]
        tiny.assert_close(values["weights"], expected["weights"], 1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tiny.assert_equal(dict(model.named_parameters()), ranks[0]["weights"])
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "step1").state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder / "step1").state_dict()
    assert first.keys() == ours.keys()
    assert not torch.equal(ours["lm_head.weight"], model.lm_head.weight)
    tiny.assert_close(ours, first, 1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_every_rank_resumes(results, tmp_path):
    """MoETrainer with AdamW: weights and moments of each rank's experts equal those of an
    uninterrupted process.

    Each rank also refuses a planted index of the optimizer's state.
    """
    expected = worker.train(
        worker.make("qwen3_moe"),
        1,
        str(tmp_path),
    )["weights"]
    folder, ranks = results("resumed")
    for name in ("experts", "experts-optimizer"):
        assert (folder / "checkpoint-1" / name).is_dir()
    for values in ranks:
        tiny.assert_close(values["weights"], expected, 1e-5)


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
    """LoRA on attention next to distributed frozen experts: Trainer's own checkpoints, at every
    step.
    """
    from peft import PeftModel

    want = worker.train(
        worker.with_lora(worker.make("qwen3_moe")),
        1,
        str(tmp_path),
    )
    folder, ranks = results("lora")
    for got in ranks:
        assert got["steps"] == [pytest.approx(step, rel=1e-5) for step in want["steps"]]
        tiny.assert_close(got["weights"], want["weights"], 1e-5)
    saved = PeftModel.from_pretrained(
        worker.make("qwen3_moe"),
        folder / "checkpoint-2",
    )
    for name, p in saved.named_parameters():
        assert torch.equal(p, ranks[0]["weights"][name])

    assert (folder / "checkpoint-1").is_dir()


@pytest.fixture
def three():
    """What makes meshes of three ranks that do not exist."""
    with fake_group(3):
        yield functools.partial(init_device_mesh, "cpu")


@pytest.mark.parametrize(
    "make, size, options, says",
    [
        (worker.make, (3,), {}, "mlp.experts has 8 experts, which must be divisible by the 3"),
        (
            lambda name: DistributedDataParallel(worker.make(name)),
            (3,),
            {},
            "The model is wrapped in DistributedDataParallel",
        ),
        (lambda _: lora_model(), (3,), {}, "layers.0.mlp has LoRA experts, which have no stacks"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_refuses(make, size, options, says, three):
    model = make("qwen3_moe")
    mesh = three(size)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=says):
        shard_experts(model, mesh, **options)
    after = dict(model.named_parameters())

    assert after.keys() == before.keys()
    for name, parameter in before.items():
        assert after[name] is parameter


def test_a_second_call_changes_nothing(three, tmp_path):
    config = transformers.Qwen3MoeConfig(
        **worker.FIELDS,
        moe_intermediate_size=24,
        num_experts=6,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    mesh = three((3,))
    down = model.model.layers[0].mlp.experts.down_proj
    down.requires_grad_(False)

    assert shard_experts(model, mesh) == 2
    first = dict(model.named_parameters())
    got = first["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(got.to_local(), down[2:4]) and not got.requires_grad  # rank 1 of 3
    assert got.to_local().untyped_storage().nbytes() == down.nbytes // 3  # the rest is freed
    assert shard_experts(model, mesh) == 2
    for name, parameter in model.named_parameters():
        assert first[name] is parameter
    with pytest.raises(
        ValueError,
        match="parallel.save_pretrained.* on every rank",
    ):
        model.save_pretrained(tmp_path)  # as Trainer would, on only one rank
