"""Every fenced block of the README and of docs/ has a test: run here, run elsewhere, or parsed by
its program's parser.
"""

import ast
import importlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import typer
import yaml

from papers.xft import recipe as xft_recipe
from tests.hf.dropin.test_layers import TOKENIZER, stock
from tests.hf.tiny import dense
from tests.support import official_xft
from tests.support.fences import ALL, PAGES, ROOT, check_command, fences, statements

LANGUAGES = {"bash", "bibtex", "console", "json", "pycon", "python", "text", "yaml"}

# blocks that a test elsewhere runs or loads: how many of a page and language, and the test, which
# names the page
ELSEWHERE = {
    ("README.md", "python"): (2, "tests/docs/test_readme.py::test_python_blocks_run"),
    ("docs/drop-in.md", "python"): (4, "tests/docs/test_docs.py::test_examples_run"),
    ("docs/quantized-experts.md", "python"): (
        2,
        "tests/hf/dropin/test_quantize.py::test_the_example_of_the_docs_runs",
    ),
    ("docs/drop-in.md", "yaml"): (1, "tests/docs/test_docs.py::test_the_fsdp2_config_is_one"),
    ("docs/drop-in.md", "json"): (1, "tests/docs/test_docs.py::test_the_zero3_config_is_one"),
    ("docs/expert-parallel.md", "python"): (
        2,
        "tests/hf/dropin/test_parallel_docs.py::test_example",
    ),
    ("docs/routers.md", "python"): (
        3,
        "tests/hf/dropin/test_balance.py::test_the_examples_of_the_docs_run",
    ),
    ("docs/esft.md", "python"): (
        1,
        "tests/papers/esft/test_study.py::test_the_python_of_the_docs_runs",
    ),
    ("docs/esft.md", "yaml"): (
        1,
        "tests/papers/esft/test_study.py::test_the_recipe_of_the_docs_is_one",
    ),
    ("docs/upit.md", "python"): (
        1,
        "tests/papers/upit/test_study.py::test_the_python_of_the_docs_runs",
    ),
    ("docs/upit.md", "yaml"): (
        1,
        "tests/papers/upit/test_study.py::test_the_recipe_of_the_docs_is_one",
    ),
    ("docs/ultrafuser.md", "python"): (
        2,
        "tests/methods/ultrafuser/test_folders.py::test_the_examples_of_the_docs_run",
    ),
    ("docs/recipes.md", "python"): (
        1,
        "tests/papers/xft/test_study.py::test_the_python_of_the_docs_runs",
    ),
    ("docs/recipes.md", "yaml"): (
        1,
        "tests/papers/xft/test_recipe.py::test_the_recipe_of_the_docs_is_one",
    ),
    ("docs/evaluation.md", "yaml"): (
        1,
        "tests/papers/xft/test_recipe.py::test_the_task_of_the_docs_is_yaml",
    ),
}
# of those pages, the blocks that are run here
HERE = {("docs/upit.md", "save_experts.py")}
RUN = [
    fence
    for fence in ALL
    if fence.language == "python"
    and ((fence.page, "python") not in ELSEWHERE or (fence.page, fence.options.get("file")) in HERE)
]
LOADED = [
    fence
    for fence in ALL
    if fence.language in ("yaml", "json") and (fence.page, fence.language) not in ELSEWHERE
]
place = {"ids": lambda fence: fence.place}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    for fence in fences(page):
        assert fence.language in LANGUAGES, (
            f"{fence.place} is {fence.language!r}; want one of {', '.join(LANGUAGES)}"
        )


def test_what_is_run_elsewhere_is():
    here = Counter(
        (fence.page, fence.language)
        for fence in RUN
        if (fence.page, fence.options.get("file")) in HERE
    )
    found = Counter((fence.page, fence.language) for fence in ALL)
    for (page, language), (count, test) in ELSEWHERE.items():
        path, name = test.split("::")
        text = (ROOT / path).read_text()
        names = {
            node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
        }
        assert name in names, test
        assert Path(page).name in text, f"{path} does not name {page}"
        assert found[page, language] - here[page, language] == count, (
            f"{page} has other {language} blocks; who runs them?"
        )


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language == "bash"], **place)
def test_commands_are_parsed(fence):
    commands = statements(fence.text)
    assert commands
    for words in commands:
        check_command(words, fence.page)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("moe-runtime upcycled a b", id="verb"),
        pytest.param("moe-runtime xft upcycle a b --expert 3", id="option"),
        pytest.param("moe-runtime xft upcycle a", id="argument"),
        pytest.param("moe-runtime train --model a --dat b", id="trl"),
        pytest.param("make tests", id="target"),
        pytest.param("make demo ARG=--overwrite", id="variable"),
        pytest.param("pip install '.[trains]'", id="extra"),
        pytest.param("python -m moe_runtime.native.build cuda --arch-list 90", id="argparse"),
        pytest.param("python -m moe_runtime.nothing", id="module"),
        pytest.param("python nowhere.py", id="script"),
        pytest.param("bash bench/gpu.sh everything", id="part"),
        pytest.param("accelerate launch --confg x train.py", id="accelerate"),
        pytest.param("mergekit x", id="program"),
    ],
)
def test_commands_that_would_not_run_are_found(line):
    (words,) = statements(line)
    with pytest.raises(
        (AssertionError, ImportError, typer.BadParameter.__base__, ValueError, SystemExit)
    ):
        check_command(words, "a page")


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language == "text"], **place)
def test_text_hides_no_command_and_tables_name_theirs(fence):
    programs = r"(moe-runtime|make|pip|python3?|accelerate|torchrun|bash|git|hf) "
    assert not re.search(rf"^\$? ?{programs}", fence.text, re.MULTILINE), (
        f"{fence.place}: commands are bash"
    )
    boxes = [line for line in fence.text.splitlines() if line[:1] in "┏┃┡│└"]
    assert len({len(line) for line in boxes}) <= 1, (
        f"{fence.place}: a table whose lines differ in width"
    )
    if boxes and fence.page != "README.md":
        command = re.fullmatch(r"`((?:moe-runtime|python -m papers) .+)`", fence.before)
        assert command, f"{fence.place}: a table without the command that printed it"
        check_command(command[1].split(), fence.page)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with what the pages' blocks read: a dense and a stock model, and rows."""
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


PREPARED = {"docs/xft-official.md": official, "docs/upit.md": trainer}


@pytest.mark.parametrize("fence", RUN, **place)
def test_python_runs(fence, models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = PREPARED[fence.page](tmp_path, monkeypatch) if fence.page in PREPARED else {}
    text = "\n" * fence.line + fence.text
    exec(compile(text, fence.page, "exec"), names | {"__name__": "__main__"})


@pytest.mark.parametrize("fence", LOADED, **place)
def test_configs_are_loaded_by_what_reads_them(fence, tmp_path):
    assert fence.language == "yaml", f"{fence.place}: nothing reads this"
    values = yaml.safe_load(fence.text)
    if set(values) == {"data"}:  # of a recipe its rows
        assert (
            xft_recipe.Data.from_dict(values["data"]).held_out_rows
            == values["data"]["held_out_rows"]
        )
        return
    method = values.get("method")
    (tmp_path / "mine.yaml").write_text(fence.text)
    assert method in ("esft", "upit", "ultrafuser"), f"{fence.place}: nothing reads this"
    recipe = importlib.import_module(f"papers.{method}.recipe").load_recipe(tmp_path / "mine.yaml")
    assert recipe.max_length == values["max_length"]
