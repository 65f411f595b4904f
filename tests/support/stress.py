"""How much of a long check runs: a share in `make test`, all of it in `make stress`, which sets
MOE_STRESS=1.
"""

import os

STRESS: bool = os.environ.get("MOE_STRESS") == "1"


def scaled(few: int, many: int) -> int:
    """Return `few` in `make test`, `many` in `make stress`."""
    return many if STRESS else few


def share(names: list, begin: int, of: int = 3) -> list:
    """Return every third of `names`, starting with index `begin`, in `make test`, and all of them
    in `make stress`.
    """
    return list(names) if STRESS else list(names)[begin::of]
