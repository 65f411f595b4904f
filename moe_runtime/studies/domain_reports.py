"""What a table of models that are judged by domain says: the losses of each beside those of all, each column's comparisons."""

import math
import statistics
from dataclasses import asdict, dataclass
from functools import cached_property

from moe_runtime.significance import LEVEL, signed
from moe_runtime.studies.domain_results import of_domain
from moe_runtime.studies.reports import Entry, Report, difference_of, finite, p_of

MARKS = {"lower": "-", "higher": "+"}  # of a domain's loss that the test found lower or higher than the reference's


@dataclass
class DomainReport(Report):
    """A table of models that are judged on several domains; its own losses are over the held-out rows of all."""

    label = "held-out loss per label token, all domains (lower is better)"

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains' names."""
        return tuple(self.entries[0].results[0].rows)

    @cached_property
    def of_domains(self) -> dict[str, Report]:
        """The same table on each domain's rows alone."""
        names = ("command", "title", "source", "settings", "seeds", "reference")
        shared = {name: getattr(self, name) for name in names}
        return {
            domain: Report(entries=[_entry_of(entry, domain) for entry in self.entries], **shared)
            for domain in self.domains
        }

    def domain_loss(self, name: str, domain: str) -> float:
        """Return a method's loss on one domain, the mean over the seeds."""
        return self.of_domains[domain].entry(name).loss

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        values = super().to_dict()
        for method, entry in zip(values["methods"], self.entries, strict=True):
            method["domains"] = {domain: self.domain_loss(entry.name, domain) for domain in self.domains}
            for seed, result in zip(method["seeds"], entry.results, strict=True):
                seed["domains"] = result.domains
        compared = {domain: [asdict(one) for one in table.comparisons] for domain, table in self.of_domains.items()}
        return finite(values | {"rows": self.entries[0].results[0].rows, "comparisons_of_domains": compared})

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        names = (*self.domains, "all", f"vs {self.reference}", "p")
        costs = ("parameters", "trained", "train s")
        right = [(name, "right") for name in names]
        return [("method", "left"), *right, ("verdict", "left"), *((name, "right") for name in costs)]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        one, first = self.comparison(entry.name), entry.results[0]
        compared = ("", "", "reference") if one is None else (difference_of(one), p_of(one.p_corrected), one.verdict)
        trained = statistics.fmean(result.trained_parameters for result in entry.results)
        costs = f"{trained:,.0f}" if trained else "", f"{entry.seconds:,.0f}" if entry.seconds else ""
        return (
            entry.name,
            *(self._cell(entry.name, domain) for domain in self.domains),
            _mean_sd(entry),
            *compared,
            f"{first.parameters:,}",
            *costs,
        )

    def _cell(self, name: str, domain: str) -> str:
        one = self.of_domains[domain].comparison(name)
        mark = "" if one is None else MARKS.get(one.verdict, "")
        return f"{self.domain_loss(name, domain):.4f}{mark}"

    def legend(self) -> str:
        """Return what the table's numbers are, in lines."""
        first = self.entries[0].results[0]
        over = f"mean ± sd over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"
        rows = ", ".join(f"{count} of {domain}" for domain, count in first.rows.items())
        return (
            f"held-out rows: {rows}; {sum(first.tokens):,} label tokens, over which `all` is the mean; {over}.\n"
            f"vs {self.reference}: difference of the losses with its {1 - LEVEL:.0%} interval; p: Wilcoxon over the rows, "
            f"corrected by Holm for the {len(self.comparisons)} comparisons of a column; - and + at a domain's loss: lower and "
            f"higher than {self.reference}'s by the same test.\ntrain s: all stages after the base."
        )


def said(one) -> str:
    """Say a comparison with its difference, for a line of several."""
    return f"{one.name} {signed(one.difference)} ({one.verdict})"


def _entry_of(entry: Entry, domain: str) -> Entry:
    return Entry(entry.name, [of_domain(result, domain) for result in entry.results])


def _mean_sd(entry: Entry) -> str:
    return f"{entry.loss:.4f}" + ("" if math.isnan(entry.sd) else f" ± {entry.sd:.4f}")
