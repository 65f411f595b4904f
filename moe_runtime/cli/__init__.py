"""Entry point of the command line. The verbs are imported after the handlers of signals and errors
are installed.
"""

import importlib
import os
import sys
import time
from pathlib import Path

from moe_runtime.io import signals

LOAD = Path("/proc/loadavg")
LOOKS = 5


def main(commands: str = "moe_runtime.cli.app") -> None:
    """Run the command line `commands.app`.

    Invalid input prints one line to stderr and exits with 1, Ctrl-C with 130, SIGTERM with 143.
    """
    try:
        with signals.sigterm_raises():
            _set_environment()
            app = importlib.import_module(commands).app

            _run(app)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("MOE_RUNTIME_DEBUG"):
            raise
        from moe_runtime.config import one_line

        print(
            f"error: {one_line(str(error).replace('overwrite=True', '--overwrite'), 4000)}",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt as stop:
        print(signals.word_of(stop), file=sys.stderr)
        sys.exit(signals.code_of(stop))


def _run(app) -> None:
    try:
        app()
    except SystemExit as end:
        # typer silently treats a signal that arrives while it parses as Ctrl-C
        stop = getattr(end.__context__, "__cause__", None)
        if isinstance(stop, KeyboardInterrupt):
            raise stop from None
        raise


def _others_running() -> int:
    """Return how many other threads of the machine run or wait for a core, the least of a few
    looks; 0 on systems that do not tell.

    The load average would still count what has ended, such as an installation.
    """
    counts = []
    while LOAD.exists() and len(counts) < LOOKS:
        time.sleep(0.004)
        counts.append(int(LOAD.read_text().split()[3].partition("/")[0]) - 1)
    return min(counts, default=0)


def _set_environment() -> None:
    """Disable other packages' progress bars in logs and their advice, and let OpenMP's threads
    spin for less than a millisecond before they sleep; must be called before the packages are
    imported.

    GNU's runtime spins for ten, which makes steps ten times as long where other processes need the
    cores (docs/cpu.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        shared = _others_running() > (os.cpu_count() or 1) / 4
        os.environ.setdefault("GOMP_SPINCOUNT", "1000" if shared else "10000")
    if not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # datasets would report each local file that is read to the Hub
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
