"""Nested @triton.jit calls patch triton.language anew on every call; this patches it once per launch and module."""

from triton.runtime import interpreter


class _Patched:
    def restore(self):
        pass


def install() -> None:
    """Patch Triton's interpreter in this process, once."""
    if getattr(interpreter, "_moe_fast", False):
        return
    interpreter._moe_fast = True
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    seen = None  # modules patched in the launch that runs; None between launches

    def patch_once(fn):
        key = id(fn.__globals__)
        if seen is not None:
            if key in seen:
                return _Patched()
            seen.add(key)
        return patch(fn)

    def launch_once(self, *args, **kwargs):
        nonlocal seen
        outer, seen = seen, set()
        try:
            return launch(self, *args, **kwargs)
        finally:
            seen = outer

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_once
