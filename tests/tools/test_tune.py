"""The tuner end to end in the interpreter, with a clock that a test controls, and the lists of
configs that it tries.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_runtime.config import Layer
from moe_runtime.io.files import read_json
from moe_runtime.kernels import tiles
from moe_runtime.kernels.candidates import candidates
from moe_runtime.kernels.tiles import Problem, Tile
from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.tools import tune as tuning
from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LAYER = Layer(40, 32, 3, 2, shared=True)  # no config is clipped
BUILT_IN, TALL, TMA = candidates(
    Problem(
        "up",
        0,
        "float32",
        32,
        40,
        8,
        gated=True,
    )
)
KEYS = [tuning.problem_of(product, LAYER, 16, "float32", CPU).key() for product in tuning.PRODUCTS]


class Clock:
    """Milliseconds by config; counts the rounds, and interrupts the process in one of them."""

    def __init__(self):
        self.ms = {}
        self.rounds = 0
        self.calls = []
        self.stop_at = None

    def round(self, functions):
        self.rounds += 1
        if self.rounds == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append([function.args[0] for function in functions])
        return [self.ms.get(tile, 10.0) for tile in self.calls[-1]]


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A clock for a GPU that is really the interpreter; the file is the user's own, in a separate
    home.
    """
    clock = Clock()
    monkeypatch.setattr(tuning, "find_gpu", lambda: (CPU, clock))
    monkeypatch.setattr(tuning, "ROUNDS", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield clock
    forget()


@pytest.fixture
def few(monkeypatch):
    """Use only three problems in tests that are not about their kernels."""
    monkeypatch.setattr(tuning, "PRODUCTS", tuning.PRODUCTS[:3])


def forget():
    tiles.read_tuned.cache_clear()
    tiles.lookup.cache_clear()


def tune(**options) -> list[tuning.Outcome]:
    return list(
        tuning.tune(
            {"layer": LAYER},
            [16],
            ["float32"],
            **options,
        )
    )


def entries() -> dict:
    return read_json(tiles.tuned_path())["devices"]["interpreter"]["tiles"]


def tile_of(entry: dict) -> Tile:
    return Tile(**entry["tile"])


def tried(entry: dict) -> dict[Tile, dict]:
    """Return the configs that were tried for an entry."""
    return {tile_of(one): one for one in entry["candidates"]}


def states(**options) -> list[str]:
    """Return how the steps of a run ended."""
    return [step.state for step in tune(**options)]


def test_the_fastest_config_is_written_and_picked_up(clock):
    assert states(seconds=-1) == ["left"] * 6  # time runs out
    assert not tiles.tuned_path().exists()
    clock.ms = {TALL: 7.0, TMA: 8.0}
    steps = tune()
    assert [step.state for step in steps] == ["measured"] * 6
    assert set(entries()) == set(KEYS)
    for entry in entries().values():
        assert tile_of(entry) == TALL
        assert entry["ms"] == 7.0
        assert entry["table"]["ms"] == 10.0
        assert tried(entry).keys() == {BUILT_IN, TALL, TMA}
        assert entry["layer"] == LAYER._asdict()
        assert entry["tokens"] == 16
        for name in ("torch", "triton", "driver", "date"):
            assert entry[name]
    x = torch.randn(16, 40)
    assert tiles.choose("down", x, 40, 32, 32, 3) == TALL
    assert tiles.choose("down", x, 40, 32, 60, 3) == BUILT_IN
    assert str(steps[0]) == (
        "layer, 16 tokens, float32: up: 32x32x32, 4 warps, 1 stages, 7.000 ms; built in 10.000 ms "
        "(measured)"
    )
    clock.ms = {TALL: 9.95}  # slightly faster is not enough
    for step in tune(again=True):
        assert tile_of(step.entry) == BUILT_IN


def test_what_is_looked_up_is_what_is_tuned(monkeypatch):
    keys = set()
    problem_of = tiles.problem_of

    def remember(*args):
        problem = problem_of(*args)
        keys.add(problem.key())
        return problem

    monkeypatch.setattr(tiles, "problem_of", remember)
    H, I, E, K, *_ = LAYER
    leaves = [
        torch.randn(16, H),
        torch.randn(E, 2 * I, H),
        torch.randn(E, H, I),
        torch.rand(16, K),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    idx = torch.stack([torch.randint(1, E, [16]), torch.zeros(16, dtype=torch.int64)], 1)
    moe_mlp(*leaves, idx, backend="triton").sum().backward()
    assert keys == set(KEYS)


def spoiled(out: tuple, how: str) -> tuple:
    """Return the wrong result of a config."""
    if how == "raises":
        raise RuntimeError("out of resources\nand much more")
    if how == "unwritten":
        return tuple(torch.empty_like(tensor) for tensor in out)
    if how == "one block":
        out[0].view(-1, out[0].shape[-1])[-1, -8:] = 0
        return out
    return tuple(-tensor for tensor in out)


@pytest.mark.parametrize("how", ["wrong", "one block", "unwritten", "raises"])
def test_a_config_that_is_wrong_cannot_win(clock, monkeypatch, how):
    runner = tuning.runner

    def broken(*args):
        run = runner(*args)
        return lambda tile: spoiled(run(tile), how) if tile == TALL else run(tile)

    monkeypatch.setattr(tuning, "runner", broken)
    clock.ms = {TALL: 1.0, TMA: 2.0}
    says = "RuntimeError: out of resources" if how == "raises" else "the error of a row is"
    for step in tune():
        assert tile_of(step.entry) == TMA
        wrong = tried(step.entry)[TALL]
        assert wrong["ms"] is None
        assert says in wrong["note"]
        assert "more" not in wrong["note"]
    if torch.are_deterministic_algorithms_enabled():
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_stopped_run_resumes(clock, few):
    clock.stop_at = 2 * tuning.ROUNDS + 2  # in the third problem
    with pytest.raises(KeyboardInterrupt):
        tune()
    before = entries()
    assert set(before) == set(KEYS[:2])
    assert not markers()
    clock.stop_at = None
    assert states() == ["kept", "kept", "measured"]
    assert entries().items() > before.items()
    rounds = clock.rounds
    assert states() == ["kept"] * 3
    assert clock.rounds == rounds
    assert states(again=True) == ["measured"] * 3


def test_slow_configs_are_not_timed_to_the_end(clock, few):
    clock.ms = {TALL: 20.0, BUILT_IN: 30.0}
    tune()
    assert clock.calls[2] == [BUILT_IN, TALL, TMA]
    assert clock.calls[3] == [BUILT_IN, TMA]


@pytest.mark.parametrize("text", ["{", '{"devices": {"x": {"tiles": {"k": {"tile": {"M": 1}}}}}}'])
def test_a_file_that_is_not_ours_is_named_and_left_alone(clock, text):
    path = tiles.tuned_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match="tiles.json is not a file of `moe-runtime tune`"):
        tune()
    assert path.read_text() == text


def in_process(function: Callable, *args) -> int:
    """Start a process that calls a function and then dies without output; return its id."""
    pid = os.fork()
    if not pid:
        try:
            function(*args)
        finally:
            os._exit(9)
    return pid


def markers() -> list[Path]:
    return list(tiles.tuned_path().parent.glob(".*"))


def die_while_trying(tile: Tile | None) -> None:
    results = tuning.Results(tiles.tuned_path(), "interpreter")
    with results.alone(), results.trying(KEYS[0], tile):
        os._exit(9)


@pytest.mark.parametrize("died_with", [TALL, None], ids=["a config", "compiling"])
def test_what_ended_a_process_is_not_tried_again(clock, few, died_with):
    os.waitpid(in_process(die_while_trying, died_with), 0)
    assert len(markers()) == 1
    clock.ms = {TALL: 1.0}
    first, *others = tune()
    assert (TALL in tried(first.entry)) == (died_with is None)
    for step in others:
        assert TALL in tried(step.entry)
    results = tuning.Results(tiles.tuned_path(), "interpreter")
    assert results.broken(KEYS[0]) == [died_with]
    assert not markers()
    tune(again=True)
    assert tile_of(entries()[KEYS[0]]) == TALL
    assert not results.broken(KEYS[0])


def test_one_process_measures_at_a_time(clock, few):
    results = tuning.Results(tiles.tuned_path(), "interpreter")
    with (
        results.alone(),
        results.trying(KEYS[0], TALL),
        pytest.raises(ValueError, match="Another process is measuring"),
    ):
        tune()
    assert states() == ["measured"] * 3
    assert not results.broken(KEYS[0])


def test_a_context_that_is_lost_ends_the_run_and_the_next_one_skips_the_config(clock, monkeypatch):
    def lost(tile, note):
        raise tuning.ContextLost(tile, note)

    runner = tuning.runner

    def broken(*args):
        run = runner(*args)
        return lambda tile: 1 / 0 if tile == TALL else run(tile)

    monkeypatch.setattr(tuning, "runner", broken)
    monkeypatch.setattr(tuning, "_check_context", lost)
    for done in range(2):
        with pytest.raises(tuning.ContextLost, match="BLOCK_M=32.*ZeroDivisionError.*Rerun"):
            tune()
        assert len(entries()) == done
    assert TALL not in tried(entries()[KEYS[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_worst_row_sees_one_block_and_one_nan(dtype):
    right = torch.randn(300, 1024).to(dtype)
    worst_row = tuning.worst_row
    assert worst_row(right, right) == 0
    assert worst_row(right[:0], right[:0]) == 0
    wrong = right.clone()
    wrong[17, 64:128] = 0
    assert 0.1 < worst_row(wrong, right) < 0.5
    assert worst_row(right + 1e-3 * right.abs().mean(), right) < 1e-2
    wrong[17, 64] = float("nan")
    assert not worst_row(wrong, right) <= 1e9
    assert not worst_row(right, wrong) <= 1e9
    assert worst_row(wrong[:, :5], right) == float("inf")


# a driver without a GPU: kernels compile, but cannot be launched
AHEAD = """
import torch, triton
from moe_runtime.tools import tune, warmup
from moe_runtime.kernels import grouped_gemm
from moe_runtime.kernels.tiles import Tile

triton.runtime.driver.set_active(warmup.Driver(90))
a, w = torch.ones(64, 128, dtype=torch.bfloat16), torch.ones(2, 64, 128, dtype=torch.bfloat16)
rows = torch.zeros(3, 4, dtype=torch.int32)
pool = [Tile(64, 64, 64, 4, 3), Tile(64, 32, 64, 4, 3, TMA=True), Tile(48, 64, 64, 4, 3)]
launch = triton.runtime.jit.KernelInterface.__getitem__
run = lambda tile: grouped_gemm.grouped_gemm_forward(a, w, None, rows, True, tile)
tune.compile_ahead(run, pool)
assert triton.runtime.jit.KernelInterface.__getitem__ is launch
cached = grouped_gemm._grouped_gemm_fwd_kernel.device_caches[0][0].values()
print(sorted(type(kernel).__name__ for kernel in cached))
"""


@pytest.mark.aot
def test_kernels_compile_ahead_and_none_is_launched(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    out = captured([sys.executable, "-c", AHEAD], env=env, cwd=ROOT)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.strip().count("CompiledKernel") == 2


def test_deterministic_algorithms_are_as_before_after_a_measurement():
    torch.use_deterministic_algorithms(False)
    with tuning._poisoned():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
