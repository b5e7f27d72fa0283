"""YAML as a configuration reader wants it: YAML 1.2 scalars, no duplicate keys, the line of every value.

PyYAML follows YAML 1.1, where `4e-4` is a string, `6:00:00` a number and `no` a boolean; duplicate keys silently win.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from mula_ray.config.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own protocol)


_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


@dataclass(frozen=True)
class Document:
    """A parsed mapping and, for every dotted key in it, its line (from 1)."""

    tree: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


def parse_document(text: str, source: str) -> Document:
    """Parse `text`, a mapping at the top.

    Raises:
        UserError: not YAML, not a mapping, or a key given twice; names `source` and the line.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document({})
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{source}: the top of a configuration must be a mapping of sections, not {text[:40]!r}")
        lines: dict[str, int] = {}
        _walk(node, "", source, lines)
        tree: dict[str, Any] = loader.construct_document(node)
        return Document(tree, lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(
            f"{source}{at}: not valid YAML: {problem}; check indentation, colons and quotes there"
        ) from None
    finally:
        loader.dispose()


def parse_value(text: str, what: str) -> Any:
    """Parse one value as it would stand in a file, e.g. `4e-4`, `true`, `[1, 2]`, `{ep: 2}`."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError:
        raise UserError(f"{what}: the value {text!r} is not valid YAML; quote it if it is a string") from None
    finally:
        loader.dispose()


def _walk(node: yaml.MappingNode, prefix: str, source: str, lines: dict[str, int]) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            raise UserError(f"{source}:{line}: {key} is given twice (first on line {lines[key]}); keep one of them")
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _walk(value_node, f"{key}.", source, lines)
