"""What the tests of every paper's table commands share: a report, the calls that reach `run`, and what is to be seen of one."""

from pathlib import Path

from moe_runtime.experiments.tables import Entry, Report
from moe_runtime.methods.xft.study import Result


def report_of(command: str) -> Report:
    """Numbers made up: what is tested is what the command line does with them."""
    values = {"folder": Path("sft-0/model"), "tokens": [3, 4], "steps": 1, "seconds": 1.0, "total_seconds": 1.0}
    values |= {"parameters": 5, "active_parameters": 5, "history": [], "alpha": None, "steps_per_second": 1.0}
    rows = {"SFT": [1.0, 2.0], "XFT": [0.5, 1.5]}
    results = {name: Result(name=name, loss=sum(losses) / 2, losses=losses, **values) for name, losses in rows.items()}
    entries = [Entry(name, [result]) for name, result in results.items()]
    return Report(command, "a title", "Table 0", {}, (0,), entries, "SFT", summary=["what it says"])


def watch(monkeypatch, module) -> list:
    """Put a recorder in the place of the module's `run`; return its calls (command, recipe, out, options), which grow."""
    calls = []

    def run(command, recipe, out, **options):
        calls.append((command, str(recipe), str(out), options))
        return report_of(command)

    monkeypatch.setattr(module, "run", run)
    return calls


def check_call(seen: list, out, arguments: tuple, folder, options: dict) -> None:
    """Assert that a command ended well, called its table once with `options`, and printed what that returned."""
    assert out.exit_code == 0, out.exception
    ((command, recipe, target, given),) = seen
    given.pop("say")
    assert (command, recipe, target) == (arguments[0], "tiny", str(folder))
    assert given == {"seeds": 2, "overwrite": False} | options
    assert "a title" in out.output and "what it says" in out.output
    assert f"{arguments[0]}.json" in out.output and "no difference found" in out.output
