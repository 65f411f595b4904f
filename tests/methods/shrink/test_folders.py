"""moe_runtime.methods.shrink.folders: every family's folder, pruned and merged; identities; what is
kept byte for byte; refusals that write nothing.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin.quantize import load_quantized, quantize_experts
from moe_runtime.hf.dropin.quantized_files import save_quantized
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from moe_runtime.methods.shrink import merge_folder, prune_folder
from moe_runtime.methods.shrink.cuts import Cuts
from moe_runtime.methods.shrink.experts import LayerExperts, permuted
from moe_runtime.methods.shrink.groups import Group
from tests.hf import stock as every
from tests.hf.tiny import upcycled
from tests.methods.shrink.shrinks import NOT_CUT, build, logits_of, saved, stacks_of, statistics_of
from tests.support.checkpoints import tensors
from tests.support.stock_moe import stock

KEEP = 4


@pytest.mark.parametrize("family", [f for f in every.FAMILIES if f not in NOT_CUT])
def test_every_family_loads_in_transformers(tmp_path, family):
    model = build(family)
    source = saved(model, tmp_path / "source")
    statistics = statistics_of(model)
    pruned = prune_folder(source, statistics, tmp_path / "pruned", KEEP, top_k=2)
    merge_folder(source, statistics, tmp_path / "merged", KEEP, top_k=2)
    before = stacks_of(model)
    for folder in ("pruned", "merged"):
        loaded, info = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        assert logits_of(loaded).isfinite().all()
        if folder == "pruned":
            for number, ids in pruned.facts["kept"].items():
                for name, stack in stacks_of(loaded)[number].items():
                    assert torch.equal(stack, before[number][name][ids])


@pytest.mark.parametrize("family", NOT_CUT)
def test_other_families_say_why(tmp_path, family):
    model = build(family)
    source = saved(model, tmp_path / "source")
    with pytest.raises(ValueError, match=NOT_CUT[family]):
        prune_folder(source, statistics_of(model), tmp_path / "out", KEEP, top_k=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family, bias", [("gpt_oss", "router.bias"), ("dots1", "correction_bias")])
@pytest.mark.parametrize("constant", [False, True], ids=["routed by tokens", "by bias alone"])
def test_without_experts_that_nobody_chooses_logits_stay(tmp_path, family, bias, constant):
    model = build(family)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(bias):
            tensor.data += torch.tensor([0.0, 0, 0, -1e4] * 2)
        elif constant and name.endswith(("router.weight", "gate.weight")):
            tensor.data.zero_()
    source = saved(model, tmp_path / "source")
    receipt = prune_folder(source, statistics_of(model), tmp_path / "out", 6, by="frequency")
    kept = [ids for ids in receipt.facts["kept"].values() if set(ids) & {3, 7}]
    assert kept == [] or constant
    logits = logits_of(type(model).from_pretrained(tmp_path / "out"))
    if constant:  # else the router's product has another shape, so it is rounded differently
        assert torch.equal(logits, logits_of(model))
    assert torch.allclose(logits, logits_of(model), atol=1e-5)


@pytest.mark.parametrize("by", ["m-smoe", "hc-smoe", "ream"])
def test_equal_experts_merge_to_themselves(tmp_path, by):
    model = build("qwen3_moe", norm_topk_prob=True)
    for stacks in stacks_of(model).values():
        for stack in stacks.values():
            stack.copy_(stack[:1].expand_as(stack))
    model.bfloat16()
    source = saved(model, tmp_path / "source")
    merge_folder(source, statistics_of(model), tmp_path / "out", KEEP, by=by)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = stacks_of(model)
    for number, stacks in stacks_of(merged).items():
        for name, stack in stacks.items():
            assert torch.equal(stack, before[number][name][:KEEP])
    # gates sum to 1, so all outputs are one expert's
    assert torch.allclose(logits_of(merged), logits_of(model), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe", "nemotron_h"])
def test_aligned_experts_are_merged_in_the_leader_s_order(tmp_path, family):
    source = saved(build(family), tmp_path / "source")
    checkpoint = Checkpoint(source)
    cuts = Cuts.of(checkpoint)
    experts = LayerExperts(cuts, checkpoint, max(cuts.layers))
    leader = experts.parts(0)
    order = torch.randperm(len(leader["up_proj.weight"]), generator=torch.manual_seed(1))
    other = permuted(leader, order)
    experts.parts = lambda expert: [leader, other][expert]
    group = Group([0, 1], [0.75, 0.25])
    for name, value in experts.merged(group, align=True).items():
        assert torch.allclose(value, leader[name], atol=1e-6)
    plain = experts.merged(group, align=False)["up_proj.weight"]
    expected = 0.75 * leader["up_proj.weight"] + 0.25 * other["up_proj.weight"]
    assert torch.allclose(plain, expected, atol=1e-6)


def test_merged_experts_are_the_weighted_sums(tmp_path):
    model = build("mixtral")
    source = saved(model, tmp_path / "source")
    receipt = merge_folder(
        source, statistics_of(model), tmp_path / "out", KEEP, by="hc-smoe", align=False
    )
    before = stacks_of(model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    gates = {n: model.model.layers[n].mlp.gate.weight for n in before}
    for number, groups in receipt.facts["groups"].items():
        for e, group in enumerate(groups):
            weights = torch.tensor(group.weights)[:, None, None]
            for name, stack in stacks_of(merged)[number].items():
                expected = (weights * before[number][name][group.members]).sum(0)
                assert torch.allclose(stack[e], expected, atol=1e-6)
            gate = merged.model.layers[number].mlp.gate.weight[e]
            assert torch.equal(gate, gates[number][group.members[0]])


def test_a_folder_with_the_model_s_own_stacks_and_shards(tmp_path):
    model = build("mixtral").half()
    statistics = statistics_of(model.float())
    model.half().save_pretrained(tmp_path / "source", save_original_format=False)
    prune_folder(tmp_path / "source", statistics, tmp_path / "out", KEEP, max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.float16
    kept = read_json(tmp_path / "out" / "shrink.json")["kept"]
    for number, stacks in stacks_of(loaded).items():
        for name, stack in stacks.items():
            assert torch.equal(stack, stacks_of(model)[number][name][kept[str(number)]])


def _wide():
    """A model whose experts have whole blocks of every packed format."""
    model = stock("qwen3_moe", hidden_size=64, moe_intermediate_size=128, vocab_size=96)
    return model.eval().bfloat16()


@pytest.mark.parametrize("format", ["mxfp4", "fp8_block", "int8"])
def test_packed_experts_stay_packed(tmp_path, format):
    model = _wide()
    statistics = statistics_of(model, outputs=False)
    quantize_experts(model, format)
    save_quantized(model, tmp_path / "source")
    receipt = prune_folder(tmp_path / "source", statistics, tmp_path / "out", KEEP)
    assert receipt.bytes < receipt.bytes_before
    packed = load_quantized(tmp_path / "out")
    whole = load_quantized(tmp_path / "source")
    x = torch.randn(5, 64).bfloat16()
    for number, ids in receipt.facts["kept"].items():
        experts = [m.model.layers[number].mlp.experts for m in (packed, whole)]
        for new, old in enumerate(ids):
            outs = []
            for module, e in zip(experts, (new, old), strict=True):
                outs.append(module(x, torch.full((5, 1), e), torch.ones(5, 1)))
            assert torch.equal(*outs)


@pytest.mark.parametrize("with_experts", [False, True])
def test_multi_token_prediction(tmp_path, with_experts):
    model = build("deepseek_v3", num_nextn_predict_layers=1)
    source = saved(model, tmp_path / "source")
    file = source / "model.safetensors"
    name = "mlp.experts.0.up_proj" if with_experts else "eh_proj"
    extra = {f"model.layers.61.{name}.weight": torch.randn(3, 4)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    receipt = prune_folder(source, statistics_of(model), tmp_path / "out", KEEP, top_k=2)
    found = tensors(tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    assert receipt.left_out == (list(extra) if with_experts else [])
    for key, tensor in extra.items():
        assert (key in found) is not with_experts
        assert with_experts or torch.equal(found[key], tensor)
    assert config.get("num_nextn_predict_layers", 1) == (0 if with_experts else 1)


def test_the_receipt_and_a_second_shrink(tmp_path):
    model = build("olmoe")
    source = saved(model, tmp_path / "source")
    first = prune_folder(source, statistics_of(model), tmp_path / "first", 6)
    assert first.parameters_before == model.num_parameters()
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert first.parameters == smaller.num_parameters()
    merge_folder(tmp_path / "first", statistics_of(smaller), tmp_path / "second", KEEP)
    receipt = read_json(tmp_path / "second" / "shrink.json")
    assert (receipt["method"], receipt["experts_before"]) == ("merge", 6)
    assert receipt["calibration"] == {"text": "random", "tokens": 24}
    assert receipt["before"]["method"] == "prune"
    assert receipt["before"]["kept"] == {str(n): ids for n, ids in first.facts["kept"].items()}


REFUSED = [
    ("qwen3_moe", {"keep": 8}, "keep must be from 1 to 7"),
    ("qwen3_moe", {"keep": 2}, "goes to 3 experts, but 2 would be left"),
    ("qwen3_moe", {"keep": 4, "top_k": 5}, "goes to 5 experts, but 4 would be left"),
    ("qwen3_moe", {"keep": 4, "by": "size"}, "by must be one of frequency, reap"),
    ("deepseek_v3", {"keep": 5}, "keep must be a multiple of 2"),
    ("deepseek_v3", {"keep": 2, "top_k": 1}, "at least two experts in a group"),
]


@pytest.mark.parametrize("family, options, match", REFUSED)
def test_numbers_that_the_family_forbids(tmp_path, family, options, match):
    model = build(family)
    source = saved(model, tmp_path / "source")
    with pytest.raises(ValueError, match=match):
        prune_folder(source, statistics_of(model), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_statistics_that_do_not_fit(tmp_path):
    model = build("qwen3_moe")
    source = saved(model, tmp_path / "source")
    out = tmp_path / "out"
    routed = statistics_of(model, outputs=False)
    with pytest.raises(ValueError, match="lack gated, logits. Score the model again"):
        merge_folder(source, routed, out, KEEP)
    with pytest.raises(ValueError, match="The statistics are of layers"):
        prune_folder(source, statistics_of(build("jamba")), out, KEEP)
    routed.layers[1]["count"].zero_()
    with pytest.raises(ValueError, match="No token .* an expert of layer 1"):
        prune_folder(source, routed, out, KEEP)
    (tmp_path / "other.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a file of expert statistics"):
        prune_folder(source, tmp_path / "other.safetensors", out, KEEP)
    assert not out.exists()


def test_folders_that_cannot_be_cut(tmp_path):
    model = _wide()
    statistics = statistics_of(model)
    source = saved(model, tmp_path / "source")
    shutil.copytree(source, tmp_path / "partial")
    file = tmp_path / "partial" / "model.safetensors"
    kept = {key: tensor for key, tensor in load_file(file).items() if "experts.7" not in key}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ValueError, match="has 7 of the 8 experts of layer 0"):
        prune_folder(tmp_path / "partial", statistics, tmp_path / "out", KEEP)
    saved(upcycled("llama"), tmp_path / "upcycled")
    with pytest.raises(ValueError, match="is an upcycled model of moe_runtime. Export it"):
        prune_folder(tmp_path / "upcycled", statistics, tmp_path / "out", KEEP)
    for format, match in (("nf4", "only mxfp4, fp8"), ("mxfp4", "16 or 32 bits are required")):
        packed = AutoModelForCausalLM.from_pretrained(source)
        quantize_experts(packed, format)
        save_quantized(packed, tmp_path / format)
        shrink = prune_folder if format == "nf4" else merge_folder
        with pytest.raises(ValueError, match=match):
            shrink(tmp_path / format, statistics, tmp_path / "out", KEEP)
    assert not (tmp_path / "out").exists()
