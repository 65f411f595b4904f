"""Ctrl-C and SIGTERM: a training ends after its step with a checkpoint, anything else at once; and what is said of it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send, as an exception that unwinds what is open as Ctrl-C does."""


def code_of(stop: KeyboardInterrupt) -> int:
    """Return the exit code that a shell expects: 128 and the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def of(code: int) -> KeyboardInterrupt:
    """Return what ends in this exit code."""
    return Terminated() if code == 128 + signal.SIGTERM else KeyboardInterrupt()


def word_of(stop: KeyboardInterrupt) -> str:
    """Return what happened, in a word."""
    return "terminated" if isinstance(stop, Terminated) else "interrupted"


@contextmanager
def _handling(signals: tuple[int, ...], handler) -> Iterator[None]:
    """Handle signals while the block lasts, in the main thread; elsewhere, and where they are ignored, change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def ours(number, frame):
        if os.getpid() == process:
            return handler(number, frame)
        # a forked child inherits the handler, and whoever forked it wants it to end
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return None

    # None: a handler that was not set from Python, and could not be put back
    signals = tuple(one for one in signals if signal.getsignal(one) not in (signal.SIG_IGN, None))
    before = {one: signal.signal(one, ours) for one in signals}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


# of a command: the interruption that came in the last step of a training, whose result is kept before it is raised
_command: dict[str, KeyboardInterrupt | None] = {}


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise Terminated while the block lasts, so that nothing half written stays; the block is a command's."""

    def stop(number, frame):
        raise Terminated

    _command["late"] = None
    try:
        with _handling((signal.SIGTERM,), stop):
            yield
    finally:
        _command.clear()


def raise_later(stop: KeyboardInterrupt) -> None:
    """Raise `stop` where the command's next training begins: the one that it came into is done, and is kept first."""
    if "late" in _command:
        _command["late"] = stop


# a scheduler signals the launcher and the workers, and the launcher signals them again
SAME_WISH = 2.0  # seconds


class Stopping:
    """What was asked while a training runs: `asked` is the exception to raise when its step is done, or None."""

    def __init__(self):
        self.asked: KeyboardInterrupt | None = None
        self._since = 0.0

    def handle(self, number, frame) -> None:
        """Take the first signal as a wish, and a second as an order; the same again within SAME_WISH is the same wish."""
        stop = of(128 + number)
        if self.asked is not None:
            if type(stop) is type(self.asked) and time.monotonic() - self._since < SAME_WISH:
                return
            raise stop
        self.asked, self._since = stop, time.monotonic()
        # print is not for signal handlers: it may be what was interrupted; a terminal's Ctrl-C ends `| tee log` as well
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.__stderr__.fileno(), b"\nstopping after this step with a checkpoint; again: at once\n")


def hold() -> None:
    """Keep Ctrl-C and SIGTERM from this process, which ends with its parent: both are sent to whole groups of processes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


@contextmanager
def after_the_step() -> Iterator[Stopping]:
    """Collect Ctrl-C and SIGTERM while a training runs that looks at `asked`."""
    if (late := _command.get("late")) is not None:
        raise late
    stopping = Stopping()
    with _handling((signal.SIGINT, signal.SIGTERM), stopping.handle):
        yield stopping
