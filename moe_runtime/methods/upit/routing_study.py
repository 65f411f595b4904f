"""Which experts the tokens of each domain go to, UpIT's Figure 5: counts, how far apart domains are, and the picture.

share_e(domain) = slots of expert e / slots of all experts          per layer; 1 / E where nothing is preferred
distance(a, b)  = 1/2 sum_e |share_e(a) - share_e(b)|               total variation, mean over the layers, 0 to 1
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence

import torch

from moe_runtime.experiments.plots import COLOURS, GREY, figure_of
from moe_runtime.hf.dropin.stats import collect_router_stats, expert_load

BATCH = 16
LAYERS = 4  # drawn at most, evenly spaced with the first and the last


def count(model, tokenizer, rows: Mapping) -> tuple[dict[str, list], list[str]]:
    """Return the slots [L][E] of each domain's tokenized rows, and the layers' names."""
    counts, layers = {}, []
    for domain, of_domain in rows.items():
        stats = collect_router_stats(model, _batches(tokenizer, of_domain["input_ids"], model.device))
        counts[domain], layers = [row.tolist() for row in stats.routed], list(stats.layers)
    return counts, layers


def _batches(tokenizer, rows: Sequence[list[int]], device):
    for i in range(0, len(rows), BATCH):
        batch = tokenizer.pad({"input_ids": rows[i : i + BATCH]}, return_tensors="pt")
        yield {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def shares(counts: Mapping[str, list]) -> dict[str, torch.Tensor]:
    """Return the share [L, E] float64 of each domain's slots."""
    return {domain: expert_load(torch.tensor(rows)) for domain, rows in counts.items()}


def apart(counts: Mapping[str, list]) -> float:
    """Return the mean distance between two domains; 0 where all are routed alike, or there is one alone."""
    pairs = itertools.combinations(shares(counts).values(), 2)
    distances = [(a - b).abs().sum(-1).mean().item() / 2 for a, b in pairs]
    return statistics.fmean(distances) if distances else 0.0


def picture(report, routed: Mapping[str, Sequence]):
    """Draw each method's shares by domain, a row per method, a column per layer; means over the seeds.

    `routed` holds a stage's result for every seed. Methods may have different numbers of experts.
    """
    columns = [_spaced(len(results[0].layers)) for results in routed.values()]
    rows, widest = len(routed), max(map(len, columns))
    figure, axes = figure_of(
        report, (2.2 + 2.9 * widest, 1.4 + 2.0 * rows), rows=rows, columns=widest, sharex=False, squeeze=False
    )
    for row, (name, results), layers in zip(axes, routed.items(), columns, strict=True):
        for axis, layer in zip(row, layers):
            _bars(axis, results, layer)
            axis.set_title(f"{name}, layer {results[0].layers[layer]}", fontsize=9)
        row[0].set_ylabel("share of tokens", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("expert", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    return figure


def _bars(axes, results: Sequence, layer: int) -> None:
    """Draw one layer: a group of bars per expert, a bar per domain, the balanced share as a line."""
    by_seed = [shares(result.counts) for result in results]
    domains, E = list(by_seed[0]), len(by_seed[0][next(iter(by_seed[0]))][layer])
    width = 0.8 / len(domains)
    for i, (domain, colour) in enumerate(zip(domains, itertools.cycle(COLOURS))):
        means = torch.stack([found[domain][layer] for found in by_seed]).mean(0).tolist()
        axes.bar([e + (i - (len(domains) - 1) / 2) * width for e in range(E)], means, width, color=colour, label=domain)
    axes.axhline(1 / E, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(E))
    axes.tick_params(labelsize=8)


def _spaced(layers: int) -> list[int]:
    """Return at most LAYERS of so many places, evenly spaced, the first and the last among them."""
    if layers <= LAYERS:
        return list(range(layers))
    return [round(i * (layers - 1) / (LAYERS - 1)) for i in range(LAYERS)]
