"""Verbs on folders and rows of which one file is broken: one error that says what is wrong, or the work is done."""

import json
import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_runtime.cli.app import app as main_app
from moe_runtime.hf.models.tiny import train_tokenizer
from moe_runtime.io.rows import read_rows
from tests.fuzz.attempts import attempt, run_seeds
from tests.fuzz.mutations import mutate_bytes, mutate_value, to_json
from tests.hf import tiny
from tests.support.stress import scaled, share

pytestmark = pytest.mark.stress
# what reads side files beside the weights, and how often
VERBS = {
    "merge": "merge {mergeable} {out}",
    "upcycle": "upcycle {dense} {out} --num-experts 4 --top-k 2 --check",
    "stats": "stats {moe} --data {rows} --out {out} --max-length 16",
    "official": "xft export-official {moe} {out} --keep-rope",
}
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A dense model, a mixture and a mergeable one, each with its tokenizer and generation settings; rows."""
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = train_tokenizer(["Add 1 and 2."], 300)
    tiny.dense("llama", vocab_size=len(tokenizer), mlp_bias=None).save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    for verb, source, target in (("upcycle", "dense", "moe"), ("to-mergeable", "moe", "mergeable")):
        sizes = ["--num-experts", "4", "--top-k", "2"] if verb == "upcycle" else []
        done = CliRunner().invoke(main_app, [verb, str(folder / source), str(folder / target), *sizes])
        assert done.exit_code == 0, done.output
    (folder / "rows.jsonl").write_text('{"text": "Add 1 and 2."}\n' * 3)
    return folder


def run(argv: list[str]) -> int:
    """Run a verb as the command does; what it raises is the error."""
    done = CliRunner().invoke(main_app, argv)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code


@pytest.mark.parametrize("verb", share(list(VERBS), 0, 2))
def test_a_broken_file_beside_the_weights(tmp_path, whole, verb):
    folder, out, codes = tmp_path / "in", tmp_path / "out", []
    shutil.copytree(whole, folder)
    places = {name: str(folder / name) for name in ("dense", "moe", "mergeable")}
    argv = VERBS[verb].format(**places, rows=folder / "rows.jsonl", out=out).split()
    source = Path(next(word for word in argv if word in places.values()))
    names = [name for name in FILES if (source / name).is_file()]
    assert run(argv) == 0 and len(names) >= 3

    def case(rng: random.Random) -> None:
        shutil.rmtree(out, ignore_errors=True)
        name = rng.choice(names)
        data = (source / name).read_bytes()
        is_json = rng.random() < 0.8 and len(data) < 100_000
        broken = to_json(rng, mutate_value(rng, json.loads(data))) if is_json else mutate_bytes(rng, data)
        (source / name).write_bytes(broken)
        verdict = attempt(lambda: run(argv), name, source.name)
        (source / name).write_bytes(data)
        codes.append(verdict.value if verdict.is_read else 1)
        assert verdict.is_read or not list(out.glob("*.safetensors")), "weights were written beside an error"

    run_seeds(scaled(2, 150), case)
    assert set(codes) <= {0, 1}


def test_broken_parquet(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path, read = tmp_path / "rows.parquet", []
    rows = [{"prompt": f"{i}?", "completion": "2026-11-22"} for i in range(40)]
    datasets.Dataset.from_list(rows).to_parquet(path)
    data = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(mutate_bytes(rng, data))
        verdict = attempt(lambda: list(read_rows(path)), path.name)
        read.append(verdict.is_read)
        if verdict.is_read:
            assert all(isinstance(row["prompt"], str) for row in verdict.value if "prompt" in row)

    run_seeds(scaled(8, 600), case)
    assert not all(read)
