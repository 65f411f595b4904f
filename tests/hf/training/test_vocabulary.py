"""Tokens without a row in the model's embedding are reported before anything runs, whatever reads
them.
"""

import pytest
from datasets import Dataset, Features, IterableDataset, Sequence, Value
from transformers import TrainingArguments

from moe_runtime.hf.training.fit import pair_collator, row_losses
from moe_runtime.hf.training.trainer import MoETrainer, check_rows
from papers.engine.tiny import train_tokenizer
from tests.hf.tiny import dense

TOKENIZER = train_tokenizer(["hello world, hello world; " * 20], 300)
V = len(TOKENIZER)
SAYS = rf"Token ids must be below vocab_size \({V - 1}\), but got {V - 1}"

FIXED = Features({"input_ids": Sequence(Value("int32"), length=2)})


@pytest.fixture(scope="module")
def small():
    return dense("llama", vocab_size=V - 1)


def dataset(ids: list, *features) -> Dataset:
    return Dataset.from_dict({"input_ids": ids}, *features)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(dataset([[1, 2], [], [V - 1, 3]]), id="dataset"),
        pytest.param({"a": dataset([[V - 1]])}, id="datasets by name"),
        pytest.param(
            dataset([[[1], []], [[], [4, V - 1]]]),
            id="dataset of lists of lists",
        ),
        pytest.param(dataset([1, V - 1]), id="one id per row"),
        pytest.param(dataset([[1, V - 1]], FIXED), id="rows of one length"),
    ],
)
def test_an_id_beyond_the_embedding(small, rows):
    with pytest.raises(
        ValueError,
        match=rf"{SAYS} \('.+'\). .*resize_token_embeddings\({V}\)",
    ):
        check_rows(small, rows, TOKENIZER)
    with pytest.raises(ValueError, match=rf"{SAYS}\."):
        check_rows(small, rows)
    check_rows(dense("llama", vocab_size=V), rows, TOKENIZER)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            dataset([[V - 2], [V]]).select([0]),
            id="a row that is not selected",
        ),
        pytest.param(Dataset.from_dict({"text": ["a"]}), id="text"),
        pytest.param(dataset([[], []]), id="rows without tokens"),
        pytest.param(
            IterableDataset.from_generator(lambda: iter([{"input_ids": [V]}])), id="read only later"
        ),
        pytest.param(dataset([["a"], ["b"]]), id="no ids"),
        pytest.param(None, id="no rows"),
    ],
)
def test_what_is_not_embedded_does_not_count(small, rows):
    check_rows(small, rows)


def test_trainings_and_evaluations_say_so(small, tmp_path):
    rows = Dataset.from_dict(
        {
            "input_ids": [[1, V - 1]],
            "labels": [[1, V - 1]],
        }
    )
    args = TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        report_to=[],
    )
    for name in ("train_dataset", "eval_dataset"):
        parts = {name: rows, "data_collator": pair_collator(TOKENIZER)}
        with pytest.raises(ValueError, match=SAYS):
            MoETrainer(model=small, args=args, **parts)
    with pytest.raises(ValueError, match=SAYS):
        row_losses(small, rows, TOKENIZER)
