"""Progress: a bar with rate and remaining time on a terminal, few lines in a log, and no output
from processes other than the first.
"""

import contextlib
import json
import os
import threading

import pytest
import torch

from moe_runtime.cli.verbs import Ends
from moe_runtime.config import MoEConfig
from moe_runtime.io import console
from moe_runtime.io.console import jsonable, print_table
from tests.support.patience import PATIENCE


@pytest.fixture
def clock(monkeypatch, capsys):
    """A clock that the test controls; stderr is not a terminal."""

    class Clock:
        now = 100.0

        def printed(self) -> str:
            return capsys.readouterr().err

    clock = Clock()
    monkeypatch.setattr(console.time, "monotonic", lambda: clock.now)
    monkeypatch.delenv("RANK", raising=False)
    return clock


def test_a_log_gets_a_line_a_minute_with_rate_and_time_left(clock):
    with console.bar("training") as update:
        for step in range(201):
            update(step, 200, 2.5)
            clock.now += 1
    lines = clock.printed().splitlines()
    assert lines[0] == "training: 5% 10/200 [00:10<03:10,  1.00step/s, loss 2.500]"

    assert len(lines) == 5
    assert lines[-1] == "training: done in 03:21"
    with console.bar("training") as update:
        update(0, 2)
        clock.now += 3725
        update(1, 2)
    printed = clock.printed()
    assert "[1:02:05<1:02:05" in printed
    assert "training: done in 1:02:05" in printed
    with console.bar("merging", "B") as update:  # quick work prints nothing
        for done in range(5):
            clock.now += 1
            update(done, 4)
    assert clock.printed() == ""
    with console.bar("training") as update:
        update(900, 1000)  # resumed from a checkpoint
        clock.now += 20
        update(910, 1000)
    assert clock.printed().splitlines()[0] == "training: 91% 910/1000 [00:20<03:00,  2.00s/step]"


def wait_for(clock, text: str) -> str:
    """Return what was printed, as soon as it contains `text`."""
    printed = ""
    event = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        printed += clock.printed()
        if text in printed:
            return printed
        event.wait(0.01)
    raise AssertionError(f"{text!r} was not printed within {PATIENCE} s; got {printed!r}")


def test_long_work_without_an_update_says_that_it_goes_on(clock, monkeypatch):
    monkeypatch.setattr(console, "SILENCE", 0.01)
    with console.watched("moe-runtime eval"):
        clock.now += 3725
        wait_for(clock, "moe-runtime eval: still working after 1:02:05\n")
        with console.bar("answering", "request") as update:
            update(0, 16)
            clock.now += 60
            printed = wait_for(clock, "answering: still working at 0% after 01:00\n")
            assert "moe-runtime" not in printed.partition("answering")[2]
        with (
            open(os.devnull, "w") as null,
            contextlib.redirect_stderr(null),
            console.watched("unpacking"),
        ):
            wait_for(clock, "unpacking: still working after 00:00\n")
    clock.printed()
    for thread in threading.enumerate():
        if thread.name.endswith("(_run)"):
            thread.join(PATIENCE)
    assert clock.printed() == ""


def test_others_are_silent(clock, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with console.bar("training") as update:
        for step in range(100):
            clock.now += 1
            update(step, 100)
    assert clock.printed() == ""


def test_records_become_objects():
    settings = MoEConfig(hidden_size=8, intermediate_size=4)
    assert jsonable(settings)["hidden_size"] == 8
    assert jsonable(Ends(torch.ones(2), 1)) == {"value": [1.0, 1.0], "code": 1}
    values = jsonable({1: float("inf"), "dtype": torch.float32})
    assert values == {"1": None, "dtype": "torch.float32"}
    json.dumps(jsonable([settings, {"a"}, None, True]), allow_nan=False)


def test_a_table_is_plain_where_nobody_looks(monkeypatch, capsys):
    columns = [("model", "left"), ("loss", "right")]
    rows = [("a [b]", "1.0"), ("c" * 200, "12.0")]
    print_table("losses", columns, rows)
    out = capsys.readouterr().out
    for text in ("a [b]", "c" * 200):
        assert text in out, "a row was wrapped or treated as markup"
    for sign in "\x1b┃│┏┓":
        assert sign not in out
