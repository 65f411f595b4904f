"""YAML files of settings: one document, each key once, and no more values than a hand would write."""

from pathlib import Path
from typing import Any

import yaml

MAX_VALUES = 100_000  # that aliases may make of a file: nine lines can stand for a billion
_MERGE = "tag:yaml.org,2002:merge"
# what PyYAML's constructors raise for a value that is none of its tag, and its parser for one in too many others
_NAKED = (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError, RecursionError)


def read_yaml(path: Path) -> Any:
    """Read a YAML file's one document; raises ValueError, with the file, for what is none."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            _check_nodes(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, *_NAKED) as error:
        why = " ".join(str(error).split())[:500] or type(error).__name__
        raise ValueError(f"{path} is not valid YAML ({why}); want a recipe") from error


def _check_nodes(node: yaml.Node | None) -> None:
    """Raise ValueError for a key given twice, of which YAML keeps the last in silence, and for aliases without bound."""
    stack, count = [] if node is None else [node], 0
    while stack:
        node, count = stack.pop(), count + 1
        if count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values, aliases written out")
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
            twice = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
            if twice is not None:
                raise ValueError(f"the key {twice[:80]!r} is given twice{node.start_mark}")
            stack += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += node.value
