"""Replace methods of other packages."""

import functools
from collections.abc import Callable


def replace_once(owner: type, name: str, replacement: Callable) -> None:
    """Make the method `name` of a class call `replacement(stock, self, ...)`; calling it again has
    no effect.
    """
    stock = getattr(owner, name)
    if hasattr(stock, "moe_runtime_stock"):
        return

    @functools.wraps(stock)
    def method(self, *args, **kwargs):
        return replacement(stock, self, *args, **kwargs)

    method.moe_runtime_stock = stock
    setattr(owner, name, method)
