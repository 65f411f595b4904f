"""The rows of a fuser study's domains, encoded for every specialist."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping

from moe_runtime import data
from moe_runtime.hf.fuser_training import encode_rows
from moe_runtime.hf.ultrafuser_inputs import Encoder
from moe_runtime.studies.domains import DOMAINS, Domain
from moe_runtime.studies.fuser_recipe import FuserRecipe
from moe_runtime.studies.stage_rows import domain_pairs


def study_rows(encoder: Encoder, recipe: FuserRecipe) -> dict:
    """Return the rows to train on and those held out, encoded, domain after domain, with the column `domain`.

    No row is trained on whose prompt is held out in any domain: what is cut, of a chat or of a long answer, makes rows
    alike that were not. Raises ValueError, with the domain, for data that cannot be read or have too few rows.
    """
    pairs: dict[str, tuple] = {}
    parts: dict[str, list] = {"train": [], "held_out": []}
    prompts: list = []
    for name, domain in recipe.domains.items():
        with _named(name):
            pairs[name] = domain_pairs(domain)
            held_out = _encoded(encoder, recipe, name, pairs[name][1], domain.held_out_rows)
        prompts += held_out["prompt_ids"]
        parts["held_out"].append(held_out)
    for name, domain in recipe.domains.items():
        with _named(name):
            parts["train"].append(_encoded(encoder, recipe, name, pairs[name][0], domain.limit, prompts))
    concatenate = data.require("datasets").concatenate_datasets
    return {part: concatenate(rows) for part, rows in parts.items()}


def _encoded(encoder: Encoder, recipe: FuserRecipe, name: str, rows, limit: int | None, without: Iterable = ()):
    where = functools.partial(_where, recipe.domains[name])
    encoded = encode_rows(encoder, rows, recipe.max_length, limit=limit, without=without, where=where)
    return encoded.add_column("domain", [name] * len(encoded))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Have an error say which domain it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"domains.{name}: {error}") from error


def _where(domain: Domain, place: int, row: Mapping) -> str:
    """Say where a row stands: they have been shuffled, so it is looked for."""
    for source, split in ((domain.train, domain.split), (domain.held_out, domain.held_out_split)):
        if source is not None and source not in DOMAINS:
            for number, one in enumerate(data.read_rows(source, split)):
                if dict(one) == dict(row):
                    return f"row {number} of {source!r}, from 0"
    return f"row {place} of {domain.train!r}"


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
