"""Losses of rows that stand domain after domain, as those of each domain."""

from collections.abc import Mapping, Sequence

from moe_runtime.hf import fit as trainers
from moe_runtime.studies.stages import loss_of


def by_domain(losses: Sequence[float], tokens: Sequence[int], rows: Mapping[str, int]) -> dict[str, float]:
    """Return the mean loss per label token of each domain's rows, which stand domain after domain."""
    return {domain: trainers.mean_loss(losses[place], tokens[place]) for domain, place in places_of(rows).items()}


def places_of(rows: Mapping[str, int]) -> dict[str, slice]:
    """Return where the rows of each domain stand."""
    places, start = {}, 0
    for domain, count in rows.items():
        places[domain] = slice(start, start + count)
        start += count
    return places


def of_domain(result, domain: str):
    """Return a result as if the rows of one domain were all it is judged by."""
    place = places_of(result.rows)[domain]
    losses, tokens = result.losses[place], result.tokens[place]
    return result._replace(rows={domain: len(losses)}, history=[], **loss_of(losses, tokens))
