"""The fuser study's own pictures: losses by domain, the gate's weights, losses on the way."""

import statistics

from moe_runtime.studies.pictures import BLUE, COLOURS, GREY, OF_VERDICT, figure_of

DARK = 0.55  # of a map's range: beyond it numbers are white


def losses(report):
    """Draw the losses of every method and seed, a panel for each domain and one for all; the reference as a line."""
    tables = {**report.of_domains, "all domains": report}
    size = 3.4 + 2.6 * len(tables), 1.7 + 0.42 * len(report.entries)
    figure, all_axes = figure_of(report, size, columns=len(tables))
    for number, (axes, (name, table)) in enumerate(zip(all_axes, tables.items())):
        axes.axvline(table.entry(report.reference).loss, color=GREY, linestyle="--", linewidth=1.2, zorder=1)
        for y, entry in enumerate(table.entries[::-1]):
            one = table.comparison(entry.name)
            colour = BLUE if one is None else OF_VERDICT.get(one.verdict, GREY)
            axes.plot(entry.losses, [y] * len(entry.losses), "o", markerfacecolor="none", color=colour, alpha=0.7)
            axes.plot(entry.loss, y, "D", color=colour, markersize=6)
            axes.annotate(
                f"{entry.loss:.3f}", (entry.loss, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7
            )
        axes.set_yticks(range(len(table.entries)), [e.name for e in table.entries[::-1]] if not number else [])
        axes.set_ylim(-0.6, len(table.entries) - 0.3)
        axes.margins(x=0.12)
        axes.set_title(name, fontsize=10)
        axes.grid(axis="x", alpha=0.25)
    figure.supxlabel(
        "held-out loss per label token; diamonds: mean, rings: seeds; green: lower than the reference, orange: higher",
        fontsize=9,
    )
    return figure


def weights(report):
    """Draw the mean weight by domain and specialist, and the rows' own mean weights beside it (Figure 6)."""
    figure, (left, right) = figure_of(report, (10.4, 2.2 + 0.6 * len(report.domains)), columns=2)
    _map(figure, left, report)
    _of_rows(right, report)
    return figure


def _map(figure, axes, report) -> None:
    values = report.over_seeds()
    image = axes.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if value > DARK else "black")
    axes.set_yticks(range(len(values)), list(report.domains))
    axes.set_xticks(range(len(report.specialists)), report.specialists)
    axes.set_xlabel("specialist")
    figure.colorbar(image, ax=axes, label="mean weight")


def _of_rows(axes, report) -> None:
    """A box for the rows of each domain and specialist, first seed."""
    S, domains = len(report.specialists), list(report.domains)
    width = 0.8 / S
    for s, (name, colour) in enumerate(zip(report.specialists, _cycle(S))):
        places = [d + (s - (S - 1) / 2) * width for d in range(len(domains))]
        drawn = axes.boxplot(
            [[row[s] for row in rows] for rows in report.by_row[0]], positions=places, widths=0.85 * width,
            patch_artist=True, showfliers=False, manage_ticks=False, medianprops={"color": "black"},
        )  # fmt: skip
        for box in drawn["boxes"]:
            box.set(facecolor=colour, alpha=0.75)
        axes.plot([], [], "s", color=colour, label=name)
    axes.axhline(1 / S, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_xlim(-0.6, len(domains) - 0.4)
    axes.set(ylabel="mean weight of a row", ylim=(-0.02, 1.02))
    axes.grid(axis="y", alpha=0.25)
    axes.legend(title=f"specialist, seed {report.seeds[0]}", fontsize=8, title_fontsize=8, loc="center right")


def stability(report):
    """Draw the losses over the steps of stage 2, a panel for each domain and one for all, a line per seed."""
    figure, all_axes = figure_of(report, (3.0 * len(report.names) + 0.6, 3.6), columns=len(report.names))
    for axes, name in zip(all_axes, report.names):
        for (variant, ways), colour in zip(report.course.items(), COLOURS):
            lines = [[at[name] for _, at in way] for way in ways]
            steps = [step for step, _ in ways[0]]
            for line in lines:
                axes.plot(steps, line, color=colour, alpha=0.35, linewidth=0.8)
            mean = [statistics.fmean(at) for at in zip(*lines, strict=True)]
            axes.plot(steps, mean, color=colour, marker="o", markersize=3, label=variant)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step of stage 2")
        axes.grid(alpha=0.25)
    all_axes[0].set_ylabel("held-out loss per label token")
    all_axes[0].legend(fontsize=8)
    return figure


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
