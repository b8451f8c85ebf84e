"""The read side and deletion: HistoryService, and what of RunService only looks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.turns import Talk, Turn, answer, new_id, refused
from tests.contract.work import Work, done
from turnfence import records as r
from turnfence.axes import CancelReason, RunState, StreamState, TaskStatus
from turnfence.codec import to_message
from turnfence.errors import Reason
from turnfence.state.v1 import history_service_pb2 as history_pb2
from turnfence.state.v1 import history_service_pb2_grpc
from turnfence.state.v1 import run_service_pb2 as runs_pb2


class Reader:
    """Somebody who reads, by default as the owner of a conversation."""

    def __init__(self, talk: Talk, *, user_id: str = "", organ_id: str = "") -> None:
        self.talk = talk
        self.who: dict[str, Any] = {"organ_id": organ_id or talk.organ_id, "user_id": user_id or talk.user_id}
        self.history: Any = history_service_pb2_grpc.HistoryServiceStub(talk.client.channel)
        self.runs: Any = talk.client.runs

    async def conversation(self) -> r.Conversation:
        asked = history_pb2.GetConversationRequest(**self.who, conversation_id=self.talk.conversation_id)
        return (await answer(self.history.GetConversation, asked, r.GetConversationResponse)).conversation

    async def conversations(self, **page: Any) -> r.ListConversationsResponse:
        asked = history_pb2.ListConversationsRequest(**self.who, **page)
        return await answer(self.history.ListConversations, asked, r.ListConversationsResponse)

    async def messages(self, **page: Any) -> r.ListMessagesResponse:
        asked = history_pb2.ListMessagesRequest(**self.who, conversation_id=self.talk.conversation_id, **page)
        return await answer(self.history.ListMessages, asked, r.ListMessagesResponse)

    async def task(self, task_id: str) -> r.TaskState:
        asked = history_pb2.GetTaskRequest(
            **self.who, conversation_id=self.talk.conversation_id, task_id=task_id
        )
        return (await answer(self.history.GetTask, asked, r.GetTaskResponse)).task

    async def tasks(self, **page: Any) -> r.ListTasksResponse:
        asked = history_pb2.ListTasksRequest(**self.who, conversation_id=self.talk.conversation_id, **page)
        return await answer(self.history.ListTasks, asked, r.ListTasksResponse)

    async def delete(self) -> None:
        asked = history_pb2.DeleteConversationRequest(**self.who, conversation_id=self.talk.conversation_id)
        await answer(self.history.DeleteConversation, asked, r.DeleteConversationResponse)

    async def list_runs(self, **page: Any) -> r.ListRunsResponse:
        return await answer(
            self.runs.ListRuns, runs_pb2.ListRunsRequest(**self.who, **page), r.ListRunsResponse
        )

    async def trace(self, run_id: str, **page: Any) -> r.ListTraceEventsResponse:
        asked = runs_pb2.ListTraceEventsRequest(**self.who, run_id=run_id, **page)
        return await answer(self.runs.ListTraceEvents, asked, r.ListTraceEventsResponse)

    async def evidence(self, run_id: str, **page: Any) -> r.ListEvidenceResponse:
        asked = runs_pb2.ListEvidenceRequest(**self.who, run_id=run_id, **page)
        return await answer(self.runs.ListEvidence, asked, r.ListEvidenceResponse)

    async def cancel(self, run_id: str) -> r.Run:
        request = r.RequestCancelRequest(**self.who, run_id=run_id, reason=CancelReason.USER_REQUESTED)
        message = to_message(request, runs_pb2.RequestCancelRequest)
        return (await answer(self.runs.RequestCancel, message, r.RequestCancelResponse)).run

    async def stream_end(self, run_id: str, state: StreamState, last: int = 3) -> bool:
        request = r.RecordStreamEndRequest(**self.who, run_id=run_id, stream_state=state, last_sequence=last)
        message = to_message(request, runs_pb2.RecordStreamEndRequest)
        return (await answer(self.runs.RecordStreamEnd, message, r.RecordStreamEndResponse)).recorded


async def worked(talk: Talk) -> tuple[Turn, Work]:
    """A turn that did something and ended: a task with a node, one write, one trace event."""
    turn, work = await talk.begin("restart it"), Work()
    await turn.flush(*work.opened())
    head = work.write(turn)
    await turn.register(head)
    await turn.settle(done(head), payload_json='{"ok":true}')
    await turn.persist(*work.suspended(), turn.reply("restarted"))
    return turn, work


# --- reading --------------------------------------------------------------------------------------


async def test_a_conversation_is_told_as_it_is_now(talk: Talk) -> None:
    reader = Reader(talk)
    turn, work = await worked(talk)
    idle = await reader.conversation()
    assert (idle.version, idle.last_trace_id, idle.active_task_id) == (1, "", work.task_id)
    second = await talk.begin("again")
    busy = await reader.conversation()
    assert (busy.version, busy.last_trace_id) == (2, second.run_id)
    assert (busy.conversation_id, busy.user_id) == (talk.conversation_id, talk.user_id)
    assert turn.run_id != second.run_id


async def test_messages_come_newest_first_page_by_page(talk: Talk) -> None:
    reader = Reader(talk)
    for number in range(5):
        turn = await talk.begin(f"question {number}")
        await turn.persist(turn.reply(f"answer {number}"))
    texts: list[str] = []
    token = ""
    for _ in range(4):
        found = await reader.messages(page_size=3, page_token=token)
        texts += [message.text for message in found.messages]
        token = found.next_page_token
    assert token == ""
    expected = [f"{word} {number}" for number in reversed(range(5)) for word in ("answer", "question")]
    assert texts == expected


async def test_conversations_tasks_and_runs_are_listed(talk: Talk) -> None:
    reader = Reader(talk)
    turn, work = await worked(talk)
    other = Talk(talk.client, organ_id=talk.organ_id)
    other.user_id = talk.user_id
    second = await other.begin("elsewhere")
    await second.persist()
    listed = await reader.conversations()
    assert {c.conversation_id for c in listed.conversations} == {talk.conversation_id, other.conversation_id}
    first_page = await reader.conversations(page_size=1)
    rest = await reader.conversations(page_size=1, page_token=first_page.next_page_token)
    assert [c.conversation_id for c in first_page.conversations + rest.conversations] == [
        other.conversation_id,
        talk.conversation_id,
    ]
    assert [task.task_id for task in (await reader.tasks()).tasks] == [work.task_id]
    assert [run.run_id for run in (await reader.list_runs()).runs] == [second.run_id, turn.run_id]
    inside = await reader.list_runs(conversation_id=talk.conversation_id)
    assert [run.run_id for run in inside.runs] == [turn.run_id]
    assert inside.runs[0] == await talk.get_run(turn.run_id)


async def test_a_task_is_told_by_the_running_turn_and_by_the_record(talk: Talk) -> None:
    reader = Reader(talk)
    _, work = await worked(talk)
    suspended = await reader.task(work.task_id)
    assert suspended.metadata.status is TaskStatus.SUSPENDED
    assert len(suspended.writes) == 1
    turn = await talk.begin("go on")
    await turn.flush(r.PutTask(task=work.task()))
    assert (await reader.task(work.task_id)).metadata.status is TaskStatus.RUNNING
    await turn.persist(work.closed())
    closed = await reader.task(work.task_id)
    assert closed.metadata.status is TaskStatus.SUCCEEDED
    assert closed.nodes[0].node_id == work.node_id


async def test_the_evidence_of_a_run_is_its_heads(talk: Talk) -> None:
    turn, _ = await worked(talk)
    (head,) = (await Reader(talk).evidence(turn.run_id)).evidence
    assert (head.tool_name, head.trace_id) == ("restart", turn.run_id)


# --- whose it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["another user", "another organisation"])
async def test_what_belongs_to_another_is_not_found(talk: Talk, who: str) -> None:
    turn, work = await worked(talk)
    stranger = Reader(
        talk,
        user_id=new_id() if who == "another user" else talk.user_id,
        organ_id="" if who == "another user" else new_id(),
    )
    for call in (
        stranger.conversation(),
        stranger.messages(),
        stranger.tasks(),
        stranger.task(work.task_id),
        stranger.trace(turn.run_id),
        stranger.evidence(turn.run_id),
        stranger.cancel(turn.run_id),
        stranger.stream_end(turn.run_id, StreamState.TERMINAL),
        stranger.list_runs(conversation_id=talk.conversation_id),
        stranger.delete(),
    ):
        await refused(call, Reason.NOT_FOUND)
    assert (await stranger.conversations()).conversations == []
    assert (await stranger.list_runs()).runs == []
    assert (await Reader(talk).conversation()).version == 1


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 201])
async def test_a_page_size_out_of_range_is_named(talk: Talk, size: int) -> None:
    error = await refused(Reader(talk).conversations(page_size=size), Reason.INVALID_REQUEST)
    assert [violation.field for violation in error.violations] == ["page_size"]


@pytest.mark.parametrize("token", ["x", "AAAA", "WyJtZXNzYWdlcyIsWzFdXQ==", "W10=", "é"])
async def test_a_page_token_of_nobody_is_named(talk: Talk, token: str) -> None:
    error = await refused(Reader(talk).conversations(page_token=token), Reason.INVALID_REQUEST)
    assert [violation.field for violation in error.violations] == ["page_token"]


# --- a run from outside ---------------------------------------------------------------------------


async def test_a_cancel_reaches_the_turn_by_its_next_heartbeat_and_the_first_reason_stays(talk: Talk) -> None:
    turn = await talk.begin()
    assert (await turn.renew()).cancel is None
    assert (await Reader(talk).cancel(turn.run_id)).run_state is RunState.RUNNING
    assert (await turn.renew()).cancel is CancelReason.USER_REQUESTED
    await turn.persist()
    assert (await Reader(talk).cancel(turn.run_id)).run_state is RunState.SUCCESS
    assert (await (await talk.begin("next")).renew()).cancel is None


async def test_the_first_end_of_a_stream_is_the_one_that_counts(talk: Talk) -> None:
    reader = Reader(talk)
    turn = await talk.begin()
    await turn.persist()
    assert await reader.stream_end(turn.run_id, StreamState.DISCONNECTED)
    assert await reader.stream_end(turn.run_id, StreamState.DISCONNECTED)
    assert not await reader.stream_end(turn.run_id, StreamState.TERMINAL)
    assert (await talk.get_run(turn.run_id)).stream_state is StreamState.DISCONNECTED


# --- deletion -------------------------------------------------------------------------------------


async def test_a_deleted_conversation_is_gone_and_stays_gone(talk: Talk) -> None:
    reader = Reader(talk)
    turn, work = await worked(talk)
    await reader.delete()
    for call in (
        reader.conversation(),
        reader.messages(),
        reader.task(work.task_id),
        reader.trace(turn.run_id),
        talk.get_run(turn.run_id),
    ):
        await refused(call, Reason.NOT_FOUND)
    assert (await reader.conversations()).conversations == []
    await refused(talk.begin("again"), Reason.CONVERSATION_DELETED)
    await reader.delete()  # a repeat finds nothing left to do


async def test_a_deletion_does_not_wait_and_the_running_turn_writes_nothing_any_more(talk: Talk) -> None:
    reader, work = Reader(talk), Work()
    turn = await talk.begin()
    await turn.flush(*work.opened())
    head = work.write(turn)
    await turn.register(head)
    await reader.delete()
    await refused(turn.flush(work.note("late")), Reason.STATE_FENCED)
    await refused(turn.register(work.write(turn)), Reason.STATE_FENCED)
    await refused(turn.settle(done(head)), Reason.STATE_FENCED)
    await refused(turn.persist(), Reason.STATE_FENCED)
    await refused(turn.renew(), Reason.STATE_FENCED)
    await turn.abandon()
    await refused(talk.get_run(turn.run_id), Reason.NOT_FOUND)
    await refused(talk.begin("again"), Reason.CONVERSATION_DELETED)


async def test_a_conversation_of_another_with_the_same_id_survives(talk: Talk) -> None:
    twin = Talk(talk.client, conversation_id=talk.conversation_id)
    await worked(twin)
    await worked(talk)
    await Reader(talk).delete()
    assert len((await Reader(twin).messages()).messages) == 2
