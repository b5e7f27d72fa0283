"""Names in the configuration tree: which exist, which was meant, and messages that say so."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mula_ray.config.errors import UserError


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section class that a field holds (also `Section | None`), or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            found = section_of(part)
            if found is not None:
                return found
    return None


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys of the tree below `model`, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        section = section_of(field.annotation)
        if section is not None:
            yield from all_keys(section, f"{prefix}{name}.")


def nearest(key: str, model: type[BaseModel]) -> str | None:
    """The valid dotted name that `key` most likely means: misspelt in place, or right in another section."""
    known = list(all_keys(model))
    last = key.rsplit(".", 1)[-1]
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    match = difflib.get_close_matches(last, [name.rsplit(".", 1)[-1] for name in siblings], n=1, cutoff=0.6)
    if match:
        return next(name for name in siblings if name.rsplit(".", 1)[-1] == match[0])
    elsewhere = [name for name in known if name.rsplit(".", 1)[-1] == last]
    if elsewhere:
        return elsewhere[0]
    whole = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return whole[0] if whole else None


def refuse_unknown(model: type[BaseModel], tree: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Refuse keys that do not exist, at any depth, with the nearest valid name of each.

    Raises:
        UserError: one line a key.
    """
    faults = list(_unknown(model, model, tree, "", origins))
    if faults:
        raise UserError("\n".join(faults))


def _unknown(
    root: type[BaseModel], model: type[BaseModel], tree: Mapping[str, Any], prefix: str, origins: Mapping[str, str]
) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        field = model.model_fields.get(str(name))
        if field is None:
            near = nearest(key, root)
            valid = ", ".join(model.model_fields)
            hint = f"did you mean {near}?" if near else f"valid here: {valid}"
            yield f"{_at(key, origins)}unknown key {key}; {hint}"
            continue
        section = section_of(field.annotation)
        if section is not None and isinstance(value, Mapping):
            yield from _unknown(root, section, value, f"{key}.", origins)


def validation_message(model: type[BaseModel], error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line a fault: where, the key, the value, the constraint, the fix."""
    lines: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        key, annotation = _resolve(model, fault["loc"])
        if key in lines:  # a union reports each of its members; the first line names them all
            continue
        lines[key] = f"{_at(key, origins)}{_describe(key, annotation, fault)}"
    return "\n".join(lines.values())


def _describe(key: str, annotation: object, fault: Any) -> str:
    choices = _choices(annotation)
    value = fault["input"]
    if fault["type"] == "missing":
        return f"{key} is missing; it has no default, set it in the file or with --set {key}=VALUE"
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"])
        return f"{key}: {text}" if key else text
    if section_of(annotation) is not None and not isinstance(value, Mapping):
        return f"{key} is {value!r}; it is a section and needs keys below it"
    if choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        number = "a positive integer or " if _takes_number(annotation) else ""
        return f"{key} is {value!r}; it must be {number}one of {', '.join(choices)}{hint}"
    constraint = str(fault["msg"]).removeprefix("Input should be ")
    return f"{key} is {value!r}; it must be {constraint}; correct it in the file or with --set {key}=VALUE"


def _resolve(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, object]:
    """Dotted key and annotation of a fault's location (which also carries the names of union members)."""
    parts: list[str] = []
    current: type[BaseModel] | None = model
    annotation: object = model
    for part in location:
        if current is None or str(part) not in current.model_fields:
            continue
        parts.append(str(part))
        annotation = current.model_fields[str(part)].annotation
        current = section_of(annotation)
    return ".".join(parts), annotation


def _choices(annotation: object) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


def _takes_number(annotation: object) -> bool:
    return any(part is int or get_args(part)[:1] == (int,) for part in get_args(annotation))


def _at(key: str, origins: Mapping[str, str]) -> str:
    origin = origins.get(key)
    return f"{origin}: " if origin else ""
