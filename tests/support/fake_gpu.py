"""A fake H200, and a clock that stands still until somebody works: what `tests.support.dry_run`
puts into its processes.

CUDA tensors lie on the CPU, kernels run in Triton's interpreter at small sizes, and times are drawn
at random. Tests are collected as on a GPU and not run: their twins are the CPU suite. `at(name)`
stands where a GPU would work: it costs time, and FAULTS says what happens there, WORD=KIND with
spaces between: what has WORD in its name, with _ for spaces

    segv    dies by a signal
    lost    breaks the CUDA context, and every later call fails in this process
    hang    never ends
    oom     finds no memory
    taken   ends everything, once: the machine is taken back
"""

import fcntl
import functools
import importlib.abc
import importlib.machinery
import itertools
import os
import queue  # noqa: F401  with threading and subprocess: they keep the real clock
import random
import signal
import subprocess  # noqa: F401
import sys
import threading  # noqa: F401
import time
from pathlib import Path
from types import SimpleNamespace

# milliseconds of a process, a test, a benchmark, ...
START = 2000
TEST = 100
BENCHMARK = 3000
CONFIG = 150
OP = 500
LOST = "CUDA error: an illegal memory access was encountered"
SMALL = {
    "T": 32,
    "H": 64,
    "I": 64,
    "V": 64,
    "L": 2,
    "rows": 2,
    "length": 16,
    "heads": 2,
    "E": 8,
    "K": 3,
}
_state = SimpleNamespace(lost=False, oom=False, tests=False)


def now() -> int:
    return int(Path(os.environ["CLOCK"]).read_text())


def spend(ms: int) -> None:
    """Let time pass; a deadline of bench/gpu.sh in between comes first, and this waits for its
    signal.
    """
    clock = os.environ["CLOCK"]
    with open(clock, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        then = int(file.read()) + ms
        late = then >= int(Path(f"{clock}.deadline").read_text())
        if not late:
            file.seek(0)
            file.write(f"{then:012d}\n")
    if late:
        wait("late")


def wait(why: str) -> None:
    Path(f"{os.environ['CLOCK']}.waits").write_text(why)
    while True:
        time.sleep(0.02)


def at(name: str, ms: int, patience: float = 0) -> None:
    """Work for so long on what has this name, or meet its fault; a hang ends after the seconds that
    pytest-timeout has.
    """
    for fault in os.environ.get("FAULTS", "").split():
        word, _, kind = fault.rpartition("=")
        if word not in name.replace(" ", "_"):
            continue
        if kind == "taken":
            mark = Path(f"{os.environ['CLOCK']}.taken")
            if mark.exists():
                continue
            mark.touch()
            os.kill(int(os.environ["SCRIPT_PID"]), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)
        if kind == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hang":
            if patience:
                spend(int(patience * 1000))
                os._exit(1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            wait("hang")
        setattr(_state, kind, True)
    spend(ms)


def alive(*_, **__) -> None:
    """What every call of CUDA begins with."""
    import torch

    if _state.lost:
        raise torch.AcceleratorError(LOST)
    if _state.oom:
        _state.oom = False
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def _fake_cuda(torch) -> None:
    from torch.overrides import TorchFunctionMode

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.device:  # a name, which may be asked for
                return function(*args, **(kwargs or {}))
            alive()
            return function(
                *map(_cpu, args), **{name: _cpu(value) for name, value in (kwargs or {}).items()}
            )

    def _cpu(value):
        cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
            type(value) is str and value.startswith("cuda")
        )
        return "cpu" if cuda else value

    class Event:
        def __init__(self, **_): ...

        record = synchronize = alive

        def elapsed_time(self, _) -> float:
            return random.uniform(1, 2)

    about = {
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 139 << 30,
        "L2_cache_size": 60 << 20,
    }
    fakes = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(name="NVIDIA H200", **about),
        "mem_get_info": (139 << 30, 139 << 30),
        "is_current_stream_capturing": False,
    }
    for name, value in fakes.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "_sleep"):
        setattr(torch.cuda, name, alive)
    allocated = itertools.count(1 << 20, 1 << 20)  # what a call keeps is more than nothing
    torch.cuda.memory_allocated = lambda *_: next(allocated)
    torch.cuda.max_memory_allocated = lambda *_: random.randrange(1 << 31, 1 << 32)
    torch.cuda.Event = Event
    torch.cuda.profiler.start = alive
    torch.cuda.profiler.stop = alive

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    torch.Generator = Generator
    spend(START)
    if not _state.tests:
        OnTheCpu().__enter__()


def _fake_backends(backends) -> None:
    """As on a GPU, although the tensors report the CPU as their device."""
    import torch

    if _state.tests:
        return
    from tests.support import interp_fast, interp_fix

    interp_fix.install()
    interp_fast.install()
    why_not = backends.why_not
    choose = backends.choose
    backends.interpreted = lambda: False
    backends.why_not = lambda backend, op, device: why_not(backend, op, torch.device("cuda", 0))
    # every op in torch: the interpreter takes seconds for a GPU's tiles
    backends.choose = lambda *args, **kwargs: choose(*args, **kwargs) and "torch"


def _fake_timing(tune) -> None:
    """Each product on a small layer, with the config of the large one; each timing at random."""
    runner = tune.runner
    trying = tune.Results.trying

    def small_runner(product, layer, T, *where):
        at(f"runner {product}", 0)
        return runner(
            product,
            layer._replace(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2),
            16,
            *where,
        )

    def named_trying(self, key, tile):
        context = trying(self, key, tile)

        class Trying:
            def __enter__(self):
                context.__enter__()
                at(f"tune {key} {tile and tile.short()}", CONFIG)

            __exit__ = context.__exit__

        return Trying()

    def rounds(self, functions):
        alive()
        spend(20)
        return [random.uniform(1, 2) for _ in functions]

    tune.runner = small_runner
    tune.Results.trying = named_trying
    tune.EventTimer.round = rounds
    tune.EventTimer.__init__ = lambda self, device, ahead_ms=0.2: None


def _fake_ceilings(ceilings) -> None:
    ceilings._of_gpu = lambda dtype: {"TFLOP/s": 790.0, "GB/s": 4300.0}


def _fake_machine(machine) -> None:
    machine._runs = lambda name, op, x: machine.backends.why_not(name, op, x.device) is None


def _fake_cases(table) -> None:
    """Few ops, as each has processes of its own, and one case of each, over and over."""
    for op, (kernel, make) in list(table.CASES.items()):
        del table.CASES[op]
        if op in ("route", "dispatch", "merge_experts"):
            worked = functools.partial(
                lambda make, op, draw: at(f"check {op}", OP) or make(draw), make, op
            )
            table.CASES[op] = (kernel, worked)
    table.ONCE = (*table.CASES,)


AFTER = {
    "torch": _fake_cuda,
    "moe_runtime.backends": _fake_backends,
    "moe_runtime.tools.tune": _fake_timing,
    "moe_runtime.bench.machine": _fake_machine,
    "moe_runtime.bench.ceilings": _fake_ceilings,
    "moe_runtime.tools.conformance.cases": _fake_cases,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function after the import of a module; finds none of the packages that
    MISSING names.
    """

    find_distributions = staticmethod(importlib.machinery.PathFinder.find_distributions)

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in os.environ["MISSING"].split()
        spec = None if hidden else importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and name in AFTER:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), AFTER[name](module))
        return spec


def install() -> None:
    """Change this process; sitecustomize calls it before anything else runs."""
    _state.tests = any(word.startswith("tests/") for word in sys.orig_argv) or "TESTS" in os.environ
    if _state.tests:
        os.environ["TESTS"] = "1"  # for the workers of pytest-xdist
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = _Finder()
    time.monotonic = lambda: now() / 1000


# of the plugin for pytest that PYTEST_PLUGINS names


def pytest_collection_modifyitems(items):
    # conftest.py would skip what needs a GPU
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name != "gpu"]
    for item in items if _state.tests else ():
        item.fixturenames.clear()  # what is not run needs none


def pytest_runtest_setup(item):
    """The benchmarks' sizes by their names, and small."""
    for name, value in (item.callspec.params if hasattr(item, "callspec") else {}).items():
        if hasattr(value, "_fields") and not _state.tests:
            item.callspec.params[name] = _small(value)


def _small(value):
    """A size, or the layer in a tuple."""
    if hasattr(value, "shape"):
        return value._replace(shape=_small(value.shape))
    return value._replace(
        **{
            name: min(getattr(value, name), most)
            for name, most in SMALL.items()
            if name in value._fields
        }
    )


def pytest_timeout_set_timer(item, settings):
    """`at` looks after hangs; a busy machine's own clock ends nothing."""
    return True


pytest_timeout_set_timer.pytest_impl = {"optionalhook": True}


def pytest_pyfunc_call(pyfuncitem):
    at(
        pyfuncitem.nodeid,
        TEST if _state.tests else BENCHMARK,
        pyfuncitem.config.getoption("timeout", None) or 0,
    )
    if _state.tests:
        alive()
        return True
    return None
