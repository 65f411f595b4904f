"""Values that tests in several folders share."""

import sys

import pytest

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
# distances between experts, in elements, around the largest that int32 holds
BEYOND_INT32 = pytest.mark.parametrize(
    "stride", [2**31 - 1, 2**31, 2**31 + 1], ids=["-1", "2^31", "+1"]
)
