"""Records ↔ rows: a column for each field, by name; what is named otherwise is in a table of renames.

Texts, numbers, flags and enums go as they are; everything with a structure as JSON text. Reading gives
back exactly what was written.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from state_service.core.hot import decode
from turnfence import records as r

R = TypeVar("R", bound=msgspec.Struct)

Renames = Mapping[str, str]

MESSAGE: Renames = {"type": "message_type", "text": "content", "created_at": "created_at_ms"}
TASK: Renames = {
    "suspended_at": "suspended_time",
    "started_at": "started_time",
    "finished_at": "finished_time",
}
NODE: Renames = {"started_at": "started_time", "finished_at": "finished_time"}
EDGE: Renames = {"type": "edge_type"}
CHECKPOINT: Renames = {"created_at": "created_at_ms", "expires_at": "expires_at_ms"}
RESUME: Renames = {"action": "resume_action"}
CALL: Renames = {
    "evidence_id": "call_id",
    "call_id": "model_call_id",
    "status": "call_status",
    "empty": "empty_result",
    "result_brief": "result_summary",
    "detail": "error_message",
    "started_at": "started_time",
    "finished_at": "finished_time",
    "duration": "duration_ms",
}
ENTITY: Renames = {"attrs_json": "attrs"}
TRACE: Renames = {"started_at": "started_time", "duration": "duration_ms"}
RUN: Renames = {
    "termination_reason": "reason",
    "usage": "usage_json",
    "started_at": "started_time",
    "finished_at": "finished_time",
}


def to_row(
    record: msgspec.Struct, renames: Renames, *, leave: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Column → value; ``leave``: fields that other columns hold."""
    row: dict[str, Any] = {}
    for name, kind, _ in _fields(type(record)):
        if name in leave:
            continue
        value = getattr(record, name)
        if value is not None and kind is _JSON:
            value = r.to_json(value)
        elif isinstance(value, StrEnum):
            value = value.value
        elif value is None and kind is _JSON:
            value = ""
        row[renames.get(name, name)] = value
    return row


def from_row(row: Mapping[str, Any], kind: type[R], renames: Renames, **given: Any) -> R:
    """The record of a row; ``given``: fields that are not columns."""
    values = dict(given)
    for name, how, hint in _fields(kind):
        if name in values:
            continue
        value = row[renames.get(name, name)]
        if how is _JSON:
            if not value:
                continue
            value = decode(value, hint)
        elif value is not None and isinstance(how, type) and issubclass(how, StrEnum):
            value = how(value)
        elif value is not None and how is bool:
            value = bool(value)
        values[name] = value
    return kind(**values)


class _Json:
    """Marks a field that is JSON text in its column."""


_JSON = _Json


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any, Any]]:
    """(field, how it is stored, its type without None)."""
    hints = typing.get_type_hints(kind)
    found = []
    for field in msgspec.structs.fields(kind):
        hint = _plain(hints[field.name])
        simple = isinstance(hint, type) and (hint in (str, int, bool) or issubclass(hint, StrEnum))
        found.append((field.name, hint if simple else _JSON, hint))
    return found


def _plain(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        return members[0] if len(members) == 1 else typing.Union[tuple(members)]  # noqa: UP007
    return hint
