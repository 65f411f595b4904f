"""Folders of an UltraFuser: saved by reference or copied, loaded by one call, strict about what
they hold.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser.specialists import fingerprint
from papers.engine.tiny import train_tokenizer
from tests.methods.ultrafuser import fusers

NAMES = ("prose", "code", "sums")
TEMPLATES = ["ultralm", "{system}>{prompt}", "chat"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of three specialists, the last one's weights tied and in bfloat16, with their
    tokenizer.
    """
    root = tmp_path_factory.mktemp("specialists")
    for s, (name, model) in enumerate(
        zip(NAMES, fusers.specialists(tie_word_embeddings=True), strict=True)
    ):
        (model.bfloat16() if s == 2 else model).save_pretrained(root / name)
        fusers.tokenizer().save_pretrained(root / name)
    return [root / name for name in NAMES]


@pytest.fixture
def fused(sources):
    made = fusers.fuser(sources, templates=TEMPLATES, loss_reduction="sample")
    assert made.names == NAMES
    return made


def same(one, two) -> bool:
    a = one.state_dict()
    b = two.state_dict()
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a
    )


@pytest.mark.parametrize("mode", ["reference", "copy"])
def test_what_is_saved_is_loaded(fused, tmp_path, mode):
    folder = ultrafuser.save(fused, tmp_path / "fused", specialists=mode)
    again = ultrafuser.load(folder)
    assert same(again, fused) and not again.training
    assert again.names == NAMES and again.templates == fused.templates == (
        ultrafuser.TEMPLATES["ultralm"],
        *TEMPLATES[1:],
    )
    assert again.config.loss_reduction == "sample"
    inputs = again.encode(["hi", "2 + 3?"], ["5", "fox"])
    for name, tensors in fused.encode(["hi", "2 + 3?"], ["5", "fox"]).items():
        assert all(torch.equal(a, b) for a, b in zip(inputs[name], tensors, strict=True))
    assert torch.equal(again(**inputs).loss, fused(**inputs).loss)
    held = {path.relative_to(folder).parts[:2] for path in folder.rglob("*") if path.is_file()}
    under = "specialists" if mode == "copy" else "tokenizers"
    files = {("fuser_config.json",), ("gate.safetensors",), ("generation_config.json",)}
    assert held == files | {*((under, name) for name in NAMES)}
    assert load_file(folder / "gate.safetensors").keys() == fused.gate.state_dict().keys()
    assert ultrafuser.UltraFuser.from_pretrained(folder).names == NAMES
    assert (folder / "gate.safetensors").stat().st_mode & 0o777 == (
        folder / "fuser_config.json"
    ).stat().st_mode & 0o777


def test_copies_are_folders_of_transformers_and_move(fused, tmp_path):
    folder = ultrafuser.save(fused, tmp_path / "fused", specialists="copy")
    shutil.move(folder, tmp_path / "moved")
    again = ultrafuser.load(tmp_path / "moved")
    for s, name in enumerate(NAMES):
        copied = tmp_path / "moved" / "specialists" / name
        alone = AutoModelForCausalLM.from_pretrained(copied, dtype="auto")
        assert same(alone, fused.specialists[s]) and len(
            AutoTokenizer.from_pretrained(copied)
        ) == len(fusers.tokenizer())
        assert alone.lm_head.weight is alone.model.embed_tokens.weight
        # as transformers 4 reads it
        assert "rope_theta" in json.loads((copied / "config.json").read_text())
    # a folder can be written over the one that it was loaded from
    with torch.no_grad():
        again.gate.score.weight.add_(1)
    ultrafuser.save(again, tmp_path / "moved", specialists="copy", overwrite=True)
    assert same(ultrafuser.load(tmp_path / "moved"), again)
    # but not over a folder in which its specialists have another place
    one = tmp_path / "moved" / "specialists" / NAMES[0]
    with pytest.raises(ValueError, match="which is read. Choose another"):
        ultrafuser.save(again, one, specialists="copy", overwrite=True)
    assert same(ultrafuser.load(tmp_path / "moved"), again)


def reads(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("case", ["its own copies", "inside", "a specialist", "a link"])
def test_specialists_that_would_be_replaced_are_not_named(sources, tmp_path, case):
    own = [shutil.copytree(source, tmp_path / "all" / source.name) for source in sources]
    folder = {"inside": tmp_path / "all", "a specialist": own[1]}.get(case, tmp_path / "fused")
    if case == "a link":
        folder = tmp_path / "real"
        shutil.move(own[0], folder)
        own[0].symlink_to(folder)
    made = fusers.fuser(own)
    if case == "its own copies":
        made = ultrafuser.load(ultrafuser.save(made, folder, specialists="copy"))
    before = reads(tmp_path)
    with pytest.raises(
        ValueError, match="Specialist '.*' is at .*Use specialists='copy' or another folder"
    ):
        ultrafuser.save(made, folder, overwrite=True)
    assert reads(tmp_path) == before
    # beside them is another folder, though its name begins alike
    ultrafuser.save(made, f"{folder}-too", overwrite=True)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(6, dtype=torch.bfloat16), id="no whole words"),
        pytest.param(torch.arange(40, dtype=torch.float32)[1:34], id="off the words"),
        pytest.param(torch.arange(float((1 << 21) + 3)), id="several chunks"),
    ],
)
def test_fingerprints_tell_one_number_and_its_place(tensor):
    def of(tensor):
        model = torch.nn.Module()
        model.register_buffer("weight", tensor)
        return fingerprint(model)

    known = of(tensor)
    last = tensor.clone()
    assert known == of(tensor.clone()) and known != of(tensor.flip(0)) and known != of(tensor[:-1])
    last[-1] += 1
    assert known != of(last)


def test_training_the_gate_leaves_the_reference_good(fused, tmp_path):
    fused.freeze_specialists().train()
    optimizer = torch.optim.AdamW(fused.parameters(), lr=0.1)
    fused(**fused.encode(["a"], ["b"])).loss.backward()
    optimizer.step()
    again = ultrafuser.load(ultrafuser.save(fused, tmp_path / "fused"))
    assert same(again, fused)


def test_moved_specialists_and_dtypes(fused, sources, tmp_path):
    folder = ultrafuser.save(fused, tmp_path / "fused")
    moved = shutil.copytree(sources[1], tmp_path / "elsewhere")
    assert same(ultrafuser.load(folder, specialists={"code": moved}), fused)
    wide = ultrafuser.load(folder, dtype=torch.float32, device=["cpu"] * 3)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    narrow = ultrafuser.load(folder, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in narrow.specialists.parameters()} == {torch.bfloat16}


def edit(folder, **changes):
    path = folder / "fuser_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_gate(folder, sources):
    tensors = load_file(folder / "gate.safetensors")
    save_file(tensors | {"up.weight": torch.zeros(3, 3)}, folder / "gate.safetensors")


def other_weights(folder, sources):
    model = AutoModelForCausalLM.from_pretrained(sources[0])
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(sources[0])


def other_tokenizer(folder, sources):
    train_tokenizer(["zebra xylophone " * 9], 270).save_pretrained(sources[0])


@pytest.mark.parametrize(
    "spoil, words",
    [
        pytest.param(
            lambda f, s: shutil.rmtree(s[0]), "Specialist 'prose' of ", id="missing specialist"
        ),
        pytest.param(
            lambda f, s: (f / "fuser_config.json").unlink(),
            "fuser_config.json (No such file",
            id="no fuser",
        ),
        pytest.param(lambda f, s: edit(f, format=9), "has format 9 or", id="format"),
        pytest.param(lambda f, s: edit(f, specialists=[{}]), "or other fields", id="fields"),
        pytest.param(
            lambda f, s: (f / "gate.safetensors").unlink(), "gate.safetensors", id="no gate"
        ),
        pytest.param(other_gate, "up.weight is [3, 3], not [32, 32]", id="another gate"),
        pytest.param(
            lambda f, s: edit(f, gate={"kind": "linear", "joint": False, "hidden_sizes": [32] * 3}),
            "2 unexpected: up.bias, up.weight",
            id="gate's kind",
        ),
        pytest.param(
            other_weights, "has other weights than when the gate was saved", id="other weights"
        ),
        pytest.param(other_tokenizer, "id 262 of", id="another tokenizer"),
    ],
)
def test_folders_that_do_not_fit_are_refused(sources, tmp_path, spoil, words):
    own = [shutil.copytree(source, tmp_path / source.name) for source in sources]
    folder = ultrafuser.save(fusers.fuser(own), tmp_path / "fused")
    spoil(folder, own)
    with pytest.raises((ValueError, OSError)) as error:
        ultrafuser.load(folder)
    assert words in str(error.value)


DOCUMENT = Path(__file__).parents[3] / "docs" / "ultrafuser.md"


def test_the_examples_of_the_docs_run(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for source in sources:
        shutil.copytree(source, tmp_path / source.name)
    for text in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(text, str(DOCUMENT), "exec"), {"__name__": "__main__"})
    assert "torch.Size([2, 9, 3]) torch.Size([2, 9, 280])" in capsys.readouterr().out
