"""Names of compiled kernels, and a message when compilation takes long."""

import os
import re
import sys
from collections.abc import Callable

import triton

SECONDS = 2.0  # of compilation before the message is printed


def named(kernel: str, *constants: str) -> Callable:
    """Return a kernel's `repr`: its name in profilers, such as up_fwd_bf16_silu_gated_128x128x64.

    The name contains the type of the first operand and the values of these constants; of a tuple,
    only those that are not None, 0 or False.
    """

    def name(specialization) -> str:
        operands = re.findall(r"(?:\*|tensordesc<)(\w+)", str([*specialization.signature.values()]))
        words = [kernel, *operands[:1]]
        for constant in constants:
            value = specialization.constants[constant]
            if not hasattr(value, "_fields"):
                words.append(f"{constant}{value}")
                continue
            numbers = [v for v in value if type(v) in (int, float) and v]
            words.append("x".join(map(str, numbers)))
            words += [v for v in value if isinstance(v, str)]
            words += [field for field, v in value._asdict().items() if v is True]
        return re.sub(r"\W+", "_", "_".join(filter(None, words))).lower()

    return name


class Listener:
    """Listens to Triton's compilations: sums our kernels' time, prints one line per process."""

    def __init__(self, following):
        self.following, self.seconds, self.has_printed = following, 0.0, False

    def __call__(self, **event) -> None:
        """Count a compilation, after calling the previously installed listener."""
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
                    "moe_runtime: compiling kernels at their first launch. They are cached on "
                    "disk; moe_runtime.warmup(model) compiles them ahead, in parallel.",
                    file=sys.stderr,
                    flush=True,
                )


def install() -> None:
    """Install the listener; calling this again has no effect."""
    compilation = triton.knobs.compilation
    if not isinstance(compilation.listener, Listener):
        compilation.listener = Listener(compilation.listener)
