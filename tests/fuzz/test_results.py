"""Results files of benchmarks, broken: compared, reported, drawn and gone on from, or refused by the file's name."""

import copy
import json
import random
from pathlib import Path

import pytest

from moe_runtime.bench import compare, pictures, report, running
from moe_runtime.bench.records import Records, benchmarks, failures
from tests.fuzz.attempts import attempt, run_seeds
from tests.fuzz.mutations import HOSTILE, mutate_bytes, mutate_value, to_json
from tests.support.stress import scaled

pytestmark = pytest.mark.stress
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
# one benchmark of each picture, and what goals ask for
NAMES = (
    "bench_forward[coarse-fp32]", "bench_tokens[coarse-4-fp32]", "bench_tokens[coarse-64-fp32]", "bench_step_breakdown",
    "bench_saved_memory", "bench_xft_step", "bench_fused_loss", "bench_merge_experts", "bench_decoder_layer",
)  # fmt: skip


@pytest.fixture(scope="module")
def newest() -> dict:
    """A part of the newest results file."""
    whole = json.loads(max(RESULTS.glob("*-cpu.json")).read_text())
    found = [next((b for b in whole["benchmarks"] if b["name"].startswith(name)), None) for name in NAMES]
    assert sum(bench is not None for bench in found) >= 6
    return whole | {"benchmarks": [bench for bench in found if bench], "failed": {"bench_x": "boom"}}


def readings(path: Path, whole: Path) -> list:
    """What a command does with a results file, each a call."""

    def compared(a, b):
        found = compare.compare(a, b)
        return compare.text(found), json.dumps(compare.as_json(found), allow_nan=False)

    def gone_on():
        lines = path.with_name("on.jsonl")
        lines.write_text("")
        try:
            running.check(lines, path, False, 15)
            Records(lines).write("bench_y", extra_info={"rows": {"moe_runtime": {"ms": 1.0}}})
            running.gather(lines, path.with_name("on.json"))
            return benchmarks(path.with_name("on.json"))
        finally:
            lines.unlink(missing_ok=True)

    return [
        lambda: compared(whole, path), lambda: compared(path, whole), lambda: report.text([path]), lambda: failures(path),
        lambda: report.cuda_table([path]), gone_on,
    ]  # fmt: skip


def mutated(rng: random.Random, values: dict) -> dict:
    """Half of the changes within one benchmark, so that what is broken is not always the head of the file."""
    if rng.random() < 0.5:
        return mutate_value(rng, values)
    values = copy.deepcopy(values)
    i = rng.randrange(len(values["benchmarks"]))
    values["benchmarks"][i] = mutate_value(rng, values["benchmarks"][i])
    return values


def test_mutated_results(tmp_path, newest):
    path, whole, read = tmp_path / "r.json", tmp_path / "whole.json", []
    whole.write_text(json.dumps(newest))

    def case(rng: random.Random) -> None:
        path.write_bytes(to_json(rng, mutated(rng, newest)))
        read.extend(attempt(reading, path.name, "on.json").is_read for reading in readings(path, whole))

    run_seeds(scaled(40, 3000), case)
    assert any(read) and not all(read)


def test_mutated_lines(tmp_path, newest):
    """A line that is broken is run again; what is whole but no benchmark's is refused."""
    path, read = tmp_path / "r.jsonl", []
    lines = [{"name": "", "planned": 3}, {"name": "bench_a", "began": True}, newest["benchmarks"][0]]
    lines += [{"name": "bench_b", "failed": "boom"}, {"name": "bench_c", "broken": {"peer": "note"}}]

    def case(rng: random.Random) -> None:
        changed = mutate_value(rng, lines)
        changed = changed if isinstance(changed, list) else [changed]
        data = b"\n".join(json.dumps(line).encode() for line in changed) + b"\n"
        path.write_bytes(mutate_bytes(rng, data) if rng.random() < 0.4 else data)
        records = Records(path)
        asked = (records.done, records.planned, records.unfinished, lambda: records.broken("bench_c"))
        calls = (*asked, lambda: report.text([path]), lambda: failures(path))
        read.append([attempt(call, path.name).is_read for call in calls])
        running_on = attempt(lambda: running.gather(path, tmp_path / "out.json"), path.name, "out.json")
        if running_on.is_read and running_on.value.path:
            benchmarks(running_on.value.path)

    run_seeds(scaled(100, 3000), case)
    assert any(map(all, read)) and not all(map(all, read))


def test_mutated_results_are_drawn(tmp_path, newest):
    pytest.importorskip("matplotlib")
    path, drawn = tmp_path / "r.json", []

    def case(rng: random.Random) -> None:
        few = newest | {"benchmarks": [rng.choice(newest["benchmarks"])]}
        path.write_text(json.dumps(mutated(rng, few)))
        drawn.append(attempt(lambda: pictures.write_pictures(path, tmp_path / "drawn"), path.name).is_read)

    run_seeds(scaled(2, 300), case)
    assert any(drawn)


def test_a_variant_s_name_is_no_formula_and_no_markup(tmp_path, newest):
    pytest.importorskip("matplotlib")
    from xml.etree import ElementTree

    bench = copy.deepcopy(newest["benchmarks"][0])
    rows = bench["extra_info"]["rows"]
    for name in ("cost $5 and $6", "<svg>&", "\\frac{1}{2}", "x" * 40, "é" * 20, ": x", ", x"):
        rows[name] = rows["moe_runtime"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"benchmarks": [bench]}))
    verdict = attempt(lambda: pictures.write_pictures(path), path.name)
    assert verdict.is_read and verdict.value
    for picture in verdict.value:
        if picture.suffix == ".svg":
            ElementTree.parse(picture)


@pytest.mark.parametrize(
    "value", [v for v in HOSTILE if v not in (1, 2, 7, 0.5) or v is True], ids=lambda v: repr(v)[:20]
)
def test_milliseconds_are_numbers_that_can_be_divided_by(tmp_path, value):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"benchmarks": [{"name": "a", "extra_info": {"rows": {"b": {"ms": value}}}}]}))
    verdict = attempt(lambda: benchmarks(path), path.name)
    assert verdict.is_read == (value in (2**31, 2**63, 2**64) and value is not True)


def test_a_line_behind_half_a_line_is_kept(tmp_path):
    records = Records(tmp_path / "r.jsonl")
    records.path.write_text('{"name": "bench_a", "extra_in')
    records.write("bench_b", failed="boom")
    assert [line["name"] for line in records.lines()] == ["bench_b"]
