"""The protos, the code generated from them and the native contract types say the same."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor, OneofDescriptor

from turnfence import axes, codec, records
from turnfence.common.v1 import axes_pb2, content_pb2, events_pb2, records_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.harness.v1 import harness_pb2, harness_pb2_grpc
from turnfence.state.v1 import (
    history_service_pb2,
    history_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)

PROTOS = Path(__file__).parents[2] / "protos"
GENERATED = PROTOS / "gen"

COMMON: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (axes_pb2, records_pb2, content_pb2, run_pb2, events_pb2)
]
STATE: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (state_pb2, run_service_pb2, history_service_pb2)
]
HARNESS: list[FileDescriptor] = [harness_pb2.DESCRIPTOR]

PROTO_NAME = {"TaskState": "Task"}  # the one struct that is named otherwise

# Service → RPC → (requests are a stream, responses are a stream).
UNARY, SERVER_STREAM, BOTH_STREAM = (False, False), (False, True), (True, True)
SERVICES = {
    "turnfence.harness.v1.HarnessService": {
        "RunTurn": SERVER_STREAM,
        "WatchRun": SERVER_STREAM,
        "CancelRun": UNARY,
        "GetRun": UNARY,
        "ExplainRun": UNARY,
        "ListAgents": UNARY,
    },
    "turnfence.state.v1.StateService": {
        "BeginTurn": UNARY,
        "OpenNode": UNARY,
        "Flush": UNARY,
        "RegisterWrite": UNARY,
        "SettleCalls": UNARY,
        "ReadPayload": SERVER_STREAM,
        "PersistTurn": UNARY,
        "RenewLease": UNARY,
        "AbandonTurn": UNARY,
        "Session": BOTH_STREAM,
    },
    "turnfence.state.v1.RunService": {
        "RequestCancel": UNARY,
        "GetRun": UNARY,
        "ListRuns": UNARY,
        "ListTraceEvents": UNARY,
        "ListEvidence": UNARY,
        "WatchEvents": SERVER_STREAM,
        "RecordStreamEnd": UNARY,
    },
    "turnfence.state.v1.HistoryService": {
        "GetConversation": UNARY,
        "ListConversations": UNARY,
        "ListMessages": UNARY,
        "GetTask": UNARY,
        "ListTasks": UNARY,
        "DeleteConversation": UNARY,
    },
}


def declared(module: types.ModuleType, base: type) -> list[type]:
    """The subclasses of ``base`` that a module itself declares."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]


AXES: list[type[StrEnum]] = declared(axes, StrEnum)
RECORDS: list[type[msgspec.Struct]] = [
    kind for kind in declared(records, records.Record) if kind is not records.Record
]
PROTO_ENUMS: dict[str, EnumDescriptor] = {
    name: enum for file in COMMON + STATE + HARNESS for name, enum in file.enum_types_by_name.items()
}
PROTO_MESSAGES: dict[str, Descriptor] = {
    name: message for file in COMMON + STATE for name, message in file.message_types_by_name.items()
}


def message_of(record: type[msgspec.Struct]) -> Descriptor:
    return PROTO_MESSAGES[PROTO_NAME.get(record.__name__, record.__name__)]


# --- enums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.__name__)
def test_an_axis_has_the_values_of_its_proto_enum(axis: type[StrEnum]) -> None:
    enum = PROTO_ENUMS[axis.__name__]
    zero = enum.values_by_number[0].name
    assert zero.endswith("_UNSPECIFIED")
    prefix = zero.removesuffix("UNSPECIFIED")
    assert prefix.replace("_", "").lower() == axis.__name__.lower()
    assert {v.name for v in enum.values} == {zero} | {prefix + value for value in axis}
    assert all(member.name == member.value for member in axis)


def test_every_proto_enum_is_an_axis() -> None:
    assert set(PROTO_ENUMS) == {axis.__name__ for axis in AXES}


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_has_the_fields_of_its_proto_message(record: type[msgspec.Struct]) -> None:
    message = message_of(record)
    in_oneofs = {field.name: oneof.name for oneof in _oneofs(message) for field in oneof.fields}
    members = {in_oneofs.get(name, name) for name in message.fields_by_name}
    assert members == set(record.__struct_fields__)


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (records.ContentBody, "Content"),
        (records.EventKind, "TurnEvent"),
        (records.StateChange, "StateChange"),
    ],
    ids=["body", "kind", "change"],
)
def test_a_union_has_the_members_of_its_oneof(union: Any, message: str) -> None:
    (oneof,) = _oneofs(PROTO_MESSAGES[message])
    kinds = typing.get_args(union)
    assert {kind.__struct_config__.tag_field for kind in kinds} == {oneof.name}
    assert {(kind.__struct_config__.tag, kind.__name__) for kind in kinds} == {
        (field.name, field.message_type.name) for field in oneof.fields if field.message_type
    }


def test_messages_have_one_name_in_what_both_services_speak() -> None:
    names = [name for file in COMMON + STATE for name in file.message_types_by_name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_with_every_field_set_survives_the_wire(record: type[msgspec.Struct]) -> None:
    original = filled(record)
    assert over_the_wire(original) == original


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_with_only_its_required_fields_survives_the_wire(record: type[msgspec.Struct]) -> None:
    original = filled(record, required_only=True)
    assert over_the_wire(original) == original


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_survives_its_storage_form(record: type[msgspec.Struct]) -> None:
    original = filled(record)
    assert records.from_json(records.to_json(original), record) == original


@pytest.mark.parametrize("kind", typing.get_args(records.StateChange), ids=lambda kind: kind.__name__)
def test_every_change_survives_a_flush(kind: type[msgspec.Struct]) -> None:
    request = records.FlushRequest(turn=filled(records.TurnRef), sequence=1, changes=[filled(kind)])
    assert over_the_wire(request) == request


@pytest.mark.parametrize("kind", typing.get_args(records.EventKind), ids=lambda kind: kind.__name__)
def test_every_kind_of_event_survives_the_wire(kind: type[msgspec.Struct]) -> None:
    event = records.TurnEvent(sequence=1, run_id="r", conversation_id="c", kind=filled(kind))
    assert over_the_wire(event) == event


@pytest.mark.parametrize("kind", typing.get_args(records.ContentBody), ids=lambda kind: kind.__name__)
def test_every_kind_of_content_survives_the_wire(kind: type[msgspec.Struct]) -> None:
    content = records.Content(body=filled(kind), text="ready to show")
    assert over_the_wire(content) == content


def test_false_zero_and_unset_are_three_things() -> None:
    known = records.WriteIndexEntry("e", axes.CallStatus.FAILED, business_ok=False, not_before=0)
    assert over_the_wire(known) == known
    unknown = records.WriteIndexEntry("e", axes.CallStatus.UNKNOWN)
    assert over_the_wire(unknown) == unknown
    cleared = records.PutConversation(active_task_id="")
    assert over_the_wire(cleared) == cleared
    assert over_the_wire(records.PutConversation()) != cleared


@pytest.mark.parametrize("number", [0, 99])
def test_a_missing_or_unknown_enum_value_is_refused_by_name(number: int) -> None:
    message = state_pb2.CloseTask(task_id="t", record=records_pb2.TaskRecord(status=1))  # type: ignore[arg-type]
    message.status = number  # type: ignore[assignment]
    with pytest.raises(TurnfenceError) as caught:
        codec.from_message(message, records.CloseTask)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert [violation.field for violation in caught.value.violations] == ["status"]


def test_a_missing_oneof_is_refused_by_name() -> None:
    with pytest.raises(TurnfenceError) as caught:
        codec.from_message(events_pb2.TurnEvent(sequence=1), records.TurnEvent)
    assert [violation.field for violation in caught.value.violations] == ["kind"]


# --- services -------------------------------------------------------------------------------------


def test_the_services_are_those_of_the_contract() -> None:
    served = {
        service.full_name: {m.name: (m.client_streaming, m.server_streaming) for m in service.methods}
        for file in COMMON + STATE + HARNESS
        for service in file.services_by_name.values()
    }
    assert served == SERVICES


@pytest.mark.parametrize(
    ("module", "service"),
    [
        (harness_pb2_grpc, "HarnessService"),
        (state_pb2_grpc, "StateService"),
        (run_service_pb2_grpc, "RunService"),
        (history_service_pb2_grpc, "HistoryService"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_generated_servicer_has_every_rpc(module: types.ModuleType, service: str) -> None:
    servicer = getattr(module, f"{service}Servicer")
    (rpcs,) = [rpcs for name, rpcs in SERVICES.items() if name.endswith(f".{service}")]
    assert set(rpcs) == {name for name in vars(servicer) if not name.startswith("_")}


def test_list_requests_are_paged_alike() -> None:
    files = STATE + HARNESS
    lists = {n for file in files for n in file.message_types_by_name if n.startswith("List")}
    assert lists
    for file in files:
        for name, message in file.message_types_by_name.items():
            if name in lists:
                wanted = {"page_size", "page_token"} if name.endswith("Request") else {"next_page_token"}
                assert wanted <= set(message.fields_by_name), message.full_name


def test_reads_of_the_state_service_name_their_user() -> None:
    for file in (run_service_pb2.DESCRIPTOR, history_service_pb2.DESCRIPTOR):
        for name, message in file.message_types_by_name.items():
            if name.endswith("Request"):
                assert {"organ_id", "user_id"} <= set(message.fields_by_name), message.full_name


# --- generated code and comments ------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The protos compiled anew: code in ``gen``, descriptors with comments in ``set.binpb``."""
    out = tmp_path_factory.mktemp("protos")
    (out / "gen").mkdir()
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    sources = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "turnfence").rglob("*.proto"))
    plugins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I.",
            "--include_source_info",
            f"--descriptor_set_out={out / 'set.binpb'}",
            *(f"--{kind}_out={out / 'gen'}" for kind in kinds),
            *sources,
        ],
        cwd=PROTOS,
        env={**os.environ, "PATH": plugins},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_committed_code_is_what_the_protos_generate(compiled: Path) -> None:
    fresh = files_under(compiled / "gen")
    assert files_under(GENERATED) == fresh
    _, changed, unreadable = filecmp.cmpfiles(GENERATED, compiled / "gen", sorted(fresh), shallow=False)
    assert (changed, unreadable) == ([], [])


def test_generated_code_shares_its_namespace() -> None:
    """An ``__init__.py`` beside the generated code would hide the native half of ``turnfence``."""
    assert not list(GENERATED.rglob("__init__.py"))
    assert not (PROTOS / "contract" / "turnfence" / "__init__.py").exists()


def test_everything_in_the_protos_is_commented(compiled: Path) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString((compiled / "set.binpb").read_bytes()).file
    assert {file.name for file in files} == {file.name for file in COMMON + STATE + HARNESS}
    bare = [f"{file.name}: {name}" for file in files for name in uncommented(file)]
    assert bare == []


def files_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*.py*") if "__pycache__" not in p.parts}


def uncommented(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    """Names of what has no leading comment; paths are those of descriptor.proto's field numbers."""
    places = file.source_code_info.location
    commented = {tuple(place.path) for place in places if place.leading_comments.strip()}
    for m, message in enumerate(file.message_type):
        yield from _bare(commented, (4, m), message.name)
        for f, field in enumerate(message.field):
            yield from _bare(commented, (4, m, 2, f), f"{message.name}.{field.name}")
        synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
        for o, oneof in enumerate(message.oneof_decl):
            if o not in synthetic:
                yield from _bare(commented, (4, m, 8, o), f"{message.name}.{oneof.name}")
    for e, enum in enumerate(file.enum_type):
        yield from _bare(commented, (5, e), enum.name)
        for v, value in enumerate(enum.value):
            yield from _bare(commented, (5, e, 2, v), value.name)
    for s, service in enumerate(file.service):
        yield from _bare(commented, (6, s), service.name)
        for r, rpc in enumerate(service.method):
            yield from _bare(commented, (6, s, 2, r), f"{service.name}.{rpc.name}")


def _bare(commented: set[tuple[int, ...]], path: tuple[int, ...], name: str) -> Iterator[str]:
    if path not in commented:
        yield name


# --- samples --------------------------------------------------------------------------------------

NUMBER = 1_234_567  # fits every integer of the contract, and is a time and a span in milliseconds


def filled(kind: type[Any], *, required_only: bool = False) -> Any:
    """A record in which every field (or every required one) differs from its default."""
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: _sample(hints[field.name], field.name, required_only)
            for field in msgspec.structs.fields(kind)
            if field.required or not required_only
        }
    )


def _sample(hint: Any, name: str, required_only: bool) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _sample(next(a for a in args if a is not type(None)), name, required_only)
    if origin is list:
        return [_sample(args[0], name, required_only)]
    if origin is dict:
        return {"key": _sample(args[1], name, required_only)}
    if issubclass(hint, msgspec.Struct):
        return filled(hint, required_only=required_only)
    if issubclass(hint, StrEnum):
        return list(hint)[-1]
    if hint is bool:
        return True
    return {int: NUMBER, str: f"a {name} 值"}[hint]


def over_the_wire(record: msgspec.Struct) -> msgspec.Struct:
    """The record after encoding, serialising, parsing and decoding."""
    kind = message_factory.GetMessageClass(message_of(type(record)))
    sent = codec.to_message(record, kind).SerializeToString()
    return codec.from_message(kind.FromString(sent), type(record))


def _oneofs(message: Descriptor) -> list[OneofDescriptor]:
    """The real oneofs; an ``optional`` field makes one of its own, whose name begins with ``_``."""
    return [oneof for oneof in message.oneofs if not oneof.name.startswith("_")]
