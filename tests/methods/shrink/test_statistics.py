"""moe_runtime.methods.shrink.statistics and runs: the sums are the equations', resumed or not, and
comparisons of folders.
"""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import moe_runtime
from moe_runtime.cli import shrink as cli_shrink
from moe_runtime.io.files import read_json
from moe_runtime.methods.shrink import (
    ExpertStatistics,
    StatisticsRecorder,
    compare_folders,
    runs,
    score_folder,
)
from tests.hf.tiny import upcycled
from tests.methods.esft.test_runs import write_base
from tests.methods.shrink.shrinks import statistics_of
from tests.support.edited import edit_json
from tests.support.fences import ROOT, fences
from tests.support.flows import shrinkable
from tests.support.stock_moe import batch, stock

E, K = 8, 2
PAGE = ROOT / "docs" / "shrink.md"


@torch.no_grad()
def by_equation(model, inputs) -> dict[str, torch.Tensor]:
    """Compute the sums of layer 1 of a Qwen3-MoE one token and one expert at a time."""
    seen = []
    block = model.model.layers[1].mlp
    handle = block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(**inputs)
    handle.remove()
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
    of_experts = ("count", "gate", "gate_norm", "probability", "norm")
    sums = {name: torch.zeros(E).double() for name in of_experts}
    sums |= {name: torch.zeros(E, 32).double() for name in ("output", "gated")}
    sums |= {name: torch.zeros(E, E).double() for name in ("products", "logits")}
    sums["seen"] = mask.sum().double()
    for x in seen[0][mask]:
        logits = block.gate.weight @ x
        p = logits.softmax(-1)
        chosen = p.topk(K).indices
        total = p[chosen].sum()
        outputs = []
        for e in range(E):
            gate, up = (block.experts.gate_up_proj[e] @ x).chunk(2)
            f = block.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
            outputs.append(f.double())
            sums["norm"][e] += f.norm() ** 2
            sums["output"][e] += f
            sums["gated"][e] += p[e] * f
            if e in chosen:
                sums["count"][e] += 1
                sums["gate"][e] += p[e] / total if block.gate.norm_topk_prob else p[e]
                sums["gate_norm"][e] += p[e] / total * f.norm()
                sums["probability"][e] += p[e]
        f = torch.stack(outputs)
        sums["products"] += f @ f.t()
        sums["logits"] += torch.outer(logits, logits)
    return sums


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("ours", [False, True], ids=["eager", "moe_runtime"])
def test_sums_are_the_equations(padding, ours):
    model = stock("qwen3_moe", norm_topk_prob=padding == 0).eval()
    inputs = batch(padding=padding)
    del inputs["labels"]
    expected = by_equation(model, inputs)
    statistics = statistics_of(model, **inputs)
    if ours:
        moe_runtime.patch(model)
        with StatisticsRecorder(model, outputs=True) as recorder, torch.no_grad():
            model(**inputs)
            statistics = recorder.read({})
    assert (statistics.tokens, statistics.top_k) == (18 - padding, K)
    assert set(statistics.layers[1]) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(statistics.layers[1][name].double(), value, rtol=1e-4, atol=1e-4)
    model(**inputs)  # no hook is left
    assert statistics.tokens == 18 - padding


def test_refused_models():
    with pytest.raises(ValueError, match="is an upcycled layer of moe_runtime. Export"):
        StatisticsRecorder(upcycled("llama"))
    with pytest.raises(ValueError, match="has no MoE layers"):
        StatisticsRecorder(torch.nn.Linear(2, 2))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a DeepSeek-V2, its tokenizer and rows.jsonl."""
    home = tmp_path_factory.mktemp("shrink")
    write_base(home)
    return home


OPTIONS = {"n_tokens": 256, "max_length": 16, "outputs": True}


def equal(a: ExpertStatistics, b: ExpertStatistics) -> bool:
    """Return whether two statistics have the same sums, but for the order of additions."""
    for number, sums in a.layers.items():
        for name, value in sums.items():
            if not torch.allclose(value, b.layers[number][name], rtol=1e-6):
                return False
    return a.tokens == b.tokens


def test_an_interrupted_pass_resumes(home, tmp_path, monkeypatch):
    whole = score_folder(home / "base", home / "rows.jsonl", tmp_path / "whole.st", **OPTIONS)
    assert whole.tokens == 256
    assert equal(ExpertStatistics.load(tmp_path / "whole.st"), whole)
    monkeypatch.setattr(runs, "SECONDS", -1)
    calls = []

    def stop(done, total):
        calls.append(done)
        if len(calls) == 6:
            raise KeyboardInterrupt

    out = tmp_path / "resumed.st"
    with pytest.raises(KeyboardInterrupt):
        score_folder(home / "base", home / "rows.jsonl", out, progress=stop, **OPTIONS)
    partial = tmp_path / "resumed.st.partial"
    assert ExpertStatistics.load(partial).tokens == 6 * 16
    assert not out.exists()
    resumed = score_folder(home / "base", home / "rows.jsonl", out, **OPTIONS)
    assert equal(resumed, whole)
    assert not partial.exists()


def test_progress_ends_with_a_text_that_has_fewer_tokens(home, tmp_path):
    calls = []
    found = score_folder(
        home / "base",
        home / "rows.jsonl",
        tmp_path / "all.st",
        progress=lambda *call: calls.append(call),
    )
    assert calls[-1] == (found.tokens, found.tokens)


def test_another_pass_does_not_resume(home, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "SECONDS", -1)
    rows = home / "rows.jsonl"
    out = tmp_path / "some.st"
    saved = score_folder(home / "base", rows, out, **OPTIONS)
    saved.save(f"{out}.partial", settings={"rows": "others"}, batches=3)
    again = score_folder(home / "base", rows, out, overwrite=True, **OPTIONS)
    assert equal(again, saved)
    with pytest.raises(ValueError, match="exists"):
        score_folder(home / "base", rows, out, **OPTIONS)


def test_a_model_compared_with_itself(home):
    found = compare_folders(home / "base", home / "base", home / "rows.jsonl", limit=8)
    assert found.loss == found.loss_before > 0
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert (found.agreement, found.examples) == (1, 8)
    model, _ = runs.load_any(home / "base")
    assert model.config._experts_implementation == "moe_runtime"


def invoke(line: str, **folders) -> str:
    """Run a command line that must succeed, and return its output."""
    out = CliRunner().invoke(cli_shrink.app, line.format(**folders).split())
    assert out.exit_code == 0, out.exception
    return out.output


def test_the_commands_from_text_to_a_comparison(home, tmp_path):
    base = {"base": home / "base", "rows": home / "rows.jsonl", "out": tmp_path}
    told = invoke(
        "score {base} --data {rows} --out {out}/s.safetensors --outputs --tokens 128 "
        "--max-length 16",
        **base,
    )
    assert "128 tokens, 2 layers of 8 experts" in told
    statistics = "--statistics {out}/s.safetensors"
    # four routing groups of two experts cannot become smaller
    config = home / "base" / "config.json"
    edit_json(config, n_group=2, topk_group=2)
    told = invoke(f"prune {{base}} {{out}}/pruned {statistics} --keep 4", **base)
    assert "4 of 8 experts" in told
    invoke(f"merge {{base}} {{out}}/merged {statistics} --keep 4 --by m-smoe", **base)
    invoke(f"to-dense {{base}} {{out}}/dense {statistics} --keep 2 --json", **base)
    for folder in ("pruned", "merged", "dense"):
        told = invoke(f"compare {{base}} {{out}}/{folder} --data {{rows}} --limit 4", **base)
        assert "loss per token: " in told
        assert read_json(tmp_path / folder / "shrink.json")["keep"] in (2, 4)


def test_the_page_s_example_runs(tmp_path, monkeypatch, capsys):
    shrinkable(tmp_path)
    monkeypatch.chdir(tmp_path)
    [block] = [b.text for b in fences(PAGE) if b.language == "python"]
    exec(block.replace("keep=48", "keep=4").replace("65536", "256"), {})
    share, divergence = map(float, capsys.readouterr().out.split())
    assert 0.5 < share < 0.9
    assert divergence > 0
