"""Every fenced block of the README and of docs/ is tested: run here, run elsewhere, or parsed by
the program's parser.
"""

import importlib
import json
import re
import shutil

import pytest
import yaml

from papers.xft import recipe as xft_recipe
from tests.hf.dropin.test_layers import TOKENIZER, stock
from tests.hf.tiny import dense
from tests.support import official_xft
from tests.support.fences import ALL, check_command, statements

# blocks that another test runs or loads
ELSEWHERE = {
    ("README.md", "python"),
    ("docs/drop-in.md", "python"),
    ("docs/quantized-experts.md", "python"),
    ("docs/drop-in.md", "yaml"),
    ("docs/drop-in.md", "json"),
    ("docs/expert-parallel.md", "python"),
    ("docs/routers.md", "python"),
    ("docs/esft.md", "python"),
    ("docs/papers/upit-tables.md", "python"),
    ("docs/ultrafuser.md", "python"),
    ("docs/shrink.md", "python"),
    ("docs/papers/recipes.md", "python"),
    ("docs/papers/recipes.md", "yaml"),
    ("docs/evaluation.md", "yaml"),
}


def is_here(fence) -> bool:
    """Whether a block is run or loaded here."""
    return (fence.page, fence.language) not in ELSEWHERE


RUN = [fence for fence in ALL if fence.language == "python" and is_here(fence)]


LOADED = [fence for fence in ALL if fence.language in ("yaml", "json") and is_here(fence)]


BASH = [fence for fence in ALL if fence.language == "bash"]


TEXT = [fence for fence in ALL if fence.language == "text"]


place = {"ids": lambda fence: fence.place}


@pytest.mark.parametrize("fence", BASH, **place)
def test_commands_are_parsed(fence):
    commands = statements(fence.text)
    assert commands
    for words in commands:
        check_command(words, fence.page)


@pytest.mark.parametrize("fence", TEXT, **place)
def test_text_blocks_hold_no_commands_and_no_boxes(fence):
    programs = r"(moe-runtime|make|pip|python3?|accelerate|torchrun|bash|git|hf) "
    command = re.search(rf"^\$? ?{programs}", fence.text, re.MULTILINE)
    assert not command, f"{fence.place}: a command must be in a bash block"
    assert "┃" not in fence.text, f"{fence.place}: write the table in Markdown"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with what the pages' blocks read: a dense and a stock model, and examples."""
    folder = tmp_path_factory.mktemp("docs")
    dense("llama", vocab_size=len(TOKENIZER)).save_pretrained(folder / "base")
    stock().save_pretrained(folder / "model")
    for name in ("base", "model"):
        TOKENIZER.save_pretrained(folder / name)
    rows = [{"text": f"{i} and {j} make {i + j}"} for i in range(4) for j in range(4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def official(folder, monkeypatch) -> dict:
    official_xft.write_moe(folder / "theirs")
    return {}


def trainer(folder, monkeypatch) -> dict:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", max_steps=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    ids = TOKENIZER("3 and 4 make 7")["input_ids"]
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 32)
    return {
        "Trainer": Trainer,
        "model": dense("llama", vocab_size=len(TOKENIZER)),
        "args": args,
        "rows": rows,
    }


PREPARED = {
    "docs/papers/xft-official.md": official,
    "docs/upit.md": trainer,
}


@pytest.mark.parametrize("fence", RUN, **place)
def test_python_runs(fence, models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    if fence.page in PREPARED:
        names |= PREPARED[fence.page](tmp_path, monkeypatch)
    text_at_its_line = "\n" * fence.line + fence.text
    exec(compile(text_at_its_line, fence.page, "exec"), names)


@pytest.mark.parametrize("fence", LOADED, **place)
def test_configs_are_loaded_by_what_reads_them(fence, tmp_path):
    assert fence.language == "yaml", f"{fence.place}: nothing reads this"
    values = yaml.safe_load(fence.text)
    if set(values) == {"data"}:  # only the `data` part of a recipe
        xft_recipe.Data.from_dict(values["data"])
        return
    method = values.get("method")
    (tmp_path / "mine.yaml").write_text(fence.text)
    assert method in ("esft", "upit", "ultrafuser"), f"{fence.place}: nothing reads this"
    recipe = importlib.import_module(f"papers.{method}.recipe").load_recipe(tmp_path / "mine.yaml")
    assert recipe.max_length == values["max_length"]
