"""A pytest plugin that writes each test's outcome to a JSONL file, and runs no test twice.

    python -m pytest -p tests.support.outcomes --results FILE.jsonl [--restarted] ...

Tests that the file lists as passed are not run again, and with --restarted neither is the test that
the last process died in. A test that breaks the CUDA context ends its process with exit code 99,
since all later tests would fail; pytest-xdist then starts another worker.
"""

import os
from pathlib import Path

import pytest
import torch

LOST = 99
DIED = "the process died"


def pytest_addoption(parser):
    # bench/conftest.py has options with the same names for its own records
    parser.addoption(
        "--results",
        type=Path,
        help="JSON lines: each outcome is written immediately, and no test is run twice",
    )
    parser.addoption(
        "--restarted",
        action="store_true",
        help="do not rerun the test that was running when the last process died",
    )


def pytest_configure(config):
    config.pluginmanager.register(Outcomes(config), "outcomes")


class Outcomes:
    """Writes in the process that the user started; workers of pytest-xdist only get the list of
    finished tests.
    """

    def __init__(self, config):
        # after tests/conftest.py, since it imports the package
        from moe_runtime.bench.machine import commit
        from moe_runtime.bench.records import Written

        self.worker = getattr(config, "workerinput", None)
        self.records = Written(config.getoption("--results"))
        self.commit = commit()
        self.failed = False
        if self.worker is not None:
            self.done = set(self.worker["done"])
            return
        lines = self.records.lines()
        if config.getoption("--restarted") and lines and lines[-1].get("began"):
            self.write(lines[-1]["name"], "failed", why=DIED)
            lines = self.records.lines()
        last = {line["name"]: line for line in lines if "outcome" in line}
        # a skipped test runs again, since what it needs may be available now
        self.done = {
            name
            for name, line in last.items()
            if line["outcome"] == "passed" or line.get("why") == DIED
        }

    def write(self, name: str, outcome: str, **more) -> None:
        self.records.write(
            name[:500],
            outcome=outcome,
            commit=self.commit,
            **more,
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        # all workers must collect the same tests, including replacement workers
        node.workerinput["done"] = sorted(self.done)

    def pytest_collection_modifyitems(self, config, items):
        out = [item for item in items if item.nodeid[:500] in self.done]
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if item.nodeid[:500] not in self.done]

    def pytest_collectreport(self, report):
        if self.worker is None and not report.passed:
            self.write(
                report.nodeid or "collection",
                report.outcome,
                why=_why(report),
            )

    def pytest_runtest_logstart(self, nodeid):
        if self.worker is None:
            self.records.write(nodeid[:500], began=True)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = True
        if self.worker is None and (report.when == "call" or not report.passed):
            more = dict(report.user_properties) | ({} if report.passed else {"why": _why(report)})
            self.write(
                report.nodeid,
                report.outcome,
                seconds=round(report.duration, 3),
                **more,
            )

    def pytest_runtest_logfinish(self):
        failed = self.failed
        self.failed = False
        if failed and torch.cuda.is_available() and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception:  # torch.AcceleratorError or RuntimeError, depending on the version
                os._exit(LOST)


def _why(report) -> str:
    from moe_runtime.bench.machine import public

    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    else:
        text = str(crash.message if crash else report.longrepr)
    return public(text)[-1000:]
