"""Helpers that read a report, for the tests of all tables."""


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
