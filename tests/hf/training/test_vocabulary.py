"""Tokens that a model has no row for: named before anything runs, whatever reads them."""

import json
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Sequence, Value

from moe_runtime import cli
from moe_runtime.hf.models.tiny import pair_collator, train_tokenizer
from moe_runtime.hf.training.fit import row_losses
from moe_runtime.hf.training.trainer import MoETrainer, check_ids, check_rows
from tests.hf.tiny import dense, upcycled

TOKENIZER = train_tokenizer(["hello world, hello world; " * 20], 300)
V = len(TOKENIZER)
SAYS = rf"token id is {V - 1} \('.+'\), vocab_size is {V - 1}; want ids below it; .*resize_token_embeddings\({V}\)"

FIXED = Features({"input_ids": Sequence(Value("int32"), length=2)})


@pytest.fixture(scope="module")
def small():
    return dense("llama", vocab_size=V - 1)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(Dataset.from_dict({"input_ids": [[1, 2], [], [V - 1, 3]]}), id="dataset"),
        pytest.param({"a": Dataset.from_dict({"input_ids": [[V - 1]]})}, id="datasets by name"),
        pytest.param([{"input_ids": [1]}, {"input_ids": [4, V - 1]}], id="list"),
        pytest.param(
            [{"input_ids": torch.tensor([4, V - 1])}, {"input_ids": torch.tensor([], dtype=int)}], id="tensors"
        ),
        pytest.param([{"input_ids": np.array([[4], [V - 1]])}], id="arrays"),
        pytest.param([{"input_ids": [[], [1], [4, V - 1]]}, {"input_ids": [[]]}], id="lists of lists"),
        pytest.param(Dataset.from_dict({"input_ids": [[[1], []], [[], [4, V - 1]]]}), id="dataset of lists of lists"),
        pytest.param(Dataset.from_dict({"input_ids": [1, V - 1]}), id="one id a row"),
        pytest.param(Dataset.from_dict({"input_ids": [[1, V - 1]]}, FIXED), id="rows of one length"),
    ],
)
def test_an_id_beyond_the_embedding(small, rows):
    with pytest.raises(ValueError, match=SAYS):
        check_rows(small, rows, TOKENIZER)
    with pytest.raises(ValueError, match=f"token id is {V - 1}, vocab_size is {V - 1}; want"):
        check_rows(small, rows)
    check_rows(dense("llama", vocab_size=V), rows, TOKENIZER)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(Dataset.from_dict({"input_ids": [[V - 2], [V]]}).select([0]), id="a row that is not taken"),
        pytest.param(Dataset.from_dict({"text": ["a"]}), id="text"),
        pytest.param(Dataset.from_dict({"input_ids": [[], []]}), id="rows without a token"),
        pytest.param(IterableDataset.from_generator(lambda: iter([{"input_ids": [V]}])), id="read only later"),
        pytest.param([{"input_ids": [], "labels": []}, {"labels": [V]}], id="nothing to embed"),
        pytest.param(Dataset.from_dict({"input_ids": [["a"], ["b"]]}), id="no ids"),
        pytest.param(None, id="no rows"),
    ],
)
def test_what_is_not_embedded_does_not_count(small, rows):
    check_rows(small, rows)


def test_tensors_are_not_looked_through_id_by_id(small):
    rows = [{"input_ids": torch.zeros(2048, dtype=torch.long)}] * 500
    start = time.process_time()
    check_rows(small, rows)
    assert time.process_time() - start < 0.5  # 2.3 s id by id


def test_padding_without_a_row_is_warned_of(small):
    rows = [{"input_ids": [1]}]
    before = TOKENIZER.pad_token
    TOKENIZER.pad_token = TOKENIZER.convert_ids_to_tokens(V - 1)
    try:
        with pytest.warns(UserWarning, match=f"pad_token_id is {V - 1}, vocab_size is {V - 1}; want an id below it"):
            check_rows(small, rows, TOKENIZER)
    finally:
        TOKENIZER.pad_token = before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rows(small, rows, TOKENIZER)


def test_a_model_whose_embedding_is_not_to_be_seen():
    class Without:
        def get_input_embeddings(self):
            raise NotImplementedError

    check_ids(Without(), [10**9])
    check_ids(object(), [10**9])


def test_trainings_and_evaluations_say_so(small, tmp_path):
    from transformers import TrainingArguments

    rows = Dataset.from_dict({"input_ids": [[1, V - 1]], "labels": [[1, V - 1]]})
    arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[])
    for given in ({"train_dataset": rows}, {"eval_dataset": rows}):
        with pytest.raises(ValueError, match=SAYS):
            MoETrainer(model=small, args=arguments, data_collator=pair_collator(TOKENIZER), **given)
    with pytest.raises(ValueError, match=SAYS):
        row_losses(small, rows, TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    upcycled(changes={"vocab_size": V - 1}).save_pretrained(folder / "moe")
    TOKENIZER.save_pretrained(folder / "moe")
    word = TOKENIZER.convert_ids_to_tokens(V - 1).replace("Ġ", " ")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": f"b{word}"}) + "\n")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("train", "--model", "{moe}", "--output_dir", "{out}", "--report_to", "none"), id="train"),
        pytest.param(("esft", "score", "{moe}", "--out", "{out}/summary.json"), id="score"),
        pytest.param(("stats", "{moe}", "--out", "{out}"), id="stats"),
    ],
)
def test_a_command_says_so_in_a_line(folder, tmp_path, monkeypatch, capfd, arguments):
    words = [word.format(moe=folder / "moe", out=tmp_path / "out") for word in arguments]
    monkeypatch.setattr(sys, "argv", ["moe-runtime", *words, "--data", str(folder / "rows.jsonl")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1 and last.startswith(f"error: token id is {V - 1} (")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
