"""The pytest plugin of `tests.support.kill_matrix`: traces which tests run which lines, or runs a
selection of tests and records which fail.

`-p tests.support.kill_plugin --trace-to FOLDER` writes, with coverage.py, which lines each test
function runs, in this process and in its child processes. `--select FILE` runs only the test
functions listed in FILE, one per line, and appends "start NAME" and "fail NAME" to FILE.log.

A test is `file::function`; its parametrizations are merged. Lines that run in module or session
fixtures, or in cached functions of the tests, are recorded under the fixture's or function's own
name, for every test that uses it; otherwise only the first test would seem to need them.
"""

import atexit
import functools
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

CONTEXT = "KILL_MATRIX_CONTEXT"  # the context that a child process runs in
CONFIG = """
[run]
data_file = {folder}/coverage
parallel = true
relative_files = true
sigterm = true
disable_warnings = no-data-collected,module-not-measured,not-imported
concurrency = thread,multiprocessing
context = ${{{context}}}
include =
    {root}/moe_runtime/*
    {root}/kernels/*
    {root}/papers/*
    {root}/bench/*
"""
# Python imports it in each process that a test starts; a process without coverage.py runs untraced
SITE = """
try:
    import coverage
    coverage.process_startup()
except ImportError:
    pass
"""


def name_of(item: pytest.Item) -> str:
    """Return the item's file and function."""
    return item.nodeid.split("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trace-to", type=Path)
    parser.addoption("--select", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--trace-to"):
        config.pluginmanager.register(Tracer(folder, config.rootpath))
    if selection := config.getoption("--select"):
        config.pluginmanager.register(Selection(selection))


class Selection:
    """Runs the listed functions, with files in the list's order, and records failures."""

    def __init__(self, file: Path):
        self.names = file.read_text().split()
        self.log = Path(f"{file}.log")
        self.noted = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {}
        for name in self.names:
            order.setdefault(name.split("::")[0], len(order))
        selected = set(self.names)
        items[:] = [item for item in items if name_of(item) in selected]
        items.sort(key=lambda item: order[item.nodeid.split("::")[0]])

    def _note(self, word: str, name: str) -> None:
        if (word, name) not in self.noted:
            self.noted.add((word, name))
            with self.log.open("a") as log:
                print(word, name, file=log)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("start", nodeid.split("[")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note("fail", report.nodeid.split("[")[0])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.failed:
            return
        for name in self.names:
            if name.startswith(f"{report.nodeid}::"):
                self._note("fail", name)


class Tracer:
    """Runs coverage.py with a context for each test function, shared fixture and cached function of
    the tests.
    """

    def __init__(self, folder: Path, root: Path):
        import coverage

        self.folder = folder
        self.context = ""
        self.seconds = defaultdict(float)
        self.failed = set()
        # a test or a shared context -> the shared contexts that it uses
        self.uses = defaultdict(set)
        folder.mkdir(parents=True, exist_ok=True)
        rc = folder / "coveragerc"
        rc.write_text(CONFIG.format(folder=folder, root=root, context=CONTEXT))
        (folder / "site").mkdir(exist_ok=True)
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        os.environ.pop(CONTEXT, None)
        self.coverage = coverage.Coverage(config_file=str(rc), data_suffix=True)
        self.coverage.start()
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "site"), path]))
        os.environ["COVERAGE_PROCESS_START"] = str(rc)
        self._follow_caches()
        atexit.register(self._save)

    def _enter(self, context: str) -> str:
        before = self.context
        if context != before:
            self.context = context
            self.coverage.switch_context(context)
            os.environ[CONTEXT] = context
        return before

    def _follow_caches(self) -> None:
        cache = functools.cache

        def follow(function):
            if not getattr(function, "__module__", "").startswith("tests."):
                return cache(function)
            name = f"cache:{function.__module__}.{function.__qualname__}"

            @functools.wraps(function)
            def run(*args, **kwargs):
                before = self._enter(name)
                try:
                    return function(*args, **kwargs)
                finally:
                    self._enter(before)

            cached = cache(run)

            @functools.wraps(function)
            def call(*args, **kwargs):
                self.uses[self.context].add(name)
                return cached(*args, **kwargs)

            call.cache_clear = cached.cache_clear
            call.cache_info = cached.cache_info
            return call

        functools.cache = follow

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        before = self._enter(f"fixture:{fixturedef.baseid}::{fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._enter(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        name = name_of(item)
        definitions = item._fixtureinfo.name2fixturedefs
        for fixture in item.fixturenames:
            for definition in definitions.get(fixture, ()):
                if definition.scope != "function":
                    self.uses[name].add(f"fixture:{definition.baseid}::{definition.argname}")
        start = time.perf_counter()
        self._enter(name)
        try:
            return (yield)
        finally:
            self.seconds[name] += time.perf_counter() - start

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid.split("[")[0])

    def _save(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        uses = {name: sorted(shared) for name, shared in self.uses.items()}
        table = {"seconds": self.seconds, "failed": sorted(self.failed), "uses": uses}
        (self.folder / f"tests-{os.getpid()}.json").write_text(json.dumps(table))
