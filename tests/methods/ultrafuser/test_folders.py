"""Folders of an UltraFuser: saved by reference or as copies, loaded with one call, strict about
their contents.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.io.files import read_json
from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser.specialists import fingerprint
from papers.engine.tiny import train_tokenizer
from tests.methods.ultrafuser import fusers
from tests.support.checkpoints import assert_equal, snapshot
from tests.support.edited import edit_json

NAMES = ("prose", "code", "sums")
TEMPLATES = ["ultralm", "{system}>{prompt}", "chat"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of three specialists with their tokenizer; the last one has tied weights in
    bfloat16.
    """
    root = tmp_path_factory.mktemp("specialists")
    models = fusers.specialists(tie_word_embeddings=True)
    models[2].bfloat16()
    for name, model in zip(NAMES, models, strict=True):
        model.save_pretrained(root / name)
        fusers.tokenizer().save_pretrained(root / name)
    return [root / name for name in NAMES]


def assert_same(one, two) -> None:
    assert_equal(one.state_dict(), two.state_dict())


@pytest.fixture
def fused(sources):
    made = fusers.fuser(sources, templates=TEMPLATES, loss_reduction="sample")
    assert made.names == NAMES
    return made


@pytest.mark.parametrize("mode", ["reference", "copy"])
def test_what_is_saved_is_loaded(fused, tmp_path, mode):
    folder = ultrafuser.save(
        fused,
        tmp_path / "fused",
        specialists=mode,
    )
    again = ultrafuser.load(folder)
    assert_same(again, fused)
    assert not again.training
    assert again.names == NAMES
    assert fused.templates == (ultrafuser.TEMPLATES["ultralm"], *TEMPLATES[1:])
    assert again.templates == fused.templates
    assert again.config.loss_reduction == "sample"
    inputs = again.encode(["hi", "2 + 3?"], ["5", "fox"])
    torch.testing.assert_close(
        inputs,
        fused.encode(["hi", "2 + 3?"], ["5", "fox"]),
    )
    assert torch.equal(
        again(**inputs).loss,
        fused(**inputs).loss,
    )
    if mode == "copy":
        under = "specialists"
    else:
        under = "tokenizers"
    names = {"fuser_config.json", "gate.safetensors", "generation_config.json", under}
    assert {path.name for path in folder.iterdir()} == names
    assert {path.name for path in (folder / under).iterdir()} == set(NAMES)
    gate = folder / "gate.safetensors"
    assert load_file(gate).keys() == fused.gate.state_dict().keys()
    assert gate.stat().st_mode == (folder / "fuser_config.json").stat().st_mode


def test_copies_are_folders_of_transformers_and_move(fused, tmp_path):
    moved = tmp_path / "moved"
    shutil.move(
        ultrafuser.save(fused, tmp_path / "fused", specialists="copy"),
        moved,
    )
    again = ultrafuser.load(moved)
    for name, specialist in zip(NAMES, fused.specialists, strict=True):
        copied = moved / "specialists" / name
        alone = AutoModelForCausalLM.from_pretrained(copied, dtype="auto")
        assert_same(alone, specialist)
        assert alone.lm_head.weight is alone.model.embed_tokens.weight
        assert len(AutoTokenizer.from_pretrained(copied)) == len(fusers.tokenizer())
        # transformers 4 reads this key
        assert "rope_theta" in read_json(copied / "config.json")
    # a folder can overwrite the one that it was loaded from
    again.gate.score.weight.data.add_(1)
    ultrafuser.save(again, moved, specialists="copy", overwrite=True)
    assert_same(ultrafuser.load(moved), again)
    # but not a folder inside it that its specialists are read from
    with pytest.raises(ValueError, match="which is read. Choose another"):
        ultrafuser.save(
            again,
            moved / "specialists" / "prose",
            specialists="copy",
            overwrite=True,
        )
    assert_same(ultrafuser.load(moved), again)


@pytest.mark.parametrize("case", ["its own copies", "inside", "a link"])
def test_specialists_that_would_be_replaced_are_not_named(sources, tmp_path, case):
    copies = [
        shutil.copytree(
            source,
            tmp_path / "all" / source.name,
        )
        for source in sources
    ]
    folder = tmp_path / "fused"
    if case == "inside":
        folder = tmp_path / "all"
    elif case == "a link":
        shutil.move(copies[0], folder)
        copies[0].symlink_to(folder)
    made = fusers.fuser(copies)
    if case == "its own copies":
        made = ultrafuser.load(ultrafuser.save(made, folder, specialists="copy"))
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="Specialist '.*' is at .*Use specialists='copy' or"):
        ultrafuser.save(made, folder, overwrite=True)
    assert snapshot(tmp_path) == before
    # a sibling folder is allowed, though its name has the same prefix
    ultrafuser.save(made, f"{folder}-too", overwrite=True)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(
            torch.arange(6, dtype=torch.bfloat16),
            id="size not a multiple of 8 bytes",
        ),
        pytest.param(
            torch.arange(40, dtype=torch.float32)[1:34],
            id="unaligned",
        ),
        pytest.param(
            torch.arange(float((1 << 21) + 3)),
            id="several chunks",
        ),
    ],
)
def test_fingerprints_depend_on_each_element_and_its_position(tensor):
    def of(tensor):
        model = torch.nn.Module()
        model.register_buffer("weight", tensor)
        return fingerprint(model)

    expected = of(tensor)
    assert of(tensor.clone()) == expected
    last = tensor.clone()
    last[-1] += 1
    for other in (tensor.flip(0), tensor[:-1], last):
        assert of(other) != expected


def test_moved_specialists_and_dtypes(fused, sources, tmp_path):
    folder = ultrafuser.save(fused, tmp_path / "fused")
    moved = shutil.copytree(
        sources[1],
        tmp_path / "elsewhere",
    )
    assert_same(
        ultrafuser.load(folder, specialists={"code": moved}),
        fused,
    )
    for dtype, device in ((torch.float32, ["cpu"] * 3), ("bfloat16", "cpu")):
        loaded = ultrafuser.load(folder, dtype=dtype, device=device)
        expected = getattr(torch, str(dtype).removeprefix("torch."))
        assert {p.dtype for p in loaded.specialists.parameters()} == {expected}


def test_folders_that_do_not_fit_are_refused(sources, tmp_path):
    copies = [
        shutil.copytree(
            source,
            tmp_path / source.name,
        )
        for source in sources
    ]
    saved = ultrafuser.save(
        fusers.fuser(copies),
        tmp_path / "saved",
    )
    folder = tmp_path / "folder"

    def assert_refused(words: str) -> None:
        with pytest.raises(
            (ValueError, OSError),
            match=re.escape(words),
        ):
            ultrafuser.load(folder)
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)

    shutil.copytree(saved, folder)
    for name in ("fuser_config.json", "gate.safetensors"):
        (folder / name).unlink()
        assert_refused(name)
    for changes, words in (
        ({"format": 9}, "has format 9 or"),
        ({"specialists": [{}]}, "or other fields"),
        (
            {"gate": {"kind": "linear", "joint": False, "hidden_sizes": [32] * 3}},
            "2 unexpected: up.bias, up.weight",
        ),
    ):
        edit_json(folder / "fuser_config.json", **changes)
        assert_refused(words)
    gate = load_file(folder / "gate.safetensors") | {"up.weight": torch.zeros(3, 3)}
    save_file(gate, folder / "gate.safetensors")
    assert_refused("up.weight is [3, 3]")
    train_tokenizer(["zebra xylophone " * 9], 270).save_pretrained(copies[1])
    assert_refused("id 262 of")
    fusers.tokenizer().save_pretrained(copies[1])
    model = AutoModelForCausalLM.from_pretrained(copies[0])
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(copies[0])
    assert_refused("has other weights than when the gate was saved")
    shutil.rmtree(copies[0])
    assert_refused("Specialist 'prose' of ")


DOCUMENT = Path(__file__).parents[3] / "docs" / "ultrafuser.md"


def test_the_examples_of_the_docs_run(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for source in sources:
        shutil.copytree(source, tmp_path / source.name)
    (text,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(text, str(DOCUMENT), "exec"), {"__name__": "__main__"})
    assert "torch.Size([2, 9, 3]) torch.Size([2, 9, 280])" in capsys.readouterr().out
