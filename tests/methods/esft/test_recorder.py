"""methods/esft/recorder.py: slots and gates of stock routers and ours against the routers' logits;
padding and wrappers.
"""

import pytest
import torch

import moe_runtime
from moe_runtime.hf.dropin import experts
from moe_runtime.hf.dropin.experts import is_experts
from moe_runtime.hf.dropin.layers import numbered_layers
from moe_runtime.methods.esft.recorder import GateRecorder
from tests.hf import stock as families
from tests.hf import tiny
from tests.hf.dropin.test_layers import ids, stock

KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "olmoe", "ours", "ours_nonorm"]


def build(kind: str):
    if kind.startswith("ours"):
        return tiny.upcycled(layers=[1], gate="nonorm" if "nonorm" in kind else "xft")
    model = families.build(kind) if kind in ("deepseek_v2", "olmoe") else stock(kind, "eager")
    return model.eval()


def logits_of(model, inputs: dict) -> dict[int, torch.Tensor]:
    """Router logits [T, R] float64 by layer, taken where the routers compute them."""
    found = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")) and not is_experts(module):

            def note(module, args, out, name=name):
                found[int(name.split(".")[2])] = (
                    out if isinstance(out, torch.Tensor) else out[0]
                ).double()

            handles.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return {number: logits.reshape(-1, logits.shape[-1]) for number, logits in found.items()}


def gates(kind: str, model, logits: torch.Tensor) -> torch.Tensor:
    """Gate values [T, E] float64 as each family's paper has them, 0 where an expert is not
    chosen.
    """
    config = model.config
    # XFT, Eq. (2): the shared expert's value is not the router's choice
    if kind.startswith("ours"):
        weight, idx = logits.softmax(-1).topk(config.num_experts_per_tok, -1)
        if kind == "ours":
            weight = weight.softmax(-1) * weight.amax(-1, keepdim=True)
        return torch.zeros(len(logits), logits.shape[1] + 1).double().scatter(1, idx + 1, weight)
    K = config.num_experts_per_tok
    values, idx = logits.topk(K, -1)
    weight = logits.softmax(-1).gather(1, idx)
    if kind == "gpt_oss":
        weight = values.softmax(-1)
    elif kind == "mixtral" or getattr(config, "norm_topk_prob", False):
        weight = weight / weight.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(
        1, idx, weight * getattr(config, "routed_scaling_factor", 1.0)
    )


MASKS = {
    "none": None,
    "right": [[1] * 12, [1] * 7 + [0] * 5],
    "left": [[0] * 4 + [1] * 8, [1] * 12],
}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_the_router_logits(kind, padding):
    model = build(kind)
    inputs = {"input_ids": tiny.batch()}
    if MASKS[padding]:
        inputs["attention_mask"] = torch.tensor(MASKS[padding])
    with GateRecorder(model, pairs=True) as recorder, torch.no_grad():
        model(**inputs)
        sums = recorder.read()
    logits = logits_of(model, inputs)
    assert sums.layers == tuple(sorted(numbered_layers(model))) == tuple(sorted(logits))
    live = inputs.get("attention_mask", torch.ones(2, 12)).bool()
    assert (sums.n_tokens, sums.n_samples, sums.num_shared) == (
        int(live.sum()),
        2,
        int(kind.startswith("ours")),
    )
    for i, layer in enumerate(sums.layers):
        gate = gates(kind, model, logits[layer]) * live.view(-1, 1)
        hot = (gate > 0).double()
        assert torch.equal(sums.count[i], hot.sum(0).long())
        torch.testing.assert_close(sums.gate[i], gate.sum(0), rtol=1e-5, atol=1e-6)
        for got, want in ((sums.sample_gate, gate), (sums.sample_count, hot)):
            means = want.view(2, 12, -1).sum(1) / live.sum(1)[:, None]
            torch.testing.assert_close(got[i], means.sum(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(sums.pairs[i], (hot.T @ hot).long())
        assert sums.count[i].sum() == sums.top_k * sums.n_tokens


def record(model, *batches, **options):
    """The sums of some calls; a batch is ids or arguments."""
    with GateRecorder(model, **options) as recorder, torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
        return recorder.read()


def assert_same(got, want, times: int = 1) -> None:
    assert (got.n_tokens, got.n_samples, got.top_k) == (
        times * want.n_tokens,
        times * want.n_samples,
        want.top_k,
    )
    assert torch.equal(got.count, times * want.count)
    for name in ("gate", "sample_count", "sample_gate"):
        torch.testing.assert_close(
            getattr(got, name), times * getattr(want, name), rtol=1e-6, atol=1e-7
        )


# two stacks of layers; text and vision experts in one layer
UNNUMBERED = {"diffusion_gemma", "ernie4_5_vl_moe"}


@pytest.fixture
def calls(monkeypatch):
    """Ids and weights of every call of our experts function."""
    seen = []
    run = experts.experts_forward

    def note(self, hidden_states, top_k_index, top_k_weights):
        seen.append((top_k_index.clone(), top_k_weights.double()))
        return run(self, hidden_states, top_k_index, top_k_weights)

    monkeypatch.setattr(experts, "experts_forward", note)
    moe_runtime.register()
    yield seen
    monkeypatch.undo()
    moe_runtime.register()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_is_summed_as_its_experts_are_called(family, calls):
    model = families.build(family)
    model.set_experts_implementation("moe_runtime")
    if family in UNNUMBERED:
        with pytest.raises(
            ValueError, match="have the same number [01], but a model with a single stack of layers"
        ):
            GateRecorder(model)
        return
    sums = record(model, families.batch())
    assert len(calls) == len(sums.layers) and sums.n_tokens == 24
    for i, (idx, weight) in enumerate(calls):
        want = torch.zeros(24, sums.count.shape[1]).double().scatter_add(1, idx.long(), weight)
        torch.testing.assert_close(sums.gate[i], want.sum(0))
        assert torch.equal(sums.count[i], torch.bincount(idx.flatten(), minlength=want.shape[1]))
        assert sums.top_k == idx.shape[1]


def test_calls_add_up_whatever_the_batches():
    model = stock("qwen3_moe", "eager").eval()
    samples = tiny.batch(rows=4)
    assert_same(record(model, *samples.split(1)), record(model, samples))


def test_only_narrows_what_counts():
    model = stock("mixtral", "eager").eval()
    samples = tiny.batch()
    only = torch.tensor([[1] * 12, [1] * 5 + [0] * 7]).bool()
    # attention is causal: the tokens that count do not see the others
    want = record(model, {"input_ids": samples, "attention_mask": only.long()})
    with GateRecorder(model) as recorder, torch.no_grad():
        recorder.only = only
        model(samples)
        assert_same(recorder.read(reset=True), want)
        recorder.only = None
        model(samples)
        assert recorder.read().n_tokens == 24


def test_calls_are_seen_as_they_come():
    model = tiny.upcycled()
    calls = []
    mask = torch.tensor(MASKS["right"])
    sums = record(model, {"input_ids": tiny.batch(), "attention_mask": mask}, see=calls.append)
    assert [call.layer for call in calls] == [0, 1] and all(
        torch.equal(call.live, mask.bool()) for call in calls
    )
    for i, call in enumerate(calls):
        idx = call.topk_idx.view(2, 12, -1)[call.live]
        assert torch.equal(torch.bincount(idx[idx >= call.num_shared], minlength=4), sums.count[i])


@pytest.mark.parametrize("implementation", ["moe_runtime", "grouped_mm", "eager"])
def test_who_computes_the_experts_does_not_matter(implementation):
    want = record(stock("qwen3_moe", "eager").eval(), ids())
    assert_same(record(stock("qwen3_moe", implementation).eval(), ids()), want)


def test_bfloat16_weights_are_summed_in_float64():
    model = stock("mixtral", "eager").eval().to(torch.bfloat16)
    sums = record(model, ids())
    assert sums.gate.dtype == torch.float64
    # Mixtral's gate values sum to 1 for every token, which bfloat16 holds to 3 digits
    torch.testing.assert_close(sums.gate.sum(1), torch.full((2,), 24.0).double(), rtol=1e-2, atol=0)


def test_close_leaves_no_hook():
    model = stock("mixtral", "eager").eval()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    GateRecorder(model).close()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks


def test_bad_models_are_named():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE layers with a router"):
        GateRecorder(tiny.dense("llama"))
    model = stock("mixtral", "eager").eval()
    with pytest.raises(ValueError, match="routed no tokens. Call it at least once"):
        record(model)
    with pytest.raises(ValueError, match="routed no tokens"):
        record(model, {"input_ids": ids(), "attention_mask": torch.zeros(2, 12, dtype=torch.long)})
    numbered_layers(model)[1].module.num_experts = 3
    with pytest.raises(
        ValueError,
        match="num_experts must be the same in all layers, but is 4 in layer 0 and 3 in layer 1",
    ):
        GateRecorder(model)
    model = stock("mixtral", "eager")
    numbered_layers(model)[0].module._is_expert_parallel = True
    with pytest.raises(ValueError, match="holds only a part of its experts"):
        GateRecorder(model)
