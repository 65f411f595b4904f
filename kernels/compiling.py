"""One line on the terminal when kernels are compiled for longer than SECONDS at their first launches."""

import os
import sys

import triton

SECONDS = 2.0


class Listener:
    """Triton's compilation listener: adds up the time of our kernels and prints one line, once for a process."""

    def __init__(self, following):
        self.following, self.seconds, self.has_printed = following, 0.0, False

    def __call__(self, **event) -> None:
        """Count a compilation, and call the listener that was there before."""
        if self.following is not None:
            self.following(**event)
        module = getattr(getattr(event["src"], "fn", None), "module", None) or ""
        if self.has_printed or event["cache_hit"] or not module.startswith("moe_runtime.kernels."):
            return
        self.seconds += event["times"].total / 1e6  # microseconds
        if self.seconds > SECONDS:
            self.has_printed = True
            if int(os.environ.get("RANK") or 0) == 0:
                print(
                    "moe_runtime: compiling kernels at their first launch. They are cached on disk; "
                    "moe_runtime.warmup(model) compiles them ahead, in parallel.",
                    file=sys.stderr, flush=True,
                )  # fmt: skip


def install() -> None:
    """Listen to Triton's compilations from now on; calling it again has no effect."""
    compilation = triton.knobs.compilation
    if not isinstance(compilation.listener, Listener):
        compilation.listener = Listener(compilation.listener)
