"""Misspelled folder names are refused immediately, and auto-generated model cards are replaced."""

import huggingface_hub
import pytest
from transformers import AutoConfig

from moe_runtime.hf.common import sources
from moe_runtime.hf.common.loading import load
from moe_runtime.hf.models import hub
from moe_runtime.hf.training.sft import train_command
from papers.evaluation.evaluate_models import find_models
from tests.hf import tiny

MISSPELT = [
    "olmoo",
    "./olmoo",
    "/none/olmoo",
    "runs/tuned/modell",
    "olmoo/",
    "../olmoo",
    "~/olmoo",
    "owner/",
]


@pytest.mark.parametrize("source", MISSPELT)
def test_a_misspelt_folder_is_refused_by_name_before_any_request(source, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    says = f"odel '{source}' is neither a folder nor a Hub id. "
    for call in (
        lambda: load(AutoConfig, source),
        lambda: sources.local_folder(source),
        lambda: find_models([source]),
        lambda: train_command(
            [
                "--model",
                source,
                "--data",
                "rows.jsonl",
                "--output_dir",
                "out",
            ]
        ),
    ):
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.parametrize(
    "text, is_replaced",
    [
        ("# Model Card for Model ID\n", True),
        ("fine-tuned version of [None](https://huggingface.co/None).\n", True),
        ("# Mine\nIt has been trained using [TRL]", False),
    ],
)
def test_cards_that_nobody_wrote_are_replaced(text, is_replaced, monkeypatch, tmp_path):
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "create_repo",
        lambda *_, **__: "url",
    )
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "upload_folder",
        lambda *_, **__: None,
    )
    tiny.dense().save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    card.write_text(text)
    hub.push(tmp_path, "me/tuned", base="me/base", method="xft")

    assert ('from_pretrained("me/tuned")' in card.read_text()) == is_replaced
    assert ("base_model: me/base" in card.read_text()) == is_replaced
    assert (card.read_text() == text) != is_replaced
    # as after a training without push
    card.write_text(hub.model_card(tmp_path, f"OWNER/{tmp_path.name}"))
    hub.push(tmp_path, "me/tuned")
    assert 'from_pretrained("me/tuned")' in card.read_text()
    assert "OWNER" not in card.read_text()


def test_existing_paths_and_ids_pass(tmp_path):
    for source in (tmp_path, f"{tmp_path}/", "allenai/OLMoE-1B-7B-0924", "a/b.c-d_e"):
        sources.check_source(source)
    with pytest.raises(
        ValueError,
        match="A Hub id has an owner, as in openai-community/gpt2",
    ):
        sources.check_source("gpt2")
