"""Fixtures of tests/papers that these tests use too."""

from tests.papers.conftest import out, quick

__all__ = ["out", "quick"]
