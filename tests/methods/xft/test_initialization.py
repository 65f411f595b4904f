"""moe_runtime.methods.xft.initialization: the released scripts' experts bit for bit, in folders."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.methods.xft import initialization
from moe_runtime.methods.xft.folders import merge_folder, upcycle_folder
from tests.hf.tiny import dense
from tests.support.checkpoints import assert_equal, tensors

I, H = 12, 5
RATIOS = [0.0, 0.5, 1.0]


def released(mlp: dict, experts: int, seed: int, ratio: float, init: str) -> list[dict]:
    """Draw experts as Taishi-N324/Drop-Upcycling's scripts do, from torch's own generator."""
    torch.manual_seed(seed)
    result = []
    for _ in range(experts):
        order = torch.randperm(I)
        expert = {}
        for name in ("gate", "down", "up"):
            matrix = mlp[name][:, order] if name == "down" else mlp[name][order]
            count = int(I * ratio)
            chosen = torch.randperm(I)[:count]
            place = (slice(None), chosen) if name == "down" else (chosen, slice(None))
            size = (H, count) if name == "down" else (count, H)
            if init == "drop":
                part = matrix[place]
                std, mean = part.std().item(), part.mean().item()
                matrix[place] = torch.normal(mean=mean, std=std, size=size).to(matrix.dtype)
            else:
                matrix[place] += torch.normal(mean=0, std=0.02, size=size).to(matrix.dtype)
            expert[name] = matrix
        result.append(expert)
    return result


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("init", ["drop", "noise"])
@pytest.mark.filterwarnings("ignore:std")  # of no neurons
def test_experts_are_the_released_scripts(init, ratio):
    generator = torch.Generator().manual_seed(3)
    drawn = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    mlp = {name: torch.randn(size, generator=generator).bfloat16() for name, size in drawn.items()}
    if ratio == 0 and init == "drop":
        expected = released(mlp, 3, 7, ratio, "noise")
    else:
        expected = released(mlp, 3, 7, ratio, init)
    ours = {"gate_up_proj": torch.cat([mlp["gate"], mlp["up"]]), "down_proj": mlp["down"]}
    config = SimpleConfig()
    again = torch.Generator().manual_seed(7)
    for expert, theirs in zip(
        initialization.experts(ours, config, init, ratio, again), expected, strict=True
    ):
        assert torch.equal(expert["gate_up_proj"], torch.cat([theirs["gate"], theirs["up"]]))
        assert torch.equal(expert["down_proj"], theirs["down"])


class SimpleConfig:
    """Of three routed experts."""

    has_shared_expert = False
    num_routed_experts = 3


SETTINGS = {"num_experts": 4, "top_k": 2, "seed": 1}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_reordered_neurons_compute_the_dense_model(tmp_path, family):
    base = dense(family)
    base.save_pretrained(tmp_path / "base")
    options = SETTINGS | {"gate": "softmax_topk_renorm", "init": "drop", "ratio": 0.0}
    upcycle_folder(tmp_path / "base", tmp_path / "moe", **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    stack = tensors(tmp_path / "moe")
    down = next(value for key, value in stack.items() if "experts.down_proj" in key)
    assert not torch.equal(down[0], down[1])
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, base(ids).logits, atol=1e-4)


def test_a_shared_expert_stays_a_copy_and_others_differ(tmp_path):
    dense("llama").save_pretrained(tmp_path / "base")
    options = SETTINGS | {"gate": "xft"}
    for name, more in (("drop", {"init": "drop"}), ("again", {"init": "drop"}), ("copy", {})):
        upcycle_folder(tmp_path / "base", tmp_path / name, **options, **more)
    changed = tensors(tmp_path / "drop")
    copies = tensors(tmp_path / "copy")
    assert changed.keys() == copies.keys()
    assert_equal(changed, tensors(tmp_path / "again"))
    for key, stack in copies.items():
        if ".experts.gate_up_proj" in key and not key.endswith("bias"):
            assert torch.equal(changed[key][0], stack[0])
            rows = [(changed[key][e] == stack[e]).all(1).sum() for e in range(1, 4)]
            assert max(rows) < len(stack[0]) / 2
        elif ".experts." not in key:
            assert torch.equal(changed[key], stack)


def test_refusals(tmp_path):
    dense("llama").save_pretrained(tmp_path / "base")
    for options, match in (({"init": "zeros"}, "init must be"), ({"ratio": 2}, "from 0 to 1")):
        with pytest.raises(ValueError, match=match):
            upcycle_folder(tmp_path / "base", tmp_path / "moe", **SETTINGS, gate="xft", **options)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize("family", ["llama", "arcee"])
@pytest.mark.parametrize("init", ["copy", "drop"])
def test_shards_of_experts_compute_the_same(tmp_path, family, init):
    base = dense(family, mlp_bias=False)
    base.save_pretrained(tmp_path / "base")
    options = SETTINGS | {"gate": "softmax_topk_renorm", "init": init, "ratio": 0.0}
    upcycle_folder(tmp_path / "base", tmp_path / "moe", granularity=3, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    config = model.model.layers[0].mlp.config
    assert (config.num_experts, config.top_k, config.intermediate_size) == (12, 6, 16)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, base(ids).logits, atol=1e-4)
    with pytest.raises(ValueError, match="are shards of 16 of 48 neurons, which cannot be merged"):
        merge_folder(tmp_path / "moe", tmp_path / "dense", alpha="uniform")


@pytest.mark.parametrize("changes", [{"granularity": 5}, {"gate": "softmax_topk"}])
def test_shards_that_do_not_compute_the_same_are_refused(tmp_path, changes):
    dense("llama", mlp_bias=False).save_pretrained(tmp_path / "base")
    options = SETTINGS | {"gate": "softmax_topk_renorm", "granularity": 2} | changes
    with pytest.raises(ValueError, match="granularity . requires a number of neurons"):
        upcycle_folder(tmp_path / "base", tmp_path / "moe", **options)
    assert not (tmp_path / "moe").exists()
