"""Misspelt folders are refused at once, and a Hub that cannot be reached is not asked again and
again.
"""

import time

import huggingface_hub
import pytest
from huggingface_hub import constants
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


@pytest.fixture()
def unreachable(monkeypatch):
    """A Hub on a closed port, where every wait between two attempts is an error."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )

    def sleep(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s")

    monkeypatch.setattr(time, "sleep", sleep)


@pytest.mark.parametrize("source", MISSPELT)
def test_a_misspelt_folder_is_refused_by_name_before_any_request(source, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    monkeypatch.setattr(sources, "is_reachable", None)
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


def test_an_unreachable_hub_is_asked_once(unreachable):
    for call in (
        lambda: load(AutoConfig, "owner/none"),
        lambda: sources.local_folder("owner/none"),
    ):
        with pytest.raises(
            ValueError,
            match="'owner/none' .*not among the downloaded models, and .*127.0.0.1:9 cannot",
        ):
            call()
    assert constants.HF_HUB_OFFLINE is False
