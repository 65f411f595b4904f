"""Helpers that make and read a report, for the tests of all tables."""

from papers.engine.compare import compare
from tests.support.dist_launch import times


def made_by(run, command, recipe, out, **options) -> tuple:
    """Return a command's report, of one seed unless `options` say otherwise, and what it said."""
    messages = []
    options = {"seeds": 1} | options
    return run(command, recipe, out, say=messages.append, **options), messages


def assert_made_once(make, report, recipe, out) -> None:
    """Assert that the same command reads all stages and makes the same report."""
    written = times(out)
    again, lines = make(report.command, recipe, out)
    assert times(out) == written
    assert again.rows() == report.rows()
    assert again.summary == report.summary
    assert "steps in" not in "\n".join(lines)


def assert_compared(report) -> None:
    """Assert that the comparisons are those of the results' losses."""
    losses = {}
    for entry in report.entries:
        losses[entry.name] = [result.losses for result in entry.results]
    tokens = report.entries[0].results[0].tokens
    assert report.comparisons == compare(losses, report.reference, tokens)


def entries_of(report) -> list[str]:
    """Return the names of the methods."""
    return [entry.name for entry in report.entries]


def columns_of(report) -> list[str]:
    """Return the names of the columns; every row has a cell for each."""
    names = [name for name, _ in report.columns()]
    for row in report.rows():
        assert len(row) == len(names)
    return names


def rows_of(report) -> dict[str, tuple]:
    """Return the rows of the table by their first cells."""
    columns_of(report)
    return {row[0].removesuffix(" ≠"): row for row in report.rows()}
