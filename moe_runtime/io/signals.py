"""Ctrl-C and SIGTERM: a training stops after the current step with a checkpoint, anything else
stops immediately.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

# seconds; a scheduler signals both the launcher and the workers, and the launcher signals the
# workers again
REPEAT = 2.0


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send, as an exception that unwinds the stack as Ctrl-C does."""


def code_of(stop: KeyboardInterrupt) -> int:
    """Return the exit code that a shell expects: 128 plus the signal number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def of(code: int) -> KeyboardInterrupt:
    """Return the exception for an exit code of `code_of`."""
    return Terminated() if code == 128 + signal.SIGTERM else KeyboardInterrupt()


def word_of(stop: KeyboardInterrupt) -> str:
    """Return "terminated" or "interrupted"."""
    return "terminated" if isinstance(stop, Terminated) else "interrupted"


@contextmanager
def _handling(signals: tuple[int, ...], handler: Handler) -> Iterator[None]:
    """Handle signals in the main thread, except those that are ignored or handled elsewhere."""
    process = os.getpid()
    before = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handler(number, frame)
            return
        # a forked child inherits the handler, but its parent expects it to exit
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        for number in signals:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


# per command: the signal that arrived in the last step of a training; it is raised after the result
# is saved
_command: dict[str, KeyboardInterrupt | None] = {}


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise Terminated during a command, so that no partial output is left."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handling((signal.SIGTERM,), stop):
        _command["late"] = None
        try:
            yield
        finally:
            _command.clear()


def raise_later(stop: KeyboardInterrupt) -> None:
    """Raise `stop` when the command's next training begins, after the interrupted one is finished
    and saved.
    """
    if "late" in _command:
        _command["late"] = stop


class Stopping:
    """A stop requested during a training: `asked` is the exception to raise after the current step,
    or None.
    """

    def __init__(self) -> None:
        self.asked: KeyboardInterrupt | None = None
        self._since = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; raise at the second, unless it comes within REPEAT seconds."""
        stop = of(128 + number)
        if self.asked is not None:
            if type(stop) is type(self.asked) and time.monotonic() - self._since < REPEAT:
                return
            raise stop
        self.asked = stop
        self._since = time.monotonic()
        # the signal may have interrupted print itself; Ctrl-C on a terminal also stops `| tee log`
        with suppress(OSError, ValueError):
            if sys.__stderr__ is not None:
                line = b"\nstopping after this step with a checkpoint; again: at once\n"
                os.write(sys.__stderr__.fileno(), line)


@contextmanager
def after_the_step() -> Iterator[Stopping]:
    """Collect Ctrl-C and SIGTERM during a training, which checks `asked` after each step."""
    late = _command.get("late")
    if late is not None:
        raise late
    stopping = Stopping()
    with _handling((signal.SIGINT, signal.SIGTERM), stopping.handle):
        yield stopping
