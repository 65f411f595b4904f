"""Run a command to its end, with its output as text."""

import subprocess


def captured(command: list, **options) -> subprocess.CompletedProcess:
    """Run a command with options of `subprocess.run`; return its exit code and its outputs."""
    return subprocess.run(command, capture_output=True, text=True, **options)
