"""Records ↔ protobuf messages, by name.

A record's field is the message's field of the same name; enums pair by value name, ``int`` with
Timestamp and Duration (epoch and span milliseconds), tagged unions with oneofs. Converters are
built once per (record type, message type) as closures, so that a call costs no reflection. A field
that only one side has is a programming error and raises at build time.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from turnfence.errors import FieldViolation, Reason, TurnfenceError

R = TypeVar("R", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)

_TIMESTAMP = "google.protobuf.Timestamp"
_DURATION = "google.protobuf.Duration"


def to_message(record: msgspec.Struct, kind: type[M]) -> M:
    """The message of a record."""
    message = kind()
    _encoder(type(record), kind.DESCRIPTOR)(record, message)
    return message


def from_message(message: Message, kind: type[R]) -> R:
    """The record of a message. An enum value this version does not know where one is required, or a
    missing required member, raises INVALID_REQUEST naming the field."""
    return typing.cast(R, _decoder(kind, message.DESCRIPTOR)(message, ""))


def enum_name(descriptor: EnumDescriptor, value: StrEnum) -> str:
    """``RunState.RUNNING`` → ``RUN_STATE_RUNNING``."""
    return _prefix(descriptor) + value.value


# --- types ----------------------------------------------------------------------------------------


def _plain(hint: Any) -> tuple[Any, bool]:
    """A type without ``| None``, and whether None was allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        return (members[0] if len(members) == 1 else typing.Union[tuple(members)]), optional  # noqa: UP007
    return hint, False


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _members(hint: Any) -> dict[str, type[msgspec.Struct]]:
    """Tag (the oneof's field) → struct, of a union of tagged structs."""
    return {str(m.__struct_config__.tag): m for m in typing.get_args(hint)}


@functools.cache
def _fields(kind: type[msgspec.Struct], descriptor: Descriptor) -> list[tuple[str, Any, bool, bool]]:
    """(name, type without None, None allowed, required) of each field; both sides must agree."""
    hints = typing.get_type_hints(kind)
    infos = {f.name: f.required for f in msgspec.structs.fields(kind)}
    oneof_members = {
        f.name
        for o in descriptor.oneofs
        if o.name in infos and o.name not in descriptor.fields_by_name
        for f in o.fields
    }
    ours = set(infos)
    theirs = {n for n in descriptor.fields_by_name if n not in oneof_members} | {
        o.name for o in descriptor.oneofs if o.name in infos and o.name not in descriptor.fields_by_name
    }
    if ours != theirs:
        raise TypeError(f"{kind.__name__} and {descriptor.full_name} differ in {sorted(ours ^ theirs)}")
    return [(name, *_plain(hints[name]), required) for name, required in infos.items()]


@functools.cache
def _prefix(descriptor: EnumDescriptor) -> str:
    zero = descriptor.values_by_number[0].name
    return zero.removesuffix("UNSPECIFIED")


# --- record → message -----------------------------------------------------------------------------

Put = Callable[[Any, Any], None]


def _message_of(field: FieldDescriptor) -> Descriptor:
    """The message type of a field that is known to hold messages."""
    if field.message_type is None:
        raise TypeError(f"{field.full_name} holds no messages")
    return field.message_type


def _kind_of(value: Any) -> type[msgspec.Struct]:
    return type(value)


@functools.cache
def _encoder(kind: type[msgspec.Struct], descriptor: Descriptor) -> Put:
    puts = [_put(name, hint, descriptor) for name, hint, _, _ in _fields(kind, descriptor)]

    def encode(record: Any, message: Any) -> None:
        for put in puts:
            put(record, message)

    return encode


def _put(name: str, hint: Any, descriptor: Descriptor) -> Put:
    if _is_union(hint):
        return _put_union(name, hint, descriptor)
    field = descriptor.fields_by_name[name]
    origin = typing.get_origin(hint)
    if origin is dict:
        return _put_map(name, typing.get_args(hint)[1], field)
    if origin is list:
        return _put_list(name, typing.get_args(hint)[0], field)
    if field.message_type is not None:
        fill = _fill(hint, field)

        def put_message(record: Any, message: Any) -> None:
            value = getattr(record, name)
            if value is not None:
                target = getattr(message, name)
                target.SetInParent()
                fill(value, target)

        return put_message
    scalar = _scalar_out(field)

    def put_scalar(record: Any, message: Any) -> None:
        value = getattr(record, name)
        if value is not None:
            setattr(message, name, scalar(value))

    return put_scalar


def _put_union(name: str, hint: Any, descriptor: Descriptor) -> Put:
    # Built at first use, not here: a union may contain the record that is being built.
    members = {kind: tag for tag, kind in _members(hint).items()}

    def put(record: Any, message: Any) -> None:
        value = getattr(record, name)
        if value is None:
            return
        tag = members[type(value)]
        target = getattr(message, tag)
        target.SetInParent()
        _encoder(_kind_of(value), _message_of(descriptor.fields_by_name[tag]))(value, target)

    return put


def _put_map(name: str, hint: Any, field: FieldDescriptor) -> Put:
    value_field = _message_of(field).fields_by_name["value"]
    if value_field.message_type is None:
        return lambda record, message: getattr(message, name).update(getattr(record, name))
    fill = _fill(hint, value_field)

    def put(record: Any, message: Any) -> None:
        target = getattr(message, name)
        for key, value in getattr(record, name).items():
            fill(value, target[key])

    return put


def _put_list(name: str, hint: Any, field: FieldDescriptor) -> Put:
    if field.message_type is None:
        scalar = _scalar_out(field)
        return lambda record, message: getattr(message, name).extend(
            [scalar(value) for value in getattr(record, name)]
        )
    if _is_union(hint):
        members = {kind: tag for tag, kind in _members(hint).items()}
        wrapper = _message_of(field)

        def put_union(record: Any, message: Any) -> None:
            target = getattr(message, name)
            for value in getattr(record, name):
                tag = members[type(value)]
                item = getattr(target.add(), tag)
                item.SetInParent()
                _encoder(_kind_of(value), _message_of(wrapper.fields_by_name[tag]))(value, item)

        return put_union
    fill = _fill(hint, field)

    def put(record: Any, message: Any) -> None:
        target = getattr(message, name)
        for value in getattr(record, name):
            fill(value, target.add())

    return put


def _fill(hint: Any, field: FieldDescriptor) -> Put:
    full_name = _message_of(field).full_name
    if full_name == _TIMESTAMP:
        return lambda value, target: target.FromMilliseconds(value)
    if full_name == _DURATION:
        return lambda value, target: target.FromMilliseconds(value)
    descriptor = _message_of(field)
    return lambda value, target: _encoder(hint, descriptor)(value, target)


def _scalar_out(field: FieldDescriptor) -> Callable[[Any], Any]:
    if field.enum_type is not None:
        numbers = {v.name: v.number for v in field.enum_type.values}
        prefix = _prefix(field.enum_type)
        return lambda value: numbers[prefix + value]
    return lambda value: value


# --- message → record -----------------------------------------------------------------------------

Get = Callable[[Any, str], Any]


@functools.cache
def _decoder(kind: type[msgspec.Struct], descriptor: Descriptor) -> Get:
    gets = [
        (name, _get(name, hint, optional, required, descriptor))
        for name, hint, optional, required in _fields(kind, descriptor)
    ]

    def decode(message: Any, path: str) -> Any:
        return kind(**{name: get(message, path) for name, get in gets})

    return decode


def _get(name: str, hint: Any, optional: bool, required: bool, descriptor: Descriptor) -> Get:
    if _is_union(hint):
        return _get_union(name, hint, optional, descriptor)
    field = descriptor.fields_by_name[name]
    origin = typing.get_origin(hint)
    if origin is dict:
        return _get_map(name, typing.get_args(hint)[1], field)
    if origin is list:
        return _get_list(name, typing.get_args(hint)[0], field)
    if field.message_type is not None:
        value_of = _value_of(hint, field)
        default = None if optional or required else _default_of(hint)

        def get_message(message: Any, path: str) -> Any:
            if message.HasField(name):
                return value_of(getattr(message, name), _join(path, name))
            if required:
                raise _bad(_join(path, name), "is required")
            return default

        return get_message
    scalar = _scalar_in(hint, optional, field)
    if field.has_presence:
        return lambda message, path: (
            scalar(getattr(message, name), _join(path, name)) if message.HasField(name) else None
        )
    return lambda message, path: scalar(getattr(message, name), _join(path, name))


def _default_of(hint: Any) -> Any:
    return hint() if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _get_union(name: str, hint: Any, optional: bool, descriptor: Descriptor) -> Get:
    members = _members(hint)

    def get(message: Any, path: str) -> Any:
        tag = message.WhichOneof(name)
        if tag is None or tag not in members:
            if optional:
                return None
            raise _bad(_join(path, name), "is required, or of a kind this version does not know")
        decode = _decoder(members[tag], _message_of(descriptor.fields_by_name[tag]))
        return decode(getattr(message, tag), _join(path, tag))

    return get


def _get_map(name: str, hint: Any, field: FieldDescriptor) -> Get:
    value_field = _message_of(field).fields_by_name["value"]
    if value_field.message_type is None:
        return lambda message, path: dict(getattr(message, name))
    value_of = _value_of(hint, value_field)
    return lambda message, path: {
        key: value_of(value, f"{_join(path, name)}[{key}]") for key, value in getattr(message, name).items()
    }


def _get_list(name: str, hint: Any, field: FieldDescriptor) -> Get:
    if field.message_type is None:
        scalar = _scalar_in(hint, False, field)
        return lambda message, path: [
            scalar(value, f"{_join(path, name)}[{i}]") for i, value in enumerate(getattr(message, name))
        ]
    if _is_union(hint):
        members = _members(hint)
        wrapper = _message_of(field)
        oneof = wrapper.oneofs[0].name

        def get_union(message: Any, path: str) -> Any:
            items = []
            for i, item in enumerate(getattr(message, name)):
                tag = item.WhichOneof(oneof)
                here = f"{_join(path, name)}[{i}]"
                if tag is None or tag not in members:
                    raise _bad(here, "is of a kind this version does not know")
                decode = _decoder(members[tag], _message_of(wrapper.fields_by_name[tag]))
                items.append(decode(getattr(item, tag), f"{here}.{tag}"))
            return items

        return get_union
    value_of = _value_of(hint, field)
    return lambda message, path: [
        value_of(value, f"{_join(path, name)}[{i}]") for i, value in enumerate(getattr(message, name))
    ]


def _value_of(hint: Any, field: FieldDescriptor) -> Get:
    if _message_of(field).full_name in (_TIMESTAMP, _DURATION):
        return lambda value, path: value.ToMilliseconds()
    descriptor = _message_of(field)
    return lambda value, path: _decoder(hint, descriptor)(value, path)


def _scalar_in(hint: Any, optional: bool, field: FieldDescriptor) -> Get:
    if field.enum_type is None:
        return lambda value, path: value
    prefix = _prefix(field.enum_type)
    values = {v.number: hint(v.name.removeprefix(prefix)) for v in field.enum_type.values if v.number}

    def get(value: int, path: str) -> Any:
        if value == 0 and optional:
            return None
        if value not in values:
            raise _bad(path, "is unspecified" if value == 0 else f"has the unknown value {value}")
        return values[value]

    return get


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _bad(field: str, description: str) -> TurnfenceError:
    return TurnfenceError(Reason.INVALID_REQUEST, violations=[FieldViolation(field, description)])
