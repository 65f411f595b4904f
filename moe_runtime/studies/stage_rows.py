"""The rows and texts that a recipe names: read, told apart from those held out, tokenized."""

from collections.abc import Iterable, Mapping

from moe_runtime import data
from moe_runtime.prompts import DEEPSEEK_CHAT, MAGICODER_CHAT, put_prompt
from moe_runtime.standard_library import standard_library_pairs, standard_library_text
from moe_runtime.studies.domains import DOMAINS, SUMS, domain_rows, domain_text
from moe_runtime.studies.recipe import Pretrain, Recipe

TEMPLATES = {"magicoder": MAGICODER_CHAT, "deepseek": DEEPSEEK_CHAT}  # that a way to put prompts brings along


def tokenized(tokenizer, recipe: Recipe) -> tuple:
    """Read the rows that a recipe names; return those to tune on and those to judge by, tokenized."""
    d = recipe.data
    built_in = standard_library_pairs() if data.BUILT_IN in (d.train, d.held_out) else None
    if d.held_out is None and built_in is None:
        train, held_out = data.hold_out(data.read_rows(d.train, d.split), d.held_out_rows)
    else:
        train = built_in.train if d.train == data.BUILT_IN else data.read_rows(d.train, d.split)
        own = d.held_out in (None, data.BUILT_IN)
        held_out = built_in.held_out if own else data.read_rows(d.held_out, d.held_out_split)
        train = _without(train, held_out, d.held_out)
    parts = []
    for rows, count in ((train, d.limit), (held_out, d.held_out_rows)):
        put = (put_prompt(row, d.prompt) for row in rows)
        parts.append(data.tokenize_pairs(tokenizer, put, d.max_length, limit=count))
    return tuple(parts)


def domain_pairs(domain) -> tuple:
    """Return the rows of a recipe's domain, to train on and held out, not tokenized; no row is in both.

    `domain` has train, split, limit, held_out, held_out_split and held_out_rows; of a built-in one these are all its held-out
    rows. Rows of a file come shuffled, always alike: a limit takes some of all, not the first.
    """
    if domain.train in DOMAINS:
        asked = max(domain.limit or 0, domain.held_out_rows)
        # without a limit sums end at SUMS; some more than asked, as rows that are too long drop out
        return tuple(domain_rows(domain.train, limit=asked + asked // 8 if asked > SUMS else None))
    rows = data.read_rows(domain.train, domain.split)
    if domain.held_out is None:
        return data.hold_out(rows, domain.held_out_rows)
    held_out = data.read_rows(domain.held_out, domain.held_out_split)
    return _without(rows.shuffle(seed=0), held_out, domain.held_out), held_out


def tokenized_domains(tokenizer, domains: Mapping, max_length: int) -> dict:
    """Return `<name>-train` and `<name>-held_out` of every domain, tokenized: what one holds out is in no other's train rows.

    Each domain's prompts are put in its own way. The tokenizer is left with the chat template of the first domain that brings
    one, with its own where a domain's prompt is "chat".
    """
    own, found = tokenizer.chat_template, {}
    pairs = {name: domain_pairs(domain) for name, domain in domains.items()}
    held_out = [row for _, rows in pairs.values() for row in rows]
    for name, domain in domains.items():
        tokenizer.chat_template = TEMPLATES.get(domain.prompt, own)
        rows = {"train": _without(pairs[name][0], held_out, ", ".join(domains)), "held_out": pairs[name][1]}
        for part, limit in (("train", domain.limit), ("held_out", domain.held_out_rows)):
            put = (put_prompt(row, domain.prompt) for row in rows[part])
            found[f"{name}-{part}"] = data.tokenize_pairs(tokenizer, put, max_length, limit=limit)
    prompts = [domain.prompt for domain in domains.values()]
    tokenizer.chat_template = own if "chat" in prompts else next(filter(None, map(TEMPLATES.get, prompts)), own)
    # cut at max_length, rows may have become equal
    known = {tuple(ids) for name in domains for ids in found[f"{name}-held_out"]["input_ids"]}
    for name in domains:
        ids = found[f"{name}-train"]["input_ids"]
        left = [place for place, row in enumerate(ids) if tuple(row) not in known]
        if not left:
            raise ValueError(
                f"held_out of the domains has every row of {name}, cut at {max_length} tokens; want other rows"
            )
        if len(left) < len(ids):
            found[f"{name}-train"] = found[f"{name}-train"].select(left)
    return found


def _without(train, held_out, source: str | None) -> list:
    """Return the rows of `train` that are not held out; raises ValueError where none is left."""
    known = {str(dict(row)) for row in held_out}
    left = [row for row in train if str(dict(row)) not in known]
    if not left:
        raise ValueError(f"held_out is {source!r}, which has every row of train; want other rows")
    return left


def documents(pretrain: Pretrain) -> list[str]:
    """The texts that a small base and its tokenizer are trained on, taken evenly from all."""
    documents = standard_library_text()
    count = pretrain.documents or len(documents)
    return documents[:: max(len(documents) // count, 1)][:count]


def domain_documents(pretrain: Pretrain, sources: Iterable[str]) -> list[str]:
    """The texts that the small base of a study of domains is made of: as many of each built-in one among `sources`.

    Code's are the standard library's source. Where no source is built in, all built-in domains are read.
    """
    names = [name for name in DOMAINS if name in set(sources)] or list(DOMAINS)
    count = pretrain.documents and max(pretrain.documents // len(names), 1)
    return [text for name in names for text in domain_text(name, limit=count)]
