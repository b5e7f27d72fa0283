"""From a YAML file and `--set` to a checked `RunConfig`, with the origin of every value.

loaded = load("mula-tiny", ["train.steps=20"])
loaded.config.train.steps            # 20
loaded.origins["train.steps"]        # "--set"
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mula_ray.config.errors import UserError
from mula_ray.config.keys import refuse_unknown, validation_message
from mula_ray.config.run import RunConfig
from mula_ray.config.shipped import find_file
from mula_ray.config.yamlish import parse_document, parse_value

DEFAULT = "default"
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and where each value came from.

    `origins` has one entry a leaf, keyed by dotted name: `default`, `--set`, or `FILE:LINE`.
    """

    config: RunConfig
    origins: Mapping[str, str]
    name: str
    source: str


def load(path_or_name: str | Path, sets: Sequence[str] = ()) -> Loaded:
    """Read the file at a path, or the shipped one of that name, apply each `a.b=c` of `sets` in order, check.

    Raises:
        UserError: missing file, bad YAML, unknown key (with the nearest valid name), wrong type or value.
    """
    path = find_file(path_or_name, "configs")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration {path} cannot be read: {error}; give a readable UTF-8 YAML file") from None
    document = parse_document(text, str(path))
    origins = {key: f"{path}:{line}" for key, line in document.lines.items()}
    config = validate(RunConfig, apply_sets(document.tree, sets, origins), origins)
    return Loaded(config, _leaf_origins(config, origins), path.stem, str(path))


def apply_sets(tree: Mapping[str, Any], sets: Sequence[str], origins: dict[str, str]) -> dict[str, Any]:
    """A copy of `tree` with each `a.b=c` applied; `origins` is updated in place."""
    result = _copy(tree)
    for item in sets:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"--set {item!r} is not of the form section.key=value; for example --set train.steps=100")
        *parents, last = key.split(".")
        node = result
        for part in parents:
            child = node.get(part)
            if child is None:
                child = node[part] = {}
            if not isinstance(child, dict):
                raise UserError(f"--set {item!r}: {part} is the value {child!r}, not a section; set {part} itself")
            node = child
        node[last] = parse_value(text, f"--set {key}")
        for known in [name for name in origins if name == key or name.startswith(f"{key}.")]:
            del origins[known]
        origins[key] = "--set"
    return result


def validate(model: type[Model], tree: Mapping[str, Any], origins: Mapping[str, str]) -> Model:
    """Check `tree` against `model`; every fault found goes into one `UserError`."""
    refuse_unknown(model, tree, origins)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UserError(validation_message(model, error, origins)) from None


def write_resolved(loaded: Loaded, path: Path) -> None:
    """Write the whole configuration, every value with its origin as a comment; atomic, and loadable by `load`."""
    lines = [f"# Resolved configuration of this run (from {loaded.source}). Every value with its origin."]
    lines += _emit(loaded.config, "", 0, loaded.origins)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _emit(section: BaseModel, prefix: str, depth: int, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * depth
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _emit(value, f"{prefix}{name}.", depth + 1, origins)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]
            yield f"{indent}{name}: {text}  # {origins.get(prefix + name, DEFAULT)}"


def _leaf_origins(config: BaseModel, given: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Origin of every leaf: its own, or that of the nearest section that was given as a whole by --set."""
    result: dict[str, str] = {}
    for name in type(config).model_fields:
        key, value = f"{prefix}{name}", getattr(config, name)
        if isinstance(value, BaseModel):
            result |= _leaf_origins(value, given, f"{key}.")
        elif key in given:
            result[key] = given[key]
        elif _set_as_part(key, name, value, type(config), given):
            result[key] = "--set"
        else:
            result[key] = DEFAULT
    return result


def _set_as_part(key: str, name: str, value: object, section: type[BaseModel], given: Mapping[str, str]) -> bool:
    """Whether a whole section above `key` came by --set and gave this value something else than its default."""
    parents = [key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)]
    return any(given.get(parent) == "--set" for parent in parents) and value != section.model_fields[name].default


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
