"""Which specialist the gate weighs on which domain: UltraFuser's Table 6, Figure 6 and Figures 7 and 8.

    mean(t, s) = mean over the response tokens of domain t's held-out rows of w_s

Where every specialist still does what it was trained for, the largest weight on a domain is its own specialist's.
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from moe_runtime.config import check_positive
from moe_runtime.studies import fuser_html
from moe_runtime.studies.domain_results import places_of
from moe_runtime.studies.fuser_recipe import FuserRecipe
from moe_runtime.studies.fuser_stages import Stages
from moe_runtime.studies.reports import environment, finite

TEXTS = 3  # of each domain on the page
PROMPT = 160  # characters of a prompt that are shown


@dataclass
class GateWeights:
    """The gate's weights on the held-out rows of every domain."""

    command: str
    title: str
    source: str
    settings: dict
    seeds: tuple[int, ...]
    domains: dict[str, str | None]  # domain -> its specialist
    specialists: tuple[str, ...]
    tokens: dict[str, int]  # domain -> response tokens
    folders: list[str]  # of the fused models, one per seed
    mean: list  # [seeds][domains][S], over tokens
    by_row: list  # [seeds][domains][rows][S], means over a row's tokens
    page: Path
    summary: list[str] = field(default_factory=list)

    def over_seeds(self) -> list[list[float]]:
        """Return [domains][S], the mean over the seeds."""
        return [[statistics.fmean(cell) for cell in zip(*rows, strict=True)] for rows in zip(*self.mean, strict=True)]

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        return [("domain", "left"), ("tokens", "right"), *((name, "right") for name in self.specialists)]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        of_seeds = zip(self.domains, zip(*self.mean, strict=True), strict=True)
        return [
            (domain, f"{self.tokens[domain]:,}", *(_spread(cell) for cell in zip(*seeds, strict=True)))
            for domain, seeds in of_seeds
        ]

    def legend(self) -> str:
        """Return what the table's numbers are, in a line."""
        over = f"mean ± sd over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"
        return f"Mean weight of each specialist over the response tokens of held-out rows; {over}; a row sums to 1."

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        names = (
            "command", "title", "source", "settings", "seeds", "domains", "specialists", "tokens", "folders", "mean", "by_row",
            "page", "summary",
        )  # fmt: skip
        return finite({name: getattr(self, name) for name in names} | {"environment": environment()})


def check(recipe: FuserRecipe, rows: int | None = None) -> dict:
    """Return the options of `measure`; raises ValueError for a number of rows below 1."""
    if rows is not None:
        check_positive("rows", rows)
    return {"rows": rows}


def measure(process, rows: int | None) -> dict:
    """Take the weights of the fused model of each seed, on `rows` held-out rows of each domain, or all."""
    recipe, folders, mean, by_row = process.recipe, [], [], []
    first: Stages = process.all[0]
    places = {domain: list(range(place.start, place.stop))[:rows] for domain, place in places_of(first.counts).items()}
    for number, stages in enumerate(process.all):
        fused = stages.fused()
        process.say(f"seed {process.seeds[number]}: the gate's weights of {fused.folder.parent.name}")
        found = stages.weights(fused)
        own = {domain: [found[place] for place in chosen] for domain, chosen in places.items()}
        mean.append([_mean([token for row in one for token in row]) for one in own.values()])
        by_row.append([[_mean(row) for row in one] for one in own.values()])
        folders.append("/".join(fused.folder.parts[-2:]))
        if number == 0:
            tokens = {domain: sum(map(len, one)) for domain, one in own.items()}
            page = process.out / "weights.html"
            if process.is_main:
                _write_page(page, first, {domain: chosen[:TEXTS] for domain, chosen in places.items()}, found)
    specialists = {recipe.domain_of(name): name for name in recipe.specialists}
    return {
        "domains": {domain: specialists.get(domain) for domain in places}, "specialists": first.names, "tokens": tokens,
        "folders": folders, "mean": mean, "by_row": by_row, "page": page, "summary": _summary,
    }  # fmt: skip


def _write_page(path: Path, stages: Stages, places: dict[str, list[int]], weights: list) -> None:
    rows, tokenizer, texts = stages.part("held_out"), stages.encoder.tokenizer, {}
    for domain, chosen in places.items():
        texts[domain] = []
        for place in chosen:
            row = rows[place]
            prompt = " ".join(tokenizer.decode(row["prompt_ids"][0], skip_special_tokens=True).split())
            pieces = fuser_html.pieces_of(tokenizer, row["response_ids"])
            prompt = prompt if len(prompt) <= PROMPT else f"{prompt[:PROMPT]}..."
            texts[domain].append(fuser_html.TokenWeights(prompt=prompt, pieces=pieces, weights=weights[place]))
    path.parent.mkdir(parents=True, exist_ok=True)
    fuser_html.write_page(path, stages.names, texts, note="Held-out rows, their given responses.")


def _mean(weights: list[list[float]]) -> list[float]:
    return [statistics.fmean(of) for of in zip(*weights, strict=True)]


def _spread(values: list[float]) -> str:
    sd = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{sd}"


def _summary(report: GateWeights) -> list[str]:
    lines = []
    for number, ((domain, own), weights) in enumerate(zip(report.domains.items(), report.over_seeds(), strict=True)):
        top = report.specialists[max(range(len(weights)), key=weights.__getitem__)]
        said = f"{domain}: the largest weight is {top}'s, {max(weights):.3f}"
        if own is not None and own != top:
            said += f"; its own specialist {own} has {weights[report.specialists.index(own)]:.3f}"
        if own is not None:
            of = report.specialists.index(own)
            rows = [row for seed in report.by_row for row in seed[number]]
            most = sum(max(range(len(row)), key=row.__getitem__) == of for row in rows)
            said += f"; {own} leads on {most} of {len(rows)} rows"
        lines.append(f"{said}.")
    return [*lines, f"coloured tokens: {report.page}"]
