"""The gate's weights by domain and specialist: UltraFuser's Table 6, and its pictures.

    mean(t, s) = mean over the response tokens of domain t's held-out rows of w_s

If every specialist has kept its skill, the largest weight on a domain is that of its own
specialist.
"""

import itertools
import statistics
from dataclasses import dataclass

from moe_runtime.config import check_positive
from papers.engine import plots
from papers.engine.domains import places_of
from papers.engine.plots import cycle, figure_of, legend_below
from papers.engine.tables import Finding, columns_of, over_seeds, spread
from papers.ultrafuser.recipe import FuserRecipe
from papers.ultrafuser.study import UltrafuserStages


def losses(report):
    """Draw the losses of every method and seed, a panel for each domain and one for all; the
    reference as a line.
    """
    tables = {**report.of_domains, "all domains": report}
    size = 3.4 + 2.6 * len(tables), 1.7 + 0.42 * len(report.entries)
    figure, all_axes = figure_of(report, size, columns=len(tables))
    for axes, (name, table) in zip(all_axes, tables.items()):
        plots.dots_in(
            axes,
            table,
            lambda entry: f"{entry.loss:.3f}",
        )
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelleft=axes is all_axes[0])
    meant = (
        f"diamonds: mean; rings: seeds; dashed: {report.reference}; green: lower; orange: higher"
    )
    figure.supxlabel(f"held-out loss per label token; {meant}", fontsize=9)
    return figure


def weights(report):
    """Draw the mean weight by domain and specialist, and the rows' own mean weights beside it
    (Figure 6).
    """
    figure, (left, right) = figure_of(
        report,
        (10.4, 2.2 + 0.6 * len(report.domains)),
        columns=2,
    )
    _map(left, report)
    _of_rows(right, report)
    return figure


def _map(axes, report) -> None:
    label = "mean weight"
    if len(report.seeds) > 1:
        label += f" over {len(report.seeds)} seeds"
    means = report.over_seeds()
    domains = list(report.domains)
    plots.heat_map(
        axes,
        means,
        domains,
        report.specialists,
        label,
        top=1,
        form="{:.2f}",
    )
    axes.set(xlabel="specialist", ylabel="domain")


def _of_rows(axes, report) -> None:
    """Draw a box for the rows of each domain and specialist, first seed."""
    S = len(report.specialists)
    domains = list(report.domains)
    width = 0.8 / S
    for s, (name, (colour, _)) in enumerate(zip(report.specialists, cycle(S), strict=True)):
        offset = (s - (S - 1) / 2) * width
        drawn = axes.boxplot(
            [[row[s] for row in rows] for rows in report.by_row[0]],
            positions=[d + offset for d in range(len(domains))],
            widths=0.85 * width,
            patch_artist=True,
            showfliers=False,
            manage_ticks=False,
            medianprops={"color": "black"},
        )
        for box in drawn["boxes"]:
            box.set(facecolor=colour, alpha=0.75)
        axes.plot(
            [],
            [],
            "s",
            color=colour,
            label=name,
        )
    axes.axhline(
        1 / S,
        color="black",
        linestyle="--",
        linewidth=1,
    )
    axes.set_xticks(range(len(domains)), domains)
    axes.set_xlim(-0.6, len(domains) - 0.4)
    axes.set(
        xlabel="domain",
        ylabel="mean weight of an example",
        ylim=(-0.02, 1.02),
    )
    axes.grid(axis="y")
    about = f"right: specialist, seed {report.seeds[0]}; dashed: equal weights"
    legend_below(axes.figure, axes, about, S)


@dataclass(kw_only=True)
class GateWeights(Finding):
    """The gate's weights on the held-out rows of every domain."""

    domains: dict[str, str | None]  # domain -> its specialist
    specialists: tuple[str, ...]
    tokens: dict[str, int]  # domain -> response tokens
    folders: list[str]  # the fused models', one per seed
    mean: list  # [seeds][domains][S], over tokens
    by_row: list  # [seeds][domains][rows][S], means over a row's tokens

    def over_seeds(self) -> list[list[float]]:
        """Return [domains][S], the mean over the seeds."""
        return [*map(_mean, zip(*self.mean, strict=True))]

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        return columns_of("domain", "tokens", *self.specialists)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        rows = []
        for domain, *seeds in zip(self.domains, *self.mean, strict=True):
            cells = map(spread, zip(*seeds, strict=True))
            rows.append((domain, f"{self.tokens[domain]:,}", *cells))
        return rows

    def legend(self) -> str:
        """Return what the table's numbers are, in a line."""
        over = over_seeds(self.seeds)
        return (
            f"Mean weight of each specialist over the response tokens of held-out rows; {over}; a "
            "row sums to 1."
        )


def check(recipe: FuserRecipe, rows: int | None = None) -> dict:
    """Return the options of `measure`; raises ValueError for a number of rows below 1."""
    if rows is not None:
        check_positive("rows", rows)
    return {"rows": rows}


def measure(process, rows: int | None) -> dict:
    """Compute the gate's weights of each seed's fused model on `rows` held-out rows per domain, by
    default all.
    """
    recipe = process.recipe
    first: UltrafuserStages = process.all[0]
    places = places_of(first.counts)
    folders = []
    means = []
    by_row = []
    tokens = {}
    for seed, stages in zip(process.seeds, process.all, strict=True):
        fused = stages.fused()
        process.say(f"seed {seed}: the gate's weights of {fused.folder.parent.name}")
        weights = stages.weights(fused)
        means.append([])
        by_row.append([])
        for domain, span in places.items():
            of_domain = weights[span][:rows]
            all_tokens = list(itertools.chain(*of_domain))
            tokens[domain] = len(all_tokens)
            means[-1].append(_mean(all_tokens))
            by_row[-1].append([*map(_mean, of_domain)])
        folders.append("/".join(fused.folder.parts[-2:]))
    specialists = {recipe.domain_of(name): name for name in recipe.specialists}
    return {
        "domains": {domain: specialists.get(domain) for domain in places},
        "specialists": first.names,
        "tokens": tokens,
        "folders": folders,
        "mean": means,
        "by_row": by_row,
        "summary": _summary,
    }


def _mean(weights: list[list[float]]) -> list[float]:
    return [statistics.fmean(of) for of in zip(*weights, strict=True)]


def _summary(report: GateWeights) -> list[str]:
    lines = []
    for domain, specialist, weights, *seeds in zip(
        report.domains,
        report.domains.values(),
        report.over_seeds(),
        *report.by_row,
        strict=True,
    ):
        top = report.specialists[weights.index(max(weights))]
        sentence = f"{domain}: the largest weight is {top}'s, {max(weights):.3f}"
        if specialist is not None:
            s = report.specialists.index(specialist)
            if specialist != top:
                sentence += f"; its own specialist {specialist} has {weights[s]:.3f}"
            rows = [*itertools.chain(*seeds)]
            most = sum(row.index(max(row)) == s for row in rows)
            sentence += f"; {specialist} leads on {most} of {len(rows)} rows"
        lines.append(f"{sentence}.")
    return lines
