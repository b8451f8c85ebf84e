"""What the state service refuses before it touches a store, and by which field's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_status import rpc_status

from tests.contract.requests import REQUESTS, RPCS, Rpc, Step, at, every_change, id_places, valid
from tests.contract.turns import CALL_SECONDS, StateClient, Talk, Turn, refused
from tests.contract.work import Work
from turnfence import records as r
from turnfence.codec import to_message
from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import from_rpc_error
from turnfence.state.v1 import state_pb2

BAD_IDS = [
    *("x" * 65, "x" * 10_000, "{a}", "a:b", "a b", "a ", " ", "a\n", "a\x00", "a/b", "a|b", "é", "😀"),
    *("\u202ea", "' OR 1=1", "a,b", "a*"),
]
REQUIRED_IDS = {
    "organ_id",
    "user_id",
    "conversation_id",
    "run_id",
    "message_id",
    "task_id",
    "node_id",
    "evidence_id",
    "checkpoint_id",
    "lease_token",
    "entity_type",
    "from_node_id",
    "to_node_id",
}


async def refusal(rpc: Rpc, client: StateClient, request: Message) -> TurnfenceError:
    """What a call is refused with; the violations of a request that is not valid."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc.call(client, request)
    error = from_rpc_error(caught.value)
    assert error.reason is Reason.INVALID_REQUEST, error
    assert error.status == "INVALID_ARGUMENT"
    return error


async def fields_refused(rpc: Rpc, client: StateClient, request: Message) -> list[str]:
    return [violation.field for violation in (await refusal(rpc, client, request)).violations]


def path_of(steps: tuple[Step, ...]) -> str:
    """``changes[0].put_node.task_id``, as violations name it."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


async def opened(talk: Talk) -> tuple[Turn, Work]:
    turn, work = await talk.begin(), Work()
    await turn.flush(*work.opened())
    return turn, work


async def unwritten(turn: Turn) -> None:
    """Nothing was written in between: the next write has the very next data sequence."""
    before = turn.ref.seen_seq
    assert (await turn.flush(r.PutConversation(title="next"))).data_seq == before + 1


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.name)
async def test_C119_a_bad_id_is_named_wherever_it_stands(talk: Talk, rpc: Rpc) -> None:
    turn, work = await opened(talk)
    request = valid(rpc, turn, work)
    places = list(id_places(request))
    assert places
    for number, steps in enumerate(places):
        # All bad ids for the first places of a request; below, one of them, another at each place.
        for bad in BAD_IDS if len(places) < 12 else [BAD_IDS[number % len(BAD_IDS)]]:
            wrong = copy.deepcopy(request)
            setattr(at(wrong, steps[:-1]), str(steps[-1]), bad)
            assert await fields_refused(rpc, talk.client, wrong) == [path_of(steps)], repr(bad)
    await unwritten(turn)


@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.name)
async def test_C119_a_missing_id_is_named(talk: Talk, rpc: Rpc) -> None:
    turn, work = await opened(talk)
    request = valid(rpc, turn, work)
    tried = 0
    for steps in id_places(request):
        if steps[-1] not in REQUIRED_IDS or not _required_here(steps):
            continue
        wrong = copy.deepcopy(request)
        at(wrong, steps[:-1]).ClearField(str(steps[-1]))
        assert await fields_refused(rpc, talk.client, wrong) == [path_of(steps)]
        tried += 1
    assert tried
    await unwritten(turn)


def _required_here(steps: tuple[Step, ...]) -> bool:
    """Ids that name what a record hangs on are required in it; as a mere reference they may be empty."""
    references = {
        ("message", "task_id"),
        ("message", "node_id"),
        ("entry", "task_id"),
        ("entry", "evidence_id"),
        ("input", "checkpoint_id"),
        ("checkpoint", "evidence_id"),
        ("consume_checkpoint", "user_id"),
        ("trace", "node_id"),
        ("trace", "evidence_id"),
        ("done", "checkpoint_id"),
        ("outcome", "conversation_id"),
        ("outcome", "message_id"),
        ("outcome", "task_id"),
        ("run", "conversation_id"),
        ("run", "message_id"),
        ("run", "task_id"),
    }
    return steps[-2:] not in references


async def test_all_bad_fields_are_named_at_once(talk: Talk) -> None:
    request = to_message(talk.request(), state_pb2.BeginTurnRequest)
    request.organ_id, request.user_id, request.run_id = "", "a b", "{x}"
    request.input.message_id = ""
    begin = REQUESTS["BeginTurn"]
    assert await fields_refused(begin, talk.client, request) == [
        "organ_id",
        "user_id",
        "run_id",
        "input.message_id",
    ]


async def test_C121_no_id_reaches_into_another_organisation(talk: Talk) -> None:
    """``a`` + ``b:c`` and ``a:b`` + ``c`` would be one key."""
    for organ_id, conversation_id, field in (("a", "b:c", "conversation_id"), ("a:b", "c", "organ_id")):
        request = to_message(talk.request(), state_pb2.BeginTurnRequest)
        request.organ_id, request.conversation_id = organ_id, conversation_id
        assert await fields_refused(REQUESTS["BeginTurn"], talk.client, request) == [field]


async def test_a_bad_value_is_not_repeated_to_the_caller(talk: Talk) -> None:
    request = to_message(talk.request(), state_pb2.BeginTurnRequest)
    request.user_id = "canary s3cret"
    error = await refusal(REQUESTS["BeginTurn"], talk.client, request)
    assert "s3cret" not in str(error) + str(error.violations)


# --- everything else ------------------------------------------------------------------------------

Change = Callable[[Any], object]


def clear(*names: str) -> Change:
    return lambda request: [request.ClearField(name) for name in names]


def assign(path: str, value: object) -> Change:
    def change(request: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            request = getattr(request, parent)
        setattr(request, name, value)

    return change


def change_of(kind: str, path: str, value: object) -> Change:
    """Of the Flush with every kind of change: one field of one of them."""

    def change(request: Any) -> None:
        (one,) = (c for c in request.changes if c.WhichOneof("change") == kind)
        assign(f"{kind}.{path}", value)(one)

    return change


FAR = 2**53
BAD_FIELDS: list[tuple[str, Change, str]] = [
    ("BeginTurn", clear("input"), "input"),
    ("BeginTurn", clear("input_hash"), "input_hash"),
    ("BeginTurn", assign("input_hash", "abc"), "input_hash"),
    ("BeginTurn", assign("input_hash", "A" * 64), "input_hash"),
    ("BeginTurn", assign("input.action", 99), "input.action"),
    ("BeginTurn", assign("input.text", "x" * (64 * 1024 + 1)), "input.text"),
    ("BeginTurn", assign("lease.seconds", -1), "lease"),
    ("BeginTurn", assign("lease.seconds", 86_401), "lease"),
    ("OpenNode", clear("turn"), "turn"),
    ("OpenNode", assign("turn.version", 0), "turn.version"),
    ("OpenNode", assign("turn.version", -1), "turn.version"),
    ("OpenNode", assign("turn.seen_seq", -1), "turn.seen_seq"),
    ("Flush", clear("turn"), "turn"),
    ("Flush", clear("sequence"), "sequence"),
    ("Flush", assign("sequence", -1), "sequence"),
    ("Flush", assign("sequence", FAR), "sequence"),
    ("Flush", assign("turn.version", FAR), "turn.version"),
    ("Flush", lambda request: request.changes.add(), "changes[15]"),
    ("Flush", lambda request: request.changes[2].Clear(), "changes[2]"),
    ("Flush", change_of("put_session_shared", "name", ""), "changes[2].put_session_shared.name"),
    ("Flush", change_of("put_task_shared", "name", ""), "changes[8].put_task_shared.name"),
    ("Flush", change_of("put_entity", "entity_id", ""), "changes[11].put_entity.entity_id"),
    ("Flush", change_of("put_session_shared", "name", "x" * 513), "changes[2].put_session_shared.name"),
    ("Flush", change_of("put_session_shared", "name", "a\x07"), "changes[2].put_session_shared.name"),
    (
        "Flush",
        change_of("put_session_shared", "value.source.type", 0),
        "changes[2].put_session_shared.value.source.type",
    ),
    ("Flush", change_of("put_task", "task.status", 0), "changes[3].put_task.task.status"),
    ("Flush", change_of("put_task", "task.status", 77), "changes[3].put_task.task.status"),
    (
        "Flush",
        change_of("put_task", "task.started_at.seconds", 10**15),
        "changes[3].put_task.task.started_at",
    ),
    ("Flush", change_of("put_node", "node.status", 77), "changes[4].put_node.node.status"),
    ("Flush", change_of("put_node", "node.error_code", "é"), "changes[4].put_node.node.error_code"),
    ("Flush", change_of("put_node", "node.target", "x" * 513), "changes[4].put_node.node.target"),
    ("Flush", change_of("put_edge", "edge.type", 0), "changes[5].put_edge.edge.type"),
    ("Flush", change_of("put_edge", "edge.to_node_id", "n1"), "changes[5].put_edge.edge.to_node_id"),
    ("Flush", change_of("put_checkpoint", "checkpoint.type", 9), "changes[6].put_checkpoint.checkpoint.type"),
    ("Flush", change_of("consume_checkpoint", "action", 0), "changes[7].consume_checkpoint.action"),
    ("Flush", change_of("append_event", "event.sequence", 0), "changes[12].append_event.event.sequence"),
    ("Flush", change_of("append_trace", "trace.sequence", -3), "changes[13].append_trace.trace.sequence"),
    ("Flush", change_of("append_trace", "trace.type", 999), "changes[13].append_trace.trace.type"),
    ("RegisterWrite", clear("evidence"), "evidence"),
    ("RegisterWrite", assign("evidence.status", 0), "evidence.status"),
    ("RegisterWrite", assign("evidence.status", 2), "evidence.status"),
    ("RegisterWrite", assign("evidence.side_effect", 1), "evidence.side_effect"),
    ("RegisterWrite", assign("evidence.idempotency_key", ""), "evidence.idempotency_key"),
    ("RegisterWrite", assign("evidence.idempotency_key", "k" * 65), "evidence.idempotency_key"),
    ("RegisterWrite", assign("evidence.tool_name", ""), "evidence.tool_name"),
    ("RegisterWrite", assign("evidence.tool_name", "t" * 513), "evidence.tool_name"),
    ("RegisterWrite", assign("evidence.trace_id", "another"), "evidence.trace_id"),
    ("RegisterWrite", assign("evidence.node_id", "another"), "evidence.node_id"),
    ("RegisterWrite", assign("evidence.task_id", "another"), "evidence.task_id"),
    ("SettleCalls", clear("settlements"), "settlements"),
    (
        "SettleCalls",
        lambda request: request.settlements[0].ClearField("evidence"),
        "settlements[0].evidence",
    ),
    (
        "SettleCalls",
        lambda request: assign("evidence.status", 1)(request.settlements[0]),
        "settlements[0].evidence.status",
    ),
    (
        "SettleCalls",
        lambda request: assign("evidence.node_id", "another")(request.settlements[0]),
        "settlements[0].evidence.node_id",
    ),
    (
        "SettleCalls",
        lambda request: assign("evidence.duration.seconds", 2**60)(request.settlements[0]),
        "settlements[0].evidence.duration",
    ),
    ("PersistTurn", clear("outcome"), "outcome"),
    ("PersistTurn", clear("sequence"), "sequence"),
    ("PersistTurn", assign("outcome.run_state", 0), "outcome.run_state"),
    ("PersistTurn", assign("outcome.run_state", 1), "outcome.run_state"),
    ("PersistTurn", assign("outcome.release_outcome", 9), "outcome.release_outcome"),
    ("PersistTurn", assign("outcome.run_id", "another"), "outcome.run_id"),
    ("PersistTurn", assign("outcome.finished_at.seconds", -(10**12)), "outcome.finished_at"),
    ("PersistTurn", assign("outcome.usage.duration.seconds", -1), "outcome.usage.duration"),
    (
        "PersistTurn",
        lambda request: request.closing_events[0].ClearField("content"),
        "closing_events[0].kind",
    ),
    ("RenewLease", clear("turn"), "turn"),
    ("AbandonTurn", clear("outcome"), "outcome"),
    ("AbandonTurn", assign("outcome.run_state", 1), "outcome.run_state"),
    ("WatchEvents", assign("after_sequence", -1), "after_sequence"),
]


@pytest.mark.parametrize(
    ("name", "change", "field"), BAD_FIELDS, ids=[f"{i}-{n}-{f}" for i, (n, _, f) in enumerate(BAD_FIELDS)]
)
async def test_a_bad_field_is_named_and_nothing_is_written(
    talk: Talk, name: str, change: Change, field: str
) -> None:
    turn, work = await opened(talk)
    request = valid(REQUESTS[name], turn, work)
    change(request)
    assert await fields_refused(REQUESTS[name], talk.client, request) == [field]
    await unwritten(turn)


async def test_a_task_is_closed_by_persist_alone(talk: Talk) -> None:
    turn, work = await opened(talk)
    error = await refused(turn.flush(work.closed()), Reason.INVALID_REQUEST)
    assert [violation.field for violation in error.violations] == ["changes[0].close_task"]
    await unwritten(turn)


@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.name)
async def test_every_request_of_the_tables_is_good_as_it_stands(talk: Talk, rpc: Rpc) -> None:
    turn, work = await opened(talk)
    await turn.flush(r.AppendEvent(event=turn.event(r.Progress(text="looking"))))
    await turn.settle(work.read(turn, evidence_id="e1"), "{}")
    await rpc.call(talk.client, valid(rpc, turn, work))


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xc3\x28", b"\x08\x96\x01", b"\x0a\xff"])
async def test_C124_bytes_that_are_no_request_are_refused_in_words_of_the_contract(
    state: StateClient, data: bytes
) -> None:
    """Garbage, broken UTF-8, a wrong wire type, a cut message; unknown fields are ignored."""
    for rpc in RPCS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.call_raw(state, data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, rpc.name
        assert from_rpc_error(caught.value).reason is Reason.INVALID_REQUEST


async def test_C124_unknown_fields_are_not_kept(talk: Talk) -> None:
    turn = await talk.begin()
    request = r.FlushRequest(turn=turn.ref, sequence=1, changes=[r.PutConversation(title="known")])
    unknown = b"\xfa\x7f" + b"\x80\x80\x40" + b"u" * 2**20  # field 2047, 1 MiB of bytes
    data = to_message(request, state_pb2.FlushRequest).SerializeToString() + unknown
    await REQUESTS["Flush"].call_raw(talk.client, data)
    await turn.client.persist(r.PersistTurnRequest(turn=turn.ref, sequence=2, outcome=turn.outcome()))
    assert (await talk.begin()).snapshot.conversation.title == "known"


async def test_a_message_above_16_MiB_is_refused_and_the_turn_goes_on(talk: Talk) -> None:
    turn, work = await opened(talk)
    huge = "x" * (16 * 1024 * 1024)
    error = await refused(
        turn.flush(r.PutNodeSpace(task_id=work.task_id, node_id=work.node_id, state={"a": huge})),
        Reason.STATE_WRITE_FAILED,
    )
    assert error.status == "RESOURCE_EXHAUSTED"
    await unwritten(turn)


async def test_a_refusal_carries_the_contracts_error_info(talk: Talk) -> None:
    request = to_message(talk.request(), state_pb2.BeginTurnRequest)
    request.ClearField("organ_id")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.client.state.BeginTurn(request, timeout=CALL_SECONDS)
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    kinds = [detail.type_url.rpartition("/")[2] for detail in status.details]
    assert kinds == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]


def test_the_tables_know_every_kind_of_change() -> None:
    kinds = {field.name for field in state_pb2.StateChange.DESCRIPTOR.fields}
    used = {change.__struct_config__.tag for change in every_change(Work(), "r")}
    assert used == kinds - {"close_task"}
