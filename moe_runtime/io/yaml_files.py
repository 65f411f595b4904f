"""Read YAML files of people: one document, without duplicate keys or unbounded aliases."""

from pathlib import Path
from typing import Any

import yaml

from moe_runtime.config import one_line, shown
from moe_runtime.io.files import check_regular

MAX_VALUES = 100_000  # limit after expanding aliases, as nine lines can expand to a billion values
_MERGE = "tag:yaml.org,2002:merge"
# exceptions of PyYAML's constructors for a value that does not match its tag, and of its parser for
# deep nesting
_NAKED = (
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    OverflowError,
    RecursionError,
)


def read_yaml(path: Path) -> Any:
    """Read the single document of a YAML file; raises a ValueError that names the file if it is not
    valid.
    """
    check_regular(path)
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            _check_nodes(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, *_NAKED) as error:
        why = one_line(error) or type(error).__name__
        raise ValueError(f"{path} is not valid YAML ({why})") from error


def _check_nodes(node: yaml.Node | None) -> None:
    """Raise ValueError for duplicate keys, of which YAML silently keeps the last, and for unbounded
    aliases.
    """
    stack = [] if node is None else [node]
    count = 0
    while stack:
        node = stack.pop()
        count = count + 1
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values after expanding aliases")
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    if key.value in keys:
                        raise ValueError(f"duplicate key {shown(key.value, 80)}{node.start_mark}")
                    keys.add(key.value)
            stack += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += node.value
