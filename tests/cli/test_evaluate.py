"""`moe-runtime eval`: lm-eval's own results on our folders, without a network."""

import functools
import json
import sys

import pytest
import yaml
from peft import LoraConfig, get_peft_model

from moe_runtime import cli
from moe_runtime.tools import evaluate
from tests.hf import tiny
from tests.hf.dropin.test_layers import TOKENIZER, stock
from tests.support.esft_adapter import random_adapter

pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager

from moe_runtime.io.files import read_json

VOCABULARY = {"vocab_size": len(TOKENIZER)}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dense, an upcycled and a stock MoE model, two adapters, and a task in a YAML file."""
    folder = tmp_path_factory.mktemp("eval")
    dense = tiny.dense(**VOCABULARY)
    models = {
        "dense": dense,
        "moe": tiny.upcycled(changes=VOCABULARY),
        "stock": stock("mixtral", **VOCABULARY),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    random_adapter(models["stock"]).save(folder / "esft")
    dense.name_or_path = str(folder / "dense")
    adapted = get_peft_model(dense, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(folder / "peft")
    (folder / "fused").mkdir()
    (folder / "fused" / evaluate.FUSED).write_text("{}")
    rows = [{"text": f"{i} and {j} make {i + j}"} for i in range(3) for j in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture(autouse=True)
def only_our_tasks(request, monkeypatch):
    """Keep lm-eval from reading the 13,000 files of its own tasks, which takes 20 seconds."""
    if not request.node.get_closest_marker("slow"):
        read = functools.partialmethod(TaskManager.__init__, include_defaults=False)
        monkeypatch.setattr(TaskManager, "__init__", read)


def run(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    monkeypatch.setattr(sys, "argv", ["moe-runtime", "eval", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


def bits(home, word: str) -> float:
    results = evaluate.evaluate(word.format(home), ["--tasks", str(home / "sums.yaml")])
    return results["sums"]["bits_per_byte,none"]


def test_a_folder_is_evaluated(home, tmp_path, monkeypatch, capsys):
    tasks = ("--tasks", home / "sums.yaml", "--batch_size", 2, "--limit", 4)
    code, out, err = run(
        monkeypatch, capsys, home / "moe", *tasks, "--output_path", tmp_path, "--json"
    )
    assert code == 0, err
    value = json.loads(out)["results"]["sums"]["bits_per_byte,none"]
    assert "|sums|" in err
    assert "bits_per_byte" in err
    (file,) = tmp_path.rglob("results_*.json")
    assert read_json(file)["results"]["sums"]["bits_per_byte,none"] == value


def test_adapters_change_their_base(home, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    assert bits(home, "{0}/stock+{0}/esft") != pytest.approx(bits(home, "{0}/stock"), rel=1e-4)
    assert bits(home, "{0}/peft") > 0  # the adapter names its base


@pytest.mark.slow
def test_a_lora_adapter_starts_as_its_base(home, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    base = bits(home, "{0}/dense")
    assert bits(home, "{0}/peft") == pytest.approx(base, rel=1e-5)
    assert bits(home, "{0}/dense+{0}/peft") == pytest.approx(base, rel=1e-5)


@pytest.mark.parametrize(
    "words, says",
    [
        (("--tasks", "sums"), "Pass the model first"),
        (("{0}/esft",), "Pass it with its base"),
        (("{0}/dense+{0}/moe",), "has neither expert_cfg.json"),
        (("{0}/fused",), "is a fused folder"),
        (("no/such/folder",), "neither a folder nor a Hub id"),
        (("{0}/dense", "--tasks", "nope"), "Tasks not found: nope"),
    ],
)
def test_bad_input_is_one_line(home, monkeypatch, capsys, words, says):
    words = [word.format(home) for word in words]
    if "--tasks" not in words:
        words += ["--tasks", str(home / "sums.yaml")]
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 1
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert says in err
