"""What a reader may do with bad input: read what it says, or reject it in one error that names the
problem.

Memory is bounded by RLIMIT_DATA, whose soft limit a process may lower and raise again; time is
bounded by an alarm.
"""

import contextlib
import random
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.limited import memory

EXTRA = 384 << 20  # bytes that reading a file of a few kB may allocate
SECONDS = 20
# characters of an error message: it describes the problem and does not quote the whole input
LONGEST = 4000


class Hang(BaseException):
    """Reading took longer than SECONDS; a BaseException, so that no reader's `except Exception`
    mistakes it for an error in the file.
    """


class Verdict(NamedTuple):
    """Result of one reading: `value` if it was read, `error` if it was rejected."""

    value: Any = None
    error: str | None = None

    @property
    def is_read(self) -> bool:
        return self.error is None


@contextlib.contextmanager
def bounded(extra: int = EXTRA, seconds: int = SECONDS) -> Iterator[None]:
    """Limit the block to `extra` bytes of memory beyond what is allocated, and to `seconds`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, _ring)
    try:
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (memory("VmData") + extra, hard),
        )
        signal.alarm(seconds)
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _ring(*_) -> None:
    raise Hang(f"no answer within {SECONDS} s")


def attempt(read: Callable[[], Any], *names: str) -> Verdict:
    """Run `read` within bounds; an error must be a ValueError or an OSError that contains one of
    `names` or says what it expects.

    Anything else fails with the original error: a KeyError, a JSONDecodeError, a MemoryError, a
    hang.
    """
    try:
        with bounded():
            return Verdict(value=read())
    except Hang as error:
        raise AssertionError(f"hangs: {error}") from error
    except (ValueError, OSError) as error:
        message = str(error)
        naked = type(error) is not ValueError and not isinstance(error, OSError)
        named = any(word in message for word in (" must ", "xpected ", " but ", *names))
        if naked or not named or len(message) > LONGEST:
            what = "too long" if len(message) > LONGEST else "naked"
            raise AssertionError(f"{what}: {type(error).__name__}: {message[:300]}") from error
        return Verdict(error=message)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {str(error)[:300]}") from error


def run_seeds(count: int, case: Callable[[random.Random], None]) -> None:
    """Run `case` with a generator for each seed below `count`; fail with each distinct error and a
    seed that reproduces it.
    """
    faults: dict[str, int] = {}
    for seed in range(count):
        try:
            case(random.Random(seed))
        except AssertionError as error:
            faults.setdefault(str(error)[:400], seed)
    assert not faults, "\n".join(f"seed {seed}: {what}" for what, seed in faults.items())
