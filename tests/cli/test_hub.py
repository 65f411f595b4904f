"""Hub ids in place of folders, --push-to-hub, and model cards, against a stand-in of the Hub in its
own process.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_runtime.cli.app import app
from moe_runtime.hf.models import hub
from moe_runtime.methods import cards  # noqa: F401 - registers the papers
from tests.support import hub as stand_in
from tests.support.captured import captured
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
START = """
import re, sys, torch
from pathlib import Path
from huggingface_hub import ModelCard
from typer.testing import CliRunner
from moe_runtime.cli.app import app
from moe_runtime.hf.models import hub

def verb(words, fails=None):
    sys.argv = ["moe-runtime", *words.split()]
    out = CliRunner().invoke(app, sys.argv[1:])
    if fails is None:
        assert out.exit_code == 0, (out.output, out.exception)
    else:
        assert isinstance(out.exception, ValueError), out.output
        assert re.search(fails, str(out.exception)), out.exception
    return out.output

def card_of(repo):
    card = ModelCard.load(repo)
    card.validate()
    names = {}
    code = re.search(r"```python\\n(.*?)```", card.text, re.DOTALL)[1]
    exec(code, names)
    return card, names["model"]
"""
BASE = """
from tests.hf import tiny
from tests.support.upit import make_tokenizer
tiny.dense("llama").save_pretrained("base")
make_tokenizer().save_pretrained("base")
Path("base/README.md").write_text("---\\nlicense: mit\\n---\\nA base.")
"""
WHAT_IS_PUSHED = """
private = "training_args.bin optimizer.bin scheduler.pt rng_state.pth .training.tmp-1-0/lock"
checkpoint = "model.safetensors optimizer.pt experts/__0_0.distcp"
names = [*private.split(), *(f"checkpoint-2/{name}" for name in checkpoint.split())]
for name in names:
    Path("base", name).parent.mkdir(parents=True, exist_ok=True)
    Path("base", name).write_text("private")
hub.push("base", "me/base")
from huggingface_hub import HfApi
pushed = set(HfApi().list_repo_files("me/base")) - {".gitattributes"}
public = (".json", ".safetensors", ".md", ".jinja")
model = {path.name for path in Path("base").iterdir() if path.suffix in public}
assert pushed == model, pushed
verb("xft upcycle me/base moe --num-experts 4 --top-k 2")
assert Path("moe/config.json").is_file()
"""
UPCYCLE_AND_MERGE = """
from transformers import AutoModelForCausalLM
hub.push("base", "me/base")
said = verb("xft upcycle me/base moe --num-experts 4 --top-k 2 --push-to-hub me/moe")
assert "/me/moe" in said
card, model = card_of("me/moe")
assert card.data.license == "mit" and card.data.base_model == "me/base" and "xft" in card.data.tags
assert "arxiv:2404.15247" in card.data.tags
assert "moe-runtime xft upcycle me/base moe --num-experts 4" in card.text
from moe_runtime import push_to_hub
from moe_runtime.methods import xft
again = AutoModelForCausalLM.from_pretrained("me/base")
receipt = xft.upcycle(again, num_experts=3, top_k=2)
again.push_to_hub("me/python")
card, found = card_of("me/python")
assert card.data.license == "mit" and card.data.base_model == "me/base"
assert "| num_experts | 3 |" in card.text
assert torch.equal(found(tiny.batch()).logits, again(tiny.batch()).logits)
again.save_pretrained("mine")
push_to_hub("mine", "me/mine", base="me/base", facts=receipt)
mine = card_of("me/mine")[0]
assert mine.data.license == "mit" and "pip install" not in card.text + mine.text
verb("xft merge me/moe merged --shared-rate 0.5 --push-to-hub me/merged")
card, merged = card_of("me/merged")
assert card.data.license == "mit" and card.data.base_model == "me/moe"
assert "import moe_runtime" not in card.text
for repo, folder, found in (("me/moe", "moe", model), ("me/merged", "merged", merged)):
    local = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(local(tiny.batch()).logits, found(tiny.batch()).logits)
later = "Cannot push to 'locked/x'.*kept is complete; upload it with: hf upload locked/x kept"
verb("xft merge moe kept --push-to-hub locked/x", fails=later)
assert Path("kept/config.json").is_file() and Path("kept/README.md").is_file()
nameless = "Cannot push to 'nameless'. Expected OWNER/NAME"
verb("xft merge moe other --push-to-hub nameless", fails=nameless)
verb("xft merge nobody/none other", fails="nobody/none.*Pass the folder of a model or a Hub id")
assert not Path("other").exists()
"""
ADAPTERS = """
from transformers import AutoModelForCausalLM
from moe_runtime import esft
from tests.support.peft_adapter import adapted
from tests.support.stock_moe import batch, stock
from tests.support.upit import make_tokenizer
base = stock()
base.save_pretrained("base")
make_tokenizer().save_pretrained("base")
hub.push("base", "me/stock")
esft.train_only(base, esft.ExpertSelection(experts={0: (1, 3), 1: (2,)}))
with torch.no_grad():
    [p.add_(0.1) for p in base.parameters() if p.requires_grad]
want = base(**batch()).logits
esft.save_adapter(base, "adapter")
hub.push("adapter", "me/adapter", base="me/stock", method="esft")
card, model = card_of("me/adapter")
assert card.data.base_model == "me/stock" and card.data.base_model_relation == "adapter"
torch.testing.assert_close(model(**batch()).logits, want)
verb("esft merge me/stock me/adapter merged --push-to-hub me/esft")
torch.testing.assert_close(card_of("me/esft")[1](**batch()).logits, want)
lora = adapted(Path("lora").resolve())
want = lora(**batch()).logits
make_tokenizer().save_pretrained("lora/base")
hub.push("lora/base", "me/lora-base")
hub.push("lora/adapter", "me/lora", base="me/lora-base")
found = card_of("me/lora")[1].eval()(**batch()).logits
torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(BASE + WHAT_IS_PUSHED, id="what is pushed"),
        pytest.param(BASE + UPCYCLE_AND_MERGE, id="upcycle and merge", marks=pytest.mark.slow),
        pytest.param(ADAPTERS, id="adapters", marks=pytest.mark.slow),
    ],
)
def test_a_pushed_repository_can_be_loaded(script, tmp_path):
    server = stand_in.start()
    env = (
        os.environ
        | stand_in.environment(server, tmp_path / "home")
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    done = captured([sys.executable, "-c", START + script], cwd=tmp_path, env=env, timeout=PATIENCE)
    server.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("repo", ["me/x/y", "me/moe"])
def test_a_bad_repository_is_named(repo, monkeypatch):
    token = None if repo == "me/moe" else "hf_x"
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(ValueError, match=f"Cannot push to {re.escape(repr(repo))}") as error:
        hub.check_repository(repo)
    assert ("run `hf auth login` or set HF_TOKEN" in str(error.value)) == (token is None)


@pytest.mark.parametrize(
    "files, method, kind",
    [
        ({"config.json": '{"model_type": "llama"}'}, None, "A language model"),
        (
            {"config.json": '{"moe_runtime": {"method": "upit"}}'},
            "upit",
            "A Mixture-of-Experts model",
        ),
        ({"fuser_config.json": "{}"}, "ultrafuser", "A fused model of specialists"),
        ({"expert_cfg.json": "{}"}, "esft", "Tuned experts of a Mixture-of-Experts model"),
        ({"adapter_config.json": "{}"}, None, "A LoRA adapter"),
    ],
)
def test_the_card_says_what_a_folder_is(files, method, kind, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    text = hub.model_card(
        tmp_path,
        "me/x",
        facts={
            "experts": 8,
            "seconds": 1.5,
            "path": "/home/me",
            "found": [1],
        },
    )
    head, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert kind in body
    assert "| experts | 8 |" in body
    assert "/home" not in body
    assert "found" not in body
    if method is None:
        assert "arxiv" not in text
    else:
        assert f"- {method}" in head
        assert f"arxiv:{hub.PAPERS[method].arxiv}" in head
        assert hub.PAPERS[method].title in body


@pytest.mark.parametrize(
    "specialists", [("a", "b"), ("me/base", "b")], ids=["two folders", "an id and a folder"]
)
def test_a_fused_model_that_nobody_could_load_is_not_pushed(specialists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "fused"):
        Path(name).mkdir()
    words = [
        "ultrafuser",
        "fuse",
        *specialists,
        "--out",
        "out",
        "--push-to-hub",
        "me/fused",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code
    assert "Write it with --copy" in str(done.exception)
    assert not Path("out").exists()
    described = [{"path": str(tmp_path / name) if name in "ab" else name} for name in specialists]
    Path("fused/fuser_config.json").write_text(json.dumps({"specialists": described}))
    with pytest.raises(ValueError, match="Write it with --copy"):
        hub.push("fused", "me/fused")
    assert os.listdir("fused") == ["fuser_config.json"]
