"""Backend "cuda" on CPU tensors, its kernels compiled by g++: torch's rules for custom ops, and no
graph breaks.
"""

import pytest

from tests.csrc import emulator
from tests.ops import test_every_op as every_op

pytestmark = [emulator.needs_cxx, pytest.mark.usefixtures("emulated")]
NAMES = pytest.mark.parametrize("name", ["route", "dispatch", "combine", "merge_experts"])


@NAMES
def test_torchs_rules_for_ops(name):
    every_op.test_torchs_rules_for_ops(name, "cuda", "cpu")


@NAMES
def test_compiles_without_a_graph_break(name):
    every_op.test_compiles_without_a_graph_break(name, "cuda", "cpu")
