"""Messages ↔ records at the state service's door. What a store, a script or a column would choke on is
refused here, by its field's name, before a store is touched: ids become Redis keys and hash tags
(wire.md, conventions; D85)."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message

from turnfence import records as r
from turnfence.codec import from_message
from turnfence.errors import FieldViolation, Reason, TurnfenceError

R = TypeVar("R", bound=msgspec.Struct)

TEXT_MAX_BYTES = 64 * 1024
NAME_MAX_CHARS = 512
CHUNK_BYTES = 256 * 1024

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CODE = re.compile(r"[\x20-\x7e]{0,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
NAME_FIELDS = frozenset({"name", "entity_id", "tool_name", "skill_key", "target", "call_id"})
CODE_FIELDS = frozenset({"idempotency_key", "args_hash", "error_code"})

_ID_RULE = "must be 1 to 64 characters of A-Z a-z 0-9 _ . -"
_NAME_RULE = f"must be at most {NAME_MAX_CHARS} characters, none of them a control character"
_CODE_RULE = "must be at most 64 printable ASCII characters"

_MOST = 2**53 - 1  # what Lua's numbers hold exactly
_DAY = 86_400_000
_LONGEST = 315_576_000_000_000  # the longest Duration there is, in milliseconds

# Names without which their record means nothing.
REQUIRED_NAMES = frozenset(
    {
        (r.EvidenceHead, "tool_name"),
        (r.PutEntity, "entity_id"),
        (r.PutSessionShared, "name"),
        (r.PutTaskShared, "name"),
    }
)

# Numbers that mean something within a range only.
RANGES: dict[tuple[type[msgspec.Struct], str], tuple[int, int]] = {
    (r.TurnRef, "version"): (1, _MOST),
    (r.TurnRef, "seen_seq"): (0, _MOST),
    (r.BeginTurnRequest, "lease"): (1, _DAY),
    (r.FlushRequest, "sequence"): (1, _MOST),
    (r.PersistTurnRequest, "sequence"): (1, _MOST),
    (r.WatchEventsRequest, "after_sequence"): (0, _MOST),
    (r.RecordStreamEndRequest, "last_sequence"): (0, _MOST),
    (r.TurnEvent, "sequence"): (1, _MOST),
    (r.TraceEvent, "sequence"): (1, _MOST),
    (r.TraceEvent, "duration"): (0, _LONGEST),
    (r.EvidenceHead, "duration"): (0, _LONGEST),
    (r.Usage, "duration"): (0, _LONGEST),
    (r.Budget, "deadline"): (0, _LONGEST),
}


def checked(message: Message, kind: type[R]) -> R:
    """The record of a request. Raises INVALID_REQUEST naming every bad field."""
    message.DiscardUnknownFields()
    faults: list[FieldViolation] = []
    try:
        record = from_message(message, kind)
    except ValueError:  # protobuf's, for a Timestamp outside of years 1 to 9999
        faults = [FieldViolation(path, "is no valid time") for path in _bad_times(message, "")]
        raise TurnfenceError(Reason.INVALID_REQUEST, violations=faults) from None
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
        check = _check_of(kind, field.name, hints[field.name], required=field.required)
        if check is not None:
            checks.append((field.name, check))

    def run(record: Any, path: str, faults: list[FieldViolation]) -> None:
        for name, check in checks:
            value = getattr(record, name)
            if value is not None:
                check(value, _join(path, _tag_of(value) or name), faults)

    return run


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tag_of(value: Any) -> str:
    """The oneof's field that a record of a tagged union travels in."""
    return str(value.__struct_config__.tag or "") if isinstance(value, msgspec.Struct) else ""


def _check_of(kind: type[msgspec.Struct], name: str, hint: Any, *, required: bool) -> Check | None:
    if (kind, name) in RANGES:
        return functools.partial(_check_range, allowed=RANGES[kind, name])
    if (kind, name) in _SPECIAL:
        return _SPECIAL[kind, name]
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
    if (kind, name) in REQUIRED_NAMES:
        return _check_required_name
    if name in NAME_FIELDS:
        return _check_name
    if name in CODE_FIELDS:
        return _check_code
    return None


def _structs_in(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, msgspec.Struct)
    return any(_structs_in(argument) for argument in typing.get_args(hint))


def _check_record(value: msgspec.Struct, path: str, faults: list[FieldViolation]) -> None:
    _checker(type(value))(value, path, faults)


def _check_items(value: Any, path: str, faults: list[FieldViolation]) -> None:
    for place, item in enumerate(value):
        here, tag = f"{path}[{place}]", _tag_of(item)
        _check_record(item, _join(here, tag) if tag else here, faults)


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


def _check_required_name(value: str, path: str, faults: list[FieldViolation]) -> None:
    if not value:
        faults.append(FieldViolation(path, "is required"))
    _check_name(value, path, faults)


def _check_code(value: str, path: str, faults: list[FieldViolation]) -> None:
    if not _CODE.fullmatch(value):
        faults.append(FieldViolation(path, _CODE_RULE))


def _check_range(value: int, path: str, faults: list[FieldViolation], *, allowed: tuple[int, int]) -> None:
    least, most = allowed
    if not least <= value <= most:
        faults.append(FieldViolation(path, f"must be from {least} to {most}"))


def _check_hash(value: str, path: str, faults: list[FieldViolation]) -> None:
    if not _SHA256.fullmatch(value):
        faults.append(FieldViolation(path, "must be a SHA-256 in lower-case hexadecimal"))


def _check_text(value: str, path: str, faults: list[FieldViolation]) -> None:
    if len(value.encode()) > TEXT_MAX_BYTES:
        faults.append(FieldViolation(path, f"has more than {TEXT_MAX_BYTES} bytes"))


def _check_settlements(value: list[r.Settlement], path: str, faults: list[FieldViolation]) -> None:
    if not value:
        faults.append(FieldViolation(path, "at least one is required"))
    _check_items(value, path, faults)


_SPECIAL: dict[tuple[type[msgspec.Struct], str], Check] = {
    (r.BeginTurnRequest, "input_hash"): _check_hash,
    (r.TurnInput, "text"): _check_text,
    (r.SettleCallsRequest, "settlements"): _check_settlements,
}


def _bad_times(message: Message, path: str) -> Iterator[str]:
    """Paths of the Timestamps that are out of range; for a message that is refused already."""
    for field, value in message.ListFields():
        here = f"{path}.{field.name}" if path else field.name
        if field.message_type is None:
            continue
        if field.message_type.full_name == "google.protobuf.Timestamp" and not field.is_repeated:
            try:
                value.ToMilliseconds()
            except ValueError:
                yield here
        elif field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in value:
                    yield from _bad_times(value[key], f"{here}[{key[:64]}]")
        elif field.is_repeated:
            for place, item in enumerate(value):
                yield from _bad_times(item, f"{here}[{place}]")
        else:
            yield from _bad_times(value, here)
