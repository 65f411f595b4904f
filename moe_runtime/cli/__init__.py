"""moe-runtime VERB: the command. The verbs are imported once signals and errors are handled."""

import os
import sys

from moe_runtime.io import signals


def main() -> None:
    """Run the command line; bad input ends in one line on stderr and exit code 1, Ctrl-C in 130, SIGTERM in 143."""
    try:
        with signals.sigterm_raises():
            _quiet()
            from moe_runtime.cli.app import app

            _run(app)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("MOE_RUNTIME_DEBUG"):
            raise
        from moe_runtime.config import one_line

        print(f"error: {one_line(str(error).replace('overwrite=True', '--overwrite'), 4000)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as stop:
        print(signals.word_of(stop), file=sys.stderr)
        sys.exit(signals.code_of(stop))


def _run(app) -> None:
    try:
        app()
    except SystemExit as end:
        # typer takes what comes while it parses for Ctrl-C, silently
        stop = getattr(end.__context__, "__cause__", None)
        if isinstance(stop, KeyboardInterrupt):
            raise stop from None
        raise


def _quiet() -> None:
    """Keep other packages' bars out of logs, and their advice out of both; before they are imported."""
    if not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # datasets would tell the Hub of each local file that is read
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
