"""Evaluation by domain: losses are ordered by domain, and tables show each domain and all together.

Also which experts each domain's tokens go to (UpIT, Figure 5): counts, distances between domains,
and the picture.

share_e(domain) = slots of expert e / slots of all experts    per layer; 1 / E without a preference
distance(a, b)  = 1/2 sum_e |share_e(a) - share_e(b)|         total variation, mean over layers
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.hf.dropin.stats import collect_router_stats, expert_load
from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.io import rows as data
from moe_runtime.io.files import hash_of
from papers.engine import stages
from papers.engine.compare import LEVEL
from papers.engine.corpora import SOURCES, domains_key
from papers.engine.plots import INK, grouped, legend_below, new_figure
from papers.engine.stages import KeptStages, contents_of, course_of, loss_of, sizes_of
from papers.engine.tables import MARKS, Entry, Report, columns_of, compared, finite, over_seeds


class Judged(NamedTuple):
    """A model, single or fused, evaluated on the held-out examples of every domain."""

    name: str
    folder: Path  # of the stage's model
    loss: float  # mean over the label tokens of all held-out examples
    losses: list[float]  # mean of each held-out example, ordered by domain
    tokens: list[int]
    rows: dict[str, int]  # domain -> number of held-out examples
    steps: int
    seconds: float
    total_seconds: float  # including previous stages, except for the base
    parameters: int
    active_parameters: int  # used per token
    history: list  # (step, held-out loss); of an UltraFuser specialist the loss on its own domain
    steps_per_second: float
    trained_parameters: int = 0
    optimizer_bytes: int = 0
    source: str = ""  # where the model is loaded from: `folder`, or the path of a given specialist
    exact: list | None = None  # per held-out example: 1 if greedy decoding gives its label, else 0

    @property
    def domains(self) -> dict[str, float]:
        """The loss of each domain."""
        return by_domain(self.losses, self.tokens, self.rows)


def by_domain(
    losses: Sequence[float], tokens: Sequence[int], rows: Mapping[str, int]
) -> dict[str, float]:
    """Return each domain's mean loss per label token, for examples ordered by domain."""
    return {
        domain: trainers.mean_loss(losses[span], tokens[span])
        for domain, span in places_of(rows).items()
    }


def places_of(rows: Mapping[str, int]) -> dict[str, slice]:
    """Return the slice of each domain's examples."""
    places = {}
    start = 0
    for domain, count in rows.items():
        places[domain] = slice(start, start + count)
        start += count
    return places


def of_domain(result, domain: str):
    """Return a result restricted to the examples of one domain."""
    span = places_of(result.rows)[domain]
    losses = result.losses[span]
    tokens = result.tokens[span]
    exact = result.exact and result.exact[span]
    return result._replace(
        rows={domain: len(losses)},
        history=[],
        **loss_of(losses, tokens, exact),
    )


@dataclass(kw_only=True)
class DomainReport(Report):
    """A table of models evaluated on several domains; its own losses are over all held-out
    examples.
    """

    label = "held-out loss per label token, all domains (lower is better)"

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains' names."""
        return tuple(self.entries[0].results[0].rows)

    @cached_property
    def of_domains(self) -> dict[str, Report]:
        """Return the same table for each domain."""
        names = ("command", "title", "source", "settings", "seeds", "reference")
        shared = {name: getattr(self, name) for name in names}
        tables = {}
        for domain in self.domains:
            entries = []
            for entry in self.entries:
                results = [of_domain(result, domain) for result in entry.results]
                entries.append(Entry(entry.name, results))
            tables[domain] = Report(entries=entries, **shared)
        return tables

    @property
    def solved(self) -> tuple[str, ...]:
        """The domains with at least one exact match by any model; only these have a column of exact
        matches.
        """
        return tuple(domain for domain, table in self.of_domains.items() if table.is_solved)

    def domain_loss(self, name: str, domain: str) -> float:
        """Return a method's loss on one domain, the mean over the seeds."""
        return self.of_domains[domain].entry(name).loss

    def to_dict(self) -> dict:
        """Return the report as JSON-ready values."""
        values = super().to_dict()
        values["rows"] = self.entries[0].results[0].rows
        for method, entry in zip(values["methods"], self.entries, strict=True):
            method["domains"] = {}
            method["exact_of_domains"] = {}
            for domain, table in self.of_domains.items():
                method["domains"][domain] = table.entry(entry.name).loss
                method["exact_of_domains"][domain] = table.entry(entry.name).exact
            for seed, result in zip(method["seeds"], entry.results, strict=True):
                seed["domains"] = by_domain(result.losses, result.tokens, result.rows)
        for name in ("comparisons", "exact_comparisons"):
            values[f"{name}_of_domains"] = {
                domain: [*map(asdict, getattr(table, name))]
                for domain, table in self.of_domains.items()
            }
        return finite(values)

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and their alignment."""
        exact = map("exact {}".format, self.solved)
        columns = columns_of("method", *self.domains, *exact, "all", f"vs {self.reference}", "p")
        columns.append(("verdict", "left"))
        return [*columns, ("parameters", "right"), ("trained", "right"), ("train s", "right")]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        trained = statistics.fmean(result.trained_parameters for result in entry.results)
        return (
            entry.name,
            *(self._cell(entry.name, domain) for domain in self.domains),
            *(self.of_domains[domain].exact_cell(entry.name) for domain in self.solved),
            entry.mean_sd(),
            *compared(self.comparison(entry.name)),
            f"{entry.results[0].parameters:,}",
            f"{trained:,.0f}" if trained else "",
            f"{entry.seconds:,.0f}" if entry.seconds else "",
        )

    def _cell(self, name: str, domain: str) -> str:
        one = self.of_domains[domain].comparison(name)
        mark = "" if one is None else MARKS.get(one.verdict, "")
        return f"{self.domain_loss(name, domain):.4f}{mark}"

    def legend(self) -> str:
        """Return lines that explain the table's numbers."""
        first = self.entries[0].results[0]
        rows = ", ".join(f"{count} of {domain}" for domain, count in first.rows.items())
        return (
            f"held-out rows: {rows}; {sum(first.tokens):,} label tokens, over which `all` is the "
            f"mean; {over_seeds(self.seeds)}.\n"
            f"vs {self.reference}: difference of the losses with its {1 - LEVEL:.0%} interval; p: "
            f"Wilcoxon; both over the rows; p corrected by Holm for the {len(self.comparisons)} "
            "comparisons of a column; - and + at a domain's loss: lower and higher than "
            f"{self.reference}'s by the same test.\n"
            "train s: all stages after the base."
            + self.exact_legend([domain for domain in self.domains if domain not in self.solved])
        )


class Routed(NamedTuple):
    """The experts that the tokens of each domain are routed to."""

    name: str
    folder: Path
    counts: dict  # domain -> [L][E] slots
    layers: list[str]
    total_seconds: float


class DomainStages(KeptStages):
    """The stages of a recipe with `domains`: trained on all together, evaluated on each; examples
    are ordered by domain.
    """

    result = Judged

    @property
    def train_rows(self):
        """The tokenized training examples of all domains."""
        return self._joined("train")

    @property
    def held_out(self):
        """The tokenized evaluation examples; the same for every stage and seed."""
        return self._joined("held_out")

    def _joined(self, part: str):
        parts = [self.part(f"{domain}-{part}") for domain in self.recipe.domains]
        return data.require("datasets").concatenate_datasets(parts)

    @property
    def counts(self) -> dict[str, int]:
        """The number of held-out rows of each domain."""
        return {domain: len(self.part(f"{domain}-held_out")) for domain in self.recipe.domains}

    def routed(self, moe: Judged) -> Routed:
        """Return the routing of the tokens of each domain's held-out examples."""

        def make(tmp: Path, checkpoints: Path) -> dict:
            rows = {domain: self.part(f"{domain}-held_out") for domain in self.recipe.domains}
            counted = None
            with ranks.leading() as main:
                if main:
                    counted = count(
                        self._load(moe.folder),
                        self.tokenizer,
                        rows,
                    )
            counts, layers = ranks.agree(counted)
            return {"counts": counts, "layers": layers}

        return self._stage(
            "routed",
            f"routing of {moe.name}",
            {},
            [moe],
            make,
            result=Routed,
        )

    def _numbers(self, model, trained: trainers.TrainingResult, load: Callable) -> dict:
        """Return a training's result; if saving rounded the weights, the model returned by `load`
        is evaluated instead.
        """
        course = course_of(trained) | {"optimizer_bytes": trained.optimizer_bytes}
        if self._is_saved_as_trained(model):
            return (
                course
                | {"rows": self.counts}
                | loss_of(trained.losses, trained.tokens, trained.exact)
                | sizes_of(model)
            )
        del model, trained
        return course | self._judge(load)

    def _judge(self, load: Callable) -> dict:
        """Return the held-out losses of the model of `load`; the processes share the examples."""
        ranks.free_memory()
        model = load()
        training = self.judging
        batch, _ = trainers.split_batch(training.batch_size, training.per_device_batch_size)
        losses = trainers.row_losses(
            model,
            self.held_out,
            self.tokenizer,
            batch_size=batch,
            bf16=training.bf16,
        )
        return {"rows": self.counts} | loss_of(*losses) | sizes_of(model)

    def _documents(self) -> list[str]:
        return stages.domain_documents(self.recipe.pretrain, self._sources())

    def _sources(self) -> list[str]:
        return [source for d in self.recipe.domains.values() for source in d.sources]

    def data_key(self) -> str:
        """Return a hash of the base, every domain's rows, and the versions of what built-in domains
        are made from.
        """
        r = self.recipe
        built_in = domains_key()
        rows = []
        for source in self._sources():
            rows.append(built_in if source in SOURCES else contents_of(source))
        base = [built_in, r.pretrain.to_dict()] if r.pretrain else contents_of(r.base_model)
        key = {
            "format": self.FORMAT,
            "domains": self._domains(),
            "length": r.max_length,
        }
        return hash_of(key | {"base": base, "rows": rows})

    def _domains(self) -> dict[str, dict]:
        return {name: domain.to_dict() for name, domain in self.recipe.domains.items()}

    def make_data(self, folder: Path) -> dict:
        """Write the tokenizer, and each domain's training and evaluation examples."""
        r = self.recipe
        tokenizer = self._base_tokenizer(self._documents)
        names = ", ".join(f"{name}: {domain}" for name, domain in r.domains.items())
        self.say(f"reading and tokenizing {names}")
        counts = {}
        for part, rows in stages.tokenized_domains(tokenizer, r.domains, r.max_length).items():
            data.save_rows(rows, folder / part)
            counts[part] = len(rows)
        tokenizer.save_pretrained(folder / "tokenizer")
        listed = ", ".join(
            f"{counts[f'{n}-train']:,} of {n} ({counts[f'{n}-held_out']:,} held out)"
            for n in r.domains
        )
        self.say(f"rows to tune on: {listed}")
        return {"rows": counts, "domains": self._domains()}


BATCH = 16
LAYERS = 4  # maximum number of plotted layers, evenly spaced from the first to the last


def count(model, tokenizer, rows: Mapping) -> tuple[dict[str, list], list[str]]:
    """Return the slots [L][E] of each domain's tokenized rows, and the layers' names."""
    counts = {}
    layers = []
    for domain, examples in rows.items():
        batches = _batches(tokenizer, examples["input_ids"], model.device)
        stats = collect_router_stats(model, batches)
        counts[domain] = [row.tolist() for row in stats.routed]
        layers = list(stats.layers)
    return counts, layers


def _batches(tokenizer, rows: Sequence[list[int]], device):
    for i in range(0, len(rows), BATCH):
        batch = tokenizer.pad({"input_ids": rows[i : i + BATCH]}, return_tensors="pt")
        yield {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def shares(counts: Mapping[str, list]) -> dict[str, torch.Tensor]:
    """Return the share [L, E] float64 of each domain's slots."""
    return {domain: expert_load(torch.tensor(rows)) for domain, rows in counts.items()}


def mean_distance(counts: Mapping[str, list]) -> float:
    """Return the mean distance between two domains; 0 if all are routed equally or there is only
    one.
    """
    distances = [0.0] * (len(counts) < 2)
    for a, b in itertools.combinations(shares(counts).values(), 2):
        distances.append((a - b).abs().sum(-1).mean().item() / 2)
    return statistics.fmean(distances)


def picture(title: str, routed: Mapping[str, Sequence[Routed]]):
    """Plot each method's shares by domain, a row per method and a column per layer; means over the
    seeds.

    `routed` holds a stage's result for every seed. Methods may have different numbers of experts.
    """
    columns = [_spaced(len(results[0].layers)) for results in routed.values()]
    widest = max(map(len, columns))
    figure, axes = new_figure(
        title,
        (2.2 + 2.9 * widest, 1.4 + 2.0 * len(routed)),
        rows=len(routed),
        columns=widest,
        sharex=False,
        sharey=True,
        squeeze=False,
    )
    for row, (name, results), layers in zip(axes, routed.items(), columns, strict=True):
        for axis, layer in zip(row, layers, strict=False):
            _bars(axis, results, layer)
            axis.set_title(f"{name}, layer {results[0].layers[layer]}", fontsize=9)
        row[0].set_ylabel("share of tokens", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("expert", fontsize=8)
    legend_below(figure, figure.axes[0], columns=6)
    return figure


def _bars(axes, results: Sequence, layer: int) -> None:
    """Plot one layer: a group of bars per expert, a bar per domain, and the balanced share as a
    line.
    """
    seeds = [shares(result.counts) for result in results]
    means = {}
    for name in seeds[0]:
        means[name] = torch.stack([of[name][layer] for of in seeds]).mean(0).tolist()
    E = len(next(iter(means.values())))
    grouped(axes, range(E), means)
    axes.axhline(
        1 / E,
        color=INK,
        linestyle="--",
        linewidth=1,
    )
    axes.tick_params(labelsize=8)


def _spaced(layers: int) -> list[int]:
    """Return at most LAYERS evenly spaced indices below `layers`, including the first and
    the last.
    """
    return (
        torch.linspace(
            0,
            layers - 1,
            min(layers, LAYERS),
        )
        .round()
        .int()
        .tolist()
    )
