"""Reading plain data by a strict schema: every fault is named by its path, none stops the reading.

A schema is a table of fields, a field is a parser: ``parse(reader, path, value)`` gives the value in
its native type, or None after it has reported why it cannot. Parsers nest, so a table of tables is
the whole schema, and nothing that the table does not name is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import jmespath
import jmespath.exceptions
import jmespath.functions
import msgspec

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

DataPath = tuple[str | int, ...]


class Reader:
    """Collects problems in the order in which they are found."""

    def __init__(self) -> None:
        self.problems: list[tuple[DataPath, str]] = []

    def report(self, path: DataPath, message: str) -> None:
        self.problems.append((path, message))


Parse = Callable[[Reader, DataPath, object], T | None]


class Field(msgspec.Struct, frozen=True):
    """One key of a record; ``to``: its name in the native type when that differs."""

    parse: Parse[Any]
    required: bool = False
    to: str = ""


def kind_of(value: object) -> str:
    """The value's type in the words of whoever writes YAML."""
    if value is None:
        return "nothing"
    for types, name in _KINDS:
        if isinstance(value, types):
            return name
    return type(value).__name__


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true/false"),
    (str, "text"),
    (int, "a number"),
    (float, "a number"),
    (list, "a list"),
    (dict, "a mapping"),
)


def text(reader: Reader, path: DataPath, value: object) -> str | None:
    """Text that is not blank."""
    if not isinstance(value, str):
        reader.report(path, f"expected text, found {kind_of(value)}")
        return None
    if not value.strip():
        reader.report(path, "the text is empty")
        return None
    return value


def boolean(reader: Reader, path: DataPath, value: object) -> bool | None:
    if not isinstance(value, bool):
        reader.report(path, f"expected true or false, found {kind_of(value)}")
        return None
    return value


def integer(low: int, high: int) -> Parse[int]:
    def parse(reader: Reader, path: DataPath, value: object) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int):
            reader.report(path, f"expected a whole number, found {kind_of(value)}")
            return None
        if not low <= value <= high:
            reader.report(path, f"{value} is outside {low}..{high}")
            return None
        return value

    return parse


def matching(pattern: str, wanted: str) -> Parse[str]:
    """Text that the whole of ``pattern`` matches; ``wanted`` says so to a reader."""
    compiled = re.compile(pattern)

    def parse(reader: Reader, path: DataPath, value: object) -> str | None:
        found = text(reader, path, value)
        if found is not None and not compiled.fullmatch(found):
            reader.report(path, f"'{found}' is not {wanted}")
            return None
        return found

    return parse


identifier: Parse[str] = matching(r"[A-Za-z0-9_.\-]{1,64}", "an id (1 to 64 of A-Z a-z 0-9 _ . -)")


def choice(options: type[E]) -> Parse[E]:
    def parse(reader: Reader, path: DataPath, value: object) -> E | None:
        if isinstance(value, str) and value in {option.value for option in options}:
            return options(value)
        allowed = ", ".join(option.value for option in options)
        reader.report(path, f"expected one of {allowed}, found {_shown(value)}")
        return None

    return parse


def jmes(reader: Reader, path: DataPath, value: object) -> str | None:
    """A JMESPath expression that compiles, as text."""
    source = text(reader, path, value)
    if source is None:
        return None
    try:
        unknown = sorted(_functions_called(jmespath.compile(source).parsed) - _FUNCTIONS)
    except jmespath.exceptions.JMESPathError as error:
        reader.report(path, f"'{source}' is not a JMESPath expression: {_first_line(error)}")
        return None
    if unknown:
        reader.report(path, f"'{source}' calls what JMESPath does not have: {', '.join(unknown)}")
        return None
    return source


_FUNCTIONS = frozenset(jmespath.functions.Functions.FUNCTION_TABLE)


def _functions_called(node: Mapping[str, Any]) -> set[str]:
    """JMESPath looks functions up when it evaluates: too late for a file that is checked once."""
    called = {node["value"]} if node["type"] == "function_expression" else set()
    return called.union(*(_functions_called(child) for child in node["children"] if isinstance(child, dict)))


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(reader: Reader, path: DataPath, value: object) -> float | None:
    """``500ms``, ``10s``, ``2m``, ``1h`` as seconds, above zero."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        reader.report(path, f"expected a duration above zero such as 500ms, 10s or 2m, found {_shown(value)}")
        return None
    return seconds


def list_of(parse: Parse[T], *, least: int = 0) -> Parse[tuple[T, ...]]:
    def parse_list(reader: Reader, path: DataPath, value: object) -> tuple[T, ...] | None:
        if not isinstance(value, list):
            reader.report(path, f"expected a list, found {kind_of(value)}")
            return None
        if len(value) < least:
            reader.report(path, "the list is empty" if least == 1 else f"expected at least {least} items")
            return None
        parsed = [parse(reader, (*path, index), item) for index, item in enumerate(value)]
        return tuple(item for item in parsed if item is not None)

    return parse_list


def map_of(parse: Parse[T], *, key: Parse[str] = text) -> Parse[dict[str, T]]:
    def parse_map(reader: Reader, path: DataPath, value: object) -> dict[str, T] | None:
        if not isinstance(value, dict):
            reader.report(path, f"expected a mapping, found {kind_of(value)}")
            return None
        parsed: dict[str, T] = {}
        for name, item in value.items():
            here = (*path, name)
            accepted = key(reader, here, name) is not None
            found = parse(reader, here, item)
            if accepted and found is not None:
                parsed[name] = found
        return parsed

    return parse_map


def record(fields: Mapping[str, Field]) -> Parse[dict[str, Any]]:
    """A mapping with exactly these keys; gives the valid ones under their native names."""

    def parse_record(reader: Reader, path: DataPath, value: object) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            reader.report(path, f"expected a mapping, found {kind_of(value)}")
            return None
        for name in value:
            if name not in fields:
                reader.report((*path, name), f"unknown key '{name}' (known: {', '.join(fields)})")
        parsed: dict[str, Any] = {}
        for name, field in fields.items():
            if name not in value:
                if field.required:
                    reader.report(path, f"'{name}' is missing")
                continue
            found = field.parse(reader, (*path, name), value[name])
            if found is not None:
                parsed[field.to or name] = found
        return parsed

    return parse_record


def built(parse: Parse[dict[str, Any]], build: Callable[..., T]) -> Parse[T]:
    """The record as a native type; None when anything in it was faulty."""

    def parse_built(reader: Reader, path: DataPath, value: object) -> T | None:
        before = len(reader.problems)
        fields = parse(reader, path, value)
        return None if fields is None or len(reader.problems) > before else build(**fields)

    return parse_built


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str | int | float) else kind_of(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(":")
