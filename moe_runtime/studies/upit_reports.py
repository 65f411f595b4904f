"""What a table of UpIT says: the losses by domain, what a token passes through, and where domains' tokens go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moe_runtime.significance import compare
from moe_runtime.studies import pictures, upit_routing
from moe_runtime.studies.domain_reports import DomainReport
from moe_runtime.studies.reports import Entry


@dataclass
class UpitReport(DomainReport):
    """A table of models that are judged on several domains, with the parameters that a token passes through."""

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        columns = super().columns()
        place = columns.index(("trained", "right"))
        return [*columns[:place], ("per token", "right"), *columns[place:]]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        *row, trained, seconds = super()._row(entry)
        return *row, f"{entry.results[0].active_parameters:,}", trained, seconds


def against(entries: Sequence[Entry], reference: str, names: Sequence[str]) -> list[str]:
    """Say how the methods `names` compare with another one than the table's reference."""
    found = {entry.name: [result.losses for result in entry.results] for entry in entries}
    tokens = entries[0].results[0].tokens
    return [f"{one}." for one in compare({name: found[name] for name in (reference, *names)}, reference, tokens)]


class Routing(NamedTuple):
    """Where the domains' tokens go, by method: a stage's result for every seed."""

    title: str
    source: str
    routed: Mapping[str, Sequence]

    def save(self, path: Path) -> None:
        """Write the picture."""
        pictures.save(upit_routing.picture(self, self.routed), path)

    def to_dict(self) -> dict:
        """Return, JSON-ready, each method's layers, and every seed's slots and distance between domains."""
        return {
            name: {
                "layers": results[0].layers,
                "slots": [result.counts for result in results],
                "distance_between_domains": [upit_routing.apart(result.counts) for result in results],
            }
            for name, results in self.routed.items()
        }

    def said(self) -> list[str]:
        """Say how far apart each method routes the domains; nothing of one domain alone."""
        lines = []
        if len(next(iter(self.routed.values()))[0].counts) < 2:
            return lines
        for name, found in self.to_dict().items():
            distances = found["distance_between_domains"]
            mean = sum(distances) / len(distances)
            lines.append(f"{name}: two domains' shares of the experts differ by {mean:.3f} (total variation, 0 to 1).")
        return lines
