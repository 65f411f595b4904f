"""methods/esft/recorder.py: slots and gate values of stock routers and ours against the routers'
logits; padding and wrappers.
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
        return tiny.upcycled(
            layers=[1],
            gate="nonorm" if "nonorm" in kind else "xft",
        )
    if kind in ("deepseek_v2", "olmoe"):
        model = families.build(kind)
    else:
        model = stock(kind, "eager")
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs: dict) -> dict[int, torch.Tensor]:
    """Router logits [T, R] in float64 by layer, taken where the routers compute them."""
    logits = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")) and not is_experts(module):

            def note(module, args, out, name=name):
                if isinstance(out, torch.Tensor):
                    first = out
                else:
                    first = out[0]
                logits[int(name.split(".")[2])] = first.double().flatten(0, -2)

            handles.append(module.register_forward_hook(note))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return logits


def gates(kind: str, model, logits: torch.Tensor) -> torch.Tensor:
    """Gate values [T, E] in float64 as each family's paper defines them, 0 where an expert is not
    chosen.
    """
    config = model.config
    values, idx = logits.topk(config.num_experts_per_tok, -1)
    weight = logits.softmax(-1).gather(1, idx)
    if kind == "ours":  # XFT, Eq. (2)
        weight = weight.softmax(-1) * weight.amax(-1, keepdim=True)
    elif kind == "gpt_oss":
        weight = values.softmax(-1)
    elif kind == "mixtral" or getattr(config, "norm_topk_prob", False):
        weight = weight / weight.sum(-1, keepdim=True)
    weight = weight * getattr(config, "routed_scaling_factor", 1.0)
    result = torch.zeros_like(logits).scatter(
        1,
        idx,
        weight,
    )
    if kind.startswith("ours"):  # the router does not choose the shared expert
        result = torch.nn.functional.pad(result, (1, 0))
    return result


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
    live = torch.ones(2, 12).bool()
    if MASKS[padding]:
        inputs["attention_mask"] = torch.tensor(MASKS[padding])
        live = inputs["attention_mask"].bool()
    with GateRecorder(model) as recorder, torch.no_grad():
        model(**inputs)
        sums = recorder.read()
    logits = logits_of(model, inputs)
    assert sums.layers == tuple(sorted(numbered_layers(model))) == tuple(sorted(logits))
    assert sums.n_tokens == live.sum()
    assert sums.n_samples == 2
    assert sums.num_shared == kind.startswith("ours")
    lengths = live.sum(1)[:, None]
    for i, layer in enumerate(sums.layers):
        gate = gates(kind, model, logits[layer]) * live.view(-1, 1)
        chosen = (gate > 0).double()
        assert torch.equal(
            sums.count[i],
            chosen.sum(0).long(),
        )
        assert sums.count[i].sum() == sums.top_k * sums.n_tokens
        of_samples = (gate.view(2, 12, -1).sum(1) / lengths).sum(0)
        counts = (chosen.view(2, 12, -1).sum(1) / lengths).sum(0)
        for result, expected in (
            (sums.gate, gate.sum(0)),
            (sums.sample_gate, of_samples),
            (sums.sample_count, counts),
        ):
            torch.testing.assert_close(
                result[i],
                expected,
                rtol=1e-5,
                atol=1e-6,
            )


def record(model, *batches):
    """Return the sums over some calls; a batch is ids or keyword arguments."""
    with GateRecorder(model) as recorder, torch.no_grad():
        for batch in batches:
            if isinstance(batch, torch.Tensor):
                batch = {"input_ids": batch}
            model(**batch)
        return recorder.read()


def assert_same(result, expected) -> None:
    for name in ("n_tokens", "n_samples", "top_k"):
        assert getattr(result, name) == getattr(expected, name)
    for name in ("count", "gate", "sample_count", "sample_gate"):
        tensors = (getattr(result, name), getattr(expected, name))
        torch.testing.assert_close(
            *tensors,
            rtol=1e-6,
            atol=1e-7,
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
        with pytest.raises(ValueError, match="same number [01], but .* single stack of layers"):
            GateRecorder(model)
        return
    sums = record(model, families.batch())
    assert len(calls) == len(sums.layers)
    assert sums.n_tokens == 24
    for i, (idx, weight) in enumerate(calls):
        E = sums.count.shape[1]
        gate = (
            torch.zeros(24, E)
            .double()
            .scatter_add(
                1,
                idx.long(),
                weight,
            )
        )
        torch.testing.assert_close(
            sums.gate[i],
            gate.sum(0),
        )
        assert torch.equal(
            sums.count[i],
            torch.bincount(idx.flatten(), minlength=E),
        )
        assert sums.top_k == idx.shape[1]


def test_only_narrows_what_counts():
    model = stock("mixtral", "eager").eval()
    samples = tiny.batch()
    only = torch.tensor([[1] * 12, [1] * 5 + [0] * 7]).bool()
    # attention is causal: the counted tokens do not see the others
    expected = record(
        model,
        {"input_ids": samples, "attention_mask": only.long()},
    )
    with GateRecorder(model) as recorder, torch.no_grad():
        recorder.only = only
        model(samples)
        assert_same(recorder.read(), expected)
        recorder.only = None
        model(samples)
        assert recorder.read().n_tokens == 17 + 24


def test_bad_models_are_named():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE layers with a router"):
        GateRecorder(tiny.dense("llama"))
    model = stock("mixtral", "eager").eval()
    padding = {"input_ids": ids(), "attention_mask": torch.zeros(2, 12, dtype=torch.long)}
    for batches in ((), (padding,)):
        with pytest.raises(ValueError, match="routed no tokens. Call it at least once"):
            record(model, *batches)
    numbered_layers(model)[1].module.num_experts = 3
    with pytest.raises(ValueError, match="but is 4 in layer 0 and 3 in layer 1"):
        GateRecorder(model)
    model = stock("mixtral", "eager")
    numbered_layers(model)[0].module._is_expert_parallel = True
    with pytest.raises(ValueError, match="holds only a part of its experts"):
        GateRecorder(model)
