"""torch.library.opcheck; its last part traces an op with fake tensors, which gives the same program
for every backend and takes most of the time.
"""

import torch

from tests.support.stress import STRESS

PARTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def opcheck(op, args: tuple, is_traced: bool = True) -> None:
    """Check an op; it is traced if `is_traced` is true, and always in `make stress`."""
    torch.library.opcheck(
        op,
        args,
        test_utils=PARTS if is_traced or STRESS else PARTS[:-1],
    )
