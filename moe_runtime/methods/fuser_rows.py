"""The rows of a fuser study's domains, encoded for every specialist."""

from collections.abc import Iterable

from moe_runtime import data
from moe_runtime.hf.fuser_training import encode_rows
from moe_runtime.hf.ultrafuser_inputs import Encoder
from moe_runtime.methods.domains import DOMAINS
from moe_runtime.methods.fuser_recipe import FuserRecipe
from moe_runtime.methods.stage_rows import domain_pairs


def study_rows(encoder: Encoder, recipe: FuserRecipe) -> dict:
    """Return the rows to train on and those held out, encoded, domain after domain, with the column `domain`.

    Raises ValueError for data that cannot be read or have too few rows.
    """
    parts: dict[str, list] = {"train": [], "held_out": []}
    for name, domain in recipe.domains.items():
        counts = (domain.limit, domain.held_out_rows)
        for part, rows, count in zip(parts, domain_pairs(domain), counts, strict=True):
            encoded = encode_rows(encoder, rows, recipe.max_length, limit=count)
            parts[part].append(encoded.add_column("domain", [name] * len(encoded)))
    concatenate = data.require("datasets").concatenate_datasets
    return {part: concatenate(rows) for part, rows in parts.items()}


def rows_by_domain(domains: Iterable[str]) -> dict[str, int]:
    """Return how many rows each domain has, in the order in which they come."""
    counts: dict[str, int] = {}
    for domain in domains:
        counts[domain] = counts.get(domain, 0) + 1
    return counts


def sources(recipe: FuserRecipe) -> list[str]:
    """Return the files and ids that rows are read from, built-in domains left out."""
    named = (source for domain in recipe.domains.values() for source in (domain.train, domain.held_out))
    return [source for source in named if source and source not in DOMAINS]
