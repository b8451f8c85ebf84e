"""Messages ↔ records at the state service's door. Every id of every request is checked here, before a
store is touched: ids become Redis keys and hash tags (wire.md, conventions; D85)."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message

from turnfence.codec import from_message
from turnfence.errors import FieldViolation, Reason, TurnfenceError, invalid

R = TypeVar("R", bound=msgspec.Struct)

TEXT_MAX_BYTES = 64 * 1024
NAME_MAX_CHARS = 512
CHUNK_BYTES = 256 * 1024

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

# Fields that are ids wherever they occur. ``entity_id`` is a business object's own, and may be anything.
ID_FIELDS = frozenset(
    {
        "organ_id",
        "user_id",
        "conversation_id",
        "run_id",
        "message_id",
        "agent_id",
        "task_id",
        "node_id",
        "evidence_id",
        "checkpoint_id",
        "current_node_id",
        "active_task_id",
        "source_message_id",
        "trace_id",
        "from_node_id",
        "to_node_id",
        "lease_token",
        "entity_type",
    }
)
NAME_FIELDS = frozenset({"name", "entity_id", "tool_name", "skill_key"})

_ID_RULE = "must be 1 to 64 characters of A-Z a-z 0-9 _ . -"
_NAME_RULE = f"must be at most {NAME_MAX_CHARS} characters, none of them a control character"


def checked(message: Message, kind: type[R]) -> R:
    """The record of a request. Raises INVALID_REQUEST naming every bad field."""
    message.DiscardUnknownFields()
    record = from_message(message, kind)
    faults: list[FieldViolation] = []
    _checker(kind)(record, "", faults)
    if faults:
        raise TurnfenceError(Reason.INVALID_REQUEST, violations=faults)
    return record


Check = Callable[[Any, str, list[FieldViolation]], None]


@functools.cache
def _checker(kind: type[msgspec.Struct]) -> Check:
    """A check of all ids below a record, built once per type."""
    checks: list[tuple[str, Check]] = []
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        check = _check_of(field.name, hints[field.name], required=field.required)
        if check is not None:
            checks.append((field.name, check))

    def run(record: Any, path: str, faults: list[FieldViolation]) -> None:
        for name, check in checks:
            value = getattr(record, name)
            if value is not None:
                check(value, f"{path}.{name}" if path else name, faults)

    return run


def _check_of(name: str, hint: Any, *, required: bool) -> Check | None:
    structs = _structs_in(hint)
    origin = typing.get_origin(hint)
    if origin is dict:
        return _check_entries
    if origin is list:
        return _check_items if structs else None
    if structs:
        return _check_record
    if name in ID_FIELDS:
        return functools.partial(_check_id, required=required)
    if name in NAME_FIELDS:
        return _check_name
    return None


def _structs_in(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, msgspec.Struct)
    return any(_structs_in(argument) for argument in typing.get_args(hint))


def _check_record(value: msgspec.Struct, path: str, faults: list[FieldViolation]) -> None:
    _checker(type(value))(value, path, faults)


def _check_items(value: Any, path: str, faults: list[FieldViolation]) -> None:
    for place, item in enumerate(value):
        _check_record(item, f"{path}[{place}]", faults)


def _check_entries(value: Any, path: str, faults: list[FieldViolation]) -> None:
    for name, item in value.items():
        _check_name(name, path, faults)
        if isinstance(item, msgspec.Struct):
            _check_record(item, f"{path}[{name[:64]}]", faults)


def _check_id(value: str, path: str, faults: list[FieldViolation], *, required: bool) -> None:
    if not value:
        if required:
            faults.append(FieldViolation(path, "is required"))
    elif not _ID.fullmatch(value):
        faults.append(FieldViolation(path, _ID_RULE))


def _check_name(value: str, path: str, faults: list[FieldViolation]) -> None:
    if len(value) > NAME_MAX_CHARS or _CONTROL.search(value):
        faults.append(FieldViolation(path, _NAME_RULE))


def check_text(text: str) -> None:
    """INVALID_REQUEST for a user's text above 64 KiB."""
    if len(text.encode()) > TEXT_MAX_BYTES:
        raise invalid("input.text", f"has more than {TEXT_MAX_BYTES} bytes")


def check_sequence(sequence: int) -> None:
    if sequence < 1:
        raise invalid("sequence", "must be 1 or more")
