"""The read side: what a user may see of conversations, tasks and runs (RunService, HistoryService).

What belongs to another user, or to another organisation, answers NOT_FOUND: its existence is no one's
business. Lists tell what SQL has; the running turn is seen by GetConversation, GetTask and GetRun.
"""

from __future__ import annotations

from state_service.conversation import runs
from state_service.conversation.stores import Stores
from state_service.core import hot, keys
from state_service.core.changes import write_entry
from state_service.core.paging import page, token
from state_service.ports import ConversationRow, Read, Scope, TaskRows
from turnfence import records as r
from turnfence.axes import SideEffect, StreamState
from turnfence.errors import Reason, TurnfenceError, invalid


async def _owned(stores: Stores, organ_id: str, user_id: str, conversation_id: str) -> ConversationRow:
    row = await stores.cold.conversation(Scope(organ_id, conversation_id))
    if row is None or row.deleted or row.user_id != user_id:
        raise TurnfenceError(Reason.NOT_FOUND)
    return row


async def _owned_run(stores: Stores, organ_id: str, user_id: str, run_id: str) -> r.Run:
    run = await stores.cold.run(organ_id, user_id, run_id)
    if run is None:
        raise TurnfenceError(Reason.NOT_FOUND)
    return run


# --- conversations --------------------------------------------------------------------------------


async def get_conversation(stores: Stores, request: r.GetConversationRequest) -> r.GetConversationResponse:
    """The conversation as it is now, with the turn under way. Raises NOT_FOUND."""
    row = await _owned(stores, request.organ_id, request.user_id, request.conversation_id)
    (state,) = await stores.hot.read(
        Scope(request.organ_id, request.conversation_id), [Read("HGETALL", keys.STATE)]
    )
    live = "dataVersion" in state
    return r.GetConversationResponse(
        conversation=r.Conversation(
            conversation_id=request.conversation_id,
            user_id=row.user_id,
            active_task_id=state.get("activeTaskId", "") if live else row.active_task_id,
            version=max(row.fence_version, int(state.get("version") or 0)),
            last_trace_id=state.get("lastTraceId", ""),
            title=state.get("title", row.title) if live else row.title,
            updated_at=int(state["updatedAt"]) if state.get("updatedAt") else row.updated_at,
        )
    )


async def list_conversations(
    stores: Stores, request: r.ListConversationsRequest
) -> r.ListConversationsResponse:
    asked = page("conversations", request.page_size, request.page_token)
    found, cursor = await stores.history.conversations(request.organ_id, request.user_id, asked)
    return r.ListConversationsResponse(found, token("conversations", cursor))


async def list_messages(stores: Stores, request: r.ListMessagesRequest) -> r.ListMessagesResponse:
    """Raises NOT_FOUND."""
    asked = page("messages", request.page_size, request.page_token)
    await _owned(stores, request.organ_id, request.user_id, request.conversation_id)
    scope = Scope(request.organ_id, request.conversation_id)
    found, cursor = await stores.history.messages(scope, asked)
    return r.ListMessagesResponse(found, token("messages", cursor))


# --- tasks ----------------------------------------------------------------------------------------


async def get_task(stores: Stores, request: r.GetTaskRequest) -> r.GetTaskResponse:
    """The task as the running turn has it, else as SQL has it. Raises NOT_FOUND."""
    await _owned(stores, request.organ_id, request.user_id, request.conversation_id)
    scope = Scope(request.organ_id, request.conversation_id)
    live = hot.task(await stores.hot.read(scope, hot.task_reads(request.task_id)))
    if live is not None:
        return r.GetTaskResponse(task=hot.task_state(live))
    rows = await stores.cold.load_task(scope, request.task_id)
    if rows is None:
        raise TurnfenceError(Reason.NOT_FOUND)
    return r.GetTaskResponse(task=_task_of(rows))


def _task_of(rows: TaskRows) -> r.TaskState:
    """A task as SQL has it; of two calls with one key the later one counts."""
    calls = sorted(rows.calls, key=lambda head: head.started_at or 0)
    return r.TaskState(
        metadata=rows.metadata,
        nodes=list(rows.nodes),
        edges=list(rows.edges),
        checkpoint=rows.checkpoint,
        shared=rows.shared,
        prior=rows.prior,
        writes={
            keys.write_field(head.tool_name, head.idempotency_key): write_entry(head)
            for head in calls
            if head.side_effect is SideEffect.WRITE and head.idempotency_key
        },
    )


async def list_tasks(stores: Stores, request: r.ListTasksRequest) -> r.ListTasksResponse:
    """Raises NOT_FOUND."""
    asked = page("tasks", request.page_size, request.page_token)
    await _owned(stores, request.organ_id, request.user_id, request.conversation_id)
    scope = Scope(request.organ_id, request.conversation_id)
    found, cursor = await stores.history.tasks(scope, asked)
    return r.ListTasksResponse(found, token("tasks", cursor))


# --- runs -----------------------------------------------------------------------------------------


async def list_runs(stores: Stores, request: r.ListRunsRequest) -> r.ListRunsResponse:
    """The user's runs; a conversation that is named must be the user's. Raises NOT_FOUND."""
    listing = f"runs:{request.conversation_id}"
    asked = page(listing, request.page_size, request.page_token)
    if request.conversation_id:
        await _owned(stores, request.organ_id, request.user_id, request.conversation_id)
    found, cursor = await stores.history.runs(
        request.organ_id, request.user_id, request.conversation_id, asked
    )
    return r.ListRunsResponse(found, token(listing, cursor))


async def list_trace_events(stores: Stores, request: r.ListTraceEventsRequest) -> r.ListTraceEventsResponse:
    """Raises NOT_FOUND."""
    asked = page("trace", request.page_size, request.page_token)
    await _owned_run(stores, request.organ_id, request.user_id, request.run_id)
    found, cursor = await stores.history.trace(request.organ_id, request.run_id, asked)
    return r.ListTraceEventsResponse(found, token("trace", cursor))


async def list_evidence(stores: Stores, request: r.ListEvidenceRequest) -> r.ListEvidenceResponse:
    """Raises NOT_FOUND."""
    asked = page("evidence", request.page_size, request.page_token)
    await _owned_run(stores, request.organ_id, request.user_id, request.run_id)
    found, cursor = await stores.history.evidence(request.organ_id, request.run_id, asked)
    return r.ListEvidenceResponse(found, token("evidence", cursor))


async def record_stream_end(stores: Stores, request: r.RecordStreamEndRequest) -> r.RecordStreamEndResponse:
    """How the caller's stream really ended: it outlives the turn, so it needs no fence. Raises NOT_FOUND."""
    if request.stream_state not in (StreamState.TERMINAL, StreamState.DISCONNECTED):
        raise invalid("stream_state", "must be TERMINAL or DISCONNECTED")
    await _owned_run(stores, request.organ_id, request.user_id, request.run_id)
    recorded = await stores.history.record_stream_end(
        request.organ_id, request.run_id, request.stream_state, request.last_sequence
    )
    return r.RecordStreamEndResponse(recorded=recorded)


async def request_cancel(stores: Stores, request: r.RequestCancelRequest) -> r.RequestCancelResponse:
    """Ask whoever executes the run to stop: its next heartbeat brings the reason. A run that has ended, or
    that nobody executes any more, is answered as it is. Raises NOT_FOUND."""
    if request.reason is None:
        raise invalid("reason", "is required")
    asked = r.GetRunRequest(organ_id=request.organ_id, user_id=request.user_id, run_id=request.run_id)
    run = await runs.get_run(stores, asked)
    if not runs.has_ended(run):
        scope = Scope(request.organ_id, run.conversation_id)
        await stores.hot.request_cancel(scope, request.run_id, request.reason.value)
    return r.RequestCancelResponse(run=run)
