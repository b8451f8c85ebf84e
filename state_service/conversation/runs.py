"""Runs as others see them: one run's axes, and its events as they come (RunService)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from state_service.conversation.stores import Stores
from state_service.core import hot, keys
from state_service.core.changes import Outcome
from state_service.core.members import commit as commit_member
from state_service.ports import Read, Scope
from turnfence import records as r
from turnfence.axes import Durability, RunState
from turnfence.errors import Reason, TurnfenceError

POLL_MS = 1000  # how long one wait for events lasts before the run's end is looked at again


async def get_run(stores: Stores, request: r.GetRunRequest) -> r.Run:
    """Every axis of a run: from SQL when it has ended there, else live from Redis. Raises NOT_FOUND
    for an unknown run and for another user's alike."""
    run = await stores.cold.run(request.organ_id, request.user_id, request.run_id)
    if run is None:
        raise TurnfenceError(Reason.NOT_FOUND)
    if run.run_state is not RunState.RUNNING:
        return run
    return await live_run(stores, Scope(request.organ_id, run.conversation_id), run)


async def live_run(stores: Stores, scope: Scope, run: r.Run) -> r.Run:
    """A run that SQL has as RUNNING, as Redis knows it: PENDING when it is prepared already."""
    prepared, live = await stores.hot.read(
        scope,
        [
            Read("HGET", keys.OUTBOX, (commit_member(run.run_id),)),
            Read("GET", keys.run(run.run_id)),
        ],
    )
    if prepared:
        ended = hot.decode(prepared, Outcome).run
        return msgspec.structs.replace(ended, durability=Durability.PENDING)
    if live:
        return hot.decode(live, r.Run)
    return run


async def watch_events(stores: Stores, request: r.WatchEventsRequest) -> AsyncGenerator[r.TurnEvent | r.Run]:
    """The run's events after a sequence as they come, then the ended run. Events that are no longer
    kept are named by a Gap; the closing events are always there. Raises NOT_FOUND."""
    asked = r.GetRunRequest(organ_id=request.organ_id, user_id=request.user_id, run_id=request.run_id)
    run = await get_run(stores, asked)
    scope = Scope(request.organ_id, run.conversation_id)
    cursor = request.after_sequence
    while True:
        ended = has_ended(run)
        found = await stores.hot.wait_events(scope, request.run_id, cursor, block_ms=1 if ended else POLL_MS)
        for sequence, text in found:
            if sequence > cursor + 1:
                yield _gap(run, cursor, sequence)
            yield hot.decode(text, r.TurnEvent)
            cursor = sequence
        if not found and ended:
            break
        if not found or not ended:
            run = await get_run(stores, asked)
    for event in await stores.cold.closing_events(request.organ_id, request.run_id):
        if event.sequence <= cursor:
            continue
        if event.sequence > cursor + 1:
            yield _gap(run, cursor, event.sequence)
        yield event
        cursor = event.sequence
    yield run


def has_ended(run: r.Run) -> bool:
    return run.run_state not in (None, RunState.RUNNING)


def _gap(run: r.Run, cursor: int, next_sequence: int) -> r.TurnEvent:
    return r.TurnEvent(
        sequence=next_sequence - 1,
        run_id=run.run_id,
        conversation_id=run.conversation_id,
        kind=r.Gap(from_sequence=cursor + 1, to_sequence=next_sequence - 1),
    )
